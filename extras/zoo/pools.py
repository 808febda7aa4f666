"""Tasks drawn by how hard they were: --draw difficulty. A run logs groups.jsonl for it.

    {"step": 3, "task": 17, "success": 0.5}

is the share of the episodes of task 17 that succeeded, of the last group that it had. Tasks whose
group all succeeded or all failed teach nothing with a baseline of the group, and may again: they
are in the pools "easy" and "hard", and drawn more rarely. prime-rl has such pools; there
thresholds decide, and each pool has its share of a batch. What is drawn is a function of the seed,
the step and groups.jsonl, which a resumed run cuts as its other logs.
"""
import json

import numpy as np

import core.data
from core.data import lines_of, members, without_faults
from core.run import LOGS

GROUPS = "groups.jsonl"
LOGS.append(GROUPS)  # a resumed run cuts it as its other logs
WEIGHTS = {"easy": 0.1, "hard": 0.3}  # of a draw, against 1 for a task that is in neither pool


def pool_of(success: float | None) -> str | None:
    """Return the pool of a task whose last group had this success; None was never played."""
    return {0.0: "hard", 1.0: "easy"}.get(success)


def in_order_of_draws(n: int, successes: dict, seed: int, step: int) -> list[int]:
    """Return the numbers of n tasks in the order in which a step draws them, by their weights.

    Drawing without replacement by weights w is the same as sorting by u ** (1 / w), largest first,
    with u uniform (Efraimidis and Spirakis 2006).
    """
    uniforms = np.random.default_rng([seed, step]).random(n)
    weights = np.array([WEIGHTS.get(pool_of(successes.get(i)), 1.0) for i in range(n)])
    return np.argsort(-np.log(uniforms) / weights).tolist()


def read(path) -> dict:
    """Return {number of a task: the success of its last group}."""
    rows = [json.loads(text) for _, text in lines_of(path)] if path.exists() else []
    return {row["task"]: row["success"] for row in rows}


def collect_by_difficulty(play, tasks, config, step, run) -> list:
    """Do what core's `collect_groups` does, with tasks drawn by their last group's success."""
    if GROUPS not in run.kept:
        run.kept[GROUPS] = run.ranks.first(lambda: read(run.folder / GROUPS))
    successes = run.kept[GROUPS]
    pools = [pool_of(success) for success in successes.values()]
    run.log(**{f"tasks_{pool}": pools.count(pool) for pool in WEIGHTS})
    order = in_order_of_draws(len(tasks), successes, config.seed, step)
    played = []

    def draw(tasks, seed, step, tasks_per_step, first, n):
        """Return the candidates number `first` to `first + n - 1` of the step."""
        return [tasks[order[i % len(order)]] for i in range(first, first + n)]

    def play_and_keep(*arguments, **options):
        episodes = play(*arguments, **options)
        played.extend(episodes)
        return episodes

    kept = core.data.collect_groups(play_and_keep, tasks, config, step, run, draw)
    valid = without_faults(played)
    rows = []
    for indices in members([t.group_id for t in valid]):
        # The second half of a group id is the number of the candidate.
        candidate = int(valid[indices[0]].group_id.partition("-")[2])
        success = sum(valid[i].info["success"] for i in indices) / len(indices)
        rows.append({"step": step, "task": order[candidate % len(order)], "success": success})
    run.append(GROUPS, rows)
    successes.update((row["task"], row["success"]) for row in rows)
    return kept
