"""page.py: its statistics equal published and hand-worked numbers, the page shows what was logged and runs nothing."""
import base64
import hashlib
import json
import math
import re
import subprocess
import sys
from html import escape
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import programs
import pytest
import torch

import dpo
import grpo
from bench.comparison import difference, number
from core.config import UserError
from envs.transcripts import beginning
from extras.show import page as view
from extras.show.metrics import meaning
from extras.show.notes import wilson
from extras.show.page import MAX_ROWS, spread
from extras.show.recorded import token_texts
from extras.show.record import packed

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


def data_of(*paths):
    """The data in the page of these runs."""
    text = view.write_html(*paths).read_text("utf-8")
    return json.loads(text.partition('id="data">')[2].partition("</script>")[0])


def run_of(path):
    [run] = data_of(path)["runs"]
    return run


def episodes_of(path):
    return [episode for group in run_of(path)["groups"] for episode in group["episodes"]]


def numbers(text):
    return np.frombuffer(base64.b64decode(text), "<f4").tolist()


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
    """What runs has its hash in the policy, and what a page shows stands in JSON without a "<". test_page.py opens it in a browser."""
    rows = [episode(EVIL, calls=[EVIL], user=EVIL, step=0, success=i > 0) for i in range(3)]
    rows[0]["stop_reason"], rows[0]["reward_parts"] = EVIL, {EVIL: 1.0}
    name = folder(tmp_path / "<script>x", [{"step": 0, EVIL: 1.0}, {"step": 1, EVIL: 2.0}], rows, {EVIL: EVIL, "seed": 0}, config=f"env: {json.dumps(EVIL)}\n")
    [run] = data_of(name)["runs"]
    assert run["flags"] == {"env": EVIL} and run["groups"][0]["task"] == EVIL and run["steps"][1] == {"step": 1, EVIL: 2.0}
    assert EVIL.replace("\u202e", "\\u202e") in run["groups"][0]["episodes"][0]["tokens"][0]  # a transcript, which is `printable`
    raw = (Path(name) / "report.html").read_text()
    assert "<script>alert" not in raw and "<img" not in raw and "<title>" + escape(name) + "</title>" in raw
    [policy] = re.findall('Content-Security-Policy" content="(.*?)"', raw)
    hashes = set(re.findall("'(sha256-[^']+)'", policy))
    parts = [part for _, part in re.findall(r"<(style|script)>(.*?)</\1>", raw, re.S)]
    assert len(parts) == 4 and hashes == {"sha256-" + base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in parts}
    assert policy.startswith("default-src 'none'; script-src 'sha256-") and "src=" not in raw.partition("</head>")[0].replace("script-src", "")
    assert not re.findall(r"<(?:link|script|img|iframe)[^>]+(?:src|href)=", raw)


def test_tokens_join_to_the_text_whatever_their_bytes(tmp_path):
    tokenizer = byte_level(tmp_path)
    text = "solve  for\nx = ½ 🙂 日<|im_end|>"
    ids = tokenizer.encode(text).ids
    pieces = token_texts(tokenizer, ids)
    assert len(pieces) == len(ids) and "".join(pieces).replace("·", "") == text
    assert pieces.count("·") == 1 + 3 + 2  # bytes that only begin a character
    assert token_texts(tokenizer, [10**6]) == ["·"]


def recorded(step=0, line=0, **columns):
    """A line of tokens.jsonl."""
    return {"step": step, "line": line} | {name: [packed(values) for values in passes] for name, passes in columns.items()}


