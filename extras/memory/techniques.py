"""The memory dial: the settings of --memory, and the techniques of each.

A setting of --memory names the techniques that a run uses, and adds to the one before it:

    plain         norms and MLPs of the Llama family keep less    pointwise.py
    checkpoint    layers run again in the backward pass           checkpointing.py
    4bit          the frozen base in 4 bits a weight (NF4)        quantization.py
    small         embedding and head in int8, MLPs in tiles, activations, adapter and AdamW
                  in host memory                                  adapter.py
    stream        the base in host memory, two layers at a time   streaming.py

No technique changes an equation. With a run's flags, bench/memory.py counts what each needs.
"""
from typing import NamedTuple

from core.model import facts


class Techniques(NamedTuple):
    """What makes training smaller. `load_model` applies it."""

    gradient_checkpointing: bool = False  # a layer keeps its input alone and runs again in backward
    load_in_4bit: bool = False  # NF4 with double quantization for the frozen base
    int8_head: bool = False  # frozen embedding and output head in int8, a scale per row
    mlp_tokens: int = 0  # tokens that go through an MLP at once; 0: all
    offload_activations: bool = False  # inputs of checkpointed layers wait in host memory
    adamw_on_host: bool = False  # adapter, gradients and moments in host memory
    stream_layers: bool = False  # base in host memory, two layers at a time on the device
    decode_rows: int = 128  # episodes that decode at once
    recompute_pointwise: bool = True  # norms and MLPs of the Llama family keep less

    @property
    def frozen_base(self) -> bool:
        """True if the base model's weights are stored in a form that cannot be trained."""
        return self.load_in_4bit or self.int8_head or self.stream_layers


PLAIN = Techniques()
# The words by which an adapter's file says in which form the base was stored.
FORMS = {"load_in_4bit": "nf4", "int8_head": "int8"}
CHECKPOINT = PLAIN._replace(gradient_checkpointing=True)
FOUR_BIT = CHECKPOINT._replace(load_in_4bit=True)
SMALL = FOUR_BIT._replace(
    int8_head=True, mlp_tokens=256, offload_activations=True, adamw_on_host=True, decode_rows=32)
STREAM = SMALL._replace(stream_layers=True)
SETTINGS = {"plain": PLAIN, "checkpoint": CHECKPOINT, "4bit": FOUR_BIT, "small": SMALL,
            "stream": STREAM}


def techniques(memory: str | Techniques, load_in_4bit: bool = False,
               gradient_checkpointing: bool = False) -> Techniques:
    """Return the techniques of a setting, plus the two that have standard flags of their own."""
    chosen = SETTINGS[memory] if isinstance(memory, str) else memory
    # The backward pass has to run a layer again whose weights or input are not on the device.
    gradient_checkpointing |= chosen.stream_layers or chosen.offload_activations
    return chosen._replace(
        load_in_4bit=chosen.load_in_4bit or load_in_4bit,
        gradient_checkpointing=chosen.gradient_checkpointing or gradient_checkpointing)


def techniques_of(model) -> Techniques:
    """Return the techniques that `load_model` applied, those of "plain" if it applied none."""
    return facts(model).techniques or PLAIN
