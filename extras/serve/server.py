"""An agent that others ask: OpenAI's API over the decoding engine (`python agent.py --serve`).

    POST /v1/chat/completions   messages, tools, stream, n, seed, stop, logprobs (of what is sampled
                                from, with temperature, top_k and top_p)
    POST /v1/completions        texts or token ids; with return_token_ids also ids out, as in vLLM
    POST /v1/load_lora_adapter, /v1/unload_lora_adapter     {"lora_name", "lora_path"}
    POST /solve                 {"problem"}: the agent plays its environment, its tools really run
    GET  /v1/models, /healthz

Another machine's run can have its episodes sampled here: `grpo.py --sampler http://host:8000`.
"""
import asyncio
import json
import re
import secrets
import threading
import time
from collections import Counter
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import uvicorn
from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.body_limit import RequestBodyLimitMiddleware
from starlette.requests import ClientDisconnect

import envs
from agent import Episode, load_environments
from extras.isolate import Session, Watch
from extras.background import in_thread, promised
from extras.exact.checkpoint import check_base
from core.config import UserError, printable, mix
from core.chat import Chat
from core.model import ADAPTER, facts, newest, settings
from extras.data.recorded import split_thought
from core.tool_calls import parse_tool_calls
from extras.serve.player import SECONDS, Choice, Player
from extras.serve.requests import (BASE, Adapter, ChatCompletion, Completion, Problem, Refusal, Sampled,
                             Turns, call_opening, conversation_ids, refused)

LOCAL = ("127.0.0.1", "localhost", "::1")
BODY = 2**22  # bytes of a request
BODY_SECONDS = 30  # in which they must come
REQUESTS = 256  # that are answered at the same time
# What is not streamed yet: of a thought what may end it or begin a call; of an answer, with tools
# what may belong to a call, without tools what may begin a thought. All take linear time.
LAST_WORD = r"(?<![!-~])[!-~]*+\Z"
ENDING = re.compile(rf"(?<!\s)\s*+(?:<(?:\||tool_call|function=).*|{LAST_WORD})", re.DOTALL)
CALLING = re.compile(rf"(?<!\s)\s*+(?:(?:[<\[{{]|to=).*|{LAST_WORD})", re.DOTALL)
BEGINNING = re.compile(r"\A\s*+(?:(?:[<\[]|to=)[!-~]{,40}|to?)?\Z")


