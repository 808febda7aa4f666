"""What files say of tasks: their rows, recorded episodes, and the run that wrote a model."""
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

from tqdm import tqdm

import envs
from core.config import NO_BAR, UserError, fill, read_yaml, reading
from core.data import lines_of, parse_object, shuffled, split_of
from core.run import CONFIG, algorithm_of
from core.data import json_of

needed = cache(envs.needed)  # a file may have a million rows


# -------------------------------------------------------------------------------- rows of any file
def json_rows(path):
    """Yield (line number, row) of a .jsonl file."""
    for number, text in lines_of(path):
        with reading(path, number):
            if text.startswith("["):
                raise ValueError("a JSON list; write one object per line, or name the file .json")
            row = parse_object(text) if text.strip() else None
        if row is not None:
            yield number, row


def read_rows(source: str):
    """Yield (line number, row) of a source with the reader of READERS. No rows are an error."""
    for kind, read in READERS.items():
        # Windows programs write X.CSV.
        if source.startswith(kind) or source.lower().endswith(kind):
            break
    else:
        raise UserError(f"{source:.200}: .jsonl is read here; another type needs extras/data, "
                        "which is not here")
    number = None
    for number, row in read(source):
        yield number, row
    if number is None:
        raise UserError(f"{source}: no rows")


# extras/data fills these: {the end or the beginning of a source: its reader}, and `read_data` of
# several sources and of columns with other names.
READERS, MIXERS = {".jsonl": json_rows}, []


def read_data(data: str, fields: str | None = None, seed: int = 0):
    """Yield (place, row) of every row of a data set, the value of a flag. A place is FILE:LINE."""
    if MIXERS:
        yield from MIXERS[0](data, fields, seed)
    elif fields:
        raise UserError("--fields needs extras/data, which is not here")
    else:
        for line, row in read_rows(data):
            yield f"{data}:{line}", row


# What a row with such a column is, and how its file is given.
ROW_KINDS = {
    "token_ids": "a recorded episode is given with --trajectories",
    "chosen": "a pair is given to dpo.py with --dataset",
    **dict.fromkeys(("messages", "conversations", "completion", "instruction"),
                    "a conversation is given to sft.py with --dataset"),
}


def read_as(data: str, convert, fields: str | None = None, seed: int = 0):
    """Yield convert(row, place) for every row of a data set; `read_data` has the other arguments.

    A ValueError of `convert` becomes a UserError that names the place.
    """
    for place, row in read_data(data, fields, seed):
        with reading(place):
            item = convert(row, place)
        yield item


def need(row: dict, *fields: str, otherwise: str = ""):
    """Raise ValueError if the row lacks one of the fields.

    The message says how a row of another kind is given, or what is missing, and `otherwise`.
    """
    columns = ", ".join(row)
    for name in fields:
        if row.get(name) is None:
            wanted = {None, *map(ROW_KINDS.get, fields)}
            kinds = [kind for kind in map(ROW_KINDS.get, row) if kind not in wanted]
            if kinds:
                raise ValueError(f"{kinds[0]}; the row has: {columns}")
            hint = otherwise and f"; {otherwise}"
            wrong = f'"{name}" is null' if name in row else f'no "{name}" field'
            raise ValueError(f"{wrong}; has: {columns}{hint}")


def is_held_out(content) -> bool:
    """True for a tenth of all contents, by their hash."""
    return split_of(json_of(content)) == "test"


