"""What adapter folders in PEFT's format hold: the base model, the settings, the tensors."""
import math
import os
import re
import time
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from experiment.data import read_json, reading
from experiment.errors import UserError
from lora import linears_of

# The keys of PEFT's adapter_config.json that plain LoRA knows, or that change nothing. Others that
# are set are refused.
UNDERSTOOD = {
    "peft_type", "task_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision",
    "inference_mode", "r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora", "bias",
    "fan_in_fan_out", "init_lora_weights", "eva_config", "layers_pattern", "megatron_core",
    "qalora_group_size", "runtime_config", "ensure_weight_tying"}

NUMBERS = (int, float)  # True is a bool, and no number
MAX_PATTERN = 500  # characters of target_modules as a regular expression
MATCHING_SECONDS = 5  # for a regular expression over all module names: some take hours


def adapter_base(folder: str) -> str:
    """Return the base model that an adapter folder points to.

    If that place has moved, it is `base/` in the adapter's folder or in its output folder.
    """
    path = Path(folder, "adapter_config.json")
    base = read_json(path).get("base_model_name_or_path")
    if not base or not isinstance(base, str) or "\0" in base:
        raise UserError(f"{path}: no base_model_name_or_path; "
                        "write the base model's folder or hub id there")
    if not os.path.exists(base):
        for place in ("base", "../../base"):
            # The folder may be a link: its real place has the run around it.
            beside = os.path.realpath(os.path.join(folder, place))
            if os.path.isdir(beside):
                return beside
    return base


def read_settings(folder: str) -> dict:
    """Return adapter_config.json. UserError names what is wrong or not understood here.

    The entry "quantized_base" is added, from the file of tensors: how the base was stored that the
    adapter was trained on, "" (as in its files), "nf4", "int8" (the head) or "nf4,int8".
    """
    path = Path(folder, "adapter_config.json")
    config = read_json(path)
    with reading(path):
        _check_kind(config)
        _check_values(config)
    path = Path(folder, "adapter_model.safetensors")
    with reading(path), safe_open(path, "pt") as file:
        config["quantized_base"] = (file.metadata() or {}).get("base", "")
        # Refuse a rank that nobody trained before memory is taken for it.
        for name in file.keys():
            rank = [*file.get_slice(name).get_shape(), 0][0]
            if "lora_A" in name and rank != config["r"]:
                raise UserError(f"{folder}: adapter_config.json says r {config['r']}, "
                                f"adapter_model.safetensors has rank {rank}")
    return config


def _check_kind(config):
    """Raise ValueError if this is anything but plain LoRA."""
    odd = [key for key, value in config.items() if value and key not in UNDERSTOOD]
    # PiSSA, OLoRA, LoftQ and CorDA change the base too.
    if config.get("init_lora_weights", True) not in (True, False, "gaussian", "eva", "orthogonal"):
        odd.append(f"init_lora_weights {str(config['init_lora_weights'])[:60]}")
    if config.get("peft_type") != "LORA" or config.get("bias", "none") != "none" or odd:
        raise ValueError("only plain LoRA adapters are read here; "
                         f"this one has {', '.join(odd)[:200] or 'another peft_type or bias'}")


def _check_values(config):
    """Raise ValueError if a value of the adapter has another type, or is out of range."""
    rank, alpha, dropout = config.get("r"), config.get("lora_alpha"), config.get("lora_dropout", 0)
    targets = config.get("target_modules")
    names = [targets] if isinstance(targets, str) else targets
    named = isinstance(names, list) and names and all(type(n) is str and n for n in names)
    checks = (
        ("r", type(rank) is int and rank >= 1, "a whole number of at least 1"),
        ("lora_alpha", type(alpha) in NUMBERS and 0 < alpha < math.inf, "a number above 0"),
        ("lora_dropout", type(dropout) in NUMBERS and 0 <= dropout <= 1, "a number from 0 to 1"),
        ("use_rslora", isinstance(config.get("use_rslora"), bool | None), "true or false"),
        ("target_modules", named, "a name, a list of names, or a regular expression"))
    for name, valid, kind in checks:
        if not valid:
            raise ValueError(f"{name} must be {kind}, not {config.get(name)!r:.60}")
    if isinstance(targets, str) and len(targets) > MAX_PATTERN:
        raise ValueError(f"target_modules has {len(targets)} characters; "
                         f"a regular expression may have {MAX_PATTERN}")


def listed(targets) -> str:
    """Return target modules as one text, whatever their order."""
    names = targets.split(",") if isinstance(targets, str) else targets
    return ",".join(sorted(name.strip() for name in names))


def target_names(model, targets):
    """Return target modules in a form that `lora.add_lora` takes: "all-linear" or a list.

    A string of letters, digits and `, . - _` is a list of names. Any other string is a regular
    expression, as PEFT has it, that matches the names of Linears as a whole.
    """
    if isinstance(targets, list) or targets == "all-linear":
        return targets
    if is_pattern(targets):
        return _matching(targets, linears_of(model)) or [targets]
    return [target.strip() for target in targets.split(",")]


def is_pattern(targets) -> bool:
    """True if the target modules are given as a regular expression."""
    return isinstance(targets, str) and not re.fullmatch(r"[\w,. -]+", targets)


def _matching(pattern: str, names) -> list:
    """Return the names that a regular expression matches as a whole."""
    # Unlike re it takes a time limit; transformers depends on it too.
    import regex
    matched, deadline = [], time.monotonic() + MATCHING_SECONDS
    try:
        for name in names:
            left = max(1e-3, deadline - time.monotonic())
            if regex.fullmatch(pattern, name, timeout=left):
                matched.append(name)
    except (regex.error, TimeoutError, RecursionError) as error:
        reason = f"takes over {MATCHING_SECONDS} s" if isinstance(error, TimeoutError) else error
        raise UserError(f"--lora_target_modules {pattern:.60}: as a regular expression it "
                        f"{reason}; list the names, separated by commas") from None
    return matched


def read_tensors(folder: str) -> dict:
    """Return the tensors of adapter_model.safetensors, all of them finite."""
    path = Path(folder, "adapter_model.safetensors")
    with reading(path):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if not tensor.is_floating_point():
                raise ValueError(f"{name} holds {tensor.dtype}, not floating-point numbers")
    check_finite(path, tensors)
    return tensors


def check_finite(path, tensors: dict):
    """Raise UserError if a value in the tensors that were read from `path` is not finite."""
    for name, tensor in tensors.items():
        # A sum is cheap, and not finite where a value is not, or where the sum is too large.
        if tensor.is_floating_point() and not tensor.sum(dtype=torch.float32).isfinite():
            # In float32, which it becomes.
            if bad := int((~tensor.float().isfinite()).sum()):
                raise UserError(f"{path}: {name}: {bad} values are not finite; the file is damaged")
