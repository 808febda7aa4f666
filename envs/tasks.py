"""Tasks: the rows that episodes begin with, of a file or of an environment; which are held out."""
from dataclasses import dataclass
from itertools import chain, cycle, islice, zip_longest

import envs
from core.config import UserError, auto, flag, reading
from core.data import json_of, print_dropped, shuffled


# ------------------------------------------------------------------------------------------- flags
@dataclass(kw_only=True)
class EnvironmentFlags:
    heading = "environment and rollout"
    env_options: str | None = flag(
        None, "name=value,...: options of the environment, or arguments of every reset")
    fields: str | None = flag(None, "names of columns in the data: ours=theirs,ours=theirs")
    unsafe_code: bool = flag(False, "run the model's Python code with NO protection")
    rewards: str | None = flag(None, "name=weight,...: functions that pay, too (extras/rewards/"
                                     "__init__.py); also module:function, judge:RUBRIC_FILE")


@dataclass(kw_only=True)
class PlayFlags(EnvironmentFlags):
    env: str = flag("equations", "environment, or several (a,b); also path/to/file.py:Class")
    dataset: str | None = flag(
        None, "tasks (.jsonl, .json, .csv, .parquet, hub:owner/name[:config][:split]), or several: "
        "a,b or in shares a=0.7,b=0.3; default: the environment's own", aliases=("tasks",))
    eval_dataset: str | None = flag(None, "held-out tasks; default: a tenth of --dataset")
    group_size: int = flag(8, "episodes of each task", low=1,
                           aliases=("samples_per_prompt", "num_samples", "num_generations"))
    temperature: float = flag(1.0, "of the softmax, in rollout and update", above=0)
    max_new_tokens: int | None = auto(
        256, "tokens per turn, unless the environment states it", low=1)
    max_tokens: int | None = auto(
        2048, "tokens per episode with prompt and tool results, unless the environment states it",
        low=8, aliases=("max_length",))
    max_turns: int | None = flag(
        None, "assistant turns per episode; default: what the environment states", low=1)

    @property
    def tasks(self):
        """The task file. sft.py and dpo.py, whose dataset holds other rows, have a field for it."""
        return self.dataset


@dataclass(kw_only=True)
class RolloutFlags(PlayFlags):
    max_samples: int = flag(10_000, "training tasks", low=1)
    sampler: str | None = flag(
        None, "addresses of vLLM servers that sample, separated by commas; default: this process")
    reward_scaling: float = flag(1.0, "reward = (reward - reward_bias) x this")
    reward_bias: float = flag(0.0, "subtracted from the reward of each episode")


