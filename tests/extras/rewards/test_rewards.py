"""extras/rewards/functions.py: every built-in function by hand, what --rewards says, how episodes are paid, and TRL's own functions."""
import asyncio
import json
import math
import sys
import threading
from functools import partial
from types import SimpleNamespace

import numpy
import pytest

import agent
import grpo
from agent import Limits, Trajectory, rollout
from layers import rewards_of
from extras.rewards import functions as rewards
from extras.exact.environments import sources
from extras.vllm.ahead import Ahead
from envs.tasks import load_tasks
from core.data import summarise
from core.config import UserError
from extras.hints.command_line import parse
from core.tiny import make_tiny

MODEL, TOKENIZER = make_tiny()
MODEL.eval()
LIMITS = Limits(max_new_tokens=10, max_tokens=100)


def said(*texts, mask=None, **info):
    """An episode whose assistant turns are texts or lists of calls, each of which has a result."""
    messages = [{"role": "user", "content": "?"}]
    for text in texts:
        calls = text if isinstance(text, list) else []
        messages.append({"role": "assistant", "content": "" if calls else text, **({"tool_calls": calls} if calls else {})})
        messages += [{"role": "tool", "name": call["name"], "content": "ok", "reward": 0.0} for call in calls]
    mask = mask or [0] + [1, 0] * len(texts)
    counts = {"tool_calls": 0, "tool_errors": 0, "unreadable_calls": 0, "parsed_turns": len(texts), "success": False, "task": {}}
    return Trajectory([5] * len(mask), mask, [0.0] * len(mask), [0.0] * len(texts), messages=messages, stop_reason="done", group_id="3-0", info={**counts, **info})


def loaded(text):
    return rewards.load(SimpleNamespace(rewards=text, env="equations", max_turns=None, max_new_tokens=10, max_tokens=100))


def call(name, **arguments):
    return {"name": name, "arguments": arguments}


# --------------------------------------------------------------------------------------- built in, by hand
@pytest.mark.parametrize("text, answer", [
    ("It is 7.", "It is 7."), ("so #### 7", " 7"), ("So 7.\n\nAnswer: $7$", " $7$"), ("Answer: 6\n**Answer:** 7", "** 7"), ("The answer: 7", "The answer: 7"), ("Answer: \\boxed{7}", "7"), ("**Answer**: 7", " 7"), ("#### Answer: 7", " 7"), ("Answer\uff1a7", "7"), ("Question: what?\nAnswers: 7", "Question: what?\nAnswers: 7"), (r"<answer> \boxed{7} </answer>", "7"), ("<answer>6</answer> no, <answer>7</answer>", "7"), (r"first \boxed{1}, then \boxed{\frac{1}{2}}", r"\frac{1}{2}"), (r"it is \boxed{\frac{\sqrt{3}}{2}}.", r"\frac{\sqrt{3}}{2}"),
    ([call("look", at="a", by="b"), call("submit", value=7)], "7"), ([call("done")], ""), ("", ""),
    ("<think>\n6? <answer>5</answer>\n</think>\n\n7", "\n\n7"), ("7? \\boxed{6}</think>7", "7"), ("<think>\n\\boxed{7}", ""),
    ([call("answer", value=6), call("answer", value=7)], "7"), ([call("answer", value=7, unit="m")], "")])
def test_the_final_answer(text, answer):
    assert rewards.final_answer(said("<answer>0</answer>", text)) == answer


