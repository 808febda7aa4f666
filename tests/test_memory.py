"""memory.py: every saving against the plain path; budget.py: its count against torch's own log of allocations."""
import importlib.util
import json
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import dpo
import grpo
import lora
import reward_weighted
import sft
from experiment.run import Stop, load_optimizer, optimizer_tensors
from llm import logprobs, memory
from llm.budget import Bytes, measure
from llm.memory import HostAdamW, Linear4bit, Table
from lora import UserError, load_model, lora_linears, merge, merged, token_logprobs

ROOT = Path(lora.__file__).parent
FOUR_BIT = {"load_in_4bit": True, "gradient_checkpointing": True}
EVERYTHING = {**FOUR_BIT, "int8_head": True, "mlp_tokens": 24, "offload_activations": True}
IDS = torch.arange(3, 63).view(2, 30) * 7 % 700  # (B, T)
FAMILIES = {
    "qwen2": dict(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2),
    "llama": dict(hidden_size=64, intermediate_size=160, num_attention_heads=4, num_key_value_heads=4,
                  tie_word_embeddings=False, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}),
    "gemma3_text": dict(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=1, head_dim=16),
    "qwen3": dict(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=32),
    "mistral": dict(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2)}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Folder of a tiny model."""
    folder = str(tmp_path_factory.mktemp("tiny"))
    for part in lora.make_tiny():
        part.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Folder of a Qwen2 whose tensors are large enough to be what a step's memory is made of."""
    from transformers import AutoModelForCausalLM, Qwen2Config
    folder = str(tmp_path_factory.mktemp("wide"))
    AutoModelForCausalLM.from_config(Qwen2Config(
        vocab_size=6000, hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, tie_word_embeddings=True)).save_pretrained(folder)
    lora.make_tiny()[1].save_pretrained(folder)
    return folder


def load(folder, **options):
    """With an adapter that changes something: B is zero when fresh."""
    model = load_model(str(folder), device="cpu", **{"lora_r": 4, **options})[0]
    generator = torch.Generator().manual_seed(1)
    for linear in lora_linears(model).values():
        linear.lora_B.weight.data = torch.randn(linear.lora_B.weight.shape, generator=generator) * 0.1
    return model


def gradients(model, ids=IDS, mask=None, entropy_coef=0.1):
    """-> log-probabilities, entropy, {name: gradient} of a loss that weighs every token differently."""
    mask = (torch.arange(ids.shape[1]) >= 5).long().expand(ids.shape) if mask is None else mask
    torch.manual_seed(0)
    logprobs, entropy = token_logprobs(model.train(), ids, mask, 0.7)
    (logprobs * torch.linspace(-1, 1, ids.numel()).view(ids.shape) - entropy_coef * entropy).sum().backward()
    return logprobs.detach(), entropy.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def same(a, b, tolerance):
    assert a[2].keys() == b[2].keys() and len(a[2]) > 8
    for x, y in [(a[0], b[0]), (a[1], b[1]), *((a[2][name], b[2][name]) for name in a[2])]:
        assert torch.equal(x, y) if not tolerance else (x - y).norm() <= tolerance * x.norm(), (x - y).norm() / x.norm()


