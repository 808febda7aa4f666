"""Adapters beside frozen weights that hold none, in host memory, and with an input computed again.

Each class changes one thing of `lora.Adapter`. `kind_of` puts those that a model's techniques ask
for in front of a kind, which may be a fork's own (DoRA).
"""
from contextlib import contextmanager
from functools import cache

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.weak import WeakTensorKeyDictionary

from extras.memory.rounding import Rounded
from lora import Adapter

# Activations that backward can compute again: tensor -> function without arguments.
recomputable = WeakTensorKeyDictionary()


@contextmanager
def kept_as_function(x):
    """Inside the block autograd keeps the function that computes x in place of x, if there is one.

    The function is freed with the node that keeps it.
    """
    again = recomputable.get(x)
    if not again:
        yield
        return

    def pack(tensor):
        return again if tensor is x else tensor

    def unpack(kept):
        return again() if kept is again else kept

    with saved_tensors_hooks(pack, unpack):
        yield


class Beside(Adapter):
    """The adapter of a weight in 4 bits or in host memory, which can hold no update.

    Where others are merged, its mode is "cached": while decoding, A and B are cast only once.

    Attributes:
        cast: A and B in the dtype of the model, once they were cast, else None.
    """
    mergeable = False
    cast = None

    def factors(self, x):
        if self.mode != "cached" or not torch.is_inference_mode_enabled():
            return super().factors(x)
        self.cast = self.cast or super().factors(x)
        return self.cast

    def merge(self, linear):
        self.mode = "cached"

    def unmerge(self, linear):
        super().unmerge(linear)
        self.cast = None


class OnHost(Adapter):
    """An adapter in host memory, where AdamW updates it: the device holds no gradient or moment."""
    device = "cpu"

    def __init__(self, linear, *settings):
        from extras.memory.checkpointing import to_host
        super().__init__(linear, *settings)
        for p in self.parameters():
            p.data = to_host(p.data)


class Recomputing(Adapter):
    """An adapter that does not keep its input where backward can compute it again."""

    def give_gradients(self, linear, x, output):
        with kept_as_function(x):
            return super().give_gradients(linear, x, output)


@cache
def kind_of(chosen, kind: type = Adapter) -> type:
    """Return the class of the adapters beside these techniques, a subclass of `kind`."""
    changes = [Rounded]
    if chosen.adamw_on_host:
        changes.append(OnHost)
    if chosen.load_in_4bit or chosen.stream_layers:
        changes.append(Beside)
    if chosen.recompute_pointwise:
        changes.append(Recomputing)
    return type(f"Lean{kind.__name__}", (*changes, kind), {})
