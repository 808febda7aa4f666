"""What is laid over core's Run changes no number: with each layer, with all and with none a run writes the same bytes."""
import ast
import json
import shutil
from pathlib import Path

import pytest
import torch
from test_resume import CASES, Killed, assert_equal, bytes_of, config, place, rewarded, toy  # noqa: F401  (place is a fixture)

import core.run
import extras.exact.run
import extras.ranks
import extras.show.run
import layers
import sft
from agent import rollout
from core.config import CHANGED, UserError, options
from core.data import to_json
from core.model import checkpoints
from extras.exact.checkpoint import read_state
from extras.show.metrics import meaning

CLASSES = {"exact": extras.exact.run.Run, "show": extras.show.run.Run, "ranks": extras.ranks.Run}
NAMES = ["sft, full", "grpo, LoRA", "dpo, plays", "reward_weighted, LoRA"]
TWO = [pytest.param(name, marks=[pytest.mark.slow] * (name in NAMES[::3])) for name in NAMES]  # that play; the others are slow tests
SHOWN = {"trained_parameters", "parameters", "reward_histogram", "reward_min", "reward_max"}  # what `show` adds to metrics.jsonl, beside tokens.jsonl


def run(name, place, folder, monkeypatch, kind, **changes):  # noqa: F811
    module, options = CASES[name]
    options = {**options, "max_steps": 3, "save_every": 3, **changes}
    with monkeypatch.context() as patch:
        patch.setattr(module, "Run", kind)
        if hasattr(module, "rollout"):
            patch.setattr(module, "rollout", lambda *args, **options: rewarded(rollout(*args, **options)))
        return module.train(config(module, place, folder, **options))


def cores(folder):
    """`bytes_of` a run without what `show` adds."""
    found = bytes_of(folder)
    found.pop("tokens.jsonl", None)
    rows = [json.loads(line) for line in found["metrics.jsonl"].splitlines()]
    return found | {"metrics.jsonl": "".join(to_json({k: v for k, v in row.items() if k not in SHOWN}) for row in rows).encode()}


def assert_cores(core_alone, layered):
    a, b = bytes_of(core_alone), cores(layered)
    assert a.keys() == b.keys() and len(a) >= 4 and [name for name in a if a[name] != b[name]] == []


@pytest.mark.parametrize("name", NAMES)
def test_a_run_with_all_layers_writes_the_bytes_of_cores(place, tmp_path, monkeypatch, name):  # noqa: F811
    """But for the checkpoints of evaluated steps, which `exact` keeps for the best one."""
    for folder, kind in (("core", core.run.Run), ("all", layers.Run)):
        run(name, place, tmp_path / folder, monkeypatch, kind)
        for path in checkpoints(tmp_path / folder)[:-1]:
            shutil.rmtree(path)
    assert_cores(tmp_path / "core", tmp_path / "all")
    rows = [json.loads(line) for log in ("metrics.jsonl", "timing.jsonl") for line in (tmp_path / "all" / log).read_text().splitlines()]
    result = json.loads((tmp_path / "all" / "result.json").read_text())
    names = set(result).union(*rows, result["before"], result["after"])
    assert len(names) > 10 and [name for name in names if not meaning(name)] == []  # extras/show/metrics.py explains them


@pytest.mark.parametrize("layer", CLASSES)
def test_each_layer_alone_writes_them_too(place, tmp_path, monkeypatch, layer):  # noqa: F811
    for folder, kind in (("core", core.run.Run), (layer, CLASSES[layer])):
        run("sft, full", place, tmp_path / folder, monkeypatch, kind)
    assert_cores(tmp_path / "core", tmp_path / layer)


@pytest.mark.parametrize("name", TWO)
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
    again = run(name, place, tmp_path / "killed", monkeypatch, core.run.Run, save_every=1, resume=True)
    assert {**again, "seconds": 0, "peak_memory_mb": 0} == {**result, "seconds": 0, "peak_memory_mb": 0}  # evaluated once more


