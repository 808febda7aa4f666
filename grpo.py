"""GRPO and its relatives: a group of episodes of one task is its own baseline.

    rollout          -> group_size episodes of each task, every token with the log-probability it was sampled at
    group_advantages -> one number per episode: its reward against its group's (arXiv 2402.03300 section 4.1.2), or
    turn_advantages  -> one per turn: what this and the later turns earned (section 4.1.3)
    LOSSES[name]     -> clipped ratio x advantage (eq. 3), or one of its relatives, + KL to the start - entropy bonus
    train            -> rollout, advantages, `updates_per_step` times (micro-batches, clip, AdamW); before/after on
                        held-out tasks

Old log-probs are the sampler's, so the ratio also corrects what little sampler and trainer differ by. Left out: bnpo,
whose divisor depends on the micro-batch; adaptive KL; value networks.

    python grpo.py                      the tiny model, equations, from nothing: under 6 minutes on 2 CPU cores
    python grpo.py --model_path Qwen/Qwen2.5-0.5B-Instruct --env gsm8k --learning_rate 2e-5 --dtype bfloat16

Legend: B sequences, T tokens, V vocabulary, G group_size. Every (B, T) tensor's column t belongs to token t;
mask is 1 exactly where the policy sampled the token.
"""

import math
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

import envs
from agent import Limits, Trajectory, cheapest_order, collate, pass_at_k, rollout, summarise
from experiment.run import Run, UserError, flag, main, mix
from llm.dry_run import dry_run
from llm.loading import DTYPES, fast_float32, load_model, model_options
from llm.logprobs import token_logprobs
from llm.optimizer import adamw
from llm.training_state import TrainingState
from lora import freeze_reference, merged, reference
from sft import teach_tiny


# ---------------------------------------------------------------------------------------------------- advantages
def group_advantages(rewards, group_ids, scale="group", leave_one_out=False):
    """A_i = (r_i - mean of its group) / (std + 1e-4): GRPO outcome supervision, arXiv 2402.03300 section 4.1.2.

    rewards (N,); group_ids: N hashable ids, in any order, groups may differ in size. std is unbiased (n - 1) with eps
    1e-4, as in TRL (the paper gives neither). scale "group": std of the group; "batch": of all N, arXiv 2508.08221;
    "none": no division, Dr. GRPO, arXiv 2503.20783. leave_one_out: r_i - mean of the OTHERS = (r_i - mean) G / (G - 1),
    RLOO, arXiv 2402.14740. A group of equal rewards gets exactly 0. Raises ValueError: a group of one, unknown scale.
    """
    if scale not in ("group", "batch", "none"):
        raise ValueError(f"scale is 'group', 'batch' or 'none', not {scale!r}")
    advantages = torch.zeros_like(rewards)
    for group in dict.fromkeys(group_ids):
        rows = [i for i, g in enumerate(group_ids) if g == group]
        if len(rows) < 2:
            raise ValueError(f"group {group!r} has one reward: nothing to compare it with (its std would be NaN)")
        r = rewards[rows] - rewards[rows[0]]  # equal rewards give exactly 0: Adam would turn rounding into a step
        baseline_scale = len(rows) / (len(rows) - 1) if leave_one_out else 1.0
        std = {"group": r.std() + 1e-4, "batch": rewards.std() + 1e-4, "none": 1.0}[scale]
        advantages[rows] = baseline_scale * (r - r.mean()) / std
    return advantages  # (N,)


def turn_index(mask):
    """The turn each token belongs to, -1 where masked: one run of 1s in the mask (B, T) is one turn."""
    mask = mask.long()
    starts = (mask - F.pad(mask, (1, -1))).clamp(min=0)
    return torch.where(mask.bool(), starts.cumsum(1) - 1, -1)  # (B, T)


def turn_advantages(turn_rewards, turns, group_ids, scale="group"):
    """A_t = sum over turns j >= t's of (r_j - mean R) / (std R + 1e-4), R: all turn rewards of the group. (B, T)

    Process supervision, arXiv 2402.03300 section 4.1.3; 0 where masked. turn_rewards: B lists; turns: `turn_index` of
    the loss masks as sampled. ValueError: an episode's rewards and turns differ in number; a group of one reward.
    """
    lengths = [len(rewards) for rewards in turn_rewards]
    flat = torch.tensor([float(r) for rewards in turn_rewards for r in rewards], device=turns.device)
    owners = [g for g, n in zip(group_ids, lengths, strict=True) for _ in range(n)]
    advantages = torch.zeros(turns.shape, dtype=flat.dtype, device=turns.device)  # (B, T)
    for row, normalised in enumerate(group_advantages(flat, owners, scale).split(lengths)):
        turn, sampled = turns[row], turns[row] >= 0  # (T,)
        if turn.max() + 1 != lengths[row]:
            raise ValueError(f"episode {row}: {lengths[row]} turn rewards, but {turn.max() + 1} turns in the mask")
        advantages[row, sampled] = normalised.flip(0).cumsum(0).flip(0)[turn[sampled]]  # own and later turns
    return advantages


