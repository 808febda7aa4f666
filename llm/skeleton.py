"""Build a model from its files one tensor at a time, each in the form in which it will stay.

A skeleton is a model on the meta device: it has shapes but no numbers. `fill` gives it weights, so
at no time is more than one tensor held as it was stored.
"""
import os

import torch
from torch import nn

from experiment.errors import UserError
from llm.memory import Techniques
from llm.quantization import Int8Embedding, Int8Head, Int8Table, Linear4bit
from llm.streaming import layers_of
from lora import is_adapted


def skeleton(config, dtype):
    """Return the model of a transformers config on the meta device."""
    from transformers import AutoModelForCausalLM
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def tensor_reader(folder: str):
    """Return a function that reads one tensor of a model folder by its name.

    It raises UserError if the folder has no such tensor.
    """
    from safetensors import safe_open
    names = [name for name in os.listdir(folder) if name.endswith(".safetensors")]
    if "model.safetensors" in names:
        names = ["model.safetensors"]
    elif any(name.startswith("model-0") for name in names):
        # These are shards; files of another format may lie beside them.
        names = [name for name in names if name.startswith("model-0")]
    file_of = {}
    for name in sorted(names):
        file = safe_open(os.path.join(folder, name), "pt")
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
        streamed = {module for layer in layers_of(model) for module in layer.modules()}
    for name, module in list(model.named_modules()):
        leaves = stored_leaves(module)
        if not leaves or module is head and tied:
            continue
        in_table = chosen.int8_head and module in (embedding, head)
        quantize_on = host if in_table and chosen.stream_layers else device
        tensors = {}
        for leaf in leaves:
            tensor = read(f"{name}.{leaf}").to(quantize_on)
            tensors[leaf] = tensor.to(model.dtype) if tensor.is_floating_point() else tensor
        place = host if module in streamed else device
        if in_table:
            table = Int8Table(tensors["weight"], on_host=chosen.stream_layers)
            if module is embedding:
                model.set_input_embeddings(Int8Embedding(table, module))
            else:
                model.set_output_embeddings(Int8Head(table, module, tensors.get("bias")))
        elif chosen.load_in_4bit and module is not head and fits_4bit(module):
            model.set_submodule(name, Linear4bit(**tensors).to(place))
        else:
            set_tensors(module, tensors, place)
        # Free them before the next module's are read.
        del tensors, tensor
    if tied and chosen.int8_head:
        model.set_output_embeddings(Int8Head(table, head))
    elif tied:
        head.weight = embedding.weight
    rebuild_buffers(model, device)


def stored_leaves(module) -> list[str]:
    """Return the names of the module's parameters and buffers that model files hold."""
    leaves = []
    for leaf in (*module._parameters, *module._buffers):
        if getattr(module, leaf) is not None and leaf not in module._non_persistent_buffers_set:
            leaves.append(leaf)
    return leaves


def fits_4bit(module) -> bool:
    """True if the module is a plain Linear whose weight divides into blocks of 64."""
    return type(module) is nn.Linear and module.weight.numel() % 64 == 0


def set_tensors(module, tensors: dict, device):
    """Replace the module's parameters and buffers by frozen tensors on the device."""
    for leaf, tensor in tensors.items():
        if leaf in module._parameters:
            module._parameters[leaf] = nn.Parameter(tensor.to(device), requires_grad=False)
        else:
            module._buffers[leaf] = tensor.to(device)


def rebuild_buffers(model, device=None):
    """Let transformers fill the buffers that no file holds, such as RoPE's frequencies."""
    for module in model.modules():
        hollow = []
        for leaf in module._non_persistent_buffers_set:
            buffer = getattr(module, leaf)
            if buffer is not None and buffer.is_meta:
                hollow.append(leaf)
        for leaf in hollow:
            module._buffers[leaf] = torch.empty_like(
                module._buffers[leaf], device=device or model.device)
        if hollow and not module._buffers[hollow[0]].is_meta:
            for parameter in module.parameters(recurse=False):
                # Tell transformers to leave the weights alone; otherwise it draws random ones.
                parameter._is_hf_initialized = True
            model._init_weights(module)


@torch.no_grad()
def dequantize_model(model, effective_weight):
    """Replace quantized modules by stock ones with the weights that they stood for, in 16 bits.

    Args:
        model: changed in place
        effective_weight: function of a Linear and its frozen weight to the weight with its adapter
    """
    half = (torch.float16, torch.bfloat16)
    dtype = next((p.dtype for p in model.parameters() if p.dtype in half), torch.bfloat16)
    for name, module in list(model.named_modules()):
        if isinstance(module, Linear4bit) or is_adapted(module):
            frozen = module.weight
            if isinstance(module, Linear4bit):
                frozen = module.dequantize(torch.float32)
            weight = effective_weight(module, frozen)  # (out, in)
            with torch.device("meta"):
                stock = nn.Linear(module.in_features, module.out_features, bias=False)
            stock.weight = nn.Parameter(weight.to(dtype), requires_grad=False)
            stock.bias = module.bias
            model.set_submodule(name, stock)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if isinstance(head, Int8Head):
        stock, stock_head = embedding.stock[0], head.stock[0]
        stock.weight = whole_table(embedding.table, model.device)
        stock_head.weight = stock.weight
        if head.table is not embedding.table:
            stock_head.weight = whole_table(head.table, model.device)
        stock_head.bias = head.bias
        model.set_input_embeddings(stock)
        model.set_output_embeddings(stock_head)
    rebuild_buffers(model)
    model.to(dtype)


def whole_table(table: Int8Table, device) -> nn.Parameter:
    """Return all rows of the table as a frozen parameter."""
    return nn.Parameter(table.rows(slice(None), device), requires_grad=False)
