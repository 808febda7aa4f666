"""Worlds: the contract, the list of them, and their tasks (files of tasks: rows.py).

A world is the class that TRL's `environment_factory` takes: no constructor arguments; `reset(**task) -> str | None`
(the first user message); every other public method with type hints and a Google-style docstring is a tool;
`get_reward() -> float` is the episode's total. All else is optional and invisible to TRL:

    system_prompt, max_turns    attributes
    done                        set it True and the episode ends
    reward                      running total written by tools; its change in a turn is that turn's reward
    _tasks(split, n, seed)      static: task rows for split "train" or "test"
    _row(row)                   static: checks or converts one row of a task file, ValueError if it cannot
    _reply(text)                the model answered without a tool: a user message to go on with, or None to end
    _expert()                   a scripted demonstrator: the next turn's calls [{"name", "arguments"}] or its text,
                                [] when finished
    _check()                    true success, apart from the shaped reward
    _reward_parts               name -> float
    limits                      recommended lengths, such as {"max_new_tokens": 512, "max_tokens": 2048}; also
                                "tool_timeout", the seconds a call may take

Several worlds in one run: `--env equations,gsm8k`. Your own: `--env path/to/file.py:ClassName`.
"""
import asyncio
import difflib
import importlib
import importlib.util
import inspect
import json
import os
import sys
import types
import typing
import zlib
from dataclasses import dataclass, field

from experiment.data import read_rows, whole
from experiment.run import UserError, mix

ENVS = {"equations": "envs.equations:Equations", "equations_hard": "envs.equations:EquationsHard",
        "gsm8k": "envs.gsm8k:GSM8K", "meetings": "envs.meetings:Meetings",
        "meetings_shaped": "envs.meetings:MeetingsShaped"}

LIMITS = {"max_new_tokens": 256, "max_tokens": 2048, "tool_timeout": 10.0}  # where an environment states none


def names_of(env_names) -> list[str]:
    """Return the names in "equations, gsm8k". A list of names is returned as it is."""
    if not isinstance(env_names, str):
        return list(env_names)
    return [name.strip() for name in env_names.split(",")]


def limits(env_names) -> dict:
    """Return the lengths and the time-out that the environments recommend, of several the largest.

    Args:
        env_names: one name, several separated by commas, or a list of names.
    """
    stated = [{**LIMITS, **getattr(load(name), "limits", {})} for name in names_of(env_names)]
    return {key: max(row[key] for row in stated) for key in LIMITS}


def lengths(env_names) -> dict:
    """Return the max_new_tokens and max_tokens that the environments recommend."""
    return {name: value for name, value in limits(env_names).items() if name != "tool_timeout"}


def options(text: str | None) -> dict:
    """Return what --env_options says: "num_turns=3,shaped=true" becomes {"num_turns": 3, "shaped": True}."""
    out = {}
    for item in (text or "").split(","):
        if not item.strip():
            continue
        name, equals, value = item.partition("=")
        if not equals or not name.strip().isidentifier():
            raise UserError(f"--env_options {item.strip()!r}: write name=value,name=value")
        try:
            scalar = json.loads(value)
        except ValueError:
            scalar = value.strip()
        out[name.strip()] = value.strip() if isinstance(scalar, (dict, list)) else scalar
    return out


