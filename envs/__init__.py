"""Environments: the contract, the list of them, and their tasks.

An environment is a class as TRL's `environment_factory` takes it: no constructor arguments;
`reset(**task) -> str | None` returns the first user message and renews all state; every other
public method with type hints and a Google-style docstring is a tool; `get_reward() -> float` is
the total of the episode. They may be async. Each call comes from another thread, never the main one
(a connection of sqlite3 needs check_same_thread=False). All else is optional and invisible to TRL:

    system_prompt, max_turns    attributes
    done                        set it to True, and the episode ends
    reward                      running total written by tools; its change is the turn's reward
    limits                      attribute of the class: recommended lengths, such as
                                {"max_new_tokens": 512, "max_tokens": 2048}, or others of
                                LIMITS
    _tasks(split, n, seed)      static: task rows of the split "train" or "test"
    _row(row)                   static: checks or converts one row of a task file, or ValueError
    _reply(text)                the model answered without a tool: a user message to continue
                                with, or None to end
    _expert()                   a scripted demonstrator: the calls of the next turn, as a list of
                                {"name", "arguments"}, or its text; [] when it has finished
    _check()                    true success, apart from the shaped reward
    _reward_parts               name -> float

`--env equations,gsm8k` plays several. `--env path/to/file.py:ClassName` plays your own.
"""
import importlib.util
import inspect
import json
import os
import sys
import traceback
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain

import numpy as np

from envs.calls import StepResult, call, schemas, step, tools, valid_actions
from envs.rows import is_held_out, need, read_as, shuffled, unseen
from experiment.config import nearest
from experiment.errors import UserError
from experiment.seeds import mix

__all__ = ["StepResult", "call", "schemas", "step", "tools", "valid_actions"]  # of envs/calls.py

ENVS = {
    "equations": "envs.equations:Equations",
    "equations_hard": "envs.equations:EquationsHard",
    "gsm8k": "envs.gsm8k:GSM8K",
    "meetings": "envs.meetings:Meetings",
}


@dataclass(frozen=True)
class Limits:
    """Budgets of an episode, which ends with the name of the one it meets as its stop_reason.

    After tool_timeout a tool call returns an error text; any other call into the environment ends
    the episode with "error". The first three are flags. An environment's `limits` may state all but
    max_turns. What it leaves out has the default below.
    """

    max_turns: int | None = None  # assistant turns; None: what the environment states, or 8
    max_new_tokens: int = 256  # sampled tokens of one turn
    max_tokens: int = 2048  # the whole episode, prompt included
    max_tool_calls: int = 32
    max_tool_tokens: int = 512  # of all tool results of the episode
    tool_timeout: float = 10.0  # seconds of one call into the environment


LIMITS = {name: value for name, value in vars(Limits()).items() if name != "max_turns"}


# ------------------------------------------------------------------------------------- loading
def names_of(env_names: str | None) -> list[str]:
    """Return the names in "equations, gsm8k", and none for None."""
    return [] if env_names is None else [name.strip() for name in env_names.split(",")]


def load(name: str) -> type:
    """Return the class of an environment.

    Args:
        name: a name of ENVS, `package.module:Class` or `path/to/file.py:Class`. It comes from the
            person who runs the program, never from data: the code behind it is run.
    """
    target = ENVS.get(name, name)
    if ":" not in target:
        known = f"known: {', '.join(ENVS)}, or give path/to/file.py:ClassName"
        raise UserError(f"unknown environment {name!r}; {nearest(name, ENVS, otherwise=known)}")
    place, class_name = target.rsplit(":", 1)
    try:
        if place.endswith(".py"):
            module = _import_file(os.path.abspath(place))
        else:
            module = importlib.import_module(place)
    except (OSError, ImportError, SyntaxError) as error:
        raise UserError(f"environment {name!r}: {error}") from None
    except (Exception, SystemExit) as error:
        line = traceback.extract_tb(error.__traceback__)[-1]
        raise UserError(f"environment {name!r}: {line.filename}:{line.lineno}: "
                        f"{type(error).__name__}: {error}") from None
    cls = getattr(module, class_name, None)
    if not inspect.isclass(cls):
        raise UserError(f"environment {name!r}: {place} has no class {class_name}")
    for method in ("reset", "get_reward"):
        if not callable(getattr(cls, method, None)):
            raise UserError(f"environment {name!r}: {class_name} has no {method}(); "
                            "see envs/template.py")
    return cls


def sources(env_names: str | None) -> list[str]:
    """Return the files that define these environments."""
    return [inspect.getsourcefile(load(name)) for name in names_of(env_names)]


