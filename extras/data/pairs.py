"""Pairs of episodes: read from a file, or made by comparing rewards; split by prompt; written.

    read_pairs   rows {"prompt", "chosen", "rejected"} of a file
    make_pairs   the better and the worse of the episodes of a task
    split_pairs  which pairs are learned from, and which are held out
"""
import math
from collections import defaultdict
from importlib import import_module
from itertools import combinations, takewhile

from tqdm import tqdm

from extras.data.demonstrations import (Conversation, Encoder, count_control_tokens, prompt_in,
                                     without_loss)
from core.data import (as_messages, need, print_dropped, prompt_of, read_as, shift_and_scale,
                       shuffled)
from core.config import NO_BAR, UserError
from extras.exact.files import write_json


# ----------------------------------------------------------------------------------------- reading
def read_pairs(config, tokenizer) -> list[tuple]:
    """Return the pairs (chosen, rejected) of --dataset as episodes.

    The loss falls on what follows the prompt. Conversations without tools or system message get
    those of the environment. UserError: `FILE:LINE: what is wrong`, or that no pair is left.
    """
    encode = Encoder(tokenizer, config)
    pairs = list(read_as(config.dataset, preference, config.fields, config.seed))
    # Of a million pairs only those that are learned from become tokens.
    pairs = draw(pairs, config)
    count_control_tokens([chosen for chosen, _ in pairs], tokenizer)
    pairs = tqdm(pairs, "pairs", disable=NO_BAR, leave=False, delay=2)
    encoded = [(encode(chosen), encode(rejected)) for chosen, rejected in pairs]
    kept = [pair for pair in encoded if pair[0].token_ids != pair[1].token_ids]
    print_dropped(encoded, kept, "pairs have the same tokens on both sides: dropped")
    if not kept:
        raise UserError(f"{config.dataset:.200}: no pair is left to learn from")
    return kept


def draw(pairs: list, config) -> list:
    """Return at most max_samples of the pairs in random order, and print how many were left out."""
    drawn = shuffled(pairs, config.seed)[:config.max_samples]
    print_dropped(pairs, drawn, "pairs are not learned from: --max_samples")
    return drawn


def preference(row: dict, place: str) -> tuple[Conversation, Conversation]:
    """Return the chosen and the rejected conversation of a row {"prompt", "chosen", "rejected"}.

    Each field is text, a message or a list of messages. The prompt may also be ShareGPT's
    "conversations" or Alpaca's "instruction". The messages with which both sides begin are the
    prompt where there is no other, and where it is a text beside whole conversations, as in TRL.
    Only what follows the prompt is learned. Raises ValueError in one line.
    """
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


# ---------------------------------------------------------------------------------------- episodes
def longer(pair):
    """Return the longer episode of a pair."""
    return max(pair, key=lambda t: len(t.token_ids))


def make_pairs(files, config) -> list[tuple]:
    """Return [(chosen, rejected)] of the episodes of every task.

    A task is a group_id within one file, and a prompt: DPO compares episodes of one prompt.

    Args:
        files: the episodes of each file.
        config: `pairs`, "best_worst" (of each task) or "all"; `min_gap`, by which the rewards of a
            pair differ at least; reward_bias and reward_scaling.

    Raises UserError, with the largest gap there is, if no two episodes differ enough.
    """
    groups = defaultdict(list)
    for number, episodes in enumerate(files):
        shift_and_scale(episodes, config)
        for t in episodes:
            if 1 in t.loss_mask:
                groups[number, t.group_id, tuple(prompt_of(t))].append(t)
    if max(map(len, groups.values()), default=0) < 2:
        raise UserError(f"{len(groups)} tasks, but no two episodes of one task: nothing to "
                        "compare; record some with agent.py --group_size 8")
    pairs, largest_gap = [], -math.inf
    for group in groups.values():
        group.sort(key=lambda t: -t.reward)
        best_worst = [(group[0], group[-1])]
        for chosen, rejected in combinations(group, 2) if config.pairs == "all" else best_worst:
            gap = chosen.reward - rejected.reward
            largest_gap = max(largest_gap, gap)
            if gap >= config.min_gap - 1e-9 and chosen.token_ids != rejected.token_ids:
                pairs.append((chosen, rejected))
    if not pairs:
        raise UserError(f"no pair: of {len(groups)} tasks' episodes no two differ by --min_gap "
                        f"{config.min_gap:g} in reward; the largest gap is {largest_gap:g}")
    return pairs


def split_pairs(pairs, config) -> tuple[list, list]:
    """Return the pairs to learn from and those held out, in random order. No prompt is in both.

    Pairs with an episode of more than max_tokens are dropped and counted. Raises UserError if none
    is left.
    """
    kept = [pair for pair in pairs if len(longer(pair).token_ids) <= config.max_tokens]
    if not kept:
        shortest = min(len(longer(pair).token_ids) for pair in pairs)
        raise UserError(f"no pair within --max_tokens {config.max_tokens}: the shortest has "
                        f"{shortest} tokens")
    print_dropped(pairs, kept, f"pairs exceed {config.max_tokens} tokens: dropped")
    kept = draw(kept, config)
    prompts = [tuple(prompt_of(chosen)) for chosen, _ in kept]
    distinct = list(dict.fromkeys(prompts))
    n = round(config.eval_share * (len(distinct) - 1))
    apart = set(shuffled(distinct, config.seed)[:n])
    learned, held_out = [], []
    for pair, prompt in zip(kept, prompts):
        (held_out if prompt in apart else learned).append(pair)
    print(f"pairs: {len(learned)} to train on, {len(held_out)} held out, "
          f"of {len(distinct)} prompts")
    return learned, held_out


def is_of_prompt(message: dict) -> bool:
    """True for what stands before the first turn that is learned."""
    return message["role"] != "assistant" or message.get("loss") == 0


def write_pairs(run, learned, held_out):
    """Write preference_pairs.json: the pairs in TRL's form, with the rewards they were made by."""
    rows, trl_message = [], import_module("extras.adapters.trl").trl_message
    for i, (chosen, rejected) in enumerate(learned + held_out):
        better, worse = (list(map(trl_message, t.messages)) for t in (chosen, rejected))
        prompt = list(takewhile(is_of_prompt, better))
        rows.append({
            "prompt": prompt,
            "chosen": better[len(prompt):],
            "rejected": worse[len(prompt):],
            "chosen_reward": chosen.reward,
            "rejected_reward": rejected.reward,
            "gap": chosen.reward - rejected.reward,
            "group_id": chosen.group_id,
            "held_out": i >= len(learned),
        })
    run.ranks.first(lambda: write_json(run.folder / "preference_pairs.json", rows))
