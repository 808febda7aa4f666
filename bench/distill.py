"""Distillation, GRPO, and SFT on a teacher's episodes from the same start: success against tokens.

    python bench/distill.py                                          the tiny model, three seeds
    python bench/distill.py --model_path .real/smollm2 --seeds 0     SmolLM2-135M

All start from one model, which was taught on mostly wrong actions, and the teacher is the adapter
of a run that continued from it: GRPO of twice the steps for the tiny model; for SmolLM2, whose GRPO
takes an hour here, SFT on the expert's right actions (and there is no SFT on the teacher's
episodes, which would be much the same). Counted are the tokens that a model sampled to learn from:
the student's in distillation and GRPO, and the teacher's for SFT. What the teacher itself has cost
is not counted.

A part that is done is not done again, and with --minutes M no part begins after M minutes: call it
again until it has written bench/results/distill.json, the last line that it prints.
"""
import argparse
import datetime
import json
import math
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from bench.learning import RESULTS, write_json  # noqa: E402

# Steps between exams, episodes of a step, and steps of distillation; SFT: episodes, epochs, rate.
TINY = {"eval_every": 3, "eval_tasks": 200, "tasks_per_step": 64, "max_steps": 12}
REAL = {"eval_every": 5, "eval_tasks": 60, "tasks_per_step": 32, "max_steps": 15}
TEACHER = {"eval_tasks": 200, "max_steps": 36, "learning_rate": 4e-3}
GROUPS = {"tasks_per_step": 8, "group_size": 8, "learning_rate": 4e-3}  # of GRPO: as many episodes
IMITATED = (192, 768)
IMITATION = {"num_epochs": 4, "batch_size": 16, "learning_rate": 4e-3}
TEACHER_STEPS = 60
REAL_GROUPS = {"tasks_per_step": 4, "group_size": 8}
REAL_START, REAL_RATE, REAL_SAMPLES = 60, 3e-4, 600


