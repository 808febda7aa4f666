"""Adapters in few kernels.

    Crew     Linears of one shape, whose adapters are merged as one product
    Fleet    all adapters of a model: A and B are cast at once, and so are their gradients
    Fast     the change of `lora.Adapter` that asks them
    outputs  Linears of one input, whose adapters are one product

Nothing changes but the order of sums. It is for a GPU. Float16, whose gradients are scaled by a
hook of each parameter, adapters in host memory and a fork's own kind are left as they are.
"""
from collections import defaultdict
from functools import partial

import torch
from torch.autograd import Function, Variable
from torch.nn import functional as F

from core.logprobs import dithered
from extras.memory.adapter import kept_as_function
from extras.memory.quantization import Linear4bit
from lora import SAME_NUMBERS, Adapter, adapted_forward, adapted_linears, is_adapted

MERGED = 2**24  # weights that are summed in float32 at once: 64 MiB


class Crew:
    """Linears of one shape, whose weights are merged together when the first one asks."""

    def __init__(self, linears):
        self.linears = linears
        self.merged = {}  # Linear -> its merged weight, until it asks for it

    def weight_of(self, linear):
        """Return the merged weight of a Linear that is not merged yet."""
        if linear not in self.merged:
            self.merged = dict(zip(self.linears, self.merge()))
        return self.merged.pop(linear)

    @torch.no_grad()
    def merge(self):
        """Return the merged weights, as `Adapter.merge` computes each."""
        adapters = [linear.lora for linear in self.linears]
        weights = [adapter.frozen_weight(linear)
                   for adapter, linear in zip(adapters, self.linears)]
        A, B = (torch.stack([getattr(adapter, x).detach() for adapter in adapters]) for x in "AB")
        total = torch.stack(weights).float().baddbmm_(B, A, alpha=adapters[0].scale)  # (n, out, in)
        return dithered(total, weights[0].dtype).to(weights[0].dtype).unbind()


class Fleet:
    """All adapters of a model whose weights are merged, or lie beside in 4 bits, for an update.

    Attributes:
        cast: adapter -> A and scale B in the dtype of the model, once they were cast.
        flat_A: all of these A behind each other.
        pending: parameters and their gradients in that dtype, until the backward pass ends.
    """

    def __init__(self, adapters, dtype):
        self.adapters = adapters
        self.dtype = dtype
        self.drop()

    def drop(self):
        """Forget what belongs to the weights as they were."""
        self.cast = {}
        self.flat_A = None
        self.pending = []

    def factors(self, adapter):
        """Return A (r, in) and scale B (out, r) of an adapter in the dtype of the model."""
        if not self.cast:
            A, B = ([getattr(a, x).detach() for a in self.adapters] for x in "AB")
            self.flat_A = joined(A).to(self.dtype)
            B_scaled = joined(B).mul_(adapter.scale).to(self.dtype)
            self.cast = dict(zip(self.adapters, zip(apart(self.flat_A, A), apart(B_scaled, B))))
        return self.cast[adapter]

    def joint_A(self, adapters):
        """Return A of adapters of one input, neighbours in the fleet, as one (n r, in)."""
        first = self.factors(adapters[0])[0]
        start, numbers = first.storage_offset(), len(adapters) * first.numel()
        return self.flat_A[start:start + numbers].view(-1, first.shape[1])

    def take(self, adapter, grad_A, grad_B):
        """Keep the gradients of an adapter until the backward pass ends."""
        Variable._execution_engine.queue_callback(self.give)
        self.pending += [(adapter.A, grad_A), (adapter.B, grad_B)]

    @torch.no_grad()
    def give(self):
        """Add the gradients that are pending to those of the parameters, as autograd does."""
        pending, self.pending = self.pending, []
        if not pending:
            return
        weights, grads = zip(*pending)
        first, sums, addends = [], [], []
        for p, grad in zip(weights, apart(joined(grads).float(), weights)):
            if p.grad is None:
                p.grad = grad
                first.append(id(p))
            elif id(p) in first:
                # The Linear ran twice in this pass: no two sums of one launch may be the same.
                p.grad += grad
            else:
                first.append(id(p))
                sums.append(p.grad)
                addends.append(grad)
        if sums:
            torch._foreach_add_(sums, addends)


def joined(tensors):
    """Return all numbers of these tensors behind each other."""
    return torch.cat([tensor.flatten() for tensor in tensors])


def apart(flat, tensors) -> list:
    """Return parts of a flat tensor in the shapes of these tensors."""
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors)]


class Fast(Adapter):
    """An adapter that merges with its crew, and whose factors and gradients are its fleet's."""
    crew = None
    fleet = None

    def merge(self, linear):
        if not self.crew or not self.mergeable:
            return super().merge(linear)
        self.mode = "merged"
        self.frozen = self.frozen_weight(linear)
        linear.weight.data = self.crew.weight_of(linear)

    def unmerge(self, linear):
        super().unmerge(linear)
        if self.crew:
            self.crew.merged = {}
        if self.fleet:
            self.fleet.drop()


def outputs(x, *linears) -> tuple:
    """Return the outputs (..., out) of Linears of one input x (..., in)."""
    kinds = {(type(linear), is_adapted(linear) and linear.lora.mode) for linear in linears}
    if len(kinds) > 1 or not all(takes_part(linear) for linear in linears):
        return tuple(linear(x) for linear in linears)
    factors = [p for linear in linears for p in (linear.lora.A, linear.lora.B)]
    with kept_as_function(x):
        return _Outputs.apply(x, linears, *factors)


def adapted(linear, x):
    """Return the output (..., out) of an adapted Linear for x (..., in)."""
    return outputs(x, linear)[0] if takes_part(linear) else adapted_forward(linear, x)


