"""A run: its output folder, what is written there, and where it continues. The loop is not here.

    run = Run(config, "grpo")            refuse a folder that holds another run
    with run:
        for step in range(run.load(model, tokenizer, optimizer, total), total):
            for rows in run.micro_batches(len(batch), step): ...
            run.log(loss=loss)
            run.end_step(step)           write the step's lines; save a checkpoint where due
        return run.finish(test())        the table, result.json, what to do next

    config.yaml  metrics.jsonl  timing.jsonl  trajectories.jsonl  result.json
    checkpoints/step_NNNNNN/             what trains, tokenizer, optimizer, state.json

Line k of metrics.jsonl is of step k; its eval/... are of the policy before that step. A run that is
killed loses what came after its last checkpoint. Layers override the methods that are named here.
"""
import json
import math
import os
import re
import shutil
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from core.config import ONCE, UserError, mix, options, printable, say
from core.data import json_value, read_json, reading, summarise, to_json
from core.model import checkpoints, load_weights, save_model

CONFIG, EPISODES = "config.yaml", "trajectories.jsonl"
LOGS = ["metrics.jsonl", "timing.jsonl", EPISODES]  # JSON objects that begin with their step
TEMPORARY = ".tmp-step"  # the name of a checkpoint until it is whole
SAVE_SECONDS = 600  # between checkpoints, with --save_every 0
KEPT = 2  # checkpoints
LOGGED_EPISODES = 16  # of each step, in trajectories.jsonl
HEADLINE = ("success", "reward", "loss", "pairs/loss", "entropy", "kl", "accuracy")  # are printed


class OneProcess:
    """The only process of a run. What several do together (extras/ranks), it does alone."""

    rank, world = 0, 1  # the number of this process, and how many there are

    def share(self, n: int) -> range:
        """Return this process's share of n things in a row."""
        return range(n)

    def micro_batches(self, n: int, batch_size: int) -> list[slice]:
        """Return this process's micro-batches of n sequences."""
        return [slice(start, start + batch_size) for start in range(0, n, batch_size)]

    def gather(self, item) -> list:
        """Return the items of all processes."""
        return [item]

    def first(self, act):
        """Let the first process call act(), and return its result in all of them."""
        return act()

    def add(self, tensor):
        """Return the sum of all processes' tensors."""
        return tensor

    def total(self, metrics: list[dict]) -> dict:
        """Return the sums of some dicts of numbers, name by name, over all processes."""
        return sums(self.gather(sums(metrics)))

    def all_reduce(self, model, metrics: list[dict]) -> dict:
        """Make p.grad the sum of all processes' gradients, and return the sums of the metrics."""
        return self.total(metrics)


