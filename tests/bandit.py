"""An environment whose right answer is known and must be found: what a model that knows only the format can learn in seconds."""
import random
from typing import Literal

import sft

ENV = f"{__file__}:Bandit"


class Bandit:
    """Two choices; "divide" is right and pays 1 each, so the answer is known and the prompt tells nothing."""
    system_prompt = "Choose."
    max_turns = 2

    def reset(self, number=0, **_):
        self.reward, self.done, self.turn, self.rng = 0.0, False, 0, random.Random(number)
        return f"number {number}"

    def identify_operation(self, operation: Literal["add", "subtract", "multiply", "divide"]) -> str:
        """Choose.

        Args:
            operation: the choice
        """
        self.reward += operation == "divide"
        self.turn += 1
        self.done = self.turn == 2
        return "yes"

    def get_reward(self):
        return self.reward

    def _check(self):
        return self.reward == 2

    def _expert(self):
        choice = self.rng.choice(["add", "subtract", "multiply", "divide"])
        return [] if self.done else [{"name": "identify_operation", "arguments": {"operation": choice}}]

    @staticmethod
    def _tasks(split, n, seed):
        return [{"number": 2 * i + (split == "test")} for i in range(n)]


class Right(Bandit):
    """The same, with an expert that knows the answer."""

    def _expert(self):
        return [] if self.done else [{"name": "identify_operation", "arguments": {"operation": "divide"}}]


RIGHT = f"{__file__}:Right"


def school(folder):
    """Teach the tiny model the format of a choice, and no answer."""
    sft.train(sft.Config(env=ENV, output_dir=str(folder), max_samples=240, max_steps=60, batch_size=8, eval_tasks=0))
    return str(folder)
