"""What a run prints, in a terminal and elsewhere: its plan, a bar, a line a step, advice, the table at the end."""
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading
import time
from types import SimpleNamespace

import programs
import pytest

import core.config
import schooling
import distill
import dpo
import grpo
import reward_weighted
import sft
from agent import Trajectory
from envs.tasks import train_and_held_out
from core.run import headline
from extras.show import bars
from extras.show import notes
from core.config import options, progress
from layers import Run, make_engine
from extras.stop import Stop
from extras.exact.process import Signals
from core.engine import Row
from core.tiny import make_tiny
from layers import Run, make_engine

SMALL = ["--env", "equations", "--lora_r", 2, "--dtype", "float32", "--max_tokens", 256, "--max_new_tokens", 16, "--max_turns", 2, "--eval_tasks", 3]
STEPS = ["--max_steps", 2, "--tasks_per_step", 2, "--group_size", 2]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("base"))
    for part in make_tiny():
        part.save_pretrained(folder)
    return folder


# ----------------------------------------------------------------------------------------------------- what is printed
def test_a_reward_that_was_not_finite_hinders_no_report():
    assert headline({"success": 0.5, "reward": None}) == "success 0.500"


def test_a_pipe_gets_a_line_a_step_and_no_bars(base, tmp_path):
    words = ["grpo.py", "--model_path", base, *SMALL, *STEPS, "--kl_coef", 0.1, "--eval_every", 1, "--output_dir", tmp_path / "r"]
    done = programs.run(*words)
    assert (done.returncode, done.stderr) == (0, "") and "\r" not in done.stdout and "\x1b" not in done.stdout
    number = r"-?[\d.e-]+ *"
    lines = [line for line in done.stdout.splitlines() if not line.startswith("note: ")]
    assert re.fullmatch(r"\S+: Qwen3ForCausalLM: training and decoding checked in \d+\.\d s", lines.pop(0))
    assert lines[:2] == ["training: 2 steps, each of 2 tasks x 2 episodes of at most 256 tokens", "playing 3 episodes: at most 256 tokens each, 16 a turn"]
    assert re.fullmatch(r"before: success \d.\d{3}, reward -?\d.\d{3}", lines[2])
    for step, line in ((1, lines[3]), (2, lines[5])):
        assert re.fullmatch(rf"step {step}/2 success {number} reward {number} entropy {number} kl {number} [\d.]+ s, [\d.]+ s left", line), line
        assert len(line) <= 80
    assert lines[4].startswith("after step 1: success ")
    example, table = (part.splitlines() for part in done.stdout.rpartition("\nwritten: ")[0].split("\n\n")[-2:])
    assert example[0] == "held-out task 1" and example[1].startswith("User: Solve for x: ") and example[2].count(" | ") == 1
    assert all(len(line) <= 80 for line in example)
    assert table[0].startswith("held out: 3 tasks; trained: 2 steps, ") and table[1].split() == ["before", "after", "95", "%", "interval"]
    assert [line.split()[0] for line in table[2:]] == ["success", "reward", "actions", "structure", "completion", "truncated", "tool_errors"]
    assert all(len(line) <= 80 for line in table)


@pytest.mark.slow
def test_a_terminal_gets_a_bar_from_the_first_token(base, tmp_path):
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 100))
    words = ["grpo.py", "--model_path", base, *SMALL, *STEPS, "--max_steps", 1, "--output_dir", tmp_path / "r"]
    program = subprocess.Popen([sys.executable, *map(str, words)], stdout=subprocess.PIPE, stderr=theirs, cwd=programs.ROOT)
    os.close(theirs)
    shown = b""
    while True:
        try:
            piece = os.read(ours, 4096)
        except OSError:  # the program has closed its end
            break
        if not piece:
            break
        shown += piece
    out = program.communicate()[0].decode()
    shown = shown.decode()
    assert program.returncode == 0 and "step 1/1" not in out, shown[-2000:]
    assert re.search(r"episodes: 0/3\|.*\| 0 tokens", shown)
    assert re.search(r"grpo: .* left, success [\d.]+  reward -?[\d.]+  [▁-█]", shown) and "loss=" not in shown


