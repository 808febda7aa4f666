"""Checkpoints that are whole or absent: checkpoints/step_NNNNNN in an output folder.

A checkpoint is written beside its place, flushed to the disk, and renamed, so that whatever kills
the process, what stands in its place is whole. state.json is written last. It holds the size and
the sha256 of all other files, and a checksum of itself.
"""
import hashlib
import shutil
from contextlib import suppress
from pathlib import Path

from experiment.data import read_json, reading
from experiment.errors import UserError
from experiment.files import fingerprint, replace_file, set_aside, sync, to_json


def checkpoints(output_dir):
    """Return the paths of all checkpoints/step_NNNNNN with a state.json, the newest last."""
    paths = [file.parent for file in Path(output_dir).glob("checkpoints/step_*/state.json")]
    numbered = [path for path in paths if path.name[5:].isdecimal()]
    return sorted(numbered, key=lambda path: int(path.name[5:]))


def newest_checkpoint(output_dir):
    """Return the path of the checkpoint with the highest step, or None."""
    return next(reversed(checkpoints(output_dir)), None)


# ---------------------------------------------------------------------------- writing and reading
def write_checkpoint(path, training, moments, state):
    """Write a checkpoint whole or not at all. What stands in its place is renamed.

    Args:
        path: checkpoints/step_NNNNNN.
        training: the `TrainingState`, whose weights and tokenizer are saved.
        moments: what `optimizer_tensors` returns of its optimizer.
        state: what state.json holds beside the fingerprints of these files.
    """
    from safetensors.torch import save_file
    temporary = path.with_name(".tmp-step")
    # A run that was killed while it wrote has left this folder.
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        training.save_weights(temporary)
        training.tokenizer.save_pretrained(temporary)
        save_file(moments, temporary / "optimizer.safetensors")
        _seal(temporary, state, path.parent.parent / "config.yaml")
        if path.exists():
            set_aside(path)
        temporary.rename(path)
        sync(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _seal(folder, state, file_with_mode):
    """Write state.json into a folder of files and flush everything to the disk."""
    files = {}
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            # safetensors creates files that only their owner may read.
            shutil.copymode(file_with_mode, file)
            files[file.relative_to(folder).as_posix()] = fingerprint(file)
    state = {**state, "files": files}
    replace_file(folder / "state.json", to_json({**state, "checksum": _checksum(state)}, indent=1))
    for path in (*folder.rglob("*"), folder):
        sync(path)


def _checksum(state):
    return hashlib.sha256(to_json(state).encode()).hexdigest()


def read_state(checkpoint):
    """Return the content of state.json after verifying it and every file of the checkpoint.

    Raises UserError, which names the file that is damaged or missing.
    """
    path = Path(checkpoint) / "state.json"
    state = read_json(path)
    if state.pop("checksum", None) != _checksum(state):
        raise UserError(f"{path}: damaged (its checksum differs)")
    for name, expected in state["files"].items():
        file = Path(checkpoint) / name
        with reading(file):
            if fingerprint(file) != expected:
                raise ValueError("damaged (size or sha256 differs from state.json)")
    return state


def prune(output_dir):
    """Remove the run's old checkpoints. The last two and the one with the best score stay."""
    scores = {}
    for path in checkpoints(output_dir):
        # What no run of ours wrote is not removed.
        with suppress(UserError, KeyError):
            scores[path] = read_json(path / "state.json")["score"]
    evaluated = [path for path in scores if scores[path] is not None]
    best = max(evaluated, key=scores.get, default=None)
    for path in list(scores)[:-2]:
        if path != best:
            shutil.rmtree(path)


# -------------------------------------------------------------------------------------- optimizer
def trained_parameters(optimizer):
    """Return the parameters of all groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def optimizer_tensors(optimizer):
    """Return the optimizer's state as {"number of the parameter|key": CPU tensor}.

    A plain number becomes a 0-dim tensor. The learning rate is left out: it is a function of the
    step.
    """
    import torch
    tensors = {}
    for number, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            tensor = torch.as_tensor(value).detach().cpu().contiguous()
            # Parameters may share the tensor of their step, and safetensors refuses shared ones.
            tensors[f"{number}|{key}"] = tensor if tensor.ndim else tensor.clone()
    return tensors


def load_optimizer(optimizer, path):
    """Give the optimizer the state that a file holds. Raises UserError."""
    from safetensors.torch import load_file
    states = {}
    with reading(path):
        for name, value in load_file(path).items():
            number, _, key = name.partition("|")
            states.setdefault(int(number), {})[key] = value
        optimizer.load_state_dict({**optimizer.state_dict(), "state": states})
