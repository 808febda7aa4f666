"""Reading the files that people hand in: rows, JSON and YAML.

Every failure becomes one line, `FILE:LINE: what is wrong`.
"""
import importlib
import json
import math
import os
import re
from contextlib import contextmanager

from core.errors import UserError, first_line

TABLES = "extras.data.tables"  # a run without data files needs no reader of them
LISTS = ("dataset", "eval_dataset", "tasks")  # options that YAML may give as a list of rows
WEIGHTED = re.compile(r"(.*?)\s*(?:=\s*([0-9]*\.?[0-9]+))?", re.DOTALL)


@contextmanager
def reading(path, line=None):
    """Turn every exception inside the block into a UserError that names the file and the line.

    A check inside the block raises ValueError with its reason alone. A UserError passes unchanged.
    """
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        line = line or getattr(error, "lineno", None)
        place = f"{path}:{line}" if line else path
        raise UserError(f"{place}: {_reason(error, path)}") from error


def _reason(error, path):
    """Return what is wrong with a file, for an exception that reading it raised."""
    if isinstance(error, KeyError):
        return f"no {error} in it"
    if isinstance(error, UnicodeDecodeError):
        return f"byte 0x{error.object[error.start]:02x} is not UTF-8; save the file as UTF-8"
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error.msg} at column {error.colno}"
    if type(error) is ValueError:
        return first_line(error)
    # Of another file, such as one of the hub's cache, the error itself says which.
    if getattr(error, "strerror", None) and error.filename in (None, str(path)):
        return error.strerror
    return f"cannot be read ({type(error).__name__}: {first_line(error)})"


def lines_of(path):
    """Yield (line number, text) for every line of a UTF-8 file. Only newlines end a line."""
    with reading(path), open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            with reading(path, number):
                # Spreadsheets begin a file with a byte order mark.
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            yield number, text


def read_text(path):
    """Return the text of a UTF-8 file."""
    return "".join(text for _, text in lines_of(path))


def whole(text: str) -> str:
    """Replace lone surrogates, which no tokenizer and no UTF-8 file takes."""
    return text.encode("utf-8", "replace").decode()


# --------------------------------------------------------------------------------------- JSON
def _unique(pairs):
    unique = {}
    for key, value in pairs:
        if key in unique:
            raise ValueError(f'key "{key}" twice')
        unique[key] = value
    return unique


def _finite(text):
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a finite number")
    return number


def parse_object(text: str, as_dict=_unique) -> dict:
    """Return the JSON object that the text holds; `as_dict` makes objects of pairs.

    Raises ValueError for what Python's reader lets through: NaN, infinity, a key given twice.
    """
    value = json.loads(text, object_pairs_hook=as_dict, parse_float=_finite, parse_constant=_finite)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def read_json(path) -> dict:
    """Return the one JSON object that a file holds."""
    with reading(path):
        return parse_object(read_text(path))


# --------------------------------------------------------------------------------------- rows
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


def read_rows(path: str):
    """Yield (line number, row) of a file or another source. No rows are an error.

    The cells of a .csv file are text. Reading .parquet needs pyarrow, hub:owner/name datasets.
    """
    number = None
    for number, row in importlib.import_module(TABLES).reader_of(path)(path):
        yield number, row
    if number is None:
        raise UserError(f"{path}: no rows")


def json_rows(path, wanted=None, is_log=False):
    """Yield (line number, row) of a .jsonl file, or only of its `wanted` lines.

    Of a log a last line is left out that was cut when the run was killed.
    """
    for number, text in lines_of(path):
        if not text.strip() or (wanted is not None and number not in wanted):
            continue
        try:
            with reading(path, number):
                if text.startswith("["):
                    raise ValueError("a JSON list; write one object per line, or name the "
                                     "file .json")
                row = parse_object(text)
        except UserError:
            if is_log and not text.endswith("\n"):
                return
            raise
        yield number, row


# --------------------------------------------------------------------------------------- messages
def as_messages(value, name: str, role: str | None = None) -> list[dict]:
    """Return a field's messages as a list. With a role it may also be one message, or its text."""
    tables = importlib.import_module(TABLES)
    if isinstance(value, str):
        value = tables.messages_of(value)
    if role and isinstance(value, str):
        value = {"role": role, "content": value}
    if role and isinstance(value, dict):
        value = [value]
    if isinstance(value, list) and value and all(isinstance(m, dict) for m in value):
        return list(map(tables.with_our_names, value))
    kind = "text or a list" if role else "a list"
    raise ValueError(f'"{name}" must be {kind} of {{"role": ..., "content": ...}}')


# --------------------------------------------------------------------------------------- YAML
def read_yaml(path):
    """Yield (line number, name, value) for each option in a YAML file.

    A value is the text as typed, None, or a list of rows as JSON. The node graph is read, because
    `yaml.safe_load` makes a string of 1e-4, False of no and 8 of 010, and drops duplicate keys.
    """
    # PyYAML arrives with transformers.
    import yaml
    with reading(path):
        try:
            root = yaml.compose(read_text(path), Loader=yaml.SafeLoader)
        except yaml.MarkedYAMLError as error:
            raise UserError(f"{path}:{error.problem_mark.line + 1}: cannot be read as YAML: "
                            f"{error.problem}") from None
    if root and not isinstance(root, yaml.MappingNode):
        raise UserError(f"{path}:1: give lines `name: value`")
    for key, node in root.value if root else ():
        with reading(path, node.start_mark.line + 1):
            name = _scalar(key) or "null"
            is_list = node.id == "sequence" and name in LISTS
            value = importlib.import_module(TABLES).rows_as_json(node) if is_list else _scalar(node)
        yield key.start_mark.line + 1, name, value


def _scalar(node):
    if not isinstance(node.value, str):
        raise ValueError("give lines `name: value`, nothing nested")
    return None if node.tag == "tag:yaml.org,2002:null" else node.value
