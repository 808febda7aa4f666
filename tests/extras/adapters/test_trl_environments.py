"""TRL's example environments (tests/extras/adapters/trl_environments.py) run here as they are, and our environments in TRL's trainer."""
import json
import random
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

import agent
import envs
import grpo
from agent import Limits, rollout
from layers import rewards_of
from envs.prompts import opening
from envs.tasks import load_tasks, train_and_held_out
from extras.exact.environments import sources
from envs.transcripts import transcript
from core.config import UserError
from core.chat import Chat
from core.tiny import make_tiny

FILE = str(__import__("pathlib").Path(__file__).with_name("trl_environments.py"))
MODEL, TOKENIZER = make_tiny()
MODEL.eval()
LONG = Limits(max_new_tokens=400, max_tokens=4000, max_tool_tokens=3000, max_turns=8)
ASK = [{"role": "user", "content": "Play. "}]
SYSTEM = [{"role": "system", "content": "Rules."}, {"role": "user", "content": "Play Sudoku.\n"}]


def call(name, **arguments):
    return [{"name": name, "arguments": arguments}]


def played(monkeypatch, name, rewards, row, *turns):
    """Play the turns as the model's in one episode of the class, on a row as a data file holds it."""
    env = f"{FILE}:{name}"
    cls = envs.load(env)
    chat = Chat(TOKENIZER, envs.schemas(cls))
    forced = [i for turn in turns for i in (chat.turn("", turn) if isinstance(turn, list) else [*TOKENIZER.encode(turn, add_special_tokens=False), *sorted(chat.stop_ids)[:1]])]
    config = SimpleNamespace(env=env, rewards=rewards and ",".join(f"{FILE}:{r}" for r in rewards.split(",")), max_turns=8, max_new_tokens=400, max_tokens=4000)
    task = {**{"column:env" if key == "env" else key: value for key, value in row.items()}, "env": env}
    with monkeypatch.context() as patch:
        make = agent.Row
        patch.setattr(agent, "Row", lambda prompt, **options: make(prompt, forced=forced, **options))
        return rollout(MODEL, TOKENIZER, env, [task], limits=LONG, pay=rewards_of(config))[0]


EPISODES = [
    ("EchoToolEnv", "reward_func", {"prompt": ASK}, [call("echo", message="Hello"), "done"], ["Hello"], {"reward_func": 0.5}, "Play. "),
    ("WordleEnv", "reward_func", {"prompt": ASK}, [call("guess", guess="[train]"), call("guess", guess="[abc]"), call("guess", guess="[crane]")],
     ["XGGXY", "You attempted an invalid move: [abc]", "GGGGG"], {"reward_func": 1.0}, "Play. Guess the word.\n"),
    ("CatchEnv", "reward_from_env", {"prompt": ASK}, [call("move", direction="up"), call("move", direction="left"), call("stay"), call("stay"), call("stay")],
     ["error: ValueError: Invalid direction 'up': must be 'left' or 'right'.", "Ball: row 2/5, column 2/5\nPaddle: column 2/5", None, None, None], {"reward_from_env": 1.0},
     "Play. Ball: row 1/5, column 2/5\nPaddle: column 3/5"),
    ("SudokuEnv", "reward_correct,reward_valid_moves", {"prompt": SYSTEM}, [call("place", row=1, col=1, number=1), call("place", row=2, col=3, number=1), call("place", row=3, col=1, number=3), call("place", row=3, col=1, number=3), "done"],
     ["Move [1 1 1]: invalid\ninvalid move: already set, or a violation", None, None, "error: ValueError: Game is over. No more moves allowed."],
     {"reward_correct": 1.0, "reward_valid_moves": 2 / 3}, "Play Sudoku.\nStep 0.\n\nBoard:\nR1 1 2 3\nR2 2 3 .\nR3 . 1 2\n"),
    ("BrowserGymLLMEnv", "reward_func", {"prompt": ASK}, [call("noop"), call("click", bid="13"), call("noop"), "done"], [None, None, "Episode is done. No further actions needed."], {"reward_func": 1.0}, None),
    ("MultiEnv", "wordle_reward,catch_reward", {"prompt": ASK, "env": "catch"}, [call("guess", guess="crane"), call("move", direction="left"), "done"],
     ["error: ValueError: guess is only available in wordle", None], {"catch_reward": 0.0}, None),
    ("MultiEnv", "wordle_reward,catch_reward", {"prompt": ASK, "env": "wordle"}, [call("guess", guess="crane")], ["GGGGG"], {"wordle_reward": 1.0}, "Play. Guess the word.\n"),
    ("CalculatorEnv", "correctness", {"prompt": "6 x 7 + 1?", "answer": "43"}, [call("multiply", a=6, b=7), call("async_add", a=42, b=1), "43"], ["42", "43"], None, "6 x 7 + 1?"),
    ("CalculatorEnv", "correctness", {"prompt": [{"role": "user", "content": "6 x 7 + 1?"}], "answer": "43"}, [call("multiply", a=6, b=7), call("async_add", a=42, b=1), "43"], ["42", "43"], {"correctness": 1.0}, "6 x 7 + 1?"),
]


