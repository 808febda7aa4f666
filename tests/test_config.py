"""core/config.py and command_line.py: what the flags accept and refuse, and how a config gets its values."""
import dataclasses
import json
import re
import subprocess
import sys

import pytest
import yaml
from config_helpers import Config
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import core.config
import distill
import dpo
import grpo
import reward_weighted
import sft
from layers import LayerFlags
from core.config import (ModelFlags, RunFlags, TrainingFlags, UserError, auto, fill, flag, options)
from envs.tasks import RolloutFlags
from layers import Run
import agent_program
from extras.hints.command_line import parse
from extras.hints.refusals import NOT_HERE, SYNONYMS
from extras.memory import MemoryFlags


def refusal(*argv):
    with pytest.raises(UserError) as caught:
        parse(Config, argv)
    return str(caught.value)


# -- flags -------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("line, name, value", [
    ("--learning_rate 1e-4", "learning_rate", 1e-4), ("--learning_rate=.5", "learning_rate", 0.5),
    ("--learning_rate 3", "learning_rate", 3.0), ("--samples_per_prompt 4", "group_size", 4),
    ("--samples_per_prompt=4", "group_size", 4), ("--load_in_4bit", "load_in_4bit", True),
    ("--load_in_4bit false", "load_in_4bit", False), ("--load_in_4bit=True", "load_in_4bit", True),
    ("--no_shuffle", "shuffle", False), ("--shuffle --seed 1", "shuffle", True),
    ("--max_steps 3", "max_steps", 3), ("--max_steps none", "max_steps", None), ("--reference none", "reference", None),
    ("--model_path none", "model_path", "none"), ("--model_path=--odd", "model_path", "--odd"),
    ("--model_path a=b", "model_path", "a=b"), ("--offset -1e-4", "offset", -1e-4), ("--offset=-.5", "offset", -0.5), ("--resume", "resume", True),
    ("--resume --seed 1", "resume", True),
    ("--seed 1 --seed 2", "seed", 2),
])
def test_accepts(line, name, value):
    got = getattr(parse(Config, line.split(" ")), name)
    assert got == value and type(got) is type(value)


@pytest.mark.parametrize("line, message", [
    ("--lerning_rate 1", "unknown option --lerning_rate; did you mean --learning_rate?"),
    ("--learning 1", "unknown option --learning; did you mean --learning_rate?"),          # no abbreviations
    ("--zzzz 1", "unknown option --zzzz; --help lists them"),
    ("--no_seed", "unknown option --no_seed; did you mean --seed?"),
    ("--learning_rate 1e-4x", "--learning_rate 1e-4x: not a number"),
    ("--learning_rate nan", "--learning_rate nan: not a number"),
    ("--learning_rate inf", "--learning_rate inf: not a number"),
    ("--learning_rate 1e999", "--learning_rate 1e999: must be at most 3.4e+38"),
    ("--learning_rate 1e39", "--learning_rate 1e39: must be at most 3.4e+38"),
    (f"--batch_size 1{'0' * 400}", f"--batch_size 1{'0' * 79}: must be at most 2147483647"),
    ("--batch_size 2147483648", "--batch_size 2147483648: must be at most 2147483647"),
    ("--learning_rate 1_0", "--learning_rate 1_0: not a number"),
    ("--learning_rate 0", "--learning_rate 0: must be greater than 0"),
    ("--learning_rate -1", "--learning_rate -1: must be greater than 0"),
    ("--lora_dropout 1.5", "--lora_dropout 1.5: must be at most 1"),
    ("--batch_size 0", "--batch_size 0: must be at least 1"),
    ("--batch_size 1.0", "--batch_size 1.0: not a whole number"),
    ("--batch_size ４", "--batch_size ４: not a whole number"),
    ("--batch_size true", "--batch_size true: not a whole number"),
    ("--batch_size=", "--batch_size '': not a whole number"),
    ("--samples_per_prompt 1", "--group_size 1: must be at least 2"),
    ("--load_in_4bit=yes", "--load_in_4bit yes: not true or false"),
    ("--load_in_4bit yes", "--load_in_4bit yes: not true or false"), ("--resume x", "--resume x: not true or false"),
    ("--loss gpro", "--loss gpro: must be one of grpo, dapo, gspo"),
    ("--seed", "--seed: needs a value"), ("--seed --shuffle", "--seed: needs a value"),
    ("--seed none", "--seed none: not a whole number"),
    ("--reference=", "--reference '': is empty; give a value, or leave it out"),  # of an unset variable: not as if it were left out
    ("train.csv", "unexpected argument train.csv; options are written --name value"),
    ("-s 1", "unexpected argument -s; options are written --name value"),
    ("--", "unexpected argument --; options are written --name value"),
    ("--config", "--config: needs a value"),
])
def test_refuses(line, message):
    assert refusal(*line.split(" ")) == message


