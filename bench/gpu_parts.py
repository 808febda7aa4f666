"""The parts of bench/gpu.py: each is a function that runs in a process of its own and returns what it has measured.

    python bench/gpu_parts.py '{"part": "update", "rest": ["FOLDER"], "length": 64, ...}' RESULT.json

A part writes its result as it grows, so that something is left of one that is stopped. `checks` in a result are the
questions that must be answered by yes; an `error` comes with its traceback. Everything also runs on a CPU.
"""
import argparse
import gc
import importlib.util
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from itertools import count
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
MIB = 2**20
TOY = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
       "intermediate_size": 256, "vocab_size": 1024, "tie_word_embeddings": True}


def qwen(hidden, layers, heads, kv_heads, intermediate, vocab=151936, tied=True) -> dict:
    return {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
            "num_key_value_heads": kv_heads, "intermediate_size": intermediate, "vocab_size": vocab,
            "tie_word_embeddings": tied, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6}


# shape -> config, --memory under the cap, episodes of a step
SHAPES = {"0.5B": (qwen(896, 24, 14, 2, 4864), "small", 32),
          "1.5B": (qwen(1536, 28, 12, 2, 8960), "small", 32),
          "3B": (qwen(2048, 36, 16, 2, 11008), "small", 16),
          "7B": (qwen(3584, 28, 28, 4, 18944, 152064, False), "stream", 16),
          "toy": (TOY, "checkpoint", 4),
          "toy-lean": (TOY, "stream", 4)}
# Largest difference from the CPU in float32 that is rounding: of a log-probability on average, of a gradient's cosine.
ROUNDING = {"float32": (1e-3, 1e-4), "float16": (0.03, 0.01), "bfloat16": (0.1, 0.02)}


class Essay:
    """The environment of the part grpo: one look around, then an essay, and a reward that differs within a group."""

    system_prompt, max_turns, played = "Write.", 4, 0

    def reset(self, words: int = 1, **_) -> str:
        Essay.played += 1
        self.number = Essay.played
        return " the" * words

    def look(self) -> str:
        """Look around."""
        return "a table " * (1 + self.number % 4)

    def get_reward(self) -> float:
        return float(self.number * 7919 % 101) / 101

    @staticmethod
    def _tasks(split: str, n: int, seed: int) -> list[dict]:
        return [{"words": 1, "number": i} for i in range(n)]


def now() -> float:
    import torch
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def device():
    import torch
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def free_memory():
    """Give what no longer lives back to the device, and start its peak anew."""
    import torch
    gc.collect()
    if device().type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def outside_torch() -> float:
    """Return the MiB that are taken on the device, but not by torch's allocator: context, kernels, graphs."""
    import torch
    if device().type != "cuda":
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return (total - free - torch.cuda.memory_reserved()) / MIB


def failure(error) -> dict:
    """Return an exception as a result: its first line, and the traceback."""
    first = (str(error).strip().splitlines() or [""])[0]
    return {"error": f"{type(error).__name__}: {first[:300]}", "traceback": traceback.format_exc()[-6000:]}


# ------------------------------------------------------------------------------------------------------ the machine
def machine(args) -> dict:
    """Name the device, and measure its bandwidth (a large copy, read plus write) and bfloat16 products."""
    import torch
    import transformers
    gpu = device().type == "cuda"
    facts = {"device": torch.cuda.get_device_name() if gpu else "cpu", "cores": os.cpu_count(),
             "torch": torch.__version__, "transformers": transformers.__version__,
             "missing": [name for name in ("bitsandbytes", "trl", "peft") if not importlib.util.find_spec(name)]}
    if gpu:
        facts |= {"total_mib": torch.cuda.get_device_properties(0).total_memory / MIB, "cuda": torch.version.cuda,
                  "capability": ".".join(map(str, torch.cuda.get_device_capability()))}
    args.keep(facts)
    size = 8192 if gpu else 512
    source = torch.ones(2**30 if gpu else 2**25, dtype=torch.uint8, device=device())
    a = torch.randn(size, size, device=device()).bfloat16()
    target = torch.empty_like(source)
    copied, multiplied = median_seconds(lambda: target.copy_(source)), median_seconds(lambda: a @ a)
    return {**facts, "bandwidth": 2 * len(source) / copied, "bf16_flops": 2 * size**3 / multiplied}


