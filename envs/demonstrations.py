"""Rows of a file become conversations to learn from: chats, completions and written solutions.

    demonstration(row)  the conversation of a row
    Encoder             their token ids and loss mask, put together as a rollout puts them together
    split               which rows are learned from, and which are held out
"""
import json
import unicodedata
import zlib
from collections import Counter
from functools import lru_cache
from typing import NamedTuple

import numpy as np

import envs
from agent import Trajectory, without_faults
from envs import gsm8k, meetings
from experiment.data import read_rows, reading
from experiment.errors import UserError
from llm.chat import Chat


class Conversation(NamedTuple):
    """Messages; those that are not to be learned have "loss": 0.

    tools: schemas, or their JSON text; None: those of the environment that is given.
    system: the system message, where `messages` has none; None: the environment's.
    env: the environment whose task this is, if the row says so.
    """

    messages: list[dict]
    tools: list[dict] | str | None = None
    system: str | None = None
    env: str | None = None


# ------------------------------------------------------------------------------------------- rows
def chat(row):
    """{"messages": [...]}: assistant messages are learned, but those of "loss" or "weight" 0."""
    messages = row["messages"]
    if not isinstance(messages, list) or not is_messages(messages[:1]) or "role" not in messages[0]:
        raise ValueError('"messages" must be a list of {"role": ..., "content": ...}')
    return Conversation(messages, row.get("tools"), row.get("system"))


def completion(row):
    """{"prompt", "completion"}, each text or messages: the completion is learned."""
    for name, lost in (("prompt", "answer"), ("completion", "train on")):
        if row[name] == [] or isinstance(row[name], str) and not row[name].strip():
            raise ValueError(f'"{name}" is empty: nothing to {lost}')
    prompt = as_messages(row["prompt"], "user")
    answer = as_messages(row["completion"], "assistant")
    if not is_messages(prompt) or not is_messages(answer):
        raise ValueError('"prompt" and "completion" must each be text or a list of messages')
    return Conversation(without_loss(prompt) + answer, row.get("tools"), row.get("system"))


def written_solution(row):
    """GSM8K's {"question", "answer"}: each <<48/2=24>> is a call that the environment answers."""
    tools = envs.schemas(envs.load("gsm8k"))
    return Conversation(gsm8k.written_solution(row), tools, env="gsm8k")


def meeting(row):
    """{"input_text", "target_probability", ...} of a meeting: the answer is JSON."""
    columns = {name: str(value) for name, value in row.items()}
    text, probability, reason, _ = meetings.read_columns(columns)
    answer = meetings.answer(probability, reason)
    return Conversation(as_messages(text, "user") + as_messages(answer, "assistant"))


KINDS = {  # name -> (the fields that tell the kind of a row, its reader)
    "conversations": (("messages",), chat),
    "completions": (("prompt", "completion"), completion),
    "written solutions": (("question", "answer"), written_solution),
    "meetings": (("input_text", "target_probability"), meeting),
}
EXPECTED = "; ".join(", ".join(fields) for fields, _ in KINDS.values())


def kind_of(row: dict) -> str | None:
    """Return the name of the first of KINDS whose fields the row has, or None."""
    return next((name for name, (fields, _) in KINDS.items() if row.keys() >= {*fields}), None)


def demonstration(row: dict) -> Conversation:
    """Return the conversation of a row of any of the KINDS. Raises ValueError in one line."""
    kind = kind_of(row)
    if kind is None:
        raise ValueError(f"nothing to learn from; need {EXPECTED}; has: {', '.join(row)}")
    return KINDS[kind][1](row)


# --------------------------------------------------------------------------------------- messages
def is_messages(value) -> bool:
    """True if the value is a list of at least one object."""
    return isinstance(value, list) and bool(value) and all(isinstance(m, dict) for m in value)


def as_messages(value, role):
    """Return text as one message of this role, and anything else as it is."""
    return [{"role": role, "content": value}] if isinstance(value, str) else value


def without_loss(messages):
    """Return the messages marked as not to be learned."""
    return [{**message, "loss": 0} for message in messages]


# ----------------------------------------------------------------------------------------- tokens
class Encoder:
    """Turns conversations into token ids and a loss mask: the same ids as in a rollout.

    env: the environment whose tools and system message a conversation gets that brings none, or
    None. Of several environments (a,b) none is taken.
    """

    def __init__(self, tokenizer, env: str | None = None):
        cls = envs.load(env) if env and "," not in env else None
        self.tools = envs.schemas(cls) if cls else []
        self.system = getattr(cls, "system_prompt", None)
        # Preparing a chat costs many renderings of the template; most files have one list of tools.
        self.chat = lru_cache(64)(lambda tools: Chat(tokenizer, json.loads(tools)))

    def __call__(self, conversation: Conversation) -> Trajectory:
        """Return a conversation as an episode. Raises ValueError in one line."""
        messages = conversation.messages
        system = conversation.system or self.system
        if system is not None and not isinstance(system, str):
            raise ValueError('"system" must be text')
        if system and messages[0].get("role") != "system":
            messages = [{"role": "system", "content": system, "loss": 0}, *messages]
        tools = self.tools if conversation.tools is None else read_tools(conversation.tools)
        token_ids, loss_mask = self.chat(json.dumps(tools)).conversation(messages)
        return Trajectory(token_ids, loss_mask, [0.0] * len(token_ids), stop_reason="done",
                          messages=messages)


