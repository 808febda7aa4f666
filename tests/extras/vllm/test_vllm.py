"""extras/vllm/servers.py against a stand-in for vLLM: what a run asks, what it checks, and how every fault of a server ends."""
import json
import shutil
import socket
import ssl
import subprocess
import threading
import time
from concurrent.futures import wait
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from programs import Program
from test_distributed import ranks_of_two
from test_resume import config, place  # noqa: F401  (a fixture)

import grpo
import lora
import reward_weighted
from core.config import UserError
from layers import load_model
from core.logprobs import token_logprobs
from extras.vllm import servers as vllm
from core.engine import Engine, Row
from lora import adapter_tensors, merged, merged_to_train, reference

ROOT = Path(grpo.__file__).parent


class StandIn(ThreadingHTTPServer):
    """Answers the four requests as vLLM does, with models that it loads out of the folders it is told.

    Attributes:
        requests: the bodies of /v1/completions. loads, unloads: names of adapters.
        fault: called with a body of /v1/completions before it is answered; what it returns is the answer: (status, text), or None.
    """
    lock = threading.Lock()  # transformers loads one model at a time in a process
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, base, port=0):
        self.base = base
        self.requests, self.loads, self.unloads, self.keys = [], [], [], set()
        self.fault = lambda body: None
        self.refusal = None  # of loading: (status, text)
        self.context = 2048
        self.is_raw = self.ignores_adapters = self.is_deaf = False
        self.models = {}
        super().__init__(("127.0.0.1", port), Answers)
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def die(self):
        self.shutdown()
        self.server_close()

    def hang(self):
        """Never answer, also after the test: a model would be loaded beside that of another test."""
        threading.Event().wait()

    def load(self, name, path):
        self.loads.append(name)
        with self.lock:
            self.models[name], _ = lora.load_model(self.base if self.ignores_adapters else path, dtype="float32", train=False)

    def turn(self, body):
        row = Row(body["prompt"], seed=len(self.requests), limit=body["max_tokens"])
        model = self.models[body["model"]]
        with self.lock, merged(model):
            engine = Engine(model, slots=1, stop_ids=body["stop_token_ids"], temperature=body["temperature"])
            engine.add([row])
            while engine.busy:
                engine.step()
            if self.is_raw:
                ids = torch.tensor([body["prompt"] + row.turn])
                with torch.no_grad():
                    logits = model(ids).logits[0, len(body["prompt"]) - 1:-1].float()
                row.logprobs = logits.log_softmax(1)[range(len(row.turn)), row.turn].tolist()
        return row.turn, row.logprobs


