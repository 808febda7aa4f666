"""Turn a recorded conversation into token ids and a loss mask.

The ids are put together turn by turn, exactly as in an episode that is played.
"""
import ast
import json
import re
from contextlib import suppress

from core.tool_calls import (THOUGHT_ENDS, THOUGHTS, after_thought, any_of, check_call,
                             parse_tool_calls)

TAGGED_RESULT = re.compile(r"\s*<tool_response>\s*(.*?)\s*</tool_response>\s*", re.DOTALL)
PYTHON_CALL = re.compile(r"(?<=<tool_call>)\s*\{'.*?(?=</tool_call>)", re.DOTALL)
# The role of a message -> the roles that may come next, and how an error names the place.
NEXT = {
    None: (["system", "user"], "at the start"),
    "system": (["user"], "after the system message"),
    "user": (["assistant"], "after the user"),
    "assistant": (["user"], "after an answer"),
    "tool": (["assistant"], "after the last result")}


def recorded_ids(chat, messages: list[dict]) -> tuple[list[int], list[int]]:
    """Return the ids and the loss mask of a recorded conversation.

    The mask is 1 on an assistant message and its stop token unless the message says "loss": 0, and
    0 elsewhere. What follows the last assistant message is cut.

    Args:
        chat: a `Chat` of the model's tokenizer and the conversation's tools.
        messages: a list of objects with a role. The content is text or a list of text parts. Calls
            stand in `tool_calls`, in OpenAI's form or ours, or in the text. A tool message follows
            for each, or one with the results of all between Hermes's tags.

    Raises:
        ValueError: in one line, for what no rollout could have made.
    """
    # A role that we do not know may be the assistant's.
    while messages and messages[-1].get("role") in ("system", "user", "tool"):
        messages = messages[:-1]
    messages = one_per_turn(messages)
    ids, mask = [], []
    calls, call_ids = [], []  # of the last assistant message
    since = []  # the messages since then
    last = None  # the role of the message before
    past = _past(messages)
    for i, message in enumerate(messages):
        role = message.get("role")
        try:
            _check_role(role, last, len(since) < len(calls))
            text, new_calls = _read_message(message, chat.tools)
            loss = _loss(message)
            if role == "tool":
                result_id, call_id = message.get("tool_call_id"), call_ids[len(since)]
                if result_id and call_id and str(result_id) != str(call_id):
                    raise ValueError("results must stand in the order of their calls, by their "
                                     "tool_call_id")
            last = role
            if role != "assistant":
                since.append({"role": role, "content": text})
                continue
            if i < past and not new_calls:
                since.append({**message, "content": _text_of(message["content"])})
                continue
            before = _ids_before_turn(chat, since, calls, ids)
            turn = _turn_ids(chat, text, new_calls, loss)
        except ValueError as error:
            raise ValueError(f"message {i}: {error}") from None
        ids += before + turn
        mask += [0] * len(before) + [loss] * len(turn)
        since, calls = [], new_calls
        # Calls that are written in the text have no ids.
        call_ids = [call.get("id") for call in message.get("tool_calls") or calls]
    if not any(mask):
        without = ' without "loss": 0' if messages else ""
        raise ValueError(f"nothing to train: no assistant message{without}")
    return ids, mask


def one_per_turn(messages):
    """Return the messages with one for each turn of the assistant and one for each result.

    Qwen-Agent and ms-swift write each call of a turn as a message of its own. The turn is learned
    if all its messages are. Hermes's data sets write all results as one message, with the
    <tool_response> that the chat template writes as well.
    """
    turns = [{}]
    for message in messages:
        last, role = turns[-1], message.get("role")
        text = str(message.get("content") or "")
        is_next = role == last.get("role") == "assistant" and not last.get("tool_calls")
        if role == "tool" and text and not TAGGED_RESULT.sub("", text):
            turns += [{**message, "content": result} for result in TAGGED_RESULT.findall(text)]
        elif is_next and text.startswith("<tool_call>"):
            before = with_thought(last, _text_of(last.get("content") or ""))
            turns[-1] = {**last, **message, "content": f"{before}\n{text}",
                         "loss": min(_loss(last), _loss(message))}
        else:
            turns.append(message)
    return turns[1:]


def _past(messages):
    """Return how many messages are the first prompt, which the template renders as a whole.

    They are those before the first turn that is learned, if they end with a question and call no
    tool: the same prompt as that of a rollout.
    """
    for i, message in enumerate(messages):
        if message.get("role") == "tool":
            break
        is_learned = 0 not in map(message.get, ("loss", "weight"))
        if message.get("role") == "assistant" and is_learned:
            return i if messages[i - 1].get("role") == "user" else 0
    return 0


def _check_role(role, last, needs_result):
    """Raise ValueError unless a message of this role may come next.

    `last` is the role of the message before, and `needs_result` is True while a call has no result.
    """
    roles, place = NEXT[last]
    if needs_result:
        roles, place = ["tool"], "after a tool call"
    if role not in roles:
        raise ValueError(f"need {' or '.join(roles)} {place}, got {role}")


