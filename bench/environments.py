"""Learning on the environments: SFT on noisy demonstrations, then GRPO; held-out success before and after.

    python bench/environments.py                                an hour and a half on two cores
    python bench/environments.py --only search --seeds 0

For each environment the tiny model is taught by `sft.py` (one stage or two, each from the one before), on demonstrations
in which a share of the expert's actions is wrong. GRPO starts from it with each seed: other tasks, other episodes,
another exam. `mixed` is one model that is taught and trained on several environments at once, from the start of
`writing`. The flags are in RUNS. A run whose folder holds a result is not done again. Writes
bench/results/environments.json; the last line is that JSON.
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

WRITING = ["--env writing --expert_noise 0.5 --max_samples 3000 --max_steps 300",
           "--env writing --expert_noise 0.4 --max_samples 5000 --max_steps 600 --learning_rate 2e-3 --seed 1"]
MIXED = "--env equations,search,writing"
# Name -> flags of the stages of sft.py, flags of grpo.py.
RUNS = {
    "search": (["--env search --expert_noise 0.4 --max_samples 12000 --max_steps 2400"],
               "--env search --learning_rate 2e-3 --max_steps 24"),
    "business": (["--env business --expert_noise 0.6 --max_samples 1400 --max_steps 300 --max_turns 6"],
                 "--env business --learning_rate 2e-3 --max_grad_norm 0.005 --max_steps 30"),
    "writing": (WRITING, "--env writing --learning_rate 2e-3 --max_steps 16"),
    "mixed": ([*WRITING, f"{MIXED} --expert_noise 0.5 --max_samples 3000 --max_steps 250 --learning_rate 2e-3 --seed 2"],
              f"{MIXED} --learning_rate 2e-3 --max_steps 20"),
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
    stages, flags = RUNS[name]
    start = "tiny"
    for number, stage in enumerate(stages):
        shared = "writing" if stage in WRITING else name
        folder = Path(args.out) / f"{shared}_start_{number}"
        result_of(folder, "sft.py", "--model_path", start, *stage.split(), "--batch_size", "16", "--eval_tasks", "0")
        start = str(folder)
    rows = {}
    for seed in args.seeds:
        result = result_of(Path(args.out) / f"{name}_{seed}", "grpo.py", "--model_path", start, *flags.split(),
                           "--seed", str(seed), "--eval_tasks", str(args.tasks))
        rows[seed] = {when: {key: value for key, value in result[when].items()
                             if key == "reward" or key.startswith("success")} for when in ("before", "after")}
        rows[seed]["interval_after"] = wilson(result["success_after"] * args.tasks, args.tasks)
    summary = {}
    for key in rows[args.seeds[0]]["after"]:
        before, after = [[row[when][key] for row in rows.values()] for when in ("before", "after")]
        summary[key] = {"before": spread(before), "after": spread(after),
                        "gain": spread([b - a for a, b in zip(before, after)])}
    return {"sft": stages, "grpo": flags, "summary": summary, "seeds": rows}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(RUNS), choices=RUNS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--tasks", type=int, default=100, help="held-out tasks, one episode of each")
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
