"""Credit over turns: which turn of an episode deserves the reward? Three answers.

    python lessons/05_credit_over_turns.py --seed 0

An episode has several turns, and each turn may be paid: r_1 .. r_K. G episodes of one
task are a group. normalized(x) = (x - mean) / (std + 1e-4), over what stands beside it:

    episode   A_k = normalized(r_1 + .. + r_K)   over the episodes; the same for all turns
    turn      A_k = normalized(r_k + .. + r_K)   over turn k of all episodes
    process   A_k = n_k + .. + n_K               n = normalized(r) over all turns

The first is outcome supervision and the last process supervision of arXiv 2402.03300
(4.1.2 and 4.1.3). Part 1 is worked out by hand, part 2 judges real episodes with all
three, and in part 3 they teach policies of a few numbers, which takes seconds.
"""
import argparse
import random

from picture import draw
from start import report, start_model

from core.data import members
from core.engine import make_engine
from envs import Limits, recommended
from envs.tasks import load_tasks
from agent import rollout
from lora import load_model

import torch

NAME, ENV = "05_credit_over_turns", "equations"
STEPS = 60  # of the policies of part 3
TASKS, GROUP = 24, 8  # of part 2
CHAIN = 12  # turns of part 3's first game
LEARNING_RATE = 0.1


# ------------------------------------------------------------------ the three equations
def normalized(values):
    """(x - mean) / (std + 1e-4). Equal values, and a single one, get exactly 0."""
    x = torch.tensor(values, dtype=torch.float64)
    x = x - x[0]
    return ((x - x.mean()) / (x.std() + 1e-4)).tolist() if x.any() else [0.0] * len(values)


def episode_credit(group):
    """Give every turn what its episode earned, compared with the other episodes."""
    advantages = normalized([sum(rewards) for rewards in group])
    return [[a] * len(rewards) for a, rewards in zip(advantages, group)]


def turn_credit(group):
    """Compare what a turn and all later ones earned with the others at this turn."""
    credit = [[] for _ in group]
    for k in range(max(map(len, group))):
        there = [i for i, rewards in enumerate(group) if len(rewards) > k]
        for i, a in zip(there, normalized([sum(group[i][k:]) for i in there])):
            credit[i].append(a)
    return credit


def process_credit(group):
    """Normalize every turn's reward; give a turn the sum of its own and the later ones."""
    flat = iter(normalized([r for rewards in group for r in rewards]))
    by_episode = [[next(flat) for _ in rewards] for rewards in group]
    return [[sum(n[k:]) for k in range(len(n))] for n in by_episode]


CREDITS = {"episode": episode_credit, "turn": turn_credit, "process": process_credit}


# ---------------------------------------------------------------------- part 1: by hand
def by_hand():
    """Judge four right answers, after 1 to 4 turns, and four wrong ones, paid at the end."""
    group = [[0.0] * k + [right] for right in (1.0, 0.0) for k in range(4)]
    print("\n1. Eight episodes, paid 1 at the end if right: four right ones of 1, 2, 3 and 4\n"
          "   turns, and four wrong ones of the same lengths. What does the FIRST turn of\n"
          "   the right ones get?\n\ncredit      1 turn  2 turns  3 turns  4 turns")
    first = {}
    for name, credit in CREDITS.items():
        first[name] = [turns[0] for turns in credit(group)[:4]]
        print(f"{name:10}" + "".join(f"{a:8.2f} " for a in first[name]))
    price = first["process"][0] - first["process"][1]
    print(f"\n   With process credit each further turn costs {price:.2f}: an unpaid turn "
          f"has\n   n = (0 - mean) / std = {-price:.2f}, and all of them are added up.")
    return first


