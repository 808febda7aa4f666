"""What every number means that a run writes: python -m extras.show --metrics prints the table.

The table is metrics.json, {where: {name: [unit, what it is in one sentence, what to look for]}}. A
name may be a pattern: NAME is of an environment, a part or a function, K a number. docs/metrics.md
shows it, which `python bench/pages.py` writes.
"""
import json
import re
import textwrap
from pathlib import Path

PLACES = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
METRICS = {name: tuple(row) for rows in PLACES.values() for name, row in rows.items()}


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
