"""Every call into an environment: in a thread, with a time-out, counted.

The code of an environment is not ours. It may raise, exit, or never return. Whatever it does ends
at most its own episode, until it happens so often that the environment must be broken.
"""
import asyncio
import inspect
import math
import threading
import time
from collections import Counter
from functools import partial

from envs.calls import call as call_tool
from envs.calls import tools
from experiment.errors import EnvironmentFault

MAX_ABANDONED = 8  # calls of one rollout that may be left behind in their threads
MAX_FAULTS = 0.2  # share of the calls of one kind that may meet one and the same fault
MIN_CALLS = 20  # fewer calls than this count as this many


class Watch:
    """What the environments of a rollout share: the time-out, the count of faults, an event loop.

    All async tools run in one loop, which has a thread of its own.
    """

    def __init__(self, classes, timeout: float):
        self.timeout = timeout
        self.calls = Counter()  # by kind: "tool", "reset()", ...
        self.faults = Counter()  # by (kind, what happened)
        self.first = {}  # (kind, what happened) -> the whole message
        self.abandoned = []  # the calls that did not return in time
        self.loop = None
        methods = [method for cls in classes for method in tools(cls).values()]
        if any(map(inspect.iscoroutinefunction, methods)):
            self.loop = asyncio.new_event_loop()
            threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def count(self, kind: str, fault: str, message: str):
        """Remember a fault of an environment for `check`."""
        self.faults[kind, fault] += 1
        self.first.setdefault((kind, fault), message)

    def check_abandoned(self):
        """Raise EnvironmentFault if too many calls were left behind."""
        if len(self.abandoned) > MAX_ABANDONED:
            raise EnvironmentFault(
                f"{len(self.abandoned)} calls did not return within {self.timeout:g} s, the last "
                f"one {self.abandoned[-1]}; fix it, or let the environment state a longer "
                "tool_timeout in its `limits`")

    def check(self):
        """Raise EnvironmentFault if too many calls met the same fault."""
        for (kind, fault), times in self.faults.items():
            calls = self.calls[kind]
            if times > MAX_FAULTS * max(calls, MIN_CALLS):
                raise EnvironmentFault(
                    f"{fault} in {times} of {calls} calls: it is broken, and the model cannot help "
                    "it; what is the model's fault a tool returns as text, or raises as "
                    f"ValueError; the first: {self.first[kind, fault]}")

    def close(self):
        """End the thread of the event loop."""
        if self.loop:
            self.loop.call_soon_threadsafe(self.loop.stop)


class Job(threading.Thread):
    """Calls into one environment that run one after another in a thread.

    A thread that overruns is never joined, because nothing can end it: it is left behind.

    Attributes:
        steps: the name of the member and a function without arguments, for each call.
        results: what the calls returned that have ended.
        error: the exception that ended the job before its last call, or None.
        abandoned: True once the thread was left behind. It changes nothing any more.
    """

    def __init__(self, steps: list):
        super().__init__(daemon=True)
        self.steps = steps
        self.results = []
        self.error = None
        self.abandoned = False
        self.began = time.monotonic()

    def run(self):
        for _, function in self.steps:
            self.began = time.monotonic()
            try:
                result = function()
            # KeyboardInterrupt too: signals come to the main thread, the environment raised it.
            except BaseException as error:
                self.error = error
                return
            if self.abandoned:
                return
            self.results.append(result)

    def wait(self, timeout: float) -> bool:
        """Wait until the job has ended. Return False if one of its calls took longer."""
        while self.is_alive():
            left = self.began + timeout - time.monotonic()
            if left <= 0:
                self.abandoned = True
                return False
            self.join(left)
        return True

    @property
    def member(self) -> str:
        """The name of the call that runs now, or that failed."""
        return self.steps[min(len(self.results), len(self.steps) - 1)][0]


