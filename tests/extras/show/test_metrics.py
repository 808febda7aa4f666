"""Every number that a run writes stands in the table that explains it. Whole runs are looked at in tests/test_run_layers.py."""
import sys

import torch

import dpo
import grpo
import reward_weighted
from agent import Trajectory
from extras.show import __main__
from extras.show.loggers import USUAL
from extras.show.metrics import METRICS, meaning
from extras.show.notes import HELD_OUT, STEP_NUMBERS, WATCHED


def unknown(names):
    return sorted(name for name in names if not meaning(name))


def test_a_name_that_is_not_in_the_table_is_found():
    assert unknown(["loss", "pass@16", "eval/reward/answer", "success/a.py:B", "pairs/loss"]) == []
    assert unknown(["lose", "pass@", "evaluation/loss", "my/loss", "reward/"]) == ["evaluation/loss", "lose", "my/loss", "pass@", "reward/"]
    assert meaning("reward/chosen") is METRICS["reward/chosen"] and meaning("reward/exact") is METRICS["reward/NAME"]


def test_what_every_loss_and_weighting_logs_is_in_the_table():
    names, x, mask = set(), torch.randn(2, 4), torch.ones(2, 4)
    for loss in grpo.LOSSES:
        settings = grpo.settle(grpo.Config(loss=loss, kl_coef=0.1))
        names |= grpo.total_loss(settings, grpo.Counts(2, 8, 4), x, x, x, x, x, mask, x)[1].keys()
    names |= grpo.weighted(x, x, x, mask, 2.0)[1].keys()
    for loss in dpo.LOSSES:
        losses = dpo.weighted_losses(dpo.Config(loss=loss))
        names |= dpo.pair_loss(x, torch.zeros(2), mask, dpo.Counts(1, 4), losses, beta=0.1, sft_coef=1.0)[1].keys()
    episodes = [Trajectory(rewards=[r], reward=r, group_id="0") for r in (0.0, 1.0)]
    for weighting in ("exp", "linear"):
        names |= reward_weighted.weigh(episodes, reward_weighted.Config(weighting=weighting))[1].keys()
    names |= {"echo", "filtered", "tasks_easy", "tasks_hard"}
    assert {"phi", "off_policy", "loss/ipo", "ess", "importance_weight"} <= names and not unknown(names)


def test_what_is_printed_watched_and_sent_is_in_the_table():
    assert not unknown([*HELD_OUT, *STEP_NUMBERS, *WATCHED, *USUAL])


def test_rows_are_sentences_and_are_printed(capsys, monkeypatch):
    for unit, sentence, look_for in METRICS.values():
        assert sentence.endswith(".") and not look_for.endswith(".") and " " not in unit
    monkeypatch.setattr(sys, "argv", ["extras.show", "--metrics"])
    __main__.program()
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80 and {line.partition(" ")[0] for line in lines if line[0] != " "} == METRICS.keys()
    assert "    Mean entropy of the policy, over the tokens in the update. Look for: a slow" in lines
