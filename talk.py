"""Chat with an agent, or play tasks and count: what `python agent.py` runs.

    python agent.py --model_path runs/grpo          chat with the agent
    python agent.py --model_path runs/grpo --num_tasks 64 --output traces.jsonl

No training needs it. extras/serve overrides it: `terminal`.
"""
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

# Imported before torch: it sets how torch's threads wait.
from core.config import DEVICES, RunFlags, UserError, auto, flag

import agent
import envs
from agent import rollout, rollout_options
from core.data import pass_at_k, summarise, to_json
from core.model import DTYPES
from envs.task_files import as_the_run
from envs.tasks import PlayFlags, tasks_for
from envs.transcripts import transcript
from layers import load_model, main, terminal


@dataclass(kw_only=True)
class Config(PlayFlags):
    heading = "agent"
    model_path: str = flag("tiny", "tiny, a hub id, a model folder, an adapter or an output folder")
    env: str | None = flag(None, "environment, or none for a plain chat; default: that of the run "
                                 "that wrote the model", optional=False)
    num_tasks: int = flag(0, "play this many tasks, print some of them, and count", low=0)
    split: str = flag("train", "tasks to train on, or held-out ones", choices=("train", "test"))
    group_size: int = 1
    output: str | None = flag(None, "with --num_tasks: write the episodes to this new .jsonl")
    temperature: float | None = auto(1.0, "of sampling; 0: the likeliest token", above=None, low=0)
    dtype: str = flag("auto", "of the weights; auto: the run's, or as stored", choices=DTYPES)
    device: str | None = flag(None, "default: cuda, else mps (a Mac's), else cpu", choices=DEVICES)
    seed: int = flag(0, "of tasks and sampling", low=0)
    __post_init__ = RunFlags.__post_init__  # ~ in paths


def command(config: Config):
    """Play tasks, print some, and count; without --num_tasks chat."""
    config = as_the_run(config)
    if config.output and Path(config.output).exists():
        raise UserError(f"--output {config.output}: there is a file of this name")
    model, tokenizer = load_model(config.model_path, dtype=config.dtype, device=config.device,
                                  train=False)
    env_name = config.env or "envs.prompts:Prompts"
    play = partial(rollout, model, tokenizer, env_name, **rollout_options(config))
    if not (config.env and config.num_tasks):
        print(f"{config.env or 'plain chat'}, temperature {config.temperature:g}; Ctrl-D ends")
        return chat(play, envs.load(env_name))
    episodes = play(tasks_for(config, config.split, config.num_tasks), config.group_size, step=-1)
    if not episodes:
        raise UserError(f"--split {config.split}: there is no task to play")
    for t in episodes[:8]:
        print(transcript(t.to_json()), end="\n\n")
    for name, value in (summarise(episodes) | pass_at_k(episodes)).items():
        print(f"{name:24}{value:>10.6g}")
    if config.output:
        Path(config.output).write_text("".join(to_json(vars(t)) for t in episodes), "utf-8")


def chat(play, cls):
    """Play an episode for every line that the user types. A plain prompt continues those before."""
    past = []  # messages
    with suppress(EOFError):  # Ctrl-D
        for step in count():
            text = input("You: ")
            try:
                task = cls._from_text(text)
                if "prompt" in task:
                    task["prompt"] = [*past, {"role": "user", "content": text}]
                [t] = play([task], step=step)
            except (ValueError, AttributeError) as error:
                print(f"[{error}]")
                continue
            print(transcript({**t.to_json(), "messages": t.messages[len(past):]}))
            past = t.messages if "prompt" in task else []


if __name__ == "__main__":
    sys.argv[0] = agent.__file__  # the program that runs this
    main(*terminal(Config, command, agent, load_model), __doc__)
