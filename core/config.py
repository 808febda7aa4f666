"""Configs are dataclasses of flags: `seed: int = flag(0, "seed of everything random", low=0)`.

Defaults < `--config file.yaml` < command line; of a flag given twice the last one wins, so a script
may end in $@. Here are also the flags that all algorithms share, and `main`, which programs call.
"""
import argparse
import dataclasses
import difflib
import hashlib
import inspect
import operator
import os
import re
import shlex
import sys
import typing
from collections import ChainMap
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

from tqdm import tqdm

# Other files take the errors from here, too.
from core import (EnvironmentFault, Printable, Stop, UserError, first_line, printable,  # noqa: F401
                  reading)

ONCE = ("overwrite", "resume", "unsafe_code")  # permissions for one call, which no file gives
CODE = ("env", "rewards")  # may name files of code, which a config file does not choose
KINDS = {int: ("N", "a whole number"), float: ("X", "a number"), str: ("TEXT", "text"),
         bool: ("false", "true or false")}
# A float32 holds no larger number, and a tensor of int32 no larger count.
LARGEST = {int: 2**31 - 1, float: 3.4e38}
BOUNDS = (("low", "at least", operator.ge), ("high", "at most", operator.le),
          ("above", "greater than", operator.gt))
# Lines of "flag of ours: its names in TRL, transformers, PEFT, verl and OpenRLHF", and of "layer:
# flags that need it", with the values that ask for nothing.
LINES = Path(__file__).with_name("synonyms.txt").read_text("utf-8").splitlines()
SYNONYMS = {meant: words.split() for meant, words in (line.split(": ") for line in LINES)}
# Optional layers fill these: defaults of flags (or functions of the config), their help, functions
# that `fill` calls with a config, how a list in YAML becomes text, and contexts around a program.
DEFAULTS, HELP, FILLED, YAML_LISTS, AROUND = {}, {}, [], {}, []
# tqdm's `disable`: None hides a bar where stderr is no terminal. Of several ranks the first shows.
NO_BAR = os.environ.get("RANK", "0") != "0" or None
say = tqdm.write  # above the bars that are shown
say_once = cache(say)


@contextmanager
def episode_bar(agents, limits, run=None):
    """Yield a function that a rollout calls after every decode step: extras/show draws a bar."""
    yield lambda: None


