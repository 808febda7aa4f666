"""Which layers are there. It imports none, so that each may ask for another."""
from pathlib import Path


def has(layer: str) -> bool:
    """True if the folder of this layer is there."""
    return Path(__file__).with_name(layer).is_dir()
