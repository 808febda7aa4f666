"""extras/serve/server.py, requests.py and player.py: asked by OpenAI's own client, by broken clients, and by a run of ours."""
import asyncio
import gc
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import dropwhile, islice
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("fastapi")
openai = pytest.importorskip("openai")

import decoders  # noqa: E402
import uvicorn  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from families import CALLS, TOOLS, real, small  # noqa: E402
from programs import ROOT, Program  # noqa: E402

import grpo  # noqa: E402
import sft  # noqa: E402
from envs import Limits, load  # noqa: E402
from core.config import UserError, mix
from layers import load_model
from core.model import save_model
from extras.fast import static_engine
from core.chat import Chat  # noqa: E402
from core.engine import Engine, Row  # noqa: E402
from core.tiny import make_tiny  # noqa: E402
from lora import adapter_tensors, add_lora, merged  # noqa: E402
from extras.serve import player, server as served_by  # noqa: E402
from extras.serve.player import Choice, SharedEngine  # noqa: E402
from extras.serve.requests import ChatCompletion, call_opening, conversation_ids  # noqa: E402
from extras.serve.server import Server  # noqa: E402

HELLO = [{"role": "user", "content": "Solve 2x=6"}]
LONG = {"model": "base", "messages": HELLO, "max_tokens": 900}
ADD = {"type": "function", "function": {
    "name": "add", "description": "Add two numbers.", "parameters": {
        "type": "object", "required": ["a", "b"],
        "properties": {"a": {"type": "integer", "description": "one"}, "b": {"type": "integer", "description": "other"}}}}}


class Served:
    """A server of the untaught tiny model in this process. `script` holds turns that rows take in place of sampling."""

    def __init__(self, model, tokenizer, token=None, env="equations", max_tokens=1024):
        config = SimpleNamespace(token=token, model_path="tiny", env=env, env_options=None, unsafe_code=False)
        self.server = Server(config, model, tokenizer, Limits(max_tokens=max_tokens))
        self.script = []
        make_row = self.server.row

        def scripted(*arguments, **options):
            row = make_row(*arguments, **options)
            row.forced = list(self.script.pop(0)) if self.script else []
            return row
        self.server.row = scripted
        self.app = self.server.application()
        self.http = uvicorn.Server(uvicorn.Config(self.app, port=0, log_level="critical", lifespan="off"))
        for run in (self.http.run, self.server.player.run):
            threading.Thread(target=run, daemon=True).start()
        while not self.http.started:
            time.sleep(0.01)
        self.port = self.http.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=token or "none", max_retries=0)

    def post(self, path, body):
        """Return the parsed answer to any body, or raise openai.APIStatusError."""
        return self.client.post(path, body=body, cast_to=object)

    def playing(self):
        """How many rows are waiting or being decoded."""
        player, engine = self.server.player, self.server.player.engine
        if not engine:  # between two adapters
            return len(player.coming)
        rows = [row for row in engine.owner if row and row.state != "ended"]
        return len(player.coming) + len(engine.waiting) + len(rows)

    def wait_until_free(self, seconds=5):
        end = time.monotonic() + seconds
        while self.playing() or self.server.requests:
            assert time.monotonic() < end, "rows are still playing"
            time.sleep(0.01)


@pytest.fixture(scope="module")
def tiny_model():
    return load_model("tiny", train=False)


@pytest.fixture(scope="module")
def shared(tiny_model):
    served = Served(*tiny_model)
    yield served
    served.http.should_exit = True


@pytest.fixture
def served(shared):
    yield shared
    shared.wait_until_free()
    shared.script.clear()


@pytest.fixture
def client(served):
    return served.client


# ------------------------------------------------------------------------------------------------------------ chat
def test_a_seed_repeats_an_answer_and_choices_differ(client):
    replies = [client.chat.completions.create(model="base", messages=HELLO, max_tokens=8, n=2, seed=1) for _ in range(2)]
    texts = [[choice.message.content for choice in reply.choices] for reply in replies]
    assert texts[0] == texts[1] and texts[0][0] != texts[0][1]
    usage = replies[0].usage
    assert usage.completion_tokens == 16 and usage.total_tokens == usage.prompt_tokens + 16
    assert {choice.finish_reason for choice in replies[0].choices} == {"length"}
    other = client.chat.completions.create(model="base", messages=HELLO, max_tokens=8, seed=2)
    assert other.choices[0].message.content not in texts[0]


def test_what_is_sampled_is_what_our_engine_samples(served, client, tiny_model):
    model, tokenizer = tiny_model
    asked = {"temperature": 0.7, "seed": 5, "max_tokens": 24}
    reply = client.chat.completions.create(model="base", messages=HELLO, logprobs=True, n=2, **asked)
    chat = served.server.plain
    prompt = chat.prompt(HELLO)
    rows = [Row(prompt, group=0, seed=mix(5, i), limit=24) for i in range(2)]
    engine = Engine(model, slots=2, stop_ids=chat.stop_ids | chat.start_ids, temperature=0.7)
    engine.add(rows)
    while engine.busy:
        engine.step()
    for row, choice in zip(rows, reply.choices):
        assert [token.token for token in choice.logprobs.content] == [tokenizer.decode([i]) for i in row.turn]
        assert [token.logprob for token in choice.logprobs.content] == pytest.approx(row.logprobs, abs=1e-4)
    ids = client.completions.create(model="base", prompt=prompt, logprobs=0, n=2, extra_body={"return_token_ids": True}, **asked)
    engine = Engine(model, slots=2, stop_ids=chat.stop_ids, temperature=0.7)
    rows = [Row(prompt, group=0, seed=mix(5, i), limit=24) for i in range(2)]
    engine.add(rows)
    while engine.busy:
        engine.step()
    for row, choice in zip(rows, ids.choices):
        assert choice.token_ids == row.turn and choice.prompt_token_ids == prompt
        assert choice.logprobs.token_logprobs == pytest.approx(row.logprobs, abs=1e-4)


def test_top_k_and_top_p_cut_what_is_sampled(client):
    def ask(**more):
        return client.completions.create(model="base", prompt=[5, 6, 7], max_tokens=8, seed=1, **more).choices[0].text
    likeliest = ask(temperature=0)
    assert likeliest == ask(extra_body={"top_k": 1}) == ask(top_p=1e-9) != ask()


def test_without_a_seed_answers_differ(client):
    options = {"model": "base", "messages": HELLO, "max_tokens": 8}
    assert len({client.chat.completions.create(**options).choices[0].message.content for _ in range(3)}) > 1


def test_what_ends_a_turn(served, client):
    chat = served.server.plain
    [stop], [opens] = chat.stop_ids, chat.start_ids

    def ask(turn, **more):
        served.script[:] = [turn]
        reply = client.completions.create(model="base", prompt=[5, 6], max_tokens=4, extra_body={"return_token_ids": True, **more}).choices[0]
        return reply.token_ids, reply.finish_reason
    assert ask([9, stop, 9, 9]) == ([9, stop], "stop")
    assert ask([9, stop, 9, 9], ignore_eos=True) == ([9, stop, 9, 9], "length")
    assert ask([9, 8, 9, 9], stop_token_ids=[7, 8]) == ([9, 8], "stop")
    assert ask([9, stop, 9, 9], stop_token_ids=[7, 8]) == ([9, stop], "stop")
    # In a chat also a token that opens a message does: the template's own messages begin with it.
    served.script[:] = [[9, opens, 9, 9]]
    reply = client.chat.completions.create(model="base", messages=HELLO, max_tokens=4)
    assert reply.usage.completion_tokens == 2 and reply.choices[0].message.content == chat.text([9])


def test_prompt_and_turn_fill_the_context(served, client):
    """1,024 tokens here. Where a client names no number of tokens, it gets those that are left."""
    for more in ({"max_tokens": 4}, {}):
        reply = client.completions.create(model="base", prompt=[5] * 1020, extra_body={"ignore_eos": True}, **more)
        assert reply.usage.completion_tokens == 4
    for prompt, more in (([5] * 1020, {"max_tokens": 5}), ([5] * 1024, {})):
        with pytest.raises(openai.BadRequestError, match="context"):
            client.completions.create(model="base", prompt=prompt, **more)
    model = served.server.player.model
    assert Server(served.server.config, model, served.server.tokenizer, Limits(max_tokens=10**6)).context == model.config.max_position_embeddings


def test_streamed_text_is_the_text(client):
    options = {"model": "base", "messages": HELLO, "max_tokens": 24, "seed": 3, "n": 3, "logprobs": True}
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage == whole.usage and not chunks[-1].choices
    assert not any(chunk.usage for chunk in client.chat.completions.create(**options, stream=True))
    for choice in whole.choices:
        mine = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == choice.index]
        pieces = [c.delta.content or "" for c in mine]
        assert "".join(pieces) == choice.message.content and len(pieces) > 1  # on a busy machine several tokens come at once
        tokens = [token for c in mine if c.logprobs for token in c.logprobs.content]
        assert [token.token for token in tokens] == [token.token for token in choice.logprobs.content]
        # The last bits depend on what of the prompt was in the cache.
        assert [token.logprob for token in tokens] == pytest.approx([token.logprob for token in choice.logprobs.content], abs=1e-4)
        assert [c.finish_reason for c in mine if c.finish_reason] == [choice.finish_reason]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_text_ends_the_turn_and_is_not_shown(client, stream):
    options = {"model": "base", "messages": HELLO, "max_tokens": 60, "seed": 3}
    text = client.chat.completions.create(**options).choices[0].message.content
    stop = text[10:13]
    reply = client.chat.completions.create(**options, stop=["never", stop], stream=stream)
    if stream:
        chunks = [chunk.choices[0] for chunk in reply]
        assert "".join(c.delta.content or "" for c in chunks) == text[:text.index(stop)]
        assert chunks[-1].finish_reason == "stop"
    else:
        assert reply.choices[0].message.content == text[:text.index(stop)]
        assert reply.choices[0].finish_reason == "stop" and reply.usage.completion_tokens < 60


