"""What `python agent.py` does: chat with the agent, or let it play tasks and write the episodes.

    python agent.py --model_path runs/grpo
    python agent.py --model_path runs/grpo --num_tasks 64 --output traces.jsonl
"""
import os
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import count
from pathlib import Path

import envs
from agent import Episode, play_turns, rollout, rollout_options
from episodes.tasks import load_tasks
from envs.session import Session, Watch, load_environments
from experiment.files import replace_file, set_aside, to_json
from experiment.program import main
from experiment.seeds import mix
from experiment.config import PlayFlags, fill, flag
from experiment.data import read_yaml
from experiment.episodes import message_lines, summarise, transcript
from experiment.errors import UserError, printable
from experiment.output_folder import algorithm_of
from llm.engine import Row
from llm.loading import DTYPES, load_model
from llm.static_engine import make_engine
from lora import merged

SHOWN = 8  # episodes that are printed with --num_tasks


@dataclass(kw_only=True)
class Config(PlayFlags):
    heading = "agent"
    model_path: str = flag("tiny", "tiny, a hub id, a model folder, an adapter or an output folder")
    env: str | None = flag(None, "environment; default: that of the run that wrote the model")
    dataset: str | None = flag(None, "task file; default: the run's, or the environment's own")
    eval_dataset: str | None = flag(None, "task file for --split test; default: the run's")
    num_tasks: int = flag(0, "play this many tasks and print them, instead of chatting", low=0)
    split: str = flag("train", "tasks to train on, or held-out ones", choices=("train", "test"))
    group_size: int = 1
    output: str | None = flag(None, "with --num_tasks: write the episodes to this .jsonl")
    temperature: float = flag(1.0, "sampling temperature; 0: the most likely token",
                              above=None, low=0)
    top_k: int = flag(0, "sample among the k most likely tokens; 0: all", low=0)
    top_p: float = flag(1.0, "sample among the most likely tokens of this total probability",
                        above=0, high=1)
    dtype: str = flag("auto", "of weights; auto: the run's, or as stored", choices=tuple(DTYPES))
    seed: int = flag(0, "of tasks and sampling", low=0)
    serve: bool = flag(False, "answer requests over HTTP instead of chatting (window/server.py)")
    host: str = flag("127.0.0.1", "with --serve: the address to listen at")
    port: int = flag(8000, "with --serve: the port", low=1, high=65535)
    token: str | None = flag(None, "with --serve: what clients must send as their API key")


# ----------------------------------------------------------------------------- where to play
def settle(config: Config) -> Config:
    """Fill in what the command line left open, from the run and from the environment."""
    if config.env is None:
        config = as_the_run(config)
    return fill(config, envs.lengths(config.env))


def as_the_run(config: Config) -> Config:
    """Take environment, tasks, options and dtype of the run that wrote the model, or of none."""
    written = run_config(config.model_path)
    run = {name: value for _, name, value in read_yaml(written)} if written else {}
    if not run.get("env"):
        return replace(config, env="equations")
    if not set(envs.names_of(run["env"])) <= envs.ENVS.keys():
        # Data never chooses which code runs, and the folder may come from a stranger.
        raise UserError(f"{written}: the run played --env {run['env']}, which is not ours to run; "
                        "give --env yourself")
    if "tasks" in run:
        # sft.py and dpo.py: beside other data, all tasks are held out.
        if run.get("dataset") or run.get("trajectories"):
            run["eval_dataset"] = run["tasks"]
        run["dataset"] = run["tasks"]
    taken = {name: run[name] for name in ("env", "dataset", "eval_dataset", "env_options")
             if run.get(name) and not getattr(config, name)}
    # The policy that is played is the one that was trained, rounded alike.
    if config.dtype == "auto" and run.get("dtype") in DTYPES:
        taken["dtype"] = run["dtype"]
    words = " ".join(f"--{name} {value}" for name, value in taken.items())
    print(f"as in {written}: {printable(words)}")
    return replace(config, **taken)


def run_config(model_path: str) -> Path | None:
    """Return the config.yaml of the run that wrote a model: an output folder, or a part of it."""
    folder = Path(model_path).resolve()
    # Parts of an output folder are base/ and checkpoints/step_NNNNNN/.
    for place in (folder, folder.parent, folder.parent.parent):
        if folder.is_dir() and algorithm_of(place):
            return place / "config.yaml"
    return None


