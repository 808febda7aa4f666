"""envs/__init__.py: finding environments, tools, fitted calls, strict task files, splits; and a small environment in ours and in TRL's trainer."""
import asyncio
import enum
import functools
import inspect
import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal, Optional

import pytest

from core.data import draw_tasks
from envs.tasks import drop_seen, load_tasks
import envs
from envs.calls import awaited, fit, needed
from envs.files import module_at
from envs import load, load_environments
from schooling import need_expert
from extras.exact.environments import sources
from extras.background import in_thread
from core.config import UserError
from core.run import algorithm_of
from core.tiny import make_tiny

ROOT = Path(envs.__file__).parent.parent
README_ENV = '''
class GuessNumber:
    system_prompt = "Find the number between 1 and 9 with the tool."

    def reset(self, number: int = 5, **_) -> str:
        self.number, self.reward, self.done = number, 0.0, False
        return "Guess."

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: your guess
        """
        self.done = number == self.number
        self.reward += float(self.done)
        return "right" if self.done else "higher" if number < self.number else "lower"

    def get_reward(self) -> float:
        return self.reward

    @staticmethod
    def _tasks(split: str, n: int, seed: int) -> list[dict]:
        return [{"number": 1 + (i + seed) % 9} for i in range(n)]
'''
README = ROOT / "README.md"
if README.exists() and (block := re.search(r"```python\n# my_env\.py\n(.*?)```", README.read_text(), re.S)):
    README_ENV = block[1]


def readme_environment(folder):
    (folder / "my_env.py").write_text(README_ENV)
    return f"{folder / 'my_env.py'}:" + re.search(r"class (\w+)", README_ENV)[1]


class Kit:
    """One tool a kind of argument; each answers with what it got."""
    hidden = "an attribute is no tool"

    def reset(self, **_):
        self.reward, self.done, self.got = 0.0, False, None

    def text(self, v: str) -> str:
        """.

        Args:
            v: v
        """
        return repr(v)

    def whole(self, v: int) -> str:
        """.

        Args:
            v: v
        """
        return repr(v)

    def number(self, v: float) -> str:
        return repr(v)

    def flag(self, v: bool) -> str:
        return repr(v)

    def maybe(self, v: Optional[int] = None) -> str:
        return repr(v)

    def union(self, v: int | str) -> str:
        return repr(v)

    def either(self, v: Literal["a", "b"]) -> str:
        return repr(v)

    def items(self, v: list[int]) -> str:
        return repr(v)

    def bare(self, v: list) -> str:
        return repr(v)

    def mapping(self, v: dict) -> str:
        return repr(v)

    def marked(self, v: Annotated[int, "unit"]) -> str:
        return repr(v)

    def anything(self, v: Any) -> str:
        return repr(v)

    def untyped(self, v):
        return repr(v)

    def two(self, a: int, b: int = 2) -> str:
        return repr((a, b))

    def none(self):
        return None

    @staticmethod
    def static(v: int) -> str:
        return repr(v)

    @classmethod
    def of_class(cls) -> str:
        return "no function of the class: TRL does not see it either"

    @property
    def prop(self):
        raise AssertionError("a property is never read")

    def _private(self) -> str:
        return "secret"

    def get_reward(self) -> float:
        return self.reward


def kit():
    env = Kit()
    env.reset()
    return env


# ---------------------------------------------------------------------------------------------------------------- loading
def test_load_names_modules_and_files(tmp_path):
    name = readme_environment(tmp_path)
    assert envs.load("gsm8k").__name__ == "GSM8K" and envs.load("envs.equations:Equations") is envs.load("equations")
    assert envs.load(name) is envs.load(name) and envs.load(name).__name__ in name  # one class a process, though it is asked for each step


@pytest.mark.parametrize("name, says", [
    ("equation", "did you mean equations?"), ("chess", "known: equations"), ("", "known: equations"), ("nowhere.py:Environment", "No such file"),
    ("envs.equations:Nothing", "has no class Nothing"), ("envs.equations:re", "has no class re"), ("no.such.module:Environment", "No module named"),
    ("envs.equations:parse_term", "has no class parse_term")])
def test_load_errors(name, says):
    with pytest.raises(UserError, match=re.escape(says)) as error:
        envs.load(name)
    assert "\n" not in str(error.value) and repr(name) in str(error.value)


@pytest.mark.parametrize("text, says", [("class Environment(:\n", "my.py"), ("import no_such_thing\n", "no_such_thing"), ("from math import nothing\n", "nothing")])
def test_a_file_that_cannot_be_imported(tmp_path, text, says):
    (tmp_path / "my.py").write_text(text)
    for _ in range(2):  # the second time too
        with pytest.raises(UserError, match=says):
            envs.load(f"{tmp_path / 'my.py'}:Environment")


CONTRACT = "class Environment:\n    def reset(self, **_):\n        pass\n    def get_reward(self):\n        return 0.0\n"


@pytest.mark.parametrize("text, says", [
    (CONTRACT + "    reset = 3\n", "has no class Environment with reset()"),
    (CONTRACT + "    _tasks = staticmethod(lambda *_: [])\n", "made no tasks"),
    (CONTRACT + "    def _tasks(self, split, n, seed):\n        return [{}]\n", "_tasks('train', 3, 0): cannot be read (TypeError: Environment._tasks() missing 1 required"),
    (CONTRACT + "    _tasks = staticmethod(lambda *_: ['Guess.'])\n", "_tasks('train', 3, 0): "),
    (CONTRACT + "    _tasks = staticmethod(lambda *_: [{'k': {1, 2}}])\n", "Object of type set is not JSON serializable")])
def test_an_environment_that_breaks_the_contract_is_told_in_a_line(tmp_path, text, says):
    (tmp_path / "my.py").write_text(text)
    with pytest.raises(UserError, match=re.escape(says)) as error:
        load_tasks(f"{tmp_path / 'my.py'}:Environment", "train", 3, 0)
    assert "my.py:Environment" in str(error.value) and "\n" not in str(error.value)


def test_tasks_may_come_from_a_generator_and_hold_numpys_numbers(tmp_path, monkeypatch):
    """`rng.integers` makes them, and many write it so."""
    (tmp_path / "my.py").write_text(CONTRACT + "    @staticmethod\n    def _tasks(split, n, seed):\n        import numpy as np\n"
                                    "        yield from ({'k': k} for k in np.arange(2 * n)[split == 'test'::2])\n")
    name = f"{tmp_path / 'my.py'}:Environment"
    train, held_out = (load_tasks(name, split, 3, 0) for split in ("train", "test"))
    assert [task["k"] for task in train] == [0, 2, 4] and drop_seen(held_out, train) == held_out and drop_seen(train, train) == []


