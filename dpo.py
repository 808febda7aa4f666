"""Direct preference optimization (DPO): make the better of two episodes more likely than the worse.

    make_pairs      two episodes of one task whose rewards differ by at least `min_gap`
    reference_sums  log pi_ref of every episode, computed once, before the first update
    LOSSES[name]    a function of a pair's log-ratios policy / reference: DPO or a relative
    pair_loss       their weighted sum + `sft_coef` x -log pi(chosen) per token
    train           AdamW over shuffled epochs; held-out pairs and tasks before and after

DPO's loss constrains only the margin, and the easiest way to increase it is to make both episodes
less likely: the success of the tiny model can fall to 0 while the accuracy of its pairs rises. So
`sft_coef` is 1, as in RPO; 0 is the plain loss. `logprobs/chosen` in the log should not fall. Only
sampled tokens count: tool results and templates are context. A pair with an episode of more than
`max_tokens` is dropped, not cut: half an episode earned no reward. Left out: the aot losses,
f-divergences, the weights of WPO and LD-DPO, a moving reference.

    python dpo.py            the tiny model, equations, from nothing: about 3 minutes on a CPU core
    python agent.py --model_path MODEL --env gsm8k --num_tasks 64 --group_size 8 --output t.jsonl
    python dpo.py --model_path MODEL --trajectories t.jsonl --min_gap 0.5
    python dpo.py --model_path MODEL --dataset pairs.jsonl --loss sigmoid,sft --sft_coef 0

Shapes: B pairs, T tokens. Of 2B rows the first B are chosen, the others rejected, pair by pair.
"""
import math
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain
from typing import NamedTuple

# Imported before torch: it sets how torch's threads wait.
from layers import LayerFlags, Run, load_model, main
from core.config import (ModelFlags, RunFlags, TrainingFlags, UserError, auto, fill, flag, nearest,
                         options_for, progress)
from core.data import collate, print_dropped, shuffled_batches, unusable, without_faults
from envs.tasks import RolloutFlags, drop_seen, tasks_of, train_and_held_out

import torch
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_

import envs
from agent import Trajectory, evaluate, rollout, rollout_options
from core.model import adamw, is_tiny, scheduled, steps_of
from core.logprobs import token_logprobs
from envs.task_files import with_env
from episodes import (checked, longer, make_pairs, read_files, read_trajectories, split_pairs,
                      write_pairs)
from lora import merged_to_train
from schooling import teach_tiny

# What the tiny model needs in place of the defaults. Its larger forward passes are faster.
TINY = {"learning_rate": 2e-3, "batch_size": 8, "gradient_accumulation_steps": 1,
        "dtype": "float32"}


# ------------------------------------------------------------------------------------------ losses
class Scores(NamedTuple):
    """What a loss may use of B pairs, (B,) each. A log-ratio is log(policy / reference)."""

    chosen: torch.Tensor  # log-ratio, summed over the sampled tokens; with --length_norm their mean
    rejected: torch.Tensor
    chosen_mean: torch.Tensor  # log-ratio, mean over the sampled tokens
    rejected_mean: torch.Tensor
    chosen_logprob: torch.Tensor  # log policy, summed over the sampled tokens
    rejected_logprob: torch.Tensor
    chosen_logprob_mean: torch.Tensor  # log policy, mean over the sampled tokens
    rejected_logprob_mean: torch.Tensor
    nll: torch.Tensor  # -log policy(chosen); its mean over pairs is the step's mean over tokens


# A loss takes `Scores` and beta, and returns the losses of the pairs, (B,). In the docstrings c and
# r are beta x the log-ratios, x = c - r, and l(x) = -log sigmoid(x).
def sigmoid(scores, beta):
    """-log sigmoid(beta (chosen - rejected)): DPO, arXiv 2305.18290 eq. 7.

    Its gradient (section 4) is -beta sigmoid(beta (rejected - chosen)) (grad log pi(chosen) - grad
    log pi(rejected)): the more wrongly the implicit reward, beta x log-ratio, still orders a pair,
    the more the pair counts.
    """
    return -F.logsigmoid(beta * (scores.chosen - scores.rejected))


