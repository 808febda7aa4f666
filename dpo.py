"""Direct preference optimisation: of two episodes of one task, make the better one more likely and the worse one less.

    pairs           -> episodes of one task whose rewards differ by `min_gap`: recorded (`read_episodes`), or played
                       here (`rollout`); or rows {"prompt", "chosen", "rejected"} of a file (`read_pairs`)
    reference_sums  -> log pi_ref of every episode, once, before the first update: the policy is the reference then
    LOSSES[name]    -> of the log-ratios policy / reference of a pair: DPO (arXiv 2305.18290 eq. 7) or a relative
    pair_loss       -> their weighted sum + `sft_coef` x -log pi(chosen) per token, a mean over the pairs of the step
    train           -> AdamW over shuffled epochs; before/after on held-out pairs and held-out tasks

Eq. 7 asks for a margin only, and has it cheapest by making both episodes unlikely: on the tiny model success can fall
to 0 while the pairs' accuracy rises. So `sft_coef` is 1, as in RPO; 0 is the plain loss. `logprobs/chosen` in the log
should not fall. Only sampled tokens count: tool results and templates are context. A pair with an episode over
`max_tokens` is dropped, not cut: half an episode earned no reward. Left out: the aot losses, which sort the
micro-batch; f-divergences, WPO's and LD-DPO's weights; a moving reference; rounds of fresh episodes (run it again).

    python dpo.py                       the tiny model, equations, from nothing: about 3 minutes on a CPU core
    python agent.py --model_path path/to/model --env gsm8k --num_tasks 64 --group_size 8 --output traces.jsonl
    python dpo.py --model_path path/to/model --trajectories traces.jsonl --min_gap 0.5
    python dpo.py --model_path path/to/model --dataset pairs.jsonl --loss sigmoid,sft --loss_weights 1.0,0.2

Legend: B pairs, T tokens. Of 2B rows the first B are the chosen episodes, the others the rejected ones, in one order.
"""
import json
import math
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import permutations
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

import envs
from agent import Limits, Trajectory, collate, evaluate, judged, rollout
from envs.demonstrations import read_trajectories
from experiment.checkpoint import optimizer_tensors
from experiment.config import flag, nearest
from experiment.errors import UserError
from experiment.files import replace_file, to_json
from experiment.process import peak_memory_mb
from experiment.program import main
from experiment.run import Run
from experiment.seeds import mix
from llm.chat import Chat
from llm.dry_run import dry_run
from llm.loading import DTYPES, fast_float32, load_model, load_weights, model_options, save_model
from llm.logprobs import token_logprobs
from llm.optimizer import adamw
from lora import merged
from sft import teach_tiny


# -------------------------------------------------------------------------------------------------------- losses
# Each: log-ratios log pi / pi_ref of the chosen and rejected episodes, (B,) each, sums over tokens -> losses (B,).
def sigmoid(chosen, rejected, *, beta, **_):
    """-log sigmoid(beta (chosen - rejected)): DPO, arXiv 2305.18290 eq. 7.

    Its gradient (section 4) is -beta sigmoid(beta (rejected - chosen)) (grad log pi(chosen) - grad log pi(rejected)):
    a pair counts by how wrongly the implicit reward, beta x log-ratio, still orders it.
    """
    return -F.logsigmoid(beta * (chosen - rejected))


def hinge(chosen, rejected, *, beta, **_):
    """max(0, 1 - beta (chosen - rejected)): SLiC, arXiv 2305.10425 section 2, on log-ratios: RSO, arXiv 2309.06657."""
    return (1 - beta * (chosen - rejected)).relu()


def ipo(chosen, rejected, *, beta, means, **_):
    """(chosen - rejected - 1 / (2 beta))^2: IPO, arXiv 2310.12036 eq. 17, beta its tau; log-ratios are means over
    tokens, as its authors do and the paper does not say."""
    return (means[0] - means[1] - 1 / (2 * beta)) ** 2


def exo_pair(chosen, rejected, *, beta, label_smoothing, **_):
    """KL(policy's choice || (1 - eps, eps)), eps = label_smoothing > 0: EXO, arXiv 2402.00856 eq. 16."""
    x = beta * (chosen - rejected)
    return (torch.sigmoid(x) * (F.logsigmoid(x) - math.log1p(-label_smoothing))
            + torch.sigmoid(-x) * (F.logsigmoid(-x) - math.log(label_smoothing)))


