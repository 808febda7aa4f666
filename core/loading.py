"""Loading a model: `load_model(path)` returns it ready to train, with its tokenizer."""
import inspect
import os
import shutil
import sys
import tempfile
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import torch

from extras.exact.checkpoint import base_of, check_base, newest_checkpoint, read_state
from core.data import read_json
from core.config import UserError
from core.adapter_files import ADAPTER, FORMS, load_weights, read_settings
from extras.fast.attention import causal_attention
from core.chat import Chat
from extras.memory.checkpointing import checkpoint_layers, layers_of, tile_mlps, to_host
from extras.memory.techniques import QUANTIZATION, Facts, Techniques, techniques, techniques_of
from core.model_files import read_model, read_tokenizer, real_dtype
from extras.memory.pointwise import install
from extras.models.probe import probe
from lora import adapter_tensors, add_lora, merge_adapter, settings, target_names

STREAMING = "extras.memory.streaming"  # what --memory stream needs
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16,
          "auto": "auto"}  # auto: as stored


def model_options(config) -> dict:
    """Return the arguments of `load_model` that a Config has under the same names."""
    names = inspect.signature(load_model).parameters
    return {name: value for name, value in vars(config).items() if name in names}


def load_model(path: str, *, lora_r: int = 0, lora_alpha: float | None = None,
               lora_dropout: float = 0.0, lora_target_modules: str = "all-linear",
               dtype: str = "float32", device: str | None = None, seed: int = 0, train: bool = True,
               merge: bool = False, memory: str | Techniques = "plain", load_in_4bit: bool = False,
               gradient_checkpointing: bool = False):
    """Return (model, tokenizer) ready to train, or with train=False to be played only.

    Args:
        path: tiny, a hub id, a model folder, an adapter folder, or an output folder of ours.
        lora_r: rank of a fresh adapter; with an adapter at `path` its training continues. 0 trains
            all weights, into which an adapter is merged first.
        lora_alpha: None means twice the rank.
        lora_dropout, lora_target_modules: see `lora.add_lora`.
        dtype: of the frozen weights and of the arithmetic. What trains is float32.
        device: None takes a GPU of CUDA, else the CPU; "meta" gives shapes without numbers.
        seed: of the adapter and of the tiny model.
        merge: True merges an adapter into a plain model, whatever base it was trained on.
        memory: a setting of the memory dial, or techniques one by one (extras/memory/techniques.py).
        load_in_4bit, gradient_checkpointing: the standard names of two of these settings.

    Raises UserError, one line with the fix.
    """
    path = newest(path)
    if _holds(path, "state.json"):
        read_state(path)  # sizes and sha256
    device = _prepared_device(device, train)
    chosen = techniques(memory, load_in_4bit, gradient_checkpointing)
    if train and not lora_r:
        _check_trainable(chosen, dtype)
    source, adapter = _adapter_settings(path, lora_r, lora_alpha, lora_target_modules)
    continues, quantized = _holds(path, ADAPTER), adapter["quantized_base"]
    # One that is only played stays beside quantized or streamed weights.
    if continues and not lora_r and (train or not (quantized or chosen.frozen_base)):
        merge = True
    if not merge:
        chosen = chosen._replace(**{name: True for name in FORMS if FORMS[name] in quantized})
    # Weights that train are read and stay in float32.
    kept = real_dtype(DTYPES[dtype] if lora_r or not train else torch.float32, device)
    model, tokenizer = read_model(source, kept, device, chosen, seed)
    if continues and _holds(path, "tokenizer_config.json"):
        tokenizer = read_tokenizer(path)
    stream = (import_module(STREAMING).Stream(layers_of(model), device)
              if chosen.stream_layers else None)
    model.to(device).requires_grad_(False)
    model.facts = Facts(source, seed, chosen)
    _switch_dropout_off(model)
    _adopt_tokenizer(model, tokenizer, path)
    _use_causal_attention(model)
    if adapter["r"]:
        adapt(model, adapter, lora_dropout, seed, path if continues else None)
    if merge:
        if quantized:
            import_module(QUANTIZATION).round_weights(model, quantized)
        merge_adapter(model)
    if not lora_r:
        model.requires_grad_(train)
    _use_techniques(model.eval(), chosen, stream)
    if device.type != "meta":
        probe(model, source)
    return model, tokenizer  # model.train() switches the adapter's dropout on


