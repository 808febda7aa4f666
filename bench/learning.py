"""Share the start, the exam, the processes and the intervals of experiments on the tiny model.

`learn_vs_trl.py`, `tricks.py` and `staleness.py` train the same taught model on `equations`, over
and over. Each run is a process of its own and leaves one JSON file, OUT/rows/NAME_SEED.json. A run
whose file exists is not done again, so an experiment that was stopped continues where it was. Start
a new OUT on another machine: its base differs by rounding, and runs are compared seed by seed.
"""
import argparse
import ast
import datetime
import hashlib
import importlib
import json
import math
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
RESULTS = Path(os.environ.get("BENCH_RESULTS", ROOT / "bench" / "results"))  # tests write elsewhere
TASKS, SAMPLES = 200, 4  # of the exam: held-out tasks, episodes of each
# 0.975 quantiles of Student's t by degrees of freedom.
T = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


def taught_base(out, seed=0) -> str:
    """Return the folder of the tiny model that all runs start from; teach it if it is not there."""
    base = Path(out) / "base"
    if base.exists():
        return str(base)
    import grpo
    from schooling import teach_tiny
    from extras.ranks import join
    config = grpo.Config(output_dir=str(out), seed=seed)
    run = SimpleNamespace(folder=Path(out), ranks=join(), begin=lambda: None)
    return teach_tiny(config, run)


def exam(model, tokenizer, tasks=TASKS) -> dict:
    """Return the share of held-out equations that the model solves, and its mean reward.

    The tasks are the same for every run, and so are the seeds that their episodes are sampled with.
    """
    import envs
    from envs.tasks import load_tasks
    from agent import Limits, evaluate
    limits = Limits(**envs.recommended("equations"))
    held_out = load_tasks("equations", "test", tasks, 0)
    result = evaluate(model, tokenizer, "equations", held_out, SAMPLES, limits=limits)
    names = "success", "reward", "turns", "completion"
    return {name: round(result[name], 4) for name in names}


def series(folder, name) -> list[float]:
    """Return a metric of a run of grpo.py, step by step; [] if the run logs none of that name."""
    path = Path(folder) / "metrics.jsonl"  # which a run of no steps does not write
    lines = map(json.loads, path.read_text().splitlines() if path.exists() else [])
    return [round(line[name], 4) for line in lines if name in line]


class Clock:
    """Seconds since it was made: by the wall, and of this process's own computing."""

    def __init__(self):
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def read(self) -> dict:
        return {"seconds": round(time.perf_counter() - self.wall, 1),
                "cpu_seconds": round(time.process_time() - self.cpu, 1)}


# --------------------------------------------------------- the settings that a figure depends on
# These flags say where a run stands and what is shown of it, not what it computes.
PLACES = {"output_dir", "overwrite", "resume", "seed", "save_every", "eval_every", "record",
          "show_every", "report_to", "unsafe_code"}
# And these arguments of scripts say which of several measurements are made, and how often.
NOT_SETTINGS = {"seeds", "seed", "rounds", "repeats", "only", "shapes", "parts", "threads", "rates",
                "cases", "families", "clients", "runs", "kills", "every", "points", "n"}
# Of a JSON that is not named like its script: that script, and what it was called with.
SCRIPTS = {"real_model_h200": ("real_model", {"grpo_steps": 40}), "gpu_h200": ("gpu", {}),
           "gpu_h100_80gb_hbm3": ("gpu", {}), "kills_sft": ("kills", {}),
           "kills_grpo": ("kills", {})}


def flags(program, **changes) -> dict:
    """Return the flags that `python PROGRAM.py` has today, after its defaults are filled in.

    A flag that is off is left out: a new flag that is off by default changes no figure. For the
    tiny model the settings of its SFT belong to them.
    """
    module = importlib.import_module(program)
    config = vars(module.settle(module.Config(**{"env": "equations", **changes})))
    off = None, 0, False, "", "none", "plain"
    found = {name: value for name, value in config.items()
             if name not in PLACES and value not in off}
    if found["model_path"] == "tiny":
        from core.tiny import TINY_SFT
        found["schooling"] = TINY_SFT
    if program == "grpo" and "max_steps" not in found:
        found["max_steps"] = module.DEFAULT_STEPS
    return found


