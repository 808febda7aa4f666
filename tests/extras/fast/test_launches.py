"""How many kernels a GPU is asked for: operations that are no views, counted on a CPU. A launch costs more than a small kernel."""
import random

import bitsandbytes  # noqa: F401  it looks for a GPU when it is imported
import pytest
import torch
from fake_cuda import cuda
from test_engine import ids_of, make_engine, play
from torch.utils._python_dispatch import TorchDispatchMode

import lora
from bench.budget import kind_of
from layers import load_model
from core.logprobs import token_logprobs
from core.engine import Row
from core.logprobs import CHUNK, dithered, softmax
from extras.memory.pointwise import rms_norm
from extras.memory.rounding import Rounded
from extras.fast.fused import Fused
from extras.fast.static_engine import StaticEngine


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


def started(model, static, rows):
    engine = make_engine(model, slots=rows, stop_ids={2}, tokens=100 * static, static=static)
    engine.add([Row(ids_of(9), group=0, seed=i, limit=50) for i in range(rows)])
    engine.step()
    return engine


def test_a_decode_step_is_as_many_kernels_for_one_row_as_for_many(model):
    with torch.inference_mode(), lora.merged(model):
        counts = []
        for rows in (1, 2, 8):
            engine = started(model, True, rows)
            engine.cache.sdpa = True  # as on a GPU
            engine.fill()
            counts.append(launches(engine.static_step, rows, 128))
    assert {counted.waits for counted in counts} == {0}
    assert len({counted.count for counted in counts}) == 1 and counts[0].count <= 210  # 200 for 4 layers


def test_a_prompt_is_copied_to_all_rows_of_its_group_at_once(model):
    with torch.inference_mode(), lora.merged(model):
        few, many = (launches(started, model, False, rows).count for rows in (2, 16))
    assert few == many


def test_rows_are_exchanged_at_once(model):
    with torch.inference_mode(), lora.merged(model):
        cache = started(model, False, 16).cache
        one, many = (launches(cache.exchange, list(range(n)), list(range(8, 8 + n)), 4).count for n in (1, 8))
    assert one == many <= 2 * len(cache.tensors) + 4