def merge(source: str, folder: str, dtype: str = "auto"):
    """Write the plain model folder, weights and tokenizer, of an adapter or output folder.

    In the run's dtype these are the weights that it sampled with. The folder is whole or absent.
    """
    place = Path(folder).absolute().parent
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".merge-", dir=place) as beside:
        model, tokenizer = load_model(source, dtype=dtype, train=False, merge=True)
        whole = Path(beside, "model")
        model.save_pretrained(whole)
        tokenizer.save_pretrained(whole)
        # A model with a vision tower is loaded with these, too.
        for path in Path(model.facts.source).glob("*processor_config.json"):
            shutil.copyfile(path, whole / path.name)
        whole.replace(folder)


def _prepared_device(name: str | None, train: bool):
    """Return the device, after the switches that it needs before its first product."""
    device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda":
        if device.index is not None:
            # The streams that copies and graphs ask for are those of the current device.
            torch.cuda.set_device(device)
        # Where cuDNN's attention is chosen, it compiles again for every new shape.
        torch.backends.cuda.enable_cudnn_sdp(False)
    if train and device.type == "cpu":
        fast_float32()
    return device


def adapt(model, adapter: dict, dropout=0.0, seed=0, folder: str | None = None):
    """Add an adapter with these settings. With a folder, its training continues from there."""
    chosen = techniques_of(model)
    targets = adapter["target_modules"]
    if folder and not any(".language_model." in name for name, _ in model.named_modules()):
        # PEFT names them so where it had loaded the model with its vision tower.
        targets = [name.replace(".language_model.", ".", 1) for name in targets]
    try:
        add_lora(model, adapter["r"], adapter["lora_alpha"], dropout, targets,
                 adapter.get("use_rslora", False), seed,
                 mergeable=not (chosen.load_in_4bit or chosen.stream_layers),
                 device="cpu" if chosen.adamw_on_host else None)
    except UserError as error:
        place = f"{folder}: {ADAPTER}: " if folder else ""
        raise UserError(f"{place}{error}") from None
    if chosen.adamw_on_host:
        for tensor in adapter_tensors(model).values():
            tensor.data = to_host(tensor.data)
    if folder:
        load_weights(model, folder)
        settings(model).fresh = False


def _use_techniques(model, chosen: Techniques, stream):
    """Put the forwards in place that keep less for the backward pass."""
    install(model)
    if chosen.mlp_tokens:
        tile_mlps(model, chosen.mlp_tokens)
    if chosen.gradient_checkpointing:
        checkpoint_layers(model, chosen.offload_activations, stream)


def _check_trainable(chosen, dtype):
    """Refuse techniques and dtypes that only frozen weights can have."""
    if chosen.frozen_base or chosen.adamw_on_host:
        raise UserError("--load_in_4bit and --memory 4bit, small and stream are for weights that "
                        "stay as they are; give --lora_r, e.g. 16, or --memory checkpoint")
    if dtype.endswith("16"):
        raise UserError("--dtype is for weights that stay as they are; "
                        "give --lora_r, e.g. 16, or --dtype float32")


def _adapter_settings(path, lora_r, alpha, targets) -> tuple[str, dict]:
    """Return the base model and the settings of the adapter at `path`, or of a fresh one.

    Other settings than those of the adapter at `path` are refused: alpha, unless it is None, and
    targets, unless they are all-linear. Its rank stays, because the flag has a default.
    """
    if not _holds(path, ADAPTER):
        return path, {"r": lora_r, "lora_alpha": alpha or 2 * lora_r, "target_modules": targets,
                      "quantized_base": ""}
    adapter = read_settings(path)
    targets = ",".join(sorted(target_names(targets)))
    names = sorted(adapter["target_modules"])
    # Where PEFT would find other modules by the short names, the whole ones are stored.
    if targets != ",".join(names):
        names = sorted({name.split(".")[-1] for name in names})
    for name, asked, stored in (("lora_alpha", alpha, adapter["lora_alpha"]),
                                ("lora_target_modules", targets, ",".join(names))):
        if asked not in (None, "all-linear", stored):
            raise UserError(f"{path}: is an adapter with {name} {stored}, which --{name} {asked} "
                            "cannot change; leave that flag out, or merge the adapter first "
                            "(python lora.py merge)")
    if lora_r not in (0, adapter["r"]):
        print(f"note: {path} is an adapter: its rank {adapter['r']} stays, "
              f"lora_r {lora_r} is for fresh ones", file=sys.stderr)
    base = base_of(path)
    check_base(path, base)
    return base, adapter


