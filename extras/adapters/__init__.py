"""Environments of other packages, and what TRL expects: --env gymnasium:FrozenLake-v1.

    gymnasium_text.py      games of Gymnasium whose actions are numbered
    reasoning_gym_text.py  the task families of Reasoning Gym
    verifiers_text.py      single-turn tasks of verifiers
    numbered.py            what the three share
    mcp_text.py            the tools of an MCP server, and tasks of a file

Importing this package fills envs.files.ADAPTERS. Environments that were written for TRL and
clients of OpenEnv need no adapter: the contract of envs/ is theirs.
"""
from core.config import UserError
from envs.files import ADAPTERS


def adapter(package: str, find):
    """Return make(name), which gives find() the name: find imports the package that it adapts."""
    def make(name: str) -> type:
        try:
            make_class = find()
        except ImportError as error:
            missing = (error.name or "").partition(".")[0]
            hint = f"; pip install -U {package}" if missing == package else ""
            raise UserError(f"environment '{package}:{name}': {error}{hint}") from None
        return make_class(name)
    return make


def gymnasium():
    from extras.adapters.gymnasium_text import make
    return make


def reasoning_gym():
    from extras.adapters.reasoning_gym_text import make
    return make


def verifiers():
    from extras.adapters.verifiers_text import make
    return make


def mcp():
    from extras.adapters.mcp_text import make
    return make


for find in (gymnasium, mcp, reasoning_gym, verifiers):
    ADAPTERS[find.__name__] = adapter(find.__name__, find)
