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


def read(text, opener, start, tools):
    """Read a name, then its arguments in tags. After the name Llama writes JSON instead."""
    name = re.compile(NAME).match(text, start)
    if not name:
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
    the same opener follows or no tag closes the call otherwise.
    """
    opens, closes = map("(?:{})".format, tags_of(opener))
    tags = (rf"(?P<opens>{opens}{begins})|(?P<closes>{ends}(?:{closes}|(?={opens})|\Z))"
            rf"|{closes}(?=\s*{re.escape(opener[0])})")
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
    properties = _properties((tools or {}).get(name[1]))
    known = properties.keys()
    keys = [first["key"]]
    starts = [first]
    has_lines = "\n" in text[name.end(1) : first.start()]
    between = re.compile(rf"{ends}(?P<gap>\s*){first.re.pattern}")
    tags = [*between.finditer(shown, first.end(), closer.start())]
    on_lines = {tag["key"] for tag in tags if "\n" in tag["gap"]}
    for tag in tags:
        # Where each tag of the call has a line, two on one line are text if they fit no argument.
        fits = (not known or tag["key"] in known) and tag["key"] not in on_lines.union(keys)
        if fits or "\n" in tag["gap"] or not has_lines:
            keys.append(tag["key"])
            starts.append(tag)
    stops = [tag.start() for tag in starts[1:]] + [closer.start()]
    pairs = []
    for tag, stop in zip(starts, stops):
        raw = text[tag.end() : stop]
        types = _types(properties.get(tag["key"]))
        end = re.compile(rf"{ends}\s*").search(text, tag.end(), closer.start())
        # Only a text can hold tags, and the last of an argument must close it.
        if end and end.start() < stop and types and "string" not in types:
            yield from _unexpected(text, end.end())
        if not re.compile(ends).match(text, stop):
            yield from _unexpected(text, end.end() if end else tag.start("tag"))
        # After the last closing tag in it, one that opens another argument shows that its own
        # closing tag is missing.
        for lost in re.finditer("\n" + first.re.pattern, re.split(ends, raw)[-1]):
            if lost["key"] not in keys and (not known or lost["key"] in known):
                yield from _unexpected(text, tag.start("tag"))
        pairs.append((tag["key"], _value(raw, types)))
    yield {"name": name[1], "arguments": unique(pairs)}


def _unexpected(text, position):
    """Raise ValueError, as the first of the calls is asked for."""
    raise ValueError(f"unexpected {text[position : position + 20]!r} in a tool call")
    yield


def _properties(function) -> dict:
    """Return the schemas of a function's arguments by their names, as far as they are known."""
    # The schemas of a data file may have any form.
    with suppress(LookupError, TypeError):
        properties = function["parameters"]["properties"]
        if isinstance(properties, dict):
            return properties
    return {}


def _types(schema) -> set:
    """Return the types that a schema allows, if any; pydantic writes str | None as anyOf."""
    types = set()
    with suppress(TypeError, AttributeError):
        types = {"null"} if schema.get("nullable") else set()
        for choice in (schema, *schema.get("anyOf", ()), *schema.get("oneOf", ())):
            kind = choice.get("type", [])
            types |= {kind} if isinstance(kind, str) else set(kind)
    return types


def _value(raw, types):
    """Return a tagged value as JSON if all of it is JSON and no string, else as it stands.

    Where the function's schema asks for text it is text, or None if that may be and it is null.
    """
    json_text = PYTHON_WORDS.get(raw.strip(), raw.strip())
    if types - {"null"} == {"string"} and not (json_text == "null" and "null" in types):
        return raw
    with suppress(ValueError):
        value, end = read_value(json_text, 0)
        if not isinstance(value, str) and end == len(json_text):
            return value
    return raw
