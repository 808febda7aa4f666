"""Several updates on the same episodes: the ratio, its clip, and old episodes.

    python lessons/03_clipping_and_staleness.py --seed 0

Episodes are expensive and updates are cheap, so one updates several times on a batch.
After the first update the policy is no longer the one that sampled the batch, and PPO
(arXiv 1707.06347) does two things about it:

    ratio = pi(token) / pi_old(token)               counts a token as often as pi samples it
    -min(ratio A, clip(ratio, 1 - eps, 1 + eps) A)  no gain from moving it further than eps

Four runs: with and without the clip, on the newest batch and on one played AGE steps
earlier. A fifth one has the clip and twice the learning rate.
"""
import argparse
from collections import deque

from picture import draw
from start import report, start_model

from core.data import collate, draw_tasks
from core.engine import make_engine
from core.logprobs import token_logprobs
from core.model import adamw
from envs import Limits, recommended
from envs.tasks import load_tasks
from agent import rollout
from lora import load_model, merged_to_train

import torch

NAME, ENV = "03_clipping_and_staleness", "equations"
STEPS = 9
TASKS, GROUP = 2, 8
UPDATES = 4  # on each batch; grpo.py's default for the tiny model is 2
AGE = 4  # steps between playing a batch and training on it, in the runs on old episodes
CLIP_EPS = 0.2
LEARNING_RATE, LORA_R = 2e-3, 16  # half of grpo.py's, for twice the updates
# Of each run: is there a clip, the age of its batches, and its learning rate.
RUNS = {"clip, new": (True, 0, LEARNING_RATE), "no clip, new": (False, 0, LEARNING_RATE),
        "clip, old": (True, AGE, LEARNING_RATE), "no clip, old": (False, AGE, LEARNING_RATE),
        "clip, 2 x rate": (True, 0, 2 * LEARNING_RATE)}


# --------------------------------------------------------------------- the one equation
def surrogate(logprobs, old_logprobs, advantages, clip):
    """Return the loss of each token and its ratio, (B, T) each.

    Beyond the clip the gradient is 0, but only on the side to which A pulls: a token
    that has become too likely although A < 0 is still brought back.
    """
    ratio = (logprobs - old_logprobs).exp()
    if not clip:
        return -ratio * advantages, ratio
    inside = ratio.clamp(1 - CLIP_EPS, 1 + CLIP_EPS)
    return -torch.min(ratio * advantages, inside * advantages), ratio


def collect(model, tokenizer, tasks, seed, step):
    """Play a step's groups. Return tensors to learn from, mean reward and success."""
    drawn = draw_tasks(tasks, seed, step, TASKS, 0, TASKS)
    episodes = rollout(model, tokenizer, ENV, drawn, GROUP, limits=Limits(**recommended(ENV)),
                       seed=seed, step=step, engine=make_engine)
    token_ids, mask, old_logprobs = collate(episodes)  # (B, T) each
    rewards = torch.tensor([t.reward for t in episodes]).view(TASKS, GROUP)
    std, mean = torch.std_mean(rewards, 1, keepdim=True)
    advantages = ((rewards - mean) / (std + 1e-4)).view(-1, 1) * mask  # (B, T)
    success = sum(t.info["success"] for t in episodes) / len(episodes)
    return (token_ids, mask, old_logprobs, advantages), rewards.mean().item(), success


def forward(model, token_ids, mask):
    """Return log-probs and entropy, (B, T) each. A group's prompt is forwarded once."""
    parts = [token_logprobs(model, token_ids[first:first + GROUP], mask[first:first + GROUP])
             for first in range(0, len(mask), GROUP)]
    return [torch.cat(tensors) for tensors in zip(*parts)]


