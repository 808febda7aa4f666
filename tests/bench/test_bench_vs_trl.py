"""bench/vs_trl.py at toy size: its last line, its rows, and gradients that agree with TRL's."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
import vs_trl  # noqa: E402

TOY = ["--model_path", "tiny-random", "--prompts", "2", "--samples", "2", "--tokens", "8", "--rounds", "1"]


@pytest.mark.slow
def test_toy_run():
    """The whole script once (five processes, three with TRL, about 40 s on one core); one test, as xdist would run a fixture twice."""
    pytest.importorskip("trl")
    pytest.importorskip("peft")
    done = subprocess.run([sys.executable, "bench/vs_trl.py", *TOY, "--gradient_checkpointing", "--batch_size", "3"], cwd=ROOT,
                          capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    out, result = done.stdout, json.loads(done.stdout.splitlines()[-1])
    last_line_has_both_ratios_in_the_right_direction(result)
    gradients_agree_with_trl(result)
    rows_are_what_their_names_say(out, result)


def last_line_has_both_ratios_in_the_right_direction(result):
    ours, trl = result["rows"]["ours"], result["rows"]["trl"]
    assert result["time_ratio"] == pytest.approx(trl["step_seconds"] / ours["step_seconds"], rel=0.01)
    assert result["memory_ratio"] == pytest.approx(ours["peak_memory_mb"] / trl["peak_memory_mb"], rel=0.01)
    assert result["time_ratios"] == [result["time_ratio"]]  # of each round; there is one
    assert result["cpu_ratio"] == pytest.approx(trl["cpu_seconds"] / ours["cpu_seconds"], rel=0.01)
    assert result["machine"]["cores"] and result["date"] and "bench/vs_trl.py --model_path tiny-random" in result["command"]


def gradients_agree_with_trl(result):
    assert result["gradient_cosine"] >= 0.999 and result["gradient_cosine_min"] >= 0.999
    assert result["gradient_norm_ratio"] == pytest.approx(1, abs=1e-3)
    assert result["gradient_tensors"] == 2 * 7 * 2  # layers x Linears x (A, B)


def rows_are_what_their_names_say(out, result):
    rows = result["rows"]
    assert [rows[side]["weights"] for side in ("trl", "trl_same_dtype", "ours")] == ["float32", "bfloat16", "bfloat16"]
    assert rows["trl"]["config"]["autocast"] == "bf16" and rows["trl"]["config"]["gradient_checkpointing"] is True  # as TRL ships
    assert len({row["trained_parameters"] for row in rows.values()}) == 1
    assert {row["adapter"] for row in rows.values()} == {"float32"}
    assert len({row["threads"] for row in rows.values()}) == 1
    for row in rows.values():
        assert row["step_seconds"] > row["rollout_seconds"] > 0 and row["update_seconds"] > 0 and row["peak_memory_mb"] > 0
        assert row["cpu_seconds"] > 0 and 0 <= row["others_busy"] <= 1
        assert row["tokens_per_second"] == pytest.approx(2 * 2 * 8 / row["step_seconds"], rel=0.05)
    assert result["same_dtype"]["time_ratio"] == pytest.approx(rows["trl_same_dtype"]["step_seconds"] / rows["ours"]["step_seconds"], rel=0.01)
    assert "TRL + PEFT as shipped" in out and "round 1/1 ours" in out


def test_compare_gradients_sees_a_difference(tmp_path):
    a, b = np.array([1.0, 0.0], np.float32), np.array([1.0, 1.0], np.float32)
    save_file({"x": a, "y": a}, tmp_path / "ours.safetensors")
    save_file({"x": 2 * a, "y": 2 * b}, tmp_path / "trl.safetensors")
    found = vs_trl.compare_gradients(tmp_path)
    assert found["gradient_cosine"] == pytest.approx(4 / np.sqrt(12 * 2))
    assert found["gradient_cosine_min"] == pytest.approx(np.sqrt(0.5))
    assert found["gradient_norm_ratio"] == pytest.approx(np.sqrt(6))
    save_file({"x": a, "y": 0 * a}, tmp_path / "trl.safetensors")
    with pytest.raises(ValueError, match="0 everywhere"):
        vs_trl.compare_gradients(tmp_path)
    save_file({"x": a}, tmp_path / "trl.safetensors")
    with pytest.raises(ValueError, match="adapters differ"):
        vs_trl.compare_gradients(tmp_path)


@pytest.mark.parametrize("wrong, message", [
    (["--samples", "1"], "2 or more"), (["--trl_batch_size", "3"], "must divide"), (["--model_path", "./nowhere"], "no such folder"),
    (["--trl_config", "{"], "invalid loads value")])
def test_wrong_arguments_are_refused_before_anything_runs(wrong, message, capsys):
    with pytest.raises(SystemExit):
        vs_trl.arguments([*TOY, *wrong])
    assert message in capsys.readouterr().err
