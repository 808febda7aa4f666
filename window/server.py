"""An agent that others ask: OpenAI's API over the decoding engine (`python agent.py --serve`).

    POST /v1/chat/completions   messages, tools, stream, n, seed, stop, logprobs
    POST /v1/completions        text or token ids; with return_token_ids also ids out, as in vLLM
    POST /v1/load_lora_adapter, /v1/unload_lora_adapter     {"lora_name", "lora_path"}
    POST /solve                 {"problem"}: the agent plays its environment, its tools really run
    GET  /v1/models, /healthz

Another machine's run can have its episodes sampled here: `grpo.py --sampler http://host:8000`.
"""
import json
import secrets
import threading
import time
from contextlib import aclosing
from functools import lru_cache

import uvicorn
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException

from agent import Episode
from envs.session import Session, Watch, load_environments
from episodes.tasks import parse_env_options
from experiment.errors import UserError, first_line, printable
from experiment.seeds import mix
from llm.chat import Chat
from llm.memory import techniques_of
from llm.tool_calls import parse_tool_calls
from window.gate import Gate
from window.player import BASE, Asked, Player, elsewhere
from window.requests import (Adapter, ChatCompletion, Completion, Problem, Refusal, Sampled,
                             Turns, conversation_ids)

OBJECTS = {"cmpl": "text_completion", "chatcmpl": "chat.completion",
           "chunk": "chat.completion.chunk"}
LOCAL = ("127.0.0.1", "localhost", "::1")


class Choice(Asked):
    """One answer to a request, as far as the client may see it.

    Attributes:
        shown: the ids that count: none come after a stop text.
        text: what they say, without the stop token or the stop text.
        reason: why the turn ended ("stop", "length"), None while it goes on.
        sent: how many characters and ids have been streamed.
    """
    shown, text, reason, sent = (), "", None, (0, 0)

    def hear(self, count: int, has_ended: bool, chat: Chat, stops: list[str]):
        """Take notice of the first `count` tokens of the turn."""
        self.shown = self.turn[:count]
        by_id = self.shown[-1] in self.stop_ids
        self.text = chat.text(self.shown[:count - by_id])
        cuts = [self.text.index(stop) for stop in stops if stop in self.text]
        if cuts:
            self.text = self.text[:min(cuts)]
        if cuts or has_ended:
            self.reason = "stop" if cuts or by_id else "length"


