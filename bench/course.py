"""The three-phase course from nothing, for three seeds: data, SFT, traces, DPO, report: the five commands of README.md here.

    python bench/course.py [OUT]        half an hour on 2 cores, two seeds at a time; writes bench/results/course.json
                                        and course_seed0.md, the report of the first seed

Nobody can be right in more meetings than the Bayes ceiling.
"""
import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
from bench.learning import RESULTS, write_json  # noqa: E402

SEEDS = 0, 1, 2
ROWS, SFT_STEPS, TRACED_TASKS, EVAL_TASKS = 3000, 800, 128, 1000


def course(out: str, seed: int) -> list[str]:
    """Return the five commands of the course, in folder `out`."""
    csv, sft, traces, dpo = (os.path.join(out, name) for name in ("meetings.csv", "sft", "traces.jsonl", "dpo"))
    return [f"bench/meetings.py --rows {ROWS} --output {csv} --seed {seed}",
            f"sft.py --env meetings --tasks {csv} --expert_noise 0.1 --batch_size 16 --max_steps {SFT_STEPS} "
            f"--eval_tasks 0 --output_dir {sft} --seed {seed} --overwrite",
            f"agent.py --model_path {sft} --env meetings --tasks {csv} --num_tasks {TRACED_TASKS} --group_size 8 "
            f"--output {traces} --seed {seed}",
            f"dpo.py --model_path {sft} --trajectories {traces} --env meetings --learning_rate 1e-3 --num_epochs 2 "
            f"--eval_tasks {EVAL_TASKS} --output_dir {dpo} --seed {seed} --overwrite",
            f"bench/comparison.py {sft} {traces} {dpo} --output {os.path.join(out, 'report.md')}"]


def run(out: str, seed: int) -> dict:
    folder = os.path.join(out, f"seed{seed}")
    os.makedirs(folder, exist_ok=True)
    for command in course(folder, seed):
        done = subprocess.run([sys.executable, *command.split()], cwd=ROOT, capture_output=True, text=True,
                              env={**os.environ, "OMP_NUM_THREADS": "1"})
        if done.returncode:
            sys.exit(f"{command}\n{done.stderr[-2000:]}")
    with open(os.path.join(folder, "traces.jsonl"), encoding="utf-8") as f:
        episodes = [json.loads(line) for line in f]
    with open(os.path.join(folder, "dpo", "result.json"), encoding="utf-8") as f:
        result = json.load(f)
    calls = [t["info"]["tool_calls"] for t in episodes]
    return {"sft": result["success_before"], "dpo": result["success_after"], "pairs": result["pairs"],
            "traces": sum(t["info"]["success"] for t in episodes) / len(episodes), "episodes": len(episodes),
            "calls_2_to_5": sum(2 <= n <= 5 for n in calls) / len(calls), "calls": sum(calls) / len(calls)}


def main(argv=None):
    from bench.meetings import TOOLS, accuracy
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", default=os.path.join(ROOT, "runs", "course"))
    out = parser.parse_args(argv).out
    with ThreadPoolExecutor(2) as pool:
        rows = dict(zip((f"seed {seed}" for seed in SEEDS), pool.map(lambda seed: run(out, seed), SEEDS)))
    result = {"command": "python bench/course.py", "date": datetime.date.today().isoformat(), "rows": rows,
              "commands": course("OUT", 0), "bayes_ceiling": accuracy(TOOLS), "eval_tasks": EVAL_TASKS,
              "machine": f"{os.cpu_count()} cores, no GPU"}
    os.makedirs(RESULTS, exist_ok=True)
    shutil.copy(os.path.join(out, f"seed{SEEDS[0]}", "report.md"), os.path.join(RESULTS, "course_seed0.md"))
    result = write_json(RESULTS / "course.json", result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
