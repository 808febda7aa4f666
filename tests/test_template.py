"""Chat template <-> tokens. The numbers I1 ... are the invariants of tokens: what must hold for every template.

Every property is tested on small tokenizers made here, whose templates are the awkward families in a few lines each;
then on the real templates of .real/templates, which need the Qwen tokenizer of .real/qwen and are skipped without it.
"""

import functools
import json
import re
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import get_json_schema

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from agent import Trajectory  # noqa: E402
from llm.chat import Chat, parse_tool_calls  # noqa: E402


def look(query: str, limit: int = 3) -> str:
    """Look something up.

    Args:
        query: what to look for
        limit: how many answers
    """


TOOLS = [get_json_schema(look)]
CALLS = [{"name": "look", "arguments": {"query": 'who is "there"?', "limit": 2}}]
TWO = CALLS + [{"name": "look", "arguments": {"query": "x"}}]

# ---------------------------------------------------------------------------------- small tokenizers of every family

CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
HERMES = """{% if tools %}<|im_start|>system
{% for t in tools %}{{ t | tojson }}
{% endfor %}{{ '<tool_call>{"name": ...}</tool_call>' }}<|im_end|>
{% endif %}{% for m in messages %}{% if m.role == 'tool' %}{% if loop.previtem.role != 'tool' %}<|im_start|>user
{% endif %}<tool_response>
{{ m.content }}
</tool_response>{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}{% else %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}
<tool_call>
{{ c.function | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
BODY = "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
SHOW = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}"
TEMPLATES = {
    "chatml": CHATML,  # cannot show tools
    "hermes": HERMES,
    "thinking": HERMES.replace(  # rewrites history: only the last turn shows a thought, as Qwen3
        "{{ m.content }}{% for",
        "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}{% for",
    ),
    "opens": HERMES.replace(
        "{{ m.content }}{% for", "{% if m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}{% for"
    ).replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}"),
    "glm": SHOW + "{{ {'user': '<|user|>', 'assistant': '<|assistant|>', 'system': '<|system|>', 'tool': "
    "'<|observation|>'}[m.role] }}\n{{ m.content }}"
    + BODY
    + "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",  # no stop token of its own
    "gptoss": SHOW + "{% if m.role == 'assistant' %}{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>"
    "{{ m.thinking }}<|end|>{% endif %}{% if m.tool_calls %}<|start|>assistant to=functions."
    "{{ m.tool_calls[0].function.name }}<|channel|>commentary json<|message|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>{% else %}<|start|>assistant<|channel|>final"
    "<|message|>{{ m.content }}{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
    "{% endif %}{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}",  # two stops, one call a turn
    "gemma4": SHOW + "{% if m.role == 'tool' %}{{ '<|tool_response>' if not loop.previtem.tool_calls }}{{ m.content }}"
    "<tool_response|>{% else %}{% if loop.first or loop.previtem.role != 'tool' %}<|turn>{{ m.role }}\n"
    "{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}<|tool_call>call:{{ c.function.name ~ '{' }}"
    "{% for k, v in c.function.arguments.items() %}{{ k }}:"
    "{{ '<|\"|>' ~ v ~ '<|\"|>' if v is string else v }}"
    "{{ ',' if not loop.last }}{% endfor %}{{ '}' }}<tool_call|>{% endfor %}"
    "{{ '<|tool_response>' if m.tool_calls else '<turn|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}<|turn>model\n{% endif %}",
    "llama": SHOW + "{% if m.tool_calls and m.tool_calls | length != 1 %}{{ raise_exception('one call') }}{% endif %}"
    '<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{% if m.tool_calls %}{"name": "{{ m.tool_calls[0]'
    '.function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}{% else %}'
    "{{ m.content }}{% endif %}<|eot_id|>{% endfor %}{% if add_generation_prompt %}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
    "gemma": "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
}
TEMPLATES["gemma4"] = TEMPLATES["gemma4"].replace(
    "<|turn>{{ m.role }}", "<|turn>{{ 'model' if m.role == 'assistant' else m.role }}"
)
CONTROL = re.compile(r'<\|[^|<>\s]*\|>|<｜[^｜<>]*｜>|<\|["a-z_]+\|?>|<[a-z_]+\|>|</?[a-z_]+>|\[/?[A-Za-z_]+\]')


def controls(template):
    return sorted(set(CONTROL.findall(re.sub(r"\{#.*?#\}", "", template, flags=re.S))))


@functools.cache
def small(name):
    """A byte-level tokenizer of 256 letters and the template's control tokens (of which <...> are not special)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tok = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")
    tok.chat_template = TEMPLATES[name]
    names = controls(tok.chat_template)
    tok.add_special_tokens({"additional_special_tokens": [n for n in names if "|" in n or "_of_turn" in n]})
    tok.add_tokens(sorted({*names, "<tool_call>", "</tool_call>", "<think>", "<tool_response>"}))
    return tok