def importance_correction(trainer_logprobs, sampled_logprobs, mask, cap):
    """Truncated importance sampling: sg(min(trainer / sampler, cap)) per token, to multiply `advantages` by.

    fengyao.notion.site/off-policy-rl. old_logprobs are then trainer_logprobs. Not for vespo, whose w is policy /
    sampler already: its old_logprobs stay the sampler's.
    """
    return masked(trainer_logprobs - sampled_logprobs, mask).exp().clamp(max=cap).detach()  # (B, T)


# --------------------------------------------------------------------------------------------------- normalisers
class Counts(NamedTuple):
    """Divisors, of the WHOLE step (all micro-batches and ranks): the losses of its parts then sum to its loss."""

    sequences: int  # those masked whole count too
    tokens: int  # sum of the masks
    max_tokens: int  # the longest episode allowed, a constant


def masked(x, mask):
    """x, and 0 where mask is 0. Do it BEFORE exp: 0 * inf in the backward pass is NaN though the loss is finite."""
    return torch.where(mask.bool(), x, 0.0)


def sequence_mean(x, mask, counts):
    """Mean over each sequence's tokens, then over sequences."""
    return (masked(x, mask).sum(1) / mask.sum(1).clamp(min=1)).sum() / counts.sequences


def sequence_sum(x, mask, counts):
    """Sum over each sequence's tokens, then mean over sequences."""
    return masked(x, mask).sum() / counts.sequences


def token_mean(x, mask, counts):
    """Mean over all tokens of the step. Of the entropy, times entropy_coef, it is the entropy bonus."""
    return masked(x, mask).sum() / counts.tokens


def constant_mean(x, mask, counts):
    """Sum over tokens / (sequences x max_tokens): no length in the divisor, hence no length bias."""
    return masked(x, mask).sum() / (counts.sequences * counts.max_tokens)


# -------------------------------------------------------------------------------------------------------- losses
def kl_estimate(logprobs, ref_logprobs, mask, kind):
    """KL(policy || reference) per token, 0 where masked: k1 log p/ref, k2 (log p/ref)^2 / 2, k3 ref/p - 1 - log ref/p.

    joschu.net/blog/kl-approx.html; k3 is arXiv 2402.03300 eq. 4. k1 goes into the reward (`.sum(1)`, no gradient: as a
    loss its mean gradient is 0), k2, k3 into the loss: k2's gradient is KL(policy || ref)'s, k3's KL(ref || policy)'s.
    """
    log_ratio = masked(logprobs - ref_logprobs, mask)
    return {"k1": log_ratio, "k2": log_ratio**2 / 2, "k3": torch.exp(-log_ratio) - 1 + log_ratio}[kind]  # (B, T)


# A surrogate: (log_ratio = log policy / old, logprobs, advantages, mask) -> the tokens' loss (B, T), what to log of it.
def clipped(log_ratio, logprobs, advantages, mask, *, clip_eps_low, clip_eps_high, delta=None, **_):
    """-min(ratio A, clip(ratio, 1 - low, 1 + high) A): PPO, arXiv 1707.06347 eq. 7; GRPO, arXiv 2402.03300 eq. 3.

    high > low is clip-higher, DAPO, arXiv 2503.14476 eq. 10. delta (> 1 + high) caps the unclipped ratio too, which
    bounds the loss where A < 0: two-sided clip, INTELLECT-2, arXiv 2505.07291.
    """
    ratio = log_ratio.exp()
    clip = ratio.clamp(1 - clip_eps_low, 1 + clip_eps_high)
    shares = {"clip_low": (ratio < clip) & (advantages < 0), "clip_high": (ratio > clip) & (advantages > 0)}
    return -torch.min(ratio.clamp(max=delta or torch.inf) * advantages, clip * advantages), shares


