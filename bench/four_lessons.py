"""SFT, reward-weighted, DPO and GRPO from the same start at the same number of episodes: two environments, three seeds.

    python bench/four_lessons.py                        two runs of one thread at a time; finished ones are not repeated
    python bench/four_lessons.py --only equations       one of the two environments

Writes bench/results/four_lessons.json and .svg.

The start is the tiny model after a short SFT on demonstrations whose actions are mostly wrong. SFT then imitates as
many demonstrations of that same poor expert as the others play episodes, and, in a line of its own, of a perfect one,
which the others have not. DPO plays all of its episodes with the start; the others learn while they play.

Reward-weighted updates its weights 180 times with 32 episodes, DPO about 120 times with 8 pairs. GRPO as it stands
updates 90 times with 64 episodes (two updates a step), and in a line of its own 180 times with 32, in smaller steps.
"""
import argparse
import datetime
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
from bench.learning import RESULTS, flags, write_json  # noqa: E402
from bench.pictures import COLORS, figure, save  # noqa: E402

SEEDS, EPISODES = (0, 1, 2), 2880
# What the teacher of the start does: noise of its actions, and how often the start sees it (steps of 16).
START = {"equations": "--expert_noise 0.6 --max_turns 6 --max_samples 2600 --max_steps 340 --batch_size 16",
         "meetings": "--expert_noise 0.25 --max_samples 3000 --max_steps 800 --batch_size 16"}
TEACHER = f"--max_samples {EPISODES} --num_epochs 1 --batch_size 16 --eval_every 30 --learning_rate 1e-3 --lora_r 16"
LESSONS = {
    "SFT, the start's expert": f"sft.py {TEACHER} --expert_noise START_NOISE",
    "SFT, a perfect expert": f"sft.py {TEACHER}",
    "reward-weighted": "reward_weighted.py --max_steps 10 --tasks_per_step 36 --learning_rate 2e-3",
    "DPO": "dpo.py --num_tasks 360 --learning_rate 2e-3 --num_epochs 3 --eval_every 15",
    "GRPO, 90 updates": "grpo.py --max_steps 45 --eval_every 5",
    "GRPO, 180 updates": "grpo.py --max_steps 90 --eval_every 10",
}
# Meetings' outcomes are drawn: more tasks of fewer episodes, and no division by a standard deviation that is luck.
MEETINGS = "--learning_rate 1e-3 --kl_coef 0.04 --loss dr_grpo --group_size 4 --updates_per_step 2 --max_grad_norm 0.1"
GRPO = {"equations": {"GRPO, 90 updates": "--tasks_per_step 8", "GRPO, 180 updates": "--tasks_per_step 4"},
        "meetings": {"GRPO, 90 updates": f"{MEETINGS} --tasks_per_step 16",
                     "GRPO, 180 updates": f"{MEETINGS} --tasks_per_step 8"}}


def python(log: str, command: str) -> float:
    """Runs it on one thread -> its CPU seconds: the wall's would tell of whatever else the machine does."""
    with open(log, "w") as f:
        process = subprocess.Popen([sys.executable, *command.split()], cwd=ROOT, stdout=f, stderr=f,
                                   env={**os.environ, "OMP_NUM_THREADS": "1"})
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"failed: {command}; see {log}")
    return usage.ru_utime + usage.ru_stime


def start(out: str, env: str, seed: int) -> str:
    """The folder of the model that all lessons of this environment and seed start from."""
    folder = os.path.join(out, f"{env}_{seed}", "start")
    if not os.path.exists(os.path.join(folder, "config.json")):
        os.makedirs(os.path.dirname(folder), exist_ok=True)
        python(folder + ".log", f"sft.py --env {env} --seed {seed} {START[env]} --eval_tasks 0 --overwrite "
                                f"--output_dir {folder}_sft")
        python(folder + ".log", f"lora.py merge {folder}_sft {folder}")
    return folder