@pytest.mark.parametrize("text, task, value", [
    ("The  Eiffel Tower!", {"answer": "eiffel tower"}, 1.0), ("Eiffel", {"answer": "eiffel tower"}, 0.0), ("#### 72", {"answer": "48 + 24 = 72\n#### 72"}, 1.0),
    ("-7", {"answer": 7}, 0.0), ("1.5", {"answer": 15}, 0.0), ("1/2", {"answer": "12"}, 0.0), ("-1.5.", {"answer": -1.5}, 1.0), ("1,000", {"answer": 1000}, 1.0), ("7", {"solution": "7"}, 1.0), (r"\boxed{7}", {"solution": r"As $x = 3 + 4$, it is $\boxed{7}$."}, 1.0), ("7", {"question": "?"}, None), ("", {"answer": "7"}, 0.0),
    ("Roma!", {"answer": ["Rome", "Roma"]}, 1.0), ("Oslo", {"answer": ["Rome", "Roma"]}, 0.0), ("A", {"answer": "A"}, 1.0), ("", {"answer": "A"}, 0.0), ("the", {"answer": "A"}, 0.0),
    ("Paris", {"answer": {"aliases": ["Paris"], "value": "Paris"}}, None), ("Answer: 34", {"answer": "34"}, 1.0), ("**Answer:** $34$.", {"answer": 34}, 1.0),
    ("72", {"answer": 72.0}, 1.0), ("None", {"answer": ["Rome", None]}, 0.0), ("", {"answer": ""}, None), ("...", {"answer": []}, None), ("", {"answer": "?"}, None), ("", {"answer": ["", "A"]}, 0.0), ("Covid-19", {"answer": "covid19"}, 1.0), ("北京。", {"answer": "北京"}, 1.0), ("“O’Brien”", {"answer": "O'Brien"}, 1.0), ("STRASSE", {"answer": "Straße"}, 1.0), ("ΟΔΟΣ", {"answer": "οδός"}, 0.0), ("Zu\u0308rich", {"answer": "Zürich"}, 1.0), ("２０", {"answer": 20}, 1.0), ("7", {"answer": "7", "solution": "As 3 + 4 = 7, it is seven."}, 1.0)])
def test_exact_match(text, task, value):
    assert rewards.exact(said(text, task=task)) == value


@pytest.mark.parametrize("text, answer, value", [
    ("東京。", "東京", 1.0), ("「東京 塔」！", "東京塔", 1.0), ("北京", "東京", 0.0), ("４２", "42", 1.0), ("－７", "7", 0.0), ("－７。", "-7", 1.0), ("−7", "-7", 1.0), ("–7", "7", 0.0), ("–7", "-7", 1.0), ("1990–95", "1990-95", 1.0), ("苹果，3个", "苹果 3个", 1.0),
    ("Ａ", "A", 1.0), ("٤٢", "42", 1.0), ("४२।", "42", 1.0), ("٣٫٥", "3.5", 1.0), ("القاهرة؟", "القاهرة", 1.0), ("हिन्दी।", "हिन्दी", 1.0), ("हिन्दी", "हनद", 0.0),
    ("caf\u00e9", "cafe\u0301", 1.0), ("cafe", "caf\u00e9", 0.0), ("¿Sí!", "sí", 1.0), ("3,5", "35", 0.0), ("3,5", "3,5", 1.0), ("1,00,000", "100000", 1.0), ("1,234,567.", "1234567", 1.0), ("10²", "102", 0.0), ("👍🏽", "👍", 0.0)])
def test_exact_match_in_other_languages(text, answer, value):
    assert rewards.exact(said(text, task={"answer": answer})) == value


def test_format_is_all_or_nothing():
    assert rewards.well_formed(said("a", "b", parsed_turns=2)) == 1.0 and rewards.well_formed(said("a", "b", parsed_turns=1)) == 0.0


@pytest.mark.parametrize("success, calls, unreadable, errors, value", [
    (True, 1, 0, 0, 1.0), (True, 2, 0, 1, 1.0), (True, 1, 1, 1, 1.0), (True, 1, 0, 1, 0.0), (True, 0, 1, 1, 0.0), (True, 0, 0, 0, 0.0), (False, 1, 0, 0, 0.0)])
def test_a_tool_counts_where_it_worked_and_the_task_is_solved(success, calls, unreadable, errors, value):
    assert rewards.tool_used(said("a", success=success, tool_calls=calls, unreadable_calls=unreadable, tool_errors=errors)) == value


