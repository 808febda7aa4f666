"""Gradient checkpointing: what runs again in the backward pass keeps only its input.

A whole layer and a tile of an MLP are run so, and a part of a head in int8.
"""
from contextlib import nullcontext
from functools import partial

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint, get_device_states, set_device_states

from lora import SAME_NUMBERS


def layers_of(model) -> list:
    """Return the transformer layers of a model."""
    from transformers.modeling_layers import GradientCheckpointingLayer
    return [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]


def checkpoint_layers(model, offload: bool = False, stream=None):
    """Make every layer keep its input alone and run again in the backward pass.

    With `offload` the inputs wait in host memory. `stream` brings the weights of streamed layers.
    """
    for i, layer in enumerate(layers_of(model)):
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = partial(_checkpointed, i, stream, offload)


def _checkpointed(i: int, stream, offload, run, hidden, *others):
    """Run layer i as transformers calls it; `others` are its arguments that need no gradient."""
    def run_layer(hidden):
        if stream:
            stream.enter(i)
        return run(hidden, *others)
    # Unlike torch's save_on_cpu, these copies do not wait for the layer's work on a GPU.
    to_device = partial(torch.Tensor.to, device=hidden.device, non_blocking=True)
    with saved_tensors_hooks(to_host, to_device) if offload else nullcontext():
        # Keys and values that later layers read (Gemma 4) are outputs of this layer too.
        if "shared_kv_states" in run.keywords:
            return checkpoint(run_layer, hidden, use_reentrant=False)
        return recompute(run_layer, hidden)


def to_host(tensor):
    """Return the tensor in host memory, pinned if there is a GPU so that copies need not wait."""
    if tensor.is_meta or not torch.cuda.is_available():
        return tensor.to("cpu")
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def tile_mlps(model, tokens: int):
    """Let every MLP see `tokens` tokens at a time, so that the inner width of one tile is held.

    MLPs with experts stay as they are: which expert a token takes depends on all of them.
    """
    for layer in layers_of(model):
        mlp = getattr(layer, "mlp", None)
        if mlp and all(isinstance(m, nn.Linear) or not list(m.parameters())
                       for m in mlp.children()):
            mlp.forward = partial(tiled, mlp, mlp.forward, tokens)


def tiled(mlp, run, tokens, x):
    """Return run(x) for x (..., D), computed a tile at a time and again in the backward pass.

    An adapter in host memory goes to the device once, and its gradients are summed there.
    """
    if not x.is_cpu:
        # A GPU waits for launches. A step takes more memory while it decodes than in such tiles.
        tokens *= 16
    if x[..., 0].numel() <= tokens:
        return run(x)
    copies = {name: p.to(x.device, non_blocking=True) for name, p in mlp.named_parameters()
              if p.requires_grad and p.device != x.device}

    def run_tile(tile, *weights):
        return functional_call(mlp, dict(zip(copies, weights)), tile)
    tiles = x.flatten(0, -2).split(tokens)  # (tokens, D) each
    return torch.cat([recompute(run_tile, tile, *copies.values()) for tile in tiles]).view(x.shape)


SAME_NUMBERS.add(tiled)


def recompute(run, *inputs):
    """Return run(*inputs), a tensor or a tuple that begins with one, keeping the inputs alone."""
    if not torch.is_grad_enabled():
        return run(*inputs)
    needs_gradient = inputs[0].new_empty(0, requires_grad=True)
    return _Recompute.apply(run, needs_gradient, *inputs)


class _Recompute(torch.autograd.Function):
    """run(*inputs), whose graph is built in the backward pass (re-entrant; arXiv 1604.06174).

    torch.utils.checkpoint refuses torch.autograd.grad in this form, and needs an input that
    requires a gradient. Here an empty tensor plays that role.
    """

    @staticmethod
    def forward(ctx, run, requires_grad, *inputs):
        ctx.run = run
        ctx.random = torch.get_rng_state()
        ctx.is_mps = inputs[0].device.type == "mps"
        if ctx.is_mps:  # whose module of torch has no devices to choose from
            ctx.gpus, ctx.gpu_random = [], torch.mps.get_rng_state()
        else:
            ctx.gpus, ctx.gpu_random = get_device_states(inputs[0])
        ctx.save_for_backward(*inputs)
        return run(*inputs)

    @staticmethod
    def backward(ctx, grad, *_):
        inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.random.fork_rng(ctx.gpus), torch.enable_grad():
            # Dropout draws the masks of the forward pass again.
            torch.set_rng_state(ctx.random)
            if ctx.is_mps:
                after = torch.mps.get_rng_state()
                torch.mps.set_rng_state(ctx.gpu_random)
            else:
                set_device_states(ctx.gpus, ctx.gpu_random)
            out = ctx.run(*inputs)
        if ctx.is_mps:
            torch.mps.set_rng_state(after)
        # Attention weights, which Bamba's layers return beside it, have no part in the loss.
        torch.autograd.backward(out[0] if isinstance(out, tuple) else out, grad)
        return None, None, *(x.grad for x in inputs)
