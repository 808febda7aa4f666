"""Write a CSV file of meetings with their true answers: the data of the three-phase course (bench/course.py).

    python bench/meetings_csv.py --rows 2000 --output meetings.csv
"""
import argparse
import csv
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from envs.meetings import TOOLS, Meetings, accuracy, answer, simulate, strongest  # noqa: E402

COLUMNS = ("input_text", "target_probability", "target_reason", "ground_truth_prob", "meeting")


def write_csv(rows: int, output: str, seed: int):
    """Write meetings of the training split with their true answers."""
    tasks = Meetings._tasks("train", rows, seed)
    with open(output, "w", encoding="utf-8", newline="") as f:
        table = csv.writer(f)
        table.writerow(COLUMNS)
        for task in tasks:
            made = simulate(task["meeting"])
            truth = made["probability"]
            target = json.loads(answer(truth, strongest(made["scores"], truth >= 0.5)))
            table.writerow([made["prompt"], target["probability"], target["reason"], round(truth, 4), task["meeting"]])


def main():
    """Write a CSV file of meetings."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--output", default="meetings.csv")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    try:
        write_csv(**vars(given))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(f"written: {given.output}; the best possible accuracy is {accuracy(TOOLS):.1%}\n"
          f"next:    python sft.py --env meetings --tasks {given.output}")


if __name__ == "__main__":
    main()
