"""Throughput of `python agent.py --serve` with 1, 8 and 64 clients, beside the engine alone and a vLLM server.

    python bench/serving.py --model_path path/to/model [--vllm FOLDER] [--clients 1,8,64] [--tokens 64]

FOLDER is that of bench/sampler.py. vLLM's threads spin while they wait, which would take a core from the others: its
processes are stopped (SIGSTOP) while it is not their turn, in which they have as many threads as there are cores.

Every client asks once, over HTTP, for the same number of tokens after a prompt of its own, and all ask at the same time. The engine
alone decodes the same rows in this process. The sides alternate, and what counts is the ratio of a round. The last line is JSON:
tokens a second of each side (the median) and the median ratios.
"""
import argparse
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import core  # noqa: E402, F401  Before torch: its threads spin as little as in the server.
from bench import sampler  # noqa: E402
from layers import load_model  # noqa: E402
from core.engine import Engine, Row  # noqa: E402


def engine_alone(model, prompts, tokens):
    """Return the seconds that the engine takes for all prompts."""
    began = time.perf_counter()
    engine = Engine(model, slots=len(prompts))
    engine.add([Row(prompt, seed=i, limit=tokens) for i, prompt in enumerate(prompts)])
    while engine.busy:
        engine.step()
    return time.perf_counter() - began


def ask(url, prompt, tokens):
    """Let a server sample after one prompt. Raises RuntimeError if it did not sample all tokens."""
    body = {"model": "base", "prompt": prompt, "max_tokens": tokens, "temperature": 1.0, "top_p": 1.0, "top_k": -1,
            "logprobs": 0, "ignore_eos": True, "return_token_ids": True}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        ids = json.load(answer)["choices"][0]["token_ids"]
    if len(ids) != tokens:
        raise RuntimeError(f"{url}: {len(ids)} tokens, not {tokens}")


def server(url, prompts, tokens):
    """Return the seconds that a server takes for all prompts, each from a client of its own."""
    done = []
    clients = [threading.Thread(target=lambda p=p: done.append(ask(url, p, tokens))) for p in prompts]
    began = time.perf_counter()
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    if len(done) != len(prompts):
        raise RuntimeError(f"{url}: {len(prompts) - len(done)} clients got no answer")
    return time.perf_counter() - began


def start(model_path):
    """Start our server. Return its process and its address."""
    process = subprocess.Popen([sys.executable, "-u", "agent.py", "--serve", "--port", "0", "--env", "none", "--model_path", model_path],
                               cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    found = next(filter(None, (re.search(r"(http://[\d.]+:\d+)", line) for line in process.stdout)), None)
    if not found:
        raise RuntimeError("the server has not started")
    # What it says afterwards is read, or its pipe would fill.
    threading.Thread(target=process.stdout.read, daemon=True).start()
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            urllib.request.urlopen(f"{found[1]}/healthz", timeout=1).close()
            return process, found[1]
        except OSError:
            time.sleep(0.1)
    raise RuntimeError("the server does not answer")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_path", required=True)
    parser.add_argument("--vllm", type=Path, help="folder of vLLM's virtual environment: it is measured, too")
    parser.add_argument("--clients", default="1,8,64")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    model, tokenizer = load_model(str(Path(args.model_path).resolve()), train=False)
    model.eval()
    if args.vllm:
        log = tempfile.NamedTemporaryFile("w", prefix="vllm", delete=False)
        vllm, theirs = sampler.serve(args.vllm, args.model_path, str(model.dtype)[6:], log, threads=os.cpu_count(),
                                     start_new_session=True)
        os.killpg(vllm.pid, signal.SIGSTOP)
    process, ours = start(str(Path(args.model_path).resolve()))
    draw = random.Random(0)
    result = {"machine": f"{os.cpu_count()} CPU cores", "date": time.strftime("%Y-%m-%d"), "dtype": str(model.dtype)[6:],
              "prompt": args.prompt, "tokens": args.tokens, "rounds": args.rounds, "clients": {}}
    try:
        for clients in map(int, args.clients.split(",")):
            seconds = {"engine": [], "server": []} | ({"vllm": []} if args.vllm else {})
            # The first round warms up and does not count.
            for number in range(args.rounds + 1):
                prompts = [[draw.randrange(100, len(tokenizer) - 100) for _ in range(args.prompt)] for _ in range(clients)]
                now = {"engine": engine_alone(model, prompts, args.tokens), "server": server(ours, prompts, args.tokens)}
                if args.vllm:
                    os.killpg(vllm.pid, signal.SIGCONT)
                    now["vllm"] = server(theirs, prompts, args.tokens)
                    os.killpg(vllm.pid, signal.SIGSTOP)
                for side, value in now.items() if number else ():
                    seconds[side].append(value)
            row = {f"{side}_tokens_per_s": round(clients * args.tokens / statistics.median(s), 1) for side, s in seconds.items()}
            for other in ("engine", "vllm")[:len(seconds) - 1]:
                row[f"server_over_{other}"] = round(statistics.median(b / a for a, b in zip(seconds["server"], seconds[other])), 3)
            result["clients"][clients] = row
            print(clients, "clients:", row, flush=True)
    finally:
        process.terminate()
        process.wait()
        if args.vllm:
            os.killpg(vllm.pid, signal.SIGKILL)
            vllm.wait()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
