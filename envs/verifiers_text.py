"""Single-turn text tasks of the package verifiers (0.4 or later), with their own reward functions.

    --env verifiers:reverse_text

The name is that of an installed taskset, of which the first 10,000 tasks are taken. Options are the
plain fields of its config.
"""
import inspect
from functools import cache
from operator import attrgetter

import verifiers.v1 as vf

from envs.calls import awaited
from envs.numbered import Numbered
from experiment.data import reading
from llm.tool_calls import after_thought


class Question(Numbered):
    """A prompt, answered once in text. The reward is the weighted sum of the task's rewards."""

    _question = attrgetter("data.prompt_text")

    @classmethod
    @cache
    def _entries(cls) -> list:
        """Return the tasks of the taskset with these options, if they need no more than a text."""
        name = cls.__name__
        taskset = vf.load_taskset(vf.taskset_config_type(name)(id=name, **cls.options))
        tasks = list(taskset.take(10_000))
        rewards = [inspect.signature(reward).parameters for reward in tasks[0].hooks("reward")]
        if (vf.environment_class(name) is not vf.SingleAgentEnv or taskset.toolsets(taskset.config)
                or tasks[0].toolsets(tasks[0].config) or type(tasks[0]).setup is not vf.Task.setup
                or type(tasks[0]).finalize is not vf.Task.finalize
                or any(isinstance(t.data.prompt, list) and len(t.data.prompt) > 1 for t in tasks)
                or any("runtime" in parameters for parameters in rewards)):
            raise ValueError("it needs tools, a runtime or turns that verifiers plays itself")
        return tasks

    @property
    def system_prompt(self) -> str | None:
        return self._entry.data.system_prompt

    def _reply(self, text: str) -> None:
        """Score the answer, which ends the episode. Solved means that every reward is in full."""
        data = self._entry.data
        prompt = vf.MessageNode(message=vf.UserMessage(content=data.prompt_text))
        said = vf.AssistantMessage(content=after_thought(text).strip())
        answer = vf.MessageNode(message=said, parent=0, sampled=True)
        trace = vf.Trace(task=vf.TraceTask(type="", data=data), nodes=[prompt, answer],
                         agent=vf.AgentInfo(config=vf.AgentConfig()))
        awaited(self._entry.score(trace))
        self.reward = trace.reward
        self._reward_parts = {name: reward.value for name, reward in trace.rewards.items()}
        self._solved = all(reward.score >= 1 for reward in trace.rewards.values())


@cache
def make(name: str) -> type:
    """Return the environment of a taskset."""
    with reading(f"verifiers:{name}"):
        fields = dict(vf.taskset_config_type(name)(id=name))
    del fields["id"]
    # A bool is an int.
    plain = int | float | str
    options = {key: value for key, value in fields.items() if isinstance(value, plain)}
    return type(name, (Question,), {"options": options})
