"""Estimate the seconds of a GRPO step on small GPUs that nobody here has: an estimate, and no measurement.

    python bench/cards.py                         half a minute, no GPU
    python bench/cards.py --against OLD.json      puts the calibration of an earlier call beside today's counts

The kernels of an update are counted on the meta device (bench/launches.py), each with its bytes and FLOPs. A kernel
takes the longest of a floor, its bytes at the card's bandwidth, and its FLOPs at the card's rate. The processor launches
one every LAUNCH seconds, while the card works: an update takes the longer of the two. A decode step is a CUDA graph:
its kernels as the H200 ran them, GRAPH seconds each, plus the bytes of weights and keys at the card's bandwidth.

`calibration` says how far the same model is off where there are measurements (bench/results/gpu_h200.json and
gpu_h100_80gb_hbm3.json): kernel time and wall time of updates, modelled / measured. It has to be made with the code
that was measured, commit 8c4a44d5 or older. `kernel_factor`, the median of modelled / measured kernel time, corrects the
estimates of the cards; the range of the single ratios is how wrong they may be at least.

A step is 8 episodes of 2,048 tokens, of which 256 are written, `--batch_size 1`: the step of docs/memory.md's table.
Published peaks of the cards, of products that add in float32. The last line is the JSON.
"""
import argparse
import datetime
import json
import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from bench.gpu_parts import SHAPES  # noqa: E402
from bench.launches import Launches, count, write_shape  # noqa: E402

RESULTS = ROOT / "bench" / "results"
FLOOR = 2e-6  # seconds that the smallest kernel takes on a card
LAUNCH = {"plain": 28e-6, "checkpoint": 28e-6, "4bit": 45e-6}  # seconds of the processor for a launch (H200's machine)
GRAPH = 3.6e-6  # seconds of a kernel in a CUDA graph of a decode step, beside its bytes (H200)
EFFICIENT = 0.85  # share of a published bandwidth that a copy reaches
BUSY = 0.75  # share of a published rate that a large product reaches
# card -> GiB, GB/s, TFLOP/s in 16 bits
CARDS = {"RTX 3050 Laptop, 4 GB": (4, 192, 14), "RTX 3060, 12 GB": (12, 360, 25), "RTX 4060, 8 GB": (8, 272, 30)}
EPISODES, TOKENS, WRITTEN = 8, 2048, 256
FROM_ROWS = {"index", "gather", "embedding", "index_put", "index_put_", "index_select"}  # they read no whole table


class Cost(Launches):
    """The bytes and FLOPs of each kernel, (n, 3) with the number of its launches."""

    def __init__(self, *args):
        super().__init__(*args)
        self.costs = []

    def note(self, name, launched, inputs, results):
        read, written = ([x for x in tree_leaves(tree) if isinstance(x, torch.Tensor) and x.is_meta]
                         for tree in (inputs, results))
        size = sum(map(bytes_of, written))
        size = 3 * size if name in FROM_ROWS else size + sum(map(bytes_of, read))
        self.costs.append((launched, size, flops(name, read)))


def bytes_of(tensor) -> int:
    """Return the bytes of a tensor, of an expanded one those that are there."""
    if 0 in tensor.stride():
        return tensor.untyped_storage().nbytes()
    return tensor.numel() * tensor.element_size()


def flops(name: str, tensors) -> float:
    """Return the FLOPs of a product or of attention, 0 for all else."""
    if name in ("mm", "addmm", "addmm_", "bmm", "baddbmm_"):
        a, b = [x for x in tensors if x.dim() >= 2][-3 if name == "out" else -2:][:2]
        return 2.0 * a.numel() * b.shape[-1]
    if "attention" in name:
        query, key = tensors[1:3] if "backward" in name else tensors[:2]
        # Causal attention does half of the square, and its backward pass five products for two.
        return 2.0 * query.numel() * key.shape[2] * (2.5 if "backward" in name else 1)
    return 0.0


def kernel_seconds(costs, bandwidth: float, rate: float) -> float:
    """Return how long these kernels take on a card of so many bytes/s and FLOP/s."""
    return sum(launched * max(FLOOR, size / launched / bandwidth, work / launched / rate)
               for launched, size, work in costs)


def calibration() -> dict:
    """Return modelled and measured milliseconds of updates at 0.5B's shape."""
    h200 = json.loads((RESULTS / "gpu_h200.json").read_text())["steps"]
    machine = json.loads((RESULTS / "gpu_h200_2026-11-28.json").read_text())["machine"]
    h100 = json.loads((RESULTS / "gpu_h100_80gb_hbm3.json").read_text())
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        write_shape("0.5B", Path(folder))
        for memory in ("plain", "4bit"):
            for n in (1, 8):
                cost = count(folder, memory, n, 1024, 512, False, Cost)
                measured = h200[memory][f"update {n}x1024"]
                kernels = 1000 * kernel_seconds(cost.costs, machine["bandwidth"], machine["bf16_flops"])
                rows[f"H200, {memory}, {n} rows"] = {
                    "kernels": cost.kernels, "kernels_measured": measured["kernels"],
                    "kernel_ms": kernels, "kernel_ms_measured": measured["kernel_ms"],
                    "wall_ms": max(kernels, 1000 * cost.kernels * LAUNCH[memory]), "wall_ms_measured": measured["wall_ms"]}
                tokens = h100["shapes"]["0.5B"].get("update", {}).get(f"{memory}, {n} rows", {}).get("tokens_per_second")
                if tokens:
                    kernels = 1000 * kernel_seconds(cost.costs, h100["machine"]["bandwidth"], h100["machine"]["bf16_flops"])
                    rows[f"H100, {memory}, {n} rows"] = {
                        "wall_ms": max(kernels, 1000 * cost.kernels * LAUNCH[memory]), "wall_ms_measured": 1000 * 1024 * n / tokens}
    for row in rows.values():
        for name in ("kernels", "kernel_ms", "wall_ms"):
            if name in row:
                row[f"{name} modelled / measured"] = round(row[name] / row[f"{name}_measured"], 3)
    return rows


