"""What does an update cost when some of its groups cannot teach?

    python bench/silent.py [--rounds 3] [--output FILE]

Steps of grpo.py with the tiny model, untaught: 8 groups of 8 episodes of a turn of 32 tokens. In a share of the groups
all rewards are equal. The shares take turns, step by step, once with --kl_coef 0, where such groups are left out of the
update, and once with 0.1, where they are not. Printed are the CPU seconds of scoring and update, which others on the
machine disturb less than the clock. OMP_NUM_THREADS is taken as it is. The last line is JSON.
"""
import argparse
import json
import os
import platform
import sys
import tempfile
from datetime import date
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from bench.learning import write_json  # noqa: E402

GROUPS, SIZE = 8, 8
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


def cpu() -> float:
    """Return the CPU seconds of this process, with those of the system: fresh pages cost these."""
    return sum(os.times()[:2])


def measure(base, kl_coef, rounds) -> dict:
    """Return {share: CPU seconds of each update}. The first step warms up, the last one ends the clock."""
    import grpo
    shares = [0.0, *SHARES * rounds, 0.0]
    seconds, began = {share: [] for share in SHARES}, []
    collect = grpo.collect_groups

    def paid(play, tasks, config, step, run):
        if step > 1:  # the end of the step before
            seconds[shares[step - 1]].append(cpu() - began[-1])
        episodes = collect(play, tasks, config, step, run)
        for i, t in enumerate(episodes):
            reward = float(i % 2) if i // SIZE >= round(shares[step] * GROUPS) else 1.0
            t.reward, t.rewards = reward, [0.0] * (len(t.rewards) - 1) + [reward]
        began.append(cpu())
        return episodes
    grpo.collect_groups = paid
    with tempfile.TemporaryDirectory() as folder:
        grpo.train(grpo.Config(model_path=base, kl_coef=kl_coef, tasks_per_step=GROUPS, group_size=SIZE, max_turns=1,
                               max_new_tokens=32, max_steps=len(shares), eval_tasks=0, batch_size=8, updates_per_step=1,
                               learning_rate=0.0, save_every=10**6, record=0, output_dir=f"{folder}/run"))
    grpo.collect_groups = collect
    return seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", default="")
    args = parser.parse_args()
    from core.tiny import make_tiny
    flags = Path("/proc/cpuinfo").read_text() if os.path.exists("/proc/cpuinfo") else ""
    result = {"command": "python " + " ".join([os.path.relpath(__file__, ROOT), *sys.argv[1:]]), "date": str(date.today()),
              "machine": platform.machine(), "threads": os.environ.get("OMP_NUM_THREADS", "default"),
              "units": [unit for unit in ("amx_bf16", "avx512_bf16", "avx512_fp16") if unit in flags],
              "groups": GROUPS, "group_size": SIZE, "median": {}, "cpu_seconds": {}}
    with tempfile.TemporaryDirectory() as base:
        for thing in make_tiny():
            thing.save_pretrained(base)
        for kl_coef in (0.0, 0.1):
            seconds = measure(base, kl_coef, args.rounds)
            result["cpu_seconds"][f"kl_coef {kl_coef}"] = {share: [round(x, 3) for x in of] for share, of in seconds.items()}
            result["median"][f"kl_coef {kl_coef}"] = {share: round(median(of), 3) for share, of in seconds.items()}
            for share, value in result["median"][f"kl_coef {kl_coef}"].items():
                print(f"kl_coef {kl_coef}, {share:.0%} of the groups silent: {value:.2f} s an update", flush=True)
    if args.output:
        result = write_json(args.output, result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
