r"""extras/rewards/exact.py: which is the answer, and what equals it. Formulas are compared as formulas: -\frac{1}{2} is not \frac{1}{2}."""
import random
import time

import pytest

from agent import Trajectory
from envs.answers import boxes
from extras.rewards.exact import exact, form, marked


def said(text, answer, calls=(), stop="done", results=()):
    """An episode of one turn."""
    turn = {"role": "assistant", "content": text, **({"tool_calls": list(calls)} if calls else {})}
    messages = [{"role": "user", "content": "?"}, turn, *({"role": "tool", "name": "f", "content": result} for result in results)]
    return Trajectory([1, 2], [0, 1], [0.0] * 2, [0.0], stop_reason=stop, messages=messages, info={"task": {"answer": answer}})


DIFFERENT = [
    (r"-\frac{1}{2}", r"\frac{1}{2}"), (r"\frac{1}{2}", r"\frac{12}{}"), (r"-\sqrt{2}", r"\sqrt{2}"), (r"\sqrt{-2}", r"\sqrt{2}"), (r"10^{-3}", "10^3"), (r"\{1,2\}", "12"), (r"\Delta", r"\delta"), (r"-\sin x", r"\sin x"),
    ("-x", "x"), ("- x", "x"), ("−x", "x"), ("-(x+1)", "(x+1)"), ("-a/b", "a/b"), ("-x^2", "x^2"), ("-sin(x)", "sin(x)"), ("-pi", "pi"), ("- 7", "7"), ("\u20117", "7"), ("3\u20145", "35"), ("1e-5", "1e5"), ("x=-1", "x=1"), ("f(x)=-2", "f(x)=2"), ("2-x", "2x"), ("a-b-c", "abc"), ("5 - 3", "5 3"),
    ("x>5", "x<5"), ("<5", "5"), ("x≤5", "x≥5"), ("x>5 and y<3", "x<5 and y>3"), ("X>5", "x>5"), ("a+b", "a-b"), ("ab+bc", "ab-bc"), ("xy-z+1", "xyz+1"), ("sin(x)+1", "sin(x)-1"), ("x = 5 or x = -5", "x = 5 or x = 5"), ("2(x+1)", "2x+1"), ("3-5", "35"),
    ("n!", "n"), ("4!", "4"), ("x^2", "x2"), ("x_1", "x1"), ("a*b", "ab"), ("2·3", "23"), ("2×3", "23"), ("1/2", "12"), ("3:4", "34"), ("|x|", "x"), ("~p", "p"), ("(1,2]", "[1,2)"), ("(1,2)", "[1,2]"), ("C++", "C"), ("O+", "O-"), ("-5 m/s", "5 m/s"), ("1,5", "15")]
EQUAL = [
    (r"\frac{1} {2}.", r"\frac{1}{2}"), (r"\( \frac{1}{2} \)", r"\frac{1}{2}"), (r"\frac{1}{2}\,x", r"\frac{1}{2}x"), ("x > 5", "x>5"), ("$x = 5$.", "x=5"), ("**x<5**", "x<5"), ("x ≤ 5", "x≤5"), ("1 / 2", "1/2"), ("(1, 2)", "(1,2)"), ("- 7", "-7"), ("−7", "-7"),
    ("-1,000", "-1000"), ("\u201cx < 5\u201d", "x<5"), ('"-7"', "-7"), ("(-2, 3)", "(-2,3)"), ("x \u2010 5", "x-5"), ("well\u2011known", "well-known"), ("+7", "7"), ("= 7", "7"), ("50%", "50"), (r"50\%", "50"), (r"\$18", "18"), ("(A)", "A"), ("A.", "A"), ("b", "B"), ("The U.S.", "US"), ("> Paris", "Paris"), ("COVID-19", "covid19"), ("Jay-Z", "jayz"), ("2001: A Space Odyssey", "2001 A Space Odyssey"), ("It was Henry V!", "it was Henry V"), ("the U.S.-Mexico border", "US-Mexico border"), ("3 : 4", "3:4"), ("an x-ray", "X-ray"), ("9-11 attacks", "the 9 - 11 attacks"), ("1990–95", "1990-95")]


@pytest.mark.parametrize("texts, value", [*((pair, 0.0) for pair in DIFFERENT), *((pair, 1.0) for pair in EQUAL)])
def test_formulas_and_words(texts, value):
    for one, other in (texts, texts[::-1]):
        assert exact(said(f"So it is $\\boxed{{{one}}}$.", other)) == value and exact(said(f"Answer: {one}", other)) == value
        assert exact(said(f"<answer>{one}</answer>", one)) == 1.0