def weights_bytes(shape: str, memory: str) -> float:
    """Return the bytes of the weights that a decode step reads."""
    config = SHAPES[shape][0]
    width, inner = config["hidden_size"], config["intermediate_size"]
    kv = width * config["num_key_value_heads"] // config["num_attention_heads"]
    layers = config["num_hidden_layers"] * width * (3 * inner + 2 * width + 2 * kv)
    return layers * (4.13 / 8 if memory == "4bit" else 2) + 2 * width * config["vocab_size"]


def decode_seconds(shape: str, memory: str, bandwidth: float) -> float:
    """Return the seconds of a decode step of EPISODES rows, in the middle of what they write."""
    config = SHAPES[shape][0]
    window = json.loads((RESULTS / "gpu_h200.json").read_text())["steps"]["4bit" if memory == "4bit" else "plain"]
    kernels = window["decode 8"]["window"]["kernels"] / 4 * config["num_hidden_layers"] / 24
    keys = 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * (
        config["hidden_size"] // config["num_attention_heads"])  # bytes of a token
    read = weights_bytes(shape, memory) + EPISODES * (TOKENS - WRITTEN / 2) * keys
    return kernels * GRAPH + read / bandwidth


def estimates(factor: float) -> list[dict]:
    """Return a row for each card and shape, at the first setting of --memory that fits, if it is one of LAUNCH."""
    rows, costs = [], {}
    needed = json.loads((RESULTS / "memory.json").read_text())["mib"]
    for card, (gib, bandwidth, rate) in CARDS.items():
        bandwidth, rate = 1e9 * bandwidth * EFFICIENT, 1e12 * rate * BUSY
        for shape in ("0.5B", "1.5B", "3B"):
            fits = [name for name, mib in needed[f"Qwen2.5-{shape}"].items() if mib[0] <= 1024 * gib]
            if not fits or fits[0] not in LAUNCH:
                continue
            memory = fits[0]
            if (shape, memory) not in costs:
                with tempfile.TemporaryDirectory() as folder:
                    costs[shape, memory] = count(write_shape(shape, Path(folder)), memory, 1, TOKENS, TOKENS - WRITTEN, False, Cost)
            cost = costs[shape, memory]
            card_s = kernel_seconds(cost.costs, bandwidth, rate) / factor
            launch_s = cost.kernels * LAUNCH[memory]
            prefill = 2 * weights_bytes(shape, "plain") / 2 * (TOKENS - WRITTEN) / rate
            rollout = prefill + WRITTEN * decode_seconds(shape, memory, bandwidth)
            update = EPISODES * max(card_s, launch_s)
            rows.append({"card": card, "shape": shape, "memory": memory, "rollout_seconds": rollout, "update_seconds": update,
                         "step_seconds": rollout + update, "kernels": cost.kernels,
                         "limit": "launches" if launch_s > card_s else "the card",
                         "tokens_per_second_of_update": EPISODES * TOKENS / update})
    return rows


def main(args) -> dict:
    checked = json.loads(args.against.read_text().splitlines()[-1])["calibration"] if args.against else calibration()
    ratios = [row["kernel_ms modelled / measured"] for row in checked.values() if "kernel_ms" in row]
    factor = statistics.median(ratios)
    result = {"estimate": "no measurement: counted bytes, FLOPs and launches", "date": datetime.date.today().isoformat(),
              "command": "python bench/cards.py " + " ".join(sys.argv[1:]), "machine": "any: counted on the meta device",
              "seed": None, "calibration": checked, "kernel_ratios": ratios, "kernel_factor": factor,
              "calibration_of": "commit 8c4a44d5, whose updates were measured" if args.against else "this code",
              "episodes": EPISODES, "tokens": TOKENS, "written": WRITTEN,
              "rows": [] if args.calibrate else estimates(factor)}
    for name, row in checked.items():
        print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in row.items() if "/" in key))
    for row in result["rows"]:
        print("{card:24} {shape:5} {memory:10} rollout {rollout_seconds:6.1f} s, update {update_seconds:6.1f} s; limit: {limit}".format(**row))
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="a file whose last line is an earlier call's JSON: its calibration counts")
    parser.add_argument("--calibrate", action="store_true", help="only compare with the measurements")
    main(parser.parse_args())
