"""GRPO and its relatives: a group of episodes of one task is its own baseline.

One step's equations, in the order the loop uses them: rewards -> `group_advantages` (one per episode) or
`turn_advantages` (one per turn) -> [`importance_correction`] -> `LOSSES[name]` + [`kl_estimate`] - [entropy bonus].

B sequences, T tokens, V vocabulary, G group_size. Every (B, T) tensor's column t belongs to token t;
mask is 1 exactly where the policy sampled the token.
"""

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F


# ---------------------------------------------------------------------------------------------------- advantages
def group_advantages(rewards, group_ids, scale="group", leave_one_out=False):
    """A_i = (r_i - mean of its group) / (std + 1e-4): GRPO outcome supervision, arXiv 2402.03300 section 4.1.2.

    rewards (N,); group_ids: N hashable ids, in any order, groups may differ in size. std is unbiased (n - 1) with eps
    1e-4, as in TRL (the paper gives neither). scale "group": std of the group; "batch": of all N, arXiv 2508.08221;
    "none": no division, Dr. GRPO, arXiv 2503.20783. leave_one_out: r_i - mean of the OTHERS = (r_i - mean) G / (G - 1),
    RLOO, arXiv 2402.14740. A group of equal rewards gets exactly 0. Raises ValueError: a group of one, unknown scale.
    """
    if scale not in ("group", "batch", "none"):
        raise ValueError(f"scale is 'group', 'batch' or 'none', not {scale!r}")
    advantages = torch.zeros_like(rewards)
    for group in dict.fromkeys(group_ids):
        rows = [i for i, g in enumerate(group_ids) if g == group]
        if len(rows) < 2:
            raise ValueError(f"group {group!r} has one reward: nothing to compare it with (its std would be NaN)")
        r = rewards[rows] - rewards[rows[0]]  # equal rewards give exactly 0: Adam would turn rounding into a step
        baseline_scale = len(rows) / (len(rows) - 1) if leave_one_out else 1.0
        std = {"group": r.std() + 1e-4, "batch": rewards.std() + 1e-4, "none": 1.0}[scale]
        advantages[rows] = baseline_scale * (r - r.mean()) / std
    return advantages  # (N,)


def turn_index(mask):
    """The turn each token belongs to, -1 where masked: one run of 1s in the mask (B, T) is one turn."""
    mask = mask.long()
    starts = (mask - F.pad(mask, (1, -1))).clamp(min=0)
    return torch.where(mask.bool(), starts.cumsum(1) - 1, -1)  # (B, T)


def turn_advantages(turn_rewards, turns, group_ids, scale="group"):
    """A_t = sum over turns j >= t's of (r_j - mean R) / (std R + 1e-4), R: all turn rewards of the group. (B, T)

    Process supervision, arXiv 2402.03300 section 4.1.3; 0 where masked. turn_rewards: B lists; turns: `turn_index` of
    the loss masks as sampled. ValueError: an episode's rewards and turns differ in number; a group of one reward.
    """
    lengths = [len(rewards) for rewards in turn_rewards]
    flat = torch.tensor([float(r) for rewards in turn_rewards for r in rewards], device=turns.device)
    owners = [g for g, n in zip(group_ids, lengths, strict=True) for _ in range(n)]
    advantages = torch.zeros(turns.shape, dtype=flat.dtype, device=turns.device)  # (B, T)
    for row, normalised in enumerate(group_advantages(flat, owners, scale).split(lengths)):
        turn, sampled = turns[row], turns[row] >= 0  # (T,)
        if turn.max() + 1 != lengths[row]:
            raise ValueError(f"episode {row}: {lengths[row]} turn rewards, but {turn.max() + 1} turns in the mask")
        advantages[row, sampled] = normalised.flip(0).cumsum(0).flip(0)[turn[sampled]]  # own and later turns
    return advantages


