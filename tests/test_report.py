"""report.py: its statistics equal published and hand-worked numbers, the page shows what was logged and runs nothing."""
import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from experiment import report as view
from experiment.comparison import forecast
from experiment.curves import Axis, chart
from experiment.errors import UserError
from experiment.page import MAX_EPISODES, token_texts
from experiment.records import Record, ceiling, measure, summary
from experiment.statistics import bins, brier, calibration_error, difference, wilson

ROOT = Path(__file__).parent.parent
EVIL = "<script>alert(1)</script> | <img src=x onerror=alert(2)>\" onmouseover='x' ```` & \u202e</pre>"


def turn(content="", calls=(), **more):
    return {"role": "assistant", "content": content, **({"tool_calls": list(calls)} if calls else {}), **more}


def call(name="slot_fit", **arguments):
    return {"name": name, "arguments": arguments}


def episode(answer="done", success=True, reward=1.0, calls=("slot_fit",), user="Worth it?", step=None, **info):
    """One line of trajectories.jsonl: two tokens of prompt, then each turn two sampled tokens and one of the reply."""
    messages, n = [{"role": "user", "content": user}], len(calls) + 1
    for name in calls:
        messages += [turn("", [call(name, day=1)]), {"role": "tool", "name": name, "content": "fits", "reward": 0.0}]
    ids, mask = list(range(2 + 3 * n - 1)), [0, 0] + [1, 1, 0] * (n - 1) + [1, 1]
    return {**({"step": step} if step is not None else {}),
            "token_ids": ids, "loss_mask": mask, "logprobs": [-0.5 * m for m in mask],
            "rewards": [0.0] * (n - 1) + [reward], "reward": reward, "reward_parts": {}, "group_id": f"g{user}{reward}",
            "stop_reason": "done", "messages": [*messages, turn(answer)],
            "info": {"env": "nowhere", "task": {}, "success": success, "tool_calls": len(calls), "tool_errors": 0, **info}}


def says(p, right, yes=True, **info):
    answer = f'{{"probability": {p}, "reason": "word", "recommendation": "{"YES" if yes else "NO"}"}}'
    return episode(answer, right, 1.0 if right else 0.1, **info)


def write(path, rows, end=""):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + end)
    return str(path)


def folder(path, metrics=(), episodes=(), result=None, config="eval_tasks: 20\neval_group_size: 1\nenv: nowhere\n"):
    write(path / "metrics.jsonl", metrics), write(path / "timing.jsonl", [])
    write(path / "trajectories.jsonl", episodes)
    (path / "config.yaml").write_text(f"# grpo run; repeat it\n{config}")
    (path / "result.json").write_text(json.dumps(result or {}))
    return str(path)


def tables(markdown):
    """First cell -> the other cells, of every table row."""
    lines = [[x.strip() for x in re.split(r"(?<!\\)\|", line)[1:-1]] for line in markdown.split("\n") if line[:2] == "| "]
    return {line[0]: line[1:] for line in lines}


