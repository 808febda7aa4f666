"""What a run prints: plan, a line a step, notes, alarms, the held-out table, what to do next."""
import json
import math
import os
import re
import shlex
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

from extras.show.bars import duration
from core.config import UserError, options, reading
from core.data import lines_of, parse_object

NOTES = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
HELD_OUT = NOTES["held_out"]  # rows of the table
COUNTS = NOTES["counts"]  # what a number of HELD_OUT is of, in words
SHARES = NOTES["shares"]  # they get an interval
KEPT_FLAGS = NOTES["kept_flags"]  # of a run, for the next one
IDLE = NOTES["idle"]  # a flag, its value ("": any), and flags on which no update then depends
STEP_NUMBERS = NOTES["step_numbers"]
WATCHED = NOTES["watched"]
# What is said of each kind of alarm: what was observed, and then what people do about it.
ALARMS = NOTES["alarms"]
CHANGED = "# differ from the defaults: "  # begins a line of config.yaml
BLOCKS = "▁▂▃▄▅▆▇█"
COLUMNS = 80  # of a terminal: no line of a step wraps
WINDOW = 5  # lines of the log at the beginning and at the end that are compared


def plan(config, steps):
    """Return a line that says what the steps of a run are."""
    if hasattr(config, "tasks_per_step") and not getattr(config, "trajectories", None):
        size = (f"{config.tasks_per_step} tasks x {config.group_size} episodes of at most "
                f"{config.max_tokens} tokens")
    else:
        size = (f"batch_size {config.batch_size} x gradient_accumulation_steps "
                f"{config.gradient_accumulation_steps}")
    return f"training: {steps} steps, each of {size}"


def step_numbers(line, n, digits=3, width=0, between="  "):
    """Return n numbers of a step's line to look at while it trains, as text."""
    # The value of a policy's loss says nothing.
    names = STEP_NUMBERS
    if "reward" not in line:
        names = ("loss", "accuracy", "margin")
    shown = []
    for name in names:
        if name in line:
            # 123 in two digits would be 1.2e+02.
            precision = digits if abs(line[name]) < 99 else 3
            shown.append(f"{name} {line[name]:<{width}.{precision}g}")
    return between.join(shown[:n])


