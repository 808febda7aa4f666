"""The command line and YAML files become a config: defaults < `--config file.yaml` < command line.

argparse does the parsing. Added here are YAML files, errors of one line, --no_x for a switch x, and
a proposal where a name is unknown. Of a flag given twice the last one wins: a script may end in $@.
"""
import argparse
import functools
import os
import re
import shlex
from pathlib import Path

from core.config import ONCE, code_flags, convert, nearest, options
from core.data import read_yaml
from core.errors import UserError
from extras.exact.output_folder import CONFIG, algorithm_of

METAVARS = {int: "N", float: "X", str: "TEXT", bool: "false"}
# A flag of ours, and the names that TRL, transformers, PEFT, verl and OpenRLHF give to it.
LINES = Path(__file__).with_name("synonyms.txt").read_text("utf-8").splitlines()
SYNONYMS = dict(line.split(": ") for line in LINES)


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
