"""The HTTP side of the server: what clients may ask, the routes, and the answers.

Bodies have OpenAI's parameters, those of vLLM that a sampler needs, and no others: one that would
silently have no effect is refused. IGNORED are those that change nothing in an answer. The table of
docs/serving.md says which is which.
"""
import json
import os
import re
import secrets
import threading
from asyncio import sleep, to_thread, wrap_future
from functools import lru_cache
from typing import Annotated, Literal

import uvicorn
from fastapi import APIRouter, Depends, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.security import HTTPBearer
from pydantic import (AliasChoices, BaseModel, ConfigDict, Field, NonNegativeInt,
                      model_validator)
from starlette.exceptions import HTTPException
from starlette.middleware.body_limit import RequestBodyLimitMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware

from core.chat import Chat
from core.model import newest
from core.config import EnvironmentFault, UserError, mix
from core.tool_calls import parse_tool_calls
from envs.answers import answer_of
from extras.background import promised
from extras.data.recorded import recorded_ids, split_thought
from extras.serve.calls import whole_calls
from extras.serve.player import Choice, Player
from extras.serve.settings import LOCAL

PAUSE = 0.03  # seconds between two chunks of a stream
# What of an unfinished answer is not streamed yet: it may belong to a call.
CALL = re.compile(r"(?<!\s)\s*+(?:[<\[{].*)?\Z", re.DOTALL)
# Parameters of OpenAI's that are for its own bookkeeping.
IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
           "prompt_cache_retention", "prompt_cache_options"}
OPENING = 80  # characters, of a text that begins as a thought or a call of gpt-oss does

Ids = Annotated[list[NonNegativeInt], Field(fail_fast=True)]
Text = Annotated[str, Field(min_length=1)]


# -------------------------------------------------------------------------------------- requests
class Body(BaseModel):
    """The body of a request."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def drop_nothing(cls, given):
        """Drop what is null or IGNORED, and what we do not know where it is 0, false or empty."""
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if name not in IGNORED
                and (value or value is not None and name in cls.model_fields)}


class Turn(Body):
    """Who samples a turn, and how."""

    model: str = "base"
    seed: int = Field(default_factory=lambda: secrets.randbits(63))
    # What is nearly 0 would make the logits infinite.
    temperature: Literal[0] | Annotated[float, Field(ge=1e-3, le=100)] = 1.0
    top_k: int = Field(-1, ge=-1)
    top_p: float = Field(1.0, gt=0, le=1)
    repetition_penalty: Literal[1] = 1
    n: Literal[1] = 1
    max_tokens: int = Field(
        0, ge=1, validation_alias=AliasChoices("max_completion_tokens", "max_tokens"))
    stop: Text | list[Text] = []
    stop_token_ids: Ids = []
    ignore_eos: bool = False


class Completion(Turn):
    prompt: Annotated[Ids, Field(min_length=1)]
    logprobs: Literal[0, 1] = 0
    prompt_logprobs: Literal[0] | None = None  # of the prompt's tokens, as vLLM tells them
    return_token_ids: bool = False


class Function(BaseModel):
    """A function that the model may call. Its fields stand in the order of training's prompts."""

    name: str = Field(pattern=r"^[\w-]+$")
    description: str = ""
    parameters: dict = {}


class Tool(BaseModel):
    type: Literal["function"]
    function: Function


class PlainText(Body):
    type: Literal["text"]


class StreamOptions(Body):
    include_usage: bool = False


class ChatCompletion(Turn):
    messages: list[dict]
    tools: list[Tool] = []
    tool_choice: Literal["auto", "none", "required"] | Tool = "auto"
    parallel_tool_calls: bool = True
    response_format: PlainText | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()


class Problem(Turn):
    problem: Text


class Adapter(Body):
    lora_name: Text
    lora_path: str = ""


