"""The policy's weights: loading, LoRA, the reference policy, log-probabilities, saving, merging.

`load_model(path)` takes `tiny`, a hub id, a model folder, an adapter folder or an output folder of this project (its
newest checkpoint). LoRA (arXiv 2106.09685) lives as two small Linears, `lora_A` and `lora_B`, inside the Linear they
adapt, and a forward hook adds their product; so the model stays the stock transformers model, and the files are PEFT's
own format.

    python lora.py merge ADAPTER_OR_OUTPUT_FOLDER MODEL_FOLDER      writes a plain model folder
"""
import ctypes
import inspect
import json
import math
import os
import re
import sys
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

import memory
from budget import dry_run  # noqa: F401  (the algorithms reach what makes things small through this file)
from memory import OPTIMS, adamw  # noqa: F401
from run import UserError
from tiny import make_tiny

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16,
          "auto": "auto"}  # as stored

# ------------------------------------------------------------------------------------------------------------- loading
def model_options(config) -> dict:
    """The arguments of `load_model` that a Config has under the same names."""
    return {name: value for name, value in vars(config).items() if name in inspect.signature(load_model).parameters}


def load_model(path: str, *, lora_r: int = 0, lora_alpha: float | None = None, lora_dropout: float = 0.0,
               lora_target_modules: str = "all-linear", use_rslora: bool = False, dtype: str = "float32",
               device: str | None = None, seed: int = 0, train: bool = True, load_in_4bit: bool = False,
               int8_head: bool = False, stream_layers: bool = False, gradient_checkpointing: bool = False,
               offload_activations: bool = False, mlp_tokens: int = 0):
    """The model and tokenizer at `path` -> (model, tokenizer), ready to train, or with train=False only to be played.

    lora_r > 0 adds a fresh adapter, unless `path` is an adapter: then training goes on from it. lora_r = 0 trains all
    weights (an adapter is merged first). `dtype` is that of the frozen weights and of the arithmetic; what trains is
    float32. The last six: memory.py. An adapter that was trained on a 4-bit base gets that base again. device "meta":
    shapes without numbers, for counting. UserError: one line with the mend.
    """
    path = newest(path)
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    adapter = os.path.exists(os.path.join(path, "adapter_config.json"))
    source = base_of(path) if adapter else path
    frozen = [name for name, on in (("load_in_4bit", load_in_4bit), ("int8_head", int8_head),
                                    ("stream_layers", stream_layers)) if on]
    if frozen and train and not lora_r:
        raise UserError(f"--{frozen[0]} is for weights that stay as they are; give --lora_r, e.g. 16")
    if (stream_layers and train or offload_activations) and not gradient_checkpointing:
        raise UserError(f"--{'stream_layers' if stream_layers else 'offload_activations'} needs "
                        "--gradient_checkpointing: the backward pass has to run each layer again")
    made_with = _trained_on(path) if adapter else ""
    lean = {"load_in_4bit": load_in_4bit or "nf4" in made_with, "int8_head": int8_head or "int8" in made_with,
            "stream_layers": stream_layers}
    lean = lean if any(lean.values()) else None
    kept = DTYPES[dtype] if lora_r or not train else torch.float32  # weights that train are read and stay in float32
    kept = _real_dtype(kept, device)
    model, tokenizer = make_tiny(seed) if source == "tiny" else _read_model(source, kept, device, lean)
    if adapter and os.path.exists(os.path.join(path, "tokenizer_config.json")):
        tokenizer = _read_tokenizer(path)
    if not tokenizer.chat_template:
        raise UserError(f"{path}: its tokenizer has no chat template; "
                        "use an instruct model, or put chat_template.jinja beside it")
    if source == "tiny" and (lean or device.type == "meta"):
        model = memory.read(memory.skeleton(model.config, model.dtype if kept == "auto" else kept),
                            model.to(device).state_dict().__getitem__, device, **lean or {})
    model.base_path, model.base_seed, model.lora_config, model.made_with = source, seed, None, made_with
    if lean:
        model.made_with = ",".join(["nf4"] * lean["load_in_4bit"] + ["int8"] * lean["int8_head"])
    model.to(device)
    if source == "tiny" and not lean:
        for p in model.parameters():  # not model.to(kept): it would round the RoPE frequencies, a buffer, to bf16
            p.data = p.data.to(p.dtype if kept == "auto" else kept)
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise UserError(f"{path}: tokenizer has {len(tokenizer)} tokens, model {rows}")
    if model.config.get_text_config()._attn_implementation == "sdpa":
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask
        AttentionInterface.register("causal_attention", causal_attention)
        AttentionMaskInterface.register("causal_attention", sdpa_mask)  # None where causality is all, windows included
        model.set_attn_implementation("causal_attention")
    model.requires_grad_(False)
    model.eval().shares_prefix = False
    if device.type != "meta":
        _check_logits(model, source)
        model.shares_prefix = _shares_prefix(model)
    if adapter:
        load_adapter(model, path, lora_dropout)
        if lora_r not in (0, model.lora_config["r"]):
            print(f"note: {path} is an adapter: its rank {model.lora_config['r']} stays, "
                  f"lora_r {lora_r} is for fresh ones", file=sys.stderr)
    if adapter and not lora_r and (train or not made_with):  # to be played, a 4-bit base stays one
        merge_adapter(model)
    elif lora_r and not adapter:
        add_lora(model, lora_r, lora_alpha if lora_alpha is not None else 2 * lora_r, lora_dropout,
                 lora_target_modules, use_rslora, seed)
    if not lora_r:
        model.requires_grad_(train)
    if mlp_tokens:
        memory.tile_mlps(model, mlp_tokens)
    if gradient_checkpointing:
        memory.checkpoint_layers(model, offload_activations)
    return model.eval(), tokenizer  # eval: dropout, where asked for, is switched on by the update alone


