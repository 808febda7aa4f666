"""Supervised fine-tuning (SFT): imitate demonstrations.

    sft_loss  -log pi(token | tokens before it), a mean over the demonstrator's tokens
    train     AdamW over shuffled epochs; loss and success on held-out data

Demonstrations are episodes of an environment's scripted expert, or what a file holds: recorded
episodes (--trajectories) or conversations (--dataset, extras/data/demonstrations.py).

Only assistant tokens and their end-of-turn token are trained: prompts, templates and tool results
are context. The other algorithms train through merged weights, so that an update rounds as the
rollout did; here there is no rollout, and the adapter stays beside the weights. Left out: packing
(episodes of similar length share a batch instead) and label smoothing.

    python sft.py        the tiny model learns the equations environment: 2 minutes on a CPU core
    python sft.py --model_path Qwen/Qwen2.5-0.5B-Instruct --env gsm8k --lora_r 16
    python sft.py --model_path Qwen/Qwen2.5-0.5B-Instruct --dataset chats.jsonl --lora_r 16

--tasks are for the expert, and of them --eval_dataset or a tenth is held out. Beside --dataset or
--trajectories they are only evaluated on, and --eval_dataset holds demonstrations.

Shapes: B sequences, T tokens. Column t of a (B, T) tensor belongs to token t.
"""
import math
from dataclasses import dataclass
from functools import lru_cache, partial

# Imported before torch: it sets how torch's threads wait.
from envs.tasks import EnvironmentFlags, drop_seen, tasks_for, tasks_of
from layers import LayerFlags, Run, load_model, main
from core.config import (ModelFlags, RunFlags, TrainingFlags, UserError, auto, fill, flag,
                         imitation_learning_rate, options_for)

import torch
from torch.nn.utils import clip_grad_norm_

import envs
from agent import evaluate, rollout_options
from core.data import batches_of_like_length, collate, print_dropped
from core.logprobs import token_logprobs
from core.model import adamw, is_tiny, scheduled, steps_of

# What the tiny model needs in place of the defaults. Its larger forward passes are faster.
TINY = {"learning_rate": 3e-3, "batch_size": 32, "gradient_accumulation_steps": 1,
        "dtype": "float32"}


@dataclass(kw_only=True)
class Config(ModelFlags, LayerFlags, EnvironmentFlags, TrainingFlags, RunFlags):
    heading = "demonstrations"
    lora_r: int = 0
    learning_rate: float | None = auto(imitation_learning_rate)
    gradient_accumulation_steps: int | None = auto(4, "forward passes of an update", low=1)
    num_epochs: int = 4
    output_dir: str = "runs/sft"

    env: str | None = flag(None, "environment, or several (a,b); also path/to/file.py:Class; "
                                 "default: none for --dataset, else the recorded episodes', or "
                                 "equations")
    dataset: str | None = flag(None, "what to imitate, files or hub:owner/name: {messages}, "
                                     "{conversations}, {prompt, completion}, {instruction, "
                                     "output}, {text}, or what --env reads")
    trajectories: str | None = flag(None, "recorded episodes (trajectories.jsonl) to imitate")
    tasks: str | None = flag(None, "tasks that the expert of --env plays; beside --dataset or "
                                   "--trajectories: tasks to evaluate on")
    eval_dataset: str | None = flag(None, "held-out rows of what is learned from; default: a tenth")
    min_reward: float | None = flag(None, "with --trajectories: skip episodes of less reward")
    max_samples: int = flag(3000, "demonstrations", low=1)
    expert_noise: float = flag(0.0, "share of wrong actions of the scripted expert", low=0, high=1)
    max_turns: int | None = flag(None, "turns of an episode; default: as the environment states",
                                 low=1)
    max_new_tokens: int | None = auto(
        256, "tokens per turn in the evaluation, unless the environment states it", low=1)
    max_tokens: int | None = auto(
        2048, "longest episode, tokens, unless the environment states it; longer ones are dropped",
        low=8, aliases=("max_length",))


def sft_loss(logprobs, loss_mask, num_tokens):
    """Compute the negative log-likelihood of the demonstrator's tokens.

    Args:
        logprobs: (B, T) log pi of each token given those before it, in nats.
        loss_mask: (B, T) 1 on the tokens that the demonstrator wrote, else 0.
        num_tokens: sum of the masks of the step, so that the losses of its micro-batches add up.

    Returns a scalar, nats per token.
    """
    return -(logprobs * loss_mask).sum() / num_tokens


# ----------------------------------------------------------------------------- what is learned from
def demonstrations(config, conversations, model, tokenizer):
    """Return the episodes to imitate and the held-out ones.

    They are recorded (--trajectories), the conversations of --dataset, or played by the
    environment's scripted expert. Those longer than max_tokens are dropped and counted.
    """
    if config.trajectories:
        from episodes import read_demonstrations
        learned, held_out = read_demonstrations(config, model, tokenizer)
    elif config.dataset:
        from extras.data.demonstrations import encoded
        learned, held_out = encoded(conversations, tokenizer, config)
    else:
        from episodes import HELD_OUT
        from schooling import play_expert
        play = partial(play_expert, config, tokenizer, noise=config.expert_noise,
                       limits=envs.limits_of(config))
        learned = play("train", config.max_samples)
        held_out = play("test", HELD_OUT, seen=tasks_of(learned))
        solved = sum(t.info["success"] for t in learned)
        print(f"of {len(learned)} tasks the expert solves {solved}")
    learned = drop_long(learned, config.max_tokens)
    # Where few tasks are played, few of these are measured as well.
    held_out = drop_long(held_out, config.max_tokens)[:max(8, config.eval_tasks)]
    source = config.trajectories or config.dataset or config.tasks or config.env
    if not learned:
        condition = "" if config.min_reward is None else f"of reward {config.min_reward} or more "
        raise UserError(f"no episodes to imitate: {source:.200} has none {condition}within "
                        f"{config.max_tokens} tokens")
    print(f"{source:.200}: {len(learned)} demonstrations to learn from, {len(held_out)} held out")
    return learned, held_out


