"""Messages to token ids. The numbers I1 ... are the invariants of tokens that must hold for every template."""

import functools
from collections import Counter
from types import SimpleNamespace

import pytest
from families import ALL, CALLS, CHATML, REFUSED, TEMPLATES, TOOLS, TWO, dialects, real, small
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from core.chat import Chat
from core.tool_calls import parse_tool_calls


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
            f"\U000e01ee{token}\U000e01ef",
            f"\U000e01ef{token}\U000e01ee",
            token[:half] + "\U000e01ee" + token[half:],
            "\ud800" + token,
        ]
    return out


# ------------------------------------------------------------------------------------------------- every template


@ALL
def test_hostile_text_adds_no_control_token(name):
    """I1, I3: whatever user, system, tool or demonstration text spells, only the template's own controls are there."""
    c = chat(name)
    text = "a " + " b ".join(hostile(c)) + " c"
    spoken = " ".join(h for h in hostile(c) if "think" not in h.translate({0xE01EE: None, 0xE01EF: None}).lower())

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
            c.turn("", [{"name": "look", "arguments": {"query": [t], "limit": {"a": t}}}]),  # LFM2.5 writes Python's repr
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
    reply = c.reply("continue", c.answer_stop_id)
    for other in c.stop_ids - {c.answer_stop_id}:  # such as the end of the whole text: the template's own end of the turn is missing
        assert c.reply("continue", other)[1:] == reply
    assert c.reply("continue", None)[1:] == reply and c.reply("continue", 1)[0] in c.tokenizer.added_tokens_decoder
    assert c.call_stop_id not in c.start_ids and c.answer_stop_id not in c.start_ids


@ALL
def test_turn_reads_back_as_the_same_calls(name):
    """I12, I15: what SFT teaches is what the parser reads; as text and as ids."""
    c = chat(name)
    for calls in [CALLS, TWO] if not c.shows_one_call else [CALLS]:
        turn = c.turn("", calls)
        assert turn[-1] in c.stop_ids and not set(turn[:-1]) & c.stop_ids and not set(turn) & c.start_ids
        assert parse_tool_calls(c.text(turn))[1:] == (calls, [])
    call = {"name": "look", "arguments": {"query": "a</think>b"}}
    assert parse_tool_calls(c.text(c.turn("", [call])))[1] == [call]  # DeepSeek's template cuts a text there
    content, calls, errors = parse_tool_calls(c.text(c.turn("It is 42.", [])))
    assert (calls, errors) == ([], []) and "It is 42." in content


@ALL
def test_clean_prompt_is_the_templates_own(name):
    """I2"""
    c = chat(name)
    talk = [*user("Hello there"), {"role": "assistant", "content": "And you?"}, *user("Fine.")]
    for messages in (user("Hello there"), [{"role": "system", "content": "Be brief."}, *user("Hi")], talk, [{"role": "system", "content": "x"}, *talk]):
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
        pytest.param("gptoss", "<|call|>", "<|return|>", set(), marks=dialects),
        pytest.param("gemma4", "<|tool_response>", "<turn|>", {"<|turn>"}, marks=dialects),
        ("llama", "<|eot_id|>", "<|eot_id|>", {"<|start_header_id|>"}),
        ("gemma", "<end_of_turn>", "<end_of_turn>", {"<start_of_turn>"}),
        ("real:qwen3", "<|im_end|>", "<|im_end|>", {"<|im_start|>"}),
        pytest.param("real:glm4moe", "<|observation|>", "<|user|>", {"<|assistant|>"}, marks=dialects),
        pytest.param("real:gptoss", "<|call|>", "<|return|>", set(), marks=dialects),
        pytest.param("real:gemma4_v5", "<|tool_response>", "<turn|>", {"<|turn>"}, marks=dialects),
        ("real:phi3", "<|end|>", "<|end|>", {"<|user|>", "<|assistant|>"}),
        ("real:deepseekv3", "<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>", {"<｜User｜>", "<｜Assistant｜>"}),
    ],
)
def test_stops_and_starts(name, call_stop, answer_stop, starts):
    c = chat(name)
    token = c.tokenizer.convert_ids_to_tokens
    assert (token(c.call_stop_id), token(c.answer_stop_id)) == (call_stop, answer_stop)
    assert set(token(list(c.start_ids))) == starts
    assert {call_stop, answer_stop, "<|endoftext|>"} == set(token(list(c.stop_ids)))


def test_generation_config_adds_stops():
    for eos, more in ((None, set()), (7, {7}), ([7, 8], {7, 8}), ((7, 8), {7, 8})):
        c = Chat(small("hermes"), TOOLS, SimpleNamespace(eos_token_id=eos))
        assert c.stop_ids == chat("hermes").stop_ids | more
    # What opens a message ends the turn where generation_config says so (Phi-3). It is not malformed.
    [start] = chat("hermes").start_ids
    c = Chat(small("hermes"), TOOLS, SimpleNamespace(eos_token_id=[start]))
    assert start in c.stop_ids and not c.start_ids


