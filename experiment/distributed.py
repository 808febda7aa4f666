"""Several processes as one: `torchrun --nproc_per_node=N grpo.py ...`, on one machine or on many.

Every rank holds all weights, which are equal because seed and files are. It plays its share of a
step's tasks, the episodes of a task together, and then all ranks have all episodes. It takes its
share of the step's micro-batches, whose losses are divided by counts over the whole step, so that
one flat all-reduce gives every rank the gradient that one process would have. Rank 0 writes.

Beside torch's process group each rank holds a plain connection to rank 0. The kernel closes it
however a process ends, and so the others learn who is gone, where a collective would only wait.
"""
import atexit
import functools
import os
import socket
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from datetime import timedelta

from experiment.errors import Stop, UserError, first_line

GRACE = 10  # seconds between a rank's end and that of the others, who may save in them
JOIN_MINUTES = 10  # to wait for all ranks to start
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def join():
    """Return this process's Ranks, as the environment variables of torchrun describe them."""
    return _joined() if os.environ.get("WORLD_SIZE", "1") != "1" else Ranks(0, 1)


@functools.cache
def _joined():
    """Return the one Ranks of this process; torch's process group, too, exists once."""
    for name in VARIABLES:
        value = os.environ.get(name, "")
        if not value or name != "MASTER_ADDR" and not value.isdecimal():
            raise UserError(f"WORLD_SIZE is {os.environ['WORLD_SIZE']!r} and {name} is {value!r}: "
                            "start several processes with torchrun, or unset WORLD_SIZE")
    return Ranks(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))


