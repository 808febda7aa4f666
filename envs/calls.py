"""The tools of an environment: their names, what they take, and one call of one of them."""
import enum
import inspect
import json
import types
import typing
from contextlib import suppress

from core.config import EnvironmentFault, UserError, first_line
from core.data import without_surrogates

SHORTEST = 40  # characters of a result that are shown in any case
# Parameters that no call in JSON can fill.
STARRED = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD


def tools(env) -> dict:
    """Return what the model may call: the public methods of an instance or a class, by name."""
    cls = env if inspect.isclass(env) else type(env)
    return {name: getattr(env, name) for name, _ in inspect.getmembers(cls, inspect.isfunction)
            if not name.startswith("_") and name not in ("reset", "get_reward")}


def schemas(env) -> list[dict]:
    """Return the JSON schemas of the tools, read from signatures and docstrings."""
    from transformers.utils import get_json_schema
    out = []
    for name, method in tools(env).items():
        try:
            for parameter in inspect.signature(method).parameters.values():
                if parameter.kind in STARRED:
                    raise TypeError(f"no call can fill {parameter}; take a list or a dict; in a "
                                    "decorator use functools.wraps")
            # An adapter may know the schema (extras/adapters/mcp_text.py).
            out.append(getattr(method, "schema", None) or get_json_schema(method))
            # A decorated method, or one that has two names, has another __name__.
            out[-1]["function"]["name"] = name
        # transformers raises DocstringParsingException and TypeHintParsingException.
        except Exception as error:
            code = inspect.unwrap(method).__code__
            raise UserError(
                f"{code.co_filename}:{code.co_firstlineno}: tool {name}: {first_line(error)}; each "
                "argument has a type of JSON (object: dict) as its hint, a line under `Args:` of a "
                "Google-style docstring; a method whose name begins with _ is no tool") from None
    return out


# From the type of a JSON value to that of a hint: conversions that lose nothing.
LOSSLESS = {(int, float), (int, str), (float, str), (list, tuple)}


def fit(value, hint):
    """Return `value` as the type `hint`, or raise TypeError or ValueError.

    Only conversions that lose nothing are made: those of LOSSLESS, 7.0 to 7, and an Enum's value to
    its member. Those of list[...] and dict[...] are made in each item.
    """
    choices = typing.get_args(hint)
    kind = typing.get_origin(hint) or hint
    if kind is typing.Any:
        return value
    if kind in (typing.Union, types.UnionType):
        # An exact match comes first.
        for choice in sorted(choices, key=lambda choice: choice is not type(value)):
            with suppress(TypeError, ValueError):
                return fit(value, choice)
    elif kind is typing.Literal:
        # For Python True is 1.
        if value in choices and type(value) in map(type, choices):
            return value
    elif isinstance(kind, enum.EnumType):
        return kind(value)
    elif kind is list and type(value) is list and choices:
        return [fit(item, *choices) for item in value]
    elif kind is dict and type(value) is dict and choices:
        return {key: fit(item, choices[1]) for key, item in value.items()}
    elif (type(value), kind) in LOSSLESS:
        return kind(value)
    elif kind is int and type(value) is float and value.is_integer():
        return int(value)
    elif isinstance(value, kind) and (kind is bool or type(value) is not bool):
        # True is an int for Python, and no number for us.
        return value
    raise TypeError


def needed(function) -> list[str]:
    """Return the arguments without which a function, or a method of a class, cannot be called."""
    return [p.name for p in inspect.signature(function).parameters.values()
            if p.name != "self" and p.default is p.empty and p.kind not in STARRED]


def accepts(function, name: str) -> bool:
    """True if a function can be called with an argument of this name."""
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


class WrongCall(ValueError):
    """The model's call cannot be made. The text tells the model why."""


def _fit_arguments(name: str, method, arguments: dict) -> dict:
    """Return the arguments as the signature wants them, or raise WrongCall."""
    parameters = inspect.signature(method).parameters
    takes = f"takes: {', '.join(parameters)}"
    for key in [*arguments, *needed(method)]:
        if key not in parameters:
            raise WrongCall(f"{name}: unknown argument {key!r}; {takes}")
        if key not in arguments:
            raise WrongCall(f"{name}: missing argument {key!r}; {takes}")
    hints = typing.get_type_hints(method)
    fitted = {}
    for key, value in arguments.items():
        hint = hints.get(key, typing.Any)
        # `unit: str = None` takes null.
        if value is None and parameters[key].default is None:
            hint = typing.Any
        try:
            fitted[key] = fit(value, hint)
        except (TypeError, ValueError):
            shown = json.dumps(value)[:60]
            raise WrongCall(f"{name}: {key} must be {hint_name(hint)}, not {shown}") from None
    return fitted


def hint_name(hint) -> str:
    """Return a type hint as the model reads it."""
    return hint.__name__ if inspect.isclass(hint) else str(hint).replace("typing.", "")


def call_tool(env, name: str, arguments: dict) -> tuple[str, BaseException | None]:
    """Run one tool call. Return the text for the model, and the exception that it reports, or None.

    Unknown tools, arguments that do not fit and what the tool raises are answers to the model. An
    EnvironmentFault is none: no model can help a server that is gone, and the run ends.
    """
    try:
        methods = tools(env)
        if name not in methods:
            raise WrongCall(f"no tool {name!r}; tools: {', '.join(methods)}")
        method = methods[name]
        if not callable(method):
            raise AttributeError(f"an attribute {name!r} hides the tool")
        # The calls of a turn run one after another; none counts after the one that ended it.
        if is_done(env):
            raise WrongCall("the episode is over")
        result = awaited(method(**_fit_arguments(name, method, arguments)))
        return without_surrogates(str(result)), None
    except WrongCall as error:
        return f"error: {error}", error
    except EnvironmentFault:
        raise
    # A tool that runs the model's code may meet its exit().
    except (Exception, SystemExit) as error:
        return f"error: {message_of(error)}", error


def is_done(env) -> bool:
    """True once the environment has ended the episode."""
    # A tool may also be called `done`, and in a class that was written for TRL it may be a list.
    done = getattr(env, "done", False)
    return not callable(done) and not isinstance(done, (list, dict, set, str)) and bool(done)


def message_of(error: BaseException) -> str:
    """Return the type and the text of an exception, at most 290 characters."""
    return without_surrogates(f"{type(error).__name__}: {error}")[:290]


def awaited(result):
    """Return the result of an async method, and any other value as it is."""
    if not inspect.iscoroutine(result):
        return result
    # Few environments have async methods.
    from envs.loop import run
    return run(result)


def shortened(texts: list[str], most: int, tokens: int, encode) -> tuple[list[str], list[int]]:
    """Return the results of a turn, each at most `most` characters long, and their token ids.

    They are shortened until `encode` makes at most `tokens` ids of them, or SHORTEST is reached.
    """
    # A token has about three characters. Numbers and Chinese have fewer.
    limit = min(most, 3 * tokens // max(len(texts), 1))
    while True:
        shown = [shorten(text, limit) for text in texts]
        ids = encode(shown)
        if len(ids) <= tokens or limit <= SHORTEST:
            return shown, ids
        limit //= 2


def shorten(text: str, limit: int) -> str:
    """Return about `limit` characters of a tool's result: its head, how much was cut, its tail."""
    limit = max(limit, SHORTEST)
    if len(text) <= limit:
        return text
    cut = f"\n[... {len(text) - limit} characters cut ...]\n"
    return text[:limit * 3 // 4] + cut + text[-limit // 4:]
