"""dpo.py: losses by hand, against TRL's DPOTrainer, by the paper's gradient; pairs, invariants, and it learns."""
import json
from functools import partial
import math
import re
from collections import Counter, defaultdict
from pathlib import Path
from types import SimpleNamespace

import programs
import pytest
import torch
from safetensors.torch import load_file

import dpo
from extras.data.demonstrations import Encoder
from extras.data import pairs as pairs_of_files
from envs.tasks import load_tasks
from agent import Trajectory
from dpo import LOSSES, Counts, pair_loss
from schooling import demonstrate
from core.data import prompt_of
from extras.ranks import join
from core.config import UserError
from layers import load_model
from core.tiny import make_tiny

HYPER = {"label_smoothing": 0.1, "discopop_tau": 0.05}


def losses_of(weights, label_smoothing=0.1, discopop_tau=0.05):
    """What pair_loss takes, for [(name, weight)]."""
    bound = {"exo_pair": {"label_smoothing": label_smoothing}, "robust": {"label_smoothing": label_smoothing}, "discopop": {"tau": discopop_tau}}
    return {name: (weight, partial(LOSSES[name], **bound.get(name, {}))) for name, weight in weights}


@pytest.fixture
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


# ------------------------------------------------------------------------------------------------------- by hand
def log_sigmoid(x):
    return -math.log(1 + math.exp(-x))


# One pair. Chosen: 2 sampled tokens, log pi -1.0 and -0.4, reference -2.0: log-ratio 0.6, a mean of 0.3 a token.
# Rejected: 4 sampled tokens of -0.5 each, reference -1.2: log-ratio -0.8, a mean of -0.2. beta 0.5: x = 0.5 x 1.4 = 0.7.
BY_HAND = {
    "sigmoid": -log_sigmoid(0.7),
    "hinge": 0.3,
    "ipo": 0.25,  # (0.3 + 0.2 - 1)^2
    # p = sigmoid(0.7) = 0.668188: p log(p / 0.9) + (1 - p) log((1 - p) / 0.1)
    "exo_pair": 0.6681877722 * math.log(0.6681877722 / 0.9) + 0.3318122278 * math.log(0.3318122278 / 0.1),
    "nca_pair": -log_sigmoid(0.3) - log_sigmoid(-0.3) / 2 - log_sigmoid(0.4) / 2,
    "robust": (-0.9 * log_sigmoid(0.7) + 0.1 * log_sigmoid(-0.7)) / 0.8,
    "bco_pair": -log_sigmoid(0.3) - log_sigmoid(0.4),
    "sppo_hard": 0.4**2 + 0.2**2,  # (0.6 - 1)^2 + (-0.8 + 1)^2
    "apo_zero": 1 - 0.5744425168 + 0.4013123399,  # sigmoid(0.3), sigmoid(-0.4)
    "apo_down": 0.5744425168 + 1 - 0.6681877722,
    "discopop": math.exp(-0.7) + 8.3e-7 * (0.4031860 - 0.4965853),  # m = sigmoid(14) = 1 - 8.3e-7
    "sft": 0.7,
    "sigmoid_norm": -log_sigmoid(0.25),
}


def hand_batch():
    logprobs = torch.tensor([[9.0, -1.0, 9.0, -0.4, 9.0], [9.0, -0.5, -0.5, -0.5, -0.5]])
    return logprobs, torch.tensor([-2.0, -1.2]), torch.tensor([[0, 1, 0, 1, 0], [0, 1, 1, 1, 1]])


@pytest.mark.parametrize("name", LOSSES)
def test_by_hand(name, float64):
    loss, metrics = pair_loss(*hand_batch(), Counts(1, 2), losses_of([(name, 1.0)]), beta=0.5)
    assert float(loss) == pytest.approx(BY_HAND[name], abs=1e-9)
    assert float(metrics["loss"]) == float(loss)
    shown = {"accuracy": 1.0, "margin": 0.7, "reward/chosen": 0.3, "reward/rejected": -0.4, "logprobs/chosen": -1.4,
             "logprobs/rejected": -2.0}
    assert {k: float(metrics[k]) for k in shown} == pytest.approx(shown)


def test_a_tie_is_no_accuracy(float64):
    logprobs, _, mask = hand_batch()
    _, metrics = pair_loss(logprobs, torch.tensor([-1.4, -2.0]), mask, Counts(1, 2), losses_of([("sigmoid", 1.0)]), beta=0.5)
    assert float(metrics["margin"]) == float(metrics["accuracy"]) == 0


def test_weights_length_norm_and_sft_term_by_hand(float64):
    batch, options = hand_batch(), {"beta": 0.5}
    two = pair_loss(*batch, Counts(1, 2), losses_of([("hinge", 2.0), ("sft", 0.5)]), **options)[0]
    assert float(two) == pytest.approx(2 * 0.3 + 0.5 * 0.7)
    norm = pair_loss(*batch, Counts(1, 2), losses_of([("sigmoid", 1.0)]), length_norm=True, **options)[0]
    assert float(norm) == pytest.approx(BY_HAND["sigmoid_norm"])
    for name in ("ipo", "sigmoid_norm"):  # means already: not divided twice
        same = pair_loss(*batch, Counts(1, 2), losses_of([(name, 1.0)]), length_norm=True, **options)[0]
        assert float(same) == pytest.approx(BY_HAND[name])
    rpo = pair_loss(*batch, Counts(1, 2), losses_of([("hinge", 1.0)]), sft_coef=0.1, **options)[0]
    assert float(rpo) == pytest.approx(0.3 + 0.1 * 0.7)


