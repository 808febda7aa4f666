"""Log-probability and entropy of every trained token, without a (B, T, V) tensor.

    token_logprobs    the function that algorithms call, and the only place that shifts tokens
    score             token_logprobs of a whole step, without gradient
    sample            draw a token per row, with its log-probability
    dithered          round merged weights to 16 bits without losing small updates

The output head runs on chunks of tokens. A layer may put its own `head_logprobs` into the model's
facts, as extras/memory does for a head in int8.
"""
from functools import cache

import torch
from torch.nn import functional as F

from core.model import facts
from core.packing import hidden_states

CHUNK = 2**23  # logits that exist at once
PIECE = 2**19  # of them in float32 at once on a CPU, in whose cache they stay


def token_logprobs(model, token_ids, loss_mask, temperature: float = 1.0,
                   return_hidden: bool = False):
    """Return log pi(token t | tokens before t) and the policy's entropy there, in nats.

    Column t belongs to token t and is predicted from column t - 1; column 0 is 0.0. The head runs
    only where the mask is 1. Padding is on the right, where causal attention cannot see it.

    Args:
        model: the policy
        token_ids: (B, T), right-padded
        loss_mask: (B, T), 1 where a log-probability is wanted
        temperature: the logits are divided by it
        return_hidden: True also returns the last hidden states, for a head that a fork adds, such
            as V = value_head(hidden). A critic takes hidden.detach(), or its loss moves the policy.

    Returns logprobs (B, T) and entropy (B, T), float32, differentiable, 0.0 where the mask is 0.
    With return_hidden also hidden (B, T, D), of the same kind: column t holds what token t is
    predicted from. The state after the last token needs one more column, with mask 1.
    """
    # Attention is causal: columns after the last trained token change none before it.
    used = used_columns(loss_mask)
    hidden, index = hidden_states(
        model, token_ids[:, :used], loss_mask[:, :used])  # (N, D), (B, used)
    predicted = loss_mask[:, 1:].bool()  # (B, T - 1)
    # Mamba's layers add up in float32.
    dtype = model.get_output_embeddings().weight.dtype
    # A place may stand for several rows: the gradient of an embedding adds them up in one order.
    hidden = F.embedding(index[:, :-1][predicted[:, :used - 1]], hidden).to(dtype)  # (n, D)
    targets = token_ids[:, 1:][predicted]  # (n,)
    compute = facts(model).head_logprobs or head_logprobs
    results = compute(model, hidden, targets, temperature)  # (n,), (n,)
    if return_hidden:
        results = *results, hidden.float()  # (n, D)
    if facts(model).scale_gradient:
        for result in results:
            facts(model).scale_gradient(result)
    columns = F.pad(predicted, (1, 0))  # (B, T)
    zeros = hidden.new_zeros(token_ids.shape, dtype=torch.float32)  # (B, T)
    logprobs, entropy = (zeros.masked_scatter(columns, result) for result in results[:2])
    if not return_hidden:
        return logprobs, entropy
    zeros = zeros[..., None].expand(-1, -1, hidden.shape[1])  # (B, T, D)
    return logprobs, entropy, zeros.masked_scatter(columns[..., None], results[2])


@torch.no_grad()
def score(model, token_ids, mask, temperature: float, run):
    """Return a step's log-probabilities (B, T), in the run's micro-batches, by all its ranks.

    Call it in a context in which the model is the policy to score. It leaves the model in `eval`
    mode, without dropout.
    """
    logprobs = torch.zeros(token_ids.shape, device=token_ids.device)
    model.eval()
    for rows in run.micro_batches(len(token_ids), "score"):
        logprobs[rows], _ = token_logprobs(model, token_ids[rows], mask[rows], temperature)
    return run.ranks.add(logprobs)


def used_columns(loss_mask) -> int:
    """Return the number of columns of the mask (B, T) up to the last one with a 1, at least 1."""
    columns = loss_mask.any(0).nonzero()  # (number, 1)
    return int(columns[-1]) + 1 if len(columns) else 1


def head_logprobs(model, hidden, targets, temperature):
    """Return log-probability and entropy (n,) of targets (n,) after hidden states (n, D)."""
    head = model.get_output_embeddings()
    weights = [weight for weight in head.parameters() if weight.requires_grad]
    return HeadLogprobs.apply(model, hidden, targets, temperature, *weights)


