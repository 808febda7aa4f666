"""A run in one process. What several do, under torchrun, stands in experiment/ranks.py."""
import functools
import os
from collections import Counter
from importlib import import_module

RANKS = "experiment.ranks"  # which only several processes enter


class OneProcess:
    """The only process of a run: what `Ranks` does together, it does alone."""

    rank, world = 0, 1

    def apart(self):
        return self

    def launcher(self):
        return ["python"]

    def share(self, n: int) -> range:
        return range(n)

    def micro_batches(self, n: int, batch_size: int) -> list[slice]:
        return [slice(start, start + batch_size) for start in range(0, n, batch_size)]

    def gather(self, item) -> list:
        return [item]

    def first(self, act):
        return act()

    def total(self, metrics: list[dict]) -> dict:
        return sums_of(metrics)

    def add(self, tensor):
        return tensor

    def add_gradients(self, model):
        pass

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
