"""Decoding by our engine and by transformers' `model.generate`, in turns, for a small random model of each family.

    OMP_NUM_THREADS=1 python bench/decode_families.py                    three minutes
    python bench/decode_families.py --families mamba2 --rounds 9

Eight rows with prompts of 40 tokens sample 32 tokens each. The models have four layers and are 32 wide
(tests/decoders.py), so that what is timed is the work around the products of matrices, which both do alike. `generate`
has prompts of one length, which need no padding, and returns no log-probabilities. A ratio is generate / engine, above
1 where the engine is faster: the median over rounds of pairs that ran one after the other, in wall seconds and, for a
machine that others share, in CPU seconds. Writes bench/results/decode_families.json; the last line is JSON.
"""
import argparse
import datetime
import json
import os
import random
import statistics
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from bench.learning import RESULTS, write_json  # noqa: E402
FAMILIES = """llama qwen3 gemma2 gemma3n gemma4 gpt_oss deepseek_v3 qwen3_moe hunyuan_v1_moe qwen3_5 lfm2
granitemoehybrid falcon_h1 mamba2 kimi_linear minimax""".split()
ROWS, PROMPT, TOKENS, VOCABULARY = 8, 40, 32, 96


def pair(model, seed: int):
    """Return the (wall, CPU) seconds of both: generate, then the engine."""
    from bench.completions import generate
    from layers import make_engine
    rng = random.Random(seed)
    prompts = [rng.choices(range(3, VOCABULARY), k=PROMPT) for _ in range(ROWS)]
    took = []
    for ours in (False, True):
        began = time.perf_counter(), time.process_time()
        if ours:
            engine = make_engine(model, slots=ROWS, tokens=PROMPT + TOKENS)
            turns = generate(engine, prompts, max_new_tokens=TOKENS, seed=seed)
            assert all(len(ids) == TOKENS for ids, _ in turns)
        else:
            ids = torch.tensor(prompts)
            out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, top_p=1.0,
                                 max_new_tokens=TOKENS, min_new_tokens=TOKENS, eos_token_id=None, pad_token_id=0)
            assert out.shape == (ROWS, PROMPT + TOKENS)
        took.append((time.perf_counter() - began[0], time.process_time() - began[1]))
    return took


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=FAMILIES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", default=str(RESULTS))
    args = parser.parse_args()
    import decoders

    from core.model import facts
    from extras.fast.loading import speed_up
    from extras.fast.processor import bound_primitives
    from extras.models.probe import probe
    bound_primitives()
    ratios = {}
    for family in args.families:
        model = decoders.make(family)
        speed_up(model)
        probe(model, family)
        assert not facts(model).refuses_engine
        pairs = [pair(model, args.seed + i) for i in range(1 + args.rounds)][1:]  # the first warms up
        ratios[family] = {name: round(statistics.median(theirs[k] / ours[k] for theirs, ours in pairs), 2)
                          for k, name in enumerate(("wall", "cpu"))}
        print(family, ratios[family], flush=True)
    machine = {"cores": os.cpu_count(), "threads": torch.get_num_threads(), "load": os.getloadavg()[0]}
    result = {"ratios": ratios, "rows": ROWS, "prompt": PROMPT, "tokens": TOKENS, "rounds": args.rounds,
              "seed": args.seed, "machine": machine, "date": datetime.date.today().isoformat(),
              "command": "python bench/decode_families.py " + " ".join(sys.argv[1:])}
    path = Path(args.results, "decode_families.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    result = write_json(path, result, args)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
