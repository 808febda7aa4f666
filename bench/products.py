"""What does a product take in each dtype on this CPU? That decides the default of --dtype (extras/fast/processor.py).

    python bench/products.py [--output FILE]

Products of the tiny model, SmolLM2-135M and Qwen2.5-0.5B (512 tokens, hidden width, MLP width), the least of five by the
wall clock, with the threads that torch takes (OMP_NUM_THREADS). Printed are milliseconds and GFLOP/s. The last line is JSON.
"""
import argparse
import json
import os
import sys
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from bench.learning import write_json  # noqa: E402

SHAPES = {"tiny": (512, 128, 384), "SmolLM2-135M": (512, 576, 1536), "Qwen2.5-0.5B": (512, 896, 4864)}


def main():
    import torch

    import layers  # noqa: F401  the settings of the processor
    from extras.fast.processor import bound_primitives, product_ms
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="")
    args = parser.parse_args()
    bound_primitives()
    flags = Path("/proc/cpuinfo").read_text() if os.path.exists("/proc/cpuinfo") else ""
    result = {"command": "python " + " ".join([os.path.relpath(__file__, ROOT), *sys.argv[1:]]), "date": str(date.today()),
              "threads": torch.get_num_threads(), "torch": torch.__version__,
              "units": [unit for unit in ("amx_bf16", "avx512_bf16", "avx512_fp16") if unit in flags], "ms": {}, "gflops": {}}
    for name, (tokens, width, inner) in SHAPES.items():
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            label = f"{name}, {str(dtype).removeprefix('torch.')}"
            ms = min(product_ms(tokens, width, inner, dtype) for _ in range(5))
            result["ms"][label] = round(ms, 3)
            result["gflops"][label] = round(2e-6 * tokens * width * inner / ms, 1)
            print(f"{label}: {ms:.2f} ms, {result['gflops'][label]:.0f} GFLOP/s", flush=True)
    if args.output:
        result = write_json(args.output, result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
