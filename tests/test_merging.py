"""16-bit weights: no update is lost by rounding, merged or beside the weights, and what is played is what is saved."""
import json
import math
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import core.logprobs
import lora
from bench.completions import generate
from bench.merging import kept_by_merging
from layers import load_model
from core.model import save_model
from core.logprobs import LOST_BITS, random_bits, token_logprobs
from layers import make_engine
from lora import adapted_linears, merged
from extras.memory import rounding
from merge import main

ROOT = Path(lora.__file__).parent
SMOLLM2 = ROOT / ".real" / "smollm2"
HALF = [torch.bfloat16, torch.float16]


def dithered(total, dtype, by_column=False):
    noise = random_bits(total.device, LOST_BITS.get(dtype, 0))[:total.shape[-1]] if by_column else None
    return core.logprobs.dithered(total, dtype, noise).to(dtype)


def tiny(dtype="bfloat16", scale=1e-4, **options):
    """A tiny model whose adapter's update is far below what its weights can hold."""
    model, _ = load_model("tiny", lora_r=4, dtype=dtype, device="cpu", **options)
    generator = torch.Generator().manual_seed(1)
    for linear in adapted_linears(model).values():
        linear.lora.B.data = torch.randn(linear.lora.B.shape, generator=generator) * scale
    return model


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("by_column", [False, True])
def test_a_zero_update_changes_no_bit(dtype, by_column):
    weight = torch.cat([torch.randn(300, 1000) * 10.0**-power for power in range(7)] + [torch.zeros(1, 1000)]).to(dtype)
    assert torch.equal(dithered(weight.float(), dtype, by_column), weight)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("share", [0.3, 0.01, 0.001, -0.01, -0.3])
def test_small_updates_survive_on_average_where_rounding_to_the_nearest_loses_them(dtype, share):
    weight = (torch.rand(2000, 1000, generator=torch.Generator().manual_seed(0)) / 2 + 1.25).to(dtype).float()
    update = share * (2.0**-7 if dtype == torch.bfloat16 else 2.0**-10)  # share of the distance to the next number
    moved = dithered(weight + update, dtype).float() - weight
    assert abs(moved.mean() / update - 1) < 0.1
    assert not ((weight + update).to(dtype).float() - weight).any()


def test_the_random_bits_are_constants():
    total = torch.randn(700, 900)
    first = dithered(total.clone(), torch.bfloat16)
    torch.manual_seed(5)
    assert torch.equal(dithered(total.clone(), torch.bfloat16), first)
    above = dithered(torch.full((1024, 512), 1 + 2**-9), torch.bfloat16)
    assert not torch.equal(above[0], above[512])  # nor do rows of a width of 2^k repeat them
    rows = dithered(total.clone(), torch.bfloat16, by_column=True)
    assert torch.equal(dithered(total[400:410].clone(), torch.bfloat16, by_column=True), rows[400:410])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_beside_its_weight_an_adapter_rounds_every_row_alike(dtype):
    """What an episode is sampled at must not depend on its place in the batch, nor what it is trained at."""
    linear = tiny(dtype, scale=1e-3).model.layers[0].mlp.up_proj
    x = torch.randn(128, generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype))
    with torch.no_grad():
        rows = linear(x.expand(9, -1))
        assert torch.equal(rows, rows[:1].expand(9, -1)) and not torch.equal(rows, torch.nn.functional.linear(x.expand(9, -1), linear.weight))


def test_a_merge_is_as_many_kernels_however_large_the_weight():
    """A GPU waits for launches: a 0.5B model took 2,305 of them for a merge where each 2**18 weights were one."""
    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func)
            return func(*args, **(kwargs or {}))
    counts = []
    dithered(torch.ones(1, 1), torch.bfloat16)  # it makes the noise, once
    for rows in (300, 5000):
        names = []
        with Count():
            dithered(torch.ones(rows, 896), torch.bfloat16)
        counts.append(len(names))
    assert counts[0] == counts[1] <= 13



NAN = [sign | 0x7F800000 | payload for sign in (0, 0x80000000) for payload in [1 << i for i in range(23)] + [(1 << i) - 1 for i in range(1, 24)]
       + [0x7FFFFF ^ (1 << i) for i in range(23)]]  # every single bit, every run of low bits (CUDA writes all ones), all but one


def floats(patterns):
    """Return float32 numbers of these bits, each as often as the random bits repeat some of theirs."""
    return torch.tensor(patterns, dtype=torch.int64).to(torch.int32).view(torch.float32).repeat(3000, 1)


