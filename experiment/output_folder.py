"""The output folder of a run: who may write there, what is set aside, what is resumed.

Nothing is removed: a run that is overwritten, or a checkpoint that is in the way, is renamed.
"""
import fcntl
import importlib
import os
import re
from pathlib import Path

from experiment.checkpoint import (check_ingredients, checkpoints, newest_checkpoint, read_state,
                                   whole_logs)
from experiment.config import MIXTURES, ONCE, convert, options
from experiment.data import read_json, read_yaml, reading
from experiment.errors import UserError
from experiment.files import replace_file, set_aside, sync, to_json

CONFIG = "config.yaml"
EPISODES = "trajectories.jsonl"
LOGS = ("metrics.jsonl", "timing.jsonl", EPISODES)  # JSON objects with a "step"
EPISODE_BYTES = 2**28  # of trajectories.jsonl, which is thinned when it has become larger
THINNING = "experiment.thinning"  # few runs need it
NAMES = (CONFIG, *LOGS, "result.json", "checkpoints", "base", "schooling")
# What a resumed run may change. The two that make an update may change together.
FREE = (*ONCE, "output_dir", "save_every", "eval_every", "gradient_checkpointing", "sampler")
UPDATE = ("batch_size", "gradient_accumulation_steps")


def algorithm_of(folder):
    """Return the name of the program whose run an output folder holds, or None."""
    path = Path(folder) / "config.yaml"
    if not path.is_file():
        return None
    with reading(path), open(path, "rb") as file:
        match = re.match(rb"# (\w+) run;", file.readline(100))
    return match and match[1].decode()