def hinge(scores, beta):
    """max(0, 1 - beta (chosen - rejected)): SLiC, arXiv 2305.10425 section 2, on log-ratios as in
    RSO, arXiv 2309.06657."""
    return (1 - beta * (scores.chosen - scores.rejected)).relu()


def ipo(scores, beta):
    """(chosen - rejected - 1 / (2 beta))^2: IPO, arXiv 2310.12036 eq. 17, where beta is called tau.

    Here the log-ratios are means over tokens, as the authors advised TRL. Eq. 17 has sums.
    """
    return (scores.chosen_mean - scores.rejected_mean - 1 / (2 * beta)) ** 2


def exo_pair(scores, beta, label_smoothing=1e-3):
    """KL(policy's choice || (1 - eps, eps)): EXO, arXiv 2402.00856 eq. 16, where eps is
    label_smoothing, which must be above 0."""
    x = beta * (scores.chosen - scores.rejected)
    right = torch.sigmoid(x) * (F.logsigmoid(x) - math.log1p(-label_smoothing))
    wrong = torch.sigmoid(-x) * (F.logsigmoid(-x) - math.log(label_smoothing))
    return right + wrong


def nca_pair(scores, beta):
    """l(c) + (l(-c) + l(-r)) / 2: NCA, arXiv 2402.05369 section 4.1, which keeps the likelihood
    of the chosen episode up by itself."""
    c, r = beta * scores.chosen, beta * scores.rejected
    return -F.logsigmoid(c) - (F.logsigmoid(-c) + F.logsigmoid(-r)) / 2


def robust(scores, beta, label_smoothing=0.0):
    """((1 - eps) l(x) - eps l(-x)) / (1 - 2 eps): rDPO, arXiv 2403.00409 section 3.1, unbiased
    where a share eps = label_smoothing < 1/2 of the pairs is swapped."""
    x, eps = beta * (scores.chosen - scores.rejected), label_smoothing
    return (-(1 - eps) * F.logsigmoid(x) + eps * F.logsigmoid(-x)) / (1 - 2 * eps)


def bco_pair(scores, beta):
    """l(c) + l(-r): BCO, arXiv 2404.04656 section 4, without its reward shift."""
    return -F.logsigmoid(beta * scores.chosen) - F.logsigmoid(-beta * scores.rejected)


def sppo_hard(scores, beta):
    """(chosen - 1 / (2 beta))^2 + (rejected + 1 / (2 beta))^2: SPPO, arXiv 2405.00675 eq. 4.7,
    whose eta is 1 / beta and whose P(chosen beats rejected) is 1."""
    return (scores.chosen - 0.5 / beta) ** 2 + (scores.rejected + 0.5 / beta) ** 2


def apo_zero(scores, beta):
    """1 - sigmoid(c) + sigmoid(r): APO-zero, arXiv 2408.06266 eq. 7, for pairs of which the chosen
    episode is better than the model's own."""
    return 1 - torch.sigmoid(beta * scores.chosen) + torch.sigmoid(beta * scores.rejected)


def apo_down(scores, beta):
    """sigmoid(c) + 1 - sigmoid(x): APO-down, arXiv 2408.06266 eq. 8, for pairs of which even the
    chosen episode is worse than the model's own."""
    x = beta * (scores.chosen - scores.rejected)
    return torch.sigmoid(beta * scores.chosen) + 1 - torch.sigmoid(x)


def discopop(scores, beta, tau=0.05):
    """l(x) (1 - m) + exp(-x) m, m = sigmoid(x / tau): DiscoPOP, arXiv 2406.08414 eq. 5."""
    x = beta * (scores.chosen - scores.rejected)
    m = torch.sigmoid(x / tau)
    return -F.logsigmoid(x) * (1 - m) + torch.exp(-x) * m


def sft_term(scores, beta):
    """-log pi(chosen), where every token of the step counts the same; in RPO's every pair does."""
    return scores.nll