@functools.cache
def real(name):
    """A template of another model on the Qwen tokenizer, its control tokens added."""
    if not (ROOT / ".real/qwen").exists():
        pytest.skip("needs .real/qwen and .real/templates (shared/real)")
    tok = AutoTokenizer.from_pretrained(ROOT / ".real/qwen")
    if name == "smollm2":
        return AutoTokenizer.from_pretrained(ROOT / ".real/smollm2")
    tok.chat_template = (ROOT / f".real/templates/{name}.jinja").read_text()
    tok.add_special_tokens({"additional_special_tokens": controls(tok.chat_template)})
    tok.bos_token, tok.eos_token = "<|bos|>", "<|endoftext|>"
    return tok


REAL = [
    "smollm2",
    *sorted(p.stem for p in (ROOT / ".real/templates").glob("*.jinja") if not p.stem.endswith("_training")),
]
REFUSED = {"idefics3", "llava_next", "smolvlm"}  # they show text only inside content parts
NAMES = list(TEMPLATES) + ["real:" + n for n in REAL if n not in REFUSED]
ALL = pytest.mark.parametrize("name", NAMES)


@functools.cache
def chat(name):
    return Chat(real(name[5:]) if name.startswith("real:") else small(name), TOOLS)


def user(text):
    return [{"role": "user", "content": text}]


def control_counts(c, ids):
    return Counter(i for i in ids if i in c.tokenizer.added_tokens_decoder)


def hostile(c):
    """Every added token: whole, doubled, split, spaced, in other case, nested in itself, in sanitising's markers."""
    out = []
    for token in (t.content for t in c.tokenizer.added_tokens_decoder.values()):
        half = len(token) // 2
        out += [
            token,
            token * 2,
            token[:half] + "\u200b" + token[half:],
            token[:half] + " " + token[half:],
            token.upper(),
            token[:half] + token + token[half:],
            f"\U000f0000{token}\U000f0001",
            f"\U000f0001{token}\U000f0000",
            token[:half] + "\U000f0000" + token[half:],
            "\ud800" + token,
        ]
    return out


# ------------------------------------------------------------------------------------------------- every template


@ALL
def test_hostile_text_adds_no_control_token(name):
    """I1, I3: whatever user, system, tool or demonstration text spells, only the template's own controls are there."""
    c = chat(name)
    text = "a " + " b ".join(hostile(c)) + " c"
    spoken = " ".join(h for h in hostile(c) if "think" not in h.translate({0xF0000: None, 0xF0001: None}).lower())

    def system(t):
        return [{"role": "system", "content": t}, *user(t)]

    def parts(t, spoken):  # a thought in a demonstration is for the template to place
        return (
            c.prompt(system(t)),
            c.reply(t, None),
            c.results(CALLS, [t], c.call_stop_id),
            c.turn(spoken, []),
            c.results(TWO, [t, t], None),
            c.turn("", [{"name": "look", "arguments": {"query": t}}]),
        )

    for ours, clean in zip(parts(text, spoken), parts("xyz", "xyz")):
        assert control_counts(c, ours) == control_counts(c, clean)


@ALL
def test_conversation_is_appended_never_rendered_again(name):
    """I3, I4: call, call, answer, reply: each tool text once, every suffix ends where the model is to speak."""
    c = chat(name)
    first = c.prompt(user("Find it."))
    header = first[len(c.prompt(user("Find it."))) - 1]
    ids = list(first)
    for i in range(2):
        ids += c.turn("", CALLS)
        assert ids[-1] == c.call_stop_id
        ids += c.results(CALLS, [f"tooltext{i}"], ids[-1])
        assert "gemma4" in name or "diffusion_gemma" in name or ids[-1] == header
    ids += c.turn("Here it is.", [])
    assert ids[-1] == c.answer_stop_id
    ids += c.reply("Wrong, again.", ids[-1])
    text = c.tokenizer.decode(ids)
    words = ["Find it.", "tooltext0", "tooltext1", "Here it is.", "Wrong, again."]
    assert [text.count(w) for w in words] == [1] * 5
    assert [text.index(w) for w in words] == sorted(text.index(w) for w in words)
    assert ids[-1] == header