def test_a_file_may_hold_dataclasses(tmp_path):
    (tmp_path / "my.py").write_text("from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass Card:\n    n: int\n"
                                    "class Environment:\n    def reset(self, **_):\n        self.card = Card(1)\n    def f(self, n: int) -> str:\n        return str(n)\n"
                                    "    def get_reward(self):\n        return 0.0\n")
    env = envs.load(f"{tmp_path / 'my.py'}:Environment")()
    env.reset()
    assert envs.call(env, "f", {"n": 2.0}) == ("2", False)


def test_a_file_may_import_its_neighbours(tmp_path):
    (tmp_path / "neighbour_of_mine.py").write_text("ANSWER = 42\n")
    (tmp_path / "my.py").write_text("import neighbour_of_mine\nclass Environment:\n    answer = neighbour_of_mine.ANSWER\n    def reset(self):\n        import later_neighbour_of_mine as later\n        return later.TEXT\n    def get_reward(self):\n        return 0.0\n")
    (tmp_path / "later_neighbour_of_mine.py").write_text("TEXT = 'late'\n")
    before = list(sys.path)
    cls = envs.load(f"{tmp_path / 'my.py'}:Environment")
    assert cls.answer == 42 and cls().reset() == "late" and sys.path == [*before, str(tmp_path)]


@pytest.mark.parametrize("file", ["words_of_mine.py", "words_of_mine/__init__.py"])
def test_two_neighbours_of_the_same_name_are_not_mixed_up(tmp_path, monkeypatch, file):
    monkeypatch.delitem(sys.modules, "words_of_mine", raising=False)
    names = []
    for folder, word in (("one", "apple"), ("two", "pear")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / file).parent.mkdir(exist_ok=True)
        (tmp_path / folder / file).write_text(f"WORD = {word!r}\n")
        (tmp_path / folder / f"env_{folder}.py").write_text("from words_of_mine import WORD\nclass Environment:\n    def reset(self):\n        return WORD\n    def get_reward(self):\n        return 0.0\n")
        names.append(f"{tmp_path / folder / f'env_{folder}.py'}:Environment")
    assert len(sources(SimpleNamespace(env=names[0], rewards=None))) == 2
    with pytest.raises(UserError, match=f"env_two.py imports .*two/{file}, but words_of_mine is .*one/{file}; rename one"):
        sources(SimpleNamespace(env=",".join(names), rewards=None))


def test_a_script_beside_its_environment_trains_in_it(tmp_path, monkeypatch):
    """The script is __main__, and so is the environment's file where its imports are followed."""
    (tmp_path / "env_of_mine.py").write_text("class Environment:\n    def reset(self):\n        return 'Go.'\n    def get_reward(self):\n        return 0.0\n")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / "train.py"), raising=False)
    name = f"{tmp_path / 'env_of_mine.py'}:Environment"
    assert sources(SimpleNamespace(env=name, rewards=None)) == [str(tmp_path / "env_of_mine.py")]


@pytest.mark.parametrize("line, name", [("from .near import ANSWER", "ANSWER"), ("from . import near", "near.ANSWER")])
def test_a_file_of_a_package_may_import_relatively_and_a_run_notes_what(tmp_path, line, name):
    tmp_path = tmp_path / "version.2"
    tmp_path.mkdir()
    (tmp_path / "near.py").write_text("ANSWER = 42\n")
    (tmp_path / "my.py").write_text(f"{line}\nclass Environment:\n    answer = {name}\n    def reset(self):\n        pass\n    def get_reward(self):\n        return 0.0\n")
    config = SimpleNamespace(env=f"{tmp_path / 'my.py'}:Environment", rewards=None)
    assert envs.load(config.env).answer == 42
    assert sorted(sources(config)) == [str(tmp_path / "my.py"), str(tmp_path / "near.py")]


@pytest.mark.parametrize("line", ["from texts.clean import ANSWER", "import tomllib; ANSWER = 42"])
def test_folders_without_init_beside_a_file_hinder_nothing(tmp_path, line):
    """Python's ModuleFinder raises AttributeError where it meets one."""
    for folder in ("texts", "tomllib"):
        (tmp_path / folder).mkdir()
    (tmp_path / "texts" / "clean.py").write_text("ANSWER = 42\n")
    (tmp_path / "my.py").write_text(f"{line}\nclass Environment:\n    answer = ANSWER\n    def reset(self):\n        pass\n    def get_reward(self):\n        return 0.0\n")
    config = SimpleNamespace(env=f"{tmp_path / 'my.py'}:Environment", rewards=None)
    assert envs.load(config.env).answer == 42 and sources(config) == [str(tmp_path / "my.py")]


def test_limits_are_the_largest_that_the_environments_state(tmp_path):
    assert envs.recommended("gsm8k") == {**envs.LIMITS, "max_new_tokens": 512, "max_tokens": 2048}
    assert envs.recommended("equations, gsm8k") == envs.recommended("gsm8k") and envs.recommended("equations")["max_new_tokens"] == 64
    cases = [("{}", envs.LIMITS), ("{'tool_timeout': 60}", {**envs.LIMITS, "tool_timeout": 60}), ("{'max_tool_tokens': 9}", {**envs.LIMITS, "max_tool_tokens": 9}), ("{'max_token': 5}", None)]
    for n, (stated, wanted) in enumerate(cases):
        (tmp_path / f"my{n}.py").write_text(CONTRACT + f"    limits = {stated}\n")
        name = f"{tmp_path / f'my{n}.py'}:Environment"
        if wanted:
            assert envs.recommended(name) == wanted
            continue
        with pytest.raises(UserError, match="limits"):
            envs.recommended(name)


def options_of(text, env_names="equations", unsafe_code=False):
    return envs.options_of(SimpleNamespace(env=env_names, env_options=text, unsafe_code=unsafe_code))


def test_options_are_what_the_type_hints_say_and_each_environment_gets_its_own(monkeypatch):
    class Hard:
        def reset(self, hard: bool = False, name: str = "a", signs: tuple = ()):
            pass

        def get_reward(self):
            pass

        @staticmethod
        def _tasks(split, n, seed):
            return [{"hard": True}]
    monkeypatch.setattr(envs, "load", lambda name, load=envs.load: Hard if name == "hard" else load(name))
    options = options_of('hard=False,name=5,signs=["+", "-"],noise=0.5', "hard,equations")
    assert options == {"hard": False, "name": "5", "signs": ("+", "-"), "noise": 0.5}
    hard, equation = load_tasks("hard,equations", "train", 2, 0, env_options=options)
    assert hard == {"env": "hard", "hard": False, "name": "5", "signs": ("+", "-")} and equation["noise"] == 0.5


def test_an_option_keeps_its_type_where_another_environment_gives_no_hint(monkeypatch):
    class Typed:
        def reset(self, code: str, **_):
            return code

    class Untyped:
        def reset(self, code="", **_):
            return code

    monkeypatch.setattr(envs, "load", {"typed": Typed, "untyped": Untyped}.get)
    assert options_of("code=123", "typed,untyped") == options_of("code=123", "untyped,typed") == {"code": "123"}


