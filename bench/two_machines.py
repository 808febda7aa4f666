"""torchrun over two machines, for which two network namespaces of this one stand. Needs root, ip.

    python bench/two_machines.py                        every case
    python bench/two_machines.py --cases cable_cut      one

Each namespace has its own loopback and one end of a cable (a veth pair), 10.77.0.1 and 10.77.0.2.
On each runs torchrun with a static rendezvous. (With --rdzv_backend c10d the first machine must
find its own address under its host's name, which a namespace does not have.)

    torchrun --nnodes 2 --node_rank N --nproc_per_node 1 --master_addr 10.77.0.1 \\
        --master_port 29400 --rdzv_conf timeout=120 grpo.py ...

    finishes        both ends with the same folder
    own_folders     each machine has its own disk: the second one sees no file of the first one's
    resumed_apart   the run of own_folders continues: the second machine has no checkpoint
    rank_killed     the second machine's process is killed (SIGKILL) in a step
    first_killed    that of the first machine, which writes
    cable_cut       `ip link set down` in a step
    wrong_network   GLOO_SOCKET_IFNAME names an interface that does not lead to the other machine
    wrong_port      the second machine asks another port of the first than that one listens at

A row says how each end ended (exit status, seconds after the fault, last line) and what is saved.
The model is the tiny one with the weights it was born with. Writes bench/results/two_machines.json;
the last line is that JSON.
"""

import argparse
import datetime
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from bench.learning import RESULTS, write_json  # noqa: E402
CASES = (
    "finishes",
    "own_folders",
    "resumed_apart",
    "rank_killed",
    "first_killed",
    "cable_cut",
    "wrong_network",
    "wrong_port",
)
PATIENCE = 420  # seconds until an end that still runs is called a hang
ENDS = ("machine_a", "cable_a", "10.77.0.1"), ("machine_b", "cable_b", "10.77.0.2")


def ip(words, check=True):
    subprocess.run(
        ["ip", *words.split()], check=check, stderr=None if check else subprocess.DEVNULL
    )


def lay_cable():
    take_away()
    for space, _, _ in ENDS:
        ip(f"netns add {space}")
    ip("link add cable_a netns machine_a type veth peer name cable_b netns machine_b")
    for space, cable, address in ENDS:
        ip(f"-n {space} addr add {address}/24 dev {cable}")
        ip(f"-n {space} link set {cable} up")
        ip(f"-n {space} link set lo up")


def take_away():
    for space, _, _ in ENDS:
        ip(f"netns del {space}", check=False)


FLAGS = """--output_dir r --max_samples 200 --tasks_per_step 2 --group_size 2 --max_new_tokens 6
    --max_tokens 200 --eval_tasks 0 --lora_r 2 --dtype float32"""


def start(end, interface, port, folder, hidden, base, log, steps, *words):
    """Start a torchrun in a namespace, with an empty disk in place of the folder `hidden`."""
    torchrun = f"""{sys.executable} -m torch.distributed.run --nnodes 2 --nproc_per_node 1
        --rdzv_conf timeout=120 --master_addr 10.77.0.1 --master_port {port}
        --node_rank {ENDS.index(end)} {ROOT}/grpo.py
        --model_path {base} --max_steps {steps} {FLAGS}"""
    command = " ".join(["exec", *torchrun.split(), *words])
    if hidden:
        command = f"mount -t tmpfs none {hidden} && {command}"
    return subprocess.Popen(
        ["ip", "netns", "exec", end[0], "sh", "-c", command], cwd=folder, stdout=log, stderr=log,
        start_new_session=True,
        env={**os.environ, "GLOO_SOCKET_IFNAME": interface, "OMP_NUM_THREADS": "1"})


def steps_done(folder):
    log = folder / "r" / "metrics.jsonl"
    return log.read_bytes().count(b"\n") if log.exists() else 0


def worker_of(agent):
    """Return the process id of grpo.py under a torchrun."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables, parent = (
                path.read_bytes().split(b"\0"),
                (path.parent / "stat").read_text().rsplit(") ", 1)[1].split()[1],
            )
        except OSError:
            continue
        if int(parent) == agent.pid and any(v.startswith(b"LOCAL_RANK=") for v in variables):
            return int(path.parent.name)
    sys.exit("no process of grpo.py is there to kill")


def play(case, base, place):
    """Do one case. Returns its row."""
    lay_cable()
    kind = "own_folders" if case == "resumed_apart" else case
    folders = [place / case] * 2
    if kind == "own_folders":
        folders = [place / "own_folders_a", place / "own_folders_b"]
    for folder in folders:
        folder.mkdir(exist_ok=True)
    logs = [open(place / f"{case}_{end}.log", "w") for end in ("a", "b")]
    steps = {"finishes": 3, "own_folders": 3, "resumed_apart": 5, "wrong_network": 3,
             "wrong_port": 3}.get(case, 100_000)
    words = ["--resume"] if case == "resumed_apart" else []
    agents = []
    for end, folder, log in zip(ENDS, folders, logs):
        interface = "lo" if case == "wrong_network" else end[1]
        hidden = folders[0] if folder != folders[0] else None
        port = 29401 if case == "wrong_port" and end == ENDS[1] else 29400
        agents.append(start(end, interface, port, folder, hidden, base, log, steps, *words))
    try:
        if steps > 10:
            until = time.monotonic() + PATIENCE
            while steps_done(folders[0]) < 3 and time.monotonic() < until:
                time.sleep(0.2)
            if case == "cable_cut":
                ip("-n machine_b link set cable_b down")
            else:
                os.kill(worker_of(agents[case == "rank_killed"]), signal.SIGKILL)
        began = time.monotonic()
        row = {
            name: ending(agent, began, log)
            for name, agent, log in zip(("first", "second"), agents, logs)
        }
    finally:
        for agent in agents:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
        take_away()
    checkpoints = sorted(path.name for path in (folders[0] / "r" / "checkpoints").glob("step_*"))
    return {**row, "steps_done": steps_done(folders[0]), "saved": checkpoints[-1:]}


def ending(agent, began, log):
    """Wait for a torchrun. Returns its exit status, seconds since `began`, and its last line."""
    try:
        status = agent.wait(max(PATIENCE - (time.monotonic() - began), 1))
    except subprocess.TimeoutExpired:
        status = "HANGS"
    text = Path(log.name).read_text()
    said = (
        re.findall(r"^.*grpo\.py: .*$", text, re.MULTILINE)
        or re.findall(r"^[\w.]*Error.*$", text, re.MULTILINE)
        or [""]
    )
    return {"status": status, "seconds": round(time.monotonic() - began, 1), "said": said[-1][:300]}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    args = parser.parse_args()
    from core.tiny import make_tiny

    place = Path(tempfile.mkdtemp(prefix="two_machines_"))
    base = place / "base"
    for thing in make_tiny():
        thing.save_pretrained(base)
    path = RESULTS / "two_machines.json"
    result = json.loads(path.read_text()) if path.exists() else {"cases": {}}
    for case in args.cases:
        result["cases"][case] = play(case, str(base), place)
        print(case, json.dumps(result["cases"][case]), flush=True)
        result |= {
            "command": "python " + " ".join(sys.argv),
            "date": datetime.date.today().isoformat(),
            "machine": f"{os.cpu_count()} shared cores, two network namespaces",
        }
        write_json(path, result)
    shutil.rmtree(place)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
