"""Supervised fine-tuning: imitate demonstrations.

    demonstrations  -> episodes of a world's scripted expert (`demonstrate`), or what a file holds (`recorded`)
    sft_loss        -> -log pi(token | tokens before it), a mean over the tokens that the demonstrator wrote
    train           -> AdamW over shuffled epochs; held-out loss and held-out success

Loss falls on assistant tokens and their end-of-turn token only: prompts, templates and tool results are context. Left
out: packing (episodes of like length share a batch instead), label smoothing.

    python sft.py                       the tiny model learns the equations world from nothing: a minute on a CPU
    python sft.py --model_path Qwen/Qwen2.5-0.5B-Instruct --env gsm8k --lora_r 16 --learning_rate 1e-4
    python sft.py --model_path Qwen/Qwen2.5-0.5B-Instruct --dataset chats.jsonl --lora_r 16
"""
import json
import math
import time
import unicodedata
import zlib
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

import envs
from agent import Limits, Trajectory, collate, demonstrate, evaluate
from envs import gsm8k, meetings
from experiment.run import Run, UserError, flag, main, mix, optimizer_tensors, peak_memory_mb, replace_file, to_json
from llm.chat import Chat
from llm.dry_run import dry_run
from llm.loading import DTYPES, fast_float32, load_model, load_weights, model_options, save_model
from llm.logprobs import token_logprobs
from llm.merge import merge
from llm.optimizer import adamw

# How the other algorithms' tiny model is taught before they start: by demonstrations in which most
# actions are wrong, but numbers are always copied correctly. Which action to choose is left to learn.
TINY_SFT = {
    "max_samples": 2600,
    "expert_noise": 0.6,
    "max_turns": 6,
    "max_steps": 340,
    "batch_size": 16,
    "learning_rate": 3e-3,
}


@dataclass
class Config:
    model_path: str = flag("tiny", "model: tiny, hub id, model folder, adapter folder or output folder", group="model")
    lora_r: int = flag(0, "LoRA rank; 0: all weights train", group="model", low=0)
    lora_alpha: float | None = flag(None, "LoRA alpha; default: twice the rank", group="model", above=0)
    lora_dropout: float = flag(0.0, "dropout on the adapter's input", group="model", low=0, high=0.99)
    lora_target_modules: str = flag("all-linear", "names of adapted Linears, separated by commas", group="model")
    use_rslora: bool = flag(False, "scale by alpha / sqrt(rank)", group="model")
    dtype: str = flag("float32", "of frozen weights", group="model", choices=tuple(DTYPES))

    memory: str = flag("plain", "what is saved, each with what stands before it", group="memory",
                       choices=("plain", "checkpoint", "4bit", "small", "stream"))
    load_in_4bit: bool = flag(False, "frozen base in NF4 with double quantization", group="memory")
    gradient_checkpointing: bool = flag(
        False, "recompute layers in the backward pass: less memory, a third more time", group="memory")
    dry_run: bool = flag(False, "print what every setting of --memory would need, and stop", group="memory")

    env: str | None = flag(None, "world or worlds (a,b); also path/to/file.py:Class; default: equations, or with "
                                 "recorded rows the world they are of", group="data")
    dataset: str | None = flag(
        None, "rows (.jsonl, .csv) to learn from: messages | prompt, completion | question, answer (GSM8K) | "
        "input_text, target_probability ... (meetings) | token_ids ...; all other rows, and those that a given --env "
        "takes for its tasks, are played by the expert", group="data")
    eval_dataset: str | None = flag(None, "held-out rows of the same kind; default: a tenth, by hash", group="data")
    trajectories: str | None = flag(None, "recorded episodes (trajectories.jsonl) to imitate; --dataset and "
                                          "--eval_dataset are then tasks to play at the end", group="data")
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
    resume: str | None = flag(None, "go on with the run in output_dir, from its newest checkpoint or the one before",
                              group="run", choices=("newest", "previous"), const="newest")
    resume_anyway: bool = flag(False, "resume with other --batch_size, --slots or ways to recompute", group="run")
    seed: int = flag(0, "of everything random", group="run", low=0)
    save_every: int = flag(0, "steps between checkpoints; 0: at the end", group="run", low=0)
    eval_tasks: int = flag(200, "held-out tasks played, at temperature 1, after (and before, if the model is not tiny)",
                           group="run", low=0)
    eval_every: int = flag(0, "steps between evaluations; 0: before and after only", group="run", low=0)