def train(clip, age, learning_rate, steps, seed):
    """Train a fresh adapter. Return a row for each step, and the last ratios (n,)."""
    model, tokenizer = load_model(start_model(), lora_r=LORA_R, seed=seed)
    tasks = load_tasks(ENV, "train", 10_000, seed)
    optimizer = adamw(model, lr=learning_rate)
    # These batches wait before the first update. Each batch is trained on once.
    batches = deque(collect(model, tokenizer, tasks, seed, step)[0] for step in range(age))
    rows = []
    for step in range(age, age + steps):
        batch, reward, success = collect(model, tokenizer, tasks, seed, step)
        batches.append(batch)
        token_ids, mask, old_logprobs, advantages = batches.popleft()  # played `age` steps ago
        sampled = mask.bool()
        for update in range(UPDATES):
            with merged_to_train(model):  # the very weights that sample
                logprobs, entropy = forward(model, token_ids, mask)  # (B, T) each
                token_loss, ratio = surrogate(logprobs, old_logprobs, advantages, clip)
                loss = (token_loss.sum(1) / mask.sum(1)).mean()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if update == 0:
                before = outside(ratio.detach()[sampled])
        ratios = ratio.detach()[sampled]  # (n,)
        rows.append({"reward": reward, "success": success,
                     "outside_before": before, "outside": outside(ratios),
                     "largest": ratios.max().item(),
                     "entropy": entropy[sampled].mean().item()})
    return rows, ratios


def outside(ratios) -> float:
    """Return the share of ratios outside the clip's range."""
    return ((ratios - 1).abs() > CLIP_EPS).float().mean().item()


def histogram(ratios, bins=24):
    """Return the middles of bins of log10(ratio), and the share of tokens in each."""
    counts = torch.histc(ratios.clamp(1e-3, 1e3).log10(), bins, -3, 3)
    width = 6 / bins
    return [-3 + width * (i + 0.5) for i in range(bins)], (counts / len(ratios)).tolist()


def main(steps=STEPS, seed=0):
    """Train five times, show what to look at, and draw it."""
    print(f"\nFive runs of {steps} steps, {UPDATES} updates each. Compare the success of the last "
          "steps with\nhow far the ratios went. 'Outside' is the share of tokens outside the "
          "clip's\nrange, before a step's first update and at its last one.\n")
    print("run             steps  success   outside: before  last largest ratio entropy")
    runs, shapes, third = {}, {}, max(1, steps // 3)
    for name, settings in RUNS.items():
        rows, ratios = train(*settings, steps, seed)
        runs[name], shapes[name] = rows, histogram(ratios)
        for begin in range(0, steps, third):
            part = rows[begin:begin + third]
            mean = {key: sum(row[key] for row in part) / len(part) for key in part[0]}
            largest = max(row["largest"] for row in part)
            print(f"{name:14} {begin + 1:2} to {begin + len(part):2} {mean['success']:8.2f} "
                  f"{mean['outside_before']:17.2f} {mean['outside']:5.2f} {largest:13.4g} "
                  f"{mean['entropy']:7.3f}", flush=True)
    final = {name: sum(row["success"] for row in rows[-third:]) / third
             for name, rows in runs.items()}
    largest = {name: max(row["largest"] for row in rows) for name, rows in runs.items()}
    print()
    for label in ("new", "old"):
        gain = final[f"clip, {label}"] - final[f"no clip, {label}"]
        print(f"On {label} episodes the clip changed the success of the last {third} steps by "
              f"{gain:+.2f}.\nThe largest ratio was {largest[f'clip, {label}']:.3g} with it and "
              f"{largest[f'no clip, {label}']:.3g} without.")
    print(f"With the clip and twice the learning rate the success was "
          f"{final['clip, 2 x rate']:.2f}.\n")
    numbers = range(1, steps + 1)
    draw(NAME, {"title": "success", "x": "step", "y": "share of episodes", "curves": {
        name: (numbers, [row["success"] for row in rows]) for name, rows in runs.items()}},
        {"title": "ratios at the last update", "x": "log10 of the ratio", "y": "share of tokens",
         "log": "y", "curves": shapes})
    report(NAME, seed, {"success": final}, steps=steps, largest=largest, runs=runs)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
