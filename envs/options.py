"""Reading --env_options."""
import inspect
import json
from contextlib import suppress

import envs
from envs.cells import read_cell
from experiment.config import nearest
from experiment.errors import UserError


def parse(text: str, env_names: str | None) -> dict:
    """Return "num_turns=3,tools=calculator" as {"num_turns": 3, "tools": "calculator"}.

    The names are options that the environments declare, whose values have the type of the default,
    or arguments of `reset`, whose values are JSON or else text. Raises UserError.
    """
    arguments, defaults, choices = {}, {}, {}
    for cls in map(envs.load, envs.names_of(env_names)):
        arguments.update(inspect.signature(cls.reset).parameters)
        defaults.update(getattr(cls, "options", {}))
        choices.update(getattr(cls, "option_choices", {}))
    # By convention **_ is thrown away, and **kwargs is read.
    arguments.pop("_", None)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in arguments.values())
    known = ["--unsafe_code", *arguments, *defaults]
    options = {}
    for item in filter(str.strip, text.split(",")):
        name, equals, value = (side.strip() for side in item.partition("="))
        if not equals:
            raise UserError(f"--env_options {name!r}: write name=value,name=value")
        if name == "unsafe_code" or name not in known and not takes_any:
            hint = nearest(name, known, otherwise=f"known: {', '.join(known[1:])}")
            raise UserError(f"--env_options {name}: {env_names} has no such option; {hint}")
        if name in defaults:
            options[name] = _declared(item, value, type(defaults[name]), choices.get(name))
        else:
            options[name] = value
            with suppress(ValueError):
                options[name] = json.loads(value)
    return options


def _declared(item: str, text: str, kind: type, choices: tuple | None):
    """Return the value of a declared option, or raise UserError."""
    try:
        value = read_cell(text, kind)
    except (TypeError, ValueError):
        raise UserError(f"--env_options {item}: cannot be read as {kind.__name__}") from None
    if choices and value not in choices:
        one_of = ", ".join(map(str, choices))
        raise UserError(f"--env_options {item}: it is one of {one_of}")
    return value
