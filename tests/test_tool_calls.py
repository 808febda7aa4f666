"""Sampled text -> tool calls: every form, good calls beside bad ones, and never an exception, whatever is written."""

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
    "llama": '<|python_tag|>{"name": "f", "parameters": {"a": 1, "b": "x"}}',
    "llama, typed": '{"type": "function", "name": "f", "parameters": {"a": 1, "b": "x"}}',
    "llama, custom": '<function=f>{"a": 1, "b": "x"}</function>',
    "pythonic": "[f(a=1, b='x')]",
    "lfm": '<|tool_call_start|>[f(a=1, b="x")]<|tool_call_end|>',
    "qwen3-coder": "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx\n</parameter>\n"
    "</function>\n</tool_call>",
    "qwen3-coder, no outer tag": "<function=f><parameter=a>1</parameter><parameter=b>x</parameter></function>",
    "glm": "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n<arg_value>x"
    "</arg_value>\n</tool_call>",
    "gpt-oss": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.f<|channel|>commentary json"
    '<|message|>{"a": 1, "b": "x"}',
    "gpt-oss, as sampled": '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1, "b": "x"}<|end|>',
    "gemma 4": '<|tool_call>call:f{a:1,b:<|"|>x<|"|>}<tool_call|>',
    "atem": ' to=f<|message|><atem:function_calls>\n<atem:invoke name="f">\n'
    '<atem:parameter name="a">1</atem:parameter>\n'
    '<atem:parameter name="b">x</atem:parameter>\n</atem:invoke>\n</atem:function_calls>',
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


@pytest.mark.parametrize("text", ['{"name": "猜", "arguments": {"数字": 7}}', "[猜(数字=7)]", "<function=猜>\n<parameter=数字>\n7\n</parameter>\n</function>"])
def test_a_function_may_have_a_name_that_is_not_english(text):
    assert parse_tool_calls(text) == ("", [{"name": "猜", "arguments": {"数字": 7}}], [])


@pytest.mark.parametrize("mentioned", [GOOD, f"<tool_call>{GOOD}</tool_call>", "<tool_call> is the tag", "<function=f>", f"<tool_call>{GOOD}</tool_call> or <tool_call>"])
def test_a_call_that_a_closed_thought_mentions_is_not_made(mentioned):
    """The prompt may have opened the thought, so that the text begins inside it."""
    for begins in ("I could", "[Hm] I could", "{x} I could", "\n<think>I could"):
        thought = f"{begins} write {mentioned} but that is wrong.\n</think>"
        assert parse_tool_calls(f"{thought}\n\nIt is 3.") == (f"{thought}\n\nIt is 3.".strip(), [], [])
        assert parse_tool_calls(f"{thought}\n\n<tool_call>{GOOD}</tool_call>")[1:] == ([CALL], [])


@pytest.mark.parametrize("thought, closing", [
    ("<think>\nA?", "\n</think>\n\n"), ("[THINK]A?", "[/THINK]"), ("<|channel>thought\nA?", "\n<channel|>"), ("\n<think>A?", "</think>\n"),
    ("<|channel|>analysis<|message|>A?", "<|end|><|start|>assistant<|channel|>final<|message|>"), (" to=self<|message|>A?", "<|eom|><|start|>assistant to=user<|message|>")])
def test_what_follows_a_thought_in_the_markup_of_every_family(thought, closing):
    mentioned = f"{thought} <tool_call>{GOOD}</tool_call> {closing}B"
    assert after_thought(thought + closing + "B").strip() == after_thought(f"A?{closing}B").strip() == "B"
    assert after_thought(thought) == "" and after_thought(f"B, not {thought}") == f"B, not {thought}" and parse_tool_calls(mentioned) == (mentioned.strip(), [], [])


def test_the_end_of_a_thought_inside_an_argument_ends_none():
    argument = {"name": "f", "arguments": {"b": "a</think>b"}}
    for text in (json.dumps(argument), f" {json.dumps(argument)}; {GOOD}", '[f(b="a</think>b")]', f"<tool_call>{json.dumps(argument)}</tool_call>", f"Hm. <tool_call>{json.dumps(argument)}</tool_call>"):
        assert parse_tool_calls(text)[1][0] == argument
    tagged = "<tool_call><function=f><parameter=b>a</think>b</parameter></function></tool_call>"
    assert parse_tool_calls(tagged)[1] == [argument]