@pytest.mark.parametrize("module", [grpo, sft, reward_weighted, dpo, distill, agent_program])
def test_a_choice_is_what_was_chosen(module):
    """Also where it is called none: --scale_rewards none was read as if nothing had been said, and so was agent.py --env none."""
    chosen = [(name, choice) for name, option in options(module.Config).items() for choice in option.choices]
    if module is agent_program:
        chosen.append(("env", "none"))
    assert module is not grpo or ("scale_rewards", "none") in chosen
    for name, choice in chosen:
        assert getattr(parse(module.Config, [f"--{name}", choice]), name) == choice
    if module is grpo:  # nor is it the default that the loss, the model or --sampler chooses
        with pytest.raises(UserError, match="--importance_correction none: not a number"):
            parse(grpo.Config, ["--importance_correction", "none"])


def test_a_fork_may_have_an_empty_default(tmp_path):
    @dataclasses.dataclass
    class Fork(Config):
        note: str = flag("", "a remark")
    run = Run(Fork(output_dir=str(tmp_path / "run")), "fork")
    run.begin()
    assert parse(Fork, ["--config", str(run.folder / "config.yaml"), "--note="]).note == ""


def test_the_home_folder_of_a_yaml_file_is_no_folder_of_that_name(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    (tmp_path / "a.yaml").write_text("output_dir: ~/runs/a\nmodel_path: ~/model\ntrajectories: ~\n")
    config = parse(sft.Config, ["--config", str(tmp_path / "a.yaml")])
    assert (config.output_dir, config.model_path, config.trajectories) == ("/home/me/runs/a", "/home/me/model", None)
    assert parse(sft.Config, ["--output_dir=~/b"]).output_dir == "/home/me/b"


def test_long_values_are_not_repeated_in_full():
    assert len(refusal("--seed", "9" * 6000)) < 120


# -- YAML --------------------------------------------------------------------------------------------------------------

def test_defaults_then_yaml_then_command_line(tmp_path):
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text("learning_rate: 1e-4\nsamples_per_prompt: 6\nseed: 5\nmodel_path: no\nmax_steps: null\n")
    second.write_text("seed: 7\nload_in_4bit: true\n")
    config = parse(Config, ["--group_size", "3", "--config", str(first), f"--config={second}"])
    assert config == Config(learning_rate=1e-4, group_size=3, seed=7, model_path="no", load_in_4bit=True)
    first.write_text("# nothing yet\n")
    assert parse(Config, ["--config", str(first)]) == Config()


@pytest.mark.parametrize("text, message", [
    ("seed: 1\nlerning_rate: 1\n", ":2: unknown option lerning_rate; did you mean learning_rate?"),
    ("seed: 1\nseed: 2\n", ":2: seed is given twice"),
    ("group_size: 4\n\nsamples_per_prompt: 4\n", ":3: samples_per_prompt is given twice"),
    ("seed:\n", ":1: seed null: not a whole number"), ("batch_size: 0", ":1: batch_size 0: must be at least 1"),
    ("batch_size: 2.5", ":1: batch_size 2.5: not a whole number"), ("seed: true", ":1: seed true: not a whole number"),
    ("learning_rate: .nan", ":1: learning_rate .nan: not a number"),
    (f"batch_size: 1{'0' * 400}", f":1: batch_size 1{'0' * 79}: must be at most 2147483647"),
    ("seed: [1]", ":1: give lines `name: value`, nothing nested"),
    ("load_in_4bit: 1", ":1: load_in_4bit 1: not true or false"),
    ("loss: x", ":1: loss x: must be one of grpo, dapo, gspo"),
    ("model_path: [a]", ":1: give lines `name: value`, nothing nested"),
    ("seed:\n  a: 1\n", ":2: give lines `name: value`, nothing nested"),
    ("model_path: [[a]]", ":1: give lines `name: value`, nothing nested"),
    ("- seed\n", ":1: give lines `name: value`"), ("just text", ":1: give lines `name: value`"),
    ("seed: 1\n\tx: 2", ":2: cannot be read as YAML: found character '\\t' that cannot start any token"),
    ("a: *x", ":1: cannot be read as YAML: found undefined alias 'x'"),
    ("seed: 1\n---\nseed: 2", ":2: cannot be read as YAML: but found another document"),
    ("seed: 1\noverwrite: true", ":2: overwrite is given on the command line only: --overwrite"),
    ("resume: newest", ":1: resume is given on the command line only: --resume"),
])
def test_yaml_refuses(tmp_path, text, message):
    path = tmp_path / "x.yaml"
    path.write_text(text)
    assert refusal("--config", str(path)) == str(path) + message


def test_a_list_of_files_in_yaml_is_files_and_paths_in_python_are_text(tmp_path):
    (tmp_path / "c.yaml").write_text("dataset:\n- a.jsonl\n- hub:x/y\n- b.parquet\n")
    assert parse(grpo.Config, ["--config", str(tmp_path / "c.yaml")], "").dataset == "a.jsonl,hub:x/y,b.parquet"
    (tmp_path / "c.yaml").write_text("dataset: [Say one., Say two.]\n")
    assert parse(grpo.Config, ["--config", str(tmp_path / "c.yaml")], "").dataset == '["Say one.", "Say two."]'
    config = grpo.Config(model_path=tmp_path, dataset=tmp_path / "a.jsonl", output_dir=tmp_path / "o")
    assert [config.model_path, config.dataset, config.output_dir] == [str(tmp_path), str(tmp_path / "a.jsonl"), str(tmp_path / "o")]


def test_yaml_that_is_no_yaml(tmp_path):
    (tmp_path / "y.yaml").write_bytes(b"seed: \xff\xfe\n")
    assert "y.yaml: byte 0xff is not UTF-8; save the file as UTF-8" in refusal("--config", str(tmp_path / "y.yaml"))
    (tmp_path / "y.yaml").write_text("a: " + "[" * 20000)
    assert "RecursionError" in refusal("--config", str(tmp_path / "y.yaml"))
    assert refusal("--config", f"{tmp_path}/x.yaml") == f"{tmp_path}/x.yaml: No such file or directory"
    assert refusal("--config", f"{tmp_path}/no/x.yaml") == f"{tmp_path}/no/x.yaml: No such file or directory"
    assert "Is a directory" in refusal("--config", str(tmp_path))
    assert "embedded null byte" in refusal("--config", "a\0b")


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(str.strip)


@example(Config(model_path="\x85.", reference="\u2028\ud800\n~"))
@example(Config(model_path="模型 # x: y", reference=" '' ", learning_rate=1e-5))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.builds(Config, model_path=TEXT, reference=st.none() | TEXT,
                 learning_rate=st.floats(1e-300, 1e38) | st.integers(1, 9), lora_dropout=st.floats(0, 1),
                 group_size=st.integers(2, 10**9), max_steps=st.none() | st.integers(1, 10**9), load_in_4bit=st.booleans(),
                 loss=st.sampled_from(["grpo", "dapo", "gspo"]), seed=st.integers(0, 2**31 - 1)))
