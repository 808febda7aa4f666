"""The newcomer's command for three seeds, and for each the controls that show what RL did: shuffled rewards, learning
rate 0.

    python bench/newcomer.py            25 minutes on 2 cores; writes bench/results/newcomer.json and newcomer.png

Each seed is `python grpo.py --seed S`, start to finish, alone on the machine, timed from outside. The controls start
from that run's own base model; their time says nothing, so they run two at a time.
"""
import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SEEDS, RESULTS = (0, 1, 2), os.path.join(ROOT, "bench", "results")


def grpo(folder, *flags, **environment):
    """One run -> its result; one that an earlier call of this script finished is read, not run again."""
    command = [sys.executable, os.path.join(ROOT, "grpo.py"), "--output_dir", folder, "--overwrite", *map(str, flags)]
    began, kept = time.time(), os.path.join(folder, "newcomer.json")
    if not os.path.exists(kept):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                       env={**os.environ, **environment})
        with open(os.path.join(folder, "result.json")) as f, open(kept, "w") as out:
            json.dump({**json.load(f), "wall_seconds": round(time.time() - began, 1), **environment}, out)
    with open(kept) as f:
        return json.load(f)


def control(out, seed, label, flags):
    folder = os.path.join(out, f"seed{seed}_{label.replace(' ', '_')}")
    base = os.path.join(out, f"seed{seed}", "base")
    row = grpo(folder, "--model_path", base, "--seed", seed, "--learning_rate", 2e-3, "--kl_coef", 0.3,
               "--updates_per_step", 2, *flags, OMP_NUM_THREADS="1")
    return {name: value for name, value in row.items() if "seconds" not in name}, curve(folder)


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
        print(json.dumps(rows), flush=True)
    kinds = {"shuffled rewards": ["--shuffle_rewards"], "learning rate 0": ["--learning_rate", 0, "--max_steps", 5]}
    with ThreadPoolExecutor(2) as pool:
        jobs = {f"seed {seed}, {label}": pool.submit(control, out, seed, label, flags)
                for label, flags in kinds.items() for seed in SEEDS}
        for label, job in jobs.items():
            rows[label], values = job.result()
            if "shuffled" in label:
                curves[label] = values
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