class Server:
    """What answers requests. `requests` says how many are being answered."""

    requests = 0

    def __init__(self, config, model, tokenizer, limits):
        self.config, self.tokenizer, self.limits = config, tokenizer, limits
        text_config = model.config.get_text_config()
        self.vocabulary = text_config.vocab_size
        self.context = min(limits.max_tokens,
                           getattr(text_config, "max_position_embeddings", limits.max_tokens))
        # One Chat for each list of tools, which is given as JSON.
        self.chat_of = lru_cache(64)(
            lambda tools: Chat(tokenizer, json.loads(tools), model.generation_config))
        self.plain = self.chat_of("[]")
        self.environment = None  # its name, class and Chat
        if config.env:
            classes, chats = load_environments(
                tokenizer, config.env, model.generation_config, envs.options_of(config))
            [(name, cls)] = classes.items()
            self.environment = name, cls, chats[name]
        # One for all episodes: it keeps environments that hold a client for the next ones.
        self.watch = Watch(limits.tool_timeout)
        self.player = Player(model, self.context)

    def application(self) -> FastAPI:
        """Return the ASGI application."""
        router = APIRouter(dependencies=[Depends(self.guard)], route_class=Route)
        router.post("/v1/chat/completions")(self.chat_completions)
        router.post("/v1/completions")(self.completions)
        router.post("/v1/load_lora_adapter")(self.load)
        router.post("/v1/unload_lora_adapter")(self.unload)
        router.post("/solve")(self.solve)
        router.get("/v1/models")(self.models)
        router.get("/v1/models/{name:path}")(self.model)
        app = FastAPI(openapi_url=None, exception_handlers={
            HTTPException: refuse, RequestValidationError: refuse})
        app.add_middleware(RequestBodyLimitMiddleware, max_body_size=BODY)
        app.include_router(router)
        # Anybody may ask these. The second is vLLM's name for it.
        for path in ("/healthz", "/health"):
            app.api_route(path, methods=["GET", "HEAD"])(self.health)
        return app

    async def guard(self, request: Request):
        """Let a client with the token in, and count its request until it is answered."""
        key = request.headers.get("authorization", "")
        wanted = f"Bearer {self.config.token}"
        if self.config.token and not secrets.compare_digest(key.encode(), wanted.encode()):
            raise Refusal(401, "the token is missing or wrong", "invalid_api_key")
        # A web page whose own name leads to this machine would ask from its reader's browser.
        if not self.config.token and request.url.hostname not in LOCAL:
            raise Refusal(403, "without a --token only localhost is answered, not another name")
        if self.requests >= REQUESTS:
            raise Refusal(429, f"{REQUESTS} requests are being answered; try again later",
                          "rate_limit_exceeded")
        self.requests += 1
        try:
            yield
        finally:
            self.requests -= 1

    # ----------------------------------------------------------------------------------- sampling
    def turns(self, body: Turns, prompt, stop_ids, default: int, **options) -> list[Choice]:
        """Return the rows of n turns after one prompt. `default` stands for max_tokens."""
        room = self.context - len(prompt)
        limit = body.max_completion_tokens or body.max_tokens or max(min(default, room), 1)
        if limit > room:
            raise Refusal(400, f"{len(prompt)} tokens of prompt and {limit} more do not fit: this "
                               f"server's context has {self.context} (--max_tokens)",
                          "context_length_exceeded")
        return [self.row(body, prompt, i, stop_ids={*stop_ids, *body.stop_token_ids}, limit=limit,
                         stops=body.stop, **options) for i in range(body.n)]

    def weights_of(self, name: str):
        """Return the adapter of a model's name, or raise Refusal."""
        weights = self.player.adapters.get(BASE if name == self.config.model_path else name)
        if weights is None:
            raise Refusal(404, f"the model {name!r} does not exist here; GET /v1/models",
                          "model_not_found")
        return weights

    def row(self, body: Sampled, prompt, number: int, **options) -> Choice:
        """Return the row of a turn, or raise Refusal."""
        return Choice(prompt, chat=self.plain, weights=self.weights_of(body.model),
                      seed=mix(body.seed, number),
                      sampling=(body.temperature, body.top_k, body.top_p), **options)

    async def finish(self, choices, request: Request):
        """Wait for the ends of choices. They leave the engine when their client leaves."""
        async def play():
            async for _ in self.player.play(choices):
                pass

        work = asyncio.ensure_future(play())
        # After the body comes only one message: that the client has left.
        left = asyncio.ensure_future(request.receive())
        try:
            await asyncio.wait([work, left], return_when="FIRST_COMPLETED")
            if not work.done():
                raise Refusal(408, "the client has left")
            work.result()
        finally:
            left.cancel()
            work.cancel()

    # -------------------------------------------------------------------------------- completions
    async def completions(self, body: Completion, request: Request):
        stop_ids = () if body.ignore_eos else self.plain.stop_ids
        choices = []
        for prompt in body.prompt:
            if isinstance(prompt, str):
                with refused("prompt"):
                    prompt = await asyncio.to_thread(self.text_ids, prompt)
            if not prompt or max(prompt) >= self.vocabulary:
                raise Refusal(400, f"prompt: needs token ids, all below {self.vocabulary}")
            choices += self.turns(body, prompt, stop_ids, default=16)  # as in OpenAI's API
        await self.finish(choices, request)
        shown = []
        for i, choice in enumerate(choices):
            shown.append({"index": i, "text": choice.text, "finish_reason": choice.reason})
            if body.logprobs is not None:
                shown[i]["logprobs"] = {"token_logprobs": choice.logprobs}
            if body.return_token_ids:
                shown[i] |= {"token_ids": choice.turn, "prompt_token_ids": choice.group}
        return {**head("text_completion", body), "choices": shown, "usage": usage(body, choices)}

    def text_ids(self, text: str) -> list[int]:
        """Return a text's ids, which begin as the tokenizer begins them if BOS is not in it."""
        ids = self.plain.encode(text)
        start = [i for i in self.tokenizer("")["input_ids"] if i == self.tokenizer.bos_token_id]
        return ids if ids[:1] == start else start + ids

    async def chat_completions(self, body: ChatCompletion, request: Request):
        tools = [] if body.tool_choice == "none" else body.tools
        # A long text takes seconds, in which others are answered.
        with refused("tools"):
            chat = await asyncio.to_thread(
                self.chat_of, json.dumps([tool.model_dump() for tool in tools]))
        prompt = await asyncio.to_thread(conversation_ids, chat, body.messages)
        opening = call_opening(chat, body)
        choices = self.turns(body, prompt + chat.encode(opening), chat.end_ids,
                             self.limits.max_new_tokens, streams=body.stream, opening=opening)
        if body.stream:
            return Stream(self.events(body, choices, chat), media_type="text/event-stream")
        await self.finish(choices, request)
        shown = []
        for i, choice in enumerate(choices):
            message, reason = assistant_message(choice, chat, body)
            shown.append({"index": i, "message": {"role": "assistant", **message},
                          "finish_reason": reason, "logprobs": self.logprobs(body, choice)})
        return {**head("chat.completion", body), "choices": shown, "usage": usage(body, choices)}

    async def events(self, body, choices, chat):
        """Yield the events of a streamed answer."""
        start = {**head("chat.completion.chunk", body), "choices": []}

        def chunk(i, delta, reason=None, logprobs=None):
            shown = {"index": i, "delta": delta, "finish_reason": reason, "logprobs": logprobs}
            return event({**start, "choices": [shown]})

        # Clients expect the choices to begin in their order.
        for i in range(len(choices)):
            yield chunk(i, {"role": "assistant", "content": ""})
        # How many characters of each field were sent, and how many tokens.
        sent = [Counter() for _ in choices]
        try:
            async for choice in self.player.play(choices):
                i = choices.index(choice)
                counts = sent[i]
                delta, reason = assistant_message(choice, chat, body)
                for name in delta.keys() - {"tool_calls"}:
                    delta[name] = (delta[name] or "")[counts[name]:]
                    counts[name] += len(delta[name])
                if not reason and not any(delta.values()):
                    continue
                new = slice(counts["tokens"], len(choice.logprobs))
                counts["tokens"] = new.stop
                yield chunk(i, delta, logprobs=self.logprobs(body, choice, new))
                # Clients take a call for whole when the next chunk comes.
                if reason:
                    yield chunk(i, {"content": ""}, reason)
            if body.stream_options.include_usage:
                yield event({**start, "usage": usage(body, choices)})
            yield "data: [DONE]\n\n"
        except Refusal as refusal:
            yield event(error_of(refusal))

    def logprobs(self, body, choice, tokens=slice(None)):
        """Return the log-probabilities of some of a choice's tokens, if the client wants them."""
        if not body.logprobs:
            return None
        # Decoded alone, a token that is a part of a character does not show its bytes.
        return {"content": [
            {"token": self.tokenizer.decode([i]), "logprob": p, "bytes": None, "top_logprobs": []}
            for i, p in zip(choice.turn[tokens], choice.logprobs[tokens])]}

    # --------------------------------------------------------------------------------------- solve
    async def solve(self, body: Problem, request: Request):
        """Play an episode of the environment with the task that the problem states."""
        episode = await asyncio.wrap_future(in_thread(self.begin, body.problem))
        t = episode.trajectory
        while episode.can_take_turn:
            row = self.row(body, t.token_ids, len(t.rewards), stop_ids=episode.chat.end_ids,
                           limit=episode.turn_budget)
            await self.finish([row], request)
            await asyncio.wrap_future(in_thread(episode.take_turn, row.turn, row.logprobs))
            if episode.calling:
                await asyncio.wrap_future(in_thread(episode.take_results))
        fault = t.info.get("error") or t.info.get("not_finite")
        if fault:
            raise Refusal(500, fault)
        said = {"assistant": [""], "tool": []}
        for message in t.messages:
            said.setdefault(message["role"], []).append(message["content"])
        # A question whose right answer nobody gave is neither solved nor failed.
        is_judged = t.stop_reason and None not in episode.session.task.values()
        return {"solution": said["assistant"][-1],
                "success": t.info["success"] if is_judged else None,
                "reward": t.reward,
                "stop_reason": t.stop_reason or "max_tokens",
                "tools": said["tool"],
                "transcript": t.messages}

    def begin(self, problem: str) -> Episode:
        """Return an episode whose task is the problem."""
        if not self.environment or not hasattr(self.environment[1], "_from_text"):
            raise Refusal(400, "this server plays no environment (--env) that makes a task of a "
                               "text (_from_text)")
        name, cls, chat = self.environment
        with refused("problem"):
            task = cls._from_text(problem) | envs.taken(cls, envs.options_of(self.config))
        return Episode(Session(self.watch, name, cls, task), chat, self.limits, "solve")

    # ----------------------------------------------------------------------------- models, adapters
    async def models(self):
        return {"object": "list",
                "data": [await self.model(name) for name in list(self.player.adapters)]}

    async def model(self, name: str):
        self.weights_of(name)
        return {"id": name, "object": "model", "created": 0, "owned_by": "this machine",
                "root": self.config.model_path, "max_model_len": self.context,
                "parent": None if name == BASE else BASE}

    async def health(self):
        return {"status": "ok"}

    async def load(self, body: Adapter):
        started, model = self.config.model_path, self.player.model
        if body.lora_name == started:
            raise Refusal(400, f"lora_name: {started} is the model that was started")
        # An adapter that the server was started with has become a part of the weights.
        if Path(newest(started), ADAPTER).exists() and not settings(model):
            raise Refusal(400, f"lora_path: {started} is an adapter itself; start the server with "
                               f"its base, {facts(model).source}, and load both")
        with refused("lora_path"):
            folder = newest(body.lora_path)
            # To read the base's files takes seconds, in which others are answered.
            await asyncio.to_thread(check_base, folder, facts(model).source)
            future, load = promised(self.player.load, body.lora_name, folder)
            # The engine's thread calls it.
            self.player.inbox.put(load)
            await asyncio.wrap_future(future)
        return {"status": "ok"}

    async def unload(self, body: Adapter):
        if body.lora_name == BASE or not self.player.adapters.pop(body.lora_name, None):
            raise Refusal(404, f"the adapter {body.lora_name!r} is not loaded")
        return {"status": "ok"}


