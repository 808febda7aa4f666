"""The loop of grpo.py: what must not change a step does not, what must stop it does, and it learns."""
import dataclasses
import json
import math
import re

import bandit
import numpy as np
import programs
import pytest
import torch
from safetensors.torch import load_file

import grpo
from agent import rollout
from core.config import UserError


@pytest.fixture(scope="module")
def base(schooled, probed_once):
    return schooled


@pytest.fixture(scope="module")
def plain(base, tmp_path_factory):
    """What a step without any options logs."""
    return run(base, tmp_path_factory.mktemp("plain"))[1][0]


def run(base, folder, **options):
    defaults = dict(model_path=base, env=bandit.ENV, output_dir=str(folder), tasks_per_step=4, group_size=4, max_steps=1, eval_tasks=0,
                    batch_size=16, max_samples=200, learning_rate=1e-3, kl_coef=0.0, updates_per_step=1, max_grad_norm=1.0, max_new_tokens=32, overwrite=True)
    result = grpo.train(grpo.Config(**{**defaults, **options}))
    with open(folder / "metrics.jsonl") as f:
        return result, [json.loads(line) for line in f]


def state(folder, step=1, name="optimizer"):
    return load_file(folder / "checkpoints" / f"step_{step:06d}" / f"{name}.safetensors")


def gradients(folder):
    """After one AdamW step exp_avg is (1 - beta1) x the clipped gradient."""
    return {k: v for k, v in state(folder).items() if k.endswith("|exp_avg")}


def test_micro_batch_size_changes_no_gradient(base, tmp_path):
    for name, size in (("one", 16), ("four", 4)):
        run(base, tmp_path / name, batch_size=size, max_grad_norm=1e9)
    one, four = gradients(tmp_path / "one"), gradients(tmp_path / "four")
    scale = max(v.abs().max() for v in one.values())
    assert scale > 0 and all((one[k] - four[k]).abs().max() < 1e-5 * scale for k in one)


def test_the_first_ratio_is_one_and_the_sampler_agrees_with_the_trainer(plain):
    assert abs(plain["first_ratio"] - 1) < 1e-3 and plain["sampler_gap"] < 1e-5 and plain["clip_high"] == 0


def test_of_several_updates_the_first_gives_the_first_ratio_and_the_last_the_rest(base, tmp_path):
    _, (metrics,) = run(base, tmp_path, updates_per_step=2, learning_rate=5e-3)
    assert abs(metrics["first_ratio"] - 1) < 1e-3 and metrics["sampler_gap"] < 1e-5 and metrics["gap"] > 1e-3 and metrics["approx_kl"] > 1e-6


def test_credit_and_scale_of_the_flags_reach_the_advantages(base, plain, tmp_path):
    def size(**options):
        return run(base, tmp_path, **options)[1][0]["advantage_abs"]
    assert size(scale_rewards="none", reward_scaling=0.1) == pytest.approx(0.1 * size(scale_rewards="none"), rel=1e-4)
    assert size(credit="turn") != plain["advantage_abs"]


def test_dr_grpo_divides_by_the_longest_episode_that_is_allowed(base, tmp_path):
    norms = [run(base, tmp_path, loss="dr_grpo", max_tokens=tokens)[1][0]["grad_norm"] for tokens in (500, 1000)]
    assert norms[0] == pytest.approx(2 * norms[1], rel=1e-3) and norms[1] > 0


def test_an_epoch_is_a_pass_over_the_tasks(base, tmp_path):
    assert run(base, tmp_path, max_samples=6, tasks_per_step=4, group_size=2, num_epochs=1, max_steps=None)[0]["steps"] == 2


def test_without_a_kl_penalty_there_is_no_kl_in_the_log(base, plain, tmp_path):
    _, (with_kl,) = run(base, tmp_path, kl_coef=0.1)
    assert "kl" not in plain and abs(with_kl["kl"]) < 1e-6


