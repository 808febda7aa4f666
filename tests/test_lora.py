"""lora.py: log-probabilities against full logits, LoRA against PEFT, the reference, merging, and what loading refuses."""
import json
import math
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import lora
from experiment.errors import UserError
from llm import loading
from llm.facts import facts
from llm.loading import load_model, newest, save_model
from llm.logprobs import causal_attention, token_logprobs
from llm.merge import merge
from llm.tiny import make_tiny
from lora import adapters, freeze_reference, merged, reference

SMOLLM2 = Path(lora.__file__).parent / ".real" / "smollm2"
IDS = torch.arange(3, 63).view(2, 30) * 7 % 700  # (B, T)
ALL_LINEAR = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Folder of a tiny model."""
    folder = str(tmp_path_factory.mktemp("tiny"))
    model, tokenizer = make_tiny()
    model.save_pretrained(folder), tokenizer.save_pretrained(folder)
    return folder


def load(path, **options):
    return load_model(str(path), device="cpu", **options)[0]


def randomise(model, scale=0.3):
    """An adapter that changes something: B is zero when fresh."""
    generator = torch.Generator().manual_seed(1)
    for linear in adapters(model).values():
        linear.lora.B.data = torch.randn(linear.lora.B.shape, generator=generator) * scale
    return model


def logits_of(model, ids=IDS):
    with torch.no_grad():
        return model(input_ids=ids).logits


def full(model, ids, mask, temperature):
    """log-probability and entropy the plain way: all logits, log_softmax, autograd."""
    logp = F.log_softmax(model(input_ids=ids).logits[:, :-1].float() / temperature, dim=-1)
    logprobs, entropy = logp.gather(2, ids[:, 1:, None])[..., 0], -(logp.exp() * logp).sum(-1)
    return tuple(F.pad(x * mask[:, 1:], (1, 0)) for x in (logprobs, entropy))


def random_mask(ids, seed=0):
    mask = (torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed)) < 0.6).float()
    mask[:, 0] = 0
    return mask


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same_gradients(ours, exact, tolerance=2e-5):
    assert ours.keys() == exact.keys() and ours
    for name in ours:
        assert (ours[name] - exact[name]).abs().max() <= tolerance * exact[name].abs().max().clamp(min=1e-3), name


# --------------------------------------------------------------------------------------------------- log-probabilities
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("lora_r", [0, 4], ids=["full", "lora"])
def test_values_and_gradients_equal_full_logits(tiny, lora_r, temperature):
    model, mask = randomise(load(tiny, lora_r=lora_r)), random_mask(IDS)
    u, v = torch.randn(2, *IDS.shape, generator=torch.Generator().manual_seed(2))
    exact = full(model, IDS, mask, temperature)
    expected = gradients(model, (u * exact[0]).sum() + (v * exact[1]).sum())
    ours = token_logprobs(model, IDS, mask, temperature, chunk_elements=5000)
    for a, b in zip(ours, exact):
        assert a.dtype == torch.float32 and (a - b).abs().max() < 1e-5
    found = gradients(model, (u * ours[0]).sum() + (v * ours[1]).sum())
    same_gradients(found, expected)
    if not lora_r:
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight  # tied: head and embedding in one
        unseen = torch.tensor([i for i in range(700, 770)])  # rows no input touches: their gradient is the head's alone
        assert found["model.embed_tokens.weight"][unseen].abs().max() > 1e-4


@pytest.mark.parametrize("lora_r", [0, 4], ids=["full", "lora"])
@pytest.mark.parametrize("which", [0, 1], ids=["logprobs", "entropy"])
def test_each_output_alone_has_the_gradient_of_autograd(tiny, which, lora_r):
    model, mask = randomise(load(tiny, lora_r=lora_r)), random_mask(IDS)
    expected = gradients(model, full(model, IDS, mask, 0.9)[which].sum())
    same_gradients(gradients(model, token_logprobs(model, IDS, mask, 0.9)[which].sum()), expected)


def test_an_untied_head_gets_its_gradient():
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=700, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
                                         num_attention_heads=2, tie_word_embeddings=False)).eval()
    mask = random_mask(IDS)
    expected = gradients(model, full(model, IDS, mask, 1.0)[0].sum())
    assert "lm_head.weight" in expected
    same_gradients(gradients(model, token_logprobs(model, IDS, mask)[0].sum()), expected)


def test_chunk_size_changes_nothing(tiny):
    model, mask = load(tiny), random_mask(IDS)
    results = []
    for chunk in (1, 778 * 3 + 5, 2**24):
        ours = token_logprobs(model, IDS, mask, 1.3, chunk)
        results.append((*ours, gradients(model, (ours[0] * 2 + ours[1]).sum())))
    for logprobs, entropy, grads in results[1:]:
        assert (logprobs - results[0][0]).abs().max() < 1e-6 and (entropy - results[0][1]).abs().max() < 1e-5
        same_gradients(grads, results[0][2])


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_right_padding_and_batch_mates_change_nothing(tiny, implementation):
    model = load(tiny)
    model.set_attn_implementation(implementation)
    rows = [list(range(5, 5 + n)) for n in (2, 9, 17, 40)]
    for pad in (0, 5, 700):
        ids = torch.tensor([row + [pad] * (40 - len(row)) for row in rows])
        mask = torch.tensor([[0] + [1] * (len(row) - 1) + [0] * (40 - len(row)) for row in rows])
        together = [x.detach() for x in token_logprobs(model, ids, mask)]
        for i, row in enumerate(rows):
            alone = token_logprobs(model, torch.tensor([row]), mask[i:i + 1, :len(row)])
            for a, b in zip(together, alone):
                assert (a[i, :len(row)] - b[0]).abs().max() < 1e-5
                assert not a[i, len(row):].any()


# ------------------------------------------------------------------------------------------------------- shared prefix
def alike(rows=3, prefix=9, width=21):
    """Rows that begin alike, one of them shorter, with tool results in between: ids, mask (rows, width)."""
    ids = torch.randint(3, 700, (rows, width), generator=torch.Generator().manual_seed(3))
    ids[:, :prefix] = ids[0, :prefix]
    mask = random_mask(ids)
    mask[:, :prefix], mask[:, prefix], mask[-1, -4:] = 0, 1, 0
    return ids, mask


def count_tokens(model, ids, mask):
    seen = []
    hook = model.get_input_embeddings().register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].numel()))
    token_logprobs(model, ids, mask)
    hook.remove()
    return sum(seen)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("lora_r", [0, 4], ids=["full", "lora"])
def test_a_shared_prefix_goes_through_once_and_changes_nothing(tiny, lora_r, checkpointing):
    model, (ids, mask) = randomise(load(tiny, lora_r=lora_r)), alike()
    assert facts(model).shares_prefix and count_tokens(model, ids, mask) == 9 + 3 * 12
    exact = full(model, ids, mask, 0.8)
    expected = gradients(model, (exact[0] * ids).sum() + exact[1].sum())
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    ours = token_logprobs(model, ids, mask, 0.8)
    for a, b in zip(ours, exact):
        assert (a - b).abs().max() < 1e-5
    same_gradients(gradients(model, (ours[0] * ids).sum() + ours[1].sum()), expected)


def test_a_packed_row_has_no_mask_of_its_square(tiny):
    """transformers takes restarting positions for a packed batch, and would make (N, N) masks that nobody reads."""
    class Squares(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.dtype == torch.bool:
                masks.append(out.numel())
            return out
    model, masks = load(tiny, lora_r=4), []
    ids, mask = alike(rows=8, prefix=40, width=60)
    with Squares():
        token_logprobs(model, ids, mask)
    assert count_tokens(model, ids, mask) == 40 + 8 * 20 and max(masks) < 100 * 100


def test_the_prefix_ends_where_a_row_is_trained_or_differs(tiny):
    model, (ids, mask) = load(tiny, lora_r=4), alike()
    ids[1, 6] += 1
    assert count_tokens(model, ids, mask) == 6 + 3 * 15
    mask[2, 4] = 1
    assert count_tokens(model, ids, mask) == 4 + 3 * 17
    mask[0, 1] = 1
    assert count_tokens(model, ids, mask) == 3 * 21  # too little to gain


@pytest.mark.parametrize("family, shares", [("Llama", True), ("Mistral", True), ("Gemma3", True), ("Phi3", True),
                                            ("Cohere", True), ("Mamba", False), ("Bloom", False)])
def test_a_family_that_cannot_share_is_found_out(family, shares):
    import transformers
    config = {"Gemma3": "Gemma3TextConfig"}.get(family, f"{family}Config")
    sizes = {"vocab_size": 700, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0}
    if family not in ("Mamba", "Bloom"):
        sizes |= {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, config)(**sizes)).eval()
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask
    AttentionInterface.register("causal_attention", causal_attention)
    AttentionMaskInterface.register("causal_attention", sdpa_mask)
    if family != "Mamba":
        model.set_attn_implementation("causal_attention")
    assert loading._shares_prefix(model) == shares
    if shares:
        facts(model).shares_prefix = True
        ids, mask = alike()
        assert count_tokens(model, ids, mask) < ids.numel()
        assert (token_logprobs(model, ids, mask)[0] - full(model, ids, mask, 1.0)[0]).abs().max() < 1e-4


def test_a_window_shorter_than_the_rows_is_not_shared():
    import transformers
    model = transformers.MistralForCausalLM(transformers.MistralConfig(
        vocab_size=700, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=8)).eval()
    facts(model).shares_prefix, (ids, mask) = True, alike()
    assert count_tokens(model, ids, mask) == ids.numel()


def test_masked_positions_and_column_0_are_zero(tiny):
    model, mask = load(tiny), random_mask(IDS)
    for x in token_logprobs(model, IDS, mask):
        assert (x[mask == 0] == 0).all() and (x[mask == 1] != 0).all()
    for x in token_logprobs(model, IDS, torch.ones_like(IDS)):
        assert (x[:, 0] == 0).all() and (x[:, 1:] != 0).all()
    for kind in (torch.bool, torch.int64, torch.float32):
        assert torch.equal(token_logprobs(model, IDS, mask.to(kind))[0], token_logprobs(model, IDS, mask)[0])


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3", "Llama", "Mistral", "Gemma3", "Phi3", "Cohere", "Gemma2"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_every_family_gives_its_own_logits(family, implementation):
    import transformers
    extra = {"Qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "Mistral": {"sliding_window": 8},
             "Gemma3": {"sliding_window": 8, "head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]},
             "Gemma2": {"sliding_window": 8, "head_dim": 8, "attn_logit_softcapping": 2.0}}.get(family, {})
    if family == "Gemma2" and implementation == "sdpa":
        pytest.skip("transformers' own sdpa leaves Gemma 2's soft-capping out")
    config = getattr(transformers, family + ("TextConfig" if family == "Gemma3" else "Config"))(**{
        "vocab_size": 700, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2,
        "initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "attn_implementation": implementation, **extra})
    torch.manual_seed(0)
    model, mask = getattr(transformers, family + "ForCausalLM")(config).eval(), random_mask(IDS)
    exact = full(model, IDS, mask, 1.0)
    expected = gradients(model, (exact[0] - exact[1]).sum())
    ours = token_logprobs(model, IDS, mask)
    assert all((a - b).abs().max() < 1e-4 for a, b in zip(ours, exact))
    same_gradients(gradients(model, (ours[0] - ours[1]).sum()), expected, 1e-4)
    assert model.config._attn_implementation == implementation


@pytest.mark.parametrize("lora_r", [0, 4], ids=["full", "lora"])
def test_checkpointing_changes_nothing(tiny, lora_r):
    model, mask = randomise(load(tiny, lora_r=lora_r)).train(), random_mask(IDS)
    expected = gradients(model, token_logprobs(model, IDS, mask)[0].sum())
    model.gradient_checkpointing_enable({"use_reentrant": False})
    same_gradients(gradients(model, token_logprobs(model, IDS, mask)[0].sum()), expected)


def test_an_empty_mask_is_zero_and_differentiable(tiny):
    model = load(tiny)
    logprobs, entropy = token_logprobs(model, IDS, torch.zeros_like(IDS))
    assert not logprobs.any() and not entropy.any()
    assert all(not g.any() for g in gradients(model, (logprobs + entropy).sum()).values())


def test_column_t_is_token_t_and_a_mask_shifted_by_one_is_caught(tiny):
    model, mask = randomise(load(tiny, lora_r=4)), torch.zeros_like(IDS)
    mask[:, 11] = 1
    prefix = F.log_softmax(logits_of(model, IDS[:, :11])[:, -1], dim=-1)  # nothing but the tokens before t
    expected = prefix.gather(1, IDS[:, 11:12])[:, 0]
    assert (token_logprobs(model, IDS, mask)[0][:, 11] - expected).abs().max() < 1e-5
    for shift in (-1, 1):
        shifted = token_logprobs(model, IDS, mask.roll(shift, 1))[0]
        assert (shifted[:, 11] == 0).all() and (shifted.sum(1) - expected).abs().max() > 1e-2


class Largest(TorchDispatchMode):
    """The most elements of any tensor made, and of those shaped (..., V), the head's transpose (D, V) not counted."""
    def __init__(self, vocab, width=128):
        super().__init__()
        self.vocab, self.head, self.any, self.logits = vocab, (width, vocab), 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor) and x.dim():
                self.any = max(self.any, x.numel())
                self.logits = max(self.logits, x.numel() if x.shape[-1] == self.vocab and x.shape != self.head else 0)
        return out