def nca_pair(chosen, rejected, *, beta, **_):
    """-log sigmoid(c) - (log sigmoid(-c) + log sigmoid(-r)) / 2, c and r beta x log-ratio: NCA, arXiv 2402.05369
    section 4.1; holds the chosen one's own likelihood up."""
    c, r = beta * chosen, beta * rejected
    return -F.logsigmoid(c) - (F.logsigmoid(-c) + F.logsigmoid(-r)) / 2


def robust(chosen, rejected, *, beta, label_smoothing, **_):
    """Unbiased where a share eps = label_smoothing < 1/2 of pairs is swapped: rDPO, arXiv 2403.00409 section 3.1."""
    x, eps = beta * (chosen - rejected), label_smoothing
    return (-(1 - eps) * F.logsigmoid(x) + eps * F.logsigmoid(-x)) / (1 - 2 * eps)


def bco_pair(chosen, rejected, *, beta, **_):
    """Chosen or not, two classes: BCO, arXiv 2404.04656 section 4, without its reward shift."""
    return -F.logsigmoid(beta * chosen) - F.logsigmoid(-beta * rejected)


def sppo_hard(chosen, rejected, *, beta, **_):
    """(chosen - 1 / (2 beta))^2 + (rejected + 1 / (2 beta))^2: SPPO, arXiv 2405.00675 eq. 4.7 with P = 1 and 0."""
    return (chosen - 0.5 / beta) ** 2 + (rejected + 0.5 / beta) ** 2


def apo_zero(chosen, rejected, *, beta, **_):
    """Chosen up, rejected down: APO, arXiv 2408.06266 eq. 7; where the chosen ones beat the model."""
    return 1 - torch.sigmoid(beta * chosen) + torch.sigmoid(beta * rejected)


def apo_down(chosen, rejected, *, beta, **_):
    """Both down, rejected more: APO, arXiv 2408.06266 eq. 8; where the model beats the chosen ones."""
    return torch.sigmoid(beta * chosen) + 1 - torch.sigmoid(beta * (chosen - rejected))


def discopop(chosen, rejected, *, beta, discopop_tau, **_):
    """-log sigmoid(x) (1 - m) + exp(-x) m, m = sigmoid(x / tau): arXiv 2406.08414 eq. 5."""
    x = beta * (chosen - rejected)
    m = torch.sigmoid(x / discopop_tau)
    return -F.logsigmoid(x) * (1 - m) + torch.exp(-x) * m


def sft_term(chosen, rejected, *, nll, **_):
    """-log pi(chosen), a mean over all chosen tokens of the step; to be added to another loss."""
    return nll


def sigmoid_norm(chosen, rejected, *, beta, means, **_):
    """`sigmoid` of log-ratios that are means over tokens: Tulu 3, arXiv 2411.15124."""
    return sigmoid(*means, beta=beta)


LOSSES = {"sigmoid": sigmoid, "hinge": hinge, "ipo": ipo, "exo_pair": exo_pair, "nca_pair": nca_pair, "robust": robust,
          "bco_pair": bco_pair, "sppo_hard": sppo_hard, "apo_zero": apo_zero, "apo_down": apo_down,
          "discopop": discopop, "sft": sft_term, "sigmoid_norm": sigmoid_norm}  # TRL's names and definitions


class Counts(NamedTuple):
    """Divisors, of the WHOLE step (all micro-batches): the losses of its parts then sum to its loss."""

    pairs: int
    tokens: int  # that the policy sampled in the chosen episodes


