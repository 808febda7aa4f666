"""torchrun: two processes do what one does, with the same tasks and the same gradients; one of them dies, and it is told."""
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import programs
import pytest
import torch
import torch.distributed as dist
from programs import Program
from safetensors.torch import load_file
from saving import newest_checkpoint
from test_resume import place  # noqa: F401  (a fixture)

from core import run
from extras.exact.checkpoint import read_state
from core.run import OneProcess
from extras.ranks.processes import RankLost, Ranks

ROOT = Path(run.__file__).parent.parent
# Every algorithm takes one step on recorded episodes, then grpo plays two steps of its own. argv: place, output folder.
DRIVER = '''
import os
import sys
from pathlib import Path
import distill, dpo, grpo, reward_weighted, sft
from episodes import read_trajectories
place, out = map(Path, sys.argv[1:])
common = dict(model_path=str(place / "base"), env="equations", max_samples=200, max_steps=1, learning_rate=1e-3, max_grad_norm=1e9,
              eval_tasks=0, lora_r=2, lora_dropout=0.25)
recorded = dict(common, trajectories=str(place / "episodes.jsonl"), batch_size=4, gradient_accumulation_steps=3)
sft.train(sft.Config(output_dir=str(out / "sft"), **{**recorded, "lora_r": 0, "lora_dropout": 0.0}))
reward_weighted.train(reward_weighted.Config(output_dir=str(out / "reward_weighted"), memory="small", **recorded))
dpo.train(dpo.Config(output_dir=str(out / "dpo"), **{**recorded, "batch_size": 3}))
def episodes(*_, **__):
    found = read_trajectories(str(place / "episodes.jsonl"))
    for t in found:
        t.logprobs = [-7.0 * m for m in t.loss_mask]  # as such a model would have sampled them
    return found
played, grpo.rollout, distill.rollout = grpo.rollout, episodes, episodes
distill.train(distill.Config(output_dir=str(out / "distill"), tasks_per_step=18, batch_size=4, teacher=str(place / "adapter"), **common))
grpo.train(grpo.Config(output_dir=str(out / "grpo"), tasks_per_step=6, group_size=3, batch_size=4, kl_coef=0.1,
                       kl_estimator="k2", importance_correction=2.0, **{**common, "model_path": str(place / "adapter")}))
grpo.rollout = distill.rollout = played  # one process runs this inside of the tests
grpo.train(grpo.Config(output_dir=str(out / "plays"), tasks_per_step=3, group_size=2, max_tokens=200, max_new_tokens=6,
                       batch_size=3, save_every=1, success_rate_ub=0.9, **{**common, "max_steps": 2, "eval_tasks": 3}))
if "RANK" in os.environ:  # as main leaves
    sys.stdout.flush()
    os._exit(0)
'''


def torchrun(n, *words, **options):
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={n}"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run([*program, *map(str, words)], env=env, capture_output=True, text=True, timeout=570, **options)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def ranks_of_two(*words, cwd):
    """Start two processes as torchrun makes them, without its agent, which would stop them all."""
    port = free_port()
    return [Program(*words, cwd=cwd, RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=2, LOCAL_WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=port) for rank in (0, 1)]


@pytest.fixture(scope="module")
def both(place, tmp_path_factory):  # noqa: F811
    """-> the folders that one process and two have written."""
    folder = tmp_path_factory.mktemp("both")
    (folder / "driver.py").write_text(DRIVER)
    pair = ranks_of_two(folder / "driver.py", place, folder / "two", cwd=folder)
    said, errors = zip(*(p.communicate() for p in pair))
    assert [p.returncode for p in pair] == [0, 0], errors
    assert [text.count("written:") for text in said] == [6, 0], said  # rank 0 alone speaks
    argv, sys.argv = sys.argv, ["driver.py", str(place), str(folder / "one")]
    try:
        runpy.run_path(str(folder / "driver.py"))
    finally:
        sys.argv = argv
    return folder / "one", folder / "two"