@pytest.mark.parametrize("tokens, value", [(1, 0.0), (8, 0.0), (9, -0.5), (10, -1.0), (13, -1.0)])
def test_soft_overlong_punishment(tokens, value):
    """L_max 10, L_cache 2: nothing up to 8 tokens, then (8 - |y|) / 2, and -1 beyond 10 (DAPO eq. 13)."""
    t = said("a", "b", mask=[0, 0, 1, 0] + [1] * tokens)
    assert rewards.length(t, LIMITS) == pytest.approx([0.0, value])


def test_the_budget_of_a_turn_is_also_what_the_episode_leaves():
    """94 tokens precede it: L_max is 100 - 95 = 5, L_cache 1. Five tokens are cut by the episode's limit."""
    assert rewards.length(said("a", mask=[0] * 95 + [1] * 5), LIMITS) == pytest.approx([-1.0])
    assert rewards.length(said("a", mask=[0] * 95 + [1] * 4), LIMITS) == pytest.approx([0.0])
    assert rewards.length(said("a", "b", mask=[0] * 40 + [1] * 5 + [0] * 50 + [1] * 5), LIMITS) == pytest.approx([0.0, -1.0])


@pytest.mark.parametrize("texts, value", [
    (["a b"], 0.0), (["a b c d"], 0.0), (["a b a b a b"], -0.5),  # aba bab aba bab: 2 of 4
    (["I will look", "i will LOOK"], -0.5), (["好好好好"], -0.5), (["好的，我来看"], 0.0), ([[call("add", n=1)], [call("add", n=1)]], 0.0)])
def test_repetition(texts, value):
    assert rewards.repetition(said(*texts)) == value


@pytest.mark.parametrize("text, answer, value", [
    (r"so \boxed{\frac{1}{2}}", "1/2", 1.0), ("it is $0.5$", r"\frac{1}{2}", 1.0), (r"\boxed{x=3}", "3", 1.0), (r"\boxed{4}", "3", 0.0), ("nothing", "3", 0.0),
    ([call("submit", value="2/4")], "0.5", 1.0), ("3", None, None), ([call("submit", value=r"\frac{1}{2}")], "0.5", 1.0), ("(1, 2)", "(1,2)", 1.0), ("<answer> 7. </answer>", "7", 1.0),
    ("<answer>72 clips</answer>", "72", 1.0), ("<answer>It is $0.5$.</answer>", "0.5", 1.0), (r"\boxed{2x+3}", "2", 0.0), (r"\boxed{3\sqrt{2}}", "3", 0.0), ("<answer>3:4</answer>", "3", 0.0), ([call("submit", value="x + 1")], "1", 0.0),
    ("#### 4!", "4", 0.0), ("$1 < x < 2$", "(1,2)", 0.0), ("$(1,2)$", "1 < x < 2", 1.0), ("**Answer: 34**", "34", 1.0), ("Answer: **-34.**", "-34", 1.0), ("`Answer: 34`", "34", 1.0), (r"We get $\boxed 5$, not 6.", "5", 1.0), (r"\fbox{\frac{1}{2}}", "0.5", 1.0), ("Answer: 34\n\nNot 35.", "34", 1.0), (r"\boxed{34", "34", 0.0)])
def test_math_verify(text, answer, value):
    """In 2x + 3 there is no 2. The reference comes first: the package takes an interval for an inequality, not the other way."""
    pytest.importorskip("math_verify")
    assert rewards.math_verify(said(text, task={"answer": answer})) == value


