"""Choose the default LoRA learning rate of GRPO on a real model: one SFT, then GRPO at each rate from the same start.

    python ../shared/real/get_smollm2.py .real/smollm2
    python bench/learning_rates.py --rates 1e-4,2e-4 --seeds 0,1,2

SmolLM2-135M, `equations`, everything else at its default but 4 x 8 episodes a step and 20 steps; the model gets the
tiny model's short chat template, as in bench/real_model.py. A finished run is not repeated, so several processes may
share the runs. Writes bench/results/learning_rates.json after every run; the last line is JSON.
"""
import argparse
import datetime
import itertools
import json
import os
import shutil
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
from bench.learning import RESULTS, write_json  # noqa: E402


# Of the SFT, and held-out tasks of an evaluation.
SFT_STEPS = 60
SFT_SAMPLES = 400
EVAL_TASKS = 100


def short_template(model_path, folder):
    """Make `folder` a copy of the model (links) with a chat template that shows tools in few tokens."""
    from core.tiny import TINY_TEMPLATE
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(model_path, folder, copy_function=lambda a, b: os.symlink(os.path.abspath(a), b))
    os.remove(os.path.join(folder, "chat_template.jinja"))
    with open(os.path.join(folder, "chat_template.jinja"), "w") as file:
        file.write(TINY_TEMPLATE)
    return folder


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_path", default=".real/smollm2")
    parser.add_argument("--rates", default="1e-4,2e-4")
    parser.add_argument("--seeds", default="0,1,2", help="of GRPO; the start is the same")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", default=os.path.join(ROOT, "runs", "learning_rates"))
    args = parser.parse_args()
    import grpo
    import sft
    from bench.learning import spread
    taught = os.path.join(args.out, "sft")
    if not os.path.exists(os.path.join(taught, "result.json")):
        model = short_template(args.model_path, os.path.join(args.out, "model"))
        sft.train(sft.Config(
            model_path=model, output_dir=taught, lora_r=16, learning_rate=3e-4, max_samples=SFT_SAMPLES,
            expert_noise=0.7, max_turns=6, batch_size=8, max_steps=SFT_STEPS, eval_tasks=0,
            dtype="bfloat16", overwrite=True))
    rows = {}
    for rate, seed in itertools.product(args.rates.split(","), args.seeds.split(",")):
        folder = os.path.join(args.out, f"grpo_{rate}_{seed}")
        result = grpo.train(grpo.Config(
            model_path=taught, output_dir=folder, learning_rate=float(rate), tasks_per_step=4, group_size=8,
            batch_size=8, max_steps=args.steps, eval_tasks=EVAL_TASKS, seed=int(seed), resume=True))
        with open(os.path.join(folder, "metrics.jsonl")) as file:
            lines = [json.loads(line) for line in file]
        row = rows.setdefault(rate, {"runs": []})
        row["runs"].append({**result, "success_in_training": [line["success"] for line in lines]})
        for name in ("success_before", "success_after"):
            values = [run[name] for run in row["runs"]]
            row[name] = {"values": values, **spread(values)}
        report = {"command": "python " + " ".join(sys.argv), "date": datetime.date.today().isoformat(),
                  "machine": f"{os.cpu_count()} cores, no GPU", "steps": args.steps, "rows": rows}
        write_json(RESULTS / "learning_rates.json", report, args)
        print(rate, seed, result, flush=True)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
