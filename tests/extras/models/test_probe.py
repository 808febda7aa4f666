"""extras/models/probe.py: what the probe at load finds, in every text decoder of transformers and in models changed on purpose."""
import time
from functools import partial

import decoders
import pytest
import torch
from memory_helpers import EVERYTHING
from saving import save_tiny
from test_models import save_text

from core.config import UserError
from layers import load_model, make_engine
from merge import merge
from extras.fast.loading import speed_up
from extras.memory.techniques import SETTINGS
from core.model import facts
from extras.models.probe import WINDOW, disagreement, narrow_windows, probe
from lora import adapted_linears, add_lora
from core.model import settings


def test_the_table_names_every_text_decoder_of_transformers_5_24():
    import transformers
    if not transformers.__version__.startswith(decoders.VERSION):
        pytest.skip(f"the table is of transformers {decoders.VERSION}")
    assert sorted(decoders.TABLE) == decoders.families()


# Of those that run the ones that are used most, and every tenth of the others. A new version of transformers asks for all of them.
KNOWN = "deepseek_v3 gemma3_text gemma4_text gpt2 gpt_oss granite lfm2 llama mamba2 mistral olmo2 phi3 qwen2 qwen3 qwen3_5 qwen3_moe qwen3_next smollm3".split()
SELDOM = [family for family, verdict in decoders.TABLE.items() if verdict == "runs" and family not in KNOWN]
SELDOM = set(SELDOM) - set(SELDOM[::10])


@pytest.mark.parametrize("family", [pytest.param(family, marks=pytest.mark.slow if family in SELDOM else ()) for family in decoders.TABLE])
def test_what_runs_and_what_is_refused(family):
    """A row that changes with a new version of transformers: see what changed there, then change the row."""
    assert decoders.verdict(family) == decoders.TABLE[family]


@pytest.mark.parametrize("family, options, share", [
    ("qwen3_moe", {"lora_r": 4}, "86%"), ("qwen3_moe", {"lora_r": 4, "memory": "4bit"}, "86%"), ("qwen3_moe", {"lora_r": 4, "lora_target_modules": "q_proj"}, None),
    ("qwen3_moe", {"lora_r": 0}, None), ("qwen3", {"lora_r": 4}, None)])
def test_the_share_of_weights_that_all_linear_leaves_out_is_said_once(tmp_path, capsys, family, options, share):
    """A layer's experts have 8 x 3 x 64 x 48 = 73,728 weights, its router 512, its attention 12,288: 74,240 of 86,528 without an adapter."""
    from transformers import AutoConfig, AutoModelForCausalLM
    save_tiny(tmp_path)
    sizes = dict(vocab_size=1000, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    sizes |= dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=48) if family == "qwen3_moe" else {}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes)).save_pretrained(tmp_path)
    for _ in range(2):
        load_model(str(tmp_path), device="cpu", **options)
    said = [line for line in capsys.readouterr().out.splitlines() if "all-linear" in line]
    assert said == ([f"note: {tmp_path}: all-linear leaves {share} of the layers' weights without an adapter (experts); they stay as they are"] if share else [])


def windowed(family, **sizes):
    import transformers
    config = getattr(transformers, f"{family}Config")(**{**decoders.SIZES, "sliding_window": 4096, **sizes})
    model = decoders.filled(getattr(transformers, f"{family}ForCausalLM")(config).eval())
    speed_up(model)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family, sizes", [("Qwen2Moe", {"use_sliding_window": True}), ("Phimoe", {}), ("Doge", {})])
def test_a_window_that_only_the_mask_knows_is_found_at_its_real_width(family, sizes, dtype):
    """Rows longer than the window would be 2.6 to 9 nats off. The probe's few tokens find it because it narrows the window."""
    model = windowed(family, **sizes).to(dtype)
    probe(model, "folder")
    with pytest.raises(UserError, match=f"^folder: {family}ForCausalLM: the engine cannot decode it: it differs from transformers' by [0-9.]+ nats a token$"):
        make_engine(model, tokens=100)


@pytest.mark.parametrize("family, options", [
    ("deepseek_v32", {}), ("minimax_m3_vl_text", {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2})])
