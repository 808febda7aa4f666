"""Configs are dataclasses of flags: `seed: int = flag(0, "seed of everything random", low=0)`.

Here are also the flags that all algorithms share, as dataclass parents, and the check of a config's
values.
"""
import dataclasses
import difflib
import importlib
import inspect
import json
import operator
import os
import re
import typing
from collections import ChainMap
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from core.data import LISTS
from core.errors import UserError, beginning

# Permissions for one call: a file neither gives nor repeats them.
ONCE = ("overwrite", "resume", "unsafe_code")
MIXTURES = "extras.data.mixtures"  # knows the revision of data
CODE = ("env", "rewards")  # they may name files of code, which a config file does not choose
AS_JSON = bool | list | dict | None  # values of options whose str() would be read as text
KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
# A float32 holds no larger number, and a tensor of int32 no larger count.
LARGEST = {int: 2**31 - 1, float: 3.4e38}
BOUNDS = (
    ("low", "at least", operator.ge),
    ("high", "at most", operator.le),
    ("above", "greater than", operator.gt),
)


# ---------------------------------------------------------------------------------- declaring flags
def flag(default, help="", /, **properties):
    """Declare a field of a Config: its default value, its help text and its properties.

    A class that re-declares an inherited field inherits the properties it does not state again.

    Args:
        default: the value where nothing is said.
        help: what the flag means, in the words that --help prints.
        choices: the values that are allowed.
        aliases: other names of the flag.
        low, high: inclusive bounds of a number.
        above: exclusive lower bound of a number.
        optional: False where "none" on the command line is a value of its own and not None.
    """
    if help:
        properties["help"] = help
    return dataclasses.field(default=default, metadata=properties)


def auto(default, help="", **properties):
    """Declare a field whose default depends on the model or the environment.

    Its value is None as long as nothing is said, and `fill` gives it one. `default` is the value
    that `fill` takes last. It may be a function of the config, of which the fields before it are
    filled, and whose docstring --help shows.
    """
    return flag(None, help, default=default, auto=True, **properties)


def fill(config, *tables):
    """Return a copy of the config in which every `auto` field has a value.

    What the user said stays. A field that is still None gets the value of the first table that has
    it, or else its stated default. Data sets of the hub get their revision.
    """
    flags = options(type(config))
    config = dataclasses.replace(config)
    for name, option in flags.items():
        if option.auto and getattr(config, name) is None:
            value = ChainMap(*tables).get(name, option.default)
            setattr(config, name, value(config) if callable(value) else value)
    if any("hub:" in str(value) for value in vars(config).values()):
        importlib.import_module(MIXTURES).pin_revisions(config)
    return config


@dataclass
class Option:
    """A flag as its type annotation and the properties given to `flag` describe it."""

    kind: type  # int, float, bool or str
    optional: bool  # None is a value, too
    default: object = None
    auto: bool = False  # None means that `fill` decides
    help: str = ""
    choices: tuple = ()
    aliases: tuple = ()
    low: float | None = None
    high: float | None = None
    above: float | None = None
    group: str = ""


def options(config_class):
    """Return {field name: Option}, first the class's new fields and then those of its parents."""
    hints = typing.get_type_hints(config_class)
    flags = {}
    for c in reversed(config_class.__mro__):
        new = {}
        for name in inspect.get_annotations(c):
            field = c.__dataclass_fields__[name]
            # An annotation is a type, or a type | None.
            kind, *none = typing.get_args(hints[name]) or [hints[name]]
            option = flags.get(name) or Option(kind, bool(none), group=getattr(c, "heading", ""))
            stated = {"default": field.default, "auto": False, **field.metadata}
            (flags if name in flags else new)[name] = dataclasses.replace(option, **stated)
        flags = new | flags
    return flags


# ---------------------------------------------------------------- flags that all algorithms share
def options_for(function, config) -> dict:
    """Return the arguments of a function, or of what it wraps, that a Config has by name."""
    names = set()
    while function:
        names |= inspect.signature(function, follow_wrapped=False).parameters.keys()
        function = getattr(function, "__wrapped__", None)
    return {name: value for name, value in vars(config).items() if name in names}


def best_dtype(config):
    """float32, but the frozen weights of LoRA in the 16 bits that the device computes in, if any"""
    if not config.lora_r:
        return "float32"
    import torch
    if torch.cuda.is_available():
        # Before Ampere GPUs only emulate bfloat16.
        supported = torch.cuda.is_bf16_supported(including_emulation=False)
        return "bfloat16" if supported else "float16"
    info = Path("/proc/cpuinfo")
    words = info.read_text().split() if info.exists() else []
    supported = not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(words)
    return "bfloat16" if supported else "float32"


