"""How reward functions that were written for TRL are called."""
import inspect
from types import SimpleNamespace

from envs.calls import accepts, needed
from core.config import say_once


def turns_of(t) -> list[int]:
    """Return where in an episode's messages its turns are. Before them a "prompt" may have some."""
    places = [i for i, message in enumerate(t.messages) if message["role"] == "assistant"]
    return places[-len(t.rewards):]


def takes_all(function) -> bool:
    """True for a function of ours that gets all episodes at once, in an argument `episodes`."""
    return "episodes" in inspect.signature(function).parameters


def is_of_trl(function) -> bool:
    """True for a function that is to be called as TRL calls it, with names and for all episodes."""
    return accepts(function, "completions")


def as_trl(episodes: list, name: str, function) -> dict:
    """Return the arguments that TRL 1.16 calls a reward function with (`_calculate_rewards`).

    Its name is that of --rewards: an instance that can be called has none of its own.

    Prompts and completions are messages, or text where the task's column "prompt" is text. A
    column that the function asks for and these tasks leave empty is None for each.
    """
    from envs.prompts import trl_message  # an environment, which rewards alone do not need
    trajectories = [e.trajectory for e in episodes]
    # The column "env" of a task has chosen among several environments.
    tasks = [{"env": t.info.get("env"), **t.info["task"]} for t in trajectories]
    prompts, completions = [], []
    for t, task in zip(trajectories, tasks):
        turns = turns_of(t)
        if isinstance(task.get("prompt"), str):
            prompts.append(task["prompt"])
            completions.append("\n".join(t.messages[turn]["content"] for turn in turns))
        else:
            prompts.append(t.messages[:turns[0]])
            completions.append(list(map(trl_message, t.messages[turns[0]:])))

    def log_metric(name, value):
        for t in trajectories:
            t.reward_parts[name] = float(value)

    def log_extra(column, values):
        for t, value in zip(trajectories, values):
            # What an episode's info says already, such as "success", stays.
            t.info.setdefault(column, str(value))

    # A group's id begins with the step.
    state = SimpleNamespace(global_step=int(trajectories[0].group_id.rpartition("-")[0]))
    given = {"prompts": prompts, "completions": completions,
             "completion_ids": [t.token_ids[t.loss_mask.index(1):] for t in trajectories],
             "environments": [e.session.env for e in episodes], "trainer_state": state,
             "log_metric": log_metric, "log_extra": log_extra}
    columns = set().union(*tasks)
    wanted = set(needed(function)).difference(given)
    for column in sorted(wanted - columns):
        say_once(f"note: --rewards {name}: no task of this step has a column {column!r}, so it "
                 f"gets None; columns: {', '.join(sorted(columns))}")
    names = (columns | wanted) - {"prompt", "completion"}
    for column in names:
        given.setdefault(column, [task.get(column) for task in tasks])
    return given
