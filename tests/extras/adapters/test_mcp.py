"""extras/adapters/mcp_text.py: the tools of a real MCP server, by a command and by an address, and everything that can go wrong with it."""
import faulthandler
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("mcp.client.client")  # version 2

import agent  # noqa: E402
import envs  # noqa: E402
from agent import Limits, rollout  # noqa: E402
from core.chat import Chat  # noqa: E402
from core.config import EnvironmentFault, UserError  # noqa: E402
from core.run import OneProcess  # noqa: E402
from core.tiny import make_tiny  # noqa: E402
from envs.tasks import load_tasks  # noqa: E402
from extras import check  # noqa: E402
from extras.adapters import mcp_text  # noqa: E402
from extras.check import Conformance  # noqa: E402
from extras.play import Config, Game, Setup  # noqa: E402
from layers import rewards_of  # noqa: E402

SERVER = '''
import os, sys, time
from pathlib import Path
from typing import Literal
from mcp.server.mcpserver import MCPServer
server = MCPServer("shelf", instructions="Put things on the shelf.")
held = []
Path(__file__).with_name(f"pid-{os.getpid()}").touch()

@server.tool()
def put(item: str, count: int = 1, tags: list[str] | None = None) -> str:
    """Put an item on the shelf."""
    held.append(item)
    return f"{count} {item}; the shelf holds {len(held)}"

@server.tool(name="reset")
def empty(kind: Literal["all", "some"]) -> dict:
    """Empty the shelf."""
    held.clear()
    return {"kind": kind}

@server.tool(name="look-up")
def look(at: str) -> str:
    """Look at a place."""
    if at == "hell":
        print("it burns", file=sys.stderr, flush=True)
        os._exit(3)
    if at == "eternity":
        time.sleep(60)
    raise LookupError(at)

if __name__ == "__main__":
    server.run(*sys.argv[1:2], **({"port": int(sys.argv[2])} if sys.argv[2:] else {}))
'''
MODEL, TOKENIZER = make_tiny()
MODEL.eval()


@pytest.fixture(autouse=True)
def no_timer():
    """A watch that is not closed leaves the timer of hung calls behind."""
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("mcp") / "shelf.py"
    path.write_text(SERVER)
    return f"{sys.executable} {path}"


@pytest.fixture(scope="module")
def prompts(place):
    path = place.split()[1].replace("shelf.py", "prompts.jsonl")
    with open(path, "w") as file:
        file.writelines(f'{{"prompt": "Put {n} apples on the shelf.", "answer": "{n}"}}\n' for n in range(20))
    return path


def played(monkeypatch, env, turns, group_size=1, rewards="exact", options=None, limits=Limits(max_new_tokens=400, max_tokens=4000), run=None):
    """Play the same turns in `group_size` episodes at once."""
    chat = Chat(TOKENIZER, envs.schemas(envs.load(env)))
    forced = [i for turn in turns for i in (chat.turn("", turn) if isinstance(turn, list) else [*TOKENIZER.encode(turn, add_special_tokens=False), *sorted(chat.stop_ids)[:1]])]
    make = agent.Row
    config = SimpleNamespace(env=env, rewards=rewards, max_turns=4, max_new_tokens=400, max_tokens=4000, seed=0)
    with monkeypatch.context() as patch:
        patch.setattr(agent, "Row", lambda prompt, **options: make(prompt, **options | {"forced": list(forced)}))
        return rollout(MODEL, TOKENIZER, env, [{"prompt": "Put 7 apples.", "answer": "7"}], group_size, limits=limits, pay=rewards_of(config), env_options=options, run=run)


def call(name, **arguments):
    return [{"name": name, "arguments": arguments}]


def results(t):
    return [m["content"] for m in t.messages if m["role"] == "tool"]


def pids(place):
    """The processes of the server that live."""
    numbers = [int(path.name[4:]) for path in Path(place.split()[1]).parent.glob("pid-*")]
    return {number for number in numbers if os.path.exists(f"/proc/{number}")}


def wait_until(condition, seconds=5):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


# ------------------------------------------------------------------------------------------------------ the tools
def test_schemas_are_the_servers_and_names_leave_the_contract_alone(place):
    cls = envs.load(f"mcp:{place}")
    found = {schema["function"]["name"]: schema["function"] for schema in envs.schemas(cls)}
    assert found.keys() == {"put", "reset_", "look_up"} and cls.system_prompt == "Put things on the shelf."
    assert found["put"] == {"name": "put", "description": "Put an item on the shelf.", "parameters": {
        "type": "object", "required": ["item"], "properties": {
            "item": {"type": "string"}, "count": {"default": 1, "type": "integer"},
            "tags": {"anyOf": [{"items": {"type": "string"}, "type": "array"}, {"type": "null"}], "default": None}}}}
    assert found["reset_"]["parameters"]["properties"]["kind"]["enum"] == ["all", "some"]
    assert not pids(place)  # the session that asked for them has ended