def sigmoid_norm(scores, beta):
    """`sigmoid` of log-ratios that are means over tokens: Tulu 3, arXiv 2411.15124."""
    return -F.logsigmoid(beta * (scores.chosen_mean - scores.rejected_mean))


# To add a loss, write one and put it here: the choices of --loss. The names are TRL's.
LOSSES = {
    "sigmoid": sigmoid, "hinge": hinge, "ipo": ipo, "exo_pair": exo_pair, "nca_pair": nca_pair,
    "robust": robust, "bco_pair": bco_pair, "sppo_hard": sppo_hard, "apo_zero": apo_zero,
    "apo_down": apo_down, "discopop": discopop, "sft": sft_term, "sigmoid_norm": sigmoid_norm,
}


class Counts(NamedTuple):
    """Divisors of the whole step: the losses of its micro-batches add up to its loss."""

    pairs: int
    tokens: int  # sampled tokens of the chosen episodes


def pair_loss(logprobs, ref_sums, mask, counts, losses, *, beta, length_norm=False, sft_coef=0.0):
    """Compute the loss of a micro-batch of pairs.

    Args:
        logprobs: (2B, T) log-probabilities of the tokens under the policy.
        ref_sums: (2B,) log-probabilities of the episodes under the reference, summed over tokens.
        mask: (2B, T) 1 where the token was sampled.
        counts: pairs and tokens of the whole step.
        losses: {name: (weight, loss)}; their weighted sum is minimized.
        beta: how closely the policy is held to the reference.
        length_norm: give every loss means over tokens in place of sums.
        sft_coef: weight of RPO's -log pi(chosen) / its tokens, a mean over the pairs (arXiv
            2404.19733 eq. 1). The loss "sft" is another term: its mean is over tokens.

    Returns the loss and the metrics, which add up to those of the step. Log-probabilities are in
    nats, and "loss/NAME" are the weighted terms. Rewards are beta x log-ratio, a sum over tokens
    (a mean with length_norm), whatever the loss uses. In `accuracy` a tie counts as wrong: before
    the first update it says nothing.
    """
    tokens = mask.sum(1).clamp(min=1)  # (2B,)
    sums = torch.where(mask.bool(), logprobs, 0.0).sum(1)  # (2B,)
    ratios = sums - ref_sums
    scores = Scores(
        *(ratios / tokens if length_norm else ratios).chunk(2), *(ratios / tokens).chunk(2),
        *sums.chunk(2), *(sums / tokens).chunk(2),
        nll=-sums.chunk(2)[0] * counts.pairs / counts.tokens)  # (B,) each
    terms = {name: weight * loss(scores, beta) for name, (weight, loss) in losses.items()}
    if sft_coef:
        terms["rpo"] = -sft_coef * scores.chosen_logprob_mean
    per_pair = sum(terms.values())  # (B,)
    chosen_reward, rejected_reward = beta * scores.chosen, beta * scores.rejected
    metrics = {
        "loss": per_pair,
        **{f"loss/{name}": term for name, term in terms.items()},
        "accuracy": (chosen_reward > rejected_reward).float(),
        "margin": chosen_reward - rejected_reward,
        "reward/chosen": chosen_reward,
        "reward/rejected": rejected_reward,
        "logprobs/chosen": scores.chosen_logprob,
        "logprobs/rejected": scores.rejected_logprob,
    }
    metrics = {name: x.detach().sum() / counts.pairs for name, x in metrics.items()}
    return per_pair.sum() / counts.pairs, metrics


# ------------------------------------------------------------------------------------------ config
def preference_learning_rate(config):
    """2e-5 with LoRA, 1e-6 where all weights train"""
    return 2e-5 if config.lora_r else 1e-6