def sequence_clipped(log_ratio, logprobs, advantages, mask, **hyper):
    """`clipped` with one ratio per sequence, s = exp(mean log-ratio): GSPO-token, arXiv 2507.18071 eq. 13, 14.

    In value sg(s); a token's gradient is s times that of its own log p, so each turn keeps its own credit. With one
    advantage per sequence, value and gradient are plain GSPO's (eq. 5, 7). The paper clips at 3e-4 and 4e-4.
    """
    log_s = (log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)).detach()  # (B, 1)
    return clipped(log_s + (log_ratio - log_ratio.detach()), logprobs, advantages, mask, **hyper)  # (B, T)


def cispo(log_ratio, logprobs, advantages, mask, *, clip_max, **_):
    """-sg(min(ratio, clip_max)) A log p: MiniMax-M1, arXiv 2506.13585 eq. 4; no token loses its gradient.

    clip_max caps the ratio itself (it is not 1 + eps), as in ScaleRL, arXiv 2510.13786.
    """
    ratio = log_ratio.exp().detach()
    return -ratio.clamp(max=clip_max) * advantages * logprobs, {"clip_high": ratio > clip_max}


def sapo(log_ratio, logprobs, advantages, mask, *, tau_pos, tau_neg, **_):
    """-sigmoid(tau (ratio - 1)) 4 / tau A, tau_pos for A > 0, else tau_neg: a soft gate, arXiv 2511.20347 eq. 5."""
    tau = torch.where(advantages > 0, tau_pos, tau_neg)
    return -torch.sigmoid(tau * (log_ratio.exp() - 1)) * 4 / tau * advantages, {}


def vespo(log_ratio, logprobs, advantages, mask, *, k_pos, lambda_pos, k_neg, lambda_neg, **_):
    """-sg(phi(w)) A log p, phi(w) = w^k exp(lambda (1 - w)), w = product of the sequence's ratios: arXiv 2602.10693.

    k, lambda are _pos where A >= 0, else _neg.
    """
    log_w = log_ratio.sum(1, keepdim=True).detach()  # (B, 1)
    k, lam = torch.where(advantages >= 0, k_pos, k_neg), torch.where(advantages >= 0, lambda_pos, lambda_neg)
    phi = torch.exp(k * log_w + lam * (1 - log_w.exp()))  # (B, T); in logs: w may overflow, phi does not
    return -phi * advantages * logprobs, {"phi": phi}


def policy_loss(surrogate, normaliser, logprobs, old_logprobs, advantages, mask, counts, kl=0.0, **hyper):
    """(loss, metrics) of one micro-batch; both sum to the step's over micro-batches and ranks.

    All tensors (B, T); `kl` is kl_coef x `kl_estimate` and shares the normaliser. hyper: what a surrogate does not name
    it ignores. Metrics are means over tokens: policy / old, k3 of KL(old || policy), and the surrogate's shares.
    """
    log_ratio = masked(logprobs - old_logprobs, mask)
    token_loss, shares = surrogate(log_ratio, masked(logprobs, mask), advantages, mask, **hyper)
    shares = {"ratio": log_ratio.exp(), "approx_kl": log_ratio.exp() - 1 - log_ratio} | shares
    metrics = {name: token_mean(x.to(logprobs), mask, counts).detach() for name, x in shares.items()}
    return normaliser(token_loss + kl, mask, counts), metrics


LOSSES = {  # loss -> function(logprobs, old_logprobs, advantages, mask, counts, kl, **hyper) -> (loss, metrics)
    "grpo": partial(policy_loss, clipped, sequence_mean),  # arXiv 2402.03300 eq. 3
    "dapo": partial(policy_loss, clipped, token_mean),  # arXiv 2503.14476 eq. 8 (the paper: tokens of the group)
    "dr_grpo": partial(policy_loss, clipped, constant_mean),  # arXiv 2503.20783 section 3.2; with scale="none"
    "cispo": partial(policy_loss, cispo, token_mean),  # arXiv 2506.13585 eq. 4
    "sapo": partial(policy_loss, sapo, sequence_mean),  # arXiv 2511.20347 eq. 5
    "gspo": partial(policy_loss, sequence_clipped, sequence_mean),  # arXiv 2507.18071 eq. 5
    "luspo": partial(policy_loss, sequence_clipped, sequence_sum),  # arXiv 2602.05261 eq. 7: GSPO x length
    "vespo": partial(policy_loss, vespo, token_mean),  # arXiv 2602.10693 eq. 20
}


