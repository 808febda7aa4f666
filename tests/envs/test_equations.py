"""envs/equations.py: terms, mechanics, rewards, the expert, tasks, and arguments nobody should send."""
import random
import re
from fractions import Fraction

import numpy as np
import pytest

import envs
from envs.equations import Equations, EquationsHard, parse_side, parse_term, show

ENVIRONMENTS = [Equations, EquationsHard]
STATE = ("left", "right", "factor", "solution", "best", "reward", "done", "solved", "_reward_parts")
LEVELS = [1, 2, 3]


def value_of(side: str, x: Fraction) -> Fraction:
    """An equation's side as Python's own arithmetic sees it: the parser of envs.equations has no part in it."""
    side = re.sub(r"(\d)(x|\()", r"\1*\2", side)
    side = re.sub(r"-(x|\()", r"-1*\1", side)
    return eval(re.sub(r"\d+", r"Fraction(\g<0>)", side), {"Fraction": Fraction, "x": x})


def holds(equation: str, x) -> bool:
    left, right = equation.split("=")
    return value_of(left, Fraction(x)) == value_of(right, Fraction(x))


def equation_in(text: str) -> str:
    return re.search(r"[-x0-9(][-+x0-9/() ]*=[-+x0-9/() ]+", text)[0]


def drawn(level, n, seed=0):
    rng = np.random.default_rng(seed)
    return [Equations._draw(level, rng) for _ in range(n)]


def environment(equation, cls=Equations, **options):
    env = cls()
    env.reset(equation=equation, **options)
    return env


# ------------------------------------------------------------------------------------------------------------------ terms
@pytest.mark.parametrize("text, a, b", [
    ("7", 0, 7), ("+7", 0, 7), ("-7", 0, -7), ("3x", 3, 0), ("-3x", -3, 0), ("x", 1, 0), ("-x", -1, 0), ("x/4", Fraction(1, 4), 0),
    ("-x/4", Fraction(-1, 4), 0), ("3x/4", Fraction(3, 4), 0), ("3/4", 0, Fraction(3, 4)), (" 3 x ", 3, 0), ("-0", 0, 0), ("0x", 0, 0),
    ("007", 0, 7), ("3/4x", Fraction(3, 4), 0)])
def test_terms(text, a, b):
    assert parse_term(text) == (a, b)


@pytest.mark.parametrize("text", ["", " ", "+", "-", "--3", "3y", "x3", "3*x", "2^3", "3.5", "1e3", "inf", "nan", "0x10", "1_0", "４２", "²", "٣", "x/x",
                                  "3/", "/3", "3x/", "3 + x", "(3)", "1" * 10, "1/" + "1" * 10, "x\n", "3\n", "３x", "1//2", "7/4/2", "1/0", "x/0", "X", "\ud800", "\0"])
def test_what_is_no_term(text):
    with pytest.raises(ValueError):
        parse_term(text)


def test_show_and_parse_are_inverse():
    rng = random.Random(0)
    for _ in range(2000):
        a, b = (Fraction(rng.randint(-30, 30), rng.randint(1, 12)) for _ in range(2))
        assert parse_side(show(a, b)) == (a, b), show(a, b)
        assert value_of(show(a, b), Fraction(5, 7)) == a * Fraction(5, 7) + b, show(a, b)


@pytest.mark.parametrize("a, b, text", [(3, 7, "3x + 7"), (1, -2, "x - 2"), (-1, 0, "-x"), (Fraction(1, 4), 0, "x/4"), (0, 0, "0"), (0, -3, "-3"),
                                        (Fraction(-3, 4), Fraction(1, 2), "-3x/4 + 1/2")])
def test_show(a, b, text):
    assert show(Fraction(a), Fraction(b)) == text


@pytest.mark.parametrize("level", LEVELS)
def test_reset_reads_what_is_drawn_and_solves_it(level):
    for equation in drawn(level, 300):
        env = environment(equation)
        assert holds(equation, env.solution)
        assert env.reset(equation=equation, unknown_column=1) == f"Solve for x: {env._equation()}"
        assert holds(env._equation(), env.solution) and env._equation().replace(" ", "") == equation.replace(" ", "")