def test_a_run_that_was_sealed_continues_without_the_seals(place, tmp_path, monkeypatch):  # noqa: F811
    run("sft, full", place, tmp_path / "whole", monkeypatch, core.run.Run)
    run("sft, full", place, tmp_path / "run", monkeypatch, layers.Run, max_steps=2)
    run("sft, full", place, tmp_path / "run", monkeypatch, core.run.Run, resume=True)
    a, b = bytes_of(tmp_path / "whole"), cores(tmp_path / "run")
    assert len(a["metrics.jsonl"].splitlines()) == len(b["metrics.jsonl"].splitlines()) == 3
    assert a["metrics.jsonl"].splitlines()[0] == b["metrics.jsonl"].splitlines()[0]  # the schedules differ


def test_cores_run_refuses_a_folder_and_renames_what_it_overwrites(place, tmp_path, monkeypatch, capsys):  # noqa: F811
    monkeypatch.setattr(sft, "Run", core.run.Run)
    sft.train(toy(place, tmp_path / "run"))
    with pytest.raises(UserError, match="run: already holds a sft run; --resume continues it, --overwrite renames it"):
        sft.train(toy(place, tmp_path / "run"))
    sft.train(toy(place, tmp_path / "run", overwrite=True))
    assert (tmp_path / "run.1" / "result.json").exists() and f"is now {tmp_path}/run.1" in capsys.readouterr().out


def test_the_help_of_save_every_says_what_the_layer_does(monkeypatch):
    """Core keeps the last two. Which one is the best only `exact` knows."""
    assert "the last two and the best stay" in options(sft.Config)["save_every"].help
    monkeypatch.delitem(CHANGED, "save_every")
    assert "the last two stay" in options(sft.Config)["save_every"].help


def test_several_processes_need_their_layer(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="torchrun needs extras/ranks"):
        core.run.Run(sft.Config(output_dir=str(tmp_path)), "sft")


def test_core_run_imports_nothing_above_core():
    tree = ast.parse(Path(core.run.__file__).read_text())
    names = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name for name in names if name.split(".")[0] in ("extras", "envs", "lora", "agent", "layers")} == set()


@pytest.mark.parametrize("name", TWO)
def test_what_core_alone_has_saved_is_continued_with_the_layers(place, tmp_path, monkeypatch, capsys, name):  # noqa: F811
    """Core writes no seal. There is nothing to verify, and nothing that refuses it."""
    for folder, kind in (("core", core.run.Run), ("both", layers.Run)):
        run(name, place, tmp_path / folder, monkeypatch, core.run.Run, max_steps=2)
        run(name, place, tmp_path / folder, monkeypatch, kind, resume=True)
        for path in checkpoints(tmp_path / folder)[:-1]:
            shutil.rmtree(path)
    assert_cores(tmp_path / "core", tmp_path / "both")
    said = [line for line in capsys.readouterr().out.splitlines() if "continues after" in line]
    assert said == [f"{tmp_path}/both: continues after step 2; its checkpoint is not verified, as it was written without extras/exact"]
    state = read_state(checkpoints(tmp_path / "both")[-1])
    assert state["step"] == 3 and state["made_of"] and state["files"]


def test_a_seal_of_which_a_part_is_missing_is_not_cores(tmp_path):
    whole = {"step": 1, "seconds": 2.0, "before": {}, "planned": 3}
    for state in (whole, {**whole, "groups": [{}]}):
        (tmp_path / "state.json").write_text(json.dumps(state))
        assert read_state(tmp_path) == state
    for state in ({**whole, "checksum": "0"}, {**whole, "files": {}}, {**whole, "made_of": {}}, {"step": 1, "planned": 2}):
        (tmp_path / "state.json").write_text(json.dumps(state))
        with pytest.raises(UserError, match="state.json: damaged .its checksum differs"):
            read_state(tmp_path)


class Counting(torch.optim.SGD):
    """As Prodigy and the schedule-free optimizers do, it keeps numbers in its group: its steps, and the rate that grows with them."""

    def __init__(self, weights, lr):
        super().__init__(weights, lr)
        self.defaults |= {"d": 1e-3, "k": 0, "train_mode": False}
        for group in self.param_groups:
            group.update(d=1e-3, k=0, train_mode=False)

    def step(self, closure=None):
        for group in self.param_groups:
            group.update(d=group["d"] * 1.7, k=group["k"] + 1, train_mode=True)
            for p in group["params"]:
                p.data.add_(p.grad, alpha=-group["lr"] * group["d"])


