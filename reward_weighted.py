"""Reward-weighted imitation: learn from one's own, or recorded, episodes, each as much as its reward says.

    rollout, or --trajectories  -> episodes; R is an episode's reward, or a turn's `returns_to_go` (--weight_per turn)
    advantages                  -> A = R - baseline: nothing, the mean of the batch, or of the episodes of one task
    exp_weights                 -> exp(A / beta): AWR, arXiv 1910.00177 Algorithm 1; with --baseline none, RWR
    linear_weights              -> max(A, 0)
    filter_weights              -> 1 for the best, 0 for the rest: RAFT (arXiv 2304.06767), ReST (2308.08998), STaR
    reward_weighted_loss        -> -sum w log pi(token | tokens before it) / sum w, over all tokens of one update
    train                       -> collect, weigh, num_epochs passes of minibatch AdamW, and again (--num_iterations)

No importance ratio: it is `sft_loss` on chosen data, so episodes may come from anywhere, and what failed is not
unlearnt, only outweighed. Left out: AWR's value network (group means stand in for it) and its buffer of older episodes.

    python reward_weighted.py           the tiny model, equations, from nothing: about 3 minutes on a CPU core
    python reward_weighted.py --weight_per episode --weighting filter --top_share 0.25      RAFT: a task's best 2 of 8
    python reward_weighted.py --model_path runs/grpo/base --trajectories runs/grpo/trajectories.jsonl       offline

Legend: B sequences, T tokens, N weighted things: episodes, or turns. Column t of a (B, T) tensor belongs to token t.
"""
import math
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

import envs
from agent import Limits, Trajectory, collate, evaluate, judged, rollout
from envs.demonstrations import read_trajectories
from experiment.checkpoint import optimizer_tensors
from experiment.config import flag
from experiment.episodes import summarise
from experiment.errors import UserError
from experiment.files import replace_file, to_json
from experiment.process import peak_memory_mb
from experiment.program import main
from experiment.run import Run
from experiment.seeds import mix
from llm.batches import cheapest_order
from llm.dry_run import dry_run
from llm.loading import DTYPES, fast_float32, load_model, load_weights, model_options, save_model
from llm.logprobs import token_logprobs
from llm.optimizer import adamw
from lora import merged
from sft import teach_tiny


# ------------------------------------------------------------------------------------------------------- weights
def returns_to_go(rewards):
    """R_j = r_j + r_(j+1) + ...: what a turn and all after it earned, undiscounted. One list in, one out."""
    return [math.fsum(rewards[j:]) for j in range(len(rewards))]


def advantages(values, groups, turns, baseline="group", scale="none"):
    """A_i = R_i - b_i, then / (std + 1e-5) with scale "batch", as AWR's own code does: beta then has no unit. (N,)

    values (N,) float64; groups: N ids of task instances; turns: N turn numbers (episodes: all 0). b is 0 ("none"), or
    the mean over the same turn number: of all N ("batch"), or of the group ("group"); both stand in for AWR's V(s).
    Equal values get exactly 0. ValueError: a group with one episode.
    """
    peers = {"none": range(len(turns)), "batch": turns, "group": list(zip(groups, turns, strict=True))}[baseline]
    out = values.clone()
    for peer in dict.fromkeys(peers) if baseline != "none" else ():
        rows = [i for i, p in enumerate(peers) if p == peer]
        if baseline == "group" and len(rows) == 1 and peer[1] == 0:
            raise ValueError(f"group {peer[0]!r} has one episode: its mean is that episode's own reward")
        shifted = values[rows] - values[rows[0]]  # equal values give exactly 0: rounding must not become a weight
        out[rows] = shifted - shifted.mean()
    return out / (out.std(correction=0) + 1e-5) if scale == "batch" else out


def exp_weights(advantages, beta, max_weight=None):
    """w = min(exp(A / beta), max_weight): arXiv 1910.00177 Algorithm 1; the paper clips at 20. beta: A's unit. (N,)"""
    return (advantages / beta).exp().clamp(max=max_weight or torch.inf)


def linear_weights(advantages, max_weight=None):
    """w = min(max(A, 0), max_weight): what did worse than the baseline is not learnt from. (N,)"""
    return advantages.clamp(min=0.0, max=max_weight)


