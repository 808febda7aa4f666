"""What a GPU gives: GRPO steps under a hard cap of memory, decoding and update speed. No network, no weights needed.

    python bench/gpu.py                              all shapes; 20 to 30 minutes, 16 GB of disk in --scratch
    python bench/gpu.py --shapes 0.5B 1.5B           some of them: the results of others, of an earlier call, are kept
    python bench/gpu.py --shapes toy toy-lean --rows 1 2 --tokens 16 --length 64 --prompt 32 --cap 64      on any CPU

The models are Qwen2.5's shapes with random weights; episodes are forced to their length. Every part runs in a process
of its own, and one that fails (out of memory, a missing library, the time limit) is written down as its error:

    machine   memory bandwidth (a large copy, bytes read plus written) and bfloat16 matmul rate, measured
    cap       the cap bites: an allocation beyond it raises; what the CUDA context takes besides
    grpo      two steps of grpo.py with the flags below under the cap: bytes allocated and reserved, context, seconds
    decode    tokens/s of `model.generate`, transformers' `generate_batch` and our engine, all in bfloat16, resident,
              without the cap. Two runs of different length: their difference is decoding alone. `bandwidth`: bytes that
              a step must read (weights once, keys and values of all rows) x steps/s, over the measured bandwidth.
              cuDNN's attention is off for all three: where torch prefers it, it compiles at each new shape. Without
              flash-attn `generate_batch` falls back to torch's attention and no graphs
    update    tokens/s of forward and backward over full rows, LoRA, with and without gradient checkpointing

Written after each part to bench/results/gpu_NAME.json; the last line is that JSON.

What --sampler gives on two GPUs, one of which samples, is another command. vLLM lives in an environment of its own.
Nobody has run it yet:

    CUDA_VISIBLE_DEVICES=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve MODEL --enable-lora \\
        --max-lora-rank 16 --max-loras 3 --logprobs-mode processed_logprobs --generation-config vllm &
    CUDA_VISIBLE_DEVICES=0 python bench/sampler.py --model_path MODEL --url http://127.0.0.1:8000
"""
import argparse
import datetime
import gc
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
LEAN = {"memory": "small"}
TOY = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
       "intermediate_size": 256, "vocab_size": 1024, "tie_word_embeddings": True}


def qwen(hidden, layers, heads, kv_heads, intermediate, vocab=151936, tied=True) -> dict:
    return {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
            "num_key_value_heads": kv_heads, "intermediate_size": intermediate, "vocab_size": vocab,
            "tie_word_embeddings": tied, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6}


# shape -> config, flags of grpo.py, episodes of a step
SHAPES = {"0.5B": (qwen(896, 24, 14, 2, 4864), LEAN, 8),
          "1.5B": (qwen(1536, 28, 12, 2, 8960), LEAN, 8),
          "3B": (qwen(2048, 36, 16, 2, 11008), LEAN, 8),
          "7B": (qwen(3584, 28, 28, 4, 18944, 152064, False), {"memory": "stream"}, 16),
          "toy": (TOY, {"gradient_checkpointing": True}, 2),
          "toy-lean": (TOY, {"memory": "stream"}, 2)}
ENGINES = "generate", "generate_batch", "engine"


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", help="of the result; default: the GPU's, or cpu")
    parser.add_argument("--shapes", nargs="+", default=["0.5B", "1.5B", "3B", "7B"], choices=SHAPES)
    parser.add_argument("--parts", nargs="+", default=["grpo", "decode", "update"],
                        choices=("grpo", "decode", "update"))
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES, help="of the part decode")
    parser.add_argument("--cap", type=int, default=3584, help="MiB that torch may reserve in the part grpo")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128], help="sequences decoded at once")
    parser.add_argument("--tokens", type=int, default=256, help="decoded by each row, in the longer of two runs")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt, about")
    parser.add_argument("--length", type=int, default=1024, help="tokens of an episode and of a row of the update")
    parser.add_argument("--timeout", type=int, default=900, help="seconds a part may take")
    parser.add_argument("--scratch", help="folder for the random models; default: the system's")
    parser.add_argument("--results", default=str(ROOT / "bench" / "results"))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if not args.prompt < args.length or min(args.tokens, *args.rows) < 1 or args.tokens < 4:
        parser.error("--prompt must be below --length, --tokens 4 or more, --rows 1 or more")
    return args


