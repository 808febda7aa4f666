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
from pathlib import Path

KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", list: "a list"}
BOUNDS = (("low", "at least", operator.ge), ("high", "at most", operator.le), ("above", "greater than", operator.gt))


class UserError(ValueError):
    """What the user can mend, in one line that says how; `main` prints it without a traceback."""


class Stop(BaseException):
    """The run ends before its end, and says why and how to go on. Not an Exception: what catches the fault of a tool or
    of a row must let it pass. code, the exit status: 3 numbers, 4 disk, 128 + signal."""

    def __init__(self, message, code):
        super().__init__(message)
        self.code = code


def flag(default, help, *, group="", choices=None, aliases=(), low=None, high=None, above=None, bare=None):
    """A Config field. `help` names the unit; low and high are inclusive bounds, above is an exclusive one; bare is what
    the option means without a value."""
    spec = dict(help=help, group=group, choices=choices, aliases=aliases, low=low, high=high, above=above, bare=bare)
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=spec)
    return dataclasses.field(default=default, metadata=spec)


def options(config_class):
    """Field name -> (int | float | bool | str | list, may it be None, the metadata that `flag` wrote)."""
    hints, found = typing.get_type_hints(config_class), {}
    for field in dataclasses.fields(config_class):
        union = typing.get_args(hints[field.name]) if isinstance(hints[field.name], types.UnionType) else ()
        kind = next((t for t in union if t is not type(None)), hints[field.name])
        found[field.name] = typing.get_origin(kind) or kind, type(None) in union, field.metadata
    return found


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


def read_yaml(path):
    """(line number, name, value) of each option in a YAML file; a value is the text as typed, None, or a list of them.

    Reads the node graph: `yaml.safe_load` makes a string of 1e-4, False of no, 8 of 010, and drops duplicate keys.
    """
    import yaml  # arrives with transformers
    try:
        root = yaml.compose(Path(path).read_bytes(), Loader=yaml.SafeLoader)
    except FileNotFoundError:
        siblings = os.listdir(Path(path).parent) if Path(path).parent.is_dir() else []
        raise UserError(f"{path}: no such file{nearest(Path(path).name, siblings, '; nearest: ', '', '')}") from None
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:  # ValueError: a NUL in the path
        line = f":{error.problem_mark.line + 1}" if getattr(error, "problem_mark", None) else ""
        reason = getattr(error, "strerror", None) or getattr(error, "problem", None) or error
        raise UserError(f"{path}{line}: cannot be read as YAML: {reason}") from None

    def plain(node):
        if not isinstance(node, yaml.ScalarNode):
            raise UserError(f"{path}:{node.start_mark.line + 1}: give lines `name: value`, nothing nested")
        return None if node.tag == "tag:yaml.org,2002:null" else node.value

    if root and not isinstance(root, yaml.MappingNode):
        raise UserError(f"{path}:1: give lines `name: value`")
    for key, node in root.value if root else []:
        value = [plain(item) for item in node.value] if isinstance(node, yaml.SequenceNode) else plain(node)
        yield key.start_mark.line + 1, plain(key) or "null", value


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
        value = getattr(default, name)
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
