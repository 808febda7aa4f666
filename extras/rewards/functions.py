"""The functions that --rewards names: those that are built in, and how all of them pay episodes."""
import asyncio
import math
import re
import traceback
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import groupby

import envs
from envs.answers import spaced
from envs.calls import awaited, message_of, needed
from envs.files import module_at
from extras.rewards.exact import exact, final_answer, references_of
from extras.rewards.judge import Judge, judge_of
from extras.rewards.trl import as_trl, is_of_trl, takes_all, turns_of
from core.config import UserError, nearest, reading, say_once
from core.data import is_finite

NGRAM = 3  # words of what counts as repeated
# How it was done: it does not say that a task was solved.
MANNERS = ("format", "tool_used", "length", "repetition")
SOFT_SHARE = 0.2  # of a turn's budget: DAPO's 4,096 of 20,480 tokens


# ---------------------------------------------------------------------------------------- built in
def environment(t) -> list[float]:
    """What the environment pays, turn by turn."""
    return t.rewards


def well_formed(t) -> float:
    """1 if every turn can be read: its calls parse, and no limit cut it. As in arXiv 2504.13958."""
    return float(t.info["parsed_turns"] == len(t.rewards))


def tool_used(t) -> float:
    """1 if a tool was called without an error and the task was solved.

    DeepEyes' conditional bonus, arXiv 2505.14362: without the condition, idle calls are learned. It
    needs get_reward() or _check(): without both, the rewards say afterwards what was solved.
    """
    tried = t.info["tool_calls"] + t.info["unreadable_calls"]
    return float(t.info["success"] and tried > t.info["tool_errors"])


def length(t, limits) -> list[float]:
    """DAPO's soft overlong punishment, arXiv 2503.14476 eq. 13, of every turn: 0 to -1.

    L_max is the turn's budget of tokens and L_cache a fifth of it.
    """
    values = []
    start = 0
    for sampled, run in groupby(t.loss_mask):
        tokens = len(list(run))
        if sampled:
            budget = min(limits.max_new_tokens, limits.max_tokens - start)
            excess = tokens - (1 - SOFT_SHARE) * budget
            values.append(-min(max(excess, 0.0) / (SOFT_SHARE * budget), 1.0))
        start += tokens
    return values


def repetition(t) -> float:
    """Minus the share of an episode's repeated word trigrams, after arXiv 2502.03373, C.2."""
    counts = Counter()
    for turn in turns_of(t):
        words = spaced(t.messages[turn]["content"]).split()
        counts.update(zip(*(words[i:] for i in range(NGRAM))))
    return len(counts) / counts.total() - 1 if counts else 0.0


def math_verify(t) -> float | None:
    """1 if the final answer equals the reference as the package math-verify compares them.

    None where the reference cannot be read. github.com/huggingface/Math-Verify has time-outs, for
    which it must be called in the main thread.
    """
    from math_verify import parse, verify
    golds = list(filter(None, [parse(f"\\boxed{{{text}}}") for text in references_of(t)]))
    if not golds:
        return None
    text = final_answer(t).strip("*_` \n")
    given = [parse(f"\\boxed{{{text.removesuffix('.')}}}")]
    # Among words the answer may stand anywhere. A formula counts as a whole: 2x + 3 is no 2.
    if "$" in text or re.search(r"(?<!\\)\b[A-Za-z]{3}", text):
        given.append(parse(text))
    return float(any(verify(gold, one) for gold in golds for one in given))


BUILT_IN = {"environment": environment, "exact": exact, "format": well_formed,
            "tool_used": tool_used, "length": length, "repetition": repetition,
            "math_verify": math_verify}


# -------------------------------------------------------------------------------- what is asked for
def load(config, run=None) -> "Rewards":
    """Return the functions that --rewards names. Raises UserError."""
    if not config.rewards:
        raise UserError(f"--env {config.env}: there is no get_reward(): write one "
                        "(envs/template.py), or name functions with --rewards")
    functions, weights = {"environment": environment}, {}
    for item in filter(str.strip, config.rewards.split(",")):
        target, _, weight = map(str.strip, item.partition("="))
        judge = judge_of(target, config, run) if target.partition(":")[0] == "judge" else None
        name = judge.name if judge else target.rpartition(":")[2]
        if name in weights or (name == "environment" and target != name):
            raise UserError(f"--rewards {item}: another function has this name")
        with reading(f"--rewards {item}"):
            if weight != "veto":
                weight = float(weight or 1)
                if not is_finite(weight):
                    raise ValueError("a weight is a finite number, or veto")
            weights[name] = weight
        functions[name] = judge or _function(target)
        if target == "math_verify" and not find_spec(target):
            raise UserError("--rewards math_verify: pip install math-verify")
        if target == "length":
            functions[name] = partial(length, limits=envs.limits_of(config))
    return Rewards(functions, weights, getattr(config, "credit", None) == "gdpo")