@pytest.mark.parametrize("lora_r", [0, 4], ids=["full", "lora"])
def test_no_tensor_of_all_logits_is_ever_made(tiny, lora_r):
    model = load(tiny, lora_r=lora_r)
    vocab = model.config.vocab_size
    ids = torch.randint(0, vocab, (8, 100), generator=torch.Generator().manual_seed(0))
    with Largest(vocab) as seen:
        logprobs, entropy = token_logprobs(model, ids, torch.ones_like(ids), chunk_elements=20 * vocab)
        (logprobs + entropy).sum().backward()
    assert vocab <= seen.logits <= 20 * vocab and seen.any < ids.numel() * vocab
    with Largest(vocab) as seen:  # the instrument itself sees the plain way
        full(model, ids, torch.ones_like(ids), 1.0)
    assert seen.logits >= ids.numel() * vocab


@pytest.mark.parametrize("family", ["Gemma2", "Cohere", "Granite"])
def test_scaled_and_capped_heads(family):
    import transformers
    extra = {"Gemma2": {"final_logit_softcapping": 3.0, "head_dim": 16, "initializer_range": 0.5}, "Cohere": {"logit_scale": 0.25},
             "Granite": {"logits_scaling": 4.0}}[family]
    config = getattr(transformers, family + "Config")(
        vocab_size=700, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, **extra)
    torch.manual_seed(0)
    model, mask = getattr(transformers, family + "ForCausalLM")(config).eval(), random_mask(IDS)
    exact = full(model, IDS, mask, 0.8)
    expected = gradients(model, (exact[0] - exact[1]).sum())
    ours = token_logprobs(model, IDS, mask, 0.8)
    assert all((a - b).abs().max() < 1e-5 for a, b in zip(ours, exact))
    same_gradients(gradients(model, (ours[0] - ours[1]).sum()), expected)
    hidden = model.base_model(input_ids=IDS).last_hidden_state
    plain = model.get_output_embeddings()(hidden)
    assert (plain - model(input_ids=IDS).logits).abs().max() > 1e-2  # the scaling is really there


