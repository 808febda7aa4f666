"""A notebook: a cell that is run twice, an environment's class in place of its name, and a result that shows itself."""
import html
import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import envs
import grpo
import sft
import layers
from agent import evaluate, rollout
from envs.tasks import load_tasks
from extras.exact.environments import sources
from core.config import UserError, convert, fill, options
from layers import Run
from layers import load_model

ROOT = Path(__file__).parent.parent
CELL = '''
import grpo

class Guess:
    system_prompt = "Find it."

    def reset(self, number=5, **_):
        self.number, self.reward, self.done = number, 0.0, False
        return "Guess."

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: your guess
        """
        self.done, self.reward = True, float(number == self.number)
        return "right" if self.reward else "wrong"

    def get_reward(self):
        return self.reward

    @staticmethod
    def _tasks(split, n, seed):
        return [{"number": i % 9} for i in range(n) if (i % 2 == 0) == (split == "test")]

result = grpo.train(grpo.Config(env=Guess, model_path="TINY", output_dir="runs/cell", tasks_per_step=2, group_size=2, batch_size=4,
                                max_steps=STEPS, max_new_tokens=8, max_tokens=700, max_samples=8, eval_tasks=2, MORE))
'''
NOTEBOOK = """
import __main__, code, json, sys
shell = code.InteractiveInterpreter(vars(__main__))
for cell in json.load(sys.stdin):
    shell.runsource(cell, "<cell>", "exec")
"""


def notebook(cells, folder):
    """Run the cells in a process whose main module is no file. Returns (stdout, stderr)."""
    done = subprocess.run([sys.executable, "-c", NOTEBOOK], cwd=folder, input=json.dumps(cells), capture_output=True, text=True, timeout=300,
                          env={**os.environ, "PYTHONPATH": str(ROOT)})
    return done.stdout, done.stderr


@pytest.mark.slow
def test_a_cell_runs_twice_with_a_class_as_its_environment(tiny, tmp_path):
    def cell(more, steps=1):
        return CELL.replace("TINY", tiny).replace("STEPS", str(steps)).replace("MORE", more)

    show = "print(json.dumps([result, result._repr_html_()]))"
    out, errors = notebook([cell(""), cell(""), cell("overwrite=True"), cell("resume=True", 2), "import json; " + show], tmp_path)
    refused = [line for line in errors.splitlines() if line.startswith("core.config.UserError: ")]
    assert len(refused) == 1 and refused[0].endswith(
        "already holds a grpo run; --resume continues it, --overwrite renames it (in Python: resume=True, overwrite=True), or give another --output_dir")
    assert "after step 1" in out
    result, shown = json.loads(out.splitlines()[-1])
    folder = tmp_path / "runs" / "cell"
    assert result == json.loads((folder / "result.json").read_text()) and result["steps"] == 2
    assert (tmp_path / "runs" / "cell.1" / "result.json").exists() and not (tmp_path / "runs" / "cell.2").exists()
    assert "\nenv: __main__:Guess\n" in (folder / "config.yaml").read_text()
    page = html.unescape(shown.partition('srcdoc="')[2].partition('"')[0])
    assert page.startswith("<!doctype html>") and 'id="data"' in page and not re.search(r"<(script|img|iframe) [^>]*src=|<link ", page)  # loads nothing
    # A program finds no such class, and says where it would.
    done = subprocess.run([sys.executable, ROOT / "grpo.py", "--config", folder / "config.yaml", "--env", "__main__:Guess", "--output_dir", "elsewhere"],
                          cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and done.stderr.splitlines()[-1].endswith(
        "__main__ has no class Guess with reset(); a class of a notebook or function is found in a file: --env path/to/file.py:ClassName")


def test_lists_and_functions_stand_for_their_names_and_rows_for_a_data_set():
    cls = envs.load("equations")
    config = fill(grpo.Config(env=[cls, "gsm8k"], rewards=[test_the_name_of_a_class_is_one_that_finds_it], dataset=[{"prompt": "2 + 2?"}]))
    assert config.env == "envs.equations:Equations,gsm8k" and config.rewards == f"{__name__}:test_the_name_of_a_class_is_one_that_finds_it"
    assert config.dataset == '[{"prompt": "2 + 2?"}]'
    assert fill(grpo.Config(rewards={test_the_name_of_a_class_is_one_that_finds_it: 0.5, "exact": "veto"})).rewards == f"{config.rewards}=0.5,exact=veto"
    for wrong in (cls(), {"a": cls}):
        with pytest.raises(UserError, match="environment .*Equations"):
            grpo.settle(grpo.Config(env=wrong))
    table = pytest.importorskip("datasets").Dataset.from_list([{"prompt": "2 + 2?"}])
    assert fill(grpo.Config(dataset=table)).dataset == config.dataset


@pytest.mark.parametrize("function", [lambda completions, **columns: 0, partial(print), type("Judge", (), {"__call__": print})()])
def test_a_function_without_a_name_is_told_in_a_line(function):
    """TRL's get_soft_overlong_punishment(...) is an object: it ended with no attribute '__qualname__'."""
    with pytest.raises(UserError, match="has no function .*; a lambda or an object is found by the name that a file gives it: path/to/file.py:name"):
        layers.rewards_of(grpo.Config(rewards=function))


def test_numbers_of_a_sweep_and_dicts_of_options_become_what_a_flag_says(tmp_path):
    """YAML cannot hold NumPy's: the run died with a traceback as it wrote config.yaml."""
    config = fill(grpo.Config(learning_rate=np.logspace(-4, -2, 3)[1], seed=np.arange(3)[2], env="gsm8k", env_options={"tools": "calculator"},
                              fields={"question": "problem", "answer": "solution"}))
    book = Run(sft.Config(learning_rate="1e-4", output_dir=str(tmp_path)), "sft")
    assert book.config.learning_rate == 1e-4  # PyYAML reads 1e-4 as text
    assert type(config.learning_rate) is float and type(config.seed) is int and config.seed == 2
    assert fill(grpo.Config(env_options={"hard": False, "k": None, "signs": ["+", "-"]})).env_options == 'hard=false,k=null,signs=["+", "-"]'  # they were text, "False"
    assert config.env_options == "tools=calculator" and config.fields == "question=problem,answer=solution"


def test_a_list_of_rows_is_not_told_whole():
    rows = json.dumps([{"question": "1 + 1?", "answer": "word " * 900}])
    with pytest.raises(UserError, match=': no "answer" field') as error:
        load_tasks(f"{__name__}:Asks", "test", 9, 0, rows.replace("answer", "Answer"))
    assert len(str(error.value)) < 500


def test_sft_and_a_resume_do_not_tell_it_whole_either(tmp_path, capsys):
    rows = [{"prompt": f"{i} + 1?", "completion": "word " * 90} for i in range(40)]
    short = {"output_dir": str(tmp_path), "max_steps": 0, "eval_tasks": 0}
    sft.train(sft.Config(dataset=rows, **short))
    assert "demonstrations to learn from" in (said := capsys.readouterr().out) and len(said) < 2000
    with pytest.raises(UserError, match="--dataset is .* and was ") as error:
        sft.train(sft.Config(dataset=rows[1:], resume=True, **short))
    assert len(str(error.value)) < 1000


class Asks:
    def reset(self, question, answer):
        return question


def test_the_name_of_a_class_is_one_that_finds_it():
    for name in ("equations", "envs/template.py:HigherLower"):
        cls = envs.load(name)
        config = grpo.Config(env=cls)
        assert envs.load(config.env) is cls and convert(config.env, options(grpo.Config)["env"], "--env") == config.env
        assert sources(config) == sources(grpo.Config(env=name))

    class Local:
        pass

    with pytest.raises(UserError, match="has no class .*Local with reset.*; a class of a notebook or function"):
        envs.load(grpo.Config(env=Local).env)


def test_a_result_is_the_dict_of_its_file_and_shows_nothing_of_another_run(tmp_path):
    from extras.show.page import Result
    (tmp_path / "result.json").write_text('{"steps": 3, "success_after": 0.5}\n')
    (tmp_path / "config.yaml").write_text("# grpo run; x\nseed: 0\n")
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"step": i, "loss": i / 7}) + "\n" for i in range(3)))
    result = Result(tmp_path)
    assert result == {"steps": 3, "success_after": 0.5} and repr(result) == repr(dict(result)) and "loss" in result._repr_html_()
    (tmp_path / "result.json").write_text('{"steps": 4}\n')
    assert result._repr_html_() is None


