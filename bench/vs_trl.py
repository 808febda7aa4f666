"""One GRPO step here and in TRL + PEFT, side by side: seconds, tokens/s, peak memory, and whether the gradients agree.

    python bench/vs_trl.py --model_path .real/smollm2      8 prompts x 8 samples x 128 tokens; 25 minutes on 2 cores
    python bench/vs_trl.py --results bench/results/vs_trl.json     the same, added to the measurements that pages quote
    python bench/vs_trl.py --model_path tiny-random --prompts 2 --samples 2 --tokens 8 --rounds 1   a minute

Three rows: TRL as it ships (its precision, its gradient checkpointing), TRL with the weight dtype that we use, and
ours. Each is a process of its own, which loads the model, does one step to warm up, and then waits for its turn: TRL,
TRL, ours, TRL, TRL, ours, `--repeats` steps at a turn, `--rounds` times. So a machine whose mood changes is as slow for
one as for the other. The ratio of a round is TRL's seconds by ours; reported are its median and range, in wall seconds
and in CPU seconds, which other work on the machine disturbs less, and how busy others kept the cores. A row's other
numbers are medians, its memory is the peak of the whole process. Ours also has `products_seconds`: how long the step's
products with weights would take at the rate of one large product, measured right after the step. A step is rollout,
reward, advantages, forward and backward of all samples, clipping, AdamW. Every sample is exactly `--tokens` long on
both sides: TRL may not sample an end-of-turn token, we do not stop at one.

Gradients: in float32, without autocast, both sides get the same adapter (B not zero), the same prompts and the same
completions, sampled here; rewards and advantages are each side's own. The LoRA gradients are compared over all tensors
together (`gradient_cosine`) and tensor by tensor (`gradient_cosine_min`).

The last line is JSON: `time_ratio` and `cpu_ratio` are TRL / ours, `memory_ratio` is ours / TRL. Its `machine` names the
processor's units (amx_bf16, avx512_bf16, ...) and the rates of a product in bfloat16 and float32: on some processors
bfloat16 is the slower one, and the ratio is another.
"""
import argparse
import datetime
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from bench.learning import constants, fingerprint, processor, product_rates  # noqa: E402

GSM8K = ROOT.parent / "shared" / "data" / "gsm8k" / "train.jsonl"
LORA_R, LORA_ALPHA = 16, 32
STEP = "step: "  # begins a worker's line for its parent


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_path", default=".real/smollm2",
                        help="model folder, or tiny-random: a 2-layer Llama made here")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8, help="of each prompt")
    parser.add_argument("--tokens", type=int, default=128, help="of each sample, exactly")
    parser.add_argument("--rounds", type=int, default=3, help="times each side gets its turn, after one to warm up")
    parser.add_argument("--repeats", type=int, default=1, help="steps in each turn")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"),
                        help="our frozen weights; also those of TRL's second row")
    parser.add_argument("--batch_size", type=int, default=8, help="our sequences in one forward of the update")
    parser.add_argument("--gradient_checkpointing", action="store_true", help="ours; TRL's is what ships")
    parser.add_argument("--trl_batch_size", type=int, default=8, help="per_device_train_batch_size; 8 ships")
    parser.add_argument("--trl_config", type=json.loads, default="{}",
                        help='other fields of GRPOConfig as JSON, for trials: {"gradient_checkpointing": false}')
    parser.add_argument("--results", type=Path, help="a JSON that the measurement is added to: bench/results/vs_trl.json")
    parser.add_argument("--no_gradients", action="store_true", help="skip the comparison of gradients")
    parser.add_argument("--worker", choices=("trl", "trl_same_dtype", "ours"), help=argparse.SUPPRESS)
    parser.add_argument("--gradients_to", help=argparse.SUPPRESS)  # a folder: gradients are written, nothing is timed
    args = parser.parse_args(argv)
    total = args.prompts * args.samples
    args.trl_batch_size, args.batch_size = min(args.trl_batch_size, total), min(args.batch_size, total)
    least = min(args.prompts, args.tokens, args.rounds, args.repeats, args.batch_size, args.trl_batch_size)
    if least < 1 or args.samples < 2:
        parser.error("--samples must be 2 or more, the other counts 1 or more")
    if total % args.trl_batch_size:
        parser.error(f"--trl_batch_size {args.trl_batch_size} must divide prompts x samples = {total}")
    if args.model_path.startswith((".", "/", "~")) and not os.path.isdir(args.model_path):
        parser.error(f"{args.model_path}: no such folder; "
                     "`python ../shared/real/get_smollm2.py .real/smollm2` makes SmolLM2-135M")
    return args


