"""REINFORCE: the plainest policy gradient, and its baseline.

    python lessons/01_reinforce.py --seed 0

    gradient of E[R] = E[ (R - b) x sum over sampled tokens of grad log pi(token | text) ]

R is the reward of an episode. b is any number that does not depend on this episode. It
leaves the expected gradient as it is and changes its variance. Part 2 measures in which
direction.

Three parts: which tokens count, how noisy the gradient is, and what the noise does to
learning.
"""
import argparse

from picture import draw
from start import report, start_model

from core.data import collate, draw_tasks
from core.engine import make_engine
from core.logprobs import token_logprobs
from core.model import adamw
from envs import Limits, recommended
from envs.tasks import load_tasks
from agent import rollout
from lora import load_model

import torch

NAME, ENV = "01_reinforce", "equations"
STEPS = 16
TASKS, GROUP = 2, 8  # a step plays 2 equations, 8 episodes of each
NOISE_TASKS = 12  # equations, 8 episodes of each, to measure the variance on
LEARNING_RATE, LORA_R = 4e-3, 16


# ------------------------------------------------------------------------ the baselines
# A baseline takes the rewards (groups, GROUP) and returns b of each episode, of the
# same shape. An episode's own reward may not be in its b, or the mean of the gradient
# would change.
def no_baseline(rewards):
    """b = 0. No reward here is negative, so every sampled token's term pushes it up."""
    return torch.zeros_like(rewards)


def mean_of_others(rewards):
    """b = the mean reward of all other episodes of the step."""
    return (rewards.sum() - rewards) / (rewards.numel() - 1)


def mean_of_group(rewards):
    """b = the mean reward of the other episodes of the same equation, as in GRPO."""
    return (rewards.sum(1, keepdim=True) - rewards) / (rewards.shape[1] - 1)


BASELINES = {"none": no_baseline, "mean": mean_of_others, "group": mean_of_group}


# --------------------------------------------------------------------- the one equation
def reinforce_loss(logprobs, mask, weights):
    """- mean over episodes of weight x sum of log pi over the sampled tokens, a scalar.

    logprobs, mask: (B, T). weights: (B,), R - b. Its gradient is the formula at the
    top, negated.
    """
    return -(weights[:, None] * logprobs * mask).sum() / len(mask)


def play(model, tokenizer, tasks, seed, step):
    """Return episodes, GROUP of each task, and their rewards (tasks, GROUP)."""
    episodes = rollout(model, tokenizer, ENV, tasks, GROUP, limits=Limits(**recommended(ENV)),
                       seed=seed, step=step, engine=make_engine)
    return episodes, torch.tensor([t.reward for t in episodes]).view(-1, GROUP)


# ---------------------------------------------------------------------- the three parts
def show_mask(tokenizer, episode):
    """Print an episode's tokens. Between >>> and <<< stands what the policy sampled."""
    text, before = "", 0
    for token, sampled in zip(episode.token_ids, episode.loss_mask):
        text += {1: ">>>", -1: "<<<"}.get(sampled - before, "") + tokenizer.decode([token])
        before = sampled
    text += "<<<" * before
    print(text[text.index("<|im_start|>user"):])


def gradient_noise(model, tokenizer, tasks, seed):
    """Return {baseline: (variance of one episode's gradient, norm of the mean
    gradient)}.

    Beside the baselines stands "best", the constant with the least variance:
    differentiate E[(R - b)^2 |s|^2] by b, s being an episode's score. Also returns the
    mean reward, this b, and the share that the five longest scores have of all |s|^2.
    """
    episodes, rewards = play(model, tokenizer, tasks, seed, step=10_000)
    parameters = [p for p in model.parameters() if p.requires_grad]
    scores = []  # of each episode: grad of the sum of its log-probabilities, as one vector
    for episode in episodes:
        token_ids, mask, _ = collate([episode])
        logprobs, _ = token_logprobs(model, token_ids, mask)
        gradient = torch.autograd.grad((logprobs * mask).sum(), parameters)
        scores.append(torch.cat([g.flatten() for g in gradient]))
    scores = torch.stack(scores)  # (B, parameters)
    lengths = scores.pow(2).sum(1)  # (B,), |s|^2
    best = (rewards.flatten() * lengths).sum() / lengths.sum()
    values = {name: baseline(rewards) for name, baseline in BASELINES.items()} | {"best": best}
    noise = {}
    for name, value in values.items():
        gradients = (rewards - value).view(-1, 1) * scores
        noise[name] = gradients.var(0).sum().item(), gradients.mean(0).norm().item()
    longest = lengths.sort().values[-5:].sum() / lengths.sum()
    return noise, rewards.mean().item(), best.item(), longest.item()


