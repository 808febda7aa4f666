"""What can be known of a GPU without one: torch's meta device stands for it, `budget.Bytes` answers as CUDA would.

Whole runs there: an operation that mixes the device's tensors with the host's fails. Decode steps: one that waits for the
device, or takes anything from the host, could not be held in a CUDA graph, and fails too.
"""
import json
from functools import partial
from unittest import mock

import pytest
import torch
from test_engine import FAMILIES, build
from torch.utils._pytree import tree_leaves

import dpo
import grpo
import lora
import reward_weighted
import sft
from bench.budget import Bytes, standing_for
from llm.engine import Row
from llm.loading import load_model
from llm.static_engine import StaticEngine
from llm.tiny import make_tiny

aten = torch.ops.aten
CROSSING = {aten.copy_.default, aten._to_copy.default, aten.index.Tensor, aten.index_put_.default, aten._index_put_impl_.default}
NEVER = {aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default}
SMALL = {"memory": "small"}


class OneDevice(Bytes):
    """RuntimeError where the device's tensors meet the host's: CUDA takes numbers and indices from the host, no more."""

    captured = False  # then nothing at all may come from the host or go there

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        host, device = ([t for t in tensors if t.is_meta == there] for there in (False, True))
        if device and any(t.dim() for t in host) and func not in CROSSING:
            raise RuntimeError(f"{func} takes {[tuple(t.shape) for t in host]} from the host")
        if self.captured:
            chosen = func in CROSSING and any(t.dtype == torch.bool for t in tree_leaves(args[1:2]) if isinstance(t, torch.Tensor))
            back = torch.device((kwargs or {}).get("device") or "meta").type == "cpu"
            if host or back or func in NEVER or chosen and "index" in str(func):
                raise RuntimeError(f"{func} cannot be captured")
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.parametrize("mix", [
    lambda a, b: a + b, lambda a, b: b.mul_(a), lambda a, b: a @ b.T, lambda a, b: a.gather(1, b.long()), lambda a, b: torch.cat([a, b]),
    lambda a, b: torch.where(b > 0, a, 0.0), lambda a, b: a.masked_fill_(b > 0, 0.0)])
def test_the_witness_sees_what_cuda_would_refuse(mix):
    a, b = torch.zeros(2, 3, device="meta"), torch.zeros(2, 3)
    with standing_for("cuda"), OneDevice(), pytest.raises(RuntimeError, match="from the host"):
        mix(a, b)


@pytest.mark.parametrize("look", [
    lambda a: a.sum().item(), lambda a: a.nonzero(), lambda a: a[a > 0], lambda a: a.cpu(), lambda a: a * torch.ones(3), lambda a: a + torch.tensor(2.0),
    lambda a: a.copy_(torch.zeros(2, 3))])
def test_the_witness_sees_what_no_graph_can_hold(look):
    a = torch.zeros(2, 3, device="meta")
    with standing_for("cuda"), OneDevice() as witness, pytest.raises(RuntimeError, match="captured|from the host"):
        witness.captured = True
        look(a)


@pytest.fixture
def on_the_device(monkeypatch):
    for module in (dpo, grpo, reward_weighted, sft):
        monkeypatch.setattr(module, "load_model", partial(load_model, device="meta"))
    monkeypatch.setattr("agent.make_engine", StaticEngine)
    # It refuses turns that do not match the mask, which has no numbers here: its own work is done on the host.
    monkeypatch.setattr(grpo, "token_advantages", lambda episodes, mask, *_, **__: torch.zeros(mask.shape, device=mask.device))


@pytest.mark.parametrize("module, options", [
    (grpo, {**SMALL, "kl_coef": 0.1}), (grpo, {"memory": "stream"}), (grpo, {"importance_correction": 2.0}),
    (grpo, {"kl_coef": 0.1, "kl_estimator": "k2", "credit": "episode", "dtype": "float16"}),
    (grpo, {"lora_r": 0, "kl_coef": 0.1, "entropy_coef": 0.1, "loss": "vespo"}), (grpo, {"lora_dropout": 0.1}),
    (sft, SMALL), (sft, {"lora_r": 0}), (dpo, SMALL), (dpo, {"lora_r": 0}), (reward_weighted, SMALL), (reward_weighted, {"lora_r": 0}),
], ids=lambda x: x.__name__ if hasattr(x, "__name__") else x.get("memory") or "-".join(x))
def test_a_run_keeps_its_tensors_on_one_device(module, options, tmp_path, on_the_device):
    for part in make_tiny():
        part.save_pretrained(tmp_path / "base")
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(json.dumps({"prompt": "2 + 2?", "chosen": f"{i}", "rejected": "five, or so"}) + "\n" for i in range(4)))
    sizes = {"tasks_per_step": 2, "group_size": 2, "batch_size": 2, "max_samples": 4, "eval_tasks": 2, "max_steps": 2, "max_new_tokens": 12,
             **({"dataset": str(pairs), "eval_tasks": 0} if module is dpo else {})}
    options = {"model_path": str(tmp_path / "base"), "output_dir": str(tmp_path / "run"), "lora_r": 4,
               **{name: size for name, size in sizes.items() if name in module.Config.__dataclass_fields__}, **options}
    with standing_for("cuda"), OneDevice():
        assert module.train(module.Config(**options))["steps"] == 2


def test_a_run_with_a_tensor_on_the_host_is_seen(tmp_path, on_the_device, monkeypatch):
    for part in make_tiny():
        part.save_pretrained(tmp_path / "base")
    collate = grpo.collate
    monkeypatch.setattr(grpo, "collate", lambda batch, device: collate(batch, "cpu"))
    with standing_for("cuda"), OneDevice(), pytest.raises(RuntimeError, match="host"):
        grpo.train(grpo.Config(model_path=str(tmp_path / "base"), output_dir=str(tmp_path / "run"), tasks_per_step=2, group_size=2, batch_size=2,
                               max_samples=4, eval_tasks=0, max_steps=1, max_new_tokens=12))


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "top_k": 5, "top_p": 0.9}, {"temperature": 0}], ids=str)
@pytest.mark.parametrize("name, options, merge", [
    *((name, {}, False) for name in FAMILIES), ("tiny", {"lora_r": 4}, True), ("tiny", {"lora_r": 4}, False),
    ("tiny", {"lora_r": 4, "memory": "small"}, True)], ids=str)
def test_a_graph_could_hold_the_decode_step(name, options, merge, sampling, tmp_path, monkeypatch):
    for part in make_tiny():
        part.save_pretrained(tmp_path)
    step, steps = StaticEngine.static_step, []

    def captured(self, rows, span):
        steps.append(rows)
        witness.captured = True
        with mock.patch.object(torch, "tensor", side_effect=RuntimeError("torch.tensor takes numbers from the host")):  # dispatches nothing
            step(self, rows, span)
        witness.captured = False
    monkeypatch.setattr(StaticEngine, "static_step", captured)
    with standing_for("cuda"), OneDevice() as witness:
        model = build(name).to("meta") if name in FAMILIES else load_model(str(tmp_path), device="meta", **options)[0]
        with lora.merged(model):
            for sdpa in (False, True):
                engine = StaticEngine(model, slots=4, stop_ids={2}, **sampling)
                engine.cache.sdpa = sdpa
                engine.add([Row([1, 2, 3], group=i // 2, limit=6, forced=[5] if i == 3 else None) for i in range(6)])
                while engine.busy:
                    for row in engine.step():
                        engine.release(row)
    assert len(steps) > 3
