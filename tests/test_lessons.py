"""lessons/: each stands alone on core, runs with and without extras/, and 02_grpo.py trains what grpo.py trains."""
import ast
import json
import os
import shutil
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import bandit
import pytest
from safetensors.torch import load_file

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "lessons"
LESSONS = sorted(FOLDER.glob("[0-9]*.py"))
SHARED = {"picture", "start"}
ALGORITHMS = {"dpo", "grpo", "reward_weighted", "sft"}
# What makes a lesson small; a lesson has some of these names.
TOY = {"ENV": bandit.ENV, "TASKS": 2, "GROUP": 2, "HELD_OUT": 2, "NOISE_TASKS": 2, "UPDATES": 2}


def lesson(path, **constants):
    """Load a lesson as a module, with some of its constants changed."""
    spec = spec_from_file_location(f"lesson_{path.stem}", path)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, value in constants.items():
        if hasattr(module, name):
            setattr(module, name, value)
    return module


@pytest.fixture
def toy(monkeypatch, tmp_path, schooled):
    """Run a lesson at toy size, from a model that knows the format of the bandit. Return its output folder."""
    monkeypatch.syspath_prepend(FOLDER)
    import picture
    import start
    monkeypatch.setattr(picture, "FOLDER", tmp_path)
    monkeypatch.setattr(start, "FOLDER", tmp_path)
    monkeypatch.setattr(start, "start_model", lambda: schooled)

    def run(path, **options):
        lesson(path, **TOY).main(**options)
        return tmp_path
    return run


# ------------------------------------------------------------------------------------------ the file
@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_a_lesson_fits_on_a_wall(path):
    lines = path.read_text().splitlines()
    assert 100 <= len(lines) <= 200
    assert max(map(len, lines)) <= 100


def test_what_lessons_share_is_short():
    assert sum(len((FOLDER / f"{name}.py").read_text().splitlines()) for name in SHARED) < 100


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_a_lesson_stands_on_core_alone(path):
    """It imports no layer, no algorithm, no other lesson, and has no class."""
    tree = ast.parse(path.read_text())
    names = set()
    for node in ast.walk(tree):
        assert not isinstance(node, ast.ClassDef)
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            names.add(node.module.partition(".")[0])
    assert not names & ({"extras", "layers", "llm", "bench", "schooling"} | ALGORITHMS)


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_a_lesson_has_its_page_and_picture(path):
    page = ROOT / "docs" / "lessons" / f"{path.stem}.md"
    text = page.read_text()
    lines = text.splitlines()
    assert len(lines) <= 80 and max(map(len, lines)) <= 130
    assert f"python lessons/{path.stem}.py" in text and f"]({path.stem}.svg)" in text
    assert page.with_suffix(".svg").stat().st_size < 150_000
    assert [line for line in lines if line.startswith("## ")][:3] == ["## Predict", "## Run", "## Explain"]


# ------------------------------------------------------------------------------------------- the runs
@pytest.mark.parametrize("name", ["01_reinforce", "02_grpo", "03_clipping_and_staleness", "04_kl"])
def test_a_lesson_runs_at_toy_size(name, toy, capsys):
    folder = toy(FOLDER / f"{name}.py", steps=1, seed=1)
    shown = capsys.readouterr().out.splitlines()
    result = json.loads(shown[-1])
    assert result["command"] == f"python lessons/{name}.py --seed 1" and result["steps"] == 1
    assert max(map(len, shown[:-2])) <= 80  # then come the picture's place and the JSON
    assert (folder / f"{name}.svg").read_text().startswith("<?xml")


def test_the_estimators_of_lesson_4_are_what_it_says(monkeypatch):
    """Exactly, of any two policies: k1 and k3 are unbiased as numbers, k2 and k3_ratio as gradients."""
    import torch
    monkeypatch.syspath_prepend(FOLDER)
    compare = lesson(FOLDER / "04_kl.py").compare
    logits = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logp, ref_logp = logits.log_softmax(-1)
    kl, table = compare(logp, ref_logp)
    assert kl == pytest.approx((logp.exp() * (logp - ref_logp)).sum(1).mean().item())
    assert [name for name, row in table.items() if abs(row["bias"]) < 1e-9] == ["k1", "k3", "k3_ratio"]
    assert [name for name, row in table.items() if abs(row["cosine"] - 1) + abs(row["size"] - 1) < 1e-9] == ["k2", "k3_ratio"]
    assert table["k1"]["size"] < 1e-9
    # By autograd: the mean over y of pi(y) times the gradient of each estimator at y.
    z = logits[0].clone().requires_grad_()
    new = z.log_softmax(-1)
    x = new - ref_logp
    k3 = (-x).exp() - 1 + x
    losses = {"kl": (new.exp() * x).sum(1), "k2": x**2 / 2, "k3": k3, "k3_ratio": k3 * (new - new.detach()).exp()}
    gradients = {}
    for name, value in losses.items():
        total = value.sum() if name == "kl" else (new.detach().exp() * value).sum()
        gradients[name], = torch.autograd.grad(total, z, retain_graph=True)
    for name in ("k2", "k3", "k3_ratio"):
        assert table[name]["size"] == pytest.approx((gradients[name].norm() / gradients["kl"].norm()).item())


SAME = """
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
base, env, out = sys.argv[1:]
sys.path.insert(0, "lessons")
import start, grpo
for path in sorted(Path("lessons").glob("[0-9]*.py")):  # all of them can be loaded
    spec = spec_from_file_location(path.stem, path)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    if path.stem == "02_grpo":
        lesson = module
assert not any(name.partition(".")[0] == "extras" for name in sys.modules)
grpo.train(grpo.Config(model_path=base, env=env, kl_coef=0.0, tasks_per_step=5, group_size=4, max_steps=2, eval_tasks=0, output_dir=f"{out}/whole"))
lesson.start_model, lesson.FOLDER, lesson.draw = lambda: base, Path(out), print
lesson.ENV, lesson.TASKS, lesson.GROUP, lesson.HELD_OUT = env, 5, 4, 1
lesson.main(steps=2)
"""


def test_lesson_2_trains_the_adapter_of_grpo_bit_for_bit(schooled, tmp_path):
    """In a tree without extras/: five groups of four, so that an update has two micro-batches."""
    tree = tmp_path / "tree"
    tree.mkdir()
    for path in ROOT.glob("*.py"):
        shutil.copy(path, tree)
    for name in ("core", "envs", "lessons", "llm"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", SAME, schooled, bandit.ENV, str(tmp_path)], cwd=tree, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    name = "adapter_model.safetensors"
    whole = tmp_path / "whole" / "checkpoints" / "step_000002" / name
    assert (tmp_path / "02_grpo" / name).read_bytes() == whole.read_bytes()
    assert any(tensor.any() for key, tensor in load_file(whole).items() if "lora_B" in key)