def load(name: str) -> type:
    """The class of a world: a name of ENVS, `package.module:Class` or `path/to/file.py:Class`. UserError if none."""
    target = ENVS.get(name, name)
    if ":" not in target:
        near = difflib.get_close_matches(name, ENVS, 1)
        raise UserError(f"unknown world {name!r}; " + (f"did you mean {near[0]}?" if near else
                         f"known: {', '.join(ENVS)}, or give path/to/file.py:ClassName"))
    place, class_name = target.rsplit(":", 1)
    try:
        if place.endswith(".py"):
            key = f"world:{os.path.abspath(place)}"
            if not (module := sys.modules.get(key)):  # once a process: every call gives the same class
                spec = importlib.util.spec_from_file_location(key, place)
                module = sys.modules[key] = importlib.util.module_from_spec(spec)  # dataclasses look it up there
                try:
                    spec.loader.exec_module(module)
                except BaseException:
                    del sys.modules[key]
                    raise
        else:
            module = importlib.import_module(place)
    except (OSError, ImportError, SyntaxError, SystemExit) as error:
        what = f"it calls sys.exit({error})" if isinstance(error, SystemExit) else error
        raise UserError(f"world {name!r}: {what}") from None
    if not inspect.isclass(getattr(module, class_name, None)):
        raise UserError(f"world {name!r}: {place} has no class {class_name}")
    cls = getattr(module, class_name)
    for method in ("reset", "get_reward"):
        if not callable(getattr(cls, method, None)):
            raise UserError(f"world {name!r}: {class_name} has no {method}(); see envs/template.py")
    try:
        inspect.signature(cls).bind()
    except TypeError as error:
        raise UserError(f"world {name!r}: {class_name}() must need no argument ({error})") from None
    except ValueError:
        pass  # a signature that cannot be read
    return cls


def tools(env) -> dict:
    """Public methods of the class, by name, bound to `env` (an instance or the class): what the model may call."""
    cls = env if inspect.isclass(env) else type(env)
    return {name: getattr(env, name) for name, _ in inspect.getmembers(cls, inspect.isfunction)
            if not name.startswith("_") and name not in ("reset", "get_reward")}


def schemas(env) -> list[dict]:
    """JSON schemas of the tools, read off signatures and docstrings. UserError names the method that lacks either."""
    from transformers.utils import get_json_schema
    out = []
    for name, method in tools(env).items():
        try:
            out.append(get_json_schema(method))
        except Exception as error:  # transformers raises DocstringParsingException and TypeHintParsingException
            raise UserError(f"tool {name}: {str(error).strip().splitlines()[0]}") from None
    return out


