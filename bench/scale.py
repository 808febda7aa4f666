"""How a GRPO step grows with group size, turns, length of tool results and length of the prompt: seconds and memory.

    python bench/scale.py                           two layers of SmolLM2's width; 10 minutes on 2 cores
    python bench/scale.py --points 2 --repeats 1    the two smallest sizes of each, to see that it runs
    OMP_NUM_THREADS=1 python bench/scale.py --clock cpu --note "..."      where others compute on the same machine

One number is varied at a time, the others stay at BASE. Episodes are scripted: every turn's tokens are forced (a call
of the tool, in the end an answer), so that a step has exactly the turns and tokens asked for; all else is grpo.py as it
is. Every point is a process of its own: the fastest of its steps counts, and its memory is the peak above what it held
when it began (on a GPU: torch's peak).

`exponent` is the slope of log(seconds or MiB) against log(size) over the three largest sizes: 1 is linear, below is
better, for work that does not grow is in it too. What may go over 1 is attention, whose work per token is its context.
So every point is measured a second time with nothing in attention's place (its output is the queries): seconds of the
rest. Writes bench/results/scale.svg and scale.json; the last line is that JSON, in it `linear_or_better`: is every
exponent at most 1 + TOLERANCE, of seconds that of the rest?
"""
import argparse
import datetime
import json
import math
import multiprocessing
import os
import re
import statistics
import sys
import tempfile
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from bench.learning import RESULTS, write_json  # noqa: E402
from bench.pictures import COLORS, figure, save  # noqa: E402
BASE = {"group_size": 4, "turns": 3, "tool_tokens": 32, "prompt_tokens": 64}
SIZES = {"group_size": [2, 4, 8, 16], "turns": [1, 2, 4, 8, 16], "tool_tokens": [16, 32, 64, 128, 256],
         "prompt_tokens": [32, 64, 128, 256, 512]}
TOLERANCE = 0.05  # what the fit of a clock may err
MEASURES = {"rollout_seconds": "rollout, s", "update_seconds": "update, s", "memory_mib": "memory, MiB",
            "rollout_rest": "rollout but for attention, s", "update_rest": "update but for attention, s"}
MUST_BE_LINEAR = ("memory_mib", "rollout_rest", "update_rest")


class Library:
    """Each call of the tool gives a page; the answer ends the episode."""

    system_prompt, played = "Read.", 0

    def reset(self, prompt_tokens: int = 1, tool_tokens: int = 1, **_) -> str:
        Library.played += 1
        self.page, self.number = " of" * tool_tokens, Library.played
        return " the" * prompt_tokens

    def read(self) -> str:
        """Read a page."""
        return self.page

    def get_reward(self) -> float:
        return float(self.number * 7919 % 101) / 101

    @staticmethod
    def _tasks(split: str, n: int, seed: int) -> list[dict]:
        return [{"number": i} for i in range(n)]


def peak_mib() -> float:
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024


def measure(point) -> dict:
    """One point, in a fresh process: its steps' seconds and memory, and what shows that it was the step asked for."""
    folder, repeats, clock, sizes, attention = point
    import torch
    from transformers import AutoTokenizer

    import agent
    import grpo
    from envs import schemas
    from extras.fast import fused, loading
    from extras.models import probe
    from core.chat import Chat
    from core.engine import Row

    def no_attention(module, query, *_, **__):
        return query.transpose(1, 2).contiguous(), None
    if not attention:
        loading.causal_attention = fused.fast_row_attention = no_attention
        probe.probe = lambda model, _: setattr(model.facts, "shares_prefix", True)  # it would find out
    tokenizer, out = AutoTokenizer.from_pretrained(folder), Path(folder) / f"run_{os.getpid()}"
    chat = Chat(tokenizer, schemas(Library))
    turns = [chat.turn("", [{"name": "read", "arguments": {}}])] * (sizes["turns"] - 1) + [chat.turn(" to", [])]
    script = [i for ids in turns for i in ids]
    agent.Row = lambda *args, **options: Row(*args, forced=script, **options)
    tasks = Path(folder) / f"tasks_{os.getpid()}.jsonl"
    tasks.write_text("".join(json.dumps({**sizes, "number": i}) + "\n" for i in range(8)))
    if clock == "cpu":
        # timing.jsonl then counts what this process computed.
        from core import run as run_module
        clock_of = SimpleNamespace(time=time.process_time, monotonic=time.process_time)
        run_module.time = agent.time = clock_of
    limits = agent.Limits(sizes["turns"], 64, 10**6, max_tool_calls=10**6, max_tool_tokens=10**6)
    grpo.rollout_options = lambda config, run, model: {
        "limits": limits, "temperature": config.temperature, "seed": config.seed, "run": run}
    began = peak_mib()
    with open(os.devnull, "w") as quiet, redirect_stdout(quiet), redirect_stderr(quiet):
        grpo.train(grpo.Config(
            model_path=folder, env=f"{__file__}:Library", dataset=str(tasks), eval_dataset=str(tasks), eval_tasks=0,
            output_dir=str(out), tasks_per_step=2, group_size=sizes["group_size"], batch_size=4, max_steps=1 + repeats,
            lora_r=8))
    timing, metrics = ([json.loads(line) for line in (out / name).read_text().splitlines()][1:]
                       for name in ("timing.jsonl", "metrics.jsonl"))
    assert all(m["turns"] == sizes["turns"] and m["completion"] == 1 for m in metrics), metrics[0]
    memory = torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else peak_mib() - began
    seconds = {name: min(t[f"{name}_seconds"] for t in timing) for name in ("rollout", "update")}
    if not attention:
        return {f"{name}_rest": value for name, value in seconds.items()}
    return {"tokens": metrics[0]["tokens"], "sampled_tokens": metrics[0]["sampled_tokens"], "memory_mib": memory,
            **{f"{name}_seconds": value for name, value in seconds.items()}}


