"""The window: a run as one page, several runs as one report.

    write_html    -> report.html: result, curves, episodes token by token; one file, no script, no network
    write_report  -> report.md: phases compared in the order given: accuracy, calibration, tool use, examples
    wilson, difference, brier, calibration_error: the statistics, as equations

    python -m experiment.report report RUN... [--output report.md]     RUN: an output folder, or a .jsonl of episodes
    python -m experiment.report html RUN [--output RUN/report.html] [--tokenizer FOLDER]

Accuracy is the share of held-out tasks solved (result.json) or, of a .jsonl, of its episodes (info.success). What is
said of a training run's episodes is said of the last quarter of its steps, when its policy was nearly finished. torch
is not imported (`agent`'s `transcript` is repeated here for that): a page is there at once.
"""
import html
import json
import math
import os
import re
import sys
import textwrap
from collections import Counter
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import envs
from experiment.run import UserError, nearest, newest_checkpoint, read_yaml, replace_file

Z = 1.959964  # two-sided 95 % of the normal distribution
EPISODES = 24  # on a page
FILES = ("config.yaml", "metrics.jsonl", "timing.jsonl", "trajectories.jsonl", "result.json")
SHOWN = ("success_before", "success_after", "seconds", "peak_memory_mb")  # of result.json, in COLUMNS
UNITS = {"entropy": "nats per token", "kl": "nats per token", "approx_kl": "nats per token", "peak_memory_mb": "MiB",
         "held_out_loss": "nats per token"}  # where the name does not say it
COLUMNS = ("run", "algorithm", "episodes", "success before -> after", "accuracy (95 %)", "mean reward",
           "calls per episode", "tool errors per call", "completion", "seconds", "peak MiB")


# -------------------------------------------------------------------------------------------------------- statistics
def wilson(k, n):
    """95 % interval of a proportion k / n: (p + z2/2n -+ z sqrt(p (1-p) / n + z2/4n2)) / (1 + z2/n), z2 = z squared.

    Wilson 1927; stays within 0..1, and is no point at k = 0 or n. n = 0: (0, 1).
    """
    if not n:
        return 0.0, 1.0
    p, z2 = k / n, Z * Z
    middle, half = p + z2 / (2 * n), Z * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    return max(0.0, (middle - half) / (1 + z2 / n)), min(1.0, (middle + half) / (1 + z2 / n))


def difference(k1, n1, k2, n2):
    """p2 - p1 and its 95 % interval, of two independent samples: Newcombe 1998 (two-proportion paper), method 10.

    From Wilson's l, u: (d - sqrt((p2 - l2)^2 + (u1 - p1)^2), d + sqrt((u2 - p2)^2 + (p1 - l1)^2)).
    """
    p1, p2, (l1, u1), (l2, u2) = k1 / n1, k2 / n2, wilson(k1, n1), wilson(k2, n2)
    return p2 - p1, p2 - p1 - math.hypot(p2 - l2, u1 - p1), p2 - p1 + math.hypot(u2 - p2, p1 - l1)


def brier(pairs):
    """Mean of (probability - outcome)^2, outcomes 0 or 1: 0 is best, 0.25 is what always saying 0.5 gets."""
    return fmean((p - y) ** 2 for p, y in pairs)


def bins(pairs, count=10):
    """Pairs by probability, in bins of equal width; 1.0 is in the last one."""
    found = [[] for _ in range(count)]
    for p, y in pairs:
        found[min(int(p * count), count - 1)].append((p, y))
    return found


def calibration_error(pairs):
    """ECE: sum over bins of n_b / N |mean probability - share of outcomes 1|, 10 bins, arXiv 1706.04599 eq. 3.

    The paper's confidence is that of the predicted class; here it is the probability stated of outcome 1.
    """
    return sum(abs(sum(p - y for p, y in b)) for b in bins(pairs)) / len(pairs)


# ----------------------------------------------------------------------------------------------------------- reading
def rows(path, notes, wanted=None):
    """(line, object) of a .jsonl, or of its `wanted` lines (counted from 0). A last line cut by a kill is left out."""
    with open(path, "rb") as file:
        for number, line in enumerate(file):
            if not line.strip() or (wanted is not None and number not in wanted):
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                if line.endswith(b"\n"):
                    raise UserError(f"{path}:{number + 1}: not JSON; mend or delete the line") from None
                notes.append(f"{path}: the last line is cut and left out")
                continue
            if not isinstance(row, dict):
                raise UserError(f"{path}:{number + 1}: not a JSON object")
            yield number + 1, row


