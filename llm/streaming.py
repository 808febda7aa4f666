"""Layer streaming: frozen layers stay in host memory, two of them at a time on the device."""
from functools import partial

import torch
from torch import nn

ALIGNMENT = 64  # bytes


class Stream:
    """The layers' weights in host memory, and two slots on the device that take turns.

    Layer i is always a view of slot i % 2. `enter(i)` runs before layer i: it makes sure that the
    slot holds the layer, and starts to copy the next layer in the direction of travel into the
    other slot. The views stay valid until another layer of the same slot is entered. Therefore the
    backward pass has to run each layer again, and every sweep should serve all rows of a batch.
    """

    def __init__(self, layers, device):
        """Move the layers' weights into host buffers and make them views of the slots."""
        self.layer_count = len(layers)
        self.copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.holds = [None, None]  # the layer in each slot
        self.last = -1  # the layer entered last
        self.hosts = []  # one flat uint8 tensor per layer
        leaves = []  # (slot, store, name, start, dtype, shape, bytes) of every tensor
        for i, layer in enumerate(layers):
            leaves += [(i % 2, *leaf) for leaf in self.move_to_host(layer)]
        largest = max(map(len, self.hosts))
        self.slots = [torch.empty(largest, dtype=torch.uint8, device=device) for _ in range(2)]
        for slot, store, name, start, dtype, shape, nbytes in leaves:
            view = self.slots[slot][start:start + nbytes].view(dtype).view(shape)
            if name in ("weight", "bias"):
                view = nn.Parameter(view, requires_grad=False)
            store[name] = view
        for i, layer in enumerate(layers):
            layer.register_forward_pre_hook(partial(self._before_layer, i))

    def move_to_host(self, layer) -> list[tuple]:
        """Copy a layer into one host buffer and return where each of its tensors lies there."""
        tensors = []
        for module in layer.modules():
            for store in (module._parameters, module._buffers):
                for name, tensor in store.items():
                    if tensor is not None and name not in module._non_persistent_buffers_set:
                        tensors.append((store, name, tensor))
        leaves, start = [], 0
        for store, name, tensor in tensors:
            leaves.append((store, name, start, tensor.dtype, tensor.shape, tensor.nbytes))
            start += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        host = torch.empty(start, dtype=torch.uint8, pin_memory=self.copies is not None)
        for (store, name, tensor), (*_, start, dtype, shape, nbytes) in zip(tensors, leaves):
            host[start:start + nbytes].view(dtype).view(shape).copy_(tensor)
            # Free it now, so that loading peaks at the base and one layer.
            store[name] = tensor.data.new_empty(0).expand(0)
        self.hosts.append(host)
        return leaves

    def _before_layer(self, i, module, inputs):
        self.enter(i)

    def enter(self, i: int):
        """Make layer i usable now and start to fetch the layer that comes next."""
        self.fetch(i)
        if self.copies:
            torch.cuda.current_stream().wait_stream(self.copies)
        top = self.layer_count - 1
        if i == top and torch.is_inference_mode_enabled():
            # While decoding, the next sweep begins at the bottom.
            ahead = 0
        elif i < self.last or i == self.last == top:
            # The backward pass goes down.
            ahead = i - 1
        else:
            ahead = i + 1
        self.last = i
        if 0 <= ahead <= top and ahead % 2 != i % 2:
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


def layers_of(model) -> list:
    """Return the transformer layers of a model."""
    from transformers.modeling_layers import GradientCheckpointingLayer
    return [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