def test_the_page_has_what_was_recorded_of_each_sampled_token(tmp_path):
    """Two turns, of 2 and 4 tokens, a prompt, and a result between them; grpo's clip range from 0.8 to 1.2."""
    tokenizer = byte_level(tmp_path)
    ids = tokenizer.encode(EVIL[:8] + "\n").ids
    row = episode(calls=["add"], step=3) | {"token_ids": ids, "loss_mask": [0, 1, 1, 0, 1, 1, 1, 1, 0], "rewards": [2.0, -0.5], "reward": 1.5}
    row["logprobs"] = [-0.5 * m for m in row["loss_mask"]]
    row["messages"][2]["content"] = "error: no such slot"
    name = folder(tmp_path / "run", episodes=[row, row | {"reward": 0.0}], config="loss: grpo\nclip_eps_low: 0.2\nclip_eps_high: 0.2\nupdates_per_step: 3\n")
    (tmp_path / "tokenizer.json").rename(tmp_path / "run" / "tokenizer.json")
    ratios, advantages = [1.0, 1.3, 0.7, 1.3, 0.7, 1.1], [2.0, 2.0, 2.0, -1.0, -1.0, -1.0]
    new = [-0.5 + math.log(ratio) for ratio in ratios]
    write(tmp_path / "run" / "tokens.jsonl", [recorded(3, 0, advantages=[advantages], new=[[-0.5] * 6, new], weight=[[0.25] * 6, [0.5] * 6], entropy=[[1.0] * 6] * 2)])
    [group] = run_of(name)["groups"]
    shown, other = group["episodes"]
    assert (group["step"], group["task"], group["mean"], round(group["std"], 4), group["silent"]) == (3, "Worth it?", 0.75, 1.0607, None)
    assert "".join(shown["tokens"]) == "<script>\n" and shown["ids"] == ids and shown["at"] == [1, 2, 4, 5, 6, 7]
    assert [(turn["role"], turn["start"], turn["end"]) for turn in shown["turns"] if not turn["trained"]] == [("user", 0, 1), ("tool", 3, 4), ("assistant", 8, 9)]
    assert [(turn["start"], turn["end"]) for turn in shown["turns"] if turn["trained"]] == [(1, 3), (4, 8)]
    assert shown["calls"] == [{"turn": 1, "name": "add", "arguments": {"day": 1}, "result": "error: no such slot", "error": True}]
    assert shown["advantage"] == 0.5 and shown["turn_rewards"] == [2.0, -0.5] and shown["parts"] == {} and shown["stop_reason"] == "done"
    first, last = shown["updates"]
    assert (first["update"], last["update"]) == (0, 2) and not {"ref_f32", "old_f32"} & {*first} and numbers(shown["sampled_f32"]) == [-0.5] * 6
    assert numbers(first["new_f32"]) == [-0.5] * 6 and numbers(last["new_f32"]) == pytest.approx(new)
    assert numbers(first["advantage_f32"]) == advantages and "advantage_f32" not in last and numbers(last["weight_f32"]) == [0.5] * 6
    assert first["clipped"] == [0] * 6 and last["clipped"] == [0, 1, 0, 0, 1, 0]  # where grpo's minimum takes the clipped side
    assert other["updates"] == [] and other["advantage"] is None  # its numbers were not recorded


@pytest.mark.parametrize("loss", ["grpo", "gspo"])
def test_clipped_is_where_the_loss_says_so(tmp_path, loss):
    torch.manual_seed(0)
    log_ratio, advantages = torch.randn(4, 6) / 4, torch.randn(4, 1).expand(4, 6)
    settings = dict(clip_eps_low=0.1, clip_eps_high=0.2)
    _, log = grpo.LOSSES[loss][0](log_ratio, log_ratio, advantages, torch.ones(4, 6), **settings)
    read = view.Reader(None, {"loss": loss, **settings})
    for row in range(4):
        values = {"new": log_ratio[row].numpy(), "old": np.zeros(6), "advantages": advantages[row].numpy()}
        assert read.clipped(values) == (log["clip_low"] | log["clip_high"]).expand(4, 6)[row].int().tolist()
    assert view.Reader(None, {"loss": "sapo"}).clipped(values) is None


