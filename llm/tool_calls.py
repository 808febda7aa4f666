"""Read the tool calls in a text that a model wrote.

`parse_tool_calls` never raises. What cannot be read becomes a short error for the model to see, and
a good call counts even if it stands beside a bad one. It works on decoded text, so a tag spelled
with ordinary tokens means the same as the added token.
"""

import ast
import json
import re
import sys
import warnings

MAX_CALLS = 64  # in one turn
MAX_DEPTH = 64  # nesting of lists and objects in the arguments
MAX_DIGITS = 308  # of an integer, as in a float; Python refuses to print 5,000
TOO_LONG = f"a number of more than {MAX_DIGITS} digits"
MAX_PYTHON = 100_000  # characters handed to Python's own parser
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")

_SPACE = re.compile(r"\s*")
_OPENER = re.compile(
    r'(?:<tool_call>\s*)?<function=|<tool_call>|<atem:invoke name="|<\|python_tag\|>|'
    r"<\|tool_call_start\|>|<\|tool_call>call:|"
    r"to=functions\.(?P<name>[\w.-]{1,64})[^\n]{0,64}?<\|message\|>"
)
_CLOSER = re.compile(
    r"</tool_call>|</function>|</atem:invoke>|<\|tool_call_end\|>|<tool_call\|>"
)
_PYTHON_LIST = re.compile(r"\[\s*[A-Za-z_][\w.]{0,63}\(")
_LIKE_A_CALL = re.compile(
    r'\[?\s*\{\s*"(?:name|type|function)"\s*:.*"(?:arguments|parameters)"', re.S
)
_TAG_NAME = re.compile(r'([\w.-]{1,64})(?:">|>)?\s*')
_TAG_VALUE = re.compile(
    r'(?:<parameter=([^>\n]{1,64})>|<atem:parameter name="([^"\n]{1,64})">|'
    r"<arg_key>([^<\n]{1,64})</arg_key>\s*<arg_value>)"
    r"(.*?)(?:</parameter>|</atem:parameter>|</arg_value>)\s*",
    re.S,
)
_GEMMA_KEY = re.compile(r"([{,]\s*)([A-Za-z_]\w*)\s*:")
_SURROGATE = re.compile("[\ud800-\udfff]")
_LITERALS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}


def parse_tool_calls(text: str) -> tuple[str, list[dict], list[str]]:
    """Split what a model wrote into an answer and tool calls.

    These forms are read: `<tool_call>` around JSON, around Qwen's `<function=...>` or around GLM's
    `<arg_key>`; the markup of gpt-oss, Gemma 4, LFM, Llama and ATEM; a text that is itself a JSON
    call, a list of them, or `[f(x=1)]`. Prose and other JSON are an answer. A closed thought at the
    start is part of the answer, whatever it mentions. A tagged value such as `<parameter=n>42` that
    is JSON but no string is read as JSON. The caller knows the tool's signature and may turn it
    back into text.

    Returns:
        The text outside the calls, the calls as {"name": str, "arguments": dict}, and one error
        text for each call that could not be read.
    """
    position = _end_of_thought(text)
    content = text[:position]
    calls, errors = [], []
    opener = None  # The text itself may be a call, so the first attempt needs no opening tag.
    while True:
        raw_calls, problem, position = _attempt(text, opener, position)
        if problem:
            errors.append(_error(problem))
        for raw in raw_calls[: MAX_CALLS + 1]:
            try:
                calls.append(check_call(raw))
            except ValueError as error:
                errors.append(_error(error))
        if opener:
            position = _skip_closers(text, position)
        opener = _OPENER.search(text, position)
        content += text[position : opener.start() if opener else len(text)]
        # The limit also bounds the time, because each attempt may read to the end of the text.
        if len(calls) + len(errors) > MAX_CALLS:
            too_many = f"error: only {MAX_CALLS} calls a turn are read"
            return content.strip(), calls[:MAX_CALLS], [*errors[:1], too_many]
        if not opener:
            return content.strip(), calls, errors


def check_call(raw) -> dict:
    """Return a call as {"name": str, "arguments": dict of sound JSON}, else raise ValueError."""
    if isinstance(raw, dict) and isinstance(raw.get("function"), dict):
        raw = raw["function"]
    if not isinstance(raw, dict):
        raise ValueError("a tool call must be an object with a name and arguments")
    name = raw.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(f"{str(name)[:50]!r} is not a function name")
    arguments = raw.get("arguments", raw.get("parameters", {}))
    if isinstance(arguments, str):  # JSON inside a JSON string, as OpenAI writes it
        arguments, _ = _json(arguments.strip() or "{}", 0)
    if not isinstance(arguments, dict):
        kind = type(arguments).__name__
        raise ValueError(f"the arguments of {name} must be an object, got {kind}")
    try:
        _check_value(arguments, depth=1)
    except ValueError as error:
        raise ValueError(f"the arguments of {name} {error}") from None
    return {"name": name, "arguments": arguments}


