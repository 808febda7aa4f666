"""Every call into an environment: in a thread, with a time-out, counted.

The code of an environment is not ours. It may raise, exit, or never return. Whatever it does ends at most its own
episode, until it happens so often that the environment must be broken.
"""
import asyncio
import inspect
import math
import queue
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial

from envs.calls import call as call_tool
from envs.calls import tools
from experiment.errors import EnvironmentFault

MAX_ABANDONED = 8  # calls of one rollout that may be left behind in their threads
MAX_FAULTS = 0.2  # share of the calls of one kind that may end in one and the same fault
MIN_CALLS = 20  # fewer calls than this count as this many


@dataclass(eq=False)
class Job:
    """Calls into one environment that run one after another in one thread.

    Attributes:
        steps: the name of the member and a function without arguments, for each call.
        results: what the calls returned that have ended.
        error: the exception that ended the job before its last call, or None.
        abandoned: a call did not return in time, and its thread was left behind.
    """

    steps: list
    results: list = field(default_factory=list)
    error: BaseException | None = None
    abandoned: bool = False
    began: float | None = None
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def member(self) -> str:
        """The name of the call that runs now, or that failed."""
        return self.steps[min(len(self.results), len(self.steps) - 1)][0]

    def run(self):
        """Run the calls. Threads that were left behind change nothing any more."""
        for _, function in self.steps:
            self.began = time.monotonic()
            try:
                result = function()
            # KeyboardInterrupt too: signals come to the main thread, so this one was raised by the environment.
            except BaseException as error:
                self.error = error
                break
            if self.abandoned:
                return
            self.results.append(result)
        self.ended.set()


class ToolPool:
    """Daemon threads in which tools run while the model decodes other episodes.

    A thread that overruns is never joined: it is left behind, and another one takes its place. All async tools share
    one event loop in a thread of its own.
    """

    def __init__(self, classes, threads: int, timeout: float):
        self.timeout = timeout
        self.max_threads = threads
        self.threads = 0
        self.abandoned = 0
        self.last_abandoned = ""
        self.calls = Counter()  # by kind: "tool", "reset()", ...
        self.faults = Counter()  # by (kind, what happened)
        self.first_fault = {}  # (kind, what happened) -> the whole message
        self.jobs = queue.SimpleQueue()
        self.loop = None
        methods = [method for cls in classes for method in tools(cls).values()]
        if any(inspect.iscoroutinefunction(method) for method in methods):
            self.loop = asyncio.new_event_loop()
            threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def submit(self, job: Job):
        """Run the job in one of the threads, as soon as one is free."""
        if self.threads < self.max_threads:
            self.start_thread()
        self.jobs.put(job)

    def run(self, job: Job):
        """Run the job in a thread of its own, and wait for it. Busy tools do not delay it."""
        threading.Thread(target=job.run, daemon=True).start()
        return self.wait(job)

    def wait(self, job: Job) -> bool:
        """Wait until the job has ended. Return False if one of its calls overran and was left behind."""
        while not job.ended.is_set():
            began = job.began
            left = self.timeout if began is None else began + self.timeout - time.monotonic()
            if left > 0:
                job.ended.wait(left)
                continue
            job.abandoned = True
            self.abandoned += 1
            return False
        return True

    def count(self, kind: str, fault: str, message: str):
        """Remember a fault of the environment for `check`."""
        self.faults[kind, fault] += 1
        self.first_fault.setdefault((kind, fault), message)

    def check_abandoned(self):
        """Raise EnvironmentFault if too many calls were left behind."""
        if self.abandoned > MAX_ABANDONED:
            raise EnvironmentFault(
                f"{self.abandoned} calls did not return within {self.timeout:g} s, the last one "
                f"{self.last_abandoned}; fix it, or let the environment state a longer tool_timeout in its `limits`")

    def check(self):
        """Raise EnvironmentFault if too many calls met the same fault."""
        for (kind, fault), times in self.faults.items():
            calls = self.calls[kind]
            if times > MAX_FAULTS * max(calls, MIN_CALLS):
                message = self.first_fault[kind, fault]
                raise EnvironmentFault(f"{fault} in {times} of {calls} calls: it is broken, and the model cannot help "
                                       f"it; what is the model's fault a tool returns as text, or raises as "
                                       f"ValueError; the first: {message}")

    def close(self):
        """Let the idle threads end."""
        for _ in range(self.threads):
            self.jobs.put(None)
        if self.loop:
            self.loop.call_soon_threadsafe(self.loop.stop)

    def start_thread(self):
        """Start a thread, also in place of one that was left behind."""
        self.threads += 1
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self):
        while (job := self.jobs.get()) is not None:
            job.run()
            if job.abandoned:
                return
            # A thread that waits must not keep a result of 10 MB alive.
            del job