@pytest.mark.parametrize("name, rewards, row, turns, results, parts, question", EPISODES)
def test_an_example_of_trl_plays_and_is_paid_as_it_is(monkeypatch, name, rewards, row, turns, results, parts, question):
    if parts is None:  # text prompts: completions are text, and this function reads messages
        with pytest.raises(UserError, match="--rewards correctness raised TypeError"):
            played(monkeypatch, name, rewards, row, *turns)
        return
    t = played(monkeypatch, name, rewards, row, *turns)
    assert t.stop_reason == "done", t.info
    said = [m["content"].strip() for m in t.messages if m["role"] == "tool"]
    assert len(said) == len(results) and all(want is None or got == want for got, want in zip(said, results)), said
    assert t.reward_parts == pytest.approx(parts) and t.reward == pytest.approx(sum(parts.values())) and t.info["success"] == (t.reward > 0)
    users = [m["content"] for m in t.messages if m["role"] == "user"]
    assert question is None or users[0] == question
    assert isinstance(row["prompt"], str) or [m["role"] for m in t.messages][:len(row["prompt"])] == [m["role"] for m in row["prompt"]]


def test_an_environment_that_draws_its_own_tasks_needs_no_data(tmp_path, capsys):
    """The first example of TRL's page on GRPO: there is no data set, and nothing is held out."""
    MODEL.save_pretrained(tmp_path / "tiny"), TOKENIZER.save_pretrained(tmp_path / "tiny")
    result = grpo.train(grpo.Config(model_path=str(tmp_path / "tiny"), env=f"{FILE}:IncrementEnv", max_steps=1, tasks_per_step=2, group_size=2, max_new_tokens=16,
                                    eval_tasks=4, output_dir=str(tmp_path / "out"), dtype="float32"))
    assert result["steps"] == 1 and "4 of 4 held-out rows are also in the training data: dropped" in capsys.readouterr().out


def test_prompts_without_tools_need_no_class_of_ones_own(tmp_path):
    """README has it. Prompts and functions that pay are what most of TRL's examples have."""
    MODEL.save_pretrained(tmp_path / "tiny"), TOKENIZER.save_pretrained(tmp_path / "tiny")
    (tmp_path / "bare.py").write_text("def long(completions, **_):\n    return [len(c) for c in completions]\n")
    grpo.train(grpo.Config(model_path=str(tmp_path / "tiny"), env="envs.prompts:Prompts", rewards=f"{tmp_path}/bare.py:long", dataset=[{"prompt": "Say it."}, {"prompt": "Say more."}],
                           max_steps=1, tasks_per_step=2, group_size=2, max_new_tokens=8, eval_tasks=0, output_dir=str(tmp_path / "out"), dtype="float32"))
    rows = [json.loads(line) for line in (tmp_path / "out/trajectories.jsonl").read_text().splitlines()]
    assert {row["messages"][0]["content"] for row in rows} == {"Say it.", "Say more."} and all(row["reward"] == len(row["messages"][1]["content"]) for row in rows)


