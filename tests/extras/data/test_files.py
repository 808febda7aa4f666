"""data.py: what Python's readers accept is refused with file, line and fix, and whatever goes wrong is one line."""
import re
from datetime import datetime
from decimal import Decimal

import pytest

from envs.tasks import load_tasks
from core.data import read_json
from envs.task_files import read_rows as rows_of
from core.config import UserError, printable, reading
from extras.stop import Stop
from extras.hints.command_line import read_yaml


def read_rows(path):
    return list(rows_of(path))


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
    ('{"a": "\0"}\n', ":1: not JSON: Invalid control character"), (GOOD + "\ufeff" + GOOD, ":2: not JSON: "), (GOOD + '{"a": 01}', ":2: not JSON: "),
    ('[{"prompt": "a"}, {"prompt": "b"}]', ":1: a JSON list; write one object per line, or name the file .json$"),
    ('[\n  {"prompt": "a"}\n]\n', ":1: a JSON list; write one object per line, or name the file .json$"), (GOOD + "3\n", ":2: not a JSON object$"), (GOOD + "null\n", ":2: not a JSON object$"),
    (b'{"a": 1}\n{"a": "caf\xe9"}\n', ":2: byte 0xe9 is not UTF-8; save the file as UTF-8$"), ('{"a": 1}\n'.encode("utf-16"), ":1: byte 0xff is not UTF-8; save the file as UTF-8$"),
    (GOOD + '{"reward": 1e999}\n', ":2: 1e999 is not a finite number$"),
    (GOOD + '{"prompt": 1, "prompt": 2}\n', ':2: key "prompt" twice$'), ('{"a": {"b": 1, "b": 1}}\n', ':1: key "b" twice$'),
    (GOOD + '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}\n", ":2: cannot be read .RecursionError: maximum recursion depth exceeded"),
    (GOOD + '{"a": ' + "9" * 5000 + "}\n", ":2: Exceeds the limit .4300 digits. for integer string conversion"), ("", ": no rows$"), ("\n \n", ": no rows$"), ("\ufeff", ": no rows$")]


@pytest.mark.parametrize("data, says", BROKEN, ids=range(len(BROKEN)))
def test_broken_task_files(tmp_path, data, says):
    path = write(tmp_path, data)
    with pytest.raises(UserError) as error:
        read_rows(path)
    message = str(error.value)
    assert message.startswith(path) and re.match(says, message.removeprefix(path)), message
    assert "\n" not in message and len(message) < len(path) + 250
    message.encode()  # can be printed


def test_paths_that_are_no_task_file(tmp_path):
    write(tmp_path, "a,b", "train.txt"), write(tmp_path, b"x", "train.jsonl.gz"), (tmp_path / "folder.csv").mkdir()
    unknown = "unknown type; use .jsonl (one JSON object a line), .json (a list), .csv (with a header), .parquet or hub:owner/name"
    for name, says in [("trian.jsonl", "No such file or directory"), ("no/where.csv", "No such file or directory"), ("", unknown), ("train.txt", unknown), ("train.jsonl.gz", unknown),
                       ("folder.csv", "Is a directory"), ("x" * 5000 + ".jsonl", "File name too long")]:
        path = f"{tmp_path}/{name}".rstrip("/")
        with pytest.raises(UserError) as error:
            read_rows(path)
        assert str(error.value) == f"{path}: {says}"


@pytest.mark.parametrize("source, says", [
    ("gsm8k", "--env gsm8k plays the tasks of that name, without --dataset; use"), ("GSM8K", "--env gsm8k plays"), ("equations", "--env equations plays"),
    ("trl-lib/Capybara", "a data set of the hub is written hub:trl-lib/Capybara; use"), ("a/b:main:test", "a data set of the hub is written hub:a/b:main:test; use"),
    ("openai/gsm8k", "a data set of the hub is written hub:openai/gsm8k; --env gsm8k plays"), ("imdb", "use .jsonl"), ("/a/b", "use .jsonl")])
def test_the_name_of_a_data_set_or_of_an_environment_is_no_file(source, says):
    with pytest.raises(UserError) as error:
        read_rows(source)
    assert str(error.value).startswith(f"{source}: unknown type; {says}")


def test_the_first_row_is_read_without_the_others(tmp_path):
    for name, data in (("x.jsonl", GOOD + "no JSON\n"), ("x.csv", 'a,b\n1,2\n1,2,3\n')):
        rows = rows_of(write(tmp_path, data, name))
        next(rows)
        with pytest.raises(UserError):
            next(rows)


