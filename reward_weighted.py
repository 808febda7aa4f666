"""Reward-weighted imitation: learn from one's own or recorded episodes, as much as they earned.

    rollout, --trajectories  episodes; R is an episode's reward, or a turn's return-to-go
    advantages               A = R - baseline: nothing, or the mean of the batch or of a task
    exp_weights              exp(A / beta): AWR, arXiv 1910.00177 Algorithm 1; RWR with no baseline
    linear_weights           max(A, 0)
    filter_weights           1 for the best, 0 for the rest: RAFT (arXiv 2304.06767), ReST
                             (arXiv 2308.08998), STaR
    reward_weighted_loss     -sum w log pi(token | tokens before it) / sum w, over an update
    train                    a step is a round: collect, weigh, num_epochs passes of AdamW

There is no importance ratio: this is `sft_loss` on chosen data, so episodes may come from anywhere,
and what failed is not unlearned, only outweighed. Left out: AWR's value network, for which group
means stand in, and its buffer of older episodes.

    python reward_weighted.py      the tiny model, equations, from nothing: 3 minutes on a CPU core
    python reward_weighted.py --weight_per episode --weighting filter --top_share 0.25        RAFT
    python reward_weighted.py --model_path RUN/base --trajectories RUN/trajectories.jsonl   offline

Shapes: B sequences, T tokens, N weighted things: episodes, or turns. Column t of a (B, T) tensor
belongs to token t.
"""
import math
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean

# Imported before torch: it sets how torch's threads wait.
from layers import LayerFlags, Run, load_model, main, pass_order
from core.config import (ModelFlags, RunFlags, TrainingFlags, UserError, auto, fill, flag,
                         imitation_learning_rate, options_for)
from envs.tasks import RolloutFlags, drop_seen, tasks_of, train_and_held_out
from core.data import (collate, draw_tasks, members, per_token, played_shares, print_dropped,
                       shift_and_scale, shuffled_batches, turn_index, unusable, without_faults)

import torch
from torch.nn.utils import clip_grad_norm_

import envs
from agent import Trajectory, evaluate, rollout, rollout_options
from envs.task_files import recorded_env
from episodes import read_trajectories
from core.model import adamw, is_tiny, scheduled
from core.logprobs import token_logprobs
from lora import merged_to_train
from schooling import teach_tiny

# What the tiny model needs in place of the defaults. It is so small that larger forward passes
# fit, which are faster.
TINY = {"learning_rate": 2e-3, "batch_size": 16, "gradient_accumulation_steps": 2,
        "dtype": "float32"}


# ----------------------------------------------------------------------------------------- weights
def returns_to_go(rewards):
    """Return R_j = r_j + r_(j+1) + ...: what a turn and all after it earned, undiscounted."""
    return [math.fsum(rewards[j:]) for j in range(len(rewards))]


def advantages(values, groups, turns, baseline="group", scale="none"):
    """Compute A_i = R_i - b_i.

    Args:
        values: (N,) R of each episode or turn, float64.
        groups: N ids of task instances.
        turns: N turn numbers; all 0 for episodes.
        baseline: "none" is b = 0. "batch" is the mean R of all at this turn number, "group" that of
            the episodes of the task. The means stand in for AWR's V(s).
        scale: "batch" divides by std + 1e-5, as AWR's own code does: beta then has no unit.

    Returns (N,). With a baseline, equal values and a value without peers give exactly 0, which is
    weight 1 for `exp_weights` and 0 for `linear_weights`.
    """
    if baseline == "none":
        out = values.clone()
    else:
        peers = turns
        if baseline == "group":
            peers = list(zip(groups, turns, strict=True))
        out = torch.zeros_like(values)
        for group in members(peers):  # the indices of what shares a baseline
            # Shift first, so that equal values give exactly 0: rounding must not become a weight.
            shifted = values[group] - values[group[0]]
            out[group] = shifted - shifted.mean()
    if scale == "batch":
        out = out / (out.std(correction=0) + 1e-5)
    return out


