"""core/model.py and lora.load_model: what a path means, saving, merging, and what is refused."""

import json
import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import programs
import pytest
import torch
from lora_helpers import load, logits_of, peft_base, randomise, train_steps
from safetensors.torch import load_file, save_file
from saving import Tokenizer
from transformers import PreTrainedTokenizerBase

import lora
from extras.exact.checkpoint import seal
from core.config import UserError
from core.model import facts, load_weights, read_tokenizer, save_model
from core.chat import Chat
from core.model import is_tiny, newest
from layers import load_model
from merge import main, merge, with_known_keys, with_known_tokens
from core.tiny import make_tiny
from lora import adapted_linears


def save_checkpoint(model, folder, step):
    """Write a checkpoint as a run does."""
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text("seed: 1\n")
    state = dict(step=step, algorithm="grpo", scores={}, before={}, seconds=0.0, planned=None, bad=0, made_of={}, lines={}, unlogged=None)
    path = folder / "checkpoints" / f"step_{step:06d}"
    save_model(model, path)
    Tokenizer().save_pretrained(path)
    (path / "state.json").write_text(json.dumps(state))
    seal(path)


def test_the_tiny_model_is_known_by_its_config_wherever_it_was_saved(tmp_path):
    model, tokenizer = make_tiny()
    for thing in (model, tokenizer):
        thing.save_pretrained(tmp_path / "model")
    adapted, _ = load_model(str(tmp_path / "model"), lora_r=2, device="cpu")
    save_model(adapted, str(tmp_path / "adapter"))
    tokenizer.save_pretrained(tmp_path / "adapter")
    save_checkpoint(load_model("tiny", lora_r=2, device="cpu")[0], tmp_path / "run", 2)
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


# ---------------------------------------------------------------------------------------------------- saving and merging
@pytest.mark.parametrize("mask", [0o022, 0o027])
def test_a_server_that_runs_as_another_user_can_read_the_weights(tiny, tmp_path, mask):
    """safetensors gives every file the mode 0600: of a merged folder only the config could be read."""
    old = os.umask(mask)
    try:
        whole = load(tiny)
        adapted = load(tiny, lora_r=2)
        save_model(whole, tmp_path / "whole")
        save_model(adapted, tmp_path / "adapter")
        save_model(load("tiny", lora_r=2), tmp_path / "born")
        merge(str(tmp_path / "adapter"), str(tmp_path / "merged"))
    finally:
        os.umask(old)
    modes = {file.relative_to(tmp_path).as_posix(): oct(file.stat().st_mode & 0o777) for file in tmp_path.rglob("*.*")}
    assert {"whole/model.safetensors", "adapter/adapter_model.safetensors", "born/base/model.safetensors", "merged/model.safetensors"} <= modes.keys()
    assert set(modes.values()) == {oct(0o666 & ~mask)}