def test_the_bar_counts_the_tokens_that_were_sampled_and_bounds_what_is_left(monkeypatch):
    monkeypatch.setattr(bars, "NO_BAR", False)
    limits = SimpleNamespace(max_tokens=1000, max_new_tokens=100)

    def episode(mask, reason="", calling=False):
        return SimpleNamespace(trajectory=SimpleNamespace(loss_mask=mask, stop_reason=reason), calling=calling, max_turns=4)

    def row(n):
        return SimpleNamespace(turn=[1] * n)

    rows = [row(7), row(5), row(3), row(0)]
    episodes = [episode([0, 1]), episode([0] + [1] * 5, calling=True), episode([0] + [1] * 3), episode([0])]
    with bars.EpisodeBar(dict(zip(map(Key, rows), episodes)), limits) as bar:
        values = bar.format_dict
        assert (values["n"], values["tokens"]) == (0, 8 + 5 + 6) and "at most" in values["eta"]
        episodes[2].trajectory.stop_reason = "done"  # its row keeps its last turn
        values = bar.format_dict
        assert (values["n"], values["tokens"]) == (1, 8 + 5 + 3) and "about" in values["eta"]
        bar.start_t -= 16  # a token a second: 4 episodes of 16 tokens each, 16 of them sampled
        assert re.search(r"about 4[78]\.\d s left", bar.format_dict["eta"])


def test_the_bar_counts_the_prompts_until_a_token_is_sampled(monkeypatch):
    monkeypatch.setattr(bars, "NO_BAR", False)

    def episode(n):
        return SimpleNamespace(trajectory=SimpleNamespace(token_ids=[0] * n, loss_mask=[0] * n, stop_reason=""), calling=False, max_turns=4)

    # Two groups, whose prompts run once each: by the first row, from which the others copy.
    rows = [Key(SimpleNamespace(turn=[], group=group, length=0)) for group in (0, 0, 1, 1)]
    with bars.EpisodeBar(dict(zip(rows, map(episode, (30, 30, 70, 70)))), SimpleNamespace(max_tokens=1000, max_new_tokens=100)) as bar:
        assert bar.format_dict["eta"] == ", prompts 0 of 100, 0.0 s"
        rows[0].length = 30  # a pass has begun, and none is done
        assert bar.format_dict["eta"] == ", prompts 0 of 100, 0.0 s"
        bar.start_t -= 12
        rows[2].length = 70  # 30 tokens were read in 12 seconds: 70 take 28
        assert re.fullmatch(", prompts 30 of 100, about 28.[01] s left", bar.format_dict["eta"])
        bar.share = 0.5  # of the layers
        assert ", prompts 65 of 100, about 6.5 s left" == bar.format_dict["eta"]
        bar.step()
        rows[0].turn, bar.start_t = [1], bar.start_t - 1  # a token a second, of 4 x 400: the 12 seconds before do not count
        assert ", at most 27 min left" == bar.format_dict["eta"] and bar.format_dict["tokens"] == 1


def test_the_layers_of_a_pass_over_prompts_are_counted():
    """On a CPU the first pass alone may take a minute."""
    model, _ = make_tiny()
    layers, counted = model.config.num_hidden_layers, []
    engine = make_engine(model, tokens=32, slots=2, stop_ids={2})
    with bars.EpisodeBar({}, SimpleNamespace(max_tokens=32, max_new_tokens=4), engine) as bar:
        engine.add([Row([5, 6, 7], limit=4)])
        update = engine.cache.update
        engine.cache.update = lambda *args, **options: (update(*args, **options), counted.append(bar.share))[0]
        engine.step()
        assert counted[:layers] == [n / layers for n in range(layers)]
        bar.step()
        assert "update" not in vars(engine.cache)  # decode steps are not slowed down
    with bars.EpisodeBar({}, SimpleNamespace(max_tokens=32, max_new_tokens=4), object()) as bar:  # closed, or its thread prints into later tests
        assert bar.cache is None


def test_a_bar_that_is_not_shown_counts_the_prompts_layers_once(monkeypatch):
    """Under torchrun the second rank has no bar: its first rollout ended by an AttributeError."""
    monkeypatch.setattr(bars, "NO_BAR", True)
    model, _ = make_tiny()
    engine = make_engine(model, tokens=32, slots=2, stop_ids={2})
    with bars.EpisodeBar({}, SimpleNamespace(max_tokens=32, max_new_tokens=4), engine) as bar:
        for _ in range(3):
            bar.step()
        assert "update" not in vars(engine.cache)


