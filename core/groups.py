"""Groups: the episodes of one task, which algorithms compare with each other."""
import math

from core.tasks import draw_tasks
from core.episodes import members, played_shares, shift_and_scale, without_faults

MAX_RESAMPLE = 3  # rounds of replacement of groups outside the success-rate band


def collect_groups(play, tasks, config, step, run):
    """Play the step's groups, and replace those outside the success-rate band by other tasks'.

    `play(tasks, group_size, step=, first_task=)` is `rollout` with the rest bound. Returns the kept
    episodes, group after group, their rewards shifted and scaled. They are fewer if prompts are too
    long, environments fail, or MAX_RESAMPLE rounds do not suffice. A fork that chooses a step's
    tasks itself gives exactly `tasks_per_step` of them: each is then played once.
    """
    played, kept = [], []  # episodes
    drawn = dropped = 0  # groups
    for _ in range(1 + MAX_RESAMPLE):
        missing = config.tasks_per_step + dropped - drawn
        if not missing:
            break
        fresh = draw_tasks(tasks, config.seed, step, config.tasks_per_step, drawn, missing)
        # first_task gives every candidate a group id and random numbers of its own.
        episodes = play(fresh, config.group_size, step=step, first_task=drawn)
        played += episodes
        drawn += missing
        episodes = without_faults(episodes)
        for indices in members([t.group_id for t in episodes]):
            group = [episodes[i] for i in indices]
            rate = sum(t.info["success"] for t in group) / len(group)
            # A NaN is kept, too: `Run.log_episodes` reports it and skips the step.
            broken = any(math.isnan(t.reward) for t in group)
            if broken or config.success_rate_lb <= rate <= config.success_rate_ub:
                kept += group
            else:
                dropped += 1
    run.log(groups_dropped=dropped, **played_shares(played))
    shift_and_scale(kept, config)
    return kept


def group_shares(batch, advantages):
    """Return the shares of a step's groups that all succeed, all fail, differ, or teach nothing."""
    groups = members([t.group_id for t in batch])
    right = wrong = silent = 0
    for indices in groups:
        successes = [batch[i].info["success"] for i in indices]
        right += all(successes)
        wrong += not any(successes)
        silent += not any(advantages[i].any() for i in indices)
    n = len(groups)
    return {"groups_all_right": right / n, "groups_all_wrong": wrong / n,
            "groups_mixed": 1 - right / n - wrong / n, "groups_without_signal": silent / n}
