"""The task families of the package reasoning-gym, which generates them and scores the answers.

    --env reasoning_gym:chain_sum,reasoning_gym:countdown --env_options max_terms=3

Options are the fields of a family's config, and `size`, the number of its tasks. To find one of the
test split costs ten questions, which is slow for families that search, such as knight_swap.
"""
from contextlib import suppress
from functools import cache
from operator import itemgetter

from reasoning_gym.factory import DATASETS, create_dataset
from reasoning_gym.utils import extract_answer

from extras.adapters.numbered import Numbered
from core.config import UserError, nearest
from core.tool_calls import after_thought


class Puzzle(Numbered):
    """One question, answered once. The reward is the score of the family's own verifier, 0 to 1."""

    system_prompt = "Solve the problem. Give the final answer between <answer> and </answer>."
    _question = itemgetter("question")

    @classmethod
    @cache
    def _entries(cls):
        """Return the questions of the family with these options. Each is made when it is read."""
        return create_dataset(cls.__name__, **cls.options)

    def _reply(self, text: str) -> None:
        """Score the answer in a text, which ends the episode."""
        # Some verifiers raise an exception of their own for what they cannot read.
        with suppress(Exception):
            answer = extract_answer(after_thought(text))
            self.reward = float(self._entries().score_answer(answer, self._entry))
        self._solved = self.reward >= 1

    def _expert(self) -> str:
        """Return the family's solution, without the way to it. UserError: a few have none."""
        if self._entry["answer"] is None:
            raise UserError("reasoning-gym has no solution of this question to show")
        return f"<answer>{self._entry['answer']}</answer>"


@cache
def make(family: str) -> type:
    """Return the environment of a task family."""
    if family not in DATASETS:
        known = f"known: {', '.join(DATASETS)}"
        raise UserError(f"reasoning_gym:{family}: {nearest(family, DATASETS, otherwise=known)}")
    fields = vars(DATASETS[family][1](size=10_000, seed=0)).items()
    options = {name: value for name, value in fields if value is not None}
    return type(family, (Puzzle,), {"options": options})
