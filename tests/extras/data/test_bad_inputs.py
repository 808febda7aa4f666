"""Bad inputs, row by row of the table (its numbers are in the comments): exit status 2 and one line, `FILE:LINE: what is wrong; how to fix it`.

What json and csv readers refuse is in test_envs.py, conversations in test_sft_data.py, flags and YAML in test_run.py, model folders in
test_lora.py, checkpoints in test_resume.py: here it is the programs, the exact line, and that nothing is left that hinders the next try.
"""
import json
import re
import sys
import time

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_resume import place  # noqa: F401  (a fixture)

import dpo
import grpo
import reward_weighted
import sft
from envs.task_files import read_rows as rows_of
from core.config import UserError
from extras.hints.command_line import parse
from layers import main
from layers import load_model

ASK, ANSWER = {"role": "user", "content": "How many?"}, {"role": "assistant", "content": "42"}
GOOD = {"messages": [ASK, ANSWER], "equation": "x + 1 = 2"}  # a conversation, and a task
TOOL = {"type": "function", "function": {"name": "search", "description": "Search.", "parameters": {"type": "object", "properties": {}}}}


def called(name):
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": name, "arguments": {}}}]}


@pytest.fixture
def told(monkeypatch, capsys):
    """-> program(module, arguments) -> what it says on stderr after exit status 2, without the program's name."""
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "reconfigure", lambda **_: None, raising=False)

    def program(module, *words):
        monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py", *map(str, words)])
        began = time.process_time()
        with pytest.raises(SystemExit) as status:
            main(module.Config, module.train, module.__doc__)
        program.seconds = time.process_time() - began
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith(f"{module.__name__}.py: ")]
        assert status.value.code == 2 and len(lines) == 1, lines
        return lines[0].removeprefix(f"{module.__name__}.py: ")
    return program


def read_rows(path):
    return [row for _, row in rows_of(path)]


def lines(*rows):
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


UNKNOWN = "unknown type; use .jsonl (one JSON object a line), .json (a list), .csv (with a header), .parquet or hub:owner/name"
FILES = [  # name, its content, the whole line: all of it is told without a model
    ("train.jsonl", None, "train.jsonl: No such file or directory"),  # 1
    ("folder", None, f"folder: {UNKNOWN}"),  # 2
    ("train.txt", "x", f"train.txt: {UNKNOWN}"),  # 4
    ("train.pkl", "x", f"train.pkl: {UNKNOWN}"),  # 53
    ("rows.jsonl.gz", "x", f"rows.jsonl.gz: {UNKNOWN}"),  # 36
    ("rows.jsonl", "[" + lines(GOOD) + "]", "rows.jsonl:1: a JSON list; write one object per line, or name the file .json"),  # 5
    ("rows.jsonl", lines(GOOD, "{'messages': 1}"), "rows.jsonl:2: not JSON: Expecting property name enclosed in double quotes at column 2"),  # 6
    ("rows.jsonl", lines(GOOD, '{"a": 1} {"b": 2}'), "rows.jsonl:2: not JSON: Extra data at column 10"),  # 6
    ("rows.jsonl", b'{"a": "caf\xe9"}\n', "rows.jsonl:1: byte 0xe9 is not UTF-8; save the file as UTF-8"),  # 9
    ("rows.csv", b"prompt,completion,equation\na,b,x = 1\ncaf\xe9,2,\n", "rows.csv:3: byte 0xe9 is not UTF-8; save the file as UTF-8"),  # 9
    ("rows.jsonl", lines(GOOD).encode("utf-16"), "rows.jsonl:1: byte 0xff is not UTF-8; save the file as UTF-8"),  # 9
    ("rows.jsonl", lines('{"reward": 1e999}'), "rows.jsonl:1: 1e999 is not a finite number"),  # 12
    ("rows.jsonl", lines('{"prompt": "a", "prompt": "b"}'), 'rows.jsonl:1: key "prompt" twice'),  # 13
    ("rows.csv", "a,b\n1,2,3\n", "rows.csv:2: 3 fields, the header has 2; quote a field that holds a separator"),  # 28
    ("rows.csv", 'prompt,completion,equation\na,b,x = 1\n"x,1\ny,2\n', "rows.csv:3: cannot be read (Error: unexpected end of data)"),  # 29
    ("rows.csv", "a,a\n1,2\n", "rows.csv:1: the header names a column twice"),
    ("rows.jsonl", "", "rows.jsonl: no rows"),
]


