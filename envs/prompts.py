"""Prompts without tools: each row of --dataset has a `prompt`, text or messages, that the model
answers in one turn. What an answer is worth is for --rewards to say: of all columns of its row.
"""


class Prompts:
    def reset(self, prompt: str | list[dict], **_):
        """Add nothing to the row's prompt."""

    @staticmethod
    def _from_text(text: str) -> dict:
        return {"prompt": text}
