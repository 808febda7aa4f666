"""The conformance test of an environment. Those of this project pass it, and yours gets it too:

    python -m envs.check my_env.py:MyEnv
    python -m envs.check my_env.py:MyEnv --tasks tasks.jsonl

It prints a line for each check: "pass"; "FAIL" and why; "note" for what is worth knowing and no
failure; "-" where the class lacks what the check needs. The exit status is 1 if a check failed.
"""
import re
import sys
import time
from functools import cache, partial
from random import Random

import envs
from envs.play import Game, Setup, main
from episodes.tasks import drop_seen
from experiment.errors import EnvironmentFault, UserError, first_line, printable

EPISODES = 100  # that each agent plays
REPLAYED = 10  # tasks that are played several times
TRAINING = 1000  # tasks that held-out ones are compared with
TASKS_PER_SECOND = 10_000
PASS, FAIL, NOTE, UNCHECKED = "pass", "FAIL", "note", "-"


class Subject:
    """An environment under test.

    Attributes:
        last_turn: how the expert ends a training task, as (text, calls): what to copy or guess.
    """

    def __init__(self, setup: Setup):
        self.setup = setup
        self.schemas = envs.schemas(setup.cls)
        self.held_out = setup.tasks("test", EPISODES)
        self.has_expert = hasattr(setup.cls, "_expert")
        self.last_turn = "0", []
        if self.has_expert:
            game = finish(Game(setup, setup.tasks("train", 1)[0]), expert, self)
            self.last_turn = game.record[-4], game.record[-3]

    @property
    def agents(self) -> list:
        return [expert, random_calls] if self.has_expert else [random_calls]

    @cache
    def success(self, agent) -> tuple[float, float]:
        """Return the mean reward of an agent, and the share of tasks that it solves."""
        scores = [self.play(agent, task).score for task in self.held_out]
        rewards = [reward for reward, _, _ in scores]
        solved = [solved for _, _, solved in scores]
        return sum(rewards) / len(rewards), sum(solved) / len(solved)

    def play(self, agent, task: dict, env=None) -> Game:
        """Return a game that the agent has played to its end."""
        return finish(Game(self.setup, task, env), agent, self)


def finish(game: Game, agent, subject: Subject) -> Game:
    """Let the agent play the game to its end, and return it."""
    while not game.over:
        game.take_turn(*agent(game, subject))
    return game


# ----------------------------------------------------- agents: the next turn, as (text, calls)
def expert(game, _):
    return game.session.expert()


def does_nothing(game, _):
    return "", []


def repeats_the_question(game, _):
    return game.seen[0], []


def answers_at_once(_, subject):
    """Give the answer to another task."""
    return subject.last_turn


def random_calls(game, subject, avoid=()):
    """Call any tool with any arguments, or without tools say any word."""
    rng = Random(f"{game.session.task} {len(game.record)}")
    words = re.findall(r"[\w./-]+", " ".join(game.seen)) or ["0"]
    tools = [schema["function"] for schema in subject.schemas]
    tools = [tool for tool in tools if tool["name"] not in avoid] or tools
    if not tools:
        return rng.choice(words), []
    tool = rng.choice(tools)
    arguments = {name: any_value(schema, words, rng)
                 for name, schema in tool["parameters"]["properties"].items()}
    return "", [{"name": tool["name"], "arguments": arguments}]


def any_value(schema: dict, words: list[str], rng: Random):
    """Return a value that a JSON schema allows; texts and whole numbers may be what was seen."""
    numbers = [int(word) for word in words if re.fullmatch("-?[0-9]{1,9}", word)]
    match schema.get("type"):
        case _ if "enum" in schema:
            return rng.choice(schema["enum"])
        case "integer":
            return rng.choice([*range(10), rng.randint(-99, 99), *numbers])
        case "number":
            return rng.uniform(-99, 99)
        case "boolean":
            return rng.random() < 0.5
        case "array":
            return [any_value(schema.get("items", {}), words, rng)]
        case "object":
            return {}
    return rng.choice(words)


def copies_what_it_saw(game, subject):
    """Call any tool, then put its result, whole, where the answer belongs."""
    text, calls = subject.last_turn
    if len(game.seen) == 1 and subject.schemas:
        return random_calls(game, subject, avoid=[call["name"] for call in calls])
    copied = []
    for call in calls:
        arguments = {name: game.seen[-1] if isinstance(value, str) else value
                     for name, value in call["arguments"].items()}
        copied.append({"name": call["name"], "arguments": arguments})
    return text and game.seen[-1], copied


# ----------------------------------------------------------- checks: each returns a verdict and why
def check_schemas(subject):
    return PASS, ", ".join(schema["function"]["name"] for schema in subject.schemas) or "no tools"


