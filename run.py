"""The lab notebook: flags and YAML become a config, a run becomes a folder.

An option is one line of a dataclass: `learning_rate: float = flag(1e-5, "AdamW step size", above=0)`. Its value is the
default, else what `--config file.yaml` says, else the command line; of an option given twice there the last one wins,
so a script may end in "$@". YAML is read as typed text by the function that reads the command line: both take the same.
Only the standard library is imported here, so that `--help` answers at once.
"""
import dataclasses
import difflib
import errno
import hashlib
import json
import math
import operator
import os
import re
import shlex
import shutil
import signal
import sys
import textwrap
import threading
import types
import typing
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", list: "a list"}
BOUNDS = (("low", "at least", operator.ge), ("high", "at most", operator.le), ("above", "greater than", operator.gt))
LINES = ("metrics.jsonl", "timing.jsonl", "trajectories.jsonl")             # one object with a "step" per line
OWNED = ("config.yaml", *LINES, "result.json", "report.html", "checkpoints", "base")      # what --overwrite removes
ONCE = ("overwrite", "resume")          # permissions for one call, not part of the experiment: not in config.yaml
FREE = (*ONCE, "output_dir", "save_every")                                  # may differ when a run is resumed
DATA = ("dataset", "eval_dataset", "trajectories")                          # files that may not
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
RESULT = ("success_before", "success_after", "seconds", "peak_memory_mb", "steps", "seed")


class UserError(ValueError):
    """What the user can mend, in one line that says how; `main` prints it without a traceback."""


class Stop(BaseException):
    """The run ends before its end, and says why and how to go on. Not an Exception: what catches the fault of a tool or
    of a row must let it pass. code, the exit status: 3 numbers, 4 disk, 128 + signal."""

    def __init__(self, message, code):
        super().__init__(message)
        self.code = code


def flag(default, help, *, group="", choices=None, aliases=(), low=None, high=None, above=None, bare=None):
    """A Config field. `help` names the unit; low and high are inclusive bounds, above is an exclusive one; bare is what
    the option means without a value."""
    spec = dict(help=help, group=group, choices=choices, aliases=aliases, low=low, high=high, above=above, bare=bare)
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=spec)
    return dataclasses.field(default=default, metadata=spec)


def options(config_class):
    """Field name -> (int | float | bool | str | list, may it be None, the metadata that `flag` wrote)."""
    hints, found = typing.get_type_hints(config_class), {}
    for field in dataclasses.fields(config_class):
        union = typing.get_args(hints[field.name]) if isinstance(hints[field.name], types.UnionType) else ()
        kind = next((t for t in union if t is not type(None)), hints[field.name])
        found[field.name] = typing.get_origin(kind) or kind, type(None) in union, field.metadata
    return found


def convert(value, option, where):
    """The checked value of an option (one of `options`). Text is read first; where it came from opens the message."""
    kind, optional, spec = option
    where = f"{where} {textwrap.shorten('null' if value is None else str(value), 80) or repr('')}"
    if value is None and optional:
        return None
    if isinstance(value, str) and kind is list:
        value = [item.strip() for item in value.split(",") if item.strip()]
    elif isinstance(value, str) and kind is bool:
        value = {"true": True, "false": False}.get(value.lower())
    elif isinstance(value, str) and kind in (int, float):
        try:                                                        # int and float also take "1_0", "nan" and "４２"
            value = kind(value) if re.fullmatch("[-+.0-9eE]+", value) else None
        except ValueError:
            value = None
    if not isinstance(value, (int, float) if kind is float else kind) or isinstance(value, bool) != (kind is bool):
        raise UserError(f"{where}: not {KINDS[kind]}")
    if kind is float and not math.isfinite(value):
        raise UserError(f"{where}: not a finite number")
    for item in value if kind is list else [value]:
        if spec.get("choices") and item not in spec["choices"] or kind is list and not isinstance(item, str):
            raise UserError(f"{where}: must be one of {', '.join(map(str, spec.get('choices') or ['text, text']))}")
    for bound, words, holds in BOUNDS:
        if spec.get(bound) is not None and not holds(value, spec[bound]):
            raise UserError(f"{where}: must be {words} {spec[bound]}")
    return value


