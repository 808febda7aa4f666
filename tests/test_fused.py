"""fused.py against the stock modules; static decoding against the plain engine, its steps replayed as a graph would."""
import pytest
import torch
from test_generate import VOCAB, build, ids_of, play, recomputed, schedule
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lora
from llm import checkpointing, fused, generate
from llm.facts import facts
from llm.generate import Engine, Row
from llm.logprobs import token_logprobs
from llm.tiny import make_tiny

OURS = ["qwen2", "qwen2_sliding", "qwen3", "llama_gqa", "llama_mha", "smollm", "tiny"]
OTHERS = ["gemma3", "mistral", "phi3"]


def adapted(name="qwen2"):
    model = build(name)
    model.requires_grad_(False)
    lora.add_lora(model, 4, 8)
    for linear in lora.adapters(model).values():
        torch.nn.init.normal_(linear.lora.B, std=0.1)
    return model


def storages(model):
    return {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}


# ------------------------------------------------------------------------------------------------------ the fused forward
@pytest.mark.parametrize("name", OURS)
def test_same_tokens_and_logprobs_as_the_stock_modules(name):
    model = build(name)
    assert Engine(model).fused and facts(model).fuses is True
    runs = [play(model, schedule(5), slots=4, limit=9, stop_ids=set(range(0, VOCAB, 11)), fused=on, pause=lambda row: len(row.turn) % 4)[0]
            for on in (True, False)]
    for ours, stock in zip(*runs):
        assert ours.ids == stock.ids and ours.mask == stock.mask
        assert max(abs(a - b) for a, b in zip(ours.logprobs, stock.logprobs)) < 1e-4
    assert recomputed(model, runs[1]).max() < 1e-4  # and stock is right, too


@pytest.mark.parametrize("name", OTHERS)
def test_every_other_architecture_stays_with_the_stock_modules(name):
    model = build(name)
    assert Engine(model).fused is None and not fused.fits(model) and not facts(model).fuses


@pytest.mark.parametrize("change", [{"attention_bias": True, "mlp_bias": True}, {"rms_norm_eps": 0.1}, {"head_dim": 32},
                                    {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
                                                         "high_freq_factor": 4.0, "original_max_position_embeddings": 16}}])
def test_variants_of_the_family(change):
    import transformers
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                                                                   num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3, **change)).eval()
    for p in model.parameters():  # biases and norms are born as 0 and 1
        p.data += 0.1 * torch.randn_like(p)
    assert Engine(model).fused
    assert recomputed(model, play(model, schedule(2), slots=3)[0]).max() < 1e-4


@pytest.mark.parametrize("break_it", ["activation", "norm", "raises"])
def test_what_does_not_agree_is_not_used(break_it, monkeypatch):
    import transformers
    if break_it == "activation":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=VOCAB, hidden_size=48, intermediate_size=64, num_hidden_layers=2,
                                                                       num_attention_heads=6, initializer_range=0.3, hidden_act="gelu")).eval()
    else:
        model = build("qwen3")
        if break_it == "norm":
            class Odd(type(model.model.norm)):
                def forward(self, x):
                    return super().forward(x) * 1.01
            model.model.norm.__class__ = Odd
        else:
            monkeypatch.delattr(fused, "joined")
    engine = Engine(model)
    assert engine.fused is None and facts(model).fuses is False and fused.fits(model)
    assert recomputed(model, play(model, schedule(2), slots=3)[0]).max() < 1e-4


def test_merged_adapters_run_fused_unmerged_ones_and_hooks_do_not():
    model = adapted()
    base = {name: p.clone() for name, p in model.named_parameters()}
    places = storages(model)
    assert not fused.fits(model)
    with lora.merged(model):
        assert Engine(model).fused
        first = play(model, schedule(3), slots=3)[0]
    assert all(torch.equal(p, base[name]) for name, p in model.named_parameters()) and storages(model) == places
    assert recomputed(model, first).max() < 1e-4
    for linear in lora.adapters(model).values():
        linear.lora.B.data *= -1  # an update: the next Engine has it
    with lora.merged(model):
        second = play(model, schedule(3), slots=3)[0]
    assert recomputed(model, second).max() < 1e-4 and recomputed(model, first).max() > 1e-2
    plain = build("qwen2")
    for register in (plain.model.layers[0].register_forward_hook, plain.model.layers[0].register_forward_pre_hook):
        handle = register(lambda *_: None)
        assert not fused.fits(plain)
        handle.remove()
    assert fused.fits(plain)
    checkpointing.tile_mlps(plain, 4)  # the same product, a few tokens at a time
    assert fused.fits(plain)
    plain.model.layers[0].self_attn.forward = lambda *_, **__: None
    assert not fused.fits(plain)
    del plain.model.layers[0].self_attn.forward
    plain.model.layers[0].mlp.down_proj = torch.nn.utils.skip_init(type("Four", (torch.nn.Linear,), {}), 64, 48, bias=False)
    assert not fused.fits(plain)


