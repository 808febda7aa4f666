"""Several runs compared in accuracy, calibration, tool use and examples, as Markdown.

    python bench/comparison.py RUN... [--output report.md]

A RUN is an output folder or a .jsonl of episodes. Accuracy is the share of held-out tasks solved (result.json) or, of a
.jsonl, of its episodes (info.success). What is said of a training run's episodes is said of the last quarter of its
steps, when its policy was nearly finished.
"""
import argparse
import json
import math
import re
import sys
from collections import Counter
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from envs.transcripts import transcript
from core.data import without_surrogates
from extras.show.notes import log_rows
from core.config import UserError, printable, read_yaml, reading
from core.run import CONFIG, EPISODES, write_whole  # noqa: E402
from extras.show.notes import wilson  # noqa: E402
from extras.show.page import logs_of, program_of, result_of  # noqa: E402

CUT = ("max_tokens", "max_new_tokens")      # stop reasons of a truncated episode
MAX_CALLS = 8           # rows of the histogram of calls per episode
MAX_TOOLS = 16
MAX_EXAMPLE = 4000      # characters
EXPLANATION = """\
Accuracy: share of tasks solved, with Wilson's 95 % interval.
What is said of a training run's episodes is said of the last quarter of its steps.
"""
ANSWER = re.compile(r"\{[^{}]*\"probability\"[^{}]*\}")
YES_NO = {"YES": True, "NO": False}


def difference(k1, n1, k2, n2):
    """Return p2 - p1 and the bounds of its 95 % interval, for two independent samples.

    Newcombe 1998 (the paper on two proportions), method 10, from Wilson's l and u:
    (d - sqrt((p2 - l2)^2 + (u1 - p1)^2), d + sqrt((u2 - p2)^2 + (p1 - l1)^2)).
    """
    p1, p2 = k1 / n1, k2 / n2
    low1, high1 = wilson(k1, n1)
    low2, high2 = wilson(k2, n2)
    low = p2 - p1 - math.hypot(p2 - low2, high1 - p1)
    high = p2 - p1 + math.hypot(high2 - p2, p1 - low1)
    return p2 - p1, low, high


def comparison(names):
    """Return the Markdown text of the report, and the notes in it. Raises UserError."""
    records = list(map(measure, names))
    rows = list(map(summary, records))
    played = [record for record in records if record.episodes]
    text = ["# Evaluation report\n", table(rows[0], map(dict.values, rows)), EXPLANATION]
    text += map(repeated_task, played)
    text += [changes(records), tool_use(played), calibration(played)]
    text += map(examples, played)
    notes = []
    for record in records:
        notes += record.notes
    if notes:
        text += ["## Notes\n", *map("* {}\n".format, map(cell, dict.fromkeys(notes)))]
    return "\n".join(filter(None, text)), notes


