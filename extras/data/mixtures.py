"""Data sets as a flag names them: files, data sets of the hub, lists of rows, several of them.

    a.jsonl                                     also .json, .csv, .parquet
    hub:owner/name[@revision][:config][:split]  of the Hugging Face hub; the split is "train"
    ["What is 2 + 3?", {"prompt": ...}]         the rows themselves, in YAML or JSON
    a.jsonl,b.csv                               all rows of both
    a.jsonl=0.7,b.csv=0.3                       rows of both, 7 of the first to 3 of the second

A mixture is as large as it can be without a row that comes twice: all rows of one source, and of
the others as many as the weights ask for, drawn by the seed.
"""
import os
import re
from contextlib import suppress

from core.config import UserError, mix, say_once
from envs.task_files import read_rows
from core.data import shuffled

WEIGHTED = re.compile(r"(.*?)\s*(?:=\s*([0-9]*\.?[0-9]+))?", re.DOTALL)


def data_sources(text: str | None) -> list[tuple[str, float | None]]:
    """Return [(source, weight)] of "a.jsonl=0.7,b.csv=0.3". The weight None is none.

    A list of rows is one source, and so is a file with a comma in its name.
    """
    if not text:
        return []
    if text.startswith("[") or os.path.exists(text):
        return [(text, None)]
    matches = [WEIGHTED.fullmatch(item.strip()) for item in text.split(",")]
    return [(match[1], match[2] and float(match[2])) for match in matches]


def rows_of(data: str, fields: str | None, seed: int):
    """Yield (place, row) of all rows of a data set, the value of a flag. A place is "FILE:LINE".

    Args:
        fields: what --fields says: "question=problem" makes the column `problem` the `question`.
        seed: of the rows that a mixture draws.

    Raises UserError.
    """
    columns = _columns(fields)
    sources = data_sources(data)
    weights = [weight for _, weight in sources]
    if set(weights) == {None}:
        for source, _ in sources:
            yield from _rows(source, columns)
        return
    if not all(weights):
        raise UserError(f"{data}: give every one of them a weight above 0, or none")
    tables = [list(_rows(source, columns)) for source, _ in sources]
    unit = min(len(rows) / weight for rows, weight in zip(tables, weights))
    for (source, weight), rows in zip(sources, tables):
        # Without the small number, 0.3 / 0.1 would be 2.
        drawn = int(unit * weight + 1e-9)
        say_once(f"{source}: {drawn} of {len(rows)} rows, its share of the mixture")
        yield from shuffled(rows, mix(seed, source))[:drawn]


def _rows(source, columns):
    """Yield (place, row) of one source, with the names of columns that --fields gives."""
    place = "the list of rows" if source.startswith("[") else source
    missing = set(columns)
    for line, row in read_rows(source):
        renamed = {}
        for ours, theirs in columns.items():
            with suppress(KeyError, TypeError):
                renamed[ours] = _value(row, theirs)
        missing -= renamed.keys()
        if row.get("chat_template_kwargs"):
            say_once(f"note: {place}: chat_template_kwargs is not read; set such values at the top "
                     "of the model's chat_template.jinja: {% set enable_thinking = false %}")
        kept = {name: value for name, value in row.items() if name not in columns.values()}
        yield f"{place}:{line}", kept | renamed
    if missing:
        names = sorted({columns[name] for name in missing})
        say_once(f"note: {place}: no row has {', '.join(names)}, which --fields names")


def _value(row, name):
    """Return what a row has under a name. verl has answers as "reward_model.ground_truth"."""
    if name in row:
        return row[name]
    outer, _, inner = name.partition(".")
    return _value(row[outer], inner)


def _columns(fields):
    """Return {our name: the name in the data} of --fields."""
    columns = {}
    for item in fields.split(",") if fields else ():
        ours, _, theirs = map(str.strip, item.partition("="))
        if not ours or not theirs or ours in columns:
            raise UserError(f"--fields {item}: write question=problem,answer=solution: our name of "
                            "a column, and its name in the data")
        columns[ours] = theirs
    return columns
