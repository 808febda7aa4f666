"""The `code` environment with its three easiest functions alone, in short episodes.

    python agent.py --env bench/easy_code.py:EasyCode --num_tasks 8
"""
from extras.sandbox.code import Code


class EasyCode(Code):
    """Write one of three functions, whose constants the task names."""

    max_turns = 6
    limits = Code.limits | {"max_new_tokens": 128, "max_tokens": 1024}
    options = Code.options | {"levels": "1"}
