"""The KL penalty: its estimators, their gradients, and what it does to training.

    python lessons/04_kl.py --seed 0

A policy that is trained for reward alone drifts from what it was. The penalty kl_coef x
KL(pi || ref) holds it near the reference, the policy that training started from. One
sampled token y tells of the KL only x = log [pi(y) / ref(y)], and there are several
ways to read it (joschu.net/blog/kl-approx):

    k1 = x    k2 = x^2 / 2    k3 = exp(-x) - 1 + x    k3_ratio = k3 x pi(y) / sg(pi(y))

sg is stop-gradient (`detach`): a factor of value 1 that has a gradient. As numbers the
estimators differ in bias and variance. As losses they differ in where their gradient
pulls. Both are exact here: the vocabulary has 1024 tokens, and the lesson sums over
every y that could be sampled. All of this is about one token, with the text before it
held fixed. The KL of whole episodes has one more term, because each token changes what
comes later.
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
from lora import load_model, merged_to_train, reference

import torch

NAME, ENV = "04_kl", "equations"
STEPS = 12
TASKS, GROUP, UPDATES = 2, 8, 2
COEFFICIENTS = (0.0, 0.1, 1.0)  # kl_coef of the three runs
CLIP_EPS = 0.2
LEARNING_RATE, LORA_R = 4e-3, 16


# ---------------------------------------------------------- one token of each estimator
# Of each estimator its value k(x), and the number that multiplies grad log pi(y).
ESTIMATORS = {
    "k1": (lambda x: x, lambda x: torch.ones_like(x)),
    "k2": (lambda x: x**2 / 2, lambda x: x),
    "k3": (lambda x: (-x).exp() - 1 + x, lambda x: 1 - (-x).exp()),
    "k3_ratio": (lambda x: (-x).exp() - 1 + x, lambda x: x),  # k3' + k3: the ratio has a gradient
}


def exact_kl(logp, ref_logp):
    """Return KL(pi || ref) at each of n places, (n, 1), of log-probabilities (n, V)."""
    return (logp.exp() * (logp - ref_logp)).sum(1, keepdim=True)


def compare(logp, ref_logp):
    """Return each estimator's bias and noise, and its gradient's size, cosine and noise.

    logp, ref_logp: (n, V), of every token that could have been sampled at n places of
    episodes. The gradient of log pi(y) by the logits is onehot(y) - pi, so the one that
    estimator k has on average is pi k' - pi sum(pi k'). That of the KL itself is pi x -
    pi KL.
    """
    pi, x = logp.exp(), logp - ref_logp
    kl = exact_kl(logp, ref_logp)
    exact = pi * (x - kl)  # (n, V)
    table = {}
    for name, (value, slope) in ESTIMATORS.items():
        k, d = value(x), slope(x)
        mean = (pi * k).sum(1, keepdim=True)
        gradient = pi * (d - (pi * d).sum(1, keepdim=True))  # its mean over y
        # E |k' (onehot - pi)|^2 = sum_y pi k'^2 (1 - 2 pi_y + |pi|^2)
        square = (pi * d**2 * (1 - 2 * pi + pi.pow(2).sum(1, keepdim=True))).sum(1)
        size = gradient.norm() / exact.norm()
        table[name] = {
            "bias": (mean - kl).mean().item(),
            "noise": (pi * (k - mean)**2).sum(1).mean().sqrt().item(),
            "size": size.item(),
            "cosine": (gradient * exact).sum().div(gradient.norm() * exact.norm() + 1e-30).item(),
            "gradient_noise": (square - gradient.pow(2).sum(1)).mean().clamp(min=0).sqrt().item()}
    return table


@torch.no_grad()
def distributions(model, token_ids, mask):
    """Return log pi and log ref of all V tokens where one was sampled, (n, V) each."""
    def all_logprobs():
        logits = model(input_ids=token_ids).logits[:, :-1]  # column t predicts token t + 1
        return logits[mask[:, 1:].bool()].double().log_softmax(-1)

    logp = all_logprobs()
    with reference(model, None):  # the adapter is off: the start model
        return logp, all_logprobs()


# ------------------------------------------------------------ training with the penalty
def forward(model, token_ids, mask):
    """Return log-probs and entropy, (B, T) each. A group's prompt is forwarded once."""
    parts = [token_logprobs(model, token_ids[first:first + GROUP], mask[first:first + GROUP])
             for first in range(0, len(mask), GROUP)]
    return [torch.cat(tensors) for tensors in zip(*parts)]


