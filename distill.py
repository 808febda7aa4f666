"""On-policy distillation: the student plays, and a teacher judges every token that it sampled.

    rollout                      the student plays episodes with tools
    teacher.logprobs             the teacher's log-probabilities of the student's own tokens
    distillation_advantages      A = sg(log teacher - log student), token by token
    distillation_loss            -ratio A, a mean over tokens: it estimates KL(student || teacher)
    train                        a step: play, let the teacher score, update

arXiv 2306.13649 (GKD), in the form of thinkingmachines.ai/blog/on-policy-distillation. A reward
says once in an episode how it went; here every token has a target. SFT on a teacher's episodes
shows what the teacher does; here it is also asked what to do after the student's own mistakes. No
reward is used. Left out: the KL over the whole vocabulary, of which a token's A is a sample (it
takes the logits of both models at once, and servers do not tell them); recorded episodes; credit
for later tokens (each token has its own KL, not what it changes in the KL of later ones).

    python distill.py        the tiny model and a teacher, made from nothing: minutes on a CPU
    python distill.py --model_path MODEL --teacher RUN      an adapter of MODEL: no second model
    python distill.py --model_path SMALL --teacher LARGE    models with the same tokenizer
    python distill.py --model_path SMALL --teacher http://host:8000        extras/vllm/teacher.py

Shapes: B sequences of T tokens (b in a micro-batch). Column t of a (B, T) tensor belongs to token
t. A mask is 1 exactly where the student sampled the token. sg is stop_gradient.
"""
import math
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

# Imported before torch: it sets how torch's threads wait.
from layers import LayerFlags, Run, load_model, main, pass_order
from core.config import (ModelFlags, RunFlags, TrainingFlags, UserError, auto, fill, flag,
                         options_for, reading)
from envs.tasks import PlayFlags, train_and_held_out
from core.data import collate, draw_tasks, per_token, played_shares, unusable, without_faults

import torch
from safetensors.torch import load_file
from torch.nn.utils import clip_grad_norm_

import envs
from agent import evaluate, rollout, rollout_options
from core.model import (TENSORS, adamw, base_of, facts, is_adapter, is_tiny, newest,
                        read_settings, scheduled, steps_of)
from core.logprobs import score, token_logprobs
from lora import adapted_linears, merged_to_train, reference
from schooling import school, teach_tiny

# What the tiny model needs in place of the defaults: several updates of a step's episodes, and
# single tokens that its teacher finds impossible are clipped.
TINY = {"learning_rate": 4e-3, "updates_per_step": 4, "max_grad_norm": 0.05, "batch_size": 16,
        "dtype": "float32"}
DEFAULT_STEPS = 12


# ------------------------------------------------------------------------------------------- loss
def distillation_advantages(logprobs, teacher_logprobs):
    """Return A = sg(log teacher - log student): (B, T), 0 where both are, as where no token counts.

    A token that the teacher finds likelier than the student does has A > 0. Where they agree it is
    0, and nothing is learned.
    """
    return (teacher_logprobs - logprobs).detach()


def distillation_loss(logprobs, sampled_logprobs, teacher_logprobs, num_tokens):
    """Compute -ratio A over the tokens of the update, with ratio = student / sampler.

    Args, all (b, T), in nats, and 0 where the student did not sample the token:
        logprobs: of the student in training, with gradient.
        sampled_logprobs: of the student when it played. The tokens were drawn from it.
        teacher_logprobs: of the teacher.

    num_tokens is the number of sampled tokens of the step, so that the losses of its micro-batches
    add up to its loss. Over the tokens that may be drawn after a context, with p the student and q
    the teacher,

        E[ratio log(p / q)] = KL(p || q)        E[-A grad ratio] = grad KL(p || q)

    which is arXiv 2306.13649 eq. 6 with the reverse KL and all data on-policy. A is of the student
    as it is now: both stay true in the second update of a step, when it has left the sampler.
    """
    advantages = distillation_advantages(logprobs, teacher_logprobs)
    ratio = (logprobs - sampled_logprobs).exp()
    return -(ratio * advantages).sum() / num_tokens


# ----------------------------------------------------------------------------------------- config
@dataclass(kw_only=True)
class Config(ModelFlags, LayerFlags, PlayFlags, TrainingFlags, RunFlags):
    heading = "distillation"
    output_dir: str = "runs/distill"
    teacher: str | None = flag(None, "who judges: the folder of a model, an adapter or a run, a "
                                     "hub id, or the address of a server (http://host:8000); the "
                                     "tiny model's default: one that is schooled here")
    tasks_per_step: int = flag(64, "tasks of a step", low=1)
    group_size: int = 1
    max_samples: int = flag(10_000, "training tasks", low=1)
    updates_per_step: int | None = auto(1, "passes over a step's episodes, an update each", low=1)
    num_epochs: int | None = flag(None, f"passes over the tasks; default: {DEFAULT_STEPS} steps")


