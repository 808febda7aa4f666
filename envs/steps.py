"""An environment as Gymnasium reads it: step(env, name, arguments), or only call."""
from dataclasses import dataclass

from envs.calls import awaited, call_tool, is_done, tools


@dataclass
class StepResult:
    """One step as Gymnasium reads it. `info` holds the error flag, and success if it is known."""

    observation: str
    reward: float
    done: bool
    info: dict


def call(env, name: str, arguments: dict) -> tuple[str, bool]:
    """Run one tool call. Return (text for the model, error: bool)."""
    text, error = call_tool(env, name, arguments)
    return text, error is not None


def step(env, name: str, arguments: dict) -> StepResult:
    """Call a tool. The rewards of an episode add up to what `get_reward` returns after its end."""
    before = _paid(env)
    observation, error = call(env, name, arguments)
    info = {"error": error}
    if hasattr(env, "_check"):
        info["success"] = bool(awaited(env._check()))
    return StepResult(observation, _paid(env) - before, is_done(env), info)


def _paid(env) -> float:
    """Return the running total, which after the end is all that the episode is paid."""
    if is_done(env) and hasattr(env, "get_reward"):
        return awaited(env.get_reward())
    return getattr(env, "reward", 0.0)


def valid_actions(env) -> list[str]:
    """Return the names of the tools that may be called now: none once the episode is done."""
    return [] if is_done(env) else list(tools(env))
