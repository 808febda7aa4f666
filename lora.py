"""Low-rank adaptation (LoRA, arXiv 2106.09685): train two small matrices beside each frozen weight.

    y = W x + scale B A x        W (out, in) is frozen, A (r, in) and B (out, r) train in float32

The model stays the stock transformers model. Each adapted Linear gets one object, `linear.lora`,
and computes its output with it. Other files use it through the functions here (extras/fast/beside.py joins
plain ones, extras/models/probe.py removes some): another adapter (DoRA, tests/test_dora.py) is a subclass.

    python lora.py merge ADAPTER_OR_OUTPUT_FOLDER MODEL_FOLDER      writes a plain model folder
"""
import math
import runpy
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial

# Imported before torch: it sets how torch's threads wait.
from core.config import UserError
from extras.exact.process import give_back_memory

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary


@dataclass
class Settings:
    """What `add_lora` gave a model. It stands at `model.lora_settings`.

    Attributes:
        peft: what adapter_config.json says of the adapter, in PEFT's names.
        all_linear: True if the targets were not named.
        fresh: False if the adapter was read from a folder.
    """
    peft: dict
    all_linear: bool = False
    fresh: bool = True


class Adapter(nn.Module):
    """The LoRA of one Linear: its parameters, and how they take part at the moment.

    Attributes:
        A: (r, in), drawn uniformly as PEFT does (kaiming_uniform with a = sqrt(5)).
        B: (out, r), zero at the start.
        mode: "beside" adds the update to W x. "cached" does too, and while decoding it casts A and
            B only once. "merged" has the update in the Linear's weight. "off" leaves W x alone.
        frozen: W while the Linear holds the merged weight, else None.
        cast: A and B as "cached" keeps them, once they were cast, else None.
        mergeable: False where the weight cannot hold an update (4-bit, streamed or shared weights).
        peft_entries: what adapter_config.json says of this kind besides the settings.
    """
    peft_entries = {}

    def __init__(self, linear, r: int, scale: float, dropout: float, generator, device):
        super().__init__()
        bound = 1 / math.sqrt(linear.in_features)
        A = (torch.rand(r, linear.in_features, generator=generator) * 2 - 1) * bound
        self.A = nn.Parameter(A.to(device))
        self.B = nn.Parameter(torch.zeros(linear.out_features, r, device=device))
        self.scale = scale
        self.dropout = dropout
        self.mode = "beside"
        self.frozen = self.cast = None

    def tensors(self) -> dict:
        """Return the parameters under the names that PEFT saves them by."""
        return {"lora_A.weight": self.A, "lora_B.weight": self.B}

    @torch.no_grad()
    def effective_weight(self, weight):
        """Return W + scale B A in float32, (out, in), for the frozen weight W."""
        A, B = self.A.to(weight.device), self.B.to(weight.device)
        return (B @ A).float().mul_(self.scale).add_(weight)

    def forward(self, linear, x, output):
        """Return y for x (..., in) and W x. The Linear itself is for subclasses such as DoRA."""
        x = F.dropout(x, self.dropout, training=self.training)
        return add_update(x, output, *self.factors(x), self.scale, column_noise(output))

    def give_gradients(self, linear, x, output):
        """Return `output`, which a merged weight computed from x, with gradients for A and B."""
        return _MergedLoRA.apply(output, x, *self.factors(x), self.scale, recomputable.get(x))

    def factors(self, x):
        """Return A and B in the dtype and on the device of x."""
        if self.mode != "cached" or not torch.is_inference_mode_enabled():
            return Cast.apply(self.A, x), Cast.apply(self.B, x)
        self.cast = self.cast or (Cast.apply(self.A, x), Cast.apply(self.B, x))
        return self.cast

    def frozen_weight(self, linear):
        """Return W, whether the Linear holds it or the merged weight."""
        return linear.weight.data if self.frozen is None else self.frozen

    def merge(self, linear):
        """Put the effective weight in place of the frozen one, which `unmerge` brings back."""
        self.frozen = weight = self.frozen_weight(linear)
        self.mode = "merged"
        linear.weight.data = dithered(self.effective_weight(weight), weight.dtype).to(weight.dtype)

    def unmerge(self, linear):
        """Go back to "beside"."""
        if self.mode == "merged":
            linear.weight.data = self.frozen
        self.mode = "beside"
        self.frozen = self.cast = None


