"""Whole runs and decode steps on a CUDA device that the CPU plays (fake_cuda.py): nothing that CUDA refuses, and the CPU's numbers."""
import json
import random
import shutil

import bitsandbytes  # noqa: F401  it looks for a GPU when it is imported
import pytest
import torch
from fake_cuda import Violation, cuda
from test_engine import FAMILIES, build, complete, ids_of

import agent
import agent_program
import dpo
import grpo
import lora
import reward_weighted
import sft
from core.engine import Row
from layers import load_model
from core.logprobs import token_logprobs
from core.tiny import make_tiny

SMALL = {"memory": "small"}


# ------------------------------------------------------------------------------------------ the witness
@pytest.mark.parametrize("mix", [
    lambda a, b: a + b, lambda a, b: b.mul_(a), lambda a, b: a @ b.T, lambda a, b: a.gather(1, b.long()), lambda a, b: torch.cat([a, b]),
    lambda a, b: torch.where(b > 0, a, 0.0), lambda a, b: a.masked_fill_(b > 0, 0.0), lambda a, b: a.numpy(), lambda a, b: a.pin_memory()])
def test_the_witness_sees_what_cuda_would_refuse(mix):
    with pytest.raises(Violation, match="mix"), cuda():
        mix(torch.zeros(2, 3, device="cuda"), torch.zeros(2, 3))


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("look", [
    lambda a: a.sum().item(), lambda a: a.nonzero(), lambda a: torch.where(a > 0), lambda a: a[a > 0], lambda a: a.cpu(), lambda a: a.tolist(), lambda a: a[[1, 0]],
    lambda a: a + torch.tensor([2.0], device="cuda"), lambda a: a.copy_(torch.zeros(2, 3))])
def test_the_witness_sees_what_no_graph_can_hold(look, mode):
    with pytest.raises(Violation, match="capture"), cuda(), mode():
        a = torch.zeros(2, 3, device="cuda")
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            look(a)


def test_the_witness_sees_a_race():
    def copies(host):
        there = torch.empty(2, device="cuda")
        with torch.cuda.stream(torch.cuda.Stream()) as side:
            there.copy_(host, non_blocking=True)
        return there, side

    with cuda():
        there, side = copies(torch.ones(2).pin_memory())
        assert there.sum().item() != 2  # it is still under way
    with pytest.raises(Violation, match="race"), cuda():
        host = torch.ones(2).pin_memory()
        copies(host)
        host.add_(1)
    with pytest.raises(Violation, match="race"), cuda():
        host = torch.empty(2, pin_memory=True).copy_(torch.ones(2, device="cuda"), non_blocking=True)
        host + 1


