"""What the server's clients may ask: OpenAI's parameters, those of vLLM that a sampler needs, and
no others. A parameter that would silently have no effect is refused."""
import re
import secrets
from contextlib import contextmanager
from itertools import groupby
from os.path import commonprefix
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Json, model_validator
from starlette.exceptions import HTTPException

from core.config import first_line
from core.chat import Chat
from extras.data.recorded import thoughtful_ids, with_thought

BASE = "base"  # the name of the model that was started
# The order of messages in an episode. What the system or the user says in several is one message.
ORDER = re.compile("((system|developer) )*(user )+(assistant ((tool )+|user )(user )*)*")

# Values that ask for nothing, as 0, false or an empty list of a parameter that is not ours does.
# Clients send them, also where nobody knows the parameter.
NOTHING = {"best_of": 1, "top_k": -1, "repetition_penalty": 1, "service_tier": "auto",
           "response_format": {"type": "text"}, "modalities": ["text"]}
# What a client calls itself or its request, and what OpenAI is to do with it.
LABELS = {"user", "metadata", "safety_identifier", "prompt_cache_key", "store"}

Natural = Annotated[int, Field(ge=0)]
Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1)]
Item = TypeVar("Item")
# Of a million wrong items only the first is told. All would take a minute and gigabytes.
Items = Annotated[list[Item], Field(fail_fast=True)]
NAMES = 256  # of one object, for the same reason


class Refusal(HTTPException):
    """An answer that is an error, with the status and the code that OpenAI's API uses."""

    def __init__(self, status: int, message: str, code: str | None = None):
        super().__init__(status, message)
        self.code = code


class Body(BaseModel):
    """The body of a request, or an object in it. What is null or asks for nothing is not given."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def without_nothing(cls, given):
        if not isinstance(given, dict) or len(given) > NAMES:
            return None
        return {name: value for name, value in given.items() if value is not None
                and (value or name in cls.model_fields)
                and value != NOTHING.get(name) and name not in LABELS}


class Sampled(Body):
    """Who samples, and how."""

    model: str = BASE
    seed: int = Field(default_factory=lambda: secrets.randbits(63))
    temperature: Literal[0] | Annotated[float, Field(ge=1e-3, le=100)] = 1.0
    top_k: Natural = 0
    top_p: float = Field(1.0, gt=0, le=1)


def listed(given):
    """Return a list of texts or lists of ids, of which a client may give one alone."""
    is_one = not isinstance(given, list) or int in map(type, given)
    return [given] if is_one else given


class Turns(Sampled):
    """What both kinds of completion ask: n turns after one prompt."""

    n: int = Field(1, ge=1, le=128)
    # The first one counts where both are given.
    max_completion_tokens: Count | None = None
    max_tokens: Count | None = None
    stop: Annotated[Items[Text], BeforeValidator(listed), Field(max_length=32)] = []
    stop_token_ids: Items[Natural] = []


class Completion(Turns):
    """POST /v1/completions"""

    prompt: Annotated[Items[str | Items[Natural]], BeforeValidator(listed),
                      Field(min_length=1, max_length=128)]
    logprobs: Literal[0, 1] | None = None
    return_token_ids: bool = False
    ignore_eos: bool = False


class Function(BaseModel):
    name: str
    # Clients send "" for a call without arguments.
    arguments: Annotated[Json[dict[str, Any]], BeforeValidator(lambda text: text or "{}")]


class ToolCall(BaseModel):
    id: str
    function: Function


class ToolFunction(Body):
    """A function that the model may call. Its fields stand in the order of training's prompts."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(pattern=r"^[\w-]+$")
    description: str = ""
    # A function without arguments may leave them out.
    parameters: dict = {}
    # OpenAI's package sends it, and training's prompts do not have it.
    strict: bool = Field(False, exclude=True)


class Tool(BaseModel):
    type: Literal["function"]
    function: ToolFunction


class Part(BaseModel):
    type: Literal["text"]
    text: str