@pytest.mark.parametrize("name", ["smollm2", "llama3_1"])
def test_a_stop_text_ends_a_long_turn_at_its_last_token_and_delays_nobody(name):
    """To look for it in all of the turn took 6 s of the engine's thread for 4,096 tokens, in which no other client's row went on."""
    chat = Chat(real(name), [])
    chosen = random.Random(0)
    ids = [i for _ in range(600) for i in chat.tokenizer.encode(chosen.choice(["the ", "x" * 40, "\n", "😀", "日本語 ", "क्ष", "1.5", "󠁁"]), add_special_tokens=False)]
    for _ in range(20):
        start = chosen.randrange(len(ids) - 40)
        stop = chat.text(ids[start:start + chosen.randint(1, 30)]).strip("\ufffd") or "never"
        row = Choice([1], chat=chat, weights=None, sampling=(1.0, 0, 1.0), stop_ids=(), stops=[stop, "no"], seed=1, limit=10**4)
        began = time.process_time()
        while row.state != "ended" and len(row.turn) < len(ids):
            row.append(ids[len(row.turn)], -1.0, ())
        assert time.process_time() - began < 1
        assert stop in chat.text(row.turn) + ("never" if len(row.turn) == len(ids) else "") and stop not in chat.text(row.turn[:-1])


def test_no_part_of_a_long_stop_text_is_streamed(client):
    """While less was sampled than the stop text has characters, all of it may become the stop text."""
    options = {"model": "base", "messages": HELLO, "max_tokens": 60, "seed": 3}
    text = client.chat.completions.create(**options).choices[0].message.content
    chunks = client.chat.completions.create(**options, stop=[text[:20]], stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ""


@pytest.mark.parametrize("text, stops", [("h\u00e9llo \U0001f600 \u65e5\u672c\u8a9e", []), ("yes \U0001f600 \u65e5\u672c", ["\U0001f600 \u65e5"]),
                                         ("a \ufffd b", ["never"])])
def test_characters_of_several_tokens_are_streamed_whole(served, client, text, stops):
    turn = served.server.plain.turn(text, [])
    assert len(turn) > len(text)
    served.script[:] = [turn, turn]
    options = {"model": "base", "messages": HELLO, "max_tokens": 100, "stop": stops}
    whole = client.chat.completions.create(**options).choices[0].message.content
    pieces = [chunk.choices[0].delta.content for chunk in client.chat.completions.create(**options, stream=True)]
    assert "".join(pieces) == whole == text.partition(stops[0] if stops else "<|im_end|>")[0]


def test_control_tokens_in_text_stay_text(served, client):
    """Otherwise a user's text could open a message of the system."""
    chat = served.server.plain
    plain = client.chat.completions.create(model="base", messages=[{"role": "user", "content": "a"}], max_tokens=1).usage.prompt_tokens
    for spelled in ("<|im_start|>", "<|im_end|>"):
        assert len(chat.tokenizer.encode(spelled, add_special_tokens=False)) == 1
        for role in ("system", "user"):
            messages = [{"role": role, "content": f"a{spelled}"}, {"role": "user", "content": "a"}][:1 if role == "user" else 2]
            bare = [{**message, "content": "a"} for message in messages]
            counts = [client.chat.completions.create(model="base", messages=m, max_tokens=1).usage.prompt_tokens for m in (bare, messages)]
            assert counts[1] - counts[0] > 3
    assert plain


# ----------------------------------------------------------------------------------------------------------- tools
def call_turn(served, *calls, text=""):
    return served.server.chat_of(json.dumps([ADD])).turn(text, [{"name": "add", "arguments": a} for a in calls])


def test_tools_a_call_its_result_and_the_answer(served, client):
    served.script[:] = [call_turn(served, {"a": 2, "b": 3})]
    reply = client.chat.completions.create(model="base", messages=HELLO, tools=[ADD], max_tokens=200)
    [call] = reply.choices[0].message.tool_calls
    assert reply.choices[0].finish_reason == "tool_calls" and call.function.name == "add"
    assert json.loads(call.function.arguments) == {"a": 2, "b": 3}
    chat = served.server.chat_of(json.dumps([ADD]))
    served.script[:] = [chat.turn("5, of course", [])]
    messages = [*HELLO, reply.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "5"}]
    answer = client.chat.completions.create(model="base", messages=messages, tools=[ADD], max_tokens=200)
    assert answer.choices[0].message.content == "5, of course" and answer.choices[0].finish_reason == "stop"
    # The conversation is the episode that a rollout would hold: prompt, turn, result.
    calls = [{"name": "add", "arguments": {"a": 2, "b": 3}}]
    turn = chat.turn("", calls)
    expected = [*chat.prompt(HELLO), *turn, *chat.results(calls, ["5"], turn[-1])]
    assert answer.usage.prompt_tokens == len(expected)


def test_a_call_that_is_cut_is_no_call(served, client):
    """Half of a call in tags can be read, without the arguments that were still to come."""
    chat = served.server.chat_of(json.dumps([ADD]))
    half = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n"
    served.script[:] = [[*chat.encode(half), *chat.turn("", [])]]
    reply = client.chat.completions.create(model="base", messages=HELLO, tools=[ADD], max_tokens=len(chat.encode(half)))
    assert reply.choices[0].finish_reason == "length" and not reply.choices[0].message.tool_calls
    assert "<function=add>" in reply.choices[0].message.content


@pytest.mark.parametrize("one_call", [False, True])
def test_one_call_where_the_client_or_the_template_takes_one(served, client, monkeypatch, one_call):
    """Llama's template shows one: with two the conversation could not come back."""
    monkeypatch.setattr(Chat, "shows_one_call", one_call)
    for parallel in (True, False):
        served.script[:] = [call_turn(served, {"a": 2, "b": 3}, {"a": 4, "b": 5})]
        reply = client.chat.completions.create(model="base", messages=HELLO, tools=[ADD], max_tokens=300, parallel_tool_calls=parallel)
        assert len(reply.choices[0].message.tool_calls) == (2 if parallel and not one_call else 1)


def test_a_plain_text_begins_as_its_tokenizer_begins_it(served, client, monkeypatch):
    """Llama, Gemma and Mistral begin with BOS, which vLLM's default writes too."""
    tokenizer = served.server.tokenizer
    plain = client.completions.create(model="base", prompt="hello", max_tokens=1).usage.prompt_tokens
    monkeypatch.setattr(type(tokenizer), "bos_token_id", 1, raising=False)
    call = type(tokenizer).__call__
    monkeypatch.setattr(type(tokenizer), "__call__", lambda self, text, **options: {"input_ids": [1]} if text == "" else call(self, text, **options))
    assert client.completions.create(model="base", prompt="hello", max_tokens=1).usage.prompt_tokens == plain + 1
    # Nor is it written twice.
    assert client.completions.create(model="base", prompt=f"{tokenizer.decode([1])}hello", max_tokens=1).usage.prompt_tokens == plain + 1
    assert client.completions.create(model="base", prompt=[1, 9], max_tokens=1).usage.prompt_tokens == 2


def test_a_tagged_argument_is_text_where_the_functions_schema_says_so(served, client):
    say = {"type": "function", "function": {"name": "say", "parameters": {"type": "object", "properties": {"x": {"type": "string"}}}}}
    chat = served.server.plain
    served.script[:] = [[*chat.encode("<tool_call><function=say><parameter=x>42</parameter></function></tool_call>"), *chat.stop_ids]]
    [call] = client.chat.completions.create(model="base", messages=HELLO, tools=[say], max_tokens=200).choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"x": "42"}


def test_several_messages_of_the_system_are_one(served):
    chat = served.server.plain
    messages = [{"role": "system", "content": "a"}, {"role": "developer", "content": "b"}, *HELLO]
    expected = chat.prompt([{"role": "system", "content": "a\n\nb"}, *HELLO])
    assert conversation_ids(chat, ChatCompletion(messages=messages).messages) == expected


def test_what_the_user_says_in_several_messages_is_one(served):
    chat = served.server.plain
    asked = [{"role": "user", "content": text} for text in "abcd"]
    messages = [*asked[:2], {"role": "assistant", "content": "Yes."}, *asked[2:]]
    turn = chat.turn("Yes.", [])
    expected = chat.prompt([{"role": "user", "content": "a\n\nb"}]) + turn + chat.reply("c\n\nd", turn[-1])
    assert conversation_ids(chat, ChatCompletion(messages=messages).messages) == expected


@pytest.mark.parametrize("name", ["smollm2", "qwen2_5", "llama3_1", "glm4moe"])
def test_the_user_may_speak_after_results(name):
    """So do agents that end with a tool's result, and people who interrupt them."""
    tokenizer = real(name)
    chat = Chat(tokenizer, TOOLS)
    result, user = {"role": "tool", "tool_call_id": "call00000", "name": "look", "content": "3"}, {"role": "user", "content": "And now?"}
    asked = [*HELLO, {"role": "assistant", "content": "", "tool_calls": [{"id": "call00000", "function": CALLS[0]}]}, result, user]
    body = [*HELLO, {"role": "assistant", "tool_calls": [{"id": "call00000", "function": {"name": "look", "arguments": json.dumps(CALLS[0]["arguments"])}}]}, result, user]
    text = chat.text(conversation_ids(chat, ChatCompletion(messages=body).messages))
    if chat.native_tools:
        assert text == tokenizer.apply_chat_template(asked, tools=TOOLS, add_generation_prompt=True, tokenize=False)
    else:
        assert text.endswith("<|im_start|>user\n<tool_response>\n3\n</tool_response>\nAnd now?<|im_end|>\n<|im_start|>assistant\n")


