"""extras/memory/techniques.py: every setting of the dial trains, and none of them changes the gradients of the weights it keeps."""
import json

import pytest
import torch
from memory_helpers import CHECKPOINT, FOUR_BIT, IDS, gradients, load, same
from saving import save_tiny

import grpo
from layers import LayerFlags, load_model
from core.config import UserError
from merge import merge
from extras.memory.techniques import SETTINGS, Techniques, techniques, techniques_of
from extras.memory.quantization import Int8Embedding, Linear4bit
from core.model import adamw
from lora import adapted_linears


def plain_model_of(model, folder):
    """Return the plain model with an adapter whose base has the weights that the quantized model stands for."""
    plain = load(folder)
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, Linear4bit):
                plain.get_submodule(name).weight.copy_(module.dequantize(torch.float32))
        embedding = model.get_input_embeddings()
        if isinstance(embedding, Int8Embedding):
            plain.get_input_embeddings().weight.copy_(embedding.table.dequantize(slice(None), "cpu"))
    return plain


@pytest.mark.parametrize("memory, reference, tolerance", [
    ("checkpoint", "plain", 2e-5), ("4bit", None, 2e-5), ("small", None, 1e-4), ("stream", "small", 0)])
def test_no_setting_changes_a_gradient(tiny, memory, reference, tolerance):
    """Compared with the plain model of the same weights; streaming, with the same techniques without it: bit-equal."""
    model = load(tiny, memory)
    expected = load(tiny, reference) if reference else plain_model_of(model, tiny)
    same(gradients(expected), gradients(model), tolerance)


@pytest.mark.parametrize("memory", SETTINGS)
def test_every_setting_trains(tiny, memory):
    model = load(tiny, memory)
    optimizer = adamw(model, lr=1e-2)
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(gradients(model)[0].mul(torch.linspace(-1, 1, IDS.numel()).view(IDS.shape)).sum())
        optimizer.step()
    assert losses[2] < losses[1] < losses[0]
    assert all(not torch.equal(before[name], p) for name, p in model.named_parameters() if p.requires_grad)


def test_each_setting_adds_to_the_one_before_it():
    steps = list(SETTINGS.values())
    for smaller, larger in zip(steps[1:], steps):
        assert all(now or not before for before, now in zip(larger[:-1], smaller[:-1])) and smaller != larger
    assert [setting.decode_rows for setting in steps] == [128, 128, 128, 32, 32]


def test_the_flags_are_the_settings():
    assert LayerFlags.__dataclass_fields__["memory"].metadata["choices"] == tuple(SETTINGS)


def test_the_standard_flags_switch_their_technique_on():
    assert techniques("plain", gradient_checkpointing=True) == SETTINGS["checkpoint"]
    assert techniques("plain", True, True) == SETTINGS["4bit"]
    assert techniques("plain", load_in_4bit=True) == Techniques(load_in_4bit=True)
    assert techniques("stream", True, True) == SETTINGS["stream"]


def test_the_model_knows_its_techniques(tiny):
    assert techniques_of(load(tiny, "small")) == SETTINGS["small"]
    assert techniques_of(load(tiny, load_in_4bit=True)) == Techniques(load_in_4bit=True)


@pytest.mark.parametrize("options, flag", [
    ({"memory": "4bit"}, "--memory 4bit"), ({"memory": "small"}, "--memory small"), ({"memory": "stream"}, "--memory stream"),
    ({"load_in_4bit": True}, "--load_in_4bit"), ({"memory": "checkpoint", "load_in_4bit": True}, "--load_in_4bit")])
def test_frozen_weights_need_an_adapter(tiny, options, flag):
    with pytest.raises(UserError, match=f"{flag.split()[-1]}.*--lora_r"):
        load(tiny, lora_r=0, **options)
    load_model(tiny, device="cpu", train=False, **options)  # To be played, no adapter is needed.


@pytest.mark.parametrize("chosen", [Techniques(stream_layers=True), Techniques(offload_activations=True)], ids=["stream", "offload"])
def test_what_recomputes_switches_checkpointing_on(tiny, chosen):
    same(gradients(load(tiny, chosen)), gradients(load(tiny, CHECKPOINT)), 0)
    assert techniques_of(load(tiny, chosen)) == chosen._replace(gradient_checkpointing=True)


