"""The optional layers, in one place: each name is core's, or what extras/ makes of it.

Delete the folder extras/, one folder in it, or a line below: core's own takes its place, with the
same signature, and every program runs and learns without that layer.
"""
from pathlib import Path

from core.engine import make_engine
from core.loading import load_model
from core.run import Run
from envs.session import sessions

# PyPI has a package "extras", too.
if Path(__file__).parent.joinpath("extras/isolate").is_dir():
    from extras.isolate import sessions  # noqa: F811
if Path(__file__).parent.joinpath("extras/models").is_dir():
    import extras.models.dialects  # noqa: F401  fills the tables of core/tool_calls.py

__all__ = ["Run", "load_model", "make_engine", "sessions"]
