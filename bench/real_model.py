"""A real model on real data: SmolLM2-135M learns `equations` (SFT on noisy demonstrations, then GRPO), and takes GRPO
steps on gsm8k.

    python ../shared/real/get_smollm2.py .real/smollm2
    python bench/real_model.py --model_path .real/smollm2 --gsm8k ../shared/data/gsm8k/train.jsonl

20 minutes on 2 cores. Writes bench/results/real_model.json, which holds the curves, and real_model.svg.
For `equations` the model gets a chat template that shows tools (tiny.py's: ChatML is what SmolLM2 was trained on),
which is six times shorter than tools as text; for gsm8k it is used as it is.
"""
import argparse
import datetime
import json
import os
import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[1])
sys.path.insert(0, ROOT)
from bench.learning import RESULTS, series, write_json  # noqa: E402

CURVES = "success", "reward", "entropy"


def gpu() -> str:
    import torch
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"


def draw(seeds, path, window=5):
    """Draw the curves of the GRPO runs thin, and their means over five steps thick."""
    from bench.pictures import COLORS, figure, save
    picture, panels = figure(1, len(CURVES), width=9, height=2.8)
    colors = list(COLORS.values())
    for panel, name in zip(panels, CURVES):
        for color, seed in zip(colors, seeds):
            values = seed["rows"]["grpo"]["curves"][name]
            windows = [values[max(0, i - window + 1):i + 1] for i in range(len(values))]
            panel.plot(values, alpha=0.3, color=color, linewidth=1)
            panel.plot([sum(part) / len(part) for part in windows], color=color)
        panel.set(title=f"{name} in training", xlabel="GRPO step")
    panels[0].set_ylim(0, 1)
    save(picture, path)


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
    for name, folder in (("grpo", learned), ("gsm8k", math)):
        rows[name]["curves"] = {curve: series(folder, curve) for curve in (*CURVES, "first_ratio")}
    result = {"command": "python " + " ".join(sys.argv), "date": datetime.date.today().isoformat(), "rows": rows,
              "machine": f"{os.cpu_count()} cores, {gpu()}"}
    os.makedirs(RESULTS, exist_ok=True)
    draw([result], os.path.join(RESULTS, "real_model.svg"))
    result = write_json(RESULTS / "real_model.json", result, args)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
