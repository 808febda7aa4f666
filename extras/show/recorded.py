"""What a run has recorded of its episodes, read back for its page: texts, turns, calls and arrays.

    Log       a file of episodes, step by step
    Reader    a row of trajectories.jsonl and one of tokens.jsonl -> an episode's data
"""
import base64
import math
import re
from itertools import pairwise

import numpy as np

from core.config import reading
from core.data import parse_object
from envs.transcripts import transcript
from extras.show.record import unpacked

MAX_EPISODES = 128  # of a step, on a page
# A column of tokens.jsonl: its name on the page.
COLUMNS = {"advantages": "advantage", "old": "old", "new": "new", "ref": "ref",
           "entropy": "entropy", "weight": "weight"}
CLIPPED = {"grpo", "dapo", "dr_grpo", "gspo", "luspo"}  # losses with a clip range


class Log:
    """A file of episodes, which is read step by step.

    Attributes:
        places: {step: [(number of the line, where it begins in the file)]}
    """

    def __init__(self, path):
        self.path, self.places = path, {}
        offset = 0
        with reading(path):
            lines = open(path, "rb") if path.is_file() else ()
            for number, line in enumerate(lines, 1):
                step = re.match(rb'\{"step": (\d+)', line)
                if line.strip():
                    step = int(step[1]) if step else 0
                    self.places.setdefault(step, []).append((number, offset))
                offset += len(line)

    def rows(self, step):
        """Yield (number of the line, row) of a step, up to MAX_EPISODES.

        A last line that was cut when the run was killed is left out.
        """
        for number, offset in self.places.get(step, ())[:MAX_EPISODES]:
            with reading(self.path, number), open(self.path, "rb") as file:
                file.seek(offset)
                line = file.readline()
                try:
                    row = parse_object(line.decode())
                except ValueError:
                    if line.endswith(b"\n"):
                        raise
                    return
            yield number, row


class Reader:
    """A function from a row of trajectories.jsonl and one of tokens.jsonl to an episode's data."""

    def __init__(self, tokenizer, flags):
        self.tokenizer, self.flags = tokenizer, flags

    def __call__(self, row, recorded=()):
        ids, mask = row["token_ids"], row["loss_mask"]
        trained = [t for t, m in enumerate(mask) if m]
        sampled = np.array([row["logprobs"][t] for t in trained], np.float32)
        columns = {name: list(map(unpacked, recorded[name]))
                   for name in COLUMNS if name in recorded}
        if "new" in columns and not sampled.any():
            # Nobody sampled a demonstration: its probabilities are the policy's.
            sampled = columns["new"][0]
        turns, tokens = turns_of(row), token_texts(self.tokenizer, ids)
        if not ids or not self.tokenizer:
            turns = [{"role": "transcript", "start": 0, "end": 1, "trained": False}]
            tokens, ids, trained, recorded = [transcript(row)], [0], [], {}
        # What is no number raises TypeError.
        math.fsum([row["reward"], *row["rewards"], *row["reward_parts"].values()])
        advantages = columns.get("advantages", [sampled[:0]])[0]
        data = {"reward": row["reward"], "parts": row["reward_parts"],
                "turn_rewards": row["rewards"], "stop_reason": str(row.get("stop_reason")),
                "success": row["info"].get("success"),
                "advantage": float(advantages.mean()) if len(advantages) else None,
                "tokens": tokens, "ids": ids, "turns": turns, "at": trained,
                "calls": calls_of(row, turns), "sampled_f32": as_text(sampled),
                "updates": self.updates(columns, sampled) if recorded else []}
        if "ref_sum" in recorded:
            sums = [unpacked(recorded[name][0]).sum() for name in ("new", "ref_sum")]
            data["log_ratio"] = float(sums[0] - sums[1])
        return data

    def updates(self, columns, sampled):
        """Return the numbers of the tokens in the first update, and what differs in the last."""
        updates, values = [], {"old": sampled}  # the ratio's denominator where it is not recorded
        for number in (0, (self.flags.get("updates_per_step") or 2) - 1):
            given = {name: passes.pop(0) for name, passes in columns.items() if passes}
            if given:
                values |= given
                texts = {f"{COLUMNS[name]}_f32": as_text(x) for name, x in given.items()}
                updates.append({"update": number, **texts, "clipped": self.clipped(values)})
        return updates

    def clipped(self, values):
        """Return 1 for each token whose gradient the clip range of --loss stops; None without."""
        loss = self.flags.get("loss")
        if not {"advantages", "new"} <= values.keys() or loss not in CLIPPED:
            return None
        log_ratio = values["new"] - values["old"]
        if loss in ("gspo", "luspo") and len(log_ratio):
            log_ratio = np.full_like(log_ratio, log_ratio.mean())
        ratio, better = np.exp(log_ratio), values["advantages"] > 0
        worse = values["advantages"] < 0
        low, high = 1 - self.flags["clip_eps_low"], 1 + self.flags["clip_eps_high"]
        return ((ratio < low) & worse | (ratio > high) & better).astype(int).tolist()


