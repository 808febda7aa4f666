"""What is laid over core's Run changes no number: with each layer, with all and with none a run writes the same bytes."""
import ast
import shutil
from pathlib import Path

import pytest
from test_resume import CASES, Killed, assert_equal, bytes_of, config, place, rewarded, toy  # noqa: F401  (place is a fixture)

import core.run
import extras.exact.run
import extras.ranks
import extras.show.run
import layers
import sft
from agent import rollout
from core.config import UserError
from core.model import checkpoints

CLASSES = {"exact": extras.exact.run.Run, "show": extras.show.run.Run, "ranks": extras.ranks.Run}
NAMES = ["sft, full", "grpo, LoRA", "dpo, plays", "reward_weighted, LoRA"]


def run(name, place, folder, monkeypatch, kind, **changes):  # noqa: F811
    module, options = CASES[name]
    options = {**options, "max_steps": 3, "save_every": 3, **changes}
    with monkeypatch.context() as patch:
        patch.setattr(module, "Run", kind)
        if hasattr(module, "rollout"):
            patch.setattr(module, "rollout", lambda *args, **options: rewarded(rollout(*args, **options)))
        return module.train(config(module, place, folder, **options))


@pytest.mark.parametrize("name", NAMES)
def test_a_run_with_all_layers_writes_the_bytes_of_cores(place, tmp_path, monkeypatch, name):  # noqa: F811
    """But for the checkpoints of evaluated steps, which `exact` keeps for the best one."""
    for folder, kind in (("core", core.run.Run), ("all", layers.Run)):
        run(name, place, tmp_path / folder, monkeypatch, kind)
        for path in checkpoints(tmp_path / folder)[:-1]:
            shutil.rmtree(path)
    assert_equal(tmp_path / "core", tmp_path / "all")


@pytest.mark.parametrize("layer", CLASSES)
def test_each_layer_alone_writes_them_too(place, tmp_path, monkeypatch, layer):  # noqa: F811
    for folder, kind in (("core", core.run.Run), (layer, CLASSES[layer])):
        run("sft, full", place, tmp_path / folder, monkeypatch, kind)
    assert_equal(tmp_path / "core", tmp_path / layer)


@pytest.mark.parametrize("name", NAMES)
def test_cores_run_is_resumed_from_its_last_checkpoint(place, tmp_path, monkeypatch, name):  # noqa: F811
    """Killed in its third step, it loses that one: there is no seal, and no line of it is left."""
    module, _ = CASES[name]
    run(name, place, tmp_path / "whole", monkeypatch, core.run.Run, save_every=1)
    lines, append = [], core.run.Run.append

    def killed(self, log, rows):
        append(self, log, rows)
        if log == "metrics.jsonl" and lines.append(1) is None and len(lines) == 3:
            raise Killed
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(core.run.Run, "append", killed)
        run(name, place, tmp_path / "killed", monkeypatch, core.run.Run, save_every=1)
    with open(tmp_path / "killed" / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "lo')
    assert [path.name for path in checkpoints(tmp_path / "killed")] == ["step_000001", "step_000002"]
    result = run(name, place, tmp_path / "killed", monkeypatch, core.run.Run, save_every=1, resume=True)
    assert_equal(tmp_path / "whole", tmp_path / "killed")
    assert run(name, place, tmp_path / "killed", monkeypatch, core.run.Run, save_every=1, resume=True) == result


def test_a_run_that_was_sealed_continues_without_the_seals(place, tmp_path, monkeypatch):  # noqa: F811
    run("sft, full", place, tmp_path / "whole", monkeypatch, core.run.Run)
    run("sft, full", place, tmp_path / "run", monkeypatch, layers.Run, max_steps=2)
    run("sft, full", place, tmp_path / "run", monkeypatch, core.run.Run, resume=True)
    a, b = bytes_of(tmp_path / "whole"), bytes_of(tmp_path / "run")
    assert len(a["metrics.jsonl"].splitlines()) == len(b["metrics.jsonl"].splitlines()) == 3
    assert a["metrics.jsonl"].splitlines()[0] == b["metrics.jsonl"].splitlines()[0]  # the schedules differ


def test_cores_run_refuses_a_folder_and_renames_what_it_overwrites(place, tmp_path, monkeypatch, capsys):  # noqa: F811
    monkeypatch.setattr(sft, "Run", core.run.Run)
    sft.train(toy(place, tmp_path / "run"))
    with pytest.raises(UserError, match="run: already holds a sft run; --resume continues it, --overwrite renames it"):
        sft.train(toy(place, tmp_path / "run"))
    sft.train(toy(place, tmp_path / "run", overwrite=True))
    assert (tmp_path / "run.1" / "result.json").exists() and f"is now {tmp_path}/run.1" in capsys.readouterr().out


def test_several_processes_need_their_layer(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="torchrun needs extras/ranks"):
        core.run.Run(sft.Config(output_dir=str(tmp_path)), "sft")


def test_core_run_imports_nothing_above_core():
    tree = ast.parse(Path(core.run.__file__).read_text())
    names = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name for name in names if name.split(".")[0] in ("extras", "envs", "lora", "agent", "layers")} == set()


def test_a_model_that_core_alone_has_saved_is_loaded_with_the_layers(tmp_path):
    """Core writes no checksum. There is nothing to verify, and nothing that refuses it."""
    from extras.exact.checkpoint import is_sealed
    (tmp_path / "state.json").write_text('{"step": 1, "planned": 2}')
    assert not is_sealed(tmp_path) and not is_sealed(tmp_path / "nowhere")
    (tmp_path / "state.json").write_text('{"step": 1, "planned": 2, "checksum": "0"}')
    assert is_sealed(tmp_path)