def test_config_yaml_round_trips(tmp_path_factory, config):
    config.output_dir = str(tmp_path_factory.mktemp("run"))
    Run(config, "grpo").begin()
    assert parse(Config, ["--config", config.output_dir + "/config.yaml"]) == config




# -- shared flags ------------------------------------------------------------------------------------------------------

def rate(config):
    """2e-5 with LoRA, 1e-6 without"""
    return 2e-5 if config.lora_r else 1e-6


@dataclasses.dataclass(kw_only=True)
class Toy(ModelFlags, LayerFlags, RolloutFlags, TrainingFlags, RunFlags):
    heading = "toy"
    loss: str = flag("toy", "the objective")
    lora_r: int = 0
    learning_rate: float | None = auto(rate)
    max_grad_norm: float | None = 0.5


def test_a_redeclared_flag_keeps_what_is_not_stated_again():
    flags = options(Toy)
    assert (flags["lora_r"].default, flags["lora_r"].low, flags["lora_r"].group) == (0, 0, "model") and "LoRA" in flags["lora_r"].help
    assert flags["learning_rate"].auto and flags["learning_rate"].low == 0 and not flags["max_grad_norm"].auto
    assert list(flags)[:2] == ["loss", "model_path"] and flags["loss"].group == "toy"


def test_fill_takes_the_user_then_the_tables_then_the_stated_default():
    config = fill(Toy(max_tokens=7), {"learning_rate": 1.0, "max_tokens": 8}, {"learning_rate": 2.0, "max_new_tokens": 3})
    assert (config.max_tokens, config.learning_rate, config.max_new_tokens) == (7, 1.0, 3)
    assert (config.save_every, config.max_grad_norm, config.dtype) == (0, 0.5, "float32")
    assert fill(Toy()).learning_rate == 1e-6 and fill(Toy(lora_r=4)).learning_rate == 2e-5
    assert fill(Toy(lora_r=4)).dtype in ("float32", "bfloat16")