def as_text(values):
    """Return float32s as base64, little end first."""
    return base64.b64encode(values.astype("<f4").tobytes()).decode()


def turns_of(row):
    """Return the stretches of an episode's tokens, sampled or not, and whose they are."""
    mask, turns = row["loss_mask"], []
    for t, m in enumerate(mask):
        if not turns or turns[-1]["trained"] != bool(m):
            turns.append({"role": "assistant", "start": t, "trained": bool(m)})
        turns[-1]["end"] = t + 1
    # What precedes a sampled turn is of the messages before it, and an end of roles like theirs.
    roles = "".join({"assistant": "a", "tool": "t"}.get(m["role"], "u") for m in row["messages"])
    context = [turn for turn in turns[:-1] if not turn["trained"]]
    before = re.findall("[^a]+(?=a)", roles)
    if turns and not turns[-1]["trained"] and roles[-1] != "a":
        context.append(turns[-1])
        before.append(roles[-1])
    for turn, theirs in zip(reversed(context), reversed(before)):
        turn["role"] = "tool" if "t" in theirs else "user"
    return turns


def calls_of(row, turns):
    """Return the tool calls of an episode with their results."""
    trained = [i for i, turn in enumerate(turns) if turn["trained"]]
    spoken = sum(m["role"] == "assistant" for m in row["messages"])
    turn, waiting, calls = len(trained) - spoken - 1, [], []
    for message in row["messages"]:
        text = str(message["content"])
        if message["role"] == "assistant":
            turn, waiting = turn + 1, list(message.get("tool_calls") or ())
        if message["role"] == "tool" and turn >= 0 and trained:
            call = waiting.pop(0) if waiting and message.get("name") != "" else {}
            is_error = not call or text.startswith("error:")
            calls.append({"turn": trained[turn], "name": call.get("name", "unreadable call"),
                          "arguments": call.get("arguments", {}), "result": text,
                          "error": is_error})
    return calls


def states_of(row, turns):
    """Return as text what each sampled turn was decided by, for --credit gigpo.

    It is what the environment's `_state()` returned, or else the tokens before the turn. Turns that
    had none, after a late tool, are alone in their states.
    """
    before = [row["token_ids"][context["start"]:context["end"]]
              for context, turn in pairwise(turns) if turn["trained"]]
    states = row["info"].get("states", before)
    alone = [(id(row), turn) for turn in range(len(states), len(before))]
    return list(map(str, [*states, *alone]))


def load_tokenizer(folder):
    """Return the tokenizer of the run's newest checkpoint, or None."""
    files = sorted(folder.glob("checkpoints/step_*/tokenizer.json"))
    file = files[-1] if files else folder / "tokenizer.json"
    if not file.is_file():
        return None
    from tokenizers import Tokenizer
    with reading(file):
        return Tokenizer.from_file(str(file))


def token_texts(tokenizer, ids):
    """Return the text that each id adds, "·" where it only begins a character."""
    from tokenizers.decoders import DecodeStream
    if not tokenizer:
        return []
    stream = DecodeStream(skip_special_tokens=False)
    return [stream.step(tokenizer, i) or "·" for i in ids]
