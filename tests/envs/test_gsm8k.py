import ast
import hashlib
import io
import json
import math
import os
import random
import re
import threading
import time
import urllib.error
import urllib.request
import warnings
from decimal import Decimal

import pytest

from envs.task_files import as_task
from envs.tasks import load_tasks
import envs
from envs import gsm8k
from envs.gsm8k import GSM8K, _number, calculator
from envs.task_files import read_rows
from core.config import UserError

DATA = os.path.abspath(os.path.join(os.path.dirname(__file__), "../../../shared/data/gsm8k"))
HELP = "error: use numbers"
TRY_AGAIN = "Unfortunately your answer is wrong. Let's try again."
QUESTION = {"question": "Natalia sold 48 clips in April and half as many in May. How many altogether?",
            "answer": "In May 48/2 = <<48/2=24>>24.\nAltogether <<48+24=72>>72.\n#### 72"}

VALUES = [
    ("48/2", "24"), ("48+24", "72"), (" 2 + 3 ", "5"), ("0.1+0.2", "0.3"), ("7//2", "3"), ("7%4", "3"), ("2**10", "1024"),
    ("-3**2", "-9"), ("+5", "5"), (".5*4", "2"), ("5.", "5"), ("1e3", "1000"), ("2E-1", "0.2"), ("10/4", "2.5"),
    ("1/3", "0.333333333333"), ("2/3*3e13", "20000000000000"), ("1,000", "1000"), ("1,234,567.5+0", "1234567.5"),
    ("1,000*2,000", "2000000"), ("-0.0", "0"), ("1234567890123.0", "1234567890123"), ("1e20*1", "1e+20"), ("2**-1", "0.5"),
    ("2**0.5", "1.41421356237"), ("abs(-7)", "7"), ("max(1,2,3)", "3"), ("max(100,200)", "200"), ("min(2.5,2)", "2"),
    ("round(7/3, 2)", "2.33"), ("round(2.6)", "3"), ("round(1234,-2)", "1200"), ("sqrt(16)", "4"), ("floor(2.9)", "2"),
    ("ceil(2.1)", "3"), ("ceil(max(1, 2.5))", "3"), ("2**500", str(2**500)),
    # Binary fractions: Python's own are 9, 0.1, 29, 1998 and 111.
    ("1 // 0.10", "10"), ("1 % 0.1", "0"), ("6 // 0.2", "30"), ("floor(19.99*100)", "1999"), ("ceil(1.1*100)", "110"), ("floor(1/3*3)", "1"),
    ("-7.5 // 2", "-4"), ("7 % 2.5", "2"), ("10**20 % 10**19", "0"), ("(10**20+7) % 10**19", "7"), ("floor(1234567890123.5)", "1234567890123"),
]
ATTACKS = [  # sandbox.md 3.3 and neighbours: an exact value, or the error's beginning
    ("9**9**9", "error: number too large"), ("2**1024", "error: number too large"), ("*".join(["9"] * 99), str(9**99)),
    ("10**300*1.0", "1e+300"), ("1e300*1e300", "error: number too large"), ("exp(1000)", HELP),
    ("round(1,-10**9)", "error: number too large"), ("round(2.5,2**1000)", "error: "), ("round(2.5,2**100)", "error: number too large"),
    ("round(1,2.0)", HELP), ("(-8)**0.5", "error: not a real number"), ("0**-1", "error: division by zero"),
    ("7//0", "error: division by zero"), ("7%0", "error: division by zero"), ("7.0/0", "error: division by zero"),
    ("log(10,1)", HELP), ("__import__('os').system('id')", HELP), ("(1).__class__", HELP), ("'a'*9", "error: not a real number"),
    ("True+1", "error: not"), ("True", "error: not"), ("None", "error: not"), ("lambda:1", HELP),
    ("max()", "error: "), ("max(*1)", HELP), ("round(1,digits=2)", HELP), ("abs", HELP), ("(1,2)", HELP), ("50%", HELP), ("100 * 20% + 5", HELP), ("100 - 20% - 5", HELP),
    ("2^3", HELP), ("1_000", "1000"), ("007", HELP), ("1;2", HELP), ("", HELP),
    ("   ", HELP), ("(" * 99 + "1" + ")" * 99, "1"), ("(" * 200, HELP), ("-" * 199 + "1", "-1"),
    ("²", HELP), ("1\0", HELP), ("\ud800", HELP), ("４２", HELP), ("1\n+1", HELP), ("1#2", "1"), ("1=1", HELP), ("1<2", HELP),
    ("1if 1else 2", HELP), ("1 if 1 else 2", HELP), ("0x10", "16"), ("1j", "error: not a real number"), ("1e999", "error: number too large"),
    ("9" * 200, str(10**200 - 1)), ("9" * 201, "error: give an expression"), ("1" * 10**6, "error: give an expression"),
    ("1,00", HELP), ("1,0000", "10000"), ("1,000,00", HELP), ("1000,000", "1000000"),
    ("sqrt(-1)", "error: "), ("sqrt(1,2)", "error: "), ("1()", HELP), ("x:=1", HELP), ("[1]", HELP), ("1 2", HELP), ("2x", HELP),
    (5, "5"), (None, "error: not"), ([1], HELP),
]


