"""Play an environment in the terminal: see what the model would see, and write its turns.

    python -m extras.play equations
    python -m extras.play my_env.py:MyEnv --tasks tasks.jsonl --env_options level=3

A turn is a call, divide_terms(terms="3") or in JSON {"name": ..., "arguments": {...}}, or an answer
in plain text. Ctrl-D ends.
"""
import json
import re
import sys
from dataclasses import dataclass
from functools import partial

import envs
from envs.calls import shorten
from envs.tasks import EnvironmentFlags, tasks_for
from core.config import EnvironmentFault, UserError, flag, printable
from core.tool_calls import parse_tool_calls
from extras import main

PYTHON_CALL = re.compile(r"[A-Za-z_]\w*\(.*\)", re.S)


@dataclass(kw_only=True)
class Config(EnvironmentFlags):
    env: str = flag("equations", "environment; also path/to/file.py:Class. NAME is --env NAME")
    tasks: str | None = flag(None, "task file; default: the environment's own tasks")
    eval_dataset: str | None = flag(None, "file of test tasks; default: a tenth of the task file")
    seed: int = flag(0, "of the tasks", low=0)


class Setup:
    """An environment with the options and the tasks that a Config names."""

    def __init__(self, config: Config):
        self.config = config
        if config.rewards:
            raise UserError("--rewards pays a model's episodes; here the environment pays alone")
        if len(envs.names_of(config.env)) > 1:
            raise UserError(f"--env {config.env}: one environment at a time")
        self.cls = envs.with_options(envs.load(config.env), envs.options_of(config))
        self.limits = envs.Limits(**envs.recommended(config.env))
        # Here, so that `main` says which layer is missing.
        from extras.isolate import Session, Watch
        self.watch = Watch(self.limits.tool_timeout)
        self.session = partial(Session, self.watch, config.env, self.cls)

    def tasks(self, split: str, n: int) -> list[dict]:
        """Return at most n tasks."""
        return tasks_for(self.config, split, n)


class Game:
    """One episode that no model plays. Its methods raise EnvironmentFault.

    Args:
        earlier: a game whose instance is used again. Without it a new one is made.

    Attributes:
        seen: what the player was shown: the question, and then results and replies.
        record: all that happened, to compare with another game.
        over: True once the environment or the number of turns has ended the episode.
        score: then the reward, its parts, and whether the task was solved.
    """

    def __init__(self, setup: Setup, task: dict, earlier=None):
        self.limits = setup.limits
        self.session = setup.session(task)
        if earlier:
            self.session.env = earlier.session.env
            # It makes its calls in this worker's thread.
            self.session.worker = earlier.session.worker
        messages, self.turns_left = self.session.start()
        if self.turns_left < 1:
            raise EnvironmentFault(f"max_turns is {self.turns_left}, and must be at least 1")
        # A "prompt" may begin in the middle of a conversation.
        *first, question = [message["content"] for message in messages]
        self.system_prompt = "\n".join(first)
        self.seen = [question]
        self.record = [self.system_prompt, question]
        self.over = False

    def take_turn(self, text: str, calls: list[dict]) -> list[tuple]:
        """Play a turn. Return what is shown after it, as pairs of text and gain of reward."""
        if calls:
            self.session.submit(calls)
            most = min(self.limits.max_tool_text, 3 * self.limits.max_tool_tokens)
            shown = [(shorten(result, most), gain) for result, _, gain in self.session.results()]
        else:
            shown = [self.session.reply(text)]
        self.turns_left -= 1
        self.over = shown[-1][0] is None or self.session.done or not self.turns_left
        self.seen += [result for result, _ in shown if result is not None]
        self.record.append((text, calls, shown))
        if self.over:
            self.score = self.session.score()
            self.record.append(self.score)
        return shown


def play(game: Game):
    """Let the person at the terminal play an episode. Raises EOFError for Ctrl-D."""
    print(f"\nSystem: {printable(game.system_prompt)}\nUser: {printable(game.seen[0])}")
    while not game.over:
        line = input("You: ").strip()
        is_call = PYTHON_CALL.fullmatch(line)
        text, calls, errors = parse_tool_calls(f"[{line}]" if is_call else line)
        if errors or is_call and not calls:
            print("Write a call as name(argument=value).", *map(printable, errors))
            continue
        for result, gain in game.take_turn(text, calls):
            print(f"{printable(result or 'The end.')}   [reward {gain:+g}]")
    reward, parts, solved = game.score
    print(f"{'solved' if solved else 'not solved'}; reward {reward:g}", parts or "")


def command(config: Config):
    """Show the schemas of the tools, and play one task after the other until Ctrl-D."""
    setup = Setup(config)
    for schema in envs.schemas(setup.cls):
        print(json.dumps(schema))
    print("A turn is a call, name(argument=value), or an answer in plain text. Ctrl-D ends.")
    try:
        for task in setup.tasks("train", 100):
            play(Game(setup, task))
    except EOFError:
        print()


def run(command, doc: str):
    """Run command(config) as a program whose first argument may be the name of an environment."""
    if sys.argv[1:] and not sys.argv[1].startswith("-"):
        sys.argv.insert(1, "--env")
    main(Config, command, doc)


if __name__ == "__main__":
    run(command, __doc__)
