"""run.py: what the flags accept and refuse, that config.yaml repeats a run, that a checkpoint is whole or absent."""
import errno
import gc
import json
import os
import re
import shlex
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import programs
import pytest
import torch
import yaml
from config_helpers import Config
from saving import load, newest_checkpoint, save, weights

import grpo
import sft
from agent import Trajectory
from core import run
from core.run import load_optimizer, optimizer_tensors
from extras.exact.checkpoint import read_state
from core.config import UserError, mix
from extras.hints.command_line import parse
from extras.stop import Stop
from envs.transcripts import message_lines
from core.model import steps_of
from core.run import LOGGED_EPISODES
from layers import Run
from extras.exact.process import Signals

ROOT = Path(run.__file__).parent.parent


# -- the program -------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """A tiny algorithm file; -> run(argv, **environment) -> CompletedProcess, of a process of its own if it has variables of its own."""
    script = tmp_path_factory.mktemp("program") / "toy.py"
    script.write_text(textwrap.dedent('''
        """Toy – learns nothing.

        A second paragraph."""
        import sys, time
        from dataclasses import dataclass
        from core.config import flag
        from core.config import UserError
        from extras import main

        @dataclass
        class Config:
            learning_rate: float = flag(1e-5, "AdamW step size", group="optimisation", above=0)
            group_size: int = flag(8, "episodes per task", aliases=("samples_per_prompt",))
            loss: str = flag("grpo", "objective", choices=("grpo", "dapo"))
            fail: str = flag("", "how to end")

        def train(config):
            if config.fail == "user":
                raise UserError("reward.py: returns nan;\\nreturn a finite number, not \u2014 this")
            if config.fail == "memory":
                raise type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory. Tried to allocate 2.00 GiB.\\nmore")
            if config.fail in ("numpy", "cpu"):
                import numpy, torch
                numpy.empty(2**57) if config.fail == "numpy" else torch.empty(2**58)
            if config.fail == "bug":
                raise ValueError("ours")
            print("trained", config.learning_rate)

        if __name__ == "__main__":
            main(Config, train, __doc__)
    '''), encoding="utf-8")

    def call(*argv, **environment):
        if not environment:
            return programs.run(script, *argv)
        env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
        return subprocess.run([sys.executable, script, *argv], capture_output=True, encoding="utf-8", env=env)
    return call


@pytest.mark.parametrize("argv, code, line", [
    (["--lr", "1"], 2, "toy.py: unknown option --lr; did you mean --learning_rate?"),
    (["--learning_rate", "0"], 2, "toy.py: --learning_rate 0: must be greater than 0"),
    (["--fail", "user"], 2, "toy.py: reward.py: returns nan; return a finite number, not — this"),
])
def test_exit_codes(program, argv, code, line):
    done = program(*argv)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", line + "\n")


def test_success_and_our_own_bugs(program):
    done = program("--learning_rate", "1e-4")
    assert (done.returncode, done.stdout, done.stderr) == (0, "trained 0.0001\n", "")
    done = program("--fail", "memory")
    assert done.returncode == 1 and re.fullmatch(r"toy.py: out of memory: CUDA out of memory. Tried to allocate 2.00 GiB.; "
                                                 r"what would fit: python bench/memory.py \S*toy.py --fail memory\n", done.stderr), done.stderr
    for name, says in (("numpy", "Unable to allocate 1.00 EiB"), ("cpu", "DefaultCPUAllocator: can't allocate memory")):
        done = program("--fail", name)
        assert done.returncode == 1 and re.fullmatch(rf"toy.py: out of memory: .*{says}.*; what would fit: python bench/memory.py .*\n", done.stderr), done.stderr
    done = program("--fail", "bug")
    assert done.returncode == 1 and "Traceback" in done.stderr                       # a bug keeps its traceback


def test_a_program_that_does_not_train_names_other_flags(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["agent.py"])
    with pytest.raises(Stop) as ended, Signals():
        raise MemoryError()
    assert ended.value.code == 1 and str(ended.value) == "out of memory: MemoryError; lower --num_tasks, --group_size or --max_tokens, or give --dtype bfloat16"


def test_a_terminal_obeys_nothing_of_an_episode_that_is_printed():
    messages = [{"role": "user", "content": "\x1b]52;c;cm0gLXJm\x07 é\na\rb"}]
    assert message_lines(messages) == ["User: \\x1b]52;c;cm0gLXJm\\x07 é\na\\rb"]


