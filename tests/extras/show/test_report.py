"""report.py: its statistics equal published and hand-worked numbers, the page shows what was logged and runs nothing."""
import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from extras.show import report as view
from extras.show.curves import chart, number
from core.config import UserError
from envs.transcripts import beginning
from bench.comparison import difference
from extras.show.report import MAX_EPISODES, token_texts, wilson

ROOT = Path(__file__).resolve().parents[3]
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
    (tmp_path / "tokenizer.json").rename(Path(name) / "tokenizer.json")
    found = page(name)
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
    assert token_texts(tokenizer, [10**6]) == ["·"]


def test_tokens_are_coloured_by_mask_and_probability_and_each_turn_shows_its_reward(tmp_path):
    tokenizer = byte_level(tmp_path)
    ids = tokenizer.encode(EVIL[:8] + "\n").ids
    row = episode(calls=(), step=3)
    mask = [0, 1, 1, 0, 1, 1, 1, 1, 0]
    probabilities = [1, 0.95, 0.6, 1, 0.3, 0.05, 0.005, 1.0, 1]
    row |= {"token_ids": ids, "loss_mask": mask, "logprobs": [math.log(p) * m for p, m in zip(probabilities, mask)],
            "rewards": [2.0, -0.5], "reward": 1.5}
    name = folder(tmp_path / "run", episodes=[row])
    (tmp_path / "tokenizer.json").rename(tmp_path / "run" / "tokenizer.json")
    tokens = page(name).tokens
    assert [t[1] for t in tokens if t[0]["title"] != "reward"] == [*"<script>", "↵\n"]
    assert [t[0].get("class") or t[1] for t in tokens] == ["<", "s0", "s1", "+2", "r", "s2", "s3", "s4", "s0", "-0.5", "↵\n"]
    assert tokens[0][0]["title"] == f"id {ids[0]}, not sampled"
    assert tokens[2][0]["title"] == f"id {ids[2]}, p 0.6"


def test_without_a_tokenizer_the_text_is_shown(tmp_path):
    found = page(write(tmp_path / "t.jsonl", [episode(user=EVIL)]))
    assert not found.tokens and 'slot_fit(day=1) -> fits   +0.0' in found.text
    assert (tmp_path / "t.html").exists() and "<script" not in (tmp_path / "t.html").read_text()


def test_successes_stand_with_their_intervals(tmp_path):
    result = {"success_before": 0.5, "success_after": 0.75, "held_out_tasks": 20, "seconds": 12.3, "peak_memory_mb": 1888.2, "pairs": None,
              "before": {"success": 0.5, "reward": -0.25, "turns": 3.0}, "after": {}}
    text = page(folder(tmp_path, result=result)).text
    low, high = wilson(15, 20)
    assert f"success_after0.750 ({low:.3f} to {high:.3f})" in text and "seconds12.3" in text and "peak_memory_mb1,888" in text
    assert "beforesuccess 0.500, reward -0.250" in text
    assert "pairs" not in text and "{" not in text and "turns" not in text
    assert "success_after0.75" in page(folder(tmp_path, result={"success_after": 0.75})).text
    for share in ("much", 7):
        name = folder(tmp_path, result={"success_after": share, "held_out_tasks": 20})
        with pytest.raises(UserError, match="result.json: cannot be read|result.json: math domain error"):
            view.write_html(name)


@pytest.mark.parametrize("value, shown", [(1888.2, "1,888"), (-1888.2, "-1,888"), (0.01684, "0.0168"), (999.4, "999"), (999.7, "1,000"), (1e15, "1e+15"), (None, "-"), ("x", "x")])
def test_numbers_are_shown_as_a_reader_wants_them(value, shown):
    assert number(value) == shown


def test_the_line_of_an_episode_says_what_came_of_it(tmp_path):
    first = episode(calls=(), user="What is x?", step=7) | {"reward": 1.5, "reward_parts": {"answer": 2.0, "length": -0.5}, "stop_reason": "max_turns"}
    first["messages"] = [{"role": "system", "content": "Be brief."}, *first["messages"], {"role": "user", "content": "Go on."}]
    text = page(write(tmp_path / "t.jsonl", [episode(success=False, user="\ud800"), first])).text  # no UTF-8 has it
    assert "✓ success step 7 · reward 1.5 · answer 2 · length -0.5 · 0 calls · max_turns · 4 tokensWhat is x?" in text
    assert "✗ no success reward 1 · 1 calls · done · 7 tokens?" in text


