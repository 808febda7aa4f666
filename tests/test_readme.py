"""Every command on README and the pages of docs/ is understood by the program it names, and what they name exists.

A block without a language, or of a shell, holds commands; blocks of another language (```text, ```python) do not. Of the commands
the programs of this project are parsed in this process, the flags of bench/ and lessons/ are looked up in their files, and those of
other programs (OTHERS) are left alone. Placeholders such as path/to/model are values like others.
"""
import argparse
import json
import re
import shlex
import sys
from functools import cache
from pathlib import Path

import pytest


import agent_program
import distill
import dpo
import grpo
import merge
import reward_weighted
import sft
from envs import load
from envs.tasks import load_tasks
from schooling import demonstrate
from core.config import UserError, options
from extras.hints.command_line import parse
from extras.hints.refusals import NOT_HERE, SYNONYMS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PROGRAMS = {"grpo": grpo, "sft": sft, "agent": agent_program, "reward_weighted": reward_weighted, "dpo": dpo, "distill": distill}
PAGES = [path for path in (ROOT / "README.md", ROOT / "README.zh.md", *sorted((ROOT / "docs").rglob("*.md"))) if path.exists()]
SHELLS = ("", "bash", "sh", "shell", "console", "zsh", "powershell")
# Programs of others. A word that is none of these, and none of ours, is a slip of the pen.
OTHERS = set("""apt apt-get brew cat cd chmod cmake code conda cp curl docker echo export for git hf huggingface-cli jupyter
jupyter-lab kill litellm llama-cli llama-server lm_eval ls make mkdir mv nano nvidia-smi ollama pip pip3 rm screen sed ssh source sudo
tail tensorboard tmux touch trackio trl unzip uv uvx vi vllm wandb wget wsl xdg-open open""".split())
# Pages on which people find what they typed elsewhere: flags of others, which one line here answers.
OF_OTHERS = ("coming-from.md",)


# ------------------------------------------------------------------------------------------ what a page says
def blocks(text):
    """Yield (language, text) of each fenced block."""
    for language, body in re.findall(r"^ *```([\w-]*)[^\n]*\n(.*?)^ *```", text, re.M | re.S):
        yield language, body


def prose(text):
    """Return a page without its fenced blocks."""
    return re.sub(r"^ *```.*?^ *```", "", text, flags=re.M | re.S)


