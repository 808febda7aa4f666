"""mixtures.py and tables.py: files, data sets of the hub, lists in YAML, several in shares, other names of columns; in all programs.

No network: data sets of the hub are folders in a data set's form, and such a one in the cache of `datasets`.
"""
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from test_resume import place  # noqa: F401  (a fixture)

import dpo
import agent_program
import grpo
import reward_weighted
import sft
from envs.task_files import read_data
from extras.data.mixtures import data_sources
from envs.tasks import load_tasks
from core.config import UserError, reading
from extras.hints.command_line import parse, read_yaml
from extras.data.tables import pinned
from extras.serve import settings

EQUATIONS = [{"equation": f"x + {i} = {2 * i + 1}"} for i in range(40)]


def write(path, rows):
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def rows_of(*data):
    return [row for _, row in read_data(*data)]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        from datasets import config
    except ImportError:
        return tmp_path
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(config, "HF_HUB_OFFLINE", True)
    return tmp_path


# ----------------------------------------------------------------------------------------- forms of data
def test_every_form_gives_the_same_rows(here):
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    pytest.importorskip("datasets")
    theirs = [{"problem": f"What is {i} + {i}?", "solution": str(2 * i), "n": str(i)} for i in range(5)]
    ours = [{"n": row["n"], "question": row["problem"], "answer": row["solution"]} for row in theirs]
    write("a.jsonl", theirs)
    write("own/quiz/train.jsonl", theirs)
    parquet.write_table(arrow.Table.from_pylist(theirs), "a.parquet")
    Path("a.csv").write_text("problem,solution,n\n" + "".join(",".join(row.values()) + "\n" for row in theirs))
    Path("a.yaml").write_text("dataset:\n" + "".join(f"- {{problem: '{row['problem']}', solution: '{row['solution']}', n: '{row['n']}'}}\n" for row in theirs))
    [(_, _, listed)] = read_yaml("a.yaml")
    for data in ("a.jsonl", "a.parquet", "a.csv", "hub:own/quiz", listed):
        assert rows_of(data) == theirs
        assert rows_of(data, "question=problem, answer=solution") == ours
    assert rows_of("a.jsonl, a.csv,a.parquet") == theirs * 3
    places = [place for place, _ in read_data("a.jsonl,a.csv,hub:own/quiz")]
    assert places[::5] == ["a.jsonl:1", "a.csv:2", "hub:own/quiz:1"]


def test_a_csv_file_holds_out_the_rows_that_the_same_jsonl_file_does(here):
    """The cells are text until `reset` says what they are: a number in quotes has another hash than a number."""
    rows = [{**row, "noise_seed": i} for i, row in enumerate(EQUATIONS)]
    write("a.jsonl", rows)
    Path("a.csv").write_text("equation,noise_seed\n" + "".join(f"{row['equation']},{row['noise_seed']}\n" for row in rows))
    for split in ("train", "test"):
        assert load_tasks("equations", split, None, 0, "a.csv") == load_tasks("equations", split, None, 0, "a.jsonl")


def test_a_csv_file_for_two_environments_has_empty_cells(here):
    """It was refused: noise_seed: '' cannot be read as int."""
    Path("a.csv").write_text("env,equation,noise_seed,case,level\nequations,x + 1 = 2,3,,\nbusiness,,,7,2\n")
    equation, case = sorted(load_tasks("equations,business", "train", None, 0, "a.csv", holds_out=False), key=lambda task: task["env"], reverse=True)
    assert (equation["equation"], equation["noise_seed"]) == ("x + 1 = 2", 3)
    assert case["case"] == 7 and "noise_seed" not in case


