"""Signals leave where nothing is lost; numbers that are not finite never reach the weights."""
import json
import os
import re
import shlex
import shutil
import signal
import threading
import time
import weakref
from pathlib import Path

import programs
import pytest
import torch
from programs import Program
from safetensors.torch import load_file
from saving import load, newest_checkpoint
from test_resume import CASES, assert_equal, config, place, rewarded  # noqa: F401  (place is a fixture)

import schooling
import dpo
import grpo
import reward_weighted
import sft
from agent import Trajectory, rollout
from core import run
from core import run as core_run
from extras.show.notes import Alarms, alarms
from core.model import checkpoints
from core.config import options
from extras.stop import Stop
from core.run import OneProcess
from layers import Run
from extras.exact.process import Signals
from extras.show import run as show_run
from core.engine import Engine

ROOT = Path(run.__file__).parent.parent


def options_of(name, place):  # noqa: F811
    module, options = CASES[name]
    return module, {k: str(place / v) if v in ("adapter", "episodes.jsonl") else v for k, v in options.items()} | {
        "eval_tasks": 0, "max_steps": 3}


def paid(monkeypatch, module):
    if hasattr(module, "rollout"):
        monkeypatch.setattr(module, "rollout", lambda *args, **options: rewarded(rollout(*args, **options)))


@pytest.fixture(scope="module")
def whole(place, tmp_path_factory):  # noqa: F811
    """-> whole(name, module, options): the folder of a run that nothing stops, made once for all tests that compare with it."""
    made = {}

    def folder_of(name, module, options):
        if name not in made:
            made[name] = tmp_path_factory.mktemp("whole") / "run"
            module.train(config(module, place, made[name], **options))
        return made[name]
    return folder_of


def steps_of(folder):
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def at(monkeypatch, place, name, when, signum):  # noqa: F811
    """Before the call of `name` for which when(number of the call) is true, the signal comes."""
    calls, whole = [0], getattr(place, name)

    def called(*args, **kwargs):
        calls[0] += 1
        if when(calls[0]):
            os.kill(os.getpid(), signum)
        return whole(*args, **kwargs)
    monkeypatch.setattr(place, name, called)
    return calls


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize("name, target, call, signum, done", [
    ("sft, full", (core_run, "mix"), 7, signal.SIGTERM, 1),                  # after four of held-out data: first micro-batch of step 1
    slow("sft, full", (core_run, "mix"), 8, signal.SIGTERM, 1),              # its second one
    ("grpo, LoRA", (Engine, "step"), 2, signal.SIGINT, 0),                # a decode step of step 0's rollout
    slow("grpo, LoRA", (grpo, "token_advantages"), 2, signal.SIGINT, 1),                  # after step 1's episodes were written
    ("grpo, LoRA", (grpo, "clip_grad_norm_"), 4, signal.SIGTERM, 2),     # step 1's second update
    ("grpo, LoRA", (core_run, "optimizer_tensors"), 1, signal.SIGTERM, 1),             # saving after step 0
    slow("dpo, full", (core_run, "mix"), 3, signal.SIGTERM, None),
    slow("reward_weighted, LoRA", (Engine, "step"), 3, signal.SIGTERM, 0),
    slow("reward_weighted, LoRA", (Engine, "step"), 9, signal.SIGTERM, None),         # in the second iteration's
    ("reward_weighted, LoRA", (reward_weighted, "reward_weighted_loss"), 3, signal.SIGINT, 1),
], ids=str)
def test_a_signal_discards_the_step_before_its_first_update_and_finishes_it_after(
        place, whole, tmp_path, monkeypatch, name, target, call, signum, done):  # noqa: F811
    module, options = options_of(name, place)
    paid(monkeypatch, module)
    a, b = whole(name, module, options), tmp_path / "stopped"
    again = config(module, place, tmp_path / "stopped", **options, save_every=int(target[1] == "optimizer_tensors"))
    with monkeypatch.context() as patch:
        calls = at(patch, *target, lambda number: number == call, signum)
        with Signals(), pytest.raises(Stop) as caught:
            module.train(again)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert caught.value.code == 128 + signum and f"stopped by {signum.name} after step" in str(caught.value)
    assert f"{module.__name__}.py --config {tmp_path}/stopped/config.yaml --resume" in str(caught.value)
    steps = [int(path.name[5:]) for path in checkpoints(tmp_path / "stopped")]
    assert done is None or steps[-1] == done, steps
    assert target[1] != "step" or calls[0] == call, "decoding went on after the signal"
    again.resume, again.save_every = True, 1
    module.train(again)
    assert newest_checkpoint(a).name == newest_checkpoint(b).name
    for folder in (a, b):
        for path in checkpoints(folder)[:-1]:
            shutil.rmtree(path)  # at which steps was saved may differ
    assert_equal(a, b)


