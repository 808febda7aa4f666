"""The decoding engine: prefill, decode, sample, for rows of different lengths in one batch.

    engine = Engine(model, slots=64, stop_ids={2})
    engine.add([Row(prompt, group=0, seed=s) for s in range(8)])  # the group's prompt runs once
    while engine.busy:
        for row in engine.step():                    # rows whose turn ended; row.turn, row.logprobs
            engine.extend(row, tool_result_ids, 64)  # either: it continues in the same cache
            engine.release(row)                      # or: it leaves, and another takes its slot

These six are the protocol of every engine, also of one that asks a server:

    add(rows)                takes new rows; a row's first turn continues its prompt, `row.pending`
    step()                   samples further tokens; returns the rows whose turn has ended, if any
    extend(row, ids, limit)  appends ids that the model did not sample to a row whose turn has
                             ended, and starts its next turn, of at most `limit` tokens
    release(row)             forgets a row whose turn has ended
    busy                     True while `step` has something to do; it is called only then
    clock                    how many decode steps were taken: it decides when tool results are due

The caller makes each Row with its prompt, group, seed and limit. After that it only reads what the
engine has written: `row.turn`, the ids sampled in this turn, with the stop id that ended it if one
did, and `row.logprobs`, their log-probabilities in nats under the distribution that they were drawn
from. A turn ends with one of the engine's stop ids or with its `limit`-th token. What a row samples
follows from its ids and its seed. Everything else in a Row belongs to the engine.

The rows that decode are kept in the first slots, so that a step reads a slice of the cache and
copies nothing. A token and its log-probability come from one softmax.
"""
import inspect
import math
from collections import defaultdict
from functools import partial
from importlib import import_module
from itertools import groupby

import numpy as np
import torch

from core.config import UserError
from extras.fast.attention import row_attention
from extras.fast.fused import Fused, fits
from core.kv_cache import make_cache
from core.logprobs import head_logits
from core.model import facts
from core.sampling import sample

STATIC = "extras.fast.static_engine"  # what a GPU needs
LONG = 2**14  # tokens of one prefill above which its rows are split in two


class Row:
    """One sequence that is decoded.

    Attributes:
        turn, logprobs: the tokens sampled since the prompt or the last `extend`.
        group, seed, limit: as given; `extend` sets the limit of the next turn.
        pending: ids that are not in the cache yet. At first it is the prompt.
        length: how many ids are in the cache.
        slot: the row's place in the cache, or None.
        state: "waiting" for a slot, "prefill" (tokens that it did not sample are due), "decode", or
            "ended" (its turn has).
    """

    def __init__(self, prompt, *, group=None, seed: int = 0, limit: int = 128, forced=()):
        """Take the ids of a prompt, which runs once for all rows of its group.

        The first turn may sample `limit` tokens. `forced` ids are taken in place of sampled ones.
        """
        self.pending = list(prompt)
        self.length = 0
        self.group = self if group is None else group
        self.seed = seed
        self.limit = limit
        self.forced = list(forced)
        self.turn = []
        self.logprobs = []
        self.slot = None
        self.state = "waiting"
        self._generator = np.random.Generator(np.random.Philox(key=seed))
        self._uniforms = []

    def uniforms(self, n: int) -> list[float]:
        """Return the random numbers of the next n tokens. `append` uses them up."""
        while len(self._uniforms) < n:
            self._uniforms += self._generator.random(64).tolist()
        return self._uniforms[:n]

    def append(self, token: int, logprob: float, stop_ids):
        """Take a sampled token, which ends the turn if it is a stop id or the last one allowed."""
        del self._uniforms[:1], self.forced[:1]
        self.turn.append(token)
        self.logprobs.append(logprob)
        self.pending = [token]
        ended = token in stop_ids or len(self.turn) >= self.limit
        self.state = "ended" if ended else "decode"


