"""What does each trick of GRPO do for the tiny model on `equations`? One change at a time.

    python bench/tricks.py                                 all of them, seeds 0, 1, 2: hours
    python bench/tricks.py --only default,kl_0 --seeds 0   some of them

Every run starts from the same taught model and changes one thing of `learning.SETTINGS` (learning
rate 2e-3, KL 0.3, two updates a step, LoRA of rank 16), the tiny model's defaults of that time. A
run is 25 steps, half of what `python grpo.py` took then: after 50 the default is near its ceiling,
where nothing can be told apart. The learning rate is warmed up and decays within the 25. All runs
of a seed see the same tasks in the same order, so differences to the default are taken seed by seed.

Losses come with their papers' clip ranges (`grpo.PAPER_SETTINGS`), the KL stays at 0.3.
"""
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from bench.learning import (  # noqa: E402
    SETTINGS, Clock, arguments, exam, interval, publish, series, spread, taught_base, write_row)

STEPS = 25
TRICKS = {
    "default": {},
    "kl_0": {"kl_coef": 0.0},
    "kl_0.01": {"kl_coef": 0.01},
    "updates_1": {"updates_per_step": 1},
    "updates_4": {"updates_per_step": 4},
    "credit_turn": {"credit": "turn"},
    "credit_return": {"credit": "return"},
    "credit_process": {"credit": "process"},
    "credit_rloo": {"credit": "rloo"},
    "std_batch": {"scale_rewards": "batch"},
    "std_none": {"scale_rewards": "none"},
    "rate_third": {"learning_rate": 2e-3 / 3},
    "rate_triple": {"learning_rate": 6e-3},
    "groups_16x4": {"tasks_per_step": 16, "group_size": 4},
    "groups_4x16": {"tasks_per_step": 4, "group_size": 16},
    "clip_higher": {"clip_eps_high": 0.28},
    "loss_dapo": {"loss": "dapo"},
    "loss_dr_grpo": {"loss": "dr_grpo"},
    "loss_cispo": {"loss": "cispo"},
    "loss_gspo": {"loss": "gspo"},
    "loss_sapo": {"loss": "sapo"},
    "loss_luspo": {"loss": "luspo"},
    "loss_vespo": {"loss": "vespo"},
    "rank_1": {"lora_r": 1},
    "rank_4": {"lora_r": 4},
    "rank_64": {"lora_r": 64},
    "full_weights": {"lora_r": 0},
    "bfloat16": {"dtype": "bfloat16"},
    "temperature_0.7": {"temperature": 0.7},
    "temperature_1.3": {"temperature": 1.3},
}


def worker(args):
    """Do one run and write its row."""
    import grpo
    from layers import load_model
    name, seed = args.worker, args.seeds[0]
    folder = Path(args.out) / f"{name}_{seed}"
    changes = TRICKS[name]
    clock = Clock()
    grpo.train(grpo.Config(
        model_path=taught_base(args.out), output_dir=str(folder), seed=seed, max_steps=args.steps,
        eval_tasks=0, overwrite=True, **{**SETTINGS, **changes}))
    times = clock.read()
    # The exam is played at temperature 1, in the dtype of the training.
    dtype = changes.get("dtype", "float32")
    model, tokenizer = load_model(str(folder), dtype=dtype, train=False)
    write_row(args, name, seed, {
        **exam(model, tokenizer, args.tasks), **times, "changes": changes,
        **{metric: series(folder, metric) for metric in ("reward", "entropy", "kl", "grad_norm")}})


def summarize(rows) -> dict:
    """Return each trick's success and its difference to the default, seed by seed."""
    summary = {}
    default = rows.get("default", {})
    for name, by_seed in rows.items():
        summary[name] = {"success": spread([row["success"] for row in by_seed.values()]),
                         "by_seed": [row["success"] for row in by_seed.values()]}
        seeds = sorted(by_seed.keys() & default.keys())
        if seeds and name != "default":
            summary[name]["minus_default"] = spread(
                [by_seed[seed]["success"] - default[seed]["success"] for seed in seeds])
    return summary


def table(summary) -> str:
    """Return the table of bench/README.md, best first."""
    lines = ["| change | success after | seeds | minus the default |", "|---|---|---|---|"]
    for name in by_success(summary):
        numbers = summary[name]
        seeds = ", ".join(f"{value:.2f}" for value in numbers["by_seed"])
        difference = numbers.get("minus_default")
        shown = interval(difference) if difference else ""
        words = ", ".join(f"`{key} {value:.3g}`" if isinstance(value, float) else
                          f"`{key} {value}`" for key, value in TRICKS[name].items())
        lines.append(f"| {words or '**default**'} | {interval(numbers['success'])} | {seeds} | "
                     f"{shown} |")
    return "\n".join(lines) + "\n"


def by_success(summary) -> list[str]:
    return sorted(summary, key=lambda name: -summary[name]["success"]["mean"])


def draw(summary, path):
    """Draw the mean of every trick as a bar, and its seeds as points."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    names = by_success(summary)[::-1]
    plt.figure(figsize=(7, 0.9 + 0.24 * len(names)))
    for height, name in enumerate(names):
        numbers = summary[name]
        color = "tab:orange" if name == "default" else "tab:blue"
        plt.barh(height, numbers["success"]["mean"], color=color, alpha=0.45)
        plt.plot(numbers["by_seed"], [height] * len(numbers["by_seed"]), "k.", markersize=4)
    plt.yticks(range(len(names)), names, fontsize=8)
    plt.xlabel("success on held-out equations: mean (bar) and seeds (points)")
    plt.xlim(0, 1)
    plt.grid(axis="x", alpha=0.3)
    plt.tight_layout()
    plt.savefig(path, dpi=120)


def main(argv=None):
    args = arguments(__doc__, TRICKS, "tricks", argv, steps=STEPS)
    if args.worker:
        return worker(args)
    publish(args, __file__, TRICKS, summarize, table, draw)


if __name__ == "__main__":
    main()
