"""Model folders as they are found: on the hub, incomplete, or with files of older forms.

Transformers reads most of them. Here stands what it reads wrongly, or refuses in words that do not
name the cause.
"""
import os
import re
from contextlib import contextmanager
from pathlib import Path

from safetensors import safe_open

from core.config import UserError, first_line
from core.data import read_json
from core.model import read_model

HUB_ID = r"[a-zA-Z0-9][\w.-]*/[\w.-]+"
# What is read of a model on the hub, beside its weights.
TEXTS = ["*.json", "*.jinja", "*.txt", "*.model"]


def read_complete(source, dtype, device, seed, read_weights):
    """Return what `read_model` does, of a folder or of the hub, if nothing is missing there."""
    arguments = dtype, device, seed, read_weights
    if os.path.isdir(source):
        return read_folder(source, *arguments)
    if source == "tiny":
        return read_model(source, *arguments)
    if not re.fullmatch(HUB_ID, source, re.ASCII):
        raise UserError(f"{source}: no such folder; give tiny, a model or output folder, "
                        "or a hub id like Qwen/Qwen2.5-0.5B-Instruct")
    # On the meta device a model has shapes and no weights.
    files = TEXTS if device.type == "meta" else [*TEXTS, "model*.safetensors"]
    return read_from_hub(source, files, arguments)


def read_from_hub(source, files, arguments):
    """Read a model of the hub, from the files on this machine if all that is needed is there."""
    from huggingface_hub import snapshot_download
    try:
        folder = snapshot_download(source, allow_patterns=files, local_files_only=True)
        return read_folder(folder, *arguments)
    except (OSError, UserError):
        print(f"{source}: no such folder here; asking the hub for it")
    with loading(source):
        folder = snapshot_download(source, allow_patterns=files)
    return read_folder(folder, *arguments)


def read_folder(folder, dtype, device, seed, read_weights):
    """Read the model and tokenizer in a folder, and look at what transformers does not."""
    with loading(folder):
        if not os.path.exists(Path(folder, "config.json")):
            raise ValueError("no model (config.json) is there, nor a step that a run has saved")
        model, tokenizer = read_model(folder, dtype, device, seed, read_weights)
    if tokenizer.vocab_size < 10:  # special tokens alone
        raise UserError(f"{folder}: no tokenizer could be read (tokenizer.json is missing; "
                        "copy it from the base model)")
    # Where a model with a vision tower had its template before chat_template.jinja.
    path = Path(folder, "chat_template.json")
    if not tokenizer.chat_template and path.exists():
        tokenizer.chat_template = read_json(path).get("chat_template")
    return model, tokenizer


@contextmanager
def loading(source):
    """Inside the block every error becomes a UserError that names the source and the cause."""
    try:
        yield
    except UserError:
        raise
    # It may be an OSError, a SafetensorError or another.
    except Exception as error:
        raise UserError(f"{source}: cannot be loaded: {first_line(error)}") from None


def check_kind(folder, config):
    """Raise UserError for a model that is no decoder, or whose config.json says it is quantized."""
    if config.is_encoder_decoder or "Classification" in str(config.architectures):
        raise UserError(f"{folder}: {config.model_type} is an encoder-decoder or a classifier; "
                        "only decoders are trained here")
    if any(getattr(c, "quantization_config", None) for c in (config, config.get_text_config())):
        raise UserError(f"{folder}: is a quantized model; give the original one (an adapter's is "
                        "named in its adapter_config.json), and --load_in_4bit for 4 bits")


def check_stored(folder: str):
    """Raise UserError for weights of 8 bits and less, which mean nothing without their scales."""
    for path in Path(folder).glob("model*.safetensors"):
        file = safe_open(path, "pt")
        for name in file.keys():
            dtype = file.get_slice(name).get_dtype()
            # A causal mask, attn.bias, is of bytes in some.
            if dtype.startswith(("F8", "F6_", "F4", "I8", "U8")) and not name.endswith("bias"):
                raise UserError(f"{folder}: {name} is stored as {dtype}: the model is quantized, "
                                "and its config.json does not say how; give the original one")


def auto_class(config):
    """Return the class of transformers that makes a model of this config."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    # Some families are published only with a vision tower. On text they are plain decoders.
    for kind in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if type(config) in kind._model_mapping:
            return kind
    return AutoModelForCausalLM
