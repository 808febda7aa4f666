"""Everything that can end a run, in one go: is anything lost, deleted, half written or told in a traceback?

    python bench/faults.py [--quick] [--sections bits,pipes]      the last line is one JSON object

Unless it is quick, the sections that were run are put into bench/results/faults.json; those that it held of other
sections stay, so that the battery can be run in pieces. About 35 minutes of one core; `--kills 50 --every 10` shortens
the longest sections.

kills        SIGKILL at random moments (bench/kills.py): every checkpoint is whole, at most an interval is lost
signals      SIGINT, SIGTERM, SIGHUP at random moments: exit status 128 + n, the last whole step is saved
pipes        stdin, stdout and stderr closed, full, or read by a program that leaves: the run finishes, or ends without
             a traceback and resumes
full disk    each file of a run is the first that does not fit: exit status 4 in one line, and the run resumes
bits         one bit of a checkpoint's files flipped, at 1,000 random places: refused in one line, or the same content
ranks        a rank of a torchrun job dies in seven places, is killed or gets a signal: the other one ends, and says why
inputs       odd rows, pairs, episodes, adapters, configs ... (bench/fault_inputs.py)
"""
import argparse
import datetime
import fcntl
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")
import fault_inputs  # noqa: E402
from bench.learning import RESULTS, fingerprint, settings_of  # noqa: E402

from core.model import checkpoints  # noqa: E402
from extras.exact.checkpoint import read_state  # noqa: E402
from core.config import UserError  # noqa: E402
from core.tiny import make_tiny  # noqa: E402

LOST = ("unreadable", "lost_more_than_an_interval", "failed", "final_bits_differ")
PIPES = ("| head -c 1 >/dev/null", "2>&1 | head -c 1 >/dev/null", ">&-", "2>&-", "<&- >&- 2>&-", "</dev/null",
         ">/dev/full", "2>/dev/full", ">/dev/full 2>/dev/full")


def words(place, steps):
    options = f"--model_path {place}/base --env equations --max_samples 24 --batch_size 4 --lora_r 2 --eval_tasks 2"
    return [sys.executable, f"{ROOT}/sft.py", *options.split(), "--max_steps", str(steps), "--output_dir", "run"]


def one_line(errors):
    """Return what is wrong with the last line that a program printed, or None."""
    return "a traceback" if "Traceback" in errors else None


def kills(place, options):
    """Return (tried, failures) of bench/kills.py."""
    command = [sys.executable, f"{ROOT}/bench/kills.py", "10" if options.quick else str(options.kills), "sft"]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True)
    if not done.stdout.endswith("}\n"):
        return 0, [done.stdout[-500:] + done.stderr[-500:]]
    counts = json.loads(done.stdout.splitlines()[-1])
    return counts["kills"], [f"{name}: {counts[name]}" for name in LOST if counts[name]]


def signals(place, options):
    """Send each signal at random moments to a run without end."""
    draw, failures = random.Random(0), []
    times = 1 if options.quick else 6
    cases = [signum for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) for _ in range(times)]
    for signum in cases:
        with tempfile.TemporaryDirectory(dir=place) as folder:
            # Under nohup the child would inherit that SIGHUP is ignored.
            run = subprocess.Popen(words(place, 10**6), cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                                   text=True, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL))
            log = Path(folder, "run", "metrics.jsonl")
            while not log.exists() and run.poll() is None:
                time.sleep(0.02)
            time.sleep(draw.uniform(0, 1))
            run.send_signal(signum)
            try:
                _, errors = run.communicate(timeout=60)
            except subprocess.TimeoutExpired:
                run.kill()
                failures.append(f"{signum.name}: hangs for more than 60 s")
                continue
            saved = read_state(checkpoints(Path(folder, "run"))[-1])["step"]
            lines = log.read_bytes().count(b"\n")
            if run.returncode != 128 + signum or one_line(errors) or saved != lines:
                failures.append(f"{signum.name}: status {run.returncode}, {saved} saved of {lines}: {errors[-200:]}")
    return len(cases), failures


def pipes(place, options):
    failures = []
    for pipe in PIPES[:3] if options.quick else PIPES:
        with tempfile.TemporaryDirectory(dir=place) as folder:
            command = f"{' '.join(words(place, 3))} {pipe}"
            done = subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, text=True)
            again = subprocess.run([*words(place, 3), "--resume"], cwd=folder, capture_output=True, text=True)
            if one_line(done.stderr) or again.returncode:
                failures.append(f"{pipe}: {done.stderr[-200:]}, then {again.returncode}")
    return len(PIPES[:3] if options.quick else PIPES), failures


