"""Reading runs back: what an output folder holds, its episodes, and the figures that reports state.

torch is not imported, so a report is written at once.
"""
import math
import re
from pathlib import Path
from statistics import fmean

from experiment.data import (
    lines_of,
    parse_object,
    read_json,
    read_text,
    read_yaml,
    reading,
)
from experiment.episodes import problem, transcript
from experiment.errors import UserError
from experiment.statistics import wilson

LOGS = ("metrics.jsonl", "timing.jsonl")
FILES = ("config.yaml", *LOGS, "trajectories.jsonl", "result.json")
CUT = ("max_tokens", "max_new_tokens")      # stop reasons of a truncated episode
OPTIONAL = {"token_ids": [], "loss_mask": [], "logprobs": [], "rewards": [], "reward_parts": {}}


class Record:
    """One run (an output folder), or one .jsonl of episodes, as it was written.

    Attributes:
        algorithm, config, result, logs: what the files say; empty where there is no such file.
        notes: what is missing or odd, for the reader of a report.
        lines_of_step: {step, or -1 where none is stated: line numbers of its episodes}.
        episodes: those of the last quarter of the steps, without their tokens (`measure`).
        before, after: (tasks solved, tasks played) or None (`measure`).
        measured_on: "held-out" tasks or "episodes", whichever `after` counts (`measure`).
    """

    def __init__(self, name):
        """Read everything but the episodes. Raises UserError."""
        self.name, self.path = str(name), Path(name)
        self.algorithm, self.config, self.result, self.logs = "-", {}, {}, []
        self.notes, self.lines_of_step = [], {}
        self.episodes, self.before, self.after, self.measured_on = [], None, None, "episodes"
        with reading(self.path):
            self.path.stat()
        self.is_folder, self.episode_file = self.path.is_dir(), self.path
        if self.is_folder:
            self.episode_file = self.path / "trajectories.jsonl"
            self._read_folder()
        elif self.path.suffix != ".jsonl":
            raise UserError(f"{name}: give an output folder or a .jsonl of episodes")
        if self.episode_file.is_file():
            # A run writes the step first, so that not every line must be parsed.
            for number, text in lines_of(self.episode_file):
                step = re.match(r'\{"step": (\d+),', text)
                numbers = self.lines_of_step.setdefault(int(step[1]) if step else -1, [])
                numbers.append(number)

    def _read_folder(self):
        absent = [file for file in FILES if not (self.path / file).is_file()]
        if len(absent) == len(FILES):
            known = ", ".join(FILES)
            raise UserError(f"{self.path}: give an output folder (one that holds {known}), "
                            "or a .jsonl of episodes")
        if absent:
            self.notes.append(f"{self.path}: no {', '.join(absent)}")
        config = self.path / "config.yaml"
        if config.name not in absent:
            first = re.match(r"# (\w+) run;", read_text(config))
            self.algorithm = first[1] if first else "-"
            self.config = {key: value for _, key, value in read_yaml(config)}
        if "result.json" not in absent:
            self.result = read_json(self.path / "result.json")
        for log in LOGS:
            if log not in absent:
                self.logs.append([row for _, row in objects(self.path / log, self.notes)])

    def episodes_of(self, steps):
        """Yield the episodes of these steps. UserError names the line that is no episode."""
        wanted = set()
        for step in steps:
            wanted.update(self.lines_of_step[step])
        if not wanted:
            return
        for number, row in objects(self.episode_file, self.notes, wanted):
            try:
                yield complete(row)
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
                raise UserError(f"{self.episode_file}:{number}: not an episode as agent.py and "
                                "run.py write them") from None


