"""Optional layers over core/. Each name here is one of core's, with the same signature.

Any folder can be deleted: what it gave is gone, and core's own takes its place.
"""
from pathlib import Path

from core.engine import make_engine
from core.loading import load_model
from core.run import Run

__all__ = ["Run", "load_model", "make_engine"]


def has(layer: str) -> bool:
    """True if the folder of this layer is there."""
    return Path(__file__).with_name(layer).is_dir()
