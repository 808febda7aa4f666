"""Loading and saving of models, tokenizers and adapters.

`load_model(path)` takes `tiny`, a hub id, a model folder, an adapter folder, or an output folder of this project (its
newest checkpoint). Adapters are stored in PEFT's own format.
"""
import inspect
import json
import os
import re
import sys

import torch

from experiment.checkpoint import read_state
from experiment.data import read_json
from experiment.errors import UserError
import llm.pointwise as pointwise
from llm.adapter_files import (
    adapter_base,
    quantization_of,
    read_settings,
    read_tensors,
    refuse_other_settings,
)
from llm.attention import causal_attention
from llm.checkpointing import checkpoint_layers, tile_mlps
from llm.facts import facts
from llm.logprobs import head_logits, hidden_states
from llm.memory import PLAIN, Techniques, techniques, techniques_of
from llm.skeleton import dequantize_model, fill, skeleton, tensor_reader
from llm.streaming import Stream, layers_of
from llm.tiny import make_tiny
from lora import adapter_tensors, add_lora, changes_nothing, effective_weight, merge_adapter, settings

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16,
          "auto": "auto"}  # auto: as stored


def model_options(config) -> dict:
    """Return the arguments of `load_model` that a Config has under the same names."""
    names = inspect.signature(load_model).parameters
    return {name: value for name, value in vars(config).items() if name in names}


def load_model(path: str, *, lora_r: int = 0, lora_alpha: float | None = None, lora_dropout: float = 0.0,
               lora_target_modules: str = "all-linear", use_rslora: bool = False, dtype: str = "float32",
               device: str | None = None, seed: int = 0, train: bool = True, memory: str | Techniques = "plain",
               load_in_4bit: bool = False, gradient_checkpointing: bool = False):
    """Return (model, tokenizer), ready to train, or with train=False only to be played.

    Dropout is off until `model.train()`.

    Args:
        path: tiny, a hub id, a model folder, an adapter folder, or an output folder of this project.
        lora_r: the rank of a fresh adapter. If `path` is an adapter, any rank above 0 continues its training. 0 trains
            all weights (an adapter is merged first).
        lora_alpha: the scale of the adapter is lora_alpha / lora_r. None means 2 lora_r.
        lora_dropout: dropout on the adapter's input.
        lora_target_modules, use_rslora: see `lora.add_lora`.
        dtype: of the frozen weights and of the arithmetic. What trains is float32.
        device: None takes the GPU if there is one. "meta" gives shapes without numbers, for counting.
        seed: of the adapter, and of the tiny model.
        memory: a setting of the memory dial, or techniques one by one (llm/memory.py). An adapter that was trained on
            a 4-bit base gets that base again.
        load_in_4bit, gradient_checkpointing: the standard names of two of these settings.

    Raises:
        UserError: in one line, with the fix.
    """
    path = newest(path)
    if os.path.exists(os.path.join(path, "state.json")):
        read_state(path)  # a checkpoint of ours: every file is compared with its size and sha256
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda":
        # Where cuDNN's attention is chosen, it compiles again for every new shape.
        torch.backends.cuda.enable_cudnn_sdp(False)
    chosen = techniques(memory, load_in_4bit, gradient_checkpointing)
    if train and device.type == "cpu":
        fast_float32()
    if train:
        _check_trainable(chosen, memory, dtype, lora_r)
    adapter = _adapter_settings(path, lora_r, lora_alpha, lora_target_modules, use_rslora) if is_adapter(path) else None
    trained_on = quantization_of(path) if adapter else ""
    chosen = chosen._replace(load_in_4bit=chosen.load_in_4bit or "nf4" in trained_on,
                             int8_head=chosen.int8_head or "int8" in trained_on)
    # Weights that train are read and stay in float32.
    kept = _real_dtype(DTYPES[dtype] if lora_r or not train else torch.float32, device)
    source = adapter_base(path) if adapter else path
    model, tokenizer = _tiny(seed, kept, device, chosen) if source == "tiny" else _read_model(
        source, kept, device, chosen)
    if adapter and os.path.exists(os.path.join(path, "tokenizer_config.json")):
        tokenizer = _read_tokenizer(path)
    stream = Stream(layers_of(model), device) if chosen.stream_layers else None
    model.to(device).requires_grad_(False).eval()
    model.techniques = chosen
    facts(model).source, facts(model).seed = source, seed
    _check_tokenizer(model, tokenizer, path)
    _use_causal_attention(model)
    if device.type != "meta":
        _check_logits(model, source)
        facts(model).shares_prefix = _shares_prefix(model)
    apart = chosen.load_in_4bit or chosen.stream_layers
    if adapter:
        load_adapter(model, path, adapter, lora_dropout, apart)
    elif lora_r:
        alpha = 2 * lora_r if lora_alpha is None else lora_alpha
        add_lora(model, lora_r, alpha, lora_dropout, lora_target_modules, use_rslora, seed, apart)
    if adapter and not lora_r and (train or not trained_on):  # only played, a 4-bit base stays one
        merge(model)
    if not lora_r:
        model.requires_grad_(train)
    pointwise.install(model)
    if chosen.mlp_tokens:
        tile_mlps(model, chosen.mlp_tokens)
    if chosen.gradient_checkpointing:
        checkpoint_layers(model, chosen.offload_activations, stream)
    return model.eval(), tokenizer