def median_seconds(work) -> float:
    work()
    times = []
    for _ in range(5):
        began = now()
        work()
        times.append(now() - began)
    return statistics.median(times)


def set_cap(args):
    """Let torch reserve at most `args.cap` MiB. There is nothing to cap on a CPU."""
    import torch
    if device().type == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, args.cap * MIB / total))


def cap(args) -> dict:
    """Show that an allocation beyond the cap raises."""
    import torch
    if device().type != "cuda":
        return {"skipped": "no GPU"}
    set_cap(args)
    held = []
    try:
        while len(held) <= args.cap // 64:  # one block of 64 MiB more than the cap has room for
            held.append(torch.empty(2**26, dtype=torch.uint8, device="cuda"))
        bites = False
    except torch.cuda.OutOfMemoryError:
        bites = True
    return {"held_mib": 64 * len(held), "bare_context_mib": outside_torch(), "checks": {"the cap bites": bites}}


# ------------------------------------------------------------------------------------------------------ is it right?
def correct(args, folder: str) -> dict:
    """Compare what the device computes with float32 on this machine's CPU, for the very tokens that it has sampled.

    `engine` and `trainer` are mean differences of log-probabilities from the CPU's, `first_ratio` is the trainer's
    probability over the engine's on the device, and of the gradients of all adapters stand the cosine and the norm.
    """
    settings = {"float32": {"dtype": "float32"}, "bfloat16": {"dtype": "bfloat16"},
                "bfloat16, many launches": {"dtype": "bfloat16", "few_launches": False}, "float16": {"dtype": "float16"}}
    if has_bitsandbytes():
        settings["small"] = {"dtype": "bfloat16", "memory": "small"}
    result, checks = {}, {}
    for name, options in settings.items():
        try:
            result[name] = compare_with_cpu(args, folder, options)
            gap, angle = ROUNDING[options["dtype"]]
            largest = max(result[name][x] for x in ("engine", "trainer"))
            checks[f"{name}: log-probabilities of the CPU"] = largest < gap
            checks[f"{name}: gradients of the CPU"] = 1 - result[name]["gradient_cosine"] < angle
        except Exception as error:
            result[name] = failure(error)
        free_memory()
        args.keep({**result, "checks": checks})
    return {**result, "checks": checks}