def _real_dtype(dtype, device):
    """float16 in place of bfloat16 on a GPU that only emulates it (before Ampere)."""
    emulated = dtype == torch.bfloat16 and device.type == "cuda" and not torch.cuda.is_bf16_supported(
        including_emulation=False)
    return torch.float16 if emulated else dtype


def newest(path: str) -> str:
    """An output folder becomes its newest checkpoint; every other path stays as it is."""
    folder = os.path.join(path, "checkpoints")
    steps = sorted(d for d in os.listdir(folder) if re.fullmatch(r"step_\d+", d)) if os.path.isdir(folder) else []
    if os.path.isdir(path) and not steps and not any(f.endswith("config.json") for f in os.listdir(path)):
        raise UserError(f"{path}: no config.json, no adapter_config.json and no checkpoints in this folder")
    return os.path.join(folder, steps[-1]) if steps else path


def base_of(adapter: str) -> str:
    """The base model an adapter folder points to; if that place has moved, `base/` in it or in its output folder."""
    base = _adapter_config(adapter).get("base_model_name_or_path")
    if not base:
        raise UserError(f"{adapter}/adapter_config.json: no base_model_name_or_path; "
                        "write the base model's folder or hub id there")
    beside = [b for b in (os.path.join(adapter, "base"), os.path.join(adapter, "..", "..", "base")) if os.path.isdir(b)]
    return os.path.normpath(beside[0]) if beside and not os.path.exists(base) else base


def _adapter_config(adapter: str) -> dict:
    try:
        with open(os.path.join(adapter, "adapter_config.json"), encoding="utf-8") as f:
            return dict(json.load(f))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{adapter}/adapter_config.json: cannot be read: {_first_line(error)}") from None


def _read_tokenizer(source: str, **where):
    from transformers import AutoTokenizer
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False, **where)
    except Exception as error:
        raise UserError(f"{source}: no tokenizer could be read ({_first_line(error)})") from None


def _read_model(source: str, dtype, device, lean: dict | None):
    from huggingface_hub import model_info, snapshot_download
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
    if not os.path.isdir(source) and (source.startswith((".", "/", "~")) or source.count("/") != 1):
        raise UserError(f"{source}: no such folder; "
                        "give tiny, a model or output folder, or a hub id like Qwen/Qwen2.5-0.5B-Instruct")
    if os.path.isdir(source) and device.type != "meta" and not any(
            f.endswith(".safetensors") for f in os.listdir(source)):
        pickled = next((f for f in os.listdir(source) if f.endswith((".bin", ".pt", ".pth"))), None)
        raise UserError(f"{source}: {pickled} is pickle; convert to safetensors" if pickled else
                        f"{source}: no .safetensors file")

    def read_lean(**where):
        config = AutoConfig.from_pretrained(source, trust_remote_code=False, **where)
        stored = _real_dtype(config.dtype or torch.float32, device)
        model = memory.skeleton(config, stored if dtype == "auto" else dtype)
        tensor = model.state_dict().__getitem__  # on the meta device shapes are all there is
        if device.type != "meta":
            tensor = memory.files_of(source if os.path.isdir(source) else snapshot_download(
                source, allow_patterns=["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"], **where))
        memory.read(model, tensor, device, **lean or {})
        try:
            model.generation_config = GenerationConfig.from_pretrained(source, **where)
        except OSError:
            pass  # from_config made one
        return model, _read_tokenizer(source, **where)

    def read(**where):
        if lean or device.type == "meta":
            return read_lean(**where)
        model, report = AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, trust_remote_code=False, use_safetensors=True, output_loading_info=True,
            adapter_kwargs=where, **where)
        if report["missing_keys"]:  # transformers would go on with random numbers there
            missing = ", ".join(sorted(report["missing_keys"])[:3])
            raise UserError(f"{source}: no weights for {missing}: the model is incomplete")
        return model, _read_tokenizer(source, **where)

    try:
        try:  # files on this machine first: without a network the hub's own order costs a minute of retries
            return read(local_files_only=True)
        except (OSError, UserError):  # UserError: the weights are in the hub's cache, the tokenizer is not
            if os.path.isdir(source):
                raise
            model_info(source, timeout=10)  # fails at once where from_pretrained would try again for a minute
            return read()
    except UserError:
        raise
    except Exception as error:  # OSError, SafetensorError, ...: name the place, keep the cause
        raise UserError(f"{source}: cannot be loaded: {_first_line(error)}") from None


