"""Loading from checkpoints of ours: their files are whole, and their base model is the same."""
import os
from functools import wraps
from pathlib import Path

from core.model import base_of, is_adapter, newest
from extras.exact.checkpoint import check_base, read_state


def sealed(load_model):
    """Return this load_model, which verifies a checkpoint before it reads it."""
    @wraps(load_model)
    def load(path: str, **options):
        path = newest(path)
        if os.path.exists(Path(path, "state.json")):
            read_state(path)  # sizes and sha256
        if is_adapter(path):
            check_base(path, base_of(path))
        return load_model(path, **options)
    return load
