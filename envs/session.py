"""Environments as episodes use them: each has a thread for all its calls, which have a time-out.

The code of an environment is not ours. It may raise, exit, or never return. Whatever it does ends
at most its own episode, until it happens so often that the environment must be broken.
"""
import faulthandler
import io
import queue
import sys
import threading
import time
import weakref
from collections import Counter, defaultdict
from concurrent import futures
from copy import deepcopy
from importlib import import_module

import envs
from envs.calls import BY_ARGUMENTS, awaited, call_tool, is_done, message_of
from core.config import EnvironmentFault, UserError
from core.chat import Chat
from core.tool_calls import check_call

MAX_ABANDONED = 8  # calls of one rollout that may be left behind in their threads
MAX_FAULTS = 10  # calls of one kind in a row that all meet a fault: the environment is broken
HANG_SECONDS = 30  # beyond the time-out in which no thread ran: a call holds Python's lock
MIXED = ("tools replaced sys.stdout (contextlib.redirect_stdout?) while those of other episodes "
         "ran, in threads of the same process, so that their results are mixed up; hold a "
         "threading.Lock of the module meanwhile, or run such code in a process of its own")


class Watch:
    """What the environments of a rollout share: the time-out, the count of faults, and a timer.

    A call that never releases the interpreter's lock, such as a catastrophic regular expression,
    stops all threads: neither the time-out nor a signal is handled. The timer of faulthandler
    needs no lock. It prints where each thread is, which names the tool, and ends the process. While
    other threads run, one of them starts it anew each second.

    Args:
        run: a `Run`. The count of its previous Watch continues, and a signal to it ends the wait
            for a call.
    """

    def __init__(self, timeout: float, run=None):
        self.timeout = timeout
        self.run = run
        earlier = run and run.watch
        self.is_open = None  # until it is entered, which /solve never does; afterwards False
        self.running = set()  # the sessions that are in a call now
        self.lock = threading.Lock()
        self.faults = earlier.faults if earlier else Counter()  # kind of call -> faults in a row
        # Name -> workers whose environments wait for their next episode.
        self.idle = earlier.idle if earlier else defaultdict(list)
        self.abandoned = []  # the calls that did not return in time
        self.broken = None  # why no result can be relied on, in words

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
            if self.running:
                faulthandler.dump_traceback_later(self.timeout + HANG_SECONDS, exit=True, file=2)

    def call_began(self, session):
        """Start the timer with the first call that runs. Raise SystemExit if nobody waits."""
        if session.stuck or self.is_open is False:
            # This thread was left behind. It must not change anything any more.
            raise SystemExit
        with self.lock:
            self.running.add(session)
            if len(self.running) == 1:
                self._set_timer()

    def call_ended(self, session):
        with self.lock:
            self.running.discard(session)
            if not self.running:
                self._set_timer()

    def count(self, kind, fault: str | None):
        """Count the faults in a row. A call of this kind met one, or none."""
        self.faults[kind] = self.faults[kind] + 1 if fault else 0
        if self.faults[kind] >= MAX_FAULTS:
            self.broken = (
                f"{MAX_FAULTS} faults in a row: the environment is broken, and the model cannot "
                "help it; what is the model's fault a tool returns as text, or raises as "
                f"ValueError; the last: {fault}")

    def check_abandoned(self):
        """Raise EnvironmentFault if too many calls were left behind."""
        if len(self.abandoned) > MAX_ABANDONED:
            raise EnvironmentFault(
                f"{len(self.abandoned)} calls did not return within {self.timeout:g} s, the last "
                f"one {self.abandoned[-1]}; fix it, or let the environment state a longer "
                "tool_timeout in its `limits`")

    def check(self):
        """Raise EnvironmentFault if results are mixed up, or calls met faults again and again."""
        if self.broken:
            raise EnvironmentFault(self.broken)


def load_environments(tokenizer, env_names, generation_config, env_options) -> tuple[dict, dict]:
    """Return the class and the Chat of every environment, by its name.

    They are those that the caller names: data never chooses which code runs. `env_options` are
    what `envs.options_of` returns.
    """
    classes = {name: envs.with_options(envs.load(name), env_options)
               for name in envs.names_of(env_names)}
    try:
        chats = {name: Chat(tokenizer, envs.schemas(cls), generation_config)
                 for name, cls in classes.items()}
    except ValueError as error:
        raise UserError(str(error)) from error
    return classes, chats


