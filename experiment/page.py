"""report.html: result, curves and episodes of one run, on one page without script or network."""
import math
import textwrap
from html import escape
from operator import itemgetter
from pathlib import Path

from experiment.checkpoint import newest_checkpoint
from experiment.curves import curves
from experiment.data import read_text, reading
from experiment.episodes import transcript
from experiment.errors import UserError
from experiment.records import measure, number, summary

MAX_EPISODES = 24       # on a page
MAX_TOKENIZER = 2**28   # bytes
SHOWN = ("success_before", "success_after", "seconds", "peak_memory_mb")    # in the summary
SURPRISE = (0.9, 0.5, 0.1, 0.01)    # probabilities between the classes s0 .. s4
LEGEND = """<i class=s0> over 0.9 </i> <i class=s1> over 0.5 </i> <i class=s2> over 0.1 </i>
<i class=s3> over 0.01 </i> <i class=s4> below </i>"""
STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #626b76; --line: #d9dee4; --page: #fff;
  --card: #f6f7f9; --raw: #9db8dc; --smooth: #1f5fb4; --heat: 251, 146, 60; --good: #15703a;
  --bad: #b42318 }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ed; --soft: #98a2ae; --line: #323a44;
  --page: #14181d; --card: #1b2127; --raw: #41608a; --smooth: #7fb2f5; --heat: 194, 65, 12;
  --good: #6fcf8f; --bad: #ff8f83 } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); margin: 0
  auto; padding: 1rem; max-width: 1180px }
h1 { font-size: 1.4rem; overflow-wrap: anywhere } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem }
p, dt, figcaption i, summary span { color: var(--soft) }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); gap: .6rem;
  margin: 0 }
.facts div { background: var(--card); border-radius: 6px; padding: .4rem .7rem }
dt { font-size: .8rem } dd { margin: 0; font-weight: 600; overflow-wrap: anywhere }
.curves { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(270px, 100%), 1fr));
  gap: .8rem }
figure { margin: 0; background: var(--card); border-radius: 6px; padding: .5rem .6rem }
figcaption { display: flex; justify-content: space-between; gap: .5rem; font-size: .85rem;
  overflow-wrap: anywhere }
figcaption > b { white-space: nowrap } svg { display: block; width: 100%; height: auto }
svg text { font-size: 10px; fill: var(--soft) } .grid { stroke: var(--line) }
.raw, .smooth { fill: none; stroke: var(--raw); stroke-width: 1 }
.smooth { stroke: var(--smooth); stroke-width: 2 } circle { fill: var(--raw) }
details { border-top: 1px solid var(--line); padding: .45rem 0 }
summary { cursor: pointer; overflow-wrap: anywhere }
pre { font: 13px/1.75 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere;
  margin: .5rem 0 }
i { font-style: normal; color: var(--soft); unicode-bidi: isolate }
i[class] { color: var(--ink); border-radius: 2px } .s0 { background: rgba(var(--heat), .15) }
.s1 { background: rgba(var(--heat), .32) } .s2 { background: rgba(var(--heat), .52) }
.s3 { background: rgba(var(--heat), .74) } .s4 { background: rgb(var(--heat)) }
.good { color: var(--good) } .bad { color: var(--bad) }
pre b { border: 1px solid; border-radius: 4px; padding: 0 .3em; margin-left: .3em }
"""
PAGE = """<!doctype html><html lang=en><head><meta charset=utf-8>
<meta http-equiv=Content-Security-Policy
  content="default-src 'none'; style-src 'unsafe-inline'">
