"""Every command of the README is understood by the file it names, and every flag and metric it explains exists."""
import json
import re
import shlex
from pathlib import Path

import pytest


import agent_program
import dpo
import grpo
import reward_weighted
import sft
from envs import load
from envs.tasks import load_tasks
from schooling import demonstrate
from core.config import options
from extras.hints.command_line import parse

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PROGRAMS = {"grpo": grpo, "sft": sft, "agent": agent_program, "reward_weighted": reward_weighted, "dpo": dpo}
COMMANDS = re.findall(rf"^python ({'|'.join(PROGRAMS)})\.py *([^#\n]*?) *(?:#.*)?$", README, re.M)


@pytest.mark.parametrize("program, rest", COMMANDS)
def test_command_parses(program, rest):
    words = [w for w in shlex.split(rest) if w != "--help"]
    if "--config" in words:  # the file it names is written by the command before it
        at = words.index("--config")
        del words[at:at + 2]
    parse(PROGRAMS[program].Config, words)


def test_there_are_commands():
    assert len(COMMANDS) >= 6


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(--\w+)", README))))
def test_flag_exists(name):
    known = {"config", "help"}
    for module in PROGRAMS.values():
        known |= set(options(module.Config))
    assert name[2:].split("/")[0] in known


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`((?:bench|envs|tests)/[\w./]+)`", README))))
def test_file_exists(path):
    assert (ROOT / path).exists()


def test_what_ci_runs_is_what_the_readme_says():
    ci = (ROOT / ".ci" / "run").read_text()
    assert "pip install -q -r requirements-dev.txt" in ci and ci.rstrip().endswith("pytest -q")
    assert "pip install -r requirements-dev.txt && pytest -q" in README


def test_the_template_environment_plays():
    from core.tiny import make_tiny
    tasks = load_tasks("envs/template.py:HigherLower", "test", 3, seed=0)
    for t in demonstrate(make_tiny()[1], "envs/template.py:HigherLower", tasks):
        assert t.info["success"] and t.reward == 1.0 and t.reward_parts == {"found": 1.0} and t.stop_reason == "done"


def test_the_templates_expert_knows_only_what_the_tool_said():
    """It finds every number within its turns, and begins alike whatever the number is."""
    cls, guesses = load("envs/template.py:HigherLower"), {}
    for number in range(1, 100):
        env, guesses[number] = cls(), []
        env.reset(number)
        while calls := env._expert():
            guesses[number].append(calls[0]["arguments"]["number"])
            env.guess(**calls[0]["arguments"])
        assert env._check() and len(guesses[number]) <= 7 < env.max_turns
    assert {said[0] for said in guesses.values()} == {50} and {said[1] for said in guesses.values() if len(said) > 1} == {25, 75}


# ------------------------------------------------------------------------------ the README's own environment
@pytest.fixture(scope="module")
def guess_number(tmp_path_factory):
    """--env of the class that README shows, in a file of its own."""
    path = tmp_path_factory.mktemp("readme") / "my_env.py"
    path.write_text(re.search(r"```python\n(# my_env.py\n.*?)```", README, re.S)[1])
    return f"{path}:GuessNumber"


def test_the_readmes_expert_finds_every_number_by_what_the_tool_said(guess_number):
    cls, first = load(guess_number), set()
    for number in range(1, 100):
        env = cls()
        env.reset(number=number)
        turns = []
        while calls := env._expert():
            turns.append(calls[0]["arguments"]["number"])
            env.guess(**calls[0]["arguments"])
        assert env.get_reward() == 1.0 and turns[-1] == number and len(turns) <= 7
        first.add(turns[0])
    assert first == {50}
    train, test = (cls._tasks(split, 20, 0) for split in ("train", "test"))
    assert not {task["number"] for task in train} & {task["number"] for task in test}


def test_the_readmes_environment_passes_the_check_that_readme_names(guess_number):
    from extras.check import Conformance
    from extras.play import Config, Setup
    verdicts = {name: verdict for name, verdict, _ in Conformance(Setup(Config(env=guess_number))).verdicts()}
    assert len(verdicts) > 10 and set(verdicts.values()) == {"pass"}, verdicts


def test_the_readmes_environment_is_imitated_and_then_trained_on(guess_number, tiny, tmp_path):
    words = [w for program, rest in COMMANDS if "GuessNumber" in rest for w in [program, *shlex.split(rest)]]
    assert words[0] == "sft" and "grpo" in words
    small = {"eval_tasks": 1, "max_steps": 1, "max_new_tokens": 8, "env": guess_number}
    taught = str(tmp_path / "sft")
    result = sft.train(sft.Config(model_path=str(tiny), lora_r=16, gradient_accumulation_steps=1, batch_size=2, max_samples=4,
                                  output_dir=taught, **small))
    assert result["steps"] == 1 and result["held_out_loss"] > 0
    result = grpo.train(grpo.Config(model_path=taught, tasks_per_step=1, group_size=2, output_dir=str(tmp_path / "grpo"), **small))
    assert result["steps"] == 1 and result["held_out_tasks"] == 1
    rows = [json.loads(line) for line in (tmp_path / "grpo" / "trajectories.jsonl").read_text().splitlines()]
    assert len(rows) == 2 and all(row["info"]["env"] == guess_number for row in rows)
