"""GSM8K with a real model and a calculator, on a laptop: untrained, after SFT, after GRPO, then talk to it.

    python ../shared/real/get_smollm2.py .real/smollm2
    python bench/gsm8k.py                                   all stages, one after the other
    python bench/gsm8k.py --stages sft grpo_0               some of them; the others are read where they are done

Stages: `sft` (the written solutions as tool calls), `scan` (which training problems does that model solve greedily?),
`grpo_S` (from there, seed S), `test_untrained`, `test_sft`, `test_grpo_S` (held-out problems: samples at temperature 1,
and greedy), `talk_sft`, `talk_grpo_0` (a chat about ten held-out problems). A stage that was stopped continues where it
was. SmolLM2-135M gets the tiny model's short chat template, as in bench/real_model.py: tools as text would take a third
of every episode.

A group in which all episodes or none are right teaches nothing, and one sample in fifty of this small model is right at
temperature 1. So GRPO trains on those of the first --scan training problems (in an order of its own) that the
model solves greedily. With --scan 0 it trains on problems of at most --calculations calculations, --success_band
replaces groups that teach nothing, and --dense pays intermediate results too: ways that did not help (bench/README.md).

Writes bench/results/gsm8k.json and gsm8k_talk_NAME.txt; the last line is JSON.
"""
import argparse
import datetime
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from bench.learning import RESULTS, wilson, write_json  # noqa: E402
from envs.gsm8k import GSM8K, calculator, true_calculations  # noqa: E402

DATA = ROOT.parent / "shared" / "data" / "gsm8k"
LENGTHS = ["--max_new_tokens", "160", "--max_tokens", "768"]  # a demonstration has 442 tokens on average
DTYPE = ["--dtype", "bfloat16"]  # of every stage, so that the policy that was trained is the one that is tested


class Dense(GSM8K):
    """GSM8K that pays 0.1, too, for each result of the calculator that the written solution has."""

    def reset(self, question: str, answer: str, **_) -> str:
        first = super().reset(question, answer)
        self._wanted = [calculator(expression) for expression in self._plan]
        return first

    def calculator(self, expression: str) -> str:
        result = super().calculator(expression)
        if result in self._wanted:
            self._wanted.remove(result)
            self.reward += 0.1
        return result

    calculator.__doc__ = GSM8K.calculator.__doc__  # the model reads it

    def _grade(self, values):
        paid = self.reward
        reply = super()._grade(values)
        self.reward += paid
        return reply

    def _check(self) -> bool:
        return self.reward >= 1.0  # a solution has at most nine calculations


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_path", default=".real/smollm2")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of train.jsonl and test.jsonl")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gsm8k")
    parser.add_argument("--stages", nargs="*", help="default: all")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1], help="of GRPO")
    parser.add_argument("--sft_steps", type=int, default=220, help="of 16 solutions; 432 are one epoch")
    parser.add_argument("--scan", type=int, default=1600, help="training problems; GRPO trains on the solved ones")
    parser.add_argument("--grpo_steps", type=int, default=40)
    parser.add_argument("--calculations", type=int, default=2, help="of a GRPO problem, at most, with --scan 0")
    parser.add_argument("--group_size", type=int, default=8)
    parser.add_argument("--tasks_per_step", type=int, default=8)
    parser.add_argument("--learning_rate", type=float, default=3e-4, help="of GRPO")
    parser.add_argument("--temperature", type=float, default=1.0, help="of GRPO's episodes")
    parser.add_argument("--success_band", action="store_true")
    parser.add_argument("--dense", action="store_true", help="GRPO's reward is that of `Dense`")
    parser.add_argument("--problems", type=int, default=400, help="held out")
    parser.add_argument("--samples", type=int, default=8, help="of each problem at temperature 1")
    return parser.parse_args()