class Guess:
    def reset(self, number=5, **_):
        return f"Guess {number}."

    def get_reward(self):
        return 1.0


def test_the_parts_take_a_class_as_well_as_its_name(tiny):
    """Config(env=Guess) takes the class; rollout and evaluate died with "type object 'Guess' has no attribute 'split'"."""
    model, tokenizer = load_model(tiny)
    limits = envs.Limits(max_new_tokens=4, max_tokens=400)
    play = partial(rollout, model, tokenizer, group_size=2, limits=limits)
    assert envs.recommended(Guess) == envs.LIMITS
    assert play(Guess, [{"number": 3}]) == play(f"{__name__}:Guess", [{"number": 3}])
    assert evaluate(model, tokenizer, [Guess, "equations"], [{"env": f"{__name__}:Guess"}], limits=limits)["reward"] == 1
    with pytest.raises(UserError, match=f"which is none of {__name__}:Guess,envs.equations:Equations$"):
        play([Guess, envs.load("equations")], [{"env": "gsm8k"}])


def test_a_command_that_would_not_find_the_class_is_a_call_and_a_finished_run_shows_its_curves_again(tiny, tmp_path, monkeypatch, capsys):
    """An interrupted cell was to continue with `grpo.py --env __main__:Guess --resume`, and the cell run again showed a bare dict."""
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "Guess", type("Guess", (Guess,), {"__module__": "__main__", "__qualname__": "Guess"}), raising=False)

    def pay(episode):
        return 1.0

    pay.__module__, pay.__qualname__ = "__main__", "pay"
    monkeypatch.setattr(main, "pay", pay, raising=False)
    rows = [{"number": i} for i in range(30)]
    config = grpo.Config(env="tests.test_notebook:Guess", rewards=pay, dataset=rows, model_path=tiny, output_dir=str(tmp_path / "r"), max_steps=1,
                         tasks_per_step=2, group_size=2, batch_size=4, eval_tasks=2, max_new_tokens=4, max_tokens=400)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt) as stopped:
        patch.setattr(grpo, "total_loss", partial(raise_, KeyboardInterrupt))
        grpo.train(config)
    assert stopped.value.__notes__ == ["step 0 is saved; continue with: the same call with resume=True"]
    config.resume = True
    result = grpo.train(config)
    assert "next:" not in capsys.readouterr().out
    again = grpo.train(config)
    assert again == result and again._repr_html_() == result._repr_html_() is not None


def raise_(error, *_, **__):
    raise error