def test_merge_writes_a_plain_folder(tiny, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer
    model = randomise(load(tiny, lora_r=4))
    save_model(model, tmp_path / "adapter")
    merge(str(tmp_path / "adapter"), str(tmp_path / "plain"))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain").eval()
    assert (logits_of(plain) - logits_of(model)).abs().max() < 1e-5
    assert AutoTokenizer.from_pretrained(tmp_path / "plain").chat_template
    assert not (tmp_path / "plain" / "adapter_config.json").exists()
    assert not any("lora" in key for key in load_file(tmp_path / "plain" / "model.safetensors"))
    assert plain.config.use_cache  # what we set for training is not written into other people's models
    assert torch.equal(logits_of(load(tmp_path / "plain")), logits_of(plain))


def published(tiny, folder):
    """The tiny model with a config.json as models are published with, and an adapter on it."""
    shutil.copytree(tiny, folder / "base")
    stated = json.loads((folder / "base" / "config.json").read_text())
    rope = stated.pop("rope_parameters")
    (folder / "base" / "config.json").write_text(json.dumps(stated | {"rope_theta": rope["rope_theta"] * 3, "rope_scaling": None, "torch_dtype": "float32"}))
    settings = folder / "base" / "tokenizer_config.json"
    words = json.loads(settings.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings.write_text(json.dumps(words) + "\n\n")  # a copy is told from what is written anew
    model = randomise(load(folder / "base", lora_r=4))
    save_model(model, folder / "adapter")
    return model, rope["rope_theta"] * 3


def test_a_merged_folder_says_what_the_files_of_its_base_say(tiny, tmp_path):
    """transformers 4 looks for rope_theta, did not find it, and took 10,000: log-probabilities were off by up to 7 nats in 27 families."""
    model, theta = published(tiny, tmp_path)
    merge(str(tmp_path / "adapter"), str(tmp_path / "plain"))
    stated = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert stated["rope_theta"] == stated["rope_parameters"]["rope_theta"] == theta and stated["rope_scaling"] is None
    assert stated["torch_dtype"] == stated["dtype"] == "float32"
    assert torch.equal(logits_of(load(tmp_path / "plain")), logits_of(load(tmp_path / "adapter", train=False)))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "plain" / name).read_bytes() == (tmp_path / "base" / name).read_bytes()
    # A tokenizer beside the adapter that differs is another one.
    tokenizer = read_tokenizer(str(tmp_path / "base"))
    tokenizer.chat_template = tokenizer.chat_template.replace("You are", "You still are") + " "
    tokenizer.save_pretrained(tmp_path / "adapter")
    merge(str(tmp_path / "adapter"), str(tmp_path / "mine"))
    assert read_tokenizer(str(tmp_path / "mine")).chat_template == tokenizer.chat_template
    assert (tmp_path / "mine" / "tokenizer_config.json").read_bytes() != (tmp_path / "base" / "tokenizer_config.json").read_bytes()


@pytest.mark.parametrize("config, stated, gets", [
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, {}, {"rope_theta": 5.0, "rope_scaling": None}),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 5.0, "factor": 4.0, "partial_rotary_factor": 0.5}}, {},
     {"rope_theta": 5.0, "partial_rotary_factor": 0.5, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
    ({"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 5.0}}}, {"rope_theta": 5.0, "rope_local_base_freq": 2.0}, {"rope_theta": 5.0, "rope_local_base_freq": 2.0}),
    ({"num_local_experts": 4, "dtype": "bfloat16"}, {"num_experts": 4, "torch_dtype": "float16", "quantization_config": {}, "auto_map": {}}, {"num_experts": 4, "torch_dtype": "bfloat16"}),
    ({}, {"text_config": {"rope_theta": 5.0}, "vision_config": {}}, {"rope_theta": 5.0}), ({"vocab_size": 9}, {"vocab_size": 8}, {}), ({}, {}, {})])
def test_keys_that_transformers_5_has_renamed_are_written_under_both_names(config, stated, gets):
    assert with_known_keys(config, stated) == config | gets


def test_a_tokenizers_config_gets_the_words_that_transformers_4_reads():
    assert with_known_tokens({"tokenizer_class": "TokenizersBackend"}) == {"tokenizer_class": "PreTrainedTokenizerFast"}
    assert with_known_tokens({"extra_special_tokens": ["<a>"], "pad_token": "<b>"}) == {"additional_special_tokens": ["<a>"], "pad_token": "<b>"}
    for config in ({"extra_special_tokens": {"image_token": "<a>"}}, {"tokenizer_class": "Qwen2Tokenizer"}):
        assert with_known_tokens(config) == config


@pytest.mark.slow
def test_transformers_4_reads_the_merged_folder_as_the_same_model(tiny, tmp_path):
    """A real transformers 4.57, in a folder of its own: the log-probabilities are equal to the bit."""
    words = "install -q --no-deps --target".split()
    four = ["transformers==4.57.6", "huggingface-hub<1", "tokenizers==0.22.1", "requests", "charset-normalizer", "idna", "urllib3", "certifi"]
    if subprocess.run([sys.executable, "-m", "pip", *words, str(tmp_path / "four"), *four], capture_output=True).returncode:
        pytest.skip("no transformers 4.57 can be installed here")
    published(tiny, tmp_path)
    merge(str(tmp_path / "adapter"), str(tmp_path / "plain"))
    code = ("import sys, torch, transformers as t\nids = (torch.arange(400) * 7 % 700)[None]\nt.AutoTokenizer.from_pretrained(sys.argv[1])\n"
            "model = t.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()\n"
            "with torch.no_grad(): torch.save((t.__version__, model(ids).logits.log_softmax(-1)), sys.argv[2])")
    for name, path in (("five.pt", ""), ("four.pt", str(tmp_path / "four"))):
        subprocess.run([sys.executable, "-c", code, str(tmp_path / "plain"), str(tmp_path / name)], check=True, env={**os.environ, "PYTHONPATH": path})
    (five, ours), (version, theirs) = (torch.load(tmp_path / name) for name in ("five.pt", "four.pt"))
    assert five.startswith("5.") and version == "4.57.6" and torch.equal(ours, theirs)


@pytest.mark.parametrize("lora_r", [0, 2])
def test_what_a_base_model_becomes_stops_where_its_template_ends_a_turn(tiny, tmp_path, lora_r):
    """Base models of Qwen end texts alone. `generate` and vLLM, which read this file, used to go on with the user's next turn."""
    shutil.copytree(tiny, tmp_path / "base")
    # A temperature without do_sample, as many have it: transformers refused to save it, as we had changed the stops.
    edit_json(tmp_path / "base" / "generation_config.json", eos_token_id=7, temperature=0.6, top_p=0.9)
    model, _ = load_model(str(tmp_path / "base"), lora_r=lora_r, device="cpu")
    save_model(model, tmp_path / "saved")
    if lora_r:
        merge(str(tmp_path / "saved"), str(tmp_path / "plain"))
    saved = json.loads((tmp_path / ("plain" if lora_r else "saved") / "generation_config.json").read_text())
    assert saved["eos_token_id"] == [2, 7] and saved["temperature"] == 0.6


def test_full_model_round_trip(tiny, tmp_path):
    model, tokenizer = load_model(tiny, device="cpu")
    train_steps(model, 1)
    save_model(model, tmp_path), tokenizer.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))
    assert torch.equal(logits_of(again), logits_of(model))


