"""Read the tool calls in a text that a model wrote.

`parse_tool_calls` never raises. What cannot be read becomes a short error for the model to see, and
a good call counts even if it stands beside a bad one. It works on decoded text, so a tag spelled
with ordinary tokens means the same as the added token.
"""

import json
import re
from contextlib import suppress
from importlib import import_module
from itertools import chain, islice

PYTHON_CALLS = "extras.models.python_calls"  # which only some families write
MAX_CALLS = 64  # in one turn
KEYS = {"name", "id", "type", "index", "function", "parameters"}  # of a call without "arguments"
MAX_DEPTH = 64  # of nested lists and objects in the arguments of a call
NAME = re.compile(r"[^\W\d][\w.-]{0,63}")

_SPACE = re.compile(r"\s*")
_SEPARATOR = re.compile(r"\s*[;,]?\s*")
_OPENER = re.compile(
    r'(?:<tool_call>\s*)?<function=|<tool_calls?>|<(?:atem:)?invoke name="|<\|python_tag\|>|'
    r"<\|tool_call_start\|>|<\|tool_call>call:|<\|tool_call\|>|\[TOOL_CALLS\]|"
    r"to=functions\.(?P<name>[\w.-]{1,64})(?:(?!<\|end\|>)[^\n]){0,64}?<\|message\|>")
_NO_TAG = re.compile("(?P<name>)")
_CLOSER = re.compile(
    r"</tool_calls?>|</function>|</(?:atem:)?invoke>|<\|tool_call_end\|>|<(?:\|/)?tool_call\|>")
_TAG = re.compile(f"{_CLOSER.pattern}|{_OPENER.pattern}")
_CLOSERS = re.compile(rf"(?:\s*(?:{_CLOSER.pattern}))*")
_PYTHON_LIST = re.compile(r"\[\s*[^\W\d][\w.]{0,63}\(")
_LIKE_A_CALL = re.compile(r'\[?\s*\{\s*"(?:name|type|function)"\s*:.*"(?:arguments|parameters)"',
                          re.S)
_TAG_NAME = re.compile(r'([\w.-]{1,64})(?:">|>|\[ARGS\])?\s*')
_TAG_VALUE = re.compile(
    r'(?:(<parameter=)|<(?:atem:)?parameter name="|<arg_key>)([^<>"\n]{1,64})'
    r'(?:">|>|</arg_key>\s*<arg_value>)'
    r"(?(1)\n?)((?:(?!\n<parameter=).)*?)(?(1)\n?)(?:</(?:atem:)?parameter>|</arg_value>)\s*", re.S)
_GEMMA_BODY = re.compile(r'(?:<\|"\|>.*?<\|"\|>|(?!<tool_call\|>).)*+', re.S)
_GEMMA_KEY = re.compile(r"([{,]\s*)([^\s{}\[\],:][^{}\[\],:]*):")
# How thoughts begin and end in the markup of the families, and in gpt-oss's and Muse's channels.
THOUGHT = re.compile(
    r"<think>|\[THINK\]|<\|channel>thought|(?:<\|channel\|>analysis|to=self)<\|message\|>")
THOUGHT_END = re.compile(
    r"</think>|\[/THINK\]|<channel\|>|(?:<\|channel\|>final|to=user)<\|message\|>")
PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


def parse_tool_calls(text: str, tools=None) -> tuple[str, list[dict], list[str]]:
    """Split what a model wrote into an answer and tool calls.

    These forms are read: `<tool_call>` around JSON, around Qwen's `<function=...>` or around GLM's
    `<arg_key>`; the markup of gpt-oss, Gemma 4, LFM, Llama, ATEM, Mistral, MiniMax, Phi, Hunyuan; a
    text that is itself a JSON call, a list of them, or `[f(x=1)]`. Prose and other JSON are an
    answer, and without tools ({}) all JSON is. A closed thought at the start is part of it,
    whatever it mentions. A tagged value, as in `<parameter=n>42`, is read as JSON if it can be, but
    as text where the tool's schema says so (`tools`: name -> schema, as in `Chat.tools`).

    Returns:
        The text outside the calls, the calls as {"name": str, "arguments": dict}, and one error
        text for each call that could not be read.
    """
    position = _end_of_thought(text)
    content = text[:position]
    calls, errors = [], []
    # The text itself may be a call.
    opener = _NO_TAG.match(text, position)
    while True:
        new_calls, new_errors, position = _attempt(text, opener, tools)
        calls += new_calls
        errors += new_errors
        # The limit also bounds the time, because each attempt may read to the end of the text.
        if len(calls) + len(errors) > MAX_CALLS:
            too_many = f"error: only {MAX_CALLS} calls a turn are read"
            return content.strip(), calls[:MAX_CALLS], [*errors[:1], too_many]
        if opener[0]:
            position = _CLOSERS.match(text, position).end()
        opener = _OPENER.search(text, position)
        if not opener:
            return (content + text[position:]).strip(), calls, errors
        content += text[position : opener.start()]


