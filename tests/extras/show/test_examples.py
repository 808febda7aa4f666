"""examples.py: one held-out task before and after in 80 columns, a whole episode now and then, and success as blocks."""
import json

import pytest
import torch

from agent import Trajectory
from extras.show.examples import KEPT, chosen, is_evaluation, side_by_side, whole
from extras.show.notes import sparkline, step_line


def episode(number=0, success=False, turns=("x = 3",), group=None, reward=1.0):
    messages = [{"role": "system", "content": "Be brief. " * 40}, {"role": "user", "content": "Solve for x: 3x = 9"}]
    for turn in turns:
        messages.append({"role": "assistant", "content": turn, "tool_calls": [{"name": "divide", "arguments": {"by": "3"}}]})
        messages.append({"role": "tool", "name": "divide", "content": "x = 3", "reward": 2.0})
    return {"group_id": group or f"-1-{number}", "messages": messages, "reward": reward, "stop_reason": "done", "info": {"success": success}}


def test_the_first_task_that_is_solved_only_now_is_shown_and_says_so():
    before = [episode(i, success=i == 1) for i in range(4)]
    after = [episode(i, success=i in (1, 2, 3)) for i in range(4)]
    assert chosen(before, after) == ("held-out task 3, of 4 the first that is solved only now", before[2], after[2])
    assert chosen(after, after) == ("held-out task 1", after[0], after[0])
    assert chosen(after, before) == ("held-out task 1", after[0], before[0])  # what was lost is not singled out
    assert chosen([], after) == ("held-out task 1", None, after[0]) and chosen(before, []) is None


def test_two_episodes_stand_beside_each_other_in_80_columns():
    text = side_by_side("held-out task 3", episode(turns=["a" * 100, "b"], reward=-0.5), episode(success=True, turns=["x = 3 " * 12], reward=2.0))
    lines = text.splitlines()
    assert lines[:3] == ["", "held-out task 3", "User: Solve for x: 3x = 9"] and max(map(len, lines)) <= 80
    columns = [line.split(" | ") for line in lines[3:]]
    assert columns[0] == [f"{'before: not solved, reward -0.5':38}", "after: solved, reward 2"]
    assert "".join(left.strip() for left, *_ in columns).count("a") >= 100 and any("divide(by=" in right for _, *rest in columns for right in rest)
    assert [line for line in lines if line.startswith("[done]")] and lines[-1] == "[done]" + 33 * " " + "|"  # the left one is longer
    alone = side_by_side("held-out task 1", None, episode(turns=["long " * 200 + "\x1b[31m"] * 3)).splitlines()
    assert max(map(len, alone)) <= 80 and len(alone) == 3 + 40 and alone[-1] == "..." and "\x1b" not in "".join(alone)


@pytest.mark.parametrize("advantages, words", [(None, "[done; success True; reward 1.00]"), ([0, 0.5, 0.5, 0, 0.5], "advantage +0.5"),
                                               ([0, 0.5, 0.5, 0, -1.0], "advantage +0.5, -1")])
def test_an_episode_is_printed_whole_with_its_advantages(advantages, words):
    t = Trajectory([1] * 5, [0, 1, 1, 0, 1], [0.0] * 5, [0.0, 1.0], 1.0, messages=episode()["messages"], stop_reason="done", info={"success": True})
    lines = whole(t, advantages and torch.tensor(advantages)).splitlines()
    assert lines[-1] == words and "divide(by=\"3\") -> x = 3   +2.0" in lines and max(map(len, lines)) <= 80


def test_only_evaluations_are_kept():
    assert is_evaluation([Trajectory(group_id="-1-0")]) and not is_evaluation([Trajectory(group_id="3-0")]) and not is_evaluation([]) and KEPT == 8


def test_success_is_a_line_of_blocks():
    assert sparkline([0, 1 / 7, 2 / 7, 3 / 7, 1.0]) == "▁▂▃▄█" and sparkline([]) == "" and sparkline([0.5]) == "▅"
    assert sparkline([0.0] * 50 + [1.0] * 50) == "▁▁▁▁████"  # means of stretches


@pytest.mark.parametrize("steps, line", [(36, {"success": 0.921875, "reward": 8.2968, "entropy": 0.0395, "kl": 0.0348}),
                                         (100000, {"success": 0.921875, "reward": -1.2345e-05, "entropy": 0.039512, "kl": 1.2345e-05})])
def test_the_line_of_a_step_does_not_wrap(steps, line):
    shown = step_line(steps, steps, line, 26.44, 5000.0)
    assert len(shown) <= 80 and shown.startswith(f"step {steps}/{steps}") and "success 0.92 " in shown and shown.endswith("26.4 s, 83 min left")


def test_the_number_of_a_distillation_stays_where_the_line_is_short_of_room():
    line = {"success": 0.25, "reward": 4.5, "entropy": 0.0536, "teacher_kl": 0.3934}
    assert step_line(1, 6, line, 2.1, 10.4) == "step 1/6 success 0.25 reward 4.5 teacher_kl 0.39 2.1 s, 10.4 s left"


def test_the_page_has_the_task_that_was_chosen(tmp_path):
    from test_report import byte_level, folder, run_of
    from test_report import episode as recorded
    name = folder(tmp_path, episodes=[recorded(step=0)])
    byte_level(tmp_path)
    lines = [{"step": 0, "when": "before", "episode": recorded() | {"group_id": f"-1-{i}"}} for i in range(3)]
    lines.append({"step": 9, "when": "after", "episode": recorded(answer="x") | {"group_id": "-1-1"}})
    (tmp_path / "tokens.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [(item["step"], item["when"], item["task_id"]) for item in run_of(name)["played"]] == [(0, "before", "-1-1"), (9, "after", "-1-1")]
