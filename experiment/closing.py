"""What a run prints at its end: the held-out table, where the files are, what to do next."""
import shlex

COLUMNS = ("success", "reward", "actions", "structure", "completion", "truncated",
           "tool_errors")
KEPT_FLAGS = ("env", "dataset", "eval_dataset", "env_options", "dtype")  # of the run, for the next


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
    for name in KEPT_FLAGS:
        value, usual = getattr(config, name, None), type(config).__dataclass_fields__.get(name)
        if value is not None and usual is not None and value != usual.default:
            words += [f"--{name}", str(value)]
    return shlex.join(words)


def first_lesson(metrics, config):
    """Return the note for a model that calls no tools before RL: it has to see the format first."""
    if "actions" not in metrics or metrics["actions"] > 0.1 and metrics["structure"] > 0.1:
        return None
    words = ["python", "sft.py", "--model_path", config.model_path, "--env", str(config.env)]
    words += ["--dataset", config.dataset] if config.dataset else []
    return (f"note: the model makes {metrics['actions']:.2f} tool calls an episode, and "
            f"{metrics['structure']:.0%} of its turns can be read: RL has little to compare. "
            f"SFT first: {shlex.join(words)}")