def test_a_turns_state_is_that_of_gigpo(tmp_path):
    """One number where credits.states_of says the same, be it the environment's `_state()` or what the turn answers."""
    from agent import Trajectory
    from extras.zoo.credits import states_of
    rows = [episode(calls=["a", "b"]), episode(calls=["a"]), episode(calls=["a", "b"], states=["x", "y", "x"]), episode(calls=["a", "b"], states=["x"])]
    for row in rows:  # a tool's result is one token, the same for the same text
        row["token_ids"][4::3] = [70] * (len(row["rewards"]) - 1)
    rows[1]["messages"][2]["content"], rows[1]["token_ids"][4] = "does not fit", 71
    byte_level(tmp_path)
    shown = [state for e in episodes_of(folder(tmp_path, episodes=rows)) for state in e["states"]]
    assert max(shown) == len(set(shown)) - 1  # small numbers, which take little of the page
    stated = [state for row in rows for state in states_of(Trajectory(rewards=row["rewards"], messages=row["messages"], info=row["info"]))]
    assert len(shown) == len(stated) == 11 and [shown.index(x) for x in shown] == [stated.index(x) for x in stated] == [0, 1, 1, 0, 4, 5, 6, 5, 5, 9, 10]


@pytest.mark.parametrize("rewards, weights", [
    ("exact,length=0.5", {"exact": 1.0, "length": 0.5}), ("judge:rubrics/kind.md=2, my.py:length", {"kind": 2.0, "length": 1.0}),
    ("exact,environment=0", {"environment": 0.0, "exact": 1.0}), ("exact", {"environment": 1.0, "exact": 1.0}),
    ("exact,length=veto", None), ("never", None), (None, None)])
def test_the_weights_that_gdpo_needs_are_those_of_rewards(rewards, weights):
    parts = {"exact": 1.0, "length": -2.0, "kind": 0.5, "environment": 3.0, "answer": 1.0}
    if weights and "environment" not in weights:  # one that pays nothing has no part
        del parts["environment"]
    assert view.reward_weights(rewards, [{"episodes": [{"parts": {}}, {"parts": parts}]}]) == weights


def test_a_pair_stands_side_by_side_with_its_implicit_rewards(tmp_path):
    row = {"step": 4, "episode": episode(calls=()), "new": [packed([-1.0] * 2)], "weight": [packed([-0.1] * 2)], "ref_sum": [packed([-3.0])]}
    other = {**row, "episode": episode(calls=(), reward=0.0), "ref_sum": [packed([-1.5])]}
    name = folder(tmp_path, episodes=[episode(step=0)], config="beta: 0.5\n")
    (tmp_path / "config.yaml").write_text("# dpo run; repeat it\nbeta: 0.5\n")
    byte_level(tmp_path)
    write(tmp_path / "tokens.jsonl", [row, other])
    run = run_of(name)
    [pair] = run["pairs"]
    assert not run["groups"] and (pair["step"], pair["margin"], pair["implicit_reward"]) == (4, 0.5 * 1.5, [0.5 * 1.0, 0.5 * -0.5])
    assert (pair["chosen"]["reward"], pair["rejected"]["reward"]) == (1.0, 0.0) and numbers(pair["chosen"]["updates"][0]["weight_f32"]) == pytest.approx([-0.1] * 2)


def test_the_probabilities_of_a_demonstration_are_the_policys(tmp_path):
    """Nobody sampled it: its log-probabilities are 0."""
    row = episode(calls=(), step=0) | {"logprobs": [0.0] * 4}
    name = folder(tmp_path, episodes=[row])
    byte_level(tmp_path)
    write(tmp_path / "tokens.jsonl", [recorded(0, 0, new=[[-1.5, -0.25], [-1.0, -0.5]])])
    assert numbers(episodes_of(name)[0]["sampled_f32"]) == [-1.5, -0.25]


def test_a_group_that_teaches_nothing_says_why(tmp_path):
    rows = [episode(step=0, reward=1.0), episode(step=0, reward=1.0)]
    assert [e["success"] for e in episodes_of(folder(tmp_path, episodes=[episode(step=0), episode(step=0, success=False)]))] == [True, False]
    assert run_of(folder(tmp_path, episodes=rows))["groups"][0]["silent"] == "all rewards are equal, so no episode is better than the others"


