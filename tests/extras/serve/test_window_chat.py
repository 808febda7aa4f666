"""agent.py's command and extras/serve/chat.py: the agent and the plain model in a chat, tasks as people type them, episodes that are kept."""
import json
import os
import re
import resource
import signal
import sys
import time

import pytest
import torch
from programs import ROOT, Program, run
from test_agent import MODEL, TOKENIZER, answers, chat_in, environments, run_folder  # noqa: F401  (a fixture)

import agent
import agent_program
from agent import Limits, Trajectory
from envs.equations import Equations
from envs.gsm8k import GSM8K
from episodes import read_trajectories
from envs.transcripts import message_lines
from core.data import to_json
from core.config import UserError
from layers import main
from core.chat import Chat
from core.engine import Engine, Row
from extras.serve import chat as talk, settings


# ------------------------------------------------------------------------------------------------------ what people type
@pytest.mark.parametrize("typed, asked", [
    ("x/5 + 27 = 32", "x/5 + 27 = 32"), ("3x+7=16", "3x + 7 = 16"), ("Solve for x: 3x + 7 = 16.", "3x + 7 = 16"), ("7 = 3x \u2212 2", "7 = 3x - 2"),
    ("what is x if 3X+7 = 16?", "3x + 7 = 16"), ("solve 2*(X+3) = 10, please", "2(x + 3) = 10"), ("5x + 3 = 2x + 9", "5x + 3 = 2x + 9"), ("x = 4", "x = 4")])
def test_a_typed_equation_is_a_task(typed, asked):
    assert Equations().reset(**Equations._from_text(typed)) == f"Solve for x: {asked}"


@pytest.mark.parametrize("typed, says", [
    ("hello", "'hello' is not an equation like 3x"), ("2y + 3x = 7", "'2y' is not a term"), ("3x = 7 + 2y", "2y' is not a term"), ("x^2 = 4x", "'x^2' is not"),
    ("1.5x = 3", "'1.5x' is not"), ("2*3x = 6", "is not a term"), ("x = 1 = 2", "is not an equation"), ("0x = 4", "no single solution"), ("3x =", "is not a term"),
    ("3x + 7 = 250", "numbers above 99"), ("x/13 = 2/17", "finer than 1/12")])
