"""What is traded for memory: --memory, --load_in_4bit and --gradient_checkpointing.

    techniques.py       the settings of --memory, and the techniques of each
    reading.py          reads weights in the form in which they stay: the `read` of load_model
    folders.py          ... from the hub, and what a folder may lack
    skeleton.py         ... one tensor at a time, which tensor_reader.py finds
    adapter.py          adapters beside weights that hold none, or in host memory: its `kind`
    rounding.py         sums beside 16-bit weights, and the gradients of float16
    checkpointing.py    what runs again in the backward pass, and MLPs in tiles
    pointwise.py        norms and MLPs that keep less
    quantization.py     4 bits for layers, int8 for embedding and output head
    streaming.py        layers in host memory, two of them at a time on the device

`lean(load_model)` is `lora.load_model` with these flags. No technique changes an equation: beside
each stands a test that log-probabilities and gradients are core's, and to what rounding.

Only this layer chooses the class of a model's adapters (`kind`). What others ask of it has to go
another way: extras/fast replaces the forward of a Linear whose merged weight it frees. A fork's own
kind goes in as `load_model(kind=...)`, and `adapter.kind_of` puts the techniques' changes in front
of it: they wrap `factors`, `add`, `give_gradients` and `merge`, and a kind overrides the rest.
"""
from dataclasses import dataclass
from functools import wraps

import torch

from core.config import UserError, flag
from core.model import choose_device, facts, is_adapter, newest, read_settings
from extras.memory.adapter import kind_of
from extras.memory.pointwise import install
from extras.memory.reading import Reader
from extras.memory.rounding import scale_gradients
from extras.memory.techniques import FORMS, SETTINGS, Techniques, techniques
from lora import Adapter

__all__ = ["MemoryFlags", "SETTINGS", "Techniques", "lean", "techniques"]


@dataclass(kw_only=True)
class MemoryFlags:
    """How much memory a step may take."""

    heading = "memory"
    memory: str = flag("plain", "what is traded for memory; bench/memory.py counts every setting",
                       choices=tuple(SETTINGS))
    load_in_4bit: bool = flag(False, "keep the frozen weights in NF4 with double quantization")
    gradient_checkpointing: bool = flag(
        False, "recompute the layers in the backward pass: a third more time")


def lean(load_model):
    """Return this load_model with a memory dial."""
    @wraps(load_model)
    def load(path: str, *, memory: str | Techniques = "plain", load_in_4bit: bool = False,
             gradient_checkpointing: bool = False, lora_r: int = 0, train: bool = True,
             merge: bool | None = None, kind: type = Adapter, **options):
        """Return (model, tokenizer) as `load_model` does.

        Args:
            memory: a setting of the memory dial, or techniques one by one.
            load_in_4bit, gradient_checkpointing: the standard names of two of these settings.
        """
        chosen = techniques(memory, load_in_4bit, gradient_checkpointing)
        if train and not lora_r and (chosen.frozen_base or chosen.adamw_on_host):
            raise UserError(
                "--load_in_4bit and --memory 4bit, small and stream are for weights that stay as "
                "they are; give --lora_r, e.g. 16, or --memory checkpoint")
        device = choose_device(options.get("device"))
        if chosen.frozen_base and device.type == "mps":
            raise UserError("--load_in_4bit and --memory 4bit, small and stream are not written "
                            "for a Mac's GPU; give --memory checkpoint, or --device cpu")
        path = newest(path)
        quantized = ""
        if is_adapter(path):
            quantized = read_settings(path, kind.peft_entries)["quantized_base"]
            if merge is None and not lora_r:
                # One that is only played stays beside quantized or streamed weights.
                merge = train or not (quantized or chosen.frozen_base)
        if not merge:
            chosen = chosen._replace(**{name: True for name in FORMS if FORMS[name] in quantized})
        read = Reader(chosen, quantized if merge else "")
        model, tokenizer = load_model(path, lora_r=lora_r, train=train, merge=merge, read=read,
                                      kind=kind_of(chosen, kind), **options)
        note(model, chosen)
        if model.get_output_embeddings().weight.dtype == torch.float16:
            scale_gradients(model)
        use(model, chosen, read.stream)
        return model, tokenizer
    return load


def note(model, chosen: Techniques):
    """Write into the model's facts what other files read of these techniques."""
    known = facts(model)
    known.techniques = chosen
    known.decode_rows = chosen.decode_rows
    # In host memory the fused kernel is the fastest one.
    known.fused_adamw = chosen.adamw_on_host or None
    if chosen.int8_head:
        known.head_logprobs = model.get_output_embeddings().logprobs
    known.stored_as = ",".join(FORMS[name] for name in FORMS if getattr(chosen, name))


def use(model, chosen: Techniques, stream):
    """Put the forwards in place that keep less for the backward pass."""
    if chosen.recompute_pointwise:
        install(model)
    if not (chosen.mlp_tokens or chosen.gradient_checkpointing):
        return
    # The plain setting recomputes no more.
    from extras.memory.checkpointing import checkpoint_layers, tile_mlps
    if chosen.mlp_tokens:
        tile_mlps(model, chosen.mlp_tokens)
    if chosen.gradient_checkpointing:
        checkpoint_layers(model, chosen.offload_activations, stream)
