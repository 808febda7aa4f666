"""An agent that others ask: OpenAI's API over the decoding engine (`python agent.py --serve`).

    POST /v1/chat/completions   messages, tools, stream, n, seed, stop, logprobs
    POST /v1/completions        text or token ids; with return_token_ids also ids out, as in vLLM
    POST /v1/load_lora_adapter, /v1/unload_lora_adapter     {"lora_name", "lora_path"}
    POST /solve                 {"problem"}: the agent plays its environment, its tools really run
    GET  /v1/models, /healthz

Another machine's run can have its episodes sampled here: `grpo.py --sampler http://host:8000`.
"""
import asyncio
import hmac
import json
import secrets
import time

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from agent import Episode
from envs.session import Session, Watch, load_environments
from experiment.errors import UserError, first_line, printable
from experiment.seeds import mix
from llm.chat import Chat
from llm.engine import Row
from llm.memory import techniques_of
from llm.tool_calls import parse_tool_calls
from window.player import BASE, Player, Seat
from window.requests import (Refusal, check_known, conversation_ids, field, limit_of, sampling_of,
                             seeds_of, stops_of)

BODY = 2**22  # bytes of a request
REQUESTS = 256  # that are answered at the same time
SECONDS = 600  # until a request must have ended
LOCAL = ("127.0.0.1", "localhost", "::1")


