"""Which calls a client is given: of turns that a limit cut, and of turns that have to call a tool. And an answer in every template."""
from types import SimpleNamespace

import pytest

pytest.importorskip("fastapi")

from families import ALL, CALLS, NAMES, TOOLS, TWO, dialects, real, small  # noqa: E402

from agent import Trajectory  # noqa: E402
from core.chat import Chat  # noqa: E402
from core.tool_calls import parse_tool_calls  # noqa: E402
from extras.serve import server as served_by  # noqa: E402
from extras.serve.calls import closing_of, whole_calls  # noqa: E402
from extras.serve.player import Choice  # noqa: E402

REQUIRED = served_by.ChatCompletion.model_validate({"messages": [], "tool_choice": "required"})
INNER = "Say <tool_call>\n<function=look>\n<parameter=query>\nx\n</parameter>\n</function>\n</tool_call> and then"


def chat_of(name, tools=TOOLS):
    return Chat(real(name[5:]) if name.startswith("real:") else small(name), tools)


def turn_of(chat, ids, limit=10**6, forced=()):
    """A turn that samples these ids until it ends."""
    choice = Choice([1], REQUIRED, chat, {}, limit=limit, forced=list(forced))
    for token in ids:
        if choice.state != "ended":
            choice.append(token, 0.0, ())
    return choice


@ALL
def test_a_turn_that_has_to_call_a_tool_ends_with_its_call(name):
    """The untaught model wrote on, up to the limit, and its call was none."""
    chat = chat_of(name)
    turn = chat.turn("", CALLS)[:-1]
    choice = turn_of(chat, [*turn, *chat.encode(" and so on, and on")], forced=served_by.opening_of(chat, "required"))
    assert choice.state == "ended" and chat.text(choice.turn).rstrip() == chat.text(turn).rstrip().removesuffix("\n")
    message, reason = served_by.message_of(choice)
    assert reason == "tool_calls" and [call["function"]["name"] for call in message["tool_calls"]] == ["look"]
    assert turn_of(chat, [*turn, *chat.encode(" and so on")]).state != "ended"  # not forced: the model's own stop ends it


@pytest.mark.parametrize("name", ["hermes", pytest.param("real:qwen3_5_nothink", marks=dialects), "llama"])
def test_a_call_that_a_text_shows_does_not_end_the_turn(name):
    chat = chat_of(name)
    calls = [{"name": "look", "arguments": {"query": f"{INNER} wait", "limit": 2}}]
    choice = turn_of(chat, [*chat.turn("", calls)[:-1], *chat.encode(" more")], forced=served_by.opening_of(chat, "required"))
    assert choice.state == "ended" and parse_tool_calls(chat.text(choice.turn), chat.tools)[1] == calls


@ALL
def test_whole_calls_of_a_turn_that_its_length_ended_are_calls(name):
    chat = chat_of(name)
    first = chat.turn("", TWO[:1])[:-1]
    if chat.shows_one_call:
        turn = first
    else:
        turn = chat.turn("", TWO)[:-1]
        shared = next(i for i, (a, b) in enumerate(zip(first, turn)) if a != b) if turn[:len(first)] != first else len(first)
        for cut in range(shared, len(turn) - 1, 11):
            calls = whole_calls(chat.text(turn[:cut]), chat.tools)
            assert calls in (TWO[:1], []) or chat.text(turn[cut:]).strip() in closing_of(chat)
    message, reason = served_by.message_of(turn_of(chat, turn, limit=len(turn)))
    assert reason == "tool_calls" and len(message["tool_calls"]) == (1 if chat.shows_one_call else 2)


def test_of_a_turn_that_is_cut_the_first_call_is_given_and_the_second_is_not():
    chat = chat_of("hermes")
    turn = chat.turn("", TWO)[:-1]
    message, reason = served_by.message_of(turn_of(chat, turn, limit=len(turn) - 20))
    assert reason == "tool_calls" and [call["function"]["name"] for call in message["tool_calls"]] == ["look"] and message["content"] == ""


@dialects
@pytest.mark.parametrize("cut", [INNER, INNER[:-9], INNER[:-20], "x", "x\n</parameter>", "x\n</parameter>\n<parameter=limit>\n2"])
def test_a_call_that_is_cut_is_none_whatever_its_text_shows(cut):
    """Half a text would be written into a file."""
    text = f"<tool_call>\n<function=look>\n<parameter=query>\n{cut}"
    assert whole_calls(text, {}) == []
    whole = "<tool_call>\n<function=look>\n<parameter=query>\ny\n</parameter>\n</function>\n</tool_call>\n"
    assert whole_calls(whole + text, {}) == [{"name": "look", "arguments": {"query": "y"}}]


@pytest.mark.parametrize("name", [pytest.param(name, marks=dialects) if name not in ("hermes", "real:cohere2") else name for name in NAMES])
def test_an_answer_is_read_paid_and_shown_as_it_is(name):
    """What a template writes between an answer and its stop, as Cohere's second one does, is no part of the answer."""
    exact = pytest.importorskip("extras.rewards.exact").exact
    chat = chat_of(name, [])
    ids = chat.turn("4", [])
    text = (chat.opened_thought + chat.text(ids)).strip()
    t = Trajectory(token_ids=[1, 2], loss_mask=[0, 1], logprobs=[0.0, 0.0], rewards=[0.0], stop_reason="done",
                   messages=[{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": text}], info={"task": {"answer": "4"}})
    assert exact(t) == 1
    for turn in (ids, ids[:-1]):
        read = SimpleNamespace(chat=chat, body=SimpleNamespace(parallel_tool_calls=True), read=lambda turn=turn: (chat.text(turn), "stop"))
        assert served_by.message_of(read)[0]["content"] == "4"
