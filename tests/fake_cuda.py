"""A CUDA device that the CPU plays with real numbers: what CUDA refuses, may get wrong or cannot capture is a Violation.

    with cuda() as device:
        grpo.train(...)

With mps() it plays the GPU of a Mac, of which torch knows less: no streams, no graphs, no pinned memory and no float64.
A tensor is on the device if its storage is marked. The device's work is done at once, but a copy on a side stream as late as
CUDA may do it: when another stream waits for that one. Violations:

    mix      a tensor of the device meets one of the host
    race     the host writes what a copy that nobody has waited for still reads, or reads what it still writes
    capture  a wait, or the host's memory, inside a CUDA graph
    float64  a tensor of it on a Mac's device
"""
import contextlib
import traceback
from collections import Counter
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import DefaultDeviceType

from bench.budget import kind_of
from bench.gpu_norms import norms_as_on_a_gpu

aten = torch.ops.aten
GPU = torch.device("cuda", 0)  # or that of a Mac, while mps() is open
# They take indices from the host, too, for which they wait.
INDEXED = {aten.index.Tensor, aten.index_put_.default, aten._index_put_impl_.default, aten._unsafe_index.Tensor}
# The host has to know their result. Inference mode does not take item and where apart.
WAITING = {aten.item.default, aten.where.default, aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default, aten.is_nonzero.default}
ENGINE = torch.autograd.graph._engine_run_backward


class Violation(AssertionError):
    pass


def storage(tensor):
    return tensor.untyped_storage()


def on_gpu(tensor) -> bool:
    return getattr(storage(tensor), "is_fake", False)


def mark(tree, is_fake=True):
    """Say of new tensors where they are."""
    for tensor in plain(tree):
        if is_fake and GPU.type == "mps" and tensor.dtype in (torch.float64, torch.complex128):
            raise Violation(f"float64: a tensor of {tuple(tensor.shape)} at {place()}")
        storage(tensor).is_fake = is_fake
    return tree


def plain(tree) -> list:
    """Return the tensors in a tree but for those without numbers."""
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor) and x.device.type == "cpu"]


def is_gpu(device) -> bool:
    return device is not None and torch.device(device).type == GPU.type


def place() -> str:
    """Return the line of the program that is running."""
    for frame in reversed(traceback.extract_stack()):
        if not any(part in frame.filename for part in (__file__, "site-packages/torch/", "unittest", "contextlib", "<")):
            return f"{frame.filename}:{frame.lineno}"


class Device(TorchDispatchMode):
    """The device and what it has seen.

    Attributes:
        events: kind of wait or copy -> how often.
        graphs: that were captured.
        kernels: that ran by themselves, not in the replay of a graph: operations that are no views.
    """

    def __init__(self):
        super().__init__()
        self.events = Counter()
        self.violations = []
        self.graphs = []
        self.kernels = 0
        self.graph = None  # that is being captured
        self.stream = self.main = Stream()
        self.read, self.written = [], []  # the host's storages that copies under way read, write
        self.makes = False  # does a function of the device's tensors run, so that what it makes is there

    def refuse(self, kind, what):
        self.violations.append(f"{kind}: {what} at {place()}")
        raise Violation(self.violations[-1])

    def happens(self, kind, waits=True):
        self.events[kind] += 1
        if self.graph:
            self.refuse("capture", kind)
        if waits:
            self.read.clear()
            self.written.clear()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunction():
            return self.run(func, args, kwargs or {})

    def run(self, func, args, kwargs):
        tensors = plain((args, kwargs))
        there = [t for t in tensors if on_gpu(t)]
        here = [t for t in tensors if not on_gpu(t)]
        if func is aten.copy_.default and there and here:
            return self.cross(*args, **kwargs)
        # A number may come from the host.
        if there and any(t.dim() for t in here):
            values = plain(args[2:3])
            if func in INDEXED and on_gpu(args[0]) and all(on_gpu(v) for v in values if v.dim()):
                self.happens("indices from the host")
            else:
                self.refuse("mix", f"{func} with {[tuple(t.shape) for t in here]} of the host")
        for t in here:
            if any(storage(t) is s for s in self.written) and "view" not in str(func) and "detach" not in str(func):
                self.refuse("race", f"{func} reads what a copy still writes")
        if func._schema.is_mutable and any(args[0] is t and storage(t) is s for t in here for s in self.read):
            self.refuse("race", f"{func} writes what a copy still reads")
        by_mask = func in INDEXED and any(i.dtype in (torch.bool, torch.uint8) for i in plain(args[1]))
        if there and (func in WAITING or by_mask):
            self.happens(str(func))
        # Out= writes into an argument, and is no view.
        self.kernels += bool(there) and (func._schema.is_mutable or kind_of(func) != "view")
        out = self.graph.record(func, args, kwargs) if self.graph else func(*args, **kwargs)
        if there or not tensors and self.makes:
            # What an operation changes stays where it is.
            mark([t for t in plain(out) if not hasattr(storage(t), "is_fake")])
        return out

    def cross(self, to, source, non_blocking=False):
        """Copy between host and device."""
        host = source if on_gpu(to) else to
        is_async = non_blocking and getattr(storage(host), "is_locked", False)
        self.happens(f"{'asynchronous' if is_async else 'blocking'} copy to the {'device' if host is source else 'host'}", not is_async)
        if non_blocking and not is_async and host is to:
            self.refuse("race", "asynchronous copy to memory that is not pinned")
        if is_async:
            (self.read if host is source else self.written).append(storage(host))
            if self.stream is not self.main:
                self.stream.queue.append((to.detach(), source.detach()))
                return to
        return aten.copy_.default(to, source)


