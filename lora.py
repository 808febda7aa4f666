"""Low-rank adaptation (LoRA, arXiv 2106.09685): train two small matrices beside each frozen weight.

    y = W x + scale B A x        W (out, in) is frozen, A (r, in) and B (out, r) train in float32

The model stays the stock transformers model. Each adapted Linear gets one object, `linear.lora`,
and computes its output with it. Another adapter (DoRA, tests/core/test_dora.py) is a subclass of
`Adapter`, given to `load_model` as `kind`.

    python lora.py merge ADAPTER_OR_OUTPUT_FOLDER MODEL_FOLDER    writes a plain model: merge.py
    python lora.py info FOLDER, push FOLDER owner/name            extras/show/hub.py
"""
import math
import os
import runpy
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from core.config import UserError, reading  # before torch: sets how its threads wait

import torch
from torch import nn
from torch.nn import functional as F

from core.logprobs import dithered
from core.model import (ADAPTER, DTYPES, Facts, Settings, base_of, choose_device, facts,
                        is_adapter, load_weights, newest, read_model, read_settings,
                        read_tokenizer, settings, switch_dropout_off)
from core.packing import allow_packing


class Adapter(nn.Module):
    """The LoRA of one Linear: its parameters, and how they take part at the moment.

    Attributes:
        A: (r, in), drawn uniformly as PEFT does (kaiming_uniform with a = sqrt(5)).
        B: (out, r), zero at the start.
        mode: "beside" adds the update to W x, "merged" has it in the weight, "off" leaves it out.
        frozen: W while the Linear holds the merged weight, else None.
        mergeable: False where the weight cannot hold an update, as one that layers share.
        device: where A and B live, None for beside the weight.
        peft_entries: what adapter_config.json says of this kind besides the settings.
    """
    mergeable = True
    device = None
    peft_entries = {}

    def __init__(self, linear, r: int, scale: float, dropout: float, generator):
        super().__init__()
        device = self.device or linear.weight.device
        bound = 1 / math.sqrt(linear.in_features)
        A = (torch.rand(r, linear.in_features, generator=generator) * 2 - 1) * bound
        self.A = nn.Parameter(A.to(device))
        self.B = nn.Parameter(torch.zeros(linear.out_features, r, device=device))
        self.scale = scale
        self.dropout = dropout
        self.mode = "beside"
        self.frozen = None

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
        return self.add(x, output, *self.factors(x))

    def add(self, x, output, A, B):
        """Return output + scale B A x, (..., out). In 16 bits it loses small updates."""
        return output + F.linear(F.linear(x, A), B) * self.scale

    def give_gradients(self, linear, x, output):
        """Return `output`, which a merged weight computed from x, with gradients for A and B."""
        return _MergedLoRA.apply(output, x, *self.factors(x), self.scale)

    def factors(self, x):
        """Return A and B in the dtype and on the device of x."""
        return [p.to(x.device, x.dtype, non_blocking=True) for p in (self.A, self.B)]

    def frozen_weight(self, linear):
        """Return W, whether the Linear holds it or the merged weight."""
        return linear.weight.data if self.frozen is None else self.frozen

    def merge(self, linear):
        """Put the effective weight in place of the frozen one, if the Linear can hold it."""
        if self.mergeable:
            self.mode = "merged"
            self.frozen = W = self.frozen_weight(linear)
            linear.weight.data = dithered(self.effective_weight(W), W.dtype).to(W.dtype)

    def unmerge(self, linear):
        """Go back to "beside"."""
        if self.mode == "merged":
            linear.weight.data = self.frozen
        self.mode = "beside"
        self.frozen = None


def adapted_forward(linear, x):
    """Return the output (..., out) of an adapted Linear for x (..., in)."""
    adapter = linear.lora
    output = type(linear).forward(linear, x)
    if adapter.mode not in ("merged", "off"):
        return adapter(linear, x, output)
    if adapter.mode == "merged" and torch.is_grad_enabled():
        return adapter.give_gradients(linear, x, output)
    return output


# Forwards in place of a module's own that compute the same numbers. Layers add theirs.
SAME_NUMBERS = {adapted_forward}


class _MergedLoRA(torch.autograd.Function):
    """The identity on output = (W + scale B A) x, (..., out), with gradients for A and B."""

    @staticmethod
    def forward(ctx, output, x, A, B, scale):
        ctx.scale = scale
        # Unmarked, it would come back as a view, which no layer may change in place.
        ctx.mark_dirty(output)
        ctx.save_for_backward(x, A, B)
        return output

    @staticmethod
    def backward(ctx, grad):
        x, A, B = ctx.saved_tensors
        x, g = x.flatten(0, -2), grad.flatten(0, -2)  # (N, in), (N, out)
        grad_A = (g @ B * ctx.scale).T @ x
        grad_B = ((x @ A.T * ctx.scale).T @ g).T
        return grad, None, grad_A, grad_B, None