def test_a_function_without_parameters_and_one_that_is_none(served, client):
    clock = {"type": "function", "function": {"name": "clock"}}
    served.script[:] = [served.server.chat_of(json.dumps([ADD])).turn("", [{"name": "clock", "arguments": {}}])]
    [call] = client.chat.completions.create(model="base", messages=HELLO, tools=[clock], max_tokens=200).choices[0].message.tool_calls
    assert call.function.name == "clock" and call.function.arguments == "{}"
    prompts = set()
    for arguments in ("{}", ""):
        asked = {"role": "assistant", "tool_calls": [{"id": call.id, "type": "function", "function": {"name": "clock", "arguments": arguments}}]}
        prompt = [*HELLO, asked, {"role": "tool", "tool_call_id": call.id, "content": "12:00"}]
        prompts.add(client.chat.completions.create(model="base", messages=prompt, tools=[clock], max_tokens=1).usage.prompt_tokens)
    assert len(prompts) == 1
    for tool in ({"type": "custom"}, {"type": "function", "function": "clock"}, {"type": "function", "function": {"name": "a b"}}, None):
        with pytest.raises(openai.BadRequestError, match="tools.0"):
            served.post("/chat/completions", {**CHAT, "tools": [tool]})


def test_what_openais_package_adds_to_a_function_is_not_in_the_prompt(client):
    def prompt_tokens(**more):
        tool = {"type": "function", "function": {**ADD["function"], **more}}
        return client.chat.completions.create(model="base", messages=HELLO, tools=[tool], max_tokens=1).usage.prompt_tokens
    assert prompt_tokens() == prompt_tokens(strict=True) == prompt_tokens(strict=None)


def test_streamed_calls_come_whole_and_results_in_any_order(served, client):
    turn = call_turn(served, {"a": 1, "b": 1}, {"a": 2, "b": 2}, text="both:")
    served.script[:] = [turn, turn]
    chunks = list(client.chat.completions.create(model="base", messages=HELLO, tools=[ADD], max_tokens=200, stream=True, n=2))
    for index in (0, 1):
        deltas = [c.choices[0] for c in chunks if c.choices[0].index == index]
        calls = [call for delta in deltas for call in delta.delta.tool_calls or []]
        assert [call.index for call in calls] == [0, 1] and len({call.id for call in calls}) == 2
        assert [json.loads(call.function.arguments) for call in calls] == [{"a": 1, "b": 1}, {"a": 2, "b": 2}]
        assert deltas[-1].finish_reason == "tool_calls"
        assert "".join(delta.delta.content or "" for delta in deltas).strip() == "both:"
    message = {"role": "assistant", "content": "both:", "tool_calls": [
        {"id": call.id, "type": "function", "function": {"name": "add", "arguments": call.function.arguments}} for call in calls]}
    results = [{"role": "tool", "tool_call_id": call.id, "content": text} for call, text in zip(calls, ("two", "four"))]
    from extras.serve.requests import ChatCompletion, conversation_ids
    chat = served.server.chat_of(json.dumps([ADD]))
    ids = [conversation_ids(chat, ChatCompletion.model_validate({"messages": [*HELLO, message, *order]}).messages)
           for order in (results, results[::-1])]
    assert ids[0] == ids[1]


def test_openais_own_stream_says_when_each_call_is_whole_though_the_second_choice_ends_first(served, client):
    served.script[:] = [call_turn(served, {"a": 1, "b": 1}, text="a long text before the call"), call_turn(served, {"a": 2, "b": 2})]
    options = {"model": "base", "messages": HELLO, "tools": [ADD], "max_tokens": 200, "n": 2}
    with client.chat.completions.stream(**options) as events:
        done = [event.arguments for event in events if event.type == "tool_calls.function.arguments.done"]
    assert [json.loads(arguments) for arguments in done] == [{"a": 2, "b": 2}, {"a": 1, "b": 1}]


@pytest.mark.parametrize("text, thought, answer", [
    ("<think>\nHalf of it.\n</think>\n\nx is [3] then.", "Half of it.", "x is [3] then."), ("<think>\nHalf of", "Half of", ""),
    ("<b> is no thought", None, "<b> is no thought"), ("x < 3", None, "x < 3"), ("go to=3 now", None, "go to=3 now"), ("<", None, "<"),
    ("我想去看看，然后回来。", None, "我想去看看，然后回来。")])
@pytest.mark.parametrize("tools", [[], [ADD]])
@pytest.mark.parametrize("called", [False, True])
def test_a_thought_is_a_field_of_its_own_and_the_stream_says_the_same(served, client, text, thought, answer, tools, called):
    chat = served.server.chat_of(json.dumps(tools))
    call = served.server.chat_of(json.dumps([ADD])).turn("", [{"name": "add", "arguments": {"a": 1, "b": 2}}])
    turn = chat.encode(text) + (call if called else [next(iter(chat.stop_ids))])
    served.script[:] = [turn, turn]
    asked = {"model": "base", "messages": HELLO, "max_tokens": 300, "tools": tools}
    message = client.chat.completions.create(**asked).choices[0].message
    deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**asked, stream=True)]
    thoughts = [delta.reasoning_content for delta in deltas if getattr(delta, "reasoning_content", None)]
    assert "".join(delta.content or "" for delta in deltas) == (message.content or "")
    assert "".join(thoughts) == getattr(message, "reasoning_content", "")
    assert bool(message.tool_calls) == (called and bool(tools))
    if not called or tools:
        assert (message.content or "") == answer and getattr(message, "reasoning_content", None) == thought
    # A word is shown when the next one begins, also where a call may follow.
    assert len(thoughts) > 1 or not answer or not thought  # a short turn may have ended before its first token is read
    assert sum(bool(delta.content) for delta in deltas) > 1 or len(answer) < 2 or answer[0] == "<"


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think", "glm4moe", "gptoss", "gemma4_v5", "nemotron_3_nano", "muse_glimmer"])
def test_thoughts_of_all_families_are_told_from_answers(name):
    chat = Chat(real(name), TOOLS)
    turn = chat.turn("Yes.", [], reasoning_content="Half.", thinking="Half.")
    message, _ = served_by.assistant_message(SimpleNamespace(text=chat.text(turn), reason="stop"), chat, ChatCompletion(messages=[]))
    assert message == {"content": "Yes.", "reasoning_content": "Half."}


def test_no_part_of_a_call_is_streamed_as_a_thought():
    chat = Chat(real("gptoss"), TOOLS)
    text = chat.text(chat.turn("", CALLS, thinking="Half."))
    body = ChatCompletion(messages=[], tools=TOOLS)
    seen = {served_by.assistant_message(SimpleNamespace(text=text[:end], reason=None), chat, body)[0].get("reasoning_content") for end in range(len(text))}
    assert seen == {None, "Half."}
    message, _ = served_by.assistant_message(SimpleNamespace(text=text, reason="stop"), chat, body)
    assert message["reasoning_content"] == "Half." and message["content"] is None and len(message["tool_calls"]) == 1


MENTIONS = [{"name": "look", "arguments": {"x": "a <b> [c] é我 </think>"}}]
# What the model says, its calls and its thought, as the template writes them; then texts as the model might write them.
SAID = [("Yes, 3 < 4 and [a] {b}. 我想", [], ""), ("It is 3.", [], "Half <b> of [it].\n\nAnd é."), ("I look.\n", MENTIONS, ""), ("", MENTIONS, ""), ("", MENTIONS, "Half."), ("Hm. ", MENTIONS * 2, "A 我 <\n")]
WRITTEN = ["The tag </think> ends it. <think> begins.", "  \n \n Hi  \n\n", '\n\nOk <tool_call>{"name":"look","arguments":{"x":"1"}}</tool_call> mid <tool_call>{bad</tool_call> more ',
           ' {"name":"look","arguments":{"x":"1"}}', "</think>\n\nHi", "<think>\nab [/x] <\n</think>\n\nHi <think> there </think>.", "<|channel|>final<|message|>Hi", "<think>a b", "Well <think>a</think> Hi",
           "go to=3 to=user<|message|> x", '  I say <tool_call>\n{"name":"look","arguments":{"x":"1"}}\n</tool_call>']


def streamed(chat, turn, opening, stops, rng):
    """Return the message that a stream's chunks add up to, where a few tokens come at a time, and the message of an answer in one piece."""
    body = ChatCompletion(messages=[], stream=True)
    rows = [Choice([5], chat=chat, weights=None, sampling=None, stop_ids=chat.end_ids, stops=stops, streams=True, opening=opening) for _ in range(2)]

    def say(row, end):
        row.turn, row.logprobs, row.state = turn[:end], [0.0] * end, "ended" if end == len(turn) else "decode"
        row.show()

    async def play(choices):
        end = 0
        while end < len(turn):
            end = min(end + rng.choice([1, 1, 2, 9]), len(turn))
            say(rows[0], end)
            yield rows[0]

    async def events():
        server = SimpleNamespace(player=SimpleNamespace(play=play), logprobs=lambda *_: None)
        return [json.loads(event[6:])["choices"][0] async for event in Server.events(server, body, rows[:1], chat) if "DONE" not in event]

    say(rows[1], len(turn))
    message, reason = served_by.assistant_message(rows[1], chat, body)
    choices = asyncio.run(events())
    answering = dropwhile(lambda choice: not choice["delta"]["content"], choices)
    assert not any(choice["delta"].get("reasoning_content") for choice in islice(answering, 1, None)), "a thought after the answer has begun"
    joined = {name: "".join(choice["delta"].get(name) or "" for choice in choices) for name in ("content", "reasoning_content")}
    whole = {name: message.get(name) or "" for name in joined}
    for seen, calls in ((joined, [call for choice in choices for call in choice["delta"].get("tool_calls", [])]), (whole, message.get("tool_calls", []))):
        seen["calls"] = [call["function"] for call in calls]
    return {**joined, "reason": choices[-1]["finish_reason"]}, {**whole, "reason": reason}


