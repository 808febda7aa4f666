"""Does the tiny model learn when a judge's verdict is its only reward? Three seeds of equations.

    python bench/judge.py                              all runs: 20 to 40 minutes on one core
    python bench/judge.py --only rank --seeds 0        one of them; calls add up

    environment    the reward is what envs/equations.py pays: for progress, and for the right answer
    score, rank    the reward is `judge:...` alone, in this form; `environment=0` is only logged

The judge is a rule behind OpenAI's protocol, not a language model. Its server runs in a thread of
this process. It reads the same prompts that a model would get, and judges what the transcripts
show: what is solved comes first, then what has fewer errors. So the figures say whether prompts,
verdicts, cache and credit carry the policy to the goal when the judge is right. They do not say how
often a model is right.

Prints a table, and writes bench/results/judge.json and judge.svg. The last line is JSON.
"""
import json
import re
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from bench.learning import (  # noqa: E402
    SAMPLES, Clock, arguments, exam, fingerprint, flags, interval, read_rows, report, row_file,
    series, spread, taught_base, write_row)
from bench.pictures import COLORS, figure, save  # noqa: E402

STEPS = 36  # of 8 x 8 episodes
RATE = 4e-3
RUNS = {"environment": "blue", "score": "orange", "rank": "green"}
RUBRIC = "An episode that gives the right answer comes first. Then the one with fewer errors."
SOLVED, UNSOLVED, ERROR = 1.0, 0.4, 0.1  # of the rule: a score without errors, and for each error
COSTS = "verdicts", "cached", "requests", "seconds"


# ---------------------------------------------------------------------------------------- the judge
def shown(prompt: str) -> list[tuple[bool, int]]:
    """Return (solved, errors) of each episode in a judge's prompt, as its transcript shows it."""
    episodes = re.findall(r"^\[episode \d+ (\w+)\]\n(.*?)^\[end of episode \d+ \1\]$", prompt,
                          re.S | re.M)
    seen = []
    for code, text in episodes:
        # What the agent wrote itself has no code, so it cannot look like a result.
        results = re.findall(rf"^\[{code}\] tool ?(\w*):\n(.*)$", text, re.M)
        seen.append((("state_answer", "right") in results,
                     sum(result.startswith("error") for _, result in results)))
    return seen


def verdict(prompt: str) -> list[float]:
    """Return a score for each episode in a prompt, from 0 to 1.

    One alone is scored by what it did. Of several, the best has 1 and the worst 0, and those that
    are alike share a rank.
    """
    seen = shown(prompt)
    if len(seen) == 1:
        [(solved, errors)] = seen
        return [round(max((SOLVED if solved else UNSOLVED) - ERROR * errors, 0.0), 2)]
    ranks = sorted({(solved, -errors) for solved, errors in seen})
    return [ranks.index((solved, -errors)) / max(len(ranks) - 1, 1) for solved, errors in seen]