def test_dpo_that_was_stopped_in_its_first_step_does_not_play_again(place, tmp_path, monkeypatch):  # noqa: F811
    module, options = options_of("dpo, plays", place)
    paid(monkeypatch, module)
    again = config(module, place, tmp_path / "stopped", **options)
    with monkeypatch.context() as patch:
        at(patch, core_run, "mix", lambda number: number == 1, signal.SIGTERM)
        with Signals(), pytest.raises(Stop):
            module.train(again)
    played = (tmp_path / "stopped" / "trajectories.jsonl").read_bytes()
    assert [path.name for path in checkpoints(tmp_path / "stopped")] == ["step_000000"] and played
    monkeypatch.setattr(module, "rollout", lambda *_, **__: pytest.fail("played again"))
    again.resume = True
    module.train(again)
    assert (tmp_path / "stopped" / "trajectories.jsonl").read_bytes() == played


def test_a_signal_outside_the_loop_leaves_at_once(place, tmp_path, monkeypatch):  # noqa: F811
    """While the tiny model is taught, too."""
    at(monkeypatch, schooling, "token_logprobs", lambda number: number == 2, signal.SIGTERM)
    monkeypatch.setattr(schooling, "TINY_SFT", {**schooling.TINY_SFT, "max_samples": 8, "max_steps": 3, "batch_size": 4})
    with Signals(), pytest.raises(Stop, match="grpo.py --config .* --resume") as caught:
        grpo.train(config(grpo, place, tmp_path, model_path="tiny", max_steps=1))
    assert caught.value.code == 143


def test_a_signal_before_the_run_has_begun_names_no_command(place, tmp_path, monkeypatch):  # noqa: F811
    """There is no config.yaml yet, or that of the run to be overwritten."""
    at(monkeypatch, sft, "load_model", lambda number: number == 1, signal.SIGINT)
    with Signals(), pytest.raises(Stop) as caught:
        sft.train(config(sft, place, tmp_path / "run", max_steps=1))
    assert str(caught.value) == "stopped by SIGINT" and not (tmp_path / "run" / "config.yaml").exists()


def test_a_second_signal_leaves_at_once():
    code = ("import os, signal\nfrom extras.exact.process import Signals\nwith Signals() as s:\n    s.looping = s.run = type('R', (), {})\n"
            "    os.kill(os.getpid(), 2)\n    print('one', flush=True)\n    os.kill(os.getpid(), 2)\n    print('two')")
    done = programs.run("-c", code)
    assert (done.returncode, done.stdout) == (130, "one\n") and "a second signal stops at once" in done.stderr


def test_in_another_thread_signals_stay_as_they_are():
    before, seen = signal.getsignal(signal.SIGINT), []

    def work():
        with Signals():
            seen.append(signal.getsignal(signal.SIGINT))
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]


def wait_for_lines(program, folder):
    while not (folder / "metrics.jsonl").exists():
        assert program.poll() is None
        time.sleep(0.05)


def test_the_printed_command_goes_on(place, tmp_path):  # noqa: F811
    words = f"--model_path {place}/base --max_samples 20 --batch_size 4 --max_steps 4000 --eval_tasks 0 --lora_r 2"
    first = Program(ROOT / "sft.py", *words.split(), "--output_dir", "r", cwd=tmp_path)
    wait_for_lines(first, tmp_path / "r")
    first.send_signal(signal.SIGTERM)
    _, errors = first.communicate()
    assert first.returncode == 143 and "Traceback" not in errors
    command = re.search(r"stopped by SIGTERM after step (\d+); continue with: (python .*)", errors)
    assert newest_checkpoint(tmp_path / "r").name == f"step_{int(command[1]):06d}"
    config_file = tmp_path / "r" / "config.yaml"
    last = int(command[1]) + 2
    config_file.write_text(config_file.read_text().replace("max_steps: 4000", f"max_steps: {last}"))
    done = programs.run(*shlex.split(command[2])[1:], cwd=tmp_path)
    assert done.returncode == 0 and steps_of(tmp_path / "r") == list(range(last)), done.stderr


