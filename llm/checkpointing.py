"""Gradient checkpointing: keep only a layer's input and run it again in the backward pass."""
from functools import partial

import torch
from torch import nn

from llm.streaming import Stream, layers_of


def checkpoint_layers(model, offload: bool = False, stream: Stream | None = None):
    """Make every layer keep its input alone and run again in the backward pass.

    Args:
        model: changed in place
        offload: True lets the inputs wait in host memory
        stream: what brings a layer's weights before it runs again, if layers are streamed
    """
    for i, layer in enumerate(layers_of(model)):
        before = partial(stream.enter, i) if stream else None
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = partial(_checkpointed, before, offload)


def _checkpointed(before, offload, run, hidden, *others):
    """Run a layer as transformers calls it; `others` are its arguments that need no gradient."""
    def run_layer(hidden):
        return run(hidden, *others)
    return recompute(run_layer, hidden, before=before, offload=offload)


def tile_mlps(model, tokens: int):
    """Let every MLP see `tokens` tokens at a time, so that the inner width of one tile is held.

    MLPs with experts stay as they are: which expert a token takes depends on all of them.
    """
    for layer in layers_of(model):
        mlp = getattr(layer, "mlp", None)
        if mlp and all(isinstance(m, nn.Linear) or not list(m.parameters())
                       for m in mlp.children()):
            mlp.forward = partial(tiled, mlp.forward, tokens)


def tiled(run, tokens, x):
    """Return run(x) for x (..., D), computed a tile at a time and again in the backward pass."""
    if x[..., 0].numel() <= tokens:
        return run(x)
    tiles = x.flatten(0, -2).split(tokens)  # (tokens, D) each
    return torch.cat([recompute(run, tile) for tile in tiles]).view(x.shape)


def recompute(run, *inputs, before=None, offload: bool = False):
    """Return run(*inputs), of which the graph keeps the inputs alone.

    Args:
        run: function of tensors to one tensor; it runs again in the backward pass
        inputs: its tensors
        before: called before it runs again
        offload: True lets the inputs wait in host memory
    """
    if not torch.is_grad_enabled():
        return run(*inputs)
    needs_gradient = inputs[0].new_empty(0, requires_grad=True)
    return _Recompute.apply(run, before, offload, needs_gradient, *inputs)


class _Recompute(torch.autograd.Function):
    """run(*inputs), whose graph is built in the backward pass (re-entrant; arXiv 1604.06174).

    torch.utils.checkpoint is not used because it finds saved tensors by hooks, keeps the random
    states of all devices, and cannot call Stream.enter first. In its re-entrant form it also needs
    an input that requires a gradient. Here an empty tensor plays that role.
    """

    @staticmethod
    def forward(ctx, run, before, offload, requires_grad, *inputs):
        ctx.run, ctx.before = run, before
        ctx.device = inputs[0].device
        ctx.random = torch.get_rng_state()
        if ctx.device.type == "cuda":
            ctx.cuda_random = torch.cuda.get_rng_state()
        ctx.save_for_backward(*map(to_host, inputs) if offload else inputs)
        return run(*inputs)

    @staticmethod
    def backward(ctx, grad):
        if ctx.before:
            ctx.before()
        inputs = []
        for saved in ctx.saved_tensors:
            inputs.append(saved.to(ctx.device, non_blocking=True).detach().requires_grad_())
        cuda = ctx.device.type == "cuda"
        with torch.random.fork_rng([ctx.device] if cuda else []), torch.enable_grad():
            # Dropout draws the masks of the forward pass again.
            torch.set_rng_state(ctx.random)
            if cuda:
                torch.cuda.set_rng_state(ctx.cuda_random)
            out = ctx.run(*inputs)
        torch.autograd.backward(out, grad)
        return None, None, None, None, *(x.grad for x in inputs)


def to_host(tensor):
    """Return a copy in host memory, pinned to make the way back fast; a CPU's tensor as it is."""
    if tensor.device.type != "cuda":
        return tensor.to("cpu")
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
