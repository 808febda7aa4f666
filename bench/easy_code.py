"""The `code` environment with one function alone: the sum of the numbers above a constant.

    python agent.py --env bench/easy_code.py:EasyCode --num_tasks 8
"""
from extras.sandbox.code import Code


class EasyCode(Code):
    """Write `sum_above`, whose constant the task names."""

    max_turns = 6
    limits = Code.limits | {"max_new_tokens": 192, "max_tokens": 1024}

    @classmethod
    def _tasks(cls, split, n, seed):
        """Return n tasks of this function, the more often the same ones the larger n is."""
        n, rows = n or 100, super()._tasks(split, 16 * (n or 100), seed)
        return [row for row in rows if row["entry_point"] == "sum_above"][:n]