def compare_with_cpu(args, folder: str, options: dict) -> dict:
    import torch

    from bench.completions import generate
    from layers import load_model, make_engine
    from lora import adapted_linears, merged
    reference, _ = load_model(folder, lora_r=16, device="cpu", **{**options, "dtype": "float32"})
    model, _ = load_model(folder, lora_r=16, **options)
    generator = torch.Generator().manual_seed(1)
    for ours, theirs in zip(adapted_linears(model).values(), adapted_linears(reference).values(), strict=True):
        theirs.lora.B.data.copy_(0.02 * torch.randn(theirs.lora.B.shape, generator=generator))
        for x in "AB":
            getattr(ours.lora, x).data.copy_(getattr(theirs.lora, x).data)
    # Prompts of several lengths, so that rows are padded; enough tokens for a graph to be captured and replayed.
    prompts = [torch.randint(300, 1000, (length,), generator=generator).tolist() for length in (9, 24, 40)]
    new_tokens = min(args.tokens, 64)
    with merged(model):
        engine = make_engine(model.eval(), slots=6, tokens=40 + new_tokens)
        sampled = generate(engine, prompts, group_size=2, max_new_tokens=new_tokens)
    graphs = graphs_of(engine)
    del engine
    rows = [prompts[i // 2] + ids for i, (ids, _) in enumerate(sampled)]
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask, engine_logprobs = torch.zeros_like(ids), torch.zeros(ids.shape)
    for i, (new, logprobs) in enumerate(sampled):
        sampled_here = slice(len(rows[i]) - len(new), len(rows[i]))
        mask[i, sampled_here] = 1
        engine_logprobs[i, sampled_here] = torch.tensor(logprobs)
    trained, gradients = trainer_numbers(model, ids, mask)
    expected, expected_gradients = trainer_numbers(reference, ids, mask)
    drawn = mask.bool()

    def gap(a, b):
        return (a - b)[drawn].abs().mean().item()
    norm, expected_norm = gradients.norm().item(), expected_gradients.norm().item()
    return {"engine": gap(engine_logprobs, expected), "trainer": gap(trained, expected),
            "largest": (engine_logprobs - expected)[drawn].abs().max().item(),
            "first_ratio": (trained - engine_logprobs)[drawn].exp().mean().item(),
            "gradient_cosine": (gradients @ expected_gradients).item() / (norm * expected_norm),
            "gradient_norm": norm, "gradient_norm_of_cpu": expected_norm, "tokens": int(mask.sum()), "graphs": graphs}


def families(args) -> dict:
    """Let tiny random models of all families of tests/extras/models/test_models.py play and learn here, and on the CPU in float32.

    `engine` is the largest difference of a log-probability, over three turns with groups, from stock transformers on
    the CPU, `gradients` the relative difference of the adapter's gradients from the same code on the CPU.
    """
    import torch
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "extras" / "models")]
    import test_models
    from layers import make_engine
    from lora import merged
    engines, result, checks = [], {}, {}

    def engine(model, tokens, **options):
        engines[:] = [make_engine(model, tokens=64, static=True, **options)]
        return engines[0]

    test_models.make_engine = engine
    for family in test_models.FAMILIES:
        try:
            there, model = test_models.adapted(family), test_models.adapted(family).to(device())
            with merged(model):
                turns = test_models.play(model)
            plain, gap = test_models.stock(family, there), 0.0
            for row, played in turns.items():
                ids, _, _ = played[-1]
                with torch.no_grad():
                    logits = plain(input_ids=torch.tensor([ids + played[-1][1]]), use_cache=False).logits[0]
                for ids, turn, logprobs in played:
                    at = range(len(ids) - 1, len(ids) - 1 + len(turn))
                    expected = logits.log_softmax(-1)[at, turn]
                    gap = max(gap, (expected - torch.tensor(logprobs)).abs().max().item())
            ours, theirs = test_models.our_gradients(model).cpu(), test_models.our_gradients(there)
            result[family] = {"engine": gap, "gradients": ((ours - theirs).norm() / theirs.norm()).item(),
                              "graphs": not engines[0].model.facts.refuses_graphs}
            checks[f"{family}: as on the CPU"] = max(gap, result[family]["gradients"]) < 1e-3
        except Exception as error:
            result[family] = failure(error)
        args.keep({**result, "checks": checks})
    return {**result, "checks": checks}


def trainer_numbers(model, ids, mask):
    """Return the log-probabilities (B, T) of the update and all adapters' gradients as one vector, on the host."""
    import torch

    from core.logprobs import token_logprobs
    from lora import adapted_linears, merged_to_train
    with merged_to_train(model):
        logprobs, _ = token_logprobs(model.train(), ids.to(model.device), mask.to(model.device))
        weights = torch.arange(logprobs.numel(), device=logprobs.device).view(logprobs.shape).cos()
        (logprobs * weights).sum().backward()
    gradients = [getattr(linear.lora, x).grad.double().cpu().flatten() for linear in adapted_linears(model).values()
                 for x in "AB"]
    return logprobs.detach().float().cpu(), torch.cat(gradients)