def nearest(name, known, lead="did you mean ", end="?", otherwise="--help lists them"):
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"{lead}{close[0]}{end}" if close else otherwise


def read_yaml(path):
    """(line number, name, value) of each option in a YAML file; a value is the text as typed, None, or a list of them.

    Reads the node graph: `yaml.safe_load` makes a string of 1e-4, False of no, 8 of 010, and drops duplicate keys.
    """
    import yaml  # arrives with transformers
    try:
        root = yaml.compose(Path(path).read_bytes(), Loader=yaml.SafeLoader)
    except FileNotFoundError:
        siblings = os.listdir(Path(path).parent) if Path(path).parent.is_dir() else []
        raise UserError(f"{path}: no such file{nearest(Path(path).name, siblings, '; nearest: ', '', '')}") from None
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:  # ValueError: a NUL in the path
        line = f":{error.problem_mark.line + 1}" if getattr(error, "problem_mark", None) else ""
        reason = getattr(error, "strerror", None) or getattr(error, "problem", None) or error
        raise UserError(f"{path}{line}: cannot be read as YAML: {reason}") from None

    def plain(node):
        if not isinstance(node, yaml.ScalarNode):
            raise UserError(f"{path}:{node.start_mark.line + 1}: give lines `name: value`, nothing nested")
        return None if node.tag == "tag:yaml.org,2002:null" else node.value

    if root and not isinstance(root, yaml.MappingNode):
        raise UserError(f"{path}:1: give lines `name: value`")
    for key, node in root.value if root else []:
        value = [plain(item) for item in node.value] if isinstance(node, yaml.SequenceNode) else plain(node)
        yield key.start_mark.line + 1, plain(key) or "null", value


def parse(config_class, argv, description=""):
    """The config that the command line and its --config files ask for. Raises UserError; --help prints and exits 0."""
    argv, known = [str(word) for word in argv], options(config_class)
    names = {alias: name for name, option in known.items() for alias in (name, *option[2].get("aliases", ()))}
    from_files, from_line = {}, {}
    if "-h" in argv or "--help" in argv:
        print(help_text(config_class, description))
        raise SystemExit(0)
    while argv:
        word, equals, text = argv.pop(0).partition("=")
        name = word[2:].replace("-", "_")
        if not word.startswith("--") or not name:
            raise UserError(f"unexpected argument {word + equals + text}; options are written --name value")
        switch = known[names[name]][0] is bool if name in names else False
        negated = names.get(name.removeprefix("no_"))
        if name not in names and negated and known[negated][0] is bool and not equals:
            from_line[negated] = False
            continue
        if name not in names and name != "config":
            raise UserError(f"unknown option --{name}; {nearest(name, [*names, 'config', 'help'], 'did you mean --')}")
        if switch and not equals:
            text = argv.pop(0) if argv and argv[0].lower() in ("true", "false") else "true"
        elif not equals and (not argv or argv[0].startswith("--")):
            text = known[names[name]][2].get("bare") if name in names else None
        elif not equals:
            text = argv.pop(0)
        if text is None:
            raise UserError(f"--{name}: needs a value")
        if name != "config":
            value = None if known[names[name]][1] and text.lower() in ("none", "null") else text
            from_line[names[name]] = convert(value, known[names[name]], f"--{name}")
            continue
        lines = {}                                                          # of several files the later one wins
        for line, key, value in read_yaml(text):
            field = names.get(key.replace("-", "_"))
            if not field:
                raise UserError(f"{text}:{line}: unknown option {key}; {nearest(key, names)}")
            if field in lines:
                raise UserError(f"{text}:{line}: {key} is given twice, first in line {lines[field]}")
            lines[field] = line
            from_files[field] = convert(value, known[field], f"{text}:{line}: {key}")
    return config_class(**{**from_files, **from_line})