def test_what_cannot_be_asked_is_refused_and_never_read_as_another_equation(typed, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        Equations._from_text(typed)


@pytest.mark.parametrize("typed, said, verdict, success", [
    ("What is 3 + 4? #### 7", "7", "Correct.", True), ("What is 3 + 4? #### 7", "8", "Wrong.", False),
    ("What is 3 + 4?", "7", "The right answer is not known.", False), ("What is 3 + 4?", "many", "The right answer is not known.", False)])
def test_a_typed_word_problem_is_judged_only_by_an_answer_that_was_typed(typed, said, verdict, success):
    env = GSM8K()
    assert env.reset(**GSM8K._from_text(typed)) == "What is 3 + 4?"
    assert (env.answer(said), env.done, env._check(), env.get_reward()) == (verdict, True, success, float(success))
    if "####" not in typed:
        env.reset(**GSM8K._from_text(typed), num_turns=3)
        assert env._reply("It is #### many") is None and env.done and not env._check()


def test_a_line_of_a_transcript():
    def line(reward, content="x/5 + 27 = 31", **arguments):
        turn = {"role": "assistant", "content": "", "tool_calls": [{"name": "add_terms", "arguments": arguments}]}
        return message_lines([turn, {"role": "tool", "name": "add_terms", "content": content, "reward": reward}])
    assert line(2.0, terms="1") == ['add_terms(terms="1") -> x/5 + 27 = 31   +2.0']
    assert line(-0.05, n=3, deep={"a": [True, None]}) == ['add_terms(n=3, deep={"a": [true, null]}) -> x/5 + 27 = 31   -0.05']
    assert line(0.0, "\x1b]52;c;eA==\x07") == [r"add_terms() -> \x1b]52;c;eA==\x07   +0.0"]
    assert message_lines([{"role": "tool", "name": "", "content": "error: not JSON", "reward": 0.0}]) == ["unreadable call -> error: not JSON   +0.0"]


def test_a_run_that_held_no_task_out_has_no_test_tasks(tmp_path):
    """All rows of its file were trained on. 20 of 20 tasks of --split test had been."""
    run = run_folder(tmp_path / "run", env="equations", dataset="t.jsonl", eval_tasks=0)
    with pytest.raises(UserError, match="--split test: .*config.yaml: with eval_tasks 0 the run held no task out; give --eval_dataset"):
        settings.settle(agent_program.Config(model_path=str(run), split="test"))
    assert settings.settle(agent_program.Config(model_path=str(run))).dataset == "t.jsonl"
    assert settings.settle(agent_program.Config(model_path=str(run), split="test", eval_dataset="e.jsonl")).eval_dataset == "e.jsonl"
    expert = run_folder(tmp_path / "sft", env="equations", tasks="t.jsonl", eval_tasks=0)  # the expert has not played the tenth
    (expert / "config.yaml").write_text((expert / "config.yaml").read_text().replace("# grpo", "# sft"))
    assert settings.settle(agent_program.Config(model_path=str(expert), split="test")).dataset == "t.jsonl"
    recorded = run_folder(tmp_path / "weighted", env="equations", dataset="t.jsonl", trajectories="r.jsonl")  # reward_weighted.py's
    assert settings.settle(agent_program.Config(model_path=str(recorded), split="test")).eval_dataset == "t.jsonl"


# ------------------------------------------------------------------------------------------------- with the agent
def test_a_typed_equation_is_solved_in_its_own_environment(monkeypatch, capsys):
    said = chat_in(monkeypatch, capsys, ["please solve x/5+27 = 32"], answers({"equation": "x/5 + 27 = 32"}))
    assert "Task: Solve for x: x/5 + 27 = 32\n" in said and 'subtract_terms(terms="27") -> x/5 = 5   +2.0\n' in said
    assert 'state_answer(value="25") -> right   +5.0\n[done; success True; reward 9.00]\n' in said


def test_a_line_that_is_no_task_is_told_and_nothing_is_played(monkeypatch, capsys):
    said = chat_in(monkeypatch, capsys, ["hello", "x^2 = 4"], "fine", "fine")
    assert "['hello' is not an equation like 3x + 7 = 16]" in said and "['x^2' is not a term like 7 or 3x]" in said and "success" not in said


def test_the_reward_of_a_question_that_nobody_answered_is_not_shown(tmp_path, monkeypatch, capsys):
    (tmp_path / "tasks.jsonl").write_text("".join(f'{{"question": "1 + {n}?", "answer": "{n + 1}"}}\n' for n in range(9)))
    turns = [[{"name": "answer", "arguments": {"value": "7"}}]]
    said = chat_in(monkeypatch, capsys, ["3 + 4?", "3 + 4? #### 7"], turns, turns, env_name="gsm8k", dataset=str(tmp_path / "tasks.jsonl"))
    assert 'answer(value="7") -> The right answer is not known.   +0.0\n[done]\n' in said
    assert 'answer(value="7") -> Correct.   +1.0\n[done; success True; reward 1.00]\n' in said


def test_without_from_text_other_words_are_asked_of_the_task_that_is_shown(tmp_path, monkeypatch, capsys):
    (tmp_path / "tasks.jsonl").write_text("".join(f'{{"word": "w{n}"}}\n' for n in range(9)))
    said = chat_in(monkeypatch, capsys, ["pay me"], [[{"name": "pay", "arguments": {"amount": 1}}], "fine"], env_name="box", dataset=str(tmp_path / "tasks.jsonl"))
    assert "the tools still work on the task" in said.replace("\n", " ") and 'pay(amount=1) -> paid 1.0   +1.0\nAssistant: fine\n[done; success True; reward 1.00]' in said


def test_what_is_asked_instead_keeps_the_options_and_the_system_prompt_and_a_fault_is_told(tmp_path):
    (tmp_path / "bare.py").write_text("class Bare:\n    system_prompt = 'Be brief.'\n    def reset(self, **_):\n        return 'Go.'\n    def get_reward(self):\n        return 0.0\n")

    def asked(name, task, text, **options):
        config = settings.settle(agent_program.Config(env=name, **options))
        with agent.sessions(Limits()) as new_session:
            visit = talk.Visit(config, agent, MODEL, TOKENIZER, new_session)
            return talk.asked_instead(visit, visit.episode(task), text)
    assert asked("equations", {"equation": "x = 1"}, "2x = 4", env_options="noise=0.5").session.task == {"equation": "2x = 4", "noise": 0.5}
    episode = asked(f"{tmp_path}/bare.py:Bare", {}, "Stop.")
    assert episode.trajectory.messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Stop."}]
    assert episode.trajectory.token_ids == episode.chat.prompt(episode.trajectory.messages)
    episode.fail("it broke")
    assert talk.how_it_ended(episode) == "it broke"


def test_a_task_that_is_too_long_is_not_played(monkeypatch, capsys):
    said = plain(monkeypatch, capsys, "", env="equations", max_tokens=8)
    assert re.search(r"\[the prompt has \d+ tokens, --max_tokens is 8\]", said) and "Assistant" not in said


def test_a_typed_task_gets_only_the_options_that_reset_takes(tmp_path, monkeypatch, capsys):
    """As the tasks that are played do. Here `level` is an option of the class, and reset has no **kwargs."""
    (tmp_path / "strict.py").write_text("class Strict:\n    options = {'level': 1}\n    def reset(self, n: int = 0):\n        return f'{n} on level {self.options[\"level\"]}?'\n"
                                        "    def get_reward(self):\n        return 1.0\n    @staticmethod\n    def _from_text(text):\n        return {'n': int(text)}\n")
    said = chat_in(monkeypatch, capsys, ["7"], ["fine"], env_name=f"{tmp_path}/strict.py:Strict", env_options="level=2", unsafe_code=True)
    assert "Task: 7 on level 2?\n" in said and "[done; success True; reward 1.00]" in said


# ----------------------------------------------------------------------------------------------------- with the model
def plain(monkeypatch, capsys, *words, **options):
    """What the screen shows of a plain chat with the untaught model."""
    words = iter(words)

    def typed(_):
        try:
            return next(words)
        except StopIteration:
            raise EOFError from None
    monkeypatch.setattr("builtins.input", typed)
    monkeypatch.setattr(agent_program.talk, "load_model", lambda *_, **__: (MODEL, TOKENIZER))
    agent_program.run(agent_program.Config(**options))
    return capsys.readouterr().out


def replies(said):
    """The answers on the screen, and how many tokens each has."""
    return re.findall(r"Assistant: (.*?)\n\[cut after (\d+) tokens; --max_new_tokens, --max_tokens\]\n", said, re.S)


def test_a_plain_chat_is_what_generate_says_to_the_whole_conversation(monkeypatch, capsys):
    said = replies(plain(monkeypatch, capsys, "hello", "and then", "", "hello", temperature=0, max_new_tokens=9, system_prompt="be brief"))
    chat, answers = Chat(TOKENIZER, []), []
    ids = chat.prompt([{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}])
    for _ in range(2):
        sampled = MODEL.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=9)[0, len(ids):].tolist()
        answers.append((chat.text(sampled), "9"))
        ids += sampled + chat.reply("and then", sampled[-1])
    assert said == [*answers, answers[0]] and answers[0] != answers[1]  # an empty line begins again, with the system prompt


