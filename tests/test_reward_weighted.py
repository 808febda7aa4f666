"""reward_weighted.py: weights by hand and by slow loops, its limits (SFT, RAFT), what must not change a step, and that it learns."""
import json
import math
import re
import shutil
from pathlib import Path

import bandit
import numpy as np
import programs
import pytest
import torch
from safetensors.torch import load_file

import schooling
import grpo
import reward_weighted as rw
import sft
from agent import Trajectory, rollout
from core.data import collate
from envs.tasks import load_tasks
from episodes import read_trajectories
from core.config import options, UserError
from core.data import turn_index
from layers import load_model
from core.logprobs import token_logprobs

@pytest.fixture(scope="module")
def place(schooled, probed_once, tmp_path_factory):
    """A folder with a model that knows the bandit's format but not its answer, and 40 episodes that it played."""
    folder = tmp_path_factory.mktemp("bandit")
    shutil.copytree(schooled, folder / "base")
    model, tokenizer = load_model(schooled, train=False)
    write(folder / "episodes.jsonl", rollout(model, tokenizer, bandit.ENV, load_tasks(bandit.ENV, "train", 10, 0), 4))
    return folder


def write(path, episodes):
    path.write_text("".join(json.dumps(t.to_json()) + "\n" for t in episodes))
    return str(path)


def config(place, out, **given):
    return rw.Config(**{**dict(model_path=str(place / "base"), env=bandit.ENV, output_dir=str(out), eval_tasks=0, max_samples=200,
                               learning_rate=1e-3, max_grad_norm=1e9, max_new_tokens=32, overwrite=True), **given})


def gradients(out, step=1):
    """After one AdamW step exp_avg is (1 - beta1) x the gradient."""
    found = load_file(out / "checkpoints" / f"step_{step:06d}" / "optimizer.safetensors")
    return {k: v for k, v in found.items() if k.endswith("|exp_avg")}


def assert_same(a, b, tolerance):
    scale = max(v.abs().max() for v in a.values())
    assert scale > 0 and a.keys() == b.keys() and all((a[k] - b[k]).abs().max() <= tolerance * scale for k in a)


def double(*values):
    return torch.tensor(values, dtype=torch.float64)


# -------------------------------------------------------------------------------------------------- equations, by hand
def test_return_to_go_is_what_this_turn_and_the_later_ones_earned():
    assert rw.returns_to_go([2.0, 0.0, 5.0]) == [7.0, 5.0, 5.0] and rw.returns_to_go([]) == []


def test_advantages_by_hand():
    values, groups = double(1, 3, 10, 20), ["a", "a", "b", "b"]
    assert rw.advantages(values, groups, [0] * 4, "none").tolist() == [1, 3, 10, 20]
    assert rw.advantages(values, groups, [0] * 4, "batch").tolist() == [-7.5, -5.5, 1.5, 11.5]
    assert rw.advantages(values, groups, [0] * 4, "group").tolist() == [-1, 1, -5, 5]
    scaled = rw.advantages(values, groups, [0] * 4, "group", "batch")
    assert scaled.tolist() == pytest.approx([x / (math.sqrt(13) + 1e-5) for x in (-1, 1, -5, 5)], abs=1e-12)


def test_a_turn_is_compared_with_the_same_turn_of_the_other_episodes():
    values, turns = double(7, 5, 5, 3, 9), [0, 1, 0, 1, 2]  # two episodes, of 2 and 3 turns
    assert rw.advantages(values, ["a"] * 5, turns, "group").tolist() == [1, 1, -1, -1, 0]  # nobody else reached turn 2
    assert rw.advantages(values, ["a", "a", "b", "b", "b"], turns, "batch").tolist() == [1, 1, -1, -1, 0]


def test_equal_rewards_give_exactly_zero_and_not_rounding():
    values = torch.full((7,), 0.1, dtype=torch.float64)
    assert (rw.advantages(values, ["a"] * 7, [0] * 7, "group", "batch") == 0).all()


def test_a_group_of_one_episode_has_nothing_to_be_compared_with():
    assert rw.advantages(double(1, 2, 3), ["a", "a", "b"], [0, 0, 0], "group").tolist() == [-0.5, 0.5, 0.0]


