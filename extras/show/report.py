"""report.html: result, curves and episodes of one run, on one page without script or network.

    python -m extras.show.report RUN...      output folders, or .jsonl files of episodes
"""
import argparse
import math
import sys
from html import escape
from pathlib import Path

from core.config import UserError, reading
from core.data import lines_of, read_json, without_surrogates
from core.run import EPISODES, algorithm_of, headline, write_whole
from envs.transcripts import beginning
from envs.task_files import config_of
from envs.transcripts import transcript
from extras.show.curves import curves, number
from extras.show.notes import log_rows, wilson

MAX_EPISODES = 24  # on a page
SURPRISE = (0.9, 0.5, 0.1, 0.01)  # probabilities between the classes s0 .. s4
LEGEND = """<h2>Episodes, token by token</h2><p>Grey: prompt, template and tool results. Coloured:
sampled, with probability <i class=s0> over 0.9 </i> <i class=s1> over 0.5 </i>
<i class=s2> over 0.1 </i> <i class=s3> over 0.01 </i> <i class=s4> below </i>. Framed: the turn's
reward. Point at a token for its id.</p>"""
STYLE = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
HEAD = """<!doctype html><html lang=en><head><meta charset=utf-8>
<meta http-equiv=Content-Security-Policy
  content="default-src 'none'; style-src 'unsafe-inline'">
<meta name=viewport content="width=device-width, initial-scale=1">
<title>{title}</title><style>{style}</style></head><body><h1>{title}</h1>"""


class Result(dict):
    """What result.json of an output folder holds. A notebook shows it as tiles and curves."""

    def __init__(self, folder):
        super().__init__(result_of(folder))
        self.folder = folder

    def _repr_html_(self):
        """Return the head of the page in a frame, which keeps its style to itself."""
        # None makes the notebook print the dict: another run has taken the folder since.
        if result_of(self.folder) != self:
            return None
        shown = escape(summary(self.folder))
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
    logs = []
    for path in (folder / "metrics.jsonl", folder / "timing.jsonl"):
        if path.exists():
            logs.append([row for _, row in log_rows(path)])
    return logs


def write_html(name):
    """Write the page of an output folder or of a .jsonl of episodes beside it; return its path.

    Raises UserError, or OSError if it cannot be written.
    """
    path = Path(name)
    output = path / "report.html" if path.is_dir() else path.with_suffix(".html")
    write_whole(output, without_surrogates(page(path)))
    return output


def page(path):
    """Return the HTML page of an output folder or of a .jsonl of episodes."""
    parts = [summary(path)]
    episodes = path / EPISODES if path.is_dir() else path
    if episodes.exists():
        parts.append(LEGEND)
        tokenizer = load_tokenizer(path)
        for line, episode in chosen_episodes(episodes):
            with reading(episodes, line):
                parts.append(episode_html(episode, tokenizer))
    if path.is_dir():
        config = "\n".join(f"{name}: {value}" for name, value in config_of(path).items())
        parts.append("<h2>Config</h2><details><summary>config.yaml</summary>"
                     f"<pre>{escape(config)}</pre></details>")
    return "".join(parts) + "</body></html>\n"


def summary(path):
    """Return the head of the page: what came out, and the curves. Raises UserError."""
    title = escape(f"{program_of(path) or 'episodes'} · {path}")
    with reading(path / "result.json"):
        tiles = facts(result_of(path))
    return HEAD.format(title=title, style=STYLE) + tiles + curves(logs_of(path))


def facts(result):
    """Return the tiles at the top: what result.json holds, successes with 95 % intervals."""
    values = {}
    for name, value in result.items():
        if isinstance(value, dict):
            # A whole evaluation: the numbers that tell most.
            value = headline(value) or None
        values[name] = number(value)
    tasks = result.get("held_out_tasks")
    for name in ("success_before", "success_after"):
        share = result.get(name)
        if tasks and share is not None:
            low, high = wilson(share * tasks, tasks)
            values[name] = f"{share:.3f} ({low:.3f} to {high:.3f})"
    tiles = ""
    for name, text in values.items():
        if text != "-":
            tiles += f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>"
    return f"<dl class=facts>{tiles}</dl>"