def split_command(line):
    """Return the commands of a line, each as a list of words, without comments and redirections."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;<>()")
    lexer.whitespace_split = True
    commands, words, skip = [], [], False
    for word in lexer:
        if set(word) <= set("&|;()"):
            commands.append(words)
            words = []
        elif set(word) <= set("<>"):
            skip = True
        elif skip:
            skip = False
        else:
            words.append(word)
    return [words for words in (*commands, words) if words]


def commands_of(text):
    """Yield the commands in the fenced blocks of a page, each as a list of words."""
    for language, body in blocks(text):
        if language not in SHELLS:
            continue
        for line in body.replace("\\\n", " ").splitlines():
            line = re.sub(r"^\s*\$ ", "", line)
            # A block without a language may also show output, or tokens.
            if language or re.match(r"\s*(\w+=\S+ )*(uv run )?(python3?|torchrun|pytest|pip|uv)\b", line):
                yield from split_command(line)


def without_prefix(words):
    """Return a command without the variables and programs that stand before the one that counts."""
    while words and (re.fullmatch(r"\w+=.*", words[0]) or words[0] in ("time", "nohup", "env")):
        words = words[1:]
    return words[2:] if words[:2] == ["uv", "run"] else words


class Parsed(Exception):
    """Raised in place of what a program does after its arguments are read."""


@pytest.fixture
def parses_only(monkeypatch):
    """Return a function that lets a program parse its arguments, and stops it there."""
    original = argparse.ArgumentParser.parse_args

    def parse_args(parser, args=None, namespace=None):
        original(parser, args, namespace)
        raise Parsed

    def run(program, *arguments):
        try:
            program(*arguments)
        except Parsed:
            return
        except SystemExit as end:
            raise AssertionError(f"exit {end.code}") from None
        raise AssertionError("nothing was parsed")
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    return run


@cache
def flags_in_file(path: Path) -> frozenset:
    """Return the flags that a program of bench/ or lessons/ declares, with those of the modules of bench/ that it imports."""
    text = path.read_text()
    flags = set(re.findall(r"""["'](--[\w-]+)["']""", text)) | {"--help"}
    for module in re.findall(r"^from bench\.(\w+) import", text, re.M):
        flags |= flags_in_file(ROOT / "bench" / f"{module}.py")
    return frozenset(flags)


def check_flags(config, words):
    """Raise UserError if a program with this Config does not take these words."""
    words = [word for word in words if word not in ("--help", "-h", "...")]
    while "--config" in words:  # the file it names is written by the command before it
        at = words.index("--config")
        del words[at:at + 2]
    parse(config, words)


def check_command(words, parses_only, monkeypatch):
    """Raise what is wrong with a command."""
    program, *rest = words
    if program in ("python", "python3", "python3.11", "python3.12", "python3.13"):
        if rest[:1] == ["-m"]:
            check_module(rest[1], rest[2:], parses_only, monkeypatch)
        elif rest[:1] != ["-c"]:
            check_file(rest[0], rest[1:], parses_only)
    elif program == "torchrun":
        from torch.distributed.run import get_args_parser
        args, _ = get_args_parser().parse_known_args(rest)
        check_file(args.training_script, args.training_script_args, parses_only)
    elif program == "pytest":
        for word in rest:
            assert word.startswith("-") or not re.match("(tests|bench)/", word) or (ROOT / word).exists(), word
    else:
        assert program in OTHERS or program.startswith((".", "/", "~")), f"unknown program {program}"
        if program in ("pip", "pip3") and "-r" in rest:
            assert (ROOT / rest[rest.index("-r") + 1]).exists(), words
        if program == "git" and rest[:1] == ["apply"]:
            assert (ROOT / rest[1]).exists(), words


def check_module(name, words, parses_only, monkeypatch):
    if name in ("extras.check", "extras.play"):
        from extras.play import Config
        check_flags(Config, words if words[0].startswith("-") else ["--env", *words])
    elif name == "extras.show":
        from extras.show.__main__ import program
        monkeypatch.setattr(sys, "argv", ["show", *words])
        parses_only(program)
    elif name == "pytest":
        check_command(["pytest", *words], parses_only, monkeypatch)
    else:
        ours = any((ROOT / f"{name.replace('.', '/')}{end}").exists() for end in (".py", "/__main__.py"))
        assert ours or name in ("venv", "pip", "http", "http.server", "jupyter", "vllm"), f"python -m {name}"


def check_file(file, words, parses_only):
    """Check a command `python FILE ...`: a program, or a fork of one, which has its flags."""
    path = ROOT / file
    if path.name in ("lora.py", "merge.py"):
        parses_only(merge.main, words)
    elif path.stem in PROGRAMS:
        assert path.exists(), file
        check_flags(PROGRAMS[path.stem].Config, words)
    elif path == ROOT / "bench" / "memory.py":
        of_other = words and words[0].endswith(".py")
        module = PROGRAMS[Path(words[0]).stem] if of_other else grpo
        check_flags(module.Config, words[1:] if of_other else words)
    elif file.startswith(("bench/", "lessons/")):
        assert path.exists(), file
        asked = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert not asked - flags_in_file(path), f"{file} has no {asked - flags_in_file(path)}"
    else:
        assert not words or file.startswith(("my_", "path/to/", "../")), f"no such program: {file}"


def commands_in_prose(page, text):
    """Yield the commands in the sentences and tables of a page. A loss that the page itself defines stands for one of ours."""
    if page.name in OF_OTHERS:
        return
    for span in re.findall(r"`((?:uv run )?(?:python|torchrun|pytest) [^`]+)`", prose(text)):
        for words in split_command(" ".join(span.split())):
            yield [word if f"def {word}(" not in text else "grpo" for word in words]


COMMANDS = []
for page in PAGES:
    for words in (*commands_of(page.read_text()), *commands_in_prose(page, page.read_text())):
        if without_prefix(words):
            COMMANDS.append(pytest.param(without_prefix(words), id=f"{page.name}: {' '.join(words)}"[:150]))


@pytest.mark.parametrize("words", COMMANDS)
def test_command_is_understood(words, parses_only, monkeypatch):
    check_command(words, parses_only, monkeypatch)


def test_there_are_commands():
    for page in PAGES:
        if page.name in ("README.md", "README.zh.md") and page.parent == ROOT:
            ours = [words for words in map(without_prefix, commands_of(page.read_text())) if words[:1] == ["python"]]
            assert len(ours) >= 3, page.name


@pytest.mark.parametrize("line, wrong", [
    ("python grpo.py --no_such_flag 1", UserError), ("python grpo.py --group_size x", UserError),
    ("python grppo.py --seed 1", AssertionError), ("torchrun --nproc_per_node=2 grpo.py --sed 1", UserError),
    ("python lora.py marge a b", AssertionError), ("python -m extras.chek equations", AssertionError),
    ("python -m extras.show --metric", AssertionError), ("python bench/vs_trl.py --round 2", AssertionError),
    ("python bench/memory.py sft.py --tasks_per_step 2", UserError), ("pip install -r requirement.txt", AssertionError),
    ("pyton grpo.py", AssertionError), ("cd .. && CUDA_VISIBLE_DEVICES= python grpo.py --sed 0 > log  # why", UserError)])
def test_a_command_that_is_wrong_is_found(line, wrong, parses_only, monkeypatch):
    [*_, words] = map(without_prefix, commands_of(f"```bash\n{line}\n```\n"))
    with pytest.raises(wrong):
        check_command(words, parses_only, monkeypatch)


# ------------------------------------------------------------------------------------------ what a page names
def known_flags(page: Path, text: str) -> set:
    """Return the flags that may stand in the prose of a page: ours, and those of the other programs that it starts."""
    known = {"--config", "--help", *flags_in_file(ROOT / "merge.py"), *flags_in_file(ROOT / "extras/show/hub.py"), "--metrics"}
    for module in PROGRAMS.values():
        for name, option in options(module.Config).items():
            known |= {f"--{word}" for word in (name, *option.aliases)} | {f"--no_{name}"}
    for words in map(without_prefix, commands_of(text)):
        if words[:1] == ["torchrun"]:
            from torch.distributed.run import get_args_parser
            known |= set(get_args_parser()._option_string_actions)
        if set(words[:1]) <= OTHERS | {"torchrun", "pytest"}:
            known |= {word.partition("=")[0] for word in words if word.startswith("--")}
    for path in re.findall(r"`?python ((?:bench|lessons)/\w+\.py)", text):
        known |= flags_in_file(ROOT / path) if (ROOT / path).exists() else set()
    if page.name in OF_OTHERS:
        synonyms = [word.partition("=")[0] for words in SYNONYMS.values() for word in words]
        known |= {f"--{name}" for name in (*NOT_HERE, *synonyms)}
    return known


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_exist(page):
    text = page.read_text()
    named = set(re.findall(r"`(--\w[\w-]*)", prose(text)))
    assert not named - known_flags(page, text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_exist(page):
    folders = "bench|core|docs|envs|extras|lessons|tests"
    named = re.findall(rf"`((?:{folders})/[\w./-]*)`", prose(page.read_text()))
    named += re.findall(rf"`python ((?:{folders})/[\w/]+\.py)", prose(page.read_text()))
    assert [path for path in named if not (ROOT / path).exists()] == []


def anchors(page: Path) -> set:
    """Return the anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ +(.+)$", prose(page.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "bench" / "README.md"], ids=lambda page: f"{page.parent.name}/{page.name}")
def test_links_resolve(page):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"", prose(page.read_text())):
        place, _, anchor = "".join(target).partition("#")
        if re.match(r"\w+:", place):
            continue
        path = (page.parent / place).resolve() if place else page
        if not path.exists() or anchor and path.suffix == ".md" and anchor not in anchors(path):
            broken.append("".join(target))
    assert broken == []


def test_the_index_names_every_page():
    index = ROOT / "docs" / "README.md"
    linked = re.findall(r"\]\(([\w./-]+)\)", index.read_text())
    for path in PAGES:
        if ROOT / "docs" in path.parents and path != index:
            name = path.relative_to(ROOT / "docs").as_posix()  # lessons/ stands for the pages in it
            assert name in linked or f"{path.parent.name}/" in linked, name


# ------------------------------------------------------------------------------------------ how long a page is
LIMITS = [("README.md", 130), ("bench/README.md", 120), *[(path.relative_to(ROOT).as_posix(), 150) for path in PAGES if ROOT / "docs" in path.parents]]


@pytest.mark.parametrize("name, limit", LIMITS)
def test_page_is_short(name, limit):
    assert len((ROOT / name).read_text().splitlines()) <= limit


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


# ------------------------------------------------------------------------------ the environment that the pages show
OWN = {}  # the text of my_env.py -> the first page that shows it
for page in PAGES:
    if page.name == "README.zh.md":  # it is README's, with other comments
        continue
    for text in re.findall(r"```python\n(# my_env.py\nclass GuessNumber.*?)```", page.read_text(), re.S):
        OWN.setdefault(text, page.name)


@pytest.fixture(scope="module", params=OWN, ids=OWN.values())
def guess_number(request, tmp_path_factory):
    """--env of a class that a page shows, in a file of its own."""
    path = tmp_path_factory.mktemp("page") / "my_env.py"
    path.write_text(request.param)
    return f"{path}:" + re.search(r"class (\w+)", request.param)[1]


def test_a_page_shows_the_whole_environment():
    assert any("_expert" in text and "_tasks" in text for text in OWN)


def test_the_pages_expert_finds_every_number_by_what_the_tool_said(guess_number):
    cls, first = load(guess_number), set()
    if not hasattr(cls, "_expert"):
        pytest.skip("this page shows no expert")
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


def test_the_pages_environment_passes_the_check(guess_number):
    from extras.check import Conformance
    from extras.play import Config, Setup
    whole = hasattr(load(guess_number), "_expert")
    verdicts = {name: verdict for name, verdict, _ in Conformance(Setup(Config(env=guess_number))).verdicts()}
    assert len(verdicts) > 10 and set(verdicts.values()) <= ({"pass"} if whole else {"pass", "-"}), verdicts


def test_the_pages_environment_is_imitated_and_then_trained_on(guess_number, request, tiny, tmp_path):
    if "README.md" in request.node.name and len(OWN) > 1:
        pytest.skip("the other page's is: a run of each takes long")
    small = {"eval_tasks": 1, "max_steps": 1, "max_new_tokens": 8, "env": guess_number}
    start = str(tiny)
    if hasattr(load(guess_number), "_expert"):
        start = str(tmp_path / "sft")
        result = sft.train(sft.Config(model_path=str(tiny), lora_r=16, gradient_accumulation_steps=1, batch_size=2, max_samples=4,
                                      output_dir=start, **small))
        assert result["steps"] == 1 and result["held_out_loss"] > 0
    result = grpo.train(grpo.Config(model_path=start, tasks_per_step=1, group_size=2, output_dir=str(tmp_path / "grpo"), **small))
    assert result["steps"] == 1 and result["held_out_tasks"] == 1
    rows = [json.loads(line) for line in (tmp_path / "grpo" / "trajectories.jsonl").read_text().splitlines()]
    assert len(rows) == 2 and all(row["info"]["env"] == guess_number for row in rows)
    page = ROOT / "docs" / "running.md"
    if page.exists() and (ROOT / "extras" / "show").is_dir():
        told = set(re.findall(r"^\| `([\w.]+)[`/]", page.read_text(), re.M))
        written = {path.name for path in (tmp_path / "grpo").iterdir() if not path.name.startswith(".")}
        assert written <= told and written >= {"config.yaml", "metrics.jsonl", "tokens.jsonl", "report.html"}
