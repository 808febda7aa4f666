"""What a run prints: notes before its steps, alarms, the held-out table, what to do next."""
import math
import shlex
from statistics import fmean
from types import SimpleNamespace

from experiment.data import objects

COLUMNS = ("success", "reward", "actions", "structure", "completion", "truncated",
           "tool_errors")
KEPT_FLAGS = ("env", "tasks", "eval_dataset", "env_options", "dtype")  # of the run, for the next
WINDOW = 5  # lines of the log at the beginning and at the end that are compared
NAMES = ("success", "entropy", "approx_kl", "kl", "sampled_tokens", "actions", "truncated",
         "structure", "groups_without_signal")


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
        for name in ("tasks", "env_options"):
            if getattr(config, name):
                words += [f"--{name}", getattr(config, name)]
        notes.append(
            f"note: the model makes {metrics['actions']:.2f} tool calls an episode, and "
            f"{metrics['structure']:.0%} of its turns can be read: RL has little to compare. "
            f"SFT first: {shlex.join(words)}")
    return notes


# ------------------------------------------------------------------------------------------- alarms
class Alarms:
    """Watch the lines of metrics.jsonl. Each kind of alarm is raised once."""

    def __init__(self):
        self.lines = []
        self.raised = set()

    def add(self, metrics):
        """Take in a step's metrics. Return the sentences of the alarms that it raises first."""
        self.lines.append(metrics)
        if len(self.lines) < WINDOW:
            return []
        raised = alarms(self.lines[:WINDOW], self.lines[-WINDOW:])
        new = [raised[kind] for kind in raised if kind not in self.raised]
        self.raised.update(raised)
        return new

    def read(self, path):
        """Take in the lines of metrics.jsonl that a resumed run has written before."""
        if path.exists():
            for _, metrics in objects(path):
                self.add(metrics)


def alarms(early, late):
    """Return {kind of alarm: one sentence} for a run's first and latest lines of metrics.

    Learning changes these numbers, too. Where success has grown, or is above 0.9, some of them say
    nothing. The mean of a number that is not there is NaN, which compares false: no alarm.
    """
    was, now = means(early), means(late)
    better = now.success > was.success + 0.05
    tasks = "harder tasks" if now.success > 0.5 else "easier tasks or more SFT"
    checks = [
        ("entropy", now.entropy < 0.3 * was.entropy and not now.success > 0.9,
         f"entropy fell from {was.entropy:.3g} to {now.entropy:.3g} nats a token, the policy "
         "hardly explores; people lower --learning_rate, raise --entropy_coef or --kl_coef, or use "
         "--clip_eps_high 0.28"),
        ("noise", now.entropy > max(3 * was.entropy, 0.5),
         f"entropy rose from {was.entropy:.3g} to {now.entropy:.3g} nats a token, sampling turns "
         "to noise; people lower --learning_rate or --entropy_coef, or raise --kl_coef"),
        ("approx_kl", now.approx_kl > 0.1,
         f"updates move the policy {now.approx_kl:.3g} nats a token away from the sampler; "
         "people lower --learning_rate or --updates_per_step"),
        ("kl", now.kl > 0.5,
         f"KL to the policy this run started from is {now.kl:.3g} nats a token; "
         "people raise --kl_coef or lower --learning_rate"),
        ("length", now.sampled_tokens > 2 * was.sampled_tokens and not better,
         f"episodes grew from {was.sampled_tokens:.0f} to {now.sampled_tokens:.0f} sampled tokens "
         "and solve no more; people lower --max_new_tokens, give length a cost, or use "
         "--loss dr_grpo or dapo"),
        ("length", now.sampled_tokens < 0.4 * was.sampled_tokens and not better,
         f"episodes shrank from {was.sampled_tokens:.0f} to {now.sampled_tokens:.0f} sampled "
         "tokens and solve no more; people read them in report.html: something short is rewarded, "
         "or nothing is"),
        ("truncated", now.truncated > 0.2,
         f"{now.truncated:.0%} of episodes are cut by a token limit; people raise "
         "--max_new_tokens (one turn) or --max_tokens (the episode), as stop reasons say"),
        ("tools", now.actions < 0.3 * was.actions,
         f"tool calls an episode fell from {was.actions:.2g} to {now.actions:.2g}; people check "
         "that the reward cannot be had without tools, lower --learning_rate, or give more SFT"),
        ("structure", now.structure < 0.1,
         "the model makes hardly any tool call that can be read; people teach it the format first: "
         "python sft.py with the same --model_path and --env, then start from its folder"),
        ("signal", now.groups_without_signal > 0.9,
         f"in {now.groups_without_signal:.0%} of groups all advantages are 0 and teach nothing; "
         f"people take {tasks}, a larger --group_size, or --success_rate_lb and "
         "--success_rate_ub")]
    return {kind: sentence for kind, is_raised, sentence in checks if is_raised}


def means(rows):
    """Return the mean of each number that the alarms watch, over the rows that have it."""
    out = SimpleNamespace()
    for name in NAMES:
        values = [row[name] for row in rows if isinstance(row.get(name), (int, float))]
        setattr(out, name, fmean(values or [math.nan]))
    return out
