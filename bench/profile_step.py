"""Where the seconds of one GRPO step go, and how far that is from the rate at which this machine multiplies matrices.

    python bench/profile_step.py --model_path .real/smollm2      two minutes on one core

The step is that of bench/vs_trl.py (8 samples of each prompt, adapter merged, bfloat16), smaller and on one thread,
after one step to warm up. It runs under torch's profiler, which adds to what is small. Operations are put into the
groups below by their own seconds. The bound is the time that the products with weights would take at the rate of one
large bfloat16 product, measured here before and after: so nothing else may run. Writes bench/results/profile_step.json;
the last line is JSON.
"""
import argparse
import datetime
import json
import os
import sys
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from bench.learning import RESULTS, write_json  # noqa: E402
GROUPS = {  # the first group with a word that the operation's name contains
    "products with weights": ("_linear_pointwise", "aten::mm", "aten::addmm", "aten::linear"),
    "products of attention": ("aten::bmm", "scaled_dot_product"),
    "softmax": ("softmax",),
    "copies and changes of dtype": ("copy_", "_to_copy", "cat", "index", "gather", "scatter", "contiguous", "clone"),
    "element-wise": ("add", "mul", "sub", "div", "exp", "silu", "pow", "sqrt", "mean", "sum", "neg", "cumsum", "norm",
                     "cos", "sin", "clamp", "where", "fill", "zero", "max", "min", "masked", "random", "searchsorted"),
}


def group_of(name: str) -> str:
    return next((group for group, words in GROUPS.items() if any(word in name for word in words)),
                "Python, views, allocation and the rest")


def table(profiler) -> dict:
    """Return {group: seconds} of what was profiled."""
    groups = {}
    for event in profiler.key_averages():
        group = group_of(event.key)
        groups[group] = groups.get(group, 0.0) + event.self_cpu_time_total / 1e6
    return groups


def products(model, prompts, args) -> dict:
    """Return the GFLOP of the products with weights. A prompt runs once for its samples, the head on samples only."""
    head = model.get_output_embeddings().weight
    weights = sum(m.weight.numel() for m in model.base_model.modules() if isinstance(m, torch.nn.Linear))
    sampled = len(prompts) * args.samples * args.tokens
    tokens = sum(map(len, prompts)) + sampled
    forward = 2 * (weights * tokens + head.numel() * sampled) / 1e9
    # The backward pass multiplies once more for the inputs. Frozen weights need no gradient.
    return {"rollout": forward, "update": 2 * forward}


def rate() -> float:
    """Return GFLOP/s of a large product in bfloat16, the median of five."""
    a = torch.randn(2048, 2048).bfloat16()
    seconds = []
    for _ in range(6):
        began = time.perf_counter()
        a @ a
        seconds.append(time.perf_counter() - began)
    return 2 * 2048**3 / sorted(seconds[1:])[2] / 1e9


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_path", default=".real/smollm2")
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(1)
    import bench.completions
    from bench import vs_trl
    from extras.fast.processor import bound_primitives
    from layers import load_model
    args = vs_trl.arguments(["--model_path", options.model_path, "--prompts", str(options.prompts),
                             "--tokens", str(options.tokens)])
    bound_primitives()
    model, tokenizer = load_model(args.model_path, lora_r=vs_trl.LORA_R, lora_alpha=vs_trl.LORA_ALPHA, dtype="bfloat16")
    prompts = [list(tokenizer.apply_chat_template(c, add_generation_prompt=True)["input_ids"])
               for c in vs_trl.conversations(args.prompts)]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-6, weight_decay=0.0)
    vs_trl.our_step(model, tokenizer, optimizer, prompts, 0, args)
    rates = [rate()]
    plain, _ = vs_trl.our_step(model, tokenizer, optimizer, prompts, 1, args)
    # The rollout ends where `generate` returns; what follows is the update.
    profiles = {name: profile(activities=[ProfilerActivity.CPU]) for name in ("rollout", "update")}
    generate = bench.completions.generate

    def profiled(*words, **named):
        with profiles["rollout"]:
            out = generate(*words, **named)
        profiles["update"].start()
        return out

    bench.completions.generate = profiled
    vs_trl.our_step(model, tokenizer, optimizer, prompts, 1, args)
    profiles["update"].stop()
    rates.append(rate())
    tables = {name: table(profiler) for name, profiler in profiles.items()}
    work = products(model, prompts, args)
    print(f"{'':42} {'seconds':>8} {'share':>6} {'GFLOP/s':>8}")
    for name, groups in tables.items():
        total = sum(groups.values())
        for group, seconds in sorted(groups.items(), key=lambda item: -item[1]):
            speed = f"{work[name] / seconds:8.0f}" if group == "products with weights" else ""
            print(f"{name + ': ' + group:42} {seconds:8.2f} {seconds / total:6.0%} {speed}")
    result = {"command": "python " + " ".join(sys.argv), "date": datetime.date.today().isoformat(),
              "machine": f"one of {os.cpu_count()} shared cores, no GPU", "step_seconds": plain["step"],
              "rollout_seconds": plain["rollout"], "groups": tables, "gflop": work, "gflop_per_second": rates,
              "bound_seconds": sum(work.values()) / max(rates)}
    result["of_the_bound"] = result["bound_seconds"] / plain["step"]
    print(f"step {plain['step']:.1f} s (rollout {plain['rollout']:.1f}); all products at {max(rates):.0f} GFLOP/s: "
          f"{result['bound_seconds']:.1f} s, {result['of_the_bound']:.0%} of it")
    result = write_json(RESULTS / "profile_step.json", result, args)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
