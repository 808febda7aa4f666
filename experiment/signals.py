"""SIGINT (Ctrl-C), SIGTERM and SIGHUP (a closed terminal) end a run where nothing is lost."""
import os
import signal
import threading

from experiment.errors import Stop

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
NOTICE = b"\nstopping where nothing is lost; a second signal stops at once\n"


class Signals:
    """While this is open, in the main thread, the first signal ends the run where nothing is lost.

    Inside the training loop that is before the step's first update or at the end of the step, and
    outside of it at once. A second signal ends the process at once. The first run that is made
    inside takes part; runs that are made inside that run are a part of it.
    """

    def __enter__(self):
        self.signum = self.run = None
        self.previous = {}
        if threading.current_thread() is threading.main_thread():
            for signum in HANDLED:
                # Under nohup SIGHUP is ignored, and so it stays.
                if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:
                    self.previous[signum] = signal.signal(signum, self.handle)
        return self

    def __exit__(self, *_):
        for signum, handler in self.previous.items():
            signal.signal(signum, handler)

    def handle(self, signum, _):
        if self.signum:
            os._exit(128 + signum)
        self.signum = signum
        if not (self.run and self.run.looping):
            raise self.stop()
        try:
            # print() may not be called again while it is interrupted, os.write() may.
            os.write(2, NOTICE)
        except OSError:
            pass

    @property
    def name(self):
        """The name of the signal that came."""
        return signal.Signals(self.signum).name

    def stop(self):
        """Return the Stop that ends the process."""
        how_to_continue = self.run.how_to_continue() if self.run else ""
        return Stop(f"stopped by {self.name}{how_to_continue}", 128 + self.signum)


def active_signals():
    """Return the open Signals that no run belongs to yet, or None."""
    handler = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    return handler if isinstance(handler, Signals) and not handler.run else None