# ---------------------------------------------------------------------------------------- server
class Server:
    """What answers requests.

    Args:
        config: of agent.py. max_tokens of an episode is also the context of a completion.
        begin: called with a text, it returns the `agent.Episode` of that task.
    """

    def __init__(self, config, model, tokenizer, begin, make_engine):
        self.config, self.begin = config, begin
        self.vocabulary = model.config.get_text_config().vocab_size
        # One Chat for each list of tools, which is given as JSON.
        self.chat_of = lru_cache(64)(
            lambda tools: Chat(tokenizer, json.loads(tools), model.generation_config))
        self.player = Player(model, config.max_tokens, make_engine)

    def application(self):
        """Return the ASGI application."""
        router = APIRouter(dependencies=[Depends(self.guard)] if self.config.token else [])
        router.post("/v1/chat/completions")(self.chat_completions)
        router.post("/v1/completions")(self.completions)
        router.post("/v1/{verb}_lora_adapter")(self.adapter)
        router.post("/solve")(self.solve)
        router.get("/v1/models")(self.models)
        app = FastAPI(openapi_url=None, exception_handlers=dict.fromkeys(
            [HTTPException, RequestValidationError, ValueError, EnvironmentFault], refuse))
        app.include_router(router)
        # Anybody may ask these. The second is vLLM's name for it.
        app.get("/healthz")(lambda: {})
        app.get("/health")(lambda: {})
        app.add_middleware(RequestBodyLimitMiddleware, max_body_size=2**22)  # bytes
        if not self.config.token:
            # A web page whose own name leads to this machine would ask from its reader's browser.
            app.add_middleware(TrustedHostMiddleware, allowed_hosts=LOCAL)
        return app

    def guard(self, key=Depends(HTTPBearer())):
        """Refuse a client without the token."""
        # A header holds bytes, which are read as latin-1.
        given = key.credentials.encode("latin-1")
        if not secrets.compare_digest(given, self.config.token.encode()):
            raise HTTPException(401, "wrong token")

    def choice(self, body, prompt, chat, default, forced=()):
        """Let a turn be sampled, or raise HTTPException. `default` stands for max_tokens."""
        if body.model not in self.player.adapters:
            raise HTTPException(404, f"no model {body.model!r}; GET /v1/models lists them")
        room = self.config.max_tokens - len(prompt)
        limit = body.max_tokens or max(1, min(default, room))
        if limit > room or max(prompt) >= self.vocabulary:
            raise HTTPException(400, f"{len(prompt)} tokens of prompt and {limit} more do not fit "
                                     f"the context of {self.config.max_tokens} (--max_tokens)")
        # Each turn of an episode draws anew.
        choice = Choice(prompt, body, chat, self.player.adapters[body.model],
                        seed=mix(body.seed, len(prompt)), limit=limit, forced=forced)
        self.player.add(choice)
        return choice

    async def completions(self, body: Completion):
        choice = self.choice(body, body.prompt, self.chat_of("[]"), 16)  # as in OpenAI's API
        await wrap_future(choice.done)
        text, reason = choice.read()
        return answer("text_completion", choice, {
            "text": text, "finish_reason": reason, "token_ids": choice.turn,
            "prompt_token_ids": body.prompt, "logprobs": {"token_logprobs": choice.logprobs},
            **prompt_logprobs_of(choice)})

    async def chat_completions(self, body: ChatCompletion):
        tools = [tool.model_dump() for tool in body.tools if body.tool_choice != "none"]
        # A long text takes seconds, in which others are answered.
        chat = await to_thread(self.chat_of, json.dumps(tools))
        prompt = await to_thread(prompt_of, chat, body.messages)
        opening = opening_of(chat, body.tool_choice)
        choice = self.choice(body, prompt, chat, self.config.max_new_tokens, opening)
        if body.stream:
            return StreamingResponse(self.events(choice), media_type="text/event-stream")
        await wrap_future(choice.done)
        message, reason = message_of(choice)
        return answer("chat.completion", choice, {"message": message, "finish_reason": reason})

    async def events(self, choice):
        """Yield the events of a streamed answer. Thoughts and calls are sent whole."""
        sent, reason = 0, None  # characters of the answer
        try:
            while not reason:
                await sleep(PAUSE)
                if choice.done.done():
                    choice.done.result()  # raises what ended the turn
                delta, reason = message_of(choice)
                new = delta["content"][sent:]
                if new or reason:
                    if sent:
                        delta.pop("reasoning_content", None)
                    sent += len(new)
                    yield event(choice, {"delta": {**delta, "content": new}})
            # Clients take a call for whole when the next chunk comes.
            yield event(choice, {"delta": {}, "finish_reason": reason})
            if choice.body.stream_options.include_usage:
                # Clients add up what the chunks of a stream say.
                yield event(choice, None, {"usage": usage(choice)})
            yield "data: [DONE]\n\n"
        finally:
            # If the client has left, the turn ends with its next token.
            choice.limit = 0

    async def solve(self, body: Problem):
        """Play an episode with the task that the problem states. The solution is its answer."""
        episode = await to_thread(self.begin, body.problem)
        t = episode.trajectory
        while episode.can_take_turn:
            choice = self.choice(body, t.token_ids, episode.chat, episode.turn_budget)
            await wrap_future(choice.done)
            await to_thread(episode.take_turn, choice.turn, choice.logprobs)
            if episode.calling:
                await to_thread(episode.take_results)
        fault = t.info.get("error") or t.info.get("not_finite")
        if fault:
            raise HTTPException(500, fault)
        if not t.stop_reason:
            raise HTTPException(400, f"the prompt has {len(t.token_ids)} tokens, max_tokens is "
                                     f"{self.config.max_tokens}")
        success = t.info["success"]
        if None in t.info["task"].values():
            # A question whose right answer nobody gave is neither solved nor failed.
            success = None
        return {"solution": answer_of(t).strip(), "reward": t.reward, "success": success,
                "stop_reason": t.stop_reason, "transcript": t.messages}

    def models(self):
        return {"object": "list", "data": [
            {"id": name, "object": "model", "max_model_len": self.config.max_tokens,
             "parent": None if name == "base" else "base"}
            for name in list(self.player.adapters)]}

    async def adapter(self, verb: Literal["load", "unload"], body: Adapter):
        if verb == "load":
            # The engine's thread calls it.
            future, load = promised(self.player.load, body.lora_name, newest(body.lora_path))
            self.player.inbox.put(load)
            await wrap_future(future)
        elif body.lora_name != "base":
            self.player.adapters.pop(body.lora_name, None)