class Engine:
    """Decodes rows until a stop id or the limit of each turn, with the weights as they are now."""

    def __init__(self, model, *, slots: int = 64, stop_ids=(), fused: bool = True, **sampling):
        """Make an engine of so many `slots`, the rows that are in the batch at the same time.

        `sampling` are temperature, top_k and top_p, as `core.sampling.sample` takes them.
        Raises UserError for a model that the probe at load has found to decode wrongly.
        """
        if facts(model).refuses_engine:
            raise UserError(facts(model).refuses_engine)
        self.model = model
        self.device = model.device
        self.slots = slots
        self.stop_ids = frozenset(stop_ids)
        self.draw = partial(sample, **sampling)
        self.cache = make_cache(model, slots)
        self.fused = Fused(model) if fused and fits(model) else None
        self.decoder = self.fused or StockForward(model)
        self.owner: list[Row | None] = [None] * slots
        self.waiting: list[Row] = []
        self.ended: list[Row] = []  # rows whose turn ended in this step
        self.prompts = {}  # group with rows that wait -> its prompt's cache, logits, length
        self.clock = 0  # steps taken

    @property
    def busy(self) -> bool:
        """True while a row can be decoded.

        Rows that wait for `extend`, or for the slot of such a row, do not count.
        """
        can_enter = self.waiting and None in self.owner
        return bool(can_enter or self.in_state("prefill") or self.in_state("decode"))

    def in_state(self, state: str) -> list[Row]:
        """Return the rows in this state that have a slot, in the order of their slots."""
        return [row for row in self.owner if row and row.state == state]

    def add(self, rows):
        """Let new rows wait for a slot."""
        self.waiting.extend(rows)

    def extend(self, row: Row, ids, limit: int):
        """Append tokens that the model did not sample, such as tool results, and start a turn."""
        row.pending += ids
        row.turn = []
        row.logprobs = []
        row.limit = limit
        row.state = "prefill"

    def release(self, row: Row):
        """Give the slot of a row to others."""
        self.owner[row.slot] = None
        row.slot = None

    @torch.inference_mode()
    def step(self) -> list[Row]:
        """Run the prompts and tool results that are due, then a decode step of all running rows.

        Returns the rows whose turn ended.
        """
        self.clock += 1
        self.ended = []
        self.admit()
        extended = self.in_state("prefill")
        if extended:
            self.sample(extended, self.read(extended))
        if self.in_state("decode"):
            self.decode()
        return self.ended

    def admit(self):
        """Give free slots to waiting rows and sample their first tokens."""
        free = [slot for slot, row in enumerate(self.owner) if row is None]
        entering = self.waiting[:len(free)]
        del self.waiting[:len(free)]
        for row, slot in zip(entering, free):
            row.slot = slot
            self.owner[slot] = row
        if entering:
            self.sample(entering, self.prefill(entering))

    def prefill(self, entering: list[Row]):
        """Run each group's prompt once, by its first row, and copy its keys and values to others.

        Returns the logits (R, V) after every row's prompt.
        """
        groups = defaultdict(list)
        for row in entering:
            groups[row.group].append(row)
        first = [rows[0] for group, rows in groups.items() if group not in self.prompts]
        new_logits = iter(self.read(first) if first else ())  # (V,) each
        waiting = {row.group for row in self.waiting}
        logits = {}
        for group, rows in groups.items():
            slot, length = rows[0].slot, rows[0].length
            if group not in self.prompts:
                self.prompts[group] = self.cache.prefix(slot, length), next(new_logits), length
            prefix, logits[group], length = self.prompts[group]
            self.cache.copy_prefix(prefix, [row.slot for row in rows], length)
            for row in rows:
                row.length = length
            # The copies of all groups at once would take as much memory as the cache.
            if group not in waiting:
                del self.prompts[group]
        return torch.stack([logits[row.group] for row in entering])

    def decode(self):
        """Decode one token of every running row."""
        self.pack()
        running = self.in_state("decode")
        self.sample(running, self.run(running))

    def read(self, rows: list[Row]):
        """Run prompts or tool results, without padding where it would change the rows' states."""
        if not self.cache.keeps_states:
            return self.run(rows)
        # Among neighbours whose slots are consecutive, slot - i is the same.
        kinds = [(row.slot - i, len(row.pending), bool(row.length)) for i, row in enumerate(rows)]
        batches = groupby(range(len(rows)), lambda i: kinds[i])
        return torch.cat([self.run([rows[i] for i in batch]) for _, batch in batches])

    def run(self, rows: list[Row]):
        """Run the rows' pending tokens and return the logits (R, V) after each row's last one."""
        width = max(len(row.pending) for row in rows)
        half = len(rows) // 2
        if half and len(rows) * width > LONG:
            return torch.cat([self.run(rows[:half]), self.run(rows[half:])])
        slots, starts, counts, ids = [], [], [], []
        for row in rows:
            slots.append(row.slot)
            starts.append(row.length)
            counts.append(len(row.pending))
            ids.append(row.pending + [0] * (width - len(row.pending)))
            row.length += len(row.pending)
        self.cache.prepare(slots, starts, counts)
        hidden = self.decoder(torch.tensor(ids, device=self.device), self.cache)  # (R, C, D)
        return self.decoder.head(hidden[range(len(rows)), [count - 1 for count in counts]])

    def sample(self, rows: list[Row], logits):
        """Draw a token for every row from its logits (R, V)."""
        uniforms, forced = [], []
        for row in rows:
            uniforms += row.uniforms(1)
            forced += row.forced[:1] or [-1]
        uniforms = torch.tensor(uniforms, dtype=torch.float64, device=self.device)
        forced = torch.tensor(forced, device=self.device)
        ids, logprobs = self.draw(logits, uniforms, forced)
        for row, token, logprob in zip(rows, ids.tolist(), logprobs.tolist()):
            self.take(row, token, logprob)

    def take(self, row: Row, token: int, logprob: float):
        """Append a sampled token to its row. Raises FloatingPointError if its logprob is NaN."""
        if math.isnan(logprob):
            raise FloatingPointError("the model's logits are not finite")
        row.append(token, logprob, self.stop_ids)
        if row.state == "ended":
            self.ended.append(row)

    def pack(self):
        """Exchange rows of the cache so that those that decode fill the first slots."""
        running = self.in_state("decode")
        outside = [row for row in running if row.slot >= len(running)]
        targets = [slot for slot, row in enumerate(self.owner[:len(running)]) if row not in running]
        if not outside:
            return
        longest = max(row.length for row in self.owner if row)
        self.cache.exchange(targets, [row.slot for row in outside], longest)
        for slot, row in zip(targets, outside):
            other = self.owner[slot]
            if other:
                other.slot = row.slot
            self.owner[row.slot] = other
            self.owner[slot] = row
            row.slot = slot


