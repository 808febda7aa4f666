"""Direct preference optimization (arXiv 2305.18290): learn from pairs of episodes.

    python lessons/07_dpo.py --seed 0

The model plays each equation several times. Of each task the episode with the highest
reward is "chosen" and the one with the lowest "rejected". The loss makes the chosen one
likelier than the rejected one, both measured against the model that played them:

    margin = log [pi(chosen) / pi_ref(chosen)] - log [pi(rejected) / pi_ref(rejected)]
    loss   = -log sigmoid(beta margin) - sft_coef log pi(chosen) / (its tokens)

Two runs, without the second term and with it, learn from the same pairs. The term is
not in the paper's equation. It is that of Iterative Reasoning Preference Optimization
(arXiv 2404.19733).
"""
import argparse

from picture import draw
from start import report, start_model

from core.data import collate, members, shuffled_batches
from core.engine import make_engine
from core.logprobs import token_logprobs
from core.model import adamw
from envs import Limits, recommended
from envs.tasks import drop_seen, load_tasks
from agent import evaluate, rollout
from lora import load_model

import torch
from torch.nn import functional as F

NAME, ENV = "07_dpo", "equations"
STEPS = 24
TASKS, GROUP = 120, 6  # episodes to make pairs of
MIN_GAP = 0.5  # of the rewards of a pair
BATCH = 8  # pairs of an update
BETA = 0.1
LEARNING_RATE, LORA_R = 4e-3, 16
HELD_OUT_PAIRS, HELD_OUT_TASKS = 24, 40
SHOW = 4  # steps between two rows of the table
RUNS = {"DPO alone": 0.0, "with SFT term": 1.0}


# --------------------------------------------------------------------- the one equation
def pair_loss(chosen, rejected, ref_chosen, ref_rejected, chosen_tokens, sft_coef):
    """Return the loss and the margin of each pair, (B,) each, from log-probs of
    episodes (B,).

    d loss / d margin = -beta sigmoid(-beta margin): the more wrongly a pair is ordered,
    the more it counts. Only the difference of the two log-probs is in it, and not how
    likely they are.
    """
    margin = (chosen - ref_chosen) - (rejected - ref_rejected)
    return -F.logsigmoid(BETA * margin) - sft_coef * chosen / chosen_tokens, margin


def make_pairs(episodes):
    """Return (chosen, rejected) of each task: its best and worst, if rewards differ."""
    pairs = []
    for group in members([t.group_id for t in episodes]):
        ranked = sorted((episodes[i] for i in group), key=lambda t: t.reward)
        if ranked[-1].reward - ranked[0].reward >= MIN_GAP:
            pairs.append((ranked[-1], ranked[0]))
    return pairs


def log_likelihoods(model, pairs):
    """Return log pi(chosen), log pi(rejected) and the sampled tokens of the chosen,
    (B,) each.

    Tool results and the prompt are context: only what the model itself sampled counts.
    """
    chosen, rejected = zip(*pairs)
    token_ids, mask, _ = collate([*chosen, *rejected])  # (2B, T) each
    logprobs, _ = token_logprobs(model, token_ids, mask)  # (2B, T), 0 where the mask is 0
    return *logprobs.sum(1).chunk(2), mask[:len(pairs)].sum(1)


# ----------------------------------------------------------------------------- the loop
@torch.no_grad()
def look(model, pairs, reference):
    """Return what is shown of pairs that are never trained on."""
    chosen, rejected, tokens = log_likelihoods(model, pairs)
    _, margin = pair_loss(chosen, rejected, *reference, tokens, 0.0)
    return {"margin": margin.mean().item(), "accuracy": (margin > 0).float().mean().item(),
            "chosen": (chosen - reference[0]).mean().item(),
            "rejected": (rejected - reference[1]).mean().item()}


def train(model, pairs, held_out, sft_coef, steps, seed):
    """Update on shuffled pairs; yield (step, what `look` says of the held-out ones)."""
    optimizer = adamw(model, lr=LEARNING_RATE, beta2=0.999)
    # The reference is the model before its first update. It is scored once, and never
    # needed again.
    with torch.no_grad():
        references = {pair: log_likelihoods(model, [pair])[:2] for pair in pairs}
        held_out_reference = log_likelihoods(model, held_out)[:2]
    batches = []
    for step in range(steps):
        if step % SHOW == 0:
            yield step, look(model, held_out, held_out_reference)
        if not batches:  # another pass over the pairs, in another order
            batches = shuffled_batches(pairs, BATCH, seed, step)
        batch = batches.pop()
        ref_chosen, ref_rejected = (torch.cat(x) for x in zip(*(references[p] for p in batch)))
        chosen, rejected, tokens = log_likelihoods(model, batch)  # (B,) each
        loss, _ = pair_loss(chosen, rejected, ref_chosen, ref_rejected, tokens, sft_coef)
        loss.mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    yield steps, look(model, held_out, held_out_reference)


def main(steps=STEPS, seed=0):
    """Play, make pairs, train twice, show what to look at, and draw it."""
    options = {"limits": Limits(**recommended(ENV)), "seed": seed, "engine": make_engine}
    tasks = load_tasks(ENV, "train", TASKS, seed)
    exam = drop_seen(load_tasks(ENV, "test", HELD_OUT_TASKS, seed), tasks)
    model, tokenizer = load_model(start_model(), lora_r=LORA_R, seed=seed)
    pairs = make_pairs(rollout(model, tokenizer, ENV, tasks, GROUP, **options))
    before = evaluate(model, tokenizer, ENV, exam, **options)["success"]
    held_out, pairs = pairs[:HELD_OUT_PAIRS], pairs[HELD_OUT_PAIRS:]

    print(f"\n{len(pairs)} pairs to train on and {len(held_out)} held out, of {TASKS} equations. "
          "Below are\nmeans over the held-out pairs; log pi is its change since the start, in nats "
          "per\nepisode. Which of the columns would you log?\n")
    print("run              step    margin  accuracy  log pi(chosen)  log pi(rejected)")
    rows, after = {}, {}
    for name, sft_coef in RUNS.items():
        model, _ = load_model(start_model(), lora_r=LORA_R, seed=seed)
        rows[name] = []
        for step, row in train(model, pairs, held_out, sft_coef, steps, seed):
            rows[name].append({"step": step, **row})
            print(f"{name:15} {step:5} {row['margin']:9.2f} {row['accuracy']:9.2f} "
                  f"{row['chosen']:15.2f} {row['rejected']:17.2f}", flush=True)
        after[name] = evaluate(model, tokenizer, ENV, exam, **options)["success"]

    print()
    for name, run in rows.items():
        last = run[-1]
        fell = "fell" if last["chosen"] < 0 else "rose"
        print(f"{name}: accuracy {last['accuracy']:.2f}. log pi of the chosen episodes {fell} by "
              f"{abs(last['chosen']):.1f} nats.\n  Success on {len(exam)} held-out equations: "
              f"{before:.2f} before, {after[name]:.2f} after.")
    print()
    panels = [{"title": name, "x": "step", "y": "log pi since the start, nats",
               "curves": {side: ([row["step"] for row in run], [row[side] for row in run])
                          for side in ("chosen", "rejected")}} for name, run in rows.items()]
    draw(NAME, *panels, share_y=True)
    report(NAME, seed, {"before": before, "after": after}, steps=steps,
           pairs=len(pairs), runs=rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
