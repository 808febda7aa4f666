"""Reading --env_options."""
import inspect
import json
import re
import typing
from contextlib import suppress

import envs
from envs.cells import read_cell
from experiment.config import nearest
from experiment.data import reading
from experiment.errors import UserError


def parse(text: str, env_names: str | None) -> dict:
    """Return "num_turns=3,tools=calculator" as {"num_turns": 3, "tools": "calculator"}.

    The names are options that the environments declare, whose values are of the type in
    `option_types` or else of the default's, or arguments of `reset`, whose values are JSON or else
    text. Raises UserError.
    """
    arguments, types = {}, {}
    for cls in map(envs.load, envs.names_of(env_names)):
        arguments.update(inspect.signature(cls.reset).parameters)
        types.update(typing.get_type_hints(cls.reset))
        types.pop("return", None)
        types.update({name: type(value) for name, value in getattr(cls, "options", {}).items()})
        types.update(getattr(cls, "option_types", {}))
    # By convention **_ is thrown away, and **kwargs is read.
    for name in ("self", "_"):
        arguments.pop(name, None)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in arguments.values())
    known = list(dict.fromkeys(["--unsafe_code", *arguments, *types]))
    options = {}
    # Not at the commas of a list: operators=["+", "-"].
    for item in filter(str.strip, re.split(r",(?![^\[({]*[\])}])", text)):
        name, equals, value = (side.strip() for side in item.partition("="))
        if not equals:
            raise UserError(f"--env_options {name!r}: write name=value,name=value")
        if name == "unsafe_code" or name not in known and not takes_any:
            hint = nearest(name, known, otherwise=f"known: {', '.join(known[1:])}")
            raise UserError(f"--env_options {name}: {env_names} has no such option; {hint}")
        options[name] = value
        if name in types:
            with reading("--env_options"):
                options[name] = read_cell(name, value, types[name])
        else:
            with suppress(ValueError):
                options[name] = json.loads(value)
    return options
