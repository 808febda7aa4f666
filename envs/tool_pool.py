"""Tools run in threads while the model decodes other episodes; one that hangs is left behind."""
import asyncio
import inspect
import math
import queue
import threading
import time
from collections import Counter

import envs


def paid(env) -> float:
    """The world's running total, as a plain float: worlds count in NumPy's too, which JSON does not take. NaN: none."""
    try:
        return float(getattr(env, "reward", 0.0))
    except Exception:
        return math.nan  # Episode.finish says so; a tool's thread must not die of it


class ToolPool:
    """Daemon threads that run tool calls while the model decodes, and one event loop that all async tools share.

    Every job runs one episode's calls of one turn, in order. A thread that overruns is never joined: it is left behind
    and another one started in its place. RuntimeError once more than `max_abandoned` calls were left behind.
    """

    def __init__(self, threads: int, timeout: float, max_abandoned: int = 8):
        self.timeout, self.max_abandoned, self.abandoned = timeout, max_abandoned, 0
        self.jobs, self.threads, self.loop = queue.SimpleQueue(), 0, None
        self.target, self.calls, self.faults = threads, 0, []  # faults: of the tools' own, as `envs.call` names them

    def submit(self, env, calls) -> dict:
        if self.threads < self.target:
            self._start()
        if self.loop is None and any(inspect.iscoroutinefunction(envs.tools(env).get(c["name"])) for c in calls):
            self.loop = asyncio.new_event_loop()
            threading.Thread(target=self.loop.run_forever, daemon=True).start()
        job = {"env": env, "calls": calls, "results": [], "began": None, "done": threading.Event(), "abandoned": False}
        self.jobs.put(job)
        self.calls += len(calls)
        return job

    def wait(self, job, before: float) -> list[tuple[str, bool, float]]:
        """(text for the model, error, env.reward after it) of each call; blocks until done or a call overruns.

        before: env.reward before them, which is all that a call that overran is known to leave.
        """
        while not job["done"].is_set():
            began = job["began"]
            left = self.timeout if began is None else began + self.timeout - time.monotonic()
            if left > 0:
                job["done"].wait(left)
                continue
            job["abandoned"] = True
            self.abandoned += 1
            self._start()
            done = list(job["results"])
            if self.abandoned > self.max_abandoned:
                raise RuntimeError(f"{self.abandoned} tool calls overran --tool_timeout {self.timeout:g} s, the last "
                                   f"one {job['calls'][len(done)]['name']}; mend the tool or raise the limit")
            late = f"error: TimeoutError: no answer within {self.timeout:g} s"
            return done + [(late, True, done[-1][2] if done else before)] * (len(job["calls"]) - len(done))
        return job["results"]

    def _start(self):
        self.threads += 1
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self):
        while (job := self.jobs.get()) is not None and self._run(job):
            del job  # a thread that waits holds no result of 10 MB

    def _run(self, job) -> bool:
        for call in job["calls"]:
            job["began"] = time.monotonic()
            try:
                text, error = envs.call(job["env"], call["name"], call["arguments"], self.loop, self.faults)
            except BaseException as fault:  # KeyboardInterrupt raised by the tool: signals come to the main thread
                text, error = f"error: {type(fault).__name__}", True
            if job["abandoned"]:
                return False  # a new thread has taken this one's place
            job["results"].append((text, error, paid(job["env"])))
        job["done"].set()
        return True

    def check(self):
        """RuntimeError if a fifth of the calls, of 20 at least, met one and the same fault of the tools' own."""
        fault, times = Counter(self.faults).most_common(1)[0] if self.faults else ("", 0)
        if times > 0.2 * max(self.calls, 20):
            raise RuntimeError(f"{fault} in {times} of {self.calls} calls: it is broken, and the model cannot help it; "
                               "what is the model's fault a tool returns as text, or raises as ValueError")

    def close(self):
        for _ in range(self.threads):
            self.jobs.put(None)
        if self.loop:
            self.loop.call_soon_threadsafe(self.loop.stop)