class Functions(TorchFunctionMode):
    """Gives tensors their device, and moves them."""

    def __init__(self, device):
        super().__init__()
        self.device = device

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        before = self.device.makes
        self.device.makes = kwargs.get("device") is None and any(map(on_gpu, plain((args, kwargs))))
        try:
            return self.run(func, args, kwargs)
        finally:
            self.device.makes = before

    def run(self, func, args, kwargs):
        T = torch.Tensor
        tensor = args[0] if args and plain(args[:1]) and isinstance(args[0], T) else None
        if func is T.backward or func is torch.autograd.backward:
            return self.backward(*args, **kwargs)
        if tensor is None:
            return self.make(func, args, kwargs)
        if func == T.device.__get__:
            return GPU if on_gpu(tensor) else func(*args)
        if func == T.is_cpu.__get__:
            return not on_gpu(tensor)
        if func in (T.is_cuda.__get__, T.is_mps.__get__):
            return on_gpu(tensor) and (func == T.is_cuda.__get__) == (GPU.type == "cuda")
        if func is T.cuda or func is T.cpu:
            return self.move(tensor, GPU if func is T.cuda else torch.device("cpu"))
        if func is T.to:
            return self.to(tensor, *args[1:], **kwargs)
        if func is T.pin_memory:
            if on_gpu(tensor):
                self.device.refuse("mix", "pin_memory() of a tensor of the device")
            copy = tensor.clone()
            storage(copy).is_locked = True
            return mark(copy, False)
        if func is T.is_pinned:
            return getattr(storage(tensor), "is_locked", False)
        if func is torch.histc and on_gpu(tensor):  # of whole numbers a CPU has none
            args = (tensor.float(), *args[1:])
        if on_gpu(tensor) and func in (T.numpy, T.__array__):
            self.device.refuse("mix", "numpy() of a tensor of the device")
        if on_gpu(tensor) and func is T.tolist:
            self.device.happens("tolist")
        if on_gpu(tensor) and func in (T.__getitem__, T.__setitem__):
            index = args[1] if isinstance(args[1], tuple) else args[1:2]
            if any(isinstance(i, (list, range)) for i in index):
                self.device.happens("indices from the host")
        return self.make(func, args, kwargs)

    def make(self, func, args, kwargs):
        """Call a function, perhaps with a device that its result shall be on."""
        device, pin = kwargs.get("device"), kwargs.pop("pin_memory", False)
        if not is_gpu(device) or func is torch.device:
            out = func(*args, **kwargs)
            if pin:
                storage(out).is_locked = True
            return mark(out, False) if pin or device is not None else out
        if func in (torch.tensor, torch.as_tensor):
            self.device.happens("torch.tensor on the device")
        return mark(func(*args, **{**kwargs, "device": "cpu"}))

    def to(self, tensor, *words, device=None, dtype=None, non_blocking=False, copy=False, **_):
        for word in words:
            if isinstance(word, torch.dtype):
                dtype = word
            elif isinstance(word, bool):
                non_blocking = word
            elif isinstance(word, torch.Tensor):
                device, dtype = GPU if on_gpu(word) else word.device, word.dtype
            elif word is not None:
                device = word
        return self.move(tensor, device and torch.device(device), dtype, non_blocking, copy)

    def move(self, tensor, device, dtype=None, non_blocking=False, copy=False):
        if device is None or device.type == "meta" or is_gpu(device) == on_gpu(tensor):
            words = {"device": device} if device and device.type == "meta" else {}
            return torch.Tensor.to(tensor, dtype=dtype or tensor.dtype, copy=copy, **words)
        if tensor.requires_grad and torch.is_grad_enabled():
            return Moved.apply(tensor, device, non_blocking).to(dtype or tensor.dtype)
        return moved(tensor, device, non_blocking).to(dtype or tensor.dtype)

    def backward(self, tensors, gradient=None, grad_tensors=None, **_):
        """Let functions in the backward pass be seen, too."""
        tensors = tensors if isinstance(tensors, (tuple, list)) else (tensors,)
        gradients = gradient if grad_tensors is None else grad_tensors
        gradients = gradients if isinstance(gradients, (tuple, list)) else (gradients,) * len(tensors)
        gradients = tuple(mark(torch.ones_like(t), on_gpu(t)) if g is None else g for t, g in zip(tensors, gradients, strict=True))
        with self:
            ENGINE(tuple(tensors), gradients, False, False, (), allow_unreachable=True, accumulate_grad=True)