@pytest.mark.parametrize("name", sorted(file.stem for file in ROOT.glob(".real/templates/*.jinja") if not file.stem.endswith("_training")))
def test_the_chunks_of_a_stream_add_up_to_the_answer_in_one_piece(name):
    """However it is cut, and without a character that comes twice or is taken back."""
    rng = random.Random(name)
    for tools in ([], TOOLS):
        try:
            chat = Chat(real(name), tools)
        except ValueError as error:
            pytest.skip(str(error))
        turns = [chat.encode(text) for text in WRITTEN]
        for text, calls, thought in SAID:
            with suppress(ValueError):  # it shows one call a turn
                turns.append(chat.turn(text, calls, reasoning_content=thought, thinking=thought))
        required = ChatCompletion(messages=[], tool_choice="required") if tools else ChatCompletion(messages=[])
        for turn in turns:
            turn = turn[:-1] if turn[-1] in chat.stop_ids else turn
            for ended in ([*turn, chat.call_stop_id], turn, turn[:rng.randrange(1, len(turn) + 1)]):
                stops = rng.choice([[], ["it", "\n\n\n"]])
                opening = call_opening(chat, rng.choice([required, ChatCompletion(messages=[])]))
                joined, whole = streamed(chat, ended, opening, stops, rng)
                assert joined == whole, (chat.text(ended), stops)


def test_an_answer_and_a_call_may_name_the_tags_of_thoughts():
    """The words before a </think> were told as a thought, those of a call too."""
    for tools, text, content in (([], "It writes </think> then.", "It writes </think> then."), (TOOLS, json.dumps(MENTIONS[0]), "")):
        chat = Chat(real("qwen2_5"), tools)
        for reason in ("stop", None):
            message, _ = served_by.assistant_message(SimpleNamespace(text=text, reason=reason), chat, ChatCompletion(messages=[]))
            assert "reasoning_content" not in message and (message["content"] or "") == content


@pytest.mark.parametrize("text", ["\n" * 10000 + "a", "=" * 30000 + " b", "[[" * 8000 + " b", "<" * 8000 + " x"])
def test_what_is_not_streamed_yet_is_found_in_linear_time(text):
    """8,000 empty lines took 3 s each time that they were read, and all clients waited."""
    began = time.process_time()
    for pattern in (served_by.ENDING, served_by.CALLING, served_by.BEGINNING):
        pattern.sub("", text)
    assert time.process_time() - began < 0.3


def test_an_answer_without_spaces_is_streamed():
    chat = Chat(real("qwen2_5"), [])
    for text in ('{"a":[1,2],"b":"c"}', "[" + "1," * 30 + "2]", "aGVsbG8="):
        message, _ = served_by.assistant_message(SimpleNamespace(text=text, reason=None), chat, ChatCompletion(messages=[]))
        assert message == {"content": text}


def test_a_long_turn_is_streamed_in_linear_time(tiny_model):
    """To read all of it for each token would hold up everybody."""
    reads = []
    chat = SimpleNamespace(text=lambda ids: reads.append(len(ids)) or "x" * len(ids))
    choice = Choice([5], chat=chat, weights=None, sampling=None, stop_ids=[], streams=True)
    for _ in range(4000):
        choice.turn.append(5)
        choice.show()
        assert len(choice.turn) - len(choice.text) < 1 + len(choice.turn) / 256
    assert reads[:256] == list(range(1, 257)) and len(reads) < 1200 and sum(reads) < 300 * 4000


ADDS = {"type": "function", "function": {"name": "add"}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice, opening", [("required", '<tool_call>\n{"name":'), (ADDS, '<tool_call>\n{"name": "add", "arguments":')])
def test_a_call_that_is_required_has_its_beginning_in_the_prompt(served, client, stream, choice, opening):
    chat = served.server.chat_of(json.dumps([ADD]))
    text = chat.text(call_turn(served, {"a": 1, "b": 2}))
    assert text.startswith(opening)
    served.script[:] = [[*chat.encode(text.removeprefix(opening)), chat.call_stop_id]]
    asked = {"model": "base", "messages": HELLO, "max_tokens": 200, "tools": [ADD], "tool_choice": choice}
    if stream:
        with client.chat.completions.stream(**asked) as events:
            reply = events.get_final_completion()
    else:
        reply = client.chat.completions.create(**asked)
    [call] = reply.choices[0].message.tool_calls
    assert call.function.name == "add" and json.loads(call.function.arguments) == {"a": 1, "b": 2}
    assert not reply.choices[0].message.content


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think", "llama3_1", "glm4moe", "gptoss", "gemma4", "lfm2_v2", "nemotron_3_nano", "smollm2"])
def test_the_beginning_of_a_call_is_that_of_the_templates_turn(name):
    chat = Chat(real(name), TOOLS)
    turn = chat.turn("", CALLS)
    for choice in ("required", {"type": "function", "function": {"name": "look"}}):
        opening = chat.encode(call_opening(chat, ChatCompletion(messages=[], tool_choice=choice)))
        assert turn[:len(opening)] == opening and len(opening) > 1 - (name in ("lfm2_v2", "gemma4"))


def test_without_tools_or_with_tool_choice_none_a_call_is_text(served, client):
    for more in ({}, {"tools": [ADD], "tool_choice": "none"}):
        served.script[:] = [call_turn(served, {"a": 2, "b": 3})]
        reply = client.chat.completions.create(model="base", messages=HELLO, max_tokens=200, **more)
        assert not reply.choices[0].message.tool_calls and "add" in reply.choices[0].message.content


def test_a_conversation_that_comes_back_runs_only_its_new_message(served, client):
    forwarded = []
    engine = served.server.player.engine
    run = engine.run
    # Its stop token has not run: the cache lacks the last id of a turn.
    served.script[:] = [served.server.plain.turn("a word", [])]
    first = client.chat.completions.create(model="base", messages=[{"role": "user", "content": "word " * 40}], max_tokens=8, seed=1)
    messages = [{"role": "user", "content": "word " * 40}, first.choices[0].message, {"role": "user", "content": "more"}]
    engine.run = lambda rows: (forwarded.append(max(len(row.pending) for row in rows)), run(rows))[1]
    try:
        again = client.chat.completions.create(model="base", messages=messages, max_tokens=8, seed=2, logprobs=True)
    finally:
        engine.run = run
    assert forwarded[0] < again.usage.prompt_tokens / 2
    # What it samples is what a fresh engine samples.
    served.server.player.engine.owner[:] = [None] * len(engine.owner)
    fresh = client.chat.completions.create(model="base", messages=messages, max_tokens=8, seed=2, logprobs=True)
    assert [t.logprob for t in fresh.choices[0].logprobs.content] == pytest.approx(
        [t.logprob for t in again.choices[0].logprobs.content], abs=1e-4)


@pytest.mark.parametrize("name", ["thinking", "opens", "real:qwen3", "real:qwen3_5_think", "real:nemotron_3_nano", "real:glm4moe"])
@pytest.mark.parametrize("calls", [[], CALLS])
def test_a_turn_that_comes_back_with_its_thought_has_the_ids_that_were_sampled(name, calls):
    chat = Chat(real(name[5:]) if name.startswith("real:") else small(name), TOOLS)
    turn = chat.turn("Yes.", calls, reasoning_content="Half.")
    if name in ("thinking", "opens"):  # their thoughts are empty
        turn = chat.turn("Yes.", calls)
    body = ChatCompletion(messages=[], tools=TOOLS)
    shown, _ = served_by.assistant_message(SimpleNamespace(text=chat.text(turn), reason="stop"), chat, body)
    after = [{"role": "tool", "tool_call_id": call["id"], "content": "r"} for call in shown.get("tool_calls", [])]
    messages = [*HELLO, {"role": "assistant", **shown}, *(after or [{"role": "user", "content": "r"}])]
    expected = chat.results(calls, ["r"], turn[-1]) if calls else chat.reply("r", turn[-1])
    assert conversation_ids(chat, ChatCompletion(messages=messages).messages) == chat.prompt(HELLO) + turn + expected
    for field in ("reasoning_content", "reasoning") if name not in ("thinking", "opens") else ():  # as vLLM's clients send it
        messages[1] |= {"content": "Yes.", "reasoning_content": None, "reasoning": None} | {field: "Half."}
        assert conversation_ids(chat, ChatCompletion(messages=messages).messages) == chat.prompt(HELLO) + turn + expected


def test_a_thought_that_the_template_hides_is_left_out():
    chat = Chat(real("llama3_1"), TOOLS)
    shown = {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "look", "arguments": '{"query": "x"}'}}]}
    result = {"role": "tool", "tool_call_id": "a", "content": "r"}

    def ids(content):
        return conversation_ids(chat, ChatCompletion(messages=[*HELLO, {**shown, "content": content}, result]).messages)
    assert ids("<think>\nHalf.\n</think>\n\n") == ids("")


@pytest.mark.parametrize("family", ["llama", "lfm2", "mamba2"])
def test_a_conversation_that_was_changed_is_sampled_as_a_new_one(family):
    """Of a state, as LFM2 and Mamba have it, nothing can be taken away: then all is read again."""
    model = decoders.make(family)

    def logprobs(engine, prompt):
        row = Choice(prompt, chat=None, weights=None, sampling=(1.0, 0, 1.0), stop_ids=(), seed=3, limit=6)
        engine.enter(row)
        while row.state != "ended":
            engine.step()
        return row.logprobs
    ids = list(range(5, 35))
    with merged(model):
        engine = SharedEngine(model, slots=1)
        logprobs(engine, ids)
        changed = ids[:25] + [50, 51, 52]
        assert logprobs(engine, changed) == pytest.approx(logprobs(SharedEngine(model, slots=1), changed), abs=1e-4)


# ---------------------------------------------------------------------------------------------------------- errors
def called(*ids):
    return {"role": "assistant", "tool_calls": [{"id": i, "function": {"name": "add", "arguments": "{}"}} for i in ids]}


def told(*ids):
    return [{"role": "tool", "tool_call_id": i, "content": str(n)} for n, i in enumerate(ids)]


