"""The models that people fine-tune today: the engine, the gradients, two steps and the adapter's file, each against stock transformers in float32."""
import json
import random

import bandit
import decoders
import pytest
import torch

import grpo
import lora
from core.config import UserError
from layers import load_model, make_engine
from core.model import save_model
from core.engine import Row
from core.logprobs import token_logprobs
from extras.fast.loading import speed_up
from extras.memory.techniques import FOUR_BIT, PLAIN, Techniques
from core.model import facts
from extras.memory.reading import Reader
from extras.models.probe import probe
from extras.memory.quantization import Int8Embedding, Int8Head, Linear4bit
from core.tiny import make_tiny
from lora import adapted_linears, add_lora, merged

FAMILIES = """llama qwen2 qwen3 qwen3_moe qwen3_5 qwen3_5_moe qwen3_next gemma2 gemma3 gemma3n gemma4 lfm2 lfm2_moe lfm3 granite granitemoehybrid smollm3
olmo3 phi3 ministral3 gpt_oss deepseek_v3 glm4 nemotron_h falcon_h1 mamba2 kimi_linear minimax ernie4_5 hunyuan_v1_dense hunyuan_v1_moe bamba olmo_hybrid""".split()
KINDS = """llama qwen3 qwen3_moe qwen3_5 qwen3_next gemma3 gemma3n gemma4 lfm2_moe lfm3 granitemoehybrid phi3 gpt_oss deepseek_v3 nemotron_h falcon_h1
mamba2 minimax hunyuan_v1_moe""".split()  # one of each kind of layer
VOCAB = 96


def some(*kept):
    """All families, of which the others are slow tests."""
    return [pytest.param(family, marks=[pytest.mark.slow] * (family not in kept)) for family in FAMILIES]


def without_limit(model):
    """Nemotron-H: transformers' step of one token leaves this limit out, so that its own decoding is 1e-3 off its own forward."""
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (0.0, float("inf"))


def adapted(family):
    """A random model with an adapter that changes it, prepared as `load_model` does."""
    model = decoders.make(family)
    speed_up(model)
    without_limit(model)
    add_lora(model, 2, 4)
    probe(model, family)
    for linear in adapted_linears(model).values():
        linear.lora.B.data.normal_(std=0.05, generator=torch.Generator().manual_seed(1))
    return model


def stock(family, model, dtype=torch.float32):
    """The model of transformers alone, with W + scale B A of the adapters of `model` as its weights."""
    plain = decoders.make(family).to(dtype)
    without_limit(plain)
    for name, linear in adapted_linears(model).items():
        weight, lora = plain.get_submodule(name).weight, linear.lora
        if dtype == torch.float64:
            weight.data += lora.scale * lora.B.data.double() @ lora.A.data.double()
        else:
            weight.data = lora.effective_weight(weight.data)
    return plain


def ids_of(n, seed):
    return random.Random(seed).choices(range(3, VOCAB), k=n)


def play(model, slots=3, limit=5):
    """Eight episodes of up to three turns: two groups, single prompts, ragged tool results, one of a single token.

    Returns {row: [(ids before the turn, the turn, its log-probabilities) of each turn]}.
    """
    rng = random.Random(0)
    engine = make_engine(model, tokens=100, slots=slots, stop_ids=set(range(0, VOCAB, 11)), temperature=1.0)
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


@pytest.mark.parametrize("family", some(*KINDS))
def test_the_engine_samples_under_stock_transformers_distribution(family):
    model = adapted(family)
    assert not facts(model).refuses_engine
    with merged(model):
        turns = play(model)
    exact = stock(family, model, torch.float64)
    exact.set_experts_implementation("eager")
    logprobs = torch.tensor([x for played in turns.values() for _, _, numbers in played for x in numbers])
    expected = stock_logprobs(exact, turns)
    assert (logprobs - expected).abs().max() < (stock_logprobs(decoders.off_by_rounding(exact), turns) - expected).abs().max()


@torch.no_grad()
def stock_logprobs(plain, turns):
    """Those of all turns of `play`, by transformers alone."""
    values = []
    for played in turns.values():
        assert len(played) == 3
        before, turn, _ = played[-1]
        logp = plain(input_ids=torch.tensor([before + turn]), use_cache=False).logits[0].log_softmax(-1)
        values += [logp[range(len(before) - 1, len(before) - 1 + len(turn)), turn] for before, turn, _ in played]
    return torch.cat(values)


