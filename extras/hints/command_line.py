"""The command line and YAML files of options: where an input is wrong, and what was meant by it."""
import argparse
import ast
import os
import re
import shlex
import sys
from functools import partial
from itertools import chain
from pathlib import Path

import yaml

from core.config import CODE, KINDS, ONCE, UserError, convert, nearest, options, reading
from extras.presence import has

LINES = Path(__file__).with_name("synonyms.txt").read_text("utf-8").splitlines()
SYNONYMS = {meant: words.split() for meant, words in (line.split(": ") for line in LINES)}
NOT_HERE = {}  # a flag of another library, or flag=value of it -> the sentence that answers it
for entry in re.split(r"\n(?! )", Path(__file__).with_name("not_here.txt").read_text("utf-8")):
    names, _, sentence = entry.partition(":")
    NOT_HERE |= dict.fromkeys(names.split(), " ".join(sentence.split()))
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
        raise _unexpected(unknown, [*_names(flags), "config", "help"], argv)
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
        if answer := NOT_HERE.get(f"{name}={text}"):
            raise UserError(f"--{name} {text}: {answer}")
        # None means that an auto flag was not given. There "none" is a value like others.
        is_none = option.optional and not option.auto and text.lower() in ("none", "null")
        values[name] = convert(None if is_none else text, option, f"--{name}")
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
            # Ignored: a layer's flag that asks for nothing, of a run made where the layer was.
            if f"{key}={value}" not in chain(*SYNONYMS.values()):
                unknown[key] = place
            continue
        if name in ONCE:
            raise UserError(f"{place}: {key} is given on the command line only: --{name}")
        if name in values:
            raise UserError(f"{place}: {key} is given twice")
        values[name] = convert(value, flags[name], f"{place}: {key}")
    if unknown:
        first, *_ = unknown.values()
        raise _unknown(list(unknown), names, f"{first}: ")
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
        text = Path(path).read_text("utf-8")
        classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    if wanted and re.search(rf"\b{re.escape(wanted)}\b", text):
        return
    # A class with a base may inherit its reset().
    found = [f"{path}:{node.name}" for node in classes
             if node.bases or any(getattr(item, "name", "") == "reset" for item in node.body)]
    names = " or ".join(found) or "there is none with reset() (envs/template.py is an example)"
    raise UserError(f"--env {env}: name a class of the file: {names}")


def _unexpected(words, known, argv):
    """Return the UserError for what no flag takes. The word after an unknown flag is its value."""
    unknown = []
    for before, word in zip(["", *words], words):
        if re.match("--.", word):
            unknown.append(word[2:].partition("=")[0].replace("-", "_"))
        elif not before.startswith("--"):
            return UserError(f"unexpected argument {word}; {_written(word, known, argv)}")
    return _unknown(unknown, known, prefix="--")


def _written(word, known, argv):
    """Return how the word should be written that no flag takes."""
    if word.endswith((".yaml", ".yml", ".toml")):
        return f"a file of options is YAML, of lines `name: value`: --config {word}"
    # Hydra's spelling: actor.path=x, +name=x.
    path, equals, value = word.partition("=")
    name = re.split("[.+]", path)[-1]
    if equals and name in known:
        return f"options are written --{name} {value}"
    place = argv.index(word)
    if place < 2 or not re.match("--.", argv[place - 2]):
        return "options are written --name value"
    option = argv[place - 2][2:].replace("-", "_")
    meant = "" if option in known else f"; --{option}: {_answer(option, known, '--')}"
    return f"several values are written a,b{meant}"


def _unknown(names, known, place="", prefix=""):
    """Return the UserError for unknown flags, which answers all of them."""
    names = dict.fromkeys(names)
    answers = {}  # flags with the same answer stand together
    for name in names:
        answers.setdefault(_answer(name, known, prefix), []).append(prefix + name)
    if len(names) > 1:
        words = "; ".join(f"{', '.join(same)} ({answer})" for answer, same in answers.items())
        return UserError(f"{place}unknown options: {words}")
    [(answer, [name])] = answers.items()
    if answer.startswith("needs "):
        return UserError(f"{place}{name} {answer}")
    return UserError(f"{place}unknown option {name}; {answer}")


def _answer(name, known, prefix):
    """Return what is said of an unknown flag: what was meant, by meaning or else by spelling."""
    name = name.removeprefix("no_")
    for meant, synonyms in SYNONYMS.items():
        layer = meant.removeprefix("extras/")
        if name not in [word.partition("=")[0] for word in synonyms]:
            continue
        if layer != meant and not (name in NOT_HERE and has(layer)):
            return f"needs {meant}, which is not here"
        if meant.split()[0] in known:
            return f"did you mean {prefix}{meant}?"
    return NOT_HERE.get(name) or nearest(name, known, prefix)
