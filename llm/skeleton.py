"""Build a model from its files one tensor at a time, each in the form in which it will stay.

A skeleton is a model whose parameters are on the meta device: they have shapes but no numbers.
`fill` gives it weights, so at no time is more than one tensor held as it was stored.
"""
from collections import defaultdict
from pathlib import Path
from unittest import mock

import torch
from torch import nn

from experiment.errors import UserError
from llm.memory import Techniques
from llm.quantization import Int8Embedding, Int8Head, Int8Table, Linear4bit, fits_4bit
from llm.streaming import layers_of


def skeleton(config, dtype):
    """Return the model of a transformers config with its parameters on the meta device.

    Its buffers have numbers, because no file holds some of them, such as RoPE's frequencies.
    """
    from transformers import AutoModelForCausalLM
    register = nn.Module.register_parameter

    def register_on_meta(module, name, parameter):
        # One that is there already is tied to another module.
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"))
        register(module, name, parameter)
    with mock.patch.object(nn.Module, "register_parameter", register_on_meta):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def tensor_reader(folder: str):
    """Return a function that reads one tensor of a model folder by its name.

    It raises UserError if the folder has no such tensor.
    """
    from safetensors import safe_open
    # The whole model or its shards; files of another format may lie beside them.
    for pattern in ("model.safetensors", "model-0*.safetensors", "*.safetensors"):
        paths = sorted(Path(folder).glob(pattern))
        if paths:
            break
    file_of = {}
    for path in paths:
        file = safe_open(path, "pt")
        file_of.update(dict.fromkeys(file.keys(), file))

    def read(name):
        if name not in file_of:
            raise UserError(
                f"{folder}: no weights for {name}: the model is incomplete, or stored under other "
                "names, which --load_in_4bit and --memory 4bit, small and stream do not read")
        return file_of[name].get_tensor(name)
    return read


def fill(model, read, device, chosen: Techniques):
    """Give a skeleton its weights.

    Args:
        model: the skeleton, changed in place
        read: function from a tensor's name to the tensor
        device: where the weights go; streamed layers go to host memory
        chosen: which of them to quantize or to keep in host memory
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head.weight is embedding.weight
    host = torch.device("meta" if device.type == "meta" else "cpu")
    streamed, table = set(), None
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
        tensors = {}
        for key in keys:
            tensor = read(key).to(quantize_on)
            if tensor.is_floating_point():
                tensor = tensor.to(model.dtype)
            tensors[key.rpartition(".")[2]] = tensor
        if in_table:
            table = Int8Table(tensors["weight"], on_host=chosen.stream_layers)
            if module is embedding:
                factor = getattr(module, "scalar_embed_scale", 1.0)
                model.set_input_embeddings(Int8Embedding(table, factor))
            else:
                model.set_output_embeddings(Int8Head(table, tensors.get("bias")))
        elif chosen.load_in_4bit and module is not head and fits_4bit(module):
            model.set_submodule(name, Linear4bit(**tensors).to(place))
        else:
            placed = {leaf: tensor.to(place) for leaf, tensor in tensors.items()}
            module.load_state_dict(placed, strict=False, assign=True)
        # Free them before the next module's are read.
        del tensors, tensor
    if tied and chosen.int8_head:
        model.set_output_embeddings(Int8Head(table))
    elif tied:
        head.weight = embedding.weight
