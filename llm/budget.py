"""Count the memory that a step needs, on a machine that need not have it.

`measure` runs a step's real code (load_model, token_logprobs, backward, AdamW, decoding) on the
meta device, where tensors have shapes and no numbers. That takes seconds for a model of any size.
`Bytes` meanwhile adds up the storages that live at the same time. The result agrees with torch's
allocator on a CPU within 1 %. Three things are not counted: what a kernel allocates inside itself,
CUDA's context (300 to 500 MiB), and what the allocator rounds up.
"""
import gc
from contextlib import ExitStack, nullcontext
from functools import cache, partial
from itertools import islice
from typing import NamedTuple
from unittest import mock

import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import lora
import llm.logprobs as logprobs
import llm.pointwise as pointwise
import llm.quantization as quantization
from llm.engine import Row
from llm.loading import load_model
from llm.optimizer import HostAdamW, adamw
from llm.static_engine import make_engine
from lora import freeze_reference, merged

aten = torch.ops.aten
MIB = 2**20
# Shapes of results by operation and arguments: torch works them out in Python, 0.3 ms each time.
SHAPES = {}


class Bytes(TorchDispatchMode):
    """Count the bytes of the storages that live at once inside a `with` block.

    `now` and `peak` are bytes on the device, `host` is bytes of host memory beside it.
    """

    # True would wrap every call and import torch._dynamo.
    _should_skip_dynamo = classmethod(lambda cls: False)

    def __init__(self, kind: str = "cuda"):
        """With kind "cuda" or "cpu", tensors on the meta device answer as that device's would.

        The code under test then takes that device's branches. A number that it asks for is 1, a
        mask selects everything, and attention is the fused kernel. With kind "real" the tensors of
        the CPU are counted.
        """
        super().__init__()
        self.kind = kind
        self.now = self.peak = self.host = 0
        self.patches, self.depth = None, 0

    def __enter__(self):
        if self.kind != "real" and not self.depth:
            self.patches = ExitStack()
            for name, answer in (("is_cuda", self.kind == "cuda"), ("is_cpu", self.kind == "cpu")):
                self.patches.enter_context(
                    mock.patch.object(torch.Tensor, name, _device_property(name, answer)))
            for owner, name, replacement in _replacements():
                self.patches.enter_context(mock.patch.object(owner, name, replacement))
        self.depth += 1
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.depth -= 1
        if self.patches and not self.depth:
            self.patches.close()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, (list, tuple)) and first:
            first = first[0]
        if isinstance(first, torch.Tensor) and first.is_meta:
            return _answer(func)(self, func, args, kwargs)
        if func is aten.copy_.default and args[1].is_meta:
            # There are no numbers to copy to the host.
            return first
        return self.hold(func(*args, **kwargs))

    # ------------------------------------------------ what an operation on the meta device returns
    def new_tensors(self, func, args, kwargs):
        """Return the results of an operation that allocates them."""
        key = (func, *map(_key, args), *((name, _key(value)) for name, value in kwargs.items()))
        if key not in SHAPES:
            results = func(*args, **kwargs)
            several = isinstance(results, (list, tuple))
            SHAPES[key] = several, [
                isinstance(t, torch.Tensor) and (t.shape, t.stride(), t.dtype)
                for t in (results if several else [results])]
        several, shapes = SHAPES[key]
        results = []
        for shape in shapes:
            results.append(torch.empty_strided(*shape[:2], dtype=shape[2], device="meta")
                           if shape else None)
        self.hold(results)
        return tuple(results) if several else results[0]

    def view(self, func, args, kwargs):
        """Return the result of an operation that allocates nothing."""
        return func(*args, **kwargs)

    def in_place(self, func, args, kwargs):
        """Return the first argument, which the operation overwrites."""
        return args[0] if isinstance(args[0], torch.Tensor) else None

    def decompose(self, func, args, kwargs):
        """Count the operations that a composite one consists of."""
        with self:
            return func.decompose(*args, **kwargs)

    def number(self, func, args, kwargs):
        """Return a number for .item(): True is also 1 and 1.0."""
        return True

    def copy(self, func, args, kwargs):
        """Return a copy of another dtype, or one on the host."""
        device = kwargs.get("device")
        if device is None or device.type != "cpu":
            return self.new_tensors(func, args, kwargs)
        x = args[0]
        # Large tensors stay uninitialised: memory that nobody touches costs nothing.
        make = torch.zeros if x.numel() < 2**16 else torch.empty
        return self.hold(make(x.shape, dtype=kwargs.get("dtype") or x.dtype))

    def nonzero(self, func, args, kwargs):
        """Return as many positions as there are elements."""
        x = args[0]
        return self.hold(x.new_empty(x.numel(), x.dim(), dtype=torch.long))

    def index(self, func, args, kwargs):
        """Return x[index], where a mask selects everything."""
        x, indices = args
        places = []
        for index in indices:
            if index is not None and index.dtype == torch.bool:
                every = index.new_empty(index.numel(), dtype=torch.long)
                places += [every] * index.dim()
            else:
                places.append(index)
        return self.hold(func(x, places))

    def hold(self, results):
        """Count the storages of one or several results for as long as they live; return these."""
        for tensor in results if isinstance(results, (list, tuple)) else [results]:
            if not isinstance(tensor, torch.Tensor) or self.kind == "real" and tensor.is_meta:
                continue
            storage = tensor.untyped_storage()
            # A storage's Python object lives as long as its memory does.
            if not hasattr(storage, "counted"):
                on_device = tensor.is_meta or self.kind != "cuda"
                storage.counted = _Counted(self, "now" if on_device else "host", storage.nbytes())
        return results


