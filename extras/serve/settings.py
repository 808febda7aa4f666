"""What `python agent.py` plays: environment, tasks and limits of the run that wrote the model."""
import os
from dataclasses import replace
from pathlib import Path

import envs
from core.config import UserError, convert, fill, options, printable
from core.model import DTYPES
from core.run import CONFIG, algorithm_of
from envs.task_files import PLAIN, config_of

LOCAL = ["127.0.0.1", "localhost"]  # what may be served without a token
# What is taken from the run, besides the dtype.
TAKEN = ("env", "dataset", "eval_dataset", "env_options", "fields", "max_turns", "max_new_tokens",
         "max_tokens")


def settle(config):
    """Fill in what the command line left open. Without an environment `env` is None."""
    config = as_the_run(config)
    if config.env == "none":
        config = replace(config, env=None)
    return fill(config, envs.recommended(config.env), {} if config.env else PLAIN)


def sampled_as_its_own(config, model):
    """Return the config of a plain chat with the sampling settings of the model's folder."""
    own = model.generation_config
    config = replace(config, temperature=own.temperature or config.temperature)
    for name in ("top_k", "top_p"):
        # What the command line says counts more.
        if getattr(config, name) == getattr(type(config), name):
            config = replace(config, **{name: getattr(own, name) or getattr(config, name)})
    return config


def as_the_run(config):
    """Take dtype, environment, tasks, options and limits of the run that wrote the model."""
    folder = run_folder(config.model_path)
    if not folder:
        return config
    written, run = folder / CONFIG, config_of(folder)
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
        flags = options(type(config))
        for name in TAKEN:
            if run.get(name) and not getattr(config, name):
                taken[name] = convert(run[name], flags[name], f"{written}: {name}")
        held_out = config.eval_dataset or taken.get("eval_dataset")
        if config.split == "test" and taken.get("dataset") and not held_out:
            # Without an evaluation only sft.py holds rows out.
            if run.get("eval_tasks") == "0" and algorithm_of(folder) != "sft":
                raise UserError(f"--split test: {written}: with eval_tasks 0 the run held no task "
                                "out; give --eval_dataset")
    # The policy that is played is the one that was trained, in the same dtype.
    if config.dtype == "auto" and run.get("dtype") in DTYPES:
        taken["dtype"] = run["dtype"]
    sampled_at = run.get("temperature") or "1.0"
    if config.env != "none" and config.temperature in (None, 1) and sampled_at != "1.0":
        print(f"note: the run sampled at --temperature {printable(sampled_at)}; this is at 1")
    if taken:
        words = " ".join(f"--{name} {value}" for name, value in taken.items())
        print(f"as in {written}: {printable(words)}")
    return replace(config, **taken)


def run_folder(model_path: str) -> Path | None:
    """Return the output folder of the run that wrote a model; its parts name it, too."""
    folder = Path(model_path).resolve()
    # Parts of an output folder are base/ and checkpoints/step_NNNNNN/.
    for place in (folder, *folder.parents[:2]):
        if folder.is_dir() and algorithm_of(place):
            return place
    return None


def check(config):
    """Raise UserError for flags of agent.py that would do nothing."""
    names = envs.names_of(config.env)
    if len(names) > 1 and not config.num_tasks:
        raise UserError(f"--env {config.env}: chat with one environment at a time")
    for name in ("num_tasks", "dataset", "eval_dataset", "env_options"):
        if not names and getattr(config, name):
            raise UserError(f"--{name} {getattr(config, name)}: of which environment? --env names "
                            f"one of {', '.join(envs.ENVS)}, or path/to/file.py:ClassName")
    if names and config.system_prompt:
        raise UserError(f"--system_prompt: environment {config.env} has its own; --env none is a "
                        "plain chat")
    if config.output and not config.num_tasks:
        raise UserError(f"--output {config.output}: say with --num_tasks how many tasks to play")
    if config.output:
        check_output(config.output)
    if config.serve and config.host not in LOCAL and not config.token:
        raise UserError(f"--host {config.host}: others can reach it, so give a --token")


def check_served(config):
    """Raise UserError for flags that say with --serve what clients say. None is filled in yet."""
    asked = ("num_tasks", "system_prompt", "temperature", "top_k", "top_p", "seed", "group_size")
    given = [f"--{name}" for name in asked if getattr(config, name) != getattr(type(config), name)]
    if config.serve and given:
        raise UserError(f"--serve answers what clients ask; leave out {', '.join(given)}")


def check_output(path: str):
    """Raise UserError if the file cannot be written, before the model is loaded."""
    if os.path.islink(path) or os.path.exists(path) and not os.path.isfile(path):
        raise UserError(f"--output {path}: is no regular file")
    try:
        if not os.path.exists(path):
            open(path, "x", encoding="utf-8").close()
            os.unlink(path)
    except OSError as error:
        raise UserError(f"--output {path}: {error.strerror}") from None