class Essay:
    """The environment of the part grpo: a long question, no end, a reward that differs within a group."""

    system_prompt, played = "Write.", 0

    def reset(self, words: int = 1, **_) -> str:
        Essay.played += 1
        self.number = Essay.played
        return " the" * words

    def look(self) -> str:
        """Look around."""
        return "nothing"

    def get_reward(self) -> float:
        return float(self.number * 7919 % 101) / 101

    @staticmethod
    def _tasks(split: str, n: int, seed: int) -> list[dict]:
        return [{"words": 1, "number": i} for i in range(n)]


# -------------------------------------------------------------------------------------------------------------- workers
def now() -> float:
    import torch
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def device():
    import torch
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def machine(args) -> dict:
    import torch
    import transformers
    gpu = device().type == "cuda"
    facts = {"device": torch.cuda.get_device_name() if gpu else "cpu", "cores": os.cpu_count(),
             "torch": torch.__version__, "transformers": transformers.__version__}
    if gpu:
        facts |= {"total_mib": torch.cuda.get_device_properties(0).total_memory >> 20, "cuda": torch.version.cuda,
                  "capability": ".".join(map(str, torch.cuda.get_device_capability()))}
    source = torch.ones(2**30 if gpu else 2**26, dtype=torch.uint8, device=device())
    a = torch.randn(8192 if gpu else 1024, 8192 if gpu else 1024, device=device()).bfloat16()
    target = torch.empty_like(source)

    def median(run):
        run()
        times = []
        for _ in range(9):
            began = now()
            run()
            times.append(now() - began)
        return statistics.median(times)
    return {**facts, "bandwidth": 2 * len(source) / median(lambda: target.copy_(source)),
            "bf16_flops": 2 * len(a)**3 / median(lambda: a @ a)}


def limit(args) -> dict:
    """Sets the cap -> MiB that the bare context takes. Nothing to cap on a CPU."""
    import torch
    if device().type != "cuda":
        return {}
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    free, total = torch.cuda.mem_get_info()
    context = total - free - torch.cuda.memory_reserved()
    torch.cuda.set_per_process_memory_fraction(min(1.0, args.cap * 2**20 / total))
    return {"context_mib": context / 2**20}


def cap(args) -> dict:
    import torch
    context = limit(args)
    if not context:
        return {"skipped": "no GPU"}
    held = []
    try:
        while len(held) <= args.cap // 64:  # one block of 64 MiB more than the cap has room for
            held.append(torch.empty(2**26, dtype=torch.uint8, device="cuda"))
        bites = False
    except torch.cuda.OutOfMemoryError:
        bites = True
    return {"cap_mib": args.cap, "bites": bites, "held_mib": 64 * len(held), **context}


def host_peak_mib() -> float:
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM")), 0.0)


