"""The optional layers, in one place: each name is core's, or what extras/ makes of it.

Delete the folder extras/, one folder in it, or a line below: core's own takes its place, with the
same signature, and every program runs and learns without that layer.
"""
from functools import partial
from pathlib import Path

from core.config import LayerFlags, episode_bar, terminal
from core.engine import make_engine, sampler_of
from core.run import Run
from envs import rewards_of
from envs.session import sessions
from lora import load_model


def has(layer: str) -> bool:
    """True if the folder of this layer is there. PyPI has a package "extras", too."""
    return Path(__file__).parent.joinpath("extras", layer).is_dir()


# A layer of Run is a subclass of core's; all together are one class.
parts = []
if has("show"):
    from extras.show.run import Run as Shown
    parts.append(Shown)
if has("exact"):
    from extras.exact.run import Run as Exact
    parts.append(Exact)
if has("ranks"):
    from extras.ranks import Run as Shared
    parts.append(Shared)
if parts:
    Run = type("Run", tuple(parts), {"__doc__": Run.__doc__})
if has("adapters"):
    import extras.adapters  # noqa: F401  fills envs.ADAPTERS
if has("sandbox"):
    import extras.sandbox  # noqa: F401  fills envs.ENVS and envs.TOOLS
if has("isolate"):
    from extras.isolate import sessions  # noqa: F811
if has("data"):
    import extras.data  # noqa: F401  fills tables of core/data.py and core/config.py
if has("rewards"):
    from extras.rewards import rewards_of  # noqa: F811
if has("serve"):
    from extras.serve import terminal  # noqa: F811
if has("show"):
    from extras.show.bars import episode_bar  # noqa: F811
if has("vllm"):
    from extras.vllm import sampler_of  # noqa: F811
if has("fast"):
    from extras.fast.loading import faster
    load_model = faster(load_model)
if has("memory"):
    from extras.memory import MemoryFlags as LayerFlags  # noqa: F811
    from extras.memory import lean
    load_model = lean(load_model)
if has("exact"):
    from extras.exact.loading import sealed
    load_model = sealed(load_model)
if has("models"):
    from extras.models import make_engine  # which also fills the tables of core/tool_calls.py
    from extras.models.probe import probed
    load_model = probed(load_model)
if has("fast"):
    from extras import fast
    make_engine = partial(fast.make_engine, make=make_engine)

__all__ = ["LayerFlags", "Run", "episode_bar", "load_model", "make_engine", "rewards_of",
           "sampler_of", "sessions", "terminal"]
