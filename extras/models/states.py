"""The cache of models whose past is more than keys and values: convolutions and recurrences.

A layer of LFM2, Qwen3.5, Granite 4 or Mamba keeps a state of fixed size instead of keys and values,
or beside them. It is the state after a row's last token, and there is no way back from it. So rows
go through such a model without padding, and a row that decodes along after its end is put back.
"""
from itertools import groupby

import torch
from torch.nn import functional as F

from core.engine import RowCache


class StateCache(RowCache):
    """A `RowCache` that holds states as well, by the names of transformers' Cache.

    The rows of a pass have consecutive slots and equal counts, and all or none of them starts at 0.

    Attributes:
        states: (layer, "conv" or "recurrent", number) -> a tensor (slots, ...), made when the layer
            first writes to it.
    """

    def __init__(self, slots: int, device):
        super().__init__(slots, device)
        self.states = {}

    def batches(self, rows):
        """Return the rows in batches of consecutive slots and equal counts, so without padding."""
        # Among neighbours whose slots are consecutive, slot - i is the same.
        kinds = [(row.slot - i, len(row.pending), bool(row.length)) for i, row in enumerate(rows)]
        kind_of = dict(zip(rows, kinds)).get
        batches = [list(batch) for _, batch in groupby(rows, kind_of)]
        return batches if len(batches) > 1 else super().batches(rows)

    def views(self, length: int) -> list:
        """Return views of the first keys and values of all slots, and the states."""
        return super().views(length) + [*self.states.values()]

    def get_conv_state(self, layer_idx: int, state_idx: int = 0):
        """Return the inputs (R, D, K) that a convolution sees again, or None where rows begin.

        This is a view, and so is a recurrence's: some layers write into it.
        """
        return None if self.begins else self.states[layer_idx, "conv", state_idx][self.read[0]]

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0):
        """Return the state (R, ...) of a recurrence, or None where rows begin."""
        return None if self.begins else self.states[layer_idx, "recurrent", state_idx][self.read[0]]

    def update_conv_state(self, new, layer_idx: int, state_idx=0, conv_kernel_size=None, **_):
        """Store the last inputs of a convolution and return those before `new` (R, D, C) with it.

        Rows that begin have zeros before, if `new` is shorter than the convolution's kernel.
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

    def update_recurrent_state(self, new, layer_idx: int, state_idx: int = 0, **_):
        """Store the state (R, ...) of a recurrence, and return it."""
        self._store((layer_idx, "recurrent", state_idx), new)
        return new

    # MiniMax's names for it.
    get_linear_cache = get_recurrent_state

    def set_linear_cache(self, layer_idx: int, new):
        self.update_recurrent_state(new, layer_idx)

    def _store(self, place, new):
        if place not in self.states:
            self.states[place] = new.new_zeros(self.slots, *new.shape[1:])
        self.states[place][self.read[0]] = new

    def is_recording_past(self, layer_idx: int) -> bool:
        return False  # only the state after the last token is kept

    def copied(self) -> list:
        """Return a copy of the states of the pass's rows."""
        return [state[self.read[0]].clone() for state in self.states.values()]

    def put_back(self, copies: list, ended):
        """Give the rows of the pass where `ended` (R,) is True the states of before."""
        for state, before in zip(self.states.values(), copies):
            rows = state[self.read[0]]
            rows.copy_(torch.where(ended.view(-1, *[1] * (rows.dim() - 1)), before, rows))
