"""Corrections, filters, ECHO and pools of the zoo: by hand, against TRL, against loops; what the flags refuse, and runs with them."""
import json
import math
from types import SimpleNamespace

import bandit
import pytest
import torch

import grpo
from agent import Trajectory
from core.config import UserError
from extras.zoo import pools, tokens_to_learn
from extras.zoo.filters import FILTERS

MASK = torch.tensor([[0, 1, 1, 0], [0, 1, 1, 1], [1, 0, 0, 0]])


def weights(mode, ratios, cap):
    return grpo.CORRECTIONS[mode](torch.log(torch.tensor(ratios)), torch.zeros(len(ratios), len(ratios[0])), MASK, cap)


# Ratios 1.5 and 1.5 (product 2.25, geometric mean 1.5); 0.9, 1, 0.5 (0.45, 0.766); 4. Masked ones are 9.
RATIOS = [[9.0, 1.5, 1.5, 9], [9, 0.9, 1.0, 0.5], [4.0, 9, 9, 9]]


@pytest.mark.parametrize("mode, wanted", [
    ("token_truncate", [[1.5, 1.5], [0.9, 1.0, 0.5], [2.0]]),
    ("token_mask", [[1.5, 1.5], [0.9, 1.0, 0.5], [0.0]]),
    ("sequence_truncate", [[2.0, 2.0], [0.45] * 3, [2.0]]),
    ("sequence_mask", [[0.0, 0.0], [0.0] * 3, [0.0]]),
    ("geometric_mask", [[1.5, 1.5], [0.45 ** (1 / 3)] * 3, [0.0]])])
def test_the_weights_by_hand(mode, wanted):
    got = weights(mode, RATIOS, 2.0)
    for row, mask, expected in zip(got, MASK.bool(), wanted, strict=True):
        assert row[mask].tolist() == pytest.approx(expected)
    assert not got.requires_grad and torch.isfinite(got).all()
    wider = weights("sequence_mask", RATIOS, 2.5)  # [0.4, 2.5]: the first two are inside
    assert wider[:, :1].tolist() == [[pytest.approx(2.25)], [pytest.approx(0.45)], [0.0]]


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_the_weights_equal_trl(mode, monkeypatch):
    """TRL 1.16, grpo_trainer.py: the lines on `vllm_importance_sampling_mode`, cut out of `_generate_and_score_completions` and run as they stand.
    Ours has a lower bound 1 / C in the masks, TRL's clip_min, which is None by default; the truncations have none."""
    import inspect
    import textwrap
    trainer = pytest.importorskip("trl.trainer.grpo_trainer").GRPOTrainer
    source = inspect.getsource(trainer._generate_and_score_completions)
    begin, end = source.index("per_token_logps_diff = (old_per"), source.index("# Compute the per-token log probabilities for the reference")
    begin = source.rindex("\n", 0, begin) + 1
    code = textwrap.dedent(source[begin:source.rindex("\n", 0, end)])
    generator = torch.Generator().manual_seed(0)
    mask = (torch.rand(6, 12, generator=generator) < 0.6).long()
    trainer_logps = -torch.rand(6, 12, generator=generator, dtype=torch.float64)
    sampled = trainer_logps + 0.4 * torch.randn(6, 12, generator=generator, dtype=torch.float64)
    cap = 1.8
    space = {"torch": torch, "math": math, "old_per_token_logps": trainer_logps, "sampling_per_token_logps": sampled, "mask": mask,
             "self": SimpleNamespace(vllm_importance_sampling_mode=mode, vllm_importance_sampling_clip_max=cap,
                                     vllm_importance_sampling_clip_min=1 / cap if mode.endswith("_mask") else None)}
    exec(code, space)
    trl = space["vllm_importance_sampling_ratio"].expand(6, 12)
    ours = grpo.CORRECTIONS[mode](trainer_logps, sampled, mask, cap)
    assert torch.allclose(ours[mask.bool()], trl[mask.bool()], rtol=1e-12)
    assert not mode.endswith("_mask") or (trl[mask.bool()] == 0).any() and (trl[mask.bool()] > 0).any()


