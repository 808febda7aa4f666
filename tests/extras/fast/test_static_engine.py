"""static_engine.py against the plain engine, its steps replayed as a CUDA graph would."""
from itertools import product

import pytest
import torch
from test_engine import VOCAB, build, complete, ids_of, make_engine, play, recomputed, schedule
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from layers import load_model
from extras.fast import static_engine
from core.engine import Row, RowCache, StockForward
from core.model import facts
from extras.fast.attention import fast_row_attention
from extras.fast.loading import speed_up
from extras.models.probe import probe
from extras.fast.static_engine import StaticEngine
from core.tiny import make_tiny


class Recorded(TorchDispatchMode):
    """What a CUDA graph is, on a CPU: the calls of one run, done again on the very same tensors. No value may be read."""

    def __init__(self, run):
        super().__init__()
        self.calls = []
        with self:
            run()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "lift_fresh"):
            raise AssertionError(f"{func} waits for the device, or copies from the host")
        self.calls.append((func, args, kwargs or {}, out := func(*args, **(kwargs or {}))))
        return out

    def replay(self):
        for func, args, kwargs, out in self.calls:
            for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs))):
                if torch.is_tensor(old) and old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                    old.copy_(new)


@pytest.fixture
def graphs(monkeypatch):
    """Engines capture on a CPU as they would on a GPU. Yields the (rows, span) captured; as there, nothing runs at capture."""
    captured = []

    def capture(engine, rows, span):
        held = [engine.inputs, engine.drawn, *engine.cache.tensors.values(), *getattr(engine.cache, "states", {}).values()]
        kept = [t.clone() for t in held]
        graph = Recorded(lambda: engine.static_step(rows, span))
        for t, old in zip(held, kept, strict=True):
            t.copy_(old)
        captured.append((rows, span))
        return graph
    monkeypatch.setattr(StaticEngine, "capture", capture)
    return captured


def long_schedule():
    """Contexts over several buckets, rows that wait long, answers longer than what decodes."""
    return [(ids_of(n, n), object(), [ids_of(m, n + 1) for m in answers])
            for n, answers in ((100, (40, 30)), (3, ()), (17, (1, 1, 1)), (240, (5,)), (6, (90,)), (9, ()), (120, (2, 60)))]


def same(ours, plain, tolerance=1e-4):
    for a, b in zip(ours, plain, strict=True):
        assert a.ids == b.ids and a.mask == b.mask
        assert max(abs(x - y) for x, y in zip(a.logprobs, b.logprobs)) < tolerance


@pytest.mark.parametrize("name, slots", [
    ("tiny", 3), ("qwen2_sliding", 8), ("gemma3", 3), ("smollm", 1),
    *(pytest.param(name, slots, marks=pytest.mark.slow) for name, slots in product(("tiny", "qwen2_sliding", "gemma3", "smollm"), (1, 3, 8))
      if (name, slots) not in (("tiny", 3), ("qwen2_sliding", 8), ("gemma3", 3), ("smollm", 1)))])
def test_static_decoding_is_the_plain_engine(name, slots, graphs):
    """Tool pauses, refilled slots, groups, buckets of rows and context: the same tokens, the same log-probabilities."""
    model = build(name)
    for episodes in (schedule(slots), long_schedule()):
        options = {"slots": slots, "limit": 11, "stop_ids": set(range(0, VOCAB, 13)), "pause": lambda row: len(row.turn) * 5 % 7}
        plain, _ = play(model, episodes, **options)
        static, _ = play(model, episodes, static=True, **options)
        same(static, plain)
        assert recomputed(model, static).max() < 1e-4
    assert len(set(graphs)) >= (2 if slots == 1 else 3) and len({span for _, span in graphs}) > 1
    assert all(rows == slots or rows & (rows - 1) == 0 for rows, _ in graphs)


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.6}, {"top_k": 5}, {"top_p": 0.6}])
def test_static_sampling(sampling, graphs):
    model = build("qwen3")
    same(play(model, schedule(2), slots=3, limit=10, static=True, **sampling)[0], play(model, schedule(2), slots=3, limit=10, **sampling)[0])
    assert graphs