CHAT = {"model": "base", "messages": HELLO, "max_tokens": 4}
# A request as uvicorn gives it to the application.
SCOPE = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "query_string": b"",
         "headers": [(b"content-type", b"application/json"), (b"host", b"localhost")], "asgi": {"spec_version": "2.3"}}


@pytest.mark.parametrize("change, says", [
    ({"n": 10_000}, "n: "), ({"n": 0}, "n: "), ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": 10**6}, "context"),
    ({"messages": [{"role": "user", "content": "word " * 3000}]}, "context"), ({"messages": []}, "messages"),
    ({"messages": [{"role": "assistant", "content": "x"}]}, "messages"), ({"messages": "hello"}, "messages"),
    ({"messages": [*HELLO, {"role": "assistant", "content": "x"}]}, "messages"), ({"messages": [{"role": "robot"}]}, "messages"),
    ({"messages": [*HELLO, {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "add", "arguments": "{"}}]}]}, "arguments"),
    ({"messages": [*HELLO, {"role": "assistant", "content": "x"}, {"role": "tool", "tool_call_id": "1", "content": "5"}]}, "tool_call_id"),
    ({"messages": [*HELLO, called("1"), *told("1", "1")]}, "one result"), ({"messages": [*HELLO, called("1", "1"), *told("1", "1")]}, "one result"),
    ({"messages": [*HELLO, called("1", "2"), *told("1")]}, "one result"), ({"messages": [*HELLO, called("1"), *told("1", "2")]}, "one result"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "content"),
    ({"temperature": -1}, "temperature.*greater than or equal to 0.001"), ({"temperature": float("nan")}, "temperature"), ({"temperature": 1e-9}, "temperature"),
    ({"temperature": "hot"}, "temperature"), ({"top_p": 0}, "top_p"), ({"top_k": 1.5}, "top_k"), ({"stop": ["a"] * 33}, "stop"),
    ({"stop": ""}, "stop"), ({"seed": "x"}, "seed"), ({"stream": "yes"}, "stream"),
    ({"frequency_penalty": 0.5}, "frequency_penalty"), ({"logit_bias": {"5": 100}}, "not permitted"), ({"top_logprobs": 3}, "not permitted"), ({"bogus": 1}, "not permitted"),
    ({"response_format": {"type": "json_object"}}, "not permitted"), ({"tool_choice": "required"}, "tool_choice"), ({"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice"),
    ({"tools": [{"type": "function"}]}, "tools"), ({"tools": [{"type": "function", "function": {"name": "<|im_end|>"}}]}, "tools")])
def test_what_cannot_be_answered_is_refused(served, change, says):
    body = {**CHAT, **change}
    with pytest.raises(openai.BadRequestError, match=says) as caught:
        served.client.post("/chat/completions", content=json.dumps(body).encode(), cast_to=object,
                           options={"headers": {"Content-Type": "application/json"}})
    assert caught.value.body["type"] == "invalid_request_error"


@pytest.mark.parametrize("change", [{"temperature": 0}, {"top_p": 1e-50}, {"temperature": 1e-3, "top_k": 10**30}, {"top_p": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0}, {"seed": None},
                                    {"stop": None, "logit_bias": None, "min_p": 0, "repetition_penalty": 1.0}, {"max_completion_tokens": 4, "max_tokens": None},
                                    {"response_format": {"type": "text"}, "parallel_tool_calls": True, "top_logprobs": 0, "logit_bias": {}, "store": False},
                                    {"stop": ["\n"] * 8, "store": True}, {"user": "me", "metadata": {"run": "1"}, "service_tier": "auto", "modalities": ["text"]}])
def test_parameters_that_ask_for_nothing_are_taken(served, change):
    assert served.post("/chat/completions", {**CHAT, **change})["usage"]["completion_tokens"] <= 4


def test_other_refusals_have_openai_statuses(served, client, monkeypatch):
    with pytest.raises(openai.NotFoundError, match="gpt-7") as caught:
        client.chat.completions.create(model="gpt-7", messages=HELLO)
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="base", messages=HELLO, max_tokens=10**6)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError, match="Not Found") as caught:
        client.embeddings.create(model="base", input="x")
    assert caught.value.body["type"] == "invalid_request_error"
    with pytest.raises(openai.APIStatusError) as caught:
        served.client.get("/chat/completions", cast_to=object)
    assert caught.value.status_code == 405 and caught.value.body["message"] == "Method Not Allowed"
    for content in (b"{", b"[]", b"3", b"[" * 100_000, b'{"messages":' + b"[" * 900 + b"]" * 900 + b"}", b"\xff"):
        with pytest.raises(openai.BadRequestError):
            client.post("/chat/completions", content=content, cast_to=object, options={"headers": {"Content-Type": "application/json"}})
    deep = json.loads("[" * 900 + "]" * 900)
    with pytest.raises(openai.BadRequestError):
        served.post("/chat/completions", {**CHAT, "tools": [{"type": "function", "function": {"name": "x", "parameters": deep}}]})
    with pytest.raises(openai.APIStatusError) as caught:
        served.post("/completions", {"prompt": "x" * 100_000_000})
    assert caught.value.status_code == 413
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    connection, answer = raw(served, head + b"%x\r\n" % (2**22 + 1) + b"x" * (2**22 + 1) + b"\r\n0\r\n\r\n")
    assert b" 413 " in answer.splitlines()[0] and b"invalid_request_error" in answer + connection.recv(4000)
    connection.close()
    with pytest.raises(openai.BadRequestError, match="context"):
        served.post("/completions", {"prompt": [5] * 1_000_000})
    for prompt in ([], [-1], [10**9], [served.server.vocabulary], [True], [5, "x"], None, "", "\ud800"):
        with pytest.raises(openai.BadRequestError, match="prompt"):
            client.post("/completions", content=json.dumps({"prompt": prompt}).encode(), cast_to=object,
                        options={"headers": {"Content-Type": "application/json"}})
    monkeypatch.setattr(player, "SECONDS", 0.001)
    with pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(**LONG)
    assert caught.value.status_code == 408
    monkeypatch.setattr(served_by, "REQUESTS", 0)
    with pytest.raises(openai.RateLimitError):
        client.models.list()
    # A sampler that waits for its turn asks this.
    assert client.get(f"{served.url}/health", cast_to=object)


@pytest.mark.parametrize("body", [b'{"prompt": [%s""]}' % (b'"",' * 10**6), b'{"messages": [%s0]}' % (b"0," * 10**6), b'{"messages": [], "tools": [%s0]}' % (b"0," * 10**6),
                                  b'{"messages": [{"role": "user", "content": [%s0]}]}' % (b"{}," * 10**6), b'{"messages": [], "stream_options": {%s}}' % b", ".join(b'"%d": 1' % i for i in range(300_000)),
                                  b"{%s}" % b", ".join(b'"%d": 1' % i for i in range(300_000))], ids=lambda body: body[:40].decode())
def test_of_a_million_wrong_items_the_first_is_told(served, client, body):
    """All of them took half a minute, in which nobody was answered, and 4 GB."""
    began = time.process_time()
    with pytest.raises(openai.BadRequestError):
        client.post("/completions" if b"prompt" in body else "/chat/completions", content=body, cast_to=object, options={"headers": {"Content-Type": "application/json"}})
    assert time.process_time() - began < 3


def test_the_request_beyond_the_limit_is_refused_and_a_body_that_does_not_come_is_none(served, client, monkeypatch):
    monkeypatch.setattr(served_by, "REQUESTS", 4)
    stalled = [raw(served, request_bytes(CHAT, length=5000), read=False)[0] for _ in range(8)]
    streams = [client.chat.completions.create(**LONG, stream=True) for _ in range(4)]
    with pytest.raises(openai.RateLimitError) as caught:
        client.chat.completions.create(**CHAT)
    assert caught.value.code == "rate_limit_exceeded"
    for stream in (*stalled, *streams):
        stream.close()
    served.wait_until_free()
    assert client.chat.completions.create(**CHAT)


def test_models_and_health(served, client):
    [model] = client.models.list().data
    assert model.id == "base" and model.max_model_len == 1024 and model.root == "tiny"
    for path in ("healthz", "health"):  # the second is what a sampler asks while it waits
        assert served.client.get(f"{served.url}/{path}", cast_to=object) == {"status": "ok"}
        head = urllib.request.Request(f"{served.url}/{path}", method="HEAD")  # what load balancers ask
        assert urllib.request.urlopen(head).status == 200
    assert client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=1).usage.completion_tokens == 1


def test_one_model_is_described_as_in_the_list(client):
    assert client.models.retrieve("base") == client.models.list().data[0]
    for name in ("nobody", "of/another"):
        with pytest.raises(openai.NotFoundError, match=name) as caught:
            client.get(f"/models/{name}", cast_to=object)
        assert caught.value.code == "model_not_found"


def test_a_list_of_prompts_has_the_answers_of_each(client):
    """LangChain sends such texts, and lm-evaluation-harness lists of ids."""
    asked = {"model": "base", "max_tokens": 4, "n": 2, "seed": 3}
    for prompts in (["a b"], ["a b", "c"], [[5, 6]], [[5, 6], [7], [5, 6]]):
        alone = [client.completions.create(prompt=prompt, **asked) for prompt in prompts]
        together = client.completions.create(prompt=prompts, **asked)
        assert [choice.text for choice in together.choices] == [choice.text for reply in alone for choice in reply.choices]
        assert [choice.index for choice in together.choices] == list(range(2 * len(prompts)))
        assert together.usage.total_tokens == sum(reply.usage.total_tokens for reply in alone)


