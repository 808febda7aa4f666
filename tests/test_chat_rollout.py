"""Demand of every template: what the rollout samples is what is trained, at the log-probability the trainer recomputes.

The scripted expert's turns are forced upon a small random model, so that a whole multi-turn episode is played: the ids must be
those of `demonstrate` (the SFT path), token for token, and the log-probs those of `token_logprobs`.
"""
import pytest
import torch
from families import NAMES, real, small
from transformers import Qwen3Config, Qwen3ForCausalLM

import agent
from agent import collate, rollout
from episodes.imitation import demonstrate
from llm.engine import Row
from llm.logprobs import token_logprobs
from llm.memory import PLAIN
from llm.tiny import make_tiny
from lora import adapters, add_lora, merged


def tokenizer_of(case):
    if case == "tiny":
        return make_tiny()[1]
    return real(case[5:]) if case.startswith("real:") else small(case)


@pytest.mark.parametrize("case", ["tiny", *NAMES])
def test_rollout_gives_the_ids_of_the_demonstration_and_the_trainers_logprobs(case, monkeypatch):
    tokenizer = tokenizer_of(case)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, head_dim=8,
        num_key_value_heads=1, initializer_range=0.1, max_position_embeddings=4096)).eval()
    add_lora(model, r=4, alpha=8)
    for linear in adapters(model).values():
        torch.nn.init.normal_(linear.lora.B, std=0.05)
    limits = agent.Limits(max_new_tokens=400, max_tokens=8000, max_tool_tokens=8000)
    tasks = [{"equation": "x + 3 = 5"}, {"equation": "2x = -6"}, {"equation": "x/2 = 4"}]
    wanted = demonstrate(tokenizer, "equations", tasks, limits)
    assert all(t.info["success"] and t.info["parsed_turns"] == len(t.rewards) >= 2 for t in wanted)
    scripts = iter([[i for i, m in zip(t.token_ids, t.loss_mask) if m] for t in wanted for _ in range(2)])
    monkeypatch.setattr(agent, "Row", lambda *args, **options: Row(*args, forced=next(scripts), **options))
    monkeypatch.setattr("agent.techniques_of", lambda model: PLAIN._replace(decode_rows=4))  # fewer slots than episodes
    with merged(model):
        played = rollout(model, tokenizer, "equations", tasks, 2, limits=limits)
    for got, want in zip(played, [t for t in wanted for _ in range(2)], strict=True):
        assert got.token_ids == want.token_ids and got.loss_mask == want.loss_mask and got.rewards == want.rewards
        assert got.stop_reason == "done" and got.info["success"]
    ids, mask, sampled = collate(played)
    with torch.no_grad():
        recomputed, _ = token_logprobs(model, ids, mask)
    assert (recomputed - sampled).abs().max() < 1e-4 and (sampled[mask == 1] < 0).all()
