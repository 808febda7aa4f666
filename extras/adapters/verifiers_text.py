"""Single-turn text tasks of the package verifiers (0.4 or later), with their own reward functions.

    --env verifiers:reverse_text

The name is that of an installed taskset, of which the first 10,000 tasks are taken. Options are the
plain fields of its config.
"""
from functools import cache
from operator import attrgetter

import verifiers.v1 as vf

from envs.calls import awaited, needed
from extras.adapters.numbered import Numbered
from core.config import reading
from core.tool_calls import after_thought


class Question(Numbered):
    """A prompt, answered once in text. The reward is the weighted sum of the task's rewards."""

    _question = attrgetter("data.prompt_text")
    system_prompt = property(attrgetter("_entry.data.system_prompt"))

    @classmethod
    @cache
    def _entries(cls) -> list:
        """Return the tasks of the taskset with these options, if they need no more than a text."""
        taskset = vf.load_taskset(vf.taskset_config_type(cls.__name__)(**cls.options))
        tasks = list(taskset.take(10_000))
        task, kind = tasks[0], type(tasks[0])
        if (vf.environment_class(cls.__name__) is not vf.SingleAgentEnv
                or taskset.toolsets(taskset.config) or task.toolsets(task.config)
                or (kind.setup, kind.finalize) != (vf.Task.setup, vf.Task.finalize)
                or any(isinstance(t.data.prompt, list) and len(t.data.prompt) > 1 for t in tasks)
                or any("runtime" in needed(reward) for reward in task.hooks("reward"))):
            raise ValueError("it needs tools, a runtime or turns that verifiers plays itself")
        return tasks

    def _reply(self, text: str) -> None:
        """Score the answer, which ends the episode. Solved means that every reward is in full."""
        prompt = vf.MessageNode(message=vf.UserMessage(content=self._question(self._entry)))
        said = vf.AssistantMessage(content=after_thought(text).strip())
        answer = vf.MessageNode(message=said, parent=0, sampled=True)
        trace = vf.Trace(task=vf.TraceTask(type="", data=self._entry.data), nodes=[prompt, answer],
                         agent=vf.AgentInfo(config=vf.AgentConfig()))
        awaited(self._entry.score(trace))
        self.reward = trace.reward
        self._reward_parts = {name: reward.value for name, reward in trace.rewards.items()}
        self._solved = all(reward.score >= 1 for reward in trace.rewards.values())


@cache
def make(name: str) -> type:
    """Return the environment of a taskset."""
    with reading(f"verifiers:{name}"):
        fields = dict(vf.taskset_config_type(name)(id=name)).items()
    # A bool is an int.
    options = {key: value for key, value in fields if isinstance(value, int | float | str)}
    return type(name, (Question,), {"options": options})
