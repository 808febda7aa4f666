"""RMSNorm and SwiGLU of pointwise.py for a GPU, which waits for launches.

A norm is one kernel, and so is its gradient. It rounds to 16 bits once, as the norm of the rollout
does (extras/fast/fused.py), and not twice, as the stock modules do. The adapters of gate and up are
one product.
"""
from functools import cache, partial

import torch

from extras.launches.adapters import outputs
from extras.memory import pointwise
from extras.memory.adapter import recomputable
from lora import SAME_NUMBERS


def install(model):
    """Give the forwards below to a model of the Llama family."""
    pointwise.install(model, norm, mlp)


def norm(module, stock, x):
    """Return the norm of x. One that trains, or an old torch, takes that of pointwise.py."""
    arguments = x, module.weight, module.variance_epsilon
    if not has_kernel(*arguments[:2]) or module.weight.requires_grad:
        return pointwise.norm(module, stock, x)
    if not torch.is_grad_enabled():
        # The same kernel: a policy that is scored has to round as in the update.
        return fused_norm(*arguments)[0]
    out = _FusedNorm.apply(*arguments)
    recomputable[out] = cache(partial(again, x.detach(), *arguments[1:]))
    return out


def mlp(module, stock, x):
    """Return the MLP of x."""
    if not torch.is_grad_enabled():
        return stock(x)
    gate, up = outputs(x, module.gate_proj, module.up_proj)  # (..., inner) each
    return pointwise.product_of(module, gate, up)


SAME_NUMBERS.update((norm, mlp))


def has_kernel(x, weight) -> bool:
    """True if torch has the norm of x and its gradient as one kernel each: torch 2.9, on a GPU."""
    known = hasattr(torch.ops.aten, "_fused_rms_norm_backward")
    return known and not x.is_cpu and x.dtype == weight.dtype


# Called by these names, so that a device which has no such kernels can stand for a GPU.
def fused_norm(x, weight, eps):
    """Return the norm of x (..., D) and 1 / rms(x) (..., 1), by torch's kernel."""
    return torch.ops.aten._fused_rms_norm(x, weight.shape, weight, eps)


def fused_norm_backward(grad, x, scale, weight):
    """Return the gradient of x, by torch's kernel."""
    return torch.ops.aten._fused_rms_norm_backward(
        grad, x, weight.shape, scale, weight, [True, False])[0]


@torch.no_grad()
def again(x, weight, eps):
    """Return the norm of x once more, for the backward pass."""
    return fused_norm(x, weight, eps)[0]


class _FusedNorm(torch.autograd.Function):
    """`fused_norm`, of which x and the scale are kept."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        out, scale = fused_norm(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    def backward(ctx, grad):
        x, weight, scale = ctx.saved_tensors
        return fused_norm_backward(grad.contiguous(), x, scale, weight), None, None
