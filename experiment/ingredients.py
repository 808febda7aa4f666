"""What a run is made of: the weights it starts from, its data files, the source of its environment.

A run is resumed only if these files are the same.
"""
import os

from experiment.checkpoint import newest_checkpoint
from experiment.data import read_json
from experiment.errors import UserError
from experiment.files import fingerprint

DATA_FLAGS = ("dataset", "eval_dataset", "trajectories")  # name files, separated by commas
MODEL_FILES = (".safetensors", ".bin", ".json", ".jinja", ".model")
NOT_THE_MODEL = ("optimizer.safetensors", "state.json", "result.json")
CACHED_FILES = ("config.json", "model.safetensors", "model.safetensors.index.json")
SAMPLE_ABOVE = 2**30  # bytes; of larger files only samples are hashed


def newest_start(config):
    """Return what the run starts from: model_path, or the newest checkpoint in it."""
    path = getattr(config, "model_path", None)
    if path and os.path.isdir(path):
        return str(newest_checkpoint(path) or path)
    return path


def ingredients(config, sources, base):
    """Return {label: fingerprint} of the files that a run depends on.

    Args:
        config: its dataset, eval_dataset, trajectories and model_path are read.
        sources: the paths of the files that define its environment.
        base: the folder of the tiny model that was made for the run, which may not exist.
    """
    values = [getattr(config, name, None) or "" for name in DATA_FLAGS]
    data = [path.strip() for path in ",".join(values).split(",")]
    files = {path: path for path in data if os.path.isfile(path)}
    # A source has the same label wherever the project lies.
    files |= {f"environment {os.path.basename(path)}": path for path in sources}
    files |= _model_files(newest_start(config))
    files |= {f"base/{os.path.basename(path)}": path for path in _files_in(base)}
    return {label: fingerprint(path, SAMPLE_ABOVE) for label, path in files.items()}


def _model_files(model):
    """Return {label: path} of a model's files, and for an adapter also of its base model's."""
    if not model or model == "tiny":
        return {}
    if not os.path.isdir(model):
        from huggingface_hub import try_to_load_from_cache
        try:
            found = [try_to_load_from_cache(model, name) for name in CACHED_FILES]
        except ValueError:  # not the form of a hub id
            return {}
        # The path of a cached file contains the revision.
        return {path: path for path in found if isinstance(path, str)}
    files = {path: path for path in _files_in(model)}
    try:
        base = read_json(os.path.join(model, "adapter_config.json"))["base_model_name_or_path"]
    except (UserError, KeyError):
        return files
    for folder in (base, os.path.join(model, str(base))):
        if isinstance(base, str) and base and os.path.isdir(folder):
            return files | _model_files(folder)
    return files


def _files_in(folder):
    """Return the paths of a model folder's files."""
    if not os.path.isdir(folder):
        return []
    names = [name for name in sorted(os.listdir(folder)) if name.endswith(MODEL_FILES)]
    paths = [os.path.join(folder, name) for name in names if name not in NOT_THE_MODEL]
    return [path for path in paths if os.path.isfile(path)]