def test_bf16_logprobs_are_float32_and_gradients_reach_the_float32_masters(tiny):
    model, exact = load(tiny, lora_r=4, dtype="bfloat16"), load(tiny, lora_r=4)
    logprobs, entropy = token_logprobs(model, IDS, random_mask(IDS))
    assert logprobs.dtype == entropy.dtype == torch.float32
    assert (logprobs - token_logprobs(exact, IDS, random_mask(IDS))[0]).abs().max() < 0.1
    grads = gradients(model, logprobs.sum())
    assert grads and all(g.dtype == torch.float32 and torch.isfinite(g).all() for g in grads.values())


# ---------------------------------------------------------------------------------------------------------------- LoRA
def test_only_a_and_b_require_grad_and_the_fresh_adapter_changes_nothing(tiny):
    model = load(tiny, lora_r=4)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {f"{name}.lora.{part}" for name in adapters(model) for part in ("A", "B")}
    assert {name.rsplit(".", 1)[-1] for name in adapters(model)} == ALL_LINEAR
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert torch.equal(logits_of(model), logits_of(load(tiny)))
    assert all(p.requires_grad for p in load(tiny).parameters())


def test_a_is_drawn_like_pefts_and_from_the_seed(tiny):
    a, b, c = (load(tiny, lora_r=8, seed=s) for s in (0, 0, 1))
    for name, linear in adapters(a).items():
        A, bound = linear.lora.A, 1 / math.sqrt(linear.in_features)
        assert A.abs().max() <= bound and abs(A.std() - bound / math.sqrt(3)) < 0.05 * bound and not linear.lora.B.any()
        assert torch.equal(A, adapters(b)[name].lora.A) and not torch.equal(A, adapters(c)[name].lora.A)


