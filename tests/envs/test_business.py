"""envs/business.py: values and reward parts by hand, cases, and agents that must earn less than the expert."""
import itertools
import re

import pytest

import envs
from envs.business import MAX_SECOND, Business, Case, draw_case
from tests.agents import at_random, expert, play, repeating, silent

LEVELS = {level: envs.with_options(Business, {"level": level}) for level in (1, 2, 3)}
# Worth at 10 %: one 0.8 x (55/1.1 + 60.5/1.21) - 40 = 40; two 0.75 x 100 - 40 = 35, three 0.9 x 100 - 60 = 30, four 0.5 x 200 - 40 = 60,
# five 0.7 x 50 - 40 = -5.
CASE = Case(budget=50, rate=10, costs=dict(one=40, two=40, three=60, four=40, five=40),
            flows=dict(one=[55, 60.5], two=[55, 60.5], three=[55, 60.5], four=[110, 121], five=[0, 60.5]),
            chances=dict(one=80, two=75, three=90, four=50, five=70))


def environment(case=CASE):
    env = Business()
    env.reset(123456)
    env._case = case
    return env


def decided(option):
    env = environment()
    env.make_decision(option)
    return env


# ------------------------------------------------------------------------------------------------------------ by hand
@pytest.mark.parametrize("option, value", [("one", 40), ("two", 35), ("three", 30), ("four", 60), ("five", -5)])
def test_the_value_is_the_expected_net_present_value(option, value):
    assert CASE.value(option) == pytest.approx(value)


def test_only_what_is_feasible_and_safe_is_ranked():
    assert CASE.ranked() == ["one", "two", "five"]
    assert CASE.value("one", chance=100) == pytest.approx(60)


@pytest.mark.parametrize("option, feasibility, risk, gain", [
    ("one", 0.25, 0.25, 0.5),
    ("two", 0.25, 0.25, 0.5 * 35 / 40),
    ("three", 0.0, 0.25, 0.0),  # too expensive: its return cannot be had
    ("four", 0.25, 0.0, 0.5),  # too risky, and worth more than the best
    ("five", 0.25, 0.25, 0.0)])  # worth less than nothing
def test_the_parts_of_a_decision(option, feasibility, risk, gain):
    env = decided(option)
    assert env._reward_parts == {"feasibility": feasibility, "risk": risk, "return": pytest.approx(gain), "fees": 0}
    assert env.reward == env.get_reward() == pytest.approx(feasibility + risk + gain)
    assert env.done and env._check() == (option == "one")


def test_each_look_has_its_fee_and_a_second_decision_is_refused():
    env = environment()
    assert env.analyze_situation() == "budget 50, rate 10 %, chance 70 %"
    assert env.identify_options().splitlines()[0] == "one: cost 40, flows 55 60.5"
    assert env.evaluate_risks("two") == env.evaluate_risks("two") == "two: chance 75 %"
    assert env.reward == env.get_reward() == pytest.approx(-0.04)
    assert env.make_decision("two") == "wrong" and env.make_decision("one").startswith("error")
    assert env.get_reward() == pytest.approx(0.25 + 0.25 + 0.5 * 35 / 40 - 0.04)


@pytest.mark.parametrize("tool", ["evaluate_risks", "make_decision"])
def test_an_unknown_option_is_told_costs_nothing_and_decides_nothing(tool):
    env = environment()
    assert envs.call(env, tool, {"option": "seven"}) == ("error: ValueError: no option 'seven'; options: one, two, three, four, five", True)
    assert env.get_reward() == 0 and not env.done


# ----------------------------------------------------------------------------------------------------------- the cases
@pytest.mark.parametrize("level", LEVELS)
def test_the_best_option_is_clear_and_all_that_decides_is_hidden(level):
    for number in range(100_000, 100_200):
        case = draw_case(number, level)
        best, second = [case.value(name) for name in case.ranked()[:2]]
        assert 0 < best and second <= MAX_SECOND * best
        assert len(case.costs) == {1: 4, 2: 4, 3: 6}[level] and {len(flows) for flows in case.flows.values()} == {{1: 1, 2: 3, 3: 5}[level]}
        env = LEVELS[level]()
        assert re.findall(r"\d+", env.reset(case=number, level=level)) == [str(number)]
        if level == 1:
            assert {case.costs[name] for name in case.ranked()} == {case.budget} and max(*case.costs.values(), *itertools.chain(*case.flows.values())) < 100


def test_the_most_promising_option_is_often_not_the_best():
    """Neither the highest flows nor the highest value with a chance of 100 % tells the best option."""
    cases = [draw_case(number, 1) for number in range(100_000, 100_300)]
    promising = [max(case.costs, key=lambda name: case.value(name, chance=100)) for case in cases]
    assert 0.2 < sum(name == case.ranked()[0] for name, case in zip(promising, cases)) / 300 < 0.6


# ---------------------------------------------------------------------------------------------------------- the agents
def deciding_at_once(env, seen):
    return [{"name": "make_decision", "arguments": {"option": "two"}}]


def pasting(env, seen):
    """Decide for all that a tool said."""
    if len(seen) == 1:
        return [{"name": "identify_options", "arguments": {}}]
    return [{"name": "make_decision", "arguments": {"option": seen[-1]}}]


@pytest.mark.parametrize("level", LEVELS)
def test_the_expert_solves_every_task_and_others_earn_less(level):
    tasks = LEVELS[level]._tasks("test", 200, seed=0)
    reward, solved = play(LEVELS[level], expert, tasks)
    assert reward > 0.9 and solved == 1
    for agent in (silent, repeating, at_random, deciding_at_once, pasting):
        less, rarely = play(LEVELS[level], agent, tasks)
        assert less < reward - 0.3 and rarely < 0.3, agent


def test_the_expert_decides_by_what_it_has_seen():
    """It looks at every option that could still be the best, so that hiding the rest changes nothing."""
    for number in range(100_000, 100_100):
        env = LEVELS[3]()
        env.reset(number, level=3)
        while not env.done:
            (call,) = env._expert()
            envs.call(env, call["name"], call["arguments"])
        unseen = [name for name in env._case.costs if name not in env._looks and env._case.is_feasible(name)]
        assert env._decision in env._looks
        assert all(env._case.value(name, chance=100) <= env._case.value(env._decision) for name in unseen)


def test_a_noisy_expert_decides_wrongly_as_often_as_the_noise_says():
    tasks = [{**task, "noise": 0.6, "noise_seed": i} for i, task in enumerate(Business._tasks("train", 500, seed=0))]
    assert play(Business, expert, tasks)[1] == pytest.approx(0.4, abs=0.08)


def test_tasks_are_a_function_of_their_arguments_and_disjoint():
    train, test = Business._tasks("train", 500, seed=0), Business._tasks("test", 500, seed=0)
    assert train == Business._tasks("train", 500, seed=0) != Business._tasks("train", 500, seed=1)
    assert not {task["case"] for task in train} & {task["case"] for task in test}


@pytest.mark.slow
def test_more_cases_than_there_are_can_be_asked():
    assert len(Business._tasks("test", 100_000, seed=0)) == 80_000
