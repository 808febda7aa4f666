"""bench/meetings.py: the simulator is what its docstring says, hides what it should, grades as the course does; its CSV."""
import json
import math
import re
import subprocess
import sys
from collections import Counter
from itertools import permutations, product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.tasks import load_tasks
import envs
from schooling import demonstrate
from bench.meetings import (
    PERSONAS,
    PRIOR,
    REASONS,
    TOOLS,
    Meetings,
    accuracy,
    answer,
    belief,
    simulate,
)
from envs.task_files import read_rows
from core.chat import Chat
from core.tool_calls import parse_tool_calls

ROOT = Path(envs.__file__).parent.parent
PROMPT = re.compile(r"Meeting (\d{6}), day (one|two|three) at (\w+): (junior|senior) (\w+) met (\w+), (junior|senior) (\w+) met (\w+)\.")


@pytest.fixture(scope="module")
def drawn():
    return [simulate(task["meeting"]) for task in Meetings._tasks("train", 24_000, seed=0)]


@pytest.fixture(scope="module")
def tokenizer():
    from core.tiny import make_tiny
    return make_tiny()[1]


def environment(meeting=482107, cls=Meetings, **options):
    env = cls()
    env.reset(meeting=meeting, **options)
    return env


def shaped(meeting=482107):
    return environment(meeting, shaped=True)


def right(env):
    return "YES" if env.outcome else "NO"


def said(probability=0.7, recommendation="YES", reason="slot"):
    return json.dumps({"probability": probability, "reason": reason, "recommendation": recommendation})


# ------------------------------------------------------------------------------------------------- what can be known
def test_the_probability_is_the_documented_formula(drawn):
    for made in drawn[:500]:
        assert made["probability"] == pytest.approx(1 / (1 + math.exp(-0.8 * sum(made["scores"].values()))))
        assert list(made["scores"]) == list(TOOLS)
        assert all(made["scores"][name] in PRIOR[name] for name in TOOLS)


def test_the_priors_are_those_of_the_simulator_and_the_scores_are_independent(drawn):
    scores = np.array([list(made["scores"].values()) for made in drawn])
    for i, name in enumerate(TOOLS):
        seen = Counter(scores[:, i].tolist())
        assert sum(PRIOR[name].values()) == pytest.approx(1)
        for score, p in PRIOR[name].items():
            assert seen[score] / len(drawn) == pytest.approx(p, abs=4 * math.sqrt(p * (1 - p) / len(drawn)) + 1e-9)
    assert np.abs(np.corrcoef(scores.T) - np.eye(4)).max() < 4 / math.sqrt(len(drawn))


def test_outcomes_are_drawn_from_the_probability(drawn):
    for low, high in ((0, 0.05), (0.05, 0.2), (0.2, 0.5), (0.5, 0.8), (0.8, 0.95), (0.95, 1)):
        some = [made for made in drawn if low <= made["probability"] < high]
        p, good = np.mean([made["probability"] for made in some]), np.mean([made["outcome"] for made in some])
        assert len(some) > 500 and abs(p - good) < 4 * math.sqrt(p * (1 - p) / len(some)), (low, p, good)


def test_the_ceiling_is_the_accuracy_of_whoever_knows_the_truth(drawn):
    assert 0.82 <= accuracy(TOOLS) <= 0.84
    best = np.mean([made["outcome"] == (made["probability"] >= 0.5) for made in drawn])
    assert best == pytest.approx(accuracy(TOOLS), abs=0.01)


def test_no_class_is_a_majority(drawn):
    assert 0.45 <= np.mean([made["outcome"] for made in drawn]) <= 0.55


