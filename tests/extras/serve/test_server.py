"""extras/serve: asked by OpenAI's own client, by broken clients, and by a run of ours."""
import inspect
import json
import os
import random
import re
import shutil
import signal
import socket
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("fastapi")
openai = pytest.importorskip("openai")

import uvicorn  # noqa: E402
from families import CALLS, TEMPLATES, TOOLS, real, small  # noqa: E402
from programs import ROOT, Program, run as run_program  # noqa: E402

import agent  # noqa: E402
import agent_program  # noqa: E402
import grpo  # noqa: E402
from core.chat import Chat  # noqa: E402
from core.config import EnvironmentFault, UserError, mix  # noqa: E402
from core.engine import Engine, Row  # noqa: E402
from core.model import save_model  # noqa: E402
from envs import load  # noqa: E402
from extras.serve import chat as talk, player, server as served_by, settings  # noqa: E402
from extras.serve.server import Server  # noqa: E402
from layers import load_model  # noqa: E402
from lora import adapter_tensors, add_lora, merged  # noqa: E402

HELLO = [{"role": "user", "content": "Solve 2x=6"}]
LONG = {"model": "base", "messages": HELLO, "max_tokens": 900}
CHAT = {"model": "base", "messages": HELLO, "max_tokens": 4}
ADD = {"type": "function", "function": {
    "name": "add", "description": "Add two numbers.", "parameters": {
        "type": "object", "required": ["a", "b"],
        "properties": {"a": {"type": "integer", "description": "one"}, "b": {"type": "integer", "description": "other"}}}}}


class Served:
    """A server of the untaught tiny model in this process. `script` holds turns that rows take in place of sampling."""

    def __init__(self, model, tokenizer, max_tokens=1024, **options):
        config = settings.settle(agent_program.Config(**{"env": "equations", "max_tokens": max_tokens, **options}))
        self.sessions = agent.sessions(talk.envs.limits_of(config))
        self.visit = talk.Visit(config, agent, model, tokenizer, self.sessions.__enter__())
        self.server = Server(config, model, tokenizer, self.visit.begin, agent.make_engine)
        self.script, self.rows = [], []
        add = self.server.player.add

        def scripted(row):
            row.forced = list(self.script.pop(0)) if self.script else row.forced
            self.rows.append(row)
            add(row)
        self.server.player.add = scripted
        self.http = uvicorn.Server(uvicorn.Config(self.server.application(), port=0, log_level="critical", lifespan="off"))
        for run in (self.http.run, self.server.player.run):
            threading.Thread(target=run, daemon=True).start()
        while not self.http.started:
            time.sleep(0.01)
        self.port = self.http.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=config.token or "none", max_retries=0)

    def post(self, path, body):
        """Return the parsed answer to any body, or raise openai.APIStatusError."""
        return self.client.post(path, body=body, cast_to=object)

    def wait_until_free(self, seconds=5):
        end = time.monotonic() + seconds
        while not all(row.done.done() for row in self.rows):
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
def test_a_seed_repeats_an_answer(client):
    replies = [client.chat.completions.create(model="base", messages=HELLO, max_tokens=8, seed=seed) for seed in (1, 1, 2)]
    texts = [reply.choices[0].message.content for reply in replies]
    assert texts[0] == texts[1] != texts[2] and {reply.choices[0].finish_reason for reply in replies} == {"length"}
    usage = replies[0].usage
    assert usage.completion_tokens == 8 and usage.total_tokens == usage.prompt_tokens + 8


def test_what_is_sampled_is_what_our_engine_samples(served, client, tiny_model):
    model, _ = tiny_model
    chat = served.server.chat_of("[]")
    prompt = chat.prompt(HELLO)
    row = Row(prompt, seed=mix(5, len(prompt)), limit=24)
    with merged(model):
        engine = Engine(model, slots=2, stop_ids=chat.end_ids, temperature=0.7)
        engine.add([row])
        while engine.busy:
            engine.step()
    asked = {"temperature": 0.7, "seed": 5, "max_tokens": 24}
    assert client.chat.completions.create(model="base", messages=HELLO, **asked).choices[0].message.content == chat.text(row.turn)
    choice = client.completions.create(model="base", prompt=prompt, logprobs=0, extra_body={"return_token_ids": True}, **asked).choices[0]
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
    chat = served.server.chat_of("[]")
    [stop], [opens] = chat.stop_ids, chat.start_ids

    def ask(turn, **more):
        served.script[:] = [turn]
        reply = client.completions.create(model="base", prompt=[5, 6], max_tokens=4, extra_body={"return_token_ids": True, **more}).choices[0]
        return reply.token_ids, reply.finish_reason
    assert ask([9, stop, 9, 9]) == ([9, stop], "stop")
    assert ask([9, stop, 9, 9], ignore_eos=True) == ([9, stop, 9, 9], "length")
    assert ask([9, 8, 9, 9], stop_token_ids=[7, 8]) == ([9, 8], "stop")
    assert ask([9, stop, 9, 9], stop_token_ids=[7, 8]) == ([9, stop], "stop")
    # Also a token that opens a message does: the template's own messages begin with it.
    served.script[:] = [[9, opens, 9, 9]]
    reply = client.chat.completions.create(model="base", messages=HELLO, max_tokens=4)
    assert reply.usage.completion_tokens == 2 and reply.choices[0].finish_reason == "stop"


