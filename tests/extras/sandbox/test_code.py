"""extras/sandbox/code.py and its tasks: what a function earns, what gaming earns, rows of HumanEval's and MBPP's form."""
import json
import random
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import envs
from extras.sandbox import code_tasks
from extras.sandbox import sandbox
from extras.sandbox.code import Code
from extras.sandbox.code_style import style_findings
from extras.sandbox.code_tasks import LEVELS, read_row, read_tests
from envs.gsm8k import parse
from envs.tasks import load_tasks
from core.config import UserError

try:
    sandbox.run("pass")
except UserError as error:
    pytest.skip(str(error), allow_module_level=True)

FAMILIES = {name: family for level in LEVELS.values() for name, family in level.items()}
DOUBLE = {"question": "def double(x):\n    \"\"\"Double x.\"\"\"\n", "entry_point": "double", "canonical_solution": "def double(x):\n    return 2 * x\n",
          "test": "def check(candidate):\n" + "".join(f"    assert candidate({x}) == {2 * x}\n" for x in (7, 11, 13, 17, 19, 23))}


def play(task, *calls, cls=Code, **reset):
    """An environment after these calls, (name, arguments) or code to write and submit."""
    env = cls()
    env.reset(**{**task, **reset})
    for name, arguments in [("write_function", {"code": c}) if isinstance(c, str) else c for c in calls]:
        envs.call(env, name, arguments)
    return env


def submitted(task, text, **options):
    return play(task, text, ("submit", {}), **options)


def expert(task, **reset):
    env = Code()
    env.reset(**{**task, **reset})
    log = []
    while len(log) < Code.max_turns and (turn := env._expert()):
        log += [(c["name"], *envs.call(env, c["name"], c["arguments"])) for c in turn]
    return env, log


# ------------------------------------------------------------------------------------------------------------------- tasks
def test_families_levels_and_splits():
    assert len(FAMILIES) == sum(map(len, LEVELS.values())) >= 12
    train, test = Code._tasks("train", 400, 0), Code._tasks("test", 400, 1)
    assert train == Code._tasks("train", 400, 0) != Code._tasks("train", 400, 2) and len(train) == 400 == len(test)
    assert {row["entry_point"] for row in train} == {row["entry_point"] for row in test} == FAMILIES.keys()
    assert not {row["question"] for row in train} & {row["question"] for row in test}
    assert not {row["canonical_solution"] for row in train} & {row["canonical_solution"] for row in test}
    easy = envs.with_options(Code, {"levels": "1"})
    assert {row["entry_point"] for row in easy._tasks("train", 50, 0)} == LEVELS["1"].keys()
    assert len(Code._tasks("train", None, 0)) == 1000


def test_the_question_of_nesting_says_that_the_other_kind_of_bracket_does_not_count():
    [row] = [row for row in code_tasks.generate(["2"], "train", 6, 0) if row["entry_point"] == "nesting"]
    assert re.search(r"Only \"[\[(]\" counts: return how deep it nests, at most \d; -\d if unbalanced\.", row["question"])


def test_the_question_of_best_apart_says_that_none_may_be_chosen():
    [row] = [row for row in code_tasks.generate(["3"], "train", 3, 0) if row["entry_point"] == "best_apart"]
    solution = {}
    exec(row["canonical_solution"], solution)
    assert "Choose numbers (or none) over" in row["question"] and solution["best_apart"]([-3, -1]) == 0


def test_no_name_of_the_settings_comes_twice():
    """Whether a dropped number leaves an earlier one of the same name is not said."""
    for row in code_tasks.generate(["2"], "train", 300, 0):
        if row["entry_point"] == "read_settings":
            for [text], _ in read_tests(row["test"], "read_settings"):
                names = re.findall(r"(\w+)=", text)
                assert len(set(names)) == len(names), text


def test_no_constant_passes_the_hidden_tests():
    rows = [row for seed in range(3) for row in Code._tasks("train", 600, seed)]
    hidden = [{repr(wanted) for _, wanted in read_tests(row["test"], row["entry_point"])[2:]} for row in rows]
    assert min(map(len, hidden)) > 1