def test_an_environment_may_change_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    book = Run(Config(output_dir="run"), "sft")
    monkeypatch.chdir("/")
    book.begin()
    book.append("metrics.jsonl", [{"step": 0}])
    assert (tmp_path / "run" / "metrics.jsonl").exists()


def test_help(program):
    done = program("--help", COLUMNS="100", LC_ALL="C")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == textwrap.dedent("""\
        usage: python toy.py [--config file.yaml] [--name value] [--no_switch]

        Toy – learns nothing.

        options:
          -h, --help         show this help message and exit
          --config FILE      YAML file of options; the command line overrides it
          --group_size N     episodes per task; same as --samples_per_prompt; default: 8
          --loss TEXT        objective; one of grpo, dapo; default: grpo
          --fail TEXT        how to end; default: ''

        optimisation:
          --learning_rate X  AdamW step size; default: 1e-05
        """)


def test_ascii_locale(program):
    ascii = dict(LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert program("--help", **ascii, PYTHONIOENCODING="ascii").returncode == 0
    assert program("--fail", "user", **ascii).returncode == 2


# -- the folder --------------------------------------------------------------------------------------------------------

def started(folder, **changes):
    config = Config(output_dir=str(folder), **changes)
    book = Run(config, "grpo")
    book.planned = 4
    book.begin()
    return book


def test_config_yaml_does_not_repeat_permissions(tmp_path):
    started(tmp_path / "a", overwrite=True, seed=3)
    written = yaml.safe_load((tmp_path / "a" / "config.yaml").read_text())
    assert written["seed"] == 3 and "overwrite" not in written and "resume" not in written


def test_refuses_a_folder_that_holds_a_run(tmp_path):
    folder = tmp_path / "a"
    started(folder).write_line(0, {"loss": 1.0}, {})
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="a: already holds a grpo run; --resume continues it, --overwrite renames it .in Python: resume=True, overwrite=True., or give another --output_dir"):
        started(folder)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "config.yaml").write_text("seed: 1\n")
    for options in ({}, {"overwrite": True}, {"resume": True}):
        with pytest.raises(UserError, match="b: already holds config.yaml, and no config.yaml that a run has written; "):
            started(tmp_path / "b", **options)


def test_overwrite_renames_the_run_that_was_there_and_nothing_is_lost(tmp_path, capsys):
    folder = tmp_path / "a"
    for number in range(3):
        book = Run(Config(output_dir=str(folder), overwrite=True, seed=number), "grpo")
        before = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}
        assert not number or before["notes.txt"] == b"mine", "the run is not taken before begin()"
        book.begin()
        book.write_line(0, {"loss": float(number)}, {})
        (folder / "notes.txt").write_text("mine")
    assert sorted(os.listdir(tmp_path)) == ["a", "a.1", "a.2"]
    assert [strict(tmp_path / name / "metrics.jsonl")[0]["loss"] for name in ("a.1", "a.2", "a")] == [0, 1, 2]
    assert f"{folder}: the run that was there is now {folder}.2\n" in capsys.readouterr().out


def test_a_link_leads_to_the_new_run_when_the_old_one_is_renamed(tmp_path):
    """A link to a larger disk, for instance: the next run is to be there, too."""
    link = tmp_path / "link"
    (tmp_path / "disk").mkdir()
    link.symlink_to(tmp_path / "disk")
    for number in range(2):
        Run(Config(output_dir=str(link), overwrite=True, seed=number), "grpo").begin()
    assert sorted(os.listdir(tmp_path)) == ["disk", "disk.1", "link"] and link.is_symlink()
    assert "seed: 1" in (link / "config.yaml").read_text()


def test_overwrite_never_renames_what_the_run_starts_from(tmp_path):
    started(tmp_path / "a")
    folder = tmp_path / "a"
    (folder / "base").mkdir()
    (folder / "trajectories.jsonl").write_text("{}")
    for start in (folder, folder / "base", f"elsewhere.jsonl, {folder / 'trajectories.jsonl'}"):
        with pytest.raises(UserError, match="--model_path .* lies in the folder to overwrite"):
            started(folder, overwrite=True, model_path=str(start))
    assert os.listdir(tmp_path) == ["a"]


