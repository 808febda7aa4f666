"""data.py: what Python's readers accept is refused with file, line and fix, and whatever goes wrong is one line."""
import re

import pytest

from experiment.data import MAX_LINE, read_json, read_rows, read_yaml, reading
from experiment.errors import Stop, UserError, printable


def write(folder, data, name="x.jsonl"):
    path = folder / name
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return str(path)


# -------------------------------------------------------------------------------------------------------------- JSON lines
GOOD = '{"prompt": "a"}\n'
BROKEN = [
    (GOOD * 2 + '{"prompt": "a",}\n', ":3: not JSON: Illegal trailing comma before end of object at column 15|:3: not JSON: .* at column 1[56]"),
    ("{'prompt': 1}\n", ":1: not JSON: .* at column 2"), (GOOD + '{"a": 1} {"b": 2}\n', ":2: not JSON: Extra data at column 10"),
    (GOOD + '{"a": 1\n', ":2: not JSON: .* at column \\d+"), (GOOD + "hello\n", ":2: not JSON: Expecting value at column 1"), ('{"a": "x\ty"}\n', ":1: not JSON: Invalid control character"),
    ('{"a": "\0"}\n', ":1: contains a NUL character; save the file as UTF-8 text$"), (GOOD + "\ufeff" + GOOD, ":2: a byte order mark inside the file; remove it$"), (GOOD + '{"a": 01}', ":2: not JSON: "),
    ('[{"prompt": "a"}, {"prompt": "b"}]', ":1: the whole file is one JSON list; write one object per line$"),
    ('[\n  {"prompt": "a"}\n]\n', ":1: the whole file is one JSON list; write one object per line$"), ("\n[1]\n", ":2: the whole file is one JSON list; .*"),
    (GOOD + "[1, 2]\n", ":2: not a JSON object$"), (GOOD + "3\n", ":2: not a JSON object$"), (GOOD + "null\n", ":2: not a JSON object$"), ('"text"\n', ":1: not a JSON object$"),
    (b'{"a": 1}\n{"a": "caf\xe9"}\n', ":2: byte 0xe9 is not UTF-8; save the file as UTF-8$"), ('{"a": 1}\n'.encode("utf-16"), ":1: byte 0xff is not UTF-8; save the file as UTF-8$"),
    (b'{"a": "\xed\xa0\x80"}\n', ":1: byte 0xed is not UTF-8"), ('{"prompt": "\\ud800"}\n', ':1: field "prompt": lone surrogate .ud[0-9a-f]{3}$'), ('{"a": {"b": ["\\udfff"]}}\n', ':1: field "b": lone surrogate .ud[0-9a-f]{3}$'),
    ('{"\\ud800": 1}\n', ":1: field .*: lone surrogate .ud[0-9a-f]{3}$"), ('{"reward": NaN}\n', ':1: field "reward": not a finite number$'), ('{"reward": -Infinity}\n', ':1: field "reward": not a finite number$'),
    (GOOD + '{"reward": 1e999}\n', ':2: field "reward": not a finite number$'), ('{"a": [{"b": [1, NaN]}]}\n', ':1: field "b": not a finite number$'),
    (GOOD + '{"prompt": 1, "prompt": 2}\n', ':2: key "prompt" twice$'), ('{"a": {"b": 1, "b": 1}}\n', ':1: key "b" twice$'), ("[" * 100_000 + "\n", ":1: (nested too deep|the whole file.*)$"),
    (GOOD + '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}\n", ":2: nested too deep$"), (GOOD + '{"a": ' + "9" * 5000 + "}\n", ":2: number too long$"), ("", ": no rows$"), ("\n \n", ": no rows$"),
    ("\ufeff", ": no rows$")]


@pytest.mark.parametrize("data, says", BROKEN, ids=range(len(BROKEN)))
def test_broken_task_files(tmp_path, data, says):
    path = write(tmp_path, data)
    with pytest.raises(UserError) as error:
        read_rows(path)
    message = str(error.value)
    assert message.startswith(path) and re.match(says, message.removeprefix(path)), message
    assert "\n" not in message and len(message) < len(path) + 200
    message.encode()  # can be printed


def test_paths_that_are_no_task_file(tmp_path):
    write(tmp_path, GOOD, "train.jsonl"), write(tmp_path, "a,b", "train.txt"), write(tmp_path, b"x", "train.jsonl.gz")
    folder = str(tmp_path)
    for name, says in [("trian.jsonl", f"no such file; nearest: {folder}/train.jsonl"), ("zzz", "no such file"), ("no/where.jsonl", "no such file"), ("", "is a directory; give a .jsonl, .csv or .parquet file"),
                       ("train.txt", "unknown type; use .jsonl (one JSON object a line), .csv (with a header) or .parquet"), ("train.jsonl.gz", "unknown type; unpack it first")]:
        path = f"{folder}/{name}".rstrip("/")
        with pytest.raises(UserError) as error:
            read_rows(path)
        assert str(error.value) == f"{path}: {says}"
    for path, says in (("a\0b.jsonl", "a\\x00b.jsonl: the path contains a NUL character"), ("x" * 5000 + ".jsonl", "x" * 5000 + ".jsonl: File name too long")):
        with pytest.raises(UserError) as error:
            read_rows(path)
        assert str(error.value) == says


def test_what_is_accepted(tmp_path):
    data = b'\xef\xbb\xbf{"a": 1}\r\n\n  {"a": "x\xe2\x80\xa8y"}  \r\n{"a": "<|im_end|>"}\n\n{"a": -0.0, "_line": 99}'
    rows = read_rows(write(tmp_path, data))
    assert [r["_line"] for r in rows] == [1, 3, 4, 6] and [r["a"] for r in rows] == [1, "x\u2028y", "<|im_end|>", 0.0]


# --------------------------------------------------------------------------------------------------------------------- CSV
HEADER = "input_text,b\n"


@pytest.mark.parametrize("data, says", [
    ("", ": no rows"), (HEADER, ": no rows"), (HEADER + "1,2\n1,2,3\n", ":3: 3 fields, the header has 2; quote a field that holds a comma"),
    (HEADER + "1\n", ":2: 1 fields, the header has 2"), ("a,a\n1,2\n", ':1: column "a" twice; the first row must name the columns'),
    ("a,\n1,2\n", ":1: a column without a name"), (HEADER + '"x\ny",2\n1,2,3\n', ":4: 3 fields"), (HEADER + '1,2\n"open,2\n3,4\n', ":3: quote opened here is never closed"),
    (HEADER + '"a"b,2\n', ":2: not CSV: "), (HEADER + "1,2\r3,4\n", ":2: not CSV: "), (HEADER.encode() + b"1,2\ncaf\xe9,2\n", ":3: byte 0xe9 is not UTF-8; save the file as UTF-8"),
    (HEADER.encode("utf-16"), ":1: byte 0xff is not UTF-8")])
def test_broken_csv_files(tmp_path, data, says):
    path = tmp_path / "x.csv"
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    with pytest.raises(UserError) as error:
        read_rows(str(path))
    assert str(error.value).startswith(f"{path}{says}") and "\n" not in str(error.value)


def test_csv_as_spreadsheets_write_it(tmp_path):
    path = tmp_path / "x.csv"
    path.write_bytes(b'\xef\xbb\xbfa, b\r\n\r\n"x, ""y""\r\nz",2\r\n3,"caf\xc3\xa9"')
    assert read_rows(str(path)) == [{"a": 'x, "y"\r\nz', "b": "2", "_line": 3}, {"a": "3", "b": "café", "_line": 5}]


# ------------------------------------------------------------------------------------------------------- every kind of fault
@pytest.mark.parametrize("data, says", [
    ('{"a": 1}\n{"self": 1}\n', ':2: "self" is a name that Python reserves; rename the column'),
    ('{"a": ' + "9" * 400 + "}", ':1: field "a": number too long'), ('{"a": [-' + "9" * 400 + "]}", ':1: field "a": number too long'),
    ('{"a": ' + "[" * 150 + "]" * 150 + "}", ":1: nested too deep"), ("null", ":1: not a JSON object")])
def test_rows_and_json_files_are_read_by_the_same_rules(tmp_path, data, says):
    with pytest.raises(UserError) as error:
        read_rows(path := write(tmp_path, data))
    assert str(error.value) == path + says
    if "self" not in data:
        with pytest.raises(UserError) as error:
            read_json(path)
        assert str(error.value) == path + says.removeprefix(":1")


@pytest.mark.parametrize("data, says", [
    ("", ":1: not JSON: Expecting value at column 1"), ("[]", ": not a JSON object"), ("null", ": not a JSON object"), ('{\n"a": 1,\n"b": x}', ":3: not JSON: Expecting value at column 6"),
    (b'{"a":\n"\xe9"}', ":2: byte 0xe9 is not UTF-8; save the file as UTF-8"), ('{"a": NaN}', ': field "a": not a finite number'), ('{"a": 1, "a": 1}', ': key "a" twice'),
    (" " * (MAX_LINE + 1), ": longer than 16384 KiB; is it the right file?")])
def test_broken_json_files(tmp_path, data, says):
    with pytest.raises(UserError) as error:
        read_json(path := write(tmp_path, data, "config.json"))
    assert str(error.value) == path + says


@pytest.mark.parametrize("name", ["x.jsonl", "x.csv"])
def test_a_line_of_60_megabytes_is_refused_by_its_size(tmp_path, name):
    path = write(tmp_path, b"a\n" * (name == "x.csv") + b'{"a": "' + b"x" * 60_000_000 + b'"}', name)
    with pytest.raises(UserError, match=r":[12]: the line is longer than 16 MiB; write one row per line"):
        read_rows(path)


def test_a_yaml_file_of_a_megabyte_and_one_that_is_binary(tmp_path):
    for data, says in (("a: 1\n" * 10**5, ": longer than 256 KiB"), (b"\x7fELF\x00", ": cannot be read as YAML: unacceptable character"), ("a: " + "[" * 20000, ": nested too deep"), ("[a]: 1", ":1: give lines"),
                       ('a: "\\ud800"', None), ("a: &x [*x]", ":1: give lines `name: value`, nothing nested")):
        try:
            list(read_yaml(path := write(tmp_path, data, "x.yaml")))
        except UserError as error:
            assert says and str(error).startswith(path + says), error
        else:
            assert says is None


def test_files_that_cannot_be_opened(tmp_path, monkeypatch):
    import os
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(UserError, match="pipe.jsonl: is not a regular file; save its content to a file"):
        read_rows(str(tmp_path / "pipe.jsonl"))
    (tmp_path / "loop.json").symlink_to(tmp_path / "loop.json")
    with pytest.raises(UserError, match="loop.json: Too many levels of symbolic links"):
        read_json(tmp_path / "loop.json")
    with pytest.raises(UserError, match=": is a directory; give a file"):
        read_json(tmp_path)
    with pytest.raises(UserError, match="x.json/y.json: Not a directory"):
        read_json(write(tmp_path, "{}", "x.json") + "/y.json")
    with pytest.raises(UserError, match="y.json: no such file; nearest: .*x.json"):
        read_json(tmp_path / "y.json")

    def refused(*_):
        raise PermissionError(13, "Permission denied")
    monkeypatch.setattr("experiment.data.open", refused, raising=False)  # root may read everything
    for read, name in ((read_json, "x.json"), (read_rows, "x.jsonl"), (read_rows, "x.csv")):
        with pytest.raises(UserError, match=f"{name}: permission denied; make it readable for this user"):
            read(write(tmp_path, "{}", name))


@pytest.mark.parametrize("error, says", [
    (KeyError("files"), "no 'files' in it"), (RecursionError(), "nested too deep"), (MemoryError(), "does not fit into memory; split the file"), (ValueError("reason; fix"), "reason; fix"),
    (TypeError("'int' object is not iterable"), "cannot be read (TypeError: 'int' object is not iterable)"), (OSError(5, "Input/output error"), "Input/output error"), (AssertionError(), "cannot be read (AssertionError: )"),
    (UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed"), "cannot be read (UnicodeEncodeError: 'utf-8' codec can't encode character '\\ud800' in position 0: surrogates not allowed)")])
def test_any_exception_becomes_one_line(error, says):
    with pytest.raises(UserError) as told, reading("FILE", 3):
        raise error
    assert str(told.value) == f"FILE:3: {says}"


@pytest.mark.parametrize("error", [UserError("other: line"), KeyboardInterrupt(), SystemExit(1), Stop("x", 3)])
def test_what_is_no_fault_of_the_file_passes(error):
    with pytest.raises(type(error)) as told, reading("FILE"):
        raise error
    assert told.value is error


def test_terminal_escapes_become_text():
    clipboard = "\x1b]52;c;cm0gLXJm\x07"
    assert printable(clipboard) == "\\x1b]52;c;cm0gLXJm\\x07"
    assert printable("a\tb\nc\r\nd") == "a\tb\nc\nd" and printable("half\rway\b\x9b31m\x7f") == "half\\rway\\x08\\x9b31m\\x7f"
    assert printable("\u202edesrever\ud800 é 日 🙂") == "\\u202edesrever\\ud800 é 日 🙂"
    assert str(UserError(clipboard)) == str(Stop(clipboard, 3)) == printable(clipboard)
