"""Prompts without tools: each row of --dataset has a `prompt`, text or messages, that the model
answers in one turn. What an answer is worth is for --rewards to say: of all columns of its row.
"""
from extras.adapters.trl import opening


class Prompts:
    # `answer` is named for its type: a .csv cell may hold a list of accepted ones.
    def reset(self, prompt: str | list[dict], answer: str | list = "", **_):
        """Add nothing to the row's prompt."""

    @classmethod
    def _row(cls, row: dict) -> dict:
        """Return the row. Raises ValueError for a prompt that no episode can begin with."""
        if not any(message["content"] for message in opening(cls.reset, row, "")):
            raise ValueError('"prompt" is empty')
        return row

    @staticmethod
    def _from_text(text: str) -> dict:
        return {"prompt": text}
