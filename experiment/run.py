"""The lab notebook: a run becomes a folder, from which it goes on as if it had never stopped.

The folder is one process's at a time; a checkpoint in it is whole or absent. Leaving, whatever the reason, is a `Stop`
with the command to go on. Only the standard library is imported here, so that `--help` answers at once.
"""
import errno
import hashlib
import math
import os
import re
import shlex
import shutil
import signal
import sys
import threading
import time
from collections import deque
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from experiment.checkpoint import (  # noqa: F401  # some only for those who import them from here
    checkpoints,
    fingerprint,
    finite,
    load_optimizer,
    newest_checkpoint,
    optimizer_tensors,
    read_state,
    remove,
    replace_file,
    sync,
    to_json,
)
from experiment.closing import first_lesson, next_command, print_table
from experiment.command_line import parse
from experiment.config import convert, flag, nearest, options  # noqa: F401
from experiment.data import lines_of, parse_object, read_json, read_text, read_yaml, reading
from experiment.distributed import join
from experiment.errors import Stop, UserError

LINES = ("metrics.jsonl", "timing.jsonl", "trajectories.jsonl")             # one object with a "step" per line
OWNED = ("config.yaml", *LINES, "result.json", "report.html", "checkpoints", "base")      # what --overwrite removes
ONCE = ("overwrite", "resume", "resume_anyway")     # permissions for one call, so not in config.yaml
FREE = (*ONCE, "output_dir", "save_every")                                  # may differ when a run is resumed
HARMLESS = ("batch_size", "gradient_accumulation_steps", "gradient_checkpointing", "offload_activations", "mlp_tokens",
            "stream_layers", "memory_mb", "slots", "tool_timeout", "save_trajectories", "eval_every")  # with permission
DATA = ("dataset", "eval_dataset", "trajectories")                          # files that may not
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
WINDOW = 5                                                                  # lines of the log that `alarms` compares
RESULT = ("success_before", "success_after", "seconds", "peak_memory_mb", "steps", "seed")


def main(config_class, train, doc):
    """Command line -> train(config). Exit status: 0; 2 after a UserError, told in one line; a Stop's code."""
    program = os.path.basename(sys.argv[0]) + (f": rank {rank}" if (rank := os.environ.get("RANK", "0")) != "0" else "")
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")   # a model's words must not stop a run in an ASCII terminal
    words, code = "", 0
    try:
        with Signals() as signals:
            train(parse(config_class, sys.argv[1:], doc))
    except Stop as stop:
        words, code = str(stop), stop.code
    except UserError as error:
        words, code = " ".join(str(error).split()), 2
    except Exception as error:                          # RuntimeError: how torch says it of a CPU
        if type(error).__name__ != "OutOfMemoryError" and "can't allocate memory" not in str(error):
            raise
        where = f", step {signals.run.step}" if signals.run else ""
        reason = str(error).strip().splitlines()[0][:200]
        words, code = (f"out of memory{where}, peak {peak_memory_mb():.0f} MB: {reason} "
                       "A smaller --batch_size (outside grpo with more --gradient_accumulation_steps) gives the same "
                       "result with less memory"), 1
    except KeyboardInterrupt:
        words, code = "interrupted; the checkpoints that were written are whole", 130
    if words:
        print(f"{program}: {words}", file=sys.stderr)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:        # gloo's threads may abort its orderly end
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)
    if code:
        sys.exit(code)


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
        words = f"stopped by {signal.Signals(self.signum).name}"
        raise Stop(f"{words}{self.run.how_to_go_on()}" if self.run else words, 128 + self.signum)


