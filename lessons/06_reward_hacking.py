"""Reward design: three ways to pay an agent for its tool calls, and what they teach.

    python lessons/06_reward_hacking.py --seed 0

The policy of this lesson is a table of 12 probabilities, so that training takes
seconds. In each of 4 states (calls that are needed yet, 0 to 3) it chooses among 3
actions. The environment is the real one, and the advantages are those of
lessons/02_grpo.py.

The task is to solve an equation by tool calls in at most MAX_TURNS turns, and to state
the answer. Three rewards, all of which pay the right answer. 3x + 7 = 16 takes two
calls and an answer:

    paid       + 5 for every call that works           "the agent shall use its tools"
    charged    - 3 for every call that works           "the agent shall not waste calls"
    progress   + 2 for every step closer to the solution than the episode ever was

The policy starts as the tiny model does: most of its calls are wrong.
"""
import argparse
import random
import textwrap

from picture import draw
from start import report

from envs.equations import INVERSE, Equations
from envs.tasks import load_tasks

import torch

NAME = "06_reward_hacking"
STEPS = 60
TASKS, GROUP = 8, 8
MAX_TURNS = 8  # room for detours
ANSWER, PAY, CHARGE = 5.0, 5.0, 3.0
LEARNING_RATE = 0.1
ACTIONS = ("help", "detour", "answer")
# The chances of the actions at the start, where it is solved and where it is not.
SOLVED, UNSOLVED = (0.0, 0.1, 0.9), (0.4, 0.55, 0.05)


# -------------------------------------------------------------------- the three rewards
def paid(episode):
    """Pay for every call that works, whether or not it helps."""
    return PAY * episode["calls"] + ANSWER * episode["success"]


def charged(episode):
    """Charge for every call that works."""
    return -CHARGE * episode["calls"] + ANSWER * episode["success"]


def progress(episode):
    """Pay what cannot be repeated: the best that the episode has reached so far."""
    return episode["progress"] + ANSWER * episode["success"]


REWARDS = {"paid": paid, "charged": charged, "progress": progress}


# ---------------------------------------------------------------- playing, with a table
def call_of(env, action):
    """Return the tool, and its argument, that is this action in the state of env."""
    best = env._best_call()  # the scripted expert's
    name, value = best["name"], next(iter(best["arguments"].values()))
    if action == "answer":
        return "state_answer", value  # right only if the equation is solved
    if name == "state_answer":
        return "add_terms", "3"  # it is solved already: nothing helps
    return (name if action == "help" else INVERSE[name]), value


def play(task, logits, rng):
    """Play an episode; return what rewards may look at, and its (state, action) pairs."""
    env, choices, calls, text = Equations(), [], 0, []
    env.reset(**task)
    chances = logits.softmax(1).tolist()
    for _ in range(MAX_TURNS):
        state = env._distance()
        action = rng.choices(range(len(ACTIONS)), chances[state])[0]
        choices.append((state, action))
        name, value = call_of(env, ACTIONS[action])
        result = getattr(env, name)(value)
        text.append(f"{name.partition('_')[0]} {value}")
        if env.done:
            break
        calls += not result.startswith("error")
    return {"success": env.solved, "calls": calls, "choices": choices, "turns": len(choices),
            "progress": env.reward - ANSWER * env.solved, "text": ", ".join(text)}


def train(reward, tasks, steps, seed):
    """Train a table on this reward; yield each step's numbers and an episode to read."""
    rng = random.Random(seed)
    logits = torch.tensor([SOLVED] + [UNSOLVED] * 3).clamp(min=1e-4).log().requires_grad_()
    optimizer = torch.optim.Adam([logits], lr=LEARNING_RATE)
    for _ in range(steps):
        drawn = [task for task in rng.sample(tasks, TASKS) for _ in range(GROUP)]
        episodes = [play(task, logits.detach(), rng) for task in drawn]
        rewards = torch.tensor([reward(episode) for episode in episodes])  # all that teaches
        groups = rewards.view(TASKS, GROUP)
        std, mean = torch.std_mean(groups, 1, keepdim=True)
        advantages = ((groups - mean) / (std + 1e-4)).flatten().tolist()
        loss = 0.0
        for episode, advantage in zip(episodes, advantages):
            states, actions = zip(*episode["choices"])
            loss = loss - advantage * logits.log_softmax(1)[states, actions].mean()
        optimizer.zero_grad()
        (loss / len(episodes)).backward()
        optimizer.step()
        means = {key: sum(episode[key] for episode in episodes) / len(episodes)
                 for key in ("success", "turns")}  # the first of which no reward can hide
        yield ({"reward": rewards.mean().item(), **means},
               f"{drawn[0]['equation']}: {episodes[0]['text']}")


def quarters(rows):
    """Return the means of each number over the four quarters of a run."""
    size = max(1, len(rows) // 4)
    parts = [rows[begin:begin + size] for begin in range(0, len(rows), size)]
    return [{key: sum(row[key] for row in part) / len(part) for key in part[0]} for part in parts]


def main(steps=STEPS, seed=0):
    """Train with each reward, show what to look at, and draw it."""
    tasks = load_tasks("equations", "train", 1000, seed)
    print(f"\nThe same policy learns from three rewards, {steps} steps each: means over quarters.\n"
          "Watch reward and success together. What would you see without the success?\n")
    print("reward    quarter   reward  success  turns")
    runs, last_episode = {}, {}
    for name, reward in REWARDS.items():
        rows = runs[name] = []
        for row, last_episode[name] in train(reward, tasks, steps, seed):
            rows.append({key: round(value, 4) for key, value in row.items()})
        for number, row in enumerate(quarters(rows), 1):
            print(f"{name:9} {number:7} {row['reward']:8.2f} {row['success']:8.2f} "
                  f"{row['turns']:6.2f}")
    print("\nAn episode of the last step:")
    for name, text in last_episode.items():
        print(textwrap.fill(text, 79, initial_indent=f"{name + ':':10}",
                            subsequent_indent=" " * 10))
    ends = {name: (quarters(rows)[0], quarters(rows)[-1]) for name, rows in runs.items()}
    gamed = [name for name, (first, last) in ends.items()
             if last["reward"] > first["reward"] and last["success"] < first["success"]]
    print(f"\nThe reward rose while the success fell: {' and '.join(gamed) or 'in no run'}.\n")
    numbers = range(1, steps + 1)
    draw(NAME, *({"title": title, "x": "step", "y": label, "curves": {
        name: (numbers, [row[key] for row in rows]) for name, rows in runs.items()}}
        for key, title, label in (("reward", "what is paid", "reward of an episode"),
                                  ("success", "what was meant", "share truly solved"))))
    report(NAME, seed, {"gamed": gamed}, steps=steps, last_episode=last_episode, runs=runs)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