def test_there_is_no_second_copy_and_training_and_saving_go_on(tmp_path):
    model = build("qwen3")
    bytes_before, logits = sum(storages(model).values()), model(torch.tensor([[5, 6, 7]])).logits
    Engine(model)
    places = storages(model)
    assert sum(places.values()) == bytes_before and len(places) < len(list(model.parameters())) - 4
    Engine(model)
    assert storages(model) == places  # joint already
    assert torch.equal(model(torch.tensor([[5, 6, 7]])).logits, logits)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        played = play(model, schedule(4, 4), slots=4)[0]
        assert recomputed(model, played).max() < 1e-4  # of the weights as they are now
        logprobs, _ = token_logprobs(model, torch.tensor([played[0].ids]), torch.tensor([played[0].mask]))
        logprobs.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert recomputed(model, played).max() > 1e-3 and storages(model) == places
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters()))


def test_bf16_on_a_cpu_is_packed_and_near_the_stock_modules():
    for name in ("qwen2", "tiny"):
        model = build(name)
        for p in model.parameters():
            p.data = p.data.bfloat16()
        engine = Engine(model, slots=2)
        assert engine.fused.packs and storages(model) == storages(model)
        both = []
        for on in (True, False):
            forced = [ids_of(20, i) for i in range(6)]
            out = generate.generate(model, [ids_of(9), ids_of(4, 1)], group_size=3, max_new_tokens=20, forced=forced, fused=on)
            both.append(torch.tensor([logprobs for _, logprobs in out]))
        exact = build(name)
        for p in exact.parameters():
            p.data = p.data.bfloat16().float()
        exact = torch.tensor([x for _, x in generate.generate(exact, [ids_of(9), ids_of(4, 1)], group_size=3, max_new_tokens=20, forced=forced)])
        errors = [(x - exact).abs().mean().item() for x in both]
        assert errors[0] < 0.05 and errors[0] < 1.5 * errors[1]  # as near to float32 as the stock modules are


# -------------------------------------------------------------------------------------------------------- static decoding
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
        kept = [t.clone() for t in (engine.window, engine.drawn, engine.now, *engine.cache.keys, *engine.cache.values)]
        graph = Recorded(lambda: engine._static_step(rows, span))
        for t, old in zip((engine.window, engine.drawn, engine.now, *engine.cache.keys, *engine.cache.values), kept):
            t.copy_(old)
        captured.append((rows, span))
        return graph
    monkeypatch.setattr(Engine, "_capture", capture)
    return captured


def long_schedule():
    """Contexts over several buckets, rows that wait long, answers longer than what decodes."""
    return [(ids_of(n, n), object(), [ids_of(m, n + 1) for m in answers])
            for n, answers in ((100, (40, 30)), (3, ()), (17, (1, 1, 1)), (240, (5,)), (6, (90,)), (9, ()), (120, (2, 60)))]


def same(ours, plain, tolerance=1e-4):
    for a, b in zip(ours, plain, strict=True):
        assert a.ids == b.ids and a.mask == b.mask
        assert max(abs(x - y) for x, y in zip(a.logprobs, b.logprobs)) < tolerance


@pytest.mark.parametrize("name", ["tiny", "qwen2_sliding", "gemma3", "smollm"])
@pytest.mark.parametrize("slots", [1, 3, 8])
def test_static_decoding_is_the_plain_engine(name, slots, graphs):
    """Tool pauses, refilled slots, groups, buckets of rows and context: the same tokens, the same log-probabilities."""
    model = build(name)
    for episodes in (schedule(slots), long_schedule()):
        options = {"slots": slots, "limit": 11, "stop_ids": set(range(0, VOCAB, 13)), "pause": lambda row: len(row.turn) * 5 % 7}
        plain, engine = play(model, episodes, **options)
        static, other = play(model, episodes, static=True, **options)
        same(static, plain)
        assert other.forwarded == engine.forwarded  # frozen steps are not counted as tokens
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
    ours, plain = (generate.generate(model, prompts, group_size=2, max_new_tokens=limit, forced=forced, stop_ids={11}, static=on)
                   for on in (True, False))
    assert [ids for ids, _ in ours] == [ids for ids, _ in plain]
    for (ids, x), (_, y), wanted in zip(ours, plain, forced):
        assert ids[:len(wanted)] == wanted and max(abs(a - b) for a, b in zip(x, y)) < 1e-4
    assert all(ids.index(11) == len(ids) - 1 for ids, _ in ours if 11 in ids)


