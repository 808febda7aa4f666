"""Environments: what the agent acts in. Each is one class in one file.

    template.py   copy it to make your own
    equations.py  equations to solve with tools: the default, and the one to read first
    gsm8k.py      word problems and a calculator, or with extras/sandbox Python
    search.py     questions over documents (corpus.py: their index; answers.py: what equals what)
    writing.py    writing to a brief; business.py: decisions
    prompts.py    rows with a prompt and no tools: --env envs.prompts:Prompts
    tasks.py      what episodes begin with, and what is held out (task_files.py: rows of files)
    files.py      imports an environment from a file
    options.py    reads --env_options, and the cells of a table of tasks
    calls.py      the tools of a class, and one call of one of them (loop.py: async ones;
                  steps.py: a step of Gymnasium)
    session.py    one environment during an episode (transcripts.py: it as lines to read)

    python -m extras.play NAME     play an environment yourself
    python -m extras.check NAME    run the test that every environment passes

The contract is what TRL's `environment_factory` takes: no constructor arguments;
`reset(**task) -> str | None` returns the first user message and renews all state; every other
public method with type hints and a Google-style docstring is a tool; `get_reward() -> float` is
the total of the episode, and may be missing where --rewards names functions. A task's "prompt",
text or messages, comes before what `reset` returns, or is left to a `reset` that takes an argument
"prompt" and returns text. All calls of an episode, the constructor's too, come from one thread.
Async ones run in a loop, and thread, that all episodes share. Episodes overlap: what one changes
of the process, such as sys.stdout, the others meet. The policy decodes while tools run, so a tool
asks a model of its own, in one thread at a time, or a server; `_reply` and --rewards may ask the
policy, because nothing decodes meanwhile. What a tool raises is its answer to the model;
after ten in a row that are no ValueError or the like (calls.BY_ARGUMENTS) the run ends, so return
what a wrong path or query leads to as text. Each episode has its own instance, and a
tempfile.TemporaryDirectory that this holds is removed with it. An instance that holds something
with a close(), such as a client, is kept and reset for a later episode, as TRL does with all. All
else is optional and invisible to TRL:

    system_prompt, max_turns    attributes
    done                        set it to True, and the episode ends
    reward                      running total written by tools; its change is the turn's reward
    options                     attribute of the class: what --env_options may set, and the
                                defaults, such as {"level": 1}; read from self or cls
    option_types                their types where those of the defaults say less, such as
                                {"level": Literal[1, 2, 3]}
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
    _reward_parts               name -> float
    _files()                    of the class: the files that episodes read, such as documents that
                                an option names; a run is not resumed on others
    _from_text(text)            static: the task row in what a person typed into a chat, or
                                ValueError; None in it is an answer that nobody knows

`--env equations,gsm8k` plays several. `--env path/to/file.py:ClassName` plays your own, and
`--env gymnasium:FrozenLake-v1` one of another package (extras/adapters).
"""
import importlib
import inspect
import os
import sys
from dataclasses import dataclass, replace

from envs.calls import accepts, needed, schemas, tools
from core.config import UserError, named, nearest

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
# Layers fill these two: environments of other packages, --env PACKAGE:NAME, as {package: make(name)
# -> class}, and tools that an environment may have, as {name: method_for(class)}.
ADAPTERS, TOOLS = {}, {}
# The layer without which an environment is not there.
NEEDED = {"code": "sandbox", "gymnasium": "adapters", "reasoning_gym": "adapters",
          "verifiers": "adapters"}
COLUMN = "column:"  # "column:env" of a task is what `reset` gets as env
LIBRARY = ("agent", "core", "envs", "episodes", "extras", "layers", "llm", "lora",
           "schooling")  # not the user's


@dataclass(frozen=True)
class Limits:
    """Budgets of an episode, which ends with the name of the one it meets as its stop_reason.

    Only max_tool_text ends nothing. After tool_timeout a tool call returns an error text; any other
    call into the environment ends the episode with "error". The first three are flags. An
    environment's `limits` may state all but max_turns. What it leaves out has the default below.
    """

    max_turns: int | None = None  # assistant turns; None: what the environment states, or 8
    max_new_tokens: int = 256  # sampled tokens of one turn
    max_tokens: int = 2048  # the whole episode, prompt included
    max_tool_calls: int = 32
    max_tool_tokens: int = 512  # of all tool results of the episode
    max_tool_text: int = 4000  # characters of one result, without its middle if it is longer
    tool_timeout: float = 10.0  # seconds of one call into the environment


LIMITS = {name: value for name, value in vars(Limits()).items() if name != "max_turns"}


def __getattr__(name):
    """Return a name of the Gymnasium reading of an environment, which no training needs."""
    if name not in ("StepResult", "call", "step", "valid_actions"):
        raise AttributeError(f"envs has no {name}", obj=sys.modules[__name__])
    from envs import steps
    return getattr(steps, name)


# ------------------------------------------------------------------------------------- loading
def names_of(env_names) -> list[str]:
    """Return the names in "equations, gsm8k", or of a class or a list; none for None."""
    return [] if env_names is None else [name.strip() for name in named(env_names).split(",")]


