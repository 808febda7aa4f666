"""The output folder and its checkpoints when somebody else has had their hands in them."""
import errno
import json
import os
import re
import shutil
from types import SimpleNamespace

import programs
import pytest
from saving import load, newest_checkpoint, save
from test_resume import ENVIRONMENT, Killed, assert_equal, config, place, stopped, toy, train  # noqa: F401  (fixtures)

import grpo
import sft
from agent import Trajectory
from episodes import read_trajectories
from extras.exact import checkpoint, output_folder
from extras.exact import run as exact_run
from core.run import algorithm_of
from extras.exact.checkpoint import check_base, prune, read_state
from core.model import checkpoints
from core.config import UserError
from layers import Run
from layers import load_model


def test_a_log_that_was_thinned_is_cut_between_two_lines(stopped, tmp_path):  # noqa: F811
    again = stopped(tmp_path / "run")
    log = tmp_path / "run" / "trajectories.jsonl"
    lines = [json.dumps({"step": step, "token_ids": list(range(40 + step))}) + "\n" for step in (0, 1, 1, 2, 4)]
    log.write_text("".join(lines) + '{"step": 5, "to')
    Run(sft.settle(again), "sft").begin()  # after its second step
    assert log.read_text() == "".join(lines[:3])


def test_a_folder_whose_config_is_gone_is_refused_in_a_line(stopped, tmp_path):  # noqa: F811
    again = stopped(tmp_path / "run")
    (tmp_path / "run" / "config.yaml").unlink()
    with pytest.raises(UserError, match="run: already holds metrics.jsonl, and no config.yaml that a run has written; give another"):
        sft.train(again)


@pytest.mark.parametrize("name", ["sft", "reinforce++", "my-grpo", "GRPO, a dry run"])
def test_the_algorithm_of_a_fork_may_have_any_name(tmp_path, name):
    Run(sft.Config(output_dir=str(tmp_path)), name).begin()
    assert algorithm_of(tmp_path) == name


# ------------------------------------------------------------------------------------------------------ strangers
def sealed(state):
    state.pop("checksum", None)
    return {**state, "checksum": checkpoint._checksum(state)}


def without(name):
    return lambda state: sealed({key: value for key, value in state.items() if key != name})


STRANGE = [lambda state: {}, lambda state: {"epoch": 3, "global_step": 7}, lambda state: {"made_of": [1]}, lambda state: [state],
           lambda state: {**state, "checksum": 3}, lambda state: {**state, "checksum": "0"}, lambda state: None, lambda state: "text",
           lambda state: {"score": 0.99}, lambda state: {**state, "score": "0.99"}]
STRANGE += [without(name) for name in checkpoint.RESTORED if name != "made_of"]


@pytest.mark.parametrize("change", STRANGE, ids=range(len(STRANGE)))
def test_a_checkpoint_that_this_version_has_not_written_is_refused_in_a_line(stopped, tmp_path, change):  # noqa: F811
    again = stopped(tmp_path / "run")
    path = tmp_path / "run" / "checkpoints" / "step_000002" / "state.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(UserError) as refused:
        sft.train(again)
    assert re.search(r"state\.json|nothing|step_000002|the file this run began with", str(refused.value)) and "\n" not in str(refused.value)
    try:
        prune(tmp_path / "run", {})  # it does not fail, and removes nothing that is not ours
        load_model(str(tmp_path / "run"), train=False)
    except UserError as error:
        assert "\n" not in str(error)
    assert path.exists()


def test_killed_while_an_old_checkpoint_is_removed_no_half_one_has_its_name(stopped, tmp_path, monkeypatch):  # noqa: F811
    stopped(tmp_path / "run")
    first, _ = checkpoints(tmp_path / "run")
    for step in (3, 4, 5):
        shutil.copytree(first, first.with_name(f"step_00000{step}"))

    def killed(path, ignore_errors):
        (path / "optimizer.safetensors").unlink()
        raise KeyboardInterrupt
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "rmtree", killed)
        prune(tmp_path / "run", {})
    whole = checkpoints(tmp_path / "run")
    assert len(whole) == 4 and all(map(read_state, whole))


