"""distill.py: its loss by hand, by slow loops, by enumeration and by TRL's; its teachers; that it learns without a reward."""
import json
import math
from pathlib import Path
from types import SimpleNamespace

import bandit
import pytest
import torch
from safetensors.torch import load_file

import distill
import grpo
import schooling
import sft
from agent import Limits, rollout
from core.config import UserError, parse
from core.data import collate, turn_index
from core.logprobs import token_logprobs
from core.tiny import make_tiny
from envs.tasks import load_tasks
from layers import load_model

ALONE = SimpleNamespace(micro_batches=lambda n, *seed: [slice(0, n)], ranks=SimpleNamespace(add=lambda x: x))


@pytest.fixture(scope="module")
def place(schooled, probed_once, tmp_path_factory):
    """A folder with the bandit's student, base/, and two teachers: an adapter that has seen right choices, and that adapter merged."""
    folder = tmp_path_factory.mktemp("distill")
    (folder / "base").symlink_to(schooled)
    from merge import merge
    sft.train(sft.Config(model_path=str(folder / "base"), env=bandit.RIGHT, output_dir=str(folder / "taught"), eval_tasks=0, lora_r=4,
                         lora_alpha=12, max_steps=20, max_samples=100, batch_size=8, learning_rate=3e-3))
    merge(str(folder / "taught"), str(folder / "merged"))
    return folder


def config(place, out, **given):
    return distill.Config(**{**dict(
        model_path=str(place / "base"), teacher=str(place / "taught"), env=bandit.ENV, output_dir=str(out), eval_tasks=0, max_samples=200,
        learning_rate=5e-3, max_new_tokens=32, tasks_per_step=16, overwrite=True), **given})


def lines(out):
    return [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]


# --------------------------------------------------------------------------------------------------------------- the loss
def test_by_hand():
    """Student 1/2 and 1/5, teacher 1/4 and 4/5: A = log(1/2) and log 4, whose mean is log(2) / 2."""
    student = torch.tensor([[0.0, 0.5, 0.2]], dtype=torch.float64).log().nan_to_num(0, 0, 0)
    teacher = torch.tensor([[0.0, 0.25, 0.8]], dtype=torch.float64).log().nan_to_num(0, 0, 0)
    assert distill.distillation_advantages(student, teacher)[0].tolist() == pytest.approx([0.0, -0.693147, 1.386294], abs=1e-6)
    assert distill.distillation_loss(student, student, teacher, 2).item() == pytest.approx(-0.346574, abs=1e-6)
    # The first token was sampled at 2/5: its ratio is 5/4, and -(5/4 x -0.693147 + 1.386294) / 2 = -0.259930.
    sampled = torch.tensor([[0.0, 0.4, 0.2]], dtype=torch.float64).log().nan_to_num(0, 0, 0)
    assert distill.distillation_loss(student, sampled, teacher, 2).item() == pytest.approx(-0.259930, abs=1e-6)


def random_case(seed, b=4, t=9):
    g = torch.Generator().manual_seed(seed)
    mask = (torch.rand(b, t, generator=g) < 0.6).long()
    mask[:, 0] = 0
    student, sampled, teacher = (-3 * torch.rand(b, t, generator=g, dtype=torch.float64) * mask for _ in range(3))
    return student.requires_grad_(), sampled, teacher, mask


@pytest.mark.parametrize("seed", range(3))
def test_the_loss_equals_a_plain_loop_and_its_gradient_too(seed):
    student, sampled, teacher, mask = random_case(seed)
    n = int(mask.sum())
    loss = distill.distillation_loss(student, sampled, teacher, n)
    gradient, = torch.autograd.grad(loss, student)
    total = 0.0
    for i, j in mask.nonzero().tolist():
        s, o, q = (x[i, j].item() for x in (student, sampled, teacher))
        total -= math.exp(s - o) * (q - s) / n
        assert gradient[i, j].item() == pytest.approx(-math.exp(s - o) * (q - s) / n, rel=1e-12)
    assert loss.item() == pytest.approx(total, rel=1e-12) and not gradient[mask == 0].any()


@pytest.mark.parametrize("seed", range(3))
def test_its_gradient_is_that_of_grpos_k2_where_the_teacher_is_the_reference(seed):
    student, _, teacher, mask = random_case(seed)
    ours, = torch.autograd.grad(distill.distillation_loss(student, student.detach(), teacher, 1), student)
    theirs, = torch.autograd.grad(grpo.kl_estimate(student, teacher, mask, "k2").sum(), student)
    assert torch.allclose(ours, theirs, rtol=1e-12)


def test_micro_batches_add_up():
    student, sampled, teacher, mask = random_case(7)
    whole = distill.distillation_loss(student, sampled, teacher, 11)
    parts = sum(distill.distillation_loss(student[i:i + 1], sampled[i:i + 1], teacher[i:i + 1], 11) for i in range(4))
    assert torch.isclose(whole, parts, rtol=1e-12)