@pytest.mark.parametrize("name", ["sft", "reward_weighted", "dpo", "grpo", "distill"])
def test_two_processes_have_the_gradient_of_one(both, name):
    """After one step AdamW's first moment is a tenth of the gradient; dropout's masks are the same, too. 1e-6 of the gradient."""
    a, b = (load_file(folder / name / "checkpoints" / "step_000001" / "optimizer.safetensors")
            for folder in both)
    a, b = ({k: v for k, v in s.items() if k.endswith("|exp_avg")} for s in (a, b))
    assert a.keys() == b.keys() and max(v.abs().max() for v in a.values()) > 0.001
    assert max((a[k] - b[k]).abs().max() for k in a) < 1e-7
    one, two = ([json.loads(line) for line in (folder / name / "metrics.jsonl").open()][:1] for folder in both)
    assert [list(row) for row in one] == [list(row) for row in two]
    for x, y in zip(one, two):
        assert x.pop("reward_histogram", None) == y.pop("reward_histogram", None)
        assert x == pytest.approx(y, rel=1e-4, abs=1e-6)


def test_two_processes_draw_the_same_tasks_and_keep_groups_whole(both):
    one, two = ([json.loads(line) for line in (folder / "plays" / "trajectories.jsonl").open()] for folder in both)
    assert len(one) == 12 and [t["group_id"] for t in one] == [f"{s}-{i}" for s in (0, 1) for i in (0, 0, 1, 1, 2, 2)]
    for key in ("step", "group_id", "info", "token_ids", "reward"):
        assert [t[key] for t in one] == [t[key] for t in two], key


def test_only_rank_zero_writes_and_there_is_nothing_of_the_others(both):
    one, two = ({str(path.relative_to(folder)) for path in folder.rglob("*")} for folder in both)
    assert one == two


