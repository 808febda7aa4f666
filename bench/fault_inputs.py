"""Odd inputs: every field of every kind of file is replaced by values that do not belong there.

    python bench/fault_inputs.py [--sections rows,pairs] [--every 1]     one JSON object is the last line

A program passes if it ends by itself within 20 seconds, either with exit status 0 or with status 2 and one line that
names the file. Programs are forked from this process, which has imported everything. bench/faults.py runs these
sections with its own.
"""
import argparse
import copy
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")
import dpo  # noqa: E402
import grpo  # noqa: E402
import reward_weighted  # noqa: E402
import sft  # noqa: E402
from extras.show import __main__ as report  # noqa: E402
from envs.tasks import load_tasks
from layers import main
from layers import load_model
from core.model import save_model
from core.tiny import make_tiny  # noqa: E402

SECONDS = 20
PROGRAMS = ("sft.py: ", "dpo.py: ", "grpo.py: ", "reward_weighted.py: ", "extras.show: ")
ODD = [None, True, 0, -1, 1.5, 1e300, 10**400, "", " ", "x", "\ud800", "\0", "\x1b]52;c;eA==\x07", "<|im_end|>",
       "../../x", [], {}, [None], [[]], [0], ["x"], {"a": None}, {"self": 1}, {"": ""}, "word " * 5000, float("nan")]
RAW = {"deep": b"[" * 10**5, "digits": b"9" * 5000, "60 MB": b'"' + b"x" * 60_000_000 + b'"', "not UTF-8": b'"\xe9"',
       "not JSON": b"{'a': 1}", "cut": b'{"a', "two": b"1} {", "NUL byte": b"\0",
       "infinite": b"-Infinity", "big": b"1e999"}
ODD_YAML = [b"[" * 10**5, b"a: &x [*x]", b"a: *x", b"seed: 1\nseed: 2", b"\xff\xfe", b"? [a]\n: 1", b"- seed",
            b"seed", b"\0", b"!!python/object/apply:os.system ['touch /tmp/ran']", b"seed: 1\n---\nseed: 2",
            b"seed: !!int x", b"<<: *x", b"a: 1\n" * 10**5, b"seed: |\n  1\n  2", b"seed: >", b"{}", b"[]",
            b"null", b"--- \n..."]


