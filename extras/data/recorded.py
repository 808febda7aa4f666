"""Turn a recorded conversation into token ids and a loss mask.

The ids are put together turn by turn, exactly as in an episode that is played.
"""
import ast
import json
import re
from contextlib import suppress

from core.tool_calls import (THOUGHT_ENDS, THOUGHTS, after_thought, any_of, check_call,
                             parse_tool_calls)
from extras.data.tables import THOUGHT_FIELDS, need_text_alone, text_of, truth

TAGGED_RESULT = re.compile(r"\s*<tool_response>\s*(.*?)\s*</tool_response>\s*", re.DOTALL)
PYTHON_CALL = re.compile(r"(?<=<tool_call>)\s*\{'.*?(?=</tool_call>)", re.DOTALL)
OTHER_THOUGHTS = ("reasoning_details", "thinking_blocks", "thought")  # of APIs, beside one of these
# A message is learned unless one of these is false. OpenAI calls the field "weight".
LOSS_FIELDS = ("loss", "weight", "trainable")
# Words in names of other fields of that kind. Some say what is learned, and some what is not.
LOSS_WORDS = {"train", "training", "trained", "trainable", "mask", "masked", "loss", "learn"}
NO_THOUGHT = "<think></think>"  # before an answer, so that it is read as nothing else
# The role of a message -> the roles that may come next, and how an error names the place.
NEXT = {
    None: (["system", "user"], "at the start"),
    "system": (["user"], "after the system message"),
    "user": (["assistant"], "after the user"),
    "assistant": (["user"], "after an answer"),
    "tool": (["assistant"], "after the last result")}


