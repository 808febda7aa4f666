"""The tool-call markup of a dozen families: every form, its errors, and never an exception, whatever is written."""

import json
import random
import subprocess
import sys
import time

import pytest
import test_tool_calls as hermes
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import ROOT
from test_tool_calls import CALL, GOOD, LONG, MUST, tagged
from test_tool_calls import PIECES as HERMES_PIECES

import extras.models.dialects  # noqa: F401
from core.tool_calls import MAX_CALLS, after_thought, parse_tool_calls


FORMS = {
    "llama": '<|python_tag|>{"name": "f", "parameters": {"a": 1, "b": "x"}}',
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
}


def test_hermes_and_json_are_read_as_without_the_other_forms():
    """The same texts, with the tables full in this process and as they are in core in another: equal calls, and errors to the letter."""
    rng = random.Random(0)
    texts = [*hermes.FORMS.values(), *hermes.ANSWERS, *("".join(rng.choices(HERMES_PIECES, k=4)) for _ in range(2000))]
    code = "import json, sys\nfrom core.tool_calls import parse_tool_calls\nprint(json.dumps([parse_tool_calls(text) for text in json.load(sys.stdin)]))"
    done = subprocess.run([sys.executable, "-c", code], input=json.dumps(texts), cwd=ROOT, capture_output=True, text=True, check=True)
    alone = [tuple(item) for item in json.loads(done.stdout)]
    # After a tag core expects JSON alone. With the other forms a word is the name of a function.
    differ = [(text, core) for text, core in zip(texts, alone) if core != parse_tool_calls(text)]
    assert all(any("expected a JSON object" in error for error in core[2]) for text, core in differ), differ[:3]
    assert len(differ) < 0.1 * len(texts) and sum(bool(core[2]) for core in alone) > 400


@pytest.mark.parametrize("text", ["[猜(数字=7)]", "<function=猜>\n<parameter=数字>\n7\n</parameter>\n</function>"])
def test_a_function_may_have_a_name_that_is_not_english(text):
    assert parse_tool_calls(text) == ("", [{"name": "猜", "arguments": {"数字": 7}}], [])


@pytest.mark.parametrize("thought, closing", [
    ("[THINK]A?", "[/THINK]"), ("<|channel>thought\nA?", "\n<channel|>"),
    ("<|channel|>analysis<|message|>A?", "<|end|><|start|>assistant<|channel|>final<|message|>"), (" to=self<|message|>A?", "<|eom|><|start|>assistant to=user<|message|>")])
def test_what_follows_a_thought_in_the_markup_of_every_family(thought, closing):
    mentioned = f"{thought} <tool_call>{GOOD}</tool_call> {closing}B"
    assert after_thought(thought + closing + "B").strip() == after_thought(f"A?{closing}B").strip() == "B"
    assert after_thought(thought) == "" and after_thought(f"B, not {thought}") == f"B, not {thought}" and parse_tool_calls(mentioned) == (mentioned.strip(), [], [])


def test_the_end_of_a_thought_inside_an_argument_ends_none():
    argument = {"name": "f", "arguments": {"b": "a</think>b"}}
    assert parse_tool_calls('[f(b="a</think>b")]')[1][0] == argument
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


@pytest.mark.parametrize("form", [form for form in FORMS if form != "pythonic"])
def test_forms_in_prose_and_twice(form):
    assert parse_tool_calls("Let me see.\n" + FORMS[form])[1:] == ([CALL], [])
    content, calls, errors = parse_tool_calls(FORMS[form] + "\n" + FORMS[form])
    assert (calls, errors) == ([CALL, CALL], [])


@pytest.mark.parametrize(
    "body, why",
    {
        "not json": "unexpected 'json</tool_call><too' in a tool call",
        "<function=f><parameter=a>\n1\n<parameter=b>\n2\n</parameter></function>": "unexpected '<parameter=a>\\n1\\n<par' in a tool call",  # a tag left open
        "<function=f><parameter=a>1": "unexpected '<parameter=a>1</tool' in a tool call",
        "<function=f><parameter=a>1</parameter><parameter=a>2</parameter>": "an argument is given twice",
        "<function=>": "expected a JSON object or a function name, got '></tool_call><tool_c'",
        "[f(a=open('x'))]": "arguments must be literal values",
        "[f(1)]": "expected [name(key=value, ...)]",
        "[f(**{})]": "expected [name(key=value, ...)]",
        "[f(a=1, a=2)]": "an argument is given twice",
        "[f(a=1e999)]": f"{MUST}Out of range float values are not JSON compliant",
        "[f(a=b'x')]": f"{MUST}Object of type bytes is not JSON serializable",
        "[f(a={1})]": f"{MUST}Object of type set is not JSON serializable",
        "[f(a=...)]": f"{MUST}Object of type ellipsis is not JSON serializable",
        "[f(a=" + "-" * 50_000 + "1)]": "the tool call cannot be read",
        "[f(a=" + "(" * 50_000 + ")]": "the tool call cannot be read",
        "[f(a=" + "[" * 250 + "]" * 250 + ")]": "the tool call cannot be read",
        "[f(a=" + "1+" * 30_000 + "1)]": "the tool call cannot be read",
        "[f" + ".f" * 40_000 + "(a=1)]": "the tool call is not valid JSON: Expecting value at character 1",
        "[f(": "the tool call cannot be read",
    }.items(),
    ids=lambda text: text[:20],
)
def test_bad_calls_become_the_errors_that_hermes_has(body, why):
    """To the letter: a policy is trained on what it is told."""
    good = {"name": "g", "arguments": {}}
    content, calls, errors = parse_tool_calls(f"Hm. {tagged(body)}{tagged(json.dumps(good))} ok")
    assert calls == [good] and errors == [f"error: {why}"] and content.startswith("Hm.") and content.endswith("ok")


