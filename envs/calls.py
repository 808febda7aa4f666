"""The tools of an environment: their names, what they take, and one call of one of them."""
import asyncio
import inspect
import json
import types
import typing
from dataclasses import dataclass, field

from experiment.data import whole
from experiment.errors import UserError


def tools(env) -> dict:
    """Return what the model may call: the public methods of the class, by name.

    They are bound to `env`, which is an instance or the class itself.
    """
    cls = env if inspect.isclass(env) else type(env)
    return {name: getattr(env, name) for name, _ in inspect.getmembers(cls, inspect.isfunction)
            if not name.startswith("_") and name not in ("reset", "get_reward")}


def schemas(env) -> list[dict]:
    """Return the JSON schemas of the tools, read from signatures and docstrings."""
    from transformers.utils import get_json_schema
    out = []
    for name, method in tools(env).items():
        try:
            out.append(get_json_schema(method))
        # transformers raises DocstringParsingException and TypeHintParsingException.
        except Exception as error:
            reason = str(error).strip().splitlines()[0]
            raise UserError(f"tool {name}: {reason}") from None
    return out


def _fit(value, hint):
    """Return `value` as the type `hint`, or raise TypeError.

    Only conversions that lose nothing are made: 7 to "7", 7 to 7.0, 7.0 to 7.
    """
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    kind = origin or hint
    if origin is typing.Annotated:
        return _fit(value, arguments[0])
    if hint is inspect.Parameter.empty or hint is typing.Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return _fit_one_of(value, arguments)
    if origin is typing.Literal:
        if value in arguments:
            return value
    elif kind is float and type(value) in (int, float):
        return float(value)
    elif kind is int and type(value) is float and value.is_integer():
        return int(value)
    elif kind is str and type(value) in (int, float):
        return str(value)
    elif isinstance(kind, type) and isinstance(value, kind):
        # True is an int for Python, and no number for us.
        if kind is bool or type(value) is not bool:
            return value
    raise TypeError


def _fit_one_of(value, hints):
    """Return `value` as the first of the types that it fits; an exact match comes first."""
    if value is None and type(None) in hints:
        return None
    exact = [hint for hint in hints if (typing.get_origin(hint) or hint) is type(value)]
    for hint in [*exact, *hints]:
        try:
            return _fit(value, hint)
        except TypeError:
            pass
    raise TypeError


# What a tool raises about the arguments that it was given.
BY_ARGUMENTS = ValueError, TypeError, LookupError, ArithmeticError


def call(env, name: str, arguments: dict, loop=None, faults: list | None = None):
    """Run one tool call that the model asked for. Return (text for the model, error: bool).

    Unknown tools, arguments that do not fit the signature and exceptions inside the tool are
    answers to the model.

    Args:
        loop: an event loop that runs in another thread, where async tools are awaited; None: a
            loop of the call's own.
        faults: exceptions that the arguments do not explain (no network, a typo in the tool) are
            appended to it.
    """
    method = tools(env).get(name)
    if method is None:
        return f"error: no tool {name!r}; tools: {', '.join(tools(env))}", True
    # The calls of a turn run one after another; none counts after the one that ended the episode.
    if getattr(env, "done", False):
        return "error: the episode is over", True
    try:
        fitted, wrong = _fit_arguments(method, arguments)
        if wrong:
            return f"error: {name}: {wrong}", True
        result = method(**fitted)
        if inspect.isawaitable(result):
            awaited = _wait(result)
            if loop:
                result = asyncio.run_coroutine_threadsafe(awaited, loop).result()
            else:
                result = asyncio.run(awaited)
        return whole(str(result)), False
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        if faults is not None and not isinstance(error, BY_ARGUMENTS):
            faults.append(f"{name} raised {type(error).__name__}")
        return _error_text(error), True


def _fit_arguments(method, arguments: dict) -> tuple[dict, str | None]:
    """Return the arguments as the signature wants them, and what is wrong with them or None."""
    parameters = inspect.signature(method).parameters
    hints = typing.get_type_hints(method)
    takes = f"takes: {', '.join(parameters)}"
    for key in arguments:
        if key not in parameters:
            return {}, f"unknown argument {key!r}; {takes}"
    for key, parameter in parameters.items():
        if parameter.default is parameter.empty and key not in arguments:
            return {}, f"missing argument {key!r}; {takes}"
    fitted = {}
    for key, value in arguments.items():
        hint = hints.get(key, inspect.Parameter.empty)
        try:
            fitted[key] = _fit(value, hint)
        except TypeError:
            want = hint.__name__ if inspect.isclass(hint) else str(hint).replace("typing.", "")
            return {}, f"{key} must be {want}, not {json.dumps(value)[:60]}"
    return fitted, None


def _error_text(error) -> str:
    try:
        return whole(f"error: {type(error).__name__}: {error}"[:300])
    except Exception:
        return f"error: {type(error).__name__}"


async def _wait(result):
    try:
        return await result
    except SystemExit as error:
        # It would end the loop that all async tools share.
        raise RuntimeError(f"SystemExit: {error}") from None


@dataclass
class StepResult:
    """One step as Gymnasium reads it. `info` holds the error flag, and success if it is known."""

    observation: str
    reward: float
    done: bool
    info: dict = field(default_factory=dict)


def step(env, name: str, arguments: dict) -> StepResult:
    """Call a tool. The reward is the change of the running total `env.reward`."""
    before = getattr(env, "reward", 0.0)
    observation, error = call(env, name, arguments)
    info = {"error": error}
    if hasattr(env, "_check"):
        info["success"] = bool(env._check())
    reward = getattr(env, "reward", 0.0) - before
    return StepResult(observation, reward, bool(getattr(env, "done", False)), info)


def valid_actions(env) -> list[str]:
    """Return the names of the tools that may be called now: none once the episode is done."""
    return [] if getattr(env, "done", False) else list(tools(env))


def shorten(text: str, limit: int) -> str:
    """Return about `limit` characters of a tool's result: its head, how much was cut, its tail."""
    limit = min(max(limit, 40), 4000)
    if len(text) <= limit:
        return text
    cut = f"\n[... {len(text) - limit} characters cut ...]\n"
    return text[:limit * 3 // 4] + cut + text[-limit // 4:]