def adapted_forward(linear, x):
    """Return the output (..., out) of an adapted Linear for x (..., in)."""
    adapter = linear.lora
    whole_weight(linear)  # a decoder may have freed it
    output = type(linear).forward(linear, x)
    if adapter.mode in ("beside", "cached"):
        return adapter(linear, x, output)
    if adapter.mode == "merged" and torch.is_grad_enabled():
        return adapter.give_gradients(linear, x, output)
    return output


# Activations that backward can compute again: tensor -> function without arguments.
recomputable = WeakTensorKeyDictionary()


class _MergedLoRA(torch.autograd.Function):
    """The identity on output = (W + scale B A) x, with the gradients that A and B have in it.

    The gradient of x passes through the merged weight. A `recomputable` x is not kept.
    """

    @staticmethod
    def forward(ctx, output, x, A, B, scale, recompute):
        ctx.scale, ctx.recompute = scale, recompute
        # Unmarked, it would come back as a view, which no layer may change in place.
        ctx.mark_dirty(output)
        ctx.save_for_backward(None if recompute else x, A, B)
        return output

    @staticmethod
    def backward(ctx, grad):
        x, A, B = ctx.saved_tensors
        if ctx.recompute:
            # What the function holds is freed with this node.
            x, ctx.recompute = ctx.recompute(), None
        x, g = x.flatten(0, -2), grad.flatten(0, -2)  # (N, in), (N, out)
        grad_A = (g @ B * ctx.scale).T @ x
        grad_B = ((x @ A.T * ctx.scale).T @ g).T
        return grad, None, grad_A, grad_B, None, None


GRADIENT_SCALE = 2.0**12  # core.logprobs multiplies by it: float16 gradients stay above 6e-8


class Cast(torch.autograd.Function):
    """Use a float32 weight in the dtype and on the device of another tensor.

    Its gradient comes back in float32, and a float16 one is divided by GRADIENT_SCALE.
    """

    @staticmethod
    def forward(ctx, weight, like):
        ctx.device = weight.device
        return weight.to(like.device, like.dtype, non_blocking=True)

    @staticmethod
    def backward(ctx, grad):
        exact = grad.to(ctx.device, torch.float32)
        if grad.dtype == torch.float16:
            exact /= GRADIENT_SCALE
        return exact, None


# -------------------------------------------------------------------------------- adding and asking
def add_lora(model, r: int, alpha: float, dropout: float = 0.0, targets="all-linear",
             use_rslora: bool = False, seed: int = 0, mergeable: bool = True, device=None):
    """Give every targeted Linear an adapter of rank r, and freeze everything else.

    Args:
        alpha: the scale is alpha / r, with use_rslora (arXiv 2312.03732) alpha / sqrt(r).
        dropout: on the adapter's input, only while training.
        targets: "all-linear" (every Linear of the text layers: no vision tower, no router, no
            output head), or names or last parts of names, in a list or with commas between them.
        seed: of the draws for A.
        mergeable: see `Adapter`.
        device: where A and B live, if not beside their weights.
    """
    names = target_names(targets)
    linears, targets = _targeted(model, names)
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    scale = alpha / (math.sqrt(r) if use_rslora else r)
    weights = [id(linear.weight) for linear in linears_of(model).values()]
    for linear in linears.values():
        linear.lora = KIND(linear, r, scale, dropout, generator, device or linear.weight.device)
        # A weight that layers share, as Zamba's do, cannot hold the update of one.
        linear.lora.mergeable = mergeable and weights.count(id(linear.weight)) == 1
        linear.forward = partial(adapted_forward, linear)
    model.lora_settings = Settings({
        "r": r, "lora_alpha": alpha, "lora_dropout": dropout, "target_modules": targets,
        "use_rslora": use_rslora, **KIND.peft_entries}, names == ["all-linear"])


KIND = Adapter  # the class of a model's adapters, and of those that are read from files
ROUTERS = {"gate", "router", "shared_expert_gate"}  # of mixtures of experts, by their last name


