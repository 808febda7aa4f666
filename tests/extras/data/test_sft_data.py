"""What sft.py learns from: every kind of row, the same ids as a rollout, and the loss on what the demonstrator wrote."""
import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from families import NAMES, real, small
from tokenizers.processors import TemplateProcessing
from transformers import Qwen3Config, Qwen3ForCausalLM

import envs
import sft
from agent import Episode, Limits, Trajectory
from core.data import collate
from envs.prompts import Prompts
from envs.prompts import opening
import episodes
from extras.data.demonstrations import messages_in, read_dataset
from schooling import demonstrate
from episodes import read_split
from extras.data.pairs import preference, read_pairs
from envs.tasks import load_tasks
from envs.task_files import recorded_env
from extras.isolate import Session, Watch
from envs.prompts import as_messages
from envs.task_files import are_held_out
from core.config import UserError
from core.chat import Chat
from extras.data.recorded import recorded_ids
from core.tool_calls import parse_tool_calls
from core.logprobs import token_logprobs
from core.tiny import make_tiny

GSM8K = Path(__file__).resolve().parents[4] / "shared/data/gsm8k/train.jsonl"
SYSTEM, ASK, ANSWER = ({"role": role, "content": text} for role, text in (
    ("system", "Be brief."), ("user", "How many?"), ("assistant", "42")))
TOOL = {"role": "tool", "content": "24"}
CALL = {"name": "calculator", "arguments": {"expression": "48/2"}}
CALLING = {"role": "assistant", "content": "Half of it.", "tool_calls": [CALL]}
NATALIA = {"question": "Natalia sold 48 clips in April and half as many in May. How many in both?",
           "answer": "In May she sold 48/2 = <<48/2=24>>24 clips.\nThat is 48+24 = <<48+24=72>>72 clips.\n#### 72"}
FAMILIES = ["tiny", "hermes", "chatml", "thinking", "opens", "glm", "gptoss", "gemma4", "llama", "gemma", "real:smollm2",
            "real:qwen2_5", "real:qwen3", "real:nemotron_3_super"]


@pytest.fixture(autouse=True)
def all_held_out(monkeypatch):
    monkeypatch.setattr(episodes, "HELD_OUT", 100)


@pytest.fixture(scope="module")
def tokenizer():
    return make_tiny()[1]


@pytest.fixture(scope="module")
def chat(tokenizer):
    return Chat(tokenizer, envs.schemas(envs.load("gsm8k")))


def write(folder, rows, name="rows.jsonl"):
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def demonstrations(config, tokenizer):
    model = SimpleNamespace(get_input_embeddings=lambda: SimpleNamespace(num_embeddings=len(tokenizer)))
    conversations = read_dataset(config) if config.dataset else None
    return sft.demonstrations(config, conversations, model, tokenizer)


def read(path, tokenizer, split="train", n=10**6, **options):
    config = sft.settle(sft.Config(dataset=path, max_samples=n, **options))
    return demonstrations(config, tokenizer)[split == "test"]


def recorded(path, tokenizer, **options):
    """The episodes to learn from and the held-out ones."""
    return demonstrations(sft.settle(sft.Config(trajectories=path, max_samples=1000, **options)), tokenizer)


def spelled(tokenizer, episode):
    """What is trained, a piece for every assistant turn."""
    pieces, last = [], 0
    for token, trained in zip(episode.token_ids, episode.loss_mask):
        if trained:
            pieces += [[]] * (not last)
            pieces[-1] = pieces[-1] + [token]
        last = trained
    return [tokenizer.decode(piece) for piece in pieces]


# -------------------------------------------------------------------------------------------------- the lessons
@pytest.mark.parametrize("case", FAMILIES)
def test_same_chat_through_sft_and_rollout_gives_the_same_ids(case):
    """Played by an environment through `Episode`, and written down: calls, text beside them, results, a second go."""
    tokenizer = make_tiny()[1] if case == "tiny" else real(case[5:]) if case.startswith("real:") else small(case)
    env = envs.load("gsm8k")
    chat, watch = Chat(tokenizer, envs.schemas(env)), Watch(10.0)
    session = Session(watch, "gsm8k", env, {**NATALIA, "num_turns": 2})
    episode = Episode(session, chat, Limits(max_tokens=10**5, max_tool_tokens=10**5), "0")
    written = list(episode.trajectory.messages)
    for content, calls in (("", [CALL]), ("" if case == "gptoss" else "Again:", [CALL]), ("#### 71", []), ("#### 72", [])):
        ids, place = chat.turn(content, calls), len(episode.trajectory.messages) + 1
        episode.take_turn(ids, [0.0] * len(ids))
        if episode.calling:
            episode.take_results()
        written += [{"role": "assistant", "content": content, "tool_calls": calls}, *episode.trajectory.messages[place:]]
    played = episode.trajectory
    assert played.stop_reason == "done" and played.info["success"] and played.info["tool_calls"] == 2
    assert recorded_ids(chat, written) == (played.token_ids, played.loss_mask)
    if case != "gptoss":  # whose channels are part of the text
        assert recorded_ids(chat, played.messages) == (played.token_ids, played.loss_mask)


@pytest.mark.parametrize("case", ["tiny", *NAMES])
def test_a_prompt_with_earlier_turns_is_that_of_a_rollout(case):
    """Of sft.py, dpo.py and grpo.py alike, also where the template shows no thought of a past turn (Qwen3, DeepSeek)."""
    chat = Chat(make_tiny()[1] if case == "tiny" else real(case[5:]) if case.startswith("real:") else small(case), [])
    for past in ANSWER, {**ANSWER, "reasoning_content": "Six times seven."}:
        prompt = [SYSTEM, ASK, past, {"role": "user", "content": "Why?"}]
        rollout = chat.prompt(opening(lambda **_: None, {"prompt": prompt}, ""))
        learned = messages_in({"prompt": prompt, "completion": "Because."}, None)
        pairs = preference({"prompt": prompt, "chosen": "Because.", "rejected": [*prompt, {"role": "assistant", "content": "No."}]}, "p:1")
        marked = [*prompt[:2], {**past, "weight": 0}, prompt[3], {"role": "assistant", "content": "Because."}]
        for messages in learned, marked, *(side.messages for side in pairs):
            ids, mask = recorded_ids(chat, messages)
            assert ids[:mask.index(1)] == rollout


def test_openais_form_text_and_ours_give_the_same_ids(chat):
    as_openai = {"role": "assistant", "content": "Half of it.", "tool_calls": [
        {"id": "a", "type": "function", "function": {"name": "calculator", "arguments": '{"expression": "48/2"}'}}]}
    as_text = {"role": "assistant", "content": f"Half of it.\n<tool_call>\n{json.dumps(CALL)}\n</tool_call>"}
    as_parts = {"role": "assistant", "content": [{"type": "text", "text": "Half of it."}], "tool_calls": [{"function": CALL}]}
    wanted = recorded_ids(chat, [SYSTEM, ASK, CALLING, TOOL, ANSWER])
    for turn in (as_openai, as_text, as_parts):
        assert recorded_ids(chat, [SYSTEM, ASK, turn, {**TOOL, "tool_call_id": "a"}, ANSWER, ASK]) == wanted


def test_whole_conversation_is_what_the_template_renders(chat, tokenizer):
    """Where a template does not rewrite history; two calls in a turn, text beside them, a second question."""
    two = {"role": "assistant", "content": "Both.", "tool_calls": [CALL, CALL]}
    messages = [SYSTEM, ASK, two, TOOL, TOOL, ANSWER, ASK, ANSWER]
    rendered = [{**m, "tool_calls": [{"type": "function", "function": c} for c in m["tool_calls"]]} if m is two else m
                for m in messages]
    ids, _ = recorded_ids(chat, messages)
    whole = tokenizer.apply_chat_template(rendered, tools=envs.schemas(envs.load("gsm8k")), return_dict=False)
    assert whole[:len(ids)] == ids and tokenizer.decode(whole[len(ids):]) == "\n"  # no model samples that newline


def test_trained_are_the_assistants_turns_and_loss_0_takes_one_out(chat, tokenizer):
    messages = [ASK, CALLING, TOOL, {**ANSWER, "loss": 0}, ASK, {"role": "assistant", "content": "43"}, ASK]
    call = 'Half of it.\n<tool_call>\n{"name": "calculator", "arguments": {"expression": "48/2"}}\n</tool_call><|im_end|>'
    episode = Trajectory(*recorded_ids(chat, messages))
    assert spelled(tokenizer, episode) == [call, "43<|im_end|>"]
    assert tokenizer.decode(episode.token_ids).endswith("43<|im_end|>")  # what follows the last answer is cut
    assert recorded_ids(chat, [{**m, "weight": 1.0 * m["loss"], "loss": None} if "loss" in m else m for m in messages]) == (
        episode.token_ids, episode.loss_mask)  # pandas' 0.0
    assert recorded_ids(chat, [{**m, "weight": m.pop("loss")} if "loss" in m else m for m in map(dict, messages)]) == (
        episode.token_ids, episode.loss_mask)  # OpenAI's name for it
    assert recorded_ids(chat, [{**m, "weight": m.pop("loss"), "loss": None} if "loss" in m else m for m in map(dict, messages)]) == (
        episode.token_ids, episode.loss_mask)  # parquet's nulls
    assert recorded_ids(chat, [*messages, TOOL, SYSTEM]) == (episode.token_ids, episode.loss_mask)


def test_a_message_is_trained_unless_one_of_its_fields_is_false(chat):
    """"trainable": false was not read, and neither were the masks of other trainers."""
    talk = [ASK, {**ANSWER, "content": "41"}, ASK, ANSWER]
    wanted = recorded_ids(chat, [ASK, {**talk[1], "loss": 0}, ASK, ANSWER])
    for name in ("loss", "weight", "trainable"):
        for value in (False, 0, 0.0, "false", "No", "0"):
            assert recorded_ids(chat, [{**ASK, name: value}, {**talk[1], name: value}, ASK, {**ANSWER, name: True}]) == wanted
        with pytest.raises(ValueError, match=f'^message 1: "{name}": \'maybe\': need 0 or 1, and 1 only on assistant messages'):
            recorded_ids(chat, [ASK, {**talk[1], name: "maybe"}, ASK, ANSWER])
        with pytest.raises(ValueError, match=f'^message 2: "{name}": True: need 0 or 1, and 1 only on assistant messages'):
            recorded_ids(chat, [*talk[:2], {**ASK, name: True}, ANSWER])
    assert recorded_ids(chat, [ASK, {**talk[1], "loss": 1, "trainable": False}, ASK, ANSWER]) == wanted
    for name in ("mask", "masked", "loss_mask", "train", "training", "loss_weight", "loss_scale", "no_loss", "train_detail", "is_masked", "learn"):
        for value in (True, False, 0, "User"):
            with pytest.raises(ValueError, match=f'^message 1: "{name}" is not read; "loss": 0 keeps a message from being learned'):
                recorded_ids(chat, [ASK, {**talk[1], name: value}, ASK, ANSWER])
        assert recorded_ids(chat, [ASK, {**ANSWER, name: None}]) == recorded_ids(chat, [ASK, ANSWER])


