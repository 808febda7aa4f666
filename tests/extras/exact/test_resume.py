"""--resume: a run killed in every step and gone on with is, bit for bit, the run that was never stopped."""
import json
import random
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import programs
import pytest
import torch
from programs import Program
from safetensors.torch import load_file
from saving import newest_checkpoint, save

import schooling
import core.run
import distill
import dpo
import envs
import grpo
import reward_weighted
import sft
from agent import Limits, rollout
from envs.tasks import load_tasks
from episodes import read_trajectories
from schooling import demonstrate
from core import run
from extras.exact.checkpoint import _checksum, read_state
from core.model import base_of, checkpoints
from layers import Run
from core.config import UserError
from extras.hints.command_line import parse
from core.data import to_json
from extras.exact.resuming import _sequences
from layers import load_model
from merge import merge
from core.model import save_model, scheduled
from core.tiny import make_tiny

ROOT = Path(run.__file__).parent.parent


@pytest.fixture(scope="module")
def place(probed_once, tmp_path_factory):
    """The tiny model with the weights it was born with, an adapter on it, and recorded episodes."""
    folder = tmp_path_factory.mktemp("place")
    model, tokenizer = make_tiny()
    model.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    model, tokenizer = load_model(str(folder / "base"), lora_r=2)
    for name, p in model.named_parameters():
        if name.endswith("lora.B"):
            torch.nn.init.normal_(p, std=0.05)
    save_model(model, folder / "adapter")
    noisy = [{**task, "noise": 0.7, "noise_seed": seed} for task in load_tasks("equations", "train", 6, 0) for seed in range(3)]
    episodes = demonstrate(tokenizer, "equations", noisy, Limits(max_turns=2))
    for i, t in enumerate(episodes):
        t.group_id = str(i // 3)
        del t.info["task"]["noise_seed"]
    (folder / "episodes.jsonl").write_text("".join(json.dumps(t.to_json()) + "\n" for t in rewarded(episodes)))
    return folder


def rewarded(episodes):
    """Such a model earns nothing: here it is paid by what its tokens happen to be."""
    for i, t in enumerate(episodes):
        t.rewards = [(sum(t.token_ids) + j) % 4 / 2 for j in range(len(t.rewards))]
        t.reward = sum(t.rewards)
    return episodes


def config(module, place, out, **options):
    common = dict(model_path=str(place / "base"), env="equations", output_dir=str(out), save_every=1,
                  learning_rate=1e-3, eval_tasks=0 if module is sft else 2)
    if module is not sft:
        common |= dict(group_size=3, max_tokens=200, max_new_tokens=6, max_samples=200)
    return module.Config(**{**common, **options})


class Killed(BaseException):
    pass


def train(module, config, monkeypatch, steps=None, log="metrics.jsonl"):
    """The result; with `steps`, the run is killed while it writes the line after so many, and is left as a kill leaves it."""
    lines = 0

    def append(self, name, rows):
        nonlocal lines
        if name == log and Path(config.output_dir) == self.folder:
            if lines == steps:
                with open(self.folder / name, "a") as file:
                    file.write('{"step": 1, "lo')
                raise Killed
            lines += 1
        return whole(self, name, rows)
    whole = core.run.Run.append
    with monkeypatch.context() as patch:
        patch.setattr(core.run.Run, "append", append)
        patch.setattr(Run, "__exit__", lambda *_: None)  # a kill saves nothing
        return module.train(config)


def bytes_of(folder):
    """Everything that may not differ: lines, weights and optimizers of all checkpoints, the result but its seconds."""
    found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.safetensors")}
    found |= {name: (folder / name).read_bytes() for name in ("metrics.jsonl", "trajectories.jsonl", "tokens.jsonl")
              if (folder / name).exists()}
    result = json.loads((folder / "result.json").read_text())
    return found | {"result": {k: v for k, v in result.items() if k not in ("seconds", "peak_memory_mb")}}


def assert_equal(a, b):
    a, b = bytes_of(a), bytes_of(b)
    assert a.keys() == b.keys() and len(a) >= 4
    assert [name for name in a if a[name] != b[name]] == []


CASES = {
    "sft, full": (sft, dict(lora_r=0, max_steps=4, max_samples=20, batch_size=2, gradient_accumulation_steps=2)),
    "sft, tiny, LoRA": (sft, dict(model_path="tiny", lora_r=2, lora_dropout=0.2, max_steps=4, max_samples=20,
                                  batch_size=4, eval_tasks=0)),
    "grpo, LoRA": (grpo, dict(lora_r=2, lora_dropout=0.2, kl_coef=0.1, max_steps=4, tasks_per_step=2, batch_size=4,
                              eval_every=2, updates_per_step=2)),
    "grpo, full": (grpo, dict(lora_r=0, kl_coef=0.1, max_steps=4, tasks_per_step=2, learning_rate=1e-4)),
    "grpo, from an adapter": (grpo, dict(model_path="adapter", kl_coef=0.1, max_steps=4, tasks_per_step=2)),
    "distill, LoRA": (distill, dict(lora_r=2, lora_dropout=0.2, teacher="adapter", max_steps=4, tasks_per_step=3, batch_size=4, eval_every=2,
                                    updates_per_step=2)),
    "dpo, plays": (dpo, dict(lora_r=2, lora_dropout=0.2, num_tasks=6, max_steps=4, batch_size=4, eval_every=3)),
    "dpo, full": (dpo, dict(lora_r=0, trajectories="episodes.jsonl", max_steps=4, batch_size=4, learning_rate=1e-4)),
    "reward_weighted, LoRA": (reward_weighted, dict(
        lora_r=2, lora_dropout=0.2, max_steps=4, tasks_per_step=4, batch_size=4, num_epochs=1,
        gradient_accumulation_steps=2, reward_bias=0.5, reward_scaling=3.0)),
    "sft, AdamW on the host": (sft, dict(lora_r=2, lora_dropout=0.2, memory="small", max_steps=4,
                                         max_samples=20, batch_size=4)),
    "reward_weighted, full": (reward_weighted, dict(
        lora_r=0, trajectories="episodes.jsonl", max_steps=4, batch_size=4, learning_rate=1e-4)),
}


SLOW = ("sft, full", "dpo, full", "reward_weighted, LoRA", "sft, AdamW on the host", "sft, tiny, LoRA", "grpo, full", "reward_weighted, full")  # what they show, others of them show nearly


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CASES])
def test_killed_in_every_step_and_resumed_is_never_having_stopped(place, tmp_path, monkeypatch, name):
    module, options = CASES[name]
    if hasattr(module, "rollout"):
        monkeypatch.setattr(module, "rollout", lambda *args, **options: rewarded(rollout(*args, **options)))
    options = {k: str(place / v) if v in ("adapter", "episodes.jsonl") else v for k, v in options.items()} | {"max_steps": 3}
    module.train(config(module, place, tmp_path / "whole", **options))
    again = config(module, place, tmp_path / "killed", **options)
    with pytest.raises(Killed):
        train(module, again, monkeypatch, 1)
    with pytest.raises(UserError, match="holds a .* run; --resume continues it"):
        module.train(again)
    again.resume = True
    (tmp_path / "killed" / "checkpoints" / ".tmp-step").mkdir()
    with pytest.raises(Killed):
        train(module, again, monkeypatch, 1)
    module.train(again)
    assert_equal(tmp_path / "whole", tmp_path / "killed")
    assert not list((tmp_path / "killed").rglob(".tmp*"))
    names = [path.name for path in checkpoints(tmp_path / "killed")]
    assert names[-2:] == ["step_000002", "step_000003"] and len(names) <= 3


