"""Reading the files that people hand in: rows, JSON and YAML.

Python's readers accept NaN, duplicate keys, lone surrogates and lines without end. Here such input
is refused, and every failure becomes one line, `FILE:LINE: what is wrong; how to fix it`.
"""
import csv
import difflib
import json
import math
import os
import re
import stat
import sys
from contextlib import contextmanager
from io import BytesIO
from itertools import count
from pathlib import Path

from experiment.errors import UserError

MAX_LINE = 2**24        # bytes of one line, and of one JSON file
MAX_YAML = 2**18        # bytes; the YAML parser takes seconds for a megabyte
MAX_DEPTH = 100         # of nested lists and objects
PACKED = (".gz", ".zip", ".xz", ".bz2", ".zst", ".tar", ".tgz", ".7z")


# ------------------------------------------------------------------------------------- errors
@contextmanager
def reading(path, line=None):
    """Turn every exception inside the block into a UserError that names file, line and fix.

    A check inside the block raises ValueError with its reason alone. A UserError passes unchanged.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        place = line or _line_of(error)
        location = f"{path}:{place}" if place else f"{path}"
        raise UserError(f"{location}: {_reason(error, path)}") from error


def _line_of(error):
    """Return the line number that the error of a JSON, UTF-8 or YAML decoder states, or None."""
    if isinstance(error, UnicodeDecodeError):
        return error.object.count(b"\n", 0, error.start) + 1
    if isinstance(error, json.JSONDecodeError):
        return error.lineno
    mark = getattr(error, "problem_mark", None)
    return mark.line + 1 if mark else None


def _reason(error, path):
    """Return what is wrong, and how to fix it, for an exception that reading `path` raised."""
    text = str(error).strip().split("\n")[0][:200]
    if isinstance(error, FileNotFoundError):
        return f"no such file{nearest_path(path)}"
    if isinstance(error, PermissionError):
        return "permission denied; make it readable for this user"
    if isinstance(error, IsADirectoryError):
        return "is a directory; give a file"
    if isinstance(error, OSError):
        return error.strerror or text
    if isinstance(error, UnicodeDecodeError):
        return f"byte 0x{error.object[error.start]:02x} is not UTF-8; save the file as UTF-8"
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error.msg} at column {error.colno}"
    if isinstance(error, csv.Error):
        unclosed = "unexpected end of data" in text
        return "quote opened here is never closed" if unclosed else f"not CSV: {text}"
    if isinstance(error, RecursionError):
        return "nested too deep"
    if isinstance(error, MemoryError):
        return "does not fit into memory; split the file"
    if isinstance(error, KeyError):
        return f"no {text} in it"
    if type(error).__module__.startswith("yaml."):
        return f"cannot be read as YAML: {getattr(error, 'problem', None) or text}"
    if "embedded null byte" in text:
        return "the path contains a NUL character"
    if "integer string conversion" in text:
        return "number too long"
    if type(error) is ValueError and text:
        return text
    return f"cannot be read ({type(error).__name__}: {text})"


def nearest_path(path):
    """Return "; nearest: PATH" for the path beside this one whose name is most like it, or ""."""
    path = Path(path)
    names = [neighbour.name for neighbour in path.parent.glob("*")]
    close = difflib.get_close_matches(path.name, names, 1)
    return f"; nearest: {path.with_name(close[0])}" if close else ""


# -------------------------------------------------------------------------------------- files
def open_file(path):
    """Open a regular file for reading bytes. Pipes and devices are refused: they may never end."""
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise ValueError("is not a regular file; save its content to a file and give that")
    return open(path, "rb")


def read_text(path, limit=MAX_LINE):
    """Return the text of a small file, which must be UTF-8, with or without a byte order mark."""
    with reading(path):
        with open_file(path) as file:
            data = file.read(limit + 1)
        if len(data) > limit:
            raise ValueError(f"longer than {limit >> 10} KiB; is it the right file?")
        return data.decode("utf-8-sig")


def lines_of(path):
    """Yield (line number, text) for every line of a text file. Only newlines end a line.

    Every line is read by itself, so that a line longer than MAX_LINE is refused without reading it.
    """
    with reading(path):
        file = open_file(path)
    with file:
        for number in count(1):
            with reading(path, number):
                line = file.readline(MAX_LINE + 1)
                if not line:
                    return
                text = _decoded(line, number)
            yield number, text


def _decoded(line, number):
    if len(line) > MAX_LINE:
        raise ValueError(f"the line is longer than {MAX_LINE >> 20} MiB; write one row per line")
    text = line.decode("utf-8")
    if "\0" in text:
        raise ValueError("contains a NUL character; save the file as UTF-8 text")
    if number == 1:
        return text.removeprefix("\ufeff")
    if text.startswith("\ufeff"):
        raise ValueError("a byte order mark inside the file; remove it")
    return text


# --------------------------------------------------------------------------------------- JSON
def whole(text: str) -> str:
    """Replace lone surrogates, which no tokenizer and no UTF-8 file takes."""
    # Long ASCII texts need no copy.
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def parse_object(text: str) -> dict:
    """Return the JSON object that the text holds. What Python's reader lets through is refused."""
    value = json.loads(text, object_pairs_hook=_unique)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    check_value(value)
    return value


