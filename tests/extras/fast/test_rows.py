"""extras/fast/rows.py: the rows of a small model's pass in threads give what one thread gives."""
import pytest
import torch

from core.logprobs import token_logprobs
from core.model import facts
from core.tiny import make_tiny
from extras.fast import rows
from layers import load_model
from lora import merged_to_train

IDS = torch.randint(3, 500, (7, 40), generator=torch.Generator().manual_seed(0))
IDS[:, :12] = IDS[0, :12]  # a prompt that all rows share
MASK = torch.arange(40).expand(7, -1) >= 20 + torch.arange(7)[:, None]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    for part in make_tiny():
        part.save_pretrained(folder)
    return str(folder)


def loaded(tiny, monkeypatch, threads, **options):
    """Return a model that trains, with an adapter that does something, where torch has so many threads."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    model, _ = load_model(tiny, dtype="float32", **options)
    generator = torch.Generator().manual_seed(1)
    for name, p in model.named_parameters():
        if name.endswith("lora.B"):
            p.data = 0.05 * torch.randn(p.shape, generator=generator)
    return model.train()


def result(model):
    """Return log-probabilities, entropy and gradients of all that trains."""
    with merged_to_train(model):
        logprobs, entropy = token_logprobs(model, IDS, MASK.long(), 0.9)
        (logprobs * torch.linspace(-1, 1, IDS.numel()).view_as(IDS) + 0.1 * entropy).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    model.zero_grad()
    return logprobs.detach(), entropy.detach(), gradients


@pytest.mark.parametrize("options", [{"lora_r": 4}, {"lora_r": 0}], ids=["LoRA", "all weights"])
@pytest.mark.parametrize("threads", [2, 3])
def test_threads_give_the_numbers_of_one(tiny, monkeypatch, options, threads):
    """The same log-probabilities and gradients to rounding, and the same bits each time."""
    plain = result(loaded(tiny, monkeypatch, 1, **options))
    model = loaded(tiny, monkeypatch, threads, **options)
    assert facts(model).hidden_states is rows.rows_in_threads
    used = []
    monkeypatch.setattr(rows, "in_threads", lambda number, jobs, real=rows.in_threads: used.append(len(jobs)) or real(number, jobs))
    first, again = result(model), result(model)
    assert used == [threads] * 4  # forward and backward
    for before, after in zip(plain[:2], first[:2]):
        assert torch.allclose(before, after, rtol=0, atol=2e-6)
    assert plain[2].keys() == first[2].keys() and len(plain[2]) > 20
    for name, gradient in plain[2].items():
        assert (gradient - first[2][name]).norm() < 1e-5 * gradient.norm(), name
        assert torch.equal(first[2][name], again[2][name]), name
    assert torch.equal(first[0], again[0])
    with torch.no_grad(), merged_to_train(model):
        scored, _ = token_logprobs(model, IDS, MASK.long(), 0.9)
    assert torch.equal(scored, first[0]) and not scored.requires_grad


def test_what_threads_cannot_do_is_left_to_one(tiny, monkeypatch):
    """Dropout draws in the order of the calls; a single row has no parts; a wide model shares its products."""
    with_dropout, model = (loaded(tiny, monkeypatch, 2, lora_r=4, lora_dropout=p) for p in (0.1, 0.0))
    with monkeypatch.context() as patch:  # the probe of load_model takes threads
        patch.setattr(rows, "in_threads", None)
        result(with_dropout)
        token_logprobs(model, IDS[:1], MASK[:1].long())
    assert facts(loaded(tiny, monkeypatch, 2, lora_r=4, memory="stream")).hidden_states is None
    monkeypatch.setattr(rows, "SMALL", 1)
    assert facts(loaded(tiny, monkeypatch, 2)).hidden_states is None


def test_an_error_in_a_thread_is_raised(tiny, monkeypatch):
    model = loaded(tiny, monkeypatch, 2, lora_r=4)
    model.model.layers[2].mlp.forward = lambda x: 1 / 0
    with pytest.raises(ZeroDivisionError):
        token_logprobs(model, IDS, MASK.long())
