"""Episodes of the next step, played by servers while this step's update runs: --rollout_ahead 1."""
import copy
import threading
import time
from functools import partial

from episodes.groups import collect_groups
from experiment.errors import UserError


class Ahead:
    """Called with a step's number, it returns the step's episodes and starts those of the next.

    They are played by the weights as they are now, so that the update which uses them will find
    them one version old. Their log-probabilities are those of the version that sampled. The first
    step, and that after a resume, is played while the trainer waits.
    """

    def __init__(self, play, tasks, config, run):
        """
        Args:
            play: `rollout` with the rest bound; its engine is a `Servers` of llm/vllm.py.
        """
        if run.ranks.world > 1:
            raise UserError("--rollout_ahead needs a single process: its episodes come in a "
                            "thread, and threads of several ranks would wait for each other")
        self.play, self.tasks, self.config, self.run = play, tasks, config, run
        self.servers = play.keywords["engine"]
        self.model = play.args[0]
        self.thread = None

    def __call__(self, step: int) -> list:
        began = time.monotonic()
        stale = self.thread is not None
        if not stale:
            self.start(step)
        while self.thread.is_alive():
            self.run.check()
            self.thread.join(0.1)
        if self.error:
            raise self.error
        episodes = self.episodes
        self.run.line |= self.shadow.line
        self.run.watch = self.shadow.watch
        self.run.rollout_seconds = time.monotonic() - began  # that the trainer waited
        self.run.log(staleness=int(stale))
        if step + 1 < self.run.total:
            self.start(step + 1)
        return episodes

    def start(self, step: int):
        """Play a step's groups in a thread, with a shadow of the run: the trainer's line is its."""
        self.servers.load(self.model)
        self.shadow = copy.copy(self.run)
        self.shadow.line = {}
        self.episodes = self.error = None
        self.thread = threading.Thread(target=self.collect, args=(step,), daemon=True)
        self.thread.start()

    def collect(self, step: int):
        try:
            play = partial(self.play, run=self.shadow)
            self.episodes = collect_groups(play, self.tasks, self.config, step, self.shadow)
        except BaseException as error:  # Stop among them; the trainer raises it
            self.error = error
