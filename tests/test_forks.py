"""bench/forks: every patch applies to a copy of the repository, and the fork runs, saves and is resumed."""
import json
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import bandit
import pytest
from safetensors.torch import load_file

from llm import load_model
from llm.engine import Engine, Row

ROOT = Path(__file__).parent.parent
PATCHES = sorted((ROOT / "bench" / "forks").glob("*.patch"))
CODE = ("*.py", "envs", "episodes", "experiment", "llm", "window")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return bandit.school(tmp_path_factory.mktemp("base"))


def fork(patch, folder):
    """A copy of the code with the patch applied."""
    for pattern in CODE:
        for path in ROOT.glob(pattern):
            copy = shutil.copytree if path.is_dir() else shutil.copy
            copy(path, folder / path.name)
    subprocess.run(["git", "apply", str(patch)], cwd=folder, check=True)
    return folder


def run(folder, base, output, steps, *words):
    """Run the fork's grpo.py as a user would. Returns the lines of its log."""
    done = subprocess.run(
        [sys.executable, "grpo.py", "--model_path", base, "--env", bandit.ENV, "--tasks_per_step", "3", "--group_size", "4", "--eval_tasks", "2",
         "--max_steps", str(steps), "--output_dir", output, *words], cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT / "tests")}, capture_output=True,
        text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


class Server(ThreadingHTTPServer):
    """Answers /v1/completions from token ids, as vLLM does, with the model of a folder."""

    def __init__(self, folder):
        self.model, _ = load_model(folder, dtype="float32", train=False)
        self.lock = threading.Lock()
        self.requests = []
        super().__init__(("127.0.0.1", 0), Completions)


class Completions(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        row = Row(body["prompt"], seed=body["seed"], limit=body["max_tokens"])
        with self.server.lock:
            self.server.requests.append(body)
            engine = Engine(self.server.model, slots=1, stop_ids=body["stop_token_ids"], temperature=body["temperature"])
            engine.add([row])
            while engine.busy:
                engine.step()
        choice = {"token_ids": row.turn, "logprobs": {"token_logprobs": row.logprobs}}
        answer = json.dumps({"choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        pass


@pytest.fixture
def server(base):
    with Server(base) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_there_are_five_forks():
    assert {p.stem for p in PATCHES} == {"advantage", "clip_cov", "server_engine", "teaching", "value_head"}


@pytest.mark.parametrize("patch", PATCHES, ids=lambda p: p.stem)
def test_a_fork_applies_runs_and_is_resumed(patch, base, tmp_path, server):
    (tmp_path / "fork").mkdir()
    folder = fork(patch, tmp_path / "fork")
    words = {"advantage": ["--credit", "best"], "clip_cov": ["--clip_cov", "0.1"],
             "server_engine": ["--server", f"http://127.0.0.1:{server.server_port}"]}.get(patch.stem, [])
    # The server plays the model that the run starts from: a learning rate of 0 keeps the two alike.
    words += ["--learning_rate", "0" if patch.stem == "server_engine" else "1e-3", "--save_every", "1"]
    lines = run(folder, base, tmp_path / "out", 2, *words)
    assert len(lines) == 2 and all(line["grad_norm"] is not None for line in lines)
    checkpoint = tmp_path / "out" / "checkpoints" / "step_000002"
    if patch.stem == "value_head":
        head = load_file(checkpoint / "added.safetensors")
        assert lines[-1]["value_loss"] > 0 and head["value_head.weight"].any() and head["value_head.weight"].shape[0] == 1
    if patch.stem == "server_engine":
        assert len(server.requests) >= 24 and all(line["sampler_gap"] < 1e-4 for line in lines)
    if patch.stem == "teaching":
        run(ROOT, base, tmp_path / "whole", 2, *words, "--kl_coef", "0")
        name = "checkpoints/step_000002/adapter_model.safetensors"
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    longer = run(folder, base, tmp_path / "out", 3, *words, "--resume")
    assert longer[:2] == lines and len(longer) == 3