def make_engine(model, *, tokens: int = 0, static: bool | None = None, **options) -> Engine:
    """Return the engine for the model's device: the static one on a GPU, else the plain one.

    `static` overrides the choice. With room from the first step on for the `tokens` that a row has
    in the end, no graph has to be captured again. The options are those of `Engine`. Raises
    UserError for a model with longrope or dynamic RoPE whose rows may outgrow its original
    positions: its keys in the cache would then be those of another encoding.
    """
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("longrope", "dynamic"):
        limit = rope.get("original_max_position_embeddings", config.max_position_embeddings)
        if tokens > limit:
            raise UserError(f"--max_tokens {tokens}: give at most {limit}; beyond, this model "
                            f"({rope['rope_type']} RoPE) encodes all positions of a text anew")
    if static is None:
        static = model.device.type == "cuda"
    if static:
        return import_module(STATIC).StaticEngine(model, tokens=tokens, **options)
    return Engine(model, **options)


def sampler_of(config, run=None):
    """Return the engine that --sampler names, or None for that of `make_engine`."""
    if getattr(config, "sampler", None):
        raise UserError("--sampler needs extras/vllm")


class StockForward:
    """The forward pass by transformers' own modules, with `row_attention` as their attention."""

    def __init__(self, model):
        from transformers import AttentionInterface
        AttentionInterface.register("row_attention", row_attention)
        self.model = model
        self.config = model.config.get_text_config()
        arguments = inspect.signature(model.base_model.forward).parameters
        # Transformers 5.24 calls it "cache" everywhere. Before, Mamba's models had another name.
        names = [name for name in ("cache", "cache_params") if name in arguments]
        self.cache_name = names[0] if names else "past_key_values"
        self.head = partial(head_logits, model)

    def __call__(self, ids, cache):
        """Return the last hidden states (R, C, D) of ids (R, C), each at its cache.position."""
        before = self.config._attn_implementation
        self.config._attn_implementation = "row_attention"
        try:
            return self.model.base_model(
                input_ids=ids, position_ids=cache.position, use_cache=False, row_cache=cache,
                **{self.cache_name: cache}).last_hidden_state
        finally:
            self.config._attn_implementation = before
