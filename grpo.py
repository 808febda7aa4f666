"""Group-relative policy optimization (GRPO) for tool-calling agents. A group is its own baseline.

A step of `train` plays a group of episodes of each task, compares every episode with its group, and
updates the policy with the clipped probability ratio times the advantage. The equations above it
are pure functions. extras/zoo has more of them: sapo, luspo, vespo, dppo, deepseek, GiGPO, GDPO,
masks of sequences. Left out: adaptive KL coefficients, value networks, bnpo.

    python grpo.py                            the tiny model, from nothing: minutes on 2 CPU cores
    python grpo.py --model_path Qwen/Qwen2.5-0.5B-Instruct --env gsm8k

Shapes: B sequences of T tokens, in a step or a micro-batch (b where both occur); N rewards. Column
t of a (B, T) tensor belongs to token t. A mask is 1 exactly where the policy sampled the token,
`observed` where a tool wrote it and ECHO learns it. sg is stop_gradient. Five log-probs of a token:

    logprobs            of the policy in training
    sampled_logprobs    of the sampler, when the episode was played
    trainer_logprobs    of the policy before the step's updates, by the trainer's forward pass
    old_logprobs        the ratio's denominator: sampled, or trainer with --importance_correction
    ref_logprobs        of the policy that this run started from, for the KL penalty
"""
import math
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

# Imported before torch: it sets how torch's threads wait.
from layers import (LayerFlags, RolloutFlags, Run, collect_groups, load_model, main, more_rows,
                    pass_order, tokens_to_learn)
from core.config import (ModelFlags, RunFlags, TrainingFlags, UserError, auto, fill, flag,
                         options_for)
from envs.tasks import train_and_held_out
from core.data import collate, group_shares, members, per_token, unusable

import torch
from torch.nn.utils import clip_grad_norm_

import envs
from agent import evaluate, rollout, rollout_options
from core.model import adamw, is_tiny, scheduled, steps_of
from core.logprobs import score, token_logprobs
from lora import freeze_reference, merged_to_train, reference
from schooling import teach_tiny


# ------------------------------------------------------------------------------------- advantages
def group_advantages(rewards, group_ids, scale="group", leave_one_out=False):
    """Compare each reward with its group's: A_i = (r_i - mean) / (std + 1e-4), (N,).

    arXiv 2402.03300 section 4.1.2, the std unbiased as in TRL. Equal rewards get exactly 0, and so
    does a group of one.

    rewards: (N,). group_ids: N hashable ids, in any order. scale: see `divisor`. leave_one_out: the
    baseline is the mean of the others (RLOO, arXiv 2402.14740).
    """
    advantages = torch.zeros_like(rewards)
    for group in members(group_ids):  # the indices of its rewards
        # Shift first: the mean of equal floats may differ from them by rounding, and Adam would
        # scale that up to full steps.
        r = rewards[group] - rewards[group[0]]
        if r.any():
            # r_i - (mean of the others) = (r_i - mean) G / (G - 1).
            factor = len(group) / (len(group) - 1) if leave_one_out else 1.0
            advantages[group] = factor * (r - r.mean()) / divisor(rewards, group, scale)
    return advantages


def divisor(rewards, group, scale):
    """Return what divides the advantages of a group, given as indices of its rewards.

    "group": its std, arXiv 2402.03300. "batch": the std of all, arXiv 2508.08221. "none": 1, Dr.
    GRPO, arXiv 2503.20783. "mean": its mean, MaxRL, arXiv 2602.02710, where no reward is negative.
    """
    if scale == "mean" and (low := rewards.min()) < 0:
        raise UserError(f"--scale_rewards mean: a reward is {low:.3g} < 0: lower --reward_bias")
    return {"group": (rewards[group] - rewards[group[0]]).std() + 1e-4, "none": 1.0,
            "batch": rewards.std() + 1e-4, "mean": rewards[group].mean()}[scale]


# A credit function takes B episodes (`agent.Trajectory`: rewards of its turns, group_id, messages,
# info) and the options of `group_advantages`. It returns the advantages of all turns in one tensor,
# episode after episode. Turn k is the k-th assistant message after the prompt.
def episode_credit(episodes, **options):
    """Give all turns their episode's advantage: outcome supervision (2402.03300 section 4.1.2)."""
    totals = torch.tensor([math.fsum(t.rewards) for t in episodes])  # (B,)
    turns = torch.tensor([len(t.rewards) for t in episodes])  # (B,)
    group_ids = [t.group_id for t in episodes]
    return group_advantages(totals, group_ids, **options).repeat_interleave(turns)