def test_simpo_fits_and_a_misspelt_keyword_fails(float64):
    """SimPO, arXiv 2405.14734 eq. 6: -log sigmoid(beta (mean log pi(chosen) - mean log pi(rejected)) - gamma)."""
    def simpo(scores, beta, gamma=0.4):
        return -torch.nn.functional.logsigmoid(beta * (scores.chosen_logprob_mean - scores.rejected_logprob_mean) - gamma)

    loss, _ = pair_loss(*hand_batch(), Counts(1, 2), {"simpo": (1.0, simpo)}, beta=2.0)  # 2 (-0.7 + 0.5) - 0.4
    assert float(loss) == pytest.approx(-log_sigmoid(-0.8))
    with pytest.raises(TypeError, match="gama"):
        pair_loss(*hand_batch(), Counts(1, 2), {"simpo": (1.0, partial(simpo, gama=0.4))}, beta=2.0)


# ----------------------------------------------------------------------------------------------------------- TRL
def random_pairs(seed, pairs=5, width=30, spread=2.0):
    """(2B, T) log-probs (a leaf), the reference's, and masks as of tool episodes: runs of 1s parted by 0s."""
    gen = torch.Generator().manual_seed(seed)
    mask = (torch.rand(2 * pairs, width, generator=gen) < 0.6).long()
    mask[:, 0], mask[:, 1] = 0, 1
    for row, length in zip(mask, torch.randint(3, width, (2 * pairs,), generator=gen)):
        row[length:] = 0
    logprobs = -3 * torch.rand(2 * pairs, width, generator=gen)
    ref = logprobs + spread * torch.randn(2 * pairs, width, generator=gen) / width**0.5
    return logprobs.requires_grad_(), ref, mask


def trl_loss(logprobs, ref, mask, losses, *, beta, label_smoothing, discopop_tau):
    """TRL's own `_compute_loss`, with a model that answers these log-probs."""
    cls = pytest.importorskip("trl.trainer.dpo_trainer").DPOTrainer
    trainer = cls.__new__(cls)
    trainer.__dict__.update(
        loss_types=[name for name, _ in losses], loss_weights=[weight for _, weight in losses], beta=beta,
        label_smoothing=label_smoothing, args=SimpleNamespace(discopop_tau=discopop_tau), ld_alpha=None,
        f_divergence_type="reverse_kl", use_weighting=False, aux_loss_enabled=False, precompute_ref_logps=True,
        model=SimpleNamespace(training=True), _metrics=defaultdict(lambda: defaultdict(list)), _total_train_tokens=0,
        _tp_size=1, accelerator=SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x))

    def model(labels, **_):
        said = torch.where(labels[:, 1:] != -100, logprobs[:, 1:], 0.0)
        return SimpleNamespace(log_probs=said, entropy=said * 0, mean_logits=said * 0, is_top1=said > 0)

    ref_chosen, ref_rejected = (ref * mask).sum(1).chunk(2)
    loss = trainer._compute_loss(model, {
        "input_ids": torch.zeros_like(mask), "attention_mask": torch.ones_like(mask), "completion_mask": mask,
        "ref_chosen_logps": ref_chosen, "ref_rejected_logps": ref_rejected}, False)
    return loss.detach(), torch.autograd.grad(loss, logprobs)[0], trainer._metrics["train"]


COMBINED = [("sigmoid", 1.0), ("sft", 0.2)], [("sigmoid", 0.8), ("bco_pair", 0.2), ("sft", 1.0)]


