"""Static decoding: the engine whose decode steps are CUDA graphs. engine.py can be read without it.

Decode steps run over tensors that stay in place, `WINDOW` of them before the host looks at what
they drew. So a step is one CUDA graph, a graph for each bucket of rows and of context, which is
replayed so many times.

All rows in the first slots are computed along, even one that has ended inside the window. What that
draws is dropped. What it writes lies behind the row's last token, where no query looks before, and
its states are put back.

A short tool result goes through decode steps as well, in which its tokens are forced: a pass of its
own is hundreds of launches, for which all rows wait.
"""
import sys
from contextlib import suppress

import torch

from core.config import first_line
from core.engine import Engine
from core.model import facts

WINDOW = 4  # decode steps between two looks at the results
RESERVE = 2**28  # bytes of the GPU that must be free for another graph
SHORT = 32  # tokens of a tool result that is forced
SHORTEST_SPAN = 128  # tokens of the first bucket of context; each further one is twice as long


class StaticEngine(Engine):
    """The engine with static decode steps, which become CUDA graphs where there is a GPU.

    Attributes:
        inputs: (4 + 2 WINDOW, slots), float64: a row's last token, its place in the cache, how
            many tokens it may take and the number of the step, then a random number and a forced
            id (or -1) for every step.
        drawn: (WINDOW, 2, slots), float64: the ids and the log-probabilities of every step.
        graphs: (width, span, capacity) -> a graph, or None while there is none.
    """

    def __init__(self, model, *, tokens: int = 0, slots: int = 64, **options):
        super().__init__(model, slots=slots_that_fit(model, tokens, slots), **options)
        self.slots = len(self.owner)
        # A row that keeps states cannot go back to any of its tokens.
        self.keeps_states = hasattr(self.cache, "states")
        self.cache.reserve(tokens + WINDOW)
        # They stay in place, because graphs hold their addresses.
        self.inputs = torch.zeros(
            4 + 2 * WINDOW, self.slots, dtype=torch.float64, device=self.device)
        self.drawn = self.inputs.new_zeros(WINDOW, 2, self.slots)
        self.stops = torch.tensor(sorted(self.stop_ids), dtype=torch.long, device=self.device)
        self.graphs = {}
        resists = any(map(resists_capture, model.base_model.modules()))
        self.graphable = not resists and not facts(model).refuses_graphs
        # A result holds stop ids. After one a row's states are put back.
        self.short = SHORT if self.graphable and not self.keeps_states else 0

    def extend(self, row, ids, limit: int):
        super().extend(row, ids, limit)
        if len(ids) <= self.short:
            row.state = "decode"

    def decode(self):
        """Decode up to `WINDOW` tokens of every running row."""
        running = self.in_state("decode")
        width = self.bucket(len(running))
        # Otherwise a row too many costs less than a swap.
        if width < self.bucket(running[-1].slot + 1):
            self.compact()
        self.cache.reserve(max(row.length for row in self.owner if row) + WINDOW)
        self.drop_graphs()
        self.fill()
        self.replay(width, self.span(max(row.length for row in running) + WINDOW))
        for ids, logprobs in self.drawn.tolist():  # the one look
            for row in running:
                if row.state == "decode":
                    row.length += 1
                    if len(row.pending) > 1:
                        del row.pending[0]
                    else:
                        self.take(row, int(ids[row.slot]), logprobs[row.slot])
        self.clock += WINDOW - 1

    def fill(self):
        """Copy what the rows in the slots need for the next steps to the device."""
        columns = [[0.0] * len(self.inputs)] * self.slots
        for slot, row in enumerate(self.owner):
            if row:
                token, *result = row.pending
                forced = (result + row.forced + [-1] * WINDOW)[:WINDOW]
                left = row.limit - len(row.turn) if row.state == "decode" else 0
                random = ([0.0] * len(result) + row.uniforms(WINDOW))[:WINDOW]
                columns[slot] = [token, row.length, left, 0, *random, *forced]
        self.inputs.copy_(torch.tensor(columns, dtype=torch.float64).T)

    def bucket(self, n: int) -> int:
        """Round up to a power of two, or to all slots."""
        return min(1 << (n - 1).bit_length(), self.slots)

    def span(self, longest: int) -> int:
        """Return how much context to read for rows of at most this length: a few sizes in all."""
        span = max(SHORTEST_SPAN, 1 << (longest - 1).bit_length())
        return min(span, self.cache.capacity)

    def drop_graphs(self):
        """Drop the graphs that no later step needs: of more rows than are left, of an old cache."""
        left = self.slots - self.owner.count(None) + len(self.waiting)
        most = self.bucket(min(left, self.slots))
        for key in list(self.graphs):
            if key[0] > most or key[2] != self.cache.capacity:
                del self.graphs[key]

    def replay(self, width: int, span: int):
        """Run a window. A bucket's first one runs without a graph, which warms it up."""
        # The capacity is in the key, because a cache that has grown has other addresses.
        key = width, span, self.cache.capacity
        if key in self.graphs and not self.graphs[key] and self.graphable:
            self.graphs[key] = self.capture(width, span)
        graph = self.graphs.setdefault(key)
        for _ in range(WINDOW):
            if graph:
                graph.replay()
            else:
                self.static_step(width, span)

    def static_step(self, width: int, span: int):
        """Run a decode step of the first rows. Nothing here looks at a value on the device."""
        token, position, left, number = self.inputs[:4, :width].long()  # (R,) each
        number = number[:1]
        draws = self.inputs[4:, :width].unflatten(0, (2, WINDOW))  # (2, WINDOW, R)
        uniforms, forced = draws.index_select(1, number)[:, 0]  # (R,) each
        prepare_step(self.cache, position, span)
        if self.keeps_states:
            before = self.cache.copied()
        hidden = self.decoder(token[:, None], self.cache)[:, 0]  # (R, D)
        if self.keeps_states:
            self.cache.put_back(before, left <= 0)
        token, logprobs = self.draw(self.decoder.head(hidden), uniforms, forced.long())
        drawn = torch.stack([token.double(), logprobs.double()])  # (2, R)
        self.drawn[:, :, :width].index_copy_(0, number, drawn[None])
        stopped = (token[:, None] == self.stops).any(1)
        left = (left - 1) * ~stopped
        self.inputs[:4, :width] = torch.stack([token, position + 1, left, number.expand(width) + 1])

    def capture(self, width: int, span: int):
        """Capture a static step as a CUDA graph, or return None where no graph can hold it."""
        if self.device.type != "cuda":
            return None
        # The driver keeps a graph in memory that torch's allocator does not count.
        torch.cuda.empty_cache()
        if torch.cuda.mem_get_info()[0] < RESERVE:
            self.graphable = False
            return None
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream()
        # All graphs share one pool of memory, because no two run at once.
        pools = [other.pool() for other in self.graphs.values() if other]
        pool = pools[0] if pools else torch.cuda.graph_pool_handle()
        try:
            # Tools run in threads. What they do on the GPU is not part of this capture.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                self.static_step(width, span)
        except RuntimeError as error:
            print(f"note: decoding without CUDA graphs: {first_line(error)}", file=sys.stderr)
            # torch.cuda.graph leaves both behind when the end of the capture raises. Where another
            # line did, the pool is closed; before torch 2.8 the function had another name.
            torch.cuda.set_stream(stream)
            with suppress(RuntimeError, AttributeError):
                torch._C._cuda_endAllocateToPool(self.device.index, pool)
            self.graphable = False
            facts(self.model).refuses_graphs = True
            return None
        return graph