def _unique(pairs):
    unique = {}
    for key, value in pairs:
        if key in unique:
            raise ValueError(f'key "{key}" twice')
        unique[key] = value
    return unique


def check_value(value, name="value", depth=0):
    """Raise ValueError for what is no JSON, numbers too large for a float, and deep nesting.

    Args:
        value: what a reader returned.
        name: the field that the message names.
        depth: how many lists and objects enclose the value.
    """
    if depth > MAX_DEPTH:
        raise ValueError("nested too deep")
    if isinstance(value, str):
        _check_text(value, name)
    elif isinstance(value, int) and abs(value) > sys.float_info.max:
        raise ValueError(f'field "{name}": number too long')
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f'field "{name}": not a finite number')
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_text(key, key)
            check_value(item, key, depth + 1)
    elif isinstance(value, list):
        for item in value:
            check_value(item, name, depth + 1)
    elif not isinstance(value, (int, float, type(None))):
        kind = type(value).__name__
        raise ValueError(f'field "{name}": {kind}; rows to learn from are text and numbers')


def _check_text(text, name):
    if not isinstance(text, str):
        raise ValueError(f"names of fields must be text, not {type(text).__name__}")
    if whole(text) != text:
        half = next(c for c in text if "\ud800" <= c <= "\udfff")
        raise ValueError(f'field "{whole(name)}": lone surrogate \\u{ord(half):04x}')


def read_json(path) -> dict:
    """Return the one JSON object that a file holds."""
    with reading(path):
        return parse_object(read_text(path))


def objects(path, wanted=None):
    """Yield (line number, object) of a .jsonl file, or only of its `wanted` lines.

    A last line that was cut when the run was killed is left out.
    """
    for number, text in lines_of(path):
        if not text.strip() or (wanted is not None and number not in wanted):
            continue
        try:
            with reading(path, number):
                row = parse_object(text)
        except UserError:
            if text.endswith("\n"):
                raise
            return
        yield number, row


# --------------------------------------------------------------------------------------- rows
def read_rows(path: str) -> list[dict]:
    """Return the rows of a .jsonl, .csv or .parquet file, each with its line number as "_line".

    The values of a .csv file are text. Reading .parquet needs pyarrow. No rows are an error.
    """
    if os.path.isdir(path):
        raise UserError(f"{path}: is a directory; give a .jsonl, .csv or .parquet file")
    readers = {".jsonl": _json_rows, ".csv": _csv_rows, ".parquet": _parquet_rows}
    extension = os.path.splitext(path)[1]
    if os.path.exists(path) and extension not in readers:
        known = "use .jsonl (one JSON object a line), .csv (with a header) or .parquet"
        fix = "unpack it first" if extension in PACKED else known
        raise UserError(f"{path}: unknown type; {fix}")
    read = readers.get(extension, _json_rows)
    rows = []
    for line, row in read(path):
        if "self" in row:
            raise UserError(f'{path}:{line}: "self" is a name that Python reserves; '
                            "rename the column")
        rows.append({**row, "_line": line})
    if not rows:
        raise UserError(f"{path}: no rows")
    return rows