@pytest.mark.parametrize("equation", ["2x + 1 = 2x + 3", "3 = 4", "x + 1 = x + 1", "hello", "x = 1 = 2", "", "x/0 = 3", "x + = 3", "2x - -5 = 3"])
def test_reset_refuses_what_has_no_single_solution(equation):
    with pytest.raises(ValueError):
        environment(equation)


# -------------------------------------------------------------------------------------------------------------- mechanics
@pytest.mark.parametrize("level", LEVELS)
def test_every_action_keeps_the_solution_and_pays_only_for_simpler(level):
    """Random walks: each answer is an equivalent equation, or a refusal that changed nothing; circles pay nothing."""
    rng = random.Random(level)
    for equation in drawn(level, 60, seed=5):
        env = environment(equation)
        best, paid = env._distance(), 0.0
        full = 2.0 * best
        for _ in range(25):
            name = rng.choice(["add_terms", "subtract_terms", "multiply_terms", "divide_terms"])
            before, reward = env._equation(), env.reward
            text, error = envs.call(env, name, {"terms": rng.choice(["1", "2", "3", "-4", "x", "2x", "-x", "x/2", "0", "1/3", str(rng.randint(-30, 30))])})
            if error or text.startswith("error"):
                assert env._equation() == before and env.reward == reward
                continue
            assert text == env._equation() and holds(text, env.solution), (equation, text)
            distance = env._distance()
            assert env.reward - reward == pytest.approx(2.0 * max(0, best - distance))
            best, paid = min(best, distance), env.reward
        assert 0 <= paid <= full and env._reward_parts == {"actions": paid, "answer": 0.0} and env.get_reward() == env.reward == paid


def test_actions_by_hand():
    env = environment("3x + 7 = 16")
    assert env.subtract_terms("7") == "3x = 9" and env.reward == 2.0
    assert env.add_terms("7") == "3x + 7 = 16" and env.reward == 2.0        # back
    assert env.subtract_terms("7") == "3x = 9" and env.reward == 2.0        # and forth: nothing
    assert env.divide_terms("3") == "x = 3" and env.reward == 4.0
    assert env.multiply_terms("3") == "3x = 9" and env.divide_terms("3") == "x = 3" and env.reward == 4.0
    assert env.state_answer("3") == "right" and env.reward == 9.0 and env.done and env._check()
    assert env._reward_parts == {"actions": 4.0, "answer": 5.0}


def test_brackets_by_hand():
    env = environment("2(x + 3) = 10")
    assert env.divide_terms("2") == "x + 3 = 5" and env.subtract_terms("3") == "x = 2" and env.state_answer("2") == "right"
    env = environment("2(x + 3) = 10")
    assert env.subtract_terms("6") == "2x = 4"
    env = environment("2(x + 3) = 10")
    assert holds(env.multiply_terms("3"), 2) and env.reward == 0


def test_terms_with_x_on_both_sides():
    env = environment("5x + 3 = 2x + 9")
    assert env.subtract_terms("2x") == "3x + 3 = 9" and env.reward == 2.0
    env.subtract_terms("3x")
    assert env._equation() == "3 = 9 - 3x" or holds(env._equation(), 2)


@pytest.mark.parametrize("answer", ["3", " 3 ", "+3", "6/2", "03"])
def test_right_answers(answer):
    env = environment("3x + 7 = 16")
    assert envs.call(env, "state_answer", {"value": answer}) == ("right", False) and env.reward == 5.0


@pytest.mark.parametrize("answer", ["4", "-3", "0", "3/2"])
def test_a_wrong_answer_pays_nothing_and_ends(answer):
    env = environment("3x + 7 = 16")
    assert envs.call(env, "state_answer", {"value": answer}) == ("wrong", False)
    assert env.reward == 0.0 and env.done and not env._check() and envs.valid_actions(env) == []