def importance_correction(trainer_logprobs, sampled_logprobs, mask, cap):
    """Truncated importance sampling: sg(min(trainer / sampler, cap)) per token, to multiply `advantages` by.

    fengyao.notion.site/off-policy-rl. old_logprobs are then trainer_logprobs. Not for vespo, whose w is policy /
    sampler already: its old_logprobs stay the sampler's.
    """
    return masked(trainer_logprobs - sampled_logprobs, mask).exp().clamp(max=cap).detach()  # (B, T)


# --------------------------------------------------------------------------------------------------- normalisers
class Counts(NamedTuple):
    """Divisors, of the WHOLE step (all micro-batches and ranks): the losses of its parts then sum to its loss."""

    sequences: int  # those masked whole count too
    tokens: int  # sum of the masks
    max_tokens: int  # the longest episode allowed, a constant


def masked(x, mask):
    """x, and 0 where mask is 0. Do it BEFORE exp: 0 * inf in the backward pass is NaN though the loss is finite."""
    return torch.where(mask.bool(), x, 0.0)


def sequence_mean(x, mask, counts):
    """Mean over each sequence's tokens, then over sequences."""
    return (masked(x, mask).sum(1) / mask.sum(1).clamp(min=1)).sum() / counts.sequences


def sequence_sum(x, mask, counts):
    """Sum over each sequence's tokens, then mean over sequences."""
    return masked(x, mask).sum() / counts.sequences


def token_mean(x, mask, counts):
    """Mean over all tokens of the step. Of the entropy, times entropy_coef, it is the entropy bonus."""
    return masked(x, mask).sum() / counts.tokens


def constant_mean(x, mask, counts):
    """Sum over tokens / (sequences x max_tokens): no length in the divisor, hence no length bias."""
    return masked(x, mask).sum() / (counts.sequences * counts.max_tokens)


# -------------------------------------------------------------------------------------------------------- losses
def kl_estimate(logprobs, ref_logprobs, mask, kind):
    """KL(policy || reference) per token, 0 where masked: k1 log p/ref, k2 (log p/ref)^2 / 2, k3 ref/p - 1 - log ref/p.

    joschu.net/blog/kl-approx.html; k3 is arXiv 2402.03300 eq. 4. k1 goes into the reward (`.sum(1)`, no gradient: as a
    loss its mean gradient is 0), k2, k3 into the loss: k2's gradient is KL(policy || ref)'s, k3's KL(ref || policy)'s.
    """
    log_ratio = masked(logprobs - ref_logprobs, mask)
    return {"k1": log_ratio, "k2": log_ratio**2 / 2, "k3": torch.exp(-log_ratio) - 1 + log_ratio}[kind]  # (B, T)


# A surrogate: (log_ratio = log policy / old, logprobs, advantages, mask) -> the tokens' loss (B, T), what to log of it.
def clipped(log_ratio, logprobs, advantages, mask, *, clip_eps_low, clip_eps_high, delta=None, **_):
    """-min(ratio A, clip(ratio, 1 - low, 1 + high) A): PPO, arXiv 1707.06347 eq. 7; GRPO, arXiv 2402.03300 eq. 3.

    high > low is clip-higher, DAPO, arXiv 2503.14476 eq. 10. delta (> 1 + high) caps the unclipped ratio too, which
    bounds the loss where A < 0: two-sided clip, INTELLECT-2, arXiv 2505.07291.
    """
    ratio = log_ratio.exp()
    clip = ratio.clamp(1 - clip_eps_low, 1 + clip_eps_high)
    shares = {"clip_low": (ratio < clip) & (advantages < 0), "clip_high": (ratio > clip) & (advantages > 0)}
    return -torch.min(ratio.clamp(max=delta or torch.inf) * advantages, clip * advantages), shares


def sequence_clipped(log_ratio, logprobs, advantages, mask, **hyper):
    """`clipped` with one ratio per sequence, s = exp(mean log-ratio): GSPO-token, arXiv 2507.18071 eq. 13, 14.

    In value sg(s); a token's gradient is s times that of its own log p, so each turn keeps its own credit. With one
    advantage per sequence, value and gradient are plain GSPO's (eq. 5, 7). The paper clips at 3e-4 and 4e-4.
    """
    log_s = (log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)).detach()  # (B, 1)
    return clipped(log_s + (log_ratio - log_ratio.detach()), logprobs, advantages, mask, **hyper)  # (B, T)