CUTS = {"temperature": 0}, {"top_k": 1}, {"top_p": 1e-9}, {}


def test_top_k_and_top_p_cut_what_is_sampled_in_a_chat(monkeypatch, capsys):
    first, *others, uncut = [replies(plain(monkeypatch, capsys, "hello", max_new_tokens=9, **cut)) for cut in CUTS]
    assert others == [first, first] and uncut != first


def test_top_k_and_top_p_cut_what_is_sampled_and_eight_episodes_are_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(agent_program.talk, "load_model", lambda *_, **__: (MODEL, TOKENIZER))
    played = []
    for i, cut in enumerate(CUTS):
        out = str(tmp_path / f"{i}.jsonl")
        agent_program.run(agent_program.Config(env="equations", num_tasks=9, max_new_tokens=4, output=out, **cut))
        played.append([t.token_ids for t in read_trajectories(out)])
    assert played[0] == played[1] == played[2] != played[3] and list(map(len, played)) == [9] * 4
    assert capsys.readouterr().out.count("; success False; reward") == 8 * 4


@pytest.mark.parametrize("env, words", [(None, ("hello", "", "hello")), ("equations", ("2x = 4", "2x = 4"))])
def test_what_is_asked_again_is_sampled_anew_and_the_seed_repeats_it_all(monkeypatch, capsys, env, words):
    said = plain(monkeypatch, capsys, *words, env=env, max_new_tokens=9)
    first, second = re.findall(r"Assistant: (.*?)\n\[", said, re.S)
    assert first != second and plain(monkeypatch, capsys, *words, env=env, max_new_tokens=9) == said
    assert plain(monkeypatch, capsys, *words, env=env, max_new_tokens=9, seed=1) != said


