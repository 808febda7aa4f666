"""The equations of grpo.py: by hand, by a second implementation, against TRL's `_compute_loss`, by invariants."""

import math
import random
from collections import defaultdict
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import grpo
from grpo import (
    LOSSES,
    PAPER_SETTINGS,
    Counts,
    group_advantages,
    truncated_importance_weights,
    kl_estimate,
    token_advantages,
    total_loss,
)
from core.config import UserError
from core.data import turn_index

CLIP = {"clip_eps_low": 0.2, "clip_eps_high": 0.28}
# Default arguments of the surrogates, and what the tests take in their place.
HYPER = {**CLIP, "delta": None, "clip_max": 1.2, "tau_pos": 1.0, "tau_neg": 1.05, "k": (2.0, 3.0), "lam": (3.0, 2.0), "cap": 2.5, "max_drift": 0.1}
TAKES = {"cispo": ["clip_max"], "sapo": ["tau_pos", "tau_neg"], "vespo": ["k", "lam"], "dppo": ["cap"], "deepseek": ["max_drift"]}
NAMES = sorted(LOSSES)  # without extras/zoo some fewer
IN_TRL = [name for name in NAMES if name != "dppo"]  # TRL 1.16 has no such loss
needs_zoo = pytest.mark.skipif("vespo" not in LOSSES, reason="extras/zoo is not here")


@pytest.fixture(autouse=True)
def float64():  # also for python scalars inside torch.where, ours and TRL's: 1.05 in float32 is 1.1e-8 off
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def counts_of(mask, max_tokens=None):
    return Counts(len(mask), int(mask.sum()), max_tokens or mask.shape[1])


def episode_mask(rng, length, prompt):
    """1s and 0s like a tool episode: prompt, then turns (1s) parted by template and tool output (0s)."""
    mask = [0] * prompt
    while len(mask) < length:
        mask += [1] * rng.randint(1, 6) + [0] * rng.randint(1, 5)
    return mask[:length] if 1 in mask[:length] else mask[: length - 1] + [1]


def batch(seed, rows=6, spread=0.3, per_token=False):
    """Random right-padded episodes: dict of (B, T) tensors, logprobs a leaf; spread = std of the log-ratio."""
    rng, gen = random.Random(seed), torch.Generator().manual_seed(seed)
    prompts = [rng.randint(1, 5) for _ in range(rows)]
    lengths = [p + rng.randint(1, 25) for p in prompts]
    mask = torch.zeros(rows, max(lengths))
    for i in range(rows):
        mask[i, : lengths[i]] = torch.tensor(episode_mask(rng, lengths[i], prompts[i]), dtype=mask.dtype)
    shape = mask.shape
    old = -torch.rand(shape, generator=gen) * 3 - 0.1
    logprobs = old + spread * torch.randn(shape, generator=gen)
    ref = logprobs + 0.5 * torch.randn(shape, generator=gen)
    advantages = torch.randn((rows, shape[1] if per_token else 1), generator=gen).expand(shape).clone()
    return {
        "logprobs": logprobs.requires_grad_(),
        "old": old,
        "ref": ref,
        "advantages": advantages,
        "mask": mask,
        "entropy": torch.rand(shape, generator=gen),
        "prompts": prompts,
        "lengths": lengths,
    }


def ours(name, b, kl_coef=0.0, entropy_coef=0.0, counts=None, kind="k3", **hyper):
    """`total_loss`, the surrogate's own settings bound. Returns loss, gradient wrt logprobs, metrics."""
    counts = counts or counts_of(b["mask"])
    hyper = HYPER | hyper
    surrogate, normalizer = LOSSES[name]
    surrogate = partial(surrogate, **{key: hyper[key] for key in TAKES.get(name, ["delta"])})
    config = SimpleNamespace(loss=name, kl_coef=kl_coef, kl_estimator=kind, entropy_coef=entropy_coef,
                             **{key: hyper[key] for key in CLIP})
    with mock.patch.dict(LOSSES, {name: (surrogate, normalizer)}):
        loss, metrics = total_loss(config, counts, b["logprobs"], b["entropy"], b["old"], b["ref"], b["advantages"], b["mask"])
    return loss.detach(), torch.autograd.grad(loss, b["logprobs"])[0], metrics


def close(a, b, tol):
    a, b = torch.as_tensor(a), torch.as_tensor(b)
    return bool(torch.isfinite(a).all()) and float((a - b).abs().max()) <= tol * max(float(b.abs().max()), 1e-12)


# ------------------------------------------------------------------------------------------------------- by hand
# Two sequences of three tokens, old log-prob -1 everywhere; columns 1, 2 of the first and 1 of the second are sampled.
#   first:  A = +1, ratios 1.5, 0.5        second: A = -2, ratio 2        clip 0.2 / 0.2
BY_HAND = {
    # first: -min(1.5, 1.2) = -1.2, -min(.5, .8) = -.5; mean -.85.  second: -min(-4, -2.4) = 4.  (-.85 + 4) / 2
    "grpo": 1.575,
    "dapo": (-1.2 - 0.5 + 4) / 3,
    "dr_grpo": (-1.2 - 0.5 + 4) / (2 * 5),  # max_tokens 5
    # log p = ln(ratio) - 1; weights min(1.5, 1.2), .5, min(2, 1.2)
    "cispo": (-1.2 * (math.log(1.5) - 1) - 0.5 * (math.log(0.5) - 1) + 1.2 * 2 * (math.log(2) - 1)) / 3,
    # sigmoid(.5) + sigmoid(-.5) = 1, so the first is -4 / 2 = -2; second: 2 * 4 / 1.05 / (1 + e^-1.05)
    "sapo": (-2 + 8 / 1.05 / (1 + math.exp(-1.05))) / 2,
    # p_old = 1/e = .368; p - p_old = .184, -.184 | .368: within .2 above (A > 0), and of A < 0 only a loss is bounded; so plain weights 1.5, .5, 2
    "dppo": (-1.5 * (math.log(1.5) - 1) - 0.5 * (math.log(0.5) - 1) + 2 * 2 * (math.log(2) - 1)) / 3,
    "deepseek": 1.575,  # as grpo: the second has A < 0 and drifted by -ln 2, towards more likely
    # s = sqrt(1.5 * .5) = .8660254, inside the clip; second s = 2: 4.  (-.8660254 + 4) / 2
    "gspo": 1.5669872981,
    "luspo": (2 * -math.sqrt(0.75) + 4) / 2,
    # first: w = .75, phi = .75^2 e^(3 * .25) = 1.190813; second: w = 2, phi = 2^3 e^(2 * -1) = 1.082682
    "vespo": (-(0.75**2) * math.exp(0.75) * (math.log(0.75) - 2) + 8 * math.exp(-2) * 2 * (math.log(2) - 1)) / 3,
}