@pytest.mark.parametrize("kind", [core.run.Run, layers.Run])
def test_numbers_that_an_optimizer_keeps_in_its_groups_are_resumed(place, tmp_path, monkeypatch, kind):  # noqa: F811
    """They were lost without a word: a resumed run began with the first `d` again."""
    made = []
    monkeypatch.setattr(sft, "adamw", lambda model, lr, **_: made.append(
        Counting([p for p in model.parameters() if p.requires_grad], lr)) or made[-1])
    run("sft, full", place, tmp_path / "whole", monkeypatch, kind, save_every=1)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        append, lines = core.run.Run.append, []

        def killed(self, log, rows):
            if log == "metrics.jsonl" and lines.append(1) is None and len(lines) == 3:
                raise Killed
            append(self, log, rows)
        patch.setattr(core.run.Run, "append", killed)
        patch.setattr(kind, "__exit__", lambda *_: None)
        run("sft, full", place, tmp_path / "run", monkeypatch, kind, save_every=1)
    run("sft, full", place, tmp_path / "run", monkeypatch, kind, save_every=1, resume=True)
    assert_equal(tmp_path / "whole", tmp_path / "run")
    groups = [read_state(tmp_path / name / "checkpoints" / "step_000003")["groups"] for name in ("whole", "run")]
    assert groups[0] == groups[1] == [{"d": 1e-3 * 1.7 * 1.7 * 1.7, "k": 3, "train_mode": True}]
    assert [optimizer.param_groups[0]["k"] for optimizer in made] == [3, 3, 3]


def test_adamw_keeps_no_numbers_in_its_groups():
    """Not its rate either, which the loop sets, nor what a group was made with and still has."""
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = torch.optim.AdamW([{"params": weights[:1]}, {"params": weights[1:], "lr": 0.5}], lr=0.1, weight_decay=0.2)
    for group in optimizer.param_groups:
        group["initial_lr"], group["lr"] = group["lr"], group["lr"] / 2
    assert core.run.group_numbers(optimizer) == [{}, {}]


def test_a_checkpoint_without_numbers_of_groups_is_continued(place, tmp_path, monkeypatch):  # noqa: F811
    """Those of earlier versions."""
    run("sft, full", place, tmp_path / "run", monkeypatch, core.run.Run, max_steps=2)
    path = checkpoints(tmp_path / "run")[-1] / "state.json"
    state = json.loads(path.read_text())
    assert state.pop("groups") == [{}]
    path.write_text(json.dumps(state))
    assert run("sft, full", place, tmp_path / "run", monkeypatch, core.run.Run, resume=True)["steps"] == 3


@pytest.mark.parametrize("fails", [False, True])
def test_every_listener_hears_of_a_step_with_its_timing_also_after_resuming(place, tmp_path, monkeypatch, fails):  # noqa: F811
    """One whose call ends the run has the lines of the step written before, and the step is saved."""
    heard = []

    class Listened(layers.Run):
        def load(self, *args):
            self.listeners.append(self.hear)
            return super().load(*args)

        def hear(self, step, metrics, timing):
            if step == 1 and fails and not self.config.resume:
                raise RuntimeError("the server is gone")
            heard.append((step, metrics["loss"] > 0, timing["seconds"] > 0, timing["update_seconds"] > 0))
    if fails:
        with pytest.raises(RuntimeError, match="the server is gone"):
            run("sft, full", place, tmp_path / "run", monkeypatch, Listened, save_every=3)
        assert [path.name for path in checkpoints(tmp_path / "run")] == ["step_000002"]
        run("sft, full", place, tmp_path / "run", monkeypatch, Listened, save_every=3, resume=True)
    else:
        run("sft, full", place, tmp_path / "run", monkeypatch, Listened, save_every=3)
    assert heard == [(step, True, True, True) for step in ((0, 2) if fails else (0, 1, 2))]
    for name in ("metrics.jsonl", "timing.jsonl"):
        rows = [json.loads(line) for line in (tmp_path / "run" / name).read_text().splitlines()]
        assert [row["step"] for row in rows] == [0, 1, 2]