def _targeted(model, targets):
    """Return {name: Linear} of the targets, and the targets as PEFT writes them."""
    linears = linears_of(model)
    if targets == ["all-linear"]:
        text = set(model.get_decoder().modules())
        linears = {name: linear for name, linear in linears.items() if linear in text}
        targets = sorted({name.split(".")[-1] for name in linears} - ROUTERS) or targets
    chosen, found = set(), set()
    for target in targets:
        # PEFT finds modules of any kind by such a name, those of a vision tower too.
        names = {name for name, _ in model.named_modules() if f".{name}".endswith(f".{target}")}
        found |= names
        names &= linears.keys()
        if not names:
            ends = ", ".join(sorted({name.split(".")[-1] for name in linears}))
            raise UserError(f"--lora_target_modules: no Linear called {target}; the model has: "
                            f"{ends or 'none; --lora_r 0 trains all weights'}")
        chosen |= names
    # Where it would find others as well, it is given the whole names.
    if found != chosen:
        targets = sorted(chosen)
    # In the model's order, in which their A are drawn.
    return {name: linears[name] for name in linears if name in chosen}, targets


def target_names(targets) -> list:
    """Return target modules as a list, which may be given with commas between them."""
    if isinstance(targets, str):
        targets = targets.split(",")
    return [target.strip() for target in targets]


def linears_of(model) -> dict:
    """Return {name: Linear} of all Linears but the output head."""
    head = model.get_output_embeddings()
    return {name: module for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and module is not head}


def settings(model) -> Settings | None:
    """Return the settings of the model's adapter, None if it has no adapter."""
    return getattr(model, "lora_settings", None)


def is_adapted(module) -> bool:
    """True if this module is a Linear with an adapter."""
    return isinstance(getattr(module, "lora", None), Adapter)


def adapters(model) -> dict:
    """Return {module name: Linear} of the adapted Linears."""
    return {name: module for name, module in model.named_modules() if is_adapted(module)}


def adapter_tensors(model) -> dict:
    """Return {name in PEFT's files: parameter} of what an adapter's file holds."""
    return {f"base_model.model.{name}.{leaf}": tensor for name, linear in adapters(model).items()
            for leaf, tensor in linear.lora.tensors().items()}


def whole_policy(module) -> bool:
    """True if the weight alone gives the output: no adapter, a merged one, or one switched off."""
    return not is_adapted(module) or module.lora.mode in ("merged", "off")


# ---------------------------------------------------------------------------------- 16-bit rounding
LOST_BITS = {torch.bfloat16: 16, torch.float16: 13}  # of float32's 23 mantissa bits


def dithered(total, dtype, noise=None):
    """Round float32 sums to what 16 bits hold, by stochastic rounding with fixed random bits.

    An update below half the distance to the next 16-bit number would vanish if the sum were rounded
    to the nearest: at a learning rate of 2e-5 that is nearly all of a LoRA's first steps. Here
    random bits are added below the last bit that 16-bit numbers have, and the rest is cut off, so
    that the mean over the weights is right (but for float16 numbers below 6e-5). A zero update
    changes nothing, NaN stays NaN, and a number above the largest of the dtype may become infinite.
    The random bits are constants: rollout, update, evaluation and `merge` have the same weights.

    Args:
        total: float32, (out, in) or (..., out), contiguous. It is overwritten.
        dtype: what holds the result later. Only bfloat16 and float16 need random bits.
        noise: the bits (out,) of `column_noise`, the same for all rows whatever their place in a
            batch. With None each number of a weight has its own.
    """
    if dtype not in LOST_BITS:
        return total
    # Of the many NaNs take the one whose bits survive the sum. CUDA's, 0x7fffffff, would become 0.
    total.nan_to_num_(torch.nan, torch.inf, -torch.inf)
    bits = total.view(torch.int32)
    if noise is not None:
        bits.add_(noise)
    else:
        noise = _noise(total.device, LOST_BITS[dtype])
        # One addition for all but the tail: a GPU waits for launches.
        flat, whole = bits.view(-1), bits.numel() // len(noise) * len(noise)
        flat[:whole].view(-1, len(noise)).add_(noise)
        flat[whole:].add_(noise[:len(flat) - whole])
    bits.bitwise_and_(-1 << LOST_BITS[dtype])
    return total


@cache
def _noise(device, n: int):
    """Return a constant sequence of random whole numbers below 2**n."""
    generator = torch.Generator().manual_seed(0)
    # An odd length, or rows of a weight whose width is a power of two would all get the same bits.
    return torch.randint(2**n, (2**18 - 5,), generator=generator, dtype=torch.int32).to(device)


def add_update(x, output, A, B, scale, noise):
    """Return output (..., out) + scale B A x, with x (..., in) and the `column_noise` (out,)."""
    update = F.linear(F.linear(x, A), B)
    if output.dtype not in LOST_BITS:
        return output + update * scale
    # Rounded to the nearest, a 16-bit sum would lose small updates.
    return _DitheredSum.apply(output, update, scale, noise)