class Ranks:
    """This process's place among several. In a single process every method is a no-op.

    Attributes:
        rank, world: the number of this process, and how many there are.
        gone: the name of a rank that left before the work was done, or None.
        noticed: the event that `gone` is set.
        peers: {connection: (its lines of text, the name of the rank at its other end)}.
        runs: how many runs are under way, one inside the other.
        leave: raises what ends the outermost run, which sets it.
    """

    def __init__(self, rank: int, world: int):
        self.rank, self.world = rank, world
        self.gone, self.runs, self.leave = None, 0, self._lost
        self.noticed = threading.Event()
        self.peers = {}
        if world == 1:
            return
        import torch
        import torch.distributed as dist
        backend = "gloo"
        if torch.cuda.is_available():
            backend = "cpu:gloo,cuda:nccl"
            self._choose_gpu()
        # A rank that dies while the others start is noticed like one that dies in a run.
        self.runs = 1
        self._meet()
        # A long wait is a long rollout. The connections tell who is gone.
        self._together(dist.init_process_group, backend, timeout=timedelta(days=7),
                       store=self.store, rank=rank, world_size=world)
        self.runs = 0
        # Left to the end of the process, the threads of gloo would now and then abort it.
        atexit.register(dist.destroy_process_group)
        if rank:
            self._be_silent()

    def launcher(self):
        """Return the words of a command line that start as many processes on this machine."""
        if self.world == 1:
            return ["python"]
        return ["torchrun", f"--nproc_per_node={os.environ.get('LOCAL_WORLD_SIZE', self.world)}"]

    def _choose_gpu(self):
        import torch
        gpus, local = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", 0))
        if local >= gpus:
            raise UserError(f"process {local} of this machine has no GPU of its own, there are "
                            f"{gpus}; --nproc_per_node={gpus}")
        torch.cuda.set_device(local)

    def _meet(self):
        """Wait until all ranks have started, connect them with rank 0, and exchange their names."""
        import torch.distributed as dist
        name = f"rank {self.rank} (process {os.getpid()} on {socket.gethostname()})"
        try:
            timeout = timedelta(minutes=JOIN_MINUTES)
            self.store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
            for peer in self._connections():
                peer.sendall(f"{name}\n".encode())
                lines = peer.makefile(encoding="utf-8", errors="replace")
                other = lines.readline().strip()
                # Without a name it has gone again, or was none of the ranks.
                if other or self.rank:
                    self.peers[peer] = lines, other or "rank 0"
        except (RuntimeError, OSError) as error:
            raise Stop(f"some ranks have not started within {JOIN_MINUTES} minutes: "
                       f"{first_line(error)}", 5) from None
        for peer, watched in self.peers.items():
            _keep_alive(peer)
            threading.Thread(target=self._watch, args=watched, daemon=True).start()

    def _connections(self):
        """Yield the connection to rank 0, or on rank 0 those to all others."""
        if self.rank:
            port = int(self.store.get("experiment/port"))
            yield socket.create_connection((os.environ["MASTER_ADDR"], port))
            return
        with socket.create_server(("", 0), backlog=self.world) as server:
            server.settimeout(60 * JOIN_MINUTES)
            self.store.set("experiment/port", str(server.getsockname()[1]))
            while len(self.peers) < self.world - 1:
                peer, _ = server.accept()
                yield peer

    def _be_silent(self):
        """Print nothing but errors. What rank 0 prints is enough."""
        from tqdm import tqdm
        sys.stdout = open(os.devnull, "w")
        tqdm.__init__ = functools.partialmethod(tqdm.__init__, disable=True)

    # ---------------------------------------------------------------------------- shares and sums
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
        if self.world == 1:
            return [item]
        import torch.distributed as dist
        items = [None] * self.world
        self._together(dist.all_gather_object, items, item)
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
            with suppress(RuntimeError, Stop):
                self.gather(None)
            raise error
        return out

    def total(self, metrics: list[dict]) -> dict:
        """Return the sums of some dicts of numbers, name by name, over all ranks."""
        sums = Counter()
        for numbers in metrics:
            sums.update({name: float(value) for name, value in numbers.items()})
        everywhere = Counter()
        for numbers in self.gather(sums):
            everywhere.update(numbers)
        return everywhere

    def add(self, tensor):
        """Add up all ranks' tensors in place, and return the tensor."""
        if self.world > 1:
            import torch.distributed as dist
            self._together(dist.all_reduce, tensor)
        return tensor

    def add_gradients(self, model):
        """Make p.grad the sum of all ranks' gradients, in one flat all-reduce.

        A rank without a share adds zeros.
        """
        if self.world == 1:
            return
        import torch
        from torch.nn.utils import parameters_to_vector, vector_to_parameters
        weights = [p for p in model.parameters() if p.requires_grad]
        for p in weights:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        gradients = [p.grad for p in weights]
        vector_to_parameters(self.add(parameters_to_vector(gradients)), gradients)

    def check_alike(self, weights):
        """Raise UserError if the ranks start from different weights."""
        if self.world == 1:
            return
        total = sum(p.detach().double().abs().sum().item() for p in weights)
        if len(set(self.gather(f"{total:.9g}"))) > 1:
            raise UserError("the ranks start from different weights; give all machines the same "
                            "files and versions")

    # -------------------------------------------------------------------------------- who is gone
    def _together(self, collective, *args, **options):
        """Call a collective; if it fails because a rank is gone, leave."""
        try:
            collective(*args, **options)
        except RuntimeError:
            if not self.noticed.wait(GRACE):
                raise
            self.leave()

    def _lost(self):
        raise Stop(f"{self.gone} is gone", 5)

    def _watch(self, lines, name):
        """Wait until a peer's connection closes; what it said before is who else was gone."""
        said = ""
        with suppress(OSError):
            said = lines.readline().strip()
        self.gone = self.gone or said or name
        self.noticed.set()
        if self.rank == 0:
            for other in self.peers:
                with suppress(OSError):
                    other.sendall(f"{self.gone}\n".encode())
                    other.shutdown(socket.SHUT_WR)
        time.sleep(GRACE)
        if self.runs:
            # The main thread has not noticed, because it waits in a collective.
            os.write(2, f"{self.gone} is gone; so is rank {self.rank}\n".encode())
            os._exit(5)


def _keep_alive(peer):
    """Notice within seconds that a machine has lost its power, which closes no connection."""
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, seconds in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 3), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)
