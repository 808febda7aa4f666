"""The event loop in which all async methods of environments run.

All share one loop, in a thread of its own: a method that blocks holds up the others.
"""
import asyncio
import threading
from contextlib import suppress
from functools import cache

LOCK = threading.Lock()


def run(coroutine):
    """Return the result of a coroutine, which runs in the loop."""
    with LOCK:
        loop = _event_loop()
    return asyncio.run_coroutine_threadsafe(coroutine, loop).result()


@cache
def _event_loop():
    loop = asyncio.new_event_loop()

    def run_forever():
        while True:
            # The exit() of one method shall not end the loop of all.
            with suppress(SystemExit, KeyboardInterrupt):
                loop.run_forever()
    threading.Thread(target=run_forever, daemon=True).start()
    return loop
