"""Reading a model and its tokenizer from a folder or from the Hugging Face hub.

transformers reads a model as it is stored. Where the weights stay in another form (4 bits, int8, in
host memory), a skeleton is built, a model whose parameters are on the meta device: they have shapes
but no numbers. `fill` gives it its weights one tensor at a time, so that never more than one is
held as it was stored.
"""
import os
from collections import defaultdict
from pathlib import Path
from unittest import mock

import torch
from torch import nn

from experiment.errors import UserError, first_line
from llm.memory import Techniques
from llm.quantization import Int8Embedding, Int8Head, Int8Table, Linear4bit, fits_4bit
from llm.streaming import layers_of
from llm.tiny import make_tiny


def _tiny_model(seed, dtype, device, chosen):
    """Return the tiny model in this dtype, and its tokenizer."""
    made, tokenizer = make_tiny(seed)
    model = skeleton(made.config, made.dtype if dtype == "auto" else dtype)
    fill(model, made.state_dict().__getitem__, device, chosen)
    return model, tokenizer


def read_model(source: str, dtype, device, chosen: Techniques, seed: int):
    """Return the model and tokenizer of a folder, of a hub id, or the tiny ones of this seed."""
    from huggingface_hub import model_info
    if source == "tiny":
        return _tiny_model(seed, dtype, device, chosen)
    _check_source(source, device)
    read = _read_sparingly if chosen.frozen_base or device.type == "meta" else _read_whole
    try:
        # Files on this machine first: without a network the hub's own order costs a minute.
        try:
            return read(source, dtype, device, chosen, local_files_only=True)
        except (OSError, UserError):  # UserError: the weights are cached, the tokenizer is not
            if os.path.isdir(source):
                raise
            # This fails at once where from_pretrained would try for a minute.
            model_info(source, timeout=10)
            return read(source, dtype, device, chosen)
    except UserError:
        raise
    # It may be an OSError, a SafetensorError or another: name the place, keep the cause.
    except Exception as error:
        raise UserError(f"{source}: cannot be loaded: {first_line(error)}") from None


def _check_source(source, device):
    if not os.path.isdir(source):
        if source.startswith((".", "/", "~")) or source.count("/") != 1:
            raise UserError(f"{source}: no such folder; give tiny, a model or output folder, "
                            "or a hub id like Qwen/Qwen2.5-0.5B-Instruct")
    elif device.type != "meta" and not any(Path(source).glob("*.safetensors")):
        raise UserError(f"{source}: no .safetensors file; a pytorch_model.bin is pickle; "
                        "convert to safetensors")


def _read_sparingly(source, dtype, device, chosen, **where):
    """Read the model a tensor at a time, each in the form in which it will stay."""
    from huggingface_hub import snapshot_download
    from transformers import GenerationConfig
    config = _read_config(source, **where)
    stored = real_dtype(config.dtype or torch.float32, device)
    model = skeleton(config, stored if dtype == "auto" else dtype)
    if device.type == "meta":
        # On the meta device there are shapes only.
        read = model.state_dict().__getitem__
    elif os.path.isdir(source):
        read = tensor_reader(source)
    else:
        patterns = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]
        read = tensor_reader(snapshot_download(source, allow_patterns=patterns, **where))
    fill(model, read, device, chosen)
    try:
        model.generation_config = GenerationConfig.from_pretrained(source, **where)
    except OSError:
        # There is a generation_config already: from_config made it.
        pass
    return model, read_tokenizer(source, **where)


def _read_whole(source, dtype, device, chosen, **where):
    """Read the model as transformers does."""
    from transformers import AutoModelForCausalLM
    config = _read_config(source, **where)
    model, report = AutoModelForCausalLM.from_pretrained(
        source, config=config, dtype=dtype, trust_remote_code=False, use_safetensors=True,
        output_loading_info=True, adapter_kwargs=where, **where)
    # Where weights are missing, transformers would continue with random ones.
    if report["missing_keys"]:
        missing = ", ".join(sorted(report["missing_keys"])[:3])
        raise UserError(f"{source}: no weights for {missing}: the model is incomplete")
    return model, read_tokenizer(source, **where)


def _read_config(source, **where):
    """Return the model's config, in which the attention is left for transformers to choose.

    What a folder's config.json says of attention is not used: it may name a kernel to download.
    """
    from transformers import AutoConfig
    config = AutoConfig.from_pretrained(source, trust_remote_code=False, **where)
    if getattr(config, "quantization_config", None):
        raise UserError(f"{source}: is a quantized model; "
                        "give the original one, and --load_in_4bit for 4 bits")
    config._attn_implementation = None
    return config


def read_tokenizer(source: str, **where):
    from transformers import AutoTokenizer
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False, **where)
    except Exception as error:
        raise UserError(f"{source}: no tokenizer could be read ({first_line(error)})") from None


def real_dtype(dtype, device):
    """Return float16 in place of bfloat16 on a GPU that only emulates it (before Ampere)."""
    if dtype == torch.bfloat16 and device.type == "cuda":
        if not torch.cuda.is_bf16_supported(including_emulation=False):
            return torch.float16
    return dtype


# -------------------------------------------------------------------- one tensor at a time
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