def hand_batch():
    ratios = torch.tensor([[9.0, 1.5, 0.5], [9.0, 2.0, 9.0]])
    return {
        "logprobs": (ratios.log() - 1).requires_grad_(),
        "old": torch.full((2, 3), -1.0),
        "ref": torch.full((2, 3), -1.0),
        "advantages": torch.tensor([[1.0] * 3, [-2.0] * 3]),
        "mask": torch.tensor([[0, 1, 1], [0, 1, 0]]),
        "entropy": torch.tensor([[7.0, 1.0, 2.0], [7.0, 3.0, 7.0]]),
    }


@pytest.mark.parametrize("name", NAMES)
def test_by_hand(name):
    loss, _, metrics = ours(name, hand_batch(), counts=Counts(2, 3, 5), clip_eps_high=0.2)
    assert float(loss) == pytest.approx(BY_HAND[name], abs=1e-10)
    assert float(metrics["ratio"]) == pytest.approx((1.5 + 0.5 + 2) / 3)
    assert float(metrics["approx_kl"]) == pytest.approx(
        (0.5 - math.log(1.5) - 0.5 - math.log(0.5) + 1 - math.log(2)) / 3
    )


def test_by_hand_clips_kl_entropy():
    two_sided = ours("grpo", hand_batch(), clip_eps_high=0.2, delta=1.6)[0]  # second: -min(1.6 * -2, 1.2 * -2) = 3.2
    assert float(two_sided) == pytest.approx((-0.85 + 3.2) / 2)
    loss, _, metrics = ours("dapo", hand_batch())  # clip-higher .28: 1.5 -> 1.28
    assert float(loss) == pytest.approx((-1.28 - 0.5 + 4) / 3)
    assert (float(metrics["clip_low"]), float(metrics["clip_high"])) == (0.0, pytest.approx(1 / 3))
    assert float(ours("cispo", hand_batch())[2]["clip_high"]) == pytest.approx(2 / 3)  # 1.5 and 2 are over 1.2
    # entropy: 1, 2, 3 sampled -> mean 2; coefficient .1 takes .2 off
    assert float(ours("grpo", hand_batch(), clip_eps_high=0.2, entropy_coef=0.1)[0]) == pytest.approx(1.575 - 0.2)
    # KL: ref = old, so log p/ref = ln 1.5, ln .5, ln 2; k3 = 1/r - 1 + ln r; grpo averages it like its loss
    k3 = [1 / r - 1 + math.log(r) for r in (1.5, 0.5, 2.0)]
    assert float(ours("grpo", hand_batch(), clip_eps_high=0.2, kl_coef=0.1)[0]) == pytest.approx(
        1.575 + 0.1 * ((k3[0] + k3[1]) / 2 + k3[2]) / 2
    )
    b = hand_batch()
    k2 = (math.log(1.5) ** 2 + math.log(0.5) ** 2) / 2
    assert float(kl_estimate(b["logprobs"].detach(), b["ref"], b["mask"], "k2")[0].sum()) == pytest.approx(k2)


def test_kl_gradients_on_policy():
    """Exact expectation over a vocabulary of 5: k2 averages to grad KL(p || ref), k3 to grad KL(ref || p)."""
    logits, ref = torch.randn(5, requires_grad=True), torch.randn(5).log_softmax(0)
    p = logits.log_softmax(0)
    mean = {k: (p.detach().exp() * kl_estimate(p, ref, torch.ones(5), k)).sum() for k in ("k2", "k3")}
    grad = {k: torch.autograd.grad(v, logits, retain_graph=True)[0] for k, v in mean.items()}
    reverse, forward = (p.exp() * (p - ref)).sum(), (ref.exp() * (ref - p)).sum()
    assert torch.allclose(grad["k2"], torch.autograd.grad(reverse, logits, retain_graph=True)[0], atol=1e-14)
    assert torch.allclose(grad["k3"], torch.autograd.grad(forward, logits)[0], atol=1e-14)
    assert float(mean["k3"].detach()) == pytest.approx(float(reverse.detach()))


# ------------------------------------------------------------------------------------------ second implementation
def slow_token(name, h, A, logp, old, s, w):
    """(loss, d loss / d log p) of one token, from the paper, on plain floats; s and w are the sequence's ratios."""
    r = math.exp(logp - old)
    if name == "deepseek" and A < 0 and math.log(s) < -h["max_drift"]:
        return 0.0, 0.0
    if name in ("grpo", "dapo", "dr_grpo", "gspo", "luspo", "deepseek"):
        r = s if name in ("gspo", "luspo") else r
        capped = r if h["delta"] is None else min(r, h["delta"])
        clip = min(max(r, 1 - h["clip_eps_low"]), 1 + h["clip_eps_high"])
        if capped * A <= clip * A:  # the smaller one; equal inside the band
            return -capped * A, (-r * A if capped == r else 0.0)
        return -clip * A, (-r * A if clip == r else 0.0)
    if name == "cispo":
        return -min(r, h["clip_max"]) * A * logp, -min(r, h["clip_max"]) * A
    if name == "dppo":
        gain = math.exp(logp) - math.exp(old)
        stopped = gain > h["clip_eps_high"] if A > 0 else -gain > h["clip_eps_low"]
        weight = 0.0 if stopped else min(r, h["cap"])
        return -weight * A * logp, -weight * A
    if name == "sapo":  # d/dr of sigmoid(tau (r - 1)) 4 / tau = 4 p (1 - p)
        tau = h["tau_pos"] if A > 0 else h["tau_neg"]
        p = 1 / (1 + math.exp(-tau * (r - 1)))
        return -4 / tau * p * A, -4 * p * (1 - p) * A * r
    k, lam = (h["k"][0], h["lam"][0]) if A >= 0 else (h["k"][1], h["lam"][1])
    phi = w**k * math.exp(lam * (1 - w))
    return -phi * A * logp, -phi * A


