"""GRPO on one page: a group of episodes is its own baseline (arXiv 2402.03300).

    python lessons/02_grpo.py --seed 0

A step plays each of 8 equations 8 times. An episode is good if it earned more than the
mean of its group. The loss pushes the tokens of good episodes up and those of the
others down. That is all.

It is grpo.py without its options. With the same settings both train the same adapter,
bit for bit:

    python grpo.py --model_path runs/lessons/start --kl_coef 0 --learning_rate 4e-3 \\
        --max_steps 20    without extras/
"""
import argparse

from picture import draw
from start import FOLDER, report, start_model

from core.data import collate, draw_tasks, pass_order
from core.engine import make_engine
from core.logprobs import token_logprobs
from core.model import adamw, save_model, scheduled
from envs import Limits, recommended
from envs.tasks import drop_seen, load_tasks
from agent import evaluate, rollout
from lora import load_model, merged_to_train

import torch
from torch.nn.utils import clip_grad_norm_

NAME, ENV = "02_grpo", "equations"
STEPS = 20
TASKS, GROUP = 8, 8  # a step plays 8 tasks, 8 episodes of each
UPDATES = 2  # passes over a step's episodes, an update each
MICRO_BATCH = 16  # episodes in one forward pass: memory only
CLIP_EPS = 0.2
LEARNING_RATE, MAX_GRAD_NORM, LORA_R = 4e-3, 0.05, 16
HELD_OUT = 100  # equations that are never trained on


# -------------------------------------------------------------------- the two equations
def group_advantages(rewards):
    """A_i = (r_i - its group's mean) / (its group's std + 1e-4), (groups, GROUP) each."""
    advantages = []
    for r in rewards:  # (GROUP,)
        r = r - r[0]  # the mean of equal numbers may be rounded
        advantages.append((r - r.mean()) / (r.std() + 1e-4))
    return torch.stack(advantages)


def clipped_loss(logprobs, old_logprobs, advantages):
    """-min(ratio A, clip(ratio, 1 - eps, 1 + eps) A) of each token, (b, T).

    The loss is PPO's (arXiv 1707.06347). ratio = pi(token) / pi_old(token), where pi_old
    is the policy that sampled the episode.
    """
    ratio = (logprobs - old_logprobs).exp()
    inside = ratio.clamp(1 - CLIP_EPS, 1 + CLIP_EPS)
    return -torch.min(ratio * advantages, inside * advantages), ratio


# ----------------------------------------------------------------------------- the loop
def train(model, tokenizer, tasks, steps, seed):
    """Sample groups, compare each episode with its group, update; yield the numbers."""
    optimizer = adamw(model, lr=LEARNING_RATE)
    options = {"limits": Limits(**recommended(ENV)), "seed": seed, "engine": make_engine}
    for step in range(steps):
        for param_group in optimizer.param_groups:
            param_group["lr"] = scheduled(LEARNING_RATE, step, steps)

        # 1. Rollout: GROUP episodes of each of TASKS equations, by the policy as it is
        # now.
        drawn = draw_tasks(tasks, seed, step, TASKS, 0, TASKS)
        episodes = rollout(model, tokenizer, ENV, drawn, GROUP, step=step, **options)
        batch = pass_order(episodes, MICRO_BATCH)  # still group after group
        # The mask is 1 where the policy sampled the token, and old_logprobs is 0 where
        # it is 0.
        token_ids, mask, old_logprobs = collate(batch, model.device)  # (B, T) each

        # 2. Advantages: one number for each episode, which all of its sampled tokens
        # get.
        rewards = torch.tensor([t.reward for t in batch]).view(TASKS, GROUP)
        by_group = group_advantages(rewards)
        advantages = by_group.view(-1, 1) * mask  # (B, T)
        taught = [i for i, a in enumerate(advantages) if a.any()]

        # 3. Update. The loss is a mean over the tokens of each episode, then over the
        # episodes.
        model.train()
        for update in range(UPDATES):
            ratios = []
            with merged_to_train(model):  # computes with the very weights that sample
                for first in range(0, len(taught), MICRO_BATCH):
                    rows = taught[first:first + MICRO_BATCH]  # b episodes
                    logprobs, _ = token_logprobs(model, token_ids[rows], mask[rows])  # (b, T)
                    token_loss, ratio = clipped_loss(
                        logprobs, old_logprobs[rows], advantages[rows])
                    loss = (token_loss.sum(1) / mask[rows].sum(1)).sum() / len(batch)
                    loss.backward()
                    ratios.append(ratio.detach()[mask[rows].bool()])
            grad_norm = clip_grad_norm_(model.parameters(), MAX_GRAD_NORM).item()
            if grad_norm:  # of 0, Adam would still repeat its last steps
                optimizer.step()
            optimizer.zero_grad()
        distance = (torch.cat(ratios or [torch.ones(1)]) - 1).abs()  # of the last update
        yield {"reward": rewards.mean().item(),
               "success": sum(t.info["success"] for t in batch) / len(batch),
               "silent": int((by_group == 0).all(1).sum()),
               "ratio_away": distance.mean().item(),
               "outside": (distance > CLIP_EPS).float().mean().item(), "grad_norm": grad_norm}


def main(steps=STEPS, seed=0):
    """Train, show what to look at, and draw it."""
    model, tokenizer = load_model(start_model(), lora_r=LORA_R, seed=seed)
    tasks = load_tasks(ENV, "train", 10_000, seed)
    held_out = drop_seen(load_tasks(ENV, "test", HELD_OUT, seed), tasks)
    exam = {"limits": Limits(**recommended(ENV)), "seed": seed, "engine": make_engine}
    before = evaluate(model, tokenizer, ENV, held_out, **exam)["success"]

    print(f"\nA step is {TASKS} groups of {GROUP} episodes. Watch the success, and the silent\n"
          "groups, whose rewards are all equal. The ratios are of the last of\n"
          f"{UPDATES} updates on the same episodes.\n")
    print("step   reward  success  silent groups  |ratio - 1|  outside clip  grad norm")
    log = []
    for step, row in enumerate(train(model, tokenizer, tasks, steps, seed), 1):
        log.append(row)
        if step == 1 or step % 3 == 0:
            print(f"{step:4} {row['reward']:8.2f} {row['success']:8.2f} {row['silent']:14} "
                  f"{row['ratio_away']:12.3f} {row['outside']:13.3f} {row['grad_norm']:10.4f}",
                  flush=True)
    save_model(model, FOLDER / NAME)
    after = evaluate(model, tokenizer, ENV, held_out, **exam)["success"]
    silent = sum(row["silent"] for row in log) / (steps * TASKS)
    verb = "rose" if after > before else "did not rise"
    print(f"\nSuccess on {len(held_out)} equations that were never trained on {verb}:\n"
          f"{before:.2f} before, {after:.2f} after. Of all groups {silent:.0%} were silent.\n")
    numbers = range(1, steps + 1)
    draw(NAME, {"title": "success", "x": "step", "y": "share of episodes", "curves": {
        "training": (numbers, [row["success"] for row in log]),
        "held out": ([1, steps], [before, after])}},
        {"title": "silent groups", "x": "step", "y": f"of {TASKS}", "curves": {
            "": (numbers, [row["silent"] for row in log])}})
    report(NAME, seed, {"before": before, "after": after, "silent": silent}, steps=steps,
           groups=TASKS, log=log)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
