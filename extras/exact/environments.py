"""The files that define a run's environments: a run is not resumed on others."""
import os
import sys
from contextlib import suppress
from modulefinder import ModuleFinder
from pathlib import Path

import envs
from core.config import UserError
from envs.files import FOLDERS, LIBRARY
from extras.presence import has


class Imports(ModuleFinder):
    """A ModuleFinder that skips a folder without __init__.py, where Python's own fails."""

    def find_module(self, name, path, parent=None):
        with suppress(AttributeError):
            return super().find_module(name, path, parent)
        raise ImportError(name)


def sources(config) -> list[str]:
    """Return the files of environments and rewards, and what they import from their folders."""
    paths = []
    modules = [envs.load(name).__module__ for name in envs.names_of(config.env)]
    if has("rewards"):
        # Most runs name no functions that pay.
        from extras.rewards import rewards_of
        rewards = rewards_of(config)
        if rewards:
            modules += rewards.modules
            paths += filter(None, [judge.path for judge in rewards.judges])
    for module_name in modules:
        # A class of a notebook has no file.
        if path := getattr(sys.modules[module_name], "__file__", None):
            finder = Imports([os.path.dirname(path)], excludes=LIBRARY)
            # The content of an environment may be a data file beside it.
            content = Path(path).with_suffix(".json")
            if content.exists():
                paths.append(str(content))
            # Where it follows `from . import name` to.
            finder.add_module("__main__").__path__ = finder.path
            finder.run_script(path)
            # What Python brings itself has no file.
            files = {name: m.__file__ for name, m in finder.modules.items() if m.__file__}
            for name, file in files.items():
                loaded = getattr(sys.modules.get(name), "__file__", None) or file
                if file != loaded and name != "__main__" and loaded.startswith(tuple(FOLDERS)):
                    raise UserError(f"{path} imports {file}, but {name} is {loaded}; rename one")
                paths.append(file)
    return paths


def data_of(config) -> list[str]:
    """Return the files that the environments read, with these options."""
    files = []
    for name in envs.names_of(config.env):
        cls = envs.with_options(envs.load(name), envs.options_of(config))
        files += getattr(cls, "_files", list)()
    return list(map(str, files))