@pytest.mark.parametrize("form", FORMS)
def test_forms(form):
    assert parse_tool_calls(FORMS[form])[1:] == ([CALL], [])


def test_names_of_nested_arguments_are_any_text_in_gemmas_form():
    text = '<|tool_call>call:f{d:{größe:1,content-type:<|"|>a, b: {c}<|"|>,2nd key:[{y:[]},true]}}<tool_call|>'
    assert parse_tool_calls(text)[1:] == ([{"name": "f", "arguments": {"d": {"größe": 1, "content-type": "a, b: {c}", "2nd key": [{"y": []}, True]}}}], [])


def test_none_in_gemmas_form_is_null():
    """Its templates write None, and no None in a text."""
    text = '<|tool_call>call:f{a:None,b:{c:[None,1]},d:<|"|>None<|"|>,Nonesuch:1}<tool_call|>'
    assert parse_tool_calls(text)[1:] == ([{"name": "f", "arguments": {"a": None, "b": {"c": [None, 1]}, "d": "None", "Nonesuch": 1}}], [])


def test_a_text_in_gemmas_form_is_taken_as_it_stands():
    said = 'say "hi"\n\\ {a:1}'
    assert parse_tool_calls(f'<|tool_call>call:f{{a:<|"|>{said}<|"|>}}<tool_call|>')[1:] == ([{"name": "f", "arguments": {"a": said}}], [])


def test_gemmas_closing_tag_inside_a_text_closes_nothing():
    call = {"name": "f", "arguments": {"a": "x <tool_call|> {y", "b": 1}}
    text = '<|tool_call>call:f{a:<|"|>x <tool_call|> {y<|"|>,b:1}<tool_call|>'
    assert parse_tool_calls(text + text) == ("", [call, call], [])
    content, calls, errors = parse_tool_calls('<|tool_call>call:f{a:<|"|>x}<tool_call|>' + text)  # an open text
    assert calls == [call] and len(errors) == 1


def test_a_thought_that_names_a_function_calls_none():
    """gpt-oss: the next message's tag is not the call's."""
    text = "<|channel|>analysis<|message|>I need no to=functions.f here.<|end|><|start|>assistant<|channel|>final<|message|>{}"
    assert parse_tool_calls(text) == (text, [], [])


@pytest.mark.parametrize("text", ANSWERS)
def test_answers(text):
    assert parse_tool_calls(text) == (text.strip(), [], [])


@pytest.mark.parametrize("form", [f for f in FORMS if not f.startswith(("bare", "openai", "llama, typed", "pythonic"))])
def test_forms_in_prose_and_twice(form):
    text = FORMS[form].removeprefix("<think>\nI could <tool_call> now.\n</think>\n\n")
    if text != GOOD and "</think>" not in text:
        assert parse_tool_calls("Let me see.\n" + text)[1:] == ([CALL], [])
        content, calls, errors = parse_tool_calls(text + "\n" + text)
        assert (calls, errors) == ([CALL, CALL], [])


def tagged(body):
    return f"<tool_call>{body}</tool_call>"