class _Counted:
    """Bytes that are added to a field of a count until this object is deleted."""

    def __init__(self, count: Bytes, field: str, nbytes: int):
        self.count, self.field, self.nbytes = count, field, nbytes
        setattr(count, field, getattr(count, field) + nbytes)
        count.peak = max(count.peak, count.now)

    def __del__(self):
        setattr(self.count, self.field, getattr(self.count, self.field) - self.nbytes)


@cache
def _answer(func):
    """Return the method of Bytes that answers an operation on the meta device."""
    special = {aten._local_scalar_dense.default: Bytes.number, aten._to_copy.default: Bytes.copy,
               aten.nonzero.default: Bytes.nonzero, aten.index.Tensor: Bytes.index}
    if func in special:
        return special[func]
    schema = func._schema
    has_kernel = partial(torch._C._dispatch_has_kernel_for_dispatch_key, func.name())
    if has_kernel("CompositeImplicitAutograd") and not has_kernel("CPU"):
        # Inference mode does not decompose it.
        return Bytes.decompose
    if schema.is_mutable and schema.name.endswith("_"):
        return Bytes.in_place
    aliases = any(result.alias_info for result in schema.returns)
    if schema.is_mutable or aliases or func is aten._unsafe_view.default:
        return Bytes.view
    return Bytes.new_tensors


def _key(argument):
    """Return a hashable form of an argument, in which a tensor is its shape."""
    if isinstance(argument, torch.Tensor):
        return argument.shape, argument.stride(), argument.dtype
    if isinstance(argument, (list, tuple)):
        return tuple(map(_key, argument))
    return type(argument), argument


# ------------------------------------------------------------------ what is patched while counting
def _device_property(name: str, answer: bool):
    """Return a property of torch.Tensor that gives the answer for tensors on the meta device."""
    stock = getattr(torch.Tensor, name)
    return property(lambda tensor: answer if tensor.is_meta else stock.__get__(tensor))


def _replacements() -> list[tuple]:
    """Return (owner, name, replacement) of functions that the meta device cannot run as they are.

    Of a loop over equal pieces the first two are enough, because the others take no more memory.
    """
    blocks, pieces = quantization.blocks, pointwise.pieces

    def first_blocks(*sizes):
        return blocks(*sizes)[:2]
    attention = partial(_fused_attention, F.scaled_dot_product_attention)
    return [
        (F, "scaled_dot_product_attention", attention),
        (quantization.Linear4bit, "dequantize", _dequantize),
        (quantization, "blocks", first_blocks),
        (logprobs, "blocks", first_blocks),
        # A constant is counted every time.
        (lora, "_noise", cache(lora._noise.__wrapped__)),
        (pointwise, "pieces", lambda *tensors: islice(pieces(*tensors), 2))]


def _dequantize(linear, dtype):
    """Return the weight (out, in); like bitsandbytes, hold the scales in float32 meanwhile."""
    scales = torch.empty_like(linear.scale, dtype=torch.float32)  # noqa: F841
    return linear.weight.new_empty(linear.out_features, linear.in_features, dtype=dtype)


