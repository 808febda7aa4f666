"""Rollouts by transformers' `model.generate`, by our engine on the stock modules, and on `fused.py`, in turns.

    python bench/rollout.py --model_path .real/smollm2 --dtype bfloat16 --cases 1x8x32 8x8x64
    python bench/rollout.py --cases 1x1x64 8x8x64                       the tiny model

A case is prompts x samples x tokens (prompts of 110 tokens). Each rollout counts whole: merging the adapter, packing
the weights, prompts, decoding; `generate` is spared the merging, its model is plain. `ratio` is stock / it, `generate`
is model.generate / it, the medians over rounds of pairs that ran one after the other, in wall seconds and, for a
machine that others share, in CPU seconds. The last line is JSON; bench/results/rollout.json holds it too, under the
model's name.
"""
import argparse
import datetime
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from bench.learning import RESULTS, write_json  # noqa: E402
MODES = {"generate": None, "stock": {"static": False}, "fused": {"static": False}, "fused_static": {"static": True}}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_path", default="tiny")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--cases", nargs="+", default=["1x1x64", "8x8x64"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--results", default=str(RESULTS))
    args = parser.parse_args()
    import torch
    from transformers import AutoModelForCausalLM

    from bench.completions import generate
    from core.engine import StockForward
    from extras.fast.fused import Fused
    from extras.fast.processor import bound_primitives
    from layers import load_model, make_engine
    from core.tiny import make_tiny
    from lora import merged
    bound_primitives()
    model, tokenizer = load_model(args.model_path, lora_r=16, dtype=args.dtype)
    with tempfile.TemporaryDirectory() as folder:
        if args.model_path == "tiny":
            make_tiny()[0].save_pretrained(folder)
        plain = AutoModelForCausalLM.from_pretrained(folder if args.model_path == "tiny" else args.model_path,
                                                     dtype=args.dtype).to(model.device).eval()

    def transformers_rollout(ids, samples, tokens):
        ids = torch.tensor(ids, device=model.device).repeat_interleave(samples, 0)
        out = plain.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, top_p=1.0,
                             max_new_tokens=tokens, min_new_tokens=tokens, eos_token_id=None, pad_token_id=0)
        assert out.shape[1] == ids.shape[1] + tokens
    cases = {}
    for case in args.cases:
        prompts, samples, tokens = map(int, case.split("x"))
        ids = [random.Random(i).choices(range(len(tokenizer) // 4, len(tokenizer)), k=110) for i in range(prompts)]
        took = {mode: [] for mode in MODES}
        for i in range(1 + args.rounds):
            for mode, options in MODES.items():
                began = time.perf_counter(), time.process_time()
                if mode == "generate":
                    transformers_rollout(ids, samples, tokens if i else 2)
                else:
                    with merged(model):
                        options = options | ({"decoder": StockForward(model)} if mode == "stock" else {})
                        engine = make_engine(model, slots=prompts * samples, tokens=110 + tokens, **options)
                        generate(engine, ids, group_size=samples, max_new_tokens=tokens if i else 2, seed=i)
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                if i:
                    took[mode].append((time.perf_counter() - began[0], time.process_time() - began[1]))
        cases[case] = {mode: {
            "seconds": statistics.median(t[0] for t in times), "cpu_seconds": statistics.median(t[1] for t in times),
            **{name: statistics.median(a[k] / b[k] for a, b in zip(took[base], times))
               for base, names in (("stock", ("ratio", "cpu_ratio")), ("generate", ("generate", "cpu_generate")))
               for k, name in enumerate(names)}} for mode, times in took.items()}
        print(case, {mode: {k: round(v, 2) for k, v in row.items()} for mode, row in cases[case].items()}, flush=True)
    name = os.path.basename(os.path.normpath(args.model_path))
    result = {"model": name, "dtype": args.dtype, "fused": isinstance(engine.decoder, Fused), "cases": cases,
              "machine": {"cores": os.cpu_count(), "threads": torch.get_num_threads(), "load": os.getloadavg()[0],
                          "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None},
              "date": datetime.date.today().isoformat(), "command": "python bench/rollout.py " + " ".join(sys.argv[1:])}
    path = Path(args.results, "rollout.json")
    kept = json.loads(path.read_text()) if path.exists() else {}
    write_json(path, {**kept, name: result})
    print(json.dumps(result))


if __name__ == "__main__":
    main()
