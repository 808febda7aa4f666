"""Sampled text -> tool calls, in Hermes's form and as JSON: good calls beside bad ones, and never an exception, whatever is written.

These are the forms that core reads alone. With the markup of other families beside them the same tests pass.
"""

import json
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.tool_calls import MAX_CALLS, after_thought, parse_tool_calls


CALL = {"name": "f", "arguments": {"a": 1, "b": "x"}}
GOOD = json.dumps(CALL)
FORMS = {
    "hermes": f"<tool_call>\n{GOOD}\n</tool_call>",
    "hermes, unclosed": f"<tool_call>{GOOD}",
    "hermes, list": f"<tool_call>[{GOOD}]</tool_call>",
    "hermes, arguments encoded twice": "<tool_call>"
    + json.dumps({"name": "f", "arguments": GOOD[27:-1]})
    + "</tool_call>",
    "bare": GOOD,
    "bare, parameters": '{"name": "f", "parameters": {"a": 1, "b": "x"}}',
    "bare, list": f" [{GOOD}] ",
    "openai": json.dumps({"type": "function", "function": CALL}),
    "openai, string": json.dumps({"id": "1", "type": "function", "function": {"name": "f", "arguments": GOOD[27:-1]}}),
    "llama, typed": '{"type": "function", "name": "f", "parameters": {"a": 1, "b": "x"}}',
    "after a thought": f"<think>\nI could <tool_call> now.\n</think>\n\n{GOOD}",
    "after a thought the prompt opened": f"I wonder.\n</think>\n\n<tool_call>{GOOD}</tool_call>",
}
ANSWERS = [
    "",
    "It is 42.",
    "The set {1, 2} and f(x) = {x: x > 0}",
    '{"answer": 42}',
    "[1, 2, 3]",
    "[sin(x)]",
    "{",
    "[[",
    "{x}",
    '{"name": "Ada"}',
    '{"name": "Ada", "age": }',
    "[see(1), f(a=b)]",
    "if (a < b) { return; }",
    "to=functions. are fine",
    '<think>{"name": "f", "arguments": {}}</think>no',
    "1e999",
    "NaN",
    "```\n{\n```",
    "\x00",
    "</tool_call>",
]


def test_a_function_may_have_a_name_that_is_not_english():
    assert parse_tool_calls('{"name": "猜", "arguments": {"数字": 7}}') == ("", [{"name": "猜", "arguments": {"数字": 7}}], [])


@pytest.mark.parametrize("mentioned", [GOOD, f"<tool_call>{GOOD}</tool_call>", "<tool_call> is the tag", "<function=f>", f"<tool_call>{GOOD}</tool_call> or <tool_call>"])
def test_a_call_that_a_closed_thought_mentions_is_not_made(mentioned):
    """The prompt may have opened the thought, so that the text begins inside it."""
    for begins in ("I could", "[Hm] I could", "{x} I could", "\n<think>I could"):
        thought = f"{begins} write {mentioned} but that is wrong.\n</think>"
        assert parse_tool_calls(f"{thought}\n\nIt is 3.") == (f"{thought}\n\nIt is 3.".strip(), [], [])
        assert parse_tool_calls(f"{thought}\n\n<tool_call>{GOOD}</tool_call>")[1:] == ([CALL], [])


@pytest.mark.parametrize("thought, closing", [("<think>\nA?", "\n</think>\n\n"), ("\n<think>A?", "</think>\n")])
def test_what_follows_a_thought(thought, closing):
    mentioned = f"{thought} <tool_call>{GOOD}</tool_call> {closing}B"
    assert after_thought(thought + closing + "B").strip() == after_thought(f"A?{closing}B").strip() == "B"
    assert after_thought(thought) == "" and after_thought(f"B, not {thought}") == f"B, not {thought}" and parse_tool_calls(mentioned) == (mentioned.strip(), [], [])


def test_the_end_of_a_thought_inside_an_argument_ends_none():
    argument = {"name": "f", "arguments": {"b": "a</think>b"}}
    for text in (json.dumps(argument), f" {json.dumps(argument)}; {GOOD}", f"<tool_call>{json.dumps(argument)}</tool_call>", f"Hm. <tool_call>{json.dumps(argument)}</tool_call>"):
        assert parse_tool_calls(text)[1][0] == argument


@pytest.mark.parametrize("form", FORMS)
def test_forms(form):
    assert parse_tool_calls(FORMS[form])[1:] == ([CALL], [])


@pytest.mark.parametrize("text", ANSWERS)
def test_answers(text):
    assert parse_tool_calls(text) == (text.strip(), [], [])


