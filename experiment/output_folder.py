"""The output folder of a run: who may write there, what is overwritten, what is resumed.

Nothing is removed that a run of ours did not write, and nothing is written through a symbolic link.
"""
import fcntl
import os
import re
import shutil
from importlib.metadata import version
from pathlib import Path

from experiment.checkpoint import checkpoints, read_state, remove
from experiment.config import convert, options
from experiment.data import read_json, read_yaml, reading
from experiment.errors import UserError
from experiment.files import disk_space, open_to_write, replace_file, to_json

CONFIG = "config.yaml"
LOGS = ("metrics.jsonl", "timing.jsonl", "trajectories.jsonl")  # JSON objects with a "step"
# The config is removed last: until then a killed removal can be repeated.
FILES = (*LOGS, "result.json", "report.html", "preference_pairs.json", CONFIG)
NAMES = (*FILES, "checkpoints", "base")
# Permissions for one call, which config.yaml does not repeat.
ONCE = ("overwrite", "resume")
# What a resumed run may change without a word, and what it may change with a note.
FREE = (*ONCE, "output_dir", "save_every")
HARMLESS = ("batch_size", "gradient_accumulation_steps", "gradient_checkpointing", "eval_every")


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

    Args:
        path: the folder, which is created if it does not exist.
        algorithm: the name of the program.
        command: what continues this run.
    """

    def __init__(self, path, algorithm, command):
        # An environment may change the current folder.
        self.path = Path(path).absolute()
        self.algorithm = algorithm
        self.command = command
        self.is_new = False

    # ------------------------------------------------------------------------------------- entering
    def enter(self, values):
        """Take the folder: writable, free, and either empty, to be emptied or to be continued.

        Args:
            values: {flag: value} of the run's config. Raises UserError.
        """
        if not str(values["output_dir"]).strip():
            raise UserError("--output_dir is empty; give the name of a folder")
        if values.get("overwrite") and values.get("resume"):
            raise UserError("--resume continues a run and --overwrite removes it; give one of them")
        self._create(values["output_dir"])
        self._lock()
        if values.get("overwrite"):
            self._overwrite(values)
        elif not values.get("resume"):
            self.refuse_a_run()

    def _create(self, given):
        try:
            is_new = not self.path.exists()
            self.path.mkdir(parents=True, exist_ok=True)
            self.is_new = is_new
            paths = [*(self.path / name for name in (*NAMES, ".lock")), *self.path.glob("base/*")]
            links = [path for path in paths if path.is_symlink()]
            self.lock = None if links else open_to_write(self.path / ".lock", "a+")
        except (OSError, ValueError) as error:  # ValueError: a NUL character in the path
            reason = "is a file" if os.path.isfile(self.path) else getattr(error, "strerror", error)
            raise UserError(
                f"{given}: cannot write there ({reason}); give another --output_dir") from None
        if links:
            raise UserError(f"{links[0]}: is a symbolic link, which a run does not write through; "
                            "remove it, or give another --output_dir")

    def remove_if_unused(self):
        """Remove the folder if this run made it and wrote no more than its config."""
        if self.is_new and {path.name for path in self.path.iterdir()} <= {CONFIG, ".lock"}:
            shutil.rmtree(self.path)

    def _lock(self):
        """Hold `.lock` until this process ends, however it ends: then the kernel releases it."""
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

    def _contents(self):
        return [name for name in NAMES if (self.path / name).exists()]

    def refuse_a_run(self):
        """Raise UserError if the folder holds a run, or files with the names of a run's files."""
        contents, algorithm = self._contents(), algorithm_of(self.path)
        # A run that stopped before it did anything leaves only its config.
        if not contents or contents == [CONFIG] and algorithm:
            return
        if not algorithm:
            raise UserError(f"{self.path}: already holds {contents[0]}; give another --output_dir")
        steps = [int(path.name[5:]) for path in checkpoints(self.path)]
        saved = f"{steps[-1]} steps are saved" if steps else "no step is saved"
        progress = "finished" if "result.json" in contents else f"unfinished ({saved})"
        raise UserError(f"{self.path}: already holds a {algorithm} run, {progress}; --resume "
                        "continues it, --overwrite replaces it, or give another --output_dir")

    def _overwrite(self, values):
        """Remove what a run of ours wrote, unless this run starts from it."""
        contents = self._contents()
        if contents and not algorithm_of(self.path):
            raise UserError(f"{self.path}: holds {contents[0]}, which no run has written, and "
                            "--overwrite removes runs only; give another --output_dir")
        folder = self.path.resolve()
        for name, value in values.items():
            if name == "output_dir" or not contents or not isinstance(value, str):
                continue
            # --trajectories may be several files.
            for path in map(str.strip, value.split(",")):
                if os.path.exists(path) and Path(path).resolve().is_relative_to(folder):
                    raise UserError(f"--{name} {path} lies in the folder to overwrite; "
                                    "give another --output_dir")
        for path in checkpoints(self.path):
            remove(path)
        if (self.path / "base" / "made.json").exists():
            shutil.rmtree(self.path / "base")
        for path in [*self._bad_steps(), *(self.path / name for name in FILES)]:
            path.unlink(missing_ok=True)

    def _bad_steps(self):
        paths = self.path.glob("bad_step_*.json")
        return [path for path in paths if path.stem[9:].isdecimal()]

    # -------------------------------------------------------------------------------------- writing
    def write(self, name, text):
        """Write a file of the folder whole or not at all."""
        with disk_space(self.path / name, len(text), self.command):
            replace_file(self.path / name, text)

    def write_config(self, values):
        """Write config.yaml, which `--config` reads to repeat this run."""
        import yaml
        again = f"`python {self.algorithm}.py --config {CONFIG} --output_dir elsewhere` repeats it"
        kept = {name: value for name, value in values.items() if name not in ONCE}
        # In ASCII, because PyYAML reads the U+0085 that it writes as a space.
        text = yaml.safe_dump(kept, sort_keys=False)
        self.write(CONFIG, f"# {self.algorithm} run; {again}\n{text}")

    def append(self, name, rows):
        """Append rows to a log, one JSON object per line."""
        text = "".join(to_json(row) for row in rows)
        with disk_space(self.path / name, len(text), self.command):
            with open_to_write(self.path / name, "a") as file:
                file.write(text)

    def log_sizes(self):
        """Return {log: bytes}. A checkpoint holds them; what was written later is cut on resume."""
        paths = [self.path / name for name in LOGS]
        return {path.name: path.stat().st_size for path in paths if path.exists()}

    # ------------------------------------------------------------------------------------- resuming
    def continue_run(self, config, values, made_of):
        """Check that the run can be continued; discard what was written after its checkpoint.

        Args:
            config: the config of this call.
            values: {flag: value} of it.
            made_of: the `ingredients` of this call.

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
        checkpoint, state = self._choose(values["resume"] == "previous")
        if state:
            self._check_ingredients(state, made_of)
        # Nothing is removed before the checkpoint is verified.
        for path in checkpoints(self.path):
            if state and int(path.name[5:]) > state["step"]:
                remove(path)
        self._cut_logs(state)
        print(f"{self.path}: continues after step {state['step']}" if state else
              f"{self.path}: no step is saved, begins again")
        return None, checkpoint, state

    def _compare(self, config, values):
        """Refuse other flags than the run began with. Returns True if it is to become longer."""
        flags, path = options(type(config)), self.path / CONFIG
        began = {name: convert(value, flags[name], f"{path}: {name}")
                 for _, name, value in read_yaml(path) if name in flags and name not in FREE}
        changed = {name: old for name, old in began.items() if old != values[name]}
        steps = changed.get("max_steps"), values.get("max_steps")
        longer = None not in steps and steps[1] > steps[0]
        if longer:
            del changed["max_steps"]
        differences = [f"--{name} is {values[name]} and was {old}" for name, old in changed.items()]
        if changed and not (changed.keys() <= {*HARMLESS}
                            and _sequences(values) == _sequences({**values, **began})):
            raise UserError(f"{self.path}: --resume continues the run as it began (max_steps may "
                            f"grow), but {', '.join(differences)}; the same command: "
                            f"{self.command}")
        for difference in differences:
            print(f"note: {difference}: numbers may differ by rounding from here on")
        return longer

    def _choose(self, previous):
        """Return the checkpoint to continue from and its verified state, or (None, None)."""
        candidates = checkpoints(self.path)
        if previous and len(candidates) < 2:
            raise UserError(f"{self.path}: no previous checkpoint to resume; use --resume")
        if previous:
            candidates.pop()
        if not candidates:
            return None, None
        try:
            return candidates[-1], read_state(candidates[-1])
        except UserError as error:
            fix = "there is no other one to continue from: --overwrite starts anew"
            if candidates[1:] and not previous:
                fix = f"--resume previous continues from {candidates[-2].name}"
            raise UserError(f"{error}; {fix}") from None

    def _check_ingredients(self, state, made_of):
        """Refuse to continue with another model, other data or another environment."""
        for path in sorted(state["made_of"].keys() | made_of.keys()):
            if state["made_of"].get(path) != made_of.get(path):
                raise UserError(f"{path}: is not the file this run began with; put that back, or "
                                "begin anew with another --output_dir")
        for name, recorded in state["versions"].items():
            if version(name) != recorded:
                print(f"note: {name} is {version(name)}, the checkpoint was written by {recorded}: "
                      "numbers may differ a little")

    def _cut_logs(self, state):
        """Remove the result and the log lines that were written after the checkpoint."""
        (self.path / "result.json").unlink(missing_ok=True)
        sizes = state["lines"] if state else {}
        for name in LOGS:
            path, size = self.path / name, sizes.get(name, 0)
            if path.exists() and path.stat().st_size >= size:
                os.truncate(path, size)
            elif size:
                print(f"note: {path} has lost lines that this run had written")
        for path in self._bad_steps():
            if not state or int(path.stem[9:]) >= state["step"]:
                path.unlink()


def _sequences(values):
    """Return the sequences of an update where these two flags decide it. In grpo they do not."""
    if "updates_per_step" in values:
        return None
    return values["batch_size"] * (values["gradient_accumulation_steps"] or 1)
