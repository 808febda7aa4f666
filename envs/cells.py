"""The cells of a .csv file of tasks as the type hints of `reset` want them."""
import json
import typing
from contextlib import suppress

from envs.calls import fit, hint_name, needed


def read_cells(method, row: dict) -> dict:
    """Return a row of a CSV file, whose cells are text, as the type hints of a method want it.

    An empty cell that cannot be read is left out where the argument has a default: in a table for
    several environments the columns of the others are empty. Raises ValueError.
    """
    hints = typing.get_type_hints(method)
    cells = {}
    for name, text in row.items():
        try:
            cells[name] = read_cell(name, text, hints.get(name, str))
        except ValueError:
            if text or name in needed(method):
                raise
    return cells


def read_cell(name: str, text: str, hint):
    """Return the value of a cell in the column `name`, or raise ValueError.

    A cell that its hint takes as text stays text, unless it is empty or holds a JSON list or object
    that the hint takes, too: several accepted answers, for instance. Others are read as JSON.
    """
    # Spreadsheets and pandas write True, not true.
    is_bool = text.lower() in ("true", "false")
    values = [text]
    with suppress(ValueError):
        values.append(json.loads(text.lower() if is_bool else text or "null"))
    if text[:1] in ("", "[", "{"):
        values.reverse()
    for value in values:
        with suppress(TypeError, ValueError):
            return fit(value, hint)
    raise ValueError(f"{name}: {text[:40]!r} cannot be read as {hint_name(hint)}")
