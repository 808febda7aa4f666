"""What a step's groups say."""


def group_shares(batch, advantages):
    """Return shares of groups whose episodes all succeed, all fail, differ, or teach nothing."""
    successes, signal = {}, {}
    for t, row in zip(batch, advantages):
        successes.setdefault(t.group_id, []).append(t.info["success"])
        signal[t.group_id] = signal.get(t.group_id, False) or bool(row.any())
    right = sum(all(group) for group in successes.values()) / len(successes)
    wrong = sum(not any(group) for group in successes.values()) / len(successes)
    return {"groups_all_right": right, "groups_all_wrong": wrong, "groups_mixed": 1 - right - wrong,
            "groups_without_signal": 1 - sum(signal.values()) / len(signal)}