def test_sparse_attention_that_sees_all_of_a_short_row_is_refused(family, options):
    """`causal_attention` ignores which keys or blocks a layer has chosen. Rows of more than 2,048 tokens trained 0.3 nats off."""
    model = decoders.make(family, **options)
    speed_up(model)
    with pytest.raises(UserError, match=r"^folder: \w+ForCausalLM: the training forward fails: it chooses the keys"):
        probe(model, "folder")


@pytest.mark.parametrize("family", ["granitemoehybrid", "kimi_linear"])
def test_rounding_that_sends_a_token_to_another_expert_is_no_error(family, tmp_path):
    """One token was 0.25 nats off in Granite 4, whose other tokens were within 0.02."""
    save_text(family, tmp_path)
    model, _ = load_model(str(tmp_path), lora_r=2, memory="small", dtype="bfloat16", device="cpu")
    assert not facts(model).refuses_engine


def test_a_token_does_not_decide_and_a_row_does():
    stock = torch.zeros(2, 9)
    flipped, wrong = stock.clone(), stock.clone()
    flipped[0, 1] = flipped[1, 3] = 5.0
    wrong[1] = 0.1
    assert disagreement(0.05, stock, lambda: flipped) == ""
    assert disagreement(0.05, stock, lambda: wrong) == "differs from transformers' by 0.1 nats a token"


def test_windows_have_their_width_again_and_a_window_that_the_engine_knows_passes():
    model = windowed("Qwen2", use_sliding_window=True, max_window_layers=0)
    with narrow_windows(model):
        assert model.config.sliding_window == WINDOW
        assert {layer.self_attn.sliding_window for layer in model.model.layers} == {WINDOW}
    probe(model, "folder")
    assert model.config.sliding_window == 4096 and {layer.self_attn.sliding_window for layer in model.model.layers} == {4096}
    assert not facts(model).refuses_engine and facts(model).shares_prefix
    make_engine(model, tokens=100)


@pytest.mark.parametrize("layers", [["full_attention", "conv", "conv", "conv"], ["conv"] * 4])
def test_convolutions_that_no_attention_follows_share_no_prefix(layers):
    """Packed, the first tokens of each row would see the row before. Gradients were 40 % off, and the median of a row was right."""
    model = decoders.make("lfm2", layer_types=layers)
    speed_up(model)
    probe(model, "folder")
    assert not facts(model).refuses_engine and not facts(model).shares_prefix


def test_a_linear_whose_weight_is_read_past_its_forward_gets_no_adapter(capsys):
    model = decoders.make("mamba")
    add_lora(model, 2, 4)
    probe(model, "folder")
    says = "note: folder: MambaForCausalLM: its forward passes by the adapters of mixer.dt_proj, mixer.out_proj, mixer.x_proj: they are left out\n"
    assert says in capsys.readouterr().out
    assert {name.split(".")[-1] for name in adapted_linears(model)} == {"in_proj"}
    assert settings(model).peft["target_modules"] == ["mixer.in_proj"]


@pytest.mark.parametrize("family", ["mamba", "falcon_mamba", "jamba", "zamba"])
def test_a_recurrence_that_begins_anew_with_a_tool_result_is_found(family):
    """Transformers' scan takes no state, so that their own generate is wrong from the second turn on as well, by 0.1 to 2 nats a token."""
    model = decoders.make(family)
    probe(model, "folder")
    with pytest.raises(UserError, match="the engine cannot decode it: it differs from transformers' by"):
        make_engine(model, tokens=100)


def test_one_that_was_named_is_refused_with_what_to_give_instead():
    model = decoders.make("mamba")
    add_lora(model, 2, 4, targets="dt_proj,in_proj")
    says = r"^folder: MambaForCausalLM: its forward passes by the adapters of mixer.dt_proj; give --lora_target_modules mixer.in_proj$"
    with pytest.raises(UserError, match=says):
        probe(model, "folder")


