"""Log-probabilities of the output head in one pass: their gradient is kept in the forward pass."""
import torch

import core.logprobs
from core.logprobs import blocks, head_logits

PIECE = 2**19  # logits in float32 at once on a CPU, in whose cache they stay


def head_logprobs(model, hidden, targets, temperature):
    """Return what core's `head_logprobs` does, in less time and memory."""
    head = model.get_output_embeddings()
    weights = [weight for weight in head.parameters() if weight.requires_grad]
    return HeadLogprobs.apply(model, hidden, targets, temperature, *weights)


class HeadLogprobs(torch.autograd.Function):
    """Log-probability and entropy of softmax(logits / temperature), in chunks of tokens.

    With p = softmax(z) and H = -sum p log p:

        d log p_y / dz = onehot(y) - p        dH / dz = -p (log p + H)

    The forward pass keeps d log p_y / d hidden (N, D) while the chunk's softmax is at hand, and the
    backward pass only scales its rows. If the entropy carries a gradient or the head trains, the
    backward pass runs the head again.
    """

    @staticmethod
    def forward(ctx, model, hidden, targets, temperature, *weights):
        ctx.model = model
        ctx.temperature = temperature
        ctx.weights = weights
        ctx.chunk_size = max(1, core.logprobs.CHUNK // len(model.get_output_embeddings().weight))
        keep = ctx.needs_input_grad[1] and not weights
        slope = torch.empty_like(hidden) if keep else None  # (N, D)
        logprobs = hidden.new_empty(len(hidden), dtype=torch.float32)
        entropy = torch.empty_like(logprobs)
        for chunk in blocks(len(hidden), ctx.chunk_size):
            with torch.set_grad_enabled(keep):
                h = hidden[chunk].detach().requires_grad_(keep)
                logits = head_logits(model, h)  # (n, V)
            softmax(logits.detach(), targets[chunk, None], temperature, logprobs[chunk],
                     entropy[chunk], keep)
            if keep:
                slope[chunk], = torch.autograd.grad(logits, h, logits.detach())
            # Free them before the next chunk's are computed.
            del logits
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
        for chunk in blocks(len(hidden), max(1, ctx.chunk_size // 2)):
            with torch.enable_grad():
                h = hidden[chunk].detach().requires_grad_()
                logits = head_logits(ctx.model, h)  # (n, V)
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
    """Write the targets' log-probabilities (n,) and the entropy (n,), a few tokens at a time.

    The logits are (n, V), the targets (n, 1). `overwrite` replaces the logits by
    d log p_target / d logits: the graph of a head never reads its logits again.
    """
    piece_elements = PIECE if logits.is_cpu else core.logprobs.CHUNK
    for piece in blocks(len(logits), max(1, piece_elements // logits.shape[1])):
        logp = over(logits[piece].float(), temperature).log_softmax(-1)
        probs = logp.exp()
        logprobs[piece] = logp.gather(1, targets[piece])[:, 0]
        entropy[piece] = -logp.mul_(probs).sum(-1)
        if overwrite:
            probs.neg_().scatter_(1, targets[piece], 1, reduce="add")
            logits[piece] = over(probs, temperature)
        # Free them before the next piece's are computed.
        del logp, probs


def logits_gradient(logits, targets, temperature, entropy, grad_logprobs, grad_entropy):
    """Return the gradient of the logits (n, V). All others are (n, 1)."""
    logp = over(logits.float(), temperature).log_softmax(-1)
    probs = logp.exp()
    grad = logp.add_(entropy).mul_(probs).mul_(-grad_entropy)
    grad.addcmul_(probs, grad_logprobs, value=-1)
    grad.scatter_add_(1, targets, grad_logprobs)
    return over(grad, temperature).to(logits.dtype)


def over(x, temperature):
    """Return x / temperature, without the pass over x if the temperature is 1."""
    return x if temperature == 1 else x / temperature