def test_options_reach_reset(monkeypatch):
    class Anything:
        def reset(self, **options):
            pass

        def get_reward(self):
            pass
    monkeypatch.setattr(envs, "load", lambda name, load=envs.load: Anything if name == "anything" else load(name))
    assert options_of('num_turns=3, shaped=true,name=a b,x=1.5,none=null,quoted="7"', "anything") == {
        "num_turns": 3, "shaped": True, "name": "a b", "x": 1.5, "none": None, "quoted": "7"}
    assert options_of(None) == options_of("") == options_of(None, None) == {}
    assert options_of("noise=1, num_turns=3", "equations,gsm8k") == {"noise": 1.0, "num_turns": 3}
    for text, says in [("num_turns", "write name=value"), ("noize=1", "did you mean noise"),
                       ("zzz=1", "equations has no such option; known: equation, noise, noise_seed")]:
        with pytest.raises(UserError, match=says):
            options_of(text)
    with pytest.raises(UserError, match="None has no such option"):
        options_of("noise=1", None)
    tasks = load_tasks("equations", "train", 3, 0, env_options=options_of("noise=0.5"))
    assert [task.pop("noise") for task in tasks] == [0.5] * 3 and tasks == load_tasks("equations", "train", 3, 0)


@pytest.mark.parametrize("env, item, choices", [("search", "level=9", [1, 2, 3]), ("business", "level=0", [1, 2, 3]), ("writing", "level=x", [1, 2, 3]),
                                                ("code", "levels=1+4", ["1", "2", "3", "1+2", "1+3", "2+3", "1+2+3"]), ("equations,gsm8k", "tools=phyton", ["calculator", "calculator+python"])])
def test_an_option_that_has_choices_takes_no_other_value(env, item, choices):
    with pytest.raises(UserError) as error:
        options_of(item, env)
    name, value = item.split("=")
    assert str(error.value) == f"--env_options: {name}: {value!r} cannot be read as Literal{choices}"
    for value in choices:
        options = options_of(f"{name}={value}", env)
        assert options == {name: value}
        if "," not in env:
            assert envs.with_options(envs.load(env), options)._tasks("train", 3, 0)


def take(self, n: int) -> str:
    """Take some.

    Args:
        n: how many
    """


class Shelf:
    """An environment with options: what is on the shelf, and a tool that one of them adds."""
    options = {"books": "", "limit": 3, "open": False}

    def __init_subclass__(cls):
        if cls.options["limit"] < 1:
            raise UserError("limit must be at least 1")
        if cls.options["open"]:
            cls.take = take

    def reset(self, **_):
        self.reward = 0.0
        return self.options["books"]

    def get_reward(self):
        return self.reward

    @classmethod
    def _tasks(cls, split, n, seed):
        return [{"book": f"{cls.options['books']} {split} {i}"} for i in range(min(n, cls.options["limit"]))]


def test_options_of_an_environment_reach_its_class(monkeypatch):
    """Tasks, tools and instances see them; the class itself stays as it was."""
    monkeypatch.setattr(envs, "load", lambda name, load=envs.load: Shelf if name == "shelf" else load(name))
    options = options_of("books=2024, limit=2,open=True", "equations,shelf")
    assert options == {"books": "2024", "limit": 2, "open": True}
    cls = envs.with_options(Shelf, options)
    assert cls().reset() == "2024" and list(envs.tools(cls)) == ["take"] and cls.__name__ == "Shelf" and issubclass(cls, Shelf)
    assert Shelf().reset() == "" and not envs.tools(Shelf) and envs.with_options(Shelf, {"noise": 1}) is envs.with_options(Shelf, None) is Shelf
    assert load_tasks("shelf", "train", 9, 0, env_options=options) == [{"book": f"2024 train {i}", "env": "shelf", **options} for i in (0, 1)]
    classes, chats = load_environments(make_tiny()[1], "equations,shelf", None, options)
    assert list(chats["shelf"].tools) == ["take"] and classes["equations"] is envs.load("equations")
    assert inspect.getsourcefile(cls) == __file__
    for text, says in [("limits=3", "did you mean limit"), ("limit=x", "cannot be read as int"), ("limit=1.5", "cannot be read as int"),
                       ("open=1", "cannot be read as bool"), ("unsafe_code=true", "did you mean --unsafe_code")]:
        with pytest.raises(UserError, match=says):
            options_of(text, "shelf")
    with pytest.raises(UserError, match="limit must be at least 1"):
        envs.with_options(Shelf, options_of("limit=0", "shelf"))


def test_the_record_of_unsafe_code_stays_and_its_command_repeats_it(tmp_path):
    """A run went on confined after `--resume`, and its config.yaml said that it had always been so."""
    import grpo
    folder = str(tmp_path / "run")
    run = grpo.Run(grpo.Config(model_path="none", output_dir=folder, unsafe_code=True), "grpo")
    assert run.command.endswith(" --unsafe_code --resume")
    run.begin()
    for run in (run, grpo.Run(grpo.Config(model_path="none", output_dir=folder, resume=True), "grpo")):  # the second resumes without the flag
        run.write_config()
        first = (tmp_path / "run" / "config.yaml").read_text().splitlines()[0]
        assert first == "# grpo run; `--config config.yaml --output_dir elsewhere --unsafe_code` repeats it" and algorithm_of(folder) == "grpo"


def test_options_are_what_every_program_plays_with(tmp_path, capsys):
    """The expert and the evaluation of SFT, the SFT of the tiny model, rollouts, the chat; and --unsafe_code is recorded."""
    import grpo
    import sft
    import agent_program
    shelf = "from core.config import UserError\n" + inspect.getsource(take) + inspect.getsource(Shelf).replace('return self.options["books"]', 'return f"Take {self.options}."')
    (tmp_path / "my.py").write_text(shelf + """
    def _expert(self):
        if self.reward:
            return []
        self.reward = 1.0
        return [{"name": "take", "arguments": {"n": 1}}]
""")
    name, said = f"{tmp_path / 'my.py'}:Shelf", dict(env_options="limit=2,open=true,books=atlas", unsafe_code=True)
    short = dict(env=name, max_steps=1, eval_tasks=2, max_new_tokens=8, max_tokens=1024, **said)
    sft.train(sft.Config(output_dir=str(tmp_path / "sft"), max_samples=2, batch_size=2, **short))
    grpo.train(grpo.Config(model_path=str(tmp_path / "sft"), output_dir=str(tmp_path / "grpo"), tasks_per_step=1, group_size=2, batch_size=2, **short))
    for folder in ("sft", "grpo"):
        text = (tmp_path / folder / "config.yaml").read_text()
        assert "env_options: limit=2,open=true,books=atlas" in text and "\nunsafe_code" not in text and "# " + folder + " run; `--config config.yaml --output_dir elsewhere --unsafe_code` repeats it\n" in text
        assert json.loads((tmp_path / folder / "result.json").read_text())["held_out_tasks"] == 2
        assert algorithm_of(tmp_path / folder) == folder
    rows = [json.loads(line) for line in (tmp_path / folder / "trajectories.jsonl").read_text().splitlines()]
    assert {row["info"]["task"]["unsafe_code"] for row in rows} == {True}
    assert all("atlas" in row["messages"][0]["content"] for row in rows)
    capsys.readouterr()
    config = agent_program.Config(model_path=str(tmp_path / "grpo"), num_tasks=1, max_new_tokens=8, max_tokens=1024, env=name, env_options=said["env_options"])
    agent_program.run(config)
    assert "atlas" in capsys.readouterr().out