def _json_rows(path):
    empty = True
    for number, text in lines_of(path):
        text = text.strip(" \t\r\n")
        if not text:
            continue
        with reading(path, number):
            if empty and text.startswith("["):
                raise ValueError("the whole file is one JSON list; write one object per line")
            row = parse_object(text)
        empty = False
        yield number, row


def _csv_rows(path):
    # A conversation in one field may be longer than Python's limit of 131,072 characters.
    csv.field_size_limit(MAX_LINE)
    reader = csv.reader((text for _, text in lines_of(path)), strict=True)
    header, start = None, 1
    while True:
        with reading(path, start):
            fields = next(reader, None)
            if fields is None:
                return
            if fields and header is None:
                header = _csv_header(fields)
            elif fields:
                if len(fields) != len(header):
                    raise ValueError(f"{len(fields)} fields, the header has {len(header)}; "
                                     "quote a field that holds a comma")
                yield start, dict(zip(header, fields))
        # A quoted field may hold line breaks, so one row may take several lines.
        start = reader.line_num + 1


def _csv_header(fields):
    names = [name.strip() for name in fields]
    separator = re.search(r"[;\t|]", names[0])
    if len(names) == 1 and separator:
        raise ValueError(f"one column, {names[0][:60]!r}; "
                         f"separate columns by commas, not by {separator[0]!r}")
    _check_names(names)
    return names


def _check_names(names):
    """Raise ValueError unless all columns have names of their own."""
    for index, name in enumerate(names):
        if not name:
            raise ValueError("a column without a name; the first row must name the columns")
        if name in names[:index]:
            raise ValueError(f'column "{name}" twice; the first row must name the columns')


def _parquet_rows(path):
    with reading(path), open_file(path) as file:
        data = file.read()
        if len(data) < 12 or not data.endswith(b"PAR1"):
            raise ValueError("not a parquet file (no PAR1 footer)")
    try:
        from pyarrow import parquet
    except ImportError:
        raise UserError(f'{path}: reading parquet needs "pip install pyarrow"; '
                        "or convert to .jsonl") from None
    with reading(path):
        table = parquet.read_table(BytesIO(data))
        _check_names(table.column_names)
        rows = table.to_pylist()
    for number, row in enumerate(rows, 1):
        with reading(path, number):
            check_value(row)
        yield number, _without_nulls(row)


def _without_nulls(value):
    """Drop the nulls of objects: Arrow gives all objects of a column the keys of all others."""
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: _without_nulls(item) for key, item in value.items() if item is not None}


# --------------------------------------------------------------------------------------- YAML
def read_yaml(path):
    """Yield (line number, name, value) for each option in a YAML file.

    A value is the text as typed, or None. The node graph is read, because
    `yaml.safe_load` makes a string of 1e-4, False of no and 8 of 010, and drops duplicate keys.
    """
    # PyYAML arrives with transformers.
    import yaml
    with reading(path):
        root = yaml.compose(read_text(path, MAX_YAML), Loader=yaml.SafeLoader)
    if root and not isinstance(root, yaml.MappingNode):
        raise UserError(f"{path}:1: give lines `name: value`")
    for key, node in root.value if root else ():
        yield key.start_mark.line + 1, _scalar(path, key) or "null", _scalar(path, node)


def _scalar(path, node):
    if not isinstance(node.value, str):
        line = node.start_mark.line + 1
        raise UserError(f"{path}:{line}: give lines `name: value`, nothing nested")
    return None if node.tag == "tag:yaml.org,2002:null" else node.value