def exp_weights(advantages, beta, max_weight=None):
    """w = min(exp(A / beta), max_weight): AWR, arXiv 1910.00177 Algorithm 1. (N,)

    beta has the unit of A. The paper clips at 20.
    """
    return (advantages / beta).exp().clamp(max=max_weight or torch.inf)


def linear_weights(advantages, max_weight=None):
    """w = min(max(A, 0), max_weight): what did worse than the baseline is not learned. (N,)"""
    return advantages.clamp(min=0.0, max=max_weight)


def filter_weights(values, pools, top_share=None, min_reward=None):
    """w = 1 for the best of each pool, else 0. (N,)

    The best are those of R >= min_reward, or the top ceil(top_share x n) of a pool. Ties are
    included: a pool of equal rewards is kept whole, even if every episode failed. pools: N ids.
    One pool of all is RAFT's global ranking, a pool for each task its local one. With min_reward
    the pools do not matter.
    """
    if min_reward is not None:
        # `weigh` has rounded the values, and 1/3 not.
        return (values >= min_reward - 1e-9).to(values)
    out = torch.zeros_like(values)
    for pool in members(pools):  # the indices of its values
        # In floating point 0.07 x 100 exceeds 7.
        best = values[pool].topk(math.ceil(top_share * len(pool) - 1e-9)).values
        out[pool] = (values[pool] >= best[-1]).to(values)
    return out


def effective_sample_size(weights):
    """(sum w)^2 / sum w^2: N where all weights are equal, 1 where one has it all."""
    # Divided by the largest, so that the squares stay finite.
    weights = weights / weights.max()
    return (weights.sum() ** 2 / (weights**2).sum()).item()


def weigh(episodes: list[Trajectory], config) -> tuple[list[list[float]], dict]:
    """Return the weights of each episode's turns, or its single one (--weight_per episode).

    Weights are divided by the largest, so that float32 holds it; the loss, which divides by their
    sum, is the same. Also returns metrics. Raises UserError if weights overflow.
    """
    values, groups, turns, lengths = [], [], [], []  # N entries each, the lengths B
    for t in episodes:
        returns = [t.reward]
        if config.weight_per == "turn":
            returns = returns_to_go(t.rewards)
        # In floating point 0.6 + 0.3 + 0.1 is below 1: rounding must not become a weight.
        values += [round(value, 9) for value in returns]
        groups += [t.group_id] * len(returns)
        turns += range(len(returns))
        lengths.append(len(returns))
    values = torch.tensor(values, dtype=torch.float64)  # (N,)
    if config.weighting == "filter":
        pools = turns
        if config.baseline == "group":
            pools = list(zip(groups, turns))
        weights = filter_weights(values, pools, config.top_share, config.min_reward)
    else:
        above = advantages(values, groups, turns, config.baseline, config.scale_rewards)
        if config.weighting == "exp":
            weights = exp_weights(above, config.beta, config.max_weight)
        else:
            weights = linear_weights(above, config.max_weight)
    if not weights.isfinite().all():
        raise UserError(f"exp(A / beta) overflows at beta {config.beta}; raise it, or give "
                        "--max_weight")
    largest = weights.max().item()
    clipped = weights >= (config.max_weight or torch.inf)
    metrics = {"weight_mean": weights.mean().item(), "weight_max": largest,
               "kept": (weights > 0).double().mean().item(),
               "clipped": clipped.double().mean().item(),
               "weights_equal": float((weights == largest).all()),
               "ess": effective_sample_size(weights) if largest else 0.0}
    # In float32, as in the loss: what is 0 there teaches nothing, and its episode is left out.
    weights = (weights / (largest or 1.0)).float()
    return [of_turns.tolist() for of_turns in weights.split(lengths)], metrics


