"""Resuming: what a run must have in common with the one it continues, and the way back to it."""
import os
from itertools import takewhile

from extras.exact.checkpoint import RESTORED, fingerprints, newest_checkpoint, read_state
from core.config import CODE, ONCE, UserError, convert, read_yaml
from core.data import read_json
from core.run import CONFIG, EPISODES, LOGS, algorithm_of
from extras.exact.output_folder import step_of

# What a resumed run may change. The two that make an update may change together.
FREE = (*ONCE, "output_dir", "save_every", "eval_every", "gradient_checkpointing", "sampler")
UPDATE = ("batch_size", "gradient_accumulation_steps")


def continue_run(folder, flags, paths):
    """Check that the run in an output folder can be continued, which changes nothing there.

    Args:
        folder: the OutputFolder.
        flags: the `options` of its config.
        paths: the `ingredients` of this call.

    Returns:
        (result, None, None) of a finished run, else (None, checkpoint, its state), where both
        are None if no step is saved. Raises UserError.
    """
    algorithm = algorithm_of(folder.path)
    if not algorithm:
        print(f"{folder.path}: nothing to resume, a new run begins")
        return None, None, None
    if algorithm != folder.algorithm:
        raise UserError(f"{folder.path}: holds a {algorithm} run, not one of {folder.algorithm}")
    longer = _compare(folder, flags)
    if (folder.path / "result.json").exists() and not longer:
        result = read_json(folder.path / "result.json")
        print(f"{folder.path}: finished after {result['steps']} steps; a larger --max_steps "
              "continues it")
        return result, None, None
    checkpoint = newest_checkpoint(folder.path)
    if not checkpoint:
        print(f"{folder.path}: no step is saved, begins again")
        return None, None, None
    try:
        state = read_state(checkpoint)
    except UserError as error:
        raise UserError(f"{error}; rename {checkpoint.name}, and --resume continues from the "
                        "checkpoint before") from None
    for name in RESTORED:
        if name not in state:
            raise UserError(f"{checkpoint}: another version of the project wrote it ({name} is "
                            "missing); continue with that version, or begin anew from these "
                            "weights (--model_path) with another --output_dir")
    check_ingredients(state["made_of"], paths)
    print(f"{folder.path}: continues after step {state['step']}")
    return None, checkpoint, state


def _compare(folder, flags):
    """Refuse other flags than the run began with. Returns True if it is to become longer.

    A `max_steps` of None in the folder's `values` becomes that of the run.
    """
    values, path = folder.values, folder.path / CONFIG
    began = {name: convert(value, flags[name], f"{path}: {name}")
             for _, name, value in read_yaml(path) if name in flags and name not in FREE}
    if values["max_steps"] is None:
        values["max_steps"] = began.get("max_steps")
    changed = {name: old for name, old in began.items() if old != values[name]}
    if _sequences(values) == _sequences(values | began):
        for name in UPDATE:
            changed.pop(name, None)
    longer = (values["max_steps"] or 0) > (began.get("max_steps") or 0)
    if longer:
        changed.pop("max_steps", None)
    if changed:
        differences = [f"--{name} is {values[name]!s:.200} and was {old!s:.200}"
                       for name, old in changed.items()]
        # The command names the code of this call.
        how = "" if changed.keys() & CODE else f"; continue with: {folder.command}"
        raise UserError(f"{folder.path}: --resume continues the run as it began (max_steps may "
                        f"grow), but {', '.join(differences)}{how}")
    return longer


def go_back(folder, state):
    """Take away what was written after the checkpoint, the newest one: result and log lines.

    `folder` is the path of the output folder, `state` that of the checkpoint, or None without one.
    """
    (folder / "result.json").unlink(missing_ok=True)
    sizes, step = (state["lines"], state["step"]) if state else ({}, 0)
    for name in LOGS:
        path, size = folder / name, sizes.get(name, 0)
        if not path.exists():
            continue
        if step and name == EPISODES:
            # The log may have been thinned since: the steps of its lines decide.
            with open(path, "rb") as file:
                size = sum(map(len, takewhile(lambda line: step_of(line) < step, file)))
        if path.stat().st_size > size:
            os.truncate(path, size)


def _sequences(values):
    """Return the sequences of an update where UPDATE decides it. In grpo it does not."""
    if "updates_per_step" in values:
        return None
    return values["batch_size"] * (values["gradient_accumulation_steps"] or 1)


def check_ingredients(recorded, paths):
    """Refuse to continue a run with other weights or data.

    Code that has changed is noted: a fault of an environment or a reward function that ended the
    run has to be fixed. `recorded` is what `fingerprints` returned when the run began.
    """
    now = fingerprints(paths)
    for label in sorted(recorded.keys() | now.keys()):
        if recorded.get(label) == now.get(label):
            continue
        if not label.startswith(("program ", "environment ")):
            raise UserError(f"{paths.get(label, label)}: is not the file this run began with; put "
                            "that back (a model of the hub has to be loaded here before), or begin "
                            "anew with another --output_dir (from its weights: --model_path)")
        # Which modules are imported may depend on the caller.
        if label in recorded and label in now:
            print(f"note: {label} is not the file this run began with: from here on it may learn "
                  "something else")