@pytest.mark.parametrize("limit", [1, 2, 4, 5, 9])
def test_static_limits_and_forced_tokens(limit, graphs):
    model, prompts = build("qwen2"), [ids_of(7), ids_of(3)]
    forced = [ids_of(n, n) for n in (0, limit, limit // 2, 1)]  # the rest is sampled
    ours, plain = (complete(model, prompts, group_size=2, max_new_tokens=limit, forced=forced, stop_ids={11}, static=on)
                   for on in (True, False))
    assert [ids for ids, _ in ours] == [ids for ids, _ in plain]
    for (ids, x), (_, y), wanted in zip(ours, plain, forced):
        assert ids[:len(wanted)] == wanted and max(abs(a - b) for a, b in zip(x, y)) < 1e-4
    assert all(ids.index(11) == len(ids) - 1 for ids, _ in ours if 11 in ids)


def test_a_frozen_row_is_not_touched(graphs):
    """It waits through many windows of others, at a length beyond their context bucket, and continues as if alone."""
    model = build("qwen2")
    for static in (True, False):
        waits, works = Row(ids_of(150), seed=1, limit=3), [Row(ids_of(4, i), seed=i, limit=60) for i in range(2, 5)]
        engine = make_engine(model, slots=4, static=static)
        engine.add([works[0], waits, *works[1:]])
        while waits.state != "ended":
            engine.step()
        first, at = list(waits.turn), (waits.length, waits.slot)
        kept = [t[waits.slot, :, :waits.length].clone() for t in engine.cache.tensors.values()]
        while any(row.state != "ended" for row in works):
            engine.step()
        if static:
            assert (waits.length, waits.slot) == at == (152, 1) and waits.turn == first  # nobody moved it
            assert all(torch.equal(t[1, :, :152], k) for t, k in zip(engine.cache.tensors.values(), kept))
            assert graphs == [(4, 128)]  # it was computed along, in a context shorter than its own
        engine.extend(waits, ids_of(5, 2), 6)
        while engine.busy:
            engine.step()
        if static:
            mine = first, waits.turn, waits.logprobs
    assert mine[:2] == (first, waits.turn) and max(abs(a - b) for a, b in zip(mine[2], waits.logprobs)) < 1e-4


@pytest.mark.parametrize("sdpa", [False, True])
def test_a_frozen_row_beyond_a_sliding_window_leaves_no_nan(sdpa):
    """All keys of its window lie beyond the span that the others read. The slot serves another row afterwards."""
    model = build("mistral")
    engine = make_engine(model, slots=4, static=True, decoder=StockForward(model, fast_row_attention))
    engine.cache.sdpa = sdpa
    waits, works = Row(ids_of(200), seed=1, limit=2), [Row(ids_of(4, i), seed=i, limit=40) for i in range(2, 5)]
    engine.add([works[0], waits, *works[1:]])
    while engine.busy:
        engine.step()
    assert all(t.isfinite().all() for t in engine.cache.tensors.values())
    engine.release(waits)
    late = Row(ids_of(5, 7), seed=9, limit=6)
    engine.add([late])
    while engine.busy:
        engine.step()
    expected = complete(model, [ids_of(5, 7)], max_new_tokens=6, forced=[late.turn])[0]
    assert expected[0] == late.turn and max(abs(a - b) for a, b in zip(expected[1], late.logprobs)) < 1e-4


@pytest.mark.parametrize("sdpa", [False, True])
def test_the_padding_of_short_rows_beside_long_ones_is_finite(sdpa, monkeypatch):
    """A short chunk's padding ends beyond the cache, where a sliding window holds no key."""
    model, seen = build("mistral"), []
    forward = type(model.model).forward
    monkeypatch.setattr(type(model.model), "forward", lambda self, **inputs: seen.append(forward(self, **inputs)) or seen[-1])
    engine = make_engine(model, slots=2, decoder=StockForward(model, fast_row_attention))
    engine.cache.sdpa = sdpa
    rows = [Row(ids_of(90), seed=1, limit=2), Row(ids_of(2), seed=2, limit=2)]
    engine.add(rows)
    while engine.busy:
        engine.step()
    engine.extend(rows[0], [5], 1)
    engine.extend(rows[1], ids_of(60, 3), 1)
    while engine.busy:
        engine.step()
    assert all(out.last_hidden_state.isfinite().all() for out in seen)


def test_static_decoding_notices_logits_that_are_not_finite():
    model = build("qwen2")
    engine = StaticEngine(model, slots=2)
    engine.add([Row(ids_of(4), limit=50)])
    engine.step()
    model.model.norm.weight.data[0] = float("nan")
    with pytest.raises(FloatingPointError):
        engine.step()


def test_attention_by_torchs_kernel_as_on_a_gpu():
    for name in ("tiny", "qwen2_sliding", "gemma3", "llama_mha"):
        model = build(name)
        for static in (True, False):
            def on_a_gpu(cache, *args, stock=RowCache.__init__):
                stock(cache, *args)
                cache.sdpa = True
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(RowCache, "__init__", on_a_gpu)
                played, engine = play(model, schedule(3), slots=3, static=static)
            assert engine.cache.sdpa and recomputed(model, played).max() < 1e-4


def test_rollout_with_tools_is_the_same_static(monkeypatch, graphs):
    """agent.rollout: tools in threads, rows that wait, the same episodes token by token."""
    from envs.tasks import load_tasks
    from agent import Limits, rollout
    model, tokenizer = make_tiny(0)
    tasks = load_tasks("equations", "train", 3, 0)
    calls = tokenizer.encode('<tool_call>\n{"name": "add_terms", "arguments": {"value": "3"}}\n</tool_call><|im_end|>', add_special_tokens=False)

    def episodes(static):
        def row(*args, **kwargs):
            return Row(*args, **kwargs, forced=calls * 2)
        monkeypatch.setattr("agent.Row", row)
        monkeypatch.setattr(facts(model), "decode_rows", 5)
        monkeypatch.setattr("agent.make_engine", lambda *args, **kwargs: make_engine(*args, **kwargs, static=static))
        return rollout(model.eval(), tokenizer, "equations", tasks, 3, limits=Limits(4, 24, 700), seed=3)
    ours, plain = episodes(True), episodes(False)
    assert graphs and sum(t.info["tool_calls"] for t in ours) >= 9
    for a, b in zip(ours, plain):
        assert a.token_ids == b.token_ids and a.loss_mask == b.loss_mask and a.messages == b.messages
        assert max(abs(x - y) for x, y in zip(a.logprobs, b.logprobs)) < 1e-4


def test_a_model_that_no_graph_can_hold_is_decoded_without(monkeypatch, capsys):
    model = build("qwen2")

    class Refuses:
        def __init__(self, *_, **__):
            pass

        def __enter__(self):
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

        def __exit__(self, *_):
            pass
    left = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**32, 2**33))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph", Refuses)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "stream")
    monkeypatch.setattr(torch.cuda, "set_stream", left.append)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda device, pool: left.append(pool), raising=False)
    engine = StaticEngine(model, slots=2)
    engine.device = torch.device("cpu")
    monkeypatch.setattr(StaticEngine, "capture", lambda self, rows, span, real=StaticEngine.capture: _as_cuda(self, real, rows, span))
    engine.add([Row(ids_of(4), seed=1, limit=30)])
    while engine.busy:
        engine.step()
    assert capsys.readouterr().err == "note: decoding without CUDA graphs: operation not permitted when stream is capturing\n"
    assert left == ["stream", "pool"]  # torch.cuda.graph, where its end raises, leaves both as they were in the capture
    assert not StaticEngine(model, slots=2).graphable  # nobody tries again with this model