# --------------------------------------------------------------------------------------------------------------- stages
def run(*words):
    """Run a program of the project to its end, from the checkpoint of an earlier try if there is one."""
    folder = Path(words[words.index("--output_dir") + 1])
    if (folder / "config.yaml").exists():
        words = [words[0], "--config", str(folder / "config.yaml"), "--resume"]
    subprocess.run([sys.executable, *map(str, words)], check=True, cwd=ROOT)


def sft(args):
    """Imitate the written solutions of the training split as tool calls."""
    from bench.learning_rates import short_template
    model = short_template(args.model_path, str(args.out / "model"))
    run("sft.py", "--model_path", model, "--env", "gsm8k", "--dataset", args.data / "train.jsonl",
        "--max_samples", 7473, "--lora_r", 32, "--learning_rate", 1e-3, "--batch_size", 16,
        "--gradient_accumulation_steps", 1,
        "--max_steps", args.sft_steps, "--eval_tasks", 0, *DTYPE, "--output_dir", args.out / "sft")


def scan(args):
    """Play training problems greedily after SFT, and write those that are solved, to be GRPO's."""
    lines = (args.data / "train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    random.Random(8).shuffle(lines)
    problems, episodes = args.out / "scan_problems.jsonl", args.out / "scan.jsonl"
    problems.write_text("".join(lines[:args.scan]), encoding="utf-8")
    play(args.out / "sft", problems, args.scan, episodes, "--temperature", 0)
    tasks = [t.info["task"] for t in read(episodes) if t.info["success"]]
    (args.out / "solved.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks), encoding="utf-8")


def grpo(args, seed):
    """Continue the adapter of SFT with GRPO on the training problems that it solves, or on the easier ones."""
    tasks = args.out / ("solved.jsonl" if args.scan else "easy.jsonl")
    if not args.scan:
        with open(args.data / "train.jsonl", encoding="utf-8") as file:
            lines = [line for line in file
                     if 1 <= len(true_calculations(json.loads(line)["answer"])) <= args.calculations]
        tasks.write_text("".join(lines), encoding="utf-8")
    env = "bench/gsm8k.py:Dense" if args.dense else "gsm8k"
    # With --eval_dataset, no row of --dataset is held out.
    run("grpo.py", "--model_path", args.out / "sft", "--env", env, "--dataset", tasks,
        "--eval_dataset", args.data / "test.jsonl", *LENGTHS, *DTYPE,
        *(["--success_rate_lb", 0.01, "--success_rate_ub", 0.99] if args.success_band else []),
        "--tasks_per_step", args.tasks_per_step, "--group_size", args.group_size, "--batch_size", 8,
        "--max_steps", args.grpo_steps, "--learning_rate", args.learning_rate, "--temperature", args.temperature,
        "--eval_tasks", 0, "--seed", seed, "--save_every", 2, "--output_dir", args.out / f"grpo_{seed}")


def test(args, name):
    """Play the held-out problems, `samples` times at temperature 1 and once greedily; write the episodes."""
    path = args.out / ("model" if name == "untrained" else name)
    for mode, words in {"sampled": ["--group_size", args.samples], "greedy": ["--temperature", 0]}.items():
        play(path, args.data / "test.jsonl", args.problems, args.out / f"{name}_{mode}.jsonl", *words)


def play(model_path, problems, n, episodes, *words):
    """Play n problems of a file with agent.py, and write the episodes, unless they are there."""
    if is_played(episodes):
        return
    # As --eval_dataset all rows of the file are held out; as --dataset a tenth would be left out.
    words = ["agent.py", "--model_path", model_path, "--env", "gsm8k", "--eval_dataset", problems, "--split", "test",
             "--num_tasks", n, *LENGTHS, *DTYPE, "--output", f"{episodes}.part", *words]
    subprocess.run([sys.executable, *map(str, words)], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    os.rename(f"{episodes}.part", episodes)


def is_played(episodes):
    """True if a file of episodes is there. What agent.py keeps when it is stopped has another name."""
    return episodes.exists()


def read(episodes):
    """Return the episodes of a file."""
    from episodes import trajectory_of
    with open(episodes, encoding="utf-8") as file:
        return [trajectory_of(json.loads(line)) for line in file]


def talk(args, name):
    """Ask the agent ten held-out problems by ten empty lines in the chat; write what the terminal shows."""
    done = subprocess.run(
        [sys.executable, "agent.py", "--model_path", str(args.out / name), "--env", "gsm8k", "--dataset",
         str(args.data / "test.jsonl"), "--temperature", "0", "--seed", "1", *LENGTHS, *DTYPE],
        input="\n" * 10, text=True, capture_output=True, check=True, cwd=ROOT)
    (RESULTS / f"gsm8k_talk_{name}.txt").write_text(done.stdout, encoding="utf-8")


# -------------------------------------------------------------------------------------------------------------- figures
def figures(args, name):
    """Return what the episodes of a tested model show, or None if they are not played yet."""
    from core.data import pass_at_k, summarise
    files = [args.out / f"{name}_{mode}.jsonl" for mode in ("sampled", "greedy")]
    if not all(map(is_played, files)):
        return None
    sampled, greedy = map(read, files)
    groups = {}
    for t in sampled:
        groups.setdefault(t.group_id, []).append(t.info["success"])
    solved = np.array(list(groups.values()))  # (problems, samples)
    # Samples of a problem are not independent: draw problems, not episodes.
    rng = np.random.default_rng(0)
    means = [solved[rng.integers(len(solved), size=len(solved))].mean() for _ in range(10_000)]
    passes, summary, right = pass_at_k(sampled), summarise(sampled), sum(t.info["success"] for t in greedy)
    k = solved.shape[1]
    return {"problems": len(solved), "samples": k, "pass@1": passes["pass@1"],
            "pass@1 bootstrap": np.percentile(means, [2.5, 97.5]).round(4).tolist(),
            "pass@1 wilson of the episodes": wilson(int(solved.sum()), solved.size),
            f"pass@{k}": passes[f"pass@{k}"], f"pass@{k} wilson": wilson(int(solved.any(1).sum()), len(solved)),
            "greedy": right / len(greedy), "greedy wilson": wilson(right, len(greedy)),
            **{key: summary[key] for key in ("actions", "turns", "structure", "completion", "tool_errors",
                                             "truncated", "tokens", "sampled_tokens")}}


def trained(folder):
    """Return steps, seconds and the curve of a run, as far as it has come."""
    if not (folder / "metrics.jsonl").exists():
        return None
    lines = [json.loads(line) for line in open(folder / "metrics.jsonl")]
    timing = [json.loads(line) for line in open(folder / "timing.jsonl")]
    names = ("loss", "success", "groups_dropped", "entropy", "truncated", "actions", "sampled_tokens", "grad_norm")
    return {"steps": len(lines), "seconds": round(sum(row["seconds"] for row in timing)),
            **{name: [line.get(name) for line in lines] for name in names if name in lines[-1]}}


def main():
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    runs = [f"grpo_{seed}" for seed in args.seeds]
    stages = {"sft": lambda: sft(args), "test_untrained": lambda: test(args, "untrained"),
              "test_sft": lambda: test(args, "sft"), "scan": lambda: scan(args) if args.scan else None}
    for name, seed in zip(runs, args.seeds):
        stages[name] = lambda seed=seed: grpo(args, seed)
        stages[f"test_{name}"] = lambda name=name: test(args, name)
    for name in ("sft", runs[0]):
        stages[f"talk_{name}"] = lambda name=name: talk(args, name)
    for name in args.stages or stages:
        stages[name]()
    result = {"command": "python " + " ".join(sys.argv), "date": datetime.date.today().isoformat(),
              "machine": f"{os.cpu_count()} shared cores, no GPU",
              "trained": {name: trained(args.out / name) for name in ("sft", *runs)},
              "held_out": {name: figures(args, name) for name in ("untrained", "sft", *runs)}}
    result = write_json(RESULTS / "gsm8k.json", result, args)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