@pytest.mark.parametrize("family", ["lfm2", "mamba2"])
def test_rows_that_begin_together_do_not_see_the_states_of_those_before_them(family):
    model = adapted(family)
    with merged(model):
        engine = make_engine(model, tokens=100, slots=2, stop_ids=set(), temperature=1.0)

        def turns(*prompts):
            rows = [Row(ids, group=i, seed=i, limit=3) for i, ids in enumerate(prompts)]
            engine.add(rows)
            while engine.busy:
                engine.step()
            for row in rows:
                engine.release(row)
            return [row.logprobs for row in rows]

        first = turns(ids_of(9, 0), ids_of(9, 1))
        turns(ids_of(9, 2), ids_of(9, 3))
        assert turns(ids_of(9, 0), ids_of(9, 1)) == first


@pytest.mark.parametrize("family, kind", [("phi3", "longrope"), ("llama", "longrope"), ("llama", "dynamic")])
def test_rope_whose_frequencies_change_with_the_length_is_sampled_up_to_there(family, kind):
    """Beyond, the keys of the cache would have been turned by other frequencies than stock transformers turns them by."""
    rope = {"longrope": {"original_max_position_embeddings": 64, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
            "dynamic": {"factor": 2.0}}[kind]
    sizes = {"longrope": {"original_max_position_embeddings": 64}, "dynamic": {"max_position_embeddings": 64}}[kind]  # Phi-3's config says it twice
    model = decoders.make(family, rope_parameters={"rope_type": kind, "rope_theta": 10000.0, **rope}, **sizes)
    assert make_engine(model, tokens=64, slots=1)
    with pytest.raises(UserError, match=f"--max_tokens 65: give at most 64; beyond, this model .{kind} RoPE. encodes all positions"):
        make_engine(model, tokens=65, slots=1)


@pytest.mark.parametrize("family", ["glm4_moe", "nemotron_h", "kimi_linear", "ernie4_5_moe"])
def test_what_transformers_keeps_in_float32_stays_so_beside_4_bit_weights(family, tmp_path):
    """The bias of a router, rounded to bfloat16, would send tokens to other experts than those of the plain model."""
    save_text(family, tmp_path)
    plain, quantized = (Reader(chosen)(str(tmp_path), torch.bfloat16, torch.device("cpu"), 0)[0] for chosen in (PLAIN, FOUR_BIT))
    tensors = quantized.state_dict()
    exact = {name: p for name, p in plain.state_dict().items() if p.dtype == torch.float32}
    assert exact and all(torch.equal(tensors[name], p) for name, p in exact.items())


HEAD = ids_of(6, 0)
ROWS = [HEAD + ids_of(n, n) for n in (9, 5, 2)]  # three rows that begin alike
WEIGHT = torch.randn(3, 15, generator=torch.Generator().manual_seed(0))


def our_gradients(model):
    """Of the weighted log-probabilities of the rows, in one batch that is padded on the right."""
    ids = torch.tensor([row + [0] * (15 - len(row)) for row in ROWS])
    mask = torch.tensor([[0] * 6 + [1] * (len(row) - 6) + [0] * (15 - len(row)) for row in ROWS])
    logprobs, _ = token_logprobs(model, ids.to(model.device), mask.to(model.device))
    grads = torch.autograd.grad((logprobs.cpu() * WEIGHT).sum(), [p for p in model.parameters() if p.requires_grad])
    return torch.cat([grad.double().flatten() for grad in grads])


def stock_gradients(plain, model):
    """The same by transformers and autograd alone, one row after the other without padding."""
    plain.requires_grad_(False)
    weights = {name: plain.get_submodule(name).weight.requires_grad_() for name in adapted_linears(model)}
    total = 0
    for row, row_weight in zip(ROWS, WEIGHT):
        logp = plain(input_ids=torch.tensor([row]), use_cache=False).logits[0, 5:-1].log_softmax(-1)
        total = total + (logp.gather(1, torch.tensor(row[6:])[:, None])[:, 0] * row_weight[6:len(row)]).sum()
    grads = torch.autograd.grad(total, list(weights.values()), allow_unused=True, materialize_grads=True)
    pieces = []
    for name, grad in zip(weights, grads):  # of W + scale B A
        lora = adapted_linears(model)[name].lora
        A, B = lora.A.data.double(), lora.B.data.double()
        pieces += [lora.scale * B.T @ grad.double(), lora.scale * grad.double() @ A.T]
    return torch.cat([piece.flatten() for piece in pieces])


@pytest.mark.parametrize("family", some(*KINDS))
def test_gradients_of_the_adapter_are_stock_autograds(family):
    """In float64 to 1e-6 (the log-softmax is in float32), and in float32 as far as weights that are off by its rounding of their sums move them.

    That is 5e-6 for most families and 1e-3 for Qwen3-Next, on every processor. All experts in one kernel have no float64.
    """
    model = adapted(family)
    exact = stock(family, model, torch.float64)
    exact.set_experts_implementation("eager")
    expected = stock_gradients(exact, model)
    rounding = (stock_gradients(decoders.off_by_rounding(exact), model) - expected).norm()
    assert (our_gradients(model) - expected).norm() < rounding
    model.to(torch.float64).set_experts_implementation("eager")
    assert (our_gradients(model) - expected).norm() / expected.norm() < 1e-6


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
    ("gemma3", "gemma3", "Gemma3ForConditionalGeneration"), ("mistral3", "ministral3", "Mistral3ForConditionalGeneration"),
    ("qwen3_5_moe", "qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"), ("lfm2_vl", "lfm2", "Lfm2VlForConditionalGeneration")])
