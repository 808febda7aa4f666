"""Single-turn text tasks of the package verifiers (0.4 or later), with their own reward functions.

    --env verifiers:reverse_text

The name is that of an installed taskset, of which the first 10,000 tasks are taken. Options are the
plain fields of its config.
"""
import inspect
from functools import cache
from itertools import islice

import verifiers.v1 as vf

from envs.calls import awaited
from envs.numbered import Numbered
from experiment.data import reading


class Question(Numbered):
    """A prompt, answered once in text. The reward is the weighted sum of the task's rewards."""

    @classmethod
    @cache
    def _entries(cls) -> list:
        """Return the tasks of the taskset with these options."""
        name = cls.__name__
        with reading(f"verifiers:{name}"):
            taskset = vf.load_taskset(vf.taskset_config_type(name)(id=name, **cls.options))
            tasks = list(islice(taskset, 10_000))
            first = tasks[0]
            rewards = [inspect.signature(reward).parameters for reward in first.hooks("reward")]
            if (vf.environment_class(name) is not vf.SingleAgentEnv
                    or taskset.toolsets(taskset.config) or first.toolsets(first.config)
                    or type(first).setup is not vf.Task.setup
                    or any("runtime" in parameters for parameters in rewards)):
                raise ValueError("it needs tools, a runtime or turns that verifiers plays itself; "
                                 "only prompts that are answered once are played here")
        return tasks

    @staticmethod
    def _question(task) -> str:
        return task.data.prompt_text

    def reset(self, number: int, **_) -> str:
        self._task = self._entries()[number]
        self.system_prompt = self._task.data.system_prompt
        self.reward = 0.0
        self._reward_parts = {}
        self._solved = False
        return self._task.data.prompt_text

    def _reply(self, text: str) -> None:
        """Score the answer, which ends the episode."""
        prompt = vf.UserMessage(content=self._task.data.prompt_text)
        answer = vf.AssistantMessage(content=text)
        trace = vf.Trace(task=vf.TraceTask(type="", data=self._task.data),
                         agent=vf.AgentInfo(config=vf.AgentConfig()),
                         nodes=[vf.MessageNode(message=prompt),
                                vf.MessageNode(message=answer, parent=0, sampled=True)])
        awaited(self._task.score(trace))
        self.reward = trace.reward
        self._reward_parts = {name: reward.value for name, reward in trace.rewards.items()}
        self._solved = all(reward.score >= 1 for reward in trace.rewards.values())

    def _check(self) -> bool:
        """Return whether every reward function gave 1, its full score."""
        return self._solved


@cache
def make(name: str) -> type:
    """Return the environment of a taskset."""
    with reading(f"verifiers:{name}"):
        fields = vf.taskset_config_type(name)(id=name).model_dump()
    options = {field: value for field, value in fields.items()
               if field != "id" and isinstance(value, bool | int | float | str)}
    return type(name, (Question,), {"options": options})