def _check_trainable(chosen, memory, dtype, lora_r):
    """Refuse techniques that only frozen weights can have, and those that need recomputation."""
    if not lora_r and (chosen.frozen_base or chosen.adamw_on_host):
        flag = f"--memory {memory}" if memory not in ("plain", "checkpoint") else "--load_in_4bit"
        raise UserError(f"{flag} is for weights that stay as they are; "
                        "give --lora_r, e.g. 16, or --memory checkpoint")
    if not lora_r and dtype.endswith("16"):
        raise UserError("--dtype is for weights that stay as they are; give --lora_r, e.g. 16, or --dtype float32")
    if (chosen.stream_layers or chosen.offload_activations) and not chosen.gradient_checkpointing:
        raise ValueError("streaming and offloading need gradient_checkpointing: backward runs each layer again")


def _adapter_settings(path, lora_r, alpha, targets, use_rslora) -> dict:
    """Return the settings of the adapter at `path`, after comparing them with what was asked for."""
    adapter = read_settings(path)
    refuse_other_settings(path, adapter, alpha, targets, use_rslora)
    if lora_r not in (0, adapter["r"]):
        print(f"note: {path} is an adapter: its rank {adapter['r']} stays, lora_r {lora_r} is for fresh ones",
              file=sys.stderr)
    return adapter


def merge(model):
    """Merge the adapter into the weights it was trained on; the model is then a plain one.

    Quantized weights become 16-bit ones of what they stood for. The original weights, of which they are a rough copy,
    would not give the policy that was trained.
    """
    chosen = techniques_of(model)
    if chosen.load_in_4bit or chosen.int8_head:
        dequantize_model(model, effective_weight)
        model.techniques = chosen._replace(load_in_4bit=False, int8_head=False)
    merge_adapter(model)


# --------------------------------------------------------------------------------------------------- where a model is
def is_adapter(path: str) -> bool:
    """True if this folder holds an adapter."""
    return os.path.exists(os.path.join(path, "adapter_config.json"))


def newest(path: str) -> str:
    """Return the newest checkpoint of an output folder, and every other path as it is."""
    folder = os.path.join(path, "checkpoints")
    steps = []
    if os.path.isdir(folder):
        steps = sorted(name for name in os.listdir(folder) if re.fullmatch(r"step_\d+", name))
    if steps:
        return os.path.join(folder, steps[-1])
    if os.path.isdir(path) and not any(name.endswith("config.json") for name in os.listdir(path)):
        raise UserError(f"{path}: no config.json, no adapter_config.json and no checkpoints in this folder")
    return path


def is_tiny(model_path: str) -> bool:
    """True if this is the tiny model, or a model or adapter that was made from it. Reads no weights, never raises."""
    try:
        path = newest(model_path)
        path = adapter_base(path) if is_adapter(path) else path
        if path == "tiny":
            return True
        return bool(read_json(os.path.join(path, "config.json")).get("tiny"))
    except (OSError, ValueError, AttributeError, TypeError):  # a UserError is a ValueError
        return False