def load(name):
    """A run: what its files hold, the lines of its episodes by step, notes on what is missing. Raises UserError."""
    path, notes = Path(name), []
    if not path.exists():
        siblings = os.listdir(path.parent) if path.parent.is_dir() else []
        raise UserError(f"{path}: no such folder or file{nearest(path.name, siblings, '; nearest: ', '', '')}")
    here = [file for file in FILES if (path / file).is_file()] if path.is_dir() else ["trajectories.jsonl"]
    if not here or not (path.is_dir() or path.suffix == ".jsonl"):
        raise UserError(f"{path}: give an output folder (one that holds {', '.join(FILES)}), or a .jsonl of episodes")
    if path.is_dir() and len(here) < len(FILES):
        notes.append(f"{path}: no {', '.join(file for file in FILES if file not in here)}")
    run = SimpleNamespace(path=path, name=str(path), folder=path.is_dir(), notes=notes, algorithm="-", config={},
                          result={}, logs=[], file=path / "trajectories.jsonl" if path.is_dir() else path, lines={})
    if "config.yaml" in here:
        first = re.match(r"# (\w+) run;", (path / "config.yaml").read_text("utf-8", "replace"))
        run.algorithm = first[1] if first else "-"
        run.config = {key: value for _, key, value in read_yaml(path / "config.yaml")}
    if "result.json" in here:
        try:
            run.result = dict(json.loads((path / "result.json").read_text("utf-8")))
        except (ValueError, TypeError):
            raise UserError(f"{path / 'result.json'}: not a JSON object; mend or delete it") from None
    for file in ("metrics.jsonl", "timing.jsonl"):
        run.logs.append([row for _, row in rows(path / file, notes)] if file in here else [])
    if "trajectories.jsonl" in here:
        with open(run.file, "rb") as file:  # run.py writes the step first: no need to parse them all
            for number, line in enumerate(file):
                step = re.match(rb'\{"step": (\d+),', line)
                run.lines.setdefault(int(step[1]) if step else -1, []).append(number)
    return run


def episodes(run, steps):
    """The episodes of these steps. UserError: FILE:LINE: what is wrong; no torch, so not Trajectory.from_json."""
    wanted = {number for step in steps for number in run.lines[step]}
    for number, row in rows(run.file, run.notes, wanted) if wanted else ():
        try:
            transcript(row), [call["name"].strip() for m in row["messages"] for call in m.get("tool_calls", [])]
            ids, logprobs = row.setdefault("token_ids", []), row.setdefault("logprobs", [])
            sound = len(ids) == len(row.setdefault("loss_mask", [])) == len(logprobs) and math.fsum(logprobs) < 1
            sound = sound and all(type(i) is int and 0 <= i < 2**32 for i in ids)
            math.fsum([row["reward"], *row.setdefault("rewards", []), *row.setdefault("reward_parts", {}).values(),
                       *(row["info"].setdefault(key, 0) for key in ("tool_calls", "tool_errors"))])
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            sound = False
        if not sound:
            raise UserError(f"{run.file}:{number}: not an episode as agent.py and run.py write them")
        yield row


def transcript(episode):
    """The episode to read, as agent.transcript writes it (a test holds the two identical)."""
    lines, calls = [], []
    for m in episode["messages"]:
        if m["role"] == "tool":
            call = calls.pop(0) if calls and m["name"] else {"name": "unreadable call", "arguments": {}}
            arguments = ", ".join(f"{k}={v}" for k, v in call["arguments"].items())
            lines.append(f'Action: {call["name"]} -> Reward: {m["reward"]:.1f} -> "{m["content"]}"  ({arguments})')
        else:
            calls = list(m.get("tool_calls", []))
            if m["content"]:
                lines.append(f"{m['role'].capitalize()}: {m['content']}")
    info = episode["info"]
    end = f"[{episode.get('stop_reason')}; success {info.get('success')}; reward {episode['reward']:.2f}]"
    return "\n".join(lines + [end])


