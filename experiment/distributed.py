"""A run in one process. What several do, under torchrun, stands in experiment/ranks.py."""
import functools
import os
from collections import Counter
from importlib import import_module

RANKS = "experiment.ranks"  # which only several processes enter


class OneProcess:
    """The only process of a run. `Ranks`, which inherits from it, does together what it does alone.

    Attributes:
        rank, world: the number of this process, and how many there are.
    """

    rank, world = 0, 1

    def apart(self):
        """Return the same ranks for another thread: `gather` does not meet that of this one."""
        return self

    def launcher(self):
        """Return the words of a command line that start as many processes on this machine."""
        return ["python"]

    def share(self, n: int) -> range:
        """Return this rank's share of n things in a row."""
        return range(n * self.rank // self.world, n * (self.rank + 1) // self.world)

    def micro_batches(self, n: int, batch_size: int) -> list[slice]:
        """Return this rank's micro-batches of n sequences.

        They are smaller than batch_size where a rank would otherwise have none.
        """
        if -(-n // batch_size) < min(n, self.world):
            share = self.share(n)
            return [slice(share.start, share.stop)] if share else []
        starts = range(0, n, batch_size)[self.rank::self.world]
        return [slice(start, start + batch_size) for start in starts]

    def gather(self, item) -> list:
        """Return every rank's item, in the order of ranks, on every rank."""
        return [item]

    def first(self, act):
        """Call act() on rank 0 alone. Every rank returns its result or raises its error."""
        return act()

    def total(self, metrics: list[dict]) -> dict:
        """Return the sums of some dicts of numbers, name by name, over all ranks."""
        return sums_of(self.gather(sums_of(metrics)))

    def add(self, tensor):
        """Add up all ranks' tensors in place, and return the tensor."""
        return tensor

    def add_gradients(self, model):
        """Make p.grad the sum of all ranks' gradients."""

    def check_alike(self, weights):
        """Raise UserError if the ranks start from different weights."""


@functools.cache
def join():
    """Return this process's Ranks under torchrun, else OneProcess."""
    alone = os.environ.get("WORLD_SIZE", "1") == "1"
    return OneProcess() if alone else import_module(RANKS).Ranks()


def sums_of(metrics: list[dict]) -> dict:
    """Return the sums of some dicts of numbers, name by name."""
    sums = Counter()
    for numbers in metrics:
        sums.update({name: float(value) for name, value in numbers.items()})
    return sums
