"""Rows of a file, whatever is in them: reading them, and holding some of them out."""
import json
import zlib

import numpy as np

from experiment.data import read_rows, reading


def read_as(path: str, convert) -> list:
    """Return convert(row, place) for every row of a file.

    `place` is "FILE:LINE". A ValueError of `convert` becomes a UserError that names it.
    """
    out = []
    for row in read_rows(path):
        place = f"{path}:{row.pop('_line')}"
        with reading(place):
            out.append(convert(row, place))
    return out


def first_row(path: str) -> tuple[dict, str]:
    """Return the first row of a file and its place, "FILE:LINE"."""
    row = read_rows(path)[0]
    return row, f"{path}:{row.pop('_line')}"


def need(row: dict, *fields: str):
    """Raise ValueError if the row lacks one of the fields."""
    for name in fields:
        if row.get(name) is None:
            raise ValueError(f'no "{name}" field; has: {", ".join(row)}')


def is_held_out(content) -> bool:
    """True for a tenth of all contents, by their hash: a row never changes sides."""
    return zlib.crc32(_text(content)) % 10 == 0


def unseen(held_out: list, training: list, content) -> list:
    """Return the held-out items that are no training items, and print how many were dropped.

    `content` is a function: what makes an item the same as another, as JSON can write it.
    """
    seen = {_text(content(item)) for item in training}
    kept = [item for item in held_out if _text(content(item)) not in seen]
    if len(kept) < len(held_out):
        print(f"{len(held_out) - len(kept)} of {len(held_out)} held-out rows are also in the "
              "training data: dropped")
    return kept


def shuffled(items: list, seed: int) -> list:
    """Return the items in random order."""
    return [items[i] for i in np.random.default_rng(seed).permutation(len(items))]


def _text(content) -> bytes:
    return json.dumps(content, sort_keys=True).encode()
