"""One episode as a line of trajectories.jsonl: what is written is read back, and what no trainer should see is refused."""

import json

import pytest

from agent import Trajectory
from episodes import trajectory_of

ROW = dict(
    token_ids=[1, 2, 3],
    loss_mask=[0, 1, 1],
    logprobs=[0.0, -1.5, -0.25],
    rewards=[1.0],
    reward=1.0,
    reward_parts={"right": 1.0},
    group_id="t/0",
    stop_reason="done",
    messages=[{"role": "user", "content": "é"}],
    info={"task": {"n": 1}},
)


def test_trajectory_round_trip():
    row = json.loads(json.dumps(Trajectory(**ROW).to_json(), allow_nan=False))
    assert row == ROW and trajectory_of(row) == Trajectory(**ROW)


@pytest.mark.parametrize(
    "change, problem",
    [
        ({"logprobs": [0.0, -1.0]}, r"lengths \(3, 3, 2\)"),
        ({"token_ids": []}, "lengths"),
        ({"token_ids": 5}, "not a trajectory"),
        ({"token_ids": [1, 2, -3]}, "integers"),
        ({"token_ids": [1, 2.0, 3]}, "integers"),
        ({"token_ids": "abc"}, "integers"),
        ({"loss_mask": [0, 2, 1]}, "0 or 1"),
        ({"loss_mask": [0, True, 1]}, "0 or 1"),
        ({"loss_mask": [1, 1, 1]}, "precedes"),
        ({"logprobs": [0.0, float("nan"), 0.0]}, "finite"),
        ({"logprobs": [0.0, None, 0.0]}, "finite"),
        ({"reward": float("inf")}, "finite"),
        ({"reward": 10**400}, "finite"),
        ({"rewards": None}, "not a trajectory"),
        ({"reward_parts": {"a": "x"}}, "finite"),
        ({"reward_parts": []}, "not a trajectory"),
    ],
)
def test_trajectory_refusals(change, problem):
    with pytest.raises(ValueError, match=problem) as caught:
        trajectory_of({**ROW, **change})
    assert "\n" not in str(caught.value)


def test_a_column_of_another_program_is_no_part_of_a_trajectory():
    assert trajectory_of({**ROW, "colour": 1}) == trajectory_of(ROW)


def test_trajectory_must_be_an_object():
    for row in (None, [], "x", 3):
        with pytest.raises(ValueError, match="not a trajectory"):
            trajectory_of(row)


def test_the_step_that_a_run_writes_into_its_lines_is_not_the_episodes():
    assert trajectory_of({"step": 3, **ROW}) == Trajectory(**ROW)