def test_exp_weights_by_hand_clip_above_and_beta_is_the_papers():
    advantage = double(0, math.log(2), -math.log(4), 100)
    assert rw.exp_weights(advantage, 1.0, 20.0).tolist() == pytest.approx([1, 2, 0.25, 20], abs=1e-12)
    assert rw.exp_weights(advantage, 0.5, 3.0).tolist() == pytest.approx([1, 3, 1 / 16, 3], abs=1e-12)
    assert rw.exp_weights(double(800), 1.0).isinf().all() and rw.exp_weights(double(800), 1.0, 20.0) == pytest.approx(20)


def test_linear_weights_by_hand_are_clipped_at_zero_and_above():
    assert rw.linear_weights(double(-3, 0, 2, 30), 20.0).tolist() == [0, 0, 2, 20]
    assert rw.linear_weights(double(-3, 30)).tolist() == [0, 30]


def test_filter_weights_by_hand():
    values, pools = double(1, 3, 2, 0, 0, 0, 5, 4), list("aaaabbbb")
    assert rw.filter_weights(values, pools, top_share=0.25).tolist() == [0, 1, 0, 0, 0, 0, 1, 0]
    assert rw.filter_weights(values, pools, top_share=0.3).tolist() == [0, 1, 1, 0, 0, 0, 1, 1]  # ceil(1.2) = 2 of each
    assert rw.filter_weights(values, [0] * 8, top_share=0.25).tolist() == [0, 0, 0, 0, 0, 0, 1, 1]
    assert rw.filter_weights(values, pools, min_reward=2).tolist() == [0, 1, 1, 0, 0, 0, 1, 1]
    assert rw.filter_weights(double(1, 1, 0, 1), [0] * 4, top_share=0.5).tolist() == [1, 1, 0, 1]  # ties stay together


def test_a_threshold_that_decimals_do_not_hold_is_reached():
    """min_reward=1/3 kept no episode that was paid 1/3, because its reward was rounded to nine decimals."""
    episodes = [Trajectory(rewards=[r], reward=r, group_id="g") for r in (1 / 3, 0.3)]
    config = rw.settle(rw.Config(weight_per="episode", weighting="filter", min_reward=1 / 3))
    assert rw.weigh(episodes, config)[0] == [[1], [0]]


@pytest.mark.parametrize("options, kept", [
    ({"weighting": "filter", "min_reward": 1.0}, [1, 1]), ({"weighting": "filter", "top_share": 0.3}, [1, 1]), ({"weighting": "linear"}, [0, 0])])
def test_rewards_that_only_rounding_tells_apart_are_equal(options, kept):
    """--rewards a=0.6,b=0.3,c=0.1 pays who earns all of them 0.9999999999999999. --min_reward 1 kept none of them, top_share told such ties apart,
    and so did linear, with full weights, because the largest is divided by itself."""
    episodes = [Trajectory(rewards=[r], reward=r, group_id="g") for r in (0.6 + 0.3 + 0.1, 1.0)]
    assert episodes[0].reward < episodes[1].reward
    assert rw.weigh(episodes, rw.settle(rw.Config(weight_per="episode", **options)))[0] == [[weight] for weight in kept]


def test_effective_sample_size():
    assert rw.effective_sample_size(double(2, 2, 2)) == pytest.approx(3) and rw.effective_sample_size(double(5, 0)) == 1
    assert rw.effective_sample_size(double(1, 3)) == pytest.approx(16 / 10)
    assert rw.effective_sample_size(double(1e300, 1e300)) == pytest.approx(2)


def test_token_weights_put_each_turns_weight_on_its_own_tokens():
    mask = torch.tensor([[0, 1, 1, 0, 1, 0], [0, 0, 1, 0, 0, 0], [0, 1, 0, 1, 0, 1]])
    assert rw.token_weights([[2.0, 3.0], [4.0], [5.0]], mask).tolist() == [[0, 2, 2, 0, 3, 0], [0, 0, 4, 0, 0, 0], [0, 5, 0, 5, 0, 5]]
    with pytest.raises(ValueError, match=r"values for \[2\] turns, but the mask has \[3\]"):
        rw.token_weights([[1.0, 2.0]], mask[2:])


