"""Reward functions: what --rewards adds to what an environment pays.

    --rewards exact,length=0.5,my_rewards.py:polite=0.2,my_rewards.py:allowed=veto,environment=0

A function takes the episode (agent.Trajectory) and returns a number, or a list with one number per
assistant turn, or None: not scored. Functions with TRL's signature, which are those that take
`completions` or **kwargs, work unchanged: they are called once for all episodes, and in the plays
of agent.py for each as it ends.

A function with an argument `episodes` gets all of them at once, too: those of a group have the same
group_id. `judge` is one: a model that compares them.

An episode is paid the sum of weight x value; a weight that is not given is 1. A number is paid in
the last turn, a list turn by turn. "environment" is what the environment pays. A veto takes all
positive rewards of an episode whose value is 0. Values are logged as reward/NAME, without weights.

The functions are in functions.py, `exact` and what an answer is in exact.py, how those with TRL's
signature are called in trl.py, the judge in judge.py, and how its server is asked in asking.py.
"""
import envs


def rewards_of(config, run=None):
    """Override envs.rewards_of: return what --rewards names, or None if environments pay alone."""
    if config.rewards or not envs.all_have(config.env, "get_reward"):
        from extras.rewards.functions import load  # most runs need none
        return load(config, run)
    return None
