"""Count the memory that a step needs, on a machine that need not have it.

`measure` runs a step's real code (load_model, token_logprobs, backward, AdamW, decoding) on the
meta device, where tensors have shapes and no numbers. That takes seconds for a model of any size.
`Bytes` meanwhile adds up the storages that live at the same time. The result agrees with torch's
allocator on a CPU within 1 %. Three things are not counted: what a kernel allocates inside itself,
CUDA's context (500 MiB and more), and what the allocator rounds up.
"""
import gc
import math
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from itertools import islice
from typing import NamedTuple
from unittest import mock
from weakref import finalize

import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import lora
import core.logprobs as logprobs
import core.packing as packing
import extras.memory.pointwise as pointwise
import extras.memory.quantization as quantization
from extras.fast import static_engine
from bench.gpu_norms import norms_as_on_a_gpu
from core.model import adamw, facts, settings
from core.engine import Row, StockForward
from layers import load_model, make_engine

aten = torch.ops.aten
MIB = 2**20
# Results by operation and shapes of arguments: torch works them out in Python, 0.3 ms each time.
RESULTS = {}


class Bytes(TorchDispatchMode):
    """Count the bytes of the storages that live at once inside a `with` block.

    `now` and `peak` are bytes on the given kinds of devices, `host` is bytes of other memory.
    """

    # True would wrap every call and import torch._dynamo.
    _should_skip_dynamo = classmethod(lambda cls: False)

    def __init__(self, *devices: str):
        super().__init__()
        self.devices = devices
        self.now = self.peak = self.host = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        kind = kind_of(func)
        first = args[0] if args else None
        if isinstance(first, (list, tuple)) and first:
            first = first[0]
        on_meta = isinstance(first, torch.Tensor) and first.is_meta
        if kind == "composite":
            # Inference mode does not decompose it.
            with self:
                return func.decompose(*args, **kwargs)
        if func is aten.copy_.default and args[1].is_meta:
            # There are no numbers to copy to the host.
            return first
        if on_meta and kind == "in place":
            return args[0] if isinstance(args[0], torch.Tensor) else None
        if on_meta and kind == "view":
            return func(*args, **kwargs)
        results = new_tensors(func, args, kwargs) if on_meta else func(*args, **kwargs)
        self.hold(results if isinstance(results, (list, tuple)) else [results])
        return results

    def hold(self, tensors):
        """Count the storages of these tensors for as long as they live."""
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                # A storage's Python object lives as long as its memory does.
                if not hasattr(storage, "counted"):
                    field = "now" if tensor.device.type in self.devices else "host"
                    storage.counted = True
                    self.add(field, storage.nbytes())
                    finalize(storage, self.add, field, -storage.nbytes())

    def add(self, field: str, nbytes: int):
        setattr(self, field, getattr(self, field) + nbytes)
        self.peak = max(self.peak, self.now)


@cache
def kind_of(func) -> str:
    """Return what an operation does: "composite" (of others), "in place", "view" or "new"."""
    schema = func._schema
    has_kernel = partial(torch._C._dispatch_has_kernel_for_dispatch_key, func.name())
    if has_kernel("CompositeImplicitAutograd") and not has_kernel("CPU"):
        return "composite"
    if schema.is_mutable and schema.name.endswith("_"):
        return "in place"
    aliases = any(result.alias_info for result in schema.returns)
    return "view" if schema.is_mutable or aliases or func is aten._unsafe_view.default else "new"