# ------------------------------------------------------------------------------------------------------------ numbers
NAMES = ["sft, full", "grpo, LoRA", "dpo, full", "reward_weighted, LoRA"]


def spoil(monkeypatch, module, steps):
    """In these updates (counted from 0) the gradient is NaN."""
    calls, clip = [-1], torch.nn.utils.clip_grad_norm_

    def spoilt(weights, limit):
        weights = [p for p in weights if p.grad is not None]
        calls[0] += 1
        if calls[0] in steps:
            weights[0].grad[0] = torch.nan
        return clip(weights, limit)
    monkeypatch.setattr(module, "clip_grad_norm_", spoilt)


def test_each_line_holds_the_evaluation_of_the_policy_before_its_step(place, tmp_path, monkeypatch):  # noqa: F811
    """The first one is that before training, and the last one, after training, is in no line."""
    evaluated, evaluate = [], grpo.evaluate
    monkeypatch.setattr(grpo, "evaluate", lambda *a, **k: evaluated.append(1) or evaluate(*a, **k))
    result = grpo.train(config(grpo, place, tmp_path, max_steps=2, eval_every=1, eval_tasks=2))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(evaluated) == 3 and ["eval/success" in line for line in lines] == [False, True]
    assert result["before"]["success"] == result["success_before"] and result["after"]["success"] == result["success_after"]


@pytest.mark.parametrize("name", NAMES)
def test_an_update_that_is_not_finite_is_skipped_and_its_episodes_are_kept(place, tmp_path, monkeypatch, capfd, name):  # noqa: F811
    module, options = options_of(name, place)
    paid(monkeypatch, module)
    updates = options.get("updates_per_step", 2 if module is reward_weighted else 1)
    spoil(monkeypatch, module, range(updates, 2 * updates))
    module.train(config(module, place, tmp_path, **options))
    # step 1 changed nothing: save_every is 1, and the last two checkpoints are after steps 1 and 2
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["grad_norm"] is None for line in lines] == [False, True, False]
    assert "step 2: loss" in capfd.readouterr().out
    bad = json.loads((tmp_path / "bad_step_1.json").read_text())
    assert bad["step"] == 1 and "gradient norm nan" in bad["why"]
    assert all(len(t["token_ids"]) > 8 for t in bad["episodes"])


@pytest.mark.parametrize("name", NAMES)
def test_weights_and_optimizer_are_unchanged_and_the_third_in_a_row_stops(place, tmp_path, monkeypatch, name):  # noqa: F811
    module, options = options_of(name, place)
    paid(monkeypatch, module)
    updates = options.get("updates_per_step", 2 if module is reward_weighted else 1)
    spoil(monkeypatch, module, range(updates, 99))
    with pytest.raises(Stop, match="gradient norm nan: the third update in a row .*--model_path") as caught:
        module.train(config(module, place, tmp_path, **{**options, "max_steps": 5, "num_epochs": 1 if module is reward_weighted else 3}))
    assert caught.value.code == 3
    first, second = checkpoints(tmp_path)[:2]
    for file in first.glob("*.safetensors"):
        a, b = load_file(file), load_file(second / file.name)
        assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) and torch.isfinite(a[k]).all() for k in a), file
    assert any(v.any() for k, v in load_file(first / "optimizer.safetensors").items() if k.endswith("exp_avg"))


@pytest.mark.parametrize("name", NAMES)
def test_a_loss_that_is_not_finite_is_skipped_too(place, tmp_path, monkeypatch, name):  # noqa: F811
    module, options = options_of(name, place)
    paid(monkeypatch, module)
    updates = options.get("updates_per_step", 2 if module is reward_weighted else 1)
    calls, whole = [0], OneProcess.all_reduce

    def spoilt(self, model, metrics):
        calls[0] += 1
        return whole(self, model, metrics) | ({"loss": float("inf")} if calls[0] > 2 * updates else {})
    monkeypatch.setattr(OneProcess, "all_reduce", spoilt)
    module.train(config(module, place, tmp_path, **options))
    assert "loss inf" in json.loads((tmp_path / "bad_step_2.json").read_text())["why"]
    first, second = checkpoints(tmp_path)[-2:]
    assert all((second / file.name).read_bytes() == file.read_bytes() for file in first.glob("*.safetensors"))