def turn_credit(episodes, **options):
    """Compare a turn's return-to-go with its group's at this turn; alone at it, a turn gets 0."""
    returns, peers = [], []
    for t in episodes:
        for turn in range(len(t.rewards)):
            returns.append(math.fsum(t.rewards[turn:]))
            peers.append((t.group_id, turn))
    return group_advantages(torch.tensor(returns), peers, **options)


def return_credit(episodes, scale="group"):
    """Compare a turn's return-to-go with the group's returns: (return-to-go - mean) / (std + 1e-4).

    Where the reward comes at the end, it is `episode_credit`. A group of equal returns gets 0.
    """
    returns = torch.tensor([math.fsum(t.rewards) for t in episodes])  # (B,)
    advantages = [torch.zeros(len(t.rewards)) for t in episodes]  # B of (turns,)
    for group in members([t.group_id for t in episodes]):
        first = returns[group[0]]
        r = returns[group] - first  # as in group_advantages
        if not r.any():
            continue
        for i in group:
            to_go = torch.tensor(episodes[i].rewards).flip(0).cumsum(0).flip(0)  # (turns,)
            advantages[i] = (to_go - first - r.mean()) / divisor(returns, group, scale)
    return torch.cat(advantages)


def process_credit(episodes, **options):
    """Sum a turn's and all later rewards, normalized over the group: process supervision (4.1.3).

    Beware where the reward comes at the end: every turn before it then counts -mean / std, so that
    each further turn costs, however correct it is. In eight correct episodes of three turns the
    first call gets 0, the second 0.69 and the answer 1.38: an answer in the first turn gains most.
    Where only the longer way is right, it learns the shorter one. `return_credit` does not.
    """
    rewards, owners = [], []
    for t in episodes:
        rewards += t.rewards
        owners += [t.group_id] * len(t.rewards)
    normalized = group_advantages(torch.tensor(rewards), owners, **options)
    per_episode = normalized.split([len(t.rewards) for t in episodes])  # B of (turns,)
    return torch.cat([r.flip(0).cumsum(0).flip(0) for r in per_episode])


# The choices of --credit. A credit function goes here, with options of its own bound by partial.
CREDITS = {"episode": episode_credit, "turn": turn_credit, "return": return_credit,
           "process": process_credit, "rloo": partial(episode_credit, leave_one_out=True)}


def token_advantages(episodes, mask, credit="episode", **options):
    """Give every sampled token the advantage of its turn, and all others 0: (B, T).

    mask: (B, T), a run of 1s is a turn. Raises ValueError unless each turn has one value.
    """
    turns = [len(t.rewards) for t in episodes]
    values = CREDITS[credit](episodes, **options)  # (turns of all episodes,)
    if len(values) != sum(turns):
        raise ValueError(f"credit {credit}: {len(values)} values for {sum(turns)} turns")
    return per_token(values.split(turns), mask)


# ------------------------------------------------------------------------------------ normalizers
class Counts(NamedTuple):
    """Divisors of the whole step: the losses of its micro-batches and ranks add up to its loss."""

    sequences: int  # those without a sampled token count too
    tokens: int  # sum of the masks
    max_tokens: int  # the longest episode allowed, a constant
    trained: int = 0  # of these tokens, those in the update, if some episodes are left out
    observed: int = 0  # tokens that tools wrote, with --echo_coef


def masked(x, mask):
    """Return x where the mask is 1, else 0. Apply it before exp: backward, 0 * inf is NaN."""
    return torch.where(mask.bool(), x, 0.0)


def truncated_importance_weights(trainer_logprobs, sampled_logprobs, mask, cap):
    """Return sg(min(pi_trainer / pi_sampler, cap)) (B, T): fengyao.notion.site/off-policy-rl"""
    return masked(trainer_logprobs - sampled_logprobs, mask).exp().clamp(max=cap).detach()


CORRECTIONS = {"token_truncate": truncated_importance_weights}  # the choices of --importance_mode


