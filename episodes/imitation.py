"""What sft.py learns from, and the tasks that it is tested on.

    demonstrations  the episodes to imitate, and held-out ones
    held_out_tasks  what the model shall do by itself afterwards
"""
import math
import sys
from dataclasses import replace
from operator import attrgetter

import envs
from episodes.demonstrations import (Encoder, describe, imitates_rows, read_demonstrations,
                                 read_trajectories)
from episodes.expert import demonstrate
from episodes.tasks import (drop_seen, first_row, is_held_out, is_task, load_tasks, tasks_of,
                            unseen)
from experiment.errors import UserError
from experiment.seeds import mix, shuffled
from llm.batches import prompt_of

HELD_OUT = 100  # demonstrations, at most, whose loss is measured


def demonstrations(config, tokenizer, vocabulary: int):
    """Return the episodes to imitate and the held-out ones.

    They are recorded (--trajectories), the rows of a file (--dataset), or played by the
    environment's scripted expert. Those longer than max_tokens are dropped and counted.
    """
    if config.trajectories:
        learned, held_out = read_recorded(config, tokenizer, vocabulary)
    elif imitates_rows(config.dataset, config.env):
        learned, held_out = encode_rows(config, tokenizer)
    else:
        learned = play_expert(config, tokenizer, "train", config.max_samples)
        held_out = play_expert(config, tokenizer, "test", HELD_OUT, tasks_of(learned))
    learned = drop_long(learned, config.max_tokens)
    if not learned:
        source = config.trajectories or config.dataset or config.env
        condition = "" if config.min_reward is None else f"of reward {config.min_reward} or more "
        raise UserError(f"no episodes to imitate: {source} has none {condition}within "
                        f"{config.max_tokens} tokens")
    return learned, drop_long(held_out, config.max_tokens)


def read_recorded(config, tokenizer, vocabulary):
    """Return the episodes of --trajectories of at least --min_reward, and the held-out ones."""
    def read(path):
        episodes = read_trajectories(path, tokenizer, vocabulary)
        floor = -math.inf if config.min_reward is None else config.min_reward
        return [t for t in episodes if 1 in t.loss_mask and t.reward >= floor]

    def task(t):
        return [t.info.get("task"), prompt_of(t)]

    # With --dataset, both files of data are tasks of the evaluation, not episodes.
    eval_path = None if config.dataset else config.eval_dataset
    learned, held_out = read_split(read, config.trajectories, eval_path, task, config)
    print(f"{config.trajectories}: {len(learned)} episodes to learn from, {len(held_out)} held out")
    return learned, held_out


def encode_rows(config, tokenizer):
    """Return the rows of --dataset as episodes, and held-out ones: --eval_dataset or a tenth."""
    learned, held_out = read_split(read_demonstrations, config.dataset, config.eval_dataset,
                                   attrgetter("row"), config)
    describe(learned, tokenizer)
    encode = Encoder(tokenizer, config.env)
    return list(map(encode, learned)), list(map(encode, held_out))


def read_split(read, path, eval_path, content, config):
    """Return at most max_samples items to learn from and HELD_OUT others, in random order.

    No content is in both.

    Args:
        read: a function: the items of a file.
        path: the file to learn from.
        eval_path: the file to hold out, or None: a tenth of `path`, by the hash of the content.
        content: a function: what makes an item the same as another, as JSON can write it.
        config: its max_samples and seed are read.
    """
    items = read(path)
    if eval_path:
        learned, held_out = items, unseen(read(eval_path), items, content)
    else:
        held_out = [item for item in items if is_held_out(content(item))]
        learned = [item for item in items if not is_held_out(content(item))]
        if not learned:
            # One or two rows may all be in that tenth.
            learned, held_out = held_out, []
    return (shuffled(learned, config.seed)[:config.max_samples],
            shuffled(held_out, config.seed)[:HELD_OUT])


def play_expert(config, tokenizer, split_name, n, seen=()):
    """Return episodes of the scripted expert; a share --expert_noise of its actions is wrong.

    No episode is of a task in `seen`.
    """
    tasks = load_tasks(config.env, split_name, n, config.seed, config.dataset, config.eval_dataset)
    tasks = drop_seen(tasks, seen)
    if config.dataset:
        print(f"{config.dataset}: {len(tasks)} tasks for the expert of {config.env} ({split_name})")
    tasks = [{**task, "noise": config.expert_noise, "noise_seed": mix(config.seed, split_name, i)}
             for i, task in enumerate(tasks)]
    # An expert plays to the end: a longer episode than max_tokens is to be dropped, not cut.
    limits = replace(envs.limits_of(config, config.env), max_tokens=sys.maxsize)
    return demonstrate(tokenizer, config.env, tasks, limits)


def drop_long(episodes, max_tokens):
    """Return the episodes of at most max_tokens tokens, and print how many were dropped."""
    short = [t for t in episodes if len(t.token_ids) <= max_tokens]
    if len(short) < len(episodes):
        print(f"{len(episodes) - len(short)} of {len(episodes)} episodes exceed {max_tokens} "
              "tokens: dropped")
    return short


def held_out_tasks(config, env, learned) -> list[dict]:
    """Return the evaluation's tasks, without those of the training data.

    There are none without an environment or with --eval_tasks 0.
    """
    if not config.eval_tasks or not env:
        return []
    files = (config.dataset, config.eval_dataset) if config.dataset else ()
    are_imitated = not config.trajectories and imitates_rows(config.dataset, config.env)
    if are_imitated and not is_task(env, first_row(config.dataset)[0]):
        # Files of demonstrations hold no tasks: take the environment's own.
        files = ()
    tasks = load_tasks(env, "test", config.eval_tasks, config.seed, *files)
    return drop_seen(tasks, tasks_of(learned))
