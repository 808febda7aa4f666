"""bench/comparison.py: its figures equal hand-worked numbers, and what others wrote stays text."""
import re
from pathlib import Path

import pytest

from bench import comparison as view
from bench.comparison import bins, brier, calibration_error, forecast, measure, summary
from core.config import UserError
from bench.comparison import difference
from extras.show.notes import wilson
from test_report import EVIL, episode, folder, turn, write


def says(p, right, yes=True, **info):
    answer = f'{{"probability": {p}, "reason": "word", "recommendation": "{"YES" if yes else "NO"}"}}'
    return episode(answer, right, 1.0 if right else 0.1, **info)


def tables(markdown):
    """First cell -> the other cells, of every table row."""
    lines = [[x.strip() for x in re.split(r"(?<!\\)\|", line)[1:-1]] for line in markdown.split("\n") if line[:2] == "| "]
    return {line[0]: line[1:] for line in lines}


def test_brier_and_calibration_error_by_hand():
    pairs = [(0.9, 1), (0.8, 0), (0.3, 0), (0.1, 1)]
    assert brier(pairs) == pytest.approx((0.01 + 0.64 + 0.09 + 0.81) / 4)
    assert calibration_error(pairs) == pytest.approx((0.1 + 0.8 + 0.3 + 0.9) / 4)
    shared = [(0.72, 1), (0.78, 0), (0.1, 0)]  # one bin: mean said 0.75, came true 0.5, 2 of 3; the other: 0.1, 1 of 3
    assert calibration_error(shared) == pytest.approx(2 / 3 * 0.25 + 1 / 3 * 0.1)
    assert [len(b) for b in bins([(0.0, 0), (0.0999, 0), (0.1, 0), (1.0, 1)])] == [2, 1, 0, 0, 0, 0, 0, 0, 0, 1]


# --------------------------------------------------------------------------------------------------------- forecasts
def test_forecast_reads_the_last_answer_and_what_the_recommendation_says_of_the_outcome():
    assert forecast(says(0.7, True, yes=True)) == (0.7, 1)
    assert forecast(says(0.7, False, yes=True)) == (0.7, 0)
    assert forecast(says(0.2, True, yes=False)) == (0.2, 0)
    assert forecast(says(0.2, False, yes=False)) == (0.2, 1)
    assert forecast(episode('{"probability": 0.3, "recommendation": "MAYBE"}')) is None
    assert forecast(episode('I think {"probability": 0.3, "recommendation": "NO"}.')) == (0.3, 0)


@pytest.mark.parametrize("answer", ["", "no", '{"probability": 1.2, "recommendation": "YES"}', '{"probability": "much"}', '{"probability": null}',
                                    '{"probability": NaN, "recommendation": "NO"}', '{"reason": "x"}', '{"probability": 0.5'])
def test_what_is_no_forecast(answer):
    assert forecast(episode(answer)) is None


def test_an_environment_that_a_data_file_names_is_not_run(tmp_path):
    (tmp_path / "code.py").write_text("open(__file__ + '.ran', 'w')\nclass Environment:\n    pass\n")
    name = write(tmp_path / "e.jsonl", [says(0.5, True, env=f"{tmp_path}/code.py:Environment", task={"meeting": 1})])
    view.write_report([name], tmp_path / "r.md")
    assert not (tmp_path / "code.py.ran").exists()


# --------------------------------------------------------------------------------------------------------- report.md
def test_report_by_hand(tmp_path):
    first = write(tmp_path / "a.jsonl", [says(0.9, True), says(0.8, False), says(0.3, True, yes=False),
                                         says(0.1, False, yes=False, calls=())])
    second = write(tmp_path / "b.jsonl", [says(0.9, True, calls=["slot_fit", "follow_up"], tool_errors=1)] * 3)
    run = folder(tmp_path / "dpo", result={"success_before": 0.5, "success_after": 0.75, "seconds": 12.3,
                                           "peak_memory_mb": 1888.2})
    view.write_report([first, second, run], tmp_path / "report.md")
    text = (tmp_path / "report.md").read_text()
    found = tables(text)
    low, high = wilson(2, 4)
    # rewards 1, 0.1, 1, 0.1; calls 1, 1, 1, 0
    assert found[first] == ["4 of 4", "0.388", "0.525"]  # the last table with it
    assert f"| {first} | - | 4 | - | 0.500 ({low:.3f} to {high:.3f}) of 4 episodes | 0.55 | 0.75 | 0.000 | 1.000 | 0.000 | - | - |" in text
    assert f"| {second} | - | 3 | - | 1.000 (0.439 to 1.000) of 3 episodes | 1 | 2 | 0.500 | 1.000 | 0.000 | - | - |" in text
    low, high = wilson(15, 20)
    assert f"| {run} | grpo | 0 | 0.500 -> 0.750 | 0.750 ({low:.3f} to {high:.3f}) of 20 held-out | - | - | - | - | - | 12.3 | 1,888 |" in text
    d, low, high = difference(10, 20, 15, 20)
    assert found[f"{run}: before -> after"] == ["0.500", "0.750", f"+0.250 ({low:+.3f} to {high:+.3f})", "no"]
    assert found[f"{first} -> {second}"][:2] == ["0.500", "1.000"] and f"{second} -> {run}" in found
    assert found[f"{first} -> {run}"][:2] == ["0.500", "0.750"]
    assert [x.split()[0] for x in found["0"]] == ["0.250", "0.000"] and found["2"][1] == "1.000 " + "█" * 20
    assert found["slot_fit"] == ["0.75", "1"] and found["follow_up"] == ["0", "1"]
    assert found["0.8 to 0.9"] == ["1: 0.80 -> 0.00", "-"] and found["0.9 to 1.0"] == ["1: 0.90 -> 1.00", "3: 0.90 -> 1.00"]
    assert text.index(first) < text.index(second) < text.index(run)
    assert 'slot_fit(day=1) -> fits   +0.0' in text and "Bad: none." in text