def test_a_real_model_gets_forward_passes_of_eight_sequences(tmp_path):
    """Memory is what it lacks, and the update stays as large as the tiny model's, except for grpo, whose step decides."""
    for module, pair, update in ((sft, 1, 32), (reward_weighted, 1, 32), (dpo, 2, 8), (grpo, 1, None), (distill, 1, None)):
        real, tiny = (module.settle(module.Config(model_path=path, **{"teacher": "t"} if module is distill else {})) for path in (str(tmp_path), "tiny"))
        assert pair * real.batch_size == 8 < pair * tiny.batch_size
        for config in (real, tiny):
            assert update is None or config.batch_size * config.gradient_accumulation_steps == update


def test_help_lists_flags_by_parent_with_the_defaults_that_are_in_force(capsys):
    with pytest.raises(SystemExit) as ended:
        parse(Toy, ["--help"], "Toy learns 100 % nothing.\n\nMore.")
    out = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 0 and "Toy learns 100 % nothing." in out and "More." not in out
    headings = ["toy:", "model:", "memory:", "environment and rollout:", "training:", "run:"]
    assert [out.index(f" {name} --") for name in headings] == sorted(out.index(f" {name} --") for name in headings)
    assert "--learning_rate X AdamW step size at its peak; default: 2e-5 with LoRA, 1e-6 without" in out
    assert "--group_size N episodes of each task; same as --samples_per_prompt, --num_samples, --num_generations; default: 8" in out


@pytest.mark.parametrize("module", [sft, grpo, dpo, distill, reward_weighted])
@pytest.mark.parametrize("name", ["max_new_tokens", "max_tokens"])
def test_help_says_that_the_environments_lengths_come_first(module, name):
    assert getattr(module.settle(module.Config(env="code")), name) != options(module.Config)[name].default
    assert "unless the environment states it" in options(module.Config)[name].help


