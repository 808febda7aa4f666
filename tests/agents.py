"""Agents that play environments without a model: the scripted expert, and those that should earn less than it."""
import random
from functools import cache

import envs


def play(cls, agent, tasks) -> tuple[float, float]:
    """Return the mean reward of an agent and the share of tasks that it solves."""
    rewards, solved = [], []
    for task in tasks:
        env = cls()
        seen = [env.reset(**task)]
        for _ in range(env.max_turns):
            turn = agent(env, seen)
            if isinstance(turn, str):
                reply = env._reply(turn)
                if reply is None:
                    break
                seen.append(reply)
            else:
                seen += [envs.call(env, call["name"], call["arguments"])[0] for call in turn]
            if getattr(env, "done", False):
                break
        rewards.append(env.get_reward())
        solved.append(env._check())
        assert abs(sum(env._reward_parts.values()) - rewards[-1]) < 1e-9
    return sum(rewards) / len(tasks), sum(solved) / len(tasks)


def expert(env, seen):
    return env._expert()


def silent(env, seen):
    return ""


def repeating(env, seen):
    return seen[0]


schemas = cache(envs.schemas)


def at_random(env, seen):
    """Call any tool with words that were seen."""
    rng = random.Random(f"{seen}")
    tool = rng.choice(schemas(type(env)))["function"]
    arguments = {name: rng.randint(0, 9) if schema["type"] == "integer" else rng.choice(" ".join(seen).split()).strip(",.?:[]")
                 for name, schema in tool["parameters"]["properties"].items()}
    return [{"name": tool["name"], "arguments": arguments}]
