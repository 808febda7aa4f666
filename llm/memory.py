"""What makes it small. Nothing here changes an equation and no algorithm names this file: lora.py calls it.

    read          a model out of its files, a tensor at a time, each as it will stay:
      Linear4bit    NF4 with double quantisation                   --load_in_4bit
      Table         embedding and head in int8, a scale per row    --int8_head
      Stream        layers in host memory, two on the device       --stream_layers
    checkpoint    layers and MLPs run again in the backward pass   --gradient_checkpointing --offload_activations
                                                                   --mlp_tokens
    HostAdamW     adapter, gradients and moments on the CPU        --optim adamw_cpu

budget.py counts what each of them saves.
"""
import ctypes
import logging
import os
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from experiment.run import UserError

OPTIMS = ("adamw", "adamw_cpu", "adamw8bit")
BLOCK = 4096  # rows of a table that are in the compute dtype at once


# ------------------------------------------------------------------------------------------------------- frozen weights
class Linear4bit(nn.Linear):
    """y = W x + b with W in NF4 and double quantisation (arXiv 2305.14314 section 3): 4.13 bits a weight.

    A weight is one of 16 levels times the scale of its block of 64; the scales are 8 bits each, with an offset and a
    float32 scale per 256 of them. Every forward and backward makes W anew in the dtype of x, and drops it; only
    decoding on a GPU does not.
    """

    def __init__(self, weight, bias=None):
        nn.Module.__init__(self)  # not nn.Linear's, which would allocate W
        self.out_features, self.in_features = weight.shape
        n, device = weight.numel(), weight.device
        if weight.is_meta:
            packed, scale, nested, code, offset = (torch.empty(shape, dtype=dtype, device=device) for shape, dtype in (
                ((n // 2, 1), torch.uint8), (n // 64, torch.uint8), (-(-n // 2**14), torch.float32),
                (256, torch.float32), ((), torch.float32)))
        else:
            logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)  # it misses a hub's kernel
            from bitsandbytes.functional import quantize_4bit, quantize_blockwise
            own = 2**16 if device.type == "cpu" else n  # a CPU's kernel takes 64 bytes a weight while it works
            parts = [quantize_4bit(part, quant_type="nf4") for part in weight.flatten().split(own)]
            packed, absmax = torch.cat([p for p, _ in parts]), torch.cat([state.absmax for _, state in parts])
            offset = absmax.mean()
            scale, second = quantize_blockwise(absmax - offset, blocksize=256)
            nested, code = second.absmax, second.code
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        for name, tensor in (("scale", scale), ("nested", nested), ("code", code), ("offset", offset)):
            self.register_buffer(name, tensor)

    def dequantised(self, dtype):
        from bitsandbytes.functional import QuantState, dequantize_4bit
        scales = QuantState(self.nested, code=self.code, blocksize=256, dtype=torch.float32)
        return dequantize_4bit(self.weight, QuantState(
            self.scale, shape=torch.Size((self.out_features, self.in_features)), blocksize=64, quant_type="nf4",
            dtype=dtype, offset=self.offset, state2=scales))  # (out, in)

    def forward(self, x):
        if not torch.is_inference_mode_enabled() or x.is_meta:  # counted is what many rows take: W is made
            return _Matmul4bit.apply(x, self.weight, self)
        return torch.ops.bitsandbytes.gemm_4bit(  # few rows on a GPU: it reads W in 4 bits and never makes it
            x, self.weight, (self.out_features, self.in_features), self.nested, 64, "nf4", bias=self.bias,
            absmax_8bit=self.scale, absmax_code=self.code, absmax_offset=self.offset)


class _Matmul4bit(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, packed, linear):
        ctx.linear = linear
        ctx.save_for_backward(packed)  # for its version: a slot refilled before the backward is an error, not a number
        return F.linear(x, linear.dequantised(x.dtype), linear.bias)

    @staticmethod
    def backward(ctx, grad):
        ctx.saved_tensors
        return grad @ ctx.linear.dequantised(grad.dtype), None, None


class Table(nn.Module):
    """The (V, D) weights of an embedding or an output head, or of both where they are tied, in int8.

    A row is whole numbers up to 127 times its own scale: 0.8 % error, where NF4 makes 9 %. host: they stay in host
    memory, and of them what is needed is copied over each time.
    """

    def __init__(self, weight, host: bool):
        super().__init__()
        self.dtype = weight.dtype
        data = torch.empty_like(weight, dtype=torch.int8)
        scale = torch.empty(len(weight), 1, device=weight.device)  # (V, 1), float32
        for rows in blocks(len(weight), 512) if not weight.is_meta else ():
            part = weight[rows].float()
            scale[rows] = part.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
            data[rows] = (part / scale[rows]).round().to(torch.int8)
        self.hosted = (pinned(data), pinned(scale)) if host else None  # in a tuple: no buffers of the model's
        self.register_buffer("data", None if host else data)
        self.register_buffer("scale", None if host else scale)

    def rows(self, where, device):
        """where: a slice, or ids (N,) -> those rows (N, D) on the device, in the model's dtype."""
        data, scale = self.hosted or (self.data, self.scale)
        if isinstance(where, torch.Tensor):
            where = where.to(data.device)
        part = data[where].to(device, non_blocking=True).to(self.dtype)  # (N, D)
        return part.mul_(scale[where].to(device, non_blocking=True).to(self.dtype))

    def __len__(self):
        return len(self.weight)

    @property
    def weight(self):
        return self.hosted[0] if self.hosted else self.data


class TableEmbedding(nn.Module):
    def __init__(self, table: Table, stock):
        super().__init__()
        stock.weight = None
        self.table, self.stock = table, (stock,)  # in a tuple: no submodule
        self.factor = torch.tensor(getattr(stock, "scalar_embed_scale", 1.0), dtype=table.dtype).item()  # Gemma's

    def forward(self, ids):
        return self.table.rows(ids.flatten(), ids.device).view(*ids.shape, -1) * self.factor  # (B, T, D)

    weight = property(lambda self: self.table.weight)
    num_embeddings = property(lambda self: len(self.table))


class TableHead(nn.Module):
    """(N, D) -> (N, V). `part` gives the logits of some rows of V only: lora.token_logprobs never asks for all."""

    def __init__(self, table: Table, stock, bias=None):
        super().__init__()
        stock.weight = None
        self.table, self.stock = table, (stock,)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def part(self, hidden, rows: slice):
        return F.linear(hidden, self.table.rows(rows, hidden.device), None if self.bias is None else self.bias[rows])

    def forward(self, hidden):
        logits = hidden.new_empty(*hidden.shape[:-1], len(self.table))
        for rows in blocks(len(self.table)):
            logits[..., rows] = self.part(hidden, rows)
        return logits

    weight = property(lambda self: self.table.weight)


def blocks(n: int, size: int = BLOCK):
    return [slice(i, min(i + size, n)) for i in range(0, n, size)]


def pinned(x):
    """A tensor of the host as a GPU copies it fastest, and without waiting; where there is none, the tensor itself."""
    return x.pin_memory() if torch.cuda.is_available() and not x.is_meta else x.to("cpu")


def to_host(x):
    """A copy in host memory, pinned where that speeds up the way back; on a CPU the tensor itself."""
    if x.device.type != "cuda":
        return x.to("cpu")
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)


