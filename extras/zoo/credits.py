"""More rows of CREDITS in grpo.py: functions of B episodes that return the advantages of all turns.

`compare(values, ids, **options)` is grpo.py's `group_advantages`: it compares each value with those
of the same id.
"""
import math

import torch


# The discount of GiGPO in ROLL and in scripts made from its code, verl-agent. Of two ways to the
# same reward the shorter one is then better. A std of the returns of a state would make that price
# large (docs/phenomena_of_credit.md), so that by default nothing divides them: the paper has both.
GAMMA = 0.95


def gigpo(episodes, *, compare, omega=1.0, gamma=GAMMA, **options):
    """A_episode + omega A_step: group in group, GiGPO, arXiv 2505.10978.

    A_step compares a turn's return-to-go, sum_k gamma^k r, with those of all turns of the group
    that were taken in the same state. Alone in its state, a turn gets A_episode.
    """
    totals = torch.tensor([math.fsum(t.rewards) for t in episodes])  # (B,)
    turns = torch.tensor([len(t.rewards) for t in episodes])  # (B,)
    of_episodes = compare(totals, [t.group_id for t in episodes], **options)
    returns, peers = [], []
    for t in episodes:
        for turn, state in enumerate(states_of(t)):
            later = t.rewards[turn:]
            returns.append(math.fsum(gamma**k * reward for k, reward in enumerate(later)))
            peers.append((t.group_id, state))
    of_turns = compare(torch.tensor(returns), peers, **options)
    return of_episodes.repeat_interleave(turns) + omega * of_turns


def states_of(episode) -> list:
    """Return what each turn of an episode was decided by: a state, or the last observation.

    The state is what `_state()` of the environment returned before the turn. Without that method it
    is the text that the turn answers: the tools' results, a reply, or at first the prompt. Where a
    tool is out of time nobody is asked: such turns are alone in their states.
    """
    turns = len(episode.rewards)
    if "states" in episode.info:
        states = episode.info["states"][:turns]
        return states + [object() for _ in range(turns - len(states))]
    observations, seen = [], []
    for message in episode.messages:
        if message["role"] == "assistant":
            observations.append(tuple(seen))
            seen = []
        else:
            seen.append(message["content"])
    # A prompt may hold earlier turns of the assistant.
    return observations[-turns:]


def gdpo(episodes, *, compare, scale="batch"):
    """Compare each reward function in its group, sum by weight, divide by the std of the batch.

    GDPO, arXiv 2601.05242, as TRL's normalize_then_sum: A = S / (std(S) + 1e-4) with S_i = sum_k
    w_k (r_ik - mean_k) / (std_k + 1e-4), whose mean in a group is 0. Summed first, a function of
    large numbers hides the others. Where a function scored nothing, it adds 0.
    """
    turns = torch.tensor([len(t.rewards) for t in episodes])  # (B,)
    total = torch.zeros(len(episodes))
    for name, weight in weights_of(episodes).items():
        scored = [i for i, t in enumerate(episodes) if name in t.reward_parts]
        values = torch.tensor([episodes[i].reward_parts[name] for i in scored])
        total[scored] += weight * compare(values, [episodes[i].group_id for i in scored])
    advantages = compare(total, [t.group_id for t in episodes], scale=scale)
    return advantages.repeat_interleave(turns)


def weights_of(episodes) -> dict:
    """Return the weight of each reward function, which extras/rewards notes for --credit gdpo."""
    weights = {}
    for t in episodes:
        weights |= t.info["reward_weights"]
    return weights