def test_no_graph_is_captured_where_little_memory_is_left(monkeypatch):
    """What the driver keeps for a graph is no memory of torch's: a capture could end a run that fits."""
    engine = StaticEngine(build("qwen2"), slots=2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**27, 2**33))
    monkeypatch.setattr(StaticEngine, "capture", lambda self, rows, span, real=StaticEngine.capture: _as_cuda(self, real, rows, span))
    engine.add([Row(ids_of(4), seed=1, limit=30)])
    while engine.busy:
        engine.step()
    assert not engine.graphable and not any(engine.graphs.values()) and len(engine.owner[0].turn) == 30
    assert StaticEngine(engine.model, slots=2).graphable  # the next rollout may have the room


def test_graphs_of_more_rows_than_are_left_are_dropped(graphs):
    engine, kept = StaticEngine(build("qwen2"), slots=4), []
    engine.add([Row(ids_of(4), seed=i, limit=limit) for i, limit in enumerate((12, 24, 36, 48, 60, 60))])
    while engine.busy:
        for row in engine.step():
            engine.release(row)
        kept.append((sum(map(bool, engine.owner)) + len(engine.waiting), {rows for rows, *_ in engine.graphs}))
    assert {rows for rows, _ in graphs} >= {4, 2} and len(set(graphs)) == len(graphs)  # none was needed again
    assert all(rows == 4 for left, widths in kept if left > 4 for rows in widths)
    assert all(max(widths) <= 2 for (left, _), (_, widths) in zip(kept, kept[1:]) if left <= 2 and widths)