def test_folders_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("x")
    for folder, reason in ((tmp_path / "file", "File exists"), (tmp_path / "file" / "a", "Not a directory"),
                           (tmp_path / ("n" * 256), "File name too long")):
        with pytest.raises(UserError, match=f"(?s): cannot write there .*{reason}.*; give another --output_dir"):
            started(folder)
    assert started(tmp_path / ("n" * 255)).folder.is_dir()


def test_config_made_in_python_is_checked_too(tmp_path):
    with pytest.raises(UserError, match="--batch_size 0: must be at least 1"):
        started(tmp_path, batch_size=0)
    with pytest.raises(UserError, match="--learning_rate nan: must be greater than 0"):
        started(tmp_path, learning_rate=float("nan"))
    assert not list(tmp_path.iterdir())


def strict(path):
    def refuse(word):
        raise AssertionError(word)
    return [json.loads(line, parse_constant=refuse) for line in path.read_text(encoding="utf-8").splitlines()]


class Episode:
    def __init__(self, group_id="", **values):
        self.group_id, self.values = group_id, values

    def to_json(self):
        return self.values


def test_lines_are_strict_json(tmp_path):
    book = started(tmp_path)
    book.write_line(0, {"loss": float("nan"), "kl": torch.tensor(0.5), "n": 3}, {"seconds": float("inf")})
    assert strict(tmp_path / "metrics.jsonl") == [{"step": 0, "loss": None, "kl": 0.5, "n": 3}]     # flushed at once
    assert strict(tmp_path / "timing.jsonl") == [{"step": 0, "seconds": None}]
    odd = "日本\u2028\ud800\n"
    book.step = 1
    book.write_episodes([Episode(logprobs=[float("-inf"), -1.5], messages=[{"content": odd}]), Episode(reward=1.0)])
    rows = [json.loads(line) for line in (tmp_path / "trajectories.jsonl").read_text().split("\n")[:-1]]
    assert rows == [{"step": 1, "logprobs": [None, -1.5], "messages": [{"content": odd.replace("\ud800", "?")}]}, {"step": 1, "reward": 1.0}]  # the strict reader takes it


def test_no_group_is_cut_in_the_log_of_episodes(tmp_path):
    book = started(tmp_path)
    episodes = [Episode(group_id=f"0-{i // 5}", i=i) for i in range(30)]
    book.write_episodes(episodes, LOGGED_EPISODES)
    assert [row["i"] for row in strict(tmp_path / "trajectories.jsonl")] == list(range(20))
    book.write_episodes(episodes)
    assert len(strict(tmp_path / "trajectories.jsonl")) == 50


def test_of_a_step_some_episodes_are_logged_and_the_numbers_of_all(tmp_path):
    book = started(tmp_path)
    book.line = {}
    book.log_episodes([Trajectory([1, 2], [0, 1], [0.0, -1.0], [1.0], i / 63, group_id=f"0-{i // 4}", info={"success": True}) for i in range(64)])
    assert len(strict(tmp_path / "trajectories.jsonl")) == LOGGED_EPISODES
    assert book.line["episodes"] == 64 and book.line["reward"] == pytest.approx(0.5)


def test_tokens_per_second_are_those_of_all_episodes_of_the_step(tmp_path):
    """Of the rollout also those that nothing is learned from: with a success band it seemed to slow down as groups were dropped.

    Of the update those of each pass: with four updates a step it seemed to take four times as long for a token.
    """
    book = started(tmp_path, batch_size=4)
    line, book.rollout_seconds, book.rollout_tokens = {"episodes": 6, "tokens": 100, "sampled_tokens": 30}, 4.0, 240
    book.passed = 0
    assert [len([*book.micro_batches(6, 0, update)]) for update in range(4)] == [2] * 4
    timing = book.timing_of(line, 10.0)
    assert (timing["update_seconds"], timing["update_tokens_per_second"], timing["rollout_tokens_per_second"]) == (6, 400, 60)
    line["staleness"] = 1  # they were played during another step
    assert "rollout_tokens_per_second" not in book.timing_of(line, 10.0)