def test_the_prompt_alone_tells_little(drawn):
    """A logistic regression on everything the prompt shows, and pairs of it, fitted on one half, asked on the other."""
    words = [PROMPT.fullmatch(made["prompt"]).groups()[1:] for made in drawn]
    shown = [[f"{i}{w}" for i, w in enumerate(row)] + [row[3] + row[6], row[2] + row[5], row[0] + row[4], row[0] + row[7], row[4] + row[7]] for row in words]
    columns = {name: i for i, name in enumerate(sorted({name for row in shown for name in row}))}
    x = np.zeros((len(shown), len(columns)))
    for i, row in enumerate(shown):
        x[i, [columns[name] for name in row]] = 1
    y, half = np.array([made["outcome"] for made in drawn], float), len(drawn) // 2
    weights = np.zeros(len(columns))
    for _ in range(6):  # Newton, with a small ridge
        p = 1 / (1 + np.exp(-x[:half] @ weights))
        hessian = (x[:half] * (p * (1 - p))[:, None]).T @ x[:half] + 3 * np.eye(len(columns))
        weights += np.linalg.solve(hessian, x[:half].T @ (y[:half] - p) - 3 * weights)
    guess = np.mean((x[half:] @ weights > 0) == y[half:])
    assert 0.56 < guess <= 0.62, guess  # it tells something, so that reading it is of use


def test_the_best_guess_from_the_prompt_exactly():
    """Day and meetings had are all that it tells: of energies, and of who leaves when. Everything else is a fair coin."""
    total = 0.0
    for day, a, b in product((1, 2, 3), range(6), range(6)):
        stay, facts = 1 - day / 4, {0: 1.0}
        for p in (0.5, 0.5, 0.5, (6 - a) / 7, (6 - b) / 7, 0.5, stay, stay, 0.5):
            facts = {s: facts.get(s - 1, 0) * p + facts.get(s + 1, 0) * (1 - p) for s in range(-9, 10)}
        p = sum(p * q / (1 + math.exp(-0.8 * (s + c))) for s, p in facts.items() for c, q in PRIOR["common_interests"].items())
        total += max(p, 1 - p) / 108
    assert total == pytest.approx(0.5886, abs=1e-4)


def test_two_to_four_scores_are_needed():
    assert accuracy(()) == pytest.approx(0.5)
    by_count = [[accuracy(c) for c in permutations(TOOLS, n)] for n in (1, 2, 3, 4)]
    assert max(by_count[0]) < 0.67 and 0.69 < min(by_count[1]) <= max(by_count[1]) < 0.72 < min(by_count[2]) < max(by_count[2]) < 0.79 < min(by_count[3])


def test_belief_is_the_share_of_good_meetings_among_those_that_look_the_same(drawn):
    for seen in ({}, {"profile_match": 3}, {"slot_fit": -1, "follow_up": -3}, {"common_interests": 2, "slot_fit": 1, "profile_match": -1}):
        same = [made for made in drawn if all(made["scores"][k] == v for k, v in seen.items())]
        assert belief(seen) == pytest.approx(np.mean([made["probability"] for made in same]), abs=2.0 / math.sqrt(len(same)))
    made = drawn[0]
    assert belief(made["scores"]) == pytest.approx(made["probability"])


def test_everything_follows_from_the_number():
    assert simulate(482107) == simulate(482107) and simulate(482107) != simulate(482108)
    one, two = environment(), environment(noise=0.9, noise_seed=5)
    assert [getattr(one, name)() for name in TOOLS] == [getattr(two, name)() for name in TOOLS] and one.outcome == two.outcome
    assert one.profile_match() == one.profile_match()


# ------------------------------------------------------------------------------------------------------ what is shown
def test_texts_are_short_and_show_what_they_should(tokenizer, drawn):
    chat = Chat(tokenizer, envs.schemas(Meetings))
    personas = set()
    for made in drawn[:200]:
        env = Meetings()
        first = env.reset(meeting=int(PROMPT.fullmatch(made["prompt"])[1]))
        assert first == made["prompt"]
        assert len(chat.prompt([{"role": "system", "content": env.system_prompt}, {"role": "user", "content": first}])) < 60
        personas.add(env.system_prompt)
        for name in TOOLS:
            text = getattr(env, name)()
            assert re.fullmatch(r"[a-z ]+: -?\d", text) and int(text.split(": ")[1]) == made["scores"][name]
            assert len(tokenizer.encode(text)) < 12
    assert len(personas) == len(PERSONAS) == 7