def test_max_completion_tokens_counts_where_both_are_given(client):
    reply = client.chat.completions.create(model="base", messages=HELLO, max_tokens=9, max_completion_tokens=5, seed=1)
    assert reply.usage.completion_tokens == 5
    with pytest.raises(openai.BadRequestError, match="max_completion_tokens"):
        client.chat.completions.create(model="base", messages=HELLO, max_completion_tokens=0)


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain"])
def test_a_body_that_is_not_called_json_is_refused_with_what_is_missing(client, kind):
    """curl sends the first one. Taken, any web page could ask a server on its reader's machine, because browsers send such a body unasked."""
    with pytest.raises(openai.BadRequestError, match="header Content-Type: application/json"):
        client.post("/chat/completions", content=json.dumps(CHAT).encode(), cast_to=object, options={"headers": {"Content-Type": kind}})


@pytest.mark.parametrize("host, status", [("evil.example", 403), ("evil_2.example:PORT", 403), ("127.0.0.1.evil.example", 403), ("localhost:PORT", 200), ("LOCALHOST", 200), ("127.0.0.1", 200), ("[::1]:PORT", 200)])
def test_a_web_page_whose_name_leads_here_is_not_answered(served, host, status):
    """DNS rebinding: for the browser page and server are the same site then, so the page may send JSON and read the answer."""
    headers = {"Host": host.replace("PORT", str(served.port)), "Content-Type": "application/json"}
    for path, body in (("/v1/models", None), ("/v1/chat/completions", json.dumps(CHAT).encode())):
        try:
            answer = urllib.request.urlopen(urllib.request.Request(served.url + path, body, headers))
        except urllib.error.HTTPError as error:
            answer = error
        assert answer.status == status and (b"--token" in answer.read()) == (status == 403)


@pytest.mark.parametrize("path, body", [("/chat/completions", {"messages": [{"role": "user", "content": "hello world " * 100_000}]}),
                                        ("/completions", {"prompt": "hello world " * 100_000})])
def test_while_a_long_text_is_read_others_are_answered(served, client, path, body):
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(served.post, path, body)
        answered = 0
        while not long.done():
            client.get(f"{served.url}/healthz", cast_to=object)
            answered += not long.done()
        assert isinstance(long.exception(), openai.BadRequestError) and answered > 10


def test_a_token_is_asked_of_everybody_but_health(tiny_model):
    served = Served(*tiny_model, token="secret")
    assert served.client.models.list().data
    for key in ("secre", "secret2", "geheim"):
        stranger = openai.OpenAI(base_url=served.url, api_key=key, max_retries=0)
        with pytest.raises(openai.AuthenticationError) as caught:
            stranger.get("/v1/models", cast_to=object)
        assert caught.value.code == "invalid_api_key"
        for path in ("chat/completions", "completions", "load_lora_adapter", "unload_lora_adapter", "../solve"):
            # Without the token not even what is wrong with the body is said.
            with pytest.raises(openai.AuthenticationError):
                stranger.post(f"/v1/{path}", body={"n": 0}, cast_to=object)
        for path in ("/v1/nothing", "/openapi.json", "/docs"):
            with pytest.raises(openai.NotFoundError):
                stranger.get(path, cast_to=object)
    assert openai.OpenAI(base_url=served.url, api_key="none").get("/healthz", cast_to=object) == {"status": "ok"}
    assert served.client.models.list(extra_headers={"Host": "lab.example"}).data
    served.http.should_exit = True


def test_who_can_be_reached_needs_a_token_before_the_model_is_loaded():
    config = SimpleNamespace(host="0.0.0.0", token=None)
    with pytest.raises(UserError, match="--token"):
        served_by.serve(config, pytest.fail, Limits())


# --------------------------------------------------------------------------------------------------------- clients
def test_64_clients_at_once_each_get_their_own_answer(client):
    def ask(i):
        reply = client.chat.completions.create(model="base", messages=HELLO, max_tokens=16, seed=i, temperature=[0, 0.5, 1][i % 3])
        return reply.choices[0].message.content
    with ThreadPoolExecutor(64) as pool:
        together = list(pool.map(ask, range(64)))
    assert len(set(together)) > 30
    assert together[:6] == [ask(i) for i in range(6)]


def raw(served, text, read=True):
    """Send bytes over a socket and perhaps return what comes first."""
    connection = socket.create_connection(("127.0.0.1", served.port), timeout=20)
    connection.sendall(text)
    return connection, connection.recv(4000) if read else b""


def request_bytes(body, length=None):
    content = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {length or len(content)}\r\n\r\n"
    return head.encode() + content


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_rows_at_once(served, stream):
    connection, _ = raw(served, request_bytes({**LONG, "n": 64, "stream": stream}), read=stream)
    while not served.playing():
        time.sleep(0.01)
    connection.close()
    began = time.monotonic()
    served.wait_until_free()
    assert time.monotonic() - began < 2


def test_a_client_that_does_not_read_holds_no_slot(served, client):
    connection, first = raw(served, request_bytes({**LONG, "n": 32, "stream": True}))
    assert first.startswith(b"HTTP/1.1 200")
    end = time.monotonic() + 60
    while served.playing():
        assert time.monotonic() < end
        time.sleep(0.05)
    assert client.chat.completions.create(model="base", messages=HELLO, max_tokens=1)
    connection.close()


def test_a_client_that_does_not_read_has_its_place_until_the_time_is_over(served, monkeypatch):
    """Otherwise as many of them as there are places shut everybody out. Its rows leave the engine then."""
    monkeypatch.setattr(served_by, "SECONDS", 0.5)
    messages = [{"type": "http.request", "body": json.dumps({**LONG, "stream": True}).encode()}]
    taken = []

    async def receive():
        return messages.pop() if messages else await asyncio.Event().wait()

    async def send(message):
        taken.append((served.server.requests, served.playing()))
        if len(taken) == 3:
            await asyncio.Event().wait()

    async def ask():
        async with asyncio.timeout(5):
            await served.app(dict(SCOPE), receive, send)
            while served.playing():
                await asyncio.sleep(0.01)
    served.script[:] = [[9] * 900]
    began = time.monotonic()
    asyncio.run(ask())
    assert time.monotonic() - began < 1
    assert taken[-1] == (1, 1)


def test_a_client_that_reads_is_told_that_the_time_is_over(served, client, monkeypatch):
    monkeypatch.setattr(player, "SECONDS", 0.001)
    monkeypatch.setattr(served_by, "SECONDS", 60)
    with pytest.raises(openai.APIError, match="not answered within"):
        list(client.chat.completions.create(**LONG, stream=True))


def choice_of(weights=None, news=None, prompt=(5, 6)):
    row = Choice(prompt, chat=None, weights=weights, sampling=(1.0, 0, 1.0), stop_ids=(), limit=2)
    row.news = news
    return row


def test_a_row_that_has_ended_keeps_its_slot_until_another_row_needs_it(tiny_model):
    engine = SharedEngine(tiny_model[0], slots=2)
    first, second, third = (choice_of(prompt=prompt) for prompt in ([5, 6, 7], [8] * 9, [10]))

    def play(*rows):
        for row in rows:
            engine.enter(row)
        assert engine.busy  # also where it has to take a slot from an ended row
        while engine.busy:
            engine.step()
    play(first, second)
    assert engine.owner == [first, second]
    play(third)
    assert engine.owner == [third, second] and len(third.turn) == 2
    # A question that is asked again runs only its last id.
    again = choice_of(prompt=[8] * 9)
    engine.enter(again)
    assert engine.owner == [third, again] and again.pending == [8]


def test_the_cache_has_room_for_the_context_in_as_many_rows_as_fit_and_goes_before_the_next_one(tiny_model, monkeypatch):
    """It grew with the longest conversation, by a copy of 128 rows: 4.5 GB for one client on a CPU, and more than a GPU has."""
    engines = []

    class Seen(SharedEngine):
        def __init__(self, *arguments, **options):
            assert not engines or engines[-1]() is None
            super().__init__(*arguments, **options)
            engines.append(weakref.ref(self))

    def decode():
        assert present.engine.cache.capacity >= 700
        slots.append(present.engine.slots)
        present.engine.enter(choice_of(prompt=[5] * 90))
        present.engine.step()
        if len(slots) == 3:
            raise KeyboardInterrupt
        free[0] /= 4
    model, slots = tiny_model[0], []
    free = [2 * 700 * model.facts.token_bytes * 40]
    monkeypatch.setattr(player, "SharedEngine", Seen)
    monkeypatch.setattr(static_engine, "free_bytes", lambda device: free[0])
    present = player.Player(model, tokens=700)
    present.decode = decode
    with pytest.raises(KeyboardInterrupt):
        present.run()
    assert slots == [32, 8, 2]


def test_whose_adapter_waits_is_played_before_those_who_ask_for_the_present_one_later(tiny_model):
    """Otherwise a few busy clients of one adapter could keep out those of all others."""
    present = player.Player(tiny_model[0], tokens=64)
    engine = present.engine = SharedEngine(tiny_model[0], slots=2)
    first, other, late = choice_of(present.playing), choice_of({}), choice_of(present.playing)
    for row in (first, other, late):
        present.arrive([row])
    assert engine.waiting == [first] and present.coming == [other, late]
    # One that leaves while it waits for its adapter is not played later.
    present.leave([other])
    assert present.coming == [late]


def test_a_failure_ends_the_rows_that_wait_and_spares_those_that_have_ended(tiny_model):
    async def fail():
        present = player.Player(tiny_model[0], tokens=64)
        engine = present.engine = SharedEngine(tiny_model[0], slots=2)
        present.loop = asyncio.get_running_loop()
        ended, running, waiting = rows = [choice_of(news=asyncio.Event()) for _ in range(3)]
        ended.state = "ended"
        engine.owner[:], engine.waiting = [ended, running], [waiting]
        present.fail("not finite")
        async with asyncio.timeout(5):
            await asyncio.gather(*(row.news.wait() for row in rows))
        return [row.error for row in rows]
    assert asyncio.run(fail()) == [None, "not finite", "not finite"]