def call(name, **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


ASK, ANSWER = {"role": "user", "content": "How many?"}, {"role": "assistant", "content": "42"}
CALL = {"role": "assistant", "content": "", "tool_calls": [call("search", query="a")]}
RESULT = {"role": "tool", "name": "search", "content": "42"}
PARAMETERS = {"type": "object", "properties": {"query": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "search", "description": "Search.", "parameters": PARAMETERS}}
ROWS = {"chat": {"messages": [{"role": "system", "content": "Be short."}, ASK, CALL, RESULT, ANSWER], "tools": [TOOL]},
        "completion": {"prompt": "How many?", "completion": "42", "system": "Be short."},
        "gsm8k": {"question": "How many is 2 and 2?", "answer": "It is 2+2 = <<2+2=4>>4.\n#### 4"}}
PAIRS = {"texts": {"prompt": "How many?", "chosen": "42", "rejected": "41"},
         "conversations": {"chosen": [ASK, ANSWER], "rejected": [ASK, {**ANSWER, "content": "41"}]}}


# ------------------------------------------------------------------------------------------------------------- programs
def outcome(run, path) -> str:
    """Run a program in a child process and return "" if it passed, else what happened."""
    error = tempfile.TemporaryFile()
    pid = os.fork()
    if not pid:
        silent = os.open(os.devnull, os.O_RDWR)
        os.dup2(silent, 0), os.dup2(silent, 1), os.dup2(error.fileno(), 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False, buffering=1)
        code = 1
        try:
            run()
            code = 0
        except SystemExit as status:
            code = status.code or 0
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    began = time.time()
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            break
        if time.time() - began > SECONDS:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return f"hangs for more than {SECONDS} s"
        time.sleep(0.01)
    code = os.waitstatus_to_exitcode(status)
    error.seek(0)
    said = error.read().decode("utf-8", "replace")
    lines = [line for line in said.splitlines() if line.startswith(PROGRAMS)]
    if code == 0:
        return "" if "Traceback" not in said else f"traceback: {said.strip().splitlines()[-1][:200]}"
    if code != 2:
        return f"exit status {code}: {(said.strip().splitlines() or ['nothing said'])[-1][:200]}"
    if len(lines) != 1 or "\x1b" in said:
        return f"{len(lines)} lines: {said[-300:]!r}"
    # A value of a config file that is well-formed but means nothing is named by its option.
    named = Path(path).name in lines[0] or str(Path(path).parent) in lines[0] or Path(path).suffix == ".yaml"
    return "" if named else f"the file is not named: {lines[0][:200]}"


def program(module, *words):
    """Return a function that runs an algorithm's command line."""
    def run():
        sys.argv = [f"{module.__name__}.py", *map(str, words)]
        main(module.Config, module.train, module.__doc__)
    return run


def training(module, base, place, *words):
    return program(module, "--model_path", base, "--output_dir", place / "out", "--max_steps", 1, "--eval_tasks", 0,
                   "--dtype", "float32", "--max_tokens", 256, *words)


def page(folder):
    def run():
        sys.argv = ["report", str(folder)]
        report.program()
    return run


# ------------------------------------------------------------------------------------------------------------ mutations
def places(value, path=()):
    """Yield the path of every value within a JSON value; of long lists only those of the first and the last item."""
    if not isinstance(value, (dict, list)):
        return
    keys = list(value) if isinstance(value, dict) else range(len(value))
    for key in keys if len(keys) < 8 or isinstance(value, dict) else (keys[0], keys[-1]):
        yield (*path, key)
        yield from places(value[key], (*path, key))


def mutations(value):
    """Yield (name, bytes) of JSON texts: a value replaced, a key missing, raw bytes that are no JSON."""
    marker = "@@HERE@@"
    for path in places(value):
        changed = copy.deepcopy(value)
        holder = changed
        for key in path[:-1]:
            holder = holder[key]
        where = ".".join(map(str, path))
        for odd in ODD:
            holder[path[-1]] = odd
            yield f"{where} = {str(odd)[:20]!r}", json.dumps(changed).encode()
        holder[path[-1]] = marker
        for name, raw in RAW.items():
            if len(path) == 1 or name not in ("60 MB", "deep"):
                yield f"{where} = {name}", json.dumps(changed).encode().replace(f'"{marker}"'.encode(), raw)
        if isinstance(holder, dict):
            del holder[path[-1]]
            yield f"{where} missing", json.dumps(changed).encode()
    for odd in [*ODD, [value]]:
        yield f"the whole = {str(odd)[:20]!r}", json.dumps(odd).encode()
    for name, raw in RAW.items():
        yield f"the whole = {name}", raw


# ------------------------------------------------------------------------------------------------------------- sections
def rows(place, base):
    path = place / "rows.jsonl"
    for kind, row in ROWS.items():
        good = json.dumps(row).encode() + b"\n"
        words = ["--env", kind] if kind == "gsm8k" else []  # whose _conversation reads such rows
        for name, data in mutations(row):
            yield (f"{kind}: {name}", path, good + data + b"\n" + good * 4,
                   training(sft, base, place, *words, "--dataset", path))


def pairs(place, base):
    path = place / "pairs.jsonl"
    for kind, row in PAIRS.items():
        good = json.dumps(row).encode() + b"\n"
        for name, data in mutations(row):
            yield f"{kind}: {name}", path, good * 3 + data + b"\n", training(dpo, base, place, "--dataset", path)


def episodes(place, base):
    path, lines = place / "episodes.jsonl", []
    for number, line in enumerate((place.parent / "run" / "trajectories.jsonl").read_bytes().splitlines()[:8]):
        row = json.loads(line)
        row |= {"group_id": str(number // 4), "reward": float(number % 2), "rewards": [float(number % 2)]}
        lines.append(json.dumps(row).encode() + b"\n")
    for name, data in mutations(json.loads(lines[0])):
        data = b"".join(lines) + data + b"\n"
        for module in (sft, dpo, reward_weighted):
            yield f"{module.__name__}: {name}", path, data, training(module, base, place, "--trajectories", path)
        yield f"report: {name}", path, data, page(path)


def tasks(place, base):
    path = place / "tasks.jsonl"
    task = load_tasks("equations", "train", 1, 0)[0]
    good = json.dumps(task).encode() + b"\n"
    words = "--tasks_per_step 2 --group_size 2 --batch_size 4 --max_new_tokens 4 --env equations --dataset".split()
    for name, data in mutations(task):
        yield name, path, good + data + b"\n" + good * 20, training(grpo, base, place, *words, path)


def adapters(place, base):
    folder = place.parent / "adapter"
    config = json.loads((folder / "adapter_config.json").read_text())
    shutil.copytree(folder, place / "adapter")
    for name, data in mutations(config):
        yield name, place / "adapter" / "adapter_config.json", data, training(
            sft, place / "adapter", place, "--dataset", place.parent / "good.jsonl")


def yaml_files(place, base):
    import yaml
    path = place / "config.yaml"
    values = {"seed": 1, "learning_rate": 1e-4, "lora_target_modules": "all-linear", "dtype": "float32",
              "model_path": str(base), "batch_size": 2, "env": "equations", "output_dir": str(place / "out"),
              "dataset": str(place.parent / "good.jsonl"), "max_steps": 1, "eval_tasks": 0,
              "max_samples": 40}
    for key in values:
        for odd in ODD:
            if odd != "\ud800":
                text = yaml.safe_dump({**values, key: odd})
                yield f"{key} = {str(odd)[:20]!r}", path, text.encode(), program(sft, "--config", path)
    words = [word for key, value in values.items() for word in (f"--{key}", value)]
    for text in ODD_YAML:
        yield f"the whole = {text[:20]!r}", path, text, program(sft, "--config", path, *words)


def finished_runs(place, base):
    """Files of a finished run, of which a page is made and which is resumed."""
    folder = place / "run"
    for name in ("result.json", "metrics.jsonl", "timing.jsonl", "config.yaml"):
        good = (place.parent / "run" / name).read_bytes()
        if name == "config.yaml":
            changed = [(f"byte {i} = {odd}", good[:i] + bytes([odd]) + good[i + 1:])
                       for i in range(0, len(good), max(1, len(good) // 40)) for odd in (0, 10, 34, 58, 91, 255)]
        else:
            changed = mutations(json.loads(good if name == "result.json" else good.splitlines()[0]))
        for kind, data in changed:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(place.parent / "run", folder)
            data = data + b"\n" + good if name.endswith(".jsonl") else data
            yield f"report of {name}: {kind}", folder / name, data, page(folder)
            yield f"resume with {name}: {kind}", folder / name, data, program(
                sft, "--config", folder / "config.yaml", "--output_dir", folder, "--resume")


SECTIONS = {"rows": rows, "pairs": pairs, "episodes": episodes, "tasks": tasks, "adapter_config.json": adapters,
            "YAML": yaml_files, "files of a run": finished_runs}


def prepare(place):
    """Make the tiny model, an adapter of it, a finished run with episodes, and good rows."""
    base = place / "base"
    for item in make_tiny(0):
        item.save_pretrained(base)
    (place / "good.jsonl").write_text((json.dumps(ROWS["completion"]) + "\n") * 8)
    model, _ = load_model(str(base), lora_r=4)
    save_model(model, str(place / "adapter"))
    words = ["--dtype", "float32", "--max_steps", 1, "--eval_tasks", 0, "--model_path", base]
    play = "--tasks_per_step 4 --group_size 2 --batch_size 8 --max_new_tokens 8".split()
    problem = outcome(program(grpo, *words, *play, "--output_dir", place / "grpo"), "")
    problem = problem or outcome(
        program(sft, *words, "--dataset", place / "good.jsonl", "--output_dir", place / "run"), "")
    if problem:
        raise SystemExit(f"the good inputs fail: {problem}")
    shutil.copy(place / "grpo" / "trajectories.jsonl", place / "run" / "trajectories.jsonl")
    return base


def run_sections(names, every=1):
    """Return {section: {"tried": n, "failed": [...]}}. `every` tries only each n-th case."""
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        base = prepare(place)
        for section in names:
            tried, failed, began = 0, [], time.time()
            work = place / "work"
            work.mkdir()
            # Odd values of --output_dir are folders of the current one.
            os.chdir(work)
            for number, (name, path, data, run) in enumerate(SECTIONS[section](work, base)):
                if number % every:
                    continue
                Path(path).write_bytes(data)
                shutil.rmtree(work / "out", ignore_errors=True)
                tried += 1
                problem = outcome(run, path)
                if problem:
                    failed.append(f"{name}: {problem}")
                    print(f"  {section}: {failed[-1]}", flush=True)
            os.chdir(ROOT)
            shutil.rmtree(work)
            results[section] = {"tried": tried, "failed": len(failed), "examples": failed[:5],
                                "seconds": round(time.time() - began)}
            print(f"{section}: {tried} tried, {len(failed)} failed", flush=True)
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", default=",".join(SECTIONS))
    parser.add_argument("--every", type=int, default=1)
    options = parser.parse_args()
    print(json.dumps(run_sections(options.sections.split(","), options.every)))
