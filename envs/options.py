"""Reading text as type hints want it: --env_options, and the cells of a .csv file of tasks."""
import inspect
import json
import re
import typing
from contextlib import suppress

from envs.calls import fit, hint_name, needed
from core.config import UserError, nearest, reading


def parse(text: str, env_names: str | None, classes: list) -> dict:
    """Return "num_turns=3,tools=calculator" as {"num_turns": 3, "tools": "calculator"}.

    The names are options that the classes declare, whose values are of the type in `option_types`
    or else of the default's, or arguments of `reset`, whose values are JSON or else text. Raises
    UserError.
    """
    types = {}
    takes_any = False
    for cls in classes:
        arguments = inspect.signature(cls.reset).parameters
        # By convention **_ is thrown away, and **kwargs is read.
        takes_any |= any(p.kind is p.VAR_KEYWORD and p.name != "_" for p in arguments.values())
        types = dict.fromkeys(arguments) | types | typing.get_type_hints(cls.reset)
        types |= {name: type(value) for name, value in getattr(cls, "options", {}).items()}
        types |= getattr(cls, "option_types", {})
    known = [name for name in types if name not in ("self", "_", "return")]
    options = {}
    # Not at the commas of a list: operators=["+", "-"].
    for item in filter(str.strip, re.split(r",(?![^\[({]*[\])}])", text)):
        name, equals, value = map(str.strip, item.partition("="))
        if not equals:
            raise UserError(f"--env_options {name!r}: write name=value,name=value")
        if name == "unsafe_code" or name not in known and not takes_any:
            hint = nearest(name, ["--unsafe_code", *known], otherwise=f"known: {', '.join(known)}")
            raise UserError(f"--env_options {name}: {env_names} has no such option; {hint}")
        options[name] = value
        if types.get(name):
            with reading("--env_options"):
                options[name] = read_cell(name, value, types[name])
        else:
            with suppress(ValueError):
                options[name] = json.loads(value)
    return options


def read_cells(method, row: dict) -> dict:
    """Return a row of a CSV file, whose cells are text, as the type hints of a method want it.

    An empty cell that cannot be read is left out where the argument has a default: in a table for
    several environments the columns of the others are empty. Raises ValueError.
    """
    hints = typing.get_type_hints(method)
    cells = {}
    for name, text in row.items():
        try:
            cells[name] = read_cell(name, text, hints.get(name, str))
        except ValueError:
            if text or name in needed(method):
                raise
    return cells


def read_cell(name: str, text: str, hint):
    """Return the value of a cell in the column `name`, or raise ValueError.

    A cell that its hint takes as text stays text, unless it is empty or holds a JSON list or object
    that the hint takes, too: several accepted answers, for instance. Others are read as JSON.
    """
    # Spreadsheets and pandas write True, not true.
    is_bool = text.lower() in ("true", "false")
    values = [text]
    with suppress(ValueError):
        values.append(json.loads(text.lower() if is_bool else text or "null"))
    if text[:1] in ("", "[", "{"):
        values.reverse()
    for value in values:
        with suppress(TypeError, ValueError):
            return fit(value, hint)
    raise ValueError(f"{name}: {text[:40]!r} cannot be read as {hint_name(hint)}")
