"""Gradient checkpointing and layer streaming: layers that run again, from weights on the host.

A checkpointed layer keeps only its input and runs again in the backward pass. Frozen layers that
are streamed stay in host memory, two of them at a time on the device.
"""
from contextlib import nullcontext
from functools import partial

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, get_device_states, set_device_states


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
    """Return a copy in host memory, pinned to make the way back fast; a CPU's tensor as it is."""
    if tensor.device.type != "cuda":
        return tensor.to("cpu")
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def pinned(tensor):
    """Return the tensor in host memory, pinned if there is a GPU so that copies need not wait."""
    if torch.cuda.is_available() and not tensor.is_meta:
        return tensor.pin_memory()
    return tensor.to("cpu")


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
        ctx.gpus, ctx.cuda_random = get_device_states(inputs[0])
        ctx.save_for_backward(*inputs)
        return run(*inputs)

    @staticmethod
    def backward(ctx, grad, *_):
        inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.random.fork_rng(ctx.gpus), torch.enable_grad():
            # Dropout draws the masks of the forward pass again.
            torch.set_rng_state(ctx.random)
            set_device_states(ctx.gpus, ctx.cuda_random)
            out = ctx.run(*inputs)
        # Attention weights, which Bamba's layers return beside it, have no part in the loss.
        torch.autograd.backward(out[0] if isinstance(out, tuple) else out, grad)
        return None, None, *(x.grad for x in inputs)


# -------------------------------------------------------------------------------------- streaming
class Stream:
    """The layers' weights in host memory, and two slots on the device that take turns.

    Layer i is always a view of slot i % 2. `enter(i)` runs before layer i: it makes sure that the
    slot holds the layer, and starts to copy the next layer in the direction of travel into the
    other slot. The views are valid until then, so the backward pass has to run each layer again.
    """

    def __init__(self, layers, device):
        """Move the layers' weights into host buffers and make them views of the slots."""
        self.copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.holds = [None, None]  # the layer in each slot
        self.last = -1  # the layer entered last
        largest = max(map(layer_bytes, layers))
        self.slots = [torch.empty(largest, dtype=torch.uint8, device=device) for _ in range(2)]
        self.hosts = []  # one flat uint8 tensor per layer
        for i, layer in enumerate(layers):
            self.hosts.append(self.move_to_host(layer, self.slots[i % 2]))
            layer.register_forward_pre_hook(partial(self.enter, i))

    def move_to_host(self, layer, slot):
        """Return a host buffer with the layer's tensors, which become views of the slot."""
        pinned = self.copies is not None
        host = torch.empty(layer_bytes(layer), dtype=torch.uint8, pin_memory=pinned)
        start = 0
        for key, tensor in layer.state_dict().items():
            place = slice(start, start + tensor.nbytes)
            start += aligned_bytes(tensor)
            host[place].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            view = slot[place].view(tensor.dtype).view(tensor.shape)
            path, _, name = key.rpartition(".")
            module = layer.get_submodule(path)
            if name in module._parameters:
                view = nn.Parameter(view, requires_grad=False)
            setattr(module, name, view)
        return host

    def enter(self, i: int, *hook_arguments):
        """Make layer i usable now and start to fetch the layer that comes next."""
        self.fetch(i)
        if self.copies:
            torch.cuda.current_stream().wait_stream(self.copies)
        if torch.is_inference_mode_enabled():
            # The sweep after the last layer begins at the bottom.
            ahead = (i + 1) % len(self.hosts)
        else:
            # The backward pass goes down.
            ahead = i + (i > self.last) - (i < self.last)
        self.last = i
        if 0 <= ahead < len(self.hosts) and ahead % 2 != i % 2:
            self.fetch(ahead)

    def fetch(self, i: int):
        """Copy layer i into its slot unless it is there."""
        slot = i % 2
        if self.holds[slot] == i:
            return
        self.holds[slot] = i
        if self.copies:
            # All work that uses the slot's old layer has been queued by now.
            self.copies.wait_stream(torch.cuda.current_stream())
        # On a CPU the stream is None, and the copy is a plain one.
        with torch.cuda.stream(self.copies):
            self.slots[slot][:len(self.hosts[i])].copy_(self.hosts[i], non_blocking=True)


def aligned_bytes(tensor) -> int:
    """Return the bytes of a tensor, rounded up so that the next one begins at a multiple of 64."""
    return -(-tensor.nbytes // 64) * 64


def layer_bytes(layer) -> int:
    """Return the bytes of all tensors of a layer, one behind the other."""
    return sum(map(aligned_bytes, layer.state_dict().values()))