def constants(script) -> dict:
    """Return the numbers that a script of bench/ measures with.

    They are its constants in capital letters that hold a number, and the defaults of its arguments
    that are numbers. The script is read, not imported.
    """
    found = {}
    for node in ast.walk(ast.parse((ROOT / "bench" / f"{script}.py").read_text())):
        match node:
            case ast.Assign([ast.Name(name)], value) if name.isupper():
                found[name] = numbers(value)
            case ast.Call(ast.Attribute(attr="add_argument"), [ast.Constant(name), *_]):
                default = [word.value for word in node.keywords if word.arg == "default"]
                found[name.strip("-")] = numbers(default[0]) if default else None
    return {name: value for name, value in found.items() if value and name not in NOT_SETTINGS}


def numbers(node):
    """Return the value of a literal that is a number or holds one, else None."""
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return None
    return value if re.search(r"\d", repr(value)) else None


def settings_of(name, **called_with) -> dict:
    """Return what the figures of a JSON depend on, as today's code has it.

    A script says so in its function `settings`. Of one that has none it is the numbers in it.

    Args:
        name: the file. called_with: arguments of the script that differ from its defaults.
    """
    stem = Path(name).stem
    if stem.startswith("lesson_"):
        return importlib.import_module("bench.lessons").settings(stem.removeprefix("lesson_"))
    script, usual = SCRIPTS.get(stem, (stem, {}))
    path = Path(__file__).with_name(f"{script}.py")
    if path.exists() and "\ndef settings(" in path.read_text():
        return importlib.import_module(f"bench.{script}").settings()
    found = constants(script) if path.exists() else {}
    return found | {key: value for key, value in {**usual, **called_with}.items() if key in found}


def fingerprint(settings) -> str:
    """Return a short hash of settings, which are nested dicts, lists, numbers and strings."""
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


# --------------------------------------------------------------------------------------- the result
UNITS = ("amx_bf16", "amx_tile", "avx512_bf16", "avx512f", "avx2", "asimd", "bf16")


def processor() -> dict:
    """Return the processor's name, its cores, and its units for vectors and matrices."""
    path = Path("/proc/cpuinfo")
    text = path.read_text() if path.exists() else ""
    facts = dict(re.findall(r"^([\w ]+?)\s*: (.*)$", text, re.M))
    has = (facts.get("flags") or facts.get("Features") or "").split()
    return {"cpu": facts.get("model name") or platform.processor() or platform.machine(),
            "cores": os.cpu_count(), "units": [unit for unit in UNITS if unit in has]}


def product_rates(shape=(2048, 576, 1536), seconds=0.5) -> dict:
    """Return the GFLOP/s of a product with weights in bfloat16 and in float32: the best of several.

    Some processors have the instructions for bfloat16 and are slower with them than in float32.
    """
    import torch
    rows, inner, outer = shape
    rates = {}
    for dtype in (torch.bfloat16, torch.float32):
        x, weight = torch.randn(rows, inner).to(dtype), torch.randn(outer, inner).to(dtype)
        end, best = time.perf_counter() + seconds, math.inf
        while time.perf_counter() < end:
            start = time.perf_counter()
            torch.nn.functional.linear(x, weight)
            best = min(best, time.perf_counter() - start)
        rates[str(dtype).removeprefix("torch.")] = round(2e-9 * math.prod(shape) / best, 1)
    return rates


def write_json(path, result, args=None) -> dict:
    """Write a result with the hash of the settings that its figures depend on, and return it.

    Args:
        path: bench/results/NAME.json. args: what the script was called with.
    """
    settings = settings_of(Path(path).name, **(vars(args) if args else {}))
    result = {**result, "settings": fingerprint(settings)}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(result, indent=1) + "\n")
    return result


def write_result(path, **content) -> dict:
    """Write a result with its command, date and machine, and print it as the last line."""
    name = Path(sys.argv[0]).resolve()
    name = name.relative_to(ROOT) if name.is_relative_to(ROOT) else name.name
    result = {"command": " ".join(["python", str(name), *sys.argv[1:]]),
              "date": datetime.date.today().isoformat(), "machine": processor(), **content}
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return result


