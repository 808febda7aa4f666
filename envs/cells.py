"""The cells of a .csv file of tasks as the type hints of `reset` want them."""
import json
import typing
from contextlib import suppress

from envs.calls import fit, hint_name


def read_cells(method, row: dict) -> dict:
    """Return a row of a CSV file, whose cells are text, as the type hints of a method want it.

    A cell that its hint takes as text stays text. Others are read as JSON; an empty cell is None.
    Raises ValueError.
    """
    hints = typing.get_type_hints(method)
    out = dict(row)
    for name, text in row.items():
        hint = hints.get(name, str)
        try:
            out[name] = read_cell(text, hint)
        except (TypeError, ValueError):
            kind = hint_name(hint)
            raise ValueError(f"{name}: {text[:40]!r} cannot be read as {kind}") from None
    return out


def read_cell(text: str, hint):
    """Return the value of a cell, or raise TypeError or ValueError."""
    with suppress(TypeError):
        return fit(text, hint)
    # Spreadsheets and pandas write True, not true.
    is_bool = text.lower() in ("true", "false")
    return fit(json.loads(text.lower() if is_bool else text or "null"), hint)