def test_a_question_without_spaces_is_shown_up_to_its_width():
    """textwrap.shorten left nothing of it but "[...]"."""
    assert beginning("one two three", 13) == "one two three" and beginning("one two three four five", 20) == "one two three [...]"
    assert beginning("小明有" * 100, 20) == "小明有" * 4 + "小明 [...]"
    assert beginning("2 " + "小" * 100, 20) == "2 " + "小" * 12 + " [...]"


def test_the_tokenizer_is_that_of_the_newest_checkpoint(tmp_path):
    name, newest = Path(folder(tmp_path / "run", episodes=[episode(calls=())])), tmp_path / "run" / "checkpoints" / "step_000002"
    newest.mkdir(parents=True)
    (newest / "state.json").write_text("{}")
    byte_level(newest)
    assert len(page(name).tokens) == 5  # four tokens and a reward


def test_a_curve_shows_the_values_logged():
    figure = chart("entropy", [(0, 0.0), (1, 1.0), (2, 0.5)])
    raw, means = re.findall(r'points="(.*?)"', figure)
    assert raw == means == "10.0,120.0 160.0,20.0 310.0,70.0"  # left to right 10..310, bottom to top 120..20
    assert "y=12>1</text><text x=10 y=135>0</text>" in figure and "nats per token" in figure and "<b>0.5</b></figcaption>" in figure and ">steps 0 to 2</text>" in figure
    raw, means = re.findall(r'points="(.*?)"', chart("x", [(step, step % 2) for step in range(80)]))
    assert {float(p.split(",")[1]) for p in raw.split()} == {20.0, 120.0} and len(raw.split()) == 80
    assert {float(p.split(",")[1]) for p in means.split()} == {70.0} and len(means.split()) == 20
    assert means.startswith(f"{10 + 300 * 1.5 / 79:.1f},")  # in the middle of its four steps
    assert len(re.findall(r'points="(.*?)"', chart("x", [(step, step % 2) for step in range(50)]))[1].split()) == 17  # of three steps each


def test_no_spike_of_a_long_run_is_lost(tmp_path):
    rows = [{"step": t, "success": 0.5 + 0.001 * (t % 7), "grad_norm": 99.0 if t == 4321 else None if t % 2 else 1.0,
             "clip_low": 0.0, "eval/success": t / 1e4 if t % 1000 == 0 else None} for t in range(10_000)]
    name = folder(tmp_path, rows)
    write(tmp_path / "timing.jsonl", [{"step": 0, "seconds": 1.0}, {"step": 1, "seconds": 2.0}])
    raw = Path(view.write_html(name)).read_text()
    assert "<b>seconds</b>" in raw and "Unchanged throughout: clip_low 0." in raw
    lines = re.findall(r'class=raw points="(.*?)"', raw)
    assert [len(line.split()) for line in lines] == [10_000, 5001, 10, 2]
    heights = [float(point.split(",")[1]) for point in lines[1].split()]
    assert heights.count(20.0) == 1 and heights.count(120.0) == len(heights) - 1


@pytest.mark.parametrize("rows", [[], [{"step": 0, "loss": 1.0}], [{"step": 0, "loss": None}, {"step": 1, "loss": "x"}],
                                  [{"loss": 1.0}, {"loss": 2.0}], [{"step": 3, "loss": 1}, {"step": 3, "loss": 2}],
                                  [{"step": 0, "ratio": 1.0}, {"step": 1, "ratio": 1.0}],
                                  [{"step": 0, "ratio": 1.0}, {"step": 1, "ratio": 1.0000001}],
                                  [{"step": 0, "loss": -1e-300}, {"step": 1, "loss": 1e300}]])
def test_odd_metrics_make_a_page(tmp_path, rows):
    assert page(folder(tmp_path, rows)).open == []


