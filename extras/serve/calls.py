"""Which calls of a turn are whole, where a limit cut it or where it need not go on."""
import re

from core.tool_calls import TAGS, any_of, parse_tool_calls, tags_of

LAST_TAG = re.compile(r"(?:<[^<>\s]+>|\S)\s*\Z")


def whole_calls(text: str, tools) -> list[dict]:
    """Return the calls of a turn that has no stop token, without the one that was cut."""
    opener = any_of(TAGS).search(text)
    # JSON without tags, or without a closing one, tells by itself where it ends.
    if opener and tags_of(opener)[1] != r"\Z" and text.lstrip()[:1] not in ("{", "["):
        depth, end = 0, 0
        for tag in re.finditer("(?P<opens>{})|{}".format(*tags_of(opener)), text):
            depth = max(depth + (1 if tag["opens"] else -1), 0)
            if not depth:
                end = tag.end()
        text = text[:end]
    return parse_tool_calls(text, tools)[1]


def closing_of(chat) -> str:
    """Return what a call ends with in turns of this chat: a tag, or a brace where there is none."""
    name = next(iter(chat.tools))
    call = chat.text(chat.turn("", [{"name": name, "arguments": {"x": 1}}]))
    return LAST_TAG.search(call)[0].strip()