class Run:
    """One run and its output folder.

    Attributes:
        ranks: the processes that share the work. Only the first one writes.
        checkpoint: the checkpoint that this run continues from, or None.
        step, seconds: how many steps are done, and how long they took.
        planned: the steps planned when the run began, the length of the learning rate's schedule.
        line, written: the metrics of the present step, and its episodes in trajectories.jsonl.
        before, after: what an evaluation returned before the first step and after the last.
        played, rollout_seconds, rollout_tokens: `agent.rollout` adds to them.
        costs: sums that layers keep, for timing.jsonl and result.json.
        kept: what a layer keeps from one rollout to the next.
        listeners: called with (step, metrics, timing) after each step.
        endings: called with the folder when the run has finished.
    """

    restored = ("step", "seconds", "before", "planned")  # attributes that state.json holds
    finished = None  # the result of a run that needs no step more, which a layer may find

    def __init__(self, config, algorithm: str):
        """Look at the output folder, and change nothing there. Raises UserError."""
        self.config, self.algorithm = config, algorithm
        # An environment may change the current folder. A link stays when its run is renamed.
        self.folder = Path(config.output_dir).resolve()
        self.ranks = self.processes()
        self.writes = self.ranks.rank == 0
        self.opened = time.monotonic()
        self.step = self.seconds = self.played = 0
        self.line, self.before, self.after, self.kept = {}, {}, {}, {}
        self.listeners, self.endings, self.written = [], [], []
        self.costs = Counter()
        self.planned = self.saved = None
        self.has_begun = False
        self.start_clock()
        self.checkpoint = self.ranks.first(self.find_checkpoint)

    # -------------------------------------------------------------------- what does nothing here
    def processes(self) -> OneProcess:
        """Return the processes that share the work."""
        if os.environ.get("WORLD_SIZE", "1") != "1":
            raise UserError("torchrun needs extras/ranks")
        return OneProcess()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        """Leave the loop, finished or not."""

    def check(self):
        """Called between decode steps and micro-batches: the places where a run may stop."""

    def record(self, episodes, **columns):
        """Called with tensors (b, T) of b episodes, gradients too. extras/show writes them."""

    # -------------------------------------------------------------------------------- the folder
    def find_checkpoint(self) -> Path | None:
        """Return the checkpoint to continue from, or None. Raises UserError in another's folder."""
        algorithm = algorithm_of(self.folder)
        if algorithm and not (self.config.resume or self.config.overwrite):
            raise UserError(f"{self.folder}: already holds a {algorithm} run; --resume continues "
                            "it, --overwrite renames it (in Python: resume=True, overwrite=True), "
                            "or give another --output_dir")
        if not self.config.resume or self.config.overwrite:
            return None
        return next(reversed(checkpoints(self.folder)), None)

    def begin(self, written_before=()):
        """Take the output folder. `load` calls it; what writes there earlier calls it first.

        `written_before` names logs that were whole before the first step. A checkpoint keeps them.
        """
        if not self.has_begun:
            self.has_begun = True
            self.ranks.first(lambda: self.take_folder(written_before))

    def take_folder(self, written_before):
        """Rename the run to overwrite, or go back to the checkpoint to resume from."""
        if self.config.overwrite and algorithm_of(self.folder):
            print(f"{self.folder}: the run that was there is now {set_aside(self.folder)}")
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "result.json").unlink(missing_ok=True)
        step = int(self.checkpoint.name[5:]) if self.checkpoint else 0
        for name in LOGS:
            if not (self.checkpoint and name in written_before):
                cut_log(self.folder / name, step)
        self.write_config()

    def write_config(self, switches=""):
        """Write config.yaml, which `--config` and these switches read to repeat this run."""
        import yaml  # errors in flags do not wait for it
        again = f"--config {CONFIG} --output_dir elsewhere{switches}"
        values = {name: getattr(self.config, name) for name in options(type(self.config))
                  if name not in ONCE}
        write_whole(self.folder / CONFIG, f"# {self.algorithm} run; `{again}` repeats it\n"
                    + yaml.safe_dump(values, sort_keys=False))

    # ---------------------------------------------------------------------------------- the loop
    def load(self, model, tokenizer, optimizer, total: int) -> int:
        """Return the first step to do of the total: 0, or that after the checkpoint to resume.

        The optimizer is a torch.optim.Optimizer: its state and its groups' numbers are saved.
        """
        self.model, self.tokenizer, self.optimizer = model, tokenizer, optimizer
        self.total = self.planned = total
        self.config.max_steps = total  # config.yaml repeats the run with as many steps
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
        self.begin()
        if self.writes:
            self.write_config()
        if self.checkpoint:
            self.restore(self.checkpoint)
        self.saved_at = time.monotonic()
        self.start_clock()
        return self.step

    def restore(self, checkpoint):
        """Continue from a checkpoint."""
        load_weights(self.model, checkpoint)
        state = read_json(checkpoint / "state.json")
        groups = state.get("groups", [])
        load_optimizer(self.optimizer, checkpoint / "optimizer.safetensors", groups)
        for name in self.restored:
            # What another layer or version has not written stays as it is.
            setattr(self, name, state.get(name, getattr(self, name)))
        self.saved = self.step
        self.opened -= self.seconds

    def start_clock(self):
        """Start the clock of a step. An evaluation before the step does not count."""
        self.step_began = time.monotonic()
        self.rollout_seconds = self.rollout_tokens = 0

    def micro_batches(self, sequences: int, *seed):
        """Yield slices of batch_size sequences, those that this process forwards.

        `seed` names the pass over them: each of its micro-batches draws its own dropout.
        """
        for rows in self.ranks.micro_batches(sequences, self.config.batch_size):
            self.check()
            torch.manual_seed(mix(self.config.seed, "dropout", *seed, rows.start))
            yield rows

    def skip(self, episodes: list, reason: str):
        """Print that a step or an update is skipped, and why. extras/exact keeps its episodes."""
        say(f"step {self.step + 1}: {printable(reason)}: skipped")

    def end_step(self, step: int):
        """Write the lines of a step that is done, print it, and save a checkpoint where due."""
        line, self.line = self.line, {}
        timing = self.timing_of(line, time.monotonic() - self.step_began)
        self.seconds += timing["seconds"]
        # From here on the weights are those after the step.
        self.step = step + 1
        self.write_line(step, line, timing)
        for listener in self.listeners:
            listener(step, line, timing)
        self.show_step(line, timing["seconds"])
        if self.save_is_due() or self.step == self.total:
            self.save()
        self.start_clock()

    # ---------------------------------------------------------------------------------- the logs
    def log(self, **metrics):
        """Add numbers to the step's line of metrics.jsonl; a later one replaces an earlier one."""
        self.line.update(metrics)

    def log_episodes(self, episodes):
        """Log the numbers of a step's episodes, and write the first LOGGED_EPISODES of them."""
        # `line` wins: its `errors` counts all that was played, and these episodes have none.
        self.line = summarise(episodes) | self.line
        self.write_episodes(episodes, LOGGED_EPISODES)

    def write_episodes(self, episodes, limit: int | None = None):
        """Append the first `limit` episodes, or all, to trajectories.jsonl. No group is cut."""
        groups = {t.group_id for t in episodes[:limit]}
        self.written = [t for t in episodes if t.group_id in groups]
        self.append(EPISODES, [{"step": self.step} | t.to_json() for t in self.written])

    def log_evaluation(self, step: int, metrics: dict):
        """Log what an evaluation before this step returned. The first one is `before`."""
        if step == 0:
            self.before = metrics
        else:
            self.log(**{f"eval/{name}": value for name, value in metrics.items()})
        if words := headline(metrics):
            say(f"after step {step}: {words}" if step else f"before: {words}")
        self.start_clock()

    def write_line(self, step: int, metrics: dict, timing: dict):
        """Append a step's lines: what is a function of the seed, and what a clock decides."""
        self.append("metrics.jsonl", [{"step": step} | metrics])
        self.append("timing.jsonl", [{"step": step} | timing])

    def append(self, name: str, rows: list[dict]):
        """Append rows to a log, one JSON object per line."""
        if self.writes:
            with open(self.folder / name, "a", encoding="utf-8", newline="\n") as file:
                file.write("".join(map(to_json, rows)))

    def timing_of(self, line: dict, seconds: float) -> dict:
        """Return what a clock decides of a step."""
        return {"seconds": seconds, "peak_memory_mb": peak_memory_mb(), **self.costs}

    def show_step(self, line: dict, seconds: float):
        """Print the main numbers of a step."""
        say(f"step {self.step}/{self.total}: {headline(line)}, {seconds:.1f} s")

    # ------------------------------------------------------------------------------- checkpoints
    def save_is_due(self) -> bool:
        """True if --save_every steps have passed, or without it ten minutes."""
        every = self.config.save_every
        return self.step % every == 0 if every else time.monotonic() > self.saved_at + SAVE_SECONDS

    def save(self):
        """Write checkpoints/step_NNNNNN of the steps that are done. It is whole or absent."""
        if self.saved == self.step:
            return
        if self.writes:
            temporary = self.folder / "checkpoints" / TEMPORARY
            # A run that was killed while it wrote has left this folder.
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            self.write_checkpoint(temporary)
            temporary.rename(temporary.with_name(f"step_{self.step:06d}"))
            self.prune()
        self.saved, self.saved_at = self.step, time.monotonic()

    def write_checkpoint(self, folder):
        """Write what the next step depends on. A fork adds files here and reads in `restore`."""
        save_model(self.model, folder)
        self.tokenizer.save_pretrained(folder)
        save_file(optimizer_tensors(self.optimizer), folder / "optimizer.safetensors")
        state = {name: getattr(self, name) for name in self.restored}
        state["groups"] = group_numbers(self.optimizer)
        write_whole(folder / "state.json", to_json(state, indent=1))

    def prune(self):
        """Remove old checkpoints."""
        for old in checkpoints(self.folder)[:-KEPT]:
            shutil.rmtree(old)

    # -------------------------------------------------------------------------------- the result
    def finish(self, after: dict, next_program="agent.py", **extra) -> dict:
        """Write result.json with the `extra` entries, print what came out, return the result."""
        self.after = after
        self.save()  # what no step has saved: of 0 steps there is a checkpoint, too
        result = {"success_before": self.before.get("success"),
                  "success_after": after.get("success"), "before": self.before, "after": after,
                  "held_out_tasks": after.get("episodes"), "steps": self.total,
                  "seed": self.config.seed, "seconds": time.monotonic() - self.opened,
                  "peak_memory_mb": peak_memory_mb(), **self.costs, **extra}
        if self.writes:
            write_whole(self.folder / "result.json", to_json(result, indent=1))
        self.show_result(next_program)
        for end in self.endings:
            end(self.folder)
        return json_value(result)

    def show_result(self, next_program: str):
        """Print what the evaluations said before and after training, and how to continue."""
        print(f"\nbefore:  {headline(self.before)}\nafter:   {headline(self.after)}\n"
              f"written: {self.config.output_dir}\n"
              f"next:    python {next_program} --model_path {self.config.output_dir}")