class Run:
    """The output folder of one run. Under torchrun every rank makes one and calls the same; only rank 0 writes.

    ranks: who does what (ranks.py). finished: what result.json holds if a finished run is resumed, else None.
    checkpoint: the one to go on from, or None. The loop is `with run:` around `for step in run.steps(...)`;
    in it stand `log`, `micro_batches`, `accept_rewards` and `accept_update`; `finish` comes last.
    """

    def __init__(self, config, algorithm):
        """Raises UserError if a value is out of bounds, the folder cannot be written, is in use, or holds a run
        (config.overwrite removes that run and nothing else; config.resume goes on in it, if its config is the same).
        Make it before anything is put in `base/`."""
        self.config, self.algorithm, self.folder = config, algorithm, Path(config.output_dir)
        values = {name: convert(getattr(config, name), o, f"--{name}") for name, o in options(type(config)).items()}
        self.ranks = join()
        self.writes, self.saved, self.marks, self.score = self.ranks.rank == 0, None, None, None
        self.step, self.bad, self.looping, self.updated = 0, 0, False, False
        self.early, self.late, self.told = [], deque(maxlen=WINDOW), set()       # lines of the log, for `alarms`
        handler = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
        self.signals = handler if isinstance(handler, Signals) and not handler.run else None
        if self.signals:
            self.signals.run = self
        if not self.ranks.runs:
            self.ranks.leave = self._leave
        self.ranks.runs += 1
        self.finished, self.checkpoint, self.state = self.ranks.first(lambda: self._open(values)) or (None, None, None)
        self.ranks.runs -= self.finished is not None

    @property
    def command(self):
        """What goes on with this run."""
        name = f"{self.algorithm}.py"
        words = [sys.argv[0] if os.path.basename(sys.argv[0]) == name else name]
        if self.ranks.world > 1:
            local = os.environ.get("LOCAL_WORLD_SIZE", self.ranks.world)
            nodes = os.environ.get("GROUP_WORLD_SIZE", "1")
            where = f"--rdzv_backend=c10d --rdzv_endpoint={os.environ['MASTER_ADDR']}:29500"
            words = [f"--nproc_per_node={local}", *words]
            words = [f"--nnodes={nodes}", *where.split(), *words] if nodes != "1" else words
        program = "python" if self.ranks.world == 1 else "torchrun"
        return shlex.join([program, *words, "--config", str(self.folder / OWNED[0]), "--resume"])

    def _open(self, values):
        """On rank 0: take the folder -> finished, checkpoint, its state."""
        import yaml  # arrives with transformers
        if values.get("overwrite") and (values.get("resume") or values.get("resume_anyway")):
            raise UserError("--resume goes on with a run and --overwrite removes it; give one of them")
        if values.get("resume_anyway"):
            values["resume"] = values["resume"] or "newest"
        self._enter(values)
        files = [path.strip() for name in DATA if values.get(name) for path in values[name].split(",")]
        model = values.get("model_path")
        self.model = str((newest_checkpoint(model) if model and os.path.isdir(model) else None) or model)
        self.data = {path: fingerprint(path) for path in files if os.path.isfile(path)}
        found = None, None, None
        if values.get("resume") and (self.folder / OWNED[0]).exists():
            found = self._go_on(values)
        elif values.get("resume"):
            print(f"{self.folder}: nothing to resume, a new run begins")
        # in ASCII: what PyYAML writes for U+0085 under allow_unicode reads back as a space
        text = yaml.safe_dump({k: v for k, v in values.items() if k not in ONCE}, sort_keys=False)
        again = f"`python {self.algorithm}.py --config {OWNED[0]} --output_dir elsewhere` repeats it"
        replace_file(self.folder / OWNED[0], f"# {self.algorithm} run; {again}\n{text}")
        return found

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
        elif held and not values.get("resume") and not (held == ["config.yaml"] and self._written_by()):  # nothing done
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
        path = self.folder / OWNED[0]
        found = re.match(r"# (\w+) run;", read_text(path)) if path.exists() else None
        return found and found[1]

    def _go_on(self, values):
        """Find and check the checkpoint to go on from, and take back what was written after it."""
        if not self._written_by():
            raise UserError(f"{self.folder / OWNED[0]}: is not what a run has written; mend it, or give --overwrite")
        if self._written_by() != self.algorithm:
            raise UserError(f"{self.folder}: holds a {self._written_by()} run, not one of {self.algorithm}")
        known = options(type(self.config))
        began = {name: convert(value, known[name], f"{self.folder / OWNED[0]}: {name}")
                 for _, name, value in read_yaml(self.folder / OWNED[0]) if name in known and name not in FREE}
        other = {name: old for name, old in began.items() if old != values[name]}
        if grown := None not in (more := (other.get("max_steps"), values.get("max_steps"))) and more[1] > more[0]:
            del other["max_steps"]
        told = ", ".join(f"--{name} is {values[name]} and was {old}" for name, old in other.items())
        sizes = [at["batch_size"] * at["gradient_accumulation_steps"] if at.get("gradient_accumulation_steps") else 0
                 for at in ({**values, **began}, values)]                   # of a step, where these two decide it
        harmless = other.keys() <= {*HARMLESS} and sizes[0] == sizes[1]
        if other and harmless and values.get("resume_anyway"):
            print(f"note: {told}: from here on this run differs, at least by rounding, from one that was never stopped")
        elif other:
            raise UserError(f"{self.folder}: --resume goes on with the run as it began (max_steps may grow), but {told}"
                            f"; the same command: {self.command}{'; or --resume_anyway' if harmless else ''}")
        result = self.folder / "result.json"
        if result.exists() and not grown:
            finished = read_json(result)
            with reading(result):
                steps = finished["steps"]
            print(f"{self.folder}: finished after {steps} steps; a larger --max_steps goes on")
            return finished, None, None
        for path in (self.folder / "checkpoints").glob(".was-*"):           # killed between two renames
            if not path.with_name(path.name[5:]).exists():
                path.rename(path.with_name(path.name[5:]))
        for pattern in (".tmp-*", "checkpoints/.tmp-*", "checkpoints/.old-*", "checkpoints/.was-*"):
            for path in self.folder.glob(pattern):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        found, state = checkpoints(self.folder), None
        previous = values["resume"] == "previous"
        if previous and len(found) < 2:
            raise UserError(f"{self.folder}: no previous checkpoint to resume; use --resume")
        found, newer = (found[:-1], found[-1:]) if previous else (found, [])
        if found:
            try:
                state = read_state(found[-1])
            except UserError as error:
                mend = (f"--resume previous goes on from {found[-2].name}" if found[1:] and not previous else
                        "there is no other one to go on from: --overwrite starts anew")
                raise UserError(f"{error}; {mend}") from None
            if state.get("model", self.model) != self.model:        # another start and reference
                raise UserError(f"--model_path {self.config.model_path}: has a newer checkpoint than the one this run "
                                f"began with, {state['model']}; move it away, or begin anew from either")
            for path, expected in state["data"].items():
                if self.data.get(path) != expected:
                    raise UserError(f"{path}: is not the file this run began with (then {expected['bytes']} bytes)")
            for name, then in state["versions"].items():
                if version(name) != then:
                    print(f"note: {name} is {version(name)}, the checkpoint is of {then}: numbers may differ a little")
        for path in newer:                                                  # not before the previous one proved whole
            remove(path)
        result.unlink(missing_ok=True)
        for name in LINES:
            path, mark = self.folder / name, state["lines"].get(name, 0) if state else 0
            if path.exists() and path.stat().st_size >= mark:
                os.truncate(path, mark)                                     # later steps, and a line cut by a kill
            elif mark:
                print(f"note: {path} has lost lines that this run had written")
        for path in self.folder.glob("bad_step_*.json"):
            if not state or int(path.stem[9:]) >= state["step"]:
                path.unlink()
        print(f"{self.folder}: goes on after step {state['step']}" if state else
              f"{self.folder}: no step is saved, begins again")
        return None, found[-1] if found else None, state

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

    # -------------------------------------------------------------------------------- what a training loop calls
    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        """Save the last whole step, whatever ends the loop. A `Stop` has saved already."""
        if error is not None and not isinstance(error, Stop):
            self._save_last_whole_step()

    def _save_last_whole_step(self):
        if self.looping and not self.updated and self.saved != self.step:
            self.make(self.step)

    def learning_rate(self, step):
        """Return the learning rate of a step: a linear warm-up, and a linear decay to a tenth of the peak."""
        warmup = min(1.0, (step + 1) / max(self.config.warmup_steps, 1))
        return self.config.learning_rate * warmup * (1 - 0.9 * step / max(self.total, 1))

    def steps(self, total, state, evaluate, evaluate_before=True):
        """Yield the numbers of the steps that are still to be done, and look after everything around them.

        Before the first: the checkpoint to resume from is loaded, or the policy is evaluated. Before each: the
        optimizer gets the step's learning rate. After each: the held-out evaluation if it is due, the step's lines in
        metrics.jsonl and timing.jsonl, a checkpoint if it is due.

        Args:
            total: steps of the whole run; the learning rate's schedule has this length.
            state: the `TrainingState` that checkpoints hold.
            evaluate: returns the metrics of held-out tasks as a dict, {} if there are none.
            evaluate_before: False if the policy is not worth evaluating before the first step.
        """
        from tqdm import tqdm
        self.total = total
        start, saved = self.restore(state.load_weights, state.optimizer, state.model.named_parameters())
        if saved:
            self.before = saved["before"]
        else:
            self.before = evaluate() if evaluate_before else {}
        self.began = time.time() - saved.get("seconds", 0.0)
        if note := first_lesson(self.before, self.config):
            print(note)
        self.begin(lambda step: self.save(
            step, state.save_weights, state.tokenizer,
            optimizer_tensors(state.optimizer, state.model.named_parameters()),
            {"before": self.before, "seconds": time.time() - self.began}))
        bar = tqdm(range(start, total), self.algorithm, initial=start, total=total, disable=not total)
        for step in bar:
            self.line, self.rollout_seconds, began = {"learning_rate": self.learning_rate(step)}, 0.0, time.time()
            for group in state.optimizer.param_groups:
                group["lr"] = self.line["learning_rate"]
            yield step
            timing = self._timing(time.time() - began)
            if self.config.eval_every and (step + 1) % self.config.eval_every == 0:
                self.line.update({f"eval/{name}": value for name, value in evaluate().items()})
            self.write_line(step, self.line, timing)
            bar.set_postfix({name: f"{self.line[name]:.3f}" for name in ("success", "loss") if name in self.line})
            self.end(step + 1, self.line.get("eval/success"))
        self.training_seconds = time.time() - self.began
        self.last(total)
        self.after = evaluate()

    def total_steps(self, steps_per_epoch, default=None):
        """Return --max_steps, else the steps of --num_epochs passes over the data, else the default."""
        if self.config.max_steps is not None:
            return self.config.max_steps
        if self.config.num_epochs is None:
            return default
        return self.config.num_epochs * max(1, steps_per_epoch)

    def _timing(self, seconds):
        """Seconds, tokens per second and peak memory of the step that ends now."""
        update = seconds - self.rollout_seconds
        timing = {"seconds": seconds, "update_seconds": update, "peak_memory_mb": peak_memory_mb()}
        episodes = self.line.get("episodes", 0)
        if self.rollout_seconds and episodes:
            timing["rollout_seconds"] = self.rollout_seconds
            timing["rollout_tokens_per_second"] = self.line["sampled_tokens"] * episodes / self.rollout_seconds
            timing["update_tokens_per_second"] = self.line["tokens"] * episodes / update
        return timing

    def log(self, **metrics):
        """Add numbers to the step's line of metrics.jsonl; a later number of the same name replaces an earlier one."""
        self.line.update(metrics)

    def log_episodes(self, trajectories):
        """Append the first `save_trajectories` episodes of the step to trajectories.jsonl."""
        self.trajectories(self.step, trajectories[:self.config.save_trajectories])

    def micro_batches(self, batch, *seed):
        """Yield this rank's micro-batches of a list of episodes, as an index of its right-padded (B, T) tensors.

        The index takes the micro-batch's rows and as many columns as its longest episode has. `seed` names the pass:
        each micro-batch of it draws its own dropout.
        """
        import torch
        for rows in self.ranks.micro_batches(len(batch), self.config.batch_size):
            self.check()
            torch.manual_seed(mix(self.config.seed, "dropout", *seed, rows.start))
            yield rows, slice(0, max(len(t.token_ids) for t in batch[rows]))

    def finish(self, next_step="agent.py", **extra):
        """Write result.json and report.html, print the held-out table and what to do next, and return the result.

        Args:
            next_step: the program to continue with, "agent.py" to look at the episodes, "grpo.py" after SFT.
            extra: further entries of result.json.
        """
        print_table(self.before, self.after, self.total, self.training_seconds)
        words = ["--num_tasks", "3"] if next_step == "agent.py" and self.config.env else []
        print(f"written: {self.folder}\nnext:    {next_command(next_step, self.config, *words)}")
        return self.write_result({
            "success_before": self.before.get("success"), "success_after": self.after.get("success"),
            "steps": self.total, "seed": self.config.seed, "seconds": time.time() - self.began,
            "peak_memory_mb": peak_memory_mb(), **extra})

    def append(self, name, rows):
        if self.writes:
            text = "".join(map(to_json, rows))
            with self._room(self.folder / name, len(text)):
                with open(self.folder / name, "a", encoding="utf-8", newline="\n") as file:
                    file.write(text)

    def write_line(self, step, metrics, timing):
        """Append a step's line to metrics.jsonl (a function of the seed) and to timing.jsonl (what a clock decides).

        Both are flat; NaN and inf become null.
        """
        self.append("metrics.jsonl", [{"step": step, **metrics}])
        self.append("timing.jsonl", [{"step": step, **timing}])
        self._heed(metrics)
        for kind, line in alarms(self.early, self.late).items() if len(self.early) == WINDOW else ():
            if kind not in self.told:
                self.told.add(kind)
                print(f"ALARM, step {step}: {line}")

    def _heed(self, metrics):
        if len(self.early) < WINDOW:
            self.early.append(metrics)
        self.late.append(metrics)

    def trajectories(self, step, items):
        self.append("trajectories.jsonl", ({"step": step, **item.to_json()} for item in items))

    def restore(self, load_weights, optimizer, named_parameters):
        """Weights and optimizer of the checkpoint to go on from -> its step and the `extra` it was saved with.

        0 and {} in a new run. Call it where the model is still the one this run started from and all that is derived
        from that (reference, base) is taken. Stop: too little room for the checkpoints to come.
        """
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        self.ranks.check_alike(trained)
        if self.checkpoint:
            load_weights(self.checkpoint)
            load_optimizer(optimizer, named_parameters, self.checkpoint / "optimizer.safetensors")
            self.step, self.saved, self.bad = self.state["step"], self.state["step"], self.state["bad"]
            if (self.folder / LINES[0]).exists():
                for number, line in lines_of(self.folder / LINES[0]):
                    with reading(self.folder / LINES[0], number):
                        self._heed(parse_object(line))
        size = sum(p.numel() * p.element_size() for p in trained)
        self.ranks.first(lambda: self._check_room(3 * size * max(3 - len(checkpoints(self.folder)), 1)))
        return (self.step, self.state["extra"]) if self.checkpoint else (0, {})

    def _check_room(self, needed):                                          # each: weights and AdamW's two moments
        if (free := shutil.disk_usage(self.folder).free) < needed:
            raise Stop(f"{self.folder}: checkpoints need {needed} bytes and {free} are free; "
                       "make room, or give another --output_dir", 4)

    def begin(self, save):
        """The loop begins; save(step) calls `Run.save` with the weights as they then are."""
        self.make, self.looping, self.marks = save, True, self._sizes()

    def check(self):
        """Between decode steps and micro-batches: leaves, if a signal came or a rank is gone, and this step changed no
        weight yet."""
        if self.signals and self.signals.signum or self.ranks.gone:
            self.ranks.leave()

    def _leave(self):
        """Save, if the weights are those of a step's end, and stop. Of runs within runs the outermost does."""
        if self.updated and not self.ranks.gone:
            return                                                          # `end` will call again
        self.ranks.runs = 0                                                 # or a slow save would be cut short
        if self.looping and not self.updated and self.saved != self.step:
            self.make(self.step)
        gone = f"{self.ranks.gone} is gone; " if self.ranks.gone else ""
        name = self.signals and self.signals.signum and signal.Signals(self.signals.signum).name
        raise Stop(f"{gone}{f'stopped by {name}' if name else 'stopped'}{self.how_to_go_on()}",
                   128 + self.signals.signum if name else 5)

    def how_to_go_on(self):
        return f" after step {self.step}; go on with: {self.command}"

    def accept_rewards(self, episodes):
        """True if there are episodes and all their rewards are finite; if not, the step is to be skipped."""
        if not episodes:
            return False
        odd = next((t for t in episodes if not math.isfinite(t.reward)), None)
        return not odd or self._skip(self.step, episodes, odd.info.get("not_finite", f"reward {odd.reward}"))

    def accept_update(self, episodes, loss, grad_norm):
        """Whether loss and gradient norm are finite; if so, a signal from now on waits for the end of the step.

        If not, the update is to be skipped: it would spoil the weights for good. The step's episodes go into
        bad_step_N.json; Stop at the third in a row.
        """
        if self.ranks.world == 1:               # ranks that wait in a collective hear of signals at different moments
            self.check()
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self.bad, self.updated = 0, True
            return True
        return self._skip(self.step, episodes, f"loss {loss}, gradient norm {grad_norm}")

    def _skip(self, step, episodes, why):
        self.bad += 1
        path = self.folder / f"bad_step_{step}.json"
        if self.writes:
            replace_file(path, to_json({"step": step, "why": why, "episodes": [
                {"group_id": t.group_id, "reward": str(t.reward), "tokens": len(t.token_ids), "token_ids": t.token_ids,
                 "task": t.info.get("task"), "stop_reason": t.stop_reason} for t in episodes]}, indent=1))
        print(f"step {step}: {why}: skipped; its episodes are in {path}")
        if self.bad >= 3:
            if self.looping and not self.updated and self.saved != self.step:
                self.make(self.step)                                        # what was good before
            raise Stop(f"step {step}: {why}: the third update in a row that is not finite; lower --learning_rate, or "
                       f"look at the rewards in {path}; another run can start from this one's checkpoints: "
                       f"--model_path {self.folder}", 3)
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
                         "bad": self.bad, "lines": lines, "data": self.data, "model": self.model,
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
                scores[old] = read_json(old / "state.json").get("score")
            except UserError:
                scores[old] = None
        best = max((old for old in scores if scores[old] is not None), key=scores.get, default=None)
        for old in list(scores)[:-2]:
            if old not in (best, path):
                remove(old)
        return path

    def write_result(self, result):
        """Write result.json and report.html, return the result: every key of RESULT, None where there is no number."""
        missing = [key for key in RESULT if key not in result]
        assert not missing, f"result lacks {missing}"
        result = self.ranks.first(lambda: self._write(finite(result)))
        self.ranks.runs -= 1
        return result

    def _write(self, result):
        replace_file(self.folder / "result.json", to_json(result, indent=1))
        from experiment.report import write_html
        try:
            write_html(self.folder, quiet=True)
        except (UserError, OSError) as error:                   # a page must not fail a run
            print(f"report.html: {error}", file=sys.stderr)
        return result