# --------------------------------------------------------------------------------- where a model is
def _holds(path: str, name: str) -> bool:
    """True if this is a folder that holds a file of this name."""
    return os.path.exists(Path(path, name))


def newest(path: str) -> str:
    """Return the newest checkpoint of an output folder, and every other path as it is."""
    return str(newest_checkpoint(path) or path)


def is_tiny(model_path: str) -> bool:
    """True if this is the tiny model or was made from it. Reads no weights and never raises."""
    try:
        path = newest(model_path)
        path = base_of(path) if _holds(path, ADAPTER) else path
        return path == "tiny" or bool(read_json(Path(path, "config.json")).get("tiny"))
    except (OSError, ValueError):  # a UserError is a ValueError
        return False


# ----------------------------------------------------------------------------------------- checking
def _adopt_tokenizer(model, tokenizer, path):
    """Refuse a tokenizer that does not fit the model. Let `generate` stop where its turns end."""
    if not tokenizer.chat_template:
        raise UserError(f"{path}: its tokenizer has no chat template; "
                        "use an instruct model, or put chat_template.jinja beside it")
    vocabulary = len(model.get_input_embeddings().weight)
    # A special token that the template does not write needs no embedding: Gemma 3's for images.
    written = str(tokenizer.chat_template)
    for name in ("bos_token", "eos_token"):
        written = written.replace(name, getattr(tokenizer, name) or "")
    added = [token.content for i, token in tokenizer.added_tokens_decoder.items() if i >= vocabulary
             and (not token.special or token.content in written)]
    if tokenizer.vocab_size > vocabulary or added:
        raise UserError(f"{path}: tokenizer has {len(tokenizer)} tokens, model {vocabulary}: "
                        "they belong to different models")
    # Base models lack the end of a turn here, and what is saved would not stop in `generate`.
    with suppress(ValueError):
        config = model.generation_config
        config.eos_token_id = sorted(Chat(tokenizer, [], config).stop_ids)
        # Transformers would not save a changed one that has a temperature and no do_sample.
        config._original_object_hash = hash(config)


def _switch_dropout_off(model):
    """Switch off config.json's dropout and router noise: an update sees the policy that sampled.

    The adapter's --lora_dropout comes later. The config stays as it is, for `save_model`.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if f".{name}".endswith(("drop", "dropout", ".jitter_noise")) and type(value) is float:
                vars(module)[name] = 0.0


def _use_causal_attention(model):
    """Replace torch's fused attention by `causal_attention`, which needs less memory."""
    if model.config.get_text_config()._attn_implementation == "sdpa":
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask
        AttentionInterface.register("causal_attention", causal_attention)
        AttentionMaskInterface.register("causal_attention", sdpa_mask)
        model.set_attn_implementation("causal_attention")


def fast_float32():
    """Let oneDNN run float32 matrix products with bf16 instructions where that stays accurate.

    With AVX512-BF16 the split product is twice as fast with an error of 4e-7. With AMX the same
    switch really rounds. Before the first product this also bounds oneDNN's cache of compiled
    shapes: its 1,024 entries, which batches of ever new lengths fill, hold over 1 GB.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    try:
        matmul = torch.backends.mkldnn.matmul
        before, matmul.fp32_precision = matmul.fp32_precision, "bf16"
    except (AttributeError, RuntimeError):
        return
    generator = torch.Generator().manual_seed(0)
    for tokens in (1, 33, 512):
        x = torch.randn(tokens, 384, generator=generator)
        w = torch.randn(384, 129, generator=generator)
        exact = x.double() @ w.double()
        if ((x @ w).double() - exact).abs().max() > 3e-6 * exact.abs().max():
            matmul.fp32_precision = before
