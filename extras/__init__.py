"""Optional layers over core/. Any folder can be deleted: core's own then takes its place."""
from pathlib import Path


def has(layer: str) -> bool:
    """True if the folder of this layer is there."""
    return Path(__file__).with_name(layer).is_dir()