def slow_loss(values, groups, turns_of, masks, logprobs, baseline, beta, max_weight, kind):
    """Second implementation: episodes, turns and tokens one by one. values: per episode a list, one number per turn."""
    above = below = 0.0
    for e, own in enumerate(values):
        for j, value in enumerate(own):
            same = [values[k][j] for k in range(len(values)) if len(values[k]) > j and (baseline == "batch" or groups[k] == groups[e])]
            advantage = value - (sum(same) / len(same) if baseline != "none" else 0.0)
            w = math.exp(advantage / beta) if kind == "exp" else max(advantage, 0.0)
            w = min(w, max_weight)
            turn = -1
            for t in range(len(masks[e])):
                turn += masks[e][t] == 1 and (t == 0 or masks[e][t - 1] == 0)
                if masks[e][t] == 1 and turn == j:
                    above -= w * logprobs[e][t]
                    below += w
    return above / below


@pytest.mark.parametrize("kind", ["exp", "linear"])
@pytest.mark.parametrize("baseline", ["none", "batch", "group"])
def test_loss_equals_a_slow_loop(kind, baseline):
    random = torch.Generator().manual_seed(0)
    def draw(high):
        return int(torch.randint(1, high, (), generator=random))
    values, groups, masks = [], [], []
    for e in range(12):
        own = [round(float(torch.randn((), generator=random, dtype=torch.float64)), 3) for _ in range(draw(4))]
        values, groups = values + [own], groups + [e // 3]
        masks.append([m for _ in own for m in [0] * draw(3) + [1] * draw(4)])
    width = max(map(len, masks))
    mask = torch.tensor([m + [0] * (width - len(m)) for m in masks])
    logprobs = -torch.rand(mask.shape, generator=random, dtype=torch.float64) * mask
    a = rw.advantages(double(*(v for own in values for v in own)), [g for g, own in zip(groups, values) for _ in own],
                      [j for own in values for j in range(len(own))], baseline)
    weights = (rw.exp_weights(a, 0.7, 3.0) if kind == "exp" else rw.linear_weights(a, 3.0)).split([len(own) for own in values])
    tokens = torch.zeros(mask.shape, dtype=torch.float64)
    for row, own in enumerate(weights):  # token_weights is float32: its positions, these numbers
        where = turn_index(mask[row:row + 1])[0]
        tokens[row] = torch.where(where >= 0, own[where], 0.0)
        assert torch.allclose(rw.token_weights([own.tolist()], mask[row:row + 1])[0].double(), tokens[row], rtol=1e-6)
    ours = rw.reward_weighted_loss(logprobs, tokens, tokens.sum()).item()
    slow = slow_loss(values, groups, None, masks, logprobs.tolist(), baseline, 0.7, 3.0, kind)
    assert abs(ours - slow) < 1e-12


def test_the_scale_of_weights_cancels_and_micro_batches_sum():
    logprobs, weights = -torch.rand(4, 5, dtype=torch.float64), torch.rand(4, 5, dtype=torch.float64)
    whole = rw.reward_weighted_loss(logprobs, weights, weights.sum())
    assert torch.isclose(whole, rw.reward_weighted_loss(logprobs, 7 * weights, 7 * weights.sum()), rtol=1e-12)
    parts = sum(rw.reward_weighted_loss(logprobs[i:i + 1], weights[i:i + 1], weights.sum()) for i in range(4))
    assert abs(whole - parts) < 1e-12


# ------------------------------------------------------------------------------------------------- its limits: SFT, RAFT
@pytest.mark.slow
def test_zero_one_rewards_linear_without_baseline_is_filtered_sft(place):
    """Value and gradient are sft_loss's on the successful episodes alone, to the last bit."""
    episodes = read_trajectories(str(place / "episodes.jsonl"))
    for t in episodes:
        t.reward = float(t.rewards[0])
    good = [t for t in episodes if t.reward == 1]
    assert 0 < len(good) < len(episodes)
    options = dict(trajectories="x", weighting="linear", baseline="none", weight_per="episode")
    shares, metrics = rw.weigh(episodes, config(place, "", **options))
    assert metrics["kept"] == len(good) / len(episodes) and metrics["ess"] == len(good)
    model, _ = load_model(str(place / "base"))

    def value_and_gradient(loss):
        model.zero_grad()
        loss.backward()
        return loss.item(), [p.grad.clone() for p in model.parameters()]
    ids, mask, _ = collate(good)
    value, gradient = value_and_gradient(sft.sft_loss(token_logprobs(model, ids, mask)[0], mask, mask.sum()))
    kept = [(t, w) for t, w in zip(episodes, shares) if any(w)]
    ids, mask, _ = collate([t for t, _ in kept])
    tokens = rw.token_weights([w for _, w in kept], mask)
    ours = value_and_gradient(rw.reward_weighted_loss(token_logprobs(model, ids, mask)[0], tokens, tokens.sum()))
    assert ours[0] == value and all(torch.equal(a, b) for a, b in zip(ours[1], gradient))


def test_sft_on_ones_own_best_episodes_is_raft(place, tmp_path):
    """The best of each task's four, ties included, given to sft.py: the same update as --weighting filter here."""
    episodes = read_trajectories(str(place / "episodes.jsonl"))
    groups = [episodes[i:i + 4] for i in range(0, 40, 4)]
    best = [t for group in groups for t in group if t.reward == max(other.reward for other in group)]
    assert 10 <= len(best) < 40
    sft.train(sft.Config(model_path=str(place / "base"), env=bandit.ENV, trajectories=write(tmp_path / "best.jsonl", best),
                         eval_dataset=other(tmp_path),
                         output_dir=str(tmp_path / "sft"), lora_r=8, batch_size=64, max_steps=1, eval_tasks=0, max_grad_norm=1e9))
    rw.train(config(place, tmp_path / "raft", trajectories=str(place / "episodes.jsonl"), weighting="filter", top_share=0.25,
                    weight_per="episode", lora_r=8, batch_size=64, max_steps=1))
    assert_same(gradients(tmp_path / "sft"), gradients(tmp_path / "raft"), 1e-5)


def test_a_reward_threshold_is_sfts_min_reward(place, tmp_path):
    path = str(place / "episodes.jsonl")
    sft.train(sft.Config(model_path=str(place / "base"), env=bandit.ENV, trajectories=path, eval_dataset=other(tmp_path), min_reward=1.0,
                         output_dir=str(tmp_path / "sft"), lora_r=8, batch_size=64, max_steps=1, eval_tasks=0, max_grad_norm=1e9))
    rw.train(config(place, tmp_path / "rw", trajectories=path, weighting="filter", min_reward=1.0, weight_per="episode", lora_r=8,
                    batch_size=64, max_steps=1))
    assert_same(gradients(tmp_path / "sft"), gradients(tmp_path / "rw"), 1e-5)


# ------------------------------------------------------------------------------------------------------------- the loop
@pytest.mark.parametrize("weight_per", ["episode", "turn"])
def test_micro_batch_size_changes_no_gradient(place, tmp_path, weight_per):
    for name, size, accumulation in (("one", 40, 1), ("many", 5, 8)):
        rw.train(config(place, tmp_path / name, trajectories=str(place / "episodes.jsonl"), weight_per=weight_per, max_steps=1,
                        batch_size=size, gradient_accumulation_steps=accumulation))
    assert_same(gradients(tmp_path / "one"), gradients(tmp_path / "many"), 1e-6)


def test_per_turn_weights_are_each_turns_own(place):
    """Each turn by what it and later turns earned, against the same turn of the others, by hand."""
    episodes = read_trajectories(str(place / "episodes.jsonl"))[:4]
    for t, rewards in zip(episodes, ([1.0, 0.0], [0.0, 1.0], [0.0, 0.0], [1.0, 1.0])):
        t.rewards, t.group_id = rewards, "g"
    shares, metrics = rw.weigh(episodes, config(place, "", weighting="linear", baseline="batch"))
    # to go: [1, 0] [1, 1] [0, 0] [2, 1]; means by turn 1 and 0.5; the largest weight, 1, is the unit
    assert shares == [[0, 0], [0, 0.5], [0, 0], [1, 0.5]] and metrics["kept"] == 3 / 8 and metrics["ess"] == pytest.approx(4 / 1.5)


def test_reward_bias_and_scale_reach_turns_and_episodes_alike(place, tmp_path):
    episodes = read_trajectories(str(place / "episodes.jsonl"))[:2]
    for t in episodes:
        t.rewards = [1.0, 3.0]
    episodes[0].reward, episodes[1].reward = 4.0, 3.0
    path = write(tmp_path / "two.jsonl", episodes)
    options = dict(trajectories=path, weighting="linear", baseline="none", reward_bias=2.0, reward_scaling=3.0, max_weight=None)
    model, tokenizer = load_model(str(place / "base"))
    by_turn, whole = (rw.settle(config(place, "", weight_per=per, **options)) for per in ("turn", "episode"))
    shares, metrics = rw.weigh(rw.recorded(by_turn, model, tokenizer), by_turn)
    assert metrics["weight_max"] == 6 and shares == [[1.0, 0.5]] * 2  # to go: (4 - 2) x 3, (3 - 2) x 3
    shares, metrics = rw.weigh(rw.recorded(whole, model, tokenizer), whole)
    assert metrics["weight_max"] == 6 and shares == [[1.0], [0.5]]


def test_every_episode_is_in_every_pass_and_batches_are_even(place):
    episodes = read_trajectories(str(place / "episodes.jsonl"))[:37]
    def batches(step, **options):
        return [[id(t) for t in batch] for batch, _ in rw.minibatches(episodes, [[1.0]] * len(episodes), config(place, "", batch_size=16, gradient_accumulation_steps=1, **options), step)]
    first = batches(1, num_epochs=1)
    assert sorted(t for batch in first for t in batch) == sorted(map(id, episodes)) and sorted(map(len, first)) == [12, 12, 13]
    assert first == batches(1, num_epochs=1) != batches(2, num_epochs=1)
    assert len(batches(1, num_epochs=3)) == 9 and len(batches(1, num_epochs=3, trajectories="x")) == 3


def test_it_learns_from_its_own_episodes_and_writes_the_folder(place, tmp_path):
    """From a choice at random to the right one in both turns."""
    result = rw.train(config(place, tmp_path, max_steps=6, tasks_per_step=8, group_size=4, eval_tasks=32, learning_rate=5e-3,
                             max_grad_norm=1.0, save_every=4, num_epochs=4))
    assert result["success_before"] < 0.3 and result["success_after"] > 0.8, result
    assert json.loads((tmp_path / "result.json").read_text()) == result
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(6)) and all(np.isfinite(v).all() for line in lines for v in line.values())
    assert all("ess" in line and line["updates"] == 4 for line in lines)
    assert (tmp_path / "checkpoints" / f"step_{result['steps']:06d}" / "adapter_model.safetensors").exists()