# ----------------------------------------------------------------------------------------- answers
def prompt_of(chat, messages):
    """Return the ids of a conversation up to the agent's next turn, as an episode would hold them.

    Raises ValueError for messages that no episode has.
    """
    for message in messages:
        # OpenAI's newer name for it.
        if message.get("role") == "developer":
            message["role"] = "system"
    # The ids of a turn that is added are taken away again.
    turns = [*in_order_of_calls(messages), {"role": "assistant", "content": "."}]
    ids, _ = recorded_ids(chat, turns, history=True)
    return ids[:-len(chat.turn(".", []))]


def in_order_of_calls(messages):
    """Return the messages, the results of a turn in the order of its calls, as in an episode."""
    keys, turn, ids = [], 0, []
    for i, message in enumerate(messages):
        if message.get("role") == "tool":
            call_id = message.get("tool_call_id")
            keys.append((turn, 1 + ids.index(call_id) if call_id in ids else 1 + len(ids)))
        else:
            calls = message.get("tool_calls")
            calls = calls if isinstance(calls, list) else []
            turn, ids = i, [call.get("id") for call in calls if isinstance(call, dict)]
            keys.append((turn, 0))
    return [messages[i] for i in sorted(range(len(messages)), key=keys.__getitem__)]


def opening_of(chat, tool_choice):
    """Return the ids that a turn begins with which has to call a tool, any or the named one.

    They are what all such calls have in common. Raises ValueError if there is no such tool.
    """
    if tool_choice in ("auto", "none"):
        return []
    turns = []
    for name, tool in chat.tools.items():
        if tool_choice == "required" or tool_choice.function.name == name:
            for key in ("a", "b"):
                arguments = {key: 1} if tool["parameters"].get("properties") else {}
                turns.append(chat.turn("", [{"name": name, "arguments": arguments}]))
    if not turns:
        raise ValueError("tool_choice: there is no such tool")
    return os.path.commonprefix(turns)


