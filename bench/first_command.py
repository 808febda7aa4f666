"""Does `python grpo.py` learn, and do its controls not?

    python bench/first_command.py               seeds 0 to 4, about 16 minutes on 2 idle cores
    python bench/first_command.py --controls 0  and three controls of seed 0, about 8 minutes

Each seed is `python grpo.py --seed S`, start to finish, alone on the machine, timed from outside. A
seed that is done is not run again: a call that was stopped continues with the next one.

Three controls start from the taught model of the seed's run: GRPO with the step's rewards dealt out
at random, GRPO with learning rate 0, and SFT alone on the start's own demonstrations. SFT takes as
many steps as fit into the time that GRPO took, at two learning rates, and the better one counts.
Controls run two at a time with one thread each, so their seconds say nothing.

Writes bench/results/first_command.json, which holds the curves, and first_command.svg. The last
line is JSON.
"""
import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from bench.learning import RESULTS, fingerprint, flags, series, write_result  # noqa: E402
from bench.pictures import COLORS, figure, save  # noqa: E402

CURVES = "success", "reward", "structure", "entropy", "kl", "grad_norm"


def run(program, folder, *words, **environment) -> dict:
    """Return the row of a run: its result, its seconds from outside, and its curves.

    Args:
        program: a file of this project. words: its flags.
        folder: its output folder. A run that has ended there is not done again.
    """
    row = Path(f"{folder}.json")
    if row.exists():
        return json.loads(row.read_text())
    command = [sys.executable, program, *map(str, words), "--output_dir", str(folder),
               "--overwrite"]
    row.parent.mkdir(parents=True, exist_ok=True)
    start, cpu = time.perf_counter(), os.times()
    with open(f"{folder}.log", "w") as log:
        done = subprocess.run(command, cwd=ROOT, stdout=log, stderr=log,
                              env={**os.environ, **environment})
    if done.returncode:
        sys.exit(f"failed: {folder}.log\n" + Path(f"{folder}.log").read_text()[-2000:])
    seconds, used = time.perf_counter() - start, os.times()
    result = json.loads((Path(folder) / "result.json").read_text())
    keys = "seed", "success_before", "success_after", "held_out_tasks", "steps", "peak_memory_mb"
    result = {key: result.get(key) for key in keys} | {
        "seconds": round(seconds, 1),
        "cpu_seconds": round(used.children_user + used.children_system
                             - cpu.children_user - cpu.children_system, 1),
        **{name: series(folder, name) for name in CURVES}}
    row.with_suffix(".tmp").write_text(json.dumps(result))
    row.with_suffix(".tmp").rename(row)
    return result


def sft_alone(folder, base, seed, seconds, words) -> dict:
    """SFT on the start's demonstrations for `seconds`, at the better of two learning rates."""
    from core.tiny import TINY_SFT
    taught = [word for name, value in TINY_SFT.items() if name not in ("max_steps", "learning_rate")
              for word in (f"--{name}", value)]
    taught += ["--model_path", base, "--env", "equations", "--seed", seed]
    one = {"OMP_NUM_THREADS": "1"}
    run("sft.py", f"{folder}_trial", *taught, "--max_steps", 40, **one)
    lines = Path(f"{folder}_trial/timing.jsonl").read_text().splitlines()
    step_seconds = sorted(json.loads(line)["seconds"] for line in lines)
    steps = max(1, int(seconds / step_seconds[len(step_seconds) // 2]))
    rows = {}
    for rate in ("3e-4", "1e-3"):
        trained = f"{folder}_{rate}"
        run("sft.py", trained, *taught, "--max_steps", steps, "--learning_rate", rate, **one)
        # sft.py lets an episode have six turns. The exam is grpo.py's, with no step of training.
        rows[rate] = run("grpo.py", f"{trained}_exam", *words, "--model_path", trained,
                         "--seed", seed, "--max_steps", 0, **one)
    best = max(rows, key=lambda rate: rows[rate]["success_after"])
    return {**rows[best], "steps": steps, "learning_rate": best,
            "both": {rate: row["success_after"] for rate, row in rows.items()}}


def controls_of(row, out, words) -> dict:
    """Return the rows of the three controls of a seed's run."""
    seed = row["seed"]
    base, start = out / f"seed{seed}" / "base", out / f"control{seed}"
    if "--model_path" in words:  # then the run has taught none
        base = words[words.index("--model_path") + 1]
    model, one = ("--model_path", base, "--seed", seed), {"OMP_NUM_THREADS": "1"}
    with ThreadPoolExecutor(2) as pool:
        jobs = {
            "shuffled rewards": pool.submit(run, "bench/shuffled_rewards.py", f"{start}_shuffled",
                                            *words, *model, **one),
            "learning rate 0": pool.submit(run, "grpo.py", f"{start}_zero", *words, *model,
                                           "--learning_rate", 0, "--max_steps", 3, **one),
            "SFT alone": pool.submit(sft_alone, f"{start}_sft", base, seed, row["seconds"], words)}
        return {name: job.result() for name, job in jobs.items()}


def draw(rows, path, window=5):
    """Draw success in training against steps: every seed thin, their mean thick."""
    picture, panel = figure(width=7, height=3.0)
    curves = [row["success"] for row in rows]
    for curve in curves:
        panel.plot(smoothed(curve, window), color=COLORS["blue"], alpha=0.45, linewidth=1)
    means = [sum(values) / len(values) for values in zip(*curves)]
    panel.plot(smoothed(means, window), color=COLORS["orange"], linewidth=2.5,
               label=f"mean of {len(rows)} seeds")
    panel.set(xlabel="GRPO step", ylim=(0, 1),
              ylabel=f"success in training\n(mean of {window} steps)")
    panel.legend(loc="lower right")
    save(picture, path)


def smoothed(values, window) -> list[float]:
    """Return the mean of each value and the up to window - 1 before it."""
    parts = [values[max(0, i - window + 1):i + 1] for i in range(len(values))]
    return [sum(part) / len(part) for part in parts]


def settings() -> dict:
    """Return what the figures depend on."""
    return flags("grpo")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--controls", default="", help="seeds whose controls are run, too")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "first_command")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("words", nargs="*", metavar="FLAG", help="after --: flags of grpo.py")
    args = parser.parse_args(argv)
    rows, path = [], args.results / "first_command.json"
    for seed in seeds_of(args.seeds):
        rows.append(run("grpo.py", args.out / f"seed{seed}", "--seed", seed, *args.words))
        shown = {name: rows[-1][name] for name in ("success_before", "success_after", "seconds")}
        print(f"seed {seed}: {json.dumps(shown)}", flush=True)
    more = {"flags": args.words} if args.words else {}  # then it is not the first command
    today = fingerprint(settings() | more)
    before = json.loads(path.read_text()) if path.exists() else {}
    controls = before.get("controls", {}) if before.get("settings") == today else {}
    for row in rows:
        if row["seed"] in seeds_of(args.controls):
            controls[f"seed {row['seed']}"] = controls_of(row, args.out, args.words)
    args.results.mkdir(parents=True, exist_ok=True)
    draw(rows, args.results / "first_command.svg")
    write_result(path, settings=today, runs=rows, controls=controls,
                 each="python grpo.py --seed S, one after the other")


def seeds_of(words) -> list[int]:
    """Return the seeds of a flag, such as 0,1,2; none of an empty one."""
    return [int(word) for word in words.split(",") if word]


if __name__ == "__main__":
    main()
