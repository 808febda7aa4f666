"""core/tiny.py: the tiny model, its tokenizer and its chat template."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lora_helpers import logits_of

from layers import load_model
from core.tiny import make_tiny


# ---------------------------------------------------------------------------------------------------------------- tiny
@pytest.fixture(scope="module")
def tokenizer():
    return make_tiny()[1]


@pytest.fixture(scope="module")
def reopened(tiny):
    return load_model(tiny, device="cpu")[1]


def test_tiny_is_small_and_repeatable():
    (a, _), (b, _), (c, _) = make_tiny(), make_tiny(), make_tiny(1)
    assert 0.7e6 < sum(p.numel() for p in a.parameters()) < 1e6
    assert torch.equal(logits_of(a), logits_of(b)) and not torch.equal(logits_of(a), logits_of(c))
    state = torch.random.get_rng_state()
    make_tiny(3)
    assert torch.equal(state, torch.random.get_rng_state())


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.text())
def test_tiny_round_trips_any_text(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize("text", ["", "  a  ,b .", "\r\n\u2028\u0301", "e\u0301 é", "👩‍👩‍👧‍👦 שלום", "x" * 500, " " * 10**4, "<tool_call>{}</tool_call>"])
def test_tiny_round_trips_hard_text(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.text(st.characters(codec="utf-8")) | st.text("x +-/(=\n7190{}\"_a", max_size=40))
def test_tiny_read_from_its_folder_splits_as_it_did(reopened, tokenizer, text):
    """transformers gives some model types their own splitting rules when it opens a folder (Qwen2's, for one)."""
    assert reopened.encode(text) == tokenizer.encode(text)


def test_tiny_digits_and_control_tokens(tokenizer):
    for digit in "0123456789-":
        assert len(tokenizer.encode(digit)) == 1
        inside = tokenizer.tokenize(f"x{digit}x")  # a digit never melts into a word
        assert inside == ["x", digit, "x"]
    ids = [tokenizer.convert_tokens_to_ids(t) for t in
           ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<tools>", "</tools>")]
    assert ids[:3] == [0, 1, 2] and len(set(ids)) == len(ids) and None not in ids
    assert tokenizer.eos_token_id == 2 and tokenizer.pad_token_id == 0
    assert tokenizer.encode("<|im_start|><tool_call></tool_call><|im_end|>") == [1, ids[3], ids[4], 2]
    specials = set(tokenizer.all_special_ids)
    assert specials == {0, 2} and not specials & set(ids[3:])  # <tool_call> survives skip_special_tokens


def test_tiny_template_renders_a_tool_conversation(tokenizer):
    tool = {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object", "properties": {"a": {}, "b": {}}}}}
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": "1", "b": "2"}}}
    messages = [{"role": "user", "content": "1+2?"}, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "3"},
                {"role": "tool", "content": "4"}, {"role": "assistant", "content": "3"}]
    text = tokenizer.apply_chat_template(messages, tools=[tool], tokenize=False)
    assert "add(a, b)" in text and '<tool_call>\n{"name": "add", "arguments": {"a": "1", "b": "2"}}\n</tool_call><|im_end|>' in text
    assert text.count("<tool_response>") == 2 and text.count("<|im_start|>user") == 2  # results of one turn share one message
    assert text.count("<|im_start|>") == text.count("<|im_end|>") == 5
    opened = tokenizer.apply_chat_template(messages, tools=[tool], tokenize=False, add_generation_prompt=True)
    assert opened == text + "<|im_start|>assistant\n"