def help_text(config_class, description):
    """Usage, the first paragraph of the description, then the options by group: name, default, meaning."""
    default, groups = config_class(), {"": [("--config", "none", "YAML file of options; the command line wins")]}
    for name, (_, _, spec) in options(config_class).items():
        value = getattr(default, name)
        shown = ",".join(value) if isinstance(value, list) else str(value)
        words = [spec.get("help", ""), *(f"same as --{alias}" for alias in spec.get("aliases", ()))]
        words += ["one of " + ", ".join(map(str, spec["choices"]))] if spec.get("choices") else []
        row = f"--{name}", shown.lower() if value in (None, True, False) else shown or "''", "; ".join(words)
        groups.setdefault(spec.get("group", ""), []).append(row)
    left = 4 + max(len(name) for rows in groups.values() for name, _, _ in rows)
    middle = 2 + min(24, max(len(shown) for rows in groups.values() for _, shown, _ in rows))
    width = max(shutil.get_terminal_size().columns, left + middle + 40)
    out = [f"usage: python {os.path.basename(sys.argv[0])} [--config file.yaml] [--name value] [--no_switch]"]
    out += ["", (description or "").strip().split("\n\n")[0]]
    for group, rows in groups.items():
        out += ["", f"{group or 'options'}:"]
        for name, shown, words in rows:
            head = f"  {name}".ljust(left) + f"{shown}  ".ljust(middle)
            out.append(textwrap.fill(words, width, initial_indent=head, subsequent_indent=" " * (left + middle)))
    return "\n".join(out)


