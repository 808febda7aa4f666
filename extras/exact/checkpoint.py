"""Checkpoints that are whole or absent: checkpoints/step_NNNNNN in an output folder.

A checkpoint is written beside its place, flushed to the disk, and renamed, so that whatever kills
the process, what stands in its place is whole. state.json is written last. It holds the size and
the sha256 of all other files, those of the files that the run began with, and a checksum of itself.
"""
import hashlib
import os
import shutil
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

from core.data import read_json, to_json
from core.config import reading, UserError
from core.model import base_of, checkpoints, newest
from core.run import KEPT, TEMPORARY, Run, write_whole
from extras.exact.environments import data_of, sources
from extras.exact.files import fingerprint, paths_in, sync

DATA_FLAGS = ("dataset", "eval_dataset", "tasks", "trajectories")  # files, separated by commas
MODEL_FILES = (".safetensors", ".bin", ".json", ".jinja", ".model")
NOT_THE_MODEL = ("optimizer.safetensors", "state.json", "result.json")
CACHED_FILES = ("config.json", "model.safetensors", "model.safetensors.index.json")
# Attributes of a run, which a resumed run takes from state.json.
RESTORED = (*Run.restored, "algorithm", "bad", "made_of", "scores")
SEAL = {"checksum", "files", "made_of"}  # what core alone does not write into state.json


# ---------------------------------------------------------------------------- writing and reading
def seal(folder):
    """Add the fingerprints of all other files to state.json, and flush all to the disk."""
    files, mode = {}, folder.stat().st_mode & 0o666
    for file in sorted(folder.rglob("*")):
        if file.is_file() and file.name != "state.json":
            # safetensors creates files that only their owner may read. Not every disk has modes.
            with suppress(PermissionError):
                file.chmod(mode)
            files[file.relative_to(folder).as_posix()] = fingerprint(file)
    state = {**read_json(folder / "state.json"), "files": files}
    write_whole(folder / "state.json", to_json({**state, "checksum": _checksum(state)}, indent=1))
    for path in (*folder.rglob("*"), folder):
        sync(path)


def _checksum(state):
    return hashlib.sha256(to_json(state).encode()).hexdigest()


def own_state(checkpoint) -> dict:
    """Return the content of state.json, or raise UserError if no run of ours wrote it.

    Without extras/exact core writes one that has no seal. A folder may have none: {}.
    """
    path = Path(checkpoint) / "state.json"
    if not path.exists():
        return {}
    state = read_json(path)
    is_cores = state.keys() >= {*Run.restored} and not state.keys() & SEAL
    if not is_cores and state.pop("checksum", None) != _checksum(state):
        raise UserError(f"{path}: damaged (its checksum differs), or of another program or a much "
                        "older version; renamed, the weights are loaded without any check")
    return state


def read_state(checkpoint) -> dict:
    """Return the content of state.json after verifying it and every file that it names.

    Raises UserError, which names the file that is damaged or missing.
    """
    state = own_state(checkpoint)
    for name, expected in state.get("files", {}).items():
        file = Path(checkpoint) / name
        with reading(file):
            if fingerprint(file) != expected:
                raise ValueError("damaged (size or sha256 differs from state.json)")
    return state


def prune(output_dir, scores):
    """Remove the run's old checkpoints. The last two and the one with the best score stay.

    `scores` is {step as text: success of held-out tasks, or None}.
    """
    ours = []
    for path in checkpoints(output_dir):
        # What no run of ours wrote is not removed.
        with suppress(UserError):
            own_state(path)
            ours.append(path)
    score_of = {path: scores.get(str(int(path.name[5:]))) for path in ours}
    evaluated = [path for path in ours if score_of[path] is not None]
    best = max(evaluated, key=score_of.get, default=None)
    for path in ours[:-KEPT]:
        if path != best:
            # Where this is killed or a file is in use, the next save removes what is left.
            shutil.rmtree(path.rename(path.with_name(TEMPORARY)), ignore_errors=True)


