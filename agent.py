"""The agent's side of an episode: play it, record it, judge it.

    rollout     play episodes: the model samples turns, and the tools that it calls are run
    evaluate    success, pass@k, reward and more of a model in an environment

As a program it is a chat with the agent: talk.py.
"""
import math
import runpy
import time
from dataclasses import dataclass, field
from functools import wraps
from itertools import chain, product
from pathlib import Path

import envs
from core.chat import Chat
from core.config import UserError, mix
from core.data import is_finite, pass_at_k, print_dropped, summarise
from core.engine import EngineProtocol, Row
from core.model import facts
from core.tool_calls import parse_tool_calls
from envs import Limits, load_environments
from envs.calls import shortened
from envs.session import EpisodeFault, Session
from layers import episode_bar, make_engine, rewards_of, sampler_of, sessions
from lora import merged

# After a tool call an episode rejoins the batch at the next multiple of so many decode steps,
# however fast the tool was: its speed must not change who shares a batch, and so the rounding.
TOOL_STEPS = 4


@dataclass
class Trajectory:
    """One episode in the order the model saw it. Entry t of the token lists belongs to token t."""

    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)  # 1 exactly where the policy sampled
    logprobs: list[float] = field(default_factory=list)  # nats, under the sampler; 0.0 if masked
    rewards: list[float] = field(default_factory=list)  # one per assistant turn
    reward: float = 0.0  # their sum; NaN if it is not finite, which skips the whole step
    reward_parts: dict[str, float] = field(default_factory=dict)
    group_id: str = ""  # step and number of its task; tasks with equal prompts stay apart
    stop_reason: str = ""  # "done", "malformed", "error", or the name of the limit that ended it
    messages: list[dict] = field(default_factory=list)  # as text; the last results may be only here
    info: dict = field(default_factory=dict)  # env, task, success, tool calls, tool errors

    # Hashed by identity: two episodes of equal content are two keys of a dict.
    __hash__ = object.__hash__

    @property
    def truncated(self) -> bool:
        """True if --max_new_tokens cut a turn or --max_tokens the episode."""
        return self.stop_reason in ("max_new_tokens", "max_tokens")

    def to_json(self) -> dict:
        """Return the fields as a dict, as in a line of trajectories.jsonl."""
        return dict(vars(self))


# -------------------------------------------------------------------------------- one episode
def ends_on_fault(method):
    """Wrap a function of an Episode: a fault of the environment ends this episode and no other."""
    @wraps(method)
    def wrapped(self, *arguments):
        try:
            method(self, *arguments)
        except EpisodeFault as fault:
            self.fail(str(fault))
    return wrapped