def _function(target: str):
    """Return the function behind a name of BUILT_IN, `module:name` or `path/to/file.py:name`."""
    if target in BUILT_IN:
        return BUILT_IN[target]
    place, colon, name = target.rpartition(":")
    if not colon:
        names = [*BUILT_IN, "judge"]
        known = f"known: {', '.join(names)}, or give path/to/file.py:function"
        raise UserError(f"--rewards {target}: {nearest(target, names, otherwise=known)}")
    function = getattr(module_at(place, f"--rewards {target}"), name, None)
    if not callable(function):
        raise UserError(f"--rewards {target}: {place} has no function {name}; a lambda or an "
                        "object is found by the name that a file gives it: path/to/file.py:name")
    with reading(f"--rewards {target}"):
        arguments = needed(function)
        if len(arguments) > 1 and not is_of_trl(function):
            raise ValueError(f"needs {', '.join(arguments)}; a function takes the episode, or as "
                             "in TRL completions, columns of the task and **kwargs")
    return function


async def side_by_side(coroutines: list) -> list:
    """Await the values of all episodes at once. A judge may need seconds for each."""
    return await asyncio.gather(*coroutines)


@dataclass
class Rewards:
    """Pays the episodes of a rollout what the functions say."""

    functions: dict  # by name
    weights: dict  # name -> a number or "veto"; without one it is 1
    notes_weights: bool = False  # in the info of episodes, where --credit gdpo reads them

    @property
    def modules(self) -> list[str]:
        # A partial itself is of functools.
        return [getattr(f, "func", f).__module__ for f in self.functions.values()]

    @property
    def judges(self) -> list[Judge]:
        return [f for f in self.functions.values() if isinstance(f, Judge)]

    def __call__(self, episodes: list):
        """Set the rewards of agents (agent.Episode) whose episode has ended and did not fail.

        Raises UserError if a function raises or returns what is no reward.
        """
        ended = [e for e in episodes if math.isfinite(e.trajectory.reward)
                 and e.trajectory.stop_reason != "error"]
        values = [self._values(name, ended) for name in self.functions if ended]
        for episode, *row in zip(ended, *values):
            self._pay_one(episode, dict(zip(self.functions, row)))

    def _values(self, name: str, episodes: list) -> list:
        """Return a function's values, one for each of the episodes."""
        function = self.functions[name]
        try:
            if takes_all(function):
                values = awaited(function([e.trajectory for e in episodes]))
            elif is_of_trl(function):
                values = awaited(function(**as_trl(episodes, name, function)))
            else:
                values = [function(e.trajectory) for e in episodes]
                if asyncio.iscoroutine(values[0]):
                    values = awaited(side_by_side(values))
            if isinstance(values, Iterable):
                values = list(values)
        except UserError:
            raise
        except (Exception, SystemExit) as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            raise UserError(f"--rewards {name} raised {message_of(error)} "
                            f"({frame.filename}:{frame.lineno})") from error
        if not isinstance(values, list) or len(values) != len(episodes):
            raise UserError(f"--rewards {name} returned {values!r:.60} for {len(episodes)} "
                            "completions; give a list with a number or None for each")
        if all(value is None for value in values):
            columns = ", ".join(episodes[0].trajectory.info["task"])
            say_once(f"note: --rewards {name} scores none of these episodes; their tasks have "
                     f"{columns} (exact and math_verify need answer or solution: --fields)")
        return values

    def _pay_one(self, episode, values: dict):
        t = episode.trajectory
        session = episode.session
        t.rewards = [0.0] * len(t.rewards)
        vetoed = False
        earned = {}
        if self.notes_weights:
            t.info["reward_weights"] = {name: self.weights.get(name, 1.0) for name in values}
        for name, value in values.items():
            if value is None or name == "environment" and not session.pays:
                continue
            weight = self.weights.get(name, 1.0)
            turns = per_turn(name, value, len(t.rewards))
            if not all(map(is_finite, turns)):
                return episode.spoil(f"--rewards {name} is {value} on task {t.info['task']}"[:300])
            t.reward_parts[name] = math.fsum(turns)
            if weight == "veto":
                vetoed |= not any(turns)
            else:
                t.rewards = [a + weight * b for a, b in zip(t.rewards, turns)]
                if name not in MANNERS and not isinstance(self.functions[name], Judge):
                    earned[name] = weight * math.fsum(turns)
        if vetoed:
            t.rewards = [min(reward, 0.0) for reward in t.rewards]
        t.reward = math.fsum(t.rewards)
        if not session.pays and not hasattr(session.env, "_check"):
            total = math.fsum(earned.values()) if earned else t.reward
            t.info["success"] = total > 1e-9 and not vetoed
            if self.judges and not earned:
                say_once("note: --rewards: success is a reward above 0, which a judge gives to "
                         "nearly every episode: read reward/NAME, or give the environment a "
                         "_check() (envs/template.py)")
            if len(earned) > 1:
                # Some of them may pay for manners.
                say_once(f"note: --rewards: success is {' + '.join(earned)} above 0; where that is "
                         "not what solved means, give the environment a _check() "
                         "(envs/template.py)")


def per_turn(name: str, value, count: int) -> list[float]:
    """Return what a function returned as one number for each of `count` turns, or raise UserError.

    A single number is of the last turn.
    """
    turns = value
    if not isinstance(value, list):
        turns = [0.0] * (count - 1) + [value]
    with suppress(TypeError, ValueError):
        if len(turns) == count:
            return list(map(float, turns))
    raise UserError(f"--rewards {name} returned {value!r:.60}; a reward is a number, or a list "
                    f"with one for each of the {count} assistant turns, or None")
