"""Files of text and JSON, groups of episodes, batches of them, and many episodes in numbers.

Every failure to read a file becomes one line, `FILE:LINE: what is wrong`.
"""
import json
import math
import zlib
from collections import defaultdict
from itertools import chain
from statistics import fmean

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from core.config import mix, reading

MAX_RESAMPLE = 3  # rounds of replacement of groups outside the success-rate band
# extras/data fills these: arguments of json.loads, functions that give messages our names, and
# functions that fill the tables of the module envs/task_files.py.
JSON_RULES, MESSAGE_FORMS, ROW_TABLES = {}, [], []


# ------------------------------------------------------------------------------------------- files
def lines_of(path):
    """Yield (line number, text) for every line of a UTF-8 file. Only newlines end a line."""
    with reading(path), open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            with reading(path, number):
                # Spreadsheets begin a file with a byte order mark.
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            yield number, text


def read_text(path):
    """Return the text of a UTF-8 file."""
    return "".join(text for _, text in lines_of(path))


def parse_object(text: str, **rules) -> dict:
    """Return the JSON object that the text holds, or raise ValueError."""
    value = json.loads(text, **JSON_RULES | rules)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def read_json(path) -> dict:
    """Return the one JSON object that a file holds."""
    with reading(path):
        return parse_object(read_text(path))


def without_surrogates(text: str) -> str:
    """Return the text without lone surrogates, which no tokenizer and no UTF-8 file takes."""
    return text.encode("utf-8", "replace").decode()