class Episode:
    """The bookkeeping of one episode, the same for the model and for a scripted expert.

    Attributes:
        calls, errors: what the last turn called, and what of it could not be read.
        stop_id: the token that ended the last turn.
        calling: True while the last turn's calls run: `take_results` must follow.
        next_ids: tokens that the trajectory holds and the engine does not: tool results, a reply.
    """

    def __init__(self, session: Session, chat: Chat, limits: Limits, group_id: str):
        self.session = session
        self.chat = chat
        self.limits = limits
        self.calling = False
        self.next_ids = None
        self.tool_tokens = 0
        counts = ("tool_calls", "tool_errors", "unreadable_calls", "parsed_turns", "timeouts")
        info = {"env": session.name, "task": session.task, **dict.fromkeys(counts, 0)}
        self.trajectory = Trajectory(group_id=group_id, info=info)
        self.reset()

    @ends_on_fault
    def reset(self):
        """Reset the environment and render the prompt."""
        messages, max_turns = self.session.start()
        self.max_turns = self.limits.max_turns or max_turns
        try:
            self.set_prompt(messages)
        except ValueError as error:
            raise UserError(f"{self.session.place('reset()')}: {error}") from error

    def set_prompt(self, messages: list[dict]):
        """Start the trajectory with these messages."""
        t = self.trajectory
        t.messages, t.token_ids = messages, self.chat.prompt(messages)
        t.loss_mask = [0] * len(t.token_ids)
        t.logprobs = [0.0] * len(t.token_ids)

    @property
    def turn_budget(self) -> int:
        """The number of tokens that the next turn may sample."""
        left = self.limits.max_tokens - len(self.trajectory.token_ids)
        return min(self.limits.max_new_tokens, left)

    @property
    def can_take_turn(self) -> bool:
        """False if the episode has ended or has no token left for a turn."""
        return not self.trajectory.stop_reason and self.turn_budget > 0

    @ends_on_fault
    def take_turn(self, ids: list[int], logprobs: list[float]):
        """Append a sampled turn and start its tool calls (`calling`).

        Without calls the episode ends (`trajectory.stop_reason`) or continues with `next_ids`.
        """
        t = self.trajectory
        t.token_ids += ids
        t.loss_mask += [1] * len(ids)
        t.logprobs += logprobs
        t.rewards.append(0.0)
        text = self.chat.opened_thought + self.chat.text(ids)
        t.messages.append({"role": "assistant", "content": text.strip()})
        # Only the template may open a message, by <|im_start|> or the like.
        if self.chat.start_ids & set(ids):
            return self.finish("malformed")
        if ids[-1] not in self.chat.stop_ids:
            is_full = len(t.token_ids) >= self.limits.max_tokens
            return self.finish("max_tokens" if is_full else "max_new_tokens")
        self.stop_id = ids[-1]
        content, self.calls, self.errors = parse_tool_calls(text, self.chat.tools)
        if self.calls:
            t.messages[-1].update(content=content, tool_calls=self.calls)
        t.info["parsed_turns"] += not self.errors
        t.info["tool_calls"] += len(self.calls)
        t.info["tool_errors"] += len(self.errors)
        t.info["unreadable_calls"] += len(self.errors)
        if t.info["tool_calls"] > self.limits.max_tool_calls:
            return self.finish("max_tool_calls")
        if not self.calls and not self.errors:
            return self.take_answer(text)
        self.session.submit(self.calls)
        self.calling = True

    def take_answer(self, text: str):
        """Answer a turn that calls no tool with the environment's reply, or end the episode."""
        reply, gain = self.session.reply(text)
        self.trajectory.rewards[-1] += gain
        if reply is None or self.session.done:
            return self.finish("done")
        self.trajectory.messages.append({"role": "user", "content": reply})
        self.append(self.chat.reply(reply, self.stop_id))

    def tokens_of(self, texts: list[str]) -> list[int]:
        """Return the tokens that show the model these results of its calls."""
        return self.chat.results(self.calls, texts + self.errors, self.stop_id)

    @ends_on_fault
    def take_results(self):
        """Wait for the results of the turn's calls, and append them."""
        t = self.trajectory
        self.calling = False
        results = self.session.results()
        t.info["timeouts"] = int(self.session.timed_out)
        left = self.limits.max_tool_tokens - self.tool_tokens
        texts = [text for text, _, _ in results]
        texts, ids = shortened(texts, self.limits.max_tool_text, left, self.tokens_of)
        for call, text, (_, error, gain) in zip(self.calls, texts, results, strict=True):
            t.info["tool_errors"] += error
            t.rewards[-1] += gain
            t.messages.append(
                {"role": "tool", "name": call["name"], "content": text, "reward": gain})
        for error in self.errors:
            t.messages.append({"role": "tool", "name": "", "content": error, "reward": 0.0})
        if self.session.done:
            return self.finish("done")
        self.tool_tokens += len(ids)
        if self.tool_tokens > self.limits.max_tool_tokens:
            return self.finish("max_tool_tokens")
        self.append(ids)

    def append(self, ids: list[int]):
        """Append tokens that the model did not sample, or end the episode if they do not fit."""
        t = self.trajectory
        if len(t.rewards) >= self.max_turns:
            return self.finish("max_turns")
        # A tool result is appended whole or not at all.
        if len(t.token_ids) + len(ids) >= self.limits.max_tokens:
            return self.finish("max_tokens")
        t.token_ids += ids
        t.loss_mask += [0] * len(ids)
        t.logprobs += [0.0] * len(ids)
        self.next_ids = ids

    def finish(self, reason: str):
        """End the episode and score it. The last turn gets the reward that no turn was paid yet."""
        t = self.trajectory
        t.stop_reason = reason
        total, t.reward_parts, t.info["success"] = self.session.score()
        t.info.update(self.session.notes)
        t.rewards[-1] += total - self.session.reward
        if not all(map(is_finite, (*t.rewards, *t.reward_parts.values()))):
            place = self.session.place("get_reward()")
            why = f"{place} is {total}, parts {t.reward_parts}, turns {t.rewards}: not finite"
            return self.spoil(why)
        # Sum only now: math.fsum raises an exception for inf and -inf.
        t.reward = math.fsum(t.rewards)

    def leave(self):
        """Do nothing. Subclasses act here once the episode has ended and left the engine."""

    def spoil(self, why: str):
        """Give the episode the reward NaN: the run skips the step and says why."""
        self.trajectory.reward = math.nan
        self.trajectory.info = {"success": False, **self.trajectory.info, "not_finite": why}

    def fail(self, message: str):
        """End the episode because its environment failed. If `reset` did, the question is empty."""
        t = self.trajectory
        if not t.token_ids:
            self.set_prompt([{"role": "user", "content": ""}])
        t.stop_reason = "error"
        t.info.update(success=False, error=message)
        t.rewards = [reward if is_finite(reward) else 0.0 for reward in t.rewards]
        t.reward = math.fsum(t.rewards)