# -------------------------------------------------------------------------------------------------------- config
@dataclass
class Config:
    model_path: str = flag("tiny", "tiny, hub id, model folder, adapter folder or output folder", group="model")
    lora_r: int = flag(16, "LoRA rank; 0: all weights train", group="model", low=0)
    lora_alpha: float | None = flag(None, "LoRA alpha; default: twice the rank", group="model", above=0)
    lora_dropout: float = flag(0.0, "dropout on the adapter's input, updates only", group="model", low=0, high=0.99)
    lora_target_modules: str = flag("all-linear", "names of adapted Linears, separated by commas", group="model")
    use_rslora: bool = flag(False, "scale by alpha / sqrt(rank)", group="model")
    dtype: str = flag("float32", "of frozen weights; the adapter is float32", group="model", choices=tuple(DTYPES))

    memory: str = flag("plain", "what is saved, each with what stands before it", group="memory",
                       choices=("plain", "checkpoint", "4bit", "small", "stream"))
    load_in_4bit: bool = flag(False, "frozen base in NF4 with double quantization", group="memory")
    gradient_checkpointing: bool = flag(
        False, "recompute layers in the backward pass: less memory, a third more time", group="memory")
    dry_run: bool = flag(False, "print what every setting of --memory would need, and stop", group="memory")

    env: str = flag("equations", "world or worlds (a,b); also path/to/file.py:Class", group="world")
    dataset: str | None = flag(None, "tasks (.jsonl, or a name the world knows); default: its own", group="world")
    eval_dataset: str | None = flag(None, "held-out tasks (.jsonl); default: a tenth of --dataset", group="world")
    max_samples: int = flag(10_000, "training tasks", group="world", low=1)
    num_turns: int | None = flag(None, "answers the world lets the model try (gsm8k)", group="world", low=1)
    reward_scaling: float = flag(1.0, "reward = (reward - reward_bias) x this", group="world")
    reward_bias: float = flag(0.0, "subtracted from each episode's reward", group="world")
    shuffle_rewards: bool = flag(False, "control: rewards permuted over the step: nothing to learn", group="world")

    tasks_per_step: int = flag(8, "tasks of a step", group="rollout", low=1)
    group_size: int = flag(8, "episodes of each task", group="rollout", low=2,
                           aliases=("samples_per_prompt", "num_samples"))
    temperature: float = flag(1.0, "of the softmax, in rollout and update", group="rollout", above=0)
    max_new_tokens: int = flag(64, "tokens per turn", group="rollout", low=1)
    max_tokens: int = flag(512, "tokens per episode, prompt and tool results included", group="rollout", low=8,
                           aliases=("max_length",))
    max_turns: int | None = flag(None, "assistant turns per episode; default: the world's", group="rollout", low=1)
    max_tool_calls: int = flag(32, "tool calls per episode", group="rollout", low=1)
    max_tool_tokens: int = flag(512, "tokens of tool results per episode", group="rollout", low=1)
    tool_timeout: float = flag(10.0, "seconds before a tool call is abandoned", group="rollout", above=0)
    tool_steps: int = flag(4, "decode steps a tool call has before decoding waits for it", group="rollout", low=1)
    merge_lora: bool = flag(True, "merge the adapter into the working weights while decoding", group="rollout")
    success_rate_lb: float = flag(0.0, "groups of a lower success rate are replaced", group="rollout", low=0, high=1)
    success_rate_ub: float = flag(1.0, "groups of a higher success rate are replaced", group="rollout", low=0, high=1)
    max_resample: int = flag(3, "rounds of replacement; then the step goes on smaller", group="rollout", low=0)

    loss: str = flag("grpo", "see LOSSES", group="loss", choices=tuple(LOSSES), aliases=("loss_type",))
    credit: str = flag("turn", "advantage per episode, or per turn (process supervision)", group="loss",
                       choices=("episode", "turn"))
    scale_rewards: str = flag("group", "divide advantages by a standard deviation of", group="loss",
                              choices=("group", "batch", "none"))
    leave_one_out: bool = flag(False, "baseline of the group's other episodes; with --credit episode", group="loss")
    clip_eps_low: float = flag(0.2, "ratio clipped below at 1 - this", group="loss", above=0, aliases=("clip_eps",))
    clip_eps_high: float = flag(0.2, "ratio clipped above at 1 + this (DAPO: 0.28)", group="loss", above=0)
    delta: float | None = flag(None, "two-sided clip: upper bound of the unclipped ratio", group="loss", above=1)
    clip_max: float = flag(5.0, "cispo: cap of the ratio itself", group="loss", above=0)
    tau_pos: float = flag(1.0, "sapo: gate temperature where the advantage is positive", group="loss", above=0)
    tau_neg: float = flag(1.05, "sapo: gate temperature elsewhere", group="loss", above=0)
    k_pos: float = flag(2.0, "vespo", group="loss", above=0)
    lambda_pos: float = flag(3.0, "vespo", group="loss", above=0)
    k_neg: float = flag(3.0, "vespo", group="loss", above=0)
    lambda_neg: float = flag(2.0, "vespo", group="loss", above=0)
    kl_coef: float | None = flag(
        None, "weight of KL to the policy this run started from, 0 skips its forward pass; default: 0, 0.3 for tiny",
        group="loss", low=0)
    kl_estimator: str = flag("k3", "k1 goes into the reward, k2 and k3 into the loss", group="loss",
                             choices=("k1", "k2", "k3"))
    entropy_coef: float = flag(0.0, "weight of the entropy bonus", group="loss")
    mask_truncated: bool = flag(False, "episodes cut by a token limit train nothing", group="loss")
    importance_correction: float | None = flag(
        None, "cap C: old = the trainer's log-probs, weighted by min(old / sampled, C)", group="loss", above=0)

    learning_rate: float | None = flag(
        None, "AdamW step size; default: 2e-5 with LoRA, 1e-6 without, 2e-3 for tiny", group="training", low=0)
    lr_schedule: str = flag("linear", "after the warm-up", group="training", choices=("constant", "linear", "cosine"))
    warmup_steps: int = flag(5, "steps of linear warm-up", group="training", low=0)
    weight_decay: float = flag(0.0, "AdamW weight decay", group="training", low=0)
    max_grad_norm: float = flag(1.0, "gradient norm is clipped to this", group="training", above=0)
    updates_per_step: int | None = flag(
        None, "optimiser updates on one step's episodes (mu); default: 1, 2 for tiny", group="training", low=1)
    batch_size: int = flag(16, "episodes in one forward pass of the update: memory only", group="training", low=1)
    gradient_accumulation_steps: int | None = flag(
        None, "x batch_size = tasks_per_step x group_size; default: what fits", group="training", low=1)
    num_epochs: int = flag(1, "passes over the tasks", group="training", low=1, aliases=("total_epochs",))
    max_steps: int | None = flag(50, "steps; beats num_epochs", group="training", low=0)

    output_dir: str = flag("runs/grpo", "folder of this run", group="run")
    overwrite: bool = flag(False, "replace the run that is in output_dir", group="run")
    resume: str | None = flag(None, "go on with the run in output_dir, from its newest checkpoint or the one before",
                              group="run", choices=("newest", "previous"), const="newest")
    resume_anyway: bool = flag(False, "resume with other --batch_size, --slots or ways to recompute", group="run")
    seed: int = flag(0, "of everything random", group="run", low=0)
    save_every: int = flag(0, "steps between checkpoints; 0: at the end", group="run", low=0)
    save_trajectories: int = flag(16, "episodes of each step kept in trajectories.jsonl; 0: none", group="run", low=0)
    eval_tasks: int = flag(200, "held-out tasks played before, after and every eval_every steps", group="run", low=0)
    eval_group_size: int = flag(1, "episodes of each held-out task, for pass@k", group="run", low=1)
    eval_every: int = flag(0, "steps between evaluations; 0: before and after only", group="run", low=0)
    compare_sft: bool = flag(True, "tiny model made here: what would SFT alone reach in RL's time?", group="run")