def test_what_is_accepted(tmp_path):
    data = b'\xef\xbb\xbf{"a": 1}\r\n\n  {"a": "x\xe2\x80\xa8y"}  \r\n{"a": "<|im_end|>"}\n\n{"a": -0.0}'
    assert read_rows(write(tmp_path, data)) == [(1, {"a": 1}), (3, {"a": "x\u2028y"}), (4, {"a": "<|im_end|>"}), (6, {"a": 0.0})]


# --------------------------------------------------------------------------------------------------------------------- CSV
HEADER = "input_text,b\n"


@pytest.mark.parametrize("data, says", [
    ("", ": no rows"), (HEADER, ": no rows"), (HEADER + "1,2\n1,2,3\n", ":3: 3 fields, the header has 2; quote a field that holds a separator"),
    (HEADER + "1\n", ":2: 1 fields, the header has 2"), ("a,a\n1,2\n", ":1: the header names a column twice"), ("a;b\n1;2;3\n", ":2: 3 fields, the header has 2"), (HEADER + '"x\ny",2\n1,2,3\n', ":4: 3 fields"),
    (HEADER + '1,2\n"open,2\n3,4\n', ":3: cannot be read (Error: unexpected end of data)"), (HEADER + '"a"b,2\n', ":2: cannot be read (Error: "),
    (HEADER.encode() + b"1,2\ncaf\xe9,2\n", ":3: byte 0xe9 is not UTF-8; save the file as UTF-8"), (HEADER.encode("utf-16"), ":1: byte 0xff is not UTF-8")])
def test_broken_csv_files(tmp_path, data, says):
    path = tmp_path / "x.csv"
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    with pytest.raises(UserError) as error:
        read_rows(str(path))
    assert str(error.value).startswith(f"{path}{says}") and "\n" not in str(error.value)


def test_csv_as_spreadsheets_write_it(tmp_path):
    path = tmp_path / "x.csv"
    path.write_bytes(b'\xef\xbb\xbfa, b\r\n\r\n"x, ""y""\r\nz",2\r\n3,"caf\xc3\xa9"')
    assert read_rows(str(path)) == [(3, {"a": 'x, "y"\r\nz', "b": "2"}), (5, {"a": "3", "b": "café"})]


@pytest.mark.parametrize("text", ["\ufeffQuestion;b\r\n\"2,5; or\n3?\";x\r\n", "Question\tb\n\"2,5; or\n3?\"\tx\n", "Question,b,,\n\"2,5; or\n3?\",x,,\n,,,\n,,,\n", ",Question,b\n0,\"2,5; or\n3?\",x\n"])
def test_csv_of_excel_and_pandas(tmp_path, text):
    """Semicolons where the comma is a decimal point, empty rows and columns around the table, and an index were refused or read as data."""
    path = tmp_path / "X.CSV"
    path.write_bytes(text.encode())
    assert read_rows(str(path)) == [(2, {"Question": "2,5; or\n3?", "b": "x"})]


def test_the_name_of_a_file_may_be_in_capitals(tmp_path):
    """The rows of an X.CSV of tasks were read as a .csv, but its cells stayed text whatever the hints of `reset` say; X.JSONL was an unknown type."""
    (tmp_path / "env.py").write_text("class Env:\n    def reset(self, n: int): return 'a'")
    for name, text in (("X.CSV", "n\n7\n"), ("X.JSONL", '{"n": 7}')):
        task, = load_tasks(f"{tmp_path}/env.py:Env", "train", None, 0, write(tmp_path, text, name), holds_out=False)
        assert task["n"] == 7
        path = write(tmp_path, f"tasks: [{tmp_path / name}]", "x.yaml")
        assert list(read_yaml(path)) == [(1, "tasks", str(tmp_path / name))]


def test_a_json_file_is_a_list_or_an_object_a_line(tmp_path):
    """What most published chats are, and preference_pairs.json of dpo.py, was an unknown type."""
    for text in ('[\n {"a": 1},\n {"a": "[2"}\n]\n', '\ufeff{"a": 1}\n{"a": "[2"}\n'):
        assert read_rows(write(tmp_path, text, "x.json")) == [(1, {"a": 1}), (2, {"a": "[2"})]
    for text, says in (('[{"a": 1},]', ":1: not JSON"), ('{\n"data": []}', ":1: not JSON"), ("[]", ": no rows"), ("", ": no rows")):
        path = write(tmp_path, text, "x.json")
        with pytest.raises(UserError, match=re.escape(path + says)):
            read_rows(path)