def cispo(log_ratio, logprobs, advantages, mask, *, clip_max, **_):
    """-sg(min(ratio, clip_max)) A log p: MiniMax-M1, arXiv 2506.13585 eq. 4; no token loses its gradient.

    clip_max caps the ratio itself (it is not 1 + eps), as in ScaleRL, arXiv 2510.13786.
    """
    ratio = log_ratio.exp().detach()
    return -ratio.clamp(max=clip_max) * advantages * logprobs, {"clip_high": ratio > clip_max}


def sapo(log_ratio, logprobs, advantages, mask, *, tau_pos, tau_neg, **_):
    """-sigmoid(tau (ratio - 1)) 4 / tau A, tau_pos where A > 0, else tau_neg: a soft gate, arXiv 2511.20347."""
    tau = torch.where(advantages > 0, tau_pos, tau_neg)
    return -torch.sigmoid(tau * (log_ratio.exp() - 1)) * 4 / tau * advantages, {}


def vespo(log_ratio, logprobs, advantages, mask, *, k_pos, lambda_pos, k_neg, lambda_neg, **_):
    """-sg(phi(w)) A log p, phi(w) = w^k exp(lambda (1 - w)), w = product of the sequence's ratios: arXiv 2602.10693.

    k, lambda are _pos where A >= 0, else _neg.
    """
    log_w = log_ratio.sum(1, keepdim=True).detach()  # (B, 1)
    k, lam = torch.where(advantages >= 0, k_pos, k_neg), torch.where(advantages >= 0, lambda_pos, lambda_neg)
    phi = torch.exp(k * log_w + lam * (1 - log_w.exp()))  # (B, T); in logs: w may overflow, phi does not
    return -phi * advantages * logprobs, {"phi": phi}


def policy_loss(surrogate, normaliser, logprobs, old_logprobs, advantages, mask, counts, kl=0.0, **hyper):
    """(loss, metrics) of one micro-batch; both sum to the step's over micro-batches and ranks.

    All tensors (B, T); `kl` is kl_coef x `kl_estimate` and shares the normaliser. hyper: what a surrogate does not name
    it ignores. Metrics are means over tokens: policy / old, k3 of KL(old || policy), and the surrogate's shares.
    """
    log_ratio = masked(logprobs - old_logprobs, mask)
    token_loss, shares = surrogate(log_ratio, masked(logprobs, mask), advantages, mask, **hyper)
    shares = {"ratio": log_ratio.exp(), "approx_kl": log_ratio.exp() - 1 - log_ratio} | shares
    metrics = {name: token_mean(x.to(logprobs), mask, counts).detach() for name, x in shares.items()}
    return normaliser(token_loss + kl, mask, counts), metrics


LOSSES = {  # loss -> function(logprobs, old_logprobs, advantages, mask, counts, kl, **hyper) -> (loss, metrics)
    "grpo": partial(policy_loss, clipped, sequence_mean),  # arXiv 2402.03300 eq. 3
    "dapo": partial(policy_loss, clipped, token_mean),  # arXiv 2503.14476 eq. 8 (the paper: tokens of the group)
    "dr_grpo": partial(policy_loss, clipped, constant_mean),  # arXiv 2503.20783 section 3.2; with scale="none"
    "cispo": partial(policy_loss, cispo, token_mean),  # arXiv 2506.13585 eq. 4
    "sapo": partial(policy_loss, sapo, sequence_mean),  # arXiv 2511.20347
    "gspo": partial(policy_loss, sequence_clipped, sequence_mean),  # arXiv 2507.18071 eq. 5
    "luspo": partial(policy_loss, sequence_clipped, sequence_sum),  # arXiv 2602.05261: GSPO x length
    "vespo": partial(policy_loss, vespo, token_mean),  # arXiv 2602.10693
}