# ------------------------------------------------------------------------------------------- tasks
def tasks_of_file(name, names, cls, split, seed, path, is_whole, fields) -> list[dict]:
    """Return an environment's rows of a file, shuffled: all if it is whole, else a split's."""
    tasks = []
    dropped = Counter()
    rows = read_data(path, fields, seed)
    # Rows of `code` are tried in the sandbox, some thirty a second.
    for place, row in tqdm(rows, "tasks", disable=NO_BAR, leave=False, delay=2):
        with reading(place):
            if len(names) > 1 and env_of(row, names) != name:
                continue
            if ".csv:" in place.lower():
                # The cells of a table are text.
                from envs.options import read_cells
                row = read_cells(cls.reset, row)
            in_split = is_whole or is_held_out(row) == (split == "test")
            # Rows of the other split are checked as well.
            task = as_task(cls, row)
        if in_split and task is None:
            dropped["rows have nothing that can be played"] += 1
        elif in_split:
            dropped["tests cannot be read"] += task.get("dropped_tests", 0)
            if len(names) == 1 and "env" in task:
                task = {**task, f"{envs.COLUMN}env": task["env"]}
            tasks.append(task)
    for what, number in (+dropped).items():
        print(f"{path:.200}: {number} {what}: dropped ({split})")
    if not tasks:
        raise UserError(f"{path:.200}: {name}: no rows for it, or too few rows to hold some out; "
                        "give --eval_dataset path/to/test.jsonl, or --eval_tasks 0 (not sft.py)")
    return shuffled(tasks, seed)


def env_of(row: dict, names: list[str]) -> str:
    """Return which of the named environments a row's "env" is, by name or class, or ValueError.

    TRL calls the column "environment".
    """
    wanted = row.get("env", row.get("environment"))
    for name in names:
        if wanted in (name, name.rpartition(":")[2]):
            return name
    raise ValueError(f'"env" must be one of --env {",".join(names)}, not {wanted!r:.60}')


def as_task(cls, row: dict) -> dict | None:
    """Return the arguments of `reset` in a row of a file, None to drop it, or raise ValueError."""
    required = needed(cls.reset)
    hint = (f"rows are read as tasks of {cls.__name__}; --fields renames columns; "
            "prompts without tools: --env envs.prompts:Prompts")
    try:
        task = cls._row(row) if hasattr(cls, "_row") else row
    except (KeyError, TypeError):
        # A missing column says more than the error that it leads to.
        need(row, *required, otherwise=hint)
        raise
    if task is not None:
        need(task, *required, otherwise=hint)
        prompt = task.get("prompt", "")
        if not isinstance(prompt, str) or prompt[:1] == "[":
            # An environment, which few rows need.
            from envs.prompts import opening
            opening(cls.reset, task, "any question")
    return task


# ----------------------------------------------------------- what runs and recorded episodes say
def recorded_env(trajectories: str) -> str | None:
    """Return the registered environments ("a,b") that recorded episodes are of, or None.

    A data file never chooses which code runs: what is not in envs.ENVS is ignored.
    """
    named = read_as(trajectories, lambda row, _: str(dict(row.get("info", {})).get("env")))
    return ",".join(sorted(envs.ENVS.keys() & named)) or None


def with_env(config):
    """Return a config of sft.py or dpo.py with the environment of a run that states none.

    It is that of the recorded episodes, none for other data (--dataset), or else equations. Raises
    UserError for flags that clash.
    """
    if config.dataset and config.trajectories:
        raise UserError(f"--dataset {config.dataset} and --trajectories {config.trajectories}: "
                        "give one; tasks to evaluate on are given with --tasks")
    env = config.env
    if not env and config.trajectories:
        env = recorded_env(config.trajectories)
    elif not env and not config.dataset:
        env = "equations"
    if config.tasks and not env:
        raise UserError(f"--tasks {config.tasks}: name their environment with --env")
    return replace(config, env=env)


def config_of(folder) -> dict:
    """Return {flag: its value as text} of the run in an output folder, {} if it holds none."""
    if not algorithm_of(folder):
        return {}
    return read_yaml(Path(folder, CONFIG))


def as_the_run(config):
    """Take what no flag says from the run that wrote the model: environment, tasks, dtype."""
    run = config_of(config.model_path)
    run["dataset"] = run.get("tasks", run.get("dataset"))  # sft.py's dataset is other data
    for name in ("env", "dataset", "eval_dataset", "env_options", "fields", "dtype"):
        if run.get(name) and getattr(config, name) in (None, "auto"):
            if name == "env" and ":" in run[name]:
                # Data never chooses which code runs.
                raise UserError(f"the run played --env {run[name]}; give --env yourself")
            config = replace(config, **{name: run[name]})
    config = replace(config, env=None if config.env == "none" else config.env)
    return fill(config, envs.limits(config.env))
