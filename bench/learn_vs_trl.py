"""Does the same training in TRL + PEFT teach the same? The tiny model on `equations`, 36 steps.

    python bench/learn_vs_trl.py                                  all arms, seeds 0, 1, 2
    python bench/learn_vs_trl.py --only ours,trl --seeds 3,4      more seeds of two arms
    python bench/learn_vs_trl.py --only before,gradient --seeds 0 the start's exam; one same step

Both sides start from the same taught model and the same fresh adapter, play the same tasks in the
same order (8 tasks x 8 episodes a step), and have the same loss, learning rates, AdamW, clip range,
KL penalty and limits. What is left is each side's own sampling. Afterwards our `evaluate` plays
both adapters on the same 200 held-out tasks. The arms:

    ours            one update a step, credit by episode
    trl             the same in TRL's GRPOTrainer; the environment makes TRL stop where we stop
    trl_shipped     the same with `Equations` as it is: TRL does not know `done`
    ours_two        two updates a step
    trl_two         TRL with num_iterations=2

An environment cannot tell TRL that an episode is over. But TRL drops a tool's answer that would
make the completion too long, and ends the episode there: `Ending` says something very long once the
episode is done, or has had its four calls. `trl_shipped` has four rounds of tools too, and then one
more turn, whose calls nobody runs.
"""
import functools
import math
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from bench.learning import (  # noqa: E402
    Clock, arguments, exam, fingerprint, interval, read_rows, report, run_missing, series,
    settings_of, spread, taught_base, write_row)

ARMS = ("ours", "trl", "trl_shipped", "ours_two", "trl_two")
TASKS_PER_STEP, GROUP_SIZE, LORA_R = 8, 8, 16
LEARNING_RATE, KL_COEF, MAX_GRAD_NORM, BATCH_SIZE = 4e-3, 0.1, 0.05, 16  # grpo.TINY of the day of the runs
STEPS = 36
MAX_COMPLETION = 900  # tokens: what an episode of 1,024 leaves beside the prompt
TOO_LONG = "over " * MAX_COMPLETION


# --------------------------------------------------------------------------------------------- ours
def our_config(base, folder, seed, steps, updates=1):
    import grpo
    return grpo.Config(
        model_path=base, output_dir=str(folder), seed=seed, max_steps=steps, eval_tasks=0,
        tasks_per_step=TASKS_PER_STEP, group_size=GROUP_SIZE, batch_size=BATCH_SIZE, lora_r=LORA_R,
        learning_rate=LEARNING_RATE, max_grad_norm=MAX_GRAD_NORM, kl_coef=KL_COEF,
        kl_estimator="k3_ratio", loss="grpo", credit="episode", scale_rewards="group",
        clip_eps_low=0.2, clip_eps_high=0.2, updates_per_step=updates, temperature=1.0,
        dtype="float32", overwrite=True)


def train_ours(base, folder, seed, steps, updates):
    """Train with grpo.py. Return the adapter's folder and the mean reward of each step."""
    import grpo
    grpo.train(our_config(base, folder, seed, steps, updates))
    return folder, series(folder, "reward")


# ---------------------------------------------------------------------------------------------- TRL
def ending_environment():
    """Return `Equations` as a class that makes TRL end an episode where our rollout ends it.

    Its tools answer through our own `call`, so that errors read the same on both sides.
    """
    from envs import call, tools
    from envs.equations import Equations

    class Ending:
        def __init__(self):
            self._inner = Equations()

        def reset(self, **task):
            self._calls = 0
            return self._inner.reset(**task)

        def get_reward(self) -> float:
            return self._inner.get_reward()

    def ending(name, tool):
        @functools.wraps(tool)
        def method(self, **values):
            self._calls += 1
            text, _ = call(self._inner, name, values)
            over = self._inner.done or self._calls >= Equations.max_turns
            return TOO_LONG if over else text
        return method

    for name, tool in tools(Equations).items():
        setattr(Ending, name, ending(name, tool))
    return Ending


