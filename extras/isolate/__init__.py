"""Isolated sessions: each environment lives in a thread of its own, and its calls have a time-out.

`sessions` overrides envs.session.sessions, with the same signature. `Session` is the plain one with
every method made in a thread: what the model reads and what is paid is the same to the byte.

The code of an environment is not ours. It may raise, exit, or never return. Whatever it does ends
at most its own episode, until it happens so often that the environment must be broken:

    ten faults in a row             the run ends. A fault is what a tool raises, too, unless it is a
                                    ValueError or the like (BY_ARGUMENTS), so return what a wrong
                                    path or query leads to as text
    a call that does not return     its thread is left behind; a tool's answer is an error text, and
                                    any other call ends its episode. Nine in a rollout end that
    one that holds Python's lock    the process ends with a traceback that names the tool
    nearly all episodes fail        of ten or more, three in four by a fault: the run ends
    one that raises EnvironmentFault
                                    the run ends: no model can help a server that is gone
    tools that replace sys.stdout   the run ends, because their results may be mixed up
    a signal during a slow call     it is handled at once (`run.check`)

All calls of an episode, the constructor's too, come from one thread. Async ones run in a loop, and
thread, that all episodes share. Episodes overlap: what one changes of the process, such as
sys.stdout, the others meet. The policy decodes while tools run, so a tool asks a model of its own,
in one thread at a time, or a server; `_reply` and --rewards may ask the policy, because nothing
decodes meanwhile.

An instance that holds something with a close(), such as a client, is kept and reset for a later
episode, as TRL does with all. Without this layer every episode makes its own.
"""
import faulthandler
import io
import queue
import re
import sys
import threading
import time
import weakref
from collections import Counter, defaultdict
from concurrent import futures
from contextlib import contextmanager, suppress
from functools import partial

import envs.session
from core.config import EnvironmentFault, UserError
from envs.calls import message_of
from envs.session import EpisodeFault

MAX_FAULTS = 10  # calls of one kind in a row that all meet a fault: the environment is broken
MAX_FAILED = 0.75  # the share of MAX_FAULTS or more episodes: what is left teaches nothing
MAX_ABANDONED = 8  # calls of one rollout that may be left behind in their threads
HANG_SECONDS = 30  # beyond the time-out in which no thread ran: a call holds Python's lock
# What a tool raises about the arguments that it was given.
BY_ARGUMENTS = ValueError, TypeError, LookupError, ArithmeticError, SyntaxError, AssertionError
MIXED = ("tools replaced sys.stdout (contextlib.redirect_stdout?) while those of other episodes "
         "ran, in threads of the same process, so that their results are mixed up; hold a "
         "threading.Lock of the module meanwhile, or run such code in a process of its own")
# What a client says where a server has fewer sessions than there are episodes at once.
CLOSED = re.compile("ConnectionClosed|ConnectionReset|ConnectionAborted|BrokenPipe"
                    "|RemoteDisconnected"
                    "|(connection|session|socket).*(closed|reset|limit|capacity|full)", re.I | re.S)
ONE_SESSION = ("; a server that has a single session closes the connections of all other episodes: "
               "start it with a session for each episode that is played at once (OpenEnv: "
               "max_concurrent_envs)")


@contextmanager
def sessions(limits, run=None):
    """Yield the function make(name, cls, task) that makes the sessions of a rollout.

    A signal to the `run` ends the wait for a call. Raises EnvironmentFault, at the end or as soon
    as too many calls were left behind.
    """
    with Watch(limits.tool_timeout, run) as watch:
        yield partial(Session, watch)
    watch.judge()
    watch.check()


