"""One GRPO step here, in TRL + PEFT, in TRL with its fused LM head (Liger) and in Unsloth: seconds and peak memory.

    python bench/peers.py --model_path FOLDER                    bfloat16 and 4 bits, at most --minutes 3.8 in all
    python bench/peers.py --model_path tiny-random --prompts 2 --samples 2 --tokens 8 --forms bfloat16     on a CPU
    python bench/peers.py --model_path FOLDER --wheels wheels    installs what is there first, where it does no harm

A step is what bench/vs_trl.py's is: rollout of 8 x 8 samples of exactly 128 tokens, reward, advantages, forward,
backward, clipping, AdamW. Each peer is a process of its own that does one step to warm up and then `--rounds` of them;
they run one after another, so times are comparable on a machine that is otherwise idle. A peer that is not installed
or fails is skipped with its reason, and one that takes too long keeps the steps that it has done. Peaks are torch's
on the GPU (allocated and reserved), and the process's memory on a CPU.

A lent card has neither Liger nor Unsloth. These wheels bring them, without their dependencies (Python 3.12, 64 MiB may
be carried):

    pip download --no-deps --python-version 3.12 --only-binary=:all: -d wheels liger-kernel
    pip download --no-deps --python-version 3.12 --only-binary=:all: -d wheels unsloth unsloth_zoo cut_cross_entropy \
        tyro docstring-parser typeguard msgspec hf_transfer json5 nest-asyncio structlog \
        transformers==5.17.0 trl==1.15.0 torchvision torchao

Unsloth wants older versions of transformers and TRL than we do, so each peer gets a folder of packages of its own:
`wheels` for Liger, and `wheels/unsloth` for Unsloth. The last line is the JSON.
"""
import argparse
import datetime
import importlib
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from bench.vs_trl import LORA_ALPHA, LORA_R, conversations, make_random, now, our_step, reward_of  # noqa: E402

# peer -> the packages that it needs beside torch and transformers
PEERS = {"ours": [], "trl": ["trl", "peft"], "liger": ["trl", "peft", "liger_kernel"],
         "unsloth": ["trl", "peft", "unsloth", "unsloth_zoo"]}
FORMS = "bfloat16", "4bit"
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
STEP = "step: "  # begins a line of a worker


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_path", required=True, help="a model folder, or tiny-random: a 2-layer Llama made here")
    parser.add_argument("--peers", nargs="+", default=list(PEERS), choices=PEERS)
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=FORMS)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8, help="of each prompt")
    parser.add_argument("--tokens", type=int, default=128, help="of each sample, exactly")
    parser.add_argument("--batch_size", type=int, default=8, help="sequences in one forward of the update")
    parser.add_argument("--rounds", type=int, default=2, help="steps after the one to warm up")
    parser.add_argument("--minutes", type=float, default=3.8, help="of all peers together")
    parser.add_argument("--wheels", type=Path, help="folder of wheels to install for the peers")
    parser.add_argument("--worker", choices=PEERS, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.batch_size = min(args.batch_size, args.prompts * args.samples)
    return args


def missing(peer: str, paths=()) -> list[str]:
    """Return the packages that a peer needs and that are neither installed nor in these folders."""
    return [name for name in PEERS[peer] if not importlib.util.find_spec(name)
            and not any((Path(path) / name).is_dir() for path in paths)]


# ----------------------------------------------------------------------------------------------------------- a process
def tell(step: float, rollout: float | None, weights: str):
    """Print the line of a step for the parent."""
    import torch

    from core.run import peak_memory_mb
    line = {"step_seconds": step, "rollout_seconds": rollout, "weights": weights}
    if torch.cuda.is_available():
        line |= {"allocated_mib": torch.cuda.max_memory_allocated() / 2**20,
                 "reserved_mib": torch.cuda.max_memory_reserved() / 2**20}
    else:
        line |= {"process_mib": peak_memory_mb()}
    print(f"\n{STEP}{json.dumps(line)}", flush=True)


def ours(args, form: str):
    """Take our steps, at the default settings or with --memory 4bit."""
    from core.model import adamw
    from layers import load_model
    model, tokenizer = load_model(args.model_path, lora_r=LORA_R, lora_alpha=LORA_ALPHA, dtype="bfloat16",
                                  memory="4bit" if form == "4bit" else "plain")
    prompts = [list(tokenizer.apply_chat_template(c, add_generation_prompt=True)["input_ids"])
               for c in conversations(args.prompts)]
    optimizer = adamw(model, lr=1e-6)
    for i in range(1 + args.rounds):
        seconds, _ = our_step(model, tokenizer, optimizer, prompts, i, args)
        tell(seconds["step"], seconds["rollout"], form)


def trainers(args, form: str, peer: str):
    """Take the steps of TRL's trainer: as it ships, with the fused head, or as Unsloth changes it."""
    import torch
    if peer == "unsloth":
        importlib.import_module("unsloth")  # it changes TRL, so it comes first
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
    model, tokenizer, lora = (unsloth_model if peer == "unsloth" else peft_model)(args, form)
    config = {"per_device_train_batch_size": args.batch_size, "num_generations": args.samples,
              "gradient_accumulation_steps": args.prompts * args.samples // args.batch_size,
              "max_completion_length": args.tokens, "generation_kwargs": {"min_new_tokens": args.tokens},
              "loss_type": "grpo", "max_steps": 1 + args.rounds, "save_strategy": "no", "disable_tqdm": True,
              "report_to": "none", "use_cpu": not torch.cuda.is_available(), "bf16": True}
    if peer == "liger":
        config["use_liger_kernel"] = True
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=model, processing_class=tokenizer, peft_config=lora, args=GRPOConfig(output_dir=folder, **config),
            reward_funcs=lambda completions, **_: [reward_of(c[0]["content"]) for c in completions],
            train_dataset=Dataset.from_list([{"prompt": c} for c in conversations(args.prompts)]))
        watch(trainer, form)
        trainer.train()