def test_three_updates_in_a_row_end_a_run_and_not_three_in_all(tmp_path):
    book, weight = Run(sft.settle(sft.Config(output_dir=str(tmp_path))), "sft"), torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight])
    for step in load(book, 5, optimizer=optimizer):
        if step == 2:
            weight.grad = torch.ones(2)
            optimizer.step()
            assert book.updated
        else:
            book.skip([Trajectory(token_ids=[1], reward=1.0)], "loss nan")
        book.end_step(step)
        assert book.bad == (1, 2, 0, 1, 2)[step]
    assert sorted(path.name for path in tmp_path.glob("bad*")) == [f"bad_step_{step}.json" for step in (0, 1, 3, 4)]


ENVIRONMENT = '''
class W:
    """Pays as its task says."""
    def reset(self, pay=1.0, **_):
        self.pay = pay
        return "x"
    def look(self) -> str:
        """Look."""
        return "y"
    def get_reward(self):
        W.n = getattr(W, "n", 0) + 1
        return float(self.pay) * (W.n % 3)
    @staticmethod
    def _tasks(split, n, seed):
        return [{"pay": ["PAY", 1.0][i % 2]} for i in range(n)]
'''


@pytest.mark.parametrize("pay", ["nan", "inf"])
@pytest.mark.parametrize("module", [grpo, reward_weighted])
def test_rewards_that_are_not_finite_skip_their_step_and_the_third_in_a_row_stops(place, tmp_path, module, pay):  # noqa: F811
    (tmp_path / "w.py").write_text(ENVIRONMENT.replace("PAY", pay).replace("i % 2", "0"))
    steps = dict(max_steps=5, tasks_per_step=2)
    with pytest.raises(Stop, match=r"get_reward\(\) .*is (nan|inf).*not finite: the third update in a row") as caught:
        module.train(config(module, place, tmp_path / "o", env=f"{tmp_path}/w.py:W", lora_r=2, **{**steps, "eval_tasks": 0}))
    assert caught.value.code == 3
    bad = [json.loads(path.read_text()) for path in sorted((tmp_path / "o").glob("bad_step_*.json"))]
    assert len(bad) == 3 and all(None in [t["reward"] for t in step["episodes"]] for step in bad)
    for path in checkpoints(tmp_path / "o"):
        tensors = load_file(path / "adapter_model.safetensors")
        assert not any(v.any() for k, v in tensors.items() if "lora_B" in k) and all(v.isfinite().all() for v in tensors.values())
    assert not (tmp_path / "o" / "trajectories.jsonl").exists()  # no trainer may read them


def test_dpo_leaves_out_episodes_whose_reward_is_not_finite(place, tmp_path, capfd):  # noqa: F811
    (tmp_path / "w.py").write_text(ENVIRONMENT.replace("PAY", "nan"))
    options = dict(env=f"{tmp_path}/w.py:W", lora_r=2, num_tasks=4, max_steps=1, eval_tasks=0)
    dpo.train(config(dpo, place, tmp_path / "o", **options))
    assert re.search(r"6 of 12 episodes left out; the first: .*get_reward\(\).* is nan.*not finite", capfd.readouterr().out)
    assert len(json.loads((tmp_path / "o" / "preference_pairs.json").read_text())) == 2


@pytest.mark.parametrize("name", ["grpo, LoRA", "reward_weighted, LoRA"])
def test_logits_that_are_not_finite_skip_the_step(place, tmp_path, monkeypatch, capfd, name):  # noqa: F811
    """The head gives a NaN throughout the second rollout: the first and the third step are learnt from."""
    module, options = options_of(name, place)
    played, count = rollout, [0]

    def spoilt(model, *args, **how):
        count[0] += 1
        if count[0] != 2:
            return rewarded(played(model, *args, **how))
        head = model.get_output_embeddings().weight
        before = head.data.clone()
        head.data[5] = torch.nan
        try:
            return played(model, *args, **how)
        finally:
            head.data.copy_(before)
    monkeypatch.setattr(module, "rollout", spoilt)
    module.train(config(module, place, tmp_path, **{**options, "max_steps": 3}
                        if module is reward_weighted else options))
    assert "the model's logits are not finite while decoding" in capfd.readouterr().out
    bad, = tmp_path.glob("bad_step_*.json")
    assert json.loads(bad.read_text())["episodes"][0]["reward"] is None
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    assert [row["step"] for row in rows] == sorted({row["step"] for row in rows}) and sum("loss" in row for row in rows) >= 2