def slow_loss(name, b, kl_coef, counts, h):
    rows = {k: b[k].tolist() for k in ("logprobs", "old", "ref", "advantages", "mask")}
    total, grad = 0.0, torch.zeros_like(b["mask"])
    for i, mask in enumerate(rows["mask"]):
        columns = [t for t, m in enumerate(mask) if m == 1]
        logp, old, ref, A = (rows[k][i] for k in ("logprobs", "old", "ref", "advantages"))
        w = math.exp(sum(logp[t] - old[t] for t in columns))
        s = w ** (1 / len(columns))
        divisor = {
            "grpo": len(columns) * counts.sequences,
            "sapo": len(columns) * counts.sequences,
            "gspo": len(columns) * counts.sequences,
            "deepseek": len(columns) * counts.sequences,
            "luspo": counts.sequences,
            "dr_grpo": counts.sequences * counts.max_tokens,
        }.get(name, counts.tokens)
        for t in columns:
            loss, slope = slow_token(name, h, A[t], logp[t], old[t], s, w)
            loss += kl_coef * (math.exp(ref[t] - logp[t]) - (ref[t] - logp[t]) - 1)
            slope += kl_coef * (1 - math.exp(ref[t] - logp[t]))
            total += loss / divisor
            grad[i, t] = slope / divisor
    return total, grad


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("per_token", [False, True])
def test_second_implementation(name, per_token):
    for seed, spread, kl_coef, delta in [
        (0, 0.05, 0.0, None),
        (1, 0.5, 0.1, None),
        (2, 1.0, 0.04, 1.6),
        (3, 1.0, 0.0, None),
    ]:
        b = batch(seed, spread=spread, per_token=per_token)
        counts = counts_of(b["mask"], max_tokens=50)
        loss, grad, _ = ours(name, b, kl_coef, counts=counts, delta=delta)
        slow, slow_grad = slow_loss(name, b, kl_coef, counts, HYPER | {"delta": delta if "delta" in TAKES.get(name, ["delta"]) else None})
        assert close(loss, slow, 1e-10) and close(grad, slow_grad, 1e-10), (seed, loss, slow)


# ------------------------------------------------------------------------------------------------------------ TRL
@pytest.fixture(scope="module")
def trl_trainer():
    return pytest.importorskip("trl.trainer.grpo_trainer").GRPOTrainer


