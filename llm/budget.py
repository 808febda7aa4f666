"""How much memory a run would need, on a machine that need not have it.

    Bytes      adds up the storages that live at the same time
    measure    a step's own code (lora.load_model, token_logprobs, the loss, backward, AdamW, generate.Engine) on the
               meta device, where tensors have shapes and no numbers: seconds for a model of any size
    dry_run    --dry_run: the estimate for a run's own flags, which flag to change, then its longest batch in earnest

Against what torch's allocator reports of the same step on a CPU the ratio is 1.000 (tests/test_memory.py). Not counted:
what a kernel takes inside itself, CUDA's context (300 to 500 MiB), what the allocator rounds up.
"""
import gc
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from unittest import mock

import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from experiment.errors import Stop
from llm import memory, pointwise
from llm.memory import adamw

aten = torch.ops.aten
MIB = 2**20
# What --dry_run would change, one after another, until the run fits.
MENDS = (("slots", "half"), ("batch_size", "half"), ("gradient_checkpointing", True), ("merge_lora", False),
         ("load_in_4bit", True), ("int8_head", True), ("mlp_tokens", 256), ("optim", "adamw_cpu"),
         ("offload_activations", True), ("stream_layers", True))


class Bytes(TorchDispatchMode):
    """Inside the block: bytes of the storages that live at once. `now`, `peak`: on the device; `host`: beside it.

    kind "cuda" or "cpu": meta tensors answer as that device's would, so that its branches are taken; a number that is
    asked for is 1, a mask chooses everything, attention is the fused kernel. "real": tensors of a CPU are counted.
    """

    _should_skip_dynamo = classmethod(lambda cls: False)  # True wraps every call, and imports torch._dynamo

    def __init__(self, kind: str = "cuda"):
        super().__init__()
        self.kind, self.now, self.peak, self.host = kind, 0, 0, 0
        self.seen, self.patches, self.depth = {}, None, 0

    def __enter__(self):
        if self.kind != "real" and not self.patches:
            self.patches = ExitStack()
            for name, yes in (("is_cuda", self.kind == "cuda"), ("is_cpu", self.kind == "cpu")):
                own = getattr(torch.Tensor, name)
                answer = property(lambda t, own=own, yes=yes: yes if t.is_meta else own.__get__(t))
                self.patches.enter_context(mock.patch.object(torch.Tensor, name, answer))
            blocks, pieces = memory.blocks, pointwise.pieces  # of a loop, the first two: the others take no more
            for owner, name, ours in (
                    (F, "scaled_dot_product_attention", partial(_fused_attention, F.scaled_dot_product_attention)),
                    (memory.Linear4bit, "dequantised", _dequantised), (memory, "blocks", lambda *n: blocks(*n)[:2]),
                    (pointwise, "pieces", lambda *tensors: islice(pieces(*tensors), 2))):
                self.patches.enter_context(mock.patch.object(owner, name, ours))
        self.depth += 1
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.depth -= 1
        if self.patches and not self.depth:
            self.patches.close()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        x = args[0] if args else None
        x = x[0] if isinstance(x, (list, tuple)) and x else x
        if not isinstance(x, torch.Tensor) or not x.is_meta:
            if func is aten.copy_.default and args[1].is_meta:
                return x
            out = func(*args, **kwargs)
            self.hold(*(out if isinstance(out, (list, tuple)) else (out,)))
            return out
        how, shapes = self.seen.get(func) or self.seen.setdefault(func, (_how(func), {}))
        if how == "new":
            return self.shaped(func, shapes, args, kwargs)
        if how == "view":
            return func(*args, **kwargs)
        if how == "in place":
            return args[0] if isinstance(args[0], torch.Tensor) else None
        if how == "many":  # inference mode hands them over whole
            with self:
                return func.decompose(*args, **kwargs)
        if how == "number":
            return True  # and 1, and 1.0
        if how == "copy":
            if kwargs.get("device") is None or kwargs["device"].type != "cpu":
                return self.shaped(func, shapes, args, kwargs)
            new = torch.zeros if x.numel() < 2**16 else torch.empty  # memory that nobody touches costs nothing
            out = new(x.shape, dtype=kwargs.get("dtype") or x.dtype)
        elif how == "places":
            out = x.new_empty(x.numel(), x.dim(), dtype=torch.long)
        else:  # x[index]
            index = [i if i is None or i.dtype != torch.bool else i.new_empty(i.numel(), dtype=torch.long)
                     for i in args[1] for _ in range(i.dim() if i is not None and i.dtype == torch.bool else 1)]
            out = func(x, index)
        self.hold(out)
        return out

    def shaped(self, func, shapes, args, kwargs):
        """func(*args), its shapes from memory where they were seen: torch works them out in Python, 0.3 ms a time."""
        key = *map(_key, args), *((name, _key(a)) for name, a in kwargs.items())
        if key in shapes:
            out = [like and torch.empty_strided(*like[:2], dtype=like[2], device="meta") for like in shapes[key]]
        else:
            out = func(*args, **kwargs)
            out = out if isinstance(out, (list, tuple)) else (out,)
            shapes[key] = [(t.shape, t.stride(), t.dtype) if isinstance(t, torch.Tensor) else None for t in out]
        self.hold(*out)
        return tuple(out) if len(out) > 1 else out[0]

    def hold(self, *tensors):
        for t in tensors:
            if isinstance(t, torch.Tensor) and (self.kind != "real" or not t.is_meta):
                storage = t.untyped_storage()
                if not hasattr(storage, "counted"):  # its Python object lives as long as the memory does
                    place = "now" if t.is_meta or self.kind != "cuda" else "host"
                    storage.counted = _Counted(self, place, storage.nbytes())