def check_determinism(subject):
    setup = subject.setup
    if setup.tasks("train", REPLAYED) != setup.tasks("train", REPLAYED):
        return FAIL, "_tasks() returns other tasks when it is asked again with the same seed"
    for agent in subject.agents:
        for task in subject.held_out[:REPLAYED]:
            first, second = (subject.play(agent, task).record for _ in range(2))
            if first != second:
                return FAIL, difference(task, first, second)
    return PASS, ""


def check_isolation(subject):
    """Play a task in an instance that has played another one, and in turns with another one."""
    tasks = subject.held_out[:REPLAYED + 1]
    for agent in subject.agents:
        for task, other in zip(tasks, tasks[1:]):
            alone = subject.play(agent, task).record
            env = subject.setup.cls()
            subject.play(agent, other, env)
            again = subject.play(agent, task, env).record
            games = [Game(subject.setup, task), Game(subject.setup, other)]
            while not games[0].over:
                for game in games:
                    if not game.over:
                        game.take_turn(*agent(game, subject))
            for record in (again, games[0].record):
                if record != alone:
                    return FAIL, difference(task, alone, record)
    return PASS, ""


def difference(task, first, second) -> str:
    """Return in words where the records of two games differ."""
    pairs = [(a, b) for a, b in zip(first, second) if a != b] or [(len(first), len(second))]
    return f"task {task}: once {pairs[0][0]!r:.80}, then {pairs[0][1]!r:.80}"


def check_split(subject):
    if not (subject.setup.makes_tasks or subject.setup.dataset):
        return UNCHECKED, "no _tasks(): not checked"
    training = subject.setup.tasks("train", TRAINING)
    kept = drop_seen(subject.held_out, training)
    if len(kept) < len(subject.held_out):
        count = len(subject.held_out) - len(kept)
        return FAIL, f"{count} of {len(subject.held_out)} test tasks are also training tasks"
    asked = {Game(subject.setup, task).seen[0] for task in training}
    again = [task for task in kept if Game(subject.setup, task).seen[0] in asked]
    if again and len(asked) > 1:
        return NOTE, f"{len(again)} of {len(kept)} test tasks begin like a training task: {again[0]}"
    return PASS, f"{len(kept)} test tasks, {len(training)} training tasks"


def check_speed(subject):
    if not subject.setup.makes_tasks or subject.setup.dataset:
        return UNCHECKED, "no _tasks(): not checked"
    began = time.perf_counter()
    rate = len(subject.setup.tasks("train", TRAINING)) / (time.perf_counter() - began)
    return PASS if rate >= TASKS_PER_SECOND else NOTE, f"{rate:,.0f} tasks a second"


def check_expert(subject):
    if not subject.has_expert:
        return UNCHECKED, "no expert: not checked"
    _, solved = subject.success(expert)
    return PASS if solved >= 0.95 else FAIL, f"solves {solved:.0%}"


def check_random(subject):
    _, solved = subject.success(random_calls)
    return PASS if solved <= 0.3 else FAIL, f"solves {solved:.0%}"


def check_lazy(agent, subject):
    reward, solved = subject.success(agent)
    if not subject.has_expert:
        return UNCHECKED, "no expert: not checked"
    honest, _ = subject.success(expert)
    words = f"mean reward {reward:.3g}, the expert's {honest:.3g}; solves {solved:.0%}"
    return PASS if reward < honest else FAIL, words


CHECKS = {
    "tool schemas are valid": check_schemas,
    "the same task is the same episode": check_determinism,
    "no state is shared between episodes": check_isolation,
    "train and test tasks are disjoint": check_split,
    f"{TASKS_PER_SECOND:,} tasks a second": check_speed,
    "the expert solves 95 % or more": check_expert,
    "random calls solve 30 % or less": check_random,
    **{f"{agent.__name__.replace('_', ' ')}: pays less": partial(check_lazy, agent)
       for agent in (does_nothing, repeats_the_question, random_calls, answers_at_once,
                     copies_what_it_saw)},
}


def verdicts(setup: Setup):
    """Yield (check, verdict, reason) for each of CHECKS. A fault of the environment is a failure."""
    subject = Subject(setup)
    for name, check in CHECKS.items():
        try:
            yield name, *check(subject)
        except (UserError, EnvironmentFault) as error:
            yield name, FAIL, first_line(error)


def print_table(setup: Setup):
    """Print the verdicts. Exit with status 1 if a check failed."""
    failed = False
    for name, verdict, reason in verdicts(setup):
        print(f"{verdict:<5} {name:<42} {printable(reason)}", flush=True)
        failed |= verdict == FAIL
    sys.exit(int(failed))


if __name__ == "__main__":
    main(__doc__, print_table)
