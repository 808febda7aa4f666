"""The server, asked by OpenAI's own client; and as the sampler of a run of ours."""
import threading
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("fastapi")
openai = pytest.importorskip("openai")

import uvicorn  # noqa: E402

from envs import Limits  # noqa: E402
from llm import load_model  # noqa: E402
from window.server import Server  # noqa: E402


@pytest.fixture(scope="module")
def served():
    """A server of the tiny model. Yields its address and the Server."""
    model, tokenizer = load_model("tiny", train=False)
    config = SimpleNamespace(token=None, model_path="tiny", env="equations")
    server = Server(config, model, tokenizer, Limits())
    http = uvicorn.Server(uvicorn.Config(server.app, port=0, log_level="error"))
    threading.Thread(target=http.run, daemon=True).start()
    while not http.started:
        time.sleep(0.02)
    port = http.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}", server
    http.should_exit = True


@pytest.fixture
def client(served):
    return openai.OpenAI(base_url=f"{served[0]}/v1", api_key="x", max_retries=0)


HELLO = [{"role": "user", "content": "Solve 2x=6"}]


def test_chat(client):
    reply = client.chat.completions.create(model="base", messages=HELLO, max_tokens=8, n=2, seed=1)
    again = client.chat.completions.create(model="base", messages=HELLO, max_tokens=8, n=2, seed=1)
    assert [c.message.content for c in reply.choices] == [c.message.content for c in again.choices]
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


def test_streamed_text_is_the_text(client):
    options = dict(model="base", messages=HELLO, max_tokens=12, seed=3)
    whole = client.chat.completions.create(**options).choices[0].message.content
    pieces = [c.choices[0].delta.content or ""
              for c in client.chat.completions.create(**options, stream=True)]
    assert "".join(pieces) == whole and len(pieces) > 3
