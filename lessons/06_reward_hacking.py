"""Reward hacking: a reward that rises while the true success falls, and how it is mended.

    python lessons/06_reward_hacking.py --seed 0

The task is to solve an equation by tool calls, in at most MAX_TURNS turns, and to state the answer.
"The agent shall use its tools", so somebody pays for them. Two rewards:

    gamed      5 for every call that works                      + 5 for the right answer
    mended     2 for every step by which the equation comes
               closer to its solution than ever before          + 5 for the right answer

3x + 7 = 16 takes two calls and an answer: 15 by the first reward. Adding and subtracting until the
turns are used up is paid 40. The second pays each piece of progress once (a potential, in the words
of Ng, Harada and Russell 1999), so that a detour earns nothing.
"""
import argparse
from functools import partial

from picture import draw
from start import report, start_model

from core.data import collate, draw_tasks
from core.engine import make_engine
from core.logprobs import token_logprobs
from core.model import adamw, scheduled
from envs import Limits, recommended
from envs.tasks import drop_seen, load_tasks
from agent import evaluate, rollout
from lora import load_model

import torch
from torch.nn.utils import clip_grad_norm_

NAME, ENV = "06_reward_hacking", "equations"
STEPS = 12
TASKS, GROUP = 4, 8
UPDATES = 2
MAX_TURNS = 8  # room for detours: an equation takes at most three
CALL, ANSWER = 5.0, 5.0
CLIP_EPS = 0.2
LEARNING_RATE, MAX_GRAD_NORM, LORA_R = 6e-3, 0.05, 16
HELD_OUT = 40


# -------------------------------------------------------------------------------- the two rewards
def gamed(episode):
    """Pay for every call that works, whether or not it helps, and for the right answer."""
    calls = [message for message in episode.messages if message["role"] == "tool"
             and message["name"] != "state_answer" and not message["content"].startswith("error")]
    return CALL * len(calls) + ANSWER * episode.info["success"]


def mended(episode):
    """Pay what the environment does: new progress, and the right answer."""
    return episode.reward


REWARDS = {"gamed": gamed, "mended": mended}


# ---------------------------------------------------------------------------------------- the loop
def train(model, tokenizer, reward, tasks, steps, seed, limits):
    """Train by GRPO (lessons/02_grpo.py) on this reward; yield each step's numbers."""
    optimizer = adamw(model, lr=LEARNING_RATE)
    for step in range(steps):
        for param_group in optimizer.param_groups:
            param_group["lr"] = scheduled(LEARNING_RATE, step, steps)
        drawn = draw_tasks(tasks, seed, step, TASKS, 0, TASKS)
        episodes = rollout(model, tokenizer, ENV, drawn, GROUP, step=step, seed=seed,
                           limits=limits, engine=make_engine)
        token_ids, mask, old_logprobs = collate(episodes)  # (B, T) each
        rewards = torch.tensor([reward(t) for t in episodes])  # all that the update sees
        groups = rewards.view(TASKS, GROUP)
        std, mean = torch.std_mean(groups, 1, keepdim=True)
        advantages = ((groups - mean) / (std + 1e-4)).view(-1, 1) * mask  # (B, T)
        model.train()
        for _ in range(UPDATES):
            logprobs, _ = token_logprobs(model, token_ids, mask)  # (B, T)
            ratio = (logprobs - old_logprobs).exp()
            inside = ratio.clamp(1 - CLIP_EPS, 1 + CLIP_EPS)
            token_loss = -torch.min(ratio * advantages, inside * advantages)
            loss = (token_loss.sum(1) / mask.sum(1)).mean()
            loss.backward()
            clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            optimizer.zero_grad()
        n = len(episodes)
        yield {"reward": rewards.mean().item(),
               "success": sum(t.info["success"] for t in episodes) / n,  # nobody is paid for it
               "turns": sum(len(t.rewards) for t in episodes) / n}


def quarters(rows):
    """Return the means of each number over the four quarters of a run."""
    size = max(1, len(rows) // 4)
    parts = [rows[begin:begin + size] for begin in range(0, len(rows), size)]
    return [{key: sum(row[key] for row in part) / len(part) for key in part[0]} for part in parts]


def main(steps=STEPS, seed=0):
    """Train with each reward, show what to look at, and draw it."""
    tasks = load_tasks(ENV, "train", 10_000, seed)
    exam = drop_seen(load_tasks(ENV, "test", HELD_OUT, seed), tasks)
    limits = Limits(**recommended(ENV), max_turns=MAX_TURNS)
    examine = partial(evaluate, env_name=ENV, tasks=exam, limits=limits, seed=seed,
                      engine=make_engine)
    print(f"\nThe same model learns from two rewards, {steps} steps each; means over a quarter of "
          "them.\nWatch reward and success together: the reward alone says that both runs work.\n")
    print("reward   quarter   reward  success  turns")
    runs, before, after = {}, {}, {}
    for name, reward in REWARDS.items():
        model, tokenizer = load_model(start_model(), lora_r=LORA_R, seed=seed)
        before[name] = examine(model, tokenizer)["success"]
        runs[name] = list(train(model, tokenizer, reward, tasks, steps, seed, limits))
        for number, row in enumerate(quarters(runs[name]), 1):
            print(f"{name:8} {number:7} {row['reward']:8.2f} {row['success']:8.2f} "
                  f"{row['turns']:6.2f}", flush=True)
        after[name] = examine(model, tokenizer)["success"]
    print()
    is_gamed = []
    for name, rows in runs.items():
        first, last = quarters(rows)[0], quarters(rows)[-1]
        if last["reward"] > first["reward"] and last["success"] < first["success"]:
            is_gamed.append(name)
        print(f"{name}: reward {first['reward']:.1f} to {last['reward']:.1f}, success "
              f"{first['success']:.2f} to {last['success']:.2f}; on {len(exam)} held-out equations "
              f"{before[name]:.2f} to {after[name]:.2f}.")
    print(f"The reward rose while the success fell: {' and '.join(is_gamed) or 'in no run'}.\n")
    numbers = range(1, steps + 1)
    draw(NAME, *({"title": title, "x": "step", "y": label, "curves": {
        name: (numbers, [row[key] for row in rows]) for name, rows in runs.items()}}
        for key, title, label in (("reward", "what is paid", "reward of an episode"),
                                  ("success", "what was meant", "share truly solved"))))
    report(NAME, seed, steps=steps, before=before, after=after, runs=runs)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