def test_a_forward_is_w_x_plus_scale_b_a_x(tiny):
    for rslora, scale in ((False, 12 / 4), (True, 12 / math.sqrt(4))):
        model = randomise(load(tiny, lora_r=4, lora_alpha=12, use_rslora=rslora))
        linear = model.model.layers[1].self_attn.q_proj
        x = torch.randn(3, 128)
        expected = F.linear(x, linear.weight + scale * linear.lora.B @ linear.lora.A, linear.bias)
        assert linear.lora.scale == scale and (linear(x) - expected).abs().max() < 1e-5
    assert load(tiny, lora_r=4).model.layers[0].mlp.up_proj.lora.scale == 2.0  # default: alpha = 2 r


@pytest.mark.parametrize("targets, names", [
    ("q_proj,v_proj", {"q_proj", "v_proj"}), ("q_proj, v_proj", {"q_proj", "v_proj"}), (["up_proj"], {"up_proj"}), ("down_proj", {"down_proj"}),
    (r".*\.(k|o)_proj", {"k_proj", "o_proj"}), ("all-linear", ALL_LINEAR), ("mlp.up_proj", {"up_proj"}),
    ("model.layers.2.mlp.up_proj", {"up_proj"})])
def test_target_modules(tiny, targets, names):
    model = load(tiny, lora_r=2, lora_target_modules=targets)
    found = adapters(model)
    assert {name.rsplit(".", 1)[-1] for name in found} == names
    assert len(found) == (1 if "layers.2" in str(targets) else 4 * len(names)) and not hasattr(model.lm_head, "lora")


