"""Tokenizers and chat templates to test with.

Small byte-level tokenizers whose templates are the awkward families in a few lines each, and the real templates of
.real/templates on the first merges of the Qwen tokenizer of .real/qwen. Tests that need those are skipped without them.
"""

import functools
import json
import re
import tempfile
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import get_json_schema

import layers  # noqa: F401  which reads the markup of these families where extras/models is there

ROOT = Path(__file__).parent.parent
EXTRAS = Path(__file__).resolve().parents[1] / "extras"
dialects = pytest.mark.skipif(not (EXTRAS / "models").is_dir(), reason="needs extras/models")
memory = pytest.mark.skipif(not (EXTRAS / "memory").is_dir(), reason="needs extras/memory")


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


MERGES = 4000  # of Qwen's 151,387: a model of this vocabulary is small, and such a file is read in a moment


@functools.cache
def qwen():
    """A folder with the Qwen tokenizer of .real/qwen, its vocabulary cut to the letters and the first merges."""
    data = json.loads((ROOT / ".real/qwen/tokenizer.json").read_text())
    model = data["model"]
    model["merges"] = model["merges"][:MERGES]
    kept = 256 + MERGES
    model["vocab"] = {token: i for token, i in model["vocab"].items() if i < kept}
    for i, token in enumerate(data["added_tokens"]):
        token["id"] = kept + i
    config = json.loads((ROOT / ".real/qwen/tokenizer_config.json").read_text())
    del config["added_tokens_decoder"]
    folder = tempfile.TemporaryDirectory()
    for name, content in (("tokenizer.json", data), ("tokenizer_config.json", config)):
        (Path(folder.name) / name).write_text(json.dumps(content))
    return folder


@functools.cache
def real(name):
    """A template of another model on the Qwen tokenizer, its control tokens added; or SmolLM2's own tokenizer."""
    folder = ROOT / (".real/smollm2" if name == "smollm2" else ".real/qwen")
    if not folder.exists():
        pytest.skip(f"needs {folder.name} and .real/templates (shared/real)")
    if name == "smollm2":
        return AutoTokenizer.from_pretrained(folder)
    tok = AutoTokenizer.from_pretrained(qwen().name)
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
# Their prompt opens a thought that their turns write in other tokens, or not at all.
SEAMED = ("deepseek", "nemotron", "qwen3_5_think", "qwen3_6", "qwen3_8")
# Later versions of templates that are here as well, or those of the same family's other sizes: `pytest -m slow`.
AGAIN = ("_v2", "_v3", "_v4", "_vl", "_super", "_ultra", "_lightning", "_2507", "llama3_1", "llama3_2", "phi3_5", "diffusion_gemma")
ALL = pytest.mark.parametrize("name", [pytest.param(name, marks=[
    *[dialects] * name.removeprefix("real:").startswith(SEAMED), *[pytest.mark.slow] * name.endswith(AGAIN)]) for name in NAMES])