def filter_weights(values, pools, top_share=None, min_reward=None):
    """1 where R >= min_reward, or where R is among the top ceil(top_share x n) of its pool, ties included; else 0. (N,)

    pools: N ids. One pool of all is RAFT's global ranking, a pool for each task its local one (best of n).
    """
    if min_reward is not None:
        return (values >= min_reward).to(values)
    out = torch.zeros_like(values)
    for pool in dict.fromkeys(pools):
        rows = [i for i, p in enumerate(pools) if p == pool]
        last = values[rows].sort(descending=True).values[math.ceil(top_share * len(rows) - 1e-9) - 1]
        out[rows] = (values[rows] >= last).to(values)
    return out


def effective_sample_size(weights):
    """(sum w)^2 / sum w^2: N where all weights are equal, 1 where one has it all."""
    weights = weights / weights.max()  # squares stay finite
    return (weights.sum() ** 2 / (weights**2).sum()).item()


# ---------------------------------------------------------------------------------------------------------- loss
def turn_index(mask):
    """The turn each token belongs to, -1 where masked: one run of 1s in the mask (B, T) is one turn."""
    mask = mask.long()
    starts = (mask - F.pad(mask, (1, -1))).clamp(min=0)
    return torch.where(mask.bool(), starts.cumsum(1) - 1, -1)  # (B, T)


def token_weights(weights, loss_mask):
    """Each turn's weight on each of its tokens, 0 where masked. (B, T)

    weights: B lists, one number for each turn, or one for the whole episode. ValueError: neither.
    """
    turns = turn_index(loss_mask)  # (B, T)
    out = torch.zeros(loss_mask.shape, device=loss_mask.device)
    for row, own in enumerate(weights):
        sampled, own = turns[row] >= 0, torch.tensor(own, device=loss_mask.device)  # (T,) (turns,)
        if len(own) not in (1, turns[row].max() + 1):
            raise ValueError(f"episode {row}: {len(own)} weights, but {turns[row].max() + 1} turns in the mask")
        out[row, sampled] = own[turns[row, sampled] % len(own)].to(out)
    return out