@dataclass(kw_only=True)
class Config(ModelFlags, LayerFlags, RolloutFlags, TrainingFlags, RunFlags):
    heading = "pairs and loss"
    env: str | None = flag(None, "environment or several (a,b), to play and to evaluate in; "
                                 "default: none for --dataset, else the recorded episodes', or "
                                 "equations")
    dataset: str | None = flag(None, "pairs: rows {prompt, chosen, rejected} (.jsonl, .json, "
                                     ".csv, .parquet, hub:owner/name); default: play", aliases=())
    tasks: str | None = flag(None, "tasks to play; beside --dataset or --trajectories: to evaluate "
                                   "on; default: the environment's own")
    eval_dataset: str | None = flag(None, "held-out tasks; default: a tenth of --tasks")
    max_samples: int | None = flag(None, "pairs, drawn at random; default: all", low=1)
    learning_rate: float | None = auto(preference_learning_rate)
    batch_size: int | None = auto(
        4, "pairs in one forward pass; an update has gradient_accumulation_steps of them")
    gradient_accumulation_steps: int | None = auto(2, "forward passes of an update", low=1)
    num_epochs: int = flag(5, "passes over the pairs")
    output_dir: str = "runs/dpo"

    trajectories: str | None = flag(None, "recorded episodes (trajectories.jsonl) to pair; several "
                                          "files: a,b; default: play")
    num_tasks: int = flag(200, "tasks to play where no episodes are given", low=1)
    pairs: str = flag("best_worst", "of a task's episodes the best and the worst, or all pairs",
                      choices=("best_worst", "all"))
    min_gap: float = flag(0.5, "chosen and rejected differ by at least this reward", above=0)
    eval_share: float = flag(0.1, "share of the prompts whose pairs are held out", low=0, high=0.9)
    loss: str = flag("sigmoid", f"one or several, separated by commas: {', '.join(LOSSES)}",
                     aliases=("loss_type",))
    loss_weights: str | None = flag(None, "a number for each loss, separated by commas; default: 1")
    beta: float = flag(0.1, "the higher, the closer to the reference; ipo: tau", above=0)
    label_smoothing: float | None = flag(None, "exo_pair: eps, default 0.001; robust: share of "
                                               "swapped pairs, default 0", above=0, high=0.49)
    length_norm: bool = flag(False, "log-ratios are means over tokens; beta is then per token")
    sft_coef: float = flag(1.0, "weight of -log pi(chosen) per token, as in RPO; 0: the loss alone",
                           low=0, aliases=("rpo_alpha",))


def weighted_losses(config: Config) -> dict:
    """Return {name: (weight, loss)} of --loss and --loss_weights. Raises UserError for clashes."""
    names = list(map(str.strip, config.loss.split(",")))
    for name in names:
        if name not in LOSSES:
            near = nearest(name, LOSSES, otherwise=", ".join(LOSSES))
            raise UserError(f"unknown loss {name!r}; {near}")
    if len(set(names)) < len(names):
        raise UserError(f"--loss {config.loss}: names a loss twice; give it a larger weight")
    numbers = config.loss_weights.split(",") if config.loss_weights else ["1"] * len(names)
    try:
        losses = {name: (float(n), LOSSES[name]) for name, n in zip(names, numbers, strict=True)}
    except ValueError:
        raise UserError(f"--loss_weights {config.loss_weights}: give a number for each of --loss "
                        f"{config.loss}, separated by commas") from None
    if eps := config.label_smoothing:
        smoothed = {"exo_pair", "robust"} & losses.keys()
        if not smoothed:
            raise UserError(f"--label_smoothing {eps}: only exo_pair and robust know it; "
                            "use --loss robust")
        for name in smoothed:
            weight, loss = losses[name]
            losses[name] = weight, partial(loss, label_smoothing=eps)
    return losses


def settle(config: Config) -> Config:
    """Return the config with the defaults that depend on the model or the data; check --loss."""
    weighted_losses(config)
    if config.eval_dataset and (config.dataset or config.trajectories):
        raise UserError(f"--eval_dataset {config.eval_dataset}: held-out pairs are --eval_share of "
                        "all; tasks to evaluate on are given with --tasks")
    config = with_env(config)
    return fill(config, TINY if is_tiny(config.model_path) else {}, envs.recommended(config.env))


