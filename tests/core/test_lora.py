"""lora.py: LoRA against its equation and against PEFT, merging, and the reference policy."""
import json
import math
from functools import partial

import decoders
from families import memory
import pytest
import torch
from lora_helpers import (
    ALL_LINEAR,
    IDS,
    SMOLLM2,
    alike,
    full,
    gradients,
    load,
    logits_of,
    peft_base,
    random_mask,
    randomise,
    same_gradients,
    train_steps,
)
from torch.nn import functional as F

from core.config import UserError
from layers import load_model
from core.model import save_model
from core.logprobs import token_logprobs
from core.model import facts
from lora import adapted_linears, add_lora, freeze_reference, merge_adapter, merged, merged_to_train, reference


# ---------------------------------------------------------------------------------------------------------------- LoRA
def test_only_a_and_b_require_grad_and_the_fresh_adapter_changes_nothing(tiny):
    model = load(tiny, lora_r=4)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {f"{name}.lora.{part}" for name in adapted_linears(model) for part in ("A", "B")}
    assert {name.rsplit(".", 1)[-1] for name in adapted_linears(model)} == ALL_LINEAR
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert torch.equal(logits_of(model), logits_of(load(tiny)))
    assert all(p.requires_grad for p in load(tiny).parameters())


def test_a_is_drawn_like_pefts_and_from_the_seed(tiny):
    a, b, c = (load(tiny, lora_r=8, seed=s) for s in (0, 0, 1))
    generator = torch.Generator().manual_seed(0)
    for name, linear in adapted_linears(a).items():  # in the model's order
        drawn = torch.rand(8, linear.in_features, generator=generator) * 2 - 1
        assert torch.equal(linear.lora.A, drawn * (1 / math.sqrt(linear.in_features)))
        A, bound = linear.lora.A, 1 / math.sqrt(linear.in_features)
        assert A.abs().max() <= bound and abs(A.std() - bound / math.sqrt(3)) < 0.05 * bound and not linear.lora.B.any()
        assert torch.equal(A, adapted_linears(b)[name].lora.A) and not torch.equal(A, adapted_linears(c)[name].lora.A)


def test_a_forward_is_w_x_plus_scale_b_a_x(tiny):
    for rslora, scale in ((False, 12 / 4), (True, 12 / math.sqrt(4))):
        model = load(tiny, train=False)
        add_lora(model, 4, 12, use_rslora=rslora)
        randomise(model)
        linear = model.model.layers[1].self_attn.q_proj
        x = torch.randn(3, 128)
        expected = F.linear(x, linear.weight + scale * linear.lora.B @ linear.lora.A, linear.bias)
        assert linear.lora.scale == scale and (linear(x) - expected).abs().max() < 1e-5
    assert load(tiny, lora_r=4).model.layers[0].mlp.up_proj.lora.scale == 2.0  # default: alpha = 2 r


@pytest.mark.parametrize("targets, names", [
    ("q_proj,v_proj", {"q_proj", "v_proj"}), ("q_proj, v_proj", {"q_proj", "v_proj"}), (["up_proj"], {"up_proj"}), ("down_proj", {"down_proj"}),
    (["k_proj", "o_proj"], {"k_proj", "o_proj"}), ("all-linear", ALL_LINEAR), ("mlp.up_proj", {"up_proj"}),
    ("model.layers.2.mlp.up_proj", {"up_proj"})])
def test_target_modules(tiny, targets, names):
    model = load(tiny, lora_r=2, lora_target_modules=targets)
    found = adapted_linears(model)
    assert {name.rsplit(".", 1)[-1] for name in found} == names
    assert len(found) == (1 if "layers.2" in str(targets) else 4 * len(names)) and not hasattr(model.lm_head, "lora")


@pytest.mark.parametrize("target", ["w_query", "proj", "lm_head"])
def test_an_unknown_target_lists_the_names(tiny, target):
    with pytest.raises(UserError, match=f"no Linear called {target};") as error:
        load(tiny, lora_r=2, lora_target_modules=target)
    assert all(name in str(error.value) for name in ALL_LINEAR) and "\n" not in str(error.value)