def reward_weighted_loss(logprobs, weights, weight_sum):
    """-sum w log pi / sum w: the maximum likelihood fit to weighted samples, arXiv 1910.00177 Algorithm 1.

    logprobs, weights (B, T); weight_sum: of the weights of ALL tokens of the update, so that the losses of its
    micro-batches sum to its loss. The paper does not divide: here the scale of weights, hence of rewards, cancels.
    """
    return -(logprobs * weights).sum() / weight_sum


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

    env: str | None = flag(None, "world or worlds (a,b); also path/to/file.py:Class; default: equations, or with "
                                 "--trajectories those of the episodes", group="data")
    dataset: str | None = flag(None, "tasks (.jsonl, or a name the world knows); default: its own", group="data")
    eval_dataset: str | None = flag(None, "held-out tasks (.jsonl); default: a tenth of --dataset", group="data")
    max_samples: int = flag(10_000, "training tasks", group="data", low=1)
    trajectories: str | None = flag(
        None, "recorded episodes (trajectories.jsonl) to learn from, instead of playing", group="data")
    reward_scaling: float = flag(1.0, "reward = (reward - reward_bias) x this", group="data")
    reward_bias: float = flag(0.0, "subtracted from each episode's reward", group="data")

    num_iterations: int | None = flag(None, "times to collect and learn; default: 10", group="rollout", low=1)
    tasks_per_iteration: int = flag(32, "tasks of an iteration", group="rollout", low=1)
    group_size: int = flag(8, "episodes of each task", group="rollout", low=1,
                           aliases=("samples_per_prompt", "num_samples"))
    temperature: float = flag(1.0, "of the softmax, in rollout and update", group="rollout", above=0)
    max_new_tokens: int = flag(64, "tokens per turn", group="rollout", low=1)
    max_tokens: int = flag(512, "tokens per episode; longer recorded ones are dropped and counted", group="rollout",
                           low=8, aliases=("max_length",))
    max_turns: int | None = flag(None, "assistant turns per episode; default: the world's", group="rollout", low=1)
    max_tool_calls: int = flag(32, "tool calls per episode", group="rollout", low=1)
    max_tool_tokens: int = flag(512, "tokens of tool results per episode", group="rollout", low=1)
    tool_timeout: float = flag(10.0, "seconds before a tool call is abandoned", group="rollout", above=0)
    tool_steps: int = flag(4, "decode steps a tool call has before decoding waits for it", group="rollout", low=1)
    merge_lora: bool = flag(True, "merge the adapter into the working weights while decoding", group="rollout")

    weighting: str = flag("exp", "of A = R - baseline; filter ranks R", group="weights",
                          choices=("exp", "linear", "filter"))
    weight_per: str = flag("turn", "R: the episode's reward, or what a turn and those after it earned", group="weights",
                           choices=("episode", "turn"))
    baseline: str = flag("group", "mean R over: nothing, all, the task's episodes; filter: what is ranked together",
                         group="weights", choices=("none", "batch", "group"))
    scale_rewards: str = flag("none", "divide A by its standard deviation over the batch", group="weights",
                              choices=("none", "batch"))
    beta: float = flag(1.0, "exp(A / beta): small is greedy, large is plain imitation", group="weights", above=0)
    max_weight: float | None = flag(20.0, "exp, linear: larger weights are clipped to this", group="weights", above=0)
    top_share: float | None = flag(None, "filter: the best of this share", group="weights", above=0, high=1)
    min_reward: float | None = flag(None, "filter: all of at least this reward", group="weights")

    num_epochs: int = flag(2, "passes over the episodes of an iteration, or over the recorded ones", group="training",
                           low=1, aliases=("total_epochs",))
    max_steps: int | None = flag(
        None, "updates; beats num_epochs with --trajectories, else ends the run sooner", group="training", low=1)
    batch_size: int = flag(16, "episodes in one forward pass", group="training", low=1)
    gradient_accumulation_steps: int = flag(2, "forward passes of an update", group="training", low=1)
    learning_rate: float | None = flag(
        None, "AdamW step size; default: 1e-4 with LoRA, 1e-5 without, 2e-3 for tiny", group="training", low=0)
    lr_schedule: str = flag("linear", "after the warm-up", group="training", choices=("constant", "linear", "cosine"))
    warmup_steps: int = flag(5, "updates of linear warm-up", group="training", low=0)
    weight_decay: float = flag(0.0, "AdamW weight decay", group="training", low=0)
    max_grad_norm: float = flag(1.0, "gradient norm is clipped to this", group="training", above=0)

    output_dir: str = flag("runs/reward_weighted", "folder of this run", group="run")
    overwrite: bool = flag(False, "replace the run that is in output_dir", group="run")
    resume: str | None = flag(None, "go on with the run in output_dir, from its newest checkpoint or the one before",
                              group="run", choices=("newest", "previous"), const="newest")
    resume_anyway: bool = flag(False, "resume with other --batch_size, --slots or ways to recompute", group="run")
    seed: int = flag(0, "of everything random", group="run", low=0)
    save_every: int = flag(0, "updates between checkpoints; 0: at the end", group="run", low=0)
    save_trajectories: int = flag(16, "episodes of each iteration kept in trajectories.jsonl", group="run", low=0)
    eval_tasks: int = flag(200, "held-out tasks played before and after; 0: none", group="run", low=0)
    eval_group_size: int = flag(1, "episodes of each held-out task, for pass@k", group="run", low=1)


def check(config: Config):
    """UserError for options that clash, before anything is loaded."""
    chosen = [f"--{name}" for name in ("top_share", "min_reward") if getattr(config, name) is not None]
    if config.weighting == "filter" and len(chosen) != 1:
        raise UserError("--weighting filter takes --top_share or --min_reward, one of them; "
                        f"given: {' and '.join(chosen) or 'neither'}")
    if config.weighting != "filter" and chosen:
        raise UserError(f"{chosen[0]} is for --weighting filter, not {config.weighting}")
    if config.trajectories and config.num_iterations:
        raise UserError(f"--trajectories learns from recorded episodes, --num_iterations {config.num_iterations} plays "
                        "new ones; give one of them (--num_epochs: passes over the recorded ones)")
    if not config.trajectories and config.group_size == 1 and config.baseline == "group" and not chosen:
        raise UserError("--baseline group compares the episodes of one task, --group_size 1 plays one; "
                        "raise it, or --baseline batch")


def learning_rate(step: int, done: float, config: Config) -> float:
    """Warm-up over updates, then the schedule over `done`, the share of the run before this update: nothing to save."""
    left = 1 - done
    shape = {"constant": 1.0, "linear": left, "cosine": 0.5 - 0.5 * math.cos(math.pi * left)}[config.lr_schedule]
    return config.learning_rate * min(1.0, (step + 1) / max(config.warmup_steps, 1)) * shape


