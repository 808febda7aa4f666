"""Tasks of a file: which rows are for an environment, and what its `reset` takes of each."""
from collections import Counter
from functools import cache

from tqdm import tqdm

import envs
from core.config import NO_BAR, UserError, reading
from core.data import read_data, shuffled
from envs.options import read_cells
from envs.prompts import opening
from envs.tasks import is_held_out, need

needed = cache(envs.needed)  # a file may have a million rows


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
    for what, number in dropped.items():
        if number:
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
            opening(cls.reset, task, "any question")
    return task
