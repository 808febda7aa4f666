"""Families of models beyond Hermes's markup and keys and values, and the probe at load.

    dialects.py      the tool calls and thoughts of a dozen families
    python_calls.py  those of the families that write Python: [f(x=1)]
    templates.py     chat templates that open a thought, or that a message switches
    states.py        the cache of models that keep states: Mamba, LFM2, Qwen3.5, Granite 4
    probe.py         a few tokens through three forward passes, which must agree

Importing it fills the five tables of core/tool_calls.py and two of core/chat.py. Without it such
calls are no calls, and a model whose template writes them is told its tools in text.
`make_engine` wraps core's: it gives such a model its cache, and refuses what would be decoded
wrongly.
"""
import core.engine
from core.config import UserError
from core.model import facts
from extras.models import dialects, templates  # noqa: F401

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
    options.setdefault("cache", cache_of(model))
    return make(model, tokens=tokens, **options)


def cache_of(model) -> type | None:
    """Return StateCache if transformers' own cache of this model holds states, else None."""
    from transformers.cache_utils import DynamicCache, LinearAttentionCacheLayerMixin
    layers = DynamicCache(config=model.config).layers
    if any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers):
        from extras.models.states import StateCache  # most models keep keys and values alone
        return StateCache
    return None