def check_call(raw) -> dict:
    """Return a call as {"name": str, "arguments": dict of JSON values}, else raise ValueError."""
    if not isinstance(raw, dict):
        raise ValueError("a tool call must be an object with a name and arguments")
    if isinstance(raw.get("function"), dict):
        raw = {**raw, **raw["function"]}
    name = raw.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(f"{str(name)[:50]!r} is not a function name")
    # With its arguments under another key, a call would be made without any. A definition of the
    # tool, which small models repeat, has other keys too.
    if "arguments" not in raw and raw.keys() - KEYS:
        raise ValueError(f'the arguments of {name} must stand under "arguments"')
    arguments = raw.get("arguments", raw.get("parameters", {}))
    # OpenAI writes the arguments as JSON inside a JSON string.
    if isinstance(arguments, str):
        arguments, _ = _json(arguments.strip() or "{}", 0)
    if not isinstance(arguments, dict):
        kind = type(arguments).__name__
        raise ValueError(f"the arguments of {name} must be an object, got {kind}")
    try:
        if _too_deep(arguments, MAX_DEPTH):
            raise ValueError("nested too deep")
        text = json.dumps(arguments, allow_nan=False, ensure_ascii=False)
        text.encode()  # a lone surrogate has no UTF-8
    except (TypeError, ValueError) as error:
        raise ValueError("arguments must be JSON with finite numbers and whole characters: "
                         f"{error}") from None
    return {"name": name, "arguments": json.loads(text)}


def _too_deep(value, levels: int) -> bool:
    """True if more lists and objects than `levels` lie around the innermost value."""
    if not isinstance(value, dict | list):
        return False
    items = value.values() if isinstance(value, dict) else value
    return not levels or any(_too_deep(item, levels - 1) for item in items)


def _error(problem):
    """Return the text that tells the model why a call could not be read."""
    # A RecursionError, for instance, says nothing to a model.
    if type(problem) is not ValueError:
        problem = "the tool call cannot be read"
    return f"error: {problem}"[:300]


def after_thought(text: str) -> str:
    """Return what follows the thought at the start of a text: nothing if the thought never ends."""
    end = _end_of_thought(text)
    return text[end:] if end or not THOUGHT.match(text.lstrip()) else ""


def _end_of_thought(text):
    """Return where a closed thought at the start of the text ends, or 0 if there is none."""
    closer = THOUGHT_END.search(text)
    if not closer:
        return 0
    if not THOUGHT.match(text.lstrip()):
        # The generation prompt may have opened the thought. But a </think> inside a call, as the
        # value of an argument, closes none, nor does that of a later thought.
        if THOUGHT.search(text, 0, closer.start()):
            return 0
        openers = chain([_NO_TAG.match(text)], _OPENER.finditer(text, 0, closer.start()))
        for opener in islice(openers, MAX_CALLS):
            calls, _, end = _attempt(text, opener)
            if calls and end > closer.start():
                return 0
    return closer.end()


def _attempt(text, opener, tools=None):
    """Try to read calls after an opening tag, which is empty for the first attempt.

    Returns:
        The calls, a text for each that could not be read, and where to continue.
    """
    if tools == {} and not opener[0]:
        return [], [], opener.end()
    start = _SPACE.match(text, opener.end()).end()
    try:
        raw_calls, end = _read(text, opener, start, tools)
        if opener[0] and not raw_calls:
            raise ValueError("a tool call without a function")
    # Nothing that a text does to a parser may end the run.
    except Exception as error:
        if opener[0] or _LIKE_A_CALL.match(text, start):
            return [], [_error(error)], _next_tag(text, start)
        return [], [], opener.end()
    calls, errors = [], []
    for raw in raw_calls:
        try:
            calls.append(check_call(raw))
        except ValueError as error:
            errors.append(_error(error))
    return calls, errors, end if raw_calls else opener.end()


def _next_tag(text, position):
    """Return where the next opening or closing tag starts, or the end of the text."""
    tag = _TAG.search(text, position)
    return tag.start() if tag else len(text)


def _check_end(text, position, where):
    """Raise ValueError unless a tag or the end of the text follows."""
    if _next_tag(text, position) > position:
        raise ValueError(f"unexpected {text[position : position + 20]!r} {where} a tool call")