def test_names_of_columns(here):
    write("a.jsonl", [{"a": 1, "b": 2}, {"a": 3}])
    assert rows_of("a.jsonl", "b=a,a=b") == [{"b": 1, "a": 2}, {"b": 3}]  # two that change places
    assert rows_of("a.jsonl", "b=a") == [{"b": 1}, {"b": 3}]  # theirs replaces what has our name
    assert rows_of("a.jsonl", "c=a,tier=levl") == [{"b": 2, "c": 1}, {"c": 3}]  # other data may have it
    write("verl.jsonl", [{"a.b": 0, "reward_model": {"ground_truth": "4"}}, {"reward_model": None}])
    assert rows_of("verl.jsonl", "answer=reward_model.ground_truth,b=a.b") == [{"b": 0, "answer": "4", "reward_model": {"ground_truth": "4"}}, {"reward_model": None}]
    write("search_r1.jsonl", [{"reward_model": {"ground_truth": {"target": ["1972"]}}}, {"reward_model": {"ground_truth": "1972"}}, {"reward_model": {"ground_truth": ["target"]}}])
    assert rows_of("search_r1.jsonl", "answer=reward_model.ground_truth.target")[0]["answer"] == ["1972"]  # was not found
    assert [row.get("answer") for row in rows_of("search_r1.jsonl", "answer=reward_model.ground_truth.target")[1:]] == [None, None]
    for fields in ("a", "a=", "=b", "a=b,a=c"):
        with pytest.raises(UserError, match=f"--fields {fields.split(',')[-1]}: write question=problem,"):
            rows_of("a.jsonl", fields)


@pytest.mark.parametrize("text, found", [
    ("a.jsonl", [("a.jsonl", None)]), ("a.jsonl=0.7, b.csv = .3", [("a.jsonl", 0.7), ("b.csv", 0.3)]), ("a.jsonl=2,b.csv", [("a.jsonl", 2), ("b.csv", None)]),
    ("lr=0.1/a.jsonl", [("lr=0.1/a.jsonl", None)]), ("hub:o/n:c:s=1,a.csv=1", [("hub:o/n:c:s", 1), ("a.csv", 1)]), ('["a,b=1"]', [('["a,b=1"]', None)]),
    ("sums, new=1.csv", [("sums, new=1.csv", None)]), (None, []), ("", [])])
def test_what_a_flag_names(here, text, found):
    Path("sums, new=1.csv").touch()  # a file that exists is itself
    assert data_sources(text) == found


# ---------------------------------------------------------------------------------------------- mixtures
def test_a_mixture_has_the_shares_and_no_row_twice(here, capsys):
    write("a.jsonl", [{"a": i} for i in range(100)])
    write("b.jsonl", [{"b": i} for i in range(30)])
    for data, a, b in (("a.jsonl=0.7,b.jsonl=0.3", 70, 30), ("a.jsonl=1,b.jsonl=9", 3, 30), ("a.jsonl=10,b.jsonl=1", 100, 10), ("a.jsonl=3,b.jsonl=2", 45, 30)):
        mixed = rows_of(data)
        texts = {json.dumps(row) for row in mixed}
        assert (sum("a" in row for row in mixed), sum("b" in row for row in mixed)) == (a, b) and len(texts) == a + b
    assert "a.jsonl: 70 of 100 rows, its share of the mixture\n" in capsys.readouterr().out
    data = "a.jsonl=1,b.jsonl=1"
    assert rows_of(data, None, 1) == rows_of(data, None, 1)
    drawn = [{row["a"] for row in rows_of(data, None, seed) if "a" in row} for seed in range(8)]
    assert len(set(map(frozenset, drawn))) == 8 and set.union(*drawn) > drawn[0]
    rows_of(data)
    assert capsys.readouterr().out.count("a.jsonl: 30 of 100") == 1  # though it was read ten times


@pytest.mark.parametrize("data, says", [
    ("a.jsonl=0.7,b.jsonl", "a.jsonl=0.7,b.jsonl: give every one of them a weight above 0, or none"), ("a.jsonl=0,b.jsonl=1", "a.jsonl=0,b.jsonl=1: give every one of them"),
    ("a.jsonl=-1,b.jsonl=-1", "a.jsonl=-1: unknown type; use .jsonl"), ("train=Dataset({\n features: 3})", "train=Dataset("), ("a.jsonl,no.csv", "no.csv: No such file or directory"), ("a.jsonl,", ": unknown type"),
    ("[1, 2", "the list of rows:1: not JSON: "), ("[]", "[]: no rows"), ('[{"a": 1, "a": 2}]', 'the list of rows: key "a" twice')])
def test_what_is_no_data(here, data, says):
    write("a.jsonl", [{"a": 1}] * 3)
    write("b.jsonl", [{"a": 1}])
    with pytest.raises(UserError) as error:
        rows_of(data)
    assert str(error.value).startswith(says) and "\n" not in str(error.value)