def watch(trainer, form: str):
    """Let a trainer tell the seconds of each step, and of its rollout where its method has the known name."""
    from transformers import TrainerCallback
    seconds = {"rollout": None}
    generate = getattr(trainer, "_generate", None)

    def timed(*positional, **named):
        began = now()
        result = generate(*positional, **named)
        seconds["rollout"] = now() - began
        return result

    class Watch(TrainerCallback):
        def on_step_begin(self, *_, **__):
            seconds["began"] = now()

        def on_step_end(self, *_, **__):
            tell(now() - seconds["began"], seconds["rollout"], form)

    trainer.add_callback(Watch())
    if generate:
        trainer._generate = timed


def peft_model(args, form: str):
    """Return model, tokenizer and LoraConfig as PEFT's users make them."""
    import torch
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
    options = {"dtype": torch.bfloat16}
    if form == "4bit":
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16)
        options["device_map"] = {"": "cuda:0" if torch.cuda.is_available() else "cpu"}
    model = AutoModelForCausalLM.from_pretrained(args.model_path, **options)
    lora = LoraConfig(r=LORA_R, lora_alpha=LORA_ALPHA, target_modules=PROJECTIONS, task_type="CAUSAL_LM")
    return model, AutoTokenizer.from_pretrained(args.model_path), lora


def unsloth_model(args, form: str):
    """Return model and tokenizer as Unsloth's notebooks for GRPO make them, without vLLM."""
    import torch
    FastLanguageModel = importlib.import_module("unsloth").FastLanguageModel
    model, tokenizer = FastLanguageModel.from_pretrained(
        args.model_path, max_seq_length=1024, dtype=torch.bfloat16, load_in_4bit=form == "4bit",
        fast_inference=False, local_files_only=True)
    model = FastLanguageModel.get_peft_model(
        model, r=LORA_R, lora_alpha=LORA_ALPHA, target_modules=PROJECTIONS, lora_dropout=0, bias="none",
        use_gradient_checkpointing="unsloth", random_state=0)
    return model, tokenizer, None