def test_the_answer_is_stated_once():
    """In one turn a model may write several calls; TRL goes on after `done`. Neither may pay an answer twice, or a second guess."""
    env = environment("x + 3 = 5")
    assert env.state_answer("2") == "right"
    assert env.state_answer("2").startswith("error") and env.reward == 5.0
    env = environment("x + 3 = 5")
    assert env.state_answer("9") == "wrong"
    assert env.state_answer("2").startswith("error") and env.reward == 0.0 and not env._check()


def test_an_answer_that_is_no_number_does_not_end_the_episode():
    for text in ("x", "three", "x = 3", "", "1/0"):
        env = environment("3x + 7 = 16")
        assert envs.call(env, "state_answer", {"value": text})[1] and not env.done and env.reward == 0


def test_identify_operation_pays_nothing():
    env = environment("3x + 7 = 16")
    said = {operation: envs.call(env, "identify_operation", {"operation": operation})[0] for operation in
            ("add", "subtract", "multiply", "divide", "answer")}
    assert [operation for operation, text in said.items() if ": yes." in text] == ["subtract"] and env.reward == 0
    assert envs.call(env, "identify_operation", {"operation": "square"})[1]
    env = environment("x = 4")
    assert ": yes." in env.identify_operation("answer")


HOSTILE = ["1/0", "x/0", "0/0", "-0", "0", "9" * 9, "9" * 5000, "-" * 1000, "x" * 10_000, "１", "٣", "²", "1" + "0" * 8, "1/" + "9" * 9, "x/" + "9" * 9,
           "", " ", "\n", "nan", "inf", "1e9", "0x1", "__import__('os')", "{0}", "%s", "\ud800", "\0", "<|im_end|>", "3;3", "3=3", None, True, [], {}, 10**400, 1.5,
           float("nan"), float("inf"), 3]


@pytest.mark.parametrize("equation", ["3x + 7 = 16", "2(x + 3) = 10", "5x + 3 = 2x + 9", "x/4 = 2"])
@pytest.mark.parametrize("name", ["add_terms", "subtract_terms", "multiply_terms", "divide_terms", "state_answer", "identify_operation"])
def test_hostile_arguments_never_crash_and_never_pay(name, equation):
    for value in HOSTILE:
        env = environment(equation)
        key = {"state_answer": "value", "identify_operation": "operation"}.get(name, "terms")
        text, error = envs.call(env, name, {key: value})
        assert isinstance(text, str) and len(text) <= 400
        assert holds(env._equation(), env.solution) and len(env._equation()) < 60 and np.isfinite(env.reward)
        if error:
            assert env.reward == 0 and not env.done


def test_zero_is_refused():
    for name in ("multiply_terms", "divide_terms"):
        for zero in ("0", "-0", "0/5"):
            env = environment("3x + 7 = 16")
            text, _ = envs.call(env, name, {"terms": zero})
            assert text.startswith("error") and env._equation() == "3x + 7 = 16" and env.reward == 0


def test_reset_renews_all_state():
    used, task = Equations(), {"equation": "3x + 7 = 16", "noise_seed": 4, "noise": 0.5}
    used.reset(equation="2(x + 3) = 10")
    used.divide_terms("2")
    used.state_answer("2")
    first = used.reset(**task)
    fresh = Equations()
    assert first == fresh.reset(**task)
    assert {k: getattr(used, k) for k in STATE} == {k: getattr(fresh, k) for k in STATE}
    assert vars(used).keys() == vars(fresh).keys() and used._rng.random() == fresh._rng.random()
    assert not used.done and used.reward == 0.0 and not used._check()


# ------------------------------------------------------------------------------------------------------------- the expert
def play(env, turns=40):
    calls = 0
    while calls < turns and (turn := env._expert()):
        for call in turn:
            text, error = envs.call(env, call["name"], call["arguments"])
            assert not error, (call, text)
            calls += 1
    return calls