# ---------------------------------------------------------------------------------------------------------------- 4 bits
@pytest.mark.parametrize("shape", [(64, 64), (96, 100), (32, 6), (257, 128), (3, 4096), (300, 512)])
def test_a_4bit_weight_is_near_and_small(shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.02
    linear = Linear4bit(weight)
    back = linear.dequantised(torch.float32)
    assert back.shape == shape and (back - weight).norm() / weight.norm() < 0.11
    levels = torch.tensor([-1, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0, 0.0796, 0.1609, 0.2461, 0.3379,
                           0.4407, 0.5626, 0.723, 1])  # of arXiv 2305.14314 appendix E
    block = back.flatten()[:64]
    assert ((block / weight.flatten()[:64].abs().max())[:, None] - levels).abs().min(1).values.max() < 0.03
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit
    assert torch.equal(back, dequantize_4bit(*quantize_4bit(weight, compress_statistics=True, quant_type="nf4")))
    if weight.numel() > 2**12:
        nbytes = sum(t.nbytes for t in (linear.weight, linear.scale, linear.nested))
        assert nbytes * 8 / weight.numel() < 4.14


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoding_by_the_librarys_product_is_the_same_map(biased, dtype):
    """bitsandbytes' gemm_4bit, fused on a GPU, unpacks on a CPU: to the bit what training computes."""
    linear = Linear4bit(torch.randn(96, 128), torch.randn(96, dtype=dtype) if biased else None)
    x = torch.randn(2, 3, 128, dtype=dtype)
    with torch.inference_mode():
        decoded = linear(x)
    assert torch.equal(decoded, linear(x)) and decoded.dtype == dtype


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("int8_head", [False, True])
def test_a_4bit_model_is_the_stock_model_of_its_weights(family, int8_head, tmp_path):
    """Buffers that no file holds, tied heads, biases, Gemma's factor: all as transformers has them."""
    from transformers import AutoConfig, AutoModelForCausalLM
    config = AutoConfig.for_model(family, vocab_size=1100, num_hidden_layers=2, **FAMILIES[family])
    stock = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for p in stock.parameters():
            p.add_(torch.randn_like(p) * 0.02)
    stock.save_pretrained(tmp_path)
    lora.make_tiny()[1].save_pretrained(tmp_path)
    model = load_model(str(tmp_path), load_in_4bit=True, int8_head=int8_head, train=False, device="cpu")[0]
    four_bit = [name for name, m in model.named_modules() if isinstance(m, Linear4bit)]
    assert len(four_bit) == 14 and not any(t.is_meta for t in [*model.parameters(), *model.buffers()])
    with torch.no_grad():
        for name in four_bit:
            stock.get_submodule(name).weight.copy_(model.get_submodule(name).dequantised(torch.float32))
        if int8_head:
            for part in ("get_input_embeddings", "get_output_embeddings"):
                getattr(stock, part)().weight.copy_(getattr(model, part)().table.rows(slice(None), "cpu"))
        assert (model(input_ids=IDS).logits - stock(input_ids=IDS).logits).abs().max() < 1e-4


def test_loading_holds_one_tensor_at_a_time(wide):
    with Bytes("real") as count:
        model = load_model(wide, lora_r=4, load_in_4bit=True, int8_head=True, device="cpu")[0]
        held = count.now
    largest = max(t.nbytes for t in load_file(f"{wide}/model.safetensors").values())
    assert sum(p.nbytes for p in model.parameters()) < held < count.peak < held + 1.5 * largest


def test_shards_are_read_and_a_missing_tensor_is_named(wide, tmp_path):
    tensors = load_file(f"{wide}/model.safetensors")
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (Path(wide) / file).exists():
            (tmp_path / file).write_text((Path(wide) / file).read_text())
    names = sorted(tensors)
    for i, part in enumerate((names[::2], names[1::2])):
        save_file({n: tensors[n] for n in part}, tmp_path / f"model-0000{i + 1}-of-00002.safetensors", metadata={"format": "pt"})
    save_file({"another.format": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    a, b = (load(folder, load_in_4bit=True) for folder in (wide, tmp_path))
    assert all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values()))
    save_file({n: tensors[n] for n in names[3::2]}, tmp_path / "model-00002-of-00002.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=names[1]):
        load(tmp_path, load_in_4bit=True)


@pytest.mark.parametrize("bf16, found", [(True, torch.bfloat16), (False, torch.float16)])
def test_bfloat16_only_where_it_is_real(bf16, found, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: bf16 and not including_emulation)
    assert lora._real_dtype(torch.bfloat16, torch.device("cuda")) == found
    assert lora._real_dtype(torch.bfloat16, torch.device("cpu")) == torch.bfloat16
    assert lora._real_dtype(torch.float32, torch.device("cuda")) == torch.float32


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_dtype_is_that_of_the_arithmetic(tiny, dtype):
    model, exact = load(tiny, dtype=dtype, **EVERYTHING), load(tiny, **EVERYTHING)
    assert {p.dtype for name, p in model.named_parameters() if "norm" in name} == {lora.DTYPES[dtype]}
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    a, b = gradients(model)[2], gradients(exact)[2]
    a, b = (torch.cat([g.flatten() for g in x.values()]) for x in (a, b))
    assert F.cosine_similarity(a, b, dim=0) > 0.98


# ---------------------------------------------------------------------------------------- the same gradients, in less room
@pytest.mark.parametrize("base", [{}, {"load_in_4bit": True}, {"int8_head": True, "lora_dropout": 0.2}], ids=str)
@pytest.mark.parametrize("saving", [{"gradient_checkpointing": True}, {"mlp_tokens": 7},
                                    {"gradient_checkpointing": True, "mlp_tokens": 7, "offload_activations": True}], ids=str)
def test_recomputation_changes_no_gradient(tiny, base, saving):
    if base.get("lora_dropout") and "mlp_tokens" in saving:
        base = {**base, "lora_dropout": 0.0}  # tiles draw other dropout masks
    same(gradients(load(tiny, **base)), gradients(load(tiny, **base, **saving)), 2e-5)


def test_full_training_goes_through_checkpoints(tiny):
    same(gradients(load(tiny, lora_r=0)), gradients(load(tiny, lora_r=0, gradient_checkpointing=True, mlp_tokens=9)), 2e-5)


@pytest.mark.parametrize("base", [{}, {"load_in_4bit": True}, {"load_in_4bit": True, "int8_head": True, "mlp_tokens": 24}], ids=str)
def test_streamed_gradients_are_bit_equal(tiny, base):
    resident = load(tiny, gradient_checkpointing=True, **base)
    streamed = load(tiny, gradient_checkpointing=True, stream_layers=True, **base)
    for _ in range(2):  # the second step finds slots that hold what the first one left
        same(gradients(resident), gradients(streamed), 0)
    assert len(streamed.stream.slots) == 2 < len(streamed.stream.hosts) == 4
    with torch.inference_mode():
        for ids in (IDS, IDS + 1):
            assert torch.equal(resident.eval()(input_ids=ids).logits, streamed.eval()(input_ids=ids).logits)


def test_each_layer_is_copied_once_a_sweep(tiny, monkeypatch):
    model, copied = load(tiny, stream_layers=True, gradient_checkpointing=True), []
    fetch = model.stream.fetch
    def spy(i):
        copied.extend([i] if model.stream.holds[i % 2] != i else [])
        fetch(i)
    monkeypatch.setattr(model.stream, "fetch", spy)
    gradients(model)
    assert copied == [0, 1, 2, 3, 1, 0] or copied == [2, 3, 1, 0], copied  # up, then down: what is there is not fetched again
    copied.clear()
    with torch.inference_mode():
        for _ in range(3):
            model.eval()(input_ids=IDS)
    assert copied.count(3) == 3 and len(copied) <= 13  # decoding: each layer once a sweep, the next sweep's first ahead


def test_a_slot_that_was_refilled_is_an_error(tiny):
    """Without recomputation the backward pass would multiply by another layer's weights."""
    model = load(tiny, stream_layers=True, gradient_checkpointing=True, load_in_4bit=True)
    for layer in memory.layers_of(model):
        layer.gradient_checkpointing = False
    with pytest.raises(RuntimeError, match="inplace"):
        gradients(model)


@pytest.mark.parametrize("base", [{}, {"gradient_checkpointing": True}, FOUR_BIT, EVERYTHING, {**EVERYTHING, "stream_layers": True}], ids=str)
def test_a_shared_prefix_changes_no_gradient(tiny, base):
    """To 1e-6, layers in float64; what cannot be float64 differs by no more than float32's rounding, 2e-6."""
    ids = IDS.repeat(2, 1)
    ids[:, :12] = ids[0, :12]
    mask = (torch.arange(30) >= 12).long().expand(ids.shape)
    shared, alone = load(tiny, **base), load(tiny, **base)
    assert shared.shares_prefix
    alone.shares_prefix = False
    if "load_in_4bit" not in base:
        shared.double(), alone.double()
    same(gradients(shared, ids, mask), gradients(alone, ids, mask), 5e-6 if "load_in_4bit" in base else 1e-6)
    assert all((a - b).abs().max() < 1e-6 * max(1, a.abs().max()) * 10 for a, b in zip(
        gradients(shared, ids, mask)[:2], gradients(alone, ids, mask)[:2]))


# ------------------------------------------------------------------------------------------------------ int8, vocabulary
def test_int8_rows_are_near(tiny):
    weight = torch.randn(5000, 96, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 1, 5000)[:, None]
    for host in (False, True):
        table = Table(weight, host=host)
        back = table.rows(slice(None), torch.device("cpu"))
        error = ((back - weight).norm(dim=1) / weight.norm(dim=1))
        assert error.max() < 0.012 and error.mean() < 0.008
        picked = torch.tensor([7, 4999, 7])
        assert torch.equal(table.rows(picked, torch.device("cpu")), back[picked])
    four = Linear4bit(weight).dequantised(torch.float32)
    assert (four - weight).norm() / weight.norm() > 0.05


@pytest.mark.parametrize("scaling", [{}, {"logit_scale": 0.3}, {"final_logit_softcapping": 5.0}], ids=str)
@pytest.mark.parametrize("chunk_elements", [2**22, 200])
def test_blocks_of_the_vocabulary_give_the_whole_softmax(tiny, scaling, chunk_elements, monkeypatch):
    monkeypatch.setattr(memory, "BLOCK", 300)
    model = load(tiny, int8_head=True)
    for name, value in scaling.items():
        setattr(model.config, name, value)
    hidden = (torch.randn(37, 128, generator=torch.Generator().manual_seed(0)) * 3).double().requires_grad_()
    targets = torch.arange(37) * 26 % 960
    model.get_input_embeddings().table.dtype = torch.float64
    logp = (logprobs.head_logits(model, hidden) / 0.7).float().log_softmax(-1)
    expected = logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)
    weights = torch.linspace(-1, 2, 37)
    wanted, = torch.autograd.grad((expected[0] * weights + expected[1] * weights.flip(0)).sum(), hidden)
    found = logprobs._BlockLogprobs.apply(lambda h, rows: logprobs.head_logits(model, h, rows), 964, hidden, targets, 0.7,
                                      chunk_elements)
    got, = torch.autograd.grad((found[0] * weights + found[1] * weights.flip(0)).sum(), hidden)
    assert all((a - b).abs().max() < 3e-5 for a, b in zip(expected, found))
    assert (got - wanted).norm() < 1e-4 * wanted.norm()


@pytest.mark.parametrize("int8_head", [False, True])
def test_the_peak_of_the_log_probabilities_does_not_depend_on_the_vocabulary(int8_head, tmp_path):
    from transformers import AutoModelForCausalLM, Qwen2Config
    peaks = []
    for vocabulary in (20_000, 80_000):
        AutoModelForCausalLM.from_config(Qwen2Config(
            vocab_size=vocabulary, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, tie_word_embeddings=True)).save_pretrained(tmp_path)
        lora.make_tiny()[1].save_pretrained(tmp_path)
        model = load(tmp_path, int8_head=int8_head)
        with Bytes("real") as count:
            count.hold(*model.parameters(), *model.buffers())
            before = count.now
            gradients(model, torch.arange(600).view(2, 300))
        peaks.append(count.peak - before)
    assert peaks[1] < 1.05 * peaks[0], peaks


def test_only_hidden_targets_lse_and_entropy_are_kept(tiny):
    model = load(tiny, int8_head=True)
    hidden = torch.randn(50, 128, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        logprobs._BlockLogprobs.apply(lambda h, rows: logprobs.head_logits(model, h, rows), 964, hidden, torch.zeros(50).long(), 1.0, 2**14)
    assert kept == [(50, 128), (50,), (50,), (50,)]


@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True, "int8_head": True}], ids=str)
@pytest.mark.parametrize("merging", [False, True])
def test_float16_loses_no_small_gradient(tiny, options, merging):
    """A token's share of a loss over 10^5 tokens is under what float16 holds: it goes through the layers scaled."""
    found = []
    for dtype in ("float32", "float16"):
        model = load(tiny, dtype=dtype, **options)
        with merged(model) if merging and dtype == "float16" else nullcontext():
            logprobs, entropy = token_logprobs(model, IDS, torch.ones_like(IDS))
            (1e-7 * (logprobs * torch.linspace(-1, 1, IDS.numel()).view(IDS.shape)).sum() - 1e-8 * entropy.sum()).backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert found[0].norm() < 1e-4 and (found[0] - found[1]).norm() < 0.02 * found[0].norm()