def moved(tensor, device, non_blocking=False):
    with torch.no_grad():
        return mark(torch.empty_like(tensor), is_gpu(device)).copy_(tensor, non_blocking)


class Moved(torch.autograd.Function):
    """A copy whose gradient goes back."""

    @staticmethod
    def forward(ctx, tensor, device, non_blocking):
        ctx.device = GPU if on_gpu(tensor) else torch.device("cpu")
        return moved(tensor, device, non_blocking)

    @staticmethod
    def backward(ctx, gradient):
        with torch._C.DisableTorchFunction():
            return moved(gradient, ctx.device), None, None


class Stream:
    def __init__(self, *_):
        self.queue = []

    def wait_stream(self, other):
        for to, source in other.queue:
            aten.copy_.default(to, source)
        other.queue.clear()


class Graph:
    """A CUDA graph: the operations of one run, done again on the very same tensors. Capturing runs nothing."""

    def __init__(self):
        self.calls, self.kept = [], []

    def record(self, func, args, kwargs):
        for argument, value in zip(func._schema.arguments, args):
            if argument.is_write:
                self.kept += [(t, t.clone()) for t in plain(value)]
        self.calls.append((func, args, kwargs, out := func(*args, **kwargs)))
        return out

    def put_back(self):
        with torch.utils._python_dispatch._disable_current_modes():
            for tensor, value in reversed(self.kept):
                aten.copy_.default(tensor, value)
        self.kept.clear()

    @torch.no_grad()
    def replay(self):
        with torch._C.DisableTorchFunction(), torch.utils._python_dispatch._disable_current_modes():
            for func, args, kwargs, out in self.calls:
                for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                    if torch.is_tensor(old) and storage(old).data_ptr() != storage(new).data_ptr():
                        old.copy_(new)

    def pool(self):
        return self.memory


@contextlib.contextmanager
def cuda(bfloat16=True, free=2**32):
    """Let torch have a GPU inside the block. Yields the `Device`. Raises Violation, at the end at the latest."""
    device = Device()

    @contextlib.contextmanager
    def stream(new):
        before, device.stream = device.stream, new or device.stream
        try:
            yield
        finally:
            device.stream = before

    @contextlib.contextmanager
    def graph(new, pool=None, **_):
        device.graph, new.memory = new, pool
        try:
            yield
        finally:
            device.graph = None
            new.put_back()
        device.graphs.append(new)

    @contextlib.contextmanager
    def other(*_):
        yield

    random = torch.zeros(16, dtype=torch.uint8)
    answers = {
        "is_available": True, "device_count": 1, "current_device": 0, "set_device": None, "is_bf16_supported": bfloat16,
        "mem_get_info": (free, free), "memory_reserved": 0, "memory_allocated": 0, "max_memory_allocated": 0,
        "get_rng_state": random, "set_rng_state": None, "is_current_stream_capturing": False, "synchronize": None, "empty_cache": None,
        "manual_seed_all": None, "set_stream": None, "get_device_capability": (8, 0) if bfloat16 else (7, 5),
        "is_initialized": True}
    functions = {name: lambda *_, answer=answer, **__: answer for name, answer in answers.items()}
    functions |= {"Stream": Stream, "stream": stream, "current_stream": lambda *_: device.stream, "device": other, "CUDAGraph": Graph, "graph": graph, "graph_pool_handle": object}
    with contextlib.ExitStack() as stack:
        for name, function in functions.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, function))
        # With a CUDA build of torch the optimizer would ask the driver, which is not there.
        stack.enter_context(mock.patch.object(torch.accelerator, "current_accelerator", lambda *_, **__: None))
        stack.enter_context(mock.patch.object(DefaultDeviceType, "get_device_type", staticmethod(lambda: "cuda")))
        stack.enter_context(norms_as_on_a_gpu())
        stack.enter_context(device)
        stack.enter_context(Functions(device))
        yield device
    if device.violations:
        raise Violation(device.violations[0])


@contextlib.contextmanager
def mps():
    """Let torch have the GPU of a Mac inside the block, as `cuda` does."""
    device = Device()
    random = torch.zeros(16, dtype=torch.uint8)
    functions = {"get_rng_state": lambda *_: random, "set_rng_state": lambda *_: None, "current_allocated_memory": lambda: 0}
    with contextlib.ExitStack() as stack:
        for name, function in functions.items():
            stack.enter_context(mock.patch.object(torch.mps, name, function))
        stack.enter_context(mock.patch.object(torch.backends.mps, "is_available", lambda: True))
        stack.enter_context(mock.patch.object(torch.accelerator, "current_accelerator", lambda *_, **__: None))
        stack.enter_context(mock.patch.object(DefaultDeviceType, "get_device_type", staticmethod(lambda: "mps")))
        stack.enter_context(mock.patch.dict(globals(), GPU=torch.device("mps", 0)))
        stack.enter_context(device)
        stack.enter_context(Functions(device))
        yield device
    if device.violations:
        raise Violation(device.violations[0])
