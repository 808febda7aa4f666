"""A real model on real data: SmolLM2-135M learns `equations` (SFT on noisy demonstrations, then GRPO), and takes GRPO
steps on gsm8k.

    python ../shared/real/get_smollm2.py .real/smollm2
    python bench/real_model.py --model_path .real/smollm2 --gsm8k ../shared/data/gsm8k/train.jsonl

20 minutes on 2 cores. Writes bench/results/real_model.json, its curves as real_model.png and the runs' metrics.jsonl.
For `equations` the model gets a chat template that shows tools (tiny.py's: ChatML is what SmolLM2 was trained on),
which is six times shorter than tools as text; for gsm8k it is used as it is.
"""
import argparse
import datetime
import json
import os
import shutil
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
RESULTS = os.path.join(ROOT, "bench", "results")


def lines(folder):
    with open(os.path.join(folder, "metrics.jsonl")) as f:
        return [json.loads(line) for line in f]


def gpu() -> str:
    import torch
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"


def plot(runs, title, path):
    """Draw the curves of these runs' metrics, and thick their means over five steps."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.2))
    for axis, name in zip(axes, ("success", "reward", "entropy")):
        for i, run in enumerate(runs):
            values = [line[name] for line in run]
            axis.plot(values, alpha=0.25, color=f"C{i}")
            windows = [values[max(0, i - 4):i + 1] for i in range(len(values))]
            axis.plot([sum(window) / len(window) for window in windows], color=f"C{i}")
        axis.set_title(name), axis.set_xlabel("GRPO step"), axis.grid(alpha=0.3)
    figure.suptitle(f"SmolLM2-135M, equations: {title}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_path", default=".real/smollm2")
    parser.add_argument("--gsm8k", default="../shared/data/gsm8k/train.jsonl")
    parser.add_argument("--out", default=os.path.join(ROOT, "runs", "real_model"))
    parser.add_argument("--sft_steps", type=int, default=60, help="0: continue from an earlier OUT/sft")
    parser.add_argument("--grpo_steps", type=int, default=20)
    parser.add_argument("--gsm8k_steps", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    import grpo
    import sft
    from bench.learning_rates import short_template

    model = short_template(args.model_path, os.path.join(args.out, "model"))
    common = {"dtype": "bfloat16", "seed": args.seed, "overwrite": True}
    taught, learned, math = (os.path.join(args.out, name) for name in ("sft", "grpo", "gsm8k"))
    rows = {"sft": {} if not args.sft_steps else sft.train(sft.Config(
        model_path=model, output_dir=taught, lora_r=16, learning_rate=3e-4, max_samples=400,
        expert_noise=0.7, max_turns=6, batch_size=8, gradient_accumulation_steps=1, max_steps=args.sft_steps,
        eval_tasks=0, **common))}
    rows["grpo"] = grpo.train(grpo.Config(
        model_path=taught, output_dir=learned, learning_rate=4e-4, tasks_per_step=4, group_size=8, batch_size=8,
        max_steps=args.grpo_steps, eval_tasks=100, **common))
    rows["gsm8k"] = grpo.train(grpo.Config(
        model_path=args.model_path, output_dir=math, env="gsm8k", dataset=args.gsm8k, learning_rate=2e-5,
        tasks_per_step=4, group_size=4, batch_size=4, max_new_tokens=128, max_tokens=900, max_turns=3,
        env_options="num_turns=2",
        max_steps=args.gsm8k_steps, eval_tasks=0, **common))
    os.makedirs(RESULTS, exist_ok=True)
    for name, folder in (("grpo", learned), ("gsm8k", math)):
        shutil.copy(os.path.join(folder, "metrics.jsonl"), os.path.join(RESULTS, f"real_model_{name}.jsonl"))
    before, after = rows["grpo"]["success_before"], rows["grpo"]["success_after"]
    plot([lines(learned)], f"held-out success {before:.2f} to {after:.2f}", os.path.join(RESULTS, "real_model.png"))
    result = {"command": "python " + " ".join(sys.argv), "date": datetime.date.today().isoformat(), "rows": rows,
              "machine": f"{os.cpu_count()} cores, {gpu()}"}
    with open(os.path.join(RESULTS, "real_model.json"), "w") as f:
        json.dump(result, f, indent=1)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