@pytest.mark.parametrize("n, processes", [(0, 2), (1, 2), (7, 3), (12, 5), (11, 4), (16, 1)])
def test_shares_are_whole_disjoint_and_even(n, processes):
    made = [Ranks.__new__(Ranks) for _ in range(processes)] if processes > 1 else [OneProcess()]
    for rank, ranks in enumerate(made):
        ranks.rank, ranks.world = rank, processes
    shares = [list(r.share(n)) for r in made]
    assert sum(shares, []) == list(range(n)) and max(map(len, shares)) - min(map(len, shares)) <= 1
    for batch_size in (1, 4, 100):
        parts = [r.micro_batches(n, batch_size) for r in made]
        assert sorted(i for own in parts for part in own for i in range(n)[part]) == list(range(n))
        assert all(len(range(n)[part]) <= batch_size for own in parts for part in own)
        assert n < processes or all(parts), "a rank without work"
        passes = -(-n // batch_size)
        assert max(map(len, parts)) == -(-passes // processes), "the others wait for a rank"


# ------------------------------------------------------------------------------------------------------- who is gone
@pytest.fixture
def start(place, tmp_path):  # noqa: F811
    """-> start(program, words, first): two ranks that are killed when the test ends."""
    pair = []

    def started(program, words="", first=()):
        pair.extend(ranks_of_two(ROOT / program, *first, "--model_path", place / "base", "--output_dir", "r", *words.split(), cwd=tmp_path))
        return pair
    yield started
    for p in pair:
        p.kill()


def wait_for_lines(folder, pair, n):
    until = time.monotonic() + 300
    path = folder / "r" / "metrics.jsonl"
    while not path.exists() or path.read_bytes().count(b"\n") < n:
        assert time.monotonic() < until and all(p.poll() is None for p in pair), [p.said("stderr")[-2000:] for p in pair]
        time.sleep(0.1)


def ranks_of(agent):
    """The process ids of torchrun's processes, by rank."""
    children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
    ranks = {}
    for pid in children:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        ranks |= {int(v[5:]): int(pid) for v in variables if v.startswith(b"RANK=")}
    return ranks


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
@pytest.mark.slow
@pytest.mark.parametrize("dead", [1, 0])
def test_a_rank_is_killed_in_a_step_the_others_end_and_the_run_resumes(place, tmp_path, dead):  # noqa: F811
    words = (f"--model_path {place}/base --output_dir r --max_samples 200 --tasks_per_step 2 --group_size 2 --max_new_tokens 6 --max_tokens 200 "
             "--eval_tasks 0 --lora_r 2 --updates_per_step 1 --max_steps 5000").split()
    if dead == 0:  # it is the one that writes
        words += ["--save_every", "1"]
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(ROOT / "grpo.py"), *words]
    agent = subprocess.Popen(program, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    try:
        log, until = tmp_path / "r" / "metrics.jsonl", time.monotonic() + 300
        while not log.exists() or log.read_bytes().count(b"\n") < 3:
            assert agent.poll() is None and time.monotonic() < until
            time.sleep(0.05)
        ranks = ranks_of(agent)
        began = time.monotonic()
        os.kill(ranks[dead], signal.SIGKILL)
        _, errors = agent.communicate(timeout=200)
        assert agent.returncode != 0 and time.monotonic() - began < 60, errors[-2000:]
        assert not any(Path(f"/proc/{pid}").exists() for pid in ranks.values())
    finally:
        agent.kill()
    saved = read_state(newest_checkpoint(tmp_path / "r"))["step"]
    assert saved >= 2
    if dead == 1:  # rank 0 says so, and has saved the last whole step
        assert re.search(r"grpo.py: (another rank is gone|stopped by SIGTERM).*continue with: torchrun --nproc_per_node=2 \S*grpo.py --config r/config.yaml "
                         "--resume", errors), errors[-2000:]
        assert saved == log.read_bytes().count(b"\n")
    path = tmp_path / "r" / "config.yaml"
    path.write_text(path.read_text().replace("max_steps: 5000", f"max_steps: {saved + 1}"))
    done = programs.run(ROOT / "grpo.py", "--config", "r/config.yaml", "--resume", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    steps = [json.loads(line)["step"] for line in log.open()]
    assert steps == list(range(saved + 1))


def test_a_signal_to_all_ranks_saves_and_says_how_to_go_on(start, tmp_path):
    pair = start("sft.py", "--max_samples 40 --batch_size 4 --eval_tasks 0 --lora_r 2 --max_steps 5000")
    wait_for_lines(tmp_path, pair, 2)
    for p in pair:
        p.send_signal(signal.SIGTERM)
    errors = [p.communicate(timeout=200)[1] for p in pair]
    assert [p.returncode for p in pair] == [143, 143] and not any("Traceback" in e for e in errors), errors
    told = re.search(r"stopped by SIGTERM(?: after step|; step) (\d+)(?: is saved)?; continue with: torchrun", errors[0])
    assert read_state(newest_checkpoint(tmp_path / "r"))["step"] == int(told[1])


def test_what_the_user_can_mend_ends_all_ranks_with_exit_status_2(start, tmp_path):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "config.yaml").write_text("# sft run; x\nseed: 1\n")
    (tmp_path / "r" / "metrics.jsonl").touch()
    pair = start("sft.py")
    errors = [p.communicate()[1] for p in pair]
    assert [p.returncode for p in pair] == [2, 2], errors
    assert all("already holds a sft run; --resume" in e and "Traceback" not in e for e in errors), errors


DIES = """
import os, sys
place, dead = sys.argv.pop(1), sys.argv.pop(1)
import core.run, grpo
from core import config as program
def dies_in(owner, name, after=0):
    whole, calls = getattr(owner, name), [0]
    def call(*args, **options):
        calls[0] += 1
        if calls[0] > after:
            os._exit(9)
        return whole(*args, **options)
    setattr(owner, name, call)
if os.environ["RANK"] == dead:
    owner, name, after = {"load": (grpo, "load_model", 0), "evaluate": (grpo, "evaluate", 0),
                          "rollout": (grpo, "rollout", 2), "update": (grpo, "clip_grad_norm_", 2), "save": (core.run.Run, "save", 1),
                          "finish": (core.run.Run, "finish", 0)}[place]
    dies_in(owner, name, after)
program.main(grpo.Config, lambda config: grpo.train(config), "")
"""


@pytest.mark.parametrize("where, dead", [("load", "1"), ("evaluate", "0"), ("rollout", "1"), ("update", "0"), ("save", "1"), ("finish", "0"), pytest.param("finish", "1", marks=pytest.mark.slow)])
def test_wherever_a_rank_dies_the_others_do_not_wait_for_it(start, tmp_path, where, dead):
    (tmp_path / "dies.py").write_text(DIES)
    words = "--env equations --max_samples 200 --tasks_per_step 2 --group_size 2 --max_new_tokens 6 --max_tokens 200 --eval_tasks 2 --lora_r 2 --max_steps 3 --save_every 1"
    pair = start(tmp_path / "dies.py", words, first=(where, dead))
    errors = [p.communicate()[1] for p in pair][1 - int(dead)]
    assert pair[int(dead)].returncode == 9 and pair[1 - int(dead)].returncode == 5, errors[-3000:]
    assert "Traceback" not in errors and "another rank is gone" in errors, errors[-3000:]
    # Rank 1 said "step 2 is saved" where the first had died before it saved it.
    assert dead == "1" or "is saved" not in errors, errors[-3000:]
    # And when the first one was gone, nobody named the command.
    assert where in ("load", "evaluate", "finish") or "continue with: torchrun" in errors, errors[-3000:]


def test_a_collective_that_a_lost_rank_would_leave_hanging_ends(monkeypatch):
    """NCCL's does, on a GPU. The ranks have met before it, by gloo."""
    asked = []

    class Work:
        def __init__(self, hangs):
            self.hangs = hangs

        def is_completed(self):
            return not self.hangs

        def wait(self):
            assert not self.hangs

    class Pulse:
        def done(self):
            asked.append(1)
            return len(asked) == 4
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, op=None, group=None, async_op=False: Work(tensor.numel() == 5))
    ranks = Ranks.__new__(Ranks)
    ranks.group, ranks.meeting, ranks.pulse = None, None, Pulse()
    ranks.add(torch.zeros(4))
    with pytest.raises(RankLost, match="another rank is gone .no sign of life for 60 s"):
        ranks.add(torch.zeros(5))
    assert len(asked) == 4


SILENT = """
import os, time
from datetime import timedelta
from extras import ranks as distributed
from extras.ranks import processes as ranks
from extras.ranks.processes import RankLost
ranks.SILENCE = timedelta(seconds=3)
ranks = distributed.join()
ranks.gather(0)
if ranks.rank:
    # Its connections stay open, and nothing comes any more, as of a machine whose cable was cut.
    os.kill(os.getpid(), 19)
try:
    ranks.gather(1)
except RankLost as error:
    print(error, flush=True)
os._exit(0)
"""


def test_a_rank_of_which_nothing_is_heard_is_told(start, tmp_path):
    (tmp_path / "silent.py").write_text(SILENT)
    pair = start(tmp_path / "silent.py")
    said, errors = pair[0].communicate(timeout=100)
    assert "another rank is gone" in said, errors


UNREACHED = """
import os, time
from datetime import timedelta
import torch.distributed as dist
from extras import ranks as distributed
from extras.ranks import processes as ranks
from core.config import UserError
ranks.CONNECT = timedelta(seconds=1)
if os.environ["RANK"] == "1":
    # It has started, and its network leads elsewhere.
    store, *_ = next(dist.rendezvous("env://"))
    store.set("started_1", "")
    time.sleep(100)
try:
    distributed.join()
except UserError as error:
    print(error, flush=True)
"""


def test_a_rank_that_starts_and_does_not_connect_ends_the_others(start, tmp_path):
    (tmp_path / "unreached.py").write_text(UNREACHED)
    pair = start(tmp_path / "unreached.py")
    said, errors = pair[0].communicate(timeout=60)
    assert "the ranks do not reach each other" in said and "GLOO_SOCKET_IFNAME" in said, errors