class Message(BaseModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Items[Part] | None = None
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: str | None = None
    # The thought, by its name in DeepSeek's API, and in vLLM's since 0.12.
    reasoning_content: str | None = None
    reasoning: str | None = None

    @property
    def text(self) -> str:
        text = self.content or ""
        if isinstance(text, list):
            text = "".join(part.text for part in text)
        return with_thought(vars(self), text)


class StreamOptions(Body):
    include_usage: bool = False


class ChatCompletion(Turns):
    """POST /v1/chat/completions"""

    messages: Items[Message]
    tools: Items[Tool] = []
    tool_choice: Literal["auto", "none", "required"] | Tool = "auto"
    parallel_tool_calls: bool = True
    logprobs: bool = False
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()


class Problem(Sampled):
    """POST /solve"""

    problem: str = Field(min_length=1, max_length=2**14)


class Adapter(Body):
    """POST /v1/load_lora_adapter and /v1/unload_lora_adapter"""

    lora_name: Text
    lora_path: str = ""


@contextmanager
def refused(what: str):
    """Refuse a request whose `what` raises an error inside this block."""
    try:
        yield
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise Refusal(400, f"{what}: {first_line(error)}") from None


@refused("messages")
def conversation_ids(chat: Chat, messages: list[Message]) -> list[int]:
    """Return the ids of a conversation up to the agent's next turn, as an episode would hold them.

    Raises Refusal for messages that no episode has.
    """
    roles = "".join(f"{message.role} " for message in messages)
    if not ORDER.fullmatch(roles):
        raise ValueError("expected system, user, assistant, tool results or user, assistant, ... "
                         f"and at the end not the assistant; got {roles}")
    groups = groupby(messages, lambda message: message.role == "assistant")
    opening, *rest = [list(group) for _, group in groups]
    shown = [{"role": "user", "content": said(opening)}]
    if opening[0].role != "user":
        shown.insert(0, {"role": "system", "content": said(opening, "system", "developer")})
    ids = chat.prompt(shown)
    for [turn], after in zip(rest[::2], rest[1::2]):
        calls = turn.tool_calls or []
        answers = [message for message in after if message.role == "tool"]
        results = {message.tool_call_id: message.text for message in answers}
        # Of two under one id, the first would be lost.
        is_unique = len(results) == len(answers) == len(calls)
        if not is_unique or set(results) != {call.id for call in calls}:
            raise ValueError("after an assistant's tool calls comes one result for each "
                             "tool_call_id")
        called = [call.function.model_dump() for call in calls]
        ids += turn_ids(chat, turn.text, called)
        if calls:
            ids += chat.results(called, [results[call.id] for call in calls], ids[-1], said(after))
        else:
            ids += chat.reply(said(after), ids[-1])
    return ids


def said(messages: list[Message], *roles: str) -> str:
    """Return what these roles, or else the user, say in messages."""
    return "\n\n".join(message.text for message in messages
                       if message.role in (roles or ["user"]))


@refused("tool_choice")
def call_opening(chat: Chat, body: ChatCompletion) -> str:
    """Return how a turn begins that makes the call which the client requires, if it does."""
    choice = body.tool_choice
    if choice in ("auto", "none"):
        return ""
    name = None if choice == "required" else choice.function.name
    if not chat.tools or (name and name not in chat.tools):
        raise ValueError("a call is required, but its function is not among the tools")
    calls = [{"name": name or "x", "arguments": {}}, {"name": name or "y", "arguments": {"x": 1}}]
    begun = commonprefix([chat.text(chat.turn("", [call])) for call in calls])
    # The next token may hold more of what stands before a word, such as {".
    return begun.rstrip('< {["')


def turn_ids(chat: Chat, text: str, calls: list[dict]) -> list[int]:
    """Return the ids of an assistant's turn, without its thought if the template hides thoughts."""
    try:
        return thoughtful_ids(chat, text, calls)
    except ValueError:
        return chat.turn(text.rpartition("</think>")[2].lstrip("\n"), calls)