def pair_loss(logprobs, ref_sums, mask, counts, losses, *, beta, length_norm=False, sft_coef=0.0, **hyper):
    """(loss, metrics) of one micro-batch of pairs; both sum to the step's mean over micro-batches.

    logprobs, mask (2B, T); ref_sums (2B,): the reference's log-probs, summed over sampled tokens; losses:
    [(name, weight)]. length_norm: every loss sees means over tokens in place of sums. sft_coef adds RPO's term, -log pi
    of the chosen episode per token of its own, arXiv 2404.19733 eq. 1. Metrics in nats; rewards are beta x log-ratio.
    """
    tokens = mask.sum(1).clamp(min=1)  # (2B,)
    sums = torch.where(mask.bool(), logprobs, 0.0).sum(1)  # (2B,)
    chosen, rejected = (sums - ref_sums).chunk(2)  # (B,) each
    means = ((sums - ref_sums) / tokens).chunk(2)
    if length_norm:
        chosen, rejected = means
    nll, chosen_tokens = -sums.chunk(2)[0], tokens.chunk(2)[0]  # (B,)
    hyper |= {"beta": beta, "means": means, "nll": nll * counts.pairs / counts.tokens}  # summed / pairs: token mean
    terms = {name: weight * LOSSES[name](chosen, rejected, **hyper) for name, weight in losses}  # (B,) each
    if sft_coef:
        terms["sft_coef"] = sft_coef * nll / chosen_tokens
    per_pair = sum(terms.values())
    c, r = beta * chosen.detach(), beta * rejected.detach()
    shown = {"loss": per_pair.detach(), **{f"loss/{name}": term.detach() for name, term in terms.items()},
             "accuracy": (c > r).float(), "margin": c - r, "reward/chosen": c,
             "reward/rejected": r, "logprobs/chosen": -nll.detach(), "logprobs/rejected": sums.chunk(2)[1].detach()}
    return per_pair.sum() / counts.pairs, {name: x.sum() / counts.pairs for name, x in shown.items()}


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

    trajectories: str | None = flag(
        None, "recorded episodes (trajectories.jsonl) to pair; several files: a,b; default: play", group="pairs")
    dataset: str | None = flag(
        None, "pairs (.jsonl of prompt, chosen, rejected), or tasks for the world (.jsonl); default: its own",
        group="pairs")
    eval_dataset: str | None = flag(None, "held-out tasks (.jsonl); default: a tenth of --dataset", group="pairs")
    env: str | None = flag(None, "world or worlds (a,b), to play and to evaluate in; default: that of the episodes, "
                           "none for pairs of a file, else equations", group="pairs")
    pairs: str = flag("best_worst", "of a task's episodes: the best against the worst, or all pairs", group="pairs",
                      choices=("best_worst", "all"))
    min_gap: float = flag(0.5, "chosen and rejected differ by this reward at least", group="pairs", above=0)
    max_samples: int | None = flag(None, "pairs, drawn at random; default: all", group="pairs", low=1)
    eval_share: float = flag(0.1, "of tasks: their pairs are held out", group="pairs", low=0, high=0.9)
    max_tokens: int = flag(1024, "longest episode, tokens; pairs with a longer one are dropped and counted",
                           group="pairs", low=8, aliases=("max_length",))

    num_tasks: int = flag(200, "tasks to play where no episodes are given", group="episodes", low=1)
    group_size: int = flag(8, "episodes of each task", group="episodes", low=2,
                           aliases=("samples_per_prompt", "num_samples"))
    temperature: float = flag(1.0, "of the softmax, in episodes and updates", group="episodes", above=0)
    max_new_tokens: int = flag(64, "tokens per turn", group="episodes", low=1)
    max_turns: int | None = flag(None, "assistant turns per episode; default: the world's", group="episodes", low=1)
    max_tool_calls: int = flag(32, "tool calls per episode", group="episodes", low=1)
    max_tool_tokens: int = flag(512, "tokens of tool results per episode", group="episodes", low=1)
    tool_timeout: float = flag(10.0, "seconds before a tool call is abandoned", group="episodes", above=0)

    loss: str = flag("sigmoid", f"one or several, separated by commas: {', '.join(LOSSES)}", group="loss",
                     aliases=("loss_type",))
    loss_weights: str | None = flag(None, "one number for each loss, separated by commas; default: 1", group="loss")
    beta: float = flag(0.1, "the higher, the closer to the reference; ipo: tau", group="loss", above=0)
    label_smoothing: float = flag(0.0, "exo_pair: eps (paper: 0.001); robust: share of swapped pairs", group="loss",
                                  low=0, high=0.99)
    discopop_tau: float = flag(0.05, "discopop: tau", group="loss", above=0)
    length_norm: bool = flag(False, "log-ratios are means over tokens, not sums; beta is then per token", group="loss")
    sft_coef: float = flag(1.0, "weight of -log pi(chosen) per token, as in RPO; 0: the loss alone", group="loss",
                           low=0, aliases=("rpo_alpha",))

    num_epochs: int = flag(5, "passes over the pairs", group="training", low=1, aliases=("total_epochs",))
    max_steps: int | None = flag(None, "optimiser steps; beats num_epochs", group="training", low=0)
    batch_size: int = flag(8, "pairs in one forward pass", group="training", low=1)
    gradient_accumulation_steps: int = flag(1, "forward passes of one step", group="training", low=1)
    learning_rate: float | None = flag(
        None, "AdamW step size at its peak; default: 2e-5 with LoRA, 1e-6 without, 2e-3 for tiny", group="training",
        low=0)
    warmup_steps: int = flag(10, "steps of linear warm-up; after them a cosine down to 10 %", group="training", low=0)
    weight_decay: float = flag(0.0, "AdamW weight decay", group="training", low=0)
    max_grad_norm: float = flag(1.0, "gradient norm is clipped to this", group="training", above=0)

    output_dir: str = flag("runs/dpo", "folder of this run", group="run")
    overwrite: bool = flag(False, "replace the run that is in output_dir", group="run")
    resume: str | None = flag(None, "go on with the run in output_dir, from its newest checkpoint or the one before",
                              group="run", choices=("newest", "previous"), const="newest")
    resume_anyway: bool = flag(False, "resume with other --batch_size, --slots or ways to recompute", group="run")
    seed: int = flag(0, "of everything random", group="run", low=0)
    save_every: int = flag(0, "steps between checkpoints; 0: at the end", group="run", low=0)
    eval_tasks: int = flag(200, "held-out tasks played before, after and every eval_every steps", group="run", low=0)
    eval_every: int = flag(0, "steps between evaluations; 0: before and after only", group="run", low=0)


