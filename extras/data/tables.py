"""Rows of all kinds of files, of data sets of the Hugging Face hub, and of lists in YAML."""
import ast
import csv
import inspect
import json
import os
import re
from contextlib import suppress

from envs import ENVS
from core.data import lines_of, parse_object, read_text
from core.config import UserError, reading
from extras.data.strict import OF_ROWS, STRICT

# What others call our roles.
ROLES = {"human": "user", "gpt": "assistant", "function_call": "assistant",
         "tool_call": "assistant", "observation": "tool", "function": "tool",
         "tool_response": "tool", "developer": "system"}
LIKE_MESSAGES = re.compile(
    r"""\s*\[\s*\{\s*['"](role|from|(content|value)['"].*['"](role|from))['"]\s*:""", re.DOTALL)
HH_TURN = re.compile(r"\n\n(Human|Assistant):(.*?)(?=\n\n(?:Human|Assistant):|\Z)", re.DOTALL)


# -------------------------------------------------------------------------------- what a field says
TRUTH = (dict.fromkeys(("false", "no", "off", "n", "f", 0.0), 0)
         | dict.fromkeys(("true", "yes", "on", "y", "t", 1.0), 1))
THOUGHT_FIELDS = ("reasoning_content", "thinking", "reasoning")
TEXT_PARTS = ("text", "input_text", "output_text")  # the last two are OpenAI's newer names
MEDIA = ("image", "images", "video", "videos", "audio", "audios")


def truth(value) -> int | None:
    """Return 1 or 0 for a truth value in any spelling, such as 0.0 or "No", else None."""
    text = str(value).strip().lower()
    with suppress(ValueError):
        return TRUTH.get(float(text))
    return TRUTH.get(text)


def is_empty(value) -> bool:
    """True for what says nothing: null, "", [], also spelled as JSON, and lists of such."""
    if isinstance(value, str):
        with suppress(ValueError):
            value = json.loads(value)
    if isinstance(value, dict):
        value = list(value.values())
    return all(map(is_empty, value)) if isinstance(value, list) else value in (None, "")


def need_text_alone(fields: dict, hint: str = "", read=()):
    """Raise ValueError if a row, a message or a part has a picture or sound: no model gets them.

    `read` are the names that something else reads.
    """
    for name in MEDIA:
        if name not in read and not is_empty(fields.get(name)):
            raise ValueError(f'"{name}" is not read, only text is; leave such rows out'
                             f"{hint.format(name=name)}")


def need_text_row(row: dict, reset=None):
    """Raise ValueError if a row has pictures or sound, unless the method `reset` takes them."""
    if not row.keys().isdisjoint(MEDIA):
        read = inspect.signature(reset).parameters if reset else ()
        need_text_alone(row, ", or take their text alone: --fields unread={name}", read)


