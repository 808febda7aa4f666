"""extras/check.py: every registered environment conforms, and every way not to is told."""
import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import sums

import envs
from core.data import to_json
from envs.tasks import load_tasks
from extras import check
from extras.check import Conformance, command
from extras.play import Config, Setup, run

# Nobody can tell more than 83 % of the meetings: the outcome is drawn.
EXCEPTIONS = {"meetings": {"the expert solves 95 % or more"}}


def in_this_process(command, **_):
    """What check_seed's other process says, without its three seconds of imports. Some tests start one."""
    return SimpleNamespace(returncode=0, stdout=to_json(load_tasks(*json.loads(command[-1]))), stderr="")


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(check, "subprocess", SimpleNamespace(run=in_this_process))
    monkeypatch.setattr(check, "EPISODES", 40)
    monkeypatch.setattr(check, "REPLAYED", 4)
    monkeypatch.setattr(check, "TRAINING", 200)


def verdicts(env, **flags):
    setup = Setup(Config(env=env, **flags))
    rows = list(Conformance(setup).verdicts())
    return {name: verdict for name, verdict, _ in rows}, {name: reason for name, _, reason in rows}


def those(told, verdict):
    return {name for name, said in told.items() if said == verdict}


@pytest.mark.parametrize("name", envs.ENVS)
def test_every_environment_of_ours_conforms(name, monkeypatch, tmp_path):
    if name == "gsm8k":  # the official files are downloaded; these are like them
        folder = tmp_path / "agentic-rl" / "gsm8k"
        folder.mkdir(parents=True)
        for split, first in (("train", 2), ("test", 300)):
            rows = [{"question": f"Ann has {a} bags of 7 nuts and eats 5. How many are left?", "answer": f"7*{a} = <<7*{a}={7 * a}>>{7 * a}. {7 * a}-5 = <<{7 * a}-5={7 * a - 5}>>{7 * a - 5}.\n#### {7 * a - 5}"}
                    for a in range(first, first + 250)]
            (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    told, reasons = verdicts(name)
    assert those(told, "FAIL") == EXCEPTIONS.get(name, set()), reasons
    assert not those(told, "-") and reasons[SPLIT].endswith(" of 0 the first message is also in training"), reasons


def test_tasks_of_ours_are_the_same_in_another_process():
    """One for all of them, with another seed for the hashes of text. gsm8k's are rows of a file."""
    names = [name for name in envs.ENVS if name != "gsm8k"]
    code = f"import extras\nfrom envs.tasks import load_tasks\nprint(hash('a'), [load_tasks(name, 'test', 20, 3) for name in {names}])"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={
        **os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "7"}).stdout
    assert other.partition(" ")[2] == f"{[load_tasks(name, 'test', 20, 3) for name in names]}\n" and not other.startswith(f"{hash('a')} ")


# ------------------------------------------------------------------------------------------------------- ways not to conform
SAME, SHARED, RANDOM = "the same task is the same episode", "episodes share no state", "random calls solve 30 % or less"
SPLIT, SEED, EXPERT = "train and test tasks are disjoint", "the same seed gives the same tasks", "the expert solves 95 % or more"
NOTHING, REPEAT = "doing nothing pays less", "repeating the question pays less"
ONCE, COPY = "answering at once pays less", "copying tool output pays less"


def test_a_good_one_conforms(monkeypatch):
    monkeypatch.setattr(check, "subprocess", subprocess)
    told, reasons = verdicts("sums:Sums")
    assert set(told.values()) == {"pass"} and len(told) == 12, reasons
    assert reasons["valid tool schemas"] == "answer, look" and reasons[SPLIT] == "40 test tasks are new; of 0 the first message is also in training" and reasons[ONCE] == "mean reward 0, the expert's 1; solves 0%"


@pytest.mark.parametrize("cls, failed", [
    (sums.Luck, {SAME, SHARED}), (sums.Remembers, {SHARED}), (sums.Shares, {SHARED}), (sums.Leaks, {SPLIT}), (sums.NewTasks, {SEED}), (sums.Hashed, {SEED}), (sums.BadExpert, {EXPERT}),
    (sums.PaysForNothing, {EXPERT, NOTHING, REPEAT, ONCE}), (sums.Guessable, {ONCE}), (sums.Echo, {REPEAT}), (sums.Lottery, {RANDOM, ONCE, COPY}), (sums.AsksAlike, set()), (sums.NumpyTasks, set())])
def test_what_is_broken_fails(cls, failed, monkeypatch):
    if cls is sums.Hashed:
        monkeypatch.setattr(check, "subprocess", subprocess)
    told, reasons = verdicts(f"sums:{cls.__name__}")
    assert those(told, "FAIL") == failed, reasons
    assert (reasons[SPLIT] == "40 test tasks are new; of 40 the first message is also in training") == (cls is sums.AsksAlike)


def test_output_that_is_copied_whole_may_not_be_paid():
    told, reasons = verdicts("sums:Parrot")
    honest, copied = (float(x) for x in (reasons[COPY].split("expert's ")[1].split(";")[0], reasons[COPY].split()[2].strip(",")))
    assert honest == copied == 1 and those(told, "FAIL") == {COPY} and told[RANDOM] == "pass", reasons


def test_faults_and_bad_schemas_are_told_in_a_line():
    for name, says in (("Raises", "reset() on task"), ("NoDocstring", "tool look: ")):
        told, reasons = verdicts(f"sums:{name}")
        assert told[SAME] == "FAIL" and says in reasons[SAME] and "\n" not in reasons[SAME]
    assert told["valid tool schemas"] == "FAIL"