def test_the_generator_is_fast():
    began = time.process_time()
    Code._tasks("train", 1000, 0)
    assert time.process_time() - began < 2


@pytest.mark.parametrize("name", FAMILIES)
def test_the_expert_solves_every_family(name, monkeypatch):
    """With the full reward: the reference is right, efficient and clean. A constant, or the argument itself, is not right."""
    monkeypatch.setattr(code_tasks, "LEVELS", {"1": {name: FAMILIES[name]}})
    for row in code_tasks.generate(["1"], "train", 3, 5):
        tests = read_tests(row["test"], row["entry_point"])
        assert len(tests) == 10 and "{" not in row["question"].split('"""')[1] and max(map(len, row["canonical_solution"].splitlines())) <= 120
        assert all(not sandbox.same(json.loads(json.dumps(arguments[0])), wanted) for arguments, wanted in tests[2:3]) or len({repr(w) for _, w in tests}) > 1
        assert len({repr(wanted) for _, wanted in tests[2:]}) > 1
        assert style_findings(parse(row["canonical_solution"])) == []
        env, log = expert(row)
        assert env._check() and env.get_reward() == pytest.approx(1.0), (row["canonical_solution"], log, env._reward_parts)
        assert [name for name, *_ in log] == ["write_function", "run_tests", "submit"]


@pytest.mark.parametrize("code, findings", [
    ("from __future__ import annotations\nfrom math import *\ndef f(x):\n    return floor(x)", []), ("import re\ndef f(x):\n    return x", ["style, line 1: re is never used"]),
    ("def f(x, *, y=[], z=()):\n    return y", ["style, line 1: a default is mutable"])])
def test_what_a_reviewer_remarks(code, findings):
    assert style_findings(parse(code)) == findings


def test_values_are_shown_as_python_writes_them():
    env = play(DOUBLE, "def double(x):\n    return {'a': 1, 'b': {2}, 'c': ('x', [None, {}])}")
    assert "double(7) == 14, not {'a': 1, 'b': {2}, 'c': ('x', [None, {}])}\n" in env.run_tests()


def test_noise_of_the_expert_is_repaired_by_what_the_tests_say():
    row = Code._tasks("train", 3, 0)[2]
    env, log = expert(row, noise=1.0, noise_seed=3)
    assert [name for name, *_ in log] == ["write_function", "run_tests", "write_function", "run_tests", "submit"] and env._check()
    assert "not None" in log[1][1] and expert(row, noise=0.5, noise_seed=3)[1] == expert(row, noise=0.5, noise_seed=3)[1]
    assert len({len(expert(row, noise=0.5, noise_seed=seed)[1]) for seed in range(8)}) == 2


# ------------------------------------------------------------------------------------------------------------------- reward
def test_python_says_nothing_about_a_models_code():
    """It warned of an unknown escape in the middle of a run's lines (3.12; before, only where it was asked to)."""
    done = subprocess.run([sys.executable, "-W", "always", "-c", r"from envs.gsm8k import parse; parse('x = \'\\e\'')"],
                          cwd=Path(__file__).resolve().parents[3], capture_output=True, text=True, check=True)
    assert done.stdout == done.stderr == ""


def test_what_a_function_earns():
    right = submitted(DOUBLE, "def double(x):\n    return x + x\n")
    assert right._check() and right.done and right.get_reward() == pytest.approx(1.0) and right._reward_parts == {"correctness": 0.7, "efficiency": 0.2, "style": 0.1}
    slow = submitted(DOUBLE, "def double(x):\n    total = 0\n    for _ in range(2 * x):\n        total += 1\n    return total\n")
    assert slow._check() and 0 < slow._reward_parts["efficiency"] < 0.03 and slow._reward_parts["style"] == 0.1
    ugly = submitted(DOUBLE, "import os\ndef double(x, y=[]):\n    unused = 1\n    try:\n        return x + x\n    except:\n        return x == None\n")
    assert ugly._check() and ugly._reward_parts["style"] == 0.0
    partly = submitted(DOUBLE, "def double(x):\n    return 2 * x if x < 18 else 0\n")
    assert not partly._check() and 0 < partly.get_reward() <= 0.2 == pytest.approx(partly.get_reward() * 2)
    assert submitted(DOUBLE, "def double(x):\n    return 0\n").get_reward() == 0


