"""Which episodes share a step and a forward pass, and which of their tokens are one turn."""
import math
import os

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from core.seeds import shuffled


def shuffled_batches(items: list, size: int, *seed: int) -> list[list]:
    """Return one pass over the items in random order, in batches of at most `size`."""
    return even_batches(shuffled(items, seed), size)


def even_batches(items: list, size: int) -> list[list]:
    """Return the items in batches of at most `size`, as even as possible: none has only a few."""
    batches = []
    for places in np.array_split(np.arange(len(items)), math.ceil(len(items) / size)):
        batches.append([items[i] for i in places])
    return batches


def batches_of_like_length(episodes: list, size: int, *seed: int) -> list[list]:
    """Return `shuffled_batches`, but similar lengths share a batch, which saves padding."""
    rng = np.random.default_rng(seed)
    in_random_order = [episodes[i] for i in rng.permutation(len(episodes))]
    batches = []
    for pool in even_batches(in_random_order, 16 * size):
        batches += even_batches(sorted(pool, key=lambda t: len(t.token_ids)), size)
    return [batches[i] for i in rng.permutation(len(batches))]


def cheapest_order(trajectories: list, batch_size: int) -> list:
    """Return the episodes in an order in which passes of `batch_size` take few tokens.

    It is by length, which needs less padding, or by group, whose prompt is forwarded once. The
    longest come first, so that what does not fit in memory fails at once.
    """
    by_length = sorted(trajectories, key=lambda t: -len(t.token_ids))
    place = {}  # of each group, by its longest episode
    for t in by_length:
        place.setdefault(t.group_id, len(place))
    by_group = sorted(by_length, key=lambda t: place[t.group_id])
    return min(by_length, by_group, key=lambda order: forwarded_tokens(order, batch_size))


def forwarded_tokens(order: list, batch_size: int) -> int:
    """Return how many tokens passes of `batch_size` forward, padding included."""
    tokens = 0
    for start in range(0, len(order), batch_size):
        batch = order[start:start + batch_size]
        shared = len(os.path.commonprefix([prompt_of(t) for t in batch]))
        width = max(len(t.token_ids) for t in batch)
        tokens += shared + len(batch) * (width - shared)
    return tokens


def prompt_of(trajectory) -> list[int]:
    """Return the tokens before the first sampled one."""
    if 1 not in trajectory.loss_mask:
        return trajectory.token_ids
    return trajectory.token_ids[:trajectory.loss_mask.index(1)]


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
    lengths = [len(values) for values in per_turn]
    n_turns = (turns.max(1).values + 1).tolist()
    if lengths != n_turns:
        raise ValueError(f"values for {lengths} turns, but the mask has {n_turns}")
    padded = pad_sequence(per_turn, batch_first=True).to(turns.device)  # (B, most turns)
    return torch.where(turns >= 0, padded.gather(1, turns.clamp(min=0)), 0.0)