def test_dropout_only_in_train(tiny):
    model = randomise(load(tiny, lora_r=4, lora_dropout=0.5))
    plain = randomise(load(tiny, lora_r=4))
    assert not model.training and torch.equal(logits_of(model), logits_of(plain))
    model.train()
    torch.manual_seed(0)
    first, second = logits_of(model), logits_of(model)
    assert (first - second).abs().max() > 1e-3
    torch.manual_seed(0)
    assert torch.equal(first, logits_of(model))
    with merged_to_train(model):  # an update has its dropout, a rollout has none
        assert not torch.equal(logits_of(model), logits_of(model))
    with merged(model):
        assert torch.equal(logits_of(model), logits_of(model))
    assert torch.equal(logits_of(model.eval()), logits_of(plain))


# -------------------------------------------------------------------------------------------------------------- merged
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_merged_gives_the_base_back_bit_for_bit(tiny, dtype):
    model = randomise(load(tiny, lora_r=4, dtype=dtype))
    before = {name: (p.data_ptr(), p.detach().clone()) for name, p in model.named_parameters()}
    unmerged = logits_of(model)
    with merged(model):
        assert not torch.equal(model.model.layers[0].mlp.up_proj.weight, before["model.layers.0.mlp.up_proj.weight"][1])
        inside = logits_of(model)
    assert (inside - unmerged).abs().max() < (1e-5 if dtype == "float32" else 0.2)
    with pytest.raises(ZeroDivisionError), merged(model):
        1 / 0
    for name, p in model.named_parameters():
        assert p.data_ptr() == before[name][0] and torch.equal(p, before[name][1])
    assert torch.equal(logits_of(model), unmerged)


def test_merged_gives_back_what_it_had_taken_when_memory_runs_out(tiny, monkeypatch):
    model = randomise(load(tiny, lora_r=4))
    unmerged, calls, real = logits_of(model), [], torch.Tensor.__matmul__

    def fails(a, b):
        calls.append(1)
        if len(calls) == 9:
            raise MemoryError
        return real(a, b)

    monkeypatch.setattr(torch.Tensor, "__matmul__", fails)
    with pytest.raises(MemoryError), merged(model):
        pass
    monkeypatch.undo()
    assert len(calls) == 9 and torch.equal(logits_of(model), unmerged)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_merged_weights_give_the_adapter_its_gradient(tiny, checkpointing):
    model, (ids, mask) = randomise(load(tiny, lora_r=4)), alike()
    expected = gradients(model, (token_logprobs(model, ids, mask)[0] * ids).sum())
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    with merged(model):
        found = gradients(model, (token_logprobs(model, ids, mask)[0] * ids).sum())
    same_gradients(found, expected)
    assert len(found) == 2 * len(adapted_linears(model))


def test_merged_is_nothing_without_an_adapter(tiny):
    model = load(tiny)
    before = logits_of(model)
    with merged(model):
        assert torch.equal(logits_of(model), before)


def test_weights_that_layers_share_are_not_merged():
    """Each of Zamba's layers would get the updates of all of them, and the weights would keep these."""
    model = decoders.make("zamba", tie_word_embeddings=True, layers_block_type=["hybrid", "linear_attention"] * 2)
    first, second = (model.model.layers[i].shared_transf.self_attn.q_proj for i in (0, 2))
    assert first.weight is second.weight
    add_lora(model, 2, 4)
    ids, before = IDS % 90, logits_of(randomise(model), IDS % 90)
    with merged(model):
        assert first.lora.mode == second.lora.mode == "beside" and model.model.layers[0].linear.lora.mode == "merged"
        assert (logits_of(model, ids) - before).abs().max() < 1e-4
    assert torch.equal(logits_of(model, ids), before)
    with pytest.raises(UserError, match="weights that layers share hold no adapter"):
        merge_adapter(model)


def test_training_goes_on_after_merged(tiny):
    model, mask = randomise(load(tiny, lora_r=4)), random_mask(IDS)
    expected = gradients(model, token_logprobs(model, IDS, mask)[0].sum())
    with merged(model), torch.inference_mode():
        model(input_ids=IDS)
    same_gradients(gradients(model, token_logprobs(model, IDS, mask)[0].sum()), expected, 0)