def prepare_step(cache, position, span: int):
    """Make the next pass write one token for each of the first R rows, at `position` (R,).

    It reads the first `span` positions and looks at no value of `position`, as graphs demand.
    """
    cache.begins = False
    cache.read = slice(0, len(position)), slice(None), slice(0, span)
    index = torch.arange(len(position), device=cache.device)
    cache.write = index[:, None], slice(None), position[:, None]
    cache.position = position[:, None].clamp(max=span - 1)
    cache.span = span
    cache.biases = {}


def slots_that_fit(model, tokens: int, most: int) -> int:
    """Return for how many rows of so many tokens half of the GPU's free memory has room.

    They are `most`, or the largest power of two that fits, so that a little more or less free
    memory changes nothing. The other half is for the passes over prompts, and for graphs. States
    count twice, because a step copies them.
    """
    row = facts(model).token_bytes * tokens + 2 * facts(model).state_bytes
    while most > 1 and most * row > free_bytes(model.device) / 2:
        most = 1 << (most - 1).bit_length() - 1
    return most


def free_bytes(device) -> float:
    """Return the bytes that torch can still get on a GPU. A CPU's cache takes what it uses."""
    if device.type != "cuda":
        return float("inf")
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def resists_capture(module) -> bool:
    """True if a graph of this module would be wrong.

    Hooks before a layer (layers streamed from the host) are Python, which a replay leaves out, and
    some kinds of RoPE look at the positions.
    """
    looks_at_positions = getattr(module, "rope_type", "") in ("dynamic", "longrope")
    return looks_at_positions or bool(module._forward_pre_hooks)