class Route(APIRoute):
    """Refuses a request that is not read or not answered in time. A stream has its own time."""

    def get_route_handler(self):
        answer = super().get_route_handler()

        async def answer_in_time(request):
            late = f"no whole body within {BODY_SECONDS} s"
            try:
                async with asyncio.timeout(BODY_SECONDS):
                    await request.body()
                late = f"not answered within {SECONDS} s"
                async with asyncio.timeout(SECONDS):
                    return await answer(request)
            except (TimeoutError, ClientDisconnect):
                raise Refusal(408, late, "timeout") from None
        return answer_in_time


class Stream(StreamingResponse):
    """The events of a streamed answer, which its client must read in time."""

    async def __call__(self, scope, receive, send):
        # A client that reads has been told by then that the time is over.
        with suppress(TimeoutError):
            async with asyncio.timeout(1.1 * SECONDS):
                await super().__call__(scope, receive, send)
        # Otherwise its rows would play until it is collected as garbage.
        await self.body_iterator.aclose()


def head(kind: str, body) -> dict:
    """Return how an answer of OpenAI's API begins."""
    return {"id": f"{kind}-{secrets.token_hex(12)}", "object": kind, "created": int(time.time()),
            "model": body.model}


def usage(body, choices) -> dict:
    """Return the numbers of tokens of choices, n after each prompt."""
    asked = sum(len(choice.group) for choice in choices[::body.n])
    sampled = sum(len(choice.turn) for choice in choices)
    return {"prompt_tokens": asked, "completion_tokens": sampled, "total_tokens": asked + sampled}