# ------------------------------------------------------------------------------------------------------------- optimiser
def test_adamw_on_the_host_is_adamw_and_its_state_is_saved(tiny, tmp_path):
    options = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
    models = [load(tiny) for _ in range(3)]
    plain, ours, resumed = (lora.adamw(m, kind, **options) for m, kind in zip(models, ("adamw", "adamw_cpu", "adamw_cpu")))
    assert isinstance(ours, HostAdamW)

    def step(model, optimizer, i):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (i + 1)
        gradients(model, IDS + i)
        norm = torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return norm

    for i in range(3):
        norms = [step(m, o, i) for m, o in zip(models[:2], (plain, ours))]
        assert torch.allclose(*norms, rtol=1e-4)
    for (name, p), (_, q) in zip(models[0].named_parameters(), models[1].named_parameters()):
        assert torch.allclose(p, q, atol=1e-5), name
    trained = [p for p in models[1].parameters() if p.requires_grad]
    assert len({p.untyped_storage().data_ptr() for p in trained}) == 1 and sum(p.numel() for p in trained) == ours.flat.numel()
    save_file(optimizer_tensors(ours, models[1].named_parameters()), tmp_path / "optimizer.safetensors")
    with torch.no_grad():
        for p, q in zip(trained, (p for p in models[2].parameters() if p.requires_grad)):
            q.copy_(p)
    load_optimizer(resumed, models[2].named_parameters(), tmp_path / "optimizer.safetensors")
    for i in range(3, 5):
        for model, optimizer in ((models[1], ours), (models[2], resumed)):
            step(model, optimizer, i)
    for p, q in zip(trained, (p for p in models[2].parameters() if p.requires_grad)):
        assert torch.equal(p, q)