# ------------------------------------------------------------------------------ many episodes
def rollout(model, tokenizer, env_name: str, tasks: list[dict], group_size: int = 1, *,
            limits: Limits = Limits(), temperature: float = 1.0, seed: int = 0, step: int = 0,
            first_task: int = 0, env_options=None, engine=None, agent=Episode, pay=None,
            run=None) -> list[Trajectory]:
    """Play `group_size` episodes of every task, in eval mode, and return them task by task.

    The group id of a task is "{step}-{first_task + index}": a second rollout of the same step needs
    another first_task. Group id, seed and sample seed an episode's random numbers. Episodes whose
    prompt reaches max_tokens are dropped; if a run's first rollout has no other, UserError.

    Args:
        tasks: the arguments of `reset`; where env_name is several, "env" says which.
        env_options: what `envs.options_of` returns.
        engine: what samples (core/engine.py), or a function of what `make_engine` takes.
        agent: who plays an episode: a class with `Episode`'s arguments, trajectory, calling,
            next_ids, turn_budget, max_turns, can_take_turn, take_turn, take_results, leave, spoil.
        pay: a function that sets the rewards of all these agents, after their episodes.
        run: a `Run`. Its ranks share the tasks and get all episodes. `run.check` may end it.
    """
    began = time.monotonic()
    classes, chats = load_environments(tokenizer, env_name, model.generation_config, env_options)
    names = ",".join(classes)
    share = run.ranks.share(len(tasks)) if run else range(len(tasks))
    agents, groups = {}, {}  # row -> who plays its episode; prompt -> the number of its group
    # Servers are told the policy; the engine of this process decodes with merged weights.
    load_policy = merged if isinstance(engine, type) else getattr(engine, "load_policy", merged)
    with load_policy(model.eval()), sessions(limits, run) as new_session:
        for i, sample in product(share, range(group_size)):
            name = tasks[i].get("env", names)
            if name not in classes:
                raise UserError(f"a task names environment {name!r}, which is none of {names}")
            session = new_session(name, classes[name], tasks[i])
            player = agent(session, chats[name], limits, f"{step}-{first_task + i}")
            # Equal prompts are forwarded once. Those of one task differ if reset draws at random.
            prompt = player.trajectory.token_ids
            agents[Row(prompt, group=groups.setdefault(tuple(prompt), len(groups)),
                       seed=mix(seed, step, first_task + i, sample),
                       limit=player.turn_budget)] = player
        started = {row: player for row, player in agents.items() if player.can_take_turn}
        if started:
            engine = engine or make_engine
            if callable(engine):
                stop_ids = frozenset().union(*(chat.end_ids for chat in chats.values()))
                slots = min(facts(model).decode_rows, len(started))
                engine = engine(model, slots=slots, tokens=limits.max_tokens, stop_ids=stop_ids,
                                temperature=temperature)
            play_all(engine, started, limits, run)
            if pay:
                pay(list(started.values()))
    trajectories = [player.trajectory for player in agents.values()]
    is_first = run is None or not (run.played or run.checkpoint)
    if run:
        trajectories = list(chain(*run.ranks.gather(trajectories)))
        run.rollout_seconds += time.monotonic() - began
        run.rollout_tokens += sum(sum(t.loss_mask) for t in trajectories)
        run.played += len(trajectories)
    return playable(trajectories, limits.max_tokens, or_raise=is_first)