def test_without_a_tokenizer_the_text_is_shown(tmp_path):
    [shown] = episodes_of(write(tmp_path / "t.jsonl", [episode(user=EVIL)]))
    assert len(shown["tokens"]) == 1 and "slot_fit(day=1) -> fits   +0.0" in shown["tokens"][0] and not shown["at"] and not shown["updates"]
    assert (tmp_path / "t.html").exists()


def test_successes_stand_with_their_intervals(tmp_path):
    result = {"held_out_tasks": 20, "seconds": 12.3, "before": {"success": 0.5, "reward": -0.25, "episodes": 20}, "after": {"success": 0.75, "episodes": 20}}
    run = run_of(folder(tmp_path, result=result))
    assert run["after"]["success_interval"] == list(wilson(15, 20)) and run["before"]["reward"] == -0.25
    assert (run["held_out"], run["seconds"]) == (20, 12.3)
    assert run_of(folder(tmp_path, result={"after": {"success": 0.75}}))["after"] == {"success": 0.75}
    for share in ("much", 7):
        name = folder(tmp_path, result={"after": {"success": share, "episodes": 20}})
        with pytest.raises(UserError, match="result.json: cannot be read|result.json: math domain error"):
            view.write_html(name)


@pytest.mark.parametrize("value, shown", [(1888.2, "1,888"), (-1888.2, "-1,888"), (0.01684, "0.0168"), (999.4, "999"), (999.7, "1,000"), (1e15, "1e+15"), (None, "-"), ("x", "x")])
def test_numbers_are_shown_as_a_reader_wants_them(value, shown):
    assert number(value) == shown


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
    [shown] = episodes_of(name)
    assert len(shown["tokens"]) == 4 and shown["at"] == [2, 3]


def test_the_lines_of_both_logs_are_one_and_alarms_stand_at_their_step(tmp_path):
    rows = [{"step": t, "success": 0.5, "kl": 0.1 if t < 9 else 4.0, "loss": None} for t in range(12)]
    name = folder(tmp_path, rows)
    write(tmp_path / "timing.jsonl", [{"step": 0, "seconds": 1.5}, {"step": 1, "seconds": 2.0}])
    run = run_of(name)
    assert run["steps"][:3] == [{"step": 0, "success": 0.5, "kl": 0.1, "seconds": 1.5}, {"step": 1, "success": 0.5, "kl": 0.1, "seconds": 2.0},
                                {"step": 2, "success": 0.5, "kl": 0.1}]
    [alarm] = run["alarms"]
    assert alarm["step"] == 9 and alarm["text"].startswith("KL to the policy this run started from is 0.88")
    metrics = data_of(name)["metrics"]
    assert metrics["kl"] == list(meaning("kl")) and set(metrics) == {"step", "success", "kl", "seconds"}


def test_no_spike_of_a_long_run_is_lost(tmp_path):
    rows = [{"step": t, "success": 0.5 + 0.001 * (t % 7), "grad_norm": 99.0 if t == 4321 else None if t % 2 else 1.0,
             "eval/success": t / 1e4 if t % 1000 == 0 else None} for t in range(10_000)]
    steps = run_of(folder(tmp_path, rows))["steps"]
    assert len(steps) == MAX_ROWS and (tmp_path / "report.html").stat().st_size < 500_000
    assert [row for row in steps if row["grad_norm"] == 99.0] == [row for row in steps if row["step"] == 4320]
    assert [row["eval/success"] for row in steps if "eval/success" in row] == [t / 10 for t in range(10)]