def test_an_answer_is_few_tokens_and_no_call(tokenizer):
    chat = Chat(tokenizer, envs.schemas(Meetings))
    for p in range(1, 100):
        text = answer(p / 100, "interests")
        assert parse_tool_calls(text) == (text, [], [])
        assert len(chat.turn(text, [])) == 8


@pytest.mark.parametrize("p, shown, yes", [(0.0, "0.01", "NO"), (1.0, "0.99", "YES"), (0.4949, "0.49", "NO"), (0.496, "0.50", "YES"), (0.5, "0.50", "YES"), (0.081, "0.08", "NO")])
def test_answers(p, shown, yes):
    assert answer(p, "slot") == f'{{"probability": {shown}, "reason": "slot", "recommendation": "{yes}"}}'
    assert json.loads(answer(p, "slot", contrary=True))["recommendation"] != yes


# ------------------------------------------------------------------------------------------------------------- reward
def test_the_ladder():
    env = environment()
    assert env.get_reward() == -0.75 and not env._check()  # not completed
    env.slot_fit()
    assert env.get_reward() == -0.75
    for text, reward in [("", -1.0), ("yes", -1.0), (said(recommendation="MAYBE"), -1.0), ('{"probability": 0.5, "reason": "slot"}', -1.0),
                         (said(recommendation="YES") + said(recommendation="NO"), -1.0), (said(1.5, right(env)), -0.25), (said(-0.1, right(env)), -0.25),
                         (said("high", right(env)), -0.25), (said(True, right(env)), -0.25), (said(float("nan"), right(env)), -0.25),
                         (said(0.5, right(env), "two words"), -0.25), (said(0.5, right(env), 3), -0.25), (said(0.5, right(env))[:-1], -0.25),
                         (said(0.5, right(env)), 1.0), (f"I think: {said(1, right(env))}.", 1.0), (said(0.5, "NO" if env.outcome else "YES"), 0.1)]:
        env = environment()
        env.slot_fit()
        assert env._reply(text) is None and env.done
        assert (env.get_reward(), env._check()) == (reward, f'"{right(env)}"' in text and reward != -1.0), text
        idle = environment()
        idle._reply(text)
        assert idle.get_reward() == (-1.0 if reward == -1.0 else -0.5)
        assert idle._reward_parts == {"outcome": idle.get_reward()}


def test_success_is_the_outcome_not_the_better_guess(drawn):
    unlucky = [task["meeting"] for task, made in zip(Meetings._tasks("train", 200, seed=0), drawn) if made["outcome"] != (made["probability"] > 0.5)]
    assert unlucky
    env = environment(unlucky[0])
    env._reply(answer(simulate(unlucky[0])["probability"], "slot"))
    assert not env._check()


def test_shaped_terms():
    env = shaped()
    before = env.reward
    env.slot_fit(), env.follow_up()
    assert env.reward - before == pytest.approx(0.1)  # paid in its turn
    env.slot_fit()
    assert env.reward == pytest.approx(0.05)
    env._reply(said(0.9, right(env)))
    assert env._reward_parts == pytest.approx({"outcome": 1.0, "tools": 0.05, "calibration": 0.25 - (0.9 - env.outcome) ** 2})
    assert env.get_reward() == pytest.approx(sum(env._reward_parts.values()))
    assert set(environment()._reward_parts) == {"outcome"}
    assert [task["shaped"] for task in load_tasks("meetings", "train", 2, 0, env_options={"shaped": True})] == [True] * 2


def test_calibration_pays_most_for_the_truth():
    def paid(env, p):
        env._reply(said(p))
        return env._reward_parts["calibration"]
    good, bad = (next(m for m in range(100_000, 100_100) if simulate(m)["outcome"] == o) for o in (True, False))
    for truth in (0.2, 0.5, 0.9):
        mean = {p: truth * paid(shaped(good), p) + (1 - truth) * paid(shaped(bad), p) for p in np.linspace(0, 1, 21).round(2)}
        assert max(mean, key=mean.get) == truth


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.text(), st.text(alphabet='{}[]":, 0.9YESNOprobabilityreasonrecommendation'), st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda c: st.lists(c, max_size=3) | st.dictionaries(st.sampled_from(["probability", "reason", "recommendation", "x"]), c, max_size=4)).map(json.dumps)))
def test_whatever_is_answered_is_graded(text):
    env = shaped()
    env.slot_fit()
    assert env._reply(text) is None
    assert math.isfinite(env.get_reward()) and env._reward_parts["outcome"] in (-1.0, -0.25, 0.1, 1.0)


