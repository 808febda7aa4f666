"""bench/forks: every patch applies to a copy of the repository, and the fork runs, saves and is resumed."""
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import bandit
import pytest
from safetensors.torch import load_file

ROOT = Path(__file__).parent.parent
PATCHES = sorted((ROOT / "bench" / "forks").glob("*.patch"))
CODE = ("*.py", "core", "envs", "extras", "llm")


@pytest.fixture
def base(schooled):
    return schooled


def fork(patch, folder):
    """A copy of the code with the patch applied."""
    for pattern in CODE:
        for path in ROOT.glob(pattern):
            copy = shutil.copytree if path.is_dir() else shutil.copy
            copy(path, folder / path.name)
    subprocess.run(["git", "apply", str(patch)], cwd=folder, check=True)
    return folder


def run(folder, base, output, steps, *words):
    """Run the fork's grpo.py as a user would. Returns the lines of its log."""
    done = subprocess.run(
        [sys.executable, "grpo.py", "--model_path", base, "--env", bandit.ENV, "--tasks_per_step", "3", "--group_size", "4", "--eval_tasks", "2",
         "--max_steps", str(steps), "--output_dir", output, *words], cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT / "tests")}, capture_output=True,
        text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def test_there_are_three_forks():
    assert {p.stem for p in PATCHES} == {"advantage", "clip_cov", "value_head"}


@pytest.mark.parametrize("patch", PATCHES, ids=lambda p: p.stem)
def test_every_patch_applies(patch, tmp_path):
    """The runs of the forks are slow tests: a page that moved under one of them is seen here."""
    fork(patch, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("patch", PATCHES, ids=lambda p: p.stem)
def test_a_fork_applies_runs_and_is_resumed(patch, base, tmp_path):
    (tmp_path / "fork").mkdir()
    folder = fork(patch, tmp_path / "fork")
    words = {"advantage": ["--credit", "best"], "clip_cov": ["--clip_cov", "0.1"]}.get(patch.stem, [])
    words += ["--learning_rate", "1e-3", "--save_every", "1"]
    lines = run(folder, base, tmp_path / "out", 2, *words)
    assert len(lines) == 2 and all(line["grad_norm"] is not None for line in lines)
    checkpoint = tmp_path / "out" / "checkpoints" / "step_000002"
    if patch.stem == "value_head":
        head = load_file(checkpoint / "added.safetensors")
        # The policy's gradient is clipped apart from the critic's, and its advantages have the standard deviation 1.
        assert all(0 < line["grad_norm"] < 0.5 * line["value_loss"] and line["advantage_abs"] <= 1 for line in lines)
        assert lines[0]["explained_variance"] == pytest.approx(0, abs=1e-6)
        assert lines[-1]["value_loss"] > 0 and head["value_head.weight"].any() and head["value_head.weight"].shape[0] == 1
    longer = run(folder, base, tmp_path / "out", 3, *words, "--resume")
    assert longer[:2] == lines and len(longer) == 3
