"""RMSNorm and SwiGLU of the Llama family that keep less for the backward pass than the stock modules do.

A stock norm keeps its input in float32, a stock MLP four tensors of its inner width. Here a norm keeps its input as it
came, an MLP its gate and its up product. What is a pointwise formula of these is computed again, also where a merged
adapter asks for its own input: that tensor carries `again()` for `lora._MergedLoRA`. Forward numbers are the stock
ones to the bit; without gradients the stock modules run themselves.
"""
from functools import cache, partial

import torch
from torch.nn import functional as F

FAMILY = {"llama", "qwen2", "qwen3"}
PIECE = 2**17  # numbers of a norm in float32 at once: on a CPU they stay in its cache; a GPU, which waits for
GPU_PIECE = 2**20  # launches, takes more of them


def install(model):
    """Give these forwards to a model of the family. Norms that train keep the stock one, which knows their gradient."""
    if model.config.model_type in FAMILY:
        for module in model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = partial(norm, module, module.forward)
            elif type(module).__name__.endswith("MLP") and model.config.hidden_act == "silu":
                module.forward = partial(mlp, module, module.forward)


def norm(module, stock, x):
    if not torch.is_grad_enabled() or module.weight.requires_grad:
        return stock(x)
    out = _RMSNorm.apply(x, module.weight, module.variance_epsilon)
    out.again = cache(partial(rms_norm, x.detach(), module.weight, module.variance_epsilon))
    return out


def mlp(module, stock, x):
    if not torch.is_grad_enabled():
        return stock(x)
    gate, up = module.gate_proj(x), module.up_proj(x)  # (..., inner) each
    product = _SwiGLU.apply(gate, up)
    product.again = cache(partial(swiglu, gate.detach(), up.detach()))
    return module.down_proj(product)


def swiglu(gate, up):
    return F.silu(gate).mul_(up)


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up (arXiv 2002.05202), of which gate and up are kept."""

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return swiglu(gate, up)

    @staticmethod
    def backward(ctx, grad):
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * up, gate), swiglu(gate, grad)


@torch.no_grad()
def rms_norm(x, weight, eps):
    """x (..., D), weight (D,) -> (..., D) in x's dtype."""
    out = x.new_empty(x.shape)
    for some, of_out in pieces(x, out):
        unit, _ = normalised(some, eps)
        torch.mul(weight, unit.to(x.dtype), out=of_out)
    return out


class _RMSNorm(torch.autograd.Function):
    """weight * (x / rms(x)) over the last axis, rms in float32 (arXiv 1910.07467), of which x is kept."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        ctx.eps = eps
        ctx.save_for_backward(x, weight)
        return rms_norm(x, weight, eps)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        out = x.new_empty(x.shape)
        for some, of_grad, of_out in pieces(x, grad, out):
            unit, scale = normalised(some, ctx.eps)
            g = (of_grad * weight).float()
            g -= unit.mul_((g * unit).mean(-1, keepdim=True))
            of_out.copy_(g.mul_(scale))
        return out, None, None


def normalised(x, eps):
    """x / rms(x) and 1 / rms(x), float32."""
    x = x.float()  # for float32 x itself
    scale = x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return x * scale, scale


def pieces(*tensors):
    """The same rows of each tensor (..., D), PIECE or GPU_PIECE numbers at a time."""
    rows = max(1, (PIECE if tensors[0].is_cpu else GPU_PIECE) // tensors[0].shape[-1])
    return zip(*(t.flatten(0, -2).split(rows) for t in tensors))