def has_bitsandbytes() -> bool:
    """True if bitsandbytes can put weights into 4 bits here: its wheel may have no kernels for this CUDA or card."""
    import torch
    try:
        from bitsandbytes.functional import dequantize_4bit, quantize_4bit
        weight = torch.ones(64, 64, dtype=torch.float16, device=device())
        return bool(dequantize_4bit(*quantize_4bit(weight, quant_type="nf4")).isfinite().all())
    except Exception as error:
        print(f"note: no 4-bit weights: {type(error).__name__}: {error}")
        return False


def memory_under_cap(memory: str) -> str:
    """Return the setting of --memory, or the smallest one that needs no 4-bit weights where bitsandbytes is missing."""
    return memory if has_bitsandbytes() else "checkpoint"


def graphs_of(engine) -> int:
    """Return how many CUDA graphs an engine has captured."""
    return sum(map(bool, getattr(engine, "graphs", {}).values()))


# --------------------------------------------------------------------------------------------------- steps under a cap
def grpo(args, folder: str, shape: str) -> dict:
    """Take two steps of grpo.py under the cap, with tool calls and episodes of several lengths, and an evaluation.

    What was allocated stands beside what bench/memory.py counts for the same flags. `graphs` has the number of CUDA
    graphs of every rollout, `outside_torch_mib` the most that was taken while they were there.
    """
    memory, episodes = SHAPES[shape][1:]
    set_cap(args)
    result, config = steps_of_grpo(args, folder, memory_under_cap(memory), episodes, args.prompt, args.length, 2, eval_tasks=4)
    checks = {"gradients": all(m["grad_norm"] > 0 for m in result["metrics"]),
              "a tool is called in every episode": result.pop("a tool is called in every episode"),
              "an episode has all its tokens": result["longest"] == args.length,
              "the trainer's probabilities are the engine's": all(
                  abs(m["first_ratio"] - 1) < 0.1 for m in result["metrics"])}
    if device().type == "cuda":
        checks["graphs"] = memory == "stream" or max(result["graphs"]) > 1
        result["cap_mib"] = args.cap
    args.keep({**result, "checks": checks})
    result["counted_mib"] = counted(config)
    if device().type == "cuda":
        # cuBLAS keeps workspaces of 8 to 32 MiB, one for each thread and stream: the count does not have them.
        checks["allocated as counted"] = result["allocated_mib"] < 1.02 * max(result["counted_mib"].values()) + 100
    return {**result, "checks": checks}


def memory(args, folder: str, setting: str) -> dict:
    """Take a step as the README's table of memory has it, without a cap: 8 episodes of 2,048 tokens, one in an update.
    The last 256 are written, or it would take long.

    `reserved_mib` is what torch's allocator took for it, `card_mib` what nvidia-smi shows of this process at its most,
    with CUDA's context and the graphs.
    """
    if setting in ("4bit", "small", "stream") and not has_bitsandbytes():
        return {"skipped": "bitsandbytes is missing"}
    prompt, length = (args.prompt, args.length) if device().type == "cpu" else (1792, 2048)
    card, done = [0.0], threading.Event()
    watch = threading.Thread(target=watch_card, args=(card, done))
    watch.start()
    try:
        result, config = steps_of_grpo(args, folder, setting, 8, prompt, length, 1, eval_tasks=0)
    finally:
        done.set()
        watch.join()
    result["card_mib"] = card[0]
    args.keep(result)
    result["counted_mib"] = counted(config)
    return result


def watch_card(most: list, done):
    """Keep the most MiB that nvidia-smi shows of this process in most[0] until `done`. 0 where there is none."""
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    while shutil.which("nvidia-smi") and not done.wait(0.5):
        lines = subprocess.run(query, capture_output=True, text=True).stdout.splitlines()
        rows = [line.split(",") for line in lines if line.startswith(f"{os.getpid()},")]
        most[0] = max([most[0], *(float(row[1]) for row in rows if row[1].strip().isdigit())])


