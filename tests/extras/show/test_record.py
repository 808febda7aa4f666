"""record.py: what tokens.jsonl holds of a token is what multiplied its grad log pi, for every loss and every algorithm."""
import json
from types import SimpleNamespace

import pytest
import torch
from saving import save_tiny

import dpo
import grpo
import reward_weighted
import sft
from agent import Trajectory
from envs.tasks import load_tasks
from extras.show.record import Recording, packed, unpacked
from schooling import demonstrate
from agent import Limits
from layers import load_model

# Two episodes of a task, of 2 and 4 sampled tokens, rewards 1 and 0: mean 0.5, std (n - 1) sqrt(0.5) = 0.70711, advantages +-0.5 / 0.70721 = +-0.70701.
# At ratio 1 the slope of each surrogate in log pi is -A: min(r A, clip(r) A)' = A r, cispo's and vespo's weights are 1 (phi(1) = 1^k e^0), and sapo's
# 4 / tau s(tau (r - 1)) has the slope 4 / tau s'(0) tau = 4 / 4 = 1. The normalizers divide by 2 episodes (and each one's tokens), 6 tokens, 2 x 10 tokens, 2.
A = 0.5 / (0.5 ** 0.5 + 1e-4)
BY_HAND = {"grpo": (A / 4, A / 8), "dapo": (A / 6, A / 6), "dr_grpo": (A / 20, A / 20), "cispo": (A / 6, A / 6), "sapo": (A / 4, A / 8),
           "gspo": (A / 4, A / 8), "luspo": (A / 2, A / 2), "vespo": (A / 6, A / 6), "dppo": (A / 6, A / 6), "deepseek": (A / 4, A / 8)}


def episodes():
    masks = [0, 1, 0, 1], [0, 1, 1, 0, 1, 1]
    return [Trajectory([1] * len(mask), mask, [-0.25 * m for m in mask], [0.0, reward], reward, group_id="0-0", info={"success": True})
            for mask, reward in zip(masks, (1.0, 0.0))]


def recording(tmp_path, **flags):
    """A run of no model: what `record` gets, `write_line` writes."""
    tmp_path.mkdir(exist_ok=True)
    run = Recording(SimpleNamespace(output_dir=str(tmp_path), record=1, show_every=0, resume=False, overwrite=False, save_every=9, **flags), "grpo")
    run.total = 9
    run.show_step = lambda *_: None
    return run


def lines(folder):
    return [json.loads(line) for line in (folder / "tokens.jsonl").read_text().splitlines()]


def numbers(line, name):
    return [unpacked(text).tolist() for text in line[name]]


def test_there_is_a_number_by_hand_for_every_loss():
    assert BY_HAND.keys() == grpo.LOSSES.keys()


@pytest.mark.parametrize("loss", BY_HAND)
def test_the_weight_of_a_token_is_the_slope_of_the_loss_worked_by_hand(loss, tmp_path):
    config = grpo.settle(grpo.Config(loss=loss, kl_coef=0.0, max_tokens=10))
    batch, run = episodes(), recording(tmp_path)
    token_ids, mask, sampled = grpo.collate(batch)
    advantages = grpo.token_advantages(batch, mask, scale="group")
    run.write_episodes(batch)
    run.record(batch, advantages=advantages, old=sampled + 1 / 1024, ref=None)
    logprobs = sampled.clone().requires_grad_() * 1  # no leaf
    logprobs.retain_grad()
    grpo.total_loss(config, grpo.Counts(2, 6, 10), logprobs, sampled, sampled, None, advantages, mask)[0].backward()
    run.record(batch, new=logprobs)
    run.end_step(0)
    first, second = lines(tmp_path)
    assert (first["step"], first["line"], second["line"]) == (0, 0, 1) and "ref" not in first
    assert numbers(first, "weight") == [pytest.approx([-BY_HAND[loss][0]] * 2, rel=1e-5)]
    assert numbers(second, "weight") == [pytest.approx([BY_HAND[loss][1]] * 4, rel=1e-5)]
    assert numbers(first, "advantages") == [pytest.approx([A, A])] and numbers(first, "new") == [[-0.25, -0.25]]
    assert numbers(first, "old") == [[-0.25 + 1 / 1024] * 2]


def test_the_first_and_the_last_update_stay_and_of_a_step_without_lines_a_pair(tmp_path):
    run, batch = recording(tmp_path), episodes() + episodes()
    for update in range(3):
        run.record(batch, new=torch.full((4, 6), float(update)), ref_sum={t: -float(i) for i, t in enumerate(batch)})
    run.end_step(0)
    chosen, rejected = lines(tmp_path)
    assert chosen["episode"] == json.loads(json.dumps(batch[0].to_json())) and rejected["episode"]["loss_mask"] == [0, 1, 0, 1]
    assert numbers(chosen, "new") == [[0.0, 0.0], [2.0, 2.0]] and numbers(rejected, "ref_sum") == [[-2.0], [-2.0]]
    run.end_step(1)
    assert len(lines(tmp_path)) == 2  # nothing is recorded twice


def test_every_line_is_of_the_rank_that_has_the_gradient(tmp_path):
    """All ranks know the advantages of all episodes, and each the gradients of its share."""
    batch = episodes()
    ours, theirs = recording(tmp_path), recording(tmp_path / "other")
    for run, row in ((theirs, 0), (ours, 1)):
        run.written = batch
        run.record(batch, advantages=torch.full((2, 6), 0.5))
        run.record(batch[row:row + 1], new=torch.full((1, 6), float(row)))
    ours.ranks.gather = lambda item: [item, theirs.lines_of_step(0)]
    ours.end_step(0)
    assert [(line["line"], numbers(line, "new")[0][0]) for line in lines(tmp_path)] == [(0, 0.0), (1, 1.0)]