# -------------------------------------------------------------------------------- adding and asking
def add_lora(model, r: int, alpha: float, dropout: float = 0.0, targets="all-linear",
             use_rslora: bool = False, seed: int = 0, kind: type = Adapter):
    """Give every targeted Linear an adapter of rank r, and freeze everything else.

    Args:
        alpha: the scale is alpha / r, with use_rslora (arXiv 2312.03732) alpha / sqrt(r).
        dropout: on the adapter's input, only while training.
        targets: "all-linear" (those of the text layers, but for routers and the output head), or
            names or last parts of names, in a list or with commas between them.
        seed: of the draws for A.
        kind: the class of the adapters.
    """
    names = target_names(targets)
    linears, targets = _targeted(model, names)
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    scale = alpha / (math.sqrt(r) if use_rslora else r)
    weights = [id(linear.weight) for linear in linears_of(model).values()]
    for linear in linears.values():
        linear.lora = kind(linear, r, scale, dropout, generator)
        # A weight that layers share, as Zamba's do, cannot hold the update of one.
        linear.lora.mergeable = kind.mergeable and weights.count(id(linear.weight)) == 1
        linear.forward = partial(adapted_forward, linear)
    peft = {"r": r, "lora_alpha": alpha, "lora_dropout": dropout, "target_modules": targets,
            "use_rslora": use_rslora, **kind.peft_entries}
    model.lora_settings = Settings(peft, adapter_tensors(model), names == ["all-linear"])


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
    names = targets.split(",") if isinstance(targets, str) else targets
    return list(map(str.strip, names))


def linears_of(model) -> dict:
    """Return {name: Linear} of all Linears but the output head."""
    head = model.get_output_embeddings()
    return {name: module for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and module is not head}


def is_adapted(module) -> bool:
    """True if this module is a Linear with an adapter."""
    return isinstance(getattr(module, "lora", None), Adapter)


def adapted_linears(model) -> dict:
    """Return {module name: Linear} of the adapted Linears."""
    return {name: module for name, module in model.named_modules() if is_adapted(module)}


def adapter_tensors(model) -> dict:
    """Return {name in PEFT's files: parameter} of what an adapter's file holds."""
    tensors = {}
    for name, linear in adapted_linears(model).items():
        for leaf, tensor in linear.lora.tensors().items():
            tensors[f"base_model.model.{name}.{leaf}"] = tensor
    return tensors


def weight_is_enough(module) -> bool:
    """True if the weight alone gives the output: no adapter, a merged one, or one switched off."""
    return not is_adapted(module) or module.lora.mode in ("merged", "off")


# ------------------------------------------------------------------------------------------ merging
@contextmanager
def merged(model, to_train: bool = False):
    """Inside the block the adapted weights are W + scale B A; on exit W is restored exactly.

    A and B still get their gradients, so rollout and update can use the very same weights. Weights
    in 16 bits are rounded by `dithered`, so that small updates are not lost. Leave the block before
    the optimizer steps. An adapter that is not mergeable stays beside its weight. With to_train so
    does one with dropout, because a merged one has none.
    """
    linears = [linear for linear in adapted_linears(model).values() if not weight_is_enough(linear)]
    if to_train:
        linears = [linear for linear in linears if not linear.lora.dropout]
    try:
        for linear in linears:
            linear.lora.merge(linear)
        yield
    finally:
        for linear in linears:
            linear.lora.unmerge(linear)


def merged_to_train(model):
    """Return `merged` for an update, and for log-probabilities that are compared with it."""
    return merged(model, to_train=True)


def merge_adapter(model):
    """Add the adapter into the weights for good. The model is then a plain one."""
    for linear in adapted_linears(model).values():
        if not linear.lora.mergeable:
            raise UserError("weights that layers share hold no adapter; --lora_r keeps it beside")
        linear.lora.merge(linear)
        del linear.lora, linear.forward
    model.lora_settings = None


# ----------------------------------------------------------------------------- the reference policy
def freeze_reference(model) -> dict | None:
    """Return a copy of what trains, as it is now, or None if it is an adapter whose B is 0."""
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    counts = any(".lora." not in name or name[-1] == "B" and p.any() for name, p in frozen.items())
    return frozen if counts else None


@contextmanager
def reference(model, frozen: dict | None):
    """Inside the block the model is the policy that `freeze_reference` froze.

    `frozen` may be any {name of a parameter: tensor}, such as a moving average that a fork keeps;
    None switches the adapter off. It is merged as in the update: the KL divergence begins at 0.
    """
    swap_reference(model, frozen)
    try:
        with merged_to_train(model):
            yield
    finally:
        swap_reference(model, frozen)


