"""Do the runs of chapter 3 of docs/tutorial.md with three seeds.

    python bench/tutorial.py                 4 minutes of one core; what is done is not repeated
    python bench/tutorial.py --minutes 4     stops before a run that would begin later

The commands and the environment are those of the page, with --seed and a folder of each seed added.
Writes bench/results/tutorial.json. Chapter 4 shows the figures of bench/reward_hacking.py.
"""
import argparse
import datetime
import json
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from bench.learning import Clock, processor, series, write_json  # noqa: E402
from bench.notebook import PAGE, blocks, commands  # noqa: E402

RESULTS = ROOT / "bench" / "results"
RUNS = {"sft": "sft.py", "calendar": "grpo.py"}  # by folder: the programs of chapter 3


def files_and_commands():
    """Return {name: text} of the page's files, and {run: words of its command} of chapter 3."""
    files, runs = {}, {}
    for kind, text in blocks(PAGE.read_text("utf-8")):
        if kind == "python" and text.startswith("# my_"):
            files[text[2:].partition("\n")[0]] = text + "\n"
        if kind == "bash" and "my_env.py" in text:
            runs = {name: words for name in RUNS for words in commands(text)
                    if words[1] == RUNS[name]}
    return files, runs


def run(name, words, folder, seed) -> dict:
    """Do one of the page's runs in this process, and return its row."""
    import grpo
    import sft
    from extras.hints.command_line import parse
    program = {"sft.py": sft, "grpo.py": grpo}[words[1]]
    words = [word.replace("runs/", f"{folder}/") for word in words[2:]]
    config = parse(program.Config, [*words, "--seed", str(seed), "--overwrite",
                                    "--output_dir", f"{folder}/{name}"])
    clock = Clock()
    result = program.train(config)
    row = {"success_after": result["success_after"], "reward_after": result["after"].get("reward"),
           "steps": result["steps"], "cpu_seconds": clock.read()["cpu_seconds"]}
    if result["before"].get("episodes"):
        row |= {"success_before": result["success_before"],
                "reward_before": result["before"]["reward"]}
    names = ("reward", "success", "turns") if program is grpo else ("loss",)
    return row | {name: series(config.output_dir, name) for name in names}


def settings() -> dict:
    """Return what the figures depend on: the page's environment and commands."""
    files, runs = files_and_commands()
    return {"my_env.py": files["my_env.py"], **{name: " ".join(runs[name]) for name in runs}}


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--minutes", type=float, default=600)
    parser.add_argument("--out", default=str(ROOT / "runs" / "tutorial"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    out, results = Path(args.out).resolve(), args.results.resolve()
    began = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    os.chdir(out)  # my_env.py of a command is found here
    files, runs = files_and_commands()
    for name, text in files.items():
        Path(name).write_text(text, "utf-8")
    rows = {name: {} for name in runs}
    for seed in args.seeds.split(","):
        for name, words in runs.items():
            path = out / f"{name}_{seed}.json"
            if not path.exists():
                if time.monotonic() - began > 60 * args.minutes:
                    return print(f"stopped before {name}, seed {seed}")
                path.write_text(json.dumps(run(name, words, out / f"seed{seed}", seed)))
            rows[name][seed] = json.loads(path.read_text())
    learned = rows["calendar"].values()
    seconds = [sum(rows[name][seed]["cpu_seconds"] for name in rows) for seed in rows["sft"]]
    write_json(results / "tutorial.json", {
        "command": "python bench/tutorial.py", "date": datetime.date.today().isoformat(),
        "machine": f"{processor()['cpu']}, {os.cpu_count()} shared cores, no GPU, on "
                   f"{os.environ.get('OMP_NUM_THREADS', 'as many as there are')} thread(s)",
        "commands": {name: " ".join(words) for name, words in runs.items()},
        "before": [row["success_before"] for row in learned],
        "after": [row["success_after"] for row in learned],
        "cpu_seconds": [round(value, 1) for value in seconds], "rows": rows})


if __name__ == "__main__":
    main()
