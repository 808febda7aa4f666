"""Environments: what the agent acts in. Each is one class in one file; copy template.py.

The contract is what TRL's `environment_factory` takes: no constructor arguments;
`reset(**task) -> str | None` returns the first user message and renews all state; every other
public method with type hints and a Google-style docstring is a tool, and what it raises is its
answer to the model, but an EnvironmentFault of core.config, which ends the run; `get_reward() ->
float` is the total of the episode, and may be missing where --rewards names functions. Methods may
be async. A task's "prompt", text or messages, comes before what `reset` returns, or is left to a
`reset` that takes it and returns text. Each episode has its own instance, whose calls come from one
thread (extras/isolate: time-outs, clients that are kept).
All else is optional and invisible to TRL:

    system_prompt, max_turns    attributes
    done                        set it to True, and the episode ends
    reward                      running total written by tools; its change is the turn's reward
    options                     attribute of the class: what --env_options may set, and the
                                defaults, such as {"level": 1}; read from self or cls
    option_types                their types where the defaults say less: {"level": Literal[1, 2]}
    limits                      attribute of the class: recommended LIMITS, such as
                                {"max_new_tokens": 512, "max_tokens": 2048}
    _tasks(split, n, seed)      static: task rows of the split "train" or "test"
    _row(row)                   static: checks or converts one row of a task file, or ValueError;
                                None drops it, and "dropped_tests" in it are counted
    _conversation(row)          static: the messages in a row of sft.py --dataset, or ValueError
    _reply(text)                the user's reply to a turn without a tool call, or None to end;
                                `core.tool_calls.after_thought(text)` is it without the thought
    _expert()                   a scripted demonstrator: the calls of the next turn, as a list of
                                {"name", "arguments"}, or text; [] at the end. May raise UserError
    _check()                    true success, apart from the shaped reward
    _state()                    what the next turn is decided by, as text (--credit gigpo)
    _reward_parts               name -> float
    _files()                    of the class: the files that episodes read (extras/exact)
    _from_text(text)            static: the task row in what a person typed into a chat, or
                                ValueError; None in it is an answer that nobody knows

`--env path/to/file.py:ClassName` plays your own, `--env equations,gsm8k` several, and
`--env envs.prompts:Prompts` prompts without tools. `python -m extras.play NAME` lets you play, and
`python -m extras.check NAME` runs the test that every environment passes.
"""
import importlib
import sys
from dataclasses import dataclass, replace

from core.config import UserError, named
from envs.calls import accepts, needed, schemas, tools

__all__ = ["needed", "schemas", "tools"]  # of envs/calls.py

ENVS = {
    "equations": "envs.equations:Equations",
    "equations_hard": "envs.equations:EquationsHard",
    "gsm8k": "envs.gsm8k:GSM8K",
    "search": "envs.search:Search",
    "writing": "envs.writing:Writing",
    "business": "envs.business:Business",
    "meetings": "bench.meetings:Meetings",
}
TOOLS = {}  # that an environment may have, as {name: method_for(class)}; layers fill it
COLUMN = "column:"  # "column:env" of a task is what `reset` gets as env


@dataclass(frozen=True)
class Limits:
    """Budgets of an episode. One that it meets ends it, with this budget's name as stop_reason.

    The last two end no episode. The first three are flags. An environment's `limits` may state all
    but max_turns. What it leaves out has the default below.
    """

    max_turns: int | None = None  # assistant turns; None: what the environment states, or 8
    max_new_tokens: int = 256  # sampled tokens of one turn
    max_tokens: int = 2048  # the whole episode, prompt included
    max_tool_calls: int = 32
    max_tool_tokens: int = 512  # of all tool results of the episode
    max_tool_text: int = 4000  # characters of one result, without its middle if it is longer
    tool_timeout: float = 10.0  # seconds of one call into the environment (extras/isolate)


LIMITS = {name: value for name, value in vars(Limits()).items() if name != "max_turns"}


def __getattr__(name):
    """Return a name of the Gymnasium reading of an environment, which no training needs."""
    if name not in ("StepResult", "call", "step", "valid_actions"):
        raise AttributeError(f"envs has no {name}", obj=sys.modules[__name__])
    from envs import steps
    return getattr(steps, name)


def names_of(env_names) -> list[str]:
    """Return the names in "equations, gsm8k", or of a class or a list; none for None."""
    if env_names is None:
        return []
    return list(map(str.strip, named(env_names).split(",")))


def load(name: str) -> type:
    """Return the class of an environment.

    `name` is one of ENVS, `package.module:Class`, `path/to/file.py:Class`, or `package:name` of a
    package that extras/adapters knows. A user gives it, never data: the code behind it is run.
    """
    if name in ENVS:
        place, class_name = ENVS[name].split(":")
        return getattr(importlib.import_module(place), class_name)
    from envs.files import class_of
    return class_of(name, ENVS)


def with_options(cls, options: dict | None) -> type:
    """Return the class with those of the options that it declares, as a subclass if it has any."""
    declared = getattr(cls, "options", {})
    given = {name: value for name, value in (options or {}).items() if name in declared}
    if not given:
        return cls
    return type(cls.__name__, (cls,), {"options": declared | given, "__module__": cls.__module__})


def load_environments(tokenizer, env_names, generation_config, env_options) -> tuple[dict, dict]:
    """Return the class and the Chat of every environment, by its name."""
    # Who only loads a class needs no templates.
    from core.chat import Chat
    classes = {name: with_options(load(name), env_options) for name in names_of(env_names)}
    try:
        chats = {name: Chat(tokenizer, schemas(cls), generation_config)
                 for name, cls in classes.items()}
    except ValueError as error:
        raise UserError(str(error)) from error
    return classes, chats


def options_of(config) -> dict:
    """Return what --env_options says by name, and "unsafe_code": True where the flag is given."""
    options = {"unsafe_code": True} if config.unsafe_code else {}
    if config.env_options:
        from envs.options import parse
        classes = list(map(load, names_of(config.env)))
        options.update(parse(config.env_options, config.env, classes))
    return options


def all_have(env_names, member: str) -> bool:
    """True if every one of these environments has a member of this name."""
    return all(hasattr(load(name), member) for name in names_of(env_names))


def rewards_of(config, run=None):
    """Return None: the environments pay alone. extras/rewards returns what else pays the agents."""
    if config.rewards:
        raise UserError("--rewards needs extras/rewards")
    if not all_have(config.env, "get_reward"):
        raise UserError(f"--env {config.env}: no get_reward(): write one (envs/template.py)")


def recommended(env_names: str | None) -> dict:
    """Return the limits that the environments ("a,b") recommend, the largest; {} without any."""
    largest = {}
    for name in names_of(env_names):
        stated = getattr(load(name), "limits", {})
        # In a class that was written for TRL the name may mean something else.
        stated = LIMITS | (stated if isinstance(stated, dict) else {})
        if unknown := stated.keys() - LIMITS:
            raise UserError(f"environment {name!r}: limits names {', '.join(sorted(unknown))}; it "
                            f"may state {', '.join(LIMITS)}")
        largest = {key: max(stated[key], largest.get(key, 0)) for key in LIMITS}
    return largest


def limits_of(config) -> Limits:
    """Return the limits that a Config names, and for the rest those that its environment states."""
    return replace(Limits(**recommended(config.env)), max_turns=config.max_turns,
                   max_new_tokens=config.max_new_tokens, max_tokens=config.max_tokens)


def taken(cls, options: dict) -> dict:
    """Return those of the options, or of a task's columns, with which `reset` can be called."""
    return {name: value for name, value in options.items() if accepts(cls.reset, name)}