def test_a_step_ahead_is_paid_in_the_main_thread():
    """math-verify refuses any other: its time-outs are signals. Without them 9^{9^9} would hold the interpreter's lock for hours."""
    pytest.importorskip("math_verify")
    paid, own, checks = [], [], []

    def play(model, engine, run, pay):
        own.append(getattr(engine, "run", None) is run)
        pay([said("0.5", task={"answer": "1/2"})])
        run.played += 1
        return threading.current_thread() is threading.main_thread()

    def payer(episodes):
        paid.extend(map(rewards.math_verify, episodes))
    run = SimpleNamespace(total=3, ranks=SimpleNamespace(world=1), line={}, played=0, rollout_seconds=0.0, rollout_tokens=0.0, log=lambda **_: None, check=lambda: checks.append(1))
    ahead = Ahead(lambda play, step, run: play(run=run), partial(play, "model", engine=SimpleNamespace(load_policy=lambda model: None), pay=payer), run)
    assert [ahead(step) for step in range(3)] == [True, False, False] and paid == [1.0] * 3
    assert ahead.coming.done()  # no fourth step is played
    assert own == [False, True, True]  # its servers stay with the step that began it
    assert checks  # signals are looked at while it waits
    assert run.played == 3


def test_math_verify_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(UserError, match="^--rewards math_verify: pip install math-verify$"):
        rewards.load(SimpleNamespace(rewards="math_verify", env="gsm8k"))  # not after the first episodes


# ------------------------------------------------------------------------------------------ what --rewards says
FUNCTIONS = '''
from dataclasses import dataclass

def half(episode):
    return 0.5

def by_turn(episode):
    return [float(k) for k in range(len(episode.rewards))]

def allowed(episode):
    return "no" not in episode.messages[-1]["content"]

def yes(episode):
    return True

def of_logprobs(episode):
    return sum(episode.logprobs) / sum(episode.loss_mask)

def unscored(episode):
    return None

def raises(episode):
    return {}["missing"]

def nan(episode):
    return float("nan")

def nan_in_one_turn(episode):
    return [1.0, float("nan")]

def short(episode):
    return [1.0]

def text(episode):
    return "much"

async def slow(completions, **kwargs):
    return [2.0 for _ in completions]

def few(completions, **kwargs):
    return [1.0]

def one(completions, **kwargs):
    return 0.5

def lazy(completions, **kwargs):
    yield from range(len(completions))
'''