@pytest.mark.parametrize("losses", [*([(name, 1.0)] for name in LOSSES), *COMBINED], ids=str)
def test_value_and_gradient_equal_trl(losses, float64):
    for seed, beta in enumerate((0.1, 0.5, 2.0)):
        logprobs, ref, mask = random_pairs(seed)
        hyper = {**HYPER, "discopop_tau": 0.5}
        counts = Counts(len(mask) // 2, int(mask[:len(mask) // 2].sum()))
        loss, metrics = pair_loss(logprobs, (ref * mask).sum(1), mask, counts, losses_of(losses, **hyper), beta=beta)
        grad, = torch.autograd.grad(loss, logprobs)
        trl, trl_grad, logged = trl_loss(logprobs, ref, mask, losses, beta=beta, **hyper)
        assert abs(loss.detach() - trl) <= 1e-12 * max(abs(trl), 1)
        assert (grad - trl_grad).abs().max() <= 1e-12 * max(trl_grad.abs().max(), 1) and grad.abs().max() > 0
        for ours, theirs in (("accuracy", "rewards/accuracies"), ("margin", "rewards/margins"),
                             ("reward/chosen", "rewards/chosen"), ("reward/rejected", "rewards/rejected"),
                             ("logprobs/chosen", "logps/chosen"), ("logprobs/rejected", "logps/rejected")):
            assert float(metrics[ours]) == pytest.approx(logged[theirs][0])


# ---------------------------------------------------------------------------------------------- models, episodes
@pytest.fixture(scope="module")
def tiny(probed_once):
    return load_model("tiny")


@pytest.fixture(scope="module")
def start(probed_once, tmp_path_factory):
    """The tiny model as a plain folder: no schooling."""
    folder = tmp_path_factory.mktemp("start")
    for part in make_tiny():
        part.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def recorded(tiny, tmp_path_factory):
    """Two episodes of each of 24 tasks: the expert's, and that of an expert who does the inverse of the right thing."""
    tasks = load_tasks("equations", "train", 24, seed=0)
    good, bad = (demonstrate(tiny[1], "equations", [{**task, "noise": noise} for task in tasks]) for noise in (0, 1))
    path = tmp_path_factory.mktemp("recorded") / "t.jsonl"
    path.write_text("".join(json.dumps({"step": 0, **t.to_json()}) + "\n" for t in good + bad))
    return str(path), list(zip(good, bad))


def run(start, folder, recorded=None, **options):
    defaults = dict(model_path=start, output_dir=str(folder), max_steps=1, eval_tasks=0, batch_size=8, overwrite=True,
                    learning_rate=1e-3, trajectories=recorded and recorded[0], sft_coef=0.0, pairs="all")
    result = dpo.train(dpo.Config(**{**defaults, **options}))
    metrics = Path(folder) / "metrics.jsonl"
    return result, [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []


def test_every_pair_is_trained_in_every_epoch(start, recorded, tmp_path, monkeypatch, capsys):
    """24 pairs in steps of 9: three steps of 8. Once the last 6 of each epoch's shuffled pairs were left out."""
    seen = []
    batch_loss = dpo.batch_loss

    def watched(model, pairs, *rest):
        seen.extend(id(chosen) for chosen, _ in pairs)
        return batch_loss(model, pairs, *rest)
    monkeypatch.setattr(dpo, "batch_loss", watched)
    result, _ = run(start, tmp_path, recorded, batch_size=9, max_steps=None, num_epochs=2, eval_share=0.0, pairs="best_worst")
    assert result["steps"] == 6 and sorted(Counter(seen).values()) == [2] * 24
    assert "before:" not in capsys.readouterr().out  # nothing is held out


def test_the_environment_that_a_data_file_names_is_never_imported(start, recorded, tmp_path):
    """info.env may say anything; only the names of envs.ENVS are environments to play in."""
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil:\n    pass\n")
    episodes = [json.loads(line) for line in Path(recorded[0]).read_text().splitlines()]
    for row in episodes:
        row["info"]["env"] = f"{tmp_path}/evil.py:Evil"
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in episodes))
    result, _ = run(start, tmp_path / "o", (str(path),), eval_tasks=2)
    assert result["success_before"] is None and not (tmp_path / "ran").exists()


def test_held_out_tasks_are_none_that_the_pairs_are_of(start, tiny, tmp_path, monkeypatch):
    """Episodes recorded on the test split are documented as data: what they show is not evaluated."""
    tasks = load_tasks("equations", "test", 12, seed=0)
    sides = [demonstrate(tiny[1], "equations", [{**task, "noise": noise} for task in tasks[:8]]) for noise in (0, 1)]
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(t.to_json()) + "\n" for side in sides for t in side))
    played = []
    monkeypatch.setattr(dpo, "evaluate", lambda *args, **options: played.extend(args[3]) or {})
    run(start, tmp_path / "o", (str(path),), eval_tasks=12)
    learned = {t.info["task"]["equation"] for t in sides[0]}
    assert played and not learned & {task["equation"] for task in played}


def test_a_bad_row_is_refused_before_the_tiny_model_is_taught(tmp_path, monkeypatch):
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n{"chosen": "b"}\n')
    monkeypatch.setattr(dpo, "teach_tiny", lambda *_: pytest.fail("taught before the file was read"))
    with pytest.raises(UserError, match="pairs.jsonl:2: "):
        dpo.train(dpo.Config(dataset=str(tmp_path / "pairs.jsonl"), output_dir=str(tmp_path / "o")))


def test_the_terms_of_the_loss_are_shown_apart(float64):
    batch, options = hand_batch(), {"beta": 0.5}
    _, metrics = pair_loss(*batch, Counts(1, 2), losses_of([("hinge", 2.0), ("sft", 0.5)]), sft_coef=0.1, **options)
    terms = {"hinge": 0.6, "sft": 0.35, "rpo": 0.07}
    assert {name: float(metrics[f"loss/{name}"]) for name in terms} == pytest.approx(terms)
    assert float(metrics["loss"]) == pytest.approx(sum(terms.values()))