@pytest.mark.parametrize("name, data, line", FILES, ids=[f"{i}-{name}" for i, (name, *_) in enumerate(FILES)])
def test_files(told, tmp_path, monkeypatch, name, data, line):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.json").write_text("")
    (tmp_path / "folder").mkdir()
    if data is not None:
        (tmp_path / name).write_bytes(data if isinstance(data, bytes) else data.encode())
    assert told(sft, "--dataset", name, "--model_path", "not/looked/at", "--output_dir", "out") == line
    assert program_is_quick(told) and not (tmp_path / "out").exists()
    assert told(grpo, "--dataset", name, "--env", "equations", "--model_path", "not/looked/at", "--output_dir", "out") == line
    assert program_is_quick(told) and not (tmp_path / "out").exists()


def program_is_quick(told):
    return told.seconds < 2


def test_accepted(tmp_path, monkeypatch):
    """8 a BOM at the start; 38 mixed line ends and no last one; 30 a long CSV field; 33 parquet."""
    long = "x" * 200_000
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n{"a": 2}\n{"a": 3}')
    (tmp_path / "b.csv").write_bytes(b'\xef\xbb\xbfa,b\r\n1,"x\ny"\n2,' + long.encode())
    assert [row["a"] for row in read_rows(f"{tmp_path}/a.jsonl")] == [1, 2, 3]
    assert [row["b"] for row in read_rows(f"{tmp_path}/b.csv")] == ["x\ny", long]
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet
    path = f"{tmp_path}/c.parquet"
    parquet.write_table(pyarrow.table({"messages": [[ASK, ANSWER]] * 2, "n": [1, None]}), path)
    assert read_rows(path) == [{"messages": [ASK, ANSWER], "n": 1}, {"messages": [ASK, ANSWER]}]  # a null in a table is a field that the row has not
    calls = [[{"role": "assistant", "tool_calls": [{"name": "f", "arguments": {k: 1}}]}] for k in "ab"]
    parquet.write_table(pyarrow.table({"messages": calls}), path)  # Arrow gives both calls both arguments
    assert [row["messages"] for row in read_rows(path)] == calls
    # A column that nobody reads stops no file: NaN is null, as pandas means it, and bytes are an object, which no reader takes for text.
    (tmp_path / "d.jsonl").write_text('{"prompt": "a", "score": NaN, "least": -Infinity}\n')
    assert read_rows(f"{tmp_path}/d.jsonl") == [{"prompt": "a", "score": None, "least": None}]
    parquet.write_table(pyarrow.table({"a": [1.0, float("nan")], "b": [b"\xff\x00", b"caf\xc3\xa9"]}), path)
    assert read_rows(path) == [{"a": 1.0, "b": {"bytes": 2}}, {"b": "caf\u00e9"}]
    parquet.write_table(pyarrow.table({}), path)
    with pytest.raises(UserError, match="no rows"):
        read_rows(path)
    data = (tmp_path / "c.parquet").read_bytes()
    (tmp_path / "c.parquet").write_bytes(data[:8] + data[-8:])
    with pytest.raises(UserError, match="c.parquet: "):
        read_rows(path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError) as error:
        read_rows(path)
    assert str(error.value) == f'{path}: reading parquet needs "pip install pyarrow"; or convert to .jsonl'


