"""How much of an adapter's gain survives in bfloat16, by the size of its update and by who plays it.

    python bench/adapter_rounding.py           writes bench/results/adapter_rounding.json

One run trains an adapter on a few GSM8K texts at a small learning rate, as GRPO would, and stops at several steps.
There each way of playing it states its gain, the loss before training minus the loss now, in nats a token:

    float32          PEFT's adapter beside the same base in float32: all of it
    peft             PEFT's adapter beside the bfloat16 base
    peft_merged      the same after `merge_and_unload`, weights in bfloat16
    lora_py_merge    the folder of `lora.py merge --dtype bfloat16`, in stock transformers
    trained          `lora.merged`, what this project samples and trains with
"""
import argparse
import datetime
import json
import os
import platform
import sys
import tempfile
from pathlib import Path

import torch
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import lora  # noqa: E402
from bench.learning import RESULTS, write_json  # noqa: E402
from layers import load_model  # noqa: E402
from merge import merge  # noqa: E402
from core.model import save_model
from core.logprobs import token_logprobs


@torch.no_grad()
def stock_loss(model, ids) -> float:
    """Return the loss of a transformers or PEFT model, in nats a token."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).item()


def our_loss(model, ids):
    """Return the loss of our forward, in nats a token."""
    mask = torch.ones_like(ids)
    mask[:, 0] = 0
    return -token_logprobs(model, ids, mask)[0].sum() / mask.sum()


@torch.no_grad()
def relative_update(model) -> float:
    """Return the size of the adapter: |scale B A| / |W|, over all adapted weights."""
    updates = weights = 0.0
    for linear in lora.adapted_linears(model).values():
        weight = linear.lora.frozen_weight(linear).float()
        updates += float((linear.lora.effective_weight(weight) - weight).square().sum())
        weights += float(weight.square().sum())
    return (updates / weights) ** 0.5


def texts(tokenizer, args):
    """Return ids (rows, tokens) of the first texts that are long enough."""
    lines = Path(args.dataset).read_text().splitlines()[:200]
    rows = [json.loads(line) for line in lines]
    ids = [tokenizer(row["question"] + " " + row["answer"])["input_ids"][:args.tokens] for row in rows]
    return torch.tensor([row for row in ids if len(row) == args.tokens][:args.rows])


def played(folder: str, base: str, dtype, ids) -> tuple[float, float]:
    """Return the losses of PEFT's adapter beside a base of this dtype, and merged into it."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM
    stock = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).to(dtype)
    model = PeftModel.from_pretrained(stock, folder)
    beside = stock_loss(model, ids)
    return beside, stock_loss(model.merge_and_unload(), ids)


def measure(model, ids, base: str, folder: str) -> dict:
    """Return the loss of every way to play the adapter as it is now."""
    from transformers import AutoModelForCausalLM
    save_model(model, f"{folder}/adapter")
    merge(f"{folder}/adapter", f"{folder}/merged", "bfloat16")
    losses = {"float32": played(f"{folder}/adapter", base, torch.float32, ids)[0]}
    losses["peft"], losses["peft_merged"] = played(f"{folder}/adapter", base, torch.bfloat16, ids)
    plain = AutoModelForCausalLM.from_pretrained(f"{folder}/merged", dtype="auto")
    losses["lora_py_merge"] = stock_loss(plain, ids)
    with torch.no_grad(), lora.merged(model):
        losses["trained"] = our_loss(model, ids).item()
    return losses


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_path", default=str(ROOT / ".real" / "smollm2"))
    parser.add_argument("--dataset", default=str(ROOT.parent / "shared/data/gsm8k/train.jsonl"))
    parser.add_argument("--learning_rate", type=float, default=2e-5)
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 4, 12, 40])
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default=str(RESULTS / "adapter_rounding.json"))
    args = parser.parse_args()
    model, tokenizer = load_model(args.model_path, lora_r=16, dtype="bfloat16", device="cpu", seed=args.seed)
    ids = texts(tokenizer, args)
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=args.learning_rate, betas=(0.9, 0.95))
    by_step, before = [], {}
    for step in range(max(args.steps) + 1):
        if step == 0 or step in args.steps:
            with tempfile.TemporaryDirectory() as folder:
                losses = measure(model, ids, args.model_path, folder)
            before = before or losses
            gains = {way: before[way] - loss for way, loss in losses.items()}
            kept = {way: gain / gains["float32"] if step else None for way, gain in gains.items()}
            by_step.append({"step": step, "relative_update": relative_update(model),
                            "losses": losses, "gains": gains, "kept": kept})
            print(json.dumps(by_step[-1]), flush=True)
        with lora.merged(model):
            our_loss(model, ids).backward()
        optimizer.step()
        optimizer.zero_grad()
    result = {"command": "python bench/adapter_rounding.py " + " ".join(sys.argv[1:]), **vars(args),
              "date": datetime.date.today().isoformat(), "torch": torch.__version__,
              "machine": f"{platform.machine()}, {os.cpu_count()} cores", "by_step": by_step}
    write_json(args.output, result, args)


if __name__ == "__main__":
    main()
