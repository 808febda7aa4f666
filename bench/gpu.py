"""What a GPU gives, in ten minutes and unattended: is it right, does it fit, how fast is it? No network, no weights.

    python bench/gpu.py                               Qwen2.5-0.5B's shape; nine minutes on an H100
    python bench/gpu.py --shapes 7B --parts grpo      some of it: what an earlier call has found stays in the file
    python bench/gpu.py --shapes toy --rows 1 2 --tokens 16 --length 96 --prompt 64     on any CPU, a few minutes

The models have random weights. The parts, in the order of their value (bench/gpu_parts.py says what each measures):

    machine   bandwidth and rate of products, measured: the limit
    cap       an allocation beyond --cap raises
    families  tiny models of all families of tests/extras/models/test_models.py play and learn as on the CPU
    correct   log-probabilities of engine and trainer, and gradients, against float32 on the CPU
    grpo      two steps of grpo.py under the cap, with tool calls: allocated memory beside counted, ratio, seconds
    decode    tokens/s against `model.generate` (and `generate_batch`), and against the limit
    trl       bench/vs_trl.py on this model, where TRL is installed
    graphs    what the driver keeps for each CUDA graph
    update    tokens/s of forward and backward
    memory    what a step takes at every setting of --memory, as the README's table counts it
    peers     only if --parts names it: bench/peers.py, a step here, in TRL + PEFT, in TRL with its fused LM head and in
              Unsloth, in bfloat16 and 4 bits; its first lines say which wheels to carry (--wheels names their folder)
    sampler   only if --parts names it: bench/sampler.py, where a vLLM samples, on the last of several GPUs or beside
              the trainer on one, of whose memory it gets 0.4

Every part is a process of its own with a time limit of its own. After each one bench/results/gpu_NAME.json is written
(--results names another folder). What fails is written down with its traceback, the next part follows, and the exit
status is 1 at the end. Without bitsandbytes the steps run with --memory checkpoint. The last line is the JSON.

What --sampler gives, on two GPUs or on one, needs vLLM in an environment of its own (too large to be carried to a
lent card), and minutes for its start. With random weights only the gap of log-probabilities, the waiting and the
rounding can be measured. Nobody has run these yet, nor the peers:

    python bench/gpu.py --shapes 0.5B --parts peers --minutes 5
    PATH=$PATH:VENV/bin python bench/gpu.py --shapes 0.5B --parts sampler --minutes 20
    python bench/sampler.py --vllm VENV --model_path MODEL
"""
import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.gpu_parts import SHAPES, failure  # noqa: E402

# part -> seconds that it may take
LIMITS = {"machine": 120, "cap": 30, "families": 150, "correct": 120, "grpo": 150, "decode": 100, "trl": 200, "graphs": 60,
          "update": 60, "memory": 200, "peers": 240, "sampler": 900}
PARTS = tuple(LIMITS)[2:]
ASKED_FOR = "peers", "sampler"  # parts that run only if --parts names them
SETTINGS = "plain", "checkpoint", "4bit", "small", "stream"
ENGINES = "engine", "generate", "generate_batch"
SIZES = "cap", "wheels", "rows", "tokens", "prompt", "length", "repeats"


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", help="of the result; default: the GPU's, or cpu")
    parser.add_argument("--shapes", nargs="+", default=["0.5B"], choices=SHAPES)
    parser.add_argument("--parts", nargs="+", default=[x for x in PARTS if x not in ASKED_FOR], choices=PARTS)
    parser.add_argument("--engines", nargs="+", default=list(ENGINES[:2]), choices=ENGINES, help="of the part decode")
    parser.add_argument("--cap", type=int, default=3584, help="MiB that torch may reserve in the part grpo")
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 64], help="sequences decoded at once")
    parser.add_argument("--tokens", type=int, default=128, help="decoded by each row, in the longer of two runs")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt, about")
    parser.add_argument("--length", type=int, default=1024, help="tokens of an episode and of a row of the update")
    parser.add_argument("--repeats", type=int, default=3, help="measurements, of which the median counts")
    parser.add_argument("--minutes", type=float, default=9.5, help="after which no part begins, and the last one ends")
    parser.add_argument("--timeout", type=float, help="seconds for every part, in place of its own limit")
    parser.add_argument("--scratch", help="folder for the random models; default: the system's")
    parser.add_argument("--wheels", default=str(ROOT / "wheels"), help="folder of wheels for the part peers")
    parser.add_argument("--results", default=str(ROOT / "bench" / "results"), help="folder of the result")
    args = parser.parse_args(argv)
    if not args.prompt < args.length or min(args.repeats, *args.rows) < 1 or args.tokens < 4:
        parser.error("--prompt must be below --length, --tokens 4 or more, --rows and --repeats 1 or more")
    args.ends = time.time() + 60 * args.minutes
    return args