def test_a_formula_equals_itself_and_no_other():
    """Whatever else is in it: only white space may differ."""
    rng = random.Random(0)
    parts = [r"\frac{1}{2}", r"\sqrt{x}", r"\pi", "-", "+", "<", "=", "!", "x", "Y", "7", "12", "(", ")", "^", ",", "{", "}", " ", "_"]
    drawn = {r"\pi" + "".join(rng.choices(parts, k=rng.randint(1, 3))) for _ in range(60)}
    pairs = [(one, other) for one in drawn for other in drawn]
    assert all((form(one) == form(other)) == (one.replace(" ", "").rstrip("_") == other.replace(" ", "").rstrip("_")) for one, other in pairs)


@pytest.mark.parametrize("text, stop, answer", [
    (r"It is $\fbox{42}$, not 41.", "done", "42"), (r"So $\boxed {42}$, as 41 fails.", "done", "42"), (r"We get $\boxed 5$ and not 6.", "done", "5"), (r"\boxed5", "done", "5"), (r"\boxed" "\n{42}", "done", "42"), (r"\framebox{8}", "done", "8"), (r"(\(\boxed -3\))", "done", "-3"),
    (r"\boxed{\frac{\sqrt{3}}{2^{4}}} yes", "done", r"\frac{\sqrt{3}}{2^{4}}"), (r"\boxed{\left\{1\right.}", "done", r"\left\{1\right."), (r"\boxed{\boxed{7}}", "done", "7"), (r"\\boxed{7}", "done", "7"), (r"{2 \boxed{7}", "done", "7"),
    (r"I used \boxed as asked: \boxed{3}. I used \boxed.", "done", "3"), (r"\boxed{42", "done", None), (r"\boxed{41} and \boxed{4", "done", None), (r"\boxed{5" "\nAnswer: 6", "done", None), ("<answer>4", "done", None), (r"41? \boxed", "max_tokens", None),
    ("Answer: 34\n\nThis follows since 34 = 2 * 17.", "done", "34"), ("#### 72\nI hope that helps.", "done", "72"), ("#### 72\r\nthanks", "done", "72"), ("**Answer:** 34\n(see above)", "done", "34"), ("Answer: 33\nor maybe 34", "done", "33"), ("Answer:\n\n34\nok", "done", "34"),
    ("**Answer:**\n34", "done", "34"), ("Answer:\n\\[\n34\n\\]\nok", "done", "34"), ("Answer: $$\n34\n$$", "done", "34"), ("Answer: 12\nNo, wait.\nAnswer: 34", "done", "34"), ("Answer:", "done", None),
    ("\\boxed{41}\nAnswer: 42", "done", "42"), (r"Answer: 41, I mean \boxed{42}", "done", "42"), ("<answer>#### 7</answer> ok", "done", "7"), ("<answer>\nAnswer: 7\n</answer>", "done", "7"), ("#### 6 <answer>7</answer>", "done", "7"),
    (r"\boxed{42} and th", "max_new_tokens", "42"), (r"\boxed{42}", "max_tokens", "42"), (r"\boxed 4", "max_tokens", None), ("Answer: 4", "max_new_tokens", None), ("Answer: 4\nAs", "max_tokens", "4"), ("<answer>4</answer>", "max_tokens", "4"), ("Paris", "max_new_tokens", None), ("Paris", "max_turns", "Paris")])
def test_the_answer_is_what_stands_last_and_was_not_cut(text, stop, answer):
    for wanted in {answer, "4", "42", "41", "6", "34"} - {None}:
        assert exact(said(text, wanted, stop=stop)) == float(wanted == answer), wanted


@pytest.mark.parametrize("stop", ["max_turns", "max_tool_calls", "max_tokens", "max_tool_tokens", "done"])
def test_a_search_that_a_limit_cut_is_no_answer(stop):
    """Otherwise an agent learns to search for guesses."""
    call = {"name": "search", "arguments": {"query": "Paris"}}
    for text, calls in (("", [call]), ("", [call, call]), ("Answer: Rome", [call])):
        assert exact(said(text, "Paris", calls, stop, results=["found"] * len(calls))) == float(stop == "done")
    assert exact(said("Answer: Paris", "Paris", [{"name": "look", "arguments": {}}], stop, results=["found"])) == float(stop == "done")
    assert exact(said("Answer: Paris\n<tool_call>{", "Paris", (), stop, results=["error: no JSON"])) == float(stop == "done")
    assert exact(said("", "7", [{"name": "submit", "arguments": {"value": r"\boxed{7}"}}], stop, results=["ok"])) == float(stop == "done")


@pytest.mark.parametrize("text", ["\\boxed{" * 10**4, "#### \\boxed{7}" * 3000, "(," * 10**4, "-" * 10**4, "<answer>" * 10**4, "answer\n" * 10**4, "\\boxed a{" * 10**4, "$ " * 10**4])
def test_no_text_takes_long(text):
    began = time.process_time()
    form(marked(text))
    boxes(text)
    assert time.process_time() - began < 2