def test_pythons_tuples_and_numbers_as_keys_are_those_of_json():
    assert parse_tool_calls("[f(a=(1, 2), b={3: 4})]")[1] == [{"name": "f", "arguments": {"a": [1, 2], "b": {"3": 4}}}]


def test_calls_with_commas_between_them():
    call = '{"name": "f", "arguments": {}}'
    for text in (f"[TOOL_CALLS]{call}, {call}", f"<|tool_call|>{call}; {call}"):
        assert [len(part) for part in parse_tool_calls(text)[1:]] == [2, 0]
    content, calls, errors = parse_tool_calls(f"<|python_tag|>{GOOD}; {GOOD}; {{")
    assert content == "" and calls == [CALL, CALL] and len(errors) == 1


def schema(**properties):
    return {"f": {"name": "f", "parameters": {"type": "object", "properties": properties}}}


TEXT = schema(a={"type": "string"})
TAGGED = {"qwen": "<tool_call><function=f><parameter=a>\n%s\n</parameter></function></tool_call>",
          "glm": "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>%s</arg_value>\n</tool_call>",
          "atem": '<atem:invoke name="f">\n<atem:parameter name="a">%s</atem:parameter>\n</atem:invoke>'}


@pytest.mark.parametrize("optional", [{"anyOf": [{"type": "string"}, {"type": "null"}]}, {"oneOf": [{"type": "string"}, {"type": "null"}]}, {"type": ["string", "null"]}, {"type": "string", "nullable": True}])
def test_optional_text_is_text_in_every_spelling(optional):
    """A zip code is no number. Pydantic writes `str | None` as anyOf."""
    values = [parse_tool_calls(TAGGED["qwen"] % raw, schema(a=optional))[1][0]["arguments"]["a"] for raw in ("01234", "12345", "null")]
    assert values == ["01234", "12345", None]
    assert parse_tool_calls(TAGGED["qwen"] % "12", schema(a={"anyOf": [{"type": "string"}, {"type": "integer"}]}))[1][0]["arguments"]["a"] == 12


@pytest.mark.parametrize("number", [LONG, "-" + LONG, "9" * 400, LONG + ".5", "1e" + LONG, "0x" + "f" * 5000, "-0x" + "f" * 400])
def test_numbers_longer_than_any_float_end_no_run(number):
    """Python refuses to read and to print integers of more than 4,300 digits: neither may end a run."""
    texts = [f"[f(a=[{number}])]", f"[f(a={{{number}: 1}})]", f'<|tool_call>call:f{{a:{number}}}<tool_call|>',
             f"<tool_call>f<arg_key>a</arg_key><arg_value>[{number}]</arg_value></tool_call>", f'to=functions.f<|message|>{{"a": {number}}}']
    for text in texts + [tagged(text) for text in texts]:
        content, calls, errors = parse_tool_calls(text)
        json.dumps([content, calls, errors], allow_nan=False).encode()
        assert all(len(error) <= 300 for error in errors)


def test_a_long_number_in_a_tag_is_text_for_the_tool():
    text = f"<tool_call><function=f><parameter=a>{LONG}</parameter></function></tool_call>"
    assert parse_tool_calls(text)[1:] == ([{"name": "f", "arguments": {"a": LONG}}], [])


@pytest.mark.parametrize("source, value", [
    ("'it's'", "it's"), ("'a\nb'", "a\nb"), ("'x = \"it's\"\n\tf('y')\n'", "x = \"it's\"\n\tf('y')\n"),
    (r"'it\'s\n'", "it's\n"), ("'a' 'b'", "ab"), ("'''a\nb'''", "a\nb"), ("''", ""), ("[true, null, {'k': false}]", [True, None, {"k": False}])])