def test_an_expert_is_asked_for_at_once(tmp_path):
    (tmp_path / "my.py").write_text(CONTRACT)
    need_expert("equations,gsm8k,meetings")
    with pytest.raises(UserError, match=r"has no _expert\(\).*--model_path"):
        need_expert(f"equations,{tmp_path / 'my.py'}:Environment")


# ------------------------------------------------------------------------------------------------------------------ tools
def test_tools_are_what_trl_takes_for_tools():
    for cls in (Kit, envs.load("equations"), envs.load("gsm8k")):
        seen_by_trl = {name for name, _ in inspect.getmembers(cls, predicate=inspect.isfunction)
                       if name not in ("reset", "get_reward") and not name.startswith("_")}
        assert set(envs.tools(cls)) == set(envs.tools(cls())) == seen_by_trl
    assert "static" in envs.tools(Kit) and not {"of_class", "prop", "_private", "hidden", "reset"} & set(envs.tools(Kit))


def test_schemas():
    class Environment:
        def reset(self):
            pass

        def find(self, query: str, limit: int = 3) -> str:
            """Find things.

            Args:
                query: what
                limit: how many
            """

        @staticmethod
        def now() -> str:
            """The time."""
    found = {s["function"]["name"]: s["function"] for s in envs.schemas(Environment)}
    assert set(found) == {"find", "now"} and found["find"]["parameters"]["required"] == ["query"]
    assert set(found["find"]["parameters"]["properties"]) == {"query", "limit"} and envs.schemas(Environment()) == envs.schemas(Environment)


def test_schemas_name_the_method_that_lacks_something():
    class NoDoc:
        def find(self, query: str) -> str:
            return ""

    class NoHint:
        def find(self, query) -> str:
            """Find.

            Args:
                query: what
            """

    class NoArg:  # what the model is not told of it could still set: so it must be told of everything
        def find(self, query: str, _secret: bool = False) -> str:
            """Find.

            Args:
                query: what
            """
    for cls in (NoDoc, NoHint, NoArg):
        with pytest.raises(UserError, match=r"test_envs.py:\d+: tool find: [^\n]+ `Args:`[^\n]+$"):
            envs.schemas(cls)


FITS = [("text", "7", "7"), ("text", 7, "7"), ("text", 7.5, "7.5"), ("text", "", ""), ("whole", 7, 7), ("whole", 7.0, 7), ("whole", -3.0, -3), ("number", 7, 7.0),
        ("number", 7.5, 7.5), ("flag", True, True), ("maybe", None, None), ("maybe", 3, 3), ("maybe", 3.0, 3), ("union", 3, 3), ("union", "3", "3"), ("either", "a", "a"),
        ("items", [1, 2], [1, 2]), ("items", [1.0, 2], [1, 2]), ("bare", ["a"], ["a"]), ("mapping", {"a": 1}, {"a": 1}), ("marked", 3, 3), ("marked", 3.0, 3), ("anything", {"x": [True]}, {"x": [True]}),
        ("untyped", None, None), ("static", 3.0, 3)]
DOES_NOT_FIT = [("text", True), ("text", None), ("text", ["7"]), ("text", {"a": 1}), ("whole", "7"), ("whole", "7" * 500), ("whole", 7.5), ("whole", True), ("whole", None), ("whole", [7]),
                ("whole", float("inf")), ("whole", float("nan")), ("number", "7"), ("number", True), ("flag", 1), ("flag", "true"), ("flag", None), ("maybe", "3"), ("maybe", True),
                ("union", True), ("union", [1]), ("either", "c"), ("either", 1), ("either", ["a"]), ("items", 1), ("items", ["1"]), ("items", [True]), ("items", "1,2"), ("items", {"a": 1}), ("bare", "a"),
                ("mapping", [1]), ("marked", "x"), ("static", "3")]


@pytest.mark.parametrize("name, value, fitted", FITS)
def test_arguments_that_fit(name, value, fitted):
    text, error = envs.call(kit(), name, {"v": value})
    assert (text, error) == (repr(fitted), False)


@pytest.mark.parametrize("name, value", DOES_NOT_FIT)
def test_arguments_that_do_not_fit(name, value):
    text, error = envs.call(kit(), name, {"v": value})
    assert error and text.startswith(f"error: {name}: v must be ") and len(text) < 200 and "typing." not in text


@pytest.mark.parametrize("name, arguments, says", [
    ("two", {}, "missing argument 'a'"), ("two", {"b": 1}, "missing argument 'a'"), ("two", {"a": 1, "c": 2}, "unknown argument 'c'; takes: a, b"),
    ("two", {"a": 1, "self": 2}, "unknown argument 'self'"), ("static", {}, "missing argument 'v'"), ("nothing", {}, "no tool 'nothing'; tools: "),
    ("reset", {}, "no tool"), ("get_reward", {}, "no tool"), ("_private", {}, "no tool"), ("__init__", {}, "no tool"), ("__class__", {}, "no tool"),
    ("hidden", {}, "no tool"), ("prop", {}, "no tool"), ("of_class", {}, "no tool"), ("", {}, "no tool"), ("two.__call__", {"a": 1}, "no tool")])
def test_calls_that_are_answered_with_an_error(name, arguments, says):
    text, error = envs.call(kit(), name, arguments)
    assert error and text.startswith("error: ") and says in text and "secret" not in text


def test_lists_become_tuples_and_values_become_members_of_an_enum():
    """transformers describes both hints to the model, which can only write JSON."""
    class Color(enum.Enum):
        RED, TWO = "red", 2

    class Rights(enum.IntFlag):
        READ, WRITE = 1, 2

    class Environment:
        def allow(self, rights: Rights) -> str:
            """Allow.

            Args:
                rights: what
            """
            return rights.name

        def paint(self, color: Color, place: tuple[int, int] = (0, 0)) -> str:
            """Paint.

            Args:
                color: which
                place: where
            """
            return f"{color.name} {place}"

        def use(self, colors: list[Color]) -> str:
            """Use.

            Args:
                colors: which
            """
            return " ".join(color.name for color in colors)
    assert envs.schemas(Environment)[1]["function"]["parameters"]["properties"]["color"]["enum"] == ["red", 2]
    assert envs.call(Environment(), "paint", {"color": "red", "place": [1, 2]}) == ("RED (1, 2)", False)
    assert envs.call(Environment(), "paint", {"color": 2}) == ("TWO (0, 0)", False)
    assert envs.call(Environment(), "use", {"colors": ["red", 2]}) == ("RED TWO", False)
    assert envs.call(Environment(), "use", {"colors": ["blue"]})[0].startswith("error: use: colors must be list[")
    assert envs.call(Environment(), "allow", {"rights": 2}) == ("WRITE", False)
    assert envs.call(Environment(), "paint", {"color": "blue"}) == ('error: paint: color must be Color, not "blue"', True)


