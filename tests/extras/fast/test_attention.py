"""attention.py against transformers' kernel: numbers, gradients, packed rows, and what it leaves to the stock kernel."""
from types import SimpleNamespace

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from core.engine import row_attention
from core.logprobs import token_logprobs
from extras.fast import attention, products
from extras.fast.attention import causal_attention
from layers import load_model
from lora import merged_to_train, reference

MODULE = SimpleNamespace(num_key_value_groups=3, is_causal=True)


def heads(T, B=2, H=6, H_kv=2, D=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(B, h, T, D, generator=generator, requires_grad=True) for h in (H, H_kv, H_kv)]


def with_gradients(attend, *inputs):
    out = attend(*inputs)
    weight = torch.arange(out.numel()).view(out.shape).cos()
    return [out, *torch.autograd.grad((out * weight).sum(), inputs)]


def close(ours, theirs):
    return all((a - b).abs().max() < 1e-5 for a, b in zip(ours, theirs, strict=True))


def test_two_products_give_the_stock_kernels_numbers_and_gradients():
    ours = with_gradients(lambda *x: products.causal(0.3, *x), *heads(7))
    assert close(ours, with_gradients(lambda *x: sdpa_attention_forward(MODULE, *x, None, scaling=0.3)[0], *heads(7)))


@pytest.mark.parametrize("dtype, takes_products", [(torch.float32, False), (torch.bfloat16, True)])
def test_on_a_cpu_products_are_for_16_bits(monkeypatch, dtype, takes_products):
    """bench/attention.py: in float32 the stock kernel takes half of their time."""
    calls, compute = [], products.causal
    monkeypatch.setattr(products, "causal", lambda *x: calls.append(1) or compute(*x))
    inputs = [x.detach().to(dtype).requires_grad_() for x in heads(7)]
    ours = with_gradients(lambda *x: causal_attention(MODULE, *x, None, scaling=0.3)[0], *inputs)
    assert bool(calls) == takes_products
    theirs = with_gradients(lambda *x: sdpa_attention_forward(MODULE, *x, None, scaling=0.3)[0], *inputs)
    assert takes_products or all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("limit, rows_at_once", [(10**6, [3]), (2400, [2, 1]), (1200, [1, 1, 1])], ids=["all", "two", "one"])
def test_scores_that_are_too_large_are_computed_some_rows_at_a_time(monkeypatch, limit, rows_at_once):
    """A row has 6 x 7 x 7 scores of 4 bytes here."""
    seen, weights = [], products._weights

    def watched(*inputs):
        for piece in weights(*inputs):
            seen.append(len(piece[-1]))
            yield piece
    monkeypatch.setattr(products, "SCORES", limit)
    monkeypatch.setattr(products, "_weights", watched)
    ours = with_gradients(lambda *x: products.causal(0.3, *x), *heads(7, B=3))
    assert seen == 2 * rows_at_once  # forward, and again in the backward pass
    assert close(ours, with_gradients(lambda *x: sdpa_attention_forward(MODULE, *x, None, scaling=0.3)[0], *heads(7, B=3)))


def test_a_row_that_is_too_large_by_itself_is_left_to_the_stock_kernel(monkeypatch):
    monkeypatch.setattr(attention, "MAX_SCORES", 500)
    monkeypatch.setattr(products, "causal", None)
    inputs = [x.detach().bfloat16().requires_grad_() for x in heads(7, B=3)]
    ours = with_gradients(lambda *x: causal_attention(MODULE, *x, None, scaling=0.3)[0], *inputs)
    assert close(ours, with_gradients(lambda *x: sdpa_attention_forward(MODULE, *x, None, scaling=0.3)[0], *inputs))


