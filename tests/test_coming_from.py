"""What people typed elsewhere: each literal command works here, or one line names ours; docs/coming-from.md says what to type."""
import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest

import agent_program
import distill
import dpo
import grpo
import reward_weighted
import sft
from core.config import UserError
from extras.hints.command_line import parse
from test_readme import ROOT, check_command, parses_only  # noqa: F401  (a fixture)

PROGRAMS = {"grpo": grpo, "sft": sft, "dpo": dpo, "distill": distill, "agent": agent_program, "reward_weighted": reward_weighted}
PAGE = (ROOT / "docs" / "coming-from.md").read_text()
CELLS = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| there")]
ROWS = [cells for cells in CELLS if len(cells) == 2]  # the table of defaults has three columns
HERE = sorted({span for _, here in ROWS for span in re.findall(r"`((?:python|torchrun) [^`]+)`", here)})
# A command of TRL, verifiers, AReaL, mini-agentic-rl, retrain, verl or the course, its words typed at one of our programs: None where
# it is understood, or words that the one line holds.
TYPED = [
    # TRL: the examples in its README and at the top of its scripts.
    ("sft --model_name_or_path Qwen/Qwen2.5-0.5B --dataset_name trl-lib/Capybara --output_dir Qwen2.5-0.5B-SFT", ["--model_path?", "--dataset?"]),
    ("sft --learning_rate 2.0e-5 --num_train_epochs 1 --packing --per_device_train_batch_size 2 --gradient_accumulation_steps 8 --eos_token '<|im_end|>' "
     "--eval_strategy steps --eval_steps 100 --push_to_hub", ["--num_epochs?", "nothing has to be packed", "--batch_size x --gradient_accumulation_steps", "special tokens", "--eval_every", "lora.py push"]),
    ("sft --use_peft --lora_r 32 --lora_alpha 16", ["--lora_r?"]),
    ("sft --assistant_only_loss", ["only assistant turns"]), ("sft --max_length 2048", None), ("sft --max_seq_length 2048", ["--max_tokens?"]), ("sft --loss_type dft", ["cross-entropy"]),
    ("dpo --dataset_name trl-lib/ultrafeedback_binarized --learning_rate 5.0e-7 --max_steps 1000 --no_remove_unused_columns", ["--dataset?", "unused columns"]),
    ("dpo --loss_type sigmoid --beta 0.1", None), ("dpo --loss_type bco_pair", None), ("dpo --rpo_alpha 1.0", None), ("dpo --precompute_ref_log_probs", ["started from"]),
    ("grpo --report_to wandb", None), ("agent --report_to wandb", ["five training programs"]), ("grpo --use_vllm True", ["--sampler?"]), ("grpo --use_vllm --vllm_mode colocate", ["--sampler?"]),
    ("grpo --bf16", ["--dtype bfloat16"]), ("grpo --bf16 True", ["--dtype bfloat16"]), ("grpo --per_device_train_batch_size 8 --num_generations 8", ["--tasks_per_step x --group_size", "memory alone"]), ("grpo --loss_type bnpo", ["--loss bnpo: dapo is bnpo"]), ("grpo --lr 1e-5", ["--learning_rate?"]),
    ("grpo --reward_funcs accuracy_reward", ["--rewards?"]), ("grpo --reward_funcs accuracy_reward think_format_reward", ["a,b", "--rewards?"]), ("grpo --lora_target_modules q_proj v_proj", ["a,b"]),
    ("grpo --loss_type dapo", None), ("grpo --loss_type dr_grpo --scale_rewards none", None), ("grpo --epsilon 0.2 --epsilon_high 0.28 --beta 0.04", ["--clip_eps_low?", "--clip_eps_high?", "--kl_coef?"]),
    ("grpo --max_prompt_length 512 --max_completion_length 1024", ["--max_tokens?"]), ("grpo --num_iterations 2", ["--updates_per_step?"]),
    ("grpo --steps_per_generation 4 --generation_batch_size 64", ["--tasks_per_step x --group_size"]), ("grpo --mask_truncated_completions True", ["--filter truncated?"]),
    ("distill --teacher_model_name_or_path Qwen/Qwen2.5-7B-Instruct --lmbda 1.0 --seq_kd", ["--teacher?", "own episodes alone"]),
    ("grpo --top_entropy_quantile 0.2", ["not built"]), ("grpo --log_completions --logging_steps 1", ["every step is logged"]), ("grpo --importance_sampling_level sequence", ["--loss gspo"]),
    ("grpo --vllm_importance_sampling_cap 2", ["--importance_correction?"]), ("grpo --temperature 0.7 --top_p 0.95", ["agent.py has --top_p"]), ("grpo --activation_offloading", ["--memory small"]),
    # verifiers and prime-rl
    ("grpo --rollouts_per_example 8 --max_steps 100", ["--group_size?"]), ("grpo --env_args '{}'", ["verifiers:NAME"]), ("agent --num_examples 20", ["--num_tasks?"]), ("grpo @ rl.toml", ["unexpected argument @"]),
    # AReaL and verl
    ("grpo scheduler.type=local", ["--name value"]), ("grpo gconfig.max_new_tokens=2048", ["--max_new_tokens 2048"]), ("grpo actor.learning_rate=1e-5", ["--learning_rate 1e-5"]),
    ("grpo --workflow my_agent.MathAgent", ["--env path/to/file.py:Class", "agent of rollout"]), ("grpo --turn_discount 0.9", ["--credit return"]), ("grpo --group_reward_norm", ["--scale_rewards?"]),
    ("grpo --success_rate_lb 0.05 --success_rate_ub 0.95 --reward_scaling 10 --reward_bias 0.5", None), ("grpo algorithm.adv_estimator=grpo", ["--name value"]), ("grpo --adv_estimator grpo", ["--credit?"]),
    # mini-agentic-rl
    ("sft --model_path Qwen/Qwen2.5-0.5B --num_epochs 2 --output_dir ./outputs/Qwen2.5-0.5B/sft", None), ("grpo --max_samples 5 --samples_per_prompt 2 --max_new_tokens 128 --total_epochs 1", None),
    ("grpo --max_train_samples 512 --max_eval_samples 128", ["--max_samples?", "--eval_tasks?"]), ("agent --model_path outputs/best --split test --max_samples 200", ["--num_tasks?"]),
    ("grpo --use_lora --require_tool_call --save_each_epoch", ["--lora_r?", "tool_used", "--save_every"]), ("grpo --train_split train --eval_split test", ["held-out"]), ("grpo --device mps", None), ("grpo --use_cpu", ["--device"]),
    # retrain
    ("grpo mini.toml --seed 42 --max-steps 40 --wandb-project my-project", ["YAML", "--config mini.toml"]), ("grpo --wandb-project my-project", ["--report_to"]),
    ("grpo --advantage_mode grpo --transform_mode none", ["--credit?", "--loss and --credit"]), ("grpo --adapter_path adapters/mini --log_dir logs/mini", ["--output_dir"]), ("grpo --backend local", ["--sampler"]),
    # Agents of discrete actions, and the course
    ("reward_weighted --epochs 3 --batch_size 1 --learning_rate 1e-4 --max_length 512", ["--num_epochs?"]), ("agent --problem 'Solve for x: 3x + 7 = 16'", ["POST /solve"]),
    ("sft --overfitting_threshold 0.01", ["--max_steps"]), ("sft --csv meetings.csv", ["--dataset?"]), ("agent --num_traces 100", ["--num_tasks?"])]