def train(kl_coef, steps, seed):
    """Train a fresh adapter. Return a row for each step, the model and the last batch."""
    model, tokenizer = load_model(start_model(), lora_r=LORA_R, seed=seed)
    tasks = load_tasks(ENV, "train", 10_000, seed)
    optimizer, rows = adamw(model, lr=LEARNING_RATE), []
    for step in range(steps):
        drawn = draw_tasks(tasks, seed, step, TASKS, 0, TASKS)
        episodes = rollout(model, tokenizer, ENV, drawn, GROUP, limits=Limits(**recommended(ENV)),
                           seed=seed, step=step, engine=make_engine)
        token_ids, mask, old_logprobs = collate(episodes)  # (B, T) each
        rewards = torch.tensor([t.reward for t in episodes]).view(TASKS, GROUP)
        std, mean = torch.std_mean(rewards, 1, keepdim=True)
        advantages = ((rewards - mean) / (std + 1e-4)).view(-1, 1) * mask  # (B, T)
        kl = exact_kl(*distributions(model, token_ids, mask)).mean().item()
        with torch.no_grad(), reference(model, None):
            ref_logprobs, _ = forward(model, token_ids, mask)
        for update in range(UPDATES):
            with merged_to_train(model):  # the very weights that sample
                logprobs, entropy = forward(model, token_ids, mask)  # (B, T) each
                ratio = (logprobs - old_logprobs).exp()
                inside = ratio.clamp(1 - CLIP_EPS, 1 + CLIP_EPS)
                x = logprobs - ref_logprobs  # 0 where the mask is 0
                k3 = (-x).exp() - 1 + x
                token_loss = kl_coef * k3 * ratio - torch.min(ratio * advantages,
                                                              inside * advantages)
                loss = (token_loss.sum(1) / mask.sum(1)).mean()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        rows.append({"success": sum(t.info["success"] for t in episodes) / len(episodes),
                     "reward": rewards.mean().item(), "kl": kl,
                     "entropy": (entropy.detach().sum() / mask.sum()).item()})
    return rows, model, (token_ids, mask)


def main(steps=STEPS, seed=0):
    """Train three times, compare the estimators on the last policy, and draw it."""
    print(f"\n1. GRPO with {len(COEFFICIENTS)} weights of the penalty. Watch the reward, and the\n"
          "   KL to the start model in nats per sampled token.\n")
    print("kl_coef   steps     reward   success       KL   entropy")
    runs, kept, third = {}, {}, max(1, steps // 3)
    for kl_coef in COEFFICIENTS:
        runs[kl_coef], *kept[kl_coef] = train(kl_coef, steps, seed)
        for begin in range(0, steps, third):
            part = runs[kl_coef][begin:begin + third]
            mean = {key: sum(row[key] for row in part) / len(part) for key in part[0]}
            print(f"{kl_coef:<8g} {begin + 1:2} to {begin + len(part):2} {mean['reward']:9.2f} "
                  f"{mean['success']:9.2f} {mean['kl']:8.3f} {mean['entropy']:9.3f}", flush=True)
    final = {kl_coef: {key: sum(row[key] for row in rows[-third:]) / third for key in rows[0]}
             for kl_coef, rows in runs.items()}

    model, (token_ids, mask) = kept[COEFFICIENTS[0]]
    policies = distributions(model, token_ids, mask)
    kl, table = exact_kl(*policies).mean().item(), compare(*policies)
    print(f"\n2. The estimators at {len(policies[0])} places of the first run's last batch; "
          f"the KL is {kl:.4f}.\n   Which are biased as a number, and which as a gradient?\n")
    print("            value: bias    noise    gradient: size   cosine with KL's    noise")
    for name, row in table.items():
        cosine = f"{row['cosine']:10.3f}" if row["size"] > 1e-6 else "      none"
        print(f"{name:10} {row['bias']:+13.4f} {row['noise']:8.3f} {row['size']:17.3f}  "
              f"{cosine} {row['gradient_noise']:16.3f}")
    low, high = (final[kl_coef] for kl_coef in (COEFFICIENTS[0], COEFFICIENTS[-1]))
    size = {name: row["size"] for name, row in table.items()}
    print(f"\nWith kl_coef {COEFFICIENTS[-1]:g} the KL of the last steps was {high['kl']:.3f} and "
          f"the reward {high['reward']:.2f};\nwithout a penalty they were {low['kl']:.3f} and "
          f"{low['reward']:.2f}. Of the KL's gradient k1 has\n{size['k1']:.1g} of the length, and "
          f"k3 {size['k3']:.2f} with the cosine {table['k3']['cosine']:.3f}.\n")
    numbers = range(1, steps + 1)
    panels = [{"title": title, "x": "step", "y": label, "curves": {
        f"kl_coef {kl_coef:g}": (numbers, [row[key] for row in rows])
        for kl_coef, rows in runs.items()}} for key, title, label in (
            ("reward", "reward", "mean reward"), ("kl", "distance from the start", "KL, nats"))]
    draw(NAME, *panels)
    report(NAME, seed, {key: {kl_coef: row[key] for kl_coef, row in final.items()}
                        for key in ("reward", "kl")},
           steps=steps, final=final, places_kl=kl, estimators=table, runs=runs)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
