"""What is shown of a pass: a bar on a terminal, a line now and then elsewhere; and notes."""
import io
import os
import sys
import threading
from collections import Counter
from contextlib import contextmanager
from functools import partial

from tqdm import tqdm

from core.config import BARS, NO_BAR, say_once
from core.engine import Engine
from extras.background import in_thread
from extras.show.examples import KEPT, is_evaluation

REDRAWN = 0.5  # seconds between two drawings of a bar
FIRST_LINE, NEXT_LINE = 10, 30  # seconds before the lines of a pass, where there is no terminal

# The bars of transformers and the hub, which they look up as they are imported.
if sys.stderr and not sys.stderr.isatty() and "ipykernel" not in sys.modules:
    for library in ("HF_HUB", "HF_DATASETS"):
        os.environ.setdefault(f"{library}_DISABLE_PROGRESS_BARS", "1")


def duration(seconds):
    """Return a duration in words: "8.9 s", "12 min" or "3.1 h"."""
    if seconds < 90:
        return f"{seconds:.1f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


class Bar(tqdm):
    """A bar with the time left. It is drawn again while one item takes long.

    Without a terminal it is a line on stderr, of passes that take more than FIRST_LINE seconds.
    """

    drawn = "{desc}: {n_fmt}/{total_fmt}|{bar}| {words}"
    line = "{desc}: {n_fmt}/{total_fmt}, {words}"

    def __init__(self, items=None, what=None, total=None, disable=None, delay=2, leave=False):
        self.on_terminal = sys.stderr.isatty()
        self.has_ended = threading.Event()
        self.done_at = 0  # the seconds when the last item was done
        options = {"bar_format": self.drawn, "dynamic_ncols": True}
        if not self.on_terminal:
            options, delay = {"bar_format": self.line, "file": io.StringIO()}, FIRST_LINE
        super().__init__(items, what, total, disable=bool(disable), delay=delay, leave=leave,
                         **options)
        if not self.disable:
            in_thread(self.draw_often)

    def draw_often(self):
        """Draw the bar, or print its line, until it is closed."""
        pause = self.delay
        while not self.has_ended.wait(pause):
            with self.get_lock():
                if not self.disable:
                    # `close` clears what was printed.
                    self.last_print_t = self._time()
                    self.display()
            pause = REDRAWN if self.on_terminal else NEXT_LINE

    def display(self, msg=None, pos=None):
        """Override tqdm's for the lines. The message "" clears a bar."""
        if self.on_terminal:
            return super().display(msg, pos)
        if msg is None:
            print(self, file=sys.stderr, flush=True)

    def __iter__(self):
        try:
            for item in self.iterable:
                yield item
                self.update()
        finally:
            self.close()

    def update(self, n=1):
        """Count n items. `draw_often` shows it."""
        self.n += n
        self.done_at = self.elapsed

    def close(self):
        self.has_ended.set()
        super().close()

    @property
    def elapsed(self):
        """The seconds since the pass began, 0 of a bar that is not shown."""
        if self.disable:
            return 0
        return self._time() - getattr(self, "start_t", self._time())

    @property
    def format_dict(self):
        """The values of the format. tqdm asks for them when it draws."""
        words = duration(self.elapsed)
        if self.n and self.total:
            words = f"about {self.left(self.n, self.total, self.done_at)} left"
        return {**super().format_dict, "words": words}

    def left(self, done, total, done_at):
        """Return how long the rest takes at the pace of what was done after `done_at` seconds."""
        seconds = done_at / done * (total - done) - (self.elapsed - done_at)
        return duration(max(seconds, 0))


BARS.append(Bar)


@contextmanager
def episode_bar(agents, limits, run=None, engine=None):
    """Override core.config.episode_bar: show a bar of these episodes (row -> agent), and notes."""
    if run and not (run.played or run.checkpoint):
        print(f"playing {len(agents)} episodes: at most {limits.max_tokens} tokens each, "
              f"{limits.max_new_tokens} a turn")
    with EpisodeBar(agents, limits, engine) as bar:
        yield bar.step
    trajectories = [agent.trajectory for agent in agents.values()]
    note_limits(trajectories, limits)
    if run and is_evaluation(trajectories):
        run.kept["evaluated"] = trajectories[:KEPT]


