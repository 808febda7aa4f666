"""Does another loss or scale, or ECHO, serve SmolLM2-135M better than `grpo` with the group's std?

    python bench/defaults_smollm2.py --tasks 40    three seeds of three choices: an hour on 2 cores

A real model has no KL and one update a step by default, so that the loss and the scale are what is
left to choose. All runs start from the adapter that bench/distill.py makes, and all runs of a seed
see the same tasks in the same order and play as many episodes.

Prints a table, and writes bench/results/defaults_smollm2.json. The last line is JSON.
"""
import math
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from bench import distill  # noqa: E402
from bench.defaults import measure  # noqa: E402
from bench.learning import Clock, arguments, exam, flags, series, write_row  # noqa: E402
from bench.learning_rates import short_template  # noqa: E402

MODEL = ROOT / ".real" / "smollm2"
STEPS = 7  # of 4 x 8 episodes
DTYPE = {"dtype": "bfloat16"}
EACH = {"kl_coef": 0.0, "updates_per_step": 1, "learning_rate": 4e-4, "batch_size": 8,
        **distill.REAL_GROUPS, **DTYPE}
GRPO = EACH | {"loss": "grpo", "scale_rewards": "group"}
CHOICES = {"grpo": GRPO, "dr_grpo": EACH | {"loss": "dr_grpo", "scale_rewards": "none"},
           "echo": GRPO | {"echo_coef": 0.1}}
RUNS = {f"{name}_0": name for name in CHOICES}  # 0: there is one start


def settings(steps=STEPS) -> dict:
    """Return what the figures depend on."""
    return {name: flags("grpo", max_steps=steps, **changes) for name, changes in CHOICES.items()}


def base_of(out: Path, model) -> str:
    """Return the adapter that all runs start from; make it if it is not there."""
    out.mkdir(parents=True, exist_ok=True)
    if not (out / "model").exists():
        short_template(str(model), str(out / "model"))
    common = {"env": "equations", "save_every": 5, **DTYPE}
    return distill.real_start(distill.Parts(out, 0, math.inf, common), str(out / "model"))


def play(args, run, seed):
    """Train once, and write the row of the run."""
    import grpo
    from layers import load_model
    folder = Path(args.out) / f"{run}_{seed}"
    base = base_of(Path(args.out), MODEL)
    clock = Clock()
    grpo.train(grpo.Config(
        model_path=base, env="equations", output_dir=str(folder), seed=seed, max_steps=args.steps,
        eval_tasks=0, resume=True, save_every=5, **CHOICES[RUNS[run]]))
    times = clock.read()
    model, tokenizer = load_model(str(folder), train=False, **DTYPE)
    write_row(args, run, seed, {
        **exam(model, tokenizer, args.tasks), **times,
        "tokens": round(32 * sum(series(folder, "tokens"))),
        "training": series(folder, "success"), "readable": series(folder, "structure")})


def main(argv=None):
    args = arguments(__doc__, RUNS, "defaults_smollm2", argv, steps=STEPS)
    measure(args, "defaults_smollm2", RUNS, CHOICES, play, settings(args.steps))


if __name__ == "__main__":
    main()