def test_a_difference_beyond_chance_is_said_to_be_one(tmp_path):
    names = [folder(tmp_path / str(i), result={"success_after": x}, config="eval_tasks: 1000\n") for i, x in enumerate((0.6, 0.7))]
    view.write_report(names, tmp_path / "report.md")
    assert tables((tmp_path / "report.md").read_text())[" -> ".join(names)][-1] == "yes"


def test_held_out_tasks_that_were_fewer_than_asked_for_give_no_interval(tmp_path):
    run = measure(folder(tmp_path, episodes=[episode(step=0)], result={"success_before": 0.5, "success_after": 1 / 3}))
    assert run.after == (1, 1) and run.before is None and summary(run)["success before -> after"] == "0.500 -> 0.333"


def test_of_a_training_run_the_last_quarter_counts(tmp_path):
    run = measure(folder(tmp_path, episodes=[episode(success=step > 8, step=step) for step in range(13)]))
    assert len(run.episodes) == 4 and run.after == (4, 4)


def test_episodes_of_the_policy_it_started_from_say_nothing_of_a_run(tmp_path):
    name = folder(tmp_path, [{"step": step, "loss": 1.0 / (step + 1)} for step in range(9)], [episode(step=0)])
    run = measure(name)
    assert run.episodes == [] and run.after is None and "the policy it started from" in run.notes[0]


def test_runs_of_different_environments_are_not_compared(tmp_path):
    names = [write(tmp_path / f"{i}.jsonl", [episode(env=env)]) for i, env in enumerate("aab")]
    text = Path(view.write_report(names, tmp_path / "r.md")).read_text()
    assert f"| {names[0]} -> {names[1]} |" in text and len([what for what in tables(text) if " -> " in what]) == 1


def test_examples_are_of_two_tasks_best_and_worst(tmp_path):
    rows = [episode(user=f"task {i // 2}", reward=float(i), success=i > 5) for i in range(12)]
    for row in rows:
        row["group_id"] = row["messages"][0]["content"]
    text = Path(view.write_report([write(tmp_path / "a.jsonl", rows)], tmp_path / "r.md")).read_text()
    assert re.findall(r"reward (\d+)\.00", text) == ["11", "9", "0", "2"]
    assert "episodes of one task are alike" in text


def test_text_of_others_stays_text_in_the_report(tmp_path):
    rows = [episode(EVIL, calls=[EVIL, "slot_fit"], user=EVIL, success=i > 0) for i in range(2)]
    text = Path(view.write_report([write(tmp_path / "a.jsonl", rows)], tmp_path / "r.md")).read_text()
    outside = re.sub(r"^(`{3,})\n.*?\n\1$", "", text, flags=re.M | re.S)
    assert "<script" not in outside and "<img" not in outside and "&lt;script>" in outside and r"\|" in outside
    assert len(re.findall(r"^`{5}$", text, re.M)) == 4  # the fence is longer than what it holds


@pytest.mark.parametrize("broken", [
    {"messages": 3}, {"messages": [{"role": "user"}]}, {"reward": "much"}, {"info": []},
    {"messages": [turn("", [{"name": 3, "arguments": {}}])]}])
def test_what_is_no_episode_is_named_by_line(tmp_path, broken):
    name = write(tmp_path / "t.jsonl", [episode(calls=()), episode(calls=()) | broken])
    with pytest.raises(UserError, match=r"t.jsonl:2: "):
        view.write_report([name], tmp_path / "r.md")


def test_the_command_writes_what_it_says(tmp_path, capsys):
    name = write(tmp_path / "a.jsonl", [episode()])
    view.main([name, "--output", str(tmp_path / "r.md")])
    assert capsys.readouterr().out == f"written: {tmp_path}/r.md\n" and (tmp_path / "r.md").exists()
    with pytest.raises(UserError, match="cannot be written"):
        view.main([name, "--output", str(tmp_path / "none" / "r.md")])
    with pytest.raises(SystemExit):
        view.main([name, "--output", name])
