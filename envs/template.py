"""A world to copy: every attribute of the contract once, in the smallest world that has use for it.

    cp envs/template.py my_env.py
    python grpo.py --env my_env.py:HigherLower --model_path path/to/model
"""
import numpy as np


class HigherLower:
    """Find the hidden number between 1 and 9."""

    system_prompt = "Find the hidden number between 1 and 9."  # optional
    max_turns = 6  # optional: assistant turns of an episode
    limits = {"max_new_tokens": 64, "max_tokens": 1024}  # optional: recommended lengths of a turn and an episode

    def reset(self, number: int, **_) -> str:
        """A new episode from one row of `_tasks` or of --dataset -> the first user message. Renews ALL state."""
        self.number, self.guesses = number, 0
        self.done = False  # optional: set it True and the episode ends
        self.reward = 0.0  # optional: running total; what a turn adds to it is that turn's reward (--credit turn)
        return "Guess."

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: your guess, 1 to 9
        """
        self.guesses += 1
        self.done = number == self.number
        self.reward += 1.0 if self.done else 0.0
        return "right" if self.done else "higher" if number < self.number else "lower"

    def get_reward(self) -> float:
        """The episode's total. Never below zero for trying, or doing nothing is what will be learned."""
        return self.reward

    # ---- all below is optional, and invisible to the model and to TRL because of its underscore
    def _check(self) -> bool:
        return self.done

    @property
    def _reward_parts(self) -> dict:
        return {"found": self.reward}

    def _reply(self, text: str) -> str | None:
        """The model answered without a tool: a user message to go on with, or None to end the episode."""
        return "Use the tool." if self.guesses == 0 else None

    def _expert(self) -> list[dict]:
        """The next calls of a scripted demonstrator, [] when there is nothing left to do: `python sft.py --env ...`."""
        return [] if self.done else [{"name": "guess", "arguments": {"number": self.number}}]

    @staticmethod
    def _tasks(split: str, n: int | None, seed: int) -> list[dict]:
        """Task rows, a function of the arguments; no "test" row may be in "train" (nine numbers: here they are)."""
        rng = np.random.default_rng([seed, split == "test"])
        return [{"number": int(number)} for number in rng.integers(1, 10, n or 1000)]