@pytest.mark.parametrize("name, ours", [("from", "from_"), ("user-id", "user_id"), ("_x", "x"), ("2d", "n2d"), ("", "n"), ("done", "done_"), ("a.b", "a_b")])
def test_names(name, ours):
    assert mcp_text.name_of(name) == ours


def test_arguments_get_their_own_names_back(monkeypatch):
    tool = SimpleNamespace(name="t", description=None, input_schema={"properties": {"from": {"type": "number", "title": "From"}, "title": {"title": "Title"}}, "required": ["from"], "title": "x"})
    method = mcp_text.method_of("t", tool)
    env = type("E", (), {"t": method, "_call": lambda self, name, arguments: f"{name} {arguments}"})()
    assert envs.calls.call_tool(env, "t", {"from_": 1, "title": [2]}) == ("t {'from': 1.0, 'title': [2]}", None)
    assert "missing argument 'from_'" in envs.calls.call_tool(env, "t", {})[0] and method.schema["function"]["parameters"]["properties"] == {"from_": {"type": "number"}, "title": {}}


def test_some_of_the_tools(place):
    cls = envs.with_options(envs.load(f"mcp:{place}"), {"tools": "put+look_up"})
    assert [schema["function"]["name"] for schema in envs.schemas(cls)] == ["look_up", "put"]
    assert envs.calls.call_tool(cls(), "reset_", {"kind": "all"})[0] == "error: no tool 'reset_'; tools: look_up, put"
    with pytest.raises(UserError, match="--env_options tools: mcp:.* has no puts; it has put, reset_, look_up"):
        envs.with_options(envs.load(f"mcp:{place}"), {"tools": "puts"})


# ------------------------------------------------------------------------------------------------------ episodes
def test_episodes_have_sessions_of_their_own_that_end(monkeypatch, place):
    """Each episode's shelf holds its own things. The reward is of --rewards, and an error is text for the model."""
    turns = [call("put", item="apple", count=7), call("put", count="many"), call("look_up", at="sky"), "7"]
    for _ in range(2):
        episodes = played(monkeypatch, f"mcp:{place}", turns, 2)
        for t in episodes:
            assert results(t) == ["7 apple; the shelf holds 1", "error: put: missing argument 'item'; takes: item, count, tags", "error: ValueError: Error executing tool look-up"]
            assert t.messages[0]["content"] == "Put things on the shelf." and t.messages[1]["content"] == "Put 7 apples." and t.reward == 1.0 and t.info["success"] and t.info["tool_errors"] == 2
    del t, episodes
    wait_until(lambda: not pids(place))


def test_an_episode_without_a_call_starts_no_server(monkeypatch, place):
    [t] = played(monkeypatch, f"mcp:{place}", ["7"])
    assert t.reward == 1.0 and not pids(place)


def test_a_session_may_be_kept(monkeypatch, place):
    """For servers that remember nothing. This one does, and says so."""
    run = SimpleNamespace(played=0, kept={}, checkpoint=True, rollout_seconds=0.0, rollout_tokens=0.0, check=lambda: None, ranks=OneProcess())
    for number in (1, 2):
        [t] = played(monkeypatch, f"mcp:{place}", [call("put", item="apple"), "7"], options={"keep": True}, run=run)
        assert results(t) == [f"1 apple; the shelf holds {number}"]
    assert len(pids(place)) == 1
    run.kept.clear()
    wait_until(lambda: not pids(place))


def test_an_address(monkeypatch, place):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([*place.split(), "streamable-http", str(port)], stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0, 60)
        env = f"mcp:http://127.0.0.1:{port}/mcp"
        for t in played(monkeypatch, env, [call("put", item="apple"), "7"], 2):
            assert results(t)[0].startswith("1 apple; the shelf holds") and t.reward == 1.0
        process.kill()
        process.wait()
        with pytest.raises(EnvironmentFault, match=f"^{env}: no answer: "):
            played(monkeypatch, env, [call("put", item="apple"), "7"])
    finally:
        process.kill()


