"""Sampling: a token per row, and its log-probability under the distribution it is drawn from."""
import torch
from torch.nn import functional as F

PIECE = 2**19  # logits that are float32 at the same time on a CPU, so that they fit its cache
BLOCK = 256  # tokens of the vocabulary whose probabilities are summed first


def sample(logits, uniforms, forced, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0):
    """Draw one token per row. Nothing here waits for the device.

    Args:
        logits: (R, V), of any floating-point dtype.
        uniforms: (R,) float64 in [0, 1), one random number per row.
        forced: (R,) ids to take instead of the drawn token, or -1 where the row samples.
        temperature: 0 takes the most likely token, with its log-probability at temperature 1.
        top_k, top_p: cut the distribution, for chat and evaluation. Training never uses them.

    Returns ids (R,) and logprobs (R,) in nats, which are NaN where the logits are not finite.
    """
    at_once = max(1, PIECE // logits.shape[1])
    if logits.is_cpu and len(logits) > at_once:
        pieces = zip(logits.split(at_once), uniforms.split(at_once), forced.split(at_once))
        drawn = [sample(*piece, temperature, top_k, top_p) for piece in pieces]
        return [torch.cat(column) for column in zip(*drawn)]
    z = logits.float()
    if temperature not in (0, 1):
        z = z / temperature
    z = cut(z, top_k, top_p)  # (R, V)
    z_max = z.amax(-1, keepdim=True)  # (R, 1)
    ids, total = inverse_cdf((z - z_max).exp_(), uniforms)
    if temperature == 0:
        ids = z.argmax(-1)
    ids = torch.where(forced >= 0, forced, ids)
    # Where the logits are not finite, the search ends outside of the vocabulary.
    ids = ids.clamp(max=z.shape[1] - 1)
    z_drawn = z.gather(1, ids[:, None]) - z_max  # (R, 1)
    return ids, z_drawn[:, 0] - total.log().float()


def inverse_cdf(weight, uniforms):
    """Return the ids (R,) at which the cumulative weights (R, V) reach the uniforms (R,).

    It finds the block of the vocabulary first and then the token in it. It also returns the sums
    of the weights (R,), in float64.
    """
    if weight.shape[1] % BLOCK:
        weight = F.pad(weight, (0, -weight.shape[1] % BLOCK))
    blocks = weight.unflatten(1, (-1, BLOCK))  # (R, blocks, block)
    sums = blocks.sum(-1)  # (R, blocks)
    # In float64, because a uniform near 1 must stay below the total.
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