@pytest.mark.parametrize("level", LEVELS)
def test_the_expert_solves_every_level_within_the_budget(level):
    most = (EquationsHard if level == 3 else Equations).max_turns
    for equation in drawn(level, 300, seed=1):
        env = environment(equation)
        steps = env._distance()
        assert play(env) == steps + 1 <= most, equation
        assert env.solved and env.reward == pytest.approx(5.0 + 2.0 * steps) and env._expert() == []


@pytest.mark.parametrize("cls", ENVIRONMENTS)
def test_the_expert_solves_its_own_tasks_on_a_well_formed_path(cls):
    for task in cls._tasks("test", 200, 0):
        env = cls()
        env.reset(**task)
        while calls := env._expert():
            assert len(calls) == 1 and set(calls[0]) == {"name", "arguments"} and calls[0]["name"] in envs.tools(env)
            assert not envs.call(env, calls[0]["name"], calls[0]["arguments"])[1]
        assert env._check()


def test_noise_makes_the_expert_worse():
    def success(noise):
        done = 0
        for task in Equations._tasks("train", 150, 1):
            env = Equations()
            env.reset(**task, noise=noise)
            play(env, Equations.max_turns)
            done += env._check()
        return done / 150
    clean, some, much = success(0.0), success(0.3), success(0.9)
    assert clean == 1.0 > some > much


def test_noise_is_a_function_of_the_seed():
    def names(seed):
        env = environment("3x + 7 = 16", noise=0.5, noise_seed=seed)
        return [env._expert()[0]["name"] for _ in range(20)]
    assert names(1) == names(1) != names(2)


# ------------------------------------------------------------------------------------------------------------------ tasks
def test_ten_thousand_distinct_train_tasks_and_none_of_them_in_test():
    train, test = ({t["equation"] for t in Equations._tasks(split, 10_000, 0)} for split in ("train", "test"))
    assert len(train) == 10_000 and len(test) > 500 and not train & test
    other = {t["equation"] for t in Equations._tasks("test", 300, 99)}
    assert not other & {t["equation"] for t in Equations._tasks("train", 5000, 7)} and other <= test | other


@pytest.mark.parametrize("cls", ENVIRONMENTS)
def test_tasks_follow_the_seed(cls):
    a, b, c = cls._tasks("train", 50, 0), cls._tasks("train", 50, 0), cls._tasks("train", 50, 1)
    assert a == b != c and cls._tasks("train", 20, 0) == a[:20] and len({t["equation"] for t in a}) == 50
    assert all(type(t["noise_seed"]) is int for t in a) and cls._tasks("train", 0, 0) == []


def test_hard_is_harder_and_easy_is_easy():
    def both(t):
        return "x" in t["equation"].split("=")[1] or "(" in t["equation"]
    assert all(map(both, EquationsHard._tasks("train", 200, 0))) and not any(map(both, Equations._tasks("train", 200, 0)))
    rows = drawn(1, 200)
    assert all(environment(e)._distance() == 1 for e in rows) and all(environment(e)._distance() in (1, 2) for e in drawn(2, 200))
    assert max(environment(e)._distance() for e in drawn(3, 200)) == 3


def test_registry():
    assert envs.load("equations") is Equations and envs.load("equations_hard") is EquationsHard
    names = {"add_terms", "subtract_terms", "multiply_terms", "divide_terms", "identify_operation", "state_answer"}
    assert set(envs.tools(Equations)) == names == {s["function"]["name"] for s in envs.schemas(EquationsHard)}


@pytest.mark.parametrize("equation, calls", [
    ("3(2x + 1) = 3x + 9", 3),  # divide by 3, subtract x, subtract 1: x = 2
    ("2(x + 3) = x + 8", 4),  # divide by 2, subtract x/2, subtract 3, multiply by 2
])
def test_a_bracket_with_x_on_the_right_is_as_far_as_its_expert(equation, calls):
    env = environment(equation)
    assert env._distance() == calls
    while env._best_call()["name"] != "state_answer":
        call = env._best_call()
        envs.call(env, call["name"], call["arguments"])
        calls -= 1
    assert calls == 0