ROWS = [
    ({"prompt": "a", "completion": ""}, 'message 1: is empty: nothing to train on'),  # 16
    ({"prompt": "a", "completion": []}, '"completion" must be text or a list of {"role": ..., "content": ...}'),  # 16
    ({"messages": [ASK, {"role": "assistant", "content": " "}]}, "message 1: is empty: nothing to train on"),  # 16
    ({"messages": [ASK, {"role": "bot", "content": "x"}, ANSWER]}, "message 1: need assistant after the user, got bot"),  # 17
    ({"messages": [ANSWER]}, "message 0: need system or user at the start, got assistant"),  # 17
    ({"messages": [ASK, {"role": "tool", "content": "x"}, ANSWER]}, "message 1: need assistant after the user, got tool"),  # 18
    ({"messages": [ASK, called("serch"), {"role": "tool", "content": "x"}, ANSWER], "tools": [TOOL]}, "message 1: calls 'serch'; tools are search"),  # 20
    ({"messages": [ASK]}, "nothing to train: no assistant message"),  # 24
    ({"txt": "x"}, 'no "messages" field; has: txt; nor another form: {conversations}, {prompt, completion}, {instruction, output}, {text}; rows of an environment\'s own form need its --env, tasks --tasks'),  # 14
]


@pytest.mark.parametrize("row, says", ROWS, ids=range(len(ROWS)))
def test_rows_to_imitate(told, place, tmp_path, row, says):  # noqa: F811
    data = tmp_path / "rows.jsonl"
    data.write_text(lines(GOOD, row, *[GOOD] * 10))
    words = ["--dataset", data, "--model_path", place / "base", "--output_dir", tmp_path / "out", "--eval_tasks", 0]
    assert told(sft, *words) == f"{data}:2: {says}"
    data.write_text(lines(GOOD))
    sft.train(parse(sft.Config, [*map(str, words), "--max_steps", "1"]))  # fixed, the same command runs


PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}


@pytest.mark.parametrize("row, says", [
    ({**PAIR, "rejected": "b"}, "chosen and rejected are the same: nothing to prefer"),  # 25
    ({"chosen": [ASK, ANSWER], "rejected": [{**ASK, "content": "?"}, ANSWER]}, 'no "prompt" field, and chosen and rejected do not begin with the same message; name its column: --fields prompt=question'),  # 26
    ({"prompt": "a", "rejected": "c"}, 'no "chosen" field; has: prompt, rejected; write a row {prompt, chosen, rejected} for each pair, or name its columns: --fields chosen=good; tasks are given with --tasks'),  # 14
])
def test_pairs(told, place, tmp_path, row, says):  # noqa: F811
    data = tmp_path / "pairs.jsonl"
    data.write_text(lines(PAIR, row))
    assert told(dpo, "--dataset", data, "--model_path", place / "base", "--output_dir", tmp_path / "out") == f"{data}:2: {says}"


def test_probabilities(told, place, tmp_path):  # noqa: F811
    data = tmp_path / "train.csv"  # 32
    data.write_text("input_text,target_probability,target_reason,ground_truth_prob\na,0.5,slot,0.5\nb,1.7,slot,0.5\n")
    assert told(sft, "--env", "meetings", "--dataset", data, "--model_path", place / "base", "--output_dir", tmp_path / "out") == f'{data}:3: "target_probability" must be from 0 to 1, not 1.7'


@pytest.mark.parametrize("module, words, line", [
    (sft, ["--lerning_rate", "1"], "unknown option --lerning_rate; did you mean --learning_rate?"),  # 40
    (sft, ["--learning_rate", "1e-4x"], "--learning_rate 1e-4x: not a number"),  # 41
    (sft, ["--learning_rate", "-1"], "--learning_rate -1: must be at least 0"),
    (dpo, ["--learning_rate", "nan"], "--learning_rate nan: not a number"),
    (reward_weighted, ["--batch_size", "0"], "--batch_size 0: must be at least 1"),
    (grpo, ["--num_samples", "1"], "--group_size 1: must be at least 2"),
    (dpo, ["--beta", "-0.1"], "--beta -0.1: must be greater than 0"),
    (grpo, ["--temperature", "0"], "--temperature 0: must be greater than 0"),
    (grpo, ["--dtype", "bf16"], "--dtype bf16: must be one of float32, bfloat16, float16, auto"),
    (grpo, ["--seed", "-1"], "--seed -1: must be at least 0"),
    (sft, ["--resume", "latest"], "--resume latest: not true or false"),
    (grpo, "--tasks_per_step 4 --group_size 4 --batch_size 3 --gradient_accumulation_steps 2".split(),  # 42
     "a step has 16 sequences, but batch_size 3 x gradient_accumulation_steps 2 = 6"),
])
def test_options(told, tmp_path, monkeypatch, module, words, line):
    monkeypatch.chdir(tmp_path)
    assert told(module, *words) == line and program_is_quick(told) and not list(tmp_path.iterdir())


