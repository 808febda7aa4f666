"""Thinning trajectories.jsonl when it has become too large: the newest half, and a thin history."""
import re
from collections import Counter


def thin(path):
    """Rewrite the log so that at least a quarter of it goes. No step loses a part of its lines."""
    sizes = Counter()
    with open(path, "rb") as file:
        for line in file:
            sizes[step_of(line)] += len(line)
    kept = kept_steps(sizes)
    temporary = path.with_name(f".tmp-{path.name}")
    try:
        with open(path, "rb") as file, open(temporary, "wb") as out:
            out.writelines(line for line in file if step_of(line) in kept)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def step_of(line):
    """Return the step of a line, which begins with it."""
    return int(re.match(rb'\{"step": (\d+)', line)[1])


def kept_steps(sizes):
    """Return the steps that stay: the newest half of the bytes, and before it every n-th step.

    The number n is the least power of two with which these have a quarter of the bytes at most.

    Args:
        sizes: {step: bytes}, the oldest first.
    """
    steps, total = list(sizes), sum(sizes.values())
    newest = {steps.pop()}
    while steps and sum(sizes[step] for step in newest) + sizes[steps[-1]] <= total / 2:
        newest.add(steps.pop())
    n = 2
    while n <= max(newest) and sum(sizes[step] for step in steps if step % n == 0) > total / 4:
        n *= 2
    return newest | {step for step in steps if step % n == 0}