def trl_trainer_stub(cls, name, max_tokens, kl_coef, entropy_coef, accumulation, h):
    trainer = cls.__new__(cls)
    cispo = name == "cispo"  # TRL's epsilon_high IS the cap there
    trainer.__dict__.update(
        loss_type="grpo" if name in ("gspo", "deepseek") else name,
        importance_sampling_level="sequence" if name in ("gspo", "luspo") else "token",
        epsilon_low=h["clip_eps_low"],
        epsilon_high=h["clip_max"] if cispo else h["clip_eps_high"],
        beta=kl_coef,
        args=SimpleNamespace(
            delta=h["delta"],
            use_bias_correction_kl=h["bias_correction"],
            steps_per_generation=accumulation,
            sapo_temperature_pos=h["tau_pos"],
            sapo_temperature_neg=h["tau_neg"],
            vespo_k_pos=h["k"][0],
            vespo_lambda_pos=h["lam"][0],
            vespo_k_neg=h["k"][1],
            vespo_lambda_neg=h["lam"][1],
        ),
        accelerator=SimpleNamespace(
            num_processes=1,
            sync_gradients=True,
            gather=lambda x: x,
            gather_for_metrics=lambda x: x,
            reduce=lambda x, reduction: x,
        ),
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=accumulation,
        max_completion_length=max_tokens,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=h["max_drift"] if name == "deepseek" else None,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        use_adaptive_entropy=False,
        _entropy_bonus_enabled=entropy_coef != 0,
        entropy_coef=entropy_coef,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    return trainer


def trl_loss(
    cls, name, b, kl_coef=0.0, entropy_coef=0.0, max_tokens=50, rows=None, accumulation=1, weights=None, **hyper
):
    """TRL's own `_compute_loss` on the same numbers: completions cut out of our rows, prompts dropped."""
    rows = range(len(b["mask"])) if rows is None else rows
    width = max(b["lengths"][i] - b["prompts"][i] for i in rows)

    def completions(x, pad):
        cut = [x[i, b["prompts"][i] : b["lengths"][i]] for i in rows]
        return torch.stack([torch.cat([c, c.new_full((width - len(c),), pad)]) for c in cut])

    hyper = HYPER | {"bias_correction": False} | hyper
    if name == "deepseek":
        hyper["delta"] = None  # ours takes the clipped surrogate without its second cap
    trainer = trl_trainer_stub(cls, name, max_tokens, kl_coef, entropy_coef, accumulation, hyper)
    leaf, entropies = completions(b["logprobs"], 0.0), completions(b["entropy"], 0.0)
    trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: (leaf, entropies, None)
    inputs = {
        "prompt_ids": torch.zeros(len(rows), 1).long(),
        "prompt_mask": torch.ones(len(rows), 1),
        "completion_ids": torch.zeros(len(rows), width).long(),
        "completion_mask": completions(torch.ones_like(b["mask"]), 0.0),
        "tool_mask": completions(b["mask"], 1.0),
        "advantages": completions(b["advantages"], 0.0),
        "old_per_token_logps": completions(b["old"], 0.0),
        "ref_per_token_logps": completions(b["ref"], 0.0),
        "num_items_in_batch": b["mask"].sum(),
    }
    if (b["advantages"] == b["advantages"][:, :1]).all():
        inputs["advantages"] = b["advantages"][list(rows), 0]  # (B,), as TRL makes them
    if weights is not None:
        trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
        inputs["importance_sampling_ratio"] = completions(weights, 1.0)
    loss = trainer._compute_loss(None, inputs)
    return loss.detach(), torch.autograd.grad(loss, b["logprobs"])[0], trainer._metrics["train"]


SETTINGS = {  # kl_coef, entropy_coef, spread of the log-ratio, hyper
    "unclipped": (0.0, 0.0, 0.01, {}),
    "clipped": (0.0, 0.0, 0.6, {}),
    "kl": (0.05, 0.0, 0.3, {}),
    "delta": (0.0, 0.0, 1.0, {"delta": 1.6}),
    "entropy": (0.0, 0.01, 0.3, {}),
    "all": (0.04, 0.02, 0.8, {"delta": 2.0, "clip_eps_low": 0.1, "clip_max": 5.0}),
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", IN_TRL)
def test_trl_parity(trl_trainer, name, setting):
    """Value and gradient wrt every log-prob, multi-turn masks, random lengths: relative error < 1e-9."""
    kl_coef, entropy_coef, spread, hyper = SETTINGS[setting]
    clipped = 0.0
    for seed in range(5):
        b = batch(seed, spread=spread)
        loss, grad, metrics = ours(name, b, kl_coef, entropy_coef, counts_of(b["mask"], 50), **hyper)
        trl, trl_grad, trl_metrics = trl_loss(trl_trainer, name, b, kl_coef, entropy_coef, **hyper)
        assert close(loss, trl, 1e-9) and close(grad, trl_grad, 1e-9), (seed, loss, trl)
        assert (grad[b["mask"] == 0] == 0).all() and grad.abs().max() > 0
        if "clip_low" in metrics:
            clipped += float(metrics["clip_low"] + metrics["clip_high"])
            if hyper.get("delta") is None and name not in ("gspo", "luspo", "deepseek"):
                for side in ("low", "high"):
                    assert float(metrics[f"clip_{side}"]) == pytest.approx(trl_metrics[f"clip_ratio/{side}_mean"][0])
    if name in ("grpo", "dapo", "dr_grpo", "gspo", "luspo") and setting in ("unclipped", "clipped"):
        assert (clipped > 0) == (setting == "clipped")  # both branches were really taken


@pytest.mark.parametrize("name", sorted({*IN_TRL} - {"gspo", "luspo"}))
def test_trl_parity_with_the_kl_that_trl_ships(trl_trainer, name):
    """use_bias_correction_kl=True, TRL's default: k3 times the ratio. (For gspo and luspo TRL broadcasts the sequence's
    ratio over the tokens, of which its documentation says that it is not unbiased; ours is the token's everywhere.)"""
    for seed in range(5):
        b = batch(seed, spread=0.4)
        loss, grad, _ = ours(name, b, 0.3, counts=counts_of(b["mask"], 50), kind="k3_ratio")
        trl, trl_grad, _ = trl_loss(trl_trainer, name, b, 0.3, bias_correction=True)
        assert close(loss, trl, 1e-9) and close(grad, trl_grad, 1e-9)


def test_k3_times_ratio_is_unbiased_where_k3_explodes():
    """Over all outcomes of one softmax token: value KL(policy || ref), gradient its gradient; k3 alone has neither."""
    logits = torch.tensor([0.0, 1.0, -6.0], requires_grad=True)
    logp, ref = logits.log_softmax(0), torch.tensor([0.5, -1.0, 3.0]).log_softmax(0)
    old = torch.tensor([0.3, 0.3, 0.4]).log()
    exact = (logp.exp() * (logp - ref)).sum()
    mask = torch.ones(3)
    mean = (old.exp() * kl_estimate(logp, ref, mask, "k3_ratio", old)).sum()
    assert close(mean.detach(), exact.detach(), 1e-12)
    wanted, = torch.autograd.grad(exact, logits, retain_graph=True)
    found, = torch.autograd.grad(mean, logits, retain_graph=True)
    assert close(found, wanted, 1e-12)
    k3 = kl_estimate(logp, ref, mask, "k3")
    assert k3[2] > 500 * kl_estimate(logp, ref, mask, "k3_ratio", old)[2] > 0


@pytest.mark.parametrize("name", sorted({"grpo", "dapo", "dr_grpo", "cispo", "sapo"} & {*NAMES}))
def test_trl_parity_turn_credit_and_importance_correction(trl_trainer, name):
    """TRL takes (B, T) advantages from subclasses; its vLLM correction multiplies the loss, ours the advantages."""
    for seed in range(4):
        b = batch(seed, spread=0.5, per_token=True)
        sampled = b["old"] + 0.7 * torch.randn(b["old"].shape, generator=torch.Generator().manual_seed(seed))
        weights = truncated_importance_weights(b["old"], sampled, b["mask"], cap=1.5)
        assert weights.max() == 1.5 and not weights.requires_grad and (weights[b["mask"] == 0] == 1).all()
        ours_b = b | {"advantages": b["advantages"] * weights}
        loss, grad, _ = ours(name, ours_b, 0.05, counts=counts_of(b["mask"], 50))
        trl, trl_grad, _ = trl_loss(trl_trainer, name, b, 0.05, weights=weights)
        assert close(loss, trl, 1e-9) and close(grad, trl_grad, 1e-9)


@needs_zoo
def test_trl_parity_vespo_correction_is_inside_w(trl_trainer):
    """TRL multiplies w by trainer / sampler, which is w against the sampler: vespo's old are the sampler's."""
    b = batch(0, spread=0.1)
    sampled = b["old"] + 0.1 * torch.randn(b["old"].shape, generator=torch.Generator().manual_seed(0))
    weights = truncated_importance_weights(b["old"], sampled, b["mask"], cap=1e9)  # uncapped
    loss, grad, _ = ours("vespo", b | {"old": sampled})
    trl, trl_grad, _ = trl_loss(trl_trainer, "vespo", b, weights=weights)
    assert close(loss, trl, 1e-9) and close(grad, trl_grad, 1e-9)


@pytest.mark.parametrize("name", IN_TRL)
def test_trl_parity_gradient_accumulation(trl_trainer, name):
    """TRL's equal micro-batches add up to our step (its entropy bonus would not: a mean of micro-batch means)."""
    b = batch(7, rows=6, spread=0.5)
    loss, grad, _ = ours(name, b, 0.05, counts=counts_of(b["mask"], 50))
    parts = [trl_loss(trl_trainer, name, b, 0.05, rows=range(i, i + 2), accumulation=3) for i in (0, 2, 4)]
    assert close(sum(p[0] for p in parts), loss, 1e-9) and close(sum(p[1] for p in parts), grad, 1e-9)


@pytest.mark.parametrize("name", IN_TRL)
def test_trl_parity_where_truncated_completions_are_masked(trl_trainer, name):
    """mask_truncated_completions sets their masks to 0 and counts num_items_in_batch afterwards; a mean over sequences still counts them."""
    b = batch(4, spread=0.5)
    b["mask"][1] = b["mask"][4] = 0
    config = SimpleNamespace(kl_coef=0.05, entropy_coef=0.0, max_tokens=50)
    taught, counts = grpo.in_update(config, b["mask"].long(), torch.zeros_like(b["mask"]).long(), b["advantages"])
    assert taught == [0, 2, 3, 5] and counts.sequences == 6 and counts.tokens == counts.trained == int(b["mask"].sum())
    loss, grad, _ = ours(name, b, 0.05, counts=counts)
    trl, trl_grad, _ = trl_loss(trl_trainer, name, b, 0.05)
    assert close(loss, trl, 1e-9) and close(grad, trl_grad, 1e-9)


def test_trl_parity_catches_a_mask_shifted_by_one(trl_trainer):
    for name in IN_TRL:
        b = batch(3, spread=0.5)
        shifted = b | {"mask": b["mask"].roll(1, 1)}
        trl, trl_grad, _ = trl_loss(trl_trainer, name, b)
        loss, grad, _ = ours(name, shifted, counts=counts_of(b["mask"], 50))
        assert not close(loss, trl, 1e-3) and not close(grad, trl_grad, 1e-3), name


# ------------------------------------------------------------------------------------------------------ invariants
@pytest.mark.parametrize("name", NAMES)
def test_micro_batches_add_up(name):
    b = batch(11, rows=6, spread=0.6, per_token=True)
    counts = counts_of(b["mask"], 50)
    whole, whole_grad, whole_metrics = ours(name, b, 0.05, 0.01, counts)
    for split in ([[0], [1], [2], [3], [4], [5]], [[0, 1, 2, 3], [4, 5]], [[5, 0], [3], [2, 1, 4]]):
        total, grad, metrics = 0.0, torch.zeros_like(whole_grad), defaultdict(float)
        for rows in split:
            part = {k: v[rows].detach() if torch.is_tensor(v) else v for k, v in b.items()}
            part["logprobs"] = part["logprobs"].requires_grad_()
            loss, part_grad, part_metrics = ours(name, part, 0.05, 0.01, counts)
            total, grad[rows] = total + loss, part_grad
            for key, value in part_metrics.items():
                metrics[key] += value
        assert close(total, whole, 1e-12) and close(grad, whole_grad, 1e-12)
        assert all(close(metrics[k], v, 1e-12) for k, v in whole_metrics.items())


@pytest.mark.parametrize("bad", [100.0, -100.0, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("name", NAMES)
def test_masked_garbage_changes_nothing(name, bad):
    clean, dirty = batch(5, spread=0.5), batch(5, spread=0.5)
    with torch.no_grad():
        for i, key in enumerate(("logprobs", "old", "ref", "advantages", "entropy")):
            dirty[key][clean["mask"] == 0] = bad * (-1) ** i
    loss, grad, metrics = ours(name, clean, 0.05, 0.01)
    dirty_loss, dirty_grad, dirty_metrics = ours(name, dirty, 0.05, 0.01)
    assert torch.equal(loss, dirty_loss) and torch.equal(grad, dirty_grad) and metrics == dirty_metrics
    weights = truncated_importance_weights(dirty["logprobs"], dirty["old"], dirty["mask"], 2.0)
    assert torch.isfinite(weights).all() and not weights.requires_grad
    for kind in ("k2", "k3"):
        assert torch.isfinite(kl_estimate(dirty["logprobs"], dirty["ref"], dirty["mask"], kind)).all()


@pytest.mark.parametrize("name", NAMES)
def test_bool_mask_padding_and_empty_sequence(name):
    b = batch(6, spread=0.5)
    loss, grad, _ = ours(name, b)
    assert close(ours(name, b | {"mask": b["mask"].bool()})[0], loss, 1e-15)
    wide = {k: torch.nn.functional.pad(v.detach(), (0, 3)) if torch.is_tensor(v) else v for k, v in b.items()}
    wide["logprobs"] = wide["logprobs"].requires_grad_()
    assert close(ours(name, wide, counts=counts_of(b["mask"]))[0], loss, 1e-15)
    none = b | {"mask": b["mask"].clone()}
    none["mask"][0] = 0  # a truncated episode, masked whole: no NaN, no gradient
    loss, grad, _ = ours(name, none, 0.05)
    assert torch.isfinite(loss) and torch.isfinite(grad).all() and (grad[0] == 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_first_update_is_reinforce_with_a_group_baseline(name):
    """policy == old: every loss's gradient is -A grad log p under its normaliser, written out here with sums."""
    b = batch(8, spread=0.0)
    b["advantages"] = group_advantages(torch.randn(6), [0, 1, 0, 1, 0, 1], "none")[:, None].expand_as(b["mask"])
    _, grad, metrics = ours(name, b, counts=counts_of(b["mask"], 50))
    per_row = {
        "dapo": b["mask"].sum(),
        "cispo": b["mask"].sum(),
        "dppo": b["mask"].sum(),
        "vespo": b["mask"].sum(),
        "dr_grpo": 6 * 50,
        "luspo": 6,
    }
    divisor = torch.as_tensor(per_row.get(name, 6 * b["mask"].sum(1, keepdim=True)))
    assert close(grad, -b["advantages"] * b["mask"] / divisor, 1e-12)
    assert float(metrics["ratio"]) == 1.0 and float(metrics["approx_kl"]) == 0.0


@needs_zoo
def test_float32_extremes_stay_finite():
    """Sampled log-ratios of +-200 in float32: vespo's w overflows, its phi and its gradient do not."""
    torch.set_default_dtype(torch.float32)
    b = {
        "logprobs": torch.tensor([[-0.1, -0.1], [-200.0, -0.1]], requires_grad=True),
        "old": torch.tensor([[-200.0, -0.1], [-0.1, -0.1]]),
        "advantages": torch.tensor([[1.0, 1.0], [-1.0, -1.0]]),
        "mask": torch.ones(2, 2),
        "ref": None,
        "entropy": torch.zeros(2, 2),
    }
    loss, grad, metrics = ours("vespo", b)
    assert torch.isfinite(loss) and torch.isfinite(grad).all() and torch.isfinite(metrics["phi"])


def test_names_and_hyper_parameters():
    b = hand_batch()
    with pytest.raises(TypeError, match="clip_eps_high"):  # a missing one is an error, not a hidden default
        grpo.clipped(b["logprobs"] - b["old"], b["logprobs"], b["advantages"], b["mask"], clip_eps_low=0.2)
    settings = {"dapo": {"clip_eps_high": 0.28}, "dr_grpo": {"scale_rewards": "none"}}
    exact = {"importance_correction": 2.0}  # rounding alone leaves such ranges
    clips = {**exact, "clip_eps_low": 3e-4, "clip_eps_high": 4e-4}  # arXiv 2507.18071 section 5.1
    longer = {**exact, "clip_eps_low": 2e-3, "clip_eps_high": 2.5e-3}  # arXiv 2602.05261 section 5.1
    here = {**settings, "gspo": clips, "rloo": {"scale_rewards": "none"}}  # the last is a --credit
    zoo = {"luspo": longer, "deepseek": {"scale_rewards": "none"}, "gdpo": {"scale_rewards": "batch"}, "gigpo": {"scale_rewards": "none"}}
    assert PAPER_SETTINGS == here | (zoo if "luspo" in LOSSES else {})


# ------------------------------------------------------------------------------------------------------ advantages
def test_group_advantages_by_hand():
    # groups a: 1, 0, 0 (mean 1/3, unbiased variance ((2/3)^2 + 2 (1/3)^2) / 2 = 1/3) and b: 5, 3 (mean 4, variance 2)
    rewards, ids = torch.tensor([1.0, 5.0, 0.0, 3.0, 0.0]), ["a", "b", "a", "b", "a"]
    none = [2 / 3, 1, -1 / 3, -1, -1 / 3]
    stds = [math.sqrt(1 / 3), math.sqrt(2)]
    group = [a / (stds[i % 2] + 1e-4) for i, a in enumerate(none)]
    assert torch.allclose(group_advantages(rewards, ids, "none"), torch.tensor(none))
    assert torch.allclose(group_advantages(rewards, ids), torch.tensor(group))
    # all five: mean 1.8, squares .64 + 10.24 + 3.24 + 1.44 + 3.24 = 18.8, / 4
    assert torch.allclose(group_advantages(rewards, ids, "batch"), torch.tensor(none) / (math.sqrt(4.7) + 1e-4))
    # leave one out: 1 - 0, 5 - 3, 0 - .5, 3 - 5, 0 - .5
    assert torch.allclose(
        group_advantages(rewards, ids, "none", leave_one_out=True), torch.tensor([1, 2, -0.5, -2, -0.5])
    )


def test_group_advantages_equal_trl():
    """TRL 1.16 grpo_trainer.py 2762-2787, with its own nanstd."""
    nanstd = pytest.importorskip("trl.trainer.utils").nanstd
    for size in (2, 4, 7):
        rewards = torch.randn(3 * size)
        rewards[:size] = 0.1  # one group without variance
        mean = rewards.view(-1, size).mean(1).repeat_interleave(size)
        std = {"group": nanstd(rewards.view(-1, size), dim=1).repeat_interleave(size), "batch": nanstd(rewards)}
        ids = [i // size for i in range(3 * size)]
        for scale in ("group", "batch"):
            trl = (rewards - mean) / (std[scale] + 1e-4)
            assert torch.allclose(group_advantages(rewards, ids, scale), trl, rtol=1e-10, atol=1e-11)
        assert torch.allclose(group_advantages(rewards, ids, "none"), rewards - mean)


def test_group_advantages_invariants():
    rewards, ids = torch.randn(12), [i % 3 for i in range(12)]
    order = torch.randperm(12)
    for scale in ("group", "batch", "none"):
        for loo in (False, True):
            a = group_advantages(rewards, ids, scale, loo)
            permuted = group_advantages(rewards[order], [ids[i] for i in order], scale, loo)
            assert torch.allclose(permuted, a[order], atol=1e-12)
            assert all(abs(float(sum(a[g::3]))) < 1e-12 for g in range(3))
            assert torch.allclose(group_advantages(rewards + 7, ids, scale, loo), a, atol=1e-12)
            for dtype in (torch.float32, torch.float64):  # exactly 0, not rounding / 1e-4
                for size in (3, 6, 7, 12):  # 0.1 + 0.1 + 0.1 is not 3 x 0.1
                    equal = torch.full((size,), 0.1, dtype=dtype)
                    assert (group_advantages(equal, [0] * size, scale, loo) == 0).all()
    assert group_advantages(torch.tensor([1.0, 2.0, 3.0]), ["x", "x", "lonely"])[2] == 0
    with pytest.raises(KeyError, match="groups"):
        group_advantages(rewards, ids, "groups")


def test_scale_by_the_mean_by_hand():
    """MaxRL: two of eight right, mean 1/4: (1 - 1/4) / (1/4) = 3 and -1. None right, or all: 0. On rewards 0 and 1 it is the likelihood's gradient:
    sum A log p / 8 = mean log p of the right ones - mean log p."""
    rewards, ids = torch.tensor([1.0, 0, 0, 1, 0, 0, 0, 0] + [0.0] * 3 + [1.0] * 3), [0] * 8 + [1] * 3 + [2] * 3
    a = group_advantages(rewards, ids, "mean")
    assert a.tolist() == [3, -1, -1, 3, -1, -1, -1, -1] + [0] * 6
    logp = torch.randn(8)
    assert float((a[:8] * logp).mean()) == pytest.approx(float(logp[[0, 3]].mean() - logp.mean()))
    for group in range(3):  # a second implementation, on random rewards
        r = [random.Random(group).random() for _ in range(5)]
        mean = sum(r) / 5
        assert group_advantages(torch.tensor(r), [0] * 5, "mean").tolist() == pytest.approx([(x - mean) / mean for x in r], rel=1e-12)
    with pytest.raises(UserError, match="a reward is -0.5 < 0: lower --reward_bias"):
        group_advantages(torch.tensor([1.0, -0.5]), [0, 0], "mean")


def episodes_of(turn_rewards, group_ids):
    """What a credit function sees: episodes with these rewards."""
    episodes = []
    for rewards, group in zip(turn_rewards, group_ids, strict=True):
        messages = [{"role": role, "content": "q"} for _ in rewards for role in ("user", "assistant")]
        episodes.append(SimpleNamespace(rewards=rewards, group_id=group, messages=messages, reward_parts={"all": sum(rewards)},
                                        info={"reward_weights": {"all": 1.0}}))
    return episodes


MASKS = torch.tensor([[0, 1, 1, 0, 1, 0], [0, 0, 1, 1, 1, 1], [1, 0, 1, 0, 1, 0], [0, 1, 0, 0, 0, 0]])


def test_turns_are_runs_of_sampled_tokens():
    wanted = [[-1, 0, 0, -1, 1, -1], [-1, -1, 0, 0, 0, 0], [0, -1, 1, -1, 2, -1], [-1, 0, -1, -1, -1, -1]]
    assert turn_index(MASKS).tolist() == wanted


def test_episode_credit_by_hand():
    """Two groups: rewards 0 + 1 against 2 (mean 1.5), 1.5 against 0.5; all tokens of an episode get the same."""
    a = token_advantages(episodes_of([[0, 1], [2], [0.5, 0.5, 0.5], [0.5]], [7, 7, 8, 8]), MASKS, scale="none")
    assert torch.allclose(a, torch.tensor([-0.5, 0.5, 0.5, -0.5])[:, None] * MASKS)
    with pytest.raises(ValueError, match=r"\[1, 1\] turns, but the mask has \[2, 1\]"):
        token_advantages(episodes_of([[1.0], [2.0]], [7, 7]), MASKS[:2])


def test_a_credit_of_another_length_is_named(monkeypatch):
    monkeypatch.setitem(grpo.CREDITS, "whole", lambda episodes, **_: torch.zeros(len(episodes)))
    with pytest.raises(ValueError, match="credit whole: 2 values for 3 turns"):
        token_advantages(episodes_of([[0, 1], [2]], [7, 7]), MASKS[:2], "whole")


def test_process_credit_by_hand():
    """arXiv 2402.03300 section 4.1.3: R = {0, 1, 2}, mean 1, unbiased std 1; normalized (eps aside) -1, 0 | 1."""
    a = token_advantages(episodes_of([[0.0, 1.0], [2.0], [0.5, 0.5, 0.5], [0.5]], [7, 7, 8, 8]), MASKS, "process")
    e = 1 / 1.0001
    expected = torch.tensor([[0, -e, -e, 0, 0, 0], [0, 0, e, e, e, e], [0] * 6, [0] * 6])
    assert torch.allclose(a, expected, atol=1e-12) and (a[2:] == 0).all()
    # Rewards paid later count for earlier turns, never the other way round.
    pair = MASKS[2:3].repeat(2, 1)
    a = token_advantages(episodes_of([[0, 5.0, 0], [0, 0, 0]], "gg"), pair, "process", scale="none")
    m = 5 / 6
    assert torch.allclose(a[0], torch.tensor([5 - 3 * m, 0, 5 - 2 * m, 0, -m, 0]))


def test_the_trap_of_process_credit_and_that_the_others_do_not_have_it():
    """Eight correct episodes of three turns, paid at the end: nothing tells them apart, so no turn deserves a push."""
    mask = torch.tensor([[0, 1, 0, 1, 0, 1]]).repeat(8, 1)
    rewards, ids = [[0.0, 0.0, 1.0]] * 8, ["g"] * 8
    process = token_advantages(episodes_of(rewards, ids), mask, "process")[0][mask[0] == 1]
    assert process.tolist() == pytest.approx([0, 0.69, 1.38], abs=0.01)
    for credit in ("episode", "turn"):
        assert (token_advantages(episodes_of(rewards, ids), mask, credit) == 0).all()
    # One episode is correct after seven turns, another wrong after one: the longer way must not look worse.
    masks = torch.zeros(2, 14, dtype=torch.long)
    masks[0, ::2], masks[1, 0] = 1, 1
    rewards = [[0.0] * 6 + [1.0], [0.0]]
    for credit, sign in (("episode", 1), ("turn", 1)):
        first = token_advantages(episodes_of(rewards, "gg"), masks, credit)[:, 0]
        assert first[0] > 0 > first[1]


@pytest.mark.parametrize("credit, ends_at", [("process", 0.5), ("episode", 0.98), ("return", 0.98), ("turn", 0.98), ("rloo", 0.98)])
@pytest.mark.parametrize("seed", range(3))
def test_which_credit_finds_the_longer_way_where_it_is_the_right_one(credit, ends_at, seed):
    """A policy answers at once and is right with probability 0.5, or calls three times and is right: one logit, Adam, 100 steps of 8 episodes."""
    rng, logit = random.Random(seed), torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.Adam([logit], lr=0.1)
    for _ in range(100):
        calls = [rng.random() < float(logit.detach().sigmoid()) for _ in range(8)]
        turns = [[0.0, 0.0, 0.0, 1.0] if long else [float(rng.random() < 0.5)] for long in calls]
        mask = torch.zeros(8, 8, dtype=torch.long)
        for row, rewards in enumerate(turns):
            mask[row, 1:2 * len(rewards):2] = 1
        first = token_advantages(episodes_of(turns, "g" * 8), mask, credit)[:, 1]  # nothing else is chosen
        signs = torch.tensor([1.0 if long else -1.0 for long in calls])
        optimizer.zero_grad()
        (-(first * torch.nn.functional.logsigmoid(signs * logit)).mean()).backward()
        optimizer.step()
    assert 0.5 + 0.5 * float(logit.detach().sigmoid()) == pytest.approx(ends_at, abs=0.02)


def test_return_credit_by_hand():
    """Returns 1, 2, 0.5: mean 7/6. The second turn of the first has 1 to go, that of the second 0.5; what all get alike teaches nothing."""
    mask = torch.tensor([[1, 0, 1, 0], [1, 0, 1, 0], [1, 0, 0, 0]])
    rewards = [[0.0, 1.0], [1.5, 0.5], [0.5]]
    a = token_advantages(episodes_of(rewards, "ggg"), mask, "return", scale="none")
    m = 7 / 6
    assert torch.allclose(a, torch.tensor([[1 - m, 0, 1 - m, 0], [2 - m, 0, 0.5 - m, 0], [0.5 - m, 0, 0, 0]]))
    std = math.sqrt(((1 - m) ** 2 + (2 - m) ** 2 + (0.5 - m) ** 2) / 2) + 1e-4
    assert torch.allclose(token_advantages(episodes_of(rewards, "ggg"), mask, "return"), a / std)
    assert (token_advantages(episodes_of([[0.5, 0.5], [1.0, 0.0], [1.0]], "ggg"), mask, "return") == 0).all()
    alone = token_advantages(episodes_of(rewards, "gab"), mask, "return", scale="batch")
    assert (alone == 0).all()


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_of_a_reward_at_the_end_return_credit_is_episode_credit(scale):
    rng = random.Random(3)
    mask = torch.tensor([episode_mask(rng, 30, 3) for _ in range(8)])
    rewards = [[0.0] * int(turns.max()) + [rng.choice([0.0, 0.3, 1.0])] for turns in turn_index(mask)]
    a, b = (token_advantages(episodes_of(rewards, "gghhggii"), mask, credit, scale=scale) for credit in ("return", "episode"))
    assert torch.equal(a, b) and a.any()


def test_turn_credit_by_hand():
    """Return-to-go against the same turn number: turn 0: 3 + 1 against 0 + 2, turn 1: 1 against 2, turn 2 is alone."""
    mask = torch.tensor([[1, 0, 1, 0, 0], [1, 0, 1, 0, 1]])
    a = token_advantages(episodes_of([[3.0, 1.0], [0.0, 2.0, 0.0]], "gg"), mask, "turn", scale="none")
    assert torch.allclose(a, torch.tensor([[1.0, 0, -0.5, 0, 0], [-1.0, 0, 0.5, 0, 0]]))


@pytest.mark.parametrize("credit", list(grpo.CREDITS))
def test_credit_permutes_with_the_episodes_and_is_group_advantages_where_all_have_one_turn(credit):
    rng = random.Random(0)
    mask = torch.tensor([episode_mask(rng, 30, 3) for _ in range(6)])
    turns, ids = turn_index(mask), [0, 1, 0, 1, 0, 1]
    rewards = [[rng.random() for _ in range(int(t.max()) + 1)] for t in turns]
    episodes = episodes_of(rewards, ids)
    a = token_advantages(episodes, mask, credit)
    order = [3, 0, 5, 2, 1, 4]
    permuted = token_advantages([episodes[i] for i in order], mask[order], credit)
    assert torch.allclose(permuted, a[order], atol=1e-12) and (a[mask == 0] == 0).all()
    ones = torch.tensor([[0, 1, 1], [1, 1, 0], [0, 0, 1]])
    a = token_advantages(episodes_of([[1.0], [0.0], [4.0]], "ggg"), ones, credit)
    plain = group_advantages(torch.tensor([1.0, 0, 4]), "ggg", leave_one_out=credit == "rloo")
    # gigpo adds the same comparison, because all turns were taken in one state; gdpo divides by the std of the batch, too.
    factor = {"gigpo": 2, "gdpo": 1 / (plain.std() + 1e-4)}.get(credit, 1)
    assert torch.allclose(a, factor * plain[:, None] * ones)


def test_turn_credit_under_a_sequence_ratio():
    """gspo with per-token advantages: each turn's gradient is s A_turn / T, not the mean of A over the sequence."""
    b = batch(9, spread=0.05, per_token=True)
    _, grad, _ = ours("gspo", b, clip_eps_low=9.0, clip_eps_high=9.0)
    tokens = b["mask"].sum(1, keepdim=True)
    s = ((b["logprobs"] - b["old"]).detach() * b["mask"]).sum(1, keepdim=True).div(tokens).exp()
    assert close(grad, -s * b["advantages"] * b["mask"] / tokens / 6, 1e-12)


def test_group_ids_may_be_a_tensor():
    """A loop of one's own has torch.arange(2).repeat_interleave(2): hashed by identity, each was a group of one, and all advantages 0."""
    rewards, ids = torch.tensor([1.0, 2, 3, 5]), [0, 0, 1, 1]
    assert torch.equal(group_advantages(rewards, torch.tensor(ids)), group_advantages(rewards, ids))
