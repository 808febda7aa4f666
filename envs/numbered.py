"""What the environments of other packages share: their tasks are numbered, their rewards ready."""
from experiment.seeds import in_test_split, shuffled


class Numbered:
    """A task is the number of one of `_entries()`. `_question` returns the text of an entry."""

    _question = str

    def get_reward(self) -> float:
        return self.reward

    @classmethod
    def _tasks(cls, split: str, n: int | None, seed: int) -> list[dict]:
        """Return at most n tasks with different questions. A tenth of all is the test split."""
        entries = cls._entries()
        tasks = {}
        for number in shuffled(range(len(entries)), seed):
            question = cls._question(entries[number])
            if in_test_split(question) == (split == "test"):
                tasks[question] = {"number": number}
            if len(tasks) == n:
                break
        return list(tasks.values())
