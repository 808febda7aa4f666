"""Configs are dataclasses of flags: `seed: int = flag(0, "seed of everything random", low=0)`.

A config is read from the command line and from YAML files: defaults < `--config file.yaml` <
command line. argparse does the parsing. Added here are YAML files, errors of one line, --no_x for a
switch x, and a proposal where a name is unknown. Of a flag given twice the last one wins: a script
may end in $@. Here are also the flags that all algorithms share, as dataclass parents, the errors
that end a program with one line, and `main`, which a program calls.
"""
import argparse
import dataclasses
import difflib
import functools
import hashlib
import importlib
import inspect
import json
import operator
import os
import re
import shlex
import sys
import typing
from collections import ChainMap
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tqdm import tqdm

CONFIG = "config.yaml"  # in the folder of a run
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
TABLES = "extras.data.tables"  # a run without data files needs no reader of them
LISTS = ("dataset", "eval_dataset", "tasks")  # options that YAML may give as a list of rows
METAVARS = {int: "N", float: "X", str: "TEXT", bool: "false"}
# A flag of ours, and the names that TRL, transformers, PEFT, verl and OpenRLHF give to it.
LINES = Path(__file__).with_name("synonyms.txt").read_text("utf-8").splitlines()
SYNONYMS = dict(line.split(": ") for line in LINES)
# Control characters but newline and tab, marks that reverse writing, and lone surrogates.
UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
# tqdm's `disable`: None hides a bar where stderr is no terminal. Of several ranks the first shows.
NO_BAR = os.environ.get("RANK", "0") != "0" or None
say = tqdm.write  # above the bars that are shown
# A data set may be read once for each split, and a prompt is rendered for each episode.
say_once = cache(say)


@contextmanager
def episode_bar(agents):
    """Yield a function that a rollout calls after every decode step: extras/show draws a bar."""
    yield lambda: None


# ------------------------------------------------------------------------------------------ errors
def printable(text: str) -> str:
    r"""Return the text with control characters spelled out, the escape character as \x1b.

    Everything that data or a model wrote is printed through this function, because a terminal obeys
    escape sequences: OSC 52 overwrites the clipboard of the reader. Newlines and tabs stay.
    """
    return UNPRINTABLE.sub(lambda match: repr(match[0])[1:-1], text.replace("\r\n", "\n"))