def test_the_same_command_twice_gives_the_same_bytes(place, tmp_path):
    for name in "ab":
        rw.train(config(place, tmp_path / name, max_steps=2, tasks_per_step=4, num_epochs=1, lora_dropout=0.1))
    for file in ("metrics.jsonl", "trajectories.jsonl", "checkpoints/step_000002/adapter_model.safetensors"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_without_model_or_data_it_makes_both(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(schooling, "TINY_SFT", {**schooling.TINY_SFT, "max_samples": 16, "max_steps": 1})
    result = rw.train(rw.Config(output_dir=str(tmp_path), max_steps=1, tasks_per_step=2, group_size=2, max_tokens=160, eval_tasks=2))
    out = capfd.readouterr().out
    assert result["steps"] == 1 and "tiny model: made in" in out
    adapter = json.loads((tmp_path / "checkpoints" / "step_000001" / "adapter_config.json").read_text())
    assert Path(adapter["base_model_name_or_path"]).resolve() == (tmp_path / "base").resolve()


def test_it_learns_from_recorded_episodes(place, tmp_path):
    result = rw.train(config(place, tmp_path, trajectories=str(place / "episodes.jsonl"), learning_rate=5e-3, max_grad_norm=1.0, num_epochs=10,
                             weighting="linear", baseline="batch", batch_size=8, gradient_accumulation_steps=1, eval_tasks=32))
    assert result["success_before"] < 0.3 and result["success_after"] > 0.5, result


@pytest.mark.parametrize("options", [
    {"weighting": "linear", "gradient_checkpointing": True, "lora_dropout": 0.1}, {"weighting": "filter", "top_share": 0.5, "lora_r": 0, "learning_rate": 1e-5},
    {"weighting": "filter", "min_reward": 1.0, "weight_per": "episode"}, {"baseline": "none", "beta": 0.1},
    {"scale_rewards": "batch", "baseline": "batch", "max_weight": None}], ids=str)
def test_every_option_runs_and_logs_finite_numbers(place, tmp_path, options):
    result = rw.train(config(place, tmp_path, max_steps=2, tasks_per_step=4, group_size=4, num_epochs=1, **options))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert result["steps"] == len(lines) >= 1 and all(np.isfinite(v).all() for line in lines for v in line.values())


def test_the_environment_of_recorded_episodes_is_played_if_it_is_one_we_know(place, tmp_path):
    for name, env, success in (("equations", "equations", True), ("unknown", "/some/where.py:Env", False)):
        path = edited(place, tmp_path, lambda episodes: [t.info.update(env=env) for t in episodes])
        result = rw.train(config(place, tmp_path / name, env=None, trajectories=path, max_steps=1, eval_tasks=1, max_tokens=160))
        assert (result["success_after"] is not None) == success


def test_offline_a_step_is_a_pass_and_max_steps_beats_epochs(place, tmp_path):
    data = dict(trajectories=str(place / "episodes.jsonl"), batch_size=8)
    assert rw.train(config(place, tmp_path / "a", num_epochs=3, **data))["steps"] == 3
    assert rw.train(config(place, tmp_path / "b", num_epochs=3, max_steps=2, **data))["steps"] == 2
    lines = [json.loads(line) for line in (tmp_path / "b" / "metrics.jsonl").read_text().splitlines()]
    assert [line["updates"] for line in lines] == [3, 3]  # 40 episodes, 16 an update


def test_held_out_tasks_are_none_that_the_episodes_are_of(place, tmp_path, monkeypatch):
    env = bandit.ENV
    held_out = load_tasks(env, "test", 6, 0)
    path = edited(place, tmp_path, lambda episodes: [t.info.update(task={"number": held_out[0]["number"]}) or setattr(t, "group_id", "g") for t in episodes])
    played = []
    monkeypatch.setattr(rw, "evaluate", lambda *args, **options: played.extend(args[3]) or {})
    rw.train(config(place, tmp_path / "o", trajectories=path, max_steps=1, eval_tasks=6))
    assert played and held_out[0]["number"] not in {task["number"] for task in played}


# ---------------------------------------------------------------------------------------------------- notes and refusals
def test_equal_weights_are_said_to_carry_no_signal(place, tmp_path, capfd):
    rw.train(config(place, tmp_path, trajectories=str(place / "episodes.jsonl"), reward_scaling=0.0, max_steps=1))
    assert "all weights are equal" in capfd.readouterr().out


def test_no_episode_of_positive_weight_is_refused(place, tmp_path, capfd):
    with pytest.raises(UserError, match="no episode of positive weight; try"):
        rw.train(config(place, tmp_path, trajectories=str(place / "episodes.jsonl"), weighting="filter", min_reward=3.0))
    rw.train(config(place, tmp_path, max_steps=2, tasks_per_step=2, weighting="linear", reward_scaling=0.0))
    assert capfd.readouterr().out.count("nothing to learn from") == 2


def other(tmp_path):
    """A file of one episode, to hold out."""
    from agent import Trajectory
    return write(tmp_path / "other.jsonl", [Trajectory([1, 2], [0, 1], [0.0, 0.0], reward=1.0)])


def edited(place, tmp_path, edit):
    episodes = read_trajectories(str(place / "episodes.jsonl"))
    edit(episodes)
    return write(tmp_path / "edited.jsonl", episodes)


@pytest.mark.parametrize("edit, options, words", [
    (lambda e: e[0].token_ids.__setitem__(0, 70_000), {}, "token id 70000"),
    (lambda e: e.__delitem__(slice(1, 4)), {"weight_per": "episode"}, "has one episode"),
    (lambda e: e[0].rewards.append(0.0), {}, "has 3 rewards, but 2 turns"),
    (lambda e: e[4].__setattr__("group_id", e[0].group_id), {}, "names two tasks"),
    (lambda e: [t.token_ids.extend([0] * 600) or t.loss_mask.extend([0] * 600) or t.logprobs.extend([0.0] * 600) for t in e], {"max_tokens": 512}, "no episodes left"),
    (lambda e: e[0].__setattr__("reward", 900.0), {"max_weight": None, "weight_per": "episode", "baseline": "none"}, "overflows"),
])
def test_recorded_episodes_that_cannot_be_learnt_from_are_refused(place, tmp_path, edit, options, words):
    with pytest.raises(UserError, match=re.escape(words)):
        rw.train(config(place, tmp_path / "o", trajectories=edited(place, tmp_path, edit), **options))


@pytest.mark.parametrize("options, words", [
    ({"weighting": "filter"}, "--weighting filter is given 0"), ({"weighting": "filter", "top_share": 0.5, "min_reward": 1.0}, "--weighting filter is given 2"),
    ({"top_share": 0.5}, "others take none; --weighting exp is given 1"),
    ({"group_size": 1}, "--group_size 1 plays one")])
def test_clashes_are_refused_before_anything_is_loaded(tmp_path, options, words):
    with pytest.raises(UserError, match=re.escape(words)):
        rw.train(rw.Config(model_path="nowhere", output_dir=str(tmp_path / "o"), **options))
    assert not (tmp_path / "o").exists()


def test_bad_input_is_one_line_and_exit_code_2(tmp_path):
    done = programs.run(rw.__file__, "--beta", "0", cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.strip() == "reward_weighted.py: --beta 0: must be greater than 0"


def test_flags_that_grpo_has_too_take_the_same():
    ours, theirs = ({name: (option.kind, option.optional) for name, option in options(module.Config).items()} for module in (rw, grpo))
    different = {"gradient_accumulation_steps", "env", "num_epochs", "scale_rewards"}
    assert all(ours[name] == theirs[name] for name in ours.keys() & theirs.keys() - different)


def test_a_weight_that_is_zero_in_float32_leaves_its_episode_out():
    """In float64 it is 1e-54 of the largest. An update of such episodes alone would divide by 0."""
    episodes = [Trajectory(rewards=[r], reward=r, group_id="g") for r in (0.0, 0.5)]
    config = rw.settle(rw.Config(beta=0.004, weight_per="episode", max_weight=None))
    weights, _ = rw.weigh(episodes, config)
    assert weights == [[0.0], [1.0]]
    batches = list(rw.minibatches(episodes, weights, config, 0))
    assert batches and all(batch == [episodes[1]] for batch, _ in batches)


def test_recorded_episodes_need_no_tasks_to_play(monkeypatch):
    """Then all rows of --tasks are evaluated on, and the model trains on none of them."""
    def asked(config, n):
        raise LookupError(n)
    monkeypatch.setattr(rw, "train_and_held_out", asked)
    for path, wanted in (("t.jsonl", 0), (None, 256)):
        with pytest.raises(LookupError, match=f"^{wanted}$"):
            rw.train(rw.Config(trajectories=path, env="equations", max_samples=256))


def test_the_next_command_plays_no_texts():
    from extras.show.notes import next_command
    texts = {"output_dir": "o", "dataset": "chats.jsonl", "eval_dataset": "more.jsonl", "dtype": "float32"}
    assert next_command("agent.py", sft.Config(**texts)) == "python agent.py --model_path o --dtype float32"
    played = sft.Config(**texts, env="gsm8k", tasks="t.jsonl")
    assert next_command("agent.py", played) == "python agent.py --model_path o --env gsm8k --tasks t.jsonl --dtype float32"
    tasks = rw.Config(output_dir="o", env="gsm8k", dataset="tasks.jsonl")
    assert next_command("agent.py", tasks) == "python agent.py --model_path o --env gsm8k --tasks tasks.jsonl"