def check(config: Config) -> list[tuple[str, float]]:
    """The losses [(name, weight)]; UserError for options that clash, before anything is loaded."""
    names = [name.strip() for name in config.loss.split(",")]
    if unknown := [name for name in names if name not in LOSSES]:
        raise UserError(f"unknown loss {unknown[0]!r}; {nearest(unknown[0], LOSSES, otherwise=', '.join(LOSSES))}")
    try:
        weights = [float(w) for w in config.loss_weights.split(",")] if config.loss_weights else [1.0] * len(names)
    except ValueError:
        raise UserError(f"--loss_weights {config.loss_weights}: give numbers separated by commas") from None
    if len(weights) != len(names) or not all(map(math.isfinite, weights)):
        raise UserError(f"--loss_weights {config.loss_weights}: {len(weights)} weights, but --loss {config.loss} "
                        f"names {len(names)}; give one finite number for each")
    if len({*names}) < len(names):
        raise UserError(f"--loss {config.loss}: names a loss twice; give it once, with a larger weight")
    eps = config.label_smoothing
    if "exo_pair" in names and not eps or "robust" in names and eps >= 0.5:
        raise UserError(f"--label_smoothing {eps}: exo_pair needs it above 0 (paper: 0.001), robust below 0.5")
    if eps and not {"exo_pair", "robust"} & {*names}:
        raise UserError(f"--label_smoothing {eps}: only exo_pair and robust know it; use --loss robust")
    return list(zip(names, weights))


def learning_rate(step: int, config, total: int) -> float:
    """Linear warm-up, then a cosine to a tenth. A function of the step alone: nothing to save."""
    warm = min(1.0, (step + 1) / max(config.warmup_steps, 1))
    return config.learning_rate * warm * (0.55 + 0.45 * math.cos(math.pi * step / total))


# --------------------------------------------------------------------------------------------------------- pairs
def prompt_of(t: Trajectory) -> tuple:
    """The ids before the first sampled token: what the two episodes of a pair must share."""
    return tuple(t.token_ids[:t.loss_mask.index(1)])


def read_episodes(paths: str) -> list[tuple[tuple, Trajectory]]:
    """trajectories.jsonl files -> [((file, step, line), episode)]. UserError: `FILE:LINE: what is wrong`."""
    out = []
    for path in (path.strip() for path in paths.split(",")):
        for row in envs.read_rows(path):
            line, step = row.pop("_line"), row.pop("step", None)
            try:
                out.append(((path, step, line), Trajectory.from_json(row)))
            except ValueError as error:
                raise UserError(f"{path}:{line}: {error}") from None
    return out


