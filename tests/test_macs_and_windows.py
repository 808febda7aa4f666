"""What neither Macs nor Windows machines could be asked: what POSIX has is taken away, and the CPU plays a Mac's GPU."""
import ast
import json
from pathlib import Path

import bandit
import pytest
import torch
from fake_cuda import Violation, mps
from test_devices import calling, metrics_of, options_of  # noqa: F401  (a fixture)
from test_layers import copy_without
from test_lessons import SMALL_SHAPE

import agent_program
import grpo
import sft
import talk
from core.config import UserError, fill
from core.model import choose_device
from layers import load_model

ROOT = Path(__file__).parent.parent


# ------------------------------------------------------------------------------- which device is taken
@pytest.mark.parametrize("cuda, mac, device", [(True, True, "cuda"), (True, False, "cuda"), (False, True, "mps"), (False, False, "cpu")])
def test_the_device_is_that_of_cuda_then_a_macs_then_the_cpu(monkeypatch, cuda, mac, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mac)
    assert choose_device() == torch.device(device) and choose_device("cpu") == torch.device("cpu")
    for name, there in (("cuda", cuda), ("mps", mac)):
        if there:
            assert choose_device(name).type == name
        else:
            with pytest.raises(UserError, match=f"--device {name}: torch finds none, but .*cpu"):
                choose_device(name)


def test_the_flag_of_every_program_reaches_the_model(tiny, tmp_path, monkeypatch):
    """On a machine with a GPU: the model lies where --device says, and without it on the GPU."""
    asked = []

    def load(path, *, device=None, **options):
        asked.append(device)
        raise UserError("far enough")
    for module in (grpo, sft):
        monkeypatch.setattr(module, "load_model", load)
        with pytest.raises(UserError, match="far enough"):
            module.train(module.Config(model_path=tiny, env="equations", device="mps", output_dir=str(tmp_path / module.__name__)))
    monkeypatch.setattr(talk, "load_model", load)
    with pytest.raises(UserError, match="far enough"):
        agent_program.run(agent_program.Config(model_path=tiny, env="equations", num_tasks=1, device="mps"))
    assert asked == ["mps"] * 3