class HeadLogprobs(torch.autograd.Function):
    """Log-probability and entropy of softmax(logits / temperature), a chunk of tokens at a time.

    With p = softmax(z) and H = -sum p log p:

        d log p_y / dz = onehot(y) - p        dH / dz = -p (log p + H)

    No logits are kept. The forward pass keeps d log p_y / d hidden (n, D), and the backward pass
    scales its rows. It runs the head again only if the entropy has a gradient or the head trains.
    """

    @staticmethod
    def forward(ctx, model, hidden, targets, temperature, *weights):
        ctx.model, ctx.temperature, ctx.weights = model, temperature, weights
        # A GPU waits for launches, so of many tokens it takes more at once.
        elements = CHUNK << (len(hidden) >= 2048 and not hidden.is_cpu)
        ctx.size = max(1, elements // len(model.get_output_embeddings().weight))
        keep = ctx.needs_input_grad[1] and not weights
        slope = torch.empty_like(hidden) if keep else None  # (n, D)
        logprobs = hidden.new_empty(len(hidden), dtype=torch.float32)
        entropy = torch.empty_like(logprobs)
        for chunk in blocks(len(hidden), ctx.size):
            with torch.set_grad_enabled(keep):
                h = hidden[chunk].detach().requires_grad_(keep)
                logits = head_logits(model, h)  # (c, V)
            softmax(logits.detach(), targets[chunk, None], temperature, logprobs[chunk],
                    entropy[chunk], keep)
            if keep:
                slope[chunk], = torch.autograd.grad(logits, h, logits.detach())
            # Free them before the next chunk's are computed.
            del logits
        entropy.neg_()
        ctx.save_for_backward(hidden, targets, entropy, slope)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):
        hidden, targets, entropy, slope = ctx.saved_tensors
        if slope is not None and (grad_entropy == 0).all():
            grad_hidden = (slope * grad_logprobs[:, None]).to(hidden.dtype)
            return None, grad_hidden, None, None
        grad_hidden = torch.empty_like(hidden)
        grad_weights = [torch.zeros_like(weight) for weight in ctx.weights]
        for chunk in blocks(len(hidden), max(1, ctx.size // 2)):
            with torch.enable_grad():
                h = hidden[chunk].detach().requires_grad_()
                logits = head_logits(ctx.model, h)  # (c, V)
            grad = logits_gradient(
                logits.detach(), targets[chunk, None], ctx.temperature, entropy[chunk, None],
                grad_logprobs[chunk, None], grad_entropy[chunk, None])
            grad_hidden[chunk], *chunk_weights = torch.autograd.grad(
                logits, (h, *ctx.weights), grad)
            del logits, grad
            for total, addend in zip(grad_weights, chunk_weights):
                total += addend
        return None, grad_hidden, None, None, *grad_weights


def softmax(logits, targets, temperature, logprobs, entropy, overwrite: bool):
    """Write the targets' log-probabilities (c,) and minus the entropy (c,), piece by piece.

    The logits are (c, V), the targets (c, 1). `overwrite` replaces the logits by
    d log p_target / d logits: the graph of a head never reads its logits again.
    """
    elements = PIECE if logits.is_cpu else logits.numel()
    for piece in blocks(len(logits), max(1, elements // logits.shape[1])):
        z = logits[piece] if temperature == 1 else logits[piece].float() / temperature
        logp = z.log_softmax(-1, dtype=torch.float32)
        probs = logp.exp()
        torch.gather(logp, 1, targets[piece], out=logprobs[piece, None])
        torch.sum(logp.mul_(probs), -1, out=entropy[piece])
        if overwrite:
            probs.neg_().scatter_(1, targets[piece], 1, reduce="add")
            logits[piece] = over(probs, temperature)
        # Free them before the next piece's are computed.
        del logp, probs


def logits_gradient(logits, targets, temperature, entropy, grad_logprobs, grad_entropy):
    """Return the gradient of the logits (c, V). All others are (c, 1)."""
    logp = over(logits.float(), temperature).log_softmax(-1)
    probs = logp.exp()
    grad = logp.add_(entropy).mul_(probs).mul_(-grad_entropy)
    grad.addcmul_(probs, grad_logprobs, value=-1)
    grad.scatter_add_(1, targets, grad_logprobs)
    return over(grad, temperature).to(logits.dtype)


def over(x, temperature):
    """Return x / temperature, without the pass over x if the temperature is 1."""
    return x if temperature == 1 else x / temperature


def blocks(n: int, size: int) -> list[slice]:
    """Return slices of `size` that cover range(n)."""
    return [slice(start, min(start + size, n)) for start in range(0, n, size)]


def head_logits(model, hidden):
    """Return the logits (N, V) of hidden states (N, D), not divided by the temperature."""
    head = model.get_output_embeddings()
    return scaled(model.config, head(hidden.to(head.weight.dtype)))


def scaled(config, logits):
    """Return what a head puts out, scaled as Cohere, Falcon-H1, Granite and Gemma 2 do."""
    if factor := getattr(config, "logit_scale", getattr(config, "lm_head_multiplier", None)):
        logits = logits * factor
    # A wrapper (Gemma 4) has these in its text config. Cohere's leaves the factor out.
    config = config.get_text_config()
    if getattr(config, "logits_scaling", None):
        logits = logits / config.logits_scaling
    if cap := getattr(config, "final_logit_softcapping", None):
        logits = torch.tanh(logits / cap) * cap
    return logits


def inverse_cdf(weights, uniforms):
    """Return the ids (R,) at which the cumulative weights (R, V) reach the uniforms (R,).

    It also returns the sums of the weights (R,), in float64.
    """
    # In float64, because a uniform near 1 must stay below the total.
    cumulative = weights.double().cumsum(-1)
    total = cumulative[:, -1:]  # (R, 1)
    # Rounding may put the product at the total. No token of weight 0 may be drawn then.
    target = torch.minimum(uniforms[:, None] * total, total * (1 - 2**-53))
    return torch.searchsorted(cumulative, target, right=True)[:, 0], total[:, 0]


def sample(logits, uniforms, forced, temperature: float = 1.0, find=inverse_cdf):
    """Draw one token per row. Nothing here waits for the device.

    Args:
        logits: (R, V), of any floating-point dtype.
        uniforms: (R,) float64 in [0, 1), one random number per row.
        forced: (R,) ids to take instead of the drawn token, or -1 where the row samples.
        temperature: 0 takes the most likely token, with its log-probability at temperature 1.
        find: finds the drawn tokens, as `inverse_cdf` does.

    Returns ids (R,) and logprobs (R,) in nats, which are NaN where the logits are not finite.
    """
    z = logits.float()
    if temperature not in (0, 1):
        z = z / temperature
    z_max = z.amax(-1, keepdim=True)  # (R, 1)
    ids, total = find((z - z_max).exp_(), uniforms)
    if temperature == 0:
        ids = z.argmax(-1)
    ids = torch.where(forced >= 0, forced, ids)
    # Where the logits are not finite, the search ends outside of the vocabulary.
    ids = ids.clamp(max=z.shape[1] - 1)
    z_drawn = z.gather(1, ids[:, None]) - z_max  # (R, 1)
    return ids, z_drawn[:, 0] - total.log().float()


# ---------------------------------------------------------------------------------- 16-bit rounding
LOST_BITS = {torch.bfloat16: 16, torch.float16: 13}  # of float32's 23 mantissa bits


def dithered(total, dtype, noise=None):
    """Round float32 sums to what 16 bits hold, by stochastic rounding with fixed random bits.

    Rounded to the nearest, an update below half the distance to the next 16-bit number would
    vanish: at a learning rate of 2e-5 that is nearly all of a LoRA's first steps. Here random bits
    are added below the last bit that is kept, and the rest is cut off, so that the mean over the
    weights is right (but for float16 numbers below 6e-5). A zero update changes nothing. The random
    bits are constants: rollout, update, evaluation and `merge` have the same weights.

    Args:
        total: float32, (..., out, in) or, with noise, (..., out), contiguous. It is overwritten.
        dtype: what holds the result later. Only bfloat16 and float16 need random bits.
        noise: random bits (out,) that every row gets. With None each number has its own.
    """
    if dtype not in LOST_BITS:
        return total
    # Of the many NaNs take the one whose bits survive the sum. CUDA's, 0x7fffffff, would become 0.
    total.nan_to_num_(torch.nan, torch.inf, -torch.inf)
    bits = total.view(torch.int32)
    if noise is not None:
        bits.add_(noise)
    else:
        noise = random_bits(total.device, LOST_BITS[dtype])
        # One addition for all but the tail: a GPU waits for launches.
        flat = bits.view(*bits.shape[:-2], -1)  # (..., out * in)
        whole = flat.shape[-1] // len(noise) * len(noise)
        flat[..., :whole].unflatten(-1, (-1, len(noise))).add_(noise)
        flat[..., whole:].add_(noise[:flat.shape[-1] - whole])
    bits.bitwise_and_(-1 << LOST_BITS[dtype])
    return total


@cache
def random_bits(device, n: int):
    """Return a constant sequence of random whole numbers below 2**n."""
    generator = torch.Generator().manual_seed(0)
    # An odd length, or rows of a weight whose width is a power of two would all get the same bits.
    return torch.randint(2**n, (2**18 - 5,), generator=generator, dtype=torch.int32).to(device)
