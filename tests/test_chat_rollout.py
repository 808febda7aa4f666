"""Demand of every template: what the rollout samples is what is trained, at the log-probability the trainer recomputes.

A model that calls tools in its family's form, with and without thoughts, is played by forcing its words upon a small random one.
The ids must be those of three independent ways, token for token: the rollout, the same conversation read from a file (the SFT path),
and one rendering of all its messages by the model's own template. Where a template writes past turns in other words than the model
sampled them, REWRITTEN says which; the log-probs must be those of `token_logprobs`.
"""
import json
import re

import pytest
import torch
from families import AGAIN, NAMES, real, small
from transformers import Qwen3Config, Qwen3ForCausalLM

import agent
import envs
from agent import Episode, Limits, rollout
from core.data import collate
from extras.isolate import Session, Watch
from core.chat import Chat
from core.engine import Row
from core.logprobs import token_logprobs
from core.model import facts
from extras.data.recorded import recorded_ids
from core.tiny import make_tiny
from lora import adapted_linears, add_lora, merged

ENV = f"{__file__}:Lookup"
THOUGHT = "Hm, so."
ANSWER = "It is there."
# What the model sampled -> what its own template makes of that in turns that are past. All others show what was sampled.
REWRITTEN = {
    # an empty thought goes where a tool was called; of a thought in words nothing goes
    **dict.fromkeys(("thinking", "real:qwen3"), (r"<think>\n\n</think>\n\n(?=<tool_call>)", "")),
    # any thought goes
    **dict.fromkeys(("real:deepseekv3", "real:deepseek_r1_distill"), (r"<think>\n</think>\n\n", "")),
    # the thoughts of calling turns go once there is an answer
    "real:gptoss": (rf"<\|channel\|>analysis<\|message\|>{THOUGHT}<\|end\|><\|start\|>assistant(?= to=)", ""),
    # an empty thought has no newline in it; the generation prompt ends with one
    **dict.fromkeys(("real:nemotron_3_nano", "real:nemotron_3_super", "real:nemotron_3_ultra", "real:nemotron_3_5_lightning"),
                    (r"<think>\n</think>", "<think></think>")),
    # the same text, but the prompt's last newline and the first one sampled are one token
    **dict.fromkeys(("real:qwen3_5_think", "real:qwen3_6", "real:qwen3_8"), (r"<think>\n\n</think>", r"<think>\n\n</think>")),
    # the model's turn is opened again after results, which the generation prompt there does not do
    "real:diffusion_gemma": (r"<tool_response\|>(?!<\|tool_response>)", r"<tool_response|><|turn>model\n"),
    # the token that stops the model is the one that opens the next message
    **dict.fromkeys(("glm", "real:glm4moe"), (r"<\|user\|>$", ""))}


class Lookup:
    """Looks up what the task says, a list of queries in each turn."""
    system_prompt = "Be brief."

    def reset(self, turns, **_):
        self.wanted, self.looked_up = sum(turns, []), []
        return "Find it."

    def look(self, query: str, limit: int = 3) -> str:
        """Look something up.

        Args:
            query: what to look for
            limit: how many answers
        """
        self.looked_up.append(query)
        return f"{query}: {limit + 1}"

    def get_reward(self):
        return float(self.looked_up == self.wanted)


def conversation(turns, thought):
    """The episode of a task in OpenAI's form."""
    fields = {"reasoning_content": thought, "thinking": thought} if thought else {}
    messages = [{"role": "system", "content": Lookup.system_prompt}, {"role": "user", "content": "Find it."}]
    for queries in turns:
        calls = [{"name": "look", "arguments": {"query": query, "limit": i}} for i, query in enumerate(queries)]
        messages.append({"role": "assistant", "content": "", **fields,
                         "tool_calls": [{"id": f"call{i:05d}", "type": "function", "function": call} for i, call in enumerate(calls)]})
        messages += [{"role": "tool", "name": "look", "tool_call_id": f"call{i:05d}", "content": f"{query}: {i + 1}"} for i, query in enumerate(queries)]
    return [*messages, {"role": "assistant", "content": ANSWER, **fields}]


def as_text(chat, messages):
    """The same conversation where the template cannot show tools: tools, calls and results are text of user and assistant."""
    shown = []
    for message in messages:
        role, content = message["role"], message["content"]
        if role == "user":
            content = f"{chat._tools_text[0]}\n\n{content}"
        calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls", [])]
        content += "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)
        if role == "tool":
            role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
        if shown and (shown[-1]["role"] == role or shown[-1]["role"] == "system" and chat._folds_system):
            content = shown.pop()["content"] + ("\n" if content.startswith("<tool_response>") else "\n\n") + content
        shown.append({"role": role, "content": content})
    return shown