def _fit(value, hint):
    """`value` as the type `hint`, or TypeError. Only conversions that lose nothing: 7 -> "7", 7 -> 7.0, 7.0 -> 7."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _fit(value, args[0])
    if hint is inspect.Parameter.empty or hint is typing.Any:
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        exact = [a for a in args if (typing.get_origin(a) or a) is type(value)]
        for option in exact + list(args):
            try:
                return _fit(value, option)
            except TypeError:
                pass
    elif origin is typing.Literal:
        if value in args:
            return value
    elif (kind := origin or hint) is float and type(value) in (int, float):
        return float(value)
    elif kind is int and type(value) is float and value.is_integer():
        return int(value)
    elif kind is str and type(value) in (int, float):
        return str(value)
    elif isinstance(kind, type) and isinstance(value, kind) and (kind is bool or type(value) is not bool):
        return value
    raise TypeError


BY_ARGUMENTS = ValueError, TypeError, LookupError, ArithmeticError  # what a tool raises over what it was given


def call(env, name: str, arguments: dict, loop=None, faults: list | None = None):
    """Run one tool call the model asked for -> (text for the model, error: bool). Never raises.

    An async tool is awaited in the event loop `loop`, which runs in another thread, or in one of its own.

    Unknown tools, arguments that do not fit the signature and exceptions inside the tool are answers to the model.
    Exceptions that its arguments do not explain (no network, a typo in the tool) are appended to `faults` too.
    """
    method = tools(env).get(name)
    if method is None:
        return f"error: no tool {name!r}; tools: {', '.join(tools(env))}", True
    if getattr(env, "done", False):  # the calls of one turn run one after another: none after the one that ended it
        return "error: the episode is over", True
    try:
        hints, signature = typing.get_type_hints(method), inspect.signature(method)
        unknown = [key for key in arguments if key not in signature.parameters]
        missing = [key for key, p in signature.parameters.items() if p.default is p.empty and key not in arguments]
        if unknown or missing:
            wrong = f"unknown argument {unknown[0]!r}" if unknown else f"missing argument {missing[0]!r}"
            return f"error: {name}: {wrong}; takes: {', '.join(signature.parameters)}", True
        fitted = {}
        for key, value in arguments.items():
            try:
                fitted[key] = _fit(value, hints.get(key, inspect.Parameter.empty))
            except TypeError:
                hint = hints[key]
                want = hint.__name__ if inspect.isclass(hint) else str(hint).replace("typing.", "")
                return f"error: {name}: {key} must be {want}, not {json.dumps(value)[:60]}", True
        result = method(**fitted)
        if inspect.isawaitable(result):
            waiting = _wait(result)
            result = asyncio.run_coroutine_threadsafe(waiting, loop).result() if loop else asyncio.run(waiting)
        return whole(str(result)), False
    except (Exception, SystemExit, asyncio.CancelledError) as error:  # the tool's fault is an observation too
        if faults is not None and not isinstance(error, BY_ARGUMENTS):
            faults.append(f"{name} raised {type(error).__name__}")
        try:
            return whole(f"error: {type(error).__name__}: {error}"[:300]), True
        except Exception:
            return f"error: {type(error).__name__}", True


async def _wait(result):
    try:
        return await result
    except SystemExit as error:  # it would end the loop that all async tools share
        raise RuntimeError(f"SystemExit: {error}") from None


@dataclass
class StepResult:
    """One Gymnasium-style step: `observation` text, `reward` of this step, `done`, `info` (error flag, success)."""
    observation: str
    reward: float
    done: bool
    info: dict = field(default_factory=dict)


def step(env, name: str, arguments: dict) -> StepResult:
    """Gymnasium's reading of a tool call. `reward` is the change of the running total `env.reward`."""
    before = getattr(env, "reward", 0.0)
    observation, error = call(env, name, arguments)
    done = bool(getattr(env, "done", False))
    info = {"error": error, **({"success": bool(env._check())} if hasattr(env, "_check") else {})}
    return StepResult(observation, getattr(env, "reward", 0.0) - before, done, info)


def valid_actions(env) -> list[str]:
    """Names of the tools that may be called now: none once the episode is done."""
    return [] if getattr(env, "done", False) else list(tools(env))


# ---------------------------------------------------------------------------------------------------------- task rows
def is_task(env: str, row: dict) -> bool:
    """Whether a world takes the row for a task: its `_row` does, and all that its `reset` needs is there."""
    if "," in env:
        return False
    cls = load(env)
    try:
        row = cls._row(row) if hasattr(cls, "_row") else row
    except ValueError:
        return False
    return bool(_needed(cls)) and row.keys() >= {*_needed(cls)}


def _needed(cls) -> list[str]:
    """The arguments without which a world does not `reset`."""
    return [key for key, p in inspect.signature(cls.reset).parameters.items()
            if key != "self" and p.default is p.empty and p.kind is not p.VAR_KEYWORD]


def tasks(name: str, split: str, n: int | None, seed: int, dataset: str | None = None,
          eval_dataset: str | None = None, env_options: str | None = None) -> list[dict]:
    """Return task rows as `_rows` does, each with what --env_options adds to the arguments of `reset`."""
    extra = options(env_options)
    return [{**task, **extra} for task in _rows(name, split, n, seed, dataset, eval_dataset)]


def drop_seen(held_out: list[dict], training_tasks: list[dict]) -> list[dict]:
    """Return the held-out tasks that are no training tasks, and print how many were dropped.

    Two tasks are the same if the arguments that `reset` requires are.
    """
    def key(task, names):
        shared = names or [name for name in task if name != "env"]
        return json.dumps({name: task.get(name) for name in shared}, sort_keys=True)

    kept = []
    seen = {}
    for task in held_out:
        names = tuple(_needed(load(task["env"])))
        if names not in seen:
            seen[names] = {key(other, names) for other in training_tasks}
        if key(task, names) not in seen[names]:
            kept.append(task)
    if len(kept) < len(held_out):
        print(f"{len(held_out) - len(kept)} of {len(held_out)} held-out tasks are also in the training data: dropped")
    return kept


