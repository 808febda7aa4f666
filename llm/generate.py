"""The decoding engine: rows of different length in one batch, on transformers' modules or, where it can, `fused.py`.

    engine = Engine(model, slots=64, stop_ids={2})
    engine.add([Row(prompt, group=0, seed=s) for s in range(8)])     # one prompt, forwarded once, shared by the group
    while engine.busy:
        for row in engine.step():                # rows whose turn ended in this step; row.turn, row.logprobs
            engine.extend(row, tool_result_ids)  # goes on in the same cache: nothing is ever forwarded twice
            engine.release(row)                  # or: leaves, and a waiting row takes its slot

Three ideas carry it. A per-row cache: every row writes at its own position, attention masks what lies beyond. Packing:
the rows that decode are kept in the first slots, so a step reads a slice of the cache and copies nothing. One softmax:
the token is drawn by inverse CDF from the same float32 numbers that give its log-probability, with the row's own random
numbers, so what is drawn depends on (seed of the row, logits) and never on who shares the batch.

On a GPU a fourth: decode steps run over tensors that stay in place, `WINDOW` of them between two looks at the results.
A row that ends inside a window, or waits for a tool, is frozen there: it is computed along and changes nothing. So one
step is a CUDA graph, one for each bucket of rows and of context.
"""
import math
import mmap
import sys
from contextlib import contextmanager

import numpy as np
import torch
from torch.nn import functional as F

from experiment.run import UserError
from llm.facts import facts
from llm.fused import Fused, fits
from llm.logprobs import head_logits

WINDOW = 4  # decode steps between two looks at the results, where decoding is static
PIECE = 2**19  # logits in float32 at once: on a CPU they stay in its cache, and the system has no pages to fetch
SPANS = 128  # the shortest context bucket; each further one is twice as long
PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}  # not on Windows
HELD = {"full_attention", "sliding_attention"}  # layer types whose whole past is keys and values


class Row:
    """One sequence being written. `turn`, `logprobs` (nats): the tokens sampled since the prompt or last `extend`."""

    def __init__(self, prompt, *, group=None, seed: int = 0, limit: int = 128, forced=None):
        """`limit`: tokens this turn may sample. `forced`: ids taken in place of sampled ones, with their log-probs."""
        self.pending, self.length = list(prompt), 0  # ids not yet in the cache; ids that are
        self.group, self.limit, self.forced = group if group is not None else self, limit, list(forced or [])
        self.turn, self.logprobs, self.slot, self.state = [], [], None, "waiting"
        self._rng, self._uniforms = np.random.Generator(np.random.Philox(key=seed)), []

    def uniform(self) -> float:
        if not self._uniforms:
            self._uniforms = self._rng.random(64).tolist()[::-1]
        return self._uniforms.pop()

    def ahead(self, n: int) -> list[float]:
        """What the next n calls of `uniform` will return."""
        if len(self._uniforms) < n:
            self._uniforms = self._rng.random(64).tolist()[::-1] + self._uniforms
        return self._uniforms[:-n - 1:-1]


def room(like, shape):
    """Zeros of that dtype and device. A CPU's are pages of their own, which a cache that grows gives back at once."""
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    n = math.prod(shape)
    pages = mmap.mmap(-1, max(1, n) * like.element_size(), **PRIVATE)  # zeros, which take no memory until written
    return torch.frombuffer(pages, dtype=like.dtype)[:n].view(shape)