def _check_value(value, depth):
    """Raise ValueError unless a value is JSON that any other program can read."""
    children = []
    match value:
        case dict():
            children = [*value, *value.values()]
            sound = True
        case list():
            children = value
            sound = True
        case str():
            sound = not _SURROGATE.search(value)
        case int() | float():
            sound = abs(value) <= sys.float_info.max
        case _:
            sound = value is None
    if not sound:
        raise ValueError("must be JSON with finite numbers and whole characters")
    if depth > MAX_DEPTH:
        raise ValueError("are nested too deep")
    for child in children:
        _check_value(child, depth + 1)


def _error(problem):
    """Return the text that tells the model why a call could not be read."""
    if type(problem) is not ValueError:  # A RecursionError, for instance, says nothing to a model.
        problem = "the tool call cannot be read"
    return f"error: {problem}"[:300]


def _skip_space(text, position):
    return _SPACE.match(text, position).end()


def _skip_closers(text, position):
    """Return the position after the closing tags that stand at a position."""
    while closer := _CLOSER.match(text, _skip_space(text, position)):
        position = closer.end()
    return position


def _end_of_thought(text):
    """Return where a closed thought at the start of the text ends, or 0 if there is none."""
    end = text.find("</think>") + len("</think>")
    if end < len("</think>"):
        return 0
    start = text.lstrip()[:7]
    if start == "<think>":
        return end
    # The generation prompt may have opened the thought. But a </think> inside a call closes none.
    opener = _OPENER.search(text)
    inside_a_call = start[:1] in ("{", "[") or (opener and opener.start() < end)
    return 0 if inside_a_call else end


def _attempt(text, opener, position):
    """Try to read calls after an opening tag, or at a position if there is no tag.

    Returns:
        The unchecked calls, the exception if they could not be read, and where to continue.
    """
    start = _skip_space(text, opener.end() if opener else position)
    try:
        raw_calls, end = _read(text, opener, start)
        if opener and not raw_calls:
            raise ValueError("a tool call without a function")
        return raw_calls, None, end if raw_calls else position
    except (ValueError, RecursionError, MemoryError, SyntaxError) as error:
        if not opener and not _LIKE_A_CALL.match(text, start):
            return [], None, position
        return [], error, _next_tag(text, start)


def _next_tag(text, position):
    """Return where the next opening or closing tag starts, or the end of the text."""
    tags = [_CLOSER.search(text, position), _OPENER.search(text, position)]
    return min([tag.start() for tag in tags if tag], default=len(text))


def _at_tag(text, position):
    """True at the end of the text and where an opening or closing tag starts."""
    return (
        position >= len(text)
        or _CLOSER.match(text, position) is not None
        or _OPENER.match(text, position) is not None
    )


def _read(text, opener, start):
    """Return the unchecked calls that start at a position, and where they end.

    Without an opener there are none if the text is an answer.
    """
    tag = opener[0] if opener else ""
    if opener and opener["name"]:
        arguments, end = _json(text, start)
        return [{"name": opener["name"], "arguments": arguments}], end
    if tag == "<|tool_call>call:":
        return _read_gemma(text, start)
    if _PYTHON_LIST.match(text, start) and (opener or text.rstrip().endswith(")]")):
        source = _CLOSER.split(text[start:], maxsplit=1)[0]
        return _read_python(source.strip()), start + len(source)
    if text[start : start + 1] in ("{", "["):
        return _read_json(text, tag, start)
    if opener:
        return _read_tagged(text, start)
    return [], start


def _read_json(text, tag, start):
    """Read one call, a list of calls, or several with semicolons between them, as Llama writes."""
    calls, end = [], start
    while text[end : end + 1] in ("{", "[") and len(calls) <= MAX_CALLS:
        value, end = _json(text, end)
        calls += value if isinstance(value, list) else [value]
        end = _skip_space(text, end)
        if text[end : end + 1] == ";":
            end = _skip_space(text, end + 1)
    if not tag and not any(map(_is_call, calls)):
        return [], start
    if tag == "<tool_call>" and not _at_tag(text, end):
        raise ValueError(f"unexpected {text[end : end + 20]!r} after the JSON of a tool call")
    return calls, end


