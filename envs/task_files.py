"""What files say of tasks: their rows, recorded episodes, and the run that wrote a model."""
import sys
import zlib
from dataclasses import replace
from functools import cache
from pathlib import Path

import envs
from core.config import UserError, fill, progress, read_yaml, reading, say_once
from core.data import ROW_TABLES, json_of, lines_of, parse_object, print_dropped, shuffled
from core.run import CONFIG, algorithm_of

needed = cache(envs.needed)  # a file may have a million rows


# -------------------------------------------------------------------------------- rows of any file
def json_rows(path):
    """Yield (line number, row) of a .jsonl file."""
    for number, text in lines_of(path):
        with reading(path, number):
            if text.startswith("["):
                raise ValueError("a JSON list; write one object per line, or name the file .json")
            row = parse_object(text, **ROW_RULES) if text.strip() else None
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


# extras/data fills these: {the end or the beginning of a source: its reader}; `read_data` of
# several sources and renamed columns; checks of a task's row and its `reset`; JSON's rules of rows.
READERS, MIXERS, ROW_CHECKS, ROW_RULES = {".jsonl": json_rows}, [], [], {}


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
    """Yield convert(row, place) for every row of a data set. Its ValueError names the place."""
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


def are_held_out(contents, place: str) -> list[bool]:
    """Return which contents are held out: a tenth by their hash, equal ones alike.

    Of fewer than 1,000 different ones it is exactly a tenth, but two at least, and two are left.
    """
    texts = [json_of(content).encode() for content in contents]
    different = sorted(set(texts), key=zlib.crc32)
    if len(different) >= 1000:
        return [zlib.crc32(text) % 10 == 0 for text in texts]
    n = min(max(round(len(different) / 10), 2), max(len(different) - 2, 0))
    say_once(f"{place}: {len(texts)} rows, {len(different)} different ones, {n} of them held out")
    held_out = set(different[:n])
    return [text in held_out for text in texts]


# ------------------------------------------------------------------------------------------- tasks
def tasks_of_file(name, names, cls, split, seed, path, is_whole, fields) -> list[dict]:
    """Return an environment's rows of a file, shuffled: all if it is whole, else a split's."""
    items = []
    # Rows of `code` are tried in the sandbox, some thirty a second.
    for place, row in progress(read_data(path, fields, seed), "tasks"):
        with reading(place):
            if len(names) > 1 and env_of(row, names) != name:
                continue
            if ".csv:" in place.lower():  # whose cells are text
                from envs.options import read_cells
                row = read_cells(cls.reset, row)
            task = as_task(cls, row)
        if task and len(names) == 1 and "env" in task:
            task = {**task, f"{envs.COLUMN}env": task["env"]}
        items.append((row, task))
    playable = [(row, task) for row, task in items if task is not None]
    print_dropped(items, playable, f"rows of {path:.200} have nothing that can be played: dropped")
    if not playable:
        raise UserError(f"{path:.200}: {name}: no rows for it")
    rows, tasks = zip(*playable)
    if not is_whole:
        held_out = are_held_out(rows, f"{path:.200}: {name}")
        tasks = [task for task, out in zip(tasks, held_out) if out == (split == "test")]
    dropped = sum(task.get("dropped_tests", 0) for task in tasks)
    if dropped:
        print(f"{path:.200}: {dropped} tests cannot be read: dropped ({split})")
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
    hint = (f"rows are read as tasks of {cls.__name__}; --fields renames columns; "
            "prompts without tools: --env envs.prompts:Prompts")
    required = needed(cls.reset)
    for check in ROW_CHECKS:
        check(row, cls.reset)
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
PLAIN = {"temperature": 0.7}  # of a plain chat


def recorded_env(trajectories: str) -> str | None:
    """Return the registered environments ("a,b") that recorded episodes are of, or None.

    A data file never chooses which code runs: what is not in envs.ENVS is ignored.
    """
    named = read_as(trajectories, lambda row, _: str(dict(row.get("info", {})).get("env")))
    return ",".join(sorted(envs.ENVS.keys() & named)) or None


def with_env(config):
    """Return a config of sft.py or dpo.py with the environment of a run that states none.

    It is the recorded episodes', none for other data, or equations. Raises UserError for a clash.
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
    return read_yaml(Path(folder, CONFIG)) if algorithm_of(folder) else {}


def as_the_run(config):
    """Take what no flag says from the run that wrote the model: environment, tasks, dtype."""
    note_untrained(config)
    run = config_of(config.model_path)
    run["dataset"] = run.get("tasks", run.get("dataset"))  # sft.py's dataset is other data
    for name in ("env", "dataset", "eval_dataset", "env_options", "fields", "dtype"):
        if run.get(name) and getattr(config, name) in (None, "auto"):
            if name == "env" and ":" in run[name]:
                # Data never chooses which code runs.
                raise UserError(f"the run played --env {run[name]}; give --env yourself")
            config = replace(config, **{name: run[name]})
    config = replace(config, env=None if config.env == "none" else config.env)
    return fill(config, envs.recommended(config.env), {} if config.env else PLAIN)


def note_untrained(config):
    """Print that the default model of agent.py has learned nothing."""
    if config.model_path == "tiny":
        print("note: tiny has random weights; python grpo.py trains it: --model_path runs/grpo")


for fill_tables in ROW_TABLES:
    fill_tables(sys.modules[__name__])