# ----------------------------------------------------------------------------------- episodes
def chosen_episodes(file):
    """Return up to MAX_EPISODES (line number, episode) spread over a file, the last one first."""
    lines = sum(1 for _ in lines_of(file))
    n = min(lines, MAX_EPISODES)
    wanted = {round(i * lines / n) for i in range(1, n + 1)}
    return reversed(list(log_rows(file, wanted)))


def load_tokenizer(folder):
    """Return the tokenizer of the run's newest checkpoint, or None."""
    files = sorted(folder.glob("checkpoints/step_*/tokenizer.json"))
    file = files[-1] if files else folder / "tokenizer.json"
    if not file.is_file():
        return None
    from tokenizers import Tokenizer
    with reading(file):
        return Tokenizer.from_file(str(file))


def episode_html(episode, tokenizer):
    """Return one episode: a line to click, then its tokens, or its text without a tokenizer."""
    asked = next((m["content"] for m in episode["messages"] if m["role"] == "user"), "")
    question = beginning(str(asked), 120)
    words = []
    if "step" in episode:
        words.append(f"step {episode['step']}")
    for name, reward in {"reward": episode["reward"], **episode["reward_parts"]}.items():
        words.append(f"{name} {number(reward)}")
    words += [f"{episode['info'].get('tool_calls', 0)} calls", str(episode.get("stop_reason")),
              f"{len(episode['token_ids'])} tokens"]
    mark = "<b class=bad>✗ no success</b>"
    if episode["info"].get("success"):
        mark = "<b class=good>✓ success</b>"
    body = escape(transcript(episode))
    if tokenizer and episode["token_ids"]:
        body = tokens_html(episode, tokenizer)
    return (f"<details><summary>{mark} <span>{escape(' · '.join(words))}</span><br>"
            f"{escape(question)}</summary><pre>{body}</pre></details>")


def token_texts(tokenizer, ids):
    """Return the text that each id adds, "·" where it only begins a character."""
    from tokenizers.decoders import DecodeStream
    stream = DecodeStream(skip_special_tokens=False)
    return [stream.step(tokenizer, i) or "·" for i in ids]


def tokens_html(episode, tokenizer):
    """Return the tokens, coloured where they were sampled, and the reward behind each turn."""
    ids, mask, rewards = episode["token_ids"], episode["loss_mask"], iter(episode["rewards"])
    spans = []
    for t, text in enumerate(token_texts(tokenizer, ids)):
        text = escape(text).replace("\n", "↵\n")
        if not mask[t]:
            spans.append(f'<i title="id {ids[t]:d}, not sampled">{text}</i>')
            continue
        p = math.exp(episode["logprobs"][t])
        level = sum(p < bound for bound in SURPRISE)
        spans.append(f'<i class=s{level} title="id {ids[t]:d}, p {p:.3g}">{text}</i>')
        is_last_of_turn = not any(mask[t + 1:t + 2])
        if is_last_of_turn:
            reward = next(rewards, 0.0)
            spans.append(f"<b class={'bad' if reward < 0 else 'good'}>{reward:+.3g}</b>")
    return "".join(spans)


# ------------------------------------------------------------------------------------ command
def program():
    """Write the pages that the command line asks for, or end with one line that says why not."""
    if sys.stdout:  # it may be closed
        sys.stdout.reconfigure(errors="backslashreplace")
    parser = argparse.ArgumentParser("python -m extras.show.report", allow_abbrev=False)
    parser.add_argument("runs", nargs="+", metavar="RUN",
                        help="an output folder, or a .jsonl of episodes")
    try:
        for name in parser.parse_args().runs:
            print(f"written: {write_html(name)}")
    except (UserError, OSError) as error:
        print(f"extras.show.report: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    program()
