"""The output folder of a run: who may write there, what is written, what is set aside.

Nothing is removed: a run that is overwritten, or a checkpoint that is in the way, is renamed.
"""
import fcntl
import os
import re
from collections import Counter
from itertools import accumulate
from pathlib import Path

from core.config import ONCE, UserError
from core.data import data_sources
from core.run import CONFIG, EPISODES, LOGS, algorithm_of, set_aside, write_whole
from extras.exact.files import replace_lines, sync

EPISODE_BYTES = 2**28  # of trajectories.jsonl, which is thinned when it has become larger
NAMES = (CONFIG, *LOGS, "result.json", "checkpoints", "base")


class OutputFolder:
    """The folder of one run. One process holds it at a time.

    `enter` only looks, and locks the folder. `begin` is the first to change it, so that a run which
    cannot start leaves everything as it was.

    Args:
        values: {flag: value} of the run's config. Its output_dir is created if it does not exist.
        algorithm: the name of the algorithm.
        command: what continues this run.
    """

    def __init__(self, values, algorithm, command):
        # An environment may change the current folder.
        self.path = Path(values["output_dir"]).absolute()
        self.values, self.algorithm, self.command = values, algorithm, command

    # ------------------------------------------------------------------------------------- entering
    def enter(self):
        """Lock the folder, or raise UserError: it may only hold a run to overwrite or resume."""
        if self.values.get("overwrite") and self.values.get("resume"):
            raise UserError("--resume continues a run and --overwrite renames it; give one of them")
        self._lock()
        algorithm = algorithm_of(self.path)
        present = [name for name in NAMES if (self.path / name).exists()]
        if present and not algorithm:
            raise UserError(f"{self.path}: already holds {present[0]}, and no config.yaml that "
                            "a run has written; give another --output_dir")
        if not algorithm or self.values.get("resume"):
            return
        if not self.values.get("overwrite"):
            raise UserError(f"{self.path}: already holds a {algorithm} run; --resume continues it, "
                            "--overwrite renames it (in Python: resume=True, overwrite=True), or "
                            "give another --output_dir")
        self._check_start()

    def _lock(self):
        """Hold the folder's `.lock` until this process ends: then the kernel releases it."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.path = self.path.resolve()  # a link stays when its run is renamed
            self.lock = open(self.path / ".lock", "a+")
        except OSError as error:
            raise UserError(f"{self.path}: cannot write there ({error.strerror}); "
                            "give another --output_dir") from None
        try:
            # It belongs to the process: a notebook's earlier run does not hinder the next.
            fcntl.lockf(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.lock.seek(0)
            pid = self.lock.read().strip()
            raise UserError(f"{self.path}: process {pid or '?'} is running there; stop it, or "
                            "give another --output_dir") from None
        except OSError:
            # This file system has no locks.
            return
        self.lock.truncate(0)
        print(os.getpid(), file=self.lock, flush=True)

    def _check_start(self):
        """Refuse to rename a folder that the new run starts from."""
        for name, value in self.values.items():
            if name == "output_dir" or not isinstance(value, str):
                continue
            for path, _ in data_sources(value):
                if os.path.exists(path) and Path(path).resolve().is_relative_to(self.path):
                    raise UserError(f"--{name} {path} lies in the folder to overwrite; "
                                    "give another --output_dir")

    def begin(self):
        """Make the folder this run's own, with its config.yaml; rename a run to be overwritten."""
        if self.values.get("overwrite") and algorithm_of(self.path):
            self.lock.close()
            print(f"{self.path}: the run that was there is now {set_aside(self.path)}")
            self._lock()
        self.write_config()

    # -------------------------------------------------------------------------------------- writing
    def write_config(self):
        """Write config.yaml, which `--config` reads to repeat this run."""
        import yaml
        path = self.path / CONFIG
        # A run that is resumed without the flag still holds episodes that ran unprotected.
        header = path.read_text("utf-8").partition("\n")[0] if path.exists() else ""
        unsafe = self.values.get("unsafe_code") or "--unsafe_code" in header
        again = f"--config {CONFIG} --output_dir elsewhere{' --unsafe_code' if unsafe else ''}"
        # In ASCII, because PyYAML reads the U+0085 that it writes as a space.
        kept = {name: value for name, value in self.values.items() if name not in ONCE}
        text = yaml.safe_dump(kept, sort_keys=False)
        write_whole(path, f"# {self.algorithm} run; `{again}` repeats it\n{text}")

    def log_sizes(self):
        """Return {log: bytes}. A checkpoint holds them; what was written later is cut on resume."""
        paths = [self.path / name for name in LOGS]
        return {path.name: path.stat().st_size for path in paths if path.exists()}

    def has_too_many_episodes(self):
        """True if trajectories.jsonl is larger than EPISODE_BYTES."""
        return self.log_sizes().get(EPISODES, 0) > EPISODE_BYTES

    def thin_episodes(self):
        """Take about a quarter out of trajectories.jsonl. No step loses a part of its lines."""
        path = self.path / EPISODES
        sizes = Counter()  # step -> bytes
        with open(path, "rb") as file:
            for line in file:
                sizes[step_of(line)] += len(line)
        kept = kept_steps(sizes)
        with open(path, "rb") as file:
            replace_lines(path, (line for line in file if step_of(line) in kept))

    def flush(self):
        """Flush the logs to the disk. A config.yaml that someone has removed is written again."""
        if not (self.path / CONFIG).exists():
            self.path.mkdir(parents=True, exist_ok=True)
            self.write_config()
        for name in self.log_sizes():
            sync(self.path / name)


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