@pytest.mark.parametrize("form", [f for f in FORMS if not f.startswith(("bare", "openai", "llama, typed"))])
def test_forms_in_prose_and_twice(form):
    text = FORMS[form].removeprefix("<think>\nI could <tool_call> now.\n</think>\n\n")
    if text != GOOD and "</think>" not in text:
        assert parse_tool_calls("Let me see.\n" + text)[1:] == ([CALL], [])
        content, calls, errors = parse_tool_calls(text + "\n" + text)
        assert (calls, errors) == ([CALL, CALL], [])


def tagged(body):
    return f"<tool_call>{body}</tool_call>"


MUST = "arguments must be JSON with finite numbers and whole characters: "
NOT_JSON = "the tool call is not valid JSON: Expecting property name enclosed in double quotes at character"


@pytest.mark.parametrize(
    "body, why",
    {
        "[]": "a tool call without a function",
        "[1]": "a tool call must be an object with a name and arguments",
        '"f"': "expected a JSON object or a function name, got '\"f\"</tool_call><tool'",
        "{}": "'None' is not a function name",
        "": "expected a JSON object or a function name, got '</tool_call><tool_ca'",
        '{"name": "f", "arguments": {"a": 1,}}': f"{NOT_JSON} 35",
        '{"name": "f", "arguments": [1]}': "the arguments of f must be an object, got list",
        '{"name": "f", "arguments": null}': "the arguments of f must be an object, got NoneType",
        '{"name": "f", "arguments": "[1]"}': "the arguments of f must be an object, got list",
        '{"name": "f", "arguments": "{"}': f"{NOT_JSON} 1",
        '{"name": "f", "args": {"a": 1}}': 'the arguments of f must stand under "arguments"',  # it would run without any
        '{"name": "f", "a": 1}': 'the arguments of f must stand under "arguments"',
        '{"type": "function", "function": {"name": "f", "description": "Do f.", "parameters": {"type": "object"}}}': 'the arguments of f must stand under "arguments"',  # its definition
        '{"name": 3, "arguments": {}}': "'3' is not a function name",
        '{"name": "rm -rf /", "arguments": {}}': "'rm -rf /' is not a function name",
        '{"name": "f<|im_end|>", "arguments": {}}': "'f<|im_end|>' is not a function name",
        '{"name": "f", "arguments": {"a": 1, "a": 2}}': "an argument is given twice",
        '{"name": "f", "arguments": {"a": NaN}}': f"{MUST}Out of range float values are not JSON compliant",
        '{"name": "f", "arguments": {"a": -Infinity}}': f"{MUST}Out of range float values are not JSON compliant",
        '{"name": "f", "arguments": {"a": 1e999}}': f"{MUST}Out of range float values are not JSON compliant",
        '{"name": "f", "arguments": {"a": %s}}' % ("9" * 5000): None,
        '{"name": "f", "arguments": {"a": "\\ud800"}}': f"{MUST}'utf-8' codec can't encode character '\\ud800' in position 7: surrogates not allowed",
        '{"name": "f", "arguments": {"\\udc00": 1}}': f"{MUST}'utf-8' codec can't encode character '\\udc00' in position 2: surrogates not allowed",
        '{"name": "f", "arguments": {"a": %s}}' % ("[" * 1000 + "]" * 1000): "the tool call is nested too deep",
        '{"name": "f", "arguments": %s}' % ('{"a":' * 100_000): "the tool call is nested too deep",
        '{"name": "f", "arguments": {}} and more': "unexpected 'and more</tool_call>' after the JSON of a tool call",
        "[(lambda: 1)()]": "the tool call is not valid JSON: Expecting value at character 1",
    }.items(),
    ids=lambda text: str(text)[:20],
)
def test_bad_calls_become_short_errors(body, why):
    """To the letter: a policy is trained on what it is told."""
    good = {"name": "g", "arguments": {}}
    content, calls, errors = parse_tool_calls(
        "Hm. " + tagged(body) + "<tool_call>" + json.dumps(good) + "</tool_call> ok"
    )
    assert calls == [good] and len(errors) == 1 and content.startswith("Hm.") and content.endswith("ok")
    assert errors[0].startswith("error: ") if why is None else errors[0] == f"error: {why}"  # None: in Python's words
    assert len(errors[0]) <= 300 and errors[0].isprintable() and errors[0].encode()


