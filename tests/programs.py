"""Start programs in processes that are forked from one which has imported torch and our modules already.

A test of a whole program then costs its own work, and not the seconds of its imports. What a shell does before a program
starts, and what `torchrun` does, is tested with processes of their own.
"""
import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).parent.parent
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([
    "agent", "distill", "dpo", "grpo", "reward_weighted", "sft", "torch.distributed", "transformers.generation.utils", "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto", "transformers.models.qwen3.modeling_qwen3", "transformers.quantizers.auto"])
# The process that imports them finds them here; so do the programs that are no files of the top folder.
os.environ["PYTHONPATH"] = str(ROOT)


class Program:
    """A running program, with those methods of subprocess.Popen that the tests use.

    Args:
        words: the file of the program, or -m and a module, or -c and code, and its arguments.
        cwd: the folder that it starts in.
        stdin: the text on its standard input.
        environment: variables that differ from this process's; None takes a variable away.
    """

    def __init__(self, *words, cwd=ROOT, stdin="", **environment):
        self.folder = tempfile.TemporaryDirectory()
        for name, text in (("stdin", stdin), ("stdout", ""), ("stderr", "")):
            (Path(self.folder.name) / name).write_text(text)
        variables = {**os.environ, **environment}
        variables = {name: str(value) for name, value in variables.items() if value is not None}
        words = [str(word) for word in words]
        self.process = FORKS.Process(target=_program, args=(words, str(cwd), variables, self.folder.name))
        self.process.start()
        self.pid = self.process.pid

    @property
    def returncode(self):
        return self.process.exitcode

    def poll(self):
        return self.process.exitcode

    def kill(self):
        self.process.kill()

    def send_signal(self, signum):
        os.kill(self.pid, signum)

    def communicate(self, timeout=300):
        """Return what it wrote to stdout and stderr, once it has ended."""
        self.process.join(timeout)
        assert self.returncode is not None, f"still running after {timeout} s"
        return self.said("stdout"), self.said("stderr")

    def said(self, stream):
        return (Path(self.folder.name) / stream).read_text()


def run(*words, **options):
    """Run a program to its end. Returns its returncode, stdout and stderr, as subprocess.run does."""
    program = Program(*words, **options)
    out, errors = program.communicate()
    return SimpleNamespace(returncode=program.returncode, stdout=out, stderr=errors)


def _program(words, cwd, variables, folder):
    import episodes
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(variables)
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        os.dup2(os.open(f"{folder}/{name}", os.O_RDWR | os.O_APPEND), descriptor)
    sys.stdin = open(0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which `nohup pytest` ignores
    sys.argv = words
    episodes.HELD_OUT = 8  # as in conftest.py
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        exec(compile(words[1], "-c", "exec"), {"__name__": "__main__"})
    else:
        runpy.run_path(words[0], run_name="__main__")


# ------------------------------------------------------------------------------------ without our modules
# Forks run what `python` would. This process has imported what costs seconds, and nothing of ours.
SERVER = """
import json, os, runpy, sys, traceback
import torch.distributed, transformers.generation.utils, transformers.models.auto.modeling_auto
import transformers.models.auto.tokenization_auto, transformers.models.qwen3.modeling_qwen3, transformers.quantizers.auto
def run(words):
    sys.argv = words
    if words[0] != "-c":
        runpy.run_path(words[0], run_name="__main__")
    else:
        sys.argv = ["-c", *words[2:]]
        exec(compile(words[1], "-c", "exec"), {"__name__": "__main__"})
for line in sys.stdin:
    folder, words, *streams = json.loads(line)
    if pid := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
        continue
    os.chdir(folder)
    sys.path[0] = folder
    sys.stdin = open(os.devnull)
    for descriptor, name in enumerate(streams, 1):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), descriptor)
    status = 0
    try:
        run(words)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
"""


def environment():
    """Return this process's variables, but for our folder among those that imports come from."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**kept, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}


class Bare:
    """Programs of another tree, or those that are asked what they import: forks of a process that knows nothing of ours."""

    def __init__(self, place):
        self.place, self.calls = place, 0
        self.server = subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment())

    def run(self, *words, cwd=ROOT):
        """Run `python *words` in the folder. Returns its returncode, stdout and stderr."""
        self.calls += 1
        streams = [self.place / f"{self.calls}.{name}" for name in ("out", "err")]
        self.server.stdin.write(json.dumps([str(cwd), list(map(str, words)), *map(str, streams)]) + "\n")
        self.server.stdin.flush()
        status = int(self.server.stdout.readline())
        return SimpleNamespace(returncode=status, stdout=streams[0].read_text(), stderr=streams[1].read_text())

    def close(self):
        self.server.stdin.close()
        self.server.wait(60)
