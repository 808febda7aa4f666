"""The policy's weights: loading, LoRA, the reference policy, log-probabilities, saving, merging.

`load_model(path)` takes `tiny`, a hub id, a model folder, an adapter folder or an output folder of this project (its
newest checkpoint). LoRA (arXiv 2106.09685) lives as two small Linears, `lora_A` and `lora_B`, inside the Linear they
adapt, and a forward hook adds their product; so the model stays the stock transformers model, and the files are PEFT's
own format.

    python lora.py merge ADAPTER_OR_OUTPUT_FOLDER MODEL_FOLDER      writes a plain model folder
"""
import inspect
import json
import math
import os
import re
import sys
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn import functional as F

from experiment.run import UserError
from llm import pointwise
from llm.checkpointing import checkpoint_layers, tile_mlps
from llm.logprobs import Unscaled, causal_attention, head_logits, hidden_states, token_logprobs  # noqa: F401
from llm.memory import PLAIN, Techniques, give_back_memory, techniques, techniques_of
from llm.skeleton import dequantize_model, fill, skeleton, tensor_reader
from llm.streaming import Stream, layers_of
from llm.tiny import make_tiny

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16,
          "auto": "auto"}  # as stored

# ------------------------------------------------------------------------------------------------------------- loading
def model_options(config) -> dict:
    """The arguments of `load_model` that a Config has under the same names."""
    return {name: value for name, value in vars(config).items() if name in inspect.signature(load_model).parameters}


def load_model(path: str, *, lora_r: int = 0, lora_alpha: float | None = None, lora_dropout: float = 0.0,
               lora_target_modules: str = "all-linear", use_rslora: bool = False, dtype: str = "float32",
               device: str | None = None, seed: int = 0, train: bool = True, memory: str | Techniques = "plain",
               load_in_4bit: bool = False, gradient_checkpointing: bool = False):
    """The model and tokenizer at `path` -> (model, tokenizer), ready to train, or with train=False only to be played.

    lora_r > 0 adds a fresh adapter, unless `path` is an adapter: then training goes on from it. lora_r = 0 trains all
    weights (an adapter is merged first). `dtype` is that of the frozen weights and of the arithmetic; what trains is
    float32. memory: a setting of the memory dial, or techniques one by one (llm/memory.py); kept as model.techniques.
    An adapter that was trained on a 4-bit base gets that base again. device "meta": shapes without numbers, for
    counting. UserError: one line with the mend.
    """
    path = newest(path)
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)  # where it is chosen, it compiles anew for every new shape
    adapter = os.path.exists(os.path.join(path, "adapter_config.json"))
    source = base_of(path) if adapter else path
    chosen = techniques(memory, load_in_4bit, gradient_checkpointing)
    if train and not lora_r and (chosen.frozen_base or chosen.adamw_on_host):
        flag = f"--memory {memory}" if memory not in ("plain", "checkpoint") else "--load_in_4bit"
        raise UserError(f"{flag} is for weights that stay as they are; give --lora_r, e.g. 16, or --memory checkpoint")
    if train and not lora_r and dtype.endswith("16"):
        raise UserError("--dtype is for weights that stay as they are; give --lora_r, e.g. 16, or --dtype float32")
    if train and (chosen.stream_layers or chosen.offload_activations) and not chosen.gradient_checkpointing:
        raise ValueError("streaming and offloading need gradient_checkpointing: backward runs each layer again")
    made_with = _trained_on(path) if adapter else ""
    chosen = chosen._replace(load_in_4bit=chosen.load_in_4bit or "nf4" in made_with,
                             int8_head=chosen.int8_head or "int8" in made_with)
    kept = DTYPES[dtype] if lora_r or not train else torch.float32  # weights that train are read and stay in float32
    kept = _real_dtype(kept, device)
    model, tokenizer = make_tiny(seed) if source == "tiny" else _read_model(source, kept, device, chosen)
    if adapter and os.path.exists(os.path.join(path, "tokenizer_config.json")):
        tokenizer = _read_tokenizer(path)
    if not tokenizer.chat_template:
        raise UserError(f"{path}: its tokenizer has no chat template; "
                        "use an instruct model, or put chat_template.jinja beside it")
    if source == "tiny" and (chosen.frozen_base or device.type == "meta"):
        whole = model.to(device).state_dict()
        model = skeleton(model.config, model.dtype if kept == "auto" else kept)
        fill(model, whole.__getitem__, device, chosen)
        del whole
    stream = Stream(layers_of(model), device) if chosen.stream_layers else None
    model.techniques = chosen
    model.base_path, model.base_seed, model.lora_config, model.made_with = source, seed, None, made_with
    if chosen.frozen_base:
        model.made_with = ",".join(["nf4"] * chosen.load_in_4bit + ["int8"] * chosen.int8_head)
    model.to(device)
    if source == "tiny" and not chosen.frozen_base:
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
    pointwise.install(model)
    if chosen.mlp_tokens:
        tile_mlps(model, chosen.mlp_tokens)
    if chosen.gradient_checkpointing:
        checkpoint_layers(model, chosen.offload_activations, stream)
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


