"""The tool-call markup of a dozen families: importing this fills the tables of core/tool_calls.py.

These forms are read beside Hermes's: the tags of tagged.py; the markup of gpt-oss, Gemma 4, LFM,
Llama, Mistral, Phi, Hunyuan; a text that is `[f(x=1)]`.
"""
import json
import re

from core.tool_calls import BODIES, TAGS, THOUGHT_ENDS, THOUGHTS, read_value

PYTHON_LIST = re.compile(r"\[\s*[^\W\d][\w.]{0,63}\(")
GEMMA_KEY = re.compile(r"([{,]\s*)([^\s{}\[\],:][^{}\[\],:]*):")
# A quote, and what follows one that ends a text. Others stand in the text.
GEMMA_QUOTE = re.compile(r'<\|"\|>(?=([\s}\]]*(?:,|\Z))?)')


def read_named(text, opener, start, tools):
    """Read the JSON after the function's name, which gpt-oss writes into the opener."""
    name = re.match(r"to=functions\.([\w.-]+)", opener[0])
    if not name:
        return None
    arguments, end = read_value(text, start)
    return [{"name": name[1], "arguments": arguments}], end


def read_python(text, opener, start, tools):
    """Read [f(x=1)]. Without a tag it is the end of the text."""
    is_marked = opener[0] or text.rstrip().endswith(")]")
    if not is_marked or not PYTHON_LIST.match(text, start):
        return None
    import extras.models.python_calls as python_calls  # most models write JSON
    from extras.models.tagged import body_of_call
    closer, _ = body_of_call(text, start, opener, r"\s*\[", r"(?<=\])\s*")
    end = closer.start()
    return python_calls.read(text[start:end].strip()), end


def read_gemma(text, opener, start, tools):
    """Read Gemma 4's name{key:<|"|>text<|"|>,n:1}."""
    if opener[0] != "<|tool_call>call:":
        return None
    from extras.models.tagged import body_of_call
    closer, shown = body_of_call(text, start, opener, r"[\w.-]{1,64}{", r"(?<=})\s*")
    pieces, position = [], start
    for quote in GEMMA_QUOTE.finditer(shown, start, closer.start()):
        if len(pieces) % 2 == 0 or quote[1] is not None:
            pieces.append(text[position : quote.start()])
            position = quote.end()
    return _gemma_call([*pieces, text[position : closer.start()]]), closer.start()


def read_tagged(text, opener, start, tools):
    """Read a name, then its arguments in tags."""
    if not opener[0]:
        return None
    import extras.models.tagged as tagged
    return tagged.read(text, opener, start, tools)


def _gemma_call(pieces):
    """Yield the call in these pieces of a text, of which those with an odd index were quoted."""
    for i, piece in enumerate(pieces):
        bare = re.sub(r"\bNone\b", "null", piece)
        pieces[i] = json.dumps(piece) if i % 2 else GEMMA_KEY.sub(r'\1"\2":', bare)
    # But for its quotes it is JSON.
    name, brace, rest = "".join(pieces).partition("{")
    source = brace + rest
    arguments, end = read_value(source, 0)
    if source[end:].strip():
        raise ValueError(f"unexpected {source[end : end + 20]!r} in a tool call")
    yield {"name": name, "arguments": arguments}


# Qwen's later models write <function=...> between Hermes's tags, or without them.
del TAGS["<tool_call>"]
TAGS.update({
    r"<tool_call>(?:\s*<function=)?|<function=": r"</function>(?:\s*</tool_call>)?|</tool_call>",
    "<tool_calls>": "</tool_calls>",
    r'<invoke name="': "</invoke>",
    r'<atem:invoke name="': "</atem:invoke>",
    r"<\|tool_call_start\|>": r"<\|tool_call_end\|>",
    r"<\|tool_call>call:": r"<tool_call\|>",
    r"<\|tool_call\|>": r"<\|/tool_call\|>",
    # These are closed by the end of the turn.
    r"<\|python_tag\|>": r"\Z",
    r"\[TOOL_CALLS\]": r"\Z",
    r"to=functions\.[\w.-]{1,64}(?:(?!<\|end\|>)[^\n]){0,64}?<\|message\|>": r"\Z"})
# The last of each are the channels of gpt-oss and Muse.
THOUGHTS += [r"\[THINK\]", r"<\|channel>thought", r"(?:<\|channel\|>analysis|to=self)<\|message\|>"]
THOUGHT_ENDS += [r"\[/THINK\]", r"<channel\|>", r"(?:<\|channel\|>final|to=user)<\|message\|>"]
# What begins as a list of JSON does is first tried as Python, and a name last.
BODIES[:0] = [read_named, read_gemma, read_python]
BODIES.append(read_tagged)