# ---------------------------------------------------------------------------------------------------------- loop
def recorded(config: Config) -> list[Trajectory]:
    """The episodes of --trajectories, less those too long. UserError: what this run's weights cannot be made of."""
    path, found = config.trajectories, read_trajectories(config.trajectories)
    episodes = [t for t in found if len(t.token_ids) <= config.max_tokens and sum(t.loss_mask)]
    if len(episodes) < len(found):
        print(f"{len(found) - len(episodes)} of {len(found)} episodes exceed {config.max_tokens} tokens "
              "or have none to train: dropped")
    if not episodes:
        raise UserError(f"{path}: no episodes left to learn from; raise --max_tokens {config.max_tokens}")
    tasks, grouped = {}, config.baseline == "group" and config.min_reward is None
    for t in episodes:
        runs = sum(m > before for m, before in zip(t.loss_mask[1:], t.loss_mask))
        if config.weight_per == "turn" and len(t.rewards) != runs:
            raise UserError(f"{path}: an episode of group {t.group_id!r} has {len(t.rewards)} rewards, but {runs} "
                            "turns in its loss_mask; use --weight_per episode")
        if grouped and tasks.setdefault(t.group_id, t.info.get("task")) != t.info.get("task"):
            raise UserError(f"{path}: group_id {t.group_id!r} names two tasks: files of two runs in one? "
                            "Give one run's, or --baseline batch")
    if not weigh(episodes, config)[1]["kept"]:
        raise UserError(f"{path}: no episode of positive weight; try another --weighting, --baseline, --reward_bias "
                        "or --min_reward")
    return episodes


def collect(model, tokenizer, config: Config, tasks, iteration: int, limits, run) -> list[Trajectory]:
    """The iteration's episodes; its tasks are a function of (seed, iteration)."""
    epoch, place = divmod(iteration * config.tasks_per_iteration, len(tasks))
    order = np.random.default_rng([config.seed, epoch]).permutation(len(tasks))
    chosen = [tasks[order[(place + i) % len(tasks)]] for i in range(config.tasks_per_iteration)]
    return judged(rollout(
        model, tokenizer, config.env, chosen, config.group_size, limits=limits, temperature=config.temperature,
        seed=config.seed, step=iteration, run=run))


def weigh(episodes: list[Trajectory], config: Config) -> tuple[list[list[float]], dict]:
    """-> for each episode its turns' weights, or a single one (--weight_per episode), and what to log of them.

    Weights are divided by the largest: float32 holds them, and the loss, which divides by their sum, is the same.
    UserError: a group of one episode, weights that overflow.
    """
    values = [[(t.reward - config.reward_bias) * config.reward_scaling] for t in episodes]
    if config.weight_per == "turn":
        values = [returns_to_go([(r - config.reward_bias / len(t.rewards)) * config.reward_scaling for r in t.rewards])
                  for t in episodes]
    lengths = [len(own) for own in values]
    turns = [turn for n in lengths for turn in range(n)]  # N entries, as the next two
    groups = [t.group_id for t, n in zip(episodes, lengths) for _ in range(n)]
    flat = torch.tensor([value for own in values for value in own], dtype=torch.float64)  # (N,)
    if config.weighting == "filter":
        pools = list(zip(groups, turns)) if config.baseline == "group" else turns
        weights = filter_weights(flat, pools, config.top_share, config.min_reward)
    else:
        try:
            a = advantages(flat, groups, turns, config.baseline, config.scale_rewards)
        except ValueError as error:
            raise UserError(f"{error}; use --baseline batch or none") from None
        weights = exp_weights(a, config.beta, config.max_weight) if config.weighting == "exp" else (
            linear_weights(a, config.max_weight))
    if not weights.isfinite().all():
        raise UserError(f"exp(A / beta) overflows at beta {config.beta}; raise it, or give --max_weight")
    top = weights.max().item()
    metrics = {"weight_mean": weights.mean().item(), "weight_max": top, "kept": (weights > 0).double().mean().item(),
               "clipped": (weights >= (config.max_weight or torch.inf)).double().mean().item(),
               "weights_equal": float((weights == top).all()), "ess": effective_sample_size(weights) if top else 0.0}
    return [w.tolist() for w in (weights / (top or 1.0)).split(lengths)], metrics