def check_own_template(case, chat, messages, ids):
    """The template's rendering of the whole conversation is the episode, but for what REWRITTEN says and what follows the last stop."""
    tokenizer = chat.tokenizer
    tools = envs.schemas(Lookup) if chat.native_tools else None
    own = tokenizer.apply_chat_template(messages if tools else as_text(chat, messages), tools=tools, return_dict=False)
    text, count = re.subn(*REWRITTEN.get(case, ("(?!)", "")), tokenizer.decode(ids))
    if count or not tools:  # tags that are text, which the template alone encodes as control tokens
        ids = tokenizer.encode(text, add_special_tokens=False)
    assert own[:len(ids)] == ids
    assert tokenizer.decode(own[len(ids):]).strip() in ("", "<|endoftext|>")
    return count


def tokenizer_of(case):
    if case == "tiny":
        return make_tiny()[1]
    return real(case[5:]) if case.startswith("real:") else small(case)


def shows_thoughts(chat):
    try:
        return chat.turn("", [], thinking=THOUGHT, reasoning_content=THOUGHT) != chat.turn("", [])
    except ValueError as error:  # a prompt that closes the thought (Qwen3.5 without thinking)
        return "do not begin with its generation prompt" not in str(error)


@pytest.mark.parametrize("case", ["tiny", *(pytest.param(name, marks=[pytest.mark.slow] * name.endswith(AGAIN)) for name in NAMES)])
def test_an_episode_has_the_ids_of_its_own_template_and_the_trainers_logprobs(case, monkeypatch):
    tokenizer = tokenizer_of(case)
    chat = Chat(tokenizer, envs.schemas(Lookup))
    plans = [[['who is "a"?'], ["b {"]]]  # two turns with a call each
    if not chat.shows_one_call:
        plans.append([["a", "it's b\nc"], ["true"], ["[1,2]"]])  # two calls in a turn; texts that look like JSON
    tasks, conversations, wanted = [], [], []
    for thought in ["", THOUGHT][:1 + shows_thoughts(chat)]:
        for turns in plans:
            tasks.append({"turns": turns})
            conversations.append(conversation(turns, thought))
            wanted.append(recorded_ids(chat, conversations[-1]))
    scripts = iter([[i for i, m in zip(ids, mask) if m] for ids, mask in wanted])
    monkeypatch.setattr(agent, "Row", lambda *args, **options: Row(*args, forced=next(scripts), **options))
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, head_dim=8,
        num_key_value_heads=1, initializer_range=0.1, max_position_embeddings=4096)).eval()
    monkeypatch.setattr(facts(model), "decode_rows", max(1, len(tasks) - 1))  # fewer slots than episodes
    add_lora(model, r=4, alpha=8)
    for linear in adapted_linears(model).values():
        torch.nn.init.normal_(linear.lora.B, std=0.05)
    with merged(model):
        played = rollout(model, tokenizer, ENV, tasks, limits=agent.Limits(max_new_tokens=400, max_tokens=8000, max_tool_tokens=8000))
    rewritten = 0
    for t, messages, (ids, mask) in zip(played, conversations, wanted, strict=True):
        assert (t.token_ids, t.loss_mask) == (ids, mask)
        assert t.stop_reason == "done" and t.info["success"] and t.info["parsed_turns"] == len(t.rewards) == len(t.info["task"]["turns"]) + 1
        rewritten += check_own_template(case, chat, messages, ids)
    assert bool(rewritten) == (case in REWRITTEN)
    ids, mask, sampled = collate(played)
    with torch.no_grad():
        recomputed, _ = token_logprobs(model, ids, mask)
    assert (recomputed - sampled).abs().max() < 1e-4 and (sampled[mask == 1] < 0).all()


@pytest.mark.parametrize("case", ["opens", "real:deepseek_r1_distill", "real:qwen3_5_think"])
def test_a_thought_that_the_prompt_opens_begins_in_the_text_of_its_turn(case):
    """A turn whose thought never ends is no answer: without the tag that the prompt has, it looked like one."""
    env = envs.load("gsm8k")
    for said, content, solved in (("#### 71?\n</think>\n\n#### 72", "<think>\n#### 71?\n</think>\n\n#### 72", True), ("#### 72", "<think>\n#### 72", False)):
        chat = Chat(tokenizer_of(case), envs.schemas(env))
        episode = Episode(Session(Watch(10.0), "gsm8k", env, {"question": "?", "answer": "72"}), chat, Limits(max_tokens=10**5), "0")
        ids = [*chat.encode(said), chat.answer_stop_id]
        episode.take_turn(ids, [0.0] * len(ids))
        t = episode.trajectory
        assert t.token_ids[-len(ids):] == ids and (t.messages[-1]["content"], t.info["success"], t.reward) == (content, solved, solved)