def test_arguments_beside_the_function_are_its_own():
    text = '<tool_call>{"type": "function", "function": {"name": "f"}, "arguments": {"a": 1}}</tool_call>'
    assert parse_tool_calls(text)[1:] == ([{"name": "f", "arguments": {"a": 1}}], [])
    text = '<tool_call>{"name": "g", "function": {"name": "f", "arguments": {"a": 1}, "parameters": {"b": 2}}}</tool_call>'
    assert parse_tool_calls(text)[1:] == ([{"name": "f", "arguments": {"a": 1}}], [])


@pytest.mark.parametrize("encoded, arguments", [("", {}), ("  ", {}), ('\n{"a": 1} ', {"a": 1})])
def test_arguments_encoded_twice_may_be_empty_or_stand_among_spaces(encoded, arguments):
    assert parse_tool_calls(json.dumps({"name": "f", "arguments": encoded}))[1:] == ([{"name": "f", "arguments": arguments}], [])


def test_64_levels_of_lists_and_objects_are_read_and_not_one_more():
    for levels, says in ((64, []), (65, ["error: arguments must be JSON with finite numbers and whole characters: nested too deep"])):
        inner = "[" * (levels - 1) + "]" * (levels - 1)
        _, calls, errors = parse_tool_calls(tagged(f'{{"name": "f", "arguments": {{"a": {inner}}}}}'))
        assert errors == says and len(calls) == (not says)


def test_of_a_bad_call_nothing_is_left_in_the_answer():
    assert parse_tool_calls("Hm. " + tagged('{"name": ') + " ok")[0] == "Hm.  ok"


def test_calls_with_commas_between_them_and_before_a_later_thought():
    call = '{"name": "f", "arguments": {}}'
    assert [len(part) for part in parse_tool_calls(f"{call}, {call}")[1:]] == [2, 0]
    # An untrained model invents the result and thinks about it.
    invented = f"<tool_call>{call}</tool_call>\n<tool_response>5</tool_response>\n<think>Got 5.</think>\nIt is 5."
    assert len(parse_tool_calls(invented)[1]) == 1


LONG = "9" * 5000


@pytest.mark.parametrize("number", [LONG, "-" + LONG, "9" * 400, LONG + ".5", "1e" + LONG, "0x" + "f" * 5000, "-0x" + "f" * 400])
def test_numbers_longer_than_any_float_end_no_run(number):
    """Python refuses to read and to print integers of more than 4,300 digits: neither may end a run."""
    texts = [f'{{"name": "f", "arguments": {{"a": [{number}]}}}}', f'{{"name": {number}, "arguments": {{}}}}',
             json.dumps({"name": "f", "arguments": f'{{"a": {number}}}'})]
    for text in texts + [tagged(text) for text in texts]:
        content, calls, errors = parse_tool_calls(text)
        json.dumps([content, calls, errors], allow_nan=False).encode()
        assert all(len(error) <= 300 for error in errors)


def test_a_long_number_that_is_a_float_is_read():
    number = "9" * 308
    assert parse_tool_calls(tagged(f'{{"name": "f", "arguments": {{"a": {number}}}}}'))[1] == [{"name": "f", "arguments": {"a": int(number)}}]


def test_two_calls_nested_and_mixed():
    assert parse_tool_calls(f"<tool_call>{GOOD}</tool_call><tool_call>{GOOD}</tool_call>")[1:] == ([CALL, CALL], [])
    assert parse_tool_calls(f"<tool_call><tool_call>{GOOD}</tool_call></tool_call>")[1] == [CALL]
    assert parse_tool_calls(f"<tool_call>[{GOOD}, 7, {GOOD}]</tool_call>")[1:] == (
        [CALL, CALL],
        ["error: a tool call must be an object with a name and arguments"],
    )
    assert parse_tool_calls(f"{GOOD}; {GOOD}")[1:] == ([CALL, CALL], [])
    assert parse_tool_calls(f"{GOOD} That is all.") == ("That is all.", [CALL], [])
    for text in (f"{GOOD}; {GOOD[:-5]}", f"<tool_call>{GOOD}\n{GOOD[:-5]}</tool_call>", f"<tool_call>{GOOD}; {GOOD}; {{"):
        content, calls, errors = parse_tool_calls(text)
        assert content == "" and calls == [CALL] * (text.count(GOOD)) and len(errors) == 1, text
    assert parse_tool_calls('{"name": "f", "arguments": {"a": 1')[2][0].startswith(
        "error: the tool call is not valid JSON"
    )


