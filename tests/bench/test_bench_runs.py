"""Every script of bench/ starts, at toy size, and ends with the JSON that it should write.

vs_trl.py, gpu.py, sampler.py, learn_vs_trl.py, tricks.py, staleness.py, reward_hacking.py, comparison.py and meetings.py are
started by the files that are named after them. `test_every_script_is_started` knows all of them.
"""
import json
import os
import re
import shutil
import sys
from pathlib import Path

import programs
import pytest

from agent import Trajectory

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
ELSEWHERE = {
    "cards": "tests/bench/test_bench_gpu.py", "launches": "tests/extras/launches/test_few_launches.py", "peers": "tests/bench/test_bench_gpu.py",
    "comparison": "tests/bench/test_comparison.py", "gpu": "tests/bench/test_bench_gpu.py", "gpu_parts": "tests/bench/test_bench_gpu.py",
    "defaults": "tests/bench/test_bench_learning.py", "judge": "tests/bench/test_bench_learning.py", "learn_vs_trl": "tests/bench/test_bench_learning.py", "meetings": "tests/envs/test_meetings.py", "pages": "tests/bench/test_pages.py",
    "reward_hacking": "tests/bench/test_bench_learning.py", "sampler": "tests/bench/test_bench_gpu.py",
    "notebook": "tests/test_tutorial.py", "staleness": "tests/bench/test_bench_learning.py", "tricks": "tests/bench/test_bench_learning.py",
    "tutorial": "tests/test_tutorial.py",
    "vs_trl": "tests/bench/test_bench_vs_trl.py"}
LIBRARIES = {"blocks", "budget", "clues", "completions", "easy_code", "games", "gpu_norms", "learning", "pictures", "toys"}
SHORT = "--tasks_per_step 2 --group_size 2 --eval_tasks 2 --max_samples 8 --max_new_tokens 8 --max_turns 2".split()


@pytest.fixture
def results(tmp_path):
    (tmp_path / "results").mkdir()
    return tmp_path / "results"