def message_of(choice):
    """Return what a turn thinks, says and calls, and why it ended, None if it has not."""
    text, reason = choice.read()
    chat, calls = choice.chat, []
    if chat.tools and reason:
        content, calls, _ = parse_tool_calls(text, chat.tools)
        # A call that was cut would lack arguments.
        if reason == "length":
            calls = whole_calls(text, chat.tools)
        if calls:
            text = content
    thought, said = split_thought(chat.opened_thought + text)
    # Some templates begin an answer with one.
    said = said.lstrip("\n")
    if chat.tools:
        # As `parse_tool_calls` strips the text before a call, which may still come.
        said = said.lstrip()
        if not reason:
            said = CALL.sub("", said)
    if not reason and not thought and said.lstrip()[:1] in "<[t" and len(said) < OPENING:
        said = ""
    message = {"role": "assistant", "content": said}
    if thought.strip():
        message["reasoning_content"] = thought.strip()
    if chat.shows_one_call or not choice.body.parallel_tool_calls:
        calls = calls[:1]
    if calls:
        reason = "tool_calls"
        message["tool_calls"] = []
    for i, call in enumerate(calls):
        function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
        message["tool_calls"].append({"index": i, "id": secrets.token_hex(5), "type": "function",
                                      "function": function})
    return message, reason


def prompt_logprobs_of(choice):
    """Return {"prompt_logprobs": [None, {id: its log-probability and text}, ...]} if asked for."""
    if choice.prompt_logprobs is None:
        return {}
    entries = [None]
    for token, logprob in zip(choice.body.prompt[1:], choice.prompt_logprobs[1:]):
        text = choice.chat.tokenizer.decode([token])
        entries.append({token: {"logprob": logprob, "decoded_token": text}})
    return {"prompt_logprobs": entries}


def answer(kind, choice, shown, more=None):
    """Return an answer of OpenAI's API with one choice, or with none and what `more` holds."""
    choices = [{"index": 0, **shown}] if shown else []
    return {"id": choice.name, "object": kind, "created": choice.created,
            "model": choice.body.model, "choices": choices, **(more or {"usage": usage(choice)})}


def usage(choice):
    asked, sampled = len(choice.group), len(choice.turn)
    return {"prompt_tokens": asked, "completion_tokens": sampled, "total_tokens": asked + sampled}


def event(choice, shown, more={"usage": None}):
    chunk = answer("chat.completion.chunk", choice, shown, more)
    return f"data: {json.dumps(chunk)}\n\n"


async def refuse(request, error):
    """Answer an exception as OpenAI's API does."""
    says, name = getattr(error, "detail", None) or str(error), None
    if isinstance(error, RequestValidationError):
        says, name = fault_of(error)
    body = {"message": says, "type": "invalid_request_error", "param": name, "code": None}
    status = 500 if isinstance(error, EnvironmentFault) else getattr(error, "status_code", 400)
    return JSONResponse({"error": body}, status)


def fault_of(error):
    """Return what is wrong with a body, in one line, and the name of its parameter or None."""
    first = error.errors()[0]
    # ("body", "temperature", "literal[0]") of a union, ("body", 7) of what is no JSON.
    name = next((place for place in first["loc"][1:] if isinstance(place, str)), None)
    says = first["msg"]
    if first["type"] == "extra_forbidden":
        says = "this server does not obey it; leave it out"
    return f"{name or 'body'}: {says}", name


def run(config, model, tokenizer, begin, make_engine):
    """Answer requests until a signal ends the process; see `extras.serve.serve`."""
    server = Server(config, model, tokenizer, begin, make_engine)
    http = uvicorn.Config(server.application(), host=config.host, port=config.port,
                          access_log=False, limit_concurrency=512)
    try:
        sockets = [http.bind_socket()]
    except SystemExit:
        # It has printed why.
        raise UserError(f"--port {config.port}: cannot listen at {config.host}") from None
    threading.Thread(target=uvicorn.Server(http).run, args=[sockets], daemon=True).start()
    # In the main thread, which signals interrupt. Where the engine fails, the server ends.
    server.player.run()