def make_pairs(episodes, how: str, min_gap: float) -> list[tuple[Trajectory, Trajectory]]:
    """[(chosen, rejected)] of every task's episodes: the best and the worst, or all whose rewards differ by min_gap.

    A task is (file, step, group_id) and its prompt's ids: a group_id names a task within one step of one file only, and
    eq. 7 compares episodes of one prompt. UserError, with the largest gap there is, if no two episodes differ enough.
    """
    groups = {}
    for (path, step, _), t in episodes:
        if 1 in t.loss_mask:
            groups.setdefault((path, step, t.group_id, prompt_of(t)), []).append(t)
    if all(len(group) < 2 for group in groups.values()):
        raise UserError(f"{len(groups)} tasks, but no two episodes of one task: nothing to compare; "
                        "record some with agent.py --group_size 8")
    found, gaps = [], []
    for group in groups.values():
        group.sort(key=lambda t: -t.reward)
        for chosen, rejected in permutations(group, 2) if how == "all" else [(group[0], group[-1])]:
            gaps.append(chosen.reward - rejected.reward)
            if gaps[-1] >= min_gap - 1e-9 and chosen.token_ids != rejected.token_ids:
                found.append((chosen, rejected))
    if not found:
        raise UserError(f"no pair: of {len(groups)} tasks' episodes no two differ by --min_gap {min_gap:g} in reward; "
                        f"the largest gap is {max(gaps):g}")
    return found


def read_pairs(path: str, rows: list[dict], chat_of) -> list[tuple[Trajectory, Trajectory]]:
    """Rows {"prompt", "chosen", "rejected"} -> [(chosen, rejected)] with loss on what follows the prompt.

    Each is a text (the prompt a user message, the others an assistant turn) or a list of messages; without a prompt the
    messages that chosen and rejected share are it. "system": text before it. "tools": a list of schemas, or JSON text.
    chat_of(tools) -> Chat. UserError: `FILE:LINE: what is wrong`.
    """
    def messages(value, role, name):
        value = [{"role": role, "content": value}] if isinstance(value, str) else value
        if not isinstance(value, list) or not value or not all(isinstance(m, dict) for m in value):
            raise ValueError(f'"{name}" must be text or a list of messages')
        return value

    out = []
    for row in tqdm(rows, "pairs", leave=False, delay=2):
        try:
            if missing := [name for name in ("chosen", "rejected") if name not in row]:
                raise ValueError(f'no "{missing[0]}" field; has: {", ".join(k for k in row if k != "_line")}')
            chosen, rejected = row["chosen"], row["rejected"]
            if chosen == rejected:
                raise ValueError("chosen and rejected are the same: nothing to prefer")
            if (prompt := row.get("prompt")) is None:
                if not isinstance(chosen, list) or not isinstance(rejected, list):
                    raise ValueError('no "prompt" field; only lists of messages can do without')
                shared = next((i for i, (a, b) in enumerate(zip(chosen, rejected)) if a != b),
                              min(len(chosen), len(rejected)))
                if not shared:
                    raise ValueError('no "prompt" field, and chosen and rejected do not begin with the same message')
                prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
            prompt = messages(prompt, "user", "prompt")
            if all(isinstance(side, list) and side[:len(prompt)] == prompt for side in (chosen, rejected)):
                chosen, rejected = chosen[len(prompt):], rejected[len(prompt):]  # whole conversations
            if row.get("system") and prompt[0].get("role") != "system":
                prompt = messages(row["system"], "system", "system") + prompt
            prompt = [{**m, "loss": 0} for m in prompt]
            pair = []
            for name, side in (("chosen", chosen), ("rejected", rejected)):
                told = prompt + messages(side, "assistant", name)
                token_ids, loss_mask = chat_of(row.get("tools")).conversation(told)
                pair.append(Trajectory(token_ids, loss_mask, [0.0] * len(token_ids), messages=told))
            out.append(tuple(pair))
        except ValueError as error:
            raise UserError(f"{path}:{row['_line']}: {error}") from None
    return out


def chats(tokenizer, env: str | None, generation_config):
    """tools (schemas, JSON text of them, or None: the world's) -> Chat; each list of tools makes one."""
    made, own = {}, envs.schemas(envs.load(env)) if env and "," not in env else []

    def chat_of(tools):
        try:
            tools = json.loads(tools) if isinstance(tools, str) else own if tools is None else tools
        except ValueError:
            raise ValueError('"tools" is text, but not JSON') from None
        try:
            key = json.dumps(tools)
            return made.get(key) or made.setdefault(key, Chat(tokenizer, tools, generation_config))
        except (KeyError, TypeError, AttributeError):
            raise ValueError("tools must be a list of function schemas") from None
    return chat_of


