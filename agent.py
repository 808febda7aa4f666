"""The agent's side of an episode: play it, write it down, judge it.

    rollout       tasks -> `Trajectory`s: the model samples turns, tools run while other episodes decode
    demonstrate   the same with a scripted expert in the model's place, token for token by the same path
    evaluate      success, pass@k, reward, actions, structure, completion and tool errors of a model in a world

A trajectory's ids are what the model saw and sampled, in that order; they are never decoded and encoded again. `Chat`
and `parse_tool_calls` (chat.py) do the templates and the reading of calls.

    python agent.py --model_path runs/grpo                       chat with the agent; its tool calls are shown
    python agent.py --model_path runs/grpo --num_tasks 64 --output traces.jsonl
"""
import json
import math
import os
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from tqdm import tqdm

import envs
from envs.demonstrations import check_tokens
from envs.tool_pool import ToolPool, paid
from experiment.data import read_rows, reading
from experiment.run import UserError, finite, flag, main, mix
from llm.chat import Chat, parse_tool_calls
from llm.engine import Row
from llm.loading import DTYPES, load_model
from llm.memory import techniques_of
from llm.static_engine import make_engine
from lora import merged


@dataclass
class Trajectory:
    """One episode in the order the model saw it. The three token lists are aligned: entry t belongs to token t."""

    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)      # 1 exactly where the policy sampled the token
    logprobs: list[float] = field(default_factory=list)     # nats, at the sampling temperature; 0.0 where masked
    rewards: list[float] = field(default_factory=list)      # one per assistant turn
    reward: float = 0.0                                     # their sum after weights, scale and bias
    reward_parts: dict[str, float] = field(default_factory=dict)
    group_id: str = ""                                      # which task instance, never the prompt's text
    stop_reason: str = ""  # done | max_turns | max_new_tokens | max_tokens | max_tool_calls | ...
    messages: list[dict] = field(default_factory=list)      # the same as text, to read
    info: dict = field(default_factory=dict)                # env, task, success, tool calls, tool errors

    @property
    def truncated(self) -> bool:
        """True if a limit on tokens cut a turn or the episode."""
        return self.stop_reason in ("max_new_tokens", "max_tokens")

    def to_json(self) -> dict:
        return dict(vars(self))

    @classmethod
    def from_json(cls, row: dict) -> "Trajectory":
        """One parsed line of trajectories.jsonl. Raises ValueError, in one line, on what no trainer should see."""
        def finite(numbers):
            return all(type(x) in (int, float) and -1e300 < x < 1e300 for x in numbers)

        try:
            out = cls(**row)
            lengths = len(out.token_ids), len(out.loss_mask), len(out.logprobs)
            checks = {
                f"token_ids, loss_mask, logprobs have lengths {lengths}": lengths[0] and len(set(lengths)) == 1,
                "token_ids must be integers >= 0": all(type(t) is int and t >= 0 for t in out.token_ids),
                "loss_mask must be 0 or 1": all(type(m) is int and m in (0, 1) for m in out.loss_mask),
                "loss_mask[0] is 1, but nothing precedes the first token": [*out.loss_mask][:1] != [1],
                "logprobs must be finite numbers": finite(out.logprobs),
                "rewards must be finite numbers": finite([*out.rewards, out.reward, *out.reward_parts.values()])}
        except (TypeError, AttributeError) as error:  # not an object, unknown fields, a number for a list
            checks = {str(error): False}
        if problem := next((problem for problem, ok in checks.items() if not ok), None):
            raise ValueError(f"not a trajectory: {problem}")
        return out


# --------------------------------------------------------------------------------------------------------- episodes
@dataclass(frozen=True)
class Limits:
    """Budgets of an episode. Reaching one ends it with the stop_reason of the same name, but for the time-out."""

    max_turns: int | None = None  # assistant turns; None: what the environment states, or 8
    max_new_tokens: int = 256  # sampled tokens of one turn
    max_tokens: int = 2048  # the whole episode, prompt included
    max_tool_calls: int = 32
    max_tool_tokens: int = 512  # tokens of tool results, of the whole episode
    tool_timeout: float = 10.0  # seconds that one call into the environment may take


