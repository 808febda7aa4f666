"""Configs are dataclasses of flags: `seed: int = flag(0, "seed of everything random", low=0)`.

Defaults < `--config file.yaml` < command line. Of a flag given twice the last one wins.
"""
import argparse
import dataclasses
import difflib
import hashlib
import inspect
import os
import re
import sys
import typing
from collections import ChainMap
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache, singledispatch
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

from tqdm import tqdm

ONCE = ("overwrite", "resume", "unsafe_code")  # permissions for one call, which no file gives
DEVICES = ("cuda", "mps", "cpu")
CODE = ("env", "rewards")  # may name files of code, which a config file does not choose
KINDS = {int: ("N", "a whole number"), float: ("X", "a number"), str: ("TEXT", "text"),
         bool: ("false", "true or false")}
# A float32 holds no larger number, and a tensor of int32 no larger count.
LARGEST = {int: 2**31 - 1, float: 3.4e38}
# Optional layers fill these: {flag: properties that are other ones}, functions that `fill` calls
# with a config, contexts around a program, and classes of bars, of which the last one is shown.
CHANGED, FILLED, AROUND, BARS = {}, [], [], [tqdm]
# tqdm's `disable`: None hides a bar where stderr is no terminal. Of several ranks the first shows.
NO_BAR = os.environ.get("RANK", "0") != "0" or None
say = tqdm.write  # above the bars that are shown
say_once = cache(say)
# Control characters but newline and tab, marks that reverse writing, and lone surrogates.
UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


@contextmanager
def episode_bar(agents, limits, run=None, engine=None):
    """Yield a function that a rollout calls after every decode step: extras/show draws a bar."""
    yield lambda: None


def progress(items, what, total=None):
    """Return the items of a pass. How many are done is shown, if it takes more than a moment."""
    return BARS[-1](items, what, total, disable=NO_BAR, leave=False, delay=2)


