"""Run Python code that a model wrote, in a process of its own that the kernel confines.

    result = run("def double(x): return 2 * x", [("double", [21])])
    same(result.outcomes[0].get("value"), 42)

Every call starts one process and ends it (sandbox_child.py). It sees no environment variable, no
file but Python's library and the system's shared libraries, no network and no other process, and
it can start nothing. Only values, as JSON, and the text that it printed come out of it. What is
right is decided here: the expected values never enter the process. Where the machine cannot confine
it, nothing runs, unless `unsafe` says so.

What the code can still do: use up the limits below, and find out which files exist.
"""
import json
import marshal
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from core.config import UserError

SECONDS = 6.0  # of a whole call, from start to end
OUTPUT = 64 * 2**10  # bytes that are printed, and bytes of values
LIMITS = {  # of the child, by rlimit: bytes of address space, seconds, bytes of a file, files
    "AS": 512 * 2**20, "CPU": 5, "FSIZE": OUTPUT, "NOFILE": 64, "CORE": 0}
CHILD = Path(__file__).with_name("sandbox_child.py")
# -S: no site-packages, -s: none of the user's, -B: writes no .pyc, -u: prints at once.
COMMAND = [sys.executable, "-S", "-s", "-B", "-u", "-X", "utf8", str(CHILD)]
# Without a fixed seed of hashes the order of sets, and so output and reward, differ between calls.
ENVIRONMENT = {"PYTHONHASHSEED": "0"}


@dataclass
class Result:
    """What came of a run.

    Attributes:
        status: "ok"; "error": the code raised an exception; "timeout": it was killed at a limit of
            time; "crash": the process ended without a report.
        error: the exception, or how the process ended; "" if all is well.
        output: what was printed, at most OUTPUT bytes. Addresses in it are replaced by 0x...
        outcomes: of each call {"value": ..., "operations": int or None, "text": the value as Python
            shows it, cut} or {"error": text}. There are fewer if the process ended before. As
            values sets come as {"set": [...]}, dicts as {"dict": pairs} and tuples as lists. The
            code may have forged them.
    """

    status: str
    error: str = ""
    output: str = ""
    outcomes: list[dict] = field(default_factory=list)


def run(code: str, calls=(), *, seconds: float = SECONDS, count: bool = False,
        unsafe: bool = False) -> Result:
    """Run code, and then call functions that it defines.

    Args:
        calls: (name, list of plain arguments) of each call, in this order in the same process.
        seconds: the process is killed after so many.
        count: count the lines that each call executes, as its operations. They are the same every
            time, and None if the code stopped the counter. It may have done so unnoticed.
        unsafe: run the code without confinement.

    Raises UserError if the process cannot be started or cannot be confined.
    """
    job = {"code": code, "calls": calls, "count": count, "unsafe": unsafe,
           "limits": LIMITS, "parent": os.getpid()}
    try:
        with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as printed:
            stdin.write(marshal.dumps(job))
            stdin.seek(0)
            report, end = _run_child(stdin, printed, seconds)
            printed.seek(0)
            output = without_addresses(printed.read(OUTPUT).decode(errors="replace"))
    except OSError as error:
        raise UserError(f"the sandbox did not start: {error}") from None
    records = _records(report[:OUTPUT])
    if not records and end != "timeout":
        why = output.strip().rpartition("\n")[2] or end
        raise UserError(
            f"this machine cannot confine the Python code of a model ({why}). Run on Linux 5.13 "
            "or newer, WSL2 and Docker on Linux included; or leave out what runs code (--env "
            "code, tools=calculator+python); or give --unsafe_code, which runs it with NO "
            "protection and is recorded")
    # The first line was written before the code began, the others perhaps by the code.
    loading, *outcomes = records[1:2 + len(calls)] or [{}]
    if "error" in loading:
        return Result("error", without_addresses(str(loading["error"])), output)
    if loading and len(outcomes) == len(calls):
        return Result("ok", "", output, outcomes)
    if end == "timeout":
        return Result("timeout", f"killed after {seconds:g} s", output, outcomes)
    return Result("crash", f"the process ended early: {end}", output, outcomes)


@cache
def check_sandbox(unsafe: bool):
    """Raise UserError if this machine cannot run a model's code as `run` does."""
    run("pass", unsafe=unsafe)


def _run_child(stdin, printed, seconds: float) -> tuple[bytes, str]:
    """Return what the child reported and how it ended: "timeout", or other words."""
    with subprocess.Popen(COMMAND, stdin=stdin, stdout=subprocess.PIPE, stderr=printed, cwd="/",
                          env=ENVIRONMENT, start_new_session=True) as child:
        timer = threading.Timer(seconds, _kill_group, (child.pid,))
        timer.start()
        try:
            # At its end the process closes its side of the pipe.
            report = child.stdout.read(OUTPUT + 1)
        finally:
            timer.cancel()
            _kill_group(child.pid)
    if len(report) > OUTPUT:
        return report, f"values of more than {OUTPUT} bytes"
    if child.returncode == -signal.SIGKILL:
        # Killed above, or by the kernel at the limit of CPU seconds.
        return report, "timeout"
    return report, f"status {child.returncode}" if child.returncode else "no report"


def _kill_group(pid: int):
    """Kill a child and what it has started. Of a child that has ended macOS says EPERM."""
    with suppress(PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _records(report: bytes) -> list[dict]:
    """Return the JSON objects, one a line, up to the first line that is none."""
    records = []
    # Forged lines may be nested deeply, hold huge numbers, or be no text.
    with suppress(ValueError, RecursionError):
        for line in report.split(b"\n")[:-1]:
            record = json.loads(line)
            if not isinstance(record, dict):
                break
            records.append(record)
    return records


def without_addresses(text: str) -> str:
    """Return the text with 0x... in place of addresses, which differ in every process."""
    return re.sub("0x[0-9a-fA-F]{6,}", "0x...", text)


def same(value, wanted) -> bool:
    """True if a value out of `Result.outcomes` is the wanted one.

    The types must be the same: True is not 1. But a tuple is a list, and an int and a float may
    stand for each other: 240.0 is 240. Floats agree within a relative 1e-6, and NaN is never right.
    Keys and elements of dicts and sets may come in any order.
    """
    if isinstance(wanted, float):
        try:
            return type(value) in (int, float) and math.isclose(value, wanted, rel_tol=1e-6,
                                                                abs_tol=1e-9)
        except OverflowError:  # an int larger than any float
            return False
    if isinstance(wanted, list | tuple):
        return (isinstance(value, list) and len(value) == len(wanted)
                and all(map(same, value, wanted)))
    if isinstance(wanted, set | frozenset | dict):
        name = "set"
        if isinstance(wanted, dict):
            name, wanted = "dict", list(wanted.items())
        items = isinstance(value, dict) and value.get(name)
        return (isinstance(items, list) and len(items) == len(wanted)
                and all(any(same(item, want) for item in items) for want in wanted))
    # MBPP's own solutions divide, and return 240.0 where the test says 240.
    if type(wanted) is int and type(value) is float:
        return value == wanted
    return type(value) is type(wanted) and value == wanted