def test_lfm_writes_strings_as_they_are_and_words_of_json(source, value):
    """Its templates escape nothing (LFM2.5), or write lists and objects as JSON. What is Python as it stands is read as Python."""
    for text in (f"<|tool_call_start|>[f(a={source}, b=1)]<|tool_call_end|>", f"[g(), f(b=1, a={source})]"):
        assert parse_tool_calls(text)[1][-1] == {"name": "f", "arguments": {"a": value, "b": 1}}, text


def test_only_a_text_holds_tags():
    text = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<paramet=b>\nx\n</parameter>\n</function>\n</tool_call>"
    assert parse_tool_calls(text, schema(a={"type": "integer"}))[1:] == ([], ["error: unexpected '<paramet=b>\\nx\\n</para' in a tool call"])
    assert parse_tool_calls(text, TEXT)[1] == [{"name": "f", "arguments": {"a": "1\n</parameter>\n<paramet=b>\nx"}}]


@pytest.mark.parametrize("tools", [None, schema(a={"type": "string"}, b={"type": "string"})])
def test_a_missing_closing_tag_is_an_error_and_the_next_call_is_made(tools):
    good = "<tool_call>\n<function=f>\n<parameter=a>\n3\n</parameter>\n</function>\n</tool_call>"
    bad = "<tool_call>\n<function=f>\n<parameter=a>\n1\n<parameter=b>\n2\n</parameter>\n</function>\n</tool_call>"
    for text in (bad, f"{bad}\n{good}"):
        _, calls, errors = parse_tool_calls(text, tools)
        assert len(calls) == text.count(good) and errors == ["error: unexpected '<parameter=a>\\n1\\n<par' in a tool call"]
    # Before the same opener a closing tag ends a call, whatever stands before it.
    _, calls, errors = parse_tool_calls(bad.replace("2\n</parameter>\n", "2\n") + f"\n{good}", tools)
    assert len(calls) == len(errors) == 1


def test_a_bad_call_is_skipped_with_the_calls_in_it():
    inner = "<tool_call>\n<function=g>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
    gemma = '<|tool_call>call:g{a:<|"|>1<|"|>}<tool_call|>'
    lfm = "<|tool_call_start|>[g(a='1')]<|tool_call_end|>"
    for text in (f"<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=a>\n{inner}\n</parameter>\n</function>\n</tool_call>",
                 f'<tool_call>{{"name": "f", "arguments": {{"a": "{inner}",}}}}</tool_call>', f'{{"name": "f", "arguments": {{"a": "{inner}",}}}}',
                 f'[TOOL_CALLS]f[ARGS]{{"a": "{inner}",}}', f'<|tool_call>call:f{{a:<|"|>{gemma}<|"|>,a:1}}<tool_call|>', f"<|tool_call_start|>[f(a='{lfm}', b=c)]<|tool_call_end|>"):
        content, calls, errors = parse_tool_calls(f"{text}")
        assert content == "" and calls == [] and len(errors) == 1, text


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


def test_calls_that_cannot_be_read_count_too():
    """The model sees the first error and the limit."""
    _, calls, errors = parse_tool_calls(tagged(GOOD) + "<tool_call>x {</tool_call>" * 100)
    assert calls == [CALL] and len(errors) == 2 and "valid JSON" in errors[0] and errors[1] == f"error: only {MAX_CALLS} calls a turn are read"


PIECES = [*HERMES_PIECES, *FORMS.values(), "<function=", "<parameter=a>", "</parameter>", "<arg_key>", "<arg_value>", '<|"|>', "<|tool_call>call:",
    "<tool_call|>", "<|python_tag|>", "<|tool_call_start|>[f(", "to=functions.f", "<|message|>", "lambda:", "'''", "f'{"]


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


@pytest.mark.parametrize("opening", ["<function=", "<|tool_call>call:", "[f(a=", "<|tool_call_start|>["])
def test_any_text(opening):
    @settings(max_examples=60, deadline=None)
    @given(st.text())
    def reads(text):
        parse_tool_calls(opening + text)
    reads()


@pytest.mark.parametrize("unit", ["<tool_call>", '<tool_call>{"', " ", "{", "[", '{"a":', "</tool_call> ", "<think>", "\\", '<tool_call>["', "a" * 50, "; ", "<function=f><parameter=a>",
    "<|tool_call>call:f{", "to=functions.f ", "[f(", "<tool_call>f<arg_key>a</arg_key>", "<|tool_call_start|>[f(a=", "\n</function>", '<|"|>', "{a:"])
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
        assert any(cpu_seconds(text) < 2 for _ in range(3)), (prefix, unit)  # 0.4 alone, and once 2.1 beside other tests


def cpu_seconds(text):
    start = time.process_time()
    parse_tool_calls(text)
    return time.process_time() - start