def test_killed_before_the_first_checkpoint_it_begins_again_on_the_same_base(place, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(grpo, "rollout", lambda *args, **options: rewarded(rollout(*args, **options)))
    monkeypatch.setattr(schooling, "TINY_SFT", {**schooling.TINY_SFT, "max_samples": 16, "max_steps": 2})
    options = dict(model_path="tiny", env="equations", lora_r=2, tasks_per_step=2, max_steps=2)
    grpo.train(config(grpo, place, tmp_path / "whole", **options))
    again = config(grpo, place, tmp_path / "killed", **options)
    with monkeypatch.context() as patch:
        patch.setattr(schooling, "scheduled", lambda *_: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            grpo.train(again)  # in the midst of making the base
    again.resume = True
    with pytest.raises(Killed):
        train(grpo, again, monkeypatch, 0)
    before = (tmp_path / "killed" / "base" / "model.safetensors").stat().st_mtime_ns
    result = grpo.train(again)
    assert (tmp_path / "killed" / "base" / "model.safetensors").stat().st_mtime_ns == before  # not made again
    assert_equal(tmp_path / "whole", tmp_path / "killed")
    out = capfd.readouterr().out
    assert re.findall("no step is saved, begins again(.*)", out) == ["", " from the taught model in base/"]
    assert grpo.train(again) == result and "finished after 2 steps" in capfd.readouterr().out


def test_every_checkpoint_of_a_model_made_here_carries_its_base(place, tmp_path):
    """Random weights that nobody else has: whichever checkpoint is kept, or copied elsewhere, can be loaded."""
    sft.train(config(sft, place, tmp_path / "run", model_path="tiny", lora_r=2, max_steps=3, max_samples=8, batch_size=4))
    for path in checkpoints(tmp_path / "run"):
        path.rename(tmp_path / path.name)
        assert (tmp_path / path.name / "base" / "model.safetensors").exists()
        load_model(str(tmp_path / path.name), train=False)


@pytest.mark.slow
def test_odd_surroundings(place, tmp_path):
    """Private files, few open ones, no folder for temporary ones, and a terminal that knows ASCII alone."""
    odd = "umask 077; ulimit -n 64; export TMPDIR=/nowhere LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 PYTHONIOENCODING=ascii"
    words = f"--model_path {place}/base --env equations --max_samples 8 --max_steps 1 --eval_tasks 2 --output_dir {tmp_path}/r"
    done = subprocess.run(["sh", "-c", f"{odd}; {sys.executable} {ROOT}/sft.py {words}"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and read_state(newest_checkpoint(tmp_path / "r"))["step"] == 1, done.stderr[-2000:]


# ------------------------------------------------------------------------------------------------------- the notebook
def toy(place, out, **options):
    return config(sft, place, out, max_samples=8, max_steps=3, batch_size=4, eval_tasks=0, **options)


@pytest.fixture(scope="module")
def stopped(place, tmp_path_factory):
    """-> a fresh copy of a run of 3 steps, killed in its third."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        train(sft, toy(place, folder), patch, 2)
    def copy(target):
        import shutil
        shutil.copytree(folder, target)
        return toy(place, target, resume=True)
    return copy


@pytest.mark.parametrize("change, words", [
    ({"learning_rate": 0.5}, "but --learning_rate is 0.5 and was 0.001; continue with: python"),
    ({"max_steps": 2}, "--max_steps is 2 and was 3"),
    ({"seed": 1, "batch_size": 2}, "--batch_size is 2 and was 4, --seed is 1 and was 0")])
def test_another_config_is_refused_by_name_and_changes_nothing(stopped, tmp_path, change, words):
    again = stopped(tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file() and path.name != ".lock"}
    for name, value in change.items():
        setattr(again, name, value)
    with pytest.raises(UserError, match=re.escape(words)):
        sft.train(again)
    assert all(path.read_bytes() == data for path, data in before.items())


def test_no_command_to_continue_with_names_another_environment_than_the_run_had(place, tmp_path, monkeypatch):
    """The one of the refused call was refused again, in the same words."""
    first, other = tmp_path / "first.py", tmp_path / "other.py"
    for path in (first, other):
        path.write_text("from envs.equations import Equations\n")
    again = toy(place, tmp_path / "run", env=f"{first}:Equations", resume=True)
    with pytest.raises(Killed):
        train(sft, again, monkeypatch, 2)
    for env in (f"{other}:Equations", "equations"):
        with pytest.raises(UserError, match=f"but --env is {env} and was {first}:Equations$"):
            sft.train(replace(again, env=env))


def test_max_steps_may_grow_also_after_the_end(stopped, tmp_path):
    again = stopped(tmp_path / "run")
    again.save_every = 2
    sft.train(again)
    again.max_steps = 5
    assert sft.train(again)["steps"] == 5
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(5)) and "max_steps: 5" in (tmp_path / "run" / "config.yaml").read_text()


def test_a_run_of_the_default_length_may_grow_and_keeps_its_length(place, tmp_path):
    again = replace(toy(place, tmp_path / "run"), max_steps=None, num_epochs=1)  # 2 steps
    whole = sft.train(again)
    assert whole["steps"] == 2 and "max_steps: 2" in (tmp_path / "run" / "config.yaml").read_text()
    again.resume = True
    assert sft.train(again) == whole
    assert sft.train(replace(again, max_steps=4))["steps"] == 4
    assert sft.train(again)["steps"] == 4  # the length is the run's where nothing is said


def test_another_algorithms_run_is_refused(place, stopped, tmp_path):
    stopped(tmp_path / "run")
    with pytest.raises(UserError, match="holds a sft run, not one of grpo"):
        grpo.train(config(grpo, place, tmp_path / "run", resume=True))


def test_changed_data_are_refused(place, tmp_path, monkeypatch):
    data = tmp_path / "t.jsonl"
    data.write_bytes((place / "episodes.jsonl").read_bytes())
    again = toy(place, tmp_path / "run", trajectories=str(data))
    with pytest.raises(Killed):
        train(sft, again, monkeypatch, 2)
    data.write_bytes(data.read_bytes()[:-1])
    again.resume = True
    with pytest.raises(UserError, match=r"t\.jsonl: is not the file this run began with"):
        sft.train(again)


@pytest.mark.parametrize("module", [sft, reward_weighted, dpo, grpo, distill])
def test_a_smaller_batch_without_more_accumulation_is_another_update(module):
    """In grpo and distill the step decides; in the others a resumed run must not make other updates."""
    began = vars(module.settle(module.Config()))
    began = {**began, "batch_size": 16, "gradient_accumulation_steps": 4}
    smaller, same = {**began, "batch_size": 2}, {**began, "batch_size": 8, "gradient_accumulation_steps": 8}
    assert _sequences(began) == _sequences(same)
    assert (_sequences(began) == _sequences(smaller)) == (module in (grpo, distill))


def test_a_copy_of_a_run_is_continued_where_it_is(stopped, tmp_path, monkeypatch, capsys):
    """Whatever output_dir its config.yaml names, and wherever one stands."""
    original = Path(stopped(tmp_path / "copy").output_dir)
    words = ["--config", str(original / "config.yaml"), "--resume"]
    assert f"output_dir: {original}\n" not in (original / "config.yaml").read_text()
    assert sft.train(parse(sft.Config, words))["steps"] == 3 and (original / "result.json").exists()
    assert parse(sft.Config, [*words, "--output_dir", "elsewhere"]).output_dir == "elsewhere"
    monkeypatch.chdir(original)
    assert parse(sft.Config, ["--config", "config.yaml", "--resume"]).output_dir == "."
    assert parse(sft.Config, ["--config", "config.yaml"]).output_dir != "."
    assert "continues after step 2" in capsys.readouterr().out


def test_flags_that_leave_the_equations_alone_may_differ(place, stopped, tmp_path):
    was = stopped(tmp_path / "run")
    half = was.batch_size // 2
    for options in ({"batch_size": half}, {"learning_rate": 3e-3}, {"memory": "4bit"}, {"batch_size": half, "gradient_accumulation_steps": 3}):
        with pytest.raises(UserError, match="continues the run as it began"):
            sft.train(replace(was, **options))
    sft.train(replace(was, batch_size=half, gradient_accumulation_steps=2, gradient_checkpointing=True))
    sft.train(toy(place, tmp_path / "whole"))
    mine, whole = ([json.loads(line)["loss"] for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()] for name in ("run", "whole"))
    assert len(mine) == len(whole) and mine == pytest.approx(whole, rel=1e-4)


def test_resume_and_overwrite_together_are_refused(place, stopped, tmp_path):
    with pytest.raises(UserError, match="give one of them"):
        sft.train(replace(stopped(tmp_path / "run"), overwrite=True))
    assert newest_checkpoint(tmp_path / "run").name == "step_000002"


def test_a_start_that_went_on_is_another_start(place, stopped, tmp_path, monkeypatch):
    sft.train(toy(place, tmp_path / "start"))
    again = replace(toy(place, tmp_path / "run"), model_path=str(tmp_path / "start"))
    with pytest.raises(Killed):
        train(sft, again, monkeypatch, 2)
    sft.train(replace(toy(place, tmp_path / "start"), max_steps=4, resume=True))
    with pytest.raises(UserError, match="start/checkpoints/step_000004/.*: is not the file this run began with"):
        sft.train(replace(again, resume=True))


def test_a_damaged_checkpoint_is_named_and_the_previous_one_goes_on(place, stopped, tmp_path):
    sft.train(toy(place, tmp_path / "whole"))
    again = stopped(tmp_path / "run")
    path = tmp_path / "run" / "checkpoints" / "step_000002" / "optimizer.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    words = r"step_000002/optimizer.safetensors: damaged \(size or sha256 differs from state.json\); rename step_000002, and --resume continues"
    with pytest.raises(UserError, match=words):
        sft.train(again)
    path.parent.rename(tmp_path / "aside")
    sft.train(again)
    assert_equal(tmp_path / "whole", tmp_path / "run")
    path.write_bytes(data[:-1])
    assert parse(sft.Config, ["--resume"]).resume
    with pytest.raises(UserError, match="step_000002/optimizer.safetensors: damaged"):
        read_state(path.parent)


def test_one_checkpoint_and_that_damaged(stopped, tmp_path):
    again = stopped(tmp_path / "run")
    for name in ("step_000001", "step_000002"):
        folder = tmp_path / "run" / "checkpoints" / name
        (folder / "state.json").write_text("{")
        with pytest.raises(UserError, match="state.json:1: not JSON: "):
            read_state(folder)
    (folder.parent / "step_000001").rename(tmp_path / "gone")
    with pytest.raises(UserError, match="state.json:1: not JSON: .*; rename step_000002, and"):
        sft.train(again)


def test_the_best_checkpoint_is_kept(tmp_path):
    book = Run(sft.Config(output_dir=str(tmp_path), save_every=1), "sft")
    book.begin()
    for step, score in enumerate((0.1, 0.7, 0.3, 0.4, None, 0.7, 0.2), 1):
        book.scores[str(step)] = score
        save(book, step)
        names = [int(path.name[5:]) for path in checkpoints(tmp_path)]
        assert names == sorted({1 if step == 1 else 2, step, max(step - 1, 1)}), step


def test_a_second_run_on_the_folder_is_refused_and_a_dead_one_is_no_hindrance(place, stopped, tmp_path):
    again = stopped(tmp_path / "run")
    (tmp_path / "holds.py").write_text(
        "import time; import sft\n"
        "sft.load_model = lambda *_, **__: (print('held', flush=True), time.sleep(60))\n"
        f"sft.train(sft.Config(**{dict(vars(again), resume=True)!r}))\n")
    first = Program(tmp_path / "holds.py")
    try:
        while "held" not in first.said("stdout"):
            assert first.poll() is None, first.said("stderr")
            time.sleep(0.05)
        with pytest.raises(UserError, match=f"run: process {first.pid} is running there; stop it, or give another"):
            sft.train(again)
        # In two containers both may be process 1.
        lock = tmp_path / "run" / ".lock"
        lock.write_text(f"{os.getpid()}\n")
        with pytest.raises(UserError, match=f"run: process {os.getpid()} is running there"):
            sft.train(again)
        lock.write_text(f"{first.pid}\n")
    finally:
        first.kill()
        first.communicate()
    assert (tmp_path / "run" / ".lock").read_text().strip() == str(first.pid)  # stale
    assert sft.train(again)["steps"] == 3


# --------------------------------------------------------------------------------------------------------- full disk
def test_a_full_disk_leaves_the_last_checkpoint_and_says_how_to_go_on(stopped, tmp_path):
    again = stopped(tmp_path / "run")
    (tmp_path / "full.py").write_text(
        "import resource, signal, sys; import sft; from core import config as program\n"
        f"chosen = sft.Config(**{vars(again)!r})\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))\n"
        "program.main(sft.Config, sft.train, '', lambda *_: chosen)")
    done = programs.run(tmp_path / "full.py")
    assert done.returncode == 4, done.stderr
    assert re.search(r"the disk is full \(.*\); earlier checkpoints are whole; make room, then: python", done.stderr)
    assert "Traceback" not in done.stderr
    folder = tmp_path / "run" / "checkpoints"
    assert sorted(os.listdir(folder)) == ["step_000001", "step_000002"] and read_state(folder / "step_000002")["step"] == 2
    assert sft.train(again)["steps"] == 3


def test_episodes_survive_the_file(place, tmp_path):
    """What reward_weighted and dpo read back is what was played, to the last bit."""
    episodes = read_trajectories(str(place / "episodes.jsonl"))
    path = tmp_path / "e.jsonl"
    path.write_text("".join(to_json(t.to_json()) for t in episodes))
    assert [t.to_json() for t in read_trajectories(str(path))] == [t.to_json() for t in episodes]


# ------------------------------------------------------------------------------------------ what a run was made of
ENVIRONMENT = '''
class E:
    """Answers."""
    def reset(self, **_):
        return "x"
    def look(self) -> str:
        """Look."""
        return "y"
    def get_reward(self):
        return 1.0
    def _expert(self):
        return "z"
    @staticmethod
    def _tasks(split, n, seed):
        return [{"i": i + (1000 if split == "test" else 0)} for i in range(n)]
'''


@pytest.mark.parametrize("changed", ["base/model.safetensors", "base/config.json", "adapter/adapter_model.safetensors"])
def test_another_base_is_refused(place, tmp_path, monkeypatch, changed):
    import shutil
    shutil.copytree(place / "base", tmp_path / "base")
    shutil.copytree(place / "adapter", tmp_path / "adapter")
    settings = tmp_path / "adapter" / "adapter_config.json"
    settings.write_text(settings.read_text().replace(str(place / "base"), str(tmp_path / "base")))
    (tmp_path / "e.py").write_text(ENVIRONMENT)
    again = toy(place, tmp_path / "run", env=f"{tmp_path}/e.py:E", model_path=str(tmp_path / ("adapter" if "adapter" in changed else "base")), lora_r=2)
    with pytest.raises(Killed):
        train(sft, again, monkeypatch, 2)
    again.resume = True
    path = tmp_path / changed
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]) if changed.endswith("safetensors") else data + b"\n")
    with pytest.raises(UserError, match=f"{path.name}: is not the file this run began with"):
        sft.train(again)
    path.write_bytes(data)
    assert sft.train(again)["steps"] == 3


def test_a_run_that_a_reward_function_ended_continues_once_it_is_fixed(place, tmp_path, monkeypatch, capsys):
    """It was refused as another environment: the printed command could only meet the same fault again."""
    path = tmp_path / "judge.py"
    path.write_text("def judge(completions, trainer_state, **_):\n    return [1.0 / (1 - trainer_state.global_step)] * len(completions)\n")
    again = config(grpo, place, tmp_path / "run", env="equations", rewards=f"{path}:judge", eval_tasks=0, max_steps=2)
    with pytest.raises(UserError, match="(?s)--rewards judge raised ZeroDivisionError.*step 1 is saved; continue with"):
        grpo.train(again)
    path.write_text("def judge(completions, **_):\n    return [1.0] * len(completions)\n")
    envs.files.import_file.cache_clear()
    again.resume = True
    assert grpo.train(again)["steps"] == 2
    assert "note: environment judge.py is not the file this run began with: from here on it may learn something else\n" in capsys.readouterr().out


@pytest.mark.parametrize("module", [grpo, sft])
def test_an_environment_that_leaves_the_process_in_a_removed_folder_hinders_no_end(place, tmp_path, monkeypatch, capsys, module):
    """The table was printed before result.json was written, and its last line asked where it was: such a run could not be resumed to an end."""
    monkeypatch.chdir(place)
    (tmp_path / "away.py").write_text("import os, tempfile\nfrom envs.equations import Equations\n\n\nclass Away(Equations):\n"
                                      "    def reset(self, **task):\n        folder = tempfile.mkdtemp()\n        os.chdir(folder)\n"
                                      "        os.rmdir(folder)\n        return super().reset(**task)\n")
    options = dict(model_path="base", env=f"{tmp_path}/away.py:Away", eval_tasks=2, max_steps=2)
    options |= dict(max_samples=8, batch_size=4) if module is sft else dict(tasks_per_step=2)
    again = config(module, place, tmp_path / "run", **options)
    with pytest.raises(Killed):
        train(module, again, monkeypatch, 1)
    again.resume = True
    for ended in range(2):
        os.chdir(place)
        assert module.train(again)["steps"] == json.loads((tmp_path / "run" / "result.json").read_text())["steps"] == 2
        with pytest.raises(FileNotFoundError):
            os.getcwd()
        assert re.search(r"next:    python \S+py --model_path ", capsys.readouterr().out)
        (tmp_path / "run" / "result.json").unlink()


def test_a_checkpoint_of_another_version_is_played_but_not_continued(place, tmp_path, monkeypatch):
    """Of three days ago: its state.json, whole and with its checksum, lacked names that only --resume reads. Nothing loaded it."""
    again = toy(place, tmp_path / "run", lora_r=2)
    with pytest.raises(Killed):
        train(sft, again, monkeypatch, 2)
    path = newest_checkpoint(again.output_dir) / "state.json"
    state = json.loads(path.read_text())
    del state["checksum"], state["planned"]
    path.write_text(to_json({**state, "checksum": _checksum(state)}))
    load_model(again.output_dir, train=False)
    again.resume = True
    with pytest.raises(UserError, match=rf"{path.parent}: another version of the project wrote it \(planned is missing\); continue with that"):
        sft.train(again)


def test_an_adapter_whose_base_was_replaced_is_refused_and_one_that_moved_with_it_is_not(place, tmp_path, monkeypatch):
    import shutil
    shutil.copytree(place / "base", tmp_path / "base")
    sft.train(toy(place, tmp_path / "run", model_path=str(tmp_path / "base"), lora_r=2))
    path = tmp_path / "base" / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    words = "base/model.safetensors: is not the base model that the adapter .*step_000003 was trained on; put that back"
    for use in (lambda: load_model(str(tmp_path / "run"), train=False), lambda: merge(str(tmp_path / "run"), str(tmp_path / "merged")),
                lambda: sft.train(toy(place, tmp_path / "next", model_path=str(tmp_path / "run"), lora_r=2))):
        with pytest.raises(UserError, match=words):
            use()
    path.rename(path.with_name("model-00001-of-00001.safetensors"))  # in other files
    with pytest.raises(UserError, match=words):
        load_model(str(tmp_path / "run"), train=False)
    path.write_bytes(data)
    load_model(str(tmp_path / "run"), train=False)
    monkeypatch.setattr(schooling, "TINY_SFT", {**schooling.TINY_SFT, "max_samples": 8, "max_steps": 1})
    options = dict(model_path="tiny", lora_r=2, tasks_per_step=2, max_steps=0)
    grpo.train(config(grpo, place, tmp_path / "grpo", **options))
    weights = (tmp_path / "grpo" / "base" / "model.safetensors").read_bytes()
    grpo.train(config(grpo, place, tmp_path / "grpo", **options, seed=1, overwrite=True))
    assert (tmp_path / "grpo" / "base" / "model.safetensors").read_bytes() != weights
    # Another base is now where the renamed run's was, and its own has come along.
    (tmp_path / "grpo.1").rename(tmp_path / "moved")
    load_model(str(tmp_path / "moved"), train=False)
    assert base_of(newest_checkpoint(tmp_path / "moved")) == str(tmp_path / "moved" / "base")
    path = tmp_path / "moved" / "base" / "config.json"
    path.write_text(path.read_text() + "\n")
    with pytest.raises(UserError, match="base/config.json: is not the base model that the adapter .* was trained on"):
        load_model(str(tmp_path / "moved"), train=False)


FORK = """
import sys
sys.path[:0] = [{root!r}, "."]
from dataclasses import dataclass
import mylosses, sft
from layers import main
@dataclass(kw_only=True)
class Config(sft.Config):
    output_dir: str = "r"
main(Config, sft.train, "")
"""


def test_a_fork_prints_commands_that_run_the_fork_and_notices_that_it_changed(place, tmp_path):
    (tmp_path / "mysft.py").write_text(FORK.format(root=str(ROOT)))
    (tmp_path / "mylosses.py").write_text("")
    words = f"--model_path {place}/base --max_samples 8 --batch_size 4 --eval_tasks 0 --lora_r 2 --save_every 1".split()
    done = programs.run("mysft.py", *words, "--max_steps", 1, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    done = programs.run("mysft.py", *words, "--max_steps", 1, "--learning_rate", "0.5", "--resume", cwd=tmp_path)
    assert done.returncode == 2 and "continue with: python mysft.py --config r/config.yaml --resume" in done.stderr
    for name in ("mysft.py", "mylosses.py"):
        (tmp_path / name).write_text((tmp_path / name).read_text() + "# another loss\n")
    done = programs.run("mysft.py", *words, "--max_steps", 2, "--resume", cwd=tmp_path)
    noted = re.findall(r"note: program (\w+.py) is not the file this run began with", done.stdout)
    assert done.returncode == 0 and noted == ["mylosses.py", "mysft.py"], done.stderr[-2000:]


def test_every_group_keeps_its_own_rate_also_when_resumed(place, tmp_path, monkeypatch):
    """LoRA+: the rate of B is 16 times that of A, in every step of a run and of a resumed one."""
    rates = []

    def lora_plus(model, *, lr, **_):
        halves = [[p for name, p in model.named_parameters() if name.endswith(f"lora.{half}")] for half in "AB"]
        optimizer = torch.optim.AdamW([{"params": halves[0], "lr": lr}, {"params": halves[1], "lr": 16 * lr}])
        optimizer.register_step_pre_hook(lambda *_: rates.append([group["lr"] for group in optimizer.param_groups]))
        return optimizer
    monkeypatch.setattr(sft, "adamw", lora_plus)
    again = toy(place, tmp_path / "run", lora_r=2)
    with pytest.raises(Killed):
        train(sft, again, monkeypatch, 1)
    sft.train(replace(again, resume=True))
    assert len(rates) == 4 and all(b == pytest.approx(16 * a) for a, b in rates)
    assert [a for a, _ in rates[:2] + rates[3:]] == pytest.approx([1e-3, 0.7e-3, 0.4e-3])


@pytest.mark.parametrize("lora_r", [0, 2])
def test_a_module_that_a_fork_adds_is_saved_and_resumed(place, tmp_path, monkeypatch, lora_r):
    load, score = sft.load_model, sft.token_logprobs

    def with_value_head(*args, **options):
        model, tokenizer = load(*args, **options)
        torch.manual_seed(0)
        model.value_head = torch.nn.Linear(model.config.hidden_size, 1)
        return model, tokenizer

    def scored(model, token_ids, *rest):  # its output counts, so that it learns
        logprobs, entropy = score(model, token_ids, *rest)
        return logprobs + model.value_head(model.get_input_embeddings()(token_ids)).squeeze(-1), entropy
    monkeypatch.setattr(sft, "load_model", with_value_head)
    monkeypatch.setattr(sft, "token_logprobs", scored)
    sft.train(toy(place, tmp_path / "whole", lora_r=lora_r))
    again = toy(place, tmp_path / "run", lora_r=lora_r)
    with pytest.raises(Killed):
        train(sft, again, monkeypatch, 2)
    sft.train(replace(again, resume=True))
    assert_equal(tmp_path / "whole", tmp_path / "run")
    first, last = (load_file(path / "added.safetensors") for path in checkpoints(tmp_path / "run")[-2:])
    assert sorted(last) == ["value_head.bias", "value_head.weight"] and not torch.equal(first["value_head.weight"], last["value_head.weight"])
    load(str(tmp_path / "run"), train=False)  # the model itself is a plain one
    files = list(checkpoints(tmp_path / "run")[-1].glob("*model.safetensors"))
    assert len(files) == 1 and not any("value_head" in name for name in load_file(files[0]))


def test_the_schedule_belongs_to_the_run(place, tmp_path):
    """A run that is made longer continues at a tenth of the peak; the first steps are those of the short run."""
    sft.train(toy(place, tmp_path / "run"))
    sft.train(replace(toy(place, tmp_path / "run", resume=True), max_steps=6))
    rates = [json.loads(line)["learning_rate"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rates == pytest.approx([1e-3, 0.7e-3, 0.4e-3, 1e-4, 1e-4, 1e-4])


@pytest.mark.parametrize("total, warmup", [(2, [1.0, 1.0]), (10, [1.0, 1.0]), (50, [0.2, 0.4, 0.6, 0.8, 1.0, 1.0]), (340, [0.05, 0.1])])
def test_the_warm_up_is_a_tenth_of_the_steps_and_at_most_twenty(total, warmup):
    for step, share in enumerate(warmup):
        assert scheduled(2.0, step, total) == pytest.approx(2.0 * share * (1 - 0.9 * step / total))
    assert scheduled(2.0, 30, total) < 2.0
    assert scheduled(2.0, total, total) == pytest.approx(0.2)


def test_flipped_bits_are_refused_or_change_nothing(stopped, tmp_path):
    """One bit at random places, in every file of a checkpoint in turn. bench/faults.py does it at 1,000 places."""
    stopped(tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints" / "step_000002"
    whole, draw = read_state(folder), random.Random(0)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    assert len(files) > 4
    for i in range(200):
        path = files[i % len(files)]
        with open(path, "r+b") as file:
            at = draw.randrange(path.stat().st_size)
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 1 << draw.randrange(8)]))
            file.flush()
            try:
                assert read_state(folder) == whole, path
            except UserError as error:
                assert path.name in str(error) and "\n" not in str(error)
            file.seek(at)
            file.write(byte)
    assert read_state(folder) == whole


# ------------------------------------------------------------------------------------------- nothing is removed
@pytest.mark.parametrize("module", [sft, grpo, dpo, reward_weighted])
def test_a_run_that_cannot_load_leaves_the_run_that_it_was_to_overwrite(place, tmp_path, module):
    folder = tmp_path / "run"
    sft.train(toy(place, folder))
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match="typo"):
        module.train(config(module, place, folder, overwrite=True, model_path=str(tmp_path / "typo")))
    assert os.listdir(tmp_path) == ["run"] and all(path.read_bytes() == data for path, data in files.items())
    short = dict(trajectories=str(place / "episodes.jsonl"), max_steps=1) if module in (dpo, reward_weighted) else dict(max_steps=0, max_samples=8)
    module.train(config(module, place, folder, overwrite=True, **short))
    assert all((tmp_path / "run.1" / path.relative_to(folder)).read_bytes() == data for path, data in files.items() if path.name != ".lock")


@pytest.mark.parametrize("name", ["", "  "])
def test_an_empty_output_dir_is_refused(place, name):
    with pytest.raises(UserError, match="--output_dir .*: is empty; give a value"):
        sft.train(toy(place, name))


def test_a_changed_digit_in_state_json_cuts_no_log(stopped, tmp_path):
    again = stopped(tmp_path / "run")
    path = tmp_path / "run" / "checkpoints" / "step_000002" / "state.json"
    log = tmp_path / "run" / "metrics.jsonl"
    before = log.read_bytes()
    path.write_text(path.read_text().replace('"step": 2', '"step": 1'))
    with pytest.raises(UserError, match="state.json: damaged .its checksum differs"):
        sft.train(again)
    assert log.read_bytes() == before