def test_a_laptop_that_sleeps_in_a_step_does_not_make_it_longer(tmp_path, monkeypatch):
    """The wall clock runs on meanwhile, and a time server sets it back: rollout and step need one clock, which does neither."""
    book = Run(sft.settle(sft.Config(output_dir=str(tmp_path))), "sft")
    now = time.time()
    for step in load(book, 3):
        book.log(episodes=1, tokens=10, sampled_tokens=5)
        book.rollout_seconds, book.passed = 1e-9, 1
        monkeypatch.setattr(time, "time", lambda: now + (3600, -60, 0)[step])
        book.end_step(step)
    timing = strict(tmp_path / "timing.jsonl")
    assert all(0 < row["update_seconds"] < 60 and row["update_tokens_per_second"] > 0 for row in timing)
    assert 0 < book.finish({})["seconds"] < 60


def test_resume_drops_later_steps_and_cut_lines(tmp_path):
    book = started(tmp_path)
    for step in range(4):
        book.write_line(step, {"loss": step}, {})
        if step == 1:
            save(book, 2)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "lo')
    book = started(tmp_path, resume=True)
    book.write_line(2, {"loss": 9}, {})
    assert [row["loss"] for row in strict(tmp_path / "metrics.jsonl")] == [0, 1, 9]
    assert len(strict(tmp_path / "timing.jsonl")) == 3
    (tmp_path / "checkpoints" / "step_000002").rename(tmp_path / "gone")
    started(tmp_path, resume=True)
    assert not (tmp_path / "metrics.jsonl").read_text()


def test_result(tmp_path):
    book = Run(sft.settle(sft.Config(output_dir=str(tmp_path))), "sft")
    assert not list(load(book, 0))
    result = book.finish({"loss": float("nan")}, held_out_loss=float("inf"))
    assert result == json.loads((tmp_path / "result.json").read_text())
    assert result["after"] == {"loss": None} and result["held_out_loss"] is None and result["steps"] == 0


def test_the_result_is_written_before_anything_is_printed(tmp_path, monkeypatch):
    """What is printed may fail: nobody reads the output, or an environment has taken the folder away."""
    def fails(*_):
        raise BrokenPipeError
    run = Run(sft.settle(sft.Config(output_dir=str(tmp_path))), "sft")
    load(run, 0)
    monkeypatch.setattr(Run, "show_result", fails)
    with pytest.raises(BrokenPipeError):
        run.finish({"loss": 1.0})
    assert json.loads((tmp_path / "result.json").read_text())["after"] == {"loss": 1.0}


# -- checkpoints -------------------------------------------------------------------------------------------------------

def small_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))


def update(model, optimizer, seed):
    optimizer.zero_grad()
    model(torch.randn(5, 3, generator=torch.Generator().manual_seed(seed))).pow(2).sum().backward()
    optimizer.step()


def test_save(tmp_path):
    book, model = started(tmp_path), small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    update(model, optimizer, 1)
    assert newest_checkpoint(tmp_path) is None
    path = save(book, 7, optimizer=optimizer)
    assert path == tmp_path / "checkpoints/step_000007" == newest_checkpoint(str(tmp_path))
    state = read_state(path)
    assert (state["step"], state["algorithm"], state["before"]) == (7, "grpo", {})
    assert sorted(state["files"]) == ["model.safetensors", "optimizer.safetensors", "tokenizer.json"]
    assert state["files"]["tokenizer.json"]["bytes"] == 2
    assert {file.stat().st_mode for file in path.iterdir()} == {(tmp_path / "config.yaml").stat().st_mode}
    save(book, 7)                                                           # what stands there is renamed
    assert read_state(path)["files"] != state["files"]
    assert read_state(tmp_path / "checkpoints/step_000007.1") == state
    for step in (1000000, 999999):
        save(book, step)
    (tmp_path / "checkpoints/step_2000000").mkdir()                         # without a state.json it is none
    assert newest_checkpoint(tmp_path).name == "step_1000000"


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EBADF])
def test_a_file_system_that_cannot_flush_a_folder_gets_checkpoints(tmp_path, monkeypatch, number):
    """CIFS and VirtualBox answer EINVAL, Docker's folders of a Mac EBADF: the first checkpoint ended the run. A file that is not flushed still does."""
    def fsync(handle):
        if stat.S_ISDIR(os.fstat(handle).st_mode) or broken:
            raise OSError(number, os.strerror(number))
    broken = False
    monkeypatch.setattr(os, "fsync", fsync)
    book = started(tmp_path)
    read_state(save(book, 1))
    broken = True
    gc.collect()  # the locks of earlier runs
    handles = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match=os.strerror(number)):
        save(book, 2)
    assert newest_checkpoint(tmp_path).name == "step_000001" and len(os.listdir("/proc/self/fd")) == handles


