"""The progress bar of episodes, and durations in words. Only a terminal gets a bar."""
from contextlib import contextmanager
from functools import partial

from tqdm import tqdm

from core.config import NO_BAR


def duration(seconds):
    """Return a duration in words: "8.9 s", "12 min" or "3.1 h"."""
    if seconds < 90:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


@contextmanager
def episode_bar(agents):
    """Override core.config.episode_bar: show a bar of these episodes (row -> agent)."""
    with EpisodeBar(agents) as bar:
        yield partial(bar.update, 0)


class EpisodeBar(tqdm):
    """A bar of episodes (row -> Episode): how many have ended, tokens sampled, time left."""

    def __init__(self, episodes):
        self.episodes = episodes
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
            ended += bool(t.stop_reason)
            is_taken = t.stop_reason or episode.calling
            tokens += sum(t.loss_mask) + (0 if is_taken else len(row.turn))
            limits = episode.limits
            at_most += min(limits.max_tokens, episode.max_turns * limits.max_new_tokens)
        # Tokens per end estimate the mean length: what is not finished counts with what it has.
        expected = min(len(self.episodes) * tokens / ended, at_most) if ended else at_most
        left = values["elapsed"] * (expected - tokens) / max(tokens, 1)
        eta = f", {'about' if ended else 'at most'} {duration(left)} left" if tokens else ""
        return {**values, "n": ended, "tokens": tokens, "eta": eta}