def _check_logits(model, source: str):
    """Three tokens through the model itself and through `head_logits`: what else a head may do must not go unseen."""
    probe = torch.arange(3, device=model.device)[None]
    with torch.no_grad():
        own = model(input_ids=probe, use_cache=False).logits.float()
        ours = head_logits(model, model.base_model(input_ids=probe, use_cache=False).last_hidden_state).float()
    for name, p in model.named_parameters():
        if p.is_floating_point() and not torch.isfinite(p.detach().sum(dtype=torch.float32)):  # or a sum too large
            if bad := int((~torch.isfinite(p)).sum()):
                raise UserError(f"{source}: {name}: {bad} values are not finite; the file is damaged")
    if not torch.isfinite(own).all():
        raise UserError(f"{source}: its weights give logits that are not finite; "
                        "the file is damaged, or needs --dtype float32")
    if (ours - own).abs().max() > 0.02 * own.abs().max():
        raise UserError(f"{source}: {type(model).__name__} scales its logits in a way "
                        "that lora.head_logits does not know")


@torch.no_grad()
def _shares_prefix(model) -> bool:
    """Does this architecture give the same hidden states with a shared prefix as without? Asked of the model itself."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if config._attn_implementation != "causal_attention" or kinds:
        return False
    probe = torch.arange(12, device=model.device).view(2, 6) % 9  # two rows
    probe[:, :3] = probe[0, :3]
    mask = torch.tensor([[0, 0, 0, 1, 1, 1]] * 2, device=model.device)
    try:
        a, b = (hidden[index].float() for hidden, index in (
            hidden_states(model, probe, mask, share) for share in (False, True)))  # (2, 6, D) each
    except Exception:  # it takes no positions, or does not hand its attention our words
        return False
    return bool((a - b).norm() < (1e-4 if model.dtype == torch.float32 else 0.02) * a.norm())


def _first_line(error) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def fast_float32() -> bool:
    """Let oneDNN run float32 matmuls with bf16 instructions if that stays float32-accurate on this CPU -> True if on.

    With AVX512-BF16 the split product is twice as fast with an error of 4e-7; with AMX the same switch really rounds.
    Before the first matmul it also bounds oneDNN's cache of compiled shapes: its 1,024, which batches of ever new
    lengths fill, hold over 1 GB.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")
    try:
        matmul = torch.backends.mkldnn.matmul
        before, matmul.fp32_precision = matmul.fp32_precision, "bf16"
    except (AttributeError, RuntimeError):
        return False
    generator = torch.Generator().manual_seed(0)
    for rows in (1, 33, 512):
        x, w = torch.randn(rows, 384, generator=generator), torch.randn(384, 129, generator=generator)
        exact = x.double() @ w.double()
        if ((x @ w).double() - exact).abs().max() > 3e-6 * exact.abs().max():
            matmul.fp32_precision = before
            return False
    return True


