"""The conformance test of an environment, which those of this project pass.

    python -m extras.check my_env.py:MyEnv [--tasks tasks.jsonl]

It prints a line for each check: "pass"; "FAIL" and why; "-" for what cannot be checked. The exit
status is 1 if a check failed.
"""
import json
import os
import re
import subprocess
import sys
from functools import cache, cached_property
from itertools import product, zip_longest
from random import Random
from statistics import fmean

import envs
from extras.play import Config, Game, Setup, run
from envs.tasks import drop_seen
from core.config import EnvironmentFault, UserError, first_line, printable
from core.data import to_json

EPISODES = 100  # that each agent plays
REPLAYED = 10  # tasks that are played a second time
TRAINING = 1000  # tasks that the held-out ones are compared with
# Another process runs this, with another seed for the hashes of text.
TASKS_AGAIN = """
import json, sys, extras
from envs.tasks import load_tasks
from core.data import to_json
print(to_json(load_tasks(*json.loads(sys.argv[1]))), end="")
"""


class Conformance:
    """The test of one environment.

    An agent returns the next turn of a game, as text and calls. A check returns whether it is
    passed, and why.
    """

    def __init__(self, setup: Setup):
        self.setup = setup
        self.held_out = setup.tasks("test", EPISODES)

    @property
    def lacks_rows(self) -> bool:
        """True if the tasks are empty: they are of no file, and the environment makes none."""
        return not (self.setup.config.tasks or hasattr(self.setup.cls, "_tasks"))

    @cached_property
    def tools(self) -> list[dict]:
        return [schema["function"] for schema in envs.schemas(self.setup.cls)]

    def play(self, agent, task: dict) -> Game:
        """Return a game that the agent has played to its end."""
        game = Game(self.setup, task)
        while not game.over:
            game.take_turn(*agent(game))
        # A tool that never works is no fault of the agents.
        self.setup.watch.check()
        return game

    @cache
    def mean_score(self, agent) -> tuple[float, float]:
        """Return the mean reward of an agent, and the share of tasks that it solves."""
        rewards, _, solved = zip(*(self.play(agent, task).score for task in self.held_out))
        return fmean(rewards), fmean(solved)

    def expert(self, game):
        return game.session.expert()

    def doing_nothing(self, game):
        return "", []

    def repeating_the_question(self, game):
        return game.seen[0], []

    @cached_property
    def last_turn(self) -> tuple[str, list[dict]]:
        """The last turn of the expert in a training task."""
        [task] = self.setup.tasks("train", 1)
        return self.play(self.expert, task).record[-2][:2]

    def answering_at_once(self, game):
        """Give the answer to another task."""
        return self.last_turn

    def random_calls(self, game, but=()):
        """Call any tool with any arguments. Where there is no tool, say any word.

        but: names of tools that are called only where there are no others.
        """
        rng = Random(f"{game.session.task} {len(game.record)}")
        words = re.findall(r"[\w./-]+", " ".join(game.seen)) or ["0"]
        if not self.tools:
            return rng.choice(words), []
        tool = rng.choice([tool for tool in self.tools if tool["name"] not in but] or self.tools)
        arguments = {}
        for name, schema in tool["parameters"]["properties"].items():
            arguments[name] = any_value(schema, words, rng)
        return "", [{"name": tool["name"], "arguments": arguments}]

    def copying_tool_output(self, game):
        """Call any tool, then put its result, whole, where the answer belongs."""
        text, calls = self.last_turn
        if len(game.seen) == 1:
            # The tool that takes the answer has nothing to copy.
            return self.random_calls(game, but=[call["name"] for call in calls])
        copied = [{**call, "arguments": dict.fromkeys(call["arguments"], game.seen[-1])}
                  for call in calls]
        return game.seen[-1] if text else "", copied

    def check_schemas(self):
        return True, ", ".join(tool["name"] for tool in self.tools) or "no tools"

    def check_replay(self, replay):
        """Check that replay(agent, task) is the same episode as the task alone."""
        agents = [self.random_calls]
        if not self.missing("_expert"):
            agents.append(self.expert)
        for agent, task in product(agents, self.held_out[:REPLAYED]):
            first = self.play(agent, task).record
            for a, b in zip_longest(first, replay(agent, task).record):
                if a != b:
                    texts = repr(a), repr(b)
                    start = max(len(os.path.commonprefix(texts)) - 40, 0)
                    once, then = (text[start:start + 80] for text in texts)
                    return False, f"task {task!r:.80}: once {once}, then {then}"
        return True, f"{len(self.held_out[:REPLAYED])} tasks"

    def among_others(self, agent, task):
        """Play a task in an instance that has played another one, in turns with that one again."""
        other = self.held_out[-1]
        before = self.play(agent, other)
        games = [Game(self.setup, task, before), Game(self.setup, other)]
        while playing := [game for game in games if not game.over]:
            for game in playing:
                game.take_turn(*agent(game))
        return games[0]

    def check_success(self, agent, low, high):
        _, solved = self.mean_score(agent)
        reason = f"solves {solved:.0%}"
        if solved < low:
            # What the tools told it in the first task may be why.
            for text in self.play(agent, self.held_out[0]).seen:
                if text.startswith("error: "):
                    reason += f"; {first_line(text)}"
                    break
        return low <= solved <= high, reason

    def check_seed(self):
        """Check that the tasks do not depend on time, on chance or on Python's hash of text."""
        if self.setup.tasks("test", EPISODES) != self.held_out:
            return False, "asked twice"
        config = self.setup.config
        asked = [config.env, "test", EPISODES, config.seed, None, None, envs.options_of(config)]
        command = [sys.executable, "-c", TASKS_AGAIN, json.dumps(asked)]
        path = os.pathsep.join(sys.path)
        other = subprocess.run(command, capture_output=True, text=True, env={
            **os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "random"})
        if other.returncode:
            return False, f"in another process: {(other.stderr.splitlines() or [''])[-1]}"
        # Before this line the environment may print others.
        tasks = json.loads(other.stdout.splitlines()[-1])
        return tasks == json.loads(to_json(self.held_out)), "asked in two processes"

    def check_split(self):
        training = self.setup.tasks("train", TRAINING)
        unseen = drop_seen(self.held_out, training)
        questions = {Game(self.setup, task).seen[0] for task in training}
        known = sum(Game(self.setup, task).seen[0] in questions for task in self.held_out)
        return len(unseen) == len(self.held_out), (
            f"{len(unseen)} test tasks are new; of {known} the first message is also in training")

    def check_pay(self, agent):
        """Check that the agent is paid less than the expert."""
        reward, solved = self.mean_score(agent)
        honest, _ = self.mean_score(self.expert)
        words = f"mean reward {reward:.3g}, the expert's {honest:.3g}; solves {solved:.0%}"
        return reward < honest, words

    @cache
    def missing(self, needed: str) -> str | None:
        """Return why there is nothing to check where this method is needed, or None if there is.

        An expert that raises UserError in its first turn counts as missing.
        """
        if needed == "_tasks" and self.setup.config.tasks:
            return "the tasks are those of a file"
        if not hasattr(self.setup.cls, needed):
            return f"there is no {needed}"
        if needed == "_expert":
            try:
                self.expert(Game(self.setup, self.held_out[0]))
            except EnvironmentFault as fault:
                if isinstance(fault.__cause__, UserError):
                    return first_line(fault.__cause__)
        return None

    def verdicts(self):
        """Yield (check, verdict, reason). A fault of the environment is a failure."""
        # Each with the method without which there is nothing to check.
        checks = [
            ("valid tool schemas", "reset", self.check_schemas),
            ("the same task is the same episode", "reset", self.check_replay, self.play),
            ("episodes share no state", "reset", self.check_replay, self.among_others),
            ("random calls solve 30 % or less", "get_reward",
             self.check_success, self.random_calls, 0, 0.3),
            ("the same seed gives the same tasks", "_tasks", self.check_seed),
            ("train and test tasks are disjoint", "_tasks", self.check_split),
            ("the expert solves 95 % or more", "_expert", self.check_success, self.expert, 0.95, 1),
            ("doing nothing pays less", "_expert", self.check_pay, self.doing_nothing),
            ("repeating the question pays less", "_expert", self.check_pay,
             self.repeating_the_question),
            ("random calls pays less", "_expert", self.check_pay, self.random_calls),
            ("answering at once pays less", "_expert", self.check_pay, self.answering_at_once),
            ("copying tool output pays less", "_expert", self.check_pay, self.copying_tool_output)]
        for name, needed, check, *arguments in checks:
            is_passed, reason = None, self.missing(needed)
            if not reason:
                try:
                    is_passed, reason = check(*arguments)
                except (UserError, EnvironmentFault) as error:
                    is_passed, reason = False, " ".join(str(error).split())
                    if self.lacks_rows and isinstance(error.__cause__, KeyError):
                        reason += "; if reset needs a row of data, add --tasks FILE"
                    # The next check may call other tools.
                    self.setup.watch.broken = None
            yield name, {None: "-", True: "pass", False: "FAIL"}[is_passed], reason


def any_value(schema: dict, words: list[str], rng: Random):
    """Return a value that a JSON schema allows. Text is one of the words."""
    if "enum" in schema:
        return rng.choice(schema["enum"])
    if "items" in schema:
        return [any_value(schema["items"], words, rng)]
    values = {"integer": rng.choice([*range(10), -1, 99]), "number": rng.uniform(-99, 99),
              "boolean": rng.random() < 0.5, "array": [], "object": {}}
    return values.get(str(schema.get("type")), rng.choice(words))


def command(config: Config):
    """Print the verdicts, and exit with status 1 if a check failed."""
    failed = False
    setup = Setup(config)
    for name, verdict, reason in Conformance(setup).verdicts():
        print(f"{verdict:<5} {name:<35} {printable(reason)}", flush=True)
        failed |= verdict == "FAIL"
    sys.exit(failed)


if __name__ == "__main__":
    run(command, __doc__)
