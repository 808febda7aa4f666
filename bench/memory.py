"""The memory that training takes, for models and flags, counted on a machine without a GPU.

    python bench/memory.py                  prints the README's table; the last line is JSON

One micro-batch of one sequence through lora.token_logprobs, backward and AdamW, whose gradients and moments are there
from the steps before, rank 16 on all Linears, bfloat16: the code of a run, on the meta device (budget.py). MiB of
tensors on the GPU; CUDA's context comes on top, 300 to 500.
"""
import json
import os
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

from llm.budget import MIB, Workload, measure  # noqa: E402
from llm.memory import SETTINGS  # noqa: E402
from llm.tiny import make_tiny  # noqa: E402

# hidden, layers, heads, KV heads, MLP, vocabulary, tied: config.json of the Qwen2.5 models
MODELS = {"Qwen2.5-0.5B": (896, 24, 14, 2, 4864, 151936, True), "Qwen2.5-1.5B": (1536, 28, 12, 2, 8960, 151936, True),
          "Qwen2.5-3B": (2048, 36, 16, 2, 11008, 151936, True), "Qwen2.5-7B": (3584, 28, 28, 4, 18944, 152064, False)}


def update_bytes(name: str, tokens: int, memory: str) -> dict:
    """`measure` of one sequence of so many tokens."""
    from transformers import Qwen2Config
    hidden, layers, heads, kv_heads, mlp, vocabulary, tied = MODELS[name]
    with tempfile.TemporaryDirectory() as folder:
        Qwen2Config(vocab_size=vocabulary, hidden_size=hidden, intermediate_size=mlp, num_hidden_layers=layers,
                    num_attention_heads=heads, num_key_value_heads=kv_heads, tie_word_embeddings=tied,
                    max_position_embeddings=32768, dtype="bfloat16").save_pretrained(folder)
        make_tiny()[1].save_pretrained(folder)
        return measure({"path": folder, "lora_r": 16, "dtype": "bfloat16", "memory": memory}, Workload(1, tokens))


def main():
    print(f"{'MiB':14}{'tokens':>8}" + "".join(f"{name:>15}" for name in SETTINGS))
    last = {}
    for name in MODELS:
        for tokens in (512, 1024, 4096):
            row = {}
            for memory in SETTINGS:
                row[memory] = update_bytes(name, tokens, memory)["update"] / MIB
            print(f"{name:14}{tokens:8,}" + "".join(f"{mib:15,.0f}" for mib in row.values()), flush=True)
            if tokens == 1024:
                key = ("Qwen2.5-7B-streamed", "stream") if name == "Qwen2.5-7B" else (name, "small")
                last[key[0]] = round(row[key[1]], 1)
    print(json.dumps(last))


if __name__ == "__main__":
    main()