def weighted(advantages, trainer_logprobs, sampled_logprobs, mask, cap, mode="token_truncate"):
    """Return advantages x importance weights (B, T), and what to log of the sampled tokens'."""
    weights = CORRECTIONS[mode](trainer_logprobs, sampled_logprobs, mask, cap)
    sampled = weights[mask.bool()]  # (n,)
    return advantages * weights, {"importance_weight": sampled.mean().item(),
                                  "importance_capped": (sampled >= cap).float().mean().item(),
                                  "importance_left_out": (sampled == 0).float().mean().item()}


# A normalizer sums the tokens' losses (b, T) under the mask, and divides by a count of the step.
def sequence_mean(x, mask, counts):
    """Mean over each sequence's tokens, then over sequences."""
    return (masked(x, mask).sum(1) / mask.sum(1).clamp(min=1)).sum() / counts.sequences


def token_mean(x, mask, counts):
    """Mean over all tokens of the step, as in TRL. DAPO eq. 8 and CISPO take it over each group."""
    return masked(x, mask).sum() / counts.tokens


def constant_mean(x, mask, counts):
    """Sum over tokens / (sequences x max_tokens): no length bias. max_tokens includes prompts."""
    return masked(x, mask).sum() / (counts.sequences * counts.max_tokens)


# ----------------------------------------------------------------------------------------- losses
def kl_estimate(logprobs, ref_logprobs, mask, kind, old_logprobs=None):
    """Estimate KL(policy || reference) per token (B, T), with x = log(policy / reference).

    It is each token's own KL: what a token changes in the KL of later ones is left out.

    k2: x^2 / 2 (joschu.net/blog/kl-approx.html). Its gradient is that of KL(policy || reference).
    k3: exp(-x) - 1 + x (arXiv 2402.03300 eq. 4). Its gradient is that of KL(reference || policy),
        and explodes where a token has become unlikely.
    k3_ratio: k3 * policy / old (arXiv 2512.02556). Value and gradient are unbiased if old is what
        sampled. The default of TRL 1.16, which in gspo and luspo takes the sequence's ratio.
    """
    x = masked(logprobs - ref_logprobs, mask)
    if kind == "k2":
        return x**2 / 2
    k3 = torch.exp(-x) - 1 + x
    return k3 if kind == "k3" else k3 * masked(logprobs - old_logprobs, mask).exp()


# A surrogate takes log_ratio = log(policy / old), logprobs and advantages, all 0 where the mask is
# 0, the mask, (b, T) each, and the clip range. It returns the tokens' losses (b, T), which have no
# gradient where the advantage is 0, and a dict to log, of tensors that broadcast to (b, T).
def clipped(log_ratio, logprobs, advantages, mask, *, clip_eps_low, clip_eps_high, delta=None):
    """-min(ratio A, clip(ratio, 1 - eps_low, 1 + eps_high) A): PPO, arXiv 1707.06347 eq. 7.

    eps_high > eps_low is clip-higher, DAPO, arXiv 2503.14476 eq. 10. delta (> 1 + eps_high) caps
    the unclipped ratio too, which bounds the loss where A < 0: INTELLECT-2, arXiv 2505.07291.
    """
    ratio = log_ratio.exp()
    inside = ratio.clamp(1 - clip_eps_low, 1 + clip_eps_high)
    loss = -torch.min(ratio.clamp(max=delta or torch.inf) * advantages, inside * advantages)
    return loss, {"clip_low": (ratio < inside) & (advantages < 0),
                  "clip_high": (ratio > inside) & (advantages > 0)}


def sequence_clipped(log_ratio, logprobs, advantages, mask, **clip_range):
    """`clipped` with one ratio per sequence, exp(mean log-ratio): GSPO, arXiv 2507.18071 eq. 5, 7.

    In the form of eq. 13, 14 (GSPO-token): the gradient goes through each token's own log-prob, so
    that each turn keeps its own credit. With one advantage per sequence it equals eq. 5.
    """
    mean = log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)  # (B, 1)
    log_s = mean.detach() + (log_ratio - log_ratio.detach())  # (B, T)
    return clipped(log_s, logprobs, advantages, mask, **clip_range)