def lesson(out: str, env: str, seed: int, name: str) -> dict:
    """One run -> success before and after, seconds, memory, and [(episodes, success)] on the way."""
    flags = LESSONS[name].replace("START_NOISE", START[env].split()[1])
    flags += " " + GRPO[env].get(name, "")
    folder = os.path.join(out, f"{env}_{seed}", name.replace(" ", "_").replace(",", "").replace("'", ""))
    if not os.path.exists(cost := folder + ".cpu_seconds"):
        seconds = python(folder + ".log", f"{flags} --env {env} --seed {seed} --output_dir {folder} --overwrite "
                                          f"--model_path {out}/{env}_{seed}/start")
        with open(cost, "w") as f:
            f.write(str(round(seconds)))
    with open(cost) as f:
        seconds = int(f.read())
    with open(os.path.join(folder, "result.json")) as f:
        result = json.load(f)
    with open(os.path.join(folder, "metrics.jsonl")) as f:
        lines = [json.loads(line) for line in f]
    share = EPISODES / result["steps"]  # of the episodes, a step's: what was played, or shown, until then
    points = [(0, result["success_before"])]
    if name == "reward-weighted":  # what an iteration plays is played before it learns from it
        points += [(line["step"] * share, line["success"]) for line in lines[1:] if "success" in line]
    points += [((line["step"] + 1) * share, line["eval/success"]) for line in lines if "eval/success" in line]
    return {"before": result["success_before"], "after": result["success_after"], "cpu_seconds": seconds,
            "peak_memory_mb": round(result["peak_memory_mb"]), "curve": points + [(EPISODES, result["success_after"])]}


def spread(values) -> str:
    return f"{sum(values) / len(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def table(rows: dict) -> str:
    out = ["| environment | lesson | before | after 2,880 episodes: mean (three seeds) | CPU seconds | MB |",
           "|---|---|---|---|---|---|"]
    for env in rows:
        for name in LESSONS:
            runs = rows[env][name]
            before, after, seconds, memory = ([run[key] for run in runs] for key in (
                "before", "after", "cpu_seconds", "peak_memory_mb"))
            out.append(f"| {env} | {name} | {spread(before)} | {spread(after)} | {sum(seconds) / len(runs):.0f} | "
                       f"{max(memory)} |")
    return "\n".join(out) + "\n"


def settings() -> dict:
    """Return what the figures depend on."""
    programs = {program: flags(program) for program in ("grpo", "reward_weighted", "dpo", "sft")}
    return {"episodes": EPISODES, "start": START, "lessons": LESSONS, "grpo": GRPO, "programs": programs}


def draw(rows: dict, path):
    """Draw success against episodes, a panel for each environment: the mean of the seeds and their range."""
    import numpy as np
    from bench.meetings import TOOLS, accuracy
    picture, panels = figure(1, len(rows), width=4.5 * len(rows), height=3.4, sharey=True, squeeze=False)
    panels = dict(zip(rows, panels[0]))
    grid = np.linspace(0, EPISODES, 60)
    for env, panel in panels.items():
        for name in LESSONS:
            curves = np.array([np.interp(grid, *zip(*run["curve"])) for run in rows[env][name]])  # (seeds, 60)
            line, = panel.plot(grid, curves.mean(0), label=name)
            panel.fill_between(grid, curves.min(0), curves.max(0), color=line.get_color(), alpha=0.15)
        panel.set(title=env, xlabel="episodes played, or demonstrations shown", ylim=(0, 1))
    if "meetings" in panels:
        panels["meetings"].axhline(accuracy(TOOLS), color=COLORS["grey"], linestyle=":", label="Bayes ceiling")
    panels[next(iter(rows))].set_ylabel("success: mean and range of the seeds")
    panel.legend(fontsize=8)
    save(picture, path)


def main():
    from bench.meetings import TOOLS, accuracy
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=os.path.join(ROOT, "runs", "four_lessons"))
    parser.add_argument("--only", choices=START, help="default: all")
    args = parser.parse_args()
    out, names = args.out, [args.only] if args.only else list(START)
    keys = [(env, seed) for env in names for seed in SEEDS]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda key: start(out, *key), keys))
        runs = [(env, seed, name) for env, seed in keys for name in LESSONS]
        found = dict(zip(runs, pool.map(lambda key: lesson(out, *key), runs)))
    rows = {env: {name: [found[env, seed, name] for seed in SEEDS] for name in LESSONS} for env in names}
    result = {"command": "python " + " ".join(sys.argv), "date": datetime.date.today().isoformat(), "seeds": SEEDS,
              "episodes": EPISODES, "lessons": LESSONS, "grpo": GRPO, "start": START, "rows": rows,
              "bayes_ceiling": accuracy(TOOLS), "machine": f"{os.cpu_count()} cores, no GPU, two runs at a time"}
    os.makedirs(RESULTS, exist_ok=True)
    draw(rows, RESULTS / "four_lessons.svg")
    write_json(RESULTS / "four_lessons.json", result)
    print(table(rows) + json.dumps(result))


if __name__ == "__main__":
    main()