def mix(*numbers_and_texts):
    """Return a 63-bit seed that is the same on every machine, of plain numbers and texts."""
    digest = hashlib.sha256(repr(numbers_and_texts).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


# ------------------------------------------------------------------------------------------ errors
def printable(text: str) -> str:
    """Return the text with control characters spelled out: a terminal obeys escape sequences."""
    return UNPRINTABLE.sub(lambda match: repr(match[0])[1:-1], text.replace("\r\n", "\n"))


def first_line(error) -> str:
    """Return the first line of an exception's message, at most 200 characters of it."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


class Printable(BaseException):
    """An exception that `main` shows in one line. `code` is the exit status."""

    def __str__(self):
        return printable(str(self.args[0]))


class UserError(Printable, ValueError):
    """What the user can fix; the message says how."""

    code = 2


class EnvironmentFault(Printable, RuntimeError):
    """The code of an environment raised, did not return, or broke the contract."""

    code = 6


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
        raise UserError(f"{place}: {reason(error, path)}") from error


@singledispatch
def reason(error, path) -> str:
    """Return what is wrong with a file. extras/hints registers words for some exceptions."""
    if type(error) is ValueError:
        return first_line(error)
    return f"cannot be read ({type(error).__name__}: {first_line(error)})"


# ---------------------------------------------------------------------------------- declaring flags
def flag(default, help="", /, **properties):
    """Declare a field of a Config. A class that declares it again states only what differs.

    The properties are choices, `more` (words about others), aliases, optional (it may be None), and
    bounds of a number: low, high, and above (exclusive).
    """
    if help:
        properties["help"] = help
    return dataclasses.field(default=default, metadata=properties)


def auto(default, help="", **properties):
    """Declare a field that `fill` sets. A `default` may be a function, whose docstring is shown."""
    return flag(None, help, default=default, auto=True, **properties)


def fill(config, *tables):
    """Return a copy of the config. Its unset `auto` fields are those of a table or the default."""
    config = dataclasses.replace(config)
    for name, option in options(type(config)).items():
        if option.auto and getattr(config, name) is None:
            value = ChainMap(*tables).get(name, option.default)
            setattr(config, name, value(config) if callable(value) else value)
    for finish in FILLED:
        finish(config)
    return config


def options(config_class):
    """Return {field: its properties, default, kind, optional (may be None), auto and group}."""
    hints, flags = typing.get_type_hints(config_class), {}
    for c in reversed(config_class.__mro__):
        new = {}
        for name in inspect.get_annotations(c):
            field = c.__dataclass_fields__[name]
            kind, *none = typing.get_args(hints[name]) or [hints[name]]  # of type, or type | None
            largest = LARGEST.get(kind)
            option = {"kind": kind, "optional": bool(none), "group": getattr(c, "heading", ""),
                      "help": "", "choices": (), "more": "", "aliases": (), "above": None,
                      "low": largest and -largest, "high": largest}
            option |= vars(flags.get(name, SimpleNamespace()))
            option |= {"default": field.default, "auto": False, **field.metadata}
            option |= CHANGED.get(name, {})
            (flags if name in flags else new)[name] = SimpleNamespace(**option)
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


def policy_learning_rate(config):
    """2e-4 with LoRA (measured: bench/learning_rates.py), 1e-6 where all weights train"""
    return 2e-4 if config.lora_r else 1e-6


def imitation_learning_rate(config):
    """1e-4 with LoRA, 1e-5 where all weights train"""
    return 1e-4 if config.lora_r else 1e-5


def more_rows(*tables, **functions):
    """Add nothing to the tables of grpo.py: extras/zoo does."""


@dataclass(kw_only=True)
class LayerFlags:
    """The flags of optional layers: here none. Every Config inherits the class of layers.py."""


@dataclass(kw_only=True)
class ModelFlags:
    heading = "model"
    model_path: str = flag("tiny", "tiny (its defaults are TINY in the program), a hub id, or the "
                                    "folder of a model, an adapter or a run")
    lora_r: int = flag(16, "rank of LoRA; 0: all weights train", low=0)
    lora_alpha: float | None = flag(None, "LoRA alpha; default: twice the rank", above=0)
    lora_dropout: float = flag(0.0, "dropout on the input of the adapter, in updates only",
                               low=0, high=0.99)
    lora_target_modules: str = flag("all-linear", "names of adapted Linears, separated by commas")
    dtype: str | None = auto("float32", "dtype of the frozen weights; auto: as they are stored",
                             choices=("float32", "bfloat16", "float16", "auto"))
    device: str | None = flag(None, "default: cuda, else mps (a Mac's), else cpu", choices=DEVICES)


@dataclass(kw_only=True)
class TrainingFlags:
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
    heading = "run"
    output_dir: str = flag("runs/run", "folder of this run")
    overwrite: bool = flag(False, "rename the run that is in output_dir")
    resume: bool = flag(False, "continue the run in output_dir from its newest checkpoint")
    seed: int = flag(0, "seed of everything random", low=0)
    save_every: int = flag(
        0, "steps between checkpoints, of which the last two stay; 0: after 10 minutes of training "
        "each, and at the end", low=0)
    eval_tasks: int = flag(
        200, "held-out tasks played before, after and every eval_every steps; 0: none", low=0)
    eval_every: int = flag(0, "steps between evaluations; 0: before and after only", low=0)

    def __post_init__(self):
        """Let Python code give paths and classes, and YAML name the home folder ~."""
        for name, value in vars(self).items():
            if isinstance(value, str | os.PathLike):
                setattr(self, name, os.path.expanduser(value))
            elif name in CODE and not isinstance(value, dict):
                setattr(self, name, named(value))


def named(value):
    """Return "module:name" of a class or function, text as it is, and those of a list joined."""
    if isinstance(value, list):
        return ",".join(map(named, value))
    name = getattr(value, "__qualname__", value)  # an instance that is called has none
    return f"{value.__module__}:{name}" if callable(value) else value and str(value)


# ------------------------------------------------------------------ the command line and YAML files
def convert(value, option, source):
    """Return the checked value of an option. Text is parsed first.

    Raises UserError, whose message `source` opens: "--seed -1: must be at least 0".
    """
    if value is None and option.optional:
        return None
    kind, shown = option.kind, "null" if value is None else f"{value!s:.80}"
    source = f"{source} {shown or repr('')}"
    if isinstance(value, str) and kind is bool:
        value = {"true": True, "false": False}.get(value.lower())
    # int() and float() also read "1_0", "nan" and digits of other scripts.
    elif isinstance(value, str) and kind is not str and re.fullmatch("[-+.0-9eE]+", value):
        with suppress(ValueError):
            value = kind(value)
    numbers = (int, float) if kind is float else kind
    if not isinstance(value, numbers) or isinstance(value, bool) != (kind is bool):
        raise UserError(f"{source}: not {KINDS[kind][1]}")
    if not str(value).strip() and value != option.default:
        raise UserError(f"{source}: is empty; give a value, or leave it out")
    if option.choices and value not in option.choices:
        raise UserError(f"{source}: must be one of {', '.join(option.choices)}{option.more}")
    # Of NaN every comparison is false.
    if option.above is not None and not value > option.above:
        raise UserError(f"{source}: must be greater than {option.above}")
    if option.low is not None and not value >= option.low:
        raise UserError(f"{source}: must be at least {option.low}")
    if option.high is not None and not value <= option.high:
        raise UserError(f"{source}: must be at most {option.high}")
    return value


def read_yaml(path) -> dict:
    """Return {name: value} of a flat YAML file. A value is the text as typed, or None for null."""
    import yaml
    with reading(path):
        # yaml.safe_load would make False of no and 8 of 010.
        values = yaml.load(Path(path).read_text("utf-8-sig"), Loader=yaml.BaseLoader) or {}
        if not all(isinstance(value, str) for value in values.values()):
            raise ValueError("give lines `name: value`, nothing nested")
    return {name: None if value in ("null", "~") else value for name, value in values.items()}


def parse(config_class, argv, description=""):
    """Return the config that the command line and its --config files ask for. Raises UserError.

    extras/hints has another one, which says more about itself and about what it refuses.
    """
    flags = options(config_class)
    parser = argparse.ArgumentParser(
        usage="python %(prog)s [--config FILE.yaml] [--name value]", allow_abbrev=False,
        description=(description or "").partition("\n\n")[0], argument_default=argparse.SUPPRESS)
    # Otherwise argparse takes -1e-4 for the name of an option.
    parser._negative_number_matcher = re.compile(r"-\.?\d")
    parser.add_argument("--config", metavar="FILE.yaml", action="append", default=[])
    for name, option in flags.items():
        default = option.default.__doc__ if callable(option.default) else option.default
        switch = {"nargs": "?", "const": "true"} if option.kind is bool else {}
        parser.add_argument(*(f"--{word}" for word in (name, *option.aliases)), dest=name,
                            metavar=KINDS[option.kind][0], **switch,
                            help=f"{option.help}; default: {default}".replace("%", "%%"))
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        hint = nearest(unknown[0].strip("-"), flags, prefix="--")
        raise UserError(f"unknown option {unknown[0]}; {hint}; optional layers need extras/")
    given, values = vars(given), {}
    for path in given.pop("config"):
        for name, value in read_yaml(path).items():
            if name not in flags or name in ONCE:
                raise UserError(f"{path}: {name} is no option of a file; {nearest(name, flags)}")
            if name in CODE and ":" in str(value) and name not in given:
                raise UserError(f"{path}: a config file does not choose which code runs; if you "
                                f"trust it, add --{name} {value} to the command")
            values[name] = convert(value, flags[name], f"{path}: {name}")
    for name, text in given.items():
        values[name] = convert(text, flags[name], f"--{name}")
    return config_class(**values)


def nearest(name, known, prefix="", otherwise="--help lists them"):
    """Return a phrase that proposes the known name which is spelled most like this one."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.65)
    return f"did you mean {prefix}{close[0]}?" if close else otherwise


# ---------------------------------------------------------------------------------------- a program
def check_installation():
    """Raise UserError if this version of Python or of a package is not supported."""
    if sys.version_info < (3, 11):
        raise UserError(f"this is Python {sys.version.split()[0]}; 3.11 or later is needed")
    from packaging.requirements import Requirement
    path = Path(__file__).parents[1] / "requirements.txt"
    for line in path.read_text("utf-8").splitlines() if path.exists() else ():
        needed = Requirement(line)
        with suppress(metadata.PackageNotFoundError):
            version = metadata.version(needed.name)
            if not needed.specifier.contains(version, prereleases=True):
                raise UserError(f"{needed.name} {version} is installed, and {needed} is needed; "
                                "pip install -r requirements.txt")


def main(config_class, train, doc, parse=parse):
    """Run `train` with the config of the command line.

    A Printable is printed in one line. The exit status is 0, 1 (any other exception), 2 (what the
    user can fix) or 6 (the environment is broken). Layers add 3 (three updates in a row not
    finite), 4 (the disk is full), 5 (another rank is gone) and 128 + the number of a signal.
    """
    sys.stdout.reconfigure(errors="backslashreplace", line_buffering=True)
    try:
        check_installation()
        with ExitStack() as around:
            for context in AROUND:
                around.enter_context(context())
            train(parse(config_class, sys.argv[1:], doc))
    except Printable as error:
        print(shown(error), file=sys.stderr)
        sys.exit(error.code)
    except ModuleNotFoundError as error:
        if not error.name.startswith("extras."):
            raise
        layer = "/".join(error.name.split(".")[:2])
        print(shown(f"what was asked for needs {layer}, which is not here"), file=sys.stderr)
        sys.exit(UserError.code)


def shown(error, rank=""):
    """Return the line that says what ended this program."""
    line = f"{os.path.basename(sys.argv[0])}{rank}: {' '.join(str(error).split())}"
    return "; ".join((line, *getattr(error, "__notes__", ())))


def terminal(config_class, command, agent, load_model):
    """Return the Config and the command of agent.py. extras/serve makes others of the module."""
    return config_class, command
