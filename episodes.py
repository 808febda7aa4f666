"""Recorded episodes: read, checked, split into what is learned and what is held out, and paired.

    read_trajectories  the episodes of a trajectories.jsonl
    read_split         the items of a file to learn from, and others that are held out
    make_pairs         the better and the worse of the episodes of a task
    split_pairs        which pairs dpo.py learns from, and which are held out
"""
import math
import os
import unicodedata
from collections import defaultdict
from itertools import combinations, takewhile

from agent import Trajectory
from core.config import UserError
from envs.task_files import are_held_out, need, read_as
from envs.tasks import unseen
from core.data import is_finite, print_dropped, prompt_of, shift_and_scale, shuffled, to_json

HELD_OUT = 100  # demonstrations, at most, whose loss is measured


# ----------------------------------------------------------------------------------------- reading
def read_trajectories(path: str, model=None, tokenizer=None) -> list[Trajectory]:
    """Return the episodes of a trajectories.jsonl. With a model, those of another are refused."""
    episodes = read_episodes(path)
    return checked(episodes, model, tokenizer) if model else list(episodes.values())


def read_episodes(path: str) -> dict[str, Trajectory]:
    """Return {FILE:LINE: episode} of a file, but for those whose environment failed."""
    def episode(row, place):
        need(row, "token_ids", otherwise="conversations and pairs are given with --dataset, tasks "
                                         "with --tasks")
        return place, trajectory_of(row)

    return {place: t for place, t in read_as(path, episode) if t.stop_reason != "error"}


def read_files(trajectories: str) -> list[dict[str, Trajectory]]:
    """Return `read_episodes` of each file of --trajectories ("a.jsonl,b.jsonl")."""
    paths = list(map(str.strip, trajectories.split(",")))
    if os.path.exists(trajectories):  # a file may have a comma in its name
        paths = [trajectories]
    if any("=" in path and not os.path.exists(path) for path in paths):
        raise UserError(f"--trajectories {trajectories}: all are paired; leave out shares")
    return list(map(read_episodes, paths))


def read_demonstrations(config, model, tokenizer) -> tuple[list, list]:
    """Return the episodes of --trajectories of at least --min_reward, and the held-out ones."""
    def read(path):
        episodes = read_trajectories(path, model, tokenizer)
        floor = -math.inf if config.min_reward is None else config.min_reward
        # In floating point 0.6 + 0.3 + 0.1 is below 1.
        return [t for t in episodes if 1 in t.loss_mask and t.reward >= floor - 1e-9]

    def content(t):
        return [t.info.get("task"), prompt_of(t)]

    return read_split(read, config.trajectories, content, config)


def trajectory_of(row: dict) -> Trajectory:
    """Return the episode in one parsed line of trajectories.jsonl, or raise ValueError."""
    try:
        # Other columns, such as the step that a run writes, are not the episode's.
        names = Trajectory.__dataclass_fields__.keys() & row.keys()
        trajectory = Trajectory(**{name: row[name] for name in names})
        wrong = problem(trajectory.to_json())
    except (TypeError, AttributeError) as error:
        wrong = str(error)
    if wrong:
        raise ValueError(f"not a trajectory: {wrong}")
    return trajectory


def problem(episode: dict) -> str | None:
    """Return why no algorithm may learn from an episode (agent.Trajectory as a dict), or None.

    Raises TypeError or AttributeError for a field of another type.
    """
    for name, kind in (("group_id", str | int), ("info", dict), ("messages", list)):
        if not isinstance(episode[name], kind):
            return f"{name} is a {type(episode[name]).__name__}"
    token_ids, loss_mask = episode["token_ids"], episode["loss_mask"]
    lengths = len(token_ids), len(loss_mask), len(episode["logprobs"])
    if not token_ids or len(set(lengths)) > 1:
        return f"token_ids, loss_mask, logprobs have lengths {lengths}"
    if not all(type(token) is int and token >= 0 for token in token_ids):
        return "token_ids must be integers >= 0"
    if not all(type(flag) is int and flag in (0, 1) for flag in loss_mask):
        return "loss_mask must be 0 or 1"
    if loss_mask[0] == 1:
        return "loss_mask[0] is 1, but nothing precedes the first token"
    numbers = [*episode["logprobs"], episode["reward"], *episode["rewards"],
               *episode["reward_parts"].values()]
    return None if all(map(is_finite, numbers)) else "logprobs and rewards must be finite numbers"


def checked(episodes: dict[str, Trajectory], model, tokenizer) -> list[Trajectory]:
    """Return the episodes of {FILE:LINE: episode}. UserError for one of another model.

    That is one with a token id outside of the model's vocabulary, or with tokens that do not spell
    the first question of the user.
    """
    vocabulary = model.get_input_embeddings().num_embeddings
    for place, t in episodes.items():
        questions = [str(m.get("content")) for m in t.messages if m.get("role") == "user"]
        if max(t.token_ids) >= vocabulary:
            raise UserError(f"{place}: token id {max(t.token_ids)} is not in this model's "
                            f"vocabulary of {vocabulary}: another model's episode")
        if questions and squeezed(questions[0]) not in squeezed(tokenizer.decode(t.token_ids)):
            raise UserError(f"{place}: the tokens do not spell the episode's messages: another "
                            "model's episode")
    return list(episodes.values())


def squeezed(text: str) -> str:
    """Return the text without what tokenizers may lose: white space, Unicode's compatible forms."""
    return unicodedata.normalize("NFKC", "".join(text.split()))


def read_split(read, path, content, config):
    """Return at most max_samples items to learn from and HELD_OUT others, in random order.

    No content is in both. Held out are the items of --eval_dataset, or a tenth.

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
        is_out = are_held_out(list(map(content, items)), f"{path:.200}")
        held_out = [item for item, out in zip(items, is_out) if out]
        learned = [item for item, out in zip(items, is_out) if not out]
    held_out = shuffled(held_out, config.seed)[:HELD_OUT]
    return draw(learned, config, "demonstrations"), held_out


def draw(items: list, config, name: str) -> list:
    """Return at most max_samples of the items in random order, and print how many were left out."""
    drawn = shuffled(items, config.seed)[:config.max_samples]
    print_dropped(items, drawn, f"{name} are not learned from: --max_samples")
    return drawn


# ------------------------------------------------------------------------------------------- pairs
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
    kept = draw(kept, config, "pairs")
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
    from envs.prompts import trl_message  # an environment, which only this file needs
    rows = []
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
    path = run.folder / "preference_pairs.json"
    run.ranks.first(lambda: path.write_text(to_json(rows, indent=1), "utf-8"))
