"""Learning on the environments: SFT on noisy demonstrations, then GRPO; held-out success before and after.

    python bench/environments.py                          hours on one core
    python bench/environments.py --only search --seeds 0

For each environment the tiny model is taught once by `sft.py`, on demonstrations in which a share of the expert's
actions is wrong, and GRPO starts from it with three seeds: other tasks, other episodes, another exam. `mixed` is one
model that is taught and trained on several environments at once. The flags are in RUNS. A run whose folder holds a
result is not done again. Writes bench/results/environments.json; the last line is that JSON.
"""
import argparse
import datetime
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from bench.learning import spread, wilson

# Name -> flags of both programs, of sft.py, of grpo.py.
RUNS = {
    "search": (["--env", "search"],
               ["--expert_noise", "0.5", "--max_samples", "6000", "--max_steps", "1000"], []),
    "business": (["--env", "business"], ["--expert_noise", "0.6", "--max_steps", "300"], []),
    "writing": (["--env", "writing"], ["--expert_noise", "0.5", "--max_steps", "400"], []),
    "mixed": (["--env", "equations,search,writing"],
              ["--expert_noise", "0.5", "--max_samples", "6000", "--max_steps", "1000"], []),
}


def result_of(folder, program, *words):
    """Return result.json of a run; run it if the folder has none."""
    if not (folder / "result.json").exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with open(folder.with_suffix(".log"), "w") as log:
            subprocess.run([sys.executable, program, *words, "--output_dir", str(folder), "--overwrite"], check=True,
                           cwd=ROOT, stdout=log, stderr=log)
    return json.loads((folder / "result.json").read_text())


def learning(name, args):
    """Teach, train with each seed, and return success before and after, of each environment where there are several."""
    both, taught, trained = RUNS[name]
    start = Path(args.out) / f"{name}_start"
    result_of(start, "sft.py", *both, *taught, "--batch_size", "16", "--eval_tasks", "0")
    rows = {}
    for seed in args.seeds:
        result = result_of(Path(args.out) / f"{name}_{seed}", "grpo.py", "--model_path", str(start), *both, *trained,
                           "--seed", str(seed), "--eval_tasks", str(args.tasks))
        rows[seed] = {when: {key: value for key, value in result[when].items()
                             if key.startswith(("success", "reward", "episodes"))} for when in ("before", "after")}
        rows[seed]["interval_after"] = wilson(result["success_after"] * args.tasks, args.tasks)
        rows[seed]["steps"] = result["steps"]
    keys = [key for key in rows[args.seeds[0]]["after"] if key.startswith("success")]
    summary = {key: {**{when: spread([row[when][key] for row in rows.values()]) for when in ("before", "after")},
                     "gain": spread([row["after"][key] - row["before"][key] for row in rows.values()])}
               for key in keys}
    return {"flags": {"both": both, "sft": taught, "grpo": trained}, "summary": summary, "seeds": rows}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(RUNS), choices=RUNS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--tasks", type=int, default=200, help="held-out tasks, one episode of each")
    parser.add_argument("--out", default=str(ROOT / "runs" / "environments"))
    args = parser.parse_args()
    path = ROOT / "bench" / "results" / "environments.json"
    result = json.loads(path.read_text()) if path.exists() else {"runs": {}}
    for name in args.only:
        result["runs"][name] = learning(name, args)
        print(name, json.dumps(result["runs"][name]["summary"]), flush=True)
        result |= {"command": "python " + " ".join(sys.argv), "date": datetime.date.today().isoformat(),
                   "machine": f"{os.cpu_count()} shared cores, no GPU", "exam": f"{args.tasks} held-out tasks"}
        path.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