def shuffled_batches(items: list, per_step: int, *seed) -> list[list]:
    """One pass in random order, split as evenly as it goes: no item is left out, no batch exceeds per_step."""
    order = np.random.default_rng(seed).permutation(len(items))
    return [[items[i] for i in part] for part in np.array_split(order, math.ceil(len(items) / per_step))]


def train(config: Config) -> dict:
    started = time.time()
    check(config)
    if config.learning_rate is None:
        config = replace(config, learning_rate=2e-3 if config.model_path == "tiny" else 1e-4 if config.lora_r else 1e-5)
    files = config.dataset, config.eval_dataset
    data = recorded(config) if config.trajectories else []
    if config.env is None:  # of the worlds that a file names only those we know: data does not choose which code runs
        known = envs.ENVS.keys() & {str(t.info.get("env")) for t in data}
        config = replace(config, env=",".join(sorted(known)) or (None if data else "equations"))
    tasks = [] if data else envs.tasks(config.env, "train", config.max_samples, config.seed, *files)
    played = config.eval_tasks and config.env
    held_out = envs.tasks(config.env, "test", config.eval_tasks, config.seed, *files) if played else []
    if config.dry_run:
        return dry_run(config, 0 if data else config.tasks_per_iteration * config.group_size,
                       len(held_out) * config.eval_group_size)
    run = Run(config, "reward_weighted")
    if run.finished:
        return run.finished
    fast_float32()
    source = teach_tiny(config, run) if config.model_path == "tiny" else config.model_path
    model, tokenizer = load_model(source, **model_options(config))
    largest, rows = max((max(t.token_ids) for t in data), default=0), model.get_input_embeddings().weight.shape[0]
    if largest >= rows:
        raise UserError(f"{config.trajectories}: token id {largest}, but {source} has {rows} tokens; "
                        "give the model that played these episodes")
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = adamw(
        model, lr=config.learning_rate, betas=(0.9, 0.999), weight_decay=config.weight_decay)
    limits = Limits(config.max_turns, config.max_new_tokens, config.max_tokens, config.max_tool_calls,
                    config.max_tool_tokens, config.tool_timeout)
    per_step = config.batch_size * config.gradient_accumulation_steps
    iterations = 1 if data else config.num_iterations or 10

    def held_out_eval():
        return evaluate(
            model, tokenizer, config.env, held_out, config.eval_group_size, limits=limits, seed=config.seed,
            step=-1, temperature=config.temperature, run=run) if held_out else {}

    def update_weights():  # the sampler's own, but for a dropout of the adapter's input, which merged weights lack
        return merged(model) if config.merge_lora and not config.lora_dropout else nullcontext()

    def write(folder):  # the iteration's episodes too: the policy that played them is no more after its first update
        save_model(model, folder)
        if done and not data:
            replace_file(folder / "episodes.jsonl", "".join(to_json(t.to_json()) for t in episodes))

    def save(step):
        return run.save(step, write, tokenizer, optimizer_tensors(optimizer, model.named_parameters()),
                        {"before": before, "seconds": time.time() - training_began, "iteration": iteration,
                         "done": done})

    step, saved = run.restore(lambda folder: load_weights(model, folder), optimizer, model.named_parameters())
    before = saved["before"] if saved else held_out_eval()
    started, training_began = (t - saved.get("seconds", 0.0) for t in (started, time.time()))
    iteration, done = saved.get("iteration", 0), saved.get("done", 0)  # done: of the iteration's updates
    run.begin(save)
    bar = tqdm(range(iteration, iterations), "reward_weighted", initial=iteration, total=iterations, disable=bool(data))
    for iteration in bar:
        began = time.time()
        if done and not data:
            episodes = read_trajectories(str(run.checkpoint / "episodes.jsonl"))
        else:
            episodes = data or collect(model, tokenizer, config, tasks, iteration, limits, run)
        rollout_seconds = time.time() - began
        if not run.accept_rewards(episodes):
            iteration += 1
            run.end(step)
            continue
        shares, metrics = weigh(episodes, config)
        metrics["episodes"] = len(episodes)
        if not data:
            shown = [replace(t, reward=(t.reward - config.reward_bias) * config.reward_scaling) for t in episodes]
            metrics = {**summarise(shown), **metrics}
            bar.set_postfix(success=f"{metrics['success']:.2f}", reward=f"{metrics['reward']:.2f}")
            if not done:
                run.trajectories(step, shown[:config.save_trajectories])
        if metrics["weights_equal"] and metrics["kept"]:
            bar.write(f"note: iteration {iteration}: all weights are equal: rewards do not say which episode is better")
        kept = [pair for pair in zip(episodes, shares) if any(pair[1])]  # what weighs nothing takes no place in a batch
        passes = config.num_epochs
        if data and config.max_steps:
            passes = math.ceil(config.max_steps / math.ceil(len(kept) / per_step))
        batches = [batch for epoch in range(passes if kept else 0)
                   for batch in shuffled_batches(kept, per_step, config.seed, iteration, epoch)]
        whole = len(batches)
        if config.max_steps:
            batches = batches[:config.max_steps - step + done]
        if not kept:
            bar.write(f"note: iteration {iteration}: no episode of positive weight, nothing to learn from")
            iteration += 1
            run.end(step)
        metrics = {} if done else metrics  # an iteration's own numbers stand in its first line only
        for batch in tqdm(batches[done:], "updates", leave=bool(data), delay=2):
            began, loss = time.time(), 0.0
            own, micro = {id(t): w for t, w in batch}, []
            batch = cheapest_order([t for t, _ in batch], config.batch_size)
            for part in run.ranks.micro_batches(len(batch), config.batch_size):
                token_ids, loss_mask, _ = collate(batch[part], model.device)  # (b, t) each
                w = token_weights([own[id(t)] for t in batch[part]], loss_mask)  # (b, t)
                micro.append((part.start, token_ids, loss_mask, w))
            weight_sum = run.ranks.add(sum((w.sum() for *_, w in micro), torch.zeros((), device=model.device)))
            model.train()
            with update_weights():
                for first, token_ids, loss_mask, w in micro:
                    run.check()
                    torch.manual_seed(mix(config.seed, "dropout", step, first))
                    logprobs = token_logprobs(model, token_ids, loss_mask, config.temperature)[0]  # (b, t)
                    part = reward_weighted_loss(logprobs, w, weight_sum)
                    part.backward()
                    loss += part.item()
                    del logprobs, part  # or the graph lies in the way of the next
            run.ranks.add_gradients(weights)
            loss = sum(run.ranks.gather(loss))
            lr = learning_rate(step, (iteration + done / len(batches)) / iterations, config)
            for group in optimizer.param_groups:
                group["lr"] = lr
            grad_norm = torch.nn.utils.clip_grad_norm_(weights, config.max_grad_norm).item()
            if run.accept_update(batch, loss, grad_norm):
                optimizer.step()
            optimizer.zero_grad()
            model.eval()
            metrics.update(iteration=iteration, loss=loss, grad_norm=grad_norm, learning_rate=lr)
            run.write_line(step, metrics,
                    {"rollout_seconds": rollout_seconds, "update_seconds": time.time() - began,
                     "peak_memory_mb": peak_memory_mb()})
            metrics, rollout_seconds, step, done = {}, 0.0, step + 1, done + 1
            if done == whole and not data:
                iteration, done = iteration + 1, 0
            run.end(step)
        if config.max_steps and step >= config.max_steps:
            break
    if not step:
        raise UserError(f"no episode of positive weight in {iterations} iterations; "
                        "try easier tasks, another --weighting, --baseline or --reward_bias")

    training_seconds = time.time() - training_began
    folder, after = run.last(step), held_out_eval()
    print_table([("before", before),
                 (f"after ({step} updates, {training_seconds:.0f} s)", after)], len(held_out), config.eval_group_size)
    print(f"written: {config.output_dir} (adapter: {folder})\n"
          f"next:    python agent.py --model_path {config.output_dir}"
          + (f" --env {config.env} --num_tasks 3" if config.env else ""))
    return run.write_result({
        "success_before": before.get("success"), "success_after": after.get("success"), "steps": step,
        "seed": config.seed, "seconds": time.time() - started, "peak_memory_mb": peak_memory_mb()})


def print_table(rows, num_tasks, group_size):
    if not any(values for _, values in rows):
        return
    names = [f"pass@{group_size}"] * (group_size > 1) + ["reward", "actions", "structure", "completion", "tool_errors"]
    print(f"\nheld-out ({num_tasks} tasks){'':16}success" + "".join(f"{name:>13}" for name in names))
    for label, values in rows:
        print(f"{label:34} {values['success']:6.3f}" + "".join(f"{values[name]:13.3f}" for name in names))


if __name__ == "__main__":
    main(Config, train, __doc__)
