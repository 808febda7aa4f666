"""No run is evaluated on what it learns from: every documented way from data to a run, from end to end but for the steps.

A task and an episode are the same if their first questions are, whatever the functions under test compare.
"""
import json

import pytest

import dpo
import envs
import grpo
import reward_weighted
import sft
import talk
import agent_program
from core.config import UserError
from envs.tasks import load_tasks
from episodes import read_trajectories
from layers import Run
from core.tiny import make_tiny


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """An untaught model; traces that agent.py wrote of either split; tasks, chats and pairs of a user."""
    folder = tmp_path_factory.mktemp("place")
    for part in make_tiny():
        part.save_pretrained(folder / "base")
    for name, options in (("traces", {"num_tasks": 48, "seed": 1}), ("test_traces", {"num_tasks": 24, "split": "test"})):
        agent_program.run(agent_program.Config(model_path=str(folder / "base"), env="equations", group_size=2, max_new_tokens=4,
                              output=str(folder / f"{name}.jsonl"), **options))
        write(folder / f"{name}.jsonl", [t.to_json() for t in paid(read_trajectories(str(folder / f"{name}.jsonl")))])
    rows = [{"question": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in range(60)]
    write(folder / "tasks.jsonl", rows[:50])
    write(folder / "test_tasks.jsonl", rows[40:])  # ten are in both files
    write(folder / "chats.jsonl", [{"prompt": row["question"], "completion": row["answer"]} for row in rows])
    write(folder / "pairs.jsonl", [{"prompt": row["question"], "chosen": row["answer"], "rejected": "no"} for row in rows])
    return folder


def paid(episodes):
    """Such a model earns nothing: of the two episodes of a task one is paid."""
    for i, t in enumerate(episodes):
        t.reward = t.rewards[0] = float(i % 2)
    return episodes


def questions(items):
    """The first user messages of tasks or episodes."""
    asked = set()
    for item in items:
        if isinstance(item, dict):
            asked.add(envs.load(item["env"])().reset(**item))
        else:
            asked.add(next(message["content"] for message in item.messages if message["role"] == "user"))
    return asked


class Stopped(Exception):
    pass


def watch(monkeypatch, owner, name, keep):
    """Hand on what a function returns to `keep` as well."""
    whole = getattr(owner, name)

    def watched(*args, **options):
        out = whole(*args, **options)
        keep(out)
        return out
    monkeypatch.setattr(owner, name, watched)


@pytest.mark.parametrize("program, says", [
    (agent_program.run, "--split test: no row of {} is held out; give --eval_dataset FILE, or --split train"), (talk.command, "--split test: there is no task to play")])
def test_the_held_out_tasks_of_a_file_that_has_none_cannot_be_played(place, tmp_path, program, says):
    """A run goes on without them (64 equal rows here), but agent.py was asked for them alone."""
    path = tmp_path / "equal.jsonl"
    write(path, [{"question": "1 + 1?", "answer": "#### 2"}] * 64)
    assert (len(load_tasks("gsm8k", "train", None, 0, str(path))), load_tasks("gsm8k", "test", None, 0, str(path))) == (64, [])
    config = (agent_program.Config if program is agent_program.run else talk.Config)(
        model_path=str(place / "base"), env="gsm8k", dataset=str(path), split="test", num_tasks=2)
    with pytest.raises(UserError) as error:
        program(config)
    assert str(error.value) == says.format(path)


GSM8K = {"env": "gsm8k", "dataset": "tasks.jsonl"}
PLAYED = {"env": "gsm8k", "tasks": "tasks.jsonl"}
TEST = {"eval_dataset": "test_tasks.jsonl"}
PIPELINES = [
    pytest.param(sft, {}, marks=pytest.mark.slow), (sft, {"trajectories": "traces.jsonl"}), (sft, {"trajectories": "test_traces.jsonl"}), (sft, PLAYED), (sft, {**PLAYED, **TEST}),
    (sft, {**GSM8K, "tasks": "test_tasks.jsonl"}), (sft, {**GSM8K, "tasks": "test_tasks.jsonl", **TEST}), (sft, {"dataset": "chats.jsonl", "env": "equations"}),
    (reward_weighted, {}), (reward_weighted, {"trajectories": "traces.jsonl"}), (reward_weighted, {"trajectories": "test_traces.jsonl"}),
    (reward_weighted, GSM8K), (reward_weighted, {**GSM8K, **TEST}),
    (dpo, {}), (dpo, {"trajectories": "traces.jsonl"}), (dpo, {"trajectories": "test_traces.jsonl"}), (dpo, PLAYED), pytest.param(dpo, {**PLAYED, **TEST}, marks=pytest.mark.slow),
    (dpo, {"dataset": "pairs.jsonl"}), (dpo, {"dataset": "pairs.jsonl", "env": "equations"}),
    (grpo, {}), (grpo, GSM8K), (grpo, {**GSM8K, **TEST}),
]


@pytest.mark.parametrize("module, options", PIPELINES, ids=lambda x: getattr(x, "__name__", None) or " ".join(f"{k}={v}" for k, v in x.items()) or "-")
def test_held_out_is_no_training_data(place, tmp_path, monkeypatch, capsys, module, options):
    learned, held_out, played = [], [], []
    if module is sft:
        watch(monkeypatch, sft, "demonstrations", lambda out: (learned.extend(out[0]), held_out.extend(out[1])))
    elif module is dpo:
        watch(monkeypatch, dpo, "rollout", paid)
        watch(monkeypatch, dpo, "split_pairs", lambda out: [side.extend(pair) for side, pairs in zip((learned, held_out), out) for pair in pairs])
    elif "trajectories" in options:
        watch(monkeypatch, module, "recorded", learned.extend)
    else:
        watch(monkeypatch, module, "train_and_held_out", lambda out: learned.extend(out[0]))
    monkeypatch.setattr(module, "evaluate", lambda *args, **how: played.extend(args[3]) or {})

    def evaluated(*_):
        raise Stopped
    monkeypatch.setattr(Run, "log_evaluation", evaluated)
    options = {name: str(place / value) if value.endswith(".jsonl") else value for name, value in options.items()}
    sizes = {"eval_tasks": 40, "max_samples": 100, "num_tasks": 40, "group_size": 2, "max_new_tokens": 4, "min_gap": 0.5, "eval_share": 0.5, "baseline": "none"}
    sizes = {name: size for name, size in sizes.items() if name in module.Config.__dataclass_fields__}
    with pytest.raises(Stopped):
        module.train(module.Config(model_path=str(place / "base"), output_dir=str(tmp_path), **sizes, **options))
    assert learned and not questions(learned) & questions(held_out) and not questions(learned) & questions(played)
    assert bool(held_out) == (module in (sft, dpo)) and bool(played) == (options.get("dataset") != str(place / "pairs.jsonl") or "env" in options)
    overlap = "test_t" in str(options)  # test_traces.jsonl, test_tasks.jsonl
    assert ("also in the training data: dropped" in capsys.readouterr().out) == overlap
