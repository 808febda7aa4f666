"""SIGKILL at random moments, half of them aimed at saving: is a checkpoint ever torn, is more than an interval lost?

    python bench/kills.py [200] [sft | grpo]    six minutes; exit status 1 if anything is lost

From 200 kills on bench/results/kills_sft.json or kills_grpo.json is written; the last line is that JSON.

A tiny run that saves after every second step is killed, resumed, killed ... until it ends; then the next run begins.
After each kill all checkpoints are verified, and the newest may lack two of the logged steps at most. Every run that
ends must have the bits of one that was never killed. Runs are forked from this process, which has imported everything.
"""
import argparse
import datetime
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")
import torch  # noqa: E402
from tqdm import tqdm  # noqa: E402

import grpo  # noqa: E402
from bench.learning import RESULTS, write_json  # noqa: E402
import sft  # noqa: E402
from core.model import checkpoints
from extras.exact.checkpoint import read_state
from core.config import UserError
from core.tiny import make_tiny  # noqa: E402

SAVE_EVERY = 2
CONFIGS = {
    "sft": lambda base: sft.Config(model_path=base, max_samples=24, max_steps=30, batch_size=4, eval_tasks=0,
                                   learning_rate=1e-3, save_every=SAVE_EVERY),
    "grpo": lambda base: grpo.Config(model_path=base, tasks_per_step=2, group_size=2, max_steps=30, max_new_tokens=4,
                                     max_tokens=200, eval_tasks=0, learning_rate=1e-3, entropy_coef=0.1,
                                     save_every=SAVE_EVERY)}


def start(module, config) -> int:
    """The run in a child process -> its pid."""
    if pid := os.fork():
        return pid
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1), os.dup2(silent, 2)
    try:
        module.train(config)
        os._exit(0)
    except BaseException:
        import traceback
        Path(config.output_dir + ".error").write_text(traceback.format_exc())
        os._exit(1)


def ended(pid) -> int | None:
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def wait_for(pid, condition, seconds) -> int | None:
    """The exit status if the child ended; None as soon as the condition holds, or the seconds are over."""
    until = time.time() + seconds
    while (code := ended(pid)) is None and not condition() and time.time() < until:
        time.sleep(0.0002)
    return code


def size(folder):
    path = folder / "metrics.jsonl"
    return path.stat().st_size if path.exists() else 0


def bits(folder):
    newest = checkpoints(folder)[-1]
    files = [*newest.glob("*.safetensors"), folder / "metrics.jsonl", folder / "trajectories.jsonl"]
    return {path.name: path.read_bytes() for path in files if path.exists()}


def main(kills, kind):
    torch.set_num_threads(1)
    random.seed(0)
    tqdm.set_lock(threading.RLock())  # its own is shared by forks: a killed child would keep it for ever
    place = Path(tempfile.mkdtemp(prefix="kills"))
    model, tokenizer = make_tiny()
    model.save_pretrained(place / "base"), tokenizer.save_pretrained(place / "base")
    module, config = {"sft": sft, "grpo": grpo}[kind], CONFIGS[kind](str(place / "base"))
    config.output_dir = str(place / "whole")
    began, pid = time.time(), start(module, config)
    assert wait_for(pid, lambda: False, 3600) == 0, (place / "whole.error").read_text()
    whole = bits(place / "whole")
    count = {"kills": 0, "in_saving": 0, "unreadable": 0, "lost_more_than_an_interval": 0, "failed": 0, "runs_ended": 0,
             "final_bits_differ": 0}
    folder = place / "run"
    config.output_dir, config.resume = str(folder), True
    while count["kills"] < kills:
        lines, pid, aimed = size(folder), start(module, config), count["kills"] % 2
        saving = folder / "checkpoints"
        code = wait_for(pid, lambda: size(folder) != lines, 600)  # in its loop
        count["failed"] += code is None and size(folder) == lines  # it hangs
        if code is None and aimed:
            code = wait_for(pid, lambda: any(saving.glob(".tmp-*")), 60)
            time.sleep(random.uniform(0, 0.03))
        elif code is None:
            code = wait_for(pid, lambda: False, random.uniform(0, 0.5))
        if code is None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            count["kills"] += 1
            count["in_saving"] += any(saving.glob(".tmp-*"))
            newest = 0
            for path in checkpoints(folder):
                try:
                    newest = read_state(path)["step"]
                except UserError as error:
                    count["unreadable"] += 1
                    print(error)
            print(f"\r{count['kills']} of {kills}", end="", flush=True)
            whole_lines = (folder / "metrics.jsonl").read_bytes().count(b"\n")
            count["lost_more_than_an_interval"] += whole_lines - newest > SAVE_EVERY
            continue
        count["failed"] += code != 0
        count["runs_ended"] += 1
        if code:
            print(Path(str(folder) + ".error").read_text())
        elif bits(folder) != whole:
            count["final_bits_differ"] += 1
        shutil.rmtree(folder)
    last = start(module, config)
    if wait_for(last, lambda: False, 3600) or bits(folder) != whole:
        count["final_bits_differ"] += 1
    count["runs_ended"] += 1
    shutil.rmtree(place)
    result = {"command": f"python bench/kills.py {kills} {kind}", "date": datetime.date.today().isoformat(), "seed": 0,
              "machine": f"{os.cpu_count()} cores, no GPU", "algorithm": kind, "save_every": SAVE_EVERY, **count,
              "seconds": round(time.time() - began)}
    print("\n" + json.dumps(result))
    if kills >= 200:
        write_json(RESULTS / f"kills_{kind}.json", result)
    lost = ("unreadable", "lost_more_than_an_interval", "failed", "final_bits_differ")
    return int(any(count[name] for name in lost))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kills", nargs="?", type=int, default=200)
    parser.add_argument("kind", nargs="?", default="sft", choices=CONFIGS)
    sys.exit(main(**vars(parser.parse_args())))