# --------------------------------------------------------------------------------------------------------- measuring
def forecast(episode, world=None):
    """(stated probability, outcome 0 or 1, true probability or None) of an answer {"probability": ...}, or None.

    Outcome and truth are in the episode's info, else what the world draws again from its task (attributes `outcome` and
    `probability`), else a right "YES" or a wrong "NO" says that the outcome was 1.
    """
    text = next((m["content"] or "" for m in reversed(episode["messages"]) if m["role"] == "assistant"), "")
    try:
        answer = json.loads(re.findall(r"\{[^{}]*\"probability\"[^{}]*\}", text)[-1])
        stated, yes = float(answer["probability"]), {"YES": True, "NO": False}.get(str(answer.get("recommendation")))
    except (IndexError, ValueError, TypeError):
        return None
    info, drawn = episode["info"], world() if world else None
    try:
        drawn.reset(**info["task"])
    except Exception:  # no world, or one that has changed since: then what the episode says is all there is
        drawn = None
    outcome = info.get("outcome", getattr(drawn, "outcome", None))
    if outcome is None and yes is not None and "success" in info:
        outcome = yes == info["success"]
    true = info.get("probability", getattr(drawn, "probability", None))
    true = true if isinstance(true, (int, float)) else None
    return (stated, int(outcome in (True, "YES")), true) if outcome is not None and 0 <= stated <= 1 else None


def ceiling(found, world=None):
    """Bayes-optimal accuracy, as these episodes' info tells it, or their world; None where neither does."""
    told = [x for e in found if isinstance(x := e["info"].get("ceiling"), (int, float))]
    return fmean(told) if told else world._ceiling() if hasattr(world, "_ceiling") else None


def measure(name):
    """`load` the run, then count: in its result, and in the episodes of the last quarter of its steps."""
    run = load(name)
    steps, result = sorted(run.lines), run.result
    last = max((row["step"] for row in run.logs[0] if type(row.get("step")) is int), default=0) if run.folder else 0
    if steps and 0 <= 2 * steps[-1] < last:
        run.notes.append(f"{name}: its episodes are of the policy it started from, so they are not counted")
        steps = []
    run.found = []
    for e in episodes(run, [step for step in steps if step < 0 or step >= 0.75 * steps[-1]]):
        del e["token_ids"], e["loss_mask"], e["logprobs"]  # there may be thousands
        run.found.append(e)
    judged = [bool(e["info"]["success"]) for e in run.found if "success" in e["info"]]
    run.before, run.after, run.measured_on = None, (sum(judged), len(judged)) if judged else None, "episodes"
    n = math.prod(int(x) if (x := str(run.config.get(key))).isdecimal() else key == "eval_group_size"
                  for key in ("eval_tasks", "eval_group_size"))
    whole = {when: round(x * n) for when in ("before", "after")  # else the tasks were fewer than --eval_tasks
             if n and isinstance(x := result.get(f"success_{when}"), (int, float)) and abs(x * n - round(x * n)) < 1e-6}
    if "after" in whole:
        run.before, run.after, run.measured_on = (whole["before"], n) if "before" in whole else None, (
            whole["after"], n), "held-out"
    run.calls = [int(e["info"]["tool_calls"]) for e in run.found]
    run.tools = Counter(c["name"] for e in run.found for m in e["messages"] for c in m.get("tool_calls", []))
    worlds = {str(e["info"].get("env")) for e in run.found} or {str(run.config.get("env"))}
    run.env = ",".join(sorted(worlds))
    world = envs.load(run.env) if run.env in envs.ENVS else None  # a data file does not choose which code runs
    run.forecasts, run.ceiling = [f for e in run.found if (f := forecast(e, world))], ceiling(run.found, world)
    success = " -> ".join(number(result.get(f"success_{when}"), ".3f") for when in ("before", "after"))
    run.row = [run.name, run.algorithm, str(len(run.found)), success.replace("- -> -", "-"), *["-"] * 5,
               number(result.get("seconds")), number(result.get("peak_memory_mb"))]
    if run.after:
        low, high = wilson(*run.after)
        run.row[4] = f"{run.after[0] / run.after[1]:.3f} ({low:.3f} to {high:.3f}) of {run.after[1]} {run.measured_on}"
        run.row[4] += f"; ceiling {run.ceiling:.3f}" if run.ceiling else ""
    if run.found:
        errors = sum(e["info"]["tool_errors"] for e in run.found) / max(sum(run.calls), 1)
        completion = fmean(e.get("stop_reason") == "done" for e in run.found)
        run.row[5:9] = (number(fmean(e["reward"] for e in run.found)), number(fmean(run.calls)), number(errors, ".3f"),
                        number(completion, ".3f"))
    return run