@pytest.fixture
def functions(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(FUNCTIONS)
    return str(path)


def test_a_function_of_all_episodes_compares_those_of_a_group(tmp_path):
    """It may be async, and its values are checked like those of others."""
    path = tmp_path / "ranks.py"
    path.write_text("def best(episodes):\n    return (float(len(t.messages[-1]['content']) == max(len(o.messages[-1]['content']) for o in episodes if o.group_id == t.group_id)) for t in episodes)\n"
                    "async def one(episodes):\n    return [1.0] * len(episodes)\ndef short(episodes):\n    return [1.0]\n")
    agents = [SimpleNamespace(trajectory=said(text), session=SimpleNamespace(env=None, pays=True)) for text in ("a", "bbb", "cc", "d")]
    for player, group in zip(agents, "0011"):
        player.trajectory.group_id = f"3-{group}"
    loaded(f"{path}:best,{path}:one=0.5")(agents)
    assert [player.trajectory.reward for player in agents] == [0.5, 1.5, 1.5, 0.5]
    with pytest.raises(UserError, match="--rewards short returned .* for 4 completions"):
        loaded(f"{path}:short")(agents)


@pytest.mark.parametrize("said_, told", [
    ("exakt", "--rewards exakt: did you mean exact?"), ("zzz", "known: environment, exact, format, tool_used, length, repetition, math_verify, judge, or give path/to/file.py:function"),
    ("exact=much", "--rewards exact=much: could not convert string to float: 'much'"), ("exact=nan", "--rewards exact=nan: a weight is a finite number"), ("nowhere.py:f", "--rewards nowhere.py:f: .*No such file"),
    ("FILE:f", "has no function f"), ("math:pi", "--rewards math:pi: math has no function pi"), ("exact,exact=2", "another function has this name"),
    ("FILE:environment", "another function has this name"), ("builtins:max", "--rewards builtins:max: no signature found"),
    ("bisect:insort", "--rewards bisect:insort: needs a, x; a function takes the episode, or as in TRL completions, columns of the task and [*][*]kwargs")])
def test_a_wrong_name_or_weight_is_told_in_a_line(said_, told, functions):
    with pytest.raises(UserError, match=told):
        loaded(said_.replace("FILE", functions))


def paid(text, episode, total=0.0, parts=None, pays=True):
    """Pay one episode whose environment paid `total` in its last turn."""
    episode.rewards[-1], episode.reward, episode.reward_parts = total, total, dict(parts or {})
    session = SimpleNamespace(pays=pays, env=object())
    loaded(text)([agent_episode(episode, session)])
    return episode


def agent_episode(t, session):
    out = agent.Episode.__new__(agent.Episode)
    out.trajectory, out.session = t, session
    return out


def test_weights_names_turns_and_what_is_not_scored(functions):
    """2 x 0.5 and 0.1 x (0, 1) on top of 3 in the last turn."""
    t = paid(f"{functions}:half=2, {functions}:by_turn=0.1,{functions}:unscored", said("a", "b"), total=3.0, parts={"old": 1.0})
    assert t.rewards == pytest.approx([0.0, 4.1]) and t.reward == pytest.approx(4.1)
    assert t.reward_parts == {"old": 1.0, "environment": 3.0, "half": 0.5, "by_turn": 1.0}
    other = paid("exact", said("x", task={"answer": "x"}))
    assert summarise([t, other])["reward/half"] == 0.5 and summarise([t, other])["reward/exact"] == 1.0  # means over those that have them


def test_a_function_that_scores_no_episode_is_told_once_even_beside_one_that_does(functions, capsys):
    for _ in range(2):
        assert paid(f"exact,{functions}:half", said("a", task={"prompt": "?", "truth": "a"}), pays=False).reward == 0.5
    assert capsys.readouterr().out == ("note: --rewards exact scores none of these episodes; their tasks have prompt, truth "
                                       "(exact and math_verify need answer or solution: --fields)\n")


def test_the_environment_may_weigh_nothing_or_less(functions):
    assert paid(f"{functions}:half,environment=0", said("a"), total=3.0).rewards == [0.5]
    assert paid("environment=0.5", said("a"), total=3.0).reward == 1.5
    for total, reward in ((2.0, 0.5), (0.0, 0.0)):  # it may even be the verifier
        assert paid(f"environment=veto,{functions}:half", said("a"), total=total).reward == reward


def test_a_trl_function_gets_none_for_a_column_that_these_tasks_leave_empty_and_the_env():
    seen = []

    def mathematics(prompts, completions, ground_truth, env, **columns):
        seen.append((ground_truth, env, sorted(columns)))
        return [1.0] * len(completions)
    episode = agent_episode(said("a", task={"question": "?"}, env="box"), SimpleNamespace(pays=False, env=None))
    rewards.Rewards({"mathematics": mathematics}, {})([episode])
    (truth, env, others), = seen
    assert (truth, env) == ([None], ["box"]) and "question" in others and episode.trajectory.reward == 1.0


@pytest.mark.parametrize("text, total, reward", [("yes", 2.0, 2.5), ("no", 2.0, 0.0), ("no", -2.0, -1.5)])
def test_a_veto_takes_what_is_positive(functions, text, total, reward):
    t = paid(f"{functions}:allowed=veto,{functions}:half", said(text), total=total)
    assert t.reward == reward and t.reward_parts["allowed"] == float(text == "yes")
    for others in (f"{functions}:yes=veto", f"{functions}:by_turn=veto"):  # neither lifts it nor adds one, turn 0 is paid 0 by the second
        both = paid(f"{functions}:allowed=veto,{others},{functions}:half", said("a", text), total=total)
        assert both.reward == reward


def test_who_pays_by_several_functions_is_told_what_success_is(functions, capsys):
    """With TRL's usual functions, one for the answer and four for its form, all episodes were a success: pass@k 1."""
    both = f"{functions}:half,{functions}:yes"
    paid(both, said("a"))
    paid(f"{functions}:half,format", said("a"), pays=False)
    assert "note" not in capsys.readouterr().out
    for _ in range(2):
        assert paid(both, said("a"), pays=False).info["success"]
    note = "note: --rewards: success is half + yes above 0; where that is not what solved means, give the environment a _check()"
    assert capsys.readouterr().out.count(note) == 1


def test_success_is_a_reward_where_nothing_else_says_it(functions):
    assert paid(f"{functions}:half", said("a"), pays=False).info["success"] is True
    assert not paid(f"{functions}:half", said("a")).info["success"]
    nothing = paid(f"exact=0.1,{functions}:half=0.4,{functions}:yes=-0.3", said("a", task={"answer": "a"}), pays=False)
    assert abs(nothing.reward) < 1e-15 and not nothing.info["success"]  # 0.1 + 0.2 - 0.3
    assert paid("exact=veto,format", said("a", task={"answer": "a"}), pays=False).info["success"]
    solved, polite = (paid("exact,format=0.1,length", said(text, mask=[0] + [1] * 13, task={"answer": "a"}), pays=False) for text in "ab")
    assert (solved.reward, solved.info["success"]) == (pytest.approx(0.1), True) and paid("exact=veto,format", said("b", task={"answer": "a"}), pays=False).info["success"] is False
    assert polite.reward_parts == {"exact": 0.0, "format": 1.0, "length": -1.0} and not polite.info["success"]  # manners are no success, and their lack no failure
    assert "environment" not in paid(f"{functions}:half", said("a"), pays=False).reward_parts
    for words in (f"{functions}:half=-1", f"{functions}:half,{functions}:allowed=veto"):
        assert paid(words, said("no"), pays=False).info["success"] is False
    judged = said("a")
    loaded(f"{functions}:half")([agent_episode(judged, SimpleNamespace(pays=False, env=SimpleNamespace(_check=bool)))])
    assert judged.reward == 0.5 and judged.info["success"] is False  # _check() has said it


@pytest.mark.parametrize("name, told", [
    ("raises", r"--rewards raises raised KeyError: 'missing' \(.*mine.py:23\)"), ("short", r"--rewards short returned \[1.0\]; a reward is .* each of the 2 assistant turns"),
    ("text", "--rewards text returned 'much'; a reward is a number"), ("few", r"--rewards few returned \[.*\] for 2 completions; give a list"), ("one", "--rewards one returned 0.5 for 2 completions; give a list")])
def test_a_broken_function_stops_the_run_in_a_line(functions, name, told):
    with pytest.raises(UserError, match=told):
        episodes = [agent_episode(said("a", "b"), SimpleNamespace(pays=True, env=None)) for _ in range(2)]
        loaded(f"{functions}:{name}")(episodes)


def test_a_function_that_exits_is_named(tmp_path):
    (tmp_path / "mine.py").write_text("def leave(episode):\n    exit()\n")
    with pytest.raises(UserError, match=r"--rewards leave raised SystemExit"):
        loaded(f"{tmp_path}/mine.py:leave")([agent_episode(said("a"), SimpleNamespace(pays=True, env=None))])


def test_a_reward_that_is_not_finite_skips_the_step_and_is_told(functions):
    t = paid(f"{functions}:nan", said("a", task={"n": 3}))
    assert math.isnan(t.reward) and "--rewards nan is nan on task {'n': 3}" in t.info["not_finite"]
    t = paid(f"{functions}:nan_in_one_turn", said("a", "b"))
    assert math.isnan(t.reward) and "--rewards nan_in_one_turn is [1.0, nan]" in t.info["not_finite"]


def test_what_failed_or_has_no_finite_reward_is_not_paid(functions):
    for stop_reason, reward in (("error", 0.25), ("done", math.nan)):
        t = said("a")
        t.stop_reason, t.reward = stop_reason, reward
        loaded(f"{functions}:half,{functions}:raises")([agent_episode(t, SimpleNamespace(pays=True, env=None))])
        assert t.reward is reward and t.reward_parts == {}


# ---------------------------------------------------------------------------------------- TRL's signature
def test_trls_functions_get_trls_arguments():
    """Messages, ids of the completion, columns, environments, and what TRL 1.16 adds."""
    seen = {}

    def function(prompts, completions, completion_ids, environments, number, trainer_state, log_metric, log_extra, **kwargs):
        seen.update(locals())
        log_metric("accuracy", numpy.float32(0.25))
        log_extra("note", ["first", "second"])
        log_extra("tool_calls", ["many", "many"])
        return [1.0, None]
    one = said([call("add", n=1)], "done", mask=[0, 0, 1, 0, 1], task={"number": 7, "prompt": [{"role": "user", "content": "?"}]})
    two = said("four", task={"number": 8, "level": 1, "completion": "?"})
    session = SimpleNamespace(pays=False, env="the instance")
    rewards.Rewards({"function": function}, {"environment": 1.0, "function": 2.0})([agent_episode(t, session) for t in (one, two)])
    assert (one.reward, two.reward) == (2.0, 0.0) and one.reward_parts == {"accuracy": 0.25, "function": 1.0} and two.reward_parts == {"accuracy": 0.25}
    assert seen["prompts"] == [[{"role": "user", "content": "?"}]] * 2 and seen["number"] == [7, 8] and seen["environments"] == ["the instance"] * 2
    assert seen["completions"][0][0]["tool_calls"] == [{"type": "function", "function": {"name": "add", "arguments": {"n": 1}}}]
    assert [m["role"] for m in seen["completions"][0]] == ["assistant", "tool", "assistant"] and [len(ids) for ids in seen["completion_ids"]] == [3, 2]
    assert seen["trainer_state"].global_step == 3 and one.info["note"] == "first" and one.info["tool_calls"] == 0 and seen["kwargs"] == {"env": [None, None], "level": [None, 1]}
    json.dumps(one.to_json())  # which has no NumPy's numbers


def test_what_an_assistant_said_in_the_prompt_is_no_completion():
    """A prompt of messages may show earlier turns: they are not the policy's."""
    shown = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "two two two two"}, {"role": "user", "content": "2 + 2?"}]
    t = said("four", task={"prompt": shown})
    t.messages = [*shown, t.messages[-1]]
    seen = []

    def function(prompts, completions, **kwargs):
        seen.extend([prompts, completions])
        return [0.0]
    rewards.Rewards({"function": function}, {"environment": 1.0, "function": 1.0})([agent_episode(t, SimpleNamespace(pays=False, env=None))])
    assert seen == [[shown], [[{"role": "assistant", "content": "four"}]]] and rewards.repetition(t) == 0.0