def test_the_share_left_out_is_logged():
    advantages = torch.ones(3, 4) * MASK
    corrected, shares = grpo.weighted(advantages, torch.log(torch.tensor(RATIOS)), torch.zeros(3, 4), MASK, 2.5, "sequence_mask")
    assert shares["importance_left_out"] == pytest.approx(1 / 6) and shares["importance_capped"] == 0
    assert (corrected[2] == 0).all() and corrected[0, 1] == pytest.approx(2.25)


# ----------------------------------------------------------------------------------------------------------- filters
def talk(*words, rewards=None, stop_reason="done"):
    """An episode: a is an answer, c a call, e an empty turn, h one that only thinks, x an unreadable call, t a result, - an error, u the user."""
    turns = {"a": ("assistant", "42"), "c": ("assistant", ""), "e": ("assistant", " "), "h": ("assistant", "<think>hm</think>"),
             "x": ("assistant", "<tool_call>{"), "t": ("tool", "1"), "-": ("tool", "error: no JSON"), "u": ("user", "go on")}
    messages = [{"role": turns[w][0], "content": turns[w][1], **({"tool_calls": [1]} if w == "c" else {})} for w in words]
    n = sum(m["role"] == "assistant" for m in messages) if rewards is None else rewards
    return Trajectory(messages=messages, rewards=[0.0] * n, stop_reason=stop_reason)


@pytest.mark.parametrize("episode, truncated, void", [
    (talk(*"ucta"), False, False), (talk(*"uaua"), False, False), (talk(*"uct", stop_reason="max_turns"), False, False),
    (talk(*"ucte"), False, True), (talk(*"ucth"), False, True), (talk(*"ux-cta"), False, True), (talk(*"uctx", stop_reason="max_new_tokens"), True, True),
    (talk(*"uct", stop_reason="max_tokens"), True, False), (talk(*"uau", stop_reason="max_tokens"), True, False), (talk(*"ucta", stop_reason="malformed"), False, True),
    (talk(*"ueuct", rewards=1), False, False)])  # the empty turn belongs to the prompt
def test_filters_by_hand(episode, truncated, void):
    assert [FILTERS[name](episode) for name in ("none", "truncated", "void", "both")] == [False, truncated, void, truncated or void]


def config(**changed):
    return SimpleNamespace(**{"filter": "none", "echo_coef": 0.0, "kl_coef": 0.0, "entropy_coef": 0.0, "max_tokens": 9} | changed)


def test_a_filtered_episode_has_no_token_but_counts_in_its_group():
    """As mask_truncated_completions of TRL: it is out of sums and divisors of tokens, in those of sequences, and in the mean of rewards."""
    mask = torch.tensor([[0, 1, 1, 0], [0, 1, 1, 1]])
    episodes = [Trajectory([1] * 4, m.tolist(), rewards=[r], group_id="g", stop_reason=s) for m, r, s in
                zip(mask, (1.0, 0.0), ("done", "max_tokens"))]
    advantages = grpo.token_advantages(episodes, mask, scale="none")
    assert advantages[0, 1] == 0.5  # the other's reward is in the mean
    logged = {}
    kept, observed, after = tokens_to_learn(config(filter="truncated"), episodes, mask, advantages, SimpleNamespace(log=logged.update))
    assert kept.tolist() == [[0, 1, 1, 0], [0] * 4] and not observed.any() and (after[1] == 0).all() and logged == {"filtered": 0.5}
    taught, counts = grpo.in_update(config(kl_coef=0.1), kept, observed, after)
    assert taught == [0] and counts == grpo.Counts(2, 2, 9, 2, 0)
    none_left = grpo.in_update(config(kl_coef=0.1), kept * 0, observed, after * 0)
    assert none_left == ([], grpo.Counts(2, 1, 9, 0, 0))
    same = tokens_to_learn(config(), episodes, mask, advantages, None)
    assert torch.equal(same[0], mask) and torch.equal(same[2], advantages) and not same[1].any()


