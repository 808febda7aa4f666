"""The models that people fine-tune today: the engine, the gradients, two steps and the adapter's file, each against stock transformers in float32."""
import json
import random

import bandit
import decoders
import pytest
import torch

import grpo
import lora
from llm import load_model
from llm.engine import Engine, Row
from llm.logprobs import token_logprobs
from llm.memory import Techniques, facts
from llm.probe import probe
from llm.quantization import Int8Embedding, Int8Head, Linear4bit
from llm.tiny import make_tiny
from lora import adapters, add_lora, merged

FAMILIES = """llama qwen2 qwen3 qwen3_moe qwen3_5 qwen3_5_moe qwen3_next gemma2 gemma3 gemma3n gemma4 lfm2 lfm2_moe lfm3 granite granitemoehybrid smollm3
olmo3 phi3 ministral3 gpt_oss deepseek_v3 glm4 nemotron_h falcon_h1 mamba2 kimi_linear minimax ernie4_5 hunyuan_v1_dense hunyuan_v1_moe bamba olmo_hybrid""".split()
VOCAB = 96


def without_limit(model):
    """Nemotron-H: transformers' step of one token leaves this limit out, so that its own decoding is 1e-3 off its own forward."""
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (0.0, float("inf"))


def adapted(family):
    """A random model with an adapter that changes it, prepared as `load_model` does."""
    model = decoders.make(family)
    decoders.use_causal_attention(model)
    without_limit(model)
    add_lora(model, 2, 4)
    probe(model, family)
    for linear in adapters(model).values():
        linear.lora.B.data.normal_(std=0.05, generator=torch.Generator().manual_seed(1))
    return model


def stock(family, model):
    """The model of transformers alone, with the adapter of `model` in its weights."""
    plain = decoders.make(family)
    without_limit(plain)
    for name, linear in adapters(model).items():
        weight = plain.get_submodule(name).weight
        weight.data = linear.lora.effective_weight(weight.data)
    return plain


def ids_of(n, seed):
    return random.Random(seed).choices(range(3, VOCAB), k=n)


def play(model, slots=3, limit=5):
    """Eight episodes of up to three turns: two groups, single prompts, ragged tool results, one of a single token.

    Returns {row: [(ids before the turn, the turn, its log-probabilities) of each turn]}.
    """
    rng = random.Random(0)
    engine = Engine(model, slots=slots, stop_ids=set(range(0, VOCAB, 11)), temperature=1.0)
    prompts = [ids_of(n, n) for n in (9, 9, 14, 1, 2)]
    rows = [Row(prompts[i], group=i, seed=10 * i + j, limit=limit) for i, size in enumerate((3, 1, 2, 1, 1)) for j in range(size)]
    seen = {row: list(row.pending) for row in rows}
    turns = {row: [] for row in rows}
    due = []
    engine.add(rows)
    while engine.busy or due:
        for row in engine.step() if engine.busy else []:
            turns[row].append((list(seen[row]), list(row.turn), list(row.logprobs)))
            seen[row] += row.turn
            if len(turns[row]) == 3:
                engine.release(row)
            else:
                due.append((engine.clock + rng.randrange(4), row))
        for item in [item for item in due if item[0] <= engine.clock or not engine.busy]:
            due.remove(item)
            ids = ids_of(rng.choice([1, 1, 4, 7]), rng.random())
            seen[item[1]] += ids
            engine.extend(item[1], ids, limit)
    return turns