def sft_loss(logprobs, loss_mask, num_tokens):
    """-sum log pi / num_tokens. logprobs, loss_mask (B, T); num_tokens: masked tokens of the whole step."""
    return -(logprobs * loss_mask).sum() / num_tokens


def learning_rate(step: int, config, total: int) -> float:
    """Linear warm-up, then a cosine to a tenth. A function of the step alone: nothing to save."""
    warm = min(1.0, (step + 1) / max(config.warmup_steps, 1))
    return config.learning_rate * warm * (0.55 + 0.45 * math.cos(math.pi * step / total))


# ---------------------------------------------------------------------------------------------------------- data
FIELDS = (("token_ids", "loss_mask"), ("messages",), ("prompt", "completion"), ("question", "answer"),
          ("input_text", "target_probability"))
KINDS = "; ".join(map(", ".join, FIELDS))


def demonstrations(config: Config, tokenizer, split: str, n: int, vocabulary: int | None = None) -> list[Trajectory]:
    """At most n episodes to imitate, `split` "train" or "test": recorded, or the expert's; too long: dropped aloud."""
    if rows := learns_rows(config):
        found = recorded(config, tokenizer, split, n, vocabulary or len(tokenizer))
    else:
        tasks = envs.tasks(config.env, split, n, config.seed, config.dataset, config.eval_dataset)
        if config.dataset:
            print(f"{config.dataset}: {len(tasks)} tasks for the expert of {config.env} ({split})")
        tasks = [{**task, "noise": config.expert_noise, "seed": mix(config.seed, split, i)}
                 for i, task in enumerate(tasks)]
        found = demonstrate(tokenizer, config.env, tasks, Limits(config.max_turns, max_tokens=config.max_tokens))
    short = [t for t in found if len(t.token_ids) <= config.max_tokens]
    if len(short) < len(found):
        print(f"{len(found) - len(short)} of {len(found)} episodes exceed {config.max_tokens} tokens: dropped")
    if not short and not (rows and split == "test"):
        floor = f"of reward {config.min_reward} or more " if config.min_reward is not None else ""
        raise UserError(f"no episodes to imitate: {config.trajectories or config.dataset or config.env} has none "
                        f"{floor}within {config.max_tokens} tokens")
    return short


def learns_rows(config: Config) -> bool:
    """Whether a file's rows are learnt from: --trajectories; --dataset, if its first has some FIELDS and is no task."""
    if config.trajectories or not config.dataset or config.dataset == config.env:
        return bool(config.trajectories)
    row = envs.read_rows(config.dataset)[0]
    line, known = row.pop("_line"), any(row.keys() >= {*fields} for fields in FIELDS)
    if not config.env and not known and not envs.is_task("equations", row):
        raise UserError(f"{config.dataset}:{line}: neither a row to learn from ({KINDS}) nor a task of equations; "
                        f"name the world with --env; has: {', '.join(row)}")
    return known and not (config.env and envs.is_task(config.env, row))


