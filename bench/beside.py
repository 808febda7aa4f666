"""What a busy neighbour costs: an update and the first command, alone and beside a busy process.

    python bench/beside.py --model_path .real/smollm2      about 25 minutes on 2 cores that nothing else uses

Torch's OpenMP threads wait for each other by spinning, and a neighbour that takes the core of one lets the others
spin. `core/__init__.py` sets GOMP_SPINCOUNT before torch is loaded. Measured is an update of 8 x 256 tokens
(forward and backward through merged weights, and AdamW) in processes of each setting that take turns, alone and beside
a loop that keeps one core busy: the median of the updates after the first. Then `python grpo.py` with fewer steps,
alone and beside. A setting that does not end within LIMIT seconds is written as above it. Writes
bench/results/beside.json; the last line is JSON.
"""
import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from bench.learning import RESULTS, write_json  # noqa: E402

SETTINGS = {"ours": {}, "torch's default": {"GOMP_SPINCOUNT": "300000"}, "5000": {"GOMP_SPINCOUNT": "5000"},
            "passive": {"OMP_WAIT_POLICY": "PASSIVE"}, "one thread": {"OMP_NUM_THREADS": "1"}}
LIMIT = 150  # seconds of all updates of a process
COMMAND = ["grpo.py", "--max_steps", "4", "--eval_tasks", "20"]


def updates(model_path, count, dtype):
    """Print the seconds of each update as a line."""
    import core  # noqa: F401 (before torch, as in every program)
    import torch
    from core.model import adamw
    from layers import load_model
    from core.logprobs import token_logprobs
    from lora import merged_to_train
    model, _ = load_model(model_path, lora_r=16, dtype=dtype)
    optimizer = adamw(model, lr=1e-5, weight_decay=0.0)
    ids = torch.randint(min(40000, model.config.vocab_size), (8, 256), generator=torch.Generator().manual_seed(0))
    for _ in range(count):
        began = time.perf_counter()
        with merged_to_train(model):
            logprobs, _ = token_logprobs(model, ids, torch.ones_like(ids), 1.0)
            logprobs[:, 1:].mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        print(time.perf_counter() - began, flush=True)


def environment(setting):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    return {**kept, **SETTINGS[setting]}


def timed_updates(setting, args):
    """Return the median seconds of an update; above LIMIT / what was done, where it took too long."""
    command = [sys.executable, __file__, "--worker", "--model_path", args.model_path, "--updates", str(args.updates),
               "--dtype", args.dtype]
    with tempfile.TemporaryFile("w+") as output:
        with subprocess.Popen(command, stdout=output, env=environment(setting), cwd=ROOT) as process:
            try:
                process.wait(LIMIT)
            except subprocess.TimeoutExpired:
                process.kill()
        output.seek(0)
        # What load_model prints comes first.
        seconds = [float(line) for line in output if line[0].isdigit()][1:]
    return round(statistics.median(seconds), 2) if seconds else f"above {LIMIT / 2:.0f}"


def timed_command(setting):
    """Return the seconds of the short first command."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        subprocess.run([sys.executable, *COMMAND, "--output_dir", f"{folder}/run"], check=True, cwd=ROOT,
                       env=environment(setting), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return round(time.perf_counter() - began, 1)


def alone_and_beside(measure, *words):
    """Return what a measurement says alone, and beside a process that does nothing but count."""
    alone = measure(*words)
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            return {"alone": alone, "beside": measure(*words)}
        finally:
            busy.kill()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_path", default=".real/smollm2")
    parser.add_argument("--dtype", default="bfloat16", help="float32 where the CPU has no bfloat16")
    parser.add_argument("--updates", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=SETTINGS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return updates(args.model_path, args.updates, args.dtype)
    rows = {name: [] for name in args.settings}
    for _ in range(args.rounds):
        for name in args.settings:
            rows[name].append(alone_and_beside(timed_updates, name, args))
            print(name, rows[name][-1], flush=True)
    first = [alone_and_beside(timed_command, "ours") for _ in range(args.rounds)]
    result = {"command": "python " + " ".join(sys.argv), "date": datetime.date.today().isoformat(),
              "machine": f"{os.cpu_count()} shared cores, no GPU", "seconds_of_an_update": rows,
              "seconds_of_the_first_command": {"command": COMMAND, "ours": first},
              "beside_over_alone": [round(row["beside"] / row["alone"], 2) for row in first]}
    result = write_json(RESULTS / "beside.json", result, args)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
