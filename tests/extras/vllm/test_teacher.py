"""extras/vllm/teacher.py against our own server: log-probabilities of given ids, and every way in which a server may be none."""
import json
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("fastapi")

from test_server import Served  # noqa: E402

import distill  # noqa: E402
from core.config import UserError  # noqa: E402
from core.logprobs import token_logprobs  # noqa: E402
from extras.vllm import teacher as module  # noqa: E402
from extras.vllm.servers import Lost  # noqa: E402
from extras.vllm.teacher import ServerTeacher  # noqa: E402
from layers import load_model  # noqa: E402
from lora import add_lora  # noqa: E402

RUN = SimpleNamespace(check=lambda: None, ranks=SimpleNamespace(world=1, share=range, add=lambda x: x))


@pytest.fixture(scope="module")
def served():
    served = Served(*load_model("tiny", train=False))
    yield served
    served.http.should_exit = True


def config(**given):
    return SimpleNamespace(**{"temperature": 1.0, "max_tokens": 512, **given})


@pytest.fixture
def teacher(served):
    return ServerTeacher(f"{served.url}/v1/", load_model("tiny", train=False)[1], config())


def batch(*lengths):
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(10, 900, (len(lengths), max(lengths)), generator=g)
    mask = (torch.rand(ids.shape, generator=g) < 0.5).long()
    for i, n in enumerate(lengths):
        mask[i, n:] = 0
    mask[:, 0] = 0
    return ids, mask


def test_its_log_probabilities_are_those_of_the_model(served, teacher):
    model, _ = load_model("tiny", train=False)
    ids, mask = batch(20, 9, 14, 2)
    mask[3] = 0  # an episode without a sampled token: nothing is asked
    ours = teacher.logprobs(ids, mask, 1.0, RUN)
    with torch.no_grad():
        expected, _ = token_logprobs(model, ids, mask)
    assert torch.allclose(ours, expected, atol=1e-4) and ours.abs().max() > 1 and not ours[mask == 0].any()
    assert teacher.texts_checked and len(served.rows) == 3


def test_it_is_the_base_that_was_started_and_not_the_adapter_that_another_client_plays(served, teacher, tmp_path):
    from core.model import save_model
    model, _ = load_model("tiny", train=False)
    add_lora(model, 2, 4)
    for name, p in model.named_parameters():
        if name.endswith("lora.B"):
            torch.nn.init.normal_(p, std=0.5)
    save_model(model, tmp_path)
    served.post("/load_lora_adapter", {"lora_name": "other", "lora_path": str(tmp_path)})
    asked = {"prompt": [5, 6, 7], "max_tokens": 1, "prompt_logprobs": 0, "seed": 1}
    ids, mask = batch(12)
    before = teacher.logprobs(ids, mask, 1.0, RUN)
    answers = [served.post("/completions", {"model": name, **asked})["choices"][0]["prompt_logprobs"] for name in ("base", "other")]
    assert answers[0] != answers[1] and answers[0][0] is answers[1][0] is None
    assert torch.allclose(teacher.logprobs(ids, mask, 1.0, RUN), before, atol=1e-5)
    assert "prompt_logprobs" not in served.post("/completions", {"model": "base", **asked, "prompt_logprobs": None})["choices"][0]


def test_what_does_not_fit_is_refused_in_a_line(served):
    _, tokenizer = load_model("tiny", train=False)
    with pytest.raises(UserError, match="--teacher: servers tell log-probabilities at temperature 1; leave out --temperature 0.7"):
        ServerTeacher(served.url, tokenizer, config(temperature=0.7))
    with pytest.raises(UserError, match="--max_tokens 1024: the teacher's context has 1024, and needs one more than an episode: give --max_tokens 1023"):
        ServerTeacher(served.url, tokenizer, config(max_tokens=1024))
    with pytest.raises(UserError, match="--teacher http://127.0.0.1:9: no server answers there"):
        ServerTeacher("http://127.0.0.1:9", tokenizer, config())


def test_another_tokenizer_is_found_by_the_texts_of_the_tokens(served):
    shifted = SimpleNamespace(decode=lambda ids: f"<{ids[0]}>")
    teacher = ServerTeacher(served.url, shifted, config())
    with pytest.raises(UserError, match="its tokenizer is another one than the student's: token"):
        teacher.logprobs(*batch(9), 1.0, RUN)


@pytest.mark.parametrize("answer", [
    "no JSON", json.dumps({"choices": []}), json.dumps({"choices": [{"prompt_logprobs": None}]}),
    json.dumps({"choices": [{"prompt_logprobs": [None, {"7": {"logprob": -1.0}}]}]}),  # of another token
    json.dumps({"choices": [{"prompt_logprobs": [None, {"6": {"logprob": 0.5}}]}]}),
    json.dumps({"choices": [{"prompt_logprobs": [None, {"6": {"logprob": -1.0}}, {"7": {"logprob": -1.0}}]}]})])
def test_an_answer_without_the_numbers_is_none(teacher, monkeypatch, answer):
    monkeypatch.setattr(module, "ask", lambda *_, **__: answer.encode())
    with pytest.raises(Lost, match="no prompt_logprobs"):
        teacher.score([5, 6])


def test_distill_asks_the_server_of_its_flag(served, tmp_path):
    given = dict(env="equations", dtype="float32", output_dir=str(tmp_path), max_steps=1, tasks_per_step=2, max_tokens=200, max_new_tokens=8, max_turns=1, eval_tasks=0, max_samples=8)
    load_model("tiny", train=False)[0].save_pretrained(tmp_path / "model")
    load_model("tiny", train=False)[1].save_pretrained(tmp_path / "model")
    result = distill.train(distill.Config(model_path=str(tmp_path / "model"), teacher=served.url, **given | {"output_dir": str(tmp_path / "run")}))
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert result["steps"] == 1 and abs(line["teacher_kl"]) < 1e-4  # the student is the model that is served
