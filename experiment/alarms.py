"""Alarms: what the log of a run says has collapsed, and what people do then."""
import math
from statistics import fmean
from types import SimpleNamespace

from experiment.data import objects

WINDOW = 5  # lines of the log at the beginning and at the end that are compared
NAMES = ("success", "entropy", "approx_kl", "kl", "sampled_tokens", "actions", "truncated",
         "structure", "groups_without_signal")


class Alarms:
    """Watch the lines of metrics.jsonl. Each kind of alarm is raised once."""

    def __init__(self):
        self.lines = []
        self.raised = set()

    def add(self, metrics):
        """Take in a step's metrics. Return the sentences of the alarms that it raises first."""
        self.lines.append(metrics)
        if len(self.lines) < WINDOW:
            return []
        raised = alarms(self.lines[:WINDOW], self.lines[-WINDOW:])
        new = [raised[kind] for kind in raised if kind not in self.raised]
        self.raised.update(raised)
        return new

    def read(self, path):
        """Take in the lines of metrics.jsonl that a resumed run has written before."""
        if path.exists():
            for _, metrics in objects(path):
                self.add(metrics)


def alarms(early, late):
    """Return {kind of alarm: one sentence} for a run's first and latest lines of metrics.

    Learning changes these numbers, too. Where success has grown, or is above 0.9, some of them say
    nothing. The mean of a number that is not there is NaN, which compares false: no alarm.
    """
    was, now = means(early), means(late)
    better = now.success > was.success + 0.05
    tasks = "harder tasks" if now.success > 0.5 else "easier tasks or more SFT"
    checks = [
        ("entropy", now.entropy < 0.3 * was.entropy and not now.success > 0.9,
         f"entropy fell from {was.entropy:.3g} to {now.entropy:.3g} nats a token, the policy "
         "hardly explores; people lower --learning_rate, raise --entropy_coef or --kl_coef, or use "
         "--clip_eps_high 0.28"),
        ("noise", now.entropy > max(3 * was.entropy, 0.5),
         f"entropy rose from {was.entropy:.3g} to {now.entropy:.3g} nats a token, sampling turns "
         "to noise; people lower --learning_rate or --entropy_coef, or raise --kl_coef"),
        ("approx_kl", now.approx_kl > 0.1,
         f"updates move the policy {now.approx_kl:.3g} nats a token away from the sampler; "
         "people lower --learning_rate or --updates_per_step"),
        ("kl", now.kl > 0.5,
         f"KL to the policy this run started from is {now.kl:.3g} nats a token; "
         "people raise --kl_coef or lower --learning_rate"),
        ("length", now.sampled_tokens > 2 * was.sampled_tokens and not better,
         f"episodes grew from {was.sampled_tokens:.0f} to {now.sampled_tokens:.0f} sampled tokens "
         "and solve no more; people lower --max_new_tokens, give length a cost, or use "
         "--loss dr_grpo or dapo"),
        ("length", now.sampled_tokens < 0.4 * was.sampled_tokens and not better,
         f"episodes shrank from {was.sampled_tokens:.0f} to {now.sampled_tokens:.0f} sampled "
         "tokens and solve no more; people read them in report.html: something short is rewarded, "
         "or nothing is"),
        ("truncated", now.truncated > 0.2,
         f"{now.truncated:.0%} of episodes are cut by a token limit; people raise "
         "--max_new_tokens (one turn) or --max_tokens (the episode), as stop reasons say"),
        ("tools", now.actions < 0.3 * was.actions,
         f"tool calls an episode fell from {was.actions:.2g} to {now.actions:.2g}; people check "
         "that the reward cannot be had without tools, lower --learning_rate, or give more SFT"),
        ("structure", now.structure < 0.1,
         "the model makes hardly any tool call that can be read; people teach it the format first: "
         "python sft.py with the same --model_path and --env, then start from its folder"),
        ("signal", now.groups_without_signal > 0.9,
         f"in {now.groups_without_signal:.0%} of groups all advantages are 0 and teach nothing; "
         f"people take {tasks}, a larger --group_size, or --success_rate_lb and "
         "--success_rate_ub")]
    return {kind: sentence for kind, is_raised, sentence in checks if is_raised}


def means(rows):
    """Return the mean of each number that the alarms watch, over the rows that have it."""
    out = SimpleNamespace()
    for name in NAMES:
        values = [row[name] for row in rows if isinstance(row.get(name), (int, float))]
        setattr(out, name, fmean(values or [math.nan]))
    return out
