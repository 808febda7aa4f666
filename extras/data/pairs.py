"""Pairs of a file: the chosen and the rejected conversation of each row, as episodes."""
from itertools import takewhile

from core.config import UserError, progress
from envs.prompts import as_messages
from envs.task_files import need, read_as
from core.data import print_dropped
from episodes import draw
from extras.data.demonstrations import (Conversation, Encoder, count_control_tokens, prompt_in,
                                        without_loss)
from extras.data.tables import need_text_row


def read_pairs(config) -> list[tuple]:
    """Return the pairs (chosen, rejected) of --dataset as conversations, at most max_samples.

    No model is needed. UserError: `FILE:LINE: what is wrong`.
    """
    pairs = list(read_as(config.dataset, preference, config.fields, config.seed))
    # Of a million pairs only those that are learned from become tokens.
    return draw(pairs, config, "pairs")


def encoded_pairs(pairs: list[tuple], config, tokenizer) -> list[tuple]:
    """Return pairs of conversations as pairs of episodes.

    The loss falls on what follows the prompt. Conversations without tools or system message get
    those of the environment. UserError: `FILE:LINE: what is wrong`, or that no pair is left.
    """
    encode = Encoder(tokenizer, config)
    count_control_tokens([chosen for chosen, _ in pairs], tokenizer)
    pairs = progress(pairs, "pairs")
    encoded = [(encode(chosen), encode(rejected)) for chosen, rejected in pairs]
    kept = [pair for pair in encoded if pair[0].token_ids != pair[1].token_ids]
    print_dropped(encoded, kept, "pairs have the same tokens on both sides: dropped")
    if not kept:
        raise UserError(f"{config.dataset:.200}: no pair is left to learn from")
    return kept


def preference(row: dict, place: str) -> tuple[Conversation, Conversation]:
    """Return the chosen and the rejected conversation of a row {"prompt", "chosen", "rejected"}.

    Each field is text, a message or a list of messages. The prompt may also be ShareGPT's
    "conversations" or Alpaca's "instruction". The messages with which both sides begin are the
    prompt where there is no other, and where it is a text beside whole conversations, as in TRL.
    Only what follows the prompt is learned. Raises ValueError in one line.
    """
    need_text_row(row)
    need(row, "chosen", "rejected", otherwise="write a row {prompt, chosen, rejected} for "
         "each pair, or name its columns: --fields chosen=good; tasks are given with --tasks")
    sides = [as_messages(row[name], name, "assistant") for name in ("chosen", "rejected")]
    if sides[0] == sides[1]:
        raise ValueError("chosen and rejected are the same: nothing to prefer")
    # The last message of a side is its answer.
    both = takewhile(lambda pair: pair[0] == pair[1], zip(*(side[:-1] for side in sides)))
    shared = [message for message, _ in both]
    prompt = prompt_in(row)
    # A side that does not begin with the answer is a whole conversation.
    is_whole = sides[0][0].get("role") != "assistant"
    if not prompt or is_whole and not isinstance(row.get("prompt"), list):
        prompt = shared
    if not prompt:
        raise ValueError('no "prompt" field, and chosen and rejected do not begin with the same '
                         "message; name its column: --fields prompt=question")
    conversations = []
    for side in sides:
        answer = side[len(prompt):] if side[:len(prompt)] == prompt else side
        conversations.append(Conversation(without_loss(prompt) + answer, row, place))
    return tuple(conversations)