def test_the_model_is_loaded_in_the_dtype_that_was_asked_for(capsys):
    model, _ = talk.load(agent_program.Config(dtype="bfloat16"), agent_program.talk.load_model)
    assert model.dtype == torch.bfloat16 and "0.9 million weights, bfloat16, on " in capsys.readouterr().out


def test_a_conversation_that_is_full_says_so_and_begins_again(monkeypatch, capsys):
    said = plain(monkeypatch, capsys, "hello", "word " * 20, "", "hello", temperature=0, max_tokens=40, max_new_tokens=30)
    chat = Chat(TOKENIZER, [])
    asked = len(chat.reply("word " * 19 + "word", None))  # after the 40 tokens of the first question and its answer
    assert f"[that makes {40 + asked} tokens, --max_tokens is 40; an empty line begins a new conversation]" in said
    length = len(chat.prompt([{"role": "user", "content": "hello"}]))
    assert f"[that makes {length} tokens, --max_tokens is {length};" in plain(monkeypatch, capsys, "hello", max_tokens=length)
    first, last = replies(said)
    assert first == last and int(first[1]) < 30


def test_an_answer_is_printed_as_it_is_sampled_and_no_character_by_halves(monkeypatch):
    chat = Chat(TOKENIZER, [])
    ids = TOKENIZER.encode("naïve 漢字 👩 ok", add_special_tokens=False)
    assert any(TOKENIZER.decode(ids[:n]).endswith("\ufffd") for n in range(len(ids)))
    engine = Engine(MODEL, slots=1, stop_ids=chat.stop_ids)
    row = Row(chat.prompt([{"role": "user", "content": "hello"}]), limit=50, forced=[*ids, chat.answer_stop_id])
    engine.add([row])
    assert talk.engine_for(agent_program.Config(max_tokens=40), agent, MODEL, chat).stop_ids == chat.stop_ids | chat.start_ids
    pieces = list(talk.pieces(engine, chat, row))
    assert "".join(pieces) == "naïve 漢字 👩 ok" and len([piece for piece in pieces if piece]) > 6 and not any("\ufffd" in piece for piece in pieces)
    row.forced = TOKENIZER.encode("\ufffd", add_special_tokens=False) + [chat.answer_stop_id]
    engine.extend(row, chat.reply("and then", row.turn[-1]), 50)
    assert "".join(talk.pieces(engine, chat, row)) == "\ufffd"


