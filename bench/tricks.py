"""What does each trick of GRPO do for the tiny model on `equations`? One change at a time.

    python bench/tricks.py                                 all of them, seeds 0, 1, 2: two hours
    python bench/tricks.py --only default,kl_0 --seeds 0   some of them

Every run starts from the same taught model and changes one thing of the tiny model's defaults
(`grpo.TINY`, LoRA of rank 16). A run is 18 steps, where `python grpo.py` takes 40: after those the
default is near its ceiling, where nothing can be told apart. The learning rate is warmed up and
decays within the 18. All runs of a seed see the same tasks in the same order, so differences to the
default are taken seed by seed. Losses come with their papers' clip ranges (`grpo.PAPER_SETTINGS`).
"""
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from bench.learning import (  # noqa: E402
    Clock, arguments, exam, flags, interval, publish, series, spread, taught_base, write_row)
from bench.pictures import COLORS, figure, save  # noqa: E402

STEPS = 18
TRICKS = {
    "default": {},
    "kl_0": {"kl_coef": 0.0},
    "kl_0.3": {"kl_coef": 0.3},
    "updates_1": {"updates_per_step": 1},
    "updates_4": {"updates_per_step": 4},
    "credit_turn": {"credit": "turn"},
    "credit_return": {"credit": "return"},
    "credit_process": {"credit": "process"},
    "credit_rloo": {"credit": "rloo"},
    "std_batch": {"scale_rewards": "batch"},
    "std_none": {"scale_rewards": "none"},
    "rate_third": {"learning_rate": 1e-3},
    "rate_double": {"learning_rate": 6e-3},
    "groups_16x4": {"tasks_per_step": 16, "group_size": 4},
    "groups_4x16": {"tasks_per_step": 4, "group_size": 16},
    "gradients_1": {"max_grad_norm": 1.0},
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


def settings(steps=STEPS) -> dict:
    """Return what the figures depend on."""
    return flags("grpo", max_steps=steps)


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
        eval_tasks=0, overwrite=True, **changes))
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
    """Return the table of the pages, best first."""
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
    names = by_success(summary)[::-1]
    picture, panel = figure(width=7, height=0.9 + 0.24 * len(names))
    for height, name in enumerate(names):
        numbers = summary[name]
        color = COLORS["orange" if name == "default" else "blue"]
        panel.barh(height, numbers["success"]["mean"], color=color, alpha=0.45)
        panel.plot(numbers["by_seed"], [height] * len(numbers["by_seed"]), ".", color=color)
    panel.set_yticks(range(len(names)), names, fontsize=9)
    panel.set(xlabel="success on held-out equations: mean (bar) and seeds (points)", xlim=(0, 1))
    panel.grid(False, axis="y")
    save(picture, path)


def main(argv=None):
    args = arguments(__doc__, TRICKS, "tricks", argv, steps=STEPS)
    if args.worker:
        return worker(args)
    publish(args, __file__, TRICKS, settings(args.steps), summarize, table, draw)


if __name__ == "__main__":
    main()
