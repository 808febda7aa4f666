"""What is shown of episodes that are played: a bar, which only a terminal gets, and notes."""
import os
import sys
from collections import Counter
from contextlib import contextmanager
from functools import partial

from tqdm import tqdm

from core.config import NO_BAR, say_once

# The bars of transformers and the hub, which they look up as they are imported.
if not sys.stderr.isatty() and "ipykernel" not in sys.modules:
    for library in ("HF_HUB", "HF_DATASETS"):
        os.environ.setdefault(f"{library}_DISABLE_PROGRESS_BARS", "1")


def duration(seconds):
    """Return a duration in words: "8.9 s", "12 min" or "3.1 h"."""
    if seconds < 90:
        return f"{seconds:.1f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


@contextmanager
def episode_bar(agents, limits, run=None):
    """Override core.config.episode_bar: show a bar of these episodes (row -> agent), and notes."""
    if run and not (run.played or run.checkpoint):
        print(f"playing {len(agents)} episodes: at most {limits.max_tokens} tokens each, "
              f"{limits.max_new_tokens} a turn")
    with EpisodeBar(agents, limits) as bar:
        yield partial(bar.update, 0)
    note_limits([agent.trajectory for agent in agents.values()], limits)


def note_limits(trajectories: list, limits):
    """Print a note on a limit that is no flag (`envs.Limits`) and that more than a fifth met."""
    met = Counter(t.stop_reason for t in trajectories)
    met["tool_timeout"] = sum(t.info.get("timeouts", 0) > 0 for t in trajectories)
    for name in ("max_tool_calls", "max_tool_tokens", "tool_timeout"):
        if met[name] > 0.2 * len(trajectories):
            say_once(f"note: more than a fifth of the episodes played at once met {name} "
                     f"{getattr(limits, name)}; the environment may state more in its `limits`")


class EpisodeBar(tqdm):
    """A bar of episodes (row -> Episode): how many have ended, tokens sampled, time left."""

    def __init__(self, episodes, limits):
        self.episodes, self.limits = episodes, limits
        super().__init__(total=len(episodes), desc="episodes", disable=NO_BAR, leave=False,
                         dynamic_ncols=True, mininterval=0.5, miniters=0, bar_format=(
                             "{desc}: {n_fmt}/{total_fmt}|{bar}| {tokens:,} tokens{eta}"))

    @property
    def format_dict(self):
        """The values of bar_format. tqdm asks for them when it draws."""
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
        expected, eta = at_most, ""
        if ended:
            # Tokens per end estimate the mean length: what is not finished counts as it is.
            expected = min(len(self.episodes) * tokens / ended, at_most)
        if tokens:
            left = duration(values["elapsed"] * (expected - tokens) / tokens)
            eta = f", about {left} left" if ended else f", at most {left} left"
        return {**values, "n": ended, "tokens": tokens, "eta": eta}
