"""Several processes as one: `torchrun --nproc_per_node=N grpo.py ...`, on one machine or on many.

Every rank holds all weights, which are equal because seed and files are. It plays its share of a
step's tasks, the episodes of a task together, and then all ranks have all episodes. It takes its
share of the step's micro-batches, whose losses are divided by counts over the whole step, so that
one flat all-reduce gives every rank the gradient that one process would have. Rank 0 writes.

A rank that ends ends the others: torchrun stops them, and a collective that waits for it fails. Of
a machine that is cut off nobody is told: so a thread meets those of the other ranks all the time.
"""
import functools
import os

import core.run
from core.config import AROUND
from core.run import OneProcess

if os.environ.get("WORLD_SIZE", "1") != "1":
    from extras.ranks.processes import leaving
    AROUND.insert(0, leaving)


@functools.cache
def join():
    """Return this process's Ranks under torchrun, else OneProcess."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return OneProcess()
    from extras.ranks.processes import Ranks  # torch.distributed, which a single process needs not
    return Ranks()


class Run(core.run.Run):
    """`core.run.Run` whose work is shared by the processes of torchrun."""

    def processes(self):
        return join()

    def load(self, model, tokenizer, optimizer, total):
        if self.ranks.world > 1:
            weights = [p for group in optimizer.param_groups for p in group["params"]]
            self.ranks.check_alike(weights)
        return super().load(model, tokenizer, optimizer, total)
