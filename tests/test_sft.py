"""sft.py: the loss is the mean over what the demonstrator wrote, batches lose nothing, and it learns to imitate."""
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import envs
import grpo
import schooling
import sft
from agent import Trajectory
from schooling import demonstrate
from envs.tasks import load_tasks
from core.data import collate
from core.config import UserError
from layers import Run
from core.data import batches_of_like_length
from core.model import newest
from layers import load_model
from core.logprobs import token_logprobs


@pytest.fixture(scope="module")
def tiny():
    return load_model("tiny")


@pytest.fixture(scope="module")
def demos(tiny):
    return demonstrate(tiny[1], "equations", load_tasks("equations", "train", 24, seed=0))


def test_loss_by_hand():
    logprobs, mask = torch.tensor([[0.0, -1.0, -2.0], [0.0, -3.0, 0.0]]), torch.tensor([[0, 1, 1], [0, 1, 0]])
    assert sft.sft_loss(logprobs, mask, 3) == pytest.approx((1 + 2 + 3) / 3)


def test_loss_is_cross_entropy_of_the_next_token_shifted_once(tiny, demos):
    model, _ = tiny
    ids, mask, _ = collate(demos[:4])
    ours = sft.sft_loss(token_logprobs(model, ids, mask)[0], mask, mask.sum())
    labels = ids.masked_fill(mask == 0, -100)
    logits = model(ids).logits.float()
    theirs = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
    assert torch.allclose(ours, theirs, rtol=1e-5)
    twice = F.cross_entropy(logits[:, :-2].flatten(0, 1), labels[:, 2:].flatten(), ignore_index=-100)
    assert not torch.allclose(ours, twice, rtol=1e-3)


def test_what_is_trained_is_the_call_and_its_end_of_turn(tiny, demos):
    tokenizer = tiny[1]
    for t in demos:
        trained = tokenizer.decode([i for i, m in zip(t.token_ids, t.loss_mask) if m])
        assert trained.count("<|im_end|>") == len(t.rewards) and "tool_response" not in trained and "Solve" not in trained
        assert trained.startswith("<tool_call>") and trained.endswith("</tool_call><|im_end|>")


def test_an_epoch_holds_every_episode_once_and_neighbours_in_length(demos):
    batches = batches_of_like_length(demos, 4, 0, 0)
    assert sorted(id(t) for b in batches for t in b) == sorted(map(id, demos))
    assert batches != batches_of_like_length(demos, 4, 0, 1)
    width = sum(max(len(t.token_ids) for t in b) * len(b) for b in batches)
    assert width < 1.15 * sum(len(t.token_ids) for t in demos)


@pytest.mark.parametrize("n, per_step", [(63, 32), (40, 32), (100, 32), (1060, 32), (24, 1)])
def test_every_row_is_trained_in_every_epoch_the_longest_too(n, per_step):
    """Once the remainder was dropped after sorting by length: 31 of 63 rows, always the longest, were never trained."""
    rows = [Trajectory(token_ids=[0] * (i + 2)) for i in range(n)]
    for epoch in range(3):
        batches = batches_of_like_length(rows, per_step, 0, epoch)
        assert sorted(len(t.token_ids) for batch in batches for t in batch) == list(range(2, n + 2))
        assert max(map(len, batches)) <= per_step and max(map(len, batches)) - min(map(len, batches)) <= 1


def test_fewer_episodes_than_a_batch_are_one_batch(demos):
    batch, = batches_of_like_length(demos[:3], 8, 0, 0)
    assert sorted(map(id, batch)) == sorted(map(id, demos[:3]))


def test_accumulation_changes_no_gradient(tmp_path):
    from safetensors.torch import load_file
    states = []
    for name, size, accumulation in (("a", 8, 1), ("b", 2, 4)):
        sft.train(sft.Config(output_dir=str(tmp_path / name), max_samples=16, max_steps=1, batch_size=size, max_grad_norm=1e9,
                             gradient_accumulation_steps=accumulation, eval_tasks=0))
        states.append(load_file(tmp_path / name / "checkpoints" / "step_000001" / "optimizer.safetensors"))
    a, b = ({k: v for k, v in s.items() if k.endswith("|exp_avg")} for s in states)
    scale = max(v.abs().max() for v in a.values())
    assert all((a[k] - b[k]).abs().max() < 1e-5 * scale for k in a)


def test_recorded_episodes_are_imitated_and_min_reward_selects(tmp_path, demos, capsys):
    path = tmp_path / "t.jsonl"
    with open(path, "w") as f:
        for t in demos:
            f.write(json.dumps({"step": 0, **t.to_json()}) + "\n")
    config = sft.Config(trajectories=str(path), output_dir=str(tmp_path / "o"), max_steps=2, eval_tasks=0, batch_size=4)
    assert sft.train(config)["steps"] == 2
    best = max(t.reward for t in demos)
    config.output_dir, config.min_reward = str(tmp_path / "p"), best + 1
    with pytest.raises(UserError, match="no episodes"):
        sft.train(config)