def check_room(output_dir, optimizer):
    """Raise UserError if the disk has no room for the checkpoints of a run.

    One holds the weights that train, and in float32 the two moments of AdamW.
    """
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    size = sum(p.numel() * (p.element_size() + 8) for p in weights)
    # The last ones, the best one, and one that is being written.
    count = max(KEPT + 2 - len(checkpoints(output_dir)), 1)
    needed, free = count * size, shutil.disk_usage(output_dir).free
    if needed > free:
        raise UserError(f"{output_dir}: {needed / 2**20:,.0f} MiB are needed for {count} "
                        f"checkpoints, and {free / 2**20:,.0f} MiB are free on this disk; make "
                        "room, or give another --output_dir")


# -------------------------------------------------------------------------- what a run is made of
def ingredients(run) -> dict:
    """Return {label: path} of the files that a run depends on.

    They are those of its model, its data and its environment, the program, and what was imported
    from the program's folder. The labels of models and source files say what a file is, and not
    where: folders may be moved.
    """
    config = run.config
    paths = _files_in(run.folder / "base", "base")
    # An environment may have left the folder from which paths go.
    at_start = partial(os.path.join, run.started)
    if config.model_path != "tiny":
        place = at_start(config.model_path)
        paths |= _model_files(place if os.path.isdir(place) else config.model_path)
    if teacher := getattr(config, "teacher", None):
        place = at_start(teacher)
        judges = _model_files(place if os.path.isdir(place) else teacher)
        paths |= {f"teacher {label}": path for label, path in judges.items()}
    for name in DATA_FLAGS:
        paths |= {path: at_start(path) for path in paths_in(getattr(config, name, None) or "")}
    if hasattr(config, "env"):
        paths |= {path: path for path in data_of(config)}
        code = sources(config)
        for path in code:
            place = os.path.relpath(path, os.path.dirname(code[0]))
            place = os.path.basename(path) if place.startswith("..") else place
            paths[f"environment {place}"] = path
    folder = os.path.dirname(run.program)
    for module in list(sys.modules.values()):
        path = at_start(getattr(module, "__file__", None) or "")
        if os.path.dirname(path) == folder:
            paths[f"program {os.path.basename(path)}"] = path
    return {label: path for label, path in paths.items() if os.path.isfile(path)}


def fingerprints(paths):
    """Return {label: fingerprint} of {label: path}."""
    return {label: fingerprint(path) for label, path in paths.items()}


def check_base(checkpoint, base):
    """Raise UserError if the base model of a checkpoint's adapter has been replaced.

    Args:
        checkpoint: the folder of an adapter. Only our checkpoints say what it was trained on.
        base: the folder or hub id of its base model, as it is now.
    """
    paths = _model_files(base)
    recorded = own_state(checkpoint).get("made_of", {})
    for label in recorded:
        is_weights = label.startswith("base/") and label.endswith(("/config.json", ".safetensors"))
        # Of a hub model only some files may be on this machine.
        if is_weights and (label in paths or os.path.isdir(base)):
            path = paths.get(label, label)
            if not os.path.exists(path) or fingerprint(path) != recorded[label]:
                raise UserError(f"{path}: is not the base model that the adapter {checkpoint} was "
                                "trained on; put that back")


def _model_files(model):
    """Return {label: path} of a model's files, and of those of an adapter and its base model."""
    if not os.path.isdir(model):
        from huggingface_hub import try_to_load_from_cache
        files = {}
        with suppress(ValueError):  # not the form of a hub id
            for name in CACHED_FILES:
                path = try_to_load_from_cache(model, name)
                if isinstance(path, str):
                    files[f"base/{name}"] = Path(path)
        return files
    folder = Path(newest(model))
    if not (folder / "adapter_config.json").exists():
        return _files_in(folder, "base")
    return _files_in(folder, "adapter") | _model_files(base_of(folder))


def _files_in(folder, kind):
    """Return {"KIND/name": path} of a model folder's files."""
    return {f"{kind}/{path.name}": path for path in sorted(Path(folder).glob("*"))
            if path.name.endswith(MODEL_FILES) and path.name not in NOT_THE_MODEL}
