"""Episodes that a run prints: one now and then (--show_every), and one task before and after."""
import textwrap
from itertools import takewhile, zip_longest

from envs.transcripts import beginning, message_lines, transcript

COLUMNS = 79  # of a terminal
COLUMN = 38  # the width of one of two episodes
MAX_LINES = 40  # of a column
KEPT = 8  # held-out tasks of which one is shown


def is_evaluation(trajectories: list) -> bool:
    """True if these episodes are those of `agent.evaluate`, which plays them as step -1."""
    return bool(trajectories) and trajectories[0].group_id.startswith("-1-")


def chosen(before: list[dict], after: list[dict]):
    """Return (words on a task, its episode before, that after), or None if nothing was played.

    It is the first task that is solved only now, or else the first one. The same seed samples both
    episodes. Where no episode was played before training, there is None.
    """
    earlier = {episode["group_id"]: episode for episode in before}
    pairs = [(f"held-out task {number}", earlier.get(episode["group_id"]), episode)
             for number, episode in enumerate(after, 1)]
    for words, old, new in pairs:
        if old and new["info"]["success"] > old["info"]["success"]:
            return f"{words}, of {len(pairs)} the first that is solved only now", old, new
    return pairs[0] if pairs else None


def side_by_side(words: str, before: dict | None, after: dict) -> str:
    """Return two episodes of a task beside each other, or only the later one."""
    prompt = [*takewhile(lambda message: message["role"] != "assistant", after["messages"])]
    question = message_lines(prompt)[-1:] or [""]
    lines = ["", words, *textwrap.wrap(beginning(question[0], 400), COLUMNS)]
    if not before:
        return "\n".join(lines + column("after", after, len(prompt), COLUMNS))
    left, right = (column(when, episode, len(prompt), COLUMN)
                   for when, episode in (("before", before), ("after", after)))
    for old, new in zip_longest(left, right, fillvalue=""):
        lines.append(f"{old:{COLUMN}} | {new}".rstrip())
    return "\n".join(lines)


def column(when, episode, start, width):
    """Return the lines of an episode's messages from number `start` on, and what came of it."""
    solved = "solved" if episode["info"]["success"] else "not solved"
    lines = [f"{when}: {solved}, reward {episode['reward']:.3g}", "-" * width]
    for line in message_lines(episode["messages"][start:]):
        line = line.removeprefix("Assistant: ").rstrip()
        for part in line.splitlines():
            lines += textwrap.wrap(part, width, subsequent_indent="  ")
    lines.append(f"[{episode['stop_reason']}]")
    return lines if len(lines) <= MAX_LINES else [*lines[:MAX_LINES - 1], "..."]


def whole(trajectory, advantages=None) -> str:
    """Return an episode as lines, with the advantages (T,) of its turns if there are any."""
    lines = transcript(trajectory.to_json()).splitlines()
    text = "\n".join(textwrap.fill(line, COLUMNS, subsequent_indent="  ") for line in lines)
    if advantages is None:
        return text
    mask = trajectory.loss_mask
    firsts = [t for t, m in enumerate(mask) if m and not mask[t - 1]]
    values = [f"{advantages[t]:+.3g}" for t in firsts]
    # Most credits give all turns the same.
    return f"{text}\nadvantage {', '.join(values if len(set(values)) > 1 else values[:1])}"
