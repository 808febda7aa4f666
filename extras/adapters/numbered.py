"""What the environments of other packages share: their tasks are numbered, their rewards ready."""
from core.config import reading
from core.data import shuffled, split_of


class Numbered:
    """A task is the number of one of `_entries()`. `_question` returns the text of an entry."""

    _question = str

    @classmethod
    def _entries(cls):
        """Return what the numbers stand for: seeds, where a package has nothing else."""
        return range(10_000)

    def reset(self, number: int, **_) -> str:
        self._entry = self._entries()[number]
        self.reward = 0.0
        self._reward_parts = {}
        self._solved = False
        self.done = False
        return self._question(self._entry)

    def get_reward(self) -> float:
        return self.reward

    def _check(self) -> bool:
        return self._solved

    @classmethod
    def _tasks(cls, split: str, n: int | None, seed: int) -> list[dict]:
        """Return at most n tasks with different questions. A tenth of all is the test split."""
        with reading(cls.__name__):
            entries = cls._entries()
        tasks = {}
        for number in shuffled(range(len(entries)), seed):
            question = cls._question(entries[number])
            if split_of(question) == split:
                tasks[question] = {"number": number}
            if len(tasks) == n:
                break
        return list(tasks.values())
