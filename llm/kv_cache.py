"""The cache of the decoding engine, in which every row has a length of its own."""
import math
import mmap

import torch
from torch.nn import functional as F


def empty_pages(like, shape):
    """Return zeros of this shape, with the dtype and the device of `like`.

    On a CPU they are pages of their own, which take no memory until they are written.
    """
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    size = math.prod(shape) * like.element_size()
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=like.dtype).view(shape)


def keeps_states(model) -> bool:
    """True if transformers' own cache of this model holds states (of a convolution, a recurrence).

    A padding token would change them, so rows of such a model go through it in equal lengths.
    """
    from transformers.cache_utils import DynamicCache, LinearAttentionCacheLayerMixin
    layers = DynamicCache(config=model.config).layers
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)


class RowCache:
    """Keys and values of every layer, each a tensor (slots, H_kv, S, D), or its states.

    It takes the place of transformers' Cache. Before each forward pass of R rows and C tokens per
    row, `prepare` or `prepare_step` says which rows it is for and where their new tokens go.

    Attributes:
        tensors: (layer, "key" or "value") -> a tensor, made when the layer first writes to it.
        states: (layer, "conv" or "recurrent", number) -> the state after a row's last token,
            (slots, ...), made when the layer first writes to it.
        position: (R, C) the position of every new token in its row.
        span: how many positions of a row the pass reads.
        sdpa: attention by torch's fused kernel. On a CPU it is slow with a mask and one query.
    """

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
        which is kept free. Rows that have the first slots in order are read without a copy. The
        states are those of consecutive slots, whose rows have equal counts: all or none starts at 0.
        """
        needed = 1 + max(start + count for start, count in zip(starts, counts))
        self.reserve(needed)
        index = torch.tensor(slots, device=self.device)
        start = torch.tensor(starts, device=self.device)[:, None]
        position = start + torch.arange(max(counts), device=self.device)
        # On a CPU a bfloat16 product would copy a slice of the positions.
        span = 32 * math.ceil(needed / 32) if self.sdpa else self.capacity
        in_order = slots == list(range(len(slots)))
        read = slice(0, len(slots)) if in_order else index
        self.read = read, slice(None), slice(0, span)
        self.rows = slice(slots[0], slots[0] + len(slots))
        self.fresh = not any(starts)
        self._write(index, position.clamp(max=self.capacity - 1), span)

    def prepare_step(self, position, span: int):
        """Make the next pass write one token for each of the first R rows, at `position` (R,).

        It reads the first `span` positions. Nothing depends on the values of `position`, so a CUDA
        graph can replay it.
        """
        self.read = slice(0, len(position)), slice(None), slice(0, span)
        self.fresh = False
        self.rows = self.read[0]
        index = torch.arange(len(position), device=self.device)
        self._write(index, position[:, None], span)

    def _write(self, index, position, span: int):
        """Let the next pass write to these positions (R, C) of the slots `index` (R,)."""
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

    def get_conv_state(self, layer_idx: int, state_idx: int = 0):
        """Return the inputs (R, D, K) that a convolution sees again, or None for fresh rows."""
        return self._state((layer_idx, "conv", state_idx))

    def update_conv_state(self, new, layer_idx: int, state_idx=0, conv_kernel_size=None, **_):
        """Store the last inputs of a convolution and return those before `new` (R, D, C) with it.

        Fresh rows have zeros before, if `new` is shorter than the convolution's kernel.
        """
        width = conv_kernel_size or new.shape[-1]
        before = self.get_conv_state(layer_idx, state_idx)
        if before is not None:
            width = before.shape[-1]
            new = torch.cat([before, new], -1)
        elif new.shape[-1] < width:
            new = F.pad(new, (width - new.shape[-1], 0))
        self._store((layer_idx, "conv", state_idx), new[..., -width:])
        return new

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0):
        """Return the state (R, ...) of a recurrence, or None for fresh rows."""
        return self._state((layer_idx, "recurrent", state_idx))

    def update_recurrent_state(self, new, layer_idx: int, state_idx: int = 0, **_):
        """Store the state (R, ...) of a recurrence, and return it."""
        self._store((layer_idx, "recurrent", state_idx), new)
        return new

    # MiniMax's names for it.
    get_linear_cache = get_recurrent_state

    def set_linear_cache(self, layer_idx: int, new):
        self.update_recurrent_state(new, layer_idx)

    def _state(self, place):
        """Return a view of the rows' states. Some layers write into it what others give back."""
        return None if self.fresh else self.states[place][self.rows]

    def _store(self, place, new):
        if place not in self.states:
            self.states[place] = new.new_zeros(self.slots, *new.shape[1:])
        self.states[place][self.rows] = new

    def is_recording_past(self, layer_idx: int) -> bool:
        return False  # every state is the one after the last token

    def copied_states(self) -> list:
        """Return a copy of the states of the pass's rows."""
        return [state[self.rows].clone() for state in self.states.values()]

    def put_back(self, states: list, ended):
        """Give the rows of a pass where ended (R,) is True the states that were copied before it."""
        for state, before in zip(self.states.values(), states):
            rows = state[self.rows]
            rows.copy_(torch.where(ended.view(-1, *[1] * (rows.dim() - 1)), before, rows))

    def bias(self, window, copies: int, dtype):
        """Return (R, 1, copies * C, S): 0 where a query sees a key, else -inf.

        It is made once per pass. A query of a sliding layer sees `window` keys, its own included.
        The queries are repeated `copies` times.
        """
        if (window, copies) not in self.biases:
            key = torch.arange(self.span, device=self.device)
            query = self.position[:, None, :, None]
            hidden = key > query  # (R, 1, C, S)
            if window:
                hidden |= key <= query - window
            hidden = hidden.repeat(1, 1, copies, 1)
            bias = hidden.new_zeros(hidden.shape, dtype=dtype)
            self.biases[window, copies] = bias.masked_fill_(hidden, -torch.inf)
        return self.biases[window, copies]

    def prefix(self, slot: int, length: int) -> list:
        """Return views (H_kv, length, D) of a slot's first keys and values, and its states."""
        keys_and_values = [tensor[slot, :, :length] for tensor in self.tensors.values()]
        return keys_and_values + [state[slot] for state in self.states.values()]

    def swap(self, slot: int, other: int):
        """Exchange what two slots hold."""
        for tensor in (*self.tensors.values(), *self.states.values()):
            tensor[[slot, other]] = tensor[[other, slot]]

    def get_seq_length(self, *_):
        # Positions are passed explicitly. Nobody may derive them from the cache.
        return 0
