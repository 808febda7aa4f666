"""The task families of the package reasoning-gym, which generates them and scores the answers.

    --env reasoning_gym:chain_sum,reasoning_gym:countdown --env_options max_terms=3

Options are the fields of a family's config, and `size`, the number of its tasks. To find one of the
test split costs ten questions, which is slow for families that search, such as knight_swap.
"""
from contextlib import suppress
from functools import cache

from reasoning_gym.factory import DATASETS, create_dataset
from reasoning_gym.utils import extract_answer

from envs.numbered import Numbered
from experiment.config import nearest
from experiment.data import reading
from experiment.errors import UserError


class Puzzle(Numbered):
    """One question, answered once. The reward is the score of the family's own verifier, 0 to 1."""

    system_prompt = ("Solve the problem. Give the final answer with the tool, or in text between "
                     "<answer> and </answer>.")

    @classmethod
    @cache
    def _entries(cls):
        """Return the questions of the family with these options. Each is made when it is read."""
        with reading(f"reasoning_gym:{cls.__name__}"):
            return create_dataset(cls.__name__, **cls.options, seed=0)

    @staticmethod
    def _question(entry: dict) -> str:
        return entry["question"]

    def reset(self, number: int, **_) -> str:
        """Begin with the question of this number, from 0 to size - 1."""
        self._entry = self._entries()[number]
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

    def _reply(self, text: str) -> None:
        """Score the answer in a text, which ends the episode."""
        self.done = True
        # Some verifiers raise an exception of their own for what they cannot read.
        with suppress(Exception):
            self.reward = float(self._entries().score_answer(extract_answer(text), self._entry))

    def _check(self) -> bool:
        return self.reward >= 1

    def _expert(self) -> list[dict]:
        """Return the family's solution, without the way to it. A few families have none."""
        solution = self._entry["answer"]
        if self.done or solution is None:
            return []
        return [{"name": "answer", "arguments": {"answer": solution}}]


@cache
def make(family: str) -> type:
    """Return the environment of a task family."""
    if family not in DATASETS:
        known = f"known: {', '.join(DATASETS)}"
        raise UserError(f"reasoning_gym:{family}: {nearest(family, DATASETS, otherwise=known)}")
    fields = vars(DATASETS[family][1](size=10_000, seed=0)).items()
    options = {name: value for name, value in fields if value is not None and name != "seed"}
    return type(family, (Puzzle,), {"options": options})
