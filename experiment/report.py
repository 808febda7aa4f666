"""Reports of finished runs: one run as a page, or several runs compared.

Accuracy is the share of held-out tasks solved (result.json) or, of a .jsonl, of its episodes
(info.success). What is said of a training run's episodes is said of the last quarter of its steps,
when its policy was nearly finished.
"""
import argparse
import sys
from pathlib import Path

from experiment.comparison import comparison
from experiment.data import whole
from experiment.errors import UserError, printable
from experiment.files import replace_file
from experiment.page import page

USAGE = """
    python -m experiment.report html RUN [--output RUN/report.html] [--tokenizer FOLDER]
    python -m experiment.report report RUN... [--output report.md]"""


def write_html(name, output=None, tokenizer=None, quiet=False):
    """Write the page of one run and return its path. Raises UserError as `records.load`.

    Args:
        name: an output folder or a .jsonl of episodes.
        output: the file to write; by default beside what is shown.
        tokenizer: a tokenizer.json or its folder; by default that of the run.
        quiet: do not print what is missing; the page says it too.
    """
    text, notes = page(name, tokenizer)
    path = Path(name)
    default = path / "report.html" if path.is_dir() else path.with_suffix(".html")
    return save(output or default, text, [] if quiet else notes)


def write_report(names, output="report.md"):
    """Write the comparison of several runs, in the order given, and return its path."""
    return save(output, *comparison(names))


def save(output, text, notes):
    try:
        replace_file(Path(output), whole(text))
    except OSError as error:
        raise UserError(f"--output {output}: cannot be written ({error.strerror})") from None
    for note in dict.fromkeys(notes):
        print(f"note: {printable(note)}", file=sys.stderr)
    return Path(output)


class Parser(argparse.ArgumentParser):
    """An argument parser that reports its errors as `main` reports all others, in one line."""

    def error(self, message):
        raise UserError(f"{message}; --help explains")


def main(argv):
    """Write what the command line asks for and print its path. Raises UserError."""
    parser = Parser("python -m experiment.report", usage=USAGE, allow_abbrev=False)
    parser.add_argument("command", choices=("html", "report"),
                        help="one run as a page, or several compared")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="an output folder or a .jsonl")
    parser.add_argument("--output", help="file to write; by default RUN/report.html or report.md")
    parser.add_argument("--tokenizer", help="html: folder of a tokenizer.json, not the run's")
    args = parser.parse_args(argv)
    suffix = ".html" if args.command == "html" else ".md"
    if args.output and not args.output.endswith(suffix):
        # Never write over a file of episodes.
        raise UserError(f"--output {args.output}: give a name that ends in {suffix}")
    if args.command == "report":
        if args.tokenizer:
            raise UserError("--tokenizer goes with html")
        written = write_report(args.runs, args.output or "report.md")
    elif len(args.runs) > 1:
        raise UserError("html: give one run; `report` compares several")
    else:
        written = write_html(args.runs[0], args.output, args.tokenizer)
    print(f"written: {printable(str(written))}")


if __name__ == "__main__":
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")
    try:
        main(sys.argv[1:])
    except (UserError, OSError) as error:
        print(f"experiment.report: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