def test_prompt_and_turn_fill_the_context(served, client):
    """1,024 tokens here. Where a client names no number of tokens, it gets at most those that are left."""
    served.script[:] = [[9] * 9] * 2
    for more in ({"max_tokens": 4}, {}):
        reply = client.completions.create(model="base", prompt=[5] * 1020, **more)
        assert reply.usage.completion_tokens == 4
    for prompt, more in (([5] * 1020, {"max_tokens": 5}), ([5] * 1024, {})):
        with pytest.raises(openai.BadRequestError, match="context"):
            client.completions.create(model="base", prompt=prompt, **more)


def test_streamed_text_is_the_text(client):
    options = {"model": "base", "messages": HELLO, "max_tokens": 300, "seed": 3}
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    # Clients add up the usage of all chunks.
    assert [chunk.usage for chunk in chunks if chunk.usage] == [whole.usage] == [chunk.usage for chunk in chunks if not chunk.choices]
    assert not any(chunk.usage for chunk in client.chat.completions.create(**options, stream=True))
    assert len({chunk.id for chunk in chunks}) == 1 and chunks[0].id != whole.id and chunks[0].created >= whole.created > 1e9
    chunks = chunks[:-1]
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(pieces) == whole.choices[0].message.content and len(pieces) > 2
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == [whole.choices[0].finish_reason]


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


@pytest.mark.parametrize("text, stops", [("h\u00e9llo \U0001f600 \u65e5\u672c\u8a9e", []), ("yes \U0001f600 \u65e5\u672c", ["\U0001f600 \u65e5"]),
                                         ("a \ufffd b", ["never"])])
def test_characters_of_several_tokens_are_streamed_whole(served, client, text, stops):
    turn = served.server.chat_of("[]").turn(text, [])
    assert len(turn) > len(text)
    served.script[:] = [turn, turn]
    options = {"model": "base", "messages": HELLO, "max_tokens": 100, "stop": stops}
    whole = client.chat.completions.create(**options).choices[0].message.content
    pieces = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**options, stream=True)]
    assert "".join(pieces) == whole == text.partition(stops[0] if stops else "<|im_end|>")[0]


def test_control_tokens_in_text_stay_text(served, client):
    """Otherwise a user's text could open a message of the system."""
    chat = served.server.chat_of("[]")
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


def test_one_call_where_the_template_shows_one(served, client, monkeypatch):
    """Llama's template: with two the conversation could not come back."""
    turn = call_turn(served, {"a": 2, "b": 3}, {"a": 4, "b": 5})
    for one_call in (True, False):
        served.script[:] = [turn]
        monkeypatch.setattr(served.server.chat_of(json.dumps([ADD])), "shows_one_call", one_call)
        reply = client.chat.completions.create(model="base", messages=HELLO, tools=[ADD], max_tokens=300)
        assert len(reply.choices[0].message.tool_calls) == (1 if one_call else 2)


def test_a_tagged_argument_is_text_where_the_functions_schema_says_so(served, client):
    say = {"type": "function", "function": {"name": "say", "parameters": {"type": "object", "properties": {"x": {"type": "string"}}}}}
    chat = served.server.chat_of("[]")
    served.script[:] = [[*chat.encode("<tool_call><function=say><parameter=x>42</parameter></function></tool_call>"), *chat.stop_ids]]
    [call] = client.chat.completions.create(model="base", messages=HELLO, tools=[say], max_tokens=200).choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"x": "42"}


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
        with pytest.raises(openai.BadRequestError, match="tools"):
            served.post("/chat/completions", {**CHAT, "tools": [tool]})


def test_what_openais_package_adds_to_a_function_is_not_in_the_prompt(client):
    def prompt_tokens(**more):
        tool = {"type": "function", "function": {**ADD["function"], **more}}
        return client.chat.completions.create(model="base", messages=HELLO, tools=[tool], max_tokens=1).usage.prompt_tokens
    assert prompt_tokens() == prompt_tokens(strict=True) == prompt_tokens(strict=None)


def test_streamed_calls_come_whole(served, client):
    turn = call_turn(served, {"a": 1, "b": 1}, {"a": 2, "b": 2}, text="both:")
    served.script[:] = [turn]
    deltas = [c.choices[0] for c in client.chat.completions.create(model="base", messages=HELLO, tools=[ADD], max_tokens=200, stream=True)]
    calls = [call for delta in deltas for call in delta.delta.tool_calls or []]
    assert [call.index for call in calls] == [0, 1] and len({call.id for call in calls}) == 2
    assert [json.loads(call.function.arguments) for call in calls] == [{"a": 1, "b": 1}, {"a": 2, "b": 2}]
    assert deltas[-1].finish_reason == "tool_calls"
    assert "".join(delta.delta.content or "" for delta in deltas).strip() == "both:"


