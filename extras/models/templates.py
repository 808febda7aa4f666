"""Chat templates whose generation prompt opens a thought, or is switched by a message.

Importing this fills two tables of core/chat.py.
"""
from core.chat import FIRST_PROMPT, SEAMS
from core.config import say_once


def note_switch(chat, prompt: str):
    """Say so if this first prompt opens its turn in another way than later turns are opened.

    SmolLM3's and Nemotron's templates obey /no_think in a message. The prompts of later turns are
    cut out of a conversation that does not say it.
    """
    if not prompt.endswith(chat.opening):
        name = chat.tokenizer.name_or_path or "this tokenizer"
        say_once(f"note: the chat template of {name} opens the first turn in another way than "
                 f"those after it, {chat.opening.strip()!r}; what its messages switch, such as "
                 "/no_think, set for all turns at the top of chat_template.jinja: "
                 "{% set enable_thinking = false %}")


def join_thought(template, prompt_ids, turn_ids):
    """Return no ids of a prompt, and those of a turn as they continue the prompt_ids."""
    missing = template.decode(prompt_ids)
    # The prompt may end with "<think>\n" where the turn has "<think>\n\n": "\n\n" is one token.
    for end in range(len(missing.encode()) + 2):
        text = template.decode(turn_ids[:end])
        if text.startswith(missing):
            return [], template.encode(text[len(missing):]) + turn_ids[end:]
    # The template's own turns do not have a thought.
    if missing.strip() == "<think>":
        return [], template.encode("</think>\n\n") + turn_ids
    if missing.strip():
        raise ValueError("the chat template's assistant turns do not begin with its generation "
                         f"prompt: {missing!r}; where that closes a thought, put "
                         "{% set enable_thinking = true %} at its top")
    return [], turn_ids


FIRST_PROMPT.append(note_switch)
SEAMS.append(join_thought)