def cispo(log_ratio, logprobs, advantages, mask, *, clip_max=5.0, **_):
    """-sg(min(ratio, clip_max)) A log p: arXiv 2506.13585 eq. 4, 5, clip_max: arXiv 2510.13786."""
    ratio = log_ratio.exp().detach()
    return -ratio.clamp(max=clip_max) * advantages * logprobs, {"clip_high": ratio > clip_max}


# The choices of --loss. To add one, put its surrogate and normalizer here, with any other argument
# of the surrogate bound: partial(cispo, clip_max=4).
LOSSES = {
    "grpo": (clipped, sequence_mean),  # arXiv 2402.03300 eq. 3
    "dapo": (clipped, token_mean),  # arXiv 2503.14476 eq. 8
    "dr_grpo": (clipped, constant_mean),  # arXiv 2503.20783 section 3.2
    "cispo": (cispo, token_mean),  # arXiv 2506.13585 eq. 4
    "gspo": (sequence_clipped, sequence_mean),  # arXiv 2507.18071 eq. 5
}
# Each paper's clip range and scale, by --credit and --loss. Not set: GRPO's KL (--kl_coef 0.04
# --kl_estimator k3), DAPO's dynamic sampling (--success_rate_lb 0.01 --success_rate_ub 0.99).
# The clip range of gspo is so narrow that 16-bit rounding leaves it: correct it.
PAPER_SETTINGS = {
    "dapo": {"clip_eps_high": 0.28},
    "dr_grpo": {"scale_rewards": "none"},
    "gspo": {"clip_eps_low": 3e-4, "clip_eps_high": 4e-4, "importance_correction": 2.0},
    "rloo": {"scale_rewards": "none"},
}
more_rows(LOSSES, CREDITS, CORRECTIONS, PAPER_SETTINGS, compare=group_advantages)  # extras/zoo
# What the tiny model needs in place of the defaults. At such a learning rate even shuffled rewards
# make the policy drift; a KL penalty prevents that. Gradient norms are 0.02: 0.05 clips outliers.
TINY = {"learning_rate": 3e-3, "kl_coef": 0.1, "updates_per_step": 2, "max_grad_norm": 0.05,
        "batch_size": 16, "dtype": "float32"}
DEFAULT_STEPS = 40


# ----------------------------------------------------------------------------------------- config
# Fields that all algorithms share are in core/config.py. An `auto` field is None until `settle`
# fills it, from the paper, TINY or the environment, or as stated here.
@dataclass(kw_only=True)
class Config(ModelFlags, LayerFlags, RolloutFlags, TrainingFlags, RunFlags):
    heading = "GRPO"
    output_dir: str = "runs/grpo"
    tasks_per_step: int = flag(8, "tasks of a step", low=1)
    group_size: int = flag(8, "episodes of each task", low=2)
    success_rate_lb: float = flag(0.0, "replace groups with a lower success rate", low=0, high=1)
    success_rate_ub: float = flag(1.0, "replace groups with a higher success rate", low=0, high=1)
    loss: str = flag("grpo", "sets its paper's clip range (cispo: none) and scale",
                     choices=LOSSES, aliases=("loss_type",), more="; more: extras/zoo")
    credit: str = flag("episode", "rewards to advantages; process: where they come at the end "
                       "alone, each further turn costs", choices=CREDITS, more="; more: extras/zoo")
    scale_rewards: str | None = auto("group", "whose std divides the advantages; mean: the group's "
                                     "mean does", choices=("group", "batch", "none", "mean"))
    clip_eps_low: float | None = auto(0.2, "ratio from 1 - this", above=0, aliases=("clip_eps",))
    clip_eps_high: float | None = auto(None, "ratio up to 1 + this; default: clip_eps_low", above=0)
    kl_coef: float | None = auto(0.0, "weight of the KL to the policy this run started from", low=0)
    kl_estimator: str = flag("k3_ratio", "estimator of that KL", choices=("k2", "k3", "k3_ratio"))
    entropy_coef: float = flag(0.0, "weight of the entropy bonus")
    importance_correction: float | None = auto(
        None, "cap C of truncated importance sampling: old log-probs are the trainer's, and "
        "advantages times min(trainer / sampler, C); 2: gspo, luspo, --sampler; 0: off", low=0)
    importance_mode: str = flag("token_truncate", "cap or leave out, tokens or whole sequences",
                                choices=CORRECTIONS, more="; more: extras/zoo")
    rollout_ahead: int = flag(0, "1: the next step's episodes are played, one version old, while "
                              "this step's update runs; needs --sampler", low=0, high=1)
    updates_per_step: int | None = auto(1, "passes over a step's episodes, an update each", low=1)
    num_epochs: int | None = flag(None, f"passes over the tasks; default: {DEFAULT_STEPS} steps")


