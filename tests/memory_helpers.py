"""Models and comparisons that the tests of the memory techniques share."""
import torch

from layers import load_model
from core.logprobs import token_logprobs
from extras.memory.techniques import Techniques
from lora import adapted_linears

CHECKPOINT = Techniques(gradient_checkpointing=True)
FOUR_BIT = Techniques(load_in_4bit=True, gradient_checkpointing=True)
EVERYTHING = FOUR_BIT._replace(int8_head=True, mlp_tokens=24, offload_activations=True)
IDS = torch.arange(3, 63).view(2, 30) * 7 % 700  # (B, T)


def load(folder, memory="plain", **options):
    """Load a model with an adapter that changes something: a fresh one has B = 0."""
    model = load_model(str(folder), device="cpu", memory=memory, **{"lora_r": 4, **options})[0]
    generator = torch.Generator().manual_seed(1)
    for linear in adapted_linears(model).values():
        linear.lora.B.data = torch.randn(linear.lora.B.shape, generator=generator) * 0.1
    return model


def gradients(model, ids=IDS, mask=None, entropy_coef=0.1):
    """Return log-probabilities, entropy and {name: gradient} of a loss that weighs every token differently."""
    mask = (torch.arange(ids.shape[1]) >= 5).long().expand(ids.shape) if mask is None else mask
    torch.manual_seed(0)
    logprobs, entropy = token_logprobs(model.train(), ids, mask, 0.7)
    (logprobs * torch.linspace(-1, 1, ids.numel()).view(ids.shape) - entropy_coef * entropy).sum().backward()
    return logprobs.detach(), entropy.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def same(a, b, tolerance):
    """Assert that two results of `gradients` agree to a relative tolerance; 0 means to the bit."""
    assert a[2].keys() == b[2].keys() and len(a[2]) > 8
    for x, y in [(a[0], b[0]), (a[1], b[1]), *((a[2][name], b[2][name]) for name in a[2])]:
        assert torch.equal(x, y) if not tolerance else (x - y).norm() <= tolerance * x.norm(), (x - y).norm() / x.norm()