def objects(path, notes, wanted=None):
    """Yield (line number, object) of a .jsonl file, or only of its `wanted` lines.

    A last line that was cut when the run was killed is left out and noted.
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
            notes.append(f"{path}: the last line is cut and left out")
            continue
        yield number, row


def complete(row):
    """Return an episode with its optional fields, or raise some exception if it is none."""
    info = {"tool_calls": 0, "tool_errors": 0, **row["info"]}
    row = {**OPTIONAL, **row, "info": info}
    transcript(row)
    for message in row["messages"]:
        for call in message.get("tool_calls", []):
            call["name"].strip()
    # A file of episodes may hold texts only.
    if row["token_ids"] and (problem(row) or max(row["token_ids"]) >= 2**32):
        raise ValueError
    math.fsum([info["tool_calls"], info["tool_errors"]])
    return row


# ------------------------------------------------------------------------------------ figures
def measure(name):
    """Read a run, and count in its result and in the episodes of the last quarter of its steps."""
    record = Record(name)
    for episode in record.episodes_of(late_steps(record)):
        # There may be thousands of episodes, and the tokens are most of them.
        del episode["token_ids"], episode["loss_mask"], episode["logprobs"]
        record.episodes.append(episode)
    judged = [bool(e["info"]["success"]) for e in record.episodes if "success" in e["info"]]
    if judged:
        record.after = sum(judged), len(judged)
    after = held_out(record, "success_after")
    if after:
        record.before = held_out(record, "success_before")
        record.after, record.measured_on = after, "held-out"
    return record


def late_steps(record):
    """Return the last quarter of the steps with episodes, when the policy was nearly finished."""
    steps = sorted(record.lines_of_step)
    logged = [row.get("step") for log in record.logs[:1] for row in log]
    last = max(filter(is_number, logged), default=0)
    if steps and 0 <= 2 * steps[-1] < last:
        record.notes.append(f"{record.name}: its episodes are of the policy it started from, "
                            "so they are not counted")
        return []
    return [step for step in steps if step < 0 or step >= 0.75 * steps[-1]]


def held_out(record, key):
    """Return (solved, played) of the held-out tasks, or None where the result does not say it.

    It does not if the share is no multiple of 1 / played: fewer tasks were played than asked for.
    """
    share = record.result.get(key)
    played = str(record.result.get("held_out_tasks") or record.config.get("eval_tasks"))
    if not is_number(share) or not played.isdecimal() or played == "0":
        return None
    solved = share * int(played)
    return (round(solved), int(played)) if abs(solved - round(solved)) < 1e-6 else None


def ceiling(record):
    """Return the accuracy of the best possible agent if the episodes' environment states it."""
    return mean(filter(is_number, [e["info"].get("ceiling") for e in record.episodes]))


def summary(record):
    """Return {column: text} of the figures that both reports show, "-" where there is none."""
    result, played = record.result, record.episodes
    success = [number(result.get(key), ".3f") for key in ("success_before", "success_after")]
    calls = [e["info"]["tool_calls"] for e in played]
    errors = [e["info"]["tool_errors"] for e in played]
    stops = [e.get("stop_reason") for e in played]
    return {
        "run": record.name,
        "algorithm": record.algorithm,
        "episodes": str(len(played)),
        "success before -> after": "-" if success == ["-", "-"] else " -> ".join(success),
        "accuracy (95 %)": accuracy(record),
        "mean reward": number(mean(e["reward"] for e in played)),
        "calls per episode": number(mean(calls)),
        "tool errors per call": number(sum(errors) / max(sum(calls), 1) if played else None, ".3f"),
        "completion": number(mean(stop == "done" for stop in stops), ".3f"),
        "truncated": number(mean(stop in CUT for stop in stops), ".3f"),
        "seconds": number(result.get("seconds")),
        "peak MiB": number(result.get("peak_memory_mb"))}


def accuracy(record):
    """Return the share of tasks solved, with its interval, as text."""
    if not record.after:
        return "-"
    solved, played = record.after
    low, high = wilson(solved, played)
    text = f"{solved / played:.3f} ({low:.3f} to {high:.3f}) of {played} {record.measured_on}"
    best = ceiling(record)
    return f"{text}; ceiling {best:.3f}" if best else text


def mean(values):
    values = list(values)
    return fmean(values) if values else None


def is_number(x):
    return type(x) in (int, float)


def number(x, style=""):
    """Return a number as a reader wants it: "1,888", "0.0168". None becomes "-"."""
    if not isinstance(x, (int, float)):
        return "-" if x is None else str(x)
    return format(x, style or (",.0f" if 1000 <= abs(x) < 1e15 else ".3g"))
