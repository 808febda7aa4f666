"""The page of one or several runs: one file that loads nothing, which page/ draws.

    python -m extras.show RUN...      output folders, or .jsonl files of episodes

Here the files of a run become the JSON that page.js reads. Of a long run the page holds some steps.
"""
import ast
import base64
import hashlib
import json
import math
import re
from collections import defaultdict
from html import escape
from pathlib import Path
from statistics import fmean, stdev

import yaml

from core.config import UserError, reading
from core.data import is_finite, json_value, read_json
from core.run import CONFIG, EPISODES, algorithm_of, write_whole
from extras.show.metrics import meaning
from extras.show.notes import CHANGED, Alarms, log_rows, wilson
from extras.show.record import TOKENS
from extras.show.recorded import Log, Reader, load_tokenizer, states_of

FILES = Path(__file__).with_name("page")
PROGRAMS = Path(__file__).parents[2]  # their folder
PAGE_BYTES = 1_750_000  # of the data of all episodes on a page
MAX_ROWS = 1000  # of a log, on a page
# Choices of the page that stand in no LOSSES: the program and the function of each.
FUNCTIONS = {"imitate": ("sft", "sft_loss"), "exp": ("reward_weighted", "exp_weights"),
             "linear": ("reward_weighted", "linear_weights"),
             "reverse_kl": ("distill", "distillation_loss")}


class Result(dict):
    """What result.json of an output folder holds. A notebook shows it as a page of curves."""

    def __init__(self, folder):
        super().__init__(result_of(folder))
        self.folder = folder

    def _repr_html_(self):
        """Return the page without episodes in a frame, which keeps its style to itself."""
        # None makes the notebook print the dict: another run has taken the folder since.
        if result_of(self.folder) != self:
            return None
        shown = escape(html_of([run_data(self.folder, 0)]))
        return f'<iframe srcdoc="{shown}" width="100%" height="600"></iframe>'


def program_of(path):
    """Return the name of the program whose run a folder holds, or None for a .jsonl of episodes.

    Raises UserError if it is neither.
    """
    with reading(path):
        path.stat()
    program = algorithm_of(path)
    if not program and path.suffix != ".jsonl":
        raise UserError(f"{path}: give an output folder of a run, or a .jsonl of episodes")
    return program


def result_of(folder):
    """Return what the result.json of an output folder holds, {} if there is none."""
    path = folder / "result.json"
    return read_json(path) if path.exists() else {}


def logs_of(folder):
    """Return the rows of each log of an output folder."""
    paths = (folder / "metrics.jsonl", folder / "timing.jsonl")
    return [list(dict(log_rows(path)).values()) for path in paths if path.exists()]


# ------------------------------------------------------------------------------------------- files
def write_html(*names):
    """Write the page of output folders or .jsonl files of episodes, and return its path.

    That of one run is RUN/report.html, that of several compare.html in the first of their folders.
    Raises UserError, or OSError if it cannot be written.
    """
    paths = list(map(Path, names))
    first = paths[0]
    output = first / "report.html" if first.is_dir() else first.with_suffix(".html")
    if len(paths) > 1:
        output = output.with_name("compare.html")
    runs = [run_data(path, PAGE_BYTES / len(paths)) for path in paths]
    write_whole(output, html_of(runs))
    return output


def html_of(runs):
    """Return the page of these runs' data, with the code of page/ in it. Nothing else may run."""
    names = {name for run in runs for row in (*run["steps"], run["before"], run["after"])
             for name in row}
    data = {"runs": runs, "metrics": {name: meaning(name) for name in names if meaning(name)},
            "written_by": "python -m extras.show"}
    page = (FILES / "page.html").read_text("utf-8")
    hashes = {"style": [], "script": []}

    def inlined(match):
        code = (FILES / match[2]).read_text("utf-8")
        kind = "script" if match[1] == "script" else "style"
        digest = hashlib.sha256(code.encode()).digest()
        hashes[kind].append(f"'sha256-{base64.b64encode(digest).decode()}'")
        return f"<{kind}>{code}</{kind}>"

    page = re.sub(r'<(link|script) (?:rel="stylesheet" href|src)="([\w.]+)">(?:</script>)?',
                  inlined, page)
    policy = f"default-src 'none'; script-src {' '.join(hashes['script'])}; " \
             f"style-src {' '.join(hashes['style'])}"
    title = ", ".join(run["name"] for run in runs)
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n' \
           f"<title>{escape(title)}</title>"
    page = page.replace("<title>Run</title>", head)
    text = as_json(data).replace("<", "\\u003c")
    return page.replace('id="data"></script>', f'id="data">{text}</script>')