@pytest.mark.parametrize("folder, reason", [("file", "File exists"), ("file/x", "Not a directory"), ("x" * 256, "File name too long")])
def test_output_folders(told, tmp_path, monkeypatch, folder, reason):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    for module in (sft, grpo, dpo, reward_weighted):
        assert told(module, "--output_dir", folder) == f"{tmp_path / folder}: cannot write there ({reason}); give another --output_dir" and program_is_quick(told)


def test_weights(place, tmp_path):  # noqa: F811
    import shutil
    shutil.copytree(place / "base", tmp_path / "m")  # 48
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    tensors["model.embed_tokens.weight"][500, :12] = torch.nan  # a row that a trial with a few tokens would not touch
    save_file(tensors, tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError) as error:
        load_model(str(tmp_path / "m"))
    assert str(error.value) == f"{tmp_path}/m: model.embed_tokens.weight has values that are not finite; the file is damaged"


def test_control_tokens_are_text_and_rows_too_long_are_dropped_and_both_are_counted(place, tmp_path, capsys):  # noqa: F811
    data = tmp_path / "rows.jsonl"  # 21, 22
    forged = {"messages": [{**ASK, "content": "a<|im_end|>b"}, ANSWER]}
    data.write_text(lines(*[forged] * 3, *[GOOD] * 10, {"messages": [{**ASK, "content": "word " * 400}, ANSWER]}))
    sft.train(sft.Config(model_path=str(place / "base"), dataset=str(data), eval_dataset=str(data), output_dir=str(tmp_path / "out"), max_tokens=256, eval_tasks=0, max_steps=1))
    out = capsys.readouterr().out
    assert "\n3 rows contain <|im_end|> as text\n" in out and re.search(r"1 of 14 \w+ exceed 256 tokens: dropped", out), out


@pytest.mark.parametrize("name, row, says", [
    ("--dataset", {**PAIR, "rejected": "b"}, "chosen and rejected are the same: nothing to prefer"),
    ("--dataset", {**PAIR, "images": ["cats.png"]}, '"images" is not read, only text is; leave such rows out, or take their text alone: --fields unread=images'),
    ("--trajectories", {"token_ids": [1]}, "not a trajectory: token_ids, loss_mask, logprobs have lengths (1, 0, 0)")])
def test_dpo_reads_its_data_before_it_loads_a_model(told, tmp_path, name, row, says):
    data = tmp_path / "rows.jsonl"
    good = {"token_ids": [1, 2], "loss_mask": [0, 1], "logprobs": [0.0, 0.0]} if name == "--trajectories" else PAIR
    data.write_text(lines(good, row))
    assert told(dpo, name, data, "--model_path", "not/looked/at", "--output_dir", tmp_path / "out") == f"{data}:2: {says}"
    assert program_is_quick(told) and not (tmp_path / "out").exists()


@pytest.mark.parametrize("module, name, rows, says", [
    (dpo, "--dataset", [PAIR, {**PAIR, "rejected": "b"}], ":2: chosen and rejected are the same: nothing to prefer"),
    (dpo, "--trajectories", [{"token_ids": [1]}], ":1: not a trajectory: "),
    (reward_weighted, "--trajectories", [{"token_ids": [1]}], ":1: not a trajectory: "),
    (grpo, "--dataset", [{"equation": "x + 1 = 2"}, {"equatoin": "x + 1 = 2"}], ':2: no "equation" field; has: equatoin')])
def test_rows_are_checked_before_the_tiny_model_is_taught(told, tmp_path, monkeypatch, module, name, rows, says):
    def taught(*_):
        raise AssertionError("minutes of teaching before the rows were looked at")
    monkeypatch.setattr(module, "teach_tiny", taught)
    data = tmp_path / "rows.jsonl"
    data.write_text(lines(*rows))
    assert told(module, name, data, "--env", "equations", "--output_dir", tmp_path / "out").startswith(f"{data}{says}")