@torch.no_grad()
def reference_sums(model, pairs, config: Config, ranks):
    """log pi_ref of the chosen and the rejected episode of every pair, summed over sampled tokens: (N, 2).

    Before the first update the policy is the policy this run started from: fresh adapter, old adapter, or all weights.
    """
    episodes = sorted({id(t): t for pair in pairs for t in pair}.values(), key=lambda t: len(t.token_ids))
    found = {}
    for part in tqdm(ranks.micro_batches(len(episodes), 2 * config.batch_size), "reference", leave=False, delay=2):
        token_ids, mask, _ = collate(episodes[part], model.device)  # (b, T) each
        sums = token_logprobs(model, token_ids, mask, config.temperature)[0].sum(1)  # (b,)
        found.update(zip(range(part.start, part.stop), sums.tolist()))
    found = {id(episodes[i]): value for own in ranks.gather(found) for i, value in own.items()}
    return torch.tensor([[found[id(t)] for t in pair] for pair in pairs], device=model.device)


# ---------------------------------------------------------------------------------------------------------- loop
def forward(model, pairs, ref_sums, counts: Counts, losses, config: Config):
    """`pair_loss` of some pairs in one forward pass; ref_sums (B, 2)."""
    token_ids, mask, _ = collate([c for c, _ in pairs] + [r for _, r in pairs], model.device)  # (2B, T) each
    logprobs, _ = token_logprobs(model, token_ids, mask, config.temperature)  # (2B, T)
    return pair_loss(logprobs, ref_sums.T.flatten(), mask, counts, losses, **vars(config))


def count(pairs) -> Counts:
    return Counts(len(pairs), sum(sum(chosen.loss_mask) for chosen, _ in pairs))


@torch.no_grad()
def held_out_pairs(model, pairs, ref_sums, losses, config: Config) -> dict:
    """`pair_loss`'s metrics of pairs that were not trained on; {} if there are none."""
    sums, size = Counter(), config.batch_size
    for i in range(0, len(pairs), size):
        _, parts = forward(model, pairs[i:i + size], ref_sums[i:i + size], count(pairs), losses, config)
        sums.update({name: x.item() for name, x in parts.items()})
    return dict(sums)


