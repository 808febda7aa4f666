"""Work that goes on in another thread, and the Future of what comes of it."""
import threading
from concurrent.futures import Future


def in_thread(act, *arguments) -> Future:
    """Let a thread call act(*arguments). It does not keep the process from ending."""
    def start(work):
        threading.Thread(target=work, daemon=True).start()
    return by(start, act, *arguments)


def by(start, act, *arguments) -> Future:
    """Let `start`, a function that gets a function, have act(*arguments) called."""
    future = Future()

    def work():
        # False where nobody waits any more.
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(act(*arguments))
            except BaseException as error:
                future.set_exception(error)
                # A signal has to end the main thread.
                if threading.current_thread() is threading.main_thread() and not isinstance(
                        error, Exception):
                    raise
    start(work)
    return future