def _loss(message):
    """Return 1 if a message is trained, else 0. OpenAI calls the field "weight"."""
    is_assistant = message["role"] == "assistant"
    # parquet writes null where a row has no such field
    loss = message.get("loss")
    if loss is None:
        loss = message.get("weight")
    if loss is None:
        return int(is_assistant)
    if loss not in (0, 1) or (loss and not is_assistant):
        raise ValueError(f'"loss": {loss!r}: need 0 or 1, and 1 only on assistant messages')
    # pandas makes 1.0 of 1 where other messages have no such field.
    return int(loss)


def _read_message(message, tools):
    """Return the text and the calls of a message, calls written in the text included."""
    # What other trainers call a loss of 0.
    for name in ("train", "training"):
        if message.get(name) is not None:
            raise ValueError(f'"{name}" is not read; "loss": 0 keeps a message from being learned')
    is_assistant = message["role"] == "assistant"
    calls = message.get("tool_calls") or []
    content = message.get("content")
    text = "" if content is None and calls else _text_of(content)
    text = with_thought(message, text)
    if not isinstance(calls, list) or (calls and not is_assistant):
        raise ValueError("tool_calls must be a list, in an assistant message")
    if calls or not is_assistant:
        return text, [check_call(call) for call in calls]
    content, calls, errors = parse_tool_calls(PYTHON_CALL.sub(_as_json, text), tools)
    if errors:
        problem = errors[0].removeprefix("error: ")
        raise ValueError(f"{problem}; a text that opens a tool call must hold a whole one")
    return (content, calls) if calls else (text, [])


def with_thought(message: dict, text: str) -> str:
    """Return the message's text, preceded by the thought in one of its fields.

    A text that has a thought stays as it is.
    """
    thoughts = map(message.get, ("reasoning_content", "thinking", "reasoning"))
    thought = str(next(filter(None, thoughts), "")).strip()
    return f"<think>\n{thought}\n</think>\n\n{text}" if thought and "</think>" not in text else text


def split_thought(text: str) -> tuple[str, str]:
    """Return the thought that a text begins with, ended or not, and what follows it."""
    # What stands around thoughts. Between two channels gpt-oss and Muse end a message.
    markup = re.compile(r"(?:<\|(?:end|eom)\|><\|start\|>assistant\s*)?"
                        rf"(?:{any_of([*THOUGHTS, *THOUGHT_ENDS]).pattern}|\Z)")
    # In an answer or a call </think> may be a word like others.
    answer = after_thought(text) if markup.match(text.lstrip()) else text
    thought = text[:len(text) - len(answer)]
    return markup.sub("", thought), answer.lstrip("\n") if thought else answer


def _as_json(call):
    """Return a match of PYTHON_CALL, which Hermes's data sets write as Python does, as JSON."""
    with suppress(ValueError, SyntaxError):
        return json.dumps(ast.literal_eval(call[0].strip()))
    return call[0]


def _text_of(content):
    """Return the content of a message as text. It may be a list of text parts."""
    if isinstance(content, list):
        # Another part, such as an image, is refused below.
        with suppress(TypeError, KeyError):
            return "".join([part["text"] for part in content])
    if not isinstance(content, str):
        kind = type(content).__name__
        raise ValueError(f"content must be text or text parts, got {kind}")
    return content


def _ids_before_turn(chat, since, calls, ids):
    """Return the ids between two assistant turns, or the prompt before the first one."""
    if not ids:
        return chat.prompt(since)
    if calls:
        return chat.results(calls, [message["content"] for message in since], ids[-1])
    return chat.reply(since[0]["content"], ids[-1])


def _turn_ids(chat, text, calls, loss):
    """Return the ids of an assistant message."""
    for call in calls:
        if chat.tools and call["name"] not in chat.tools:
            raise ValueError(f"calls {call['name']!r}; tools are {', '.join(chat.tools)}")
    if loss and not calls and not text.strip():
        raise ValueError("is empty: nothing to train on")
    if loss and text.lstrip().startswith("<think>") and "</think>" not in text:
        raise ValueError("a thought without </think>, of a text that was cut; leave such rows out, "
                         'or give the message "loss": 0')
    return thoughtful_ids(chat, text, calls)


def thoughtful_ids(chat, text, calls):
    """Return the ids of a turn as the model would write it, with the thought that it begins with.

    Raises ValueError if the template hides it.
    """
    if "</think>" not in text:
        return chat.turn(text, calls)
    thought, _, answer = text.strip().removeprefix("<think>").partition("</think>")
    answer = answer.strip("\n")

    def turn_with(thought):
        return chat.turn(answer, calls, reasoning_content=thought, thinking=thought)

    hidden = turn_with("")
    # In this case the template shows thoughts that are given as a field.
    if turn_with("any thought") != hidden:
        return turn_with(thought.strip("\n"))
    closing = chat.encode("</think>\n\n")
    # The prompt opens a thought that the template leaves out of its own turns (DeepSeek-R1).
    if hidden[: len(closing)] == closing:
        return chat.turn(thought.strip("\n") + "\n", [])[len(closing) : -1] + hidden
    said = text.strip().removeprefix(chat.opened_thought).lstrip()
    for turn in (hidden, chat.turn(text, calls)):
        if chat.text(turn).lstrip().startswith(said):
            return turn
    raise ValueError("the chat template does not show a thought where the model would write it")