@pytest.mark.parametrize("text, want", VALUES)
def test_calculator_values(text, want):
    assert calculator(text) == want


@pytest.mark.parametrize("text, want", ATTACKS)
def test_calculator_attacks(text, want):
    start, got = time.process_time(), calculator(text)
    assert got.startswith(want) if want.startswith("error") else got == want
    assert len(got) <= 120 or not got.startswith("error")
    assert time.process_time() - start < 0.5


def test_calculator_attacks_from_8_threads():
    wrong = []

    def work():
        for _ in range(20):
            wrong.extend(text for text, want in ATTACKS if not calculator(text).startswith(want))
    threads = [threading.Thread(target=work) for _ in range(8)]
    [t.start() for t in threads], [t.join() for t in threads]
    assert not wrong


def test_calculator_fuzz():
    """50,000 strings: no exception, no warning, no slow one; every answer a finite number or a short error."""
    rng = random.Random(0)
    pieces = ["0", "1", "9", "7", "12", ".5", "1e9", "1e-9", "1,000", "10**9", "+", "-", "*", "/", "//", "%", "**", "(", ")", ",", " ",
              "max(", "round(", "sqrt(", "abs(", "if", "or", "e", "x", "_", "'", "²", "\0", "\ud800", "\n", "[", "{", "=", "lambda:", "True"]
    worst, values = 0.0, 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(50_000):
            some = pieces if number % 2 else pieces[:22]
            text = "".join(rng.choice(some) for _ in range(rng.randint(1, 12)))
            start = time.thread_time()
            got = calculator(text)
            worst = max(worst, time.thread_time() - start)
            assert len(got) <= 120 if got.startswith("error: ") else math.isfinite(float(got)), text
            values += not got.startswith("error")
    assert worst < 0.05 and values > 1000


def test_calculator_agrees_with_python():
    rng = random.Random(1)
    for _ in range(5000):
        text = str(rng.randint(0, 99))
        for _ in range(rng.randint(1, 5)):
            text = f"({text}) {rng.choice('+-*/')} {rng.choice([rng.randint(1, 99), round(rng.uniform(0.1, 9), 2)])}"
        assert float(calculator(text)) == pytest.approx(eval(text), rel=1e-11, abs=1e-9)


def test_calculator_deep_in_the_callers_stack():
    def down(n):
        return down(n - 1) if n else calculator("-" * 199 + "1")
    assert down(800) in ("-1",) or down(800).startswith("error: ")


