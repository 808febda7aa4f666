"""Files that are whole or absent, and the checkpoints made of them.

checkpoints/step_NNNNNN is written beside its place, flushed to the disk, and renamed: whatever kills the process, what
stands there is whole. state.json, written last, holds the size and sha256 of all the other files.
"""
import hashlib
import json
import math
import os
import shutil
from pathlib import Path

from experiment.data import read_json, reading, whole
from experiment.errors import UserError


def finite(value):
    """Return the value as strict JSON holds it, so that our own reader takes what we write.

    Non-finite floats become None, tensor and numpy scalars numbers, lone surrogates "?".
    """
    if isinstance(value, dict):
        return {whole(str(key)): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    if isinstance(value, str):
        return whole(value)
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def to_json(value, indent=None):
    return json.dumps(finite(value), indent=indent, allow_nan=False) + "\n"


def replace_file(path, text):
    """Write a file whole or not at all."""
    temporary = path.with_name(f".tmp-{path.name}")
    try:
        temporary.write_text(text, encoding="utf-8", newline="\n")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def sync(path):
    """Flush a file or folder to the disk, so that a power cut after the rename finds what was renamed."""
    if os.name != "nt":
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def fingerprint(path):
    with open(path, "rb") as file:
        return {"bytes": os.path.getsize(path), "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def checkpoints(output_dir):
    """All checkpoints/step_NNNNNN, the newest last."""
    found = [path for path in Path(output_dir).glob("checkpoints/step_*") if path.name[5:].isdecimal()]
    return sorted(found, key=lambda path: int(path.name[5:]))


def newest_checkpoint(output_dir):
    """The checkpoints/step_NNNNNN of the highest step that has its state.json, or None."""
    return next((path for path in reversed(checkpoints(output_dir)) if (path / "state.json").exists()), None)


def read_state(checkpoint):
    """state.json as a dict, after comparing every file with the size and sha256 in it. UserError names the file."""
    path = Path(checkpoint) / "state.json"
    state = read_json(path)
    with reading(path):
        for name, expected in state["files"].items():
            with reading(Path(checkpoint) / name):
                found = fingerprint(Path(checkpoint) / name)
            if found != expected:
                what = f"{found['bytes']} bytes, state.json says {expected['bytes']}"
                what = "sha256 differs from state.json" if found["bytes"] == expected["bytes"] else what
                raise UserError(f"{checkpoint}/{name}: damaged ({what})")
    return state


def remove(path):
    """A folder goes at once, so that no half of it is ever taken for a checkpoint."""
    old = path.with_name(f".old-{path.name}")
    shutil.rmtree(old, ignore_errors=True)
    path.rename(old)
    shutil.rmtree(old)


def optimizer_tensors(optimizer, named_parameters):
    """Every state tensor (exp_avg, exp_avg_sq, step, ...) as {"parameter name|key": CPU tensor}, for `Run.save`.

    A plain number becomes a 0-dim tensor. CPU tensors are the optimizer's own, not copies, but for one that several
    parameters share (bitsandbytes' qmap), which safetensors refuses. The learning rate is left out: it is a function of
    the step.
    """
    import torch
    names, tensors, held = {p: name for name, p in named_parameters}, {}, set()
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        tensors[f"{names[p]}|"] = torch.empty(0)                            # known, though perhaps without a state yet
        for key, value in optimizer.state.get(p, {}).items():
            tensor = torch.as_tensor(value).detach().cpu().contiguous()
            tensors[f"{names[p]}|{key}"] = tensor.clone() if tensor.data_ptr() in held else tensor
            held.add(tensor.data_ptr())
    return tensors


def load_optimizer(optimizer, named_parameters, path):
    """Give each parameter the state saved under its name, in the saved dtype. Raises UserError naming a missing one."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file
    try:
        saved = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: not an optimizer file ({error})") from None
    names, states = {p: name for name, p in named_parameters}, {}
    here = {names[p]: (p, group) for group in optimizer.param_groups for p in group["params"]}
    for key, value in saved.items():
        name, _, key = key.rpartition("|")
        states.setdefault(name, {}).update({key: value} if key else {})
    for name in sorted(here.keys() ^ states.keys()):
        raise UserError(f"{path}: has no state for {name}" if name in here else f"{path}: {name} is not trained here")
    for name, (p, group) in here.items():
        for key, value in states[name].items():
            if "exp_avg" in key and value.shape != p.shape:
                raise UserError(f"{path}: {name} was {tuple(value.shape)}, here it is {tuple(p.shape)}")
            on_cpu = key == "step" and not (group.get("capturable") or group.get("fused"))       # as torch keeps it
            optimizer.state[p][key] = value if on_cpu else value.to(p.device)
