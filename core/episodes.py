"""Episodes: what is wrong with one, one as text to read, and many of them in numbers."""
import json
import math
from collections import Counter, defaultdict

from core.bars import say_once
from core.errors import UserError, printable


def members(ids) -> list[list[int]]:
    """Return the indices of each id, in the order of their first appearance."""
    indices = defaultdict(list)
    # The elements of a tensor are hashed by identity: each would be alone in its group.
    for i, name in enumerate(ids.tolist() if hasattr(ids, "tolist") else ids):
        indices[name].append(i)
    return list(indices.values())


def message_lines(messages: list[dict]) -> list[str]:
    """Return messages as lines. Results follow their turn; those in a prompt have no reward."""
    lines = []
    calls = []
    for message in messages:
        if message["role"] == "tool":
            is_read = calls and message.get("name") != ""
            call = call_text(calls.pop(0)) if is_read else "unreadable call"
            lines.append(f"{call} -> {message['content']}   {round(message.get('reward', 0), 3):+}")
            continue
        calls = list(message.get("tool_calls") or [])
        if message["content"]:
            lines.append(f"{message['role'].capitalize()}: {message['content']}")
    return [printable(line) for line in lines]


def call_text(call: dict) -> str:
    """Return a tool call as Python would write it, add_terms(terms="1")."""
    arguments = [f"{name}={json.dumps(value, ensure_ascii=False)}"
                 for name, value in call["arguments"].items()]
    return f"{call['name']}({', '.join(arguments)})"


def transcript(episode: dict) -> str:
    """Return the lines of an episode (a row of trajectories.jsonl), and how it ended."""
    end = (f"[{episode.get('stop_reason')}; success {episode['info'].get('success')}; "
           f"reward {episode['reward']:.2f}]")
    return "\n".join([*message_lines(episode["messages"]), printable(end)])


def problem(episode: dict) -> str | None:
    """Return why no algorithm may learn from an episode (agent.Trajectory as a dict), or None.

    Raises TypeError or AttributeError for a field of another type.
    """
    for name, kind in (("group_id", str | int), ("info", dict), ("messages", list)):
        if not isinstance(episode[name], kind):
            return f"{name} is a {type(episode[name]).__name__}"
    token_ids, loss_mask = episode["token_ids"], episode["loss_mask"]
    lengths = len(token_ids), len(loss_mask), len(episode["logprobs"])
    if not token_ids or len(set(lengths)) > 1:
        return f"token_ids, loss_mask, logprobs have lengths {lengths}"
    if not all(type(token) is int and token >= 0 for token in token_ids):
        return "token_ids must be integers >= 0"
    if not all(type(flag) is int and flag in (0, 1) for flag in loss_mask):
        return "loss_mask must be 0 or 1"
    if loss_mask[0] == 1:
        return "loss_mask[0] is 1, but nothing precedes the first token"
    numbers = [*episode["logprobs"], episode["reward"], *episode["rewards"],
               *episode["reward_parts"].values()]
    if not all(map(is_finite, numbers)):
        return "logprobs and rewards must be finite numbers"
    return None


def unusable(episodes: list) -> str | None:
    """Return why no step can learn from these episodes, or None."""
    if not episodes:
        return "there is no episode to learn from"
    for t in episodes:
        if not math.isfinite(t.reward):
            return t.info.get("not_finite", f"reward {t.reward}")
    return None


def is_finite(number) -> bool:
    """True for a number that arithmetic does not overflow, False for NaN and infinity."""
    return type(number) in (int, float) and -1e300 < number < 1e300


