"""What a run prints before and after its steps: notes, the held-out table, what to do next."""
import shlex

COLUMNS = ("success", "reward", "actions", "structure", "completion", "truncated",
           "tool_errors")
KEPT_FLAGS = ("env", "tasks", "eval_dataset", "env_options", "dtype")  # of the run, for the next


def print_table(before, after, steps, seconds):
    """Print the held-out metrics before and after training; what was not evaluated is left out."""
    rows = [("before", before), (f"after {steps} steps, {seconds:.0f} s", after)]
    rows = [(label, metrics) for label, metrics in rows if "success" in metrics]
    if not rows:
        return
    print(f"\n{'held-out tasks: ' + str(rows[0][1]['episodes']):26}"
          + "".join(f"{name:>12}" for name in COLUMNS))
    for label, metrics in rows:
        print(f"{label:26}" + "".join(f"{metrics[name]:12.3f}" for name in COLUMNS))


def next_command(program, config, *words):
    """Return the command that continues from a run with `program`, with the flags it needs."""
    words = ["python", program, "--model_path", config.output_dir, *words]
    learns_from = [getattr(config, name, None) for name in ("dataset", "trajectories")]
    for name in KEPT_FLAGS:
        value = getattr(config, name, None)
        # What is held out of other data is no file of tasks.
        if name == "eval_dataset" and set(learns_from) - {None, config.tasks}:
            continue
        if value not in (None, getattr(type(config), name, None)):
            words += [f"--{name}", str(value)]
    return shlex.join(words)


def first_notes(metrics, config, model):
    """Return notes on what the model was not made for: so many tokens, short turns, or tools.

    `metrics` are those of the untrained policy's held-out episodes, {} if there are none.
    """
    notes = []
    positions = getattr(model.config, "max_position_embeddings", None) or config.max_tokens
    if config.max_tokens > positions:
        notes.append(f"note: --max_tokens {config.max_tokens} is more than the {positions} tokens "
                     "that the model was made for (max_position_embeddings)")
    if metrics.get("truncated", 0) > 0.2:
        notes.append(
            f"note: {metrics['truncated']:.0%} of the held-out episodes are cut by a token limit: "
            f"--max_new_tokens {config.max_new_tokens} (a turn), --max_tokens {config.max_tokens} "
            "(an episode)")
    if "actions" in metrics and min(metrics["actions"], metrics["structure"]) < 0.1:
        # Not the other flags: some are not sft.py's, and some mean another thing there.
        words = ["python", "sft.py", "--model_path", config.model_path, "--env", str(config.env)]
        if config.tasks:
            words += ["--tasks", config.tasks]
        notes.append(
            f"note: the model makes {metrics['actions']:.2f} tool calls an episode, and "
            f"{metrics['structure']:.0%} of its turns can be read: RL has little to compare. "
            f"SFT first: {shlex.join(words)}")
    return notes