def recorded_ids(chat, messages: list[dict], history=False) -> tuple[list[int], list[int]]:
    """Return the ids and the loss mask of a recorded conversation.

    The mask is 1 on an assistant message and its stop token unless the message says "loss": 0, and
    0 elsewhere. What follows the last assistant message is cut. A thought stands in a field of its
    own, or at the beginning of the text between <think> and </think>.

    Args:
        chat: a `Chat` of the model's tokenizer and the conversation's tools.
        messages: a list of objects with a role. The content is text or a list of text parts. Calls
            stand in `tool_calls`, in OpenAI's form or ours, or in the text. A tool message follows
            for each, or one with the results of all between Hermes's tags.
        history: True for a conversation that is continued and not learned. Its turns are a model's,
            which may be empty, call what is no tool, and hold a call that cannot be read, a text.

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
            thought, text, new_calls = _read_message(message, chat, history)
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
                since.append(_past_turn(chat, message, thought))
                continue
            before = _ids_before_turn(chat, since, calls, ids)
            if not history:
                _check_learned(chat, thought, text, new_calls, loss)
            turn = _turn_ids(chat, thought, text, new_calls, loss)
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
        is_call = text.startswith("<tool_call>") and not any(map(message.get, THOUGHT_FIELDS))
        if role == "tool" and text and not TAGGED_RESULT.sub("", text):
            turns += [{**message, "content": result} for result in TAGGED_RESULT.findall(text)]
        elif is_next and is_call:
            before = text_of(last.get("content") or "")
            thoughts = {name: last.get(name) for name in THOUGHT_FIELDS}
            turns[-1] = {**last, **message, **thoughts, "content": f"{before}\n{text}",
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
        is_learned = 0 not in [truth(message.get(name)) for name in LOSS_FIELDS]
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


def _past_turn(chat, message, thought):
    """Return an assistant message of the first prompt, of which the template renders the text.

    The template itself cuts a thought out of the text.
    """
    text = text_of(message["content"])
    past = {name: message[name] for name in message if name not in THOUGHT_FIELDS}
    if thought or "</think>" in text and not _begins_with_thought(chat, thought, text):
        past |= {"reasoning_content": thought or "", "thinking": thought or ""}
    return past | {"content": text}


def _loss(message):
    """Return 1 if a message is trained, else 0."""
    is_assistant = message["role"] == "assistant"
    # parquet writes null where a row has no such field, and pandas makes 1.0 of 1.
    losses = {name: truth(message[name]) for name in LOSS_FIELDS if message.get(name) is not None}
    is_left_out = 0 in losses.values()
    for name, loss in losses.items():
        if loss is None or not is_assistant and not is_left_out:
            raise ValueError(f'"{name}": {message[name]!r}: need 0 or 1, and 1 only on assistant '
                             "messages")
    return int(is_assistant and not is_left_out)


def _read_message(message, chat, history):
    """Return the thought, the text and the calls of a message, calls in the text included.

    The thought is that of a field. One that the text begins with stays there. In a history, calls
    that cannot be read stay in the text.
    """
    for name in message.keys() - LOSS_FIELDS:
        if message[name] is not None and not LOSS_WORDS.isdisjoint(name.lower().split("_")):
            raise ValueError(f'"{name}" is not read; "loss": 0 keeps a message from being learned')
    need_text_alone(message)
    is_assistant = message["role"] == "assistant"
    calls = message.get("tool_calls") or []
    content = message.get("content")
    text = "" if content is None and calls else text_of(content)
    thought = _thought(message)
    if thought and not is_assistant:
        raise ValueError("a thought must stand in an assistant message")
    if not isinstance(calls, list) or (calls and not is_assistant):
        raise ValueError("tool_calls must be a list, in an assistant message")
    if thought and _split(text)[0].strip() == thought:
        thought = ""  # the text has it as well
    if calls or not is_assistant:
        return thought, text, list(map(check_call, calls))
    # Only a thought ends at </think>. In an answer it is a word like others.
    is_answer = "</think>" in text and not _begins_with_thought(chat, thought, text)
    before = NO_THOUGHT if is_answer else ""
    content, calls, errors = parse_tool_calls(before + PYTHON_CALL.sub(_as_json, text), chat.tools)
    if errors and history:
        return thought, text, []
    if errors:
        problem = errors[0].removeprefix("error: ")
        raise ValueError(f"{problem}; a text that opens a tool call must hold a whole one")
    return thought, content.removeprefix(before).strip() if calls else text, calls


def _check_learned(chat, thought, text, calls, loss):
    """Raise ValueError for an assistant message that no model should imitate."""
    for call in calls:
        if chat.tools and call["name"] not in chat.tools:
            raise ValueError(f"calls {call['name']!r}; tools are {', '.join(chat.tools)}")
    if loss and not calls and not text.strip() and not thought:
        raise ValueError("is empty: nothing to train on")


def _thought(message):
    """Return the thought in one of the fields of a message, or None if it has no such field."""
    thoughts = {}
    for name in THOUGHT_FIELDS:
        if message.get(name) not in (None, [], {}):
            thoughts[text_of(message[name], name).strip()] = name
    if len(thoughts) > 1:
        thoughts.pop("", None)
    if len(thoughts) > 1:
        raise ValueError(f"{' and '.join(thoughts.values())} hold different thoughts")
    for name in OTHER_THOUGHTS:
        if message.get(name) and not any(thoughts):
            raise ValueError(f'"{name}" is not read; give the thought as "reasoning_content"')
    return next(iter(thoughts), None)


def _begins_with_thought(chat, thought, text):
    """True if the text of a message begins with a thought.

    The prompt may have opened it. If the message has a field for thoughts, it stands there.
    """
    opened = thought is None and chat.opened_thought
    return not thought and bool(opened or any_of(THOUGHTS).match(text.lstrip()))


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


def _ids_before_turn(chat, since, calls, ids):
    """Return the ids between two assistant turns, or the prompt before the first one."""
    if not ids:
        prompt = chat.prompt(since)
        for message in since:
            if "reasoning_content" in message:
                _check_whole(chat, prompt, message["content"])
        return prompt
    if calls:
        return chat.results(calls, [message["content"] for message in since], ids[-1])
    return chat.reply(since[0]["content"], ids[-1])


def _turn_ids(chat, thought, text, calls, loss):
    """Return the ids of an assistant message as the model would write it, thought included.

    Raises ValueError for what cannot be trained, or if the template hides a thought.
    """
    if thought:
        written, answer = f"<think>\n{thought}\n</think>\n\n{text}", text.rstrip().lstrip("\n")
    else:
        is_thought, thought = _begins_with_thought(chat, thought, text), None
        written, answer = text, text
        if "</think>" in text and is_thought:
            thought, answer = _split(text)
        elif loss and text.lstrip().startswith("<think>"):
            raise ValueError("a thought without </think>, of a text that was cut; leave such rows "
                             'out, or give the message "loss": 0')
    ids = thoughtful_ids(chat, thought, answer, calls, written)
    _check_whole(chat, ids, thought or "")
    _check_whole(chat, ids, answer)
    return ids


def _split(text):
    """Return the thought that a text begins with, and the answer."""
    thought, _, answer = text.strip().removeprefix("<think>").partition("</think>")
    return thought.strip("\n"), answer.strip("\n")


def _check_whole(chat, ids, text):
    """Raise ValueError if the template has cut a text at the tag that it names."""
    if "</think>" in text and text.strip() not in chat.text(ids):
        raise ValueError("the chat template cuts a text at </think>; leave such rows out")


def thoughtful_ids(chat, thought, answer, calls, written):
    """Return the ids of a turn with a thought or None, ValueError if the template hides it.

    `written` is the turn as a text, for templates that know no thoughts.
    """
    if "</think>" not in written:
        return chat.turn(answer, calls)

    def turn_with(thought):
        return chat.turn(answer, calls, reasoning_content=thought, thinking=thought)

    hidden = turn_with("")
    # In this case the template shows thoughts that are given as a field.
    if thought is None or turn_with("any thought") != hidden:
        return turn_with(thought or "")
    closing = chat.encode("</think>\n\n")
    # The prompt opens a thought that the template leaves out of its own turns (DeepSeek-R1).
    if hidden[: len(closing)] == closing:
        return chat.turn(thought + "\n", [])[len(closing) : -1] + hidden
    said = written.strip().removeprefix(chat.opened_thought).lstrip()
    for turn in (hidden, chat.turn(written, calls)):
        if chat.text(turn).lstrip().startswith(said):
            return turn
    raise ValueError("the chat template does not show a thought where the model would write it")