def test_a_folder_into_which_others_write_does_not_end_the_run_that_removes_it(stopped, tmp_path, monkeypatch):  # noqa: F811
    """Finder's .DS_Store, a cloud's client or NFS: "Directory not empty" once ended the run, after its checkpoint had been written."""
    stopped(tmp_path / "run")
    first, _ = checkpoints(tmp_path / "run")
    shutil.copytree(first, first.with_name("step_000003"))
    shutil.copytree(first, first.with_name("step_000004"))

    def rmdir(*_, **__):
        raise OSError(errno.ENOTEMPTY, "Directory not empty")
    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", rmdir)
        prune(tmp_path / "run", {})
    assert first not in checkpoints(tmp_path / "run")


def test_the_state_of_another_program_in_a_model_folder_is_named(place, tmp_path):  # noqa: F811
    shutil.copytree(place / "adapter", tmp_path / "adapter")
    (tmp_path / "adapter" / "state.json").write_text('{"made_of": ["base/config.json"], "epoch": 1}')
    for use in (lambda: load_model(str(tmp_path / "adapter"), train=False), lambda: check_base(tmp_path / "adapter", place / "base")):
        with pytest.raises(UserError, match="state.json: damaged .its checksum differs., or of another program or a much older version; renamed"):
            use()


# ------------------------------------------------------------------------------------------------ the disk, the budget
def test_four_checkpoints_are_on_the_disk_while_one_is_written_and_there_is_room_for_them(tmp_path, monkeypatch):
    book = Run(sft.Config(output_dir=str(tmp_path)), "sft")
    book.begin()
    most = []
    seal = exact_run.seal
    monkeypatch.setattr(exact_run, "seal", lambda *args: (seal(*args), most.append(len(os.listdir(tmp_path / "checkpoints")))))
    for step, score in enumerate((0.9, 0.1, 0.2, 0.3, 0.4), 1):
        book.scores[str(step)] = score
        save(book, step)
    assert max(most) == 4 and len(checkpoints(tmp_path)) == 3


def test_a_run_whose_checkpoints_do_not_fit_on_the_disk_does_not_begin(place, tmp_path, monkeypatch, stopped):  # noqa: F811
    left = SimpleNamespace(free=2**20)
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: left)
    words = r"run: (\d+) MiB are needed for 4 checkpoints, and 1 MiB are free on this disk; make room, or give another --output_dir"
    with pytest.raises(UserError, match=words) as refused:
        sft.train(toy(place, tmp_path / "run"))
    needed = int(re.search(words, str(refused.value))[1])
    monkeypatch.undo()
    sft.train(toy(place, tmp_path / "whole"))
    written = sum(file.stat().st_size for file in newest_checkpoint(tmp_path / "whole").glob("*.safetensors")) / 2**20
    assert 0 < abs(needed - 4 * written) < 0.05 * needed + 1
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: left)
    with pytest.raises(UserError, match="needed for 2 checkpoints"):  # two are there
        sft.train(stopped(tmp_path / "again"))


def test_the_log_of_episodes_keeps_the_newest_and_thins_the_rest(tmp_path, monkeypatch):
    monkeypatch.setattr(output_folder, "EPISODE_BYTES", 20_000)
    book = Run(grpo.Config(output_dir=str(tmp_path), save_every=1000), "grpo")
    path, saved = tmp_path / "trajectories.jsonl", set()
    for step in load(book, 201):
        if step == 200:  # the last step is saved in any case
            break
        book.log_episodes([Trajectory([1, 2], [0, 1], [0.0, -1.0], [1.0], 1.0, group_id=f"{step}-{i // 2}", stop_reason="done",
                                      info={"env": "e", "task": {}, "success": True}) for i in range(4)])
        before = path.stat().st_size
        book.end_step(step)
        assert path.stat().st_size <= min(before, 20_000)
        if path.stat().st_size < before:  # it is saved at once: an earlier checkpoint would thin others
            saved.add(step + 1)
            assert newest_checkpoint(tmp_path).name == f"step_{step + 1:06d}"
    assert len(saved) > 5
    steps = [json.loads(line)["step"] for line in path.read_text().splitlines()]
    assert steps == sorted(steps) and all(steps.count(step) == 4 for step in steps)
    kept = sorted(set(steps))
    newest = kept[-10:]
    assert newest == list(range(190, 200)) and kept[0] == 0
    strides = [b - a for a, b in zip(kept, kept[1:])]
    assert max(strides) <= 64 and strides == sorted(strides, reverse=True)
    assert len(read_trajectories(str(path))) == len(steps)
    assert not list(tmp_path.glob(".tmp-*"))