@cache
def _import_file(path: str):
    """Import a file once per process. It may import its neighbours."""
    name = f"environment:{path}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up there.
    sys.modules[name] = module
    folder = os.path.dirname(path)
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(folder)
    return module


def limits(env_names: str | None) -> dict:
    """Return the limits of an episode that the environments ("a,b") recommend; {} without any.

    Of several environments the largest. LIMITS holds what one gets that states none.
    """
    largest = {}
    for name in names_of(env_names):
        stated = getattr(load(name), "limits", {})
        if not isinstance(stated, dict):
            raise UserError(f"environment {name!r}: limits is {stated!r:.60}, it must be a dict")
        for key, value in {**LIMITS, **stated}.items():
            if key not in LIMITS or not isinstance(value, int | float) or not 0 < value <= 1e9:
                raise UserError(f"environment {name!r}: limits[{key!r}] is {value!r}; it may state "
                                f"positive numbers as {', '.join(LIMITS)}")
            largest[key] = max(value, largest.get(key, value))
    return largest


def limits_of(config, env: str | None) -> Limits:
    """Return the limits that a Config names, and for the rest those that its environment states."""
    return replace(Limits(**limits(env)), max_turns=config.max_turns,
                   max_new_tokens=config.max_new_tokens, max_tokens=config.max_tokens)


def lengths(env_names: str | None) -> dict:
    """Return the max_new_tokens and max_tokens that the environments recommend; {} without any."""
    return {name: value for name, value in limits(env_names).items()
            if name in ("max_new_tokens", "max_tokens")}


def need_expert(env_names: str):
    """Raise UserError if an environment has no scripted demonstrator. The tiny model needs one."""
    for name in names_of(env_names):
        if not hasattr(load(name), "_expert"):
            raise UserError(
                f"environment {name!r} has no _expert(): nothing to learn its format from. Write "
                "one (envs/template.py has an example), give recorded episodes with "
                "--trajectories, or start from a real model: --model_path path/or/hub-id")


# --------------------------------------------------------------------------------------- tasks
def tasks(name: str | None, split: str, n: int | None, seed: int, dataset: str | None = None,
          eval_dataset: str | None = None, env_options: str | None = None) -> list[dict]:
    """Return at most n task rows in an order fixed by the seed. Each is what `reset` takes.

    There are none without an environment.

    Args:
        name: the environment. Several ("a,b") take turns.
        split: "train" or "test". The two never share a row of a file.
        dataset: a task file, or None: the environment makes the tasks (`_tasks`).
        eval_dataset: the file of the test rows, or None: every tenth row of `dataset`, by the
            hash of its content.
        env_options: "name=value,..." which every task passes to `reset` as well.

    Each row gets "env": the name of its environment.
    """
    names = names_of(name)
    if not names or n == 0:
        return []
    path = eval_dataset if split == "test" and eval_dataset else dataset
    if path and len(names) > 1:
        raise UserError(f"{path}: tasks of one environment, --env names {len(names)}")
    extra = options(env_options, names)
    share = None if n is None else -(-n // len(names))
    columns = []
    for env_name in names:
        if path and path != name:
            rows = _tasks_of_file(env_name, split, seed, path, eval_dataset)
        else:
            rows = _tasks_of_environment(env_name, split, share, seed)
        # Data never chooses which code runs: a row's own "env" is overwritten.
        columns.append([{**row, "env": env_name, **extra} for row in rows])
    return list(chain.from_iterable(zip(*columns)))[:n]


def _tasks_of_environment(name, split, n, seed) -> list[dict]:
    """Return the tasks that the environment makes itself."""
    cls = load(name)
    if not hasattr(cls, "_tasks"):
        raise UserError(f"environment {name!r} makes no tasks of its own; "
                        "give --dataset path/to/tasks.jsonl")
    if not isinstance(inspect.getattr_static(cls, "_tasks"), (staticmethod, classmethod)):
        raise UserError(f"environment {name!r}: _tasks(split, n, seed) must be a @staticmethod")
    rows = cls._tasks(split, n, seed)
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"environment {name!r}: _tasks({split!r}, {n}, {seed}) returned "
                        f"{rows!r:.60}, it must be a list of dicts, the arguments of reset()")
    try:
        json.dumps(rows)
    except (TypeError, ValueError) as error:
        raise UserError(f"environment {name!r}: _tasks: {error}; a task holds what JSON can, such "
                        "as int(n) for a number n of NumPy") from None
    return rows


