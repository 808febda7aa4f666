"""Checkpoints that are whole or absent: checkpoints/step_NNNNNN in an output folder.

A checkpoint is written beside its place, flushed to the disk, and renamed, so that whatever kills
the process, what stands in its place is whole. state.json is written last. It holds the size and
the sha256 of all other files, and a checksum of itself.
"""
import hashlib
import shutil
from pathlib import Path

from experiment.data import read_json, reading
from experiment.errors import UserError
from experiment.files import fingerprint, replace_file, sync, to_json

MAX_COPY = 2**28  # bytes of a copy that lets a step be undone


def checkpoints(output_dir):
    """Return the paths of all checkpoints/step_NNNNNN, the newest last."""
    folders = Path(output_dir).glob("checkpoints/step_*")
    numbered = [path for path in folders if path.name[5:].isdecimal()]
    return sorted(numbered, key=lambda path: int(path.name[5:]))


def newest_checkpoint(output_dir):
    """Return the path of the checkpoint with the highest step that has a state.json, or None."""
    for path in reversed(checkpoints(output_dir)):
        if (path / "state.json").exists():
            return path
    return None


# ---------------------------------------------------------------------------- writing and reading
def write_checkpoint(path, save_model, tokenizer, optimizer, state):
    """Write a checkpoint whole or not at all.

    Args:
        path: checkpoints/step_NNNNNN; a checkpoint that is there is replaced.
        save_model: writes the weights into the folder it is given.
        tokenizer: is saved beside them, unless it is None.
        optimizer: what `optimizer_tensors` returns, or None.
        state: what state.json holds beside the fingerprints of these files.
    """
    temporary = path.with_name(f".tmp-{path.name}")
    replaced = path.with_name(f".was-{path.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        save_model(temporary)
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)
        if optimizer is not None:
            from safetensors.torch import save_file
            save_file(optimizer, temporary / "optimizer.safetensors")
        _seal(temporary, state, path.parent.parent / "config.yaml")
        if path.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            path.rename(replaced if (path / "state.json").exists() else _free_name(path))
        temporary.rename(path)
        sync(path.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _free_name(path):
    """Return a name beside the path for a folder that no run of ours has written."""
    number = 1
    while path.with_name(f"kept_{number}_{path.name}").exists():
        number += 1
    return path.with_name(f"kept_{number}_{path.name}")


def _seal(folder, state, file_with_mode):
    """Write state.json into a folder of files and flush everything to the disk."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    for file in files:
        # safetensors creates files that only their owner may read.
        shutil.copymode(file_with_mode, file)
        sync(file)
    names = [file.relative_to(folder).as_posix() for file in files]
    state = {**state, "files": {name: fingerprint(folder / name) for name in names}}
    replace_file(folder / "state.json", to_json({**state, "checksum": _checksum(state)}, indent=1))
    for path in {folder / "state.json", folder, *(file.parent for file in files)}:
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
    with reading(path):
        for name, expected in state["files"].items():
            _verify(Path(checkpoint) / name, expected)
    return state


def _verify(path, expected):
    with reading(path):
        actual = fingerprint(path)
    if actual["bytes"] != expected["bytes"]:
        sizes = f"{actual['bytes']} bytes, state.json says {expected['bytes']}"
        raise UserError(f"{path}: damaged ({sizes})")
    if actual != expected:
        raise UserError(f"{path}: damaged (sha256 differs from state.json)")


# --------------------------------------------------------------------------------------- removing
def prune(output_dir, keep):
    """Remove old checkpoints. The last two, the one with the best score and `keep` stay."""
    scores = {}
    for path in checkpoints(output_dir):
        try:
            scores[path] = read_json(path / "state.json")["score"]
        except (UserError, KeyError):
            # What no run of ours wrote is not removed.
            continue
    evaluated = [path for path in scores if scores[path] is not None]
    best = max(evaluated, key=scores.get, default=None)
    for path in list(scores)[:-2]:
        if path not in (best, keep):
            remove(path)


def remove(path):
    """Remove a folder so that no half of it is ever taken for a checkpoint."""
    renamed = path.with_name(f".old-{path.name}")
    shutil.rmtree(renamed, ignore_errors=True)
    path.rename(renamed)
    shutil.rmtree(renamed)


# -------------------------------------------------------------------------------------- optimizer
def optimizer_tensors(optimizer, named_parameters):
    """Return every tensor of the optimizer's state as {"parameter name|key": CPU tensor}.

    A plain number becomes a 0-dim tensor. A tensor that several parameters share is copied, because
    safetensors refuses it. The learning rate is left out: it is a function of the step.
    """
    import torch
    names = {p: name for name, p in named_parameters}
    tensors, seen = {}, set()
    for p in _trained(optimizer):
        # The empty tensor says that the parameter is known, though perhaps without a state yet.
        tensors[f"{names[p]}|"] = torch.empty(0)
        for key, value in optimizer.state.get(p, {}).items():
            tensor = torch.as_tensor(value).detach().cpu().contiguous()
            tensors[f"{names[p]}|{key}"] = tensor.clone() if tensor.data_ptr() in seen else tensor
            seen.add(tensor.data_ptr())
    return tensors


def _trained(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def load_optimizer(optimizer, named_parameters, path):
    """Give each parameter the state saved under its name, in the saved dtype.

    Raises UserError for a file that is damaged or belongs to other parameters.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file
    try:
        saved = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: not an optimizer file ({error})") from None
    states = {}
    for key, value in saved.items():
        name, _, key = key.rpartition("|")
        states.setdefault(name, {})
        if key:
            states[name][key] = value
    names = {p: name for name, p in named_parameters}
    parameters = {names[p]: p for p in _trained(optimizer)}
    for name in sorted(parameters.keys() ^ states.keys()):
        if name in parameters:
            raise UserError(f"{path}: has no state for {name}")
        raise UserError(f"{path}: {name} is not trained here")
    for group in optimizer.param_groups:
        on_device = group.get("capturable") or group.get("fused")
        for p in group["params"]:
            for key, value in states[names[p]].items():
                if "exp_avg" in key and value.shape != p.shape:
                    shapes = f"was {tuple(value.shape)}, here it is {tuple(p.shape)}"
                    raise UserError(f"{path}: {names[p]} {shapes}")
                # torch keeps the step number on the CPU, except for these two kinds of AdamW.
                stays = key == "step" and not on_device
                optimizer.state[p][key] = value if stays else value.to(p.device)


def copy_of_state(optimizer):
    """Return a copy of the weights that train and of their state, or None if it is large."""
    import torch
    parameters = _trained(optimizer)
    # AdamW has two moments for each weight.
    if 3 * sum(p.numel() * p.element_size() for p in parameters) > MAX_COPY:
        return None
    copies = []
    for p in parameters:
        state = optimizer.state.get(p, {})
        tensors = {key: torch.as_tensor(value).clone() for key, value in state.items()}
        copies.append((p, p.detach().clone(), tensors))
    return copies


def put_back(optimizer, copies):
    """Give the weights and the optimizer's state the values that `copy_of_state` returned."""
    for p, weights, state in copies:
        p.data.copy_(weights)
        for key in list(optimizer.state.get(p, {})):
            if key not in state:
                del optimizer.state[p][key]
            else:
                optimizer.state[p][key].copy_(state[key])