# -------------------------------------------------------------------------------------------- loss
def token_weights(weights, loss_mask):
    """Return each turn's weight on each of its tokens, 0 where masked: (B, T).

    weights: B lists, one number for each turn, or one for the whole episode.
    """
    n_turns = (turn_index(loss_mask).max(1).values + 1).tolist()
    per_turn = []  # B of (turns,)
    for numbers, n in zip(weights, n_turns):
        if len(numbers) == 1:
            numbers = numbers * n
        per_turn.append(torch.tensor(numbers))
    return per_token(per_turn, loss_mask)


def reward_weighted_loss(logprobs, weights, weight_sum):
    """Compute -sum w log pi / sum w, the maximum likelihood fit to weighted samples.

    Args:
        logprobs: (B, T) log pi of each token given those before it.
        weights: (B, T) weight of each token, 0 where masked.
        weight_sum: of the weights of all tokens of the update, so that the losses of its
            micro-batches add up to its loss.

    arXiv 1910.00177 Algorithm 1 does not divide. Here weights compare only the episodes of one
    update: their common scale cancels, even if all of them are bad.
    """
    return -(logprobs * weights).sum() / weight_sum


# ------------------------------------------------------------------------------------------ config
def rounds(config):
    """10, or num_epochs passes over recorded episodes"""  # --help prints it as the default
    return config.num_epochs if config.trajectories else 10


@dataclass(kw_only=True)
class Config(ModelFlags, LayerFlags, RolloutFlags, TrainingFlags, RunFlags):
    heading = "episodes and weights"
    output_dir: str = "runs/reward_weighted"
    env: str | None = flag(None, "environment or several (a,b); also path/to/file.py:Class; "
                                 "default: equations, or those of the recorded episodes")
    trajectories: str | None = flag(None, "recorded episodes (trajectories.jsonl) to learn from, "
                                          "instead of playing; --tasks are "
                                          "then evaluated on")
    tasks_per_step: int = flag(32, "tasks of a round", low=1, aliases=("tasks_per_iteration",))
    max_steps: int | None = auto(rounds, "rounds", low=1, aliases=("num_iterations",))
    num_epochs: int = flag(2, "passes over the episodes of a round, or over the recorded ones")
    gradient_accumulation_steps: int | None = auto(4, "forward passes of an update", low=1)
    learning_rate: float | None = auto(imitation_learning_rate)
    weighting: str = flag("exp", "weight of A = R - baseline: exp(A / beta) or max(A, 0); filter "
                                 "keeps the largest R", choices=("exp", "linear", "filter"))
    weight_per: str = flag("turn", "R: the episode's reward, or the turn's return-to-go",
                           choices=("episode", "turn"))
    baseline: str = flag("group", "nothing, or the mean R of all or of the task; filter ranks all, "
                                  "or each task's", choices=("none", "batch", "group"))
    scale_rewards: str = flag("none", "divide A by its standard deviation over the batch",
                              choices=("none", "batch"))
    beta: float = flag(1.0, "exp(A / beta): small is greedy, large is plain imitation", above=0)
    max_weight: float | None = flag(20.0, "exp, linear: clip larger weights to this", above=0)
    top_share: float | None = flag(None, "filter: keep this best share", above=0, high=1)
    min_reward: float | None = flag(None, "filter: keep rewards from this on")


def settle(config: Config) -> Config:
    """Return the config with the defaults that depend on the model or the environment.

    Raises UserError for options that clash.
    """
    given = 2 - [config.top_share, config.min_reward].count(None)
    if given != (config.weighting == "filter"):
        raise UserError("--weighting filter takes one of --top_share and --min_reward, others take "
                        f"none; --weighting {config.weighting} is given {given}")
    compares = config.baseline == "group" and config.min_reward is None
    if not config.trajectories and config.group_size == 1 and compares:
        raise UserError("--baseline group compares the episodes of one task, --group_size 1 plays "
                        "one; raise it, or --baseline batch")
    if config.env is None:
        path = config.trajectories
        config = replace(config, env=recorded_env(path) if path else "equations")
    return fill(config, TINY if is_tiny(config.model_path) else {}, envs.recommended(config.env))