def drop_long(episodes, max_tokens):
    """Return the episodes of at most max_tokens tokens, and print how many were dropped."""
    short = [t for t in episodes if len(t.token_ids) <= max_tokens]
    print_dropped(episodes, short, f"episodes exceed {max_tokens} tokens: dropped")
    return short


def evaluation_tasks(config, learned) -> list[dict]:
    """Return the tasks to evaluate on; where other data is learned from, all rows of --tasks."""
    files = (None, config.tasks) if config.dataset or config.trajectories else None
    return drop_seen(tasks_for(config, "test", config.eval_tasks, files), tasks_of(learned))


# ---------------------------------------------------------------------------------------- held out
@torch.no_grad()
def evaluate_held_out(model, tokenizer, held_out, tasks, config, run) -> dict:
    """Return the loss of held-out demonstrations per token, and `evaluate` of held-out tasks."""
    num_tokens = sum(sum(t.loss_mask) for t in held_out)
    losses = []
    model.eval()
    for rows in run.micro_batches(len(held_out), "held out"):
        token_ids, loss_mask, _ = collate(held_out[rows], model.device)  # (b, T) each
        logprobs, _ = token_logprobs(model, token_ids, loss_mask)  # (b, T)
        losses.append({"loss": sft_loss(logprobs, loss_mask, num_tokens)})
    played = evaluate(model, tokenizer, config.env, tasks, **rollout_options(config, run))
    return played | run.ranks.total(losses) | {"demonstrations": len(held_out)}


# -------------------------------------------------------------------------------------------- loop
def settle(config: Config) -> Config:
    """Return the config with the defaults that depend on the model or the environment."""
    from envs.task_files import with_env  # it may read recorded episodes
    config = with_env(config)
    return fill(config, TINY if is_tiny(config.model_path) else {}, envs.recommended(config.env))


def train(config: Config) -> dict:
    """Imitate demonstrations: make every token that the demonstrator wrote more likely."""
    config = settle(config)
    conversations = None
    if config.dataset:  # first, so that a bad row is refused at once
        from extras.data.demonstrations import read_dataset
        conversations = read_dataset(config)
    run = Run(config, "sft")  # the output folder: logs, checkpoints, result
    if run.finished:
        return run.finished
    model, tokenizer = load_model(config.model_path, **options_for(load_model, config))
    learned, held_out = demonstrations(config, conversations, model, tokenizer)
    tasks = evaluation_tasks(config, learned)
    optimizer = adamw(model, lr=config.learning_rate, weight_decay=config.weight_decay)
    per_step = config.batch_size * config.gradient_accumulation_steps
    batches = lru_cache(1)(partial(batches_of_like_length, learned, per_step, config.seed))
    steps_per_epoch = len(batches(0))
    test = partial(evaluate_held_out, model, tokenizer, held_out, tasks, config, run)
    total = steps_of(config, steps_per_epoch)
    with run:
        for step in range(run.load(model, tokenizer, optimizer, total), total):
            is_born = step == 0 and config.model_path == "tiny"  # random weights
            if step % (config.eval_every or total) == 0 and not is_born:
                run.log_evaluation(step, test())
            for group in optimizer.param_groups:  # from the rate that it was made with
                group["lr"] = scheduled(group["initial_lr"], step, run.planned)
            run.log(learning_rate=optimizer.param_groups[0]["lr"])

            # 1. Episodes: the next demonstrations of the epoch.
            epoch, place = divmod(step, steps_per_epoch)
            batch = batches(epoch)[place]
            token_ids, loss_mask, _ = collate(batch, model.device)  # (B, T) each

            # 2. Targets: every token that the demonstrator wrote counts the same.
            num_tokens = loss_mask.sum().item()

            # 3. Update. The losses of the micro-batches add up to the loss of the step.
            model.train()
            metrics = []
            for rows in run.micro_batches(len(batch), step):
                logprobs, _ = token_logprobs(model, token_ids[rows], loss_mask[rows])  # (b, T)
                loss = sft_loss(logprobs, loss_mask[rows], num_tokens)
                logprobs.retain_grad()  # what multiplies each token's grad log pi
                loss.backward()
                run.record(batch[rows], new=logprobs)
                metrics.append({"loss": loss.detach()})
                del logprobs, loss  # free the graph: the next one needs room
            totals = run.ranks.all_reduce(model, metrics)
            grad_norm = clip_grad_norm_(model.parameters(), config.max_grad_norm).item()
            if math.isfinite(totals["loss"] + grad_norm):
                optimizer.step()
            else:  # it would spoil the weights for good
                run.skip(batch, f"loss {totals['loss']}, gradient norm {grad_norm}")
            optimizer.zero_grad()
            run.log(**totals, grad_norm=grad_norm, tokens=num_tokens)
            run.end_step(step)
        after = test()
        next_program = "grpo.py" if config.env else "agent.py"
        return run.finish(after, next_program, held_out_loss=after.get("loss"))


if __name__ == "__main__":
    main(Config, train, __doc__)
