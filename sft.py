"""Supervised fine-tuning (SFT): imitate demonstrations.

    demonstrations  episodes of a scripted expert, or what a file holds: chats, completions,
                    recorded episodes
    sft_loss        -log pi(token | tokens before it), a mean over the demonstrator's tokens
    train           AdamW over shuffled epochs; loss and success on held-out data

Only assistant tokens and their end-of-turn token are trained: prompts, templates and tool results
are context. The other algorithms merge the adapter, so that an update rounds like the rollout that
it learns from; here nobody sampled the tokens, and it stays beside the weights. Left out: packing
(episodes of similar length share a batch instead) and label smoothing.

    python sft.py        the tiny model learns the equations environment: a minute on a CPU
    python sft.py --model_path Qwen/Qwen2.5-0.5B-Instruct --env gsm8k --lora_r 16
    python sft.py --model_path Qwen/Qwen2.5-0.5B-Instruct --dataset chats.jsonl --lora_r 16

Shapes: B sequences, T tokens. Column t of a (B, T) tensor belongs to token t.
"""
import math
import sys
from dataclasses import dataclass, replace
from functools import partial

import torch

import envs
from agent import collate, evaluate, limits_of
from envs.demonstrations import (EXPECTED, Encoder, default_env, describe, imitates_rows,
                                 read_demonstrations, read_trajectories, registered_envs, split)
from envs.expert import demonstrate
from experiment import (MemoryFlags, ModelFlags, Run, RunFlags, TrainingFlags, UserError, auto,
                        fill, flag, imitation_learning_rate, main, mix, read_rows, replace_file,
                        to_json)
from llm import (TrainingState, adamw, batches_of_like_length, dry_run, is_tiny, load_model, merge,
                 model_options, token_logprobs)

TINY = {"learning_rate": 3e-3, "dtype": "float32"}  # defaults of the tiny model

# How the tiny model is taught before another algorithm starts from it: by demonstrations in which
# most actions are wrong, but numbers are copied correctly. Which action to choose is left to learn.
TINY_SFT = {
    "max_samples": 2600,
    "expert_noise": 0.6,
    "max_turns": 6,
    "max_steps": 340,
    "batch_size": 16,
    "learning_rate": 3e-3,
}
HELD_OUT = 100  # demonstrations, at most, whose loss is measured


@dataclass(kw_only=True)
class Config(ModelFlags, MemoryFlags, TrainingFlags, RunFlags):
    heading = "demonstrations"
    lora_r: int = 0
    learning_rate: float | None = auto(imitation_learning_rate)
    batch_size: int = 32
    gradient_accumulation_steps: int = flag(1, "forward passes of an update", low=1)
    num_epochs: int = 4
    output_dir: str = "runs/sft"

    env: str | None = flag(None, "environment, or several (a,b); also path/to/file.py:Class; "
                                 "default: the episodes', none for rows to imitate, or equations")
    dataset: str | None = flag(None, f"rows (.jsonl, .csv) to imitate: {EXPECTED}; or tasks, which "
                                     "the expert of --env plays")
    eval_dataset: str | None = flag(None, "held-out rows of the same kind; default: a tenth")
    trajectories: str | None = flag(None, "recorded episodes (trajectories.jsonl) to imitate; "
                                          "--dataset and --eval_dataset then hold tasks to evaluate"
                                          " on, --eval_dataset alone held-out episodes")
    min_reward: float | None = flag(None, "with --trajectories: skip episodes of less reward")
    max_samples: int = flag(3000, "demonstrations", low=1)
    expert_noise: float = flag(0.0, "share of wrong actions of the scripted expert", low=0, high=1)
    max_turns: int | None = flag(None, "turns of an episode; default: as the environment states",
                                 low=1)
    max_new_tokens: int | None = auto(256, "tokens per turn in the evaluation", low=1)
    max_tokens: int | None = auto(2048, "longest episode, tokens; longer ones are dropped", low=8,
                                  aliases=("max_length",))


def sft_loss(logprobs, loss_mask, num_tokens):
    """Compute the negative log-likelihood of the demonstrator's tokens.

    Args:
        logprobs: (B, T) log pi of each token given those before it, in nats.
        loss_mask: (B, T) 1 on the tokens that the demonstrator wrote, else 0.
        num_tokens: sum of the masks of the step, so that the losses of its micro-batches add up.

    Returns a scalar, nats per token.
    """
    return -(logprobs * loss_mask).sum() / num_tokens