def note_limits(trajectories: list, limits):
    """Print a note on a limit that is no flag (`envs.Limits`) and that more than a fifth met."""
    met = Counter(t.stop_reason for t in trajectories)
    met["tool_timeout"] = sum(t.info.get("timeouts", 0) > 0 for t in trajectories)
    for name in ("max_tool_calls", "max_tool_tokens", "tool_timeout"):
        if met[name] > 0.2 * len(trajectories):
            say_once(f"note: more than a fifth of the episodes played at once met {name} "
                     f"{getattr(limits, name)}; the environment may state more in its `limits`")


class EpisodeBar(Bar):
    """A bar of episodes (row -> Episode): how many have ended, tokens sampled, time left.

    Until the first token is sampled it counts the tokens of the prompts.
    """

    drawn = "{desc}: {n_fmt}/{total_fmt}|{bar}| {tokens:,} tokens{eta}"
    line = "{desc}: {n_fmt}/{total_fmt}, {tokens:,} tokens{eta}"

    def __init__(self, episodes, limits, engine=None):
        self.episodes, self.limits = episodes, limits
        self.decodes_at = 0  # the seconds when the prompts had been read
        self.read = self.begun = 0  # tokens of prompts: before this forward pass, and with it
        self.share = 0  # of the layers of this pass
        self.cache = None
        if isinstance(engine, Engine):  # another one has its prompts read elsewhere
            self.cache = engine.cache
            layers = engine.model.config.get_text_config().num_hidden_layers
            self.cache.update = partial(self.update_cache, self.cache.update, layers)
        super().__init__(what="episodes", total=len(episodes), disable=NO_BAR, delay=0)

    def update_cache(self, update, layers, key, value, layer, *rest, **options):
        """Stand for the cache's `update` until the prompts are read: each layer calls it once."""
        self.share = layer / layers
        return update(key, value, layer, *rest, **options)

    def step(self):
        """Called after every decode step. The first one has read the prompts, too."""
        self.decodes_at = self.decodes_at or self.elapsed
        if self.cache:
            del self.cache.update
            self.cache = None

    @property
    def format_dict(self):
        """The values of the format. tqdm asks for them when it draws."""
        values = super().format_dict
        ended = tokens = at_most = 0
        for row, episode in self.episodes.items():
            t = episode.trajectory
            tokens += sum(t.loss_mask)
            if t.stop_reason:
                ended += 1
            elif not episode.calling:
                tokens += len(row.turn)
            turns = episode.max_turns * self.limits.max_new_tokens
            at_most += min(self.limits.max_tokens, turns)
        expected, how = at_most, "at most"
        if ended:
            # Tokens per end estimate the mean length: what is not finished counts as it is.
            expected, how = min(len(self.episodes) * tokens / ended, at_most), "about"
        if not tokens:
            eta = self.prompts()
        else:
            seconds = (self.elapsed - self.decodes_at) * (expected - tokens) / tokens
            eta = f", {how} {duration(seconds)} left"
        return {**values, "n": ended, "tokens": tokens, "eta": eta}

    def prompts(self):
        """Return how much of the prompts has been read, in words. Rows of a group share theirs."""
        tokens, begun = {}, {}
        for row, episode in self.episodes.items():
            tokens[row.group] = len(episode.trajectory.token_ids)
            begun[row.group] = max(row.length, begun.get(row.group, 0))
        total, begun = sum(tokens.values()), sum(begun.values())
        if begun > self.begun:
            # A forward pass has begun: those before it are done.
            self.read, self.begun, self.share = self.begun, begun, 0
        read = round(self.read + self.share * (self.begun - self.read))
        left = duration(self.elapsed)
        if read:
            left = f"about {self.left(read, total, self.elapsed)} left"
        return f", prompts {read:,} of {total:,}, {left}"