def test_openais_own_stream_says_when_a_call_is_whole(served, client):
    served.script[:] = [call_turn(served, {"a": 1, "b": 1}, text="a long text before the call")]
    with client.chat.completions.stream(model="base", messages=HELLO, tools=[ADD], max_tokens=200) as events:
        done = [event.arguments for event in events if event.type == "tool_calls.function.arguments.done"]
    assert [json.loads(arguments) for arguments in done] == [{"a": 1, "b": 1}]


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
    assert len(thoughts) <= 1


def said_of(chat, text, reason="stop"):
    """The message of a turn with this text, and why it ended."""
    return served_by.message_of(SimpleNamespace(chat=chat, read=lambda: (text, reason), body=SimpleNamespace(parallel_tool_calls=True)))


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think", "glm4moe", "gptoss", "gemma4_v5", "nemotron_3_nano", "muse_glimmer"])
def test_thoughts_of_all_families_are_told_from_answers(name):
    chat = Chat(real(name), [])
    turn = chat.turn("Yes.", [], reasoning_content="Half.", thinking="Half.")
    assert said_of(chat, chat.text(turn))[0] == {"role": "assistant", "content": "Yes.", "reasoning_content": "Half."}


def test_no_part_of_a_call_is_streamed_as_an_answer():
    chat = Chat(real("gptoss"), TOOLS)
    text = chat.text(chat.turn("", CALLS, thinking="Half."))
    assert {said_of(chat, text[:end], None)[0]["content"] for end in range(len(text))} == {""}
    message, _ = said_of(chat, text)
    assert message["reasoning_content"] == "Half." and not message["content"] and len(message["tool_calls"]) == 1


MENTIONS = [{"name": "look", "arguments": {"x": "a <b> [c] é我 </think>"}}]
# What the model says, its calls and its thought, as the template writes them; then texts as the model might write them.
SAID = [("Yes, 3 < 4 and [a] {b}. 我想", [], ""), ("It is 3.", [], "Half <b> of [it].\n\nAnd é."), ("I look.\n", MENTIONS, ""), ("", MENTIONS, ""), ("", MENTIONS, "Half."), ("Hm. ", MENTIONS * 2, "A 我 <\n")]
WRITTEN = ["The tag </think> ends it. <think> begins.", "  \n \n Hi  \n\n", '\n\nOk <tool_call>{"name":"look","arguments":{"x":"1"}}</tool_call> mid <tool_call>{bad</tool_call> more ',
           ' {"name":"look","arguments":{"x":"1"}}', "</think>\n\nHi", "<think>\nab [/x] <\n</think>\n\nHi <think> there </think>.", "<|channel|>final<|message|>Hi", "<think>a b", "Well <think>a</think> Hi",
           "go to=3 to=user<|message|> x", '  I say <tool_call>\n{"name":"look","arguments":{"x":"1"}}\n</tool_call>']


def streamed(chat, turn, rng):
    """Return the content that a stream's chunks add up to, where a few tokens come at a time, and that of an answer in one piece."""
    end, sent = 0, ""
    while end < len(turn):
        end = min(end + rng.choice([1, 1, 2, 9]), len(turn))
        row = player.Choice([5], SimpleNamespace(stop=[], stop_token_ids=[], ignore_eos=False, parallel_tool_calls=True, model_dump=lambda **_: {}), chat, None)
        row.turn, row.state = turn[:end], "ended" if end == len(turn) else "decode"
        content = served_by.message_of(row)[0]["content"]
        assert content.startswith(sent), "a character is taken back"
        sent = content
    return sent


@pytest.mark.parametrize("name", sorted(file.stem for file in ROOT.glob(".real/templates/*.jinja") if not file.stem.endswith("_training")))
def test_no_character_of_a_stream_is_taken_back(name):
    """However it is cut. `sent` ends with the whole answer."""
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
        for turn in turns:
            turn = turn[:-1] if turn[-1] in chat.stop_ids else turn
            for ended in ([*turn, chat.call_stop_id], turn, turn[:rng.randrange(1, len(turn) + 1)]):
                streamed(chat, ended, rng)


def test_an_answer_and_a_call_may_name_the_tags_of_thoughts():
    """The words before a </think> were told as a thought, those of a call too."""
    for tools, text, content in (([], "It writes </think> then.", "It writes </think> then."), (TOOLS, json.dumps(MENTIONS[0]), "")):
        chat = Chat(real("qwen2_5"), tools)
        message, _ = said_of(chat, text)
        assert "reasoning_content" not in message and message["content"] == content


@pytest.mark.parametrize("text", ["\n" * 10000 + "a", "=" * 30000 + " b", "[[" * 8000 + " b", "<" * 8000 + " x"])
def test_what_is_not_streamed_yet_is_found_in_linear_time(text):
    """8,000 empty lines took 3 s each time that they were read, and all clients waited."""
    began = time.process_time()
    served_by.CALL.sub("", text)
    assert time.process_time() - began < 0.3


def test_without_tools_or_with_tool_choice_none_a_call_is_text(served, client):
    for more in ({}, {"tools": [ADD], "tool_choice": "none"}):
        served.script[:] = [call_turn(served, {"a": 2, "b": 3})]
        reply = client.chat.completions.create(model="base", messages=HELLO, max_tokens=200, **more)
        assert not reply.choices[0].message.tool_calls and "add" in reply.choices[0].message.content