class Watch:
    """What the sessions of a rollout share: the time-out, the count of faults, and a timer.

    A call that never releases the interpreter's lock, such as a catastrophic regular expression,
    stops all threads: neither the time-out nor a signal is handled. The timer of faulthandler
    needs no lock. It prints where each thread is, which names the tool, and ends the process. While
    other threads run, one of them starts it anew each second.
    """

    def __init__(self, timeout: float, run=None):
        self.timeout = timeout
        self.run = run
        self.is_open = None  # until it is entered, which /solve never does; afterwards False
        self.running = set()  # the sessions that are in a call now
        self.is_timed = False  # the timer runs
        self.lock = threading.Lock()
        self.abandoned = []  # the calls that did not return in time
        self.broken = None  # why no result can be relied on, in words
        # Of all rollouts of a run: faults in a row by kind of call, episodes that were "played" and
        # "failed" since there were enough of them to judge by, and by the name of an environment
        # the workers whose instances wait for their next episode.
        kept = run.kept if run else {}
        self.faults = kept.setdefault("faults", Counter())
        self.episodes = kept.setdefault("episodes", Counter())
        self.last_fault = ""
        self.idle = kept.setdefault("idle", defaultdict(list))

    def count(self, kind, fault: str | None):
        """Count that a call of this kind met a fault, or none."""
        self.faults[kind] = self.faults[kind] + 1 if fault else 0
        if self.faults[kind] >= MAX_FAULTS:
            self.broken = (
                f"{MAX_FAULTS} faults in a row: the environment is broken, and the model cannot "
                "help it; what is the model's fault a tool returns as text, or raises as "
                f"ValueError; the last: {fault}{advice(fault)}")

    def judge(self):
        """Note that the environment is broken if nearly all episodes ended by a fault."""
        played, failed = self.episodes["played"], self.episodes["failed"]
        if played < MAX_FAULTS:
            return
        self.episodes.clear()
        if failed >= MAX_FAILED * played:
            self.broken = self.broken or (
                f"{failed} of {played} episodes ended by a fault of their environment, and what is "
                f"left teaches nothing; the last: {self.last_fault}{advice(self.last_fault)}")

    def check(self):
        """Raise EnvironmentFault if the environment is broken."""
        if self.broken:
            raise EnvironmentFault(self.broken)

    def __enter__(self):
        self.is_open = True
        self.stdout = sys.stdout
        threading.Thread(target=self._keep_alive, daemon=True).start()
        return self

    def __exit__(self, *_):
        with self.lock:
            self.is_open = False
            faulthandler.cancel_dump_traceback_later()
            # Calls that overlap and each put back what they met leave another's buffer behind.
            if isinstance(sys.stdout, io.StringIO) and sys.stdout is not self.stdout:
                self.broken = MIXED
            sys.stdout = self.stdout

    def _keep_alive(self):
        while self.is_open:
            with self.lock:
                self._set_timer()
            time.sleep(1)

    def _set_timer(self):
        """Start the timer anew if calls run, else stop it."""
        if self.is_open:
            faulthandler.cancel_dump_traceback_later()
            self.is_timed = bool(self.running)
            if self.is_timed:
                faulthandler.dump_traceback_later(self.timeout + HANG_SECONDS, exit=True, file=2)

    def call_began(self, session):
        """Start the timer unless it runs. Raise SystemExit if nobody waits for this call."""
        if session.timed_out or self.is_open is False:
            # This thread was left behind. It must not change anything any more.
            raise SystemExit
        with self.lock:
            self.running.add(session)
            if not self.is_timed:
                self._set_timer()

    def call_ended(self, session):
        # `_keep_alive` stops the timer. To start and stop it with each call took half of the time
        # that scripted experts take to play.
        with self.lock:
            self.running.discard(session)

    def leave(self, place: str):
        """Note the call that was left behind. Raise EnvironmentFault if a rollout has too many."""
        self.abandoned.append(place)
        if self.is_open and len(self.abandoned) > MAX_ABANDONED:
            raise EnvironmentFault(
                f"{len(self.abandoned)} calls did not return within {self.timeout:g} s, the last "
                f"one {place}; fix it, or let the environment state a longer tool_timeout in its "
                "`limits`")