@pytest.mark.parametrize("by_column", [False, True])
@pytest.mark.parametrize("dtype", HALF)
def test_what_is_not_finite_stays_what_it_is(dtype, by_column):
    """A diverged model must not look healthy: without care 0x7fffffff, the NaN of CUDA, becomes -0.0."""
    assert dithered(floats(NAN), dtype, by_column).isnan().all()
    infinite = floats([0x7F800000, 0xFF800000])
    assert torch.equal(dithered(infinite.clone(), dtype, by_column), infinite.to(dtype))
    largest = torch.finfo(dtype).max
    for number in (largest, -largest):
        assert (dithered(torch.full((700, 500), number), dtype, by_column) == number).all()
        # Between the largest number and the one that would come next, each of the two is taken at times.
        above = torch.full((700, 500), number) * (1 + 2.0**(-9 if dtype == torch.bfloat16 else -12))
        rounded = dithered(above, dtype, by_column)
        assert set(rounded.unique().tolist()) == {number, math.copysign(math.inf, number)}
    beyond = floats([0x7F7FFFFF, 0xFF7FFFFF])  # the largest of float32 itself
    assert not dithered(beyond.clone(), dtype, by_column).isnan().any()
    assert torch.equal(dithered(beyond.clone(), dtype, by_column).signbit(), beyond.signbit())


def test_float32_is_not_touched():
    total = torch.randn(30, 40)
    assert dithered(total, torch.float32) is total


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_update_survives_merging(dtype, monkeypatch):
    model = tiny(dtype)
    with merged(model):
        inside = kept_by_merging(model)
    assert kept_by_merging(model) == inside == pytest.approx(1, abs=0.1 if dtype != "float32" else 1e-3)
    assert kept_by_merging(load_model("tiny", lora_r=4, dtype=dtype, device="cpu")[0]) == 1  # a zero update
    assert kept_by_merging(load_model("tiny", device="cpu")[0]) == 1  # no adapter
    monkeypatch.setattr(lora, "dithered", lambda total, dtype: total.to(dtype))
    assert kept_by_merging(model) < 0.5 or dtype != "bfloat16"


@pytest.mark.parametrize("dtype, scale", [("bfloat16", 1), ("float16", rounding.GRADIENT_SCALE)])
def test_the_update_survives_beside_the_weight_and_has_its_gradients(dtype, scale):
    """As in 4 bits, or with dropout. The trainer multiplies float16 gradients by a scale, which A and B take back."""
    linear = tiny(dtype).model.layers[0].mlp.up_proj
    generator = torch.Generator().manual_seed(0)
    x, grad = torch.randn(1000, 128, generator=generator), torch.randn(1000, linear.out_features, generator=generator)
    A, B, output = linear.lora.A, linear.lora.B, linear(x.to(linear.weight.dtype)).float()
    plain_A, plain_B = A.detach().requires_grad_(), B.detach().requires_grad_()
    base, update = x.to(linear.weight.dtype).float() @ linear.weight.float().T, linear.lora.scale * x @ plain_A.T @ plain_B.T
    assert (((output - base) * update).sum() / update.square().sum()).item() == pytest.approx(1, abs=0.1)
    ours = torch.autograd.grad((output * grad).sum(), (A, B))
    for a, b in zip(ours, torch.autograd.grad((update * grad).sum(), (plain_A, plain_B))):
        assert (a * scale - b).norm() < 0.02 * b.norm()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_is_sampled_is_what_is_trained(dtype):
    """first_ratio: the sampler's log-probabilities against the trainer's, of the same merged weights."""
    model = tiny(dtype, scale=0.05)
    with merged(model):
        (ids, sampled), = generate(make_engine(model, tokens=50, slots=1), [[5, 6, 7]], max_new_tokens=40, seed=1)
        token_ids = torch.tensor([[5, 6, 7, *ids]])
        mask = torch.ones_like(token_ids)
        mask[:, :3] = 0
        trained = token_logprobs(model, token_ids, mask)[0][0, 3:]
    assert (trained - torch.tensor(sampled)).abs().mean() < (0.02 if dtype == "bfloat16" else 0.004)


