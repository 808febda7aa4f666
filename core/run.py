"""A run: an output folder, and what surrounds each step of a training loop.

    run = Run(config, "grpo", sources)   enter the folder, verify the checkpoint to resume
    with run:                            whatever ends the block early saves the last whole step
        for step in range(run.load(model, tokenizer, optimizer, total), total):
            for rows in run.micro_batches(len(batch), step): ...
            run.log(loss=loss)
            run.end_step(step)           write the step's lines, save, stop on signals
        return run.finish(test())

torch is imported where it is used: what reads flags alone does not wait for it.
"""
import math
import os
import shlex
import sys
import time
from importlib import import_module

from tqdm import tqdm

from core.config import NO_BAR, Stop, UserError, code_flags, convert, mix, options, printable, say
from extras.exact.checkpoint import (RESTORED, check_room, fingerprints, ingredients, load_optimizer,
                                   prune, trained_parameters, write_checkpoint)
from core.distributed import join
from core.data import finite, summarise, unusable
from extras.exact.files import write_json
from extras.show.notes import (Alarms, first_notes, headline, idle_notes, next_command, plan,
                              print_table, step_line, step_numbers)
from extras.exact.output_folder import EPISODES, OutputFolder
from extras.exact.environments import data_of, sources
from extras.exact.process import Signals, peak_memory_mb

SAVE_SECONDS = 600  # between checkpoints, with --save_every 0
LOGGED_EPISODES = 16  # of each step, in trajectories.jsonl
REPORT = "extras.show.report"  # the room that shows a run, entered when it has finished
RESUMING = "extras.exact.resuming"  # a new run does not need it
SAME_CALL = "the same call with resume=True"  # continues a run that no command can
BAD_UPDATES = 3  # updates in a row that are not finite end the run