@pytest.fixture
def problems(tmp_path):
    """A folder with rows of GSM8K's form."""
    folder = tmp_path / "gsm8k"
    folder.mkdir()
    for split in ("train", "test"):
        rows = [{"question": f"{split}: what is {i} and 2?", "answer": f"{i} + 2 = <<{i}+2={i + 2}>>{i + 2}.\n#### {i + 2}"} for i in range(24)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def start(script, *words, results, status=0, **constants):
    """Run a script to its end, perhaps with other constants. Returns what it printed and the JSON of its last line."""
    driver, path = results.parent / f"{script}_driver.py", ROOT / "bench" / f"{script}.py"
    lines = ["import runpy, sys", "from pathlib import PosixPath", f"sys.path[:0] = [{str(ROOT)!r}, {str(path.parent)!r}]", f"sys.argv[0] = {str(path)!r}"]
    if constants:
        lines += [f"import bench.{script} as module", *(f"module.{name} = {value!r}" for name, value in constants.items()), "module.main()"]
    else:
        lines += [f"runpy.run_path({str(path)!r}, run_name='__main__')"]
    driver.write_text("\n".join(lines) + "\n")
    done = programs.run(driver, *words, BENCH_RESULTS=str(results), HF_HUB_OFFLINE="1")
    assert done.returncode == status, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout, json.loads(done.stdout.strip().splitlines()[-1])


def written(results, name):
    """Return a JSON that a script wrote, whose settings have a hash."""
    data = json.loads((results / f"{name}.json").read_text())
    assert re.fullmatch(r"[0-9a-f]{10}", data["settings"])
    return data


def test_every_script_is_started():
    scripts = {path.stem for path in (ROOT / "bench").glob("*.py")} - LIBRARIES
    here = set(re.findall(r'start\("(\w+)"', Path(__file__).read_text())) | {"shuffled_rewards"}
    assert scripts == here | ELSEWHERE.keys() and not here & ELSEWHERE.keys()
    for script, path in ELSEWHERE.items():
        assert re.search(rf"\b{script}\b", (ROOT / path).read_text())


@pytest.mark.slow
def test_first_command_and_its_controls(tiny, results, tmp_path):
    """Shuffled rewards, a learning rate of 0 and SFT alone, too; a second call runs nothing again."""
    out = tmp_path / "out"
    words = ["--seeds", "0", "--controls", "0", "--out", out, "--results", results, "--", "--model_path", tiny, *SHORT, "--max_steps", "2"]
    printed, result = start("first_command", *words, results=results)
    run, controls = result["runs"][0], result["controls"]["seed 0"]
    assert run["seed"] == 0 and len(run["success"]) == 2 and run["seconds"] > 0 and run["success_before"] == 0
    assert set(controls) == {"shuffled rewards", "learning rate 0", "SFT alone"} and controls["SFT alone"]["steps"] >= 1
    assert written(results, "first_command")["runs"] == result["runs"] and "<svg" in (results / "first_command.svg").read_text()
    rows = {path: path.stat().st_mtime_ns for path in out.glob("*.json")}
    _, again = start("first_command", "--seeds", "0", *words[4:], results=results)
    assert again["controls"] == result["controls"]
    assert {path: path.stat().st_mtime_ns for path in out.glob("*.json")} == rows


def test_shuffled_rewards_are_the_same_rewards_of_other_episodes():
    from types import SimpleNamespace
    from bench import shuffled_rewards
    episodes = [SimpleNamespace(rewards=[0.0, float(i)], reward=float(i)) for i in range(8)]
    shuffled_rewards.shuffled(episodes, SimpleNamespace(reward_bias=1.0, reward_scaling=2.0))
    rewards = [t.reward for t in episodes]
    assert sorted(rewards) == [2.0 * (i - 1) for i in range(8)] != rewards
    assert all(t.rewards == [0.0, t.reward] for t in episodes)


@pytest.mark.slow
def test_adapter_rounding(tiny, results, problems):
    pytest.importorskip("peft")
    start("adapter_rounding", "--model_path", tiny, "--dataset", problems / "train.jsonl", "--steps", "1", "2", "--rows", "2", "--tokens", "8",
          results=results)
    assert len(written(results, "adapter_rounding")["by_step"]) == 3


@pytest.mark.slow
def test_lessons(results):
    """One lesson as it is: it runs in less than three minutes, and its JSON has the settings that a page asks for."""
    from bench.learning import fingerprint, settings_of
    _, result = start("lessons", "01", "--seeds", "0", results=results)
    data = written(results, "lesson_01")
    row, = data["runs"]  # the last line is short and rounded
    assert row["final"] == pytest.approx(result["final"], abs=1e-3) and len(row["curves"]["none"]) == row["steps"]
    assert data["settings"] == fingerprint(settings_of("lesson_01.json")) and (results / "01_reinforce.svg").exists()


@pytest.mark.slow
def test_merging(tiny, results, problems):
    _, result = start("merging", "--model_path", tiny, "--dataset", problems / "train.jsonl", "--steps", "2", "--rows", "2", "--tokens", "8",
                      results=results)
    assert result == written(results, "merging") and result["float32"]["merge_kept"] == pytest.approx(1, abs=1e-3)


def test_attention(results):
    start("attention", "--rounds", "1", "--output", results / "attention.json", results=results, SHAPES={"small, prompt of 8": (4, 2, 32, 8, 2, 24)})
    assert set(written(results, "attention")["ms"]) == {"small, prompt of 8, float32", "small, prompt of 8, bfloat16"}


@pytest.mark.slow
def test_beside(tiny, results):
    start("beside", "--model_path", tiny, "--dtype", "float32", "--updates", "2", "--rounds", "1", "--settings", "one thread", results=results,
          COMMAND=["grpo.py", "--model_path", tiny, "--max_steps", "1", *SHORT])
    assert written(results, "beside")["seconds_of_an_update"]["one thread"][0]["alone"] > 0


@pytest.mark.slow
def test_client_loop(tiny, results):
    """A model that was taught nothing answers no task."""
    for package in ("openai", "fastapi", "uvicorn"):
        pytest.importorskip(package)
    start("client_loop", tiny, "--tasks", "2", results=results)
    [row] = written(results, "client_loop")["runs"].values()
    assert row["tasks"] == 2 and row["answered"] == row["solved"] == 0 and row["calls_after_answer_max"] is None


@pytest.mark.slow
def test_core_alone(results):
    _, result = start("core_alone", "--rounds", "1", "--steps", "2", "--output", results / "core_alone.json", results=results)
    assert set(result["median"]) == {"tiny, core alone", "tiny, with extras"} and written(results, "core_alone")


@pytest.mark.slow
def test_course(results, tmp_path):
    """All five commands, one seed."""
    start("course", tmp_path / "out", results=results, SEEDS=(0,), ROWS=200, SFT_STEPS=60, TRACED_TASKS=8, EVAL_TASKS=4)
    assert written(results, "course")["rows"]["seed 0"]["episodes"] == 64 and (results / "course_seed0.md").exists()


@pytest.mark.slow
def test_decode_families(results):
    start("decode_families", "--families", "llama", "--rounds", "1", "--results", results, results=results)
    assert written(results, "decode_families")["ratios"]["llama"]["wall"] > 0


@pytest.mark.slow
def test_environments(results, tmp_path):
    short = " ".join(SHORT)
    runs = {"equations": ("tiny", [0, 1], 2, ["--env equations --max_steps 1 --max_samples 8 --batch_size 4"], f"--env equations --max_steps 1 {short}")}
    start("environments", "--only", "equations", "--out", tmp_path / "out", results=results, RUNS=runs)
    assert written(results, "environments")["runs"]["equations"]["summary"]["success"]["gain"]["n"] == 2


@pytest.mark.slow
def test_faults_and_their_inputs(results):
    start("faults", "--sections", "bits,tasks", "--every", "40", "--quick", results=results)
    _, result = start("fault_inputs", "--sections", "pairs", "--every", "40", results=results)
    assert result["pairs"]["tried"] and not result["pairs"]["failed"]


@pytest.mark.slow
def test_kills(results):
    _, result = start("kills", "2", "sft", results=results)
    assert result["kills"] == 2 and result["unreadable"] == 0


@pytest.mark.slow
def test_four_lessons(results, tmp_path):
    lessons = {"SFT, a perfect expert": "sft.py --max_samples 16 --max_steps 2 --batch_size 4 --eval_tasks 2",
               "reward-weighted": f"reward_weighted.py --max_steps 1 {' '.join(SHORT)}",
               "DPO": "dpo.py --num_tasks 4 --max_steps 1 --eval_tasks 2 --group_size 4",
               "GRPO, 90 updates": f"grpo.py --max_steps 1 {' '.join(SHORT)}"}
    start("four_lessons", "--only", "equations", "--out", tmp_path / "out", results=results, SEEDS=(0,), EPISODES=16, LESSONS=lessons,
          START={"equations": "--expert_noise 0.6 --max_samples 60 --max_steps 30 --batch_size 8"}, GRPO={"equations": {}})
    assert len(written(results, "four_lessons")["rows"]["equations"]["DPO"]) == 1 and "<svg" in (results / "four_lessons.svg").read_text()


@pytest.mark.slow
def test_gsm8k(tiny, results, problems, tmp_path):
    start("gsm8k", "--model_path", tiny, "--data", problems, "--out", tmp_path / "out", "--seeds", "0", "--sft_steps", "1", "--scan", "0",
          "--grpo_steps", "1", "--group_size", "2", "--tasks_per_step", "2", "--problems", "2", "--samples", "2", results=results,
          LENGTHS=["--max_new_tokens", "8", "--max_tokens", "768"])
    data = written(results, "gsm8k")
    assert data["held_out"]["grpo_0"]["problems"] == 2 and (results / "gsm8k_talk_sft.txt").exists()


@pytest.mark.slow
def test_layers(results):
    _, result = start("layers", "--tasks", "1", "--group", "2", "--new_tokens", "8", "--rounds", "1", "--only", "all on", "all off", results=results)
    assert set(result["settings"]) == {"all on", "all off"}


@pytest.mark.slow
def test_distill(tiny, results, tmp_path):
    """The tiny model's parts and a real model's, at toy size; a call without time leaves the rest to the next."""
    toy = {"eval_every": 1, "eval_tasks": 2, "max_steps": 2}
    constants = dict(TINY=toy | {"tasks_per_step": 4}, REAL=toy | {"tasks_per_step": 4}, TEACHER={"max_steps": 1, "eval_tasks": 2},
                     GROUPS={"tasks_per_step": 2, "group_size": 2}, REAL_GROUPS={"tasks_per_step": 2, "group_size": 2}, IMITATED=(4,),
                     IMITATION={"num_epochs": 1, "batch_size": 4, "learning_rate": 1e-3}, TEACHER_STEPS=1, REAL_START=1, REAL_SAMPLES=16)
    words = ["--seeds", "0", "--out", tmp_path / "out"]
    _, result = start("distill", *words, "--start", tiny, "--minutes", "0", results=results, **constants)
    assert result == {"later": True, "seeds_done": 0} and not (results / "distill.json").exists()
    start("distill", *words, "--start", tiny, results=results, **constants)
    [row] = written(results, "distill")["rows"]
    assert {len(row[name]["points"]) for name in ("distill", "grpo")} == {3} and len(row["sft"]["points"]) == 2
    assert row["distill"]["tokens"] > 0 and "<svg" in (results / "distill.svg").read_text()
    start("distill", *words, "--model_path", tiny, results=results, **constants)
    assert {"distill", "grpo", "teacher"} <= written(results, "distill_smollm2")["rows"][0].keys()


@pytest.mark.slow
def test_defaults_smollm2(tiny, results, tmp_path):
    words = ["--only", "dr_grpo_0", "--seeds", "0", "--steps", "1", "--tasks", "1", "--out", tmp_path / "out", "--results", results]
    _, result = start("defaults_smollm2", *words, results=results, MODEL=str(tiny), **{"distill.REAL_START": 1, "distill.REAL_SAMPLES": 16})
    assert result["summary"]["dr_grpo"]["success"]["n"] == 1 and result["rows"]["dr_grpo_0"]["0"]["tokens"] > 32


@pytest.mark.slow
def test_defaults_gsm8k(tiny, results, problems, tmp_path):
    """From a start that solves nothing: its solved problems are written here. Learning stays among the short ones."""
    out = tmp_path / "out"
    out.mkdir()
    for split in ("train", "test"):
        row = json.loads((problems / f"{split}.jsonl").read_text().splitlines()[3])
        solved, failed = (Trajectory(token_ids=[1, 2], loss_mask=[0, 1], logprobs=[0.0, -1.0], group_id="a",
                                     info={"task": row, "success": right}).to_json() for right in (True, False))
        (out / f"played_{split}.jsonl").write_text(f"{json.dumps(solved)}\n{json.dumps(failed)}\n")
    with open(problems / "train.jsonl", "a") as file:
        file.write(json.dumps({"question": "long?", "answer": 3 * "1+1=<<1+1=2>>2 " + "#### 2"}) + "\n")
    words = ["--only", "dr_grpo_0", "--seeds", "0", "--steps", "1", "--out", out, "--results", results]
    _, result = start("defaults_gsm8k", *words, results=results, MODEL=str(tiny), SAMPLES=1, **{"gsm8k.DATA": problems, "SCHOOL['max_steps']": 1})
    assert result["rows"]["dr_grpo_0"]["0"]["tokens"] > 64
    assert len((out / "train.jsonl").read_text().splitlines()) == 24
    assert (out / "solved_test.jsonl").read_text().count("\n") == 1


@pytest.mark.slow
def test_learning_rates(tiny, results, tmp_path):
    start("learning_rates", "--model_path", tiny, "--rates", "1e-4", "--seeds", "0", "--steps", "1", "--out", tmp_path / "out", results=results,
          SFT_STEPS=1, SFT_SAMPLES=8, EVAL_TASKS=1)
    assert written(results, "learning_rates")["rows"]["1e-4"]["success_after"]["n"] == 1


@pytest.mark.slow
def test_memory(results, tmp_path):
    """The second call finds all numbers, and counts none again."""
    toy = {"MODELS": {"Qwen2.5-toy": (64, 2, 4, 2, 128, 1000, True)}, "TOKENS": 1024, "PICTURE": tmp_path / "memory.svg"}
    start("memory", results=results, **toy)
    start("memory", results=results, **toy, step_mib=None)
    data = written(results, "memory")
    assert all(len(counted) == 4 for counted in data["mib"]["Qwen2.5-toy"].values()) and "<svg" in (tmp_path / "memory.svg").read_text()
    assert data["first_that_fits"]["4"] == {"Qwen2.5-toy": "plain, 8"}


def test_products(results):
    start("products", "--output", results / "products.json", results=results, SHAPES={"small": (8, 16, 32)})
    assert set(written(results, "products")["gflops"]) == {"small, float32", "small, bfloat16", "small, float16"}


def test_phenomena_of_policies_of_a_few_numbers(results):
    """Two toys, one seed: rows, table and picture."""
    from bench.phenomena import table
    _, result = start("phenomena", "--effects", "rounding,std", "--seeds", "0", "--results", results, results=results)
    rows = written(results, "phenomena").pop("rows")
    assert result["file"] == str(results / "phenomena.json") and "<svg" in (results / "phenomena_rounding.svg").read_text()
    assert rows["rounding"]["in bfloat16"]["0"]["kept at 1e-06"] < 0.05 < 0.9 < rows["rounding"]["merged, dithered"]["0"]["kept at 1e-06"]
    assert [row[0] for row in table(rows, "std")] == ["", "group", "none"] and table(rows, "std")[2][-1] == "-0.234"


@pytest.mark.slow
def test_phenomena_of_the_tiny_model(results, tmp_path):
    """Two steps from a start that knows nothing, by an old sampler and by other engines."""
    words = ["--seeds", "0", "--steps", "2", "--school_steps", "1", "--exam_tasks", "2", "--out", tmp_path, "--results", results]
    old = {"age 4, geometric mask": {"rollout": 4, "importance_correction": 1.01, "importance_mode": "geometric_mask"}}
    arms = {"MODELS['staleness_model']": ("easy", "equations", {"new": {"like": "engine_model float32"}} | old)}
    start("phenomena", "--effects", "engine_model,staleness_model", *words, results=results, **arms)
    rows = written(results, "phenomena")["rows"]
    assert set(rows["start_easy"]["start"]["0"]) == {"solved"} and len(rows["staleness_model"]["age 4, geometric mask"]["0"]["importance_left_out"]) == 2
    gaps = [rows["engine_model"][name]["0"]["sampler_gap"][0] for name in ("float32", "bfloat16", "float8")]
    assert gaps[0] < 1e-5 < 1e-4 < gaps[1] < gaps[2]
    start("phenomena", "--effects", "staleness_model", *words, results=results, **arms)
    assert written(results, "phenomena")["rows"] == rows


def test_the_expert_of_one_function_of_code_is_right():
    from bench.easy_code import EasyCode
    tasks = EasyCode._tasks("train", 20, 0)
    assert len(tasks) == 20 and {task["entry_point"] for task in tasks} == {"sum_above"}
    env = EasyCode()
    env.reset(**tasks[0])
    while calls := env._expert():
        getattr(env, calls[0]["name"])(**calls[0]["arguments"])
    assert env._check()


def test_the_task_of_clues_pays_for_looking():
    """The expert that looks until it is shown is always right; a guess is right half of the time."""
    from bench.clues import Clues
    solved = {0: [], 3: []}
    for task in Clues._tasks("train", 200, 0):
        for patience, answers in solved.items():
            env = Clues()
            env.reset(**task)
            env._patience = patience
            while call := env._expert():
                getattr(env, call[0]["name"])(**call[0]["arguments"])
            answers.append(env.solved)
    assert all(solved[3]) and 0.35 < sum(solved[0]) / 200 < 0.65


@pytest.mark.slow
def test_profile_step(tiny, results):
    start("profile_step", "--model_path", tiny, "--prompts", "1", "--tokens", "4", results=results)
    assert written(results, "profile_step")["groups"]["update"]


@pytest.mark.slow
def test_real_model(tiny, results, problems, tmp_path):
    start("real_model", "--model_path", tiny, "--gsm8k", problems / "train.jsonl", "--out", tmp_path / "out", "--sft_steps", "1", "--grpo_steps", "2",
          "--gsm8k_steps", "1", results=results)
    assert len(written(results, "real_model")["rows"]["grpo"]["curves"]["success"]) == 2 and (results / "real_model.svg").exists()


def test_rollout(results):
    start("rollout", "--cases", "1x2x4", "--rounds", "1", "--results", results, results=results)
    assert written(results, "rollout")["tiny"]["cases"]["1x2x4"]


@pytest.mark.slow
def test_scale(results):
    start("scale", "--points", "2", "--repeats", "1", "--vary", "group_size", "--results", results, results=results)
    assert written(results, "scale")["curves"]["group_size"] and (results / "scale.svg").exists()


@pytest.mark.slow
def test_serving(tiny, results):
    pytest.importorskip("fastapi")
    pytest.importorskip("uvicorn")
    _, result = start("serving", "--model_path", tiny, "--clients", "1,2", "--tokens", "4", "--prompt", "8", "--rounds", "1", results=results)
    assert result["clients"]["2"]["server_over_engine"] > 0


def test_sft_packing(results):
    start("sft_packing", "--n", "20", "--output", results / "sft_packing.json", results=results)
    assert written(results, "sft_packing")["conversations"] == 20


@pytest.mark.slow
def test_silent(results):
    """Steps whose groups all differ, and steps in which none does."""
    _, result = start("silent", "--rounds", "1", "--output", results / "silent.json", results=results, GROUPS=2, SIZE=2, SHARES=(0.0, 1.0))
    assert written(results, "silent")["median"] == result["median"] and all(seconds > 0 for seconds in result["median"]["kl_coef 0.1"].values())


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ip"), reason="needs root, and ip")
def test_two_machines(results):
    start("two_machines", "--cases", "finishes", results=results)
    assert written(results, "two_machines")["cases"]["finishes"]["steps_done"] == 3