@pytest.mark.parametrize("line, hint", [
    ("--lr 1", "--learning_rate"), ("--micro_batch_size 1", "--batch_size"), ("--use_bias_correction_kl", "--kl_estimator k3_ratio"), ("--lora_rank 8", "--lora_r"),
    ("--kl_beta 1", "--kl_coef"), ("--kl 1", "--kl_coef"), ("--beta 1", "--kl_coef"), ("--model_name_or_path x", "--model_path"),
    ("--max_completion_length 9", "--max_tokens"), ("--response_length 9", "--max_new_tokens"), ("--max_prompt_length 9", "--max_tokens"), ("--epsilon 1", "--clip_eps_low"),
    ("--num_train_epochs 2", "--num_epochs"), ("--bf16", "--dtype bfloat16"), ("--num-iterations 2", "--updates_per_step"),
    ("--torch_dtype x", "--dtype"), ("--target_modules x", "--lora_target_modules"), ("--save_steps 1", "--save_every"),
    ("--rollout_batch_size 8", "--tasks_per_step"), ("--adv_estimator rloo", "--credit"),
    ("--mask_truncated_completions true", "--filter truncated"), ("--off_policy_mask_threshold 0.5", "--loss deepseek"),
    ("--multi_objective_aggregation normalize_then_sum", "--credit gdpo"), ("--vllm_importance_sampling_mode x", "--importance_mode"),
    ("--dynamic_sampling", "--success_rate_lb 0.01 --success_rate_ub 0.99")])
def test_names_of_other_libraries_are_known(line, hint):
    with pytest.raises(UserError, match=f"unknown option .*; did you mean {re.escape(hint)}[?]"):
        parse(grpo.Config, line.split())
    assert parse(Toy, ["--num_generations", "4"]).group_size == 4


@pytest.mark.parametrize("name", ["delta", "steps_per_generation", "top_entropy_quantile", "anything_else"])
def test_what_is_not_here_is_not_called_by_another_name(name):
    with pytest.raises(UserError, match=f"unknown option --{name}; ") as caught:
        parse(grpo.Config, [f"--{name}", "1"])
    assert "did you mean" not in str(caught.value) and ("--help lists them" in str(caught.value)) == (name == "anything_else")


@pytest.mark.parametrize("module", [sft, grpo, dpo, distill, reward_weighted, agent_program])
@pytest.mark.parametrize("name, words", [
    ("wandb", "--report_to tensorboard,wandb,trackio"), ("logging_steps", "every step"), ("lr_scheduler_type", "tenth of the steps"), ("warmup_ratio", "tenth of the steps"),
    ("use_cpu", "--device cuda, mps or cpu"), ("deepspeed", "torchrun"), ("push_to_hub", "lora.py push"), ("packing", "similar length"),
    ("optim", "AdamW"), ("save_total_limit", "the last two"), ("trust_remote_code", "never run"), ("ref_model", "started from")])
def test_a_flag_of_what_is_not_here_is_answered_with_a_sentence(module, name, words):
    for argv in ([f"--{name}", "x"], [f"--{name}=x"], [f"--{name.replace('_', '-')}"]):
        with pytest.raises(UserError, match=f"^unknown option --{name}; .*{words}"):
            parse(module.Config, argv)


def test_the_agent_names_the_programs_that_report():
    with pytest.raises(UserError, match="^unknown option --report_to; .*the five training programs have --report_to"):
        parse(agent_program.Config, ["--report_to", "wandb"])


@pytest.mark.parametrize("name", ["top_p", "top_k", "system_prompt", "serve"])
def test_a_flag_of_the_agent_is_no_missing_layer_of_a_training_program(name):
    with pytest.raises(UserError, match=f"^unknown option --{name}; .*agent.py"):
        parse(grpo.Config, [f"--{name}", "1"])