class Server:
    """The application, and what it answers from."""

    def __init__(self, config, model, tokenizer, limits):
        self.config, self.tokenizer, self.limits = config, tokenizer, limits
        self.generation_config = model.generation_config
        text_config = model.config.get_text_config()
        self.vocabulary = text_config.vocab_size
        self.context = min(limits.max_tokens,
                           getattr(text_config, "max_position_embeddings", limits.max_tokens))
        self.chat_of = lru_cache(64)(self.make_chat)
        self.plain = self.chat_of("[]")
        self.environment = None, None, self.plain  # name, class and Chat
        if config.env:
            classes, chats = load_environments(tokenizer, config.env, self.generation_config)
            [(name, cls)] = classes.items()
            self.environment = name, cls, chats[name]
        self.player = Player(model, techniques_of(model).decode_rows)
        self.started = int(time.time())

    def application(self):
        """Return the ASGI application."""
        app = FastAPI(openapi_url=None)
        for path, answer in (("/v1/chat/completions", self.chat_completions),
                             ("/v1/completions", self.completions), ("/solve", self.solve),
                             ("/v1/load_lora_adapter", self.load),
                             ("/v1/unload_lora_adapter", self.unload)):
            app.post(path)(answer)
        app.get("/v1/models")(self.models)
        for path in ("/healthz", "/health"):
            app.get(path)(self.healthz)
        for error in (Refusal, RequestValidationError, HTTPException, Exception):
            app.exception_handler(error)(refuse)
        return Gate(app, self.config.token)

    def make_chat(self, tools: str) -> Chat:
        return Chat(self.tokenizer, json.loads(tools), self.generation_config)

    # ----------------------------------------------------------------------------------- sampling
    def turns(self, body: Turns, prompt, stop_ids, default: int, streams=False) -> list[Choice]:
        """Return the rows of n turns after one prompt."""
        limit = body.limit(prompt, self.context, default)
        return [self.row(body, prompt, mix(body.seed, i), stop_ids={*stop_ids, *body.stop_token_ids},
                         limit=limit, streams=streams or bool(body.stops)) for i in range(body.n)]

    def row(self, body: Sampled, prompt, seed: int, **options) -> Choice:
        """Return the row of a turn, or raise Refusal."""
        if self.player.broken:
            raise Refusal(503, f"the engine has failed: {self.player.broken}")
        name = BASE if body.model == self.config.model_path else body.model
        weights = self.player.adapters.get(name)
        if weights is None:
            raise Refusal(404, f"the model {name!r} does not exist here; GET /v1/models",
                          "model_not_found")
        return Choice(prompt, weights=weights, sampling=body.sampling, seed=seed, **options)

    async def follow(self, choices, stops=()):
        """Let choices be sampled. Yield one whenever it has grown or ended, until all have."""
        left = len(choices)
        async with aclosing(self.player.play(choices)) as news:
            while left:
                choice, count, has_ended = await anext(news)
                if choice.error:
                    raise Refusal(500, f"the engine failed: {choice.error}")
                if not choice.reason:
                    choice.hear(count, has_ended, self.plain, stops)
                    left -= bool(choice.reason)
                    yield choice

    async def finish(self, choices, stops=()):
        """Wait for the ends of choices."""
        async for _ in self.follow(choices, stops):
            pass

    # -------------------------------------------------------------------------------- completions
    async def completions(self, body: Completion):
        ids = self.plain.encode(body.prompt) if isinstance(body.prompt, str) else body.prompt
        if not ids or max(ids) >= self.vocabulary:
            raise Refusal(400, f"prompt: needs token ids, all below {self.vocabulary}")
        choices = self.turns(body, ids, () if body.ignore_eos else self.plain.stop_ids, 16)
        await self.finish(choices, body.stops)
        return self.answer("cmpl", body, len(ids), choices, [
            self.completion(body, i, choice) for i, choice in enumerate(choices)])

    def completion(self, body, index, choice) -> dict:
        shown = {"index": index, "text": choice.text, "finish_reason": choice.reason}
        if body.logprobs is not None:
            shown["logprobs"] = {"token_logprobs": choice.logprobs[:len(choice.shown)],
                                 "tokens": [self.plain.text([i]) for i in choice.shown]}
        if body.return_token_ids:
            shown |= {"token_ids": choice.shown, "prompt_token_ids": list(choice.group)}
        return shown

    async def chat_completions(self, body: ChatCompletion):
        try:
            tools = [tool.model_dump() for tool in body.tools if body.tool_choice == "auto"]
            chat = self.chat_of(json.dumps(tools))
        except (ValueError, RecursionError) as error:
            raise Refusal(400, f"tools: {first_line(error)}") from None
        prompt = conversation_ids(chat, body.messages)
        choices = self.turns(body, prompt, chat.stop_ids | chat.start_ids,
                               self.limits.max_new_tokens, body.stream)
        if body.stream:
            events = self.events(body, choices, tools)
            return StreamingResponse(events, media_type="text/event-stream")
        await self.finish(choices, body.stops)
        shown = []
        for i, choice in enumerate(choices):
            message, reason = message_of(choice, tools)
            shown.append({"index": i, "message": message, "finish_reason": reason,
                          "logprobs": self.logprobs(body, choice)})
        return self.answer("chatcmpl", body, len(prompt), choices, shown)

    def answer(self, kind, body, asked, choices, shown) -> dict:
        """Return the head of an answer around its choices."""
        sampled = sum(len(choice.shown) for choice in choices)
        usage = {"prompt_tokens": asked, "completion_tokens": sampled,
                 "total_tokens": asked + sampled}
        return {"id": f"{kind}-{secrets.token_hex(12)}", "created": int(time.time()),
                "object": OBJECTS[kind], "model": body.model, "choices": shown, "usage": usage}

    def logprobs(self, body, choice, start: int = 0):
        """Return the log-probabilities of a choice's tokens from number `start` on."""
        if not body.logprobs:
            return None
        content = []
        for i, logprob in list(zip(choice.shown, choice.logprobs))[start:]:
            token = self.tokenizer.decode([i])
            content.append({"token": token, "logprob": logprob, "bytes": list(token.encode()),
                            "top_logprobs": []})
        return {"content": content}

    async def events(self, body, choices, tools):
        """Yield the chunks of a streamed answer. Calls come whole, when their turn has ended."""
        head = self.answer("chunk", body, len(choices[0].group), choices, [])
        # A stop text, or a character, may have come by half.
        unsure = max(map(len, body.stops), default=1) - 1
        try:
            for i in range(len(choices)):
                yield chunk(head, i, {"role": "assistant", "content": ""})
            async for choice in self.follow(choices, body.stops):
                message, reason = {}, None
                text = choice.text[:len(choice.text) - unsure].rstrip("\ufffd")
                if choice.reason:
                    message, reason = message_of(choice, tools)
                    text = message.pop("content") or ""
                characters, ids = choice.sent
                if not choice.reason and (tools or len(text) <= characters):
                    continue
                choice.sent = len(text), len(choice.shown)
                calls = [{"index": i, **call} for i, call in enumerate(message.get("tool_calls", []))]
                delta = {"content": text[characters:]} | ({"tool_calls": calls} if calls else {})
                yield chunk(head, choices.index(choice), delta, reason,
                            self.logprobs(body, choice, ids))
            if body.stream_options.include_usage:
                usage = self.answer("chunk", body, len(choices[0].group), choices, [])["usage"]
                yield event({**head, "usage": usage})
            yield "data: [DONE]\n\n"
        except Refusal as refusal:
            yield event(refusal.body())

    # --------------------------------------------------------------------------------------- solve
    async def solve(self, body: Problem):
        """Play an episode of the environment with the task that the problem states."""
        if not hasattr(self.environment[1], "_from_text"):
            raise Refusal(400, "this server plays no environment (--env) that makes a task of a "
                               "text (_from_text)")
        episode = await elsewhere(in_thread, self.begin, body.problem)
        t = episode.trajectory
        while episode.can_take_turn:
            stop_ids = episode.chat.stop_ids | episode.chat.start_ids
            row = self.row(body, t.token_ids, mix(body.seed, len(t.rewards)), stop_ids=stop_ids,
                           limit=episode.turn_budget)
            await self.finish([row])
            await elsewhere(in_thread, take_turn, episode, row)
        if "error" in t.info:
            raise Refusal(500, t.info["error"])
        answers = [m["content"] for m in t.messages if m["role"] == "assistant"]
        tools = [{"name": m["name"], "result": m["content"]} for m in t.messages
                 if m["role"] == "tool"]
        return {"solution": answers[-1] if answers else "", "success": t.info.get("success"),
                "reward": t.reward, "stop_reason": t.stop_reason or "max_tokens", "tools": tools,
                "transcript": t.messages}

    def begin(self, problem: str) -> Episode:
        """Return an episode whose task is the problem."""
        name, cls, chat = self.environment
        try:
            task = {**cls._from_text(problem), **parse_env_options(self.config.env_options, [name])}
        except ValueError as error:
            raise Refusal(400, f"problem: {first_line(error)}") from None
        session = Session(Watch(self.limits.tool_timeout), name, cls, task)
        return Episode(session, chat, self.limits, "solve")

    # ----------------------------------------------------------------------------- models, adapters
    async def models(self):
        base = {"id": BASE, "object": "model", "created": self.started, "owned_by": "this machine",
                "root": self.config.model_path, "parent": None, "max_model_len": self.context}
        names = [name for name in self.player.adapters if name != BASE]
        return {"object": "list",
                "data": [base, *({**base, "id": name, "parent": BASE} for name in names)]}

    async def healthz(self):
        if self.player.broken:
            raise Refusal(503, f"the engine has failed: {self.player.broken}")
        return {"status": "ok"}

    async def load(self, body: Adapter):
        if body.lora_name in self.player.adapters:
            raise Refusal(400, f"the adapter {body.lora_name!r} has already been loaded")
        try:
            await elsewhere(self.player.inbox.put, self.player.load, body.lora_name, body.lora_path)
        except UserError as error:
            raise Refusal(400, str(error)) from None
        return {"status": "ok"}

    async def unload(self, body: Adapter):
        if body.lora_name == BASE or not self.player.adapters.pop(body.lora_name, None):
            raise Refusal(404, f"the adapter {body.lora_name!r} is not loaded")
        return {"status": "ok"}