TOOL_STEPS = 4  # a row that called a tool comes back at the next multiple of this many decode steps


def rollout_options(config) -> dict:
    """Return the arguments of `rollout` that a Config names."""
    limits = Limits(config.max_turns, config.max_new_tokens, config.max_tokens,
                    tool_timeout=envs.limits(config.env)["tool_timeout"])
    return {"limits": limits, "temperature": config.temperature, "seed": config.seed}


class Episode:
    """One episode's bookkeeping, the same for the model (`rollout`) and for a scripted expert (`demonstrate`)."""

    def __init__(self, env_name: str, env, chat: Chat, task: dict, group_id: str, limits: Limits):
        self.env, self.chat, self.limits = env, chat, limits
        task = {k: v for k, v in task.items() if k != "env"}
        try:
            first = env.reset(**task)
        except (Exception, SystemExit) as error:
            raise RuntimeError(f"world {env_name}: reset failed on task {str(task)[:200]}: "
                               f"{type(error).__name__}: {error}") from error
        system = getattr(env, "system_prompt", None)
        for what, text in (("reset() returned", first), ("system_prompt is", system)):
            if not isinstance(text, (str, type(None))):
                raise UserError(f"world {env_name}: {what} {text!r:.60}, it must be text or None")
        messages = [{"role": "system", "content": system}] * bool(system) + [{"role": "user", "content": first or ""}]
        ids = chat.prompt(messages)
        self.trajectory = Trajectory(
            token_ids=ids, loss_mask=[0] * len(ids), logprobs=[0.0] * len(ids), group_id=group_id, messages=messages,
            info={"env": env_name, "task": task, "tool_calls": 0, "tool_errors": 0, "unreadable_calls": 0,
                  "parsed_turns": 0, "timeouts": 0})
        self.max_turns = limits.max_turns or getattr(env, "max_turns", 8)
        self.paid, self.tool_tokens, self.stop, self.stuck = paid(env), 0, None, False
        if self.room < 1:
            raise UserError(f"world {env_name}: the prompt has {len(ids)} tokens, --max_tokens is {limits.max_tokens}")

    @property
    def room(self) -> int:
        """Tokens the next turn may sample."""
        return min(self.limits.max_new_tokens, self.limits.max_tokens - len(self.trajectory.token_ids))

    def take_turn(self, ids, logprobs) -> list[dict] | None:
        """Append a sampled turn -> the calls to run ([] if none could be read but errors must be shown), or None.

        After None the episode has ended (`trajectory.stop_reason`) or goes on with the ids in `self.next_ids`.
        """
        t, chat = self.trajectory, self.chat
        t.token_ids += ids
        t.loss_mask += [1] * len(ids)
        t.logprobs += logprobs
        t.rewards.append(0.0)
        self.stop = ids[-1] if ids[-1] in chat.stop_ids else None
        text = chat.text(ids)
        if any(i in chat.start_ids for i in ids):
            t.messages.append({"role": "assistant", "content": text})
            return self.finish("malformed")
        if self.stop is None:
            t.messages.append({"role": "assistant", "content": text})
            whole = len(t.token_ids) >= self.limits.max_tokens
            return self.finish("max_tokens" if whole else "max_new_tokens")
        content, calls, self.errors = parse_tool_calls(text)
        t.info["parsed_turns"] += not self.errors
        t.messages.append({"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})})
        t.info["tool_calls"] += len(calls)
        t.info["tool_errors"] += len(self.errors)
        t.info["unreadable_calls"] += len(self.errors)
        if calls or self.errors:
            self.calls = calls
            return self.finish("max_tool_calls") if t.info["tool_calls"] > self.limits.max_tool_calls else calls
        try:
            reply = self.env._reply(text) if hasattr(self.env, "_reply") and not self.stuck else None
        except (Exception, SystemExit) as error:
            raise RuntimeError(f"world {t.info['env']}: _reply() on task {str(t.info['task'])[:200]} raised "
                               f"{type(error).__name__}: {error}") from error
        self._pay_turn()
        if reply is None or getattr(self.env, "done", False):
            return self.finish("done")
        t.messages.append({"role": "user", "content": reply})
        return self._continue(chat.reply(reply, self.stop))

    def take_results(self, results):
        """Append the results of the turn's calls; the next ids, if the episode goes on, are in `self.next_ids`."""
        t = self.trajectory
        shown = []
        for call, (text, error, reward) in zip(self.calls, results, strict=True):
            text = _cut(text, 3 * (self.limits.max_tool_tokens - self.tool_tokens) // len(self.calls))  # ~3 a token
            t.info["tool_errors"] += error
            t.messages.append({"role": "tool", "name": call["name"], "content": text, "reward": reward - self.paid})
            t.rewards[-1] += reward - self.paid
            self.paid = reward
            shown.append(text)
        for error in self.errors:
            t.messages.append({"role": "tool", "name": "", "content": error, "reward": 0.0})
            shown.append(error)
        if not self.stuck and getattr(self.env, "done", False):
            return self.finish("done")
        ids = self.chat.results(self.calls, shown, self.stop)
        self.tool_tokens += len(ids)
        if self.tool_tokens > self.limits.max_tool_tokens:
            return self.finish("max_tool_tokens")
        return self._continue(ids)

    def _continue(self, ids):
        t = self.trajectory
        if len(t.rewards) >= self.max_turns:
            return self.finish("max_turns")
        if len(t.token_ids) + len(ids) >= self.limits.max_tokens:  # a result is never appended half
            return self.finish("max_tokens")
        t.token_ids += ids
        t.loss_mask += [0] * len(ids)
        t.logprobs += [0.0] * len(ids)
        self.next_ids = ids

    def _pay_turn(self):
        reward = self.paid if self.stuck else paid(self.env)
        self.trajectory.rewards[-1] += reward - self.paid
        self.paid = reward

    def finish(self, reason: str):
        """The last turn gets what get_reward() says beyond what was paid. RuntimeError if our side fails."""
        t, env = self.trajectory, self.env
        t.stop_reason, self.next_ids = reason, None
        def where(member):
            return f"world {t.info['env']}: {member} on task {str(t.info['task'])[:200]}"
        member = "get_reward()"
        try:
            total = float(env.get_reward()) if not self.stuck else self.paid
            member = "_reward_parts"
            t.reward_parts = {k: float(v) for k, v in getattr(env, "_reward_parts", {}).items()}
            member = "_check()"
            t.info["success"] = not self.stuck and (bool(env._check()) if hasattr(env, "_check") else total > 0)
        except (Exception, SystemExit) as error:
            raise RuntimeError(f"{where(member)} raised {type(error).__name__}: {error}") from error
        if not all(map(math.isfinite, (total, *t.reward_parts.values(), *t.rewards))):
            t.reward = math.nan
            t.info["not_finite"] = (f"{where('get_reward()')} is {total}, parts {t.reward_parts}, "
                                    f"paid before {t.rewards}: not finite")
            return
        t.rewards[-1] += total - self.paid
        t.reward = math.fsum(t.rewards)


def _cut(text: str, limit: int) -> str:
    """A tool's result, at most about `limit` characters of it, 4000 at most: the head, how much was cut, the tail."""
    limit = min(max(limit, 40), 4000)
    if len(text) <= limit:
        return text
    return f"{text[:limit * 3 // 4]}\n[... {len(text) - limit} characters cut ...]\n{text[-limit // 4:]}"


def _chats(tokenizer, tasks, env_name, generation_config=None) -> tuple[dict, dict]:
    names = {task.get("env", env_name) for task in tasks}
    classes = {name: envs.load(name) for name in names}
    try:
        return classes, {name: Chat(tokenizer, envs.schemas(cls), generation_config) for name, cls in classes.items()}
    except ValueError as error:  # a template or a tool that cannot be used
        raise UserError(str(error)) from error


def rollout(model, tokenizer, env_name: str, tasks: list[dict], group_size: int = 1, *, limits: Limits = Limits(),
            temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, seed: int = 0, step: int = 0,
            first_task: int = 0, slots: int | None = None, run=None) -> list[Trajectory]:
    """`group_size` episodes of every task, a task's episodes together -> list of len(tasks) * group_size Trajectories.

    What is sampled is a function of (seed, step, first_task + index of the task, sample). Tools run in threads while
    other rows decode; a row that called one comes back at the next multiple of TOOL_STEPS decode steps, and decoding
    waits there if it must: so who shares a batch depends on token counts, never on the clock. run (a `Run`): its
    check() is called before every decode step; each of its ranks plays its share of the tasks and gets all episodes.
    The adapter is merged into the weights while decoding.
    A non-finite reward or logit gives the episode the reward NaN, and info["not_finite"] says why.
    RuntimeError: a reward function that raises, too many hanging or broken tools.
    """
    with merged(model):
        return _rollout(model, tokenizer, env_name, tasks, group_size, limits, temperature, top_k, top_p, seed, step,
                        first_task, slots, run)


def _rollout(model, tokenizer, env_name, tasks, group_size, limits, temperature, top_k, top_p, seed, step, first_task,
             slots, run):
    classes, chats = _chats(tokenizer, tasks, env_name, model.generation_config)
    own = run.ranks.share(len(tasks)) if run else range(len(tasks))
    slots = min(slots or techniques_of(model).decode_rows, max(len(own), 1) * group_size)
    engine = make_engine(model, slots=slots, tokens=limits.max_tokens, temperature=temperature, top_k=top_k,
                         top_p=top_p, stop_ids=frozenset().union(
                             *(chat.stop_ids | chat.start_ids for chat in chats.values())))
    episodes, pool, paused = {}, ToolPool(min(engine.slots, 32), limits.tool_timeout), []
    for i in own:
        task, name = tasks[i], tasks[i].get("env", env_name)
        for sample in range(group_size):
            episode = Episode(name, classes[name](), chats[name], task, f"{step}-{first_task + i}", limits)
            prompt = episode.trajectory.token_ids  # the prompt is forwarded once, not the task: reset may draw lots
            row = Row(prompt, group=tuple(prompt), seed=mix(seed, step, first_task + i, sample), limit=episode.room)
            episodes[row] = episode
    engine.add(episodes)
    bar = tqdm(total=len(episodes), desc="episodes", leave=False, delay=2)

    def go_on(row, episode):
        if episode.trajectory.stop_reason:
            engine.release(row)
            bar.update()
        else:
            engine.extend(row, episode.next_ids, episode.room)

    try:
        while engine.busy or paused:
            if run:
                run.check()
            for row in engine.step() if engine.busy else ():
                episode = episodes[row]
                calls = episode.take_turn(row.turn, row.logprobs)
                if calls is None:
                    go_on(row, episode)
                elif episode.stuck:  # its world still sits in a call that was abandoned: it cannot be touched again
                    episode.take_results([("error: the tool is still busy", True, episode.paid)] * len(calls))
                    go_on(row, episode)
                else:
                    paused.append((engine.clock // TOOL_STEPS + 1, row, pool.submit(episode.env, calls)))
            due = engine.clock // TOOL_STEPS if engine.busy else min((slot for slot, *_ in paused), default=0)
            for entry in [entry for entry in paused if entry[0] <= due]:
                _, row, job = entry
                paused.remove(entry)
                results = pool.wait(job, episodes[row].paid)
                episodes[row].stuck = job["abandoned"]
                episodes[row].trajectory.info["timeouts"] += job["abandoned"]
                episodes[row].take_results(results)
                go_on(row, episodes[row])
    except FloatingPointError as error:
        for t in (episode.trajectory for episode in episodes.values() if not episode.trajectory.stop_reason):
            t.reward, t.info["success"] = math.nan, False
            t.info["not_finite"] = f"{error} while decoding, the weights may have diverged: lower --learning_rate"
    finally:
        pool.close()
        bar.close()
    pool.check()
    played = [episode.trajectory for episode in episodes.values()]
    return [t for part in run.ranks.gather(played) for t in part] if run else played


def demonstrate(tokenizer, env_name: str, tasks: list[dict], limits: Limits = Limits()) -> list[Trajectory]:
    """Episodes of the worlds' scripted experts (`_expert`), assembled by the path that rollouts take: the same ids."""
    classes, chats = _chats(tokenizer, tasks, env_name)
    out = []
    for i, task in enumerate(tqdm(tasks, "demonstrations", leave=False)):
        name = task.get("env", env_name)
        if not hasattr(classes[name], "_expert"):
            raise UserError(f"world {name!r} has no _expert(): give --trajectories or demonstrations of your own")
        env = classes[name]()
        episode = Episode(name, env, chats[name], task, str(i), limits)
        while not episode.trajectory.stop_reason:
            turn = env._expert()
            ids = chats[name].turn(turn, []) if isinstance(turn, str) else chats[name].turn("", turn)
            if (calls := episode.take_turn(ids, [0.0] * len(ids))) is not None:
                episode.take_results([(*envs.call(env, c["name"], c["arguments"]), paid(env)) for c in calls])
        out.append(episode.trajectory)
    return out


def scale_rewards(trajectories: list[Trajectory], scaling: float, bias: float):
    """Set reward = (reward - bias) x scaling; the turns share the bias equally."""
    for t in trajectories:
        t.rewards = [(reward - bias / len(t.rewards)) * scaling for reward in t.rewards]
        t.reward = math.fsum(t.rewards)


def cheapest_order(trajectories: list[Trajectory], batch_size: int) -> list[Trajectory]:
    """Reordered so that passes of `batch_size` take few tokens: by length, or by group where that is less.

    Neighbours in length need less padding; the members of a group share their prompt, which `token_logprobs` forwards
    once. The longest come first: what is too large fails at once, and what follows fits where they were in memory. A
    function of token counts only.
    """
    def cost(order):
        tokens = 0
        for part in (order[i:i + batch_size] for i in range(0, len(order), batch_size)):
            prompts = [t.token_ids[:t.loss_mask.index(1)] if 1 in t.loss_mask else t.token_ids for t in part]
            shared, width = len(os.path.commonprefix(prompts)), max(len(t.token_ids) for t in part)
            tokens += shared + len(part) * (width - shared)
        return tokens

    longest = {}
    for t in trajectories:
        longest[t.group_id] = max(longest.get(t.group_id, 0), len(t.token_ids))
    by_length = sorted(trajectories, key=lambda t: -len(t.token_ids))
    by_group = sorted(trajectories, key=lambda t: (-longest[t.group_id], t.group_id, -len(t.token_ids)))
    return min(by_length, by_group, key=cost)


def collate(trajectories: list[Trajectory], device="cpu"):
    """Right-padded tensors of episodes -> token_ids, loss_mask (int64), logprobs (float32), (B, T). Pads are masked."""
    width = max(len(t.token_ids) for t in trajectories)
    def pad(rows, dtype):
        return torch.tensor([row + [0] * (width - len(row)) for row in rows], dtype=dtype, device=device)  # (B, T)
    return (pad([t.token_ids for t in trajectories], torch.long), pad([t.loss_mask for t in trajectories], torch.long),
            pad([t.logprobs for t in trajectories], torch.float32))


def turn_index(mask):
    """Number each token's turn (B, T), -1 where masked. A run of 1s in the mask is one turn."""
    mask = mask.long()
    starts = (mask - F.pad(mask, (1, -1))).clamp(min=0)
    return torch.where(mask.bool(), starts.cumsum(1) - 1, -1)  # (B, T)


def read_trajectories(path: str, tokenizer=None, vocabulary: int = 0) -> list[Trajectory]:
    """Return the episodes of a trajectories.jsonl. UserError: `FILE:LINE: what is wrong`.

    With a model's tokenizer and the size of its vocabulary, episodes of another model are refused.
    """
    out = []
    for row in read_rows(path):
        line = row.pop("_line")
        row.pop("step", None)
        with reading(path, line):
            episode = Trajectory.from_json(row)
            if tokenizer:
                check_tokens(episode.token_ids, episode.messages, tokenizer, vocabulary)
        out.append(episode)
    return out


# ------------------------------------------------------------------------------------------------------- evaluation
def summarise(trajectories: list[Trajectory]) -> dict:
    """What a set of episodes says: shares in 0..1, rewards and counts as means per episode."""
    def mean(values):
        values = list(values)
        return sum(values) / len(values) if values else 0.0
    turns, calls = sum(len(t.rewards) for t in trajectories), sum(t.info["tool_calls"] for t in trajectories)
    unreadable = sum(t.info.get("unreadable_calls", 0) for t in trajectories)
    parts = sorted({name for t in trajectories for name in t.reward_parts})
    return {"episodes": len(trajectories),
            "success": mean(t.info["success"] for t in trajectories),
            "reward": mean(t.reward for t in trajectories),
            **{f"reward/{name}": mean(t.reward_parts.get(name, 0.0) for t in trajectories) for name in parts},
            "turns": turns / len(trajectories), "actions": calls / len(trajectories),
            "structure": sum(t.info["parsed_turns"] for t in trajectories) / max(turns, 1),
            "completion": mean(t.stop_reason == "done" for t in trajectories),
            "tool_errors": sum(t.info["tool_errors"] for t in trajectories) / max(calls + unreadable, 1),
            "tool_timeouts": sum(t.info["timeouts"] for t in trajectories),
            "tokens": mean(len(t.token_ids) for t in trajectories),
            "sampled_tokens": mean(sum(t.loss_mask) for t in trajectories),
            "truncated": mean(t.truncated for t in trajectories)}


def pass_at_k(successes: list[list[bool]]) -> dict:
    """Unbiased pass@k, k = 1 .. G: mean over tasks of 1 - C(G - c, k) / C(G, k), c right (arXiv 2107.03374, eq. 1)."""
    group = len(successes[0])
    return {f"pass@{k}": sum(1 - math.comb(group - sum(s), k) / math.comb(group, k) for s in successes) / len(successes)
            for k in range(1, group + 1)}


def evaluate(model, tokenizer, env_name: str, tasks: list[dict], group_size: int = 1, **options) -> dict:
    """`rollout` with these options, summed up: success, pass@k, reward, actions, structure, completion, tool errors."""
    if not tasks:
        return {}
    trajectories = rollout(model, tokenizer, env_name, tasks, group_size, **options)
    solved = [t.info["success"] for t in trajectories]
    groups = [solved[i:i + group_size] for i in range(0, len(solved), group_size)]
    return {**summarise(trajectories), **pass_at_k(groups)}


def transcript(trajectory: Trajectory) -> str:
    """The episode to read: what was asked, then `Action: name -> Reward: 2.0 -> "result"  (arguments)` a call."""
    lines, calls = [], []
    for m in trajectory.messages:
        if m["role"] == "tool":
            call = calls.pop(0) if calls and m["name"] else {"name": "unreadable call", "arguments": {}}
            arguments = ", ".join(f"{k}={v}" for k, v in call["arguments"].items())
            lines.append(f'Action: {call["name"]} -> Reward: {m["reward"]:.1f} -> "{m["content"]}"  ({arguments})')
        else:
            calls = list(m.get("tool_calls", []))
            if m["content"]:
                lines.append(f"{m['role'].capitalize()}: {m['content']}")
    end = f"[{trajectory.stop_reason}; success {trajectory.info['success']}; reward {trajectory.reward:.2f}]"
    return "\n".join(lines + [end])


# ------------------------------------------------------------------------------------------------------------- chat
@dataclass
class Config:
    model_path: str = flag("tiny", "model: tiny, hub id, model folder, adapter folder or output folder")
    env: str = flag("equations", "the world whose tools the agent has")
    dataset: str | None = flag(None, "task file (.jsonl); default: the world's own tasks")
    num_tasks: int = flag(0, "play this many held-out tasks and print them, instead of chatting", low=0)
    group_size: int = flag(1, "episodes per task", low=1, aliases=("samples_per_prompt",))
    output: str | None = flag(None, "with --num_tasks: write the episodes to this .jsonl")
    temperature: float = flag(1.0, "sampling temperature; 0: the most likely token", low=0)
    top_k: int = flag(0, "sample among the k most likely tokens; 0: all", low=0)
    top_p: float = flag(1.0, "sample among the most likely tokens of this total probability", above=0, high=1)
    max_turns: int | None = flag(None, "assistant turns per episode; default: the world's", low=1)
    max_new_tokens: int = flag(256, "tokens per turn", low=1)
    max_tokens: int = flag(4096, "tokens per episode", low=8)
    dtype: str = flag("auto", "of the weights; auto: as stored", choices=tuple(DTYPES))
    seed: int = flag(0, "of tasks and sampling", low=0)


def talk(config: Config):
    """Talk to the agent, or with --num_tasks watch it work; its tool calls and their results are shown."""
    model, tokenizer = load_model(config.model_path, dtype=config.dtype, train=False)
    limits = Limits(config.max_turns, config.max_new_tokens, config.max_tokens, 10**6, config.max_tokens)
    try:  # before the work, not after it
        output = open(config.output, "w", encoding="utf-8") if config.output and config.num_tasks else None
    except OSError as error:
        raise UserError(f"--output {config.output}: {error.strerror}") from None
    sampling = {"temperature": config.temperature, "top_k": config.top_k, "top_p": config.top_p}
    if config.num_tasks:
        tasks = envs.tasks(config.env, "test", config.num_tasks, config.seed, config.dataset)
        episodes = rollout(model, tokenizer, config.env, tasks, config.group_size, limits=limits, seed=config.seed,
                           **sampling)
        if output:
            with output as f:
                f.writelines(json.dumps(finite(t.to_json()), ensure_ascii=False, allow_nan=False) + "\n"
                             for t in episodes)
        for t in episodes[:8]:
            print(transcript(t), end="\n\n")
        print(json.dumps(summarise(episodes)))
        return
    (task,), cls = envs.tasks(config.env, "test", 1, config.seed, config.dataset), envs.load(config.env)
    env, chat = cls(), Chat(tokenizer, envs.schemas(cls), model.generation_config)
    episode = Episode(config.env, env, chat, task, "chat", limits)
    print(f"World {config.env}: {', '.join(envs.tools(env))}. An empty line plays the world's own task; Ctrl-D ends.\n"
          f"Its task: {episode.trajectory.messages[-1]['content']}")
    engine = make_engine(model, slots=1, stop_ids=chat.stop_ids, **sampling)
    row, system = None, [m for m in episode.trajectory.messages if m["role"] == "system"]
    while True:
        try:
            text = input("\nYou: ").strip()
        except EOFError:
            return print()
        if row is None:
            question = text or episode.trajectory.messages[-1]["content"]
            ids = chat.prompt(system + [{"role": "user", "content": question}])
            row = Row(ids, seed=config.seed, limit=config.max_new_tokens)
            engine.add([row])
        else:
            engine.extend(row, chat.reply(text, row.turn[-1]), config.max_new_tokens)
        for left in reversed(range(config.max_turns or getattr(env, "max_turns", 8))):
            while not engine.step():
                pass
            content, calls, errors = parse_tool_calls(chat.text(row.turn))
            if content:
                print(f"Agent: {content}")
            if not (calls or errors) or not left:
                break
            if row.turn[-1] not in chat.stop_ids:  # a turn cut by the limit is not executed
                break
            results = [envs.call(env, c["name"], c["arguments"])[0] for c in calls] + errors
            for call, result in zip(calls + [{"name": "unreadable call", "arguments": {}}] * len(errors), results):
                print(f"  {call['name']}({', '.join(f'{k}={v!r}' for k, v in call['arguments'].items())}) -> {result}")
            engine.extend(row, chat.results(calls, results, row.turn[-1]), config.max_new_tokens)


if __name__ == "__main__":
    main(Config, talk, __doc__)
