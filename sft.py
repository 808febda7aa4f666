"""Supervised fine-tuning: imitate demonstrations.

    demonstrations  -> episodes of a world's scripted expert (`demonstrate`), or recorded ones (`--trajectories`)
    sft_loss        -> -log pi(token | tokens before it), a mean over the tokens that the demonstrator wrote
    train           -> AdamW over shuffled epochs; held-out loss and held-out success

Loss falls on assistant tokens and their end-of-turn token only: prompts, templates and tool results are context. Left
out: packing (episodes of like length share a batch instead), label smoothing.

    python sft.py                       the tiny model learns the equations world from nothing: a minute on a CPU
    python sft.py --model_path Qwen/Qwen2.5-0.5B-Instruct --env gsm8k --lora_r 16 --learning_rate 1e-4
"""
import math
import time
from dataclasses import dataclass, replace

import numpy as np
import torch
from tqdm import tqdm

import envs
from agent import Limits, Trajectory, collate, demonstrate, evaluate, read_trajectories
from lora import DTYPES, fast_float32, load_model, save_model, token_logprobs
from run import Run, UserError, flag, main, mix, optimizer_tensors, peak_memory_mb


@dataclass
class Config:
    model_path: str = flag("tiny", "model: tiny, hub id, model folder, adapter folder or output folder", group="model")
    lora_r: int = flag(0, "LoRA rank; 0: all weights train", group="model", low=0)
    lora_alpha: float | None = flag(None, "LoRA alpha; default: twice the rank", group="model", above=0)
    lora_dropout: float = flag(0.0, "dropout on the adapter's input", group="model", low=0, high=0.99)
    lora_target_modules: str = flag("all-linear", "names of adapted Linears, separated by commas", group="model")
    use_rslora: bool = flag(False, "scale by alpha / sqrt(rank)", group="model")
    dtype: str = flag("float32", "of frozen weights", group="model", choices=tuple(DTYPES))
    gradient_checkpointing: bool = flag(
        False, "recompute layers in the backward pass: less memory, a third more time", group="model")

    env: str = flag("equations", "world or worlds (a,b); also path/to/file.py:Class", group="data")
    dataset: str | None = flag(None, "tasks for the world (.jsonl); default: the world's own", group="data")
    eval_dataset: str | None = flag(None, "held-out tasks (.jsonl); default: a tenth of --dataset", group="data")
    trajectories: str | None = flag(
        None, "recorded episodes (trajectories.jsonl) to imitate in place of the expert", group="data")
    min_reward: float | None = flag(None, "with --trajectories: imitate episodes of at least this reward", group="data")
    max_samples: int = flag(3000, "demonstrations", group="data", low=1)
    expert_noise: float = flag(0.0, "share of wrong actions of the scripted expert", group="data", low=0, high=1)
    max_turns: int | None = flag(None, "assistant turns of a demonstration; default: the world's", group="data", low=1)
    max_tokens: int = flag(1024, "longest episode, tokens; longer ones are dropped and counted", group="data", low=8)

    num_epochs: int = flag(4, "passes over the demonstrations", group="training", low=1, aliases=("total_epochs",))
    max_steps: int | None = flag(None, "optimiser steps; beats num_epochs", group="training", low=1)
    max_seconds: float | None = flag(
        None, "stop after this long; such a run is not repeatable to the bit", group="training", above=0)
    batch_size: int = flag(32, "episodes in one forward pass", group="training", low=1)
    gradient_accumulation_steps: int = flag(1, "forward passes of one step", group="training", low=1)
    learning_rate: float | None = flag(
        None, "AdamW step size at its peak; default: 1e-4 with LoRA, 1e-5 without, 3e-3 for tiny",
        group="training", above=0)
    warmup_steps: int = flag(20, "steps of linear warm-up; after them a cosine down to 10 %", group="training", low=0)
    weight_decay: float = flag(0.0, "AdamW weight decay", group="training", low=0)
    max_grad_norm: float = flag(1.0, "gradient norm is clipped to this", group="training", above=0)

    output_dir: str = flag("runs/sft", "folder of this run", group="run")
    overwrite: bool = flag(False, "replace the run that is in output_dir", group="run")
    seed: int = flag(0, "of everything random", group="run", low=0)
    save_every: int = flag(0, "steps between checkpoints; 0: at the end", group="run", low=0)
    eval_tasks: int = flag(200, "held-out tasks played at the end, at temperature 1; 0: none", group="run", low=0)


def sft_loss(logprobs, loss_mask, num_tokens):
    """-sum log pi / num_tokens. logprobs, loss_mask (B, T); num_tokens: masked tokens of the whole step."""
    return -(logprobs * loss_mask).sum() / num_tokens


def learning_rate(step: int, config, total: int) -> float:
    """Linear warm-up, then a cosine to a tenth. A function of the step alone: nothing to save."""
    warm = min(1.0, (step + 1) / max(config.warmup_steps, 1))
    return config.learning_rate * warm * (0.55 + 0.45 * math.cos(math.pi * step / total))