def swap_reference(model, frozen):
    """Exchange what trains with its copy, or switch the adapter off; a second call undoes it."""
    for linear in adapted_linears(model).values():
        if linear.lora.mode not in ("beside", "off"):
            raise RuntimeError("leave the block of lora.merged before entering lora.reference")
        if frozen is None:
            linear.lora.mode = "off" if linear.lora.mode == "beside" else "beside"
    for name in frozen or ():
        p = model.get_parameter(name)
        p.data, frozen[name] = frozen[name], p.data


# ------------------------------------------------------------------------------------------ loading
def load_model(path: str, *, lora_r: int = 0, lora_alpha: float | None = None,
               lora_dropout: float = 0.0, lora_target_modules: str = "all-linear",
               dtype: str = "float32", device: str | None = None, seed: int = 0, train: bool = True,
               merge: bool | None = None, read=None, kind: type = Adapter):
    """Return (model, tokenizer) ready to train, or with train=False to be played only.

    Args:
        path: tiny, a hub id, a model folder, an adapter folder, or an output folder of ours.
        lora_r: rank of a fresh adapter. An adapter at `path` keeps its rank, alpha and targets and
            is trained further. 0 trains all weights, into which it is merged first.
        lora_alpha, lora_dropout, lora_target_modules: see `add_lora`. None means twice the rank.
        dtype: of the frozen weights and of the arithmetic. What trains is float32.
        device: None takes a GPU of CUDA, else a Mac's (MPS), else the CPU.
        seed: of the adapter and of the tiny model.
        merge: True merges an adapter for good, False keeps it beside. None merges it unless it is
            trained further.
        read: read(source, dtype, device, seed) -> (model, tokenizer), in place of `read_model`.
        kind: the class of the adapters.
    """
    path = newest(path)
    device = choose_device(device)
    if train and not lora_r and dtype.endswith("16"):
        raise UserError("--dtype is for weights that stay as they are; "
                        "give --lora_r, e.g. 16, or --dtype float32")
    continues = is_adapter(path)
    source = path
    adapter = {"r": lora_r, "lora_alpha": lora_alpha or 2 * lora_r,
               "target_modules": lora_target_modules}
    if continues:
        source = base_of(path)
        adapter = read_settings(path, kind.peft_entries)
        if adapter["quantized_base"] and not read:
            form = adapter["quantized_base"]
            raise UserError(f"{path}: an adapter of weights in {form} needs extras/memory")
    # Weights that train are read and stay in float32.
    kept = DTYPES[dtype] if lora_r or not train else torch.float32
    if read:
        model, tokenizer = read(source, kept, device, seed)
    else:
        with reading(source):
            model, tokenizer = read_model(source, kept, device, seed)
    if continues and os.path.exists(Path(path, "tokenizer_config.json")):
        tokenizer = read_tokenizer(path)
    if not tokenizer.chat_template:
        raise UserError(f"{path}: its tokenizer has no chat template; "
                        "use an instruct model, or put chat_template.jinja beside it")
    loses_updates = model.dtype == torch.float16 or lora_dropout and model.dtype == torch.bfloat16
    if train and loses_updates and not read:
        raise UserError("--dtype float16, and --lora_dropout in 16 bits, need extras/memory")
    model.to(device).requires_grad_(False)
    model.facts = Facts(source, seed, kind)
    switch_dropout_off(model)
    allow_packing(model)
    if adapter["r"]:
        adapt(model, adapter, lora_dropout, seed, path if continues else None)
    if merge or merge is None and continues and not lora_r:
        merge_adapter(model)
    if not lora_r:
        model.requires_grad_(train)
    return model.eval(), tokenizer  # model.train() switches the adapter's dropout on


def adapt(model, adapter: dict, dropout=0.0, seed=0, folder: str | None = None):
    """Add an adapter with these settings. With a folder, its training continues from there."""
    targets = adapter["target_modules"]
    if folder and not any(".language_model." in name for name, _ in model.named_modules()):
        # PEFT names them so where it had loaded the model with its vision tower.
        targets = [name.replace(".language_model.", ".", 1) for name in targets]
    try:
        add_lora(model, adapter["r"], adapter["lora_alpha"], dropout, targets,
                 adapter.get("use_rslora", False), seed, facts(model).kind or Adapter)
    except UserError as error:
        place = f"{folder}: {ADAPTER}: " if folder else ""
        raise UserError(f"{place}{error}") from None
    if folder:
        load_weights(model, folder)
        settings(model).fresh = False


if __name__ == "__main__":
    # The command loads models as a run does: with the layers, which import this file by its name.
    runpy.run_path(str(Path(__file__).with_name("merge.py")), run_name="__main__")
