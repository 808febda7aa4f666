"""The optional layers, in one place: each name is core's, or what extras/ makes of it.

Delete the folder extras/, one folder in it, or a line below: core's own takes its place, with the
same signature, and every program runs and learns without that layer.
"""
import os
from pathlib import Path

from core.config import LayerFlags
from core.engine import make_engine
from core.loading import load_model
from core.run import Run
from envs.session import sessions

HERE = Path(__file__).with_name("extras")  # PyPI has a package of this name, too
if HERE.joinpath("isolate").is_dir():
    from extras.isolate import sessions  # noqa: F811
if HERE.joinpath("memory").is_dir():
    from extras.memory import MemoryFlags as LayerFlags  # noqa: F811
# These fill tables of core.
if HERE.joinpath("data").is_dir():
    import extras.data  # noqa: F401
if HERE.joinpath("exact").is_dir():
    import extras.exact  # noqa: F401
if HERE.joinpath("fast").is_dir():
    import extras.fast  # noqa: F401
if HERE.joinpath("ranks").is_dir() and os.environ.get("WORLD_SIZE", "1") != "1":
    import extras.ranks  # noqa: F401
if HERE.joinpath("models").is_dir():
    import extras.models.dialects  # noqa: F401

__all__ = ["LayerFlags", "Run", "load_model", "make_engine", "sessions"]
