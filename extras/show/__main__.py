"""The page of runs, and what every logged number means.

    python -m extras.show RUN...       RUN/report.html, or for several FIRST_RUN/compare.html
    python -m extras.show --metrics
"""
import argparse
import sys

from core.config import UserError
from extras.show.metrics import print_metrics


def program():
    """Do what the command line asks for, or end with one line that says why not."""
    if sys.stdout:  # it may be closed
        sys.stdout.reconfigure(errors="backslashreplace")
    parser = argparse.ArgumentParser("python -m extras.show", allow_abbrev=False)
    parser.add_argument("runs", nargs="*", metavar="RUN",
                        help="an output folder, or a .jsonl of episodes; several share a page")
    parser.add_argument("--metrics", action="store_true",
                        help="print what every logged number means")
    asked = parser.parse_args()
    if not (asked.runs or asked.metrics):
        parser.error("give the output folder of a run, or --metrics")
    if asked.metrics:
        print_metrics()
    if asked.runs:
        from extras.show.page import write_html  # it imports torch
        try:
            print(f"written: {write_html(*asked.runs)}")
        except (UserError, OSError) as error:
            print(f"extras.show: {' '.join(str(error).split())}", file=sys.stderr)
            sys.exit(2)


if __name__ == "__main__":
    program()