# ------------------------------------------------------------------------------------- traces
def write_traces(config: Config, model, tokenizer, tasks: list[dict]):
    """Play the tasks, print the first episodes and the summary, and write all to --output."""
    if config.output:
        check_output(config.output)
    episodes = rollout(model, tokenizer, config.env, tasks, config.group_size,
                       top_k=config.top_k, top_p=config.top_p, **rollout_options(config))
    if config.output:
        path, lines = Path(config.output), [to_json(t.to_json()) for t in episodes]
        if path.stat().st_size:
            print(f"{path}: the file that was there is now {set_aside(path)}")
        replace_file(path, "".join(lines))
    for t in episodes[:SHOWN]:
        print(transcript(t.to_json()), end="\n\n")
    print(to_json(summarise(episodes)), end="")


def check_output(path: str):
    """Raise UserError if the file cannot be written. An old one stays until there is better."""
    if os.path.islink(path) or os.path.exists(path) and not os.path.isfile(path):
        raise UserError(f"--output {path}: is no regular file")
    try:
        open(path, "a").close()
    except OSError as error:
        raise UserError(f"--output {path}: {error.strerror}") from None


# --------------------------------------------------------------------------------------- chat
def chat_with(config: Config, model, tokenizer, tasks: list[dict]):
    """Play an episode for every line that the user types, and print its turns as they come."""
    classes, chats = load_environments(tokenizer, config.env, model.generation_config)
    [(name, chat)] = chats.items()
    limits = rollout_options(config)["limits"]
    print(f"Environment {name}: {', '.join(chat.tool_names)}.\n"
          "Every question is an episode of its own: the environment starts anew, and the agent "
          "remembers nothing.\nAn empty line asks the task that is shown. Other text is asked in "
          "its place, and the tools still work on the task. Ctrl-D ends.")
    watch = Watch(limits.tool_timeout)
    with merged(model):
        engine = make_engine(model, slots=1, stop_ids=chat.stop_ids | chat.start_ids,
                        temperature=config.temperature, top_k=config.top_k, top_p=config.top_p)
        for number in count():
            session = Session(watch, name, classes[name], tasks[number % len(tasks)])
            episode = Episode(session, chat, limits, str(number))
            if not ask(episode):
                return
            if episode.can_take_turn:
                row = Row(episode.trajectory.token_ids, seed=mix(config.seed, number),
                          limit=episode.turn_budget)
                show(play_turns(engine, {row: episode}), episode)
            print(f"[{how_it_ended(episode)}]")


def ask(episode: Episode) -> bool:
    """Show the task and put the user's question in its place. Return False at the end of input."""
    messages = episode.trajectory.messages
    print(f"\nTask: {printable(messages[-1]['content'])}")
    try:
        question = input("You: ").strip()
    except EOFError:
        print()
        return False
    if question and not episode.trajectory.stop_reason:
        episode.set_prompt([*messages[:-1], {"role": "user", "content": question}])
    return True


def show(turns, episode: Episode):
    """Print the messages of the episode turn by turn."""
    shown = len(episode.trajectory.messages)
    for _ in turns:
        print(*message_lines(episode.trajectory.messages[shown:]), sep="\n", flush=True)
        shown = len(episode.trajectory.messages)


def how_it_ended(episode: Episode) -> str:
    """Return the end of the episode in words."""
    t = episode.trajectory
    if t.stop_reason == "error":
        return t.info["error"]
    if not t.stop_reason:
        limit = episode.limits.max_tokens
        return f"the prompt has {len(t.token_ids)} tokens, --max_tokens is {limit}"
    return f"{t.stop_reason}; success {t.info['success']}; reward {t.reward:.2f}"


def load_server():
    """Return window/server.py, or raise UserError without the packages that it alone needs."""
    try:
        return import_module("window.server")
    except ImportError as error:
        raise UserError(f'--serve needs "pip install fastapi uvicorn" ({error})') from None


def command(config: Config):
    """Chat with the agent, or with --num_tasks watch it work."""
    config = settle(config)
    if not config.num_tasks and len(envs.names_of(config.env)) > 1:
        raise UserError(f"--env {config.env}: chat with one environment at a time")
    tasks = load_tasks(config.env, config.split, config.num_tasks or 100, config.seed,
                       config.dataset, config.eval_dataset, config.env_options)
    model, tokenizer = load_model(config.model_path, dtype=config.dtype, train=False)
    if config.serve:
        load_server().serve(config, model, tokenizer, rollout_options(config)["limits"])
    elif config.num_tasks:
        write_traces(config, model, tokenizer, tasks)
    else:
        chat_with(config, model, tokenizer, tasks)


if __name__ == "__main__":
    main(Config, command, __doc__)
