"""What every program imports, without any layer. Importing it sets how torch's threads wait."""
import os

# Torch's threads wait for each other by spinning, 300,000 rounds by default. Where another busy
# process holds the core of one of them, the others waste theirs: bench/beside.py.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")


def __getattr__(name: str):
    """Import torch only for `from core import token_logprobs, save_model`."""
    if name == "token_logprobs":
        from core.logprobs import token_logprobs
        return token_logprobs
    if name == "save_model":
        from core.model import save_model
        return save_model
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