# -------------------------------------------------------------------------------------------- loop
def recorded(config: Config, model, tokenizer) -> list[Trajectory]:
    """Return the episodes of --trajectories. Raises UserError if no weights can be made of them."""
    path = config.trajectories
    everything = read_trajectories(path, model, tokenizer)
    episodes = [t for t in everything if len(t.token_ids) <= config.max_tokens and 1 in t.loss_mask]
    print_dropped(everything, episodes, f"episodes exceed {config.max_tokens} tokens or have none "
                                        "to train: dropped")
    if not episodes:
        raise UserError(f"{path}: no episodes left to learn from; raise --max_tokens "
                        f"{config.max_tokens}")
    for t in episodes:
        turns = int(turn_index(torch.tensor([t.loss_mask])).max()) + 1
        if config.weight_per == "turn" and len(t.rewards) != turns:
            raise UserError(f"{path}: an episode of group {t.group_id!r} has {len(t.rewards)} "
                            f"rewards, but {turns} turns in its loss_mask; use --weight_per "
                            "episode")
    shift_and_scale(episodes, config)
    if config.baseline == "group" and config.min_reward is None:
        check_groups(path, episodes)
    if not weigh(episodes, config)[1]["kept"]:
        raise UserError(f"{path}: no episode of positive weight; try another --weighting, "
                        "--baseline, --reward_bias or --min_reward")
    return episodes


def check_groups(path, episodes):
    """Raise UserError if the episodes of a group are not of one task, or if there is only one."""
    for rows in members([t.group_id for t in episodes]):
        tasks = [episodes[i].info.get("task") for i in rows]
        name = episodes[rows[0]].group_id
        if len(rows) == 1:
            raise UserError(f"{path}: group {name!r} has one episode: its mean is that episode's "
                            "reward; use --baseline batch or none")
        if any(task != tasks[0] for task in tasks):
            raise UserError(f"{path}: group_id {name!r} names two tasks: files of two runs in one? "
                            "Give one run's, or --baseline batch")


def collect(play, tasks, config: Config, step: int, run) -> list[Trajectory]:
    """Play the group_size episodes of each of the round's tasks; [] if a reward is not finite.

    `play` is `rollout` with all but tasks, group size and step given.
    """
    n = config.tasks_per_step
    round_tasks = draw_tasks(tasks, config.seed, step, n, first=0, n=n)
    played = play(round_tasks, config.group_size, step=step)
    run.log(**played_shares(played))
    episodes = without_faults(played)
    shift_and_scale(episodes, config)
    if reason := unusable(episodes):
        run.skip(episodes, reason)
        return []
    run.log_episodes(episodes)
    return episodes


def minibatches(episodes, turn_weights, config: Config, step: int):
    """Return [(batch, weights of its turns)] of num_epochs passes in random order.

    Every episode of positive weight is in each pass, and batches are as even as possible. With
    --trajectories a step is a single pass.
    """
    weights_of = {t: weights for t, weights in zip(episodes, turn_weights) if any(weights)}
    if not weights_of:
        return []
    passes = config.num_epochs
    if config.trajectories:
        passes = 1
    out = []
    per_update = config.batch_size * config.gradient_accumulation_steps
    for epoch in range(passes):
        for batch in shuffled_batches(list(weights_of), per_update, config.seed, step, epoch):
            batch = pass_order(batch, config.batch_size)
            out.append((batch, [weights_of[t] for t in batch]))
    return out