# ------------------------------------------------------------------------------ runs and their rows
def arguments(description, names, folder, argv=None, steps=50):
    """Read the command line that the experiments share."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(names), help="names of runs; default: all")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--tasks", type=int, default=TASKS, help="held-out tasks of the exam")
    parser.add_argument("--out", default=str(ROOT / "runs" / folder))
    parser.add_argument("--results", default=str(RESULTS))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.only = [name for name in args.only.split(",") if name]
    args.seeds = [int(seed) for seed in args.seeds.split(",")]
    for name in args.only:
        if name not in names:
            parser.error(f"{name}: none of {', '.join(names)}")
    return args


def row_file(args, name, seed) -> Path:
    return Path(args.out) / "rows" / f"{name}_{seed}.json"


def run_missing(script, args):
    """Do the runs that are asked for and have no row yet, one after another."""
    for seed in args.seeds:
        for name in args.only:
            path = row_file(args, name, seed)
            if path.exists():
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            command = [sys.executable, script, "--worker", name, "--seeds", str(seed), "--steps",
                       str(args.steps), "--tasks", str(args.tasks), "--out", args.out]
            environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
            log = path.with_suffix(".log")
            with open(log, "w") as file:
                done = subprocess.run(command, stdout=file, stderr=file, env=environment, cwd=ROOT)
            if done.returncode:
                sys.exit(f"{name}, seed {seed} failed:\n{log.read_text()[-3000:]}")
            print(f"{name}, seed {seed}: {path.read_text()[:200]}", flush=True)


def write_row(args, name, seed, row):
    """Write the row of a run whole or not at all."""
    path = row_file(args, name, seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".tmp").write_text(json.dumps({"steps": args.steps, **row}))
    path.with_suffix(".tmp").rename(path)


def read_rows(args, names) -> dict:
    """Return {name: {seed: row}} of all runs that were done, in the order of the names."""
    rows = {}
    for name in names:
        files = sorted((Path(args.out) / "rows").glob(f"{name}_[0-9]*.json"))
        found = {int(path.stem.rsplit("_", 1)[1]): json.loads(path.read_text()) for path in files
                 if path.stem.rsplit("_", 1)[0] == name}
        if found:
            rows[name] = found
    return rows


# --------------------------------------------------------------------------------------- statistics
def wilson(successes, n) -> list[float]:
    """Return the 95 % interval of a share (Wilson 1927), rounded to 4 digits."""
    z = 1.96
    middle = (successes + z * z / 2) / (n + z * z)
    half = z / (n + z * z) * math.sqrt(successes * (n - successes) / n + z * z / 4)
    return [round(max(middle - half, 0.0), 4), round(min(middle + half, 1.0), 4)]


def spread(values) -> dict:
    """Return the mean of a few seeds, its standard error, and the half width of its t interval."""
    n, mean = len(values), math.fsum(values) / len(values)
    summary = {"n": n, "mean": round(mean, 4)}
    if n > 1:
        deviation = math.sqrt(math.fsum((x - mean) ** 2 for x in values) / (n - 1))
        error = deviation / math.sqrt(n)
        summary |= {"standard_error": round(error, 4), "half_width": round(T[n - 1] * error, 4)}
    return summary


def interval(summary) -> str:
    """Return "0.71 ± 0.05 (n = 3)" as a table shows it: from three seeds on with an interval."""
    half = f" ± {summary['half_width']:.3f}" if summary["n"] >= 3 else ""
    return f"{summary['mean']:.3f}{half} (n = {summary['n']})"


def report(args, name, **content) -> dict:
    """Write results/NAME.json and print it as the last line."""
    exam = f"{args.tasks} held-out tasks, {SAMPLES} episodes of each"
    return write_result(Path(args.results) / f"{name}.json", **{"exam": exam, **content})


def publish(args, script, runs, settings, summarize, table, draw) -> dict:
    """Do the missing runs of a script, and write the JSON, table and picture of all that were done.

    Args:
        runs: the names of all runs. settings: what the figures depend on.
        summarize: rows -> summary. table: summary -> Markdown.
        draw: a function of the summary and a path, which writes the picture.
    """
    name = Path(script).stem
    taught_base(args.out)
    run_missing(script, args)
    rows = read_rows(args, runs)
    summary = summarize(rows)
    folder = Path(args.results)
    folder.mkdir(parents=True, exist_ok=True)
    draw(summary, folder / f"{name}.svg")
    print(table(summary))
    return report(args, name, settings=fingerprint(settings), steps=args.steps,
                  summary=summary, rows=rows,
                  not_run=[run for run in runs if run not in rows])