def test_every_loss_has_its_line(tmp_path):
    found = {row["loss"]: row for row in run_of(folder(tmp_path))["equations"]}
    assert found.keys() >= grpo.LOSSES.keys() | dpo.LOSSES.keys() | {"imitate", "exp", "linear"}
    for row in found.values():  # what stands there is the code
        lines = (ROOT / row["file"]).read_text().splitlines()
        assert row["code"].startswith(lines[row["line"] - 1].strip())
    assert "-torch.min(ratio" in found["dapo"]["code"] and found["grpo"]["file"] == "grpo.py"


def test_a_fork_may_write_its_losses_otherwise(tmp_path):
    (tmp_path / "grpo.py").write_text("a, b = 1, 2\nsys.x = 3\n\ndef mine(x):\n    return x\n\ndef mean(x):\n    return x\n\n"
                                      "LOSSES = {'mine': (partial(mine, k=4), mean), 'theirs': (imported, lambda x: x)}\n")
    assert [(row["loss"], row["line"], row["code"]) for row in view.equations(tmp_path)] == [("mine", 5, "return x")]


def test_a_page_that_cannot_be_written_fails_no_run(tmp_path, monkeypatch, capsys):
    from extras.show.run import Run
    monkeypatch.setattr(view, "write_html", lambda folder: 1 / 0)
    Run.write_page(SimpleNamespace(writes=True), tmp_path)
    assert capsys.readouterr().err == "report.html: division by zero\n"


def test_the_flags_that_differ_from_the_defaults_are_named_in_the_file(tmp_path):
    run = run_of(folder(tmp_path, config="# differ from the defaults: seed, kl_coef\nseed: 3\nkl_coef: 0.1\nlora_r: 16\n"))
    assert run["changed"] == {"seed": 3, "kl_coef": 0.1} and run["flags"] == {"seed": 3, "kl_coef": 0.1, "lora_r": 16} and run["algorithm"] == "grpo"