def test_a_full_model_that_lacks_a_tensor_is_not_resumed(tiny, tmp_path):
    with pytest.raises(UserError, match=str(tmp_path)):
        load_weights(load(tiny), incomplete(tiny, tmp_path))


def test_an_adapter_of_the_tiny_model_has_its_random_weights_beside_it(tmp_path):
    model = load("tiny", lora_r=2, seed=3)
    save_model(model, tmp_path / "a")
    assert torch.equal(logits_of(load(tmp_path / "a", lora_r=2)), logits_of(model))  # seed 0 would make others
    assert not torch.equal(logits_of(load("tiny", lora_r=2)), logits_of(model))


def test_an_adapter_is_played_with_the_tokenizer_beside_it(tiny, tmp_path):
    """It was trained with this chat template, whatever its base has by now."""
    model, tokenizer = load_model(tiny, lora_r=2, device="cpu")
    tokenizer.chat_template = "{# mine #}" + tokenizer.chat_template
    save_model(model, tmp_path), tokenizer.save_pretrained(tmp_path)
    assert load_model(tmp_path, train=False, device="cpu")[1].chat_template == tokenizer.chat_template


def test_weights_that_train_are_in_float32_however_they_are_stored(tiny, tmp_path):
    half, tokenizer = load_model(tiny, lora_r=0, train=False, dtype="bfloat16", device="cpu")
    half.save_pretrained(tmp_path), tokenizer.save_pretrained(tmp_path)
    model = load(tmp_path, dtype="auto")  # lora_r = 0: nothing is frozen
    assert all(p.dtype == torch.bfloat16 != q.dtype == torch.float32 and torch.equal(p.float(), q) for p, q in zip(half.parameters(), model.parameters(), strict=True))
    with pytest.raises(UserError, match="--dtype is for weights that stay as they are; give --lora_r"):
        load(tiny, dtype="bfloat16")


@pytest.mark.parametrize("source", ["tiny", "folder"])
def test_bf16_leaves_the_rope_frequencies_in_float32(tiny, source):
    model = load(tiny if source == "folder" else "tiny", lora_r=2, dtype="bfloat16")
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(model.model.rotary_emb.inv_freq, load(tiny).model.rotary_emb.inv_freq)
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}


def output_folder(tiny, folder):
    """An output folder as a run leaves it: base/ and two checkpoints."""
    shutil.copytree(tiny, folder / "base")
    model = load(folder / "base", lora_r=4)
    for step in (5, 10):
        randomise(model, scale=step / 20)
        save_checkpoint(model, folder, step)
    return model


def test_an_output_folder_is_its_newest_checkpoint_and_can_be_moved(tiny, tmp_path):
    model = output_folder(tiny, tmp_path / "run")
    assert newest(str(tmp_path / "run")).endswith("step_000010")
    assert torch.equal(logits_of(load(tmp_path / "run", lora_r=4)), logits_of(model))
    shutil.move(tmp_path / "run", tmp_path / "elsewhere")
    moved = load(tmp_path / "elsewhere", lora_r=4)
    assert torch.equal(logits_of(moved), logits_of(model)) and "elsewhere" in facts(moved).source
    assert not torch.equal(logits_of(load(tmp_path / "elsewhere" / "checkpoints" / "step_000005", lora_r=4)), logits_of(model))