@pytest.mark.parametrize("text", ['{"recommendation": "YES", "probability": ' + "[" * 100_000, '{"recommendation": "YES", "probability": 0.5, "reason": ' + "[" * 100_000 + "]" * 100_000 + "}",
                                  '{"recommendation": "YES", "reason": "slot", "probability": ' + "9" * 5000 + "}", "{" * 100_000])
def test_monsters_are_invalid(text):
    env = environment()
    env.slot_fit()
    env._reply(text)
    assert env.get_reward() in (-0.25, -1.0)


# ------------------------------------------------------------------------------------------------------------- expert
def played(meeting, **options):
    env = environment(meeting, **options)
    calls = []
    while not isinstance(turn := env._expert(), str):
        assert turn == env._expert() and len(turn) == 1  # asking changes nothing
        calls.append(turn[0]["name"])
        assert envs.call(env, **turn[0])[1] is False
    env._reply(turn)
    assert env._expert() == []
    return env, calls, json.loads(turn)


def test_the_expert_looks_in_its_personas_order_and_answers_what_it_saw():
    for task in Meetings._tasks("train", 300, seed=1):
        env, calls, answered = played(task["meeting"])
        order = PERSONAS[env.system_prompt.split()[3]]
        assert calls == [TOOLS[int(i)] for i in order] and 2 <= len(calls) <= 5
        p = belief({name: env.scores[name] for name in calls})
        assert answered["probability"] == pytest.approx(min(max(p, 0.01), 0.99), abs=0.0051) and answered["recommendation"] == ("YES" if round(p, 2) >= 0.5 else "NO")
        strongest = {REASONS[name]: env.scores[name] * (1 if p >= 0.5 else -1) for name in calls}
        assert strongest[answered["reason"]] == max(strongest.values())
    assert len(set(PERSONAS.values())) == 7 and {len(order) for order in PERSONAS.values()} == {3, 4, 5}


def test_noise_makes_the_expert_hasty_and_contrary():
    def run(noise):
        found = [played(task["meeting"], noise=noise, noise_seed=i) for i, task in enumerate(Meetings._tasks("train", 3000, seed=2))]
        contrary = [(a["probability"] >= 0.5) != (a["recommendation"] == "YES") for _, _, a in found]
        return np.mean([env._check() for env, _, _ in found]), np.mean([len(calls) == 2 for _, calls, _ in found]), np.mean(contrary)
    good, hasty, contrary = run(0.0)
    assert good == pytest.approx(0.82, abs=0.03) and hasty == contrary == 0
    good, hasty, contrary = run(0.2)
    assert good == pytest.approx(0.676, abs=0.03) and hasty == pytest.approx(0.2, abs=0.03) and contrary == pytest.approx(0.2, abs=0.03)


def test_demonstrations_end_with_the_answer(tokenizer):
    episodes = demonstrate(tokenizer, "meetings", [{**t, "noise": 0.2, "noise_seed": i} for i, t in enumerate(load_tasks("meetings", "train", 30, 0))])
    chat = Chat(tokenizer, envs.schemas(Meetings))
    for t in episodes:
        last = t.messages[-1]
        assert t.stop_reason == "done" and last["role"] == "assistant" and set(json.loads(last["content"])) == {"probability", "reason", "recommendation"}
        assert t.reward in (1.0, 0.1) and t.rewards[:-1] == [0.0] * (len(t.rewards) - 1) and t.info["success"] == (t.reward == 1.0)
        assert 2 <= t.info["tool_calls"] <= 5 and t.info["tool_errors"] == 0
        turn = chat.turn(last["content"], [])
        assert t.token_ids[-len(turn):] == turn and t.loss_mask[-len(turn):] == [1] * len(turn)
        assert t.messages[0]["content"].startswith("You are a ")


