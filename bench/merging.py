"""What 16-bit weights do to small LoRA updates: merged, beside the weights, rounded to the nearest, in float32.

    python bench/merging.py                    four runs of 40 steps, about 3 minutes; one JSON line at the end

Each run fine-tunes a real model on the same few GSM8K texts and states its loss before and after, the share of the
update that survives merging, and the seconds that merging takes in a step.
"""
import argparse
import json
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import lora  # noqa: E402
from bench.learning import RESULTS, fingerprint, settings_of, write_result  # noqa: E402
from layers import load_model  # noqa: E402
from core.logprobs import token_logprobs  # noqa: E402

WAYS = ("merged", "beside", "nearest", "float32")


def to_nearest(total, dtype, noise=None):
    """Round as `tensor.to(dtype)` does: what merging did before `logprobs.dithered`."""
    return total.to(dtype)


def kept_by_merging(model) -> float:
    """Return <merged - W, update> / <update, update> over some Linears: 1.0 if nothing is lost."""
    kept = whole = 0.0
    linears = [linear for linear in lora.adapted_linears(model).values() if linear.lora.mergeable]
    with lora.merged(model):
        for linear in linears[::max(1, len(linears) // 4)]:
            base = linear.lora.frozen_weight(linear)
            update = linear.lora.effective_weight(base) - base
            kept += float((update * (linear.weight.float() - base)).sum())
            whole += float(update.square().sum())
    return kept / whole if whole else 1.0


def train(way: str, args) -> dict:
    """Fine-tune in one of WAYS and return its figures."""
    dtype = "float32" if way == "float32" else "bfloat16"
    model, tokenizer = load_model(args.model_path, lora_r=16, dtype=dtype, device="cpu")
    lines = Path(args.dataset).read_text().splitlines()[:200]
    texts = [json.loads(line) for line in lines]
    ids = [tokenizer(row["question"] + " " + row["answer"])["input_ids"][:args.tokens] for row in texts]
    ids = torch.tensor([row for row in ids if len(row) == args.tokens][:args.rows])
    mask = torch.ones_like(ids)
    mask[:, 0] = 0
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.learning_rate,
                                  betas=(0.9, 0.95))
    losses, merge_seconds = [], 0.0
    with mock.patch.object(lora, "dithered", to_nearest) if way == "nearest" else nullcontext():
        for step in range(args.steps + 1):
            began = time.time()
            with lora.merged(model) if way in ("merged", "nearest") else nullcontext():
                merge_seconds += time.time() - began
                loss = -token_logprobs(model, ids, mask)[0].sum() / mask.sum()
                losses.append(loss.item())
                loss.backward()
            if step < args.steps:
                optimizer.step()
            optimizer.zero_grad()
        kept = kept_by_merging(model)
    return {"before": losses[0], "after": losses[-1], "merge_kept": kept,
            "merge_seconds": merge_seconds / len(losses)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_path", default=str(ROOT / ".real" / "smollm2"))
    parser.add_argument("--dataset", default=str(ROOT.parent / "shared/data/gsm8k/train.jsonl"))
    parser.add_argument("--learning_rate", type=float, default=2e-5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--output", default=str(RESULTS / "merging.json"))
    args = parser.parse_args()
    results = {}
    for way in args.ways:
        results[way] = {name: round(value, 4) for name, value in train(way, args).items()}
        print(way, results[way], flush=True)
    write_result(args.output, settings=fingerprint(settings_of("merging", **vars(args))), learning_rate=args.learning_rate, steps=args.steps, **results)


if __name__ == "__main__":
    main()
