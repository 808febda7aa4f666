"""Signs of life of the ranks of a torchrun job: where a cable is cut, no connection says so."""
import os
import threading
import time
from datetime import timedelta

BEAT = 5  # seconds between two signs of life
SILENCE = 60  # seconds without one: the rank's machine or its network is gone


class Others:
    """A thread counts this rank's signs in torchrun's store, and reads the counts of the others."""

    def __init__(self, rank: int, world: int):
        self.rank = rank
        self.listened = time.monotonic()  # when the store answered for the last time
        self.heard = [self.listened] * world  # when each rank's count grew for the last time
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self):
        import torch.distributed as dist
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]),
                              timeout=timedelta(seconds=SILENCE))
        before = [0] * len(self.heard)
        while True:
            try:
                store.add(f"alive/{self.rank}", 1)
                counts = [store.add(f"alive/{rank}", 0) for rank in range(len(before))]
            except RuntimeError:
                return  # `check` says so
            self.listened = time.monotonic()
            for rank, count in enumerate(counts):
                if count > before[rank]:
                    self.heard[rank] = self.listened
            before = counts
            time.sleep(BEAT)

    def check(self):
        """Raise RuntimeError if the store or another rank has been silent for too long."""
        now = time.monotonic()
        if now - self.listened > SILENCE:
            raise RuntimeError(f"torchrun's store has not answered for {SILENCE} s")
        for rank, when in enumerate(self.heard):
            if now - when > SILENCE + BEAT:
                raise RuntimeError(f"nothing was heard of rank {rank} for {SILENCE} s")