def first_line(error) -> str:
    """Return the first line of an exception's message, at most 200 characters of it."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def beginning(text: str, limit: int) -> str:
    """Return the beginning of a text as one line of at most `limit` characters.

    It is cut at a space, but not in the first half: Chinese, Thai and paths have none.
    """
    text = " ".join(text.split())
    head = text[:limit - 5]
    return text if len(text) <= limit else head[:head.rfind(" ", limit // 2)] + " [...]"


class Printable(BaseException):
    """An exception whose first argument is its message, shown as `printable` text.

    `code` is the exit status of a program that it ends.
    """

    def __str__(self):
        return printable(str(self.args[0]))


class UserError(Printable, ValueError):
    """What the user can fix. `main` prints the message, which says how, and no traceback."""

    code = 2


class Stop(Printable):
    """Ends a run early with a message that says why and how to continue.

    It is not an Exception, so that code which catches the faults of a tool or row lets it pass.
    `code` is the exit status: 3 for numbers not finite, 4 for a full disk, 128 plus the signal's.
    """

    def __init__(self, message, code):
        super().__init__(message, code)
        self.code = code


class RankLost(Printable, RuntimeError):
    """Another process of a torchrun job has ended before the work was done."""

    code = 5


class EnvironmentFault(Printable, RuntimeError):
    """The code of an environment raised, did not return, or broke the contract.

    No model and no setting is to blame. Inside a rollout it ends one episode, and the run if it
    happens too often.
    """

    code = 6


def mix(*numbers_and_texts):
    """Return a 63-bit seed that is the same on every machine, of plain numbers and texts."""
    digest = hashlib.sha256(repr(numbers_and_texts).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


# ------------------------------------------------------------------------------------ reading files
@contextmanager
def reading(path, line=None):
    """Turn every exception inside the block into a UserError that names the file and the line.

    A check inside the block raises ValueError with its reason alone. A UserError passes unchanged.
    """
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        line = line or getattr(error, "lineno", None)
        place = f"{path}:{line}" if line else path
        raise UserError(f"{place}: {_reason(error, path)}") from error


def _reason(error, path):
    """Return what is wrong with a file, for an exception that reading it raised."""
    if isinstance(error, KeyError):
        return f"no {error} in it"
    if isinstance(error, UnicodeDecodeError):
        return f"byte 0x{error.object[error.start]:02x} is not UTF-8; save the file as UTF-8"
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error.msg} at column {error.colno}"
    if type(error) is ValueError:
        return first_line(error)
    # Of another file, such as one of the hub's cache, the error itself says which.
    if getattr(error, "strerror", None) and error.filename in (None, str(path)):
        return error.strerror
    return f"cannot be read ({type(error).__name__}: {first_line(error)})"


def lines_of(path):
    """Yield (line number, text) for every line of a UTF-8 file. Only newlines end a line."""
    with reading(path), open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            with reading(path, number):
                # Spreadsheets begin a file with a byte order mark.
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            yield number, text


def read_text(path):
    """Return the text of a UTF-8 file."""
    return "".join(text for _, text in lines_of(path))


def whole(text: str) -> str:
    """Replace lone surrogates, which no tokenizer and no UTF-8 file takes."""
    return text.encode("utf-8", "replace").decode()


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


# --------------------------------------------------------------------------------- the command line
def parse(config_class, argv, description=""):
    """Return the config that the command line and its --config files ask for.

    Of several files the later one wins. --help prints and exits with status 0. Raises UserError.
    """
    flags = options(config_class)
    parser = _make_parser(flags, description)
    try:
        given, unknown = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise UserError(f"{error.argument_name}: needs a value") from None
    if unknown:
        raise UserError(_refusal(unknown[0], flags))
    values = {}
    for path in given.config:
        values.update(_yaml_values(path, flags))
        folder, name = os.path.split(path)
        if "resume" in given and name == CONFIG and algorithm_of(folder):
            # The run is where this file is. Its folder may have been moved.
            values["output_dir"] = folder or "."
    del given.config
    code = code_flags({name: value for name, value in values.items() if name not in given})
    if code:
        raise UserError(f"{code[0]} {code[1]}: a config file does not choose which code runs; if "
                        f"you trust it, add {shlex.join(code)} to the command")
    for name, text in vars(given).items():
        option = flags[name]
        # None means that an auto flag was not given. There "none" is a value like others.
        is_none = option.optional and not option.auto and text.lower() in ("none", "null")
        values[name] = convert(None if is_none else text, option, f"--{name}")
    return config_class(**values)


def _names(flags):
    """Return {name or alias: field name}."""
    out = {}
    for name, option in flags.items():
        out.update(dict.fromkeys((name, *option.aliases), name))
    return out


def _make_parser(flags, description):
    """Return the argparse parser of these flags, which leaves out what is not given."""
    formatter = functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=36)
    parser = argparse.ArgumentParser(
        usage="python %(prog)s [--config file.yaml] [--name value] [--no_switch]",
        description=(description or "").strip().split("\n\n")[0],
        formatter_class=formatter,
        argument_default=argparse.SUPPRESS, allow_abbrev=False, exit_on_error=False)
    # Otherwise argparse takes -1e-4 for the name of an option.
    parser._negative_number_matcher = re.compile(r"-\.?\d")
    parser.add_argument("--config", metavar="FILE", action="append", default=[],
                        help="YAML file of options; the command line overrides it")
    groups = {"": parser}
    for name, option in flags.items():
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        spellings = [f"--{word}" for word in (name, *option.aliases)]
        action = groups[option.group].add_argument(
            *spellings, dest=name, metavar=METAVARS[option.kind], help=_help_text(option))
        # All spellings are parsed, and --help shows the first.
        action.option_strings = spellings[:1]
        if option.kind is bool:
            action.nargs = "?"
            action.const = "true"
            parser.add_argument(f"--no_{name}", dest=name, action="store_const", const="false",
                                help=argparse.SUPPRESS)
    return parser


def _help_text(option):
    """Return the help text of a flag: its meaning, other names, choices and default."""
    words = [option.help]
    if option.aliases:
        words.append("same as --" + ", --".join(option.aliases))
    if option.choices:
        words.append("one of " + ", ".join(option.choices))
    default = option.default.__doc__ if callable(option.default) else str(option.default)
    if option.default is not None:
        words.append(f"default: {default or repr('')}")
    return "; ".join(words).replace("%", "%%")


# --------------------------------------------------------------------------------------- YAML files
def _yaml_values(path, flags):
    """Return {field name: checked value} of a YAML file."""
    names, values = _names(flags), {}
    for line, key, value in read_yaml(path):
        name = names.get(key)
        if not name:
            raise UserError(f"{path}:{line}: unknown option {key}; {_proposal(key, names)}")
        if name in ONCE:
            raise UserError(f"{path}:{line}: {key} is given on the command line only: --{name}")
        if name in values:
            raise UserError(f"{path}:{line}: {key} is given twice")
        values[name] = convert(value, flags[name], f"{path}:{line}: {key}")
    return values


# ------------------------------------------------------------------------------------ unknown names
def _refusal(word, flags):
    """Return the message for a word of the command line that is no flag."""
    option = word.partition("=")[0]
    name = option.removeprefix("--").replace("-", "_")
    if not name or not word.startswith("--"):
        return f"unexpected argument {word}; options are written --name value"
    return f"unknown option {option}; {_proposal(name, [*_names(flags), 'config', 'help'], '--')}"


def _proposal(name, known, prefix=""):
    """Return a phrase that proposes the flag that was meant, by meaning or else by spelling."""
    for meant, synonyms in SYNONYMS.items():
        if name in synonyms.split() and meant.split()[0] in known:
            return f"did you mean {prefix}{meant}?"
    return nearest(name, known, prefix)


# --------------------------------------------------------------------------------------- YAML
def read_yaml(path):
    """Yield (line number, name, value) for each option in a YAML file.

    A value is the text as typed, None, or a list of rows as JSON. The node graph is read, because
    `yaml.safe_load` makes a string of 1e-4, False of no and 8 of 010, and drops duplicate keys.
    """
    # PyYAML arrives with transformers.
    import yaml
    with reading(path):
        try:
            root = yaml.compose(read_text(path), Loader=yaml.SafeLoader)
        except yaml.MarkedYAMLError as error:
            raise UserError(f"{path}:{error.problem_mark.line + 1}: cannot be read as YAML: "
                            f"{error.problem}") from None
    if root and not isinstance(root, yaml.MappingNode):
        raise UserError(f"{path}:1: give lines `name: value`")
    for key, node in root.value if root else ():
        with reading(path, node.start_mark.line + 1):
            name = _scalar(key) or "null"
            is_list = node.id == "sequence" and name in LISTS
            value = importlib.import_module(TABLES).rows_as_json(node) if is_list else _scalar(node)
        yield key.start_mark.line + 1, name, value


def _scalar(node):
    if not isinstance(node.value, str):
        raise ValueError("give lines `name: value`, nothing nested")
    return None if node.tag == "tag:yaml.org,2002:null" else node.value


def algorithm_of(folder):
    """Return the name of the program whose run an output folder holds, or None."""
    path = Path(folder, CONFIG)
    if not path.is_file():
        return None
    with reading(path), open(path, "rb") as file:
        match = re.match(rb"# (.+?) run(?: with --unsafe_code)?;", file.readline(100))
    return match and match[1].decode()


def config_of(folder):
    """Return {flag: its value as text} of the run in an output folder, {} if it holds none."""
    if not algorithm_of(folder):
        return {}
    return {name: value for _, name, value in read_yaml(Path(folder, CONFIG))}


# ---------------------------------------------------------------------------------------- a program
def main(config_class, train, doc):
    """Run `train` with the config of the command line, and exit.

    What ends the run is printed in one line, after what the last line of the log was. Exit status:

        0       the run is finished
        1       out of memory; or an error of ours or of a library, with its traceback
        2       something the user can fix
        3       three updates in a row that were not finite
        4       the disk is full
        5       another rank is gone
        6       the environment is broken
        128+n   signal n: 129 SIGHUP, 130 SIGINT, 143 SIGTERM
    """
    # The layer's modules import this one.
    from extras.exact.process import Signals
    prepare_streams()
    words, code = "", 0
    try:
        with Signals() as signals:
            train(parse(config_class, sys.argv[1:], doc))
    except BaseException as error:
        words, code = _explain(error, signals, hasattr(config_class, "learning_rate"))
        if words is None:
            raise
    rank = os.environ.get("RANK", "0")
    if words:
        program = os.path.basename(sys.argv[0]) + ("" if rank == "0" else f": rank {rank}")
        print(f"{program}: {words}", file=sys.stderr)
    if os.environ.get("WORLD_SIZE", "1") != "1":
        # The threads of gloo may abort an orderly end.
        sys.stdout.flush()
        os._exit(code)
    if code:
        sys.exit(code)


def terminal(command, module):
    """Return what a program does that a person talks to: in core its command, as it is.

    extras/serve overrides it for agent.py. `module` is the program's.
    """
    return command


def prepare_streams():
    """Let printing never fail, and the libraries draw their bars for a terminal alone."""
    # What the terminal cannot show is escaped, and every line is written at once, into a file too.
    sys.stdout.reconfigure(errors="backslashreplace", line_buffering=True)
    if hasattr(sys.stdin, "reconfigure"):  # that of a test has not
        sys.stdin.reconfigure(errors="replace")
    if not sys.stderr.isatty():
        for library in ("HF_HUB", "HF_DATASETS"):
            os.environ.setdefault(f"{library}_DISABLE_PROGRESS_BARS", "1")


def _explain(error, signals, trains):
    """Return (one line, exit status) for what ended a program; None if a traceback is better."""
    from extras.exact.files import is_disk_full
    from extras.exact.process import is_out_of_memory
    from extras.show.notes import path_of
    run = signals.run
    notes = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
    reason = " ".join(str(error).split())
    if isinstance(error, RankLost) and signals.signum:
        return f"stopped by {signals.name}{notes}", 128 + signals.signum
    if isinstance(error, Printable):
        return reason + notes, error.code
    if is_disk_full(error):
        then = f"; earlier checkpoints are whole; make room, then: {run.command}" if run else ""
        return f"the disk is full ({reason}){then}", 4
    if is_out_of_memory(error):
        fits = "what would fit: " + shlex.join(["python", path_of("bench/memory.py"), *sys.argv])
        if not trains:
            fits = "lower --num_tasks, --group_size or --max_tokens, or give --dtype bfloat16"
        return f"out of memory: {first_line(error)}; {fits}{notes}", 1
    if isinstance(error, BrokenPipeError):  # of `| head`
        return f"nobody reads the output{notes}", 1
    return None, 1
