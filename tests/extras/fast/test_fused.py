"""The decoder of extras/fast (fused.py, attention.py) against core's, which runs the stock modules."""
import pytest
import torch
from test_engine import FAMILIES, VOCAB, build, complete, ids_of, make_engine, play, recomputed, schedule

import lora
from extras.memory import checkpointing
from extras.fast import fused
from layers import load_model
from core.engine import Row, StockForward
from core.logprobs import token_logprobs
from core.model import facts
from extras.memory.adapter import Beside, Recomputing
from extras.memory.techniques import PLAIN

OURS = ["qwen2", "qwen2_sliding", "qwen3", "llama_gqa", "llama_mha", "smollm", "tiny"]
OTHERS = ["gemma3", "mistral", "phi3"]


def is_fused(model):
    return isinstance(make_engine(model).decoder, fused.Fused)


def adapted(name="qwen2"):
    model = build(name)
    model.requires_grad_(False)
    lora.add_lora(model, 4, 8, kind=Recomputing)
    for linear in lora.adapted_linears(model).values():
        torch.nn.init.normal_(linear.lora.B, std=0.1)
    return model


def storages(model):
    return {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}


@pytest.mark.parametrize("name", OURS)
def test_same_tokens_and_logprobs_as_the_stock_modules(name):
    model = build(name)
    assert is_fused(model)
    runs = [play(model, schedule(5), slots=4, limit=9, stop_ids=set(range(0, VOCAB, 11)), pause=lambda row: len(row.turn) % 4, **options)[0]
            for options in ({}, {"decoder": StockForward(model)})]
    for ours, stock in zip(*runs):
        assert ours.ids == stock.ids and ours.mask == stock.mask
        assert max(abs(a - b) for a, b in zip(ours.logprobs, stock.logprobs)) < 1e-4
    assert recomputed(model, runs[1]).max() < 1e-4  # and stock is right, too


@pytest.mark.parametrize("name", OTHERS)
def test_every_other_architecture_stays_with_the_stock_modules(name):
    model = build(name)
    assert not is_fused(model) and not fused.fits(model)


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
    assert is_fused(model)
    assert recomputed(model, play(model, schedule(2), slots=3)[0]).max() < 1e-4


def test_the_norms_of_queries_and_keys_have_the_models_epsilon():
    import transformers
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(vocab_size=VOCAB, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=6,
                                                                   num_key_value_heads=2, head_dim=16, initializer_range=0.3, rms_norm_eps=0.1)).eval()
    assert is_fused(model)
    assert recomputed(model, play(model, schedule(2), slots=3)[0]).max() < 1e-4


def test_a_prompt_stays_in_tiles_and_a_decode_step_is_fused():
    model = build("qwen2")
    checkpointing.tile_mlps(model, 4)
    facts(model).techniques = PLAIN._replace(mlp_tokens=4)  # as `load_model` notes it
    engine = make_engine(model, slots=1)
    widths = []
    for layer, stock in zip(engine.decoder.layers, model.model.layers):
        assert layer.prompt_mlp is stock.mlp
        layer.prompt_mlp = lambda x, mlp=stock.mlp: widths.append(x.shape[1]) or mlp(x)
    engine.add([Row(ids_of(9), limit=3)])
    while engine.busy:
        engine.step()
    assert widths == [9, 9]


def test_another_activation_stays_with_the_stock_modules():
    import transformers
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=VOCAB, hidden_size=48, intermediate_size=64, num_hidden_layers=2,
                                                                   num_attention_heads=6, initializer_range=0.3, hidden_act="gelu")).eval()
    assert not is_fused(model)
    assert recomputed(model, play(model, schedule(2), slots=3)[0]).max() < 1e-4


def test_merged_adapters_run_fused_unmerged_ones_and_hooks_do_not():
    model = adapted()
    base = {name: p.clone() for name, p in model.named_parameters()}
    places = storages(model)
    assert not fused.fits(model)
    with lora.merged(model):
        assert is_fused(model)
        first = play(model, schedule(3), slots=3)[0]
    assert all(torch.equal(p, base[name]) for name, p in model.named_parameters()) and storages(model) == places
    assert recomputed(model, first).max() < 1e-4
    for linear in lora.adapted_linears(model).values():
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_adapters_beside_the_weights_of_one_input_are_one_adapter_while_decoding(dtype):
    """A decode step in 4 bits was nine kernels for each of them, two thirds of its launches (KERNELS in test_launches.py)."""
    model = load_model("tiny", lora_r=4, dtype=dtype, device="cpu", memory="4bit")[0].eval()
    for linear in lora.adapted_linears(model).values():
        torch.nn.init.normal_(linear.lora.B, std=0.05)
    attention = model.model.layers[1].self_attn
    linears = attention.q_proj, attention.k_proj, attention.v_proj
    with torch.inference_mode(), lora.merged(model):
        joint = fused.joined(*linears)
        assert joint.are_beside
        for rows in (1, 5):
            x = torch.randn(rows, 1, attention.q_proj.in_features, dtype=model.dtype)
            apart = torch.cat([linear(x) for linear in linears], -1)
            torch.testing.assert_close(joint(x), apart)
        noises = [linear.lora.column_noise(linear(x)) for linear in linears]  # rounded as in the update, column by column
        assert torch.equal(joint.adapter.keywords["noise"], torch.cat(noises))
        x = torch.randn(2, 7, attention.q_proj.in_features, dtype=model.dtype)
        assert torch.equal(joint(x), torch.cat([linear(x) for linear in linears], -1))
        linears[1].lora.mode = "off"
        assert not fused.joined(*linears).are_beside
        linears[1].lora.mode = "cached"
        linears[1].lora.__class__ = type("DoRA", (Beside,), {"forward": None})  # whose sum is another
        assert not fused.joined(*linears).are_beside