class _Counted:
    def __init__(self, count: Bytes, place: str, nbytes: int):
        self.count, self.place, self.nbytes = count, place, nbytes
        setattr(count, place, getattr(count, place) + nbytes)
        count.peak = max(count.peak, count.now)

    def __del__(self):
        setattr(self.count, self.place, getattr(self.count, self.place) - self.nbytes)


def _how(func) -> str:
    """What `Bytes` does about an operation."""
    own = {aten._local_scalar_dense.default: "number", aten._to_copy.default: "copy", aten.nonzero.default: "places",
           aten.index.Tensor: "index"}
    schema = func._schema
    composite, kernel = (torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)
                         for key in ("CompositeImplicitAutograd", "CPU"))
    in_place = schema.is_mutable and schema.name[-1] == "_"
    view = schema.is_mutable or func is aten._unsafe_view.default or any(r.alias_info for r in schema.returns)
    return own.get(func) or (
        "many" if composite and not kernel else "in place" if in_place else "view" if view else "new")


def _key(a):
    if isinstance(a, torch.Tensor):
        return a.shape, a.stride(), a.dtype
    return tuple(map(_key, a)) if isinstance(a, (list, tuple)) else (type(a), a)


def _dequantised(linear, dtype):
    """Linear4bit's by its shapes, the scales in float32 and the weights (out, in): bitsandbytes takes 1 s to import."""
    scales = torch.empty_like(linear.scale, dtype=torch.float32)  # noqa: F841  (held to be counted)
    return linear.weight.new_empty(linear.out_features, linear.in_features, dtype=dtype)


def _fused_attention(stock, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, **kwargs):
    if not query.is_meta:
        return stock(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **kwargs)
    mask = None if attn_mask is None else query.new_empty(attn_mask.shape)  # as numbers to add
    return aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, attn_mask=mask, scale=scale)[0]


