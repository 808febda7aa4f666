"""The conformance test of an environment. Those of this project pass it, and yours gets it too:

    python -m envs.check my_env.py:MyEnv
    python -m envs.check my_env.py:MyEnv --tasks tasks.jsonl

It prints a line for each check: "pass"; "FAIL" and why; "note" for what is worth knowing and no
failure; "-" where the class lacks what the check needs. The exit status is 1 if a check failed.
"""
import re
import sys
import time
from functools import cache, cached_property, partial
from random import Random

import envs
from envs.play import Config, Game, Setup, run
from episodes.tasks import drop_seen
from experiment.errors import EnvironmentFault, UserError, first_line, printable

EPISODES = 100  # that each agent plays
REPLAYED = 10  # tasks that are played several times
TRAINING = 1000  # tasks that held-out ones are compared with
TASKS_PER_SECOND = 10_000
NO_EXPERT = "-", "no expert: not checked"
NO_TASKS = "-", "no tasks of its own: not checked"


class Subject:
    """An environment under test."""

    def __init__(self, setup: Setup):
        self.setup = setup
        self.held_out = setup.tasks("test", EPISODES)
        self.agents = [random_calls]
        if hasattr(setup.cls, "_expert"):
            self.agents.append(expert)

    @cached_property
    def tools(self) -> list[dict]:
        return [schema["function"] for schema in envs.schemas(self.setup.cls)]

    @cached_property
    def last_turn(self) -> tuple[str, list[dict]]:
        """How the expert ends a training task: the text and the calls to copy or to guess."""
        if expert not in self.agents:
            return "0", []
        return self.play(expert, self.setup.tasks("train", 1)[0]).record[-2][:2]

    def play(self, agent, task: dict, env=None) -> Game:
        """Return a game that the agent has played to its end."""
        game = Game(self.setup, task, env)
        while not game.over:
            game.take_turn(*agent(game, self))
        return game

    @cache
    def success(self, agent) -> tuple[float, float]:
        """Return the mean reward of an agent, and the share of tasks that it solves."""
        rewards, _, solved = zip(*(self.play(agent, task).score for task in self.held_out))
        return sum(rewards) / len(rewards), sum(solved) / len(solved)


# ------------------------------------------- agents: the next turn of a game, as (text, calls)
def expert(game, _):
    return game.session.expert()


def doing_nothing(game, _):
    return "", []


def repeating_the_question(game, _):
    return game.seen[0], []


def answering_at_once(game, subject):
    """Give the answer to another task."""
    return subject.last_turn


def random_calls(game, subject):
    """Call any tool with any arguments. Where there is no tool, say any word."""
    rng = Random(f"{game.session.task} {len(game.record)}")
    words = re.findall(r"[\w./-]+", " ".join(game.seen)) or ["0"]
    if not subject.tools:
        return rng.choice(words), []
    tool = rng.choice(subject.tools)
    arguments = {name: any_value(schema, words, rng)
                 for name, schema in tool["parameters"]["properties"].items()}
    return "", [{"name": tool["name"], "arguments": arguments}]


def any_value(schema: dict, words: list[str], rng: Random):
    """Return a value that a JSON schema allows. Text is one of the words."""
    if "enum" in schema:
        return rng.choice(schema["enum"])
    if "items" in schema:
        return [any_value(schema["items"], words, rng)]
    numbers = [*range(10), rng.randint(-99, 99)]
    values = {"integer": rng.choice(numbers), "number": rng.uniform(-99, 99),
              "boolean": rng.random() < 0.5, "array": [], "object": {}}
    return values.get(str(schema.get("type")), rng.choice(words))


def copying_tool_output(game, subject):
    """Call any tool, then put its result, whole, where the answer belongs."""
    if len(game.seen) == 1:
        return random_calls(game, subject)
    text, calls = subject.last_turn
    copied = [{"name": call["name"], "arguments": dict.fromkeys(call["arguments"], game.seen[-1])}
              for call in calls]
    return text and game.seen[-1], copied


# ------------------------------------------------------------ ways to play a task a second time
def again(subject, agent, task, other):
    return subject.play(agent, task)


def after_another(subject, agent, task, other):
    """Play it in an instance that has played another task, as TRL does."""
    env = subject.setup.cls()
    subject.play(agent, other, env)
    return subject.play(agent, task, env)


