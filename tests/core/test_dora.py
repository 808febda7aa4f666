"""Another adapter is one subclass: DoRA (arXiv 2402.09353), trained here, and loaded by PEFT to the same logits."""
import pytest
import torch
from torch import nn

import lora
from layers import load_model
from core.model import save_model
from core.logprobs import token_logprobs
from lora import adapted_linears, add_lora, merged

IDS = torch.arange(3, 63).view(2, 30) * 7 % 700  # (B, T)


class DoRA(lora.Adapter):
    """y = m V x / ||V||, with V = W + scale B A. The norm of V's rows gets no gradient (section 4.3)."""
    peft_entries = {"use_dora": True}

    def __init__(self, linear, *settings):
        super().__init__(linear, *settings)
        self.magnitude = nn.Parameter(linear.weight.float().norm(dim=1))  # (out,)

    def tensors(self):
        return super().tensors() | {"lora_magnitude_vector": self.magnitude}

    def gain(self, linear):
        """m / ||V||, (out,)"""
        return self.magnitude / super().effective_weight(self.frozen_weight(linear)).norm(dim=1)

    def effective_weight(self, weight):
        V = super().effective_weight(weight)
        return V * (self.magnitude / V.norm(dim=1))[:, None]

    def forward(self, linear, x, output):
        return super().forward(linear, x, output) * self.gain(linear)

    def give_gradients(self, linear, x, output):
        gain = self.gain(linear)
        return super().give_gradients(linear, x, output / gain.detach()) * gain


@pytest.fixture
def model(tmp_path):
    base, tokenizer = load_model("tiny", train=False, device="cpu")
    base.save_pretrained(tmp_path / "base"), tokenizer.save_pretrained(tmp_path / "base")
    model, _ = load_model(str(tmp_path / "base"), train=False, device="cpu")
    add_lora(model, 4, 8, kind=DoRA)
    return model


def loss_of(model):
    mask = torch.ones_like(IDS)
    mask[:, 0] = 0
    return -token_logprobs(model, IDS, mask)[0].mean()


def test_dora_is_one_subclass_of_25_lines():
    import inspect
    assert len([line for line in inspect.getsource(DoRA).splitlines() if line.strip()]) <= 25


def test_merged_and_beside_have_the_same_numbers_and_gradients(model):
    for linear in adapted_linears(model).values():
        linear.lora.B.data.normal_(std=0.1)
    results = []
    for way in (merged(model), torch.enable_grad()):
        with way:
            loss = loss_of(model)
            loss.backward()
        results.append((loss.item(), {name: p.grad for name, p in model.named_parameters() if p.requires_grad}))
        model.zero_grad()
    (a, ours), (b, autograd) = results
    assert a == pytest.approx(b, abs=1e-5) and len(ours) == 3 * len(adapted_linears(model))
    for name in ours:
        assert (ours[name] - autograd[name]).norm() <= 1e-4 * autograd[name].norm(), name


def test_dora_learns_and_peft_loads_it_to_the_same_logits(model, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(5):
        with merged(model):
            loss = loss_of(model)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
    save_model(model, str(tmp_path / "dora"))
    peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "dora")
    assert peft.peft_config["default"].use_dora
    with torch.no_grad():
        expected = peft(input_ids=IDS).logits
        assert (model(input_ids=IDS).logits - expected).abs().max() < 1e-4
        with merged(model):
            assert (model(input_ids=IDS).logits - expected).abs().max() < 1e-4
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        assert (plain(input_ids=IDS).logits - expected).abs().max() > 0.1


def test_what_a_fork_has_trained_is_loaded_merged_and_trained_further(model, tmp_path):
    for linear in adapted_linears(model).values():
        linear.lora.B.data.normal_(std=0.1)
        linear.lora.magnitude.data *= 1.1
    save_model(model, str(tmp_path / "dora"))
    with torch.no_grad():
        expected = loss_of(model).item()
        for merge in (False, True):
            loaded, _ = load_model(str(tmp_path / "dora"), train=False, device="cpu", merge=merge, kind=DoRA)
            assert loss_of(loaded).item() == pytest.approx(expected, abs=1e-5)
    trained, _ = load_model(str(tmp_path / "dora"), lora_r=4, device="cpu", kind=DoRA)
    loss_of(trained).backward()
    assert all(linear.lora.magnitude.grad is not None for linear in adapted_linears(trained).values())