def main(config_class, train, doc):
    """Command line -> train(config). Exit status: 0; 2 after a UserError, told in one line; a Stop's code."""
    program = os.path.basename(sys.argv[0])
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")   # a model's words must not stop a run in an ASCII terminal
    try:
        with Signals():
            train(parse(config_class, sys.argv[1:], doc))
    except Stop as stop:
        print(f"{program}: {stop}", file=sys.stderr)
        sys.exit(stop.code)
    except UserError as error:
        print(f"{program}: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print(f"{program}: interrupted; the checkpoints that were written are whole", file=sys.stderr)
        sys.exit(130)


def mix(*parts):
    """A 63-bit seed, the same on every machine: all randomness here is mix(seed, step, task, sample)."""
    if any(type(part) not in (int, float, str, bool, type(None)) for part in parts):
        raise TypeError(f"mix takes plain numbers and texts, not {parts}")  # repr(np.int64(1)) is not repr(1)
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1


def peak_memory_mb():
    """Peak MiB so far: what torch allocated on the GPU once CUDA is in use, else the resident set of this process."""
    torch, status = sys.modules.get("torch"), Path("/proc/self/status")
    if torch and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 2**20
    if status.exists() and (found := re.search(r"VmHWM:\s+(\d+) kB", status.read_text())):
        return int(found[1]) / 2**10                    # ru_maxrss starts from the peak of the process that forked us
    import resource
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def finite(value):
    """The value as strict JSON holds it: non-finite floats become None, tensor and numpy scalars become numbers."""
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def to_json(value, indent=None):
    return json.dumps(finite(value), indent=indent, allow_nan=False) + "\n"


def replace_file(path, text):
    """Write a file whole or not at all."""
    temporary = path.with_name(f".tmp-{path.name}")
    try:
        temporary.write_text(text, encoding="utf-8", newline="\n")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def sync(path):
    """Flush a file or folder to the disk, so that a power cut after the rename finds what was renamed."""
    if os.name != "nt":
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def fingerprint(path):
    with open(path, "rb") as file:
        return {"bytes": os.path.getsize(path), "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


class Signals:
    """While open, in the main thread: the first SIGINT or SIGTERM ends the run where nothing is lost, a second at once.

    In the loop (`Run.begin` to `Run.last`) that is before the step's first update or at the end of the step; elsewhere
    it is here. The run that was made first inside takes part; runs made inside that run are only a part of it.
    """

    def __enter__(self):
        self.signum = self.run = None
        here = threading.current_thread() is threading.main_thread()
        self.before = {s: signal.signal(s, self.handle) for s in (signal.SIGINT, signal.SIGTERM) if here}
        return self

    def __exit__(self, *_):
        for signum, handler in self.before.items():
            signal.signal(signum, handler)

    def handle(self, signum, _):
        if self.signum:
            os._exit(128 + signum)
        self.signum = signum
        if not (self.run and self.run.looping):
            self.stop()
        os.write(2, b"\nstopping where nothing is lost; a second signal stops at once\n")  # print is not reentrant

    def stop(self):
        where = f" after step {self.run.step}; go on with: {self.run.command}" if self.run else ""
        raise Stop(f"stopped by {signal.Signals(self.signum).name}{where}", 128 + self.signum)


class Run:
    """The output folder of one run. Under torchrun every rank makes one and calls the same; only rank 0 writes.

    finished: what result.json holds if a finished run is resumed, else None. checkpoint: the one to go on from, or
    None. The loop calls `restore`, `begin`, in every step `check`, `may_update` and `end`, then `last` and `finish`.
    """

    def __init__(self, config, algorithm):
        """Raises UserError if a value is out of bounds, the folder cannot be written, is in use, or holds a run
        (config.overwrite removes that run and nothing else; config.resume goes on in it, if its config is the same).
        Make it before anything is put in `base/`."""
        import yaml  # arrives with transformers
        self.config, self.algorithm, self.folder = config, algorithm, Path(config.output_dir)
        self.writes = int(os.environ.get("RANK", 0)) == 0
        self.finished = self.checkpoint = self.state = self.saved = self.marks = self.score = None
        self.step, self.bad, self.looping, self.updated = 0, 0, False, False
        script = sys.argv[0] if os.path.basename(sys.argv[0]) == f"{algorithm}.py" else f"{algorithm}.py"
        self.command = shlex.join(["python", script, "--config", str(self.folder / OWNED[0]), "--resume"])
        values = {name: convert(getattr(config, name), o, f"--{name}") for name, o in options(type(config)).items()}
        resume = values.get("resume")
        handler = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
        self.signals = handler if isinstance(handler, Signals) and not handler.run else None
        if self.signals:
            self.signals.run = self
        if self.writes:
            self._enter(values)
        files = [path.strip() for name in DATA if values.get(name) for path in values[name].split(",")]
        self.data = {path: fingerprint(path) for path in files if os.path.isfile(path)}
        if resume and (self.folder / OWNED[0]).exists():
            self._go_on(values)
        elif resume:
            print(f"{self.folder}: nothing to resume, a new run begins")
        if not self.writes:
            return
        # in ASCII: what PyYAML writes for U+0085 under allow_unicode reads back as a space
        text = yaml.safe_dump({k: v for k, v in values.items() if k not in ONCE}, sort_keys=False)
        repeat = f"# {algorithm} run; `python {algorithm}.py --config {OWNED[0]} --output_dir elsewhere` repeats it\n"
        replace_file(self.folder / OWNED[0], repeat + text)

    def _enter(self, values):
        """Take the folder: writable, no other process's, and empty, to be emptied or to be gone on with."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / ".tmp-probe").write_text("x")
            (self.folder / ".tmp-probe").unlink()
        except (OSError, ValueError) as error:                              # ValueError: a NUL in the path
            reason = "is a file" if os.path.isfile(self.folder) else getattr(error, "strerror", error)
            raise UserError(f"{self.folder}: cannot write there ({reason}); give another --output_dir") from None
        self._lock()
        held = [name for name in OWNED if (self.folder / name).exists()]
        if held and values.get("overwrite"):
            for name, value in values.items():                              # never the model or data it starts from
                given = name != "output_dir" and isinstance(value, str) and os.path.exists(value)
                if given and Path(value).resolve().is_relative_to(self.folder.resolve()):
                    raise UserError(f"--{name} {value} lies in the folder to overwrite; give another --output_dir")
            for path in [*(self.folder / name for name in held), *self.folder.glob("bad_step_*.json")]:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        elif held and not values.get("resume"):
            what = self._written_by()
            if not what or (self.folder / "result.json").exists():
                raise UserError(f"{self.folder}: already holds {f'a {what} run' if what else held[0]}; give another "
                                "--output_dir, or --overwrite to replace it")
            steps = [int(path.name[5:]) for path in checkpoints(self.folder)]
            raise UserError(f"{self.folder}: already holds a {what} run, unfinished ("
                            f"{f'{steps[-1]} steps are saved' if steps else 'no step is saved'}); --resume goes on "
                            "with it, --overwrite replaces it, or give another --output_dir")

    def _lock(self):
        """Hold `.lock` until this process ends, however it ends: the kernel lets go. UserError: another holds it."""
        try:
            import fcntl
        except ImportError:                                                 # Windows
            return
        self.lock = open(self.folder / ".lock", "a+", encoding="utf-8")
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.lock.seek(0)
            pid = self.lock.read().strip()
            if pid != str(os.getpid()):                                     # a notebook may still hold its last run
                raise UserError(f"{self.folder}: process {pid or '?'} is running there; stop it, or give another "
                                "--output_dir") from None
        except OSError:                                                     # a file system without locks
            return
        self.lock.truncate(0)
        print(os.getpid(), file=self.lock, flush=True)

    def _written_by(self):
        """The algorithm of the run that the folder holds, or None."""
        try:
            first = (self.folder / OWNED[0]).read_text(encoding="utf-8").split("\n")[0]
        except OSError:
            return None
        found = re.match(r"# (\w+) run;", first)
        return found and found[1]

    def _go_on(self, values):
        """Find and check the checkpoint to go on from, and take back what was written after it."""
        if self._written_by() != self.algorithm:
            raise UserError(f"{self.folder}: holds a {self._written_by()} run, not one of {self.algorithm}")
        known = options(type(self.config))
        began = {name: convert(value, known[name], f"{self.folder / OWNED[0]}: {name}")
                 for _, name, value in read_yaml(self.folder / OWNED[0]) if name in known and name not in FREE}
        other = {name: old for name, old in began.items() if old != values[name]}
        if grown := None not in (more := (other.get("max_steps"), values.get("max_steps"))) and more[1] > more[0]:
            del other["max_steps"]
        if other:
            told = ", ".join(f"--{name} is {values[name]} and was {old}" for name, old in other.items())
            raise UserError(f"{self.folder}: --resume goes on with the run as it began (max_steps may grow), but {told}"
                            f"; the same command: {self.command}")
        result = self.folder / "result.json"
        if result.exists() and not grown:
            self.finished = json.loads(result.read_text(encoding="utf-8"))
            print(f"{self.folder}: finished after {self.finished['steps']} steps; a larger --max_steps goes on")
            return
        if self.writes:
            result.unlink(missing_ok=True)
            for path in (self.folder / "checkpoints").glob(".was-*"):       # killed between two renames
                if not path.with_name(path.name[5:]).exists():
                    path.rename(path.with_name(path.name[5:]))
            for pattern in (".tmp-*", "checkpoints/.tmp-*", "checkpoints/.old-*", "checkpoints/.was-*"):
                for path in self.folder.glob(pattern):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        found = checkpoints(self.folder)
        if values["resume"] == "previous":
            if len(found) < 2:
                raise UserError(f"{self.folder}: no previous checkpoint to resume; use --resume")
            if self.writes:
                self._remove(found[-1])
            found = found[:-1]
        if found:
            self.checkpoint = found[-1]
            try:
                self.state = read_state(self.checkpoint)
            except UserError as error:
                mend = (f"--resume previous goes on from {found[-2].name}" if found[1:] else
                        "there is no earlier one: --overwrite starts anew")
                raise UserError(f"{error}; {mend}") from None
            for path, expected in self.state["data"].items():
                if self.data.get(path) != expected:
                    raise UserError(f"{path}: is not the file this run began with (then {expected['bytes']} bytes)")
            for name, then in self.state["versions"].items():
                if version(name) != then:
                    print(f"note: {name} is {version(name)}, the checkpoint is of {then}: numbers may differ a little")
        for name in LINES if self.writes else ():
            path, mark = self.folder / name, self.state["lines"].get(name, 0) if self.state else 0
            if path.exists() and path.stat().st_size >= mark:
                os.truncate(path, mark)                                     # later steps, and a line cut by a kill
            elif mark:
                print(f"note: {path} has lost lines that this run had written")
        print(f"{self.folder}: goes on after step {self.state['step']}" if self.state else
              f"{self.folder}: no step is saved, begins again")

    @contextmanager
    def _room(self, what, needed):
        """A full disk becomes a Stop with both numbers."""
        try:
            yield
        except Exception as error:  # safetensors and tokenizers have errors of their own, with the number in the text
            if getattr(error, "errno", None) not in FULL and not re.search(r"os error (27|28|122)\b", str(error)):
                raise
            raise Stop(f"{what}: cannot be written, it needs {needed} bytes and {shutil.disk_usage(self.folder).free} "
                       f"are free ({str(error).strip()}); earlier checkpoints are whole; make room, then: "
                       f"{self.command}", 4) from None

    def append(self, name, rows):
        if self.writes:
            text = "".join(map(to_json, rows))
            with self._room(self.folder / name, len(text)):
                with open(self.folder / name, "a", encoding="utf-8", newline="\n") as file:
                    file.write(text)

    def log(self, step, metrics, timing):
        """metrics: what is a function of the seed; timing: what a clock decides. Both flat; NaN and inf become null."""
        self.append("metrics.jsonl", [{"step": step, **metrics}])
        self.append("timing.jsonl", [{"step": step, **timing}])

    def trajectories(self, step, items):
        self.append("trajectories.jsonl", ({"step": step, **item.to_json()} for item in items))

    def restore(self, load_weights, optimizer, named_parameters):
        """Weights and optimizer of the checkpoint to go on from -> its step and the `extra` it was saved with.

        0 and {} in a new run. Call it where the model is still the one this run started from and all that is derived
        from that (reference, base) is taken. Stop: too little room for the checkpoints to come.
        """
        if self.checkpoint:
            load_weights(self.checkpoint)
            load_optimizer(optimizer, named_parameters, self.checkpoint / "optimizer.safetensors")
            self.step, self.saved, self.bad = self.state["step"], self.state["step"], self.state["bad"]
        trained = sum(p.numel() * p.element_size() for group in optimizer.param_groups for p in group["params"])
        needed = 3 * trained * max(3 - len(checkpoints(self.folder)), 1)    # each: weights and AdamW's two moments
        if self.writes and shutil.disk_usage(self.folder).free < needed:
            raise Stop(f"{self.folder}: checkpoints need {needed} bytes and {shutil.disk_usage(self.folder).free} are "
                       "free; make room, or give another --output_dir", 4)
        return (self.step, self.state["extra"]) if self.checkpoint else (0, {})

    def begin(self, save):
        """The loop begins; save(step) calls `Run.save` with the weights as they then are."""
        self.make, self.looping, self.marks = save, True, self._sizes()

    def check(self):
        """Between turns and between micro-batches: leaves, if a signal came and this step changed no weight yet."""
        if self.signals and self.signals.signum and not self.updated:
            if self.saved != self.step:
                self.make(self.step)
            self.signals.stop()

    def may_update(self, step, episodes, loss, grad_norm):
        """Whether loss and gradient norm are finite; if so, a signal from now on waits for the end of the step.

        If not, the update is to be skipped: it would spoil the weights for good. The step's episodes go into
        bad_step_N.json; Stop at the third in a row.
        """
        self.check()
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self.bad, self.updated = 0, True
            return True
        self.bad += 1
        path = self.folder / f"bad_step_{step}.json"
        if self.writes:
            replace_file(path, to_json({"step": step, "loss": str(loss), "grad_norm": str(grad_norm), "episodes": [
                {"reward": str(t.reward), "group_id": t.group_id, "tokens": len(t.token_ids), "token_ids": t.token_ids}
                for t in episodes]}, indent=1))
        print(f"step {step}: loss {loss}, gradient norm {grad_norm}: no update; its episodes are in {path}")
        if self.bad == 3:
            raise Stop("three updates in a row were not finite; lower --learning_rate, or look at the rewards in "
                       f"{path}; another run can start from this one's checkpoints: --model_path {self.folder}", 3)
        return False

    def end(self, step, score=None):
        """`step` steps are done and logged: the weights are saved if it is time to, or if a signal came, which ends it.

        score: of the weights, by held-out tasks; the best checkpoint is kept.
        """
        self.step, self.updated, self.score, self.marks = step, False, score, self._sizes()
        if self.config.save_every and step % self.config.save_every == 0 and step != self.saved:
            self.make(step)
        self.check()

    def last(self, step):
        """The loop is over: the checkpoint of its last step."""
        self.step = step
        path = self.folder / "checkpoints" / f"step_{step:06d}"
        if self.saved != step:
            self.make(step)
        self.looping = False
        self.check()
        return path

    def _sizes(self):
        return {name: (self.folder / name).stat().st_size for name in LINES if (self.folder / name).exists()}

    @staticmethod
    def _remove(path):
        old = path.with_name(f".old-{path.name}")
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
        shutil.rmtree(old)

    def save(self, step, save_model, tokenizer=None, optimizer=None, extra=None):
        """Write checkpoints/step_NNNNNN whole or not at all, and return its path; the last two and the best are kept.

        save_model(folder) writes the weights; optimizer is what `optimizer_tensors` returns; extra: into state.json.
        """
        path, self.saved = self.folder / "checkpoints" / f"step_{step:06d}", step
        if not self.writes:
            return path
        temporary, was = path.with_name(f".tmp-{path.name}"), path.with_name(f".was-{path.name}")
        shutil.rmtree(temporary, ignore_errors=True)
        needed = sum(tensor.nbytes for tensor in (optimizer or {}).values()) * 3 // 2       # and the weights
        try:
            with self._room(path, needed):
                temporary.mkdir(parents=True)
                save_model(temporary)
                if tokenizer is not None:
                    tokenizer.save_pretrained(temporary)
                if optimizer is not None:
                    from safetensors.torch import save_file
                    save_file(optimizer, temporary / "optimizer.safetensors")
                files = sorted(file for file in temporary.rglob("*") if file.is_file())
                for file in files:
                    shutil.copymode(self.folder / OWNED[0], file)           # safetensors leaves 0600
                    sync(file)
                lines = self._sizes() if self.marks is None else self.marks
                for name in lines:
                    sync(self.folder / name)
                state = {"step": step, "algorithm": self.algorithm, "extra": extra, "score": self.score,
                         "bad": self.bad, "lines": lines, "data": self.data,
                         "versions": {name: version(name) for name in ("torch", "transformers")},
                         "files": {file.relative_to(temporary).as_posix(): fingerprint(file) for file in files}}
                replace_file(temporary / "state.json", to_json(state, indent=1))
                for name in {temporary / "state.json", *(file.parent for file in files), temporary}:
                    sync(name)
            if path.exists():
                shutil.rmtree(was, ignore_errors=True)
                path.rename(was)
            temporary.rename(path)
            sync(path.parent)
            shutil.rmtree(was, ignore_errors=True)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        scores = {}
        for old in checkpoints(self.folder):
            try:
                scores[old] = json.loads((old / "state.json").read_text(encoding="utf-8"))["score"]
            except (OSError, ValueError, KeyError):
                scores[old] = None
        best = max((old for old in scores if scores[old] is not None), key=scores.get, default=None)
        for old in list(scores)[:-2]:
            if old not in (best, path):
                self._remove(old)
        return path

    def finish(self, result):
        """Write result.json and report.html, return the result: every key of RESULT, None where there is no number."""
        missing = [key for key in RESULT if key not in result]
        assert not missing, f"result lacks {missing}"
        if self.writes:
            replace_file(self.folder / "result.json", to_json(result, indent=1))
            from view import write_html  # view imports run
            try:
                write_html(self.folder, quiet=True)
            except (UserError, OSError) as error:               # a page must not fail a run
                print(f"report.html: {error}", file=sys.stderr)
        return finite(result)


def checkpoints(output_dir):
    """All checkpoints/step_NNNNNN, the newest last."""
    found = [path for path in Path(output_dir).glob("checkpoints/step_*") if path.name[5:].isdecimal()]
    return sorted(found, key=lambda path: int(path.name[5:]))


def newest_checkpoint(output_dir):
    """The checkpoints/step_NNNNNN of the highest step that has its state.json, or None."""
    return next((path for path in reversed(checkpoints(output_dir)) if (path / "state.json").exists()), None)


def read_state(checkpoint):
    """state.json as a dict, after comparing every file with the size and sha256 in it. UserError names the file."""
    try:
        state = json.loads((Path(checkpoint) / "state.json").read_text(encoding="utf-8"))
        for name, expected in state["files"].items():
            found = fingerprint(Path(checkpoint) / name)
            if found != expected:
                what = f"{found['bytes']} bytes, state.json says {expected['bytes']}"
                what = "sha256 differs from state.json" if found["bytes"] == expected["bytes"] else what
                raise UserError(f"{checkpoint}/{name}: damaged ({what})")
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{checkpoint}: not a whole checkpoint ({error})") from None
    return state


def optimizer_tensors(optimizer, named_parameters):
    """Every state tensor (exp_avg, exp_avg_sq, step, ...) as {"parameter name|key": CPU tensor}, for `Run.save`.

    A plain number becomes a 0-dim tensor. CPU tensors are the optimizer's own, not copies. The learning rate is left
    out: it is a function of the step.
    """
    import torch
    names, tensors = {p: name for name, p in named_parameters}, {}
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        tensors[f"{names[p]}|"] = torch.empty(0)                            # known, though perhaps without a state yet
        for key, value in optimizer.state.get(p, {}).items():
            tensors[f"{names[p]}|{key}"] = torch.as_tensor(value).detach().cpu().contiguous()
    return tensors


def load_optimizer(optimizer, named_parameters, path):
    """Give each parameter the state saved under its name, in the saved dtype. Raises UserError naming a missing one."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file
    try:
        saved = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: not an optimizer file ({error})") from None
    names, states = {p: name for name, p in named_parameters}, {}
    here = {names[p]: (p, group) for group in optimizer.param_groups for p in group["params"]}
    for key, value in saved.items():
        name, _, key = key.rpartition("|")
        states.setdefault(name, {}).update({key: value} if key else {})
    for name in sorted(here.keys() ^ states.keys()):
        raise UserError(f"{path}: has no state for {name}" if name in here else f"{path}: {name} is not trained here")
    for name, (p, group) in here.items():
        for key, value in states[name].items():
            if "exp_avg" in key and value.shape != p.shape:
                raise UserError(f"{path}: {name} was {tuple(value.shape)}, here it is {tuple(p.shape)}")
            on_cpu = key == "step" and not (group.get("capturable") or group.get("fused"))       # as torch keeps it
            optimizer.state[p][key] = value if on_cpu else value.to(p.device)
