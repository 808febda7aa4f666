"""The optional layers, in one place: each name is core's, or what extras/ makes of it.

Delete the folder extras/, one folder in it, or a line below: core's own takes its place, with the
same signature, and every program runs and learns without that layer.
"""
from pathlib import Path

from core.config import episode_bar, terminal
from core.engine import make_engine, sampler_of
from core.loading import load_model
from core.run import Run
from envs import rewards_of
from envs.session import sessions

# PyPI has a package "extras", too.
if Path(__file__).parent.joinpath("extras").is_dir():
    from extras.isolate import sessions  # noqa: F811
    from extras.rewards import rewards_of  # noqa: F811
    from extras.serve import terminal  # noqa: F811
    from extras.show.bars import episode_bar  # noqa: F811
    from extras.vllm import sampler_of  # noqa: F811
    import extras.models.dialects  # noqa: F401  fills the tables of core/tool_calls.py

__all__ = ["Run", "episode_bar", "load_model", "make_engine", "rewards_of", "sampler_of",
           "sessions", "terminal"]