def sparkline(values, width=8):
    """Return shares as a line of blocks, the mean of a stretch of them each."""
    if not values:
        return ""
    parts = min(width, len(values))
    edges = [i * len(values) // parts for i in range(parts + 1)]
    means = [fmean(values[a:b]) for a, b in zip(edges, edges[1:])]
    return "".join(BLOCKS[round(7 * min(max(mean, 0), 1))] for mean in means)


def step_line(step, total, line, seconds, left):
    """Return a step's line for a reader without a bar. Both durations are in seconds."""
    for n, digits, width in ((4, 3, 6), (4, 2, 5), (4, 2, 0), (3, 2, 0), (2, 2, 0)):
        shown = (f"step {step:{len(str(total))}}/{total} "
                 f"{step_numbers(line, n, digits, width, ' ')} "
                 f"{seconds:.1f} s, {duration(left)} left")
        if len(shown) <= COLUMNS:
            break
    return shown


def wilson(k, n):
    """Return the 95 % Wilson score interval of a share: k of n independent tasks solved."""
    if not n:
        return 0.0, 1.0
    z = 1.959964
    middle = (k + z * z / 2) / (n + z * z)
    half = z / (n + z * z) * math.sqrt(k * (n - k) / n + z * z / 4)
    return max(0.0, middle - half), min(1.0, middle + half)


def print_table(before, after, steps, seconds):
    """Print the held-out metrics before and after training, a row each, shares with an interval."""
    names = [name for name in HELD_OUT if name in after]
    names += [name for name in after if name.startswith("success/")]  # of several environments
    if not names:
        return
    width = max(16, *(len(name) + 1 for name in names))
    counts = [f"{after[name]} {words}" for name, words in COUNTS.items() if after.get(name)]
    interval = "   95 % interval" if SHARES.keys() & set(names) else ""
    print(f"\nheld out: {', '.join(counts)}; trained: {steps} steps, {duration(seconds)}\n"
          f"{'':{width}}{'before':>10}{'after':>10}{interval}")
    for name in names:
        old = f"{before[name]:.3f}" if name in before else "-"
        interval = ""
        if name in SHARES:
            n = after[SHARES[name]]
            low, high = wilson(after[name] * n, n)
            interval = f"   {low:.3f} to {high:.3f}"
        print(f"{name:{width}}{old:>10}{after[name]:10.3f}{interval}")


def path_of(program):
    """Return the path of one of our programs from the current folder."""
    return os.path.relpath(os.path.join(__file__, "../../..", program))


def next_command(program, config, *words):
    """Return the command that continues from a run with the path `program`, and its flags."""
    words = ["python", program, "--model_path", config.output_dir, *words]
    learns_from = [getattr(config, name, None) for name in ("dataset", "trajectories")]
    for name in KEPT_FLAGS:
        value = getattr(config, name, None)
        # What is held out of other data is no file of tasks, nor are its columns theirs.
        if name in ("eval_dataset", "fields") and set(learns_from) - {None, config.tasks}:
            continue
        # A list of rows is in the run's config.yaml.
        if value not in (None, getattr(type(config), name, None)) and str(value)[:1] != "[":
            words += [f"--{name}", str(value)]
    return shlex.join(words)


def changed_flags(config):
    """Return the names of the flags that differ from their defaults; that of dtype is measured."""
    changed = []
    for name, option in options(type(config)).items():
        default = option.default
        if name == "dtype" and callable(default):
            continue
        if getattr(config, name) != (default(config) if callable(default) else default):
            changed.append(name)
    return changed


def idle_notes(config):
    """Return notes on flags that were given and on which, beside the others, no update depends."""
    notes, values = [], vars(config)
    for name, value, others in IDLE:
        actual = values.get(name)
        given = [f"--{flag}" for flag in others
                 if values.get(flag) != getattr(type(config), flag, None)]
        if given and actual is not None and value in ("", str(actual)):
            notes.append(f"note: with --{name} {actual} no update depends on {', '.join(given)}")
    return notes


def first_notes(metrics, config, model, has_expert, has_tools, whose="held-out"):
    """Return notes on what the model was not made for: so many tokens, short turns, or tools.

    `metrics` are those of the untrained policy's episodes, {} if there are none; `whose` says of
    which. No number stands at the end of a note.
    """
    notes = []
    positions = getattr(model.config, "max_position_embeddings", None) or config.max_tokens
    if config.max_tokens > positions:
        notes.append(f"note: --max_tokens {config.max_tokens} is more than the {positions} tokens "
                     "that the model was made for (max_position_embeddings)")
    if metrics.get("truncated", 0) > 0.2:
        notes.append(
            f"note: {metrics['truncated']:.0%} of the {whose} episodes are cut by a token limit: "
            f"--max_new_tokens {config.max_new_tokens} (a turn), --max_tokens {config.max_tokens} "
            "(an episode)")
    if has_tools and min(metrics.get("actions", 1), metrics.get("structure", 1)) < 0.1:
        advice = ("A model that knows tools is a better start, or an _expert() for sft.py to "
                  "imitate (envs/template.py has one)")
        if has_expert:
            advice = "SFT first: sft.py with the same --model_path and --env"
        notes.append(
            f"note: the model makes {metrics['actions']:.2f} tool calls an episode, and "
            f"{metrics['structure']:.0%} of its turns can be read: RL has little to compare. "
            f"{advice}")
    return notes


def credit_note(config, episodes):
    """Return a note if --credit process meets episodes that are paid at their end alone, or None.

    Without a reward, or in episodes of one turn, nothing can be said yet.
    """
    if getattr(config, "credit", None) != "process":
        return None
    pays, early = False, []
    for t in episodes:
        early += [reward != 0.0 for reward in t.rewards[:-1]]
        # `shift_and_scale` takes the bias from the last turn.
        pays = pays or t.rewards[-1] != (0.0 - config.reward_bias) * config.reward_scaling
    if not pays or not early or any(early):
        return None
    return ("note: --credit process, and the reward comes at the end alone: each further turn then "
            "costs, and an answer in the first turn gains most, right or wrong; --credit return or "
            "episode has no such price")


# ------------------------------------------------------------------------------------------- alarms
class Alarms:
    """Watch the lines of metrics.jsonl. Each kind of alarm is raised once.

    Left out is advice that names a flag outside `flags`, or an expert where there is none.
    """

    def __init__(self, flags, has_expert):
        self.flags, self.has_expert = set(flags), has_expert
        self.lines = []
        self.raised = set()

    def add(self, metrics):
        """Take in a step's metrics. Return the sentences of the alarms that it raises first."""
        self.lines.append(metrics)
        if len(self.lines) < WINDOW:
            return []
        raised = alarms(self.lines[:WINDOW], self.lines[-WINDOW:])
        new = [self.sentence(*raised[kind]) for kind in raised if kind not in self.raised]
        self.raised.update(raised)
        return new

    def sentence(self, observed, *advice):
        """Return what was observed, and what of the advice can be followed here."""
        kept = []
        for words in advice:
            has_flags = self.flags.issuperset(re.findall(r"--(\w+)", words))
            if has_flags and (self.has_expert or "sft.py" not in words):
                kept.append(words)
        observed += f" (means of {WINDOW} steps)"
        if kept:
            observed += f"; people {', or '.join(kept)}"
        return observed

    def read(self, path):
        """Take in the lines of metrics.jsonl that a resumed run has written before."""
        if path.exists():
            for _, metrics in log_rows(path):
                self.add(metrics)


def log_rows(path, wanted=None):
    """Yield (line number, row) of a log, or only of its `wanted` lines.

    A last line that was cut when the run was killed is left out.
    """
    for number, text in lines_of(path):
        if not text.strip() or (wanted is not None and number not in wanted):
            continue
        try:
            with reading(path, number):
                row = parse_object(text)
        except UserError:
            if text.endswith("\n"):
                raise
            return
        yield number, row


def alarms(early, late):
    """Return {kind of alarm: [observed, *advice]} for a run's first and latest lines of metrics.

    Learning changes these numbers, too. Where success has grown, or is above 0.9, some of them say
    nothing. The mean of a number that is not there is NaN, which compares false: no alarm.
    """
    was, now = means(early), means(late)
    solves_more = now.success > was.success + 0.05
    checks = {
        "entropy": now.entropy < 0.3 * was.entropy and not now.success > 0.9,
        "noise": now.entropy > max(3 * was.entropy, 0.5),
        "approx_kl": now.approx_kl > 0.1,
        "kl": now.kl > 0.5,
        "longer": now.sampled_tokens > 2 * was.sampled_tokens and not solves_more,
        "shorter": now.sampled_tokens < 0.4 * was.sampled_tokens and not solves_more,
        "truncated": now.truncated > 0.2,
        "tools": now.actions < 0.3 * was.actions,
        "structure": now.structure < 0.1,
        "signal": now.groups_without_signal > 0.9}
    tasks = "easier"
    if now.success > 0.5:
        tasks = "harder"
    raised = {}
    for kind, is_raised in checks.items():
        if is_raised:
            raised[kind] = [words.format(was=was, now=now, tasks=tasks) for words in ALARMS[kind]]
    for name, share in vars(now).items():
        if name.startswith("success") and share < 0.02 and getattr(was, name, 0) > 0.2:
            raised[name] = [words.format(name=name, share=share) for words in ALARMS["success"]]
    return raised


def means(rows):
    """Return the mean of each number over the rows that have it; of a watched one it may be NaN."""
    out = SimpleNamespace()
    for name in sorted(set(WATCHED).union(*rows)):
        values = [row[name] for row in rows if isinstance(row.get(name), (int, float))]
        setattr(out, name, fmean(values or [math.nan]))
    return out
