"""extras/play.py: a person plays."""
import json

import pytest

import envs
from extras.play import Config, Setup, command
from core.config import UserError


def played(monkeypatch, capsys, lines, **flags):
    typed = iter(lines)

    def read(_):
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None
    monkeypatch.setattr("builtins.input", read)
    command(Config(**flags))
    return capsys.readouterr().out


def test_a_person_sees_what_the_model_sees_and_plays_in_three_ways(monkeypatch, capsys, tmp_path):
    (tmp_path / "tasks.jsonl").write_text('{"equation": "3x + 7 = 16"}\n' * 12)
    call = json.dumps({"name": "divide_terms", "arguments": {"terms": "3"}})
    out = played(monkeypatch, capsys, ['subtract_terms(terms="7")', call, "nonsense(x=1)", "[{", "state_answer(value=3)", "It is 3."], tasks=str(tmp_path / "tasks.jsonl"))
    lines = out.splitlines()
    lines.remove(f"{tmp_path / 'tasks.jsonl'}: equations: 12 rows, 1 different ones, 0 of them held out")
    assert lines.pop(6) == "A turn is a call, name(argument=value), or an answer in plain text. Ctrl-D ends."
    assert [json.loads(line) for line in lines[:6]] == envs.schemas(envs.load("equations"))
    assert lines[6:11] == ["", "System: Solve for x with the tools.", "User: Solve for x: 3x + 7 = 16", "3x = 9   [reward +2]", "x = 3   [reward +2]"]
    assert lines[11].startswith("error: no tool 'nonsense'; tools: add_terms")
    assert lines[12] == "The end.   [reward +0]" and lines[13] == "not solved; reward 4 {'actions': 4.0, 'answer': 0.0}"  # the fourth turn was text
    assert lines[16:18] == ["User: Solve for x: 3x + 7 = 16", "right   [reward +5]"] and lines[18].startswith("solved; reward 5")
    assert lines[-3] == "The end.   [reward +0]" or lines[-1] == ""


def test_a_call_that_cannot_be_read_is_typed_again(monkeypatch, capsys):
    out = played(monkeypatch, capsys, ["<tool_call>{", "state_answer(value=)"], env="equations")
    assert out.count("Write a call as name(argument=value).") == 2 and "error: " in out and "[reward" not in out


def test_nothing_that_is_shown_steers_the_terminal(monkeypatch, capsys, tmp_path):
    (tmp_path / "my.py").write_text("class My:\n    system_prompt = 'a\\x1b[2J'\n    def reset(self):\n        return 'b\\x1b[2J'\n    def get_reward(self):\n        return 1.0\n"
                                    "    def _reply(self, text):\n        return 'c\\x1b[2J'\n    max_turns = 1\n")
    out = played(monkeypatch, capsys, ["hello"], env=f"{tmp_path / 'my.py'}:My")
    assert "\x1b" not in out and out.count(r"\x1b[2J") >= 3 and "solved; reward 1" in out


def test_options_reach_the_class(monkeypatch, capsys, tmp_path):
    (tmp_path / "my.py").write_text("class My:\n    options = {'level': 1}\n    def reset(self, **_):\n        return f'level {self.options[\"level\"]}'\n    def get_reward(self):\n        return 0.0\n")
    assert "User: level 3" in played(monkeypatch, capsys, [], env=f"{tmp_path / 'my.py'}:My", env_options="level=3")


def test_columns_have_the_names_that_are_given_and_rewards_are_refused(tmp_path):
    (tmp_path / "tasks.jsonl").write_text('{"problem": "3x + 7 = 16"}\n' * 12)
    setup = Setup(Config(tasks=str(tmp_path / "tasks.jsonl"), fields="equation=problem"))
    assert setup.tasks("train", 1) == [{"equation": "3x + 7 = 16", "env": "equations"}]
    with pytest.raises(UserError, match="here the environment pays alone"):
        Setup(Config(rewards="exact"))


def test_one_environment_is_played_at_a_time_and_test_tasks_may_have_their_own_file(tmp_path):
    with pytest.raises(UserError, match="--env equations,search: one environment at a time"):
        Setup(Config(env="equations,search"))
    for name, equation in (("train", "3x + 7 = 16"), ("test", "2x = 4")):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"equation": equation}) + "\n")
    setup = Setup(Config(tasks=str(tmp_path / "train.jsonl"), eval_dataset=str(tmp_path / "test.jsonl")))
    assert [task["equation"] for task in setup.tasks("test", 5)] == ["2x = 4"]