def learn(baseline, tasks, steps, seed):
    """Train a fresh adapter; return the mean reward of each step's episodes."""
    model, tokenizer = load_model(start_model(), lora_r=LORA_R, seed=seed)
    optimizer = adamw(model, lr=LEARNING_RATE)
    curve = []
    for step in range(steps):
        drawn = draw_tasks(tasks, seed, step, TASKS, 0, TASKS)
        episodes, rewards = play(model, tokenizer, drawn, seed, step)
        token_ids, mask, _ = collate(episodes)  # (B, T) each
        logprobs, _ = token_logprobs(model, token_ids, mask)  # (B, T)
        loss = reinforce_loss(logprobs, mask, (rewards - baseline(rewards)).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        curve.append(rewards.mean().item())
    return curve


def main(steps=STEPS, seed=0):
    """Do the three parts, show what to look at, and draw the learning."""
    model, tokenizer = load_model(start_model(), lora_r=LORA_R, seed=seed)
    tasks = load_tasks(ENV, "train", 10_000, seed)

    print("\n1. An episode. Only what stands between >>> and <<< was chosen by the policy and\n"
          "   has a gradient. The rest is the prompt and the tool's answers.\n")
    [episode, *_], _ = play(model, tokenizer, tasks[:1], seed, step=10_001)
    show_mask(tokenizer, episode)
    sampled, length = sum(episode.loss_mask), len(episode.token_ids)
    print(f"\n   {sampled} of its {length} tokens were sampled; its reward is {episode.reward:g}.")

    print(f"\n2. The gradient of {NOISE_TASKS * GROUP} episodes of the same policy. No baseline "
          "changes the\n   expected gradient; the mean of so few episodes still contains noise. "
          "Does the\n   variance fall with every baseline?\n")
    print("baseline    variance of one episode's    relative    norm of the mean")
    noise, mean, best, longest = gradient_noise(model, tokenizer, tasks[-NOISE_TASKS:], seed)
    for name, (variance, norm) in noise.items():
        share = variance / noise["none"][0]
        print(f"{name:8} {variance:25.4g} {share:15.2f} {norm:16.3g}")
    print(f"\n   The mean reward is {mean:.2f}, and the best constant {best:.2f}. Five episodes "
          f"have {longest:.0%}\n   of all squared lengths: the noise is where tokens were rare.")

    print(f"\n3. Learning: the mean reward of the {TASKS * GROUP} episodes of a step.\n")
    curves = {name: learn(baseline, tasks, steps, seed) for name, baseline in BASELINES.items()}
    print("steps    " + "".join(f"{name:>10}" for name in curves))
    quarter = max(1, steps // 4)
    for first in range(0, steps, quarter):
        last = min(first + quarter, steps)
        means = [sum(curve[first:last]) / (last - first) for curve in curves.values()]
        print(f"{first + 1:3} to {last:<3}" + "".join(f"{mean:10.2f}" for mean in means))
    final = {name: sum(curve[-quarter:]) / quarter for name, curve in curves.items()}
    winner = max(final, key=final.get)
    left = {name: noise[name][0] / noise["none"][0] for name in ("mean", "group", "best")}
    print(f"\nThe mean as baseline left {left['mean']:.2f} of the variance, the group's mean "
          f"{left['group']:.2f},\nthe best constant {left['best']:.2f}.\n"
          f"Over the last {quarter} steps the highest reward was {final[winner]:.2f} ({winner}); "
          f"without\na baseline it was {final['none']:.2f}.\n")
    draw(NAME, {"title": "learning", "x": "step", "y": "mean reward", "curves": {
        name: (range(1, steps + 1), curve) for name, curve in curves.items()}})
    report(NAME, seed, {"variance_left": left, "final": final}, steps=steps, noise=noise,
           sampled_tokens=sampled, tokens=length, mean=mean, best=best, longest=longest,
           curves=curves)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