def assistant_message(choice, chat, body) -> tuple[dict, str | None]:
    """Return what a choice thinks, says and calls, and why the choice ended, None if it has not."""
    text, reason, calls = choice.text, choice.reason, []
    # A call that was cut would lack arguments.
    if chat.tools and reason == "stop":
        content, calls, _ = parse_tool_calls(text, chat.tools)
    thought, answer = split_thought(chat.opened_thought + (content if calls else text))
    if chat.tools:
        # As `parse_tool_calls` strips the text before a call, which may still come.
        answer = answer.lstrip()
    if not reason:
        thought = thought if answer else ENDING.sub("", thought)
        answer = (CALLING if chat.tools else BEGINNING).sub("", answer)
    message = {"content": answer}
    thought = thought.strip()
    if thought:
        message["reasoning_content"] = thought
    if not calls:
        return message, reason
    if chat.shows_one_call or not body.parallel_tool_calls:
        calls = calls[:1]
    tool_calls = []
    for i, call in enumerate(calls):
        function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
        tool_calls.append({"index": i, "id": f"call_{secrets.token_hex(8)}", "type": "function",
                           "function": function})
    return {**message, "content": answer or None, "tool_calls": tool_calls}, "tool_calls"


def event(content: dict) -> str:
    return f"data: {json.dumps(content)}\n\n"


