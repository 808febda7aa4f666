"""Demonstrations in files: conversations, as chats or as completions.

    read_dataset  the conversations in the rows of a file, to learn from and held out
    encoded       their token ids and loss mask, put together as a rollout puts them together
"""
import json
from collections import Counter
from contextlib import suppress
from functools import cached_property, lru_cache, partial
from itertools import filterfalse
from operator import attrgetter
from typing import NamedTuple

import envs
from agent import Trajectory
from core.chat import Chat, Template
from core.config import reading
from envs.prompts import as_function, as_messages
from envs.task_files import need, read_as
from envs.tasks import unseen
from episodes import read_split
from extras.data.recorded import recorded_ids
from extras.data.tables import is_empty, need_text_row, truth

CONVERSATIONS = {"messages", "conversations", "completion", "output"}
# What others call the columns of a prompt and of its completion.
OTHER_NAMES = {"prompt": ("prompt", "question", "query", "problem", "input", "user"),
               "completion": ("answer", "response", "solution", "target", "reply", "assistant")}
TEXT = "text"  # the role of the one message of a row that is a text, not a conversation


class Conversation(NamedTuple):
    """The conversation in a row of a file. Messages with "loss": 0 are not learned.

    The row may also hold "tools" or "functions" (schemas, or their JSON text) and "system" or
    "system_prompt" (the system message, where `messages` has none). Without them, those of the
    environment are taken.
    """

    messages: list[dict]
    row: dict
    place: str  # FILE:LINE


# ------------------------------------------------------------------------------------------- rows
def read_dataset(config) -> tuple[list, list]:
    """Return the conversations of --dataset to learn from, and the held-out ones.

    No model is needed, so that a bad row is refused before one is loaded.
    """
    read = partial(read_demonstrations, config=config)
    learned, held_out = read_split(read, config.dataset, attrgetter("row"), config)

    def content(conversation):
        """Return what is learned. Rows with an id of their own may say the same."""
        messages, row, _ = conversation
        return [messages, row.get("tools"), row.get("system")]

    return learned, unseen(held_out, learned, content)


def read_demonstrations(path: str, config) -> list[Conversation]:
    """Return the conversations in the rows of a file. UserError: `FILE:LINE: what is wrong`.

    config: names the environment, whose `_conversation` reads rows of its own form.
    """
    cls = single_environment(config)
    return list(read_as(path, lambda row, place: Conversation(messages_in(row, cls), row, place),
                        config.fields, config.seed))


def single_environment(config) -> type | None:
    """Return the class of the environment of a config. Of several (a,b) none is taken."""
    names = envs.names_of(config.env)
    if len(names) != 1:
        return None
    return envs.with_options(envs.load(names[0]), envs.options_of(config))


def messages_in(row: dict, env: type | None) -> list[dict]:
    """Return the messages in a row, or raise ValueError. Its columns say of which form it is.

        messages                    a chat: its assistant messages are learned, but those of
                                    "loss" or "weight" 0
        conversations               ShareGPT: the same as {"from", "value"}
        prompt, completion          each text or messages; the completion is learned
        instruction, input, output  Alpaca; the output is learned, and the input may be missing
        text                        learned from its first to its last token, without a template

    Other rows are read by the environment's `_conversation`.
    """
    # In a table of several forms the columns of the others are null.
    given = {name for name in row if row[name] is not None}
    need_text_row(row)
    for name in given & {"label", "kto_tag"}:
        if given & CONVERSATIONS and truth(row[name]) == 0:
            raise ValueError(f'"{name}" is false: a bad answer is not imitated; leave such rows '
                             "out")
    for name in ("messages", "conversations"):
        if name in given:
            return as_messages(row[name], name)
    if "completion" in row and not given & {"output", "text"}:
        need(row, "prompt", "completion")
    prompt = prompt_in(row)
    for name in ("completion", "output"):
        if name in given and prompt:
            return without_loss(prompt) + as_messages(row[name], name, "assistant")
    if hasattr(env, "_conversation"):
        return env._conversation(row)
    if isinstance(row.get("text"), str):
        return [{"role": TEXT, "content": row["text"]}]
    forms = "nor another form: {conversations}, {prompt, completion}, {instruction, output}, {text}"
    columns = []
    for ours, others in OTHER_NAMES.items():
        columns += [f"{ours}={name}" for name in row if name.lower() in others][:1]
    if len(columns) == len(OTHER_NAMES):
        forms = f"name its columns: --fields {','.join(columns)}"
    need(row, "messages", otherwise=f"{forms}; rows of an environment's own form need its --env, "
                                    "tasks --tasks")


def prompt_in(row: dict) -> list[dict] | None:
    """Return the messages of "prompt", "conversations" or "instruction", or None without them."""
    for name in ("prompt", "conversations"):
        if row.get(name) is not None:
            return as_messages(row[name], name, "user")
    if row.get("instruction") is None:
        return None
    if not is_empty(row.get("history")):
        raise ValueError('"history" is not read; give the conversation as "messages"')
    parts = [row["instruction"], row.get("input")]
    return as_messages("\n\n".join(filter(None, parts)), "instruction", "user")


