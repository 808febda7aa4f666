"""The decoding engine: prefill, decode, sample, for rows of different lengths in one batch.

    engine = make_engine(model, tokens=512, slots=64, stop_ids={2})
    engine.add([Row(prompt, group=0, seed=s) for s in range(8)])  # the group's prompt runs once
    while engine.busy:
        for row in engine.step():                        # whose turn ended; row.turn, row.logprobs
            if continues(row):
                engine.extend(row, tool_result_ids, 64)  # in the same cache
            else:
                engine.release(row)                      # another row takes its slot
"""
import math
from collections import defaultdict
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from inspect import signature
from typing import Protocol

import numpy as np
import torch

from core.config import UserError
from core.logprobs import head_logits, sample

LONG = 2**14  # tokens of one prefill above which its rows are split in two


class EngineProtocol(Protocol):
    """What `rollout(engine=...)` takes: the engine below, or one that asks a server.

    The caller makes each Row and then reads its `turn` and `logprobs`. It calls `step` while `busy`
    is True; `clock` decides when tool results are due. An engine that is made already may have
    load_policy(model), a context in which it samples this policy.
    """
    busy: bool
    clock: int

    def add(self, rows): ...
    def step(self) -> list: ...
    def extend(self, row, ids, limit: int): ...
    def release(self, row): ...


@dataclass(eq=False)
class Row:
    """One sequence that is decoded. What it samples follows from its ids and its seed."""

    pending: list[int]  # ids that are not in the cache yet, at first the prompt
    _: KW_ONLY
    group: object = field(default_factory=object)  # its rows share a prompt, which runs once
    seed: int = 0
    limit: int = 128  # tokens of a turn, at most
    forced: list[int] = field(default_factory=list)  # ids to take in place of sampled ones
    turn: list[int] = field(default_factory=list)  # sampled since the prompt or the last `extend`
    logprobs: list[float] = field(default_factory=list)  # theirs, nats, as they were drawn
    length: int = 0  # ids in the cache
    slot: int | None = None  # the place in the cache
    state: str = "waiting"  # for a slot, "prefill" (ids of others are due), "decode", "ended"

    def __post_init__(self):
        self.pending = list(self.pending)
        self.forced = list(self.forced)
        self._generator = np.random.Generator(np.random.Philox(key=self.seed))
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
    """Decodes rows until a stop id or the limit of each turn, with the weights as they are now.

    The rows that decode are kept in the first slots, so that a step reads a slice of the cache.
    """

    def __init__(self, model, *, slots: int = 64, stop_ids=(), decoder=None, cache=None,
                 draw=sample, **sampling):
        """Make an engine of so many `slots`, the rows that are in the batch at the same time.

        The decoder gives hidden states, decoder(ids, cache), and logits, decoder.head(hidden).
        `cache` is the class of the cache. `draw` samples as `sample` does.
        """
        self.model, self.device = model, model.device
        self.stop_ids = frozenset(stop_ids)
        self.draw = partial(draw, **sampling)
        self.cache = (cache or RowCache)(slots, model.device)
        self.decoder = decoder or StockForward(model)
        self.owner: list[Row | None] = [None] * slots
        self.waiting: list[Row] = []
        self.ended: list[Row] = []  # rows whose turn ended in this step
        self.prompts = {}  # group with rows that wait -> its prompt's cache, logits, length
        self.clock = 0  # decode steps taken

    @property
    def busy(self) -> bool:
        """True while a row can be decoded. Those that wait for `extend` or a slot do not count."""
        can_enter = self.waiting and None in self.owner
        return bool(can_enter or self.in_state("prefill") or self.in_state("decode"))

    def in_state(self, state: str) -> list[Row]:
        """Return the rows in this state that have a slot, in the order of their slots."""
        return [row for row in self.owner if row and row.state == state]

    def add(self, rows):
        """Let new rows wait for a slot. The first turn of each continues its prompt."""
        self.waiting.extend(rows)

    def extend(self, row: Row, ids, limit: int):
        """Append ids that the model did not sample, and start a turn of at most `limit` tokens."""
        row.pending += ids
        row.turn = []
        row.logprobs = []
        row.limit = limit
        row.state = "prefill"

    def release(self, row: Row):
        """Give the slot of a row whose turn has ended to others."""
        self.owner[row.slot] = None
        row.slot = None

    @torch.inference_mode()
    def step(self) -> list[Row]:
        """Run the prompts and results that are due, then decode a token of every row.

        So a row that enters or continues gets two tokens. Returns the rows whose turn ended.
        """
        self.clock += 1
        self.ended = []
        self.admit()
        extended = self.in_state("prefill")
        if extended:
            self.sample(extended, self.run(extended))
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
        new_logits = iter(self.run(first) if first else ())  # (V,) each
        waiting = {row.group for row in self.waiting}
        logits = {}
        for group, rows in groups.items():
            if group not in self.prompts:
                slot, length = rows[0].slot, rows[0].length
                prefix = [view[slot].clone() for view in self.cache.views(length)]
                self.prompts[group] = prefix, next(new_logits), length
            prefix, logits[group], length = self.prompts[group]
            slots = torch.tensor([row.slot for row in rows], device=self.device)
            for view, source in zip(self.cache.views(length), prefix):
                view[slots] = source
            for row in rows:
                row.length = length
            # The copies of all groups at once would take as much memory as the cache.
            if group not in waiting:
                del self.prompts[group]
        return torch.stack([logits[row.group] for row in entering])

    def decode(self):
        """Decode one token of every running row."""
        self.compact()
        running = self.in_state("decode")
        self.sample(running, self.run(running))

    def run(self, rows: list[Row]):
        """Run the rows' pending tokens and return the logits (R, V) after each row's last one."""
        batches = self.cache.batches(rows)
        if len(batches) > 1:
            return torch.cat(list(map(self.run, batches)))
        slots = [row.slot for row in rows]
        starts = [row.length for row in rows]
        counts = [len(row.pending) for row in rows]
        ids = [row.pending + [0] * (max(counts) - len(row.pending)) for row in rows]
        for row in rows:
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
        # A Mac's GPU has no float64, in which the sums are taken.
        device = "cpu" if self.device.type == "mps" else self.device
        uniforms = torch.tensor(uniforms, dtype=torch.float64, device=device)
        ids, logprobs = self.draw(logits.to(device), uniforms, torch.tensor(forced, device=device))
        for row, token, logprob in zip(rows, ids.tolist(), logprobs.tolist()):
            self.take(row, token, logprob)

    def take(self, row: Row, token: int, logprob: float):
        """Append a sampled token to its row. Raises FloatingPointError if its logprob is NaN."""
        if math.isnan(logprob):
            raise FloatingPointError("the model's logits are not finite")
        row.append(token, logprob, self.stop_ids)
        if row.state == "ended":
            self.ended.append(row)

    def compact(self):
        """Exchange rows of the cache so that those that decode fill the first slots."""
        running = self.in_state("decode")
        outside = [row for row in running if row.slot >= len(running)]
        if not outside:
            return
        targets = [slot for slot, row in enumerate(self.owner[:len(running)]) if row not in running]
        longest = max(row.length for row in self.owner if row)
        self.cache.exchange(targets, [row.slot for row in outside], longest)
        for slot, row in zip(targets, outside):
            other = self.owner[slot]
            if other:
                other.slot = row.slot
            self.owner[row.slot], self.owner[slot] = other, row
            row.slot = slot


