"""llm/budget.py: its count against torch's own log of allocations, and the README's table."""
import importlib.util
from pathlib import Path

import pytest
import torch
from memory_helpers import FOUR_BIT
from test_streaming import stream_of
from torch import nn
from torch.profiler import ProfilerActivity, profile

import lora
from llm.budget import Workload, measure, standing_for
from llm.loading import load_model
from llm.logprobs import token_logprobs
from llm.memory import PLAIN, Techniques
from llm.quantization import Int8Embedding
from llm.training_state import adamw


def real_step(model, rows, tokens):
    """Run a step as it is in a run that has begun: gradients of an earlier micro-batch, moments of an earlier step."""
    optimizer = adamw(model, lr=1e-5)
    for p in (p for p in model.parameters() if p.requires_grad):
        p.grad = torch.zeros_like(p)
    optimizer.step()
    ids = torch.arange(rows * tokens).view(rows, tokens) % 900
    mask = torch.ones_like(ids)
    mask[:, 0] = 0
    logprobs, _ = token_logprobs(model.train(), ids, mask)
    (-logprobs.mean()).backward()
    torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
    optimizer.step()


def beside_the_device(model, memory):
    """Return what no parameter holds: streamed layers, and the int8 table."""
    tensors = [*stream_of(model).hosts] if memory.stream_layers else []
    embedding = model.get_input_embeddings()
    if isinstance(embedding, Int8Embedding):
        tensors += embedding.table.data, embedding.table.scale
    return tensors


@pytest.mark.parametrize("rows, tokens, lora_r, memory", [
    (2, 400, 8, PLAIN), (3, 600, 8, PLAIN), (2, 200, 0, PLAIN), (1, 1024, 8, FOUR_BIT), (2, 512, 8, Techniques(load_in_4bit=True)),
    (1, 1024, 8, FOUR_BIT._replace(int8_head=True, mlp_tokens=256)), (2, 1024, 8, FOUR_BIT._replace(int8_head=True, stream_layers=True))],
    ids=["plain", "long", "all weights", "4bit", "4 bits alone", "int8 and tiles", "stream"])
def test_the_count_is_what_torch_allocates(wide, rows, tokens, lora_r, memory):
    """Two witnesses of a real step on the CPU: the same ruler on its tensors, and the allocator's own log."""
    options, work = {"path": wide, "lora_r": lora_r, "memory": memory}, Workload(rows, tokens)
    counted = measure(options, work, kind="cpu")
    ruled = measure(options, work, kind="cpu", device="cpu")
    assert abs(counted["update"] / ruled["update"] - 1) < 0.01
    model = load_model(**options, device="cpu")[0]
    tensors = [*model.parameters(), *model.buffers(), *beside_the_device(model, memory)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as log:
        real_step(model, rows, tokens)
    events = [e for e in log.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = sum(storages.values())
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    assert peak > 2 * sum(storages.values())
    assert abs(counted["update"] / peak - 1) < 0.01, (counted["update"], peak)


@pytest.mark.parametrize("memory", [PLAIN, FOUR_BIT._replace(int8_head=True)], ids=["plain", "4 bits and int8"])
def test_a_rollout_is_counted_as_it_runs(wide, memory):
    options, work = {"path": wide, "lora_r": 8, "memory": memory}, Workload(1, 300, decode_rows=12, group_size=4, max_new_tokens=60)
    counted, real = (measure(options, work, kind="cpu", device=device) for device in ("meta", "cpu"))
    assert abs(counted["rollout"] / real["rollout"] - 1) < 0.01 and real["rollout"] > 2 * 4 * 12 * 300 * 64 * 4  # cache


def bench_memory():
    spec = importlib.util.spec_from_file_location("bench_memory", Path(lora.__file__).parent / "bench" / "memory.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name, memory, mib", [
    ("Qwen2.5-0.5B", "small", 368.4), ("Qwen2.5-3B", "small", 1767.5), ("Qwen2.5-7B", "stream", 464.8)])
def test_the_readmes_table(name, memory, mib):
    update_bytes = bench_memory().update_bytes
    first = update_bytes(name, 1024, memory)
    assert round(first["update"] / 2**20, 1) == mib
    assert update_bytes(name, 1024, "plain")["update"] > 4 * first["update"]


def test_counting_leaves_torch_as_it_was():
    before = torch.Tensor.is_cpu, nn.functional.scaled_dot_product_attention
    with standing_for("cpu"), standing_for("cpu"):
        assert torch.zeros(1, device="meta").is_cpu
    assert before == (torch.Tensor.is_cpu, nn.functional.scaled_dot_product_attention)