def test_dates_decimals_and_bytes_of_a_parquet_file_are_text(tmp_path):
    """A table of a data base with a column created_at was refused, whatever was learned from it."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    row = {"question": b"caf\xc3\xa9", "answer": Decimal("1.50"), "created_at": datetime(2026, 1, 2, 3, 4)}
    parquet.write_table(arrow.Table.from_pylist([row]), path := f"{tmp_path}/x.parquet")
    assert read_rows(path) == [(1, {"question": "café", "answer": "1.50", "created_at": "2026-01-02 03:04:00"})]


# ------------------------------------------------------------------------------------------------------- every kind of fault
@pytest.mark.parametrize("data, says", [
    ("", ":1: not JSON: Expecting value at column 1"), ("[]", ": not a JSON object"), ("null", ": not a JSON object"), ('{\n"a": 1,\n"b": x}', ":3: not JSON: Expecting value at column 6"),
    (b'{"a":\n"\xe9"}', ":2: byte 0xe9 is not UTF-8; save the file as UTF-8"), ('{"a": NaN}', ": NaN is not a finite number"), ('{"a": 1, "a": 1}', ': key "a" twice')])
def test_broken_json_files(tmp_path, data, says):
    with pytest.raises(UserError) as error:
        read_json(path := write(tmp_path, data, "config.json"))
    assert str(error.value) == path + says


def test_a_yaml_file_that_is_binary_and_others(tmp_path):
    for data, says in ((b"\x7fELF\x00", ": cannot be read (ReaderError: unacceptable character"), ("a: " + "[" * 20000, ": cannot be read (RecursionError: "), ("[a]: 1", ":1: give lines"),
                       ('a: "\\ud800"', None), ("a: &x [*x]", ":1: give lines `name: value`, nothing nested")):
        try:
            list(read_yaml(path := write(tmp_path, data, "x.yaml")))
        except UserError as error:
            assert says and str(error).startswith(path + says), error
        else:
            assert says is None


def test_files_that_cannot_be_opened(tmp_path, monkeypatch):
    for name, says in (("", "Is a directory"), ("y.json", "No such file or directory")):
        with pytest.raises(UserError, match=f": {says}$"):
            read_json(tmp_path / name)

    def refused(*_):
        raise PermissionError(13, "Permission denied")
    monkeypatch.setattr("core.data.open", refused, raising=False)  # root may read everything
    for read, name in ((read_json, "x.json"), (read_rows, "x.jsonl"), (read_rows, "x.csv")):
        with pytest.raises(UserError, match=f"{name}: Permission denied"):
            read(write(tmp_path, "{}", name))


@pytest.mark.parametrize("error, says", [
    (KeyError("files"), "no 'files' in it"), (ValueError("reason; fix"), "reason; fix"), (OSError(5, "Input/output error"), "Input/output error"),
    (TypeError("'int' object is not iterable"), "cannot be read (TypeError: 'int' object is not iterable)"), (AssertionError(), "cannot be read (AssertionError: AssertionError)")])
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


# ------------------------------------------------------------------------------------------------------------- the first row
def test_the_first_row_is_read_without_the_rest(tmp_path):
    """What follows is broken, so that reading it would be refused."""
    for name, data in (("a.jsonl", '{"a": 1}\n{'), ("a.csv", "a\n1\n2,3\n")):
        assert next(rows_of(write(tmp_path, data, name)))[1]["a"] in (1, "1")
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"a": [str(i) * 50 for i in range(5000)]}), path, row_group_size=1000, use_dictionary=False)
    data = bytearray(path.read_bytes())
    data[len(data) * 2 // 5:len(data) * 3 // 5] = bytes(len(data) * 3 // 5 - len(data) * 2 // 5)
    path.write_bytes(data)
    rows = rows_of(str(path))
    assert next(rows) == (1, {"a": "0" * 50})
    with pytest.raises(UserError, match=r"a\.parquet: .*[Cc]orrupt"):
        list(rows)


def test_a_file_of_a_cache_that_may_not_be_read_is_named():
    """`docker run --user 12345` with root's HOME: "hub:openai/gsm8k: Permission denied" sounded like a gated data set."""
    for path, words in (("hub:a/b", r"hub:a/b: cannot be read .*denied: '/root/.cache'"), ("/root/.cache", "/root/.cache: denied$")):
        with pytest.raises(UserError, match=words), reading(path):
            raise PermissionError(13, "denied", "/root/.cache")
