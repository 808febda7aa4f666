"""Does another loss or scale serve SmolLM2-135M better on GSM8K's easy set?

    python bench/defaults_gsm8k.py    three seeds of two choices: two hours on 2 cores

The start is SFT on the written solutions of at most two calculations. The easy set are such
problems that the start solves greedily: those of the training file are trained on, those of the
test file are the exam. As in bench/defaults_smollm2.py there is no KL and one update a step, all
runs begin with the same adapter, and all runs of a seed play the same tasks, as many episodes.

Prints a table, and writes bench/results/defaults_gsm8k.json. The last line is JSON.
"""
import json
import math
import random
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from bench import gsm8k  # noqa: E402
from bench.defaults import measure  # noqa: E402
from bench.defaults_smollm2 import DTYPE, EACH, MODEL  # noqa: E402
from bench.distill import Parts  # noqa: E402
from bench.learning import Clock, arguments, flags, series, write_row  # noqa: E402
from bench.learning_rates import short_template  # noqa: E402

CALCULATIONS = 2  # of an easy problem, at most
SCHOOL = {"max_steps": 110, "lora_r": 32, "learning_rate": 1e-3, "batch_size": 16,
          "gradient_accumulation_steps": 1}
SCAN = {"train": 600, "test": 500}  # easy problems that the start tries, at most
STEPS, SAMPLES = 10, 12
LIMITS = {"max_new_tokens": 160, "max_tokens": 768}
EACH = EACH | LIMITS | {"tasks_per_step": 6, "group_size": 8, "learning_rate": 3e-4}
CHOICES = {"grpo": EACH | {"loss": "grpo", "scale_rewards": "group"},
           "dr_grpo": EACH | {"loss": "dr_grpo", "scale_rewards": "none"}}
RUNS = {f"{name}_0": name for name in CHOICES}  # 0: there is one start


def settings(steps=STEPS) -> dict:
    """Return what the figures depend on."""
    return {"school": SCHOOL, "scan": SCAN,
            "runs": {name: flags("grpo", max_steps=steps, **changes)
                     for name, changes in CHOICES.items()}}


def few_calculations(split, path):
    """Write the problems of a file whose written solution takes at most two calculations."""
    from envs.gsm8k import true_calculations
    if not path.exists():
        lines = (gsm8k.DATA / f"{split}.jsonl").read_text().splitlines(keepends=True)
        random.Random(8).shuffle(lines)
        path.write_text("".join(line for line in lines if 1 <= len(true_calculations(
            json.loads(line)["answer"])) <= CALCULATIONS))
    return path


def start(out: Path) -> str:
    """Return the adapter that all runs start from; make it if it is not there."""
    import sft
    out.mkdir(parents=True, exist_ok=True)
    if not (out / "model").exists():
        short_template(str(MODEL), str(out / "model"))
    easy = few_calculations("train", out / "train.jsonl")
    parts = Parts(out, 0, math.inf, {"env": "gsm8k", "save_every": 10, **DTYPE})
    parts.run("start", sft, model_path=str(out / "model"), dataset=str(easy), max_samples=7473,
              eval_tasks=0, **SCHOOL)
    return parts.folder("start")


def easy_set(out: Path, split) -> Path:
    """Return the file of the easy problems of a split that the start solves greedily."""
    solved, played = out / f"solved_{split}.jsonl", out / f"played_{split}.jsonl"
    problems = few_calculations(split, out / f"{split}.jsonl")
    n = min(SCAN[split], len(problems.read_text().splitlines()))
    gsm8k.play(out / "start", problems, n, played, "--temperature", 0)
    tasks = [t.info["task"] for t in gsm8k.read(played) if t.info["success"]]
    solved.write_text("".join(json.dumps(task) + "\n" for task in tasks))
    return solved


def exam(path, problems: Path) -> dict:
    """Return what a model does with all problems of a file, at temperature 1."""
    import envs
    from agent import Limits, evaluate
    from envs.tasks import load_tasks
    from layers import load_model
    model, tokenizer = load_model(str(path), train=False, **DTYPE)
    n = len(problems.read_text().splitlines())
    tasks = load_tasks("gsm8k", "test", n, 0, None, str(problems))
    limits = Limits(**envs.recommended("gsm8k") | LIMITS)
    result = evaluate(model, tokenizer, "gsm8k", tasks, SAMPLES, limits=limits)
    return {name: round(result[name], 4) for name in ("success", "reward", "turns", "completion")}


def play(args, run, seed):
    """Train once, and write the row of the run."""
    import grpo
    out, folder = Path(args.out), Path(args.out) / f"{run}_{seed}"
    base = start(out)
    trained_on, held_out = easy_set(out, "train"), easy_set(out, "test")
    clock = Clock()
    grpo.train(grpo.Config(
        model_path=base, env="gsm8k", dataset=str(trained_on), eval_dataset=str(held_out),
        output_dir=str(folder), seed=seed, max_steps=args.steps, eval_tasks=0, resume=True,
        save_every=5, **CHOICES[RUNS[run]]))
    times, episodes = clock.read(), EACH["tasks_per_step"] * EACH["group_size"]
    write_row(args, run, seed, {
        **exam(folder, held_out), **times,
        "tokens": round(episodes * sum(series(folder, "tokens"))),
        "training": series(folder, "success"), "readable": series(folder, "structure")})


def main(argv=None):
    args = arguments(__doc__, RUNS, "defaults_gsm8k", argv, steps=STEPS)
    measure(args, "defaults_gsm8k", RUNS, CHOICES, play, settings(args.steps),
            exam=f"the test problems of the easy set, {SAMPLES} episodes of each")


if __name__ == "__main__":
    main()