def test_numbers_keep_their_bits():
    values = torch.tensor([0.0, -0.0, 1e-30, -3.4e38, float("nan"), 1 / 3])
    assert unpacked(packed(values)).tobytes() == values.numpy().tobytes() and len(unpacked(packed([]))) == 0


# ------------------------------------------------------------------------------------------------ the four programs
@pytest.fixture(scope="module")
def base(probed_once, tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def recorded(base, tmp_path_factory):
    """Eight episodes of two tasks, paid 0 and 1 in turn."""
    tasks = [{**task, "noise": 0.7, "noise_seed": seed} for task in load_tasks("equations", "train", 2, 0) for seed in range(4)]
    played = demonstrate(load_model(base, train=False)[1], "equations", tasks, Limits(max_turns=2))
    for i, t in enumerate(played):
        t.group_id, t.reward = str(i // 4), float(i % 2)
        t.rewards = [0.0] * (len(t.rewards) - 1) + [t.reward]
        del t.info["task"]["noise_seed"]
    path = tmp_path_factory.mktemp("recorded") / "t.jsonl"
    path.write_text("".join(json.dumps(t.to_json()) + "\n" for t in played))
    return str(path)


def one_step(module, base, folder, **options):
    common = dict(model_path=base, output_dir=str(folder), max_steps=1, eval_tasks=0, lora_r=2, batch_size=8, env="equations", gradient_accumulation_steps=1)
    module.train(module.Config(**{**common, **options}))
    metrics = json.loads((folder / "metrics.jsonl").read_text())
    return metrics, lines(folder) if (folder / "tokens.jsonl").exists() else None


def test_grpo_records_what_it_plays(base, tmp_path, monkeypatch):
    def paid(*args, **options):
        played = rollout(*args, **options)
        for i, t in enumerate(played):
            t.reward, t.rewards = float(i == 0), [0.0] * (len(t.rewards) - 1) + [float(i == 0)]
        return played
    rollout = grpo.rollout
    monkeypatch.setattr(grpo, "rollout", paid)
    options = dict(gradient_accumulation_steps=None, tasks_per_step=1, group_size=3, max_turns=2, max_new_tokens=6, kl_coef=0.0, updates_per_step=3, learning_rate=1e-5)
    metrics, found = one_step(grpo, base, tmp_path / "r", **options)
    trajectories = [json.loads(line) for line in open(tmp_path / "r" / "trajectories.jsonl")]
    a = 2 / 3 / ((1 / 3) ** 0.5 + 1e-4)  # mean 1/3, std^2 (4/9 + 1/9 + 1/9) / 2
    for line, t in zip(found, trajectories, strict=True):
        n, advantage = sum(t["loss_mask"]), a if line["line"] == 0 else -a / 2
        first, last = numbers(line, "weight")
        assert first == pytest.approx([-advantage / (3 * n)] * n, rel=2e-3)
        old, (new, moved) = [p for p, m in zip(t["logprobs"], t["loss_mask"]) if m], numbers(line, "new")
        assert "old" not in line and new == pytest.approx(old, abs=1e-3)  # they are those of the sampler
        # grpo's slope: -A ratio / tokens / episodes, with the ratio of the last of three updates.
        assert last == pytest.approx([-advantage * torch.tensor(x - y).exp().item() / (3 * n) for x, y in zip(moved, old)], rel=1e-4)
        assert moved != new and len(numbers(line, "entropy")[1]) == n
    assert metrics["reward_histogram"] == [2, 0, 0, 0, 0, 0, 0, 0, 0, 1] and (metrics["reward_min"], metrics["reward_max"]) == (0.0, 1.0)
    model = load_model(base, lora_r=2)[0]
    assert metrics["trained_parameters"] == sum(p.numel() for p in model.parameters() if p.requires_grad) < metrics["parameters"]
    assert one_step(grpo, base, tmp_path / "none", **options, record=0)[1] is None
    assert (tmp_path / "none" / "trajectories.jsonl").read_bytes() == (tmp_path / "r" / "trajectories.jsonl").read_bytes()


def test_sft_dpo_and_reward_weighted_record_their_slopes(base, recorded, tmp_path):
    metrics, found = one_step(sft, base, tmp_path / "sft", trajectories=recorded)
    assert len(found) == 2
    for line in found:  # -sum log pi / tokens
        assert numbers(line, "weight") == [pytest.approx([-1 / metrics["tokens"]] * sum(line["episode"]["loss_mask"]))]
    metrics, found = one_step(dpo, base, tmp_path / "dpo", trajectories=recorded, sft_coef=0.0, beta=0.1, eval_share=0.0)
    assert [line["episode"]["reward"] for line in found] == [1.0, 0.0]
    for line, sign in zip(found, (-1, 1)):  # -beta sigmoid(0) (grad log pi(chosen) - grad log pi(rejected)) / 2 pairs, before the first update
        n = sum(line["episode"]["loss_mask"])
        assert numbers(line, "weight") == [pytest.approx([sign * 0.1 * 0.5 / 2] * n, rel=1e-3)]
        assert sum(numbers(line, "new")[0]) == pytest.approx(numbers(line, "ref_sum")[0][0], abs=1e-3)
    metrics, found = one_step(reward_weighted, base, tmp_path / "rw", trajectories=recorded, weighting="linear", weight_per="episode", baseline="none")
    tokens = [json.loads(line) for line in open(recorded)]
    total = sum(sum(t["loss_mask"]) for t in tokens if t["reward"])  # weights are the rewards, 0 and 1
    for line in found:
        n = sum(line["episode"]["loss_mask"])
        assert numbers(line, "weight") == [pytest.approx([-1 / total] * n)] and numbers(line, "advantages") == [[1.0] * n]
