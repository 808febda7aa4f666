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

import json
import math
import os
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

import envs
import sft  # only for the tiny model, where there is none to start from
from agent import Limits, Trajectory, cheapest_order, collate, evaluate, rollout, summarise
from experiment.run import Run, UserError, flag, main, mix, optimizer_tensors, peak_memory_mb, replace_file, to_json
from lora import (
    DTYPES,
    OPTIMS,
    adamw,
    dry_run,
    fast_float32,
    freeze_reference,
    load_model,
    load_weights,
    merge,
    merged,
    model_options,
    reference,
    save_model,
    token_logprobs,
)

# The tiny model's schooling.
TINY_SFT = {"max_samples": 2600, "expert_noise": 0.6, "max_turns": 6, "max_steps": 340, "batch_size": 16}


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

    load_in_4bit: bool = flag(False, "frozen base in NF4, double quantisation (bitsandbytes)", group="memory")
    int8_head: bool = flag(False, "frozen embedding and output head in int8, a scale per row", group="memory")
    gradient_checkpointing: bool = flag(
        False, "recompute layers in the backward pass: less memory, a third more time", group="memory")
    offload_activations: bool = flag(
        False, "inputs of checkpointed layers wait in host memory (on a GPU)", group="memory")
    mlp_tokens: int = flag(0, "tokens that go through an MLP at once, recomputed in the backward pass; 0: all",
                           group="memory", low=0)
    stream_layers: bool = flag(
        False, "frozen base in host memory, two layers at a time on the device", group="memory")
    optim: str = flag("adamw", "adamw_cpu: adapter and AdamW in host memory; adamw8bit: bitsandbytes", group="memory",
                      choices=OPTIMS)
    dry_run: bool = flag(False, "print what the run would need, try its longest batch, and stop", group="memory")
    memory_mb: int | None = flag(None, "--dry_run: MiB that there are; default: what is free", group="memory", low=1)

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
    slots: int = flag(128, "episodes decoded at once", group="rollout", low=1)
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
                              group="run", choices=("newest", "previous"), bare="newest")
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
def make_base(config: Config, run: Run) -> tuple[str, float]:
    """The tiny model, taught by a short SFT on demonstrations whose actions are mostly wrong -> its folder, seconds.

    Numbers are always copied rightly in them: what is left to learn is which action to choose, and that is RL's work.
    """
    base = os.path.join(config.output_dir, "base")
    made = Path(base, "made.json")  # written last: with it the folder is whole
    if seconds := run.ranks.first(lambda: made.exists() and json.loads(made.read_text())["seconds"]):
        return base, seconds
    print("tiny model: made here, and taught the format by a short SFT on noisy demonstrations")
    schooling = sft.Config(output_dir=os.path.join(base, "sft"), env=config.env, seed=config.seed, eval_tasks=0,
                           overwrite=True, **TINY_SFT)  # over what a killed run left
    seconds = sft.train(schooling)["seconds"]
    run.ranks.first(lambda: merge(schooling.output_dir, base))  # a plain model folder: adapters point to it
    run.ranks.first(lambda: replace_file(made, to_json({"seconds": seconds})))
    return base, seconds


def collect(model, tokenizer, config: Config, tasks, step: int, limits, bar, run) -> tuple[list[Trajectory], int]:
    """The step's episodes, groups whole -> (episodes, groups dropped by the success-rate band).

    The k-th candidate task of a step is a function of (seed, step, k); of those in the band the lowest k are kept.
    """
    kept, dropped, k = [], 0, 0
    for attempt in range(1 + config.max_resample):
        missing = config.tasks_per_step - len(kept)
        epoch, place = divmod(step * config.tasks_per_step, len(tasks))
        order = np.random.default_rng([config.seed, epoch]).permutation(len(tasks))
        fresh = [order[(place + k + i) % len(tasks)] if attempt == 0 else mix(config.seed, step, k + i) % len(tasks)
                 for i in range(missing)]
        fresh = [tasks[i] for i in fresh]
        with merged(model) if config.merge_lora else nullcontext():
            episodes = rollout(
                model, tokenizer, config.env, fresh, config.group_size, limits=limits, temperature=config.temperature,
                seed=config.seed, step=step, first_task=k, slots=config.slots, tool_timeout=config.tool_timeout,
                tool_steps=config.tool_steps, run=run)
        k += missing
        groups = [episodes[i:i + config.group_size] for i in range(0, len(episodes), config.group_size)]
        for group in groups:
            rate = sum(t.info["success"] for t in group) / len(group)
            if config.success_rate_lb <= rate <= config.success_rate_ub or any(math.isnan(t.reward) for t in group):
                kept.append(group)
            else:
                dropped += 1
        if len(kept) == config.tasks_per_step:
            break
    if len(kept) < config.tasks_per_step:
        bar.write(f"step {step}: only {len(kept)} of {config.tasks_per_step} groups within success rates "
                  f"{config.success_rate_lb} to {config.success_rate_ub} after {config.max_resample} rounds of "
                  "replacement; the step goes on smaller")
    return [t for group in kept for t in group], dropped


