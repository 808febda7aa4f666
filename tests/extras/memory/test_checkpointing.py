"""extras/memory/checkpointing.py: recomputation, tiles and offloading change no gradient."""
import pytest
import torch
from memory_helpers import CHECKPOINT, EVERYTHING, FOUR_BIT, IDS, gradients, load, same

from core.logprobs import token_logprobs
from extras.memory.techniques import PLAIN, Techniques
from core.model import facts

RECOMPUTING = [Techniques(gradient_checkpointing=True), Techniques(mlp_tokens=7),
               Techniques(gradient_checkpointing=True, mlp_tokens=7, offload_activations=True)]
NAMES = ["layers", "tiles", "layers, tiles, offload"]


# Tiles draw other dropout masks.
@pytest.mark.parametrize("base, dropout, recomputing", [
    *(pytest.param(PLAIN, 0.0, recomputing, id=f"plain: {name}") for name, recomputing in zip(NAMES, RECOMPUTING)),
    pytest.param(PLAIN, 0.2, RECOMPUTING[0], id="dropout: layers"), pytest.param(Techniques(int8_head=True), 0.2, RECOMPUTING[0], id="int8, dropout: layers"),
    *(pytest.param(Techniques(load_in_4bit=True), 0.0, recomputing, id=f"4 bits: {name}", marks=[pytest.mark.slow] * (i < 2)) for i, (name, recomputing) in enumerate(zip(NAMES, RECOMPUTING))),
    pytest.param(Techniques(int8_head=True), 0.0, RECOMPUTING[2], id="int8: layers, tiles, offload")])
def test_recomputation_changes_no_gradient(tiny, base, dropout, recomputing):
    both = recomputing._replace(load_in_4bit=base.load_in_4bit, int8_head=base.int8_head)
    same(gradients(load(tiny, base, lora_dropout=dropout)), gradients(load(tiny, both, lora_dropout=dropout)), 2e-5)


@pytest.mark.parametrize("ids", [IDS, torch.cat([IDS[:1, :12].expand(len(IDS), -1), IDS[:, 12:]], 1)], ids=["rows", "shared prefix"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_in_16_bits_what_needs_no_gradient_rounds_as_what_does(tiny, dtype, ids):
    """To the bit, or a layer would run again from other values, and a policy differ from itself when it is scored."""
    mask = (torch.arange(30) >= 12).long().expand(ids.shape)
    model = load(tiny, dtype=dtype)
    plain = gradients(model, ids, mask)
    same(plain, gradients(load(tiny, CHECKPOINT, dtype=dtype), ids, mask), 0)
    with torch.no_grad():
        scored = token_logprobs(model, ids, mask, 0.7)
    assert all(torch.equal(*both) for both in zip(scored, plain))


def test_full_training_goes_through_checkpoints(tiny):
    recomputing = Techniques(gradient_checkpointing=True, mlp_tokens=9)
    same(gradients(load(tiny, lora_r=0)), gradients(load(tiny, recomputing, lora_r=0)), 2e-5)


@pytest.mark.parametrize("memory", [PLAIN, CHECKPOINT, FOUR_BIT, EVERYTHING, EVERYTHING._replace(stream_layers=True)],
                         ids=["plain", "checkpoint", "4bit", "everything", "stream"])
def test_a_shared_prefix_changes_no_gradient(tiny, memory):
    """To 1e-6 with layers in float64; what cannot be float64 differs by no more than float32's rounding, 2e-6."""
    ids = IDS.repeat(2, 1)
    ids[:, :12] = ids[0, :12]
    mask = (torch.arange(30) >= 12).long().expand(ids.shape)
    shared, alone = load(tiny, memory), load(tiny, memory)
    assert facts(shared).shares_prefix
    facts(alone).shares_prefix = False
    if not memory.load_in_4bit:
        shared.double(), alone.double()
    same(gradients(shared, ids, mask), gradients(alone, ids, mask), 5e-6 if memory.load_in_4bit else 1e-6)
    assert all((a - b).abs().max() < 1e-6 * max(1, a.abs().max()) * 10 for a, b in zip(
        gradients(shared, ids, mask)[:2], gradients(alone, ids, mask)[:2]))


def test_recomputation_draws_no_random_numbers_from_what_follows(tiny):
    """Else the next micro-batch would have the dropout masks of this one again."""
    model = load(tiny, CHECKPOINT, lora_dropout=0.2).train()
    logprobs, _ = token_logprobs(model, IDS, torch.ones_like(IDS))
    before = torch.get_rng_state()
    logprobs.sum().backward()
    assert torch.equal(torch.get_rng_state(), before)