def mix(*numbers_and_texts):
    """Return a 63-bit seed that is the same on every machine, of plain numbers and texts."""
    digest = hashlib.sha256(repr(numbers_and_texts).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


# ---------------------------------------------------------------------------------- declaring flags
def flag(default, help="", /, **properties):
    """Declare a field of a Config. A class that declares it again states only what differs.

    Args:
        choices, aliases: the values that are allowed, and other names of the flag.
        low, high, above: bounds of a number, the last one exclusive.
    """
    if help:
        properties["help"] = help
    return dataclasses.field(default=default, metadata=properties)


def auto(default, help="", **properties):
    """Declare a field whose default depends on the model or the environment.

    `default` may be a function of the config, whose earlier fields `fill` has filled by then.
    --help shows its docstring.
    """
    return flag(None, help, default=default, auto=True, **properties)


def fill(config, *tables):
    """Return a copy of the config in which every `auto` field has a value.

    One that the user has not set gets the value of the first table that has it, or its default.
    """
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
    hints = typing.get_type_hints(config_class)
    flags = {}
    for c in reversed(config_class.__mro__):
        new = {}
        for name in inspect.get_annotations(c):
            field = c.__dataclass_fields__[name]
            kind, *none = typing.get_args(hints[name]) or [hints[name]]  # of type, or type | None
            known = {"kind": kind, "optional": bool(none), "group": getattr(c, "heading", ""),
                     "help": "", "choices": (), "aliases": (), "low": None, "high": None,
                     "above": None} | vars(flags.get(name, SimpleNamespace()))
            known |= {"default": field.default, "auto": False, **field.metadata}
            known["default"] = DEFAULTS.get(name, known["default"])
            known["help"] = HELP.get(name, known["help"])
            (flags if name in flags else new)[name] = SimpleNamespace(**known)
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
    """float32, but the frozen weights of LoRA in bfloat16 on a GPU that computes in it"""
    import torch
    # Before Ampere GPUs only emulate it.
    has_it = torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    return "bfloat16" if config.lora_r and has_it else "float32"


def policy_learning_rate(config):
    """2e-4 with LoRA (measured: bench/learning_rates.py), 1e-6 where all weights train"""
    return 2e-4 if config.lora_r else 1e-6


def imitation_learning_rate(config):
    """1e-4 with LoRA, 1e-5 where all weights train"""
    return 1e-4 if config.lora_r else 1e-5


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
    dtype: str | None = auto(best_dtype, "dtype of the frozen weights; auto: as they are stored",
                             choices=("float32", "bfloat16", "float16", "auto"))


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
    kind, shown = option.kind, "null" if value is None else f"{value!s:.80}"
    source = f"{source} {shown or repr('')}"
    if isinstance(value, str):
        value = _parse_text(value, kind)
    numbers = (int, float) if kind is float else kind
    if not isinstance(value, numbers) or isinstance(value, bool) != (kind is bool):
        raise UserError(f"{source}: not {KINDS[kind][1]}")
    if not str(value).strip() and value != option.default:
        raise UserError(f"{source}: is empty; give a value, or leave it out")
    # Of NaN every comparison is false.
    if kind in LARGEST and not abs(value) <= LARGEST[kind]:
        raise UserError(f"{source}: not a finite number of at most {LARGEST[kind]}")
    if option.choices and value not in option.choices:
        raise UserError(f"{source}: must be one of {', '.join(option.choices)}")
    for name, words, holds in BOUNDS:
        bound = getattr(option, name)
        if bound is not None and not holds(value, bound):
            raise UserError(f"{source}: must be {words} {bound}")
    return value


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


def read_yaml(path):
    """Yield (line number, name, value) for each option in a YAML file.

    A value is the text as typed, or None: `yaml.safe_load` makes False of no and 8 of 010.
    """
    import yaml
    with reading(path):
        try:
            root = yaml.compose(Path(path).read_text("utf-8-sig"), Loader=yaml.SafeLoader)
        except yaml.MarkedYAMLError as error:
            raise UserError(f"{path}:{error.problem_mark.line + 1}: cannot be read as YAML: "
                            f"{error.problem}") from None
    if root and root.id != "mapping":
        raise UserError(f"{path}:1: give lines `name: value`")
    for key, node in root.value if root else ():
        with reading(path, node.start_mark.line + 1):
            if node.id == "sequence" and key.value in YAML_LISTS:
                value = YAML_LISTS[key.value](node)
            elif {key.id, node.id} == {"scalar"}:
                value = None if node.tag == "tag:yaml.org,2002:null" else node.value
            else:
                raise ValueError("give lines `name: value`, nothing nested")
        yield key.start_mark.line + 1, key.value, value


def code_flags(values):
    """Return the flags that name or permit code, which --config does not give."""
    words = ["--unsafe_code"] if values.get("unsafe_code") else []
    for name in CODE:
        if ":" in str(values.get(name)):
            words += [f"--{name}", values[name]]
    return words


# --------------------------------------------------------------------------------- the command line
def parse(config_class, argv, description=""):
    """Return the config that the command line asks for. Of its --config files the last one wins."""
    flags = options(config_class)
    try:
        given, unknown = _make_parser(flags, description).parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise UserError(f"{error.argument_name}: needs a value") from None
    if unknown:
        option = unknown[0].partition("=")[0]
        if not option.startswith("--") or option == "--":
            raise UserError(f"unexpected argument {unknown[0]}; options are written --name value")
        known = [*_names(flags), "config", "help"]
        raise _unknown(option[2:].replace("-", "_"), known, prefix="--")
    values = {}
    for path in given.config:
        values.update(_yaml_values(path, flags))
        # A run is where its config.yaml is: its folder may have been moved.
        if "resume" in given and re.match("# .+ run", Path(path).read_text("utf-8")):
            values["output_dir"] = os.path.dirname(path) or "."
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


def _make_parser(flags, description):
    """Return the argparse parser of these flags, which leaves out what is not given."""
    parser = argparse.ArgumentParser(
        usage="python %(prog)s [--config file.yaml] [--name value] [--no_switch]",
        description=(description or "").strip().split("\n\n")[0],
        formatter_class=partial(argparse.RawDescriptionHelpFormatter, max_help_position=36),
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
        switch = {"nargs": "?", "const": "true"} if option.kind is bool else {}
        action = groups[option.group].add_argument(
            *spellings, dest=name, metavar=KINDS[option.kind][0], help=_help_text(option), **switch)
        action.option_strings = spellings[:1]  # --help shows the first
        if switch:
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


def _names(flags):
    """Return {name or alias: field name}."""
    names = {}
    for name, option in flags.items():
        names |= dict.fromkeys((name, *option.aliases), name)
    return names


def _yaml_values(path, flags):
    """Return {field name: checked value} of a YAML file."""
    names, values = _names(flags), {}
    for line, key, value in read_yaml(path):
        place, name = f"{path}:{line}", names.get(key)
        if not name:
            if f"{key}={value}" in chain(*SYNONYMS.values()):
                continue  # a layer's flag that asks for nothing, in a run made where the layer was
            raise _unknown(key, names, f"{place}: ")
        if name in ONCE:
            raise UserError(f"{place}: {key} is given on the command line only: --{name}")
        if name in values:
            raise UserError(f"{place}: {key} is given twice")
        values[name] = convert(value, flags[name], f"{place}: {key}")
    return values


def _unknown(name, known, place="", prefix=""):
    """Return the UserError for an unknown flag: what was meant, by meaning or else by spelling."""
    hint = nearest(name, known, prefix)
    for meant, synonyms in SYNONYMS.items():
        names = [word.partition("=")[0] for word in synonyms]
        if name in names and "/" in meant:
            return UserError(f"{place}{prefix}{name} needs {meant}, which is not here")
        if name in names and meant.split()[0] in known:
            hint = f"did you mean {prefix}{meant}?"
    return UserError(f"{place}unknown option {prefix}{name}; {hint}")


def nearest(name, known, prefix="", otherwise="--help lists them"):
    """Return a phrase that proposes the known name which is spelled most like this one."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.65)
    return f"did you mean {prefix}{close[0]}?" if close else otherwise


# ---------------------------------------------------------------------------------------- a program
def main(config_class, train, doc):
    """Run `train` with the config of the command line.

    What ends it is printed in one line. The exit status is 0, 1 (an error of ours or a library), 2
    (what the user can fix), 3 (three updates in a row not finite), 4 (the disk is full), 5 (another
    rank is gone), 6 (the environment is broken), or 128 + the number of a signal.
    """
    prepare_streams()
    try:
        with ExitStack() as around:
            for context in AROUND:
                around.enter_context(context())
            train(parse(config_class, sys.argv[1:], doc))
    except Printable as error:
        print(shown(error), file=sys.stderr)
        sys.exit(error.code)
    except BrokenPipeError:  # of `| head`
        print(shown("nobody reads the output"), file=sys.stderr)
        sys.exit(1)
    except ModuleNotFoundError as error:
        layer = "/".join(error.name.split(".")[:2])
        if not layer.startswith("extras"):
            raise
        print(shown(f"what was asked for needs {layer}, which is not here"), file=sys.stderr)
        sys.exit(UserError.code)


def shown(error, rank=""):
    """Return the line that says what ended this program."""
    line = f"{os.path.basename(sys.argv[0])}{rank}: {' '.join(str(error).split())}"
    return "; ".join((line, *getattr(error, "__notes__", ())))


def terminal(config_class, command, module):
    """Return the Config and the command of a program to talk to: extras/serve has another chat."""
    return config_class, command


def prepare_streams():
    """Let printing never fail, and the libraries draw their bars for a terminal alone."""
    sys.stdout.reconfigure(errors="backslashreplace", line_buffering=True)
    if hasattr(sys.stdin, "reconfigure"):  # that of a test has not
        sys.stdin.reconfigure(errors="replace")
    if not sys.stderr.isatty():
        for library in ("HF_HUB", "HF_DATASETS"):
            os.environ.setdefault(f"{library}_DISABLE_PROGRESS_BARS", "1")
