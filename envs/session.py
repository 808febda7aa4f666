"""One environment during one episode: start, submit, results, reply, score and expert.

Here every call is made in this process, and the program waits until it returns. extras/isolate
overrides `sessions`: the same calls are made in a thread for each environment, with a time-out.
"""
from contextlib import contextmanager
from copy import deepcopy
from functools import wraps

import envs
from core.config import EnvironmentFault
from core.tool_calls import check_call
from envs.calls import awaited, call_tool, is_done, message_of


@contextmanager
def sessions(limits, run=None):
    """Yield make(name, cls, task), which makes a session. extras/isolate needs limits and run."""
    yield Session


class EpisodeFault(EnvironmentFault):
    """A fault of the environment that ends one episode. Other faults end the rollout."""


def asks(method):
    """Wrap a method of Session that calls into the environment (`Session._ask`)."""
    @wraps(method)
    def wrapped(self, *arguments):
        return self._ask(method, *arguments)
    return wrapped


class Session:
    """One environment during one episode, and the only way to call into it.

    A tool that fails answers with an error text. Any other failure raises EpisodeFault.

    Attributes:
        env: the instance, which `start` makes unless an earlier one is to be used again.
        notes: what belongs into the episode's info: "states" if the environment has _state().
        pays: False without get_reward(): `reward` then is the environment's own affair, as in TRL.
        reward: the running total as of the last call, as a plain float: what turns were paid.
        done: True once the environment has ended the episode.
        timed_out: True once a call did not return in time, which only extras/isolate notices.
        member: what is called now, such as "reset()" or the name of a tool.
    """

    timed_out = False

    def __init__(self, name: str, cls: type, task: dict):
        self.name = name
        self.cls = cls
        self.task = {key.removeprefix(envs.COLUMN): value for key, value in task.items()
                     if key != "env"}
        self.env = None
        self.notes = {}
        self.pays = hasattr(cls, "get_reward")
        self.reward = 0.0
        self.done = False
        self.member = "__init__()"

    @asks
    def start(self) -> tuple[list[dict], int]:
        """Make and reset the environment. Return the first messages and max_turns."""
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
        return messages, int(self._get("max_turns", 8))

    def submit(self, calls: list[dict]):
        """Take the tool calls of a turn. `results` runs them; extras/isolate starts them now."""
        self.calls = calls
        self.answers = []  # of the calls that have ended: text, exception or None, gain of reward

    def results(self) -> list[tuple[str, bool, float]]:
        """Return text for the model, error flag, and gain of reward of each call submitted."""
        self._ask(Session._play)
        return [(text, error is not None, gain) for text, error, gain in self.answers]

    @asks
    def reply(self, text: str) -> tuple[str | None, float]:
        """Return the message to an answer without a tool call, or None, and the gain of reward."""
        reply = self._get("_reply()")
        message = text_or_none(awaited(reply(text))) if reply else None
        gain = self._gain()
        self._read_done()
        return message, gain

    @asks
    def score(self) -> tuple[float, dict, bool]:
        """Return the total reward of the episode, its parts, and whether the task was solved."""
        total = float(awaited(self._get("get_reward()")())) if self.pays else 0.0
        parts = {name: float(value) for name, value in self._get("_reward_parts", {}).items()}
        check = self._get("_check()")
        # In floating point 0.1 + 0.2 - 0.3 is above 0.
        solved = bool(awaited(check())) if check else total > 1e-9
        return total, parts, solved

    @asks
    def expert(self) -> tuple[str, list[dict]]:
        """Return the text and the calls of the scripted demonstrator's next turn."""
        turn = awaited(self._get("_expert()")())
        if isinstance(turn, str):
            return turn, []
        return "", list(map(check_call, turn))

    def place(self, member: str) -> str:
        """Return the words that name environment, member and task."""
        return f"environment {self.name}: {member} on task {str(self.task)[:200]}"

    def _ask(self, method, *arguments):
        """Call a method of Session. What the environment raises becomes an EpisodeFault.

        Its own EnvironmentFault ends the rollout, and so the run.
        """
        try:
            return method(self, *arguments)
        except EnvironmentFault:
            raise
        except (Exception, SystemExit) as error:
            fault = f"{self.place(self.member)} raised {message_of(error)}"
            raise EpisodeFault(fault) from error

    def _enter(self, member: str):
        """Note what is called now."""
        self.member = member

    def _get(self, member: str, default=None):
        """Return a member that is used now: an attribute, or the method of "reset()"."""
        self._enter(member)
        return getattr(self.env, member.removesuffix("()"), default)

    def _play(self):
        """Run the calls of the turn one after another."""
        for call in self.calls:
            self._enter(call["name"])
            self.answers.append((*call_tool(self.env, **call), self._gain()))
        self._read_done()

    def _read_done(self):
        self._enter("done")
        self.done = is_done(self.env)
        # An attribute of this name is the environment's own affair.
        if callable(state := self._get("_state()")):
            self.notes.setdefault("states", []).append(str(awaited(state())))

    def _gain(self) -> float:
        """Return what the running total gained since the last call."""
        before = self.reward
        reward = self._get("reward", 0.0) if self.pays else 0.0
        # A tool may have this name. JSON does not take NumPy's numbers.
        self.reward = 0.0 if callable(reward) else float(reward)
        return self.reward - before


def text_or_none(value) -> str | None:
    """Return the value if it is text or None, else raise TypeError."""
    if not isinstance(value, str | None):
        raise TypeError(f"{value!r:.60} must be text or None")
    return value
