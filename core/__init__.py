"""What a plain run needs, and nothing else. Importing it checks the installation, before torch.

Here are also the errors that end a program with one line.
"""
import json
import os
import re
import sys
import warnings
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path

# Control characters but newline and tab, marks that reverse writing, and lone surrogates.
UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


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
# Torch 2.11 says on a GPU that the thread of its first backward pass had no context yet.
warnings.filterwarnings("ignore", "Attempting to run cuBLAS")


def __getattr__(name: str):
    """Import torch only for `from core import token_logprobs, save_model`."""
    if name == "token_logprobs":
        from core.logprobs import token_logprobs
        return token_logprobs
    if name == "save_model":
        from core.model import save_model
        return save_model
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# ------------------------------------------------------------------------------------------ errors
def printable(text: str) -> str:
    r"""Return the text with control characters spelled out, the escape character as \x1b.

    A terminal obeys escape sequences: OSC 52 overwrites the clipboard of the reader.
    """
    return UNPRINTABLE.sub(lambda match: repr(match[0])[1:-1], text.replace("\r\n", "\n"))


def first_line(error) -> str:
    """Return the first line of an exception's message, at most 200 characters of it."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


class Printable(BaseException):
    """An exception that `main` shows in one line. `code` is the exit status."""

    def __str__(self):
        return printable(str(self.args[0]))


class UserError(Printable, ValueError):
    """What the user can fix; the message says how."""

    code = 2


class EnvironmentFault(Printable, RuntimeError):
    """The code of an environment raised, did not return, or broke the contract.

    Inside a rollout it ends one episode, and the run if it happens too often.
    """

    code = 6


class Stop(Printable):
    """Ends a run early. It is no Exception: what catches the faults of a tool lets it pass."""

    def __init__(self, message, code):
        super().__init__(message, code)
        self.code = code


@contextmanager
def reading(path, line=None):
    """Turn every exception inside the block into a UserError that names the file and the line.

    A check inside the block raises ValueError with its reason alone. A UserError passes unchanged.
    """
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        line = line or getattr(error, "lineno", None)
        place = f"{path}:{line}" if line else path
        raise UserError(f"{place}: {_reason(error, path)}") from error


def _reason(error, path):
    """Return what is wrong with a file, for an exception that reading it raised."""
    if isinstance(error, KeyError):
        return f"no {error} in it"
    if isinstance(error, UnicodeDecodeError):
        return f"byte 0x{error.object[error.start]:02x} is not UTF-8; save the file as UTF-8"
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error.msg} at column {error.colno}"
    if type(error) is ValueError:
        return first_line(error)
    # Of another file, such as one of the hub's cache, the error itself says which.
    if getattr(error, "strerror", None) and error.filename in (None, str(path)):
        return error.strerror
    return f"cannot be read ({type(error).__name__}: {first_line(error)})"