# ---------------------------------------------------------------------------------- demonstrations
def demonstrations(config: Config, tokenizer, vocabulary: int):
    """Return the episodes to imitate and the held-out ones.

    They are recorded (--trajectories), written to be imitated (--dataset), or played by the
    environment's scripted expert. Those longer than max_tokens are dropped and counted.
    """
    if config.trajectories:
        learned, held_out = recorded(config, tokenizer, vocabulary)
    elif imitates_rows(config.dataset, config.env):
        learned, held_out = written(config, tokenizer)
    else:
        learned = played(config, tokenizer, "train", config.max_samples)
        held_out = played(config, tokenizer, "test", HELD_OUT, envs.tasks_of(learned))
    learned = drop_long(learned, config.max_tokens)
    if not learned:
        source = config.trajectories or config.dataset or config.env
        condition = "" if config.min_reward is None else f"of reward {config.min_reward} or more "
        raise UserError(f"no episodes to imitate: {source} has none {condition}within "
                        f"{config.max_tokens} tokens")
    return learned, drop_long(held_out, config.max_tokens)


def recorded(config, tokenizer, vocabulary):
    """Return the episodes of --trajectories of at least --min_reward, and the held-out ones."""
    def read(path):
        episodes = read_trajectories(path, tokenizer, vocabulary)
        floor = -math.inf if config.min_reward is None else config.min_reward
        return [t for t in episodes if 1 in t.loss_mask and t.reward >= floor]

    def task(t):
        return [t.info.get("task"), t.token_ids[:t.loss_mask.index(1)]]

    # With --dataset, both data sets are tasks of the evaluation.
    apart = None if config.dataset or not config.eval_dataset else read(config.eval_dataset)
    learned, held_out = split(read(config.trajectories), apart, task, config.seed)
    print(f"{config.trajectories}: {len(learned)} episodes to learn from, {len(held_out)} held out")
    return learned[:config.max_samples], held_out[:HELD_OUT]


def written(config, tokenizer):
    """Return the rows of --dataset as episodes, and held-out ones: --eval_dataset or a tenth."""
    rows = read_demonstrations(config.dataset)
    apart = read_demonstrations(config.eval_dataset) if config.eval_dataset else None
    learned, held_out = split(rows, apart, lambda conversation: conversation.row, config.seed)
    learned, held_out = learned[:config.max_samples], held_out[:HELD_OUT]
    describe(learned, tokenizer)
    encode = Encoder(tokenizer, config.env)
    return list(map(encode, learned)), list(map(encode, held_out))


def played(config, tokenizer, split_name, n, seen=()):
    """Return episodes of the scripted expert; a share --expert_noise of its actions is wrong.

    None is of the tasks in `seen`.
    """
    tasks = envs.tasks(config.env, split_name, n, config.seed, config.dataset, config.eval_dataset)
    tasks = envs.drop_seen(tasks, seen)
    if config.dataset:
        print(f"{config.dataset}: {len(tasks)} tasks for the expert of {config.env} ({split_name})")
    tasks = [{**task, "noise": config.expert_noise, "seed": mix(config.seed, split_name, i)}
             for i, task in enumerate(tasks)]
    # An expert plays to the end: a longer episode than max_tokens is to be dropped, not cut.
    limits = replace(limits_of(config, config.env), max_tokens=sys.maxsize)
    return demonstrate(tokenizer, config.env, tasks, limits)


def drop_long(episodes, max_tokens):
    """Return the episodes of at most max_tokens tokens, and print how many were dropped."""
    short = [t for t in episodes if len(t.token_ids) <= max_tokens]
    if len(short) < len(episodes):
        print(f"{len(episodes) - len(short)} of {len(episodes)} episodes exceed {max_tokens} "
              "tokens: dropped")
    return short


def held_out_tasks(config, env, learned) -> list[dict]:
    """Return the evaluation's tasks, without those of the training data.

    There are none without an environment or with --eval_tasks 0.
    """
    if not config.eval_tasks or not env:
        return []
    files = (config.dataset, config.eval_dataset) if config.dataset else ()
    are_imitated = not config.trajectories and imitates_rows(config.dataset, config.env)
    if are_imitated and not envs.is_task(env, read_rows(config.dataset)[0]):
        # Files of demonstrations hold no tasks: take the environment's own.
        files = ()
    tasks = envs.tasks(env, "test", config.eval_tasks, config.seed, *files)
    return envs.drop_seen(tasks, envs.tasks_of(learned))


@torch.no_grad()
def evaluate_held_out(model, tokenizer, held_out, env, tasks, config, run) -> dict:
    """Return the loss of held-out demonstrations per token, and `evaluate` of held-out tasks."""
    total, tokens = 0.0, 0
    for start in range(0, len(held_out), config.batch_size):
        batch = held_out[start:start + config.batch_size]
        token_ids, loss_mask, _ = collate(batch, model.device)  # (B, T) each
        total += sft_loss(token_logprobs(model, token_ids, loss_mask)[0], loss_mask, 1).item()
        tokens += loss_mask.sum().item()
    metrics = evaluate(model, tokenizer, env, tasks, limits=limits_of(config, env),
                       seed=config.seed, run=run)
    if tokens:
        metrics["loss"] = total / tokens
    return metrics