def log_weights(run, step, metrics):
    """Log what `weigh` says; print a note if the weights do not say which episode is better."""
    run.log(**metrics)
    if not metrics["kept"]:
        print(f"note: step {step}: no episode of positive weight, nothing to learn from; try "
              "easier tasks, another --weighting, --baseline or --reward_bias")
    elif metrics["weights_equal"]:
        print(f"note: step {step}: all weights are equal: rewards do not say which episode is "
              "better")


def train(config: Config) -> dict:
    """Collect episodes, weigh each by its reward, imitate them by their weights, repeat."""
    config = settle(config)
    tasks, held_out = train_and_held_out(config, 0 if config.trajectories else config.max_samples)
    run = Run(config, "reward_weighted")  # the output folder: logs, checkpoints, result
    if run.finished:
        return run.finished
    model, tokenizer = load_model(config.model_path, **options_for(load_model, config))
    data = recorded(config, model, tokenizer) if config.trajectories else []
    held_out = drop_seen(held_out, tasks_of(data))
    # The tiny model is taught only now, so that a bad row of a file is refused at once.
    if config.model_path == "tiny":
        base = teach_tiny(config, run, bool(tasks))
        model, tokenizer = load_model(base, **options_for(load_model, config))
    optimizer = adamw(model, lr=config.learning_rate, weight_decay=config.weight_decay, beta2=0.999)
    play = partial(rollout, model, tokenizer, config.env, **rollout_options(config, run))
    test = partial(evaluate, model, tokenizer, config.env, held_out, **rollout_options(config, run))
    total = config.max_steps
    with run:
        for step in range(run.load(model, tokenizer, optimizer, total), total):
            if step % (config.eval_every or total) == 0:
                run.log_evaluation(step, test())
            for group in optimizer.param_groups:  # from the rate that it was made with
                group["lr"] = scheduled(group["initial_lr"], step, run.planned)
            run.log(learning_rate=optimizer.param_groups[0]["lr"])

            # 1. Episodes: group_size of each task, played by the policy as it is; or the file's.
            episodes = data or collect(play, tasks, config, step, run)
            if not episodes:
                run.end_step(step)
                continue

            # 2. Targets: each token's log-probability is multiplied by the weight of its turn.
            turn_weights, metrics = weigh(episodes, config)
            log_weights(run, step, metrics)

            # 3. Updates. The losses of the micro-batches add up to the loss of the update.
            losses, grad_norms = [], []  # of each update
            model.train()
            updates = minibatches(episodes, turn_weights, config, step)
            for update, (batch, weights) in enumerate(updates):
                token_ids, loss_mask, _ = collate(batch, model.device)  # (B, T) each
                w = token_weights(weights, loss_mask)  # (B, T)
                metrics = []
                # The adapter is merged as in the rollout, so that both round alike.
                with merged_to_train(model):
                    for rows in run.micro_batches(len(batch), step, update):
                        logprobs, _ = token_logprobs(model, token_ids[rows], loss_mask[rows],
                                                     config.temperature)  # (b, T)
                        loss = reward_weighted_loss(logprobs, w[rows], w.sum())
                        logprobs.retain_grad()  # what multiplies each token's grad log pi
                        loss.backward()
                        run.record(batch[rows], new=logprobs, advantages=w[rows])
                        metrics.append({"loss": loss.detach()})
                        del logprobs, loss  # free the graph: the next one needs room
                totals = run.ranks.all_reduce(model, metrics)
                losses.append(totals["loss"])
                grad_norm = clip_grad_norm_(model.parameters(), config.max_grad_norm).item()
                grad_norms.append(grad_norm)
                if math.isfinite(totals["loss"] + grad_norm):
                    optimizer.step()
                else:  # it would spoil the weights for good
                    run.skip(batch, f"loss {totals['loss']}, gradient norm {grad_norm}")
                optimizer.zero_grad()
            if updates:
                run.log(updates=len(updates), loss=fmean(losses), grad_norm=fmean(grad_norms))
            run.end_step(step)
        return run.finish(test())


if __name__ == "__main__":
    main(Config, train, __doc__)
