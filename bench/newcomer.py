"""The newcomer's command for three seeds, and for each the controls that show what GRPO did.

    python bench/newcomer.py                about 30 minutes on 2 cores
    python bench/newcomer.py --no_controls  12 minutes: the three runs alone

Each seed is `python grpo.py --seed S`, start to finish, timed from outside. Three controls start from that run's own
taught model: GRPO with the step's rewards dealt out at random, GRPO with learning rate 0, and SFT alone on the start's
own demonstrations, for as many steps as fit into the time that GRPO took, with a schedule that ends with them, at two
learning rates of which the better one is reported. Controls run two at a time, so their seconds say nothing. Writes
bench/results/newcomer.json and newcomer.png; the last line is JSON.
"""
import argparse
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
SHUFFLED = """
import random, sys
import grpo
from core import data
from layers import main
whole = data.shift_and_scale
def shuffled(trajectories, scaling, bias):
    whole(trajectories, scaling, bias)
    paid = [t.reward for t in trajectories]
    random.Random(repr(paid)).shuffle(paid)
    for t, reward in zip(trajectories, paid):
        t.rewards, t.reward = [0.0] * (len(t.rewards) - 1) + [reward], reward
data.shift_and_scale = shuffled
main(grpo.Config, grpo.train, "")
"""


def run(program, folder, *words, code=None, **environment):
    """Run a program into `folder` and return its result.json with the wall seconds.

    A finished run is not repeated.
    """
    row = os.path.join(folder, "row.json")
    if os.path.exists(row):
        with open(row) as file:
            return json.load(file)
    command = [sys.executable, *(["-c", code] if code else [program]), *map(str, words)]
    began = time.time()
    subprocess.run([*command, "--output_dir", folder, "--overwrite"], check=True, cwd=ROOT,
                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, **environment})
    with open(os.path.join(folder, "result.json")) as file:
        result = {**json.load(file), "wall_seconds": round(time.time() - began, 1)}
    with open(row, "w") as file:
        json.dump(result, file)
    return result


def curve(folder, name="success"):
    with open(os.path.join(folder, "metrics.jsonl")) as file:
        return [json.loads(line)[name] for line in file]


def sft_alone(folder, base, seed, seconds):
    """SFT on the start's demonstrations for `seconds` of two threads, at the better of two learning rates."""
    sys.path.insert(0, ROOT)
    from schooling import TINY_SFT
    words = [word for name, value in TINY_SFT.items() if name not in ("max_steps", "learning_rate")
             for word in (f"--{name}", value)]
    trial = f"{folder}_trial"
    run("sft.py", trial, "--model_path", base, "--seed", seed, *words, "--max_steps", 40, OMP_NUM_THREADS="1")
    with open(os.path.join(trial, "timing.jsonl")) as file:
        step_seconds = sorted(json.loads(line)["seconds"] for line in file)
    steps = int(seconds / step_seconds[len(step_seconds) // 2])
    rows = {}
    for rate in ("3e-4", "1e-3"):
        trained = f"{folder}_{rate}"
        row = run("sft.py", trained, "--model_path", base, "--seed", seed, *words,
                  "--max_steps", steps, "--learning_rate", rate, OMP_NUM_THREADS="1")
        # sft.py lets an episode have six turns. The exam is grpo.py's, with no step of training.
        exam = run("grpo.py", f"{trained}_exam", "--model_path", trained, "--seed", seed, "--max_steps", 0,
                   OMP_NUM_THREADS="1")
        rows[rate] = {**row, "success_after": exam["success_after"], "success_before": None}
    best = max(rows, key=lambda rate: rows[rate]["success_after"])
    return {**rows[best], "learning_rate": best, "both": {r: rows[r]["success_after"] for r in rows}}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=os.path.join(ROOT, "runs", "newcomer"))
    parser.add_argument("--no_controls", action="store_true")
    args = parser.parse_args()
    rows, curves = {}, {}
    for seed in SEEDS:
        folder = os.path.join(args.out, f"seed{seed}")
        rows[f"seed {seed}"] = run("grpo.py", folder, "--seed", seed)
        curves[f"seed {seed}"] = curve(folder)
        shutil.copy(os.path.join(folder, "metrics.jsonl"), os.path.join(RESULTS, f"newcomer_seed{seed}.jsonl"))
        print(json.dumps(rows), flush=True)
    with ThreadPoolExecutor(2) as pool:
        jobs = {}
        for seed in SEEDS if not args.no_controls else ():
            base, start = os.path.join(args.out, f"seed{seed}", "base"), os.path.join(args.out, f"control{seed}")
            words = "--model_path", base, "--seed", seed
            one = {"OMP_NUM_THREADS": "1"}
            jobs[f"seed {seed}, shuffled rewards"] = pool.submit(
                run, "grpo.py", f"{start}_shuffled", *words, code=SHUFFLED, **one)
            jobs[f"seed {seed}, learning rate 0"] = pool.submit(
                run, "grpo.py", f"{start}_zero", *words, "--learning_rate", 0, "--max_steps", 3, **one)
            jobs[f"seed {seed}, SFT alone"] = pool.submit(
                sft_alone, f"{start}_sft", base, seed, rows[f"seed {seed}"]["seconds"])
        for label, job in jobs.items():
            rows[label] = job.result()
    draw(curves)
    result = {"command": "python " + " ".join(sys.argv), "date": datetime.date.today().isoformat(), "rows": rows,
              "machine": f"{platform.machine()}, {os.cpu_count()} cores, no GPU"}
    with open(os.path.join(RESULTS, "newcomer.json"), "w") as file:
        json.dump(result, file, indent=1)
    print(json.dumps(result))


def draw(curves):
    """Draw success in training against steps, means of five, one line for each seed."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    plt.figure(figsize=(7, 3.6))
    for label, values in curves.items():
        windows = [values[max(0, i - 4):i + 1] for i in range(len(values))]
        plt.plot([sum(window) / len(window) for window in windows], label=label)
    plt.xlabel("GRPO step"), plt.ylabel("success in training tasks (mean of 5 steps)")
    plt.ylim(0, 1), plt.grid(alpha=0.3), plt.legend()
    plt.tight_layout(), plt.savefig(os.path.join(RESULTS, "newcomer.png"), dpi=120)


if __name__ == "__main__":
    main()