def test_the_environment_that_owns_question_and_reward(monkeypatch):
    monkeypatch.setattr(random, "randint", lambda a, b: 3)
    t = played(monkeypatch, "IncrementEnv", None, {}, call("increment", step=1), call("increment", step=2), "done")
    assert t.messages[0]["content"] == "Increment the counter by 3." and t.reward == 1.0 and t.info["success"] and t.reward_parts == {}


def rows(tmp_path, *tasks):
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps(task) + "\n" for task in tasks))
    return str(path)


@pytest.mark.parametrize("name, rewards, columns", [("WordleEnv", "reward_func=2", {}), ("MultiEnv", "wordle_reward,FILE:catch_reward", {"env": "catch"})])
def test_an_example_of_trl_trains_a_step(tmp_path, name, rewards, columns):
    MODEL.save_pretrained(tmp_path / "tiny"), TOKENIZER.save_pretrained(tmp_path / "tiny")
    data = rows(tmp_path, *({"prompt": [{"role": "user", "content": f"Game {i}. "}], **columns} for i in range(40)))
    result = grpo.train(grpo.Config(model_path=str(tmp_path / "tiny"), env=f"{FILE}:{name}", dataset=data, rewards=f"{FILE}:{rewards.replace('FILE', FILE)}", max_steps=1, tasks_per_step=2,
                                    group_size=2, max_new_tokens=16, max_tokens=800, eval_tasks=0, output_dir=str(tmp_path / "out"), dtype="float32"))
    assert result["steps"] == 1
    [line] = (tmp_path / "out/metrics.jsonl").read_text().splitlines()
    assert f"reward/{'catch_reward' if columns else 'reward_func'}" in json.loads(line)
    [first, *_] = map(json.loads, (tmp_path / "out/trajectories.jsonl").read_text().splitlines())
    assert first["messages"][0]["content"].startswith("Game ")


# ------------------------------------------------------------------------------------------- columns of the data
@pytest.mark.parametrize("column", ["env", "environment"])  # TRL's is "environment"
def test_a_row_chooses_among_the_environments_that_were_named(tmp_path, column):
    names = f"{FILE}:WordleEnv,{FILE}:CatchEnv"
    data = rows(tmp_path, *({"prompt": str(i), column: ["WordleEnv", f"{FILE}:CatchEnv"][i % 4 == 0]} for i in range(40)))
    tasks = load_tasks(names, "train", None, 0, data)
    assert {task["env"] for task in tasks} == set(names.split(",")) and 25 < len(tasks) <= 40
    assert all((task["env"] == f"{FILE}:CatchEnv") == (int(task["prompt"]) % 4 == 0) for task in tasks)
    assert len({task["env"] for task in tasks[:8]}) == 2  # mixed


@pytest.mark.parametrize("prompt", [3, [], [{"role": "user", "content": [{"type": "text", "text": "a"}]}], [{"role": "assistant", "content": "a"}], None, "", [{"role": "user", "content": ""}]])
def test_a_prompt_without_tools_that_no_episode_can_begin_with_is_refused_by_its_line(tmp_path, prompt):
    """It was a fault of the environment in the middle of the run, which went on without these rows."""
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("a", prompt)))
    with pytest.raises(UserError, match='tasks.jsonl:2: .*"prompt"'):
        load_tasks("envs.prompts:Prompts", "train", None, 0, str(path), holds_out=False)


@pytest.mark.parametrize("row, told", [
    ({"prompt": "a", "env": "os:system"}, r"""tasks.jsonl:1: "env" must be one of --env .*, not 'os:system'"""), ({"prompt": "a"}, '"env" must be one of --env .*, not None'),
    ({"prompt": "[{'role': 'tool', 'content': 'a'}]", "env": "WordleEnv"}, """tasks.jsonl:1: the last message of "prompt" must be the user's"""),
    ({"prompt": 3, "env": "WordleEnv"}, '"prompt" must be text or a list of'), ({"prompt": [{"role": "user"}], "env": "WordleEnv"}, '"prompt" must be text or a list of')])
def test_a_row_of_no_such_environment_or_prompt_is_an_error_with_its_line(tmp_path, row, told):
    with pytest.raises(UserError, match=told):
        load_tasks(f"{FILE}:WordleEnv,{FILE}:CatchEnv", "train", None, 0, rows(tmp_path, row))