def test_a_plain_chat_prints_terminal_escapes_as_text(monkeypatch, capsys):
    monkeypatch.setattr(talk, "pieces", lambda engine, chat, row: (engine.step(), row.append(0, 0.0, {0}), iter(["\x1b]52;c;", "ZXZpbA==\x07"]))[-1])
    assert r"Assistant: \x1b]52;c;ZXZpbA==\x07" in plain(monkeypatch, capsys, "hello", env="none")


# ----------------------------------------------------------------------------------------------- what is played where
def test_a_model_that_learned_no_environment_is_chatted_with(tmp_path, capsys):
    chats = run_folder(tmp_path / "chats", env="null", dataset="chats.jsonl", tasks="null", dtype="bfloat16")
    played = run_folder(tmp_path / "played", env="equations", tasks="t.jsonl", dtype="bfloat16")
    stranger = run_folder(tmp_path / "stranger", env="evil.py:Evil")
    for options, env in [({}, None), ({"model_path": str(chats / "base")}, None), ({"model_path": str(played)}, "equations"),
                         ({"model_path": str(played), "env": "none"}, None), ({"model_path": str(stranger), "env": "none"}, None)]:
        config = settings.settle(agent_program.Config(**options))
        assert (config.env, config.dataset) == (env, "t.jsonl" if env else None)
        assert config.dtype == ("bfloat16" if options.get("model_path", "").startswith((str(chats), str(played))) else "auto")
        assert (config.max_new_tokens, config.max_tokens) == ((64, 1024) if env else (256, 2048))
    assert "--env none" not in capsys.readouterr().out
    with pytest.raises(UserError, match="--env none for a plain chat"):
        settings.settle(agent_program.Config(model_path=str(stranger)))


def test_naming_the_runs_environment_changes_nothing_and_naming_another_takes_its_own_tasks_and_limits(tmp_path):
    run = str(run_folder(tmp_path / "run", env="equations", tasks="t.jsonl", max_new_tokens=9, max_turns=2))
    named = settings.settle(agent_program.Config(model_path=run, env="equations"))
    assert named == settings.settle(agent_program.Config(model_path=run)) and (named.dataset, named.max_new_tokens, named.max_turns) == ("t.jsonl", 9, 2)
    other = settings.settle(agent_program.Config(model_path=run, env="gsm8k"))
    assert (other.dataset, other.max_turns) == (None, None) and other.max_new_tokens > 9


def test_a_run_is_found_from_its_parts_and_from_inside_them_and_only_for_its_own_models(tmp_path, monkeypatch):
    run = run_folder(tmp_path / "run", env="equations", max_turns=2)
    newest = run / "checkpoints" / "step_000002"
    newest.mkdir(parents=True)
    for place in (run, run / "base", newest):
        assert settings.run_folder(str(place)) == run
        monkeypatch.chdir(place)
        assert settings.run_folder(".") == run
    monkeypatch.chdir(run)
    assert settings.run_folder("tiny") is None  # a name that stands for no folder here


@pytest.mark.parametrize("name, value", [("num_tasks", 3), ("dataset", "t.jsonl"), ("eval_dataset", "t.jsonl"), ("env_options", "a=1")])
def test_without_an_environment_what_is_for_one_is_refused(name, value):
    with pytest.raises(UserError, match=f"--{name} {value}: of which environment"):
        settings.check(agent_program.Config(**{name: value}))
    settings.check(agent_program.Config(env="equations,gsm8k", num_tasks=3, **({name: value} if name != "num_tasks" else {})))


def test_what_the_run_says_is_taken_and_what_the_command_line_says_counts_more(tmp_path):
    written = {"dataset": "t.jsonl", "eval_dataset": "e.jsonl", "env_options": "num_turns=3", "fields": "question=q", "max_turns": 2, "max_new_tokens": 9, "max_tokens": 99}
    given = {"dataset": "u.jsonl", "eval_dataset": "v.jsonl", "env_options": "num_turns=4", "fields": "question=r", "max_turns": 3, "max_new_tokens": 8, "max_tokens": 88}
    run = str(run_folder(tmp_path / "run", env="gsm8k", **written))
    for words, expected in (({}, written), (given, given)):
        config = settings.settle(agent_program.Config(model_path=run, **words))
        assert {name: getattr(config, name) for name in written} == expected
    # An environment that is not ours is played where the user names it, too.
    mine = f"{tmp_path}/mine.py:Mine"
    (tmp_path / "mine.py").write_text("from envs.gsm8k import GSM8K as Mine\n")
    run = str(run_folder(tmp_path / "other", env=mine, max_turns=2))
    assert settings.settle(agent_program.Config(model_path=run, env=mine)).max_turns == 2