def alarms(early, late):
    """What the means of a run's first and of its latest lines say has collapsed, and what people do then: {kind: line}.

    Learning moves these numbers too: where success has grown, or is above 0.9, some of them say nothing.
    """
    def mean(rows, name):
        values = [row[name] for row in rows if isinstance(row.get(name), (int, float))]
        return sum(values) / len(values) if values else math.nan               # NaN compares false: no alarm

    def was_and_is(name):
        return mean(early, name), mean(late, name)
    out, (before, success) = {}, was_and_is("success")
    better = success > before + 0.05
    was, now = was_and_is("entropy")
    if now < 0.3 * was and not success > 0.9:
        out["entropy"] = (f"entropy fell from {was:.3g} to {now:.3g} nats a token, the policy hardly explores; "
                          "people lower --learning_rate, raise --entropy_coef or --kl_coef, or --clip_eps_high 0.28")
    if now > max(3 * was, 0.5):
        out["noise"] = (f"entropy rose from {was:.3g} to {now:.3g} nats a token, sampling turns to noise; "
                        "people lower --learning_rate or --entropy_coef, or raise --kl_coef")
    if (now := mean(late, "approx_kl")) > 0.1:
        out["approx_kl"] = (f"updates move the policy {now:.3g} nats a token away from the sampler; "
                            "people lower --learning_rate or --updates_per_step")
    if (now := mean(late, "kl")) > 0.5:
        out["kl"] = (f"KL to the policy this run started from is {now:.3g} nats a token; "
                     "people raise --kl_coef or lower --learning_rate")
    was, now = was_and_is("sampled_tokens")
    if now > 2 * was and not better:
        out["length"] = (f"episodes grew from {was:.0f} to {now:.0f} sampled tokens and solve no more; people lower "
                         "--max_new_tokens, give length a cost in the reward, or use --loss dr_grpo or dapo")
    if now < 0.4 * was and not better:
        out["length"] = (f"episodes shrank from {was:.0f} to {now:.0f} sampled tokens and solve no more; people read "
                         "them in report.html: something short is paid, or nothing is")
    was, now = was_and_is("actions")
    if now < 0.3 * was:
        out["tools"] = (f"tool calls an episode fell from {was:.2g} to {now:.2g}; people check that the reward cannot "
                        "be had without tools, lower --learning_rate, or give more SFT")
    if (now := mean(late, "groups_one_reward")) > 0.9:
        out["dead"] = (f"in {now:.0%} of groups all episodes earn the same and teach nothing; people take "
                       + ("harder tasks" if success > 0.5 else "easier tasks or more SFT")
                       + ", a larger --group_size, or --success_rate_lb and --success_rate_ub")
    return out