def json_value(value):
    """Return the value as JSON holds it: None for what is not finite, scalar tensors as numbers."""
    if isinstance(value, dict):
        return {without_surrogates(str(key)): json_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return list(map(json_value, value))
    if isinstance(value, str):
        return without_surrogates(value)
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def json_of(content) -> str:
    """Return the JSON by which two contents are compared."""
    return json.dumps(json_value(content), sort_keys=True)


def to_json(value, indent=None):
    """Return the value as strict JSON, with a newline at the end."""
    return json.dumps(json_value(value), indent=indent, allow_nan=False) + "\n"


def split_of(text: str) -> str:
    """Return "test" for a tenth of all texts, by their hash, else "train": none changes sides."""
    return "train" if zlib.crc32(text.encode()) % 10 else "test"


def print_dropped(before: list, after: list, words: str):
    """Print how many items were dropped from a list. `words` say what they are, and why."""
    if len(after) < len(before):
        print(f"{len(before) - len(after)} of {len(before)} {words}")


def shuffled(items, seed, part=slice(None)):
    """Return the items in random order, or only a part of them."""
    return [items[i] for i in np.random.default_rng(seed).permutation(len(items))[part]]


# ------------------------------------------------------------------------------------------ groups
def draw_tasks(tasks, seed: int, step: int, tasks_per_step: int, first: int, n: int) -> list[dict]:
    """Return the candidates number `first` to `first + n - 1` of a step, a function of the seed.

    The first `tasks_per_step` are the epoch's next tasks in shuffled order, and where it ends, the
    first ones of the next epoch; more are drawn at random.
    """
    if first:
        return [tasks[mix(seed, step, k) % len(tasks)] for k in range(first, first + n)]
    epoch, place = divmod(step * tasks_per_step, len(tasks))
    drawn = shuffled(tasks, [seed, epoch], slice(place, place + n))
    while len(drawn) < n:
        epoch += 1
        drawn += shuffled(tasks, [seed, epoch], slice(n - len(drawn)))
    return drawn


def members(ids) -> list[list[int]]:
    """Return the indices of each id, in the order of their first appearance."""
    indices = defaultdict(list)
    # The elements of a tensor are hashed by identity: each would be alone in its group.
    for i, name in enumerate(ids.tolist() if hasattr(ids, "tolist") else ids):
        indices[name].append(i)
    return list(indices.values())


def by_group(trajectories: list) -> list[list]:
    """Return the episodes of each group, in the order of their first appearance."""
    return [[trajectories[i] for i in rows] for rows in members([t.group_id for t in trajectories])]


def collect_groups(play, tasks, config, step, run, draw=draw_tasks):
    """Play the step's groups, and replace those outside the success-rate band by other tasks'.

    `play(tasks, group_size, step=, first_task=)` is `rollout` with the rest bound. Returns the kept
    episodes, group after group, their rewards shifted and scaled. They are fewer if prompts are too
    long, environments fail, or MAX_RESAMPLE rounds do not suffice.
    """
    played, kept = [], []  # episodes
    drawn = dropped = 0  # groups
    for _ in range(1 + MAX_RESAMPLE):
        missing = config.tasks_per_step + dropped - drawn
        if not missing:
            break
        fresh = draw(tasks, config.seed, step, config.tasks_per_step, drawn, missing)
        # first_task gives every candidate a group id and random numbers of its own.
        episodes = play(fresh, config.group_size, step=step, first_task=drawn)
        played += episodes
        drawn += missing
        for group in by_group(without_faults(episodes)):
            rate = sum(t.info["success"] for t in group) / len(group)
            # A NaN is kept, too: `unusable` reports it, and the step is skipped.
            broken = any(math.isnan(t.reward) for t in group)
            if broken or config.success_rate_lb <= rate <= config.success_rate_ub:
                kept += group
            else:
                dropped += 1
    run.log(groups_dropped=dropped, **played_shares(played))
    shift_and_scale(kept, config)
    return kept


def played_shares(trajectories: list) -> dict:
    """Return shares of all that a step played, of faults and groups that are dropped, too."""
    n = max(len(trajectories), 1)
    return {"played_success": sum(t.info["success"] for t in trajectories) / n,
            "errors": sum(t.stop_reason == "error" for t in trajectories) / n}


def without_faults(trajectories: list) -> list:
    """Return the episodes that have a valid reward: those whose environment did not fail."""
    return [t for t in trajectories if t.stop_reason != "error"]


def shift_and_scale(trajectories: list, config):
    """Set reward = (reward - bias) x scaling, for training and its logs. The end pays the bias.

    The "reward" of a tool's message stays what the environment paid for that call.
    """
    for t in trajectories:
        biases = [0.0] * (len(t.rewards) - 1) + [config.reward_bias]  # all returns-to-go get it
        t.rewards = [(r - bias) * config.reward_scaling for r, bias in zip(t.rewards, biases)]
        t.reward = (t.reward - config.reward_bias) * config.reward_scaling


def group_shares(batch, advantages):
    """Return the shares of a step's groups that all succeed, all fail, differ, or teach nothing."""
    groups = members([t.group_id for t in batch])
    right = wrong = silent = 0
    for indices in groups:
        successes = [batch[i].info["success"] for i in indices]
        right += all(successes)
        wrong += not any(successes)
        silent += not any(advantages[i].any() for i in indices)
    n = len(groups)
    return {"groups_all_right": right / n, "groups_all_wrong": wrong / n,
            "groups_mixed": 1 - right / n - wrong / n, "groups_without_signal": silent / n}


# ---------------------------------------------------------------------------------------- episodes
def is_finite(number) -> bool:
    """True for a number that arithmetic does not overflow, False for NaN and infinity."""
    return type(number) in (int, float) and -1e300 < number < 1e300


def unusable(episodes: list) -> str | None:
    """Return why no step can learn from these episodes, or None."""
    if not episodes:
        return "there is no episode to learn from"
    bad = [t for t in episodes if not math.isfinite(t.reward)]
    return bad[0].info.get("not_finite", f"reward {bad[0].reward}") if bad else None


def summarise(trajectories: list) -> dict:
    """Return the number of episodes, shares from 0 to 1, rewards and counts as their means."""
    def total(name):
        return sum(t.info.get(name, 0) for t in trajectories)

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
        "success": fmean(t.info["success"] for t in trajectories),
        **{name: fmean(values) for name, values in solved.items() if len(solved) > 1},
        "reward": fmean(t.reward for t in trajectories),
        **{name: fmean(parts[name]) for name in sorted(parts)},
        "turns": turns / n,
        "actions": total("tool_calls") / n,
        "structure": total("parsed_turns") / max(turns, 1),
        "completion": fmean(t.stop_reason == "done" for t in trajectories),
        "tool_errors": total("tool_errors") / max(tried, 1),
        "tool_timeouts": total("timeouts") / n,
        "tokens": fmean(len(t.token_ids) for t in trajectories),
        "sampled_tokens": fmean(sum(t.loss_mask) for t in trajectories),
        "truncated": fmean(t.truncated for t in trajectories),
        "errors": fmean(t.stop_reason == "error" for t in trajectories),
    }


