"""The command line and YAML files of options, and where an input is wrong."""
import argparse
import ast
import os
import re
import shlex
import sys
from functools import partial
from pathlib import Path

import yaml

from core.config import CODE, KINDS, ONCE, UserError, convert, options, reading

# extras/data fills it: how a list of a flag in YAML becomes text.
YAML_LISTS = {}


def parse(config_class, argv, description=""):
    """Return the config that the command line asks for. Of its --config files the last one wins."""
    flags = options(config_class)
    try:
        given, unknown = _make_parser(flags, description).parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise UserError(f"{error.argument_name}: needs a value") from None
    if unknown:
        from extras.hints.refusals import unexpected
        raise unexpected(unknown, [*_names(flags), "config", "help"], argv)
    values = {}
    for path in given.config:
        values.update(_yaml_values(path, flags))
        # A run is where its config.yaml is: its folder may have been moved.
        if "resume" in given and re.match("# .+ run", Path(path).read_text("utf-8")):
            values["output_dir"] = os.path.dirname(path) or "."
    del given.config
    code = []
    for name in CODE:
        if ":" in str(values.get(name)) and name not in given:
            code += [f"--{name}", values[name]]
    if code:
        raise UserError(f"{code[0]} {code[1]}: a config file does not choose which code runs; if "
                        f"you trust it, add {shlex.join(code)} to the command")
    for name, text in vars(given).items():
        option = flags[name]
        # None means that an auto flag was not given. There "none" is a value like others.
        is_none = option.optional and not option.auto and text.lower() in ("none", "null")
        try:
            values[name] = convert(None if is_none else text, option, f"--{name}")
        except UserError:
            from extras.hints.refusals import NOT_HERE
            if answer := NOT_HERE.get(f"{name}={text}"):
                raise UserError(f"--{name} {text}: {answer}") from None
            raise
    for name in str(values.get("env")).split(","):
        _check_file(name.strip())
    return config_class(**values)


def _make_parser(flags, description):
    """Return the argparse parser of these flags, which leaves out what is not given."""
    # Of `python -m extras.check` argparse knows the file alone.
    module = getattr(sys.modules["__main__"].__spec__, "name", "")
    program = f"-m {module}" if module.startswith("extras.") else "%(prog)s"
    parser = argparse.ArgumentParser(
        usage=f"python {program} [--config file.yaml] [--name value] [--no_switch]",
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
    names, values, unknown = _names(flags), {}, {}
    for line, key, value in read_yaml(path):
        place, name = f"{path}:{line}", names.get(key)
        if not name:
            unknown[key] = place, value
            continue
        if name in ONCE:
            raise UserError(f"{place}: {key} is given on the command line only: --{name}")
        if name in values:
            raise UserError(f"{place}: {key} is given twice")
        values[name] = convert(value, flags[name], f"{place}: {key}")
    if unknown:
        from extras.hints.refusals import refuse_names
        refuse_names(unknown, names)
    return values


def read_yaml(path):
    """Yield (line number, name, value) for each option in a YAML file.

    A value is the text as typed, or None: `yaml.safe_load` makes False of no and 8 of 010.
    """
    with reading(path):
        root = yaml.compose(Path(path).read_text("utf-8-sig"), Loader=yaml.SafeLoader)
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


def _check_file(env):
    """Raise UserError if an environment is a file without one of its classes. Nothing is run."""
    path, _, wanted = env.partition(":")
    if not (path.endswith(".py") and os.path.isfile(path)):
        return
    with reading(path):
        text = Path(path).read_text("utf-8-sig")
        classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    if wanted and re.search(rf"\b{re.escape(wanted)}\b", text):
        return
    # A class with a base may inherit its reset().
    found = [f"{path}:{node.name}" for node in classes
             if node.bases or any(getattr(item, "name", "") == "reset" for item in node.body)]
    names = " or ".join(found) or "there is none with reset() (envs/template.py is an example)"
    raise UserError(f"--env {env}: name a class of the file: {names}")