def test_64_episodes_of_500_tokens_with_all_arrays_stay_below_2_mb(tmp_path):
    byte_level(tmp_path)
    rng = np.random.default_rng(0)
    mask = [int(t % 5 < 2) for t in range(500)]  # 200 of them are sampled
    rows, tokens = [], []
    for i in range(64):
        rows.append(episode(step=i // 16, reward=float(i % 8)) | {
            "token_ids": rng.integers(0, 250, 500).tolist(), "loss_mask": mask, "logprobs": [-0.1 * m for m in mask], "group_id": str(i // 8)})
        columns = {name: rng.normal(size=(2, 200)) for name in ("new", "entropy", "weight")}
        columns |= {name: rng.normal(size=(1, 200)) for name in ("advantages", "old", "ref")}
        tokens.append(recorded(i // 16, i % 16, **columns))
    name = folder(tmp_path, [{"step": 0, "loss": 1.0}], rows)
    write(tmp_path / "tokens.jsonl", tokens)
    assert len([e for e in episodes_of(name) if e["updates"]]) == 64
    assert 1.2e6 < (tmp_path / "report.html").stat().st_size < 2e6


@pytest.mark.parametrize("rows", [[], [{"step": 0, "loss": 1.0}], [{"step": 0, "loss": None}, {"step": 1, "loss": "x"}],
                                  [{"loss": 1.0}, {"loss": 2.0}], [{"step": 3, "loss": 1}, {"step": 3, "loss": 2}],
                                  [{"step": 0, "ratio": 1.0}, {"step": 1, "ratio": 1.0}],
                                  [{"step": 0, "ratio": 1.0}, {"step": 1, "ratio": 1.0000001}],
                                  [{"step": 0, "loss": -1e-300}, {"step": 1, "loss": 1e300}]])
def test_odd_metrics_make_a_page(tmp_path, rows):
    assert all(type(row["step"]) is int for row in run_of(folder(tmp_path, rows))["steps"])


def test_the_steps_on_a_page_are_spread_over_the_run(tmp_path, monkeypatch):
    assert list(spread(list(range(9)))) == [8, 0, 4, 6, 2, 7, 5, 3, 1] and list(spread([7])) == [7] and list(spread([])) == []
    assert all(sorted(spread(list(range(n)))) == list(range(n)) for n in range(40))
    name = folder(tmp_path, episodes=[episode(reward=float(i), step=step) for step in range(50) for i in range(16)])
    monkeypatch.setattr(view, "PAGE_BYTES", 60_000)
    steps = sorted({group["step"] for group in run_of(name)["groups"]})
    assert 3 < len(steps) < 20 and steps[0] == 0 and steps[-1] == 49 and max(b - a for a, b in zip(steps, steps[1:])) < 25


# ------------------------------------------------------------------------------------------------ files and the command
def test_a_line_cut_by_a_kill_is_left_out_and_a_broken_one_is_named(tmp_path):
    name = folder(tmp_path, [{"step": 0, "loss": 1.0}, {"step": 1, "loss": 2.0}])
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "lo')
    assert [row["step"] for row in run_of(name)["steps"]] == [0, 1]
    write(tmp_path / "metrics.jsonl", [{"step": 0}], end='{"step": 1,\n{"step": 2}\n')
    with pytest.raises(UserError, match=r"metrics.jsonl:2: not JSON"):
        view.write_html(name)
    write(tmp_path / "metrics.jsonl", [[1, 2]])
    with pytest.raises(UserError, match=r"metrics.jsonl:1: not a JSON object"):
        view.write_html(name)


@pytest.mark.parametrize("broken", [
    {"messages": 3}, {"messages": [{"role": "user"}]}, {"reward": "much"}, {"reward": None}, {"logprobs": [0.0]},
    {"token_ids": ["<script>"] * 4}, {"token_ids": [-1] * 4}, {"rewards": ["x"] * 4}, {"loss_mask": None}])
def test_what_is_no_episode_is_named_by_line(tmp_path, broken):
    name = folder(tmp_path, episodes=[episode(calls=()), episode(calls=()) | broken])
    byte_level(tmp_path)
    with pytest.raises(UserError, match=r"trajectories.jsonl:2: "):
        view.write_html(name)


def test_what_is_there_is_shown_and_a_folder_of_no_run_is_refused(tmp_path):
    write(tmp_path / "run" / "metrics.jsonl", [{"step": 0, "loss": 1.0}, {"step": 1, "loss": 2.0}])
    (tmp_path / "run" / "config.yaml").write_text("# sft run; repeat it\nseed: 0\n")
    assert run_of(tmp_path / "run")["steps"][1] == {"step": 1, "loss": 2.0}
    (tmp_path / "empty").mkdir()
    for name, words in (("rum", "No such file or directory"), ("empty", "give an output folder")):
        with pytest.raises(UserError, match=words):
            view.write_html(tmp_path / name)


def command(*words, cwd=ROOT):
    return programs.run("-m", "extras.show", *words, cwd=cwd)


@pytest.mark.parametrize("words, said", [
    ((), "give the output folder of a run, or --metrics"), (("x", "--outptu", "y"), "unrecognized arguments: --outptu"),
    (("/none/x",), "/none/x: No such file or directory"), (("README.md",), "give an output folder"), (("tests",), "give an output folder")])
def test_what_is_wrong_with_a_command_is_told_in_one_line(words, said):
    done = command(*words)
    assert done.returncode == 2 and said in done.stderr and not done.stdout and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith(("extras.show: ", "python -m extras.show: error: "))


def test_the_command_writes_what_it_says_and_never_waits_for_transformers(tmp_path):
    name = folder(tmp_path / "run", [{"step": 0, "loss": 1.0}, {"step": 1, "loss": 2.0}], [episode(step=0)])
    other = write(tmp_path / "t.jsonl", [episode()])
    assert command(name).stdout == f"written: {name}/report.html\n" and command(name, other).stdout == f"written: {name}/compare.html\n"
    assert len(data_of(name, other)["runs"]) == 2
    (tmp_path / "t.html").mkdir()
    assert command(other).returncode == 2
    code = f"import sys; from extras.show import page as view; view.write_html({name!r}); print({{'transformers'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "set()\n"