def steps_of_grpo(args, folder: str, memory: str, episodes: int, prompt: int, length: int, steps: int,
                  eval_tasks: int):
    """Take so many steps of so many episodes of `length` tokens -> what was measured, the run's Config."""
    import torch
    from transformers import AutoTokenizer

    import agent
    import grpo
    words, prompt = words_of_prompt(AutoTokenizer.from_pretrained(folder), prompt)
    turn = length - prompt
    agent.Row = forced_rows(AutoTokenizer.from_pretrained(folder), turn)
    graphs, outside = [], []
    watched(agent, graphs, outside)
    run = Path(tempfile.mkdtemp(dir=folder))  # a folder of its own: the settings of `memory` run side by side
    tasks, held_out, out = (run / name for name in ("tasks.jsonl", "held_out.jsonl", "run"))
    tasks.write_text("".join(json.dumps({"words": words, "number": i}) + "\n" for i in range(8)))
    held_out.write_text("".join(json.dumps({"words": words - 1, "number": i}) + "\n" for i in range(4)))
    options = {"lora_r": 16, "dtype": "bfloat16", "tasks_per_step": 1, "group_size": episodes, "batch_size": 1,
               "max_new_tokens": turn, "max_tokens": length, "max_steps": steps, "eval_tasks": eval_tasks, "memory": memory}
    config = grpo.Config(model_path=folder, env=f"{__file__}:Essay", dataset=str(tasks), eval_dataset=str(held_out),
                         output_dir=str(out), overwrite=True, **options)
    grpo.train(config)
    timing, metrics, played = (json_lines(out / f"{name}.jsonl") for name in ("timing", "metrics", "trajectories"))
    names = "tokens", "grad_norm", "first_ratio", "sampler_gap", "entropy", "loss"
    result = {"stop_reasons": Counter(episode["stop_reason"] for episode in played), "flags": options, "prompt": prompt,
              "steps": timing, "graphs": graphs, "longest": max(len(episode["token_ids"]) for episode in played),
              "a tool is called in every episode": all(episode["info"]["tool_calls"] for episode in played),
              "metrics": [{name: m[name] for name in names if name in m} for m in metrics if "grad_norm" in m]}
    if device().type == "cuda":
        result |= {"allocated_mib": torch.cuda.max_memory_allocated() / MIB, "outside_torch_mib": max(outside, default=0),
                   "reserved_mib": torch.cuda.max_memory_reserved() / MIB}
    return result, config