class Session:
    """One environment during one episode, and the only way to call into it.

    Every method raises EnvironmentFault if the environment fails.

    Attributes:
        reward: the running total as of the last call, as a plain float; NaN if it is no number.
        done: True once the environment has ended the episode.
        stuck: True once a call was left behind. The environment still sits in it, and is not
            touched again.
    """

    def __init__(self, watch: Watch, name: str, cls: type, task: dict):
        self.watch = watch
        self.name = name
        self.cls = cls
        self.task = {key: value for key, value in task.items() if key != "env"}
        self.env = None
        self.reward = 0.0
        self.done = False
        self.stuck = False

    def start(self) -> tuple[str, str | None, int]:
        """Make and reset the environment. Return the question, the system prompt and max_turns."""
        _, question, system_prompt, max_turns, _ = self._ask(
            ("__init__()", self._make),
            ("reset()", lambda: self._text(self.env.reset(**self.task))),
            ("system_prompt", lambda: self._text(self._get("system_prompt"))),
            ("max_turns", lambda: int(self._get("max_turns", 8))),
            ("reward", self._gain))
        return question or "", system_prompt, max_turns

    def submit(self, calls: list[dict]) -> Job:
        """Start the tool calls of a turn in a thread. They run one after another."""
        steps = []
        for call in calls:
            steps.append(("done", self._read_done))
            steps.append((call["name"], partial(self._call, call)))
            steps.append(("reward", self._gain))
        job = Job([*steps, ("done", self._read_done)])
        self.watch.calls["tool"] += len(calls)
        if not self.stuck:
            job.start()
        return job

    def results(self, job: Job) -> list[tuple[str, bool, float]]:
        """Return text for the model, error flag, and gain of reward of each call of a job."""
        calls = len(job.steps) // 3
        if self.stuck:
            return [("error: the tool is still busy", True, 0.0)] * calls
        in_time = job.wait(self.watch.timeout)
        answers, gains = job.results[1::3], job.results[2::3]
        results = [(text, error, gain) for (text, error), gain in zip(answers, gains)]
        is_tool = len(job.results) % 3 == 1
        if in_time or not is_tool:
            self._check_job(job)
            return results
        self._abandon(job)
        late = f"error: TimeoutError: no answer within {self.watch.timeout:g} s"
        return results + [(late, True, 0.0)] * (calls - len(results))

    def reply(self, text: str) -> tuple[str | None, float]:
        """Return the message to an answer without a tool call, or None, and the gain of reward."""
        if self.stuck:
            return None, 0.0
        reply, gain, _ = self._ask(
            ("_reply()", lambda: self._text(self._get("_reply", lambda text: None)(text))),
            ("reward", self._gain),
            ("done", self._read_done))
        return reply, gain

    def score(self) -> tuple[float, dict, bool]:
        """Return the total reward of the episode, its parts, and whether the task was solved."""
        if self.stuck:
            return self.reward, {}, False
        total, parts, solved = self._ask(
            ("get_reward()", lambda: float(self.env.get_reward())),
            ("_reward_parts", self._read_parts),
            ("_check()", lambda: hasattr(self.env, "_check") and (bool(self.env._check()),)))
        return total, parts, solved[0] if solved else total > 0

    def expert(self) -> str | list[dict]:
        """Return the next turn of the scripted demonstrator."""
        return self._ask(("_expert()", lambda: self.env._expert()))[0]

    def place(self, member: str) -> str:
        """Return the words that name environment, member and task."""
        return f"environment {self.name}: {member} on task {str(self.task)[:200]}"

    # ------------------------------------------------------------------- what runs in the threads
    def _make(self):
        self.env = self.cls()

    def _get(self, name, default=None):
        return getattr(self.env, name, default)

    def _text(self, value) -> str | None:
        if not isinstance(value, str | None):
            raise TypeError(f"{value!r:.60} must be text or None")
        return value

    def _read_done(self):
        self.done = bool(self._get("done", False))

    def _read_parts(self) -> dict:
        return {name: float(value) for name, value in self._get("_reward_parts", {}).items()}

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

    def _call(self, call: dict) -> tuple[str, bool]:
        faults = []
        try:
            text, error = call_tool(
                self.env, call["name"], call["arguments"], self.watch.loop, faults)
        except BaseException as fault:
            text, error = f"error: {type(fault).__name__}", True
            faults.append(f"{call['name']} raised {type(fault).__name__}")
        for fault in faults:
            self.watch.count("tool", fault, self.place(call["name"]))
        return text, error

    # --------------------------------------------------------------------------------- and faults
    def _ask(self, *steps) -> list:
        """Return what the calls return."""
        job = Job(list(steps))
        self.watch.calls.update(member for member, _ in steps)
        job.start()
        job.wait(self.watch.timeout)
        self._check_job(job)
        return job.results

    def _abandon(self, job: Job):
        self.stuck = True
        self.done = False
        self.watch.abandoned.append(self.place(job.member))

    def _check_job(self, job: Job):
        """Raise EnvironmentFault if a call of the job raised or did not return in time."""
        if job.abandoned:
            self._abandon(job)
            kind = what = f"did not return within {self.watch.timeout:g} s"
        elif job.error is not None:
            kind = f"raised {type(job.error).__name__}"
            what = f"{kind}: {message_of(job.error)}"
        else:
            return
        message = f"{self.place(job.member)} {what}"
        self.watch.count(job.member, f"{job.member} {kind}", message)
        raise EnvironmentFault(message)


def message_of(error: BaseException) -> str:
    """Return the text of an exception, which environments may make unprintable."""
    try:
        return str(error)[:300]
    except Exception:
        return "(without a text)"
