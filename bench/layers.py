"""What each way of extras/fast, and what norms and MLPs keep less of (extras/memory/pointwise.py), is worth.

    python bench/layers.py [--model_path .real/smollm2] [--tasks 8] [--group 8] [--rounds 3]

Every setting is a process of its own: all on, each one off, all off. It plays and updates once to warm up, and then
`--rounds` times the same episodes. Printed are the CPU seconds of a rollout and of an update, which others on the
machine disturb less than the clock, and the peak of the resident memory. OMP_NUM_THREADS is taken as it is. The last line is
JSON.
"""
import argparse
import json
import os
import subprocess
import sys
from datetime import date
from pathlib import Path

WAYS = ("fused", "products", "pointwise")
SETTINGS = {"all on": (), **{f"{way} off": (way,) for way in WAYS}, "fast alone": ("pointwise",), "all off": WAYS}


def cpu() -> float:
    """Return the CPU seconds of this process, with those of the system: fresh pages cost these."""
    return sum(os.times()[:2])


def measure(args, off) -> dict:
    """Return the seconds and the peak of a process in which these ways are off."""
    import torch

    from agent import Limits, rollout
    from core.data import collate
    from core.logprobs import token_logprobs
    from envs.tasks import load_tasks
    from core.run import peak_memory_mb
    from extras.fast.processor import USED
    from extras.memory.techniques import PLAIN
    from layers import load_model
    from lora import adapted_linears, merged
    USED.difference_update(off)
    model, tokenizer = load_model(args.model_path, lora_r=16, dtype=args.dtype, device="cpu",
                                  memory=PLAIN._replace(recompute_pointwise="pointwise" not in off))
    for i, linear in enumerate(adapted_linears(model).values()):
        torch.nn.init.normal_(linear.lora.B, std=0.01, generator=torch.Generator().manual_seed(i))
    tasks = load_tasks("equations", "train", args.tasks, 0)
    seconds = {"rollout": 0.0, "update": 0.0}
    for number in range(1 + args.rounds):
        began = cpu()
        episodes = rollout(model, tokenizer, "equations", tasks, args.group, limits=Limits(3, args.new_tokens, 900), seed=1)
        ended = cpu()
        model.train()
        ids, mask, _ = collate(episodes)
        for start in range(0, len(ids), args.batch):
            rows = slice(start, start + args.batch)
            with merged(model):
                logprobs, _ = token_logprobs(model, ids[rows], mask[rows], 1.0)
                logprobs.sum().backward()
        model.zero_grad()
        if number:
            seconds["rollout"] += (ended - began) / args.rounds
            seconds["update"] += (cpu() - ended) / args.rounds
    return seconds | {"peak": peak_memory_mb(), "tokens": int(mask.sum()), "width": ids.shape[1]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_path", default="tiny")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tasks", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--new_tokens", type=int, default=48)
    parser.add_argument("--batch", type=int, default=64, help="episodes in one forward pass of the update")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=1, help="of the list of settings")
    parser.add_argument("--only", nargs="*", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--off", nargs="*", help="what the process of one setting switches off")
    args = parser.parse_args()
    if args.off is not None:
        print(json.dumps(measure(args, args.off)))
        return
    print(f"{args.model_path} {args.dtype}, {args.tasks} x {args.group} episodes, OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS')}")
    results = {}
    for name in args.only * args.repeats:
        command = [sys.executable, __file__, *sys.argv[1:], "--off", *SETTINGS[name]]
        out = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1], check=True).stdout
        result = json.loads(out.splitlines()[-1])
        print(f"{name:14} rollout {result['rollout']:6.2f} s  update {result['update']:6.2f} s  peak {result['peak']:6.0f} MiB  "
              f"{result['tokens']} tokens sampled, {result['width']} wide", flush=True)
        results.setdefault(name, []).append(result)
    flags = Path("/proc/cpuinfo").read_text() if os.path.exists("/proc/cpuinfo") else ""
    print(json.dumps({"command": " ".join(["python bench/layers.py", *sys.argv[1:]]), "date": str(date.today()),
                      "threads": os.environ.get("OMP_NUM_THREADS"), "settings": results,
                      "units": [unit for unit in ("amx_bf16", "avx512_bf16", "avx512_fp16") if unit in flags]}))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main()
