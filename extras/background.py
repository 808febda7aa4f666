"""Work that goes on in another thread, and the Future of what comes of it."""
import threading
from concurrent.futures import Future


def in_thread(act, *arguments) -> Future:
    """Let a thread call act(*arguments). It does not keep the process from ending."""
    future, work = promised(act, *arguments)
    threading.Thread(target=work, daemon=True).start()
    return future


def promised(act, *arguments):
    """Return a Future, and the function that calls act(*arguments) for it."""
    future = Future()
    # Whoever waits for it may give up. The work goes on.
    future.set_running_or_notify_cancel()

    def work():
        try:
            future.set_result(act(*arguments))
        except BaseException as error:
            future.set_exception(error)
            # A signal has to end the main thread.
            if threading.current_thread() is threading.main_thread() and not isinstance(
                    error, Exception):
                raise
    return future, work