def message_of(choice, tools) -> tuple[dict, str]:
    """Return the assistant's message in a choice that has ended, and the reason of its end."""
    message = {"role": "assistant", "content": choice.text}
    content, calls, _ = parse_tool_calls(choice.text) if tools else ("", [], [])
    if not calls:
        return message, choice.reason
    message["content"] = content or None
    message["tool_calls"] = [
        {"id": f"call_{secrets.token_hex(8)}", "type": "function", "function": {
            "name": call["name"], "arguments": json.dumps(call["arguments"])}} for call in calls]
    return message, "tool_calls"


def take_turn(episode, row):
    """Give the episode what a row sampled, and run its tools."""
    episode.take_turn(row.turn, row.logprobs)
    if episode.calling:
        episode.take_results()


def chunk(head, index, delta, reason=None, logprobs=None) -> str:
    """Return a chunk of a streamed answer."""
    choice = {"index": index, "delta": delta, "finish_reason": reason, "logprobs": logprobs}
    return event({**head, "choices": [choice], "usage": None})


def event(content: dict) -> str:
    return f"data: {json.dumps(content)}\n\n"


async def refuse(request, error):
    """Answer an exception as OpenAI's API does."""
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"][1:])
        error = Refusal(400, f"{place}: {first['msg']}")
        if first["type"] == "extra_forbidden":
            error = Refusal(400, f"{place}: not supported by this server", "unsupported_parameter")
    elif isinstance(error, HTTPException):
        error = Refusal(error.status_code, str(error.detail))
    elif not isinstance(error, Refusal):
        error = Refusal(500, f"{type(error).__name__}: {first_line(error)}")
    return JSONResponse(error.body(), error.status)


def in_thread(function):
    # A tool that hangs does not keep the process from ending.
    threading.Thread(target=function, daemon=True).start()


def serve(config, model, tokenizer, limits):
    """Answer requests until a signal ends the process."""
    if config.host not in LOCAL and not config.token:
        raise UserError(f"--host {config.host}: others can reach it, so give a --token")
    server = Server(config, model, tokenizer, limits)
    http = uvicorn.Server(uvicorn.Config(
        server.application(), host=config.host, port=config.port, log_level="warning", lifespan="off"))
    socket = http.config.bind_socket()
    print(f"http://{config.host}:{socket.getsockname()[1]}: {printable(config.model_path)}, "
          f"environment {config.env}; Ctrl-C ends", flush=True)
    in_thread(lambda: http.run([socket]))
    # In the main thread, which signals interrupt.
    server.player.run()
