"""The task families of the package reasoning-gym, which generates them and scores the answers.

    --env reasoning_gym:chain_sum,reasoning_gym:countdown --env_options max_terms=3

Options are the fields of a family's config, and `size`, the number of its tasks. A tenth of all
questions, by hash, is the test split. To find one costs ten questions, which is slow for families
that search, such as knight_swap.
"""
import zlib
from functools import cache

import numpy as np
from reasoning_gym.factory import DATASETS, create_dataset
from reasoning_gym.utils import extract_answer

from experiment.config import nearest
from experiment.errors import UserError


class Puzzle:
    """One question, answered once. The reward is the score of the family's own verifier, 0 to 1."""

    system_prompt = ("Solve the problem. Give the final answer with the tool, or in text between "
                     "<answer> and </answer>.")

    @classmethod
    @cache
    def _questions(cls):
        """Return the questions of the family with these options. Each is made when it is read."""
        try:
            return create_dataset(cls.__name__, **cls.options, seed=0)
        except (AssertionError, ValueError) as error:
            raise UserError(f"reasoning_gym:{cls.__name__}: {error}") from None

    def reset(self, number: int, **_) -> str:
        """Begin with the question of this number, from 0 to size - 1."""
        self._entry = self._questions()[number]
        self.reward = 0.0
        self.done = False
        return self._entry["question"]

    def answer(self, answer: str) -> str:
        """Give the final answer.

        Args:
            answer: the answer alone, in the form that the problem asks for
        """
        # TRL does not know `done` and may call again.
        if not self.done:
            self._reply(f"<answer>{answer}</answer>")
        return f"score: {self.reward:g}"

    def get_reward(self) -> float:
        return self.reward

    def _reply(self, text: str) -> None:
        """Score the answer in a text, which ends the episode."""
        self.done = True
        try:
            self.reward = float(self._questions().score_answer(extract_answer(text), self._entry))
        # Some verifiers raise an exception of their own for what they cannot read.
        except Exception:
            self.reward = 0.0

    def _check(self) -> bool:
        return self.reward >= 1

    def _expert(self) -> list[dict]:
        """Return the family's solution, without the way to it. A few families have none."""
        solution = self._entry["answer"]
        if self.done or solution is None:
            return []
        return [{"name": "answer", "arguments": {"answer": solution}}]

    @classmethod
    def _tasks(cls, split: str, n: int | None, seed: int) -> list[dict]:
        """Return at most n tasks with different questions."""
        tasks = {}
        order = np.random.default_rng([seed, split == "test"]).permutation(cls.options["size"])
        for number in map(int, order):
            question = cls._questions()[number]["question"]
            if (zlib.crc32(question.encode()) % 10 == 0) == (split == "test"):
                tasks[question] = {"number": number}
            if len(tasks) == n:
                break
        return list(tasks.values())


@cache
def make(family: str) -> type:
    """Return the environment of a task family."""
    if family not in DATASETS:
        known = f"known: {', '.join(DATASETS)}"
        raise UserError(f"reasoning_gym:{family}: {nearest(family, DATASETS, otherwise=known)}")
    fields = vars(DATASETS[family][1](size=10_000, seed=0)).items()
    options = {name: value for name, value in fields if value is not None and name != "seed"}
    return type(family, (Puzzle,), {"options": options})