# ------------------------------------------------------------------------------------------------------------ reading
def _tiny(seed, dtype, device, chosen):
    """Return the tiny model in this dtype, and its tokenizer."""
    model, tokenizer = make_tiny(seed)
    if chosen.frozen_base or device.type == "meta":
        whole = model.to(device).state_dict()
        model = skeleton(model.config, model.dtype if dtype == "auto" else dtype)
        fill(model, whole.__getitem__, device, chosen)
    elif dtype != "auto":
        for p in model.parameters():  # not model.to(dtype), which would round the RoPE frequencies, a buffer
            p.data = p.data.to(dtype)
    return model, tokenizer


def _read_model(source: str, dtype, device, chosen: Techniques):
    """Return the model and the tokenizer of a folder or of a hub id."""
    from huggingface_hub import model_info
    _check_source(source, device)
    read = _read_sparingly if chosen.frozen_base or device.type == "meta" else _read_whole
    try:
        try:  # Files on this machine first: without a network the hub's own order costs a minute of retries.
            return read(source, dtype, device, chosen, local_files_only=True)
        except (OSError, UserError):  # UserError: the weights are in the hub's cache, the tokenizer is not.
            if os.path.isdir(source):
                raise
            model_info(source, timeout=10)  # fails at once where from_pretrained would try again for a minute
            return read(source, dtype, device, chosen)
    except UserError:
        raise
    except Exception as error:  # OSError, SafetensorError, ...: name the place, keep the cause
        raise UserError(f"{source}: cannot be loaded: {first_line(error)}") from None


def _check_source(source, device):
    if not os.path.isdir(source) and (source.startswith((".", "/", "~")) or source.count("/") != 1):
        raise UserError(f"{source}: no such folder; "
                        "give tiny, a model or output folder, or a hub id like Qwen/Qwen2.5-0.5B-Instruct")
    if os.path.isdir(source) and device.type != "meta":
        names = os.listdir(source)
        if not any(name.endswith(".safetensors") for name in names):
            pickled = next((name for name in names if name.endswith((".bin", ".pt", ".pth"))), None)
            raise UserError(f"{source}: {pickled} is pickle; convert to safetensors" if pickled else
                            f"{source}: no .safetensors file")


def _read_sparingly(source, dtype, device, chosen, **where):
    """Read the model a tensor at a time, each in the form in which it will stay."""
    from huggingface_hub import snapshot_download
    from transformers import GenerationConfig
    config = _read_config(source, **where)
    stored = _real_dtype(config.dtype or torch.float32, device)
    model = skeleton(config, stored if dtype == "auto" else dtype)
    if device.type == "meta":
        read = model.state_dict().__getitem__  # shapes are all there is
    elif os.path.isdir(source):
        read = tensor_reader(source)
    else:
        read = tensor_reader(snapshot_download(
            source, allow_patterns=["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"], **where))
    fill(model, read, device, chosen)
    try:
        model.generation_config = GenerationConfig.from_pretrained(source, **where)
    except OSError:
        pass  # from_config made one
    return model, _read_tokenizer(source, **where)


def _read_whole(source, dtype, device, chosen, **where):
    """Read the model as transformers does."""
    from transformers import AutoModelForCausalLM
    config = _read_config(source, **where)
    model, report = AutoModelForCausalLM.from_pretrained(
        source, config=config, dtype=dtype, attn_implementation=config._attn_implementation, trust_remote_code=False,
        use_safetensors=True, output_loading_info=True, adapter_kwargs=where, **where)
    if report["missing_keys"]:  # transformers would continue with random numbers there
        missing = ", ".join(sorted(report["missing_keys"])[:3])
        raise UserError(f"{source}: no weights for {missing}: the model is incomplete")
    return model, _read_tokenizer(source, **where)


