"""The page: its mirrors equal the Python functions, and in a real Chromium it shows, colours, hides and runs nothing."""
import base64
import hashlib
import json
import math
import random
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import dpo
import grpo
import reward_weighted

PAGE = Path(__file__).resolve().parents[3] / "extras" / "show" / "page"
NODE, CHROMIUM, DRIVER = (shutil.which(name) for name in ("node", "chromium", "chromedriver"))
EVIL = "<script>document.title='run'</script></script><img src=x onerror=document.title='run'>\u202e&lt;"


# ------------------------------------------------------------------------------------------------- mirrors, by node
def mirrored(calls):
    """What the functions of page.js return for [(name, arguments)], computed by node."""
    code = ("const page = require(process.argv[1]); const calls = JSON.parse(require('fs').readFileSync(0));"
            "console.log(JSON.stringify(calls.map(([path, args]) => path.split('.').reduce((x, k) => x[k], page)(...args))))")
    ended = subprocess.run([NODE, "-e", code, str(PAGE / "page.js")], input=json.dumps(calls), capture_output=True, text=True, check=True)
    return json.loads(ended.stdout)


@pytest.fixture(autouse=True)
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def random_episodes(seed, groups=3, size=4, equal=()):
    """Episodes of some turns of some tokens each, as page.js takes them and as grpo.py does."""
    rng = random.Random(seed)
    inputs = []
    for g in range(groups):
        for _ in range(size):
            turns = rng.randint(1, 3)
            turn = [k for k in range(turns) for _ in range(rng.randint(1, 4))]
            logp = [-rng.expovariate(1) for _ in turn]
            old, ref, sampled = ([x + rng.gauss(0, width) for x in logp] for width in (0.4, 0.5, 0.4))
            rewards = [float(rng.choice([0, 1, 2, -1])) if g not in equal else 1.0 / turns for _ in range(turns)]
            inputs.append({"group": g, "rewards": rewards, "turn": turn, "logp": logp, "old": old, "ref": ref, "sampled": sampled})
    return inputs


def tensors(inputs):
    """(episodes for grpo.py, mask, {name: (B, T)}): the turns of an episode stand apart by one masked token."""
    places = [[t + 1 + k for t, k in enumerate(row["turn"])] for row in inputs]
    T = max(p[-1] for p in places) + 1
    mask, values = torch.zeros(len(inputs), T), {name: torch.zeros(len(inputs), T) for name in ("logp", "old", "ref", "sampled")}
    for b, (row, place) in enumerate(zip(inputs, places)):
        mask[b, place] = 1
        for name, x in values.items():
            x[b, place] = torch.tensor(row[name])
    episodes = [SimpleNamespace(rewards=row["rewards"], group_id=row["group"], reward=sum(row["rewards"])) for row in inputs]
    return episodes, mask, values, places


def at(x, places):
    return [x[b, place].tolist() for b, place in enumerate(places)]


def settings(**changed):
    return {"loss": "grpo", "credit": "episode", "scale_rewards": "group", "clip_eps_low": 0.2, "clip_eps_high": 0.28, "kl_coef": 0.0,
            "kl_estimator": "k3_ratio", "importance_correction": None, "beta": 0.1, "sft_coef": 0.0, **changed}


def same(got, asked, places):
    for row, lists in zip(got, at(asked, places)):
        assert row == pytest.approx(lists, rel=1e-6, abs=1e-9)


GRID = ([{"loss": loss} for loss in grpo.LOSSES] + [{"credit": credit} for credit in grpo.CREDITS]
        + [{"credit": "turn", "scale_rewards": "batch"}, {"credit": "return", "scale_rewards": "batch"}, {"scale_rewards": "none"},
           {"loss": "dapo", "importance_correction": 1.3}, {"loss": "gspo", **{"clip_eps_low": 0.05, "clip_eps_high": 0.05}}]
        + [{"kl_coef": 0.7, "kl_estimator": kind} for kind in ("k2", "k3", "k3_ratio")])


