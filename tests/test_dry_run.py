"""llm/dry_run.py: what every setting of the dial needs, in sentences, and the first one that fits."""
import importlib
import re
import time

import pytest
import torch
from memory_helpers import save_tiny

import dpo
import grpo
import reward_weighted
import sft
from experiment.errors import Stop
from llm.budget import MIB, Workload, measure
from llm.memory import SETTINGS

# `llm.dry_run` as an attribute is the function of that name.
dry_run = importlib.import_module("llm.dry_run")
SMALL = {"dry_run": True, "lora_r": 4, "batch_size": 4, "max_tokens": 200, "max_new_tokens": 40, "dtype": "float32"}


def config_of(module, tmp_path, **changes):
    values = {**SMALL, "output_dir": str(tmp_path / "run"), **changes}
    return module.Config(**{name: value for name, value in values.items() if name in module.Config.__dataclass_fields__})


def needs_of(lines):
    """Return {setting: MiB} of the printed sentences."""
    found = [re.match(r"--memory (\w+) needs ([\d,]+) MiB: .*\.$", line) for line in lines]
    return {m[1]: int(m[2].replace(",", "")) for m in found if m}


@pytest.mark.parametrize("module", [grpo, sft, dpo, reward_weighted], ids=lambda module: module.__name__)
def test_every_algorithm_counts_every_setting(module, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(dry_run, "free_memory", lambda kind: 2**33)
    began = time.process_time()
    found = module.train(config_of(module, tmp_path))
    assert time.process_time() - began < 60
    lines = capsys.readouterr().out.splitlines()
    needs = needs_of(lines)
    assert not (tmp_path / "run").exists()
    assert list(needs) == list(SETTINGS)
    assert lines[0] == "There are 8,192 MiB of free memory." and lines[-1] == "The first setting that fits is --memory plain."
    assert max(found["update"], found.get("rollout", 0)) + found["host"] == pytest.approx(needs["plain"], abs=0.5)
    assert "beside" not in "".join(lines) and " 0 MiB" not in "".join(lines)
    assert any("update of 4 x 200 tokens" in line or "update of 8 x 200 tokens" in line for line in lines)


def counted_once(monkeypatch):
    """Let `dry_run` count each setting once in a test: what is free changes, what is needed does not."""
    counts, count = {}, dry_run.measure

    def measure_once(*args, **options):
        key = repr((args, options))
        if key not in counts:
            counts[key] = count(*args, **options)
        return counts[key]
    monkeypatch.setattr(dry_run, "measure", measure_once)


def test_the_first_setting_that_fits_is_named(tmp_path, capsys, monkeypatch):
    counted_once(monkeypatch)
    monkeypatch.setattr(dry_run, "free_memory", lambda kind: 2**33)
    grpo.train(config_of(grpo, tmp_path, eval_tasks=0))
    needs = needs_of(capsys.readouterr().out.splitlines())
    assert needs["small"] < needs["plain"]
    for memory, need in needs.items():
        first = next(name for name in needs if needs[name] <= need)
        monkeypatch.setattr(dry_run, "free_memory", lambda kind, need=need: (need + 1) * MIB)
        if first == "plain":
            grpo.train(config_of(grpo, tmp_path, eval_tasks=0))
            continue
        with pytest.raises(Stop, match=rf"--memory plain does not fit: it needs .* MiB are free\. The first setting that fits is --memory {first}\.") as stop:
            grpo.train(config_of(grpo, tmp_path, eval_tasks=0))
        assert stop.value.code == 1
        grpo.train(config_of(grpo, tmp_path, eval_tasks=0, memory=first))
    monkeypatch.setattr(dry_run, "free_memory", lambda kind: MIB)
    with pytest.raises(Stop, match="No setting fits; --memory .* needs the least, .*lower --batch_size or --max_tokens, or take a smaller model"):
        grpo.train(config_of(grpo, tmp_path, eval_tasks=0))


def test_what_needs_an_adapter_says_so(tmp_path, capsys):
    grpo.train(config_of(grpo, tmp_path, lora_r=0))
    lines = capsys.readouterr().out.splitlines()
    assert list(needs_of(lines)) == ["plain", "checkpoint"]
    refused = [line for line in lines if "cannot be used" in line]
    assert len(refused) == 3 and all("give --lora_r" in line for line in refused)


def test_a_standard_flag_stays_on_in_every_line(tmp_path, capsys):
    grpo.train(config_of(grpo, tmp_path, load_in_4bit=True))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("--memory")]
    assert [" ".join(line.split()[:3]) for line in lines] == [
        "--memory plain --load_in_4bit", "--memory checkpoint --load_in_4bit", "--memory 4bit needs", "--memory small needs", "--memory stream needs"]


def test_no_more_sequences_are_counted_than_a_step_has(tmp_path, capsys):
    grpo.train(config_of(grpo, tmp_path, batch_size=64, tasks_per_step=2, group_size=3, eval_tasks=4))
    out = capsys.readouterr().out
    assert "update of 6 x 200 tokens" in out and "rollout of 6 episodes at once" in out


def test_the_longest_batch_is_tried(tmp_path, capsys):
    """On a GPU only; a CPU stands for it here, and the count is what the attempt takes."""
    config = config_of(grpo, tmp_path, model_path=save_tiny(tmp_path / "base"))
    work = Workload(4, 200, decode_rows=8, group_size=4, max_new_tokens=40)
    counted = measure(dry_run.load_options(config, "plain"), work, "cpu")
    tried = dry_run.attempt(config, work, "cpu")
    for phase in ("update", "rollout"):
        assert tried[phase] == pytest.approx(counted[phase], rel=0.01)
    assert capsys.readouterr().out.startswith("The longest batch was tried in earnest: --memory plain needs ")


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError])
def test_an_attempt_that_runs_out_of_memory_stops(tmp_path, monkeypatch, error):
    def fails(*_):
        raise error
    monkeypatch.setattr(dry_run, "measure", fails)
    with pytest.raises(Stop, match="--memory plain runs out of memory") as stop:
        dry_run.attempt(config_of(grpo, tmp_path), Workload(4, 200), "cpu")
    assert stop.value.code == 1
