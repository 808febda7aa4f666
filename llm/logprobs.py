"""What the policy says: log-probability and entropy of every trained token, with little memory.

    token_logprobs     the one function that algorithms call, and the one place that shifts
    hidden_states      rows that begin alike go through the model as one packed row, their beginning once
    _HeadLogprobs      head and softmax in chunks of tokens: no (B, T, V) tensor ever exists
    _BlockLogprobs     the same in blocks of the vocabulary, for a head in int8
"""
from functools import partial

import torch
from torch.nn import functional as F

from llm import quantization
from llm.facts import facts
from lora import GRADIENT_SCALE


def token_logprobs(model, token_ids, loss_mask, temperature: float = 1.0, chunk_elements: int = 2**23):
    """log pi(token t | tokens before t) and the policy's entropy there, both in nats, float32, differentiable.

    token_ids, loss_mask: (B, T), right-padded. Returns logprobs (B, T), entropy (B, T), both 0.0 where the mask is 0.
    The one place in this project that shifts: column t belongs to token t, predicted from column t - 1; column 0 is
    0.0. No attention mask is needed: behind a causal mask right padding is invisible to real tokens.
    The head runs on masked positions only, a chunk of them at a time, so that no (B, T, V) tensor ever exists; tokens
    before the first masked column that all rows have in common (system prompt, a group's task) go through once.
    """
    hidden, index = hidden_states(model, token_ids, loss_mask)  # (N, D), (B, T)
    where, head = loss_mask[:, 1:].bool(), model.get_output_embeddings()
    own = hidden[index[:, :-1][where]], token_ids[:, 1:][where], temperature, chunk_elements  # (n, D), (n,)
    if isinstance(head, quantization.Int8Head):
        logprobs, entropy = _BlockLogprobs.apply(partial(head_logits, model), len(head.weight), *own)  # (n,) (n,)
    else:
        logprobs, entropy = _HeadLogprobs.apply(
            partial(head_logits, model), *own, *[p for p in head.parameters() if p.requires_grad])  # (n,) (n,)
    if hidden.dtype == torch.float16:
        logprobs, entropy = _Scaled.apply(logprobs), _Scaled.apply(entropy)
    blank = hidden.new_zeros(token_ids.shape, dtype=torch.float32)  # (B, T)
    at = F.pad(where, (1, 0))  # (B, T)
    return blank.masked_scatter(at, logprobs), blank.masked_scatter(at, entropy)


class _Scaled(torch.autograd.Function):
    """The identity, whose gradient is GRADIENT_SCALE times as large in float16 layers. `lora.Unscaled` takes it back.

    Constant, where others search for it: what overflows is an update that is skipped (Run.accept_update).
    """

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * GRADIENT_SCALE


def hidden_states(model, token_ids, loss_mask, share: bool | None = None):
    """The last hidden states (N, D) and, per token, the row of them that is its own: index (B, T).

    Where all rows begin alike, N = P + B (T - P) instead of B T: one packed row [prefix, row 1 .. row B], positions
    going on after the prefix in each. share None: where the model can, and a tenth of the tokens is saved.
    """
    B, T = token_ids.shape
    alike = (token_ids == token_ids[0]).all(0) & (loss_mask == 0).all(0)  # (T,)
    P = min(int(alike.long().cumprod(0).sum()), T - 1) if share is not False else 0
    window = getattr(model.config.get_text_config(), "sliding_window", None) or T
    if share is None and (not facts(model).shares_prefix or (B - 1) * P < 0.1 * B * T or window < T):
        P = 0
    device, column = token_ids.device, torch.arange(T, device=token_ids.device)
    row = torch.arange(B, device=device)[:, None]
    if not P:
        hidden = model.base_model(input_ids=token_ids, use_cache=False).last_hidden_state  # (B, T, D)
        return hidden.flatten(0, 1), row * T + column
    packed = torch.cat([token_ids[0, :P], token_ids[:, P:].flatten()])[None]  # (1, P + B * (T - P))
    position = torch.cat([column[:P], column[P:].repeat(B)])[None]
    no_mask = token_ids.new_ones(1, 1, 1, 1)  # or transformers makes one, square in all of the row's tokens
    hidden = model.base_model(input_ids=packed, position_ids=position, use_cache=False, attention_mask=no_mask,
                              shared_prefix=(P, B)).last_hidden_state  # (1, P + B * (T - P), D)
    return hidden[0], torch.where(column < P, column, row * (T - P) + column)