def check(config: Config):
    """UserError for options that clash, before anything is loaded."""
    episodes, accumulation = config.tasks_per_step * config.group_size, config.gradient_accumulation_steps
    if accumulation and accumulation * config.batch_size != episodes:
        raise UserError(f"tasks_per_step {config.tasks_per_step} x group_size {config.group_size} = {episodes} "
                        f"episodes, but batch_size {config.batch_size} x gradient_accumulation_steps {accumulation} = "
                        f"{accumulation * config.batch_size}")
    if config.success_rate_lb > config.success_rate_ub:
        raise UserError(f"success_rate_lb {config.success_rate_lb} is above success_rate_ub {config.success_rate_ub}")
    if config.delta and config.delta <= 1 + config.clip_eps_high:
        raise UserError(f"delta {config.delta} must be above 1 + clip_eps_high = {1 + config.clip_eps_high}")
    if config.leave_one_out and config.credit == "turn":
        raise UserError("--leave_one_out compares episodes; use it with --credit episode")
    if config.importance_correction and config.loss == "vespo":
        raise UserError("--importance_correction: vespo's weight is policy / sampler already")


def learning_rate(step: int, config: Config, total: int) -> float:
    """Warm-up, then the schedule. A function of the step alone: nothing to save."""
    left = 1 - step / max(total, 1)
    shape = {"constant": 1.0, "linear": left, "cosine": 0.5 - 0.5 * math.cos(math.pi * left)}[config.lr_schedule]
    return config.learning_rate * min(1.0, (step + 1) / max(config.warmup_steps, 1)) * shape


