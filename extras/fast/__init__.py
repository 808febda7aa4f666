"""The same numbers in less time, but for rounding.

Importing it makes the processor's 16-bit type the default of --dtype where it has instructions for
one.
"""
from pathlib import Path

import core.config


def best_dtype(config):
    """float32, but the frozen weights of LoRA in the 16 bits that the device computes in, if any"""
    import torch
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


core.config.DEFAULTS["dtype"] = best_dtype