@pytest.mark.parametrize("words, says", [
    (["--num_tasks", 3], "--num_tasks 3: of which environment? --env names one of equations, "), (["--dataset", "t.jsonl", "--env", "none"], "--dataset t.jsonl: of which"),
    (["--serve", "--num_tasks", 3, "--env", "equations"], "--serve answers what clients ask; leave out --num_tasks"),
    (["--serve", "--temperature", 0, "--seed", 3], "--serve answers what clients ask; leave out --temperature, --seed"),
    (["--output", "t.jsonl", "--env", "equations"], "say with --num_tasks how many"), (["--system_prompt", "hi", "--env", "equations"], "--env none is a plain chat")])
def test_a_flag_that_would_do_nothing_is_refused(words, says):
    done = run(ROOT / "agent.py", *words)
    assert done.returncode == 2 and says in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_a_plain_chat_in_a_pipe():
    done = run(ROOT / "agent.py", "--max_new_tokens", 4, stdin="hello\n\nagain")
    assert done.returncode == 0 and done.stdout.count("\n\nYou: ") == 4 and "\nYou: hello\nAssistant: " in done.stdout, done
    assert all(len(line) <= 80 for line in done.stdout.splitlines()) and done.stdout.startswith("loading tiny\n")


@pytest.mark.parametrize("own, words, says", [
    ({}, {}, "temperature 0.7"), ({"temperature": 0.6, "top_p": 0.9, "top_k": 20}, {}, "temperature 0.6, top_k 20, top_p 0.9"),
    ({"temperature": 0.6, "top_p": 0.9}, {"temperature": 1.0}, "temperature 1"), ({"top_p": 0.9}, {"temperature": 0.0}, "temperature 0"),
    ({"temperature": 0.6, "top_p": 0.9}, {"top_p": 0.5}, "temperature 0.6, top_p 0.5"), ({"top_k": 4}, {}, "temperature 0.7, top_k 4"),
    ({"temperature": 0.6, "top_p": 0.9}, {"env": "equations"}, "temperature 1"), ({"temperature": 0.6}, {"env": "equations", "temperature": 0.5}, "temperature 0.5")])
def test_a_plain_chat_samples_as_the_model_says_and_the_header_says_how(monkeypatch, capsys, own, words, says):
    """An environment is played at 1, as in a run. What the command line says counts more than the model's folder."""
    for name in ("temperature", "top_p", "top_k"):
        monkeypatch.setattr(MODEL.generation_config, name, own.get(name))
    used = []
    monkeypatch.setattr(agent, "make_engine", lambda *args, make=agent.make_engine, **options: used.append(options) or make(*args, **options))
    out = " ".join(plain(monkeypatch, capsys, "hello" if "env" not in words else "2x = 4", max_new_tokens=4, **words).split())
    header = "tiny plays train tasks at" if "env" in words else "A plain chat with tiny, without an environment, at"
    assert f"{header} {says}. " in out
    numbers = dict(re.findall(r"(temperature|top_k|top_p) ([\d.]+)", says))
    assert {name: used[0][name] for name in ("temperature", "top_k", "top_p")} == {"top_k": 0, "top_p": 1.0, **{name: float(n) for name, n in numbers.items()}}


