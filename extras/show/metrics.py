"""What every number means that a run writes: python -m extras.show --metrics prints the table.

The table is metrics.json, {where: {name: [unit, what it is in one sentence, what to look for]}}. A
name may be a pattern: NAME is of an environment, a part or a function, K a number.

    python -m extras.show.metrics docs/metrics.md      writes the tables of the page again
"""
import json
import re
import sys
import textwrap
from pathlib import Path

PLACES = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
METRICS = {name: tuple(row) for rows in PLACES.values() for name, row in rows.items()}
BLOCK = re.compile("(<!-- begin metrics .*? -->\n).*(<!-- end metrics -->)", re.DOTALL)


def meaning(name: str):
    """Return (unit, sentence, what to look for) of a number, or None if it is not in the table."""
    pattern = re.sub("/.+", "/NAME", re.sub("@[0-9]+$", "@K", name))
    return METRICS.get(name) or METRICS.get(pattern)


def print_metrics():
    """Print the table."""
    for name, (unit, sentence, look_for) in METRICS.items():
        print(f"{name} ({unit})" if unit else name)
        text = f"{sentence} Look for: {look_for}." if look_for else sentence
        print(textwrap.indent(textwrap.fill(text, 76), "    "))


def page_block() -> str:
    """Return the tables of docs/metrics.md, one for each place."""
    lines = []
    for place, rows in PLACES.items():
        lines += [f"## {place}", "", "| name | unit | what it is | what to look for |",
                  "|---|---|---|---|"]
        for name, row in rows.items():
            lines.append(" | ".join((f"| `{name}`", *row)) + " |")
        lines.append("")
    return "\n".join(lines)


def write_page(path):
    """Put the tables between the marks of a page."""
    page = Path(path).read_text("utf-8")
    page = BLOCK.sub(lambda marks: marks[1] + page_block() + marks[2], page)
    Path(path).write_text(page, "utf-8")


if __name__ == "__main__":
    write_page(*sys.argv[1:])
