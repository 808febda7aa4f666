"""Flags and YAML become a config.

An option is one line of a dataclass: `learning_rate: float = flag(1e-5, "AdamW step size", above=0)`. Its value is the
default, else what `--config file.yaml` says, else the command line; of an option given twice there the last one wins,
so a script may end in "$@". YAML is read as typed text by the function that reads the command line: both take the same.
Only the standard library is imported here, so that `--help` answers at once.
"""
import dataclasses
import difflib
import math
import operator
import os
import re
import shutil
import sys
import textwrap
import types
import typing
from dataclasses import dataclass
from pathlib import Path

from experiment.data import read_yaml
from experiment.errors import UserError

KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", list: "a list"}
BOUNDS = (("low", "at least", operator.ge), ("high", "at most", operator.le), ("above", "greater than", operator.gt))


def flag(default, help="", *, choices=None, aliases=(), low=None, high=None, above=None, bare=None, group=""):
    """Declare a field of a Config: its default value, its help text and what its values must satisfy.

    Args:
        default: the value where nothing is said.
        help: what the option means, in the words that --help prints.
        choices: the values that are allowed.
        aliases: other names of the option.
        low, high: inclusive bounds of a number.
        above: exclusive lower bound of a number.
        bare: the value of the option if it is given without one.
        group: the heading under which --help lists it, if its class has none.
    A class that re-declares an inherited field inherits what it does not state again.
    """
    stated = dict(help=help, choices=choices, aliases=aliases, low=low, high=high, above=above, bare=bare, group=group)
    metadata = {name: value for name, value in stated.items() if value not in (None, "", ())}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def auto(default, help="", **bounds):
    """Declare a field whose default depends on the model or the environment.

    Its value is None as long as nothing is said, and `fill` gives it one. `default` is the value that
    `fill` takes last. It may be a function of the config; --help then shows the function's docstring.
    """
    field = flag(None, help, **bounds)
    return dataclasses.field(default=None, metadata={**field.metadata, "default": default})


def fill(config, *tables):
    """Return a copy of the config in which every `auto` field has a value.

    What the user said stays. A field that is still None gets the value of the first table that has it, or else its
    stated default. A table may only contain names of the config's fields.
    """
    flags = options(type(config))
    for name in (name for table in tables for name in table if name not in flags):
        raise KeyError(f"{type(config).__name__} has no field {name}")
    unset = [name for name, (_, _, spec) in flags.items() if "default" in spec and getattr(config, name) is None]
    given = {}
    for table in reversed(tables):
        given.update({name: value for name, value in table.items() if name in unset})
    config = dataclasses.replace(config, **given)
    # Stated defaults come last because they may be functions of the other values.
    stated = {name: flags[name][2]["default"] for name in unset if getattr(config, name) is None}
    return dataclasses.replace(config, **{k: v(config) if callable(v) else v for k, v in stated.items()})


def options(config_class):
    """Return {field name: (int, float, bool, str or list; whether it may be None; what `flag` was told)}."""
    hints, out = typing.get_type_hints(config_class), {}
    classes = [c for c in config_class.__mro__ if dataclasses.is_dataclass(c)]
    names = [name for c in classes for name in c.__dict__.get("__annotations__", ())]
    for name in dict.fromkeys(names):
        union = typing.get_args(hints[name]) if isinstance(hints[name], types.UnionType) else ()
        kind = next((t for t in union if t is not type(None)), hints[name])
        spec = {}
        for declared in reversed([c for c in classes if name in c.__dict__.get("__annotations__", ())]):
            field = declared.__dataclass_fields__[name]
            spec = {"group": vars(declared).get("heading", "")} if not spec else spec
            spec |= field.metadata
            if field.default is not None:
                spec.pop("default", None)
        out[name] = typing.get_origin(kind) or kind, type(None) in union, spec
    return out


# --------------------------------------------------------------------------------- flags that all algorithms share
def best_dtype(config):
    """bfloat16 for the frozen weights of LoRA where the device computes in it, else float32"""
    if not config.lora_r:
        return "float32"
    import torch
    if torch.cuda.is_available():
        supported = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        info = Path("/proc/cpuinfo")
        words = info.read_text().split() if info.exists() else []
        supported = not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(words)
    return "bfloat16" if supported else "float32"


def usual_learning_rate(config):
    """2e-5 with LoRA, 1e-6 where all weights train"""
    return 2e-5 if config.lora_r else 1e-6