# ---------------------------------------------------------------------------------------------------------- loop
MAX_RESAMPLE = 3  # rounds of replacement of groups outside the success-rate band


def draw_tasks(tasks, config, step, first, n):
    """Return candidates number `first` to `first + n - 1` of a step: a function of (seed, step, number).

    The first `tasks_per_step` are the epoch's next tasks in shuffled order; replacements are drawn at random.
    """
    if first:
        return [tasks[mix(config.seed, step, k) % len(tasks)] for k in range(first, first + n)]
    epoch, place = divmod(step * config.tasks_per_step, len(tasks))
    order = np.random.default_rng([config.seed, epoch]).permutation(len(tasks))
    return [tasks[order[(place + k) % len(tasks)]] for k in range(n)]


def collect_groups(play, tasks, config, step):
    """Play the groups of a step, and replace those outside the success-rate band by groups of other tasks.

    Args:
        play: `rollout`, with everything given but the tasks, the group size and the step.
        tasks: the training tasks.
        config: its tasks_per_step, group_size, success_rate_lb and success_rate_ub.
        step: number of the step.

    Returns the episodes of the kept groups, one group after the other, and the number of groups dropped. After
    MAX_RESAMPLE rounds of replacement the step continues with fewer groups.
    """
    kept, dropped, drawn = [], 0, 0
    for _ in range(1 + MAX_RESAMPLE):
        missing = config.tasks_per_step - len(kept) // config.group_size
        if not missing:
            break
        episodes = play(draw_tasks(tasks, config, step, drawn, missing), config.group_size, step=step, first_task=drawn)
        drawn += missing
        for i in range(0, len(episodes), config.group_size):
            group = episodes[i:i + config.group_size]
            rate = sum(t.info["success"] for t in group) / config.group_size
            # A reward that is not a number says nothing of the task: `Run.accept_rewards` must see it.
            not_finite = any(math.isnan(t.reward) for t in group)
            if not_finite or config.success_rate_lb <= rate <= config.success_rate_ub:
                kept += group
            else:
                dropped += 1
    return kept, dropped


