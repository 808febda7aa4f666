"""core/packing.py: rows that begin alike, as one packed row, have the log-probabilities and gradients of rows apart."""
import pytest
import torch
from lora_helpers import IDS, alike, gradients, randomise, random_mask, same_gradients

import lora
from core import token_logprobs
from core.model import facts
from core.packing import shared_prefix


@pytest.fixture
def model(tiny):
    """What core alone loads."""
    return randomise(lora.load_model(tiny, device="cpu", lora_r=4)[0])


def test_packed_rows_are_the_rows_apart_and_fewer_tokens(model):
    ids, mask = alike()
    seen = []
    model.base_model.layers[0].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].shape[:2].numel()))
    results = []
    for shares in (True, False):
        facts(model).shares_prefix = shares
        logprobs, entropy = token_logprobs(model, ids, mask, 0.7)
        results.append((logprobs.detach(), entropy.detach(), gradients(model, (logprobs + 0.1 * entropy).sum())))
    assert seen == [9 + 3 * 12, 3 * 21]
    (packed, packed_entropy, ours), (apart, entropy, exact) = results
    assert (packed - apart).abs().max() < 1e-5 and (packed_entropy - entropy).abs().max() < 1e-5
    same_gradients(ours, exact)


def test_equal_rows_go_through_once_and_each_has_its_gradient(model):
    """Rows of the same tokens with masks and weights of their own, against one row at a time."""
    ids, mask = alike()
    order = [2, 0, 2, 1, 2, 0]
    ids, mask = ids[order], mask[order]  # (6, T)
    mask[4] = mask[4] * (torch.arange(mask.shape[1]) < mask.shape[1] - 3)
    weights = torch.linspace(-1, 2, 6)[:, None]
    seen = []
    model.base_model.layers[0].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].shape[:2].numel()))
    logprobs, entropy = token_logprobs(model, ids, mask, 0.7)
    ours = gradients(model, (weights * (logprobs + 0.1 * entropy)).sum())
    assert seen == [9 + 3 * 12]
    losses, alone = [], []
    for i in range(6):
        row, row_entropy = token_logprobs(model, ids[i:i + 1], mask[i:i + 1], 0.7)
        alone.append(row.detach())
        losses.append((weights[i] * (row + 0.1 * row_entropy)).sum())
    assert (logprobs - torch.cat(alone)).abs().max() < 1e-5
    same_gradients(ours, gradients(model, sum(losses)))


def test_the_gradient_of_equal_rows_has_the_same_bits_on_two_threads(model):
    """Many rows add to one place. Atomic additions would take them in any order."""
    ids = IDS[:1, :24].repeat(128, 1)
    ids[::5, -1] += 1
    weights = torch.randn(ids.shape, generator=torch.Generator().manual_seed(0))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = [gradients(model, (weights * token_logprobs(model, ids, torch.ones_like(ids))[0]).sum()) for _ in range(60)]
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0].values(), other.values(), strict=True))


def test_core_packs_the_families_it_knows_and_no_sliding_window(model):
    ids, mask = alike()
    assert shared_prefix(model, ids, mask) == 9
    assert shared_prefix(model, IDS, random_mask(IDS)) == 0  # no two rows begin alike
    model.config.sliding_window = 4
    assert shared_prefix(model, ids, mask) == 0


def test_a_family_that_core_does_not_know_runs_row_by_row():
    from transformers import GPT2Config, GPT2LMHeadModel

    from core.packing import allow_packing
    model = GPT2LMHeadModel(GPT2Config(vocab_size=700, n_embd=16, n_layer=1, n_head=2))
    allow_packing(model)
    assert not facts(model).shares_prefix
    logprobs, _ = token_logprobs(model, *alike())
    assert torch.isfinite(logprobs).all()