def test_all_unknown_flags_are_answered_at_once(tmp_path):
    line = "--wandb true --lr 3 --seed 1 --warmup_ratio=.1 --zzzz --learning-rat 1 --lr_scheduler_type cosine --bf16 --lr 4"
    says = refusal(*line.split())
    assert re.fullmatch(r"unknown options: --wandb \(a run [^()]*\); --lr, --learning_rat \(did you mean --learning_rate\?\); --warmup_ratio, --lr_scheduler_type "
                        r"\(the rate [^()]*\); --zzzz, --bf16 \(--help lists them\)", says), says
    # A word that is neither an option nor the value of one is told first.
    assert refusal("--lr", "3", "x", "--zzzz") == "unexpected argument x; several values are written a,b; --lr: did you mean --learning_rate?"
    path = tmp_path / "theirs.yaml"
    path.write_text("seed: 1\nlr: 3\npush_to_hub: true\n")
    assert re.fullmatch(rf"{path}:2: unknown options: lr \(did you mean learning_rate\?\); push_to_hub \(.*lora.py push.*\)", refusal("--config", str(path)))


def test_what_is_not_here_is_none_of_our_flags():
    ours = set().union(*(options(module.Config) for module in (grpo, dpo, distill, sft, reward_weighted)))
    words = {word.partition("=")[0] for meant, synonyms in SYNONYMS.items() if meant != "extras/serve" for word in synonyms}
    # agent.py has no such flag, and answers it.
    assert NOT_HERE.keys() & (ours | words) == {"report_to", "filter", "draw", "echo_coef", "sampler"} and len(NOT_HERE) > 150
    # They stand in brackets where several flags are unknown.
    assert all(sentence and not set("()") & set(sentence) for sentence in NOT_HERE.values())


