"""Single-turn text tasks of the package verifiers (0.4 or later), with their own reward functions.

    --env verifiers:reverse_text

The name is that of an installed taskset. Options are the plain fields of its config, and `size`,
how many of its tasks are read. A tenth of them, by the hash of the prompt, is the test split.
"""
import inspect
import zlib
from functools import cache
from itertools import islice

import verifiers.v1 as vf

from envs.calls import awaited
from experiment.errors import UserError, first_line
from experiment.seeds import shuffled


class Question:
    """A prompt, answered once in text. The reward is the weighted sum of the task's rewards."""

    @classmethod
    @cache
    def _rows(cls) -> list:
        """Return the tasks of the taskset with these options."""
        fields = dict(cls.options)
        size = fields.pop("size")
        taskset = vf.load_taskset(vf.taskset_config_type(cls.__name__)(id=cls.__name__, **fields))
        rows = list(islice(taskset, size))
        rewards = [inspect.signature(reward) for reward in rows[0].hooks("reward")]
        needs = {
            "turns": vf.environment_class(cls.__name__) is not vf.SingleAgentEnv,
            "tools": taskset.toolsets(taskset.config) or rows[0].toolsets(rows[0].config),
            "a runtime": type(rows[0]).setup is not vf.Task.setup
            or any("runtime" in reward.parameters for reward in rewards)}
        if lacking := [need for need, is_needed in needs.items() if is_needed]:
            raise UserError(f"verifiers:{cls.__name__} needs {', '.join(lacking)} of verifiers; "
                            "only prompts that are answered once, in text, are played here")
        return rows

    def reset(self, number: int, **_) -> str:
        self._task = self._rows()[number]
        self.system_prompt = self._task.data.system_prompt
        self.reward = 0.0
        self._reward_parts = {}
        self._solved = False
        return self._task.data.prompt_text

    def _reply(self, text: str) -> None:
        """Score the answer, which ends the episode."""
        question = vf.MessageNode(message=vf.UserMessage(content=self._task.data.prompt_text))
        answer = vf.MessageNode(message=vf.AssistantMessage(content=text), parent=0, sampled=True)
        trace = vf.Trace(task=vf.TraceTask(type=type(self._task).__name__, data=self._task.data),
                         agent=vf.AgentInfo(config=vf.AgentConfig()), nodes=[question, answer])
        awaited(self._task.score(trace))
        self.reward = trace.reward
        self._reward_parts = {name: part.value for name, part in trace.rewards.items()}
        self._solved = all(part.score >= 1 for part in trace.rewards.values())

    def get_reward(self) -> float:
        return self.reward

    def _check(self) -> bool:
        """Return whether every reward function gave its full score, which is 1."""
        return self._solved

    @classmethod
    def _tasks(cls, split: str, n: int | None, seed: int) -> list[dict]:
        hashes = [zlib.crc32(task.data.prompt_text.encode()) for task in cls._rows()]
        return [{"number": number} for number in shuffled(range(len(hashes)), seed)
                if (hashes[number] % 10 == 0) == (split == "test")][:n]


@cache
def make(name: str) -> type:
    """Return the environment of a taskset."""
    try:
        fields = vf.taskset_config_type(name)(id=name).model_dump()
    except Exception as error:
        raise UserError(f"verifiers:{name}: {first_line(error)}") from None
    options = {key: value for key, value in fields.items()
               if key != "id" and isinstance(value, bool | int | float | str)}
    return type(name, (Question,), {"options": {**options, "size": 10_000}})