def test_a_model_published_with_a_vision_tower_loads_as_a_text_model(family, text_family, wrapper, tmp_path):
    """Also one tensor at a time, where the names in the file are not the model's; and in 4 bits. Gemma 3n's tower needs the package timm."""
    whole = save_wrapped(family, text_family, wrapper, tmp_path)
    ids = torch.arange(3, 19)[None]
    with torch.no_grad():
        expected = whole(input_ids=ids).logits
    for memory in ("plain", Techniques(stream_layers=True)):
        model, _ = load_model(str(tmp_path), lora_r=2, memory=memory, device="cpu")
        assert not facts(model).refuses_engine and not any("vision" in name for name in adapted_linears(model))
        with torch.no_grad():
            assert (model(input_ids=ids).logits - expected).abs().max() < 1e-4
    for memory in ("4bit", "small"):
        model, _ = load_model(str(tmp_path), lora_r=2, memory=memory, device="cpu")
        assert not facts(model).refuses_engine


@pytest.mark.parametrize("targets", [["q_proj", "up_proj"], r".*language_model.*\.(q_proj|up_proj)"], ids=["names", "pattern"])
def test_an_adapter_that_peft_trained_beside_the_vision_tower_is_read(targets, tmp_path):
    """Unsloth and TRL load such a model with its tower. Its Linears are then called model.language_model.layers..."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForImageTextToText
    save_wrapped("qwen3_5", "qwen3_5", "Qwen3_5ForConditionalGeneration", tmp_path / "base")
    whole = AutoModelForImageTextToText.from_pretrained(tmp_path / "base", dtype=torch.float32)
    theirs = get_peft_model(whole, LoraConfig(r=2, target_modules=targets, init_lora_weights=False)).eval()
    theirs.save_pretrained(tmp_path / "adapter")
    ids = torch.arange(3, 19)[None]
    model, _ = load_model(str(tmp_path / "adapter"), lora_r=2, device="cpu")
    with torch.no_grad():
        assert (model(input_ids=ids).logits - theirs(input_ids=ids).logits).abs().max() < 1e-4


@pytest.mark.parametrize("family, text_family, wrapper", [
    ("gemma4", "gemma4", "Gemma4ForConditionalGeneration"), ("mistral3", "ministral3", "Mistral3ForConditionalGeneration")])
@pytest.mark.parametrize("targets", ["all-linear", "q_proj,v_proj"])
def test_an_adapter_beside_a_vision_tower_opens_in_peft(family, text_family, wrapper, targets, tmp_path):
    """By "q_proj" PEFT would find a module of Gemma 4's tower as well, which holds a Linear and is none, and refuse it."""
    from peft import PeftModel
    from transformers import AutoModelForImageTextToText
    save_wrapped(family, text_family, wrapper, tmp_path / "base")
    ours, _ = load_model(str(tmp_path / "base"), lora_r=2, lora_target_modules=targets, device="cpu")
    for linear in adapted_linears(ours).values():
        linear.lora.B.data.normal_(std=0.05, generator=torch.Generator().manual_seed(1))
    save_model(ours, tmp_path / "adapter")
    base = AutoModelForImageTextToText.from_pretrained(tmp_path / "base", dtype=torch.float32).eval()
    theirs = PeftModel.from_pretrained(base, tmp_path / "adapter")
    ids = torch.arange(3, 19)[None]
    with torch.no_grad():
        assert (ours(input_ids=ids).logits - theirs(input_ids=ids).logits).abs().max() < 1e-4
    # Its names in full are those that were given: training continues with the same command.
    again, _ = load_model(str(tmp_path / "adapter"), lora_r=2, lora_target_modules=targets, device="cpu")
    assert adapted_linears(again).keys() == adapted_linears(ours).keys()