def enumerated(student_logits, sampler_logits, teacher_logits):
    """The loss of every token of the vocabulary after every context, each as often as the sampler draws it."""
    p, s, q = (x.log_softmax(-1) for x in (student_logits, sampler_logits, teacher_logits))
    total = 0.0
    for context in range(len(p)):
        for token in range(p.shape[1]):
            at = (slice(context, context + 1), slice(token, token + 1))
            total = total + s[at].exp().item() * distill.distillation_loss(p[at], s[at].detach(), q[at], len(p))
    return total


@pytest.mark.parametrize("is_older", [False, True])
def test_over_all_tokens_it_is_the_kl_to_the_teacher_and_so_is_its_gradient(is_older):
    """By enumeration of a vocabulary of 5 after 3 contexts, also where an older student has sampled."""
    g = torch.Generator().manual_seed(1)
    student, older, teacher = (2 * torch.randn(3, 5, generator=g, dtype=torch.float64) for _ in range(3))
    student.requires_grad_()
    loss = enumerated(student, older if is_older else student.detach(), teacher)
    p, q = student.log_softmax(-1), teacher.log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1).mean()
    assert torch.isclose(loss, kl, rtol=1e-12)
    ours, exact = (torch.autograd.grad(x, student, retain_graph=True)[0] for x in (loss, kl))
    assert torch.allclose(ours, exact, rtol=1e-10, atol=1e-14) and exact.abs().max() > 0.01
    # The other divergence of GKD has another gradient: the test can tell them apart.
    forward, = torch.autograd.grad((q.exp() * (q - p)).sum(-1).mean(), student)
    assert not torch.allclose(ours, forward, rtol=0.1)


@pytest.mark.slow
def test_over_all_tokens_it_is_trls_gkd_with_the_reverse_kl():
    gkd = pytest.importorskip("trl.experimental.gkd.gkd_trainer").GKDTrainer
    g = torch.Generator().manual_seed(2)
    student, teacher = (torch.randn(1, 4, 6, generator=g, dtype=torch.float64) for _ in range(2))
    student.requires_grad_()
    theirs = gkd.generalized_jsd_loss(student, teacher, labels=torch.zeros(1, 4, dtype=torch.long), beta=1)
    ours = enumerated(student[0], student[0].detach(), teacher[0])
    gradients = [torch.autograd.grad(x, student)[0] for x in (ours, theirs)]
    assert torch.isclose(ours, theirs, rtol=1e-9) and torch.allclose(*gradients, rtol=1e-9, atol=1e-13)


# ------------------------------------------------------------------------------------------------------------- the teachers
@pytest.fixture(scope="module")
def played(place):
    """Token ids and mask of some episodes of the student."""
    model, tokenizer = load_model(str(place / "base"), train=False)
    token_ids, mask, _ = collate(rollout(model, tokenizer, bandit.ENV, load_tasks(bandit.ENV, "train", 4, 0), 2))
    return token_ids, mask


def teacher_of(place, model, tokenizer, **given):
    run = SimpleNamespace(folder=place, **vars(ALONE))
    return distill.find_teacher(distill.settle(config(place, place, **given)), run, model, tokenizer)


@pytest.mark.parametrize("options", [{"lora_r": 4}, {"lora_r": 16, "lora_alpha": 8}, {"lora_r": 2}], ids=str)
def test_an_adapter_of_the_base_judges_as_the_model_that_it_makes_and_leaves_the_student_alone(place, played, options):
    model, tokenizer = load_model(str(place / "base"), **options)
    for name, p in model.named_parameters():
        if name.endswith("lora.B"):
            torch.nn.init.normal_(p, std=0.02)
    before = {name: p.clone() for name, p in model.named_parameters()}
    adapter = teacher_of(place, model, tokenizer, **options)
    beside = teacher_of(place, model, tokenizer, teacher=str(place / "merged"), **options)
    assert adapter.model is model and beside.model is not model
    ours, theirs = (teacher.logprobs(*played, 1.0, ALONE) for teacher in (adapter, beside))
    own = token_logprobs(model, *played)[0]
    assert torch.allclose(ours, theirs, atol=1e-4) and (ours - own).abs().max() > 0.1
    assert all(torch.equal(p, before[name]) and p.shape == before[name].shape for name, p in model.named_parameters())


def test_a_model_of_its_own_is_loaded_beside_where_all_weights_train(place, played, capfd):
    model, tokenizer = load_model(str(place / "base"), lora_r=0)
    teacher = teacher_of(place, model, tokenizer, lora_r=0)
    assert teacher.model is not model and "beside the student: 3.64 MB" in capfd.readouterr().out
    assert not any(p.requires_grad for p in teacher.model.parameters())


def test_a_teacher_of_another_tokenizer_is_refused(place, tmp_path):
    model, tokenizer = load_model(str(place / "base"))
    other, words = load_model(str(place / "merged"), train=False)
    words.add_tokens(["<another>"])
    other.resize_token_embeddings(len(words))
    other.save_pretrained(tmp_path)
    words.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="tokenizer is another one than the student's"):
        teacher_of(place, model, tokenizer, teacher=str(tmp_path))


def test_an_adapter_of_linears_that_the_student_does_not_adapt_is_refused(place):
    model, tokenizer = load_model(str(place / "base"), lora_r=2, lora_target_modules="q_proj")
    with pytest.raises(UserError, match="give --lora_target_modules .*down_proj"):
        teacher_of(place, model, tokenizer)