def _read_config(source, **where):
    """Return the model's config, with the attention that the stock modules run with until ours is put there.

    What a folder's own config.json says of attention is not used: it may name a kernel to be downloaded.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    config = AutoConfig.from_pretrained(source, trust_remote_code=False, **where)
    if getattr(config, "quantization_config", None):
        raise UserError(f"{source}: is a quantized model; give the original one, and --load_in_4bit for 4 bits")
    classes = AutoModelForCausalLM._model_mapping
    model_class = classes[type(config)] if type(config) in classes else None
    config._attn_implementation = "sdpa" if getattr(model_class, "_supports_sdpa", False) else "eager"
    return config


def _read_tokenizer(source: str, **where):
    from transformers import AutoTokenizer
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False, **where)
    except Exception as error:
        raise UserError(f"{source}: no tokenizer could be read ({first_line(error)})") from None


def _real_dtype(dtype, device):
    """Return float16 in place of bfloat16 on a GPU that only emulates it (before Ampere)."""
    emulated = dtype == torch.bfloat16 and device.type == "cuda" and not torch.cuda.is_bf16_supported(
        including_emulation=False)
    return torch.float16 if emulated else dtype


def first_line(error) -> str:
    """Return the first line of an exception's message, at most 200 characters of it."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


# ----------------------------------------------------------------------------------------------------------- checking
def _check_tokenizer(model, tokenizer, path):
    if not tokenizer.chat_template:
        raise UserError(f"{path}: its tokenizer has no chat template; "
                        "use an instruct model, or put chat_template.jinja beside it")
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise UserError(f"{path}: tokenizer has {len(tokenizer)} tokens, model {rows}: they belong to different models")


def _use_causal_attention(model):
    """Replace torch's fused attention by `causal_attention`, which agrees with it and keeps less for backward."""
    if model.config.get_text_config()._attn_implementation == "sdpa":
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask
        AttentionInterface.register("causal_attention", causal_attention)
        AttentionMaskInterface.register("causal_attention", sdpa_mask)  # None where causality is all
        model.set_attn_implementation("causal_attention")


def _check_logits(model, source: str):
    """Compare the model's logits of three tokens with `head_logits`, and refuse weights that are not finite."""
    probe = torch.arange(3, device=model.device)[None]
    with torch.no_grad():
        stock = model(input_ids=probe, use_cache=False).logits.float()
        ours = head_logits(model, model.base_model(input_ids=probe, use_cache=False).last_hidden_state).float()
    for name, p in model.named_parameters():
        # A sum is cheap, and not finite where a weight is not, or where the sum is too large.
        if p.is_floating_point() and not torch.isfinite(p.detach().sum(dtype=torch.float32)):
            if bad := int((~torch.isfinite(p)).sum()):
                raise UserError(f"{source}: {name}: {bad} values are not finite; the file is damaged")
    if not torch.isfinite(stock).all():
        raise UserError(f"{source}: its weights give logits that are not finite; "
                        "the file is damaged, or needs --dtype float32")
    if (ours - stock).abs().max() > 0.02 * stock.abs().max():
        raise UserError(f"{source}: {type(model).__name__} scales its logits in a way "
                        "that logprobs.head_logits does not know")


@torch.no_grad()
def _shares_prefix(model) -> bool:
    """True if this architecture gives the same hidden states with a shared prefix as without. The model is asked."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if config._attn_implementation != "causal_attention" or kinds:
        return False
    probe = torch.arange(12, device=model.device).view(2, 6) % 9  # two rows
    probe[:, :3] = probe[0, :3]
    mask = torch.tensor([[0, 0, 0, 1, 1, 1]] * 2, device=model.device)
    results = []
    try:
        for share in (False, True):
            hidden, index = hidden_states(model, probe, mask, share)
            results.append(hidden[index].float())  # (2, 6, D)
    except Exception:  # it takes no positions, or does not hand its attention our arguments
        return False
    apart, shared = results
    return bool((apart - shared).norm() < (1e-4 if model.dtype == torch.float32 else 0.02) * apart.norm())


# -------------------------------------------------------------------------------------------------- saving and adapters
def save_model(model, folder: str):
    """Write the adapter in PEFT's format, or, when all weights train, a model folder."""
    from safetensors.torch import save_file
    if not settings(model):
        model.save_pretrained(folder)
        return
    os.makedirs(folder, exist_ok=True)
    tensors = {name: p.detach().cpu().contiguous() for name, p in adapter_tensors(model).items()}
    quantized = _quantization(techniques_of(model))
    # One entry of metadata alone: of two, safetensors writes the order at random.
    save_file(tensors, os.path.join(folder, "adapter_model.safetensors"),
              metadata={"base": quantized} if quantized else {"format": "pt"})
    base = facts(model).source
    if base == "tiny":  # random weights that nobody else has: they go along with every adapter
        base = os.path.join(folder, "base")
        for thing in make_tiny(facts(model).seed):
            thing.save_pretrained(base)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "inference_mode": True, "bias": "none",
              "fan_in_fan_out": False, "modules_to_save": None,
              "base_model_name_or_path": os.path.abspath(base) if os.path.isdir(base) else base,
              **settings(model).peft()}
    with open(os.path.join(folder, "adapter_config.json"), "w") as file:
        json.dump(config, file, indent=2)