def test_a_gpu_takes_few_pieces_of_what_has_a_real_width():
    """0.5B, 8 x 512 tokens, on the meta device, which counts as a GPU. In a CPU's pieces an update was 13,735 kernels in place of 5,827."""
    x = torch.empty(8, 512, 896, dtype=torch.bfloat16, device="meta")
    assert launches(rms_norm, x, x[0, 0], x[..., :1].float()).count <= 5
    adapter, A, B = Rounded(torch.nn.Linear(896, 896), 16, 2.0, 0.0, None), x[0, :16], x.flatten(0, 1)[:896, :16]
    noise = adapter.column_noise(x)
    assert launches(adapter.add, x, x.clone(), A, B, noise).count <= 9
    assert launches(dithered, x.float(), torch.bfloat16).count <= 6
    logits, numbers = torch.empty(CHUNK // 151936, 151936, device="meta"), torch.empty(CHUNK // 151936, device="meta")
    assert launches(softmax, logits, numbers[:, None].long(), 0.7, numbers, numbers.clone(), True).count <= 20


# ------------------------------------------------------------------------------- on a GPU that the CPU plays, 4 layers
# Kernels that run outside a graph's replay, as counted: one decode step, updates of 2 x 60 and 2 x 2,100 tokens, a rollout.
KERNELS = {"plain": [162, 1263, 1263, 4432], "4bit": [350, 1943, 1999, 9532], "small": [366, 1946, 2992, 9940]}
GRAPH = {"plain": 260, "4bit": 504, "small": 523}  # operations of a graph, views included
# What the host waits for in one update and in a rollout. Gradients of an adapter in host memory are copied there, one by one.
UPDATE_WAITS = {"tolist": 1, "aten.nonzero.default": 1, "aten._local_scalar_dense.default": 4, "aten.index.Tensor": 2}
GRADIENTS = {"blocking copy to the host": 56}
ROLLOUT_WAITS = {"torch.tensor on the device": 13, "indices from the host": 2, "tolist": 42, "blocking copy to the device": 40}


@pytest.fixture(params=["plain", *(pytest.param(name, marks=pytest.mark.slow) for name in ("4bit", "small"))])
def memory(request):
    return request.param


def on_a_gpu(tiny, memory):
    return load_model(tiny, lora_r=4, dtype="float16", memory=memory)[0]


def count(device, act):
    """Return the kernels of act(). `device.events` has its waits and copies."""
    device.events.clear()
    before = device.kernels
    act()
    return device.kernels - before


def new_waits(device, known):
    """Return the waits and blocking copies that are more than those in `known`."""
    return {event: n for event, n in device.events.items() if "asynchronous" not in event and n > 1.1 * known.get(event, 0)}


def test_a_decode_step_on_a_gpu(tiny, memory):
    with cuda() as device:
        model = on_a_gpu(tiny, memory).eval()
        with torch.inference_mode(), lora.merged(model):
            engine = started(model, True, 8)
            engine.fill()
            kernels = count(device, lambda: engine.static_step(8, 128))
    assert isinstance(engine.decoder, Fused) and not device.events
    assert kernels <= 1.1 * KERNELS[memory][0]


def test_an_update_on_a_gpu(tiny, memory):
    """An adapter in host memory goes over once in a pass over a layer, and its gradients once back, however many tiles an MLP has."""
    def update():
        with lora.merged_to_train(model):
            logprobs, _ = token_logprobs(model.train(), ids, torch.ones_like(ids), 1.0)
            logprobs.sum().backward()

    copies = []
    with cuda() as device:
        model = on_a_gpu(tiny, memory)
        for i, tokens in enumerate((60, 300 if memory == "plain" else 2100), 1):
            ids = torch.tensor([ids_of(tokens, 1), ids_of(tokens, 2)]).to(model.device)
            kernels = count(device, update)
            assert kernels <= 1.1 * KERNELS[memory][i]
            assert not new_waits(device, UPDATE_WAITS | GRADIENTS if memory == "small" else UPDATE_WAITS)
            copies.append({event: n for event, n in device.events.items() if "copy" in event})
    assert copies[0] == copies[1] and sum(copies[0].values()) <= (4 * 60 if memory == "small" else 4)


def test_a_rollout_with_tool_results(tiny, memory):
    """16 episodes of up to three turns. Results of at most 32 tokens need no pass of their own."""
    rng, episodes = random.Random(0), []
    for group in range(4):
        prompt = ids_of(rng.randint(30, 60), group)
        episodes += [(prompt, group, [ids_of(rng.randint(8, 20), n) for n in range(rng.randint(0, 2))]) for _ in range(4)]
    passes, pools = [], []
    with cuda() as device, pytest.MonkeyPatch.context() as patch:
        run, replay = StaticEngine.run, StaticEngine.replay
        patch.setattr(StaticEngine, "replay", lambda engine, *key: replay(engine, *key) or pools.append({g.pool() for g in engine.graphs.values() if g}))
        patch.setattr(StaticEngine, "run", lambda engine, rows: passes.append(len(rows)) or run(engine, rows))
        model = on_a_gpu(tiny, memory).eval()
        with lora.merged(model):
            kernels = count(device, lambda: play(model, episodes, slots=16, limit=40, tokens=300))
    assert not new_waits(device, ROLLOUT_WAITS)
    # A graph is one step, and those that are kept share their memory.
    assert max(len(graph.calls) for graph in device.graphs) <= 1.1 * GRAPH[memory] and max(map(len, pools)) == 1
    assert passes == [4] and len(device.graphs) <= 8 and kernels <= 1.1 * KERNELS[memory][3]
