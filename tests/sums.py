"""An environment that conforms to what extras/check.py asks, and ways not to."""
import sqlite3
import time

import numpy as np

from core.config import UserError


class Sums:
    """It conforms: the sum of two numbers, one of which a tool tells. The classes below break one thing each."""
    max_turns = 4

    def reset(self, a: int, b: int, **_):
        self.a, self.b, self.reward, self.done, self.looked = a, b, 0.0, False, False
        return f"{a} plus what I think?"

    def look(self) -> str:
        """Tell the second number."""
        self.looked = True
        return f"it is {self.b}"

    def answer(self, text: str) -> str:
        """Answer.

        Args:
            text: the sum
        """
        self.done = True
        self.reward = float(text == str(self.a + self.b))
        return "thanks"

    def get_reward(self):
        return self.reward

    def _expert(self):
        if self.done:
            return []
        return [{"name": "answer", "arguments": {"text": str(self.a + self.b)}}] if self.looked else [{"name": "look", "arguments": {}}]

    @staticmethod
    def _tasks(split, n, seed):
        return [{"a": 1000 + 2 * ((i + seed) % 300) + (split == "test"), "b": i} for i in range(n)]


class Luck(Sums):
    def reset(self, **task):
        return f"{super().reset(**task)} {time.perf_counter_ns()}"


class Remembers(Sums):
    """reset() forgets to renew something."""
    looks = 0

    def look(self) -> str:
        """Tell the second number."""
        self.looks += 1
        return f"{super().look()}, look {self.looks}"


class Shares(Sums):
    """Something is kept in the class."""
    last = []

    def reset(self, a: int, b: int, **_):
        self.last[:] = [b]
        return super().reset(a, b)

    def look(self) -> str:
        """Tell the second number."""
        self.looked = True
        return f"it is {self.last[0]}"


class NoDocstring(Sums):
    def look(self, twice) -> str:
        self.looked = True
        return str(self.b)


class Hides(Sums):
    """An attribute has the name of a tool."""

    def reset(self, **task):
        self.look = None
        return super().reset(**task)


class NoTurns(Sums):
    max_turns = -1


class BadCalls(Sums):
    def _expert(self):
        return [{"name": "answer", "arguments": {"words": str(self.a + self.b)}}]


class NumpyTasks(Sums):
    @staticmethod
    def _tasks(split, n, seed):
        return [{name: np.int64(value) for name, value in row.items()} for row in Sums._tasks(split, n, seed)]


class Raises(Sums):
    def reset(self, **_):
        raise RuntimeError("no licence")


class Leaks(Sums):
    @staticmethod
    def _tasks(split, n, seed):
        return Sums._tasks("train", n, seed)


class AsksAlike(Sums):
    """The rows differ, and the questions do not."""

    def reset(self, a: int, b: int, row=0, **_):
        return super().reset(a // 2 * 2, b)


class NewTasks(Sums):
    @staticmethod
    def _tasks(split, n, seed):
        return [{**row, "b": time.perf_counter_ns()} for row in Sums._tasks(split, n, seed)]


class BadExpert(Sums):
    def _expert(self):
        return [] if self.done else [{"name": "answer", "arguments": {"text": str(self.a)}}]


class PaysForNothing(Sums):
    """Each call costs something, and so doing nothing is best."""

    def look(self) -> str:
        """Tell the second number."""
        self.reward -= 1.0
        return super().look()

    def get_reward(self):
        return self.reward - 1.0 * self.looked


class Parrot(Sums):
    """Paid is an answer that holds the number somewhere: the question does not, the tool's output does."""

    def reset(self, a: int, b: int, **_):
        super().reset(a, b)
        return "Which number?"

    def answer(self, text: str) -> str:
        """Answer.

        Args:
            text: the number
        """
        self.done, self.reward = True, float(f"{self.b}" in text.split())
        return "thanks"

    def _expert(self):
        return [{"name": "answer", "arguments": {"text": str(self.b)}}] if self.looked else [{"name": "look", "arguments": {}}]


class Guessable(Sums):
    """The answer is always the same."""

    def answer(self, text: str) -> str:
        """Answer.

        Args:
            text: yes
        """
        self.done, self.reward = True, float(text == "yes")
        return "thanks"

    def _expert(self):
        return [{"name": "answer", "arguments": {"text": "yes"}}]


class Echo(Sums):
    """Any text that holds the question is paid."""

    def _reply(self, text):
        self.done, self.reward = True, float(str(self.a) in text)

    def _expert(self):
        return f"{self.a}"


class Lottery(Sums):
    def answer(self, text: str) -> str:
        """Answer.

        Args:
            text: anything
        """
        self.done, self.reward = True, 1.0
        return "thanks"


class Typo(Sums):
    def look(self) -> str:
        """See the other number."""
        return self.bee


class TypoBeside(Sums):
    def peek(self) -> str:
        """See what is not there."""
        return self.bee


class Database(Sums):
    def __init__(self):
        self.database = sqlite3.connect(":memory:")

    def reset(self, **task):
        self.database.executescript("drop table if exists looks; create table looks (n integer)")
        return super().reset(**task)


class Refuses(Sums):
    def _expert(self):
        raise UserError("nobody knows the sum")


class Hashed(Sums):
    @staticmethod
    def _tasks(split, n, seed):
        return [{**row, "b": hash(f"{split} {row['b']}")} for row in Sums._tasks(split, n, seed)]


class Empty:
    def reset(self, **_):
        return "?"

    def get_reward(self):
        return 0.0

    def __len__(self):
        return 0
