"""extras/fast/order.py: which episodes share a forward pass, and how many tokens it then takes."""
from agent import Trajectory
from core import data
from extras.fast.order import forwarded_tokens, pass_order


def episode(group, prompt, sampled):
    """An episode of a group, whose prompt is the group's own, with so many tokens each."""
    ids = [ord(str(group))] * prompt + [7] * sampled
    return Trajectory(ids, [0] * prompt + [1] * sampled, [0.0] * len(ids), group_id=group)


def test_forwarded_tokens_by_hand():
    """Of a pass the prompt that all begin with counts once, and what is shorter than the longest is padded."""
    a, b, c = episode("a", 10, 2), episode("a", 10, 5), episode("b", 4, 1)
    assert forwarded_tokens([a, b, c], 2) == 10 + 2 * 5 + 5 and forwarded_tokens([b, c], 2) == 2 * 15
    assert forwarded_tokens([a, b, c], 1) == 12 + 15 + 5
    assert forwarded_tokens([a, b, b, b], 4) == forwarded_tokens([a, b], 2)  # equal ones go through once


def test_the_pass_order_is_by_group_for_long_prompts_and_by_length_for_short_ones():
    for prompt, by_group in ((100, True), (1, False)):
        episodes = [episode(group, prompt, sampled + (group == "b")) for sampled in (2, 30, 9, 16) for group in "ab"]
        order = pass_order(episodes, 4)
        groups, lengths = [t.group_id for t in order], [len(t.token_ids) for t in order]
        assert sorted(map(id, order)) == sorted(map(id, episodes)) and lengths[0] == prompt + 31  # the longest first
        assert (groups == ["b"] * 4 + ["a"] * 4) == by_group and (lengths == sorted(lengths, reverse=True)) == (not by_group)


def test_group_ids_of_two_kinds_are_put_in_order():
    """A file of recorded episodes may have numbers and names. Once the update ended in a TypeError."""
    episodes = [episode(group, 3, 2) for group in ("a", 1, "1", 0, "a", 1)]
    assert sorted(map(id, pass_order(episodes, 2))) == sorted(map(id, episodes))


def test_cores_order_is_by_group_and_begins_with_the_longest():
    episodes = [episode(group, 5, sampled) for sampled in (2, 30, 9) for group in "ab"] + [episode("b", 5, 31)]
    order = data.pass_order(episodes, 2)
    assert [t.group_id for t in order] == ["b"] * 4 + ["a"] * 3 and [len(t.token_ids) for t in order] == [36, 35, 14, 7, 35, 14, 7]
