"""Scripted experts, and how they teach the tiny model before another algorithm starts from it.

    demonstrate  environments' experts play, as if a model had played
    play_expert  an expert of which a share of the actions is wrong, on the tasks of a config
    teach_tiny   make the tiny model, teach it the tool format by a short SFT, write it to base/

sft.py is the same update with all that a run offers: adapters, evaluation, checkpoints, other data.
"""
import io
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from itertools import chain, count, islice

# Imported before torch: it sets how torch's threads wait.
from core.config import UserError, mix, progress

from torch.nn.utils import clip_grad_norm_

import envs
from agent import Episode, Trajectory, ends_on_fault, playable, rollout_options
from core.model import adamw, scheduled, share_weights
from core.data import batches_of_like_length, collate, without_faults
from core.logprobs import token_logprobs
from core.tiny import TINY_SFT
from envs import Limits, load_environments
from envs.tasks import drop_seen, tasks_for
from layers import load_model, sessions


# ------------------------------------------------------------------------------- scripted experts
def need_expert(env_names: str):
    """Raise UserError if an environment has no scripted demonstrator. The tiny model needs one."""
    for name in envs.names_of(env_names):
        if not envs.all_have(name, "_expert"):
            raise UserError(
                f"environment {name!r} has no _expert(): nothing to learn its format from. Write "
                "one (envs/template.py has an example), imitate recorded episodes with sft.py "
                "--trajectories, or start from a real model: --model_path path/or/hub-id")


def demonstrate(tokenizer, env_name: str, tasks: list[dict],
                limits: Limits = Limits(), env_options: dict | None = None) -> list[Trajectory]:
    """Play the scripted experts. Their ids are those of a rollout that had sampled them."""
    need_expert(env_name)
    classes, chats = load_environments(tokenizer, env_name, None, env_options)
    trajectories = []
    with sessions(limits) as new_session:
        for i, task in enumerate(progress(tasks, "demonstrations")):
            name = task.get("env", env_name)
            session = new_session(name, classes[name], task)
            episode = Episode(session, chats[name], limits, str(i))
            while episode.can_take_turn:
                expert_turn(episode)
            trajectories.append(episode.trajectory)
    return without_faults(playable(trajectories, limits.max_tokens))


@ends_on_fault
def expert_turn(episode: Episode):
    """Let the expert take a turn of the episode in the model's place."""
    text, calls = episode.session.expert()
    ids = episode.chat.turn(text, calls)
    episode.take_turn(ids, [0.0] * len(ids))
    if episode.calling:
        episode.take_results()


def play_expert(config, tokenizer, split: str, n: int, noise: float, limits: Limits, seen=(),
                files=None) -> list[Trajectory]:
    """Return at most n episodes of the scripted expert; a share `noise` of its actions is wrong.

    Args:
        split: "train" or "test". No episode is of a task in `seen`.
        limits: of an episode, but for max_tokens: an expert plays to the end.
        files: the task files of `envs.tasks.tasks_for`, in place of the config's.
    """
    tasks = drop_seen(tasks_for(config, split, n, files), seen)
    tasks = [{**task, "noise": noise, "noise_seed": mix(config.seed, split, i)}
             for i, task in enumerate(tasks)]
    limits = replace(limits, max_tokens=sys.maxsize)
    return demonstrate(tokenizer, config.env, tasks, limits, envs.options_of(config))


# ---------------------------------------------------------------------------------- the tiny model
def teach_tiny(config, run, plays=True) -> str:
    """Return where the run's model is. The tiny one is made and taught the tool format there.

    Its folder is base/ in the output folder, which the run's adapters name as their base model.
    Every rank calls this function. The first one teaches, and the others wait.

    Args:
        config, run: of the algorithm that starts from the model.
        plays: False if the algorithm only evaluates on its tasks. They are then not taught.
    """
    rollout_options(config, run)  # for its errors: flags are refused before anything takes time
    if config.model_path != "tiny":
        return config.model_path
    # Where a file of rows is wrong, nobody waits for transformers.
    from transformers.utils.logging import disable_progress_bar
    disable_progress_bar()
    run.begin()
    base = run.folder / "base"
    run.ranks.first(lambda: base.exists() or school(config, base, plays=plays))
    return str(base)


def school(config, folder, start="tiny", plays=True, change=None):
    """Teach a tiny model by a noisy expert, and write it to a folder that gets its name when whole.

    Args:
        start: the model as `load_model` takes it.
        plays: False if the run only evaluates on the tasks of its config.
        change: a function that changes each demonstrated episode before it is learned.
    """
    config = replace(config, env=config.env or "equations")
    need_expert(config.env)
    print(f"tiny model: made in {folder}; {TINY_SFT['max_steps']} SFT steps on noisy "
          f"demonstrations teach it {'which actions are right' if change else 'the format'}")
    tasks = config.tasks if plays else None
    # Without an evaluation the run holds no row out, and the schooling need not either.
    held_out = config.eval_dataset or (None if config.eval_tasks else tasks)
    limits = replace(Limits(**envs.recommended(config.env)), max_turns=TINY_SFT["max_turns"])
    # The bars are all that is shown.
    with redirect_stdout(io.StringIO()):
        model, tokenizer = load_model(start, seed=config.seed)
        episodes = play_expert(config, tokenizer, "train", TINY_SFT["max_samples"],
                               TINY_SFT["expert_noise"], limits, files=(tasks, held_out))
    if change:
        for t in episodes:
            change(t)
    episodes = [t for t in episodes if len(t.token_ids) <= limits.max_tokens and 1 in t.loss_mask]
    if not episodes:
        raise UserError(f"--env {config.env}: no demonstration to learn from: each had a fault, no "
                        f"right turn, or more than the {limits.max_tokens} tokens of its `limits`")
    imitate(model, episodes, config.seed)
    unfinished = folder.with_name(f".tmp-{folder.name}")
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    share_weights(unfinished)
    unfinished.rename(folder)


def imitate(model, episodes: list[Trajectory], seed: int):
    """Train all weights of the model on the demonstrations, as TINY_SFT says."""
    steps, peak = TINY_SFT["max_steps"], TINY_SFT["learning_rate"]
    optimizer = adamw(model, lr=peak)
    epochs = (batches_of_like_length(episodes, TINY_SFT["batch_size"], seed, n) for n in count())
    batches = islice(chain.from_iterable(epochs), steps)
    model.train()
    for step, batch in enumerate(progress(batches, "SFT step", steps)):
        optimizer.param_groups[0]["lr"] = scheduled(peak, step, steps)
        token_ids, loss_mask, _ = collate(batch, model.device)  # (B, T) each
        logprobs, _ = token_logprobs(model, token_ids, loss_mask)  # (B, T)
        loss = -(logprobs * loss_mask).sum() / loss_mask.sum()
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
