"""What `python agent.py` does: chat with the agent or the plain model, or let it play tasks.

    python agent.py --model_path runs/grpo                 each line is a task for the agent
    python agent.py --model_path path/to/model             a plain chat: no run, no environment
    python agent.py --model_path runs/grpo --env none      the same, whatever the run played
    python agent.py --model_path runs/grpo --num_tasks 64 --output traces.jsonl
    python agent.py --model_path runs/grpo --serve         OpenAI's API (extras/serve/server.py)
"""
import sys
import textwrap
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import envs
from agent import Episode, load_environments, make_engine, play_turns
from envs.tasks import tasks_for
from envs.tasks import PlayFlags
from core.config import Stop, UserError, convert, fill, flag, main, mix, options, printable
from core.data import message_lines
from core.run import algorithm_of
from core.chat import Chat
from core.engine import Row
from core.model import DTYPES
from layers import load_model, sessions
from lora import merged
from extras.show.report import config_of
from extras.show.traces import Traces, play_tasks

WIDTH = 79  # of the lines that introduce an environment
# What agent.py takes from the run that wrote the model.
TAKEN = ("env", "dataset", "eval_dataset", "env_options", "fields", "max_turns", "max_new_tokens",
         "max_tokens")


@dataclass(kw_only=True)
class Config(PlayFlags):
    heading = "agent"
    model_path: str = flag("tiny", "tiny, a hub id, a model folder, an adapter or an output folder")
    env: str | None = flag(None, "environment, or none for a plain chat; default: that of the run "
                                 "that wrote the model", optional=False)
    system_prompt: str | None = flag(None, "with --env none: how every conversation begins")
    dataset: str | None = flag(None, "task file; default: the run's, or the environment's own")
    eval_dataset: str | None = flag(None, "task file for --split test; default: the run's")
    num_tasks: int = flag(0, "play this many tasks instead of chatting, and print some", low=0)
    split: str = flag("train", "tasks to train on, or held-out ones", choices=("train", "test"))
    group_size: int = 1
    output: str | None = flag(None, "with --num_tasks: write the episodes to this .jsonl")
    temperature: float = flag(1.0, "sampling temperature; 0: the most likely token",
                              above=None, low=0)
    top_k: int = flag(0, "sample among the k most likely tokens; 0: all", low=0)
    top_p: float = flag(1.0, "sample among the most likely tokens of this total probability",
                        above=0, high=1)
    dtype: str = flag("auto", "of weights; auto: the run's, or as stored", choices=DTYPES)
    seed: int = flag(0, "of tasks and sampling", low=0)
    serve: bool = flag(False, "answer requests over HTTP instead (extras/serve/server.py)")
    host: str = flag("127.0.0.1", "with --serve: the address to listen at")
    port: int = flag(8000, "with --serve: the port; 0: a free one", low=0, high=65535)
    token: str | None = flag(None, "with --serve: what clients must send as their API key")


def command(config: Config):
    """Chat with the agent or the plain model, or with --num_tasks watch the agent work."""
    config = settle(config)
    names = envs.names_of(config.env)
    check(config, names)
    tasks = tasks_for(config, config.split, config.num_tasks or 100)
    if config.num_tasks:
        if len(tasks) < config.num_tasks:
            print(f"note: --num_tasks {config.num_tasks}, but --split {config.split} has "
                  f"{len(tasks)} tasks")
            if config.dataset and not (config.split == "test" and config.eval_dataset):
                print("      --split test --eval_dataset FILE plays a whole file")
        model, tokenizer = load(config)
        with Traces(config.output, len(tasks) * config.group_size) as traces:
            play_tasks(config, model, tokenizer, tasks, traces)
        return
    if config.serve:
        try:
            from extras.serve.server import serve
        except ImportError as error:
            raise UserError(f'--serve needs "pip install -U fastapi uvicorn" ({error})') from None
        serve(config, load, envs.limits_of(config))
        return
    model, tokenizer = load(config)
    try:
        if names:
            chat_with_agent(config, model, tokenizer, tasks)
        else:
            chat_with_model(config, model, tokenizer)
    except Stop:
        # Ctrl-C leaves the cursor in the middle of a line.
        print()
        raise


# ------------------------------------------------------------------------- what is played
def settle(config: Config) -> Config:
    """Fill in what the command line left open. Without an environment `env` is None."""
    config = as_the_run(config)
    if config.env == "none":
        config = replace(config, env=None)
    return fill(config, envs.limits(config.env))