@pytest.mark.parametrize(
    "body, why",
    {
        "not json": "unexpected",
        "[]": "without a function",
        "[1]": "object with a name",
        '"f"': "expected a JSON",
        "{}": "not a function name",
        "": "expected a JSON",
        '{"name": "f", "arguments": {"a": 1,}}': "not valid JSON",
        '{"name": "f", "arguments": [1]}': "must be an object, got list",
        '{"name": "f", "arguments": null}': "got NoneType",
        '{"name": "f", "arguments": "[1]"}': "got list",
        '{"name": "f", "arguments": "{"}': "not valid JSON",
        '{"name": "f", "args": {"a": 1}}': 'must stand under "arguments"',  # it would run without any
        '{"name": "f", "a": 1}': 'must stand under "arguments"',
        '{"type": "function", "function": {"name": "f", "description": "Do f.", "parameters": {"type": "object"}}}': "must stand under",  # its definition
        "<function=f><parameter=a>\n1\n<parameter=b>\n2\n</parameter></function>": "unexpected '<parameter=a>",  # a tag left open
        '{"name": 3, "arguments": {}}': "not a function name",
        '{"name": "rm -rf /", "arguments": {}}': "not a function name",
        '{"name": "f<|im_end|>", "arguments": {}}': "not a function name",
        '{"name": "f", "arguments": {"a": 1, "a": 2}}': "given twice",
        '{"name": "f", "arguments": {"a": NaN}}': "finite",
        '{"name": "f", "arguments": {"a": -Infinity}}': "finite",
        '{"name": "f", "arguments": {"a": 1e999}}': "finite",
        '{"name": "f", "arguments": {"a": %s}}' % ("9" * 5000): "",
        '{"name": "f", "arguments": {"a": "\\ud800"}}': "whole",
        '{"name": "f", "arguments": {"\\udc00": 1}}': "whole",
        '{"name": "f", "arguments": {"a": %s}}' % ("[" * 1000 + "]" * 1000): "deep",
        '{"name": "f", "arguments": %s}' % ('{"a":' * 100_000): "",
        '{"name": "f", "arguments": {}} and more': "unexpected ' and more'"[:11],
        "<function=f><parameter=a>1": "unexpected '<parameter=a>1",
        "<function=f><parameter=a>1</parameter><parameter=a>2</parameter>": "given twice",
        "<function=>": "",
        "[f(a=open('x'))]": "literal",
        "[f(1)]": "expected [name(key=value",
        "[f(**{})]": "expected [name(key=value",
        "[f(a=1, a=2)]": "",
        "[f(a=1e999)]": "finite",
        "[f(a=b'x')]": "must be JSON",
        "[f(a={1})]": "must be JSON",
        "[f(a=...)]": "must be JSON",
        "[(lambda: 1)()]": "",
        "[f(a=" + "-" * 50_000 + "1)]": "",
        "[f(a=" + "(" * 50_000 + ")]": "",
        "[f(a=" + "[" * 250 + "]" * 250 + ")]": "",
        "[f(a=" + "1+" * 30_000 + "1)]": "",
        "[f" + ".f" * 40_000 + "(a=1)]": "",
        "[f(": "",
    }.items(),
    ids=lambda text: text[:20],
)
def test_bad_calls_become_short_errors(body, why):
    good = {"name": "g", "arguments": {}}
    content, calls, errors = parse_tool_calls(
        "Hm. " + tagged(body) + "<tool_call>" + json.dumps(good) + "</tool_call> ok"
    )
    assert calls == [good] and len(errors) == 1 and content.startswith("Hm.") and content.endswith("ok")
    assert why in errors[0] and errors[0].startswith("error: ") and len(errors[0]) <= 300
    assert errors[0].isprintable() and errors[0].encode()


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


def test_pythons_tuples_and_numbers_as_keys_are_those_of_json():
    assert parse_tool_calls("[f(a=(1, 2), b={3: 4})]")[1] == [{"name": "f", "arguments": {"a": [1, 2], "b": {"3": 4}}}]


def test_of_a_bad_call_nothing_is_left_in_the_answer():
    assert parse_tool_calls("Hm. " + tagged("not json") + " ok")[0] == "Hm.  ok"


def test_calls_with_commas_between_them_and_before_a_later_thought():
    call = '{"name": "f", "arguments": {}}'
    for text in (f"{call}, {call}", f"[TOOL_CALLS]{call}, {call}", f"<|tool_call|>{call}; {call}"):
        assert [len(part) for part in parse_tool_calls(text)[1:]] == [2, 0]
    # An untrained model invents the result and thinks about it.
    invented = f"<tool_call>{call}</tool_call>\n<tool_response>5</tool_response>\n<think>Got 5.</think>\nIt is 5."
    assert len(parse_tool_calls(invented)[1]) == 1


@pytest.mark.parametrize("optional", [{"anyOf": [{"type": "string"}, {"type": "null"}]}, {"oneOf": [{"type": "string"}, {"type": "null"}]}, {"type": ["string", "null"]}, {"type": "string", "nullable": True}])
def test_optional_text_is_text_in_every_spelling(optional):
    """A zip code is no number. Pydantic writes `str | None` as anyOf."""
    values = [parse_tool_calls(TAGGED["qwen"] % raw, schema(a=optional))[1][0]["arguments"]["a"] for raw in ("01234", "12345", "null")]
    assert values == ["01234", "12345", None]
    assert parse_tool_calls(TAGGED["qwen"] % "12", schema(a={"anyOf": [{"type": "string"}, {"type": "integer"}]}))[1][0]["arguments"]["a"] == 12


