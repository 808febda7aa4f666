"""One environment during one episode: start, submit, results, reply, score and expert.

Here every call is made in this process, and the program waits until it returns. extras/isolate
overrides `sessions`: the same calls are made in a thread for each environment, with a time-out.
"""
from collections import Counter
from contextlib import contextmanager
from copy import deepcopy
from functools import partial

import envs
from core.config import EnvironmentFault, UserError, say_once
from core.data import print_dropped
from core.tool_calls import check_call
from envs.calls import BY_ARGUMENTS, awaited, call_tool, is_done, message_of

MAX_FAULTS = 10  # calls of one kind in a row that all meet a fault: the environment is broken


@contextmanager
def sessions(limits, run=None):
    """Yield the function make(name, cls, task) that makes the sessions of a rollout.

    Afterwards raise EnvironmentFault if the environment turned out to be broken.
    """
    faults = Faults(run)
    yield partial(Session, faults)
    faults.check()


class EpisodeFault(EnvironmentFault):
    """A fault of the environment that ends one episode. Others end the rollout."""


class Faults:
    """Counts the faults of environments in a row, by kind of call, over all rollouts of a run."""

    def __init__(self, run=None):
        kept = run.kept if run else {}
        self.counts = kept.setdefault("faults", Counter())
        self.broken = None  # why no result can be relied on, in words

    def count(self, kind, fault: str | None):
        """Count that a call of this kind met a fault, or none."""
        self.counts[kind] = self.counts[kind] + 1 if fault else 0
        if self.counts[kind] >= MAX_FAULTS:
            self.broken = (
                f"{MAX_FAULTS} faults in a row: the environment is broken, and the model cannot "
                "help it; what is the model's fault a tool returns as text, or raises as "
                f"ValueError; the last: {fault}")

    def check(self):
        """Raise EnvironmentFault if the environment is broken."""
        if self.broken:
            raise EnvironmentFault(self.broken)


class Session:
    """One environment during one episode, and the only way to call into it.

    A tool that fails answers with an error text. Any other failure raises EpisodeFault.

    Attributes:
        env: the instance, which `start` makes unless an earlier one is to be used again.
        pays: False without get_reward(): `reward` then is the environment's own affair, as in TRL.
        reward: the running total as of the last call, as a plain float: what turns were paid.
        done: True once the environment has ended the episode.
        timed_out: True once a call did not return in time. Only extras/isolate has a time-out.
        member: what is called now, such as "reset()" or the name of a tool.
    """

    timed_out = False

    def __init__(self, faults: Faults, name: str, cls: type, task: dict):
        self.faults = faults
        self.name = name
        self.cls = cls
        self.task = {key.removeprefix(envs.COLUMN): value for key, value in task.items()
                     if key != "env"}
        self.env = None
        self.pays = hasattr(cls, "get_reward")
        self.reward = 0.0
        self.done = False
        self.member = "__init__()"

    def start(self) -> tuple[list[dict], int]:
        """Make and reset the environment. Return the first messages and max_turns."""
        return self._ask(self._start)

    def submit(self, calls: list[dict]):
        """Take the tool calls of a turn. `results` runs them; extras/isolate starts them now."""
        self.calls = calls
        self.answers = []

    def results(self) -> list[tuple[str, bool, float]]:
        """Return text for the model, error flag, and gain of reward of each call submitted."""
        self._ask(self._play)
        return self._read_answers()

    def reply(self, text: str) -> tuple[str | None, float]:
        """Return the message to an answer without a tool call, or None, and the gain of reward."""
        return self._ask(self._reply, text)

    def score(self) -> tuple[float, dict, bool]:
        """Return the total reward of the episode, its parts, and whether the task was solved."""
        return self._ask(self._score)

    def expert(self) -> tuple[str, list[dict]]:
        """Return the text and the calls of the scripted demonstrator's next turn."""
        return self._ask(self._expert)

    def place(self, member: str) -> str:
        """Return the words that name environment, member and task."""
        return f"environment {self.name}: {member} on task {str(self.task)[:200]}"

    def _ask(self, function, *arguments):
        """Return what a function below returns. What the environment raises is an EpisodeFault."""
        kind = (self.name, function.__name__)
        try:
            answer = function(*arguments)
        except (Exception, SystemExit) as error:
            fault = f"{self.place(self.member)} raised {message_of(error)}"
            self.faults.count(kind, fault)
            raise EpisodeFault(fault) from error
        self.faults.count(kind, None)
        return answer

    # ------------------------------------------------------------ what calls into the environment
    def _enter(self, member: str):
        """Note what is called now."""
        self.member = member

    def _get(self, member: str, default=None):
        """Return a member that is used now: an attribute, or the method of "reset()"."""
        self._enter(member)
        return getattr(self.env, member.removesuffix("()"), default)

    def _start(self):
        self._enter("__init__()")
        if self.env is None:
            self.env = self.cls()
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
            # Most environments write the first message themselves.
            from envs.prompts import opening
            messages = opening(self.env.reset, self.task, observation)
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
                self.faults.count((self.name, call["name"]), fault)
        return results

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


def text_or_none(value) -> str | None:
    """Return the value if it is text or None, else raise TypeError."""
    if not isinstance(value, str | None):
        raise TypeError(f"{value!r:.60} must be text or None")
    return value


def without_too_long(trajectories: list, limits, or_raise: bool = True) -> list:
    """Drop the episodes that could not start, and print how many were dropped or failed.

    A note names a limit that is no flag (`envs.Limits`) and that more than a fifth met. Raises
    UserError if no episode could start, unless `or_raise` is False.
    """
    max_tokens = limits.max_tokens
    kept = [t for t in trajectories if t.stop_reason or len(t.token_ids) < max_tokens]
    if or_raise and trajectories and not kept:
        shortest = min(len(t.token_ids) for t in trajectories)
        raise UserError(f"environment {trajectories[0].info['env']}: the prompt has {shortest} "
                        f"tokens, --max_tokens is {max_tokens}")
    print_dropped(trajectories, kept,
                  f"episodes dropped: the prompt alone reaches --max_tokens {max_tokens}")
    failed = [t.info["error"] for t in kept if t.stop_reason == "error"]
    if failed:
        print(f"{len(failed)} of {len(kept)} episodes ended by a fault of their environment; "
              f"the first: {failed[0]}")
    met = Counter(t.stop_reason for t in kept)
    met["tool_timeout"] = sum(t.info.get("timeouts", 0) > 0 for t in kept)
    for name in ("max_tool_calls", "max_tool_tokens", "tool_timeout"):
        if met[name] > 0.2 * len(kept):
            say_once(f"note: more than a fifth of the episodes played at once met {name} "
                     f"{getattr(limits, name)}; the environment may state more in its `limits`")
    return kept
