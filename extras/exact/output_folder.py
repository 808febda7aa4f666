"""The output folder of a run: who may write there, and a log of episodes that does not grow.

Nothing is removed: a run that is overwritten, or a checkpoint that is in the way, is renamed.
"""
import os
import re
from collections import Counter
from contextlib import suppress
from itertools import accumulate
from pathlib import Path

from core.config import UserError
from core.run import CONFIG, LOGS, algorithm_of
from extras.exact.files import paths_in, replace_lines

fcntl = None  # Windows has none: there two runs in one folder are not kept apart
with suppress(ModuleNotFoundError):
    import fcntl
EPISODE_BYTES = 2**28  # of trajectories.jsonl, which is thinned when it has become larger
NAMES = (CONFIG, *LOGS, "result.json", "checkpoints", "base")


def enter(folder, config):
    """Lock the folder for this run and return the lock. Nothing else is changed there.

    Raises UserError if it holds what no run has written, or what the run that overwrites it needs.
    """
    if config.overwrite and config.resume:
        raise UserError("--resume continues a run and --overwrite renames it; give one of them")
    handle = lock(folder)
    present = [name for name in NAMES if (folder / name).exists()]
    if present and not algorithm_of(folder):
        raise UserError(f"{folder}: already holds {present[0]}, and no config.yaml that "
                        "a run has written; give another --output_dir")
    if present and config.overwrite:
        check_start(folder, vars(config))
    return handle


def lock(folder):
    """Return the open `.lock` of the folder, which is held until it is closed or the process ends.

    The folder is made if it does not exist. Raises UserError if another process holds the lock.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = open(folder / ".lock", "a+", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{folder}: cannot write there ({error.strerror}); "
                        "give another --output_dir") from None
    if not fcntl:
        return handle
    try:
        # It belongs to the process: a notebook's earlier run does not hinder the next.
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.seek(0)
        pid = handle.read().strip()
        raise UserError(f"{folder}: process {pid or '?'} is running there; stop it, or "
                        "give another --output_dir") from None
    except OSError:
        # This file system has no locks.
        return handle
    handle.truncate(0)
    print(os.getpid(), file=handle, flush=True)
    return handle


def check_start(folder, values):
    """Refuse to rename a folder that the new run starts from, as the values of its flags say."""
    for name, value in values.items():
        if name == "output_dir" or not isinstance(value, str):
            continue
        for path in paths_in(value):
            if os.path.exists(path) and Path(path).resolve().is_relative_to(folder):
                raise UserError(f"--{name} {path} lies in the folder to overwrite; "
                                "give another --output_dir")


# -------------------------------------------------------------------------------------- episodes
def is_too_large(log) -> bool:
    """True if a log of episodes is larger than EPISODE_BYTES."""
    return log.exists() and log.stat().st_size > EPISODE_BYTES


def thin_episodes(path):
    """Take about a quarter out of a log of episodes. No step loses a part of its lines."""
    sizes = Counter()  # step -> bytes
    with open(path, "rb") as file:
        for line in file:
            sizes[step_of(line)] += len(line)
    kept = kept_steps(sizes)
    with open(path, "rb") as file:
        replace_lines(path, (line for line in file if step_of(line) in kept))


def step_of(line):
    """Return the step of a line of trajectories.jsonl, which begins with it."""
    return int(re.match(rb'\{"step": (\d+)', line)[1])


def kept_steps(sizes):
    """Return the steps that stay: the newest half of the bytes, and before it every n-th step.

    The number n is the least power of two with which these have a quarter of the bytes at most.
    `sizes` is {step: bytes}, the oldest first.
    """
    total = sum(sizes.values())
    older = [step for step, end in zip(sizes, accumulate(sizes.values())) if end <= total / 2]
    n = 2
    while sum(sizes[step] for step in older if step % n == 0) > total / 4 and n <= max(older):
        n *= 2
    return sizes.keys() - {step for step in older if step % n}
