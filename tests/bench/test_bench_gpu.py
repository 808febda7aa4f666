"""bench/gpu.py and bench/scale.py from end to end on a CPU, at toy size: what comes out, and what a failing part leaves."""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
import gpu  # noqa: E402
import scale  # noqa: E402

from bench import gpu_parts, sampler as bench_sampler  # noqa: E402

TOY = ["--rows", "2", "--tokens", "32", "--length", "160", "--prompt", "64", "--cap", "64", "--repeats", "1", "--minutes", "30", "--timeout", "600"]


def call(script, *options):
    done = subprocess.run([sys.executable, f"bench/{script}.py", *options], cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy")
    gpu.make_model("toy", folder)
    return str(folder)


@pytest.mark.slow
def test_gpu_bench_runs_end_to_end(tmp_path):
    """What an earlier call has found is kept, a step is the one that was asked for, and its failures decide the exit status."""
    earlier = {"shapes": {"7B": {"update": {"found": 1}}}}
    (tmp_path / "gpu_here.json").write_text(json.dumps(earlier))
    result = call("gpu", "--shapes", "toy", "--parts", "grpo", *TOY, "--results", str(tmp_path), "--scratch", str(tmp_path), "--name", "here")
    assert json.loads((tmp_path / "gpu_here.json").read_text()) == result and [p.name for p in tmp_path.iterdir()] == ["gpu_here.json"]
    assert result["machine"]["bandwidth"] > 1e8 and "bench/gpu.py --shapes toy" in result["command"]
    assert result["shapes"]["7B"] == earlier["shapes"]["7B"] and result["failed"] == []
    steps = result["shapes"]["toy"]["grpo"]
    assert len(steps["steps"]) == 2 and all(s["rollout_seconds"] > 0 < s["update_seconds"] for s in steps["steps"])
    assert steps["prompt"] + steps["flags"]["max_new_tokens"] == 160 and min(steps["counted_mib"].values()) > 1
    assert len(steps["graphs"]) == 4 and len(steps["checks"]) == 4 and all(steps["checks"].values())  # two evaluations


@pytest.mark.slow
def test_the_device_is_compared_with_the_cpu(toy, monkeypatch):
    kept = []
    args = gpu.arguments(TOY)
    args.keep = kept.append
    result = gpu_parts.correct(args, toy)
    assert gpu.failures(result) == [] and result["float32"]["tokens"] == 6 * 32 and len(kept) >= 3
    monkeypatch.setattr(gpu_parts, "ROUNDING", dict.fromkeys(gpu_parts.ROUNDING, (0, -1)))  # nothing is that near
    assert "not so: float32: gradients of the CPU" in " ".join(gpu.failures(gpu_parts.correct(args, toy)))


@pytest.mark.slow
def test_the_parts_that_measure_speed(toy):
    args = gpu.arguments(TOY)
    args.keep = lambda result: None
    for engine in ("generate", "engine"):  # at this size the clock may be too coarse: then it says so
        row = gpu_parts.decode(args, toy, engine, 1e10)["2"]
        assert "took no longer" in row["error"] if "error" in row else row["tokens_per_second"] > 0 < row["bandwidth"]
    assert [r["tokens_per_second"] > 0 for r in gpu_parts.update(args, toy).values()] == 3 * 2 * 2 * [True]  # memory, rows, few_launches
    captured = gpu_parts.graphs(args, toy)["captured"]
    assert {c["rows"] for c in captured} == {1, 2} and all(c["graphs"] == 0 for c in captured)


def test_a_part_that_fails_or_hangs_is_written_down(tmp_path):
    args = gpu.arguments([*TOY, "--results", str(tmp_path)])
    result = gpu.run_part(args, "grpo", str(tmp_path), "no such shape")
    assert result["error"].startswith("KeyError") and "gpu_parts.py" in result["traceback"]
    args.timeout = 0.01
    stopped = gpu.run_part(args, "machine")
    assert "stopped after" in stopped["error"]
    args.ends = 0
    assert "not begun" in gpu.run_part(args, "machine")["error"]
    assert gpu.failures({"a": {"error": "x"}, "b": {"checks": {"fits": False, "is right": True}}}, "toy") == ["toy a: x", "toy b: not so: fits"]


def test_without_a_gpu_no_real_shape_is_begun(monkeypatch, capsys):
    monkeypatch.setattr(gpu, "run_part", lambda *_: {"device": "cpu"})
    assert gpu.main(gpu.arguments(["--shapes", "7B"])) == 1 and "no GPU is visible" in capsys.readouterr().err


def test_without_bitsandbytes_steps_are_taken_without_4_bits(monkeypatch):
    monkeypatch.setattr(gpu_parts, "has_bitsandbytes", lambda: False)
    assert gpu_parts.memory_under_cap("small") == gpu_parts.memory_under_cap("stream") == "checkpoint"


def test_a_bitsandbytes_without_kernels_for_this_device_counts_as_missing(monkeypatch, capsys):
    """Its wheel can be imported there, and every step under the cap would fail."""
    functional = pytest.importorskip("bitsandbytes.functional")
    assert gpu_parts.has_bitsandbytes()

    def no_kernel(*_, **__):
        raise RuntimeError("CUDA Setup failed")
    monkeypatch.setattr(functional, "quantize_4bit", no_kernel)
    assert not gpu_parts.has_bitsandbytes() and "note: no 4-bit weights: RuntimeError: CUDA Setup failed" in capsys.readouterr().out


def test_the_sampler_part_runs_the_bench_of_the_sampler(tmp_path, monkeypatch):
    """With the flags that it has. Where no vLLM is to be found the part says so."""
    assert gpu_parts.sampler(None, "MODEL") == {"skipped": "vllm is not on the PATH"} and "sampler" not in gpu.arguments([]).parts
    vllm = tmp_path / "bin" / "vllm"
    vllm.parent.mkdir()
    vllm.write_text("")
    vllm.chmod(0o755)
    monkeypatch.setenv("PATH", str(vllm.parent), prepend=os.pathsep)

    def run(words, **_):
        monkeypatch.setattr(sys, "argv", words[1:])
        kept.append(bench_sampler.arguments())
        return subprocess.CompletedProcess(words, 0, "text\n{}\n", "")
    kept = []
    monkeypatch.setattr(gpu_parts.subprocess, "run", run)
    assert gpu_parts.sampler(None, "MODEL") == {}
    assert kept[0].vllm == str(tmp_path) and kept[0].model_path == "MODEL" and kept[0].seeds == [0] and kept[0].runs == ["here", "sampler", "ahead"]


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


@pytest.mark.slow
def test_scale_runs_end_to_end(tmp_path):
    result = call("scale", "--points", "2", "--repeats", "1", "--vary", "turns", "tool_tokens", "--results", str(tmp_path), "--clock", "cpu")
    assert json.loads((tmp_path / "scale.json").read_text()) == result and (tmp_path / "scale.svg").stat().st_size > 10_000
    for name in ("turns", "tool_tokens"):
        first, second = result["curves"][name]["points"]
        assert second["tokens"] > first["tokens"] and min(first[m] for m in scale.MEASURES) > 0
    assert result["linear_or_better"] == (result["worst_exponent"] <= 1 + scale.TOLERANCE)


def test_exponents():
    sizes = [2, 4, 8, 16]
    for power in (0.0, 0.5, 1.0, 2.0):
        assert scale.exponent(sizes, [3 * x**power for x in sizes]) == pytest.approx(power, abs=1e-9)
    assert scale.exponent(sizes, [100 + x for x in sizes]) < 0.1


# ------------------------------------------------------------------------------------------------------------ the peers
def test_a_peer_that_is_missing_or_fails_is_skipped_with_its_reason(tmp_path, monkeypatch):
    from bench import peers
    args = peers.arguments(["--model_path", str(tmp_path), "--rounds", "1"])
    assert peers.missing("ours") == [] and "peers" not in gpu.arguments([]).parts
    monkeypatch.setitem(peers.PEERS, "liger", ["json", "no_such_package"])
    assert peers.measure(args, str(tmp_path), "liger", "4bit", 9, []) == {"skipped": "not installed: no_such_package"}
    (tmp_path / "no_such_package").mkdir()
    assert peers.missing("liger", [tmp_path]) == []
    failed = peers.measure(args, str(tmp_path / "no_model"), "ours", "bfloat16", 60, [])
    assert failed["error"] == "exit status 1" and failed["steps"] == 0 and "no_model" in " ".join(failed["log"])
    stopped = peers.measure(args, str(tmp_path), "trl", "bfloat16", 0, [])
    assert stopped["error"].startswith("stopped after")


def test_the_steps_of_peers_are_compared(tmp_path):
    from bench import peers
    steps = [{"step_seconds": s, "rollout_seconds": None, "reserved_mib": 100 * s} for s in (9.0, 3.0, 2.0, 4.0)]
    row = peers.summary(steps)  # without the first step, with the last peak
    assert row["step_seconds"] == 3.0 and row["reserved_mib"] == 400 and row["steps"] == 4 and row["rollout_seconds"] is None
    rows = {"ours 4bit": {"step_seconds": 1.5, "reserved_mib": 100}, "unsloth 4bit": row, "trl 4bit": {"skipped": "not installed: trl"}}
    assert peers.ratios(rows) == {"unsloth 4bit": {"time_ratio": 2.0, "memory_ratio": 0.25}}


def test_the_part_of_the_peers_keeps_what_was_found(monkeypatch):
    kept, args = [], gpu.arguments(TOY)
    args.keep = kept.append

    def run(words, **_):
        assert words[1].endswith("bench/peers.py") and words[words.index("--samples") + 1] == "2"
        return subprocess.CompletedProcess(words, 0, "a line\n" + json.dumps({"rows": rows}), "")
    monkeypatch.setattr(gpu_parts.subprocess, "run", run)
    rows = {"ours bfloat16": {"step_seconds": 1.0}, "unsloth 4bit": {"skipped": "not installed: unsloth"}}
    assert gpu_parts.peers(args, "MODEL", "toy") == {"rows": rows} == kept[0]
    rows = {"ours bfloat16": {"error": "exit status 1"}}
    with pytest.raises(RuntimeError, match="our own step"):
        gpu_parts.peers(args, "MODEL", "toy")


# ------------------------------------------------------------------------------------------------------- the small cards
def test_a_card_is_estimated_from_bytes_flops_and_launches(monkeypatch):
    import torch

    from bench import cards
    x, weight = (torch.empty(*shape, dtype=torch.bfloat16, device="meta") for shape in ((8, 64), (64, 128)))
    with cards.Cost(False) as cost:
        cost.on = True
        torch.mm(x, weight).add_(1)
        x.t()  # a view launches nothing
    assert [row[2] for row in cost.costs] == [2 * 8 * 64 * 128, 0] and cost.kernels == 2
    assert cost.costs[0][1] == 2 * (8 * 64 + 64 * 128 + 8 * 128)
    # By the rate, by the bandwidth, by the floor.
    assert cards.kernel_seconds([(1, 10, 1e12)], 1e9, 1e12) == 1 and cards.kernel_seconds([(1, 2e9, 0)], 1e9, 1e12) == 2
    assert cards.kernel_seconds([(3, 3, 3)], 1e9, 1e12) == 3 * cards.FLOOR
    # 0.5B has 494 million weights, of which the embedding is read as the head.
    assert cards.weights_bytes("0.5B", "plain") == pytest.approx(2 * 494e6, rel=0.01)
    monkeypatch.setattr(cards, "count", lambda *_: cost)
    rows = cards.estimates(0.75)
    assert {row["limit"] for row in rows} <= {"launches", "the card"} and all(row["step_seconds"] > row["rollout_seconds"] > 0 for row in rows)