def bigram_model(chances):
    """A transformer whose next token depends on the last one alone: p = chances[last, next]."""
    size = len(chances)
    model = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=size, hidden_size=size, intermediate_size=8, num_hidden_layers=2, num_attention_heads=1, head_dim=4,
        num_key_value_heads=1, tie_word_embeddings=False, rms_norm_eps=1e-12))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        model.lm_head.weight.copy_(chances.log().T / size ** 0.5)  # the last norm makes the one-hot sqrt(size) long
    return model


def test_a_label_shifted_twice_is_caught():
    """By hand: -log p(1|0) - log p(2|1) over 2 tokens is (log 2 + log 4) / 2; a second shift would see p(2|0)."""
    chances = torch.tensor([[1 / 4, 1 / 2, 1 / 4], [1 / 2, 1 / 4, 1 / 4], [1 / 8, 1 / 8, 3 / 4]])
    ids, mask, _ = collate([Trajectory([0, 1, 2], [0, 1, 1], [0.0] * 3), Trajectory([2, 2], [0, 0], [0.0] * 2)])
    model = bigram_model(chances)
    logprobs, _ = token_logprobs(model, ids, mask)
    by_hand = (torch.tensor(2.0).log() + torch.tensor(4.0).log()) / 2
    assert torch.allclose(sft.sft_loss(logprobs, mask, 2), by_hand, atol=1e-6)
    for wrong in (ids.roll(-1, 1), ids.roll(1, 1)):  # labels moved before they are given: token_logprobs moves them too
        shifted = sft.sft_loss(token_logprobs(model, wrong, mask)[0], mask, 2)
        assert abs(shifted - by_hand) > 0.1


def test_a_mask_off_by_one_is_caught(tokenizer):
    """Every trained stretch ends with a stop token and follows one generation prompt; moved by one it does neither."""
    chat = Chat(tokenizer, envs.schemas(envs.load("equations")))
    opening = chat.prompt([ASK])[-3:]  # <|im_start|>assistant\n

    def right(ids, mask):
        starts = [i for i in range(1, len(ids)) if mask[i] > mask[i - 1]]
        ends = [i for i in range(len(ids)) if mask[i] and not [*mask, 0][i + 1]]
        return bool(starts) and all(ids[i - 3:i] == opening for i in starts) and all(ids[i] in chat.stop_ids for i in ends)

    for t in demonstrate(tokenizer, "equations", load_tasks("equations", "train", 4, seed=0)):
        assert right(t.token_ids, t.loss_mask)
        assert not right(t.token_ids, [0, *t.loss_mask[:-1]]) and not right(t.token_ids, [*t.loss_mask[1:], 0])


def test_loss_and_gradient_are_trls(tokenizer, tmp_path):
    """SFTTrainer, given our ids and our mask: what differs between the two programs is only who makes these."""
    pytest.importorskip("trl")
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        head_dim=16, num_key_value_heads=1, initializer_range=0.1))
    demos = demonstrate(tokenizer, "equations", load_tasks("equations", "train", 6, seed=0))
    rows = Dataset.from_list([{"input_ids": t.token_ids, "assistant_masks": t.loss_mask} for t in demos])
    trainer = SFTTrainer(model, train_dataset=rows, processing_class=tokenizer, args=SFTConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to=[], max_length=None, gradient_checkpointing=False))
    theirs = trainer.compute_loss(trainer.model, trainer.data_collator([*trainer.train_dataset]))
    theirs.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}

    def ours(mask_moved=0):
        model.zero_grad()
        ids, mask, _ = collate(demos)
        mask = mask.roll(mask_moved, 1)
        loss = sft.sft_loss(token_logprobs(model, ids, mask)[0], mask, mask.sum())
        loss.backward()
        return loss.item(), max((p.grad - gradients[name]).abs().max().item() for name, p in model.named_parameters())

    loss, gap = ours()
    assert abs(loss - theirs.item()) < 1e-6 and gap < 1e-6 < max(g.abs().max() for g in gradients.values())
    assert ours(1)[1] > 1e-3 and ours(-1)[1] > 1e-3


