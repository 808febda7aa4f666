"""Layer streaming: frozen layers stay in host memory, two of them at a time on the device."""
from functools import partial

import torch


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
        views = {}
        for name, tensor in layer.state_dict().items():
            place = slice(start, start + tensor.nbytes)
            start += aligned_bytes(tensor)
            host[place].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            views[name] = slot[place].view(tensor.dtype).view(tensor.shape)
        layer.load_state_dict(views, assign=True)
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
