"""More rows of LOSSES in grpo.py: surrogates with its signature, and a normalizer.

A surrogate takes log_ratio = log(policy / old), logprobs and advantages, all 0 where the mask is 0,
the mask, (b, T) each, and the clip range. It returns the tokens' losses (b, T) and a dict to log.
"""
import torch


def sapo(log_ratio, logprobs, advantages, mask, *, tau_pos=1.0, tau_neg=1.05, **_):
    """-(4 / tau) sigmoid(tau (ratio - 1)) A, tau_pos where A > 0: arXiv 2511.20347 eq. 6."""
    tau = torch.where(advantages > 0, tau_pos, tau_neg)
    return -torch.sigmoid(tau * (log_ratio.exp() - 1)) * 4 / tau * advantages, {}


def vespo(log_ratio, logprobs, advantages, mask, *, k=(2.0, 3.0), lam=(3.0, 2.0), **_):
    """-sg(phi(w)) A log p, phi(w) = w^k exp(lam (1 - w)), w the product of a sequence's ratios.

    arXiv 2602.10693. k, lam: first where A >= 0, else second. In bfloat16 w is rounding noise.
    """
    log_w = log_ratio.sum(1, keepdim=True).detach()  # (B, 1)
    power = torch.where(advantages >= 0, *k)  # (B, T)
    decay = torch.where(advantages >= 0, *lam)  # (B, T)
    # In logs: w may overflow where phi does not.
    phi = torch.exp(power * log_w + decay * (1 - log_w.exp()))  # (B, T)
    return -phi * advantages * logprobs, {"phi": phi}


def dppo(log_ratio, logprobs, advantages, mask, *, clip_eps_low, clip_eps_high, cap=20.0, **_):
    """-sg(min(ratio, cap)) M A log p, M 0 where p - p_old is too large: DPPO, arXiv 2602.04879.

    The clip range bounds probabilities here, not their ratio: M is 0 where A > 0 and p - p_old >
    eps_high, or A < 0 and p_old - p > eps_low (Binary-TV, eq. 13). A rare token may then multiply
    its probability, where a clipped ratio stops it. cap is that of verl's dppo_tv.
    """
    gain = logprobs.detach().exp() - (logprobs - log_ratio).detach().exp()  # (B, T)
    stopped_low = (gain < -clip_eps_low) & (advantages < 0)
    stopped_high = (gain > clip_eps_high) & (advantages > 0)
    weight = torch.where(stopped_low | stopped_high, 0.0, log_ratio.detach().exp().clamp(max=cap))
    return -weight * advantages * logprobs, {"clip_low": stopped_low, "clip_high": stopped_high}


def off_policy_masked(log_ratio, logprobs, advantages, mask, *, surrogate, max_drift=0.5,
                      **options):
    """`surrogate`, but 0 where A < 0 in a sequence whose mean log(old / policy) is too large.

    The off-policy sequence mask of DeepSeek-V3.2, arXiv 2512.02556 eq. 9, which states no bound:
    0.5 is the example in TRL's documentation. What has drifted away is not pushed down further.
    """
    drift = -log_ratio.detach().sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    left_out = (drift > max_drift) & (advantages < 0)  # (B, T)
    advantages = torch.where(left_out, 0.0, advantages)
    loss, to_log = surrogate(log_ratio, logprobs, advantages, mask, **options)
    return loss, {**to_log, "off_policy": left_out}


def sequence_sum(x, mask, counts):
    """Sum over each sequence's tokens, then mean over sequences."""
    return torch.where(mask.bool(), x, 0.0).sum() / counts.sequences


# Text names a function of a row of grpo.py. `off_policy_masked` gets grpo's surrogate.
LOSSES = {
    "sapo": (sapo, "sequence_mean"),  # arXiv 2511.20347 eq. 5
    "luspo": ("sequence_clipped", sequence_sum),  # arXiv 2602.05261 eq. 7
    "vespo": (vespo, "token_mean"),  # arXiv 2602.10693 eq. 20
    "dppo": (dppo, "token_mean"),  # arXiv 2602.04879 eq. 13
    "deepseek": (off_policy_masked, "sequence_mean"),  # arXiv 2512.02556 eq. 9
}
# As PAPER_SETTINGS of grpo.py. luspo's range is so narrow that 16-bit rounding leaves it.
SETTINGS = {
    "luspo": {"clip_eps_low": 2e-3, "clip_eps_high": 2.5e-3, "importance_correction": 2.0},
    "deepseek": {"scale_rewards": "none"},
    "gdpo": {"scale_rewards": "batch"}, "gigpo": {"scale_rewards": "none"},
}