# ----------------------------------------------------------------------------------------------------------- the parent
def measure(args, model_path: str, peer: str, form: str, seconds: float, paths: list) -> dict:
    """Run a peer for at most so many seconds. Return its row, with "skipped" or "error" if something is missing."""
    if absent := missing(peer, paths):
        return {"skipped": f"not installed: {', '.join(absent)}"}
    sizes = [str(word) for name in ("prompts", "samples", "tokens", "batch_size", "rounds")
             for word in (f"--{name}", getattr(args, name))]
    command = [sys.executable, str(Path(__file__).resolve()), "--worker", peer, "--forms", form, "--model_path", model_path, *sizes]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "TOKENIZERS_PARALLELISM": "false",
                   "PYTHONPATH": os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")])}
    began = time.time()
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            status = process.wait(max(1.0, seconds))
            error = f"exit status {status}" if status else None
        except subprocess.TimeoutExpired:
            error = f"stopped after {seconds:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.seek(0)
        lines = log.read().splitlines()
    steps = [json.loads(line.removeprefix(STEP)) for line in lines if line.startswith(STEP)]
    row = summary(steps)
    if error and len(steps) <= args.rounds:
        row |= {"error": error, "log": lines[-25:]}
    return {**row, "seconds": round(time.time() - began, 1)}


def summary(steps: list[dict]) -> dict:
    """Return the median of the steps after the first one, and the peak so far."""
    if len(steps) < 2:
        return {"steps": len(steps)}
    row = {**steps[-1], "steps": len(steps), "all_step_seconds": [round(s["step_seconds"], 4) for s in steps]}
    for name in ("step_seconds", "rollout_seconds"):
        known = [step[name] for step in steps[1:] if step[name] is not None]
        row[name] = statistics.median(known) if known else None
    return row


def unpack(args, folder: str) -> dict:
    """Install the wheels. Return peer -> the folders in which Python looks first for it."""
    found = {}
    for peer, place in (("liger", args.wheels), ("unsloth", args.wheels and args.wheels / "unsloth")):
        wheels = sorted(place.glob("*.whl")) if place and place.is_dir() else []
        if wheels:
            target = os.path.join(folder, peer)
            done = subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", target,
                                   *map(str, wheels)], capture_output=True, text=True)
            found[peer] = [target] if done.returncode == 0 else []
    return found


def ratios(rows: dict) -> dict:
    """Return how many times as long as we each peer takes, and our memory relative to its."""
    compared = {}
    for form in FORMS:
        mine = rows.get(f"ours {form}", {})
        for peer in PEERS:
            row = rows.get(f"{peer} {form}", {})
            if peer != "ours" and "step_seconds" in mine and "step_seconds" in row:
                memory = "reserved_mib" if "reserved_mib" in row else "process_mib"
                compared[f"{peer} {form}"] = {"time_ratio": round(row["step_seconds"] / mine["step_seconds"], 3),
                                              "memory_ratio": round(mine[memory] / row[memory], 3)}
    return compared


def main(args) -> dict:
    import torch
    ends, rows = time.time() + 60 * args.minutes, {}
    with tempfile.TemporaryDirectory() as folder:
        model_path = args.model_path
        if model_path == "tiny-random":
            make_random(model_path := os.path.join(folder, "model"))
        paths = unpack(args, folder)
        todo = [(peer, form) for form in args.forms for peer in args.peers]
        for i, (peer, form) in enumerate(todo):
            # What one leaves of its share the others may use.
            left = ends - time.time()
            seconds = min(left, 1.5 * left / (len(todo) - i))
            row = measure(args, model_path, peer, form, seconds, paths.get(peer, [])) if seconds > 1 else {
                "skipped": f"--minutes {args.minutes:g} are used up"}
            rows[f"{peer} {form}"] = row
            peak = row.get("reserved_mib", row.get("process_mib", 0))
            print(f"{peer:8} {form:9} " + (f"{row['step_seconds']:7.2f} s, peak {peak:,.0f} MiB" if "step_seconds" in row
                                           else row.get("skipped") or row.get("error") or "no step"), flush=True)
    result = {"rows": rows, "ratios": ratios(rows), "date": datetime.date.today().isoformat(),
              "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu", "seed": "the number of the step",
              **{name: getattr(args, name) for name in ("prompts", "samples", "tokens", "batch_size", "rounds")},
              "command": "python bench/peers.py " + " ".join(sys.argv[1:])}
    print(json.dumps(result))
    return result


def work(args):
    """Be one peer."""
    if args.worker == "ours":
        ours(SimpleNamespace(**vars(args), gradients_to=None), args.forms[0])
    else:
        trainers(args, args.forms[0], args.worker)


if __name__ == "__main__":
    options = arguments()
    if options.worker:
        work(options)
    else:
        main(options)
