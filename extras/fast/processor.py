"""The processor: which of its ways are used, float32 products, and memory that was freed."""
import ctypes
import os
import warnings
from contextlib import suppress
from pathlib import Path

import torch

# What this layer does. Taken out one by one, bench/layers.py measures what each is worth.
USED = {"fused", "products"}
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


def bound_primitives():
    """Bound oneDNN's cache of compiled shapes. Call it before the first product.

    Its 1,024 entries, which batches of ever new lengths fill, hold over 1 GB.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")


def give_back_memory():
    """Return freed memory to the system.

    glibc would keep it, and the peaks of rollout and update would add up.
    """
    with suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
