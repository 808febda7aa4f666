"""A run: an output folder, and around each step of a training loop what keeps it.

    run = Run(config, "grpo", made_of)     the folder is entered; a checkpoint to resume from is found and verified
    with run:                              whatever ends the block early saves the last whole step
        for step in run.steps(...):        resumes, evaluates, logs, saves, stops on signals
            for rows in run.micro_batches(batch, step): ...
            if run.accept_update(batch, loss, grad_norm): ...
            run.log(loss=loss)
    return run.finish()

Only the standard library is imported at the top, so that --help answers at once.
"""
import math
import os
import shlex
import shutil
import signal
import sys
import time
from importlib.metadata import version

from experiment.alarms import Alarms
from experiment.checkpoint import (
    checkpoints,
    copy_of_state,
    load_optimizer,
    optimizer_tensors,
    prune,
    put_back,
    write_checkpoint,
)
from experiment.closing import first_notes, next_command, print_table
from experiment.config import convert, options
from experiment.data import lines_of, parse_object, reading
from experiment.distributed import join
from experiment.errors import Stop, UserError, printable
from experiment.files import disk_space, finite, to_json
from experiment.output_folder import OutputFolder, newest_start
from experiment.process import peak_memory_mb
from experiment.seeds import mix
from experiment.signals import active_signals

DATA_FLAGS = ("dataset", "eval_dataset", "trajectories")  # flags that name files, separated by commas
SAVE_SECONDS = 600  # between checkpoints, with --save_every 0
BAD_STEPS = 3  # steps in a row that are not finite end the run