@pytest.mark.slow
def test_a_thinned_log_is_the_same_however_often_the_run_was_killed(place, tmp_path, monkeypatch):  # noqa: F811
    from agent import rollout
    from test_resume import rewarded
    monkeypatch.setattr(output_folder, "EPISODE_BYTES", 12_000)
    monkeypatch.setattr(grpo, "rollout", lambda *args, **options: rewarded(rollout(*args, **options)))
    options = dict(lora_r=2, tasks_per_step=2, max_steps=6, eval_tasks=0, save_every=3)
    grpo.train(config(grpo, place, tmp_path / "whole", **options))
    again = config(grpo, place, tmp_path / "killed", **options)
    for lines in (1, 2, 2, 1):  # in the second step before any is saved, in the third, the fifth, ...
        with pytest.raises(Killed):
            train(grpo, again, monkeypatch, lines)
        again.resume = True
    grpo.train(again)
    assert_equal(tmp_path / "whole", tmp_path / "killed")
    steps = {json.loads(line)["step"] for line in (tmp_path / "killed" / "trajectories.jsonl").read_text().splitlines()}
    assert 5 in steps and len(steps) < 6, "nothing was thinned"
    assert '"step":5' in (tmp_path / "killed" / "report.html").read_text()


def test_a_changed_module_that_the_environments_file_imports_is_noted(place, tmp_path):  # noqa: F811
    """In a process each, as modules are imported once in one."""
    (tmp_path / "deck").mkdir()
    (tmp_path / "deck" / "__init__.py").write_text("from .cards import ACE\n")
    (tmp_path / "deck" / "cards.py").write_text("ACE = 1\n")
    (tmp_path / "rules.py").write_text("import json, torch\nfrom deck import ACE\n")
    (tmp_path / "other.py").write_text("")
    (tmp_path / "my_env.py").write_text("from rules import ACE\n" + ENVIRONMENT)
    words = (f"--model_path {place}/base --max_samples 8 --batch_size 4 --eval_tasks 0 --lora_r 2 --save_every 1 --output_dir r "
             "--env my_env.py:E").split()
    done = programs.run(programs.ROOT / "sft.py", *words, "--max_steps", 1, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    made_of = read_state(newest_checkpoint(tmp_path / "r"))["made_of"]
    assert sorted(name for name in made_of if name.startswith("environment ")) == [
        f"environment {name}" for name in ("deck/__init__.py", "deck/cards.py", "my_env.py", "rules.py")]
    imported = ("rules.py", "deck/__init__.py", "deck/cards.py")
    for steps, changed, noted in ((2, ("other.py",), ()), (3, imported, imported)):
        for name in changed:
            (tmp_path / name).write_text((tmp_path / name).read_text() + "# changed\n")
        done = programs.run(programs.ROOT / "sft.py", *words, "--max_steps", steps, "--resume", cwd=tmp_path)
        assert done.returncode == 0, done.stderr[-2000:]
        for name in ("my_env.py", "other.py", *imported):
            assert (f"note: environment {name} is not the file this run began with" in done.stdout) == (name in noted)


# ------------------------------------------------------------------------------------------- code that files may not choose
def test_the_printed_command_continues_a_run_in_an_environment_of_ones_own(place, tmp_path):  # noqa: F811
    (tmp_path / "my_env.py").write_text(ENVIRONMENT)
    book = Run(sft.Config(output_dir=str(tmp_path / "run"), env="my_env.py:E"), "sft")
    assert re.search(r"--config \S+config.yaml --env my_env.py:E --resume$", book.command)
    words = f"--model_path {place}/base --max_samples 8 --batch_size 4 --eval_tasks 0 --lora_r 2 --save_every 1 --output_dir r".split()
    done = programs.run(programs.ROOT / "sft.py", *words, "--env", "my_env.py:E", "--max_steps", 1, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    (tmp_path / "my_env.py").write_text("open('ran', 'w')\n" + ENVIRONMENT)
    command = [programs.ROOT / "sft.py", "--config", "r/config.yaml", "--resume"]
    done = programs.run(*command, cwd=tmp_path)
    assert done.returncode == 2 and not (tmp_path / "ran").exists() and done.stderr == (
        "sft.py: --env my_env.py:E: a config file does not choose which code runs; if you trust it, add --env my_env.py:E to the command\n")
    (tmp_path / "my_env.py").write_text(ENVIRONMENT)
    done = programs.run(*command, "--env", "my_env.py:E", "--max_steps", 2, cwd=tmp_path)
    assert done.returncode == 0 and len((tmp_path / "r" / "metrics.jsonl").read_text().splitlines()) == 2, done.stderr[-2000:]
