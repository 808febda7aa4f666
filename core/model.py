"""A stock Hugging Face model: reading and checking it, writing what trains, and the optimizer.

    newest, base_of     where a path leads: to a checkpoint, and to the base model of an adapter
    read_model          a model folder, a hub id or the tiny model, with its tokenizer
    save_model          an adapter in PEFT's format, or, when all weights train, a model folder
    adamw, scheduled    the optimizer, and the learning rate of a step
"""
import json
import math
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from core.data import read_json, reading
from core.config import UserError, first_line
from core.tiny import make_tiny

ADAPTER = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
ADDED = "added.safetensors"  # what a fork has added to the model
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16,
          "auto": "auto"}  # auto: as stored
# Keys of PEFT's adapter_config.json that we know, or that change nothing; no others pass.
UNDERSTOOD = {
    "peft_type", "task_type", "peft_version", "auto_mapping", "base_model_name_or_path",
    "inference_mode", "r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora", "bias",
    "fan_in_fan_out", "init_lora_weights", "eva_config", "layers_pattern", "megatron_core",
    "qalora_group_size", "runtime_config", "ensure_weight_tying"}
# The keys that choose among the Linears of the names in target_modules.
PLACES = {"layers_to_transform", "exclude_modules"}


@dataclass
class Facts:
    """What this project knows of a model beyond its weights. It stands at `model.facts`."""

    source: str = ""  # the base model's folder, its hub id, or "tiny"
    seed: int = 0  # of the tiny model's random weights
    kind: type | None = None  # the class of its adapters, None if `load_model` made none
    shares_prefix: bool = False  # rows that begin alike may go through as one packed row
    refuses_engine: str = ""  # why the engine cannot decode this model, "" if it can
    decode_rows: int = 128  # episodes that decode at once
    stored_as: str = ""  # the form of the frozen weights, as an adapter's file names it
    fused_adamw: bool | None = None  # True takes AdamW's fused kernel, None lets torch choose
    techniques: object = None  # what makes its training smaller, None if nothing does
    head_logprobs: object = None  # in place of that of core.logprobs, None for core's
    scale_gradient: object = None  # called with the results of token_logprobs, None for nothing
    refuses_graphs: bool = False  # a decode step could not become a CUDA graph
    token_bytes: int = 0  # of the engine's cache, for a token of a row
    state_bytes: int = 0  # of the engine's cache, for a row


def facts(model) -> Facts:
    """Return the facts about this model: the default ones if `load_model` did not make it."""
    if not hasattr(model, "facts"):
        model.facts = Facts()
    return model.facts


@dataclass
class Settings:
    """The adapter that `lora.add_lora` gave a model. It stands at `model.lora_settings`."""

    peft: dict  # what adapter_config.json says of the adapter, in PEFT's names
    tensors: dict  # {name in PEFT's files: parameter} of what the adapter's file holds
    all_linear: bool = False  # the targets were not named
    fresh: bool = True  # the adapter was not read from a folder


def settings(model) -> Settings | None:
    """Return the settings of the model's adapter, None if it has no adapter."""
    return getattr(model, "lora_settings", None)


# ------------------------------------------------------------------------------ where a path leads
def checkpoints(output_dir) -> list[Path]:
    """Return the paths of all checkpoints/step_NNNNNN with a state.json, the newest last."""
    files = Path(output_dir).glob("checkpoints/step_*/state.json")
    paths = [file.parent for file in files if file.parent.name[5:].isdecimal()]
    return sorted(paths, key=lambda path: int(path.name[5:]))


def newest(path) -> str:
    """Return the newest checkpoint of an output folder, and every other path as it is."""
    return str([path, *checkpoints(path)][-1])


def is_adapter(path) -> bool:
    """True if this is a folder that holds an adapter."""
    return os.path.exists(Path(path, ADAPTER))


def base_of(adapter) -> str:
    """Return the folder or hub id of an adapter's base model.

    A base/ in its own or its run's folder comes first: the recorded place may now hold another.
    """
    folder = Path(adapter).resolve()
    runs = folder.parents[1:2] if folder.parent.name == "checkpoints" else ()
    for place in (folder, *runs):
        if (place / "base").is_dir():
            return str(place / "base")
    return str(read_json(folder / ADAPTER).get("base_model_name_or_path") or "")


def is_tiny(model_path: str) -> bool:
    """True if this is the tiny model or was made from it. Reads no weights and never raises."""
    try:
        path = newest(model_path)
        path = base_of(path) if is_adapter(path) else path
        return path == "tiny" or bool(read_json(Path(path, "config.json")).get("tiny"))
    except (OSError, ValueError):  # a UserError is a ValueError
        return False


