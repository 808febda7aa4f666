"""token_logprobs against full logits, for every family; rows that begin alike share their prefix."""
from contextlib import nullcontext

import pytest
import torch
from lora_helpers import IDS, alike, full, gradients, load, logits_of, random_mask, randomise, same_gradients
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from extras.fast.attention import causal_attention
from extras.memory.checkpointing import checkpoint_layers
from core.logprobs import token_logprobs
from core.model import facts
from extras.models.probe import probe
from lora import merged


# --------------------------------------------------------------------------------------------------- log-probabilities
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("lora_r", [0, 4], ids=["full", "lora"])
def test_values_and_gradients_equal_full_logits(tiny, lora_r, temperature, monkeypatch):
    monkeypatch.setattr("core.logprobs.CHUNK", 5000)
    model, mask = randomise(load(tiny, lora_r=lora_r)), random_mask(IDS)
    u, v = torch.randn(2, *IDS.shape, generator=torch.Generator().manual_seed(2))
    exact = full(model, IDS, mask, temperature)
    expected = gradients(model, (u * exact[0]).sum() + (v * exact[1]).sum())
    ours = token_logprobs(model, IDS, mask, temperature)
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


@pytest.mark.parametrize("lora_r, entropy_coef, runs", [(4, 0, 1), (4, 0.1, 3), (0, 0, 3)])
def test_the_backward_pass_runs_the_head_again_only_where_it_must(tiny, monkeypatch, lora_r, entropy_coef, runs):
    """For the entropy's gradient or the head's own, in halves of a chunk, which has all 58 tokens here."""
    model, calls = load(tiny, lora_r=lora_r), []
    model.get_output_embeddings().register_forward_hook(lambda *_: calls.append(1))
    monkeypatch.setattr("core.logprobs.CHUNK", 58 * model.config.vocab_size)
    logprobs, entropy = token_logprobs(model, IDS, torch.ones_like(IDS))
    (logprobs + entropy_coef * entropy).sum().backward()
    assert len(calls) == runs


def test_an_untied_head_gets_its_gradient():
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=700, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
                                         num_attention_heads=2, tie_word_embeddings=False)).eval()
    mask = random_mask(IDS)
    expected = gradients(model, full(model, IDS, mask, 1.0)[0].sum())
    assert "lm_head.weight" in expected
    same_gradients(gradients(model, token_logprobs(model, IDS, mask)[0].sum()), expected)


def test_chunk_size_changes_nothing(tiny, monkeypatch):
    model, mask = load(tiny, lora_r=0), random_mask(IDS)
    results = []
    for chunk in (1, 778 * 3 + 5, 2**24):
        monkeypatch.setattr("core.logprobs.CHUNK", chunk)
        ours = token_logprobs(model, IDS, mask, 1.3)
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


def test_what_follows_the_last_trained_token_does_not_go_through(tiny):
    model, mask = load(tiny), random_mask(IDS)
    mask[:, 22:], mask[0, 22] = 0, 1
    assert count_tokens(model, IDS, mask) == 2 * 23


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
    probe(model, family)
    assert facts(model).shares_prefix == shares
    if shares:
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


# -------------------------------------------------------------------------------------------------------- hidden states
def value_head(width):
    head = torch.nn.Linear(width, 1, bias=False)
    torch.nn.init.normal_(head.weight, std=0.1, generator=torch.Generator().manual_seed(4))
    return head


def value_gradients(model, head, values, logprobs, weights):
    """Return the gradients of a loss of values and log-probabilities: of the adapter and of the head."""
    head.zero_grad()
    found = gradients(model, ((values - 1) ** 2 * weights).sum() + (logprobs * weights).sum())
    return found, {name: p.grad.clone() for name, p in head.named_parameters()}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("lora_r", [0, 4], ids=["full", "lora"])
def test_hidden_states_feed_a_value_head_as_stock_ones_do(tiny, lora_r, checkpointing):
    """With a shared prefix. Column t holds what token t is predicted from."""
    model, (ids, mask) = randomise(load(tiny, lora_r=lora_r)), alike()
    head, weights = value_head(model.config.hidden_size), mask * torch.linspace(0.5, 1, mask.numel()).view(mask.shape)
    assert facts(model).shares_prefix
    stock = F.pad(model.base_model(input_ids=ids).last_hidden_state[:, :-1], (0, 0, 1, 0)) * mask[..., None]
    expected = value_gradients(model, head, head(stock)[..., 0], full(model, ids, mask, 0.8)[0], weights)
    if checkpointing:
        checkpoint_layers(model)
        model.train()
    logprobs, entropy, hidden = token_logprobs(model, ids, mask, 0.8, return_hidden=True)
    assert hidden.dtype == torch.float32 and (hidden - stock).abs().max() < 1e-4
    assert all(torch.equal(a, b) for a, b in zip((logprobs, entropy), token_logprobs(model, ids, mask, 0.8)))
    for ours, exact in zip(value_gradients(model, head, head(hidden)[..., 0], logprobs, weights), expected):
        same_gradients(ours, exact)


@pytest.mark.parametrize("scale", [1, 2**-10])
@pytest.mark.parametrize("merges", [False, True], ids=["beside", "merged"])
def test_a_value_head_gets_its_gradients_in_float16(tiny, merges, scale):
    """Also small ones, which without a scale would be lost below 6e-8: of the adapter and of the head."""
    found = []
    for dtype in ("float32", "float16"):
        model, (ids, mask) = randomise(load(tiny, lora_r=4, dtype=dtype), 0.02), alike()
        head = value_head(model.config.hidden_size)
        with merged(model) if merges else nullcontext():
            logprobs, _, hidden = token_logprobs(model, ids, mask, return_hidden=True)
            assert hidden.dtype == torch.float32
            found.append(value_gradients(model, head, head(hidden)[..., 0], logprobs * 0, mask * scale / mask.sum()))
    for exact, ours in zip(*found):
        assert ours.keys() == exact.keys()
        for name in ours:
            assert (ours[name] - exact[name]).norm() <= 0.02 * exact[name].norm(), name


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
    model = load(tiny, lora_r=0)
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
def test_no_tensor_of_all_logits_is_ever_made(tiny, lora_r, monkeypatch):
    model = load(tiny, lora_r=lora_r)
    vocab = model.config.vocab_size
    ids = torch.randint(0, vocab, (8, 100), generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr("core.logprobs.CHUNK", 20 * vocab)
    with Largest(vocab) as seen:
        logprobs, entropy = token_logprobs(model, ids, torch.ones_like(ids))
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
    with torch.no_grad():  # the softmax of the logits is in float32, where one in bfloat16 would be off by 0.01
        stock, ours = full(model, IDS, random_mask(IDS), 0.8), token_logprobs(model, IDS, random_mask(IDS), 0.8)
    assert all((a - b).abs().mean() < 1e-3 for a, b in zip(ours, stock))
    grads = gradients(model, logprobs.sum())
    assert grads and all(g.dtype == torch.float32 and torch.isfinite(g).all() for g in grads.values())


def test_rows_that_are_alike_and_train_nothing_go_through(tiny):
    """Masked whole and identical, as a collapsed policy's truncated episodes are: the shared prefix would be all of them."""
    ids = torch.arange(5, 13).repeat(2, 1)
    logprobs, entropy = token_logprobs(load(tiny, lora_r=4), ids, torch.zeros_like(ids))
    assert not logprobs.any() and not entropy.any()