def test_adamw8bit_runs_or_says_why(tiny):
    model = load(tiny)
    try:
        optimizer = lora.adamw(model, "adamw8bit", lr=1e-2)
        before = [p.detach().clone() for p in model.parameters() if p.requires_grad]
        gradients(model)
        optimizer.step()
    except UserError as error:
        assert "--optim adamw" in str(error)
    else:
        assert any(not torch.equal(a, b) for a, b in zip(before, (p for p in model.parameters() if p.requires_grad)))
        assert {key for key in next(iter(optimizer.state.values()))} >= {"state1", "state2"}


# -------------------------------------------------------------------------------------------------------------- counting
def real_step(model, rows, tokens, optim):
    """A step as it is in a run that has begun: gradients of an earlier micro-batch, moments of an earlier step."""
    optimizer = lora.adamw(model, optim, lr=1e-5)
    for p in (p for p in model.parameters() if p.requires_grad):
        p.grad = torch.zeros_like(p)
    optimizer.step()
    ids = torch.arange(rows * tokens).view(rows, tokens) % 900
    mask = torch.ones_like(ids)
    mask[:, 0] = 0
    logprobs, _ = token_logprobs(model.train(), ids, mask)
    (-logprobs.mean()).backward()
    torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
    optimizer.step()


def host_of(model):
    """What lies beside the device: streamed layers, and the table that they bring along."""
    return [*getattr(model, "stream", SimpleNamespace(hosts=[])).hosts,
            *(t for module in model.modules() if isinstance(module, Table) for t in module.hosted or ())]