def test_the_gradient_is_the_papers_closed_form(tiny, recorded):
    """-beta sigmoid(r_rejected - r_chosen) (grad log pi(chosen) - grad log pi(rejected)), r = beta log(pi / pi_ref).

    arXiv 2305.18290 section 4, below eq. 7; log pi from the model's own logits, shifted here by hand.
    """
    model, beta, pair = tiny[0], 0.7, recorded[1][0]
    weights = [p for p in model.parameters() if p.requires_grad]

    def log_pi(t):
        ids, mask = torch.tensor([t.token_ids]), torch.tensor(t.loss_mask, dtype=torch.float32)
        steps = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        return (steps * mask[1:]).sum()

    values = [log_pi(t) for t in pair]
    grads = [torch.autograd.grad(value, weights) for value in values]
    ref = torch.stack([v.detach() for v in values]) + torch.tensor([0.4, -0.9])  # policy and reference differ
    r_chosen, r_rejected = beta * (torch.stack(values).detach() - ref)
    factor = -beta * torch.sigmoid(r_rejected - r_chosen)
    loss, *_ = dpo.batch_loss(model, [pair], dict(zip(pair, ref.tolist())), dpo.counts_of([pair]), dpo.Config(beta=beta, sft_coef=0.0))
    ours = torch.autograd.grad(loss, weights)
    scale = max(g.abs().max() for g in ours)
    assert all((a - factor * (c - r)).abs().max() < 1e-5 * scale for a, c, r in zip(ours, *grads))


def test_batch_mates_and_padding_change_nothing(tiny, recorded):
    model, config, pairs = tiny[0], dpo.settle(dpo.Config(loss="sigmoid,ipo,sft", loss_weights="1,0.1,0.5")), recorded[1][:4]
    pairs = sorted(pairs, key=lambda pair: len(pair[1].token_ids))
    ref = {t: value + i / 7 for i, (t, value) in enumerate(dpo.reference_sums(model, pairs, config, join()).items())}
    assert len({len(t.token_ids) for pair in pairs for t in pair}) > 2  # they do need padding
    with torch.no_grad():
        whole = dpo.batch_loss(model, pairs, ref, dpo.counts_of(pairs), config)[1]
        parts = Counter()
        for i in range(4):
            parts.update(dpo.batch_loss(model, pairs[i:i + 1], ref, dpo.counts_of(pairs), config)[1])
    assert {k: float(v) for k, v in whole.items()} == pytest.approx({k: float(v) for k, v in parts.items()}, rel=1e-5, abs=1e-5)


def test_accumulation_changes_no_gradient(start, recorded, tmp_path):
    states = []
    for name, size, accumulation in (("a", 8, 1), ("b", 2, 4)):
        run(start, tmp_path / name, recorded, batch_size=size, gradient_accumulation_steps=accumulation, max_grad_norm=1e9,
            loss="sigmoid,sft", loss_weights="1.0,0.5", sft_coef=0.3, pairs="best_worst")
        states.append(load_file(tmp_path / name / "checkpoints" / "step_000001" / "optimizer.safetensors"))
    a, b = ({k: v for k, v in s.items() if k.endswith("|exp_avg")} for s in states)
    scale = max(v.abs().max() for v in a.values())
    assert scale > 0 and all((a[k] - b[k]).abs().max() < 1e-5 * scale for k in a)


# --------------------------------------------------------------------------------------------------------- pairs
def episode(reward, group="0-0", prompt=(1, 2), said=(3,)):
    ids = [*prompt, *said, round(10 * reward) + 20]
    mask = [0] * len(prompt) + [1] * (len(said) + 1)
    return Trajectory(ids, mask, [0.0] * len(ids), [reward], reward, group_id=group)


def paired(files, pairs="all", **options):
    return dpo.make_pairs(files, dpo.Config(pairs=pairs, **options))