def test_a_model_that_nothing_has_trained_says_so_in_one_line(monkeypatch, capsys, tmp_path):
    line = "note: tiny has random weights; python grpo.py trains it: --model_path runs/grpo"
    for words in ({}, {"env": "equations", "num_tasks": 1}):
        assert plain(monkeypatch, capsys, max_new_tokens=4, **words).splitlines().count(line) == 1
    assert line not in plain(monkeypatch, capsys, max_new_tokens=4, model_path=str(run_folder(tmp_path / "run", env="equations", tasks="null")))
    agent_program.talk.command(agent_program.Config(max_new_tokens=4))  # without the layer
    assert capsys.readouterr().out.splitlines() == [line, "plain chat, temperature 0.7; Ctrl-D ends"]


def test_the_header_names_the_file_of_the_tasks(monkeypatch, capsys, tmp_path):
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps({"equation": f"x + {n} = 12"}) + "\n" for n in range(1, 30)))
    monkeypatch.chdir(tmp_path)
    assert "tiny plays train tasks of tasks.jsonl at temperature 1.\n" in plain(monkeypatch, capsys, env="equations", dataset="tasks.jsonl")


# --------------------------------------------------------------------------------------- finished episodes are kept
def kept(out, said):
    """The episodes in a file, of which there must be as many as the message says."""
    (number, total), = re.findall(rf"(?:^|\r)(\d+) of (\d+) episodes were finished and are kept in {re.escape(str(out))}$", said, re.M)
    episodes = read_trajectories(str(out))
    assert len(episodes) == int(number) < int(total) and all(t.stop_reason for t in episodes)
    return episodes


@pytest.mark.slow
@pytest.mark.parametrize("signum, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_keeps_the_finished_episodes(tmp_path, signum, status):
    out = tmp_path / "traces.jsonl"
    out.write_text("hours of work\n")
    program = Program(ROOT / "agent.py", "--env", "equations", "--num_tasks", 3000, "--max_new_tokens", 8, "--output", out)
    until = time.monotonic() + 200
    while not ((tmp_path / "traces.jsonl.1").exists() and out.exists() and out.stat().st_size) and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(0.2)
    program.send_signal(signum)
    said, errors = program.communicate()
    assert program.returncode == status and errors.endswith(f"agent.py: stopped by {signal.Signals(signum).name}\n"), errors
    assert kept(out, said) and (tmp_path / "traces.jsonl.1").read_text() == "hours of work\n"
    assert sorted(os.listdir(tmp_path)) == ["traces.jsonl", "traces.jsonl.1"]


def status_of(monkeypatch, *words):
    """The exit status of agent.py, played in this process by the untaught model."""
    monkeypatch.setattr(agent_program.talk, "load_model", lambda *_, **__: (MODEL, TOKENIZER))
    monkeypatch.setattr(sys, "argv", ["agent.py", *map(str, words)])
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "reconfigure", lambda **_: None, raising=False)
    with pytest.raises(SystemExit) as status:
        main(agent_program.Config, agent_program.run, agent.__doc__)
    return status.value.code


def test_a_play_that_ends_early_keeps_the_rewards_that_were_asked_for(tmp_path, monkeypatch, capsys):
    """Not what the environment pays: the lines are paid before they are written."""
    out = tmp_path / "traces.jsonl"

    def interrupted(value):
        if out.exists() and len(out.read_text().splitlines()) == 2:
            raise OSError(28, "No space left on device")
        return to_json(value)
    monkeypatch.setattr(talk, "to_json", interrupted)
    (tmp_path / "mine.py").write_text("def seven(t):\n    return 7.0\n\n\ndef count(completions, **_):\n    return [0.5] * len(completions)\n")
    status_of(monkeypatch, "--env", "equations", "--num_tasks", 4, "--max_new_tokens", 8, "--output", out,
              "--rewards", f"environment=0,{tmp_path}/mine.py:seven,{tmp_path}/mine.py:count")
    episodes = read_trajectories(str(out))
    assert [(t.reward, t.rewards[-1], t.reward_parts["seven"]) for t in episodes] == [(7.5, 7.5, 7.0)] * 2


