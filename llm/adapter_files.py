"""What lies in the folder of an adapter, in PEFT's own format: settings, tensors, the base's place.

    adapter_config.json         `read_settings`, `adapter_base`
    adapter_model.safetensors   `load_weights`
    both                        `save_model`, which writes a model folder where all weights train
"""
import json
import os
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from experiment.data import read_json, reading
from experiment.errors import UserError
from llm.memory import PLAIN, facts, techniques_of
from llm.model_files import read_model
from llm.tiny import make_tiny
from lora import adapter_tensors, settings

ADAPTER = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
# The keys of PEFT's adapter_config.json that plain LoRA knows, or that change nothing. Others that
# are set are refused.
UNDERSTOOD = {
    "peft_type", "task_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision",
    "inference_mode", "r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora", "bias",
    "fan_in_fan_out", "init_lora_weights", "eva_config", "layers_pattern", "megatron_core",
    "qalora_group_size", "runtime_config", "ensure_weight_tying"}
# The words by which the metadata of the tensors say in which form the base was stored.
FORMS = {"load_in_4bit": "nf4", "int8_head": "int8"}


def save_model(model, folder: str, leave_out=()):
    """Write the adapter in PEFT's format, or, when all weights train, a model folder.

    Weights with the names in `leave_out` are none of the model's own, and not in that folder.
    """
    if not settings(model):
        weights = {name: w for name, w in model.state_dict().items() if name not in leave_out}
        model.save_pretrained(folder, state_dict=weights if leave_out else None)
        return
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: p.detach().cpu().contiguous() for name, p in adapter_tensors(model).items()}
    quantized = ",".join(FORMS[name] for name in FORMS if getattr(techniques_of(model), name))
    # One entry of metadata alone: of two, safetensors writes the order at random.
    save_file(tensors, folder / TENSORS,
              metadata={"base": quantized} if quantized else {"format": "pt"})
    base = facts(model).source
    # Nobody else has these random weights, so they are saved beside every adapter.
    if base == "tiny":
        base = folder / "base"
        for thing in make_tiny(facts(model).seed):
            thing.save_pretrained(base)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "inference_mode": True, "bias": "none",
              "fan_in_fan_out": False, "modules_to_save": None,
              "base_model_name_or_path": os.path.abspath(base) if os.path.isdir(base) else base,
              **settings(model).peft}
    (folder / ADAPTER).write_text(json.dumps(config, indent=2))


def load_weights(model, folder: str, leave_out=()):
    """Load what trains in `model` from what `save_model` wrote, bit for bit."""
    if not settings(model):
        saved, _ = read_model(str(folder), torch.float32, torch.device("cpu"), PLAIN, 0)
        kept = {name: w for name, w in model.state_dict().items() if name in leave_out}
        model.load_state_dict({**kept, **saved.state_dict()})
        return
    path = Path(folder, TENSORS)
    with reading(path):
        saved = load_file(path)
        for name, tensor in saved.items():
            if not tensor.is_floating_point():
                raise ValueError(f"{name} holds {tensor.dtype}, not floating-point numbers")
    check_finite(path, saved)
    for name, p in adapter_tensors(model).items():
        stored = tuple(saved[name].shape) if name in saved else "missing"
        if stored != p.shape:
            short = name.removeprefix("base_model.model.").removesuffix(".weight")
            raise UserError(f"{folder}: {short} is {stored}, the model needs {tuple(p.shape)}")
        p.data.copy_(saved.pop(name))
    if saved:
        raise UserError(f"{folder}: {next(iter(saved))} has no place in this model")


def read_settings(folder: str) -> dict:
    """Return adapter_config.json. UserError names what is wrong or not understood here.

    The entry "quantized_base" is added, from the file of tensors: how the base was stored that the
    adapter was trained on, "" (as in its files), "nf4", "int8" (the head) or "nf4,int8".
    """
    path = Path(folder, ADAPTER)
    config = read_json(path)
    with reading(path):
        _check_plain_lora(config)
    path = Path(folder, TENSORS)
    with reading(path), safe_open(path, "pt") as file:
        config["quantized_base"] = (file.metadata() or {}).get("base", "")
        # Refuse a rank that nobody trained before memory is taken for it.
        for name in file.keys():
            rank = file.get_slice(name).get_shape()[0]
            if "lora_A" in name and rank != config["r"]:
                raise UserError(f"{folder}: {ADAPTER} says r {config['r']}, "
                                f"{TENSORS} has rank {rank}")
    return config


def _check_plain_lora(config):
    """Raise ValueError if this is anything but plain LoRA on Linears that are named."""
    odd = [key for key, value in config.items() if value and key not in UNDERSTOOD]
    init = config.get("init_lora_weights", True)
    # PiSSA, OLoRA, LoftQ and CorDA change the base too.
    if init not in (True, False, "gaussian", "eva", "orthogonal"):
        odd.append(f"init_lora_weights {init}")
    if config.get("peft_type") != "LORA" or config.get("bias", "none") != "none" or odd:
        raise ValueError("only plain LoRA adapters are read here; "
                         f"this one has {', '.join(odd)[:200] or 'another peft_type or bias'}")
    if not config["lora_alpha"] / config["r"] > 0:
        raise ValueError("lora_alpha and r must be above 0")
    targets = config["target_modules"]
    if isinstance(targets, str) and targets != "all-linear":
        raise ValueError(f"target_modules is a regular expression, {targets:.60}; list the names")


def adapter_base(folder: str) -> str:
    """Return the base model that an adapter folder points to.

    If that place has moved, it is `base/` in the adapter's folder or in its output folder.
    """
    path = Path(folder, ADAPTER)
    base = read_json(path).get("base_model_name_or_path")
    if not base or not isinstance(base, str):
        raise UserError(f"{path}: no base_model_name_or_path; "
                        "write the base model's folder or hub id there")
    if not os.path.exists(base):
        for place in ("base", "../../base"):
            # The folder may be a link: its real place has the run around it.
            beside = os.path.realpath(os.path.join(folder, place))
            if os.path.isdir(beside):
                return beside
    return base


def check_finite(path, tensors: dict):
    """Raise UserError if a value in the tensors that were read from `path` is not finite."""
    for name, tensor in tensors.items():
        # A sum is cheap, and not finite where a value is not, or where the sum is too large.
        if tensor.is_floating_point() and not tensor.sum(dtype=torch.float32).isfinite():
            # In float32, which it becomes.
            if bad := int((~tensor.float().isfinite()).sum()):
                raise UserError(f"{path}: {name}: {bad} values are not finite; the file is damaged")
