"""Completions of plain prompts by the decoding engine, for measurements and tests."""
from core.engine import Engine, Row


def generate(engine: Engine, prompts, *, group_size: int = 1, max_new_tokens: int = 128,
             seed: int = 0, forced=None) -> list[tuple[list[int], list[float]]]:
    """Return (ids, logprobs) of `group_size` completions per prompt, a prompt's together.

    Args:
        prompts: lists of ids.
        forced: one list of ids per completion, taken in place of sampled tokens.
    """
    rows = []
    for i, prompt in enumerate(prompts):
        for n in range(i * group_size, (i + 1) * group_size):
            rows.append(Row(prompt, group=i, seed=(seed << 40) + n, limit=max_new_tokens,
                            forced=forced[n] if forced else ()))
    engine.add(rows)
    while engine.busy:
        for row in engine.step():
            engine.release(row)
    return [(row.turn, row.logprobs) for row in rows]