def test_a_file_without_a_class_is_answered_with_its_classes(tmp_path, monkeypatch):
    """Nothing of the file runs: a config file does not choose code."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("1 / 0\nfrom there import Theirs\nclass Helper:\n    x = 1\nclass Guess:\n    def reset(self): ...\n"
                                      "class Later:\n    async def reset(self): ...\nclass Harder(Guess): pass\n")
    (tmp_path / "e.yaml").write_text("env: mine.py\n")
    listed = "name a class of the file: mine.py:Guess or mine.py:Later or mine.py:Harder"
    for argv, env in (["--env", "mine.py"], "mine.py"), (["--env=equations, mine.py"], "mine.py"), (["--env", "mine.py:Gues"], "mine.py:Gues"), (["--config", "e.yaml"], "mine.py"):
        with pytest.raises(UserError, match=f"^--env {env}: {listed}$"):
            parse(grpo.Config, argv)
    for env in ("mine.py:Harder", "mine.py:Theirs", "nowhere.py"):
        assert parse(grpo.Config, ["--env", env]).env == env
    (tmp_path / "mine.py").write_text("class A(:\n")
    with pytest.raises(UserError, match="^mine.py:1: cannot be read"):
        parse(grpo.Config, ["--env", "mine.py"])
    (tmp_path / "mine.py").write_text("x = 1\n")
    with pytest.raises(UserError, match="there is none with reset"):
        parse(grpo.Config, ["--env", "mine.py"])


def test_every_synonym_stands_once_and_means_a_flag():
    known = set().union(*(options(module.Config) for module in (grpo, dpo, distill, sft, reward_weighted)), options(Toy))
    words = [word for synonyms in SYNONYMS.values() for word in synonyms]
    assert len(words) == len(set(words)) > 60
    assert {meant.split()[0] for meant in SYNONYMS if not meant.startswith("extras/")} <= known


def test_the_flags_of_a_layer_that_is_not_here_name_it(tmp_path):
    """And a run that was made where it is may be continued, as long as it did not use it."""
    @dataclasses.dataclass(kw_only=True)
    class Bare(ModelFlags, core.config.LayerFlags, TrainingFlags, RunFlags):
        pass
    for words, says in (("--memory 4bit", "--memory"), ("--load_in_4bit", "--load_in_4bit"), ("--gradient-checkpointing", "--gradient_checkpointing")):
        with pytest.raises(UserError, match=f"^{says} needs extras/memory, which is not here$"):
            parse(Bare, words.split())
    path = tmp_path / "config.yaml"
    used, unused = MemoryFlags(memory="4bit"), MemoryFlags()
    for given, line in ((used, 2), (dataclasses.replace(unused, load_in_4bit=True), 3)):
        path.write_text("seed: 1\n" + yaml.safe_dump(vars(given), sort_keys=False))
        with pytest.raises(UserError, match=f"config.yaml:{line}: .* needs extras/memory, which is not here$"):
            parse(Bare, ["--config", str(path)])
    path.write_text("seed: 1\n" + yaml.safe_dump(vars(unused), sort_keys=False))
    assert parse(Bare, ["--config", str(path)]).seed == 1
    lines = {word.partition("=")[0]: word.partition("=")[2] for word in SYNONYMS["extras/memory"]}
    assert lines == {name: str(value).lower() for name, value in vars(unused).items()}


def test_a_layer_that_is_asked_for_and_not_here_is_one_line(monkeypatch, capsys):
    def train(_):
        from extras.nowhere.at_all import name  # noqa: F401
    monkeypatch.setattr(sys, "argv", ["grpo.py"])
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "reconfigure", lambda **_: None, raising=False)
    with pytest.raises(SystemExit) as ended:
        core.config.main(Config, train, "")
    assert ended.value.code == 2 and capsys.readouterr().err == "grpo.py: what was asked for needs extras/nowhere, which is not here\n"


def test_config_waits_for_no_large_library():
    code = "import sys, json; from core.config import parse; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert not {"torch", "yaml", "numpy", "transformers", "safetensors"} & set(json.loads(done.stdout))


@pytest.mark.parametrize("module", [sft, grpo, dpo, distill, reward_weighted])
def test_a_config_file_names_no_code_unless_the_command_line_repeats_it(tmp_path, module):
    path = tmp_path / "config.yaml"
    for name in (f"{tmp_path}/theirs.py:Evil", "os.path:join", "equations,theirs.py:Evil"):
        path.write_text(f"env: {name}\n")
        with pytest.raises(UserError, match=re.escape(f"--env {name}: a config file does not choose which code runs; if you trust it, add --env {name}")):
            parse(module.Config, ["--config", str(path)])
        assert parse(module.Config, ["--config", str(path), "--env", name]).env == name
        assert parse(module.Config, ["--env", "gsm8k", "--config", str(path)]).env == "gsm8k"
    path.write_text("env: equations,gsm8k\n")
    assert parse(module.Config, ["--config", str(path)]).env == "equations,gsm8k"


def test_agent_takes_the_home_folder_as_training_does(monkeypatch, tmp_path):
    """A shell leaves the ~ of --model_path=~/run to the program."""
    import talk
    monkeypatch.setenv("HOME", str(tmp_path))
    assert talk.Config(model_path="~/run").model_path == grpo.Config(output_dir="~/run").output_dir == f"{tmp_path}/run"


def test_a_file_of_an_environment_may_begin_with_a_byte_order_mark(tmp_path):
    """Editors of Windows write one, and Python reads it."""
    command_line = pytest.importorskip("extras.hints.command_line")
    (tmp_path / "mine.py").write_text("class Mine:\n    def reset(self): pass\n", encoding="utf-8-sig")
    command_line._check_file(f"{tmp_path}/mine.py:Mine")
    with pytest.raises(UserError, match="name a class of the file: .*mine.py:Mine"):
        command_line._check_file(f"{tmp_path}/mine.py:Other")