# ---------------------------------------------------- part 2: the same episodes, judged
def judge(seed):
    """Judge the turns of the start model's episodes by the three credits."""
    model, tokenizer = load_model(start_model(), train=False)
    tasks = load_tasks(ENV, "train", TASKS, seed)
    episodes = rollout(model, tokenizer, ENV, tasks, GROUP, limits=Limits(**recommended(ENV)),
                       seed=seed, engine=make_engine)
    groups = [[episodes[i].rewards for i in group]
              for group in members([t.group_id for t in episodes])]
    print(f"\n2. The same {len(episodes)} episodes of the start model, judged three times. A "
          "turn is paid\n   if the equation is closer to its solution than ever before, or if "
          "the right\n   answer is stated. We call such a turn useful. To undo a detour is no "
          "new\n   progress, and counts as useless. Look at the last two columns.\n\n"
          "credit    mean A: useful  useless   A < 0: useful   A > 0: useless")
    result = {}
    for name, credit in CREDITS.items():
        useful, useless = [], []
        for group in groups:
            for rewards, advantages in zip(group, credit(group)):
                for r, a in zip(rewards, advantages):
                    (useful if r > 0 else useless).append(a)
        blamed = sum(a < 0 for a in useful) / max(len(useful), 1)
        praised = sum(a > 0 for a in useless) / max(len(useless), 1)
        mean = [sum(x) / max(len(x), 1) for x in (useful, useless)]
        result[name] = {"useful": mean[0], "useless": mean[1], "blamed": blamed, "praised": praised}
        print(f"{name:10}{mean[0]:14.2f}{mean[1]:9.2f}{blamed:16.0%}{praised:17.0%}")
    wrong = {name: row["blamed"] + row["praised"] for name, row in result.items()}
    print(f"\n   {min(wrong, key=wrong.get)} credit has the fewest wrong signs here, and "
          f"{max(wrong, key=wrong.get)} credit the most.")
    return result


# ---------------------------------------------------- part 3: what each of them teaches
def play_chain(chances, rng):
    """Each of CHAIN turns is right or wrong, and paid 1 at once if right."""
    actions = [rng.random() < p for p in chances]
    return actions, [float(right) for right in actions]


def play_look(chances, rng):
    """Look three times and be right; or guess at once, right half of the time."""
    look = rng.random() < chances[0]
    return [look], [0.0, 0.0, 0.0, 1.0] if look else [float(rng.random() < 0.5)]


def teach(play, choices, credit, steps, seed):
    """Train one logit for each choice by policy gradient. Return each step's mean chance.

    Choice k is made in turn k and gets the advantage of that turn.
    """
    rng, logits = random.Random(seed), torch.zeros(choices, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=LEARNING_RATE)
    curve = []
    for _ in range(steps):
        chances = logits.detach().sigmoid()
        curve.append(round(chances.mean().item(), 4))
        actions, rewards = zip(*(play(chances.tolist(), rng) for _ in range(GROUP)))
        advantages = torch.tensor([turns[:choices] for turns in credit(rewards)])
        signs = 2.0 * torch.tensor(actions) - 1  # log pi = log sigmoid(x) if taken, else of -x
        loss = -(advantages * torch.nn.functional.logsigmoid(signs * logits)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return curve


def main(steps=STEPS, seed=0):
    """Show the three parts, and draw the third."""
    first, judged = by_hand(), judge(seed)
    games = {"paid in every turn": (play_chain, CHAIN), "paid at the end": (play_look, 1)}
    curves = {game: {name: teach(*played, credit, steps, seed) for name, credit in CREDITS.items()}
              for game, played in games.items()}
    print(f"\n3. Two games, {steps} steps of {GROUP} episodes. In the first, each of {CHAIN} "
          "turns is right\n   or wrong and paid at once. In the second one may look three times "
          "and then\n   be right, or guess and be right half of the time: looking is better. "
          "'To 0.9'\n   is the first step at which a turn of the first game is right with "
          "chance 0.9.\n\n"
          "credit    chance of a right turn, half time        to 0.9  chance to look, end")
    for name in CREDITS:
        chain, look = (curves[game][name] for game in games)
        reached = next((step for step, p in enumerate(chain, 1) if p >= 0.9), "never")
        print(f"{name:10}{chain[steps // 2]:34.2f}{reached:>14}{look[-1]:21.2f}")
    fell = [name for name in CREDITS if curves["paid at the end"][name][-1] < 0.5]
    print(f"\n   Learned to guess although looking is better: {', '.join(fell) or 'none'}.\n")
    draw(NAME, *({"title": game, "x": "step", "y": label, "dashed": ("turn",), "curves": {
        name: (range(1, steps + 1), curve) for name, curve in by_name.items()}}
        for (game, by_name), label in zip(curves.items(), ("chance of a right turn",
                                                           "chance to look first"))))
    report(NAME, seed, {"learned_to_guess": fell}, steps=steps, first=first, judged=judged,
           curves=curves)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