def test_broken_clients_disturb_nobody(served, client):
    half, _ = raw(served, request_bytes(CHAT, length=5000), read=False)
    for text in (b"hello\r\n\r\n", b"\x16\x03\x01\x02\x00", b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n"):
        assert b" 400 " in raw(served, text)[1].splitlines()[0]
    gone, _ = raw(served, request_bytes(CHAT, length=5000), read=False)
    gone.close()
    assert client.chat.completions.create(model="base", messages=HELLO, max_tokens=1)
    half.close()


def test_a_body_that_does_not_come_is_not_waited_for(served, monkeypatch):
    """Each holds an open file, of which a process has a few hundred."""
    monkeypatch.setattr(served_by, "BODY_SECONDS", 0.3)
    half, answer = raw(served, request_bytes(CHAT, length=5000))
    while b"no whole body within 0.3 s" not in answer:
        answer += half.recv(4000)
    assert b" 408 " in answer.splitlines()[0]
    half.close()


def test_a_client_that_leaves_within_its_body_raises_no_error(served):
    """Uvicorn would print it."""
    async def receive():
        return {"type": "http.disconnect"}

    async def send(message):
        pass
    asyncio.run(served.app(dict(SCOPE), receive, send))


# -------------------------------------------------------------------------------------------------------- adapters
def write_adapter(folder, seed, r=4, targets="all-linear"):
    """Write an adapter of the tiny model whose B is random, and return that model."""
    model, _ = load_model("tiny", train=False)
    add_lora(model, r, 2 * r, targets=targets)
    generator = torch.Generator().manual_seed(seed)
    for name, p in adapter_tensors(model).items():
        if "lora_B" in name:
            p.data.copy_(0.2 * torch.randn(p.shape, generator=generator))
    save_model(model, folder)
    return model


def test_adapters_come_and_go_and_each_plays_its_own_policy(tmp_path):
    served = Served(*load_model("tiny", train=False))
    client = served.client
    prompt = served.server.plain.prompt(HELLO)
    models = {"base": load_model("tiny", train=False)[0], "a1": write_adapter(tmp_path / "a1", 1),
              "a2": write_adapter(tmp_path / "a2", 2, r=8, targets="q_proj,down_proj")}
    # Rows play while the first one is loaded.
    stream = client.chat.completions.create(**LONG, stream=True)
    next(stream)
    served.post("/load_lora_adapter", {"lora_name": "a1", "lora_path": str(tmp_path / "a1")})
    stream.close()
    # The second one, which has fewer targets, while the first one is on the model.
    client.completions.create(model="a1", prompt=prompt, max_tokens=1)
    served.post("/load_lora_adapter", {"lora_name": "a2", "lora_path": str(tmp_path / "a2")})
    assert [model.id for model in client.models.list().data] == ["base", "a1", "a2"]

    def ask(name):
        return client.completions.create(model=name, prompt=prompt, max_tokens=12, seed=4, logprobs=0,
                                         extra_body={"return_token_ids": True, "ignore_eos": True}).choices[0]
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(ask, list(models) * 4))
    logprobs = {}
    for name, model in models.items():
        row = Row(prompt, seed=mix(4, 0), limit=12)
        with merged(model):
            engine = Engine(model, slots=1)
            engine.add([row])
            while engine.busy:
                engine.step()
        logprobs[name] = row.logprobs
        for answer in answers[list(models).index(name)::3]:
            assert answer.token_ids == row.turn
            assert answer.logprobs.token_logprobs == pytest.approx(row.logprobs, abs=1e-4)
    assert abs(logprobs["a1"][0] - logprobs["base"][0]) > 0.01
    with pytest.raises(openai.BadRequestError, match="nowhere"):
        served.post("/load_lora_adapter", {"lora_name": "x", "lora_path": str(tmp_path / "nowhere")})
    with pytest.raises(openai.BadRequestError, match="already"):
        served.post("/load_lora_adapter", {"lora_name": "a1", "lora_path": str(tmp_path / "a1")})
    assert ask("a1").token_ids == answers[1].token_ids
    served.post("/unload_lora_adapter", {"lora_name": "a1"})
    for refused in (lambda: ask("a1"), lambda: served.post("/unload_lora_adapter", {"lora_name": "a1"}),
                    lambda: served.post("/unload_lora_adapter", {"lora_name": "base"})):
        with pytest.raises(openai.NotFoundError):
            refused()
    assert ask("base").token_ids == answers[0].token_ids
    served.http.should_exit = True


def test_an_adapter_that_is_taken_off_leaves_the_model_as_it_was(tmp_path):
    """Also for the modules' own forward, by which other architectures than Llama's decode."""
    ids = torch.tensor([[5, 6, 7]])
    plain, _ = load_model("tiny", train=False)
    model = write_adapter(tmp_path / "a", 1)
    with torch.no_grad():
        before, adapted = plain(ids).logits, model(ids).logits
        present = player.Player(model, tokens=64)
        adapter = present.exchange({})
        assert torch.equal(model(ids).logits, before) and not torch.equal(adapted, before)
        assert present.exchange(adapter) == {} and torch.equal(model(ids).logits, adapted)


def test_of_two_that_load_under_one_name_at_once_one_is_refused(tmp_path):
    served = Served(*load_model("tiny", train=False))
    write_adapter(tmp_path / "a", 1)

    def load(_):
        try:
            return served.post("/load_lora_adapter", {"lora_name": "of/mine", "lora_path": str(tmp_path / "a")})["status"]
        except openai.BadRequestError as error:
            return "already" in str(error) and "refused"
    with ThreadPoolExecutor(4) as pool:
        assert sorted(pool.map(load, range(4))) == ["ok", "refused", "refused", "refused"]
    assert served.client.models.retrieve("of/mine").model_extra["parent"] == "base"
    with pytest.raises(openai.BadRequestError, match="lora_name: tiny is the model that was started"):  # who asks for tiny would be answered by the base
        served.post("/load_lora_adapter", {"lora_name": "tiny", "lora_path": str(tmp_path / "a")})
    served.http.should_exit = True


def test_after_an_adapter_that_did_not_load_in_time_the_engine_goes_on(tmp_path, served, client, monkeypatch):
    monkeypatch.setattr(served_by, "SECONDS", 0.2)
    served.server.player.inbox.put(lambda: time.sleep(0.5))
    with pytest.raises(openai.APIStatusError, match="not answered within"):
        served.post("/load_lora_adapter", {"lora_name": "late", "lora_path": str(tmp_path)})
    monkeypatch.undo()
    assert client.chat.completions.create(**CHAT)


def test_an_adapter_that_does_not_fit_leaves_no_trace(tmp_path):
    """Not even the first one, of whose ranks and targets the others may differ."""
    served = Served(*load_model("tiny", train=False))
    good, bad = tmp_path / "good", tmp_path / "bad"
    write_adapter(good, 1)
    settings = json.loads((good / "adapter_config.json").read_text())

    def load(folder):
        return served.post("/load_lora_adapter", {"lora_name": folder.name, "lora_path": str(folder)})

    def ask(name="base"):
        return served.client.completions.create(model=name, prompt=[5, 6, 7], max_tokens=8, seed=4, extra_body={"ignore_eos": True}).choices[0].text
    before = ask()
    for change in ({"r": 8}, {"r": 4.5}, {"target_modules": []}, {"target_modules": None}, {"target_modules": ["embed_tokens"]}):
        shutil.copytree(good, bad, dirs_exist_ok=True)
        (bad / "adapter_config.json").write_text(json.dumps({**settings, **change}))
        with pytest.raises(openai.BadRequestError):
            load(bad)
        assert ask() == before
    shutil.copytree(good, bad, dirs_exist_ok=True)
    save_file(load_file(bad / "adapter_model.safetensors"), bad / "adapter_model.safetensors", metadata={"base": "nf4"})
    with pytest.raises(openai.BadRequestError, match="trained beside weights in nf4"):
        load(bad)
    load(good)
    assert ask("good") != before == ask() and [model.id for model in served.client.models.list().data] == ["base", "good"]
    served.http.should_exit = True


def test_onto_an_adapter_that_was_started_no_other_is_loaded(tmp_path):
    """It is merged, and the other one would play with both."""
    for name in "ab":
        write_adapter(tmp_path / name, 1)
    served = Served(*load_model(str(tmp_path / "a"), train=False))
    served.server.config.model_path = str(tmp_path / "a")
    with pytest.raises(openai.BadRequestError, match=f"start the server with its base, {tmp_path}/a/base, and load both"):
        served.post("/load_lora_adapter", {"lora_name": "b", "lora_path": str(tmp_path / "b")})
    assert [model.id for model in served.client.models.list()] == ["base"]
    served.http.should_exit = True


def test_an_adapter_is_named_by_its_run_and_refused_beside_another_base(tmp_path):
    """Two bases may have one shape, and the adapter of the other one's run was played beside this one."""
    for seed in (0, 1):
        base, run = tmp_path / f"base{seed}", str(tmp_path / f"run{seed}")
        for part in make_tiny(seed):
            part.save_pretrained(base)
        sft.train(sft.Config(model_path=str(base), output_dir=run, lora_r=2, max_steps=1, max_samples=8, eval_tasks=0,
                             dtype="float32"))
    served = Served(*load_model(str(tmp_path / "base0"), train=False))
    served.post("/load_lora_adapter", {"lora_name": "own", "lora_path": str(tmp_path / "run0")})
    with pytest.raises(openai.BadRequestError, match="base0/model.safetensors: is not the base model that the adapter"):
        served.post("/load_lora_adapter", {"lora_name": "other", "lora_path": str(tmp_path / "run1")})
    assert [model.id for model in served.client.models.list()] == ["base", "own"]
    served.http.should_exit = True