def _read_model(source: str, dtype, device, chosen: Techniques):
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
        model = skeleton(config, stored if dtype == "auto" else dtype)
        tensor = model.state_dict().__getitem__  # on the meta device shapes are all there is
        if device.type != "meta":
            tensor = tensor_reader(source if os.path.isdir(source) else snapshot_download(
                source, allow_patterns=["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"], **where))
        fill(model, tensor, device, chosen)
        try:
            model.generation_config = GenerationConfig.from_pretrained(source, **where)
        except OSError:
            pass  # from_config made one
        return model, _read_tokenizer(source, **where)

    def read(**where):
        if chosen.frozen_base or device.type == "meta":
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
                        "that logprobs.head_logits does not know")


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
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
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
    named = targets if isinstance(targets, (list, tuple, set)) else []
    unknown = [t for t in named if not any(name == t or name.endswith("." + t) for name in linears)]
    if not linears or unknown:
        raise UserError(f"--lora_target_modules: no Linear called {', '.join(unknown) or targets}; the model has: "
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
        linear.lora_dropout, linear.lora_on, linear.lora_merged = dropout, True, False
        linear.lora_work = linear.lora_packed = None
        linear.lora_hook = linear.register_forward_hook(_lora_hook)
    names = sorted({name.rsplit(".", 1)[-1] for name in linears}) if targets == "all-linear" else targets
    model.lora_config = {"r": r, "lora_alpha": alpha, "lora_dropout": dropout, "target_modules": names,
                         "use_rslora": use_rslora}
    model.lora_fresh = True  # B is zero: the policy without its adapter is the policy this run started from


def _lora_hook(linear, inputs, output):
    if not linear.lora_on or linear.lora_merged and not torch.is_grad_enabled():
        return output
    x, work = inputs[0], linear.lora_work if torch.is_inference_mode_enabled() else None
    def cast(weight):  # from the float32 that trains
        return Unscaled.apply(weight, x) if half else weight.to(x.device, x.dtype, non_blocking=True)
    half = x.dtype == torch.float16
    A, B = work or (cast(part.weight) for part in (linear.lora_A, linear.lora_B))
    if work == []:
        work += A, B
    if linear.lora_merged:
        return _MergedLoRA.apply(output, x, A, B, linear.lora_scale, getattr(x, "again", None))
    x = F.dropout(x, linear.lora_dropout, training=linear.training)
    return output + F.linear(F.linear(x, A), B) * linear.lora_scale


class _MergedLoRA(torch.autograd.Function):
    """The identity on output = (W + scale B A) x, which gives A and B the gradients they have in that sum."""

    @staticmethod
    def forward(ctx, output, x, A, B, scale, again):
        ctx.scale, ctx.again = scale, again  # again(): x once more, which then is not kept
        ctx.save_for_backward(None if again else x, A, B)
        return output

    @staticmethod
    def backward(ctx, grad):
        x, A, B = ctx.saved_tensors
        again, ctx.again = ctx.again, None  # what it holds is free with this node's tensors
        x, g = (again() if again else x).flatten(0, -2), grad.flatten(0, -2)  # (N, in), (N, out)
        grad_A, grad_B = (g @ B * ctx.scale).T @ x, ((x @ A.T * ctx.scale).T @ g).T
        return grad, None, grad_A, grad_B, None, None  # x gets its gradient through the merged weight


def lora_linears(model) -> dict:
    return {name: m for name, m in model.named_modules() if hasattr(m, "lora_A")}


@contextmanager
def merged(model):
    """W + scale B A as working weights inside the block; the base tensors are put aside: they return bit for bit.

    A and B still get their gradients, so rollout and update can be of the very same weights, whatever their dtype. An
    adapter's dropout is not applied. Leave the block before the optimiser steps. Weights in 4 bits or streamed stay as
    they are, the adapter beside them: while decoding (inference mode), A and B are cast once, not at every step.
    """
    put_aside, chosen = {}, techniques_of(model)
    fixed = chosen.load_in_4bit or chosen.stream_layers
    try:
        for linear in lora_linears(model).values():
            if linear.lora_merged:  # by an outer block
                continue
            if linear.lora_on and fixed:
                linear.lora_work = []
            elif linear.lora_on:
                put_aside[linear] = linear.weight.data
                A, B = (part.weight.data.to(linear.weight.device) for part in (linear.lora_A, linear.lora_B))
                weight = (B @ A).mul_(linear.lora_scale).add_(linear.weight.data)  # (out, in), float32
                linear.weight.data = weight.to(linear.weight.dtype)
                linear.lora_merged = True
        yield
    finally:
        for linear, weight in put_aside.items():
            linear.weight.data, linear.lora_merged, linear.lora_packed = weight, False, None
        for linear in lora_linears(model).values():
            linear.lora_work = None
        give_back_memory()


def merge_adapter(model):
    """Add the adapter into the weights for good; the model is then a plain one.

    It is added to the weights it was trained on: to those of the original, of which a 4-bit base is a rough copy, it
    would not be the policy that was trained. The sum has 16 bits.
    """
    def product(linear):
        return linear.lora_scale * (linear.lora_B.weight.data @ linear.lora_A.weight.data)
    if model.made_with:
        dequantize_model(model, product)
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
    add_lora(model, config["r"], config["lora_alpha"], dropout, config["target_modules"],
             config.get("use_rslora", False))
    load_weights(model, folder)
    if not any(linear.lora_B.weight.any() for linear in lora_linears(model).values()):
        print(f"note: {folder}: the adapter changes nothing: its lora_B are all zero", file=sys.stderr)
    model.lora_fresh = False


def load_weights(model, folder: str):
    """What trains in `model`, as `save_model` wrote it from a model of the same making, bit for bit."""
    from safetensors.torch import load_file
    if not model.lora_config:
        saved = dict(_read_model(str(folder), torch.float32, torch.device("cpu"), PLAIN)[0].named_parameters())
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
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    try:
        try:
            os.makedirs(sys.argv[3], exist_ok=True)
            held = os.listdir(sys.argv[3])
        except OSError as error:
            raise UserError(f"{sys.argv[3]}: cannot write there ({error.strerror})") from None
        if held:  # it may be the adapter's base: the adapter would then be applied twice
            raise UserError(f"{sys.argv[3]}: is not empty; give a new folder")
        merge(*sys.argv[2:])
    except UserError as error:
        print(f"lora.py: {error}", file=sys.stderr)
        sys.exit(2)