def test_a_frozen_row_is_not_touched(graphs):
    """It waits through many windows of others, at a length beyond their context bucket, and goes on as if alone."""
    model = build("qwen2")
    for static in (True, False):
        waits, works = Row(ids_of(150), seed=1, limit=3), [Row(ids_of(4, i), seed=i, limit=60) for i in range(2, 5)]
        engine = Engine(model, slots=4, static=static)
        engine.add([works[0], waits, *works[1:]])
        while waits.state != "ended":
            engine.step()
        first, at = list(waits.turn), (waits.length, waits.slot)
        kept = [t[waits.slot, :, :waits.length].clone() for t in (*engine.cache.keys, *engine.cache.values)]
        while any(row.state != "ended" for row in works):
            engine.step()
        if static:
            assert (waits.length, waits.slot) == at == (152, 1) and waits.turn == first  # nobody moved it
            assert all(torch.equal(t[1, :, :152], k) for t, k in zip((*engine.cache.keys, *engine.cache.values), kept))
            assert graphs == [(4, 128)]  # it was computed along, in a context shorter than its own
        engine.extend(waits, ids_of(5, 2), 6)
        while engine.busy:
            engine.step()
        if static:
            mine = first, waits.turn, waits.logprobs
    assert mine[:2] == (first, waits.turn) and max(abs(a - b) for a, b in zip(mine[2], waits.logprobs)) < 1e-4


def test_static_decoding_notices_logits_that_are_not_finite():
    model = build("qwen2")
    engine = Engine(model, slots=2, static=True)
    engine.add([Row(ids_of(4), limit=50)])
    engine.step()
    model.model.norm.weight.data[0] = float("nan")
    with pytest.raises(FloatingPointError):
        engine.step()


def test_attention_by_torchs_kernel_as_on_a_gpu():
    for name in ("tiny", "qwen2_sliding", "gemma3", "llama_mha"):
        model = build(name)
        for static in (True, False):
            class Cuda(generate.RowCache):
                def __init__(self, layers, slots, sdpa):
                    super().__init__(layers, slots, sdpa=True)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(generate, "RowCache", Cuda)
                played, engine = play(model, schedule(3), slots=3, static=static)
            assert engine.cache.sdpa and recomputed(model, played).max() < 1e-4


def test_rollout_with_tools_is_the_same_static(monkeypatch, graphs):
    """agent.rollout: tools in threads, rows that wait, the same episodes token by token."""
    import envs
    from agent import Limits, rollout
    model, tokenizer = make_tiny(0)
    tasks = envs.tasks("equations", "train", 3, 0)
    calls = tokenizer.encode('<tool_call>\n{"name": "add_terms", "arguments": {"value": "3"}}\n</tool_call><|im_end|>', add_special_tokens=False)

    def episodes(static):
        def row(*args, **kwargs):
            return Row(*args, **kwargs, forced=calls * 2)
        monkeypatch.setattr("agent.Row", row)
        monkeypatch.setattr("agent.Engine", lambda *args, **kwargs: Engine(*args, **kwargs, static=static))
        return rollout(model.eval(), tokenizer, "equations", tasks, 3, limits=Limits(4, 24, 700), slots=5, seed=3)
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
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph", Refuses)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "stream")
    monkeypatch.setattr(torch.cuda, "set_stream", left.append)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda device, pool: left.append(pool))
    engine = Engine(model, slots=2, static=True)
    engine.device = torch.device("cpu")
    monkeypatch.setattr(type(engine), "_capture", lambda self, rows, span, real=Engine._capture: _as_cuda(self, real, rows, span))
    engine.add([Row(ids_of(4), seed=1, limit=30)])
    while engine.busy:
        engine.step()
    assert capsys.readouterr().err == "note: decoding without CUDA graphs: operation not permitted when stream is capturing\n"
    assert left == ["stream", "pool"]  # torch.cuda.graph, where its end raises, leaves both as they were in the capture
    assert Engine(model, slots=2, static=True).refused  # of this model nobody tries again


def test_graphs_are_not_tried_where_they_would_be_wrong():
    model = build("qwen2")
    assert not Engine(model, slots=2, static=True).refused
    model.model.layers[0].register_forward_pre_hook(lambda *_: None)  # Python that a replay would not run
    assert Engine(model, slots=2, static=True).refused
    config = build("llama_gqa").config
    config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}  # it looks at the positions
    assert Engine(type(build("llama_gqa"))(config).eval(), slots=2, static=True).refused


def _as_cuda(engine, real, rows, span):
    engine.device = torch.device("cuda")
    try:
        return real(engine, rows, span)
    finally:
        engine.device = torch.device("cpu")

