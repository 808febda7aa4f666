"""Alarms: what the log of a run says has collapsed, and what people do then."""
import math
from collections import deque

from experiment.data import lines_of, parse_object, reading

WINDOW = 5  # lines of the log at the beginning and at the end that are compared


class Alarms:
    """Watch the lines of metrics.jsonl. Each kind of alarm is raised once."""

    def __init__(self):
        self.early = []
        self.late = deque(maxlen=WINDOW)
        self.raised = set()

    def add(self, metrics):
        """Take in the metrics of a step."""
        if len(self.early) < WINDOW:
            self.early.append(metrics)
        self.late.append(metrics)

    def read(self, path):
        """Take in the lines of metrics.jsonl that a resumed run has written before."""
        if path.exists():
            for number, line in lines_of(path):
                with reading(path, number):
                    self.add(parse_object(line))

    def new(self):
        """Return the sentences of the alarms that are raised for the first time."""
        if len(self.early) < WINDOW:
            return []
        sentences = alarms(self.early, self.late)
        new = [sentences[kind] for kind in sentences if kind not in self.raised]
        self.raised.update(sentences)
        return new


def alarms(early, late):
    """Return {kind of alarm: one sentence} for a run's first and latest lines of metrics.

    Learning changes these numbers, too. Where success has grown, or is above 0.9, some of them say
    nothing. The mean of a number that is not there is NaN, which compares false: no alarm.
    """
    before = {name: _mean(early, name) for name in NAMES}
    now = {name: _mean(late, name) for name in NAMES}
    out = {}
    for check in (_exploration, _drift, _length, _tools, _signal):
        out.update(check(before, now))
    return out


NAMES = ("success", "entropy", "approx_kl", "kl", "sampled_tokens", "actions", "truncated",
         "structure", "groups_without_signal")


def _mean(rows, name):
    values = [row[name] for row in rows if isinstance(row.get(name), (int, float))]
    return sum(values) / len(values) if values else math.nan


def _exploration(before, now):
    was, entropy = before["entropy"], now["entropy"]
    if entropy < 0.3 * was and not now["success"] > 0.9:
        yield "entropy", (
            f"entropy fell from {was:.3g} to {entropy:.3g} nats a token, the policy hardly "
            "explores; people lower --learning_rate, raise --entropy_coef or --kl_coef, or use "
            "--clip_eps_high 0.28")
    if entropy > max(3 * was, 0.5):
        yield "noise", (
            f"entropy rose from {was:.3g} to {entropy:.3g} nats a token, sampling turns to noise; "
            "people lower --learning_rate or --entropy_coef, or raise --kl_coef")


def _drift(before, now):
    if now["approx_kl"] > 0.1:
        yield "approx_kl", (
            f"updates move the policy {now['approx_kl']:.3g} nats a token away from the sampler; "
            "people lower --learning_rate or --updates_per_step")
    if now["kl"] > 0.5:
        yield "kl", (
            f"KL to the policy this run started from is {now['kl']:.3g} nats a token; "
            "people raise --kl_coef or lower --learning_rate")


def _length(before, now):
    was, tokens = before["sampled_tokens"], now["sampled_tokens"]
    better = now["success"] > before["success"] + 0.05
    if tokens > 2 * was and not better:
        yield "length", (
            f"episodes grew from {was:.0f} to {tokens:.0f} sampled tokens and solve no more; "
            "people lower --max_new_tokens, give length a cost, or use --loss dr_grpo or dapo")
    if tokens < 0.4 * was and not better:
        yield "length", (
            f"episodes shrank from {was:.0f} to {tokens:.0f} sampled tokens and solve no more; "
            "people read them in report.html: something short is rewarded, or nothing is")
    if now["truncated"] > 0.2:
        yield "truncated", (
            f"{now['truncated']:.0%} of episodes are cut by a token limit; people raise "
            "--max_new_tokens (one turn) or --max_tokens (the episode), as stop reasons say")


def _tools(before, now):
    was, actions = before["actions"], now["actions"]
    if actions < 0.3 * was:
        yield "tools", (
            f"tool calls an episode fell from {was:.2g} to {actions:.2g}; people check that the "
            "reward cannot be had without tools, lower --learning_rate, or give more SFT")
    if now["structure"] < 0.1:
        yield "structure", (
            "the model makes hardly any tool call that can be read; people teach it the format "
            "first: python sft.py with the same --model_path and --env, then start from its folder")


def _signal(before, now):
    share = now["groups_without_signal"]
    if share > 0.9:
        tasks = "harder tasks" if now["success"] > 0.5 else "easier tasks or more SFT"
        yield "signal", (
            f"in {share:.0%} of groups all advantages are 0 and teach nothing; people "
            f"take {tasks}, a larger --group_size, or --success_rate_lb and --success_rate_ub")