# ------------------------------------------------------------------------------------------------------ what goes wrong
def test_a_server_that_dies_ends_the_run(monkeypatch, place):
    with pytest.raises(EnvironmentFault, match=r"^mcp:.*shelf.py: no answer: Connection closed; the last that it wrote: it burns$"):
        played(monkeypatch, f"mcp:{place}", [call("look_up", at="hell"), "7"])


def test_a_server_that_dies_ends_the_run_without_isolate_too(place):
    session = envs.session.Session("mcp", envs.load(f"mcp:{place}"), {"prompt": "?"})
    session.start()
    session.submit(call("look_up", at="hell"))
    with pytest.raises(EnvironmentFault, match="Connection closed"):
        session.results()


@pytest.mark.parametrize("code, kind", [(-32602, ValueError), (0, ValueError), (-32600, RuntimeError), (-32603, RuntimeError)], ids=["arguments", "a handler", "no such session", "502"])
def test_what_no_argument_can_help_is_counted_as_a_fault(code, kind):
    """isolate ends a run after ten in a row; wrong arguments are the model's affair."""
    async def call_tool(name, arguments):
        raise mcp_text.MCPError(code, "no")
    session = SimpleNamespace(ready=SimpleNamespace(result=lambda: SimpleNamespace(call_tool=call_tool)))
    with pytest.raises(kind, match="no") as error:
        mcp_text.run(mcp_text.Session.call(session, "look_up", {}))
    assert type(error.value) is kind


def test_a_call_that_takes_too_long_is_answered_by_isolate(monkeypatch, place):
    limits = Limits(max_new_tokens=400, max_tokens=4000, tool_timeout=2.0)
    [t] = played(monkeypatch, f"mcp:{place}", [call("look_up", at="eternity"), "7"], limits=limits)
    assert results(t) == ["error: TimeoutError: no answer within 2 s"] and t.info["timeouts"] == 1
    for session in list(mcp_text.OPEN):  # its thread waits for a minute
        session.end()
    wait_until(lambda: not pids(place))


@pytest.mark.parametrize("command, says", [("no_such_command x", "No such file or directory: 'no_such_command'"), (f"{sys.executable} -c 1/0", "Connection closed; the last that it wrote: ZeroDivisionError: division by zero"), ("http://127.0.0.1:9/mcp", "All connection attempts failed"), (f"{sys.executable} 'half", "No closing quotation")])
def test_a_server_that_does_not_start_is_one_line(command, says):
    with pytest.raises(UserError, match=f"^--env mcp:{command}: no answer: .*{says}"):
        envs.load(f"mcp:{command}")


# ------------------------------------------------------------------------------------------------------ the programs
def test_the_page(tmp_path, monkeypatch):
    """docs/mcp.md: its server, its tasks and its command work as they stand there."""
    page = (Path(__file__).parents[3] / "docs" / "mcp.md").read_text()
    for name, language in (("shelf.py", "python"), ("apples.jsonl", "json")):
        (tmp_path / name).write_text(re.search(rf"```{language}\n(.*?)```", page, re.S)[1])
    monkeypatch.chdir(tmp_path)
    env = f"mcp:{sys.executable} shelf.py"
    tasks = load_tasks(env, "train", None, 0, "apples.jsonl") + load_tasks(env, "test", None, 0, "apples.jsonl")
    game = Game(Setup(Config(env=env, tasks="apples.jsonl")), tasks[0])
    boxes = {color: int(game.take_turn("", call("count", color=color))[0][0]) for color in ("red", "green", "blue")}
    assert game.system_prompt == "Answer with the number alone." and len(tasks) == 4
    for task in tasks:
        named = [number for color, number in boxes.items() if color in task["prompt"] or "all" in task["prompt"]]
        assert game.take_turn("", call("add", numbers=named)) == [(task["answer"], 0.0)]


@pytest.mark.slow
def test_check_and_play(place, prompts, monkeypatch):
    monkeypatch.setattr(check, "REPLAYED", 1)
    this = Setup(Config(env=f"mcp:{place}", tasks=prompts, env_options="tools=put+reset_"))
    found = {name: (verdict, reason) for name, verdict, reason in Conformance(this).verdicts()}
    assert {verdict for verdict, _ in found.values()} == {"pass", "-"} and found["valid tool schemas"] == ("pass", "put, reset_") and found["episodes share no state"][0] == "pass", found
    game = Game(this, load_tasks(f"mcp:{place}", "train", 1, 0, prompts)[0])
    assert game.take_turn("", call("put", item="apple")) == [("1 apple; the shelf holds 1", 0.0)] and "apples" in game.seen[0]