def head_logits(model, hidden, rows: slice | None = None):
    """(N, D) -> (N, V): the output head with the scalings that Cohere, Granite and Gemma 2 put behind it.

    rows: only those of V, of a head that is a quantization.Int8Table.
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
    """Log-probability and entropy of log_softmax(head(hidden) / temperature), in chunks over N.

    With p = softmax(z), H = -sum p log p:  d logp_y / dz = onehot(y) - p,  dH / dz = -p (log p + H). A token's
    log-probability is one number: forward keeps d logp / d hidden (N, D) while the chunk's softmax is at hand, and
    backward only scales its rows. Where entropy carries a gradient, or the head trains, backward runs the head again.
    """

    @staticmethod
    def forward(ctx, head, hidden, targets, temperature, chunk_elements, *weights):
        vocabulary = head(hidden[:1]).shape[-1]
        rows = max(1, chunk_elements // vocabulary)
        at_once = max(1, (2**19 if hidden.is_cpu else 2**21) // vocabulary)  # in float32; a CPU's stay in its cache
        at_once = min(at_once, rows, max(1, len(hidden)))
        logprobs, entropy = (hidden.new_empty(len(hidden), dtype=torch.float32) for _ in range(2))
        slope = torch.empty_like(hidden) if ctx.needs_input_grad[1] and not weights else None  # (N, D)
        z, p = (hidden.new_empty(at_once, vocabulary, dtype=torch.float32) for _ in range(2))  # every piece's in turn
        for part in quantization.blocks(len(hidden), rows):
            with torch.set_grad_enabled(slope is not None):
                h = hidden[part].detach().requires_grad_(slope is not None)
                logits = head(h)  # (n, V)
            for own in quantization.blocks(len(h), at_once):
                few, of_all = logits.detach()[own], slice(part.start + own.start, part.start + own.stop)  # (few, V)
                x, logp, target = z[:len(few)].copy_(few), p[:len(few)], targets[of_all, None]
                torch.log_softmax(x if temperature == 1 else x.div_(temperature), dim=-1, out=logp)
                probs = torch.exp(logp, out=x)
                logprobs[of_all] = logp.gather(1, target)[:, 0]
                entropy[of_all] = -logp.mul_(probs).sum(-1)
                if slope is not None:  # no graph of a head asks for its logits again: the gradient takes their place
                    probs.neg_().scatter_add_(1, target, torch.ones_like(target, dtype=probs.dtype))
                    few.copy_(probs if temperature == 1 else probs.div_(temperature))
            if slope is not None:
                slope[part], = torch.autograd.grad(logits, h, logits.detach())
            del logits, few  # or the next ones would be held beside them
        ctx.head, ctx.temperature, ctx.rows, ctx.weights = head, temperature, max(1, rows // 2), weights
        ctx.save_for_backward(hidden, targets, entropy, slope)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):
        hidden, targets, entropy, slope = ctx.saved_tensors
        if slope is not None and (grad_entropy == 0).all():
            return None, (slope * grad_logprobs[:, None]).to(hidden.dtype), None, None, None
        grad_hidden, grad_weights = torch.empty_like(hidden), [torch.zeros_like(w) for w in ctx.weights]
        for part in quantization.blocks(len(hidden), ctx.rows):
            with torch.enable_grad():
                h = hidden[part].detach().requires_grad_()
                logits = ctx.head(h)  # (n, V)
            logp = F.log_softmax(_over(logits.detach().float(), ctx.temperature), dim=-1)  # (n, V)
            p = logp.exp()
            grad = logp.add_(entropy[part, None]).mul_(p).mul_(-grad_entropy[part, None])
            grad.addcmul_(p, grad_logprobs[part, None], value=-1)
            grad.scatter_add_(1, targets[part, None], grad_logprobs[part, None])
            grad_hidden[part], *chunk = torch.autograd.grad(
                logits, (h, *ctx.weights), _over(grad, ctx.temperature).to(logits.dtype))
            del logits, logp, p, grad
            for total, new in zip(grad_weights, chunk):
                total += new
        return None, grad_hidden, None, None, None, *grad_weights


class _BlockLogprobs(torch.autograd.Function):
    """The same over blocks of the vocabulary, with an online logsumexp: one pass over a head too large to unpack.

    Running maximum m, total = sum exp(z - m) and mean = sum exp(z - m) z are rescaled when m rises; then
    lse = m + log total, log p = z_y - lse, H = lse - mean / total. Kept for the backward pass, which goes over the
    blocks again: hidden, targets, lse and H.
    """

    @staticmethod
    def forward(ctx, head, vocabulary, hidden, targets, temperature, chunk_elements):
        rows = max(128, chunk_elements // 2 // max(1, len(hidden)))
        ctx.blocks = quantization.blocks(vocabulary, min(quantization.BLOCK_ROWS, rows))
        m = hidden.new_full((len(hidden),), -torch.inf, dtype=torch.float32)  # (n,)
        total, mean, own = torch.zeros_like(m), torch.zeros_like(m), torch.zeros_like(m)
        for rows in ctx.blocks:
            z = _over(head(hidden, rows).float(), temperature)  # (n, v)
            before, m = m, torch.maximum(m, z.amax(-1))
            inside = (targets >= rows.start) & (targets < rows.stop)
            own += z.gather(1, (targets - rows.start).clamp(0, z.shape[1] - 1)[:, None])[:, 0] * inside
            weight, decay = (z - m[:, None]).exp_(), (before - m).exp_()
            total = total * decay + weight.sum(-1)
            mean = mean * decay + weight.mul_(z).sum(-1)
        lse = m + total.log()
        entropy = lse - mean / total
        ctx.head, ctx.temperature = head, temperature
        ctx.save_for_backward(hidden, targets, lse, entropy)
        return own - lse, entropy

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):
        hidden, targets, lse, entropy = ctx.saved_tensors
        total = torch.zeros_like(hidden, dtype=torch.float32)
        for rows in ctx.blocks:
            with torch.enable_grad():
                h = hidden.detach().requires_grad_()
                logits = ctx.head(h, rows)  # (n, v)
            logp = _over(logits.detach().float(), ctx.temperature) - lse[:, None]
            p = logp.exp()
            grad = logp.add_(entropy[:, None]).mul_(grad_entropy[:, None]).add_(grad_logprobs[:, None]).mul_(p).neg_()
            inside = (targets >= rows.start) & (targets < rows.stop)
            grad.scatter_add_(1, (targets - rows.start).clamp(0, grad.shape[1] - 1)[:, None],
                              (grad_logprobs * inside)[:, None])
            total += torch.autograd.grad(logits, h, _over(grad, ctx.temperature).to(logits.dtype))[0]
        return None, None, total.to(hidden.dtype), None, None, None


def _over(x, temperature):
    return x if temperature == 1 else x / temperature  # a pass over (n, V) is not free


@torch.no_grad()
def score(model, token_ids, mask, temperature, run, batch):
    """Return `token_logprobs` (B, T) without gradient, in the run's micro-batches, by all its ranks."""
    logprobs = torch.zeros(token_ids.shape, device=token_ids.device)
    for rows in run.micro_batches(batch, "score"):
        logprobs[rows] = token_logprobs(model, token_ids[rows], mask[rows], temperature)[0]
    return run.ranks.add(logprobs)
