"""Start programs in processes that are forked from one which has imported torch and our modules already.

A test of a whole program then costs its own work, and not the seconds of its imports. What a shell does before a program
starts, and what `torchrun` does, is tested with processes of their own.
"""
import multiprocessing
import os
import runpy
import signal
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
        words: the file of the program, and its arguments.
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
    runpy.run_path(words[0], run_name="__main__")