def read_tools(tools) -> list[dict]:
    """Return function schemas, which may be given as JSON text. Raises ValueError in one line."""
    try:
        tools = json.loads(tools) if isinstance(tools, str) else tools
        names = [tool["function"]["name"] for tool in tools]
        named = isinstance(tools, list) and all(isinstance(name, str) for name in names)
    except (ValueError, TypeError, KeyError):
        named = False
    if not named:
        raise ValueError('"tools" must be a list of '
                         '{"type": "function", "function": {"name": ...}}')
    return tools


def check_tokens(token_ids: list[int], messages: list[dict], tokenizer, vocabulary: int):
    """Raise ValueError if an episode was recorded with another model's tokenizer.

    That is so if a token id is outside of the model's vocabulary, or if the tokens do not spell the
    first question of the user.
    """
    largest = max(token_ids)
    if largest >= vocabulary:
        raise ValueError(f"token id {largest} is not in this model's vocabulary of {vocabulary}: "
                         "another model's episode")
    questions = [str(m.get("content")) for m in messages if m.get("role") == "user"]
    if questions and squeezed(questions[0]) not in squeezed(tokenizer.decode(token_ids)):
        raise ValueError("the tokens do not spell the episode's messages: another model's episode")


def squeezed(text: str) -> str:
    """Return the text without what tokenizers may lose: white space, Unicode's compatible forms."""
    return unicodedata.normalize("NFKC", "".join(text.split()))


# ------------------------------------------------------------------------------------------- files
def imitates_rows(dataset: str | None, env: str | None) -> bool:
    """True if the rows of a file are to be imitated as written; False if they are tasks.

    The first row decides. A row that the given environment takes for a task is one.
    """
    if not dataset or dataset == env:
        return False
    row = read_rows(dataset)[0]
    line = row.pop("_line")
    kind = kind_of(row)
    if "token_ids" in row:
        raise UserError(f"{dataset}:{line}: a recorded episode; give the file with --trajectories")
    if not env and not kind and not envs.is_task("equations", row):
        raise UserError(f"{dataset}:{line}: neither a row to learn from ({EXPECTED}) nor a task of "
                        f"equations; name the environment with --env; has: {', '.join(row)}")
    return kind is not None and not (env and envs.is_task(env, row))


class Row(NamedTuple):
    """A row of a file, and the conversation in it."""

    path: str
    line: int
    row: dict
    conversation: Conversation

    def content(self):
        """Return what makes this row the same as another."""
        return self.row

    def episode(self, encode: Encoder) -> Trajectory:
        """Return the row as an episode. UserError: `FILE:LINE: what is wrong`."""
        with reading(self.path, self.line):
            episode = encode(self.conversation)
        episode.group_id = f"{self.path}:{self.line}"
        episode.info = {"env": self.conversation.env, "task": self.row}
        return episode


def read_demonstrations(path: str) -> list[Row]:
    """Read and check the rows of a file to imitate. UserError: `FILE:LINE: what is wrong`."""
    out = []
    for row in read_rows(path):
        line = row.pop("_line")
        with reading(path, line):
            out.append(Row(path, line, row, demonstration(row)))
    return out


def read_trajectories(path: str, tokenizer=None, vocabulary: int = 0) -> list[Trajectory]:
    """Return the episodes of a trajectories.jsonl, but for those whose environment failed.

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
    return without_faults(out)


def describe(rows: list[Row], tokenizer):
    """Print how many rows of which kind there are, and how many spell a control token as text."""
    kinds = Counter(kind_of(row.row) for row in rows)
    for kind, count in kinds.items():
        print(f"{rows[0].path}: {count} {kind} to learn from")
    texts = [json.dumps(row.conversation.messages, ensure_ascii=False) for row in rows]
    for token in tokenizer.all_special_tokens:
        count = sum(token in text for text in texts)
        if count:
            print(f"{count} rows contain {token} as text")  # it ends no turn


def split(rows, apart, content, seed: int) -> tuple[list, list]:
    """Return the rows to learn from and the held-out rows, of other contents, in random order.

    Args:
        rows: the rows to learn from.
        apart: the rows to hold out, or None: a tenth of `rows`, by the hash of their content.
        content: a function that returns what makes a row the same as another, as JSON can write it.
        seed: of the order.
    """
    keys = [json.dumps(content(row), sort_keys=True) for row in rows]
    if apart is None:
        apart = [row for row, key in zip(rows, keys) if zlib.crc32(key.encode()) % 10 == 0]
        if len(apart) == len(rows):  # one or two rows: all are learned from
            apart = []
        held_out_keys = {json.dumps(content(row), sort_keys=True) for row in apart}
        rows = [row for row, key in zip(rows, keys) if key not in held_out_keys]
    else:
        unseen = [row for row in apart if json.dumps(content(row), sort_keys=True) not in keys]
        if len(unseen) < len(apart):
            print(f"{len(apart) - len(unseen)} of {len(apart)} held-out rows are also in the "
                  "training data: dropped")
        apart = unseen
    return shuffled(rows, seed), shuffled(apart, seed)


def shuffled(items: list, seed: int) -> list:
    """Return the items in random order."""
    return [items[i] for i in np.random.default_rng(seed).permutation(len(items))]


def default_env(trajectories: str | None) -> str | None:
    """Return the --env of a run that states none: that of its recorded episodes, or equations.

    trajectories: the flag, one file or several (a,b).
    """
    if not trajectories:
        return "equations"
    episodes = [t for path in trajectories.split(",") for t in read_trajectories(path.strip())]
    return registered_envs(t.info for t in episodes)


def registered_envs(infos) -> str | None:
    """Return the registered environments that episodes name in their `info` ("a,b"), or None.

    A data file never chooses which code runs: what is not in envs.ENVS is ignored.
    """
    named = {str(info.get("env")) for info in infos}
    return ",".join(sorted(named & envs.ENVS.keys())) or None