# ---------------------------------------------------------------------------------------------------------- tasks, CSV
def test_tasks_are_apart():
    train, test = ({t["meeting"] for seed in (0, 1) for t in Meetings._tasks(split, 4000, seed)} for split in ("train", "test"))
    assert not train & test and len(train) > 7900 and all(100_000 <= m < 1_000_000 for m in train | test)
    assert Meetings._tasks("train", 50, 3) == Meetings._tasks("train", 50, 3) != Meetings._tasks("train", 50, 4)
    assert Meetings._tasks("train", 50, 3) == Meetings._tasks("train", 80, 3)[:50] and len(Meetings._tasks("test", None, 0)) == 10_000


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    path = tmp_path_factory.mktemp("csv") / "meetings.csv"
    done = subprocess.run([sys.executable, "bench/meetings.py", "--rows", "300", "--output", path, "--seed", "1"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "best possible accuracy is 83." in done.stdout
    return path


def test_the_csv_is_the_courses_and_the_environment_reads_it_back(table):
    lines, rows = zip(*read_rows(str(table)))
    assert table.read_text().splitlines()[0] == "input_text,target_probability,target_reason,ground_truth_prob,meeting"
    assert len(rows) == 300 and list(lines) == list(range(2, 302))
    wanted = [t["meeting"] for t in Meetings._tasks("train", 300, 1)]
    assert [int(row["meeting"]) for row in rows] == wanted
    for row, meeting in zip(rows, wanted):
        made = simulate(meeting)
        asked, answered = Meetings._conversation(row)
        text, said = asked["content"], json.loads(answered["content"])
        target, reason = said["probability"], said["reason"]
        assert text == made["prompt"] and float(row["ground_truth_prob"]) == pytest.approx(made["probability"], abs=1e-4)
        assert target == pytest.approx(made["probability"], abs=0.011) and reason in REASONS.values()
    train, test = (load_tasks("meetings", split, None, 0, str(table)) for split in ("train", "test"))
    assert len(train) + len(test) == 300 and test and all(type(task["meeting"]) is int for task in train)
    assert Meetings().reset(**train[0]) == simulate(train[0]["meeting"])["prompt"]


GOOD = {"input_text": simulate(482107)["prompt"], "target_probability": "0.5", "target_reason": "slot", "ground_truth_prob": str(simulate(482107)["probability"])}


@pytest.mark.parametrize("change, says", [
    ({"target_reason": None}, "'target_reason'"), ({"target_probability": "high"}, '"target_probability" must be from 0 to 1, not high'),
    ({"target_probability": "1.01"}, '"target_probability" must be from 0 to 1, not 1.01'), ({"target_probability": "nan"}, '"target_probability" must be from 0 to 1, not nan'),
    ({"target_reason": "two words"}, '"target_reason" must be one word'), ({"input_text": " "}, '"input_text" is empty')])
def test_rows_that_cannot_be_read(change, says):
    with pytest.raises((ValueError, KeyError)) as error:
        Meetings._conversation({k: v for k, v in {**GOOD, **change}.items() if v is not None})
    assert str(error.value).startswith(says) and "\n" not in str(error.value)


def test_any_csv_of_these_columns_can_be_read():
    """Text of others, with their own words: a prompt and an answer, though no environment to play."""
    row = {"input_text": "Ann (CEO) meets Bob, 9:00", "target_probability": "0.732", "target_reason": "synergy", "ground_truth_prob": "0.7", "more": "x"}
    asked, answered = Meetings._conversation(row)
    assert asked["content"] == "Ann (CEO) meets Bob, 9:00"
    assert answered["content"] == '{"probability": 0.73, "reason": "synergy", "recommendation": "YES"}'


@pytest.mark.parametrize("flags", [["--rows", "x"], ["--seed", "-1"], ["--output", "no/such/folder/x.csv"], ["--row_count", "3"]])
def test_what_the_command_refuses(tmp_path, flags):
    done = subprocess.run([sys.executable, ROOT / "bench/meetings.py", *flags], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and "error: " in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr and not list(tmp_path.iterdir())
