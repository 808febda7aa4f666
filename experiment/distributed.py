"""Several processes as one: `torchrun --nproc_per_node=N grpo.py ...`, on one machine or on many.

Every rank holds all weights, made alike from the same seed and files. It plays its share of a step's tasks, the
episodes of a task together, and then all ranks have all episodes; it takes its share of the step's micro-batches, whose
losses are divided by counts over the whole step, so that one flat all-reduce gives every rank the gradient that one
process would have. Rank 0 writes. Beside torch's process group each rank holds a plain connection to rank 0: the kernel
closes it however a process ends, and so the others learn who is gone, where a collective would only wait.
"""
import atexit
import functools
import os
import socket
import sys
import threading
import time
from collections import Counter
from datetime import timedelta

from experiment.errors import Stop, UserError

GRACE = 10  # seconds between a rank's end and that of the others, who may save in them


@functools.cache
def _joined():
    return Ranks(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))


def join():
    """This process's Ranks, as torchrun's environment tells: one for its life, as torch's process group is."""
    return _joined() if int(os.environ.get("WORLD_SIZE", 1)) > 1 else Ranks(int(os.environ.get("RANK", 0)), 1)


def _close():
    """While Python still stands: gloo's threads, left to the end of the process, now and then abort it."""
    import torch.distributed as dist
    if dist.is_initialized():
        dist.destroy_process_group()


class Ranks:
    """rank of world. gone: the rank that has left before the work was done, or None. Alone all of it does nothing.

    runs: how many are under way, one within the other. leave(): raises what ends the outermost; set by it.
    """

    def __init__(self, rank: int, world: int):
        self.rank, self.world, self.gone, self.runs, self.leave = rank, world, None, 0, self._lost
        if world == 1:
            return
        import torch
        import torch.distributed as dist
        gpus, local = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", 0))
        if torch.cuda.is_available():
            if local >= gpus:
                raise UserError(f"process {local} of this machine has no GPU of its own, there are {gpus}; "
                                f"--nproc_per_node={gpus}")
            torch.cuda.set_device(local)
        # Who waits is waiting for a rollout, however long; who is gone is told by the connections.
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, timeout=timedelta(days=7))
        atexit.register(_close)
        if rank:
            from tqdm import tqdm
            sys.stdout = open(os.devnull, "w")  # what rank 0 says is enough
            tqdm.__init__ = functools.partialmethod(tqdm.__init__, disable=True)
        self.names = self.gather(f"rank {rank} (process {os.getpid()} on {socket.gethostname()})")
        self._connect()

    # ------------------------------------------------------------------------------------------------- shares and sums
    def share(self, n: int) -> range:
        """This rank's of n things in a row."""
        return range(n * self.rank // self.world, n * (self.rank + 1) // self.world)

    def micro_batches(self, n: int, batch_size: int) -> list[slice]:
        """This rank's of the micro-batches of n sequences; smaller than batch_size where a rank would have none."""
        if -(-n // batch_size) < (count := min(n, self.world)):
            return [slice(n * i // count, n * (i + 1) // count) for i in range(count)][self.rank:self.rank + 1]
        return [slice(i, i + batch_size) for i in range(0, n, batch_size)][self.rank::self.world]

    def gather(self, part) -> list:
        """Every rank's part, in the order of ranks, on every rank."""
        if self.world == 1:
            return [part]
        import torch.distributed as dist
        parts = [None] * self.world
        self._together(dist.all_gather_object, parts, part)
        return parts

    def first(self, act):
        """act() on rank 0 alone; every rank gets what it returns, or raises the UserError or Stop that it raises."""
        out = error = None
        if self.rank == 0:
            try:
                out = act()
            except (UserError, Stop) as raised:
                if self.world == 1:
                    raise
                error = type(raised), *raised.args, *([raised.code] if isinstance(raised, Stop) else [])
        out, error = self.gather((out, error))[0]
        if error:
            until = time.monotonic() + GRACE
            while self.rank == 0 and self.alive and time.monotonic() < until:
                time.sleep(0.05)  # a process that ends with something unread takes back what it sent
            raise error[0](*error[1:])
        return out

    def total(self, numbers: dict) -> Counter:
        """The sums of all ranks' numbers, name by name."""
        out = Counter()
        for part in self.gather(dict(numbers)):
            out.update(part)
        return out

    def add(self, tensor):
        """The sum of all ranks' tensors, in place."""
        if self.world > 1:
            import torch.distributed as dist
            self._together(dist.all_reduce, tensor)
        return tensor

    def add_gradients(self, weights):
        """p.grad becomes the sum of all ranks' gradients, in one flat all-reduce; a rank without a share adds zeros."""
        if self.world == 1:
            return
        import torch
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in weights])
        for p, grad in zip(weights, self.add(flat).split([p.numel() for p in weights])):
            p.grad = torch.empty_like(p) if p.grad is None else p.grad  # memory.HostAdamW holds on to its own
            p.grad.copy_(grad.view_as(p))

    def check_alike(self, weights):
        """UserError if ranks start from different weights: other files, or another version, on another machine."""
        own = self.world > 1 and f"{sum(p.detach().double().abs().sum().item() for p in weights):.9g}"
        if len(set(self.gather(own))) > 1:
            raise UserError("the ranks start from different weights; give all machines the same files and versions")

    # ----------------------------------------------------------------------------------------------------- who is gone
    def _together(self, collective, *args):
        try:
            collective(*args)
        except RuntimeError:
            until = time.monotonic() + GRACE
            while not self.gone and time.monotonic() < until:
                time.sleep(0.05)
            if not self.gone:
                raise
            self.leave()

    def _lost(self):
        raise Stop(f"{self.gone} is gone", 5)

    def _connect(self):
        if self.rank == 0:
            server = socket.create_server(("", 0), backlog=self.world)
            self.gather(server.getsockname()[1])
            self.peers = {}
            while len(self.peers) < self.world - 1:
                peer, _ = server.accept()
                self.peers[int.from_bytes(peer.recv(4, socket.MSG_WAITALL), "big")] = peer
            server.close()
        else:
            port = self.gather(None)[0]
            self.peers = {0: socket.create_connection((os.environ["MASTER_ADDR"], port))}
            self.peers[0].sendall(self.rank.to_bytes(4, "big"))
        self.alive = {*self.peers}
        for rank, peer in self.peers.items():
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 3), ("TCP_KEEPCNT", 3)):
                if hasattr(socket, name):  # seconds: of a machine without power nothing else is heard
                    peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            threading.Thread(target=self._watch, args=(rank, peer), daemon=True).start()

    def _watch(self, rank, peer):
        """Wait until a peer's connection closes; what it said before is who else was gone."""
        said = b""
        try:
            while part := peer.recv(256):
                said += part
        except OSError:
            pass
        self.gone = self.gone or said.decode() or self.names[rank]
        self.alive.discard(rank)
        for other in self.peers.values() if self.rank == 0 else ():
            try:
                other.sendall(self.gone.encode())
                other.shutdown(socket.SHUT_WR)
            except OSError:
                pass
        time.sleep(GRACE)
        if self.runs:  # the main thread has not noticed: it waits in a collective
            os.write(2, f"{self.gone} is gone; so is rank {self.rank}\n".encode())
            os._exit(5)
