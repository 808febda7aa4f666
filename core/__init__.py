"""What every program imports, without any layer. Importing it checks the installation first."""
import os
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path


def check_installation():
    """Exit with one line if this system, Python or version of a package is not supported."""
    if os.name == "nt":
        sys.exit("native Windows is not supported; run this in WSL2")
    if sys.version_info < (3, 11):
        sys.exit(f"this is Python {sys.version.split()[0]}; 3.11 or later is needed")
    from packaging.requirements import Requirement
    path = Path(__file__).parents[1] / "requirements.txt"
    for line in path.read_text().splitlines() if path.exists() else ():
        needed = Requirement(line)
        with suppress(metadata.PackageNotFoundError):
            version = metadata.version(needed.name)
            if not needed.specifier.contains(version, prereleases=True):
                sys.exit(f"{needed.name} {version} is installed, and {needed} is needed; "
                         "pip install -r requirements.txt")


check_installation()
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
