"""Environments of other packages, and what TRL expects: --env gymnasium:FrozenLake-v1.

    gymnasium_text.py      games of Gymnasium whose actions are numbered
    reasoning_gym_text.py  the task families of Reasoning Gym
    verifiers_text.py      single-turn tasks of verifiers
    numbered.py            what the three share
    mcp_text.py            the tools of an MCP server, and tasks of a file

Importing this package fills envs.files.ADAPTERS. Environments that were written for TRL and
clients of OpenEnv need no adapter: the contract of envs/ is theirs.
"""
from contextlib import contextmanager

from core.config import UserError
from envs.files import ADAPTERS


@contextmanager
def installed(package: str, name: str):
    """Turn the ImportError of a package that is missing or too old into a UserError."""
    try:
        yield
    except ImportError as error:
        missing = (error.name or "").partition(".")[0]
        hint = f"; pip install -U {package}" if missing == package else ""
        raise UserError(f"environment '{package}:{name}': {error}{hint}") from None


def gymnasium(name: str) -> type:
    """Return the environment of a game of Gymnasium."""
    with installed("gymnasium", name):
        from extras.adapters.gymnasium_text import make
    return make(name)


def reasoning_gym(family: str) -> type:
    """Return the environment of a task family of Reasoning Gym."""
    with installed("reasoning_gym", family):
        from extras.adapters.reasoning_gym_text import make
    return make(family)


def verifiers(name: str) -> type:
    """Return the environment of a taskset of verifiers."""
    with installed("verifiers", name):
        from extras.adapters.verifiers_text import make
    return make(name)


def mcp(place: str) -> type:
    """Return the environment of an MCP server, of which this is the command or the address."""
    with installed("mcp", place):
        from extras.adapters.mcp_text import make
    return make(place)


ADAPTERS.update(gymnasium=gymnasium, mcp=mcp, reasoning_gym=reasoning_gym, verifiers=verifiers)