def grpo(args, folder: str, shape: str) -> dict:
    import torch
    from transformers import AutoTokenizer

    import agent
    import grpo
    from envs import schemas
    from llm.chat import Chat
    from llm.engine import Row
    flags, episodes = SHAPES[shape][1:]
    missing = set(flags) - set(grpo.Config.__dataclass_fields__)
    if missing:
        raise RuntimeError(f"grpo.Config has no {', '.join(sorted(missing))}")
    context = limit(args)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = Chat(tokenizer, schemas(Essay))

    def size(words):
        return len(chat.prompt([{"role": "system", "content": Essay.system_prompt},
                                {"role": "user", "content": " the" * words}]))
    words = max(1, (args.prompt - size(1)) * 100 // (size(101) - size(1)))
    turn = args.length - size(words)
    plain = tokenizer.encode(" the of and to in is it for on that with as are was be", add_special_tokens=False)
    agent.Row = lambda *a, seed, **k: Row(  # forced: no stop token, so no early end; each episode its own
        *a, seed=seed, forced=random.Random(seed).choices(plain, k=turn), **k)
    tasks = Path(folder) / "tasks.jsonl"
    tasks.write_text("".join(json.dumps({"words": words, "number": i}) + "\n" for i in range(8)))
    options = {"lora_r": 16, "dtype": "bfloat16", "tasks_per_step": 1, "group_size": episodes, "batch_size": 1,
               "max_new_tokens": turn, "max_tokens": args.length, "max_turns": 1, "max_steps": 2, "eval_tasks": 0,
               **flags}
    out = Path(folder) / "run"
    grpo.train(grpo.Config(model_path=folder, env=f"{__file__}:Essay", dataset=str(tasks), eval_dataset=str(tasks),
                           output_dir=str(out), overwrite=True, **options))
    steps = [json.loads(line) for line in (out / "timing.jsonl").read_text().splitlines()]
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    for m in metrics:
        assert m["tokens"] == args.length and m["grad_norm"] > 0, f"not the step that was asked for: {m}"
    memory = {"host_peak_mib": host_peak_mib()}
    if context:  # by now with the libraries' kernels and the graphs
        free, total = torch.cuda.mem_get_info()
        memory |= {"cap_mib": args.cap, "allocated_mib": torch.cuda.max_memory_allocated() / 2**20,
                   "reserved_mib": torch.cuda.max_memory_reserved() / 2**20, "bare_context_mib": context["context_mib"],
                   "context_mib": (total - free - torch.cuda.memory_reserved()) / 2**20}
    return {**memory, "steps": steps, "flags": options, "prompt": size(words)}


def decode(args, folder: str, engine: str, bandwidth: float | None) -> dict:
    import torch
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    from bench.completions import generate
    from llm.loading import load_model
    from llm.engine import make_engine
    torch.backends.cuda.enable_cudnn_sdp(False)  # for all: it compiles at each new shape, every step of model.generate
    engines = []
    if engine == "engine":
        model, _ = load_model(folder, dtype="bfloat16", train=False)
    else:  # as transformers ships it
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="bfloat16").to(device()).eval()
    config, itemsize = model.config, model.dtype.itemsize
    cached = config.num_hidden_layers * 2 * config.num_key_value_heads * itemsize * (
        config.hidden_size // config.num_attention_heads)  # bytes of a token's keys and values
    weights = sum(p.nbytes for p in model.parameters())
    weights -= 0 if config.tie_word_embeddings else model.get_input_embeddings().weight.nbytes  # rows of it alone
    generator = torch.Generator().manual_seed(0)

    def run(rows, tokens):
        prompts = torch.randint(300, config.vocab_size, (rows, args.prompt), generator=generator)
        began = now()
        if engine == "generate":
            out = model.generate(prompts.to(model.device), attention_mask=torch.ones_like(prompts).to(model.device),
                                 do_sample=True, top_k=0, top_p=1.0, max_new_tokens=tokens, min_new_tokens=tokens,
                                 eos_token_id=None, pad_token_id=0)
            sizes = [out.shape[1] - args.prompt] * rows
        elif engine == "generate_batch":
            out = model.generate_batch(prompts.tolist(), GenerationConfig(
                max_new_tokens=tokens, do_sample=True, top_k=0, top_p=1.0, eos_token_id=-1, pad_token_id=0),
                None if device().type == "cuda" else ContinuousBatchingConfig(  # it would take all of a host's memory
                    num_blocks=rows * (2 + (args.prompt + tokens) // 256), max_batch_tokens=256 + rows))
            sizes = [len(x.generated_tokens) for x in out.values()]
        else:
            engines.append(make_engine(model, slots=rows, tokens=args.prompt + tokens))
            found = generate(engines[-1], prompts.tolist(), max_new_tokens=tokens)
            sizes = [len(ids) for ids, _ in found]
        assert sizes == [tokens] * rows, f"{sizes[:4]} tokens, {tokens} wanted"
        return now() - began
    result, short = {}, max(1, args.tokens // 4)
    for rows in args.rows:
        try:
            run(rows, min(short, 8))
            times = [(run(rows, short), run(rows, args.tokens)) for _ in range(3)]
            seconds = statistics.median(b - a for a, b in times)
            if seconds <= 0:
                raise RuntimeError("the longer run took no longer: give more --tokens")
            step = seconds / (args.tokens - short)
            read = weights + rows * (args.prompt + (short + args.tokens) / 2) * cached
            result[str(rows)] = {
                "tokens_per_second": rows / step, "step_ms": 1000 * step, "bytes_per_step": read,
                "bandwidth": read / step / bandwidth if bandwidth else None,
                "with_prompt_tokens_per_second": rows * args.tokens / statistics.median(b for _, b in times)}
            if engines:  # did it run as it should?
                result[str(rows)] |= {"fused": bool(engines[-1].fused), "graphs": sum(
                    bool(graph) for graph in getattr(engines[-1], "graphs", {}).values())}
        except Exception as error:  # out of memory at this many rows; the others still count
            result[str(rows)] = {"error": first_line(error)}
        engines.clear()
        print("\n" + json.dumps(result), flush=True)  # what is left if the time runs out
        gc.collect()
        if device().type == "cuda":
            torch.cuda.empty_cache()
    return result


def update(args, folder: str) -> dict:
    import torch

    from llm.loading import load_model
    from llm.logprobs import token_logprobs
    from lora import merged
    result = {}
    for checkpointing in (False, True):
        for rows in (4, 1):
            name = f"{'checkpointing' if checkpointing else 'plain'}_{rows}_rows"
            try:
                model, _ = load_model(folder, lora_r=16, dtype="bfloat16", gradient_checkpointing=checkpointing)
                ids = torch.randint(300, model.config.vocab_size, (rows, args.length), device=model.device)
                mask = (torch.arange(args.length, device=model.device) >= args.prompt).long().expand(rows, -1)
                model.train()
                times = []
                for _ in range(4):
                    began = now()
                    with merged(model):
                        token_logprobs(model, ids, mask)[0].sum().backward()
                    times.append(now() - began)
                result[name] = {"tokens_per_second": rows * args.length / statistics.median(times[1:])}
                if device().type == "cuda":
                    result[name]["allocated_mib"] = torch.cuda.max_memory_allocated() / 2**20
                    torch.cuda.reset_peak_memory_stats()
            except Exception as error:
                result[name] = {"error": first_line(error)}
            model = None
            gc.collect()
            if device().type == "cuda":
                torch.cuda.empty_cache()
    return result


def first_line(error) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:300]}"


# --------------------------------------------------------------------------------------------------------------- parent
def make_model(shape: str, folder: Path):
    """A Qwen2 of this shape as a model folder of random bfloat16 weights, a tensor a file, and the tiny tokenizer."""
    import torch
    from safetensors.torch import save_file
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from llm.tiny import make_tiny
    tokenizer = make_tiny()[1]
    config = Qwen2Config(**SHAPES[shape][0], bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
                         pad_token_id=tokenizer.pad_token_id, dtype="bfloat16", architectures=["Qwen2ForCausalLM"])
    with torch.device("meta"):
        tensors = Qwen2ForCausalLM(config).state_dict()
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight")
    noise = torch.randn(2**24, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()  # used again and again
    where = {}
    for i, (name, t) in enumerate(tensors.items()):
        full = torch.ones(t.shape).bfloat16() if "norm" in name else noise.roll(i * 4099).repeat(
            -(-t.numel() // len(noise)))[:t.numel()].view(t.shape).clone()
        where[name] = f"model-{i:05d}.safetensors"
        save_file({name: full}, folder / where[name], metadata={"format": "pt"})
    size = sum(2 * t.numel() for t in tensors.values())
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": size}, "weight_map": where}))
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def run_worker(args, *what) -> dict:
    """One part in a process of its own -> what it found, or {"error": ...}."""
    command = [sys.executable, str(Path(__file__).resolve()), "--worker", json.dumps(what), "--cap", str(args.cap),
               "--tokens", str(args.tokens), "--prompt", str(args.prompt), "--length", str(args.length),
               "--rows", *map(str, args.rows)]
    allocator = os.environ.get("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # before torch 2.9: ..._CUDA_...
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
                   "PYTORCH_ALLOC_CONF": allocator, "PYTORCH_CUDA_ALLOC_CONF": allocator}
    began, notes = time.time(), []
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=args.timeout)
        lines = done.stdout.strip().splitlines()
        result = json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {
            "error": f"exit {done.returncode}: {(done.stderr or done.stdout).strip()[-300:]}"}
        notes = [line for line in done.stderr.splitlines() if line.startswith("note:")]
    except subprocess.TimeoutExpired as late:
        lines = (late.stdout or b"").decode().strip().splitlines()  # bytes, whatever `text` says
        result = json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {}
        result["error"] = f"more than --timeout {args.timeout} s"
    shown = " ".join(w for w in what if isinstance(w, str) and not os.path.isabs(w))
    print(f"{shown:24} {time.time() - began:6.1f} s  {result.get('error', 'ok')}", flush=True)
    return {**result, **({"notes": notes} if notes else {}), "seconds": round(time.time() - began, 1)}


def main(args) -> dict:
    facts = run_worker(args, "machine")
    name = args.name or facts.get("device", "cpu").lower().replace("nvidia ", "").replace(" ", "_").replace("/", "_")
    path = Path(args.results) / f"gpu_{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    result = json.loads(path.read_text()) if path.exists() else {"shapes": {}}
    result |= {"name": name, "command": "python bench/gpu.py " + " ".join(sys.argv[1:]), "machine": facts,
               "date": datetime.date.today().isoformat(), "cap": run_worker(args, "cap"),
               "sizes": {x: getattr(args, x) for x in ("cap", "tokens", "prompt", "length")}}
    for shape in args.shapes:
        kept = result["shapes"].setdefault(shape, {})
        with tempfile.TemporaryDirectory(dir=args.scratch) as folder:
            try:
                make_model(shape, Path(folder))
            except Exception as error:  # a full disk
                kept["error"] = first_line(error)
                continue
            parts = {"grpo": [("grpo",)], "decode": [("decode", e) for e in args.engines], "update": [("update",)]}
            for part in (p for name in args.parts for p in parts[name]):
                if part[0] == "grpo":
                    kept["grpo"] = run_worker(args, "grpo", folder, shape)
                    shutil.rmtree(Path(folder) / "run", ignore_errors=True)
                elif part[0] == "decode":
                    kept.setdefault("decode", {})[part[1]] = run_worker(
                        args, "decode", folder, part[1], facts.get("bandwidth"))
                else:
                    kept["update"] = run_worker(args, "update", folder)
                path.write_text(json.dumps(result, indent=1) + "\n")
        for rows in map(str, args.rows):
            ours, theirs = (kept.get("decode", {}).get(e, {}).get(rows, {}).get("tokens_per_second")
                            for e in ("engine", "generate"))
            if ours and theirs:
                kept.setdefault("engine / model.generate", {})[rows] = round(ours / theirs, 3)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    options = arguments()
    if options.worker:
        part, *rest = json.loads(options.worker)
        try:
            print("\n" + json.dumps({"machine": machine, "cap": cap, "grpo": grpo, "decode": decode,
                                     "update": update}[part](options, *rest)))
        except Exception as error:
            print("\n" + json.dumps({"error": first_line(error)}))
    else:
        main(options)