@dataclass(kw_only=True)
class ModelFlags:
    """Which model is trained, and which of its weights."""

    heading = "model"
    model_path: str = flag("tiny", "tiny, a hub id, a model folder, an adapter folder or an output folder")
    lora_r: int = flag(16, "rank of LoRA; 0: all weights train", low=0)
    lora_alpha: float | None = flag(None, "LoRA alpha; default: twice the rank", above=0)
    lora_dropout: float = flag(0.0, "dropout on the input of the adapter, in updates only", low=0, high=0.99)
    lora_target_modules: str = flag("all-linear", "names of the adapted Linears, separated by commas")
    use_rslora: bool = flag(False, "scale the adapter by alpha / sqrt(rank)")
    dtype: str | None = auto(best_dtype, "dtype of the frozen weights; auto: as they are stored",
                             choices=("float32", "bfloat16", "float16", "auto"))


@dataclass(kw_only=True)
class MemoryFlags:
    """How much memory a step may take."""

    heading = "memory"
    memory: str = flag("plain", "what is traded for memory; --dry_run shows what each setting needs",
                       choices=("plain", "checkpoint", "4bit", "small", "stream"))
    load_in_4bit: bool = flag(False, "keep the frozen weights in NF4 with double quantization")
    gradient_checkpointing: bool = flag(False, "recompute the layers in the backward pass: a third more time")
    dry_run: bool = flag(False, "print what a step would need, try its longest batch, and stop")


@dataclass(kw_only=True)
class RolloutFlags:
    """Which environment is played, and how."""

    heading = "environment and rollout"
    env: str = flag("equations", "environment, or several (a,b); also path/to/file.py:Class")
    dataset: str | None = flag(None, "tasks (.jsonl, or a name that the environment knows); default: its own")
    eval_dataset: str | None = flag(None, "held-out tasks (.jsonl); default: a tenth of --dataset")
    max_samples: int = flag(10_000, "training tasks", low=1)
    env_options: str | None = flag(None, "name=value,... that every task passes to the environment's reset")
    group_size: int = flag(8, "episodes of each task", low=1,
                           aliases=("samples_per_prompt", "num_samples", "num_generations"))
    temperature: float = flag(1.0, "of the softmax, in rollout and update", above=0)
    max_new_tokens: int | None = auto(128, "tokens per turn; default: what the environment states, or this", low=1)
    max_tokens: int | None = auto(1024, "tokens per episode, prompt and tool results included; default: what the "
                                        "environment states, or this", low=8, aliases=("max_length",))
    max_turns: int | None = flag(None, "assistant turns per episode; default: what the environment states", low=1)
    reward_scaling: float = flag(1.0, "reward = (reward - reward_bias) x this")
    reward_bias: float = flag(0.0, "subtracted from the reward of each episode")


@dataclass(kw_only=True)
class TrainingFlags:
    """How the weights are updated."""

    heading = "training"
    learning_rate: float | None = auto(usual_learning_rate, "AdamW step size at its peak", low=0)
    warmup_steps: int = flag(5, "steps of linear warm-up; after them a linear decay to a tenth of the peak", low=0)
    weight_decay: float = flag(0.0, "weight decay of AdamW", low=0)
    max_grad_norm: float | None = auto(1.0, "a larger norm of the gradient is clipped to this", above=0)
    batch_size: int = flag(16, "sequences in one forward pass: memory only", low=1)
    gradient_accumulation_steps: int | None = flag(
        None, "forward passes of one update; default: what the step needs", low=1)
    num_epochs: int = flag(1, "passes over the data", low=1, aliases=("total_epochs", "num_train_epochs"))
    max_steps: int | None = flag(None, "optimizer steps; overrides num_epochs", low=0)


@dataclass(kw_only=True)
class RunFlags:
    """Where a run is written, and how it continues."""

    heading = "run"
    output_dir: str = flag("runs/run", "folder of this run")
    overwrite: bool = flag(False, "replace the run that is in output_dir")
    resume: str | None = flag(None, "continue the run in output_dir from its newest checkpoint, or the one before",
                              choices=("newest", "previous"), bare="newest")
    seed: int = flag(0, "seed of everything random", low=0)
    save_every: int | None = auto(
        0, "steps between checkpoints; 0: after every 10 minutes of training, and at the end", low=0)
    save_trajectories: int = flag(16, "episodes of each step kept in trajectories.jsonl; 0: none", low=0)
    eval_tasks: int = flag(200, "held-out tasks played before, after and every eval_every steps; 0: none", low=0)
    eval_every: int = flag(0, "steps between evaluations; 0: before and after only", low=0)