@pytest.mark.parametrize("rows, tokens, options", [
    (2, 400, {"lora_r": 8}), (3, 600, {"lora_r": 8}), (2, 200, {"lora_r": 0}), (1, 1024, {"lora_r": 8, **FOUR_BIT}),
    (2, 512, {"lora_r": 8, "load_in_4bit": True}), (1, 1024, {"lora_r": 8, **FOUR_BIT, "int8_head": True, "mlp_tokens": 256}),
    (2, 1024, {"lora_r": 8, **FOUR_BIT, "int8_head": True, "stream_layers": True})], ids=str)
def test_the_count_is_what_torch_allocates(wide, rows, tokens, options):
    """Two witnesses of a real step on the CPU: the same ruler on its tensors, and the allocator's own log."""
    counted = measure({"path": wide, **options}, rows=rows, tokens=tokens, kind="cpu")
    ruled = measure({"path": wide, **options}, rows=rows, tokens=tokens, kind="cpu", device="cpu")
    assert abs(counted["update"] / ruled["update"] - 1) < 0.01
    model = load_model(wide, device="cpu", **options)[0]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in [*model.parameters(), *model.buffers(), *host_of(model)]}
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as log:
        real_step(model, rows, tokens, "adamw")
    events = [e for e in log.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = sum(storages.values())
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    assert peak > 2 * sum(storages.values())
    assert abs(counted["update"] / peak - 1) < 0.01, (counted["update"], peak)


@pytest.mark.parametrize("options, merge", [({"lora_r": 8}, True), ({"lora_r": 8, **FOUR_BIT, "int8_head": True}, False)], ids=str)
def test_a_rollout_is_counted_as_it_runs(wide, options, merge):
    rollout = {"slots": 12, "group_size": 4, "max_tokens": 300, "max_new_tokens": 60}
    counted, real = (measure({"path": wide, **options}, rows=1, tokens=32, kind="cpu", merge_rollout=merge, rollout=rollout,
                             device=device) for device in ("meta", "cpu"))
    assert abs(counted["rollout"] / real["rollout"] - 1) < 0.01 and real["rollout"] > 2 * 4 * 12 * 300 * 64 * 4  # cache


def bench():
    spec = importlib.util.spec_from_file_location("bench_memory", ROOT / "bench" / "memory.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name, flags, limit", [
    ("Qwen2.5-0.5B", "everything", 450), ("Qwen2.5-3B", "everything", 2100), ("Qwen2.5-7B", "streamed", 800)])
def test_the_promise(name, flags, limit):
    found = bench().update_bytes(name, 1024, bench().FLAGS[flags])
    began = time.process_time()
    again = bench().update_bytes(name, 1024, bench().FLAGS[flags])
    assert time.process_time() - began < 3  # 1 to 1.5 s of one core; a loaded machine is slower
    assert found["update"] == again["update"] <= limit * 2**20
    assert bench().update_bytes(name, 1024, {})["update"] > 4 * found["update"]


# ---------------------------------------------------------------------------------------------------------- end to end
WORLD = '''
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
    base, world = tmp_path / "base", tmp_path / "lottery.py"
    for part in lora.make_tiny():
        part.save_pretrained(base)
    world.write_text(WORLD)
    result = grpo.train(grpo.Config(
        model_path=str(base), env=f"{world}:Lottery", output_dir=str(tmp_path / "grpo"), tasks_per_step=2, group_size=3, max_steps=2, eval_tasks=0,
        max_tokens=160, learning_rate=1e-2, kl_coef=0.1, optim="adamw_cpu", warmup_steps=1, **EVERYTHING))
    assert result["steps"] == 2
    lines = [json.loads(line) for line in (tmp_path / "grpo" / "metrics.jsonl").read_text().splitlines()]
    assert all(abs(line["first_ratio"] - 1) < 1e-3 and line["sampler_gap"] < 1e-4 for line in lines)  # unmerged in both
    played = load_model(str(tmp_path / "grpo"), train=False, device="cpu")[0]  # on the base that it was trained on
    trained = load_model(str(tmp_path / "grpo"), lora_r=16, device="cpu")[0]
    assert all(sum(isinstance(m, Linear4bit) for m in model.modules()) == 28 for model in (played, trained))
    assert any(linear.lora_B.weight.abs().max() > 0 for linear in lora_linears(trained).values())
    merge(str(tmp_path / "grpo"), str(tmp_path / "merged"))
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto").eval()
    assert stock.dtype == torch.bfloat16 and not any("lora" in name for name in stock.state_dict())
    with torch.no_grad():
        wanted, got = (m(input_ids=IDS).logits.float().log_softmax(-1) for m in (played, stock.float()))
        original = AutoModelForCausalLM.from_pretrained(base).eval()
        for name, linear in lora_linears(trained).items():
            original.get_submodule(name).weight += linear.lora_scale * (linear.lora_B.weight @ linear.lora_A.weight)
        wrong = original(input_ids=IDS).logits.log_softmax(-1)
    assert (wanted - got).abs().mean() < 0.2 * (wanted - wrong).abs().mean()


def test_merged_leaves_four_bits_as_they_are(tiny):
    model = load(tiny, load_in_4bit=True)
    weights = [linear.weight.clone() for linear in lora_linears(model).values()]
    outside = gradients(model)
    model.zero_grad()
    with merged(model):
        inside = gradients(model)
        with torch.inference_mode():
            logits = model.eval()(input_ids=IDS).logits
        assert all(len(linear.lora_work) == 2 for linear in lora_linears(model).values())
    same(outside, inside, 0)
    with torch.inference_mode():
        assert torch.equal(logits, model(input_ids=IDS).logits)
    assert all(torch.equal(a, linear.weight) and linear.lora_work is None for a, linear in zip(weights, lora_linears(model).values()))


@pytest.mark.parametrize("options, message", [
    ({"lora_r": 0, "load_in_4bit": True}, "--lora_r"), ({"lora_r": 0, "int8_head": True}, "--lora_r"),
    ({"stream_layers": True}, "--gradient_checkpointing"), ({"offload_activations": True}, "--gradient_checkpointing")])
def test_flags_that_clash(tiny, options, message):
    with pytest.raises(UserError, match=message):
        load(tiny, **options)
    with pytest.raises(UserError, match="--lora_r"):
        lora.adamw(load(tiny, lora_r=0), "adamw_cpu", lr=1e-3)


def test_the_four_files_have_the_same_memory_flags():
    def flags(module):
        return {name: (field.type, field.default, field.metadata) for name, field in module.Config.__dataclass_fields__.items()
                if field.metadata.get("group") == "memory"}
    assert len(flags(grpo)) == 9 and flags(grpo) == flags(sft) == flags(dpo) == flags(reward_weighted)


@pytest.mark.parametrize("module", [grpo, sft, dpo, reward_weighted], ids=lambda module: module.__name__)
def test_dry_run(module, tmp_path, capsys):
    config = {"output_dir": str(tmp_path / "run"), "dry_run": True, "lora_r": 4, "batch_size": 4, "max_tokens": 200}
    found = module.train(module.Config(**config))
    out = capsys.readouterr().out
    assert not (tmp_path / "run").exists()
    numbers = {line.split()[0]: float(line.split()[1].replace(",", "")) for line in out.splitlines()}
    assert numbers.keys() == {"estimate", "limit", "tried"} and abs(numbers["estimate"] - numbers["tried"]) < 2
    assert found["update"] <= numbers["estimate"] + 1
    if module in (dpo, reward_weighted):
        return
    with pytest.raises(Stop) as stop:
        module.train(module.Config(**config, memory_mb=int(numbers["estimate"]) - 5))
    last = str(stop.value)
    assert stop.value.code == 1
    flags = last.partition("with ")[2].partition(" it needs")[0].split()
    assert last.startswith("does not fit; with --") and flags
    again = dict(zip((f[2:] for f in flags if f.startswith("--")), [None] * len(flags)))
    assert again.keys() <= {"slots", "batch_size", "gradient_accumulation_steps", "gradient_checkpointing", "no_merge_lora", "load_in_4bit"}
    if "batch_size" in again and module is not grpo:  # there a step is batch_size x gradient_accumulation_steps
        was, now = (c.batch_size * c.gradient_accumulation_steps for c in (
            module.Config(**config), module.Config(**{**config, **{f[2:]: int(n) for f, n in zip(flags, flags[1:]) if n.isdigit()}})))
        assert was == now
    if module is sft:
        with pytest.raises(Stop, match="lower --max_tokens"):
            module.train(module.Config(**config, memory_mb=1))


def test_a_meta_model_needs_no_weights(wide, tmp_path):
    for file in Path(wide).iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_text(file.read_text())
    a, b = (measure({"path": str(path), "lora_r": 8}, rows=1, tokens=100) for path in (wide, tmp_path))
    assert a == b and isinstance(nn.Linear(1, 1).weight.is_cuda, bool) and not torch.zeros(1).is_cuda  # as before