class RowCache:
    """Keys and values, one (slots, H_kv, S, D) pair a layer; stands where transformers expects its Cache."""

    is_compileable = False

    def __init__(self, layers: int, slots: int, sdpa: bool = False):
        """sdpa: attention by torch's fused kernel; a CPU's takes three times as long with a mask and one query."""
        self.keys, self.values, self.slots, self.capacity = [None] * layers, [None] * layers, slots, 0
        self.sdpa = sdpa

    def aim(self, slots, starts, lengths, device):
        """The next forward writes rows `slots` (list, or int n for the first n) at `starts`, `lengths` tokens each."""
        width = max(lengths)
        self.reserve(max(s + n for s, n in zip(starts, lengths)))
        position = torch.tensor(starts, device=device)[:, None] + torch.arange(width, device=device)  # (R, C)
        real = torch.arange(width, device=device) < torch.tensor(lengths, device=device)[:, None]  # (R, C)
        self.take = real.flatten().nonzero()[:, 0]  # (n,) which of the R * C tokens are no padding
        index = torch.arange(slots, device=device) if isinstance(slots, int) else torch.tensor(slots, device=device)
        self.to_slot, self.to_position = index.repeat_interleave(width)[self.take], position.flatten()[self.take]
        self.read = slice(0, slots) if isinstance(slots, int) else index  # a slice is a view, an index is a copy
        self.position, self.span, self.masks = position, self.capacity, {}

    def aim_next(self, lengths, span: int):
        """The next forward writes one token of each of the first rows, behind `lengths` (R,), and reads `span` of them.

        Nothing here depends on what the tensor holds: a CUDA graph can replay it.
        """
        self.to_slot, self.to_position = torch.arange(len(lengths), device=lengths.device), lengths
        self.take, self.read = self.to_slot, (slice(0, len(lengths)), slice(None), slice(0, span))
        self.position, self.span, self.masks = lengths[:, None], span, {}

    def reserve(self, needed: int):
        """Room for `needed` tokens a row; when it grows, all tensors are new ones."""
        if needed > self.capacity:
            self.capacity = -(-max(needed, self.capacity * 5 // 4) // 32) * 32
            for tensors in (self.keys, self.values):
                for i, old in enumerate(tensors):
                    if old is not None:
                        tensors[i] = room(old, (*old.shape[:2], self.capacity, old.shape[3]))
                        tensors[i][:, :, :old.shape[2]] = old

    def update(self, key, value, layer: int, *_, **__):
        """key, value (R, H_kv, C, D) of the aimed rows -> all of these rows' (R, H_kv, S, D), S the capacity."""
        for tensors, new in ((self.keys, key), (self.values, value)):
            if tensors[layer] is None:
                tensors[layer] = room(new, (self.slots, new.shape[1], self.capacity, new.shape[3]))
            new = new.transpose(1, 2).flatten(0, 1)  # (R * C, H_kv, D)
            tensors[layer][self.to_slot, :, self.to_position] = new if len(self.take) == len(new) else new[self.take]
        return self.keys[layer][self.read], self.values[layer][self.read]  # whole: a CPU's bf16 bmm copies slices of S

    def hidden(self, window):
        """(R, 1, C, S) bool: what a query may not see; `window`: keys that a sliding layer sees, its own included."""
        if window not in self.masks:
            key, query = torch.arange(self.span, device=self.position.device), self.position[:, None, :, None]
            self.masks[window] = (key > query) | (key <= query - window) if window else key > query
        return self.masks[window]

    def bias(self, window, groups: int, dtype):
        """(R, 1, groups * C, S): -inf where `hidden`, else 0; made once a forward, not once a layer."""
        if (window, groups) not in self.masks:
            hidden = self.hidden(window).repeat(1, 1, groups, 1)
            self.masks[window, groups] = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(
                hidden, -torch.inf)
        return self.masks[window, groups]

    def move(self, source: list[int], target: list[int], span: int):
        for t in (*self.keys, *self.values):
            t[target, :, :span] = t[source, :, :span]  # the right side is copied first: swaps are safe

    def get_seq_length(self, *_):
        return 0  # positions are passed explicitly; nobody may derive them from the cache

    def get_mask_sizes(self, query_length, *_):
        return self.span, 0


def row_attention(module, query, key, value, attention_mask, scaling=None, sliding_window=None, row_cache=None,
                  **kwargs):
    """Attention of ragged rows. Query heads of one KV head are stacked as query rows, so no key is ever repeated."""
    if kwargs.get("softcap") or kwargs.get("s_aux") is not None:
        raise ValueError(f"{type(module).__name__}: "
                         "attention with soft-capping or sinks is not supported by generate.py")
    B, H, C, D = query.shape
    heads, groups = key.shape[1], H // key.shape[1]
    if row_cache.sdpa:
        if C > 1:  # a prompt: its mask, once per query head of a group, would be larger than the keys are
            key, value, heads, groups = (*(x.repeat_interleave(groups, 1) for x in (key, value)), H, 1)
        out = F.scaled_dot_product_attention(query.reshape(B, heads, groups * C, D), key, value, scale=scaling,
                                             attn_mask=row_cache.bias(sliding_window, groups, query.dtype))
    else:
        scores = (query * scaling).reshape(B, heads, groups * C, D) @ key.transpose(2, 3)  # (B, H_kv, groups * C, S)
        scores = scores.view(B, heads, groups, C, -1)
        scores.masked_fill_(row_cache.hidden(sliding_window)[:, :, None], -torch.inf)
        out = scores.softmax(-1).view(B, heads, groups * C, -1) @ value  # (B, H_kv, groups * C, D)
    return out.reshape(B, H, C, -1).transpose(1, 2), None


def sample(logits, uniforms, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, block: int = 256):
    """`draw` -> ids (R,), logprobs (R,). FloatingPointError on non-finite logits."""
    ids, logprobs, finite = draw(logits, uniforms, None, temperature, top_k, top_p, block)
    if not finite.all():
        raise FloatingPointError("the model's logits are not finite")
    return ids, logprobs


def draw(logits, uniforms, forced, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, block: int = 256):
    """One token a row -> ids (R,), logprobs (R,) in nats under exactly the distribution drawn from, finite (R,) bool.

    Inverse CDF in two levels (sums of blocks, then inside one block): one exp over (R, V), one uniform in [0, 1) a row.
    temperature 0 takes the most likely token, its log-probability that of temperature 1. top_k and top_p cut the
    distribution (chat, evaluation); training episodes never use them. forced (R,): ids to take instead where they are
    not negative, or None. Never waits for the device.
    """
    few = max(1, PIECE // logits.shape[1])
    if logits.is_cpu and len(logits) > few:
        parts = [draw(logits[i:i + few], uniforms[i:i + few], None if forced is None else forced[i:i + few],
                      temperature, top_k, top_p, block) for i in range(0, len(logits), few)]
        return tuple(torch.cat(part) for part in zip(*parts))
    z = logits.float() if temperature in (0, 1) else logits.float() / temperature  # (R, V)
    if top_k:
        z = z.masked_fill(z < z.topk(min(top_k, z.shape[1])).values[:, -1:], -torch.inf)
    if top_p < 1:
        ordered, index = z.sort(descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        z = z.masked_fill(torch.zeros_like(before, dtype=torch.bool).scatter(1, index, before >= top_p), -torch.inf)
    peak = z.amax(-1, keepdim=True)  # (R, 1)
    weight = (z - peak).exp_()  # (R, V)
    if z.shape[1] % block:
        weight = F.pad(weight, (0, -z.shape[1] % block))
    weight = weight.unflatten(1, (-1, block))  # (R, blocks, block)
    sums = weight.sum(-1)  # (R, blocks)
    cumulative = sums.double().cumsum(-1)  # (R, blocks); float64: a uniform near 1 must stay under the total
    total = cumulative[:, -1:]  # (R, 1)
    if temperature == 0:
        ids = z.argmax(-1)
    else:
        aim = torch.as_tensor(uniforms, dtype=torch.float64, device=z.device)[:, None] * total  # (R, 1)
        which = torch.searchsorted(cumulative, aim, right=True).clamp_(max=cumulative.shape[1] - 1)  # (R, 1)
        rest = aim - cumulative.gather(1, which) + sums.gather(1, which)  # (R, 1)
        inside = weight[torch.arange(len(z), device=z.device), which[:, 0]].double().cumsum(-1)  # (R, block)
        # Rounding may leave `rest` at or over the block's own sum: pull it under, so no token of weight 0 is drawn.
        rest = torch.minimum(rest.clamp_(min=0), inside[:, -1:] * (1 - 2**-40))
        ids = (which * block + torch.searchsorted(inside, rest, right=True))[:, 0]  # (R,)
    if forced is not None:
        ids = torch.where(forced >= 0, forced, ids)
    ids = ids.clamp(max=z.shape[1] - 1)  # where logits are not finite no search ends inside
    logprobs = (z.gather(1, ids[:, None]) - peak)[:, 0] - total[:, 0].log().float()  # (R,)
    return ids, logprobs, total.isfinite()[:, 0]


class Engine:
    """Decodes rows until each turn's stop id or limit. What comes next depends on token counts, never on the clock."""

    def __init__(self, model, *, slots: int = 64, tokens: int = 0, stop_ids=(), temperature: float = 1.0,
                 top_k: int = 0, top_p: float = 1.0, fused: bool = True, static: bool | None = None):
        """The engine of the weights as they are now; once they have changed, make a new one.

        fused: through `Fused`, if the model is of its family and it agrees with the stock modules. static: decode over
        tensors that stay in place; None: on a GPU, there as CUDA graphs. tokens: that a row has in the end, if known;
        where decoding is static there is room for them from the first step, and no graph has to be made again.
        UserError names a model whose attention cannot be held: Mamba, linear, shared, with sinks, soft-capped.
        """
        config = model.config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"]) - HELD
        kinds |= {"attention soft-capping"} if getattr(config, "attn_logit_softcapping", None) else set()
        kinds |= {"attention sinks"} if any(name.endswith(".sinks") for name, _ in model.named_parameters()) else set()
        shared = getattr(config, "num_kv_shared_layers", 0)
        if kinds or shared or not getattr(model, "_supports_attention_backend", False):
            kind = ", ".join(sorted(kinds)) or type(model).__name__
            raise UserError(f"{type(model).__name__}: generate.py cannot hold its cache ({kind}); "
                             "models with full or sliding-window attention work (Llama, Qwen2, Qwen3, Gemma 3, SmolLM)")
        from transformers import AttentionInterface
        AttentionInterface.register("row_attention", row_attention)
        self.model, self.config, self.slots, self.stop_ids = model, config, slots, frozenset(stop_ids)
        self.sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        self.device = model.device
        self.cache = RowCache(config.num_hidden_layers, slots, sdpa=self.device.type == "cuda")
        self.owner: list[Row | None] = [None] * slots
        self.waiting, self.prompts, self.clock = [], {}, 0  # clock: steps taken
        self.forwarded = 0  # tokens that went through the model, for the log
        self.static = self.device.type == "cuda" if static is None else static
        if self.static:
            def zeros(*shape, dtype=torch.long):
                return torch.zeros(shape, dtype=dtype, device=self.device)
            self.window = zeros(4 + WINDOW, slots)  # last token, its position, tokens left, running, forced ids or -1
            self.uniforms = zeros(WINDOW, slots, dtype=torch.float64)
            self.drawn = zeros(2 * WINDOW + 1, slots, dtype=torch.float64)  # ids, log-probs, how often not finite
            self.stops = torch.tensor(sorted(self.stop_ids), dtype=torch.long, device=self.device)
            self.now, self.graphs = zeros(1), {}  # now: which step of the window
            self.captured = 0  # capacity of the cache that the graphs hold
            self.cache.reserve(tokens + WINDOW)
            # No graphs of this model: hooks before a layer (layers streamed from the host) are Python, which a replayed
            # graph would leave out, and some RoPE looks at the positions.
            self.refused = facts(model).refuses_graphs or any(
                m._forward_pre_hooks or getattr(m, "rope_type", "") in ("dynamic", "longrope")
                for m in model.base_model.modules())
        self.fused = self._fuse() if fused else None

    def _fuse(self) -> Fused | None:
        """The fused forward, if the model is of its family and the two agree, which is asked once of each model."""
        model = self.model
        known = facts(model)
        if not fits(model) or known.fuses is False:
            return None
        try:
            fused = Fused(model, row_attention)
            known.fuses = known.fuses or self._agrees(fused)
            if known.fuses:
                fused.drop_merged()
        except Exception:  # a part of it is not what this family has
            known.fuses = False
        return fused if known.fuses else None

    @torch.inference_mode()
    def _agrees(self, fused) -> bool:
        """Does it give the stock modules' logits? Four ragged rows, a prompt and then a token each; most must agree.

        In bf16 single rows may differ widely (control tokens, the first ones of a vocabulary, make huge activations).
        """
        logits, vocab = [], self.config.vocab_size
        for body in (None, fused):
            engine = Engine(self.model, slots=4, fused=False, static=False)
            engine.fused, rows = body, [Row(range(vocab // 4, vocab, vocab // n)) for n in range(4, 8)]
            for slot, row in enumerate(rows):
                row.slot = slot
            with engine._attention():
                prompt = engine._forward(rows)  # (4, V)
                for row in rows:
                    row.pending = [vocab // 2]
                logits.append(torch.stack([prompt, engine._forward(rows)]).float())  # (2, 4, V)
        stock, ours = logits
        error = ((ours - stock).norm(dim=-1) / stock.norm(dim=-1)).median()
        return bool(error < (1e-4 if self.model.dtype == torch.float32 else 0.05))

    @property
    def busy(self) -> bool:
        """True while a row is decoding or could be: rows that wait for `extend` do not count."""
        return (any(row and row.state in ("chunk", "decode") for row in self.owner)
                or bool(self.waiting and None in self.owner))

    def add(self, rows):
        self.waiting.extend(rows)

    def extend(self, row: Row, ids, limit: int):
        """Append tokens the model did not sample (tool results, generation prompt); then the row samples again."""
        row.pending, row.turn, row.logprobs, row.limit, row.state = row.pending + list(ids), [], [], limit, "chunk"

    def release(self, row: Row):
        self.owner[row.slot], row.slot, row.state = None, None, "released"

    @torch.inference_mode()
    def step(self) -> list[Row]:
        """A decode step of all running rows, after the prompts and tool results due -> rows whose turn ended.

        Where decoding is static: up to WINDOW steps.
        """
        self.clock += 1
        with self._attention():
            ended = self._admit()
            chunks = [row for row in self.owner if row and row.state == "chunk"]
            if chunks:
                ended += self._draw(chunks, self._forward(chunks))
            running = [row for row in self.owner if row and row.state == "decode"]
            if running and self.static:
                ended += self._decode(running)
            elif running:
                self._pack()
                running = [row for row in self.owner if row and row.state == "decode"]
                ended += self._draw(running, self._forward(running))
        return ended

    @contextmanager
    def _attention(self):
        before, self.config._attn_implementation = self.config._attn_implementation, "row_attention"
        try:
            yield
        finally:
            self.config._attn_implementation = before

    def _admit(self) -> list[Row]:
        """Waiting rows take free slots. A group's prompt is forwarded by its first row and copied to the others."""
        free = [slot for slot, row in enumerate(self.owner) if row is None]
        entering, self.waiting = self.waiting[:len(free)], self.waiting[len(free):]
        first = {}
        for row, slot in zip(entering, free):
            row.slot, self.owner[slot] = slot, row
            if row.group not in self.prompts:
                first.setdefault(row.group, row)
        if not entering:
            return []
        still = {row.group for row in self.waiting}
        if first:
            logits = self._forward(list(first.values()))
            for i, row in enumerate(first.values()):
                own = [[t[row.slot, :, :row.length] for t in pair] for pair in zip(self.cache.keys, self.cache.values)]
                if row.group in still:  # its first row will write on, or be gone
                    own = [[t.clone() for t in pair] for pair in own]
                self.prompts[row.group] = own, logits[i], row.length
        for row in entering:
            prompt, _, row.length = self.prompts[row.group]
            row.pending = []
            if row is not first.get(row.group):
                for k, v, (prompt_k, prompt_v) in zip(self.cache.keys, self.cache.values, prompt):
                    k[row.slot, :, :row.length], v[row.slot, :, :row.length] = prompt_k, prompt_v
        logits = torch.stack([self.prompts[row.group][1] for row in entering])
        self.prompts = {group: kept for group, kept in self.prompts.items() if group in still}
        return self._draw(entering, logits)

    def _forward(self, rows: list[Row]):
        """Pending tokens of `rows` go through the model -> logits after each row's last one (R, V)."""
        lengths = [len(row.pending) for row in rows]
        if len(rows) > 1 and len(rows) * max(lengths) > 2**14:  # long prompts: fewer at a time
            return torch.cat([self._forward(rows[:len(rows) // 2]), self._forward(rows[len(rows) // 2:])])
        packed = all(row.slot == i for i, row in enumerate(rows))
        slots = len(rows) if packed else [row.slot for row in rows]
        self.cache.aim(slots, [row.length for row in rows], lengths, self.device)
        width = max(lengths)
        ids = [row.pending + [0] * (width - len(row.pending)) for row in rows]
        ids = torch.tensor(ids, device=self.device)  # (R, C)
        logits = self._logits(ids, torch.tensor(lengths, device=self.device) - 1)
        for row in rows:
            row.length += len(row.pending)
        self.forwarded += sum(lengths)
        return logits

    def _logits(self, ids, last):
        """ids (R, C) where the cache is aimed -> logits (R, V) after token `last` (R,) of a row; None: the only one."""
        if self.fused:
            hidden = self.fused(ids, self.cache)  # (R, C, D)
        else:
            hidden = self.model.base_model(input_ids=ids, position_ids=self.cache.position, past_key_values=self.cache,
                                           use_cache=True, row_cache=self.cache).last_hidden_state  # (R, C, D)
        hidden = hidden[:, 0] if last is None else hidden[torch.arange(len(ids), device=self.device), last]  # (R, D)
        return self.fused.head(hidden) if self.fused else head_logits(self.model, hidden)

    def _draw(self, rows: list[Row], logits) -> list[Row]:
        forced = [row.forced.pop(0) if row.forced else -1 for row in rows]
        forced = torch.tensor(forced, device=self.device) if max(forced) >= 0 else None
        ids, logprobs, finite = draw(logits, [row.uniform() for row in rows], forced, **self.sampling)
        if not finite.all():
            raise FloatingPointError("the model's logits are not finite")
        for row, token, logprob in zip(rows, ids.tolist(), logprobs.tolist()):
            self._append(row, token, logprob)
        return [row for row in rows if row.state == "ended"]

    def _append(self, row: Row, token: int, logprob: float):
        row.turn.append(token)
        row.logprobs.append(logprob)
        row.pending, row.state = [token], "decode"
        if token in self.stop_ids or len(row.turn) >= row.limit:
            row.state = "ended"

    def _decode(self, running: list[Row]) -> list[Row]:
        """Up to WINDOW decode steps without a look at what they draw -> rows whose turn ended."""
        bucket = [min(1 << (n - 1).bit_length(), self.slots) for n in (len(running), running[-1].slot + 1)]
        if bucket[0] < bucket[1]:  # only then: a frozen row costs less than moving another
            self._pack()
        rows = bucket[0]
        steps = min(WINDOW, max(row.limit - len(row.turn) for row in running))
        state, uniforms = [[0] * self.slots for _ in range(4 + WINDOW)], [[0.0] * self.slots for _ in range(WINDOW)]
        for row in filter(None, self.owner):
            on = row.state == "decode"
            forced = (row.forced if on else [])[:WINDOW]
            values = [row.pending[-1], row.length, row.limit - len(row.turn), int(on), *forced]
            for line, value in zip(state, values + [-1] * (4 + WINDOW - len(values))):
                line[row.slot] = value
            for line, value in zip(uniforms, row.ahead(WINDOW) if on else ()):
                line[row.slot] = value
        self.window.copy_(torch.tensor(state))
        self.uniforms.copy_(torch.tensor(uniforms, dtype=torch.float64))
        self.now.zero_(), self.drawn[-1].zero_()
        # A frozen row writes its token where it will write it again when it goes on: that place must exist.
        self.cache.reserve(max(row.length + (steps if row.state == "decode" else 1) for row in self.owner if row))
        if self.cache.capacity > self.captured:  # grown here, or by a prompt
            self.graphs.clear()  # they hold the addresses of the old cache
            self.captured = self.cache.capacity
        span = SPANS
        while span < max(row.length for row in running) + steps:
            span *= 2
        self._replay(rows, min(span, self.cache.capacity), steps)
        drawn = self.drawn[:, :rows].tolist()  # the one look
        if any(drawn[-1]):
            raise FloatingPointError("the model's logits are not finite")
        for row in running:
            for i in range(steps):
                self._append(row, int(drawn[i][row.slot]), drawn[WINDOW + i][row.slot])
                row.length += 1
                self.forwarded += 1
                del row.forced[:1], row._uniforms[-1:]
                if row.state == "ended":
                    break
        self.clock += steps - 1
        return [row for row in running if row.state == "ended"]

    def _replay(self, rows: int, span: int, steps: int):
        """`steps` static steps. A bucket's first window runs step by step, which warms it up; then it is a graph."""
        graph = self.graphs.get((rows, span))
        if graph is False:
            graph = self._capture(rows, span)
        self.graphs[rows, span] = graph or False
        for _ in range(steps):
            graph.replay() if graph else self._static_step(rows, span)

    def _capture(self, rows: int, span: int):
        """The static step as a CUDA graph; None without a GPU, or where the model does what no graph can hold."""
        if self.device.type != "cuda" or self.refused:
            return None
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        # One pool for all graphs that live: no two run at once. Tools run in threads: theirs is not this capture's.
        pool = next((g.pool() for g in self.graphs.values() if g), None) or torch.cuda.graph_pool_handle()
        try:
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                self._static_step(rows, span)
        except RuntimeError as error:
            print(f"note: decoding without CUDA graphs: {str(error).splitlines()[0]}", file=sys.stderr)
            torch.cuda.set_stream(stream)  # torch.cuda.graph leaves both behind where the capture's end raises
            torch._C._cuda_endAllocateToPool(self.device.index, pool)
            self.refused = facts(self.model).refuses_graphs = True
            return None
        return graph

    def _static_step(self, rows: int, span: int):
        """One decode step of the first rows, from `window` and into it: nothing here looks at a value."""
        state, now = self.window[:, :rows], self.now
        token, length, left, running = state[:4]  # (R,) each
        self.cache.aim_next(length, span)
        logits = self._logits(token[:, None], None)  # (R, V)
        ids, logprobs, finite = draw(logits, self.uniforms[:, :rows].index_select(0, now)[0],
                                     state[4:].index_select(0, now)[0], **self.sampling)
        self.drawn[:, :rows].index_copy_(0, now, ids.double()[None])
        self.drawn[:, :rows].index_copy_(0, now + WINDOW, logprobs.double()[None])
        self.drawn[-1, :rows] += running * ~finite
        token.copy_(torch.where(running > 0, ids, token))
        length += running
        left -= running
        running *= ~(ids[:, None] == self.stops).any(1) & (left > 0)
        now += 1

    def _pack(self):
        """Swap cache rows so that the decoding ones fill the first slots."""
        decoding = [row for row in self.owner if row and row.state == "decode"]
        outside = [row for row in decoding if row.slot >= len(decoding)]
        holes = [slot for slot in range(len(decoding)) if not (self.owner[slot] and self.owner[slot].state == "decode")]
        source, target, span = [], [], 1
        for row, hole in zip(outside, holes):
            other, slot = self.owner[hole], row.slot
            source.append(slot), target.append(hole)
            if other:
                source.append(hole), target.append(slot)
                other.slot = slot
            span = max(span, row.length, other.length if other else 0)
            self.owner[slot], self.owner[hole], row.slot = other, row, hole
        if source:
            self.cache.move(source, target, span)


def generate(model, prompts, *, group_size: int = 1, max_new_tokens: int = 128, slots: int = 64, stop_ids=(),
             seed: int = 0, forced=None, **sampling) -> list[tuple[list[int], list[float]]]:
    """`group_size` completions of each prompt (list of ids) -> [(ids, logprobs)], a prompt's completions together.

    `forced`: one list of ids per completion, taken in place of sampled tokens.
    """
    engine = Engine(model, slots=min(slots, len(prompts) * group_size), stop_ids=stop_ids,
                    tokens=max(map(len, prompts), default=0) + max_new_tokens, **sampling)
    rows = [Row(prompt, group=i, seed=(seed << 40) + i * group_size + g, limit=max_new_tokens,
                forced=list(forced[i * group_size + g]) if forced else None)
            for i, prompt in enumerate(prompts) for g in range(group_size)]
    engine.add(rows)
    while engine.busy:
        for row in engine.step():
            engine.release(row)
    return [(row.turn, row.logprobs) for row in rows]
