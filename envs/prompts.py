"""Prompts without tools: each row of --dataset has a `prompt`, text or messages, that the model
answers in one turn. What an answer is worth is for --rewards to say: of all columns of its row.
"""
import inspect

from core.data import MESSAGE_FORMS
from core.tool_calls import check_call


class Prompts:
    # `answer` is named for its type: a .csv cell may hold a list of accepted ones.
    def reset(self, prompt: str | list[dict], answer: str | list = "", **_):
        """Add nothing to the row's prompt."""

    @classmethod
    def _row(cls, row: dict) -> dict:
        """Return the row. Raises ValueError for a prompt that no episode can begin with."""
        if not any(message["content"] for message in opening(cls.reset, row, "")):
            raise ValueError('"prompt" is empty')
        return row

    @staticmethod
    def _from_text(text: str) -> dict:
        return {"prompt": text}


def as_messages(value, name: str, role: str | None = None) -> list[dict]:
    """Return a field's messages as a list. With a role it may also be one message, or its text."""
    for our_form in MESSAGE_FORMS:
        value = our_form(value)
    if role and isinstance(value, str):
        value = {"role": role, "content": value}
    if role and isinstance(value, dict):
        value = [value]
    if isinstance(value, list) and value and all(isinstance(m, dict) for m in value):
        return value
    kind = "text or a list" if role else "a list"
    raise ValueError(f'"{name}" must be {kind} of {{"role": ..., "content": ...}}')


def opening(reset, task: dict, observation: str) -> list[dict]:
    """Return the messages of a task's column "prompt", the last of which ends with the observation.

    If the method `reset` takes an argument of this name and returns text, that is all. Raises
    ValueError if the prompt is neither text nor messages.
    """
    prompt = task["prompt"]
    if prompt is None or observation and "prompt" in inspect.signature(reset).parameters:
        prompt = ""
    prompt = list(map(as_past, as_messages(prompt, "prompt", "user")))
    if not all(isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
               for message in prompt):
        raise ValueError('"prompt" must be text or a list of {"role": ..., "content": text}')
    *messages, last = prompt
    if last["role"] == "system" and observation:
        return [*prompt, {"role": "user", "content": observation}]
    if last["role"] != "user":
        raise ValueError(f'the last message of "prompt" must be the user\'s, not {last["role"]}')
    return [*messages, {**last, "content": last["content"] + observation}]


def as_past(message: dict) -> dict:
    """Return a message of a prompt, an assistant's marked as not sampled here ("loss": 0).

    OpenAI writes the arguments of its calls as JSON inside a string, and no content beside them;
    templates and our episodes have the arguments as an object.
    """
    if message.get("role") != "assistant":
        return message
    calls = []
    for call in message.get("tool_calls") or []:
        function = check_call(call)
        calls.append({**call, **function, "function": function})
    if calls:
        message = {**message, "content": message.get("content") or "", "tool_calls": calls}
    return {**message, "loss": 0}


def trl_message(message: dict) -> dict:
    """Return a message of an episode as TRL holds it, whose calls are those of functions."""
    if not message.get("tool_calls"):
        return message
    return {**message, "tool_calls": list(map(as_function, message["tool_calls"]))}


def as_function(item: dict) -> dict:
    """Return a call or a schema as that of a function, if it is not one already."""
    return item if "function" in item else {"type": "function", "function": item}
