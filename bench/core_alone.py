"""What a step of GRPO costs in CPU seconds and memory: core alone, with the layers, and another commit, in turns.

    python bench/core_alone.py --other c021997 --model_path .real/smollm2 --rounds 3

Each variant is a copy of the tree. A step's cost is the difference between a run of four steps and one of one step, divided
by three: processor seconds of the whole process, which other work on the machine changes less than the clock. The peak is
that of the run of four steps. The last line is JSON.
"""
import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from bench.learning import write_json  # noqa: E402


def tree(commit, without_extras, place):
    """Write the files of a commit ("" for the working tree) into a folder."""
    place.mkdir(parents=True)
    if commit:
        archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
        subprocess.run(["tar", "x", "-C", str(place)], input=archive, check=True)
    else:
        listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True, text=True)
        for name in filter(None, listed.stdout.split("\n")):
            if (ROOT / name).is_file() and not name.startswith("tests/"):
                (place / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, place / name)
    if without_extras:
        shutil.rmtree(place / "extras")
    return place


def cost(place, arguments, threads):
    """Return CPU seconds and the peak in MiB of a run of grpo.py in a tree."""
    out = tempfile.mkdtemp()
    pid = os.fork()
    if not pid:
        os.chdir(place)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
        os.execve(sys.executable, [sys.executable, "grpo.py", *arguments, "--output_dir", f"{out}/run"], environment)
    _, status, used = os.wait4(pid, 0)
    shutil.rmtree(out)
    if status:
        sys.exit(f"{place}: grpo.py {' '.join(arguments)} ended with {status}")
    return used.ru_utime + used.ru_stime, used.ru_maxrss / 2**10


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--other", help="a commit to compare with")
    parser.add_argument("--model_path", help="a real model; the tiny one is always measured")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--output", help="write the JSON here, too")
    args = parser.parse_args()
    place = Path(tempfile.mkdtemp())
    trees = {"core alone": tree("", True, place / "core"), "with extras": tree("", False, place / "extras")}
    if args.other:
        trees[args.other] = tree(args.other, False, place / "other")
    base = place / "taught"
    subprocess.run([sys.executable, "grpo.py", "--max_steps", "0", "--eval_tasks", "0", "--output_dir", str(base)],
                   cwd=trees["with extras"], check=True, stdout=subprocess.DEVNULL)
    cases = {"tiny": ["--model_path", str(base / "base"), "--eval_tasks", "0"]}
    if args.model_path:
        cases[Path(args.model_path).name] = [
            "--model_path", str(Path(args.model_path).resolve()), "--eval_tasks", "0", "--dtype", "float32", "--tasks_per_step", "2",
            "--max_samples", "100"]
    seconds, peaks = {}, {}
    for _ in range(args.rounds):
        for case, arguments in cases.items():
            for name, folder in trees.items():
                one, _ = cost(folder, [*arguments, "--max_steps", "1"], args.threads)
                several, peak = cost(folder, [*arguments, "--max_steps", str(args.steps)], args.threads)
                seconds.setdefault(f"{case}, {name}", []).append((several - one) / (args.steps - 1))
                peaks.setdefault(f"{case}, {name}", []).append(peak)
                print(f"{case}, {name}: {seconds[f'{case}, {name}'][-1]:.2f} s, {peak:.0f} MiB", flush=True)
    shutil.rmtree(place)
    flags = Path("/proc/cpuinfo").read_text() if os.path.exists("/proc/cpuinfo") else ""
    result = {"command": "python " + " ".join([os.path.relpath(__file__, ROOT), *sys.argv[1:]]), "date": str(date.today()),
              "threads": args.threads, "units": [unit for unit in ("amx_bf16", "avx512_bf16", "avx512_fp16") if unit in flags],
              "cpu_seconds_a_step": seconds, "peak_mib": peaks,
              "median": {name: [median(seconds[name]), median(peaks[name])] for name in seconds}}
    if args.output:
        result = write_json(args.output, result, args)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
