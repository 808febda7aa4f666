"""Log-probability and entropy of every trained token, without a (B, T, V) tensor.

    token_logprobs    the function that algorithms call, and the only place that shifts tokens
    score             token_logprobs of a whole step, without gradient
    hidden_states     send rows that begin alike through the model as one packed row

The output head runs on chunks of tokens (_HeadLogprobs) or, if its weight is in int8, on blocks of
the vocabulary (_BlockLogprobs).
"""
from functools import partial

import torch
from torch.nn import functional as F

from llm.facts import facts
from llm.quantization import BLOCK_ROWS, Int8Head, blocks
from lora import GRADIENT_SCALE

CHUNK = 2**23  # logits that exist at once
CPU_PIECE = 2**19  # logits in float32 at once: on a CPU they stay in its cache
GPU_PIECE = 2**21


def token_logprobs(model, token_ids, loss_mask, temperature: float = 1.0,
                   chunk_elements: int = CHUNK):
    """Return log pi(token t | tokens before t) and the policy's entropy there, in nats.

    Column t belongs to token t and is predicted from column t - 1; column 0 is 0.0. The head runs
    on masked positions only. No attention mask is needed, because causal attention cannot see
    padding on the right.

    Args:
        model: the policy
        token_ids: (B, T), right-padded
        loss_mask: (B, T), 1 where a log-probability is wanted
        temperature: the logits are divided by it
        chunk_elements: logits that exist at once

    Returns logprobs (B, T) and entropy (B, T), float32, differentiable, 0.0 where the mask is 0.
    """
    hidden, index = hidden_states(model, token_ids, loss_mask)  # (N, D), (B, T)
    predicted = loss_mask[:, 1:].bool()  # (B, T - 1)
    inputs = hidden[index[:, :-1][predicted]], token_ids[:, 1:][predicted]  # (n, D), (n,)
    head, logits = model.get_output_embeddings(), partial(head_logits, model)
    if isinstance(head, Int8Head):
        logprobs, entropy = _BlockLogprobs.apply(
            logits, len(head.weight), *inputs, temperature, chunk_elements)  # (n,), (n,)
    else:
        weights = [p for p in head.parameters() if p.requires_grad]
        logprobs, entropy = _HeadLogprobs.apply(
            logits, *inputs, temperature, chunk_elements, *weights)  # (n,), (n,)
    if hidden.dtype == torch.float16:
        logprobs, entropy = _ScaleGradient.apply(logprobs), _ScaleGradient.apply(entropy)
    zeros = hidden.new_zeros(token_ids.shape, dtype=torch.float32)  # (B, T)
    columns = F.pad(predicted, (1, 0))  # (B, T)
    return zeros.masked_scatter(columns, logprobs), zeros.masked_scatter(columns, entropy)


@torch.no_grad()
def score(model, token_ids, mask, temperature: float, run, batch):
    """Return a step's log-probabilities (B, T), in the run's micro-batches, by all its ranks.

    Args:
        model: the policy
        token_ids: (B, T), right-padded
        mask: (B, T), 1 where a log-probability is wanted
        temperature: the logits are divided by it
        run: shares out the micro-batches and adds up what the ranks computed
        batch: the step's episodes
    """
    logprobs = torch.zeros(token_ids.shape, device=token_ids.device)
    for rows in run.micro_batches(batch, "score"):
        logprobs[rows], _ = token_logprobs(model, token_ids[rows], mask[rows], temperature)
    return run.ranks.add(logprobs)


class _ScaleGradient(torch.autograd.Function):
    """The identity, whose gradient is GRADIENT_SCALE times as large; `lora.Unscaled` undoes it.

    Float16 ends at 6e-8, and a token's share of a gradient is soon smaller. The scale is constant:
    an update that overflows is skipped (Run.accept_update).
    """

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * GRADIENT_SCALE


def hidden_states(model, token_ids, loss_mask, share: bool | None = None):
    """Return the last hidden states (N, D) and the index (B, T) of each token's own among them.

    If all rows begin alike with P tokens, N is P + B (T - P) instead of B T: the model sees one
    packed row [prefix, row 1 .. row B], in which each row's positions continue after the prefix.

    Args:
        model: the policy
        token_ids: (B, T), right-padded
        loss_mask: (B, T); the shared prefix ends at its first 1
        share: None shares a prefix if the model can and a tenth of the tokens is saved
    """
    B, T = token_ids.shape
    columns = torch.arange(T, device=token_ids.device)
    rows = torch.arange(B, device=token_ids.device)[:, None]
    P = _shared_prefix(model, token_ids, loss_mask, share)
    if not P:
        hidden = model.base_model(input_ids=token_ids, use_cache=False).last_hidden_state
        return hidden.flatten(0, 1), rows * T + columns
    packed = torch.cat([token_ids[0, :P], token_ids[:, P:].flatten()])[None]  # (1, N)
    positions = torch.cat([columns[:P], columns[P:].repeat(B)])[None]  # (1, N)
    # Without a mask transformers would make one, square in all of the row's tokens.
    no_mask = token_ids.new_ones(1, 1, 1, 1)
    hidden = model.base_model(
        input_ids=packed, position_ids=positions, use_cache=False, attention_mask=no_mask,
        shared_prefix=(P, B)).last_hidden_state  # (1, N, D)
    return hidden[0], torch.where(columns < P, columns, rows * (T - P) + columns)