def test_every_pass_has_lines_where_there_is_no_terminal(monkeypatch, capfd):
    """The schooling and the held-out demonstrations were mute for minutes, and without an item that is done a line says that it lives."""
    monkeypatch.setattr(bars, "FIRST_LINE", 0.05), monkeypatch.setattr(bars, "NEXT_LINE", 0.1)
    for n in progress(range(3), "schooling", 3):
        time.sleep(0.12)
    lines = capfd.readouterr().err.splitlines()
    assert re.fullmatch(r"schooling: 0/3, 0\.\d s", lines[0]) and len(lines) >= 3
    assert all(re.fullmatch(r"schooling: [12]/3, about 0\.\d s left", line) for line in lines[1:])
    assert list(progress(range(3), "quick")) == [0, 1, 2] and capfd.readouterr().err == ""  # what is quick has none
    before = threading.active_count()
    passes = iter(progress(iter(range(9)), "tasks"))
    next(passes), time.sleep(0.08), passes.close()  # left early
    assert re.match(r"tasks: 0/\?, 0\.\d s\n", capfd.readouterr().err)
    time.sleep(0.05)
    assert threading.active_count() <= before


def test_the_passes_of_a_run_are_named(monkeypatch, base, tmp_path):
    shown = []
    monkeypatch.setattr(core.config, "BARS", [lambda items, what, total, **_: shown.append((what, total)) or items])
    config = grpo.settle(grpo.Config(model_path=base, env="equations", batch_size=2, output_dir=str(tmp_path / "r")))
    run = Run(config, "grpo")
    for seed in (("held out",), (3,), (3, 1), ("score",)):
        assert len(list(run.micro_batches(5, *seed))) == 3
    assert shown == [("held out", 3), ("forward passes", 3), ("forward passes", 3), ("score", 3)]


@pytest.mark.parametrize("eval_tasks", [0, 2])
def test_the_first_steps_episodes_are_judged_too(base, tmp_path, capsys, eval_tasks):
    """Without an evaluation nobody said that no tool is called. With one it is said once."""
    grpo.train(grpo.Config(model_path=base, env="equations", lora_r=2, dtype="float32", max_tokens=256, max_new_tokens=16, max_turns=2, max_steps=2,
                           tasks_per_step=2, group_size=2, eval_tasks=eval_tasks, output_dir=str(tmp_path / "r")))
    out = capsys.readouterr().out
    assert len(re.findall("note: the model makes 0.00 tool calls an episode, and 0% of its turns can be read", out)) == 1
    assert re.findall("note: 100% of the (.*) episodes are cut", out) == ["held-out" if eval_tasks else "first step's"]
    assert out.index("tool calls an episode") < out.index("step 1/2")


class Key(SimpleNamespace):
    """A row, as the key of a dict."""

    def __init__(self, row):
        super().__init__(**vars(row))

    __hash__ = object.__hash__


@pytest.mark.parametrize("seconds, words", [(8.94, "8.9 s"), (90, "2 min"), (3000, "50 min"), (5400, "1.5 h")])
def test_durations(seconds, words):
    assert bars.duration(seconds) == words


def test_tables_of_files_hold_loss_accuracy_and_margin(capsys):
    pairs = {"pairs/loss": 0.693, "pairs/accuracy": 0.0, "pairs/margin": 0.0, "pairs/count": 20, "pairs/loss/rpo": 1.0}
    notes.print_table(pairs, {**pairs, "pairs/loss": 0.5, "pairs/accuracy": 0.75, "pairs/margin": 12.5}, 9, 100)
    notes.print_table({}, {"loss": 0.25, "demonstrations": 7}, 9, 100)
    notes.print_table({}, {}, 9, 100)
    apart = {"success": 0.5, "success/a": 1.0, "success/my_env.py:Mine": 0.0, "episodes": 20}
    notes.print_table(apart, apart, 9, 100)
    assert capsys.readouterr().out == """
held out: 20 pairs; trained: 9 steps, 2 min
                    before     after   95 % interval
pairs/loss           0.693     0.500
pairs/accuracy       0.000     0.750   0.531 to 0.888
pairs/margin         0.000    12.500

held out: 7 demonstrations; trained: 9 steps, 2 min
                    before     after
loss                     -     0.250

held out: 20 tasks; trained: 9 steps, 2 min
                           before     after   95 % interval
success                     0.500     0.500   0.299 to 0.701
success/a                   1.000     1.000
success/my_env.py:Mine      0.000     0.000
"""


# --------------------------------------------------------------------------------------------------------- the schooling
@pytest.fixture
def short_schooling(monkeypatch):
    monkeypatch.setattr(schooling, "TINY_SFT", {**schooling.TINY_SFT, "max_samples": 16, "max_steps": 3, "batch_size": 4})