@pytest.mark.slow
def test_it_learns_and_the_loss_falls(tmp_path):
    result = sft.train(sft.Config(output_dir=str(tmp_path), max_samples=200, max_steps=40, batch_size=8, eval_tasks=4))
    with open(tmp_path / "metrics.jsonl") as f:
        losses = [json.loads(line)["loss"] for line in f]
    assert losses[-1] < 0.2 * losses[0] and result["held_out_loss"] < 1.5 and result["success_after"] is not None
    model, tokenizer = load_model(str(tmp_path))
    assert sum(p.numel() for p in model.parameters()) < 1.2e6 and tokenizer.chat_template


def test_the_held_out_loss_is_per_token_that_the_demonstrator_wrote(tmp_path, demos, monkeypatch):
    monkeypatch.setattr(sft, "demonstrations", lambda *_: (demos[:4], demos[4:12]))
    result = sft.train(sft.Config(output_dir=str(tmp_path), max_steps=1, batch_size=3, eval_tasks=0))
    ids, mask, _ = collate(demos[4:12])
    with torch.no_grad():
        logprobs, _ = token_logprobs(load_model(str(tmp_path))[0], ids, mask)
    assert result["held_out_loss"] == pytest.approx(-logprobs.sum().item() / mask.sum().item(), rel=1e-4)


class Taught(Exception):
    pass


@pytest.mark.parametrize("plays", [True, False])
def test_the_schooling_has_the_flags_of_its_run_and_only_tasks_that_are_played(tmp_path, monkeypatch, plays):
    def stop(*args, **options):
        raise Taught(*args, options)
    monkeypatch.setattr(schooling, "play_expert", stop)
    flags = dict(env="gsm8k", env_options="tools=calculator+python", unsafe_code=True, rewards="length=0.5", fields="question=problem", seed=3)
    config = grpo.Config(output_dir=str(tmp_path), dataset="tasks.jsonl", max_tokens=99, max_turns=1, **flags)
    with pytest.raises(Taught) as caught:
        schooling.teach_tiny(config, Run(config, "grpo"), plays)
    asked, _, split, count, noise, limits, options = caught.value.args
    assert {name: getattr(asked, name) for name in flags} == flags and options == {"files": ("tasks.jsonl" if plays else None, None)}
    assert (split, count, noise) == ("train", 1400, 0.6)
    assert limits == envs.Limits(**envs.recommended("gsm8k") | {"max_turns": 6})  # those of the environment, whatever the run's are


def test_without_a_demonstration_the_schooling_says_why(tmp_path):
    (tmp_path / "long.py").write_text("""
class Long:
    def reset(self, question, **_): return "word " * 3000
    def get_reward(self): return 0.0
    def _expert(self): return "yes"
    @staticmethod
    def _tasks(split, n, seed): return [{"question": str(i)} for i in range(5)]
""")
    config = grpo.Config(output_dir=str(tmp_path / "run"), env=f"{tmp_path}/long.py:Long", eval_tasks=0)
    with pytest.raises(UserError, match="no demonstration to learn from: each had a fault, no right turn, or more than the 2048 tokens"):
        schooling.teach_tiny(config, Run(config, "grpo"))


def test_the_tiny_model_is_taught_what_sft_teaches(tmp_path, monkeypatch):
    """In a loop of its own, and to the same weights, bit for bit."""
    short = dict(max_samples=40, max_steps=4, batch_size=16)
    monkeypatch.setattr(schooling, "TINY_SFT", {**schooling.TINY_SFT, **short})
    sft.train(sft.Config(output_dir=str(tmp_path / "sft"), env="equations", expert_noise=0.6, max_turns=6, eval_tasks=0, seed=1, **short))
    config = grpo.Config(output_dir=str(tmp_path / "grpo"), seed=1)
    base = schooling.teach_tiny(config, Run(config, "grpo"))
    taught, trained = (load_file(Path(folder) / "model.safetensors") for folder in (base, newest(str(tmp_path / "sft"))))
    assert taught.keys() == trained.keys() and all(torch.equal(tensor, taught[name]) for name, tensor in trained.items())
    monkeypatch.setattr(schooling, "imitate", None)
    config.resume = True
    assert schooling.teach_tiny(config, Run(config, "grpo")) == base  # not taught again


@pytest.mark.slow
def test_success_is_measured_on_the_way_and_before_if_the_model_comes_taught(tmp_path):
    short = {"max_samples": 64, "batch_size": 8, "eval_tasks": 6, "seed": 1}
    made = sft.train(sft.Config(output_dir=str(tmp_path / "a"), max_steps=4, eval_every=2, **short))
    again = sft.train(sft.Config(model_path=str(tmp_path / "a"), output_dir=str(tmp_path / "b"), max_steps=1, **short))
    with open(tmp_path / "a" / "metrics.jsonl") as f:
        lines = [json.loads(line) for line in f]
    # What is measured after two steps stands in the line of the third, as in grpo.py; the last is the result's.
    assert ["eval/success" in line for line in lines] == [False, False, True, False] and made["success_before"] is None
    assert again["success_before"] == made["success_after"]  # the same tasks, the same random numbers
    # Without --save_every, too: the best step that was evaluated is there to be taken.
    assert sorted(path.name for path in (tmp_path / "a" / "checkpoints").iterdir()) == ["step_000002", "step_000004"]
