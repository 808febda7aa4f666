"""pointwise.py against the stock modules of transformers: numbers, gradients, what is kept; packed weights while decoding."""
import pytest
import torch
from test_engine import build, complete
from test_fused import OTHERS, OURS, adapted

from extras.memory import pointwise
from extras.fast.fused import fits, packs_bfloat16
from core.model import facts
from layers import load_model
from core.logprobs import token_logprobs
from lora import adapted_linears, is_adapted, merged
from extras.memory.adapter import recomputable


def batch(vocab, rows=3, width=11):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocab, (rows, width), generator=generator)
    ids[:, :4] = ids[0, :4]
    mask = torch.ones_like(ids)
    mask[:, :4] = 0
    return ids, mask


def stock(model):
    for module in model.modules():
        if not is_adapted(module):
            vars(module).pop("forward", None)
    return model


def gradients(model, share=False):
    facts(model).shares_prefix = share
    if share:
        model.set_attn_implementation("causal_attention")
    ids, mask = batch(model.config.vocab_size)
    with merged(model):
        logprobs, entropy = token_logprobs(model, ids, mask)
        (logprobs * torch.arange(11) + entropy).sum().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    model.zero_grad()
    return logprobs.detach(), found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OURS)
def test_numbers_are_the_stock_modules_and_so_are_gradients(name, dtype):
    model = adapted(name)
    for n, p in model.named_parameters():  # norms are born as 1
        p.data = p.data if ".lora." in n else (p.data + 0.1 * torch.randn_like(p)).to(dtype)
    plain, wanted = gradients(model)
    pointwise.install(model)
    ours, found = gradients(model)
    assert torch.equal(ours, plain)
    for n, p in wanted.items():
        assert (found[n] - p).norm() <= (1e-5 if dtype == torch.float32 else 0.03) * p.norm(), n


@pytest.mark.parametrize("shape", [(3, 7, 64), (2, 5, 4, 16), (1, 64)])
def test_norm_by_pieces_and_of_any_layout(shape, monkeypatch):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    monkeypatch.setattr(pointwise, "CPU_PIECE", 128)
    module = LlamaRMSNorm(shape[-1], 1e-3).requires_grad_(False)
    module.weight.data.normal_()
    for x in (torch.randn(shape), torch.randn(shape[::-1]).movedim(0, -1)):
        x = [x.detach().requires_grad_() for _ in range(2)]
        weight = torch.randn(x[0].shape).transpose(0, 1).contiguous().transpose(0, 1)
        outs = [module(x[0]), pointwise.norm(module, None, x[1])]
        for out in outs:
            (out * weight).sum().backward()
        torch.testing.assert_close(*outs, rtol=1e-6, atol=1e-6)  # strided sums are taken in another order
        assert torch.equal(recomputable[outs[1]](), outs[1])
        torch.testing.assert_close(x[0].grad, x[1].grad, rtol=1e-5, atol=1e-6)


def test_gradients_by_differences():
    gate, up = (torch.randn(5, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(pointwise._SwiGLU.apply, (gate, up))


@pytest.mark.parametrize("name", OTHERS)
def test_other_families_stay_as_they_are(name):
    model = build(name)
    pointwise.install(model)
    assert not any("forward" in vars(m) for m in model.modules())


def test_another_activation_and_norms_that_train_keep_the_stock_forward():
    from transformers import LlamaConfig, LlamaForCausalLM
    model = LlamaForCausalLM(LlamaConfig(vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
                                         hidden_act="gelu")).eval()
    ids, mask = batch(40)
    plain = token_logprobs(model, ids, mask)[0]
    pointwise.install(model)
    ours = token_logprobs(model, ids, mask)[0]
    assert torch.equal(ours, plain) and "forward" not in vars(model.model.layers[0].mlp)
    ours.sum().backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if "norm" in n)


def kept(model):
    """Bytes that a forward pass keeps for its backward pass, weights apart."""
    seen, own = {}, {p.untyped_storage().data_ptr() for p in model.parameters()}
    def note(t):
        seen[t.untyped_storage().data_ptr()] = t.untyped_storage()  # held, so that no address comes twice
        return t
    ids, mask = batch(model.config.vocab_size, 4, 200)
    with merged(model):
        own |= {p.untyped_storage().data_ptr() for p in model.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            out = token_logprobs(model, ids, mask)  # noqa: F841
    return sum(s.nbytes() for at, s in seen.items() if at not in own)


def test_much_less_is_kept():
    model = adapted("llama_gqa").to(torch.bfloat16)
    before = kept(model)
    pointwise.install(model)
    assert kept(model) < 0.75 * before


def test_attention_keeps_its_inputs_alone():
    """Nothing that grows with the square of the length is kept on a CPU."""
    model, _ = load_model("tiny", lora_r=2)
    sizes = []
    for width in (100, 400):
        ids = torch.zeros(1, width, dtype=torch.long)
        biggest = [0]
        def note(t):
            biggest[0] = max(biggest[0], t.numel())
            return t
        own = {p.numel() for p in model.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            out = model.base_model(input_ids=ids, use_cache=False).last_hidden_state  # noqa: F841
        sizes.append(biggest[0])
    assert sizes[1] <= max(4 * sizes[0], *own)


# ---------------------------------------------------------------------------------------------- packed while decoding
@pytest.mark.skipif(not packs_bfloat16(torch.device("cpu")), reason="oneDNN has no layout for bfloat16 on this CPU")
def test_merged_weights_are_packed_and_dropped_then_the_base_returns():
    model = adapted("qwen2").to(torch.bfloat16)
    before = {n: linear.weight.detach().clone() for n, linear in adapted_linears(model).items()}
    with merged(model):
        first = complete(model, [[1, 2, 3]], group_size=4, max_new_tokens=6)
        assert all(linear.weight.numel() == 0 for linear in adapted_linears(model).values())
        assert complete(model, [[1, 2, 3]], group_size=4, max_new_tokens=6) == first  # a second Engine
        stock_forward = model(input_ids=torch.tensor([[1, 2, 3]])).logits  # merges what it needs again
    with merged(model):
        assert torch.equal(model(input_ids=torch.tensor([[1, 2, 3]])).logits, stock_forward)
    assert all(torch.equal(before[n], linear.weight) for n, linear in adapted_linears(model).items())
    for linear in adapted_linears(model).values():
        linear.lora.B.data.neg_()
    with merged(model):  # other weights, other packs
        other = complete(model, [[1, 2, 3]], group_size=4, max_new_tokens=6)
    assert other != first
    assert not fits(model)  # not merged


def test_weights_without_an_adapter_stay():
    model = build("qwen2").to(torch.bfloat16)
    complete(model, [[1, 2, 3]], max_new_tokens=3)
    assert all(p.numel() for p in model.parameters())
