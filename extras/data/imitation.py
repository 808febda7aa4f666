"""What sft.py learns from, and the tasks that it is tested on.

    read_dataset      the conversations of a file, to learn from and held out
    demonstrations    the episodes to imitate, and held-out ones
    evaluation_tasks  what the model shall do by itself afterwards
    demonstrate       environments' scripted experts play, as if a model had played
"""
import math
import sys
from dataclasses import replace
from functools import partial
from operator import attrgetter

from tqdm import tqdm

import envs
from agent import Episode, Trajectory, ends_on_fault, load_environments
from envs import Limits
from layers import sessions
from extras.data.demonstrations import (Encoder, count_control_tokens, read_demonstrations,
                                     read_trajectories)
from envs.tasks import drop_seen, tasks_for
from core.data import (is_held_out, print_dropped, prompt_of, shuffled, tasks_of, unseen,
                       without_faults, without_too_long)
from core.config import NO_BAR, UserError, mix

HELD_OUT = 100  # demonstrations, at most, whose loss is measured


# -------------------------------------------------------------------------- what sft.py learns from
def read_dataset(config) -> tuple[list, list]:
    """Return the conversations of --dataset to learn from and the held-out ones; [], [] without it.

    No model is needed, so that a bad row is refused before one is loaded.
    """
    if not config.dataset:
        return [], []
    read = partial(read_demonstrations, config=config)
    learned, held_out = read_split(read, config.dataset, attrgetter("row"), config)

    def content(conversation):
        """Return what is learned. Rows with an id of their own may say the same."""
        messages, row, _ = conversation
        return [messages, row.get("tools"), row.get("system")]

    return learned, unseen(held_out, learned, content)


def demonstrations(config, conversations, model, tokenizer):
    """Return the episodes to imitate and the held-out ones.

    They are recorded (--trajectories), the conversations of `read_dataset`, or played by the
    environment's scripted expert. Those longer than max_tokens are dropped and counted.
    """
    if config.trajectories:
        learned, held_out = read_recorded(config, model, tokenizer)
    elif config.dataset:
        learned, held_out = conversations
        count_control_tokens(learned, tokenizer)
        encode = Encoder(tokenizer, config)
        learned, held_out = list(map(encode, learned)), list(map(encode, held_out))
    else:
        learned = play_expert(config, tokenizer, "train", config.max_samples)
        held_out = play_expert(config, tokenizer, "test", HELD_OUT, tasks_of(learned))
        solved = sum(t.info["success"] for t in learned)
        print(f"of {len(learned)} tasks the expert solves {solved}")
    learned = drop_long(learned, config.max_tokens)
    held_out = drop_long(held_out, config.max_tokens)
    source = config.trajectories or config.dataset or config.tasks or config.env
    if not learned:
        condition = "" if config.min_reward is None else f"of reward {config.min_reward} or more "
        raise UserError(f"no episodes to imitate: {source:.200} has none {condition}within "
                        f"{config.max_tokens} tokens")
    print(f"{source:.200}: {len(learned)} demonstrations to learn from, {len(held_out)} held out")
    return learned, held_out


def read_recorded(config, model, tokenizer):
    """Return the episodes of --trajectories of at least --min_reward, and the held-out ones."""
    def read(path):
        episodes = read_trajectories(path, model, tokenizer)
        floor = -math.inf if config.min_reward is None else config.min_reward
        # In floating point 0.6 + 0.3 + 0.1 is below 1.
        return [t for t in episodes if 1 in t.loss_mask and t.reward >= floor - 1e-9]

    def task(t):
        return [t.info.get("task"), prompt_of(t)]

    return read_split(read, config.trajectories, task, config)


def read_split(read, path, content, config):
    """Return at most max_samples items to learn from and HELD_OUT others, in random order.

    No content is in both. Held out are the items of --eval_dataset, or a tenth by hash.

    Args:
        read: a function that returns the items of a file.
        path: the file to learn from.
        content: a function that returns what identifies an item, as a JSON value.
        config: its eval_dataset, max_samples and seed are read.
    """
    items = read(path)
    if config.eval_dataset:
        learned, held_out = items, unseen(read(config.eval_dataset), items, content)
    else:
        held_out = [item for item in items if is_held_out(content(item))]
        learned = [item for item in items if not is_held_out(content(item))]
        if not learned:
            # One or two rows may all be in that tenth.
            learned, held_out = held_out, []
    held_out = shuffled(held_out, config.seed)[:HELD_OUT]
    return draw(learned, config, "demonstrations"), held_out


def draw(items: list, config, name: str) -> list:
    """Return at most max_samples of the items in random order, and print how many were left out."""
    drawn = shuffled(items, config.seed)[:config.max_samples]
    print_dropped(items, drawn, f"{name} are not learned from: --max_samples")
    return drawn


def drop_long(episodes, max_tokens):
    """Return the episodes of at most max_tokens tokens, and print how many were dropped."""
    short = [t for t in episodes if len(t.token_ids) <= max_tokens]
    print_dropped(episodes, short, f"episodes exceed {max_tokens} tokens: dropped")
    return short


def evaluation_tasks(config, learned) -> list[dict]:
    """Return the tasks to evaluate on, without those of the training data.

    There are none without an environment or with --eval_tasks 0. Where other data is learned from,
    they are all rows of --tasks.
    """
    files = (None, config.tasks) if config.dataset or config.trajectories else None
    return drop_seen(tasks_for(config, "test", config.eval_tasks, files), tasks_of(learned))


# ------------------------------------------------------------------------------- scripted experts
def play_expert(config, tokenizer, split_name, n, seen=()):
    """Return episodes of the scripted expert; a share --expert_noise of its actions is wrong.

    No episode is of a task in `seen`.
    """
    tasks = tasks_for(config, split_name, n)
    tasks = [{**task, "noise": config.expert_noise, "noise_seed": mix(config.seed, split_name, i)}
             for i, task in enumerate(drop_seen(tasks, seen))]
    # An expert plays to the end: a longer episode than max_tokens is to be dropped, not cut.
    limits = replace(envs.limits_of(config), max_tokens=sys.maxsize)
    return demonstrate(tokenizer, config.env, tasks, limits, envs.options_of(config))


def demonstrate(tokenizer, env_name: str, tasks: list[dict],
                limits: Limits = Limits(), env_options: dict | None = None) -> list[Trajectory]:
    """Play the scripted experts. The episodes take the path of rollouts: the ids are the same."""
    envs.need_expert(env_name)
    classes, chats = load_environments(tokenizer, env_name, None, env_options)
    trajectories = []
    with sessions(limits) as new_session:
        for i, task in enumerate(tqdm(tasks, "demonstrations", disable=NO_BAR, leave=False)):
            name = task.get("env", env_name)
            session = new_session(name, classes[name], task)
            episode = Episode(session, chats[name], limits, str(i))
            while episode.can_take_turn:
                expert_turn(episode)
            trajectories.append(episode.trajectory)
    return without_faults(without_too_long(trajectories, limits))


@ends_on_fault
def expert_turn(episode: Episode):
    """Let the expert take a turn of the episode in the model's place."""
    text, calls = episode.session.expert()
    ids = episode.chat.turn(text, calls)
    episode.take_turn(ids, [0.0] * len(ids))
    if episode.calling:
        episode.take_results()