@pytest.mark.parametrize("stored", ["float32", "as trained"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_merged_folder_holds_the_weights_that_were_played(tmp_path, dtype, stored):
    """Also of a base that is stored in float32, with --dtype. Stock transformers makes of them what was trained, but for rounding."""
    from transformers import AutoModelForCausalLM
    base, tokenizer = load_model("tiny", dtype="float32" if stored == "float32" else dtype, train=False, device="cpu")
    base.save_pretrained(tmp_path / "base"), tokenizer.save_pretrained(tmp_path / "base")
    model, _ = load_model(str(tmp_path / "base"), lora_r=4, dtype=dtype, device="cpu")
    for linear in adapted_linears(model).values():
        linear.lora.B.data.normal_(std=1e-3)
    save_model(model, str(tmp_path / "adapter"))
    flags = ["--dtype", dtype] if stored == "float32" else []
    assert main(["merge", str(tmp_path / "adapter"), str(tmp_path / "merged"), *flags]) == 0
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto").eval()
    assert plain.dtype == getattr(torch, dtype)
    ids = torch.arange(3, 43)[None]
    with merged(model), torch.no_grad():
        theirs = plain(input_ids=ids).logits[:, :-1].float().log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
        ours = token_logprobs(model, ids, torch.ones_like(ids))[0][:, 1:]
        assert (ours - theirs).abs().mean() < (0.02 if dtype == "bfloat16" else 0.003)
        for name, linear in adapted_linears(model).items():
            assert torch.equal(plain.get_submodule(name).weight, linear.weight), name
            assert not torch.equal(linear.weight, linear.lora.frozen_weight(linear))


def words(tokenizer, rows, width):
    data = ROOT.parent / "shared/data/gsm8k/train.jsonl"
    text = [json.loads(line) for line in data.read_text().splitlines()[:200]] if data.exists() else []
    text = [row["question"] + " " + row["answer"] for row in text] or [(ROOT / "README.md").read_text()[i:] for i in range(0, 4000, 500)]
    ids = [tokenizer(t)["input_ids"][:width] for t in text]
    return torch.tensor([row for row in ids if len(row) == width][:rows])


@pytest.fixture(scope="module")
def first_layers(tmp_path_factory):
    """The folder of SmolLM2's first 4 layers of 30: the trained weights of a real model, in a third of its size."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    folder = str(tmp_path_factory.mktemp("first_layers"))
    AutoModelForCausalLM.from_pretrained(SMOLLM2, num_hidden_layers=4, dtype="bfloat16").save_pretrained(folder)
    AutoTokenizer.from_pretrained(SMOLLM2).save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.skipif(not SMOLLM2.exists(), reason="needs .real/smollm2")
def test_forty_small_steps_on_a_real_model_learn_the_same_merged_and_beside_the_weights(first_layers, tmp_path, monkeypatch):
    """In bfloat16 at a learning rate of 2e-5: rounding to the nearest loses most of it (bench/merging.py, on all layers)."""
    from contextlib import nullcontext

    from peft import PeftModel
    from transformers import AutoModelForCausalLM
    loss = {}
    for way in ("merged", "beside"):
        model, tokenizer = load_model(first_layers, lora_r=16, dtype="bfloat16", device="cpu")
        ids = words(tokenizer, 3, 40)
        mask = torch.ones(ids.shape)
        mask[:, 0] = 0
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-5, betas=(0.9, 0.95))
        for step in range(41):
            with merged(model) if way == "merged" else nullcontext():
                total = -token_logprobs(model, ids, mask)[0].sum() / mask.sum()
                loss.setdefault("start", total.item())
                loss[way] = total.item()
                if step < 40:
                    total.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert kept_by_merging(model) == pytest.approx(1, abs=0.05)
    save_model(model, str(tmp_path))
    with torch.no_grad(), merged(model):
        loss["played"] = -token_logprobs(model, ids, mask)[0].sum().item() / mask.sum().item()
    monkeypatch.setattr(lora, "dithered", lambda total, dtype, noise=None: total.to(dtype))
    with torch.no_grad(), merged(model):
        loss["nearest"] = -token_logprobs(model, ids, mask)[0].sum().item() / mask.sum().item()
    base = AutoModelForCausalLM.from_pretrained(first_layers, dtype="bfloat16").float()
    peft = PeftModel.from_pretrained(base, tmp_path)
    with torch.no_grad():
        loss["peft"] = torch.nn.functional.cross_entropy(peft(input_ids=ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).item()
    print({name: round(value, 4) for name, value in loss.items()})
    learned = {name: loss["start"] - value for name, value in loss.items()}
    assert learned["merged"] > 0.5 and learned["merged"] == pytest.approx(learned["beside"], rel=0.03)
    assert learned["played"] == pytest.approx(learned["peft"], rel=0.03)  # PEFT beside the same weights, in float32
    assert learned["nearest"] < 0.85 * learned["played"]
