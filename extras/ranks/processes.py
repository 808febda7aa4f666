"""Processes that torchrun starts: their collectives, and how one learns that another is gone."""
import atexit
import os
import sys
import time
from contextlib import contextmanager, suppress
from copy import copy
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from extras.background import in_thread
from core.run import OneProcess
from core.config import Printable, UserError, first_line, shown
from extras.stop import Stop

WAIT = timedelta(hours=24)  # for a rank that lives, such as one with a longer rollout
TIMEOUT = timedelta(minutes=5)  # of a collective, once all ranks are there
START = timedelta(minutes=5)  # in which all ranks have to start
CONNECT = timedelta(seconds=20)  # gloo waits up to five times as long for who never connects
SILENCE = timedelta(minutes=1)  # of a rank that is gone, or whose network is


class RankLost(Printable, RuntimeError):
    """Another process of a torchrun job has ended before the work was done."""

    code = 5


@contextmanager
def leaving():
    """End this rank when its program has ended: the threads of gloo may abort an orderly end."""
    code = 0
    try:
        yield
    except Printable as error:
        rank, code = os.environ["RANK"], error.code
        print(shown(error, "" if rank == "0" else f": rank {rank}"), file=sys.stderr)
    sys.stdout.flush()
    os._exit(code)


class Ranks(OneProcess):
    """This process's place among several, as the environment variables of torchrun describe it.

    Attributes:
        group: for collectives; meeting: for waiting until all are there for one.
    """

    def __init__(self):
        rank, world = self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        backend = "gloo"
        if torch.cuda.is_available():
            backend = "cpu:gloo,cuda:nccl"
            # NCCL's own watchdog would end the process before its last step is saved.
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
            local, gpus = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
            if local >= gpus:
                raise UserError(f"process {local} of this machine has no GPU; start torchrun with "
                                f"--nproc_per_node={gpus}")
            torch.cuda.set_device(local)
        try:
            # A rank that starts late is waited for here: then connecting takes none of them long.
            store, *_ = next(dist.rendezvous("env://", timeout=START))
            store.set(f"started_{rank}", "")
            store.wait([f"started_{other}" for other in range(world)])
            dist.init_process_group(backend, store=store, rank=rank, world_size=world,
                                    timeout=CONNECT)
            self._make_groups(backend)
            pulse = dist.new_group(backend="gloo", timeout=SILENCE)
        except RuntimeError as error:
            raise UserError(f"the ranks do not reach each other ({first_line(error)}); set "
                            "GLOO_SOCKET_IFNAME to the interface between the machines") from None
        self.pulse = in_thread(meet, pulse)
        # Left to the end of the process, the threads of gloo would now and then abort it.
        atexit.register(dist.destroy_process_group)
        if rank:  # what rank 0 prints is enough
            sys.stdout = open(os.devnull, "w", encoding="utf-8")

    def share(self, n: int) -> range:
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

    def apart(self):
        """Return the same ranks for another thread: `gather` does not meet that of this one."""
        ranks = copy(self)
        ranks._make_groups("gloo")
        return ranks

    def _make_groups(self, backend):
        self.group = dist.new_group(backend=backend, timeout=TIMEOUT)
        self.meeting = dist.new_group(backend="gloo", timeout=WAIT)

    def launcher(self):
        """Return the words of a command line that start as many processes on this machine."""
        here = int(os.environ.get("LOCAL_WORLD_SIZE", self.world))
        words = ["torchrun", f"--nproc_per_node={here}"]
        if here < self.world:
            words += [f"--nnodes={self.world // here}", f"--node_rank={os.environ['GROUP_RANK']}",
                      f"--master_addr={os.environ['MASTER_ADDR']}",
                      f"--master_port={os.environ['MASTER_PORT']}"]
        return words

    def gather(self, item) -> list:
        """Return every rank's item, in the order of ranks, on every rank."""
        items = [None] * self.world
        self._together(dist.all_gather_object, items, item, self.group)
        return items

    def first(self, act):
        """Call act() on rank 0 alone. Every rank returns its result or raises its error."""
        out = error = None
        if self.rank == 0:
            try:
                out = act()
            except (UserError, Stop) as raised:
                error = raised
        out, error = self.gather((out, error))[0]
        if error:
            # A process that ends with something unread takes back what it sent: wait for all.
            with suppress(RankLost):
                self.gather(None)
            raise error
        return out

    def add(self, tensor):
        """Add up all ranks' tensors in place, and return the tensor."""
        self._together(dist.all_reduce, tensor, dist.ReduceOp.SUM, self.group, True)
        return tensor

    def all_reduce(self, model, metrics):
        """Add up the gradients in one flat all-reduce. A rank without a share adds zeros."""
        weights = [p for p in model.parameters() if p.requires_grad]
        for p in weights:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        gradients = [p.grad for p in weights]
        vector_to_parameters(self.add(parameters_to_vector(gradients)), gradients)
        return self.total(metrics)

    def check_alike(self, weights):
        """Raise UserError if the ranks start from different weights."""
        total = sum(p.detach().double().abs().sum().item() for p in weights)
        if len(set(self.gather(f"{total:.9g}"))) > 1:
            raise UserError("the ranks start from different weights; give all machines the same "
                            "files and versions")

    def _together(self, collective, *args):
        """Call a collective when all are there. Raises RankLost if another rank has ended."""
        try:
            self._wait(dist.all_reduce(torch.zeros(1), group=self.meeting, async_op=True))
            work = collective(*args)
            if work:
                self._wait(work)
        except RuntimeError as error:
            raise RankLost(f"another rank is gone ({first_line(error)})") from None

    def _wait(self, work):
        """Wait for a collective while the others live. Without one of them NCCL's never ends."""
        while not work.is_completed():
            if self.pulse.done():
                raise RuntimeError(f"no sign of life for {SILENCE.seconds} s")
            time.sleep(0.002)
        work.wait()


def meet(pulse):
    """Meet the other ranks again and again, until one does not come in time."""
    with suppress(RuntimeError):
        while True:
            dist.barrier(pulse)
            time.sleep(5)