def test_episodes_shown_are_spread_over_the_run_and_the_last_comes_first(tmp_path):
    name = folder(tmp_path, episodes=[episode(reward=float(i), step=step) for step in range(50) for i in range(16)])
    shown = re.findall(r"step (\d+) · reward (\d+)", page(name).text)
    assert len(shown) == MAX_EPISODES and shown[0] == ("49", "15")
    steps = [int(step) for step, _ in shown]
    assert steps == sorted(set(steps), reverse=True) and steps[-1] == 2
    name = write(tmp_path / "few.jsonl", [episode(reward=float(i)) for i in range(5)])
    assert re.findall(r"reward (\d+) ·", page(name).text) == ["4", "3", "2", "1", "0"]  # fewer than fit: each once


# ------------------------------------------------------------------------------------------------ files and the command
def test_a_line_cut_by_a_kill_is_left_out_and_a_broken_one_is_named(tmp_path):
    name = folder(tmp_path, [{"step": 0, "loss": 1.0}, {"step": 1, "loss": 2.0}])
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "lo')
    assert ">steps 0 to 1</text>" in (page(name) and Path(name, "report.html").read_text())
    write(tmp_path / "metrics.jsonl", [{"step": 0}], end='{"step": 1,\n{"step": 2}\n')
    with pytest.raises(UserError, match=r"metrics.jsonl:2: not JSON"):
        view.write_html(name)
    write(tmp_path / "metrics.jsonl", [[1, 2]])
    with pytest.raises(UserError, match=r"metrics.jsonl:1: not a JSON object"):
        view.write_html(name)


@pytest.mark.parametrize("broken", [
    {"messages": 3}, {"messages": [{"role": "user"}]}, {"reward": "much"}, {"reward": None}, {"logprobs": [0.0]}, {"info": []},
    {"token_ids": ["<script>"] * 4}, {"token_ids": [-1] * 4}, {"rewards": ["x"] * 4}, {"loss_mask": None}])
def test_what_is_no_episode_is_named_by_line(tmp_path, broken):
    name = folder(tmp_path, episodes=[episode(calls=()), episode(calls=()) | broken])
    byte_level(tmp_path)
    with pytest.raises(UserError, match=r"trajectories.jsonl:2: "):
        view.write_html(name)


def test_what_is_there_is_shown_and_a_folder_of_no_run_is_refused(tmp_path):
    write(tmp_path / "run" / "metrics.jsonl", [{"step": 0, "loss": 1.0}, {"step": 1, "loss": 2.0}])
    (tmp_path / "run" / "config.yaml").write_text("# sft run; repeat it\nseed: 0\n")
    assert "loss" in page(tmp_path / "run").text
    (tmp_path / "empty").mkdir()
    for name, words in (("rum", "No such file or directory"), ("empty", "give an output folder")):
        with pytest.raises(UserError, match=words):
            page(tmp_path / name)


def command(*words, cwd=ROOT):
    return subprocess.run([sys.executable, "-m", "extras.show.report", *map(str, words)], capture_output=True, text=True, cwd=cwd)


@pytest.mark.parametrize("words, said", [
    ((), "arguments are required: RUN"), (("x", "--outptu", "y"), "unrecognized arguments: --outptu"),
    (("/none/x",), "/none/x: No such file or directory"), (("README.md",), "give an output folder"), (("tests",), "give an output folder")])
def test_what_is_wrong_with_a_command_is_told_in_one_line(words, said):
    done = command(*words)
    assert done.returncode == 2 and said in done.stderr and not done.stdout and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith(("extras.show.report: ", "python -m extras.show.report: error: "))


def test_the_command_writes_what_it_says_and_never_waits_for_transformers(tmp_path):
    name = folder(tmp_path / "run", [{"step": 0, "loss": 1.0}, {"step": 1, "loss": 2.0}], [episode(step=0)])
    other = write(tmp_path / "t.jsonl", [episode()])
    assert command(name, other).stdout == f"written: {name}/report.html\nwritten: {tmp_path}/t.html\n"
    (tmp_path / "t.html").unlink()
    (tmp_path / "t.html").mkdir()
    assert command(other).returncode == 2
    code = f"import sys; from extras.show import report as view; view.write_html({name!r}); print({{'transformers'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "set()\n"