@ALL
def test_results_of_one_turn_come_in_one_rendering_and_forced_stops_come_first(name):
    c = chat(name)
    both = c.results(TWO, ["first result", "second result"], c.call_stop_id)
    text = c.tokenizer.decode(both)
    assert text.count("first result") == text.count("second result") == 1 and text.index("first") < text.index("second")
    assert c.results(TWO, ["first result", "second result"], None)[1:] == both
    assert c.results([], ["error: not JSON"], c.call_stop_id)  # a turn none of whose calls could be read
    reply = c.reply("go on", c.answer_stop_id)
    assert c.reply("go on", None)[1:] == reply and c.reply("go on", 1)[0] in c.tokenizer.added_tokens_decoder
    assert c.call_stop_id not in c.start_ids and c.answer_stop_id not in c.start_ids


@ALL
def test_turn_reads_back_as_the_same_calls(name):
    """I12, I15: what SFT teaches is what the parser reads; as text and as ids."""
    c = chat(name)
    for calls in [CALLS, TWO] if c._many or not c.native_tools else [CALLS]:
        turn = c.turn("", calls)
        assert turn[-1] in c.stop_ids and not set(turn[:-1]) & c.stop_ids and not set(turn) & c.start_ids
        assert parse_tool_calls(c.text(turn))[1:] == (calls, [])
    content, calls, errors = parse_tool_calls(c.text(c.turn("It is 42.", [])))
    assert (calls, errors) == ([], []) and "It is 42." in content


@ALL
def test_clean_prompt_is_the_templates_own(name):
    """I2"""
    c = chat(name)
    for messages in (user("Hello there"), [{"role": "system", "content": "Be brief."}, *user("Hi")]):
        if c.native_tools:
            own = c.tokenizer.apply_chat_template(messages, tools=TOOLS, add_generation_prompt=True, return_dict=False)
            assert c.prompt(messages) == own
        else:  # tools are told in the first user message, the system message goes where the template allows
            text = c.tokenizer.decode(c.prompt(messages))
            assert "Look something up." in text and all(m["content"] in text for m in messages)
            bare = Chat(c.tokenizer, [])
            if not c._folds_system:
                assert bare.prompt(messages) == c.tokenizer.apply_chat_template(
                    messages, add_generation_prompt=True, return_dict=False
                )


# -------------------------------------------------------------------------------------------------- single families


@pytest.mark.parametrize(
    "name, call_stop, answer_stop, starts",
    [
        ("hermes", "<|im_end|>", "<|im_end|>", {"<|im_start|>"}),
        ("thinking", "<|im_end|>", "<|im_end|>", {"<|im_start|>"}),
        ("glm", "<|observation|>", "<|user|>", {"<|assistant|>"}),
        ("gptoss", "<|call|>", "<|return|>", set()),
        ("gemma4", "<|tool_response>", "<turn|>", {"<|turn>"}),
        ("llama", "<|eot_id|>", "<|eot_id|>", {"<|start_header_id|>"}),
        ("gemma", "<end_of_turn>", "<end_of_turn>", {"<start_of_turn>"}),
        ("real:qwen3", "<|im_end|>", "<|im_end|>", {"<|im_start|>"}),
        ("real:glm4moe", "<|observation|>", "<|user|>", {"<|assistant|>"}),
        ("real:gptoss", "<|call|>", "<|return|>", set()),
        ("real:gemma4_v5", "<|tool_response>", "<turn|>", {"<|turn>"}),
        ("real:phi3", "<|end|>", "<|end|>", {"<|user|>", "<|assistant|>"}),
        ("real:deepseekv3", "<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>", {"<｜User｜>", "<｜Assistant｜>"}),
    ],
)
def test_stops_and_starts(name, call_stop, answer_stop, starts):
    c = chat(name)
    token = c.tokenizer.convert_ids_to_tokens
    assert (token(c.call_stop_id), token(c.answer_stop_id)) == (call_stop, answer_stop)
    assert set(token(list(c.start_ids))) == starts
    assert {call_stop, answer_stop, "<|endoftext|>"} >= set(token(list(c.stop_ids)))


def test_generation_config_adds_stops():
    for eos, more in ((None, set()), (7, {7}), ([7, 8], {7, 8})):
        c = Chat(small("hermes"), TOOLS, SimpleNamespace(eos_token_id=eos))
        assert c.stop_ids == chat("hermes").stop_ids | more