def train_and_held_out(config) -> tuple[list[dict], list[dict]]:
    """Return the training tasks and the held-out tasks of a config; no task is in both."""
    files = config.dataset, config.eval_dataset, config.env_options
    train = tasks(config.env, "train", config.max_samples, config.seed, *files)
    if not config.eval_tasks:
        return train, []
    return train, drop_seen(tasks(config.env, "test", config.eval_tasks, config.seed, *files), train)


def draw_tasks(tasks, seed: int, step: int, tasks_per_step: int, first: int, n: int) -> list[dict]:
    """Return the candidates number `first` to `first + n - 1` of a step, a function of the seed.

    The first `tasks_per_step` are the epoch's next tasks in shuffled order; more are drawn at random.
    """
    import numpy as np
    if first:
        return [tasks[mix(seed, step, k) % len(tasks)] for k in range(first, first + n)]
    epoch, place = divmod(step * tasks_per_step, len(tasks))
    order = np.random.default_rng([seed, epoch]).permutation(len(tasks))
    return [tasks[order[(place + k) % len(tasks)]] for k in range(n)]


def _rows(name, split, n, seed, dataset, eval_dataset) -> list[dict]:
    """Task rows for `split` ("train" | "test"), at most n, ordered by `seed`; train and test never share a row.

    Without `dataset` the world makes them (`_tasks`). With one, rows come from its file: test rows from `eval_dataset`,
    or, where that is not given, every tenth row by the hash of its content. Each row gets "env": the world's name; of
    several worlds ("a,b") tasks take turns.
    """
    import numpy as np
    if "," in name:
        names = [part.strip() for part in name.split(",")]
        if dataset:
            raise UserError(f"--dataset is for one world, --env names {len(names)}")
        share = None if n is None else -(-n // len(names))
        rows = zip(*(_rows(part, split, share, seed, None, None) for part in names))
        return [task for row in rows for task in row][:n]
    if eval_dataset and not dataset:
        raise UserError("--eval_dataset goes with --dataset: the tasks to train on")
    cls = load(name)
    if dataset is None or dataset == name:
        if not hasattr(cls, "_tasks"):
            raise UserError(f"world {name!r} makes no tasks of its own; give --dataset path/to/tasks.jsonl")
        if not isinstance(inspect.getattr_static(cls, "_tasks"), (staticmethod, classmethod)):
            raise UserError(f"world {name!r}: _tasks(split, n, seed) must be a @staticmethod")
        rows = cls._tasks(split, n, seed)
        if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
            raise UserError(f"world {name!r}: _tasks({split!r}, {n}, {seed}) returned {rows!r:.60}, it must be a list "
                            "of dicts, the arguments of reset()")
        return [{**task, "env": name} for task in rows]
    path = eval_dataset if split == "test" and eval_dataset else dataset
    needed, rows = _needed(cls), []
    for row in read_rows(path):
        line = row.pop("_line")
        try:
            missing = [key for key in needed if key not in row]
            if missing and not hasattr(cls, "_row"):
                raise ValueError(f'no "{missing[0]}" field; has: {", ".join(row)}')
            held_out = not eval_dataset and zlib.crc32(json.dumps(row, sort_keys=True).encode()) % 10 == 0
            row = cls._row(row) if hasattr(cls, "_row") else row
        except ValueError as error:
            raise UserError(f"{path}:{line}: {error}") from None
        if eval_dataset or held_out == (split == "test"):
            rows.append({**row, "env": name})  # a data file does not choose which code runs
    if not rows:
        raise UserError(f"{path}: too few rows to hold some out; give --eval_dataset path/to/test.jsonl")
    order = np.random.default_rng(seed).permutation(len(rows))
    return [rows[i] for i in order[:n]]
