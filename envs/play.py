"""Play an environment in the terminal: see what the model would see, and write its turns.

    python -m envs.play equations
    python -m envs.play my_env.py:MyEnv --tasks tasks.jsonl --env_options level=3

A turn is a call, divide_terms(terms="3") or in JSON {"name": ..., "arguments": {...}}, or an answer
in plain text. Ctrl-D ends.
"""
import argparse
import json
import re

import envs
from envs.calls import shorten
from envs.session import Session, Watch
from episodes.tasks import load_tasks
from experiment.errors import EnvironmentFault, UserError, printable
from llm.tool_calls import parse_tool_calls

PYTHON_CALL = re.compile(r"[A-Za-z_]\w*\(.*\)", re.S)


class Setup:
    """An environment with the options and tasks that a command line names. Raises UserError."""

    def __init__(self, flags: argparse.Namespace):
        self.name, self.dataset, self.seed = flags.env, flags.tasks, flags.seed
        self.options = envs.options_of(flags)
        self.cls = envs.with_options(envs.load(flags.env), self.options)
        self.limits = envs.Limits(**envs.limits(flags.env))

    @property
    def makes_tasks(self) -> bool:
        return hasattr(self.cls, "_tasks")

    def tasks(self, split: str, n: int) -> list[dict]:
        """Return at most n tasks. Where `reset` needs no argument they may all be the same."""
        if not (self.dataset or self.makes_tasks or envs.needed(self.cls)):
            return [dict(self.options)] * n
        return load_tasks(self.name, split, n, self.seed, self.dataset, env_options=self.options)


class Game:
    """One episode that no model plays. Its methods raise EnvironmentFault.

    Args:
        env: an instance to use again; a new one is made without it.

    Attributes:
        seen: what the player was shown: the question, and then results and replies.
        record: all that happened, to compare with another game.
        over: True once the environment or the number of turns has ended the episode.
        score: then the reward, its parts, and whether the task was solved.
    """

    def __init__(self, setup: Setup, task: dict, env=None):
        self.limits = setup.limits
        make = (lambda: env) if env else setup.cls
        self.session = Session(Watch(self.limits.tool_timeout), setup.name, make, task)
        question, self.system_prompt, self.turns_left = self.session.start()
        self.seen = [question]
        self.record = [self.system_prompt, question]
        self.over = False

    def take_turn(self, text: str, calls: list[dict]) -> list[tuple]:
        """Play a turn. Return what is shown after it, as pairs of text and gain of reward."""
        if calls:
            self.session.submit(calls)
            shown = [(shorten(result, 3 * self.limits.max_tool_tokens), gain)
                     for result, _, gain in self.session.results()]
        else:
            shown = [self.session.reply(text)]
            self.over = shown[0][0] is None
        self.turns_left -= 1
        self.over = self.over or self.session.done or not self.turns_left
        self.seen += [result for result, _ in shown if result is not None]
        self.record += [text, calls, shown]
        if self.over:
            self.score = self.session.score()
            self.record.append(self.score)
        return shown


def read_turn(line: str) -> tuple[str, list[dict], list[str]]:
    """Return the text, the calls, and an error for each call that cannot be read."""
    line = line.strip()
    return parse_tool_calls(f"[{line}]" if PYTHON_CALL.fullmatch(line) else line)


def play(game: Game):
    """Let the person at the terminal play an episode. EOFError: it was Ctrl-D."""
    print(f"\nSystem: {printable(game.system_prompt or '')}\nUser: {printable(game.seen[0])}")
    while not game.over:
        text, calls, errors = read_turn(input("You: "))
        for error in errors:
            print(printable(error))
        if errors and not calls:
            continue
        for result, gain in game.take_turn(text, calls):
            print(f"{printable(result or 'The end.')}   [reward {gain:+g}]")
    total, parts, solved = game.score
    print("solved" if solved else "not solved", f"reward {total:g}", parts or "", sep="; ")


def main(doc: str, command, argv=None):
    """Run command(setup) for the environment that the command line names, and exit."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("env", help="a name, path/to/file.py:Class or package:name")
    parser.add_argument("--tasks", help="task file; default: the environment's own tasks")
    parser.add_argument("--env_options", help="name=value,...: options of the environment")
    parser.add_argument("--unsafe_code", action="store_true",
                        help="run the model's Python code with NO protection")
    parser.add_argument("--seed", type=int, default=0, help="of the tasks")
    try:
        command(Setup(parser.parse_args(argv)))
    except (UserError, EnvironmentFault) as error:
        parser.error(str(error))


def at_terminal(setup: Setup):
    """Play one task after the other until Ctrl-D."""
    for schema in envs.schemas(setup.cls):
        print(json.dumps(schema))
    try:
        for task in setup.tasks("train", 100):
            play(Game(setup, task))
    except EOFError:
        print()


if __name__ == "__main__":
    main(__doc__, at_terminal)
