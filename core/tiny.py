"""The tiny model, which is what `--model_path tiny` means.

It has random weights, a tokenizer of its own and a Hermes chat template, and it walks the path of a
real Qwen: the same architecture family, ChatML turns, `<tool_call>` JSON. It is small on purpose:
tools are shown by name and parameters alone, the JSON around a call is three tokens, and a number
of two digits is one token, its minus sign included.
"""
from pathlib import Path

import torch

TINY_TEMPLATE = Path(__file__).with_name("tiny.jinja").read_text(encoding="utf-8").rstrip("\n")
# What the byte-level BPE is trained on, besides the numbers from -99 to 99. Each of these is one
# token, so copying one is one step.
TINY_TEXT = Path(__file__).with_name("tiny.txt").read_text(encoding="utf-8").rstrip("\n")
# The JSON of a call and of an answer in few pieces, then numbers of two digits, words, the rest.
TINY_SPLIT = "|".join([
    r'\n\{"name": "|", "arguments": \{\}\}\n|", "arguments": \{"|"\}\}\n|\([a-z]+\)',
    r'\n(?=\{"probability": )| ?\{"probability": 0\.|, "reason": "|", "recommendation": "|YES\|NO',
    r"-?\d{1,2}|-| ?[A-Za-z_]+|[^\dA-Za-z_-]+"])

# How the tiny model is taught: by demonstrations in which most actions are wrong, but numbers are
# copied correctly. Which action to choose is left to learn.
TINY_SFT = {"max_samples": 1400, "expert_noise": 0.6, "max_turns": 6, "max_steps": 300,
            "batch_size": 16, "learning_rate": 3e-3}


def make_tiny(seed: int = 0):
    """Return a Qwen3 of about 0.9 M random parameters, and a byte-level tokenizer with ChatML.

    Not a Qwen2: transformers 5 opens that with splitting rules of its own.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
    backend = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = pre_tokenizers.Split(Regex(TINY_SPLIT), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    backend.decoder = decoders.ByteLevel()
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    markup = ["<tools>", "</tools>", "<tool_call>", "</tool_call>",
              "<tool_response>", "</tool_response>"]
    json = ['\n{"name": "state_answer", "arguments": {"value": "3"}}\n',
            '\n{"name": "slot_fit", "arguments": {}}\n',
            ' {"probability": 0.xx, "reason": "word", "recommendation": "YES|NO"}',
            '{"probability": 0.50', "()"]
    numbers = [*map(str, range(-99, 100)), *map("0{}".format, range(10))]
    # Words with and without a space before them.
    texts = [TINY_TEXT.replace("\n", " "), TINY_TEXT.replace(" ", "\n")] * 2
    backend.train_from_iterator(texts + json * 8 + numbers * 2, trainers.BpeTrainer(
        vocab_size=1024, min_frequency=2, special_tokens=control, show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())))
    backend.add_tokens(markup)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = TINY_TEMPLATE
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(Qwen3Config(
            vocab_size=len(tokenizer), hidden_size=128, intermediate_size=384, num_hidden_layers=4,
            num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=4096,
            initializer_range=0.06, tie_word_embeddings=True, bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, tiny=True))
    return model, tokenizer