@pytest.mark.parametrize("text", [
    "def double(x):\n    return type('A', (int,), {'__eq__': lambda *a: True})(x)", "class A:\n    def __eq__(self, other): return True\ndef double(x): return A()",
    "def double(x):\n    print('ALL_TESTS_PASSED')\n    import os\n    os._exit(0)", "import sys\nsys.exit(0)\ndef double(x): return 1", "def double(x): return float('nan')",
    "import builtins\nbuiltins.bool = lambda x: True\ndef double(x): return 7", "def double(x): return {7: 14, 11: 22}[x]", "def double(x): return True", "def double(x): return str(2 * x)",
    "def double(x): yield 2 * x", "def double(x):\n    f = __import__('sys')._getframe()\n    while f:\n        for v in f.f_locals.values():\n            if 'wanted' in str(v): return v\n        f = f.f_back",
    "import os\ndef double(x):\n    [os.write(fd, b'{\"value\": true}\\n' * 9) for fd in (3, 4)]\n    return 0", "import unittest.mock\ndef double(x): return unittest.mock.ANY", "def double(x): return [2 * x]",
    "def double(*_): raise SystemExit(0)", "calls = []\ndef double(x):\n    calls.append(x)\n    return [26, 34, 38, 46][len(calls) - 1]"])
def test_gaming_earns_nothing(text):
    env = submitted(DOUBLE, text)
    assert not env._check() and env.get_reward() <= 0.1 and env.done


@pytest.mark.parametrize("operations, efficiency", [([4, 4], 0.2), ([6, 6], 0.2), ([12, 12], 0.1), ([0, 0], 0.2), ([None, 1], 0.0)])
def test_efficiency_by_hand(operations, efficiency, monkeypatch):
    """The reference takes 4 lines for each of two calls. None: the counter was stopped."""
    env = play({**DOUBLE, "test": "\n".join(DOUBLE["test"].splitlines()[:5])}, "def double(x):\n    return 2 * x\n")
    counts = iter([[0, 0], operations, [4, 4]])  # whether it is right comes first, without the counter
    monkeypatch.setattr(env, "_run", lambda *_, **__: sandbox.Result("ok", outcomes=[{"value": 2 * x, "operations": n} for (x,), n in zip([test[0] for test in env._hidden], next(counts))]))
    assert env.submit() == "right" and env._reward_parts["efficiency"] == pytest.approx(efficiency)


def test_code_that_only_the_counter_makes_too_slow_is_right(monkeypatch):
    """It slows a loop down eight to twelve times, so that right code of about half a second was killed at the limit of 5 s, and paid as wrong."""
    env = play(DOUBLE, "def double(x):\n    return 2 * x\n")
    monkeypatch.setattr(env, "_run", lambda *args, count=False, ran=env._run: sandbox.Result("timeout") if count else ran(*args))
    assert env.submit() == "right" and env._reward_parts == {"correctness": 0.7, "efficiency": 0.0, "style": 0.1}


def test_efficiency_is_not_paid_to_code_that_stops_the_counter():
    slow = "    total = 0\n    for _ in range(2 * x):\n        total += 1\n    return total\n"
    for head in ("import sys\ndef double(x):\n    sys.settrace(None)\n", "from collections import _sys\ndef double(x):\n    _sys.settrace(None)\n", "import re\ndef double(x):\n    re.enum.sys.settrace(None)\n",
                 "def double(x):\n    exec('import sys; sys.settrace(None)')\n", "import sys\ndef double(x):\n    sys.settrace(lambda *_: None)\n", "def double(x):\n    __import__('sys').settrace(None)\n"):
        env = submitted(DOUBLE, head + slow)
        assert env._check() and env._reward_parts["efficiency"] == 0, head
    honest = submitted(DOUBLE, "import math, sys\ndef double(x):\n    return int(getattr(math, 'floor')(min(2 * x, sys.maxsize)))\n")
    assert honest._reward_parts["efficiency"] == 0.2