def words_of_prompt(tokenizer, tokens: int) -> tuple[int, int]:
    """Return how many words make a prompt of about so many tokens, and the tokens that it then has."""
    from envs import schemas
    from core.chat import Chat
    chat = Chat(tokenizer, schemas(Essay))

    def size(words):
        return len(chat.prompt([{"role": "system", "content": Essay.system_prompt},
                                {"role": "user", "content": " the" * words}]))
    words = max(1, (tokens - size(1)) * 100 // (size(101) - size(1)))
    return words, size(words)


def forced_rows(tokenizer, turn: int):
    """Return a maker of rows that look around in their first turn and then write, a quarter to all of what fits."""
    from core.engine import Row
    words = tokenizer.encode(" the of and to in is it for on that with as are was be", add_special_tokens=False)
    call = tokenizer.encode('<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>', add_special_tokens=False)
    numbers = count()

    def row(*positional, seed, **named):
        size = turn * (4 - next(numbers) % 4) // 4
        essay = random.Random(seed).choices(words, k=size)
        forced = [*call, tokenizer.eos_token_id, *essay, tokenizer.eos_token_id]
        return Row(*positional, seed=seed, forced=forced, **named)
    return row


def watched(agent, graphs: list, outside: list):
    """Let the engines of `agent` leave the number of graphs that each captures, and the memory outside torch then."""
    from extras.fast.static_engine import StaticEngine
    make_engine, capture = agent.make_engine, StaticEngine.capture

    def make(*positional, **named):
        graphs.append(0)
        return make_engine(*positional, **named)

    def captured(engine, *key):
        graph = capture(engine, *key)
        graphs[-1] += graph is not None
        outside.append(outside_torch())
        return graph

    agent.make_engine, StaticEngine.capture = make, captured


def counted(config) -> dict:
    """Return the MiB that bench/memory.py counts for a step of these flags, by phase."""
    import grpo
    from bench.budget import measure
    from bench.memory import workload
    from core.config import options_for
    from layers import load_model
    peaks = measure({"path": config.model_path, **options_for(load_model, config)},
                    workload(grpo, config, config.memory), device().type)
    return {phase: peaks[phase] / MIB for phase in ("update", "rollout")}


def json_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# ------------------------------------------------------------------------------------------------------ how fast is it?
def decode(args, folder: str, kind: str, bandwidth: float | None) -> dict:
    """Measure tokens/s of `model.generate`, transformers' `generate_batch` or our engine, bfloat16, without the cap.

    Two runs of different length: their difference is decoding alone. `bandwidth` is the bytes that a step must read
    (weights once, keys and values of all rows) x steps/s, over the bandwidth that the machine has: the limit is 1.
    cuDNN's attention is off for all three: where torch prefers it, it compiles at each new shape.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from layers import load_model
    torch.backends.cuda.enable_cudnn_sdp(False)
    if kind == "engine":
        model, _ = load_model(folder, dtype="bfloat16", train=False)
    else:  # as transformers ships it
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="bfloat16").to(device()).eval()
    config, itemsize = model.config, model.dtype.itemsize
    cached = config.num_hidden_layers * 2 * config.num_key_value_heads * itemsize * (
        config.hidden_size // config.num_attention_heads)  # bytes of a token's keys and values
    weights = sum(p.nbytes for p in model.parameters())
    weights -= 0 if config.tie_word_embeddings else model.get_input_embeddings().weight.nbytes  # rows of it alone
    result, short = {}, max(1, args.tokens // 4)
    for rows in args.rows:
        try:
            facts = [decode_once(args, model, kind, rows, min(short, 8))[1]]
            times = []
            for _ in range(args.repeats):
                shorter, _ = decode_once(args, model, kind, rows, short)
                longer, fact = decode_once(args, model, kind, rows, args.tokens)
                times.append((shorter, longer))
                facts.append(fact)
            seconds = statistics.median(longer - shorter for shorter, longer in times)
            if seconds <= 0:
                raise RuntimeError("the longer run took no longer: give more --tokens")
            step = seconds / (args.tokens - short)
            read = weights + rows * (args.prompt + (short + args.tokens) / 2) * cached
            result[str(rows)] = {
                "tokens_per_second": rows / step, "step_ms": 1000 * step, "bytes_per_step": read,
                "bandwidth": read / step / bandwidth if bandwidth else None,
                "with_prompt_tokens_per_second": rows * args.tokens / statistics.median(b for _, b in times),
                **facts[-1]}
        except Exception as error:  # out of memory at this many rows; the others still count
            result[str(rows)] = failure(error)
        free_memory()
        args.keep(result)
    return result


def decode_once(args, model, kind: str, rows: int, tokens: int) -> tuple[float, dict]:
    """Decode so many tokens of so many rows. Return the seconds, and what is to be known of the engine, which goes."""
    import torch
    from transformers import ContinuousBatchingConfig, GenerationConfig

    from bench.completions import generate
    from extras.fast.fused import Fused
    from layers import make_engine
    generator = torch.Generator().manual_seed(rows)
    prompts = torch.randint(300, model.config.vocab_size, (rows, args.prompt), generator=generator)
    facts = {}
    began = now()
    if kind == "generate":
        out = model.generate(prompts.to(model.device), attention_mask=torch.ones_like(prompts).to(model.device),
                             do_sample=True, top_k=0, top_p=1.0, max_new_tokens=tokens, min_new_tokens=tokens,
                             eos_token_id=None, pad_token_id=0)
        sizes = [out.shape[1] - args.prompt] * rows
    elif kind == "generate_batch":
        out = model.generate_batch(prompts.tolist(), GenerationConfig(
            max_new_tokens=tokens, do_sample=True, top_k=0, top_p=1.0, eos_token_id=-1, pad_token_id=0),
            None if device().type == "cuda" else ContinuousBatchingConfig(  # it would take all of a host's memory
                num_blocks=rows * (2 + (args.prompt + tokens) // 256), max_batch_tokens=256 + rows))
        sizes = [len(x.generated_tokens) for x in out.values()]
    else:
        engine = make_engine(model, slots=rows, tokens=args.prompt + tokens)
        sizes = [len(ids) for ids, _ in generate(engine, prompts.tolist(), max_new_tokens=tokens)]
        facts = {"fused": isinstance(engine.decoder, Fused), "graphs": graphs_of(engine)}
    assert sizes == [tokens] * rows, f"{sizes[:4]} tokens, {tokens} wanted"
    return now() - began, facts


def trl(args, folder: str, shape: str) -> dict:
    """Run bench/vs_trl.py on this model, where TRL and PEFT are installed. Gradients are what `correct` compares."""
    if not (importlib.util.find_spec("trl") and importlib.util.find_spec("peft")):
        return {"skipped": "trl or peft is not installed"}
    sizes = (2, 2, 8) if shape.startswith("toy") else (8, 8, 128)
    names = "--prompts", "--samples", "--tokens"
    flags = [str(word) for pair in zip(names, sizes) for word in pair]
    done = subprocess.run([sys.executable, str(ROOT / "bench" / "vs_trl.py"), "--model_path", folder, *flags,
                           "--rounds", "3", "--no_gradients"], cwd=ROOT, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        raise RuntimeError(f"vs_trl.py exits {done.returncode}: {done.stderr.strip()[-2000:]}")
    return {**json.loads(lines[-1]), "lines": lines[:-1]}


def peers(args, folder: str, shape: str) -> dict:
    """Run bench/peers.py on this model: it skips what is not installed and says why, and ends within its minutes."""
    sizes = (2, 2, 8) if shape.startswith("toy") else (8, 8, 128)
    words = [str(word) for pair in zip(("--prompts", "--samples", "--tokens"), sizes) for word in pair]
    done = subprocess.run([sys.executable, str(ROOT / "bench" / "peers.py"), "--model_path", folder, *words,
                           "--wheels", args.wheels], cwd=ROOT, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        raise RuntimeError(f"peers.py exits {done.returncode}: {done.stderr.strip()[-2000:]}")
    result = json.loads(lines[-1])
    args.keep(result)
    # A peer that is missing is no failure of this part. One that fails is, and its lines say how.
    if "step_seconds" not in result["rows"].get("ours bfloat16", {}):
        raise RuntimeError("our own step was not measured: see rows")
    return result


def sampler(args, folder: str) -> dict:
    """Run bench/sampler.py on this model where a vLLM is on the PATH: four steps each with it and without.

    With several GPUs the server has the last one. With one it has 0.4 of the memory, and the trainer the rest.

    The model is random: of interest are the gap of log-probabilities, the share of the time that the trainer waits, and
    what bfloat16 keeps of a small change of the adapter.
    """
    vllm = shutil.which("vllm")
    if not vllm:
        return {"skipped": "vllm is not on the PATH"}
    with tempfile.TemporaryDirectory() as out:
        flags = {"vllm": Path(vllm).parents[1], "model_path": folder, "seeds": 0, "steps": 4, "sft_steps": 4, "eval_tasks": 0,
                 "out": out, "results": out}
        words = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
        done = subprocess.run([sys.executable, str(ROOT / "bench" / "sampler.py"), *words], cwd=ROOT, capture_output=True, text=True)
        lines = done.stdout.strip().splitlines()
        if done.returncode or not lines:
            raise RuntimeError(f"sampler.py exits {done.returncode}: {done.stderr.strip()[-2000:]}")
        return json.loads(lines[-1])


def graphs(args, folder: str) -> dict:
    """Capture the decode windows of many buckets, and measure what the driver keeps for each outside torch's memory."""
    import torch

    from layers import load_model, make_engine
    from lora import merged
    options = {"memory": "small"} if has_bitsandbytes() else {}
    model, _ = load_model(folder, lora_r=16, dtype="bfloat16", **options)
    slots = max(args.rows)
    result = {"flags": options, "captured": []}
    with merged(model), torch.inference_mode():
        engine = make_engine(model.eval(), slots=slots, tokens=args.length, static=True)
        widths = sorted({engine.bucket(rows) for rows in range(1, slots + 1)}, reverse=True)
        result["before_mib"] = before = outside_torch()
        for width in widths:
            for span in (engine.span(1), engine.span(args.length)):
                engine.fill()
                engine.replay(width, span)  # warms it up
                engine.fill()
                began = now()
                engine.replay(width, span)
                result["captured"].append({"rows": width, "span": span, "graphs": graphs_of(engine),
                                           "seconds": now() - began, "outside_torch_mib": outside_torch() - before})
                args.keep(result)
    captures = device().type == "cuda"
    return {**result, "checks": {"graphs": bool(graphs_of(engine)) == captures}}


def update(args, folder: str) -> dict:
    """Measure tokens/s of forward and backward over full rows, LoRA, with and without gradient checkpointing and --few_launches."""
    import itertools

    import torch

    from layers import load_model
    from core.logprobs import token_logprobs
    from lora import merged_to_train
    result = {}
    settings = ("plain", "checkpoint", "4bit") if has_bitsandbytes() else ("plain", "checkpoint")
    for memory, rows, few in itertools.product(settings, (8, 1), (True, False)):
        name = f"{memory}, {rows} rows" + ("" if few else ", many launches")
        try:
            model, _ = load_model(folder, lora_r=16, dtype="bfloat16", memory=memory, few_launches=few)
            ids = torch.randint(300, model.config.vocab_size, (rows, args.length), device=model.device)
            mask = (torch.arange(args.length, device=model.device) >= args.prompt).long().expand(rows, -1)
            model.train()
            times = []
            for _ in range(1 + args.repeats):
                began = now()
                with merged_to_train(model):
                    token_logprobs(model, ids, mask)[0].sum().backward()
                times.append(now() - began)
            result[name] = {
                "tokens_per_second": rows * args.length / statistics.median(times[1:]),
                **({"allocated_mib": torch.cuda.max_memory_allocated() / MIB} if model.device.type == "cuda" else {})}
        except Exception as error:
            result[name] = failure(error)
        model = None
        free_memory()
        args.keep(result)
    return result


def main(call: str, path: str):
    """Run one part: call is JSON with "part", "rest" (its further arguments) and the sizes."""
    args = SimpleNamespace(**json.loads(call))
    args.keep = lambda result: Path(path).write_text(json.dumps(result))
    functions = {"machine": machine, "cap": cap, "correct": correct, "grpo": grpo, "decode": decode, "trl": trl,
                 "graphs": graphs, "update": update, "peers": peers, "sampler": sampler, "families": families, "memory": memory}
    try:
        result = functions[args.part](args, *args.rest)
    except Exception as error:
        earlier = json.loads(Path(path).read_text()) if Path(path).exists() else {}
        result = {**earlier, **failure(error)}
    args.keep(result)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("call")
    parser.add_argument("path")
    main(**vars(parser.parse_args()))