class Session(envs.session.Session):
    """A session whose calls are made in a thread. One that is late is left behind there.

    The environment then still sits in that call, and is not touched again (`timed_out`).
    """

    def __init__(self, watch: Watch, name: str, cls: type, task: dict):
        super().__init__(name, cls, task)
        self.watch = watch
        self.failed = False
        # A server begins its episodes in several threads.
        with watch.lock:
            watch.episodes["played"] += 1
            idle = watch.idle[name]
            self.worker = idle.pop() if idle else Worker()
        self.env = self.worker.env
        weakref.finalize(self, keep, self.worker, idle)

    def start(self):
        first = super().start()
        self.worker.env = self.env
        return first

    def submit(self, calls):
        super().submit(calls)
        if not self.timed_out:
            self._begin(Session._play)

    def results(self):
        if self.timed_out:
            return [("error: the tool is still busy", True, 0.0)] * len(self.calls)
        self._wait()
        results = self._read_answers()
        if not self.timed_out:
            self._check()
        late = f"error: TimeoutError: no answer within {self.watch.timeout:g} s"
        return results + [(late, True, 0.0)] * (len(self.calls) - len(results))

    def reply(self, text):
        return (None, 0.0) if self.timed_out else super().reply(text)

    def score(self):
        return (self.reward, {}, False) if self.timed_out else super().score()

    def _read_answers(self) -> list[tuple[str, bool, float]]:
        """Return the results of the calls that have ended, and count the faults in them."""
        # Errors have tracebacks, whose frames hold the session: it must not hold them.
        results, answers, self.answers = [], list(self.answers), []
        for call, (text, error, gain) in zip(self.calls, answers):
            results.append((text, error is not None, gain))
            # Other exceptions are not explained by the arguments: no network, a typo in the tool.
            # Nor are some ValueErrors: the sandbox does not start, signals need the main thread.
            if (isinstance(error, UserError) or "main thread" in str(error)
                    or not isinstance(error, BY_ARGUMENTS)):
                fault = error and f"{self.place(call['name'])} raised {message_of(error)}"
                self.watch.count((self.name, call["name"]), fault)
        return results

    def _ask(self, method, *arguments):
        self._begin(method, *arguments)
        self._wait()
        self._check()
        return self.outcome.result()

    def _enter(self, member: str):
        """Begin the call of a member, in the thread: its time-out starts now."""
        self.watch.call_began(self)
        super()._enter(member)
        self.began = time.monotonic()

    # --------------------------------------------------------------------------- around the thread
    def _begin(self, method, *arguments):
        """Start the method in the thread."""
        # No tool has such a name.
        self.phase = method.__qualname__
        self.began = time.monotonic()
        outcome = self.outcome = futures.Future()

        def run():
            try:
                outcome.set_result(method(self, *arguments))
            # KeyboardInterrupt too: signals come to the main thread, the environment raised it.
            except BaseException as error:
                # Its traceback would hold the session.
                outcome.set_exception(error.with_traceback(None))
            self.watch.call_ended(self)
        self.worker.jobs.put(run)

    def _wait(self):
        """Wait for the thread. If one of its calls takes too long, it is left behind."""
        while not self.outcome.done():
            left = self.began + self.watch.timeout - time.monotonic()
            if left <= 0:
                self.timed_out = True
                self.worker.env = None
                self.watch.leave(self.place(self.member))
                break
            if self.watch.run:
                self.watch.run.check()
            with suppress(futures.TimeoutError):
                self.outcome.exception(min(left, 1))  # s

    def _check(self):
        """Raise EpisodeFault if the thread was left behind, or ended by an exception."""
        fault = error = None
        if self.timed_out:
            fault = f"{self.place(self.member)} did not return within {self.watch.timeout:g} s"
        elif isinstance(error := self.outcome.exception(), EnvironmentFault):
            # The environment says itself that it is broken.
            raise error
        elif error:
            fault = f"{self.place(self.member)} raised {message_of(error)}"
        self.watch.count((self.name, self.phase), fault)
        if fault:
            self.worker.env = None
            self.watch.episodes["failed"] += not self.failed
            self.watch.last_fault, self.failed = fault, True
            raise EpisodeFault(fault) from error


def advice(fault: str) -> str:
    """Return what to do about a fault that a closed connection explains, else nothing."""
    return ONE_SESSION if CLOSED.search(fault) else ""


class Worker:
    """The thread in which an environment lives, and the environment, None before it is made."""

    def __init__(self):
        self.env = None
        self.jobs = queue.SimpleQueue()
        threading.Thread(target=work, args=(self.jobs,), daemon=True).start()
        # The thread ends with its worker.
        weakref.finalize(self, self.jobs.put, None)


def work(jobs: queue.SimpleQueue):
    """Do the jobs of a worker one after another, until one is None."""
    while job := jobs.get():
        job()
        # Waiting for the next job must not keep the session alive.
        del job


def keep(worker: Worker, idle: list):
    """Keep an environment that holds something to be closed, such as a client, for other episodes.

    An OpenEnv client never gives back its session with the server, which has only so many. In TRL,
    too, such an environment is made once and reset often.
    """
    if any(hasattr(value, "close") for value in getattr(worker.env, "__dict__", {}).values()):
        idle.append(worker)