<meta name=viewport content="width=device-width, initial-scale=1">
<title>{title}</title><style>{style}</style></head><body>"""


def page(name, tokenizer=None):
    """Return the HTML page of a run (an output folder or a .jsonl of episodes) and the notes on it.

    Args:
        name: the path.
        tokenizer: a tokenizer.json or its folder. By default that of the run is used.
    Raises UserError as `load`.
    """
    record = measure(name)
    decoder = load_tokenizer(record, tokenizer) if record.lines_of_step else None
    shown = chosen_episodes(record)
    kind = "run" if record.is_folder else "episodes"
    algorithm = kind if record.algorithm == "-" else record.algorithm
    title = escape(f"{algorithm} · {record.name}")
    text = [PAGE.format(title=title, style=STYLE), f"<h1>{title}</h1>", facts(record)]
    text += map("<p>{}</p>".format, map(escape, dict.fromkeys(record.notes)))
    text.append(curves(record.logs))
    if shown:
        text.append(
            "<h2>Episodes, token by token</h2><p>Grey: prompt, template and tool results. "
            f"Coloured: sampled, with probability {LEGEND}. Framed: the turn's reward. "
            "Point at a token for its id.</p>")
    for index, (step, episode) in enumerate(shown):
        text.append(episode_html(episode, step, decoder, is_open=index == 0))
    if record.config:
        config = escape("\n".join(map("{0[0]}: {0[1]}".format, record.config.items())))
        text.append("<h2>Config</h2><details><summary>config.yaml</summary>"
                    f"<pre>{config}</pre></details>")
    return "".join(text) + "</body></html>\n", record.notes


def facts(record):
    """Return the tiles at the top: the summary, then what else result.json holds."""
    values = summary(record)
    del values["run"]
    for key, value in record.result.items():
        if key not in SHOWN:
            values[key] = number(value)
    tiles = []
    for key, text in values.items():
        if text != "-":
            tiles.append(f"<div><dt>{escape(key)}</dt><dd>{escape(text)}</dd></div>")
    return f"<dl class=facts>{''.join(tiles)}</dl>"


# ----------------------------------------------------------------------------------- episodes
def chosen_episodes(record):
    """Return up to MAX_EPISODES (step, episode) of steps spread over the run, best to worst."""
    chosen = []
    steps = spread(sorted(record.lines_of_step), MAX_EPISODES // 3)
    for step in reversed(steps):
        ranked = sorted(record.episodes_of([step]), key=itemgetter("reward"), reverse=True)
        for episode in spread(ranked, MAX_EPISODES // len(steps)):
            chosen.append((step, episode))
    return chosen


def spread(items, n):
    """Return n of the items at even distances, or all if there are fewer."""
    n = min(n, len(items))
    return [items[round(i * (len(items) - 1) / max(n - 1, 1))] for i in range(n)]


def load_tokenizer(record, given):
    """Return the given tokenizer, or that of the newest checkpoint or the first model, or None."""
    places = [record.path, record.path / "base", record.config.get("model_path")]
    if given:
        places = [given]
    for place in filter(None, places):
        for folder in filter(None, (newest_checkpoint(place), Path(place))):
            file = folder if folder.suffix == ".json" else folder / "tokenizer.json"
            if file.is_file():
                from tokenizers import Tokenizer
                with reading(file):
                    return Tokenizer.from_str(read_text(file, MAX_TOKENIZER))
    if given:
        raise UserError(f"--tokenizer {given}: no tokenizer.json there")
    record.notes.append(f"{record.path}: no tokenizer was found, so tokens are shown as numbers; "
                        "give --tokenizer FOLDER")


def token_texts(tokenizer, ids):
    """Return the text that each id adds, "·" where it only begins a character."""
    if tokenizer is None:
        return [f"{i} " for i in ids]
    from tokenizers.decoders import DecodeStream
    stream = DecodeStream(skip_special_tokens=False)
    return [stream.step(tokenizer, i) or "·" for i in ids]


def episode_html(episode, step, tokenizer, is_open):
    """Return one episode: a line to click, then its tokens, or its transcript if it has none."""
    question = ""
    for message in reversed(episode["messages"]):
        if message.get("role") == "user":
            question = str(message.get("content"))
    body = tokens_html(episode, tokenizer) or escape(transcript(episode))
    mark = "<b class=bad>✗ no success</b>"
    if episode["info"].get("success"):
        mark = "<b class=good>✓ success</b>"
    details = "<details open>" if is_open else "<details>"
    return (f"{details}<summary>{mark} <span>{escape(headline(episode, step))}</span><br>"
            f"{escape(textwrap.shorten(question, 120))}</summary><pre>{body}</pre></details>")


def headline(episode, step):
    words = [f"step {step}", f"reward {number(episode['reward'])}"]
    for name, reward in episode["reward_parts"].items():
        words.append(f"{name} {number(reward)}")
    words += [f"{episode['info']['tool_calls']} calls", str(episode.get("stop_reason")),
              f"{len(episode['token_ids'])} tokens"]
    return " · ".join(words[step < 0:])


def tokens_html(episode, tokenizer):
    """Return the tokens, coloured where they were sampled, and the reward behind each turn."""
    ids, mask, rewards = episode["token_ids"], episode["loss_mask"], iter(episode["rewards"])
    texts = token_texts(tokenizer, ids)
    spans = []
    for t, (token_id, text, logprob) in enumerate(zip(ids, texts, episode["logprobs"])):
        text = escape(text).replace("\n", "↵\n")
        if not mask[t]:
            spans.append(f'<i title="id {token_id}, not sampled">{text}</i>')
            continue
        p = math.exp(min(logprob, 0.0))
        level = sum(p < bound for bound in SURPRISE)
        title = f"id {token_id}, log-prob {logprob:.3f}, p {p:.3g}"
        spans.append(f'<i class=s{level} title="{title}">{text}</i>')
        if not any(mask[t + 1:t + 2]):
            spans.append(reward_html(next(rewards, None)))
    return "".join(spans)


def reward_html(reward):
    if reward is None:
        return ""
    if not reward:
        return "<b class=none>0</b>"
    return f"<b class={'good' if reward > 0 else 'bad'}>{reward:+.3g}</b>"