def causal_attention(module, query, key, value, attention_mask, scaling=None, sliding_window=None, dropout=0.0,
                     shared_prefix=None, **kwargs):
    """The attention of every model `load_model` opens: the stock kernel, but for two cases.

    shared_prefix (P, B): the one row is `hidden_states`' [prefix, row 1 .. row B]; each row sees the prefix and itself.
    On a CPU with gradients it is two matmuls, query heads of a KV head stacked as query rows: forward and backward take
    a half to an eighth of the time of the fused kernel, whose grouped-query backward is slow there. The stock kernel
    still serves whatever needs no gradient (so logits equal the stock model's to the bit), is masked, or is too large
    to keep (B, H, T, S) weights of.
    """
    if shared_prefix:
        P, rows = shared_prefix
        def unpacked(x):  # (1, H, P + B * W, D) -> (B, H, W, D)
            return x[0, :, P:].unflatten(1, (rows, -1)).transpose(0, 1)
        keys, values = (torch.cat([x[:, :, :P].expand(rows, -1, -1, -1), unpacked(x)], 2)
                        for x in (key, value))  # (B, H_kv, P + W, D)
        head, tail = (causal_attention(module, q, k, v, None, scaling, None, dropout)[0] for q, k, v in (
            (query[:, :, :P], key[:, :, :P], value[:, :, :P]), (unpacked(query), keys, values)))
        return torch.cat([head, tail.flatten(0, 1)[None]], 1), None  # (1, P + B * W, H, D)
    B, H, T, D = query.shape
    S, groups = key.shape[2], H // key.shape[1]
    if attention_mask is None and S > T:  # the queries are the last T of S positions
        attention_mask = torch.ones(T, S, dtype=torch.bool, device=query.device).tril(S - T)[None, None]
    ours = query.is_cpu and torch.is_grad_enabled() and not dropout
    if not ours or attention_mask is not None and S == T or B * H * T * S * query.element_size() > 2**25:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling,
                                      sliding_window=sliding_window, **kwargs)
    ahead = torch.ones(T, S, dtype=torch.bool, device=query.device).triu(1 + S - T)  # (T, S): keys hidden from a query
    bias = query.new_zeros(T, S).masked_fill_(ahead, -torch.inf)
    scores = (query * scaling).reshape(B, H // groups, groups * T, D) @ key.transpose(2, 3)  # (B, H_kv, groups * T, S)
    weights = (scores.view(B, H // groups, groups, T, S) + bias).softmax(-1)  # (B, H_kv, groups, T, S)
    out = weights.view(B, H // groups, groups * T, S) @ value  # (B, H_kv, groups * T, D)
    return out.view(B, H, T, -1).transpose(1, 2), None


# ---------------------------------------------------------------------------------------------------------------- LoRA
def add_lora(model, r: int, alpha: float, dropout: float = 0.0, targets="all-linear", use_rslora: bool = False,
             seed: int = 0):
    """Give every targeted Linear lora_A (r, in) and lora_B (out, r): y = W x + scale B A x; A uniform, B zero.

    scale = alpha / r, with rsLoRA (arXiv 2312.03732) alpha / sqrt(r). Targets: "all-linear" (all but the output head),
    names separated by commas, or PEFT's list or regular expression.
    """
    if isinstance(targets, str) and re.fullmatch(r"[\w,. -]+", targets) and targets != "all-linear":
        targets = [t.strip() for t in targets.split(",")]
    def wanted(name):
        if targets == "all-linear":
            return True
        if isinstance(targets, str):
            return re.fullmatch(targets, name)
        return any(name == t or name.endswith("." + t) for t in targets)
    head = model.get_output_embeddings()
    every = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    linears = {name: m for name, m in every.items() if m is not head and wanted(name)}
    if not linears:
        raise UserError(f"--lora_target_modules {targets}: no Linear of that name; the model has: "
                        + ", ".join(sorted({name.rsplit(".", 1)[-1] for name in every})))
    generator = torch.Generator().manual_seed(seed)
    for linear in linears.values():
        new = {"device": linear.weight.device, "dtype": torch.float32, "bias": False}
        A, B = nn.Linear(linear.in_features, r, **new), nn.Linear(r, linear.out_features, **new)
        bound = 1 / math.sqrt(linear.in_features)  # kaiming_uniform with a = sqrt(5), as in the LoRA code and PEFT
        A.weight.data.copy_((torch.rand(A.weight.shape, generator=generator) * 2 - 1) * bound)
        nn.init.zeros_(B.weight)
        linear.lora_A, linear.lora_B = A, B
        linear.lora_scale = alpha / (math.sqrt(r) if use_rslora else r)
        linear.lora_dropout, linear.lora_on, linear.lora_merged, linear.lora_work = dropout, True, False, None
        linear.lora_hook = linear.register_forward_hook(_lora_hook)
    names = sorted({name.rsplit(".", 1)[-1] for name in linears}) if targets == "all-linear" else targets
    model.lora_config = {"r": r, "lora_alpha": alpha, "lora_dropout": dropout, "target_modules": names,
                         "use_rslora": use_rslora}
    model.lora_fresh = True  # B is zero: the policy without its adapter is the policy this run started from


def _lora_hook(linear, inputs, output):
    if not linear.lora_on or linear.lora_merged and not torch.is_grad_enabled():
        return output
    x, work = inputs[0], linear.lora_work if torch.is_inference_mode_enabled() else None
    A, B = work or (part.weight.to(x.device, x.dtype, non_blocking=True)  # float32 masters, cast here
                    for part in (linear.lora_A, linear.lora_B))
    if work == []:
        work += A, B
    if linear.lora_merged:
        return _MergedLoRA.apply(output, x, A, B, linear.lora_scale)
    x = F.dropout(x, linear.lora_dropout, training=linear.training)
    return output + F.linear(F.linear(x, A), B) * linear.lora_scale


class _MergedLoRA(torch.autograd.Function):
    """The identity on output = (W + scale B A) x, which gives A and B the gradients they have in that sum."""

    @staticmethod
    def forward(ctx, output, x, A, B, scale):
        ctx.scale = scale
        ctx.save_for_backward(x, A, B)
        return output

    @staticmethod
    def backward(ctx, grad):
        x, A, B = ctx.saved_tensors
        x, g = x.flatten(0, -2), grad.flatten(0, -2) * ctx.scale  # (N, in), (N, out)
        return grad, None, (g @ B).T @ x, g.T @ (x @ A.T), None  # x gets its gradient through the merged weight


def lora_linears(model) -> dict:
    return {name: m for name, m in model.named_modules() if hasattr(m, "lora_A")}


@contextmanager
def merged(model):
    """W + scale B A as working weights inside the block; the base tensors are put aside: they return bit for bit.

    A and B still get their gradients, so rollout and update can be of the very same weights, whatever their dtype. An
    adapter's dropout is not applied. Leave the block before the optimiser steps. Weights in 4 bits or streamed stay as
    they are, the adapter beside them: while decoding (inference mode), A and B are cast once, not at every step.
    """
    put_aside, fixed = {}, "nf4" in getattr(model, "made_with", "") or hasattr(model, "stream")
    try:
        for linear in lora_linears(model).values():
            if linear.lora_on and fixed:
                linear.lora_work = []
            elif linear.lora_on:
                put_aside[linear] = linear.weight.data
                linear.weight.data = (linear.weight.data.float() + linear.lora_scale * (
                    linear.lora_B.weight.data @ linear.lora_A.weight.data)).to(linear.weight.dtype)
                linear.lora_merged = True
        yield
    finally:
        for linear, weight in put_aside.items():
            linear.weight.data, linear.lora_merged = weight, False
        for linear in lora_linears(model).values():
            linear.lora_work = None
        give_back_memory()


def give_back_memory():
    """Freed memory returns to the system. glibc would keep it, and rollout and update each add their own peak."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError, TypeError):
        pass  # not glibc


def merge_adapter(model):
    """Add the adapter into the weights for good; the model is then a plain one.

    It is added to the weights it was trained on: to those of the original, of which a 4-bit base is a rough copy, it
    would not be the policy that was trained. The sum has 16 bits.
    """
    def product(linear):
        return linear.lora_scale * (linear.lora_B.weight.data @ linear.lora_A.weight.data)
    if model.made_with:
        memory.plain(model, product)
        model.made_with = ""
    for linear in lora_linears(model).values():
        linear.weight.data += product(linear).to(linear.weight.dtype)
        linear.lora_hook.remove()
        del linear.lora_A, linear.lora_B
    model.lora_config = None


# ------------------------------------------------------------------------------------------------ the reference policy
def freeze_reference(model) -> dict | None:
    """A copy of what trains, taken before the first update; None for a fresh adapter, which needs no copy."""
    if model.lora_config and model.lora_fresh:
        return None
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


@contextmanager
def reference(model, frozen: dict | None):
    """Inside the block the model is the policy this run started from: adapter off, or the frozen copies in place."""
    def swap():
        for name, p in model.named_parameters():
            if name in frozen:
                p.data, frozen[name] = frozen[name], p.data

    def switch(on):
        for linear in lora_linears(model).values():
            linear.lora_on = on
    swap() if frozen else switch(False)
    try:
        yield
    finally:
        swap() if frozen else switch(True)


# --------------------------------------------------------------------------------------------------- log-probabilities
def token_logprobs(model, token_ids, loss_mask, temperature: float = 1.0, chunk_elements: int = 2**23):
    """log pi(token t | tokens before t) and the policy's entropy there, both in nats, float32, differentiable.

    token_ids, loss_mask: (B, T), right-padded. Returns logprobs (B, T), entropy (B, T), both 0.0 where the mask is 0.
    The one place in this project that shifts: column t belongs to token t, predicted from column t - 1; column 0 is
    0.0. No attention mask is needed: behind a causal mask right padding is invisible to real tokens.
    The head runs on masked positions only, a chunk of them at a time, so that no (B, T, V) tensor ever exists; tokens
    before the first masked column that all rows have in common (system prompt, a group's task) go through once.
    """
    hidden, index = hidden_states(model, token_ids, loss_mask)  # (N, D), (B, T)
    where, head = loss_mask[:, 1:].bool(), model.get_output_embeddings()
    own = hidden[index[:, :-1][where]], token_ids[:, 1:][where], temperature, chunk_elements  # (n, D), (n,)
    if hasattr(head, "part"):
        logprobs, entropy = _BlockLogprobs.apply(partial(head_logits, model), len(head.weight), *own)  # (n,) (n,)
    else:
        logprobs, entropy = _HeadLogprobs.apply(
            partial(head_logits, model), *own, *[p for p in head.parameters() if p.requires_grad])  # (n,) (n,)
    blank = hidden.new_zeros(token_ids.shape, dtype=torch.float32)  # (B, T)
    at = F.pad(where, (1, 0))  # (B, T)
    return blank.masked_scatter(at, logprobs), blank.masked_scatter(at, entropy)


def hidden_states(model, token_ids, loss_mask, share: bool | None = None):
    """The last hidden states (N, D) and, per token, the row of them that is its own: index (B, T).

    Where all rows begin alike, N = P + B (T - P) instead of B T: one packed row [prefix, row 1 .. row B], positions
    going on after the prefix in each. share None: where the model can, and a tenth of the tokens is saved.
    """
    B, T = token_ids.shape
    alike = (token_ids == token_ids[0]).all(0) & (loss_mask == 0).all(0)  # (T,)
    P = int(alike.long().cumprod(0).sum()) if share is not False else 0
    window = getattr(model.config.get_text_config(), "sliding_window", None) or T
    if share is None and (not getattr(model, "shares_prefix", False) or (B - 1) * P < 0.1 * B * T or window < T):
        P = 0
    device, column = token_ids.device, torch.arange(T, device=token_ids.device)
    row = torch.arange(B, device=device)[:, None]
    if not P:
        hidden = model.base_model(input_ids=token_ids, use_cache=False).last_hidden_state  # (B, T, D)
        return hidden.flatten(0, 1), row * T + column
    packed = torch.cat([token_ids[0, :P], token_ids[:, P:].flatten()])[None]  # (1, P + B * (T - P))
    position = torch.cat([column[:P], column[P:].repeat(B)])[None]
    hidden = model.base_model(input_ids=packed, position_ids=position, use_cache=False,
                              shared_prefix=(P, B)).last_hidden_state  # (1, P + B * (T - P), D)
    return hidden[0], torch.where(column < P, column, row * (T - P) + column)


def head_logits(model, hidden, rows: slice | None = None):
    """(N, D) -> (N, V): the output head with the scalings that Cohere, Granite and Gemma 2 put behind it.

    rows: only those of V, of a head that is a memory.Table.
    """
    head, config = model.get_output_embeddings(), model.config
    logits = head(hidden) if rows is None else head.part(hidden, rows)
    if getattr(config, "logit_scale", None):
        logits = logits * config.logit_scale
    if getattr(config, "logits_scaling", None):
        logits = logits / config.logits_scaling
    if cap := getattr(config, "final_logit_softcapping", None):
        logits = torch.tanh(logits / cap) * cap
    return logits


class _HeadLogprobs(torch.autograd.Function):
    """Log-probability and entropy of log_softmax(head(hidden) / temperature), in chunks over N.

    With p = softmax(z), H = -sum p log p:  d logp_y / dz = onehot(y) - p,  dH / dz = -p (log p + H). A token's
    log-probability is one number: forward keeps d logp / d hidden (N, D) while the chunk's softmax is at hand, and
    backward only scales its rows. Where entropy carries a gradient, or the head trains, backward runs the head again.
    """

    @staticmethod
    def forward(ctx, head, hidden, targets, temperature, chunk_elements, *weights):
        vocabulary = head(hidden[:1]).shape[-1]
        rows = max(1, chunk_elements // vocabulary)
        at_once = max(1, (2**19 if hidden.is_cpu else 2**21) // vocabulary)  # in float32; a CPU's stay in its cache
        logprobs, entropy = (hidden.new_empty(len(hidden), dtype=torch.float32) for _ in range(2))
        slope = torch.empty_like(hidden) if ctx.needs_input_grad[1] and not weights else None  # (N, D)
        for i in range(0, len(hidden), rows):
            part = slice(i, i + rows)
            with torch.set_grad_enabled(slope is not None):
                h = hidden[part].detach().requires_grad_(slope is not None)
                logits = head(h)  # (n, V)
            grad = torch.empty_like(logits) if slope is not None else None  # (n, V), of the logits
            for j in range(0, len(h), at_once):
                few, of_all = slice(j, j + at_once), slice(i + j, i + min(j + at_once, rows))
                logp = F.log_softmax(_over(logits.detach()[few].float(), temperature), dim=-1)  # (few, V)
                p, target = logp.exp(), targets[of_all, None]
                logprobs[of_all] = logp.gather(1, target)[:, 0]
                entropy[of_all] = -logp.mul_(p).sum(-1)
                if slope is not None:
                    p = p.neg_().scatter_add_(1, target, torch.ones_like(target, dtype=p.dtype))
                    grad[few] = _over(p, temperature)
            if slope is not None:
                slope[part], = torch.autograd.grad(logits, h, grad)
            del logits, grad  # or the next ones would be held beside them
        ctx.head, ctx.temperature, ctx.rows, ctx.weights = head, temperature, max(1, rows // 2), weights
        ctx.save_for_backward(hidden, targets, entropy, slope)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):
        hidden, targets, entropy, slope = ctx.saved_tensors
        if slope is not None and (grad_entropy == 0).all():
            return None, (slope * grad_logprobs[:, None]).to(hidden.dtype), None, None, None
        grad_hidden, grad_weights = torch.empty_like(hidden), [torch.zeros_like(w) for w in ctx.weights]
        for i in range(0, len(hidden), ctx.rows):
            part = slice(i, i + ctx.rows)
            with torch.enable_grad():
                h = hidden[part].detach().requires_grad_()
                logits = ctx.head(h)  # (n, V)
            logp = F.log_softmax(_over(logits.detach().float(), ctx.temperature), dim=-1)  # (n, V)
            p = logp.exp()
            grad = logp.add_(entropy[part, None]).mul_(p).mul_(-grad_entropy[part, None])
            grad.addcmul_(p, grad_logprobs[part, None], value=-1)
            grad.scatter_add_(1, targets[part, None], grad_logprobs[part, None])
            grad_hidden[part], *chunk = torch.autograd.grad(
                logits, (h, *ctx.weights), _over(grad, ctx.temperature).to(logits.dtype))
            del logits, logp, p, grad
            for total, new in zip(grad_weights, chunk):
                total += new
        return None, grad_hidden, None, None, None, *grad_weights


class _BlockLogprobs(torch.autograd.Function):
    """The same over blocks of the vocabulary, with an online logsumexp: one pass over a head too large to unpack.

    Running maximum m, total = sum exp(z - m) and mean = sum exp(z - m) z are rescaled when m rises; then
    lse = m + log total, log p = z_y - lse, H = lse - mean / total. Kept for the backward pass, which goes over the
    blocks again: hidden, targets, lse and H.
    """

    @staticmethod
    def forward(ctx, head, vocabulary, hidden, targets, temperature, chunk_elements):
        ctx.blocks = memory.blocks(vocabulary, min(memory.BLOCK, max(128, chunk_elements // 2 // max(1, len(hidden)))))
        m = hidden.new_full((len(hidden),), -torch.inf, dtype=torch.float32)  # (n,)
        total, mean, own = torch.zeros_like(m), torch.zeros_like(m), torch.zeros_like(m)
        for rows in ctx.blocks:
            z = _over(head(hidden, rows).float(), temperature)  # (n, v)
            before, m = m, torch.maximum(m, z.amax(-1))
            inside = (targets >= rows.start) & (targets < rows.stop)
            own += z.gather(1, (targets - rows.start).clamp(0, z.shape[1] - 1)[:, None])[:, 0] * inside
            weight, decay = (z - m[:, None]).exp_(), (before - m).exp_()
            total = total * decay + weight.sum(-1)
            mean = mean * decay + weight.mul_(z).sum(-1)
        lse = m + total.log()
        entropy = lse - mean / total
        ctx.head, ctx.temperature = head, temperature
        ctx.save_for_backward(hidden, targets, lse, entropy)
        return own - lse, entropy

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):
        hidden, targets, lse, entropy = ctx.saved_tensors
        total = torch.zeros_like(hidden, dtype=torch.float32)
        for rows in ctx.blocks:
            with torch.enable_grad():
                h = hidden.detach().requires_grad_()
                logits = ctx.head(h, rows)  # (n, v)
            logp = _over(logits.detach().float(), ctx.temperature) - lse[:, None]
            p = logp.exp()
            grad = logp.add_(entropy[:, None]).mul_(grad_entropy[:, None]).add_(grad_logprobs[:, None]).mul_(p).neg_()
            inside = (targets >= rows.start) & (targets < rows.stop)
            grad.scatter_add_(1, (targets - rows.start).clamp(0, grad.shape[1] - 1)[:, None],
                              (grad_logprobs * inside)[:, None])
            total += torch.autograd.grad(logits, h, _over(grad, ctx.temperature).to(logits.dtype))[0]
        return None, None, total.to(hidden.dtype), None, None, None


def _over(x, temperature):
    return x if temperature == 1 else x / temperature  # a pass over (n, V) is not free


# -------------------------------------------------------------------------------------------------------------- saving
# The keys of PEFT's adapter_config.json that plain LoRA knows, or that change nothing. Others that are set are refused.
UNDERSTOOD = {"peft_type", "task_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision",
              "inference_mode", "r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora", "bias",
              "fan_in_fan_out", "init_lora_weights", "eva_config", "layers_pattern", "megatron_core",
              "qalora_group_size", "runtime_config", "ensure_weight_tying"}


def save_model(model, folder: str):
    """The adapter in PEFT's format, or, when all weights train, a model folder (config.json, model.safetensors)."""
    from safetensors.torch import save_file
    if not model.lora_config:
        model.save_pretrained(folder)
        return
    os.makedirs(folder, exist_ok=True)
    tensors = {f"base_model.model.{name}.{part}.weight": getattr(linear, part).weight.detach().cpu().contiguous()
               for name, linear in lora_linears(model).items() for part in ("lora_A", "lora_B")}
    save_file(tensors, os.path.join(folder, "adapter_model.safetensors"),  # one entry: of two the order is random
              metadata={"base": model.made_with} if model.made_with else {"format": "pt"})
    base = model.base_path
    if base == "tiny":  # random weights that nobody else has: they go along with every adapter
        base = os.path.join(folder, "base")
        for part in make_tiny(model.base_seed):
            part.save_pretrained(base)
    local = os.path.isdir(base)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "inference_mode": True, "bias": "none",
              "fan_in_fan_out": False, "modules_to_save": None,
              "base_model_name_or_path": os.path.abspath(base) if local else base,
              **model.lora_config}
    with open(os.path.join(folder, "adapter_config.json"), "w") as f:
        json.dump(config, f, indent=2)


def _trained_on(folder: str) -> str:
    """What of its base an adapter was trained on: "" (the weights as stored), "nf4", "int8" (the head) or both."""
    from safetensors import safe_open
    try:
        with safe_open(os.path.join(folder, "adapter_model.safetensors"), "pt") as file:
            return (file.metadata() or {}).get("base", "")
    except Exception:  # load_adapter says what is wrong with it
        return ""


def load_adapter(model, folder: str, dropout: float = 0.0):
    """Put PEFT's adapter files on a plain model. UserError names what of PEFT is not understood here."""
    config = _adapter_config(folder)
    odd = [key for key, value in config.items() if value and key not in UNDERSTOOD]
    if config.get("init_lora_weights", True) not in (True, False, "gaussian", "eva", "orthogonal"):
        odd.append(f"init_lora_weights {config['init_lora_weights']}")  # PiSSA, OLoRA, LoftQ, CorDA change the base too
    if config.get("peft_type") != "LORA" or config.get("bias", "none") != "none" or odd:
        raise UserError(f"{folder}: only plain LoRA adapters are read here; "
                        f"this one has {', '.join(odd) or 'another peft_type or bias'}")
    add_lora(model, config["r"], config["lora_alpha"], dropout or config.get("lora_dropout", 0.0),
             config["target_modules"], config.get("use_rslora", False))
    load_weights(model, folder)
    if not any(linear.lora_B.weight.any() for linear in lora_linears(model).values()):
        print(f"note: {folder}: the adapter changes nothing: its lora_B are all zero", file=sys.stderr)
    model.lora_fresh = False


def load_weights(model, folder: str):
    """What trains in `model`, as `save_model` wrote it from a model of the same making, bit for bit."""
    from safetensors.torch import load_file
    if not model.lora_config:
        saved = dict(_read_model(str(folder), torch.float32, torch.device("cpu"), None)[0].named_parameters())
        for name, p in model.named_parameters():
            p.data.copy_(saved[name])
        return
    try:
        tensors = load_file(os.path.join(folder, "adapter_model.safetensors"))
    except Exception as error:
        raise UserError(f"{folder}/adapter_model.safetensors: {_first_line(error)}") from None
    for name, linear in lora_linears(model).items():
        for part in ("lora_A", "lora_B"):
            tensor = tensors.pop(f"base_model.model.{name}.{part}.weight", None)
            weight = getattr(linear, part).weight
            if tensor is None or tensor.shape != weight.shape:
                raise UserError(f"{folder}: {name}.{part} is {'missing' if tensor is None else tuple(tensor.shape)}, "
                                 f"the model needs {tuple(weight.shape)}")
            weight.data.copy_(tensor)
    if tensors:
        raise UserError(f"{folder}: {next(iter(tensors))} has no place in this model")


def merge(source: str, folder: str):
    """Adapter or output folder -> plain model folder with merged weights and the tokenizer."""
    model, tokenizer = load_model(source, dtype="auto", train=False)
    if model.lora_config:
        merge_adapter(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    if len(sys.argv) != 4 or sys.argv[1] != "merge":
        sys.exit(__doc__)
    try:
        merge(*sys.argv[2:])
    except UserError as error:
        print(f"lora.py: {error}", file=sys.stderr)
        sys.exit(2)
