"""`sample`, core's and extras/fast's, against softmax and against transformers' warpers."""
import math

import pytest
import torch

from core import logprobs as core_logprobs
from core.config import UserError
from core.engine import Row, make_engine
from core.tiny import make_tiny
from extras.fast import sampling

LAST = 1 - 2**-53  # the largest float64 below 1


def next_uniform(row):
    """The random number of the row's next token, which is then taken."""
    uniform = row.uniforms(1)[0]
    row.append(0, 0.0, ())
    return uniform


def sample(logits, uniforms, temperature=1.0, **options):
    """`sample` without forced tokens, of logits that are finite; returns ids and logprobs."""
    ids, logprobs = sample_all(logits, uniforms, temperature, **options)
    assert not logprobs.isnan().any()
    return ids, logprobs


def sample_all(logits, uniforms, temperature=1.0, **options):
    """What the layer draws. Without top_k and top_p core draws the same, but for a uniform that rounding puts beside a token's end."""
    uniforms, forced = torch.tensor(uniforms, dtype=torch.float64), torch.full((len(logits),), -1)
    drawn = sampling.sample(logits, uniforms, forced, temperature, **options)
    if not options:
        ids, logprobs = core_logprobs.sample(logits, uniforms, forced, temperature)
        same = (drawn[0] == ids) | logprobs.isnan()
        assert (~same).sum() <= 2
        assert (drawn[1] - logprobs)[same].nan_to_num(nan=0).abs().max() < 1e-5 and torch.equal(drawn[1].isnan(), logprobs.isnan())
    return drawn


def softmax_of(logits, temperature=1.0):
    return (logits.double() / temperature).softmax(-1)