# --------------------------------------------------------------------------------- reading a model
def choose_device(name: str | None = None):
    """Return the device of this name, or the first that is there of CUDA's, a Mac's and the CPU."""
    gpus = {"cuda": torch.cuda, "mps": torch.backends.mps}
    there = [kind for kind, backend in gpus.items() if backend.is_available()]
    if name in gpus and name not in there:
        raise UserError(f"--device {name}: torch finds none, but {', '.join([*there, 'cpu'])}")
    return torch.device(name or [*there, "cpu"][0])


def from_pretrained(source: str, config, dtype, device, kind=None):
    """Read a model by the class `kind`, or AutoModelForCausalLM. No weights may be missing."""
    from transformers import AutoModelForCausalLM
    model, report = (kind or AutoModelForCausalLM).from_pretrained(
        source, config=config, dtype=dtype, trust_remote_code=False, use_safetensors=True,
        ignore_mismatched_sizes=True, output_loading_info=True)
    # Where weights are missing or misshapen, transformers would continue with random ones.
    missing = {*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])}
    if missing:
        missing = ", ".join(sorted(missing)[:3])
        raise UserError(f"{source}: no weights for {missing}: the model is incomplete, "
                        "or of a kind that predicts no next token, or its config.json is another's")
    return model


def read_model(source: str, dtype, device, seed: int, read_weights=from_pretrained):
    """Return the model and tokenizer of a folder, of a hub id, or the tiny ones of this seed.

    Args:
        dtype: of torch, or "auto": as the weights are stored.
        read_weights: read_weights(source, config, dtype, device) -> model.
    """
    if source == "tiny":
        model, tokenizer = make_tiny(seed)
        if dtype != "auto":
            # Its buffers keep their dtype.
            model.config.dtype = dtype
            for p in model.parameters():
                p.data = p.data.to(dtype)
        return model.eval(), tokenizer
    from transformers import AutoConfig
    config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    # Transformers chooses. The attention that config.json names may be a kernel to download.
    config._attn_implementation = None
    return read_weights(source, config, dtype, device), read_tokenizer(source)


def read_tokenizer(source: str):
    """Return the tokenizer of a folder or hub id."""
    from transformers import AutoTokenizer
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except Exception as error:
        raise UserError(f"{source}: no tokenizer could be read ({first_line(error)})") from None


def switch_dropout_off(model):
    """Switch off config.json's dropout and router noise: an update sees the policy that sampled."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if f".{name}".endswith(("drop", "dropout", ".jitter_noise")) and type(value) is float:
                vars(module)[name] = 0.0


# ------------------------------------------------------------------------------ writing what trains
def save_model(model, folder: str):
    """Write the adapter in PEFT's format, or, when all weights train, a model folder.

    What a fork has added to the model, such as a value head, goes into a file of its own.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if added := added_weights(model):
        save_file({name: p.contiguous() for name, p in added.items()}, folder / ADDED)
    if settings(model):
        save_adapter(model, folder)
    else:
        weights = {name: w for name, w in model.state_dict().items() if name not in added}
        model.save_pretrained(folder, state_dict=weights)
    share_weights(folder)


def share_weights(folder):
    """Let all who may read a folder's JSON read its weights. safetensors lets no other user."""
    for file in Path(folder).glob("*.safetensors"):
        with suppress(PermissionError):  # not every disk has modes
            file.chmod(next(Path(folder).glob("*.json")).stat().st_mode)