def test_a_full_disk_keeps_the_finished_episodes(tmp_path, monkeypatch, capsys):
    out, limits = tmp_path / "traces.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))  # of a file; the error is one of those of a full disk
    try:
        status = status_of(monkeypatch, "--env", "equations", "--num_tasks", 40, "--max_new_tokens", 8, "--output", out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = capsys.readouterr()
    assert status == 4 and re.search("^agent.py: the disk is full .*File too large", said.err, re.M) and "checkpoint" not in said.err, said
    whole, cut = out.read_bytes().rsplit(b"\n", 1)  # the line for which there was no place
    assert 0 < len(whole) + len(cut) < 20_000 and f"{len(whole.splitlines()) + 1} of 40 episodes were finished" in said.out


def test_a_broken_environment_keeps_the_finished_episodes(tmp_path, monkeypatch, capsys):
    (tmp_path / "breaks.py").write_text(
        "from envs.equations import Equations\nclass Breaks(Equations):\n    played = 0\n    def get_reward(self):\n        Breaks.played += 1\n"
        "        if Breaks.played > 70:\n            raise RuntimeError('the database is gone')\n        return self.reward\n")
    out = tmp_path / "traces.jsonl"
    assert status_of(monkeypatch, "--env", f"{tmp_path / 'breaks.py'}:Breaks", "--num_tasks", 200, "--max_new_tokens", 4, "--output", out) == 6
    said = capsys.readouterr()
    assert "the database is gone" in said.err
    assert len(read_trajectories(str(out))) == 70 and "200 of 200 episodes were finished" in said.out  # those that broke, too


def test_what_is_played_is_said_and_summed_up_within_80_columns(tmp_path):
    done = run(ROOT / "agent.py", "--env", "equations", "--num_tasks", 2, "--group_size", 2, "--max_new_tokens", 4)
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and "playing 4 episodes of equations (train): at most 1024 tokens each, 4 a turn" in lines, done
    assert "0.9 million weights, float32, on cpu" in lines and max(map(len, lines)) <= 80
    summary = dict(line.split() for line in lines[-lines[::-1].index(""):])
    assert summary["episodes"] == "4" and summary["turns"] == "1" and float(summary["sampled_tokens"]) <= 4


def test_the_summary_counts_the_episodes_of_a_benchmark_to_the_last(monkeypatch, capsys):
    """GSM8K's 1,319 test problems, eight episodes each, were 1.055e+04 episodes."""
    played = [Trajectory([5, 6], [0, 1], [0.0, -1.0], [0.0], group_id=str(i // 8), stop_reason="done", info={"success": i % 8 == 0}) for i in range(10_552)]
    monkeypatch.setattr(agent, "rollout", lambda *_, **__: played)
    talk.play_tasks(settings.settle(agent_program.Config(env="equations", group_size=8)), agent, MODEL, TOKENIZER, [])
    summary = dict(line.split() for line in capsys.readouterr().out.splitlines()[-24:] if len(line.split()) == 2)
    assert (summary["episodes"], summary["success"], summary["pass@8"]) == ("10552", "0.125", "1")


def test_who_asks_for_more_tasks_than_a_split_has_is_told(tmp_path, capsys):
    """A benchmark's file was played but for a tenth of its rows, and pass@k was of those."""
    file = tmp_path / "t.jsonl"
    file.write_text("".join(json.dumps({"equation": f"x + {i} = {i}"}) + "\n" for i in range(1, 31)))
    asked = dict(env="equations", num_tasks=30, max_new_tokens=4)
    agent_program.run(agent_program.Config(dataset=str(file), **asked))
    said = capsys.readouterr().out
    assert re.search(r"note: --num_tasks 30, but --split train has 2\d tasks\n      --split test --eval_dataset FILE plays a whole file\n", said)
    agent_program.run(agent_program.Config(dataset=str(file), eval_dataset=str(file), split="test", **asked | {"num_tasks": 31}))
    said = capsys.readouterr().out
    assert "note: --num_tasks 31, but --split test has 30 tasks\n" in said and "plays a whole" not in said and "playing 30 episodes" in said
