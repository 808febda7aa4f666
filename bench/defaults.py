"""Which loss, scale, KL and number of updates should the tiny model have? Seeds from two starts.

    python bench/defaults.py --seeds 0,1,2,3,4               all of them: two hours on two cores
    python bench/defaults.py --only kl_0,dapo_0 --seeds 0    some, from start 0; calls add up

A start is what `schooling.py` makes of another seed. All runs of a seed see the same tasks in the
same order and play the same number of episodes, so that differences are taken run by run. Two more
columns say whether a run breaks on its way: the largest fall of success in training, of means of
three steps below the highest so far, and the lowest share of readable turns in a step.

Prints a table, and writes bench/results/defaults.json. The last line is JSON.
"""
import sys
from pathlib import Path
from statistics import fmean

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from bench.learning import (  # noqa: E402
    Clock, arguments, exam, fingerprint, flags, read_rows, report, row_file, series, spread,
    taught_base, write_row)

STEPS = 36  # of 8 x 8 episodes
STARTS = 0, 1  # seeds of the schooling
NO_KL, NO_STD = {"kl_coef": 0.0}, {"scale_rewards": "none"}
# Each on top of what else the tiny model needs (`grpo.TINY`), at a higher rate: what breaks at all
# breaks sooner.
BASIS = {"loss": "grpo", "scale_rewards": "group", "kl_coef": 0.1, "updates_per_step": 2,
         "learning_rate": 4e-3}
CHOICES = {
    "kl": BASIS,
    "no_kl": BASIS | NO_KL,
    "no_std": BASIS | NO_KL | NO_STD,
    "dapo": BASIS | NO_KL | {"loss": "dapo", "clip_eps_high": 0.28},
    "dapo_no_std": BASIS | NO_KL | NO_STD | {"loss": "dapo", "clip_eps_high": 0.28},
    "dr_grpo": BASIS | NO_KL | NO_STD | {"loss": "dr_grpo"},
    "dapo_one_update": BASIS | NO_KL | {
        "loss": "dapo", "clip_eps_high": 0.28, "updates_per_step": 1},
}
RUNS = {f"{name}_{start}": (name, start) for name in CHOICES for start in STARTS}


def settings(steps=STEPS) -> dict:
    """Return what the figures depend on."""
    return {name: flags("grpo", max_steps=steps, **changes) for name, changes in CHOICES.items()}


def play(args, run, seed):
    """Train once from a start, and write the row of the run."""
    import grpo
    from layers import load_model
    name, start = RUNS[run]
    base = taught_base(Path(args.out) / f"start{start}", start)
    folder = Path(args.out) / f"{run}_{seed}"
    clock = Clock()
    grpo.train(grpo.Config(
        model_path=base, env="equations", output_dir=str(folder), seed=seed, max_steps=args.steps,
        eval_tasks=0, overwrite=True, **CHOICES[name]))
    times = clock.read()
    model, tokenizer = load_model(str(folder), dtype="float32", train=False)
    write_row(args, run, seed, {
        **exam(model, tokenizer, args.tasks), **times,
        "tokens": round(64 * sum(series(folder, "tokens"))),
        "training": series(folder, "success"), "readable": series(folder, "structure")})


def largest_fall(values, window=3) -> float:
    """Return by how much the means of so many steps fall, at most, from the highest before them."""
    means = [fmean(values[i:i + window]) for i in range(len(values) - window + 1)]
    return max((max(means[:i + 1]) - mean for i, mean in enumerate(means)), default=0.0)


def summarize(rows, choices=CHOICES) -> dict:
    """Return what each choice reaches, how it compares with the first one, its falls, its cost."""
    runs = {name: {(start, seed): row for start in STARTS
                   for seed, row in rows.get(f"{name}_{start}", {}).items()} for name in choices}
    first = runs[next(iter(choices))]
    summary = {}
    for name, by_run in runs.items():
        if not by_run:
            continue
        done = by_run.values()
        differences = [by_run[run]["success"] - first[run]["success"]
                       for run in sorted(by_run.keys() & first.keys())]
        summary[name] = {
            "changes": choices[name], "success": spread([row["success"] for row in done]),
            "by_run": {f"start {start}, seed {seed}": row["success"]
                       for (start, seed), row in by_run.items()},
            "minus_first": spread(differences) if differences and by_run is not first else None,
            "largest_fall": round(max(largest_fall(row["training"]) for row in done), 3),
            "least_readable": min(min(row["readable"]) for row in done),
            "cpu_seconds": round(fmean(row["cpu_seconds"] for row in done), 1),
            "tokens": round(fmean(row["tokens"] for row in done))}
    return summary


def name_of(changes) -> str:
    """Return "grpo" or "grpo, ECHO 0.1" of what a choice changes."""
    echo = f", ECHO {changes['echo_coef']:g}" if changes.get("echo_coef") else ""
    return changes["loss"] + echo


def table(summary) -> list[list]:
    """Return the rows of the table, its head first."""
    rows = [["loss, scale, KL, updates", "runs", "success after", "minus the first, run by run",
             "largest fall", "least readable", "CPU seconds"]]
    for numbers in summary.values():
        changes, minus = numbers["changes"], numbers["minus_first"]
        words = [name_of(changes), changes["scale_rewards"], f"{changes['kl_coef']:g}",
                 changes["updates_per_step"]]
        difference = ""
        if minus:
            width = f" ± {minus['half_width']:.3f}" if minus["n"] > 2 else ""
            difference = f"{minus['mean']:+.3f}{width} (n = {minus['n']})"
        rows.append([", ".join(map(str, words)), numbers["success"]["n"],
                     f"{numbers['success']['mean']:.3f}", difference,
                     f"{numbers['largest_fall']:.2f}", f"{numbers['least_readable']:.2f}",
                     f"{numbers['cpu_seconds']:.0f}"])
    return rows


def measure(args, name, runs, choices, play, settings, **more):
    """Do the runs that have no row yet, print the table of all that were done, write NAME.json."""
    for seed in args.seeds:
        for run in args.only:
            if not row_file(args, run, seed).exists():
                play(args, run, seed)
    rows = read_rows(args, runs)  # those of earlier calls, too
    summary = summarize(rows, choices)
    for line in table(summary):
        print(*line, sep=" | ")
    report(args, name, settings=fingerprint(settings), steps=args.steps, summary=summary, rows=rows,
           **more)


def main(argv=None):
    args = arguments(__doc__, RUNS, "defaults", argv, steps=STEPS)
    measure(args, "defaults", RUNS, CHOICES, play, settings(args.steps))


if __name__ == "__main__":
    main()