# ----------------------------------------------------------------------------------------------------------- reference
@pytest.mark.parametrize("start", ["fresh", "loaded", "full"])
def test_the_reference_is_the_policy_this_run_started_from(tiny, tmp_path, start):
    if start == "loaded":
        save_model(randomise(load(tiny, lora_r=4)), tmp_path / "adapter")
        model = load(tmp_path / "adapter", lora_r=4)
        assert not torch.equal(logits_of(model), logits_of(load(tiny)))
    else:
        model = load(tiny, lora_r=4 if start == "fresh" else 0)
    mask = random_mask(IDS)
    frozen = freeze_reference(model)
    assert (frozen is None) == (start == "fresh")
    with torch.no_grad(), merged_to_train(model):
        at_start = token_logprobs(model, IDS, mask)[0]
    train_steps(model)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        policy = token_logprobs(model, IDS, mask)[0]
        assert (policy - at_start).abs().max() > 0.1
        for _ in range(2):
            with reference(model, frozen):
                assert torch.equal(token_logprobs(model, IDS, mask)[0], at_start)
            assert torch.equal(token_logprobs(model, IDS, mask)[0], policy)
        with pytest.raises(ZeroDivisionError), reference(model, frozen):
            1 / 0
        assert torch.equal(token_logprobs(model, IDS, mask)[0], policy)
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
    train_steps(model)  # the optimiser's parameters are still the model's, and the frozen copies are not trained along
    with torch.no_grad(), reference(model, frozen):
        assert torch.equal(token_logprobs(model, IDS, mask)[0], at_start)


def test_the_reference_of_a_fresh_adapter_is_the_base_model(tiny):
    model = load(tiny, lora_r=4)
    frozen = freeze_reference(model)
    randomise(model)
    with reference(model, frozen):
        assert torch.equal(logits_of(model), logits_of(load(tiny)))


def test_a_reference_frozen_later_is_the_policy_of_that_time(tiny):
    """A fork that renews its reference every few steps got the base model: a fresh adapter was turned off, trained or not."""
    model = load(tiny, lora_r=4)
    train_steps(model)
    then, frozen = logits_of(model), freeze_reference(model)
    train_steps(model)
    assert not torch.equal(logits_of(model), then)
    with reference(model, frozen):
        assert (logits_of(model) - then).abs().max() < 1e-4
    with reference(model, {name: torch.zeros_like(p) for name, p in frozen.items()}):  # any tensors: a fork's moving average
        assert torch.equal(logits_of(model), logits_of(load(tiny)))


# ---------------------------------------------------------------------------------------------------------------- PEFT
@pytest.mark.parametrize("options", [
    {"lora_r": 4}, {"lora_r": 3, "lora_alpha": 7}, {"lora_r": 4, "lora_target_modules": "q_proj,v_proj", "lora_dropout": 0.1},
    {"lora_r": 4, "lora_target_modules": "layers.0.mlp.up_proj,layers.2.mlp.down_proj"}], ids=["all", "alpha", "names", "long names"])
def test_peft_and_transformers_read_our_adapter(tiny, tmp_path, options):
    from peft import PeftModel
    model = randomise(load(tiny, **options))
    save_model(model, tmp_path)
    expected = logits_of(model)
    assert not torch.equal(expected, logits_of(peft_base(tiny)))
    assert (logits_of(PeftModel.from_pretrained(peft_base(tiny), tmp_path)) - expected).abs().max() == 0.0
    native = peft_base(tiny)
    native.load_adapter(str(tmp_path))
    assert (logits_of(native.eval()) - expected).abs().max() == 0.0
    for again in ({"lora_r": 4}, options):  # and so do we, also with the flags of the first run
        assert torch.equal(logits_of(load(tmp_path, **again)), expected)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == tiny and config["lora_dropout"] == options.get("lora_dropout", 0)


def test_peft_reads_our_rslora_adapter(tiny, tmp_path):
    from peft import PeftModel
    model = load(tiny, train=False)
    add_lora(model, 3, 7, use_rslora=True)
    save_model(randomise(model), tmp_path)
    expected = logits_of(model)
    assert (logits_of(PeftModel.from_pretrained(peft_base(tiny), tmp_path)) - expected).abs().max() == 0.0
    assert torch.equal(logits_of(load(tmp_path, lora_r=3)), expected)


