"""--report_to, with the real packages and without a network. A logger that is not installed is skipped."""
import json
import shutil
import struct
import time

import pytest
import saving
import torch

import sft
from agent import Trajectory
from core.config import UserError
from core.run import Run as CoreRun
from extras.show import loggers
from layers import Run


class Killed(BaseException):
    pass


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    for name in ("WANDB_PROJECT", "TRACKIO_PROJECT"):
        monkeypatch.delenv(name, raising=False)


def drive(folder, names, killed_at=None, fork=None, **options):
    """A run of four steps that trains nothing, and logs as a training loop does."""
    run = Run(sft.settle(sft.Config(output_dir=str(folder), report_to=names, eval_tasks=0, save_every=2, **options)), "sft")
    if fork:
        run.listeners.append(fork)
    with run:
        for step in saving.load(run, 4):
            if step == 0:
                run.log_evaluation(0, {"success": 0.25})
            if step == 2:
                run.log_evaluation(2, {"success": 0.375})
            if step == killed_at:
                raise Killed
            t = Trajectory(messages=[{"role": "user", "content": "2x = 6"}, {"role": "assistant", "content": "x is 3"}], token_ids=[1, 2],
                           loss_mask=[0, 1], logprobs=[0.0, -0.5], rewards=[0.5], reward=0.5, reward_parts={"answer": 0.5}, group_id="0",
                           stop_reason="done", info={"env": "equations", "success": True})
            run.log_episodes([t])
            run.log(loss=1 - step / 4, kl=float("nan"), margin=torch.tensor(2.0))
            run.end_step(step)
        run.finish({"success": 0.5, "episodes": 8})


# Each returns {name: {step: [values]}} of what a logger has kept, its config, and the rows of its tables.
def read_tensorboard(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    kept = {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}
    text = events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    return kept, json.loads(text.strip("`\n")), None


def wandb_records(data):
    """The records of a .wandb file: LevelDB's log format after 7 bytes; a record goes on in the next block of 32 KiB."""
    place, parts = 7, b""
    while place + 7 <= len(data):
        size, kind = struct.unpack_from("<HB", data, place + 4)
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        parts += data[place + 7:place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def read_wandb(folder):
    from wandb.proto import wandb_internal_pb2
    kept, config, ids = {}, {}, set()
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        ids.add(path.stem)
        for _ in range(100):  # its other process may write on after finish()
            records = [wandb_internal_pb2.Record.FromString(data) for data in wandb_records(path.read_bytes())]
            if records[-1].WhichOneof("record_type") == "exit":
                break
            time.sleep(0.1)
        for record in records:
            if record.WhichOneof("record_type") == "run":
                config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
                assert record.run.project == "agentic-rl" and record.run.display_name == folder.name
            numbers = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            for name, value in numbers.items():
                kept.setdefault(name, []).append((numbers.get("_step"), value))
    assert len(ids) == 1  # a resumed run goes on under its id
    tables = folder.glob("wandb/offline-run-*/files/media/table/completions_*")
    return kept, config, min(json.loads(path.read_text())["data"] for path in tables)


def read_trackio(folder):
    from trackio.sqlite_storage import SQLiteStorage
    kept, rows = {}, []
    for line in SQLiteStorage.get_logs("agentic-rl", folder.name):
        for name, value in line.items():
            kept.setdefault(name, []).append((line["step"], value))
        if not rows and "completions" in line:
            rows = [list(row.values()) for row in line["completions"]["_value"]]
    return kept, SQLiteStorage.get_run_config("agentic-rl", folder.name), rows


@pytest.mark.parametrize("name, read", [("tensorboard", read_tensorboard), ("wandb", read_wandb), ("trackio", read_trackio)])
def test_a_logger_holds_the_lines_of_a_run_that_was_killed_and_resumed(name, read, tmp_path, monkeypatch):
    pytest.importorskip(name)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Run, "__exit__", lambda *_: None)  # a kill saves nothing: step 2 is logged, and played again
        drive(tmp_path / "a_run", name, killed_at=3)
    if name == "wandb":
        import wandb
        wandb.finish()  # as the end of the process does
    drive(tmp_path / "a_run", name, resume=True)
    kept, config, rows = read(tmp_path / "a_run")
    assert dict(kept["train/loss"]) == {0: 1.0, 1: 0.75, 2: 0.5, 3: 0.25}
    assert dict(kept["eval/success"]) == {0: 0.25, 2: 0.375, 4: 0.5}
    # TRL's names, where it counts the same.
    assert dict(kept["train/completions/mean_length"])[3] == 1 and dict(kept["train/rewards/answer/mean"])[3] == 0.5
    assert dict(kept["train/rewards/margins"])[0] == 2 and dict(kept["train/step_time"])[0] > 0
    assert "train/kl" not in kept  # NaN
    assert config["algorithm"] == "sft" and config["save_every"] == 2 and config["output_dir"].endswith("a_run")
    if name != "tensorboard":
        assert rows == [[0, "User: 2x = 6\nAssistant: x is 3\n[done; success True; reward 0.50]", 0.5, True, "done"]]
    if name == "tensorboard":  # the others hold a step twice that was played twice
        assert [step for step, _ in kept["train/loss"]] == [0, 1, 2, 3]


def test_the_files_of_a_run_are_those_of_one_without_loggers(tmp_path):
    pytest.importorskip("tensorboard")
    for names in ("none", "tensorboard"):
        drive(tmp_path / names, names)
    for log in ("metrics.jsonl", "trajectories.jsonl"):
        assert (tmp_path / "none" / log).read_bytes() == (tmp_path / "tensorboard" / log).read_bytes()
    assert not (tmp_path / "none" / "tensorboard").exists()


def test_a_logger_that_fails_ends_no_run_and_is_named_once(tmp_path, monkeypatch, capsys):
    def log(numbers, step):
        raise ConnectionError("the server is gone\nat last")
    monkeypatch.setitem(loggers.LOGGERS, "json", lambda run, config: (log, None, None))
    drive(tmp_path / "run", "json")
    assert capsys.readouterr().out.count("note: json logs no more: the server is gone\n") == 1
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 4


def test_an_unknown_and_a_missing_logger_are_refused_before_anything_is_loaded(tmp_path, monkeypatch):
    for names in ("wand", "none,wandb", "wandb,"):
        with pytest.raises(UserError, match=f"^--report_to {names}: give none, or some of tensorboard, wandb, trackio$"):
            drive(tmp_path, names)
    monkeypatch.setattr(loggers, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="^--report_to trackio: is not installed; pip install trackio$"):
        drive(tmp_path, "trackio")

    def begin(run, config):
        raise PermissionError("api_key not configured (no-tty)\n")
    monkeypatch.setitem(loggers.LOGGERS, "json", begin)
    monkeypatch.setattr(loggers, "find_spec", lambda name: True)
    with pytest.raises(UserError, match="^--report_to json: api_key not configured"):
        drive(tmp_path / "run", "json")
    shutil.rmtree(tmp_path / "run")


def test_a_fork_watches_the_steps_as_the_readme_says(tmp_path):
    """`run.listeners.append(watch)`, also without this layer."""
    seen = []
    drive(tmp_path / "run", "none", fork=lambda step, metrics, timing: seen.append((step, metrics["loss"], timing["seconds"] >= 0)))
    assert seen == [(0, 1.0, True), (1, 0.75, True), (2, 0.5, True), (3, 0.25, True)]
    assert CoreRun(sft.Config(output_dir=str(tmp_path / "core")), "sft").listeners == []
