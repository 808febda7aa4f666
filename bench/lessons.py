"""Run lessons with several seeds, and keep what their pages say.

    python bench/lessons.py                     all of them, seeds 0, 1 and 2: about 45 CPU minutes
    python bench/lessons.py 02 04 --seeds 0     some of them

A lesson writes its results to runs/lessons/NAME.json. Those of all seeds are in results/lesson_NN.json, and the
picture of the first seed is copied to docs/lessons/, beside the lesson's page. A row that is there
already is kept if it is of today's constants, so that seeds can be run one at a time.
"""
import argparse
import ast
import json
import shutil
import subprocess
import sys
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from bench.learning import RESULTS, fingerprint  # noqa: E402

# A test sets BENCH_RESULTS, and its pictures go there, too.
PICTURES = ROOT / "docs" / "lessons" if RESULTS == ROOT / "bench" / "results" else RESULTS


def file_of(number) -> Path:
    """Return the file of the lesson of this number, such as "02"."""
    [path] = (ROOT / "lessons").glob(f"{number}_*.py")
    return path


def settings(number) -> dict:
    """Return what the figures of a lesson depend on: its constants, as they are written."""
    tree = ast.parse(file_of(number).read_text())
    assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
    return {ast.unparse(node.targets): ast.unparse(node.value) for node in assigned}


def run(path, seed) -> dict:
    """Run a lesson, which shows what it prints, and return its results."""
    done = subprocess.run([sys.executable, path, "--seed", str(seed)])
    if done.returncode:
        sys.exit(f"{path} --seed {seed} ended with {done.returncode}")
    return json.loads((ROOT / "runs" / "lessons" / f"{path.stem}.json").read_text())


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("numbers", nargs="*", help="such as 02; default: all")
    parser.add_argument("--seeds", default="0,1,2")
    args = parser.parse_args()
    for path in sorted((ROOT / "lessons").glob("[0-9]*.py")):
        number, _, _ = path.stem.partition("_")
        if args.numbers and number not in args.numbers:
            continue
        target = RESULTS / f"lesson_{number}.json"
        before = json.loads(target.read_text()) if target.exists() else {}
        today = fingerprint(settings(number))
        rows = before["runs"] if before.get("settings") == today else []
        rows = {row["seed"]: row for row in rows}
        for seed in map(int, args.seeds.split(",")):
            rows[seed] = run(path, seed)
            if seed == min(rows):
                picture = ROOT / "runs" / "lessons" / f"{path.stem}.svg"
                shutil.copy(picture, PICTURES)
            result = {"command": f"python bench/lessons.py {number}", "date": str(date.today()),
                      "machine": rows[seed]["machine"], "settings": today,
                      "runs": [rows[key] for key in sorted(rows)]}
            target.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
