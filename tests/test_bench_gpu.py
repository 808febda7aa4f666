"""bench/gpu.py and bench/scale.py from end to end on a CPU, at toy size: what comes out, and what a failing part leaves."""
import json
import subprocess
import sys
from pathlib import Path

import pytest

import grpo

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "bench"))
import gpu  # noqa: E402
import scale  # noqa: E402

TOY = ["--rows", "2", "--tokens", "16", "--length", "64", "--prompt", "40", "--cap", "64"]


def call(script, *options):
    done = subprocess.run([sys.executable, f"bench/{script}.py", *options], cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_gpu_bench_runs_end_to_end(tmp_path, monkeypatch):
    result = call("gpu", "--shapes", "toy", *TOY, "--results", str(tmp_path), "--scratch", str(tmp_path), "--name", "here")
    assert json.loads((tmp_path / "gpu_here.json").read_text()) == result and [p.name for p in tmp_path.iterdir()] == ["gpu_here.json"]
    assert result["machine"]["bandwidth"] > 1e8 and "bench/gpu.py --shapes toy" in result["command"]
    toy = result["shapes"]["toy"]
    assert len(toy["grpo"]["steps"]) == 2 and all(s["rollout_seconds"] > 0 < s["update_seconds"] for s in toy["grpo"]["steps"])
    assert toy["grpo"]["prompt"] + toy["grpo"]["flags"]["max_new_tokens"] == 64 and toy["grpo"]["host_peak_mib"] > 100
    for engine in ("generate", "generate_batch", "engine"):  # at this size the clock may be too coarse: then it says so
        row = toy["decode"][engine]["2"]
        assert "took no longer" in row["error"] if "error" in row else row["tokens_per_second"] > 0 < row["bandwidth"]
    assert {len(toy["update"])} == {5} and all(r["tokens_per_second"] > 0 for name, r in toy["update"].items() if name != "seconds")
    run_worker = gpu.run_worker  # the machine is as it was found before
    monkeypatch.setattr(gpu, "run_worker", lambda args, *what: result[what[0]] if what[0] in ("machine", "cap") else run_worker(args, *what))
    later = gpu.main(gpu.arguments(["--shapes", "toy-lean", "--parts", "grpo", *TOY, "--results", str(tmp_path), "--name", "here"]))
    assert later["shapes"]["toy"] == toy  # what an earlier call found is kept
    lean, missing = later["shapes"]["toy-lean"]["grpo"], set(gpu.LEAN) - set(grpo.Config.__dataclass_fields__)
    if missing:
        assert all(name in lean["error"] for name in missing)
    elif "error" not in lean:
        assert len(lean["steps"]) == 2
    else:  # a machine without bitsandbytes
        with pytest.raises(ImportError):
            import bitsandbytes  # noqa: F401


def test_a_part_that_fails_or_hangs_is_written_down(tmp_path, monkeypatch):
    args = gpu.arguments([*TOY, "--timeout", "60", "--results", str(tmp_path)])
    assert "UserError" in gpu.run_worker(args, "update", str(tmp_path / "nowhere"))["plain_4_rows"]["error"]
    assert "KeyError" in gpu.run_worker(args, "grpo", str(tmp_path), "no such shape")["error"]
    monkeypatch.setattr(args, "timeout", 0.01)
    assert "--timeout" in gpu.run_worker(args, "machine")["error"]


def test_the_shapes_are_qwens():
    """Parameters as their model cards count them, in millions."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM
    for shape, millions in (("0.5B", 494), ("1.5B", 1544), ("3B", 3086), ("7B", 7616)):
        with torch.device("meta"):
            model = Qwen2ForCausalLM(Qwen2Config(**gpu.SHAPES[shape][0]))
        assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=1e-3)


@pytest.mark.parametrize("wrong", [["--prompt", "64", "--length", "64"], ["--tokens", "2"], ["--rows", "0"], ["--shapes", "8B"]])
def test_wrong_arguments_are_refused(wrong):
    with pytest.raises(SystemExit):
        gpu.arguments([*TOY, *wrong])


def test_scale_runs_end_to_end(tmp_path):
    result = call("scale", "--points", "2", "--repeats", "1", "--vary", "turns", "tool_tokens", "--results", str(tmp_path), "--clock", "cpu")
    assert json.loads((tmp_path / "scale.json").read_text()) == result and (tmp_path / "scale.png").stat().st_size > 10_000
    for name in ("turns", "tool_tokens"):
        first, second = result["curves"][name]["points"]
        assert second["tokens"] > first["tokens"] and min(first[m] for m in scale.MEASURES) > 0
    assert result["linear_or_better"] == (result["worst_exponent"] <= 1 + scale.TOLERANCE)


def test_exponents():
    sizes = [2, 4, 8, 16]
    for power in (0.0, 0.5, 1.0, 2.0):
        assert scale.exponent(sizes, [3 * x**power for x in sizes]) == pytest.approx(power, abs=1e-9)
    assert scale.exponent(sizes, [100 + x for x in sizes]) < 0.1