def test_tool_choice_makes_a_turn_begin_with_a_call(served, client):
    """What follows is the model's: the untaught one writes no call, but its turn begins with the markup of one."""
    chat = served.server.chat_of(json.dumps([ADD]))
    add = {"type": "function", "function": {"name": "add"}}
    for choice, begins in (("required", '<tool_call>\n{"name": "add", "arguments": {"'), (add, '<tool_call>\n{"name": "add", "arguments": {"')):
        client.chat.completions.create(model="base", messages=HELLO, tools=[ADD], tool_choice=choice, max_tokens=60, seed=1)
        assert chat.text(served.rows[-1].turn).startswith(begins) and len(served.rows[-1].turn) > len(chat.encode(begins))
    # With the rest of the call it is one.
    whole = call_turn(served, {"a": 2, "b": 3})
    opening = served_by.opening_of(chat, served_by.Tool.model_validate(add))
    assert whole[:len(opening)] == opening and served_by.opening_of(chat, "auto") == []
    for tools, choice in (([], add), ([ADD], {"type": "function", "function": {"name": "sub"}})):
        with pytest.raises(openai.BadRequestError, match="tool_choice"):
            client.chat.completions.create(model="base", messages=HELLO, tools=tools, tool_choice=choice)


@pytest.mark.parametrize("name", [*TEMPLATES, "real:qwen3", "real:qwen3_5_think", "real:llama3_1", "real:glm4moe", "real:gptoss", "real:lfm2_v2"])
def test_the_opening_of_a_call_is_that_of_the_models_own_calls(name):
    chat = Chat(real(name[5:]) if name.startswith("real:") else small(name), TOOLS)
    for tool in chat.tools:
        named = served_by.Tool.model_validate({"type": "function", "function": {"name": tool}})
        call = chat.text(chat.turn("", [{"name": tool, "arguments": {"x": 1}}]))
        for choice in ("required", named):
            assert call.startswith(chat.text(served_by.opening_of(chat, choice)))
        assert tool in chat.text(served_by.opening_of(chat, named))


def test_a_developer_is_the_system(served, client):
    tokens = [client.chat.completions.create(model="base", messages=[{"role": role, "content": "Be brief."}, *HELLO], max_tokens=1).usage.prompt_tokens
              for role in ("system", "developer")]
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("name", ["thinking", "opens", "real:qwen3", "real:qwen3_5_think", "real:nemotron_3_nano", "real:glm4moe"])
@pytest.mark.parametrize("calls", [[], CALLS])
def test_a_turn_that_comes_back_with_its_thought_has_the_ids_that_were_sampled(name, calls):
    chat = Chat(real(name[5:]) if name.startswith("real:") else small(name), TOOLS)
    turn = chat.turn("Yes.", calls, reasoning_content="Half.")
    if name in ("thinking", "opens"):  # their thoughts are empty
        turn = chat.turn("Yes.", calls)
    shown, _ = said_of(chat, chat.text(turn))
    after = [{"role": "tool", "tool_call_id": call["id"], "content": "r"} for call in shown.get("tool_calls", [])]
    messages = [*HELLO, {"role": "assistant", **shown}, *(after or [{"role": "user", "content": "r"}])]
    expected = chat.results(calls, ["r"], turn[-1]) if calls else chat.reply("r", turn[-1])
    assert served_by.prompt_of(chat, messages) == chat.prompt(HELLO) + turn + expected


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think", "nemotron_3_super"])
def test_a_history_keeps_a_thought_and_an_answer_that_names_its_tag(name):
    chat = Chat(real(name), [])
    turn = {"role": "assistant", "content": "The tag </think> closes a thought.", "reasoning_content": "They ask about a tag."}
    shown = chat.text(served_by.prompt_of(chat, [*HELLO, turn, *HELLO]))
    assert all(shown.count(text) == 1 for text in (turn["content"], turn["reasoning_content"])), shown
    with pytest.raises(ValueError, match="reasoning_content must be text or text parts, got bool"):
        served_by.prompt_of(chat, [*HELLO, {**turn, "reasoning_content": True}, *HELLO])


@pytest.mark.parametrize("calls, content", [
    ([{"name": "nowhere", "arguments": {"x": 1}}], ""), ([], '<tool_call>\n{"name": "add", "arguments": {"a": 1, "ar'), ([], ""), ([], "I do.")])
def test_what_the_server_answers_can_come_back(served, client, calls, content):
    """A tool that is none, half of a call and an empty turn are a model's: the next request was refused with status 400."""
    chat = served.server.chat_of(json.dumps([ADD]))
    turn = chat.turn(content, calls)
    served.script[:] = [turn]
    message = client.chat.completions.create(model="base", messages=HELLO, tools=[ADD], max_tokens=len(turn)).choices[0].message
    assert [call.function.name for call in message.tool_calls or []] == [call["name"] for call in calls] and message.content == content
    after = [{"role": "tool", "tool_call_id": call.id, "content": "no such tool"} for call in message.tool_calls or []]
    reply = client.chat.completions.create(model="base", messages=[*HELLO, message, *(after or HELLO)], tools=[ADD], max_tokens=1)
    if calls:
        # As in an episode, where the environment says that there is no such tool.
        assert reply.usage.prompt_tokens == len(chat.prompt(HELLO) + turn + chat.results(calls, ["no such tool"], turn[-1]))