LONG = "9" * 5000
TEXT_OF_DIGITS = f"<tool_call><function=f><parameter=a>{LONG}</parameter></function></tool_call>"


@pytest.mark.parametrize("number", [LONG, "-" + LONG, "9" * 400, LONG + ".5", "1e" + LONG, "0x" + "f" * 5000, "-0x" + "f" * 400])
def test_numbers_longer_than_any_float_end_no_run(number):
    """Python refuses to read and to print integers of more than 4,300 digits: neither may end a run."""
    texts = [f'{{"name": "f", "arguments": {{"a": [{number}]}}}}', f"[f(a=[{number}])]", f"[f(a={{{number}: 1}})]", f'{{"name": {number}, "arguments": {{}}}}',
             json.dumps({"name": "f", "arguments": f'{{"a": {number}}}'}), f'<|tool_call>call:f{{a:{number}}}<tool_call|>',
             f"<tool_call>f<arg_key>a</arg_key><arg_value>[{number}]</arg_value></tool_call>", f'to=functions.f<|message|>{{"a": {number}}}']
    for text in texts + [tagged(text) for text in texts]:
        content, calls, errors = parse_tool_calls(text)
        json.dumps([content, calls, errors], allow_nan=False).encode()
        assert all(len(error) <= 300 for error in errors)


def test_a_long_number_in_a_tag_is_text_for_the_tool():
    assert parse_tool_calls(TEXT_OF_DIGITS)[1:] == ([{"name": "f", "arguments": {"a": LONG}}], [])
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
    for text in (f"{GOOD}; {GOOD[:-5]}", f"<tool_call>{GOOD}\n{GOOD[:-5]}</tool_call>", f"<|python_tag|>{GOOD}; {GOOD}; {{"):
        content, calls, errors = parse_tool_calls(text)
        assert content == "" and calls == [CALL] * (text.count(GOOD)) and len(errors) == 1, text
    assert parse_tool_calls('{"name": "f", "arguments": {"a": 1')[2][0].startswith(
        "error: the tool call is not valid JSON"
    )


@pytest.mark.parametrize("source, value", [
    ("'it's'", "it's"), ("'a\nb'", "a\nb"), ("'x = \"it's\"\n\tf('y')\n'", "x = \"it's\"\n\tf('y')\n"),
    (r"'it\'s\n'", "it's\n"), ("'a' 'b'", "ab"), ("'''a\nb'''", "a\nb"), ("''", ""), ("[true, null, {'k': false}]", [True, None, {"k": False}])])
def test_lfm_writes_strings_as_they_are_and_words_of_json(source, value):
    """Its templates escape nothing (LFM2.5), or write lists and objects as JSON. What is Python as it stands is read as Python."""
    for text in (f"<|tool_call_start|>[f(a={source}, b=1)]<|tool_call_end|>", f"[g(), f(b=1, a={source})]"):
        assert parse_tool_calls(text)[1][-1] == {"name": "f", "arguments": {"a": value, "b": 1}}, text


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


def test_tagged_values_are_json_or_text():
    for raw, value in {
        "1": 1,
        "1.5": 1.5,
        "true": True,
        "True": True,
        "None": None,
        '{"k": [1]}': {"k": [1]},
        "007": "007",
        "NaN x": "NaN x",
        '"q"': '"q"',
        "a\nb": "a\nb",
        "": "",
        "[1": "[1",
        "1 2": "1 2",
    }.items():
        text = f"<tool_call><function=f><parameter=a>\n{raw}\n</parameter></function></tool_call>"
        assert parse_tool_calls(text)[1:] == ([{"name": "f", "arguments": {"a": value}}], []), raw




def schema(**properties):
    return {"f": {"name": "f", "parameters": {"type": "object", "properties": properties}}}