def test_a_forged_count_earns_nothing(monkeypatch):
    for forged in ("many", [], {}):
        env = play(DOUBLE, "def double(x):\n    return 2 * x\n")
        monkeypatch.setattr(env, "_run", lambda *_, **__: sandbox.Result("ok", outcomes=[{"value": 2 * x, "operations": forged} for (x,), _ in env._hidden]))
        assert envs.call(env, "submit", {})[0].startswith("error") and env.done and env.get_reward() == 0


def test_hidden_values_never_enter_the_process(monkeypatch):
    """What is handed over is code, names and arguments."""
    jobs = []
    monkeypatch.setattr(sandbox.marshal, "dumps", lambda job, dumps=sandbox.marshal.dumps: jobs.append(job) or dumps(job))
    task = {**DOUBLE, "test": DOUBLE["test"].replace("26", "987654").replace("34", "987655"), "canonical_solution": ""}
    play(task, "def double(x):\n    return 2 * x\n", ("run_tests", {}), ("debug", {"statements": "print(double(3))"}), ("submit", {}))
    assert len(jobs) == 3 and not any(str(wanted) in repr((job["code"], job["calls"])) for job in jobs for wanted in (987654, 987655, 14, 22, 38, 46))


def test_agents_that_do_not_try_earn_less():
    tasks = Code._tasks("test", 16, 3)
    rng = random.Random(0)

    def at_random(env):
        for _ in range(8):
            name = rng.choice(list(envs.tools(env)))
            arguments = {"write_function": {"code": f"def {env._name}(*x):\n    return {rng.choice(['x[0]', '0', '[]', 'len(x)', 'x'])}\n"}, "debug": {"statements": "print(1)"}}.get(name, {})
            envs.call(env, name, arguments)

    def at_once(env):
        envs.call(env, "submit", {})

    def copies(env):
        text, _ = envs.call(env, "analyze_requirements", {})
        envs.call(env, "write_function", {"code": text})
        envs.call(env, "write_function", {"code": f"def {env._name}(*x):\n    return {text!r}\n"})
        envs.call(env, "submit", {})

    def repeats(env):
        env._reply(env.asked)
        env._reply(f"```python\n{env.asked}```")

    rewards = {}
    for agent in (at_random, at_once, copies, repeats, lambda env: None):
        played = []
        for task in tasks:
            env = Code()
            env.asked = env.reset(**task)
            agent(env)
            played.append(env)
        rewards[agent.__name__] = sum(env.get_reward() for env in played) / 16
        assert sum(env._check() for env in played) / 16 <= 0.3
    assert max(rewards.values()) < 0.2 and rewards["at_once"] == rewards["copies"] == rewards["<lambda>"] == 0, rewards