# ---------------------------------------------------------------------------------------------------------- end to end
ENVIRONMENT = '''
from itertools import count
episodes = count()


class Lottery:
    def reset(self, **_):
        self.prize = float(next(episodes) % 3)
        return "Talk."

    def say(self, word: str) -> str:
        """Say a word.

        Args:
            word: it
        """
        return word

    def get_reward(self) -> float:
        return self.prize

    @staticmethod
    def _tasks(split, n, seed):
        return [{}] * 4
'''


def test_grpo_on_four_bits_trains_saves_reloads_and_merges(tmp_path):
    from transformers import AutoModelForCausalLM
    base, environment = save_tiny(tmp_path / "base"), tmp_path / "lottery.py"
    environment.write_text(ENVIRONMENT)
    result = grpo.train(grpo.Config(
        model_path=base, env=f"{environment}:Lottery", output_dir=str(tmp_path / "grpo"), tasks_per_step=2, group_size=3, max_steps=2, eval_tasks=0,
        max_tokens=160, max_new_tokens=16, learning_rate=1e-2, kl_coef=0.1, memory="small"))
    assert result["steps"] == 2
    lines = [json.loads(line) for line in (tmp_path / "grpo" / "metrics.jsonl").read_text().splitlines()]
    assert all(abs(line["first_ratio"] - 1) < 1e-3 and line["sampler_gap"] < 1e-4 for line in lines)  # unmerged in both
    played = load_model(str(tmp_path / "grpo"), train=False, device="cpu")[0]  # on the base that it was trained on
    trained = load_model(str(tmp_path / "grpo"), lora_r=16, device="cpu")[0]
    assert all(sum(isinstance(m, Linear4bit) for m in model.modules()) == 28 for model in (played, trained))
    assert any(linear.lora.B.abs().max() > 0 for linear in adapted_linears(trained).values())
    whole = load_model(str(tmp_path / "grpo"), device="cpu")[0]  # all weights train from there, in float32
    assert {(type(m).__name__, m.weight.dtype, m.weight.requires_grad) for m in whole.modules() if isinstance(m, torch.nn.Linear)} == {("Linear", torch.float32, True)}
    merge(str(tmp_path / "grpo"), str(tmp_path / "merged"))
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto").eval()
    assert stock.dtype == torch.float32 and not any("lora" in name for name in stock.state_dict())
    with torch.no_grad():
        expected, merged_into_base = (m(input_ids=IDS).logits.float().log_softmax(-1) for m in (played, stock.float()))
        original = AutoModelForCausalLM.from_pretrained(base).eval()
        for name, linear in adapted_linears(trained).items():
            original.get_submodule(name).weight += linear.lora.scale * (linear.lora.B @ linear.lora.A)
        merged_into_original = original(input_ids=IDS).logits.log_softmax(-1)
    assert (expected - merged_into_base).abs().mean() < 0.2 * (expected - merged_into_original).abs().mean()


def test_merged_leaves_four_bits_as_they_are(tiny):
    from lora import merged, reference
    model = load(tiny, FOUR_BIT)
    weights = [linear.weight.clone() for linear in adapted_linears(model).values()]
    outside = gradients(model)
    model.zero_grad()
    with merged(model):
        inside = gradients(model)
        with torch.inference_mode():
            logits = model.eval()(input_ids=IDS).logits
        assert all(linear.lora.cast for linear in adapted_linears(model).values())  # cast once while decoding
        with pytest.raises(RuntimeError, match="leave the block of lora.merged"), reference(model, None):
            pass
        model.zero_grad()
        same(outside, gradients(model), 0)  # those of A and B, not of what was cast
    same(outside, inside, 0)
    with torch.inference_mode():
        assert torch.equal(logits, model(input_ids=IDS).logits)
        next(iter(adapted_linears(model).values())).lora.B.mul_(2)
        assert not torch.equal(logits, model(input_ids=IDS).logits)  # outside nothing is kept
    assert all(torch.equal(a, linear.weight) for a, linear in zip(weights, adapted_linears(model).values()))
