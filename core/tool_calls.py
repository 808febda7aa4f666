"""Read the tool calls in a text that a model wrote, in Hermes's form or as bare JSON.

`parse_tool_calls` never raises. What cannot be read becomes a short error for the model to see. A
good call beside a bad one counts, and one inside another never does. It works on decoded text, so a
tag spelled with ordinary tokens means the same as the added token. Other markups are added to four
tables.
"""
import json
import re

MAX_CALLS = 64  # in one turn
KEYS = {"name", "id", "type", "index", "function", "parameters"}  # of a call without "arguments"
MAX_DEPTH = 64  # of nested lists and objects in the arguments of a call
NAME = re.compile(r"[^\W\d][\w.-]{0,63}")

# The pattern of what opens a call -> of what closes it; patterns of how a thought begins and ends.
TAGS = {"<tool_call>": "</tool_call>"}
THOUGHTS, THOUGHT_ENDS = ["<think>"], ["</think>"]

_SEPARATOR = re.compile(r"\s*[;,]?\s*")
_NO_TAG = re.compile("")
_LIKE_CALL = re.compile(r'(?s)\[?\s*\{\s*"(?:name|type|function)"\s*:.*"(?:arguments|parameters)"')


def any_of(patterns) -> re.Pattern:
    """Return the pattern that matches what one of these does. Python caches it."""
    return re.compile("|".join(patterns))


def parse_tool_calls(text: str, tools=None) -> tuple[str, list[dict], list[str]]:
    """Return an answer, the calls {"name": str, "arguments": dict}, and a text for each bad call.

    A call stands between tags, or the text is itself a JSON call or a list of them. Prose and other
    JSON are an answer, and without tools ({}) all JSON is. A closed thought at the start is part of
    it, whatever it mentions. `tools` are schemas by name, as in `Chat.tools`.
    """
    position = _end_of_thought(text)
    content = text[:position]
    calls, errors = [], []
    opener = _NO_TAG.match(text, position)  # the text itself may be a call
    closers = re.compile(rf"(?:\s*(?:{any_of(TAGS.values()).pattern}))*")
    while True:
        new_calls, new_errors, position = _attempt(text, opener, tools)
        calls += new_calls
        errors += new_errors
        # The limit also bounds the time, because each attempt may read to the end of the text.
        if len(calls) + len(errors) > MAX_CALLS:
            too_many = f"error: only {MAX_CALLS} calls a turn are read"
            return content.strip(), calls[:MAX_CALLS], [*errors[:1], too_many]
        if opener[0]:
            position = closers.match(text, position).end()
        opener = any_of(TAGS).search(text, position)
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
        arguments, _ = read_value(arguments.strip() or "{}", 0)
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
    return text[end:] if end or not any_of(THOUGHTS).match(text.lstrip()) else ""


def _end_of_thought(text):
    """Return where a closed thought at the start of the text ends, or 0 if there is none."""
    closer, thought = any_of(THOUGHT_ENDS).search(text), any_of(THOUGHTS)
    if not closer:
        return 0
    if not thought.match(text.lstrip()):
        # The generation prompt may have opened the thought. But a </think> inside a call, as the
        # value of an argument, closes none, nor does that of a later thought.
        if thought.search(text, 0, closer.start()):
            return 0
        openers = [_NO_TAG.match(text), *any_of(TAGS).finditer(text, 0, closer.start())]
        for opener in openers[:MAX_CALLS]:
            calls, _, end = _attempt(text, opener)
            # A call that cannot be read counts where it begins the text.
            if end > closer.start() and (calls or not text[: opener.start()].strip()):
                return 0
    return closer.end()