def answer(program, words):
    """Return the line that refuses these words, or None."""
    try:
        parse(PROGRAMS[program].Config, words)
    except UserError as error:
        return str(error)


@pytest.mark.parametrize("line, says", TYPED, ids=[line[:70] for line, _ in TYPED])
def test_a_command_of_another_project_works_or_is_answered_by_what_ours_is_called(line, says):
    program, *words = shlex.split(line)
    refused = answer(program, words)
    if says is None:
        assert refused is None
    else:
        assert refused and "\n" not in refused and [part for part in says if part not in refused] == []
        assert "--help lists them" not in refused


@pytest.mark.parametrize("name, env", [("gsm8k", "gsm8k"), ("openai/gsm8k", "gsm8k"), ("meetings", "meetings")])
def test_a_data_set_that_is_an_environment_names_it(name, env):
    """Before the model is loaded: --dataset gsm8k stands in commands of mini-agentic-rl."""
    from extras.data.tables import refuse
    with pytest.raises(UserError, match=f"--env {env} plays the tasks of that name"):
        refuse(name)


@pytest.mark.parametrize("command", HERE)
def test_what_the_page_says_to_type_here_is_understood(command, parses_only, monkeypatch):  # noqa: F811
    check_command(shlex.split(command), parses_only, monkeypatch)


@pytest.mark.parametrize("there", [there for there, _ in ROWS if "--" in there])
def test_flags_that_the_page_quotes_from_there_are_answered(there):
    program = next((name for name in ("sft", "dpo") if re.search(f"(trl |train_){name}", there)), "agent" if re.search("eval|interactive|Server", there) else "grpo")
    words = [word for word in shlex.split(there.replace("`", " ").replace(",", " ")) if word.startswith("--")]
    for word in words:
        refused = answer(program, [f"{word}=1"]) or ""
        assert "--help lists them" not in refused, refused


def test_the_page_has_a_table_for_each_project():
    assert len(ROWS) > 45 and len(HERE) > 35 and len(TYPED) > 60
    for name in ("TRL", "verifiers", "AReaL", "mini-agentic-rl", "retrain", "discrete actions", "course"):
        assert re.search(f"^## .*{name}", PAGE, re.M)


def test_the_defaults_that_differ_are_those_of_both():
    """TRL's are read in its source: to import it takes ten seconds."""
    spec = find_spec("trl")
    if not spec:
        pytest.skip("needs trl")
    source = (Path(spec.origin).parent / "trainer" / "grpo_config.py").read_text()

    def theirs(name):
        return re.search(rf"^    {name}: .*? = field\(\n        default=(.+?),$", source, re.M)[1].strip('"')
    ours, table = grpo.settle(grpo.Config(model_path="path/to/model")), {cells[0]: cells[1:] for cells in CELLS if len(cells) == 3}
    assert table["loss"][0] == f"`{theirs('loss_type')}`" and table["loss"][1].startswith(f"`{ours.loss}`")
    assert table["weights, peak learning rate"] == [f"all, {theirs('learning_rate')}", "LoRA of rank 16, 2e-4; with `--lora_r 0` 1e-6"]
    assert (ours.lora_r, ours.learning_rate, grpo.settle(grpo.Config(model_path="path/to/model", lora_r=0)).learning_rate) == (16, 2e-4, 1e-6)
    assert theirs("vllm_importance_sampling_mode") == "sequence_mask" and theirs("max_tool_calling_iterations") == "None"
    assert f"above {theirs('vllm_importance_sampling_clip_max')} " in table["correction of the sampler"][0]