def save_text(family, folder, **options):
    """Write a random model of a family with the tiny model's tokenizer and vocabulary."""
    tokenizer = make_tiny()[1]
    options["vocab_size"] = len(tokenizer)
    if family.startswith(("gemma3n", "gemma4")):
        options["vocab_size_per_layer_input"] = len(tokenizer)
    model = decoders.make(family, **options)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


# PEFT 0.21 takes the names of dense and shared MLPs for those of the experts, in these: only adapters beside attention go there.
ATTENTION_IN_PEFT = {"deepseek_v3": "q_b_proj,kv_b_proj,o_proj", "qwen3_next": "q_proj,k_proj,in_proj_qkvz,out_proj", "hunyuan_v1_moe": "q_proj,v_proj,o_proj"}


@pytest.mark.parametrize("family", ATTENTION_IN_PEFT)
def test_peft_itself_gives_dense_mlps_of_these_no_adapter(family):
    """So it is PEFT's limit (peft/utils/transformers_weight_conversion.py): no adapter_config.json could name them."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"])
    model = peft.get_peft_model(decoders.make(family), config)
    adapted = {name.removesuffix(".base_layer").split(".")[-1] for name, module in model.named_modules() if hasattr(module, "lora_A")}
    assert adapted == {"experts"}


@pytest.mark.parametrize("family", some("llama", *ATTENTION_IN_PEFT, "qwen3_5", "gemma3n", "gpt_oss", "falcon_h1"))
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
    assert {name.replace("base_model.model.", "") for name, module in theirs.named_modules() if hasattr(module, "lora_A")} == set(adapted_linears(ours))
    ids = torch.arange(3, 19)[None]
    with torch.no_grad():
        logits, expected = ours(input_ids=ids).logits, theirs(input_ids=ids).logits
    assert (logits - expected).abs().max() < 1e-4
    with lora.merged(ours), torch.no_grad():
        assert (ours(input_ids=ids).logits - expected).abs().max() < 1e-4
    with theirs.disable_adapter(), torch.no_grad():
        assert (theirs(input_ids=ids).logits - expected).abs().max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("dtype, memory", [("bfloat16", "plain"), ("bfloat16", "4bit"), ("float16", "checkpoint")])
@pytest.mark.parametrize("family", FAMILIES)
def test_two_steps_of_grpo_in_16_bits(family, dtype, memory, tmp_path):
    """Sampler and trainer differ by rounding alone, the policy and its reference in no bit."""
    save_text(family, tmp_path / "base")
    grpo.train(grpo.Config(
        model_path=str(tmp_path / "base"), env=bandit.ENV, output_dir=str(tmp_path / "run"), tasks_per_step=2, group_size=4, batch_size=4, max_steps=2,
        eval_tasks=0, max_new_tokens=12, max_tokens=200, lora_r=2, learning_rate=1e-2, dtype=dtype, memory=memory, kl_coef=0.1,
        entropy_coef=0.1))
    with open(tmp_path / "run" / "metrics.jsonl") as file:
        first, second = [json.loads(line) for line in file]
    assert abs(first["first_ratio"] - 1) < 0.01 and first["sampler_gap"] < 0.03 and first["kl"] == 0 and second["grad_norm"] > 0


def test_a_model_that_the_engine_refuses_ends_the_run_before_it_begins(tmp_path):
    """Not in the first rollout, with a command that would end there as well."""
    save_text("bloom", tmp_path / "base")
    with pytest.raises(UserError, match="BloomForCausalLM: the engine cannot decode it: ") as error:
        grpo.train(grpo.Config(model_path=str(tmp_path / "base"), env=bandit.ENV, output_dir=str(tmp_path / "run"), lora_r=2, dtype="float32"))
    assert not hasattr(error.value, "__notes__") and not (tmp_path / "run" / "config.yaml").exists()


def gradients_of(model):
    """Return log-probabilities, and the gradients of an adapter that changes something, one behind the other."""
    for linear in adapted_linears(model).values():
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


@pytest.mark.parametrize("family", some("llama", "qwen3_moe", "qwen3_next", "gemma3n", "gpt_oss", "deepseek_v3"))
def test_memory_techniques_change_no_gradient(family, tmp_path):
    """Of the weights that they keep; `stream` computes what `small` does. Experts are read in their order, 10 after 9."""
    save_text(family, tmp_path, **({"num_local_experts": 12} if family == "qwen3_moe" else {}))
    results = {}
    for memory in ("4bit", "small", "stream"):
        model, _ = load_model(str(tmp_path), lora_r=2, memory=memory, device="cpu")
        assert not facts(model).refuses_engine  # the probe has compared training and decoding
        results[memory] = gradients_of(model)
        if memory == "stream":
            assert all(map(torch.equal, results["stream"], results["small"]))
            continue
        logprobs, grads = gradients_of(plain_model_of(model, str(tmp_path)))
        assert (results[memory][0] - logprobs).abs().max() < 1e-5 and (results[memory][1] - grads).norm() < 1e-5 * grads.norm()


@pytest.mark.parametrize("family", ["gemma4", "bamba"])
def test_layers_that_run_again_change_no_gradient(family, tmp_path):
    """Shared keys and values, and layers that return tuples."""
    save_text(family, tmp_path)
    results = [gradients_of(load_model(str(tmp_path), lora_r=2, memory=memory, device="cpu")[0]) for memory in ("checkpoint", "plain")]
    assert (results[0][0] - results[1][0]).abs().max() < 1e-5 and (results[0][1] - results[1][1]).norm() < 1e-5 * results[1][1].norm()


@pytest.mark.parametrize("dtype, tolerance", [("bfloat16", 0.2), ("float16", 0.02)])
@pytest.mark.parametrize("family", ["mamba2", "nemotron_h"])
def test_models_whose_layers_or_logits_are_float32_run_in_16_bits(family, dtype, tolerance, tmp_path):
    """Mamba's layers add up in float32, which its head does not take; Nemotron-H's logits are float32 whatever computed them."""
    save_text(family, tmp_path)
    exact = gradients_of(load_model(str(tmp_path), lora_r=2, device="cpu")[0])
    for memory in ("plain", "checkpoint"):
        model, _ = load_model(str(tmp_path), lora_r=2, dtype=dtype, memory=memory, device="cpu")
        assert not facts(model).refuses_engine
        assert all((a - b).norm() < tolerance * b.norm() for a, b in zip(gradients_of(model), exact))


def small_config(family, **options):
    """The config of a kind of model that is not in the table."""
    from transformers import AutoConfig
    sizes = dict(vocab_size=len(make_tiny()[1]), hidden_size=32, d_model=32, intermediate_size=48, num_hidden_layers=1, encoder_layers=1, decoder_layers=1,
                 num_attention_heads=4, encoder_attention_heads=4, decoder_attention_heads=4, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    return AutoConfig.for_model(family, **{**sizes, **options})


@pytest.mark.parametrize("family, kind, says", [
    ("bart", "BartForConditionalGeneration", "bart is an encoder-decoder or a classifier; only decoders are trained here"),
    ("whisper", "WhisperForConditionalGeneration", "whisper is an encoder-decoder or a classifier; only decoders are trained here"),
    ("t5", "T5ForConditionalGeneration", "t5 is an encoder-decoder or a classifier; only decoders are trained here"),
    ("bert", "BertForMaskedLM", "is not causal: without the later tokens a forward differs from transformers' by"),
    ("vit", "ViTForImageClassification", "vit is an encoder-decoder or a classifier"),
    ("qwen2", "Qwen2ForSequenceClassification", "qwen2 is an encoder-decoder or a classifier"),  # its head was tied to the embedding
    ("llama", "LlamaModel", "no weights for lm_head.weight: the model is incomplete, or of a kind that predicts no next token")])
def test_what_predicts_no_next_token_is_refused_in_one_line(family, kind, says, tmp_path):
    import transformers
    tied = {"tie_word_embeddings": True} if family == "qwen2" else {}
    getattr(transformers, kind)(small_config(family, **tied)).save_pretrained(tmp_path)
    make_tiny()[1].save_pretrained(tmp_path)
    with pytest.raises(UserError) as error:
        load_model(str(tmp_path), lora_r=2, device="cpu")
    assert str(error.value).startswith(f"{tmp_path}: ") and says in str(error.value) and "\n" not in str(error.value)