def test_json_in_parquet_that_datasets_has_written_is_read_as_it_was(here):
    """TRL's tools have different arguments in each row, for which datasets has the type Json."""
    datasets = pytest.importorskip("datasets")
    rows = [{"messages": [{"role": "user", "content": "a"}], "tools": [{"function": {"name": "f", "parameters": {"properties": {name: {"type": "string"}}}}}]} for name in "xy"]
    datasets.Dataset.from_list(rows, on_mixed_types="use_json").to_parquet("j.parquet")
    assert rows_of("j.parquet") == rows


# ---------------------------------------------------------------------------------------------- the hub
def quiz(name="own/quiz"):
    """Write a data set with two configs and two splits in the form that the hub has."""
    for config in ("easy", "hard"):
        for split, n in (("train", 20), ("test", 3)):
            write(f"{name}/{config}/{split}.jsonl", [{"equation": f"x + {i} = {2 * i}", "from": f"{config} {split}"} for i in range(n)])
    card = "".join(f"- config_name: {config}\n  data_dir: {config}\n" + "  default: true\n" * (config == "easy") for config in ("easy", "hard"))
    Path(name, "README.md").write_text(f"---\nconfigs:\n{card}---\n")


@pytest.mark.parametrize("source, found, n", [
    ("own/quiz", "easy train", 20), ("own/quiz:hard", "hard train", 20), ("own/quiz:test", "easy test", 3), ("own/quiz:hard:test", "hard test", 3),
    ("own/quiz:train[:5]", "easy train", 5), ("own/quiz:hard:train[5:10]", "hard train", 5)])
def test_config_and_split_of_the_hub(here, source, found, n):
    pytest.importorskip("datasets")
    quiz()
    rows = rows_of(f"hub:{source}")
    assert {row["from"] for row in rows} == {found} and len(rows) == n
    full = pinned(f"hub:{source}")
    assert re.fullmatch(r"hub:own/quiz@[0-9a-f]{16,}:(easy|hard):\S+", full) and rows_of(full) == rows and pinned(full) == full


def test_what_the_hub_has_not(here, monkeypatch):
    datasets = pytest.importorskip("datasets")
    quiz()
    for source, says in (("own/quiz:no", r"Unknown split \"no\". Should be one of \['train', 'test'\]"), ("own/quiz:no:train", "BuilderConfig 'no' not found. Available: "),
                         ("own/other", "cannot be read .ConnectionError: Couldn't reach 'own/other' on the Hub"), ("own/quiz@" + "a" * 40, "this machine has revision [0-9a-f]{16} of it, which is another")):
        with pytest.raises(UserError, match=f"^hub:{source}: {says}") as error:
            rows_of(f"hub:{source}")
        assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="hub:o/n: cannot be read .DatasetNotFoundError: Dataset 'o/n' is a gated dataset"), reading("hub:o/n"):
        raise datasets.exceptions.DatasetNotFoundError("Dataset 'o/n' is a gated dataset on the Hub.")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match='hub:own/quiz: reading it needs "pip install datasets"'):
        rows_of("hub:own/quiz")


def test_without_a_network_the_cached_revision_is_read_and_no_other(here):
    datasets = pytest.importorskip("datasets")
    write("near/away/train.jsonl", EQUATIONS)
    builder = datasets.load_dataset_builder("near/away")
    builder.download_and_prepare()
    # What load_dataset leaves behind when it was online: owner___name/config/version/commit.
    commit = "0123456789" * 4
    shutil.copytree(builder.cache_dir, here / "cache" / "far___away" / "default" / "0.0.0" / commit)
    assert rows_of("hub:far/away") == rows_of(f"hub:far/away@{commit}:train") == EQUATIONS
    assert pinned("hub:far/away") == pinned("hub:far/away@main") == f"hub:far/away@{commit}:default:train"
    with pytest.raises(UserError, match=f"this machine has revision {commit} of it"):
        rows_of(f"hub:far/away@{commit[::-1]}")


