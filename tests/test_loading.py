"""llm/loading.py: what a path means."""
from llm.loading import is_tiny, load_model, save_model
from llm.merge import merge
from llm.tiny import make_tiny


def test_the_tiny_model_is_known_by_its_config_wherever_it_was_saved(tmp_path):
    model, tokenizer = make_tiny()
    for thing in (model, tokenizer):
        thing.save_pretrained(tmp_path / "model")
    adapted, _ = load_model(str(tmp_path / "model"), lora_r=2, device="cpu")
    save_model(adapted, str(tmp_path / "adapter"))
    tokenizer.save_pretrained(tmp_path / "adapter")
    save_model(load_model("tiny", lora_r=2, device="cpu")[0], str(tmp_path / "run" / "checkpoints" / "step_000002"))
    whole, _ = load_model(str(tmp_path / "model"), device="cpu")
    save_model(whole, str(tmp_path / "whole"))
    merge(str(tmp_path / "adapter"), str(tmp_path / "merged"))
    for name in ("model", "adapter", "run", "whole", "merged"):
        assert is_tiny(str(tmp_path / name)), name
    assert is_tiny("tiny")


def test_what_is_not_the_tiny_model_is_never_read_and_never_raises(tmp_path):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("[{")
    (tmp_path / "list").mkdir()
    (tmp_path / "list" / "config.json").write_text("[1]")
    (tmp_path / "empty").mkdir()
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"base_model_name_or_path": 7}')
    (tmp_path / "file").write_text("")
    for name in ("broken", "list", "empty", "adapter", "file", "missing"):
        assert not is_tiny(str(tmp_path / name)), name
    assert not any(map(is_tiny, ("Qwen/Qwen2.5-0.5B-Instruct", "", "/no/such/folder", "a\0b")))
