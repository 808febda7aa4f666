"""A control: `python grpo.py` whose rewards are dealt out at random among the episodes of a step.

    python bench/shuffled_rewards.py --model_path runs/grpo/base --output_dir runs/shuffled

All else is as in grpo.py, with its flags. What still rises here is not learned from the reward.
"""
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import grpo  # noqa: E402
from core import data  # noqa: E402
from layers import main  # noqa: E402

shift_and_scale = data.shift_and_scale


def shuffled(trajectories, config):
    """Scale the rewards as the run says, and pay each episode the reward of another."""
    shift_and_scale(trajectories, config)
    rewards = [t.reward for t in trajectories]
    random.Random(repr(rewards)).shuffle(rewards)
    for t, reward in zip(trajectories, rewards):
        t.rewards = [0.0] * (len(t.rewards) - 1) + [reward]
        t.reward = reward


if __name__ == "__main__":
    data.shift_and_scale = shuffled
    main(grpo.Config, grpo.train, __doc__)