def test_there_is_no_second_copy_and_training_and_saving_go_on(tmp_path):
    model = build("qwen3")
    bytes_before, logits = sum(storages(model).values()), model(torch.tensor([[5, 6, 7]])).logits
    make_engine(model)
    places = storages(model)
    assert sum(places.values()) == bytes_before and len(places) < len(list(model.parameters())) - 4
    make_engine(model)
    places = storages(model)  # joined again
    assert sum(places.values()) == bytes_before
    assert torch.equal(model(torch.tensor([[5, 6, 7]])).logits, logits)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        played = play(model, schedule(4, 4), slots=4)[0]
        assert recomputed(model, played).max() < 1e-4  # of the weights as they are now
        logprobs, _ = token_logprobs(model, torch.tensor([played[0].ids]), torch.tensor([played[0].mask]))
        logprobs.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert recomputed(model, played).max() > 1e-3 and sum(storages(model).values()) == bytes_before
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters()))


def test_merged_weights_that_are_packed_are_freed_and_come_back():
    if not fused.packs_bfloat16(torch.device("cpu")):
        pytest.skip("oneDNN has no layout for bfloat16 on this CPU")
    model = load_model("tiny", lora_r=4, dtype="bfloat16", device="cpu")[0].eval()
    linears = list(lora.adapted_linears(model).values())
    base = [linear.weight.clone() for linear in linears]
    turns = []
    with lora.merged(model):
        for _ in range(2):  # the second engine needs them again
            turns.append(complete(model, [ids_of(9)], max_new_tokens=6))
            assert not any(linear.weight.numel() for linear in linears)
    assert turns[0] == turns[1] and all(torch.equal(linear.weight, weight) for linear, weight in zip(linears, base))


@pytest.mark.parametrize("packs", [True, False])
def test_bf16_on_a_cpu_is_packed_where_it_can_be_and_near_the_stock_modules(packs, monkeypatch):
    if packs and not fused.packs_bfloat16(torch.device("cpu")):
        pytest.skip("oneDNN has no layout for bfloat16 on this CPU")
    # A CPU without AVX-512, which most laptops have.
    monkeypatch.setattr(fused, "packs_bfloat16", lambda device: packs)
    for name in ("qwen2", "tiny"):
        model = build(name)
        for p in model.parameters():
            p.data = p.data.bfloat16()
        engine = make_engine(model, slots=2)
        assert engine.decoder.head.packs == packs and storages(model) == storages(model)
        both = []
        for decoder in (None, StockForward(model)):
            forced = [ids_of(20, i) for i in range(6)]
            out = complete(model, [ids_of(9), ids_of(4, 1)], group_size=3, max_new_tokens=20, forced=forced, decoder=decoder)
            both.append(torch.tensor([logprobs for _, logprobs in out]))
        exact = build(name)
        for p in exact.parameters():
            p.data = p.data.bfloat16().float()
        exact = torch.tensor([x for _, x in complete(exact, [ids_of(9), ids_of(4, 1)], group_size=3, max_new_tokens=20, forced=forced)])
        errors = [(x - exact).abs().mean().item() for x in both]
        assert errors[0] < 0.05 and errors[0] < 1.5 * errors[1]  # as near to float32 as the stock modules are


@pytest.mark.parametrize("name", [*FAMILIES, "tiny"])
def test_long_prompts_go_through_the_causal_kernel_and_long_tool_results_do_not(monkeypatch, name):
    """A tool result of 21 tokens sees what stands before it in the row."""
    model, kernel, widths = build(name), torch.nn.functional.scaled_dot_product_attention, []

    def counted(query, *rest, is_causal=False, **options):
        widths.extend([query.shape[2]] * is_causal)
        return kernel(query, *rest, is_causal=is_causal, **options)
    monkeypatch.setattr("extras.fast.attention.LONG_PROMPT", 8)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    played, _ = play(model, schedule(4), slots=4, limit=7, pause=lambda row: len(row.turn) % 3)
    # All layers of this Mistral see a window of 7.
    assert set(widths) <= {9, 14, 30} and bool(widths) == (name != "mistral")
    widths.clear()
    assert recomputed(model, played).max() < 1e-4