def test_an_unknown_target_lists_the_names(tiny):
    with pytest.raises(UserError, match="w_query") as error:
        load(tiny, lora_r=2, lora_target_modules="w_query")
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
    assert len(found) == 2 * len(adapters(model))


def test_merged_is_nothing_without_an_adapter(tiny):
    model = load(tiny)
    before = logits_of(model)
    with merged(model):
        assert torch.equal(logits_of(model), before)


def test_training_goes_on_after_merged(tiny):
    model, mask = randomise(load(tiny, lora_r=4)), random_mask(IDS)
    expected = gradients(model, token_logprobs(model, IDS, mask)[0].sum())
    with merged(model), torch.inference_mode():
        model(input_ids=IDS)
    same_gradients(gradients(model, token_logprobs(model, IDS, mask)[0].sum()), expected, 0)


# ----------------------------------------------------------------------------------------------------------- reference
def train_steps(model, steps=3):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(steps):
        token_logprobs(model, IDS, random_mask(IDS))[0].sum().neg().backward()
        optimizer.step()
        optimizer.zero_grad()


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
    with torch.no_grad(), merged(model, update=True):
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
    model = randomise(load(tiny, lora_r=4))
    with reference(model, freeze_reference(model)):
        assert torch.equal(logits_of(model), logits_of(load(tiny)))


# ---------------------------------------------------------------------------------------------------------------- PEFT
def peft_base(tiny):
    from transformers import AutoModelForCausalLM
    return AutoModelForCausalLM.from_pretrained(tiny).eval()


@pytest.mark.parametrize("options", [
    {"lora_r": 4}, {"lora_r": 3, "lora_alpha": 7, "use_rslora": True}, {"lora_r": 4, "lora_target_modules": "q_proj,v_proj", "lora_dropout": 0.1},
    {"lora_r": 4, "lora_target_modules": r".*layers\.[02]\.mlp\.(up|down)_proj"}], ids=["all", "rslora", "names", "regex"])
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
    assert torch.equal(logits_of(load(tmp_path, lora_r=4)), expected)  # and so do we
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == tiny


@pytest.mark.parametrize("options", [
    {"target_modules": "all-linear"}, {"target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.1}, {"target_modules": ["o_proj"], "use_rslora": True},
    {"target_modules": r".*layers\.1\.(self_attn\.q_proj|mlp\.up_proj)"}], ids=["all", "names", "rslora", "regex"])
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
    assert (logits_of(load(tmp_path)) - expected).abs().max() < 1e-5  # lora_r = 0: merged, and all weights train


# ---------------------------------------------------------------------------------------------------- saving and merging
def test_merge_writes_a_plain_folder(tiny, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer
    model = randomise(load(tiny, lora_r=4))
    save_model(model, tmp_path / "adapter")
    merge(str(tmp_path / "adapter"), str(tmp_path / "plain"))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain").eval()
    assert (logits_of(plain) - logits_of(model)).abs().max() < 1e-5
    assert AutoTokenizer.from_pretrained(tmp_path / "plain").chat_template
    assert not (tmp_path / "plain" / "adapter_config.json").exists()
    assert not any("lora" in key for key in load_file(tmp_path / "plain" / "model.safetensors"))
    assert plain.config.use_cache  # what we set for training is not written into other people's models
    assert torch.equal(logits_of(load(tmp_path / "plain")), logits_of(plain))


def test_full_model_round_trip(tiny, tmp_path):
    model, tokenizer = load_model(tiny, device="cpu")
    train_steps(model, 1)
    save_model(model, tmp_path), tokenizer.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))
    assert torch.equal(logits_of(again), logits_of(model))


def test_weights_that_train_are_not_rounded_on_the_way_in(tiny):
    exact, model = load(tiny), load(tiny, dtype="auto")  # lora_r = 0: nothing is frozen
    assert all(torch.equal(p, q) for p, q in zip(exact.parameters(), model.parameters(), strict=True))
    with pytest.raises(UserError, match="--dtype is for weights that stay as they are; give --lora_r"):
        load(tiny, dtype="bfloat16")


@pytest.mark.parametrize("source", ["tiny", "folder"])
def test_bf16_leaves_the_rope_frequencies_in_float32(tiny, source):
    model = load(tiny if source == "folder" else "tiny", lora_r=2, dtype="bfloat16")
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(model.model.rotary_emb.inv_freq, load(tiny).model.rotary_emb.inv_freq)
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}