def measure(options: dict, *, rows: int, tokens: int, optim: str = "adamw", kind: str = "cuda", loss=None,
            merge: bool = False, merge_rollout: bool = False, keep_start: bool = False, rollout: dict | None = None,
            temperature: float = 1.0, device: str = "meta") -> dict:
    """Bytes of a step of `load_model(**options)` -> update, rollout (peaks on the device), host, loading (on
    the meta device with a skeleton that a run's device never holds).

    The update is a micro-batch, rows x tokens, all of them trained, no two rows alike, and the optimiser's step; as in
    all but a run's first, gradients and moments are there before it. loss(logprobs, entropy, mask) is the algorithm's.
    merge: lora.merged. keep_start: the weights that the run starts from are kept too. rollout: slots, group_size,
    max_tokens, max_new_tokens. device: "meta" counts, another one runs.
    """
    from llm.generate import Engine, Row
    from lora import freeze_reference, load_model, merged, token_logprobs
    cuda, found = device.startswith("cuda"), {}
    with nullcontext(Bytes()) if cuda else Bytes(kind if device == "meta" else "real") as count:
        def lap(name):
            found[name] = torch.cuda.max_memory_allocated() if cuda else count.peak
            count.peak = count.now
            if cuda:
                torch.cuda.reset_peak_memory_stats()
        model, _ = load_model(**options, device=device)
        if device != "meta":
            gc.collect()  # what loading left in cycles
        lap("loading")
        frozen = freeze_reference(model) if keep_start else None  # noqa: F841  (held to be counted)
        optimizer = adamw(model, optim, lr=1e-5) if (optim, device) != ("adamw8bit", "meta") else None
        weights = [p for p in model.parameters() if p.requires_grad]
        moments = [torch.empty(2, *p.shape, dtype=torch.uint8, device="meta") for p in weights if not optimizer]
        if optim == "adamw":
            optimizer.param_groups[0]["foreach"] = kind == "cuda" or None  # what AdamW itself chooses there

        def step():
            if optimizer and (optim, device) != ("adamw_cpu", "meta"):
                optimizer.step()
        for p in weights:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        step()  # for its moments
        vocabulary = model.get_input_embeddings().weight.shape[0]
        ids = torch.arange(rows * tokens, device=device).remainder_(vocabulary).view(rows, tokens)
        mask = torch.ones_like(ids)
        mask[:, 0] = 0
        with merged(model) if merge else nullcontext():
            logprobs, entropy = token_logprobs(model.train(), ids, mask, temperature)
            (loss(logprobs, entropy, mask) if loss else -logprobs.mean()).backward()
            del logprobs, entropy
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        step()
        for p in weights:
            p.grad = None
        del ids, mask, weights
        lap("update")
        if rollout:
            slots, prompt = rollout["slots"], rollout["max_tokens"] - rollout["max_new_tokens"]
            with merged(model) if merge_rollout else nullcontext():
                engine = Engine(model.eval(), slots=slots, tokens=rollout["max_tokens"])
                engine.add([Row([1] * prompt, group=i // rollout["group_size"], limit=2**30) for i in range(slots)])
                engine.step()
                for _ in range(1 + cuda):  # the second time it is a graph
                    for row in engine.owner:  # what lies between the first and the last token only fills the cache
                        row.length = rollout["max_tokens"] - 1
                    engine.step()
            lap("rollout")
        del moments
        return {**found, "host": count.host}


def free_memory(kind: str) -> int:
    """Bytes that are free on the GPU, or of this machine's memory."""
    if kind == "cuda":
        return torch.cuda.mem_get_info()[0]
    status = Path("/proc/meminfo")
    found = [line for line in status.read_text().splitlines() if "MemAvailable" in line] if status.exists() else []
    return int(found[0].split()[1]) * 1024 if found else 2**63


def dry_run(config, loss, *, rows: int = 1, merge: bool = False, merge_rollout: bool = False, episodes: int = 0,
            held_out: int = 0, keep_start: bool = False) -> dict:
    """Print what config's run would need; then which flags to change, or, where it fits, its longest batch in earnest.

    rows: sequences per unit of batch_size; episodes, held_out: those that training and evaluation have at once, if
    --slots allows; the others as in `measure`. The limit is --memory_mb, else what is free. Returns the estimate in
    MiB. Stop, status 1: does not fit.
    """
    from lora import model_options
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    limit = config.memory_mb * MIB if config.memory_mb else free_memory(kind)

    def count(config, device="meta"):
        plays = (episodes, getattr(config, "group_size", 1)), (held_out, getattr(config, "eval_group_size", 1))
        slots, group = max(((min(config.slots, n), g) for n, g in plays), key=lambda play: (play[0], -play[1]))
        merging = getattr(config, "merge_lora", True)
        return measure(
            {"path": config.model_path, **model_options(config)}, rows=rows * config.batch_size,
            tokens=config.max_tokens, optim=config.optim, kind=kind, loss=loss, merge=merge and merging,
            merge_rollout=merge_rollout and merging, keep_start=keep_start, device=device,
            temperature=getattr(config, "temperature", 1.0), rollout=slots and {
                "slots": slots, "group_size": group, "max_tokens": config.max_tokens,
                "max_new_tokens": min(getattr(config, "max_new_tokens", 64), config.max_tokens - 1)})

    def need(found):  # by update and rollout; on a CPU host memory is the same memory
        host = found["host"] if kind == "cpu" else 0
        return [found[part] + host for part in ("update", "rollout") if part in found]

    def show(title, found):
        parts = [f"update of {rows * config.batch_size} x {config.max_tokens} tokens {found['update'] / MIB:,.0f}"]
        if "rollout" in found:
            parts += [f"rollout of {config.slots} episodes {found['rollout'] / MIB:,.0f}"]
        print(f"{title:9} {max(need(found)) / MIB:8,.0f} MiB: {', '.join(parts)}; beside it {found['host'] / MIB:,.0f}",
              flush=True)

    config = replace(config, slots=max(1, min(config.slots, max(episodes, held_out))))
    print(f"{'limit':9} {limit / MIB:8,.0f} MiB " + ("(--memory_mb)" if config.memory_mb else f"(free {kind} memory)"),
          flush=True)
    found = count(config)
    show("estimate", found)
    if max(need(found)) > limit:
        raise Stop("does not fit; " + mend(config, need(found), limit, lambda config: need(count(config))), 1)
    try:
        show("tried", count(config, device=kind))
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not isinstance(error, (torch.OutOfMemoryError, MemoryError)) and "memory" not in str(error):
            raise
        limit = max(need(found)) // 2
        words = "tried: out of memory; " + mend(config, need(found), limit, lambda config: need(count(config)))
        raise Stop(words, 1) from None
    return {name: value / MIB for name, value in found.items()}


def mend(config, now: list[int], limit: int, need) -> str:
    """The flags that bring need(config) under the limit: of MENDS those that help, in their order, till it fits."""
    def over(bytes_):
        return sum(max(0, n - limit) for n in bytes_)
    changed, before = {}, None
    while over(now) and now != before:
        before = now
        for name, value in MENDS:
            own = getattr(config, name, value)
            if not over(now) or own == value or value == "half" and own == 1:
                continue
            new = replace(config, **{name: own // 2 if value == "half" else value})
            parts = name == "batch_size" and config.gradient_accumulation_steps
            if parts:
                new = replace(new, gradient_accumulation_steps=2 * parts)  # a step keeps its size
            try:
                less = need(new)
            except ValueError:  # a UserError: this flag needs another that is not set, --lora_r say
                continue
            if over(less) < 0.99 * over(now):
                if parts:
                    changed["gradient_accumulation_steps"] = 2 * parts
                now, config, changed[name] = less, new, getattr(new, name)
    flags = " ".join(f"--{name}" if value is True else f"--no_{name}" if value is False else f"--{name} {value}"
                     for name, value in changed.items())
    if not over(now):
        return f"with {flags} it needs {max(now) / MIB:,.0f} MiB"
    return (f"with {flags} it still needs {max(now) / MIB:,.0f} MiB: " if flags else "") + (
        "lower --max_tokens, or take a smaller model")