def test_an_attribute_that_hides_a_tool_is_told():
    told, reasons = verdicts("sums:Hides")
    assert RANDOM in those(told, "FAIL") and "raises as ValueError; the last: " in reasons[RANDOM] and reasons[RANDOM].endswith("raised AttributeError: an attribute 'look' hides the tool")


def test_an_instance_is_used_again_in_its_own_thread():
    """One with a database failed: SQLite objects created in a thread can only be used in that same thread."""
    told, reasons = verdicts("sums:Database")
    assert not those(told, "FAIL"), reasons


def test_no_turns_is_no_endless_game():
    told, reasons = verdicts("sums:NoTurns")
    assert told[RANDOM] == "FAIL" and reasons[RANDOM].endswith("max_turns is -1, and must be at least 1")


def test_why_an_expert_fails_is_told():
    assert verdicts("sums:BadCalls")[1][EXPERT] == "solves 0%; error: answer: unknown argument 'words'; takes: text"


def test_the_place_where_two_episodes_differ_is_shown():
    once, then = verdicts("sums:Remembers")[1][SHARED].split(": once ")[1].split(", then ")
    assert re.search(r"look \d+", once)[0] != re.search(r"look \d+", then)[0]


def test_advice_on_a_tool_is_told_whole():
    assert verdicts("sums:NoDocstring")[1]["valid tool schemas"].endswith("a method whose name begins with _ is no tool")


def test_a_tool_that_never_works_is_told():
    told, reasons = verdicts("sums:Typo")
    assert RANDOM in those(told, "FAIL") and "Typo: look on task" in reasons[RANDOM] and reasons[RANDOM].endswith("raised AttributeError: 'Typo' object has no attribute 'bee'")


def test_a_tool_that_never_works_fails_the_checks_that_call_it():
    """All checks after it failed with its words, also that the expert solves the tasks, which it does."""
    told, reasons = verdicts("sums:TypoBeside")
    assert those(told, "FAIL") == {SAME, SHARED, RANDOM, "random calls pays less", COPY}, reasons


def test_an_expert_that_refuses_to_play_is_none():
    told, reasons = verdicts("sums:Refuses")
    assert not those(told, "FAIL") and {reasons[name] for name in those(told, "-")} == {"nobody knows the sum"}, reasons
    assert those(told, "-") == {EXPERT, NOTHING, REPEAT, "random calls pays less", ONCE, COPY}


STRANGER = """
class Counter:
    def reset(self, **kwargs):
        self.n = 0

    def up(self, by: list[int], how: dict, exact: bool, x: float, again: int | str = 1) -> int:
        '''Count.

        Args:
            by: numbers
            how: how
            exact: whether
            x: a number
            again: how often
        '''
        self.n += sum(by) + len(how) + 0 * x * exact
        return self.n

    system_prompt = "Count to 10,000."

    def get_reward(self):
        return float(self.n == 10_000)
"""


def test_of_a_strangers_class_what_can_be_checked_is_checked(tmp_path):
    (tmp_path / "stranger.py").write_text(STRANGER)
    told, reasons = verdicts(f"{tmp_path / 'stranger.py'}:Counter")
    assert those(told, "pass") == {"valid tool schemas", SAME, SHARED, RANDOM} and len(those(told, "-")) == 8, reasons
    assert reasons[SPLIT] == "there is no _tasks" and reasons[COPY] == "there is no _expert"
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps({"start": i}) + "\n" for i in range(60)))
    assert verdicts(f"{tmp_path / 'stranger.py'}:Counter", tasks=str(path))[0] == told


@pytest.mark.parametrize("name, status, says", [("Sums", 0, "pass  the expert solves 95 % or more      solves 100%"), ("Leaks", 1, "FAIL  train and test tasks are disjoint"),
                                                ("Nothing", 2, "check: environment")])
def test_the_command(name, status, says, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["check", f"sums:{name}"])
    with pytest.raises(SystemExit) as ended:
        run(command, "")
    out, err = capsys.readouterr()
    assert ended.value.code == status and says in out + err and len(out.splitlines()) == (0 if status == 2 else 12 + (status == 1))


def test_an_environment_without_content_is_one_too():
    """`Game` plays the instance that it is given, even one whose length is 0."""
    setup = Setup(Config(env="sums:Empty"))
    first = check.Game(setup, {})
    assert check.Game(setup, {}, first).session.env is first.session.env


class WordOfARow:
    def reset(self, **row):
        return f"Say {row['word']}."

    def say(self, word: str) -> str:
        """Say it.

        Args:
            word: a word
        """
        return "heard"

    def get_reward(self) -> float:
        return 0.0


def test_a_class_that_needs_a_row_is_told_of_the_flag_that_gives_it(tmp_path):
    path = tmp_path / "words.jsonl"
    path.write_text("".join(json.dumps({"word": f"w{i}"}) + "\n" for i in range(40)))
    told, reasons = verdicts(f"{__name__}:WordOfARow")
    assert told[SAME] == "FAIL" and reasons[SAME].endswith("raised KeyError: 'word'; if reset needs a row of data, add --tasks FILE")
    told, reasons = verdicts(f"{__name__}:WordOfARow", tasks=str(path))
    assert told[SAME] == "pass", reasons


def test_help_names_the_command(monkeypatch, capsys):
    from extras.hints.command_line import parse
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", SimpleNamespace(name="extras.check"))
    with pytest.raises(SystemExit):
        parse(Config, ["--help"], check.__doc__)
    shown = capsys.readouterr().out
    assert shown.startswith("usage: python -m extras.check [") and shown.split("\n\n")[1].endswith(".")