# ------------------------------------------------------------------------------------------------------ what is refused
def edit_json(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def adapter_of(tiny, folder):
    save_model(randomise(load(tiny, lora_r=4)), folder)
    return folder


def missing(tiny, folder):
    return folder / "nowhere"


def empty(tiny, folder):
    return folder


def pickle_only(tiny, folder):
    shutil.copytree(tiny, folder / "m")
    (folder / "m" / "model.safetensors").unlink()
    (folder / "m" / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    return folder / "m"


def no_weights(tiny, folder):
    shutil.copytree(tiny, folder / "m")
    (folder / "m" / "model.safetensors").unlink()
    return folder / "m"


def no_template(tiny, folder):
    shutil.copytree(tiny, folder / "m")
    (folder / "m" / "chat_template.jinja").unlink()
    return folder / "m"


def no_tokenizer(tiny, folder):
    peft_base(tiny).save_pretrained(folder / "m")
    return folder / "m"


def no_vocabulary(tiny, folder):
    """What Trainer writes without a tokenizer, and the template that the refusal used to ask for."""
    shutil.copy(Path(tiny) / "chat_template.jinja", no_tokenizer(tiny, folder))
    return folder / "m"


def long_tokenizer(tiny, folder):
    shutil.copytree(tiny, folder / "m")
    tokenizer = make_tiny()[1]
    tokenizer.add_tokens([f"<extra_{i}>" for i in range(300)])
    tokenizer.save_pretrained(folder / "m")
    return folder / "m"


def corrupt(tiny, folder):
    shutil.copytree(tiny, folder / "m")
    data = (folder / "m" / "model.safetensors").read_bytes()
    (folder / "m" / "model.safetensors").write_bytes(data[:len(data) // 2])
    return folder / "m"


def incomplete(tiny, folder):
    shutil.copytree(tiny, folder / "m")
    tensors = load_file(folder / "m" / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "m" / "model.safetensors", metadata={"format": "pt"})
    return folder / "m"


def misshapen(tiny, folder):
    shutil.copytree(tiny, folder / "m")
    tensors = load_file(folder / "m" / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(2, 2)
    save_file(tensors, folder / "m" / "model.safetensors", metadata={"format": "pt"})
    return folder / "m"


def not_finite(tiny, folder):
    shutil.copytree(tiny, folder / "m")
    tensors = load_file(folder / "m" / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = math.nan
    save_file(tensors, folder / "m" / "model.safetensors", metadata={"format": "pt"})
    return folder / "m"


def unknown_head(tiny, folder):
    """HyperCLOVAX multiplies by what Granite divides by, under the same name."""
    from transformers import HyperCLOVAXConfig, HyperCLOVAXForCausalLM
    shutil.copytree(tiny, folder / "m")
    HyperCLOVAXForCausalLM(HyperCLOVAXConfig(vocab_size=2000, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                                             num_key_value_heads=2, logits_scaling=3.0)).save_pretrained(folder / "m")
    return folder / "m"


def broken_config(tiny, folder):
    shutil.copytree(tiny, folder / "m")
    (folder / "m" / "config.json").write_text("{")
    return folder / "m"


def unknown_model(tiny, folder):
    shutil.copytree(tiny, folder / "m")
    edit_json(folder / "m" / "config.json", model_type="no_such_model")
    return folder / "m"


def peft_adapter(**options):
    def make(tiny, folder):
        from peft import LoraConfig, get_peft_model
        get_peft_model(peft_base(tiny), LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], **options)).save_pretrained(folder)
        return folder
    return make


def wrong_shape(tiny, folder):
    edit_json(adapter_of(tiny, folder) / "adapter_config.json", r=8)
    return folder


def missing_tensor(tiny, folder):
    edit_json(peft_adapter()(tiny, folder) / "adapter_config.json", target_modules=["q_proj", "v_proj"])
    return folder


def spare_tensor(tiny, folder):
    edit_json(adapter_of(tiny, folder) / "adapter_config.json", target_modules=["q_proj"])
    return folder


def broken_adapter_config(tiny, folder):
    (adapter_of(tiny, folder) / "adapter_config.json").write_text('{"r": 4,')
    return folder


def corrupt_adapter(tiny, folder):
    (adapter_of(tiny, folder) / "adapter_model.safetensors").write_bytes(b"\0" * 100)
    return folder


def base_gone(tiny, folder):
    edit_json(adapter_of(tiny, folder) / "adapter_config.json", base_model_name_or_path="/gone/model")
    return folder


def prompt_tuning(tiny, folder):
    edit_json(adapter_of(tiny, folder) / "adapter_config.json", peft_type="PROMPT_TUNING")
    return folder


def with_prefix(prefix):
    def make(tiny, folder):
        """Its merges do not begin with it: the tokenizer's Rust code panics, which is no Exception."""
        shutil.copytree(tiny, folder / "m")
        stored = json.loads((folder / "m" / "tokenizer.json").read_text())
        stored["model"]["continuing_subword_prefix"] = prefix
        (folder / "m" / "tokenizer.json").write_text(json.dumps(stored))
        return folder / "m"
    return make


@pytest.mark.parametrize("make, says", [
    (with_prefix("##"), "its tokenizer.json contradicts itself"), (with_prefix(7), "no tokenizer could be read (invalid type"),
    (missing, "no such folder"), (empty, "cannot be loaded: no model (config.json) is there, nor a step that a run has saved"), (pickle_only, "cannot be loaded"),
    (no_weights, "cannot be loaded"), (no_template, "no chat template"), (no_tokenizer, "no tokenizer could be read"), (no_vocabulary, "tokenizer.json is missing"), (long_tokenizer, "tokenizer has 1078 tokens, model 778"),
    (corrupt, "cannot be loaded"), (incomplete, "model.layers.1.mlp.up_proj.weight"), (misshapen, "no weights for model.layers.1.mlp.up_proj.weight"), (broken_config, "cannot be loaded"), (not_finite, "not finite"), (unknown_head, "HyperCLOVAXForCausalLM: the training forward differs"),
    (unknown_model, "cannot be loaded"), (peft_adapter(use_dora=True), "use_dora"), (peft_adapter(bias="all"), "bias"), (peft_adapter(revision="abc"), "revision"),
    (peft_adapter(rank_pattern={"q_proj": 2}), "rank_pattern"), (peft_adapter(modules_to_save=["lm_head"]), "modules_to_save"),
    (peft_adapter(init_lora_weights="pissa"), "pissa"), (wrong_shape, "lora_A is (4, 128), the model needs (8, 128)"), (missing_tensor, "v_proj.lora_A is missing"),
    (spare_tensor, "no place"), (broken_adapter_config, "adapter_config.json"), (corrupt_adapter, "adapter_model.safetensors"),
    (base_gone, "/gone/model: no such folder"), (prompt_tuning, "only plain LoRA is read here; merge others with PEFT")])
def test_refusals_are_one_line_that_names_the_place(tiny, tmp_path, make, says):
    path = make(tiny, tmp_path)
    vocab, tokens = (len(make_tiny()[1]) + extra for extra in (0, 300))
    with pytest.raises(UserError) as error:
        load(path, lora_r=4)
    message = str(error.value)
    assert says.replace("1078", str(tokens)).replace("778", str(vocab)) in message and "\n" not in message
    assert str(tmp_path) in message or make is base_gone


@pytest.mark.parametrize("memory", ["4bit", "small"])
def test_a_head_that_differs_from_the_embedding_it_is_tied_to_is_refused(tiny, tmp_path, memory):
    shutil.copytree(tiny, tmp_path / "m")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
    load(tmp_path / "m", lora_r=4, memory=memory)
    tensors["lm_head.weight"][0, 0] += 1
    save_file(tensors, tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="m: its config.json ties lm_head.weight to model.embed_tokens.weight, but they differ"):
        load(tmp_path / "m", lora_r=4, memory=memory)


@pytest.mark.parametrize("memory", ["4bit", "stream"])
def test_a_shape_that_the_config_does_not_have_is_named(tiny, tmp_path, memory):
    with pytest.raises(UserError, match="m: model.layers.1.mlp.up_proj.weight has another shape than its config.json says$"):
        load(misshapen(tiny, tmp_path), lora_r=4, memory=memory)


@pytest.mark.parametrize("path", ["läufe/eins", "my models/x", "~/model", "a/b/c", "gpt2"])
def test_what_cannot_be_a_hub_id_is_a_folder_that_does_not_exist(path):
    with pytest.raises(UserError, match=f"^{path}: no such folder; give tiny"):
        load(path)


def test_a_hub_id_without_a_network_answers_in_seconds(monkeypatch, capsys):
    import huggingface_hub
    calls = []

    def no_network(*_, local_files_only=False, **__):
        calls.append(local_files_only)
        raise ConnectionError("[Errno -2] Name or service not known")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", no_network)
    began = time.time()
    with pytest.raises(UserError, match="nobody/no-such-model: cannot be loaded") as error:
        load("nobody/no-such-model")
    assert calls == [True, False] and time.time() - began < 30 and "\n" not in str(error.value)
    # It may be a folder that was mistyped.
    assert capsys.readouterr().out == "nobody/no-such-model: no such folder here; asking the hub for it\n"


def test_a_hub_id_of_which_a_part_is_cached_goes_to_the_hub(tiny, tmp_path, monkeypatch):
    import huggingface_hub
    (tmp_path / "part").mkdir()
    shutil.copy(Path(tiny) / "config.json", tmp_path / "part")

    def download(source, allow_patterns, local_files_only=False):
        assert source == "some/model" and "model*.safetensors" in allow_patterns
        return str(tmp_path / "part" if local_files_only else tiny)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    model = load("some/model")
    assert torch.equal(logits_of(model), logits_of(load(tiny))) and facts(model).source == "some/model"


def test_the_command_line_says_what_is_wrong(tmp_path):
    out = programs.run(lora.__file__, "merge", tmp_path, tmp_path / "out")
    assert out.returncode == 2 and out.stderr.startswith("lora.py: ") and len(out.stderr.splitlines()) == 1


@pytest.mark.parametrize("target, says", [("base", "is not empty; give a new folder"), ("a_file/x", "a_file")])
def test_merge_overwrites_nothing(tmp_path, target, says):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").touch()
    (tmp_path / "a_file").touch()
    done = programs.run(lora.__file__, "merge", "nowhere", tmp_path / target)
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr


def test_an_interrupted_merge_leaves_nothing_and_can_be_repeated(tiny, tmp_path, monkeypatch, capsys):
    """Ctrl-C between the weights and the tokenizer. The folder used to hold half a model, which refused the same command."""
    words = ["merge", adapter_of(tiny, tmp_path / "adapter"), tmp_path / "place" / "plain"]
    save = PreTrainedTokenizerBase.save_pretrained

    def interrupted(self, folder, **options):
        assert (Path(folder) / "model.safetensors").exists() and not (tmp_path / "place" / "plain").exists()
        raise KeyboardInterrupt
    monkeypatch.setattr(PreTrainedTokenizerBase, "save_pretrained", interrupted)
    assert main(list(map(str, words))) == 130 and capsys.readouterr().err.endswith(f"lora.py: interrupted; {words[2]} is as it was\n")
    assert not list((tmp_path / "place").iterdir())
    monkeypatch.setattr(PreTrainedTokenizerBase, "save_pretrained", save)
    assert main(list(map(str, words))) == 0
    assert f"written: {words[2]}, a plain model folder\n" in capsys.readouterr().out
    assert [p.name for p in (tmp_path / "place").iterdir()] == ["plain"]
    assert torch.isfinite(logits_of(load(tmp_path / "place" / "plain"))).all()


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_dropout_is_the_flag_s_whatever_the_adapter_was_trained_with(tiny, tmp_path, dropout):
    save_model(load(tiny, lora_r=4, lora_dropout=0.3), tmp_path)
    model = load(str(tmp_path), lora_r=4, lora_dropout=dropout)
    assert {linear.lora.dropout for linear in adapted_linears(model).values()} == {dropout}


# ------------------------------------------------------------------------------------------- an adapter's own settings
@pytest.mark.parametrize("options, says", [
    ({"lora_alpha": 9}, "is an adapter with lora_alpha 8, which --lora_alpha 9 cannot change; leave that flag out"),
    ({"lora_target_modules": "q_proj"}, "is an adapter with lora_target_modules q_proj,v_proj, which --lora_target_modules q_proj cannot change"),
])
def test_settings_that_an_adapter_has_already_are_not_ignored(tiny, tmp_path, options, says):
    save_model(load(tiny, lora_r=4, lora_alpha=8, lora_target_modules="q_proj,v_proj"), tmp_path)
    for rank in (0, 4):
        with pytest.raises(UserError) as error:
            load(tmp_path, lora_r=rank, **options)
        assert str(error.value).startswith(f"{tmp_path}: {says}") and "\n" not in str(error.value)
    assert load(tmp_path, lora_r=4, lora_alpha=8, lora_target_modules="v_proj, q_proj").lora_settings.peft["lora_alpha"] == 8


@pytest.mark.parametrize("options", [
    {"target_modules": r".*self_attn\.(q_proj|v_proj)"}, {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [1]},
    {"target_modules": ["q_proj", "v_proj"], "exclude_modules": ["v_proj"]}], ids=str)
def test_which_linears_a_pattern_or_a_rule_has_chosen_the_tensors_say(tiny, tmp_path, options):
    from peft import LoraConfig, get_peft_model
    theirs = get_peft_model(peft_base(tiny), LoraConfig(r=2, init_lora_weights=False, **options))
    theirs.save_pretrained(tmp_path)
    edit_json(tmp_path / "adapter_config.json", base_model_name_or_path=str(tiny))
    ids = torch.arange(5, 25)[None]
    with torch.inference_mode():
        assert torch.equal(load(tmp_path, lora_r=2).eval()(ids).logits, theirs.eval()(ids).logits)


def test_a_template_of_the_older_form_is_read(tiny, tmp_path):
    folder = no_template(tiny, tmp_path)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": Path(tiny, "chat_template.jinja").read_text()}))
    assert load_model(str(folder))[1].chat_template


@pytest.mark.parametrize("family, noise", [("hunyuan_v1_dense", "attention_dropout"), ("mixtral", "router_jitter_noise")])
def test_noise_of_the_base_model_is_off_while_it_trains(tmp_path, family, noise):
    """An update sees the policy that sampled. The config that is saved with the model says what it said."""
    import decoders
    tokenizer = load_model("tiny")[1]
    tokenizer.save_pretrained(tmp_path)
    decoders.make(family, vocab_size=len(tokenizer), **{noise: 0.5}).save_pretrained(tmp_path)
    ids = torch.arange(5, 25)[None]

    def same(model):
        with torch.no_grad():
            return torch.equal(model(ids).logits, model(ids).logits)
    model = load(tmp_path, lora_r=2).train()
    assert same(model) and getattr(model.config, noise) == 0.5
    model = load(tmp_path, lora_r=2, lora_dropout=0.5).train()  # the adapter's own stays
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.data.fill_(1.0)
    assert not same(model)


@pytest.mark.parametrize("changes, says", [
    ({"r": None}, "adapter_config.json: "),
    ({"lora_alpha": 0}, "lora_alpha and r must be above 0"), ({"r": 0}, "lora_alpha and r must be above 0"),
    ({"r": -4, "lora_alpha": -8}, "lora_alpha and r must be above 0"), ({"lora_alpha": "8"}, "adapter_config.json: "),
    ({"target_modules": ["no_such_proj"]}, "adapter_config.json: --lora_target_modules: no Linear called no_such_proj"),
    ({"base_model_name_or_path": ["x"]}, "base_model_name_or_path ['x']: no such folder"), ({"base_model_name_or_path": None}, "base_model_name_or_path : no such folder"), ({"init_lora_weights": ["x"]}, "init_lora_weights")], ids=str)
def test_an_adapter_config_that_is_not_understood_is_refused(tiny, tmp_path, changes, says):
    save_model(load(tiny, lora_r=4), tmp_path)
    edit_json(tmp_path / "adapter_config.json", **changes)
    with pytest.raises(UserError) as error:
        load(tmp_path, lora_r=4)
    assert says in str(error.value) and "\n" not in str(error.value)
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e300])
def test_an_adapter_with_numbers_that_are_not_finite_is_refused_wherever_it_is_loaded(tiny, tmp_path, value):
    save_model(load(tiny, lora_r=4), tmp_path / "a")
    tensors = load_file(tmp_path / "a" / "adapter_model.safetensors")
    name = sorted(tensors)[3]
    tensors[name] = tensors[name].double()
    tensors[name][1, 1] = value
    save_file(tensors, tmp_path / "a" / "adapter_model.safetensors")
    for go in (lambda: load(tmp_path / "a", lora_r=4), lambda: load(tmp_path / "a", train=False), lambda: merge(str(tmp_path / "a"), str(tmp_path / "m"))):
        with pytest.raises(UserError, match="has values that are not finite") as error:
            go()
        assert f"{tmp_path}/a/adapter_model.safetensors: " in str(error.value) and ".lora_" in str(error.value)


def test_a_quantized_model_is_refused(tiny, tmp_path):
    shutil.copytree(tiny, tmp_path / "q")
    edit_json(tmp_path / "q" / "config.json", quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    for options in ({}, {"lora_r": 4, "load_in_4bit": True}):
        with pytest.raises(UserError, match=f"{tmp_path}/q: is a quantized model; give the original one .*adapter_config.json.*, and --load_in_4bit for 4 bits"):
            load(tmp_path / "q", **options)


@pytest.mark.parametrize("dtype, word", [(torch.float8_e4m3fn, "F8_E4M3"), (torch.int8, "I8"), (torch.uint8, "U8")])
def test_a_quantized_model_whose_config_does_not_say_so_is_refused(tiny, tmp_path, dtype, word):
    """Its numbers without their scales would be taken for weights. A mask of bytes is no weight."""
    shutil.copytree(tiny, tmp_path / "q")
    tensors = load_file(tmp_path / "q" / "model.safetensors")
    tensors["model.layers.0.self_attn.bias"] = torch.ones(4, dtype=torch.uint8)
    save_file(tensors, tmp_path / "q" / "model.safetensors", {"format": "pt"})
    load(tmp_path / "q")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(dtype)
    save_file(tensors, tmp_path / "q" / "model.safetensors", {"format": "pt"})
    for options in ({}, {"lora_r": 4, "memory": "small"}):
        with pytest.raises(UserError, match=f"q: {name} is stored as {word}: the model is quantized, and its config.json does not say how"):
            load(tmp_path / "q", **options)


def test_a_wrapper_whose_text_model_is_quantized_is_refused(tiny, tmp_path):
    from transformers import AutoConfig, Gemma3Config
    shutil.copytree(tiny, tmp_path / "q")
    Gemma3Config(text_config={"quantization_config": {"quant_method": "compressed-tensors"}}).save_pretrained(tmp_path / "q")
    assert not hasattr(AutoConfig.from_pretrained(tmp_path / "q"), "quantization_config")
    with pytest.raises(UserError, match="q: is a quantized model"):
        load(tmp_path / "q")


@pytest.mark.parametrize("named", ["flash_attention_2", "flash_attention_3", "kernels-community/flash-attn", "paged|sdpa", "eager", "nonsense"])
def test_the_attention_that_a_config_names_is_not_used(tiny, tmp_path, named):
    shutil.copytree(tiny, tmp_path / "m")
    edit_json(tmp_path / "m" / "config.json", _attn_implementation=named, attn_implementation=named)
    model = load(tmp_path / "m")
    assert model.config._attn_implementation == "causal_attention" and torch.equal(logits_of(model), logits_of(load(tiny)))
    load_weights(model, tmp_path / "m")  # as --resume reads a checkpoint of all weights


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json", "state.json"])
def test_a_checkpoint_of_a_run_is_verified_when_it_is_loaded(place, tmp_path, name):
    """One flipped bit is refused by --model_path as by --resume."""
    shutil.copytree(place / "run", tmp_path / "run")
    checkpoint = newest(str(tmp_path / "run"))
    load_model(str(tmp_path / "run"), device="cpu")
    path = Path(checkpoint) / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    for given in (tmp_path / "run", checkpoint):
        with pytest.raises(UserError) as error:
            load_model(str(given), device="cpu")
        assert checkpoint in str(error.value) and "\n" not in str(error.value)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with `run`, the output folder of one step of SFT."""
    import sft
    folder = tmp_path_factory.mktemp("place")
    sft.train(sft.Config(model_path="tiny", output_dir=str(folder / "run"), lora_r=2, max_steps=1, max_samples=8, eval_tasks=0, dtype="float32"))
    return folder


# ------------------------------------------------------------------------------------- folders as the hub has them
def test_a_special_token_without_an_embedding_is_no_other_models_tokenizer(tiny, tmp_path):
    """Gemma 3 of 1B and 270M has <image_soft_token> beyond its embedding. A template that writes it would need it."""
    folder = tmp_path / "m"
    shutil.copytree(tiny, folder)
    tokenizer = make_tiny()[1]
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image_soft_token>"]})
    tokenizer.save_pretrained(folder)
    model, again = load_model(str(folder), lora_r=2, device="cpu")
    assert len(again) == 1 + len(model.get_input_embeddings().weight)
    ids = Chat(again, []).prompt([{"role": "user", "content": "an <image_soft_token>"}])
    assert max(ids) < len(again) - 1 and again.decode(ids).count("<image_soft_token>") == 1
    (folder / "chat_template.jinja").write_text("<image_soft_token>" + tokenizer.chat_template)
    with pytest.raises(UserError, match="they belong to different models"):
        load(folder)
    tokenizer.add_special_tokens({"bos_token": "<s>"})  # which templates name by a variable
    tokenizer.chat_template = "{{ bos_token }}" + make_tiny()[1].chat_template
    tokenizer.save_pretrained(folder)
    with pytest.raises(UserError, match="they belong to different models"):
        load(folder)
