"""Let a device without a GPU's norm stand for a GPU: in one operation what is several elsewhere.

Only what counts operations and bytes needs it, tests/fake_cuda.py as well.
"""
from contextlib import contextmanager
from unittest import mock

import torch

from extras.launches import pointwise


@contextmanager
def norms_as_on_a_gpu():
    """Inside the block extras/launches/pointwise.py takes these operations for torch's kernels."""
    with (mock.patch.object(pointwise, "fused_norm", torch.ops.standing_for.fused_norm),
          mock.patch.object(pointwise, "fused_norm_backward",
                            torch.ops.standing_for.fused_norm_backward)):
        yield


@torch.library.custom_op("standing_for::fused_norm", mutates_args=())
def fused_norm(x: torch.Tensor, weight: torch.Tensor,
               eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of x and 1 / rms(x), as `pointwise.fused_norm` does."""
    return torch.ops.aten._fused_rms_norm(x, weight.shape, weight, eps)


@fused_norm.register_fake
def _(x, weight, eps):
    return torch.empty_like(x), x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)


@torch.library.custom_op("standing_for::fused_norm_backward", mutates_args=())
def fused_norm_backward(grad: torch.Tensor, x: torch.Tensor, scale: torch.Tensor,
                        weight: torch.Tensor) -> torch.Tensor:
    """Return the gradient of x, as `pointwise.fused_norm_backward` does."""
    unit = x.float() * scale
    g = grad.float() * weight.float()
    return ((g - unit * (g * unit).mean(-1, keepdim=True)) * scale).to(x.dtype)


@fused_norm_backward.register_fake
def _(grad, x, scale, weight):
    return torch.empty_like(x)
