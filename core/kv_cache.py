"""The KV cache of the decoding engine, in which every row has a length of its own."""
import math
import mmap
from importlib import import_module

import torch

STATES = "extras.models.state_cache"  # what some models need


def make_cache(model, slots: int):
    """Return a cache for this model. It holds states if transformers' own cache of it does."""
    from transformers.cache_utils import DynamicCache, LinearAttentionCacheLayerMixin
    for layer in DynamicCache(config=model.config).layers:
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            return import_module(STATES).StateCache(slots, model.device)
    return RowCache(slots, model.device)


def empty_pages(like, shape):
    """Return zeros of this shape, with the dtype and the device of `like`.

    On a CPU they are pages of their own, which take no memory until they are written.
    """
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    size = math.prod(shape) * like.element_size()
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=like.dtype).view(shape)


class RowCache:
    """Keys and values of every layer, each a tensor (slots, H_kv, S, D).

    It takes the place of transformers' Cache. Before each forward pass of R rows and C tokens per
    row, `prepare` or `prepare_step` says which rows it is for and where their new tokens go.

    Attributes:
        tensors: (layer, "key" or "value") -> a tensor, made when the layer first writes to it.
        states: what only a `StateCache` has.
        keeps_states: True for a `StateCache`, whose states padding would change.
        position: (R, C) the position of every new token in its row.
        begins: True if the new tokens are the first of their rows.
        rows: the slots of the pass, a slice if they are neighbours.
        span: how many positions of a row the pass reads.
        read, write: the index of what the pass reads and writes in a tensor.
        sdpa: attention by torch's fused kernel. On a CPU it is slow with a mask and one query.
    """

    keeps_states = False

    def __init__(self, slots: int, device):
        self.tensors = {}
        self.states = {}
        self.slots = slots
        self.capacity = 0  # S
        self.device = device
        self.sdpa = device.type == "cuda"

    def prepare(self, slots: list[int], starts: list[int], counts: list[int]):
        """Make the next pass write `counts` tokens per row, from position `starts`.

        Shorter rows are padded on the right. The padding is stored like tokens, at positions that
        no query looks at before the row's own next tokens are written there, or at the last one,
        which is kept free. Rows that have neighbouring slots in order are read without a copy.
        """
        self.begins = not any(starts)
        needed = 1 + max(start + count for start, count in zip(starts, counts))
        self.reserve(needed)
        index = torch.tensor(slots, device=self.device)
        start = torch.tensor(starts, device=self.device)[:, None]
        position = start + torch.arange(max(counts), device=self.device)
        span = 32 * math.ceil(needed / 32)
        # On a CPU a bfloat16 product copies a slice, which pays below a third of the positions.
        if not self.sdpa and self.capacity < 3 * span:
            span = self.capacity
        first, end = slots[0], slots[0] + len(slots)
        are_neighbours = slots == list(range(first, end))
        self.rows = slice(first, end) if are_neighbours else index
        self._place(index, position.clamp(max=self.capacity - 1), span)

    def prepare_step(self, position, span: int):
        """Make the next pass write one token for each of the first R rows, at `position` (R,).

        It reads the first `span` positions and looks at no value of `position`, as graphs demand.
        """
        self.begins = False
        self.rows = slice(0, len(position))
        index = torch.arange(len(position), device=self.device)
        self._place(index, position[:, None], span)

    def _place(self, index, position, span: int):
        """Let the next pass write to these positions (R, C) of the slots `index` (R,)."""
        self.read = self.rows, slice(None), slice(0, span)
        self.write = index[:, None], slice(None), position
        # A query beyond the span, of a row that waits, could see no key of a sliding window, and
        # the softmax over none is NaN, which a slot keeps for the next row.
        self.position = position.clamp(max=span - 1)
        self.span = span
        self.biases = {}

    def reserve(self, needed: int):
        """Make room for `needed` tokens per row. When the cache grows, all tensors are new ones."""
        if needed <= self.capacity:
            return
        self.capacity = 32 * math.ceil(max(needed, 1.25 * self.capacity) / 32)
        for place, old in self.tensors.items():
            slots, heads, length, width = old.shape
            self.tensors[place] = empty_pages(old, (slots, heads, self.capacity, width))
            self.tensors[place][:, :, :length] = old

    def update(self, key, value, layer: int, *_, **__):
        """Store new keys and values (R, H_kv, C, D) and return all of the rows' (R, H_kv, S, D)."""
        places = (layer, "key"), (layer, "value")
        for place, new in zip(places, (key, value)):
            if place not in self.tensors:
                shape = self.slots, new.shape[1], self.capacity, new.shape[3]
                self.tensors[place] = empty_pages(new, shape)
            self.tensors[place][self.write] = new.transpose(1, 2)  # (R, C, H_kv, D)
        return [self.tensors[place][self.read] for place in places]

    def bias(self, window, dtype):
        """Return (R, 1, C, S): 0 where a query sees a key, else -inf.

        It is made once per pass. A query of a sliding layer sees `window` keys, its own included.
        """
        if window not in self.biases:
            key = torch.arange(self.span, device=self.device)
            query = self.position[:, None, :, None]
            hidden = key > query  # (R, 1, C, S)
            if window:
                hidden |= key <= query - window
            bias = hidden.new_zeros(hidden.shape, dtype=dtype)
            self.biases[window] = bias.masked_fill_(hidden, -torch.inf)
        return self.biases[window]

    def views(self, length: int) -> list:
        """Return views of the first keys and values (slots, H_kv, length, D), and the states."""
        return [tensor[:, :, :length] for tensor in self.tensors.values()] + [*self.states.values()]

    def prefix(self, slot: int, length: int) -> list:
        """Return a copy of what a slot holds: its first keys and values, and its states."""
        return [view[slot].clone() for view in self.views(length)]

    def copy_prefix(self, prefix: list, slots: list[int], length: int):
        """Write what `prefix` returned to all these slots."""
        index = torch.tensor(slots, device=self.device)
        for view, source in zip(self.views(length), prefix):
            view[index] = source

    def exchange(self, slots: list[int], others: list[int], length: int):
        """Exchange each slot's first keys and values, and its states, with the other of its place.

        None is named twice.
        """
        to, of = torch.tensor([slots + others, others + slots], device=self.device)
        for view in self.views(length):
            view[to] = view[of]

    def get_seq_length(self, *_):
        # Positions are passed explicitly. Nobody may derive them from the cache.
        return 0