def test_an_adapter_that_is_not_finite_harms_its_own_rows_only(tmp_path):
    served = Served(*load_model("tiny", train=False))
    model = write_adapter(tmp_path / "bad", 1)
    for p in adapter_tensors(model).values():
        p.data.fill_(1e25)
    save_model(model, tmp_path / "bad")
    served.post("/load_lora_adapter", {"lora_name": "bad", "lora_path": str(tmp_path / "bad")})
    with pytest.raises(openai.InternalServerError, match="not finite"):
        served.client.completions.create(model="bad", prompt=[5, 6, 7], max_tokens=8)
    assert served.client.completions.create(model="base", prompt=[5, 6, 7], max_tokens=8).choices[0].text
    served.http.should_exit = True


FAILS = """
import runpy
from extras.serve.player import SharedEngine
def fails(*_):
    raise MemoryError("no memory left")
SharedEngine.run = fails
runpy.run_path("agent.py", run_name="__main__")
"""


def test_when_the_engine_fails_the_server_ends(tmp_path):
    """Whoever watches the process starts it again; clients are not left waiting."""
    (tmp_path / "fails.py").write_text(FAILS)
    program = Program(tmp_path / "fails.py", "--serve", "--port", "0")
    try:
        with pytest.raises(openai.APIConnectionError):
            client_of(program).chat.completions.create(**CHAT)
        _, errors = program.communicate(timeout=20)
        assert program.returncode == 1 and "out of memory: no memory left" in errors and "Traceback" not in errors
    finally:
        program.kill()


def test_a_port_that_is_taken_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        program = Program("agent.py", "--serve", "--port", port)
        _, errors = program.communicate(timeout=60)
    assert program.returncode == 2 and f"agent.py: --port {port}: cannot listen at 127.0.0.1\n" in errors and "Traceback" not in errors


# ----------------------------------------------------------------------------------------------------------- solve
def test_solve_plays_an_episode_with_the_problem(served):
    cls = load("equations")
    chat = served.server.environment[2]
    env = cls()
    env.reset(**cls._from_text("2x+1=7"))
    turns, told = [], []
    while (turn := env._expert()) and not isinstance(turn, str):
        told.append(getattr(env, turn[0]["name"])(**turn[0]["arguments"]))
        turns.append(chat.turn("", turn))
        if env.done:
            break
    served.script[:] = turns
    solution = served.client.post(f"{served.url}/solve", body={"problem": "2x + 1 = 7"}, cast_to=object)
    assert solution["success"] is True and solution["reward"] > 0
    assert solution["tools"] == told
    assert [m["role"] for m in solution["transcript"]].count("assistant") == len(turns)
    with pytest.raises(openai.BadRequestError, match="problem"):
        served.client.post(f"{served.url}/solve", body={"problem": "what is love"}, cast_to=object)


@pytest.mark.parametrize("reward, says", [(float("nan"), "not finite"), ("much", "get_reward")])
def test_solve_says_what_is_wrong_with_a_reward(served, monkeypatch, reward, says):
    name, cls, chat = served.server.environment
    broken = type("Broken", (cls,), {"get_reward": lambda self: reward})
    monkeypatch.setattr(served.server, "environment", (name, broken, chat))
    served.script[:] = [chat.turn("3", [])]
    with pytest.raises(openai.InternalServerError, match=says):
        served.client.post(f"{served.url}/solve", body={"problem": "2x + 1 = 7"}, cast_to=object)


def test_solve_says_neither_success_nor_failure_where_nothing_was_judged(served, monkeypatch):
    """Without a right answer, or where the problem alone is too long."""
    name, cls, chat = served.server.environment

    def solve():
        served.script[:] = [chat.turn("3", [])]
        return served.client.post(f"{served.url}/solve", body={"problem": "2x + 1 = 7"}, cast_to=object)
    assert solve()["success"] is False
    unjudged = type("Unjudged", (cls,), {"_from_text": staticmethod(lambda text: {"equation": text, "answer": None})})
    monkeypatch.setattr(served.server, "environment", (name, unjudged, chat))
    solution = solve()
    assert solution["success"] is None and solution["stop_reason"] == "done"
    monkeypatch.setattr(served.server, "environment", (name, cls, chat))
    monkeypatch.setattr(served.server, "limits", Limits(max_tokens=8))
    solution = solve()
    assert solution["success"] is None and solution["stop_reason"] == "max_tokens" and solution["solution"] == ""


def test_solve_draws_each_turn_anew_and_ends_at_a_token_that_opens_a_message(served, monkeypatch):
    _, _, chat = served.server.environment
    rows, make_row = [], served.server.row
    monkeypatch.setattr(served.server, "row", lambda *arguments, **options: rows.append(make_row(*arguments, **options)) or rows[-1])
    call = chat.turn("", [{"name": "add_terms", "arguments": {"terms": "1"}}])
    served.script[:] = [call, call, [9, *chat.start_ids, 9]]
    solution = served.client.post(f"{served.url}/solve", body={"problem": "2x + 1 = 7", "seed": 3}, cast_to=object)
    assert solution["stop_reason"] == "malformed" and len(rows[2].turn) == 2
    assert [row.seed for row in rows] == [mix(3, turn) for turn in range(3)]
    # The last turn has no more tokens than the episode.
    monkeypatch.setattr(served.server, "limits", Limits(max_tokens=len(rows[0].group) + 5))
    served.script[:] = [[9] * 20]
    assert served.client.post(f"{served.url}/solve", body={"problem": "2x + 1 = 7"}, cast_to=object)["stop_reason"] == "max_tokens"
    assert len(rows[3].turn) == 5


def test_solve_plays_with_the_servers_options_and_time_out(served, monkeypatch):
    name, cls, chat = served.server.environment
    seen = []

    class Opts(cls):
        _from_text = staticmethod(lambda text: {"equation": text, "unsafe_code": None})

        def reset(self, **task):
            seen.append(task)
            return super().reset(**task)
    monkeypatch.setattr(served.server, "environment", (name, Opts, chat))
    monkeypatch.setattr(served.server.config, "unsafe_code", True)
    served.script[:] = [chat.turn("3", [])]
    served.client.post(f"{served.url}/solve", body={"problem": "2x + 1 = 7"}, cast_to=object)
    assert seen == [{"equation": "2x + 1 = 7", "unsafe_code": True}]
    model = served.server.player.model
    assert Server(served.server.config, model, served.server.tokenizer, Limits(tool_timeout=3.0)).watch.timeout == 3.0


def test_solve_keeps_an_environment_that_holds_a_client(served, monkeypatch):
    """An OpenEnv client never gives back its session with the server, which has only so many."""
    name, cls, chat = served.server.environment
    made = []

    class Holds(cls):
        _from_text = staticmethod(lambda text: {"equation": text})

        def __init__(self):
            made.append(self)
            self.client = socket.socket()
    monkeypatch.setattr(served.server, "environment", ("holds", Holds, chat))
    for _ in range(3):
        served.script[:] = [chat.turn("3", [])]
        served.client.post(f"{served.url}/solve", body={"problem": "2x + 1 = 7"}, cast_to=object)
        served.wait_until_free()
        gc.collect()
    assert len(made) == 1
    made[0].client.close()


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_solve_is_refused_when_all_its_turns_together_take_too_long(served, monkeypatch):
    name, cls, chat = served.server.environment
    tools = []

    class Slow(cls):
        def add_terms(self, terms: str) -> str:
            """Add.

            Args:
                terms: a term
            """
            time.sleep(0.7)
            tools.append(terms)
            return "added"
    monkeypatch.setattr(served.server, "environment", (name, Slow, chat))
    monkeypatch.setattr(served_by, "SECONDS", 1)
    served.script[:] = [chat.turn("", [{"name": "add_terms", "arguments": {"terms": "1"}}])] * 6
    with pytest.raises(openai.APIStatusError, match="not answered within 1 s") as caught:
        served.client.post(f"{served.url}/solve", body={"problem": "2x + 1 = 7"}, cast_to=object)
    assert caught.value.status_code == 408
    served.wait_until_free()
    time.sleep(0.8)  # the tool that ran then ends
    assert len(tools) == 2


def test_solve_needs_an_environment(tiny_model):
    served = Served(*tiny_model, env=None)
    with pytest.raises(openai.BadRequestError, match="--env"):
        served.client.post(f"{served.url}/solve", body={"problem": "x=1"}, cast_to=object)
    served.http.should_exit = True


# -------------------------------------------------------------------------------------------------- a run, a process
def test_a_run_samples_here(tmp_path, tiny):
    served = Served(*load_model(tiny, train=False))
    result = grpo.train(grpo.Config(
        model_path=tiny, sampler=served.url, output_dir=str(tmp_path / "run"), max_steps=2, tasks_per_step=2, group_size=4, eval_tasks=0,
        dtype="float32", max_turns=2, learning_rate=1e-3))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    gaps = [row["sampler_gap"] for row in rows if "sampler_gap" in row]
    assert len(gaps) == 2 and max(gaps) < 1e-3, (result, rows)
    served.http.should_exit = True


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_the_server_at_once(signum):
    program = Program("agent.py", "--serve", "--port", "0")
    try:
        client = client_of(program)
        next(client.chat.completions.create(**LONG, stream=True))
        began = time.monotonic()
        program.send_signal(signum)
        _, errors = program.communicate(timeout=20)
        assert program.returncode == 128 + signum and time.monotonic() - began < 3
        assert "stopped by" in errors and "Traceback" not in errors
    finally:
        program.kill()


def client_of(program):
    """Return a client of a program that serves, once it answers."""
    while "http://" not in (text := program.said("stdout")):
        assert program.poll() is None, program.said("stderr")
        time.sleep(0.05)
    url = next(word for word in text.split() if word.startswith("http://")).rstrip(":")
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    while True:
        try:
            client.models.list()
            return client
        except openai.APIConnectionError:
            time.sleep(0.05)


def test_without_fastapi_one_line_says_what_to_install(tmp_path):
    (tmp_path / "fastapi.py").write_text("raise ImportError('No module named fastapi')")
    done = subprocess.run([sys.executable, "agent.py", "--serve"], cwd=ROOT, capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.returncode == 2 and "pip install -U fastapi uvicorn" in done.stderr and "Traceback" not in done.stderr
