"""report.html: result, curves and episodes of one run, on one page without script or network.

    python -m window.report RUN...      output folders, or .jsonl files of episodes
"""
import argparse
import math
import sys
import textwrap
from html import escape
from pathlib import Path

from experiment.checkpoint import newest_checkpoint
from experiment.data import lines_of, objects, read_json, read_yaml, reading, whole
from experiment.episodes import transcript
from experiment.errors import UserError
from experiment.files import replace_file
from experiment.notes import headline, wilson
from experiment.output_folder import CONFIG, algorithm_of
from window.curves import curves, number

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


class Record:
    """One run (an output folder), or one .jsonl of episodes, as it was written.

    Attributes:
        config, result: what the files say, {} where there is no such file.
        logs: the rows of each log.
        algorithm: the name of the program, or None.
        episode_file: the file of its episodes, which may not exist.
    """

    def __init__(self, name):
        """Read everything but the episodes. Raises UserError."""
        self.path = self.episode_file = Path(name)
        self.config, self.result, self.logs = {}, {}, []
        with reading(self.path):
            self.path.stat()
        self.algorithm = algorithm_of(self.path)
        if self.algorithm:
            self._read_folder()
        elif self.path.suffix != ".jsonl":
            raise UserError(f"{name}: give an output folder of a run, or a .jsonl of episodes")

    def _read_folder(self):
        self.config = {key: value for _, key, value in read_yaml(self.path / CONFIG)}
        self.episode_file = self.path / "trajectories.jsonl"
        result = self.path / "result.json"
        if result.exists():
            self.result = read_json(result)
        for log in (self.path / "metrics.jsonl", self.path / "timing.jsonl"):
            if log.exists():
                self.logs.append([row for _, row in objects(log)])


class Result(dict):
    """What result.json of an output folder holds. A notebook shows it as tiles and curves."""

    def __init__(self, folder):
        super().__init__(read_json(folder / "result.json"))
        self.folder = folder

    def _repr_html_(self):
        """Return the head of the page in a frame, which keeps its style to itself."""
        record = Record(self.folder)
        # None makes the notebook print the dict: another run has taken the folder since.
        if record.result != self:
            return None
        return f'<iframe srcdoc="{escape(summary(record))}" width="100%" height="600"></iframe>'


def write_html(name):
    """Write the page of an output folder or of a .jsonl of episodes beside it; return its path.

    Raises UserError, or OSError if it cannot be written.
    """
    path = Path(name)
    output = path / "report.html" if path.is_dir() else path.with_suffix(".html")
    replace_file(output, whole(page(Record(name))))
    return output


def page(record):
    """Return the HTML page of a `Record`."""
    parts = [summary(record)]
    if record.episode_file.exists():
        parts.append(LEGEND)
        tokenizer = load_tokenizer(record.path)
        for line, episode in chosen_episodes(record.episode_file):
            with reading(record.episode_file, line):
                parts.append(episode_html(episode, tokenizer))
    if record.config:
        config = "\n".join(f"{name}: {value}" for name, value in record.config.items())
        parts.append("<h2>Config</h2><details><summary>config.yaml</summary>"
                     f"<pre>{escape(config)}</pre></details>")
    return "".join(parts) + "</body></html>\n"


def summary(record):
    """Return the head of the page: what came out, and the curves."""
    title = escape(f"{record.algorithm or 'episodes'} · {record.path}")
    with reading(record.path / "result.json"):
        tiles = facts(record.result)
    return HEAD.format(title=title, style=STYLE) + tiles + curves(record.logs)


def facts(result):
    """Return the tiles at the top: what result.json holds, successes with 95 % intervals."""
    values = {}
    for name, value in result.items():
        # Of a whole evaluation the numbers that tell most.
        values[name] = headline(value) or "-" if isinstance(value, dict) else number(value)
    tasks = result.get("held_out_tasks")
    for name in ("success_before", "success_after"):
        share = result.get(name)
        if tasks and share is not None:
            low, high = wilson(share * tasks, tasks)
            values[name] = f"{share:.3f} ({low:.3f} to {high:.3f})"
    tiles = [f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>"
             for name, text in values.items() if text != "-"]
    return f"<dl class=facts>{''.join(tiles)}</dl>"


# ----------------------------------------------------------------------------------- episodes
def chosen_episodes(file):
    """Return up to MAX_EPISODES (line number, episode) spread over a file, the last one first."""
    lines = sum(1 for _ in lines_of(file))
    n = min(lines, MAX_EPISODES)
    wanted = {round(i * lines / n) for i in range(1, n + 1)}
    return reversed(list(objects(file, wanted)))


def load_tokenizer(folder):
    """Return the tokenizer of the run's newest checkpoint, or None."""
    file = (newest_checkpoint(folder) or folder) / "tokenizer.json"
    if not file.is_file():
        return None
    from tokenizers import Tokenizer
    with reading(file):
        return Tokenizer.from_file(str(file))


def episode_html(episode, tokenizer):
    """Return one episode: a line to click, then its tokens, or its text without a tokenizer."""
    asked = [m["content"] for m in episode["messages"] if m["role"] == "user"]
    question = textwrap.shorten(str(asked[0]) if asked else "", 120)
    words = [f"step {episode['step']}"] if "step" in episode else []
    words += [f"{name} {number(reward)}" for name, reward in
              {"reward": episode["reward"], **episode["reward_parts"]}.items()]
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
        p = math.exp(min(episode["logprobs"][t], 0.0))
        level = sum(p < bound for bound in SURPRISE)
        spans.append(f'<i class=s{level} title="id {ids[t]:d}, p {p:.3g}">{text}</i>')
        is_last_of_turn = not any(mask[t + 1:t + 2])
        if is_last_of_turn:
            reward = next(rewards, 0.0)
            spans.append(f"<b class={'bad' if reward < 0 else 'good'}>{reward:+.3g}</b>")
    return "".join(spans)


# ------------------------------------------------------------------------------------ command
def main(argv):
    """Write the pages that the command line asks for. Raises UserError or OSError."""
    parser = argparse.ArgumentParser("python -m window.report", allow_abbrev=False)
    parser.add_argument("runs", nargs="+", metavar="RUN",
                        help="an output folder, or a .jsonl of episodes")
    for name in parser.parse_args(argv).runs:
        print(f"written: {write_html(name)}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (UserError, OSError) as error:
        print(f"window.report: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