# ----------------------------------------------------------------------------------------------- the same on both sides
def conversations(n: int) -> list[list[dict]]:
    """n different conversations of one user message: the first questions of GSM8K, or made-up ones without it."""
    if GSM8K.exists():
        with open(GSM8K, encoding="utf-8") as file:
            questions = [json.loads(line)["question"] for _, line in zip(range(n), file)]
    else:
        questions = [f"Ann picks {12 + i} apples in the morning and {3 * i + 5} in the afternoon. She gives {i + 2} of "
                     "them to each of her two brothers and bakes a cake with half of the rest. How many apples does "
                     "she have left?" for i in range(n)]
    return [[{"role": "user", "content": question}] for question in questions]


def reward_of(text: str) -> float:
    """Share of vowels: cheap, deterministic, and never the same for a whole group."""
    return sum(c in "aeiou" for c in text) / max(len(text), 1)


def wait_for_turn():
    """Return when the parent says so. A worker that waits uses no core."""
    if not sys.stdin.readline():
        sys.exit(0)


def tell(step: dict, model, args):
    """Print the line of a step for the parent. step: "step" and "rollout" in wall seconds, "cpu" in CPU seconds."""
    import torch

    from core.run import peak_memory_mb
    frozen = {str(p.dtype).removeprefix("torch.") for p in model.parameters() if not p.requires_grad}
    trained = {str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.requires_grad}
    line = {"step_seconds": step["step"], "rollout_seconds": step["rollout"],
            "update_seconds": step["step"] - step["rollout"], "cpu_seconds": step["cpu"],
            "tokens_per_second": args.prompts * args.samples * args.tokens / step["step"],
            "peak_memory_mb": peak_memory_mb(),
            "weights": "+".join(sorted(frozen)), "adapter": "+".join(sorted(trained)),
            "trained_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
            "threads": torch.get_num_threads(), **step.get("facts", {})}
    print(f"\n{STEP}{json.dumps(line)}", flush=True)


def now() -> float:
    import torch
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


# ----------------------------------------------------------------------------------------------------------------- ours
def ours(args) -> dict:
    import torch

    from bench import profile_step
    from core.model import save_model
    from extras.fast.processor import bound_primitives
    from layers import load_model
    from lora import adapter_tensors, adapted_linears
    bound_primitives()
    model, tokenizer = load_model(args.model_path, lora_r=LORA_R, lora_alpha=LORA_ALPHA,
                                  gradient_checkpointing=args.gradient_checkpointing,
                                  dtype="float32" if args.gradients_to else args.dtype)
    prompts = [list(tokenizer.apply_chat_template(c, add_generation_prompt=True)["input_ids"])
               for c in conversations(args.prompts)]
    if args.gradients_to:
        folder, generator = Path(args.gradients_to), torch.Generator().manual_seed(1)
        for linear in adapted_linears(model).values():  # with B = 0 every gradient of A is 0: nothing to compare
            linear.lora.B.data.copy_(0.02 * torch.randn(linear.lora.B.shape, generator=generator))
        save_model(model, str(folder / "adapter"))
        _, completions = our_step(model, tokenizer, None, prompts, 0, args)
        (folder / "completions.json").write_text(json.dumps({"prompts": prompts, "completions": completions}))
        gradients = {name.removeprefix("base_model.model."): p.grad for name, p in adapter_tensors(model).items()}
        return write_gradients(gradients, folder / "ours.safetensors")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-6, weight_decay=0.0)
    for i in range(1 + args.rounds * args.repeats):
        wait_for_turn()
        cpu = time.process_time()
        step, _ = our_step(model, tokenizer, optimizer, prompts, i, args)
        cpu = time.process_time() - cpu
        work = sum(profile_step.products(model, prompts, args).values()) / profile_step.rate()
        tell({**step, "cpu": cpu, "facts": {"products_seconds": work}}, model, args)
    return {}