# --------------------------------------------------------------------------------------- a list in YAML
def test_a_list_in_a_config_file_is_data(here):
    Path("c.yaml").write_text("""
env: none
tasks:
  - 42
  - "What is 2 + 3?"
  - {prompt: "x: y", answer: 72, b: no, c: 010, d: null, e: [1, 2.5], f: "7"}
  - - {role: user, content: hi}
  - |
    two
    lines
  - 1.50
  - NaN
  - null
eval_dataset: [one]
""")
    config = parse(grpo.Config, ["--config", "c.yaml"])
    assert rows_of(config.dataset) == [
        {"prompt": "42"}, {"prompt": "What is 2 + 3?"}, {"prompt": "x: y", "answer": 72, "b": "no", "c": "010", "d": None, "e": [1, 2.5], "f": "7"},
        {"prompt": [{"role": "user", "content": "hi"}]}, {"prompt": "two\nlines\n"},
        {"prompt": "1.50"}, {"prompt": "NaN"}, {"prompt": "null"}]  # a prompt is what was typed
    assert rows_of(config.eval_dataset, "question=prompt") == [{"question": "one"}]
    for line, says in (("env: [a, b]", "c.yaml:1: give lines `name: value`, nothing nested"), ("dataset: {a: 1}", "c.yaml:1: give lines"), ("trajectories: [a]", "c.yaml:1: give lines"),
                       ("dataset: &x [*x]", "c.yaml:1: cannot be read .RecursionError")):
        Path("c.yaml").write_text(line)
        with pytest.raises(UserError, match=f"^{says}"):
            parse(reward_weighted.Config, ["--config", "c.yaml"])


def test_a_list_becomes_tasks_under_the_names_of_the_environment(here):
    rows = json.dumps([f"x + {i} = 9" for i in range(40)])
    train, test = (load_tasks("equations", split, None, 0, rows, fields="equation=prompt") for split in ("train", "test"))
    assert len(train) + len(test) == 40 and test and {row["env"] for row in train} == {"equations"}
    with pytest.raises(UserError, match='^the list of rows:1: no "equation" field; has: prompt; rows are read as tasks of Equations'):
        load_tasks("equations", "train", None, 0, rows)


# ------------------------------------------------------------------------------------- in all programs
def run(module, place, words, out="run"):
    """Run a program for as little as it can, with flags as the command line gives them."""
    small = ["--model_path", place / "base", "--lora_r", 2, "--learning_rate", 1e-3, "--max_steps", 1, "--eval_tasks", 0, "--output_dir", out, "--max_tokens", 200]
    if module is not sft:
        small += ["--group_size", 2, "--max_new_tokens", 4]
    if module in (grpo, reward_weighted):
        small += ["--tasks_per_step", 2]
    return module.train(parse(module.Config, list(map(str, [*small, *words]))))


TASKS = [{"sum": row["equation"]} for row in EQUATIONS]
CHATS = [{"chat": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "Yes."}]} for i in range(30)]
PAIRS = [{"ask": f"{i}?", "chosen": "Yes.", "worse": "No."} for i in range(30)]


@pytest.mark.parametrize("module, rows, fields", [
    (grpo, TASKS, "equation=sum"), (reward_weighted, TASKS, "equation=sum"), (sft, CHATS, "messages=chat"), (dpo, PAIRS, "prompt=ask,rejected=worse")])
def test_all_programs_learn_from_a_mixture_and_repeat_and_resume_it(here, place, module, rows, fields):
    pytest.importorskip("datasets")
    write("a.jsonl", rows[:20])
    write("own/quiz/train.jsonl", rows[20:])
    words = ["--dataset", "a.jsonl=1,hub:own/quiz:train=0.5", "--fields", fields, "--seed", 3]
    run(module, place, words)
    written = {name: value for _, name, value in read_yaml("run/config.yaml")}
    assert re.fullmatch("a.jsonl=1,hub:own/quiz@[0-9a-f]{16}:default:train=0.5", written["dataset"]) and written["fields"] == fields
    run(module, place, ["--config", "run/config.yaml"], "again")  # what a run has resolved repeats it
    assert Path("run/metrics.jsonl").read_text() == Path("again/metrics.jsonl").read_text()

    assert run(module, place, [*words, "--resume", "--max_steps", 2])["steps"] == 2
    recorded = json.loads(Path("run/checkpoints/step_000002/state.json").read_text())["made_of"]
    assert "a.jsonl" in recorded
    write("a.jsonl", rows[1:20])
    with pytest.raises(UserError, match="a.jsonl: is not the file this run began with"):
        run(module, place, [*words, "--resume", "--max_steps", 3])
    write("a.jsonl", rows[:20])
    write("own/quiz/train.jsonl", rows[21:])
    with pytest.raises(UserError, match="--dataset is a.jsonl=1,hub:own/quiz@[0-9a-f]{16}:default:train=0.5 and was a.jsonl=1,hub:own/quiz@"):
        run(module, place, [*words, "--resume", "--max_steps", 3])