def train(config: Config) -> dict:
    """Sample groups of episodes, compare each episode with its group, update the policy, repeat."""
    config = settle(config)
    tasks, held_out = training_and_held_out_tasks(config)
    if config.dry_run:
        return estimate(config)
    run = Run(config, "grpo")  # the output folder: log, checkpoints, resume, signals, torchrun
    if run.finished:
        return run.finished
    fast_float32()
    source = teach_tiny(config, run) if config.model_path == "tiny" else config.model_path
    model, tokenizer = load_model(source, **model_options(config))
    start_policy = freeze_reference(model) if config.kl_coef else None
    weights = [p for p in model.parameters() if p.requires_grad]
    # 0.95: gradients grow with lora_B, which starts at 0; 0.999 would remember the small ones.
    optimizer = adamw(model, lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=config.weight_decay)
    play = partial(rollout, model, tokenizer, config.env, **rollout_options(config), run=run)
    total = config.num_epochs * max(1, len(tasks) // config.tasks_per_step)
    total = total if config.max_steps is None else config.max_steps
    with run:
        state = TrainingState(model, tokenizer, optimizer)
        evaluate_held_out = partial(evaluate_with, play, held_out, config)
        for step in run.steps(total, state, evaluate_held_out):
            # 1. Rollout: group_size episodes of each task; every sampled token with its log-probability.
            trajectories, dropped = collect_groups(play, tasks, config, step)
            run.log(groups_dropped=dropped)
            if not trajectories or not run.accept_rewards(trajectories):
                continue
            for t in trajectories:
                t.reward = (t.reward - config.reward_bias) * config.reward_scaling
            run.log(**summarise(trajectories), **group_shares(trajectories))
            run.log_episodes(trajectories)
            batch = cheapest_order(trajectories, config.batch_size)
            token_ids, sampled_mask, sampled_logprobs = collate(batch, model.device)  # (B, T) each

            # 2. The same tokens under the policy this run started from, and under the trainer's own forward pass.
            ref_logprobs, old_logprobs = None, sampled_logprobs
            if config.kl_coef:
                with reference(model, start_policy):
                    scored = score(model, token_ids, sampled_mask, run.micro_batches(batch, step), config.temperature)
                ref_logprobs = run.ranks.add(scored)  # (B, T)
            if config.importance_correction or config.kl_coef and config.kl_estimator == "k1":
                with updated(model, config):
                    scored = score(model, token_ids, sampled_mask, run.micro_batches(batch, step), config.temperature)
                old_logprobs = run.ranks.add(scored)  # (B, T)

            # 3. Advantages: a token answers for its episode's reward, or for its turn's and the later ones.
            turns = turn_index(sampled_mask)  # (B, T)
            rewards = [scaled_rewards(t, config) for t in batch]
            if config.kl_coef and config.kl_estimator == "k1":
                k1 = kl_estimate(old_logprobs, ref_logprobs, sampled_mask, "k1")  # (B, T)
                rewards = subtract_kl(rewards, k1, turns, config.kl_coef)
            advantages = token_advantages(rewards, turns, [t.group_id for t in batch], config)  # (B, T)
            mask = sampled_mask.clone()
            if config.mask_truncated:
                mask[[t.truncated for t in batch]] = 0
            if config.importance_correction:
                advantages *= importance_correction(old_logprobs, sampled_logprobs, mask, config.importance_correction)
            else:
                old_logprobs = sampled_logprobs
            counts = Counts(len(batch), max(int(mask.sum()), 1), config.max_tokens)

            # 4. Updates. Losses are divided by `counts`: those of the micro-batches add up to the loss of the step.
            lr = learning_rate(step, config, total)
            for group in optimizer.param_groups:
                group["lr"] = lr
            model.train()
            for update in range(config.updates_per_step):
                totals = Counter()
                with updated(model, config):  # the weights that sampled
                    for rows in run.micro_batches(batch, step, update):
                        m = mask[rows]  # (b, t)
                        logprobs, entropy = token_logprobs(model, token_ids[rows], m, config.temperature)  # (b, t) each
                        kl = torch.zeros_like(logprobs)
                        if config.kl_coef:
                            kl = kl_estimate(logprobs, ref_logprobs[rows], m, config.kl_estimator)
                        in_loss = config.kl_coef * kl if config.kl_estimator != "k1" else 0.0
                        loss, metrics = LOSSES[config.loss](
                            logprobs, old_logprobs[rows], advantages[rows], m, counts, in_loss, **vars(config))
                        bonus = token_mean(entropy, m, counts)
                        (loss - config.entropy_coef * bonus).backward()
                        gap = masked(logprobs.detach() - sampled_logprobs[rows], m).abs()
                        metrics |= {"loss": loss, "entropy": bonus, "kl": token_mean(kl, m, counts),
                                    "gap": token_mean(gap, m, counts)}
                        totals.update({name: value.item() for name, value in metrics.items()})
                        # Free the autograd graph before the next micro-batch builds its own.
                        del logprobs, entropy, kl, in_loss, loss, bonus, metrics
                run.ranks.add_gradients(weights)
                totals = run.ranks.total(totals)
                grad_norm = torch.nn.utils.clip_grad_norm_(weights, config.max_grad_norm).item()
                if run.accept_update(batch, totals["loss"], grad_norm):
                    optimizer.step()
                optimizer.zero_grad()
                if update == 0:
                    run.log(first_ratio=totals["ratio"], sampler_gap=totals["gap"])
                del totals["gap"]
                run.log(**totals, grad_norm=grad_norm)
            model.eval()
            run.log(learning_rate=lr, advantage_abs=token_mean(advantages.abs(), mask, counts).item())
    return run.finish()


def settle(config):
    check(config)
    if config.learning_rate is None:
        config = replace(config, learning_rate=2e-3 if config.model_path == "tiny" else 2e-5 if config.lora_r else 1e-6)
    if config.kl_coef is None:  # at the tiny model's learning rate noise alone would carry it off: --shuffle_rewards
        config = replace(config, kl_coef=0.3 if config.model_path == "tiny" else 0.0)
    if config.updates_per_step is None:
        config = replace(config, updates_per_step=2 if config.model_path == "tiny" else 1)
    return config


def training_and_held_out_tasks(config):
    extra = {"num_turns": config.num_turns} if config.num_turns else {}
    files = config.dataset, config.eval_dataset
    return ([{**task, **extra} for task in envs.tasks(config.env, split, n, config.seed, *files)]
                       for split, n in (("train", config.max_samples), ("test", max(config.eval_tasks, 1))))


def estimate(config):
    return dry_run(
        config, partial(step_loss, config), rows=min(config.batch_size, config.tasks_per_step * config.group_size),
        merge=config.merge_lora and not config.lora_dropout, episodes=config.tasks_per_step * config.group_size,
        held_out=config.eval_tasks * config.eval_group_size, keep_start=bool(config.kl_coef))


def updated(model, config):
    return merged(model) if config.merge_lora and not config.lora_dropout else nullcontext()


def rollout_options(config):
    limits = Limits(config.max_turns, config.max_new_tokens, config.max_tokens, config.max_tool_calls,
                    config.max_tool_tokens, config.tool_timeout)
    return dict(limits=limits, temperature=config.temperature, seed=config.seed)


def evaluate_with(play, held_out, config):
    if not config.eval_tasks:
        return {}
    trajectories = play(held_out, config.eval_group_size, step=-1)
    solved = [t.info["success"] for t in trajectories]
    return {**summarise(trajectories),
            **pass_at_k([solved[i:i + config.eval_group_size] for i in range(0, len(solved), config.eval_group_size)])}


def scaled_rewards(t, config):
    return [(r - config.reward_bias / len(t.rewards)) * config.reward_scaling for r in t.rewards]


def subtract_kl(rewards, kl, turns, kl_coef):
    """Return the turns' rewards less kl_coef times the KL of their tokens: B lists. kl, turns (B, T)."""
    out = []
    for row, turn_rewards in enumerate(rewards):
        paid = [kl_coef * kl[row][turns[row] == turn].sum().item() for turn in range(len(turn_rewards))]
        out.append([reward - cost for reward, cost in zip(turn_rewards, paid)])
    return out


def token_advantages(rewards, turns, group_ids, config):
    if config.credit == "turn":
        return turn_advantages(rewards, turns, group_ids, config.scale_rewards)
    totals = torch.tensor([math.fsum(r) for r in rewards], device=turns.device)  # (B,)
    return group_advantages(totals, group_ids, config.scale_rewards, config.leave_one_out)[:, None] * (turns >= 0)


@torch.no_grad()
def score(model, token_ids, mask, micro_batches, temperature):
    """`token_logprobs` without gradient, micro-batch by micro-batch: (B, T), 0 in other ranks' rows."""
    out = torch.zeros(token_ids.shape, device=token_ids.device)
    for rows in micro_batches:
        out[rows] = token_logprobs(model, token_ids[rows], mask[rows], temperature)[0]
    return out


def step_loss(config: Config, logprobs, entropy, mask):
    """The loss of a step that is one micro-batch, at the sampler's weights, advantages 0: what --dry_run counts."""
    counts = Counts(len(mask), mask.numel(), config.max_tokens)
    advantages = torch.zeros_like(logprobs)
    loss, _ = LOSSES[config.loss](logprobs, logprobs.detach(), advantages, mask, counts, 0.0, **vars(config))
    return loss - config.entropy_coef * token_mean(entropy, mask, counts)


def group_shares(trajectories: list[Trajectory]) -> dict:
    """Shares of groups whose episodes all succeed, all fail, or differ; and of those of one reward: no lesson there."""
    groups = {}
    for t in trajectories:
        groups.setdefault(t.group_id, []).append(t)
    right = [sum(t.info["success"] for t in g) / len(g) for g in groups.values()]
    n = len(groups)
    return {"groups_all_right": sum(r == 1 for r in right) / n, "groups_all_wrong": sum(r == 0 for r in right) / n,
            "groups_mixed": sum(0 < r < 1 for r in right) / n,
            "groups_one_reward": sum(len({t.reward for t in g}) == 1 for g in groups.values()) / n}


def print_table(rows, num_tasks, group_size):
    if not any(values for _, values in rows):
        return
    names = [f"pass@{group_size}"] * (group_size > 1) + ["reward", "actions", "structure", "completion", "tool_errors"]
    print(f"\nheld-out ({num_tasks} tasks){'':16}success" + "".join(f"{name:>13}" for name in names))
    for label, values in rows:
        print(f"{label:34} {values['success']:6.3f}" + "".join(f"{values[name]:13.3f}" for name in names))


if __name__ == "__main__":
    main(Config, train, __doc__)