TEXT = schema(a={"type": "string"})
TAGGED = {"qwen": "<tool_call><function=f><parameter=a>\n%s\n</parameter></function></tool_call>",
          "glm": "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>%s</arg_value>\n</tool_call>",
          "atem": '<atem:invoke name="f">\n<atem:parameter name="a">%s</atem:parameter>\n</atem:invoke>'}


@pytest.mark.parametrize("form", TAGGED)
@pytest.mark.parametrize("raw", ["true", "True", "None", "null", "12", "1.50", "[1,2]", '{\n "a": 1}', "\na\n", "a\n\n", "\n", " 1 ", ""])
def test_a_tagged_value_is_the_text_itself_where_the_schema_says_text(form, raw):
    """Neither read as JSON nor spelled anew; of newlines only those go that Qwen's templates put around a value."""
    text = TAGGED[form] % raw
    assert parse_tool_calls(text, TEXT)[1:] == ([{"name": "f", "arguments": {"a": raw}}], [])
    maybe = schema(a={"type": "string", "nullable": True})
    assert parse_tool_calls(text, maybe)[1] == [{"name": "f", "arguments": {"a": None if raw in ("None", "null") else raw}}]
    # another tool's schema, another parameter's, none, and what data files hold
    for tools in ({"g": TEXT["f"]}, schema(b={"type": "string"}), {}, schema(a="string"), {"f": {"name": "f"}}, {"f": {"parameters": "{}"}}, {"f": {"parameters": None}}):
        number = parse_tool_calls(TAGGED[form] % "\n1\n", tools)
        assert number[1:] == ([{"name": "f", "arguments": {"a": 1}}], [])


def test_too_many_calls():
    for text in (f"<tool_call>{GOOD}</tool_call>" * 100, f"[{', '.join([GOOD] * 100)}]", f"{GOOD}; " * 100):
        content, calls, errors = parse_tool_calls(text)
        assert calls == [CALL] * MAX_CALLS and errors == [f"error: only {MAX_CALLS} calls a turn are read"]
    assert parse_tool_calls(f"<tool_call>{GOOD}</tool_call>" * MAX_CALLS)[1:] == ([CALL] * MAX_CALLS, [])
    # Those that cannot be read count too. The model sees the first error and the limit.
    _, calls, errors = parse_tool_calls(f"<tool_call>{GOOD}</tool_call>" + "<tool_call>x {</tool_call>" * 100)
    assert calls == [CALL] and len(errors) == 2 and "valid JSON" in errors[0] and errors[1] == f"error: only {MAX_CALLS} calls a turn are read"


PIECES = [
    *FORMS.values(),
    GOOD,
    "<tool_call>",
    "</tool_call>",
    "<function=",
    "<parameter=a>",
    "</parameter>",
    "<arg_key>",
    "<arg_value>",
    '<|"|>',
    "<|tool_call>call:",
    "<tool_call|>",
    "<|python_tag|>",
    "<|tool_call_start|>[f(",
    "to=functions.f",
    "<|message|>",
    "<think>",
    "</think>",
    "{",
    "}",
    "[",
    "]",
    '"',
    "\\",
    ":",
    ",",
    "\ud800",
    "\x00",
    "é",
    "(",
    ")",
    "=",
    "1",
    "-",
    "*",
    "NaN",
    '{"name": "f", "arguments": ',
    "\n",
    " ",
    "f'{",
    "'''",
    "lambda:",
    "999999999999",
    "1e999",
    ";",
]


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


@pytest.mark.parametrize(
    "unit",
    [
        "<tool_call>",
        '<tool_call>{"',
        "<function=f><parameter=a>",
        " ",
        "{",
        "[",
        '{"a":',
        "</tool_call> ",
        "<|tool_call>call:f{",
        "to=functions.f ",
        "[f(",
        "<think>",
        "\\",
        "<tool_call>f<arg_key>a</arg_key>",
        "<|tool_call_start|>[f(a=",
        '<tool_call>["',
        "\n</function>",
        "a" * 50,
        '<|"|>',
        "{a:",
        "; ",
    ],
)
def test_linear_time(unit):
    for prefix in (
        "",
        "<tool_call>",
        '<tool_call>{"name": "f", "arguments": {"a": "',
        "<function=f><parameter=a>",
        "[f(a='",
        "{",
    ):
        text = prefix + unit * (100_000 // len(unit))
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