def as_the_run(config: Config) -> Config:
    """Take dtype, environment, tasks, options and limits of the run that wrote the model."""
    written = run_config(config.model_path)
    run = config_of(written.parent) if written else {}
    taken = {}
    if run.get("env") and config.env in (None, run["env"]):
        if not config.env and ":" in run["env"]:
            # Data never chooses which code runs, and the folder may come from a stranger.
            raise UserError(f"{written}: the run played --env {run['env']}, which is not ours to "
                            "run; give --env yourself, or --env none for a plain chat")
        if "tasks" in run:
            # sft.py and dpo.py: beside other data, all tasks are held out.
            if run.get("dataset") or run.get("trajectories"):
                run["eval_dataset"] = run["tasks"]
            run["dataset"] = run["tasks"]
        elif run.get("trajectories"):
            # reward_weighted.py learned from these, and all tasks are held out.
            run["eval_dataset"] = run.get("eval_dataset") or run.get("dataset")
        flags = options(Config)
        taken = {name: convert(run[name], flags[name], f"{written}: {name}") for name in TAKEN
                 if run.get(name) and not getattr(config, name)}
        held_out = config.eval_dataset or taken.get("eval_dataset")
        if config.split == "test" and taken.get("dataset") and not held_out:
            # Without an evaluation only sft.py holds rows out.
            if run.get("eval_tasks") == "0" and algorithm_of(written.parent) != "sft":
                raise UserError(f"--split test: {written}: with eval_tasks 0 the run held no task "
                                "out; give --eval_dataset")
    # The policy that is played is the one that was trained, in the same dtype.
    if config.dtype == "auto" and run.get("dtype") in DTYPES:
        taken["dtype"] = run["dtype"]
    sampled_at = run.get("temperature") or "1.0"
    if config.temperature == 1 and sampled_at != "1.0":
        print(f"note: the run sampled at --temperature {printable(sampled_at)}; this is at 1")
    if taken:
        words = " ".join(f"--{name} {value}" for name, value in taken.items())
        print(f"as in {written}: {printable(words)}")
    return replace(config, **taken)


def run_config(model_path: str) -> Path | None:
    """Return the config.yaml of the run that wrote a model: an output folder, or a part of it."""
    folder = Path(model_path).resolve()
    # Parts of an output folder are base/ and checkpoints/step_NNNNNN/.
    for place in (folder, *folder.parents[:2]):
        if folder.is_dir() and algorithm_of(place):
            return place / "config.yaml"
    return None


def check(config: Config, names: list[str]):
    """Raise UserError for flags that would do nothing, as without the environments `names`."""
    if len(names) > 1 and not config.num_tasks:
        raise UserError(f"--env {config.env}: chat with one environment at a time")
    for name in ("num_tasks", "dataset", "eval_dataset", "env_options"):
        if not names and getattr(config, name):
            raise UserError(f"--{name} {getattr(config, name)}: of which environment? --env names "
                            f"one of {', '.join(envs.ENVS)}, or path/to/file.py:ClassName")
    if names and config.system_prompt:
        raise UserError(f"--system_prompt: environment {config.env} has its own; --env none is a "
                        "plain chat")
    asked = ("num_tasks", "system_prompt", "temperature", "top_k", "top_p", "seed", "group_size")
    given = [f"--{name}" for name in asked if getattr(config, name) != getattr(Config, name)]
    if config.serve and given:
        raise UserError(f"--serve answers what clients ask; leave out {', '.join(given)}")
    if config.output and not config.num_tasks:
        raise UserError(f"--output {config.output}: say with --num_tasks how many tasks to play")


def load(config: Config):
    """Load the model and print what it is. Return it and its tokenizer."""
    print(f"loading {config.model_path}", flush=True)
    model, tokenizer = load_model(config.model_path, dtype=config.dtype, train=False)
    print(f"{model.num_parameters() / 1e6:,.1f} million weights, {str(model.dtype)[6:]}, on "
          f"{model.device.type}")
    return model, tokenizer


# ---------------------------------------------------------------------------- with the agent
def chat_with_agent(config: Config, model, tokenizer, tasks: list[dict]):
    """Play an episode for every line that the user types, and print its turns as they come."""
    options = envs.options_of(config)
    classes, chats = load_environments(tokenizer, config.env, model.generation_config, options)
    [(name, chat)] = chats.items()
    limits = envs.limits_of(config)
    introduce(name, classes[name], chat)
    with sessions(limits) as new_session, merged(model):
        engine = engine_for(config, model, chat)
        for number in count():
            session = new_session(name, classes[name], tasks[number % len(tasks)])
            episode = Episode(session, chat, limits, str(number))
            text = ask(f"Task: {printable(episode.trajectory.messages[-1]['content'])}\n")
            if text is None:
                return
            try:
                if text:
                    episode = asked_instead(episode, text, options, new_session)
            except ValueError as error:
                print(f"[{printable(str(error))}]")
                continue
            if episode.can_take_turn:
                row = Row(episode.trajectory.token_ids, seed=mix(config.seed, number),
                          limit=episode.turn_budget)
                show(play_turns(engine, {row: episode}), episode)
            print(f"[{how_it_ended(episode)}]")


def introduce(name: str, cls: type, chat: Chat):
    """Print what the user of a chat should know of the environment."""
    reads = "Press Enter for the task that is shown, or type one of your own."
    if not hasattr(cls, "_from_text"):
        reads = ("Press Enter for the task that is shown. Other text is asked in its place, and "
                 "the tools still work on the task.")
    for text in (f"Environment {name}: {', '.join(chat.tools)}.", reads,
                 "Every task is an episode of its own: nothing is remembered. Ctrl-D ends."):
        print(textwrap.fill(text, WIDTH))


