"""lessons/: each stands alone on core, runs with and without extras/, and 02_grpo.py trains what grpo.py trains."""
import ast
import json
import shutil
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import bandit
import grpo
import pytest
from safetensors.torch import load_file

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "lessons"
LESSONS = sorted(FOLDER.glob("[0-9]*.py"))
SHARED = {"picture", "start"}
ALGORITHMS = {"distill", "dpo", "grpo", "reward_weighted", "sft"}
# What makes a lesson small; a lesson has some of these names.
SMALL_SHAPE = {"vocab_size": 1000, "hidden_size": 96, "intermediate_size": 256,
               "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2}
TOY = {"ENV": bandit.ENV, "TASKS": 2, "GROUP": 2, "HELD_OUT": 2, "NOISE_TASKS": 1, "UPDATES": 2, "COEFFICIENTS": (0.0, 1.0)}
FRESH_AND_OLD = {"RUNS": {f"{clip}, {kind}": (clip == "clip", age, 2e-3) for clip in ("clip", "no clip")
                          for kind, age in (("new", 0), ("old", 1))} | {"clip, 2 x rate": (True, 0, 4e-3)}}


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

    def run(path, constants={}, **options):
        lesson(path, **TOY | constants).main(**options)
        return tmp_path
    return run


# ------------------------------------------------------------------------------------------ the file
@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_a_lesson_can_be_projected(path):
    lines = path.read_text().splitlines()
    assert 100 <= len(lines) <= 200
    assert max(map(len, lines)) <= 100


def test_what_lessons_share_is_short():
    assert sum(len((FOLDER / f"{name}.py").read_text().splitlines()) for name in SHARED) < 130


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_a_lesson_stands_on_core_alone(path):
    """It imports no layer, no algorithm, no other lesson, and has no class of settings: only 08_memory.py, whose measuring torch wants as a class."""
    tree = ast.parse(path.read_text())
    names = set()
    for node in ast.walk(tree):
        assert not isinstance(node, ast.ClassDef) or node.name == "LiveBytes"
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
def results(line, name):
    """Return the results in the file that the last line of a lesson's output names."""
    short = json.loads(line)
    path = short.pop("file")
    result = json.loads(Path(path).read_text())
    assert len(line) - len(path) < 230 and Path(path).name == f"{name}.json"
    assert short["command"] == result["command"] == f"python lessons/{name}.py --seed 1" and short.keys() < result.keys()
    return result


@pytest.mark.parametrize("name", ["01_reinforce", "02_grpo", "03_clipping_and_staleness", "04_kl"])
def test_a_lesson_runs_at_toy_size(name, toy, capsys):
    folder = toy(FOLDER / f"{name}.py", FRESH_AND_OLD if name.startswith("03") else {}, steps=1, seed=1)
    shown = capsys.readouterr().out.splitlines()
    result = results(shown[-1], name)
    assert result["steps"] == 1
    assert not [line for line in shown[:-2] if len(line) > 80]  # then come the picture's place and the JSON
    assert (folder / f"{name}.svg").read_text().startswith("<?xml")


@pytest.mark.parametrize("name, constants, options", [
    ("05_credit_over_turns", {}, {"steps": 2}),
    ("06_reward_hacking", {}, {"steps": 2}),
    ("07_dpo", {"TASKS": 8, "GROUP": 4, "HELD_OUT_PAIRS": 2, "HELD_OUT_TASKS": 2, "BATCH": 2}, {"steps": 1}),
    ("08_memory", {"SHAPE": SMALL_SHAPE, "TOKENS": 32, "ROWS": 2, "PROMPT": 5, "NEW": 3}, {}),
    ("09_self_teaching", {"SCHOOL_STEPS": 2, "PUPILS": 4}, {"steps": 2}),
])
def test_one_of_the_other_lessons_runs_at_toy_size(name, constants, options, toy, capsys):
    folder = toy(FOLDER / f"{name}.py", constants, seed=1, **options)
    shown = capsys.readouterr().out.splitlines()
    result = results(shown[-1], name)
    assert options.items() <= result.items()
    assert max(map(len, shown[:-2])) <= 80
    assert (folder / f"{name}.svg").read_text().startswith("<?xml")
    if name == "08_memory":
        assert result["off"] < 0.05  # of a step's bytes
        kept = [row["layers"] + row["logits"] for row in result["rows"].values()]
        assert kept == sorted(kept, reverse=True) and len(set(kept)) == 4


def test_the_credits_of_lesson_5_are_those_of_grpo(monkeypatch):
    """On random groups; and the price of a turn that its page tells."""
    import random

    import torch
    from agent import Trajectory
    monkeypatch.syspath_prepend(FOLDER)
    credits, rng = lesson(FOLDER / "05_credit_over_turns.py").CREDITS, random.Random(0)
    for _ in range(20):
        group = [[rng.choice([0.0, 1.0, 2.5]) for _ in range(rng.randint(1, 4))] for _ in range(5)]
        episodes = [Trajectory(rewards=rewards, group_id="g") for rewards in group]
        for name, credit in credits.items():
            assert torch.tensor(sum(credit(group), [])).tolist() == pytest.approx(grpo.CREDITS[name](episodes).tolist(), abs=1e-5)
    group = [[0.0] * k + [right] for right in (1.0, 0.0) for k in range(4)]
    assert [turns[0] for turns in credits["process"](group)[:4]] == pytest.approx([1.95, 1.46, 0.97, 0.49], abs=0.01)


def test_the_rewards_of_lesson_6_by_hand(monkeypatch):
    """Eight calls in a circle are paid 40 and the solution 15; a guess costs nothing, and the solution 1; progress pays 9 and 2."""
    import random

    import torch
    monkeypatch.syspath_prepend(FOLDER)
    hacking = lesson(FOLDER / "06_reward_hacking.py")
    help_, detour, answer = torch.eye(3) * 100
    tables = {"solution": [answer, help_, help_, help_], "circle": [detour, help_, help_, help_], "guess": [answer] * 4}
    rows = {}
    for name, table in tables.items():
        episode = hacking.play({"equation": "3x + 7 = 16"}, torch.stack(table), random.Random(0))
        rows[name] = [reward(episode) for reward in hacking.REWARDS.values()] + [episode["success"], episode["turns"]]
    assert rows == {"solution": [15, -1, 9, True, 3], "circle": [40, -24, 4, False, 8], "guess": [0, 0, 0, False, 1]}
    assert hacking.paid({"calls": 7, "success": True}) == 40  # the circle loses nothing by an answer in the last turn


def test_the_loss_of_lesson_7_is_that_of_dpo(monkeypatch):
    import dpo
    import torch
    monkeypatch.syspath_prepend(FOLDER)
    pair_loss = lesson(FOLDER / "07_dpo.py").pair_loss
    generator = torch.Generator().manual_seed(0)
    logprobs, mask = -torch.rand(6, 5, generator=generator), (torch.rand(6, 5, generator=generator) > 0.4).long()
    mask[:, 1] = 1
    references, sums = -torch.rand(6, generator=generator), (logprobs * mask).sum(1)
    for sft_coef in (0.0, 1.0):
        loss, margin = pair_loss(*sums.chunk(2), *references.chunk(2), mask.sum(1)[:3], sft_coef)
        theirs, metrics = dpo.pair_loss(logprobs, references, mask, dpo.Counts(3, int(mask[:3].sum())),
                                        {"sigmoid": (1.0, dpo.LOSSES["sigmoid"])}, beta=0.1, length_norm=False, sft_coef=sft_coef)
        assert torch.allclose(loss.mean(), theirs) and 0.1 * margin.mean().item() == pytest.approx(metrics["margin"].item(), rel=1e-5)


def self_teaching(monkeypatch, **constants):
    """Return lesson 9 as a module."""
    monkeypatch.syspath_prepend(FOLDER)
    return lesson(FOLDER / "09_self_teaching.py", **constants)


def test_the_loss_of_lesson_9_by_hand_and_by_sampling(monkeypatch):
    """Two tokens: KL((1/4, 3/4) || (1/2, 1/2)) is 0.1308. Its gradient is the mean of distill.py's over all tokens that may be drawn."""
    import math

    import distill
    import torch
    loss = self_teaching(monkeypatch).self_teaching_loss
    policy, teacher = (torch.tensor([[[p, 1 - p]]]).log() for p in (0.25, 0.5))
    assert loss(policy, teacher).item() == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5)) == pytest.approx(0.1308, abs=1e-4)
    z, teacher_z = torch.randn(2, 3, 4, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    z.requires_grad_()
    teacher_z.requires_grad_()
    logp, teacher_logp = z.log_softmax(2), teacher_z.log_softmax(2)
    exact, none = torch.autograd.grad(loss(logp, teacher_logp), (z, teacher_z), retain_graph=True, allow_unused=True)
    assert none is None  # the teacher has no gradient
    sampled = 0
    for one, teacher_one in zip(logp.flatten(), teacher_logp.flatten()):  # each is drawn with the chance that the policy gives it
        sampled += one.detach().exp() * distill.distillation_loss(one, one.detach(), teacher_one, 12)
    kl = torch.distributions.kl_divergence(*(torch.distributions.Categorical(logits=x.detach()) for x in (z, teacher_z)))
    assert torch.allclose(loss(logp, teacher_logp), kl.mean())
    assert torch.allclose(torch.autograd.grad(sampled, z)[0], exact)


def test_the_grpo_of_lesson_9_is_that_of_lesson_2(monkeypatch):
    import torch
    module = self_teaching(monkeypatch)
    grpo_lesson = lesson(FOLDER / "02_grpo.py")
    rewards, logp = torch.rand(2, 3), torch.randn(6, 4, 9).log_softmax(2)
    tried = torch.randint(9, (6, 4))
    chosen = logp.gather(2, tried[..., None])[..., 0]
    advantages = grpo_lesson.group_advantages(rewards).view(6, 1)
    theirs, ratio = grpo_lesson.clipped_loss(chosen, chosen, advantages)
    logp.requires_grad_()
    assert (ratio == 1).all()
    ours = module.grpo_loss(logp, tried, rewards)  # the same but for what does not depend on the policy
    gradient, = torch.autograd.grad(ours, logp)
    slope = torch.zeros_like(logp).scatter(2, tried[..., None], (theirs / 24)[..., None])
    assert torch.allclose(gradient, slope, atol=1e-6)


def test_the_verdicts_of_lesson_9_and_where_its_log_probabilities_stand(monkeypatch):
    import torch
    from core.logprobs import token_logprobs
    module = self_teaching(monkeypatch)
    question, tried, right = torch.tensor([[4, 10, 11, 5]]), torch.tensor([[0, 1, 2, 3]]), torch.tensor([[0, 7, 2, 9]])
    texts = {name: " ".join(module.TOKENS[i] for i in module.prompt(question, kind(tried, right))[0])
             for name, kind in module.RUNS.items() if callable(kind)}
    assert texts == {
        "SDPO, one word": "question: e k l f tried: a b c d verdict: wrong answer:",
        "SDPO, strange marks": "question: e k l f tried: a b c d verdict: yes no yes no answer:",
        "SDPO, marks": "question: e k l f tried: a b c d verdict: + - + - answer:",
        "SDPO, marks, live": "question: e k l f tried: a b c d verdict: + - + - answer:",
        "SDPO, answer": "question: e k l f right: a h c j answer:"}
    assert [module.TOKENS[i] for i in module.one_word(right, right)[3][0]] == ["solved"]
    model = module.Qwen3ForCausalLM(module.Qwen3Config(**module.SHAPE))
    for verdict in ((), module.marks(tried, right)):
        prompt = module.prompt(question, verdict)
        token_ids = torch.cat([prompt, tried], 1)
        mask = torch.cat([torch.zeros_like(prompt), torch.ones_like(tried)], 1)
        theirs = token_logprobs(model, token_ids, mask)[0][:, -4:]
        ours = module.logprobs(model, question, tried, verdict).gather(2, tried[..., None])[..., 0]
        assert torch.allclose(ours, theirs, atol=1e-5)


def test_the_two_heads_of_lesson_8_give_the_same_logprobs(monkeypatch):
    import torch
    from core.logprobs import token_logprobs
    monkeypatch.syspath_prepend(FOLDER)
    memory = lesson(FOLDER / "08_memory.py", SHAPE=SMALL_SHAPE)
    model = memory.make_model(0)
    token_ids = torch.randint(SMALL_SHAPE["vocab_size"], (2, 9))
    mask = (torch.arange(9) >= 4).long().expand(2, 9)
    assert torch.allclose(memory.all_logits(model, token_ids, mask), token_logprobs(model, token_ids, mask)[0], atol=1e-5)


def test_the_estimators_of_lesson_4_are_what_it_says(monkeypatch):
    """Exactly, of any two policies: k1 and k3 are unbiased as numbers, k2 and k3_ratio as gradients."""
    import torch
    monkeypatch.syspath_prepend(FOLDER)
    module = lesson(FOLDER / "04_kl.py")
    logits = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logp, ref_logp = logits.log_softmax(-1)
    table = module.compare(logp, ref_logp)
    kl = torch.distributions.kl_divergence(*(torch.distributions.Categorical(logits=z) for z in logits))
    assert torch.allclose(module.exact_kl(logp, ref_logp)[:, 0], kl)
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
from core.tiny import TINY_SFT
for path in sorted(Path("lessons").glob("[0-9]*.py")):  # all of them can be loaded
    spec = spec_from_file_location(path.stem, path)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    if path.stem == "02_grpo":
        lesson = module
assert not any(name.partition(".")[0] == "extras" for name in sys.modules)
grpo.train(grpo.Config(model_path=base, env=env, kl_coef=0.0, learning_rate=4e-3, tasks_per_step=5, group_size=4, max_steps=2, eval_tasks=0, output_dir=f"{out}/whole"))
lesson.start_model, lesson.FOLDER, lesson.draw = lambda: base, Path(out), print
lesson.ENV, lesson.TASKS, lesson.GROUP, lesson.HELD_OUT = env, 5, 4, 1
lesson.main(steps=2)
TINY_SFT.update(max_steps=2, max_samples=16)
grpo.train(grpo.Config(max_steps=0, eval_tasks=0, output_dir=f"{out}/none"))
start.make(Path(out, "start"))
"""


def test_lesson_2_trains_the_adapter_of_grpo_bit_for_bit(schooled, python, tmp_path):
    """In a tree without extras/: five groups of four, so that an update has two micro-batches."""
    tree = tmp_path / "tree"
    tree.mkdir()
    for path in ROOT.glob("*.py"):
        shutil.copy(path, tree)
    for name in ("core", "envs", "lessons", "llm"):
        shutil.copytree(ROOT / name, tree / name)
    done = python("-c", SAME, schooled, bandit.ENV, tmp_path, cwd=tree)
    assert done.returncode == 0, done.stderr[-3000:]
    name = "adapter_model.safetensors"
    whole = tmp_path / "whole" / "checkpoints" / "step_000002" / name
    assert (tmp_path / "02_grpo" / name).read_bytes() == whole.read_bytes()
    taught = [tmp_path / place / "model.safetensors" for place in ("none/base", "start")]
    assert taught[0].read_bytes() == taught[1].read_bytes()
    assert any(tensor.any() for key, tensor in load_file(whole).items() if "lora_B" in key)
