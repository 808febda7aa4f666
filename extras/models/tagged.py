"""Tool calls with a tag around each argument, as Qwen, MiniMax, ATEM and GLM write them.

    <function=name>
    <parameter=key>
    value
    </parameter>
    </function>

A value is whatever stands between its tags, and may show calls itself: a manual does. So where the
call ends is decided first, then where each of its values does. A tag that the value shows counts
for neither, unless the whole is the same, to the letter, as a call with more arguments.
"""
import re
from contextlib import suppress

from core.tool_calls import closing_tag, next_tag, read_value, tags_of, unique
from extras.models.python_calls import PYTHON_WORDS

NAME = r'([\w.-]{1,64})(?:">|>|\[ARGS\])?\s*'
KEY = r'(?P<key>[^<>"\n]{1,64})'
# How an argument begins -> how it ends.
ARGUMENTS = {
    rf"<parameter={KEY}>\n?": r"\n?</parameter>",
    rf'<parameter name="{KEY}">': "</parameter>",
    rf'<atem:parameter name="{KEY}">': "</atem:parameter>",
    rf"<arg_key>{KEY}</arg_key>\s*<arg_value>": "</arg_value>"}


def read_tagged(text, opener, start, tools):
    """Read a name, then its arguments in tags. After the name Llama writes JSON instead."""
    name = re.compile(NAME).match(text, start)
    if not opener[0] or not name:
        return None
    position = name.end()
    if text.startswith("{", position):
        arguments, position = read_value(text, position)
        return [{"name": name[1], "arguments": arguments}], position
    for begins, ends in ARGUMENTS.items():
        first = re.compile(f"(?P<tag>{begins})").match(text, position)
        if first:
            closer, shown = body_of_call(text, first.end(), opener, NAME + begins, rf"{ends}\s*")
            return _call(text, shown, name, first, closer, ends, tools), closer.end()
    if position == len(text):
        raise ValueError("a tool call without arguments must be closed")
    end = next_tag(text, position, opener)
    if end > position:
        return _unexpected(text, position), end
    return [{"name": name[1], "arguments": {}}], position


def body_of_call(text, start, opener, begins, ends) -> tuple[re.Match, str]:
    """Return the tag that closes a call, and the text with null characters for the calls inside.

    Tags count before what `begins` such a call and after what `ends` one. Others are text, unless
    no tag closes the call otherwise.
    """
    opens, closes = map("(?:{})".format, tags_of(opener))
    tags = (rf"(?P<opens>{opens}{begins})|(?P<closes>{ends}(?:{closes}|(?={opens})|\Z))"
            rf"|{closes}(?=\s*{opens})")
    closer = closing_tag(text, start, opener, tags)
    if "closes" not in closer.re.groupindex:
        closer = closing_tag(text, start, opener)
    opened = []
    for tag in re.compile(tags).finditer(text, start, closer.start()):
        if tag["opens"]:
            opened.append(tag.start())
        elif tag["closes"] is not None and opened:
            first = opened.pop()
            text = text[:first] + "\0" * (tag.end() - first) + text[tag.end():]
    return closer, text


def _call(text, shown, name, first, closer, ends, tools):
    """Yield the call whose first argument begins with the match `first`, or raise ValueError.

    `shown` is the text without the calls that its arguments show.
    """
    function = (tools or {}).get(name[1])
    known = _properties(function)
    keys = [first["key"]]
    starts = [first]
    has_lines = "\n" in text[name.end(1) : first.start()]
    between = re.compile(rf"{ends}(?P<gap>\s*){first.re.pattern}")
    tags = [*between.finditer(shown, first.end(), closer.start())]
    on_lines = {tag["key"] for tag in tags if "\n" in tag["gap"]}
    for tag in tags:
        # Where each tag of the call has a line, two on one line are text if they fit no argument.
        fits = (known is None or tag["key"] in known) and tag["key"] not in on_lines.union(keys)
        if fits or "\n" in tag["gap"] or not has_lines:
            keys.append(tag["key"])
            starts.append(tag)
    stops = [tag.start() for tag in starts[1:]] + [closer.start()]
    pairs = []
    for tag, stop in zip(starts, stops):
        raw = text[tag.end() : stop]
        # After the last tag that closes an argument, one that opens another shows that the tag
        # between them is missing.
        for lost in re.finditer("\n" + first.re.pattern, re.split(ends, raw)[-1]):
            if lost["key"] not in keys and (known is None or lost["key"] in known):
                yield from _unexpected(text, tag.start("tag"))
        pairs.append((tag["key"], _value(raw, function, tag["key"])))
    if not re.compile(ends).match(text, closer.start()):
        last = re.compile(rf"{ends}\s*").search(text, tag.end(), closer.start())
        yield from _unexpected(text, last.end() if last else tag.start("tag"))
    yield {"name": name[1], "arguments": unique(pairs)}


def _unexpected(text, position):
    """Raise ValueError, as the first of the calls is asked for."""
    raise ValueError(f"unexpected {text[position : position + 20]!r} in a tool call")
    yield


def _properties(function) -> dict | None:
    """Return the schemas of a function's arguments, or None if they are not known."""
    # The schemas of a data file may have any form.
    with suppress(LookupError, TypeError):
        properties = function["parameters"]["properties"]
        return properties if isinstance(properties, dict) else None


def _value(raw, function, key):
    """Return a tagged value as JSON if all of it is JSON and no string, else as it stands.

    Where the function's schema asks for text it is text, or None if that may be and it is null.
    """
    json_text = PYTHON_WORDS.get(raw.strip(), raw.strip())
    with suppress(LookupError, TypeError, AttributeError):
        kinds = _kinds(function["parameters"]["properties"][key])
        if kinds - {"null"} == {"string"} and not (json_text == "null" and "null" in kinds):
            return raw
    with suppress(ValueError):
        value, end = read_value(json_text, 0)
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
