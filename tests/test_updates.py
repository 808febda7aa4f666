"""What is alike in the updates of all five algorithms: whose gradient it is, clipping, decay, dropout, the order of epochs, evaluation."""
from itertools import chain

import pytest
import torch
from test_resume import config, place, rewarded  # noqa: F401  (place is a fixture)
from torch.nn.utils import clip_grad_norm_

import distill
import dpo
import grpo
import reward_weighted
import sft
from agent import evaluate, rollout
from core.data import collate
from core.model import adamw
from core import logprobs
from core.logprobs import token_logprobs

# Two updates of the same episodes, all of them in each.
TWICE = {
    sft: dict(max_steps=2, max_samples=20, batch_size=20, gradient_accumulation_steps=1),
    reward_weighted: dict(max_steps=2, trajectories="episodes.jsonl", batch_size=18, gradient_accumulation_steps=1),
    dpo: dict(max_steps=2, trajectories="episodes.jsonl", batch_size=18, gradient_accumulation_steps=1),
    distill: dict(max_steps=1, updates_per_step=2, tasks_per_step=2, batch_size=6, teacher="adapter"),
    grpo: dict(max_steps=1, updates_per_step=2, tasks_per_step=2, batch_size=6, kl_coef=0.1)}


def train(module, place, folder, **options):  # noqa: F811
    options = {"lora_r": 2, "eval_tasks": 0, **TWICE[module], **options}
    for name in options.keys() & {"trajectories", "teacher"}:
        options[name] = str(place / options[name])
    return module.train(config(module, place, folder, **options))


@pytest.fixture(autouse=True)
def paid(monkeypatch):
    monkeypatch.setattr(grpo, "rollout", lambda *args, **options: rewarded(rollout(*args, **options)))


@pytest.mark.parametrize("module", TWICE)
def test_an_update_has_its_own_gradient_alone_clipped_and_decays_the_weights(place, tmp_path, monkeypatch, module):  # noqa: F811
    """At learning rate 0 the second gradient is the first, if nothing is left of that."""
    norms, clipped, decays = [], [], []

    def clip(weights, limit):
        norms.append(clip_grad_norm_(weights, limit))
        return norms[-1]

    def watched(model, **options):
        optimizer = adamw(model, **options)
        weights = optimizer.param_groups[0]["params"]
        optimizer.register_step_pre_hook(lambda *_: clipped.append(torch.cat([p.grad.flatten() for p in weights]).norm()))
        decays.extend(group["weight_decay"] for group in optimizer.param_groups)
        return optimizer
    monkeypatch.setattr(module, "clip_grad_norm_", clip)
    monkeypatch.setattr(module, "adamw", watched)
    train(module, place, tmp_path, learning_rate=0.0, max_grad_norm=0.01, weight_decay=0.3)
    first, second = map(float, norms)
    assert first > 0.02 and second == pytest.approx(first, rel=1e-4)
    assert [float(norm) for norm in clipped] == pytest.approx([0.01] * 2, rel=1e-3) and decays == [0.3]


@pytest.mark.parametrize("module", TWICE)
def test_dropout_acts_in_updates_alone_and_all_log_probabilities_are_at_the_samplers_temperature(place, tmp_path, monkeypatch, module):  # noqa: F811
    calls, drawn = set(), []

    def watched(model, ids, mask, temperature=1.0):
        calls.add((torch.is_grad_enabled(), model.training, temperature))
        if model.training:
            drawn.append(torch.initial_seed())
        return token_logprobs(model, ids, mask, temperature)
    for owner in (module, logprobs):
        monkeypatch.setattr(owner, "token_logprobs", watched)
    options = {sft: {"batch_size": 10, "gradient_accumulation_steps": 2}, reward_weighted: {"batch_size": 9}, dpo: {"eval_share": 0.5}, distill: {}, grpo: {"importance_correction": 2.0}}[module]
    temperature = 1.0 if module is sft else 0.7
    if module is not sft:
        options["temperature"] = temperature
    train(module, place, tmp_path, lora_dropout=0.2, eval_every=1, **options)
    assert calls == {(on, on, temperature) for on in ({True} if module is reward_weighted else {True, False})}
    assert len(drawn) == len(set(drawn)) >= 2  # each forward pass drops other numbers


@pytest.mark.parametrize("module", TWICE)
def test_an_evaluation_plays_as_the_flags_say(place, tmp_path, monkeypatch, module):  # noqa: F811
    given = []
    monkeypatch.setattr(module, "evaluate", lambda *args, **options: given.append(options) or evaluate(*args, **options))
    options = {} if module is sft else {"temperature": 0.7}
    result = train(module, place, tmp_path, eval_tasks=2, seed=5, rewards="length=0.5", max_new_tokens=5, max_tokens=300, **options)
    assert "reward/length" in result["after"] and {how["seed"] for how in given} == {5}
    assert {how["limits"].max_new_tokens for how in given} == {5}
    assert {how.get("temperature", 1.0) for how in given} == {options.get("temperature", 1.0)}


@pytest.mark.parametrize("module, per_step", [(sft, 5), (dpo, 2)])
def test_each_epoch_has_everything_once_in_an_order_of_its_own(place, tmp_path, monkeypatch, module, per_step):  # noqa: F811
    steps = []

    def watched(episodes, *args):
        if torch.is_grad_enabled():
            steps.append({str(t.messages) for t in episodes})
        return collate(episodes, *args)
    monkeypatch.setattr(module, "collate", watched)
    train(module, place, tmp_path, max_steps=None, num_epochs=2, batch_size=per_step, learning_rate=0.0)
    first, second = steps[:len(steps) // 2], steps[len(steps) // 2:]
    assert len(first) == len(second) >= 3 and set(chain(*first)) == set(chain(*second)) and first != second
    assert len(set(chain(*first))) == sum(map(len, first))
