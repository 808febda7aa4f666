"""Policies of a few numbers, on which an effect can be seen alone and in seconds.

A function here trains such a policy with the advantages, surrogates and normalizers of grpo.py, and
returns a row of numbers for each arm of its experiment. bench/phenomena.py runs, keeps and draws
them. Every draw is a function of the seed, and all arms of a seed draw from the same stream.
"""
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import grpo  # noqa: E402
from core.logprobs import dithered  # noqa: E402

import torch  # noqa: E402
from torch.nn.functional import logsigmoid  # noqa: E402

GROUP = 8  # episodes of a task


def logit(chance) -> torch.Tensor:
    return torch.logit(torch.as_tensor(chance))


def loss_of(name, logprobs, advantages, mask, old_logprobs=None, max_tokens=0, clip=(0.2, 0.2)):
    """Return the loss `name` of grpo.py on (B, T) tensors. The sum over its micro-batches is 1."""
    surrogate, normalizer = grpo.LOSSES[name]
    counts = grpo.Counts(len(mask), int(mask.sum()), max_tokens or mask.shape[1])
    old_logprobs = logprobs.detach() if old_logprobs is None else old_logprobs
    token_loss, _ = surrogate(
        grpo.masked(logprobs - old_logprobs, mask), grpo.masked(logprobs, mask), advantages, mask,
        clip_eps_low=clip[0], clip_eps_high=clip[1])
    return normalizer(token_loss, mask, counts)