def recorded(config: Config, tokenizer, split: str, n: int, vocabulary: int) -> list[Trajectory]:
    """At most n episodes of a file's rows, drawn by the seed; UserError `FILE:LINE: what is wrong`.

    Held out is --eval_dataset, or every tenth row by the hash of its content, of an episode by that of its task. Rows
    that bring no tools and no system message get those of --env, if it is given.
    """
    apart = None if config.trajectories and config.dataset else config.eval_dataset
    path = apart if split == "test" and apart else config.trajectories or config.dataset
    world = envs.load(config.env) if config.env and "," not in config.env else None
    system = getattr(world, "system_prompt", None)
    chat = lru_cache(64)(lambda tools: Chat(tokenizer, json.loads(tools)))
    rows, found, kinds, spelled = [], [], Counter(), Counter()
    for row in envs.read_rows(path):
        where = f"{path}:{row.pop('_line')}"
        try:
            kind, what = read_row(row)
            if isinstance(what, Trajectory):
                check_tokens(what, tokenizer, vocabulary)
                if config.min_reward is not None and what.reward < config.min_reward:
                    continue
                row = [what.info.get("task"), what.token_ids[:what.loss_mask.index(1)]]
        except ValueError as error:
            raise UserError(f"{where}: {error}") from None
        rows.append((where, kind, what, row, zlib.crc32(json.dumps(row, sort_keys=True).encode()) % 10 == 0))
    if not apart:
        few = all(held for *_, held in rows)  # one or two rows: all are learnt from
        rows = [r for r in rows if (r[-1] and not few) == (split == "test")]
    for i in np.random.default_rng(config.seed).permutation(len(rows))[:n]:
        where, kind, what, row, _ = rows[i]
        kinds[kind] += 1
        if not isinstance(what, Trajectory):
            solved, text = kind == "written solutions", json.dumps(what, ensure_ascii=False)
            spelled.update({token for token in tokenizer.all_special_tokens if token in text})
            tools = envs.schemas(envs.load("gsm8k")) if solved else row.get("tools")
            if tools is None:
                tools = envs.schemas(world) if world else []
            try:
                tools = json.loads(tools) if isinstance(tools, str) and tools.lstrip().startswith("[") else tools
                check_tools(tools)
                if (about := row.get("system") or system) and what[0].get("role") != "system":
                    what = [{"role": "system", "content": about}, *what]
                ids, mask = chat(json.dumps(tools)).conversation(what)
            except ValueError as error:
                raise UserError(f"{where}: {error}") from None
            what = Trajectory(ids, mask, [0.0] * len(ids), group_id=where, stop_reason="done", messages=what,
                              info={"env": "gsm8k"} if solved else {})
        found.append(what)
    print(f"{path}: {' and '.join(f'{count} {kind}' for kind, count in kinds.items()) or 'none'} of {len(rows)} rows "
          f"{'to learn from' if split == 'train' else 'held out'}")
    for token, count in spelled.items():  # text stays text: it ends no turn
        print(f"{count} rows contain {token} as text")
    return found


def read_row(row: dict) -> tuple[str, list[dict] | Trajectory]:
    """What a row to learn from is, and its messages or episode; its fields tell. ValueError: in one line.

    token_ids ...            an episode of trajectories.jsonl: what its policy sampled is learnt
    messages                 a conversation, "tools" and "system" beside it; messages with "loss" or "weight" 0 are not
                             learnt
    prompt, completion       each text or messages; the completion is learnt
    question, answer         GSM8K's written solution: each <<48/2=24>> becomes a call, answered by the world itself
    input_text, target_probability, target_reason, ground_truth_prob     a meeting as text, and the answer as JSON
    """
    match row:
        case {"token_ids": _, "loss_mask": _}:
            episode = Trajectory.from_json({key: value for key, value in row.items() if key != "step"})
            if not sum(episode.loss_mask):
                raise ValueError("nothing to train: loss_mask is 0 throughout")
            return "episodes", episode
        case {"messages": [{"role": _}, *_] as messages}:
            return "conversations", messages
        case {"messages": _}:
            raise ValueError('"messages" must be a list of {"role": ..., "content": ...}')
        case {"prompt": prompt, "completion": completion}:
            for name, part, lost in (("prompt", prompt, "answer"), ("completion", completion, "train on")):
                if isinstance(part, (str, list)) and not (part.strip() if isinstance(part, str) else part):
                    raise ValueError(f'"{name}" is empty: nothing to {lost}')
            prompt, completion = ([{"role": role, "content": part}] if isinstance(part, str) else part
                                  for role, part in (("user", prompt), ("assistant", completion)))
            if not all(isinstance(part, list) and part and all(isinstance(m, dict) for m in part)
                       for part in (prompt, completion)):
                raise ValueError('"prompt" and "completion" must each be text or a list of messages')
            return "completions", [{**m, "loss": 0} for m in prompt] + completion
        case {"question": _, "answer": _}:
            return "written solutions", gsm8k.written_solution(row)
        case {"input_text": _, "target_probability": _}:
            text, probability, reason, _ = meetings.read_columns({key: str(value) for key, value in row.items()})
            return "meetings", [{"role": "user", "content": text},
                                {"role": "assistant", "content": meetings.answer(probability, reason)}]
    raise ValueError(f"nothing to learn from; need {KINDS}; has: {', '.join(row)}")