def train(config: Config) -> dict:
    started = time.time()
    check(config)
    if config.learning_rate is None:
        config = replace(config, learning_rate=2e-3 if config.model_path == "tiny" else 2e-5 if config.lora_r else 1e-6)
    if config.kl_coef is None:  # at the tiny model's learning rate noise alone would carry it off: --shuffle_rewards
        config = replace(config, kl_coef=0.3 if config.model_path == "tiny" else 0.0)
    if config.updates_per_step is None:
        config = replace(config, updates_per_step=2 if config.model_path == "tiny" else 1)
    extra = {"num_turns": config.num_turns} if config.num_turns else {}
    files = config.dataset, config.eval_dataset
    tasks, held_out = ([{**task, **extra} for task in envs.tasks(config.env, split, n, config.seed, *files)]
                       for split, n in (("train", config.max_samples), ("test", max(config.eval_tasks, 1))))
    if config.dry_run:
        return dry_run(
            config, partial(step_loss, config), merge=config.merge_lora and not config.lora_dropout, merge_rollout=True,
            episodes=config.tasks_per_step * config.group_size, held_out=config.eval_tasks * config.eval_group_size,
            keep_start=bool(config.kl_coef))
    run = Run(config, "grpo")
    if run.finished:
        return run.finished
    fast_float32()
    source, base_seconds = make_base(config, run) if config.model_path == "tiny" else (config.model_path, 0.0)
    model, tokenizer = load_model(source, **model_options(config))
    frozen = freeze_reference(model) if config.kl_coef else None
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = adamw(  # 0.95: gradients grow with B, which starts at 0; 0.999 remembers small ones
        model, config.optim, lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=config.weight_decay)
    limits = Limits(config.max_turns, config.max_new_tokens, config.max_tokens, config.max_tool_calls,
                    config.max_tool_tokens)
    total = config.num_epochs * max(1, len(tasks) // config.tasks_per_step)
    total = total if config.max_steps is None else config.max_steps
    changed = config.reward_scaling != 1 or config.reward_bias
    if changed and config.scale_rewards != "none" and config.credit == "episode":
        print("note: reward_scaling and reward_bias cancel out when advantages are divided by a standard deviation")

    def held_out_eval():
        with merged(model) if config.merge_lora else nullcontext():
            return evaluate(
                model, tokenizer, config.env, held_out, config.eval_group_size, limits=limits, seed=config.seed,
                step=-1, temperature=config.temperature, slots=config.slots, tool_timeout=config.tool_timeout,
                tool_steps=config.tool_steps, run=run) if config.eval_tasks else {}

    def update_weights():  # the sampler's own, but for a dropout of the adapter's input, which merged weights lack
        return merged(model) if config.merge_lora and not config.lora_dropout else nullcontext()

    def save(step):
        return run.save(step, lambda folder: save_model(model, folder), tokenizer,
                        optimizer_tensors(optimizer, model.named_parameters()),
                        {"before": before, "seconds": time.time() - training_began})

    start, saved = run.restore(lambda folder: load_weights(model, folder), optimizer, model.named_parameters())
    before = saved["before"] if saved else held_out_eval()
    started, training_began = (t - saved.get("seconds", 0.0) for t in (started, time.time()))
    run.begin(save)
    bar = tqdm(range(start, total), "grpo", initial=start, total=total, disable=not total)
    for step in bar:
        began = time.time()
        trajectories, dropped = collect(model, tokenizer, config, tasks, step, limits, bar, run)
        rollout_seconds = time.time() - began
        if not trajectories or not run.may_learn(step, trajectories):
            run.log(step, {"groups_dropped": dropped}, {"rollout_seconds": rollout_seconds})
            run.end(step + 1)
            continue
        for t in trajectories:
            t.reward = (t.reward - config.reward_bias) * config.reward_scaling
        metrics = {**summarise(trajectories), "groups_dropped": dropped, **group_shares(trajectories)}
        run.trajectories(step, trajectories[:config.save_trajectories])

        batch = cheapest_order(trajectories, config.batch_size)
        token_ids, sampled_mask, sampled_logprobs = collate(batch, model.device)  # (B, T) each
        turns = turn_index(sampled_mask)  # (B, T)
        micro = run.ranks.micro_batches(len(batch), config.batch_size)

        @torch.no_grad()
        def logprobs_now():
            out = torch.zeros_like(sampled_logprobs)
            for part in micro:
                width = max(len(t.token_ids) for t in batch[part])
                ids, m = token_ids[part, :width], sampled_mask[part, :width]
                out[part, :width] = token_logprobs(model, ids, m, config.temperature)[0]
            return out  # (B, T), 0 where other ranks' micro-batches are

        # Sums over ranks stay outside of both blocks: a rank that is gone ends the run there, and the policy is saved.
        ref_logprobs = trainer_logprobs = None
        if config.kl_coef:
            with reference(model, frozen):
                ref_logprobs = logprobs_now()
            ref_logprobs = run.ranks.add(ref_logprobs)  # (B, T)
        if config.importance_correction or config.kl_coef and config.kl_estimator == "k1":
            with update_weights():
                trainer_logprobs = logprobs_now()
            trainer_logprobs = run.ranks.add(trainer_logprobs)  # (B, T)

        # Rewards: bias and scale, shuffling where a control experiment asks for it, then KL's k1.
        rewards_of = {id(t): [(r - config.reward_bias / len(t.rewards)) * config.reward_scaling for r in t.rewards]
                      for t in trajectories}
        if config.shuffle_rewards:  # where an episode has one advantage it keeps one reward
            if config.credit == "episode":
                rewards_of = {i: [math.fsum(rewards)] + [0.0] * (len(rewards) - 1) for i, rewards in rewards_of.items()}
            places = [(rewards, j) for rewards in rewards_of.values()
                      for j in range(1 if config.credit == "episode" else len(rewards))]
            drawn = np.random.default_rng([config.seed, step]).permutation([rewards[j] for rewards, j in places])
            for (rewards, j), r in zip(places, drawn.tolist()):
                rewards[j] = r
        turn_rewards = [rewards_of[id(t)] for t in batch]
        if config.kl_coef and config.kl_estimator == "k1":
            # Not the sampler's: a group's std would make an advantage of what sampler and trainer differ by.
            k1 = kl_estimate(trainer_logprobs, ref_logprobs, sampled_mask, "k1")  # (B, T)
            turn_rewards = [[r - config.kl_coef * k1[i][turns[i] == j].sum().item() for j, r in enumerate(rewards)]
                            for i, rewards in enumerate(turn_rewards)]

        # Advantages (B, T)
        group_ids = [t.group_id for t in batch]
        if config.credit == "turn":
            advantages = turn_advantages(turn_rewards, turns, group_ids, config.scale_rewards)
        else:
            rewards = torch.tensor([math.fsum(r) for r in turn_rewards], device=model.device)  # (B,)
            advantages = group_advantages(rewards, group_ids, config.scale_rewards, config.leave_one_out)  # (B,)
            advantages = advantages[:, None] * sampled_mask
        mask = sampled_mask.clone()
        if config.mask_truncated:
            mask[torch.tensor([t.stop_reason == "max_tokens" for t in batch], device=model.device)] = 0
        counts = Counts(len(batch), max(int(mask.sum()), 1), config.max_tokens)
        old_logprobs = sampled_logprobs
        if config.importance_correction:
            old_logprobs = trainer_logprobs
            advantages = advantages * importance_correction(
                old_logprobs, sampled_logprobs, mask, config.importance_correction)

        # Updates: LOSSES of micro-batches sum to the loss of the step, whatever batch_size is.
        model.train()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config, total)
        for update in range(config.updates_per_step):
            sums, gap_max = Counter(), 0.0
            with update_weights():
                for part in tqdm(micro, "update", leave=False, delay=2):
                    run.check()
                    torch.manual_seed(mix(config.seed, "dropout", step, update, part.start))
                    width = max(len(t.token_ids) for t in batch[part])
                    ids, m, old, adv = (  # (b, t) each
                        x[part, :width] for x in (token_ids, mask, old_logprobs, advantages))
                    logprobs, entropy = token_logprobs(model, ids, m, config.temperature)  # (b, t)
                    kl = torch.zeros(())
                    if config.kl_coef:
                        kl = kl_estimate(logprobs, ref_logprobs[part, :width], m, config.kl_estimator)
                    in_loss = config.kl_coef * kl if config.kl_estimator != "k1" else 0.0
                    loss, parts = LOSSES[config.loss](logprobs, old, adv, m, counts, in_loss, **vars(config))
                    entropy = token_mean(entropy, m, counts)
                    (loss - config.entropy_coef * entropy).backward()
                    seen = {"loss": loss, "entropy": entropy, "kl": token_mean(kl, m, counts), **parts}
                    sums.update({name: x.item() for name, x in seen.items()})
                    if update == 0:
                        gap = masked(logprobs.detach() - sampled_logprobs[part, :width], m).abs()
                        sums["sampler_gap"] += token_mean(gap, m, counts).item()
                        gap_max = max(gap_max, gap.max().item())
                    del logprobs, entropy, kl, in_loss, loss, seen  # or the graph lies in the way of the next
            run.ranks.add_gradients(weights)
            sums = run.ranks.total(sums)
            if update == 0:
                metrics.update(first_ratio=sums["ratio"], sampler_gap=sums.pop("sampler_gap"),
                               sampler_gap_max=max(run.ranks.gather(gap_max)))
            grad_norm = torch.nn.utils.clip_grad_norm_(weights, config.max_grad_norm).item()
            if run.may_update(step, batch, sums["loss"], grad_norm):
                optimizer.step()
            optimizer.zero_grad()
        model.eval()
        metrics.update(sums, grad_norm=grad_norm, learning_rate=learning_rate(step, config, total),
                       advantage_abs=token_mean(advantages.abs(), mask, counts).item())
        if metrics["advantage_abs"] == 0:
            bar.write(f"step {step}: the loss is 0: "
                      "in every group all episodes earned the same, so no episode stands out")
        if config.eval_every and (step + 1) % config.eval_every == 0:
            metrics.update({f"eval/{k}": v for k, v in held_out_eval().items()})
        update_seconds = time.time() - began - rollout_seconds
        run.log(step, metrics, {
            "rollout_seconds": rollout_seconds, "update_seconds": update_seconds, "peak_memory_mb": peak_memory_mb(),
            "rollout_tokens_per_second": metrics["sampled_tokens"] * len(batch) / rollout_seconds,
            "update_tokens_per_second": metrics["tokens"] * len(batch) / update_seconds})
        bar.set_postfix(success=f"{metrics['success']:.2f}", reward=f"{metrics['reward']:.2f}")
        run.end(step + 1, metrics.get("eval/success"))

    training_seconds = time.time() - training_began
    folder, after = run.last(total), held_out_eval()
    rows = [(f"before{f' (SFT, {base_seconds:.0f} s)' if base_seconds else ''}", before),
            (f"after GRPO ({total} steps, {training_seconds:.0f} s)", after)]
    result = {"success_before": before.get("success"), "success_after": after.get("success"), "steps": total,
              "seed": config.seed}
    if base_seconds and config.compare_sft and config.eval_tasks and total:
        print("control: SFT alone, on the same demonstrations, for the time that GRPO took")
        alone = os.path.join(source, "sft_alone")
        sft.train(sft.Config(
            model_path=source, output_dir=alone, overwrite=True, learning_rate=1e-3, env=config.env, seed=config.seed,
            eval_tasks=0, max_seconds=training_seconds, **{**TINY_SFT, "max_steps": None, "num_epochs": 1000}))
        model, _ = load_model(alone, train=False)
        sft_alone = held_out_eval()
        rows.append((f"SFT alone ({training_seconds:.0f} s)", sft_alone))
        result["success_sft_alone"] = sft_alone["success"]
    print_table(rows, len(held_out), config.eval_group_size)
    print(f"written: {config.output_dir} (adapter: {folder})\n"
          f"next:    python agent.py --model_path {config.output_dir} --env {config.env} --num_tasks 3")
    return run.finish({**result, "seconds": time.time() - started, "peak_memory_mb": peak_memory_mb()})


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