# -------------------------------------------------------------------------------------------- data
def read_given(config: Config) -> list:
    """Return the pairs or the episodes of the given files, or []: they are then played."""
    if config.dataset:
        from extras.data.pairs import read_pairs
        return read_pairs(config)
    return read_files(config.trajectories) if config.trajectories else []


def pairs_of(given, config: Config, model, tokenizer) -> list[tuple[Trajectory, Trajectory]]:
    """Return the pairs of what `read_given` has read, as episodes of the model."""
    if config.dataset:
        from extras.data.pairs import encoded_pairs
        return encoded_pairs(given, config, tokenizer)
    files = [checked(episodes, model, tokenizer) for episodes in given]
    return make_pairs(files, config) if files else []


def collect(model, tokenizer, tasks, config: Config, run) -> list[Trajectory]:
    """Return group_size episodes of every task. A resumed run reads those that it has played."""
    if run.checkpoint:
        return read_trajectories(str(run.folder / "trajectories.jsonl"))
    played = without_faults(rollout(model, tokenizer, config.env, tasks, config.group_size,
                                    **rollout_options(config, run)))
    episodes = [t for t in played if math.isfinite(t.reward)]
    print_dropped(played, episodes, f"episodes left out; the first: {unusable(played)}")
    run.write_episodes(episodes)
    print(f"played: {len(tasks)} tasks, {config.group_size} episodes each, "
          f"{sum(t.info['success'] for t in episodes)} of {len(episodes)} solved")
    return episodes


# -------------------------------------------------------------------------------------------- loop
@torch.no_grad()
def reference_sums(model, pairs, config: Config, ranks) -> dict[Trajectory, float]:
    """Return {episode: log pi_ref, summed over its sampled tokens}. Call it before `run.load`."""
    # An episode may be in several pairs.
    episodes = sorted(dict.fromkeys(chain(*pairs)), key=lambda t: len(t.token_ids))
    sums = torch.zeros(len(episodes), device=model.device)
    batches = ranks.micro_batches(len(episodes), 2 * config.batch_size)
    model.eval()
    with merged_to_train(model):
        for rows in progress(batches, "reference"):
            token_ids, mask, _ = collate(episodes[rows], model.device)  # (b, T) each
            logprobs, _ = token_logprobs(model, token_ids, mask, config.temperature)  # (b, T)
            sums[rows] = logprobs.sum(1)
    return dict(zip(episodes, ranks.add(sums).tolist()))


def batch_loss(model, pairs, ref_sums, counts: Counts, config: Config):
    """Return `pair_loss` of B pairs, both sides in one forward pass, and logprobs (2B, T)."""
    episodes = [*chain(*zip(*pairs))]
    token_ids, mask, _ = collate(episodes, model.device)  # (2B, T) each
    logprobs, _ = token_logprobs(model, token_ids, mask, config.temperature)  # (2B, T)
    references = torch.tensor([ref_sums[t] for t in episodes], device=model.device)  # (2B,)
    return *pair_loss(
        logprobs, references, mask, counts, weighted_losses(config), beta=config.beta,
        length_norm=config.length_norm, sft_coef=config.sft_coef), logprobs


def counts_of(pairs) -> Counts:
    """Return the divisors of a step with these pairs."""
    return Counts(len(pairs), sum(sum(chosen.loss_mask) for chosen, _ in pairs))


@torch.no_grad()
def evaluate_held_out(model, tokenizer, tasks, pairs, ref_sums, config, run) -> dict:
    """Return `evaluate` of held-out tasks, and the metrics of held-out pairs as "pairs/NAME"."""
    counts = counts_of(pairs)
    metrics = []
    model.eval()
    with merged_to_train(model):
        for rows in run.micro_batches(len(pairs), "held out"):
            metrics.append(batch_loss(model, pairs[rows], ref_sums, counts, config)[1])
    totals = run.ranks.total(metrics)
    played = evaluate(model, tokenizer, config.env, tasks, **rollout_options(config, run))
    pairs_metrics = {f"pairs/{name}": value for name, value in totals.items()}
    return pairs_metrics | {"pairs/count": len(pairs)} | played