def points(folder, result) -> list[dict]:
    """Return the exams of a run as {tokens sampled until then, success}."""
    tokens, found = 0, [{"tokens": 0, "success": result["success_before"]}]
    for line in (Path(folder) / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if "eval/success" in row:
            found.append({"tokens": round(tokens), "success": row["eval/success"]})
        tokens += row["episodes"] * row["sampled_tokens"]
    return [*found, {"tokens": round(tokens), "success": result["success_after"]}]


def tokens_to(curve, share, start, teacher):
    """Return the tokens at the first exam that closed this share of the gap to the teacher."""
    wanted = start + share * (teacher - start)
    return next((point["tokens"] for point in curve if point["success"] >= wanted), None)


class Later(Exception):
    """The time is up: the next call continues."""


class Parts:
    """The runs of one seed, each a folder of `out` that continues where it was.

    Attributes: end, when no run begins any more; options, what all have in common.
    """

    def __init__(self, out, seed, end, options):
        self.out, self.seed, self.end, self.options = Path(out), seed, end, options

    def run(self, name, module, **given) -> dict:
        """Return the result of a run of a program, which may be one of an earlier call."""
        folder = self.out / name
        if not (folder / "result.json").exists() and time.monotonic() > self.end:
            raise Later
        result = module.train(module.Config(
            output_dir=str(folder), seed=self.seed, resume=True, **self.options | given))
        if module.__name__ == "sft":  # has learned from what others sampled
            return result
        return result | {"points": points(folder, result)}

    def folder(self, name) -> str:
        return str(self.out / name)


def played_by(teacher, n, path, seed):
    """Write n episodes of the teacher on training tasks. Return how many tokens it sampled."""
    import talk
    if not path.exists():
        talk.command(talk.Config(model_path=teacher, env="equations", num_tasks=n, group_size=1,
                                 seed=seed, dtype="float32", output=str(path)))
    episodes = [json.loads(line) for line in path.read_text().splitlines()]
    return [sum(t["loss_mask"]) for t in episodes]


def tiny_seed(parts: Parts, taught: Parts, start) -> dict:
    """Return the curves of one seed of the tiny model.

    Args:
        taught: holds the teacher, and the start, if `start` is None: its model is made here.
    """
    import distill
    import grpo
    import sft
    taught.run("teacher", grpo, model_path=start or "tiny", **TEACHER)
    start, teacher = start or taught.folder("teacher/base"), taught.folder("teacher")
    curves = {"distill": parts.run("distill", distill, model_path=start, teacher=teacher, **TINY),
              "grpo": parts.run("grpo", grpo, model_path=start, **TINY | GROUPS)}
    if time.monotonic() > parts.end:
        raise Later
    path = parts.out / "teacher.jsonl"
    sampled = played_by(teacher, max(IMITATED) + 8, path, parts.seed)
    lines = path.read_text().splitlines(keepends=True)
    (parts.out / "held_out.jsonl").write_text("".join(lines[-8:]))
    before = curves["distill"]["success_before"]
    curves["sft"] = {"points": [{"tokens": 0, "success": before}]}
    for n in IMITATED:
        (parts.out / f"first_{n}.jsonl").write_text("".join(lines[:n]))
        result = parts.run(f"sft_{n}", sft, model_path=start, lora_r=16, max_samples=n,
                           trajectories=str(parts.out / f"first_{n}.jsonl"), **IMITATION,
                           eval_dataset=str(parts.out / "held_out.jsonl"),
                           eval_tasks=TINY["eval_tasks"])
        curves["sft"]["points"].append({"tokens": sum(sampled[:n]),
                                        "success": result["success_after"]})
    return curves


def sft_adapter(parts: Parts, name, model, **changes) -> str:
    """Return the folder of a real model's adapter that SFT on the expert's episodes has made."""
    import sft
    parts.run(name, sft, model_path=model, lora_r=16, max_turns=6, batch_size=8, eval_tasks=0,
              gradient_accumulation_steps=1, learning_rate=REAL_RATE, max_samples=REAL_SAMPLES,
              **changes)
    return parts.folder(name)


def real_start(parts: Parts, model) -> str:
    """Return the folder of a real model that was taught on mostly wrong actions."""
    return sft_adapter(parts, "start", model, max_steps=REAL_START, expert_noise=0.7)


def real_seed(parts: Parts, model) -> dict:
    """Return the curves of one seed of a real model."""
    import distill
    import grpo
    start = real_start(parts, model)
    teacher = sft_adapter(parts, "teacher", start, max_steps=TEACHER_STEPS)
    same = REAL | {"model_path": start, "batch_size": 8, "learning_rate": 4e-4}
    curves = {"distill": parts.run("distill", distill, teacher=teacher, **same)}
    curves["grpo"] = parts.run("grpo", grpo, **same | REAL_GROUPS)
    return curves


def row_of(curves, seed) -> dict:
    """Return what is kept of a seed."""
    distilled = curves["distill"]
    start, teacher = distilled["success_before"], distilled["teacher_success"]
    row = {"seed": seed, "start": start, "teacher": teacher,
           "seconds": {name: curve["seconds"] for name, curve in curves.items()
                       if "seconds" in curve}}
    for name, curve in curves.items():
        row[name] = {"points": curve["points"], "success": curve["points"][-1]["success"],
                     "tokens": curve["points"][-1]["tokens"],
                     "tokens_to_80": tokens_to(curve["points"], 0.8, start, teacher)}
    return row


def draw(rows, path):
    """Draw success against the tokens that were sampled, seed by seed, and the teacher's."""
    from bench.pictures import COLORS, figure, save
    picture, panel = figure(width=6.4, height=3.2)
    names = {"distill": ("distill.py", "blue"), "grpo": ("grpo.py", "orange"),
             "sft": ("sft.py on the teacher's episodes", "green")}
    for number, row in enumerate(rows):
        panel.axhline(row["teacher"], color=COLORS["grey"], linewidth=1, linestyle="--",
                      label=None if number else "teacher")
        for name, (label, color) in names.items():
            if name in row:
                at = row[name]["points"]
                panel.plot([p["tokens"] / 1000 for p in at], [p["success"] for p in at],
                           color=COLORS[color], alpha=0.85, label=None if number else label)
    panel.set(xlabel="thousand tokens sampled", ylabel="success, held out", ylim=(0, 1.02))
    panel.legend(loc="lower right")
    save(picture, path)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_path", default="tiny")
    parser.add_argument("--start", help="the model to start from; default: one that is made here")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--out", default=str(ROOT / "runs" / "bench_distill"))
    parser.add_argument("--minutes", type=float, help="begin no run after so many")
    args = parser.parse_args()
    is_tiny = args.model_path == "tiny"
    name = "distill" if is_tiny else "distill_smollm2"
    end = math.inf if args.minutes is None else time.monotonic() + 60 * args.minutes
    rows = []
    try:
        for seed in map(int, args.seeds.split(",")):
            out = Path(args.out) / f"{name}_{seed}"
            if is_tiny:
                common = {"env": "equations", "save_every": 6}
                taught = Parts(args.out, 0, end, common)
                curves = tiny_seed(Parts(out, seed, end, common), taught, args.start)
            else:
                from bench.learning_rates import short_template
                out.mkdir(parents=True, exist_ok=True)
                model = str(out / "model")
                if not os.path.exists(model):
                    short_template(args.model_path, model)
                common = {"env": "equations", "dtype": "bfloat16", "save_every": 5}
                curves = real_seed(Parts(out, seed, end, common), model)
            rows.append(row_of(curves, seed))
    except Later:
        print(json.dumps({"later": True, "seeds_done": len(rows)}))
        return
    result = {"command": "python " + " ".join(sys.argv), "rows": rows,
              "date": datetime.date.today().isoformat(),
              "machine": f"{os.cpu_count()} cores, no GPU"}
    RESULTS.mkdir(parents=True, exist_ok=True)
    draw(rows, RESULTS / f"{name}.svg")
    print(json.dumps(write_json(RESULTS / f"{name}.json", result, args)))


if __name__ == "__main__":
    main()