def summarise(trajectories: list) -> dict:
    """Return shares from 0 to 1, and rewards and counts as means per episode."""
    def mean(values):
        values = list(values)
        return sum(values) / len(values)

    def total(name):
        return sum(t.info.get(name, 0) for t in trajectories)

    # The success in each environment, and the parts of the reward.
    solved, parts = defaultdict(list), defaultdict(list)
    for t in trajectories:
        solved[f"success/{t.info.get('env')}"].append(t.info["success"])
        for name, part in t.reward_parts.items():
            parts[f"reward/{name}"].append(part)
    n = len(trajectories)
    turns = sum(len(t.rewards) for t in trajectories)
    tried = total("tool_calls") + total("unreadable_calls")
    return {
        "episodes": n,
        "success": mean(t.info["success"] for t in trajectories),
        **{name: mean(values) for name, values in solved.items() if len(solved) > 1},
        "reward": mean(t.reward for t in trajectories),
        **{name: mean(parts[name]) for name in sorted(parts)},
        "turns": turns / n,
        "actions": total("tool_calls") / n,
        "structure": total("parsed_turns") / max(turns, 1),
        "completion": mean(t.stop_reason == "done" for t in trajectories),
        "tool_errors": total("tool_errors") / max(tried, 1),
        "tool_timeouts": total("timeouts") / n,
        "tokens": mean(len(t.token_ids) for t in trajectories),
        "sampled_tokens": mean(sum(t.loss_mask) for t in trajectories),
        "truncated": mean(t.truncated for t in trajectories),
        "errors": mean(t.stop_reason == "error" for t in trajectories),
    }


def pass_at_k(trajectories: list) -> dict:
    """Return the mean over tasks of the unbiased pass@k (arXiv 2107.03374, eq. 1).

    If c of the G episodes of a task succeeded, it is 1 - C(G - c, k) / C(G, k).
    """
    groups = members(t.group_id for t in trajectories)
    successes = [[trajectories[i].info["success"] for i in group] for group in groups]
    out = {}
    for k in range(1, min(map(len, successes)) + 1):
        solved = [1 - math.comb(len(s) - sum(s), k) / math.comb(len(s), k) for s in successes]
        out[f"pass@{k}"] = sum(solved) / len(solved)
    return out


def without_too_long(trajectories: list, limits, or_raise: bool = True) -> list:
    """Drop the episodes that could not start, and print how many were dropped or failed.

    A note names a limit that is no flag (`envs.Limits`) and that more than a fifth met. Raises
    UserError if no episode could start, unless `or_raise` is False.
    """
    max_tokens = limits.max_tokens
    kept = [t for t in trajectories if t.stop_reason or len(t.token_ids) < max_tokens]
    if or_raise and trajectories and not kept:
        shortest = min(len(t.token_ids) for t in trajectories)
        raise UserError(f"environment {trajectories[0].info['env']}: the prompt has {shortest} "
                        f"tokens, --max_tokens is {max_tokens}")
    print_dropped(trajectories, kept,
                  f"episodes dropped: the prompt alone reaches --max_tokens {max_tokens}")
    failed = [t.info["error"] for t in kept if t.stop_reason == "error"]
    if failed:
        print(f"{len(failed)} of {len(kept)} episodes ended by a fault of their environment; "
              f"the first: {failed[0]}")
    met = Counter(t.stop_reason for t in kept)
    met["tool_timeout"] = sum(t.info["timeouts"] > 0 for t in kept)
    for name in ("max_tool_calls", "max_tool_tokens", "tool_timeout"):
        if met[name] > 0.2 * len(kept):
            say_once(f"note: more than a fifth of the episodes played at once met {name} "
                     f"{getattr(limits, name)}; the environment may state more in its `limits`")
    return kept


def print_dropped(items: list, kept: list, words: str):
    """Print how many of the items were not kept. `words` say what they are, and why."""
    if len(kept) < len(items):
        print(f"{len(items) - len(kept)} of {len(items)} {words}")


def played_shares(trajectories: list) -> dict:
    """Return shares of all that a step played, of faults and groups that are dropped, too."""
    n = max(len(trajectories), 1)
    return {"played_success": sum(t.info["success"] for t in trajectories) / n,
            "errors": sum(t.stop_reason == "error" for t in trajectories) / n}


def without_faults(trajectories: list) -> list:
    """Return the episodes that have a valid reward: those whose environment did not fail."""
    return [t for t in trajectories if t.stop_reason != "error"]


def shift_and_scale(trajectories: list, config):
    """Set reward = (reward - bias) x scaling, for training and its logs. Turns share the bias.

    The "reward" of a tool's message stays what the environment paid for that call.
    """
    bias, scaling = config.reward_bias, config.reward_scaling
    for t in trajectories:
        t.rewards = [(reward - bias / len(t.rewards)) * scaling for reward in t.rewards]
        t.reward = (t.reward - bias) * scaling