def test_tags_and_thoughts_inside_strings_are_strings():
    for text in (
        "</tool_call>",
        "<tool_call>",
        "</think>",
        '<tool_call>{"name": "g", "arguments": {}}</tool_call>',
        "\\",
        '"}',
    ):
        call = {"name": "say", "arguments": {"text": text}}
        assert parse_tool_calls(tagged(json.dumps(call)))[1:] == ([call], [])
        assert parse_tool_calls(json.dumps(call))[1:] == ([call], [])


def test_a_cut_call_is_an_error_and_not_half_a_call():
    text = FORMS["hermes"]
    for cut in range(len("<tool_call>\n") + 2, len(text) - len("\n</tool_call>")):
        assert parse_tool_calls(text[:cut])[1] == [] and len(parse_tool_calls(text[:cut])[2]) == 1


def test_too_many_calls():
    for text in (f"<tool_call>{GOOD}</tool_call>" * 100, f"[{', '.join([GOOD] * 100)}]", f"{GOOD}; " * 100):
        content, calls, errors = parse_tool_calls(text)
        assert calls == [CALL] * MAX_CALLS and errors == [f"error: only {MAX_CALLS} calls a turn are read"]
    assert parse_tool_calls(f"<tool_call>{GOOD}</tool_call>" * MAX_CALLS)[1:] == ([CALL] * MAX_CALLS, [])
    # Those that cannot be read count too. The model sees the first error and the limit.
    _, calls, errors = parse_tool_calls(f"<tool_call>{GOOD}</tool_call>" + "<tool_call>{</tool_call>" * 100)
    assert calls == [CALL] and len(errors) == 2 and "valid JSON" in errors[0] and errors[1] == f"error: only {MAX_CALLS} calls a turn are read"


PIECES = [*FORMS.values(), GOOD, "<tool_call>", "</tool_call>", "<think>", "</think>", "{", "}", "[", "]", '"', "\\", ":", ",", "\ud800", "\x00", "é", "(",
    ")", "=", "1", "-", "*", "NaN", '{"name": "f", "arguments": ', "\n", " ", "999999999999", "1e999", ";"]


def test_never_raises_and_errors_are_short():
    rng = random.Random(0)
    for _ in range(20_000):
        text = "".join(rng.choices(PIECES, k=rng.randrange(1, 9)))
        for _ in range(rng.randrange(3)):
            at = rng.randrange(len(text) + 1)
            text = (
                text[:at]
                + rng.choice(["", chr(rng.randrange(128)), rng.choice(PIECES)])
                + text[at + rng.randrange(3) :]
            )
        content, calls, errors = parse_tool_calls(text)
        assert isinstance(content, str) and len(calls) <= MAX_CALLS
        assert all(e.startswith("error: ") and len(e) <= 300 and e.encode() for e in errors)
        for call in calls:
            assert call.keys() == {"name", "arguments"}
            assert json.loads(json.dumps(call, allow_nan=False).encode()) == call


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_any_text(text):
    parse_tool_calls(text)
    parse_tool_calls("<tool_call>" + text)
    parse_tool_calls('{"name": "f", "arguments": ' + text)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**9), 10**9)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.text(), VALUES, max_size=4))
def test_any_arguments_come_back(arguments):
    call = {"name": "f", "arguments": arguments}
    for text in (
        json.dumps(call),
        json.dumps(call, ensure_ascii=False),
        json.dumps({"name": "f", "arguments": json.dumps(arguments)}),
    ):
        assert parse_tool_calls(tagged(text))[1:] == ([call], [])


@pytest.mark.parametrize("unit", ["<tool_call>", '<tool_call>{"', " ", "{", "[", '{"a":', "</tool_call> ", "<think>", "\\", '<tool_call>["', "a" * 50, "; "])
def test_linear_time(unit):
    for prefix in (
        "",
        "<tool_call>",
        '<tool_call>{"name": "f", "arguments": {"a": "',
        "{",
    ):
        text = prefix + unit * (50_000 // len(unit))
        start = time.process_time()
        parse_tool_calls(text)
        assert time.process_time() - start < 2, (prefix, unit)


def test_a_thought_after_much_white_space_is_read_in_linear_time():
    """20,000 spaces before a </think> took 8 s, in which a rollout stood still."""
    start = time.process_time()
    assert after_thought(" \n" * 20_000 + "x</think>B") == "B"
    assert time.process_time() - start < 1


def test_long_arguments():
    call = {"name": "f", "arguments": {"a": "x" * 100_000, "b": ["y"] * 10_000}}
    start = time.process_time()
    assert parse_tool_calls(tagged(json.dumps(call)))[1:] == ([call], [])
    assert time.process_time() - start < 5