def test_results_may_come_in_any_order():
    chat = Chat(small("hermes") if "hermes" in TEMPLATES else real("qwen3"), TOOLS)
    turn = called("1", "2")
    one, two = [{"role": "tool", "tool_call_id": i, "content": f"of {i}"} for i in "12"]
    said = [served_by.prompt_of(chat, [*HELLO, turn, *results]) for results in ([one, two], [two, one])]
    assert said[0] == said[1] and chat.text(said[0]).index("of 1") < chat.text(said[0]).index("of 2")
    # A result of nothing stays an error.
    with pytest.raises(ValueError, match="tool_call_id"):
        served_by.prompt_of(chat, [*HELLO, turn, one, {**two, "tool_call_id": "3"}])


def test_without_parallel_tool_calls_there_is_one(served, client):
    for parallel in (True, False):
        served.script[:] = [call_turn(served, {"a": 1, "b": 1}, {"a": 2, "b": 2})]
        asked = client.chat.completions.create(model="base", messages=HELLO, tools=[ADD], max_tokens=300, parallel_tool_calls=parallel)
        assert len(asked.choices[0].message.tool_calls) == 1 + parallel


def parameters(heading):
    """Return the names in a row of the table of docs/serving.md."""
    page = (ROOT / "docs" / "serving.md").read_text()
    [row] = [line for line in page.splitlines() if line.startswith(f"| {heading} |")]
    return set(re.findall(r"`(\w+)`", row))


def test_the_table_of_parameters_is_that_of_the_server():
    """Every parameter of OpenAI's package stands in it, and is what the table says."""
    asked = inspect.signature(openai.resources.chat.Completions.create).parameters
    openais = set(asked) - {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
    obeyed, one_value, ignored, refused = map(parameters, ("obeyed", "one value only", "ignored", "refused"))
    assert openais <= obeyed | one_value | ignored | refused
    fields = set(served_by.ChatCompletion.model_fields) | {"max_completion_tokens"}
    assert obeyed | one_value == fields and not obeyed & one_value and ignored == served_by.IGNORED
    for name in ignored:
        served_by.ChatCompletion.model_validate({"messages": HELLO, name: "x"})
    for name in refused:
        served_by.ChatCompletion.model_validate({"messages": HELLO, name: None})
        with pytest.raises(ValueError, match="extra_forbidden"):
            served_by.ChatCompletion.model_validate({"messages": HELLO, name: "x"})
    for name in one_value:
        with pytest.raises(ValueError, match=name):
            served_by.ChatCompletion.model_validate({"messages": HELLO, name: 7})


# ---------------------------------------------------------------------------------------------------------- errors
def called(*ids):
    return {"role": "assistant", "tool_calls": [{"id": i, "function": {"name": "add", "arguments": "{}"}} for i in ids]}


def told(*ids):
    return [{"role": "tool", "tool_call_id": i, "content": str(n)} for n, i in enumerate(ids)]


@pytest.mark.parametrize("change, says", [
    ({"n": 2}, "n: Input should be 1"), ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": 10**6}, "context"),
    ({"messages": [{"role": "user", "content": "word " * 3000}]}, "context"), ({"messages": []}, "need system or user"),
    ({"messages": [{"role": "assistant", "content": "x"}]}, "message 0"), ({"messages": "hello"}, "messages"),
    ({"messages": [*HELLO, {"role": "assistant", "content": "x"}]}, "message"), ({"messages": [{"role": "robot"}]}, "message 0"),
    ({"messages": [*HELLO, {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "add", "arguments": "{"}}]}, *told("1")]}, "message 1"),
    ({"messages": [*HELLO, {"role": "assistant", "content": "x"}, {"role": "tool", "tool_call_id": "1", "content": "5"}]}, "message 2"),
    ({"messages": [*HELLO, called("1", "2"), *told("1")]}, "need tool"), ({"messages": [*HELLO, called("1"), *told("2")]}, "tool_call_id"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "content"),
    ({"temperature": -1}, "temperature"), ({"temperature": float("nan")}, "temperature"), ({"temperature": 1e-9}, "temperature"),
    ({"temperature": "hot"}, "temperature"), ({"top_p": 0}, "top_p"), ({"top_k": 1.5}, "top_k"),
    ({"stop": ""}, "stop"), ({"seed": "x"}, "seed"), ({"stream": "yes"}, "stream"),
    ({"frequency_penalty": 0.5}, "frequency_penalty"), ({"logit_bias": {"5": 100}}, "logit_bias: this server does not obey it"), ({"top_logprobs": 3}, "top_logprobs: this"), ({"bogus": 1}, "bogus: this"),
    ({"response_format": {"type": "json_object"}}, "response_format: Input should be 'text'"), ({"stream_options": {"include_obfuscation": True}}, "stream_options: this"), ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [{"type": "function"}]}, "tools"), ({"tools": [{"type": "function", "function": {"name": "<|im_end|>"}}]}, "tools")])
