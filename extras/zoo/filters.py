"""Which episodes teach nothing: the choices of --filter. A filter takes an episode (Trajectory)."""
from core.tool_calls import after_thought


def none(episode) -> bool:
    """Return False: every episode teaches."""
    return False


def truncated(episode) -> bool:
    """True if a limit of tokens cut the episode: what it was worth is not known.

    DAPO's overlong filter, arXiv 2503.14476 section 3.4; mask_truncated_completions of TRL, which
    looks at the last token. DAPO pays such an episode like any other failure in its group's mean.
    """
    return episode.truncated


def void(episode) -> bool:
    """True if a turn is neither a call nor an answer: SimpleTIR, arXiv 2509.02479.

    Such a turn was cut, is not readable as a call, or says nothing but its thought. The paper
    leaves the whole episode out of the policy's loss, because tokens after what the model did not
    expect are unlikely ones, whose gradients are large.
    """
    places = [i for i, message in enumerate(episode.messages) if message["role"] == "assistant"]
    for place in places[-len(episode.rewards):]:
        message, after = episode.messages[place], episode.messages[place + 1:place + 2]
        if message.get("tool_calls"):
            continue
        # An unreadable call is answered by an error of no tool.
        if any(reply["role"] == "tool" for reply in after) or not after_thought(
                message["content"]).strip():
            return True
    # A turn that was cut or malformed is the last message: nothing has answered it.
    last = episode.messages[-1]
    cut = episode.truncated or episode.stop_reason == "malformed"
    return cut and last["role"] == "assistant" and not last.get("tool_calls")


def both(episode) -> bool:
    """True if either holds."""
    return truncated(episode) or void(episode)


FILTERS = {filter.__name__: filter for filter in (none, truncated, void, both)}