def test_a_file_system_without_modes_gets_checkpoints(tmp_path, monkeypatch):
    """WSL's /mnt/c and shared folders may answer EPERM to chmod: the first checkpoint ended the run."""
    def chmod(*_, **__):
        raise PermissionError(errno.EPERM, "Operation not permitted")
    monkeypatch.setattr(Path, "chmod", chmod)
    read_state(save(started(tmp_path), 1))


@pytest.mark.parametrize("fault", [RuntimeError, KeyboardInterrupt, OSError])
def test_a_save_that_fails_leaves_nothing(tmp_path, fault):
    book = started(tmp_path)
    good = save(book, 1)

    def broken(folder):
        weights(folder)
        raise fault("killed")
    for step in (1, 2):
        with pytest.raises(fault):
            save(book, step, broken)
    assert os.listdir(tmp_path / "checkpoints") == ["step_000001"] and read_state(good)["step"] == 1


def test_a_damaged_checkpoint_is_named(tmp_path):
    path = save(started(tmp_path), 1)
    data = bytearray((path / "model.safetensors").read_bytes())
    data[-1] ^= 1                                     # safetensors itself would load this silently
    (path / "model.safetensors").write_bytes(data)
    with pytest.raises(UserError, match="step_000001/model.safetensors: damaged"):
        read_state(path)
    (path / "model.safetensors").unlink()
    with pytest.raises(UserError, match="step_000001/model.safetensors: No such file or directory"):
        read_state(path)


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"foreach": True}])
def test_optimizer_goes_on_as_if_never_stopped(tmp_path, options):
    from safetensors.torch import save_file
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
    for seed in range(3):
        update(model, optimizer, seed)
    saved = optimizer_tensors(optimizer)
    assert {"0|exp_avg", "0|exp_avg_sq", "3|step"} <= set(saved)
    save_file(saved, tmp_path / "optimizer.safetensors")
    other = small_model()
    other.load_state_dict(model.state_dict())
    fresh = torch.optim.AdamW(other.parameters(), lr=0.1, **options)
    load_optimizer(fresh, tmp_path / "optimizer.safetensors")
    for seed in range(3, 6):
        update(model, optimizer, seed)
        update(other, fresh, seed)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters()))


def test_the_8_bit_adam_of_bitsandbytes_goes_on_too(tmp_path):
    from bitsandbytes.optim import AdamW8bit
    from safetensors.torch import save_file
    models = small_model(), small_model()
    ours, fresh = (AdamW8bit(m.parameters(), lr=0.1, min_8bit_size=16) for m in models)
    update(models[0], ours, 0)
    save_file(optimizer_tensors(ours), tmp_path / "optimizer.safetensors")
    models[1].load_state_dict(models[0].state_dict())
    load_optimizer(fresh, tmp_path / "optimizer.safetensors")
    for model, optimizer in zip(models, (ours, fresh)):
        update(model, optimizer, 1)
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters()))


def test_commands_are_found_from_another_folder(tmp_path, monkeypatch):
    from extras.show.notes import next_command, path_of
    monkeypatch.chdir(tmp_path)
    command = shlex.split(next_command(path_of("agent.py"), sft.Config()))
    assert Path(command[1]).resolve() == Path(sft.__file__).with_name("agent.py")


def test_a_pipe_that_head_has_closed_ends_a_program_in_one_line():
    words = f"{shlex.quote(sys.executable)} -m extras.check equations | head -1"
    done = subprocess.run(words, shell=True, cwd=Path(sft.__file__).parent, capture_output=True, text=True)
    assert done.stderr == "check.py: nobody reads the output\n"


@pytest.mark.parametrize("closed", [">&-", "2>&-"])
def test_a_closed_output_is_answered_in_a_line(closed):
    """`python grpo.py --help >&-` was an AttributeError. A log that is opened next would get the number of what is closed."""
    words = f"{shlex.quote(sys.executable)} grpo.py --help {closed}"
    done = subprocess.run(words, shell=True, cwd=Path(sft.__file__).parent, capture_output=True, text=True)
    line = "grpo.py: standard output or standard error is closed; redirect it, for instance to /dev/null\n"
    assert (done.returncode, done.stdout + done.stderr) == (2, line)


