"""What training writes of a model, adapters in PEFT's own format, and the optimizer.

    adapter_config.json         `read_settings`
    adapter_model.safetensors   `load_weights`
    both                        `save_model`, which writes a model folder where all weights train
    added.safetensors           both functions, if a fork has added to the model
"""
import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from core.data import read_json
from core.config import UserError, reading
from extras.memory.techniques import PLAIN, facts, techniques_of
from core.model_files import read_model
from core.tiny import make_tiny
from lora import KIND, adapter_tensors, settings

ADAPTER = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
ADDED = "added.safetensors"
# Keys of PEFT's adapter_config.json that lora.KIND knows, or that change nothing; no others pass.
UNDERSTOOD = {
    "peft_type", "task_type", "peft_version", "auto_mapping", "base_model_name_or_path",
    "inference_mode", "r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora", "bias",
    "fan_in_fan_out", "init_lora_weights", "eva_config", "layers_pattern", "megatron_core",
    "qalora_group_size", "runtime_config", "ensure_weight_tying", *KIND.peft_entries}
# The keys that choose among the Linears of the names in target_modules.
PLACES = {"layers_to_transform", "exclude_modules"}
# The words by which the metadata of the tensors say in which form the base was stored.
FORMS = {"load_in_4bit": "nf4", "int8_head": "int8"}


def adamw(model, *, lr: float, weight_decay: float = 0.0, beta2: float = 0.95):
    """Return AdamW over what trains in the model. `Run.steps` applies the schedule to `lr`.

    A beta2 of 0.95 soon forgets the tiny first gradients of a fresh adapter. An adapter in host
    memory is updated there: the device holds no adapter, gradient or moment.
    """
    weights = [p for p in model.parameters() if p.requires_grad]
    # On a CPU the fused kernel is the fastest one. None lets torch choose.
    fused = techniques_of(model).adamw_on_host or None
    return torch.optim.AdamW(
        weights, lr=lr, betas=(0.9, beta2), weight_decay=weight_decay, fused=fused)


@dataclass
class TrainingState:
    """The weights, the tokenizer and the optimizer's moments, on which the next step depends.

    A fork with state of its own overrides both methods: checkpoints then hold it. It changes it at
    the end of a step, because a step that is stopped before its first update is done again.
    """

    model: object
    tokenizer: object
    optimizer: object

    def save_weights(self, folder):
        """Write what trains into `folder`: the adapter in PEFT's format, or all weights."""
        save_model(self.model, folder)

    def load_weights(self, folder):
        """Read back what `save_weights` wrote, bit for bit."""
        load_weights(self.model, folder)


def save_model(model, folder: str):
    """Write the adapter in PEFT's format, or, when all weights train, a model folder.

    A model folder needs `tokenizer.save_pretrained(folder)`, too, before `load_model` reads it.
    PEFT adds an adapter to a 16-bit base by rounding to the nearest, which loses small updates
    (bench/adapter_rounding.py): play the folder of `lora.py merge --dtype bfloat16` instead. What a
    fork has added to the model, a value head for instance, goes into a file of its own.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    added = added_weights(model)
    if added:
        save_file(_on_cpu(added), folder / ADDED)
    if settings(model):
        _save_adapter(model, folder)
    else:
        weights = {name: w for name, w in model.state_dict().items() if name not in added}
        model.save_pretrained(folder, state_dict=weights)


def added_weights(model) -> dict:
    """Return {name: parameter} of what trains and is neither the adapter nor the model's own.

    Beside an adapter, weights of the base model that train are among them.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if settings(model):
        return {name: p for name, p in trained.items() if ".lora." not in name}
    with torch.device("meta"):
        own = type(model)(model.config).state_dict()
    return {name: p for name, p in trained.items() if name not in own}


def _on_cpu(tensors: dict) -> dict:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _save_adapter(model, folder):
    quantized = ",".join(FORMS[name] for name in FORMS if getattr(techniques_of(model), name))
    # One entry of metadata alone: of two, safetensors writes the order at random.
    save_file(_on_cpu(adapter_tensors(model)), folder / TENSORS,
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


def load_weights(model, folder: str):
    """Load what `save_model` wrote, bit for bit, but for what a fork added and `model` lacks."""
    path = Path(folder, ADDED)
    if path.exists() or added_weights(model):
        with reading(path):
            model.load_state_dict(load_file(path), strict=False)
    if settings(model):
        _load_adapter(model, folder)
    else:
        saved, _ = read_model(str(folder), torch.float32, torch.device("cpu"), PLAIN, 0)
        model.load_state_dict(saved.state_dict(), strict=False)  # not what was added


def _load_adapter(model, folder):
    path = Path(folder, TENSORS)
    with reading(path):
        saved = load_file(path)
    check_finite(path, saved)
    needed = adapter_tensors(model)
    # PEFT names them so where it had loaded the model with its vision tower.
    saved = {name if name in needed else name.replace(".language_model.", ".", 1): tensor
             for name, tensor in saved.items()}
    for name, p in needed.items():
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
        # Of a pattern, or names with a rule beside, the tensors say which Linears it chose.
        if isinstance(config["target_modules"], str) or any(config.get(key) for key in PLACES):
            config["target_modules"] = sorted({
                name.removeprefix("base_model.model.").partition(".lora_")[0]
                for name in file.keys()})
    return config


def _check_plain_lora(config):
    """Raise ValueError if this is anything but LoRA (lora.KIND) on Linears that are named."""
    odd = [key for key, value in config.items() if value and key not in UNDERSTOOD | PLACES]
    init = config.get("init_lora_weights", True)
    # PiSSA, OLoRA, LoftQ and CorDA change the base too.
    if init not in (True, False, "gaussian", "eva", "orthogonal"):
        odd.append(f"init_lora_weights {init}")
    peft_type = KIND.peft_entries.get("peft_type", "LORA")
    if config.get("peft_type") != peft_type or config.get("bias", "none") != "none" or odd:
        raise ValueError("only plain LoRA is read here; merge others with PEFT (merge_and_unload); "
                         f"this one has {', '.join(odd)[:200] or 'another peft_type or bias'}")
    names = config["target_modules"]
    if not isinstance(names, str) and not all(isinstance(name, str) for name in names):
        raise ValueError("target_modules must be a list of names, or a pattern")
    if type(config["r"]) is not int or not (config["r"] > 0 and config["lora_alpha"] > 0):
        raise ValueError("lora_alpha and r must be above 0, and r a whole number")


def check_finite(path, tensors: dict):
    """Raise UserError if a value in the tensors that were read from `path` is not finite."""
    for name, tensor in tensors.items():
        # A sum is not finite where a value is not, and needs no memory.
        if not tensor.sum(dtype=torch.float32).isfinite():
            raise UserError(f"{path}: {name} has values that are not finite; the file is damaged")