def test_what_cannot_be_answered_is_refused(served, change, says):
    body = {**CHAT, **change}
    with pytest.raises(openai.BadRequestError, match=says):
        served.client.post("/chat/completions", content=json.dumps(body).encode(), cast_to=object,
                           options={"headers": {"Content-Type": "application/json"}})


@pytest.mark.parametrize("change", [{"temperature": 0}, {"top_p": 1e-50}, {"temperature": 1e-3, "top_k": 10**30}, {"top_p": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0}, {"seed": None},
                                    {"stop": None, "logit_bias": None, "min_p": 0, "repetition_penalty": 1.0, "top_k": -1}, {"max_completion_tokens": 4, "max_tokens": None},
                                    {"top_logprobs": 0, "logit_bias": {}, "store": False, "n": 1}, {"stop": ["\n"] * 8}])
def test_parameters_that_ask_for_nothing_are_taken(served, change):
    assert served.post("/chat/completions", {**CHAT, **change})["usage"]["completion_tokens"] <= 4


def test_other_refusals_have_openai_statuses(served, client):
    with pytest.raises(openai.NotFoundError, match="gpt-7"):
        client.chat.completions.create(model="gpt-7", messages=HELLO)
    with pytest.raises(openai.NotFoundError, match="Not Found"):
        client.embeddings.create(model="base", input="x")
    with pytest.raises(openai.APIStatusError) as caught:
        served.client.get("/chat/completions", cast_to=object)
    assert caught.value.status_code == 405 and caught.value.body["message"] == "Method Not Allowed"
    json_body = {"headers": {"Content-Type": "application/json"}}
    for content in (b"{", b"[]", b"3", b"[" * 100_000, b'{"messages":' + b"[" * 900 + b"]" * 900 + b"}", b"\xff"):
        with pytest.raises(openai.BadRequestError):
            client.post("/chat/completions", content=content, cast_to=object, options=json_body)
    with pytest.raises(openai.APIStatusError) as caught:
        served.post("/completions", {"prompt": "x" * 100_000_000})
    assert caught.value.status_code == 413
    with pytest.raises(openai.BadRequestError, match="context"):
        served.post("/completions", {"prompt": [5] * 1_000_000})
    for prompt in ([], [-1], [10**9], [served.server.vocabulary], [True], [5, "x"], None, "", "hello"):
        with pytest.raises(openai.BadRequestError, match="prompt"):
            client.post("/completions", content=json.dumps({"prompt": prompt}).encode(), cast_to=object, options=json_body)


def test_models_and_health(served, client):
    [model] = client.models.list().data
    assert model.id == "base" and model.max_model_len == 1024 and model.parent is None
    for path in ("healthz", "health"):  # the second is what a sampler asks while it waits
        assert served.client.get(f"{served.url}/{path}", cast_to=object) == {}


def test_max_completion_tokens_counts_as_max_tokens(client):
    for name in ("max_tokens", "max_completion_tokens"):
        assert client.chat.completions.create(model="base", messages=HELLO, seed=1, **{name: 5}).usage.completion_tokens == 5


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain"])
def test_a_body_that_is_not_called_json_is_refused(client, kind):
    """curl sends the first one. Taken, any web page could ask a server on its reader's machine, because browsers send such a body unasked."""
    with pytest.raises(openai.BadRequestError):
        client.post("/chat/completions", content=json.dumps(CHAT).encode(), cast_to=object, options={"headers": {"Content-Type": kind}})


@pytest.mark.parametrize("host, status", [("evil.example", 400), ("evil_2.example:PORT", 400), ("127.0.0.1.evil.example", 400), ("localhost:PORT", 200), ("127.0.0.1", 200)])
def test_a_web_page_whose_name_leads_here_is_not_answered(served, host, status):
    """DNS rebinding: for the browser page and server are the same site then, so the page may send JSON and read the answer."""
    headers = {"Host": host.replace("PORT", str(served.port)), "Content-Type": "application/json"}
    for path, body in (("/v1/models", None), ("/v1/chat/completions", json.dumps(CHAT).encode())):
        try:
            answer = urllib.request.urlopen(urllib.request.Request(served.url + path, body, headers))
        except urllib.error.HTTPError as error:
            answer = error
        assert answer.status == status


def test_while_a_long_text_is_read_others_are_answered(served, client):
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(served.post, "/chat/completions", {"messages": [{"role": "user", "content": "hello world " * 40_000}]})
        answered = 0
        while not long.done():
            client.get(f"{served.url}/healthz", cast_to=object)
            answered += not long.done()
        assert isinstance(long.exception(), openai.BadRequestError) and answered > 10


