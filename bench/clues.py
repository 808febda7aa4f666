"""A task where the longer way is right: the answer is yes or no, and looking tells which.

    python grpo.py --env bench/clues.py:Clues --credit process

The first look never shows anything, the second one shows the answer three times in five, and the
third one always. To guess is right half of the time. Only the answer is paid, so that a policy
learns to look if its credit lets it. Looking is free.
"""
import random
from typing import Literal

from core.data import split_of

SECOND_LOOK = 0.6  # the chance that it shows the answer
SURE = 3  # looks that always suffice


class Clues:
    """Find out whether the answer is yes or no."""

    system_prompt = "Find the answer with the tools."
    max_turns = 6
    limits = {"max_new_tokens": 32, "max_tokens": 320}

    def reset(self, question: str, hidden: str, shows: int, noise_seed: int = 0, **_) -> str:
        """Begin with a question. `hidden` is its answer, and `shows` the look that shows it."""
        self.hidden = hidden
        self.shows = shows
        self.looks = 0
        self.done = False
        self.solved = False
        rng = random.Random(noise_seed)
        self._patience = rng.randint(0, SURE)  # of the scripted expert, in looks
        self._guess = rng.choice(("yes", "no"))
        return f"Question: {question}"

    def look(self) -> str:
        """Look for the answer."""
        self.looks += 1
        return self.hidden if self.looks >= self.shows else "none"

    def state_answer(self, value: Literal["yes", "no"]) -> str:
        """State the answer. This ends the episode.

        Args:
            value: the answer
        """
        if not self.done:
            self.done = True
            self.solved = value == self.hidden
        return "right" if self.solved else "wrong"

    def get_reward(self) -> float:
        return float(self.solved)

    def _state(self) -> str:
        """Name the state that the environment is in, for credit by state."""
        return f"{self.looks} looks, {'found' if self.looks >= self.shows else 'unknown'}"

    def _expert(self) -> list[dict]:
        """Look as often as its patience goes, and state what was shown, or else guess."""
        if self.done:
            return []
        shown = self.looks >= self.shows
        if not shown and self.looks < self._patience:
            return [{"name": "look", "arguments": {}}]
        value = self.hidden if shown else self._guess
        return [{"name": "state_answer", "arguments": {"value": value}}]

    @staticmethod
    def _tasks(split: str, n: int | None, seed: int) -> list[dict]:
        """Return n tasks. A tenth of all questions, by hash, is the test split."""
        rng = random.Random(f"{seed} {split}")
        tasks = []
        while len(tasks) < (1000 if n is None else n):
            question = f"{rng.randrange(100)} {rng.randrange(100)}"
            if split_of(question) == split:
                shows = 2 if rng.random() < SECOND_LOOK else SURE
                tasks.append({"question": question, "hidden": rng.choice(("yes", "no")),
                              "shows": shows, "noise_seed": rng.randrange(2**31)})
        return tasks