def test_a_macs_gpu_takes_float32_unless_told_and_refuses_4_bits_in_one_line(tiny, monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert fill(grpo.Config(model_path="nobody/has-it")).dtype == "float32"
    for words in ({"load_in_4bit": True}, {"memory": "4bit"}, {"memory": "small"}, {"memory": "stream"}):
        with pytest.raises(UserError, match="not written for a Mac's GPU; give --memory checkpoint, or --device cpu"):
            load_model(tiny, lora_r=4, **words)
    assert load_model(tiny, lora_r=4, load_in_4bit=True, device="cpu")[0].device.type == "cpu"


# ---------------------------------------------------------------------------------------- a played Mac
def test_the_witness_sees_what_a_macs_gpu_refuses():
    with mps():
        x = torch.ones(2, 3, device="mps")
        assert x.device.type == "mps" and x.is_mps and not x.is_cuda and not x.is_cpu and x.cpu().is_cpu
        for wrong in (lambda: x.double(), lambda: x.sum(dtype=torch.float64), lambda: torch.zeros(2, dtype=torch.float64).to("mps")):
            with pytest.raises(Violation, match="float64"):
                wrong()
    with pytest.raises(Violation, match="mix"), mps():
        torch.ones(2, 3, device="mps") + torch.ones(2, 3)


@pytest.mark.parametrize("options", [
    {"kl_coef": 0.1, "memory": "checkpoint", "lora_dropout": 0.1}, pytest.param({"kl_coef": 0.1}, marks=pytest.mark.slow),
    pytest.param({"lora_r": 0, "loss": "vespo"}, marks=pytest.mark.slow)], ids=str)
def test_a_run_on_a_macs_gpu_computes_what_it_does_on_a_cpu(options, tmp_path, calling):  # noqa: F811
    """No tensor of float64 is on it, none of the host meets one of it, and CUDA is not asked."""
    grpo.train(options_of(grpo, tmp_path, "host", max_steps=1, **options))
    with mps() as device:
        result = grpo.train(options_of(grpo, tmp_path, "device", max_steps=1, **options))
    assert result["steps"] == 1 and device.events["blocking copy to the device"] and not device.graphs
    for here, there in zip(metrics_of(tmp_path / "host"), metrics_of(tmp_path / "device"), strict=True):
        assert here["grad_norm"] > 0 and here.pop("reward_histogram") == there.pop("reward_histogram")
        assert there == pytest.approx(here, rel=1e-3, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bits_on_a_macs_gpu(dtype, tmp_path, calling):  # noqa: F811
    """float16 has the loss scale that old cards need: no gradient vanishes or overflows."""
    with mps():
        grpo.train(options_of(grpo, tmp_path, "device", dtype=dtype, updates_per_step=2))
    for line in metrics_of(tmp_path / "device"):
        assert line["first_ratio"] == pytest.approx(1, abs=3e-3) and 0 < line["grad_norm"] < 10


# ------------------------------------------------------------------------------------- without POSIX
# What Windows' Python does not have. os.name stays: pathlib would make paths of another system.
WITHOUT = """
import os, signal, sys
for name in ("fcntl", "grp", "mmap", "pty", "pwd", "readline", "resource", "termios", "tty"):
    sys.modules[name] = None
for name in ("fork", "forkpty", "getuid", "geteuid", "getpgid", "killpg", "mkfifo", "nice", "setsid", "sysconf", "uname"):
    if hasattr(os, name):
        delattr(os, name)
for name in ("SIGHUP", "SIGKILL", "SIGALRM", "setitimer", "alarm", "pthread_kill", "pthread_sigmask"):
    if hasattr(signal, name):
        delattr(signal, name)
sys.platform = "win32"
import pathlib
exists = pathlib.Path.exists
pathlib.Path.exists = lambda path, **options: not str(path).startswith("/proc") and exists(path, **options)
"""
RUN = WITHOUT + """
base, env, place = sys.argv[1:]
sys.path.insert(0, os.getcwd())
import episodes, grpo, sft, talk
episodes.HELD_OUT = 4
common = dict(model_path=base, env=env, eval_tasks=2, max_turns=2, max_new_tokens=16, max_samples=8)
steps = []
for more in (dict(max_steps=1), dict(max_steps=2, resume=True)):
    steps.append(grpo.train(grpo.Config(**common, **more, tasks_per_step=2, group_size=2, output_dir=f"{place}/grpo"))["steps"])
steps.append(sft.train(sft.Config(**common, max_steps=1, output_dir=f"{place}/sft"))["steps"])
talk.command(talk.Config(model_path=f"{place}/grpo", env=env, num_tasks=2, max_new_tokens=16, output=f"{place}/t.jsonl"))
print("##", steps)
"""


@pytest.mark.parametrize("layers", [True, False], ids=["with extras", "without"])
def test_a_run_needs_nothing_that_posix_alone_has(layers, schooled, python, tmp_path):
    copy_without("llm" if layers else "extras", tmp_path)
    done = python("-c", RUN, schooled, bandit.ENV, tmp_path / "runs", cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "## [1, 2, 1]", done.stderr[-3000:]
    timing = [json.loads(line) for line in (tmp_path / "runs" / "grpo" / "timing.jsonl").open()]
    assert len(timing) == 2 and timing[0]["peak_memory_mb"] is None  # nobody counts it there
    assert len((tmp_path / "runs" / "t.jsonl").read_text().splitlines()) == 2


LESSON = WITHOUT + """
import importlib, json, pathlib
lessons = pathlib.Path("lessons").resolve()
sys.path[:0] = [os.getcwd(), str(lessons)]
import picture, start
picture.FOLDER = start.FOLDER = pathlib.Path(sys.argv[1])
[memory] = [module for module in map(importlib.import_module, sorted(path.stem for path in lessons.glob("0*.py"))) if module.__name__ == "08_memory"]
memory.SHAPE.update(json.loads(sys.argv[2]))
memory.EPISODES, memory.TOKENS, memory.ROWS, memory.PROMPT, memory.NEW = 2, 16, 2, 5, 3
memory.main()
"""


def test_the_lessons_are_imported_without_it_and_that_of_memory_runs(python, tmp_path):
    done = python("-c", LESSON, tmp_path, json.dumps(SMALL_SHAPE), cwd=ROOT)
    assert done.returncode == 0 and "The system saw at most nan MB" in done.stdout, done.stderr[-2000:]
    rows = json.loads((tmp_path / "08_memory.json").read_text())["rows"]
    assert rows["all weights"]["peak"] > rows["(3) head"]["peak"] > 0


def test_every_module_is_imported_without_it(python):
    """Memory maps are there, and the name of the system: other packages ask for them."""
    modules = [*(path.stem for path in ROOT.glob("*.py")), *(
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for room in ("core", "envs", "extras") for path in (ROOT / room).rglob("*.py"))]
    left_out = {"extras.show.__main__", "envs.check", "envs.play",  # programs
                "extras.adapters.mcp_text", "extras.adapters.verifiers_text"}  # these import packages of others at once
    code = WITHOUT.replace('"mmap", ', "").replace('sys.platform = "win32"', "") + "import importlib, json\nfor name in json.loads(sys.argv[1]):\n    importlib.import_module(name)\nprint('all')"
    done = python("-c", code, json.dumps(sorted(set(modules) - left_out)), cwd=ROOT)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "all", done.stderr[-2000:]


def test_files_of_text_are_read_and_written_as_utf8():
    """The encoding of Windows is another one, and open() takes it where none is named."""
    def names_none(call):
        name, owner = getattr(call.func, "id", getattr(call.func, "attr", "")), getattr(getattr(call.func, "value", None), "id", "")
        if name not in ("open", "read_text", "write_text") or owner in ("os", "webbrowser") or name == "read_text" and not owner and isinstance(call.func, ast.Name):
            return False  # core.data.read_text knows its own
        if name == "open" and not call.args and not call.keywords:
            return False  # of a session
        words = [node.value for node in [*call.args, *(keyword.value for keyword in call.keywords)] if isinstance(node, ast.Constant)]
        return not any(word in ("utf-8", "utf-8-sig") or "b" in str(word)[:3] for word in words)
    for path in [*ROOT.glob("*.py"), *(path for room in ("core", "envs", "extras") for path in (ROOT / room).rglob("*.py"))]:
        calls = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Call)]
        assert not [f"{path}:{call.lineno}" for call in calls if names_none(call)]
