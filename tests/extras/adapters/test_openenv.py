"""Clients of the package openenv-core, against real servers that the tests start: one synchronous, one asynchronous."""
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import agent
import envs
from agent import Limits, rollout
from layers import rewards_of
from core.chat import Chat
from core.tiny import make_tiny

pytest.importorskip("openenv.core.env_server", exc_type=ImportError)
FILE = Path(__file__).with_name("openenv_games.py")
MODEL, TOKENIZER = make_tiny()
MODEL.eval()
LIMITS = Limits(max_new_tokens=400, max_tokens=4000, max_turns=4)


@pytest.fixture(scope="module", autouse=True)
def servers():
    processes = []
    for name in ("echo", "catch"):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        processes.append(subprocess.Popen([sys.executable, str(FILE), name, str(port)], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}))
        os.environ[f"{name.upper()}_URL"] = f"http://127.0.0.1:{port}"
        wait_for(port, processes[-1])
    yield
    for process in processes:
        process.terminate()
        process.wait(10)


def wait_for(port, process):
    for _ in range(600):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        assert process.poll() is None, "the server ended"
        time.sleep(0.1)
    raise TimeoutError("no server after a minute")


def played(monkeypatch, name, rewards, turns, group_size, run=None):
    """Play the same turns in `group_size` episodes at once: each has its own session with the server."""
    env = f"{FILE}:{name}"
    chat = Chat(TOKENIZER, envs.schemas(envs.load(env)))
    forced = [i for turn in turns for i in (chat.turn("", turn) if isinstance(turn, list) else [*TOKENIZER.encode(turn, add_special_tokens=False), *sorted(chat.stop_ids)[:1]])]
    make = agent.Row
    monkeypatch.setattr(agent, "Row", lambda prompt, **options: make(prompt, **options | {"forced": list(forced)}))
    config = SimpleNamespace(env=env, rewards=rewards, max_turns=4, max_new_tokens=400, max_tokens=4000)
    return rollout(MODEL, TOKENIZER, env, [{"prompt": "Use the tool. ", "env": env}], group_size, limits=LIMITS, pay=rewards_of(config), run=run)


def call(name, **arguments):
    return [{"name": name, "arguments": arguments}]


def test_a_synchronous_client(monkeypatch):
    for t in played(monkeypatch, "EchoToolEnv", f"{FILE}:reward_func=2", [call("echo", message="Hi"), call("echo", message="Hello"), "done"], 3):
        assert [m["content"] for m in t.messages if m["role"] == "tool"] == ["1: Hi", "2: Hello"], t.info
        assert t.reward == pytest.approx(1.0) and t.reward_parts == {"reward_func": 0.5} and t.messages[0]["content"] == "Use the tool. "


def test_a_server_has_only_so_many_sessions_and_a_run_plays_more_episodes(monkeypatch):
    """Of the server's 16 sessions 8 are taken; a client never gives back its own, so environments are kept."""
    run = SimpleNamespace(played=0, kept={}, checkpoint=True, rollout_seconds=0.0, rollout_tokens=0.0, check=lambda: None,
                          ranks=SimpleNamespace(share=range, gather=lambda episodes: [episodes]))
    for _ in range(4):
        for t in played(monkeypatch, "EchoToolEnv", f"{FILE}:reward_func=2", [call("echo", message="Hi"), "done"], 8, run):
            assert [m["content"] for m in t.messages if m["role"] == "tool"] == ["1: Hi"], t.info
    assert len(run.kept["idle"][f"{FILE}:EchoToolEnv"]) == 8


@pytest.mark.parametrize("moves, reward", [((-1, -1, 0), 1.0), ((-1, 0, 0), 0.0)])
def test_an_asynchronous_client(monkeypatch, moves, reward):
    for t in played(monkeypatch, "CatchEnv", None, [call("move", direction=m) for m in moves], 3):
        assert t.messages[0]["content"] == "Use the tool. Ball 0, paddle 2." and t.stop_reason == "done" and t.reward == reward, t.info
        assert [m["content"] for m in t.messages if m["role"] == "tool"][0] == "paddle 1"
