"""`core.run.Run` that stops where nothing is lost and continues bit for bit.

It overrides what core/run.py names for it, and needs no line in a training loop: that an update has
begun, it learns from a hook of the optimizer.
"""
import os
import shlex
import shutil
import sys

import core.run
from core.config import CODE, convert, options, printable, say
from core.data import to_json
from core.run import CONFIG, EPISODES, LOGS, TEMPORARY, cut_log, set_aside, write_whole
from extras.exact.checkpoint import RESTORED, check_room, fingerprints, ingredients, prune, seal
from extras.exact.files import sync
from extras.exact.output_folder import enter, is_too_large, lock, thin_episodes
from extras.exact.process import Signals
from extras.stop import Stop

BAD_UPDATES = 3  # updates in a row that are not finite end the run


class Run(core.run.Run):
    """A run with a lock, signals, sealed checkpoints and the files of bad steps.

    Attributes:
        command: the command that continues this run, or what does where no command can.
        started: the folder in which it was started, which an environment may leave.
        updated: True from the first update of a step until its lines are written.
        unwritten: the arguments of `write_line` while it writes, else None.
        bad: updates in a row that were not finite.
        scores: {step as text: success of its evaluation}, by which the best checkpoint is kept.
        made_of: {label: fingerprint} of the files that the run began with.
        thinned: True if episodes were taken out of their log since the last checkpoint.
    """

    restored = RESTORED
    bad, updated, unwritten, thinned = 0, False, None, False

    def __init__(self, config, algorithm):
        """Lock the output folder, and verify the checkpoint to resume. `begin` changes the folder.

        Raises UserError if a value is out of bounds, or the folder cannot be written, is in use, or
        holds a run that is neither to be resumed nor to be overwritten.
        """
        self.made_of, self.scores = {}, {}
        # In a notebook none are handled.
        self.signals = Signals.active or Signals()
        # Python code may say "1e-4", as PyYAML reads it.
        vars(config).update({name: convert(getattr(config, name), option, f"--{name}")
                             for name, option in options(type(config)).items()})
        super().__init__(config, algorithm)
        # The first rank has read them.
        self.finished, config.max_steps = self.ranks.first(
            lambda: (self.finished, config.max_steps))

    # -------------------------------------------------------------------------------- the folder
    def find_checkpoint(self):
        self.lock = enter(self.folder, self.config)
        checkpoint = super().find_checkpoint()
        if self.config.resume:
            # Most runs begin anew.
            from extras.exact.resuming import continue_run
            continue_run(self, checkpoint)
        return checkpoint

    def processes(self):
        """Set the command, too: in every process, before an environment changes the folder."""
        ranks = super().processes()
        # A notebook's own Config has no file.
        module = sys.modules[type(self.config).__module__]
        self.started = os.getcwd()
        self.program = os.path.abspath(getattr(module, "__file__", f"{self.algorithm}.py"))
        launcher = ranks.launcher() if ranks.world > 1 else ["python"]
        words = [*launcher, os.path.relpath(self.program), "--config",
                 os.path.join(self.config.output_dir, CONFIG)]
        # What names or permits code, a config file does not give.
        if getattr(self.config, "unsafe_code", False):
            words.append("--unsafe_code")
        for name in CODE:
            if ":" in str(getattr(self.config, name, "")):
                words += [f"--{name}", getattr(self.config, name)]
        self.command = shlex.join([*words, "--resume"])
        # __main__:Class or __mp_main__:Class: no program finds it.
        if "main__:" in self.command:
            self.command = "the same call with resume=True"
        return ranks

    def begin(self, written_before=()):
        """Take the folder. From then on there is a command that continues the run."""
        super().begin(written_before)
        self.signals.run = self.signals.run or self

    def take_folder(self, written_before):
        super().take_folder(written_before)
        if not (self.folder / ".lock").exists():
            # It has been renamed with the run that is overwritten.
            self.lock = lock(self.folder)

    def write_config(self, switches=""):
        path = self.folder / CONFIG
        # A run that is resumed without the flag still holds episodes that ran unprotected.
        header = path.read_text("utf-8").partition("\n")[0] if path.exists() else ""
        if getattr(self.config, "unsafe_code", False) or "--unsafe_code" in header:
            switches = " --unsafe_code"
        super().write_config(switches)

    # ------------------------------------------------------------------------------ leaving early
    def __exit__(self, kind, error, traceback):
        """Save the last whole step if anything ends the block early.

        Between two updates of a step the weights are those of no step: the last checkpoint stands.
        """
        super().__exit__(kind, error, traceback)
        looping, self.signals.looping = self.signals.looping is self, None
        if not error or not looping:
            return
        if self.unwritten and self.writes:
            # The step has ended, but its lines are not whole.
            for name in LOGS[:2]:
                cut_log(self.folder / name, self.unwritten[0])
            self.write_line(*self.unwritten)
        if not self.updated:
            self.save()
        if isinstance(error, Stop):
            return
        how = f"continue with: {self.command}"
        # The other ranks do not know what is saved.
        if self.writes:
            saved = "nothing is saved" if self.saved is None else f"step {self.saved} is saved"
            lost = "half a step is lost, " if self.updated else ""
            how = f"{lost}{saved}; {how}"
        error.add_note(how)

    def check(self):
        """Leave if a signal came and the step has changed no weight yet."""
        if self.signals.signum and not self.updated:
            raise self.signals.stop()

    # ---------------------------------------------------------------------------------- the loop
    def load(self, model, tokenizer, optimizer, total):
        optimizer.register_step_pre_hook(self.begin_update)
        self.begin()
        self.ranks.first(lambda: check_room(self.folder, optimizer))
        if self.writes and not self.made_of:
            self.made_of = fingerprints(ingredients(self))
        first = super().load(model, tokenizer, optimizer, total)
        # In the loop a signal waits until nothing is lost.
        self.signals.looping = self
        return first

    def begin_update(self, *_):
        """Called before the optimizer steps. From here until the step's line signals wait."""
        # With several ranks one would leave here while the others update.
        if self.ranks.world == 1:
            self.check()
        self.bad, self.updated = 0, True

    def log_evaluation(self, step, metrics):
        super().log_evaluation(step, metrics)
        if step:
            # The checkpoint of this step may be the best.
            self.scores[str(step)] = metrics.get("success")
            self.save()
            self.start_clock()

    def end_step(self, step):
        super().end_step(step)
        self.check()

    def write_line(self, step, metrics, timing):
        """Write a step's lines. The step is whole with them."""
        self.unwritten = step, metrics, timing
        super().write_line(step, metrics, timing)
        self.unwritten, self.updated = None, False
        for log in (self.folder / name for name in LOGS[2:]):
            # The episodes that dpo.py played are all of one step, which stays whole.
            is_thinned = "episodes" in metrics or log.name != EPISODES
            if self.writes and is_thinned and is_too_large(log):
                thin_episodes(log)
                self.thinned = True

    def skip(self, episodes, reason):
        """Keep the episodes of what is skipped in bad_step_N.json, from which no program learns.

        The third in a row raises Stop.
        """
        if not episodes:
            return super().skip(episodes, reason)
        self.bad += 1
        reason, path = printable(reason), self.folder / f"bad_step_{self.step}.json"
        if self.writes:
            rows = [t.to_json() for t in episodes]
            bad_step = {"step": self.step, "why": reason, "episodes": rows}
            write_whole(path, to_json(bad_step, indent=1))
        say(f"step {self.step + 1}: {reason}: skipped; its episodes are in {path}")
        if self.bad >= BAD_UPDATES:
            raise Stop(f"step {self.step + 1}: {reason}: the third update in a row that is not "
                       f"finite; lower --learning_rate, or look at the rewards in {path}; another "
                       f"run can start from this one's checkpoints: --model_path {self.folder}", 3)

    # -------------------------------------------------------------------------------- checkpoints
    def save_is_due(self):
        # Resumed from an earlier checkpoint, a run would thin the thinned log once more.
        return self.thinned or super().save_is_due()

    def save(self):
        """Flush the logs, and then save. Of a checkpoint that cannot be written nothing stays."""
        if not self.writes or self.saved == self.step:
            return super().save()
        for path in (self.folder / name for name in LOGS):
            if path.exists():
                sync(path)
        try:
            super().save()
        finally:
            shutil.rmtree(self.folder / "checkpoints" / TEMPORARY, ignore_errors=True)
        self.thinned = False

    def write_checkpoint(self, folder):
        """Seal the checkpoint, and rename what stands in its place."""
        super().write_checkpoint(folder)
        seal(folder)
        place = folder.with_name(f"step_{self.step:06d}")
        if place.exists():
            set_aside(place)

    def prune(self):
        """Keep the last two checkpoints and the best, once the new one is on the disk."""
        sync(self.folder / "checkpoints")
        prune(self.folder, self.scores)
