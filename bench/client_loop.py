"""Does an agent stop in the loop of a client, which ends with a turn that calls no tool?

    python grpo.py --output_dir runs/done
    python grpo.py --env bench/client_loop.py:Stops --output_dir runs/text
    python bench/client_loop.py runs/done runs/text

Each run is served by `python agent.py --serve`. A client plays held-out equations with OpenAI's
package: it runs the tools that are called, and ends with a turn that calls none, or after 25 turns.
It knows nothing of `done`. What it saw is in bench/results/client_loop.json. A turn that opens a
call and does not close it is a text, too, and ends the loop.
"""
import argparse
import json
import re
import statistics
import subprocess
import sys
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import envs  # noqa: E402
from bench.learning import RESULTS, write_json  # noqa: E402
from envs.equations import Equations  # noqa: E402

TURNS = 25
RESULT = RESULTS / "client_loop.json"


class Stops(Equations):
    """Solve a linear equation for x, state the answer, then say it in words.

    The tool that takes the answer does not end the episode. A turn of text does, which is paid.
    """

    max_turns = 5  # one more than `equations`, for the turn of text

    def reset(self, **task) -> str:
        self.stated = ""
        return super().reset(**task)

    def state_answer(self, value: str) -> str:
        """State the value of x. Then say it without a tool.

        Args:
            value: the value, such as 3 or -2/5
        """
        if self.stated:
            return "error: the answer has been stated"
        verdict = super().state_answer(value)
        self.stated, self.done = value, False
        return verdict

    def _reply(self, text: str) -> None:
        """End the episode with a turn of text, and pay it if the answer has been stated."""
        if self.stated:
            self.reward += 1.0

    def _expert(self):
        return f"x = {self.stated}" if self.stated else super()._expert()


def tool_says(env, call) -> str:
    """Return what a tool says in a client, which does not know that an episode can be over."""
    try:
        return getattr(env, call.function.name)(**json.loads(call.function.arguments))
    except Exception as error:
        return f"error: {error}"


def play(client, task, tools, seed) -> dict:
    """Play one task as a client does. Return what became of it.

    The loop ends by "words", by a "call" that cannot be read and so is a text, or by its "limit".
    """
    env = Equations()
    messages = [{"role": "system", "content": env.system_prompt},
                {"role": "user", "content": env.reset(**task)}]
    names, ended = [], "limit"
    for _ in range(TURNS):
        message = client.chat.completions.create(model="base", messages=messages, tools=tools,
                                                 seed=seed).choices[0].message
        messages.append(message)
        if not message.tool_calls:
            ended = "call" if "<tool_call>" in message.content else "words"
            break
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id,
                             "content": tool_says(env, call)})
            names.append(call.function.name)
    after = None  # calls after the answer
    if "state_answer" in names:
        after = len(names) - names.index("state_answer") - 1
    return {"solved": env.solved, "ended": ended, "after": after}


def measure(folder: str, tasks: int) -> dict:
    """Serve a run and return what a client sees in its loop."""
    import openai
    server = subprocess.Popen([sys.executable, "-u", "agent.py", "--model_path", folder, "--serve",
                               "--env", "equations", "--port", "0"], cwd=ROOT, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        url = next(filter(None, (re.search(r"http://[\d.:]+", line) for line in server.stdout)))[0]
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
        tools = envs.schemas(Equations)
        played = [play(client, task, tools, seed)
                  for seed, task in enumerate(Equations._tasks("test", tasks, 0))]
    finally:
        server.kill()
    after = [game["after"] for game in played if game["after"] is not None]
    return {
        "tasks": tasks, "turns_allowed": TURNS,
        "solved": statistics.fmean(game["solved"] for game in played),
        "answered": len(after) / tasks,
        "ended_in_words": statistics.fmean(game["ended"] == "words" for game in played),
        "ended_by_broken_call": statistics.fmean(game["ended"] == "call" for game in played),
        "never_ended": statistics.fmean(game["ended"] == "limit" for game in played),
        "calls_after_answer_mean": statistics.fmean(after) if after else None,
        "calls_after_answer_max": max(after, default=None),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", nargs="+", help="output folders, whose names name the rows")
    parser.add_argument("--tasks", type=int, default=50)
    parser.add_argument("--output", default=str(RESULT))
    given = parser.parse_args()
    result = {"command": f"python bench/client_loop.py {' '.join(given.runs)}",
              "date": date.today().isoformat(), "machine": "2 CPU cores"}
    result["runs"] = {Path(run).name: measure(run, given.tasks) for run in given.runs}
    print(json.dumps(result["runs"]))
    write_json(given.output, result, given)


if __name__ == "__main__":
    main()