def _is_call(value):
    """True if a JSON value that stands without a tag is meant as a tool call."""
    if not isinstance(value, dict):
        return False
    named = "name" in value and ("arguments" in value or "parameters" in value)
    return named or isinstance(value.get("function"), dict)


def _read_gemma(text, start):
    """Read Gemma 4's name{key:<|"|>text<|"|>,n:1}, which is JSON except for its quotes."""
    body = text[start:].partition("<tool_call|>")[0]
    pieces = body.split('<|"|>')
    # Pieces with an odd index stood between quotes.
    for i, piece in enumerate(pieces):
        pieces[i] = json.dumps(piece) if i % 2 else _GEMMA_KEY.sub(r'\1"\2":', piece)
    name, brace, rest = "".join(pieces).partition("{")
    arguments, _ = _json(brace + rest, 0)
    return [{"name": name, "arguments": arguments}], start + len(body)


def _read_tagged(text, start):
    """Read a name, then `<parameter=key>value</parameter>` or what GLM and ATEM write for that."""
    name = _TAG_NAME.match(text, start)
    if not name:
        got = text[start : start + 20]
        raise ValueError(f"expected a JSON object or a function name, got {got!r}")
    position = name.end()
    if text[position : position + 1] == "{":  # Llama's <function=name>{json}
        arguments, position = _json(text, position)
        return [{"name": name[1], "arguments": arguments}], position
    pairs = []
    while tag := _TAG_VALUE.match(text, position):
        key = tag[1] or tag[2] or tag[3]
        pairs.append((key, _tagged_value(tag[4].removeprefix("\n").removesuffix("\n"))))
        position = tag.end()
    if not _at_tag(text, position):
        raise ValueError(f"unexpected {text[position : position + 20]!r} in a tool call")
    return [{"name": name[1], "arguments": _unique(pairs)}], position


def _tagged_value(raw):
    """Return a tagged value as JSON if all of it is JSON and no string, else as it stands."""
    if raw in _LITERALS:
        return _LITERALS[raw]
    try:
        value, end = _json(raw, 0)
    except ValueError:
        return raw
    return raw if isinstance(value, str) or end < len(raw) else value


def _read_python(source):
    """Read [f(x=1), g(y="a")], as Llama 4 and LFM write calls. Nothing is evaluated."""
    if len(source) > MAX_PYTHON:
        raise ValueError(f"a tool call of more than {MAX_PYTHON} characters")
    with warnings.catch_warnings(action="ignore"):  # of an escape such as "\d"
        tree = ast.parse(source, mode="eval").body
    if not isinstance(tree, ast.List) or not tree.elts:
        raise ValueError("expected [name(key=value, ...)]")
    return [_python_call(node) for node in tree.elts]


def _python_call(node):
    """Return the unchecked call of one f(x=1)."""
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("expected [name(key=value, ...)]")
    pairs = []
    for keyword in node.keywords:
        if keyword.arg is None:  # **arguments
            raise ValueError("expected [name(key=value, ...)]")
        pairs.append((keyword.arg, _literal(keyword.value)))
    return {"name": ast.unparse(node.func), "arguments": _unique(pairs)}


def _literal(node):
    """Return the value of a Python literal, JSON's true, false and null included."""
    match node:
        case ast.Constant(value=int() as value) if value > sys.float_info.max:
            raise ValueError(TOO_LONG)
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name) if name in _LITERALS:
            return _LITERALS[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return _unique([(_literal(k), _literal(v)) for k, v in zip(keys, values)])
    raise ValueError("arguments must be literal values")


def _unique(pairs):
    """Return the pairs as a dict with text keys, else raise ValueError."""
    arguments = {str(key): value for key, value in pairs}
    if len(arguments) < len(pairs):
        raise ValueError("an argument is given twice")
    return arguments


def _integer(digits):
    """Return a JSON integer, unless it is longer than any number that a tool can use."""
    if len(digits) > MAX_DIGITS:
        raise ValueError(TOO_LONG)
    return int(digits)


_JSON = json.JSONDecoder(object_pairs_hook=_unique, parse_int=_integer)


def _json(text, position):
    """Return the JSON value that starts at a position, and where it ends."""
    try:
        return _JSON.raw_decode(text, position)
    except json.JSONDecodeError as error:
        problem = f"{error.msg} at character {error.pos - position}"
        raise ValueError(f"the tool call is not valid JSON: {problem}") from None
    except RecursionError:
        raise ValueError("the tool call is nested too deep") from None
