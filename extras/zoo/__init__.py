"""The zoo: more losses, credits, corrections, filters and draws for grpo.py, that fewer runs need.

    surrogates.py   --loss sapo, luspo, vespo, dppo, deepseek
    credits.py      --credit gigpo, gdpo
    corrections.py  --importance_mode token_mask, sequence_truncate, sequence_mask, geometric_mask
    filters.py      --filter truncated, void, both
    pools.py        --draw difficulty
    here            --echo_coef

Each is a function with the signature of its table, its equation and its paper. `more_rows` adds the
rows to the tables of grpo.py, which asks for them where the tables end. `tokens_to_learn` overrides
that of core.data: it applies the filter, and says which tokens ECHO predicts. `RolloutFlags` adds
flags to those of envs.tasks, in grpo.py alone. `by_difficulty` wraps `collect_groups`.
"""
from dataclasses import dataclass
from functools import partial, update_wrapper

import envs.tasks
import torch
from core.config import CHANGED, FILLED, UserError, flag
from extras.zoo import surrogates
from extras.zoo.corrections import CORRECTIONS
from extras.zoo.credits import gdpo, gigpo
from extras.zoo.filters import FILTERS
from extras.zoo.pools import collect_by_difficulty


@dataclass(kw_only=True)
class RolloutFlags(envs.tasks.RolloutFlags):
    heading = "extras/zoo"
    filter: str = flag("none", "episodes that teach nothing, but count in their group's mean: cut "
                       "by a limit of tokens, or with a turn that is neither call nor answer",
                       choices=FILTERS)
    draw: str = flag("epochs", "how tasks are drawn; difficulty: rarely those whose last group all "
                     "succeeded or all failed", choices=("epochs", "difficulty"))
    echo_coef: float = flag(0.0, "weight of the cross-entropy on what tools wrote (ECHO)", low=0)


def more_rows(losses, credits, corrections, settings, compare):
    """Add the rows of this layer to the tables of grpo.py.

    compare: `group_advantages`, which credits need.
    """
    # A fork's row may hold a partial, which has no name.
    functions = {getattr(f, "__name__", None): f for row in losses.values() for f in row}
    for name, row in surrogates.LOSSES.items():
        losses[name] = tuple(functions.get(part, part) for part in row)
    masked, normalizer = losses["deepseek"]
    losses["deepseek"] = bound(masked, surrogate=functions["clipped"]), normalizer
    for credit in (gigpo, gdpo):
        credits[credit.__name__] = bound(credit, compare=compare)
    corrections.update(CORRECTIONS)
    settings.update(surrogates.SETTINGS)


def bound(function, **options):
    """Return the function with these options bound, under its own name."""
    return update_wrapper(partial(function, **options), function)


def tokens_to_learn(config, episodes, mask, advantages, run):
    """Apply --filter, and find what tools wrote: mask, observed and advantages, (B, T) each.

    All three are 0 in episodes that the filter names. With --echo_coef `observed` is 1 where a
    token follows the first sampled one and was not sampled: results of tools, replies, and what the
    template writes around them. ECHO (arXiv 2605.24517) leaves out warnings of its terminal; here
    the policy learns all that the environment may answer.
    """
    teaches = [not FILTERS[config.filter](t) for t in episodes]
    if config.filter != "none":
        run.log(filtered=teaches.count(False) / len(teaches))
    kept = torch.tensor(teaches, device=mask.device)[:, None]  # (B, 1)
    mask = mask * kept
    observed = torch.zeros_like(mask)
    if config.echo_coef:
        lengths = torch.tensor([len(t.token_ids) for t in episodes], device=mask.device)
        inside = torch.arange(mask.shape[1], device=mask.device) < lengths[:, None]  # (B, T)
        observed += (mask.cumsum(1) > 0) & inside & (mask == 0)
    return mask, observed, advantages * kept


def by_difficulty(collect):
    """Wrap `collect_groups`: with --draw difficulty, tasks are drawn by their last success."""
    def collect_groups(play, tasks, config, step, run):
        if getattr(config, "draw", "epochs") != "difficulty":
            return collect(play, tasks, config, step, run)
        return collect_by_difficulty(play, tasks, config, step, run)
    return collect_groups


def check(config):
    """Raise UserError where a flag of this layer cannot act. Other programs do not have them."""
    if not isinstance(config, RolloutFlags):
        return
    if config.importance_mode != "token_truncate" and not config.importance_correction:
        raise UserError(f"--importance_mode {config.importance_mode} needs "
                        "--importance_correction C: nothing is corrected without it")
    if 0 < (config.importance_correction or 2) < 1 and config.importance_mode.endswith("_mask"):
        raise UserError("--importance_correction below 1 leaves [1 / C, C] empty")
    if config.draw == "difficulty" and config.rollout_ahead:
        raise UserError("--draw difficulty: --rollout_ahead 1 draws tasks before it is known how "
                        "hard the last ones were")
    if config.echo_coef and config.max_turns == 1:
        raise UserError("--echo_coef: with --max_turns 1 no tool's answer is shown to the policy")
    if config.scale_rewards == "mean" and config.credit in ("process", "gdpo"):
        raise UserError(f"--scale_rewards mean: --credit {config.credit} compares no returns, and "
                        "what it compares may be negative")
    if config.credit == "gdpo":
        check_gdpo(config)


def check_gdpo(config):
    """Raise UserError unless there are several reward functions to normalize."""
    items = [item.partition("=") for item in (config.rewards or "").split(",") if item.strip()]
    names = {name.strip() for name, _, _ in items}
    if names and envs.all_have(config.env, "get_reward"):
        names.add("environment")
    if len(names) < 2:
        raise UserError("--credit gdpo normalizes each function of --rewards: name two or more")
    if any(weight.strip() == "veto" for _, _, weight in items):
        raise UserError("--credit gdpo: a veto is no sum; leave it out")


FILLED.append(check)
# With this layer a refusal of a choice names no other place.
for name in ("loss", "credit", "importance_mode"):
    CHANGED.setdefault(name, {})["more"] = ""