# ------------------------------------------------------------------------------------------------ conversations
@pytest.mark.parametrize("messages, problem", [
    ([], "nothing to train: no assistant message"),
    ([SYSTEM, ASK], "nothing to train: no assistant message"),
    ([ASK, {**ANSWER, "loss": 0}], 'nothing to train: no assistant message without "loss": 0'),
    ([ANSWER], "message 0: need system or user at the start, got assistant"),
    ([SYSTEM, ANSWER], "message 1: need user after the system message, got assistant"),
    ([ASK, SYSTEM, ANSWER], "message 1: need assistant after the user, got system"),
    ([ASK, ASK, ANSWER], "message 1: need assistant after the user, got user"),
    ([ASK, ANSWER, ANSWER], "message 2: need user after an answer, got assistant"),
    ([ASK, ANSWER, TOOL, ANSWER], "message 2: need user after an answer, got tool"),
    ([ASK, TOOL, ANSWER], "message 1: need assistant after the user, got tool"),
    ([ASK, CALLING, ASK, ANSWER], "message 2: need tool after a tool call, got user"),
    ([ASK, {**CALLING, "loss": 0}, ASK, ANSWER], "message 2: need tool after a tool call, got user"),
    ([ASK, CALLING, TOOL, TOOL, ANSWER], "message 3: need assistant after the last result, got tool"),
    ([ASK, {**CALLING, "tool_calls": [CALL, CALL]}, TOOL, ANSWER], "message 3: need tool after a tool call, got assistant"),
    ([{"content": "x"}, ANSWER], "message 0: need system or user at the start, got None"),
    ([{**ASK, "content": None}, ANSWER], "message 0: content must be text or text parts, got NoneType"),
    ([{**ASK, "content": [{"type": "image"}]}, ANSWER], "message 0: content must be text or text parts, got the part {'type': 'image'}"),
    ([ASK, {"role": "assistant"}], "message 1: content must be text or text parts, got NoneType"),
    ([{**ASK, "loss": 1}, ANSWER], 'message 0: "loss": 1: need 0 or 1, and 1 only on assistant messages'),
    ([ASK, {**ANSWER, "loss": 0.5}], 'message 1: "loss": 0.5: need 0 or 1, and 1 only on assistant messages'),
    ([ASK, {**ANSWER, "loss": 2.0}], 'message 1: "loss": 2.0: need 0 or 1, and 1 only on assistant messages'),
    ([ASK, ANSWER, ASK, {**ANSWER, "role": "model"}], "message 3: need assistant after the user, got model"),
    ([ASK, {"from": "gpt", "value": "x"}], "message 1: need assistant after the user, got None"),
    ([ASK, {**ANSWER, "tool_calls": "f()"}], "message 1: tool_calls must be a list, in an assistant message"),
    ([{**ASK, "tool_calls": [CALL]}, ANSWER], "message 0: tool_calls must be a list, in an assistant message"),
    ([ASK, {**CALLING, "tool_calls": [{"name": "f", "arguments": 3}]}],
     "message 1: the arguments of f must be an object, got int"),
    ([ASK, {**CALLING, "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
     "message 1: the tool call is not valid JSON: Expecting property name enclosed in double quotes at character 1"),
    ([ASK, {**ANSWER, "content": "<tool_call>\n{oops"}],
     "message 1: the tool call is not valid JSON: Expecting property name enclosed in double quotes at character 1; a text that opens a tool call must hold a whole one"),
    ([ASK, {**CALLING, "tool_calls": [{**CALL, "id": "a"}, {**CALL, "id": "b"}]}, {**TOOL, "tool_call_id": "b"}, ANSWER],
     "message 2: results must stand in the order of their calls, by their tool_call_id"),
])
def test_a_conversation_that_no_rollout_makes_is_refused(chat, messages, problem):
    with pytest.raises(ValueError) as caught:
        recorded_ids(chat, messages)
    assert str(caught.value) == problem


@pytest.mark.parametrize("case, shown", [
    ("hermes", "<think>\nHalf.\n</think>\n\nSo:"), ("real:qwen3", "<think>\nHalf.\n</think>\n\nSo:"),
    ("real:nemotron_3_super", "Half.\n</think>\nSo:"), ("real:qwen3_5_think", "Half.\n</think>\n\nSo:"),
    ("real:deepseek_r1_distill", "Half.\n</think>\n\nSo:"), ("real:deepseekv3", "Half.\n</think>\n\nSo:")])
def test_a_thought_is_trained_where_the_model_would_write_it(case, shown):
    chat = Chat(real(case[5:]) if case.startswith("real:") else small(case), [])
    named = [{"content": "So:", name: "Half."} for name in ("reasoning_content", "thinking", "reasoning")]
    both = {"content": "<think>\nHalf.\n</think>\n\nSo:", "reasoning_content": "Half."}
    for message in (both, {"content": both["content"]}, *named):
        ids, mask = recorded_ids(chat, [ASK, {"role": "assistant", **message}])
        assert chat.text([i for i, m in zip(ids, mask) if m]) == shown


TAGGED = "The tag </think> closes <think>."  # an answer, or a thought, that names the tags


@pytest.mark.parametrize("case", ["qwen3", "qwen3_5_think", "qwen3_6", "nemotron_3_super", "glm4moe"])
@pytest.mark.parametrize("thought, answer", [("Half.", TAGGED), (TAGGED, "42"), (TAGGED, TAGGED), ("", TAGGED), ("Half.", "<think> opens, </think> closes.")])
def test_a_thought_and_an_answer_that_names_its_tag_stay_two_fields(case, thought, answer):
    """The thought was lost and the answer's first half was trained as one. Whole they are, as the template writes them, in both sides of a pair and in a history."""
    tokenizer = real(case)
    chat, last = Chat(tokenizer, []), {"role": "user", "content": "Why?"}
    turn = {"role": "assistant", "content": answer, "reasoning_content": thought}
    own = tokenizer.apply_chat_template([ASK, turn], tokenize=False).strip()
    for name in ("reasoning_content", "thinking", "reasoning"):
        for value in (thought, [{"type": "text", "text": thought}]):
            row = {"prompt": [ASK], "completion": [{"role": "assistant", "content": answer, name: value}]}
            ids, mask = recorded_ids(chat, messages_in(row, None))
            whole = tokenizer.decode(ids).removesuffix("<|user|>").removesuffix("<|im_end|>")
            assert whole == own.removesuffix("<|im_end|>") if thought else whole.endswith(answer)
    pair = preference({"prompt": [ASK], "chosen": [turn], "rejected": "No."}, "p:1")
    assert recorded_ids(chat, pair[0].messages) == (ids, mask)
    later = recorded_ids(chat, [ASK, turn, last, ANSWER])[0]  # what the server makes of a history: a played turn
    assert later[:len(ids) - 1] == ids[:-1]
    talk = [ASK, {**turn, "loss": 0}, last, ANSWER]  # a first prompt, whose thoughts the template may drop
    if answer in tokenizer.apply_chat_template(talk, tokenize=False):
        assert answer in tokenizer.decode(recorded_ids(chat, talk)[0])
    else:
        with pytest.raises(ValueError, match="the chat template cuts a text at </think>; leave such rows out"):
            recorded_ids(chat, talk)


@pytest.mark.parametrize("case", ["deepseek_r1_distill", "deepseekv3"])
def test_a_template_that_cuts_at_the_tag_is_refused_and_not_trained_by_halves(case):
    chat = Chat(real(case), [])
    for turn in ({"content": TAGGED, "reasoning_content": "Half."}, {"content": "42", "reasoning_content": TAGGED}):
        with pytest.raises(ValueError, match="^message 1: the chat template "):
            recorded_ids(chat, [ASK, {"role": "assistant", **turn}])


def test_a_call_before_the_tag_is_a_call(chat):
    call = f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>"
    first = {"role": "assistant", "content": f"Half.\n{call}\nNow </think> is a word."}
    ids, _ = recorded_ids(chat, [ASK, first, TOOL, ANSWER])  # it was text, and the result without a call
    assert "<tool_response>" in chat.text(ids)


@pytest.mark.parametrize("value, says", [
    (True, "thinking must be text or text parts, got bool"), (3, "thinking must be text or text parts, got int"),
    ({"text": "Half."}, "thinking must be text or text parts, got dict"), (["Half."], "thinking must be text or text parts, got the part Half."),
    ([{"type": "thinking", "thinking": "Half."}], "thinking must be text or text parts, got the part {'type': 'thinking', 'thinking': 'Half.'}"),
    ([{"type": "text", "text": None}], "thinking must be text or text parts, got the part {'type': 'text', 'text': None}")])
def test_a_thought_that_is_no_text_is_refused(chat, value, says):
    for message in ({**ANSWER, "thinking": value}, {**ANSWER, "loss": 0, "thinking": value}):
        with pytest.raises(ValueError) as error:
            recorded_ids(chat, [ASK, message, ASK, ANSWER])
        assert str(error.value) == f"message 1: {says}"
    with pytest.raises(ValueError, match="message 1: reasoning_content and reasoning hold different thoughts"):
        recorded_ids(chat, [ASK, {**ANSWER, "reasoning_content": "a", "reasoning": "b"}])
    for name in ("reasoning_details", "thinking_blocks", "thought"):
        details = {name: [{"type": "reasoning.text", "text": "Half."}]}
        with pytest.raises(ValueError, match=f'message 1: "{name}" is not read; give the thought as "reasoning_content"'):
            recorded_ids(chat, [ASK, {**ANSWER, **details}])
        both = [ASK, {**ANSWER, "reasoning": "Half."}]
        assert recorded_ids(chat, [ASK, {**both[1], **details}]) == recorded_ids(chat, both)  # OpenRouter's form
    with pytest.raises(ValueError, match="message 0: a thought must stand in an assistant message"):
        recorded_ids(chat, [{**ASK, "thinking": "Half."}, ANSWER])
    assert recorded_ids(chat, [ASK, {**ANSWER, "thinking": None, "reasoning": "", "reasoning_content": []}]) == recorded_ids(chat, [ASK, ANSWER])


@pytest.mark.parametrize("case", ["qwen3", "qwen3_5_think", "glm4moe", "lfm2_2_5", "deepseek_r1_distill", "llama3_1"])
def test_a_thought_in_the_text_of_an_earlier_turn_is_cut_as_the_template_cuts_it(case):
    """Of Qwen3's, GLM's and LFM's the two lines after </think> were left in the prompt, of sft.py, dpo.py and grpo.py alike."""
    tokenizer = real(case)
    talk = [ASK, {"role": "assistant", "content": "<think>\nHalf.\n</think>\n\n42"}, {"role": "user", "content": "Why?"}]
    own = tokenizer.apply_chat_template(talk, add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode(Chat(tokenizer, []).prompt(talk)) == own


def test_a_thought_before_a_call_is_trained_as_well():
    chat = Chat(small("hermes"), [])
    for message in ({"content": "<think>\nHalf.\n</think>\n\nSo:"}, {"content": "So:", "reasoning_content": "Half."}):
        ids, mask = recorded_ids(chat, [ASK, {**CALLING, **message}, TOOL, ANSWER])
        assert chat.text([i for i, m in zip(ids, mask) if m]).startswith("<think>\nHalf.\n</think>\n\nSo:<tool_call>")


@pytest.mark.parametrize("case", ["qwen3", "deepseek_r1_distill", "qwen2_5"])
def test_a_thought_that_was_cut_is_refused(case):
    """Qwen3's template puts an empty thought before it: the model learned to think again after that, and to stop amid it."""
    chat = Chat(real(case), [])
    cut = {"role": "assistant", "content": "<think>\nHalf of"}
    with pytest.raises(ValueError, match="^message 1: a thought without </think>, of a text that was cut; leave such rows out"):
        recorded_ids(chat, [ASK, cut])
    recorded_ids(chat, [ASK, {**cut, "loss": 0}, ASK, ANSWER])


def test_a_thought_that_the_template_drops_is_refused():
    with pytest.raises(ValueError, match="message 1: the chat template does not show a thought where"):
        recorded_ids(Chat(real("llama3_1"), []), [ASK, {**CALLING, "reasoning_content": "Half."}, TOOL, ANSWER])


def test_a_thought_that_the_prompt_closes_is_refused_with_what_opens_it():
    """Qwen3.5 without thinking, its small models' default."""
    tokenizer = real("qwen3_5_nothink")
    talk = [ASK, {**ANSWER, "reasoning_content": "Half."}]
    with pytest.raises(ValueError, match="put {% set enable_thinking = true %} at its top"):
        recorded_ids(Chat(tokenizer, []), talk)
    template = tokenizer.chat_template
    try:
        tokenizer.chat_template = "{% set enable_thinking = true %}" + template
        ids, _ = recorded_ids(Chat(tokenizer, []), talk)
        assert "<think>\nHalf.\n</think>" in tokenizer.decode(ids)
    finally:
        tokenizer.chat_template = template


# --------------------------------------------------------------------------------------------------- the readers
def test_each_kind_of_row_is_told_apart_by_its_fields(tokenizer, tmp_path, capsys):
    episode = demonstrate(tokenizer, "equations", [{"equation": "x + 3 = 5"}])[0]
    rows = [({"messages": [ASK, ANSWER]}, None), ({"prompt": "How many?", "completion": "42"}, None),
            ({"prompt": [ASK], "completion": [ANSWER]}, None), (NATALIA, "gsm8k"), (episode.to_json(), None),
            ({"input_text": "Meet?", "target_probability": 0.8, "target_reason": "slot", "ground_truth_prob": 0.81}, "meetings")]
    made = []
    for row, env in rows:
        path = write(tmp_path, [row])
        made += recorded(path, tokenizer)[0] if "token_ids" in row else read(path, tokenizer, env=env)
    assert made[0].token_ids == made[1].token_ids == made[2].token_ids
    assert spelled(tokenizer, made[0]) == ["42<|im_end|>"]
    assert len(spelled(tokenizer, made[3])) == 3 and made[4] == episode
    assert spelled(tokenizer, made[5]) == ['{"probability": 0.80, "reason": "slot", "recommendation": "YES"}<|im_end|>']
    said = [line.split("jsonl: ")[1] for line in capsys.readouterr().out.splitlines() if "different ones" not in line]
    assert said == ["1 demonstrations to learn from, 0 held out"] * 6


def test_a_written_solution_becomes_calls_that_the_environment_answers(tokenizer, tmp_path):
    episode, = read(write(tmp_path, [NATALIA]), tokenizer, env="gsm8k")
    call = '<tool_call>\n{"name": "%s", "arguments": {"%s": "%s"}}\n</tool_call><|im_end|>'
    assert spelled(tokenizer, episode) == [
        "In May she sold 48/2 =\n" + call % ("calculator", "expression", "48/2"),
        "24 clips.\nThat is 48+24 =\n" + call % ("calculator", "expression", "48+24"),
        "72 clips.\n" + call % ("answer", "value", "72")]
    text = tokenizer.decode(episode.token_ids)
    assert text.count("<tool_response>\n24\n</tool_response>") == 1 and "calculator(expression)" in text
    expert = demonstrate(tokenizer, "gsm8k", [NATALIA])[0]  # the same prompt, and the same calls without the words
    begin = expert.loss_mask.index(1)
    assert episode.token_ids[:begin] == expert.token_ids[:begin]
    assert [parse_tool_calls(t)[1] for t in spelled(tokenizer, episode)] == [
        parse_tool_calls(t)[1] for t in spelled(tokenizer, expert)]


def test_a_false_mark_stays_text_and_a_bare_number_is_just_answered(tokenizer, tmp_path):
    rows = [{**NATALIA, "answer": "First <<1+1=3>>3.\n#### 3"}, {**NATALIA, "answer": "72"}]
    call = '<tool_call>\n{"name": "answer", "arguments": {"value": "%s"}}\n</tool_call><|im_end|>'
    made = [spelled(tokenizer, read(write(tmp_path, [row]), tokenizer, env="gsm8k")[0]) for row in rows]
    assert made == [["First 3.\n" + call % 3], [call % 72]]


@pytest.mark.skipif(not GSM8K.exists(), reason="needs shared/data/gsm8k")
def test_written_solutions_of_the_real_file_end_in_their_answers(tokenizer, tmp_path):
    with open(GSM8K) as f:
        rows = [json.loads(line) for line, _ in zip(f, range(60))]
    answers = {row["question"]: row["answer"].rpartition("#### ")[2].replace(",", "") for row in rows}
    made = read(write(tmp_path, rows[:-1]), tokenizer, env="gsm8k", max_tokens=4000, eval_dataset=write(tmp_path, rows[-1:], "other.jsonl"))
    assert len(made) == 59 and sum("<tool_response>" in tokenizer.decode(t.token_ids) for t in made) > 55
    for t in made:
        assert t.messages[-1]["tool_calls"] == [{"name": "answer", "arguments": {"value": answers[t.messages[1]["content"]]}}]
        assert "error" not in str(t.messages) and "<<" not in str(t.messages)


def test_only_the_completion_is_learnt(tokenizer, tmp_path):
    row = {"prompt": [SYSTEM, ASK, ANSWER, ASK], "completion": [CALLING, TOOL, {"role": "assistant", "content": "43"}]}
    turns = spelled(tokenizer, read(write(tmp_path, [row]), tokenizer)[0])
    assert len(turns) == 2 and turns[1] == "43<|im_end|>"


def test_tools_are_the_rows_own_or_the_given_environments(tokenizer, tmp_path):
    own = [{"type": "function", "function": {"name": "look", "parameters": {"properties": {"query": {}}}}}]
    path = write(tmp_path, [{"messages": [ASK, ANSWER], "tools": own}, {"messages": [SYSTEM, ASK, ANSWER]}] * 3)
    texts = {tokenizer.decode(t.token_ids) for t in read(path, tokenizer)}
    assert {("look(query)" in text, "Be brief." in text, "<tools>" in text) for text in texts} == {
        (True, False, True), (False, True, False)}
    listed = "add_terms(terms)"
    for t in read(path, tokenizer, env="equations"):
        text = tokenizer.decode(t.token_ids)
        assert ("look(query)" in text) != (listed in text) and ("Be brief." in text) == (listed in text)
    path = write(tmp_path, [{"messages": [ASK, ANSWER], "system": "Count."}])
    for env in (None, "equations"):
        assert "system\nCount." in tokenizer.decode(read(path, tokenizer, env=env)[0].token_ids)
    path = write(tmp_path, [{"messages": [ASK, ANSWER]}])
    assert "Solve for x with the tools." in tokenizer.decode(read(path, tokenizer, env="equations")[0].token_ids)


@pytest.mark.parametrize("eval_tasks, number", [(200, 40), (30, 30), (8, 8), (2, 8), (0, 8)])
def test_few_demonstrations_are_held_out_where_few_tasks_are_played(tokenizer, tmp_path, eval_tasks, number):
    """100 of them take a real model minutes on a CPU, whatever --eval_tasks said."""
    rows = [{"messages": [ASK, {**ANSWER, "content": f"{i}"}]} for i in range(60)]
    held_out = write(tmp_path, rows[20:], "held_out.jsonl")
    config = sft.settle(sft.Config(dataset=write(tmp_path, rows[:20]), eval_dataset=held_out, eval_tasks=eval_tasks))
    learned, others = demonstrations(config, tokenizer)
    assert (len(learned), len(others)) == (20, number)
    config = sft.settle(sft.Config(env="sums:Sums", max_samples=6, eval_tasks=eval_tasks))
    assert len(demonstrations(config, tokenizer)[1]) == max(8, min(100, eval_tasks))


@pytest.mark.parametrize("name, solved", [("Sums", 6), ("BadCalls", 0)])
def test_it_is_told_how_many_tasks_the_expert_solves(tokenizer, capsys, name, solved):
    demonstrations(sft.settle(sft.Config(env=f"sums:{name}", max_samples=6)), tokenizer)
    assert f"of 6 tasks the expert solves {solved}\n" in capsys.readouterr().out


def test_a_file_is_imitated_as_a_dataset_and_played_as_tasks(tokenizer, tmp_path, capsys):
    path = write(tmp_path, [{**NATALIA, "question": f"And now? {i}"} for i in range(40)])
    assert read(None, tokenizer, env="gsm8k", tasks=path)[0].rewards[-1] == 1.0  # played: it has rewards
    assert re.search(rf"{path}: \d+ demonstrations to learn from, \d held out", capsys.readouterr().out)
    assert read(path, tokenizer, env="gsm8k")[0].rewards == []  # learnt as written
    for env in (None, "equations"):
        with pytest.raises(UserError) as caught:
            read(path, tokenizer, env=env)
        assert str(caught.value) == (f'{path}:1: no "messages" field; has: question, answer; name its columns: --fields prompt=question,completion=answer; '
                                     "rows of an environment's own form need its --env, tasks --tasks")
    assert read(path, tokenizer, env=None, fields="prompt=question,completion=answer")
    path = write(tmp_path, [{"equation": f"x + {b} = 9"} for b in range(1, 40)])
    assert read(None, tokenizer, tasks=path)[0].rewards
    with pytest.raises(UserError, match="has: equation; nor another form: .*; rows of an environment's own form need its --env, tasks --tasks"):
        read(path, tokenizer)


@pytest.mark.parametrize("row, fields", [
    ({"Question": "a", "Answer": "b"}, "prompt=Question,completion=Answer"), ({"id": 1, "response": "b", "query": "a"}, "prompt=query,completion=response"),
    ({"problem": "a", "solution": "b", "answer": "4"}, "prompt=problem,completion=solution"), ({"instruction": "i", "answer": "r"}, None)])
def test_a_row_of_a_question_and_its_answer_names_the_fields(row, fields):
    with pytest.raises(ValueError, match=f"name its columns: --fields {fields};" if fields else "nor another form: "):
        messages_in(row, None)


@pytest.mark.parametrize("flag, row, says", [
    ("dataset", {"prompt": "a", "chosen": "b", "rejected": "c"}, "a pair is given to dpo.py with --dataset"),
    ("dataset", {"token_ids": [1]}, "a recorded episode is given with --trajectories"),
    ("tasks", {"messages": [ASK, ANSWER]}, "a conversation is given to sft.py with --dataset"),
    ("tasks", {"prompt": "a", "completion": "b"}, "a conversation is given to sft.py with --dataset"),
    ("tasks", {"token_ids": [1]}, "a recorded episode is given with --trajectories"),
    ("trajectories", {"messages": [ASK, ANSWER]}, "a conversation is given to sft.py with --dataset"),
    ("trajectories", {"equation": "x = 1"}, "conversations and pairs are given with --dataset, tasks with --tasks")])
def test_a_file_of_another_kind_is_told_by_its_flag(tokenizer, tmp_path, flag, row, says):
    path = write(tmp_path, [row])
    with pytest.raises(UserError) as caught:
        demonstrations(sft.settle(sft.Config(**{flag: path})), tokenizer)
    assert str(caught.value) in (f"{path}:1: {says}; the row has: {', '.join(row)}", f'{path}:1: no "token_ids" field; has: equation; {says}')


@pytest.mark.parametrize("options, says", [
    ({"dataset": "a.jsonl", "trajectories": "b.jsonl"}, "--dataset a.jsonl and --trajectories b.jsonl: give one; tasks to evaluate on are given with --tasks"),
    ({"dataset": "a.jsonl", "tasks": "b.jsonl"}, "--tasks b.jsonl: name their environment with --env")])
def test_flags_of_data_that_clash(options, says):
    with pytest.raises(UserError) as caught:
        sft.settle(sft.Config(**options))
    assert str(caught.value) == says


def test_what_reads_data_knows_no_environment(python):
    code = "import sys, sft, dpo, reward_weighted, grpo; print([name for name in sys.modules if name.startswith('envs.')])"
    done = python("-c", code)
    # What judges answers, loads files and reads prompts is no environment with content.
    assert set(eval(done.stdout)) <= {"envs.answers", "envs.calls", "envs.files", "envs.prompts", "envs.session", "envs.task_files", "envs.tasks", "envs.transcripts"}, done.stderr


def test_beside_other_data_all_tasks_are_evaluated_on_but_those_that_were_learned(tokenizer, tmp_path):
    rows = [{**NATALIA, "question": f"And now? {i}"} for i in range(30)]
    learned, tasks = write(tmp_path, rows[:10], "a.jsonl"), write(tmp_path, rows, "b.jsonl")
    config = sft.settle(sft.Config(env="gsm8k", dataset=learned, tasks=tasks, eval_dataset=write(tmp_path, rows[5:6], "c.jsonl")))
    assert {t["question"] for t in sft.evaluation_tasks(config, demonstrations(config, tokenizer)[0])} == {row["question"] for row in rows[10:]}


def test_meetings_csv(tokenizer, tmp_path):
    path = tmp_path / "m.csv"
    path.write_text("input_text,target_probability,target_reason,ground_truth_prob\n"
                    '"Founder, senior: meet?",0.25,profile,0.31\n')
    t, = read(str(path), tokenizer, env="meetings")
    assert t.messages[1]["content"] == "Founder, senior: meet?"
    assert json.loads(t.messages[2]["content"]) == {"probability": 0.25, "reason": "profile", "recommendation": "NO"}
    path.write_text(path.read_text() + "x,high,slot,0.5\n")
    with pytest.raises(UserError, match=r"""m.csv:3: "target_probability" must be from 0 to 1, not high"""):
        read(str(path), tokenizer, env="meetings")


TOOLS_FORM = '"tools" must be a list of {"type": "function", "function": {"name": ...}}'


@pytest.mark.parametrize("row, problem", [
    ({"messages": [ASK]}, "nothing to train: no assistant message"),
    ({"messages": []}, '"messages" must be a list of {"role": ..., "content": ...}'),
    ({"messages": "hi"}, '"messages" must be a list of {"role": ..., "content": ...}'),
    ({"messages": [ASK, 3, ANSWER]}, '"messages" must be a list of {"role": ..., "content": ...}'),
    ({"messages": [ASK, ANSWER], "tools": "f"}, TOOLS_FORM),
    ({"messages": [ASK, ANSWER], "tools": [{"nom": "f"}]}, TOOLS_FORM),
    ({"messages": [ASK, ANSWER, ANSWER]}, "message 2: need user after an answer, got assistant"),
    ({"prompt": "How many?", "completion": None}, '"completion" is null; has: prompt, completion'),
    ({"prompt": 3, "completion": "42"}, '"prompt" must be text or a list of {"role": ..., "content": ...}'),
    ({"prompt": ["How many?"], "completion": "42"}, '"prompt" must be text or a list of {"role": ..., "content": ...}'),
    ({"prompt": [ASK], "completion": [{**ANSWER, "loss": 0}]}, 'nothing to train: no assistant message without "loss": 0'),
    ({"question": "How many?", "answer": "many"},
     '"answer" has no number; give 72, or a solution that ends in #### 72, not \'many\''),
    ({"question": "How many?"}, "no 'answer' in it"),
    ({"prompt": "a", "completion": "b", "label": False}, '"label" is false: a bad answer is not imitated; leave such rows out'),  # KTO's rows
    ({"prompt": "a", "completion": "b", "label": "False"}, '"label" is false: a bad answer is not imitated; leave such rows out'),  # in .csv
    ({"messages": [ASK, ANSWER], "label": False}, '"label" is false: a bad answer is not imitated; leave such rows out'),  # ms-swift's and LLaMA-Factory's, which were learned
    ({"messages": [ASK, ANSWER], "label": None, "kto_tag": False}, '"kto_tag" is false: a bad answer is not imitated; leave such rows out'),
    ({"instruction": "a", "output": "b", "kto_tag": False}, '"kto_tag" is false: a bad answer is not imitated; leave such rows out'),
    ({"instruction": "And in Lyon?", "output": "Rain", "history": [["In Paris?", "Sun"]]}, '"history" is not read; give the conversation as "messages"'),
    ({"completion": "x", "input": "q"}, 'no "prompt" field; has: completion, input'),
    ({"messages": [ASK, {**ANSWER, "train": False}]}, 'message 1: "train" is not read; "loss": 0 keeps a message from being learned'),
])
def test_a_bad_row_is_refused_by_file_and_line(tokenizer, tmp_path, row, problem):
    good = {"messages": [ASK, ANSWER]}
    path = write(tmp_path, [good, row, good])
    with pytest.raises(UserError) as caught:
        read(path, tokenizer, env="gsm8k" if "question" in row else None)
    assert str(caught.value) == f"{path}:2: {problem}"


PICTURE = '"{}" is not read, only text is; leave such rows out, or take their text alone: --fields unread={}'


class Shown:
    """It reads the name of a picture itself."""

    def reset(self, question: str, image: str = "", **_) -> str:
        return f"{question} {image}"


@pytest.mark.parametrize("name, value", [
    ("images", ["cats.png"]), ("image", "cats.png"), ("image", {"bytes": "x", "path": None}), ("videos", [["a.mp4"]]), ("video", "a.mp4"),
    ("audios", ["a.wav"]), ("audio", {"array": [0.1]}), ("images", '["cats.png"]')])
def test_a_row_with_a_picture_is_refused_and_an_empty_column_is_none(tokenizer, tmp_path, name, value):
    """Of sft.py, dpo.py and tasks alike: they were learned without it."""
    rows = {"chat": {"messages": [ASK, ANSWER]}, "pair": {"prompt": "a", "chosen": "b", "rejected": "c"}, "task": {"prompt": "a"}, "shown": {"question": "a"}}
    readers = {"chat": lambda path, fields: read(path, tokenizer, fields=fields),
               "pair": lambda path, fields: read_pairs(SimpleNamespace(dataset=path, fields=fields, seed=0, max_samples=9)),
               "task": lambda path, fields: load_tasks("envs.prompts:Prompts", "train", None, 0, path, fields=fields),
               "shown": lambda path, fields: load_tasks(f"{__name__}:Shown", "train", None, 0, path, fields=fields)}
    for kind, row in rows.items():
        path = write(tmp_path, [row, {**row, name: value}])
        if kind == "shown" and name == "image":
            assert len(readers[kind](path, None)) == 2  # the environment takes it
            continue
        with pytest.raises(UserError) as caught:
            readers[kind](path, None)
        assert str(caught.value) == f"{path}:2: {PICTURE.format(name, name)}"
        assert len(readers[kind](path, f"unread={name}")) >= 1  # and by this flag the text is read alone
        for empty in (None, [], "", {}, "[]", "null", [None], {"bytes": None, "path": None}):
            assert len(readers[kind](write(tmp_path, [{**row, name: empty}]), None)) == 1


@pytest.mark.parametrize("content", [
    [{"type": "image"}], [{"type": "image", "text": "", "image": "cats.png"}], [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text", "text": "Hi"}],
    [{"type": "input_audio", "text": "Hi"}], [{"text": "Hi"}], [{"type": "text", "text": "Hi", "image": "cats.png"}], ["Hi"]])
def test_a_part_that_is_no_text_is_refused(chat, content):
    with pytest.raises(ValueError, match="^message 0: (content must be text or text parts, got the part |.image. is not read, only text is)"):
        recorded_ids(chat, [{"role": "user", "content": content}, ANSWER])
    for kind in ("text", "input_text"):
        assert recorded_ids(chat, [{"role": "user", "content": [{"type": kind, "text": "How "}, {"type": kind, "text": "many?", "image": None}]}, ANSWER]) == recorded_ids(chat, [ASK, ANSWER])


def test_a_thought_in_the_prompt_of_a_task_is_text_or_refused(tmp_path):
    """The template wrote it into the prompt of a rollout as Python spells it."""
    def task(thought):
        past = {**ANSWER, "reasoning_content": thought}
        row, = load_tasks("envs.prompts:Prompts", "train", None, 0, write(tmp_path, [{"prompt": [ASK, past, ASK]}]))
        return opening(Prompts.reset, row, "")
    assert task([{"type": "text", "text": "Half."}]) == task("Half.")
    for thought in (True, {"text": "Half."}, ["Half."]):
        with pytest.raises(UserError, match="rows.jsonl:1: reasoning_content must be text or text parts, got "):
            task(thought)


def test_a_message_with_a_picture_is_refused(tokenizer, tmp_path):
    """Ollama's form, in chats, in pairs and in the prompts of tasks."""
    ask = {**ASK, "images": ["cats.png"]}
    for row, load in (({"messages": [ask, ANSWER]}, lambda path: read(path, tokenizer)),
                      ({"prompt": [ask], "chosen": "b", "rejected": "c"}, lambda path: read_pairs(SimpleNamespace(dataset=path, fields=None, seed=0, max_samples=9))),
                      ({"prompt": [ask]}, lambda path: load_tasks("envs.prompts:Prompts", "train", None, 0, path))):
        path = write(tmp_path, [row])
        with pytest.raises(UserError) as caught:
            load(path)
        assert str(caught.value) == f'{path}:1: "images" is not read, only text is; leave such rows out'


@pytest.mark.parametrize("label, is_bad", [(label, True) for label in (False, 0, 0.0, "false", "False", "FALSE", "0", "0.0", "0.00", "no", "No", " n ", "off")]
                         + [(label, False) for label in (True, 1, 1.0, "true", "1", "yes", "sports", "", 2, None, "none")])
def test_bad_answers_of_kto_are_refused_however_their_label_is_written(tokenizer, tmp_path, label, is_bad):
    for name in ("label", "kto_tag"):
        paths = [write(tmp_path, [{**row, name: label}]) for row in ({"prompt": "a", "completion": "b"}, {"messages": [ASK, ANSWER]}, {"instruction": "a", "output": "b"})[:1]]
        (tmp_path / "rows.csv").write_text(f"prompt,completion,{name}\na,b,{'' if label is None else label}\n")
        for path in (*paths, str(tmp_path / "rows.csv")):
            if is_bad:
                with pytest.raises(UserError, match=f':[12]: "{name}" is false: a bad answer is not imitated; leave such rows out'):
                    read(path, tokenizer)
            else:
                assert len(read(path, tokenizer)) == 1


def test_tools_that_are_null_are_none(tokenizer, tmp_path):
    for row in ({"messages": [ASK, ANSWER]}, {"messages": [ASK, ANSWER], "tools": "[]"}):
        plain, = read(write(tmp_path, [row]), tokenizer)
        for tools in ("null", " null\n", None) if "tools" not in row else ("[]", "", []):
            for name in ("tools", "functions"):
                again, = read(write(tmp_path, [{"messages": row["messages"], name: tools}]), tokenizer)
                assert again.token_ids == plain.token_ids
    own, none = (read(write(tmp_path, [{"messages": [ASK, ANSWER], **row}]), tokenizer, env="equations")[0] for row in ({}, {"tools": "null"}))
    assert own.token_ids == none.token_ids  # of both the tools are the environment's


def test_added_tokens_that_become_pieces_are_told(tmp_path, capsys):
    tokenizer = real.__wrapped__("qwen3")  # not the cached one
    tokenizer.add_tokens(["<loc_1>", "[STRAT]", "strategy"])
    row = {"messages": [ASK, {"role": "assistant", "content": "It is at <loc_1>, says [STRAT] of <loc_1>: strategy <|im_end|>"}]}
    other = write(tmp_path, [{"prompt": "a", "completion": "b"}], "other.jsonl")
    read(write(tmp_path, [row, row, {"text": "<loc_1>"}, {"messages": [ASK, ANSWER]}]), tokenizer, eval_dataset=other)
    said = [line for line in capsys.readouterr().out.splitlines() if "as text" in line]
    note = "rows contain {} as text: an added token, learned as its pieces"
    # A text of its own may hold control tokens, and a word is one token as it stands.
    assert said == [f"2 {note.format('<loc_1>')}", f"2 {note.format('[STRAT]')}", "2 rows contain <|im_end|> as text"]


def test_a_column_that_nobody_reads_does_not_stop_a_file(tokenizer, tmp_path):
    path = tmp_path / "rows.jsonl"
    unread = '"score": NaN, "least": -Infinity, "id": 10000000000000000000000, "mask": [1], "trainable": "x", "thinking": {"a": 1}, "image_id": 3, "text": 5'
    path.write_text(f'{{"prompt": "a", "completion": "b", {unread}}}\n')
    assert len(read(str(path), tokenizer)) == 1
    path.write_text(f'{{"prompt": "a", "chosen": "b", "rejected": "c", {unread}}}\n')
    assert len(read_pairs(SimpleNamespace(dataset=str(path), fields=None, seed=0, max_samples=9))) == 1
    path.write_text(f'{{"equation": "x + 1 = 2", {unread}}}\n')
    assert len(load_tasks("equations", "train", None, 0, str(path))) == 1
    path.write_text(f'{{"token_ids": [1, 2], "loss_mask": [0, 1], "logprobs": [0.0, 0.0], {unread}}}\n')
    assert len(recorded(str(path), tokenizer)[0]) == 1
    path.write_text('{"token_ids": [1, 2], "loss_mask": [0, 1], "logprobs": [0.0, NaN]}\n')
    with pytest.raises(UserError, match="rows.jsonl:1: not a trajectory: logprobs and rewards must be finite numbers"):
        recorded(str(path), tokenizer)


@pytest.mark.parametrize("spell", [json.dumps, str])
def test_messages_that_a_table_holds_as_text_are_messages(tokenizer, tmp_path, spell):
    """A data base has them as JSON, and pandas writes them into .csv as Python does. They were refused."""
    chat = [ASK, {**CALLING, "loss": None}, TOOL, ANSWER]
    rows = [{"messages": chat}, {"prompt": chat[:1], "completion": chat[1:]}, {"conversations": [{"value": "it's 4?", "from": "human"}, {"from": "gpt", "value": "4"}]}]
    for row in rows:
        as_text = {name: spell(value) for name, value in row.items()}
        (ours,), (theirs,) = (read(write(tmp_path, [r]), tokenizer) for r in (row, as_text))
        assert ours.token_ids == theirs.token_ids and ours.loss_mask == theirs.loss_mask
    with pytest.raises(UserError, match="cannot be read .SyntaxError"):  # a numpy array
        read(write(tmp_path, [{"messages": "[{'role': 'user', 'content': 'a'}\n {'role': 'assistant', 'content': 'b'}]"}]), tokenizer)
    for answer in ('[{"value": 5, "unit": "kg"}]', '[{"value": 5}] is all.', '[{"from": "Bonn", "to": "Rome"}]', '[{"content": "x"}]'):
        assert as_messages(answer, "completion", "assistant") == [{"role": "assistant", "content": answer}]
    csv = tmp_path / "tasks.csv"
    csv.write_text(f'prompt,answer\n"{spell([ASK]).replace(chr(34), chr(34) * 2)}",4\n')
    task, = load_tasks("envs.prompts:Prompts", "train", None, 0, str(csv), holds_out=False)
    assert opening(Prompts.reset, task, "") == [ASK]


@pytest.mark.parametrize("row, problem", [
    ({"token_ids": [1, 2], "loss_mask": [0], "step": 3}, "not a trajectory: token_ids, loss_mask, logprobs have lengths (2, 1, 0)"),
    ({"token_ids": [1, 10**6], "loss_mask": [0, 1], "logprobs": [0.0, 0.0]},
     "token id 1000000 is not in this model's vocabulary of 933: another model's episode"),
    ({"token_ids": [5, 6], "loss_mask": [0, 1], "logprobs": [0.0, 0.0], "messages": [ASK]},
     "the tokens do not spell the episode's messages: another model's episode"),
])
def test_a_bad_episode_is_refused_by_file_and_line(tokenizer, tmp_path, row, problem):
    good = {"token_ids": [1, 2], "loss_mask": [0, 1], "logprobs": [0.0, 0.0]}
    path = write(tmp_path, [good, row, good])
    with pytest.raises(UserError) as caught:
        recorded(path, tokenizer)
    assert str(caught.value) == f"{path}:2: {problem.replace('933', str(len(tokenizer)))}"


def test_the_vocabulary_ends_before_its_size(tokenizer, tmp_path):
    size = len(tokenizer)
    assert recorded(write(tmp_path, [{"token_ids": [1, size - 1], "loss_mask": [0, 1], "logprobs": [0.0, 0.0]}]), tokenizer)[0]
    with pytest.raises(UserError, match=f"token id {size} is not in this model's vocabulary of {size}"):
        recorded(write(tmp_path, [{"token_ids": [1, size], "loss_mask": [0, 1], "logprobs": [0.0, 0.0]}]), tokenizer)


def test_rows_too_long_are_dropped_and_counted(tokenizer, tmp_path, capsys):
    path = write(tmp_path, [{"prompt": "a" * n, "completion": "b"} for n in (1, 2, 4000)])
    other = write(tmp_path, [{"prompt": "x", "completion": "y"}], "other.jsonl")
    assert len(read(path, tokenizer, max_tokens=100, eval_dataset=other)) == 2
    longest = max(len(t.token_ids) for t in read(path, tokenizer, max_tokens=100, eval_dataset=other))
    assert [len(read(path, tokenizer, max_tokens=n, eval_dataset=other)) for n in (longest, longest - 1)] == [2, 1]
    assert "1 of 3 episodes exceed 100 tokens: dropped" in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------------- held out
def test_a_tenth_is_held_out_by_hash_and_the_seed_only_draws(tokenizer, tmp_path):
    path = write(tmp_path, [{"prompt": f"number {n}", "completion": "b"} for n in range(200)])
    def asked(split, seed=0, n=10**6):
        return [t.messages[0]["content"] for t in read(path, tokenizer, split, n=n, seed=seed)]
    train, test = asked("train"), asked("test")
    assert sorted(train + test) == sorted({f"number {n}" for n in range(200)}) and len(test) == 20
    assert asked("train", 1) != train and set(asked("train", 1)) == set(train) and asked("train", n=7) == train[:7]
    other = write(tmp_path, [{"prompt": "x", "completion": "y"}] * 3, "other.jsonl")
    assert len(read(path, tokenizer, eval_dataset=other)) == 200
    assert len(read(path, tokenizer, "test", eval_dataset=other)) == 3


def test_episodes_are_held_out_by_task_and_chosen_by_reward(tokenizer, tmp_path):
    tasks = [{"equation": f"x + {b} = 9"} for b in range(1, 31)]
    rounded = 2 * (0.6 + 0.3 + 0.1)  # below 2 in floating point, which --min_reward 2 dropped
    played = [replace(t, reward=(0.0, 1.0, rounded)[i], token_ids=[*t.token_ids[:-1], i])  # three endings of each
              for t in demonstrate(tokenizer, "equations", tasks) for i in range(3)]
    path = write(tmp_path, [{"step": 0, **t.to_json()} for t in played])
    halves = recorded(path, tokenizer)
    names = [{t.info["task"]["equation"] for t in half} for half in halves]
    assert not names[0] & names[1] and len(names[1]) > 0 and sum(map(len, halves)) == 90
    best, _ = recorded(path, tokenizer, min_reward=2)
    assert {t.reward for t in best} == {rounded} and len(best) == len(halves[0]) / 3


def test_episodes_without_a_task_are_held_out_by_prompt_and_those_without_a_sampled_token_left_out(tokenizer, tmp_path):
    rows = [{"token_ids": [n, n + 1, 2], "loss_mask": [0, 0, n % 2], "logprobs": [0.0] * 3} for n in range(20, 120)]
    learned, held_out = recorded(write(tmp_path, rows), tokenizer)
    assert len(learned) + len(held_out) == 50 and learned and held_out and all(1 in t.loss_mask for t in learned + held_out)


@pytest.mark.parametrize("different, copies, held_out", [
    (1, 1, 0), (1, 64, 0), (1, 1024, 0), (2, 1, 0), (2, 3, 0), (3, 1, 1), (4, 1, 2), (15, 1, 2), (24, 1, 2), (25, 1, 2), (26, 1, 3), (60, 1, 6), (60, 20, 6), (999, 1, 100)])
def test_of_small_data_exactly_a_tenth_of_the_different_rows_is_held_out(tmp_path, capsys, different, copies, held_out):
    """Two at least, but two are left to learn from: 64 equal prompts ended in an error, and so did 15 rows. Chats and tasks alike."""
    rows = [{"prompt": f"number {n}", "completion": "b"} for n in range(different)] * copies
    is_out = are_held_out(rows, "rows")
    assert len({row["prompt"] for row, out in zip(rows, is_out) if out}) == held_out and sum(is_out) == held_out * copies
    assert not {row["prompt"] for row, out in zip(rows, is_out) if out} & {row["prompt"] for row, out in zip(rows, is_out) if not out}
    assert capsys.readouterr().out == f"rows: {len(rows)} rows, {different} different ones, {held_out} of them held out\n"
    path = write(tmp_path, rows)
    chats = read_split(lambda _: rows, path, dict, SimpleNamespace(max_samples=10**6, seed=0, eval_dataset=None))
    tasks = [load_tasks("envs.prompts:Prompts", split, None, 0, path) for split in ("train", "test")]
    for learned, held in (chats, tasks):
        assert len({row["prompt"] for row in held}) == held_out and len({row["prompt"] for row in learned}) == different - held_out


def test_of_a_thousand_different_rows_and_more_each_goes_where_its_hash_says(capsys):
    is_out = are_held_out([{"n": n} for n in range(1000)], "rows")
    assert [n for n, out in enumerate(is_out) if out][:5] == [3, 16, 18, 21, 23] and not capsys.readouterr().out


# ------------------------------------------------------------------------------------------------------- train
def test_chat_rows_are_learnt_without_an_environment(tmp_path, capsys):
    path = write(tmp_path, [{"prompt": f"say {n}", "completion": "yes"} for n in range(60)])
    result = sft.train(sft.Config(dataset=path, output_dir=str(tmp_path / "o"), max_steps=10, batch_size=8))
    assert result["held_out_loss"] < 1 and result["success_after"] is None
    assert "env: null" in (tmp_path / "o" / "config.yaml").read_text()  # --config repeats it: still rows to learn from


def test_episodes_are_tried_in_the_environment_they_are_of(tokenizer, tmp_path):
    tasks = [{"equation": f"x + {b} = 9"} for b in range(1, 31)]
    path = write(tmp_path, [t.to_json() for t in demonstrate(tokenizer, "equations", tasks)])
    result = sft.train(sft.Config(trajectories=path, output_dir=str(tmp_path / "o"), max_steps=1, batch_size=4, eval_tasks=2))
    assert result["held_out_loss"] > 1 and result["success_after"] is not None
    assert recorded_env(path) == "equations"
    assert recorded_env(write(tmp_path, [{"info": {"env": "/tmp/evil.py:Env"}}, {"info": {"env": [3]}}, {}])) is None  # a data file does not choose which code runs


def test_rows_to_learn_from_with_two_environments_are_tried_in_both(tmp_path):
    path = write(tmp_path, [{"prompt": f"say {n}", "completion": "yes"} for n in range(60)])
    result = sft.train(sft.Config(dataset=path, env="equations,equations_hard", output_dir=str(tmp_path / "o"), max_steps=1,
                                  batch_size=2, eval_tasks=2))
    assert result["success_after"] == 0 and result["held_out_loss"]


def test_a_table_of_several_forms_has_nulls(tokenizer, tmp_path):
    forms = [{"messages": [ASK, ANSWER]}, {"prompt": "a", "completion": "b", "tools": ""}, {"instruction": "a", "output": "b"}]
    columns = set().union(*forms)
    rows = [{name: row.get(name) for name in columns} for row in forms]
    assert len(read(write(tmp_path, rows * 3), tokenizer)) >= 6


def test_what_is_learned_is_not_held_out_under_another_id(tokenizer, tmp_path, capsys):
    path = write(tmp_path, [{"id": i, "prompt": f"q{i % 20}", "completion": f"a{i % 20}"} for i in range(200)])
    learned, held_out = ({t.messages[0]["content"] for t in read(path, tokenizer, split)} for split in ("train", "test"))
    assert learned and not learned & held_out and "held-out rows are also in the training data: dropped" in capsys.readouterr().out


def test_rows_that_are_left_out_are_counted(tokenizer, tmp_path, capsys):
    path = write(tmp_path, [{"prompt": f"q{i}", "completion": "a"} for i in range(60)])
    assert len(read(path, tokenizer, n=30)) == 30
    assert " are not learned from: --max_samples" in capsys.readouterr().out


def test_an_answer_in_json_is_no_call_where_there_are_no_tools(tokenizer, tmp_path):
    answers = ['{"name": "Ada", "parameters": {"age": 36}}', '[{"name": "f", "arguments": {}}]', "[print(x=1)]"]
    for answer in answers:
        t, = read(write(tmp_path, [{"prompt": "As JSON.", "completion": answer}]), tokenizer)
        assert answer in tokenizer.decode(t.token_ids) and "<tool_call>" not in tokenizer.decode(t.token_ids)
        assert parse_tool_calls(answer, {}) == (answer, [], []) and parse_tool_calls(answer)[1]
    assert parse_tool_calls('<tool_call>{"name": "f"}</tool_call>', {})[1]


def test_prose_that_ends_after_a_tag_is_no_call(tokenizer, tmp_path):
    """A chat about tool calls was trained as one: {"name": "tags.", "arguments": {}}."""
    path = write(tmp_path, [{"prompt": "How?", "completion": "Write it in <tool_call> tags."}])
    with pytest.raises(UserError, match="message 1: a tool call without arguments must be closed; a text that opens"):
        read(path, tokenizer)
    for closed in ("<tool_call>look</tool_call>", "<tool_call><function=look></function></tool_call>"):
        assert parse_tool_calls(closed)[1] == [{"name": "look", "arguments": {}}]


def test_held_out_solutions_are_the_environments_held_out_tasks(tokenizer, tmp_path):
    path = write(tmp_path, [{**NATALIA, "question": f"{NATALIA['question']} {n}"} for n in range(60)])
    held_out = {t.messages[1]["content"] for t in read(path, tokenizer, "test", env="gsm8k")}
    assert held_out == {task["question"] for task in load_tasks("gsm8k", "test", None, 0, path)} and held_out


def test_an_experts_episode_that_is_too_long_is_dropped_not_cut(capsys):
    """One that max_tokens ended would be shorter than max_tokens, and teach to stop in the middle."""
    import sft
    tokenizer = make_tiny()[1]
    config = sft.settle(sft.Config(env="equations", max_samples=30, max_tokens=95, seed=1))
    learned, _ = demonstrations(config, tokenizer)
    assert 0 < len(learned) < 30 and {t.stop_reason for t in learned} == {"done"}
    assert f"{30 - len(learned)} of 30 episodes exceed 95 tokens: dropped" in capsys.readouterr().out


SEEDED = """
class Seeded:
    def reset(self, seed: int = 0, **_) -> str:
        self.seed, self.done = seed, False
        return f"say {seed}"
    def say(self, number: int) -> str:
        \"\"\"Say a number.

        Args:
            number: it
        \"\"\"
        self.done = True
        return "ok"
    def get_reward(self) -> float:
        return 1.0
    def _expert(self):
        return [{"name": "say", "arguments": {"number": self.seed}}]
    @staticmethod
    def _tasks(split, n, seed):
        return [{"seed": i} for i in range(10)]
"""


def test_a_task_that_has_a_seed_of_its_own_keeps_it(tmp_path, capsys):
    """The expert is given a seed for its noise, but a task may be nothing but its seed: then it stays in its split."""
    (tmp_path / "seeded.py").write_text(SEEDED)
    config = sft.settle(sft.Config(env=f"{tmp_path / 'seeded.py'}:Seeded", max_samples=10))
    learned, held_out = demonstrations(config, make_tiny()[1])
    assert [t.info["task"]["seed"] for t in learned] == list(range(10))
    # Both splits of this environment are the same: nothing is left to hold out.
    assert not held_out and "10 of 10 held-out rows are also in the training data: dropped" in capsys.readouterr().out


def test_demonstrations_of_the_taught_tiny_model_are_the_ones_of_the_readme():
    """Whatever changes them changes every start from nothing, and with it every figure of `python grpo.py`."""
    config = sft.settle(sft.Config(env="equations", max_samples=40, expert_noise=0.6, max_turns=6))
    learned, _ = demonstrations(config, make_tiny()[1])
    ids = json.dumps([t.token_ids for t in learned]).encode()
    assert hashlib.md5(ids).hexdigest() == "061d9810764b3d133cbe15a0722f25cd"


def test_rows_to_imitate_have_the_lengths_of_their_environment(tmp_path):
    chats = write(tmp_path, [{"prompt": "a", "completion": "b"}], "chats.jsonl")
    assert sft.settle(sft.Config(dataset=chats, env="gsm8k")).max_new_tokens == envs.recommended("gsm8k")["max_new_tokens"] == 512
    assert sft.settle(sft.Config(dataset=chats)).max_new_tokens == 256


# ------------------------------------------------------------------------------ rows of other people's forms
SHAREGPT = [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "How many?"}, {"from": "gpt", "value": "42"}]


@pytest.mark.parametrize("row", [
    {"conversations": SHAREGPT}, {"system": "Be brief.", "conversations": SHAREGPT[1:]}, {"messages": SHAREGPT},
    {"system": "Be brief.", "instruction": "How many?", "input": "", "output": "42"},
    {"system": "Be brief.", "instruction": "How many?", "output": "42", "text": "### Instruction: ..."},
    {"conversations": [SYSTEM, ASK, ANSWER]}, {"prompt": SHAREGPT[:2], "completion": SHAREGPT[2]}])
def test_sharegpt_and_alpaca_are_the_same_conversation_as_messages(row, tokenizer, tmp_path):
    theirs, ours = (read(write(tmp_path, [r]), tokenizer)[0] for r in (row, {"messages": [SYSTEM, ASK, ANSWER]}))
    assert (theirs.token_ids, theirs.loss_mask) == (ours.token_ids, ours.loss_mask)


def test_alpacas_input_follows_the_instruction(tokenizer, tmp_path):
    alpaca = {"instruction": "Add.", "input": "1 and 2", "output": "3"}
    episode, = read(write(tmp_path, [alpaca]), tokenizer)
    assert "Add.\n\n1 and 2" in tokenizer.decode(episode.token_ids) and spelled(tokenizer, episode) == ["3<|im_end|>"]


@pytest.mark.parametrize("name", ["tiny", "real:qwen2_5", "real:smollm2"])
def test_openais_older_form_and_ms_swifts_are_calls_as_well(name, tmp_path):
    """Toucan's and Qwen-Agent's, which were refused; the tools in "functions" were dropped without a word."""
    tokenizer = make_tiny()[1] if name == "tiny" else real(name.removeprefix("real:"))
    function = {"name": "calculator", "description": "Calculate.", "parameters": {"type": "object", "properties": {"expression": {"type": "string", "description": "x"}}, "required": ["expression"]}}
    system, call = {"role": "developer", "content": "Be brief."}, {**CALL, "arguments": json.dumps(CALL["arguments"])}
    openai = [system, ASK, {"role": "assistant", "content": None, "function_call": call}, {"role": "function", "name": "calculator", "content": "24"}, {**ANSWER, "function_call": None}]
    swift = [ASK, {"role": "tool_call", "content": json.dumps(CALL)}, {"role": "tool_response", "content": "24"}, ANSWER]
    rows = ({"messages": openai, "functions": [function]}, {"messages": openai, "functions": [function], "tools": None}, {"messages": swift, "tools": json.dumps([function]), "system_prompt": "Be brief."},
            {"messages": [SYSTEM, ASK, {"role": "assistant", "content": "", "tool_calls": [CALL]}, TOOL, ANSWER], "tools": [{"type": "function", "function": function}]})
    assert len({(*episode.token_ids, *episode.loss_mask) for row in rows for episode in read(write(tmp_path, [row]), tokenizer)}) == 1


def test_calls_in_messages_of_their_own_are_one_turn(chat):
    """Toucan's and ms-swift's: the text and the calls of a turn, each a message. They were refused."""
    def ids(*messages):
        return recorded_ids(chat, as_messages([ASK, *messages, TOOL, TOOL, ANSWER], "messages"))

    wanted = ids({**CALLING, "tool_calls": [CALL, CALL]})
    said, old = {"role": "assistant", "content": "Half of it."}, {**CALL, "arguments": json.dumps(CALL["arguments"])}
    assert ids(said, *[{"role": "assistant", "content": "", "function_call": old}] * 2) == wanted
    for text in (json.dumps(CALL), str(CALL)):
        assert ids(said, *[{"role": "tool_call", "content": text}] * 2) == wanted
        assert ids({**said, "content": [{"type": "text", "text": "Half of it."}]}, *[{"role": "tool_call", "content": text}] * 2) == wanted
    assert ids({**said, "function_call": old}, {"from": "function_call", "value": json.dumps(CALL)}) == wanted
    assert not any(recorded_ids(chat, as_messages([ASK, said, {"role": "tool_call", "content": str(CALL), "loss": 0}, TOOL, ANSWER], "messages"))[1][:-5])
    call = {"role": "tool_call", "content": json.dumps(CALL)}
    thought = {"reasoning_content": "Hm."}
    for later in ({}, {"reasoning_content": None}, {"reasoning_content": ""}):  # Qwen-Agent writes it in each message
        assert ids({**said, **thought}, *[call | later] * 2) == ids({**CALLING, **thought, "tool_calls": [CALL, CALL]})
    assert ids(*[{"role": "assistant", "content": f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>"}] * 2) == ids({**CALLING, "content": "", "tool_calls": [CALL, CALL]})
    for one, other in ((0, 1), (1, 0), (0, None), (None, 0)):  # what says "loss": 0 is never learned
        with pytest.raises(ValueError, match="nothing to train"):
            recorded_ids(chat, as_messages([ASK, {**said, "loss": one}, {**call, "loss": other}, TOOL, {**ANSWER, "loss": 0}], "messages"))
    with pytest.raises(TypeError):  # parts beside function_call were learned as Python's text of a list
        ids({"role": "assistant", "content": [{"type": "text", "text": "Half."}], "function_call": old})
    for first in ({**CALLING, "content": None}, said):
        with pytest.raises(ValueError, match="need (tool|user) after"):
            ids(first, {**said, "content": f"<tool_call>{CALL}</tool_call>"} if "tool_calls" in first else said)


def test_a_system_prompt_of_its_own_column_is_not_dropped(tokenizer, tmp_path):
    """OpenOrca's and OpenHermes's, which nothing showed to the model."""
    row = {"system_prompt": "Be brief.", "question": "How many?", "response": "42"}
    theirs, = read(write(tmp_path, [row]), tokenizer, fields="prompt=question,completion=response")
    assert theirs.token_ids == read(write(tmp_path, [{"messages": [SYSTEM, ASK, ANSWER]}]), tokenizer)[0].token_ids


@pytest.mark.parametrize("name", ["tiny", "real:qwen2_5", "real:smollm2"])
def test_sharegpts_function_calls_are_calls_and_observations_results(name, tmp_path):
    tokenizer = make_tiny()[1] if name == "tiny" else real(name.removeprefix("real:"))
    function = {"name": "calculator", "description": "Calculate.",
                "parameters": {"type": "object", "properties": {"expression": {"type": "string", "description": "x"}}, "required": ["expression"]}}
    theirs = {"tools": json.dumps([function]), "conversations": [
        {"from": "human", "value": "How many?"}, {"from": "function_call", "value": json.dumps(CALL)},
        {"from": "observation", "value": "24"}, {"from": "gpt", "value": "42"}]}
    ours = {"tools": [{"type": "function", "function": function}],
            "messages": [ASK, {"role": "assistant", "content": "", "tool_calls": [CALL]}, TOOL, ANSWER]}
    tagged = json.loads(json.dumps(theirs))  # as some data sets do
    tagged["conversations"][1]["value"] = f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>"
    theirs, tagged, ours = (read(write(tmp_path, [row]), tokenizer)[0] for row in (theirs, tagged, ours))
    assert theirs.token_ids == tagged.token_ids == ours.token_ids
    assert theirs.loss_mask == tagged.loss_mask == ours.loss_mask and 1 in ours.loss_mask


def test_a_call_that_hermes_data_writes_as_python_does_is_a_call(chat):
    """The data set itself, NousResearch/hermes-function-calling-v1, was refused at its first call."""
    def ids(content):
        return recorded_ids(chat, [ASK, {"role": "assistant", "content": content}])

    call = {"name": "calculator", "arguments": {"expression": "it's 4", "exact": True, "unit": None}}
    assert ids(f"So:\n<tool_call>\n{call}\n</tool_call>\n<tool_call>\n{call}\n</tool_call>") == ids("So:" + f"\n<tool_call>\n{json.dumps(call)}\n</tool_call>" * 2)
    for wrong in ("{'name': open('x')}", "{'name': 'calculator'"):
        with pytest.raises(ValueError, match="the tool call is not valid JSON"):
            ids(f"<tool_call>\n{wrong}\n</tool_call>")


@pytest.mark.parametrize("name", ["tiny", "real:qwen2_5", "real:smollm2"])
def test_the_tags_that_hermes_data_writes_around_results_are_the_templates(name, tmp_path):
    tokenizer = make_tiny()[1] if name == "tiny" else real(name.removeprefix("real:"))
    call = f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>"
    tagged = "<tool_response>\n24\n</tool_response>\n"
    theirs = [{"from": "human", "value": "How many?"}, {"from": "gpt", "value": f"{call}\n{call}"}, {"from": "tool", "value": tagged * 2},
              {"from": "gpt", "value": "And?\n" + call}, {"from": "tool", "value": tagged}, {"from": "gpt", "value": "42"}]
    ours = [ASK, {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]}, TOOL, TOOL,
            {"role": "assistant", "content": "And?", "tool_calls": [CALL]}, TOOL, ANSWER]
    theirs, ours = (read(write(tmp_path, [row]), tokenizer)[0] for row in ({"conversations": theirs}, {"messages": ours}))
    assert theirs.token_ids == ours.token_ids and theirs.loss_mask == ours.loss_mask and 1 in ours.loss_mask


@pytest.mark.parametrize("name", ["tiny", "real:smollm2", "real:llama3_2"])
def test_of_a_text_every_token_is_learned_and_no_template_is_used(name, tmp_path, capsys):
    tokenizer = make_tiny()[1] if name == "tiny" else real(name.removeprefix("real:"))
    end = tokenizer.eos_token
    plain, rendered = (read(write(tmp_path, [{"text": text}]), tokenizer)[0] for text in ("3 plus 4", f"4 plus 5{end}"))
    for episode in (plain, rendered):
        assert episode.loss_mask == [0, *[1] * (len(episode.token_ids) - 1)]
        assert episode.token_ids.count(tokenizer.eos_token_id) == 1 and episode.token_ids[-1] == tokenizer.eos_token_id
    assert {tokenizer.decode(e.token_ids, skip_special_tokens=True) for e in (plain, rendered)} == {"3 plus 4", "4 plus 5"}
    assert "as text" not in capsys.readouterr().out  # what spells a control token is one here


@pytest.mark.parametrize("after", ["", "\n", "\n\n", " \n\t", "\r\n"])
@pytest.mark.parametrize("name, stop", [("tiny", "<|im_end|>"), ("qwen3", "<|im_end|>"), ("qwen3", "<|endoftext|>"), ("llama3_2", "<|eot_id|>"), ("gemma3", "<end_of_turn>")])
def test_a_text_that_ends_in_a_stop_gets_no_second_one(name, stop, after, tmp_path):
    """Templates write a newline after it. A second stop token was trained after that."""
    tokenizer = make_tiny()[1] if name == "tiny" else real(name)
    ids = [read(write(tmp_path, [{"text": text}]), tokenizer)[0].token_ids for text in (f"4 plus 5{stop}{after}", f"4 plus 5{stop}", f"{stop}\n4 plus 5")]
    stop_id = tokenizer.convert_tokens_to_ids(stop)
    assert ids[0] == ids[1] and ids[0][-1] == stop_id and ids[0].count(stop_id) == 1
    assert ids[2][-1] == tokenizer.eos_token_id  # one at the beginning ends nothing


def test_a_rendered_chat_does_not_begin_twice(tmp_path):
    """Llama's and Gemma's tokenizers put a token before every text, which their templates write as well."""
    tokenizer = make_tiny()[1]
    tokenizer.add_special_tokens({"bos_token": "<|bos|>"})
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", bos)])
    plain, rendered = (read(write(tmp_path, [{"text": text}]), tokenizer)[0].token_ids for text in ("3 plus 4", "<|bos|>3 plus 4"))
    assert plain == rendered and plain.count(bos) == 1 and plain[0] == bos


def test_a_tokenizer_without_an_end_of_text_token_reads_texts(tmp_path):
    tokenizer = make_tiny()[1]
    tokenizer.eos_token = None
    [episode] = read(write(tmp_path, [{"text": "3 plus 4"}]), tokenizer)
    assert None not in episode.token_ids and tokenizer.decode(episode.token_ids) == "3 plus 4"
    with pytest.raises(UserError, match='"text" is empty: nothing to train on'):
        read(write(tmp_path, [{"text": ""}]), tokenizer)


@pytest.mark.parametrize("row, reason", [
    ({"text": ""}, '"text" is empty: nothing to train on'),
    ({"conversations": "hello"}, '"conversations" must be a list of {"role": ..., "content": ...}'),
    ({"conversations": [{"from": "human", "value": "a"}, {"from": "tutor", "value": "b"}]}, "message 1: need assistant after the user, got tutor"),
    ({"conversations": [{"from": "gpt", "value": "b"}]}, "message 0: need system or user at the start, got assistant"),
    ({"instruction": 3, "output": "4"}, "cannot be read (TypeError: "),
    ({"instruction": "i", "response": "r"}, 'no "messages" field; has: instruction, response; nor another form: ')])
def test_such_rows_are_refused_in_one_line(row, reason, tokenizer, tmp_path):
    path = write(tmp_path, [row])
    with pytest.raises(UserError) as caught:
        read(path, tokenizer)
    assert str(caught.value).startswith(f"{path}:1: {reason}")


@pytest.mark.parametrize("row", [{"messages": [ASK, ANSWER]}, {"conversations": SHAREGPT}, {"instruction": "a", "output": "b"},
                                 {"prompt": "a", "completion": "b"}])
def test_a_message_about_a_file_of_chats_does_not_speak_of_equations(row, tmp_path):
    path = write(tmp_path, [row])
    with pytest.raises(UserError) as caught:
        load_tasks("equations", "train", 10, 0, path)
    assert str(caught.value) == f"{path}:1: a conversation is given to sft.py with --dataset; the row has: {', '.join(row)}"
    with pytest.raises(UserError, match='no "equation" field; has: question; rows are read as tasks of Equations; --fields renames columns; prompts without tools: --env envs.prompts:Prompts'):
        load_tasks("equations", "train", 10, 0, write(tmp_path, [{"question": "?"}]))