# -------------------------------------------------------------------------------------------- loop
def settle(config: Config) -> Config:
    """Return the config with the defaults that depend on the model or the environment."""
    if not config.env and (config.trajectories or not imitates_rows(config.dataset, None)):
        config = replace(config, env=default_env(config.trajectories))
    return fill(config, TINY if is_tiny(config.model_path) else {}, envs.lengths(config.env))


def train(config: Config) -> dict:
    """Imitate demonstrations: make every token that the demonstrator wrote more likely."""
    config = settle(config)
    if config.dry_run:
        sequences = min(config.batch_size, config.max_samples)
        return dry_run(config, held_out=config.eval_tasks, rows=sequences, merge=False)
    run = Run(config, "sft", envs.sources(config.env))  # output folder, resume, signals
    if run.finished:
        return run.finished
    model, tokenizer = load_model(config.model_path, **model_options(config))
    vocabulary = model.get_input_embeddings().num_embeddings
    learned, held_out = demonstrations(config, tokenizer, vocabulary)
    env = config.env or registered_envs(t.info for t in learned)
    tasks = held_out_tasks(config, env, learned)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = adamw(model, lr=0.0, betas=(0.9, 0.95), weight_decay=config.weight_decay)
    per_step = config.batch_size * config.gradient_accumulation_steps
    steps_per_epoch = len(batches_of_like_length(learned, per_step, config.seed, 0))
    evaluation = partial(evaluate_held_out, model, tokenizer, held_out, env, tasks, config, run)
    with run:
        state = TrainingState(model, tokenizer, optimizer)
        total = run.total_steps(steps_per_epoch)
        is_taught = config.model_path != "tiny"
        for step in run.steps(total, state, evaluation, evaluate_before=is_taught):
            # 1. Episodes: the next demonstrations of the epoch.
            epoch, place = divmod(step, steps_per_epoch)
            batch = batches_of_like_length(learned, per_step, config.seed, epoch)[place]
            token_ids, loss_mask, _ = collate(batch, model.device)  # (B, T) each

            # 2. Targets: every token that the demonstrator wrote counts the same.
            num_tokens = loss_mask.sum().item()

            # 3. Update. The losses of the micro-batches add up to the loss of the step.
            model.train()
            loss_sum = 0.0
            for rows in run.micro_batches(batch, step):  # slices (rows, columns)
                logprobs, _ = token_logprobs(model, token_ids[rows], loss_mask[rows])  # (b, t)
                loss = sft_loss(logprobs, loss_mask[rows], num_tokens)
                loss.backward()
                loss_sum += loss.item()
                # Free the autograd graph before the next micro-batch builds its own.
                del logprobs, loss
            run.ranks.add_gradients(parameters)
            loss_sum = sum(run.ranks.gather(loss_sum))
            grad_norm = torch.nn.utils.clip_grad_norm_(parameters, config.max_grad_norm).item()
            if run.accept_update(batch, loss_sum, grad_norm):
                optimizer.step()
            optimizer.zero_grad()
            model.eval()
            run.log(loss=loss_sum, grad_norm=grad_norm, tokens=num_tokens)
    next_step = "grpo.py" if config.env else "agent.py"
    return run.finish(next_step, held_out_loss=run.after.get("loss"))


def teach_tiny(config, run) -> str:
    """Make the tiny model, teach it the tool format by a short SFT, and return its folder.

    The folder is `base/` in the output folder: a plain model, which the run's adapters point to.
    A resumed run finds it there and teaches nothing. Where the config names another model, that one
    is returned as it is.

    Args:
        config: of the algorithm that starts from the tiny model (`output_dir`, `env`, `seed`).
        run: that algorithm's Run. Of several processes all take part in the SFT, and one writes.
    """
    if config.model_path != "tiny":
        return config.model_path
    base = run.folder / "base"
    # This file is written last: where it exists, the folder is complete.
    taught = base / "made.json"
    if run.ranks.first(taught.exists):
        return str(base)
    envs.need_expert(config.env or "equations")
    print("tiny model: made here, and taught the format by a short SFT on noisy demonstrations")
    schooling = Config(output_dir=str(base / "sft"), env=config.env or "equations",
                       seed=config.seed, eval_tasks=0, overwrite=True, **TINY_SFT)
    seconds = train(schooling)["seconds"]
    run.ranks.first(lambda: merge(schooling.output_dir, str(base)))
    run.ranks.first(lambda: replace_file(taught, to_json({"seconds": seconds})))
    return str(base)


if __name__ == "__main__":
    main(Config, train, __doc__)
