"""Rows of trajectories.jsonl: what is wrong with one, and one as text to read."""
from experiment.errors import printable

UNREADABLE = {"name": "unreadable call", "arguments": {}}


def message_lines(messages: list[dict]) -> list[str]:
    """Return the lines of some messages of an episode. A call and its result make one line.

    The results of a turn must stand in the list behind the turn that called.
    """
    lines = []
    calls = []
    for message in messages:
        content = message["content"]
        if message["role"] == "tool":
            call = calls.pop(0) if calls and message["name"] else UNREADABLE
            arguments = ", ".join(f"{name}={value}" for name, value in call["arguments"].items())
            reward = f"Reward: {message['reward']:.1f}"
            lines.append(f'Action: {call["name"]} -> {reward} -> "{content}"  ({arguments})')
            continue
        calls = list(message.get("tool_calls", []))
        if content:
            lines.append(f"{message['role'].capitalize()}: {content}")
    return [printable(line) for line in lines]


def transcript(episode: dict) -> str:
    """Return the lines of an episode, and how it ended. `episode` is a row of trajectories.jsonl."""
    info = episode["info"]
    end = f"{episode.get('stop_reason')}; success {info.get('success')}; reward {episode['reward']:.2f}"
    return "\n".join([*message_lines(episode["messages"]), printable(f"[{end}]")])


def problem(episode: dict) -> str | None:
    """Return why no algorithm may learn from this episode, or None. The fields are those of agent.Trajectory."""
    token_ids, loss_mask, logprobs = (episode[name] for name in ("token_ids", "loss_mask", "logprobs"))
    lengths = len(token_ids), len(loss_mask), len(logprobs)
    if not token_ids or len(set(lengths)) > 1:
        return f"token_ids, loss_mask, logprobs have lengths {lengths}"
    if not all(type(token) is int and token >= 0 for token in token_ids):
        return "token_ids must be integers >= 0"
    if not all(type(flag) is int and flag in (0, 1) for flag in loss_mask):
        return "loss_mask must be 0 or 1"
    if loss_mask[0] == 1:
        return "loss_mask[0] is 1, but nothing precedes the first token"
    if not all(map(is_finite, logprobs)):
        return "logprobs must be finite numbers"
    if not all(map(is_finite, [*episode["rewards"], episode["reward"], *episode["reward_parts"].values()])):
        return "rewards must be finite numbers"
    return None


def is_finite(number) -> bool:
    """True for a number that arithmetic does not overflow; False for NaN, for infinity and for what is no number."""
    return type(number) in (int, float) and -1e300 < number < 1e300