def convert(value, option, where):
    """The checked value of an option (one of `options`). Text is read first; where it came from opens the message."""
    kind, optional, spec = option
    where = f"{where} {textwrap.shorten('null' if value is None else str(value), 80) or repr('')}"
    if value is None and optional:
        return None
    if isinstance(value, str) and kind is list:
        value = [item.strip() for item in value.split(",") if item.strip()]
    elif isinstance(value, str) and kind is bool:
        value = {"true": True, "false": False}.get(value.lower())
    elif isinstance(value, str) and kind in (int, float):
        try:                                                        # int and float also take "1_0", "nan" and "４２"
            value = kind(value) if re.fullmatch("[-+.0-9eE]+", value) else None
        except ValueError:
            value = None
    if not isinstance(value, (int, float) if kind is float else kind) or isinstance(value, bool) != (kind is bool):
        raise UserError(f"{where}: not {KINDS[kind]}")
    if kind is float and not math.isfinite(value):
        raise UserError(f"{where}: not a finite number")
    for item in value if kind is list else [value]:
        if spec.get("choices") and item not in spec["choices"] or kind is list and not isinstance(item, str):
            raise UserError(f"{where}: must be one of {', '.join(map(str, spec.get('choices') or ['text, text']))}")
    for bound, words, holds in BOUNDS:
        if spec.get(bound) is not None and not holds(value, spec[bound]):
            raise UserError(f"{where}: must be {words} {spec[bound]}")
    return value


def nearest(name, known, lead="did you mean ", end="?", otherwise="--help lists them"):
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"{lead}{close[0]}{end}" if close else otherwise


def parse(config_class, argv, description=""):
    """The config that the command line and its --config files ask for. Raises UserError; --help prints and exits 0."""
    argv, known = [str(word) for word in argv], options(config_class)
    names = {alias: name for name, option in known.items() for alias in (name, *option[2].get("aliases", ()))}
    from_files, from_line = {}, {}
    if "-h" in argv or "--help" in argv:
        print(help_text(config_class, description))
        raise SystemExit(0)
    while argv:
        word, equals, text = argv.pop(0).partition("=")
        name = word[2:].replace("-", "_")
        if not word.startswith("--") or not name:
            raise UserError(f"unexpected argument {word + equals + text}; options are written --name value")
        switch = known[names[name]][0] is bool if name in names else False
        negated = names.get(name.removeprefix("no_"))
        if name not in names and negated and known[negated][0] is bool and not equals:
            from_line[negated] = False
            continue
        if name not in names and name != "config":
            raise UserError(f"unknown option --{name}; {nearest(name, [*names, 'config', 'help'], 'did you mean --')}")
        if switch and not equals:
            text = argv.pop(0) if argv and argv[0].lower() in ("true", "false") else "true"
        elif not equals and (not argv or argv[0].startswith("--")):
            text = known[names[name]][2].get("bare") if name in names else None
        elif not equals:
            text = argv.pop(0)
        if text is None:
            raise UserError(f"--{name}: needs a value")
        if name != "config":
            value = None if known[names[name]][1] and text.lower() in ("none", "null") else text
            from_line[names[name]] = convert(value, known[names[name]], f"--{name}")
            continue
        lines = {}                                                          # of several files the later one wins
        for line, key, value in read_yaml(text):
            field = names.get(key.replace("-", "_"))
            if not field:
                raise UserError(f"{text}:{line}: unknown option {key}; {nearest(key, names)}")
            if field in lines:
                raise UserError(f"{text}:{line}: {key} is given twice, first in line {lines[field]}")
            lines[field] = line
            from_files[field] = convert(value, known[field], f"{text}:{line}: {key}")
    return config_class(**{**from_files, **from_line})


def help_text(config_class, description):
    """Usage, the first paragraph of the description, then the options by group: name, default, meaning."""
    default, groups = config_class(), {"": [("--config", "none", "YAML file of options; the command line wins")]}
    for name, (_, _, spec) in options(config_class).items():
        value = spec.get("default", getattr(default, name))
        value = value.__doc__ if callable(value) else value
        shown = ",".join(value) if isinstance(value, list) else str(value)
        words = [spec.get("help", ""), *(f"same as --{alias}" for alias in spec.get("aliases", ()))]
        words += ["one of " + ", ".join(map(str, spec["choices"]))] if spec.get("choices") else []
        row = f"--{name}", shown.lower() if value in (None, True, False) else shown or "''", "; ".join(words)
        groups.setdefault(spec.get("group", ""), []).append(row)
    left = 4 + max(len(name) for rows in groups.values() for name, _, _ in rows)
    middle = 2 + min(24, max(len(shown) for rows in groups.values() for _, shown, _ in rows))
    width = max(shutil.get_terminal_size().columns, left + middle + 40)
    out = [f"usage: python {os.path.basename(sys.argv[0])} [--config file.yaml] [--name value] [--no_switch]"]
    out += ["", (description or "").strip().split("\n\n")[0]]
    for group, rows in groups.items():
        out += ["", f"{group or 'options'}:"]
        for name, shown, words in rows:
            head = f"  {name}".ljust(left) + f"{shown}  ".ljust(middle)
            out.append(textwrap.fill(words, width, initial_indent=head, subsequent_indent=" " * (left + middle)))
    return "\n".join(out)