class Answers(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.server.is_deaf:
            self.server.hang()
        data = [{"id": "base", "max_model_len": self.server.context, "parent": None}]
        self.answer(200, {"data": data + [{"id": name, "parent": "base", "max_model_len": None} for name in self.server.models]})

    def do_POST(self):
        server = self.server
        server.keys.add(self.headers["Authorization"])
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/v1/load_lora_adapter":
            if server.refusal:
                return self.answer(*server.refusal)
            if body["lora_name"] in server.models:
                return self.answer(400, {"error": {"message": f"The lora adapter '{body['lora_name']}' has already been loaded."}})
            server.load(body["lora_name"], body["lora_path"])
            return self.answer(200, "Success: LoRA adapter added.")
        if self.path == "/v1/unload_lora_adapter":
            server.unloads.append(body["lora_name"])
            del server.models[body["lora_name"]]
            return self.answer(200, "Success: LoRA adapter removed.")
        server.requests.append(body)
        answer = server.fault(body)
        if answer:
            return self.answer(*answer)
        if body["model"] not in server.models:
            return self.answer(404, {"error": {"message": f"The model {body['model']} does not exist."}})
        ids, logprobs = server.turn(body)
        return self.answer(200, turn(ids, logprobs))

    def answer(self, status, content):
        text = (content if isinstance(content, str) else json.dumps(content)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


def turn(ids, logprobs):
    return {"choices": [{"token_ids": ids, "logprobs": {"token_logprobs": logprobs}}]}


@pytest.fixture
def server(place, monkeypatch):  # noqa: F811
    monkeypatch.setattr(vllm, "TRIES", 3)
    monkeypatch.setattr(vllm, "REQUESTS", 8)
    server = StandIn(str(place / "base"))
    yield server
    server.die()


@pytest.fixture
def other(place):  # noqa: F811
    server = StandIn(str(place / "base"))
    yield server
    server.die()


def patch_sleep(monkeypatch, sleep):
    """Replace the pauses of the client alone: a rollout's watch sleeps, too, and would spin."""
    monkeypatch.setattr(vllm, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic, time_ns=time.time_ns))


def played(place, out, servers, **options):  # noqa: F811
    """Train for two steps with these servers; return the result and the lines of the log."""
    options = {"dtype": "float32", "tasks_per_step": 2, "lora_r": 2, "max_steps": 2, "eval_tasks": 0, **options}
    result = grpo.train(config(grpo, place, out, sampler=",".join(s.url for s in servers), **options))
    return result, lines(out)


def lines(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


# ------------------------------------------------------------------------------------- a run with servers
def test_a_run_asks_its_servers_and_they_play_its_policy(place, tmp_path, server, other, capsys):  # noqa: F811
    _, log = played(place, tmp_path / "r", [server, other], tasks_per_step=3, max_steps=3, eval_tasks=2, eval_every=1)
    assert all(line["sampler_gap"] < 1e-4 for line in log)
    assert all(line["importance_weight"] == pytest.approx(1, abs=1e-3) and line["importance_capped"] == 0 for line in log)
    assert "its log-probabilities differ by" in capsys.readouterr().out
    # One name a step, and the evaluation after a step shares it with the next one. In the end all are gone.
    prefix = server.loads[0].split("-")[0]
    names = [f"{prefix}-step-{i:06d}" for i in (0, 1, 2, 3)]
    checks = [f"{prefix}-check"]
    assert server.loads == other.loads == [names[0], *checks, *names[1:]]
    assert server.unloads == other.unloads == [*checks, *names] and not server.models and not other.models
    assert not list((tmp_path / "r" / "sampler").iterdir())
    # A group's prompt is asked of one server, but for the check's, which all servers get.
    firsts = [{tuple(b["prompt"]) for b in s.requests if b["model"] == names[1]} for s in (server, other)]
    assert all(firsts) and not firsts[0] & firsts[1]
    assert server.keys == {"Bearer none"}


def test_the_key_of_a_server_is_that_of_its_own_variable(place, tmp_path, server, monkeypatch):  # noqa: F811
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    played(place, tmp_path / "r", [server], max_steps=1)
    assert server.keys == {"Bearer secret"}


def test_other_algorithms_share_one_client_among_rollout_and_evaluation(place, tmp_path, server):  # noqa: F811
    options = dict(sampler=server.url, dtype="float32", lora_r=2, max_steps=1, tasks_per_step=2, batch_size=2)
    reward_weighted.train(config(reward_weighted, place, tmp_path / "r", **options))
    assert [name[-6:] for name in server.loads] == ["000000", "-check", "000001"]


@pytest.mark.parametrize("cut, sent", [({}, {"top_k": -1, "top_p": 1.0}), ({"top_k": 7, "top_p": 0.9}, {"top_k": 7, "top_p": 0.9})])
def test_what_a_server_is_asked_for(cut, sent):
    """Ids and their log-probabilities, without which it answers in text, and the whole distribution unless it is cut on purpose."""
    engine = vllm.ServerEngine(SimpleNamespace(name="a"), None, stop_ids={9, 2}, temperature=0.5, **cut)
    assert engine.body == {"model": "a", "stop_token_ids": [2, 9], "logprobs": 0, "return_token_ids": True, "temperature": 0.5, "min_p": 0,
                           "repetition_penalty": 1, **sent}


def test_importance_is_corrected_unless_the_user_or_the_loss_says_otherwise():
    assert grpo.settle(grpo.Config(sampler="http://x")).importance_correction == 2.0
    assert grpo.settle(grpo.Config(sampler="http://x", importance_correction=5.0)).importance_correction == 5.0
    assert grpo.settle(grpo.Config(sampler="http://x", loss="vespo")).importance_correction is None
    for loss in ("dppo", "deepseek"):  # they compare the policy with what has sampled
        assert grpo.settle(grpo.Config(sampler="http://x", loss=loss)).importance_correction is None
    assert grpo.settle(grpo.Config()).importance_correction is None


def test_what_is_logged_of_importance_weights():
    trainer = torch.tensor([[4.0, 1.0, 9.0], [0.5, 0.5, 2.0]]).log()
    mask = torch.tensor([[1, 1, 0], [1, 1, 0]])
    advantages, shares = grpo.weighted(3.0 * mask, trainer, torch.zeros(2, 3), mask, 2.0)
    assert shares == pytest.approx({"importance_weight": 1.0, "importance_capped": 0.25, "importance_left_out": 0.0})
    assert advantages.tolist() == [pytest.approx([6.0, 3.0, 0.0]), pytest.approx([1.5, 1.5, 0.0])]


def test_a_run_that_decodes_here_imports_no_client(python):
    check = "import sys, grpo; sys.exit('extras.vllm.servers' in sys.modules or 'extras.vllm.ahead' in sys.modules)"
    assert python("-c", check).returncode == 0


# ------------------------------------------------------------------------------------------------- the check
def refused(place, out, server, **options):  # noqa: F811
    with pytest.raises(UserError) as error:
        played(place, out, [server], **options)
    assert not (out / "trajectories.jsonl").exists()
    return str(error.value)


def test_another_base_is_found(place, tmp_path, server):  # noqa: F811
    def other_base(name, path, load=server.load):
        load(name, path)
        with torch.no_grad():
            server.models[name].get_input_embeddings().weight.mul_(1.5)
    server.load = other_base
    assert "plays another model than --model_path" in refused(place, tmp_path / "r", server)


def test_an_adapter_that_is_ignored_is_found_before_it_has_learned_anything(place, tmp_path, server):  # noqa: F811
    server.ignores_adapters = True
    assert "leaves the adapter out" in refused(place, tmp_path / "r", server)


def test_raw_logprobs_are_found_where_they_differ(place, tmp_path, server):  # noqa: F811
    server.is_raw = True
    # Born weights are nearly uniform at any temperature, the random adapter's are not.
    assert "--logprobs-mode processed_logprobs" in refused(place, tmp_path / "r", server, temperature=0.5)


def test_at_temperature_1_raw_logprobs_are_right(place, tmp_path, server):  # noqa: F811
    server.is_raw = True
    played(place, tmp_path / "r", [server], max_steps=1)


def test_too_short_a_context_is_refused(place, tmp_path, server):  # noqa: F811
    server.context = 199
    assert "--max-model-len 200" in refused(place, tmp_path / "r", server)
    server.context = 200
    played(place, tmp_path / "long", [server], max_steps=1)


def test_the_shortest_context_of_several_servers_counts(place, tmp_path, server, other):  # noqa: F811
    other.context = 128
    with pytest.raises(UserError, match="--max_tokens 200: the server's context has 128"):
        played(place, tmp_path / "r", [server, other])


@pytest.mark.parametrize("status, answer, hint", [
    (400, "LoRA rank 2 is greater than max_lora_rank 1.", "--max-lora-rank"),
    (404, "Not Found", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"),
    (401, "Unauthorized", "401"), (503, "Starting", "start it where it sees")])
def test_a_server_that_loads_no_adapter_is_named_with_its_reason(place, tmp_path, server, status, answer, hint):  # noqa: F811
    server.refusal = status, answer
    said = refused(place, tmp_path / "r", server)
    assert hint in said and answer in said and server.url in said


def test_one_server_of_two_that_refuses_the_adapter_is_an_error(place, tmp_path, server, other):  # noqa: F811
    other.refusal = 400, "LoRA rank 2 is greater than max_lora_rank 1."
    with pytest.raises(UserError, match=f"{other.url}.*greater than max_lora_rank"):
        played(place, tmp_path / "r", [server, other])


def test_nobody_answers(place, tmp_path, server):  # noqa: F811
    server.die()
    assert "no vLLM server answers there" in refused(place, tmp_path / "r", server)


@pytest.mark.parametrize("addresses, url", [("127.0.0.1:8333", "127.0.0.1:8333"), ("http://127.0.0.1:1,,", ""), (" ", "")])
def test_what_is_no_address_is_named(addresses, url):
    with pytest.raises(UserError, match=f"--sampler {addresses}: '{url}' does not begin with http://"):
        vllm.Servers(addresses, None)


def test_all_weights_are_refused(place, tmp_path, server):  # noqa: F811
    assert "train an adapter: --lora_r 16" in refused(place, tmp_path / "r", server, lora_r=0)


@torch.no_grad()
def our_logprobs(model, prompt, ids):
    """What the policy, merged as in an update, gives to the ids after a prompt."""
    with merged_to_train(model):
        mask = torch.tensor([[0] * len(prompt) + [1] * len(ids)])
        return token_logprobs(model, torch.tensor([prompt + ids]), mask)[0][0, len(prompt):]


def answers_of(model, errors=0.0, adapter=True):
    """A stand-in for `Servers` whose only server says our log-probabilities of four tokens, with errors."""
    ids = [8, 9, 10, 11]

    def turn(url, body):
        with nullcontext() if adapter else reference(model, None):
            ours = our_logprobs(model, body["prompt"], ids)
        return ids, (ours + torch.tensor([1, -1, 1, -1]) * errors).tolist()  # each token counts, not the mean of all
    return SimpleNamespace(urls=["third"], prefix="b", publish=lambda *_: None, retire=lambda **_: None, turn=turn)


def test_the_check_adds_to_b_alone_and_takes_it_back(place):  # noqa: F811
    model, _ = load_model(str(place / "adapter"), lora_r=2, dtype="float32")
    exact, seen = {name: p.clone() for name, p in adapter_tensors(model).items()}, []
    servers = answers_of(model)
    servers.publish = lambda *_: seen.append({name: torch.equal(p, exact[name]) for name, p in adapter_tensors(model).items()})
    vllm.check_servers(servers, model, {"prompt": [5, 6, 7], "temperature": 1.0})
    assert len(seen) == 1 and all(same == ("lora_A" in name) for name, same in seen[0].items())
    assert all(torch.equal(p, exact[name]) for name, p in adapter_tensors(model).items())


def test_a_server_may_differ_by_what_bfloat16_explains(place):  # noqa: F811
    model, _ = load_model(str(place / "base"), lora_r=2)
    vllm.check_servers(answers_of(model, 0.07), model, {"prompt": [5, 6, 7], "temperature": 1.0})
    for error in (0.2, float("nan")):  # an adapter that the base has merged and that is loaded again has made 0.2
        with pytest.raises(UserError, match="--sampler third: .*: it plays another model"):
            vllm.check_servers(answers_of(model, error), model, {"prompt": [5, 6, 7], "temperature": 1.0})


def test_a_sampler_gap_above_the_bound_ends_the_run_unless_the_episodes_are_old(place):  # noqa: F811
    vllm.check_gap(3, {"sampler_gap": vllm.GAP, "reward": 1.0}, {})
    vllm.check_gap(3, {"sampler_gap": 9.0, "staleness": 1}, {})
    for gap in (1.1 * vllm.GAP, float("nan")):
        with pytest.raises(UserError, match="sampler_gap .* of step 3"):
            vllm.check_gap(3, {"sampler_gap": gap, "staleness": 0}, {})


# ---------------------------------------------------------------------------------------------------- faults
SOUND = [-1.0, -2.0]
FAULTS = {
    "500": (500, "CUDA out of memory"),
    "html": (200, "<html>gateway</html>"),
    "half": (200, '{"choices": [{"token_ids": [4'),
    "deep": (200, '{"a":' * 100_000),
    "nothing": (200, {"choices": []}),
    "no ids": (200, {"choices": [{"text": "yes", "logprobs": {"token_logprobs": SOUND}}]}),
    "empty": (200, turn([], [])),
    "too few logprobs": (200, turn([4, 5, 6], SOUND)),
    "more tokens than logprobs": (200, turn([4] * 6, [-1.0] * 5)),
    "too many tokens": (200, turn([4] * 7, [-1.0] * 7)),
    "unknown ids": (200, turn([1000] * 6, [-1.0] * 6)),
    "ids below 0": (200, turn([-1] * 6, [-1.0] * 6)),
    "probability 0": (200, turn([4] * 6, [-9999.0] * 6)),  # as vLLM says it
    "text": (200, turn(["4"] * 6, [-1.0] * 6)),
    "NaN": (200, '{"choices": [{"token_ids": [4, 4, 4, 4, 4, 4], "logprobs": {"token_logprobs": [NaN, 0, 0, 0, 0, 0]}}]}'),
    "probability 2": (200, turn([4] * 6, [0.7] * 6)),
    "cut short": (200, turn([4, 4], SOUND)),
    "a stop id inside": (200, turn([4, 2, 4, 4, 4, 4], [-1.0] * 6)),
    "two stop ids": (200, turn([4, 2, 2], [-1.0] * 3)),
    "refused": (400, {"error": {"message": "top_k is not supported"}}),
    "busy": (429, "too many requests"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_an_answer_without_sense_is_no_turn(server, name):
    server.fault = lambda body: FAULTS[name]
    body = {"prompt": [1], "max_tokens": 6, "stop_token_ids": [2]}
    with pytest.raises(UserError) as error:
        vllm.Servers.turn(SimpleNamespace(vocabulary=1000), server.url, body)
    assert isinstance(error.value, vllm.Lost) == (name != "refused")


def test_a_redirect_is_named_by_its_reason(server):
    server.fault = lambda body: (307, "")
    with pytest.raises(UserError, match="307: Temporary Redirect") as error:
        vllm.ask(f"{server.url}/v1/completions", {"prompt": [1]})
    assert not isinstance(error.value, vllm.Lost)


def test_what_fails_once_during_the_check_is_asked_again(place, tmp_path, server, monkeypatch):  # noqa: F811
    patch_sleep(monkeypatch, lambda seconds: None)
    faults = [FAULTS["500"], FAULTS["half"]]
    server.fault = lambda body: faults.pop() if faults and len(server.requests) in (2, 5) else None
    played(place, tmp_path / "r", [server], max_steps=1)
    assert not faults


@pytest.mark.parametrize("data", [[], [{"id": "base"}], [{"id": "base", "max_model_len": None}], [{"id": "a", "parent": "base", "max_model_len": 9}], None])
def test_a_server_that_does_not_say_its_context_is_none(server, monkeypatch, data):
    monkeypatch.setattr(vllm, "ask", lambda url: json.dumps({"data": data}))
    with pytest.raises(UserError, match="no vLLM server answers there"):
        vllm.context_of(server.url)


@pytest.mark.parametrize("name, says", [
    ("500", "500: CUDA out of memory"), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("half", "the answer is no turn"), ("refused", "400: .*not supported")))])
def test_a_fault_ends_the_run_which_is_saved_and_continues_later(place, tmp_path, server, monkeypatch, name, says):  # noqa: F811
    """The second step's last request fails: no episode of that step is recorded."""
    patch_sleep(monkeypatch, lambda seconds: None)
    out, turns = tmp_path / "r", []

    def fails(body):
        turns.append(body) if body["model"].endswith("step-000001") else None
        return FAULTS[name] if len(turns) >= 6 else None
    server.fault = fails
    with pytest.raises(UserError, match=f"--sampler {server.url}[^ ]*: {says}") as error:
        played(place, out, [server])
    assert error.value.__notes__[0].startswith("step 1 is saved; continue with: ")
    assert {json.loads(line)["step"] for line in (out / "trajectories.jsonl").open()} == {0}
    server.fault = lambda body: None
    _, log = played(place, out, [server], resume=True)
    assert [line["step"] for line in log] == [0, 1] and log[1]["sampler_gap"] < 1e-4


def test_a_server_that_dies_or_hangs_ends_the_run_too(place, tmp_path, server, monkeypatch):  # noqa: F811
    patch_sleep(monkeypatch, lambda seconds: None)
    monkeypatch.setattr(vllm, "PATIENCE", 1)
    monkeypatch.setattr(vllm, "TRIES", 2)
    server.fault = lambda body: (setattr(server, "is_deaf", True), server.hang()) if "check" not in body["model"] else None
    with pytest.raises(UserError, match="TimeoutError: timed out"):
        played(place, tmp_path / "hangs", [server])
    server.is_deaf = False
    monkeypatch.setattr(vllm, "PATIENCE", 30)
    server.fault = lambda body: threading.Thread(target=server.die).start() if body["model"].endswith("1") else None
    with pytest.raises(UserError, match="Connection refused|ConnectionReset|RemoteDisconnected"):
        played(place, tmp_path / "dies", [server], max_steps=4)


@pytest.mark.slow
def test_a_slow_server_is_waited_for(place, tmp_path, server, monkeypatch):  # noqa: F811
    monkeypatch.setattr(vllm, "PATIENCE", 1)
    server.fault = lambda body: time.sleep(0 if "check" in body["model"] else 2.5)
    played(place, tmp_path / "r", [server], max_steps=1)
    # Nothing was asked twice: each request became a turn.
    masks = [[0, *json.loads(line)["loss_mask"]] for line in (tmp_path / "r" / "trajectories.jsonl").open()]
    turns = sum(a < b for mask in masks for a, b in zip(mask, mask[1:]))
    assert turns == sum("check" not in body["model"] for body in server.requests)


def test_a_server_that_hangs_while_its_health_answers_gets_one_hour(server, monkeypatch):
    monkeypatch.setattr(vllm, "PATIENCE", 1)
    monkeypatch.setattr(vllm, "DEADLINE", 2)
    server.fault = lambda body: server.hang()
    with pytest.raises(vllm.Lost, match="no answer in 2 s"):
        vllm.persist(3, vllm.ask, f"{server.url}/v1/completions", {"prompt": [1]})
    assert len(server.requests) == 1


@pytest.mark.skipif(not shutil.which("openssl"), reason="makes a certificate")
def test_a_slow_server_is_waited_for_behind_tls_too(server, tmp_path, monkeypatch):
    """TLS 1.3 sends tickets before the answer: that a socket can be read does not say that the answer is there."""
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate, "-days", "1", "-subj", "/CN=localhost",
                    "-addext", "subjectAltName=DNS:localhost"], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.load = lambda name, path: time.sleep(2.5)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    monkeypatch.setattr(vllm, "PATIENCE", 1)
    answer = vllm.ask(f"https://localhost:{server.server_port}/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "b"})
    assert answer.startswith(b"Success")


def test_a_server_that_is_named_twice_is_one(place, tmp_path, server):  # noqa: F811
    twin = SimpleNamespace(url=f"{server.url}/v1/")  # as OpenAI's clients are told
    played(place, tmp_path / "r", [server, server, twin], max_steps=1)
    assert len(server.loads) == len(set(server.loads))


def test_a_server_that_was_started_again_gets_its_adapter_again(place, tmp_path, server):  # noqa: F811
    turns = []

    def forgets(body):
        turns.append(body)
        if len(turns) == 14:
            server.models.clear()
    server.fault = forgets
    _, log = played(place, tmp_path / "r", [server], max_steps=3)
    assert len(server.loads) > 4 and all(line["sampler_gap"] < 1e-4 for line in log)


def test_half_of_two_servers_gone_leaves_the_work_to_the_other(place, tmp_path, server, other, monkeypatch):  # noqa: F811
    patch_sleep(monkeypatch, lambda seconds: time.sleep(0.01))

    def dies(body):
        if body["model"].endswith("step-000001"):
            other.fault = lambda body: None
            threading.Thread(target=other.die).start()
    other.fault = dies
    _, log = played(place, tmp_path / "r", [server, other], max_steps=4)
    assert len(log) == 4 and all(line["episodes"] == 6 and line["sampler_gap"] < 1e-4 for line in log)
    assert server.loads[-1].endswith("step-000003") and other.loads[-1].endswith("step-000001")


def test_a_machine_that_is_off_costs_seconds(monkeypatch):
    """Here no program accepts, and the system drops what comes when the queue is full."""
    monkeypatch.setattr(vllm, "CONNECT", 0.5)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as off, socket.create_connection(off.getsockname()):
        began = time.monotonic()
        with pytest.raises(vllm.Lost, match="TimeoutError"):
            vllm.ask(f"http://127.0.0.1:{off.getsockname()[1]}/v1/models")
    assert time.monotonic() - began < 5


def test_a_server_that_is_gone_is_asked_to_load_once_a_step_and_taken_up_when_it_is_back(place, tmp_path, server, other, monkeypatch):  # noqa: F811
    patch_sleep(monkeypatch, lambda seconds: time.sleep(0.01))
    asked, ask, back = [], vllm.ask, []

    def records(url, body=None):
        if "adapter" not in url or not url.startswith(other.url):
            return ask(url, body)
        asked.append(f"{url.split('/v1/')[1].partition('_')[0]} {body['lora_name'][-6:]}")
        try:
            return ask(url, body)
        finally:
            if asked[-1] == "load 000004":
                back.append(StandIn(other.base, other.server_port))
    monkeypatch.setattr(vllm, "ask", records)
    other.fault = lambda body: threading.Thread(target=other.die).start() if body["model"].endswith("1") else None
    _, log = played(place, tmp_path / "r", [server, other], max_steps=6)
    back[0].die()
    assert len(log) == 6 and back[0].loads[0].endswith("000005")
    while asked.count("load 000002") > 1:
        asked.remove("load 000002")  # nobody had noticed yet that it was gone
    assert asked[:8] == ["load 000000", "load -check", "unload -check", *(f"load {step:06d}" for step in (1, 2, 3, 4, 5))]


def test_a_busy_server_is_waited_for_and_keeps_its_groups(place, tmp_path, server, other, monkeypatch):  # noqa: F811
    """It refuses more often than a request is tried."""
    patch_sleep(monkeypatch, lambda seconds: time.sleep(0.01))
    refusals = [FAULTS["busy"]] * 60
    other.fault = lambda body: refusals.pop() if refusals and "check" not in body["model"] and len(other.requests) > 3 else None
    _, log = played(place, tmp_path / "r", [server, other], tasks_per_step=3)
    assert not refusals and len(log) == 2 and all(line["sampler_gap"] < 1e-4 for line in log)
    firsts = [{tuple(b["prompt"]) for b in s.requests if b["model"].endswith("step-000001")} for s in (server, other)]
    assert all(firsts) and not firsts[0] & firsts[1]


def test_a_busy_server_is_asked_for_an_hour(monkeypatch):
    clock, pauses = [0.0], []
    monkeypatch.setattr(vllm, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=lambda seconds: (pauses.append(seconds), clock.append(clock.pop() + seconds))))

    def busy():
        raise vllm.Busy("429")
    with pytest.raises(vllm.Busy):
        vllm.persist(vllm.TRIES, busy)
    assert vllm.DEADLINE < sum(pauses) <= vllm.DEADLINE + vllm.PATIENCE == 3630 and max(pauses) == vllm.PATIENCE


def test_pauses_before_the_last_try_are_half_a_minute(monkeypatch):
    pauses = []
    patch_sleep(monkeypatch, pauses.append)

    def lost():
        raise vllm.Lost("gone")
    with pytest.raises(vllm.Lost):
        vllm.persist(vllm.TRIES, lost)
    assert len(pauses) == vllm.TRIES - 1 and 30 < sum(pauses) < 35


@pytest.mark.parametrize("silent", ["completions", "load"])
def test_a_signal_leaves_while_a_server_is_silent(place, tmp_path, server, silent):  # noqa: F811
    asked = threading.Event()

    def hangs(body):
        if body["model"].endswith("step-000001"):
            asked.set()
            server.hang()
    if silent == "completions":
        server.fault = hangs
    else:
        server.load = lambda name, path, load=server.load: (hangs({"model": name}), load(name, path))
    program = Program(ROOT / "grpo.py", "--model_path", place / "base", "--output_dir", "r", "--sampler", server.url, "--dtype", "float32",
                      "--max_samples", "200", "--tasks_per_step", "2", "--group_size", "2", "--max_new_tokens", "6", "--max_tokens", "200",
                      "--eval_tasks", "0", "--lora_r", "2", cwd=tmp_path)
    assert asked.wait(120), program.said("stderr")
    began = time.monotonic()
    program.send_signal(15)
    _, errors = program.communicate(timeout=60)
    assert program.returncode == 143 and time.monotonic() - began < 10
    assert "stopped by SIGTERM after step 1; continue with: python" in errors


# ----------------------------------------------------------------------------------------------- a step ahead
def test_a_step_ahead_is_played_by_the_adapter_before_the_update(place, tmp_path, server):  # noqa: F811
    _, log = played(place, tmp_path / "r", [server], max_steps=4, rollout_ahead=1, eval_tasks=2, eval_every=1, learning_rate=0.05, entropy_coef=0.1)
    assert [line["staleness"] for line in log] == [0, 1, 1, 1]
    assert all(line["groups_dropped"] == 0 for line in log)  # what its thread has measured
    # The prompts tell which step a request was for.
    prompts = {}
    for row in map(json.loads, (tmp_path / "r" / "trajectories.jsonl").open()):
        start = row["token_ids"][:row["loss_mask"].index(1)]
        prompts.setdefault(row["step"], set()).add(tuple(start))
    for step, name in ((1, "step-000000"), (2, "step-000001"), (3, "step-000002")):
        assert {b["model"][-11:] for b in server.requests if tuple(b["prompt"]) in prompts[step]} == {name}
    # What was sampled one version ago differs from the trainer's log-probabilities by the update.
    assert log[0]["sampler_gap"] < 1e-4 and all(line["sampler_gap"] > 1e-3 for line in log[1:])
    timing = [json.loads(line) for line in (tmp_path / "r" / "timing.jsonl").open()]
    assert all("rollout_seconds" in line for line in timing)
    # While it waits nothing is played: that gives no speed.
    assert ["rollout_tokens_per_second" in line for line in timing] == [True, False, False, False]


def test_a_run_ahead_continues_with_a_step_of_its_own_version(place, tmp_path, server, monkeypatch):  # noqa: F811
    with monkeypatch.context() as patch:
        # A run that a signal stops leaves its adapters: resumed, it left them on the servers for good.
        patch.setattr(vllm.Servers, "retire", lambda self, kept=0: None)
        played(place, tmp_path / "r", [server], max_steps=2, rollout_ahead=1)
    # Whatever the names of an earlier run are, they are older than its own.
    server.models["z-step-000009"] = None
    (tmp_path / "r" / "sampler" / "z-step-000009").mkdir()
    _, log = played(place, tmp_path / "r", [server], max_steps=4, rollout_ahead=1, resume=True)
    assert [line["staleness"] for line in log] == [0, 1, 0, 1]
    assert len({name.partition("-")[0] for name in server.loads}) == 2  # a server knows the names of the first run
    assert not server.models and not list((tmp_path / "r" / "sampler").iterdir())


def test_a_fault_in_a_step_ahead_ends_the_run(place, tmp_path, server, monkeypatch):  # noqa: F811
    patch_sleep(monkeypatch, lambda seconds: None)
    served = []

    def fails(body):
        served.append(body)
        return FAULTS["500"] if len(served) > 24 else None
    server.fault = fails
    with pytest.raises(UserError, match="500: CUDA out of memory") as error:
        played(place, tmp_path / "r", [server], max_steps=9, rollout_ahead=1)
    assert "is saved; continue with" in error.value.__notes__[0]


def test_ahead_needs_a_sampler():
    with pytest.raises(UserError, match="--rollout_ahead needs --sampler"):
        grpo.settle(grpo.Config(rollout_ahead=1))


# --------------------------------------------------------------------------------------------- several ranks
def test_rows_of_a_group_ask_one_server_and_ranks_begin_with_different_ones():
    """Where each rank plays one task, all of them would else ask the first server."""
    asked = []
    servers = SimpleNamespace(name="a", living=["u"], is_checked=False, complete=lambda body, number: asked.append((body["prompt"], number)),
                              run=SimpleNamespace(writes=False, ranks=SimpleNamespace(rank=1, world=2)))
    engine = vllm.ServerEngine(servers, None, stop_ids={2}, temperature=1.0)
    engine.add([Row([97 + group], group=group) for group in (0, 0, 1, 2)])
    wait(engine.asked)
    assert sorted(asked) == [([97], 1), ([97], 1), ([98], 2), ([99], 3)]
    assert servers.is_checked  # by rank 0 alone


def test_a_turn_continues_all_that_its_row_has_seen_and_rows_wait_for_a_place(monkeypatch):
    """One of the two servers lives, and two ranks share its four places."""
    asked, together = [], []

    def complete(body, number):
        together.append(len(engine.asked))
        asked.append((body["prompt"], body["max_tokens"]))
        return [5, 2], [-1.0, -0.5]
    servers = SimpleNamespace(name="a", urls=["u", "gone"], living=["u"], is_checked=True, complete=complete,
                              run=SimpleNamespace(writes=True, ranks=SimpleNamespace(rank=0, world=2)))
    monkeypatch.setattr(vllm, "REQUESTS", 4)
    engine = vllm.ServerEngine(servers, None, stop_ids={2}, temperature=1.0)
    rows = [Row([10 + i], group=i, limit=6) for i in range(5)]
    engine.add(rows)
    while engine.busy:
        for row in engine.step():
            assert row.turn == [5, 2] and row.logprobs == [-1.0, -0.5]
            if row is rows[0] and len(row.pending) == 3:
                engine.extend(row, [7, 8], 3)
    assert sorted(asked) == [([10], 6), ([10, 5, 2, 7, 8], 3), *(([10 + i], 6) for i in range(1, 5))]
    assert max(together) <= 2


@pytest.mark.parametrize("ahead", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_each_rank_asks_for_its_share_and_one_of_them_loads(place, tmp_path, server, ahead):  # noqa: F811
    words = f"""--model_path {place}/base --output_dir {tmp_path}/r --sampler {server.url} --dtype float32 --max_samples 200 --tasks_per_step 3
        --group_size 2 --max_new_tokens 6 --max_tokens 200 --eval_tasks 1 --lora_r 2 --max_steps 3 --learning_rate 1e-3 --rollout_ahead {ahead}""".split()
    pair = ranks_of_two(ROOT / "grpo.py", *words, cwd=tmp_path)
    errors = [program.communicate()[1] for program in pair]
    assert [program.returncode for program in pair] == [0, 0], errors
    log = lines(tmp_path / "r")
    assert [line.get("staleness") for line in log] == ([0, 1, 1] if ahead else [None] * 3)
    assert all(line["episodes"] == 6 and (ahead or line["sampler_gap"] < 1e-4) for line in log)
    names = [name[-11:] for name in server.loads if "check" not in name]
    # The third step was played ahead by the second version, and so nobody asks for its own.
    assert names == [f"step-{i:06d}" for i in ([0, 1, 3] if ahead else range(4))]