@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_samples_under_stock_transformers_distribution(family):
    model = adapted(family)
    assert not facts(model).refuses_engine
    with merged(model):
        turns = play(model)
    plain = stock(family, model)
    worst = 0.0
    for row, played in turns.items():
        assert len(played) == 3
        before, turn, _ = played[-1]
        with torch.no_grad():
            logp = plain(input_ids=torch.tensor([before + turn]), use_cache=False).logits[0].log_softmax(-1)
        for before, turn, logprobs in played:
            at = range(len(before) - 1, len(before) - 1 + len(turn))
            worst = max(worst, (logp[at, turn] - torch.tensor(logprobs)).abs().max().item())
    assert worst < 3e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_the_adapter_are_stock_autograds(family):
    """Three rows that begin alike, padded on the right, in one batch, against one row after the other without padding."""
    model = adapted(family)
    head = ids_of(6, 0)
    rows = [head + ids_of(n, n) for n in (9, 5, 2)]
    ids = torch.tensor([row + [0] * (15 - len(row)) for row in rows])
    mask = torch.tensor([[0] * 6 + [1] * (len(row) - 6) + [0] * (15 - len(row)) for row in rows])
    weight = torch.randn(ids.shape, generator=torch.Generator().manual_seed(0))
    names, parameters = zip(*((name, p) for name, p in model.named_parameters() if p.requires_grad))
    logprobs, _ = token_logprobs(model, ids, mask)
    ours = torch.autograd.grad((logprobs * weight).sum(), parameters)
    plain = stock(family, model)
    plain.requires_grad_(False)
    linears = {name: plain.get_submodule(name) for name in adapters(model)}
    for linear in linears.values():
        linear.weight.requires_grad_()
    total = 0
    for row, row_weight in zip(rows, weight):
        logp = plain(input_ids=torch.tensor([row]), use_cache=False).logits[0, 5:-1].log_softmax(-1)
        total = total + (logp.gather(1, torch.tensor(row[6:])[:, None])[:, 0] * row_weight[6:len(row)]).sum()
    grads = torch.autograd.grad(total, [linear.weight for linear in linears.values()], allow_unused=True, materialize_grads=True)
    theirs = []
    for name, grad in zip(linears, grads):  # of W + scale B A
        lora = adapters(model)[name].lora
        theirs += [lora.scale * lora.B.T @ grad, lora.scale * grad @ lora.A.T]
    ours, theirs = (torch.cat([grad.detach().flatten() for grad in grads]) for grads in (ours, theirs))
    limit = 3e-4 if family == "qwen3_next" else 3e-5  # float32: stock itself is 1e-4 from float64 in Qwen3-Next
    assert (ours - theirs).norm() / theirs.norm() < limit


def save_wrapped(family, text_family, wrapper, folder):
    """Write a random model with a vision tower, and the tiny model's tokenizer. Returns the wrapper."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    tokenizer = make_tiny()[1]
    text = decoders.make(text_family).config.get_text_config()
    text.vocab_size = text.vocab_size_per_layer_input = len(tokenizer)
    config = CONFIG_MAPPING[family](text_config=text.to_dict(), vision_config={})
    for name in ("depth", "num_hidden_layers"):
        if hasattr(config.vision_config, name):
            setattr(config.vision_config, name, 1)
    for name in ("hidden_size", "out_hidden_size", "intermediate_size"):
        if hasattr(config.vision_config, name):
            setattr(config.vision_config, name, 32)
    config.vision_config.num_heads = config.vision_config.num_attention_heads = config.vision_config.num_key_value_heads = 2
    config.vision_config.head_dim = 16
    config.audio_config = None
    with torch.random.fork_rng():
        model = decoders.filled(getattr(transformers, wrapper)._from_config(config, dtype=torch.float32).eval())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


@pytest.mark.parametrize("family, text_family, wrapper", [
    ("qwen3_5", "qwen3_5", "Qwen3_5ForConditionalGeneration"), ("gemma4", "gemma4", "Gemma4ForConditionalGeneration"),
    ("gemma3", "gemma3", "Gemma3ForConditionalGeneration"), ("mistral3", "ministral3", "Mistral3ForConditionalGeneration")])
def test_a_model_published_with_a_vision_tower_loads_as_a_text_model(family, text_family, wrapper, tmp_path):
    """Also one tensor at a time, where the names in the file are not the model's; and in 4 bits."""
    whole = save_wrapped(family, text_family, wrapper, tmp_path)
    ids = torch.arange(3, 19)[None]
    with torch.no_grad():
        expected = whole(input_ids=ids).logits
    for memory in ("plain", Techniques(stream_layers=True)):
        model, _ = load_model(str(tmp_path), lora_r=2, memory=memory, device="cpu")
        assert not facts(model).refuses_engine and not any("vision" in name for name in adapters(model))
        with torch.no_grad():
            assert (model(input_ids=ids).logits - expected).abs().max() < 1e-4
    for memory in ("4bit", "small"):
        model, _ = load_model(str(tmp_path), lora_r=2, memory=memory, device="cpu")
        assert not facts(model).refuses_engine


def save_text(family, folder, **options):
    """Write a random model of a family with the tiny model's tokenizer and vocabulary."""
    tokenizer = make_tiny()[1]
    options["vocab_size"] = len(tokenizer)
    if family.startswith(("gemma3n", "gemma4")):
        options["vocab_size_per_layer_input"] = len(tokenizer)
    model = decoders.make(family, **options)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


# PEFT 0.21 reads the names of dense and shared MLPs as the experts of these: only adapters beside attention go there.
ATTENTION_IN_PEFT = {"deepseek_v3": "q_b_proj,kv_b_proj,o_proj", "qwen3_next": "q_proj,k_proj,in_proj_qkvz,out_proj", "hunyuan_v1_moe": "q_proj,v_proj,o_proj"}