def as_json(value):
    """Return the value as JSON in as few bytes as it takes."""
    return json.dumps(json_value(value), separators=(",", ":"), ensure_ascii=False)


# ------------------------------------------------------------------------------------------ one run
def run_data(path, budget):
    """Return the data of an output folder or of a .jsonl of episodes.

    Of its episodes there are as many as `budget` bytes hold. Raises UserError.
    """
    algorithm, header = program_of(path), ""
    with reading(path / CONFIG):
        if algorithm:
            header = (path / CONFIG).read_text("utf-8")
        flags = yaml.safe_load(header) or {}
    with reading(path / "result.json"):
        result = result_of(path)
        evaluated = {name: with_interval(result.get(name) or {}) for name in ("before", "after")}
    rows = {}
    for log in logs_of(path):
        for row in log:
            numbers = {name: value for name, value in row.items() if is_finite(value)}
            rows.setdefault(row.get("step"), {}).update(numbers)
    rows = [row for step, row in rows.items() if type(step) is int]
    changed = re.search(f"^{CHANGED}(.+)$", header, re.M)
    changed = changed[1].split(", ") if changed else []
    episodes = episodes_of(path, algorithm, flags, budget)
    return {"name": str(path), "algorithm": algorithm or "episodes", "flags": flags,
            "changed": {name: flags[name] for name in changed if name in flags}, **evaluated,
            "held_out": result.get("held_out_tasks"), "seconds": result.get("seconds"),
            "steps": thinned(rows), "alarms": list(alarms_of(rows, flags)),
            "equations": equations(), **episodes,
            "reward_weights": reward_weights(flags.get("rewards"), episodes["groups"])}


def reward_weights(rewards, groups):
    """Return the weights of the functions of --rewards that have scored the groups' episodes.

    None where --credit gdpo has nothing to sum: there are fewer than two, or one is a veto.
    """
    weights = {"environment": 1.0}
    for item in filter(str.strip, (rewards or "").split(",")):
        target, _, weight = map(str.strip, item.partition("="))
        name = target.rpartition(":")[2]
        if target.startswith("judge:"):
            name = Path(name).stem
        weights[name] = weight or 1.0
    scored = {name for item in groups for episode in item["episodes"] for name in episode["parts"]}
    used = {name: weight for name, weight in weights.items() if name in scored}
    if len(used) < 2 or "veto" in used.values():
        return None
    return {name: float(weight) for name, weight in used.items()}


def with_interval(metrics):
    """Return the metrics of an evaluation with the 95 % interval of its success."""
    if metrics.get("success") is None or not metrics.get("episodes"):
        return metrics
    n = metrics["episodes"]
    return metrics | {"success_interval": wilson(metrics["success"] * n, n)}


def alarms_of(rows, flags):
    """Yield the alarms that a run has raised."""
    alarms = Alarms(flags, has_expert=False)
    for row in rows:
        for text in alarms.add(row):
            yield {"step": row["step"], "text": text}


def thinned(rows):
    """Return at most MAX_ROWS rows. One stands for several, with their most extreme values."""
    size = math.ceil(len(rows) / MAX_ROWS)
    if size < 2:
        return rows
    names = dict.fromkeys(name for row in rows for name in row)
    means = {name: fmean(row[name] for row in rows if name in row) for name in names}
    kept = []
    for start in range(0, len(rows), size):
        row = {}
        for name in names:
            values = [r[name] for r in rows[start:start + size] if name in r]
            if values:
                row[name] = max(values, key=lambda value: abs(value - means[name]))
        kept.append(row | {"step": rows[start]["step"]})
    return kept


def equations(programs=PROGRAMS):
    """Return where each loss of the programs in a folder is computed."""
    found = []
    for program, *more in (("grpo", "extras/zoo/surrogates"), ("dpo",), ("sft",),
                           ("reward_weighted",), ("distill",)):
        functions = {}  # name -> (file, lines of the file, node)
        names = {name: function for name, (file, function) in FUNCTIONS.items() if file == program}
        for file in (f"{program}.py", *(f"{name}.py" for name in more)):
            path = programs / file
            lines = path.read_text("utf-8").split("\n") if path.is_file() else []
            tree = ast.parse("\n".join(lines))
            functions |= {node.name: (file, lines, node) for node in tree.body
                          if isinstance(node, ast.FunctionDef)}
            names |= surrogates_of(tree, functions)
        for loss, name in names.items():
            if name not in functions:
                continue
            file, lines, function = functions[name]
            # The line that computes it: an assignment to `loss`, or else the last one.
            line = next((node for node in function.body if isinstance(node, ast.Assign)
                         and ast.unparse(node.targets[0]) == "loss"), function.body[-1])
            whole = lines[line.lineno - 1:line.end_lineno]
            found.append({"loss": loss, "file": file, "line": line.lineno,
                          "code": " ".join(" ".join(whole).split())})
    return found


