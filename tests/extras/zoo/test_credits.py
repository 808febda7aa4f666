"""Credits of the zoo: by hand, against a loop in plain Python, and against TRL's lines where it has them."""
import math
import random
from types import SimpleNamespace

import pytest
import torch

import grpo
from agent import Trajectory
from extras.zoo.credits import states_of

ROLES = {"u": "user", "a": "assistant", "t": "tool"}


@pytest.fixture(autouse=True)
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def episode(rewards, states, group="g", **more):
    return Trajectory(rewards=rewards, group_id=group, info={"states": states}, **more)


def test_gigpo_by_hand():
    """Returns 1, 0, 1 (mean 2/3). State s, met by all three at first and by the second again: returns to go 0.95, 0, 0.95 and 0, mean 0.475.
    State p: 1 of the first alone: 0. State q: the third's 1 alone: 0. Without a discount s has 1, 0, 1 and 0."""
    episodes = [episode([0.0, 1.0], ["s", "p"]), episode([0.0, 0.0], ["s", "s"]), episode([0.0, 1.0], ["s", "q", "end"])]
    a = grpo.CREDITS["gigpo"](episodes, scale="none")
    assert a.tolist() == pytest.approx([1 / 3 + 0.475, 1 / 3, -2 / 3 - 0.475, -2 / 3 - 0.475, 1 / 3 + 0.475, 1 / 3])
    a = grpo.CREDITS["gigpo"](episodes, scale="none", gamma=1.0)
    assert a.tolist() == pytest.approx([1 / 3 + 1 / 2, 1 / 3, -2 / 3 - 1 / 2, -2 / 3 - 1 / 2, 1 / 3 + 1 / 2, 1 / 3])
    half = grpo.CREDITS["gigpo"](episodes, scale="none", omega=0.5, gamma=0.5)  # returns to go of s: .5, 0, 0 and .5, mean 1/4
    assert half.tolist() == pytest.approx([1 / 3 + 1 / 8, 1 / 3, -2 / 3 - 1 / 8, -2 / 3 - 1 / 8, 1 / 3 + 1 / 8, 1 / 3])


def test_gigpo_where_a_late_tool_left_turns_without_a_state():
    """Those are alone: they get the episode's advantage, 1/2 and -1/2. The s of both has returns to go 0.9025 and 0."""
    late, in_time = episode([0.0, 0.0, 1.0], ["s"]), episode([0.0, 0.0], ["s", "q"])
    a = grpo.CREDITS["gigpo"]([late, in_time], scale="none")
    assert a.tolist() == pytest.approx([1 / 2 + 0.9025 / 2, 1 / 2, 1 / 2, -1 / 2 - 0.9025 / 2, -1 / 2])


def slow_gigpo(episodes, omega, gamma, scale):
    """From the paper, on plain floats."""
    def normalized(value, peers):
        mean = sum(peers) / len(peers)
        if all(x == peers[0] for x in peers):
            return 0.0
        std = math.sqrt(sum((x - mean) ** 2 for x in peers) / (len(peers) - 1)) + 1e-4
        return (value - mean) / (std if scale == "group" else 1.0)

    def to_go(t, turn):
        return sum(gamma ** (k - turn) * t.rewards[k] for k in range(turn, len(t.rewards)))
    out = []
    for t in episodes:
        group = [other for other in episodes if other.group_id == t.group_id]
        for turn in range(len(t.rewards)):
            state = t.info["states"][turn]
            peers = [to_go(other, k) for other in group for k in range(len(other.rewards)) if other.info["states"][k] == state]
            out.append(normalized(sum(t.rewards), [sum(other.rewards) for other in group])
                       + omega * normalized(to_go(t, turn), peers))
    return out


@pytest.mark.parametrize("scale", ["group", "none"])
def test_gigpo_equals_a_loop(scale):
    rng = random.Random(0)
    for _ in range(20):
        turns = [rng.randint(1, 4) for _ in range(8)]
        episodes = [episode([rng.choice([0.0, 0.5, 1.0]) for _ in range(n)], [rng.choice("xyz") for _ in range(n)], group=rng.choice("ab")) for n in turns]
        assert grpo.CREDITS["gigpo"](episodes, scale=scale).tolist() == pytest.approx(slow_gigpo(episodes, 1.0, 0.95, scale), abs=1e-10)
        for omega, gamma in ((1.0, 1.0), (0.3, 0.9)):
            a = grpo.CREDITS["gigpo"](episodes, scale=scale, omega=omega, gamma=gamma)
            assert a.tolist() == pytest.approx(slow_gigpo(episodes, omega, gamma, scale), abs=1e-10)


def test_without_a_state_it_is_the_last_observation():
    messages = [{"role": ROLES[word[0]], "content": word} for word in ("u1", "a0", "u2", "a1", "t1", "t2", "a2", "t3", "a3", "t4")]
    assert states_of(SimpleNamespace(rewards=[0.0] * 3, info={}, messages=messages)) == [("u2",), ("t1", "t2"), ("t3",)]