def our_step(model, tokenizer, optimizer, prompts, step: int, args):
    """The step of grpo.py without environment and log -> {"rollout", "step"} in seconds, completions (by prompt).

    optimizer None: stop before it, the gradients stay.
    """
    import torch

    from agent import Trajectory
    from core.data import collate
    from grpo import Config, Counts, group_advantages, total_loss
    from bench.completions import generate
    from core.logprobs import token_logprobs
    from layers import make_engine, pass_order
    from lora import merged
    began = now()
    with merged(model):  # the engine goes when `generate` returns, and its KV cache with it, as in agent.rollout
        sampled = generate(make_engine(model, slots=len(prompts) * args.samples,
                                       tokens=max(map(len, prompts)) + args.tokens),
                           prompts, group_size=args.samples, max_new_tokens=args.tokens, seed=step)
    rollout = now() - began
    assert all(len(ids) == args.tokens for ids, _ in sampled)
    batch = []
    for i, (ids, logprobs) in enumerate(sampled):
        prompt = prompts[i // args.samples]
        batch.append(Trajectory(prompt + ids, [0] * len(prompt) + [1] * len(ids), [0.0] * len(prompt) + logprobs,
                                group_id=str(i // args.samples),
                                reward=reward_of(tokenizer.decode(ids, skip_special_tokens=True))))
    batch = pass_order(batch, args.batch_size)
    token_ids, mask, old_logprobs = collate(batch, model.device)  # (B, T) each
    rewards = torch.tensor([t.reward for t in batch], device=model.device)  # (B,)
    advantages = group_advantages(rewards, [t.group_id for t in batch])[:, None] * mask  # (B, T)
    counts = Counts(len(batch), int(mask.sum()), token_ids.shape[1])
    config = Config(clip_eps_low=0.2, clip_eps_high=0.2, kl_coef=0.0)
    model.train()
    with merged(model):
        for i in range(0, len(batch), args.batch_size):
            part = slice(i, i + args.batch_size)
            width = max(len(t.token_ids) for t in batch[part])
            ids, m, old, adv = (x[part, :width] for x in (token_ids, mask, old_logprobs, advantages))  # (b, t) each
            logprobs, entropy = token_logprobs(model, ids, m)  # (b, t) each
            loss, metrics = total_loss(config, counts, logprobs, entropy, old, None, adv, m)
            loss.backward()
            del logprobs, entropy, loss, metrics
    if optimizer:
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    return {"rollout": rollout, "step": now() - began}, [ids for ids, _ in sampled]


# ------------------------------------------------------------------------------------------------------------------ TRL
def trl(args) -> dict:
    """TRL 1.16 as it ships, but for what the task fixes: batch shape, exactly 128 tokens, loss grpo, nothing saved."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig, PeftModel
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    checking = args.gradients_to is not None
    config = {"per_device_train_batch_size": args.trl_batch_size, "num_generations": args.samples,
              "max_completion_length": args.tokens, "loss_type": "grpo",
              "gradient_accumulation_steps": args.prompts * args.samples // args.trl_batch_size,
              "generation_kwargs": {"min_new_tokens": args.tokens},
              "max_steps": 1 if checking else 1 + args.rounds * args.repeats,
              "save_strategy": "no", "disable_tqdm": True, "use_cpu": not torch.cuda.is_available(),
              **({"bf16": False, "max_grad_norm": 0.0} if checking else args.trl_config),
              **({"model_init_kwargs": {"dtype": args.dtype}} if args.worker == "trl_same_dtype" else {})}
    step, gradients = {}, {}

    class Watch(TrainerCallback):
        def on_step_begin(self, *_, **__):
            if not checking:
                wait_for_turn()
            step.update(began=now(), cpu_began=time.process_time())

        def on_pre_optimizer_step(self, *_, model, **__):
            if checking:
                gradients.update({name.removeprefix("base_model.model.").replace(".default.", "."): p.grad.clone()
                                  for name, p in model.named_parameters() if p.requires_grad})

        def on_step_end(self, *_, **__):
            step.update(step=now() - step["began"], cpu=time.process_time() - step["cpu_began"])
            if not checking:
                tell({**step, "facts": {"config": shipped(trainer)}}, trainer.model, args)

    if checking:
        folder = Path(args.gradients_to)
        model = AutoModelForCausalLM.from_pretrained(args.model_path, dtype=torch.float32)
        model, lora = PeftModel.from_pretrained(model, str(folder / "adapter"), is_trainable=True), None
    else:
        model, lora = args.model_path, LoraConfig(
            r=LORA_R, lora_alpha=LORA_ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
    with tempfile.TemporaryDirectory() as output_dir:
        trainer = GRPOTrainer(
            model=model, peft_config=lora, args=GRPOConfig(output_dir=output_dir, **config), callbacks=[Watch()],
            reward_funcs=lambda completions, **_: [reward_of(c[0]["content"]) for c in completions],
            train_dataset=Dataset.from_list([{"prompt": c} for c in conversations(args.prompts)]))
        if checking:  # the n-th row of a prompt gets its n-th completion
            given, sample = json.loads((folder / "completions.json").read_text()), {}
            for i, ids in enumerate(given["completions"]):
                sample.setdefault(tuple(given["prompts"][i // args.samples]), []).append(ids)
            trainer._generate_single_turn = lambda prompt_ids, *_, **__: (
                [sample[tuple(ids)].pop(0) for ids in prompt_ids], None)
        generate = trainer._generate

        def timed(prompts):
            began = now()
            out = generate(prompts)
            step["rollout"] = now() - began
            sizes = [len(ids) for ids in out[1]]
            assert sizes == [args.tokens] * (args.prompts * args.samples), "not the size asked for"
            return out

        trainer._generate = timed
        trainer.train()
    if checking:
        assert not any(sample.values()), "TRL did not take every completion"
        return write_gradients(gradients, folder / "trl.safetensors")
    return {}


def shipped(trainer) -> dict:
    """What TRL trains with: not what was asked for, but what is."""
    names = ("per_device_train_batch_size", "gradient_accumulation_steps", "loss_type", "beta", "num_iterations",
             "use_liger_kernel")
    return {**{name: getattr(trainer.args, name) for name in names}, "autocast": trainer.accelerator.mixed_precision,
            "optim": trainer.args.optim.value, "gradient_checkpointing": trainer.model.is_gradient_checkpointing}


# ------------------------------------------------------------------------------------------------------------ gradients
def write_gradients(gradients: dict, path: Path) -> dict:
    from safetensors.torch import save_file
    save_file({name: g.detach().float().cpu().contiguous() for name, g in gradients.items()}, path)
    return {"tensors": len(gradients)}


def compare_gradients(folder: Path) -> dict:
    """Cosine over all tensors, of the worst tensor, and |TRL's| / |ours|. ValueError if there is nothing to compare."""
    import numpy as np
    from safetensors.numpy import load_file
    a, b = load_file(folder / "trl.safetensors"), load_file(folder / "ours.safetensors")
    if a.keys() != b.keys():
        raise ValueError(f"adapters differ: {sorted(a.keys() ^ b.keys())[:4]}")
    sums = np.array([[np.vdot(x, y) for x, y in ((p, q), (p, p), (q, q))] for p, q in
                     ((a[name].astype(np.float64), b[name].astype(np.float64)) for name in a)])  # (tensors, 3)
    if not (sums[:, 1:] > 0).all():
        raise ValueError("a gradient is 0 everywhere: nothing to compare")
    dot, trl_square, our_square = sums.sum(0)
    return {"gradient_cosine": float(dot / np.sqrt(trl_square * our_square)),
            "gradient_cosine_min": float((sums[:, 0] / np.sqrt(sums[:, 1] * sums[:, 2])).min()),
            "gradient_norm_ratio": float(np.sqrt(trl_square / our_square)), "gradient_tensors": len(a)}


# --------------------------------------------------------------------------------------------------------------- parent
class Worker:
    """One side's process. It loads its model at once, and takes a step when it is told to."""

    def __init__(self, side: str, args, model_path: str, gradients_to: Path | None = None):
        self.side = side
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", side, "--model_path", model_path,
                   "--trl_config", json.dumps(args.trl_config)]
        for name in ("prompts", "samples", "tokens", "rounds", "repeats", "dtype", "batch_size", "trl_batch_size"):
            command += [f"--{name}", str(getattr(args, name))]
        command += ["--gradient_checkpointing"] * args.gradient_checkpointing
        command += ["--gradients_to", str(gradients_to)] if gradients_to else []
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1",
                       "TOKENIZERS_PARALLELISM": "false"}
        # OpenMP's own default, as in a user's shell. With PASSIVE every small operation waits for the second core to
        # wake up: our step takes 1.4 times as long, and TRL's, which has fewer and larger operations, less.
        environment.pop("OMP_WAIT_POLICY", None)
        # The errors of a worker go to a file: a pipe that nobody reads would fill up.
        self.errors = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=self.errors, text=True)

    def step(self) -> dict:
        """Let it take one step, alone on the machine; return its line."""
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        busy, began = busy_seconds(), time.time()
        for line in self.process.stdout:
            if line.startswith(STEP):
                step = json.loads(line.removeprefix(STEP))
                others = busy_seconds() - busy - step["cpu_seconds"]
                return {**step, "others_busy": round(max(others, 0.0) / (time.time() - began) / os.cpu_count(), 3)}
        self.fail()

    def result(self) -> dict:
        """Wait for its end; return the JSON object that it prints last."""
        self.process.stdin.close()
        output = self.process.stdout.read()
        if self.process.wait():
            self.fail()
        return json.loads(output.strip().splitlines()[-1])

    def fail(self):
        self.errors.seek(0)
        sys.exit(f"bench/vs_trl.py: the worker {self.side} failed:\n{self.errors.read()[-3000:]}")


