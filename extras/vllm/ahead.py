"""Episodes of the next step, played by servers while this step's update runs: --rollout_ahead 1."""
import time
from concurrent.futures import wait
from copy import copy
from functools import partial
from queue import SimpleQueue

import core.data
from extras.background import in_thread, promised


def collect_ahead(play, tasks, config, step, run) -> list:
    """Return what core's `collect_groups` does, played while the step before was learned from."""
    if not hasattr(run, "ahead"):
        collect = partial(core.data.collect_groups, tasks=tasks, config=config)
        run.ahead = Ahead(collect, play, run)
    return run.ahead(step)


class Ahead:
    """Called with a step's number, it returns the step's episodes and starts those of the next.

    They are played by the weights as they are now, so that the update which uses them finds them
    one version old. Their log-probabilities are those of the version that sampled. The first step,
    and that after a resume, is played while the trainer waits. Reward functions run after the
    update, because their time-outs may be signals, which only the main thread gets.
    """

    def __init__(self, collect, play, run):
        """
        Args:
            collect: `collect_groups` with tasks and config bound.
            play: `rollout` with the rest bound; its engine is a `Servers` of servers.py.
        """
        self.collect, self.play, self.run = collect, play, run
        # This process's ranks, for another thread.
        self.ranks = run.ranks.apart() if run.ranks.world > 1 else run.ranks
        self.pay = play.keywords.get("pay")
        self.coming = None  # the Future of the next step's episodes
        self.due = SimpleQueue()  # functions that the main thread is to call

    def __call__(self, step: int) -> list:
        self.run.log(staleness=int(self.coming is not None))
        if self.coming:
            episodes = self.finish()
        else:
            episodes = self.collect(self.play, step=step, run=self.run)
        if step + 1 < self.run.total:
            self.start(step + 1)
        return episodes

    def finish(self) -> list:
        """Wait for the episodes and return them. Log what their thread has measured."""
        began = time.monotonic()
        while not self.coming.done():
            self.run.check()
            wait([self.coming], 0.1)
            while not self.due.empty():
                self.due.get()()
        self.run.log(**self.shadow.line)
        self.run.played = self.shadow.played
        self.run.rollout_seconds += time.monotonic() - began
        return self.coming.result()

    def start(self, step: int):
        """Play a step's groups in a thread, by the weights as they are now."""
        servers = self.play.keywords["engine"]
        servers.load_policy(self.play.args[0])
        # A copy, because the trainer continues to write into its run and to use its ranks.
        self.shadow = copy(self.run)
        self.shadow.line, self.shadow.ranks = {}, self.ranks
        # They stay with this step's adapter, because the step of their run stays the same.
        servers = copy(servers)
        servers.run = self.shadow
        play = partial(self.play, engine=servers, run=self.shadow,
                       pay=self.pay_later if self.pay else None)
        self.coming = in_thread(partial(self.collect, play, step=step, run=self.shadow))

    def pay_later(self, episodes: list):
        """Let the main thread pay the episodes that the other thread has played."""
        future, work = promised(self.pay, episodes)
        self.due.put(work)
        future.result()
