"""Do short runs of the four programs write the same bytes at two commits? All layers on, one thread.

    python bench/same_bytes.py --other c021997 --model_path .real/smollm2

Compared are metrics.jsonl but for `eval/...` (whose place in it may differ), trajectories.jsonl, every .safetensors (adapters,
weights, optimizer, base) and the evaluations before and after. The schooling is short. The last line is JSON.
"""
import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

from core_alone import ROOT, tree

GRPO = ["grpo", "--tasks_per_step", "2", "--group_size", "4", "--max_steps", "3", "--max_samples", "50", "--eval_tasks", "6"]
RUNS = {
    "grpo": GRPO,
    "grpo, eval_every": [*GRPO, "--eval_every", "2", "--credit", "turn", "--loss", "cispo"],
    "grpo, gspo": [*GRPO, "--loss", "gspo", "--entropy_coef", "0.01", "--lora_dropout", "0.1"],
    "grpo, full": [*GRPO, "--lora_r", "0", "--learning_rate", "1e-4"],
    "grpo, bfloat16": [*GRPO, "--dtype", "bfloat16"],
    "grpo, 4bit": [*GRPO, "--memory", "4bit"],
    "grpo, small": [*GRPO, "--memory", "small"],
    "sft": ["sft", "--max_samples", "64", "--max_steps", "4", "--eval_tasks", "6", "--eval_every", "2"],
    "reward_weighted": ["reward_weighted", "--max_steps", "2", "--tasks_per_step", "4", "--group_size", "4", "--eval_tasks", "6",
                        "--max_samples", "50"],
    "dpo": ["dpo", "--num_tasks", "12", "--max_steps", "3", "--eval_tasks", "6"],
}
# A short schooling: its table stands in sft.py before core/, and in core/tiny.py since.
START = """
import runpy, sys
sys.path.insert(0, ".")
import agent, sft
for module in list(sys.modules.values()):
    table = getattr(module, "TINY_SFT", None)
    if isinstance(table, dict):
        table.update(max_steps=40, max_samples=200)
program, *sys.argv[1:] = sys.argv[1:]
sys.argv[0] = program + ".py"
runpy.run_path(program + ".py", run_name="__main__")
"""


def written(place, arguments):
    """Return what a run in a tree writes: hashes of files, lines of metrics, evaluations before and after."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-c", START, *arguments, "--output_dir", f"{folder}/run"], cwd=place, check=True,
                       stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
        run = Path(folder, "run")
        files = [run / "trajectories.jsonl", *run.glob("checkpoints/*/*.safetensors"), *run.glob("base/*.safetensors")]
        lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        result = json.loads((run / "result.json").read_text())
        return {"files": {str(f.relative_to(run)): hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(files) if f.exists()},
                "metrics": [{name: value for name, value in line.items() if not name.startswith("eval/")} for line in lines],
                "before": result["before"], "after": result["after"]}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--other", required=True, help="a commit to compare with")
    parser.add_argument("--model_path", help="a real model for one more run")
    parser.add_argument("--output", help="write the JSON here, too")
    args = parser.parse_args()
    place = Path(tempfile.mkdtemp())
    trees = [tree("", False, place / "this"), tree(args.other, False, place / "other")]
    runs = dict(RUNS)
    if args.model_path:
        runs[Path(args.model_path).name] = [
            "grpo", "--model_path", str(Path(args.model_path).resolve()), "--tasks_per_step", "1", "--group_size", "4", "--max_steps", "2",
            "--eval_tasks", "2", "--max_samples", "20", "--max_new_tokens", "48", "--max_tokens", "900"]
    same = {}
    for name, arguments in runs.items():
        ours, theirs = (written(folder, arguments) for folder in trees)
        same[name] = ours == theirs
        print(f"{name}: {'the same' if same[name] else 'different: ' + ', '.join(k for k in ours if ours[k] != theirs[k])}", flush=True)
    result = {"command": "python " + " ".join([os.path.relpath(__file__, ROOT), *sys.argv[1:]]), "date": str(date.today()), "same": same}
    if args.output:
        Path(args.output).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