def _shared_prefix(model, token_ids, loss_mask, share: bool | None) -> int:
    """Return how many tokens before the first trained one are shared by all rows, or 0."""
    if share is False or share is None and not facts(model).shares_prefix:
        return 0
    B, T = token_ids.shape
    alike = (token_ids == token_ids[0]).all(0) & (loss_mask == 0).all(0)  # (T,)
    P = min(int(alike.long().cumprod(0).sum()), T - 1)
    window = getattr(model.config.get_text_config(), "sliding_window", None) or T
    saves_enough = (B - 1) * P >= 0.1 * B * T
    return P if share or saves_enough and window >= T else 0


def head_logits(model, hidden, rows: slice | None = None):
    """Return the logits (N, V) of hidden states (N, D), scaled as Cohere, Granite and Gemma 2 do.

    With `rows`, only that slice of V is computed, by a head whose weight is in int8.
    """
    head, config = model.get_output_embeddings(), model.config
    logits = head(hidden) if rows is None else head.block(hidden, rows)
    if getattr(config, "logit_scale", None):
        logits = logits * config.logit_scale
    if getattr(config, "logits_scaling", None):
        logits = logits / config.logits_scaling
    if cap := getattr(config, "final_logit_softcapping", None):
        logits = torch.tanh(logits / cap) * cap
    return logits


