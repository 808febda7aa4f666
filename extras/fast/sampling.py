"""Sampling in pieces of the batch, by blocks, and from the likeliest tokens (top-k, top-p)."""
import torch
from torch.nn import functional as F

import core.logprobs

BLOCK = 256  # tokens of the vocabulary whose probabilities are summed first
PIECE = 2**19  # logits that are float32 at the same time on a CPU, so that they fit its cache


def sample(logits, uniforms, forced, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0):
    """Draw as core's `sample` does. top_k and top_p cut the distribution.

    They are for chat and evaluation. Training never uses them.
    """
    at_once = max(1, PIECE // logits.shape[1])
    if logits.is_cpu and len(logits) > at_once:
        pieces = zip(logits.split(at_once), uniforms.split(at_once), forced.split(at_once))
        drawn = [sample(*piece, temperature, top_k, top_p) for piece in pieces]
        return list(map(torch.cat, zip(*drawn)))
    if top_k or top_p < 1:
        z = logits.float()
        if temperature not in (0, 1):
            z = z / temperature
            temperature = 1
        logits = cut(z, top_k, top_p)
    return core.logprobs.sample(logits, uniforms, forced, temperature, inverse_cdf)


def inverse_cdf(weight, uniforms):
    """Find the tokens as core's `inverse_cdf` does: a block of the vocabulary, then a token in it.

    Only the sums of the blocks, and one block of each row, are in float64.
    """
    if weight.shape[1] % BLOCK:
        weight = F.pad(weight, (0, -weight.shape[1] % BLOCK))
    blocks = weight.unflatten(1, (-1, BLOCK))  # (R, blocks, block)
    sums = blocks.sum(-1)  # (R, blocks)
    cumulative = sums.double().cumsum(-1)
    total = cumulative[:, -1:]  # (R, 1)
    target = uniforms[:, None] * total
    block = torch.searchsorted(cumulative, target, right=True)  # (R, 1)
    block.clamp_(max=sums.shape[1] - 1)
    rest = target - cumulative.gather(1, block)
    rest += sums.gather(1, block)
    inside = torch.take_along_dim(blocks, block[..., None], 1)[:, 0]  # (R, block)
    inside = inside.double().cumsum(-1)
    # Rounding may put `rest` at or above the block's sum. No token of weight 0 may be drawn then.
    below_sum = inside[:, -1:] * (1 - 2**-40)
    rest = torch.minimum(rest.clamp_(min=0), below_sum)
    ids = block * BLOCK + torch.searchsorted(inside, rest, right=True)
    return ids[:, 0], total[:, 0]


def cut(z, top_k: int, top_p: float):
    """Set the logits (R, V) outside the top k and outside the nucleus of probability p to -inf."""
    if top_k:
        smallest = z.topk(min(top_k, z.shape[1])).values[:, -1:]
        z = z.masked_fill(z < smallest, -torch.inf)
    if top_p < 1:
        ordered, index = z.sort(descending=True)
        probs = ordered.softmax(-1)
        # The likeliest token stays, also where float32 rounds p to 0.
        outside = probs.cumsum(-1) - probs >= max(top_p, 1e-30)
        # Bring the mask back into the order of the vocabulary.
        outside = outside.scatter(1, index, outside)
        z = z.masked_fill(outside, -torch.inf)
    return z
