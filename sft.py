"""Supervised fine-tuning (SFT): imitate demonstrations.

    sft_loss  -log pi(token | tokens before it), a mean over the demonstrator's tokens
    train     AdamW over shuffled epochs; loss and success on held-out data

Demonstrations (extras/data/imitation.py) are episodes of an environment's scripted expert, or what a
file holds: conversations (--dataset) or recorded episodes (--trajectories).

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
import io
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import lru_cache, partial

# Imported before torch: it sets how torch's threads wait.
from core.config import (EnvironmentFlags, ModelFlags, RunFlags, TrainingFlags, auto, fill, flag,
                         imitation_learning_rate, options_for, main)
from core.run import Run

import torch
from torch.nn.utils import clip_grad_norm_

import envs
from agent import collate, evaluate, rollout_options
from extras.data.imitation import demonstrations, evaluation_tasks, read_dataset
from envs.tasks import with_env
from core.data import batches_of_like_length
from core.model import TrainingState, adamw, is_tiny
from layers import LayerFlags, load_model
from lora import merge
from core.logprobs import token_logprobs

# What the tiny model needs in place of the defaults. Its larger forward passes are faster.
TINY = {"learning_rate": 3e-3, "batch_size": 32, "gradient_accumulation_steps": 1,
        "dtype": "float32"}

# How the tiny model is taught before another algorithm starts from it: by demonstrations in which
# most actions are wrong, but numbers are copied correctly. Which action to choose is left to learn.
TINY_SFT = {"max_samples": 1400, "expert_noise": 0.6, "max_turns": 6, "max_steps": 300,
            "batch_size": 16}


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
    config = with_env(config)
    return fill(config, TINY if is_tiny(config.model_path) else {}, envs.limits(config.env))


def train(config: Config) -> dict:
    """Imitate demonstrations: make every token that the demonstrator wrote more likely."""
    config = settle(config)
    conversations = read_dataset(config)  # first, so that a bad row is refused at once
    run = Run(config, "sft", envs)  # output folder, resume, signals
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
    with run:
        state = TrainingState(model, tokenizer, optimizer)
        total = run.total_steps(steps_per_epoch)
        for step in run.steps(total, state, test, evaluate_before=config.model_path != "tiny"):
            # 1. Episodes: the next demonstrations of the epoch.
            epoch, place = divmod(step, steps_per_epoch)
            batch = batches(epoch)[place]
            token_ids, loss_mask, _ = collate(batch, model.device)  # (B, T) each

            # 2. Targets: every token that the demonstrator wrote counts the same.
            num_tokens = loss_mask.sum().item()

            # 3. Update. The losses of the micro-batches add up to the loss of the step.
            model.train()
            loss_sum = 0.0
            for rows in run.micro_batches(len(batch), step):
                logprobs, _ = token_logprobs(model, token_ids[rows], loss_mask[rows])  # (b, T)
                loss = sft_loss(logprobs, loss_mask[rows], num_tokens)
                loss.backward()
                loss_sum += loss.item()
                del logprobs, loss  # free the graph: the next one needs room
            run.ranks.add_gradients(model)
            loss_sum = sum(run.ranks.gather(loss_sum))
            grad_norm = clip_grad_norm_(model.parameters(), config.max_grad_norm).item()
            run.discard_if_not_finite(batch, loss_sum, grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss_sum, grad_norm=grad_norm, tokens=num_tokens)
    return run.finish("grpo.py" if config.env else "agent.py",
                      held_out_loss=run.after.get("loss"))


def teach_tiny(config, run, plays=True) -> str:
    """Make the tiny model, teach it the tool format by a short SFT, and return its folder.

    The folder is `base/` in the output folder, which the run's adapters point to, or where the
    config names another model, that one. The SFT is a run of its own, in `schooling/`.

    Args:
        config, run: of the algorithm that starts from the tiny model. Every process takes part.
        plays: False if the algorithm only evaluates on its tasks, which are then not taught.
    """
    if config.model_path != "tiny":
        return config.model_path
    run.begin()
    base = run.folder / "base"
    # The folder gets its name when it is whole.
    if run.ranks.first(base.exists):
        return str(base)
    envs.need_expert(config.env or "equations")
    print(f"tiny model: made in {base}; {TINY_SFT['max_steps']} SFT steps on noisy demonstrations "
          "teach it the format")
    folder = run.folder / "schooling"
    tasks = config.tasks if plays else None
    # Without an evaluation the run holds no row out, and the schooling need not either.
    held_out = config.eval_dataset or (None if config.eval_tasks else tasks)
    schooling = Config(output_dir=str(folder), env=config.env or "equations", seed=config.seed,
                       tasks=tasks, eval_dataset=held_out, eval_tasks=0, fields=config.fields,
                       env_options=config.env_options, unsafe_code=config.unsafe_code,
                       rewards=config.rewards, resume=folder.exists(), **TINY_SFT)
    # The schooling shows its bar alone, not what it says nor transformers' bars.
    from transformers.utils.logging import disable_progress_bar
    disable_progress_bar()
    with redirect_stdout(io.StringIO()):
        train(schooling)
        run.ranks.first(lambda: merge(schooling.output_dir, str(base)))
    return str(base)


if __name__ == "__main__":
    main(Config, train, __doc__)
