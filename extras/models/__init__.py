"""Families of models beyond Hermes's markup and keys and values, and the probe at load.

    dialects.py      the tool calls and thoughts of a dozen families
    python_calls.py  those of the families that write Python: [f(x=1)]
    states.py        the cache of models that keep states: Mamba, LFM2, Qwen3.5, Granite 4
    probe.py         a few tokens through three forward passes, which must agree

Importing it fills the five tables of core/tool_calls.py. Without it such calls are no calls, and a
model whose template writes them is told its tools in text. It also notes what switches a first turn
alone.
`make_engine` wraps core's: it gives such a model its cache, and refuses what would be decoded
wrongly.
"""
import core.chat
import core.engine
from core.config import UserError, say_once
from core.model import facts
from extras.models import dialects  # noqa: F401
from extras.models.states import StateCache, keeps_states

__all__ = ["make_engine"]


def make_engine(model, *, tokens: int, make=core.engine.make_engine, **options):
    """Return the engine of `make` (core's, or another layer's) with the cache that the model needs.

    Raises UserError for a model that the probe at load has found to decode wrongly, and for rows
    that outgrow the original positions of longrope or dynamic RoPE: their cached keys would be
    another encoding.
    """
    if facts(model).refuses_engine:
        raise UserError(facts(model).refuses_engine)
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    longest = getattr(config, "max_position_embeddings", tokens)
    limit = rope.get("original_max_position_embeddings", longest)
    if rope.get("rope_type") in ("longrope", "dynamic") and tokens > limit:
        raise UserError(f"--max_tokens {tokens}: give at most {limit}; beyond, this model "
                        f"({rope['rope_type']} RoPE) encodes all positions of a text anew")
    if keeps_states(model):
        options.setdefault("cache", StateCache)
    return make(model, tokens=tokens, **options)


def note_switch(chat, prompt: str):
    """Say so if this first prompt opens its turn in another way than later turns are opened.

    SmolLM3's and Nemotron's templates obey /no_think in a message. The prompts of later turns are
    cut out of a conversation that does not say it.
    """
    if not prompt.endswith(chat.opening):
        name = chat.tokenizer.name_or_path or "this tokenizer"
        say_once(f"note: the chat template of {name} opens the first turn in another way than "
                 f"those after it, {chat.opening.strip()!r}; what its messages switch, such as "
                 "/no_think, set for all turns at the top of chat_template.jinja: "
                 "{% set enable_thinking = false %}")


core.chat.FIRST_PROMPT.append(note_switch)
