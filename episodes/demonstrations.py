"""Rows of a file become conversations to learn from: chats, completions and written solutions.

    read_demonstrations  the conversations in the rows of a file
    Encoder              their token ids and loss mask, put together as a rollout puts them together
    read_trajectories    recorded episodes, which have their token ids
"""
import json
import unicodedata
from collections import Counter
from functools import cache, lru_cache
from typing import NamedTuple

import envs
from agent import Trajectory
from envs import gsm8k, meetings
from episodes.tasks import first_row, is_task, read_as
from experiment.data import reading
from experiment.episodes import without_faults
from experiment.errors import UserError
from llm.chat import Chat
from llm.recorded import recorded_ids


class Conversation(NamedTuple):
    """The conversation in a row of a file. Messages with "loss": 0 are not learned.

    The row may also hold "tools" (schemas, or their JSON text) and "system" (the system message,
    where `messages` has none). Without them, those of the environment `env` are taken.
    """

    messages: list[dict]
    row: dict
    place: str  # FILE:LINE
    env: str | None = None


# ------------------------------------------------------------------------------------------- rows
def chat(row):
    """{"messages": [...]}: assistant messages are learned, but those of "loss" or "weight" 0."""
    messages = row["messages"]
    if not is_messages(messages):
        raise ValueError('"messages" must be a list of {"role": ..., "content": ...}')
    return messages


def completion(row):
    """{"prompt", "completion"}, each text or messages: the completion is learned."""
    for name, purpose in (("prompt", "answer"), ("completion", "train on")):
        if row[name] == [] or isinstance(row[name], str) and not row[name].strip():
            raise ValueError(f'"{name}" is empty: nothing to {purpose}')
    prompt = as_messages(row["prompt"], "prompt", "user")
    return without_loss(prompt) + as_messages(row["completion"], "completion", "assistant")


def meeting(row):
    """{"input_text", "target_probability", ...} of a meeting: the answer is JSON."""
    text, probability, reason = meetings.read_columns(row)
    return [{"role": "user", "content": text},
            {"role": "assistant", "content": meetings.answer(probability, reason)}]


KINDS = {  # name -> (the fields that tell the kind of a row, its reader, its environment)
    "conversations": (("messages",), chat, None),
    "completions": (("prompt", "completion"), completion, None),
    "written solutions": (("question", "answer"), gsm8k.written_solution, "gsm8k"),
    "meetings": (("input_text", "target_probability"), meeting, None),
}
EXPECTED = "; ".join(", ".join(fields) for fields, _, _ in KINDS.values())


def kind_of(row: dict) -> str | None:
    """Return the name of the first of KINDS whose fields the row has, or None."""
    for name, (fields, _, _) in KINDS.items():
        if row.keys() >= set(fields):
            return name
    return None


def demonstration(row: dict, place: str) -> Conversation:
    """Return the conversation in a row of any of the KINDS, or raise ValueError."""
    kind = kind_of(row)
    if kind is None:
        raise ValueError(f"nothing to learn from; need {EXPECTED}; has: {', '.join(row)}")
    _, reader, env = KINDS[kind]
    return Conversation(reader(row), row, place, env)


def read_demonstrations(path: str) -> list[Conversation]:
    """Read and check the rows of a file to imitate. UserError: `FILE:LINE: what is wrong`."""
    return read_as(path, demonstration)


def imitates_rows(dataset: str | None, env: str | None) -> bool:
    """True if the rows of a file are to be imitated as written; False if they are tasks.

    The first row decides. A row that the given environment takes for a task is one.
    """
    if not dataset or dataset == env:
        return False
    row, place = first_row(dataset)
    kind = kind_of(row)
    if "token_ids" in row:
        raise UserError(f"{place}: a recorded episode; give the file with --trajectories")
    if not env and not kind and not is_task("equations", row):
        raise UserError(f"{place}: neither a row to learn from ({EXPECTED}) nor a task of "
                        f"equations; name the environment with --env; has: {', '.join(row)}")
    return kind is not None and not (env and is_task(env, row))