def test_native_or_told_in_text():
    assert {n for n in TEMPLATES if not chat(n).native_tools} == {"chatml", "gemma"}
    c = chat("gemma")  # no system role either
    text = c.tokenizer.decode(c.prompt([{"role": "system", "content": "Be brief."}, *user("Hi")]))
    assert text.startswith("<start_of_turn>user\nBe brief.\n\nYou can call") and text.endswith(
        "</tool_response>.\n\nHi<end_of_turn>\n<start_of_turn>model\n"
    )
    assert c.tokenizer.convert_tokens_to_ids("<tool_call>") not in c.prompt(user("Hi"))  # plain text


def test_assembled_conversation_equals_one_rendering():
    """I15: prompt + turn + results is what the template renders, where the template does not rewrite history."""
    c = chat("hermes")
    calls = [{"type": "function", "function": call} for call in TWO]
    messages = [
        *user("Hi"),
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "r1"},
        {"role": "tool", "content": "r2"},
        {"role": "assistant", "content": "Done."},
        *user("More"),
    ]
    ids = c.prompt(user("Hi")) + c.turn("", TWO) + c.results(TWO, ["r1", "r2"], c.call_stop_id)
    ids += c.turn("Done.", []) + c.reply("More", c.answer_stop_id)
    assert ids == c.tokenizer.apply_chat_template(messages, tools=TOOLS, add_generation_prompt=True, return_dict=False)


def test_turn_joins_the_generation_prompt():
    assert chat("opens").text(chat("opens").turn("Hi", [])) == "\n</think>\n\nHi"
    assert chat("thinking").text(chat("thinking").turn("Hi", [])) == "<think>\n\n</think>\n\nHi"
    assert chat("glm").text(chat("glm").turn("Hi", [])) == "\nHi"
    assert chat("hermes").text(chat("hermes").turn("\n\nHi", [])) == "\n\nHi"


def test_turn_joins_the_real_generation_prompts():
    """A token across the seam (Qwen3.5: "\\n" + "\\n"), a thought the prompt opens (Nemotron, DeepSeek)."""
    for name, turn in {
        "qwen3_5_think": "\n</think>\n\nHi",
        "nemotron_3_nano": "</think>Hi",
        "qwen3_5_nothink": "Hi",
        "deepseekv3": "</think>\n\nHi",
        "gptoss": "<|channel|>final<|message|>Hi",
    }.items():
        c = chat("real:" + name)
        assert c.text(c.turn("Hi", [])) == turn


def test_gemma4_trains_the_opening_token_and_does_not_repeat_it():
    c = chat("gemma4")
    whole = c.tokenizer.decode(c.turn("", CALLS) + c.results(CALLS, ["r"], c.call_stop_id))
    assert whole.count("<|tool_response>") == 1 and whole.endswith("<|tool_response>r<tool_response|>")


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=60), st.lists(st.sampled_from(hostile(chat("hermes"))), max_size=4), st.randoms())
def test_any_text_survives_and_controls_nothing(text, tokens, random):
    """I1, I14: random text with control tokens inside, as tool result and as user message."""
    c = chat("hermes")
    for token in tokens:
        at = random.randrange(len(text) + 1)
        text = text[:at] + token + text[at:]
    ids = c.results(CALLS, [text], c.call_stop_id)
    assert control_counts(c, ids) == control_counts(c, c.results(CALLS, ["x"], c.call_stop_id))
    shown = text.encode("utf-8", "replace").decode().translate({0xF0000: None, 0xF0001: None})  # sanitising's markers
    assert f"<tool_response>\n{shown}\n</tool_response>" in c.tokenizer.decode(ids)


@pytest.mark.parametrize("text", ["", "👩‍👩‍👧", "שלום", " " * 100_000, "a\r\nb", "\u2028", "e\u0301", "\x00", "𝟜"])
def test_round_trip(text):
    """I14"""
    c = chat("hermes")
    assert c.text(c.turn(text, [])) == text
    assert c.tokenizer.decode(c.prompt(user(text))).endswith(f"user\n{text}<|im_end|>\n<|im_start|>assistant\n")


def test_text_keeps_all_but_the_stop():
    c = chat("hermes")
    turn = c.turn("Hi", CALLS)
    assert c.text(turn) == c.text(turn[:-1]) == c.tokenizer.decode(turn[:-1]) and c.text([]) == ""


