"""How many kernels a GPU is asked for: operations that are no views, counted on a CPU. A launch costs more than a small kernel."""
import pytest
import torch
from test_engine import ids_of
from torch.utils._python_dispatch import TorchDispatchMode

import lora
from bench.budget import kind_of
from llm import load_model, token_logprobs
from llm.engine import Engine, Row
from llm.static_engine import StaticEngine


class Launches(TorchDispatchMode):
    """Counts them inside a `with` block, and how often a value is waited for."""

    def __init__(self):
        super().__init__()
        self.count = self.waits = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kind = kind_of(func)
        if kind == "composite":
            # Inference mode does not take it apart.
            with self:
                return func.decompose(*args, **(kwargs or {}))
        self.count += kind in ("new", "in place")
        self.waits += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.fixture
def model(tiny):
    return load_model(tiny, lora_r=4, dtype="float32")[0].eval()


def launches(act, *arguments):
    with Launches() as counted:
        act(*arguments)
    return counted


def started(model, kind, rows):
    engine = kind(model, slots=rows, stop_ids={2}, **({"tokens": 100} if kind is StaticEngine else {}))
    engine.add([Row(ids_of(9), group=0, seed=i, limit=50) for i in range(rows)])
    engine.step()
    return engine


def test_a_decode_step_is_as_many_kernels_for_one_row_as_for_many(model):
    with torch.inference_mode(), lora.merged(model):
        counts = []
        for rows in (1, 2, 8):
            engine = started(model, StaticEngine, rows)
            engine.cache.sdpa = True  # as on a GPU
            engine.fill()
            counts.append(launches(engine.static_step, rows, 128))
    assert {counted.waits for counted in counts} == {0}
    assert len({counted.count for counted in counts}) == 1 and counts[0].count <= 210  # 200 for 4 layers


def test_a_prompt_is_copied_to_all_rows_of_its_group_at_once(model):
    with torch.inference_mode(), lora.merged(model):
        few, many = (launches(started, model, Engine, rows).count for rows in (2, 16))
    assert few == many


def test_rows_are_exchanged_at_once(model):
    with torch.inference_mode(), lora.merged(model):
        cache = started(model, Engine, 16).cache
        one, many = (launches(cache.exchange, list(range(n)), list(range(8, 8 + n))).count for n in (1, 8))
    assert one == many <= 2 * len(cache.tensors) + 4


@pytest.mark.parametrize("memory, most", [("plain", 1200), ("small", 1750)])  # 1,138 and 1,677 for 4 layers
def test_an_update(tiny, memory, most):
    model, _ = load_model(tiny, lora_r=4, dtype="float32", memory=memory)
    ids = torch.tensor([ids_of(60, 1), ids_of(60, 2)])

    def update():
        with lora.merged(model, update=True):
            logprobs, _ = token_logprobs(model.train(), ids, torch.ones_like(ids), 1.0)
            logprobs.sum().backward()
    counted = launches(update)
    assert counted.count <= most and counted.waits <= 4