class Session:
    """One environment during one episode, and the only way to call into it.

    Every method but `submit` waits. Each raises EnvironmentFault if the environment fails.

    Attributes:
        reward: the environment's running total as of the last call, as a plain float; NaN if it is no number.
        done: True once the environment has ended the episode.
        stuck: True once a call was left behind. The environment still sits in it and is not touched again.
    """

    def __init__(self, pool: ToolPool, name: str, cls: type, task: dict):
        self.pool = pool
        self.name = name
        self.cls = cls
        self.task = {key: value for key, value in task.items() if key != "env"}
        self.env = None
        self.reward = 0.0
        self.done = False
        self.stuck = False

    # ------------------------------------------------------------------ what an episode asks for
    def start(self) -> tuple[str, str | None, int]:
        """Make and reset the environment. Return the question, the system prompt and max_turns."""
        _, question, system_prompt, max_turns, _ = self._ask(
            ("__init__()", self._make),
            ("reset()", lambda: self.env.reset(**self.task)),
            ("system_prompt", lambda: self._get("system_prompt")),
            ("max_turns", lambda: int(self._get("max_turns", 8))),
            ("reward", self._gain))
        self._check_text("reset()", question)
        self._check_text("system_prompt", system_prompt)
        return question or "", system_prompt, max_turns

    def submit(self, calls: list[dict]) -> Job:
        """Start the tool calls of a turn in a thread. They run one after another."""
        steps = []
        for call in calls:
            steps.append(("done", self._read_done))
            steps.append((call["name"], partial(self._call, call)))
            steps.append(("reward", self._gain))
        steps.append(("done", self._read_done))
        job = Job(steps)
        self.pool.calls["tool"] += len(calls)
        if not self.stuck:
            self.pool.submit(job)
        return job

    def results(self, job: Job) -> list[tuple[str, bool, float]]:
        """Return text for the model, error flag, and gain of reward of each call of a job of `submit`."""
        calls = len(job.steps) // 3
        if self.stuck:
            return [("error: the tool is still busy", True, 0.0)] * calls
        in_time = self.pool.wait(job)
        answers, gains = job.results[1::3], job.results[2::3]
        results = [(text, error, gain) for (text, error), gain in zip(answers, gains)]
        if in_time:
            self._raise_error(job)
            return results
        self.pool.start_thread()
        self._abandon(job)
        is_tool = len(job.results) % 3 == 1
        if not is_tool:
            raise self._fault(job.member, self._late())
        late = f"error: TimeoutError: no answer within {self.pool.timeout:g} s"
        return results + [(late, True, 0.0)] * (calls - len(results))

    def reply(self, text: str) -> tuple[str | None, float]:
        """Return the message to an answer without a tool call, None if there is none, and the gain of reward."""
        if self.stuck:
            return None, 0.0
        reply, gain, _ = self._ask(
            ("_reply()", lambda: self._get("_reply", lambda text: None)(text)),
            ("reward", self._gain),
            ("done", self._read_done))
        self._check_text("_reply()", reply)
        return reply, gain

    def score(self) -> tuple[float, dict, bool]:
        """Return the total reward of the episode, its parts, and whether the task was solved."""
        if self.stuck:
            return self.reward, {}, False
        total, parts, solved = self._ask(
            ("get_reward()", lambda: float(self.env.get_reward())),
            ("_reward_parts", lambda: {k: float(v) for k, v in self._get("_reward_parts", {}).items()}),
            ("_check()", self._check))
        return total, parts, total > 0 if solved is None else solved

    def expert(self) -> str | list[dict]:
        """Return the next turn of the scripted demonstrator."""
        turn, = self._ask(("_expert()", lambda: self.env._expert()))
        return turn

    def place(self, member: str) -> str:
        """Return the words that name environment, member and task."""
        return f"environment {self.name}: {member} on task {str(self.task)[:200]}"

    # -------------------------------------------------------------------- what runs in the threads
    def _make(self):
        self.env = self.cls()

    def _get(self, name, default=None):
        return getattr(self.env, name, default)

    def _read_done(self):
        self.done = bool(self._get("done", False))

    def _check(self) -> bool | None:
        return bool(self.env._check()) if hasattr(self.env, "_check") else None

    def _gain(self) -> float:
        """Return what the running total gained since the last call."""
        before = self.reward
        value = self._get("reward", 0.0)
        try:
            # Environments also count in NumPy's numbers, which JSON does not take.
            self.reward = float(value)
        except (TypeError, ValueError):
            self.reward = math.nan
        return self.reward - before

    def _call(self, call) -> tuple[str, bool]:
        faults = []
        try:
            text, error = call_tool(self.env, call["name"], call["arguments"], self.pool.loop, faults)
        except BaseException as fault:
            text, error = f"error: {type(fault).__name__}", True
            faults.append(f"{call['name']} raised {type(fault).__name__}")
        for fault in faults:
            self.pool.count("tool", fault, self.place(call["name"]))
        return text, error

    # ---------------------------------------------------------------------------------- and faults
    def _ask(self, *steps) -> list:
        """Return what the calls return."""
        job = Job(list(steps))
        self.pool.calls.update(member for member, _ in steps)
        if not self.pool.run(job):
            self._abandon(job)
            raise self._fault(job.member, self._late())
        self._raise_error(job)
        return job.results

    def _abandon(self, job):
        self.stuck = True
        self.done = False
        self.pool.last_abandoned = self.place(job.member)

    def _late(self) -> str:
        return f"did not return within {self.pool.timeout:g} s"

    def _check_text(self, member, text):
        if not isinstance(text, str | None):
            kind = type(text).__name__
            raise self._fault(member, f"gave {kind} {text!r:.60}, it must be text or None", f"gave {kind}")

    def _raise_error(self, job):
        """Raise EnvironmentFault if a call of the job raised."""
        if job.error is None:
            return
        name = type(job.error).__name__
        try:
            text = str(job.error)[:300]
        except Exception:
            text = "its text cannot be made"
        raise self._fault(job.member, f"raised {name}: {text}", f"raised {name}")

    def _fault(self, member: str, what: str, kind: str | None = None) -> EnvironmentFault:
        """Count a fault, and return it as an exception. Faults of one kind are counted together."""
        message = f"{self.place(member)} {what}"
        self.pool.count(member, f"{member} {kind or what}", message)
        return EnvironmentFault(message)