# -------------------------------------------------------------------------------------------------------------- ECHO
def test_what_tools_wrote_by_hand():
    """Two prompt tokens, a turn, two of a result, a turn, one of a result: three are observed, and no padding is."""
    mask = torch.tensor([[0, 0, 1, 1, 0, 0, 1, 0, 0, 0], [0, 1, 0, 0, 0, 0, 0, 0, 0, 0]])
    episodes = [Trajectory([5] * 8, []), Trajectory([5] * 2, [])]
    _, observed, _ = tokens_to_learn(config(echo_coef=0.1), episodes, mask, torch.zeros(2, 10), None)
    assert observed.tolist() == [[0, 0, 0, 0, 1, 1, 0, 1, 0, 0], [0] * 10]
    # An episode whose advantage is 0 still learns what its tools answer; the second has nothing to learn.
    taught, counts = grpo.in_update(config(echo_coef=0.1), mask, observed, torch.zeros(2, 10))
    assert taught == [0] and counts == grpo.Counts(2, 4, 9, 3, 3)


def test_echo_by_hand_and_in_micro_batches():
    """Observed tokens of log-probability -1, -2, -3: mean 2, times 0.1. Its gradient is -0.1 / 3 at each of them and the policy's loss does not see them."""
    mask, observed = torch.tensor([[0, 1, 0, 0], [0, 1, 0, 1]]), torch.tensor([[0, 0, 1, 1], [0, 0, 1, 0]])
    logprobs = torch.tensor([[9.0, -0.5, -1, -2], [9, -0.5, -3, -0.5]], requires_grad=True)
    settings = grpo.settle(grpo.Config(echo_coef=0.1, model_path="none"))
    counts = grpo.Counts(2, 3, 9, 3, 3)
    rest = (logprobs.detach() * 0, torch.full((2, 4), -0.5), None, torch.ones(2, 4) * mask, mask, None)
    loss, metrics = grpo.total_loss(settings, counts, logprobs, *rest, observed)
    plain, _ = grpo.total_loss(settings, counts._replace(observed=0), logprobs, *rest)
    assert float(metrics["echo"]) == pytest.approx(2) and float((loss - plain).detach()) == pytest.approx(0.2) and not metrics["echo"].requires_grad
    grad, = torch.autograd.grad(loss - plain, logprobs)
    assert torch.allclose(grad, -0.1 / 3 * observed)
    total = 0.0
    for i in range(2):
        part = [x if x is None else x[i:i + 1] for x in (logprobs, *rest, observed)]
        total += float(grpo.total_loss(settings, counts, *part)[1]["echo"])
    assert total == pytest.approx(2)


# -------------------------------------------------------------------------------------------------------------- pools
def test_tasks_are_drawn_by_their_pools():
    """Of 3 tasks, one easy: it comes first with probability 0.1 / (1 + 1 + 0.1), a hard one with 0.3 / 2.3."""
    for success, weight in ((1.0, 0.1), (0.0, 0.3), (0.5, 1.0)):
        first = [pools.in_order_of_draws(3, {1: success}, seed, 0)[0] == 1 for seed in range(4000)]
        wanted = weight / (2 + weight)
        assert sum(first) / 4000 == pytest.approx(wanted, abs=4 * math.sqrt(wanted * (1 - wanted) / 4000))
    assert sorted(pools.in_order_of_draws(50, {3: 1.0}, 7, 2)) == list(range(50))
    assert pools.in_order_of_draws(50, {3: 1.0}, 7, 2) == pools.in_order_of_draws(50, {3: 1.0}, 7, 2)


# ---------------------------------------------------------------------------------------------------- flags and runs
@pytest.mark.parametrize("options, words", [
    ({"importance_mode": "sequence_mask"}, "--importance_mode sequence_mask needs --importance_correction"),
    ({"importance_mode": "token_mask", "importance_correction": 0.5}, "leaves [1 / C, C] empty"),
    ({"draw": "difficulty", "rollout_ahead": 1, "sampler": "http://x"}, "--rollout_ahead 1 draws tasks before"),
    ({"echo_coef": 0.1, "max_turns": 1}, "no tool's answer is shown"),
    ({"credit": "process", "scale_rewards": "mean"}, "--credit process compares no returns"),
    ({"credit": "gdpo"}, "name two or more"),
    ({"credit": "gdpo", "rewards": "length=1,exact=veto"}, "a veto is no sum")])
def test_what_cannot_act_is_refused(options, words):
    with pytest.raises(UserError) as error:
        grpo.settle(grpo.Config(model_path="none", **options))
    assert words in str(error.value)