def check_tokens(episode: Trajectory, tokenizer, vocabulary: int):
    """ValueError if another model's tokenizer wrote the episode: ids out of range, or the user's words not in them."""
    if (largest := max(episode.token_ids)) >= vocabulary:
        raise ValueError(f"token {largest} is not in this model's vocabulary of {vocabulary}: another model's episode")
    asked, read = (unicodedata.normalize("NFKC", "".join(text.split())) for text in (  # what tokenizers may lose
        next((str(m.get("content")) for m in episode.messages if m.get("role") == "user"), ""),
        tokenizer.decode(episode.token_ids)))
    if asked not in read:
        raise ValueError("the tokens do not spell the episode's messages: another model's episode")


def check_tools(tools):
    try:
        named = isinstance(tools, list) and all(isinstance(tool["function"]["name"], str) for tool in tools)
    except (TypeError, KeyError):
        named = False
    if not named:
        raise ValueError('"tools" must be a list of {"type": "function", "function": {"name": ...}}')


# ---------------------------------------------------------------------------------------------------------- loop
def epoch_batches(data: list[Trajectory], per_step: int, seed: int, epoch: int, pool=16) -> list[list[Trajectory]]:
    """Return one pass over the data as batches of at most `per_step` episodes; every episode is in one of them.

    Episodes are shuffled; within every `pool` batches those of similar length share a batch, which saves padding.
    Batches are as even as possible, so that none is left with a few long episodes.
    """
    rng = np.random.default_rng([seed, epoch])
    batches = []
    for chosen in np.array_split(rng.permutation(len(data)), math.ceil(len(data) / (pool * per_step))):
        alike = sorted(chosen, key=lambda i: len(data[i].token_ids))
        batches += np.array_split(alike, math.ceil(len(alike) / per_step))
    return [[data[i] for i in batches[place]] for place in rng.permutation(len(batches))]


def train(config: Config) -> dict:
    started = time.time()
    if config.learning_rate is None:
        config = replace(config, learning_rate=3e-3 if config.model_path == "tiny" else 1e-4 if config.lora_r else 1e-5)
    rows = learns_rows(config)
    if not (config.env or rows):
        config = replace(config, env="equations")
    if config.dry_run:
        plays = config.env or config.trajectories  # chats and answers have no world
        return dry_run(config, lambda logprobs, _, mask: sft_loss(logprobs, mask, 1), merge=False,
                       rows=min(config.batch_size, config.max_samples), held_out=config.eval_tasks if plays else 0)
    run = Run(config, "sft")
    if run.finished:
        return run.finished
    fast_float32()
    model, tokenizer = load_model(config.model_path, **model_options(config))
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = adamw(model, lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=config.weight_decay)
    vocabulary = model.get_input_embeddings().num_embeddings
    data = demonstrations(config, tokenizer, "train", config.max_samples, vocabulary)
    held_out = demonstrations(config, tokenizer, "test", 100, vocabulary)
    world, tasks = config.env or recorded_world(data), []
    if config.eval_tasks and world:
        playable = config.trajectories or not rows or envs.is_task(world, envs.read_rows(config.dataset)[0])
        files = (config.dataset, config.eval_dataset) if config.dataset and playable else ()  # else the world's own
        tasks = envs.tasks(world, "test", config.eval_tasks, config.seed, *files)
    per_step = config.batch_size * config.gradient_accumulation_steps
    steps_per_epoch = len(epoch_batches(data, per_step, config.seed, 0))
    total = config.max_steps or config.num_epochs * steps_per_epoch

    def held_out_success():
        if not tasks:
            return None
        return evaluate(model, tokenizer, world, tasks, limits=Limits(max_tokens=config.max_tokens),
                        seed=config.seed, step=-1, run=run)["success"]

    def save(step):
        return run.save(step, lambda folder: save_model(model, folder), tokenizer,
                        optimizer_tensors(optimizer, model.named_parameters()),
                        {"before": before, "seconds": time.time() - training_began})

    start, saved = run.restore(lambda folder: load_weights(model, folder), optimizer, model.named_parameters())
    before = saved["before"] if saved else held_out_success() if config.model_path != "tiny" else None
    started, training_began = (t - saved.get("seconds", 0.0) for t in (started, time.time()))
    run.begin(save)
    bar = tqdm(range(start, total), "sft", initial=start, total=total)
    for step in bar:
        began = time.time()
        epoch, place = divmod(step, steps_per_epoch)
        batch = epoch_batches(data, per_step, config.seed, epoch)[place]
        num_tokens, loss = sum(sum(t.loss_mask) for t in batch), 0.0
        model.train()
        for part in run.ranks.micro_batches(len(batch), config.batch_size):
            run.check()
            torch.manual_seed(mix(config.seed, "dropout", step, part.start))
            token_ids, loss_mask, _ = collate(batch[part], model.device)  # (B, T) each
            logprobs = token_logprobs(model, token_ids, loss_mask)[0]  # (B, T)
            part = sft_loss(logprobs, loss_mask, num_tokens)
            part.backward()
            loss += part.item()
            del logprobs, part  # or the graph lies in the way of the next
        run.ranks.add_gradients(weights)
        loss = sum(run.ranks.gather(loss))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config, total)
        grad_norm = torch.nn.utils.clip_grad_norm_(weights, config.max_grad_norm).item()
        if run.accept_update(batch, loss, grad_norm):
            optimizer.step()
        optimizer.zero_grad()
        model.eval()
        metrics = {"loss": loss, "grad_norm": grad_norm, "learning_rate": optimizer.param_groups[0]["lr"],
                   "tokens": num_tokens}
        seconds = time.time() - began
        if config.eval_every and (step + 1) % config.eval_every == 0 and tasks:
            metrics["eval/success"] = held_out_success()
        run.write_line(step, metrics, {"seconds": seconds})
        bar.set_postfix(loss=f"{loss:.3f}")
        run.end(step + 1, metrics.get("eval/success"))
        if config.max_seconds and run.ranks.first(lambda: time.time() - training_began > config.max_seconds):
            total = step + 1
            break
    folder, after = run.last(total), held_out_success()
    result = {"success_before": before, "success_after": after, "steps": total, "seed": config.seed,
              "held_out_loss": None}
    if held_out:
        result["held_out_loss"] = held_out_loss(model, held_out, config.batch_size)
    if config.eval_tasks:
        print(f"held-out: loss {result['held_out_loss'] or math.nan:.3f}"
              + (f", success {after:.3f} of {len(tasks)} tasks" if tasks else "; no world, no success")
              + f"\nwritten: {folder}"
              + (f"\nnext:    python grpo.py --model_path {config.output_dir} --env {world}" if world else ""))
    return run.write_result({**result, "seconds": time.time() - started, "peak_memory_mb": peak_memory_mb()})


