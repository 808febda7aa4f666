"""RMSNorm and SwiGLU of the Llama family that keep less for the backward pass.

A norm keeps its input as it came and 1 / rms, an MLP its gate and up products. The rest is computed
again in the backward pass, even the input that a merged adapter needs (`adapter.recomputable`). The
forward numbers equal the stock modules' to the bit.
"""
from functools import cache, partial

import torch
from torch.nn import functional as F

from extras.memory.adapter import recomputable
from lora import SAME_NUMBERS

FAMILY = {"llama", "qwen2", "qwen3"}
CPU_PIECE = 2**17  # numbers of a norm in float32 at once: on a CPU they stay in its cache
GPU_PIECE = 2**23  # a GPU waits for launches, so it takes more of them


def install(model, norm_of=None, mlp_of=None):
    """Give the forwards below to a model of the family, or others."""
    if model.config.model_type not in FAMILY:
        return
    norm_of, mlp_of = norm_of or norm, mlp_of or mlp
    for module in model.modules():
        kind = type(module).__name__
        if kind.endswith("RMSNorm"):
            module.forward = partial(norm_of, module, module.forward)
        elif kind.endswith("MLP") and model.config.hidden_act == "silu":
            module.forward = partial(mlp_of, module, module.forward)


def norm(module, stock, x):
    """Return the norm of x. A norm that trains runs as `stock`, which knows its gradient."""
    if not torch.is_grad_enabled() or module.weight.requires_grad:
        return stock(x)
    scale = inverse_rms(x, module.variance_epsilon)
    out = _RMSNorm.apply(x, module.weight, scale)
    recomputable[out] = cache(partial(rms_norm, x.detach(), module.weight, scale))
    return out


def mlp(module, stock, x):
    """Return the MLP of x."""
    if not torch.is_grad_enabled():
        return stock(x)
    return product_of(module, module.gate_proj(x), module.up_proj(x))


def product_of(module, gate, up):
    """Return the output of an MLP of its gate and up products (..., inner), which are kept."""
    product = _SwiGLU.apply(gate, up)
    recomputable[product] = cache(partial(swiglu, gate.detach(), up.detach()))
    return module.down_proj(product)


SAME_NUMBERS.update((norm, mlp))


def swiglu(gate, up):
    """Return silu(gate) * up (arXiv 2002.05202)."""
    return F.silu(gate).mul_(up)


class _SwiGLU(torch.autograd.Function):
    """`swiglu`, of which gate and up are kept."""

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return swiglu(gate, up)

    @staticmethod
    def backward(ctx, grad):
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * up, gate), swiglu(gate, grad)


@torch.no_grad()
def inverse_rms(x, eps):
    """Return 1 / rms(x) (..., 1) of x (..., D) in float32."""
    out = x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)
    for x_piece, out_piece in pieces(x, out):
        out_piece.copy_(x_piece.float().square().mean(-1, keepdim=True))
    return out.add_(eps).rsqrt_()


@torch.no_grad()
def rms_norm(x, weight, scale):
    """Return weight * x / rms(x) (arXiv 1910.07467) of x (..., D) in its dtype.

    scale is 1 / rms(x) (..., 1), and the product with it is in float32.
    """
    out = x.new_empty(x.shape)
    for x_piece, scale_piece, out_piece in pieces(x, scale, out):
        torch.mul(weight, (x_piece * scale_piece).to(x.dtype), out=out_piece)
    return out


class _RMSNorm(torch.autograd.Function):
    """`rms_norm`, of which x and the scale are kept."""

    @staticmethod
    def forward(ctx, x, weight, scale):
        ctx.save_for_backward(x, weight, scale)
        return rms_norm(x, weight, scale)

    @staticmethod
    def backward(ctx, grad):
        x, weight, scale = ctx.saved_tensors
        out = x.new_empty(x.shape)
        for x_piece, scale_piece, grad_piece, out_piece in pieces(x, scale, grad, out):
            unit = x_piece * scale_piece
            g = (grad_piece * weight).float()
            g -= unit.mul_((g * unit).mean(-1, keepdim=True))
            out_piece.copy_(g.mul_(scale_piece))
        return out, None, None


def pieces(*tensors):
    """Yield the same tokens of each tensor (..., D), few enough for float32."""
    numbers = CPU_PIECE if tensors[0].is_cpu else GPU_PIECE
    tokens = max(1, numbers // tensors[0].shape[-1])
    return zip(*(tensor.flatten(0, -2).split(tokens) for tensor in tensors))
