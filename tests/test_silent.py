"""Episodes that cannot teach: what leaves them out of an update changes no gradient, and the log and the records say what is theirs."""
import json
import math

import pytest
import torch
from saving import save_tiny

import grpo
import reward_weighted
from agent import Trajectory
from extras.show.record import unpacked

# Of five groups of three: all right, all wrong, mixed, mixed with one at the mean, equal totals paid in other turns.
REWARDS = [[[0.0, 1.0]] * 3, [[0.0, 0.0]] * 3, [[1.0, 0.0], [0.0, 0.0], [0.0, 1.0]], [[0.0, 1.0], [0.0, 0.5], [0.0, 0.0]],
           [[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]]
MASK = [0, 0, 1, 1, 0, 0, 1, 1, 1]


def step_of(scale):
    """A step's episodes of two turns each, and its tensors, with ratios around 1."""
    generator = torch.Generator().manual_seed(0)
    info = {"success": False, "states": ["start", "then"], "reward_weights": {"all": 1.0}}
    batch = [Trajectory([1] * 9, MASK, [0.0] * 9, rewards, sum(rewards), {"all": sum(rewards)}, group_id=str(group), info=info)
             for group, members in enumerate(REWARDS) for rewards in members]
    mask = torch.tensor([MASK] * len(batch))
    old = -torch.rand(mask.shape, generator=generator)
    return batch, mask, old, old + scale * torch.randn(mask.shape, generator=generator)


@pytest.mark.parametrize("credit", grpo.CREDITS)
@pytest.mark.parametrize("loss", grpo.LOSSES)
def test_the_gradient_of_every_log_probability_is_the_same_without_them(loss, credit):
    """That of the silent ones is 0 exactly, and the others differ at most as the ends of a vector round: sapo's sigmoid, in its last bit."""
    config = grpo.settle(grpo.Config(loss=loss, credit=credit, model_path="none", kl_coef=0.0, max_tokens=9, rewards="exact,format"))
    batch, mask, old, logprobs = step_of(0.2)
    advantages = grpo.token_advantages(batch, mask, credit, scale=config.scale_rewards)
    taught = [i for i, a in enumerate(advantages) if a.any()]
    assert set(range(6, 9)) <= set(taught) and not set(range(3 if credit == "process" else 0, 6)) & set(taught)
    counts = grpo.Counts(len(batch), int(mask.sum()), 9)

    def gradient(rows, counts):
        x = logprobs[rows].clone().requires_grad_()
        value, numbers = grpo.total_loss(config, counts, x, -x.detach(), old[rows], None, advantages[rows], mask[rows])
        return torch.autograd.grad(value, x)[0], value, numbers
    whole, value, everything = gradient(list(range(len(batch))), counts)
    part, same, numbers = gradient(taught, counts._replace(trained=int(mask[taught].sum())))
    torch.testing.assert_close(part, whole[taught], rtol=1e-6, atol=0)
    assert part.any() and whole.count_nonzero() == part.count_nonzero()
    assert same.item() == pytest.approx(value.item(), abs=1e-6)
    # What is logged are means over what was trained, and not over the whole step.
    ratios = (logprobs - old)[taught][mask[taught].bool()].exp()
    assert numbers["ratio"].item() == pytest.approx(ratios.mean().item(), rel=1e-5) != everything["ratio"].item()


@pytest.fixture(scope="module")
def base(probed_once, tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("base"))


@pytest.fixture
def pay(monkeypatch):
    """Pay the k-th episode that is played these rewards, whatever it did, and list the rows of every backward pass."""
    def function(module, *rewards):
        play, forward, rows = module.rollout, module.token_logprobs, []

        def paid(*args, **options):
            played = play(*args, **options)
            for t, reward in zip(played, rewards, strict=True):
                t.reward, t.rewards, t.info["success"] = reward, [0.0] * (len(t.rewards) - 1) + [reward], reward == 1
            return played

        def counted(model, token_ids, *args, **options):
            rows.append(len(token_ids))
            return forward(model, token_ids, *args, **options)
        monkeypatch.setattr(module, "rollout", paid)
        monkeypatch.setattr(module, "token_logprobs", counted)
        return rows
    return function


def one_step(module, base, folder, **options):
    common = dict(model_path=base, output_dir=str(folder), max_steps=1, eval_tasks=0, lora_r=2, batch_size=4, env="equations", max_turns=2,
                  max_new_tokens=6, tasks_per_step=3, group_size=2, learning_rate=1e-5, save_every=1, max_grad_norm=1e9)
    if module is grpo:  # TINY has a KL penalty
        common["kl_coef"] = 0.0
    module.train(module.Config(**{**common, **options}))
    lines = [json.loads(line) for line in open(folder / "tokens.jsonl")] if (folder / "tokens.jsonl").exists() else []
    return json.loads((folder / "metrics.jsonl").read_text()), lines


def moments(folder):
    from safetensors.torch import load_file
    file = load_file(folder / "checkpoints" / "step_000001" / "optimizer.safetensors")
    return {name: value for name, value in file.items() if name.endswith("|exp_avg")}


def test_an_update_forwards_what_teaches_alone_and_its_gradient_is_the_same_to_rounding(base, tmp_path, pay):
    rows = pay(grpo, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0)
    metrics, lines = one_step(grpo, base, tmp_path / "part", updates_per_step=2)
    assert rows == [2, 2]
    # An entropy bonus far below rounding keeps all of them in.
    whole, all_lines = one_step(grpo, base, tmp_path / "whole", updates_per_step=2, entropy_coef=1e-30)
    assert rows[2:] == [4, 2] * 2
    part, full = moments(tmp_path / "part"), moments(tmp_path / "whole")
    scale = max(value.abs().max() for value in full.values())
    assert scale > 0 and all((part[name] - full[name]).abs().max() < 1e-5 * scale for name in full)
    assert metrics["loss"] == pytest.approx(whole["loss"], abs=1e-5) and metrics["groups_without_signal"] == whole["groups_without_signal"] == 2 / 3
    assert metrics["first_ratio"] == pytest.approx(1, abs=1e-3) and metrics["advantage_abs"] > whole["advantage_abs"]
    # The records hold all six. Nobody forwarded four of them: no log-probability is theirs, and what multiplied it is 0.
    assert [line["line"] for line in lines] == [line["line"] for line in all_lines] == list(range(6))
    left_out = [line for line in lines if "new" not in line]
    assert len(left_out) == 4 and all("new" in line for line in all_lines)
    for line in left_out:
        episode = json.loads((tmp_path / "part" / "trajectories.jsonl").read_text().splitlines()[line["line"]])
        for name in ("advantages", "weight"):
            values = [unpacked(text).tolist() for text in line[name]]
            assert values == [[0.0] * sum(episode["loss_mask"])]
    for line, other in zip(lines, all_lines):
        first, same = unpacked(line["weight"][0]), unpacked(other["weight"][0])
        assert abs(first - same).max() <= 1e-4 * abs(same).max()


@pytest.mark.parametrize("options, forwarded", [({"kl_coef": 0.1}, 6), ({"entropy_coef": 0.1}, 6), ({}, 0)], ids=["KL", "entropy", "neither"])
def test_where_all_are_silent_only_what_has_another_term_is_trained(base, tmp_path, pay, options, forwarded):
    rows = pay(grpo, *[1.0] * 6)
    metrics, lines = one_step(grpo, base, tmp_path, updates_per_step=1, **options)
    assert sum(rows) == forwarded and (metrics["grad_norm"] > 0) == (options == {"entropy_coef": 0.1})
    assert ("ratio" in metrics) == ("first_ratio" in metrics) == bool(options) and len(lines) == 6
    assert all(math.isfinite(value) for value in metrics.values() if isinstance(value, float))


def test_reward_weighted_forwards_and_records_no_weight_of_zero(base, tmp_path, pay):
    rows = pay(reward_weighted, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0)
    _, lines = one_step(reward_weighted, base, tmp_path, weighting="filter", min_reward=0.5, weight_per="episode", num_epochs=1, gradient_accumulation_steps=1)
    assert rows == [2]
    assert [any(unpacked(line["weight"][0])) for line in lines] == [False, True, True, False, False, False]


def test_the_page_shows_an_episode_that_was_left_out(base, tmp_path, pay):
    from extras.show.page import episodes_of
    pay(grpo, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0)
    one_step(grpo, base, tmp_path)
    groups = episodes_of(tmp_path, "grpo", {"loss": "grpo", "clip_eps_low": 0.2, "clip_eps_high": 0.2}, 10**9)["groups"]
    assert [group["silent"] is not None for group in groups] == [False, True, True]
    assert [episode["updates"][0]["clipped"] is None for group in groups for episode in group["episodes"]] == [False] * 2 + [True] * 4