def test_the_values_of_a_dict_are_made_what_the_hint_says():
    Color = enum.Enum("Color", {"RED": "red"})

    class Environment:
        def mix(self, parts: dict[str, Color], shares: dict[str, float]) -> str:
            """Mix.

            Args:
                parts: which
                shares: of each
            """
            return f"{[color.name for color in parts.values()]} {shares}"
    assert envs.call(Environment(), "mix", {"parts": {"a": "red"}, "shares": {"a": 1}}) == ("['RED'] {'a': 1.0}", False)
    assert envs.call(Environment(), "mix", {"parts": {}, "shares": {"a": "most"}}) == ('error: mix: shares must be dict[str, float], not {"a": "most"}', True)


def test_a_tool_with_starred_parameters_is_refused():
    """transformers describes `words` to the model as one text: with *words no call works, with **words each gives {"words": ...}."""
    class List:
        def say(self, *words: str):
            """Say.

            Args:
                words: which
            """

    class Dict:
        def say(self, **words: str):
            """Say.

            Args:
                words: which
            """
    for cls in (List, Dict):
        with pytest.raises(UserError, match=r"tool say: no call can fill \*\*?words: str; take a list or a dict"):
            envs.schemas(cls)


def test_limits_that_no_episode_has_are_refused(monkeypatch):
    monkeypatch.setattr(envs, "load", lambda name: type("Odd", (), {"limits": {"max_token": 5}}))
    with pytest.raises(UserError, match="environment 'odd': limits names max_token; it may state max_new_tokens, max_tokens"):
        envs.recommended("odd")


def test_args_and_kwargs_of_reset_are_no_arguments_that_a_task_needs(monkeypatch):
    """Otherwise all tasks of a class whose reset is wrapped were the same, and none was left to hold out."""
    class Wrapped:
        def reset(self, *args, **kwargs):
            return "go"
    monkeypatch.setattr(envs, "load", lambda name: Wrapped)
    held_out = [{"n": i, "env": "wrapped"} for i in range(4)]
    assert drop_seen(held_out, [{"n": 2, "env": "wrapped"}]) == [held_out[i] for i in (0, 1, 3)]


def test_beside_an_environment_that_needs_arguments_one_that_needs_none_keeps_its_held_out_tasks(monkeypatch):
    """They have no required column, and were all taken for one task."""
    class Free:
        def reset(self, number=50):
            return "go"
    load = envs.load
    monkeypatch.setattr(envs, "load", lambda name: Free if name == "free" else load(name))
    rows = [{"equation": "x = 1", "noise_seed": i, "env": "equations"} for i in (0, 1)] + [{"number": i, "env": "free"} for i in range(4)]
    assert drop_seen(rows[1:], [rows[0], rows[3]]) == [rows[2], *rows[4:]]


@pytest.mark.parametrize("name, row, says", [
    ("equations", {"equation": 5}, "5 is not an equation like"), ("equations", {"equation": "hello"}, "'hello' is not an equation"),
    ("equations_hard", {"equation": "x = y"}, "'y' is not a term"), ("equations", {"equation": "x = x"}, "has no single solution"),
    ("meetings", {"meeting": 1.5}, '"meeting" must be a whole number, not 1.5'), ("meetings", {"meeting": "abc"}, "not 'abc'")])
def test_rows_of_a_task_file_are_checked_before_the_run(tmp_path, name, row, says):
    good = {"equation": "x + 1 = 2", "meeting": 123456}
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in (good, {**good, **row})))
    with pytest.raises(UserError, match=re.escape(f"{path}:2: ") + ".*" + re.escape(says)):
        load_tasks(name, "train", 10, 0, str(path))


class Typed:
    def reset(self, n: int, share: float = 0.5, hard: bool = False, turns: int | None = None, name: str = "", key: int | str = 0, level: Literal[1, 2] = 1, terms: list[int] = (), other=None, **_):
        return "go"


@pytest.mark.parametrize("cells, task", [
    ("3,0.5,True,,007,08,2,[1],9,x", {"n": 3, "share": 0.5, "hard": True, "turns": None, "name": "007", "key": "08", "level": 2, "terms": [1], "other": "9", "more": "x"}),
    ("-3,2,false,4,,,1,[],,", {"n": -3, "share": 2.0, "hard": False, "turns": 4, "name": "", "key": "", "level": 1, "terms": [], "other": "", "more": ""}),
    ("3.0,1e-3,TRUE,null,None,a,1,[],,", {"n": 3, "share": 0.001, "hard": True, "turns": None, "name": "None", "key": "a", "level": 1, "terms": [], "other": "", "more": ""})])
def test_cells_of_a_csv_file_are_what_reset_says(tmp_path, monkeypatch, cells, task):
    monkeypatch.setattr(envs, "load", lambda name: Typed)
    path = write(tmp_path, "n,share,hard,turns,name,key,level,terms,other,more\n" + cells.replace("[1]", '"[1]"') + "\n", "tasks.csv")
    (row,) = load_tasks("typed", "test", None, 0, None, path)
    assert row == {**task, "env": "typed"} and [type(row[name]) for name in task] == [type(value) for value in task.values()]


@pytest.mark.parametrize("column, cell, says", [
    ("n", "many", "n: 'many' cannot be read as int"), ("n", "3.5", "n: '3.5' cannot be read as int"), ("n", "", "n: '' cannot be read as int"),
    ("hard", "maybe", "hard: 'maybe' cannot be read as bool"), ("hard", "1", "hard: '1' cannot be read as bool"), ("share", "half", "share: 'half' cannot be read as float"),
    ("turns", "x", "turns: 'x' cannot be read as int | None"), ("level", "3", "level: '3' cannot be read as Literal[1, 2]")])
def test_a_cell_that_reset_cannot_take_is_told(tmp_path, monkeypatch, column, cell, says):
    monkeypatch.setattr(envs, "load", lambda name: Typed)
    row = {"n": "1", "name": "a", column: cell}
    path = write(tmp_path, ",".join(row) + "\n" + ",".join(row.values()) + "\n", "tasks.csv")
    with pytest.raises(UserError) as error:
        load_tasks("typed", "test", None, 0, None, path)
    assert str(error.value) == f"{path}:2: {says}"