def test_a_loss_that_is_registered_from_outside_is_a_choice(monkeypatch):
    monkeypatch.setitem(grpo.LOSSES, "mine", grpo.LOSSES["grpo"])
    assert parse(grpo.Config, ["--loss", "mine"]).loss == "mine"


def test_optimizer_files_that_do_not_fit(tmp_path):
    from safetensors.torch import save_file
    path, model = tmp_path / "optimizer.safetensors", small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(UserError, match="optimizer.safetensors: .*[Nn]o such file"):
        load_optimizer(optimizer, path)
    saved = optimizer_tensors(optimizer)     # no state yet, no complaint
    save_file(saved, path)
    load_optimizer(optimizer, path)
    assert not optimizer.state
    update(model, optimizer, 0)
    path.write_bytes(b"version https://git-lfs")
    with pytest.raises(UserError, match="optimizer.safetensors: cannot be read"):
        load_optimizer(optimizer, path)


# -- numbers -----------------------------------------------------------------------------------------------------------

def test_mix():
    assert mix(0, 1, "task", 2) == 208114185031139582      # the same on every machine and Python
    parts = [(0, 1, 2), (0, 2, 1), (1, 0, 2), ("0", 1, 2), (0, 12), (0, 1, 2, 0), (0.0, 1, 2)]
    seeds = [mix(*part) for part in parts]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**63 for seed in seeds)
    ones = [sum(mix(seed, step) >> bit & 1 for seed in range(40) for step in range(50)) for bit in range(63)]
    assert all(850 < count < 1150 for count in ones)                         # 1000 expected, 6.7 sigma


def test_peak_memory():
    code = "from core.run import peak_memory_mb; a = peak_memory_mb(); b = b'x' * (200 << 20); del b; print(a, peak_memory_mb())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    before, after = map(float, done.stdout.split())     # in MiB, and not counting this process
    assert 5 < before < 900 and 195 < after - before < 215


def test_a_policy_that_is_cut_or_calls_no_tool_is_told_before_the_first_step():
    from types import SimpleNamespace

    from extras.show.notes import first_notes
    config = SimpleNamespace(max_new_tokens=64, max_tokens=512)
    model = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=512))
    cut, sft_first = first_notes({"truncated": 0.88, "actions": 0.0, "structure": 0.125}, config, model, True, True)
    assert "88%" in cut and "--max_new_tokens 64" in cut and "--max_tokens 512" in cut
    assert sft_first.endswith("SFT first: sft.py with the same --model_path and --env")
    assert first_notes({"truncated": 0.1, "actions": 2.0, "structure": 0.9}, config, model, True, True) == [] == first_notes({}, config, model, True, True)
    assert first_notes({}, config, SimpleNamespace(config=SimpleNamespace()), True, True) == []
    model.config.max_position_embeddings = 511
    assert first_notes({}, config, model, True, True) == ["note: --max_tokens 512 is more than the 511 tokens that the model was made for (max_position_embeddings)"]


@pytest.mark.parametrize("words", ["-m extras.show ü.jsonl", pytest.param("lora.py merge tiny ü", marks=pytest.mark.slow)])
def test_programs_with_a_main_of_their_own_print_to_an_ascii_terminal_and_no_bars(words, tmp_path):
    """`lora.py merge` ended with a UnicodeEncodeError before it had merged, where a path had an umlaut."""
    (tmp_path / "ü.jsonl").write_text("")
    command = [sys.executable, *words.replace("lora.py", str(ROOT / "lora.py")).split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0 and "\\xfc" in done.stdout, done.stderr
    assert "%|" not in done.stderr  # transformers' bars, which only a terminal gets


@pytest.mark.parametrize("tasks, per_step, epochs, steps", [(10, 8, 1, 2), (15, 8, 8, 15), (16, 8, 3, 6), (11, 10, 10, 11), (4, 8, 10, 5), (1, 8, 1, 1)])
def test_num_epochs_is_passes_over_all_tasks(tasks, per_step, epochs, steps):
    """15 tasks, 8 a step: 8 epochs once were 8 steps, little more than 4 passes."""
    assert steps_of(SimpleNamespace(max_steps=None, num_epochs=epochs), tasks / per_step, 36) == steps
