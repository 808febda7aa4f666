"""An environment to copy: what most environments need of the contract (envs/__init__.py has all).

    cp envs/template.py my_env.py
    python grpo.py --env my_env.py:HigherLower --model_path path/to/model
"""
import numpy as np


class HigherLower:
    """Find the hidden number between 1 and 99."""

    system_prompt = "Find the hidden number between 1 and 99."  # optional
    max_turns = 10  # optional: assistant turns of an episode
    # Optional: recommended lengths of a turn and of an episode, used where the user says nothing.
    limits = {"max_new_tokens": 64, "max_tokens": 1024}

    def reset(self, number: int, **_) -> str:
        """Begin an episode from one row of `_tasks` or of --dataset, and renew ALL state.

        Return the first user message.
        """
        self.number = number
        # The bounds that the tool's answers leave for the number.
        self.smallest, self.largest = 1, 99
        self.guesses = 0
        # Optional: set it to True, and the episode ends.
        self.done = False
        # Optional: the running total. What a turn adds to it is that turn's reward.
        self.reward = 0.0
        return "Guess."

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: your guess, 1 to 99
        """
        self.guesses += 1
        if number == self.number:
            self.done = True
            self.reward = 1.0
            return "right"
        if number < self.number:
            self.smallest = max(self.smallest, number + 1)
            return "higher"
        self.largest = min(self.largest, number - 1)
        return "lower"

    def get_reward(self) -> float:
        """Return the total of the episode.

        If trying could cost reward, the model would learn to do nothing.
        """
        return self.reward

    # ---- All below is optional, and invisible to the model and to TRL because of its underscore.
    def _check(self) -> bool:
        """Return whether the task was solved, which a shaped reward may not say."""
        return self.done

    @property
    def _reward_parts(self) -> dict:
        """Return parts of the reward by name, for the log."""
        return {"found": self.reward}

    def _reply(self, text: str) -> str | None:
        """Return the user's reply to a turn without a tool call, or None to end the episode."""
        return "Use the tool." if self.guesses == 0 else None

    def _expert(self) -> list[dict]:
        """Return the next calls of a scripted demonstrator for sft.py, [] when it has finished.

        It may use only what the model sees, or the model learns to guess. This one halves what is
        left, and needs at most 7 of the 10 turns.
        """
        if self.done:
            return []
        middle = (self.smallest + self.largest) // 2
        return [{"name": "guess", "arguments": {"number": middle}}]

    @staticmethod
    def _tasks(split: str, n: int | None, seed: int) -> list[dict]:
        """Return task rows, a function of the arguments. No "test" row may be in "train"."""
        numbers = [k for k in range(1, 100) if (k % 10 == 0) == (split == "test")]
        rng = np.random.default_rng([seed, split == "test"])
        return [{"number": int(number)} for number in rng.choice(numbers, n or 1000)]
