"""processor.py: the default of --dtype is what a product of the model's own shape is measured to be faster in."""
import json
from types import SimpleNamespace

import pytest
import torch

import grpo
from core.config import read_yaml
from core.model import ADAPTER
from extras.fast import processor


def config(**fields):
    return SimpleNamespace(**{"lora_r": 16, "resume": False, "output_dir": "nowhere", "model_path": "", **fields})


@pytest.fixture
def clock(monkeypatch):
    """A function that sets the milliseconds of a product in bfloat16, for 10 in float32; the calls of the clock are in `calls`."""
    processor.faster_dtype.cache_clear()

    def set_to(fast):
        calls = []

        def product_ms(tokens, width, inner, dtype):
            calls.append((tokens, width, inner))
            return {torch.float32: 10.0, torch.bfloat16: fast}[dtype]
        monkeypatch.setattr(processor, "product_ms", product_ms)
        return calls
    yield set_to
    processor.faster_dtype.cache_clear()


def folder_of(place, **settings):
    place.mkdir(parents=True, exist_ok=True)
    (place / "config.json").write_text(json.dumps(settings))
    return str(place)


@pytest.mark.parametrize("fast, dtype", [(5.0, "bfloat16"), (9.0, "bfloat16"), (9.2, "float32"), (20.0, "float32")])
def test_bfloat16_has_to_be_a_tenth_faster_and_a_line_says_so(tmp_path, clock, capsys, fast, dtype):
    calls, model = clock(fast), folder_of(tmp_path, hidden_size=576, intermediate_size=1536, num_hidden_layers=2, vocab_size=1000)
    assert [processor.best_dtype(config(model_path=model)) for _ in range(2)] == [dtype] * 2
    assert calls == [(512, 576, 1536)] * 2  # once in each, however often it is asked
    assert capsys.readouterr().out == f"dtype {dtype}: a product of 512 x 576 x 1536 takes {fast:.1f} ms in bfloat16 and 10.0 in float32\n"


def test_weights_that_do_not_fit_in_float32_are_bfloat16(tmp_path, clock, capsys, monkeypatch):
    clock(20.0)
    model = folder_of(tmp_path, hidden_size=2048, intermediate_size=8192, num_hidden_layers=10, vocab_size=1000)
    parameters = processor.shape_of(model)[2]
    for free, dtype in ((6 * parameters, "float32"), (6 * parameters - 1, "bfloat16")):
        processor.faster_dtype.cache_clear()
        monkeypatch.setattr(processor, "free_memory", lambda: free)
        assert processor.best_dtype(config(model_path=model)) == dtype
    assert capsys.readouterr().out.splitlines()[1].endswith("; in float32 the weights would not fit in memory")


def test_a_resumed_run_has_the_dtype_that_it_began_with(tmp_path, clock):
    calls = clock(5.0)
    (tmp_path / "config.yaml").write_text("# grpo run; so\ndtype: float32\n")
    assert processor.best_dtype(config(resume=True, output_dir=str(tmp_path))) == "float32" and not calls
    assert processor.best_dtype(config(output_dir=str(tmp_path))) == "bfloat16" and calls


def test_the_choice_stands_in_config_yaml(tmp_path, clock, monkeypatch):
    clock(20.0)
    model = folder_of(tmp_path / "model", hidden_size=576, intermediate_size=1536)
    run = grpo.Run(grpo.settle(grpo.Config(model_path=model, output_dir=str(tmp_path / "run"))), "grpo")
    run.folder.mkdir(exist_ok=True)
    run.write_config()
    assert read_yaml(tmp_path / "run" / "config.yaml")["dtype"] == "float32"


def test_what_is_not_measured(tmp_path, clock, monkeypatch):
    """Weights that train are float32, tiny products too; several processes go by the processor's flags, as all have to choose alike."""
    calls = clock(5.0)
    assert processor.best_dtype(config(lora_r=0)) == "float32"
    assert processor.best_dtype(config(model_path=folder_of(tmp_path, hidden_size=64, intermediate_size=128))) == "float32"
    monkeypatch.setenv("WORLD_SIZE", "2")
    for units, dtype in ((True, "bfloat16"), (False, "float32")):
        monkeypatch.setattr(processor, "has_units", lambda: units)
        assert processor.best_dtype(config()) == dtype
    assert not calls


def test_the_shape_is_that_of_the_model_behind_a_path(tmp_path):
    text = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 70}
    expected = 48, 96, 3 * 48 * (3 * 96 + 3 * 48) + 70 * 48
    base = folder_of(tmp_path / "base", **text)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / ADAPTER).write_text(json.dumps({"base_model_name_or_path": base}))
    nested = folder_of(tmp_path / "nested", text_config=text, hidden_size=1)
    assert [processor.shape_of(str(path)) for path in (base, tmp_path / "adapter", nested)] == [expected] * 3
    assert processor.shape_of("nobody/has-this")[:2] == (896, 4864)  # not in the hub's cache: the error is load_model's


def test_the_clock_measures_both():
    assert all(0 < processor.product_ms(16, 256, 256, dtype) < 10_000 for dtype in (torch.float32, torch.bfloat16))
    assert processor.free_memory() > 2**20