def test_a_reward_below_0_that_maxrl_cannot_scale_loses_no_step(base, tmp_path):
    """MaxRL has no meaning there. The run ends with a line that says what to do; the step before it is saved, and another scale goes on from there."""
    (tmp_path / "late.py").write_text(
        "calls = []\n\ndef late(prompts, completions, **_):\n    calls.append(1)\n    return [len(text) % 3 - 2.0 * (len(calls) == 2) for text in map(str, completions)]\n")
    options = {"rewards": f"{tmp_path}/late.py:late,environment=0", "scale_rewards": "mean"}
    with pytest.raises(UserError, match="--scale_rewards mean: a reward is -[12] < 0: lower --reward_bias") as error:
        run(base, tmp_path / "r", **options)
    assert "step 1 is saved; continue with: python" in error.value.__notes__[0]
    result, lines = run(tmp_path / "r", tmp_path / "from there", **options | {"scale_rewards": "none", "max_steps": 1})
    assert result["steps"] == 1 and math.isfinite(lines[0]["loss"])


def test_flags_of_grpo_alone_are_answered_elsewhere():
    import sft
    from extras.hints.command_line import parse
    with pytest.raises(UserError, match="unknown option --echo_coef; grpo.py alone has it"):
        parse(sft.Config, ["--echo_coef", "0.1"])


@pytest.fixture
def base(schooled):
    return schooled


def run(base, folder, **options):
    options = {"env": bandit.ENV, "tasks_per_step": 3, "group_size": 4, "eval_tasks": 0, "max_steps": 2, "learning_rate": 1e-3, **options}
    result = grpo.train(grpo.Config(model_path=str(base), output_dir=str(folder), **options))
    return result, [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("options, metrics", [
    ({"credit": "gigpo", "loss": "deepseek", "updates_per_step": 2, "importance_mode": "sequence_mask", "importance_correction": 2.0, "filter": "both",
      "echo_coef": 0.1}, ["off_policy", "importance_left_out", "filtered", "echo"]),
    ({"credit": "gdpo", "rewards": "tool_used=1,format=1", "loss": "dppo", "updates_per_step": 2}, ["clip_high"])], ids=["gigpo", "gdpo"])
def test_a_run_with_all_that_go_together(base, tmp_path, options, metrics):
    _, lines = run(base, tmp_path, max_steps=1, **options)
    assert len(lines) == 1 and all(math.isfinite(lines[0][name]) for name in ["loss", *metrics])
    [first, *_] = [json.loads(line) for line in (tmp_path / "trajectories.jsonl").read_text().splitlines()]
    assert ("reward_weights" in first["info"]) == (options["credit"] == "gdpo")


def test_echo_teaches_what_tools_answer_where_all_fail(base, tmp_path):
    """Rewards 0 throughout: no advantage, and yet the weights move and the cross-entropy of the answers falls."""
    _, lines = run(base, tmp_path, max_steps=3, echo_coef=0.1, reward_scaling=0.0, learning_rate=5e-3, tasks_per_step=2)
    assert all(line["groups_without_signal"] == 1 and line["grad_norm"] > 0 for line in lines)
    assert lines[-1]["echo"] < 0.9 * lines[0]["echo"]


def test_draws_by_difficulty_are_logged_and_resumed(base, tmp_path):
    """Learning rate 0: its schedule, which depends on the steps planned, is not what is compared."""
    options = {"max_samples": 5, "draw": "difficulty", "learning_rate": 0.0, "tasks_per_step": 3, "group_size": 2}
    whole = run(base, tmp_path / "a", max_steps=3, **options)[1]
    run(base, tmp_path / "b", max_steps=2, **options)
    with open(tmp_path / "b" / pools.GROUPS, "a") as file:  # a step that was played and killed before it ended
        file.write(json.dumps({"step": 2, "task": 0, "success": 1.0}) + "\n")
    resumed = run(base, tmp_path / "b", max_steps=3, resume=True, **options)[1]
    groups = [(tmp_path / name / pools.GROUPS).read_text() for name in "ab"]
    assert groups[0] == groups[1] and len(groups[0].splitlines()) == 9 and whole == resumed
    rows = [json.loads(line) for line in groups[0].splitlines()]
    assert {row["task"] for row in rows} <= set(range(5)) and len({row["task"] for row in rows if row["step"] == 0}) == 3
    assert whole[0]["tasks_easy"] == whole[0]["tasks_hard"] == 0
