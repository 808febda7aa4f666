"""core/logprobs.py: log-probabilities in chunks and blocks are the whole softmax, in memory that does not grow with it."""
from contextlib import nullcontext

import pytest
import torch
from memory_helpers import CHECKPOINT, IDS, gradients, load

from core import logprobs
from extras.memory import quantization
from bench.budget import Bytes
from core.logprobs import token_logprobs
from extras.memory.techniques import Techniques
from core.tiny import make_tiny
from lora import merged

INT8 = Techniques(int8_head=True)


@pytest.mark.parametrize("scaling", [{}, {"logit_scale": 0.3}, {"final_logit_softcapping": 5.0}], ids=str)
@pytest.mark.parametrize("chunk", [2**22, 200])
def test_blocks_of_the_vocabulary_give_the_whole_softmax(tiny, scaling, chunk, monkeypatch):
    monkeypatch.setattr(quantization, "CHUNK", chunk)
    monkeypatch.setattr(quantization, "BLOCK_ROWS", 300)
    model = load(tiny, INT8)
    for name, value in scaling.items():
        setattr(model.config, name, value)
    hidden = (torch.randn(37, 128, generator=torch.Generator().manual_seed(0)) * 3).double().requires_grad_()
    targets = torch.arange(37) * 26 % 960
    head = model.get_output_embeddings()
    head.table.dtype = torch.float64
    head.weight = head.weight.double()
    logp = (logprobs.head_logits(model, hidden) / 0.7).float().log_softmax(-1)
    expected = logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)
    weights = torch.linspace(-1, 2, 37)
    expected_grad, = torch.autograd.grad((expected[0] * weights + expected[1] * weights.flip(0)).sum(), hidden)
    ours = head.logprobs(model, hidden, targets, 0.7)
    grad, = torch.autograd.grad((ours[0] * weights + ours[1] * weights.flip(0)).sum(), hidden)
    assert all((a - b).abs().max() < 3e-5 for a, b in zip(expected, ours))
    assert (grad - expected_grad).norm() < 1e-4 * expected_grad.norm()


@pytest.mark.parametrize("memory", ["plain", INT8], ids=["plain", "int8"])
def test_the_peak_of_the_log_probabilities_does_not_depend_on_the_vocabulary(memory, tmp_path):
    from transformers import AutoModelForCausalLM, Qwen2Config
    peaks = []
    for vocabulary in (20_000, 80_000):
        AutoModelForCausalLM.from_config(Qwen2Config(
            vocab_size=vocabulary, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, tie_word_embeddings=True)).save_pretrained(tmp_path)
        make_tiny()[1].save_pretrained(tmp_path)
        model = load(tmp_path, memory)
        with Bytes("cpu") as count:
            count.hold([*model.parameters(), *model.buffers()])
            before = count.now
            gradients(model, torch.arange(600).view(2, 300))
        peaks.append(count.peak - before)
    assert peaks[1] < 1.05 * peaks[0], peaks


def test_no_block_of_logits_is_kept(tiny, monkeypatch):
    monkeypatch.setattr(quantization, "CHUNK", 2**14)
    model = load(tiny, INT8)
    hidden = torch.randn(50, 128, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        model.get_output_embeddings().logprobs(model, hidden, torch.zeros(50).long(), 1.0)
    assert len(kept) > 5 and max(kept) == 50 * 128


@pytest.mark.parametrize("memory", ["plain", CHECKPOINT._replace(int8_head=True)], ids=["plain", "checkpoint, int8"])
@pytest.mark.parametrize("merging", [False, True])
def test_float16_loses_no_small_gradient(tiny, memory, merging):
    """A token's share of a loss over 10^5 tokens is under what float16 holds: it goes through the layers scaled."""
    grads = []
    for dtype in ("float32", "float16"):
        model = load(tiny, memory, dtype=dtype)
        with merged(model) if merging and dtype == "float16" else nullcontext():
            logprobs, entropy = token_logprobs(model, IDS, torch.ones_like(IDS))
            (1e-7 * (logprobs * torch.linspace(-1, 1, IDS.numel()).view(IDS.shape)).sum() - 1e-8 * entropy.sum()).backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert grads[0].norm() < 1e-4 and (grads[0] - grads[1]).norm() < 0.02 * grads[0].norm()