def test_an_adapter_that_was_given_is_refused_with_what_it_can_do(tmp_path):
    """Its targets cannot change. Merged, it is what PEFT's own merge makes of it."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM
    base, given, whole = (str(tmp_path / name) for name in ("base", "adapter", "whole"))
    save_text("granitemoehybrid", base)
    config = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config)
    theirs.save_pretrained(given)
    with pytest.raises(UserError, match=r"adapters of mamba.out_proj; merge the adapter first \(python lora.py merge\)$"):
        load_model(given, lora_r=2, device="cpu")
    merge(given, whole)
    model, _ = load_model(whole, lora_r=2, device="cpu")
    ids = torch.arange(3, 19)[None]
    with torch.no_grad():
        assert (model(input_ids=ids).logits - theirs.merge_and_unload().eval()(input_ids=ids).logits).abs().max() < 1e-5


def test_a_kernel_that_reads_a_weight_only_while_training_is_found():
    """The adapter would sample with its update and get no gradient."""
    model = decoders.make("llama")
    add_lora(model, 2, 4)

    def fused(module, x, forward):
        return torch.nn.functional.linear(x, module.weight) if module.training else forward(x)
    for layer in model.model.layers:
        layer.mlp.forward = partial(lambda mlp, x, out: mlp.down_proj(torch.nn.functional.silu(fused(mlp.gate_proj, x, out)) * mlp.up_proj(x)),
                                    layer.mlp, out=layer.mlp.gate_proj)
    probe(model, "folder")
    assert {name.split(".")[-1] for name in adapted_linears(model)} == {"q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"} and not model.training


def test_an_encoder_is_refused_because_its_tokens_see_later_ones():
    import transformers
    torch.manual_seed(0)
    model = decoders.filled(transformers.BertLMHeadModel(transformers.BertConfig(
        vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)).eval())
    speed_up(model)
    with pytest.raises(UserError, match="folder: BertLMHeadModel: is not causal: without the later tokens a forward differs from transformers' by "):
        probe(model, "folder")


def test_a_model_that_trains_only_on_some_lengths_is_refused():
    import transformers
    model = transformers.ReformerModelWithLMHead(transformers.ReformerConfig(
        vocab_size=96, hidden_size=32, num_attention_heads=2, attention_head_size=16, feed_forward_size=48, attn_layers=["local", "lsh"],
        local_attn_chunk_length=4, lsh_attn_chunk_length=4, num_buckets=2, axial_pos_embds=False, is_decoder=True)).eval()
    with pytest.raises(UserError, match="^folder: ReformerModelWithLMHead: cannot run on text alone: If training, .* multiple of least common multiple"):
        probe(model, "folder")


def test_out_of_memory_is_not_taken_for_a_model_that_does_not_run(monkeypatch):
    from extras.models import probe as module

    def no_memory(*_):
        raise torch.OutOfMemoryError("no memory")
    monkeypatch.setattr(module, "engine_logprobs", no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        load_model("tiny", device="cpu")


@pytest.mark.parametrize("memory", [*SETTINGS, "everything"])
@pytest.mark.parametrize("dtype", ["bfloat16", *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in ("float32", "float16"))])
def test_every_dtype_and_memory_technique_passes(tmp_path, memory, dtype, capsys):
    """Also with an adapter that changes something, which the stock forward has as well."""
    from core.model import save_model
    memory = EVERYTHING if memory == "everything" else memory
    base = save_tiny(tmp_path / "base")
    model, tokenizer = load_model(base, lora_r=4, dtype=dtype, memory=memory, device="cpu")
    for linear in adapted_linears(model).values():
        linear.lora.B.data.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
    save_model(model, str(tmp_path / "adapter"))
    capsys.readouterr()
    model, _ = load_model(str(tmp_path / "adapter"), lora_r=4, dtype=dtype, memory=memory, device="cpu")
    assert not facts(model).refuses_engine and facts(model).shares_prefix
    assert capsys.readouterr().out.count("training and decoding checked in") == 1


def test_it_takes_less_than_a_second_of_a_processor(tmp_path):
    model, _ = load_model("tiny", lora_r=4, device="cpu")
    began = time.process_time()
    probe(model, "tiny")
    assert time.process_time() - began < 1