# --------------------------------------------------------------------------------------- messages
def is_messages(value) -> bool:
    """True if the value is a list of at least one object."""
    return isinstance(value, list) and bool(value) and all(isinstance(m, dict) for m in value)


def as_messages(value, name: str, role: str) -> list[dict]:
    """Return a field that holds messages, or text, which becomes one message of this role."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not is_messages(value):
        raise ValueError(f'"{name}" must be text or a list of messages')
    return value


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
        self.env = None if env and "," in env else env
        # Preparing a chat costs many renderings of the template; most files have one list of tools.
        self.chat = lru_cache(64)(lambda tools: Chat(tokenizer, json.loads(tools)))
        self.schemas = cache(envs.schemas)

    def __call__(self, conversation: Conversation) -> Trajectory:
        """Return a conversation as an episode. UserError: `FILE:LINE: what is wrong`."""
        messages, row, place, env = conversation
        cls = envs.load(env or self.env) if env or self.env else None
        with reading(place):
            system = row.get("system") or getattr(cls, "system_prompt", None)
            if not isinstance(system, str | None):
                raise ValueError('"system" must be text')
            if system and messages[0].get("role") != "system":
                messages = [{"role": "system", "content": system, "loss": 0}, *messages]
            tools = self.schemas(cls) if cls else []
            if row.get("tools") is not None:
                tools = read_tools(row["tools"])
            token_ids, loss_mask = recorded_ids(self.chat(json.dumps(tools)), messages)
        return Trajectory(token_ids, loss_mask, [0.0] * len(token_ids), stop_reason="done",
                          messages=messages, group_id=place, info={"env": env, "task": row})


def read_tools(tools) -> list[dict]:
    """Return function schemas, which may be given as JSON text, or raise ValueError."""
    try:
        tools = json.loads(tools) if isinstance(tools, str) else tools
        if isinstance(tools, list) and all(type(t["function"]["name"]) is str for t in tools):
            return tools
    except (ValueError, TypeError, KeyError):
        pass
    raise ValueError('"tools" must be a list of {"type": "function", "function": {"name": ...}}')


def describe(conversations: list[Conversation], tokenizer):
    """Print how many rows of which kind there are, and how many spell a control token as text."""
    path = conversations[0].place.rpartition(":")[0]
    for kind, count in Counter(kind_of(c.row) for c in conversations).items():
        print(f"{path}: {count} {kind} to learn from")
    texts = [json.dumps(c.messages, ensure_ascii=False) for c in conversations]
    for token in tokenizer.all_special_tokens:
        count = sum(token in text for text in texts)
        if count:
            # Spelled as text it ends no turn.
            print(f"{count} rows contain {token} as text")


# ------------------------------------------------------------------------------ recorded episodes
def read_trajectories(path: str, tokenizer=None, vocabulary: int = 0) -> list[Trajectory]:
    """Return the episodes of a trajectories.jsonl, but for those whose environment failed.

    With a model's tokenizer and the size of its vocabulary, episodes of another model are refused.
    """
    def episode(row, _):
        trajectory = Trajectory.from_json(row)
        if tokenizer:
            check_tokens(trajectory.token_ids, trajectory.messages, tokenizer, vocabulary)
        return trajectory

    return without_faults(read_as(path, episode))


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


def default_env(trajectories: str | None) -> str | None:
    """Return the --env of a run that states none: that of its recorded episodes, or equations.

    trajectories: the flag, one file or several (a,b).
    """
    if not trajectories:
        return "equations"
    episodes = [t for path in trajectories.split(",") for t in read_trajectories(path.strip())]
    return registered_envs(t.info for t in episodes)


def env_of_rows(dataset: str | None) -> str | None:
    """Return the environment that the kind of a file's first row belongs to, or None."""
    if not dataset:
        return None
    kind = kind_of(first_row(dataset)[0])
    return KINDS[kind][2] if kind else None


def registered_envs(infos) -> str | None:
    """Return the registered environments that episodes name in their `info` ("a,b"), or None.

    A data file never chooses which code runs: what is not in envs.ENVS is ignored.
    """
    named = {str(info.get("env")) for info in infos}
    return ",".join(sorted(named & envs.ENVS.keys())) or None