def policy_learning_rate(config):
    """2e-4 with LoRA (measured: bench/learning_rates.py), 1e-6 where all weights train"""
    return 2e-4 if config.lora_r else 1e-6


def preference_learning_rate(config):
    """2e-5 with LoRA, 1e-6 where all weights train"""
    return 2e-5 if config.lora_r else 1e-6


def imitation_learning_rate(config):
    """1e-4 with LoRA, 1e-5 where all weights train"""
    return 1e-4 if config.lora_r else 1e-5


@dataclass(kw_only=True)
class ModelFlags:
    """Which model is trained, and which of its weights."""

    heading = "model"
    model_path: str = flag("tiny", "tiny (its defaults are TINY in the program), a hub id, or the "
                                    "folder of a model, an adapter or a run")
    lora_r: int = flag(16, "rank of LoRA; 0: all weights train", low=0)
    lora_alpha: float | None = flag(None, "LoRA alpha; default: twice the rank", above=0)
    lora_dropout: float = flag(0.0, "dropout on the input of the adapter, in updates only",
                               low=0, high=0.99)
    lora_target_modules: str = flag("all-linear", "names of adapted Linears, separated by commas")
    dtype: str | None = auto(best_dtype, "dtype of the frozen weights; auto: as they are stored",
                             choices=("float32", "bfloat16", "float16", "auto"))


@dataclass(kw_only=True)
class EnvironmentFlags:
    """What the environment is told, and how data calls it."""

    heading = "environment and rollout"
    env_options: str | None = flag(
        None, "name=value,...: options of the environment, or arguments of every reset")
    fields: str | None = flag(None, "names of columns in the data: ours=theirs,ours=theirs")
    unsafe_code: bool = flag(False, "run the model's Python code with NO protection")
    rewards: str | None = flag(
        None, "name=weight,...: functions that pay, too (extras/rewards/__init__.py); also module:function")


@dataclass(kw_only=True)
class PlayFlags(EnvironmentFlags):
    """Which environment is played, and how."""

    env: str = flag("equations", "environment, or several (a,b); also path/to/file.py:Class")
    dataset: str | None = flag(
        None, "tasks (.jsonl, .json, .csv, .parquet, hub:owner/name[:config][:split]), or several: "
        "a,b or in shares a=0.7,b=0.3; default: the environment's own", aliases=("tasks",))
    eval_dataset: str | None = flag(None, "held-out tasks; default: a tenth of --dataset")
    group_size: int = flag(8, "episodes of each task", low=1,
                           aliases=("samples_per_prompt", "num_samples", "num_generations"))
    temperature: float = flag(1.0, "of the softmax, in rollout and update", above=0)
    max_new_tokens: int | None = auto(
        256, "tokens per turn, unless the environment states it", low=1)
    max_tokens: int | None = auto(
        2048, "tokens per episode with prompt and tool results, unless the environment states it",
        low=8, aliases=("max_length",))
    max_turns: int | None = flag(
        None, "assistant turns per episode; default: what the environment states", low=1)

    @property
    def tasks(self):
        """The task file. sft.py and dpo.py, whose dataset holds other rows, have a field for it."""
        return self.dataset


@dataclass(kw_only=True)
class RolloutFlags(PlayFlags):
    """How many tasks are played in training, and how their rewards are changed."""

    max_samples: int = flag(10_000, "training tasks", low=1)
    sampler: str | None = flag(
        None, "addresses of vLLM servers that sample, separated by commas; default: this process")
    reward_scaling: float = flag(1.0, "reward = (reward - reward_bias) x this")
    reward_bias: float = flag(0.0, "subtracted from the reward of each episode")


@dataclass(kw_only=True)
class TrainingFlags:
    """How the weights are updated."""

    heading = "training"
    learning_rate: float | None = auto(policy_learning_rate, "AdamW step size at its peak", low=0)
    weight_decay: float = flag(0.0, "weight decay of AdamW", low=0)
    max_grad_norm: float | None = auto(1.0, "gradients of a larger norm are clipped to it", above=0)
    batch_size: int | None = auto(
        8, "sequences in one forward pass; an update has gradient_accumulation_steps of them "
        "(grpo: memory, and what dropout draws)", low=1)
    gradient_accumulation_steps: int | None = flag(
        None, "forward passes of one update; default: what the step needs", low=1)
    num_epochs: int = flag(1, "passes over the data", low=1, aliases=("total_epochs",))
    max_steps: int | None = flag(None, "steps of the training loop; overrides num_epochs", low=0)