def test_call_never_raises():
    class Environment:
        done = False

        def fails(self, kind: int):
            raise [ValueError("no\nway"), KeyError("k"), SystemExit(3), RecursionError(), AssertionError(), ExceptionGroup("g", [ValueError()]), StopIteration(),
                   ZeroDivisionError(), ValueError("x" * 1000), ValueError("\ud800")][kind]

        async def later(self, kind: int):
            self.fails(kind)

        def loops(self):
            return self.loops()

        def unprintable(self):
            class Thing:
                def __str__(self):
                    raise ValueError("no text")
            return Thing()

        def returns(self, what: str):
            return {"none": None, "bytes": b"\xff", "dict": {"a": 1}, "surrogate": "a\ud800b"}[what]

        def broken(self, x: "NoSuchType") -> str:  # noqa: F821
            return x
    env = Environment()
    for kind in range(10):
        for name in ("fails", "later"):
            text, error = envs.call(env, name, {"kind": kind})
            assert error and text.startswith("error: ") and len(text.encode()) <= 300, (name, kind)
    assert envs.call(env, "loops", {})[1] and envs.call(env, "unprintable", {})[1] and envs.call(env, "broken", {"x": 1})[1]
    assert [envs.call(env, "returns", {"what": w}) for w in ("none", "bytes", "dict", "surrogate")] == [
        ("None", False), (repr(b"\xff"), False), ("{'a': 1}", False), ("a?b", False)]
    for arguments in ({"kind": 10**5000}, {"kind": float("nan")}, {"kind": [[]] * 1000}, {"k" * 10**5: 1}):
        assert envs.call(env, "fails", arguments)[1]


def test_an_async_tool_that_interrupts_ends_the_loop_of_no_other():
    async def interrupts():
        raise KeyboardInterrupt

    async def works():
        return 3
    with pytest.raises(KeyboardInterrupt):
        in_thread(awaited, interrupts()).result(10)
    assert in_thread(awaited, works()).result(10) == 3


def test_async_tools_share_one_loop():
    class Environment:
        async def lives(self):
            await asyncio.sleep(0)
            return "alive"

        async def loop(self):
            return id(asyncio.get_running_loop())
    assert envs.call(Environment(), "lives", {}) == ("alive", False)
    assert envs.call(Environment(), "loop", {}) == envs.call(Environment(), "loop", {})

    async def notebook():  # which runs a loop itself
        return envs.call(Environment(), "lives", {})
    assert asyncio.run(notebook()) == ("alive", False)


def test_step_awaits_what_is_async():
    """The check was a coroutine, which is true, and the reward one that cannot be added up: TypeError."""
    class Asks:
        done = False

        async def go(self) -> str:
            """Go."""
            self.done = True
            return "gone"

        async def _check(self):
            return False

        async def get_reward(self):
            return 0.5
    assert envs.step(Asks(), "go", {}) == envs.StepResult("gone", 0.5, True, {"error": False, "success": False})


def test_step_is_gymnasiums_reading(tmp_path):
    env = envs.load("equations")()
    env.reset(equation="3x + 7 = 16")
    first = envs.step(env, "subtract_terms", {"terms": "7"})
    assert (first.observation, first.reward, first.done, first.info) == ("3x = 9", 2.0, False, {"error": False, "success": False})
    assert set(envs.valid_actions(env)) == set(envs.tools(env))
    bad = envs.step(env, "subtract_terms", {"terms": "?"})
    assert bad.reward == 0 and bad.info["error"] and not bad.done
    last = envs.step(env, "state_answer", {"value": 3})
    assert last.reward == 5.0 and last.done and last.info["success"] and envs.valid_actions(env) == []
    after = envs.step(env, "divide_terms", {"terms": "3"})
    assert after.reward == 0 and after.info["error"] and "over" in after.observation
    search = envs.load("search")()
    [task] = search._tasks("train", 1, 0)
    search.reset(**task)
    steps = [envs.step(search, name, arguments) for name, arguments in (("search", {"query": "1"}), ("answer", {"answer": task["answer"]}), ("answer", {"answer": "?"}))]
    assert [step.reward for step in steps] == [0, 1, 0]  # without a running total all is paid at the end, and once
    plain = envs.load(readme_environment(tmp_path))()
    plain.reset(number=4)
    assert envs.step(plain, "guess", {"number": 9}).info == {"error": False}  # no _check: nothing is said of success


# ------------------------------------------------------------------------------------------------------------- task files
def write(folder, data, name="tasks.jsonl"):
    (folder / name).write_bytes(data if isinstance(data, bytes) else data.encode())
    return str(folder / name)


# ------------------------------------------------------------------------------------------------------------------ tasks
class Asks:
    def reset(self, question: str, answer: str, hint: str = "", **_):
        return question

    def get_reward(self):
        return 0.0


class Converts(Asks):
    @staticmethod
    def _row(row):
        if "q" not in row:
            raise ValueError(f'no "q" field; has: {", ".join(row)}')
        return {"question": row["q"], "answer": "1", "env": "elsewhere"}


@pytest.fixture
def asks(monkeypatch):
    monkeypatch.setitem(envs.ENVS, "asks", f"{__name__}:Asks")
    monkeypatch.setitem(envs.ENVS, "converts", f"{__name__}:Converts")


def rows_file(folder, n, name="tasks.jsonl"):
    return write(folder, "".join(json.dumps({"question": f"q{i}", "answer": str(i)}) + "\n" for i in range(n)), name)


def keys(rows):
    return [row["question"] for row in rows]


def test_a_file_is_split_by_the_hash_of_its_rows(tmp_path, asks, capsys):
    path = rows_file(tmp_path, 1000)
    train, test = (load_tasks("asks", split, None, 0, path) for split in ("train", "test"))
    assert not set(keys(train)) & set(keys(test)) and len(train) + len(test) == 1000 and 60 < len(test) < 140
    assert train[0]["env"] == "asks" and "_line" not in train[0]
    other = load_tasks("asks", "train", 10, 5, path)
    assert load_tasks("asks", "train", 10, 0, path) == train[:10] != other and set(keys(other)) <= set(keys(train))
    assert len(re.findall("of [0-9]+ tasks of .* are left out: 10 are asked for", capsys.readouterr().out)) == 2  # of 50,000 rows 10,000 are played
    more = load_tasks("asks", "test", None, 0, rows_file(tmp_path, 1200, "more.jsonl"))
    assert set(keys(test)) <= set(keys(more))  # a row never changes sides when the file grows
    twice = write(tmp_path, Path(path).read_text() * 2, "twice.jsonl")
    assert not set(keys(load_tasks("asks", "train", None, 0, twice))) & set(keys(load_tasks("asks", "test", None, 0, twice)))


def test_a_test_file_of_its_own(tmp_path, asks):
    path, held_out = rows_file(tmp_path, 50), write(tmp_path, '{"question": "held", "answer": "out"}\n', "test.jsonl")
    assert sorted(keys(load_tasks("asks", "train", None, 0, path, held_out))) == sorted(f"q{i}" for i in range(50))
    assert keys(load_tasks("asks", "test", 7, 0, path, held_out)) == ["held"]


