"""extras/memory/quantization.py: NF4 weights and int8 tables against their definitions and bitsandbytes."""
import pytest
import torch
from memory_helpers import EVERYTHING, gradients, load
from torch.nn import functional as F

from core.model import DTYPES
from extras.memory.reading import real_dtype
from extras.memory.quantization import Int8Table, Linear4bit


@pytest.mark.parametrize("shape", [(64, 64), (96, 100), (32, 6), (257, 128), (3, 4096), (300, 512)])
def test_a_4bit_weight_is_near_and_small(shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.02
    linear = Linear4bit(weight)
    back = linear.dequantize(torch.float32)
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
    """bitsandbytes' gemm_4bit is fused on a GPU and unpacks on a CPU: to the bit what training computes."""
    linear = Linear4bit(torch.randn(96, 128), torch.randn(96, dtype=dtype) if biased else None)
    x = torch.randn(2, 3, 128, dtype=dtype)
    with torch.inference_mode():
        decoded = linear(x)
    assert torch.equal(decoded, linear(x)) and decoded.dtype == dtype


@pytest.mark.parametrize("bf16, expected", [(True, torch.bfloat16), (False, torch.float16)])
def test_bfloat16_only_where_it_is_real(bf16, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: bf16 and not including_emulation)
    assert real_dtype(torch.bfloat16, torch.device("cuda")) == expected
    assert real_dtype(torch.bfloat16, torch.device("cpu")) == torch.bfloat16
    assert real_dtype(torch.float32, torch.device("cuda")) == torch.float32


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_dtype_is_that_of_the_arithmetic(tiny, dtype):
    model, exact = load(tiny, EVERYTHING, dtype=dtype), load(tiny, EVERYTHING)
    assert {p.dtype for name, p in model.named_parameters() if "norm" in name} == {DTYPES[dtype]}
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    a, b = gradients(model)[2], gradients(exact)[2]
    a, b = (torch.cat([g.flatten() for g in x.values()]) for x in (a, b))
    assert F.cosine_similarity(a, b, dim=0) > 0.98


@pytest.mark.parametrize("on_host", [False, True])
def test_int8_rows_are_near(on_host):
    weight = torch.randn(5000, 96, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 1, 5000)[:, None]
    table = Int8Table(weight, on_host)
    back = table.dequantize(slice(None), torch.device("cpu"))
    error = (back - weight).norm(dim=1) / weight.norm(dim=1)
    assert error.max() < 0.012 and error.mean() < 0.008
    picked = torch.tensor([7, 4999, 7])
    assert torch.equal(table.dequantize(picked, torch.device("cpu")), back[picked])
    four = Linear4bit(weight).dequantize(torch.float32)
    assert (four - weight).norm() / weight.norm() > 0.05