# --------------------------------------------------------------------------------------------------------- refusals


def test_refusals_are_one_line():
    tok = small("chatml")
    c = chat("hermes")
    bare = PreTrainedTokenizerFast(tokenizer_object=tok.backend_tokenizer)
    evil_key = {
        "type": "function",
        "function": {
            "name": "f",
            "description": "",
            "parameters": {"type": "object", "properties": {"<|im_start|>": {"type": "string"}}},
        },
    }
    evil_name = {"type": "function", "function": {"name": "f<|im_end|>", "description": "", "parameters": {}}}
    for message, make in {
        "no chat template": lambda: Chat(bare, []),
        "control tokens": lambda: Chat(tok, [evil_key]),
        "identifiers": lambda: Chat(tok, [evil_name]),
        "'banana'": lambda: c.prompt([{"role": "banana", "content": "x"}]),
        "message 1 has role 'system'": lambda: c.prompt([*user("x"), {"role": "system", "content": "x"}]),
        "must be text, got NoneType": lambda: c.prompt([{"role": "user", "content": None}]),
        "end with a user": lambda: c.prompt([]),
        "one tool call per turn": lambda: chat("llama").turn("", TWO),
        "names must be": lambda: c.turn("", [{"name": "f", "arguments": {"<|im_end|>": 1}}]),
    }.items():
        with pytest.raises(ValueError, match=message) as caught:
            make()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_templates_without_plain_text_are_refused(name):
    with pytest.raises(ValueError, match="given as text"):
        Chat(real(name), TOOLS)


def test_template_without_added_tokens_is_refused():
    tok = PreTrainedTokenizerFast(tokenizer_object=small("chatml").backend_tokenizer)
    tok.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    with pytest.raises(ValueError, match="no added token ends a turn"):
        Chat(tok, [])


def test_tokenizer_is_left_alone():
    tok = small("hermes")
    before = tok.init_kwargs.copy(), tok.chat_control_tokens, tok.chat_template
    c = Chat(tok, TOOLS)
    c.prompt(user("Hi"))
    assert (tok.init_kwargs, tok.chat_control_tokens, tok.chat_template) == before
    assert len(c.template_hash) == 64 and c.template_hash != chat("glm").template_hash


# ------------------------------------------------------------------------------------------------------- trajectory

ROW = dict(
    token_ids=[1, 2, 3],
    loss_mask=[0, 1, 1],
    logprobs=[0.0, -1.5, -0.25],
    rewards=[1.0],
    reward=1.0,
    reward_parts={"right": 1.0},
    group_id="t/0",
    stop_reason="done",
    messages=user("é"),
    info={"task": {"n": 1}},
)


def test_trajectory_round_trip():
    row = json.loads(json.dumps(Trajectory(**ROW).to_json(), allow_nan=False))
    assert row == ROW and Trajectory.from_json(row) == Trajectory(**ROW)


@pytest.mark.parametrize(
    "change, problem",
    [
        ({"logprobs": [0.0, -1.0]}, r"lengths \(3, 3, 2\)"),
        ({"token_ids": []}, "lengths"),
        ({"token_ids": 5}, "len"),
        ({"token_ids": [1, 2, -3]}, "integers"),
        ({"token_ids": [1, 2.0, 3]}, "integers"),
        ({"token_ids": "abc"}, "integers"),
        ({"loss_mask": [0, 2, 1]}, "0 or 1"),
        ({"loss_mask": [0, True, 1]}, "0 or 1"),
        ({"loss_mask": [1, 1, 1]}, "precedes"),
        ({"logprobs": [0.0, float("nan"), 0.0]}, "finite"),
        ({"logprobs": [0.0, None, 0.0]}, "finite"),
        ({"reward": float("inf")}, "finite"),
        ({"reward": 10**400}, "finite"),
        ({"rewards": None}, "not a trajectory"),
        ({"reward_parts": {"a": "x"}}, "finite"),
        ({"reward_parts": []}, "not a trajectory"),
        ({"colour": 1}, "colour"),
    ],
)
def test_trajectory_refusals(change, problem):
    with pytest.raises(ValueError, match=problem) as caught:
        Trajectory.from_json({**ROW, **change})
    assert "\n" not in str(caught.value)


def test_trajectory_must_be_an_object():
    for row in (None, [], "x", 3):
        with pytest.raises(ValueError, match="not a trajectory"):
            Trajectory.from_json(row)