def asked_instead(episode: Episode, text: str, options: dict, new_session) -> Episode:
    """Return the episode of what the user typed in place of the task that is shown.

    Raises ValueError if the environment cannot read it.
    """
    session = episode.session
    if hasattr(session.cls, "_from_text"):
        task = session.cls._from_text(text) | envs.taken(session.cls, options)
        session = new_session(session.name, session.cls, task)
        episode = Episode(session, episode.chat, episode.limits, episode.trajectory.group_id)
        question = episode.trajectory.messages[-1]["content"]
        if question != text:
            print(f"Task: {printable(question)}")
        return episode
    messages = episode.trajectory.messages[:-1]
    episode.set_prompt([*messages, {"role": "user", "content": text}])
    return episode


def show(turns, episode: Episode):
    """Print the messages of the episode as they come."""
    messages = episode.trajectory.messages
    shown = len(messages)
    for _ in turns:
        for line in message_lines(messages[shown:]):
            print(line, flush=True)
        shown = len(messages)


def how_it_ended(episode: Episode) -> str:
    """Return the end of the episode in words."""
    t = episode.trajectory
    if t.stop_reason == "error":
        return t.info["error"]
    if not t.stop_reason:
        limit = episode.limits.max_tokens
        return f"the prompt has {len(t.token_ids)} tokens, --max_tokens is {limit}"
    if None in episode.session.task.values():
        # A question whose right answer nobody gave is neither solved nor failed.
        return t.stop_reason
    return f"{t.stop_reason}; success {t.info['success']}; reward {t.reward:.2f}"


# ---------------------------------------------------------------------------- with the model
def chat_with_model(config: Config, model, tokenizer):
    """Hold conversations with the model alone, and print its answers as they are sampled."""
    try:
        chat = Chat(tokenizer, [], model.generation_config)
    except ValueError as error:
        raise UserError(str(error)) from error
    print("A plain chat without an environment. The conversation is remembered, and an\n"
          "empty line begins a new one. Ctrl-D ends.")
    with merged(model):
        engine = engine_for(config, model, chat)
        for number in count():
            if not hold_conversation(config, chat, engine, mix(config.seed, number)):
                return


def hold_conversation(config: Config, chat: Chat, engine, seed: int) -> bool:
    """Hold a conversation, which stays in the engine's cache, until an empty line.

    Returns False at the end of input.
    """
    row = None
    length = 0  # of the conversation, in tokens
    while text := ask():
        if row:
            ids = chat.reply(text, row.turn[-1])
        else:
            messages = [{"role": "user", "content": text}]
            if config.system_prompt:
                messages.insert(0, {"role": "system", "content": config.system_prompt})
            ids = chat.prompt(messages)
        total = length + len(ids)
        if total >= config.max_tokens:
            print(f"[that makes {total} tokens, --max_tokens is {config.max_tokens}; an empty line "
                  "begins a new conversation]")
            continue
        limit = min(config.max_new_tokens, config.max_tokens - total)
        if row:
            engine.extend(row, ids, limit)
        else:
            row = Row(ids, seed=seed, limit=limit)
            engine.add([row])
        print("Assistant: ", end="", flush=True)
        for piece in pieces(engine, chat, row):
            print(printable(piece), end="", flush=True)
        length = total + len(row.turn)
        print()
        if row.turn[-1] not in chat.stop_ids:
            print(f"[cut after {len(row.turn)} tokens; --max_new_tokens, --max_tokens]")
    if row:
        engine.release(row)
    return text is not None


def pieces(engine, chat: Chat, row: Row):
    """Yield the text of a turn piece by piece, as it is sampled."""
    shown = text = ""
    while engine.busy:
        engine.step()
        text = chat.text(row.turn)
        # The last character may still lack some of its bytes.
        whole = text.rstrip("\ufffd")
        yield whole[len(shown):]
        shown = whole
    yield text[len(shown):]


# ------------------------------------------------------------------------------ what both use
def ask(shown: str = "") -> str | None:
    """Print some lines and return what the user types then, or None at the end of input."""
    print(f"\n{shown}", end="")
    if sys.stdin.isatty():
        with suppress(ImportError):
            import readline  # noqa: F401  with it, input() edits a line
    try:
        text = input("You: ").strip()
    except EOFError:
        print()
        return None
    if not sys.stdin.isatty():
        # Nobody has seen it on a terminal.
        print(printable(text))
    return text


def engine_for(config: Config, model, chat: Chat):
    """Return an engine for one conversation at a time."""
    return make_engine(model, slots=1, tokens=config.max_tokens,
                       stop_ids=chat.end_ids, temperature=config.temperature,
                       top_k=config.top_k, top_p=config.top_p)


if __name__ == "__main__":
    main(Config, command, __doc__)