def settle(config):
    """Return the config with what the loss, the model and the environment decide filled in."""
    papers = [PAPER_SETTINGS.get(name, {}) for name in (config.credit, config.loss)]
    tiny = TINY if is_tiny(config.model_path) else {}
    # The first table that has a field wins, and what the user said wins over all.
    config = fill(config, *papers, tiny, envs.recommended(config.env))
    config.clip_eps_high = config.clip_eps_high or config.clip_eps_low
    return config


# ------------------------------------------------------------------------------------------- loop
def total_loss(config, counts, logprobs, entropy, old_logprobs, ref_logprobs, advantages, mask,
               sampled_logprobs=None, observed=None):
    """Compute a micro-batch's loss: surrogate + kl_coef x KL - entropy_coef x entropy.

    The KL shares the normalizer, and the entropy is a mean over tokens for every loss. ECHO (arXiv
    2605.24517) adds echo_coef x mean -log p of what tools wrote, the mask `observed`. Tensors are
    (b, T); without kl_coef ref_logprobs is None. Returns the loss, and metrics that add up to means
    over the tokens in the update: approx_kl is KL(old || policy), gap |logprobs - sampled|.
    """
    surrogate, normalizer = LOSSES[config.loss]
    log_ratio = masked(logprobs - old_logprobs, mask)
    token_loss, to_log = surrogate(
        log_ratio, masked(logprobs, mask), advantages, mask,
        clip_eps_low=config.clip_eps_low, clip_eps_high=config.clip_eps_high)
    if config.kl_coef:
        kl = kl_estimate(logprobs, ref_logprobs, mask, config.kl_estimator, old_logprobs)
        token_loss = token_loss + config.kl_coef * kl
        to_log["kl"] = kl
    loss = normalizer(token_loss, mask, counts)
    if config.entropy_coef:
        loss = loss - config.entropy_coef * token_mean(entropy, mask, counts)
    to_log |= {"ratio": log_ratio.exp(), "approx_kl": log_ratio.exp() - 1 - log_ratio,
               "entropy": entropy, "advantage_abs": advantages.abs()}
    if sampled_logprobs is not None:
        to_log["gap"] = (logprobs - sampled_logprobs).abs()
    trained = counts._replace(tokens=counts.trained or counts.tokens)
    metrics = {name: token_mean(x.detach().to(logprobs.dtype), mask, trained)
               for name, x in to_log.items()}
    if counts.observed:
        metrics["echo"] = token_mean(-logprobs, observed, counts._replace(tokens=counts.observed))
        loss = loss + config.echo_coef * metrics["echo"]
    return loss, {name: x.detach() for name, x in (metrics | {"loss": loss}).items()}


def in_update(config, mask, observed, advantages):
    """Return the rows that an update learns from, n of B, and the step's Counts."""
    keep_all = config.kl_coef or config.entropy_coef  # without them A = 0 has no gradient
    learned = (mask if keep_all else advantages.bool()) | observed  # (B, T)
    taught = [i for i, row in enumerate(learned) if row.any()]
    return taught, Counts(len(mask), max(int(mask.sum()), 1), config.max_tokens,
                          int(mask[taught].sum()), int(observed.sum()))


def score_policies(model, start_policy, token_ids, mask, sampled_logprobs, advantages, config, run):
    """Return old_logprobs, ref_logprobs (None without KL) and corrected advantages: (B, T) each."""
    old_logprobs, ref_logprobs = sampled_logprobs, None
    if cap := config.importance_correction:
        with merged_to_train(model):
            old_logprobs = score(model, token_ids, mask, config.temperature, run)
        advantages, shares = weighted(advantages, old_logprobs, sampled_logprobs, mask, cap,
                                      config.importance_mode)
        run.log(**shares)
    if config.kl_coef:
        with reference(model, start_policy):
            ref_logprobs = score(model, token_ids, mask, config.temperature, run)
    return old_logprobs, ref_logprobs, advantages