# ------------------------------------------------------------------------------------------------------------- alarms
HEALTHY = {"success": 0.5, "success/code": 0.4, "success/search": 0.1, "entropy": 0.07, "approx_kl": 0.0, "kl": 0.01, "sampled_tokens": 36.0, "actions": 3.6, "groups_without_signal": 0.1, "truncated": 0.0, "structure": 0.9}


@pytest.mark.parametrize("late, kinds", [
    ({}, []), ({"entropy": 0.017, "success": 0.98, "groups_without_signal": 0.85, "actions": 2.8, "sampled_tokens": 29.0}, []),  # a run that learnt
    ({"entropy": 0.01}, ["entropy"]), ({"entropy": 3.0}, ["noise"]), ({"approx_kl": 0.3}, ["approx_kl"]), ({"kl": 2.0}, ["kl"]),
    ({"sampled_tokens": 80.0}, ["longer"]), ({"sampled_tokens": 9.0}, ["shorter"]), ({"sampled_tokens": 80.0, "success": 0.9}, []),
    ({"actions": 0.2}, ["tools"]), ({"groups_without_signal": 0.95}, ["signal"]), ({"groups_without_signal": 1.0, "success": 0.0}, ["signal", "success"]),
    ({"success/code": 0.0}, ["success/code"]), ({"success/code": 0.1}, []), ({"success/search": 0.0}, []), ({"success/code": None}, []),
    ({"truncated": 0.88}, ["truncated"]), ({"structure": 0.05}, ["structure"]),
    ({"entropy": None, "kl": float("nan"), "actions": None}, [])], ids=str)
def test_alarms(late, kinds):
    found = alarms([HEALTHY] * 5, [{**HEALTHY, **late}] * 5)
    assert list(found) == kinds
    for words in found.values():
        line = Alarms(options(grpo.Config), has_expert=True).sentence(*words)
        assert "\n" not in line and "people " in line and len(line) < 250
        flags = set(re.findall(r"--(\w+)", line))
        assert flags <= set(options(grpo.Config)), flags


def test_alarms_need_no_name_of_a_metric():
    assert alarms([{}] * 5, [{}] * 5) == alarms([{"loss": 1.0}] * 5, [{"loss": 1.0}] * 5) == {}


def test_each_alarm_is_one_line_told_once_also_after_resuming(tmp_path, capsys):
    for total in (12, 20):
        book = Run(sft.settle(sft.Config(output_dir=str(tmp_path), max_steps=total, resume=True)), "sft")
        for step in load(book, total):
            book.log(**{**HEALTHY, "entropy": 0.07 if step < 6 else 0.001, "actions": 3.0 if step < 10 else 0.0})
            book.end_step(step)
    alarms = [line for line in capsys.readouterr().out.splitlines() if "ALARM" in line]
    assert [re.sub(" fell.*", "", line) for line in alarms] == ["ALARM, step 10: entropy", "ALARM, step 14: tool calls an episode"]


# ------------------------------------------------------------------------------------------- whatever ends a run saves it
FAULTS = [RuntimeError("broken"), KeyboardInterrupt(), MemoryError(), BrokenPipeError(32, "Broken pipe"), SystemExit(1)]
PLACES = [
    ((grpo, "token_logprobs"), 3, 1),                        # the first micro-batch of step 1 (two updates of one each)
    ((grpo, "clip_grad_norm_"), 3, 1),                       # before the first update of step 1
    ((run.Run, "write_line"), 2, 2),                         # after step 1, whose line is not written yet
    ((run.Run, "append"), 7, 2),                             # its timing, after its episodes and its line
    ((run.Run, "append"), 8, 2),                             # its tokens
    ((show_run.Run, "show_step"), 2, 2),
    ((run.Run, "save"), 2, 2),
    ((grpo, "evaluate"), 2, 3)]                              # the last evaluation, after the last checkpoint