def _attempt(text, opener, tools=None):
    """Return the calls after an opening tag, a text for each bad one, and where to continue."""
    if tools == {} and not opener[0]:
        return [], [], opener.end()
    start = re.compile(r"\s*").match(text, opener.end()).end()
    calls, errors, end = [], [], closing_tag(text, start, opener).start()
    try:
        bodies = (read(text, opener, start, tools) for read in BODIES)
        raw_calls, end = next(filter(None, bodies), ([], start))
        if opener[0] and end == start:
            end = next_tag(text, start, opener)
            got = text[start : start + 20]
            raise ValueError(f"expected a JSON object or a function name, got {got!r}")
        if opener[0] and not raw_calls:
            raise ValueError("a tool call without a function")
        for raw in raw_calls:
            try:
                calls.append(check_call(raw))
            except ValueError as error:
                errors.append(_error(error))
    # Nothing that a text does to a parser may end the run.
    except Exception as error:
        if not opener[0] and not _LIKE_CALL.match(text, start):
            return [], [], opener.end()
        errors.append(_error(error))
    return calls, errors, end if calls or errors else opener.end()


def tags_of(opener: re.Match) -> tuple[str, str]:
    """Return the patterns of the tags that open and close calls of this opener's family."""
    families = (tags for tags in TAGS.items() if re.fullmatch(tags[0], opener[0]))
    return next(families, ("(?!)", r"\Z"))  # without a tag, a call is all of the text


def next_tag(text: str, position: int, opener: re.Match) -> int:
    """Return where the next tag of the opener's family starts, or the end of the text."""
    return any_of([*tags_of(opener), r"\Z"]).search(text, position).start()


def closing_tag(text: str, start: int, opener: re.Match, tags: str = "") -> re.Match:
    """Return the tag that closes the call which starts there, or the end of the text.

    It is the first one after which none lacks its opening tag: tags in the text of an argument
    close nothing. The pattern `tags`, if not the family's, has two groups, as here.
    """
    tags = tags or "(?P<opens>{})|(?P<closes>{})".format(*tags_of(opener))
    closer, unopened = re.compile(r"\Z").search(text), 0
    for tag in reversed([*re.compile(tags).finditer(text, start)]):
        if not tag["opens"] and not unopened:
            closer = tag
        unopened = max(unopened + (tag["closes"] is not None) - bool(tag["opens"]), 0)
    return closer


def read_json(text, opener, start, tools):
    """Read a call in JSON, a list, or Llama's several with semicolons.

    Without a tag, a model may have written an answer. A bad call spoils none before it.
    """
    calls, end = [], start
    while text.startswith(("{", "["), end):
        try:
            value, end = read_value(text, end)
        except ValueError:
            if not calls:
                raise
            value, end = None, closing_tag(text, start, opener).start()
        calls += value if isinstance(value, list) else [value]
        end = _SEPARATOR.match(text, end).end()
    if opener[0] == "<tool_call>" and end > start and next_tag(text, end, opener) > end:
        raise ValueError(f"unexpected {text[end : end + 20]!r} after the JSON of a tool call")
    return (calls, end) if opener[0] and end > start or any(map(_is_call, calls)) else None


# Readers of what follows an opening tag, or of the text itself, for which the tag is empty. The
# first one that knows the form is taken: read(text, opener, start, tools) returns the unchecked
# calls and where they end, or None for another form, or raises ValueError.
BODIES = [read_json]


def _is_call(value):
    """True if a JSON value that stands without a tag is meant as a tool call."""
    if not isinstance(value, dict):
        return False
    named = "name" in value and ("arguments" in value or "parameters" in value)
    return named or isinstance(value.get("function"), dict)


def unique(pairs):
    """Return the pairs as a dict, else raise ValueError."""
    if len(dict(pairs)) < len(pairs):
        raise ValueError("an argument is given twice")
    return dict(pairs)


_JSON = json.JSONDecoder(object_pairs_hook=unique)


def read_value(text: str, position: int):
    """Return the JSON value that starts at a position, and where it ends."""
    try:
        return _JSON.raw_decode(text, position)
    except json.JSONDecodeError as error:
        problem = f"{error.msg} at character {error.pos - position}"
        raise ValueError(f"the tool call is not valid JSON: {problem}") from None
    except RecursionError:
        raise ValueError("the tool call is nested too deep") from None
