"""An episode as lines for people to read, and texts that are cut to one line."""
import json

from core.config import printable


def message_lines(messages: list[dict]) -> list[str]:
    """Return messages as lines. Results follow their turn; those in a prompt have no reward."""
    lines, calls = [], []
    for message in messages:
        if message["role"] == "tool":
            is_read = calls and message.get("name") != ""
            call = _call_text(calls.pop(0)) if is_read else "unreadable call"
            lines.append(f"{call} -> {message['content']}   {round(message.get('reward', 0), 3):+}")
            continue
        calls = list(message.get("tool_calls") or [])
        if message["content"]:
            lines.append(f"{message['role'].capitalize()}: {message['content']}")
    return list(map(printable, lines))


def _call_text(call: dict) -> str:
    """Return a tool call as Python would write it, add_terms(terms="1")."""
    arguments = [f"{name}={json.dumps(value, ensure_ascii=False)}"
                 for name, value in call["arguments"].items()]
    return f"{call['name']}({', '.join(arguments)})"


def transcript(episode: dict) -> str:
    """Return the lines of an episode (a row of trajectories.jsonl), and how it ended."""
    end = (f"[{episode.get('stop_reason')}; success {episode['info'].get('success')}; "
           f"reward {episode['reward']:.2f}]")
    return "\n".join([*message_lines(episode["messages"]), printable(end)])


def beginning(text: str, limit: int) -> str:
    """Return the beginning of a text as one line of at most `limit` characters.

    It is cut at a space, but not in the first half: Chinese, Thai and paths have none.
    """
    text = " ".join(text.split())
    head = text[:limit - 5]
    return text if len(text) <= limit else head[:head.rfind(" ", limit // 2)] + " [...]"
