"""extras/memory/reading.py: a model that is read one tensor at a time is the stock model of its weights."""
from pathlib import Path

import json
import pytest
import torch
from memory_helpers import IDS, load
from safetensors.torch import load_file, save_file

from core.config import UserError
from bench.budget import Bytes, Workload, measure
from layers import load_model
from extras.memory.techniques import Techniques
from extras.memory.quantization import Linear4bit
from core.tiny import make_tiny

FAMILIES = {
    "qwen2": dict(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2),
    "llama": dict(hidden_size=64, intermediate_size=160, num_attention_heads=4, num_key_value_heads=4,
                  tie_word_embeddings=False, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}),
    "gemma3_text": dict(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=1, head_dim=16),
    "qwen3": dict(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=32),
    "mistral": dict(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2)}


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
    make_tiny()[1].save_pretrained(tmp_path)
    model = load_model(str(tmp_path), memory=Techniques(load_in_4bit=True, int8_head=int8_head), train=False, device="cpu")[0]
    four_bit = [name for name, m in model.named_modules() if isinstance(m, Linear4bit)]
    assert len(four_bit) == 14 and not any(t.is_meta for t in [*model.parameters(), *model.buffers()])
    with torch.no_grad():
        for name in four_bit:
            stock.get_submodule(name).weight.copy_(model.get_submodule(name).dequantize(torch.float32))
        if int8_head:
            for module in ("get_input_embeddings", "get_output_embeddings"):
                getattr(stock, module)().weight.copy_(getattr(model, module)().table.dequantize(slice(None), "cpu"))
        assert (model(input_ids=IDS).logits - stock(input_ids=IDS).logits).abs().max() < 1e-4


def test_loading_holds_one_tensor_at_a_time(wide):
    with Bytes("cpu") as count:
        model = load_model(wide, lora_r=4, memory=Techniques(load_in_4bit=True, int8_head=True), device="cpu")[0]
        held = count.now
    largest = max(t.nbytes for t in load_file(f"{wide}/model.safetensors").values())
    assert sum(p.nbytes for p in model.parameters()) < held < count.peak < held + 1.8 * largest  # with the probe's logits


def test_shards_are_read_and_a_missing_tensor_is_named(wide, tmp_path):
    tensors = load_file(f"{wide}/model.safetensors")
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (Path(wide) / file).exists():
            (tmp_path / file).write_text((Path(wide) / file).read_text())
    names = sorted(tensors)
    for i, shard in enumerate((names[::2], names[1::2])):
        save_file({n: tensors[n] for n in shard}, tmp_path / f"model-0000{i + 1}-of-00002.safetensors", metadata={"format": "pt"})
    save_file({"another.format": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    a, b = (load(folder, load_in_4bit=True) for folder in (wide, tmp_path))
    assert all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values()))
    save_file({n: tensors[n] for n in names[3::2]}, tmp_path / "model-00002-of-00002.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=names[1]):
        load(tmp_path, load_in_4bit=True)
    # Of shards those that the index names: others may be of an older version.
    save_file({n: tensors[n] for n in names[1::2]}, tmp_path / "model-00002-of-00002.safetensors", metadata={"format": "pt"})
    save_file({n: tensors[n] + 1 for n in names}, tmp_path / "model-00001-of-00001.safetensors", metadata={"format": "pt"})
    index = {n: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, n in enumerate(names)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    d = load(tmp_path, load_in_4bit=True)
    assert all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), d.state_dict().values()))
    (tmp_path / "model.safetensors.index.json").unlink()
    # A whole file beside shards is what transformers reads.
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    save_file({n: tensors[n] + 1 for n in names}, tmp_path / "model-00002-of-00002.safetensors", metadata={"format": "pt"})
    c = load(tmp_path, load_in_4bit=True)
    assert all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), c.state_dict().values()))


def test_a_meta_model_needs_no_weights(wide, tmp_path):
    for file in Path(wide).iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_text(file.read_text())
    a, b = (measure({"path": str(path), "lora_r": 8}, Workload(rows=1, tokens=100)) for path in (wide, tmp_path))
    assert a == b
