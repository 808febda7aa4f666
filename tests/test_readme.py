"""Every command of the README is understood by the file it names, and every flag and metric it explains exists."""
import re
import shlex
from pathlib import Path

import pytest


import dpo
import grpo
import reward_weighted
import sft
from envs import load
from episodes.tasks import load_tasks
from window import chat as talk
from episodes.imitation import demonstrate
from experiment.command_line import parse
from experiment.config import options

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PROGRAMS = {"grpo": grpo, "sft": sft, "agent": talk, "reward_weighted": reward_weighted, "dpo": dpo}
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
    from llm.tiny import make_tiny
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
