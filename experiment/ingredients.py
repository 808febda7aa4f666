"""What a run is made of: the weights it starts from, its data files, the source of its environment.

A run is resumed only if these files are the same.
"""
import os
from pathlib import Path

from experiment.checkpoint import newest_checkpoint
from experiment.data import read_json
from experiment.errors import UserError
from experiment.files import fingerprint

DATA_FLAGS = ("dataset", "tasks", "eval_dataset", "trajectories")  # name files, separated by commas
MODEL_FILES = (".safetensors", ".bin", ".json", ".jinja", ".model")
NOT_THE_MODEL = ("optimizer.safetensors", "state.json", "result.json")
CACHED_FILES = ("config.json", "model.safetensors", "model.safetensors.index.json")


def ingredients(config, sources, base):
    """Return {label: fingerprint} of the files that a run depends on.

    Args:
        config: its dataset, tasks, eval_dataset, trajectories and model_path are read.
        sources: the paths of the files that define its environment.
        base: the folder of the tiny model that was made for the run, which may not exist.
    """
    paths = _model_files(getattr(config, "model_path", None))
    for name in DATA_FLAGS:
        paths += (getattr(config, name, None) or "").split(",")
    files = {str(path).strip(): str(path).strip() for path in paths}
    # These have the same label wherever the project and the run lie.
    for path in sources:
        files[f"environment {os.path.basename(path)}"] = path
    for path in _files_in(base):
        files[f"base/{path.name}"] = path
    return {label: fingerprint(path) for label, path in files.items() if os.path.isfile(path)}


def _model_files(model):
    """Return the paths of a model's files, and for an adapter also of its base model's."""
    if not model or model == "tiny":
        return []
    if not os.path.isdir(model):
        from huggingface_hub import try_to_load_from_cache
        try:
            cached = [try_to_load_from_cache(model, name) for name in CACHED_FILES]
        except ValueError:  # not the form of a hub id
            return []
        # The path of a cached file contains the revision.
        return [path for path in cached if isinstance(path, str)]
    folder = newest_checkpoint(model) or Path(model)
    files = _files_in(folder)
    try:
        base = read_json(folder / "adapter_config.json")["base_model_name_or_path"]
        places = base, folder / base
    except (UserError, KeyError, TypeError):
        return files
    for path in places:
        if base and os.path.isdir(path):
            return files + _model_files(path)
    return files


def _files_in(folder):
    """Return the paths of a model folder's files."""
    paths = sorted(Path(folder).glob("*"))
    return [path for path in paths
            if path.name.endswith(MODEL_FILES) and path.name not in NOT_THE_MODEL]