@pytest.mark.parametrize("P, width", [(0, 8), (5, 8), (5, 3)], ids=["rows", "prefix", "narrow values"])
def test_the_written_gradients_are_those_of_autograd_in_float64(P, width):
    query, key, value = (x.double() for x in heads(7))
    prefix = [x[:1].double() for x in heads(P, seed=1)[1:]] if P else []
    value, prefix = value[..., :width], prefix[:1] + [x[..., :width] for x in prefix[1:]]

    def plain(query, key, value, *prefix):
        key, value = (torch.cat([x.expand(2, -1, -1, -1), own], 2) for x, own in zip(prefix, (key, value))) if prefix else (key, value)
        key, value = key.repeat_interleave(3, 1), value.repeat_interleave(3, 1)
        hidden = torch.ones(7, P + 7, dtype=torch.bool).triu(1 + P)
        return ((query @ key.mT * 0.3).masked_fill(hidden, -torch.inf).softmax(-1) @ value).transpose(1, 2)
    ours = with_gradients(lambda *x: products.causal(0.3, *x), query, key, value, *prefix)
    theirs = with_gradients(plain, query, key, value, *prefix)
    assert all((a - b).abs().max() < 1e-12 for a, b in zip(ours, theirs, strict=True))


def test_in_16_bits_spare_keys_that_fill_up_a_vector_change_nothing():
    inputs = [x.to(torch.bfloat16) for x in heads(7)]
    ours = with_gradients(lambda *x: causal_attention(MODULE, *x, None, scaling=0.3)[0], *inputs)
    exact = with_gradients(lambda *x: causal_attention(MODULE, *x, None, scaling=0.3)[0], *(x.float() for x in inputs))
    assert all((a - b).norm() < 0.01 * b.norm() for a, b in zip(ours, exact, strict=True))


@pytest.mark.parametrize("grad, limit", [(True, 2**25), (False, 2**25), (True, 2000)], ids=["gradients", "no gradients", "some rows at a time"])
def test_a_packed_row_gives_every_rows_own_attention(monkeypatch, grad, limit):
    P, rows, W = 5, 3, 4
    monkeypatch.setattr(products, "SCORES", limit)
    packed = heads(P + rows * W, B=1)

    def separately(*inputs):
        out = []
        for row in range(rows):
            own = [torch.cat([x[:, :, :P], x[:, :, P + row * W:P + (row + 1) * W]], 2) for x in inputs]
            out.append(sdpa_attention_forward(MODULE, *own, None, scaling=0.3)[0])
        return torch.cat([out[0][:, :P], *(o[:, P:] for o in out)], 1)

    def together(*inputs):
        return causal_attention(MODULE, *inputs, None, scaling=0.3, shared_prefix=(P, rows))[0]
    if grad:
        assert close(with_gradients(together, *packed), with_gradients(separately, *packed))
    else:
        with torch.no_grad():
            assert close([together(*packed)], [separately(*packed)])


def test_a_position_bias_is_left_to_the_stock_kernel():
    """The two products would drop it, and only where there are gradients, so no check of the logits would notice."""
    bias = torch.randn(1, 6, 7, 7, generator=torch.Generator().manual_seed(1))
    ours = with_gradients(lambda *x: causal_attention(MODULE, *x, None, scaling=0.3, position_bias=bias)[0], *heads(7))
    theirs = with_gradients(lambda *x: sdpa_attention_forward(MODULE, *x, None, scaling=0.3, position_bias=bias)[0], *heads(7))
    assert close(ours, theirs) and not close(ours, with_gradients(lambda *x: causal_attention(MODULE, *x, None, scaling=0.3)[0], *heads(7)))


def cuda_kernel(query, key, mask, capability) -> str:
    """Which kernel torch 2.6 to 2.13 takes on a GPU (sdp_utils.cpp): math keeps the weights of all pairs of tokens, in float32."""
    if query.dtype != torch.float32 and capability >= (8, 0) and mask is None:
        return "flash"
    return "efficient" if query.shape[1] == key.shape[1] else "math"


@pytest.mark.parametrize("shared_prefix", [None, (3, 2)], ids=["rows", "packed"])
@pytest.mark.parametrize("dtype, capability, kernels", [
    (torch.bfloat16, (8, 0), {"flash"}), (torch.float16, (7, 5), {"efficient"}), (torch.float32, (8, 0), {"efficient"}), (torch.float32, (7, 5), {"efficient"})])