def new_tensors(func, args, kwargs):
    """Return the results of an operation on the meta device that allocates them, or a number."""
    if func is aten._local_scalar_dense.default:
        # True is also 1 and 1.0.
        return True
    if func is aten._to_copy.default and torch.device(kwargs.get("device") or "meta").type == "cpu":
        # Large tensors stay uninitialised: memory that nobody touches costs nothing.
        make = torch.zeros if args[0].numel() < 2**16 else torch.empty
        return make(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
    key = func, *map(_shapes, args), *kwargs, *map(_shapes, kwargs.values())
    if key not in RESULTS:
        if func is aten._grouped_mm.default:
            # On the meta device this product, of experts, is for bfloat16 alone.
            weights = [tensor.bfloat16() for tensor in args[:2]]
            RESULTS[key] = func(*weights, *args[2:], **kwargs).to(args[0].dtype)
        else:
            RESULTS[key] = func(*args, **kwargs)
    return tree_map_only(torch.Tensor, _another, RESULTS[key])


def _another(tensor):
    """Return a new tensor of this form on the meta device, faster than torch.empty_like does."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _shapes(argument):
    """Return a hashable form of an argument, in which a tensor is its shape."""
    if isinstance(argument, torch.Tensor):
        return argument.shape, argument.stride(), argument.dtype
    if isinstance(argument, (list, tuple)):
        return tuple(map(_shapes, argument))
    return type(argument), argument


def all_rows(token_ids):
    """Return what `packing.distinct` does of rows that all differ: ids of the meta device have no values."""
    return token_ids, torch.arange(len(token_ids), device=token_ids.device)[:, None]


@contextmanager
def standing_for(kind: str):
    """Let the meta device run what a device of this kind ("cuda" or "cpu") runs.

    A mask selects everything there, and attention is the kernel that keeps no (T, S) weights. Of a
    loop over equal pieces the first two are enough, because the others take no more memory.
    """
    blocks, pieces = quantization.blocks, pointwise.pieces

    def first_blocks(*sizes):
        return blocks(*sizes)[:2]

    def first_pieces(*tensors):
        return islice(pieces(*tensors), 2)
    with (mock.patch.object(torch.Tensor, "is_cpu", kind == "cpu"),
          mock.patch.object(F, "scaled_dot_product_attention", _fused_attention),
          mock.patch.object(quantization, "blocks", first_blocks),
          mock.patch.object(logprobs, "blocks", first_blocks),
          mock.patch.object(logprobs, "used_columns", lambda mask: mask.shape[1]),
          mock.patch.object(packing, "distinct", all_rows),
          mock.patch.object(pointwise, "pieces", first_pieces),
          mock.patch.object(torch.Tensor, "nonzero", _all_places), norms_as_on_a_gpu()):
        yield


def _all_places(mask):
    """Return the places (numel, dim) that a mask selects on the meta device: all."""
    return mask.new_empty(mask.numel(), mask.dim(), dtype=torch.long)


def _fused_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False,
                     scale=None, **kwargs):
    """Return attention on the meta device by the kernel that keeps no (T, S) weights."""
    bias = None if attn_mask is None else query.new_empty(attn_mask.shape)
    # The kernel that counts wants values as wide as keys, which DeepSeek's are not.
    width = value.shape[-1]
    if width != query.shape[-1]:
        value = F.pad(value, (0, query.shape[-1] - width))
    return aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, attn_mask=bias, scale=scale)[0][..., :width]


# -------------------------------------------------------------------------------------- one step
class Workload(NamedTuple):
    """The step whose memory is measured: one micro-batch of the update, then a rollout."""

    rows: int  # sequences in the micro-batch, no two alike
    tokens: int  # tokens per sequence or episode; all but the first are trained
    temperature: float = 1.0
    merge: bool = False  # True if the update runs on merged weights
    keep_start: bool = False  # True if the weights at the start are kept for a KL penalty
    decode_rows: int = 0  # episodes that decode at once if a GPU has room; 0: no rollout
    group_size: int = 1
    max_new_tokens: int = 64
    result_tokens: int = 0  # of a tool result that all episodes read at once; 0: none is read
    free: float = math.inf  # bytes of the GPU, of which a rollout's cache takes what a run's would


def measure(options: dict, work: Workload, kind: str = "cuda", device: str = "meta") -> dict:
    """Return peak bytes on the device in "update" and "rollout", and bytes of "host" memory.

    With a rollout also how many "episodes" decode at once.

    Args:
        options: arguments of load_model
        work: what the step does
        kind: "cuda" or "cpu", which the meta device stands for
        device: "meta" counts; "cpu" runs the step in earnest, and counts its tensors

    Gradients and moments are there before the update, as in every step but a run's first.
    """
    # Count this constant, although an earlier model has made it.
    logprobs.random_bits.cache_clear()
    stand_in = standing_for(kind) if device == "meta" else nullcontext()
    with stand_in, Bytes("meta", kind) as count:
        model, _ = load_model(**options | {"device": device})
        if device == "meta":
            # No two rows are alike, and there are no numbers to look at.
            facts(model).shares_prefix = False
        # As `lora.freeze_reference`, which looks at numbers, and the meta device has none.
        is_fresh = settings(model) and settings(model).fresh
        kept = model.parameters() if work.keep_start and not is_fresh else ()
        frozen = [p.detach().clone() for p in kept if p.requires_grad]  # noqa: F841
        # The optimizer stays alive: its moments are there during the rollout too.
        optimizer = _optimizer_with_moments(model, kind)
        if device != "meta":
            # Free what loading left in reference cycles.
            gc.collect()
        count.peak = count.now
        _update(model, optimizer, work)
        peaks = {"update": count.peak, "host": count.host}
        optimizer.zero_grad()
        if work.decode_rows:
            count.peak = count.now
            peaks["episodes"] = _rollout(model, work, kind, work.free - count.now)
            peaks["rollout"] = count.peak
    return peaks


def _optimizer_with_moments(model, kind: str):
    """Return AdamW after a step, with the gradients of an earlier micro-batch in place."""
    optimizer = adamw(model, lr=1e-5)
    # AdamW would choose this by the device that the meta device stands for.
    optimizer.param_groups[0]["foreach"] = kind == "cuda" or None
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    return optimizer


def _update(model, optimizer, work: Workload):
    """Run one micro-batch, clip the gradients and step."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = torch.arange(work.rows * work.tokens, device=model.device).remainder_(vocabulary)
    ids = ids.view(work.rows, work.tokens)
    mask = torch.ones_like(ids)
    mask[:, 0] = 0
    with lora.merged_to_train(model) if work.merge else nullcontext():
        new_logprobs, entropy = logprobs.token_logprobs(
            model.train(), ids, mask, work.temperature)
        # A real loss adds (rows, tokens) tensors, which are nothing beside the logits.
        (-new_logprobs.mean()).backward()
        del new_logprobs, entropy
    weights = optimizer.param_groups[0]["params"]
    torch.nn.utils.clip_grad_norm_(weights, 1.0)
    # AdamW on the host allocates nothing on the device.
    if weights[0].device == model.device:
        optimizer.step()


def _rollout(model, work: Workload, kind: str, free: float) -> int:
    """Decode the prompt's first token and the last one of the episode. Return how many do at once.

    What lies between them only fills the cache, for which there are `free` bytes. Before the last
    one all may read a tool result.
    """
    prompt = [1] * (work.tokens - work.max_new_tokens)
    with lora.merged(model), mock.patch.object(static_engine, "free_bytes", lambda device: free):
        _count_a_row(model.eval())
        engine = make_engine(model, slots=work.decode_rows, tokens=work.tokens,
                             static=kind == "cuda")
        engine.cache.sdpa = kind == "cuda"  # where the meta device stands for a GPU
        engine.add([Row(prompt, group=i // work.group_size, limit=2**30)
                    for i in range(work.decode_rows)])
        engine.step()
        for row in engine.owner:
            row.length = work.tokens - 1 - work.result_tokens
            if work.result_tokens:
                engine.extend(row, [1] * (work.result_tokens - 1), 2**30)
        engine.step()
    return len(engine.owner)


def _count_a_row(model):
    """Tell the engine the bytes of its cache, as the probe at load does where there are numbers."""
    engine = make_engine(model, tokens=2, slots=1, static=False, decoder=StockForward(model))
    engine.add([Row([1, 1])])
    engine.step()
    for name, tensors, place in (("token_bytes", engine.cache.tensors, (0, slice(None), 0)),
                                 ("state_bytes", getattr(engine.cache, "states", {}), (0,))):
        setattr(facts(model), name, sum(t[place].nbytes for t in tensors.values()))