def text_of(content, name="content"):
    """Return the text of a field, which may be a list of text parts."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        for part in content:
            is_text = isinstance(part, dict) and isinstance(part.get("text"), str)
            if not is_text or part.get("type") not in TEXT_PARTS:
                raise ValueError(f"{name} must be text or text parts, got the part {part!s:.60}")
            need_text_alone(part)
        return "".join([part["text"] for part in content])
    raise ValueError(f"{name} must be text or text parts, got {type(content).__name__}")


# -------------------------------------------------------------------------------------- tables
def csv_rows(path):
    """Yield (line number, row) of a .csv file with a header. All cells are text.

    Columns without a name, such as the index that pandas writes, are left out.
    """
    header = None
    for number, cells in _lines_of_cells(path):
        with reading(path, number):
            if header is None:
                header = list(map(str.strip, cells))
                names = list(filter(None, header))
                if len(set(names)) < len(names):
                    raise ValueError("the header names a column twice")
                continue
            if len(cells) != len(header):
                raise ValueError(f"{len(cells)} fields, the header has {len(header)}; "
                                 "quote a field that holds a separator")
        yield number, {name: cell for name, cell in zip(header, cells) if name}


def _lines_of_cells(path):
    """Yield (line number, cells) of a .csv file, without the empty rows that Excel writes below.

    Where a comma is the decimal point, Excel separates the columns by semicolons.
    """
    # A conversation in one cell may be longer than Python's limit of 131,072 characters.
    csv.field_size_limit(2**24)
    _, first = next(lines_of(path), (1, ""))
    separator = max(",;\t", key=first.count)
    reader = csv.reader((text for _, text in lines_of(path)), delimiter=separator, strict=True)
    while True:
        # A cell in quotes may hold line breaks, so one row may take several lines.
        number = reader.line_num + 1
        with reading(path, number):
            cells = next(reader, None)
        if cells is None:
            return
        if any(cells):
            yield number, cells


def messages_of(cell: str):
    """Return the messages that a cell holds as JSON, or as pandas writes lists, else the cell.

    They may also be written as in HH-RLHF, whose prompts end with a turn without a text.
    """
    if re.match(r"\s*\n\nHuman:", cell):
        return [{"from": sender.lower(), "value": text.strip()}
                for sender, text in HH_TURN.findall(cell) if text.strip()]
    if not LIKE_MESSAGES.match(cell):
        return cell
    try:
        messages = json.loads(cell)
    except ValueError:
        messages = ast.literal_eval(cell)
    # An answer in JSON may have objects with a "role" or a "from", too.
    return messages if {"content", "value", "tool_calls"} & messages[0].keys() else cell


def with_our_names(value):
    """Return what a field holds with our names: messages, one message, or text that has some."""
    if isinstance(value, str):
        value = messages_of(value)
    return list(map(_with_our_names, value)) if isinstance(value, list) else _with_our_names(value)


def _with_our_names(message):
    """Return a message of ShareGPT, ms-swift or OpenAI's older form with our names.

    A call outside of "tool_calls" becomes text between <tool_call> and </tool_call>. What is no
    dict stays as it is.
    """
    if not isinstance(message, dict):
        return message
    need_text_alone(message)
    message = dict(message)
    if "from" in message:
        message |= {"role": message["from"], "content": message.get("value")}
    call = message.pop("function_call", None)
    for name in THOUGHT_FIELDS:
        if message.get(name) not in (None, [], {}):
            message[name] = text_of(message[name], name)
    role = message.get("role")
    said = message.get("content") or ""
    if role in ("function_call", "tool_call") and "<tool_call>" not in said:
        said, call = "", said
    if call:
        message["content"] = (said + f"\n<tool_call>\n{call}\n</tool_call>").lstrip()
    return {**message, "role": ROLES.get(role, role)}


def parquet_rows(path):
    """Yield (row number, row) of a .parquet file, of which a batch at a time is read."""
    try:
        from pyarrow import parquet
    except ImportError:
        raise UserError(f'{path}: reading parquet needs "pip install pyarrow"; '
                        "or convert to .jsonl") from None
    with reading(path):
        file = parquet.ParquetFile(path)
        rows = (row for batch in file.iter_batches(1000) for row in batch.to_pylist())
        # What the package datasets writes as JSON text ("Json") it also reads.
        if b'"Json"' in (file.schema_arrow.metadata or {}).get(b"huggingface", b""):
            from datasets import Features
            rows = map(Features.from_arrow_schema(file.schema_arrow).decode_example, rows)
        yield from _as_json(path, rows)


def _as_json(path, rows):
    """Yield (row number, row) by the rules of .jsonl: no NaN, and dates and decimals are text."""
    for number, row in enumerate(rows, 1):
        with reading(path, number):
            text = json.dumps(row, default=_as_text)
            row = json.loads(text, **STRICT | OF_ROWS | {"object_pairs_hook": _without_nulls})
        yield number, row


def _as_text(value):
    """Return what JSON does not know as text. Bytes that are no text become an object."""
    if not isinstance(value, bytes):
        return str(value)
    # Some programs write text without saying so.
    with suppress(UnicodeDecodeError):
        return value.decode()
    return {"bytes": len(value)}


def _without_nulls(pairs):
    # Arrow gives all objects of a column the keys of all others.
    return {key: value for key, value in pairs if value is not None}


# ------------------------------------------------------------------------- hub:owner/name
def hub_rows(source):
    """Yield (row number, row) of hub:owner/name[@revision][:config][:split]; the split is train."""
    builder, split = _hub_data(source)
    with reading(source):
        builder.download_and_prepare()
        yield from _as_json(source, builder.as_dataset(split))


def pinned(source):
    """Return the source with its revision, config and split. Raises UserError.

    The revision is the commit, or of a local folder in the form of a data set what tells that its
    files have changed.
    """
    builder, split = _hub_data(source)
    name = re.split("[@:]", source)[1]
    return f"hub:{name}@{builder.hash}:{builder.config.name}:{split}"


def _hub_data(source):
    """Return the builder of a data set, which knows its revision, and the name of the split."""
    try:
        import datasets
    except ImportError:
        raise UserError(f'{source}: reading it needs "pip install datasets"; or download the data '
                        "set as .jsonl or .parquet") from None
    # A colon in brackets is that of a slice: train[:100].
    name, *rest = re.split(r":(?![^\[]*\])", source.removeprefix("hub:"), maxsplit=2)
    name, _, revision = name.partition("@")
    with reading(source):
        if len(rest) == 1:
            builder = None
            # One word is the name of a config, or else of a split.
            with suppress(ValueError):
                builder = datasets.load_dataset_builder(name, rest[0], revision=revision or None)
            rest = [rest[0], "train"] if builder else [None, rest[0]]
        config, split = rest or (None, "train")
        builder = datasets.load_dataset_builder(name, config, revision=revision or None)
        # Without a network the newest revision that was downloaded is found, whatever was asked.
        if re.fullmatch("[0-9a-f]{16,}", revision) and builder.hash != revision:
            raise ValueError(f"this machine has revision {builder.hash} of it, which is another")
    return builder, split


# ---------------------------------------------------------------------------- lists of rows
def json_file_rows(path):
    """Yield (number, row) of a .json file: of a list of rows, or of one object a line."""
    from envs.task_files import json_rows  # which imports this file
    text = read_text(path).strip()
    return list_rows(text, path) if text.startswith("[") else json_rows(path)


def list_rows(text, place="the list of rows"):
    """Yield (number, row) of a JSON list. A row is an object, or what is the prompt of one."""
    with reading(place):
        rows = parse_object(f'{{"rows": {text}}}', **OF_ROWS)["rows"]
    for number, row in enumerate(rows, 1):
        yield number, row if isinstance(row, dict) else {"prompt": row}


def rows_as_json(node):
    """Return the JSON of a YAML list of rows, or the names of a list of files, with commas.

    A row that is one word or number is text.
    """
    files = [str(row.value) for row in node.value]
    kinds = (".jsonl", ".json", ".csv", ".parquet")
    if all(name.startswith("hub:") or name.lower().endswith(kinds) for name in files):
        return ",".join(files)
    for row in node.value:
        row.style = "quoted"
    return as_json(node)


def as_json(node):
    """Return the JSON of a YAML node. Only JSON's numbers and words are no text: `no` is text."""
    if node.id == "sequence":
        return f"[{', '.join(map(as_json, node.value))}]"
    if node.id == "mapping":
        pairs = [f"{json.dumps(key.value)}: {as_json(value)}" for key, value in node.value]
        return f"{{{', '.join(pairs)}}}"
    with suppress(ValueError):
        if node.style is None:
            json.loads(node.value)
            return node.value
    return json.dumps(node.value)


def refuse(source):
    """Raise UserError for a source that none of READERS reads."""
    # The text of an object that Python code gave may have several lines.
    named = source.partition("\n")[0]
    name = named.rpartition("/")[2].lower()
    meant = []
    if re.fullmatch(r"[\w.-]+/[\w.-]+(:.+)?", named) and not os.path.exists(named):
        meant.append(f"a data set of the hub is written hub:{named}")
    if name in ENVS:
        meant.append(f"--env {name} plays the tasks of that name, without --dataset")
    meant.append("use .jsonl (one JSON object a line), .json (a list), .csv (with a header), "
                 ".parquet or hub:owner/name")
    raise UserError(f"{named}: unknown type; {'; '.join(meant)}")


# By the end or the beginning of a source. Every one ends with the last.
READERS = {".csv": csv_rows, ".parquet": parquet_rows, ".json": json_file_rows, "hub:": hub_rows,
           "[": list_rows, "": refuse}
