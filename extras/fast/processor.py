"""The processor: which of its ways are used, float32 products, and memory that was freed."""
import ctypes
import os
import warnings
from contextlib import suppress
from pathlib import Path

import torch

# What this layer does. Taken out one by one, bench/layers.py measures what each is worth.
USED = {"fused", "products", "float32"}
# Torch 2.11 says on a GPU that the thread of its first backward pass had no context yet.
warnings.filterwarnings("ignore", "Attempting to run cuBLAS")


def best_dtype(config):
    """float32, but the frozen weights of LoRA in the 16 bits that the device computes in, if any"""
    if not config.lora_r:
        return "float32"
    if torch.cuda.is_available():
        # Before Ampere GPUs only emulate bfloat16.
        supported = torch.cuda.is_bf16_supported(including_emulation=False)
        return "bfloat16" if supported else "float16"
    info = Path("/proc/cpuinfo")
    words = info.read_text().split() if info.exists() else []
    supported = not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(words)
    return "bfloat16" if supported else "float32"


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


def give_back_memory():
    """Return freed memory to the system.

    glibc would keep it, and the peaks of rollout and update would add up.
    """
    with suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