def _read(text, opener, start, tools):
    """Return the unchecked calls that start at a position, and where they end.

    Without a tag there are none if the text is an answer.
    """
    tag = opener[0]
    if opener["name"]:
        arguments, end = _json(text, start)
        return [{"name": opener["name"], "arguments": arguments}], end
    if tag == "<|tool_call>call:":
        return _read_gemma(text, start)
    if _PYTHON_LIST.match(text, start) and (tag or text.rstrip().endswith(")]")):
        source = _CLOSER.split(text[start:], maxsplit=1)[0]
        return import_module(PYTHON_CALLS).read(source.strip()), start + len(source)
    if text.startswith(("{", "["), start):
        calls, end = _read_json(text, start)
        if tag == "<tool_call>":
            _check_end(text, end, "after the JSON of")
        return (calls, end) if tag or any(map(_is_call, calls)) else ([], start)
    return _read_tagged(text, start, tools) if tag else ([], start)


def _read_json(text, position):
    """Read a call, a list, or Llama's several with semicolons. A bad one spoils none before it."""
    calls = []
    while text.startswith(("{", "["), position):
        try:
            value, end = _json(text, position)
        except ValueError:
            if not calls:
                raise
            return [*calls, None], _next_tag(text, position)
        calls += value if isinstance(value, list) else [value]
        position = _SEPARATOR.match(text, end).end()
    return calls, position


def _is_call(value):
    """True if a JSON value that stands without a tag is meant as a tool call."""
    if not isinstance(value, dict):
        return False
    named = "name" in value and ("arguments" in value or "parameters" in value)
    return named or isinstance(value.get("function"), dict)


def _read_gemma(text, start):
    """Read Gemma 4's name{key:<|"|>text<|"|>,n:1}, which is JSON except for its quotes."""
    body = _GEMMA_BODY.match(text, start)[0]
    pieces = body.split('<|"|>')
    # Pieces with an odd index stood between quotes.
    for i, piece in enumerate(pieces):
        bare = re.sub(r"\bNone\b", "null", piece)
        pieces[i] = json.dumps(piece) if i % 2 else _GEMMA_KEY.sub(r'\1"\2":', bare)
    name, brace, rest = "".join(pieces).partition("{")
    arguments, _ = _json(brace + rest, 0)
    return [{"name": name, "arguments": arguments}], start + len(body)


def _read_tagged(text, start, tools):
    """Read a name, then `<parameter=key>value</parameter>` or what GLM and ATEM write for that."""
    name = _TAG_NAME.match(text, start)
    if not name:
        got = text[start : start + 20]
        raise ValueError(f"expected a JSON object or a function name, got {got!r}")
    position = name.end()
    # This is Llama's form, <function=name>{json}.
    if text.startswith("{", position):
        arguments, position = _json(text, position)
        return [{"name": name[1], "arguments": arguments}], position
    pairs = []
    while tag := _TAG_VALUE.match(text, position):
        _, key, value = tag.groups()
        pairs.append((key, _tagged_value(value, (tools or {}).get(name[1]), key)))
        position = tag.end()
    if not pairs and position == len(text):
        raise ValueError("a tool call without arguments must be closed")
    _check_end(text, position, "in")
    return [{"name": name[1], "arguments": unique(pairs)}], position


def _tagged_value(raw, function, key):
    """Return a tagged value as JSON if all of it is JSON and no string, else as it stands.

    Where the function's schema asks for text it is text, or None if that may be and it is null.
    """
    json_text = PYTHON_WORDS.get(raw.strip(), raw.strip())
    # The schemas of a data file may have any form.
    with suppress(LookupError, TypeError, AttributeError):
        kinds = _kinds(function["parameters"]["properties"][key])
        if kinds - {"null"} == {"string"} and not (json_text == "null" and "null" in kinds):
            return raw
    with suppress(ValueError):
        value, end = _json(json_text, 0)
        if not isinstance(value, str) and end == len(json_text):
            return value
    return raw


def _kinds(schema) -> set:
    """Return the types that a schema allows; pydantic writes str | None as anyOf."""
    kinds = {"null"} if schema.get("nullable") else set()
    for choice in (schema, *schema.get("anyOf", ()), *schema.get("oneOf", ())):
        kind = choice.get("type", [])
        kinds |= {kind} if isinstance(kind, str) else set(kind)
    return kinds


def unique(pairs):
    """Return the pairs as a dict, else raise ValueError."""
    if len(dict(pairs)) < len(pairs):
        raise ValueError("an argument is given twice")
    return dict(pairs)


_JSON = json.JSONDecoder(object_pairs_hook=unique)


def _json(text, position):
    """Return the JSON value that starts at a position, and where it ends."""
    try:
        return _JSON.raw_decode(text, position)
    except json.JSONDecodeError as error:
        problem = f"{error.msg} at character {error.pos - position}"
        raise ValueError(f"the tool call is not valid JSON: {problem}") from None
    except RecursionError:
        raise ValueError("the tool call is nested too deep") from None
