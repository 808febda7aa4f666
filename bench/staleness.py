"""How old may episodes be? Train on what the policy of k steps ago has played.

    python bench/staleness.py                                        all of it, seeds 0, 1, 2
    python bench/staleness.py --only plain_0,plain_8 --seeds 0       some runs

Asynchronous systems such as AReaL (arXiv 2505.24298) overlap rollout and training, so that episodes
come from an older policy. Here the rollout of every step plays the adapter of k steps ago, and
nothing else changes. Three objectives:

    plain      the clipped ratio of the policy to the old one that sampled
    truncated  `--importance_correction 2`: the clipped ratio is taken to the policy at the start of
               the step, and advantages are weighted by min(that policy / the sampler, 2)
    decoupled  the same without a cap: the decoupled objective of AReaL. It is
               `--importance_correction` with a huge cap, grpo.py needs nothing for it

All else is the tiny model's default (`grpo.TINY`): two updates a step, so that an age of k steps is
2k updates. A run is 18 steps, as in `tricks.py`. At age 0 the three differ by rounding alone, and
only `plain` is run.
"""
import sys
from collections import deque
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from bench.learning import (  # noqa: E402
    Clock, arguments, exam, flags, interval, publish, series, spread, taught_base, write_row)
from bench.pictures import figure, save  # noqa: E402

STEPS = 18
UPDATES = 2  # a step, of the tiny model: grpo.TINY
AGES = (0, 1, 2, 4, 8)  # in steps
NO_CAP = 1e9
CORRECTIONS = {"plain": None, "truncated": 2.0, "decoupled": NO_CAP}
RUNS = {f"{name}_{age}": (name, age) for age in AGES for name in CORRECTIONS
        if age or name == "plain"}


def rollout_of(age):
    """Return `rollout` as the adapter of `age` calls ago plays it, or the first one's before."""
    from agent import rollout
    past = deque(maxlen=age + 1)  # of adapters, the oldest first

    def old_rollout(model, *arguments, **options):
        weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
        past.append({name: p.detach().clone() for name, p in weights.items()})
        try:
            put(weights, past[0])
            return rollout(model, *arguments, **options)
        finally:
            put(weights, past[-1])
    return old_rollout


def put(weights, values):
    """Copy the values into the weights, by name."""
    for name, p in weights.items():
        p.data.copy_(values[name])


def settings(steps=STEPS) -> dict:
    """Return what the figures depend on."""
    return flags("grpo", max_steps=steps)


def worker(args):
    """Do one run and write its row."""
    import grpo
    from layers import load_model
    run, seed = args.worker, args.seeds[0]
    name, age = RUNS[run]
    folder = Path(args.out) / f"{run}_{seed}"
    clock = Clock()
    # `train` takes its rollout by this name, and its evaluation from agent.py.
    grpo.rollout = rollout_of(age)
    grpo.train(grpo.Config(
        model_path=taught_base(args.out), output_dir=str(folder), seed=seed, max_steps=args.steps,
        eval_tasks=0, overwrite=True, importance_correction=CORRECTIONS[name]))
    times = clock.read()
    model, tokenizer = load_model(str(folder), train=False)
    metrics = "reward", "kl", "grad_norm", "sampler_gap", "clip_low", "clip_high"
    write_row(args, run, seed, {
        **exam(model, tokenizer, args.tasks), **times,
        **{metric: series(folder, metric) for metric in metrics}})


def summarize(rows) -> dict:
    """Return success of every objective and age, and its difference to age 0, seed by seed."""
    summary, fresh = {}, rows.get("plain_0", {})
    for run, by_seed in rows.items():
        summary[run] = {"success": spread([row["success"] for row in by_seed.values()]),
                        "by_seed": [row["success"] for row in by_seed.values()]}
        seeds = sorted(by_seed.keys() & fresh.keys())
        if seeds and run != "plain_0":
            summary[run]["minus_age_0"] = spread(
                [by_seed[seed]["success"] - fresh[seed]["success"] for seed in seeds])
    return summary


def curve(summary, name) -> tuple[list[int], list[dict]]:
    """Return the ages of an objective that were run, and their summaries."""
    runs = {age: f"{name}_{age}" if age else "plain_0" for age in AGES}
    ages = [age for age in AGES if runs[age] in summary]
    return ages, [summary[runs[age]] for age in ages]


def table(summary) -> str:
    """Return the table of the pages."""
    lines = ["| age in steps | in updates | " + " | ".join(CORRECTIONS) + " |", "|---" * 5 + "|"]
    for age in AGES:
        cells = []
        for name in CORRECTIONS:
            numbers = summary.get(f"{name}_{age}")
            without = "not run" if f"{name}_{age}" in RUNS else "as plain"
            cells.append(interval(numbers["success"]) if numbers else without)
        lines.append(f"| {age} | {UPDATES * age} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def draw(summary, path):
    """Draw success against age for the three objectives, means as lines and seeds as points."""
    picture, panel = figure(width=6, height=3.2)
    for name in CORRECTIONS:
        ages, points = curve(summary, name)
        if max(ages, default=0) == 0:
            continue
        line, = panel.plot(ages, [point["success"]["mean"] for point in points], "-", label=name)
        for age, point in zip(ages, points):
            seeds = point["by_seed"]
            panel.plot([age] * len(seeds), seeds, ".", color=line.get_color(), alpha=0.6)
    panel.set(xlabel=f"age of the episodes, in steps of {UPDATES} updates",
              ylabel="success on held-out equations", ylim=(0, 1))
    if panel.lines:
        panel.legend()
    save(picture, path)


def main(argv=None):
    args = arguments(__doc__, RUNS, "staleness", argv, steps=STEPS)
    if args.worker:
        return worker(args)
    publish(args, __file__, RUNS, settings(args.steps), summarize, table, draw)


if __name__ == "__main__":
    main()