def make_engine(model, *, tokens: int, kind=Engine, top_k=0, top_p=1.0, **options) -> Engine:
    """Return an engine of this kind, with Engine's options. This cache grows, whatever `tokens`."""
    if top_k or top_p < 1:
        raise UserError("top_k and top_p: this engine samples from the whole distribution")
    return kind(model, **options)


def sampler_of(config, run=None):
    """Return None: this process samples. extras/vllm returns the engine that --sampler names."""
    if getattr(config, "sampler", None) or getattr(config, "rollout_ahead", 0):
        raise UserError("--sampler and --rollout_ahead need extras/vllm")


# -------------------------------------------------------------------------------- the forward pass
def row_attention(module, query, key, value, attention_mask, scaling=None, sliding_window=None,
                  row_cache=None, softcap=None, s_aux=None, **_):
    """Attend over the rows of a `RowCache`, in the signature of transformers' functions.

    The query (R, H, C, D) heads that share a key are stacked as its query rows, so that no key or
    value (R, H_kv, S, D) is repeated. `softcap` bounds the scores. s_aux (H,) are sinks: the scores
    of a further key whose value is 0. Returns (R, C, H, D) and None.
    """
    R, H, C, D = query.shape
    kv_heads, S = key.shape[1:3]
    query = (query * scaling).reshape(R, kv_heads, -1, D)
    scores = query @ key.transpose(2, 3)  # (R, H_kv, H / H_kv * C, S)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    bias = row_cache.bias(sliding_window, query.dtype)[:, :, None]  # (R, 1, 1, C, S)
    weights = scores.view(R, kv_heads, -1, C, S).add_(bias)
    if s_aux is not None:
        sinks = s_aux.view(kv_heads, -1, 1, 1).expand(R, -1, -1, C, 1)
        weights = torch.cat([weights, sinks], -1)
    weights = weights.softmax(-1)[..., :S]
    out = weights.reshape(scores.shape) @ value
    return out.reshape(R, H, C, -1).transpose(1, 2).contiguous(), None


class StockForward:
    """The forward pass by transformers' own modules, with `attention` in place of theirs."""

    def __init__(self, model, attention=row_attention):
        from transformers import AttentionInterface  # takes seconds: not with every --help
        AttentionInterface.register(attention.__name__, attention)
        self.attention = attention.__name__
        self.model = model
        self.config = model.config.get_text_config()
        # Before transformers 5.24 it was not called "cache" everywhere.
        names = {"cache", "cache_params"} & {*signature(model.base_model.forward).parameters}
        self.cache_name = [*names, "past_key_values"][0]
        self.head = partial(head_logits, model)

    def __call__(self, ids, cache):
        """Return the last hidden states (R, C, D) of ids (R, C), each at its cache.position."""
        before = self.config._attn_implementation
        self.config._attn_implementation = self.attention
        try:
            return self.model.base_model(
                input_ids=ids, position_ids=cache.position, use_cache=False, row_cache=cache,
                **{self.cache_name: cache}).last_hidden_state
        finally:
            self.config._attn_implementation = before