def busy_seconds() -> float:
    """Return the seconds that the machine's cores were not idle since it started; 0.0 where nobody counts them."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    user, nice, system, _, _, irq, softirq, steal = map(int, stat.read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def make_random(folder: str):
    """A 2-layer Llama of random weights with the tiny model's tokenizer, as a model folder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from core.tiny import make_tiny
    tokenizer = make_tiny()[1]
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.06, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def machine() -> dict:
    """Return the processor with its units, how fast it multiplies in both dtypes, the GPU, and the packages."""
    from importlib.metadata import version
    import torch
    return {**processor(), "gflops": product_rates(), "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            **{package: version(package) for package in ("torch", "transformers", "trl", "peft")}}


def keep(path, result):
    """Add a measurement to those that the JSON holds, under the kind of processor that it was taken on."""
    rates = result["machine"]["gflops"]
    result = {**result, "bfloat16": "fast" if rates["bfloat16"] > rates["float32"] else "slow"}
    data = json.loads(path.read_text()) if path.exists() else {"measurements": []}
    data |= {"command": result["command"], "settings": fingerprint(constants("vs_trl"))}
    data["measurements"].append(result)
    path.write_text(json.dumps(data, indent=1) + "\n")


MEDIANS = ("step_seconds", "rollout_seconds", "update_seconds", "cpu_seconds", "tokens_per_second", "others_busy",
           "products_seconds")


def medians(steps: list[dict]) -> dict:
    """One row from the steps of one side: medians, and the memory of the last step, which is the peak so far."""
    return {**steps[-1], **{name: round(statistics.median(step[name] for step in steps), 4)
                            for name in MEDIANS if name in steps[0]},
            "all_step_seconds": [round(step["step_seconds"], 4) for step in steps],
            "all_cpu_seconds": [round(step["cpu_seconds"], 4) for step in steps]}


def compare(trl_steps: list[dict], our_steps: list[dict]) -> dict:
    """Ratios of the steps that were taken one after the other, their medians, and the ratio of the peaks of memory."""
    def ratios(name):
        return [round(a[name] / b[name], 3) for a, b in zip(trl_steps, our_steps, strict=True)]

    wall, cpu = ratios("step_seconds"), ratios("cpu_seconds")
    return {"time_ratio": round(statistics.median(wall), 3), "time_ratios": wall,
            "cpu_ratio": round(statistics.median(cpu), 3), "cpu_ratios": cpu,
            "memory_ratio": round(our_steps[-1]["peak_memory_mb"] / trl_steps[-1]["peak_memory_mb"], 3)}


def main(args) -> dict:
    began, workers, agreement = time.time(), {}, {}
    print(f"{args.prompts} prompts x {args.samples} samples x {args.tokens} tokens of {args.model_path}; prompts: "
          f"{GSM8K.name + ' of GSM8K' if GSM8K.exists() else 'made up'}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        model_path = args.model_path
        if model_path in ("tiny", "tiny-random"):
            make_random(model_path := os.path.join(folder, "model"))
        if not args.no_gradients:
            counts = [Worker(side, args, model_path, Path(folder)).result()["tensors"]
                      for side in ("ours", "trl")]  # ours samples
            agreement = compare_gradients(Path(folder))
            print(f"gradients of {counts[0]} LoRA tensors, float32: cosine {agreement['gradient_cosine']:.7f}, "
                  f"worst tensor {agreement['gradient_cosine_min']:.7f}, "
                  f"|TRL| / |ours| {agreement['gradient_norm_ratio']:.5f}", flush=True)
        warm_up = {}
        for side in ("trl", "trl_same_dtype", "ours"):
            if side == "trl_same_dtype" and warm_up["trl"]["weights"] == args.dtype:
                continue  # what ships has our dtype already: the row would be the same
            workers[side] = Worker(side, args, model_path)
            warm_up[side] = workers[side].step()
        steps = {side: [] for side in workers}
        for i in range(args.rounds):
            for side, worker in workers.items():
                for _ in range(args.repeats):
                    steps[side].append(step := worker.step())
                    print(f"round {i + 1}/{args.rounds} {side:15} {step['step_seconds']:8.2f} s, CPU "
                          f"{step['cpu_seconds']:8.2f} s, peak {step['peak_memory_mb']:,.0f} MB; others kept "
                          f"{step['others_busy']:.0%} of the cores busy", flush=True)
        for worker in workers.values():
            worker.result()
    rows = {side: medians(taken) for side, taken in steps.items()}
    ratios = {side: compare(steps[side], steps["ours"]) for side in workers if side != "ours"}
    ratios.setdefault("trl_same_dtype", ratios["trl"])
    names = {"trl": "TRL + PEFT, --trl_config" if args.trl_config else "TRL + PEFT as shipped",
             "trl_same_dtype": f"TRL + PEFT, {args.dtype} weights", "ours": "ours"}
    print(f"\n{'':30} {'weights':>9} {'step s':>9} {'CPU s':>9} {'rollout':>9} {'update':>9} {'tokens/s':>9} "
          f"{'peak MB':>9}   {'TRL / ours':>10} {'by CPU':>8} {'ours / TRL':>10}")
    for side, row in rows.items():
        ratio = ""
        if side in ratios:
            ratio = "   {time_ratio:9.2f}x {cpu_ratio:7.2f}x {memory_ratio:10.2f}".format(**ratios[side])
        print(f"{names[side]:30} {row['weights']:>9} {row['step_seconds']:9.2f} {row['cpu_seconds']:9.2f} "
              f"{row['rollout_seconds']:9.2f} {row['update_seconds']:9.2f} {row['tokens_per_second']:9.1f} "
              f"{row['peak_memory_mb']:9,.0f}{ratio}")
    wall = sorted(ratios["trl"]["time_ratios"])
    print(f"TRL / ours in {len(wall)} rounds: {wall[0]:.2f}x to {wall[-1]:.2f}x")
    result = {
        **ratios["trl"], **agreement, "same_dtype": {"dtype": args.dtype, **ratios["trl_same_dtype"]}, "rows": rows,
        "model_path": args.model_path, "prompts": args.prompts, "samples": args.samples, "tokens": args.tokens,
        "rounds": args.rounds, "repeats": args.repeats, "batch_size": args.batch_size,
        "gradient_checkpointing": args.gradient_checkpointing, "trl_config": args.trl_config, "machine": machine(),
        "date": datetime.date.today().isoformat(), "seconds": round(time.time() - began),
        "command": "python " + shlex.join([os.path.relpath(__file__, ROOT), *sys.argv[1:]])}
    if args.results:
        keep(args.results, result)
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    options = arguments()
    if options.worker:
        print("\n" + json.dumps((ours if options.worker == "ours" else trl)(options)))
    else:
        main(options)