def test_a_real_model_needs_a_teacher_and_is_told_the_command(tmp_path):
    with pytest.raises(UserError, match="--teacher: give .*python grpo.py --model_path path/to/model --env equations --output_dir runs/teacher"):
        distill.train(distill.Config(model_path="path/to/model", output_dir=str(tmp_path)))


# ----------------------------------------------------------------------------------------------------------------- the loop
@pytest.mark.parametrize("teacher", ["taught", "merged"])
def test_it_learns_what_the_teacher_knows_without_a_reward(place, tmp_path, monkeypatch, teacher):
    """The student chooses at random. That no reward counts is shown by paying none."""
    monkeypatch.setattr(bandit.Bandit, "get_reward", lambda self: 0.0)
    result = distill.train(config(place, tmp_path, teacher=str(place / teacher), max_steps=6, eval_tasks=24, updates_per_step=2))
    assert result["success_before"] < 0.3 and result["success_after"] > 0.7 and result["teacher_success"] > 0.8, result
    found = lines(tmp_path)
    assert found[-1]["teacher_kl"] < 0.3 * found[0]["teacher_kl"] and all(abs(line["first_ratio"] - 1) < 1e-3 for line in found)


def test_micro_batches_and_processes_of_a_step_change_no_gradient(place, tmp_path):
    for name, size in (("one", 16), ("many", 3)):
        distill.train(config(place, tmp_path / name, max_steps=1, batch_size=size, updates_per_step=1))
        [line] = lines(tmp_path / name)
        assert line["loss"] == pytest.approx(line["teacher_kl"], rel=1e-3)  # before the weights have changed
    one, many = (load_file(tmp_path / name / "checkpoints" / "step_000001" / "optimizer.safetensors") for name in ("one", "many"))
    firsts = [key for key in one if key.endswith("|exp_avg")]
    scale = max(one[key].abs().max() for key in firsts)
    assert scale > 0 and all((one[key] - many[key]).abs().max() <= 1e-5 * scale for key in firsts)


def test_a_student_that_is_its_teacher_learns_nothing(place, tmp_path):
    distill.train(config(place, tmp_path, model_path=str(place / "taught"), teacher=str(place / "taught"), max_steps=1))
    [line] = lines(tmp_path)
    assert abs(line["teacher_kl"]) < 1e-6 and line["grad_norm"] < 1e-4


def test_without_arguments_it_makes_the_student_and_its_teacher(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(schooling, "TINY_SFT", {**schooling.TINY_SFT, "max_samples": 16, "max_steps": 2})
    given = dict(output_dir=str(tmp_path), tasks_per_step=2, max_tokens=160, eval_tasks=2, max_steps=1)
    result = distill.train(distill.Config(**given))
    assert result["steps"] == 1
    said = capfd.readouterr().out
    assert said.count("noisy demonstrations teach it the format") == said.count("teacher; 2 SFT steps on noisy demonstrations teach it which actions are right") == 1
    assert f"the teacher, on the held-out tasks: success {result['teacher_success']:.3f}" in said
    student, teacher = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "teacher"))
    assert any(not torch.equal(student[name], teacher[name]) for name in student)
    made = (tmp_path / "teacher" / "model.safetensors").stat().st_mtime_ns
    again = distill.train(distill.Config(**given | {"max_steps": 2}, resume=True))
    assert again["steps"] == 2 and (tmp_path / "teacher" / "model.safetensors").stat().st_mtime_ns == made


def test_the_teacher_made_here_learns_the_turns_that_were_paid():
    """Of an equation's demonstrations those are the right actions: a wrong one brings it no closer."""
    tasks = [{"equation": "3x + 7 = 16", "noise": 0.6, "noise_seed": i} for i in range(8)]
    learned = 0
    for t in schooling.demonstrate(make_tiny()[1], "equations", tasks, Limits(max_turns=6)):
        rewards, before = t.rewards, turn_index(torch.tensor([t.loss_mask]))[0]
        distill.mask_unpaid(t)
        kept = {int(turn) for turn, one in zip(before, t.loss_mask) if one}
        assert kept == {turn for turn, reward in enumerate(rewards) if reward > 0}
        assert all(sum(t.loss_mask[i] for i in range(len(before)) if before[i] == turn) == int((before == turn).sum()) for turn in kept)
        learned += len(kept) < len(rewards)
    assert learned >= 4


def test_a_teacher_that_no_flag_of_the_student_changes(place, played):
    """Dropout of the student's adapter is for its updates."""
    model, tokenizer = load_model(str(place / "base"), lora_r=4, lora_dropout=0.5)
    teacher = teacher_of(place, model, tokenizer, lora_dropout=0.5)
    model.train()
    first, second = (teacher.logprobs(*played, 1.0, ALONE) for _ in range(2))
    assert torch.equal(first, second)


def test_the_flags_say_who_teaches():
    given = parse(distill.Config, ["--teacher", "runs/x", "--tasks_per_step", "8"])
    assert given.teacher == "runs/x" and given.group_size == 1