def test_an_instance_that_can_be_called_is_a_function_of_trl(tmp_path, capsys):
    path = tmp_path / "judges.py"
    path.write_text("class Judge:\n    def __call__(self, completions, truth, **columns):\n        return [1.0 for _ in completions]\n\njudge = Judge()\n")
    assert paid(f"{path}:judge", said("a"), pays=False).reward == 1.0
    assert capsys.readouterr().out.startswith("note: --rewards judge: no task of this step has a column 'truth'")


def test_which_functions_are_of_trl():
    assert rewards.is_of_trl(lambda prompts, completions: 0) and rewards.is_of_trl(lambda **columns: 0) and not rewards.is_of_trl(lambda episode: 0)


def test_an_async_function_is_awaited(functions):
    assert paid(f"{functions}:slow=0.5", said("a")).reward == 1.0
    lazy = [agent_episode(said("a"), SimpleNamespace(pays=True, env=None)) for _ in range(2)]  # TRL takes any iterable
    loaded(f"{functions}:lazy")(lazy)
    assert [e.trajectory.reward_parts["lazy"] for e in lazy] == [0.0, 1.0]


def test_the_async_calls_of_a_steps_episodes_wait_at_the_same_time():
    """64 episodes of a judge that answers in 2 s were two minutes of every step."""
    waiting = []

    async def judge(episode):
        waiting.append(episode)
        while len(waiting) < 3:
            await asyncio.sleep(0.01)
        return float(len(episode.messages))
    judged = [said(*"abc"[:n]) for n in (1, 2, 3)]
    loop = threading.Thread(target=rewards.Rewards({"judge": judge}, {}), daemon=True,
                            args=[[agent_episode(t, SimpleNamespace(pays=False, env=None)) for t in judged]])
    loop.start()
    loop.join(20)
    assert [t.reward for t in judged] == [float(len(t.messages)) for t in judged]