def cell(text):
    """Return text that others wrote as the text of one Markdown table cell."""
    text = " ".join(str(text).split()).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\|`*\[\]~])", r"\\\1", text)


def table(header, rows):
    """Return a Markdown table."""
    lines = []
    for row in (header, *rows):
        lines.append(f"| {' | '.join(map(cell, row))} |\n")
    lines.insert(1, f"|{' --- |' * len(header)}\n")
    return "".join(lines)


def repeated_task(record):
    """Warn that the interval is too narrow where several episodes are of one task."""
    tasks = {e.get("group_id") or i for i, e in enumerate(record.episodes)}
    if record.measured_on == "held-out" or len(tasks) == len(record.episodes):
        return ""
    return f"{cell(record.name)}: episodes of one task are alike, so the interval is too narrow.\n"


def changes(records):
    """Compare before with after of each run, each run with the next, and the first with the last.

    Runs are compared only if they are of the same environment.
    """
    pairs = []
    for record in records:
        if record.before:
            pairs.append((f"{record.name}: before -> after", record.before, record.after))
    scored = [record for record in records if record.after]
    neighbours = list(pairwise(scored))
    if len(scored) > 2:
        neighbours.append((scored[0], scored[-1]))
    for a, b in neighbours:
        if environments(a) == environments(b):
            pairs.append((f"{a.name} -> {b.name}", a.after, b.after))
    if not pairs:
        return ""
    rows = []
    for name, (k1, n1), (k2, n2) in pairs:
        d, low, high = difference(k1, n1, k2, n2)
        interval = f"{d:+.3f} ({low:+.3f} to {high:+.3f})"
        beyond = "no" if low <= 0 <= high else "yes"
        rows.append((name, f"{k1 / n1:.3f}", f"{k2 / n2:.3f}", interval, beyond))
    header = "", "before", "after", "difference (95 %)", "beyond chance"
    return (f"## Before against after\n\n{table(header, rows)}\n"
            "Newcombe's two-proportion interval; it takes the two samples for independent.\n")


def environments(record):
    """Return the names of the environments that were played, or the one that the config states."""
    names = {str(e["info"].get("env")) for e in record.episodes}
    return names or {str(record.config.get("env"))}


def side_by_side(corner, columns, absent):
    """Return a table with one column per run. `columns` holds (run, {label of a row: text})."""
    labels = {}
    for _, column in columns:
        labels.update(column)
    rows = []
    for label in labels:
        rows.append([label, *(column.get(label, absent) for _, column in columns)])
    return table([corner, *dict(columns)], rows)


def tool_use(records):
    """Tabulate how many calls an episode has, and of which tools."""
    histograms, by_tool = [], []
    for record in records:
        counts, tools, n = Counter(), Counter(), len(record.episodes)
        for episode in record.episodes:
            counts[min(int(episode["info"]["tool_calls"]), MAX_CALLS)] += 1
            for message in episode["messages"]:
                tools.update(call["name"][:60] for call in message.get("tool_calls", []))
        histogram = {}
        for count in range(max(counts) + 1):
            label = f"{count} or more" if count == MAX_CALLS else str(count)
            histogram[label] = f"{counts[count] / n:.3f} {'█' * round(20 * counts[count] / n)}"
        histograms.append((record.name, histogram))
        means = {tool: number(count / n) for tool, count in tools.most_common(MAX_TOOLS)}
        by_tool.append((record.name, means))
    if not records:
        return ""
    return "\n".join(["## Tool use\n", side_by_side("calls in an episode", histograms, "0.000"),
                      side_by_side("tool: calls per episode", by_tool, "0")])


# -------------------------------------------------------------------------------- calibration
def forecast(episode):
    """Return (stated probability, outcome 0 or 1), or None if the answer states no probability.

    The last assistant message holds {"probability": ..., "recommendation": "YES" or "NO"}. A correct YES or a wrong NO
    says that the outcome was 1.
    """
    texts = [m["content"] or "" for m in episode["messages"] if m["role"] == "assistant"]
    try:
        answer = json.loads(ANSWER.findall(texts[-1])[-1])
        stated = float(answer["probability"])
    except (IndexError, ValueError, TypeError, OverflowError):
        return None
    recommended, info = YES_NO.get(str(answer.get("recommendation"))), episode["info"]
    if recommended is None or "success" not in info or not 0 <= stated <= 1:
        return None
    return stated, int(recommended == info["success"])


def calibration(records):
    """Tabulate whether events that the model gives 70 % come true in 70 % of cases."""
    scores, columns = [], []
    for record in records:
        forecasts = list(filter(None, map(forecast, record.episodes)))
        if forecasts:
            scores.append([record.name, f"{len(forecasts)} of {len(record.episodes)}",
                           decimals(brier(forecasts)), decimals(calibration_error(forecasts))])
            column = {}
            for i, group in enumerate(bins(forecasts)):
                column[f"{i / 10:.1f} to {i / 10 + 0.1:.1f}"] = bin_text(group)
            columns.append((record.name, column))
    if not scores:
        return ""
    header = "run", "probabilities read", "Brier score", "calibration error (10 bins)"
    return "\n".join([
        "## Calibration\n", table(header, scores),
        "Each bin: episodes, mean probability stated -> share of outcomes that came true.\n",
        side_by_side("probability stated", columns, "-")])


def bin_text(pairs):
    if not pairs:
        return "-"
    stated, outcomes = zip(*pairs)
    return f"{len(pairs)}: {fmean(stated):.2f} -> {fmean(outcomes):.2f}"


# ----------------------------------------------------------------------------------- examples
def examples(record):
    """Show the two best solved episodes and the two worst unsolved ones, of different tasks."""
    text = [f"## Examples: {cell(record.name)}\n"]
    for word, success in (("Good", True), ("Bad", False)):
        shown = {}
        for episode in sorted(record.episodes, key=itemgetter("reward"), reverse=success):
            if bool(episode["info"].get("success")) == success:
                shown.setdefault(episode.get("group_id") or id(episode), episode)
        text.append(f"{word}:\n" if shown else f"{word}: none.\n")
        for episode in list(shown.values())[:2]:
            text.append(fenced(transcript(episode)[:MAX_EXAMPLE]))
    return "\n".join(text)


def fenced(text):
    """Return the text as a code block, between fences longer than any in the text."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text}\n{fence}\n"


# ------------------------------------------------------------------------------------ figures
def measure(name):
    """Return the run as an object with these attributes.

    name: as given. algorithm, config, result, logs: what its files say. episodes: those of the last quarter of the
    steps, without their tokens. before, after: (tasks solved, tasks played) or None. measured_on: "held-out" tasks or
    "episodes", whichever `after` counts. notes: what is odd, for the reader. Raises UserError, which names the line
    that is no episode.
    """
    path = Path(name)
    algorithm = program_of(path)
    config = read_yaml(path / CONFIG) if algorithm else {}
    record = SimpleNamespace(name=str(name), algorithm=algorithm, config=config, result=result_of(path),
                             logs=logs_of(path), notes=[], before=None, after=None, measured_on="episodes")
    record.episodes = late_episodes(record, path / EPISODES if algorithm else path)
    without_faults = [bool(e["info"]["success"]) for e in record.episodes if "success" in e["info"]]
    if without_faults:
        record.after = sum(without_faults), len(without_faults)
    after = held_out(record, "success_after")
    if after:
        record.before = held_out(record, "success_before")
        record.after, record.measured_on = after, "held-out"
    return record


def late_episodes(record, path):
    """Return the episodes of the last quarter of the steps, when the policy was nearly finished."""
    episodes = read_episodes(path) if path.exists() else []
    newest = max((episode["step"] for episode in episodes), default=-1)
    logged = [row.get("step") for log in record.logs[:1] for row in log]
    last = max(filter(is_number, logged), default=0)
    if 0 <= 2 * newest < last:
        record.notes.append(f"{record.name}: its episodes are of the policy it started from, "
                            "so they are not counted")
        return []
    return [episode for episode in episodes if episode["step"] < 0 or episode["step"] >= 0.75 * newest]


def read_episodes(path):
    """Return the episodes of a file without their tokens. Where no step is stated it is -1."""
    episodes = []
    for line, episode in log_rows(path):
        with reading(path, line):
            episode = {"step": -1, "reward_parts": {}, **episode, "reward": float(episode["reward"])}
            episode["info"] = {"tool_calls": 0, "tool_errors": 0, **episode["info"]}
            transcript(episode)
            for message in episode["messages"]:
                for call in message.get("tool_calls", []):
                    call["name"].strip()
        # There may be thousands of episodes, and the tokens are most of them.
        for name in ("token_ids", "loss_mask", "logprobs"):
            episode.pop(name, None)
        episodes.append(episode)
    return episodes


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


def decimals(value):
    """Return a share as text with three decimals, None as "-"."""
    return number(value) if value is None else f"{value:.3f}"


def summary(record):
    """Return {column: text} of the figures that both reports show, "-" where there is none."""
    result, played = record.result, record.episodes
    success = [decimals(result.get(key)) for key in ("success_before", "success_after")]
    calls = [e["info"]["tool_calls"] for e in played]
    errors = [e["info"]["tool_errors"] for e in played]
    stops = [e.get("stop_reason") for e in played]
    return {
        "run": record.name,
        "algorithm": record.algorithm or "-",
        "episodes": str(len(played)),
        "success before -> after": "-" if success == ["-", "-"] else " -> ".join(success),
        "accuracy (95 %)": accuracy(record),
        "mean reward": number(mean(e["reward"] for e in played)),
        "calls per episode": number(mean(calls)),
        "tool errors per call": decimals(sum(errors) / max(sum(calls), 1) if played else None),
        "completion": decimals(mean(stop == "done" for stop in stops)),
        "truncated": decimals(mean(stop in CUT for stop in stops)),
        "seconds": number(result.get("seconds")),
        "peak MiB": number(result.get("peak_memory_mb"))}


def accuracy(record):
    """Return the share of tasks solved, with its interval, as text."""
    if not record.after:
        return "-"
    solved, played = record.after
    low, high = wilson(solved, played)
    return f"{solved / played:.3f} ({low:.3f} to {high:.3f}) of {played} {record.measured_on}"


def mean(values):
    values = list(values)
    return fmean(values) if values else None


def number(value):
    """A number as a reader wants it: "1,888", "0.0168"; None is "-"."""
    if not isinstance(value, (int, float)):
        return "-" if value is None else str(value)
    return f"{value:,.0f}" if 999.5 <= abs(value) < 1e15 else f"{value:.3g}"


def is_number(x):
    return type(x) in (int, float)


# --------------------------------------------------------------------------------- statistics
def brier(pairs):
    """Return the mean of (probability - outcome)^2 for outcomes 0 or 1.

    0 is best, and 0.25 is what always saying 0.5 gets.
    """
    return fmean((p - y) ** 2 for p, y in pairs)


def bins(pairs, count=10):
    """Sort (probability, ...) tuples into bins of equal width; 1.0 is in the last."""
    result = [[] for _ in range(count)]
    for pair in pairs:
        result[min(int(pair[0] * count), count - 1)].append(pair)
    return result


def calibration_error(pairs):
    """Return the ECE with 10 bins: sum of n_b / N |mean probability - share of outcomes 1|.

    arXiv 1706.04599, eq. 3. The paper's confidence is that of the predicted class. Here it is the
    probability stated of outcome 1.
    """
    return sum(abs(sum(p - y for p, y in group)) for group in bins(pairs)) / len(pairs)


# ------------------------------------------------------------------------------------ command
def write_report(names, output="report.md"):
    """Write the comparison of several runs, in the order given, and return its path."""
    text, notes = comparison(names)
    try:
        write_whole(Path(output), without_surrogates(text))
    except OSError as error:
        raise UserError(f"--output {output}: cannot be written ({error.strerror})") from None
    for note in dict.fromkeys(notes):
        print(f"note: {printable(note)}", file=sys.stderr)
    return Path(output)


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="an output folder or a .jsonl of episodes")
    parser.add_argument("--output", default="report.md", help="file to write, which must end in .md")
    args = parser.parse_args(argv)
    if not args.output.endswith(".md"):
        # Never write over a file of episodes.
        parser.error(f"--output {args.output}: give a name that ends in .md")
    print(f"written: {printable(str(write_report(args.runs, args.output)))}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (UserError, OSError) as error:
        print(f"comparison.py: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
