"""Reading rows of .csv and .parquet files. `read_rows` loads this module when it meets one."""
import csv
import json

from experiment.data import lines_of, parse_object, reading
from experiment.errors import UserError


def csv_rows(path):
    """Yield (line number, row) of a .csv file with a header. All cells are text."""
    # A conversation in one cell may be longer than Python's limit of 131,072 characters.
    csv.field_size_limit(2**24)
    reader = csv.reader((text for _, text in lines_of(path)), strict=True)
    header = None
    while True:
        # A cell in quotes may hold line breaks, so one row may take several lines.
        number = reader.line_num + 1
        with reading(path, number):
            try:
                cells = next(reader, None)
            except csv.Error as error:
                raise ValueError(f"not CSV: {error}") from None
            if cells and header and len(cells) != len(header):
                raise ValueError(f"{len(cells)} fields, the header has {len(header)}; "
                                 "quote a field that holds a comma")
        if cells is None:
            return
        if cells and header:
            yield number, dict(zip(header, cells))
        elif cells:
            header = [name.strip() for name in cells]
            if len(set(header)) < len(header):
                raise UserError(f"{path}:{number}: the header names a column twice")


def parquet_rows(path):
    """Yield (row number, row) of a .parquet file, of which a batch at a time is read."""
    try:
        from pyarrow import parquet
    except ImportError:
        raise UserError(f'{path}: reading parquet needs "pip install pyarrow"; '
                        "or convert to .jsonl") from None
    with reading(path):
        batches = parquet.ParquetFile(path).iter_batches(1000)
    number, rows = 0, [None]
    while rows:
        with reading(path):
            batch = next(batches, None)
            rows = batch.to_pylist() if batch else []
        for number, row in enumerate(rows, number + 1):
            with reading(path, number):
                # The same rules as for .jsonl: no dates, no bytes, no NaN.
                row = parse_object(json.dumps(row), _without_nulls)
            yield number, row


def _without_nulls(pairs):
    # Arrow gives all objects of a column the keys of all others.
    return {key: value for key, value in pairs if value is not None}