def train(config: Config) -> dict:
    """Pair episodes by their rewards, and raise each pair's margin over the reference policy."""
    config = settle(config)
    given = read_given(config)  # first, so that a bad row is refused at once
    tasks, test_tasks = train_and_held_out(config, 0 if given else config.num_tasks)
    run = Run(config, "dpo")  # the output folder: logs, checkpoints, result
    if run.finished:
        return run.finished
    model, tokenizer = load_model(config.model_path, **options_for(load_model, config))
    pairs = pairs_of(given, config, model, tokenizer)
    run.begin(["trajectories.jsonl"])  # model and data are loaded: now write
    if config.model_path == "tiny":
        base = teach_tiny(config, run, bool(tasks))
        model, tokenizer = load_model(base, **options_for(load_model, config))
    if tasks:  # no pairs were given: play them
        pairs = make_pairs([collect(model, tokenizer, tasks, config, run)], config)
    learned, held_out = split_pairs(pairs, config)
    write_pairs(run, learned, held_out)
    test_tasks = drop_seen(test_tasks, tasks_of(chain(*learned, *held_out)))
    ref_sums = reference_sums(model, learned + held_out, config, run.ranks)
    optimizer = adamw(model, lr=config.learning_rate, weight_decay=config.weight_decay, beta2=0.999)
    per_step = config.batch_size * config.gradient_accumulation_steps
    steps_per_epoch = math.ceil(len(learned) / per_step)
    batches = lru_cache(1)(partial(shuffled_batches, learned, per_step, config.seed))
    test = partial(evaluate_held_out, model, tokenizer, test_tasks, held_out, ref_sums, config, run)
    total = steps_of(config, steps_per_epoch)
    with run:
        for step in range(run.load(model, tokenizer, optimizer, total), total):
            if step % (config.eval_every or total) == 0:
                run.log_evaluation(step, test())
            for group in optimizer.param_groups:  # from the rate that it was made with
                group["lr"] = scheduled(group["initial_lr"], step, run.planned)
            run.log(learning_rate=optimizer.param_groups[0]["lr"])

            # 1. Episodes: the next pairs of the epoch; similar lengths share a forward pass.
            epoch, place = divmod(step, steps_per_epoch)
            batch = sorted(batches(epoch)[place], key=lambda pair: len(longer(pair).token_ids))

            # 2. Targets: the log-probs of the reference are in ref_sums already.
            counts = counts_of(batch)

            # 3. Update. The losses of the micro-batches add up to the loss of the step.
            metrics = []
            model.train()
            # The adapter is merged as in reference_sums, so that both round alike.
            with merged_to_train(model):
                for rows in run.micro_batches(len(batch), step):
                    loss, numbers, logprobs = batch_loss(
                        model, batch[rows], ref_sums, counts, config)
                    logprobs.retain_grad()  # what multiplies each token's grad log pi
                    loss.backward()
                    run.record([*chain(*zip(*batch[rows]))], new=logprobs, ref_sum=ref_sums)
                    metrics.append(numbers)
                    del loss, logprobs  # free the graph: the next one needs room
            totals = run.ranks.all_reduce(model, metrics)
            norm = clip_grad_norm_(model.parameters(), config.max_grad_norm).item()
            if math.isfinite(totals["loss"] + norm):
                optimizer.step()
            else:  # it would spoil the weights for good
                run.skip([*chain(*batch)], f"loss {totals['loss']}, gradient norm {norm}")
            optimizer.zero_grad()
            run.log(**totals, grad_norm=norm, tokens=sum(len(t.token_ids) for t in chain(*batch)))
            run.end_step(step)
        after = test()
        return run.finish(after, pairs=len(learned), held_out_loss=after.get("pairs/loss"),
                          held_out_accuracy=after.get("pairs/accuracy"),
                          held_out_margin=after.get("pairs/margin"))


if __name__ == "__main__":
    main(Config, train, __doc__)