@pytest.mark.parametrize("vocab, block", [(1, 256), (7, 256), (255, 256), (256, 256), (257, 256), (1000, 256), (10, 4), (13, 1)])
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.8])
def test_inverse_cdf_gives_every_token_its_share(vocab, block, temperature, monkeypatch):
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)) * 2
    n = 20_000
    uniforms = [(i + 0.5) / n for i in range(n)]  # stratified: each count may differ from n p by no more than one at either end
    monkeypatch.setattr(sampling, "BLOCK", block)
    ids, logprobs = sample(logits.expand(n, vocab), uniforms, temperature)
    expected = softmax_of(logits, temperature)
    assert (torch.bincount(ids, minlength=vocab) - expected * n).abs().max() < 2.1
    assert (logprobs - expected.log()[ids]).abs().max() < 1e-5 and logprobs.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_16_bits_are_sampled_in_float32(dtype):
    logits = (torch.randn(50, 700, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    ids, logprobs = sample(logits, torch.linspace(0, LAST, 50).tolist(), 0.7)
    assert (logprobs - softmax_of(logits, 0.7).log().gather(1, ids[:, None])[:, 0]).abs().max() < 1e-5


def test_chi_square_of_the_rows_own_random_numbers():
    vocab, rows, draws = 1000, 64, 640
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(0)) * 1.5
    rows = [Row([1], seed=s) for s in range(rows)]
    ids = torch.cat([sample(logits.expand(len(rows), vocab), [next_uniform(row) for row in rows])[0] for _ in range(draws)])
    expected = softmax_of(logits) * len(ids)
    seen, kept = torch.bincount(ids, minlength=vocab).double(), expected >= 5
    seen, expected = (torch.cat([x[kept], x[~kept].sum()[None]]) for x in (seen, expected))
    chi_square, freedom = ((seen - expected)**2 / expected).sum().item(), len(seen) - 1
    assert abs(chi_square - freedom) < 4.5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("vocab, block", [(600, 256), (10, 4), (256, 256), (3, 256)])
@pytest.mark.parametrize("uniform", [0.0, 5e-324, 1e-9, 0.5, 1 - 2**-25, LAST])
def test_extreme_uniforms_never_draw_a_token_of_weight_zero(vocab, block, uniform, monkeypatch):
    monkeypatch.setattr(sampling, "BLOCK", block)
    for alive in ({0}, {vocab - 1}, {vocab // 2}, {0, vocab - 1}, {1, vocab // 2}):
        for low in (-torch.inf, -1e4):  # excluded, or underflowing to weight 0
            logits = torch.full((vocab,), low)
            for i in alive:
                logits[i] = 0.3 * i
            ids, logprobs = sample(logits[None], [uniform])
            assert ids.item() in alive and logprobs.item() > -200
            if uniform in (0.0, LAST) and len(alive) == 2:
                ends = logits.clone()
                ends[list(alive)] = 0.0
                assert sample(ends[None], [uniform])[0].item() == (min(alive) if uniform == 0.0 else max(alive))


@pytest.mark.parametrize("vocab, weights", [(256, {0: 1.0, 3: 1.5 * 2**-24}), (512, {0: 1.0, 257: 0.75 * 2**-52})], ids=["above", "below"])
def test_where_sums_are_rounded_no_token_of_weight_zero_is_drawn(vocab, weights):
    """The float32 sum of the first block is more than its tokens have; before the second block's first token less than nothing is left."""
    logits = torch.full((1, vocab), -torch.inf)
    for token, weight in weights.items():
        logits[0, token] = math.log(weight)
    ids, logprobs = sample(logits, [LAST])
    assert ids.tolist() == [max(weights)] and logprobs.isfinite().all()


def test_minus_infinity_is_never_drawn():
    logits = torch.randn(700, generator=torch.Generator().manual_seed(0))
    logits[::2] = -torch.inf
    ids, logprobs = sample(logits.expand(5000, 700), torch.linspace(0, LAST, 5000).tolist())
    assert (ids % 2 == 1).all() and torch.isfinite(logprobs).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_rows_of_logits_that_are_not_finite_are_named(bad, temperature):
    logits = torch.zeros(3, 700)
    logits[1, 650] = bad
    assert sample_all(logits, [0.5] * 3, temperature)[1].isnan().tolist() == [False, True, False]
    assert sample_all(torch.full((1, 5), -torch.inf), [0.5], temperature)[1].isnan().all()


def test_temperature_0_takes_the_most_likely():
    logits = torch.randn(50, 700, generator=torch.Generator().manual_seed(0))
    ids, logprobs = sample(logits, [LAST] * 50, temperature=0)
    assert torch.equal(ids, logits.argmax(-1))
    assert (logprobs - logits.log_softmax(-1).amax(-1)).abs().max() < 1e-5


@pytest.mark.parametrize("cut", [{"top_k": 1}, {"top_k": 5}, {"top_k": 5000}, {"top_p": 0.01}, {"top_p": 0.7}, {"top_k": 40, "top_p": 0.9}])
def test_top_k_and_top_p_keep_what_transformers_keeps_and_renormalise(cut):
    from transformers import TopKLogitsWarper, TopPLogitsWarper
    logits = torch.randn(700, generator=torch.Generator().manual_seed(0)) * 3
    warped = logits[None] / 0.8
    if "top_k" in cut:
        warped = TopKLogitsWarper(cut["top_k"])(None, warped)
    if "top_p" in cut:
        warped = TopPLogitsWarper(cut["top_p"])(None, warped)
    n = 20_000
    ids, logprobs = sample(logits.expand(n, 700), [(i + 0.5) / n for i in range(n)], 0.8, **cut)
    assert (torch.bincount(ids, minlength=700) - softmax_of(warped[0]) * n).abs().max() < 2.1
    assert (logprobs - warped[0].log_softmax(-1)[ids]).abs().max() < 1e-5


def test_a_nucleus_ends_with_the_token_that_reaches_p():
    ids, logprobs = sample(torch.zeros(2, 2), [0.1, 0.9], top_p=0.5)
    assert ids[0] == ids[1] and logprobs.tolist() == [0.0, 0.0]


def test_a_rows_random_numbers_are_its_seeds():
    def draw(seed):
        row = Row([1], seed=seed)
        return [next_uniform(row) for _ in range(200)]
    assert draw(5) == draw(5) != draw(6) and len(set(draw(5))) == 200
    ahead = Row([1], seed=5).uniforms(130)
    assert ahead == draw(5)[:130]  # what the next tokens will take, however many are asked for
    big = [next_uniform(Row([1], seed=2**100 + i)) for i in range(2)]
    assert big[0] != big[1] and all(0 <= u < 1 for u in draw(5))


def test_a_top_p_that_float32_rounds_to_0_keeps_the_likeliest_token():
    ids, logprobs = sampling.sample(torch.tensor([[0.0, 2.0, 1.0]]), torch.tensor([0.999], dtype=torch.float64), torch.tensor([-1]), top_p=1e-50)
    assert ids.tolist() == [1] and logprobs.tolist() == [0.0]


@pytest.mark.parametrize("cut", [{"top_k": 5}, {"top_p": 0.9}])
def test_core_refuses_top_k_and_top_p_in_one_line(cut):
    with pytest.raises(UserError, match="^top_k and top_p: this engine samples from the whole distribution$"):
        make_engine(make_tiny()[0], tokens=9, **cut)