def test_the_schooling_says_one_line(short_schooling, tmp_path, capfd):
    grpo.train(grpo.Config(output_dir=str(tmp_path / "r"), lora_r=2, max_steps=0, eval_tasks=2, max_new_tokens=8, max_turns=1))
    out, errors = capfd.readouterr()
    lines = out.splitlines()
    assert lines[0] == f"tiny model: made in {tmp_path}/r/base; 3 SFT steps on noisy demonstrations teach it the format"
    assert "training and decoding checked in" in lines[1] and lines[2].startswith("playing 2 episodes") and out.count("written: ") == out.count("next: ") == 1 and errors == ""


NEEDS_TASKS = """
class Mine:
    def reset(self, word: str, **_):
        self.word, self.done = word, False
        return "Say " + word

    def say(self, word: str):
        '''Say a word.

        Args:
            word: the word
        '''
        self.done = word == self.word

    def get_reward(self):
        return float(self.done)

    def _expert(self):
        return [{"name": "say", "arguments": {"word": self.word}}]
"""


@pytest.mark.parametrize("eval_tasks, count", [(0, 3), (2, 60)])
def test_the_schooling_has_the_tasks_of_the_run_but_for_those_held_out(short_schooling, tmp_path, monkeypatch, capfd, eval_tasks, count):
    """Its environment makes none of its own. Without an evaluation few rows suffice."""
    (tmp_path / "mine.py").write_text(NEEDS_TASKS)
    tasks = [{"theirs": f"w{i}"} for i in range(count)]
    taught = []
    imitate = schooling.imitate
    monkeypatch.setattr(schooling, "imitate", lambda model, episodes, seed: taught.extend(episodes) or imitate(model, episodes, seed))
    config = grpo.Config(env=f"{tmp_path}/mine.py:Mine", dataset=tasks, fields="word=theirs", output_dir=str(tmp_path / "r"), lora_r=2, max_steps=0, eval_tasks=eval_tasks,
                         max_new_tokens=8, max_turns=1)
    grpo.train(config)
    words = {t.info["task"]["word"] for t in taught}
    assert words <= {f"w{i}" for i in range(count)} and len(words) == (3 if count == 3 else 16)
    train, held_out = train_and_held_out(grpo.settle(config), 100)
    assert words <= {task["word"] for task in train} and not words & {task["word"] for task in held_out}


def test_an_interrupted_schooling_begins_anew(short_schooling, tmp_path, monkeypatch, capfd):
    """And comes to the same model as one that nothing interrupts."""
    config = grpo.Config(output_dir=str(tmp_path / "r"), lora_r=2, max_steps=0, eval_tasks=0)
    clip, calls = schooling.clip_grad_norm_, []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGINT)  # in the midst of the second step
        return clip(*args)

    monkeypatch.setattr(schooling, "clip_grad_norm_", interrupted)
    with pytest.raises(Stop) as stop, Signals():
        grpo.train(config)
    assert re.fullmatch(r"stopped by SIGINT after step 0; continue with: python \S*grpo.py --config \S+ --resume", str(stop.value))
    assert not (tmp_path / "r" / "base").exists()
    config.resume = True
    grpo.train(config)
    assert len(calls) == 2 + 3 and "after step" not in capfd.readouterr().out
    grpo.train(grpo.Config(output_dir=str(tmp_path / "whole"), lora_r=2, max_steps=0, eval_tasks=0))
    names = sorted(path.name for path in (tmp_path / "whole" / "base").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "r" / "base").iterdir()) and "model.safetensors" in names
    for name in names:
        assert (tmp_path / "r" / "base" / name).read_bytes() == (tmp_path / "whole" / "base" / name).read_bytes()


# --------------------------------------------------------------------------------------------------------------- advice
@pytest.mark.parametrize("module", [grpo, reward_weighted, dpo, distill, sft])
def test_advice_names_flags_that_the_program_has_and_experts_that_exist(module):
    flags = options(module.Config)
    early = {"success": 0.5, "entropy": 0.07, "sampled_tokens": 36.0, "actions": 3.0}
    late = {"success": 0.5, "entropy": 0.01, "approx_kl": 0.3, "kl": 2.0, "sampled_tokens": 80.0, "actions": 0.2, "truncated": 0.9, "structure": 0.0,
            "groups_without_signal": 1.0}
    for has_expert in (True, False):
        alarms = notes.Alarms(flags, has_expert)
        sentences = [line for row in [early] * 5 + [late] * 5 for line in alarms.add(row)]
        assert len(sentences) == 8 and any("people" in line for line in sentences)
        assert set(re.findall(r"--(\w+)", " ".join(sentences).replace("the same --model_path and --env", ""))) <= set(flags)
        assert any("sft.py" in line for line in sentences) == has_expert