def step(optimizer, loss):
    """Take one step down the loss."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


# --------------------------------------------------------------------------------- answers of words
LONGEST = 64  # tokens of an answer
ANSWERS = 512  # of a step
LENGTH_STEPS = 150
LENGTH_RATE = 0.02


def draw_lengths(stop):
    """Return mask and ends (B, T) of answers that stop after each token with the chances (B,)."""
    uniform = torch.rand(len(stop), LONGEST)
    stops = uniform < stop[:, None]  # (B, T)
    before = stops.long().cumsum(1) - stops.long()  # stops before this token
    return (before == 0).long(), stops & (before == 0)


def length(seed) -> dict:
    """Train two chances to stop, of right and of wrong answers. Length has no part in the reward.

    An answer is right with chance 1/2, whatever the policy does, and stops after each token with a
    chance that trains. No reward depends on the length, so that the right lengths are those of the
    start.
    """
    rows = {}
    for name in ("grpo", "dapo", "dr_grpo"):
        torch.manual_seed(seed)
        stop = logit([1 / 8, 1 / 8]).requires_grad_()  # of wrong and of right answers
        optimizer = torch.optim.Adam([stop], lr=LENGTH_RATE)
        curves = {"wrong": [], "right": []}
        for _ in range(LENGTH_STEPS):
            right = (torch.rand(ANSWERS) < 0.5).long()
            mask, ends = draw_lengths(torch.sigmoid(stop[right]).detach())
            lengths = mask.sum(1).float()
            curves["wrong"].append(lengths[right == 0].mean().item())
            curves["right"].append(lengths[right == 1].mean().item())
            group_ids = torch.arange(ANSWERS) // GROUP
            advantages = grpo.group_advantages(right.float(), group_ids)
            logits = stop[right][:, None]  # (B, 1)
            logprobs = torch.where(ends, logsigmoid(logits), logsigmoid(-logits)) * mask
            step(optimizer, loss_of(name, logprobs, advantages[:, None] * mask, mask))
        rows[name] = {f"{kind} answers": mean_of_last(curve) for kind, curve in curves.items()}
        rows[name]["curve"] = thin(curves["wrong"])
    return rows


def mean_of_last(curve, n=10) -> float:
    return sum(curve[-n:]) / n


def thin(curve, points=30) -> list:
    """Return about so many points of a curve, rounded: enough for a picture."""
    every = max(1, len(curve) // points)
    return [round(value, 4) for value in curve[::every]]


# ----------------------------------------------------------------- answers that a limit may cut
LIMIT = 16  # tokens
PATIENCE = 8  # an answer of n tokens is right with chance 1 - exp(-n / PATIENCE)


def truncation(seed) -> dict:
    """Train one chance to stop, where longer answers are better and a limit cuts the longest.

    An answer that is cut is wrong. "counted" trains on it as on any wrong answer, and "left out"
    gives it no gradient. The best fixed chance to stop is found by trying 200 of them. "success
    without the limit" is exact, too: it says what the same policy would be worth if nothing were
    cut.
    """
    chances = torch.linspace(0.005, 0.4, 200)
    best = max(success_at(chance).item() for chance in chances)
    rows = {}
    for name in ("counted", "left out"):
        torch.manual_seed(seed)
        stop = logit([1 / 6]).requires_grad_()
        optimizer = torch.optim.Adam([stop], lr=LENGTH_RATE)
        success, cut_shares = [], []
        for _ in range(2 * LENGTH_STEPS):
            mask, ends = draw_lengths(torch.sigmoid(stop).detach().expand(ANSWERS))
            mask, ends = mask[:, :LIMIT], ends[:, :LIMIT]
            cut = ~ends.any(1)
            right = torch.rand(ANSWERS) < 1 - torch.exp(-mask.sum(1) / PATIENCE)
            reward = (right & ~cut).float()
            success.append(success_at(torch.sigmoid(stop).detach()).item())
            cut_shares.append(cut.float().mean().item())
            advantages = grpo.group_advantages(reward, torch.arange(ANSWERS) // GROUP)
            if name == "left out":
                advantages = advantages * ~cut
            logprobs = torch.where(ends, logsigmoid(stop), logsigmoid(-stop)) * mask
            step(optimizer, loss_of("dapo", logprobs, advantages[:, None] * mask, mask))
        rows[name] = {"success": mean_of_last(success), "cut": mean_of_last(cut_shares),
                      "success without the limit": success_at(torch.sigmoid(stop), 1000).item(),
                      "best success": best, "curve": thin(cut_shares)}
    return rows


def success_at(stop, limit=LIMIT) -> torch.Tensor:
    """Return the exact success of a chance to stop: the sum over the lengths that are not cut."""
    n = torch.arange(1, limit + 1)
    return ((1 - stop)**(n - 1) * stop * (1 - torch.exp(-n / PATIENCE))).sum()


# ------------------------------------------------------------------------- tasks of all difficulty
STARTS = {"hard": 0.05, "middle": 0.5, "easy": 0.95}  # chance to be right at the start
EACH = 20  # tasks of each kind
STYLE_PAY = 0.01
STD_STEPS = 100
STD_RATE = 16.0  # of the arm that divides: at chance 1/2 both move a task equally fast


def std(seed) -> dict:
    """Train the chance to be right of each task, and one of a style that is paid 0.01.

    Two tokens of an episode: its answer, and its style. Without the division by the std the rate is
    twice as large, since the std of a reward that is 1 half of the time is 1/2.
    """
    rows = {}
    for scale in ("group", "none"):
        torch.manual_seed(seed)
        tasks = torch.cat([logit([start] * EACH) for start in STARTS.values()]).requires_grad_()
        style = logit([0.5]).requires_grad_()
        rate = STD_RATE * (1 if scale == "group" else 2)
        optimizer = torch.optim.SGD([{"params": [tasks], "lr": rate},
                                     {"params": [style], "lr": rate / len(tasks)}])
        curves = {kind: [] for kind in (*STARTS, "style")}
        group_ids = torch.arange(len(tasks)).repeat_interleave(GROUP)
        for _ in range(STD_STEPS):
            chances = torch.sigmoid(tasks).detach().view(len(STARTS), EACH).mean(1).tolist()
            for kind, chance in zip(curves, [*chances, torch.sigmoid(style).item()]):
                curves[kind].append(chance)
            logits = torch.stack([tasks[group_ids], style.expand(len(group_ids))], 1)  # (B, 2)
            taken = torch.rand(logits.shape) < torch.sigmoid(logits)  # (B, 2)
            reward = taken[:, 0] + STYLE_PAY * taken[:, 1]
            advantages = grpo.group_advantages(reward, group_ids, scale=scale)
            logprobs = torch.where(taken, logsigmoid(logits), logsigmoid(-logits))
            mask = torch.ones_like(logprobs)
            step(optimizer, loss_of("grpo", logprobs, advantages[:, None] * mask, mask))
        rows[scale] = {"hard": curves["hard"][-1], "easy": curves["easy"][-1],
                       "middle": curves["middle"][-1], "style": curves["style"][-1],
                       "curve": thin(curves["hard"]), "style curve": thin(curves["style"])}
    return rows


# ------------------------------------------------------------------------------- groups that differ
SKILLS = 400  # tasks
SPREAD = 4.0  # standard deviation of their logits: most are too hard or too easy
BUDGET = 24_000  # episodes
DRAWN = 16  # tasks of a step


def difficulty(seed) -> dict:
    """Train tasks of all difficulties, at equal numbers of episodes that are played.

    "uniform" draws tasks evenly, "replaced" plays further tasks until a step has DRAWN groups that
    differ (dynamic sampling), and "pool" draws the tasks whose last group differed twice as often
    as those that were never played, and the others rarely.
    """
    rows = {}
    for name in ("uniform", "replaced", "pool"):
        generator = torch.Generator().manual_seed(seed)
        tasks = (torch.randn(SKILLS, generator=generator) * SPREAD - 2).requires_grad_()
        skill = torch.zeros(1, requires_grad=True)  # what all tasks share
        optimizer = torch.optim.Adam([tasks, skill], lr=0.05)
        weights = torch.ones(SKILLS)
        played = updates = silent = 0
        curve, start = [], torch.sigmoid(tasks).mean().item()
        while played < BUDGET:
            curve.append(torch.sigmoid(tasks + skill).mean().item())
            batch = []
            while len(batch) < DRAWN and played < BUDGET:
                [task] = torch.multinomial(weights, 1, generator=generator).tolist()
                chance = torch.sigmoid(tasks[task] + skill).item()
                right = torch.rand(GROUP, generator=generator) < chance
                played += GROUP
                differs = bool(right.any()) and not bool(right.all())
                silent += not differs
                if name == "pool":
                    weights[task] = 2.0 if differs else 0.1
                if differs or name != "replaced":
                    batch.append((task, right))
            updates += 1
            ids = torch.tensor([task for task, _ in batch]).repeat_interleave(GROUP)
            right = torch.cat([right for _, right in batch])
            groups = torch.arange(len(batch)).repeat_interleave(GROUP)
            advantages = grpo.group_advantages(right.float(), groups)[:, None]
            logits = (tasks[ids] + skill)[:, None]
            logprobs = torch.where(right[:, None], logsigmoid(logits), logsigmoid(-logits))
            step(optimizer, loss_of("grpo", logprobs, advantages, torch.ones_like(logprobs)))
        rows[name] = {"success before": start, "success after": curve[-1],
                      "after 70 updates": curve[70], "updates": updates,
                      "silent": silent * GROUP / played, "curve": thin(curve)}
    return rows


# ------------------------------------------------------------------------------ a choice of ten
ACTIONS, CONTEXTS = 10, 32
COMMON, RARE = 0.5, 0.02  # chances at the start of the action paid 1 and of the one paid 2
ENTROPY_STEPS, PASSES = 40, 16
CLIPS = {"clip 0.2": 0.2, "clip-higher 0.28": 0.28, "no upper clip": 1e9}


def entropy(seed) -> dict:
    """Train a table of choices: a common action pays 1, a rare one pays 2, eight pay nothing.

    A step samples GROUP actions in each context and takes PASSES updates, so that the clip acts.
    """
    rest = (1 - COMMON - RARE) / (ACTIONS - 2)
    start = torch.tensor([COMMON, RARE] + [rest] * (ACTIONS - 2)).log()
    pay = torch.tensor([1.0, 2.0] + [0.0] * (ACTIONS - 2))
    rows = {}
    for name, clip_high in CLIPS.items():
        torch.manual_seed(seed)
        table = start.repeat(CONTEXTS, 1).requires_grad_()
        optimizer = torch.optim.Adam([table], lr=0.05)
        contexts = torch.arange(CONTEXTS).repeat_interleave(GROUP)
        entropies, rare, clipped = [], [], []
        for _ in range(ENTROPY_STEPS):
            log_policy = table.log_softmax(1)
            entropies.append(-(log_policy.exp() * log_policy).sum(1).mean().item())
            rare.append(log_policy[:, 1].exp().mean().item())
            actions = torch.multinomial(log_policy.exp().detach(), GROUP, True).flatten()
            advantages = grpo.group_advantages(pay[actions], contexts)[:, None]
            old = log_policy[contexts, actions].detach()[:, None]
            for _ in range(PASSES):
                logprobs = table.log_softmax(1)[contexts, actions][:, None]
                step(optimizer, loss_of("grpo", logprobs, advantages, torch.ones_like(logprobs),
                                        old, clip=(0.2, clip_high)))
            ratio = (table.log_softmax(1)[contexts, actions][:, None] - old).exp().detach()
            stopped = (ratio > 1 + clip_high) & (advantages > 0)
            clipped.append(stopped.float().mean().item())
        rows[name] = {"entropy": entropies[-1], "best action": rare[-1],
                      "clipped above": sum(clipped) / len(clipped),
                      "curve": thin(entropies), "rare curve": thin(rare)}
    return rows


# -------------------------------------------------------------------------------- 16-bit rounding
WIDTH = 256
SIZE = 0.06  # standard deviation of the weights
RATES = (1e-6, 1e-5, 1e-4, 1e-3)
ROUNDING_STEPS = 50


def rounding(seed) -> dict:
    """Add up small updates of a weight that bfloat16 holds, as Adam would make them.

    Each step moves every weight by the rate in a direction of its own that stays the same. "kept"
    is the share of the whole update that is in the weights afterwards.

    in bfloat16: the weights are bfloat16, and each step is rounded to the nearest.
    merged, nearest: the update is summed in float32 and rounded with the weights once, at the end.
    merged, dithered: the same by `core.logprobs.dithered`, as lora.py merges.
    """
    torch.manual_seed(seed)
    weights = (torch.randn(WIDTH, WIDTH) * SIZE).bfloat16()
    signs = torch.randn(WIDTH, WIDTH).sign()
    rows = {name: {} for name in ("in bfloat16", "merged, nearest", "merged, dithered")}
    for rate in RATES:
        whole = signs * rate * ROUNDING_STEPS
        inside = weights.clone()
        for _ in range(ROUNDING_STEPS):
            inside += (signs * rate).bfloat16()
        total = weights.float() + whole
        after = {"in bfloat16": inside, "merged, nearest": total.bfloat16(),
                 "merged, dithered": dithered(total.clone(), torch.bfloat16).bfloat16()}
        for name, new in after.items():
            update = new.float() - weights.float()
            kept = (update * whole).sum() / (whole * whole).sum()
            rows[name][f"kept at {rate:.0e}"] = kept.item()
            rows[name].setdefault("curve", []).append(kept.item())
    return rows


TOYS = {"length": length, "std": std, "entropy": entropy, "truncation": truncation,
        "difficulty": difficulty, "rounding": rounding}
