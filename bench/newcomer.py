"""The newcomer's command for three seeds, and for each the controls that show what RL did: shuffled rewards, learning
rate 0.

    python bench/newcomer.py            25 minutes on 2 cores; writes bench/results/newcomer.json and newcomer.png

Each seed is `python grpo.py --seed S`, start to finish, timed from outside. The controls start from that run's own base
model.
"""
import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SEEDS, RESULTS = (0, 1, 2), os.path.join(ROOT, "bench", "results")


def grpo(folder, *flags):
    command = [sys.executable, os.path.join(ROOT, "grpo.py"), "--output_dir", folder, "--overwrite", *map(str, flags)]
    began = time.time()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with open(os.path.join(folder, "result.json")) as f:
        return {**json.load(f), "wall_seconds": round(time.time() - began, 1)}


def curve(folder, name="success"):
    with open(os.path.join(folder, "metrics.jsonl")) as f:
        return [json.loads(line)[name] for line in f]


def main(out):
    os.makedirs(RESULTS, exist_ok=True)
    rows, curves = {}, {}
    for seed in SEEDS:
        run = os.path.join(out, f"seed{seed}")
        rows[f"seed {seed}"] = grpo(run, "--seed", seed)
        shutil.copy(os.path.join(run, "metrics.jsonl"), os.path.join(RESULTS, f"newcomer_seed{seed}.jsonl"))
        curves[f"seed {seed}"] = curve(run)
        for label, flags in (("shuffled rewards", ["--shuffle_rewards"]), ("learning rate 0", ["--learning_rate", 0])):
            rows[f"seed {seed}, {label}"] = grpo(
                os.path.join(out, f"control{seed}"), "--model_path", os.path.join(run, "base"), "--seed", seed,
                "--learning_rate", 2e-3, "--max_steps", 90 if "shuffled" in label else 5, *flags)
            if "shuffled" in label:
                curves[f"seed {seed}, {label}"] = curve(os.path.join(out, f"control{seed}"))
        print(json.dumps(rows), flush=True)
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    plt.figure(figsize=(7, 4))
    for label, values in curves.items():
        smooth = [sum(values[max(0, i - 4):i + 1]) / len(values[max(0, i - 4):i + 1]) for i in range(len(values))]
        plt.plot(smooth, label=label, linestyle=":" if "shuffled" in label else "-", color=f"C{label[5]}")
    plt.xlabel("GRPO step"), plt.ylabel("success in training tasks (mean of 5 steps)")
    plt.ylim(0, 1), plt.grid(alpha=0.3), plt.legend()
    plt.tight_layout(), plt.savefig(os.path.join(RESULTS, "newcomer.png"), dpi=120)
    result = {"command": "python bench/newcomer.py", "date": datetime.date.today().isoformat(), "rows": rows,
              "machine": f"{platform.machine()}, {os.cpu_count()} cores, no GPU"}
    with open(os.path.join(RESULTS, "newcomer.json"), "w") as f:
        json.dump(result, f, indent=1)
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else os.path.join(ROOT, "runs", "newcomer"))
