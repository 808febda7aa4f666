"""The tool-call markup of a dozen families: importing this fills the tables of core/tool_calls.py.

These forms are read beside Hermes's: Qwen's `<function=...>` and GLM's `<arg_key>`; the markup of
gpt-oss, Gemma 4, LFM, Llama, ATEM, Mistral, MiniMax, Phi, Hunyuan; a text that is `[f(x=1)]`. A
tagged value, as in `<parameter=n>42`, is read as JSON if it can be, but as text where the tool's
schema says so.
"""
import json
import re
from contextlib import suppress

from core.tool_calls import (BODIES, CLOSERS, OPENERS, THOUGHT_ENDS, THOUGHTS, any_of, next_tag,
                             read_value, unique)
import extras.models.python_calls as python_calls
from extras.models.python_calls import PYTHON_WORDS

PYTHON_LIST = re.compile(r"\[\s*[^\W\d][\w.]{0,63}\(")
TAG_NAME = re.compile(r'([\w.-]{1,64})(?:">|>|\[ARGS\])?\s*')
TAG_VALUE = re.compile(
    r'(?:(<parameter=)|<(?:atem:)?parameter name="|<arg_key>)([^<>"\n]{1,64})'
    r'(?:">|>|</arg_key>\s*<arg_value>)'
    r"(?(1)\n?)((?:(?!\n<parameter=).)*?)(?(1)\n?)(?:</(?:atem:)?parameter>|</arg_value>)\s*", re.S)
GEMMA_BODY = re.compile(r'(?:<\|"\|>.*?<\|"\|>|(?!<tool_call\|>).)*+', re.S)
GEMMA_KEY = re.compile(r"([{,]\s*)([^\s{}\[\],:][^{}\[\],:]*):")


def read_named(text, opener, start, tools):
    """Read the JSON after the function's name, which gpt-oss writes into the opener."""
    name = opener.groupdict().get("name")
    if not name:
        return None
    arguments, end = read_value(text, start)
    return [{"name": name, "arguments": arguments}], end


def read_python(text, opener, start, tools):
    """Read [f(x=1)]. Without a tag it is the end of the text."""
    is_marked = opener[0] or text.rstrip().endswith(")]")
    if not is_marked or not PYTHON_LIST.match(text, start):
        return None
    source = any_of(CLOSERS).split(text[start:], maxsplit=1)[0]
    return python_calls.read(source.strip()), start + len(source)


def read_gemma(text, opener, start, tools):
    """Read Gemma 4's name{key:<|"|>text<|"|>,n:1}, which is JSON except for its quotes."""
    if opener[0] != "<|tool_call>call:":
        return None
    body = GEMMA_BODY.match(text, start)[0]
    pieces = body.split('<|"|>')
    # Pieces with an odd index stood between quotes.
    for i, piece in enumerate(pieces):
        bare = re.sub(r"\bNone\b", "null", piece)
        pieces[i] = json.dumps(piece) if i % 2 else GEMMA_KEY.sub(r'\1"\2":', bare)
    name, brace, rest = "".join(pieces).partition("{")
    arguments, _ = read_value(brace + rest, 0)
    return [{"name": name, "arguments": arguments}], start + len(body)


def read_tagged(text, opener, start, tools):
    """Read a name, then `<parameter=key>value</parameter>` or what GLM and ATEM write for that."""
    name = TAG_NAME.match(text, start)
    if not opener[0] or not name:
        return None
    position = name.end()
    # This is Llama's form, <function=name>{json}.
    if text.startswith("{", position):
        arguments, position = read_value(text, position)
        return [{"name": name[1], "arguments": arguments}], position
    pairs = []
    while tag := TAG_VALUE.match(text, position):
        _, key, value = tag.groups()
        pairs.append((key, _tagged_value(value, (tools or {}).get(name[1]), key)))
        position = tag.end()
    if not pairs and position == len(text):
        raise ValueError("a tool call without arguments must be closed")
    if next_tag(text, position) > position:
        raise ValueError(f"unexpected {text[position : position + 20]!r} in a tool call")
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


# The first one, because `<tool_call>` alone is the beginning of it.
OPENERS.insert(0, r"(?:<tool_call>\s*)?<function=")
OPENERS += [
    "<tool_calls>", r'<(?:atem:)?invoke name="', r"<\|python_tag\|>", r"<\|tool_call_start\|>",
    r"<\|tool_call>call:", r"<\|tool_call\|>", r"\[TOOL_CALLS\]",
    r"to=functions\.(?P<name>[\w.-]{1,64})(?:(?!<\|end\|>)[^\n]){0,64}?<\|message\|>"]
CLOSERS += ["</tool_calls>", "</function>", "</(?:atem:)?invoke>", r"<\|tool_call_end\|>",
            r"<(?:\|/)?tool_call\|>"]
# The last of each are the channels of gpt-oss and Muse.
THOUGHTS += [r"\[THINK\]", r"<\|channel>thought", r"(?:<\|channel\|>analysis|to=self)<\|message\|>"]
THOUGHT_ENDS += [r"\[/THINK\]", r"<channel\|>", r"(?:<\|channel\|>final|to=user)<\|message\|>"]
# What begins as a list of JSON does is first tried as Python, and a name last.
BODIES[:0] = [read_named, read_gemma, read_python]
BODIES.append(read_tagged)