def test_the_states_of_an_episode_are_those_before_its_turns(tmp_path):
    """Equations name the equation as it stands, search the titles that were seen, and an attribute of that name is left alone."""
    from envs.session import Session
    from envs.equations import Equations
    from envs.search import Search

    def states(cls, task, calls):
        session = Session("it", cls, task)
        session.start()
        for name, arguments in calls:
            session.submit([{"name": name, "arguments": arguments}])
            session.results()
        return session.notes.get("states")
    wrong = ("divide_terms", {"terms": "zero"})
    seen = states(Equations, {"equation": "2x + 1 = 5"}, [("subtract_terms", {"terms": "1"}), wrong, ("divide_terms", {"terms": "2"})])
    assert seen == ["2x + 1 = 5", "2x = 4", "2x = 4", "x = 2"]
    task = Search._tasks("train", 1, 0)[0]
    titles = states(Search, task, [("search", {"query": task["question"]})])
    assert titles[0] == "" and titles[1]

    class Attribute(Equations):
        _state = "mine"
    assert states(Attribute, {"equation": "x + 1 = 5"}, []) is None


def parts_of(values, groups, weights):
    """Episodes of one turn whose reward functions returned these values, None for not scored."""
    episodes = []
    for row, group in zip(values, groups, strict=True):
        scored = {name: value for name, value in zip(weights, row, strict=True) if value is not None}
        total = sum(weights[name] * value for name, value in scored.items())
        episodes.append(Trajectory(rewards=[total], group_id=group, reward_parts=scored, info={"reward_weights": weights}))
    return episodes


def test_gdpo_by_hand():
    """Two functions: 0, 0, 1 (mean 1/3, std sqrt(1/3)) and 0, 30, 30 (mean 20, std sqrt(300)), weights 1 and 0.5."""
    a = grpo.CREDITS["gdpo"](parts_of([[0.0, 0.0], [0.0, 30.0], [1.0, 30.0]], "ggg", {"a": 1.0, "b": 0.5}), scale="batch")
    s, t = math.sqrt(1 / 3) + 1e-4, math.sqrt(300) + 1e-4
    total = [-1 / 3 / s - 10 / t, -1 / 3 / s + 5 / t, 2 / 3 / s + 5 / t]  # mean 0
    std = math.sqrt(sum(x * x for x in total) / 2) + 1e-4
    assert a.tolist() == pytest.approx([x / std for x in total], rel=1e-12)
    # By the sum of rewards, 0, 15, 16, the second would be hardly worse than the third.
    summed = grpo.CREDITS["episode"](parts_of([[0.0, 0.0], [0.0, 30.0], [1.0, 30.0]], "ggg", {"a": 1.0, "b": 0.5}), scale="none")
    assert float((summed[2] - summed[1]) / (summed[2] - summed[0])) < 0.07 and float((a[2] - a[1]) / (a[2] - a[0])) == pytest.approx(2 / 3, abs=0.001)
    silent = grpo.CREDITS["gdpo"](parts_of([[0.1, 1.0]] * 7, "g" * 7, {"a": 1.0, "b": 0.5}))
    assert (silent == 0).all()


def test_gdpo_equals_trl():
    """TRL 1.16's lines for `multi_objective_aggregation="normalize_then_sum"`, with its own nanstd. A function may score nothing."""
    nanstd = pytest.importorskip("trl.trainer.utils").nanstd
    rng = random.Random(1)
    for size in (3, 6):
        values = [[rng.choice([0.0, 0.5, 1.0]), rng.gauss(0, 10)] for _ in range(4 * size)]
        values[1][0] = None
        weights = {"a": 0.7, "b": 2.0}
        a = grpo.CREDITS["gdpo"](parts_of(values, [i // size for i in range(4 * size)], weights))
        rewards = torch.tensor([[math.nan if x is None else x for x in row] for row in values])
        grouped = rewards.view(-1, size, 2)
        reward_k = ((grouped - torch.nanmean(grouped, dim=1, keepdim=True)) / (nanstd(grouped, dim=1, keepdim=True) + 1e-4)).view(-1, 2)
        total = (reward_k * torch.tensor([0.7, 2.0])).nansum(dim=1)
        trl = (total - torch.nanmean(total)) / (nanstd(total) + 1e-4)
        assert torch.allclose(a, trl, rtol=1e-9, atol=1e-9)


def test_rewards_note_their_weights_for_gdpo_alone():
    from extras.rewards.functions import load
    for credit, noted in (("gdpo", {"environment": 1.0, "tool_used": 0.5}), ("episode", None)):
        pay = load(grpo.Config(rewards="tool_used=0.5", credit=credit))
        t = Trajectory(rewards=[1.0], reward=1.0, stop_reason="done",
                       info={"success": True, "tool_calls": 1, "unreadable_calls": 0, "tool_errors": 0, "task": {}})
        pay([SimpleNamespace(trajectory=t, session=SimpleNamespace(pays=True))])
        assert t.info.get("reward_weights") == noted and t.rewards == [1.5] and t.reward_parts == {"environment": 1.0, "tool_used": 1.0}


@pytest.mark.parametrize("loss, credit, scale", [("dr_grpo", "gdpo", "batch"), ("deepseek", "gdpo", "batch"), ("grpo", "gigpo", "none"), ("dr_grpo", "episode", "none")])
def test_the_scale_is_the_credits_before_the_losss(loss, credit, scale):
    """GDPO divides by the std of the batch, whatever the loss's paper does with other credits."""
    rewards = "format=1,length=0.5" if credit == "gdpo" else None
    assert grpo.settle(grpo.Config(loss=loss, credit=credit, rewards=rewards)).scale_rewards == scale