@dialects
def test_native_or_told_in_text():
    assert {n for n in TEMPLATES if not chat(n).native_tools} == {"chatml", "gemma"}
    assert {n for n in TEMPLATES if chat(n).shows_one_call} == {"llama", "gptoss"}  # where calls are text there is room for several
    c = chat("gemma")  # no system role either
    text = c.tokenizer.decode(c.prompt([{"role": "system", "content": "Be brief."}, *user("Hi")]))
    assert text.startswith("<start_of_turn>user\nBe brief.\n\nYou can call") and text.endswith(
        "</tool_response>.\n\nHi<end_of_turn>\n<start_of_turn>model\n"
    )
    assert c.tokenizer.convert_tokens_to_ids("<tool_call>") not in c.prompt(user("Hi"))  # plain text
    bare = Chat(small("gemma"), [])
    assert bare.tokenizer.decode(bare.prompt([{"role": "system", "content": "Be brief."}, *user("Hi")])).startswith("<start_of_turn>user\nBe brief.\n\nHi<end_of_turn>")
    c = chat("chatml")  # its system message stays one, and a conversation is told the tools at its start
    assert c.text(c.turn("", CALLS)).startswith("<tool_call>") and c.text(c.turn("Hm.", CALLS)).startswith("Hm.\n<tool_call>")
    assert '"gr\u00f6\u00dfe"' in c.text(c.turn("", [{"name": "look", "arguments": {"query": "gr\u00f6\u00dfe"}}]))  # as the model reads and writes it
    told = {"type": "function", "function": {**TOOLS[0]["function"], "description": "gr\u00f6\u00dfe"}}
    assert "gr\u00f6\u00dfe" in c.tokenizer.decode(Chat(small("chatml"), [told]).prompt(user("Hi")))
    talk = [{"role": "system", "content": "Be brief."}, *user("Hi"), {"role": "assistant", "content": "Yes?"}, *user("Go on.")]
    text = c.tokenizer.decode(c.prompt(talk))
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nYou can call") and text.index("Look something up.") < text.index("Hi<|im_end|>")


NAME, JSON = "{{ c.function.name }}", "{{ c.function.arguments | tojson }}"
COMMA = "{{ ', ' if not loop.last }}"
PAIRS = "{% for k, v in c.function.arguments.items() %}"


@dialects
@pytest.mark.parametrize("before, call, after, native", [
    ("", f"[TOOL_CALLS]{NAME}[ARGS]{JSON}", "", True),  # Mistral
    ("[TOOL_CALLS][", "{{ c.function | tojson }}" + COMMA, "]", True),
    ("<|tool_call|>[", "{{ c.function | tojson }}" + COMMA, "]<|/tool_call|>", True),  # Phi-4, Granite 3
    ("<tool_calls>[", "{{ c.function | tojson }}" + COMMA, "]</tool_calls>", True),  # Hunyuan
    ("<minimax:tool_call>\n", f'<invoke name="{NAME}">\n{PAIRS}<parameter name="{{{{ k }}}}">{{{{ v }}}}</parameter>\n{{% endfor %}}</invoke>\n', "</minimax:tool_call>", True),
    ("<|calls|>", f"<|call|>functions.{NAME}:{{{{ loop.index0 }}}}<|argument|>{JSON}<|call_end|>", "<|calls_end|>", False),  # Kimi
    ("<|calls|>", f"<|call|>{NAME}<|sep|>{JSON}<|call_end|>", "<|calls_end|>", False),  # DeepSeek
    ("<function_calls>", f"{NAME}({PAIRS}{{{{ k }}}}={{{{ v | tojson }}}}{COMMA}{{% endfor %}})\n", "</function_calls>", False)])  # OLMo 3
def test_a_template_whose_calls_we_cannot_read_is_told_its_tools_in_text(before, call, after, native, monkeypatch):
    """Not taken for native: nothing that such a model calls would ever be run."""
    shown = f"{{% if m.tool_calls %}}{before}{{% for c in m.tool_calls %}}{call}{{% endfor %}}{after}{{% endif %}}<|im_end|>"
    monkeypatch.setitem(TEMPLATES, "other", TEMPLATES["hermes"][:TEMPLATES["hermes"].index("{% for m in")] + CHATML.replace("<|im_end|>", shown))
    c = Chat(small.__wrapped__("other"), TOOLS)
    assert c.native_tools == native
    ids = c.turn("", TWO)
    assert parse_tool_calls(c.text(ids), c.tools)[1:] == (TWO, [])
    assert ("tool_response" in c.tokenizer.decode(c.prompt(user("Hi")))) != native


