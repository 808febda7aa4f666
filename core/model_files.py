"""Reading a model and its tokenizer from a folder or from the Hugging Face hub.

Where the weights stay in another form than stored (4 bits, int8, in host memory), a skeleton is
built, a model whose parameters are on the meta device. `fill` gives it its weights one tensor at a
time, so that never more than one is held as it was stored.
"""
import os
import re
from collections import defaultdict
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from unittest import mock

import torch
from torch import nn

from core.data import read_json
from core.config import UserError, first_line
from extras.memory.checkpointing import layers_of
from extras.memory.techniques import QUANTIZATION, Techniques
from core.tiny import make_tiny
from lora import ROUTERS

READER = "extras.memory.tensor_reader"  # what reads the weights' file itself
# What is read of a model on the hub, beside its weights.
TEXTS = ["*.json", "*.jinja", "*.txt", "*.model"]


def read_model(source: str, dtype, device, chosen: Techniques, seed: int):
    """Return the model and tokenizer of a folder, of a hub id, or the tiny ones of this seed."""
    if source == "tiny":
        return _tiny_model(seed, dtype, device, chosen)
    try:
        if os.path.isdir(source):
            return _read_folder(source, dtype, device, chosen)
        return _read_from_hub(source, dtype, device, chosen)
    except UserError:
        raise
    # It may be an OSError, a SafetensorError or another: name the place, keep the cause.
    except Exception as error:
        raise UserError(f"{source}: cannot be loaded: {first_line(error)}") from None


def _tiny_model(seed, dtype, device, chosen):
    """Return the tiny model in this dtype, and its tokenizer."""
    made, tokenizer = make_tiny(seed)
    model = skeleton(made.config, made.dtype if dtype == "auto" else dtype)
    fill(model, made.to(model.dtype).state_dict().__getitem__, device, chosen)
    return model, tokenizer


def _read_from_hub(source, dtype, device, chosen):
    """Read a model of the hub, from the files on this machine if all that is needed is there."""
    from huggingface_hub import snapshot_download
    if not re.fullmatch(r"[a-zA-Z0-9][\w.-]*/[\w.-]+", source, re.ASCII):
        raise UserError(f"{source}: no such folder; give tiny, a model or output folder, "
                        "or a hub id like Qwen/Qwen2.5-0.5B-Instruct")
    files = TEXTS if device.type == "meta" else [*TEXTS, "model*.safetensors"]
    with suppress(OSError, UserError):
        folder = snapshot_download(source, allow_patterns=files, local_files_only=True)
        return _read_folder(folder, dtype, device, chosen)
    print(f"{source}: no such folder here; asking the hub for it")
    return _read_folder(snapshot_download(source, allow_patterns=files), dtype, device, chosen)


def _read_folder(folder, dtype, device, chosen):
    """Read the model and tokenizer in a folder."""
    from transformers import AutoConfig
    if not os.path.exists(os.path.join(folder, "config.json")):
        raise ValueError("no model (config.json) is there, nor a step that a run has saved")
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if any(getattr(c, "quantization_config", None) for c in (config, config.get_text_config())):
        raise UserError(f"{folder}: is a quantized model; give the original one (an adapter's is "
                        "named in its adapter_config.json), and --load_in_4bit for 4 bits")
    import_module(READER).check_stored(folder)
    if config.is_encoder_decoder or "Classification" in str(config.architectures):
        raise UserError(f"{folder}: {config.model_type} is an encoder-decoder or a classifier; "
                        "only decoders are trained here")
    # Transformers chooses. The attention that config.json names may be a kernel to download.
    config._attn_implementation = None
    if chosen.frozen_base or device.type == "meta":
        model = _read_sparingly(folder, config, dtype, device, chosen)
    else:
        model = _read_whole(folder, config, dtype)
    return model, read_tokenizer(folder)


def _read_sparingly(folder, config, dtype, device, chosen):
    """Read the model a tensor at a time, each in the form in which it will stay."""
    from transformers import GenerationConfig
    stored = real_dtype(config.dtype or torch.float32, device)
    model = skeleton(config, stored if dtype == "auto" else dtype)
    # On the meta device there are shapes only.
    if device.type == "meta":
        read = model.state_dict().__getitem__
    else:
        read = import_module(READER).tensor_reader(folder, model)
    fill(model, read, device, chosen)
    # Without such a file the model has the one that from_config made.
    with suppress(OSError):
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def _read_whole(folder, config, dtype):
    """Read the model as transformers does."""
    model, report = auto_class(config).from_pretrained(
        folder, config=config, dtype=dtype, trust_remote_code=False, use_safetensors=True,
        ignore_mismatched_sizes=True, output_loading_info=True)
    # Where weights are missing or misshapen, transformers would continue with random ones.
    missing = {*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])}
    if missing:
        missing = ", ".join(sorted(missing)[:3])
        raise UserError(f"{folder}: no weights for {missing}: the model is incomplete, "
                        "or of a kind that predicts no next token, or its config.json is another's")
    return model


def auto_class(config):
    """Return the class of transformers that makes a model of this config."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    # Some families are published only with a vision tower. On text they are plain decoders.
    for kind in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if type(config) in kind._model_mapping:
            return kind
    return AutoModelForCausalLM


def read_tokenizer(source: str):
    from transformers import AutoTokenizer
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        if tokenizer.vocab_size < 10:  # special tokens alone
            raise ValueError("tokenizer.json is missing; copy it from the base model")
        # Where a model with a vision tower had its template before chat_template.jinja.
        path = Path(source, "chat_template.json")
        if not tokenizer.chat_template and path.exists():
            tokenizer.chat_template = read_json(path).get("chat_template")
        return tokenizer
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
    """Return the model of a config, its parameters on the meta device; buffers have numbers."""
    register = nn.Module.register_parameter

    def register_on_meta(module, name, parameter):
        # One that is there already is tied to another module.
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"))
        register(module, name, parameter)
    with mock.patch.object(nn.Module, "register_parameter", register_on_meta):
        return auto_class(config).from_config(config, dtype=dtype).eval()


def fill(model, read, device, chosen: Techniques):
    """Give a skeleton its weights, which read(name) returns, on the device or (streamed) host."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head.weight is embedding.weight
    host = torch.device("meta" if device.type == "meta" else "cpu")
    streamed, table = set(), None
    if chosen.int8_head or chosen.load_in_4bit:
        forms = import_module(QUANTIZATION)
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