class RowCache:
    """Keys and values of every layer, each a tensor (slots, H_kv, S, D), of rows of any length.

    It takes the place of transformers' Cache. Before each forward pass of R rows and C tokens per
    row, `prepare` says which rows it is for and where their new tokens go.

    Attributes:
        position: (R, C) the position of every new token in its row.
        begins: True if the new tokens are the first of their rows.
        read, write: the index (slots, heads, positions) of what the pass reads and writes.
    """

    def __init__(self, slots: int, device):
        self.tensors = {}  # (layer, "key" or "value") -> a tensor, made when the layer first writes
        self.slots = slots
        self.capacity = 0  # S
        self.device = device
        self.sdpa = device.type == "cuda"

    def batches(self, rows: list[Row]) -> list[list[Row]]:
        """Return the rows in as many batches as they have to go through the model in."""
        half = len(rows) // 2
        is_long = len(rows) * max(len(row.pending) for row in rows) > LONG
        return [rows[:half], rows[half:]] if half and is_long else [rows]

    def prepare(self, slots: list[int], starts: list[int], counts: list[int]):
        """Make the next pass write `counts` tokens per row, from position `starts`.

        Shorter rows are padded on the right. The padding is stored like tokens, at positions that
        no query looks at before the row's own next tokens are written there, or at the last one,
        which is kept free. Rows that have neighbouring slots in order are read without a copy.
        """
        self.begins = not any(starts)
        needed = 1 + max(start + count for start, count in zip(starts, counts))
        self.reserve(needed)
        index = torch.tensor(slots, device=self.device)
        start = torch.tensor(starts, device=self.device)[:, None]
        position = start + torch.arange(max(counts), device=self.device)
        span = 32 * math.ceil(needed / 32)
        # On a CPU a bfloat16 product copies a slice, which pays below a third of the positions.
        if not self.sdpa and self.capacity < 3 * span:
            span = self.capacity
        first, end = slots[0], slots[0] + len(slots)
        rows = slice(first, end) if slots == list(range(first, end)) else index
        self.read = rows, slice(None), slice(0, span)
        self.write = index[:, None], slice(None), position.clamp(max=self.capacity - 1)
        # A query beyond the span, of a row that waits, could see no key of a sliding window, and
        # the softmax over none is NaN, which a slot keeps for the next row.
        self.position = position.clamp(max=span - 1)
        self.span = span
        self.biases = {}

    def reserve(self, needed: int):
        """Make room for `needed` tokens per row. When the cache grows, all tensors are new ones."""
        if needed <= self.capacity:
            return
        self.capacity = 32 * math.ceil(max(needed, 1.25 * self.capacity) / 32)
        for place, old in self.tensors.items():
            slots, heads, length, width = old.shape
            self.tensors[place] = old.new_zeros(slots, heads, self.capacity, width)
            self.tensors[place][:, :, :length] = old

    def update(self, key, value, layer: int, *_, **__):
        """Store new keys and values (R, H_kv, C, D) and return all of the rows' (R, H_kv, S, D)."""
        places = (layer, "key"), (layer, "value")
        for place, new in zip(places, (key, value)):
            if place not in self.tensors:
                shape = self.slots, new.shape[1], self.capacity, new.shape[3]
                self.tensors[place] = new.new_zeros(shape)
            self.tensors[place][self.write] = new.transpose(1, 2)  # (R, C, H_kv, D)
        return [self.tensors[place][self.read] for place in places]

    def bias(self, window, dtype):
        """Return (R, 1, C, S): 0 where a query sees a key, else -inf.

        It is made once per pass. A query of a sliding layer sees `window` keys, its own included.
        """
        if window not in self.biases:
            key = torch.arange(self.span, device=self.device)
            query = self.position[:, None, :, None]
            unseen = key > query  # (R, 1, C, S)
            if window:
                unseen |= key <= query - window
            bias = unseen.new_zeros(unseen.shape, dtype=dtype)
            self.biases[window] = bias.masked_fill_(unseen, -torch.inf)
        return self.biases[window]

    def views(self, length: int) -> list:
        """Return views of all slots' first keys and values (slots, H_kv, length, D)."""
        return [tensor[:, :, :length] for tensor in self.tensors.values()]

    def exchange(self, slots: list[int], others: list[int], length: int):
        """Exchange what each slot holds with the other of its place. None is named twice."""
        to, of = torch.tensor([slots + others, others + slots], device=self.device)
        for view in self.views(length):
            view[to] = view[of]

    def get_seq_length(self, *_):
        return 0  # positions are passed explicitly: nobody may derive them from the cache

    def get_conv_state(self, *_, **__):
        raise UserError("this model keeps states beside keys and values: no cache here holds them")

    get_recurrent_state = update_conv_state = update_recurrent_state = get_conv_state
