"""Importing environments and reward functions of the user's, and environments of other packages."""
import importlib.util
import os
import sys
from functools import cache
from types import ModuleType

from core.config import UserError, nearest

# --env PACKAGE:NAME, as {package: make(name) -> class}. extras/adapters fills it.
ADAPTERS = {}
# The layer without which an environment is not there.
NEEDED = {"code": "sandbox", "gymnasium": "adapters", "mcp": "adapters",
          "reasoning_gym": "adapters", "verifiers": "adapters"}
LIBRARY = ("agent", "core", "envs", "episodes", "extras", "layers", "llm", "lora",
           "schooling")  # not the user's
# What a relative path names is decided once: an environment may change the current folder.
absolute = cache(os.path.abspath)
FOLDERS = []  # of the files that were imported, whose neighbours they may import


@cache
def import_file(path: str):
    """Import a file once per process. It may import its neighbours."""
    spec = importlib.util.spec_from_file_location(path, path)
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up there, and `from . import name` its package.
    sys.modules[path] = module
    folder = os.path.dirname(path)
    package = ModuleType(spec.parent)
    package.__path__ = [folder]
    # For `from . import name` Python also imports what stands before the first dot.
    sys.modules[spec.parent] = sys.modules[path.partition(".")[0]] = package
    FOLDERS.append(os.path.join(folder, ""))
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    finally:
        # A method may import a neighbour later. It comes last: other files do not mean it.
        sys.path.remove(folder)
        sys.path.append(folder)
    return module


def class_of(name: str, registered) -> type:
    """Return the class of an environment that is none of the registered names."""
    place, colon, class_name = name.rpartition(":")
    package, _, its_name = name.partition(":")
    if package in NEEDED and package not in ADAPTERS:
        raise UserError(f"--env {name} needs extras/{NEEDED[package]}")
    if not colon:
        known = f"known: {', '.join(registered)}, or give path/to/file.py:ClassName"
        hint = nearest(name, registered, otherwise=known)
        raise UserError(f"unknown environment {name!r}; {hint}")
    if package in ADAPTERS:
        return ADAPTERS[package](its_name)
    cls = getattr(module_at(place, f"environment {name!r}"), class_name, None)
    if not isinstance(cls, type) or not callable(getattr(cls, "reset", None)):
        raise UserError(f"environment {name!r}: {place} has no class {class_name} with reset(); a "
                        "class of a notebook or function is found in a file: --env "
                        "path/to/file.py:ClassName")
    return cls


def module_at(place: str, wanted: str):
    """Import a module, or a file that ends in .py. `wanted` opens the message of a UserError."""
    try:
        if place.endswith(".py"):
            return import_file(absolute(place))
        return importlib.import_module(place)
    except (OSError, ImportError, SyntaxError, AttributeError) as error:
        package = (getattr(error, "name", None) or "").partition(".")[0]
        if isinstance(error, AttributeError):
            package = getattr(error.obj, "__name__", None)
            if package not in LIBRARY:
                raise
        hint = f"; {package} is a package of this project: rename yours"
        raise UserError(f"{wanted}: {error}{hint if package in LIBRARY else ''}") from None