def load(name: str) -> type:
    """Return the class of an environment.

    Args:
        name: a name of ENVS, `package.module:Class`, `path/to/file.py:Class`, or `package:name`
            of one of ADAPTERS. A user gives it, never data: the code behind it is run.
    """
    target = ENVS.get(name, name)
    package = target.partition(":")[0]
    if package in NEEDED and package not in ADAPTERS:
        raise UserError(f"--env {name} needs extras/{NEEDED[package]}")
    if ":" not in target:
        known = f"known: {', '.join(ENVS)}, or give path/to/file.py:ClassName"
        raise UserError(f"unknown environment {name!r}; {nearest(name, ENVS, otherwise=known)}")
    place, class_name = target.rsplit(":", 1)
    if place in ADAPTERS:
        return ADAPTERS[place](class_name)
    cls = getattr(module_at(place, f"environment {name!r}"), class_name, None)
    if not inspect.isclass(cls) or not callable(getattr(cls, "reset", None)):
        raise UserError(f"environment {name!r}: {place} has no class {class_name} with reset(); a "
                        "class of a notebook or function is found in a file: --env "
                        "path/to/file.py:ClassName")
    return cls


def module_at(place: str, wanted: str):
    """Import a module, or a file that ends in .py. `wanted` opens the message of a UserError."""
    try:
        if place.endswith(".py"):
            from envs.files import import_file
            return import_file(os.path.abspath(place))
        return importlib.import_module(place)
    except (OSError, ImportError, SyntaxError, AttributeError) as error:
        package = (getattr(error, "name", None) or "").partition(".")[0]
        if isinstance(error, AttributeError):
            package = getattr(error.obj, "__name__", None)
            if package not in LIBRARY:
                raise
        hint = f"; {package} is a package of this project: rename yours"
        raise UserError(f"{wanted}: {error}{hint if package in LIBRARY else ''}") from None


def with_options(cls, options: dict | None) -> type:
    """Return the class with those of the options that it declares, as a subclass if it has any."""
    declared = getattr(cls, "options", {})
    given = {name: value for name, value in (options or {}).items() if name in declared}
    if not given:
        return cls
    return type(cls.__name__, (cls,), {"options": declared | given, "__module__": cls.__module__})


def load_environments(tokenizer, env_names, generation_config, env_options) -> tuple[dict, dict]:
    """Return the class and the Chat of every environment, by its name.

    They are those that the caller names: data never chooses which code runs. `env_options` are
    what `options_of` returns.
    """
    # Who only loads a class needs no templates.
    from core.chat import Chat
    classes = {name: with_options(load(name), env_options)
               for name in names_of(env_names)}
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
        options.update(parse(config.env_options, config.env))
    return options


def rewards_of(config):
    """Return the function that pays the agents of a rollout, or None: the environments pay alone.

    extras/rewards overrides it: --rewards names functions that pay, too.
    """
    if config.rewards:
        raise UserError("--rewards needs extras/rewards")
    if not pay_alone(config.env):
        raise UserError(f"--env {config.env}: there is no get_reward(): write one "
                        "(envs/template.py)")


def pay_alone(env_names) -> bool:
    """True if all of these environments have a get_reward()."""
    return all(hasattr(load(name), "get_reward") for name in names_of(env_names))


def limits(env_names: str | None) -> dict:
    """Return the limits of an episode that the environments ("a,b") recommend; {} without any.

    Of several environments the largest. LIMITS holds what one gets that states none.
    """
    largest = {}
    for name in names_of(env_names):
        # In a class that was written for TRL the name may mean something else.
        stated = getattr(load(name), "limits", {})
        stated = LIMITS | (stated if isinstance(stated, dict) else {})
        if unknown := stated.keys() - LIMITS:
            raise UserError(f"environment {name!r}: limits names {', '.join(sorted(unknown))}; it "
                            f"may state {', '.join(LIMITS)}; max_turns is the class's own")
        largest = {key: max(stated[key], largest.get(key, 0)) for key in LIMITS}
    return largest


def limits_of(config) -> Limits:
    """Return the limits that a Config names, and for the rest those that its environment states."""
    return replace(Limits(**limits(config.env)), max_turns=config.max_turns,
                   max_new_tokens=config.max_new_tokens, max_tokens=config.max_tokens)


def has_expert(env_names: str | None) -> bool:
    """True if all of these environments have a scripted demonstrator."""
    return all(hasattr(load(name), "_expert") for name in names_of(env_names))


def need_expert(env_names: str):
    """Raise UserError if an environment has no scripted demonstrator. The tiny model needs one."""
    for name in names_of(env_names):
        if not has_expert(name):
            raise UserError(
                f"environment {name!r} has no _expert(): nothing to learn its format from. Write "
                "one (envs/template.py has an example), imitate recorded episodes with sft.py "
                "--trajectories, or start from a real model: --model_path path/or/hub-id")


def taken(cls, options: dict) -> dict:
    """Return those of the options, or of a task's columns, with which `reset` can be called."""
    return {name: value for name, value in options.items() if accepts(cls.reset, name)}
