"""Importing an environment, or a reward function, from a file of the user's."""
import importlib.util
import os
import sys
from functools import cache
from types import ModuleType

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