def test_missing_fields_and_small_files(tmp_path, asks):
    path = write(tmp_path, '{"question": "a", "answer": "b"}\n\n{"question": "a", "solution": "b"}\n')
    with pytest.raises(UserError) as error:
        load_tasks("asks", "train", None, 0, path)
    assert str(error.value) == f'{path}:3: no "answer" field; has: question, solution; rows are read as tasks of Asks; --fields renames columns; prompts without tools: --env envs.prompts:Prompts'
    path = write(tmp_path, '{"q": "a"}\n{"p": "a"}\n')
    with pytest.raises(UserError) as error:
        load_tasks("converts", "train", None, 0, path)
    assert str(error.value) == f'{path}:2: no "q" field; has: p'
    assert load_tasks("asks", "test", None, 0, rows_file(tmp_path, 1)) == []  # a run goes on without held-out tasks
    assert len(load_tasks("asks", "train", None, 0, rows_file(tmp_path, 1))) == 1
    with pytest.raises(UserError, match="makes no tasks of its own; give --tasks"):
        load_tasks("asks", "train", None, 0)


def test_several_environments_share_the_tasks(monkeypatch):
    asked = []
    monkeypatch.setattr(envs, "load", lambda name: type("Few", (), {
        "reset": lambda self: "go", "_tasks": staticmethod(lambda split, n, seed: asked.append(n) or [{}] * n)}))
    assert len(load_tasks("a,b", "train", 5, 0)) == 5 and asked == [3, 3]


def test_an_environment_with_few_tasks_takes_none_of_the_others(monkeypatch, capsys):
    """Of ten and a hundred tasks each became ten, and of 200 held-out tasks 4, without a word."""
    made = {"a": 3, "b": 100, "c": 5}
    monkeypatch.setattr(envs, "load", lambda name: type("Few", (), {
        "reset": lambda self, k: "go", "_tasks": staticmethod(lambda split, n, seed: [{"k": k} for k in range(min(n, made[name]))])}))
    for names in ("a,b", "b,a", "a,b,c"):
        train, held_out = (load_tasks(names, split, 60, 0) for split in ("train", "test"))
        each = 60 // len(names.split(","))
        for name in names.split(","):
            ks = [task["k"] for task in train if task["env"] == name]
            assert ks == [k % min(each, made[name]) for k in range(each)]
            assert [task["k"] for task in held_out if task["env"] == name] == list(range(min(each, made[name])))
        assert [task["env"] for task in train[:6]] == (names.split(",") * 3)[:6]
        said = capsys.readouterr().out
        assert f"environment a: 3 train tasks, another has {each}\n" in said and f"environment a: 3 test tasks, another has {each}\n" in said
    assert len(load_tasks("b,b", "train", 60, 0)) == 60 and not capsys.readouterr().out


def test_a_relative_path_keeps_its_meaning_where_an_environment_changes_the_folder(tmp_path, monkeypatch):
    """Also where it removes the folder, or enters one with a file of this name."""
    (tmp_path / "moving.py").write_text("class Moving:\n    def reset(self):\n        return 'go'\n\ndef pays(episode):\n    return 1.0\n")
    other = tmp_path / "other"
    other.mkdir()
    (other / "moving.py").write_text("raise RuntimeError('another file')\n")
    monkeypatch.chdir(tmp_path)
    cls = load("moving.py:Moving")
    monkeypatch.chdir(other)
    assert load("moving.py:Moving") is cls and cls.__module__ == str(tmp_path / "moving.py")
    assert load(f"{tmp_path}/moving.py:Moving") is cls and module_at("moving.py", "--rewards").pays(None) == 1.0
    shutil.rmtree(other)  # os.getcwd() raises now
    assert load("moving.py:Moving") is cls and [task["env"] for task in load_tasks("moving.py:Moving", "train", 2, 0)] == ["moving.py:Moving"] * 2


def test_an_empty_name_is_no_environment():
    with pytest.raises(UserError, match="unknown environment ''"):
        load_tasks("", "train", 5, 0)


def test_a_row_does_not_choose_the_environment(tmp_path, asks):
    """`env` names code that is run: a data file must not name it."""
    line = '{"question": "a%d", "answer": "b", "q": "c", "env": "/tmp/evil.py:Evil"}\n'
    path = write(tmp_path, "".join(line % i for i in range(40)))
    for name in ("asks", "converts"):
        assert {row["env"] for split in ("train", "test") for row in load_tasks(name, split, None, 0, path)} == {name}


def test_held_out_tasks_that_were_trained_on_are_dropped_and_counted(capsys):
    """Whatever else a recorded task says (noise, seed, options): the equation is what makes it the same."""
    held_out = load_tasks("equations", "test", 20, 0)
    learned = [{"equation": task["equation"], "noise": 0.3} for task in held_out[:5]]
    assert drop_seen(held_out, learned) == held_out[5:] and "5 of 20 held-out rows are also in the training data: dropped" in capsys.readouterr().out
    assert drop_seen(held_out, load_tasks("equations", "train", None, 0)) == held_out and not capsys.readouterr().out


def test_an_epoch_takes_every_task_once():
    tasks = list(range(10))
    drawn = [task for step in range(5) for task in draw_tasks(tasks, 0, step, 4, 0, 4)]
    assert sorted(drawn[:10]) == tasks == sorted(drawn[10:]) and drawn[:10] != drawn[10:]


def test_a_step_of_a_million_tasks_touches_only_its_own():
    touched = []

    class Tasks:
        __len__ = (10**6).__int__

        def __getitem__(self, i):
            return touched.append(i) or i

    assert draw_tasks(Tasks(), 0, 3, 8, 0, 8) == touched and len(set(touched)) == 8


def test_the_signature_of_reset_is_read_once_for_all_rows_of_a_file(tmp_path, monkeypatch):
    """It took half of the time that a million rows take."""
    import inspect
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(f'{{"prompt": "What is {i} + 1?", "equation": "x = {i}"}}\n' for i in range(200)))
    real, calls = inspect.signature, []
    monkeypatch.setattr(inspect, "signature", lambda *a, **k: calls.append(a) or real(*a, **k))
    assert len(load_tasks("equations", "train", None, 0, str(path))) > 150 and len(calls) < 20


@pytest.mark.parametrize("name", ["equations", "equations_hard", "meetings", str(ROOT / "envs" / "template.py") + ":HigherLower"])
def test_train_and_held_out_share_no_task(name):
    train, test = load_tasks(name, "train", 500, 0), load_tasks(name, "test", 200, 1)
    assert drop_seen(test, train) == test


@pytest.mark.parametrize("name", ["equations", "equations_hard"])
def test_environments_own_tasks(name):
    train, test = (load_tasks(name, split, 300, 3) for split in ("train", "test"))
    assert len(train) == 300 and not {t["equation"] for t in train} & {t["equation"] for t in test} and train[0]["env"] == name