def _tasks_of_file(name, split, seed, path, is_whole) -> list[dict]:
    """Return the rows of a task file, or only those of the split, in random order."""
    cls = load(name)

    def convert(row, _):
        in_split = is_whole or is_held_out(row) == (split == "test")
        # Rows of the other split are checked as well.
        return in_split, _as_task(cls, row)

    rows = [task for in_split, task in read_as(path, convert) if in_split]
    if not rows:
        raise UserError(f"{path}: too few rows to hold some out; "
                        "give --eval_dataset path/to/test.jsonl")
    return shuffled(rows, seed)


def _as_task(cls, row: dict) -> dict:
    """Return the arguments of `reset` that a row of a file holds, or raise ValueError."""
    task = cls._row(row) if hasattr(cls, "_row") else row
    need(task, *_needed(cls))
    return task


def is_task(name: str, row: dict) -> bool:
    """True if the environment takes the row for a task, and its `reset` needs anything at all."""
    if "," in name:
        return False
    cls = load(name)
    try:
        _as_task(cls, row)
    except Exception:  # `_row` is not ours
        return False
    return bool(_needed(cls))


def _needed(cls) -> list[str]:
    """Return the arguments without which the environment does not `reset`."""
    parameters = inspect.signature(cls.reset).parameters.values()
    return [p.name for p in parameters
            if p.name != "self" and p.default is p.empty
            and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]


def options(text: str | None, env_names: list[str]) -> dict:
    """Return what --env_options says: "num_turns=3,hard=true" is {"num_turns": 3, "hard": True}.

    Values are JSON; what is not is text. `reset` of one of the environments must know the names.
    """
    parameters = {}
    for env_name in env_names:
        parameters.update(inspect.signature(load(env_name).reset).parameters)
    # By convention **_ is thrown away, and **kwargs is read.
    for name in ("self", "_"):
        parameters.pop(name, None)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    out = {}
    for item in filter(str.strip, (text or "").split(",")):
        name, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not name.isidentifier():
            raise UserError(f"--env_options {item.strip()!r}: write name=value,name=value")
        if name not in parameters and not takes_any:
            otherwise = f"reset takes {', '.join(parameters)}"
            raise UserError(f"--env_options {name}: {', '.join(env_names)}: no such argument of "
                            f"reset; {nearest(name, parameters, otherwise=otherwise)}")
        try:
            out[name] = json.loads(value)
        except ValueError:
            out[name] = value
    return out


def drop_seen(held_out: list[dict], training_tasks: list[dict]) -> list[dict]:
    """Return the held-out tasks that are no training tasks, and print how many were dropped.

    Two tasks are the same if the arguments are that `reset` cannot do without; where it needs none,
    if all are that held-out tasks have. The training tasks may be those of recorded episodes
    (`info["task"]`).
    """
    needed = {key for name in {task["env"] for task in held_out} for key in _needed(load(name))}
    # A task that was played has more entries than it was given: the expert's noise.
    keys = needed or set().union(*held_out) - {"env"}

    def content(task):
        return {key: task[key] for key in task if key in keys}

    return unseen(held_out, training_tasks, content)


def tasks_of(episodes) -> list[dict]:
    """Return the tasks that episodes recorded."""
    tasks = [t.info.get("task") for t in episodes]
    return [task for task in tasks if isinstance(task, dict)]


def train_and_held_out(config, n: int) -> tuple[list[dict], list[dict]]:
    """Return n training tasks and the held-out tasks of a config; no task is in both.

    There are none without an environment, and none to train on where episodes are recorded.
    """
    files = config.dataset, config.eval_dataset, config.env_options
    if getattr(config, "trajectories", None):
        n = 0
    train = tasks(config.env, "train", n, config.seed, *files)
    held_out = tasks(config.env, "test", config.eval_tasks, config.seed, *files)
    return train, drop_seen(held_out, train)


def draw_tasks(tasks, seed: int, step: int, tasks_per_step: int, first: int, n: int) -> list[dict]:
    """Return the candidates number `first` to `first + n - 1` of a step, a function of the seed.

    The first `tasks_per_step` are the epoch's next tasks in shuffled order, and where it ends, the
    first ones of the next epoch; more are drawn at random.
    """
    if first:
        return [tasks[mix(seed, step, k) % len(tasks)] for k in range(first, first + n)]
    drawn = []
    for number in range(step * tasks_per_step, step * tasks_per_step + n):
        epoch, place = divmod(number, len(tasks))
        order = np.random.default_rng([seed, epoch]).permutation(len(tasks))
        drawn.append(tasks[order[place]])
    return drawn
