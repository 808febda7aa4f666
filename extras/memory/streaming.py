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
        sizes = [sum(map(aligned_bytes, layer.state_dict().values())) for layer in layers]
        largest = max(sizes)
        self.slots = [torch.empty(largest, dtype=torch.uint8, device=device) for _ in range(2)]
        self.hosts = []  # one flat uint8 tensor per layer
        # Torch rounds pinned memory up to a power of two, so at least eight layers share a block.
        # One block for all would be in memory beside all that is not copied yet.
        block_bytes = 1 << (8 * largest - 1).bit_length()
        block = torch.empty(0)
        for i, layer in enumerate(layers):
            if len(block) < sizes[i]:
                block = torch.empty(min(block_bytes, sum(sizes[i:])), dtype=torch.uint8,
                                    pin_memory=self.copies is not None)
            host, block = block.tensor_split([sizes[i]])
            self.move_to_host(layer, host, self.slots[i % 2])
            self.hosts.append(host)
            layer.register_forward_pre_hook(partial(self.enter, i))

    def move_to_host(self, layer, host, slot):
        """Copy the layer's tensors into its host buffer and make them views of the slot."""
        start = 0
        views = {}
        for name, tensor in layer.state_dict().items():
            place = slice(start, start + tensor.nbytes)
            start += aligned_bytes(tensor)
            host[place].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            views[name] = slot[place].view(tensor.dtype).view(tensor.shape)
        layer.load_state_dict(views, assign=True)

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