class Server:
    """The application, and what it answers from."""

    def __init__(self, config, model, tokenizer, limits):
        self.config, self.model, self.tokenizer, self.limits = config, model, tokenizer, limits
        self.context = getattr(model.config.get_text_config(), "max_position_embeddings", 2048)
        self.player = Player(model, techniques_of(model).decode_rows)
        self.plain = Chat(tokenizer, [], model.generation_config)
        self.running = 0
        self.started = int(time.time())
        self.app = FastAPI(title="agent", docs_url=None, redoc_url=None)
        for path, answer in (("/v1/chat/completions", self.chat_completions),
                             ("/v1/completions", self.completions), ("/solve", self.solve),
                             ("/v1/load_lora_adapter", self.load),
                             ("/v1/unload_lora_adapter", self.unload)):
            self.app.post(path)(self.guarded(answer))
        self.app.get("/v1/models")(self.models)
        self.app.get("/healthz")(self.healthz)
        self.app.get("/health")(self.healthz)
        self.player.start()

    # ---------------------------------------------------------------------------- around a request
    def guarded(self, answer):
        """Return the handler of a path: it reads the body and answers errors as OpenAI does."""
        async def handle(request: Request):
            try:
                self.authorize(request)
                body = await self.body_of(request)
                if self.running >= REQUESTS:
                    raise Refusal(429, f"{REQUESTS} requests are being answered; try again later",
                                  "rate_limit_exceeded")
                return await answer(body, request)
            except Refusal as refusal:
                return JSONResponse(refusal.body(), refusal.status)
            except Exception as error:  # of ours: the others must not notice
                refusal = Refusal(500, f"{type(error).__name__}: {first_line(error)}")
                return JSONResponse(refusal.body(), 500)
        return handle

    def authorize(self, request):
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self.config.token and not hmac.compare_digest(given.encode(), self.config.token.encode()):
            raise Refusal(401, "the token is missing or wrong", "invalid_api_key")

    async def body_of(self, request) -> dict:
        data = b""
        async for chunk in request.stream():
            data += chunk
            if len(data) > BODY:
                raise Refusal(413, f"the body has more than {BODY} bytes")
        try:
            body = json.loads(data)
        except ValueError as error:
            raise Refusal(400, f"the body is not JSON: {first_line(error)}") from None
        if not isinstance(body, dict):
            raise Refusal(400, "the body is not a JSON object")
        return body

    async def with_client(self, request, work):
        """Wait for `work`, at most SECONDS and as long as the client is there."""
        task = asyncio.ensure_future(work)
        ends = time.monotonic() + SECONDS
        self.running += 1
        try:
            while not task.done():
                await asyncio.wait([task], timeout=0.25)
                if time.monotonic() > ends:
                    raise Refusal(408, f"not answered within {SECONDS} s", "timeout")
                if not task.done() and await request.is_disconnected():
                    raise Refusal(499, "the client has gone")
            return task.result()
        finally:
            task.cancel()
            self.running -= 1

    def adapter_of(self, body) -> str:
        name = field(body, "model", str, BASE)
        if name in self.player.adapters:
            return name
        if name not in (BASE, self.config.model_path):
            raise Refusal(404, f"the model {name!r} does not exist here; GET /v1/models",
                          "model_not_found")
        return BASE

    def seats(self, body, prompt, sampling, limit, n, stream=False) -> list[Seat]:
        """Return the seats of n rows after one prompt."""
        stops = stops_of(body)
        ended = (lambda ids: any(stop in self.plain.text(ids) for stop in stops)) if stops else None
        loop, adapter = asyncio.get_running_loop(), self.adapter_of(body)
        return [Seat(Row(prompt, group=tuple(prompt), seed=seed, limit=limit), sampling, adapter,
                     asyncio.Queue(), loop, stream, ended) for seed in seeds_of(body, n)]

    async def play(self, request, seats):
        """Let the rows of some seats play a turn each. They leave, whatever happens."""
        try:
            await self.with_client(request, asyncio.gather(*map(self.player.turn, seats)))
        finally:
            for seat in seats:
                self.player.leave(seat)

    # ------------------------------------------------------------------------------ /v1/completions
    async def completions(self, body, request):
        check_known(body)
        prompts = body.get("prompt")
        if isinstance(prompts, str) or (prompts and isinstance(prompts, list)
                                        and isinstance(prompts[0], int)):
            prompts = [prompts]
        if not isinstance(prompts, list) or not prompts:
            raise Refusal(400, "prompt: must be text, token ids, or a list of them")
        if field(body, "stream", bool, False):
            raise Refusal(400, "stream: only /v1/chat/completions streams here")
        n = field(body, "n", int, 1, 1, 128)
        eos = self.plain.stop_ids
        sampling = sampling_of(body, () if field(body, "ignore_eos", bool, False) else eos)
        seats, asked = [], 0
        for prompt in prompts:
            ids = self.prompt_ids(prompt)
            asked += len(ids)
            limit = limit_of(body, ids, self.context, 16)
            seats += self.seats(body, ids, sampling, limit, n)
        given = {seat: list(seat.row.pending) for seat in seats}
        await self.play(request, seats)
        choices = [self.completion(body, i, seat, given[seat]) for i, seat in enumerate(seats)]
        return {"id": f"cmpl-{secrets.token_hex(12)}", "object": "text_completion",
                "created": int(time.time()), "model": body.get("model", BASE), "choices": choices,
                "usage": usage(asked, seats)}

    def prompt_ids(self, prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.plain.encode(prompt)
        vocabulary = self.model.config.get_text_config().vocab_size
        right = isinstance(prompt, list) and prompt and all(
            type(i) is int and 0 <= i < vocabulary for i in prompt)
        if not right:
            raise Refusal(400, f"prompt: token ids must be whole numbers below {vocabulary}")
        return prompt

    def completion(self, body, index, seat, prompt):
        row, text = seat.row, self.text(seat, stops_of(body))
        choice = {"index": index, "text": text, "finish_reason": how_it_ended(seat),
                  "logprobs": None}
        if body.get("logprobs") is not None:
            choice["logprobs"] = {"token_logprobs": row.logprobs, "top_logprobs": None,
                                  "tokens": [self.plain.text([i]) for i in row.turn]}
        if field(body, "return_token_ids", bool, False):
            choice |= {"token_ids": row.turn, "prompt_token_ids": prompt}
        return choice

    def text(self, seat, stops):
        """Return what a row sampled as text, up to the first text that ends a turn."""
        text = self.plain.text(seat.row.turn)
        ends = [text.index(stop) for stop in stops if stop in text]
        return text[:min(ends)] if ends else text

    # ------------------------------------------------------------------------- /v1/chat/completions
    async def chat_completions(self, body, request):
        check_known(body)
        try:
            tools = field(body, "tools", list, [])
            if body.get("tool_choice") == "none":
                tools = []
            chat = Chat(self.tokenizer, tools, self.model.generation_config) if tools else self.plain
            prompt = conversation_ids(chat, body.get("messages"))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Refusal(400, f"messages or tools: {first_line(error)}") from None
        sampling = sampling_of(body, chat.stop_ids)
        limit = limit_of(body, prompt, self.context, self.limits.max_new_tokens)
        stream = field(body, "stream", bool, False)
        seats = self.seats(body, prompt, sampling, limit, field(body, "n", int, 1, 1, 128), stream)
        head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()),
                "model": body.get("model", BASE)}
        if stream:
            events = self.events(body, head, seats, tools, len(prompt))
            return StreamingResponse(events, media_type="text/event-stream")
        await self.play(request, seats)
        choices = []
        for i, seat in enumerate(seats):
            message, reason = self.message(body, seat, tools)
            choices.append({"index": i, "message": message, "finish_reason": reason,
                            "logprobs": self.chat_logprobs(body, seat)})
        return {**head, "object": "chat.completion", "choices": choices,
                "usage": usage(len(prompt), seats)}

    def message(self, body, seat, tools):
        """Return the assistant's message of a row, and how it ended."""
        text = self.text(seat, stops_of(body))
        message = {"role": "assistant", "content": text}
        if not tools:
            return message, how_it_ended(seat)
        content, calls, errors = parse_tool_calls(text)
        if not calls:
            return message, how_it_ended(seat)
        message["content"] = content or None
        message["tool_calls"] = [
            {"id": f"call_{secrets.token_hex(8)}", "type": "function", "function": {
                "name": call["name"], "arguments": json.dumps(call["arguments"])}}
            for call in calls]
        return message, "tool_calls"

    def chat_logprobs(self, body, seat):
        if not field(body, "logprobs", bool, False):
            return None
        content = []
        for i, logprob in zip(seat.row.turn, seat.row.logprobs):
            token = self.tokenizer.decode([i])
            content.append({"token": token, "logprob": logprob, "bytes": list(token.encode()),
                            "top_logprobs": []})
        return {"content": content}

    async def events(self, body, head, seats, tools, asked):
        """Yield the chunks of a streamed answer. Calls come whole, when their turn has ended."""
        def chunk(index, delta, reason=None, **more):
            choices = [{"index": index, "delta": delta, "finish_reason": reason}]
            return line({**head, "object": "chat.completion.chunk", "choices": choices, **more})
        chunks = asyncio.Queue()

        async def follow(index, seat):
            sent = 0
            await chunks.put(chunk(index, {"role": "assistant", "content": ""}))
            async for _ in self.player.turns(seat):
                text = self.text(seat, [])
                # A stop text or a character may be half there.
                safe = len(text) - longest(stops_of(body)) - (3 if text.endswith("\ufffd") else 0)
                if not tools and safe > sent:
                    await chunks.put(chunk(index, {"content": text[sent:safe]}))
                    sent = safe
            message, reason = self.message(body, seat, tools)
            if (message["content"] or "")[sent:]:
                await chunks.put(chunk(index, {"content": message["content"][sent:]}))
            for k, call in enumerate(message.get("tool_calls", [])):
                await chunks.put(chunk(index, {"tool_calls": [{"index": k, **call}]}))
            await chunks.put(chunk(index, {}, reason))

        async def follow_all():
            await asyncio.gather(*(follow(i, seat) for i, seat in enumerate(seats)))
            if (body.get("stream_options") or {}).get("include_usage"):
                last = {**head, "object": "chat.completion.chunk", "choices": []}
                await chunks.put(line({**last, "usage": usage(asked, seats)}))
            await chunks.put("data: [DONE]\n\n")
            await chunks.put(None)
        self.running += 1
        task = asyncio.ensure_future(follow_all())
        try:
            async with asyncio.timeout(SECONDS):
                while True:
                    getter = asyncio.ensure_future(chunks.get())
                    await asyncio.wait([getter, task], return_when=asyncio.FIRST_COMPLETED)
                    if task.done() and task.exception():
                        raise task.exception()
                    text = await getter
                    if text is None:
                        return
                    yield text
        except Exception as error:
            yield line(Refusal(500, first_line(error)).body())
        finally:
            task.cancel()
            self.running -= 1
            for seat in seats:
                self.player.leave(seat)

    # --------------------------------------------------------------------------------------- /solve
    async def solve(self, body, request):
        """Play an episode of the run's environment with the task that is meant by the problem."""
        problem = field(body, "problem", str)
        if not problem:
            raise Refusal(400, "problem: must be text")
        return await self.with_client(request, self.episode(problem, body))

    async def episode(self, problem, body):
        classes, chats = await asyncio.to_thread(
            load_environments, self.tokenizer, self.config.env, self.model.generation_config)
        [(name, chat)] = chats.items()
        read = getattr(classes[name], "_from_text", None)
        if not read:
            raise Refusal(400, f"the environment {name} has no _from_text, which would make a task "
                               "of the problem")
        try:
            task = read(problem)
        except ValueError as error:
            raise Refusal(400, f"problem: {first_line(error)}") from None
        session = Session(Watch(self.limits.tool_timeout), name, classes[name], task)
        episode = await asyncio.to_thread(Episode, session, chat, self.limits, "solve")
        t = episode.trajectory
        if episode.can_take_turn:
            sampling = sampling_of(body, chat.stop_ids | chat.start_ids)
            row = Row(t.token_ids, seed=seeds_of(body, 1)[0], limit=episode.turn_budget)
            seat = Seat(row, sampling, BASE, asyncio.Queue(), asyncio.get_running_loop())
            try:
                await self.player.turn(seat)
                while await asyncio.to_thread(take_turn, episode, row):
                    await self.player.turn(seat, episode.next_ids, episode.turn_budget)
            finally:
                self.player.leave(seat)
        answers = [m["content"] for m in t.messages if m["role"] == "assistant"]
        tools = [{"name": m["name"], "result": m["content"]} for m in t.messages
                 if m["role"] == "tool"]
        return {"solution": answers[-1] if answers else "", "success": t.info.get("success"),
                "reward": t.reward, "stop_reason": t.stop_reason or "max_tokens", "tools": tools,
                "transcript": t.messages, "error": t.info.get("error")}

    # ----------------------------------------------------------------------------- models, adapters
    async def models(self, request: Request):
        try:
            self.authorize(request)
        except Refusal as refusal:
            return JSONResponse(refusal.body(), refusal.status)
        base = {"id": BASE, "object": "model", "created": self.started, "owned_by": "this machine",
                "root": self.config.model_path, "parent": None, "max_model_len": self.context}
        return {"object": "list", "data": [
            base, *({**base, "id": name, "parent": BASE} for name in self.player.adapters)]}

    async def healthz(self):
        if self.player.broken:
            return JSONResponse({"status": f"the engine failed: {self.player.broken}"}, 503)
        return {"status": "ok"}

    async def load(self, body, request):
        name, path = field(body, "lora_name", str), field(body, "lora_path", str)
        if not name or not path or name == BASE:
            raise Refusal(400, "lora_name and lora_path must be given, and the name not be taken")
        if name in self.player.adapters:
            raise Refusal(400, f"the adapter {name!r} has already been loaded")
        try:
            await self.player.adapter(self.player.load, name, path)
        except UserError as error:
            raise Refusal(400, str(error)) from None
        return {"status": "ok"}

    async def unload(self, body, request):
        name = field(body, "lora_name", str)
        try:
            await self.player.adapter(self.player.unload, name)
        except KeyError:
            raise Refusal(404, f"the adapter {name!r} is not loaded") from None
        return {"status": "ok"}