# ---------------------------------------------------------------------------------------------- the run
class Run:
    """One run and its output folder. Under torchrun every rank makes one; only rank 0 writes.

    Attributes:
        finished: what result.json holds if a finished run is resumed, else None.
        folder: the path of the output folder.
        ranks: the `Ranks` that share the work.
        checkpoint: the checkpoint this run continues from, or None.
    """

    def __init__(self, config, algorithm, made_of=list):
        """Enter the output folder. Make the run before anything is put in its `base/`.

        Args:
            config: the filled config.
            algorithm: the name of the program.
            made_of: returns the paths of the files that the run depends on beside its data files:
                weights it starts from, source of its environment. A run is not resumed on others.

        Raises UserError if a value is out of bounds, or the folder cannot be written, is in use, or
        holds a run that is neither to be resumed nor to be overwritten.
        """
        self.config, self.algorithm = config, algorithm
        flags = options(type(config))
        values = {name: convert(getattr(config, name), flags[name], f"--{name}") for name in flags}
        self.ranks = join()
        self.files = OutputFolder(config.output_dir, algorithm, self.command)
        self.folder = self.files.path
        self.made_of = made_of
        self.alarms = Alarms()
        self.step = self.bad = 0
        self.saved = self.score = self.unlogged = self.marks = None
        self.training = self.undo = None
        self.schedule = None  # steps over which the learning rate decays
        self.rollout_seconds = 0.0  # of the present step; `agent.rollout` adds to it
        self.looping = self.updated = False
        self.saved_at = time.monotonic()
        self.signals = active_signals()
        if self.signals:
            self.signals.run = self
        if not self.ranks.runs:
            self.ranks.leave = self._leave
        self.ranks.runs += 1
        opened = self.ranks.first(lambda: self._open(values)) or (None, None, None)
        self.finished, self.checkpoint, self.state = opened
        if self.finished is not None:
            self.ranks.runs -= 1

    def _open(self, values):
        """On rank 0, enter the folder and return (result, checkpoint, state) as `continue_run` does."""
        self.files.enter(values)
        opened = None, None, None
        self.ingredients = None
        self.start = newest_start(self.config)
        if values.get("resume") and self.files.written_by():
            self.ingredients = self._fingerprints()
            opened = self.files.continue_run(self.config, values, self.ingredients)
        elif values.get("resume"):
            self.files.refuse_a_run()
            print(f"{self.folder}: nothing to resume, a new run begins")
        self.files.write_config(values)
        return opened

    def _fingerprints(self):
        """Return the fingerprints of all files that the run depends on."""
        values = [getattr(self.config, name, None) or "" for name in DATA_FLAGS]
        data = [path.strip() for value in values for path in value.split(",")]
        return self.files.fingerprints([path for path in data if os.path.isfile(path)] + self.made_of())

    @property
    def writes(self):
        """True on the rank that writes."""
        return self.ranks.rank == 0

    @property
    def command(self):
        """The command that continues this run."""
        name = f"{self.algorithm}.py"
        words = [sys.argv[0] if os.path.basename(sys.argv[0]) == name else name]
        program = "python"
        if self.ranks.world > 1:
            program = "torchrun"
            words.insert(0, f"--nproc_per_node={os.environ.get('LOCAL_WORLD_SIZE', self.ranks.world)}")
            nodes = os.environ.get("GROUP_WORLD_SIZE", "1")
            if nodes != "1":
                endpoint = f"--rdzv_endpoint={os.environ['MASTER_ADDR']}:29500"
                words[:0] = [f"--nnodes={nodes}", "--rdzv_backend=c10d", endpoint]
        config = os.path.join(self.config.output_dir, "config.yaml")
        return shlex.join([program, *words, "--config", config, "--resume"])

    def how_to_continue(self):
        return f" after step {self.step}; continue with: {self.command}"

    # ------------------------------------------------------------------------------------- the loop
    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        """Save the last whole step if anything ends the block early."""
        if error is None or not self.looping:
            return
        self._save_last_whole_step()
        if not isinstance(error, Stop):
            saved = "nothing is saved yet" if self.saved is None else f"step {self.saved} is saved"
            error.add_note(f"{saved}; continue with: {self.command}")

    def total_steps(self, steps_per_epoch, default=None):
        """Return --max_steps, else the steps of --num_epochs passes over the data, else the default."""
        if self.config.max_steps is not None:
            return self.config.max_steps
        if self.config.num_epochs is None:
            return default
        return self.config.num_epochs * max(1, steps_per_epoch)

    def learning_rate(self, step):
        """Return the step's learning rate: linear warm-up, then linear decay to a tenth of the peak.

        The decay lasts as long as the run was meant to when it began. A run that is resumed with a
        larger --max_steps continues at a tenth.
        """
        warmup = min(1.0, (step + 1) / max(self.config.warmup_steps, 1))
        decay = 1 - 0.9 * min(step / max(self.schedule, 1), 1.0)
        return self.config.learning_rate * warmup * decay

    def steps(self, total, state, evaluate, evaluate_before=True):
        """Yield the numbers of the steps that are still to be done, and do everything around them.

        Before the first step, the checkpoint to resume from is loaded, or the policy is evaluated.
        Before each, the optimizer gets the step's learning rate. After each come the held-out
        evaluation if it is due, the lines of the logs, and a checkpoint if it is due.

        Args:
            total: steps of the whole run.
            state: the `TrainingState` that checkpoints hold.
            evaluate: returns the metrics of held-out tasks as a dict, {} if there are none.
            evaluate_before: False if the policy is not worth evaluating before the first step.
        """
        from tqdm import tqdm
        self.total = total
        self.training = state
        start, extra = self.restore(state.load_weights, state.optimizer, state.model.named_parameters())
        self.schedule = extra.get("schedule", total)
        if extra:
            self.before = extra["before"]
        else:
            self.before = evaluate() if evaluate_before else {}
        self.began = time.time() - extra.get("seconds", 0.0)
        for note in first_notes(self.before, self.config) if self.algorithm != "sft" else ():
            print(note)
        self.begin(self._save_training_state)
        if extra.get("unlogged"):
            self.line = extra["unlogged"]
            self._close_step(evaluate, {})
        bar = tqdm(range(start, total), self.algorithm, initial=start, total=total, disable=not total)
        for step in bar:
            self.line, self.rollout_seconds, began = {}, 0.0, time.time()
            self._set_learning_rate(step)
            yield step
            timing = self._timing(time.time() - began)
            # From here on the weights are those after the step, whose line is not written yet.
            self.step, self.updated = step + 1, False
            self.unlogged, self.marks = self.line, self.files.log_sizes()
            self._close_step(evaluate, timing)
            shown = [name for name, value in self.line.items() if value is not None
                     and (name in ("success", "loss") or name.startswith("loss/"))]
            bar.set_postfix({name: f"{self.line[name]:.3f}" for name in shown})
        self.training_seconds = time.time() - self.began
        self.last(total)
        self.after = evaluate()

    def _set_learning_rate(self, step):
        for group in self.training.optimizer.param_groups:
            group["lr"] = self.learning_rate(step)
        self.log(learning_rate=self.learning_rate(step))

    def _close_step(self, evaluate, timing):
        """Evaluate if it is due, write the lines of the step that ended, and save if it is due."""
        if self.config.eval_every and self.step % self.config.eval_every == 0:
            self.line.update({f"eval/{name}": value for name, value in evaluate().items()})
        self.write_line(self.step - 1, self.line, timing)
        self.end(self.step, self.line.get("eval/success"))

    def _save_training_state(self, step):
        state = self.training
        extra = {"before": self.before, "seconds": time.time() - self.began, "schedule": self.schedule,
                 "unlogged": self.unlogged}
        tensors = optimizer_tensors(state.optimizer, state.model.named_parameters())
        self.save(step, state.save_weights, state.tokenizer, tensors, extra)

    def _timing(self, seconds):
        """Return the seconds, the tokens per second and the peak memory of the step that ends now."""
        update = seconds - self.rollout_seconds
        timing = {"seconds": seconds, "update_seconds": update, "peak_memory_mb": peak_memory_mb()}
        episodes = self.line.get("episodes", 0)
        if self.rollout_seconds and episodes:
            sampled = self.line["sampled_tokens"] * episodes
            timing["rollout_seconds"] = self.rollout_seconds
            timing["rollout_tokens_per_second"] = sampled / self.rollout_seconds
            timing["update_tokens_per_second"] = self.line["tokens"] * episodes / update
        return timing

    def log(self, **metrics):
        """Add numbers to the step's line of metrics.jsonl. A later one of the same name replaces an earlier one."""
        self.line.update(metrics)

    def log_episodes(self, trajectories):
        """Append the first `save_trajectories` episodes of the step to trajectories.jsonl."""
        self.trajectories(self.step, trajectories[:self.config.save_trajectories])

    def micro_batches(self, batch, *seed):
        """Yield this rank's micro-batches of a list of episodes, as an index of its (B, T) tensors.

        The tensors are right-padded. The index takes the rows of the micro-batch and as many columns
        as its longest episode has. `seed` names the pass: each of its micro-batches draws its own
        dropout.
        """
        import torch
        for rows in self.ranks.micro_batches(len(batch), self.config.batch_size):
            self.check()
            torch.manual_seed(mix(self.config.seed, "dropout", *seed, rows.start))
            yield rows, slice(0, max(len(t.token_ids) for t in batch[rows]))

    # -------------------------------------------------------------------------------------- the logs
    def write_line(self, step, metrics, timing):
        """Append a step's line to metrics.jsonl and to timing.jsonl, and print the alarms it raises.

        metrics holds what is a function of the seed, timing what a clock decides. Both are flat.
        """
        self._append("metrics.jsonl", [{"step": step, **metrics}])
        self._append("timing.jsonl", [{"step": step, **timing}])
        self.alarms.add(metrics)
        for sentence in self.alarms.new():
            print(f"ALARM, step {step}: {sentence}")

    def trajectories(self, step, items):
        """Append episodes to trajectories.jsonl."""
        self._append("trajectories.jsonl", [{"step": step, **item.to_json()} for item in items])

    def _append(self, name, rows):
        if self.writes:
            self.files.append(name, rows)

    # ---------------------------------------------------------------------------- steps that are spoilt
    def accept_rewards(self, episodes):
        """Return True if there are episodes and all rewards are finite, else the step is to be skipped."""
        if not episodes:
            return False
        for t in episodes:
            if not math.isfinite(t.reward):
                return self._skip(episodes, t.info.get("not_finite", f"reward {t.reward}"))
        return True

    def accept_update(self, episodes, loss, grad_norm):
        """Return True if loss and gradient norm are finite, else the update is to be skipped.

        An update that is not finite would spoil the weights for good. The step's episodes go into
        bad_step_N.json, and the third one in a row raises Stop. From an update that is accepted until
        the end of the step, signals wait.
        """
        # Ranks that wait in a collective notice signals at different moments.
        if self.ranks.world == 1:
            self.check()
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return self._skip(episodes, f"loss {loss}, gradient norm {grad_norm}")
        if not self.updated and self.saved != self.step and self.training:
            self.undo = copy_of_state(self.training.optimizer)
        self.bad, self.updated = 0, True
        return True

    def _skip(self, episodes, reason):
        self.bad += 1
        path = self.folder / f"bad_step_{self.step}.json"
        rows = [{"group_id": t.group_id, "reward": str(t.reward), "tokens": len(t.token_ids),
                 "token_ids": t.token_ids, "task": t.info.get("task"), "stop_reason": t.stop_reason}
                for t in episodes]
        if self.writes:
            content = {"step": self.step, "why": reason, "episodes": rows}
            self.files.write(path.name, to_json(content, indent=1))
        print(f"step {self.step}: {printable(reason)}: skipped; its episodes are in {path}")
        if self.bad < BAD_STEPS:
            return False
        self._save_last_whole_step()
        raise Stop(f"step {self.step}: {reason}: the third update in a row that is not finite; lower "
                   f"--learning_rate, or look at the rewards in {path}; another run can start from this "
                   f"one's checkpoints: --model_path {self.folder}", 3)

    # -------------------------------------------------------------------------------- leaving early
    def check(self):
        """Leave if a signal came or a rank is gone, and the step has changed no weight yet.

        This is called between decode steps and between micro-batches.
        """
        if self.signals and self.signals.signum or self.ranks.gone:
            self.ranks.leave()

    def _leave(self):
        """Save the last whole step, and stop. Of runs inside runs the outermost does it."""
        if self.updated and not self.ranks.gone:
            return  # `end` checks again
        # Otherwise a slow save would be cut short.
        self.ranks.runs = 0
        self._save_last_whole_step()
        words = f"{self.ranks.gone} is gone; " if self.ranks.gone else ""
        if self.signals and self.signals.signum:
            name = signal.Signals(self.signals.signum).name
            raise Stop(f"{words}stopped by {name}{self.how_to_continue()}", 128 + self.signals.signum)
        raise Stop(f"{words}stopped{self.how_to_continue()}", 5)

    def _save_last_whole_step(self):
        if not self.looping or self.saved == self.step:
            return
        if self.updated and self.undo:
            put_back(self.training.optimizer, self.undo)
            self.updated = False
        if not self.updated:
            self.make(self.step)

    # -------------------------------------------------------------------------------- checkpoints
    def restore(self, load_weights, optimizer, named_parameters):
        """Load the checkpoint to continue from; return its step and the `extra` it was saved with.

        In a new run that is 0 and {}. Call this where the model is still the one that the run starts
        from, and all that is derived from it (the reference) is made. Raises Stop if the disk has too
        little space for the checkpoints to come.
        """
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        self.ranks.check_alike(trained)
        if self.checkpoint:
            load_weights(self.checkpoint)
            load_optimizer(optimizer, named_parameters, self.checkpoint / "optimizer.safetensors")
            self.step, self.saved, self.bad = self.state["step"], self.state["step"], self.state["bad"]
            self._read_alarms()
        elif self.writes and self.ingredients is None:
            self.ingredients = self._fingerprints()
        size = sum(p.numel() * p.element_size() for p in trained)
        # A checkpoint holds the weights and the two moments of AdamW; three are kept.
        needed = 3 * size * max(3 - len(checkpoints(self.folder)), 1)
        self.ranks.first(lambda: self._check_space(needed))
        return (self.step, self.state["extra"]) if self.checkpoint else (0, {})

    def _read_alarms(self):
        path = self.folder / "metrics.jsonl"
        if path.exists():
            for number, line in lines_of(path):
                with reading(path, number):
                    self.alarms.add(parse_object(line))

    def _check_space(self, needed):
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise Stop(f"{self.folder}: checkpoints need {needed} bytes and {free} are free; "
                       "make room, or give another --output_dir", 4)

    def begin(self, save):
        """Begin the loop. save(step) calls `Run.save` with the weights as they then are."""
        self.make, self.looping, self.marks = save, True, self.files.log_sizes()
        self.saved_at = time.monotonic()

    def end(self, step, score=None):
        """Note that `step` steps are done and logged; save if it is due, leave if a signal came.

        score: success on held-out tasks of these weights. The best checkpoint is kept.
        """
        self.step, self.updated, self.score, self.undo = step, False, score, None
        self.unlogged, self.marks = None, self.files.log_sizes()
        every = self.config.save_every
        due = step % every == 0 if every else time.monotonic() - self.saved_at > SAVE_SECONDS
        if due and step != self.saved:
            self.make(step)
        self.check()

    def last(self, step):
        """End the loop: save its last step, and return the path of the checkpoint."""
        self.step = step
        if self.saved != step:
            self.make(step)
        self.looping = False
        self.check()
        return self.folder / "checkpoints" / f"step_{step:06d}"

    def save(self, step, save_model, tokenizer=None, optimizer=None, extra=None):
        """Write checkpoints/step_NNNNNN whole or not at all, and return its path.

        Args:
            step: how many steps are done.
            save_model: writes the weights into the folder it is given.
            tokenizer: is saved beside them.
            optimizer: what `optimizer_tensors` returns.
            extra: goes into state.json.
        """
        path = self.folder / "checkpoints" / f"step_{step:06d}"
        if not self.writes:
            self.saved = step
            return path

        def write_files(folder):
            save_model(folder)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
            if optimizer is not None:
                from safetensors.torch import save_file
                save_file(optimizer, folder / "optimizer.safetensors")

        if self.ingredients is None:
            self.ingredients = self._fingerprints()
        marks = self.files.log_sizes() if self.marks is None else self.marks
        self.files.sync_logs(marks)
        state = {"step": step, "algorithm": self.algorithm, "extra": extra, "score": self.score,
                 "bad": self.bad, "lines": marks, "model": self.start, "made_of": self.ingredients,
                 "versions": {name: version(name) for name in ("torch", "transformers")}}
        # The weights are about half as large as the two moments of AdamW.
        needed = sum(tensor.nbytes for tensor in (optimizer or {}).values()) * 3 // 2
        with disk_space(path, needed, self.command):
            write_checkpoint(path, write_files, state)
        self.saved, self.saved_at = step, time.monotonic()
        prune(self.folder, path)
        return path

    # ---------------------------------------------------------------------------------- the result
    def finish(self, next_step="agent.py", **extra):
        """Write result.json and report.html, print what came out, and return the result.

        Args:
            next_step: the program to continue with: "agent.py" shows episodes, "grpo.py" follows SFT.
            extra: further entries of result.json.
        """
        print_table(self.before, self.after, self.total, self.training_seconds)
        words = ["--num_tasks", "3"] if next_step == "agent.py" and self.config.env else []
        print(f"written: {self.folder}\nnext:    {next_command(next_step, self.config, *words)}")
        return self.write_result({
            "success_before": self.before.get("success"), "success_after": self.after.get("success"),
            "steps": self.total, "seed": self.config.seed, "seconds": time.time() - self.began,
            "peak_memory_mb": peak_memory_mb(), **extra})

    def write_result(self, result):
        """Write result.json and report.html, and return the result."""
        result = self.ranks.first(lambda: self._write_result(finite(result)))
        self.ranks.runs -= 1
        return result

    def _write_result(self, result):
        self.files.write("result.json", to_json(result, indent=1))
        from experiment.report import write_html
        try:
            write_html(self.folder, quiet=True)
        except (UserError, OSError) as error:
            # A page must not fail a run.
            print(f"report.html: {error}", file=sys.stderr)
        return result
