"""What could packing without padding win in SFT? The share of padding in today's batches, and no code that packs.

    python bench/sft_packing.py --model_path .real/smollm2 --tasks FILE.jsonl [--output FILE]

The conversations are written solutions of GSM8K's problems as text ({"question", "answer"} a line), and without --tasks
the demonstrations of `equations` by the tiny model's tokenizer. Batches are those of sft.py (similar lengths share one)
and, beside them, batches in random order. `padding` is the share of a batch's B x T columns that hold no token,
`after prefix` the share of what goes through the model where rows share their prompt (core/packing.py). Packing could make
an epoch at most 1 / (1 - padding) times as fast. The last line is JSON.
"""
import argparse
import json
import os
import sys
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from bench.learning import write_json  # noqa: E402
SIZES = (4, 8, 16)


def lengths_and_prompts(args):
    """Return the token ids of every conversation."""
    from core.model import read_tokenizer
    from core.tiny import make_tiny
    if args.tasks:
        tokenizer = read_tokenizer(args.model_path)
        rows = [json.loads(line) for line in open(args.tasks, encoding="utf-8")][:args.n]
        return [tokenizer(tokenizer.apply_chat_template(
            [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}], tokenize=False),
            add_special_tokens=False)["input_ids"] for row in rows]
    import layers  # noqa: F401
    from agent import Limits
    from envs.tasks import load_tasks
    from schooling import demonstrate
    tasks = [{**task, "noise": 0.6, "noise_seed": i} for i, task in enumerate(load_tasks("equations", "train", args.n, 0))]
    return [t.token_ids for t in demonstrate(make_tiny()[1], "equations", tasks, Limits(max_turns=6))]


def shares(batches) -> dict:
    """Return the share of padding, of all columns and of those behind the prefix that a batch's rows share."""
    tokens = columns = real = passed = 0
    for batch in batches:
        width, shared = max(map(len, batch)), len(os.path.commonprefix(batch))
        tokens, columns = tokens + sum(map(len, batch)), columns + len(batch) * width
        real += shared + sum(len(ids) - shared for ids in batch)
        passed += shared + len(batch) * (width - shared)
    return {"padding": round(1 - tokens / columns, 4), "after prefix": round(1 - real / passed, 4)}


def main():
    from types import SimpleNamespace

    from core.data import batches_of_like_length, shuffled_batches
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_path", default="tiny")
    parser.add_argument("--tasks", default="")
    parser.add_argument("--n", type=int, default=2000)
    parser.add_argument("--output", default="")
    args = parser.parse_args()
    ids = lengths_and_prompts(args)
    rows = [SimpleNamespace(token_ids=row) for row in ids]
    result = {"command": "python " + " ".join([os.path.relpath(__file__, ROOT), *sys.argv[1:]]), "date": str(date.today()),
              "conversations": len(ids), "mean tokens": round(sum(map(len, ids)) / len(ids), 1), "like length": {}, "random": {}}
    for size in SIZES:
        for name, make in (("like length", batches_of_like_length), ("random", shuffled_batches)):
            result[name][size] = shares([[row.token_ids for row in batch] for batch in make(rows, size, 0)])
            print(f"batches of {size}, {name}: {result[name][size]}", flush=True)
    if args.output:
        result = write_json(args.output, result, args)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