# -------------------------------------------------------------------------------------------------------------- reading
def files_of(folder: str):
    """Model folder -> a function: name -> tensor, read when called. UserError where there is no such tensor."""
    from safetensors import safe_open
    names = [n for n in os.listdir(folder) if n.endswith(".safetensors")]
    if "model.safetensors" in names:
        names = ["model.safetensors"]
    elif any(n.startswith("model-0") for n in names):  # shards; there may be another format's files beside them
        names = [n for n in names if n.startswith("model-0")]
    files = [safe_open(os.path.join(folder, n), "pt") for n in sorted(names)]
    where = {name: file for file in files for name in file.keys()}

    def tensor(name):
        if name not in where:
            raise UserError(f"{folder}: no weights for {name}: the model is incomplete, or stored under other names, "
                            "which --load_in_4bit, --int8_head and --stream_layers do not read")
        return where[name].get_tensor(name)
    return tensor


def skeleton(config, dtype):
    """The model of a transformers config on the meta device: shapes, no numbers."""
    from transformers import AutoModelForCausalLM
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def read(model, tensor, device, load_in_4bit=False, int8_head=False, stream_layers=False):
    """Give a skeleton its weights, `tensor(name)` each; at no time is more than one of them held as it was stored."""
    embedding, head, dtype = model.get_input_embeddings(), model.get_output_embeddings(), model.dtype
    tied, layers = head.weight is embedding.weight, layers_of(model)
    streamed = {module for layer in layers for module in layer.modules()} if stream_layers else set()
    tables = {embedding, head} if int8_head else set()
    host = torch.device("cpu" if device.type != "meta" else "meta")
    for name, module in list(model.named_modules()):
        own = [leaf for leaf in (*module._parameters, *module._buffers)
               if getattr(module, leaf) is not None and leaf not in module._non_persistent_buffers_set]
        if not own or module is head and tied:
            continue
        first, place = host if module in tables and stream_layers else device, host if module in streamed else device
        new = {leaf: tensor(f"{name}.{leaf}").to(first) for leaf in own}
        new = {leaf: t.to(dtype) if t.is_floating_point() else t for leaf, t in new.items()}
        if module in tables:
            table = Table(new["weight"], host=stream_layers)
            if module is embedding:
                model.set_input_embeddings(TableEmbedding(table, module))
            else:
                model.set_output_embeddings(TableHead(table, module, new.get("bias")))
        elif load_in_4bit and type(module) is nn.Linear and module is not head and new["weight"].numel() % 64 == 0:
            model.set_submodule(name, Linear4bit(**new).to(place))
        else:
            for leaf, t in new.items():
                if leaf in module._parameters:
                    module._parameters[leaf] = nn.Parameter(t.to(place), requires_grad=False)
                else:
                    module._buffers[leaf] = t.to(place)
        del new
    if tied and int8_head:
        model.set_output_embeddings(TableHead(table, head))
    elif tied:
        head.weight = embedding.weight
    rebuild_buffers(model, device)
    if stream_layers:
        model.stream = Stream(layers_of(model), device)
    return model