def make_model(folder):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from core.tiny import make_tiny
    tokenizer = make_tiny()[1]
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=576, intermediate_size=1536, num_hidden_layers=2, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def exponent(sizes, values) -> float:
    """Least-squares slope of log(value) against log(size) over the last three."""
    x, y = ([math.log(v) for v in vs[-3:]] for vs in (sizes, values))
    x, y = ([v - statistics.mean(vs) for v in vs] for vs in (x, y))
    return sum(a * b for a, b in zip(x, y)) / sum(a * a for a in x)


def draw(curves, path):
    """Draw every measure against every number that is varied. A line below the dotted one grows slower than linearly."""
    picture, panels = figure(len(MEASURES), len(curves), width=2.6 * len(curves), height=2.2 * len(MEASURES), squeeze=False)
    for column, (name, curve) in enumerate(curves.items()):
        for row, (measure_name, label) in enumerate(MEASURES.items()):
            panel, values = panels[row][column], [point[measure_name] for point in curve["points"]]
            panel.plot(curve["sizes"], values, "o-")
            panel.plot([0, curve["sizes"][-1]], [0, values[-1]], ":", color=COLORS["grey"])
            panel.set_ylim(0), panel.set_xlim(0)
            panel.set_title(f"exponent {curve['exponents'][measure_name]:.2f}", fontsize=9)
            panel.set_xlabel(name.replace("_", " ")), panel.set_ylabel(label if column == 0 else "")
    save(picture, path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=5, choices=range(2, 6), help="sizes of each number")
    parser.add_argument("--repeats", type=int, default=3, help="steps that count, after one to warm up")
    parser.add_argument("--vary", nargs="+", default=list(SIZES), choices=SIZES)
    parser.add_argument("--clock", default="wall", choices=("wall", "cpu"), help="seconds of which clock")
    parser.add_argument("--note", default="", help="what else the machine was doing")
    parser.add_argument("--results", default=str(RESULTS))
    args = parser.parse_args()
    import torch

    import grpo  # noqa: F401  once, before the processes fork
    path = Path(args.results, "scale.json")
    curves = {}
    if path.exists() and len(args.vary) < len(SIZES):  # what an earlier call found of the others is kept
        curves = {k: v for k, v in json.loads(path.read_text())["curves"].items() if k not in args.vary}
    with tempfile.TemporaryDirectory() as folder:
        make_model(folder)
        for name in args.vary:
            sizes, points = SIZES[name][:args.points], []
            for size in sizes:
                points.append({})
                for attention in (True, False):
                    with multiprocessing.get_context("fork").Pool(1) as pool:
                        points[-1] |= pool.apply(
                            measure, [(folder, args.repeats, args.clock, {**BASE, name: size}, attention)])
                shown = ", ".join(f"{label} {points[-1][key]:.2f}" for key, label in MEASURES.items())
                print(f"{name} {size}: {points[-1]['tokens']:.0f} tokens an episode, {shown}", flush=True)
            curves[name] = {"sizes": sizes, "points": points, "clock": args.clock,
                            "exponents": {m: exponent(sizes, [p[m] for p in points]) for m in MEASURES}}
    worst = max(curve["exponents"][name] for curve in curves.values() for name in MUST_BE_LINEAR)
    result = {"linear_or_better": worst <= 1 + TOLERANCE, "worst_exponent": worst, "base": BASE, "curves": curves,
              "machine": {"cores": os.cpu_count(), "threads": torch.get_num_threads(), "load": os.getloadavg()[0],
                          "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
                          "note": args.note}, "torch": torch.__version__,
              "date": datetime.date.today().isoformat(),
              "command": "python bench/scale.py " + " ".join(sys.argv[1:])}
    os.makedirs(args.results, exist_ok=True)
    draw(curves, os.path.join(args.results, "scale.svg"))
    result = write_json(path, result, args)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