def train(config: Config) -> dict:
    started = time.time()
    losses = check(config)
    if config.learning_rate is None:
        config = replace(config, learning_rate=2e-3 if config.model_path == "tiny" else 2e-5 if config.lora_r else 1e-6)
    episodes = read_episodes(config.trajectories) if config.trajectories else []
    rows = envs.read_rows(config.dataset) if (config.dataset or "").endswith((".jsonl", ".csv", ".parquet")) else []
    if rows and not any(row.keys() & {"chosen", "rejected"} for row in rows):
        if not (config.env or episodes):
            raise UserError(f'{config.dataset}:{rows[0].pop("_line")}: no "chosen" field; has: {", ".join(rows[0])} '
                            "(tasks to play are given with --env)")
        rows = []
    if rows and episodes:
        raise UserError(f"--trajectories {config.trajectories} and pairs in --dataset {config.dataset}: give one")
    if config.env is None:
        played = sorted(envs.ENVS.keys() & {str(t.info.get("env")) for _, t in episodes})  # never code that data names
        config = replace(config, env=",".join(played) or (None if rows or episodes else "equations"))
    files, held_out = (None if rows else config.dataset, config.eval_dataset), []
    tasks = [] if rows or episodes else envs.tasks(config.env, "train", config.num_tasks, config.seed, *files)
    if config.env and config.eval_tasks:
        held_out = envs.tasks(config.env, "test", config.eval_tasks, config.seed, files[0] or files[1], files[1])
    if config.dry_run:
        return dry_run(config, config.num_tasks * config.group_size if tasks else 0, len(held_out),
                       rows=2 * config.batch_size)
    run = Run(config, "dpo")
    if run.finished:
        return run.finished
    fast_float32()
    source = teach_tiny(config, run) if config.model_path == "tiny" else config.model_path
    model, tokenizer = load_model(source, **model_options(config))
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = adamw(
        model, lr=config.learning_rate, betas=(0.9, 0.999), weight_decay=config.weight_decay)
    playing = {"limits": Limits(config.max_turns, config.max_new_tokens, config.max_tokens, config.max_tool_calls,
                                config.max_tool_tokens, config.tool_timeout),
               "temperature": config.temperature, "seed": config.seed, "run": run}

    # Pairs
    vocabulary = model.get_input_embeddings().weight.shape[0]
    for (path, _, line), t in episodes:
        if max(t.token_ids) >= vocabulary:
            raise UserError(f"{path}:{line}: token id {max(t.token_ids)}, but the model knows {vocabulary} tokens: "
                            "recorded with another model's tokenizer")
    if tasks:
        if run.checkpoint:
            fresh = read_trajectories(str(run.folder / "trajectories.jsonl"))
        else:
            fresh = judged(rollout(model, tokenizer, config.env, tasks, config.group_size, **playing))
            if not run.accept_rewards(fresh):
                fresh = [t for t in fresh if math.isfinite(t.reward)]
                if not fresh:
                    raise UserError("no episode has a finite reward; look at bad_step_0.json in the run's folder")
            run.trajectories(0, fresh)
        episodes = [(("", 0, i), t) for i, t in enumerate(fresh)]
        print(f"played: {len(tasks)} tasks, {config.group_size} episodes each, "
              f"{sum(t.info['success'] for t in fresh) / len(fresh):.3f} solved")
    if rows:
        pairs = read_pairs(config.dataset, rows, chats(tokenizer, config.env, model.generation_config))
    else:
        pairs = make_pairs(episodes, config.pairs, config.min_gap)
    lengths = [max(len(t.token_ids) for t in pair) for pair in pairs]
    if min(lengths) > config.max_tokens:
        raise UserError(f"no pair within --max_tokens {config.max_tokens}: the shortest has {min(lengths)} tokens")
    if max(lengths) > config.max_tokens:
        print(f"{sum(n > config.max_tokens for n in lengths)} of {len(pairs)} pairs exceed {config.max_tokens} tokens: "
              "dropped")
    rng = np.random.default_rng([config.seed])
    pairs = [pairs[i] for i in rng.permutation(len(pairs)) if lengths[i] <= config.max_tokens][:config.max_samples]
    prompts = list(dict.fromkeys(prompt_of(chosen) for chosen, _ in pairs))
    kept_out = {prompts[i] for i in rng.permutation(len(prompts))[:round(config.eval_share * (len(prompts) - 1))]}
    if episodes:
        run.ranks.first(lambda: replace_file(run.folder / "preference_pairs.json", to_json(
            [readable(*pair, held_out=prompt_of(pair[0]) in kept_out) for pair in pairs], indent=1)))
    with merged(model):
        ref_sums = reference_sums(model, pairs, config, run.ranks)  # (N, 2)
    test = [i for i, (chosen, _) in enumerate(pairs) if prompt_of(chosen) in kept_out]
    test, test_sums = [pairs[i] for i in test], ref_sums[test]
    learn = [i for i, (chosen, _) in enumerate(pairs) if prompt_of(chosen) not in kept_out]
    per_step = config.batch_size * config.gradient_accumulation_steps
    steps_per_epoch = math.ceil(len(learn) / per_step)
    total = config.num_epochs * steps_per_epoch if config.max_steps is None else config.max_steps
    print(f"pairs: {len(learn)} to train on, {len(test)} held out, of {len(prompts)} prompts; {total} steps")

    def held_out_eval():
        with merged(model):
            found = evaluate(model, tokenizer, config.env, held_out, step=-1, **playing) if held_out else {}
            pairs_found = held_out_pairs(model, test, test_sums, losses, config)
        return found | {f"pairs/{k}": v for k, v in pairs_found.items()}

    def save(step):
        return run.save(step, lambda folder: save_model(model, folder), tokenizer,
                        optimizer_tensors(optimizer, model.named_parameters()),
                        {"before": before, "seconds": time.time() - training_began})

    start, saved = run.restore(lambda folder: load_weights(model, folder), optimizer, model.named_parameters())
    before = saved["before"] if saved else held_out_eval()
    started, training_began = (t - saved.get("seconds", 0.0) for t in (started, time.time()))
    run.begin(save)
    bar = tqdm(range(start, total), "dpo", initial=start, total=total, disable=not total)
    for step in bar:
        began = time.time()
        epoch, place = divmod(step, steps_per_epoch)
        order = np.random.default_rng([config.seed, epoch]).permutation(learn)
        order = np.array_split(order, steps_per_epoch)[place]  # every pair is trained in every epoch
        order = sorted(order, key=lambda i: max(len(t.token_ids) for t in pairs[i]))  # like lengths share a forward
        counts, metrics = count([pairs[i] for i in order]), Counter()
        model.train()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config, total)
        with nullcontext() if config.lora_dropout else merged(model):  # dropout of the adapter's input needs it apart
            for part in run.ranks.micro_batches(len(order), config.batch_size):
                run.check()
                torch.manual_seed(mix(config.seed, "dropout", step, part.start))
                part = order[part]
                loss, parts = forward(model, [pairs[i] for i in part], ref_sums[part], counts, losses, config)
                loss.backward()
                metrics.update({name: x.item() for name, x in parts.items()})
                del loss, parts  # or the graph lies in the way of the next
        run.ranks.add_gradients(weights)
        metrics = run.ranks.total(metrics)
        grad_norm = torch.nn.utils.clip_grad_norm_(weights, config.max_grad_norm).item()
        if run.accept_update([t for i in order for t in pairs[i]], metrics["loss"], grad_norm):
            optimizer.step()
        optimizer.zero_grad()
        model.eval()
        metrics.update(grad_norm=grad_norm, learning_rate=learning_rate(step, config, total),
                       tokens=sum(len(t.token_ids) for i in order for t in pairs[i]))
        seconds = time.time() - began
        if config.eval_every and (step + 1) % config.eval_every == 0:
            metrics.update({f"eval/{k}": v for k, v in held_out_eval().items()})
        run.write_line(step, metrics, {"seconds": seconds, "peak_memory_mb": peak_memory_mb()})
        bar.set_postfix(loss=loss_in_words(metrics), accuracy=f"{metrics['accuracy']:.2f}")
        run.end(step + 1, metrics.get("eval/success"))

    training_seconds = time.time() - training_began
    folder, after = run.last(total), held_out_eval()
    result = {"success_before": before.get("success"), "success_after": after.get("success"), "steps": total,
              "seed": config.seed, "pairs": len(learn)}
    if test:
        result |= {f"held_out_{name}": after[f"pairs/{name}"] for name in ("loss", "accuracy", "margin")}
        print(f"held-out pairs ({len(test)}): loss {loss_in_words(before, 'pairs/')} -> "
              f"{loss_in_words(after, 'pairs/')}, log pi of chosen "
              f"{before['pairs/logprobs/chosen']:.1f} -> {after['pairs/logprobs/chosen']:.1f}, of rejected "
              f"{before['pairs/logprobs/rejected']:.1f} -> {after['pairs/logprobs/rejected']:.1f}")
    if held_out:
        print_table([("before", before),
                     (f"after DPO ({total} steps, {training_seconds:.0f} s)", after)], len(held_out), 1)
    print(f"written: {config.output_dir} (adapter: {folder})\n"
          f"next:    python agent.py --model_path {config.output_dir}"
          + (f" --env {config.env} --num_tasks 3" if config.env else ""))
    return run.write_result({**result, "seconds": time.time() - started, "peak_memory_mb": peak_memory_mb()})


