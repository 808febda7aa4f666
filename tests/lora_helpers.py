"""What the tests of LoRA, of loading and of log-probabilities share: a tiny model with an adapter that changes something."""
from pathlib import Path

import torch
from torch.nn import functional as F

import lora
from layers import load_model
from core.logprobs import token_logprobs
from lora import adapted_linears

SMOLLM2 = Path(lora.__file__).parent / ".real" / "smollm2"
IDS = torch.arange(3, 63).view(2, 30) * 7 % 700  # (B, T)
ALL_LINEAR = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def load(path, **options):
    return load_model(str(path), device="cpu", **options)[0]


def randomise(model, scale=0.3):
    """An adapter that changes something: B is zero when fresh."""
    generator = torch.Generator().manual_seed(1)
    for linear in adapted_linears(model).values():
        linear.lora.B.data = torch.randn(linear.lora.B.shape, generator=generator) * scale
    return model


def logits_of(model, ids=IDS):
    with torch.inference_mode():
        return model(input_ids=ids).logits


def full(model, ids, mask, temperature):
    """log-probability and entropy the plain way: all logits, log_softmax, autograd."""
    logp = F.log_softmax(model(input_ids=ids).logits[:, :-1].float() / temperature, dim=-1)
    logprobs, entropy = logp.gather(2, ids[:, 1:, None])[..., 0], -(logp.exp() * logp).sum(-1)
    return tuple(F.pad(x * mask[:, 1:], (1, 0)) for x in (logprobs, entropy))


def random_mask(ids, seed=0):
    mask = (torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed)) < 0.6).float()
    mask[:, 0] = 0
    return mask


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same_gradients(ours, exact, tolerance=2e-5):
    assert ours.keys() == exact.keys() and ours
    for name in ours:
        assert (ours[name] - exact[name]).abs().max() <= tolerance * exact[name].abs().max().clamp(min=1e-3), name


def train_steps(model, steps=3):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(steps):
        token_logprobs(model, IDS, random_mask(IDS))[0].sum().neg().backward()
        optimizer.step()
        optimizer.zero_grad()


def peft_base(tiny):
    from transformers import AutoModelForCausalLM
    return AutoModelForCausalLM.from_pretrained(tiny).eval()


def alike(rows=3, prefix=9, width=21):
    """Rows that begin alike, one of them shorter, with tool results in between: ids, mask (rows, width)."""
    ids = torch.randint(3, 700, (rows, width), generator=torch.Generator().manual_seed(3))
    ids[:, :prefix] = ids[0, :prefix]
    mask = random_mask(ids)
    mask[:, :prefix], mask[:, prefix], mask[-1, -4:] = 0, 1, 0
    return ids, mask