@pytest.mark.skipif(not NODE, reason="node is not installed")
def test_the_mirrors_of_grpo_equal_it_in_value_and_gradient():
    """Each loss, credit, scale and KL estimator: advantages, losses, ratios' clipping and d loss / d logprob of every token."""
    cases = [(change, random_episodes(seed, equal={1})) for seed, change in enumerate(GRID)]
    counts = {"sequences": 64, "tokens": 999, "max_tokens": 512}
    answers = mirrored([("tokenWeights", [inputs, settings(**change), counts]) for change, inputs in cases])
    stopped = 0
    for (change, inputs), rows in zip(cases, answers):
        o = SimpleNamespace(**settings(**change), entropy_coef=0.0)
        episodes, mask, x, places = tensors(inputs)
        advantages = grpo.token_advantages(episodes, mask, o.credit, scale=o.scale_rewards)
        if cap := o.importance_correction:
            advantages, _ = grpo.weighted(advantages, x["old"], x["sampled"], mask, cap)
        logprobs = x["logp"].requires_grad_()
        loss, _ = grpo.total_loss(o, grpo.Counts(**counts), logprobs, torch.zeros_like(mask), x["old"], x["ref"], advantages, mask)
        loss.backward()
        surrogate, normalizer = grpo.LOSSES[o.loss]
        token_loss, log = surrogate(grpo.masked(logprobs - x["old"], mask), grpo.masked(logprobs, mask), advantages, mask,
                                    clip_eps_low=o.clip_eps_low, clip_eps_high=o.clip_eps_high)
        if o.kl_coef:
            token_loss = token_loss + o.kl_coef * grpo.kl_estimate(logprobs, x["ref"], mask, o.kl_estimator, x["old"])
        same([row["advantage"] for row in rows], advantages, places)
        same([row["loss"] for row in rows], token_loss.detach(), places)
        same([row["weight"] for row in rows], logprobs.grad, places)
        clip = log.get("clip_low", torch.zeros_like(mask)) + log.get("clip_high", torch.zeros_like(mask)) > 0
        same([row["clipped"] for row in rows], clip.double().expand(mask.shape), places)
        stopped += int(clip.sum())
        assert any(any(row["weight"]) for row in rows)
    assert stopped > 20


@pytest.mark.skipif(not NODE, reason="node is not installed")
def test_the_mirrors_of_dpo_and_reward_weighted_equal_them_in_gradient():
    forms = re.findall(r'value="dpo:(\w+)"', (PAGE / "page.html").read_text())
    cases = [(f"dpo:{name}", random_episodes(seed), beta) for seed, name in enumerate(forms) for beta in (0.1, 0.7)]
    weighted = [(f"reward_weighted:{name}", random_episodes(seed), 0.5) for seed, name in enumerate(("exp", "linear"))]
    answers = mirrored([("tokenWeights", [inputs, settings(loss=loss, beta=beta, sft_coef=0.3), {}])
                        for loss, inputs, beta in [*cases, *weighted]])
    for (loss, inputs, beta), rows in zip(cases, answers):
        pairs = []
        for g in range(3):
            group = sorted((i for i, row in enumerate(inputs) if row["group"] == g), key=lambda i: -sum(inputs[i]["rewards"]))
            if sum(inputs[group[0]]["rewards"]) > sum(inputs[group[-1]]["rewards"]):
                pairs.append((group[0], group[-1]))
        _, mask, x, places = tensors(inputs)
        order = [best for best, _ in pairs] + [worst for _, worst in pairs]
        logprobs = x["logp"].requires_grad_()
        ref_sums = (x["ref"] * mask).sum(1)[order]
        value, _ = dpo.pair_loss(logprobs[order], ref_sums, mask[order], dpo.Counts(len(pairs), 1),
                                 {"it": (1.0, dpo.LOSSES[loss.removeprefix("dpo:")])}, beta=beta, sft_coef=0.3)
        value.backward()
        same([row["weight"] for row in rows], logprobs.grad, places)
    for (loss, inputs, beta), rows in zip(weighted, answers[len(cases):]):
        episodes, mask, x, places = tensors(inputs)
        config = SimpleNamespace(weight_per="turn", weighting=loss.partition(":")[2], baseline="group", scale_rewards="none",
                                 beta=beta, max_weight=20.0)
        weights = reward_weighted.token_weights(reward_weighted.weigh(episodes, config)[0], mask.long())
        logprobs = x["logp"].requires_grad_()
        reward_weighted.reward_weighted_loss(logprobs, weights, weights.sum()).backward()
        same([row["weight"] for row in rows], logprobs.grad, places)


@pytest.mark.skipif(not NODE, reason="node is not installed")
def test_the_difference_of_two_shares_equals_newcombe():
    from bench.comparison import difference
    from extras.show.notes import wilson
    (k1, n1), (k2, n2) = (48, 80), (56, 70)
    answer, = mirrored([("difference", [k1 / n1, wilson(k1, n1), k2 / n2, wilson(k2, n2)])])
    assert answer == pytest.approx(difference(k1, n1, k2, n2))


def test_what_one_can_choose_is_what_the_algorithms_have():
    html = (PAGE / "page.html").read_text()
    options = {name: re.findall(r"<option(?: value=\"[^\"]*\")?>(\w+)", block)
               for name, block in re.findall(r'<select name="(\w+)"[^>]*>(.*?)</select>', html, re.S)}
    assert options["credit"] == list(grpo.CREDITS) and set(options["loss"]) >= set(grpo.LOSSES)
    code = (PAGE / "page.js").read_text()
    for name, paper in grpo.PAPER_SETTINGS.items():  # the clip range that choosing a loss sets
        for field, value in paper.items():
            if name in grpo.LOSSES and field.startswith("clip"):
                stated = re.search(rf"{name}: .*?{field}: ([\d.e-]+)", code, re.S)[1]
                assert float(stated) == value
