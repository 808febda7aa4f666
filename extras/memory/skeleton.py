"""Models that are read one tensor at a time, so that never more than one is held as it was stored.

A skeleton is built, a model whose parameters are on the meta device. `fill` gives it its weights.
"""
from collections import defaultdict
from contextlib import suppress
from unittest import mock

import torch
from torch import nn
from transformers import GenerationConfig

from extras.memory.checkpointing import layers_of
from extras.memory.folders import auto_class
from extras.memory.tensor_reader import tensor_reader
from lora import ROUTERS


def read_by_tensor(folder, config, dtype, device, chosen):
    """Return the model of a folder with this config and these techniques."""
    model = skeleton(config, dtype)
    read = model.state_dict().__getitem__
    if device.type != "meta":
        read = tensor_reader(folder, model)
    fill(model, read, device, chosen)
    # Without such a file the model has the one that from_config made.
    with suppress(OSError):
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


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