def take_turn(episode, row) -> bool:
    """Give the episode what the row sampled and run its tools. False if the episode has ended."""
    episode.take_turn(row.turn, row.logprobs)
    if episode.calling:
        episode.take_results()
    return not episode.trajectory.stop_reason


def how_it_ended(seat) -> str:
    row = seat.row
    ended = row.turn[-1] in seat.sampling.stop_ids or len(row.turn) < row.limit
    return "stop" if ended else "length"


def usage(asked: int, seats) -> dict:
    sampled = sum(len(seat.row.turn) for seat in seats)
    return {"prompt_tokens": asked, "completion_tokens": sampled, "total_tokens": asked + sampled}


def line(event: dict) -> str:
    """Return an event of a stream."""
    return f"data: {json.dumps(event)}\n\n"


def longest(texts) -> int:
    return max(map(len, texts), default=1) - 1


def serve(config, model, tokenizer, limits):
    """Answer requests until Ctrl-C."""
    if config.host not in LOCAL and not config.token:
        raise UserError(f"--host {config.host}: others can reach it, so give a --token")
    server = Server(config, model, tokenizer, limits)
    print(f"http://{config.host}:{config.port}: {printable(config.model_path)}, environment "
          f"{config.env}; Ctrl-C ends", flush=True)
    uvicorn.run(server.app, host=config.host, port=config.port, log_level="warning")