@pytest.mark.parametrize("text, want", [
    ("42", "42"), ("42.0", "42"), ("42.", "42"), ("-1,234.50", "-1234.5"), ("$1,000", "1000"), ("-$5", "-5"), ("\\$5", "5"),
    ("50%", "50"), ("50\\%", "50"), ("50%.", "50"), (" 7 ", "7"), (".5", "0.5"), ("+3", "3"), ("-0", "0"), ("0042", "42"),
    ("9" * 90, "9" * 90), ("0.1", "0.1"),
    ("", None), (".", None), ("-", None), ("$", None), ("%", None), ("４２", None), ("٤٢", None), ("²", None), ("1_0", None),
    ("nan", None), ("inf", None), ("1e9", None), ("1e999", None), ("0x1f", None), ("1,0", None), ("1,0000", None), (",100", None),
    ("10,00", None), ("1000,000", None), ("72 clips", None), ("72 or 73", None), ("7 2", None), ("--7", None), ("1.2.3", None),
    ("72..", None), ("1/2", None), ("True", None), ("7\n2", None), ("\ud800", None), ("7\0", None),
])
def test_numbers(text, want):
    assert _number(text) == (None if want is None else Decimal(want))


@pytest.mark.parametrize("text, right", [
    ("#### 72", True), ("48 + 24 = 72\n#### 72\n", True), ("So \\boxed{72}.", True), ("#### $72.00", True), ("####72", True),
    ("#### \\boxed{72}", True), ("\\boxed{72}\n#### 72.0", True), ("#### 72\r\n", True), ("\\boxed{\\$72}", True),
    ("\\fbox{72}", True), ("\\boxed {72}", True), ("$\\boxed 72$", True), ("#### \\boxed 72", True), ("\\boxed{72", False), ("#### \\boxed{72", False), ("\\boxed{\\boxed{73}} 72", False),
    ("", False), ("72", False), ("The answer is 72", False), ("#### ", False), ("####", False), ("#### 73", False),
    ("#### 72 or 73", False), ("#### 72, 73", False), ("#### 72\n#### 73", False), ("#### 73\n#### 72", False),
    ("\\boxed{72} or \\boxed{73}", False), ("\\boxed{73}\n#### 72", False), ("#### 72 \\boxed{73}", False),
    ("#### 7\\boxed{2}", False), ("#### \\boxed{7}\\boxed{2}", False), ("\\boxed{72} \\boxed{{73}}", False), ("\\boxed{72} \\boxed{73", False),
    ("#### 72 #### 73", False), ("#### 72\r#### 73", False), ("#### 72\u2028#### 73", False), ("#### ７２", False), ("#### 7_2", False),
    ("#### nan", False), ("#### 7.2e1", False), ("#### 144/2", False), ("#### -72", False), ("#### seventy-two", False),
    ("#### None", False), ("\\boxed{}", False), ("#### " + "72 " * 10**5, False), ("\\boxed{" * 10**4, False), ("#" * 10**5, False),
    ("<tool_response>72</tool_response>", False), ("\ud800\0", False),
    ("<think>\n\\boxed{71}?\n</think>\n\n\\boxed{72}", True), ("#### 71</think>#### 72", True), ("<think>#### 72</think>I give up.", False), ("<think>\n#### 72", False),
])
def test_text_answers(text, right):
    env = GSM8K()
    env.reset(**QUESTION)
    assert env._reply(text) is None and env.done
    assert env._check() == right and env.get_reward() == env.reward == float(right)


@pytest.mark.parametrize("value", ["73", "", "72 or 73", "７２", "7_2", "nan", "-72", "72\n73", "#### 72", None, [72], True, "x" * 10**6])
def test_hostile_tool_answers(value):
    env = GSM8K()
    env.reset(**QUESTION)
    assert env.answer(value) == "Wrong." and env.done and env.get_reward() == 0.0 and not env._check()
    assert env.answer("72") == "error: the episode is over" and env._reply("#### 72") is None  # too late
    assert env.get_reward() == 0.0


def test_tool_output_is_no_answer():
    env = GSM8K()
    env.reset(**QUESTION)
    assert env.calculator("48+24") == "72" and not env.done and env.get_reward() == 0.0
    assert env._reply("That is the answer.") is None and env.get_reward() == 0.0