# ---------------------------------------------------------------------------------------------- an environment of the README's size
def test_the_readmes_environment_plays(tmp_path):
    import agent
    from core.tiny import make_tiny
    name = readme_environment(tmp_path)
    assert len(README_ENV.strip().splitlines()) < 36
    model, tokenizer = make_tiny()
    tasks = load_tasks(name, "train", 3, 0)
    limits = agent.Limits(max_turns=3, max_new_tokens=8)
    episodes = agent.rollout(model.eval(), tokenizer, name, tasks, 2, limits=limits)
    assert len(episodes) == 6 and all(t.info["env"] == name and t.reward == 0.0 and t.messages[1]["content"] for t in episodes)
    env = envs.load(name)()
    env.reset(**{k: v for k, v in tasks[0].items() if k != "env"})
    (tool,) = envs.tools(env)
    (argument,) = envs.schemas(env)[0]["function"]["parameters"]["properties"]
    total = sum(envs.step(env, tool, {argument: n}).reward for n in range(1, 10))
    assert total == env.get_reward() == 1.0 and env.done


@pytest.mark.filterwarnings("ignore")
def test_the_same_class_trains_in_trl(tmp_path, monkeypatch):
    """TRL's GRPOTrainer(environment_factory=our class) makes a step, and calls reset, the tool and get_reward."""
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    import torch
    from trl import chat_template_utils

    from core.tiny import make_tiny
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    model, tokenizer = make_tiny()
    tokenizer.chat_template = chat_template_utils.qwen3_chat_template  # TRL parses calls only of templates that it knows by heart
    model.save_pretrained(tmp_path / "tiny"), tokenizer.save_pretrained(tmp_path / "tiny")
    cls, calls = envs.load(readme_environment(tmp_path)), []
    for method in ("reset", "get_reward", *envs.tools(cls)):
        def recorded(self, *args, _method=method, _original=getattr(cls, method), **kwargs):
            out = _original(self, *args, **kwargs)
            calls.append((_method, kwargs, out))
            return out
        recorded.__wrapped__ = getattr(cls, method)
        recorded.__doc__, recorded.__annotations__, recorded.__name__ = getattr(cls, method).__doc__, getattr(cls, method).__annotations__, method
        monkeypatch.setattr(cls, method, recorded)
    (tool,), task = envs.tools(cls), cls._tasks("train", 1, 0)[0]
    (argument,) = envs.schemas(cls)[0]["function"]["parameters"]["properties"]
    (right,) = task.values()
    arguments = trl.GRPOConfig(output_dir=str(tmp_path / "out"), max_steps=1, per_device_train_batch_size=2, num_generations=2, max_completion_length=64, use_cpu=True,
                               bf16=False, report_to=[], save_strategy="no", disable_tqdm=True, learning_rate=1e-3, gradient_checkpointing=False)
    data = datasets.Dataset.from_list([{"prompt": [{"role": "user", "content": ""}], **task}] * 2)
    trainer = trl.GRPOTrainer(model=str(tmp_path / "tiny"), args=arguments, train_dataset=data, environment_factory=cls)
    sampled = trainer._generate_single_turn

    def first_turns(prompt_ids, *args, **kwargs):  # a random model calls no tool: its first turns are written for it, one right, one wrong
        if len(calls) > 2:
            return sampled(prompt_ids, *args, **kwargs)
        texts = [f'<tool_call>\n{{"name": "{tool}", "arguments": {{"{argument}": {n}}}}}\n</tool_call><|im_end|>' for n in (right, right + 1)]
        return [tokenizer.encode(text, add_special_tokens=False) for text in texts], None
    monkeypatch.setattr(trainer, "_generate_single_turn", first_turns)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train()
    assert trainer.state.global_step == 1 and any(not torch.equal(a, b) for a, b in zip(before, trainer.model.parameters()))
    said = {name: [(kwargs, out) for method, kwargs, out in calls if method == name] for name in ("reset", tool, "get_reward")}
    assert len(said["reset"]) == 2 and all(kwargs["prompt"] and kwargs.items() >= task.items() for kwargs, _ in said["reset"])
    assert [kwargs for kwargs, _ in said[tool]] == [{argument: right}, {argument: right + 1}] and [out for _, out in said["get_reward"]] == [1.0, 0.0]


def test_of_a_literal_only_a_value_of_its_type_is_one():
    for value in (True, 2.0, "2", 4):
        with pytest.raises(TypeError):
            fit(value, Literal[1, 2])
    # Of several types the value's own comes first.
    assert repr([fit(3, float | int), fit(3, str | int), fit(3.0, int | float)]) == "[3, 3, 3.0]"
    assert fit(2, Literal[1, 2]) == 2 and fit(True, Literal[True, "auto"]) is True and fit(None, Literal["fast", None]) is None


def counted(method):
    def wrapper(self, number: int) -> str:
        return method(self, number)
    wrapper.__doc__ = method.__doc__
    return wrapper


def traced(method):
    @functools.wraps(method)
    def wrapper(*arguments):
        return method(*arguments)
    return wrapper


def test_a_decorated_tool_that_lacks_its_description_is_named_where_it_is_written():
    class Undescribed:
        @traced
        def find(self, word: str) -> str:
            pass
    with pytest.raises(UserError, match=rf"test_envs.py:{Undescribed.find.__wrapped__.__code__.co_firstlineno}: tool find: "):
        envs.schemas(Undescribed)


def test_what_may_be_left_out_is_not_needed():
    def function(self, a, b=1, *more, c, d=2, **others):
        pass
    assert needed(function) == ["a", "c"]


class Decorated:
    def reset(self, **_):
        return "Say 3."

    @counted
    def say(self, number: int) -> str:
        """Say a number.

        Args:
            number: the number
        """
        return f"{number}"

    shout = say


def test_a_tool_is_called_by_the_name_in_its_schema():
    names = [schema["function"]["name"] for schema in envs.schemas(Decorated)]
    assert names == ["say", "shout"] and [envs.call(Decorated(), name, {"number": 3}) for name in names] == [("3", False)] * 2


class Judged:
    def reset(self, answer, **_):
        return None


def test_tasks_with_the_same_answer_and_another_prompt_are_not_the_same(tmp_path, monkeypatch):
    monkeypatch.setitem(envs.ENVS, "judged", f"{__name__}:Judged")
    path = write(tmp_path, "".join(json.dumps({"prompt": f"Is {i} even?", "answer": ["yes", "no"][i % 2]}) + "\n" for i in range(100)), "judged.jsonl")
    train, test = (load_tasks("judged", split, None, 0, path) for split in ("train", "test"))
    assert len(train) + len(test) == 100 and len(test) > 5 and drop_seen(test, train) == test and drop_seen(test, [*train, test[0]]) == test[1:]


def test_an_environment_that_no_row_is_for_is_named(tmp_path, monkeypatch, asks):
    monkeypatch.setitem(envs.ENVS, "judged", f"{__name__}:Judged")
    path = write(tmp_path, "".join(json.dumps({"prompt": f"{i}", "answer": "1", "env": "judged"}) + "\n" for i in range(50)), "judged.jsonl")
    with pytest.raises(UserError, match="asks: no rows for it"):
        load_tasks("judged,asks", "train", None, 0, path)