def test_without_an_evaluation_no_row_is_held_out(tmp_path):
    """Data of games is one row again and again: a tenth of all texts would be held out whole."""
    config = grpo.Config(env=f"{FILE}:WordleEnv", dataset=rows(tmp_path, *[{"prompt": f"Play {i}."} for i in range(50)]), eval_tasks=0)
    train, held_out = train_and_held_out(config, 100)
    assert len(train) == 50 and held_out == []
    train, held_out = train_and_held_out(replace(config, eval_tasks=20), 100)
    assert len(train) + len(held_out) == 50 and held_out


def test_an_environment_without_get_reward_needs_rewards():
    config = SimpleNamespace(env=f"{FILE}:WordleEnv", rewards=None)
    with pytest.raises(UserError, match=r"^--env .*WordleEnv: there is no get_reward\(\): write one .*, or name functions with --rewards"):
        sources(config)


def test_a_prompt_that_reset_names_is_the_environments(tmp_path):
    (tmp_path / "mine.py").write_text("class Mine:\n    def reset(self, prompt: str, **_):\n        return prompt.upper()\n    def get_reward(self):\n        return 0.0\n")
    cls = envs.load(f"{tmp_path / 'mine.py'}:Mine")
    assert opening(cls.reset, {"prompt": "a"}, "")[0]["content"] == "a"  # it returned nothing: TRL shows the prompt
    assert opening(cls.reset, {"prompt": "a"}, "A")[0]["content"] == "A" and opening(envs.load(f"{FILE}:WordleEnv").reset, {"prompt": "a"}, "A")[0]["content"] == "aA"