def train(config: Config) -> dict:
    """Sample groups of episodes, compare each with its group, update the policy, repeat."""
    config = settle(config)
    tasks, held_out = train_and_held_out(config, config.max_samples)
    run = Run(config, "grpo")  # the output folder: logs, checkpoints, result
    if run.finished:
        return run.finished
    model, tokenizer = load_model(teach_tiny(config, run), **options_for(load_model, config))
    start_policy = freeze_reference(model) if config.kl_coef else None  # before a checkpoint loads
    optimizer = adamw(model, lr=config.learning_rate, weight_decay=config.weight_decay)
    play = partial(rollout, model, tokenizer, config.env, **rollout_options(config, run, model))
    test = partial(evaluate, model, tokenizer, config.env, held_out, **play.keywords)
    total = steps_of(config, len(tasks) / config.tasks_per_step, DEFAULT_STEPS)
    with run:
        for step in range(run.load(model, tokenizer, optimizer, total), total):
            if step % (config.eval_every or total) == 0:
                run.log_evaluation(step, test())
            for group in optimizer.param_groups:  # from the rate that it was made with
                group["lr"] = scheduled(group["initial_lr"], step, run.planned)
            run.log(learning_rate=optimizer.param_groups[0]["lr"])
            # 1. Rollout: group_size episodes of each drawn task.
            episodes = collect_groups(play, tasks, config, step, run)
            if reason := unusable(episodes):
                run.skip(episodes, reason)
                run.end_step(step)
                continue
            run.log_episodes(episodes)
            batch = pass_order(episodes, config.batch_size)  # all B episodes of the step
            token_ids, mask, sampled_logprobs = collate(batch, model.device)  # (B, T) each
            # 2. Advantages (B, T): a sampled token gets that of its episode, or of its turn.
            advantages = token_advantages(batch, mask, config.credit, scale=config.scale_rewards)
            old_logprobs, ref_logprobs, advantages = score_policies(
                model, start_policy, token_ids, mask, sampled_logprobs, advantages, config, run)
            mask, observed, advantages = tokens_to_learn(config, batch, mask, advantages, run)
            taught, counts = in_update(config, mask, observed, advantages)  # n of the B episodes
            run.record(batch, advantages=advantages, old=old_logprobs, ref=ref_logprobs)
            # 3. Update, in micro-batches, through merged weights: they round as the sampler's did.
            model.train()
            for update in range(config.updates_per_step):  # the last one is logged
                metrics = []  # of every micro-batch; they add up to the step's
                with merged_to_train(model):
                    for span in run.micro_batches(len(taught), step, update):
                        rows = taught[span]  # b of the n episodes
                        logprobs, entropy = token_logprobs(  # (b, T) each
                            model, token_ids[rows], (mask | observed)[rows], config.temperature)
                        loss, numbers = total_loss(
                            config, counts, logprobs, entropy, old_logprobs[rows],
                            ref_logprobs[rows] if config.kl_coef else None,
                            advantages[rows], mask[rows], sampled_logprobs[rows], observed[rows])
                        logprobs.retain_grad()  # what multiplies each token's grad log pi
                        loss.backward()
                        run.record([batch[i] for i in rows], new=logprobs, entropy=entropy)
                        metrics.append(numbers)
                        del logprobs, entropy, loss  # free the graph: the next one needs room
                totals = run.ranks.all_reduce(model, metrics)
                grad_norm = clip_grad_norm_(model.parameters(), config.max_grad_norm).item()
                if not math.isfinite(totals["loss"] + grad_norm):  # it would spoil the weights
                    run.skip(batch, f"loss {totals['loss']}, gradient norm {grad_norm}")
                elif grad_norm:  # of 0, Adam would still repeat its last steps
                    optimizer.step()
                optimizer.zero_grad()
                if update == 0 and totals:  # ratio 1, gap 0 but for rounding, dropout, old episodes
                    run.log(first_ratio=totals["ratio"], sampler_gap=totals["gap"])
            run.log(**totals, **group_shares(batch, advantages), grad_norm=grad_norm)
            run.end_step(step)
        return run.finish(test())


if __name__ == "__main__":
    main(Config, train, __doc__)
