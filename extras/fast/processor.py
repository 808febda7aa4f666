"""The processor: which of its ways are used, the default of --dtype, and memory that was freed."""
import ctypes
import os
import time
import warnings
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np
import torch

from core.config import read_yaml
from core.data import read_json
from core.model import base_of, choose_device, is_adapter, newest
from core.run import CONFIG

# What this layer does. Taken out one by one, bench/layers.py measures what each is worth.
USED = {"fused", "products"}
SMALL = 2**15  # weights of a Linear, too few to measure
# Torch 2.11 says on a GPU that the thread of its first backward pass had no context yet.
warnings.filterwarnings("ignore", "Attempting to run cuBLAS")


def best_dtype(config):
    """float32; of the frozen weights of LoRA bfloat16 where a product in it is measured faster"""
    if not config.lora_r:
        return "float32"
    device = choose_device(getattr(config, "device", None)).type
    if device == "mps":
        return "float32"
    if device == "cuda":
        # Before Ampere GPUs only emulate bfloat16.
        supported = torch.cuda.is_bf16_supported(including_emulation=False)
        return "bfloat16" if supported else "float16"
    before = Path(getattr(config, "output_dir", ""), CONFIG)
    if getattr(config, "resume", False) and before.exists():
        return read_yaml(before).get("dtype", "float32")
    if os.environ.get("WORLD_SIZE", "1") != "1":
        # All ranks have to choose alike.
        return "bfloat16" if has_units() else "float32"
    return faster_dtype(*shape_of(getattr(config, "model_path", "")))


# float16 is not a choice on a CPU: with avx512_fp16 its products take as long as those of float32.
@cache
def faster_dtype(width: int, inner: int, parameters: int) -> str:
    """Return bfloat16 if a product of these widths is 1.1 times as fast in it, else float32.

    Float32 weights that would not fit in memory are bfloat16, too. A line says what was measured.
    Products that take microseconds are not measured: they are float32.
    """
    if width * inner < SMALL:
        return "float32"
    bound_primitives()
    tokens = max(16, min(512, 2**29 // (width * inner)))
    slow, fast = (product_ms(tokens, width, inner, dtype)
                  for dtype in (torch.float32, torch.bfloat16))
    dtype = "bfloat16" if slow >= 1.1 * fast else "float32"
    why = ""
    if 6 * parameters > free_memory():  # 4 bytes each, and half as much for a copy and the rest
        dtype, why = "bfloat16", "; in float32 the weights would not fit in memory"
    print(f"dtype {dtype}: a product of {tokens} x {width} x {inner} takes {fast:.1f} ms in "
          f"bfloat16 and {slow:.1f} in float32{why}")
    return dtype


def product_ms(tokens: int, width: int, inner: int, dtype) -> float:
    """Return the milliseconds of one product, the least of five after a warm-up."""
    x, weight = torch.ones(tokens, width, dtype=dtype), torch.ones(inner, width, dtype=dtype)
    seconds = []
    for _ in range(6):
        began = time.perf_counter()
        torch.nn.functional.linear(x, weight)
        seconds.append(time.perf_counter() - began)
    return 1000 * min(seconds[1:])


def shape_of(path: str):
    """Return hidden width, MLP width and number of weights of a model, roughly.

    They are of its config.json in a folder or in the hub's cache. Without one, of Qwen2.5-0.5B.
    """
    width, inner, layers, vocabulary = 896, 4864, 24, 151936
    with suppress(Exception):  # load_model says what is wrong
        folder = newest(path)
        folder = base_of(folder) if is_adapter(folder) else folder
        file = Path(folder, "config.json")
        if not file.exists():
            from huggingface_hub import try_to_load_from_cache  # not with every --help
            file = Path(try_to_load_from_cache(folder, "config.json"))
        known = read_json(file)
        known = known.get("text_config", known)
        width = int(known.get("hidden_size", width))
        inner = int(np.max(known.get("intermediate_size", inner)))  # gemma3n: one for each layer
        layers = int(known.get("num_hidden_layers", layers))
        vocabulary = int(known.get("vocab_size", vocabulary))
    return width, inner, layers * width * (3 * inner + 3 * width) + vocabulary * width


def free_memory() -> float:
    """Return the bytes that this machine has free, infinity where it does not say."""
    info = Path("/proc/meminfo")
    lines = info.read_text("utf-8").splitlines() if info.exists() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")),
                torch.inf)


def has_units() -> bool:
    """True if the processor has instructions for bfloat16."""
    info = Path("/proc/cpuinfo")
    words = info.read_text("utf-8").split() if info.exists() else []
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(words)


def bound_primitives():
    """Bound oneDNN's cache of compiled shapes. Call it before the first product.

    Its 1,024 entries, which batches of ever new lengths fill, hold over 1 GB.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")


def give_back_memory():
    """Return freed memory to the system.

    glibc would keep it, and the peaks of rollout and update would add up.
    """
    with suppress(AttributeError, TypeError):  # another C library, and that of Windows
        ctypes.CDLL(None).malloc_trim(0)
