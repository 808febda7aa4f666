"""Which episodes share a forward pass of the update, and which of their tokens are one turn."""
import os

import torch
import torch.nn.functional as F


def cheapest_order(trajectories: list, batch_size: int) -> list:
    """Return the episodes in an order in which passes of `batch_size` take few tokens.

    It is by length or by group. Neighbours in length need less padding. The members of a group
    share their prompt, which `token_logprobs` forwards once. The longest come first, so that what
    does not fit in memory fails at once. The order is a function of token counts only.
    """
    longest = {}
    for t in trajectories:
        longest[t.group_id] = max(longest.get(t.group_id, 0), len(t.token_ids))
    by_length = sorted(trajectories, key=lambda t: -len(t.token_ids))
    by_group = sorted(trajectories, key=lambda t: (-longest[t.group_id], t.group_id, -len(t.token_ids)))
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