# -------------------------------------------------------------------------------------------------------------------- tools
def test_tools():
    env = Code()
    question = env.reset(**DOUBLE)
    assert question.startswith("def double(x):") and question.endswith("Examples:\ndouble(7) == 14\ndouble(11) == 22") and "26" not in question
    assert [s["function"]["name"] for s in envs.schemas(env)] == sorted(["analyze_requirements", "write_function", "run_tests", "debug", "submit"])
    say = lambda name, **arguments: envs.call(env, name, arguments)[0]  # noqa: E731
    assert "4 hidden tests" in say("analyze_requirements") and "(int) -> int" in say("analyze_requirements")
    assert say("run_tests") == "error: nothing is written yet"
    assert "SyntaxError" in say("write_function", code="def double(:") and "no function double" in say("write_function", code="def other(x): return 1")
    for text in ("a\0", "-" * 7000 + "1", "(" * 3000, "[" * 300 + "]" * 300, "\ud800"):
        assert say("write_function", code=text).startswith("error")
    assert say("write_function", code="x" * 8001) == "error: at most 8000 characters"
    assert "style, line 1: == with None, True or False" in say("write_function", code="def double(x): return x == None")
    assert say("run_tests") == "0 of 2 pass\ndouble(7) == 14, not False\ndouble(11) == 22, not False"
    say("write_function", code="print('hello')\ndef double(x):\n    return x / 0")
    assert "not line 3: ZeroDivisionError: division by zero" in say("run_tests") and say("run_tests").endswith("hello")
    say("write_function", code="import x\ndef double(x):\n    return 2 * x")
    assert say("run_tests") == "0 of 2 pass\nerror: line 1: ModuleNotFoundError: No module named 'x'"
    say("write_function", code="def double(x):\n    return 2 * x")
    assert say("debug", statements="print(double(4))\ndouble(1, 2)").startswith("8") and "TypeError" in say("debug", statements="double(1, 2)")
    assert say("debug", statements="x = 1") == "nothing was printed; use print"
    assert say("run_tests") == "2 of 2 pass" and say("submit") == "right" and "episode is over" in say("submit")
    assert env.submit() == "error: the episode is over"


def test_code_in_text():
    env = play(DOUBLE)
    assert env._reply("I think it is easy.") == "Use write_function, and then submit." and not env.done
    assert "SyntaxError" in env._reply("```python\ndef double(\n```") and not env.done
    assert env._reply("<think>\n```python\ndef double(x):\n    return x\n```\n</think>\n\nI am not sure.") == "Use write_function, and then submit." and not env.done
    assert env._reply("Here:\n```python\ndef double(x):\n    return 2 * x\n```\nDone.") is None and env._check()


def test_a_task_as_typed():
    env = play(Code._from_text("write def area(w, h): the area"), "def area(w, h):\n    return w * h", ("debug", {"statements": "print(area(2, 3))"}))
    assert env._name == "area" and env.run_tests() == "0 of 0 pass" and Code._from_text("sort it")["entry_point"] == "solve"
    assert env.submit() == "There are no tests." and not env._check() and env.get_reward() == 0  # no test, no reward
    assert Code().reset(**Code._from_text("sort it")) == "sort it"  # not "Examples:" and none


def test_nothing_is_shared_between_episodes():
    env = submitted(DOUBLE, "def double(x):\n    return 2 * x")
    env.reset(**Code._tasks("train", 1, 0)[0])
    assert not env.done and env.get_reward() == 0 and env.run_tests().startswith("error") and not env._check()
    assert play(DOUBLE)._hidden == play(DOUBLE)._hidden