def test_several_goes():
    env = GSM8K()
    env.reset(**QUESTION, num_turns=3)
    assert env.answer("1") == TRY_AGAIN and env._reply("no marker") == TRY_AGAIN and not env.done
    assert env.answer("72") == "Correct." and env.done and env.get_reward() == 1.0 and env._expert() == []
    env.reset(**QUESTION, num_turns=3)
    assert env._reply("#### 1") == TRY_AGAIN and env._reply("#### 72") is None
    assert env.get_reward() == 1.0 and env._check()
    env.reset(**QUESTION, num_turns=2)
    assert env.answer("1") == TRY_AGAIN and env.answer("2") == "Wrong." and env.done and env.get_reward() == 0.0


def test_reset_renews_all_state():
    fresh, used = GSM8K(), GSM8K()
    used.reset(**QUESTION, num_turns=9)
    used.calculator("1+1"), used.answer("3"), used.answer("72")
    other = {"question": "2+2?", "answer": 4, "id": 7, "level": None, "num_turns": None}
    assert fresh.reset(**other) == used.reset(**other) == "2+2?"
    assert vars(fresh) == vars(used)
    assert used._expert() == [{"name": "answer", "arguments": {"value": "4"}}]


def test_expert_one_call_a_turn():
    env, calls = GSM8K(), []
    env.reset(**QUESTION)
    while turn := env._expert():
        assert turn == env._expert() and len(turn) == 1  # asking changes nothing
        calls.append((turn[0]["name"], *turn[0]["arguments"].values(), envs.call(env, turn[0]["name"], turn[0]["arguments"])[0]))
    assert calls == [("calculator", "48/2", "24"), ("calculator", "48+24", "72"), ("answer", "72", "Correct.")]


def test_expert_leaves_out_false_marks():
    env = GSM8K()
    env.reset(question="?", answer="<<2+2=5>> <<2*=4>> <<2x=y>> <<10/4=2.50>> <<1/3=0.33>>\n#### 1,250.50")
    assert env._plan == ["10/4"]
    env.calculator("0")
    assert env._expert()[0]["arguments"] == {"value": "1250.50"}
    env.reset(question="?", answer="<<1+1=2>>" * 99 + "#### 2")
    assert len(env._plan) == env.max_turns - 1


