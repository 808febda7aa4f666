"""Single-turn text tasks of the package verifiers (0.4 or later), with their own reward functions.

    --env verifiers:reverse_text

The name is that of an installed taskset; options are the plain fields of its config. A tenth of its
first 10,000 tasks, by the hash of the prompt, is the test split.
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
        name = cls.__name__
        try:
            taskset = vf.load_taskset(vf.taskset_config_type(name)(id=name, **cls.options))
            rows = list(islice(taskset, 10_000))
        # The code is a stranger's: no network, a value that pydantic refuses.
        except Exception as error:
            raise UserError(f"verifiers:{name}: {first_line(error)}") from None
        rewards = [inspect.signature(reward).parameters for reward in rows[0].hooks("reward")]
        if (vf.environment_class(name) is not vf.SingleAgentEnv
                or taskset.toolsets(taskset.config) or rows[0].toolsets(rows[0].config)
                or type(rows[0]).setup is not vf.Task.setup
                or any("runtime" in parameters for parameters in rewards)):
            raise UserError(f"verifiers:{name} needs tools, a runtime or turns that verifiers "
                            "plays itself; only prompts that are answered once are played here")
        return rows

    def reset(self, number: int, **_) -> str:
        self._task = self._rows()[number]
        self.system_prompt = self._task.data.system_prompt
        self.reward = 0.0
        self._reward_parts = {}
        self._solved = False
        return self._task.data.prompt_text

    def get_reward(self) -> float:
        return self.reward

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

    @classmethod
    def _tasks(cls, split: str, n: int | None, seed: int) -> list[dict]:
        tests = [zlib.crc32(row.data.prompt_text.encode()) % 10 == 0 for row in cls._rows()]
        return [{"number": number} for number in shuffled(range(len(tests)), seed)
                if tests[number] == (split == "test")][:n]


@cache
def make(name: str) -> type:
    """Return the environment of a taskset."""
    try:
        fields = vf.taskset_config_type(name)(id=name).model_dump()
    # The name is of another kind of module, or a field has no default.
    except Exception as error:
        raise UserError(f"verifiers:{name}: {first_line(error)}") from None
    options = {field: value for field, value in fields.items()
               if field != "id" and isinstance(value, bool | int | float | str)}
    return type(name, (Question,), {"options": options})