def full_disk(place, options):
    """Limit the size of a file to one byte less than each file of a finished run has."""
    with tempfile.TemporaryDirectory(dir=place) as folder:
        subprocess.run(words(place, 3), cwd=folder, capture_output=True, check=True)
        files = [path for path in Path(folder, "run").rglob("*") if path.is_file() and path.stat().st_size > 1]
        sizes = {path.stat().st_size: str(path.relative_to(folder)) for path in files}
    failures = []
    for size, name in sorted(sizes.items())[::4 if options.quick else 1]:
        with tempfile.TemporaryDirectory(dir=place) as folder:
            def limit(size=size):
                resource.setrlimit(resource.RLIMIT_FSIZE, (size - 1, size - 1))
            done = subprocess.run(words(place, 3), cwd=folder, capture_output=True, text=True, preexec_fn=limit)
            again = subprocess.run([*words(place, 3), "--resume"], cwd=folder, capture_output=True, text=True)
            # report.html may be missing: a page never fails a run.
            if done.returncode not in (0, 2, 4) or one_line(done.stderr) or again.returncode:
                failures.append(f"{name}: status {done.returncode}, then {again.returncode}: {done.stderr[-300:]}")
    return len(sorted(sizes)[::4 if options.quick else 1]), failures


def bits(place, options):
    failures, draw = [], random.Random(0)
    with tempfile.TemporaryDirectory(dir=place) as folder:
        subprocess.run(words(place, 3), cwd=folder, capture_output=True, check=True)
        checkpoint = checkpoints(Path(folder, "run"))[-1]
        whole = read_state(checkpoint)
        files = sorted(path for path in checkpoint.rglob("*") if path.is_file())
        places = 100 if options.quick else 1000
        for number in range(places):
            path = files[number % len(files)]
            with open(path, "r+b") as file:
                at, bit = draw.randrange(path.stat().st_size), draw.randrange(8)
                file.seek(at)
                byte = file.read(1)
                file.seek(at)
                file.write(bytes([byte[0] ^ 1 << bit]))
                file.flush()
                try:
                    if read_state(checkpoint) != whole:
                        failures.append(f"{path.name}: bit {bit} of byte {at} changes the content")
                except UserError as error:
                    if path.name not in str(error) or "\n" in str(error):
                        failures.append(f"{path.name}: {error}")
                file.seek(at)
                file.write(byte)
    return places, failures


def ranks(place, options):
    tests = ["tests/extras/ranks/test_distributed.py", "-k", "dies or killed or signal", "-m", "slow or not slow"]
    command = [sys.executable, "-m", "pytest", "-q", "-n0", *tests]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    counts = {kind: int(n) for n, kind in re.findall(r"(\d+) (passed|failed|error)", done.stdout)}
    return sum(counts.values()), re.findall(r"^FAILED .*", done.stdout, flags=re.M)


SECTIONS = {"kills": kills, "signals": signals, "pipes": pipes, "full disk": full_disk, "bits": bits, "ranks": ranks}


def keep(results):
    """Put the sections into bench/results/faults.json, where another process may put others."""
    path = RESULTS / "faults.json"
    path.touch()
    with open(path, "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        kept = json.loads(file.read() or "{}") | results
        kept["settings"] = fingerprint(settings_of("faults"))
        file.seek(0)
        file.truncate()
        file.write(json.dumps(kept, indent=1) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few cases of each section")
    parser.add_argument("--sections", default=",".join([*SECTIONS, "inputs"]),
                        help="inputs is short for all of bench/fault_inputs.py, whose sections can be named as well")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--every", type=int, default=1, help="of the inputs, try each n-th case only")
    options = parser.parse_args()
    options.every = 25 if options.quick else options.every
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    about = {"seed": 0, "machine": f"{os.cpu_count()} cores, no GPU", "date": datetime.date.today().isoformat(),
             "commit": commit.strip()}
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        model, tokenizer = make_tiny()
        model.save_pretrained(place / "base")
        tokenizer.save_pretrained(place / "base")
        for name in options.sections.replace("inputs", ",".join(fault_inputs.SECTIONS)).split(","):
            if name in fault_inputs.SECTIONS:
                section = fault_inputs.run_sections([name], options.every)[name]
                section["command"] = f"python bench/faults.py --sections '{name}' --every {options.every}"
            else:
                began = time.time()
                tried, failures = SECTIONS[name](place, options)
                section = {"tried": tried, "failed": len(failures), "examples": failures[:5],
                           "seconds": round(time.time() - began),
                           "command": f"python bench/faults.py --sections '{name}'"}
                if name == "kills":
                    section["command"] += f" --kills {options.kills}"
                print(f"{name:12} tried {tried:5}  failed {len(failures):3}", flush=True)
            results[name] = {**section, **about}
            if not options.quick:
                keep({name: results[name]})
    print(json.dumps(results))
    sys.exit(any(section["failed"] for section in results.values()))


if __name__ == "__main__":
    main()