def test_held_out_rows_of_a_mixture_are_never_learned_from(here):
    write("a.jsonl", EQUATIONS)
    write("b.jsonl", [{"equation": f"{i}x = {i}"} for i in range(2, 60)])
    train, test = (load_tasks("equations", split, None, 5, "a.jsonl=1,b.jsonl=1") for split in ("train", "test"))
    assert (len(train), len(test)) == (72, 8)
    assert not {r["equation"] for r in train} & {r["equation"] for r in test}
    other = load_tasks("equations", "test", None, 6, "a.jsonl=1,b.jsonl=1")  # other rows are drawn, no row changes sides
    assert not {r["equation"] for r in train} & {r["equation"] for r in other}


def test_tasks_beside_other_data_take_the_same_names(here, place, capsys):
    write("chats.jsonl", CHATS)
    write("tasks.csv", [])
    Path("tasks.csv").write_text("sum,noise\n" + "".join(f"{row['equation']},0.5\n" for row in EQUATIONS))
    result = run(sft, place, ["--dataset", "chats.jsonl", "--tasks", "tasks.csv", "--env", "equations", "--fields", "messages=chat,equation=sum", "--eval_tasks", 2])
    assert result["held_out_tasks"] == 2
    monkey = settings.as_the_run(agent_program.Config(model_path="run"))  # agent.py plays the run's tasks under the run's names
    assert (monkey.dataset, monkey.fields) == ("tasks.csv", "messages=chat,equation=sum") and monkey.max_new_tokens == sft.settle(sft.Config(env="equations")).max_new_tokens
    assert load_tasks(monkey.env, "test", 3, 0, monkey.dataset, monkey.eval_dataset, fields=monkey.fields)[0]["noise"] == 0.5


def test_the_arguments_of_a_template_that_trl_reads_in_a_row_are_said_to_be_none_of_ours(here, capsys):
    write("a.jsonl", [{"prompt": "a", "chat_template_kwargs": {"enable_thinking": False}}, {"prompt": "b", "chat_template_kwargs": {"enable_thinking": False}}])
    rows_of("a.jsonl")
    assert capsys.readouterr().out.splitlines() == ["note: a.jsonl: chat_template_kwargs is not read; set such values at the top of the model's chat_template.jinja: {% set enable_thinking = false %}"]


def test_a_column_that_no_row_has_is_named(here, capsys):
    write("a.jsonl", [{"problem": "1 + 1", "n": 1}, {"n": 2}])
    assert list(read_data("a.jsonl", "question=problem")) == [("a.jsonl:1", {"n": 1, "question": "1 + 1"}), ("a.jsonl:2", {"n": 2})]
    assert "note:" not in capsys.readouterr().out
    list(read_data("a.jsonl", "question=problm"))
    assert capsys.readouterr().out == "note: a.jsonl: no row has problm, which --fields names\n"


def test_data_in_the_folder_to_overwrite_is_found_behind_its_weight(here, place):
    run(grpo, place, [])
    write("run/a.jsonl", EQUATIONS)
    write("b.jsonl", EQUATIONS)
    with pytest.raises(UserError, match="--dataset run/a.jsonl lies in the folder to overwrite"):
        run(grpo, place, ["--dataset", "b.jsonl=1,run/a.jsonl=1", "--overwrite"])


def test_a_run_without_data_waits_for_no_library_that_reads_some(python):
    code = "import sys, grpo; grpo.settle(grpo.Config()); print(sorted(m for m in sys.modules if m in ('pyarrow', 'datasets')))"
    done = python("-c", code)
    assert done.stdout == "[]\n", done.stderr