def pass_at_k(trajectories: list) -> dict:
    """Return the mean over tasks of the unbiased pass@k (arXiv 2107.03374, eq. 1).

    If c of the G episodes of a task succeeded, it is 1 - C(G - c, k) / C(G, k).
    """
    counts = [(len(group), sum(t.info["success"] for t in group))  # (G, c) of each task
              for group in by_group(trajectories)]
    return {f"pass@{k}": fmean(1 - math.comb(G - c, k) / math.comb(G, k) for G, c in counts)
            for k in range(1, min(counts)[0] + 1)}


# ----------------------------------------------------------------------------------------- batches
def shuffled_batches(items: list, size: int, *seed: int) -> list[list]:
    """Return one pass over the items in random order, in batches of at most `size`."""
    return even_batches(shuffled(items, seed), size)


def even_batches(items: list, size: int) -> list[list]:
    """Return the items in batches of at most `size`, as even as possible: none has only a few."""
    parts = np.array_split(np.arange(len(items)), math.ceil(len(items) / size))
    return [[items[i] for i in places] for places in parts]


def batches_of_like_length(episodes: list, size: int, *seed: int) -> list[list]:
    """Return `shuffled_batches`, but similar lengths share a batch, which saves padding."""
    rng = np.random.default_rng(seed)
    in_random_order = [episodes[i] for i in rng.permutation(len(episodes))]
    batches = []
    for pool in even_batches(in_random_order, 16 * size):
        batches += even_batches(sorted(pool, key=lambda t: len(t.token_ids)), size)
    return [batches[i] for i in rng.permutation(len(batches))]


def pass_order(trajectories: list, batch_size: int) -> list:
    """Return the episodes in the order of forward passes: groups, whose prompt is forwarded once.

    The longest come first: what does not fit fails early. extras/fast uses the batch size.
    """
    by_length = sorted(trajectories, key=lambda t: -len(t.token_ids))
    return list(chain(*by_group(by_length)))


def prompt_of(trajectory) -> list[int]:
    """Return the tokens before the first sampled one."""
    if 1 not in trajectory.loss_mask:
        return trajectory.token_ids
    return trajectory.token_ids[:trajectory.loss_mask.index(1)]


def collate(trajectories: list, device="cpu"):
    """Return token_ids, loss_mask and logprobs as right-padded (B, T) tensors. Pads are masked."""
    def pad(name, dtype=torch.long):
        rows = [torch.tensor(getattr(t, name), dtype=dtype) for t in trajectories]
        return pad_sequence(rows, batch_first=True).to(device)  # (B, T)
    return pad("token_ids"), pad("loss_mask"), pad("logprobs", torch.float32)


def tokens_to_learn(config, episodes, mask, advantages, run):
    """Return mask, a mask of what tools wrote, and advantages. extras/zoo has --filter and ECHO."""
    return mask, torch.zeros_like(mask), advantages


def turn_index(mask):
    """Number each token's turn (B, T), -1 where masked. A run of 1s in the mask is one turn."""
    mask = mask.long()
    starts = (mask - F.pad(mask, (1, -1))).clamp(min=0)
    return torch.where(mask.bool(), starts.cumsum(1) - 1, -1)  # (B, T)


def per_token(per_turn, mask):
    """Give every sampled token its turn's value, and all others 0: (B, T).

    per_turn: B tensors (turns,). mask: (B, T). Raises ValueError if the turns do not match.
    """
    turns = turn_index(mask)  # (B, T)
    lengths = list(map(len, per_turn))
    n_turns = (turns.max(1).values + 1).tolist()
    if lengths != n_turns:
        raise ValueError(f"values for {lengths} turns, but the mask has {n_turns}")
    padded = pad_sequence(per_turn, batch_first=True).to(turns.device)  # (B, most turns)
    return torch.where(turns >= 0, padded.gather(1, turns.clamp(min=0)), 0.0)