def demonstrations(config: Config, tokenizer, split: str, n: int) -> list[Trajectory]:
    """Episodes to imitate: the expert's, played on the world's tasks, or recorded ones; too long: dropped aloud."""
    if config.trajectories:
        found = read_trajectories(config.trajectories)
        found = [t for t in found if config.min_reward is None or t.reward >= config.min_reward][:n]
    else:
        tasks = envs.tasks(config.env, split, n, config.seed, config.dataset, config.eval_dataset)
        tasks = [{**task, "noise": config.expert_noise, "seed": mix(config.seed, split, i)}
                 for i, task in enumerate(tasks)]
        found = demonstrate(tokenizer, config.env, tasks, Limits(config.max_turns, max_tokens=config.max_tokens))
    short = [t for t in found if len(t.token_ids) <= config.max_tokens and sum(t.loss_mask)]
    if len(short) < len(found):
        print(f"{len(found) - len(short)} of {len(found)} episodes exceed {config.max_tokens} tokens "
              "or have none to train: dropped")
    if not short:
        floor = f"of reward {config.min_reward} or more " if config.min_reward is not None else ""
        raise UserError(f"no episodes to imitate: {config.trajectories or config.env} has none "
                        f"{floor}within {config.max_tokens} tokens")
    return short


def epoch_batches(data: list[Trajectory], per_step: int, seed: int, epoch: int,
                  pool: int = 16) -> list[list[Trajectory]]:
    """One pass over the data in random order; within every `pool` steps, episodes of like length share one."""
    rng = np.random.default_rng([seed, epoch])
    order, batches = rng.permutation(len(data)), []
    for i in range(0, len(order), pool * per_step):
        alike = sorted(order[i:i + pool * per_step], key=lambda j: len(data[j].token_ids))
        batches += [[data[j] for j in alike[k:k + per_step]] for k in range(0, len(alike) - per_step + 1, per_step)]
    return [batches[i] for i in rng.permutation(len(batches))] or [data]


def train(config: Config) -> dict:
    started = time.time()
    if config.learning_rate is None:
        config = replace(config, learning_rate=3e-3 if config.model_path == "tiny" else 1e-4 if config.lora_r else 1e-5)
    run = Run(config, "sft")
    fast_float32()
    model, tokenizer = load_model(
        config.model_path, lora_r=config.lora_r, lora_alpha=config.lora_alpha, lora_dropout=config.lora_dropout,
        seed=config.seed, lora_target_modules=config.lora_target_modules, use_rslora=config.use_rslora,
        dtype=config.dtype)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=config.weight_decay)
    data = demonstrations(config, tokenizer, "train", config.max_samples)
    held_out = [] if config.trajectories else demonstrations(config, tokenizer, "test", 100)
    per_step = config.batch_size * config.gradient_accumulation_steps
    steps_per_epoch = len(epoch_batches(data, per_step, config.seed, 0))
    total = config.max_steps or config.num_epochs * steps_per_epoch

    def save(step):
        return run.save(step, lambda folder: save_model(model, folder), tokenizer,
                        optimizer_tensors(optimizer, model.named_parameters()))

    training_began, bar = time.time(), tqdm(range(total), "sft")
    for step in bar:
        began = time.time()
        epoch, place = divmod(step, steps_per_epoch)
        batch = epoch_batches(data, per_step, config.seed, epoch)[place]
        num_tokens, loss = sum(sum(t.loss_mask) for t in batch), 0.0
        model.train()
        torch.manual_seed(mix(config.seed, "dropout", step))
        for i in range(0, len(batch), config.batch_size):
            token_ids, loss_mask, _ = collate(batch[i:i + config.batch_size], model.device)  # (B, T) each
            logprobs, _ = token_logprobs(model, token_ids, loss_mask)  # (B, T)
            part = sft_loss(logprobs, loss_mask, num_tokens)
            part.backward()
            loss += part.item()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config, total)
        grad_norm = torch.nn.utils.clip_grad_norm_(weights, config.max_grad_norm).item()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        run.log(step, {"loss": loss, "grad_norm": grad_norm, "learning_rate": optimizer.param_groups[0]["lr"],
                       "tokens": num_tokens}, {"seconds": time.time() - began})
        bar.set_postfix(loss=f"{loss:.3f}")
        if config.max_seconds and time.time() - training_began > config.max_seconds:
            total = step + 1
            break
        if config.save_every and (step + 1) % config.save_every == 0 and step + 1 < total:
            save(step + 1)
    folder = save(total)
    result = {"success_before": None, "success_after": None, "steps": total, "seed": config.seed, "held_out_loss": None}
    if held_out:
        result["held_out_loss"] = held_out_loss(model, held_out, config.batch_size)
    if config.eval_tasks:
        tasks = envs.tasks(config.env, "test", config.eval_tasks, config.seed, config.dataset, config.eval_dataset)
        limits = Limits(max_tokens=config.max_tokens)
        after = evaluate(model, tokenizer, config.env, tasks, limits=limits, seed=config.seed)
        result["success_after"] = after["success"]
        print(f"held-out: loss {result['held_out_loss'] or math.nan:.3f}, "
              f"success {after['success']:.3f} of {len(tasks)} tasks")
        print(f"written: {folder}\nnext:    python grpo.py --model_path {config.output_dir} --env {config.env}")
    return run.finish({**result, "seconds": time.time() - started, "peak_memory_mb": peak_memory_mb()})


@torch.no_grad()
def held_out_loss(model, trajectories, batch_size) -> float:
    """`sft_loss` of demonstrations that were not trained on, nats per token."""
    total = tokens = 0.0
    for i in range(0, len(trajectories), batch_size):
        token_ids, loss_mask, _ = collate(trajectories[i:i + batch_size], model.device)  # (B, T)
        total += sft_loss(token_logprobs(model, token_ids, loss_mask)[0], loss_mask, 1).item()
        tokens += loss_mask.sum().item()
    return total / tokens


if __name__ == "__main__":
    main(Config, train, __doc__)
