"""Static decoding: the engine whose decode steps are CUDA graphs. engine.py can be read without it.

Decode steps run over tensors that stay in place, `WINDOW` of them before the host looks at what
they drew. A row that ends inside a window, or waits for a tool, is frozen: it is computed along
and changes nothing. So one step is a CUDA graph, one graph for each bucket of rows and of context.
"""
import sys

import torch

from llm.engine import Engine, Row
from llm.facts import facts

WINDOW = 4  # decode steps between two looks at the results
SHORTEST_SPAN = 128  # tokens of the first bucket of context; each further one is twice as long


def make_engine(model, *, tokens: int = 0, static: bool | None = None, **options) -> Engine:
    """Return the engine for the model's device: the static one on a GPU, else the plain one.

    Args:
        tokens: the context that a row has in the end, if it is known. With room for it from the
            first step on, no graph has to be captured again.
        static: overrides the choice.
        options: those of `Engine`.
    """
    if static is None:
        static = model.device.type == "cuda"
    return StaticEngine(model, tokens=tokens, **options) if static else Engine(model, **options)


class Window:
    """The tensors of a window of decode steps. They stay in place: graphs hold their addresses."""

    def __init__(self, slots: int, stop_ids, device):
        def zeros(*shape, dtype=torch.long):
            return torch.zeros(shape, dtype=dtype, device=device)
        # Last token, its position, tokens left, running or not, and a forced id (or -1) per step.
        self.state = zeros(4 + WINDOW, slots)
        self.uniforms = zeros(WINDOW, slots, dtype=torch.float64)
        # Ids and log-probabilities of every step, and how often the logits were not finite.
        self.drawn = zeros(2 * WINDOW + 1, slots, dtype=torch.float64)
        self.now = zeros(1)  # the step of the window
        self.stops = torch.tensor(sorted(stop_ids), dtype=torch.long, device=device)

    def fill(self, owner):
        """Copy the state of the slots' rows to the device. Rows that do not decode are frozen."""
        state, uniforms = [], []  # a line per slot
        for row in owner:
            line, draws = [0, 0, 0, 0], [0.0] * WINDOW
            if row:
                line[:3] = row.pending[-1], row.length, row.limit - len(row.turn)
            if row and row.state == "decode":
                line[3:] = 1, *row.forced[:WINDOW]
                draws = row.uniforms(WINDOW)
            state.append(line + [-1] * (4 + WINDOW - len(line)))
            uniforms.append(draws)
        self.state.copy_(torch.tensor(state).T)
        self.uniforms.copy_(torch.tensor(uniforms, dtype=torch.float64).T)
        self.now.zero_()
        self.drawn[-1].zero_()

    def advance(self, rows: int, logits, draw):
        """Draw one step of the first rows and write it into the window."""
        now, state = self.now, self.state[:, :rows]
        token, length, left, running = state[:4]  # (R,) each
        uniforms = self.uniforms[:, :rows].index_select(0, now)[0]
        forced = state[4:].index_select(0, now)[0]
        ids, logprobs, finite = draw(logits, uniforms, forced)
        drawn = self.drawn[:, :rows]
        drawn.index_copy_(0, now, ids.double()[None])
        drawn.index_copy_(0, now + WINDOW, logprobs.double()[None])
        drawn[-1] += running * ~finite
        token.copy_(torch.where(running > 0, ids, token))
        length += running
        left -= running
        running *= ~(ids[:, None] == self.stops).any(1) & (left > 0)
        now += 1


class StaticEngine(Engine):
    """The engine with static decode steps, which become CUDA graphs where there is a GPU."""

    def __init__(self, model, *, tokens: int = 0, **options):
        super().__init__(model, **options)
        self.window = Window(self.slots, self.stop_ids, self.device)
        self.cache.reserve(tokens + WINDOW)
        self.graphs = {}  # (rows, span, capacity) -> a graph, or None while there is none
        self.graphable = not facts(model).refuses_graphs and not any(
            map(resists_capture, model.base_model.modules()))

    def decode(self):
        """Decode up to `WINDOW` tokens of every running row."""
        running = self.rows("decode")
        rows = self.bucket(len(running))
        if rows < self.bucket(running[-1].slot + 1):  # else a frozen row costs less than a swap
            self.pack()
        steps = min(WINDOW, max(row.limit - len(row.turn) for row in running))
        span = self.make_room(running, steps)
        self.window.fill(self.owner)
        self.replay(rows, span, steps)
        drawn = self.window.drawn[:, :rows].tolist()  # the one look
        if any(drawn[-1]):
            raise FloatingPointError("the model's logits are not finite")
        for row in running:
            for step in range(steps):
                row.length += 1
                token, logprob = drawn[step][row.slot], drawn[WINDOW + step][row.slot]
                if row.append(int(token), logprob, self.stop_ids):
                    self.ended.append(row)
                    break
        self.clock += steps - 1

    def bucket(self, rows: int) -> int:
        """Round up to a power of two, or to all slots."""
        return min(1 << (rows - 1).bit_length(), self.slots)

    def make_room(self, running: list[Row], steps: int) -> int:
        """Make room for `steps` tokens of the running rows. Returns the context to read."""
        # A frozen row writes one token, in the place where it will write when it continues.
        frozen = [row.length + 1 for row in self.owner if row]
        longest = max(row.length for row in running) + steps
        self.cache.reserve(max(longest, *frozen))
        span = SHORTEST_SPAN
        while span < longest:
            span *= 2
        return min(span, self.cache.capacity)

    def replay(self, rows: int, span: int, steps: int):
        """Run static steps. A bucket's first window runs without a graph, which warms it up."""
        key = rows, span, self.cache.capacity  # a cache that has grown has other addresses
        if key not in self.graphs:
            self.graphs[key] = None
        elif not self.graphs[key] and self.graphable:
            self.graphs[key] = self.capture(rows, span)
        graph = self.graphs[key]
        for _ in range(steps):
            graph.replay() if graph else self.static_step(rows, span)

    def static_step(self, rows: int, span: int):
        """Run one decode step of the first rows. Nothing here looks at a value on the device."""
        token, length = self.window.state[:2, :rows]
        self.cache.prepare_step(length, span)
        hidden = self.forward(token[:, None], self.cache)[:, 0]  # (R, D)
        self.window.advance(rows, self.forward.head(hidden), self.draw)

    def capture(self, rows: int, span: int):
        """Capture the static step as a CUDA graph, or return None where no graph can hold it."""
        if self.device.type != "cuda":
            return None
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        # All graphs share one pool of memory, because no two run at once.
        pools = [other.pool() for other in self.graphs.values() if other]
        pool = pools[0] if pools else torch.cuda.graph_pool_handle()
        try:
            # Tools run in threads. What they do on the GPU is not part of this capture.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                self.static_step(rows, span)
        except RuntimeError as error:
            print(f"note: decoding without CUDA graphs: {str(error).splitlines()[0]}",
                  file=sys.stderr)
            # torch.cuda.graph leaves both behind when the end of the capture raises.
            torch.cuda.set_stream(stream)
            torch._C._cuda_endAllocateToPool(self.device.index, pool)
            self.graphable = False
            facts(self.model).refuses_graphs = True
            return None
        return graph


def resists_capture(module) -> bool:
    """True if a graph of this module would be wrong.

    Hooks before a layer (layers streamed from the host) are Python, which a replay leaves out, and
    some kinds of RoPE look at the positions.
    """
    return bool(module._forward_pre_hooks) or getattr(module, "rope_type", "") in (
        "dynamic", "longrope")