class _HeadLogprobs(torch.autograd.Function):
    """Log-probability and entropy of softmax(head(hidden) / temperature), in chunks of tokens.

    With p = softmax(z) and H = -sum p log p:

        d log p_y / dz = onehot(y) - p        dH / dz = -p (log p + H)

    The forward pass keeps d log p_y / d hidden (N, D) while the chunk's softmax is at hand, and the
    backward pass only scales its rows. If the entropy carries a gradient or the head trains, the
    backward pass runs the head again.
    """

    @staticmethod
    def forward(ctx, head, hidden, targets, temperature, chunk_elements, *weights):
        vocabulary = head(hidden[:1]).shape[-1]
        chunk_rows = max(1, chunk_elements // vocabulary)
        piece = max(1, (CPU_PIECE if hidden.is_cpu else GPU_PIECE) // vocabulary)
        piece = min(piece, chunk_rows, max(1, len(hidden)))
        buffers = [hidden.new_empty(piece, vocabulary, dtype=torch.float32) for _ in range(2)]
        logprobs = hidden.new_empty(len(hidden), dtype=torch.float32)
        entropy = torch.empty_like(logprobs)
        keep = ctx.needs_input_grad[1] and not weights
        slope = torch.empty_like(hidden) if keep else None  # (N, D)
        for chunk in blocks(len(hidden), chunk_rows):
            with torch.set_grad_enabled(keep):
                h = hidden[chunk].detach().requires_grad_(keep)
                logits = head(h)  # (n, V)
            _softmax(logits.detach(), targets[chunk, None], temperature, buffers,
                     logprobs[chunk], entropy[chunk], keep)
            if keep:
                slope[chunk], = torch.autograd.grad(logits, h, logits.detach())
            del logits  # Free them before the next chunk's are computed.
        ctx.head, ctx.temperature, ctx.weights = head, temperature, weights
        ctx.chunk_rows = max(1, chunk_rows // 2)
        ctx.save_for_backward(hidden, targets, entropy, slope)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):
        hidden, targets, entropy, slope = ctx.saved_tensors
        if slope is not None and (grad_entropy == 0).all():
            grad_hidden = (slope * grad_logprobs[:, None]).to(hidden.dtype)
            return None, grad_hidden, None, None, None
        grad_hidden = torch.empty_like(hidden)
        grad_weights = [torch.zeros_like(weight) for weight in ctx.weights]
        for chunk in blocks(len(hidden), ctx.chunk_rows):
            with torch.enable_grad():
                h = hidden[chunk].detach().requires_grad_()
                logits = ctx.head(h)  # (n, V)
            logp = F.log_softmax(_over(logits.detach().float(), ctx.temperature), dim=-1)
            probs = logp.exp()
            grad = logp.add_(entropy[chunk, None]).mul_(probs).mul_(-grad_entropy[chunk, None])
            grad.addcmul_(probs, grad_logprobs[chunk, None], value=-1)
            grad.scatter_add_(1, targets[chunk, None], grad_logprobs[chunk, None])
            grad = _over(grad, ctx.temperature).to(logits.dtype)
            grad_hidden[chunk], *chunk_weights = torch.autograd.grad(
                logits, (h, *ctx.weights), grad)
            del logits, logp, probs, grad
            for total, addend in zip(grad_weights, chunk_weights):
                total += addend
        return None, grad_hidden, None, None, None, *grad_weights


def _softmax(logits, targets, temperature, buffers, logprobs, entropy, overwrite: bool):
    """Write the targets' log-probabilities (n,) and the entropy (n,), a piece of rows at a time.

    Args:
        logits: (n, V) in the model's dtype
        targets: (n, 1)
        buffers: two float32 tensors (piece, V) that every piece uses in turn
        overwrite: True replaces the logits by d log p_target / d logits; the graph of a head never
            reads its logits again
    """
    for piece in blocks(len(logits), len(buffers[0])):
        target = targets[piece]
        z = buffers[0][:len(target)].copy_(logits[piece])
        logp = buffers[1][:len(target)]
        torch.log_softmax(z if temperature == 1 else z.div_(temperature), dim=-1, out=logp)
        probs = torch.exp(logp, out=z)
        logprobs[piece] = logp.gather(1, target)[:, 0]
        entropy[piece] = -logp.mul_(probs).sum(-1)
        if overwrite:
            ones = torch.ones_like(target, dtype=probs.dtype)
            slope = probs.neg_().scatter_add_(1, target, ones)
            logits[piece].copy_(slope if temperature == 1 else slope.div_(temperature))


class _BlockLogprobs(torch.autograd.Function):
    """The same in blocks of the vocabulary, for a head whose weight is too large to dequantize.

    One pass over the blocks keeps a running maximum m, total = sum exp(z - m) and
    mean = sum exp(z - m) z, which are rescaled when m rises. Then lse = m + log total,
    log p_y = z_y - lse and H = lse - mean / total. The backward pass computes the blocks again.
    """

    @staticmethod
    def forward(ctx, head, vocabulary, hidden, targets, temperature, chunk_elements):
        block_rows = max(128, chunk_elements // 2 // max(1, len(hidden)))
        ctx.blocks = blocks(vocabulary, min(BLOCK_ROWS, block_rows))
        m = hidden.new_full((len(hidden),), -torch.inf, dtype=torch.float32)  # (n,)
        total, mean, target_z = torch.zeros_like(m), torch.zeros_like(m), torch.zeros_like(m)
        for block in ctx.blocks:
            z = _over(head(hidden, block).float(), temperature)  # (n, v)
            place, inside = _places(targets, block)
            target_z += z.gather(1, place)[:, 0] * inside
            before, m = m, torch.maximum(m, z.amax(-1))
            weight = (z - m[:, None]).exp_()
            decay = (before - m).exp_()
            total = total * decay + weight.sum(-1)
            mean = mean * decay + weight.mul_(z).sum(-1)
        lse = m + total.log()
        entropy = lse - mean / total
        ctx.head, ctx.temperature = head, temperature
        ctx.save_for_backward(hidden, targets, lse, entropy)
        return target_z - lse, entropy

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):
        hidden, targets, lse, entropy = ctx.saved_tensors
        total = torch.zeros_like(hidden, dtype=torch.float32)
        for block in ctx.blocks:
            with torch.enable_grad():
                h = hidden.detach().requires_grad_()
                logits = ctx.head(h, block)  # (n, v)
            logp = _over(logits.detach().float(), ctx.temperature) - lse[:, None]
            probs = logp.exp()
            grad = logp.add_(entropy[:, None]).mul_(grad_entropy[:, None])
            grad.add_(grad_logprobs[:, None]).mul_(probs).neg_()
            place, inside = _places(targets, block)
            grad.scatter_add_(1, place, (grad_logprobs * inside)[:, None])
            total += torch.autograd.grad(
                logits, h, _over(grad, ctx.temperature).to(logits.dtype))[0]
        return None, None, total.to(hidden.dtype), None, None, None


def _places(targets, block: slice):
    """Return each target's column (n, 1) within a block, and a mask (n,) of those inside it."""
    inside = (targets >= block.start) & (targets < block.stop)
    return (targets - block.start).clamp(0, block.stop - block.start - 1)[:, None], inside


def _over(x, temperature):
    """Return x / temperature, without the pass over x if the temperature is 1."""
    return x if temperature == 1 else x / temperature