class Run:
    """One run and its output folder. Under torchrun every rank makes one; only rank 0 writes.

    Attributes:
        command: the command that continues this run.
        finished: what result.json holds if a finished run is resumed, else None.
        folder: the path of the output folder.
        ranks: the `Ranks` that share the work.
        checkpoint: the checkpoint this run continues from, or None.
        step, seconds: how many steps are done, and how long they took.
        line: the metrics of the present step.
        before, after: what `evaluate` returned before the first step and after the last.
        rollout_seconds, rollout_tokens: of all that a step plays; `agent.rollout` adds to them.
        passed: the sequences of all passes of a step; `micro_batches` counts them.
        played: the number of episodes so far.
        kept: what sessions keep from one rollout to the next (envs/session.py).
        endings: functions that a run which finishes calls, without arguments.
        values: {flag: value} of the config; max_steps becomes the number of steps.
        updated: True from the first update of a step to the end of the step.
        unlogged: the line of a step that has ended and is not written yet, or None.
        saved: the step of the newest checkpoint, or None.
    """

    def __init__(self, config, algorithm, envs=None):
        """Lock the output folder, and verify the checkpoint to resume. `begin` changes the folder.

        Args:
            config: the filled config.
            algorithm: the name of the algorithm.
            envs: the package that knows the config's environment, or None. No run is resumed on
                other files of an environment, nor on other weights or data.

        Raises UserError if a value is out of bounds, or the folder cannot be written, is in use, or
        holds a run that is neither to be resumed nor to be overwritten.
        """
        self.config, self.algorithm = config, algorithm
        self.sources = sources(config) if envs else []
        self.data = data_of(config) if envs else []
        self.has_expert = envs and envs.has_expert(config.env)
        self.has_tools = envs and any(
            envs.tools(envs.load(name)) for name in envs.names_of(config.env))
        flags = options(type(config))
        self.values = {name: convert(getattr(config, name), flags[name], f"--{name}")
                       for name in flags}
        vars(config).update(self.values)  # Python code may say "1e-4", as PyYAML reads it
        self.ranks = join()
        self.writes = self.ranks.rank == 0
        # A notebook's own Config has no file.
        self.program = getattr(sys.modules[type(config).__module__], "__file__", f"{algorithm}.py")
        self.command = shlex.join([*self.ranks.launcher(), os.path.relpath(self.program),
                                   "--config", os.path.join(config.output_dir, "config.yaml"),
                                   *code_flags(self.values), "--resume"])
        if "main__:" in self.command:  # __main__:Class or __mp_main__:Class: no program finds it
            self.command = SAME_CALL
        self.files = OutputFolder(self.values, algorithm, self.command)
        self.folder = self.files.path
        self.alarms = Alarms(flags, self.has_expert)
        self.opened = time.monotonic()
        self.step = self.bad = self.seconds = 0
        self.rollout_seconds = self.rollout_tokens = self.passed = 0
        self.has_begun = self.updated = False
        self.made_of, self.line, self.endings = {}, {}, []
        self.played, self.kept = 0, {}
        self.saved = self.unlogged = self.planned = None
        self.before, self.after, self.scores = {}, {}, {}
        # In a notebook none are handled.
        self.signals = Signals.active or Signals()
        self.finished, self.checkpoint, self.state = self.ranks.first(self._open)

    def _open(self):
        """Enter the folder; return (result, checkpoint, state) as resuming.py's function does."""
        self.files.enter()
        if not self.values["resume"]:
            return None, None, None
        return import_module(RESUMING).continue_run(
            self.files, options(type(self.config)), self._ingredients())

    def begin(self):
        """Take the output folder: rename what is overwritten, go back to what is resumed.

        `steps` calls it when all is loaded; what writes there earlier calls it first. From then on
        there is a command that continues the run, for signals to name.
        """
        if not self.has_begun:
            self.ranks.first(self._take_folder)
            self.has_begun = True
            self.signals.run = self.signals.run or self

    def _take_folder(self):
        """Undo what came after the checkpoint to resume, or rename a run; write config.yaml."""
        if self.values["resume"]:
            import_module(RESUMING).go_back(self.folder, self.state)
        self.files.begin()

    def _ingredients(self):
        return ingredients(self.config, self.sources, self.data, self.program, self.folder / "base")

    # ------------------------------------------------------------------------------------ the loop
    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        """Save the last whole step if anything ends the block early.

        Between two updates of a step the weights are those of no step: the last checkpoint stands.
        """
        looping, self.signals.looping = self.signals.looping is self, None
        if looping:
            self.bar.close()
        if error and looping and not self.updated:
            self.save()
        # A fault in the last evaluation comes after the loop.
        if error and (looping or self.saved is not None) and not isinstance(error, Stop):
            how = f"continue with: {self.command}"
            # The other ranks do not know what is saved.
            if self.writes:
                saved = "nothing is saved" if self.saved is None else f"step {self.saved} is saved"
                lost = "half a step is lost, " if self.updated else ""
                how = f"{lost}{saved}; {how}"
            error.add_note(how)

    def load(self, model, tokenizer, optimizer, total: int) -> int:
        """Return the first step to do: 0, or of a resumed run the one after its checkpoint.

        Args:
            model, tokenizer, optimizer: what checkpoints hold; that of a resumed run is loaded.
            total: steps of the whole run.
        """
        self.model, self.tokenizer, self.optimizer, self.total = model, tokenizer, optimizer, total
        self.values["max_steps"] = total
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
        self.begin()
        self.ranks.first(self.files.write_config)
        self.ranks.check_alike(trained_parameters(optimizer))
        self.ranks.first(lambda: check_room(self.folder, optimizer))
        if self.checkpoint:
            self._restore()
        else:
            self.made_of = fingerprints(self._ingredients()) if self.writes else {}
            self.planned = total
        optimizer.register_step_pre_hook(self._begin_update)
        self.marks, self.saved_at = self.files.log_sizes(), time.monotonic()
        # In the loop a signal waits until nothing is lost.
        self.signals.looping = self
        if self.unlogged:
            # The run was stopped between a step and its line: write that line now.
            self._write_step({})
        if self.step == total:
            self.save()
        self._say_plan()
        self.bar = tqdm(total=total, desc=self.algorithm, initial=self.step,
                        disable=NO_BAR, leave=False, dynamic_ncols=True)
        self._begin_step()
        return self.step

    def _say_plan(self):
        notes = idle_notes(self.config)
        if self.step:
            notes += self._first_notes()
        for note in notes:
            say(note)
        if self.total > self.step:
            say(plan(self.config, self.total - self.step))

    def _first_notes(self):
        if self.algorithm == "sft":
            return []
        return first_notes(self.before, self.config, self.model, self.has_expert, self.has_tools)

    def _begin_update(self, *_):
        """Called before the optimizer steps. From here to the end of the step signals wait."""
        # With several ranks one would leave here while the others update.
        if self.ranks.world == 1:
            self.check()
        self.bad, self.updated = 0, True

    def _begin_step(self):
        """Start the clock of a step, or start it again after an evaluation."""
        self.began = time.monotonic()
        self.rollout_seconds = self.rollout_tokens = self.passed = 0

    def log_evaluation(self, step: int, metrics: dict):
        """Log what an evaluation before this step returned. The first one is `before`."""
        words = headline(metrics)
        if step == 0:
            self.before = metrics
            if words:
                say(f"before: {words}")
            for note in self._first_notes():
                say(note)
        else:
            self.log(**{f"eval/{name}": value for name, value in metrics.items()})
            if words:
                say(f"after step {step}: {words}")
            self.scores[str(step)] = metrics.get("success")
            self.save()
        self._begin_step()

    def end_step(self, step: int):
        """Write the lines of a step that is done, print it, and save a checkpoint where due."""
        timing = self.timing_of(self.line, time.monotonic() - self.began)
        # From here on the weights are those after the step, whose line is not written yet.
        self.step, self.updated = step + 1, False
        self.seconds += timing["seconds"]
        line = self.unlogged = self.line
        self.line, self.marks = {}, self.files.log_sizes()
        self._write_step(timing)
        self._show(line, timing["seconds"])
        every = self.config.save_every
        due = self.step % every == 0 if every else time.monotonic() > self.saved_at + SAVE_SECONDS
        # The episodes that dpo.py played are all of one step, which stays whole.
        if self.writes and "episodes" in line and self.files.has_too_many_episodes():
            # Of a thinned log earlier checkpoints hold the wrong size: save one with the right one.
            self.files.thin_episodes()
            self.marks = self.files.log_sizes()
            due = True
        if due or self.step == self.total:
            self.save()
        self.check()
        self._begin_step()

    def _write_step(self, timing):
        """Write the line of the step that has ended."""
        self.write_line(self.step - 1, self.unlogged, timing)
        self.unlogged, self.marks = None, self.files.log_sizes()

    def _show(self, line, seconds):
        """Print the step that has ended, or show it in the bar."""
        self.bar.update()
        self.bar.set_postfix_str(step_numbers(line, 2))
        if self.bar.disable:
            left = self.seconds / self.step * (self.total - self.step)
            say(step_line(self.step, self.total, line, seconds, left))

    def timing_of(self, line, seconds):
        """Return seconds, tokens per second and peak memory of the step with this line."""
        update_seconds = seconds - self.rollout_seconds
        timing = {"seconds": seconds, "update_seconds": update_seconds,
                  "peak_memory_mb": peak_memory_mb()}
        if self.rollout_seconds and "episodes" in line:
            timing["rollout_seconds"] = self.rollout_seconds
            # Every pass, to score or to update, forwards the episodes again.
            timing["update_tokens_per_second"] = line["tokens"] * self.passed / update_seconds
            # The seconds of a step that was played ahead are only those of waiting for it.
            if not line.get("staleness"):
                timing["rollout_tokens_per_second"] = self.rollout_tokens / self.rollout_seconds
        return timing

    def micro_batches(self, sequences, *seed):
        """Yield the slices of a step's sequences that this rank forwards, batch_size at a time.

        `seed` names the pass over them: each of its micro-batches draws its own dropout.
        """
        import torch
        self.passed += sequences
        slices = self.ranks.micro_batches(sequences, self.config.batch_size)
        for rows in tqdm(slices, "forward passes", disable=NO_BAR, leave=False, delay=2):
            self.check()
            torch.manual_seed(mix(self.config.seed, "dropout", *seed, rows.start))
            yield rows

    # ------------------------------------------------------------------------------------ the logs
    def log(self, **metrics):
        """Add numbers to the step's line of metrics.jsonl; a later one replaces an earlier one."""
        self.line.update(metrics)

    def log_episodes(self, episodes):
        """Log the numbers of a step's episodes, and write the first LOGGED_EPISODES of them.

        Those that are `unusable` go into bad_step_N.json instead, from which no program learns.
        """
        if reason := unusable(episodes):
            self.skip(episodes, reason)
            return
        # `errors` of these is 0: `played_shares` has logged that of all that was played.
        self.line = summarise(episodes) | self.line
        self.write_episodes(episodes, LOGGED_EPISODES)

    def write_episodes(self, episodes, limit=None):
        """Append the first `limit` episodes and the rest of their groups, or all, if None.

        They go into trajectories.jsonl, which other programs learn from: no group is cut.
        """
        groups = {t.group_id for t in episodes[:limit]}
        lines = [{"step": self.step} | t.to_json() for t in episodes if t.group_id in groups]
        self._append(EPISODES, lines)

    def write_line(self, step, metrics, timing):
        """Append a step's line to metrics.jsonl and timing.jsonl, and print the alarms it raises.

        metrics holds what is a function of the seed, timing what a clock decides. Both are flat.
        """
        self._append("metrics.jsonl", [{"step": step} | metrics])
        self._append("timing.jsonl", [{"step": step} | timing])
        for sentence in self.alarms.add(metrics):
            say(f"ALARM, step {step + 1}: {sentence}")

    def _append(self, name, lines):
        if self.writes:
            self.files.append(name, lines)

    # --------------------------------------------------------------------------- steps that are bad
    def skip(self, episodes, reason):
        """Write the episodes of a step that is skipped, or raise Stop: the third in a row."""
        reason = printable(reason)
        if not episodes:
            say(f"step {self.step + 1}: {reason}: skipped")
            return
        self.bad += 1
        path = self.folder / f"bad_step_{self.step}.json"
        if self.writes:
            write_json(path, {"step": self.step, "why": reason,
                              "episodes": [t.to_json() for t in episodes]})
        say(f"step {self.step + 1}: {reason}: skipped; its episodes are in {path}")
        if self.bad >= BAD_UPDATES:
            raise Stop(f"step {self.step + 1}: {reason}: the third update in a row that is not "
                       f"finite; lower --learning_rate, or look at the rewards in {path}; another "
                       f"run can start from this one's checkpoints: --model_path {self.folder}", 3)

    # -------------------------------------------------------------------------------- leaving early
    def check(self):
        """Leave if a signal came and the step has changed no weight yet.

        This is called between decode steps and between micro-batches.
        """
        if self.signals.signum and not self.updated:
            raise self.signals.stop()

    # ---------------------------------------------------------------------------------- checkpoints
    def _restore(self):
        """Load the checkpoint to continue from, and take over what its state.json holds."""
        self.load_weights(self.checkpoint)
        load_optimizer(self.optimizer, self.checkpoint / "optimizer.safetensors")
        self.saved = self.state["step"]
        for name in RESTORED:
            setattr(self, name, self.state[name])
        self.opened -= self.seconds
        self.alarms.read(self.folder / "metrics.jsonl")

    def save_weights(self, folder):
        """Write what trains into `folder`: the adapter in PEFT's format, or all weights.

        A fork with state of its own overrides this and `load_weights`: checkpoints then hold it. It
        changes it at the end of a step, because a step that is stopped early is done again.
        """
        from core.model import save_model
        save_model(self.model, folder)

    def load_weights(self, folder):
        """Read back what `save_weights` wrote, bit for bit."""
        from core.model import load_weights
        load_weights(self.model, folder)

    def save(self):
        """Write checkpoints/step_NNNNNN of the steps that are done, unless they are saved."""
        if self.saved == self.step:
            return
        if self.writes:
            self.files.flush()
            state = {name: getattr(self, name) for name in (*RESTORED, "algorithm")}
            state["lines"] = self.marks
            path = self.folder / "checkpoints" / f"step_{self.step:06d}"
            write_checkpoint(path, self, state)
            prune(self.folder, self.scores)
        self.saved, self.saved_at = self.step, time.monotonic()

    # ----------------------------------------------------------------------------------- the result
    def finish(self, after: dict, next_step="agent.py", **extra):
        """Write result.json and report.html, print what came out, and return the result.

        Args:
            after: what an evaluation after the last step returned.
            next_step: the program to continue with; "agent.py" shows episodes.
            extra: further entries of result.json.
        """
        self.after = after
        print_table(self.before, self.after, self.total, self.seconds)
        words = ["--num_tasks", "3"] if next_step == "agent.py" and self.config.env else []
        print(f"written: {self.config.output_dir}")
        if self.command != SAME_CALL:
            print(f"next:    {next_command(next_step, self.config, *words)}")
        result = {"success_before": self.before.get("success"),
                  "success_after": self.after.get("success"),
                  "before": self.before, "after": self.after,
                  "held_out_tasks": self.after.get("episodes"), "steps": self.total,
                  "seed": self.config.seed, "seconds": time.monotonic() - self.opened,
                  "peak_memory_mb": peak_memory_mb(), **extra}
        result = self.ranks.first(lambda: self._write_result(finite(result)))
        for end in self.endings:
            end()
        return result

    def _write_result(self, result):
        write_json(self.folder / "result.json", result)
        report = import_module(REPORT)
        try:
            report.write_html(self.folder)
        except (UserError, OSError) as error:
            # A page must not fail a run.
            print(f"report.html: {error}", file=sys.stderr)
        return report.Result(self.folder)