def test_text_prompts_make_text_completions():
    seen = []

    def function(prompts, completions, **kwargs):
        seen.extend([prompts, completions])
        return [0.0]
    t = said("four", "or 5", task={"prompt": "2 + 2?"})
    rewards.Rewards({"function": function}, {"environment": 1.0, "function": 1.0})([agent_episode(t, SimpleNamespace(pays=False, env=None))])
    assert seen == [["2 + 2?"], ["four\nor 5"]]


@pytest.mark.parametrize("text, value", [("<think>\nhm\n</think>\nfour", 1.0), ("four", 0.0)])
def test_trls_own_functions_work_unchanged(text, value):
    """Its format reward, and its repetition penalty's neighbour, DAPO's overlong punishment, which ours must equal in one turn."""
    pytest.importorskip("trl")
    assert paid("trl.rewards:think_format_reward", said(text), pays=False).reward == value
    from trl.rewards import get_soft_overlong_punishment
    theirs = get_soft_overlong_punishment(max_completion_len=10, soft_punish_cache=2)
    for n in range(1, 13):
        t = said("a", mask=[0] + [1] * n)
        assert theirs(completion_ids=[t.token_ids[1:]]) == pytest.approx(rewards.length(t, LIMITS))


# ------------------------------------------------------------------------------------------- in a run
def test_an_episode_of_a_rollout_is_paid_and_logged(functions):
    tasks = load_tasks("equations", "train", 2, 0)
    config = SimpleNamespace(env="equations", rewards=f"{functions}:of_logprobs=2,{functions}:half,length", max_turns=None, max_new_tokens=30, max_tokens=600)
    found = rollout(MODEL, TOKENIZER, "equations", tasks, 2, limits=Limits(max_new_tokens=30, max_tokens=600), pay=rewards_of(config))
    for t in found:
        mean = sum(t.logprobs) / sum(t.loss_mask)
        assert t.reward_parts["of_logprobs"] == pytest.approx(mean) and t.reward_parts["half"] == 0.5 and t.reward_parts["length"] == -1.0  # random turns are cut
        assert t.reward == pytest.approx(t.reward_parts["environment"] + 2 * mean + 0.5 - 1.0) and sum(t.rewards) == pytest.approx(t.reward)
    assert {"reward/of_logprobs", "reward/half", "reward/environment"} <= set(summarise(found))
    assert functions in sources(config)  # a run is not resumed on other functions


def test_a_partial_is_noted_with_the_file_of_its_function(functions):
    """A partial is of functools, whose 300 modules of the standard library are no source of a run."""
    with open(functions, "a") as file:
        file.write("from functools import partial\nquarter = partial(lambda episode, k: k, k=0.25)\n")
    assert loaded(f"length,{functions}:quarter").modules == ["extras.rewards.functions", "extras.rewards.functions", functions]


def test_a_config_file_does_not_name_functions(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("rewards: theirs.py:steal=1\n")
    with pytest.raises(UserError, match="--rewards theirs.py:steal=1: a config file does not choose which code runs"):
        parse(grpo.Config, ["--config", str(path)])
    path.write_text("rewards: exact,length=0.5\n")
    assert parse(grpo.Config, ["--config", str(path)]).rewards == "exact,length=0.5"
