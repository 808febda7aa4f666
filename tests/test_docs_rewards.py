"""What docs/rewards.md shows: the tables of `exact`, the words of --rewards, and the file of functions."""
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from agent import Trajectory

pytest.importorskip("extras.rewards")
from extras.rewards.exact import exact, form, marked  # noqa: E402
from extras.rewards.functions import BUILT_IN, load  # noqa: E402

PAGE = (Path(__file__).parent.parent / "docs" / "rewards.md").read_text()
ANSWERS = re.findall(r"^\| `([^`]*)` \| `([^`]*)` \|$", PAGE, re.M)
EQUAL = re.findall(r"^\| `([^`]*)` \| `([^`]*)` \| (yes|no) \|$", PAGE, re.M)


def episode(text, answer="7", tool_errors=0):
    """Return an agent of one turn, which its environment pays 2.0."""
    t = Trajectory([1, 2], [0, 1], [0.0] * 2, [2.0], reward=2.0, stop_reason="done", group_id="0-0",
                   messages=[{"role": "user", "content": "?"}, {"role": "assistant", "content": text}],
                   info={"task": {"answer": answer}, "env": "e", "success": True, "tool_calls": 1, "unreadable_calls": 0,
                         "tool_errors": tool_errors, "parsed_turns": 1})
    return SimpleNamespace(trajectory=t, session=SimpleNamespace(env=None, pays=True))


def paid(rewards, *arguments, **options):
    agent = episode(*arguments, **options)
    load(SimpleNamespace(rewards=rewards, env="equations", max_turns=None, max_new_tokens=64, max_tokens=256))([agent])
    return agent.trajectory


def test_answers():
    assert len(ANSWERS) == 7 and {text: marked(text).strip() for text, _ in ANSWERS} == dict(ANSWERS)


def test_what_is_equal():
    assert len(EQUAL) == 11
    for said, reference, equal in EQUAL:
        assert (form(said) == form(reference)) == (equal == "yes"), (said, reference)
        assert exact(episode(f"Answer: {said}", reference).trajectory) == float(equal == "yes")


def test_math_verify_compares_values():
    pytest.importorskip("math_verify")
    said, reference, _ = EQUAL[-1]
    assert BUILT_IN["math_verify"](episode(f"\\boxed{{{said}}}", reference).trajectory) == 1.0


def test_the_table_names_what_is_built_in():
    table = PAGE.split("## Built in")[1].split("##")[0]
    assert {*re.findall(r"^\| `(\w+)` \|", table, re.M), "environment"} == set(BUILT_IN)


def test_the_functions_pay_as_the_page_says(tmp_path):
    path = tmp_path / "my_rewards.py"
    path.write_text(re.search(r"```python\n(# my_rewards.py\n.*?)```", PAGE, re.S)[1])
    t = paid(f"{path}:polite=0.2,{path}:brevity", "7, please")
    assert t.reward == pytest.approx(2.0 + 0.2 - 0.009) and t.reward_parts == {"environment": 2.0, "polite": 1.0, "brevity": pytest.approx(-0.009)}
    assert paid(f"{path}:polite,environment=0.5", "7").reward == 1.0 and paid(f"exact=3,{path}:polite,environment=0", "7").reward == 3.0
    said = "7 or seven"
    for errors, reward in ((0, 1.99), (1, 0.0)):
        t = paid(f"{path}:allowed=veto,{path}:brevity", said, tool_errors=errors)
        assert t.reward == pytest.approx(reward), (errors, t.reward)


def test_the_limits_of_the_sandbox():
    sandbox = pytest.importorskip("extras.sandbox.sandbox")
    from extras.sandbox.sandbox import LIMITS, SECONDS
    assert f"{LIMITS['AS'] // 2**20} MiB, {LIMITS['CPU']} CPU seconds, {SECONDS:g} seconds by the clock" in PAGE and sandbox.run
