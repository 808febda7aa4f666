"""This process: the signals that end it, and its memory."""
import errno
import os
import re
import shlex
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path

from core.config import Printable, first_line
from extras.stop import Stop

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# SIGINT is Ctrl-C, SIGHUP a closed terminal, which Windows does not have.
SIGHUP = getattr(signal, "SIGHUP", None)
HANDLED = [signal.SIGINT, signal.SIGTERM, *([SIGHUP] if SIGHUP else [])]
NOTICE = b"\nstopping where nothing is lost; a second signal stops at once\n"


class Signals:
    """While this is open, in the main thread, the first signal ends the run where nothing is lost.

    Inside the training loop that is before the step's first update or at the end of the step, and
    outside of it at once. A second signal ends the process at once.

    Attributes:
        active: the one that is open, or None.
        signum, name: those of the signal that came, or None.
        run: the first run that has begun inside. Its command continues all.
        looping: the run whose steps are taken now: `run`, or one inside it and a part of it.
    """

    active = signum = name = run = looping = None

    def __enter__(self):
        Signals.active = self
        self.previous = {}
        if threading.current_thread() is threading.main_thread():
            for signum in HANDLED:
                # Under nohup SIGHUP is ignored, and so it stays.
                if signum != SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:
                    self.previous[signum] = signal.signal(signum, self.handle)
        self.print_unraisable, sys.unraisablehook = sys.unraisablehook, self.send_again
        return self

    def __exit__(self, kind, error, traceback):
        Signals.active = None
        sys.unraisablehook = self.print_unraisable
        for signum, handler in self.previous.items():
            signal.signal(signum, handler)
        if end := self.end_of(error):
            raise end from error

    def handle(self, signum, _):
        if self.signum:
            os._exit(128 + signum)
        self.signum, self.name = signum, signal.Signals(signum).name
        if not self.looping:
            raise self.stop()
        with suppress(OSError):
            # print() may not be called again while it is interrupted, os.write() may.
            os.write(2, NOTICE)

    def send_again(self, unraisable):
        """Send a signal again that came in a callback of a weak reference: its Stop was lost."""
        if not isinstance(unraisable.exc_value, Stop):
            return self.print_unraisable(unraisable)
        signum, self.signum = self.signum, None
        threading.Timer(0.1, os.kill, [os.getpid(), signum]).start()

    def stop(self):
        """Return the Stop that ends the process."""
        how = ""
        if self.run:
            inside = self.looping or self.run
            where = "" if inside is self.run else f" in {inside.folder}"
            how = f" after step {inside.step}{where}; continue with: {self.run.command}"
        return Stop(f"stopped by {self.name}{how}", 128 + self.signum)

    def end_of(self, error):
        """Return the Stop that says what ended the program, or None if the error itself does."""
        notes = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
        if self.signum and isinstance(error, Printable) and isinstance(error, RuntimeError):
            # The signal ended another rank, or a process of the environment, too.
            return Stop(f"stopped by {self.name}{notes}", 128 + self.signum)
        if isinstance(error, BrokenPipeError):  # of `| head`
            return Stop("nobody reads the output", 1)
        if is_disk_full(error):
            then = ""
            if self.run:
                then = f"; earlier checkpoints are whole; make room, then: {self.run.command}"
            reason = " ".join(str(error).split())
            return Stop(f"the disk is full ({reason}){then}", 4)
        if is_out_of_memory(error):
            counter = str(Path(__file__).parents[2] / "bench" / "memory.py")
            # An environment may have left the current folder for one that is removed.
            with suppress(FileNotFoundError):
                counter = os.path.relpath(counter)
            fits = f"what would fit: {shlex.join(['python', counter, *sys.argv])}"
            if Path(sys.argv[0]).stem == "agent":
                fits = "lower --num_tasks, --group_size or --max_tokens, or give --dtype bfloat16"
            return Stop(f"out of memory: {first_line(error)}; {fits}{notes}", 1)


# ------------------------------------------------------------------------------ memory and the disk
def is_disk_full(error):
    """True if the error means a full disk. Python, safetensors and tokenizers give the number."""
    number = re.search(r"(?:\[Errno|os error) (\d+)", str(error))
    return number is not None and int(number[1]) in DISK_FULL


def is_out_of_memory(error):
    """True if memory was too small: Python's, NumPy's, a file's, or the allocators of torch."""
    words = "can't allocate memory", "CUDA error: out of memory", "Cannot allocate memory"
    return (isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
            or any(phrase in str(error) for phrase in words))