def test_episodes_in_threads():
    rewards = []
    threads = [threading.Thread(target=lambda: rewards.append(submitted(DOUBLE, "def double(x):\n    return 2 * x").get_reward())) for _ in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert rewards == pytest.approx([1.0] * 8)


# ----------------------------------------------------------------------------------------------------------- rows of a file
HUMANEVAL = {"task_id": "X/0", "entry_point": "second", "prompt": "from typing import List\n\ndef helper(x):\n    return x\n\ndef second(x: List[int], k: int = 1):\n    \"\"\"Return element k.\"\"\"\n",
             "canonical_solution": "    return helper(x)[k]\n", "test": "METADATA = {}\n\ndef check(candidate):\n    assert candidate([1, 2], 0) == 1, 'message'\n    assert candidate([1, 2]) == 2\n"
             "    assert abs(candidate([0.5, 0.25]) - 0.25) < 1e-6\n    assert candidate([0, True])\n    assert not candidate([1, 0])\n    assert candidate([1, None]) is None\n"
             "    for i in range(3):\n        assert candidate([i, i]) == i\n    assert candidate(list(range(3))) == 1\n    assert candidate([1, 2], k=0) == 1\n    assert True\n    assert open('x')\n"}
MBPP = {"task_id": 7, "text": "Write a function to add.", "code": "def one():\n    return 1\ndef add(a, b):\n    return a + b",
        "test_list": ["assert add(1, 2) == 3", "assert add((1,), (2,)) == (1, 2)", "assert add(-1, 1) == 0", "assert set(add([1], [2])) == {1, 2}"], "test_setup_code": "", "challenge_test_list": []}


def test_rows_of_humaneval_and_mbpp():
    tests = read_tests(HUMANEVAL["test"], "second")
    assert tests == [([[1, 2], 0], 1), ([[1, 2]], 2), ([[0.5, 0.25]], 0.25), ([[0, True]], True), ([[1, 0]], False), ([[1, None]], None)]
    assert isinstance(tests[2][1], float)
    row = read_row(HUMANEVAL)
    env = submitted(row, "def second(x, k=1):\n    return helper(x)[k]\n")  # what the prompt defines is there
    assert env._examples_pass is None and not env._check()  # -- not of 0 is True, but 0 is not False
    row = read_row({**HUMANEVAL, "test": HUMANEVAL["test"].replace("not candidate([1, 0])", "not candidate([1, False])")})
    env = submitted(row, "def second(x, k=1):\n    return helper(x)[k]\n")
    assert env._check() and env.get_reward() == pytest.approx(1.0)
    assert "not line 2: ZeroDivisionError" in play(row, "def second(x, k=1):\n    return x[1] / 0\n").run_tests()
    assert expert(row)[0]._check()
    row = read_row(MBPP)
    assert row["entry_point"] == "add" and "Name the function add." in row["question"] and "prompt" not in row and len(read_tests(row["test"], "add")) == 3
    env, _ = expert(row)
    assert env._check() and len(env._examples) == 1 and env.get_reward() == pytest.approx(1.0)
    for missing in (None, [], "[]"):  # a null was told as a missing entry_point
        assert read_row({**MBPP, "challenge_test_list": missing, "test_list": repr(MBPP["test_list"])}) == row  # as pandas writes a CSV file
    for array in (" ".join(map(repr, MBPP["test_list"])), "\n ".join(map(repr, MBPP["test_list"]))):  # as it does from the arrays of a parquet file
        assert read_row({**MBPP, "test_list": f"[{array}]"}) == row
    halved = {**MBPP, "code": "def half(x):\n    return x / 2", "test_list": ["assert half(4) == 2", "assert half(6) == 3", "assert half(5) == 2.5"]}
    assert expert(read_row(halved))[0]._check()  # 2.0 == 2, as in MBPP's find_Volume
    assert read_row({**MBPP, "prompt": MBPP["text"], "text": None})["question"] == row["question"]
    for test in ("assert abs(add(1, 2) - 3.14) < 0.01", "assert add(1, 2) == b'x'", "assert add(1, 2) == 1j", "assert add(1, 2) == [...]"):
        assert read_tests(test, "add") == []  # another tolerance than ours, and values that no result can be
    assert read_row({**MBPP, "test_list": ["assert add(x, 1)"]}) is None and read_row({**HUMANEVAL, "test": "def check(candidate):\n    pass"}) is None


@pytest.mark.parametrize("head", ["def f(x):\n", "def f(x):\n    # twice\n", "@functools.cache\ndef f(x):\n"])
def test_a_prompt_may_be_a_head_without_a_docstring(head):
    """It is no code by itself, and as what runs before the model's code it failed every solution."""
    row = read_row({**HUMANEVAL, "entry_point": "f", "prompt": f"import functools\n\ndef helper(x):\n    return 2 * x\n\n{head}", "canonical_solution": "    return helper(x)\n", "test": "assert f(1) == 2\nassert f(3) == 6"})
    assert expert(row)[0]._check() and submitted(row, "def f(x):\n    return helper(x)")._check() and "def f" not in row["setup"]
    unsolved = read_row({**row, "prompt": "Write f, which doubles.", "question": None, "canonical_solution": None})
    assert submitted(unsolved, "def f(x):\n    return x + x")._check() and unsolved["canonical_solution"] == ""


def test_a_row_whose_own_solution_fails_is_left_out_and_named(tmp_path, capsys):
    """Nobody could solve it: the module or the size of its results is not of the sandbox, or its test is wrong."""
    rows = [MBPP, {**MBPP, "task_id": 8, "code": "import numpy\ndef add(a, b):\n    return a + b"}, {**MBPP, "task_id": 9, "test_list": ["assert add(1, 1) == 3", "assert add(1, 2) == 3"]},
            {**HUMANEVAL, "canonical_solution": None}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = load_tasks("code", "test", None, 0, str(tmp_path / "rows.jsonl"), str(tmp_path / "rows.jsonl"))
    assert sorted(task["task_id"] for task in tasks) == ["7", "X/0"]
    out = capsys.readouterr().out
    assert "note: task 8 is left out: its own solution fails, \"0 of 3 pass\\nerror: line 1: ModuleNotFoundError: No module named 'numpy'\"\n" in out
    assert "note: task 9 is left out: its own solution fails, '1 of 2 pass\\nadd(1, 1) == 3, not 2'\n" in out and "2 of 4 rows of " in out


def test_a_row_whose_own_solution_was_too_slow_stays(monkeypatch):
    """Beside another process it takes longer: a resumed run, or one of two ranks, had other tasks than the others."""
    row = {**MBPP, "code": MBPP["code"] + "  # slow here"}
    monkeypatch.setattr("extras.sandbox.code.run", lambda *_, **__: sandbox.Result("timeout", "killed after 5 s"))
    assert Code._row(row)["task_id"] == "7"


def test_a_counter_is_the_dict_that_it_holds():
    """MBPP's solutions return Counter, defaultdict and namedtuple where the test says dict or tuple: 0 was paid for them."""
    code = "from collections import *\nfrom enum import IntEnum\nclass E(IntEnum):\n    A = 1\nP = namedtuple('P', 'x y')\n"
    for value, wanted in [("Counter('aab')", "{'a': 2, 'b': 1}"), ("defaultdict(list, a=[1])", "{'a': [1]}"), ("OrderedDict(a=E.A)", "{'a': 1}"), ("P(1, True)", "(1, True)")]:
        row = read_row({**MBPP, "code": f"{code}def f(x):\n    return {value}", "test_list": [f"assert f(1) == {wanted}", f"assert f(2) == {wanted}"]})
        assert expert(row)[0]._check(), value


def test_rows_of_humaneval_plus():
    """Its tests are two lists and a loop over them; all its rows were dropped."""
    loop = "    for i, (inp, exp) in enumerate(zip(inputs, results)):\n        assertion(candidate(*inp), exp, 0)\n"
    test = (f"import numpy as np\n\ndef assertion(out, exp, atol):\n    assert out == exp, f'{{out}}'\n\ndef check(candidate):\n    results = {[[x] for x in range(300)]}\n    inputs = {[[[x, x]] for x in range(300)]}\n{loop}")
    row = read_row({**HUMANEVAL, "test": test, "canonical_solution": "    return [x[k]]\n"})
    assert read_tests(row["test"], "second")[1] == ([[1, 1]], [1]) and row["dropped_tests"] == 0
    env, _ = expert(row)
    assert env._check() and len(env._hidden) == 98 and not submitted(row, "def second(x, k=1):\n    return [min(x[0], 90)]")._check()
    assert read_row({**HUMANEVAL, "test": test.replace("results = [", "results = [f(), ")}) is None  # no literal


def test_a_row_that_is_hostile_is_never_run(tmp_path):
    """Its tests are data: what is no literal is left out, and its reference solution runs in the sandbox only."""
    target = tmp_path / "ran"
    evil = f"open({str(target)!r}, 'w')"
    row = read_row({**MBPP, "code": f"{evil}\ndef add(a, b):\n    {evil}\n    return a + b", "test_list": [*MBPP["test_list"], f"assert add({evil}, 1) == 2", f"assert add(1, 1) == {evil}"], "test_setup_code": evil})
    env, log = expert(row)
    assert not target.exists() and not env._check() and len(read_tests(row["test"], "add")) == 3
    good = submitted({**row, "setup": ""}, "def add(a, b):\n    return a + b")  # its reference fails: nothing to compare with
    assert good._check() and good._reward_parts["efficiency"] == 0.2
    for test in ("assert " + "-" * 5000 + "1", "assert f(" + "[" * 250 + "]" * 250 + ")"):
        try:
            assert read_tests(test, "g") == []  # Python 3.12 can parse it
        except (ValueError, SyntaxError) as error:
            assert "nested" in str(error)


def test_files(tmp_path, capsys):
    solvable = {**HUMANEVAL, "test": HUMANEVAL["test"].replace("not candidate([1, 0])", "not candidate([1, False])")}
    rows = [solvable, MBPP, {**MBPP, "test_list": ["assert add(x) == y"]}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = load_tasks("code", "test", None, 0, str(tmp_path / "rows.jsonl"), str(tmp_path / "rows.jsonl"))
    assert sorted(task["entry_point"] for task in tasks) == ["add", "second"] and {task["env"] for task in tasks} == {"code"}
    out = capsys.readouterr().out
    assert re.search("1 of 3 rows of .*/rows.jsonl have nothing that can be played: dropped\n", out)
    # HumanEval's row: the one in the loop, list(range(3)), k=0, open('x'), but not True; MBPP's: set(add(...)).
    assert "rows.jsonl: 5 tests cannot be read: dropped (test)\n" in out
    for row, says in [({"prompt": "x"}, 'rows.jsonl:1: no "entry_point" field'), ({**MBPP, "code": "def f(:"}, "rows.jsonl:1:.*invalid syntax")]:
        (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
        with pytest.raises(UserError, match=says):
            load_tasks("code", "test", None, 0, str(tmp_path / "rows.jsonl"), str(tmp_path / "rows.jsonl"))


# ------------------------------------------------------------------------------------------------------- confined, or unsafe
def test_refused_without_confinement_and_unsafe_by_a_flag(monkeypatch, tmp_path):
    """Before any model is loaded; and --unsafe_code reaches every run of code."""
    child = tmp_path / "child.py"
    child.write_text(sandbox.CHILD.read_text().replace("libc.syscall(444,", "libc.syscall(9999,"))
    monkeypatch.setattr(sandbox, "COMMAND", [*sandbox.COMMAND[:-1], str(child)])
    sandbox.check_sandbox.cache_clear()
    try:
        (tmp_path / "rows.jsonl").write_text(json.dumps({**MBPP, "task_id": "not run before"}) + "\n")
        for dataset in (None, str(tmp_path / "rows.jsonl")):
            with pytest.raises(UserError, match="cannot confine.*--unsafe_code"):
                load_tasks("code", "train", 3, 0, dataset, dataset)
        unsafe = envs.with_options(Code, {"unsafe_code": True})
        assert unsafe._tasks("train", 1, 0) and not Code.options["unsafe_code"]
        env = submitted(DOUBLE, "def double(x):\n    return 2 * x", cls=unsafe)
        assert env.get_reward() == pytest.approx(1.0)
        with pytest.raises(UserError, match="cannot confine"):
            submitted(DOUBLE, "def double(x):\n    return 2 * x").submit()
            play(DOUBLE, "def double(x):\n    return 2 * x").submit()
        with pytest.raises(UserError, match="cannot confine"):
            envs.with_options(envs.load("gsm8k"), {"tools": "calculator+python"})
        assert "python" in envs.tools(envs.with_options(envs.load("gsm8k"), {"tools": "calculator+python", "unsafe_code": True}))
    finally:
        sandbox.check_sandbox.cache_clear()