class Session:
    """One environment during one episode, and the only way to call into it.

    A tool that fails or is late answers with an error text. Other failures are EnvironmentFaults.

    Attributes:
        pays: False without get_reward(): `reward` then is the environment's own affair, as in TRL.
        reward: the running total as of the last call, as a plain float: what turns were paid.
        done: True once the environment has ended the episode.
        stuck: True once a call was left behind. The environment still sits in it, and is not
            touched again.
        member: what is called now, such as "reset()" or the name of a tool.
    """

    def __init__(self, watch: Watch, name: str, cls: type, task: dict):
        self.watch = watch
        self.name = name
        self.cls = cls
        self.pays = hasattr(cls, "get_reward")
        self.task = {key.removeprefix(envs.COLUMN): value for key, value in task.items()
                     if key != "env"}
        self.reward = 0.0
        self.done = False
        self.stuck = False
        self.member = "__init__()"
        # A server begins its episodes in several threads.
        with watch.lock:
            idle = watch.idle[name]
            self.worker = idle.pop() if idle else Worker()
        weakref.finalize(self, keep, self.worker, idle)

    def start(self) -> tuple[list[dict], int]:
        """Make and reset the environment. Return the first messages and max_turns."""
        return self._ask(self._start)

    def submit(self, calls: list[dict]):
        """Start the tool calls of a turn in the thread. They run one after another."""
        self.calls = calls
        self.answers = []
        if not self.stuck:
            self._begin(self._play)

    def results(self) -> list[tuple[str, bool, float]]:
        """Return text for the model, error flag, and gain of reward of each call submitted."""
        if self.stuck:
            return [("error: the tool is still busy", True, 0.0)] * len(self.calls)
        self._wait()
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
        if not self.stuck:
            self._check()
        late = f"error: TimeoutError: no answer within {self.watch.timeout:g} s"
        return results + [(late, True, 0.0)] * (len(self.calls) - len(results))

    def reply(self, text: str) -> tuple[str | None, float]:
        """Return the message to an answer without a tool call, or None, and the gain of reward."""
        return (None, 0.0) if self.stuck else self._ask(self._reply, text)

    def score(self) -> tuple[float, dict, bool]:
        """Return the total reward of the episode, its parts, and whether the task was solved."""
        return (self.reward, {}, False) if self.stuck else self._ask(self._score)

    def expert(self) -> tuple[str, list[dict]]:
        """Return the text and the calls of the scripted demonstrator's next turn."""
        return self._ask(self._expert)

    def place(self, member: str) -> str:
        """Return the words that name environment, member and task."""
        return f"environment {self.name}: {member} on task {str(self.task)[:200]}"

    # --------------------------------------------------------------------- what runs in the thread
    def _enter(self, member: str):
        """Begin the call of a member: its time-out starts now."""
        self.watch.call_began(self)
        self.member = member
        self.began = time.monotonic()

    def _get(self, member: str, default=None):
        """Begin to use a member, and return it: an attribute, or the method of "reset()"."""
        self._enter(member)
        return getattr(self.env, member.removesuffix("()"), default)

    def _start(self):
        self._enter("__init__()")
        if self.worker.env is None:
            self.worker.env = self.cls()
        self.env = self.worker.env
        # Its own copy: the other episodes of the task begin with what this one may change.
        task = deepcopy(envs.taken(self.cls, self.task))
        observation = text_or_none(awaited(self._get("reset()")(**task))) or ""
        system_prompt = text_or_none(self._get("system_prompt"))
        self._read_done()
        self.member = "reset()"
        if self.done:
            raise ValueError("done is still True after it")
        messages = [{"role": "user", "content": observation}]
        if "prompt" in self.task:
            messages = import_module(envs.TRL).opening(self.env.reset, self.task, observation)
        if system_prompt and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": system_prompt})
        if not any(message["content"] for message in messages):
            raise ValueError("reset() returned no question and there is no system_prompt or prompt")
        max_turns = int(self._get("max_turns", 8))
        if max_turns < 1:
            raise ValueError(f"max_turns is {max_turns}, and must be at least 1")
        return messages, max_turns

    def _play(self):
        for call in self.calls:
            self._enter(call["name"])
            self.answers.append((*call_tool(self.env, **call), self._gain()))
        self._read_done()

    def _reply(self, text):
        reply = self._get("_reply()")
        message = text_or_none(awaited(reply(text))) if reply else None
        gain = self._gain()
        self._read_done()
        return message, gain

    def _score(self):
        total = float(awaited(self._get("get_reward()")())) if self.pays else 0.0
        parts = {name: float(value) for name, value in self._get("_reward_parts", {}).items()}
        check = self._get("_check()")
        # In floating point 0.1 + 0.2 - 0.3 is above 0.
        solved = bool(awaited(check())) if check else total > 1e-9
        return total, parts, solved

    def _expert(self):
        turn = awaited(self._get("_expert()")())
        if isinstance(turn, str):
            return turn, []
        return "", [check_call(call) for call in turn]

    def _read_done(self):
        self._enter("done")
        self.done = is_done(self.env)

    def _gain(self) -> float:
        """Return what the running total gained since the last call."""
        before = self.reward
        # Environments also count in NumPy's numbers, which JSON does not take.
        reward = self._get("reward", 0.0) if self.pays else 0.0
        # A tool may have this name.
        self.reward = 0.0 if callable(reward) else float(reward)
        return self.reward - before

    # --------------------------------------------------------------------------- and around it
    def _begin(self, function, *arguments):
        """Start the function in the thread."""
        self.phase = function.__name__
        self.began = time.monotonic()
        outcome = self.outcome = futures.Future()

        def run():
            try:
                outcome.set_result(function(*arguments))
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
                self.stuck = True
                self.worker.env = None
                self.watch.abandoned.append(self.place(self.member))
                break
            if self.watch.run:
                self.watch.run.check()
            futures.wait([self.outcome], min(left, 1))  # s

    def _check(self):
        """Raise EnvironmentFault if the thread was left behind, or ended by an exception."""
        fault = error = None
        if self.stuck:
            fault = f"{self.place(self.member)} did not return within {self.watch.timeout:g} s"
        elif error := self.outcome.exception():
            fault = f"{self.place(self.member)} raised {message_of(error)}"
        self.watch.count((self.name, self.phase), fault)
        if fault:
            self.worker.env = None
            raise EnvironmentFault(fault) from error

    def _ask(self, function, *arguments):
        """Call the function in the thread, and return what it returns."""
        self._begin(function, *arguments)
        self._wait()
        self._check()
        return self.outcome.result()


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


def text_or_none(value) -> str | None:
    """Return the value if it is text or None, else raise TypeError."""
    if not isinstance(value, str | None):
        raise TypeError(f"{value!r:.60} must be text or None")
    return value