def rebuild_buffers(model, device=None):
    """What no file holds: RoPE's frequencies, Gemma's factor. transformers knows how to fill them."""
    for module in model.modules():
        hollow = [n for n in module._non_persistent_buffers_set if getattr(module, n) is not None
                  and getattr(module, n).is_meta]
        for leaf in hollow:
            module._buffers[leaf] = torch.empty_like(module._buffers[leaf], device=device or model.device)
        if hollow and not module._buffers[hollow[0]].is_meta:
            for p in module.parameters(recurse=False):
                p._is_hf_initialized = True  # or it would be drawn anew
            model._init_weights(module)


def layers_of(model):
    from transformers.modeling_layers import GradientCheckpointingLayer
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


@torch.no_grad()
def plain(model, product):
    """Linear4bit and Table become stock modules of what they stood for, plus product(linear) where that is adapted."""
    kept = {p.dtype for name, p in model.named_parameters() if p.is_floating_point() and ".lora_" not in name}
    dtype = (kept - {torch.float32} or {torch.bfloat16}).pop()  # 16 bits hold more than 4 did
    for name, module in list(model.named_modules()):
        if isinstance(module, Linear4bit):
            weight = module.dequantised(torch.float32)  # (out, in)
            weight += product(module) if hasattr(module, "lora_A") else 0
            with torch.device("meta"):
                stock = nn.Linear(module.in_features, module.out_features, bias=False)
            stock.weight, stock.bias = nn.Parameter(weight.to(dtype), requires_grad=False), module.bias
            model.set_submodule(name, stock)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if hasattr(head, "table"):
        stock, stock_head = embedding.stock[0], head.stock[0]
        stock.weight = nn.Parameter(embedding.table.rows(slice(None), model.device), requires_grad=False)
        stock_head.weight = stock.weight if head.table is embedding.table else nn.Parameter(
            head.table.rows(slice(None), model.device), requires_grad=False)
        stock_head.bias = head.bias
        model.set_input_embeddings(stock)
        model.set_output_embeddings(stock_head)
    rebuild_buffers(model)
    return model.to(dtype)