def test_the_samplers_gap_is_logged_with_importance_correction_too(base, tmp_path):
    """Old log-probs are then the trainer's, whose ratio says nothing of the sampler."""
    _, (plain,) = run(base, tmp_path / "a", dtype="bfloat16")
    _, (corrected,) = run(base, tmp_path / "b", dtype="bfloat16", importance_correction=2.0)
    assert plain["sampler_gap"] == pytest.approx(corrected["sampler_gap"], rel=1e-3) and plain["sampler_gap"] > 1e-4


def test_with_importance_correction_the_ratio_is_the_trainers_and_the_sampler_weighs(base, tmp_path, monkeypatch):
    """Of a sampler whose log-probabilities are all 0.5 lower the importance weights are exp(0.5) = 1.65, here capped."""
    def stale(*args, **options):
        episodes = rollout(*args, **options)
        for t in episodes:
            t.logprobs = [p - 0.5 * m for p, m in zip(t.logprobs, t.loss_mask)]
        return episodes
    monkeypatch.setattr(grpo, "rollout", stale)
    _, (plain,) = run(base, tmp_path / "a")
    _, (corrected,) = run(base, tmp_path / "b", importance_correction=1.5)
    assert plain["first_ratio"] == pytest.approx(math.exp(0.5), rel=1e-3) and corrected["first_ratio"] == pytest.approx(1, abs=1e-3)
    assert corrected["importance_weight"] == 1.5 and corrected["importance_capped"] == 1 and corrected["sampler_gap"] == pytest.approx(0.5, rel=1e-3)
    assert corrected["advantage_abs"] == pytest.approx(1.5 * plain["advantage_abs"], rel=1e-4)


@pytest.mark.parametrize("loss", ["gspo", "luspo"])
def test_rounding_alone_leaves_no_clip_range(base, tmp_path, monkeypatch, loss):
    """Two engines in bfloat16 differ by 0.03 nats a token, a hundred times gspo's range: most of the first update would be clipped away."""
    def rounded(*args, **options):
        episodes = rollout(*args, **options)
        for i, t in enumerate(episodes):
            t.logprobs = [p + 0.03 * (-1)**i * m for p, m in zip(t.logprobs, t.loss_mask)]
        return episodes
    monkeypatch.setattr(grpo, "rollout", rounded)
    _, (metrics,) = run(base, tmp_path, loss=loss)
    assert metrics["clip_low"] == metrics["clip_high"] == 0 and metrics["sampler_gap"] == pytest.approx(0.03, rel=1e-3)


def test_the_correction_of_a_loss_can_be_switched_off(base, tmp_path):
    """0 was refused and "none" is no number: gspo as its paper has it, or --sampler without a correction, could not be run."""
    assert grpo.settle(grpo.Config(loss="gspo", importance_correction=0)).importance_correction == 0
    assert grpo.settle(grpo.Config(sampler="http://x", importance_correction=0.0)).importance_correction == 0
    _, (with_it,) = run(base, tmp_path / "a", loss="gspo")
    _, (without,) = run(base, tmp_path / "b", loss="gspo", importance_correction=0.0)
    assert "importance_weight" in with_it and "importance_weight" not in without


def test_learning_rate_zero_leaves_every_weight_as_it_was(base, tmp_path):
    run(base, tmp_path, learning_rate=0.0, max_steps=2)
    adapter = state(tmp_path, 2, "adapter_model")
    assert all((v == 0).all() for k, v in adapter.items() if "lora_B" in k)