@pytest.mark.parametrize("family", FAMILIES)
def test_two_steps_of_grpo_and_the_adapter_in_peft(family, tmp_path):
    """The first ratio is 1, the adapter learns, and PEFT computes with its file what we do."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM
    save_text(family, tmp_path / "base")
    grpo.train(grpo.Config(
        model_path=str(tmp_path / "base"), env=bandit.ENV, output_dir=str(tmp_path / "run"), tasks_per_step=2, group_size=4, batch_size=4, max_steps=2,
        lora_target_modules=ATTENTION_IN_PEFT.get(family, "all-linear"), eval_tasks=0, max_new_tokens=12, max_tokens=200, lora_r=2, learning_rate=1e-2, dtype="float32", entropy_coef=0.1))
    with open(tmp_path / "run" / "metrics.jsonl") as file:
        metrics = [json.loads(line) for line in file]
    assert len(metrics) == 2 and abs(metrics[0]["first_ratio"] - 1) < 1e-3 and metrics[0]["sampler_gap"] < 1e-4
    folder = tmp_path / "run" / "checkpoints" / "step_000002"
    ours, _ = load_model(str(folder), lora_r=2, device="cpu")
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32).eval(), folder)
    assert {name.replace("base_model.model.", "") for name, module in theirs.named_modules() if hasattr(module, "lora_A")} == set(adapters(ours))
    ids = torch.arange(3, 19)[None]
    with torch.no_grad():
        logits, expected = ours(input_ids=ids).logits, theirs(input_ids=ids).logits
    assert (logits - expected).abs().max() < 1e-4
    with lora.merged(ours), torch.no_grad():
        assert (ours(input_ids=ids).logits - expected).abs().max() < 1e-4
    with theirs.disable_adapter(), torch.no_grad():
        assert (theirs(input_ids=ids).logits - expected).abs().max() > 1e-3


def gradients_of(model):
    """Return log-probabilities, and the gradients of an adapter that changes something, one behind the other."""
    for linear in adapters(model).values():
        linear.lora.B.data.normal_(std=0.05, generator=torch.Generator().manual_seed(1))
    ids = torch.arange(3, 63).view(2, 30)
    logprobs, _ = token_logprobs(model.train(), ids, torch.ones_like(ids))
    (logprobs * torch.linspace(-1, 1, ids.numel()).view(ids.shape)).sum().backward()
    return logprobs.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])


def plain_model_of(model, folder):
    """Return the plain model with the weights that a quantized one stands for. All others are those of the file."""
    plain, _ = load_model(folder, lora_r=2, device="cpu")
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, Linear4bit):
                plain.get_submodule(name).weight.copy_(module.dequantize(torch.float32))
            elif isinstance(module, Int8Embedding | Int8Head):
                plain.get_submodule(name).weight.copy_(module.table.dequantize(slice(None), "cpu"))
    return plain


@pytest.mark.parametrize("family, memory", [
    # experts that the file holds one by one, joined convolutions, shared keys and values, weights read past their forward, tuples
    *((family, "small") for family in "qwen3_moe deepseek_v3 hunyuan_v1_moe kimi_linear gemma3n gemma4 gpt_oss lfm2_moe mamba2 bamba".split()),
    ("qwen3_5", "4bit"), ("gemma2", "4bit"), ("nemotron_h", "4bit"), ("gemma4", "checkpoint"), ("bamba", "checkpoint")])
def test_memory_techniques_change_no_gradient(family, memory, tmp_path):
    """Of the weights that they keep. Experts are read in their order, 10 after 9."""
    save_text(family, tmp_path, **({"num_experts": 12} if family == "qwen3_moe" else {}))
    model, _ = load_model(str(tmp_path), lora_r=2, memory=memory, device="cpu")
    assert not facts(model).refuses_engine  # the probe has compared training and decoding
    logprobs, grads = gradients_of(model)
    expected, expected_grads = gradients_of(plain_model_of(model, str(tmp_path)))
    assert (logprobs - expected).abs().max() < 1e-3 and (grads - expected_grads).norm() < 1e-3 * expected_grads.norm()


@pytest.mark.parametrize("family", ["qwen3_5", "gemma4", "qwen3_moe"])
def test_streaming_changes_no_bit(family, tmp_path):
    save_text(family, tmp_path)
    small, stream = (gradients_of(load_model(str(tmp_path), lora_r=2, memory=memory, device="cpu")[0]) for memory in ("small", "stream"))
    assert torch.equal(small[0], stream[0]) and torch.equal(small[1], stream[1])
