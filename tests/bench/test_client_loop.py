"""bench/client_loop.py: its environment teaches to end in words, and its client plays on where nothing ends."""
from types import SimpleNamespace

from bench import client_loop
from core.tiny import make_tiny
from schooling import demonstrate

STOPS = "bench/client_loop.py:Stops"
TASK = {"equation": "3x + 7 = 16"}


def test_episodes_of_stops_end_in_a_paid_turn_of_text():
    for t in demonstrate(make_tiny()[1], STOPS, client_loop.Stops._tasks("test", 3, 0)):
        *_, stated, verdict, said = t.messages
        assert stated["tool_calls"][0]["name"] == "state_answer" and verdict["content"] == "right"
        assert said["role"] == "assistant" and "tool_calls" not in said and said["content"].startswith("x = ")
        assert t.stop_reason == "done" and t.info["success"] and t.rewards[-1] == 1.0


def test_a_second_answer_and_words_without_one_are_not_paid():
    env = client_loop.Stops()
    env.reset(**TASK)
    env._reply("x = 3")
    assert env.get_reward() == 0
    assert [env.state_answer("4"), env.state_answer("3")] == ["wrong", "error: the answer has been stated"]
    assert not env._check() and not env.done


def scripted(*turns):
    """Return a client whose model takes these turns: calls (name, value), or a text."""
    turns = iter(turns)

    def create(**_):
        turn = next(turns)
        calls = [] if isinstance(turn, str) else [SimpleNamespace(id="1", function=SimpleNamespace(name=turn[0], arguments=f'{{"{turn[1]}": "{turn[2]}"}}'))]
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(tool_calls=calls, content=turn if isinstance(turn, str) else ""))])
    return SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))


def test_what_the_client_counts():
    solving = [("subtract_terms", "terms", "7"), ("divide_terms", "terms", "3"), ("state_answer", "value", "3")]
    more = ("nowhere", "terms", "3")
    for turns, expected in (([*solving, "x = 3"], {"solved": True, "ended": "words", "after": 0}),
                            ([*solving, more, more, '<tool_call>\n{"na'], {"solved": True, "ended": "call", "after": 2}),
                            ([more] * 25, {"solved": False, "ended": "limit", "after": None})):
        assert client_loop.play(scripted(*turns), TASK, [], 0) == expected