def loss_in_words(metrics: dict, prefix: str = "") -> str:
    """Return "0.793 = sigmoid 0.693 + sft_coef 0.100": the loss and the terms of which it is the sum."""
    start = f"{prefix}loss/"
    terms = [f"{name.removeprefix(start)} {value:.3f}" for name, value in metrics.items() if name.startswith(start)]
    return f"{metrics[f'{prefix}loss']:.3f} = {' + '.join(terms)}"


def readable(chosen: Trajectory, rejected: Trajectory, held_out: bool) -> dict:
    """A pair for preference_pairs.json, in TRL's form, with what it was made by."""
    first = next((i for i, m in enumerate(chosen.messages) if m["role"] == "assistant"), 0)
    return {"prompt": chosen.messages[:first], "chosen": chosen.messages[first:], "rejected": rejected.messages[first:],
            "chosen_reward": chosen.reward, "rejected_reward": rejected.reward, "gap": chosen.reward - rejected.reward,
            "group_id": chosen.group_id, "held_out": held_out}


def print_table(rows, num_tasks, group_size):
    if not any(values for _, values in rows):
        return
    names = [f"pass@{group_size}"] * (group_size > 1) + ["reward", "actions", "structure", "completion", "tool_errors"]
    print(f"\nheld-out ({num_tasks} tasks){'':16}success" + "".join(f"{name:>13}" for name in names))
    for label, values in rows:
        print(f"{label:34} {values['success']:6.3f}" + "".join(f"{values[name]:13.3f}" for name in names))


if __name__ == "__main__":
    main(Config, train, __doc__)
