"""Resuming: what a run must have in common with the one it continues."""
from core.config import CODE, ONCE, UserError, convert, options, read_yaml
from core.data import read_json
from core.run import CONFIG, algorithm_of
from extras.exact.checkpoint import RESTORED, fingerprints, ingredients, read_state

# What a resumed run may change. The two that make an update may change together.
FREE = (*ONCE, "output_dir", "save_every", "eval_every", "gradient_checkpointing", "sampler",
        "record", "report_to", "show_every")
UPDATE = ("batch_size", "gradient_accumulation_steps")


def continue_run(run, checkpoint):
    """Check that the run in the folder can be continued, and print where it continues.

    Nothing is changed in the folder. If the run has finished, `run.finished` becomes its result.

    Args:
        run: its config, algorithm, folder and command are read. A `max_steps` of None becomes that
            of the run in the folder, and `made_of` what that began with.
        checkpoint: the newest checkpoint in the folder, or None.

    Raises UserError.
    """
    folder = run.folder
    algorithm = algorithm_of(folder)
    if not algorithm:
        print(f"{folder}: nothing to resume, a new run begins")
        return
    if algorithm != run.algorithm:
        raise UserError(f"{folder}: holds a {algorithm} run, not one of {run.algorithm}")
    is_longer = _compare(run)
    if (folder / "result.json").exists() and not is_longer:
        run.finished = read_json(folder / "result.json")
        print(f"{folder}: finished after {run.finished['steps']} steps; a larger --max_steps "
              "continues it")
    elif not checkpoint:
        start = " from the taught model in base/" if (folder / "base").exists() else ""
        print(f"{folder}: no step is saved, begins again{start}")
    else:
        state = _verified(checkpoint)
        run.made_of = state.get("made_of", {})
        if "files" in state:
            check_ingredients(run.made_of, ingredients(run))
            print(f"{folder}: continues after step {state['step']}")
        else:
            print(f"{folder}: continues after step {state['step']}; its checkpoint is not "
                  "verified, as it was written without extras/exact")


def _verified(checkpoint):
    """Return the state of a checkpoint to resume from, or raise UserError."""
    try:
        state = read_state(checkpoint)
    except UserError as error:
        raise UserError(f"{error}; rename {checkpoint.name}, and --resume continues from the "
                        "checkpoint before") from None
    for name in RESTORED:
        if "files" in state and state.get(name) is None:
            raise UserError(f"{checkpoint}: another version of the project wrote it ({name} is "
                            "missing); continue with that version, or begin anew from these "
                            "weights (--model_path) with another --output_dir")
    return state


def _compare(run):
    """Refuse other flags than the run began with. Returns True if it is to become longer."""
    config, path = run.config, run.folder / CONFIG
    flags = options(type(config))
    began = {name: convert(value, flags[name], f"{path}: {name}")
             for name, value in read_yaml(path).items() if name in flags and name not in FREE}
    if config.max_steps is None:
        config.max_steps = began.get("max_steps")
    values = vars(config)
    changed = {name: old for name, old in began.items() if old != values[name]}
    if _sequences(values) == _sequences(values | began):
        for name in UPDATE:
            changed.pop(name, None)
    is_longer = (config.max_steps or 0) > (began.get("max_steps") or 0)
    if is_longer:
        changed.pop("max_steps", None)
    if changed:
        differences = [f"--{name} is {values[name]!s:.200} and was {old!s:.200}"
                       for name, old in changed.items()]
        # The command names the code of this call.
        how = "" if changed.keys() & CODE else f"; continue with: {run.command}"
        raise UserError(f"{run.folder}: --resume continues the run as it began (max_steps may "
                        f"grow), but {', '.join(differences)}{how}")
    return is_longer


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