def test_a_token_is_asked_of_everybody_but_health(tiny_model):
    served = Served(*tiny_model, token="secret")
    assert served.client.models.list().data
    request = urllib.request.Request(f"{served.url}/v1/models", headers={"Authorization": "Bearer geh\u00e9im"})
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(request)
    for key in ("secre", "secret2", "geheim"):
        stranger = openai.OpenAI(base_url=served.url, api_key=key, max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            stranger.get("/v1/models", cast_to=object)
        for path in ("chat/completions", "completions", "load_lora_adapter", "unload_lora_adapter", "../solve"):
            # Without the token not even what is wrong with the body is said.
            with pytest.raises(openai.AuthenticationError):
                stranger.post(f"/v1/{path}", body={"top_p": 9}, cast_to=object)
        for path in ("/v1/nothing", "/openapi.json", "/docs"):
            with pytest.raises(openai.NotFoundError):
                stranger.get(path, cast_to=object)
    assert openai.OpenAI(base_url=served.url, api_key="none").get("/healthz", cast_to=object) == {}
    assert served.client.models.list(extra_headers={"Host": "lab.example"}).data
    served.http.should_exit = True


def test_who_can_be_reached_needs_a_token_before_the_model_is_loaded(monkeypatch):
    monkeypatch.setattr(agent_program.talk, "load_model", pytest.fail)
    with pytest.raises(UserError, match="--token"):
        agent_program.run(agent_program.Config(serve=True, host="0.0.0.0"))


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


def test_a_stream_whose_client_leaves_ends_with_its_next_token(served):
    connection, _ = raw(served, request_bytes({**LONG, "stream": True}))
    connection.close()
    began = time.monotonic()
    served.wait_until_free()
    assert time.monotonic() - began < 2


def test_broken_clients_disturb_nobody(served, client):
    half, _ = raw(served, request_bytes(CHAT, length=5000), read=False)
    for text in (b"hello\r\n\r\n", b"\x16\x03\x01\x02\x00", b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n"):
        assert b" 400 " in raw(served, text)[1].splitlines()[0]
    gone, _ = raw(served, request_bytes(CHAT, length=5000), read=False)
    gone.close()
    assert client.chat.completions.create(model="base", messages=HELLO, max_tokens=1)
    half.close()


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
    prompt = served.server.chat_of("[]").prompt(HELLO)
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
                                         extra_body={"return_token_ids": True}).choices[0]
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(ask, list(models) * 4))
    logprobs = {}
    for name, model in models.items():
        row = Row(prompt, seed=mix(4, len(prompt)), limit=12)
        with merged(model):
            engine = Engine(model, slots=1, stop_ids=served.server.chat_of("[]").end_ids)
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
    with pytest.raises(openai.NotFoundError):
        ask("a1")
    served.post("/unload_lora_adapter", {"lora_name": "base"})  # stays
    assert ask("base").token_ids == answers[0].token_ids
    served.http.should_exit = True


def test_an_adapter_that_does_not_fit_leaves_no_trace(tmp_path):
    """Not even the first one, of whose ranks and targets the others may differ."""
    served = Served(*load_model("tiny", train=False))
    good, bad = tmp_path / "good", tmp_path / "bad"
    write_adapter(good, 1)
    settings = json.loads((good / "adapter_config.json").read_text())

    def load(folder):
        return served.post("/load_lora_adapter", {"lora_name": folder.name, "lora_path": str(folder)})

    def ask(name="base"):
        return served.client.completions.create(model=name, prompt=[5, 6, 7], max_tokens=8, seed=4, extra_body={}).choices[0].text
    before = ask()
    for change in ({"r": 8}, {"r": 4.5}, {"target_modules": []}, {"target_modules": None}, {"target_modules": ["embed_tokens"]}):
        shutil.copytree(good, bad, dirs_exist_ok=True)
        (bad / "adapter_config.json").write_text(json.dumps({**settings, **change}))
        with pytest.raises(openai.BadRequestError):
            load(bad)
        assert ask() == before
    load(good)
    assert ask("good") != before == ask() and [model.id for model in served.client.models.list().data] == ["base", "good"]
    served.http.should_exit = True


def test_beside_an_adapter_that_was_started_another_is_loaded(tmp_path, tiny_model):
    """The first one is not merged for good, and so the other one plays alone."""
    for name in "ab":
        write_adapter(tmp_path / name, ord(name))
    served, alone = Served(*load_model(str(tmp_path / "a"), train=False, merge=False)), Served(*tiny_model)

    def ask(served, name):
        return served.client.completions.create(model=name, prompt=[5, 6, 7], max_tokens=8, seed=4).choices[0].text
    for place in (served, alone):
        place.post("/load_lora_adapter", {"lora_name": "b", "lora_path": str(tmp_path / "b")})
    before = ask(served, "base")
    assert ask(served, "b") == ask(alone, "b") != before == ask(served, "base")
    for place in (served, alone):
        place.http.should_exit = True


def test_an_adapter_that_is_not_finite_harms_its_own_rows_only(tmp_path):
    served = Served(*load_model("tiny", train=False))
    model = write_adapter(tmp_path / "bad", 1)
    for p in adapter_tensors(model).values():
        p.data.fill_(1e25)
    save_model(model, tmp_path / "bad")
    served.post("/load_lora_adapter", {"lora_name": "bad", "lora_path": str(tmp_path / "bad")})
    with pytest.raises(openai.BadRequestError, match="not finite"):
        served.client.completions.create(model="bad", prompt=[5, 6, 7], max_tokens=8)
    with pytest.raises(openai.APIConnectionError) as error:  # half an answer ends, too
        list(served.client.chat.completions.create(**{**CHAT, "model": "bad", "stream": True}, timeout=20))
    assert not isinstance(error.value, openai.APITimeoutError)
    assert served.client.completions.create(model="base", prompt=[5, 6, 7], max_tokens=8).choices[0].text
    served.http.should_exit = True