# ------------------------------------------------------------------------------------------- files
def algorithm_of(folder) -> str | None:
    """Return the name of the program whose run an output folder holds, or None."""
    path = Path(folder) / CONFIG
    with reading(path):
        header = path.read_bytes()[:100] if path.is_file() else b""
    match = re.match(rb"# (.+?) run(?: with --unsafe_code)?;", header)  # older runs say so there
    return match and match[1].decode()


def set_aside(path: Path) -> Path:
    """Rename a file or folder to PATH.1, or the next number that is free. Return the new path."""
    number = 1
    while (new := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    path.rename(new)
    return new


def write_whole(path: Path, text: str):
    """Write a file whole or not at all."""
    temporary = path.with_name(f".tmp-{path.name}")
    temporary.write_bytes(text.encode())
    temporary.replace(path)


def cut_log(path: Path, step: int):
    """Take the lines of this step and of later ones out of a log."""
    if path.exists():
        with open(path, encoding="utf-8") as file:
            # A line that was cut has no end.
            kept = [line for line in file
                    if line.endswith("\n") and json.loads(line)["step"] < step]
        write_whole(path, "".join(kept))


def optimizer_tensors(optimizer) -> dict:
    """Return the optimizer's state as {"number of the parameter|key": CPU tensor}."""
    tensors = {}
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    for number, p in enumerate(weights):
        # Not state_dict(): the 8-bit optimizers of bitsandbytes nest dicts in theirs.
        for key, value in optimizer.state.get(p, {}).items():
            tensor = torch.as_tensor(value).detach().cpu().contiguous()
            # Parameters may share the tensor of their step, and safetensors refuses shared ones.
            tensors[f"{number}|{key}"] = tensor if tensor.ndim else tensor.clone()
    return tensors


def group_numbers(optimizer) -> list[dict]:
    """Return the numbers of each group of parameters that steps change: Prodigy's `d`, not `lr`."""
    groups = []
    for group in optimizer.param_groups:
        groups.append({name: value for name, value in group.items()
                       if isinstance(value, int | float) and name not in ("lr", "initial_lr")
                       and value != optimizer.defaults.get(name)})
    return groups


def load_optimizer(optimizer, path, groups=()):
    """Give the optimizer the state that a file holds, and `group_numbers`. Raises UserError."""
    states = {}
    with reading(path):
        for name, value in load_file(path).items():
            number, _, key = name.partition("|")
            states.setdefault(int(number), {})[key] = value
        optimizer.load_state_dict({**optimizer.state_dict(), "state": states})
    for group, numbers in zip(optimizer.param_groups, groups):
        group.update(numbers)


def sums(metrics: list[dict]) -> Counter:
    """Return the sums of the numbers in some dicts, name by name."""
    totals = Counter()
    for numbers in metrics:
        totals.update({name: float(value) for name, value in numbers.items()})
    return totals


def headline(metrics: dict) -> str:
    """Return the main numbers of an evaluation or of a step in a few words."""
    # What was not finite is null in a file.
    shown = [name for name in HEADLINE if metrics.get(name) is not None]
    return ", ".join(f"{name} {metrics[name]:.3f}" for name in shown)


def peak_memory_mb() -> float:
    """Return the peak in MiB: of CUDA's memory, else of the resident set; NaN without a count."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 2**20
    status = Path("/proc/self/status")
    if status.exists() and (peak := re.search(r"VmHWM:\s+(\d+) kB", status.read_text("utf-8"))):
        return int(peak[1]) / 2**10
    with suppress(ModuleNotFoundError):
        import resource  # Windows has none
        # It comes second because it starts from the peak of the process that forked this one.
        unit = 2**20 if sys.platform == "darwin" else 2**10
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
    return math.nan
