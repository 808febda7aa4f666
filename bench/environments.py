"""Learning on the environments: SFT on noisy demonstrations, then GRPO; held-out success before and after.

    python ../shared/real/get_smollm2.py .real/smollm2
    python bench/environments.py                                many hours on two cores
    python bench/environments.py --only search --seeds 0

A model is taught by `sft.py` (in up to four stages, each from the one before) on demonstrations in which a share of
the expert's actions is wrong. GRPO starts from it with each seed: other tasks, other episodes, another exam.
For `search` and `code`, whose words the tiny model does not learn, and once for `business`, it is SmolLM2-135M with
the tiny model's chat template, which is short. `mixed` and `equations,search,code` are one model each that is taught and
trained on several environments at once.
The flags are in RUNS. A run whose folder holds a result is not done again. Writes bench/results/environments.json;
the last line is that JSON.
"""
import argparse
import datetime
import json
import os
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from bench.learning import RESULTS, spread, wilson, write_json  # noqa: E402
from bench.learning_rates import short_template  # noqa: E402

SFT = "--max_steps 60 --learning_rate 3e-4 --lora_r 16 --gradient_accumulation_steps 1"
WRITING = ["--env writing --expert_noise 0.5 --max_samples 3000 --max_steps 300 --batch_size 16",
           "--env writing --expert_noise 0.4 --max_samples 5000 --max_steps 600 --batch_size 16 --learning_rate 2e-3 "
           "--seed 1"]
MIXED = "--env equations,writing"
THREE = "--env equations,search,code --env_options levels=1"
# Name -> model, seeds, held-out tasks, flags of the stages of sft.py, flags of grpo.py.
RUNS = {
    "writing": ("tiny", [0, 1, 2], 100, WRITING, "--env writing --learning_rate 2e-3 --max_steps 16"),
    # The equations come first: their episodes are short, and have few of the tokens of a mixed batch.
    "mixed": ("tiny", [0, 1, 2], 200,
              ["--env equations --expert_noise 0.6 --max_samples 1400 --max_steps 300 --max_turns 6 --batch_size 16",
               f"{MIXED} --expert_noise 0.5 --max_samples 6000 --max_steps 900 --batch_size 16 --learning_rate 2e-3 "
               "--seed 1",
               f"{MIXED} --expert_noise 0.4 --max_samples 8000 --max_steps 600 --batch_size 16 --learning_rate 2e-3 "
               "--seed 2",
               f"{MIXED} --expert_noise 0.4 --max_samples 10000 --max_steps 900 --batch_size 16 --learning_rate 2e-3 "
               "--seed 3"],
              f"{MIXED} --max_steps 80"),
    "search": ("smollm2", [0, 1, 2], 100, [f"--env search --expert_noise 0.4 --max_samples 400 {SFT}"],
               "--env search --max_steps 40"),
    "code": ("smollm2", [0], 100, [f"--env code --env_options levels=1 --expert_noise 0.7 --max_samples 400 {SFT}"],
             "--env code --env_options levels=1 --max_turns 6 --learning_rate 2e-4 --max_steps 20 --tasks_per_step 4"),
    "equations,search,code": ("smollm2", [0, 1, 2], 300,
                              [f"{THREE} --expert_noise 0.5 --max_samples 1200 {SFT} --max_steps 120"],
                              f"{THREE} --max_turns 8 --max_new_tokens 192 --learning_rate 1e-4 --max_steps 40"),
    "business, smollm2": ("smollm2", [0, 1, 2], 100,
                          [f"--env business --expert_noise 0.4 --max_samples 800 {SFT} --max_steps 120"],
                          "--env business --max_steps 40"),
    "business": ("tiny", [0], 100,
                 ["--env business --expert_noise 0.5 --max_samples 8000 --max_steps 900 --batch_size 16"],
                 "--env business --learning_rate 2e-3 --max_steps 24"),
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
    model, seeds, tasks, stages, flags = RUNS[name]
    out = Path(args.out)
    start = model if model == "tiny" else short_template(args.model_path, out / model)
    for number, stage in enumerate(stages):
        folder = out / f"{name}_start_{number}"
        result_of(folder, "sft.py", "--model_path", str(start), *stage.split(), "--eval_tasks", "0")
        start = folder
    rows = {}
    for seed in args.seeds or seeds:
        result = result_of(out / f"{name}_{seed}", "grpo.py", "--model_path", str(start), *flags.split(),
                           "--seed", str(seed), "--eval_tasks", str(tasks))
        rows[seed] = {when: {key: value for key, value in result[when].items()
                             if key == "reward" or key.startswith("success")} for when in ("before", "after")}
        rows[seed]["interval"] = {when: wilson(result[when]["success"] * tasks, tasks) for when in ("before", "after")}
    summary = {}
    for key in rows[seed]["after"]:
        before, after = [[row[when][key] for row in rows.values()] for when in ("before", "after")]
        summary[key] = {"before": spread(before), "after": spread(after),
                        "gain": spread([b - a for a, b in zip(before, after)])}
    return {"model": model, "tasks": tasks, "sft": stages, "grpo": flags, "summary": summary, "seeds": rows}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(RUNS), choices=RUNS)
    parser.add_argument("--model_path", default=".real/smollm2")
    parser.add_argument("--seeds", nargs="+", type=int, help="default: as in RUNS")
    parser.add_argument("--out", default=str(ROOT / "runs" / "environments"))
    args = parser.parse_args()
    path = RESULTS / "environments.json"
    result = json.loads(path.read_text()) if path.exists() else {"runs": {}}
    for name in args.only:
        result["runs"][name] = {
            **learning(name, args), "command": "python " + " ".join(sys.argv), "date": datetime.date.today().isoformat(),
            "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} shared cores"}
        print(name, json.dumps(result["runs"][name]["summary"]), flush=True)
        result = write_json(path, result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
