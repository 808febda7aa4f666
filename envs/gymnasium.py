"""An environment as Gymnasium reads it: step(env, name, arguments), valid_actions(env)."""
from dataclasses import dataclass

from envs.calls import call, tools


@dataclass
class StepResult:
    """One step as Gymnasium reads it. `info` holds the error flag, and success if it is known."""

    observation: str
    reward: float
    done: bool
    info: dict


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