def column_noise(output):
    """Return the random bits (out,) of the columns of a Linear's output (..., out)."""
    return _noise(output.device, LOST_BITS.get(output.dtype, 0))[:output.shape[-1]]


class _DitheredSum(torch.autograd.Function):
    """Add scale x update (..., out) to a 16-bit output by `dithered`, with the sum's gradients."""

    @staticmethod
    def forward(ctx, output, update, scale, noise):
        # The sum is written over the update, some tokens in float32 at a time: what a CPU's cache
        # holds, and on a GPU, where each piece is six kernels, 32 MiB.
        ctx.mark_dirty(update)
        ctx.scale = scale
        tokens = max(1, 2**(18 if output.device.type == "cpu" else 23) // output.shape[-1])
        for y, u in zip(output.flatten(0, -2).split(tokens), update.flatten(0, -2).split(tokens)):
            u.copy_(dithered(y.float().add_(u, alpha=scale), y.dtype, noise))
        return update

    @staticmethod
    def backward(ctx, grad):
        return grad, grad * ctx.scale, None, None


# ------------------------------------------------------------------------------------------ merging
@contextmanager
def merged(model, update: bool = False):
    """Inside the block the adapted weights are W + scale B A. On exit W is restored exactly.

    A and B still get their gradients, so rollout and update can use the very same weights. Weights
    in 16 bits are rounded by `dithered`, so that small updates are not lost. Leave the block before
    the optimizer steps. An adapter beside 4-bit, streamed or shared weights is not merged, but cast
    once while decoding. With update=True (in an update) one with dropout is not merged either,
    because a merged adapter has no dropout.
    """
    linears = [linear for linear in adapters(model).values() if not whole_policy(linear)
               and not (update and linear.lora.dropout)]
    try:
        for linear in linears:
            if linear.lora.mergeable:
                linear.lora.merge(linear)
            else:
                linear.lora.mode = "cached"
        yield
    finally:
        for linear in linears:
            linear.lora.unmerge(linear)
        if not update:
            # What a rollout freed. An update leaves it for the next pass, which is as large.
            give_back_memory()


def merge_adapter(model):
    """Add the adapter into the weights for good. The model is then a plain one."""
    for linear in adapters(model).values():
        if not linear.lora.mergeable:
            raise UserError("weights that layers share hold no adapter; --lora_r keeps it beside")
        linear.lora.merge(linear)
        del linear.lora, linear.forward
    model.lora_settings = None


def free_merged(linears):
    """Free the merged weights of these Linears: a decoder has them in its own layout."""
    for linear in linears:
        if is_adapted(linear) and linear.lora.mode == "merged":
            linear.weight.data = linear.weight.data.new_empty(0)


def whole_weight(linear):
    """Return the weight of a Linear, merged again if `free_merged` has freed it."""
    if not linear.weight.numel():
        linear.lora.merge(linear)
    return linear.weight


# ----------------------------------------------------------------------------- the reference policy
def freeze_reference(model) -> dict | None:
    """Return a copy of what trains, as it is now, or None if it is an adapter whose B is 0."""
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    counts = any(".lora." not in name or name[-1] == "B" and p.any()
                 for name, p in frozen.items())
    return frozen if counts else None


@contextmanager
def reference(model, frozen: dict | None):
    """Inside the block the model is the policy that `freeze_reference` froze.

    `frozen` may be any {name of a parameter: tensor}, such as a moving average that a fork keeps.
    None switches the adapter off. The policy is merged where the update merges, so that the KL
    divergence is 0 before the first update.
    """
    _exchange(model, frozen)
    try:
        with merged(model, update=True):
            yield
    finally:
        _exchange(model, frozen)


def _exchange(model, frozen):
    """Swap what trains with its frozen copy, or switch the adapter off or on if there is none."""
    for linear in adapters(model).values():
        if linear.lora.mode in ("merged", "cached"):
            raise RuntimeError("leave the block of lora.merged before entering lora.reference")
        if frozen is None:
            linear.lora.mode = "off" if linear.lora.mode == "beside" else "beside"
    for name in frozen or ():
        p = model.get_parameter(name)
        p.data, frozen[name] = frozen[name], p.data


if __name__ == "__main__":
    # The command is a program of its own: it loads models, which imports this file.
    runpy.run_module("core.merge", run_name="__main__")
