"""What the server's clients may ask, read from JSON and checked: OpenAI's parameters."""
import json
import math
import secrets

from experiment.seeds import mix
from llm.chat import Chat
from window.player import Sampling

# Parameters of OpenAI's or vLLM's that are not here, with the values that ask for nothing.
NOT_HERE = {
    "frequency_penalty": (0, None), "presence_penalty": (0, None), "repetition_penalty": (1, None),
    "min_p": (0, None), "logit_bias": ({}, None), "top_logprobs": (0, None),
    "response_format": ({"type": "text"}, None), "echo": (False, None), "suffix": ("", None),
    "best_of": (1, None), "tool_choice": ("auto", "none", None), "functions": ([], None)}


class Refusal(Exception):
    """An answer that is an error, with the status and the code that OpenAI's API uses."""

    def __init__(self, status: int, message: str, code: str | None = None):
        super().__init__(message)
        self.status, self.code = status, code

    def body(self) -> dict:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.code}}


def field(body: dict, name: str, kinds, default=None, low=None, high=None):
    """Return a checked value of the body; null and a missing one are the default."""
    value = body.get(name)
    if value is None:
        return default
    wrong = not isinstance(value, kinds) or isinstance(value, bool) != (kinds is bool)
    if isinstance(value, float):
        wrong = wrong or not math.isfinite(value)
    if wrong or (low is not None and value < low) or (high is not None and value > high):
        bounds = "" if low is None else f" from {low}" + (f" to {high}" if high else "")
        kinds = kinds if isinstance(kinds, tuple) else (kinds,)
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise Refusal(400, f"{name}: must be {wanted}{bounds}, got {str(value)[:80]}")
    return value


def check_known(body: dict):
    """Refuse what would silently have no effect."""
    for name, neutral in NOT_HERE.items():
        if body.get(name) not in neutral:
            raise Refusal(400, f"{name}: not supported by this server", "unsupported_parameter")


def sampling_of(body: dict, stop_ids) -> Sampling:
    """Return how the body wants its tokens drawn."""
    top_k = field(body, "top_k", int, 0, low=-1)
    return Sampling(float(field(body, "temperature", (int, float), 1.0, low=0, high=100)),
                    max(top_k, 0), float(field(body, "top_p", (int, float), 1.0, 1e-6, 1)),
                    frozenset(stop_ids) | frozenset(ids_in(body, "stop_token_ids")))


def ids_in(body: dict, name: str) -> list[int]:
    ids = field(body, name, list, [])
    if not all(type(i) is int and i >= 0 for i in ids):
        raise Refusal(400, f"{name}: must be a list of token ids")
    return ids


def stops_of(body: dict) -> list[str]:
    """Return the texts that end a turn, at most four."""
    stops = field(body, "stop", (str, list), [])
    stops = [stops] if isinstance(stops, str) else stops
    if len(stops) > 4 or not all(isinstance(stop, str) and stop for stop in stops):
        raise Refusal(400, "stop: must be a text or up to 4 texts")
    return stops


def seeds_of(body: dict, n: int) -> list[int]:
    """Return a seed for each of n choices."""
    seed = field(body, "seed", int)
    if seed is None:
        return [secrets.randbits(63) for _ in range(n)]
    return [mix(seed, i) for i in range(n)]


def limit_of(body: dict, prompt: list[int], context: int, default: int) -> int:
    """Return how many tokens may be sampled after the prompt."""
    limit = field(body, "max_completion_tokens", int, field(body, "max_tokens", int, default), 1)
    if field(body, "max_tokens", int, 1) < 1:
        raise Refusal(400, "max_tokens: must be at least 1")
    room = context - len(prompt)
    if room < 1 or limit > room and body.get("max_tokens", body.get("max_completion_tokens")):
        raise Refusal(400, f"the prompt has {len(prompt)} tokens and max_tokens is {limit}; this "
                           f"server's context has {context}", "context_length_exceeded")
    return min(limit, room)


def text_of(message: dict) -> str:
    """Return a message's content as text; parts of type text are put together."""
    content = message.get("content")
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else None for part in content]
        if not all(isinstance(part, str) for part in parts):
            raise Refusal(400, "messages: only parts of type text are understood here")
        return "".join(parts)
    if not isinstance(content, str | None):
        raise Refusal(400, "messages: content must be text")
    return content or ""


def conversation_ids(chat: Chat, messages) -> list[int]:
    """Return the ids of a conversation up to the agent's next turn, as an episode would hold them.

    Raises Refusal for an order of messages that no episode has.
    """
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise Refusal(400, "messages: must be a list of objects")
    messages = list(messages)
    opening = []
    while messages and messages[0].get("role") in ("system", "developer"):
        opening.append(text_of(messages.pop(0)))
    if not messages or messages[0].get("role") != "user":
        raise Refusal(400, "messages: the first one after the system's must be the user's")
    first = [{"role": "system", "content": "\n\n".join(opening)}] if opening else []
    ids = chat.prompt([*first, {"role": "user", "content": text_of(messages.pop(0))}])
    while messages:
        message = messages.pop(0)
        if message.get("role") != "assistant":
            raise Refusal(400, f"messages: expected the assistant's, got {message.get('role')!r}; "
                               "put several in a row together")
        calls = [call_in(call) for call in message.get("tool_calls") or []]
        ids += chat.turn(text_of(message), calls)
        stop = ids[-1]
        results = []
        while messages and messages[0].get("role") == "tool":
            results.append(text_of(messages.pop(0)))
        if len(results) != len(calls):
            raise Refusal(400, f"messages: {len(calls)} tool calls and {len(results)} results")
        if calls:
            ids += chat.results(calls, results, stop)
        elif messages and messages[0].get("role") == "user":
            ids += chat.reply(text_of(messages.pop(0)), stop)
        else:
            raise Refusal(400, "messages: the last one must be the user's or a tool's")
    return ids


def call_in(call) -> dict:
    """Return a tool call of OpenAI's form as {"name", "arguments"}."""
    try:
        arguments = call["function"]["arguments"]
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        return {"name": str(call["function"]["name"]), "arguments": dict(arguments)}
    except (KeyError, TypeError, ValueError) as error:
        raise Refusal(400, f"messages: a tool call cannot be read ({error})") from None