@dialects
def test_a_prompt_that_opens_a_thought_leaves_the_tools_native():
    """QwQ-32B: "<think>" of the prompt and "<tool_call>" of the turn begin alike, which cut the call's tag in two."""
    tok = small.__wrapped__("hermes")
    tok.chat_template = tok.chat_template.replace("\n<tool_call>", "<tool_call>").replace(
        "<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}")
    c = Chat(tok, TOOLS)
    assert c.native_tools and not c.shows_one_call
    assert c.text(c.turn("", CALLS)).startswith("</think>\n\n<tool_call>")
    assert c.tokenizer.decode(c.results(CALLS, ["r"], c.call_stop_id)).endswith("<|im_start|>assistant\n<think>\n")


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


@pytest.mark.parametrize("text", ["</think>", "</th\U000e01eeink>", "\U000e01ef</think\U000e01ee>"])
def test_a_call_told_in_text_ends_no_thought(text):
    """DeepSeek's, GLM's and Qwen3.5's templates cut a turn at this tag; sanitising's markers do not hide it."""
    c = chat("chatml")
    call = {"name": "look", "arguments": {"query": text}}
    written = c.text(c.turn("", [call]))
    assert "</think>" not in written and parse_tool_calls(written)[1] == [{"name": "look", "arguments": {"query": "</think>"}}]


def test_a_turn_that_ends_with_two_stop_tokens_is_sampled_up_to_the_first_and_goes_on_with_the_second(monkeypatch):
    monkeypatch.setitem(TEMPLATES, "twice", CHATML.replace("{{ m.content }}<|im_end|>", "{{ m.content }}<|im_end|>{{ '<|im_end|>' if m.role == 'assistant' }}"))
    c = Chat(small.__wrapped__("twice"), [])
    messages = [*user("Hi"), {"role": "assistant", "content": "Yes?"}, *user("Go on.")]
    ids = c.prompt(user("Hi")) + c.turn("Yes?", []) + c.reply("Go on.", c.answer_stop_id)
    assert ids == c.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False) and c.turn("Yes?", []).count(c.answer_stop_id) == 1


@dialects
def test_a_message_that_switches_the_first_prompt_alone_is_noted(capsys):
    """SmolLM3 with /no_think in its system message: the first turn's thought was closed, those of later turns were not."""
    tok = small.__wrapped__("hermes")
    end = "{% if add_generation_prompt %}<|im_start|>assistant\n"
    assert end in tok.chat_template
    tok.chat_template = tok.chat_template.replace(end, end + "{% if '/no_think' in messages[0].content %}<think>\n\n</think>\n{% endif %}")
    c = Chat(tok, TOOLS)
    c.prompt([{"role": "system", "content": "Be brief."}, *user("Hi" * 50)])
    assert not capsys.readouterr().out
    for _ in range(2):
        c.prompt([{"role": "system", "content": "Be brief. /no_think"}, *user("Hi")])
    [note] = capsys.readouterr().out.splitlines()
    assert note.startswith("note: the chat template") and note.endswith("set for all turns at the top of chat_template.jinja: {% set enable_thinking = false %}")


@ALL
def test_other_prompts_open_as_all_turns_do(name, capsys):
    c = chat(name)
    for messages in (user("Hello there."), [{"role": "system", "content": "Be brief."}, *user("x\n")]):
        c.prompt(messages)
    assert not capsys.readouterr().out


def test_turn_joins_the_generation_prompt():
    assert chat("opens").text(chat("opens").turn("Hi", [])) == "\n</think>\n\nHi"
    assert chat("thinking").text(chat("thinking").turn("Hi", [])) == "<think>\n\n</think>\n\nHi"
    assert chat("glm").text(chat("glm").turn("Hi", [])) == "\nHi"
    assert chat("hermes").text(chat("hermes").turn("\n\nHi", [])) == "\n\nHi"


@dialects
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


@dialects
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
    shown = text.encode("utf-8", "replace").decode().translate({0xE01EE: None, 0xE01EF: None})  # sanitising's markers
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
    assert c.text([c.answer_stop_id] * 2) == c.tokenizer.decode([c.answer_stop_id])


# --------------------------------------------------------------------------------------------------------- refusals


def test_refusals_are_one_line():
    tok = small("chatml")
    c = chat("hermes")
    evil_key = {
        "type": "function",
        "function": {
            "name": "f",
            "description": "",
            "parameters": {"type": "object", "properties": {"<|im_start|>": {"type": "string"}}},
        },
    }
    for message, make in {
        "control tokens": lambda: Chat(tok, [evil_key]),
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
    Chat(tok, TOOLS).prompt(user("Hi"))
    assert (tok.init_kwargs, tok.chat_control_tokens, tok.chat_template) == before