@pytest.mark.parametrize("row, message", [
    ({"question": "?", "target": 1}, 'no "answer" field; has: question, target'),
    ({"answer": 1}, 'no "question" field; has: answer'), ({"question": None, "answer": 1}, '"question" is empty or not text'),
    ({"question": " ", "answer": 1}, '"question" is empty'), ({"question": 5, "answer": 1}, '"question" is empty or not text'),
    ({"question": "?", "answer": ""}, '"answer" has no number'), ({"question": "?", "answer": "#### x"}, '"answer" has no number'),
    ({"question": "?", "answer": "It is 5"}, '"answer" has no number'), ({"question": "?", "answer": True}, '"answer" has no number'),
    ({"question": "?", "answer": float("nan")}, '"answer" has no number'), ({"question": "?", "answer": [1]}, '"answer" has no number'),
])
def test_bad_rows(row, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        as_task(GSM8K, row)
    assert "\n" not in str(error.value) and len(str(error.value)) < 160


@pytest.mark.parametrize("answer, want", [(72, 72), (72.5, "72.5"), (-0.1, "-0.1"), ("1,000", 1000), ("a #### 3 #### 4", 4)])
def test_good_rows(answer, want):
    row = GSM8K._row({"question": "?", "answer": answer, "level": 3})
    assert row["level"] == 3
    env = GSM8K()
    env.reset(**row)
    assert env._gold == Decimal(want)


def test_schemas_and_gymnasium():
    schemas = {s["function"]["name"]: s["function"]["parameters"] for s in envs.schemas(GSM8K)}
    assert set(schemas) == {"calculator", "answer"}
    assert schemas["answer"]["required"] == ["value"] and schemas["calculator"]["properties"]["expression"]["type"] == "string"
    env = envs.load("gsm8k")()
    env.reset(**QUESTION)
    first = envs.step(env, "calculator", {"expression": "48/2"})
    last = envs.step(env, "answer", {"value": 72})  # a number where text is due
    assert (first.observation, first.reward, first.done) == ("24", 0.0, False)
    assert (last.reward, last.done, last.info["success"]) == (1.0, True, True) and envs.valid_actions(env) == []


@pytest.mark.skipif(not os.path.isdir(DATA), reason="the dataset is not here")
@pytest.mark.parametrize("name, count", [pytest.param("train", 7473, marks=pytest.mark.slow), ("test", 400)])
def test_every_row(name, count):
    env, rows, marks, true, turns = GSM8K(), [row for _, row in read_rows(f"{DATA}/{name}.jsonl")], 0, 0, 0
    assert len(rows) == count
    for row in rows:
        env.reset(**GSM8K._row(row))
        written = re.findall(r"<<(.*?)=(.*?)>>", row["answer"])
        marks, true, steps = marks + len(written), true + len(env._plan), 0
        while call := env._expert():
            assert not envs.call(env, call[0]["name"], call[0]["arguments"])[0].startswith("error")
            steps += 1
        assert env.get_reward() == 1.0 and env._check() and steps <= env.max_turns
        turns = max(turns, steps)
        gold = env._gold
        for text in ("", row["question"], f"{gold}", f"#### {gold} or {gold + 1}", f"#### {gold}\n#### {gold + 1}", f"#### {gold + 1}"):
            env.reset(**row)
            assert env._reply(text) is None and env.get_reward() == 0.0
        env.reset(**row)
        assert env._reply(row["answer"]) is None and env.get_reward() == 1.0  # the written solution itself
    print(f"{name}: {true} of {marks} marks evaluate to what is written ({true / marks:.2%}); longest demonstration {turns} turns")
    assert true / marks > 0.97


@pytest.mark.skipif(not os.path.isdir(DATA), reason="the dataset is not here")
def test_as_a_dataset():
    rows = load_tasks("gsm8k", "train", 5, 0, dataset=f"{DATA}/train.jsonl", eval_dataset=f"{DATA}/test.jsonl")
    assert len(rows) == 5 and set(rows[0]) == {"env", "question", "answer"}


# --------------------------------------------------------------------------------------------------------------- download
@pytest.fixture
def remote(tmp_path, monkeypatch):
    """A cache folder of our own, and two tiny "official" files behind a stubbed opener; .fault replaces the reply."""
    files = {f"{gsm8k.URL}/{name}.jsonl": "".join(json.dumps({"question": f"{name} {i}?", "answer": f"#### {i}"}) + "\n" for i in range(20)).encode()
             for name in ("train", "test")}

    class Remote:
        calls, fault, cache = 0, None, tmp_path / "agentic-rl" / "gsm8k"

    def urlopen(url, timeout):
        Remote.calls += 1
        assert timeout <= 10 and url.startswith("https://raw.githubusercontent.com/openai/grade-school-math/")
        if isinstance(Remote.fault, Exception):
            raise Remote.fault
        return io.BytesIO(files[url] if Remote.fault is None else Remote.fault)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    monkeypatch.setattr(gsm8k, "SHA256", {n: hashlib.sha256(files[f"{gsm8k.URL}/{n}.jsonl"]).hexdigest() for n in ("train", "test")})
    return Remote


def test_download_once(remote):
    rows = GSM8K._tasks("train", 7, 3)
    assert rows == GSM8K._tasks("train", 7, 3) and remote.calls == 1 and len(rows) == 7 and set(rows[0]) == {"question", "answer"}
    assert os.listdir(remote.cache) == ["train.jsonl"]  # no temporary file left
    assert rows == GSM8K._tasks("train", None, 3)[:7] and rows != GSM8K._tasks("train", 7, 4)
    assert len(GSM8K._tasks("train", None, 0)) == len(GSM8K._tasks("train", 999, 0)) == 20
    assert GSM8K._tasks("test", 2, 0)[0]["question"].startswith("test") and remote.calls == 2
    assert load_tasks("gsm8k", "train", 1, 3) == [{"env": "gsm8k", **rows[0]}]


def test_a_home_that_cannot_be_written(remote, monkeypatch):
    """A container's user without a home: the download cannot be kept, and one line says where and what else works."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/1")
    with pytest.raises(UserError, match=r"/proc/1/agentic-rl.*; give --tasks path/to/train.jsonl"):
        GSM8K._tasks("train", 1, 0)


@pytest.mark.parametrize("error, why", [
    (RuntimeError("Could not determine home directory."), "Could not determine home directory"),
    (PermissionError(13, "Permission denied", "/root/.cache"), "Permission denied: '/root/.cache'")])
def test_no_home_or_that_of_another(remote, monkeypatch, error, why):
    """`docker run --user 12345`: no name in /etc/passwd, and no HOME, or root's."""
    def home():
        raise error
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(gsm8k.Path, "home", home)
    with pytest.raises(UserError, match=f"^gsm8k: .*{why}.*; give --tasks path/to/train.jsonl"):
        GSM8K._tasks("train", 1, 0)


@pytest.mark.parametrize("fault, why", [
    (urllib.error.URLError(OSError(-2, "Name or service not known")), "[Errno -2] Name or service not known"),
    (TimeoutError("timed out"), "timed out"), (ConnectionResetError("reset"), "reset"),
])
def test_no_network(remote, fault, why):
    remote.fault = fault
    with pytest.raises(UserError, match=re.escape(f"gsm8k: {gsm8k.URL}/train.jsonl: {why}; give --tasks path/to/train.jsonl")) as error:
        GSM8K._tasks("train", 7, 3)
    assert "\n" not in str(error.value) and not remote.cache.exists()


@pytest.mark.parametrize("fault", [b"", b"<html>", b'{"question": "1+1?", "answer": "#### 3"}\n', b"x" * 10**7])
def test_another_file_is_refused(remote, fault):
    remote.fault = fault
    with pytest.raises(UserError, match="sha256 differs from the official file's; give --tasks"):
        GSM8K._tasks("train", 7, 3)
    assert not remote.cache.exists()  # nothing is kept
    remote.fault = None
    GSM8K._tasks("train", 7, 3)


@pytest.mark.skipif(not os.path.isdir(DATA), reason="the dataset is not here")
def test_pinned_hash_is_that_of_the_train_set():
    with open(f"{DATA}/train.jsonl", "rb") as f:
        assert hashlib.sha256(f.read()).hexdigest() == gsm8k.SHA256["train"]


def test_no_eval():
    tree = ast.parse(open(gsm8k.__file__, encoding="utf-8").read())
    assert not {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)} & {"eval", "exec", "compile", "__import__"}


