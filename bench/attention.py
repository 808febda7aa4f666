"""Attention of a training pass on a CPU: `extras/fast/products.py` against torch's kernel, forward and backward.

    python bench/attention.py [--rounds 9] [--output FILE]

Shapes of the tiny model (4 heads, 2 of keys, width 32) and of SmolLM2-135M (9, 3, 64): rows of some tokens, and rows
behind a prompt that they share, as `core.packing` has them. The two take turns in one process. Printed are the medians
of this thread's CPU seconds, in milliseconds; `ratio` is torch's over the products': below 1 torch's kernel is faster.
The last line is JSON.
"""
import argparse
import json
import os
import sys
import time
from datetime import date
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from bench.learning import write_json  # noqa: E402

# Heads, heads of keys, width, tokens of the shared prompt, rows, tokens of a row.
SHAPES = {"tiny, rows of 170": (4, 2, 32, 0, 16, 170), "tiny, prompt of 60": (4, 2, 32, 60, 16, 100),
          "SmolLM2, rows of 256": (9, 3, 64, 0, 8, 256), "SmolLM2, prompt of 150": (9, 3, 64, 150, 8, 200)}


def measure(shape, dtype, rounds) -> dict:
    """Return the milliseconds of both for a shape."""
    import torch
    from types import SimpleNamespace

    from core.packing import packed_attention
    from extras.fast import products
    heads, kv_heads, width, P, B, W = shape
    rows, T = (1, P + B * W) if P else (B, W)
    query, key, value = (torch.randn(rows, n, T, width, dtype=dtype, requires_grad=True) for n in (heads, kv_heads, kv_heads))
    slope = torch.randn(rows, T, heads, width, dtype=dtype)
    module = SimpleNamespace(num_key_value_groups=heads // kv_heads, is_causal=True)

    def ours():
        inputs = query, key, value
        out = products.packed(width**-0.5, P, B, *inputs) if P else products.causal(width**-0.5, *inputs)
        out.backward(slope)

    def stock():
        prefix = (P, B) if P else None
        packed_attention(module, query, key, value, None, shared_prefix=prefix, scaling=width**-0.5)[0].backward(slope)
    seconds = {"products": [], "stock": []}
    for number in range(rounds + 2):
        for name, run in (("products", ours), ("stock", stock)):
            began = time.thread_time()
            run()
            if number > 1:
                seconds[name].append(time.thread_time() - began)
    return {name: round(1000 * median(of), 1) for name, of in seconds.items()}


def main():
    import torch
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", default="")
    args = parser.parse_args()
    torch.set_num_threads(1)
    flags = Path("/proc/cpuinfo").read_text() if os.path.exists("/proc/cpuinfo") else ""
    result = {"command": "python " + " ".join([os.path.relpath(__file__, ROOT), *sys.argv[1:]]), "date": str(date.today()),
              "threads": 1, "units": [unit for unit in ("amx_bf16", "avx512_bf16", "avx512_fp16") if unit in flags], "ms": {}}
    for name, shape in SHAPES.items():
        for dtype in (torch.float32, torch.bfloat16):
            ms = measure(shape, dtype, args.rounds)
            ms["ratio"] = round(ms["stock"] / ms["products"], 2)
            label = f"{name}, {str(dtype).removeprefix('torch.')}"
            result["ms"][label] = ms
            print(f"{label}: {ms['products']} ms by products, {ms['stock']} by torch's kernel", flush=True)
    if args.output:
        result = write_json(args.output, result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