def test_a_model_without_linears_is_refused():
    from transformers import GPT2Config, GPT2LMHeadModel
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=4))
    with pytest.raises(UserError, match="no Linear called all-linear"):
        add_lora(model, 2, 4)


@pytest.mark.parametrize("options", [
    {"target_modules": "all-linear"}, {"target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.1}, {"target_modules": ["o_proj"], "use_rslora": True},
    {"target_modules": ["layers.1.self_attn.q_proj", "layers.1.mlp.up_proj"]}], ids=["all", "names", "rslora", "long names"])
def test_we_read_pefts_adapter(tiny, tmp_path, options):
    from peft import LoraConfig, get_peft_model
    torch.manual_seed(0)
    theirs = get_peft_model(peft_base(tiny), LoraConfig(r=6, lora_alpha=9, task_type="CAUSAL_LM", init_lora_weights=False, **options)).eval()
    theirs.save_pretrained(tmp_path)
    expected = logits_of(theirs)
    assert not torch.equal(expected, logits_of(peft_base(tiny)))
    model = load(tmp_path, lora_r=6)
    assert (logits_of(model) - expected).abs().max() == 0.0
    assert facts(model).source == tiny and not model.lora_settings.fresh and freeze_reference(model)
    plain = load(tmp_path)  # lora_r = 0: merged, and all weights train
    assert (logits_of(plain) - expected).abs().max() < 1e-5 and not adapted_linears(plain) and all(p.requires_grad for p in plain.parameters())
    save_model(plain, tmp_path / "plain")
    assert torch.equal(logits_of(peft_base(tmp_path / "plain")), logits_of(plain))


# ------------------------------------------------------------------------------------------------------- a real model
@pytest.mark.slow
@pytest.mark.skipif(not SMOLLM2.is_dir(), reason="no .real/smollm2")
def test_smollm2_logprobs_and_merge():
    model, tokenizer = load_model(str(SMOLLM2), lora_r=4, lora_target_modules="q_proj,v_proj", device="cpu")
    ids = torch.tensor([tokenizer.encode("Seven sisters sold seashells by the seashore.")])
    mask = torch.ones_like(ids)
    with torch.no_grad():
        exact, ours = full(model, ids, mask, 0.7), token_logprobs(model, ids, mask, 0.7)
        assert all((a - b).abs().max() < 1e-4 for a, b in zip(ours, exact))
        unmerged = logits_of(randomise(model, 0.02), ids)
        with merged(model):
            assert (logits_of(model, ids) - unmerged).abs().max() < 1e-3
        assert torch.equal(logits_of(model, ids), unmerged)


def test_a_name_that_no_linear_has_is_refused(tiny):
    with pytest.raises(UserError, match="no Linear called v_porj; the model has: .*v_proj"):
        load(tiny, lora_r=4, lora_target_modules="q_proj,v_porj")


def test_merging_takes_the_adapter_to_where_the_base_is(tiny):
    """--memory small keeps A and B on the CPU; the meta device stands for a GPU."""
    model = load(tiny, lora_r=4)
    for linear in adapted_linears(model).values():
        linear.weight = torch.nn.Parameter(linear.weight.to("meta"), requires_grad=False)
    with merged(model):
        assert all(linear.weight.is_meta and linear.lora.mode == "merged" for linear in adapted_linears(model).values())


# ---------------------------------------------------------------------------------------- what "all-linear" stands for
def gemma3():
    from transformers import AutoModelForCausalLM, Gemma3Config
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**sizes, "vocab_size": 100, "num_key_value_heads": 1, "head_dim": 16}
    return AutoModelForCausalLM.from_config(Gemma3Config(text_config=text, vision_config={**sizes, "image_size": 28, "patch_size": 14}))