def read_pairs(path, rows, tokenizer, env=None):
    """What dpo.py makes of a file with these rows."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = dpo.Config(dataset=str(path), env=env)
    return pairs_of_files.encoded_pairs(pairs_of_files.read_pairs(config), config, tokenizer)


def rewards(pairs):
    return [(chosen.reward, rejected.reward) for chosen, rejected in pairs]


def test_pairs_are_the_best_and_the_worst_or_all_that_differ_enough():
    episodes = [[episode(r) for r in (0.5, 2.0, 1.0, 2.0, 1.4)]]
    assert rewards(paired(episodes, "best_worst")) == [(2.0, 0.5)]
    assert sorted(rewards(paired(episodes))) == [
        (1.0, 0.5), (1.4, 0.5), (2.0, 0.5), (2.0, 0.5), (2.0, 1.0), (2.0, 1.0), (2.0, 1.4), (2.0, 1.4)]
    assert rewards(paired(episodes, min_gap=1.5)) == [(2.0, 0.5)] * 2


def test_reward_bias_and_scaling_come_before_the_gap():
    assert rewards(paired([[episode(0.0), episode(0.1)]], reward_scaling=10.0, reward_bias=1.0)) == [(-9.0, -10.0)]
    assert rewards(paired([[episode(0.0), episode(1.0)]], reward_scaling=-1.0)) == [(0.0, -1.0)]


def test_a_gap_of_just_min_gap_is_enough():
    assert rewards(paired([[episode(1.2), episode(0.9)]], min_gap=0.3)) == [(1.2, 0.9)]  # 1.2 - 0.9 is less than 0.3


def test_the_split_has_max_samples_pairs_within_max_tokens_drawn_by_the_seed(capsys):
    pairs = [(episode(1.0, prompt=(1, n), said=[3] * (n % 2)), episode(0.0, prompt=(1, n))) for n in range(20)]
    longest = max(len(t.token_ids) for pair in pairs for t in pair)

    def split(**options):
        return dpo.split_pairs(pairs, dpo.Config(**{"max_tokens": longest, "eval_share": 0.25, **options}))
    assert [len(part) for part in split()] == [15, 5] and [len(part) for part in split(max_samples=9)] == [7, 2]
    assert "11 of 20 pairs are not learned from: --max_samples\n" in capsys.readouterr().out  # it was silent
    assert split() == split(seed=0) != split(seed=1)
    one, none = dpo.split_pairs(pairs[:1], dpo.Config(max_tokens=longest, eval_share=0.9))
    assert one == pairs[:1] and not none  # something is left to learn from
    with pytest.raises(UserError, match=f"the shortest has {longest} tokens"):
        split(max_tokens=longest - 1)


def test_a_group_id_names_a_task_within_one_file_and_one_prompt():
    first, second = [episode(1.0), episode(0.0, prompt=(1, 9)), episode(0.0, group="0-1")], [episode(0.0)]
    with pytest.raises(UserError, match="no two episodes of one task"):
        paired([first, second])
    assert rewards(paired([[*first, episode(-1.0)], second])) == [(1.0, -1.0)]


def test_no_gap_says_how_large_the_largest_is():
    episodes = [[episode(r) for r in (0.0, 0.25, 0.375)]]
    with pytest.raises(UserError, match=r"--min_gap 0\.5 .*largest gap is 0\.375"):
        paired(episodes, "best_worst")


def test_equal_episodes_of_unequal_luck_are_no_pair():
    lucky, unlucky = episode(1.0), episode(0.0)
    unlucky.token_ids = lucky.token_ids
    with pytest.raises(UserError, match="no pair"):
        paired([[lucky, unlucky]])


def test_of_many_pairs_only_those_that_are_learned_from_become_tokens(tiny, tmp_path, capsys, monkeypatch):
    """All of a file became tokens first: 100,000 pairs took 90 s and a million did not fit in memory, whatever --max_samples."""
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}?", "chosen": "a", "rejected": "b"}) + "\n" for i in range(9)))
    encoded = []
    monkeypatch.setattr("extras.data.pairs.Encoder.__call__", lambda self, c, call=Encoder.__call__: encoded.append(c) or call(self, c))
    config = dpo.Config(dataset=str(path), max_samples=2)
    pairs = pairs_of_files.encoded_pairs(pairs_of_files.read_pairs(config), config, tiny[1])
    assert len(pairs) == 2 and len(encoded) == 4 and "7 of 9 pairs are not learned from: --max_samples\n" in capsys.readouterr().out


def test_a_pair_file_of_recorded_messages_gives_the_episodes_own_tokens(tiny, recorded, tmp_path, start):
    """Rollout and pair file, one chat: the same ids, the same mask. preference_pairs.json is such a file."""
    run(start, tmp_path, recorded, max_steps=0, pairs="best_worst", eval_share=0.25)
    made = json.loads((tmp_path / "preference_pairs.json").read_text())
    assert len(made) == 24 and sum(row["held_out"] for row in made) == 6
    assert all(row["gap"] == row["chosen_reward"] - row["rejected_reward"] >= 0.5 for row in made)
    assert all(row["prompt"][-1]["role"] == "user" and row["chosen"][0]["role"] == "assistant" for row in made)
    calls = [call for row in made for message in row["chosen"] for call in message.get("tool_calls", [])]
    assert calls and all(call["function"].keys() == {"name", "arguments"} for call in calls)  # as TRL and Llama's template read them
    pairs = read_pairs(tmp_path / "pairs.jsonl", made, tiny[1], "equations")
    ids = {tuple((tuple(t.token_ids), tuple(t.loss_mask)) for t in pair) for pair in recorded[1]}
    assert {tuple((tuple(t.token_ids), tuple(t.loss_mask)) for t in pair) for pair in pairs} == ids


def test_pairs_of_prompts_with_earlier_turns_keep_them_in_the_prompt(start, tmp_path):
    """Else whoever learns from preference_pairs.json would learn turns that no episode sampled."""
    code = tmp_path / "plain.py"
    code.write_text("class Plain:\n    def reset(self, **_): pass\n\ndef paid(completion_ids, **_):\n    return [float(sum(ids)) for ids in completion_ids]\n")
    tasks = [{"prompt": [USER, GOOD, {"role": "user", "content": f"Add {i}."}]} for i in range(4)]
    run(start, tmp_path / "o", env=f"{code}:Plain", tasks=tasks, rewards=f"{code}:paid", num_tasks=4, group_size=2, max_new_tokens=4, max_steps=0)
    made = json.loads((tmp_path / "o" / "preference_pairs.json").read_text())
    assert made and all([m["role"] for m in row["prompt"]] == ["user", "assistant", "user"] for row in made)
    assert all([m["role"] for m in row[side]] == ["assistant"] for row in made for side in ("chosen", "rejected"))


USER, GOOD, BAD = ({"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"},
                   {"role": "assistant", "content": "5"})


@pytest.mark.parametrize("row", [
    {"prompt": "2+2?", "chosen": "4", "rejected": "5"}, {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
    {"chosen": [USER, GOOD], "rejected": [USER, BAD]}, {"prompt": [USER], "chosen": "4", "rejected": [BAD], "tools": "[]"},
    {"prompt": "2+2?", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
    {"prompt": None, "chosen": [USER, GOOD], "rejected": [USER, BAD], "tools": None},
    {"prompt": "2+2? ", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
    {"chosen": "\n\nHuman: 2+2?\n\nAssistant: 4", "rejected": "\n\nHuman: 2+2?\n\nAssistant: 5"},
    {"prompt": " \n\nHuman: 2+2?\n\nAssistant:", "chosen": "4", "rejected": "5"}], ids=str)
def test_every_form_of_a_row_is_the_same_pair(tiny, tmp_path, row):
    (pair,) = read_pairs(tmp_path / "f.jsonl", [row], tiny[1])
    for t, answer in zip(pair, "45"):
        assert tiny[1].decode(t.token_ids) == f"<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>"
        assert tiny[1].decode([i for i, m in zip(t.token_ids, t.loss_mask) if m]) == f"{answer}<|im_end|>"
    assert prompt_of(pair[0]) == prompt_of(pair[1])


def test_turns_of_the_prompt_are_not_trained_and_tool_results_neither(tiny, tmp_path):
    def call(n):
        return {"role": "assistant", "content": "", "tool_calls": [
            {"type": "function", "function": {"name": "add_terms", "arguments": {"terms": n}}}]}
    told = [USER, GOOD, {"role": "user", "content": "Solve for x: x - 7 = 2"}]
    row = {"prompt": told, "chosen": [call("7"), {"role": "tool", "name": "add_terms", "content": "x = 9"}, GOOD],
           "rejected": [call("2"), {"role": "tool", "name": "add_terms", "content": "x - 5 = 4"}, BAD]}
    (chosen, rejected), = read_pairs(tmp_path / "f.jsonl", [row], tiny[1], "equations")
    trained = tiny[1].decode([i for i, m in zip(chosen.token_ids, chosen.loss_mask) if m])
    assert trained.count("<|im_end|>") == 2 and '"terms": "7"' in trained and "x = 9" not in trained and trained[-11:-10] == "4"
    assert "x - 5 = 4" in tiny[1].decode(rejected.token_ids) and rejected.loss_mask.count(1) == chosen.loss_mask.count(1)


def test_a_text_beside_whole_conversations_is_one_of_their_questions(tiny, tmp_path):
    """UltraFeedback's and its kin's: what both sides begin with is the prompt, and no turn of it is learned."""
    shared = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}, USER]
    for text in ("1+1?", "2+2?"):
        (pair,) = read_pairs(tmp_path / "f.jsonl", [{"prompt": text, "chosen": [*shared, GOOD], "rejected": [*shared, BAD]}], tiny[1])
        for t, answer in zip(pair, "45"):
            assert tiny[1].decode([i for i, m in zip(t.token_ids, t.loss_mask) if m]) == f"{answer}<|im_end|>"
            assert tiny[1].decode(t.token_ids).startswith("<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n1+1?")


@pytest.mark.parametrize("row", [
    {"prompt": "2+2?", "chosen": "4", "rejected": "5"}, {"chosen": [USER, GOOD], "rejected": [USER, BAD]}], ids=str)
def test_a_system_text_beside_the_pair_opens_it(tiny, tmp_path, row):
    (pair,) = read_pairs(tmp_path / "f.jsonl", [{"system": "Count.", **row}], tiny[1])
    for t in pair:
        assert tiny[1].decode(t.token_ids).startswith("<|im_start|>system\nCount.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>")
    (own,) = read_pairs(tmp_path / "f.jsonl", [{"system": "Count.", "prompt": [{"role": "system", "content": "Add."}, USER],
                                               "chosen": "4", "rejected": "5"}], tiny[1])
    assert "Count" not in tiny[1].decode(own[0].token_ids) and "Add." in tiny[1].decode(own[0].token_ids)


@pytest.mark.parametrize("row, words", [
    ({"prompt": "a", "rejected": "b"}, 'pairs.jsonl:2: no "chosen" field; has: prompt, rejected'),
    ({"prompt": "a", "chosen": "b"}, 'pairs.jsonl:2: no "rejected" field'),
    ({"chosen": "b", "rejected": "c"}, 'pairs.jsonl:2: no "prompt" field, and chosen and rejected do not begin'),
    ({"chosen": [GOOD], "rejected": [BAD]}, 'pairs.jsonl:2: no "prompt" field, and chosen and rejected do not begin'),
    ({"chosen": [USER], "rejected": [USER, BAD]}, 'pairs.jsonl:2: no "prompt" field, and chosen and rejected do not begin'),
    ({"prompt": [USER], "chosen": [USER], "rejected": [USER, BAD]}, 'pairs.jsonl:2: nothing to train: no assistant message'),
    ({"question": "a", "chosen": "b", "rejected": "c"}, 'begin with the same message; name its column: --fields prompt=question'),
    ({"prompt": "a", "response_0": "b", "response_1": "c"}, 'no "chosen" field; has: prompt, response_0, response_1; write a row {prompt, chosen, rejected} for each pair, or name its columns: --fields chosen=good; tasks are given with --tasks'),
    ({"prompt": 3, "chosen": "b", "rejected": "c"}, 'pairs.jsonl:2: "prompt" must be text'),
    ({"prompt": "a", "chosen": [USER], "rejected": "c"}, "pairs.jsonl:2: "),
    ({"prompt": "a", "chosen": "b", "rejected": "c", "tools": [1]}, 'pairs.jsonl:2: "tools" must be a list'),
    ({"prompt": "a", "chosen": "b", "rejected": "c", "tools": "{"}, "pairs.jsonl:2: "),
], ids=str)
def test_a_bad_row_is_told_by_file_and_line(start, tmp_path, monkeypatch, row, words):
    monkeypatch.chdir(tmp_path)
    Path("pairs.jsonl").write_text("".join(json.dumps(r) + "\n" for r in (
        {"prompt": "a", "chosen": "b", "rejected": "c"}, row)))
    with pytest.raises(UserError, match=re.escape(words)):
        run(start, tmp_path / "o", dataset="pairs.jsonl")


def test_sides_that_differ_in_no_token_are_dropped_and_no_pair_at_all_is_refused(tiny, tmp_path, capsys):
    alike = {"prompt": "2+2?", "chosen": {**GOOD, "name": "a"}, "rejected": {**GOOD, "name": "b"}}
    rendered = {"prompt": "2+2?<|im_end|>", "chosen": "4", "rejected": "5"}
    assert len(read_pairs(tmp_path / "pairs.jsonl", [alike, rendered], tiny[1])) == 1
    told = capsys.readouterr().out
    assert "1 rows contain <|im_end|> as text" in told and "1 of 2 pairs have the same tokens on both sides: dropped" in told
    with pytest.raises(UserError, match="pairs.jsonl: no pair is left to learn from"):
        read_pairs(tmp_path / "pairs.jsonl", [alike], tiny[1])


# ---------------------------------------------------------------------------------------------------------- loop
def test_before_the_first_update_the_policy_is_the_reference(start, recorded, tmp_path):
    """Fresh adapter, the same adapter gone on from, all weights: the first loss is log 2, the second is not."""
    for name, model, options in (("a", start, {}), ("b", tmp_path / "a", {}), ("c", start, {"lora_r": 0}),
                                 ("d", start, {"lora_dropout": 0.0, "dtype": "bfloat16"})):
        _, lines = run(str(model), tmp_path / name, recorded, max_steps=2, **options)
        assert lines[0]["loss"] == pytest.approx(math.log(2), abs=1e-6) and abs(lines[0]["margin"]) < 2e-6
        assert lines[1]["loss"] < math.log(2) - 1e-3


def test_learning_rate_zero_changes_nothing(start, recorded, tmp_path):
    _, lines = run(start, tmp_path, recorded, learning_rate=0.0, max_steps=2)
    assert all(abs(line["margin"]) < 1e-5 for line in lines)
    adapter = load_file(tmp_path / "checkpoints" / "step_000002" / "adapter_model.safetensors")
    assert all((v == 0).all() for k, v in adapter.items() if "lora_B" in k)


def test_it_learns_and_held_out_pairs_are_of_other_tasks(start, recorded, tmp_path):
    result, lines = run(start, tmp_path, recorded, max_steps=12, batch_size=16, learning_rate=3e-3, eval_share=0.25)
    assert lines[-1]["loss"] < 0.3 and lines[-1]["accuracy"] == 1 and lines[-1]["logprobs/rejected"] < lines[0]["logprobs/rejected"]
    assert result["held_out_accuracy"] > 0.8 and result["held_out_loss"] < 0.6 and result["held_out_margin"] > 0.3
    made = json.loads((tmp_path / "preference_pairs.json").read_text())
    seen, unseen = ({json.dumps(row["prompt"]) for row in made if row["held_out"] is side} for side in (False, True))
    assert seen and unseen and not seen & unseen
    assert {"success_before", "success_after", "seconds", "peak_memory_mb", "steps", "seed"} <= result.keys()
    load_model(str(tmp_path))


@pytest.mark.parametrize("options", [
    {"loss": ",".join(LOSSES), "label_smoothing": 0.1, "temperature": 0.7},
    {"loss": "sigmoid, sft", "loss_weights": "1.0, 0.2", "length_norm": True, "max_samples": 5, "eval_share": 0.0},
    {"sft_coef": 0.1, "gradient_checkpointing": True, "lora_dropout": 0.1, "num_epochs": 2, "max_steps": None, "save_every": 1, "batch_size": 64}], ids=str)
def test_every_option_runs_and_logs_finite_numbers(start, recorded, tmp_path, options):
    result, lines = run(start, tmp_path, recorded, **{"max_steps": 2, **options})
    assert len(lines) == result["steps"] >= 2 and all(math.isfinite(v) for line in lines for v in line.values())


def test_from_an_environment_alone_it_plays_pairs_trains_and_tells(start, tmp_path, capsys, monkeypatch):
    """The whole run on an untaught model: in this environment every other episode is paid, whatever is said."""
    (tmp_path / "w.py").write_text(
        "class Luck:\n    episodes = 0\n"
        "    def reset(self, n=0, **_):\n        Luck.episodes += 1\n        self.luck = Luck.episodes % 2\n        return f'Say {n}'\n"
        "    def get_reward(self):\n        return float(self.luck)\n"
        "    @staticmethod\n    def _tasks(split, n, seed):\n        return [{'n': i + 500 * (split == 'test')} for i in range(n)]\n")
    monkeypatch.chdir(tmp_path)
    result, lines = run(start, tmp_path / "o", env="w.py:Luck", num_tasks=6, group_size=4, eval_tasks=4, max_new_tokens=4, eval_every=1, eval_share=0.4)
    out = capsys.readouterr().out
    assert result["success_before"] is not None and result["success_after"] is not None and len(lines) == 1
    # An evaluation stands in the line of the step that follows it. The last one is in result.json.
    assert {"success", "pairs/loss"} <= result["before"].keys() & result["after"].keys() and "eval/success" not in lines[0]
    assert "played: 6 tasks, 4 episodes each" in out
    assert len((tmp_path / "o" / "trajectories.jsonl").read_text().splitlines()) == 24


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_a_pair_file_needs_no_environment(start, tmp_path, kind):
    path = tmp_path / f"pairs.{kind}"
    rows = [{"prompt": f"{i}+1?", "chosen": str(i + 1), "rejected": str(i + 2)} for i in range(12)]
    lines = [",".join(rows[0]), *(",".join(row.values()) for row in rows)] if kind == "csv" else map(json.dumps, rows)
    path.write_text("".join(line + "\n" for line in lines))
    result, (line,) = run(start, tmp_path / "o", dataset=str(path))
    assert result["success_before"] is None and line["loss"] == pytest.approx(math.log(2), abs=1e-5)


def test_several_files_are_read_and_their_groups_kept_apart(start, recorded, tmp_path):
    path, pairs = recorded
    for name, side in (("good", 0), ("bad", 1)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(pair[side].to_json()) + "\n" for pair in pairs))
    run(start, tmp_path / "o", (f"{path},{tmp_path}/good.jsonl",), max_steps=0, pairs="best_worst")
    assert len(json.loads((tmp_path / "o" / "preference_pairs.json").read_text())) == 24
    with pytest.raises(UserError, match="no two episodes of one task"):
        run(start, tmp_path / "p", (f"{tmp_path}/good.jsonl,{tmp_path}/bad.jsonl",))
    (tmp_path / "a,b.jsonl").write_text(Path(path).read_text())  # as in the other programs, a file with a comma in its name is one
    run(start, tmp_path / "q", (f"{tmp_path}/a,b.jsonl",), max_steps=0)
    with pytest.raises(UserError, match="leave out shares"):  # they were not kept
        run(start, tmp_path / "r", (f"{path}=0.9,{tmp_path}/good.jsonl=0.1",))


@pytest.mark.parametrize("options, words", [
    ({"loss": "sigmoid,sft", "loss_weights": "1.0"}, "give a number for each of --loss sigmoid,sft, separated by commas"),
    ({"loss_weights": "one"}, "give a number for each of --loss sigmoid, separated by commas"), ({"loss": "sigmod"}, "did you mean sigmoid?"),
    ({"loss": "exo_pair", "label_smoothing": 0.0}, "must be greater than 0"), ({"loss": "robust", "label_smoothing": 0.5}, "must be at most 0.49"),
    ({"loss": "hinge,hinge"}, "names a loss twice"), ({"label_smoothing": 0.1}, "only exo_pair and robust"), ({"max_tokens": 40}, "no pair within --max_tokens 40: the shortest has"),
    ({"min_gap": 100.0}, "the largest gap is "), ({"env": "equatons"}, "did you mean equations?"),
    ({"dataset": "p.jsonl"}, "give one; tasks to evaluate on are given with --tasks"), ({"eval_dataset": "t.jsonl"}, "held-out pairs are --eval_share of all; tasks to evaluate on are given with --tasks")])
def test_clashes_and_empty_hands_are_told_in_one_line(start, recorded, tmp_path, options, words):
    with pytest.raises(UserError, match=re.escape(words)):
        run(start, tmp_path, recorded, **{"eval_tasks": 4, **options})


def test_token_ids_of_another_tokenizer_are_told_by_file_and_line(start, tmp_path):
    rows = [episode(1.0), episode(0.0)]
    rows[1].token_ids[-1] = 99_999
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(t.to_json()) + "\n" for t in rows))
    with pytest.raises(UserError, match=r"t\.jsonl:2: token id 99999 is not in this model's vocabulary of \d+"):
        run(start, tmp_path / "o", (str(path),))


def test_on_the_command_line_a_mistake_is_one_line_and_exit_code_2(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "chosn": "b"}\n')
    done = programs.run(dpo.__file__, "--dataset", "p.jsonl", cwd=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith('dpo.py: p.jsonl:1: no "chosen" field; has: prompt, chosn')


@pytest.mark.parametrize("row", [
    {"instruction": "Q", "chosen": "good", "rejected": "bad"},
    {"conversations": [{"from": "human", "value": "Q"}], "chosen": {"from": "gpt", "value": "good"}, "rejected": {"from": "gpt", "value": "bad"}},
    {"prompt": [{"role": "user", "content": "Q"}], "chosen": {"role": "assistant", "content": "good"}, "rejected": [{"role": "assistant", "content": "bad"}]}])
def test_pairs_of_alpaca_and_sharegpt_are_those_of_prompt_chosen_rejected(row):
    from extras.data.pairs import preference
    ours = preference({"prompt": "Q", "chosen": "good", "rejected": "bad"}, "p:1")
    for side, expected in zip(preference(row, "p:1"), ours):
        assert [(m["role"], m["content"], m.get("loss")) for m in side.messages] == [(m["role"], m["content"], m.get("loss")) for m in expected.messages]