def beside_another(subject, agent, task, other):
    """Play it in turns with another task."""
    games = [Game(subject.setup, task), Game(subject.setup, other)]
    while playing := [game for game in games if not game.over]:
        for game in playing:
            game.take_turn(*agent(game, subject))
    return games[0]


# ---------------------------------------------------------- checks: each returns a verdict and why
def check_schemas(subject):
    return "pass", ", ".join(tool["name"] for tool in subject.tools)


def check_replay(replay, subject):
    tasks = subject.held_out[:REPLAYED]
    for agent in subject.agents:
        for task, other in zip(tasks, tasks[1:] + tasks[:1]):
            first = subject.play(agent, task).record
            second = replay(subject, agent, task, other).record
            for a, b in zip([*first, None], [*second, None]):
                if a != b:
                    return "FAIL", f"task {task!r:.80}: once {a!r:.80}, then {b!r:.80}"
    return "pass", f"{len(tasks)} tasks"


def check_split(subject):
    if not subject.setup.makes_tasks:
        return NO_TASKS
    training = subject.setup.tasks("train", TRAINING)
    seen = len(subject.held_out) - len(drop_seen(subject.held_out, training))
    if seen:
        return "FAIL", f"{seen} of {len(subject.held_out)} test tasks are training tasks"
    questions = {Game(subject.setup, task).seen[0] for task in training}
    again = [task for task in subject.held_out if Game(subject.setup, task).seen[0] in questions]
    if again and len(questions) > 1:
        return "note", f"{len(again)} test tasks begin with a question of training: {again[0]}"
    return "pass", f"{len(subject.held_out)} test tasks, {len(training)} training tasks"


def check_speed(subject):
    if not subject.setup.makes_tasks:
        return NO_TASKS
    began = time.perf_counter()
    rate = len(subject.setup.tasks("train", TRAINING)) / (time.perf_counter() - began)
    return "pass" if rate >= TASKS_PER_SECOND else "note", f"{rate:,.0f} tasks a second"


def check_success(agent, low, high, subject):
    """Check the share of tasks that the agent solves."""
    if agent not in subject.agents:
        return NO_EXPERT
    _, solved = subject.success(agent)
    return "pass" if low <= solved <= high else "FAIL", f"solves {solved:.0%}"


def check_lazy(agent, subject):
    """Check that the agent is paid less than the expert."""
    if expert not in subject.agents:
        return NO_EXPERT
    reward, solved = subject.success(agent)
    honest, _ = subject.success(expert)
    words = f"mean reward {reward:.3g}, the expert's {honest:.3g}; solves {solved:.0%}"
    return "pass" if reward < honest else "FAIL", words


LAZY = doing_nothing, repeating_the_question, random_calls, answering_at_once, copying_tool_output
CHECKS = {
    "valid tool schemas": check_schemas,
    "a task played again is the same": partial(check_replay, again),
    "the same in an instance used before": partial(check_replay, after_another),
    "the same beside another episode": partial(check_replay, beside_another),
    "train and test tasks are disjoint": check_split,
    f"{TASKS_PER_SECOND:,} tasks a second": check_speed,
    "the expert solves 95 % or more": partial(check_success, expert, 0.95, 1),
    "random calls solve 30 % or less": partial(check_success, random_calls, 0, 0.3),
    **{f"{agent.__name__.replace('_', ' ')} pays less": partial(check_lazy, agent)
       for agent in LAZY},
}


def verdicts(setup: Setup):
    """Yield (check, verdict, reason) for each of CHECKS. A fault of the environment is a failure."""
    subject = Subject(setup)
    for name, check in CHECKS.items():
        try:
            yield name, *check(subject)
        except (UserError, EnvironmentFault) as error:
            yield name, "FAIL", first_line(error)


def command(config: Config):
    """Print the verdicts, and exit with status 1 if a check failed."""
    failed = False
    for name, verdict, reason in verdicts(Setup(config)):
        print(f"{verdict:<5} {name:<38} {printable(reason)}", flush=True)
        failed |= verdict == "FAIL"
    sys.exit(failed)


if __name__ == "__main__":
    run(command, __doc__)