def test_a_gpu_never_takes_the_math_kernel(monkeypatch, dtype, capability, kernels, shared_prefix):
    taken = []

    def fused(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        taken.append(cuda_kernel(query, key, attn_mask, capability))
        assert is_causal == (attn_mask is None) and enable_gqa == (query.shape[1] != key.shape[1])
        return torch.empty_like(query)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", fused)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    query, key, value = (x.to("meta", dtype) for x in heads(7, B=1))
    assert causal_attention(MODULE, query, key, value, None, scaling=0.3, shared_prefix=shared_prefix)[0].shape == (1, 7, 6, 8)
    assert set(taken) == (kernels | {"efficient"} if shared_prefix else kernels)  # a packed row's tail has a mask


def test_repeated_keys_give_the_shared_ones_numbers_and_gradients(monkeypatch):
    theirs = with_gradients(lambda *x: sdpa_attention_forward(MODULE, *x, None, scaling=0.3)[0], *heads(7))
    monkeypatch.setattr(attention, "shares_keys", lambda query: False)
    assert close(with_gradients(lambda *x: attention.stock_attention(MODULE, None, *x, scaling=0.3), *heads(7)), theirs)


@pytest.mark.parametrize("softcap, sinks", [(None, None), (0.7, torch.linspace(-2, 2, 6))])
def test_a_long_prompt_goes_through_in_parts(monkeypatch, softcap, sinks):
    """All scores of a prompt of 8,000 tokens of SmolLM2 at once took 4 GB, twice as many tokens four times that."""
    query, key, value = (x.detach() for x in heads(101))
    bias = torch.full((2, 1, 101, 101), -torch.inf).triu(1)
    whole = attention.in_parts(query, key, value, bias, 0.3, softcap, sinks)
    sizes, softmax = [], torch.Tensor.softmax
    monkeypatch.setattr(torch.Tensor, "softmax", lambda x, *dim: sizes.append(x.numel()) or softmax(x, *dim))
    monkeypatch.setattr(attention, "MOST_SCORES", 20000)
    parts = attention.in_parts(query, key, value, bias, 0.3, softcap, sinks)
    assert (parts - whole).abs().max() < 1e-6 and len(sizes) == 8 and max(sizes) <= 20000


@pytest.mark.parametrize("softcap, sinks", [(0.7, None), (None, torch.linspace(-2, 2, 6)), (0.7, torch.linspace(-2, 2, 6))])
def test_capped_scores_and_sinks_one_head_after_the_other(softcap, sinks):
    query, key, value = (x.detach() for x in heads(7))
    bias = torch.full((7, 7), -torch.inf).triu(1)
    cache = SimpleNamespace(bias=lambda window, dtype: bias[None, None])
    ours, _ = row_attention(None, query, key, value, None, 0.3, row_cache=cache, softcap=softcap, s_aux=sinks)
    for head in range(6):
        scores = query[:, head] @ key[:, head // 3].mT * 0.3
        scores = scores if softcap is None else softcap * (scores / softcap).tanh()
        weights = (scores + bias).exp()
        total = weights.sum(-1, keepdim=True) + (0 if sinks is None else sinks[head].exp())
        assert (ours[:, :, head] - weights / total @ value[:, head // 3]).abs().max() < 1e-6


def test_a_policy_that_is_scored_rounds_as_in_the_update(tiny):
    """Its KL divergence from itself is 0: otherwise a step that teaches nothing would move the weights."""
    model, _ = load_model(tiny, lora_r=4, dtype="float32")
    ids = torch.arange(3, 83).view(2, 40) * 7 % 700  # (B, T)
    with merged_to_train(model):
        trained, _ = token_logprobs(model, ids, torch.ones_like(ids))
    with torch.no_grad(), reference(model, None):
        scored, _ = token_logprobs(model, ids, torch.ones_like(ids))
    assert trained.requires_grad and torch.equal(trained, scored)