class Page(HTMLParser):
    """The tags, attributes and text that a browser would see."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.attributes, self.text, self.tokens, self.open = [], [], "", [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in ("meta", "br"):
            self.open.append(tag)
        if tag == "i" and dict(attributes).get("title"):
            self.tokens.append([dict(attributes), ""])
        if tag == "b" and self.tokens and self.open[-2:] == ["pre", "b"]:
            self.tokens.append([{"title": "reward"}, ""])

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open[-1:]:
            self.text += data
        if self.open[-1:] in (["i"], ["b"]) and self.tokens:
            self.tokens[-1][1] += data


def page(path, **options):
    return Page(Path(view.write_html(path, **options)).read_text("utf-8"))


# -------------------------------------------------------------------------------------------------------- statistics
@pytest.mark.parametrize("k, n, low, high", [  # Newcombe 1998, Statistics in Medicine 17:857-872, table I, method 3
    (81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)])
def test_wilson_equals_the_published_table(k, n, low, high):
    assert wilson(k, n) == pytest.approx((low, high), abs=5e-5)
    assert wilson(n - k, n) == pytest.approx((1 - high, 1 - low), abs=5e-5)


def test_wilson_by_hand():
    # k = n: p = 1, middle 1 + z2/2n, half z sqrt(z2/4n2) = z2/2n: from 1 / (1 + z2/n) to 1; z2 = 3.841460, n = 4
    assert wilson(4, 4) == pytest.approx((4 / 7.841460, 1.0), abs=1e-6)
    assert wilson(0, 0) == (0.0, 1.0)


@pytest.mark.parametrize("first, second, low, high", [  # Newcombe 1998, 17:873-890, table II, method 10
    ((48, 80), (56, 70), 0.0524, 0.3339), ((3, 10), (9, 10), 0.1705, 0.8090), ((0, 10), (10, 10), 0.6075, 1.0)])
def test_difference_equals_the_published_table(first, second, low, high):
    assert difference(*first, *second)[1:] == pytest.approx((low, high), abs=5e-5)
    d, *swapped = difference(*second, *first)
    assert d == pytest.approx(first[0] / first[1] - second[0] / second[1])
    assert swapped == pytest.approx([-high, -low], abs=5e-5)


def test_brier_and_calibration_error_by_hand():
    pairs = [(0.9, 1), (0.8, 0), (0.3, 0), (0.1, 1)]
    assert brier(pairs) == pytest.approx((0.01 + 0.64 + 0.09 + 0.81) / 4)
    assert calibration_error(pairs) == pytest.approx((0.1 + 0.8 + 0.3 + 0.9) / 4)
    shared = [(0.72, 1), (0.78, 0), (0.1, 0)]  # one bin: mean said 0.75, came true 0.5, 2 of 3; the other: 0.1, 1 of 3
    assert calibration_error(shared) == pytest.approx(2 / 3 * 0.25 + 1 / 3 * 0.1)
    assert [len(b) for b in bins([(0.0, 0), (0.0999, 0), (0.1, 0), (1.0, 1)])] == [2, 1, 0, 0, 0, 0, 0, 0, 0, 1]


# --------------------------------------------------------------------------------------------------------- forecasts
def test_forecast_reads_the_last_answer_and_the_outcome_where_it_is():
    assert forecast(says(0.7, True, yes=True)) == (0.7, 1, None)
    assert forecast(says(0.7, False, yes=True)) == (0.7, 0, None)
    assert forecast(says(0.2, True, yes=False)) == (0.2, 0, None)
    assert forecast(says(0.2, False, yes=False)) == (0.2, 1, None)
    assert forecast(says(0.2, False, yes=True, outcome=1, probability=0.6)) == (0.2, 1, 0.6)
    assert forecast(episode('{"probability": 0.3, "recommendation": "MAYBE"}')) is None  # says nothing of the outcome
    assert forecast(episode('I think {"probability": 0.3, "recommendation": "NO"}.', outcome=False))[:2] == (0.3, 0)


@pytest.mark.parametrize("answer", ["", "no", '{"probability": 1.2, "recommendation": "YES"}', '{"probability": "much"}', '{"probability": null}',
                                    '{"probability": NaN, "recommendation": "NO"}', '{"reason": "x"}', '{"probability": 0.5'])
def test_what_is_no_forecast(answer):
    assert forecast(episode(answer)) is None


def test_ceiling_and_truth_are_those_that_the_environment_wrote_into_the_episodes(tmp_path):
    rows = [says(0.5, True, ceiling=0.8), says(0.5, True, ceiling=0.7)]
    assert summary(measure(write(tmp_path / "e.jsonl", rows)))["accuracy (95 %)"].endswith("; ceiling 0.750")
    assert ceiling(measure(write(tmp_path / "e.jsonl", [says(0.5, True)]))) is None
    rows = [says(0.5, True, env="meetings", ceiling=0.81, outcome=m > 5, probability=m / 10) for m in (4, 7)]
    run = measure(write(tmp_path / "t.jsonl", rows))
    assert summary(run)["accuracy (95 %)"] == "1.000 (0.342 to 1.000) of 2 episodes; ceiling 0.810"  # 2 / (2 + z2)
    assert ceiling(run) == 0.81 and [forecast(e) for e in run.episodes] == [(0.5, 0, 0.4), (0.5, 1, 0.7)]
    text = Path(view.write_report([run.name], tmp_path / "r.md")).read_text()
    assert tables(text)[run.name] == ["2 of 2", "0.250", "0.000", "0.125", "1.000", "0.810", "1.235"]  # (0.16 + 0.09) / 2


def test_an_environment_that_a_data_file_names_is_not_run(tmp_path):
    (tmp_path / "code.py").write_text("open(__file__ + '.ran', 'w')\nclass Environment:\n    pass\n")
    name = write(tmp_path / "e.jsonl", [says(0.5, True, env=f"{tmp_path}/code.py:Environment", task={"meeting": 1})])
    view.write_report([name], tmp_path / "r.md"), view.write_html(name)
    assert not (tmp_path / "code.py.ran").exists()


# --------------------------------------------------------------------------------------------------------- report.md
def test_report_by_hand(tmp_path):
    first = write(tmp_path / "a.jsonl", [says(0.9, True, ceiling=0.8), says(0.8, False), says(0.3, True, yes=False),
                                         says(0.1, False, yes=False, ceiling=0.8, calls=())])
    second = write(tmp_path / "b.jsonl", [says(0.9, True, calls=["slot_fit", "follow_up"], tool_errors=1)] * 3)
    run = folder(tmp_path / "dpo", result={"success_before": 0.5, "success_after": 0.75, "seconds": 12.3,
                                           "peak_memory_mb": 1888.2})
    view.write_report([first, second, run], tmp_path / "report.md")
    text = (tmp_path / "report.md").read_text()
    found = tables(text)
    low, high = wilson(2, 4)
    # rewards 1, 0.1, 1, 0.1; calls 1, 1, 1, 0
    assert found[first] == ["4 of 4", "0.388", "0.525", "-", "0.500", "0.800", "0.625"]  # the last table with it
    assert f"| {first} | - | 4 | - | 0.500 ({low:.3f} to {high:.3f}) of 4 episodes; ceiling 0.800 | 0.55 | 0.75 | 0.000 | 1.000 | 0.000 | - | - |" in text
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
    assert 'Action: slot_fit -> Reward: 0.0 -> "fits"  (day=1)' in text and "Bad: none." in text


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
    assert run.episodes == [] and run.after is None and "the policy it started from" in page(name).text
    assert len(page(name).tokens) == 7 + 2


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


# ------------------------------------------------------------------------------------------------------- report.html
def byte_level(tmp_path, *tokens):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.train_from_iterator(["solve for x"], trainers.BpeTrainer(
        special_tokens=["<|im_end|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    tokenizer.add_tokens(list(tokens))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tokenizer


def test_an_episode_with_a_script_in_it_does_not_run(tmp_path):
    rows = [episode(EVIL, calls=[EVIL], user=EVIL, step=0, success=i > 0) for i in range(3)]
    tokenizer = byte_level(tmp_path, EVIL)
    rows[0] |= {"token_ids": [tokenizer.token_to_id(EVIL)] * 3, "loss_mask": [0, 1, 1], "logprobs": [0.0, 0.0, -9.0]}
    rows[1] |= {"token_ids": [], "loss_mask": [], "logprobs": []}  # the transcript is shown
    rows[0]["stop_reason"], rows[0]["reward_parts"] = EVIL, {EVIL: 1.0}
    name = folder(tmp_path / "<script>x", [{"step": 0, EVIL: 1.0}, {"step": 1, EVIL: 2.0}, {"step": 2, "<script>": 1}],
                  rows, {EVIL: EVIL, "seed": 0}, config=f"env: {json.dumps(EVIL)}\n")
    found = page(name, tokenizer=str(tmp_path))
    assert [t[1] for t in found.tokens].count(EVIL) == 3
    assert set(found.tags) <= set("html head meta title style body h1 h2 dl div dt dd p figure figcaption b i span svg line "
                                  "text polyline circle rect details summary br pre".split())
    assert not [key for key, _ in found.attributes if key.startswith("on") or key in ("src", "href")]
    assert found.text.count(EVIL.replace("</pre>", "")) >= 4 and "<script>x" in found.text and found.open == []
    raw = (Path(name) / "report.html").read_text()
    assert "default-src 'none'" in raw and "http://" not in raw and "https://" not in raw


def test_tokens_join_to_the_text_whatever_their_bytes(tmp_path):
    tokenizer = byte_level(tmp_path)
    text = "solve  for\nx = ½ 🙂 日<|im_end|>"
    ids = tokenizer.encode(text).ids
    pieces = token_texts(tokenizer, ids)
    assert len(pieces) == len(ids) and "".join(pieces).replace("·", "") == text
    assert pieces.count("·") == 1 + 3 + 2  # bytes that only begin a character
    assert token_texts(tokenizer, [10**6]) == ["·"] and token_texts(None, [7]) == ["7 "]


def test_tokens_are_coloured_by_mask_and_probability_and_each_turn_shows_its_reward(tmp_path):
    tokenizer = byte_level(tmp_path)
    ids = tokenizer.encode(EVIL[:9]).ids
    row = episode(calls=(), step=3)
    mask = [0, 1, 1, 0, 1, 1, 1, 1, 0]
    probabilities = [1, 0.95, 0.6, 1, 0.3, 0.05, 0.005, 1.0, 1]
    row |= {"token_ids": ids, "loss_mask": mask, "logprobs": [math.log(p) * m for p, m in zip(probabilities, mask)],
            "rewards": [2.0, -0.5], "reward": 1.5}
    name = folder(tmp_path / "run", episodes=[row])
    (tmp_path / "tokenizer.json").rename(tmp_path / "run" / "tokenizer.json")
    tokens = page(name).tokens
    assert [t[1] for t in tokens if t[0]["title"] != "reward"] == list("<script>a")
    assert [t[0].get("class") or t[1] for t in tokens] == ["<", "s0", "s1", "+2", "r", "s2", "s3", "s4", "s0", "-0.5", "a"]
    assert tokens[0][0]["title"] == f"id {ids[0]}, not sampled"
    assert tokens[2][0]["title"] == f"id {ids[2]}, log-prob -0.511, p 0.6"


def test_without_a_tokenizer_ids_are_shown_and_it_is_said(tmp_path, capsys):
    found = page(write(tmp_path / "t.jsonl", [episode(calls=())]))
    assert [t[1] for t in found.tokens] == ["0 ", "1 ", "2 ", "3 ", "+1"] and "--tokenizer" in found.text
    assert capsys.readouterr().err.count("\n") == 1 and (tmp_path / "t.html").exists()
    byte_level(tmp_path)
    assert "--tokenizer" not in page(str(tmp_path / "t.jsonl"), tokenizer=str(tmp_path)).text
    with pytest.raises(UserError, match="no tokenizer.json there"):
        view.write_html(str(tmp_path / "t.jsonl"), tokenizer=str(tmp_path / "none"))


def test_a_curve_shows_the_values_logged():
    figure = chart("entropy", (0, 1, 2), (0.0, 1.0, 0.5))
    (raw,) = re.findall(r'points="(.*?)"', figure)  # so few are not smoothed
    assert raw == "50.0,122.0 176.0,10.0 302.0,66.0"  # left to right 50..302, bottom to top 122..10
    raw, smooth = re.findall(r'points="(.*?)"', chart("x", range(9), [float(y % 2) for y in range(9)]))
    assert {float(p.split(",")[1]) for p in smooth.split()[2:-2]} == {77.2, 54.8}  # means of five: 0.4 and 0.6
    assert "nats per token" in figure and "<b>0.5</b></figcaption>" in figure and ">step</text>" in figure
    assert "step 1: 1</title>" in figure


@pytest.mark.parametrize("low, high, labels", [
    (0, 1, "0 0.2 0.4 0.6 0.8 1.0"), (0, 9999, "0 2,000 4,000 6,000 8,000"), (-0.31, 0.52, "-0.2 0 0.2 0.4"),
    (1234.1, 1234.9, "1,234.2 1,234.4 1,234.6 1,234.8"), (2e-7, 2.5e-7, "2.0e-07 2.1e-07 2.2e-07 2.3e-07 2.4e-07 2.5e-07")])
def test_ticks_are_round_and_differ(low, high, labels):
    assert [label for _, label in Axis(low, high, 0, 1).ticks()] == labels.split()


def test_ten_thousand_steps_become_few_points_and_no_spike_is_lost(tmp_path):
    rows = [{"step": t, "success": 0.5 + 0.001 * (t % 7), "grad_norm": 99.0 if t == 4321 else None if t % 2 else 1.0,
             "clip_low": 0.0, "eval/success": t / 1e4 if t % 1000 == 0 else None} for t in range(10_000)]
    name = folder(tmp_path, rows)
    raw = Path(view.write_html(name)).read_text()
    assert len(raw) < 80_000 and "Unchanged throughout: clip_low 0." in raw
    lines = re.findall(r'class=raw points="(.*?)"', raw)
    assert all(len(line.split()) <= 300 for line in lines) and len(lines) == 3
    heights = [float(point.split(",")[1]) for point in lines[1].split()]
    assert heights.count(10.0) == 1 and heights.count(122.0) == len(heights) - 1


@pytest.mark.parametrize("rows", [[], [{"step": 0, "loss": 1.0}], [{"step": 0, "loss": None}, {"step": 1, "loss": "x"}],
                                  [{"loss": 1.0}, {"loss": 2.0}], [{"step": 3, "loss": 1}, {"step": 3, "loss": 2}],
                                  [{"step": 0, "ratio": 1.0}, {"step": 1, "ratio": 1.0}],
                                  [{"step": 0, "ratio": 1.0}, {"step": 1, "ratio": 1.0000001}],
                                  [{"step": 0, "loss": -1e-300}, {"step": 1, "loss": 1e300}]])
def test_odd_metrics_make_a_page(tmp_path, rows):
    assert page(folder(tmp_path, rows)).open == []


def test_episodes_shown_are_spread_over_the_run_worst_to_best(tmp_path):
    name = folder(tmp_path, episodes=[episode(reward=float(i), step=step) for step in range(50) for i in range(16)])
    shown = re.findall(r"step (\d+) · reward (\d+)", page(name).text)
    steps = list(dict.fromkeys(int(step) for step, _ in shown))
    assert len(shown) == MAX_EPISODES and steps == [49, 42, 35, 28, 21, 14, 7, 0]
    assert [int(r) for _, r in shown[:3]] == [15, 7, 0]
    name = write(tmp_path / "few.jsonl", [episode(reward=float(i)) for i in range(5)])
    assert re.findall(r"reward (\d+)", page(name).text) == ["4", "3", "2", "1", "0"]  # fewer than fit: each once


# ------------------------------------------------------------------------------------------------ files and the command
def test_a_line_cut_by_a_kill_is_left_out_and_a_broken_one_is_named(tmp_path, capsys):
    name = folder(tmp_path, [{"step": 0, "loss": 1.0}, {"step": 1, "loss": 2.0}])
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "lo')
    assert "the last line is cut and left out" in page(name).text
    assert capsys.readouterr().err == f"note: {tmp_path}/metrics.jsonl: the last line is cut and left out\n"
    write(tmp_path / "metrics.jsonl", [{"step": 0}], end='{"step": 1,\n{"step": 2}\n')
    with pytest.raises(UserError, match=r"metrics.jsonl:2: not JSON"):
        view.write_html(name)
    write(tmp_path / "metrics.jsonl", [[1, 2]])
    with pytest.raises(UserError, match=r"metrics.jsonl:1: not a JSON object"):
        view.write_html(name)


@pytest.mark.parametrize("broken", [
    {"messages": 3}, {"messages": [{"role": "user"}]}, {"reward": "much"}, {"reward": None}, {"logprobs": [0.0]}, {"info": []},
    {"token_ids": ["<script>"] * 4}, {"token_ids": [-1] * 4}, {"rewards": ["x"]}, {"loss_mask": None},
    {"messages": [turn("", [{"name": 3, "arguments": {}}])]}, {"reward_parts": {"a": "b"}}])
def test_what_is_no_episode_is_named_by_line(tmp_path, broken):
    name = write(tmp_path / "t.jsonl", [episode(calls=()), episode(calls=()) | broken])
    for make in (view.write_html, lambda name: view.write_report([name], tmp_path / "r.md")):
        with pytest.raises(UserError, match=r"t.jsonl:2: not an episode"):
            make(name)


def test_missing_files_are_told_in_one_line(tmp_path, capsys):
    write(tmp_path / "run" / "metrics.jsonl", [{"step": 0, "loss": 1.0}, {"step": 1, "loss": 2.0}])
    assert "no config.yaml, timing.jsonl, trajectories.jsonl, result.json" in page(tmp_path / "run").text
    assert capsys.readouterr().err.count("\n") == 1
    page(tmp_path / "run", quiet=True)
    assert capsys.readouterr().err == ""
    (tmp_path / "empty").mkdir()
    for name, words in (("rum", "no such file; nearest: .*run"), ("empty", "give an output folder")):
        with pytest.raises(UserError, match=words):
            Record(str(tmp_path / name))


def command(*words, cwd=ROOT):
    return subprocess.run([sys.executable, "-m", "experiment.report", *map(str, words)], capture_output=True, text=True, cwd=cwd)


@pytest.mark.parametrize("words, said", [
    ((), "arguments are required: command, RUN; --help explains"), (("reprot", "x"), "invalid choice: 'reprot' (choose from 'html', 'report')"),
    (("report",), "arguments are required: RUN"), (("html", "a", "b"), "html: give one run; `report` compares several"),
    (("html", "x", "--outptu", "y"), "unrecognized arguments: --outptu y"),
    (("report", "x", "--tokenizer", "y"), "--tokenizer goes with html"), (("html", "x", "--output"), "--output: expected one argument"),
    (("report", "x", "--output", "x.jsonl"), "give a name that ends in .md"), (("html", "/none/x"), "/none/x: no such file"),
    (("html", "README.md"), "give an output folder"), (("report", "tests", "--output=r.md"), "give an output folder")])
def test_what_is_wrong_with_a_command_is_told_in_one_line(words, said):
    done = command(*words)
    assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1 and not done.stdout
    assert done.stderr.startswith("experiment.report: ") and "Traceback" not in done.stderr


def test_the_command_writes_what_it_says_and_never_waits_for_torch(tmp_path):
    name = folder(tmp_path / "run", [{"step": 0, "loss": 1.0}, {"step": 1, "loss": 2.0}], [episode(step=0)])
    assert "python -m experiment.report report RUN..." in command("--help").stdout
    assert command("html", name).stdout == f"written: {name}/report.html\n"
    assert command("report", name, "--output", tmp_path / "r.md").stdout == f"written: {tmp_path}/r.md\n" and (tmp_path / "r.md").exists()
    assert command("report", name, "--output", tmp_path / "none" / "r.md").returncode == 2
    code = f"import sys; from experiment import report as view; view.write_html({name!r}); print({{'torch', 'transformers', 'numpy'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "set()\n"