def test_graphs_are_not_tried_where_they_would_be_wrong():
    model = build("qwen2")
    assert StaticEngine(model, slots=2).graphable
    model.model.layers[0].register_forward_pre_hook(lambda *_: None)  # Python that a replay would not run
    assert not StaticEngine(model, slots=2).graphable
    config = build("llama_gqa").config
    config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}  # it looks at the positions
    assert not StaticEngine(type(build("llama_gqa"))(config).eval(), slots=2).graphable


def _as_cuda(engine, real, rows, span):
    engine.device = torch.device("cuda")
    try:
        return real(engine, rows, span)
    finally:
        engine.device = torch.device("cpu")


@pytest.mark.parametrize("family", ["qwen3_5", "lfm2", "mamba2", "falcon_h1", "kimi_linear", "gpt_oss", "minimax"])
def test_states_and_sinks_in_static_steps(family, graphs):
    """A row that ends inside a window, or waits in a slot below others that decode, keeps the state that it has."""
    import decoders
    from test_models import ids_of as ids_of_96
    model = decoders.make(family)
    speed_up(model)
    episodes = [(ids_of_96(n, n), n // 4, [ids_of_96(m, m) for m in answers])
                for n, answers in ((9, (4, 1)), (9, (1, 1, 1)), (3, ()), (17, (6,)), (1, (2, 1)), (6, (8,)))]
    options = {"slots": 4, "limit": 11, "stop_ids": set(range(0, 96, 9)), "pause": lambda row: len(row.turn) * 5 % 7}
    plain, _ = play(model, episodes, **options)
    static, _ = play(model, episodes, static=True, **options)
    same(static, plain)
    assert len(graphs) > 1


@pytest.mark.parametrize("free_rows, slots", [(200, 100), (199, 64), (128, 64), (127, 32), (3, 1), (0, 1)])
def test_the_cache_takes_slots_by_the_memory_there_is(tiny, monkeypatch, free_rows, slots):
    model, _ = load_model(tiny)
    config = model.config
    row = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4 * 500  # float32, 500 tokens
    monkeypatch.setattr(static_engine, "free_bytes", lambda device: free_rows * row)
    engine = make_engine(model, slots=100, tokens=500, static=True)
    assert len(engine.owner) == engine.cache.slots == slots


def test_the_states_of_the_rows_count_as_well(monkeypatch):
    """Twice, because a step copies them. Mamba 2 has no other cache: it took every slot that there could be."""
    import decoders
    model = decoders.make("mamba2")
    probe(model, "folder")
    engine = make_engine(model, slots=1)
    engine.add([Row([3, 4, 5])])
    engine.step()
    row = sum(state.nbytes for state in engine.cache.states.values())
    monkeypatch.setattr(static_engine, "free_bytes", lambda device: 2 * 8 * 2 * row)
    assert make_engine(model, slots=100, tokens=500, static=True).slots == 8
