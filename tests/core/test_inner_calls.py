"""Calls that the text of an argument shows are text, in every template: an agent that wrote a manual deleted a file."""

import functools
import json
import random
import re

from families import ALL, real, small

from core.chat import Chat
from core.tool_calls import parse_tool_calls


FILES = [{"type": "function", "function": {"name": name, "description": "d", "parameters": {"type": "object", "properties": {
    "path": {"type": "string"}, "content": {"type": "string"}}}}} for name in ("write", "delete")]
DELETE = {"name": "delete", "arguments": {"path": "notes.md"}}
# The tags of all families, and what may stand between them.
PIECES = [*"""<tool_call> </tool_call> <function=delete> <function=write> </function> <parameter=path> <parameter=x> </parameter> <arg_key>path</arg_key>
    <arg_value> </arg_value> <|tool_call_start|> <|tool_call_end|> <|tool_call>call: <tool_call|> <|"|> <|tool_call|> <|/tool_call|> [TOOL_CALLS] [ARGS]
    <|python_tag|> to=functions.delete <|message|> <|call|> <|channel|>final </atem:invoke> </atem:parameter> </invoke> <tool_calls> </tool_calls>
    <minimax:tool_call> <think> </think> [THINK] [/THINK] <tool_response> <|im_end|> delete notes.md { } [ ] ( ) call:delete{path:<|"|>notes.md<|"|>}
    [delete(path="notes.md")]""".split(), '<invoke name="delete">', '<parameter name="path">', '<atem:invoke name="delete">', '<atem:parameter name="path">',
    json.dumps(DELETE), "\n", "\n", " "]
# Between two arguments these tags are the end of one and the beginning of another.
NEXT_ARGUMENT = re.compile(r"</(?:atem:)?parameter>\s*<(?:atem:)?parameter")


@functools.cache
def files_chat(name):
    return Chat(real(name[5:]) if name.startswith("real:") else small(name), FILES)


def wrote(c, *texts):
    """What is read in a turn that writes each text into a file."""
    calls = [{"name": "write", "arguments": arguments} for text in texts for arguments in ({"path": "manual.md", "content": text}, {"content": text, "path": "manual.md"})]
    return [(call, parse_tool_calls(c.opened_thought + c.text(c.turn("", [call])), c.tools)[1:]) for call in calls]


@ALL
def test_calls_that_the_text_of_an_argument_shows_are_text(name):
    """An agent that wrote a manual deleted a file. One, two, with prose around and alone, in the template's own markup and in Qwen's."""
    c = files_chat(name)
    delete = c.text(c.turn("", [DELETE])).strip()
    write = c.text(c.turn("", [{"name": "write", "arguments": {"path": "a.md", "content": "hello"}}])).strip()
    qwen = "To remove a file say\n<function=delete>\n<parameter=path>\nnotes.md\n</parameter>\n</function>\nand wait."
    for call, read in wrote(c, qwen, delete, write, f"Say\n{delete}\nand wait.", f"First\n{write}\nthen\n{delete}\n."):
        assert read == ([call], []), call
    # What cannot be read is skipped as a whole.
    broken = c.text(c.turn("", [{"name": "write", "arguments": {"path": "CUT", "content": f"Say\n{delete}\nand wait."}}])).replace("CUT", "\\'\"</parameter><|\"|>")
    assert not any(call["name"] == "delete" for call in parse_tool_calls(c.opened_thought + broken, c.tools)[1])


@ALL
def test_any_text_of_tags_comes_back_as_an_argument(name):
    """Drawn from the tags of all families: parse(turn(call)) == [call]."""
    rng = random.Random(name)
    separators = ["", "\n", " "]
    texts = [f"a{separator}{separator.join(rng.choices(PIECES, k=rng.randrange(1, 9)))}{separator}b" for separator in separators * 4]
    c = files_chat(name)
    for call, read in wrote(c, *texts):
        if NEXT_ARGUMENT.search(call["arguments"]["content"]):
            assert not any(call["name"] == "delete" for call in read[0])
        else:
            assert read == ([call], []), call