def without_loss(messages):
    """Return the messages marked as not to be learned."""
    return [{**message, "loss": 0} for message in messages]


# ----------------------------------------------------------------------------------------- tokens
def encoded(conversations, tokenizer, config) -> tuple[list, list]:
    """Return what `read_dataset` returned as episodes."""
    learned, held_out = conversations
    count_control_tokens(learned, tokenizer)
    encode = Encoder(tokenizer, config)
    return list(map(encode, learned)), list(map(encode, held_out))


class Encoder:
    """Turns conversations into token ids and a loss mask: the same ids as in a rollout.

    config: names the environment whose tools and system message a conversation gets by default.
    """

    def __init__(self, tokenizer, config):
        self.env, self.tokenizer = config.env, tokenizer
        cls = single_environment(config)
        self.system_prompt = getattr(cls, "system_prompt", None)
        self.schemas = envs.schemas(cls) if cls else []
        # Preparing a chat costs many renderings of the template; most files have one list of tools.
        self.chat = lru_cache(64)(lambda tools: Chat(tokenizer, json.loads(tools)))

    @cached_property
    def stop_ids(self) -> frozenset:
        """The tokens that end a text: of a turn and of a text, with which Qwen pads."""
        ends = {self.tokenizer.eos_token_id, self.tokenizer.pad_token_id}
        with suppress(ValueError):  # there may be no chat template
            ends |= self.chat("[]").stop_ids
        return frozenset(ends)

    def __call__(self, conversation: Conversation) -> Trajectory:
        """Return a conversation as an episode. UserError: `FILE:LINE: what is wrong`."""
        messages, row, place = conversation
        with reading(place):
            given = [row.get("system"), row.get("system_prompt"), self.system_prompt]
            system = next(filterfalse(is_empty, given), None)
            if messages[0].get("role") == TEXT:
                token_ids, loss_mask = self.plain_text(messages[0]["content"])
            else:
                if system and messages[0].get("role") != "system":
                    messages = [{"role": "system", "content": system}, *messages]
                tools = read_tools(row.get("tools"))
                tools = read_tools(row.get("functions")) if tools is None else tools
                tools = self.schemas if tools is None else tools
                token_ids, loss_mask = recorded_ids(
                    self.chat(json.dumps(tools)), messages)
        return Trajectory(token_ids, loss_mask, [0.0] * len(token_ids), stop_reason="done",
                          messages=messages, group_id=place, info={"env": self.env, "task": row})

    def plain_text(self, text: str) -> tuple[list[int], list[int]]:
        """Return the ids and the loss mask of a text: all that has a token before it is learned.

        Here what spells a control token is one, since people render chats into such texts. A text
        without a stop token at its end gets the end-of-text token, if there is one.
        """
        end = self.tokenizer.eos_token_id
        ids = self.tokenizer(text)["input_ids"]
        # Templates write a newline after the last stop token, which no model samples.
        ended = self.tokenizer(text.rstrip())["input_ids"]
        if self.stop_ids.intersection(ended[-1:]):
            ids = ended
        elif end is not None:
            ids = [*ids, end]
        # A rendered chat brings the beginning-of-text token that the tokenizer puts before it.
        if ids[:2] == [self.tokenizer.bos_token_id] * 2:
            ids = ids[1:]
        if len(ids) < 2:
            raise ValueError('"text" is empty: nothing to train on')
        return ids, [0, *[1] * (len(ids) - 1)]


def read_tools(tools) -> list[dict] | None:
    """Return function schemas, which may be given as JSON text, None for none, or ValueError."""
    with suppress(ValueError, TypeError, KeyError):
        tools = json.loads(tools or "[]") if isinstance(tools, str) else tools
        if tools is None:
            return None
        # ShareGPT's tools are the functions alone.
        tools = list(map(as_function, tools))
        if all(type(t["function"]["name"]) is str for t in tools):
            return tools
    raise ValueError('"tools" must be a list of {"type": "function", "function": {"name": ...}}')


def count_control_tokens(conversations: list[Conversation], tokenizer):
    """Print how many conversations spell a control token as text. Spelled so, it ends no turn.

    Counted are special tokens, and added ones that the chat template does not write.
    """
    written = str(tokenizer.chat_template)
    template = Template(tokenizer)
    rows = Counter()
    for messages, *_ in conversations:
        if messages[0].get("role") != TEXT:
            text = json.dumps(messages, ensure_ascii=False)
            rows.update(dict.fromkeys(template.control_token.findall(text), 1))
    for token, count in rows.items():
        if token in tokenizer.all_special_tokens:
            print(f"{count} rows contain {token} as text")
        elif token not in written:
            print(f"{count} rows contain {token} as text: an added token, learned as its pieces")