@pytest.mark.parametrize("prompt, observation, shown", [
    ([{"role": "system", "content": "Rules."}], "Go.", [{"role": "system", "content": "Rules."}, {"role": "user", "content": "Go."}]),
    ([{"role": "system", "content": "Rules."}], "", "the last message .* the user's, not system"),
    ([{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "Let me think."}], "", "the last message .* the user's, not assistant"),
    ([{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": ""}, {"role": "tool", "content": "4"}], "", "the last message .* not tool")])
def test_a_prompt_ends_with_the_users_message(prompt, observation, shown):
    """The template would show the last one as the user's, whoever's it is."""
    if isinstance(shown, list):
        assert opening(lambda: None, {"prompt": prompt}, observation) == shown
    else:
        with pytest.raises(ValueError, match=shown):
            opening(lambda: None, {"prompt": prompt}, observation)


def test_a_prompt_may_have_calls_in_openais_form(monkeypatch):
    """Arguments as JSON text and no content beside them: the model sees what it sees of a call in TRL's form."""
    asked = {"role": "assistant", "content": None, "tool_calls": [{"id": "call00000", "type": "function", "function": {"name": "echo", "arguments": '{"message": "a"}'}}]}
    of_trl = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "echo", "arguments": {"message": "a"}}}]}
    after = [{"role": "tool", "tool_call_id": "call00000", "content": "A"}, {"role": "assistant", "content": "It said A."}, {"role": "user", "content": "Again."}]
    first, second = (played(monkeypatch, "EchoToolEnv", "reward_func", {"prompt": [*ASK, turn, *after]}, call("echo", message="b"), "done") for turn in (asked, of_trl))
    assert first.token_ids == second.token_ids and '{"name": "echo", "arguments": {"message": "a"}}' in TOKENIZER.decode(first.token_ids)
    assert [message.get("loss") for message in first.messages if message["role"] == "assistant"] == [0, 0, None, None]  # sft.py does not learn the prompt's
    assert [line for line in transcript(first.to_json()).splitlines() if "echo" in line] == ['echo(message="a") -> A   +0', 'echo(message="b") -> b   +0.0']


def test_a_column_that_no_task_has_is_said_once(monkeypatch, capsys):
    """A renamed column would be None for ever. One that other rows have may be missing in a batch, as in TRL."""
    for _ in range(2):
        t = played(monkeypatch, "EchoToolEnv", "asks_for_truth", {"prompt": ASK, "answer": "x"}, "done")
    assert t.reward == 0.0
    assert capsys.readouterr().out.splitlines() == ["note: --rewards asks_for_truth: no task of this step has a column 'ground_truth', so it gets None; columns: answer, env, prompt"]


@pytest.mark.parametrize("line", ["from envs.openspiel_env import OpenSpielEnv", "from agent import MyAgent", "import core.mine", "import agent; agent.helper()",
                                  "import envs; envs.VERSION", "import llm\nmodel = llm.get_model('gpt')"])
def test_a_package_that_has_the_name_of_ours_is_said_to(tmp_path, line):
    (tmp_path / "clashing.py").write_text(f"{line}\n")
    package = re.split("[ .;\n]", line)[1]
    with pytest.raises(UserError, match=rf"; {package} is a package of this project: rename yours"):
        envs.load(f"{tmp_path / 'clashing.py'}:Mine")


def test_a_package_called_data_is_imported(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/words.py").write_text("WORDS = ['a']\n")
    (tmp_path / "with_data.py").write_text("from data.words import WORDS\nclass Mine:\n    def reset(self, **_):\n        return WORDS[0]\n")
    assert envs.load(f"{tmp_path / 'with_data.py'}:Mine")().reset() == "a"


# ------------------------------------------------------------------------------------------- ours in TRL
WORD_PROBLEM = {"question": "Tom has 3 bags of 4 apples. How many apples?", "answer": "3 * 4 = <<3*4=12>>12 apples\n#### 12"}  # its own tasks are downloaded


SLOW = ("equations_hard", "meetings", "business")  # as equations, gsm8k and search


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in envs.ENVS])
def test_every_environment_of_ours_trains_a_step_in_trl(tmp_path, monkeypatch, name):
    """TRL's GRPOTrainer takes the class as it is: reset gets the task, the expert's first calls run, get_reward pays."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    import torch
    from trl import chat_template_utils
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    model, tokenizer = make_tiny()
    tokenizer.chat_template = chat_template_utils.qwen3_chat_template  # TRL parses calls only of templates that it knows by heart
    model.save_pretrained(tmp_path / "tiny"), tokenizer.save_pretrained(tmp_path / "tiny")
    cls = envs.load(name)
    task, rewards, observations = {"gsm8k": WORD_PROBLEM}.get(name) or cls._tasks("train", 1, 0)[0], [], []

    class Seen(cls):
        def reset(self, **kwargs):
            observations.append(super().reset(**kwargs))
            return observations[-1]

        def get_reward(self):
            rewards.append(super().get_reward())
            return rewards[-1]
    expert = cls()
    expert.reset(**task)
    turn = expert._expert()
    assert turn and not isinstance(turn, str)
    text = "".join(f"<tool_call>\n{json.dumps(one)}\n</tool_call>" for one in turn) + "<|im_end|>"
    arguments = trl.GRPOConfig(output_dir=str(tmp_path / "out"), max_steps=1, per_device_train_batch_size=2, num_generations=2, max_completion_length=200, use_cpu=True, bf16=False,
                               report_to=[], save_strategy="no", disable_tqdm=True, learning_rate=1e-3, gradient_checkpointing=False, max_tool_calling_iterations=1)
    data = datasets.Dataset.from_list([{"prompt": [{"role": "user", "content": ""}], **task}] * 2)
    trainer = trl.GRPOTrainer(model=str(tmp_path / "tiny"), args=arguments, train_dataset=data, environment_factory=Seen)
    turns = [[text, "<tool_call>\n{}\n</tool_call><|im_end|>"], ["done<|im_end|>"] * 2]  # the expert's calls, and one that cannot be made

    def written(prompt_ids, *_, **__):
        return [tokenizer.encode(t, add_special_tokens=False) for t in turns.pop(0)[:len(prompt_ids)]], None
    monkeypatch.setattr(trainer, "_generate_single_turn", written)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train()
    assert trainer.state.global_step == 1 and len(observations) == 2 <= len(rewards) and all(isinstance(r, float) for r in rewards)
    moved = any(not torch.equal(a, b) for a, b in zip(before, trainer.model.parameters()))
    assert moved == (len(set(rewards[-2:])) > 1)