def test_a_graph_does_nothing_when_captured_and_everything_when_replayed():
    with cuda():
        a = torch.ones(3, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            a += 1
        assert a.tolist() == [1, 1, 1]
        a += 4
        graph.replay()
        graph.replay()
        assert a.tolist() == [7, 7, 7] and a.is_cuda and not a.cpu().is_cuda


# ------------------------------------------------------------------------------------------ whole runs
@pytest.fixture
def calling(monkeypatch):
    """Let the model call tools: its turns are forced, and random."""
    tokenizer = make_tiny()[1]
    tools = "add_terms", "subtract_terms", "multiply_terms", "divide_terms"

    def row(*arguments, seed, **options):
        rng = random.Random(seed)
        call = '<tool_call>\n{"name": "%s", "arguments": {"value": "%d"}}\n</tool_call><|im_end|>'
        turns = "".join(call % (rng.choice(tools), rng.randint(2, 9)) for _ in range(rng.randint(1, 2)))
        return Row(*arguments, seed=seed, forced=tokenizer.encode(turns, add_special_tokens=False), **options)
    monkeypatch.setattr(agent, "Row", row)


def options_of(module, folder, name, **options):
    """Return the settings of a run of two steps. The rewards are any numbers."""
    for part in make_tiny():
        part.save_pretrained(folder / "base")
    (folder / "chance.py").write_text(
        "def reward(prompts, completions, completion_ids, **_):\n    return [sum(ids) % 7 / 7 for ids in completion_ids]\n")
    (folder / "pairs.jsonl").write_text("".join(
        json.dumps({"prompt": "2 + 2?", "chosen": f"{i}", "rejected": "five, or so"}) + "\n" for i in range(4)))
    sizes = {"lora_r": 4, "tasks_per_step": 2, "group_size": 2, "batch_size": 2, "max_samples": 4, "max_steps": 2, "max_new_tokens": 12,
             "max_tokens": 250, "learning_rate": 1e-3, "eval_tasks": 0, "rewards": f"environment=0,{folder}/chance.py:reward", "save_every": 1}
    if module is dpo:
        sizes |= {"dataset": str(folder / "pairs.jsonl"), "rewards": None}
    sizes = {key: value for key, value in sizes.items() if key in module.Config.__dataclass_fields__}
    return module.Config(model_path=str(folder / "base"), output_dir=str(folder / name), **{**sizes, **options})


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def metrics_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").open()]


@pytest.mark.parametrize("module, options", [
    slow(grpo, {**SMALL, "kl_coef": 0.1}), slow(grpo, {"memory": "stream"}), slow(grpo, {"importance_correction": 2.0, "credit": "process"}),
    slow(grpo, {"lora_r": 0, "kl_coef": 0.1, "entropy_coef": 0.1, "loss": "vespo"}), slow(grpo, {"memory": "checkpoint", "credit": "turn"}),
    slow(sft, SMALL), slow(sft, {"lora_r": 0}), (dpo, SMALL), slow(dpo, {"lora_r": 0}), slow(reward_weighted, SMALL),
    slow(reward_weighted, {"memory": "4bit"}),
], ids=lambda x: x.__name__ if hasattr(x, "__name__") else "-".join(map(str, x.values())))
def test_a_run_computes_what_it_does_on_a_cpu(module, options, tmp_path, calling):
    module.train(options_of(module, tmp_path, "host", **options))
    with cuda() as device:
        result = module.train(options_of(module, tmp_path, "device", **options))
    assert result["steps"] == 2 and device.events["blocking copy to the device"]
    plays = module in (grpo, reward_weighted)
    assert bool(device.graphs) == (plays and options.get("memory") != "stream")
    for here, there in zip(metrics_of(tmp_path / "host"), metrics_of(tmp_path / "device"), strict=True):
        assert here["grad_norm"] > 0
        if here.get("margin") == pytest.approx(0, abs=1e-6):
            here["accuracy"] = there["accuracy"]  # before the first update its sign is rounding
        assert here.pop("reward_histogram", None) == there.pop("reward_histogram", None)  # of numbers that none computes
        assert there == pytest.approx(here, rel=1e-3, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("bfloat16", [True, False])
def test_a_real_models_default_dtype_is_the_cards(bfloat16, tmp_path, calling, monkeypatch):
    """bfloat16, and float16 before Ampere: the ratio is 1 but for their rounding, and the gradients are finite."""
    monkeypatch.setattr(grpo, "is_tiny", lambda path: False)
    with cuda(bfloat16):
        grpo.train(options_of(grpo, tmp_path, "run", **SMALL, updates_per_step=2, max_steps=1))
    assert f"dtype: {'bfloat16' if bfloat16 else 'float16'}\n" in (tmp_path / "run" / "config.yaml").read_text()
    for line in metrics_of(tmp_path / "run"):
        assert line["first_ratio"] == pytest.approx(1, abs=3e-3) and 0 < line["grad_norm"] < 10


@pytest.mark.slow
def test_a_run_goes_on_and_is_played(tmp_path, calling):
    with cuda():
        grpo.train(options_of(grpo, tmp_path, "run", **SMALL, eval_tasks=1))
        whole = metrics_of(tmp_path / "run")
        shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_000002")
        (tmp_path / "run" / "result.json").unlink()
        grpo.train(options_of(grpo, tmp_path, "run", **SMALL, eval_tasks=1, resume=True))
        agent_program.run(agent_program.Config(model_path=str(tmp_path / "run"), num_tasks=2, group_size=2, output=str(tmp_path / "traces.jsonl")))
    assert metrics_of(tmp_path / "run") == whole


def test_a_run_with_a_tensor_on_the_host_is_seen(tmp_path, calling, monkeypatch):
    collate = grpo.collate
    monkeypatch.setattr(grpo, "collate", lambda batch, device: collate(batch, "cpu"))
    with pytest.raises(Violation, match="mix"), cuda():
        grpo.train(options_of(grpo, tmp_path, "run"))


def test_gradients_of_tiles_are_summed_on_the_device(tmp_path):
    """Two updates, each of two tiles on a GPU (of six on a CPU), by an adapter in host memory."""
    def gradients():
        model = load_model(str(tmp_path), lora_r=4, memory="small")[0]
        for linear in lora.adapted_linears(model).values():
            linear.lora.B.data.copy_(torch.linspace(-0.1, 0.1, linear.lora.B.numel()).view(linear.lora.B.shape))
        for seed in (1, 2):
            ids = torch.tensor([ids_of(700, seed), ids_of(700, seed + 2)]).to(model.device)
            with lora.merged_to_train(model):
                token_logprobs(model.train(), ids, torch.ones_like(ids), 1.0)[0].sum().backward()
        return [p.grad for p in lora.adapter_tensors(model).values()]

    for part in make_tiny():
        part.save_pretrained(tmp_path)
    here = gradients()
    with cuda():
        there = gradients()
    for mine, theirs in zip(here, there, strict=True):
        assert (mine - theirs).norm() <= 1e-4 * mine.norm() and mine.any()


# ----------------------------------------------------------------------------------------- decode steps
MODELS = [*((name, {}, False) for name in FAMILIES), ("tiny", {"lora_r": 4}, True), ("tiny", {"lora_r": 4}, False), ("tiny", {"lora_r": 4, "memory": "small"}, True)]
CUT, GREEDY = {"temperature": 0.7, "top_k": 5, "top_p": 0.9}, {"temperature": 0}


# A graph's tokens are drawn in one way, whatever the model.
@pytest.mark.parametrize("name, options, merge, sampling", [
    *((*model, {}) for model in MODELS), *((*MODELS[0], sampling) for sampling in (CUT, GREEDY)),
    *(slow(*model, sampling) for model in MODELS[1:] for sampling in (CUT, GREEDY))], ids=str)
def test_graphs_draw_what_a_cpu_draws(name, options, merge, sampling, tmp_path):
    def play():
        if name in FAMILIES:
            model = build(name).to("cuda" if torch.cuda.is_available() else "cpu")
        else:
            for part in make_tiny():
                part.save_pretrained(tmp_path)
            model = load_model(str(tmp_path), **options)[0].eval()
        prompts = [ids_of(9), ids_of(4, 1)]
        with lora.merged(model):
            return complete(model, prompts, group_size=3, max_new_tokens=11, slots=4, stop_ids={2}, **sampling)

    here = play()
    with cuda() as device:
        there = play()
    assert device.graphs and [ids for ids, _ in there] == [ids for ids, _ in here]
    for (_, mine), (_, theirs) in zip(here, there, strict=True):
        assert theirs == pytest.approx(mine, abs=1e-4)
