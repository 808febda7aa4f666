"""extras/memory against core: the log-probabilities and gradients of lora.load_model, to a stated rounding.

Where the weights are held in fewer bits, core has the model whose weights are rounded to what these bits stand for.
"""
import pytest
import torch
from memory_helpers import gradients, load, same
from transformers import AutoModelForCausalLM

import lora
from core.tiny import make_tiny
from extras.memory import SETTINGS, Techniques
from extras.memory.quantization import round_weights

# Relative, of log-probabilities, entropies and gradients: sums in another order. An embedding in int8 is float32 here.
ROUNDING = 2e-5
PLAIN = Techniques(recompute_pointwise=False)


def of_core(folder, **options):
    """The model that core alone loads, with the adapter of `memory_helpers.load`."""
    model, _ = lora.load_model(str(folder), device="cpu", lora_r=4, **options)
    generator = torch.Generator().manual_seed(1)
    for linear in lora.adapted_linears(model).values():
        linear.lora.B.data = torch.randn(linear.lora.B.shape, generator=generator) * 0.1
    return model


def rounded(tiny, folder, forms):
    """The folder of the model whose weights are what these forms of them stand for."""
    model = AutoModelForCausalLM.from_pretrained(tiny)
    round_weights(model, forms)
    model.save_pretrained(folder), make_tiny()[1].save_pretrained(folder)
    return folder


@pytest.mark.parametrize("memory", SETTINGS)
def test_every_setting_has_core_s_logprobs_and_gradients(tiny, tmp_path, memory):
    forms = ",".join(form for name, form in (("load_in_4bit", "nf4"), ("int8_head", "int8")) if getattr(SETTINGS[memory], name))
    core = of_core(rounded(tiny, tmp_path, forms) if forms else tiny)
    same(gradients(core), gradients(load(tiny, memory)), ROUNDING)


def test_merged_weights_give_core_s_gradients_too(tiny):
    results = []
    for model in (of_core(tiny), load(tiny)):
        with lora.merged_to_train(model):
            results.append(gradients(model))
    same(*results, ROUNDING)


@pytest.mark.parametrize("chosen", [PLAIN, PLAIN._replace(gradient_checkpointing=True)], ids=["nothing", "layers run again"])
def test_what_runs_the_same_kernels_differs_by_attention_alone(tiny, chosen):
    """Log-probabilities of one row, which core sends through transformers' attention, within a float32 rounding."""
    core, ours = gradients(of_core(tiny)), gradients(load(tiny, chosen))
    assert (core[0] - ours[0]).abs().max() < 1e-5 and (core[1] - ours[1]).abs().max() < 1e-5


def test_a_fork_s_kind_keeps_its_methods_beside_every_technique(tiny):
    class Louder(lora.Adapter):
        def forward(self, linear, x, output):
            return super().forward(linear, x, output) * 2
    model = load(tiny, "stream", kind=Louder)
    kinds = {type(linear.lora) for linear in lora.adapted_linears(model).values()}
    assert len(kinds) == 1 and issubclass(kinds.pop(), Louder)
    assert not any(linear.lora.mergeable for linear in lora.adapted_linears(model).values())


def test_core_says_which_layer_an_adapter_of_quantized_weights_needs(tiny, tmp_path):
    from core import save_model
    save_model(load(tiny, "4bit"), tmp_path)
    with pytest.raises(ValueError, match="an adapter of weights in nf4 needs extras/memory"):
        lora.load_model(str(tmp_path), lora_r=4, device="cpu")