def _fused_attention(stock, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False,
                     scale=None, **kwargs):
    """Return attention on the meta device by the kernel that keeps no (T, S) weights."""
    if not query.is_meta:
        return stock(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **kwargs)
    bias = None if attn_mask is None else query.new_empty(attn_mask.shape)
    return aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, attn_mask=bias, scale=scale)[0]


# -------------------------------------------------------------------------------------- one step
class Workload(NamedTuple):
    """The step whose memory is measured: one micro-batch of the update, then a rollout."""

    rows: int  # sequences in the micro-batch, no two alike
    tokens: int  # tokens per sequence or episode; all but the first are trained
    temperature: float = 1.0
    merge: bool = False  # True if the update runs on merged weights
    keep_start: bool = False  # True if the weights at the start are kept for a KL penalty
    decode_rows: int = 0  # episodes that decode at once; 0: no rollout
    group_size: int = 1
    max_new_tokens: int = 64


def measure(options: dict, work: Workload, kind: str = "cuda", device: str = "meta") -> dict:
    """Return peak bytes on the device of "loading", "update" and "rollout", and bytes of "host".

    Args:
        options: arguments of load_model
        work: what the step does
        kind: "cuda" or "cpu", which the meta device stands for
        device: "meta" counts; "cpu" and "cuda" run the step and measure it

    Gradients and moments are there before the update, as in every step but a run's first. The peak
    of loading on the meta device includes a skeleton that a run's device never holds.
    """
    cuda = device.startswith("cuda")
    count = nullcontext() if cuda else Bytes(kind if device == "meta" else "real")
    with count:
        peaks = {}
        model, _ = load_model(**options, device=device)
        if device != "meta":
            # Free what loading left in reference cycles.
            gc.collect()
        peaks["loading"] = _peak(count)
        frozen = freeze_reference(model) if work.keep_start else None  # noqa: F841
        # The optimizer stays alive: its moments are there during the rollout too.
        optimizer = _optimizer_with_moments(model, kind)
        _update(model, optimizer, work)
        peaks["update"] = _peak(count)
        if work.decode_rows:
            _rollout(model, work, steps=2 if cuda else 1)
            peaks["rollout"] = _peak(count)
        peaks["host"] = 0 if cuda else count.host
    return peaks


def _peak(count) -> int:
    """Return the peak since the last call, as counted or, without a count, from CUDA."""
    if isinstance(count, Bytes):
        peak, count.peak = count.peak, count.now
        return peak
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return peak


def _optimizer_with_moments(model, kind: str):
    """Return AdamW after a step, with the gradients of an earlier micro-batch in place."""
    optimizer = adamw(model, lr=1e-5)
    if isinstance(optimizer, HostAdamW):
        return optimizer
    # AdamW would choose this by the device that the meta device stands for.
    optimizer.param_groups[0]["foreach"] = kind == "cuda" or None
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    return optimizer


def _update(model, optimizer, work: Workload):
    """Run one micro-batch, clip the gradients and step."""
    weights = [p for p in model.parameters() if p.requires_grad]
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = torch.arange(work.rows * work.tokens, device=model.device).remainder_(vocabulary)
    ids = ids.view(work.rows, work.tokens)
    mask = torch.ones_like(ids)
    mask[:, 0] = 0
    with merged(model, update=True) if work.merge else nullcontext():
        new_logprobs, entropy = logprobs.token_logprobs(
            model.train(), ids, mask, work.temperature)
        # A real loss adds (rows, tokens) tensors, which are nothing beside the logits.
        (-new_logprobs.mean()).backward()
        del new_logprobs, entropy
    torch.nn.utils.clip_grad_norm_(weights, 1.0)
    # The meta device has no fused AdamW, and on the host it allocates nothing on the device.
    if not isinstance(optimizer, HostAdamW) or not model.device.type == "meta":
        optimizer.step()
    for p in weights:
        p.grad = None


def _rollout(model, work: Workload, steps: int):
    """Decode the prompt's first token and then, `steps` times, the last one of the episode.

    What lies between these tokens only fills the cache. On a GPU the second step is a CUDA graph.
    """
    prompt = [1] * (work.tokens - work.max_new_tokens)
    with merged(model):
        engine = make_engine(model.eval(), slots=work.decode_rows, tokens=work.tokens)
        engine.add([Row(prompt, group=i // work.group_size, limit=2**30)
                    for i in range(work.decode_rows)])
        engine.step()
        for _ in range(steps):
            for row in engine.owner:
                row.length = work.tokens - 1
            engine.step()
