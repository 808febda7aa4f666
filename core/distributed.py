"""A run in one process. What several do, under torchrun, stands in extras/ranks/__init__.py."""
import functools
import os
from collections import Counter
from importlib import import_module

RANKS = "extras.ranks"  # which only several processes enter


class OneProcess:
    """The only process of a run. What `Ranks`, its subclass, does together, it does alone."""

    rank, world = 0, 1  # the number of this process, and how many there are

    def apart(self):
        return self

    def launcher(self):
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
        return [item]

    def first(self, act):
        return act()

    def total(self, metrics: list[dict]) -> dict:
        """Return the sums of some dicts of numbers, name by name, over all ranks."""
        return sums_of(self.gather(sums_of(metrics)))

    def add(self, tensor):
        return tensor

    def add_gradients(self, model):
        pass

    def all_reduce(self, model, metrics: list[dict]) -> dict:
        """Make p.grad the sum of all ranks' gradients, and return the sums of their metrics."""
        self.add_gradients(model)
        return self.total(metrics)

    def check_alike(self, weights):
        pass


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