def output_folder(tiny, folder):
    """An output folder as a run leaves it: base/ and two checkpoints."""
    shutil.copytree(tiny, folder / "base")
    model = load(folder / "base", lora_r=4)
    for step in (5, 10):
        randomise(model, scale=step / 20)
        save_model(model, folder / "checkpoints" / f"step_{step:06d}")
    return model


def test_an_output_folder_is_its_newest_checkpoint_and_can_be_moved(tiny, tmp_path):
    model = output_folder(tiny, tmp_path / "run")
    (tmp_path / "run" / "config.yaml").write_text("seed: 1\n")
    assert newest(str(tmp_path / "run")).endswith("step_000010")
    assert torch.equal(logits_of(load(tmp_path / "run", lora_r=4)), logits_of(model))
    shutil.move(tmp_path / "run", tmp_path / "elsewhere")
    moved = load(tmp_path / "elsewhere", lora_r=4)
    assert torch.equal(logits_of(moved), logits_of(model)) and "elsewhere" in facts(moved).source
    assert not torch.equal(logits_of(load(tmp_path / "elsewhere" / "checkpoints" / "step_000005", lora_r=4)), logits_of(model))


# ------------------------------------------------------------------------------------------------------ what is refused
def edit_json(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def adapter_of(tiny, folder):
    save_model(randomise(load(tiny, lora_r=4)), folder)
    return folder


def missing(tiny, folder):
    return folder / "nowhere"


def empty(tiny, folder):
    return folder


def pickle_only(tiny, folder):
    shutil.copytree(tiny, folder / "m")
    (folder / "m" / "model.safetensors").unlink()
    (folder / "m" / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    return folder / "m"


def no_weights(tiny, folder):
    shutil.copytree(tiny, folder / "m")
    (folder / "m" / "model.safetensors").unlink()
    return folder / "m"


def no_template(tiny, folder):
    shutil.copytree(tiny, folder / "m")
    (folder / "m" / "chat_template.jinja").unlink()
    return folder / "m"


def no_tokenizer(tiny, folder):
    peft_base(tiny).save_pretrained(folder / "m")
    return folder / "m"


def long_tokenizer(tiny, folder):
    shutil.copytree(tiny, folder / "m")
    tokenizer = make_tiny()[1]
    tokenizer.add_tokens([f"<extra_{i}>" for i in range(300)])
    tokenizer.save_pretrained(folder / "m")
    return folder / "m"


def corrupt(tiny, folder):
    shutil.copytree(tiny, folder / "m")
    data = (folder / "m" / "model.safetensors").read_bytes()
    (folder / "m" / "model.safetensors").write_bytes(data[:len(data) // 2])
    return folder / "m"


def incomplete(tiny, folder):
    shutil.copytree(tiny, folder / "m")
    tensors = load_file(folder / "m" / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "m" / "model.safetensors", metadata={"format": "pt"})
    return folder / "m"


def not_finite(tiny, folder):
    shutil.copytree(tiny, folder / "m")
    tensors = load_file(folder / "m" / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = math.nan
    save_file(tensors, folder / "m" / "model.safetensors", metadata={"format": "pt"})
    return folder / "m"


def unknown_head(tiny, folder):
    """HyperCLOVAX multiplies by what Granite divides by, under the same name."""
    from transformers import HyperCLOVAXConfig, HyperCLOVAXForCausalLM
    shutil.copytree(tiny, folder / "m")
    HyperCLOVAXForCausalLM(HyperCLOVAXConfig(vocab_size=2000, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                                             num_key_value_heads=2, logits_scaling=3.0)).save_pretrained(folder / "m")
    return folder / "m"


def broken_config(tiny, folder):
    shutil.copytree(tiny, folder / "m")
    (folder / "m" / "config.json").write_text("{")
    return folder / "m"


def unknown_model(tiny, folder):
    shutil.copytree(tiny, folder / "m")
    edit_json(folder / "m" / "config.json", model_type="no_such_model")
    return folder / "m"


def peft_adapter(**options):
    def make(tiny, folder):
        from peft import LoraConfig, get_peft_model
        get_peft_model(peft_base(tiny), LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], **options)).save_pretrained(folder)
        return folder
    return make


def wrong_shape(tiny, folder):
    edit_json(adapter_of(tiny, folder) / "adapter_config.json", r=8)
    return folder


def missing_tensor(tiny, folder):
    edit_json(peft_adapter()(tiny, folder) / "adapter_config.json", target_modules=["q_proj", "v_proj"])
    return folder


def spare_tensor(tiny, folder):
    edit_json(adapter_of(tiny, folder) / "adapter_config.json", target_modules=["q_proj"])
    return folder


def broken_adapter_config(tiny, folder):
    (adapter_of(tiny, folder) / "adapter_config.json").write_text('{"r": 4,')
    return folder


def corrupt_adapter(tiny, folder):
    (adapter_of(tiny, folder) / "adapter_model.safetensors").write_bytes(b"\0" * 100)
    return folder


def base_gone(tiny, folder):
    edit_json(adapter_of(tiny, folder) / "adapter_config.json", base_model_name_or_path="/gone/model")
    return folder


def prompt_tuning(tiny, folder):
    edit_json(adapter_of(tiny, folder) / "adapter_config.json", peft_type="PROMPT_TUNING")
    return folder


@pytest.mark.parametrize("make, says", [
    (missing, "no such folder"), (empty, "no config.json"), (pickle_only, "pytorch_model.bin is pickle; convert to safetensors"),
    (no_weights, "no .safetensors"), (no_template, "no chat template"), (no_tokenizer, "no chat template"), (long_tokenizer, "tokenizer has 1078 tokens, model 778"),
    (corrupt, "cannot be loaded"), (incomplete, "model.layers.1.mlp.up_proj.weight"), (broken_config, "cannot be loaded"), (not_finite, "not finite"), (unknown_head, "HyperCLOVAXForCausalLM scales its logits"),
    (unknown_model, "cannot be loaded"), (peft_adapter(use_dora=True), "use_dora"), (peft_adapter(bias="all"), "bias"),
    (peft_adapter(rank_pattern={"q_proj": 2}), "rank_pattern"), (peft_adapter(modules_to_save=["lm_head"]), "modules_to_save"),
    (peft_adapter(init_lora_weights="pissa"), "pissa"), (wrong_shape, "needs (8, "), (missing_tensor, "v_proj.lora_A is missing"),
    (spare_tensor, "no place"), (broken_adapter_config, "adapter_config.json"), (corrupt_adapter, "adapter_model.safetensors"),
    (base_gone, "/gone/model: no such folder"), (prompt_tuning, "only plain LoRA")])
def test_refusals_are_one_line_that_names_the_place(tiny, tmp_path, make, says):
    path = make(tiny, tmp_path)
    vocab, tokens = (len(make_tiny()[1]) + extra for extra in (0, 300))
    with pytest.raises(UserError) as error:
        load(path, lora_r=4)
    message = str(error.value)
    assert says.replace("1078", str(tokens)).replace("778", str(vocab)) in message and "\n" not in message
    assert str(tmp_path) in message or make is base_gone


def test_a_hub_id_without_a_network_answers_in_seconds(monkeypatch):
    import huggingface_hub
    calls = []

    def no_network(*_, **__):
        calls.append(1)
        raise ConnectionError("[Errno -2] Name or service not known")

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(huggingface_hub, "model_info", no_network)
    began = time.time()
    with pytest.raises(UserError, match="nobody/no-such-model: cannot be loaded") as error:
        load("nobody/no-such-model")
    assert calls and time.time() - began < 10 and "\n" not in str(error.value)


def test_a_hub_id_whose_tokenizer_is_not_cached_yet_goes_to_the_hub(tiny, monkeypatch):
    import huggingface_hub
    from transformers import AutoModelForCausalLM
    asked, real = [], AutoModelForCausalLM.from_pretrained
    tokenizer = make_tiny()[1]

    def read_tokenizer(source, **where):
        if where:
            raise UserError("no tokenizer in the cache")
        return tokenizer

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda source, **options: real(tiny, **options))
    monkeypatch.setattr(loading, "_read_tokenizer", read_tokenizer)
    monkeypatch.setattr(huggingface_hub, "model_info", lambda *_, **__: asked.append(1))
    assert load_model("some/model", device="cpu")[1] is tokenizer and asked


def test_the_command_line_says_what_is_wrong(tmp_path):
    import subprocess
    import sys
    out = subprocess.run([sys.executable, lora.__file__, "merge", str(tmp_path), str(tmp_path / "out")], capture_output=True, text=True)
    assert out.returncode == 2 and out.stderr.startswith("lora.py: ") and len(out.stderr.splitlines()) == 1


# ---------------------------------------------------------------------------------------------------------------- tiny
@pytest.fixture(scope="module")
def tokenizer():
    return make_tiny()[1]


@pytest.fixture(scope="module")
def reopened(tiny):
    return load_model(tiny, device="cpu")[1]


def test_tiny_is_small_and_repeatable():
    (a, _), (b, _), (c, _) = make_tiny(), make_tiny(), make_tiny(1)
    assert 0.7e6 < sum(p.numel() for p in a.parameters()) < 1e6
    assert torch.equal(logits_of(a), logits_of(b)) and not torch.equal(logits_of(a), logits_of(c))
    state = torch.random.get_rng_state()
    make_tiny(3)
    assert torch.equal(state, torch.random.get_rng_state())


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.text())
def test_tiny_round_trips_any_text(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize("text", ["", "  a  ,b .", "\r\n\u2028\u0301", "e\u0301 é", "👩‍👩‍👧‍👦 שלום", "x" * 500, " " * 10**4, "<tool_call>{}</tool_call>"])
def test_tiny_round_trips_hard_text(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.text(st.characters(codec="utf-8")) | st.text("x +-/(=\n7190{}\"_a", max_size=40))
def test_tiny_read_from_its_folder_splits_as_it_did(reopened, tokenizer, text):
    """transformers gives some model types their own splitting rules when it opens a folder (Qwen2's, for one)."""
    assert reopened.encode(text) == tokenizer.encode(text)


def test_tiny_digits_and_control_tokens(tokenizer):
    for digit in "0123456789-":
        assert len(tokenizer.encode(digit)) == 1
        inside = tokenizer.tokenize(f"x{digit}x")  # a digit never melts into a word
        assert inside == ["x", digit, "x"]
    ids = [tokenizer.convert_tokens_to_ids(t) for t in
           ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<tools>", "</tools>")]
    assert ids[:3] == [0, 1, 2] and len(set(ids)) == len(ids) and None not in ids
    assert tokenizer.eos_token_id == 2 and tokenizer.pad_token_id == 0
    assert tokenizer.encode("<|im_start|><tool_call></tool_call><|im_end|>") == [1, ids[3], ids[4], 2]
    specials = set(tokenizer.all_special_ids)
    assert specials == {0, 2} and not specials & set(ids[3:])  # <tool_call> survives skip_special_tokens


def test_tiny_template_renders_a_tool_conversation(tokenizer):
    tool = {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object", "properties": {"a": {}, "b": {}}}}}
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": "1", "b": "2"}}}
    messages = [{"role": "user", "content": "1+2?"}, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "3"},
                {"role": "tool", "content": "4"}, {"role": "assistant", "content": "3"}]
    text = tokenizer.apply_chat_template(messages, tools=[tool], tokenize=False)
    assert "add(a, b)" in text and '<tool_call>\n{"name": "add", "arguments": {"a": "1", "b": "2"}}\n</tool_call><|im_end|>' in text
    assert text.count("<tool_response>") == 2 and text.count("<|im_start|>user") == 2  # results of one turn share one message
    assert text.count("<|im_start|>") == text.count("<|im_end|>") == 5
    opened = tokenizer.apply_chat_template(messages, tools=[tool], tokenize=False, add_generation_prompt=True)
    assert opened == text + "<|im_start|>assistant\n"


# ------------------------------------------------------------------------------------------------------- a real model
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


def test_rows_that_are_alike_and_train_nothing_go_through(tiny):
    """Masked whole and identical, as a collapsed policy's truncated episodes are: the shared prefix would be all of them."""
    ids = torch.arange(5, 13).repeat(2, 1)
    logprobs, entropy = token_logprobs(load(tiny, lora_r=4), ids, torch.zeros_like(ids))
    assert not logprobs.any() and not entropy.any()


def test_a_name_that_no_linear_has_is_refused(tiny):
    with pytest.raises(UserError, match="no Linear called v_porj; the model has: .*v_proj"):
        load(tiny, lora_r=4, lora_target_modules="q_proj,v_porj")


@pytest.mark.parametrize("target, says", [("base", "is not empty; give a new folder"), ("a_file/x", "cannot write there")])
def test_merge_overwrites_nothing(tmp_path, target, says):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").touch()
    (tmp_path / "a_file").touch()
    done = subprocess.run([sys.executable, lora.__file__, "merge", "nowhere", str(tmp_path / target)], capture_output=True, text=True)
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_dropout_is_the_flag_s_whatever_the_adapter_was_trained_with(tiny, tmp_path, dropout):
    save_model(load(tiny, lora_r=4, lora_dropout=0.3), tmp_path)
    model = load(str(tmp_path), lora_r=4, lora_dropout=dropout)
    assert {linear.lora.dropout for linear in adapters(model).values()} == {dropout}


def test_merging_takes_the_adapter_to_where_the_base_is(tiny):
    """--memory small keeps A and B on the CPU; the meta device stands for a GPU."""
    model = load(tiny, lora_r=4)
    for linear in adapters(model).values():
        linear.weight = torch.nn.Parameter(linear.weight.to("meta"), requires_grad=False)
    with merged(model):
        assert all(linear.weight.is_meta and linear.lora.base is not None for linear in adapters(model).values())