SAME_NUMBERS.add(adapted)


def takes_part(linear) -> bool:
    """True if `_Outputs` is for this Linear now: in an update, and beside 4 bits in its scores.

    Scores of 4 bits have to round as the update does, also where the adapter is off: the KL
    divergence from a policy to itself would not be 0.
    """
    adapter = getattr(linear, "lora", None)
    if not getattr(adapter, "fleet", None) or adapter.dropout and adapter.training:
        return False
    if type(linear) is Linear4bit:
        return adapter.mode in ("cached", "off") and not torch.is_inference_mode_enabled()
    return adapter.mode == "merged" and torch.is_grad_enabled()


class _Outputs(Function):
    """W x + scale B A x for Linears of the same x, and the gradients of x and of all A and B.

    A merged weight holds the adapter. With 4 bits both are one sum, in float32 inside the product,
    which is rounded to 16 bits once. No small update is lost there: what is rounded differs from
    one token to the next, whereas W x alone would have been rounded already.

    A and B are arguments so that a backward pass comes through here. Their gradients do not return
    from it: the fleet takes them.
    """

    @staticmethod
    def forward(ctx, x, linears, *factors):
        ctx.linears = linears
        ctx.weights = [linear.weight.data for linear in linears]
        adapters = [linear.lora for linear in linears]
        ctx.is_off = adapters[0].mode == "off"
        ctx.is_beside = adapters[0].mode == "cached"
        flat = x.flatten(0, -2)  # (N, in)
        down = flat @ adapters[0].fleet.joint_A(adapters).T if ctx.is_beside else None
        # Packed weights are saved for their version counters, as in quantization.py.
        packed = [linear.weight for linear in linears] if ctx.is_beside else []
        ctx.save_for_backward(x, down, *packed)
        shape = *x.shape[:-1], -1
        return tuple(output(linear, flat, down, i).view(shape)
                     for i, linear in enumerate(linears))

    @staticmethod
    def backward(ctx, *grads):
        x, down, *_ = ctx.saved_tensors
        flat = x.flatten(0, -2)  # (N, in)
        grads = [grad.flatten(0, -2) for grad in grads]  # (N, out) each
        grad_x = None
        if ctx.needs_input_grad[0]:
            for linear, weight, grad in zip(ctx.linears, ctx.weights, grads):
                if type(linear) is Linear4bit:
                    weight = linear.dequantize(grad.dtype)
                grad_x = grad @ weight if grad_x is None else grad_x.addmm_(grad, weight)
        if not ctx.is_off:
            adapters = [linear.lora for linear in ctx.linears]
            A = adapters[0].fleet.joint_A(adapters)  # (n r, in)
            up = give_to_fleet(adapters, flat, grads, flat @ A.T if down is None else down)
            if ctx.is_beside and grad_x is not None:
                grad_x.addmm_(up, A)
        grad_x = None if grad_x is None else grad_x.view(x.shape)
        return grad_x, None, *[None] * (2 * len(ctx.linears))


def output(linear, x, down, i: int):
    """Return the output (N, out) of Linear i of a group for x (N, in) and down = A x (N, n r)."""
    if type(linear) is not Linear4bit:
        return F.linear(x, linear.weight, linear.bias)
    if down is not None:
        B = linear.lora.fleet.factors(linear.lora)[1]
        total = F.linear(down.unflatten(1, (-1, B.shape[1]))[:, i], B, linear.bias)
    elif linear.bias is None:
        total = x.new_zeros(len(x), linear.out_features)
    else:
        total = linear.bias.repeat(len(x), 1)
    return total.addmm_(x, linear.dequantize(x.dtype).T)


def give_to_fleet(adapters, x, grads, down):
    """Give the gradients of A and B to the fleet. Return up = scale B^T g of all, (N, n r).

    Args:
        x: (N, in)
        grads: g (N, out) of every adapter's output
        down: A x of all, (N, n r)
    """
    fleet, r = adapters[0].fleet, len(adapters[0].A)
    up = torch.empty_like(down)
    nothing = down.new_empty(())
    B_grads = []
    for adapter, g, up_i, down_i in zip(adapters, grads, up.split(r, 1), down.split(r, 1)):
        torch.mm(g, fleet.factors(adapter)[1], out=up_i)
        B_grads.append(torch.addmm(nothing, g.T, down_i, beta=0, alpha=adapter.scale))
    for adapter, A_grad, B_grad in zip(adapters, (up.T @ x).split(r), B_grads):
        fleet.take(adapter, A_grad, B_grad)
    return up


def launch_together(model):
    """Form crews and a fleet of a model's adapters, where that is for this model."""
    linears = [linear for linear in adapted_linears(model).values()
               if isinstance(linear.lora, Fast)]
    if not linears or model.dtype == torch.float16:
        return
    # On a CPU, a meta device that stands for one too, it would only move work. No Mac tried it.
    if linears[0].weight.is_cpu or linears[0].weight.is_mps:
        return
    fleet = Fleet([linear.lora for linear in linears], model.get_output_embeddings().weight.dtype)
    alike = defaultdict(list)
    for linear in linears:
        linear.lora.fleet = fleet
        linear.forward = partial(adapted, linear)
        if linear.lora.mergeable:
            alike[linear.weight.shape, linear.lora.A.shape].append(linear)
    for (shape, _), of_one_shape in alike.items():
        size = max(1, MERGED // shape.numel())
        for start in range(0, len(of_one_shape), size):
            crew = Crew(of_one_shape[start:start + size])
            for linear in crew.linears:
                linear.lora.crew = crew