class OutputFolder:
    """The folder of one run. One process holds it at a time.

    `enter` and `continue_run` only look, and lock the folder. `begin` is the first to change it, so
    that a run which cannot start leaves everything as it was.

    Args:
        path: the folder, which is created if it does not exist.
        algorithm: the name of the algorithm.
        command: what continues this run.
    """

    def __init__(self, path, algorithm, command):
        # An environment may change the current folder.
        self.path = Path(path).absolute()
        self.algorithm, self.command = algorithm, command
        self.is_replaced = self.is_resumed = False
        self.state = None

    # ------------------------------------------------------------------------------------- entering
    def enter(self, values):
        """Lock the folder, which must be writable and hold no run but one to overwrite or resume.

        Args:
            values: {flag: value} of the run's config. Raises UserError.
        """
        if not str(values["output_dir"]).strip():
            raise UserError("--output_dir is empty; give the name of a folder")
        if values.get("overwrite") and values.get("resume"):
            raise UserError("--resume continues a run and --overwrite renames it; give one of them")
        self._lock(values["output_dir"])
        algorithm = algorithm_of(self.path)
        present = [name for name in NAMES if (self.path / name).exists()]
        if present and not algorithm:
            raise UserError(f"{self.path}: already holds {present[0]}, and no config.yaml that "
                            "a run has written; give another --output_dir")
        if not algorithm or values.get("resume"):
            return
        if not values.get("overwrite"):
            raise UserError(f"{self.path}: already holds a {algorithm} run; --resume continues it, "
                            "--overwrite renames it (in Python: resume=True, overwrite=True), or "
                            "give another --output_dir")
        self._check_start(values)
        self.is_replaced = True

    def _lock(self, given):
        """Hold `.lock` until this process ends, however it ends: then the kernel releases it."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.lock = open(self.path / ".lock", "a+")
        except (OSError, ValueError) as error:  # ValueError: a NUL character in the path
            reason = "is a file" if os.path.isfile(self.path) else getattr(error, "strerror", error)
            raise UserError(
                f"{given}: cannot write there ({reason}); give another --output_dir") from None
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.lock.seek(0)
            pid = self.lock.read().strip()
            # A notebook may still hold the lock of its previous run.
            if pid != str(os.getpid()):
                raise UserError(f"{self.path}: process {pid or '?'} is running there; stop it, or "
                                "give another --output_dir") from None
        except OSError:
            # This file system has no locks.
            return
        self.lock.truncate(0)
        print(os.getpid(), file=self.lock, flush=True)

    def _check_start(self, values):
        """Refuse to rename a folder that the new run starts from."""
        folder = self.path.resolve()
        for name, value in values.items():
            if name == "output_dir" or not isinstance(value, str):
                continue
            for path, _ in importlib.import_module(MIXTURES).data_sources(value):
                if os.path.exists(path) and Path(path).resolve().is_relative_to(folder):
                    raise UserError(f"--{name} {path} lies in the folder to overwrite; "
                                    "give another --output_dir")

    def begin(self, values):
        """Make the folder this run's own, with its config.yaml. Raises UserError.

        A run to be overwritten is renamed. A run to be resumed goes back to its checkpoint.
        """
        if self.is_replaced:
            self.lock.close()
            try:
                print(f"{self.path}: the run that was there is now {set_aside(self.path)}")
            except OSError as error:
                raise UserError(f"{self.path}: cannot be renamed ({error.strerror}); "
                                "give another --output_dir") from None
            self._lock(values["output_dir"])
        if self.is_resumed:
            self._go_back()
        self.values = values
        self.write_config()

    # -------------------------------------------------------------------------------------- writing
    def write(self, name, text):
        """Write a file of the folder whole or not at all."""
        replace_file(self.path / name, text)

    def write_config(self):
        """Write config.yaml, which `--config` reads to repeat this run."""
        import yaml
        kept = {name: value for name, value in self.values.items() if name not in ONCE}
        # In ASCII, because PyYAML reads the U+0085 that it writes as a space.
        text = yaml.safe_dump(kept, sort_keys=False)
        again = f"`--config {CONFIG} --output_dir elsewhere` repeats it"
        unsafe = " with --unsafe_code" if self.values.get("unsafe_code") else ""
        self.write(CONFIG, f"# {self.algorithm} run{unsafe}; {again}\n{text}")

    def append(self, name, rows):
        """Append rows to a log, one JSON object per line."""
        with open(self.path / name, "a", encoding="utf-8", newline="\n") as file:
            file.write("".join(to_json(row) for row in rows))

    def log_sizes(self):
        """Return {log: bytes}. A checkpoint holds them; what was written later is cut on resume."""
        paths = [self.path / name for name in LOGS]
        return {path.name: path.stat().st_size for path in paths if path.exists()}

    def flush(self):
        """Flush the logs to the disk. A config.yaml that someone has removed is written again."""
        if not (self.path / CONFIG).exists():
            self.path.mkdir(parents=True, exist_ok=True)
            self.write_config()
        for name in self.log_sizes():
            sync(self.path / name)

    def thin(self, step):
        """Thin trajectories.jsonl after the episodes of a step if it has become too large."""
        path = self.path / EPISODES
        if path.exists() and path.stat().st_size > EPISODE_BYTES:
            importlib.import_module(THINNING).thin(path, step)

    # ------------------------------------------------------------------------------------- resuming
    def continue_run(self, config, values, paths):
        """Check that the run can be continued.

        Args:
            config: the config of this call.
            values: {flag: value} of it.
            paths: the `ingredients` of this call.

        Returns:
            (result, None, None) of a finished run, else (None, checkpoint, its state), where both
            are None if no step is saved. Raises UserError.
        """
        algorithm = algorithm_of(self.path)
        if algorithm != self.algorithm:
            raise UserError(f"{self.path}: holds a {algorithm} run, not one of {self.algorithm}")
        longer = self._compare(config, values)
        if (self.path / "result.json").exists() and not longer:
            result = read_json(self.path / "result.json")
            with reading(self.path / "result.json"):
                steps = result["steps"]
            print(f"{self.path}: finished after {steps} steps; a larger --max_steps continues it")
            return result, None, None
        checkpoint, state = newest_checkpoint(self.path), None
        if checkpoint:
            state = self._verified(checkpoint)
            check_ingredients(state["made_of"], paths)
        self.is_resumed, self.state = True, state
        print(f"{self.path}: continues after step {state['step']}" if state else
              f"{self.path}: no step is saved, begins again")
        return None, checkpoint, state

    def _compare(self, config, values):
        """Refuse other flags than the run began with. Returns True if it is to become longer.

        A `max_steps` of None in `values` becomes that of the run.
        """
        flags, path = options(type(config)), self.path / CONFIG
        began = {name: convert(value, flags[name], f"{path}: {name}")
                 for _, name, value in read_yaml(path) if name in flags and name not in FREE}
        if values.get("max_steps", 0) is None:
            values["max_steps"] = began.get("max_steps")
        changed = {name: old for name, old in began.items() if old != values[name]}
        if _sequences(values) == _sequences({**values, **began}):
            for name in UPDATE:
                changed.pop(name, None)
        steps = changed.get("max_steps"), values.get("max_steps")
        longer = None not in steps and steps[1] > steps[0]
        if longer:
            del changed["max_steps"]
        if changed:
            differences = [f"--{name} is {values[name]} and was {changed[name]}"
                           for name in changed]
            raise UserError(f"{self.path}: --resume continues the run as it began (max_steps may "
                            f"grow), but {', '.join(differences)}; the same command: "
                            f"{self.command}")
        return longer

    def _verified(self, checkpoint):
        """Return the state of a checkpoint that is whole."""
        try:
            return read_state(checkpoint)
        except UserError as error:
            raise UserError(f"{error}; rename {checkpoint.name}, and --resume continues from the "
                            "checkpoint before") from None

    def _go_back(self):
        """Take away what was written after the checkpoint: result, log lines, newer checkpoints."""
        (self.path / "result.json").unlink(missing_ok=True)
        sizes, step = (self.state["lines"], self.state["step"]) if self.state else ({}, 0)
        for thinned_at, whole in whole_logs(self.path):
            if thinned_at >= step:
                whole.replace(self.path / EPISODES)
        for name in LOGS:
            path, size = self.path / name, sizes.get(name, 0)
            length = path.stat().st_size if path.exists() else 0
            if length > size:
                os.truncate(path, size)
            elif 0 < length < size:
                print(f"{path}: lines of before step {step} were removed; what is left is now "
                      f"{set_aside(path).name}")
        for path in checkpoints(self.path):
            if self.state and int(path.name[5:]) > self.state["step"]:
                print(f"{path}: is now {set_aside(path).name}")


def _sequences(values):
    """Return the sequences of an update where UPDATE decides it. In grpo it does not."""
    if "updates_per_step" in values:
        return None
    return values["batch_size"] * (values["gradient_accumulation_steps"] or 1)
