"""What 16 bits would lose: small updates beside a weight, and the small gradients of float16."""
import torch
from torch.nn import functional as F

from core.logprobs import LOST_BITS, dithered, random_bits
from core.model import facts
from lora import Adapter, adapted_linears

GRADIENT_SCALE = 2.0**12  # with it float16 gradients stay above 6e-8


class Rounded(Adapter):
    """An adapter beside a 16-bit weight: its sum is rounded by `dithered`, with bits per column.

    Rounded to the nearest, the sum would lose small updates.
    """

    def column_noise(self, output):
        """Return the random bits (out,) of the columns of a Linear's output (..., out)."""
        bits = random_bits(output.device, LOST_BITS.get(output.dtype, 0))
        return bits[:output.shape[-1]]

    def add(self, x, output, A, B, noise=None):
        if output.dtype not in LOST_BITS:
            return super().add(x, output, A, B)
        if noise is None:
            noise = self.column_noise(output)
        return _DitheredSum.apply(output, F.linear(F.linear(x, A), B), self.scale, noise)


class _DitheredSum(torch.autograd.Function):
    """Add scale x update (..., out) to a 16-bit output by `dithered`, with the sum's gradients."""

    @staticmethod
    def forward(ctx, output, update, scale, noise):
        # The sum is written over the update, as many tokens in float32 as a CPU's cache holds.
        # On a GPU each piece is six kernels, so pieces are 32 MiB there.
        ctx.mark_dirty(update)
        ctx.scale = scale
        tokens = max(1, 2**(18 if output.device.type == "cpu" else 23) // output.shape[-1])
        for y, u in zip(output.flatten(0, -2).split(tokens), update.flatten(0, -2).split(tokens)):
            u.copy_(dithered(y.float().add_(u, alpha=scale), y.dtype, noise))
        return update

    @staticmethod
    def backward(ctx, grad):
        return grad, grad * ctx.scale, None, None


def scale_gradients(model):
    """Let the gradients of a float16 model pass through it GRADIENT_SCALE times as large.

    Those of its adapters have their own size again. The scale is constant: an update that overflows
    is not finite, and is skipped.
    """
    facts(model).scale_gradient = enlarge
    for linear in adapted_linears(model).values():
        for p in linear.lora.parameters():
            p.register_hook(lambda grad: grad / GRADIENT_SCALE)


def enlarge(result):
    """Make the gradient of a result of `token_logprobs` GRADIENT_SCALE times as large."""
    def scale(grad):
        # It is None where the loss leaves the result out, as most losses do the entropy.
        if grad is not None:
            return grad * GRADIENT_SCALE

    if result.requires_grad:
        result.register_hook(scale)