def settle(config: Config) -> Config:
    """Return the config with the defaults that depend on the model or the environment."""
    tiny = is_tiny(config.model_path)
    if not (config.teacher or tiny):
        raise UserError("--teacher: give the folder of a model that is better at this than "
                        f"{config.model_path}; `python grpo.py --model_path {config.model_path} "
                        f"--env {config.env} --output_dir runs/teacher` makes one")
    return fill(config, TINY if tiny else {}, envs.recommended(config.env))


# ---------------------------------------------------------------------------------------- teacher
class LocalTeacher:
    """A teacher in this process.

    Attributes:
        model: a model of its own, or the student's, if `adapter` takes the place of what trains.
        adapter: {parameter: tensor} as `lora.reference` takes it, or None.
    """

    def __init__(self, model, adapter=None):
        self.model, self.adapter = model, adapter

    def policy(self):
        """Return a context in which `model` is the teacher."""
        return reference(self.model, self.adapter) if self.adapter else merged_to_train(self.model)

    def logprobs(self, token_ids, mask, temperature, run):
        """Return the teacher's log-probabilities of the tokens where the mask is 1: (B, T)."""
        with self.policy():
            return score(self.model, token_ids, mask, temperature, run)

    def success(self, tokenizer, config, tasks, run):
        """Return the share of the tasks that the teacher solves, None without tasks."""
        with self.policy():
            played = evaluate(self.model, tokenizer, config.env, tasks,
                              **rollout_options(config, run))
        return played.get("success")


def mask_unpaid(t):
    """Take the turns that earned nothing out of the loss mask of an episode."""
    paid = (torch.tensor(t.rewards) > 0).long()  # (turns,)
    t.loss_mask = per_token([paid], torch.tensor([t.loss_mask]))[0].long().tolist()


def find_teacher(config, run, model, tokenizer):
    """Return the teacher that --teacher names. An adapter of the student's base is loaded alone."""
    path = config.teacher or str(run.folder / "teacher")
    if path.startswith(("http://", "https://")):
        from extras.vllm.teacher import ServerTeacher
        return ServerTeacher(path, tokenizer, config)
    if not config.teacher:  # of the student's demonstrations it is shown the right actions alone
        run.begin()
        run.ranks.first(lambda: Path(path).exists() or school(
            config, Path(path), start=facts(model).source, change=mask_unpaid))
    path = newest(path)
    if is_adapter(path) and config.lora_r and is_base(base_of(path), model):
        adapter = read_adapter(model, path)
        print(f"teacher: {path}, an adapter of the student's base: {megabytes(adapter.values())}")
        return LocalTeacher(model, adapter)
    options = options_for(load_model, config) | {"lora_r": 0}
    teacher, its_tokenizer = load_model(path, train=False, **options)
    if its_tokenizer.get_vocab() != tokenizer.get_vocab():
        raise UserError(f"--teacher {path}: its tokenizer is another one than the student's: the "
                        "ids of one mean other text to the other")
    print(f"teacher: {path}, beside the student: {megabytes(teacher.parameters())}")
    return LocalTeacher(teacher)


def megabytes(tensors) -> str:
    """Return what these tensors take in memory, as text."""
    return f"{sum(p.numel() * p.element_size() for p in tensors) / 1e6:.3g} MB"


def is_base(path: str, model) -> bool:
    """True if a folder or hub id is where the model's weights were read from."""
    return os.path.realpath(path) == os.path.realpath(facts(model).source)


def read_adapter(model, folder: str) -> dict:
    """Return an adapter in PEFT's format as {parameter of the model: tensor}. UserError if odd.

    Its rank and alpha may differ from the student's: B is scaled. Where it has no tensors it is 0.
    """
    config = read_settings(folder, {})
    root = math.sqrt(config["r"]) if config.get("use_rslora") else config["r"]
    with reading(Path(folder, TENSORS)):
        saved = load_file(Path(folder, TENSORS))
    weights = {}
    for name, linear in adapted_linears(model).items():
        for leaf, p in linear.lora.tensors().items():
            key = f"base_model.model.{name}.{leaf}"
            weights[f"{name}.lora.{leaf[5]}"] = saved.pop(key, torch.zeros_like(p)).to(p)
        weights[f"{name}.lora.B"] *= config["lora_alpha"] / root / linear.lora.scale
    if saved:
        raise UserError(f"--teacher {folder}: {next(iter(saved))} is of a Linear that the student "
                        "does not adapt; give --lora_target_modules "
                        + ",".join(config["target_modules"]))
    return weights