def recorded_world(data: list[Trajectory]) -> str | None:
    """The worlds that all of the episodes are of, if we know them: a data file does not choose which code runs."""
    names = {str(t.info.get("env")) for t in data}
    return ",".join(sorted(names)) if names <= envs.ENVS.keys() else None


@torch.no_grad()
def held_out_loss(model, trajectories, batch_size) -> float:
    """`sft_loss` of demonstrations that were not trained on, nats per token."""
    total = tokens = 0.0
    for i in range(0, len(trajectories), batch_size):
        token_ids, loss_mask, _ = collate(trajectories[i:i + batch_size], model.device)  # (B, T)
        total += sft_loss(token_logprobs(model, token_ids, loss_mask)[0], loss_mask, 1).item()
        tokens += loss_mask.sum().item()
    return total / tokens


def teach_tiny(config, run) -> str:
    """Make the tiny model, teach it the tool format by a short SFT, and return its folder.

    The folder is `base/` in the output folder: a plain model, which the run's adapters point to.
    A resumed run finds it there and teaches nothing.

    Args:
        config: of the algorithm that starts from the tiny model (`output_dir`, `env`, `seed`).
        run: that algorithm's Run. Of several processes all take part in the SFT, and one writes.
    """
    base = Path(config.output_dir, "base")
    taught = base / "made.json"  # written last: where it exists, the folder is complete
    if run.ranks.first(taught.exists):
        return str(base)
    print("tiny model: made here, and taught the format by a short SFT on noisy demonstrations")
    schooling = Config(output_dir=str(base / "sft"), env=config.env or "equations", seed=config.seed,
                       eval_tasks=0, overwrite=True, **TINY_SFT)
    seconds = train(schooling)["seconds"]
    run.ranks.first(lambda: merge(schooling.output_dir, str(base)))
    run.ranks.first(lambda: replace_file(taught, to_json({"seconds": seconds})))
    return str(base)


if __name__ == "__main__":
    main(Config, train, __doc__)