# ------------------------------------------------------------------------------------------------------------------ python
def test_python_is_a_tool_by_an_option():
    try:
        cls = envs.with_options(GSM8K, {"tools": "calculator+python"})
    except UserError as error:
        pytest.skip(str(error))
    assert list(envs.tools(cls)) == ["answer", "calculator", "python"] and list(envs.tools(GSM8K)) == ["answer", "calculator"] == list(envs.tools(envs.with_options(GSM8K, {"tools": "calculator"})))
    assert "calculator or python" in cls.system_prompt and "python" not in GSM8K.system_prompt
    assert {s["function"]["name"]: s for s in envs.schemas(cls)}["python"]["function"]["parameters"]["required"] == ["code"]
    env = cls()
    env.reset("How many?", "#### 45")
    say = lambda text: envs.call(env, "python", {"code": text})[0]  # noqa: E731
    assert say("print(sum(range(10)))") == "45" and say("x = 1") == "nothing was printed; use print"
    assert say("print(1)\nprint(x)") == "1\nline 2: NameError: name 'x' is not defined"
    assert "PermissionError" in say("open('/etc/passwd')") and "SyntaxError" in say("print(")
    assert "45" in say("print('#### 45')") and env.reward == 0 and not env.done  # what a tool prints is no answer
    envs.call(env, "answer", {"value": "45"})
    assert env._check()
