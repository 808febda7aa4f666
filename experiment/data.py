"""Rows of .jsonl, .csv and .parquet files, read strictly: what Python's own readers let through is refused by line."""
import csv
import difflib
import json
import math
import os

from experiment.config import UserError


def whole(text: str) -> str:
    """Without lone surrogates, which no tokenizer and no UTF-8 file takes."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()  # 10 MB are not copied for nothing


def _no_duplicates(pairs):
    out = dict(pairs)
    if len(out) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f'key "{next(k for k in keys if keys.count(k) > 1)}" twice')
    return out


def _finite(value, name="value"):
    """Refuse what Python's json lets through: NaN, 1e999 and lone surrogates, at any depth."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f'field "{name}": not a finite number')
    if isinstance(value, str) and any("\ud800" <= c <= "\udfff" for c in value):
        half = next(c for c in value if "\ud800" <= c <= "\udfff")
        raise ValueError(f'field "{whole(str(name))}": lone surrogate \\u{ord(half):04x}')
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        if isinstance(value, dict):
            _finite(key, key)
        _finite(item, key if isinstance(value, dict) else name)


def read_rows(path: str) -> list[dict]:
    """Rows of a .jsonl file, one JSON object a line, a .csv with a header (values are text), or a .parquet (with
    pyarrow), read strictly. Each row gets "_line", where it begins. UserError: `FILE:LINE: what is wrong; mend`.
    """
    if not os.path.exists(path):
        folder = os.path.dirname(path) or "."
        near = difflib.get_close_matches(os.path.basename(path), os.listdir(folder) if os.path.isdir(folder) else [], 1)
        nearest = f"; nearest: {os.path.join(os.path.dirname(path), near[0])}" if near else ""
        raise UserError(f"{path}: no such file{nearest}")
    if os.path.isdir(path):
        raise UserError(f"{path}: is a directory; give a .jsonl, .csv or .parquet file")
    if not path.endswith((".jsonl", ".csv", ".parquet")):
        packed = path.endswith((".gz", ".zip", ".xz", ".bz2", ".zst", ".tar", ".tgz", ".7z"))
        mend = "unpack it first" if packed else "use .jsonl (one JSON object a line), .csv (with a header) or .parquet"
        raise UserError(f"{path}: unknown type; {mend}")
    if path.endswith(".parquet"):
        rows = _parquet_rows(path)
    else:
        with open(path, "rb") as f:
            lines = f.read().removeprefix(b"\xef\xbb\xbf").split(b"\n")  # not splitlines: JSON strings may hold U+2028
        rows = _csv_rows(path, lines) if path.endswith(".csv") else _json_rows(path, lines)
    if not rows:
        raise UserError(f"{path}: no rows")
    return rows


def _not_utf8(path, number, line, error):
    return UserError(f"{path}:{number}: byte 0x{line[error.start]:02x} is not UTF-8; save the file as UTF-8")


def _json_rows(path, lines):
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            text = line.decode("utf-8").strip(" \t\r")
            if not text:
                continue
            if text[0] == "[" and not rows:  # on one line or, printed nicely, on many
                raise ValueError("the whole file is one JSON list; write one object per line")
            row = json.loads(text, object_pairs_hook=_no_duplicates)
            if not isinstance(row, dict):
                raise ValueError("not a JSON object")
            _finite(row)
        except UnicodeDecodeError as error:
            raise _not_utf8(path, number, line, error) from None
        except json.JSONDecodeError as error:
            raise UserError(f"{path}:{number}: not JSON: {error.msg} at column {error.colno}") from None
        except RecursionError:
            raise UserError(f"{path}:{number}: nested too deep") from None
        except ValueError as error:
            long = "4300" in str(error)  # Python's own limit on the digits of an int
            raise UserError(f"{path}:{number}: {'number too long' if long else error}") from None
        rows.append({**row, "_line": number})
    return rows


def _csv_rows(path, lines):
    rows, header, text = [], None, []
    for number, line in enumerate(lines, 1):
        try:
            text.append(line.decode("utf-8") + "\n")
        except UnicodeDecodeError as error:
            raise _not_utf8(path, number, line, error) from None
    csv.field_size_limit(2**24)  # characters; Python's own limit of 131,072 is less than a long conversation
    reader, number = csv.reader(text, strict=True), 1
    try:
        for fields in reader:  # a quoted field may hold line breaks
            if header is None and fields:
                header = [name.strip() for name in fields]
                if len(header) == 1 and (mark := next((m for m in ";\t|" if m in header[0]), None)):
                    raise UserError(f"{path}:{number}: one column, {header[0][:60]!r}; separate columns by commas, "
                                    f"not by {mark!r}")
                if problem := next((f'column "{name}" twice' if name else "a column without a name"
                                    for i, name in enumerate(header) if not name or name in header[:i]), None):
                    raise UserError(f"{path}:{number}: {problem}; the first row must name the columns")
            elif fields:
                if len(fields) != len(header):
                    raise UserError(f"{path}:{number}: {len(fields)} fields, the header has {len(header)}; "
                                    "quote a field that holds a comma")
                rows.append({**dict(zip(header, fields)), "_line": number})
            number = reader.line_num + 1
    except csv.Error as error:
        if "unexpected end of data" in str(error):
            raise UserError(f"{path}:{number}: quote opened here is never closed") from None
        raise UserError(f"{path}:{number}: not CSV: {error}") from None
    return rows


def _parquet_rows(path):
    with open(path, "rb") as f:
        if f.seek(0, os.SEEK_END) < 8 or f.seek(-4, os.SEEK_END) and f.read() != b"PAR1":
            raise UserError(f"{path}: not a parquet file (no PAR1 footer)")
    try:
        from pyarrow import parquet, types
    except ImportError:
        raise UserError(f'{path}: reading parquet needs "pip install pyarrow"; or convert to .jsonl') from None
    try:
        table = parquet.read_table(path)
    except Exception as error:
        raise UserError(f"{path}: cannot be read as parquet: {str(error).splitlines()[0][:200]}") from None
    rows, number = [], 0
    for name, kind in zip(table.column_names, table.schema.types):
        if table.column_names.count(name) > 1:
            raise UserError(f'{path}: column "{name}" twice')
        if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
            raise UserError(f'{path}: column "{name}" is binary; rows to learn from are text and numbers')
    try:
        for number, row in enumerate(table.to_pylist(), 1):
            _finite(json.loads(json.dumps(row)))
            rows.append({**_without_padding(row), "_line": number})
    except (TypeError, ValueError) as error:  # TypeError: dates, decimals, binary within a list
        raise UserError(f"{path}:{number}: {error}") from None
    return rows


def _without_padding(value):
    """Arrow gives every call the arguments of all calls of its column, null where a call has none: those go."""
    if isinstance(value, dict):
        return {k: {a: v for a, v in x.items() if v is not None} if k == "arguments" and isinstance(x, dict)
                else _without_padding(x) for k, x in value.items()}
    return [_without_padding(x) for x in value] if isinstance(value, list) else value