async def refuse(request, error):
    """Answer an exception as OpenAI's API does."""
    if isinstance(error, RequestValidationError):
        # Of a value that may be one of two kinds, the last says most.
        last = error.errors()[-1]
        needs = "needs a JSON object, and the header Content-Type: application/json"
        says = needs if last["loc"] == ("body",) else last["msg"]
        error = Refusal(400, f"{'.'.join(map(str, last['loc']))}: {says}")
    return JSONResponse(error_of(error), error.status_code)


def error_of(error: HTTPException) -> dict:
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    return {"error": {"message": error.detail, "type": kind, "param": None,
                      "code": getattr(error, "code", None)}}


def serve(config, load, limits):
    """Answer requests until a signal ends the process. `load` returns the model and tokenizer."""
    if config.host not in LOCAL and not config.token:
        raise UserError(f"--host {config.host}: others can reach it, so give a --token")
    server = Server(config, *load(config), limits)
    http = uvicorn.Server(uvicorn.Config(
        server.application(), host=config.host, port=config.port, log_level="warning",
        lifespan="off", ws="none"))
    try:
        socket = http.config.bind_socket()
    except SystemExit:
        # It has printed why.
        raise UserError(f"--port {config.port}: cannot listen at {config.host}") from None
    print(f"http://{config.host}:{socket.getsockname()[1]}: {printable(config.model_path)}, "
          f"environment {config.env}; Ctrl-C ends", flush=True)
    threading.Thread(target=http.run, args=([socket],), daemon=True).start()
    # In the main thread, which signals interrupt. Where the engine fails, the server ends.
    server.player.run()
