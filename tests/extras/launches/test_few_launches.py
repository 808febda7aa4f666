"""extras/launches: an update in few kernels has core's log-probabilities and gradients.

A GPU is played by the CPU (fake_cuda.py), so that the numbers are real and the operations are those of a GPU.
"""
import bitsandbytes  # noqa: F401  it looks for a GPU when it is imported
import pytest
import torch
from fake_cuda import cuda
from test_dora import DoRA
from test_engine import build, ids_of

import lora
from bench import launches as counting
from bench.gpu_norms import norms_as_on_a_gpu
from core.logprobs import token_logprobs
from extras.fast.loading import speed_up
from extras.launches import attention, pointwise
from extras.launches.adapters import Crew, Fast
from layers import load_model

SEED = torch.Generator()


def batch(device="cpu"):
    ids = torch.tensor([ids_of(24, 1), ids_of(24, 2)])
    mask = torch.ones_like(ids)
    mask[0, :5] = mask[1, :9] = 0
    return ids.to(device), mask.to(device)


def with_adapter(model):
    """Give B numbers that are not 0, the same on every device."""
    SEED.manual_seed(3)
    for linear in lora.adapted_linears(model).values():
        linear.lora.B.data.copy_(0.05 * torch.randn(linear.lora.B.shape, generator=SEED))
    return model


def numbers_of(model, passes=2):
    """Return log-probabilities, and all gradients after so many micro-batches, on the CPU."""
    ids, mask = batch(model.device)
    with lora.merged_to_train(model):
        for i in range(passes):
            logprobs, _ = token_logprobs(model.train(), ids, mask)
            (logprobs * (1 + i)).sum().backward()
    grads = [p.grad.cpu().flatten() for p in model.parameters() if p.requires_grad]
    return logprobs.detach().cpu(), torch.cat(grads)


@pytest.mark.parametrize("memory", ["plain", "checkpoint", "4bit"])
def test_log_probabilities_and_gradients_are_the_cpus(tiny, memory):
    options = {"lora_r": 4, "dtype": "float32", "memory": memory}
    expected = numbers_of(with_adapter(load_model(tiny, **options, device="cpu")[0]))
    with cuda():
        model = with_adapter(load_model(tiny, **options)[0])
        found = numbers_of(model)
        assert all(linear.lora.fleet for linear in lora.adapted_linears(model).values())
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-4)
    assert (found[1] - expected[1]).norm() < 1e-4 * expected[1].norm()


def test_adapters_beside_bfloat16_lose_no_small_update(tiny):
    """The step in the sum of all outputs that an update too small for any single one makes."""
    with cuda():
        model = with_adapter(load_model(tiny, lora_r=4, dtype="bfloat16", memory="4bit")[0])
        linear = lora.adapted_linears(model)["model.layers.0.mlp.up_proj"]
        x = torch.randn(512, linear.in_features, generator=SEED).bfloat16().to(model.device)
        outputs = []
        for scale in (0.0, 2e-4):
            linear.lora.B.data.fill_(scale)
            with lora.merged_to_train(model):
                outputs.append(linear(x).float())
        expected = 2 * 2e-4 * (x.float() @ linear.lora.A.T).sum(-1, keepdim=True).expand_as(outputs[0])
        found = outputs[1] - outputs[0]
        share = (found * expected).sum() / (expected**2).sum()
        assert (found == 0).float().mean() > 0.5 and share.item() == pytest.approx(1, abs=0.1)


def test_a_policy_is_its_own_reference_to_the_bit(tiny):
    """B is 0 at first: an adapter that is switched off rounds as one that adds nothing, with gradients and without."""
    with cuda():
        model = load_model(tiny, lora_r=4, dtype="bfloat16", memory="4bit")[0].train()
        ids, mask = batch(model.device)
        with lora.merged_to_train(model):
            policy, _ = token_logprobs(model, ids, mask)
        with torch.no_grad(), lora.reference(model, None):
            reference, _ = token_logprobs(model, ids, mask)
        assert policy.requires_grad and torch.equal(policy, reference)


def test_merged_weights_are_those_of_each_adapter_alone(tiny, monkeypatch):
    with cuda():
        model = with_adapter(load_model(tiny, lora_r=4, dtype="bfloat16")[0])
        linears = lora.adapted_linears(model)
        assert max(len(linear.lora.crew.linears) for linear in linears.values()) > 1
        merges = []
        monkeypatch.setattr(Crew, "merge", lambda crew, merge=Crew.merge: merges.append(crew) or merge(crew))
        with lora.merged(model):
            together = {name: linear.weight.clone() for name, linear in linears.items()}
        assert len(merges) == len(set(merges)) == len({linear.lora.crew for linear in linears.values()})
        for linear in linears.values():
            linear.lora.crew = None
        with lora.merged(model):
            for name, linear in linears.items():
                # The same random bits: a sum in another order crosses a step of bfloat16 in few places.
                assert (linear.weight != together[name]).float().mean() < 1e-3
                torch.testing.assert_close(linear.weight, together[name], rtol=2**-6, atol=1e-4)


def test_a_merge_after_a_step_is_of_the_new_adapter(tiny):
    with cuda():
        model = with_adapter(load_model(tiny, lora_r=4, dtype="float32")[0])
        first = numbers_of(model, passes=1)[0]
        with_adapter(model)
        for linear in lora.adapted_linears(model).values():
            linear.lora.B.data *= 2
        assert (numbers_of(model, passes=1)[0] - first).abs().max() > 1e-3


@pytest.mark.parametrize("options", [{"dtype": "float16"}, {"kind": DoRA}, {"memory": "small"}])
def test_what_is_left_as_it_is(tiny, options):
    with cuda():
        model = load_model(tiny, lora_r=4, **{"dtype": "float32", **options})[0]
        adapters = [linear.lora for linear in lora.adapted_linears(model).values()]
        assert not any(isinstance(adapter, Fast) and adapter.fleet for adapter in adapters)
        assert numbers_of(with_adapter(model), passes=1)[1].norm() > 0


@pytest.mark.parametrize("name", ["qwen2", "qwen2_sliding", "qwen3", "llama_gqa"])
def test_attention_and_norms_are_the_stock_modules(name, monkeypatch):
    def run(model):
        embedded = model.get_input_embeddings()(torch.tensor([ids_of(13, 1), ids_of(13, 2)])).detach().requires_grad_()
        hidden = model.base_model(inputs_embeds=embedded, use_cache=False).last_hidden_state
        (hidden * torch.arange(hidden.shape[-1])).sum().backward()
        return hidden, embedded.grad

    model = build(name).requires_grad_(False)
    expected = run(model)
    calls = []
    monkeypatch.setattr(attention, "rotated", lambda *x, rotated=attention.rotated: calls.append(1) or rotated(*x))
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    speed_up(model)
    attention.install(model)
    pointwise.install(model)
    with norms_as_on_a_gpu():
        found = run(model)
    assert len(calls) == 4 * model.config.num_hidden_layers
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * b.abs().max().item())


# ------------------------------------------------------------------------------------------ how many they are
@pytest.mark.parametrize("memory, most", [("plain", 2500), ("4bit", 5000)])
def test_an_update_of_half_a_billion_weights_is_few_kernels(tmp_path, memory, most):
    """Eight rows of 1,024 tokens at Qwen2.5-0.5B's shape. They were 7,148 and 12,854, as bench/launches.py counts."""
    folder = counting.write_shape("0.5B", tmp_path)
    assert counting.count(folder, memory, 8, 1024, 512, tracing=False).kernels <= most