def task_rows(seed, steps) -> list[dict]:
    """Return the tasks of all steps as grpo.py draws them, as rows for TRL."""
    from core.data import draw_tasks
    from envs.tasks import load_tasks
    from envs.equations import Equations
    tasks = load_tasks("equations", "train", 10_000, seed)
    rows = []
    for step in range(steps):
        rows += draw_tasks(tasks, seed, step, TASKS_PER_STEP, 0, TASKS_PER_STEP)
    # TRL appends the first observation to the user message.
    prompt = [{"role": "system", "content": Equations.system_prompt},
              {"role": "user", "content": ""}]
    return [{"prompt": prompt, "equation": row["equation"], "noise_seed": row["noise_seed"]}
            for row in rows]


def rate(step, steps) -> float:
    """Return the share of the peak learning rate: `Run.scheduled` of core/run.py."""
    warmup_steps = max(1, min(20, steps // 10))
    return min(1.0, (step + 1) / warmup_steps) * (1 - 0.9 * min(step / steps, 1.0))


def make_trainer(base, folder, seed, steps, environment, iterations=1, callbacks=(), **changes):
    """Return a GRPOTrainer that differs from `our_config` in nothing that it can be told."""
    import torch
    from datasets import Dataset
    from peft import PeftModel
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer
    from trl.chat_template_utils import qwen3_template

    from envs.equations import Equations
    from layers import load_model
    from core.model import save_model
    start = str(Path(folder) / "start")
    fresh, tokenizer = load_model(base, lora_r=LORA_R, seed=seed)
    save_model(fresh, start)
    # TRL finds the parser by the chat template. The tiny model's calls are written as Qwen3's.
    tokenizer.response_template = qwen3_template
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), start, is_trainable=True)
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        weights, lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda update: rate(update // iterations, steps))
    config = {
        "max_steps": steps * iterations, "num_iterations": iterations, "seed": seed,
        "per_device_train_batch_size": BATCH_SIZE, "num_generations": GROUP_SIZE,
        "gradient_accumulation_steps": TASKS_PER_STEP * GROUP_SIZE // BATCH_SIZE,
        "loss_type": "grpo", "scale_rewards": "group", "epsilon": 0.2, "beta": KL_COEF,
        "temperature": 1.0, "max_grad_norm": MAX_GRAD_NORM, "shuffle_dataset": False,
        "max_completion_length": MAX_COMPLETION,
        "max_tool_calling_iterations": Equations.max_turns,
        "generation_kwargs": {"max_new_tokens": Equations.limits["max_new_tokens"]},
        # These change time and memory only.
        "gradient_checkpointing": False, "bf16": False, "use_cpu": True, "save_strategy": "no",
        "report_to": [], "logging_steps": 1, "disable_tqdm": True}
    return GRPOTrainer(
        model=model, processing_class=tokenizer, environment_factory=environment,
        train_dataset=Dataset.from_list(task_rows(seed, steps)), callbacks=list(callbacks),
        optimizers=(optimizer, schedule),
        args=GRPOConfig(output_dir=str(Path(folder) / "trl"), **{**config, **changes}))


def train_trl(base, folder, seed, steps, iterations, shipped):
    """Train with TRL. Return the adapter's folder and the mean reward of each step."""
    from envs.equations import Equations
    environment = Equations if shipped else ending_environment()
    trainer = make_trainer(base, folder, seed, steps, environment, iterations)
    trainer.train()
    adapter = Path(folder) / "adapter"
    trainer.model.save_pretrained(adapter, selected_adapters=["default"])
    rewards = [round(line["reward"], 4) for line in trainer.state.log_history if "reward" in line]
    # With two iterations the second update logs the same episodes again.
    return adapter, rewards[::iterations]


# ----------------------------------------------------------------------------- one arm and one seed
def worker(args):
    """Do one run and write its row."""
    arm, seed = args.worker, args.seeds[0]
    base = taught_base(args.out)
    folder = Path(args.out) / f"{arm}_{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    from layers import load_model
    if arm == "gradient":
        return write_row(args, arm, seed, gradient(base, seed))
    if arm == "before":
        return write_row(args, arm, seed, exam(*load_model(base, train=False), args.tasks))
    clock = Clock()
    passes = 2 if arm.endswith("_two") else 1
    if arm.startswith("trl"):
        adapter, rewards = train_trl(base, folder, seed, args.steps, passes, arm == "trl_shipped")
    else:
        adapter, rewards = train_ours(base, folder, seed, args.steps, passes)
    times = clock.read()
    from core.run import peak_memory_mb
    memory = round(peak_memory_mb())
    model, tokenizer = load_model(str(adapter), train=False)
    after = exam(model, tokenizer, args.tasks)
    write_row(args, arm, seed, {**after, **times, "peak_memory_mb": memory,
                                "rewards_in_training": rewards})


# --------------------------------------------------------------- the gradient of an identical step
def gradient(base, seed) -> dict:
    """Compare the gradients of one step whose episodes we sampled and TRL plays again.

    TRL renders, runs the tools, pays and computes everything itself. Only where it would sample, it
    gets the turn that our episode has after exactly the same ids. If its ids differed from ours
    anywhere, there would be no such turn.
    """
    import torch

    from bench.vs_trl import compare_gradients, write_gradients
    from lora import adapter_tensors, adapted_linears
    from layers import load_model
    model, tokenizer = load_model(base, lora_r=LORA_R, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    # With B = 0 every gradient of A is 0, and so is the KL.
    for linear in adapted_linears(model).values():
        linear.lora.B.data.copy_(0.07 * torch.randn(linear.lora.B.shape, generator=generator))
    with tempfile.TemporaryDirectory() as folder:
        episodes, loss = our_gradient(model, tokenizer, our_config(base, folder, seed, 1))
        ours = {plain(name): p.grad for name, p in adapter_tensors(model).items()}
        write_gradients(ours, Path(folder) / "ours.safetensors")
        weights = {plain(name): p.data for name, p in adapter_tensors(model).items()}
        theirs, trl_loss = trl_gradient(base, folder, seed, episodes, weights)
        write_gradients(theirs, Path(folder) / "trl.safetensors")
        agreement = compare_gradients(Path(folder))
    turns = sum(len(t.rewards) for t in episodes) / len(episodes)
    return {**agreement, "turns": turns, "episodes": len(episodes), "loss": loss,
            "trl_loss": trl_loss}


def plain(name) -> str:
    """Return the name of an adapter's tensor without what PEFT puts around it."""
    return name.removeprefix("base_model.model.").replace(".default.", ".")


def our_gradient(model, tokenizer, config):
    """Return the episodes of a step and its loss; its gradient stays in the model."""
    from core.data import draw_tasks
    from envs.tasks import load_tasks
    import grpo
    from core.data import collate
    from agent import rollout, rollout_options
    from core.logprobs import token_logprobs
    from lora import merged_to_train, reference
    config = grpo.settle(config)
    tasks = draw_tasks(load_tasks("equations", "train", 10_000, config.seed), config.seed, 0,
                       TASKS_PER_STEP, 0, TASKS_PER_STEP)
    batch = rollout(model, tokenizer, "equations", tasks, GROUP_SIZE, **rollout_options(config))
    token_ids, mask, sampled = collate(batch)  # (B, T) each
    advantages = grpo.token_advantages(batch, mask, config.credit)
    counts = grpo.Counts(len(batch), int(mask.sum()), config.max_tokens)
    with reference(model, None):
        ref_logprobs = token_logprobs(model, token_ids, mask)[0].detach()
    with merged_to_train(model):
        logprobs, entropy = token_logprobs(model, token_ids, mask)
        loss, _ = grpo.total_loss(config, counts, logprobs, entropy, sampled, ref_logprobs,
                                  advantages, mask)
        loss.backward()
    return batch, loss.item()


def turns_by_prefix(episodes) -> dict:
    """Return {ids before a turn: the turns that were sampled after them}."""
    turns = {}
    for t in episodes:
        begin = None
        for i, sampled in enumerate([*t.loss_mask, 0]):
            if sampled and begin is None:
                begin = i
            if not sampled and begin is not None:
                turns.setdefault(tuple(t.token_ids[:begin]), []).append(t.token_ids[begin:i])
                begin = None
    return turns


def trl_gradient(base, folder, seed, episodes, weights):
    """Return TRL's gradient of the same step, before clipping, and its loss."""
    from transformers import TrainerCallback
    turns, gradients = turns_by_prefix(episodes), {}

    class Watch(TrainerCallback):
        def on_pre_optimizer_step(self, *_, model, **__):
            for name, p in model.named_parameters():
                if p.requires_grad:
                    gradients[plain(name)] = p.grad.clone()

    trainer = make_trainer(base, folder, seed, 1, ending_environment(), callbacks=[Watch()],
                           max_grad_norm=0.0)
    for name, p in trainer.model.named_parameters():
        if p.requires_grad:
            p.data.copy_(weights[plain(name)])
    trainer._generate_single_turn = lambda prompt_ids, *_, **__: (
        [turns[tuple(ids)].pop(0) for ids in prompt_ids], None)
    trainer.train()
    assert not any(turns.values()), "TRL did not take every turn"
    return gradients, next(x["loss"] for x in trainer.state.log_history if "loss" in x)


# ---------------------------------------------------------------------------------------- the table
def mean_reward(row, last=0) -> float:
    """Return the mean reward of the last steps of training; 0: of all."""
    rewards = row["rewards_in_training"][-last:]
    return math.fsum(rewards) / len(rewards)


# Of each step both sides play the same tasks, so rewards in training are comparable step by step.
MEASURES = {
    "success": lambda row: row["success"],
    "reward_in_training": mean_reward,
    "reward_last_10_steps": lambda row: mean_reward(row, 10),
    "cpu_seconds": lambda row: row["cpu_seconds"],
    "seconds": lambda row: row["seconds"],
}


def summarize(rows) -> dict:
    """Return the summary of every arm, and the differences of pairs of arms seed by seed."""
    arms = {}
    for arm, by_seed in rows.items():
        arms[arm] = {name: spread([measure(row) for row in by_seed.values()])
                     for name, measure in MEASURES.items()}
        arms[arm]["peak_memory_mb"] = max(row["peak_memory_mb"] for row in by_seed.values())
    pairs = {}
    for ours, trl in (("ours", "trl"), ("ours", "trl_shipped"), ("ours_two", "trl_two")):
        seeds = sorted(rows.get(ours, {}).keys() & rows.get(trl, {}).keys())
        if seeds:
            pairs[f"{ours} - {trl}"] = {name: spread(
                [measure(rows[ours][seed]) - measure(rows[trl][seed]) for seed in seeds])
                for name, measure in MEASURES.items()}
    return {"arms": arms, "paired": pairs}


def main(argv=None):
    args = arguments(__doc__, (*ARMS, "before", "gradient"), "learn_vs_trl", argv, steps=STEPS)
    if args.worker:
        return worker(args)
    taught_base(args.out)
    run_missing(__file__, args)
    rows = read_rows(args, (*ARMS, "before", "gradient"))
    summary = summarize({arm: rows[arm] for arm in ARMS if arm in rows})
    for arm, numbers in summary["arms"].items():
        print(f"{arm:12} {interval(numbers['success'])}  {numbers['cpu_seconds']['mean']:.0f} s")
    report(args, "learn_vs_trl", settings=fingerprint(settings_of("learn_vs_trl")), **summary,
           rows=rows)


if __name__ == "__main__":
    main()
