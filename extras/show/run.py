"""`core.run.Run` that shows itself: bars, the plan, notes and alarms, a full table, report.html."""
import os
import sys
from itertools import takewhile

from tqdm import tqdm

import envs
from core.config import NO_BAR, first_line, options, progress, say
from core.data import is_finite
from core.run import CONFIG, write_whole
from extras.show.examples import chosen, side_by_side, whole
from extras.show.notes import (CHANGED, Alarms, changed_flags, credit_note, first_notes, idle_notes,
                               log_rows, next_command, path_of, plan, print_table, sparkline,
                               step_line, step_numbers)
from extras.show.record import TOKENS, Recording


class Run(Recording):
    """A run that says what it does.

    Attributes:
        programs: the folder of our programs, from that in which the run was started.
        noted: the ends of the notes that were printed on the untrained policy.
        passed: the sequences of all passes of a step.
        episodes: those of the step, once they are logged.
        reports: the loggers of --report_to, or None.
        bar: the progress bar of the steps, once `load` has been called.
        credit_noted: True once it was said what --credit does to the rewards of this run.
        examples: episodes of the first held-out tasks, played before training.
        example: the one that is shown, before and after training.
    """

    passed, bar, credit_noted = 0, None, False
    episodes, reports = (), None
    examples, example = (), None

    def __init__(self, config, algorithm):
        super().__init__(config, algorithm)
        self.noted = set()
        # An environment may leave the current folder, even for one that is removed.
        self.programs = path_of("")
        if self.finished:
            self.finished = self.ranks.first(self.result_to_show)
        names = getattr(config, "report_to", "none")
        if names != "none" and self.writes and not self.finished:
            from extras.show.loggers import Reports
            self.reports = Reports(names)

    def result_to_show(self):
        """Return the result, which a notebook shows as a page. The page is loaded only here."""
        from extras.show.page import Result
        return Result(self.folder)

    def __exit__(self, kind, error, traceback):
        if self.bar:
            self.bar.close()
        super().__exit__(kind, error, traceback)

    # ------------------------------------------------------------------------------- before a step
    def load(self, model, tokenizer, optimizer, total):
        env_names = getattr(self.config, "env", None)
        self.has_expert = envs.all_have(env_names, "_expert")
        self.has_tools = any(envs.tools(envs.load(name)) for name in envs.names_of(env_names))
        self.alarms = Alarms(options(type(self.config)), self.has_expert)
        self.listeners.append(self.warn)
        self.endings.append(self.write_page)
        first = super().load(model, tokenizer, optimizer, total)
        if self.reports:
            self.reports.begin(self)
        for note in idle_notes(self.config):
            say(note)
        if first:
            self.note_on(self.before)
        if total > first:
            say(plan(self.config, total - first))
        self.bar = tqdm(total=total, desc=self.algorithm, initial=first, disable=NO_BAR,
                        leave=False, dynamic_ncols=True, bar_format=(
                            "{l_bar}{bar}| {n_fmt}/{total_fmt}, {remaining} left{postfix}"))
        return first

    def write_config(self, *switches):
        """Add which flags differ from the defaults."""
        super().write_config(*switches)
        path = self.folder / CONFIG
        changed = ", ".join(changed_flags(self.config))
        write_whole(path, f"{path.read_text('utf-8')}{CHANGED}{changed}\n")

    def restore(self, checkpoint):
        super().restore(checkpoint)
        self.alarms.read(self.folder / "metrics.jsonl")
        if (self.folder / TOKENS).exists():
            rows = (row for _, row in log_rows(self.folder / TOKENS))
            self.examples = [row["episode"] for row in takewhile(lambda row: "when" in row, rows)]

    def log_evaluation(self, step, metrics):
        super().log_evaluation(step, metrics)
        if step == 0:
            self.note_on(metrics)
            self.examples = [t.to_json() for t in self.kept.pop("evaluated", ())]
            self.write_examples("before", self.examples)

    def write_examples(self, when, episodes):
        """Append episodes of held-out tasks to tokens.jsonl."""
        if self.config.record and episodes:
            self.append(TOKENS, [{"step": self.step, "when": when, "episode": episode}
                                 for episode in episodes])

    def note_on(self, metrics, whose="held-out"):
        """Print notes on the untrained policy's episodes, each once."""
        if self.algorithm == "sft":
            return
        for note in first_notes(metrics, self.config, self.model, self.has_expert, self.has_tools,
                                whose):
            if note[-12:] not in self.noted:
                say(note)
            self.noted.add(note[-12:])

    # ------------------------------------------------------------------------------------- a step
    def start_clock(self):
        super().start_clock()
        self.passed, self.episodes = 0, ()

    def micro_batches(self, sequences, *seed):
        self.passed += sequences
        number = len(self.ranks.micro_batches(sequences, self.config.batch_size))
        passes = super().micro_batches(sequences, *seed)
        names = [word for word in seed if isinstance(word, str)]
        yield from progress(passes, *names or ["forward passes"], number)

    def timing_of(self, line, seconds):
        """Add seconds and tokens per second of the rollout and of the updates."""
        update_seconds = seconds - self.rollout_seconds
        timing = super().timing_of(line, seconds)
        timing = {"seconds": seconds, "update_seconds": update_seconds, **timing}
        if self.rollout_seconds and "episodes" in line:
            timing["rollout_seconds"] = self.rollout_seconds
            # Every pass, to score or to update, is over all episodes.
            timing["update_tokens_per_second"] = line["tokens"] * self.passed / update_seconds
            # The seconds of a step that was played ahead are only those of waiting for it.
            if not line.get("staleness"):
                timing["rollout_tokens_per_second"] = self.rollout_tokens / self.rollout_seconds
        return timing

    def log_episodes(self, episodes):
        super().log_episodes(episodes)
        self.episodes = episodes
        note = credit_note(self.config, episodes)
        if note and not self.credit_noted:
            self.credit_noted = True
            say(note)

    def warn(self, step, metrics, timing):
        """Print the alarms that a step's line raises, and what its first episodes show."""
        if step == 0 and self.rollout_tokens:
            self.note_on(metrics, "first step's")
        for sentence in self.alarms.add(metrics):
            say(f"ALARM, step {step + 1}: {sentence}")

    def show_step(self, line, seconds):
        self.bar.update()
        self.bar.set_postfix_str(step_numbers(line, 2) + self.success_so_far())
        if self.bar.disable:
            left = self.seconds / self.step * (self.total - self.step)
            say(step_line(self.step, self.total, line, seconds, left))
        every = self.config.show_every
        if every and self.step % every == 0 and self.recorded:
            t, columns = next(iter(self.recorded.values()))
            say(f"\n{whole(t, *columns.get('advantages', ())[:1])}\n")

    def success_so_far(self):
        """Return a line of blocks for a terminal that can show them."""
        shares = [line["success"] for line in self.alarms.lines if is_finite(line.get("success"))]
        is_unicode = (getattr(sys.stderr, "encoding", "") or "").lower().startswith("utf")
        return f"  {sparkline(shares)}" if is_unicode and not self.bar.disable else ""

    # --------------------------------------------------------------------------------- the result
    def show_result(self, next_program):
        if self.example:
            print(side_by_side(*self.example))
        print_table(self.before, self.after, self.total, self.seconds)
        print(f"written: {self.config.output_dir}")
        # No command finds an environment or a reward of the program that was started.
        code = f"{getattr(self.config, 'env', '')} {getattr(self.config, 'rewards', '')}"
        if "main__:" not in code:
            words = []
            if next_program == "agent.py" and self.config.env:
                words = ["--num_tasks", "3"]
            program = os.path.join(self.programs, next_program)
            print(f"next:    {next_command(program, self.config, *words)}")

    def finish(self, after, *words, **extra):
        """Return the result as a notebook shows it."""
        later = [t.to_json() for t in self.kept.pop("evaluated", ())]
        self.example = chosen(self.examples, later)
        if self.example:
            self.write_examples("after", self.example[2:])
        super().finish(after, *words, **extra)
        return self.ranks.first(self.result_to_show)

    def write_page(self, folder):
        """Write report.html. The page is loaded only here."""
        from extras.show.page import write_html
        try:
            if self.writes:
                write_html(folder)
        except Exception as error:
            # A page must not fail a run.
            print(f"report.html: {first_line(error)}", file=sys.stderr)