def test_the_same_command_twice_gives_the_same_bytes(base, tmp_path):
    for name in ("a", "b"):
        run(base, tmp_path / name, max_steps=2)
    for file in ("metrics.jsonl", "trajectories.jsonl"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    a, b = (state(tmp_path / n, 2, "adapter_model") for n in "ab")
    assert all(torch.equal(a[k], b[k]) for k in a)


# Beside each loss, options that have nothing to do with it.
BESIDE = {
    "grpo": {"credit": "turn", "lora_dropout": 0.1}, "dapo": {"scale_rewards": "batch", "kl_coef": 0.1},
    "dr_grpo": {"credit": "process", "kl_coef": 0.1, "kl_estimator": "k2"}, "cispo": {"importance_correction": 2.0, "gradient_checkpointing": True},
    "sapo": {"credit": "rloo", "kl_coef": 0.1, "kl_estimator": "k3"}, "gspo": {"updates_per_step": 2, "entropy_coef": 0.01},
    "luspo": {"dtype": "bfloat16", "reward_scaling": 0.1, "reward_bias": 1.0}, "vespo": {"lora_r": 0, "learning_rate": 1e-5, "scale_rewards": "none"}}


@pytest.mark.parametrize("options", [*({"loss": name, **BESIDE.get(name, {})} for name in grpo.LOSSES),
                                     {"clip_eps_high": 0.28, "env": "equations,equations_hard", "max_turns": 2}], ids=str)
def test_every_option_runs_and_logs_finite_numbers(base, tmp_path, options):
    result, lines = run(base, tmp_path, max_steps=2, **options)
    assert len(lines) == 2 and result["steps"] == 2
    assert all(np.isfinite(v).all() for line in lines for v in line.values())  # one is a histogram


def test_kl_is_zero_for_a_fresh_adapter_and_grows(base, tmp_path):
    _, lines = run(base, tmp_path, kl_coef=0.01, max_steps=3, learning_rate=5e-3)
    assert abs(lines[0]["kl"]) < 1e-6 < lines[2]["kl"]


def test_going_on_from_an_adapter_keeps_its_start_as_reference(base, tmp_path):
    run(base, tmp_path / "first", max_steps=2, learning_rate=5e-3)
    _, lines = run(str(tmp_path / "first"), tmp_path / "second", kl_coef=0.01, max_steps=2, learning_rate=5e-3)
    assert abs(lines[0]["kl"]) < 1e-6 < lines[1]["kl"]


def test_groups_outside_the_band_are_dropped_replaced_and_counted(base, tmp_path):
    _, lines = run(base, tmp_path, success_rate_lb=0.1, success_rate_ub=0.9, max_steps=2)
    assert all(line["groups_mixed"] == 1 for line in lines) and sum(line["groups_dropped"] for line in lines) > 0


def test_what_a_step_does_not_learn_from_is_in_its_shares_of_what_it_played(base, tmp_path, monkeypatch):
    """Faults and dropped groups are no episodes of the step: `errors` was 0 whatever failed, and with a band no number was the policy's success."""
    everything = []

    def faulty(*args, **options):
        episodes = rollout(*args, **options)
        for t in episodes[::4]:
            t.stop_reason, t.info["success"] = "error", False
        everything.extend(episodes)
        return episodes
    monkeypatch.setattr(grpo, "rollout", faulty)
    _, (line,) = run(base, tmp_path, success_rate_lb=0.1)
    assert line["errors"] == 0.25 and line["groups_dropped"] > 0 and line["episodes"] < len(everything)
    timing = json.loads((tmp_path / "timing.jsonl").read_text())
    assert timing["rollout_tokens_per_second"] * timing["rollout_seconds"] == pytest.approx(sum(sum(t.loss_mask) for t in everything))
    assert line["played_success"] == sum(t.info["success"] for t in everything) / len(everything) < line["success"]


def test_a_step_without_any_group_in_the_band_goes_on(base, tmp_path, capfd):
    result, lines = run(base, tmp_path, success_rate_lb=0.99, success_rate_ub=0.995)
    assert result["steps"] == 1 and lines[0]["groups_dropped"] == 16
    assert "step 1: there is no episode to learn from: skipped" in capfd.readouterr().out


def test_clip_eps_sets_both_bounds_unless_the_upper_one_is_given():
    both = grpo.settle(grpo.Config(clip_eps_low=0.1))
    assert (both.clip_eps_low, both.clip_eps_high) == (0.1, 0.1)
    apart = grpo.settle(grpo.Config(clip_eps_low=0.1, clip_eps_high=0.3))
    assert (apart.clip_eps_low, apart.clip_eps_high) == (0.1, 0.3)
    paper = grpo.settle(grpo.Config(loss="dapo"))
    assert (paper.clip_eps_low, paper.clip_eps_high) == (0.2, 0.28)


def test_groups_of_equal_rewards_teach_nothing_and_are_counted(base, tmp_path):
    _, (metrics,) = run(base, tmp_path, reward_scaling=0.0)
    assert metrics["groups_without_signal"] == 1 and metrics["grad_norm"] == 0 and "loss" not in metrics


@pytest.mark.parametrize("options, moves", [({}, False), ({"kl_coef": 0.1}, True), ({"entropy_coef": 0.01}, True)], ids=["alone", "KL", "entropy"])
def test_where_all_groups_are_silent_the_momentum_of_adam_moves_nothing(base, tmp_path, monkeypatch, options, moves):
    """Without a gradient Adam repeats its last steps: a step that teaches nothing moved the weights like any other, and decayed them."""
    def played(*args, **kwargs):
        episodes = rollout(*args, **kwargs)
        for t in episodes if kwargs["step"] else ():
            t.rewards, t.reward = [0.0] * (len(t.rewards) - 1) + [1.0], 1.0
        return episodes
    monkeypatch.setattr(grpo, "rollout", played)
    _, lines = run(base, tmp_path, max_steps=2, save_every=1, weight_decay=0.1, **options)
    assert [line["groups_without_signal"] == 1 for line in lines] == [False, True] and (lines[1]["grad_norm"] > 0) == moves
    for name in ("adapter_model", "optimizer"):
        before, after = state(tmp_path, 1, name), state(tmp_path, 2, name)
        assert all(torch.equal(before[k], after[k]) for k in before) != moves


def test_result_and_folder(base, tmp_path):
    result, _ = run(base, tmp_path, eval_tasks=8, save_every=1, max_steps=2, eval_every=1)
    assert {"success_before", "success_after", "seconds", "peak_memory_mb", "steps", "seed"} <= result.keys()
    assert json.loads((tmp_path / "result.json").read_text()) == result
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step_000001", "step_000002"]
    assert {"config.yaml", "metrics.jsonl", "timing.jsonl", "trajectories.jsonl"} <= {p.name for p in tmp_path.iterdir()}


def test_it_learns(base, tmp_path):
    """From a choice at random, right in both turns once in 16, to the right one mostly."""
    _, lines = run(base, tmp_path, tasks_per_step=8, max_steps=8, learning_rate=5e-3)
    first, last = (sum(line["success"] for line in part) / 2 for part in (lines[:2], lines[-2:]))
    assert first < 0.3 and last > 0.7, [line["success"] for line in lines]


@pytest.mark.parametrize("options, words", [
    ({"success_rate_lb": 0.8, "success_rate_ub": 0.2}, "is above"),
    ({"importance_correction": 2.0, "loss": "vespo"}, "vespo")])
def test_clashes_are_refused(tmp_path, options, words):
    config = grpo.Config(model_path="x", output_dir=str(tmp_path / "o"), tasks_per_step=4, group_size=4)
    with pytest.raises(UserError, match=re.escape(words)):
        grpo.train(dataclasses.replace(config, **options))


@pytest.mark.parametrize("arguments, words", [
    (["--lerning_rate", "1"], "did you mean --learning_rate?"), (["--model_path", "./nowhere"], "./nowhere: no such folder"),
    (["--group_size", "1"], "--group_size 1: must be at least 2"), (["--env", "equatons"], "did you mean equations?"),
    (["--model_path", "tiny", "--dataset", "rows.jsonl", "--env", "gsm8k"], 'rows.jsonl:2: no "answer" field; has: question'),
    (["--dataset", "row.jsonl"], "row.jsonl: No such file or directory"),
])
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, arguments, words):
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n{"question": "2+2?"}\n')
    done = programs.run(grpo.__file__, *arguments, cwd=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert words in done.stderr.strip().splitlines()[-1], done.stderr