@dataclass(kw_only=True)
class RunFlags:
    """Where a run is written, and how it continues."""

    heading = "run"
    output_dir: str = flag("runs/run", "folder of this run")
    overwrite: bool = flag(False, "rename the run that is in output_dir")
    resume: bool = flag(False, "continue the run in output_dir from its newest checkpoint")
    seed: int = flag(0, "seed of everything random", low=0)
    save_every: int = flag(
        0, "steps between checkpoints, of which the last two and the best stay; 0: after 10 "
        "minutes of training each, and at the end; an evaluated step is saved, too", low=0)
    eval_tasks: int = flag(
        200, "held-out tasks played before, after and every eval_every steps; 0: none", low=0)
    eval_every: int = flag(0, "steps between evaluations; 0: before and after only", low=0)

    def __post_init__(self):
        """Let YAML name the home folder ~, and Python give objects. config.yaml holds text.

        Objects are paths, classes, functions, lists, a datasets.Dataset, dicts, NumPy's numbers.
        """
        for name, value in vars(self).items():
            if isinstance(value, str | os.PathLike):
                value = os.path.expanduser(value)
            elif isinstance(value, dict):
                value = ",".join(f"{named(k)}={json.dumps(v) if isinstance(v, AS_JSON) else v}"
                                 for k, v in value.items())
            elif name in CODE:
                value = named(value)
            elif name in LISTS and not isinstance(value, str | None):
                value = json.dumps(value if isinstance(value, list) else value.to_list())
            elif hasattr(value, "item"):
                value = value.item()
            setattr(self, name, value)


def named(value):
    """Return the name by which a class or function is found again, with commas those of a list."""
    if isinstance(value, list):
        return ",".join(map(named, value))
    name = getattr(value, "__qualname__", value)  # an instance that is called has none
    return f"{value.__module__}:{name}" if callable(value) else value and str(value)


# ----------------------------------------------------------------------------------- reading values
def convert(value, option, source):
    """Return the checked value of an option. Text is parsed first.

    Raises UserError, whose message `source` opens: "--seed -1: must be at least 0".
    """
    if value is None and option.optional:
        return None
    shown = "null" if value is None else beginning(str(value), 80)
    source = f"{source} {shown or repr('')}"
    if isinstance(value, str):
        value = _parse_text(value, option.kind)
    numbers = (int, float) if option.kind is float else option.kind
    if not isinstance(value, numbers) or isinstance(value, bool) != (option.kind is bool):
        raise UserError(f"{source}: not {KINDS[option.kind]}")
    if not str(value).strip() and value != option.default:
        raise UserError(f"{source}: is empty; give a value, or leave it out")
    # Of NaN every comparison is false.
    if option.kind in LARGEST and not abs(value) <= LARGEST[option.kind]:
        raise UserError(f"{source}: not a finite number of at most {LARGEST[option.kind]}")
    if option.choices and value not in option.choices:
        raise UserError(f"{source}: must be one of {', '.join(option.choices)}")
    for name, words, holds in BOUNDS:
        bound = getattr(option, name)
        if bound is not None and not holds(value, bound):
            raise UserError(f"{source}: must be {words} {bound}")
    return value


def code_flags(values):
    """Return the flags that name or permit code, which --config does not give."""
    words = ["--unsafe_code"] if values.get("unsafe_code") else []
    for name in CODE:
        if ":" in str(values.get(name)):
            words += [f"--{name}", values[name]]
    return words


def _parse_text(text, kind):
    """Return the value that a text of the command line or of a YAML file means, or None."""
    if kind is str:
        return text
    if kind is bool:
        return {"true": True, "false": False}.get(text.lower())
    # int() and float() also read "1_0", "nan" and digits of other scripts.
    if re.fullmatch("[-+.0-9eE]+", text):
        with suppress(ValueError):
            return kind(text)


def nearest(name, known, prefix="", otherwise="--help lists them"):
    """Return a phrase that proposes the known name which is spelled most like this one."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.65)
    return f"did you mean {prefix}{close[0]}?" if close else otherwise


def check_accumulation(config, sequences: int):
    """Raise UserError if a step of so many sequences needs other forward passes."""
    steps, size = config.gradient_accumulation_steps, config.batch_size
    if steps and steps * size != sequences:
        raise UserError(f"a step has {sequences} sequences, but batch_size {size} x "
                        f"gradient_accumulation_steps {steps} = {steps * size}")