def number(x, style=""):
    """As a reader wants it: "-" for None, "1,888", "0.0168"."""
    if not isinstance(x, (int, float)):
        return "-" if x is None else str(x)
    return format(x, style or (",.0f" if 1000 <= abs(x) < 1e15 else ".3g"))


# --------------------------------------------------------------------------------------------------------- report.md
def cell(text):
    """Text that others wrote, as one Markdown table cell."""
    text = " ".join(str(text).split()).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\|`*\[\]~])", r"\\\1", text)


def markdown(header, lines):
    lines = [[cell(text) for text in line] for line in (header, *lines)]
    return "".join(f"| {' | '.join(line)} |\n" for line in (lines[0], ["---"] * len(header), *lines[1:]))


def compare(runs):
    """Before against after: of each run, of each phase and the next, of the first and the last; within a world."""
    pairs = [(f"{run.name}: before -> after", run.before, run.after) for run in runs if run.before]
    scored = [run for run in runs if run.after]
    last = [(scored[0], scored[-1])] if len(scored) > 2 else []
    pairs += [(f"{a.name} -> {b.name}", a.after, b.after) for a, b in [*pairwise(scored), *last] if a.env == b.env]
    lines = []
    for what, (k1, n1), (k2, n2) in pairs:
        d, low, high = difference(k1, n1, k2, n2)
        lines.append((what, f"{k1 / n1:.3f}", f"{k2 / n2:.3f}", f"{d:+.3f} ({low:+.3f} to {high:+.3f})",
                      "yes" if low > 0 or high < 0 else "no"))
    return ["## Before against after\n", markdown(("", "before", "after", "difference (95 %)", "beyond chance"), lines),
            "Newcombe's two-proportion interval; it takes the two samples for independent.\n"] if lines else []


def tool_use(runs):
    """How many calls an episode has, and of which tools. Runs without episodes are left out before."""
    names, top = [run.name for run in runs], min(8, max(max(run.calls) for run in runs))
    shares = [[fmean(min(c, top) == n for c in run.calls) for run in runs] for n in range(top + 1)]
    total = sum((run.tools for run in runs), Counter())
    histogram = ((f"{n}{' or more' * (n == 8)}", *(f"{x:.3f} {'█' * round(20 * x)}" for x in line))
                 for n, line in enumerate(shares))
    by_tool = ((tool[:60], *(number(run.tools[tool] / len(run.found)) for run in runs))
               for tool, _ in total.most_common(16))
    return ["## Tool use\n", markdown(("calls in an episode", *names), histogram),
            markdown(("tool: calls per episode", *names), by_tool)]


def calibrated(runs):
    """Are events that the model gives 70 % as frequent as that? And how near to the best possible is it?"""
    lines, columns = [], []
    for run in runs:
        said = [(p, outcome) for p, outcome, _ in run.forecasts]
        true = [(p, outcome) for _, outcome, p in run.forecasts if p is not None]
        accuracy = run.after and run.after[0] / run.after[1]
        lines.append((run.name, f"{len(said)} of {len(run.found)}", number(brier(said), ".3f"),
                      number(calibration_error(said), ".3f"),
                      number(brier(true), ".3f") if len(true) == len(said) else "-", number(accuracy, ".3f"),
                      number(run.ceiling, ".3f"), number(run.ceiling and accuracy and accuracy / run.ceiling, ".3f")))
        columns.append(["{}: {:.2f} -> {:.2f}".format(len(b), *map(fmean, zip(*b))) if b else "-" for b in bins(said)])
    return ["## Calibration\n", markdown(
        ("run", "probabilities read", "Brier score", "calibration error (10 bins)", "Brier of the true probability",
         "accuracy", "Bayes ceiling", "accuracy / ceiling"), lines),
        "Each bin: episodes, mean probability stated -> share of outcomes that came true.\n",
        markdown(("probability stated", *(run.name for run in runs)), (
            (f"{b / 10:.1f} to {(b + 1) / 10:.1f}", *line) for b, line in enumerate(zip(*columns))))]


def examples(run):
    """The two best solved episodes and the two worst unsolved ones, of different tasks, to read."""
    out = [f"## Examples: {cell(run.name)}\n"]
    for word, solved, sign in ("Good", True, -1), ("Bad", False, 1):
        found, tasks = [e for e in run.found if bool(e["info"].get("success")) == solved], set()
        out.append(f"{word}:\n" if found else f"{word}: none.\n")
        for e in sorted(found, key=lambda e: sign * e["reward"]):
            task = e.get("group_id") or id(e)
            if len(tasks) < 2 and task not in tasks:
                text = transcript(e)[:4000]
                fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
                out.append(f"{fence}\n{text}\n{fence}\n")
                tasks.add(task)
    return out


def write_report(names, output="report.md"):
    """The evaluation report of runs, in the order given -> its path. UserError as `load`."""
    runs = [measure(name) for name in names]
    played, answered = [run for run in runs if run.found], [run for run in runs if run.forecasts]
    out = ["# Evaluation report\n", markdown(COLUMNS, (run.row for run in runs)),
           "Accuracy: share of tasks solved, with Wilson's 95 % interval; ceiling: that of the best possible agent. "
           "What is said of a training run's episodes is said of the last quarter of its steps.\n"]
    alike = [run.name for run in played if run.measured_on == "episodes"
             and len({e.get("group_id") or i for i, e in enumerate(run.found)}) < len(run.found)]
    if alike:
        out.append(f"Episodes of one task are alike, so the interval is too narrow: {cell(', '.join(alike))}.\n")
    out += compare(runs) + (tool_use(played) if played else []) + (calibrated(answered) if answered else [])
    out += [line for run in played for line in examples(run)]
    notes = list(dict.fromkeys(note for run in runs for note in run.notes))
    out += ["## Notes\n", "".join(f"* {cell(note)}\n" for note in notes)] if notes else []
    return save(output, "\n".join(out), notes)


# ------------------------------------------------------------------------------------------------------- report.html
STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #626b76; --line: #d9dee4; --page: #fff; --card: #f6f7f9;
  --raw: #9db8dc; --smooth: #1f5fb4; --heat: 251, 146, 60; --good: #15703a; --bad: #b42318 }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ed; --soft: #98a2ae; --line: #323a44; --page: #14181d;
  --card: #1b2127; --raw: #41608a; --smooth: #7fb2f5; --heat: 194, 65, 12; --good: #6fcf8f; --bad: #ff8f83 } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); margin: 0 auto; padding: 1rem;
  max-width: 1180px }
h1 { font-size: 1.4rem; overflow-wrap: anywhere } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem }
p, dt, figcaption i, summary span { color: var(--soft) }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); gap: .6rem; margin: 0 }
.facts div { background: var(--card); border-radius: 6px; padding: .4rem .7rem } dt { font-size: .8rem }
dd { margin: 0; font-weight: 600; overflow-wrap: anywhere }
.curves { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(270px, 100%), 1fr)); gap: .8rem }
figure { margin: 0; background: var(--card); border-radius: 6px; padding: .5rem .6rem }
figcaption { display: flex; justify-content: space-between; gap: .5rem; font-size: .85rem; overflow-wrap: anywhere }
figcaption > b { white-space: nowrap }
svg { display: block; width: 100%; height: auto } svg text { font-size: 10px; fill: var(--soft) }
.grid { stroke: var(--line) } .raw, .smooth { fill: none; stroke: var(--raw); stroke-width: 1 }
.smooth { stroke: var(--smooth); stroke-width: 2 } circle { fill: var(--raw) } rect { fill: transparent }
details { border-top: 1px solid var(--line); padding: .45rem 0 } summary { cursor: pointer; overflow-wrap: anywhere }
pre { font: 13px/1.75 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; margin: .5rem 0 }
i { font-style: normal; color: var(--soft); unicode-bidi: isolate } i[class] { color: var(--ink); border-radius: 2px }
.s0 { background: rgba(var(--heat), .15) } .s1 { background: rgba(var(--heat), .32) }
.s2 { background: rgba(var(--heat), .52) } .s3 { background: rgba(var(--heat), .74) }
.s4 { background: rgb(var(--heat)) } .good { color: var(--good) } .bad { color: var(--bad) }
pre b { border: 1px solid; border-radius: 4px; padding: 0 .3em; margin-left: .3em }
"""
PAGE = """<!doctype html><html lang=en><head><meta charset=utf-8>
<meta http-equiv=Content-Security-Policy content="default-src 'none'; style-src 'unsafe-inline'">
<meta name=viewport content="width=device-width, initial-scale=1"><title>{title}</title><style>{style}</style></head>
<body>"""
SURPRISE = (0.9, 0.5, 0.1, 0.01)  # probabilities between the classes s0 .. s4


def ticks(low, high):
    """(value, label) of two to six round numbers within low..high, with as many digits as tell them apart."""
    step = 10 ** math.floor(math.log10((high - low) / 3))
    step *= next(m for m in (1, 2, 5, 10) if (high - low) / (m * step) <= 5)
    size, largest = math.floor(math.log10(step * 1.001)), max(abs(low), abs(high))
    style = f",.{max(0, -size)}f" if step >= 1e-4 and largest < 1e6 else f".{math.floor(math.log10(largest)) - size}e"
    values = [k * step for k in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
    return [(t, format(t, style) if t else "0") for t in values]


def smoothed(values, span):
    """Mean over the about `span` values around each: a straight line stays where it is, no lag."""
    sums = [0.0, *accumulate(values)]
    around = [(max(0, i - span // 2), min(len(values), i + span // 2 + 1)) for i in range(len(values))]
    return [(sums[b] - sums[a]) / (b - a) for a, b in around]


def chart(name, xs, ys):
    """One curve as a <figure> with inline SVG: raw (lowest and highest of each bucket), smoothed, last value."""
    low, high, size = min(ys), max(ys), -(-len(ys) // 150)
    def across(x):
        return round(50 + 252 * (x - xs[0]) / (xs[-1] - xs[0]), 1)

    def up(y):
        return round(122 - 112 * (y - low) / (high - low), 1)

    buckets = [range(i, min(i + size, len(ys))) for i in range(0, len(ys), size)]
    raw = [i for b in buckets for i in sorted({min(b, key=ys.__getitem__), max(b, key=ys.__getitem__)})]
    mean = smoothed(ys, max(4, len(ys) // 20))
    out = [f"<line class=grid x1=50 x2=302 y1={up(t)} y2={up(t)} /><text x=45 y={up(t)} dy=3 text-anchor=end>{label}"
           "</text>" for t, label in ticks(low, high)]
    out += [f"<text x={across(t)} y=136 text-anchor=middle>{label}</text>"
            for t, label in ticks(xs[0], xs[-1]) if t == round(t)]
    for kind, chosen, values in ("raw", raw, ys), ("smooth", [b[-1] for b in buckets], mean):
        line = " ".join(f"{across(xs[i])},{up(values[i])}" for i in chosen)
        out.append(f'<polyline class={kind} points="{line}" />')
    out += [f"<circle cx={across(x)} cy={up(y)} r=2 />" for x, y in zip(xs, ys)] if len(ys) <= 30 else []
    out += [f"<rect x={across(xs[b[0]]) - 3.5:.1f} y=8 width=7 height=114><title>step {xs[b[0]]}: {number(ys[b[0]])}"
            "</title></rect>" for b in buckets[::-(-len(buckets) // 40)]]  # what a pointer reads, without a script
    unit = f" <i>{UNITS[name]}</i>" if UNITS.get(name) else ""
    return (f"<figure><figcaption><span><b>{html.escape(name)}</b>{unit}</span><b>{number(ys[-1])}</b></figcaption>"
            f'<svg viewBox="0 0 320 152" role=img aria-label="{html.escape(name)}: last {number(ys[-1])}">'
            f'{"".join(out)}<text x=180 y=149 text-anchor=middle>step</text></svg></figure>')


def curves(run):
    """Small multiples of every number that changes; those that never do, in a line."""
    out, flat, span = [], [], 4
    for log in run.logs:
        for name in dict.fromkeys(key for row in log for key in row if key != "step"):
            points = [(row["step"], row[name]) for row in log if type(row.get(name)) in (int, float)
                      and math.isfinite(row[name]) and type(row.get("step")) is int]
            values = [y for _, y in points]
            if points and max(values) - min(values) > 1e-6 * max(map(abs, values)) and points[0][0] < points[-1][0]:
                out.append(chart(name, *zip(*points)))
                span = max(span, len(points) // 20)
            elif points:
                flat.append(f"{html.escape(name)} {number(points[-1][1])}")
    if not out and not flat:
        return ""
    steady = f"<p>Unchanged throughout: {', '.join(flat)}.</p>" if flat else ""
    return (f"<h2>Curves</h2><p>Thin: as logged. Bold: mean of about {span + 1} steps around. Point at a "
            f'curve to read it; top right: its last value.</p><div class=curves>{"".join(out)}</div>{steady}')


def load_tokenizer(run, given):
    """The tokenizer.json that is given, or of the newest checkpoint, or of the model the run started from, or None."""
    places = [given] if given else [run.path, run.path / "base", run.config.get("model_path")]
    for folder in [folder for place in places if place for folder in (newest_checkpoint(place), Path(place)) if folder]:
        file = folder if folder.suffix == ".json" else folder / "tokenizer.json"
        if file.is_file():
            try:
                from tokenizers import Tokenizer
                return Tokenizer.from_file(str(file))
            except Exception as error:  # the library raises plain Exception on a file it cannot read
                raise UserError(f"{file}: not a tokenizer: {error}") from None
    if given:
        raise UserError(f"--tokenizer {given}: no tokenizer.json there")
    run.notes.append(f"{run.path}: no tokenizer found, so tokens are shown as numbers; give --tokenizer FOLDER")


def token_texts(tokenizer, ids):
    """The text that each id adds; "·" for one that only begins a character of several bytes."""
    if tokenizer is None:
        return [f"{i} " for i in ids]
    from tokenizers.decoders import DecodeStream
    stream = DecodeStream(skip_special_tokens=False)
    return [stream.step(tokenizer, i) or "·" for i in ids]


def episode_html(episode, step, tokenizer, opened):
    """One episode: a line to click, then its tokens, coloured where the policy sampled them, and each turn's reward."""
    info, reward = episode["info"], episode["reward"]
    ids, mask, logprobs = episode["token_ids"], episode["loss_mask"], episode["logprobs"]
    rewards, out = list(episode["rewards"]), []
    for t, (i, text, m, logprob) in enumerate(zip(ids, token_texts(tokenizer, ids), mask, logprobs)):
        text = html.escape(text).replace("\n", "↵\n")
        if not m:
            out.append(f'<i title="id {i}, not sampled">{text}</i>')
            continue
        p = math.exp(min(logprob, 0.0))
        said = f"id {i}, log-prob {logprob:.3f}, p {p:.3g}"
        out.append(f'<i class=s{sum(p < q for q in SURPRISE)} title="{said}">{text}</i>')
        if not any(mask[t + 1:t + 2]) and rewards:
            r = rewards.pop(0)
            out.append(f'<b class={"good" if r > 0 else "bad" if r < 0 else "none"}>{f"{r:+.3g}" if r else 0}</b>')
    asked = next((str(m.get("content")) for m in episode["messages"] if m.get("role") == "user"), "")
    parts = ", ".join(f"{name} {number(x)}" for name, x in episode["reward_parts"].items())
    facts = [f"step {step}"] * (step >= 0) + [f"reward {number(reward)}" + f" ({parts})" * bool(parts),
             f"{info.get('tool_calls', 0)} calls", str(episode.get("stop_reason")), f"{len(ids)} tokens"]
    mark = "<b class=good>✓ success</b>" if info.get("success") else "<b class=bad>✗ no success</b>"
    body = "".join(out) or html.escape(transcript(episode))
    return (f"<details{' open' * opened}><summary>{mark} <span>{html.escape(' · '.join(facts))}</span><br>"
            f"{html.escape(textwrap.shorten(asked, 120))}</summary><pre>{body}</pre></details>")


def chosen_episodes(run):
    """At most EPISODES of (step, episode): of steps evenly spread over the run, each from the worst to the best."""
    def spread(items, n):
        n = min(n, len(items))
        return [items[round(i * (len(items) - 1) / max(n - 1, 1))] for i in range(n)]
    steps = spread(sorted(run.lines), EPISODES // 3)
    for step in reversed(steps):
        found = sorted(episodes(run, [step]), key=lambda e: e["reward"])
        yield from ((step, e) for e in reversed(spread(found, EPISODES // len(steps))))


def write_html(name, output=None, tokenizer=None, quiet=False):
    """The page of one run (an output folder or a .jsonl of episodes) -> its path. UserError as `load`.

    quiet: what is missing is said on the page alone; for a run that writes its own page at its end.
    """
    run = measure(name)
    output = output or (run.path / "report.html" if run.folder else run.path.with_suffix(".html"))
    facts = dict(zip(COLUMNS[1:], run.row[1:])) | {key: number(x) for key, x in run.result.items() if key not in SHOWN}
    facts = "".join(f"<div><dt>{html.escape(key)}</dt><dd>{html.escape(x)}</dd></div>" for key, x in facts.items()
                    if x != "-")
    tokens = load_tokenizer(run, tokenizer) if run.lines else None
    shown = [episode_html(e, step, tokens, i == 0) for i, (step, e) in enumerate(chosen_episodes(run))]
    legend = "".join(f"<i class=s{i}> {words} </i> " for i, words in enumerate(
        ("over 0.9", "over 0.5", "over 0.1", "over 0.01", "below")))
    title = html.escape(f"{run.algorithm.strip('-') or ('run' if run.folder else 'episodes')} · {run.name}")
    page = [PAGE.format(title=title, style=STYLE), f"<h1>{title}</h1><dl class=facts>{facts}</dl>",
            *(f"<p>{html.escape(note)}</p>" for note in dict.fromkeys(run.notes)), curves(run)]
    if shown:
        page += ["<h2>Episodes, token by token</h2><p>Grey: prompt, template and tool results. Coloured: sampled, with "
                 f"probability {legend}. Framed: the turn's reward. Point at a token for its id.</p>", *shown]
    if run.config:
        config = html.escape("\n".join(f"{key}: {value}" for key, value in run.config.items()))
        page.append(f"<h2>Config</h2><details><summary>config.yaml</summary><pre>{config}</pre></details>")
    return save(output, "".join(page) + "</body></html>\n", [] if quiet else run.notes)


def save(output, text, notes):
    output = Path(output)
    try:
        replace_file(output, text.encode("utf-8", "replace").decode())  # a lone surrogate fits in no file
    except OSError as error:
        raise UserError(f"--output {output}: cannot be written ({error.strerror})") from None
    for note in dict.fromkeys(notes):
        print(f"note: {note}", file=sys.stderr)
    return output


def main(argv):
    """Command line -> the file written. UserError for what cannot be understood."""
    flags = {"report": ("output",), "html": ("output", "tokenizer")}
    if "-h" in argv or "--help" in argv:
        return print(__doc__.strip())
    if not argv or argv[0] not in flags:
        what = f"unknown command {argv[0]}; {nearest(argv[0], flags, otherwise='')}" if argv else "no command;"
        raise UserError(f"{what} give `report RUN...` or `html RUN`; --help explains")
    words, names, given = list(argv[1:]), [], {}
    while words:
        word, equals, value = words.pop(0).partition("=")
        if not word.startswith("--"):
            names.append(word + equals + value)
        elif word[2:] not in flags[argv[0]]:
            raise UserError(f"unknown option {word}; {nearest(word[2:], flags[argv[0]], 'did you mean --')}")
        elif not (equals or words):
            raise UserError(f"{word}: needs a value")
        else:
            given[word[2:]] = value if equals else words.pop(0)
    if not names or (argv[0] == "html" and len(names) > 1):
        raise UserError(f"{argv[0]}: give {'one output folder' if argv[0] == 'html' else 'output folders'} "
                        "or a .jsonl of episodes")
    suffix = {"report": ".md", "html": ".html"}[argv[0]]
    if not given.get("output", suffix).endswith(suffix):  # never over a file of episodes
        raise UserError(f"--output {given['output']}: give a name that ends in {suffix}")
    print(f"written: {write_report(names, **given) if argv[0] == 'report' else write_html(names[0], **given)}")


if __name__ == "__main__":
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")
    try:
        main(sys.argv[1:])
    except (UserError, OSError) as error:
        print(f"report.py: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