# ------------------------------------------------------------------------------------------- tasks
def load_tasks(name: str | None, split: str, n: int | None, seed: int, dataset: str | None = None,
               eval_dataset: str | None = None, env_options: dict | None = None,
               fields: str | None = None, holds_out: bool = True) -> list[dict]:
    """Return at most n tasks, in an order fixed by the seed: arguments of `reset`, and their "env".

    Args:
        name: the environment. Several ("a,b") take turns; None has no tasks.
        split: "train" or "test". The two never share a row of a file.
        dataset: task files, or None: the environment makes the tasks.
        eval_dataset: the file of the test rows, or None: those of `dataset` that
            `envs.task_files.are_held_out`, so there may be none.
        env_options: what `envs.options_of` returns. Every row gets them.
        fields: "question=problem,...", where the files have other names of columns.
        holds_out: False takes all rows of `dataset` for training.
    """
    names = envs.names_of(name)
    if not names or n == 0:
        return []
    path = eval_dataset if split == "test" and eval_dataset else dataset
    columns = []
    for env_name in names:
        cls = envs.with_options(envs.load(env_name), env_options)
        if path:
            # Most runs play the environment's own tasks.
            from envs.task_files import tasks_of_file
            rows = tasks_of_file(env_name, names, cls, split, seed, path,
                                 eval_dataset or not holds_out, fields)
        else:
            share = None if n is None else -(-n // len(names))
            rows = _tasks_of_environment(env_name, cls, split, share, seed)
        # Data chooses among the environments that the user named, and no other code.
        options = envs.taken(cls, env_options or {})
        columns.append([{**row, "env": env_name, **options} for row in rows])
    if not path:
        return _in_turns(columns, split)[:n]
    tasks = list(chain(*columns))
    if len(names) > 1:
        tasks = shuffled(tasks, seed)
    if split == "train":
        print_dropped(tasks, tasks[:n], f"tasks of {path:.200} are left out: {n} are asked for")
    return tasks[:n]


def _in_turns(columns: list[list[dict]], split: str) -> list[dict]:
    """Return the tasks of several environments in turns. Shorter training columns are repeated."""
    longest = max(map(len, columns))
    for rows in columns:
        if len(rows) < longest:
            print(f"environment {rows[0]['env']}: {len(rows)} {split} tasks, another has {longest}")
    if split == "train":
        columns = [islice(cycle(rows), longest) for rows in columns]
    return list(filter(None, chain(*zip_longest(*columns))))


def _tasks_of_environment(name, cls, split, n, seed) -> list[dict]:
    """Return the tasks that the environment makes itself: in `_tasks`, or each time in `reset`."""
    if not hasattr(cls, "_tasks"):
        if envs.needed(cls.reset):
            raise UserError(f"environment {name!r} makes no tasks of its own; give --tasks FILE")
        return [{}] * (n or 1000)
    with reading(f"environment {name!r}: _tasks({split!r}, {n}, {seed})"):
        rows = list(map(dict, cls._tasks(split, n, seed)))
        # What JSON cannot hold can be neither compared nor recorded.
        json_of(rows)
        if not rows:
            raise ValueError("it made no tasks")
    return rows


def tasks_for(config, split: str, n: int | None, files=None, holds_out=True) -> list[dict]:
    """Return tasks for a config. `files`: (dataset, eval_dataset) in place of the config's."""
    dataset, eval_dataset = files or (config.tasks, config.eval_dataset)
    return load_tasks(config.env, split, n, config.seed, dataset, eval_dataset,
                      envs.options_of(config), config.fields, holds_out)


def train_and_held_out(config, n: int) -> tuple[list[dict], list[dict]]:
    """Return n training tasks and the held-out tasks of a config; no task is in both.

    Where n is 0, because other data is learned from, all rows of --tasks are held out.
    """
    files = None if n else (None, config.eval_dataset or config.tasks)
    train = tasks_for(config, "train", n, files, holds_out=config.eval_tasks > 0)
    return train, drop_seen(tasks_for(config, "test", config.eval_tasks, files), train)


# ---------------------------------------------------------------------------------------- held out
def drop_seen(held_out: list[dict], training_tasks: list[dict]) -> list[dict]:
    """Return the held-out tasks that are no training tasks, and print how many were dropped.

    Two tasks are the same if their prompt and the required arguments of `reset` are. Of a task
    without one, all columns of the held-out tasks are compared.
    """
    names = {task["env"] for task in held_out}
    required = set().union(*(envs.needed(envs.load(name).reset) for name in names))
    # A task that was played has more entries than it was given: the expert's noise.
    columns = set().union(*held_out) - {"env"}

    def content(task):
        keys = required & task.keys() or columns
        return {key: task[key] for key in task if key in keys or key == "prompt"}

    return unseen(held_out, training_tasks, content)


def unseen(held_out: list, training: list, content) -> list:
    """Return the held-out items that are no training items, and print how many were dropped.

    `content` is a function that returns what identifies an item, as a JSON value.
    """
    seen = {json_of(content(item)) for item in training}
    new = [item for item in held_out if json_of(content(item)) not in seen]
    print_dropped(held_out, new, "held-out rows are also in the training data: dropped")
    return new


def tasks_of(episodes) -> list[dict]:
    """Return the tasks that episodes recorded."""
    tasks = [t.info.get("task") for t in episodes]
    return [task for task in tasks if isinstance(task, dict)]