def added_weights(model) -> dict:
    """Return {name: parameter} of what trains beside the adapter, or beside the model's own."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if settings(model):
        return {name: p for name, p in trained.items() if ".lora." not in name}
    with torch.device("meta"):
        own = type(model)(model.config).state_dict()
    return {name: p for name, p in trained.items() if name not in own}


def save_adapter(model, folder):
    """Write the two files of PEFT, and the tiny model if it is the base."""
    form = facts(model).stored_as
    # One entry of metadata alone: of two, safetensors writes the order at random.
    save_file(settings(model).tensors, folder / TENSORS,
              metadata={"base": form} if form else {"format": "pt"})
    base = facts(model).source
    # Nobody else has these random weights, so they are saved beside every adapter.
    if base == "tiny":
        base = folder / "base"
        for thing in make_tiny(facts(model).seed):
            thing.save_pretrained(base)
        share_weights(base)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "inference_mode": True, "bias": "none",
              "fan_in_fan_out": False, "modules_to_save": None,
              "base_model_name_or_path": os.path.abspath(base) if os.path.isdir(base) else base,
              **settings(model).peft}
    (folder / ADAPTER).write_text(json.dumps(config, indent=2), "utf-8")


def load_weights(model, folder: str):
    """Load what `save_model` wrote, bit for bit, but for what a fork added and `model` lacks."""
    path = Path(folder, ADDED)
    if path.exists() or added_weights(model):
        with reading(path):
            model.load_state_dict(load_file(path), strict=False)
    if settings(model):
        load_adapter(model, folder)
    else:
        saved = from_pretrained(folder, model.config, torch.float32, "cpu", type(model))
        model.load_state_dict(saved.state_dict(), strict=False)  # not what was added


def load_adapter(model, folder):
    """Load the adapter's tensors. Raises UserError if some are missing, left over or damaged."""
    path = Path(folder, TENSORS)
    with reading(path):
        saved = load_file(path)
    needed = settings(model).tensors
    # PEFT names them so where it had loaded the model with its vision tower.
    saved = {name if name in needed else name.replace(".language_model.", ".", 1): tensor
             for name, tensor in saved.items()}
    for name, p in needed.items():
        stored = tuple(saved[name].shape) if name in saved else "missing"
        if stored != p.shape:
            short = name.removeprefix("base_model.model.").removesuffix(".weight")
            raise UserError(f"{folder}: {short} is {stored}, the model needs {tuple(p.shape)}")
        p.data.copy_(saved.pop(name))
        if not p.isfinite().all():
            raise UserError(f"{path}: {name} has values that are not finite; the file is damaged")
    if saved:
        raise UserError(f"{folder}: {next(iter(saved))} has no place in this model")


def read_settings(folder: str, entries: dict) -> dict:
    """Return adapter_config.json of a LoRA, or of the kind with these `Adapter.peft_entries`.

    "quantized_base" is added, the form of the base's weights in training: "" (as in its files),
    "nf4", "int8" (the head) or "nf4,int8".
    """
    path = Path(folder, ADAPTER)
    config = read_json(path)
    with reading(path):
        known = UNDERSTOOD | PLACES | entries.keys()
        odd = [key for key, value in config.items() if value and key not in known]
        init = config.get("init_lora_weights", True)
        # PiSSA, OLoRA, LoftQ and CorDA change the base too.
        if init not in (True, False, "gaussian", "eva", "orthogonal"):
            odd.append(f"init_lora_weights {init}")
        is_kind = config.get("peft_type") == entries.get("peft_type", "LORA")
        if odd or not is_kind or config.get("bias", "none") != "none":
            reason = ", ".join(odd)[:200] or "another peft_type or bias"
            raise ValueError("only plain LoRA is read here; merge others with PEFT "
                             f"(merge_and_unload); this one has {reason}")
        if type(config["r"]) is not int or not (config["r"] > 0 and config["lora_alpha"] > 0):
            raise ValueError("lora_alpha and r must be above 0, and r a whole number")
        targets = config["target_modules"]
        is_rule = isinstance(targets, str) or any(map(config.get, PLACES))
        config["target_modules"] = list(map(str.strip, targets))
    path = Path(folder, TENSORS)
    with reading(path), safe_open(path, "pt") as file:
        config["quantized_base"] = (file.metadata() or {}).get("base", "")
        # Of a pattern, or names with a rule beside, the tensors say which Linears it chose.
        if is_rule:
            config["target_modules"] = sorted({
                name.removeprefix("base_model.model.").partition(".lora_")[0]
                for name in file.keys()})
    return config


# -------------------------------------------------------------------------------- the optimizer
def adamw(model, *, lr: float, weight_decay: float = 0.0, beta2: float = 0.95):
    """Return AdamW over what trains in the model. The loop sets each step's rate by `scheduled`.

    A beta2 of 0.95 soon forgets the tiny first gradients of a fresh adapter.
    """
    weights = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(weights, lr=lr, betas=(0.9, beta2), weight_decay=weight_decay,
                             fused=facts(model).fused_adamw)


def steps_of(config, steps_per_epoch: float, default: int | None = None) -> int:
    """Return --max_steps, else the steps of --num_epochs passes over the data, else `default`."""
    if config.max_steps is not None:
        return config.max_steps
    if config.num_epochs is None:
        return default
    return max(1, math.ceil(round(config.num_epochs * steps_per_epoch, 6)))


def scheduled(peak: float, step: int, planned: int) -> float:
    """Return the step's learning rate: linear warm-up, linear decay to a tenth of the peak.

    The warm-up lasts a tenth of the planned steps, at most 20.
    """
    warmup_steps = max(1, min(20, planned // 10))
    warmup = min(1.0, (step + 1) / warmup_steps)
    decay = 1 - 0.9 * min(step / max(planned, 1), 1.0)
    return peak * warmup * decay