# ------------------------------------------------------------------------------------------------------------ streaming
class Stream:
    """The layers' weights in host memory, and two slots on the device: layer i is always a view of slot i % 2.

    `enter(i)` before layer i runs: from then on its slot holds it, and the copy of the next layer in the direction of
    travel is under way into the other slot. Until another layer of the same slot is entered the views are good; the
    backward pass therefore has to run each layer again (checkpoint), and every sweep serves all rows of a batch.
    """

    def __init__(self, layers, device):
        self.layers, self.hosts, self.holds, self.last = layers, [], [None, None], -1
        self.copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        layouts = []
        for layer in layers:
            own = [(store, leaf) for module in layer.modules() for store in (module._parameters, module._buffers)
                   for leaf, t in store.items() if t is not None and leaf not in module._non_persistent_buffers_set]
            starts = [0]
            for store, leaf in own:
                starts.append(starts[-1] + -(-store[leaf].nbytes // 64) * 64)  # every tensor begins aligned
            host = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=self.copies is not None)
            for (store, leaf), at in zip(own, starts):
                t = store[leaf]
                host[at:at + t.nbytes].view(t.dtype).view(t.shape).copy_(t)
                store[leaf] = t.data.new_empty(0).expand(0)  # gone: the peak of loading is the base and one layer
                layouts.append((len(self.hosts) % 2, store, leaf, at, t.dtype, t.shape, t.nbytes))
            self.hosts.append(host)
        size = max(map(len, self.hosts))
        self.slots = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
        for slot, store, leaf, at, dtype, shape, size in layouts:
            view = self.slots[slot][at:at + size].view(dtype).view(shape)
            store[leaf] = nn.Parameter(view, requires_grad=False) if leaf in ("weight", "bias") else view
        for i, layer in enumerate(layers):
            layer.register_forward_pre_hook(lambda *_, i=i: self.enter(i))

    def enter(self, i: int):
        self.fetch(i)
        if self.copies:
            torch.cuda.current_stream().wait_stream(self.copies)
        ahead = i - 1 if i < self.last or i == len(self.layers) - 1 == self.last else i + 1
        if i == len(self.layers) - 1 and torch.is_inference_mode_enabled():
            ahead = 0  # decoding: the next sweep begins at the bottom
        self.last = i
        if 0 <= ahead < len(self.layers) and ahead % 2 != i % 2:
            self.fetch(ahead)

    def fetch(self, i: int):
        slot = i % 2
        if self.holds[slot] == i:
            return
        self.holds[slot] = i
        if self.copies:
            self.copies.wait_stream(torch.cuda.current_stream())  # who used the slot before has been queued by now
        with torch.cuda.stream(self.copies):  # None, on a CPU: a plain copy
            self.slots[slot][:len(self.hosts[i])].copy_(self.hosts[i], non_blocking=True)


# -------------------------------------------------------------------------------------------------------- recomputation
def checkpoint_layers(model, offload: bool = False):
    """Every layer keeps its input alone and runs again in the backward pass; offload: the inputs wait in the host."""
    stream = getattr(model, "stream", None)
    for i, layer in enumerate(layers_of(model)):
        def run_again(run, hidden, *rest, before=partial(stream.enter, i) if stream else lambda: None):
            return again(lambda hidden: run(hidden, *rest), hidden, before=before, offload=offload)
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = run_again


def tile_mlps(model, tokens: int):
    """An MLP sees `tokens` tokens at a time; each tile runs again in the backward pass, so one alone is ever held."""
    for layer in layers_of(model):
        mlp = getattr(layer, "mlp", None)
        if mlp and all(isinstance(m, nn.Linear) or not list(m.parameters()) for m in mlp.children()):  # no experts
            mlp.forward = partial(tiled, mlp.forward, tokens)


def tiled(run, tokens, x):
    if x[..., 0].numel() <= tokens:
        return run(x)
    parts = x.flatten(0, -2).split(tokens)  # (tokens, D) each
    return torch.cat([again(run, part) for part in parts]).view(x.shape)


def again(run, *inputs, before=lambda: None, offload=False):
    """run(*inputs), tensors all, of which nothing but the inputs is kept: it runs again in the backward pass.

    before: called then. offload: the inputs wait in the host.
    """
    if not torch.is_grad_enabled():
        return run(*inputs)
    return _Again.apply(run, before, offload, inputs[0].new_empty(0, requires_grad=True), *inputs)


class _Again(torch.autograd.Function):
    """run(*inputs), whose graph is made only in the backward pass (re-entrant; arXiv 1604.06174).

    Not torch's own: that finds saved tensors by hooks, keeps random states by default on all devices, cannot call
    Stream.enter first, and re-entrant it would need an input that asks for a gradient: here an empty tensor does.
    """

    @staticmethod
    def forward(ctx, run, before, offload, _, *inputs):
        ctx.run, ctx.before, ctx.device = run, before, inputs[0].device
        ctx.random = [torch.get_rng_state()] + ([torch.cuda.get_rng_state()] if ctx.device.type == "cuda" else [])
        ctx.save_for_backward(*(to_host(t) if offload else t for t in inputs))
        return run(*inputs)

    @staticmethod
    def backward(ctx, grad):
        ctx.before()
        inputs = [t.to(ctx.device, non_blocking=True).detach().requires_grad_() for t in ctx.saved_tensors]
        with torch.random.fork_rng([ctx.device] if ctx.device.type == "cuda" else []), torch.enable_grad():
            torch.set_rng_state(ctx.random[0])  # the dropout of the first time
            if ctx.device.type == "cuda":
                torch.cuda.set_rng_state(ctx.random[1])
            out = ctx.run(*inputs)
        torch.autograd.backward(out, grad)
        return None, None, None, None, *(t.grad for t in inputs)


def give_back_memory():
    """Freed memory returns to the system. glibc would keep it, and rollout and update each add their own peak."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError, TypeError):
        pass  # not glibc


# ------------------------------------------------------------------------------------------------------------ optimiser
def adamw(model, kind: str, **options):
    """AdamW over what trains. adamw_cpu: on the CPU; adamw8bit: bitsandbytes' 8-bit moments."""
    weights = [p for p in model.parameters() if p.requires_grad]
    if kind == "adamw":
        return torch.optim.AdamW(weights, **options)
    if kind == "adamw_cpu":
        if not model.lora_config:
            raise UserError("--optim adamw_cpu keeps an adapter in host memory; give --lora_r, or --optim adamw")
        return HostAdamW(weights, **options)
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError:
        raise UserError("--optim adamw8bit needs bitsandbytes: pip install bitsandbytes; or --optim adamw") from None
    return AdamW8bit(weights, **options)


class HostAdamW(torch.optim.Optimizer):
    """AdamW on the CPU over one flat float32 vector, of which the parameters and their gradients become views.

    The device then holds no adapter, gradient or moment: lora._lora_hook copies A and B of a layer over when it runs,
    and autograd brings their gradients back.
    """

    def __init__(self, weights, **options):
        super().__init__(weights, options)
        cuda, n = weights[0].device.type == "cuda", sum(p.numel() for p in weights)
        self.flat = nn.Parameter(torch.empty(n, pin_memory=cuda))
        self.flat.grad = torch.zeros(n)
        self.inner = torch.optim.AdamW([self.flat], fused=True, **options)
        moments = {"step": torch.zeros(()), "exp_avg": torch.zeros(n), "exp_avg_sq": torch.zeros(n)}
        self.inner.state[self.flat], self.parts, at = moments, [], 0
        for p in weights:
            part = slice(at, at := at + p.numel())
            own = self.flat.data[part].view(p.shape).copy_(p.data)
            torch.utils.swap_tensors(p, nn.Parameter(own))  # p.data = own, which meta tensors do not allow
            self.state[p] = {key: m[part].view(p.shape) if m.dim() else m.clone() for key, m in moments.items()}
            self.parts.append((p, part))
        self.zero_grad()

    def zero_grad(self, set_to_none: bool = True):
        self.flat.grad.zero_()
        for p, part in self.parts:
            p.grad = self.flat.grad[part].view(p.shape)

    @torch.no_grad()
    def step(self):
        moments = self.inner.state[self.flat]
        for p, part in self.parts:
            own = self.state[p]
            for key in ("exp_avg", "exp_avg_sq"):
                if own[key].data_ptr() != moments[key][part].data_ptr():  # run.load_optimizer put it there
                    moments[key][part] = own[key].flatten()
                    own[key] = moments[key][part].view(p.shape)
                    moments["step"].copy_(own["step"])
        self.inner.param_groups[0].update({k: v for k, v in self.param_groups[0].items() if k != "params"})
        self.inner.step()
        for p, _ in self.parts:
            self.state[p]["step"].copy_(moments["step"])