FAILS = """
import runpy
from extras.serve.player import SharedEngine
def fails(*_):
    raise MemoryError("no memory left")
SharedEngine.prefill = fails
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
    chat = served.visit.chat
    env = cls()
    env.reset(**cls._from_text("2x+1=7"))
    turns, told, call = [], [], None
    while (turn := env._expert()) and not isinstance(turn, str):
        told.append(getattr(env, turn[0]["name"])(**turn[0]["arguments"]))
        turns.append(chat.turn("", turn))
        call = turn[0]
        if env.done:
            break
    served.script[:] = turns
    solution = served.client.post(f"{served.url}/solve", body={"problem": "2x + 1 = 7"}, cast_to=object)
    assert solution["success"] is True and solution["reward"] > 0
    assert call["name"] == "state_answer" and solution["solution"] == "3"  # its last turn has no text
    assert [m["content"] for m in solution["transcript"] if m["role"] == "tool"] == told
    assert [m["role"] for m in solution["transcript"]].count("assistant") == len(turns)
    with pytest.raises(openai.BadRequestError, match="is not an equation"):
        served.client.post(f"{served.url}/solve", body={"problem": "what is love"}, cast_to=object)


def test_the_solution_is_the_answer_and_no_call_that_a_limit_cut(served, monkeypatch):
    chat = served.visit.chat
    call = chat.turn("x is 3?", [{"name": "identify_operation", "arguments": {"operation": "add"}}])
    for turns, solution in (([chat.turn("<think>\n4?\n</think>\n\nx = 3", [])], "x = 3"), ([call] * 99, "")):
        served.script[:] = turns
        assert solve(served, monkeypatch)["solution"] == solution


def solve(served, monkeypatch, cls=None, **options):
    if cls:
        monkeypatch.setattr(served.visit, "cls", cls)
    return served.client.post(f"{served.url}/solve", body={"problem": "2x + 1 = 7", **options}, cast_to=object)


@pytest.mark.parametrize("reward, says", [(float("nan"), "not finite"), ("much", "get_reward")])
def test_solve_says_what_is_wrong_with_a_reward(served, monkeypatch, reward, says):
    served.script[:] = [served.visit.chat.turn("3", [])]
    with pytest.raises(openai.InternalServerError, match=says):
        solve(served, monkeypatch, type("Broken", (served.visit.cls,), {"get_reward": lambda self: reward}))


def test_solve_says_that_an_environment_is_gone(served, monkeypatch):
    def gone(problem):
        raise EnvironmentFault("mcp:shelf.py: no answer")
    monkeypatch.setattr(served.server, "begin", gone)
    with pytest.raises(openai.InternalServerError, match="mcp:shelf.py: no answer"):
        solve(served, monkeypatch)


def test_solve_refuses_a_problem_that_fills_the_context(served, monkeypatch):
    with pytest.raises(openai.BadRequestError, match=r"the prompt has \d+ tokens, max_tokens is 1024"):
        cls = served.visit.cls
        solve(served, monkeypatch, type("Long", (cls,), {"reset": lambda self, **task: cls.reset(self, **task) + 3000 * " word"}))


def test_solve_says_neither_success_nor_failure_where_nothing_was_judged(served, monkeypatch):
    """Without a right answer."""
    for answer, success in (("3", False), (None, None)):
        served.script[:] = [served.visit.chat.turn("3", [])]
        read = staticmethod(lambda text, answer=answer: {"equation": text, "answer": answer})
        solution = solve(served, monkeypatch, type("Unjudged", (load("equations"),), {"_from_text": read}))
        assert solution["success"] is success and solution["stop_reason"] == "done"


def test_solve_draws_each_turn_anew_and_ends_at_a_token_that_opens_a_message(served, monkeypatch):
    chat = served.visit.chat
    call = chat.turn("", [{"name": "add_terms", "arguments": {"terms": "1"}}])
    served.script[:], served.rows[:] = [call, call, [9, *chat.start_ids, 9]], []
    assert solve(served, monkeypatch, seed=3)["stop_reason"] == "malformed"
    assert len({row.seed for row in served.rows}) == 3 and len(served.rows[2].turn) == 2
    first = served.rows[0]
    served.script[:], served.rows[:] = [call], []
    monkeypatch.setattr(served.server.config, "max_tokens", 1024)
    solve(served, monkeypatch, seed=3)
    assert served.rows[0].seed == first.seed


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
    while "http://" not in (text := program.said("stderr")):
        assert program.poll() is None, program.said("stderr")
        time.sleep(0.05)
    url = next(word for word in text.split() if word.startswith("http://"))
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    while True:
        try:
            client.models.list()
            return client
        except openai.APIConnectionError:
            time.sleep(0.05)


def test_without_fastapi_one_line_says_what_to_install():
    code = "import runpy, sys; sys.modules['fastapi'] = None; sys.argv = ['agent.py', '--serve']; runpy.run_path('agent.py', run_name='__main__')"
    done = run_program("-c", code, cwd=ROOT)
    assert done.returncode == 2 and "pip install -U fastapi uvicorn" in done.stderr and "Traceback" not in done.stderr