# ------------------------------------------------------------------------------------------- loop
def collect(play, tasks, config: Config, step: int, run):
    """Play the step's episodes; those whose environment failed are left out."""
    n = config.tasks_per_step
    played = play(draw_tasks(tasks, config.seed, step, n, first=0, n=n), config.group_size,
                  step=step)
    run.log(**played_shares(played))
    return without_faults(played)


def total_loss(logprobs, entropy, sampled_logprobs, teacher_logprobs, mask, num_tokens):
    """Return a micro-batch's loss, and metrics that add up to means over the step's tokens."""
    loss = distillation_loss(logprobs, sampled_logprobs, teacher_logprobs, num_tokens)
    difference = (logprobs - sampled_logprobs).detach()
    to_log = {"entropy": entropy.detach(), "ratio": difference.exp() * mask,
              "gap": difference.abs()}
    metrics = {name: x.sum() / num_tokens for name, x in to_log.items()}
    return loss, {**metrics, "loss": loss.detach()}


def train(config: Config) -> dict:
    """Play with the student, let the teacher score its tokens, move towards it, repeat."""
    config = settle(config)
    tasks, held_out = train_and_held_out(config, config.max_samples)
    run = Run(config, "distill")  # the output folder: logs, checkpoints, result
    if run.finished:
        return run.finished
    model, tokenizer = load_model(teach_tiny(config, run), **options_for(load_model, config))
    teacher = find_teacher(config, run, model, tokenizer)
    optimizer = adamw(model, lr=config.learning_rate, weight_decay=config.weight_decay)
    play = partial(rollout, model, tokenizer, config.env, **rollout_options(config, run))
    test = partial(evaluate, model, tokenizer, config.env, held_out, **play.keywords)
    total = steps_of(config, len(tasks) / config.tasks_per_step, DEFAULT_STEPS)
    with run:
        for step in range(run.load(model, tokenizer, optimizer, total), total):
            if step % (config.eval_every or total) == 0:
                run.log_evaluation(step, test())
            for group in optimizer.param_groups:  # from the rate that it was made with
                group["lr"] = scheduled(group["initial_lr"], step, run.planned)
            run.log(learning_rate=optimizer.param_groups[0]["lr"])
            # 1. Rollout: the student plays.
            episodes = collect(play, tasks, config, step, run)
            if reason := unusable(episodes):
                run.skip(episodes, reason)
                run.end_step(step)
                continue
            run.log_episodes(episodes)
            batch = pass_order(episodes, config.batch_size)  # all B episodes of the step
            token_ids, mask, sampled_logprobs = collate(batch, model.device)  # (B, T) each
            num_tokens = mask.sum().item()
            # 2. Targets: the teacher's log-probabilities of the student's own tokens.
            teacher_logprobs = teacher.logprobs(token_ids, mask, config.temperature, run)  # (B, T)
            # To log: the loss has its own A, of the student as each update finds it.
            advantages = distillation_advantages(sampled_logprobs, teacher_logprobs)
            run.log(teacher_kl=-advantages.sum().item() / num_tokens)  # before the update
            run.record(batch, advantages=advantages, old=sampled_logprobs, ref=teacher_logprobs)
            # 3. Update, in micro-batches, through merged weights: they round as the sampler's did.
            model.train()
            for update in range(config.updates_per_step):  # the last one is logged
                metrics = []  # of every micro-batch; they add up to the step's
                with merged_to_train(model):
                    for rows in run.micro_batches(len(batch), step, update):
                        logprobs, entropy = token_logprobs(
                            model, token_ids[rows], mask[rows], config.temperature)  # (b, T) each
                        loss, numbers = total_loss(logprobs, entropy, sampled_logprobs[rows],
                                                   teacher_logprobs[rows], mask[rows], num_tokens)
                        logprobs.retain_grad()  # what multiplies each token's grad log pi
                        loss.backward()
                        run.record(batch[rows], new=logprobs, entropy=entropy)
                        metrics.append(numbers)
                        del logprobs, entropy, loss  # free the graph: the next one needs room
                totals = run.ranks.all_reduce(model, metrics)
                grad_norm = clip_grad_norm_(model.parameters(), config.max_grad_norm).item()
                if math.isfinite(totals["loss"] + grad_norm):
                    optimizer.step()
                else:  # it would spoil the weights for good
                    run.skip(batch, f"loss {totals['loss']}, gradient norm {grad_norm}")
                optimizer.zero_grad()
                if update == 0:  # ratio 1 and gap 0 but for rounding and dropout
                    run.log(first_ratio=totals["ratio"], sampler_gap=totals["gap"])
            run.log(**totals, grad_norm=grad_norm)
            run.end_step(step)
        solved = teacher.success(tokenizer, config, held_out, run)
        if solved is not None:
            print(f"\nthe teacher, on the held-out tasks: success {solved:.3f}")
        return run.finish(test(), teacher_success=solved)


if __name__ == "__main__":
    main(Config, train, __doc__)