class Handler(BaseHTTPRequestHandler):
    """What of OpenAI's API a judge is asked by."""

    def do_GET(self):
        self.send({"data": [{"id": "rule"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = json.dumps({"scores": verdict(body["messages"][0]["content"])})
        self.send({"choices": [{"message": {"content": answer}, "finish_reason": "stop"}]})

    def send(self, answer):
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


class JudgeServer(ThreadingHTTPServer):
    request_queue_size = 64  # many ask at once, and who is turned away waits a second


def serve() -> str:
    """Start the judge in a thread, and return its address."""
    server = JudgeServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}/v1"


# ----------------------------------------------------------------------------------------- the runs
def settings(steps=STEPS) -> dict:
    """Return what the figures depend on."""
    return {"run": flags("grpo", max_steps=steps, learning_rate=RATE),
            "rule": [SOLVED, UNSOLVED, ERROR, RUBRIC]}


def play(args, base, url, name, seed):
    """Train once, and write the row of the run."""
    import grpo
    from layers import load_model
    folder = Path(args.out) / f"{name}_{seed}"
    rewards = None
    if name != "environment":
        rubric = folder.with_suffix(".md")
        rubric.write_text(f"---\nurl: {url}\nform: {name}\n---\n{RUBRIC}\n")
        rewards = f"judge:{rubric},environment=0"
    clock = Clock()
    result = grpo.train(grpo.Config(
        model_path=base, env="equations", rewards=rewards, output_dir=str(folder), seed=seed,
        max_steps=args.steps, learning_rate=RATE, eval_tasks=0, overwrite=True))
    times = clock.read()
    write_row(args, name, seed, {
        **examined(load_model, folder, args.tasks), **times,
        "judge": {cost: round(result.get(f"judge/{cost}", 0), 1)
                  for cost in COSTS if rewards},
        "paid_by_environment": series(folder, "reward/environment" if rewards else "reward"),
        "training": series(folder, "success")})


def examined(load_model, folder, tasks) -> dict:
    """Return what the model in a folder reaches in the exam."""
    model, tokenizer = load_model(str(folder), dtype="float32", train=False)
    return exam(model, tokenizer, tasks)


def summarize(rows) -> dict:
    """Return what each reward leads to: success in the exam and by seed, and the judge's cost."""
    summary = {}
    for name, by_seed in rows.items():
        done = by_seed.values()
        costs = [row["judge"] for row in done]
        summary[name] = {
            "success": spread([row["success"] for row in done]),
            "by_seed": {seed: row["success"] for seed, row in by_seed.items()},
            "curve": [round(sum(step) / len(step), 4)
                      for step in zip(*(row["training"] for row in done))],
            "cpu_seconds": round(sum(row["cpu_seconds"] for row in done) / len(done), 1),
            "judge": {cost: round(sum(c[cost] for c in costs) / len(costs), 1)
                      for cost in costs[0]}}
    return summary


def table(data) -> list[list]:
    """Return the rows of the table, its head first."""
    rows = [["reward", "success before", "after", "by seed", "verdicts of a run",
             "of them known", "requests", "CPU seconds"]]
    for name, numbers in data["summary"].items():
        costs = numbers["judge"]
        asked = [f"{costs[cost]:.0f}" if costs else "" for cost in COSTS[:3]]
        rows.append([f"judge, `{name}`" if costs else name, f"{data['before']['success']:.3f}",
                     interval(numbers["success"]),
                     ", ".join(f"{value:.3f}" for value in numbers["by_seed"].values()),
                     *asked, f"{numbers['cpu_seconds']:.0f}"])
    return rows


def draw(summary, path):
    """Draw the success of the training episodes against the steps, a mean over the seeds."""
    picture, panel = figure(width=6.5, height=3.0)
    for name, color in RUNS.items():
        if name in summary:
            label = "the environment's reward" if name == "environment" else f"a judge, {name}"
            panel.plot(summary[name]["curve"], color=COLORS[color], linewidth=1.6, label=label)
    panel.set(xlabel="GRPO step", ylabel="share of episodes solved", ylim=(0, 1))
    panel.legend(loc="lower right")
    save(picture, path)


def main(argv=None):
    args = arguments(__doc__, RUNS, "judge", argv, steps=STEPS)
    from layers import load_model
    base, url = taught_base(args.out), serve()
    for seed in args.seeds:
        for name in args.only:
            if not row_file(args, name, seed).exists():
                play(args, base, url, name, seed)
    rows = read_rows(args, RUNS)  # those of earlier calls, too
    data = {"before": examined(load_model, base, args.tasks), "summary": summarize(rows)}
    Path(args.results).mkdir(parents=True, exist_ok=True)
    draw(data["summary"], Path(args.results) / "judge.svg")
    for line in table(data):
        print(*line, sep=" | ")
    report(args, "judge", settings=fingerprint(settings(args.steps)), steps=args.steps,
           judge="a rule behind OpenAI's protocol, not a language model",
           seeds=sorted({seed for by_seed in rows.values() for seed in by_seed}),
           samples=SAMPLES, **data, rows=rows)


if __name__ == "__main__":
    main()
