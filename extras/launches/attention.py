"""The attention of Llama, Qwen2 and Qwen3 for an update on a GPU, which waits for launches.

The stock forward rotates queries and keys (RoPE) in 10 kernels, and in 14 of its backward pass.
Here they are 6 each.
"""
from functools import partial

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from core.packing import FAMILIES
from extras.fast.attention import causal_attention
from extras.launches.adapters import outputs
from lora import SAME_NUMBERS

# The sines of a pass with the sign of the rotation: sine -> (T, 1, d).
signed_sines = WeakTensorKeyDictionary()


def install(model):
    """Give a model of these families this forward."""
    if model.config.model_type in FAMILIES:
        for module in model.modules():
            if type(module).__name__.endswith("Attention"):
                module.forward = partial(attend, module, module.forward)


def attend(module, stock, hidden_states, position_embeddings, attention_mask=None, **kwargs):
    """Return what the module's own forward, `stock`, does.

    With a cache, on a CPU and with another attention function `stock` does it.
    """
    has_cache = any(kwargs.get(name) is not None for name in ("cache", "past_key_values"))
    is_ours = module.config._attn_implementation == "causal_attention"
    if has_cache or hidden_states.is_cpu or not is_ours:
        return stock(hidden_states, position_embeddings, attention_mask, **kwargs)
    cos, sin = position_embeddings  # (B, T, d)
    heads = *hidden_states.shape[:-1], -1, module.head_dim
    query, key, value = (x.view(heads) for x in outputs(
        hidden_states, module.q_proj, module.k_proj, module.v_proj))  # (B, T, H or H_kv, d)
    if hasattr(module, "q_norm"):
        query, key = module.q_norm(query), module.k_norm(key)
    query, key = (_Rotated.apply(x, cos[:, :, None], with_sign(sin)) for x in (query, key))
    kwargs["sliding_window"] = getattr(module, "sliding_window", None)
    output, weights = causal_attention(
        module, *(x.transpose(1, 2) for x in (query, key, value)), attention_mask,
        scaling=module.scaling, **kwargs)
    return module.o_proj(output.flatten(2)), weights


SAME_NUMBERS.add(attend)


def with_sign(sin):
    """Return the sine (B, T, d) as (B, T, 1, d), its first half negative."""
    if sin not in signed_sines:
        first, second = sin.chunk(2, -1)
        signed_sines[sin] = torch.cat([-first, second], -1)[:, :, None]
    return signed_sines[sin]


class _Rotated(torch.autograd.Function):
    """x cos + roll(x) sin over the halves of x (B, T, H, d), with `with_sign` of the sine.

    The gradient of a rotation is the rotation back: grad cos - roll(grad) sin.
    """

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return rotated(x, cos, sin, 1)

    @staticmethod
    def backward(ctx, grad):
        return rotated(grad, *ctx.saved_tensors, -1), None, None


def rotated(x, cos, sin, direction):
    # A transposed gradient would be copied behind this.
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    torch.mul(x, cos, out=out)
    return out.addcmul_(x.roll(x.shape[-1] // 2, -1), sin, value=direction)
