"""What loading a model does for speed: switches of the device, and the attention of training."""
import os
from functools import wraps

import torch

from extras.fast.attention import causal_attention


def faster(load_model):
    """Return this load_model with faster products and attention."""
    @wraps(load_model)
    def load(path: str, *, device: str | None = None, train: bool = True, **options):
        device = prepared_device(device, train)
        model, tokenizer = load_model(path, device=device, train=train, **options)
        use_causal_attention(model)
        return model, tokenizer
    return load


def prepared_device(name: str | None, train: bool):
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


def use_causal_attention(model):
    """Replace torch's fused attention by `causal_attention`, which needs less memory."""
    if model.config.get_text_config()._attn_implementation in ("sdpa", "packed_attention"):
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