def make_model(shape: str, folder: Path):
    """Write a Qwen2 of this shape: random bfloat16 weights, a file for each tensor, and the tiny model's tokenizer."""
    import torch
    from safetensors.torch import save_file
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from core.tiny import make_tiny
    tokenizer = make_tiny()[1]
    config = Qwen2Config(**SHAPES[shape][0], bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
                         pad_token_id=tokenizer.pad_token_id, dtype="bfloat16", architectures=["Qwen2ForCausalLM"])
    with torch.device("meta"):
        tensors = Qwen2ForCausalLM(config).state_dict()
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight")
    noise = torch.randn(2**24, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()  # used again and again
    files = {}
    for i, (name, tensor) in enumerate(tensors.items()):
        if "norm" in name:
            full = torch.ones(tensor.shape).bfloat16()
        else:
            repeated = noise.roll(i * 4099).repeat(-(-tensor.numel() // len(noise)))
            full = repeated[:tensor.numel()].view(tensor.shape).clone()
        files[name] = f"model-{i:05d}.safetensors"
        save_file({name: full}, folder / files[name], metadata={"format": "pt"})
    size = sum(2 * tensor.numel() for tensor in tensors.values())
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": size}, "weight_map": files}))
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def run_part(args, part: str, *rest) -> dict:
    """Run a part in a process of its own. Return what it found, with an "error" if it failed or was stopped."""
    seconds = min(args.timeout or LIMITS[part], args.ends - time.time())
    if seconds <= 0:
        return {"error": f"not begun: --minutes {args.minutes:g} are used up"}
    call = json.dumps({"part": part, "rest": rest, **{name: getattr(args, name) for name in SIZES}})
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    began, error = time.time(), None
    with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "log", "w+", errors="replace") as log:
        found = Path(folder) / "result.json"
        process = subprocess.Popen([sys.executable, str(ROOT / "bench" / "gpu_parts.py"), call, str(found)],
                                   env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            if process.wait(seconds):
                error = f"exit status {process.returncode}"
        except subprocess.TimeoutExpired:
            error = f"stopped after {seconds:.0f} s"
        finally:
            stop(process)
        result = read_json(found)
        log.seek(0)
        lines = log.read().splitlines()
    if error:
        result |= {"error": error, "log": lines[-60:]}
    notes = [line for line in lines if line.startswith("note:")]
    return {**result, **({"notes": notes} if notes else {}), "seconds": round(time.time() - began, 1)}


def stop(process):
    """End a part and the processes that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def read_json(path: Path) -> dict:
    """Return what a file holds, or {} if there is none, or a part was stopped while it wrote."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def failures(result: dict, name: str = "") -> list[str]:
    """Return the errors in a result and the checks that do not hold, each with its place."""
    found = [f"{name}: {result['error']}"] if "error" in result else []
    found += [f"{name}: not so: {check}" for check, holds in result.get("checks", {}).items() if not holds]
    for key, inner in result.items():
        if isinstance(inner, dict) and key != "checks":
            found += failures(inner, f"{name} {key}".strip())
    return found


def main(args) -> int:
    """Run the parts and return the exit status."""
    facts = run_part(args, "machine")
    name = args.name or facts.get("device", "unknown").lower().replace("nvidia ", "").replace(" ", "_").replace("/", "_")
    if facts.get("device") == "cpu" and not all(shape.startswith("toy") for shape in args.shapes):
        print("gpu.py: no GPU is visible here; on a CPU give --shapes toy toy-lean and small sizes", file=sys.stderr)
        return 1
    path = Path(args.results) / f"gpu_{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    result = {"shapes": {}, **read_json(path), "name": name, "machine": facts, "date": datetime.date.today().isoformat(),
              "command": "python bench/gpu.py " + " ".join(sys.argv[1:]), "sizes": {x: getattr(args, x) for x in SIZES}}
    failed = failures(facts, "machine")

    def keep(into: dict, key: str, title: str, part_result: dict):
        into[key] = part_result
        new = failures(part_result, title)
        failed.extend(new)
        print(f"{title:26} {part_result.get('seconds', 0):6.1f} s  {'; '.join(new) or 'ok'}", flush=True)
        result["failed"] = failed
        path.write_text(json.dumps(result, indent=1) + "\n")

    keep(result, "cap", "cap", run_part(args, "cap"))
    if "families" in args.parts:
        keep(result, "families", "families", run_part(args, "families"))
    for shape in args.shapes:
        kept = result["shapes"].setdefault(shape, {})
        with tempfile.TemporaryDirectory(dir=args.scratch) as folder:
            began = time.time()
            try:
                make_model(shape, Path(folder))
            except Exception as error:  # a full disk
                keep(kept, "model", f"{shape} model", failure(error))
                continue
            keep(kept, "model", f"{shape} model", {"seconds": round(time.time() - began, 1)})
            for part in [part for part in PARTS[1:] if part in args.parts]:
                if part == "memory":  # side by side: what torch reserves in one process is not changed by another
                    with ThreadPoolExecutor() as pool:
                        taken = {setting: pool.submit(run_part, args, "memory", folder, setting) for setting in SETTINGS}
                    for setting, taking in taken.items():
                        keep(kept.setdefault("memory", {}), setting, f"{shape} memory {setting}", taking.result())
                elif part == "decode":
                    decoded = kept.setdefault("decode", {})
                    for kind in args.engines:
                        keep(decoded, kind, f"{shape} decode {kind}",
                             run_part(args, "decode", folder, kind, facts.get("bandwidth")))
                    kept["engine / model.generate"] = speedups(decoded)
                else:
                    rest = [shape] if part in ("grpo", "trl", "peers") else []
                    keep(kept, part, f"{shape} {part}", run_part(args, part, folder, *rest))
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return bool(failed)


def speedups(decoded: dict) -> dict:
    """Return how many times as fast as `model.generate` the engine is, by the number of rows."""
    ratios = {}
    for rows, ours in decoded.get("engine", {}).items():
        theirs = decoded.get("generate", {}).get(rows)
        if isinstance(ours, dict) and isinstance(theirs, dict) and "step_ms" in ours and "step_ms" in theirs:
            ratios[rows] = round(theirs["step_ms"] / ours["step_ms"], 3)
    return ratios


if __name__ == "__main__":
    sys.exit(main(arguments()))