def playable(trajectories: list[Trajectory], max_tokens: int, or_raise=True) -> list[Trajectory]:
    """Return the episodes that could start; print the others and faults, or raise if all are."""
    kept = [t for t in trajectories if t.stop_reason or len(t.token_ids) < max_tokens]
    if or_raise and trajectories and not kept:
        shortest = min(len(t.token_ids) for t in trajectories)
        raise UserError(f"environment {trajectories[0].info['env']}: the prompt has {shortest} "
                        f"tokens, --max_tokens is {max_tokens}")
    print_dropped(trajectories, kept,
                  f"episodes dropped: the prompt alone reaches --max_tokens {max_tokens}")
    faults = [t.info["error"] for t in kept if t.stop_reason == "error"]
    if faults:
        print(f"{len(faults)} of {len(kept)} episodes ended by a fault of their environment; "
              f"the first: {faults[0]}")
    return kept


def play_all(engine, agents: dict, limits: Limits, run=None):
    """Play the episodes of the agents (row -> agent) to their ends. `run.check` may end it."""
    with episode_bar(agents, limits, run, engine) as show_progress:
        try:
            for _ in play_turns(engine, agents):
                show_progress()
                if run:
                    run.check()
        except FloatingPointError as error:
            why = f"{error} while decoding, the weights may have diverged: lower --learning_rate"
            for player in agents.values():
                if not player.trajectory.stop_reason:
                    player.spoil(why)


def play_turns(engine: EngineProtocol, agents: dict):
    """Play the episodes of the agents (row -> agent). Yield after every decode step."""
    waiting = {}  # row -> when its episode continues, in units of TOOL_STEPS decode steps
    engine.add(list(agents))
    while engine.busy or waiting:
        for row in engine.step() if engine.busy else []:
            agents[row].take_turn(row.turn, row.logprobs)
            if agents[row].calling:
                waiting[row] = engine.clock // TOOL_STEPS + 1
            else:
                next_turn(engine, row, agents[row])
        now = engine.clock // TOOL_STEPS
        if waiting and not engine.busy:
            # While nothing decodes the clock stands still: continue with those that are due next.
            now = min(waiting.values())
        for row in [row for row, due in waiting.items() if due <= now]:
            del waiting[row]
            agents[row].take_results()
            next_turn(engine, row, agents[row])
        yield


def next_turn(engine, row, player):
    """Let the row sample its next turn, or leave the engine if the episode has ended."""
    if player.trajectory.stop_reason:
        engine.release(row)
        player.leave()
    else:
        engine.extend(row, player.next_ids, player.turn_budget)


def rollout_options(config, run=None, model=None) -> dict:
    """Return the arguments of `rollout` that a Config names. Raises UserError if it cannot play."""
    # A fork changes one: **rollout_options(config, run) | {"agent": Mine, "engine": Slow}.
    if model and facts(model).refuses_engine and not config.sampler:
        raise UserError(facts(model).refuses_engine)
    return {"limits": envs.limits_of(config), "temperature": getattr(config, "temperature", 1.0),
            "seed": config.seed, "env_options": envs.options_of(config), "agent": Episode,
            "engine": sampler_of(config, run), "pay": rewards_of(config, run), "run": run}


def evaluate(model, tokenizer, env_name: str, tasks: list[dict], group_size: int = 1,
             step: int = -1, **options) -> dict:
    """Play the tasks with `rollout`; return what `summarise` and `pass_at_k` say of it.

    Step -1 draws the same random numbers in every evaluation, and those of no training step.
    """
    if not tasks:
        return {}
    trajectories = rollout(model, tokenizer, env_name, tasks, group_size, step=step, **options)
    return summarise(trajectories) | pass_at_k(trajectories) if trajectories else {}


if __name__ == "__main__":
    # The command imports this file by its name.
    runpy.run_path(str(Path(__file__).with_name("talk.py")), run_name="__main__")
