"""A program: what the command line starts, and how it ends."""
import os
import shlex
import sys

from core.command_line import parse
from core.errors import Printable, RankLost, first_line
from core.files import is_disk_full
from extras.show.notes import path_of
from extras.exact.process import Signals, is_out_of_memory


def main(config_class, train, doc):
    """Run `train` with the config of the command line, and exit.

    What ends the run is printed in one line, after what the last line of the log was. Exit status:

        0       the run is finished
        1       out of memory; or an error of ours or of a library, with its traceback
        2       something the user can fix
        3       three updates in a row that were not finite
        4       the disk is full
        5       another rank is gone
        6       the environment is broken
        128+n   signal n: 129 SIGHUP, 130 SIGINT, 143 SIGTERM
    """
    prepare_streams()
    words, code = "", 0
    try:
        with Signals() as signals:
            train(parse(config_class, sys.argv[1:], doc))
    except BaseException as error:
        words, code = _explain(error, signals, hasattr(config_class, "learning_rate"))
        if words is None:
            raise
    rank = os.environ.get("RANK", "0")
    if words:
        program = os.path.basename(sys.argv[0]) + ("" if rank == "0" else f": rank {rank}")
        print(f"{program}: {words}", file=sys.stderr)
    if os.environ.get("WORLD_SIZE", "1") != "1":
        # The threads of gloo may abort an orderly end.
        sys.stdout.flush()
        os._exit(code)
    if code:
        sys.exit(code)


def prepare_streams():
    """Let printing never fail, and the libraries draw their bars for a terminal alone."""
    # What the terminal cannot show is escaped, and every line is written at once, into a file too.
    sys.stdout.reconfigure(errors="backslashreplace", line_buffering=True)
    if hasattr(sys.stdin, "reconfigure"):  # that of a test has not
        sys.stdin.reconfigure(errors="replace")
    if not sys.stderr.isatty():
        for library in ("HF_HUB", "HF_DATASETS"):
            os.environ.setdefault(f"{library}_DISABLE_PROGRESS_BARS", "1")


def _explain(error, signals, trains):
    """Return (one line, exit status) for what ended a program; None if a traceback is better."""
    run = signals.run
    notes = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
    reason = " ".join(str(error).split())
    if isinstance(error, RankLost) and signals.signum:
        return f"stopped by {signals.name}{notes}", 128 + signals.signum
    if isinstance(error, Printable):
        return reason + notes, error.code
    if is_disk_full(error):
        then = f"; earlier checkpoints are whole; make room, then: {run.command}" if run else ""
        return f"the disk is full ({reason}){then}", 4
    if is_out_of_memory(error):
        fits = "what would fit: " + shlex.join(["python", path_of("bench/memory.py"), *sys.argv])
        if not trains:
            fits = "lower --num_tasks, --group_size or --max_tokens, or give --dtype bfloat16"
        return f"out of memory: {first_line(error)}; {fits}{notes}", 1
    if isinstance(error, BrokenPipeError):  # of `| head`
        return f"nobody reads the output{notes}", 1
    return None, 1
