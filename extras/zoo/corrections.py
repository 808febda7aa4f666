"""More rows of CORRECTIONS in grpo.py, the choices of --importance_mode. C is the correction's cap.

Each returns weights (B, T) without gradient, by which the advantages are multiplied. A weight 0
leaves a token or an episode out. It still counts in divisors. TRL's names; its default is
sequence_mask without a lower bound. Another engine rounds each token a little differently, and a
product over n tokens drifts with n: the longer an episode, the more likely a product leaves it out.
"""
import torch


def log_ratios(trainer_logprobs, sampled_logprobs, mask):
    """Return log(trainer / sampler), 0 where the mask is 0: (B, T)."""
    return torch.where(mask.bool(), trainer_logprobs - sampled_logprobs, 0.0).detach()


def inside(weights, cap):
    """Return the weights that lie in [1 / C, C], and 0 for the others."""
    return torch.where((weights >= 1 / cap) & (weights <= cap), weights, 0.0)


def token_mask(trainer_logprobs, sampled_logprobs, mask, cap):
    """pi_trainer / pi_sampler of each token in [1 / C, C], else 0: IcePop, arXiv 2510.18855."""
    return inside(log_ratios(trainer_logprobs, sampled_logprobs, mask).exp(), cap)


def sequence_truncate(trainer_logprobs, sampled_logprobs, mask, cap):
    """The product of an episode's ratios, at most C."""
    product = log_ratios(trainer_logprobs, sampled_logprobs, mask).sum(1, keepdim=True).exp()
    return product.clamp(max=cap).expand(mask.shape)


def sequence_mask(trainer_logprobs, sampled_logprobs, mask, cap):
    """The product of an episode's ratios if it lies in [1 / C, C], else 0."""
    product = log_ratios(trainer_logprobs, sampled_logprobs, mask).sum(1, keepdim=True).exp()
    return inside(product, cap).expand(mask.shape)


def geometric_mask(trainer_logprobs, sampled_logprobs, mask, cap):
    """The geometric mean of an episode's ratios if it lies in [1 / C, C], else 0.

    It does not drift with the length, so that C is closer to 1: verl's presets have 1.01.
    """
    total = log_ratios(trainer_logprobs, sampled_logprobs, mask).sum(1, keepdim=True)
    mean = (total / mask.sum(1, keepdim=True).clamp(min=1)).exp()  # (B, 1)
    return inside(mean, cap).expand(mask.shape)


CORRECTIONS = {function.__name__: function for function in (
    token_mask, sequence_truncate, sequence_mask, geometric_mask)}