def surrogates_of(tree, functions) -> dict:
    """Return {loss: the function that computes it} of the table LOSSES of a file."""
    names = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LOSSES":
            for key, value in zip(node.value.keys, node.value.values):
                # The surrogate is named first, perhaps in a partial.
                words = re.findall(r"\w+", ast.unparse(value))
                names[ast.literal_eval(key)] = next(filter(functions.get, words), None)
    return names


# ---------------------------------------------------------------------------------------- episodes
def episodes_of(path, algorithm, flags, budget):
    """Return the groups, pairs and played episodes of some steps, spread over the run."""
    episodes = Log(path / EPISODES if path.is_dir() else path)
    tokens = Log(path / TOKENS)
    read = Reader(load_tokenizer(path), flags)
    data = {"groups": [], "pairs": [], "played": []}
    # No step is of dpo.py's played episodes: its pairs are in tokens.jsonl.
    steps = set(tokens.places) | (set() if algorithm == "dpo" else set(episodes.places))
    for step in spread(sorted(steps)):
        if budget <= 0:
            break
        shown = step_data(step, episodes, tokens, read, algorithm)
        budget -= len(as_json(shown).encode())
        for name, items in shown.items():
            data[name] += items
    # Of the tasks that were played before, one was chosen to be shown after.
    shown = [item["task_id"] for item in data["played"] if item["when"] == "after"]
    data["played"] = [item for item in data["played"] if item["task_id"] in shown]
    for items in data.values():
        items.sort(key=lambda item: item["step"])
    return data


def step_data(step, episodes, tokens, read, algorithm):
    """Return the groups, pairs and played episodes of one step."""
    recorded, whole, played = {}, [], []
    for line, row in tokens.rows(step):
        with reading(tokens.path, line):
            if "when" in row:
                played.append({"step": step, "when": row["when"], "episode": read(row["episode"]),
                               "task_id": row["episode"]["group_id"]})
            elif "line" in row:
                recorded[row["line"]] = row
            else:
                whole.append((row["episode"], read(row["episode"], row)))
    if algorithm == "dpo":
        pairs = [pair(step, *whole[i:i + 2], read.flags) for i in range(0, len(whole) - 1, 2)]
        return {"pairs": pairs, "played": played}
    for number, (line, row) in enumerate(episodes.rows(step)):
        with reading(episodes.path, line):
            whole.append((row, read(row, recorded.get(number, {}))))
    groups = defaultdict(list)  # group id -> its episodes
    for row, shown in whole:
        groups[row.get("group_id", "")].append((row, shown))
    return {"groups": [group(step, same) for same in groups.values()], "played": played}


def group(step, whole):
    """Return a group of episodes, [(row of trajectories.jsonl, data)]."""
    row, _ = whole[0]
    numbers = {}  # of the states that turns of the group were taken in
    for episode_row, episode in whole:
        episode["states"] = [numbers.setdefault(state, len(numbers))
                             for state in states_of(episode_row, episode["turns"])]
    shown = [episode for _, episode in whole]
    rewards = [episode["reward"] for episode in shown]
    advantages = [episode["advantage"] for episode in shown]
    silent = None
    if len(rewards) > 1 and not any(advantages):
        if len(set(rewards)) == 1:
            silent = "all rewards are equal, so no episode is better than the others"
        elif None not in advantages:  # where they were not recorded, nobody knows
            silent = "all advantages are 0"
    return {"step": step, "task": task_of(row), "task_id": row.get("group_id"),
            "mean": fmean(rewards), "std": stdev(rewards) if len(rewards) > 1 else 0.0,
            "silent": silent, "episodes": shown}


def task_of(row):
    """Return the text of the first message of the user."""
    return next((str(m["content"]) for m in row["messages"] if m["role"] == "user"), "")


def pair(step, chosen, rejected, flags):
    """Return a pair of dpo.py: an implicit reward is beta x log(policy / reference)."""
    rewards = [flags.get("beta", 0.1) * episode.pop("log_ratio", 0.0)
               for _, episode in (chosen, rejected)]
    return {"step": step, "task": task_of(chosen[0]), "chosen": chosen[1], "rejected": rejected[1],
            "margin": rewards[0] - rewards[1], "implicit_reward": rewards}


def spread(items):
    """Yield all items: the last, the first, the middle one, and so on, halving each gap."""
    seen, parts = set(), 1
    while len(seen) < len(items):
        for i in range(parts, -1, -1):
            place = round(i * (len(items) - 1) / parts)
            if place not in seen:
                seen.add(place)
                yield items[place]
        parts *= 2