@pytest.mark.parametrize("fault, target, call, saved", [*((FAULTS[0], *p) for p in PLACES), *(slow(fault, *PLACES[1]) for fault in FAULTS[1:-1]), (FAULTS[-1], *PLACES[1])], ids=str)
def test_any_error_saves_the_last_whole_step_and_resuming_is_never_having_stopped(
        place, whole, tmp_path, monkeypatch, fault, target, call, saved):  # noqa: F811
    module, options = options_of("grpo, LoRA", place)
    paid(monkeypatch, module)
    options |= {"batch_size": 16, "updates_per_step": 2, "kl_coef": 0.0, "eval_every": 0}
    unstopped = whole("grpo, one micro-batch", module, options)
    again = config(module, place, tmp_path / "stopped", **options, save_every=3 if target[1] != "save" else 1)
    owner, name = target
    with monkeypatch.context() as patch:
        calls, unbroken = [0], getattr(owner, name)

        def broken(*args, **kwargs):
            calls[0] += 1
            if calls[0] == call:
                raise fault
            return unbroken(*args, **kwargs)
        patch.setattr(owner, name, broken)
        with pytest.raises(type(fault)) as caught:
            module.train(again)
    assert newest_checkpoint(tmp_path / "stopped").name == f"step_{saved:06d}"
    assert f"step {saved} is saved; continue with: python grpo.py --config" in caught.value.__notes__[-1]
    again.resume = True
    module.train(again)
    for folder in (unstopped, tmp_path / "stopped"):
        for path in checkpoints(folder)[:-1]:
            shutil.rmtree(path)
    assert_equal(unstopped, tmp_path / "stopped")


def test_an_error_between_two_updates_saves_no_half_step_and_says_so(place, whole, tmp_path, monkeypatch):  # noqa: F811
    module, options = options_of("grpo, LoRA", place)
    paid(monkeypatch, module)
    unstopped, clip, calls = whole("grpo, LoRA", module, options), grpo.clip_grad_norm_, [0]

    def broken(*args):
        calls[0] += 1
        if calls[0] == 4:  # the second update of step 1
            raise RuntimeError("broken")
        return clip(*args)
    again = config(module, place, tmp_path / "stopped", **options)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError) as caught:
        patch.setattr(grpo, "clip_grad_norm_", broken)
        module.train(again)
    assert caught.value.__notes__[-1].startswith("half a step is lost, step 1 is saved; continue with: python grpo.py")
    again.resume = True
    module.train(again)
    for folder in (unstopped, tmp_path / "stopped"):
        for path in checkpoints(folder)[:-1]:
            shutil.rmtree(path)
    assert_equal(unstopped, tmp_path / "stopped")


def test_a_closed_terminal_ends_a_run_that_saves(place, tmp_path):  # noqa: F811
    words = f"--model_path {place}/base --max_samples 20 --batch_size 4 --max_steps 4000 --eval_tasks 0 --lora_r 2 --output_dir r"
    first = Program(ROOT / "sft.py", *words.split(), cwd=tmp_path)
    wait_for_lines(first, tmp_path / "r")
    first.send_signal(signal.SIGHUP)
    first.communicate()
    assert first.returncode == 129 and newest_checkpoint(tmp_path / "r") and steps_of(tmp_path / "r")


def test_nohup_keeps_ignoring_sighup():
    code = ("import os, signal\nfrom extras.exact.process import Signals\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
            "with Signals():\n    os.kill(os.getpid(), signal.SIGHUP)\nprint('went on')")
    done = programs.run("-c", code)
    assert done.stdout == "went on\n"


def test_a_signal_in_a_callback_of_a_weak_reference_ends_the_program_too(capsys):
    """Python prints what such a callback raises and goes on: Ctrl-C during the schooling was lost in torch's."""
    class Object:
        pass
    thing = Object()
    reference = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGINT))
    with pytest.raises(Stop, match="^stopped by SIGINT$") as stopped, Signals():
        del thing
        assert reference() is None
        time.sleep(5)
    assert stopped.value.code == 130 and capsys.readouterr().err == ""