def mixture(family, **extra):
    import transformers
    config = getattr(transformers, f"{family}Config")(
        vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, **extra)
    return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("make, adapted", [
    (gemma3, ALL_LINEAR),
    (partial(mixture, "Qwen2Moe", moe_intermediate_size=16, shared_expert_intermediate_size=16, num_experts=4), ALL_LINEAR),
    (partial(mixture, "Phimoe"), {"q_proj", "k_proj", "v_proj", "o_proj"}),
    (partial(mixture, "Mixtral"), {"q_proj", "k_proj", "v_proj", "o_proj"}),
], ids=["Gemma3 with its vision tower", "Qwen2Moe", "Phimoe", "Mixtral"])
def test_all_linear_is_the_text_layers_without_routers_and_head(make, adapted, tmp_path):
    from peft import LoraConfig, get_peft_model
    model = make()
    add_lora(model, 2, 4)
    names = set(adapted_linears(model))
    assert all(p.requires_grad == (".lora." in name) for name, p in model.named_parameters())
    assert {name.rsplit(".", 1)[-1] for name in names} == adapted
    assert not any("vision" in name or "router" in name or "lm_head" in name for name in names)
    targets = model.lora_settings.peft["target_modules"]
    theirs = get_peft_model(make(), LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=targets))
    found = {name.removeprefix("base_model.model.") for name, module in theirs.named_modules() if hasattr(module, "lora_A")}
    assert found == names  # what is saved names these Linears and no others


def test_a_router_called_gate_gets_no_adapter():
    model = decoders.make("afmoe")
    add_lora(model, 2, 4)
    assert {name.rsplit(".", 1)[-1] for name in adapted_linears(model)} == ALL_LINEAR
    assert isinstance(model.model.layers[2].mlp.router.gate, torch.nn.Linear)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", pytest.param("float16", marks=memory)])
def test_policy_and_reference_are_equal_to_the_bit_before_the_first_update(tiny, tmp_path, dtype):
    """A run that continues from an adapter: both are merged, so KL is 0 at step 0."""
    save_model(randomise(load(tiny, lora_r=4), 0.02), tmp_path)
    model, mask = load(tmp_path, lora_r=4, dtype=dtype), random_mask(IDS)
    frozen = freeze_reference(model)
    with torch.no_grad():
        with merged_to_train(model):
            policy = token_logprobs(model, IDS, mask)[0]
        with reference(model, frozen):
            assert torch.equal(token_logprobs(model, IDS, mask)[0], policy)
        with pytest.raises(RuntimeError, match="leave the block of lora.merged"), merged(model), reference(model, frozen):
            pass


def test_merged_twice_is_merged_once(tiny):
    """rollout merges by itself, also inside a block that has merged already."""
    model = randomise(load(tiny, lora_r=4))
    with merged(model):
        outer = logits_of(model)
        with merged(model):
            assert torch.equal(logits_of(model), outer)
        assert torch.equal(logits_of(model), outer)
    assert all(linear.lora.mode == "beside" and linear.lora.frozen is None for linear in adapted_linears(model).values())


def test_weights_of_the_base_that_a_fork_trains_beside_the_adapter_are_played_merged_and_in_the_reference(tiny, tmp_path):
    """They were in checkpoints, but only --resume read them: agent.py played another policy, and the KL was to the trained norm."""
    ids = torch.arange(3, 63).view(2, 30) * 7 % 700
    mask = torch.ones_like(ids)
    mask[:, 0] = 0

    def total(model):
        with torch.no_grad():
            return token_logprobs(model, ids, mask)[0].sum().item()

    model, tokenizer = load_model(tiny, lora_r=4, device="cpu")
    model.model.norm.weight.requires_grad_(True)
    start, frozen = total(model), freeze_reference(model)
    with torch.no_grad():
        model.model.norm.weight.mul_(1.3)
    trained = total(model)
    assert abs(trained - start) > 5
    with reference(model, frozen):
        assert total(model) == pytest.approx(start, abs=1e-3)
    assert total(model) == trained
    save_model(model, str(tmp_path / "run"))
    tokenizer.save_pretrained(tmp_path / "run")
    for options in ({"train": False}, {"train": False, "merge": True}, {"lora_r": 4}):
        loaded, _ = load_model(str(tmp_path / "run"), device="cpu", **options)
        assert total(loaded) == pytest.approx(trained, abs=1e-3)
