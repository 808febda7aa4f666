"""Families of models beyond Hermes's markup and keys and values, and the probe at load.

    dialects.py      the tool calls and thoughts of a dozen families
    python_calls.py  those of the families that write Python: [f(x=1)]
    states.py        the cache of models that keep states: Mamba, LFM2, Qwen3.5, Granite 4
    probe.py         a few tokens through three forward passes, which must agree

Importing it fills the five tables of core/tool_calls.py. Without it such calls are no calls, and a
model whose template writes them is told its tools in text.
`make_engine` wraps core's: it gives such a model its cache, and refuses one that the probe has
found to decode wrongly.
"""
import core.engine
from core.config import UserError
from core.model import facts
from extras.models import dialects  # noqa: F401
from extras.models.states import StateCache, keeps_states

__all__ = ["make_engine"]


def make_engine(model, *, make=core.engine.make_engine, **options):
    """Return the engine of `make` (core's, or another layer's) with the cache that the model needs.

    Raises UserError for a model that the probe at load has found to decode wrongly.
    """
    if facts(model).refuses_engine:
        raise UserError(facts(model).refuses_engine)
    if keeps_states(model):
        options.setdefault("cache", StateCache)
    return make(model, **options)
