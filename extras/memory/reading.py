"""Reading a model in the form in which its weights will stay: 4 bits, int8, in host memory.

A skeleton is built, a model whose parameters are on the meta device. `fill` gives it its weights
one tensor at a time, so that never more than one is held as it was stored.
"""
from collections import defaultdict
from contextlib import suppress
from unittest import mock

import torch
from torch import nn

from core.model import from_pretrained
from core.tiny import make_tiny
from extras.memory.checkpointing import layers_of
from extras.memory.folders import auto_class, check_kind, read_complete
from lora import ROUTERS


class Reader:
    """The `read` of `lora.load_model`.

    Attributes:
        chosen: the `Techniques` of the model.
        quantized: the forms that the weights are rounded to and not held in, as an adapter's file
            names them, "" for none.
        stream: brings the weights of streamed layers, None without.
    """

    def __init__(self, chosen, quantized: str = ""):
        self.chosen = chosen
        self.quantized = quantized
        self.stream = None

    def __call__(self, source, dtype, device, seed):
        """Return the model and tokenizer of a folder, of a hub id, or the tiny ones."""
        dtype = real_dtype(dtype, device)
        if source == "tiny" and self.is_sparing(device):
            made, tokenizer = make_tiny(seed)
            model = skeleton(made.config, made.dtype if dtype == "auto" else dtype)
            fill(model, made.to(model.dtype).state_dict().__getitem__, device, self.chosen)
        else:
            model, tokenizer = read_complete(source, dtype, device, seed, self.read_weights)
        if self.quantized:
            from extras.memory.quantization import round_weights
            round_weights(model.to(device), self.quantized)
        if self.chosen.stream_layers:
            from extras.memory.streaming import Stream
            self.stream = Stream(layers_of(model), device)
        return model, tokenizer

    def is_sparing(self, device) -> bool:
        """True if the weights are read one at a time. On the meta device there are shapes only."""
        return self.chosen.frozen_base or device.type == "meta"

    def read_weights(self, folder, config, dtype, device):
        """Return the model of a folder with this config."""
        from transformers import GenerationConfig

        # Its imports are of transformers' own ways of reading.
        from extras.memory.tensor_reader import check_stored, tensor_reader
        check_kind(folder, config)
        check_stored(folder)
        if not self.is_sparing(device):
            return from_pretrained(folder, config, dtype, device, auto_class(config))
        stored = real_dtype(config.dtype or torch.float32, device)
        model = skeleton(config, stored if dtype == "auto" else dtype)
        if device.type == "meta":
            read = model.state_dict().__getitem__
        else:
            read = tensor_reader(folder, model)
        fill(model, read, device, self.chosen)
        # Without such a file the model has the one that from_config made.
        with suppress(OSError):
            model.generation_config = GenerationConfig.from_pretrained(folder)
        return model


def real_dtype(dtype, device):
    """Return float16 in place of bfloat16 on a GPU that only emulates it (before Ampere)."""
    if dtype == torch.bfloat16 and device.type == "cuda":
        if not torch.cuda.is_bf16_supported(including_emulation=False):
            return torch.float16
    return dtype


def skeleton(config, dtype):
    """Return the model of a config, its parameters on the meta device; buffers have numbers."""
    register = nn.Module.register_parameter

    def register_on_meta(module, name, parameter):
        # One that is there already is tied to another module.
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"))
        register(module, name, parameter)
    with mock.patch.object(nn.Module, "register_parameter", register_on_meta):
        return auto_class(config).from_config(config, dtype=dtype).eval()


def fill(model, read, device, chosen):
    """Give a skeleton its weights, which read(name) returns, on the device or (streamed) host."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head.weight is embedding.weight
    host = torch.device("meta" if device.type == "meta" else "cpu")
    streamed, table = set(), None
    if chosen.int8_head or chosen.load_in_4bit:
        import extras.memory.quantization as forms
    if chosen.stream_layers:
        for layer in layers_of(model):
            streamed.update(layer.modules())
    keys_of = defaultdict(list)
    for key in model.state_dict():
        keys_of[key.rpartition(".")[0]].append(key)
    for name, keys in keys_of.items():
        module = model.get_submodule(name)
        if module is head and tied:
            continue
        in_table = chosen.int8_head and module in (embedding, head)
        place = host if module in streamed else device
        quantize_on = host if in_table and chosen.stream_layers else device
        tensors = {key.rpartition(".")[2]: read(key).to(quantize_on) for key in keys}
        if in_table:
            table = forms.Int8Table(tensors["weight"], on_host=chosen.stream_layers)
            if module is embedding:
                factor = getattr(module, "scalar_embed_scale", 1.0)
                model.set_input_embeddings(forms.Int8Embedding(table, factor))
            else:
                model.set_output_embeddings(forms.Int8Head(table, tensors.get("bias")))
        elif (chosen.load_in_4bit and module is not head and forms.fits_4bit(module)
              and ROUTERS.isdisjoint(name.split("."))):
            model.set_submodule(name, forms.Linear4bit(**tensors).to(place))
        else:
            placed = {leaf: tensor.to(place) for leaf, tensor in tensors.items()}
            module.load_state_dict(placed, strict=False, assign=True)
        # Free them before the next module's are read.
        del tensors
    if tied and chosen.int8_head:
        model.set_output_embeddings(forms.Int8Head(table))
    elif tied:
        head.weight = embedding.weight