def _quantization(chosen: Techniques) -> str:
    """Return how the base of an adapter is stored, as its file says it: "", "nf4", "int8" (the head) or both."""
    return ",".join(["nf4"] * chosen.load_in_4bit + ["int8"] * chosen.int8_head)


def load_adapter(model, folder: str, adapter: dict, dropout: float = 0.0, apart: bool = False):
    """Put the adapter of a folder on a plain model. `adapter` is what `read_settings` returned for the folder."""
    ranks = {tensor.shape[0] for name, tensor in read_tensors(folder).items() if "lora_A" in name and tensor.dim()}
    if ranks - {adapter["r"]}:  # before memory is taken for a rank that nobody trained
        raise UserError(f"{folder}: adapter_config.json says r {adapter['r']}, adapter_model.safetensors has rank "
                        f"{', '.join(map(str, sorted(ranks)))}")
    add_lora(model, adapter["r"], adapter["lora_alpha"], dropout, adapter["target_modules"],
             adapter.get("use_rslora", False), apart=apart)
    load_weights(model, folder)
    if changes_nothing(model):
        print(f"note: {folder}: the adapter changes nothing: its lora_B are all zero", file=sys.stderr)
    settings(model).fresh = False


def load_weights(model, folder: str):
    """Load what trains in `model`, as `save_model` wrote it from a model of the same making, bit for bit."""
    if not settings(model):
        saved, _ = _read_model(str(folder), torch.float32, torch.device("cpu"), PLAIN)
        saved = dict(saved.named_parameters())
        for name, p in model.named_parameters():
            p.data.copy_(saved[name])
        return
    saved = read_tensors(folder)
    for name, p in adapter_tensors(model).items():
        tensor = saved.pop(name, None)
        if tensor is None or tensor.shape != p.shape:
            short = name.removeprefix("base_model.model.").removesuffix(".weight")
            raise UserError(f"{folder}: {short} is {'missing' if tensor is None else tuple(tensor.shape)}, "
                            f"the model needs {tuple(p.shape)}")
        p.data.copy_(tensor)
    if saved:
        raise UserError(f"{folder}: {next(iter(saved))} has no place in this model")


def fast_float32() -> bool:
    """Let oneDNN run float32 matrix products with bf16 instructions if that stays accurate. True if it does.

    With AVX512-BF16 the split product is twice as fast with an error of 4e-7. With AMX the same switch really rounds.
    Before the first product this also bounds oneDNN's cache of compiled shapes: its 1,024 entries, which batches of
    ever new lengths fill, hold over 1 GB.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    try:
        matmul = torch.backends.mkldnn.matmul
        before, matmul.fp32_precision = matmul.fp32_precision, "bf16"
    except (AttributeError, RuntimeError):
        return False
    generator = torch.Generator().manual_seed(0)
    for rows in (1, 33, 512):
        x = torch.randn(rows, 384, generator=generator)
        w = torch.randn(384, 129, generator=generator)
        exact = x.double() @ w.double()
        if ((x @ w).double() - exact).abs().max() > 3e-6 * exact.abs().max():
            matmul.fp32_precision = before
            return False
    return True