@pytest.mark.parametrize("config, words", [
    (grpo.Config(), ""), (dpo.Config(), ""), (sft.Config(), ""), (reward_weighted.Config(), ""), (grpo.Config(dataset="t.jsonl", group_size=4), ""),
    (grpo.Config(kl_estimator="k3"), ""), (grpo.Config(kl_estimator="k3", kl_coef=0.0), "--kl_coef 0.0 no update depends on --kl_estimator"),
    (sft.Config(lora_dropout=0.1, lora_alpha=8.0), "--lora_r 0 no update depends on --lora_alpha, --lora_dropout"), (sft.Config(lora_dropout=0.1, lora_r=8), ""),
    (reward_weighted.Config(weighting="linear", beta=0.3), "--weighting linear no update depends on --beta"), (reward_weighted.Config(beta=0.3), ""),
    (reward_weighted.Config(trajectories="t.jsonl", env="equations", rewards="length"), "--trajectories t.jsonl no update depends on --rewards"),
    (distill.Config(teacher="t", rewards="length"), "--teacher t no update depends on --rewards"), (distill.Config(teacher="t"), ""),
    (dpo.Config(dataset="p.jsonl", min_gap=2.0), "--dataset p.jsonl no update depends on --min_gap"), (dpo.Config(min_gap=2.0), "")], ids=str)
def test_a_flag_without_effect_beside_the_others_is_said_to_be_one(config, words):
    """An ablation over it found two equal runs, and nothing said why."""
    settled = sys.modules[type(config).__module__].settle(config)
    assert notes.idle_notes(settled) == ([f"note: with {words}"] if words else [])


@pytest.mark.parametrize("turns, is_said, options", [
    ([[0.0, 0.0, 1.0], [0.0]], True, {}), ([[0.0, 0.0], [-1.0]], True, {"reward_bias": 1.0}), ([[0.0, -1.0], [-1.0]], False, {"reward_bias": 1.0}), ([[0.0, -1.0]], True, {"reward_scaling": -1.0}),
    ([[0.5, 0.0, 1.0], [0.0]], False, {}), ([[1.0], [0.0]], False, {}), ([[0.0, 0.0], [0.0, 0.0]], False, {}),
    ([[0.0, 0.0, 1.0], [0.0]], False, {"credit": "return"}), ([[0.0, 0.0, 1.0], [0.0]], False, {"credit": "episode"})])
def test_credit_by_process_where_the_reward_comes_at_the_end_alone_is_noted(turns, is_said, options):
    config = grpo.Config(**{"credit": "process", **options})
    note = notes.credit_note(config, [SimpleNamespace(rewards=rewards) for rewards in turns])
    assert bool(note) == is_said and (note is None or "each further turn then costs" in note and "--credit return" in note)


def test_that_note_is_said_once_a_run(tmp_path, capsys):
    run = Run(grpo.Config(output_dir=str(tmp_path), credit="process"), "grpo")
    run.begin()
    for _ in range(2):
        run.log_episodes([Trajectory(rewards=[0.0, 1.0], info={"success": True, "env": "e"})])
    assert capsys.readouterr().out.count("note: --credit process") == 1
    assert "process: where they come at the end alone, each further turn costs" in options(grpo.Config)["credit"].help


def test_sft_is_advised_where_an_expert_can_be_imitated():
    config = SimpleNamespace(max_new_tokens=64, max_tokens=512, model_path="m", env="g.py:Guess", tasks=None)
    model = SimpleNamespace(config=SimpleNamespace())
    metrics = {"actions": 0.0, "structure": 1.0}
    [line] = notes.first_notes(metrics, config, model, has_expert=True, has_tools=True)
    assert line.endswith("SFT first: sft.py with the same --model_path and --env")
    [line] = notes.first_notes(metrics, config, model, has_expert=False, has_tools=True)
    assert notes.first_notes(metrics, config, model, has_expert=False, has_tools=False) == []
    assert "--" not in line and "_expert()" in line and "envs/template.py" in line


# --------------------------------------------------------------------------------------------------------------- imports
def test_errors_wait_for_torch_at_most():
    """A page imports torch, which its equations need. Nothing else that is slow stands on the way to an error."""
    code = "import sys, {}; print({{'torch', 'transformers', 'numpy'}} & {{*sys.modules}})"
    for module, slow in (("grpo", {"torch", "numpy"}), ("extras.show.page", {"torch", "numpy"}), ("core.config", set())):
        done = subprocess.run([sys.executable, "-c", code.format(module)], cwd=programs.ROOT, capture_output=True, text=True)
        assert eval(done.stdout) == slow, done.stdout + done.stderr
