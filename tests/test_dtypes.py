"""Every algorithm takes a step on a CPU in every dtype, with an adapter and with all weights."""
import json
import math
from itertools import product

import pytest
from test_resume import config, place, rewarded  # noqa: F401

import distill
import dpo
import grpo
import reward_weighted
import sft
from agent import rollout
from core.config import UserError

ALGORITHMS = {
    "sft": (sft, dict(max_samples=8, batch_size=2)),
    "grpo": (grpo, dict(tasks_per_step=2, kl_coef=0.1, updates_per_step=1)),
    "distill": (distill, dict(tasks_per_step=4, teacher="adapter")),
    "dpo": (dpo, dict(num_tasks=6, batch_size=4)),
    "reward_weighted": (reward_weighted, dict(tasks_per_step=2, batch_size=4, num_epochs=1)),
}


# Which precision a program has is decided in one place: of each one program shows it, and all the others if asked.
SLOW = [("sft", "bfloat16", 2), ("distill", "float16", 2), ("dpo", "bfloat16", 2), ("reward_weighted", "bfloat16", 2), ("dpo", "float16", 2), ("reward_weighted", "float16", 2)]


@pytest.mark.parametrize("name, dtype, lora_r", [
    pytest.param(*case, marks=[pytest.mark.slow] * (case in SLOW)) for case in product(ALGORITHMS, ["float32", "bfloat16", "float16"], [2, 0])])
def test_one_step(place, tmp_path, monkeypatch, name, dtype, lora_r):  # noqa: F811
    module, options = ALGORITHMS[name]
    if hasattr(module, "rollout"):
        monkeypatch.setattr(module, "rollout", lambda *args, **options: rewarded(rollout(*args, **options)))
    if "teacher" in options:
        options = options | {"teacher": str(place / "adapter")}
    settings = config(module, place, tmp_path / "out", dtype=dtype, lora_r=lora_r, learning_rate=1e-4, max_steps=1, **options)
    if dtype != "float32" and not lora_r:  # what trains is float32
        with pytest.raises(UserError, match="--dtype is for weights that stay as they are; give --lora_r, e.g. 16, or --dtype float32"):
            module.train(settings)
        return
    module.train(settings)
    step = json.loads((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()[0])
    assert math.isfinite(step["loss"]) and step["grad_norm"] > 0
    if name == "dpo":
        # In float32 attention without gradients is another kernel.
        assert abs(step["margin"]) < (1e-6 if dtype == "float32" else 1e-9)
    if name == "distill":
        assert step["teacher_kl"] > 0.01 and abs(step["first_ratio"] - 1) < (1e-3 if dtype == "float32" else 0.02)
    if name == "grpo":
        assert step["kl"] == 0  # the policy and its reference are the same bits
        assert abs(step["first_ratio"] - 1) < (1e-3 if dtype == "float32" else 0.02)
