"""The agent's side of an episode: what is stored, how chat becomes tokens, how sampled text becomes tool calls.

`Trajectory` is one episode, token by token. `Chat` turns messages into token ids through the tokenizer's own chat
template, and never renders a conversation twice: the ids of an episode are prompt + sampled + suffix + sampled ..., where
a suffix is cut out of a rendering of a dummy conversation. `parse_tool_calls` reads what the model wrote, and never raises.
"""

import ast
import copy
import hashlib
import json
import math
import os
import re
from dataclasses import dataclass, field, fields
from itertools import takewhile


@dataclass
class Trajectory:
    """One episode in the order the model saw it; the three token lists are aligned (column t belongs to token t)."""

    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)      # 1 exactly where the policy sampled the token
    logprobs: list[float] = field(default_factory=list)     # nats, at the sampling temperature; 0.0 where masked
    rewards: list[float] = field(default_factory=list)      # one per assistant turn
    reward: float = 0.0                                     # their sum after weights, scale and bias
    reward_parts: dict[str, float] = field(default_factory=dict)
    group_id: str = ""                                      # which task instance, never the prompt's text
    stop_reason: str = ""  # done | max_turns | max_tokens | max_tool_calls | max_tool_tokens | malformed
    messages: list[dict] = field(default_factory=list)      # the same as text, to read
    info: dict = field(default_factory=dict)                # env, task, success, tool calls, tool errors

    def to_json(self) -> dict:
        return dict(vars(self))

    @classmethod
    def from_json(cls, row: dict) -> "Trajectory":
        """One line of trajectories.jsonl, parsed. Raises ValueError (one line) on what no trainer should see."""
        def finite(x):
            return isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x)

        def refuse_unless(ok, problem):
            if not ok:
                raise ValueError(f"not a trajectory: {problem}")

        refuse_unless(isinstance(row, dict), f"expected an object, got {type(row).__name__}")
        unknown = row.keys() - {f.name for f in fields(cls)}
        refuse_unless(not unknown, f"unknown fields {sorted(map(str, unknown))}")
        for name in ("token_ids", "loss_mask", "logprobs"):
            refuse_unless(isinstance(row.get(name), list), f"{name} must be a list")
        out = cls(**row)
        lengths = len(out.token_ids), len(out.loss_mask), len(out.logprobs)
        refuse_unless(lengths[0] and len(set(lengths)) == 1, f"lengths of token_ids, loss_mask, logprobs are {lengths}")
        refuse_unless(all(type(t) is int and t >= 0 for t in out.token_ids), "token_ids must be integers >= 0")
        refuse_unless(all(type(m) is int and m in (0, 1) for m in out.loss_mask), "loss_mask must be 0 or 1")
        refuse_unless(out.loss_mask[0] == 0, "loss_mask[0] is 1, but nothing precedes the first token")
        refuse_unless(all(map(finite, out.logprobs)), "logprobs must be finite numbers")
        refuse_unless(isinstance(out.rewards, list) and all(map(finite, out.rewards)) and finite(out.reward),
                      "rewards and reward must be finite numbers")
        refuse_unless(isinstance(out.reward_parts, dict) and all(map(finite, out.reward_parts.values())),
                      "reward_parts must map names to finite numbers")
        return out


# ---------------------------------------------------------------------------------------------- chat <-> token ids

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
# Words no template contains: where they come out tells what a template does with the text around them.
USER, REPLY, ANSWER, ARG, ARG2, RESULT, ABOUT, THOUGHT = (f"zq{c}zq" for c in "abcdefgh")
PROBE = {"type": "function", "function": {"name": "probe", "description": ABOUT, "parameters": {
    "type": "object", "properties": {"x": {"type": "string", "description": "x"}}, "required": ["x"]}}}
TOOLS_AS_TEXT = """You can call these functions. Each line is the JSON schema of one:
{schemas}
To call a function, write its name and arguments as JSON between tags, one pair of tags per call:
<tool_call>
{{"name": "function_name", "arguments": {{"argument_name": "value"}}}}
</tool_call>
Each result comes back between <tool_response> and </tool_response>."""


class Chat:
    """Chat template <-> token ids, for one tokenizer and one list of tools (schemas of transformers' get_json_schema).

    Only ids that the template writes itself, or that the policy samples, are control tokens: every other text is
    encoded as plain text, whatever it spells. Raises ValueError, in one line, for a template it cannot use.
    """

    def __init__(self, tokenizer, tools: list[dict], generation_config=None):
        if not tokenizer.chat_template:
            raise ValueError("this tokenizer has no chat template: use the instruct model's tokenizer, "
                             "or set tokenizer.chat_template")
        self.template_hash = hashlib.sha256(tokenizer.get_chat_template(tools=tools or None).encode()).hexdigest()
        # Whitespace tokens (Gemma has "\n\n") are ordinary text. A copy, so that the list is not saved with the model.
        controls = [t.content for t in tokenizer.added_tokens_decoder.values() if not t.content.isspace()]
        self.tokenizer = copy.copy(tokenizer)
        self.tokenizer.chat_control_tokens = controls
        self._control = re.compile("|".join(map(re.escape, sorted(controls, key=len, reverse=True))) or "(?!)")
        for tool in (tools := self._clean(tools)):
            if not NAME.fullmatch(tool["function"]["name"]):
                raise ValueError(f"tool name {tool['function']['name']!r} is not an identifier")

        user, reply, answer = self._message("user", USER), self._message("user", REPLY), self._message("assistant", ANSWER)
        call, two = ([{"name": "probe", "arguments": {"x": a}} for a in args] for args in ([ARG], [ARG, ARG2]))
        if not self._shows([USER, ANSWER, REPLY], [user, answer, reply]):
            raise ValueError("the chat template does not show user and assistant messages given as text")
        self._folds_system = not self._shows([ABOUT, USER], [self._message("system", ABOUT), user])
        self.native_tools = self._shows([ABOUT, ARG, RESULT], self._called(call, [RESULT]), [PROBE])
        self._many = self.native_tools and self._shows([ARG, ARG2, RESULT], self._called(two, [RESULT] * 2), [PROBE])
        self._tools_text = "" if self.native_tools or not tools else TOOLS_AS_TEXT.format(
            schemas="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        self._tools = tools if self.native_tools and tools else None

        stop, *self._answer_cut = self._end_of_turn([user, answer, reply], ANSWER, set())
        self.answer_stop_id = self.call_stop_id = stop
        self._call_cut = self._answer_cut
        if self.native_tools:
            dummy = self._called(two, [RESULT] * 2) if self._many else self._called(call, [RESULT])
            between = self._text(dummy).partition(ARG)[2].partition(ARG2)[0] if self._many else ""
            self.call_stop_id, *self._call_cut = self._end_of_turn(
                dummy, ARG2 if self._many else ARG, set(self._control.findall(between)))
        eos = getattr(generation_config, "eos_token_id", None)
        eos = {tokenizer.eos_token_id, *(eos if isinstance(eos, (list, tuple)) else [eos])} - {None}
        self.stop_ids = frozenset(eos | {self.call_stop_id, self.answer_stop_id})
        self.start_ids = self._turn_starts(user, answer, reply) - self.stop_ids

    # -- what callers use

    def prompt(self, messages: list[dict]) -> list[int]:
        """Ids of the first prompt ([system], user, [assistant, user ...]), generation prompt included."""
        for i, m in enumerate(messages):
            if m.get("role") not in ("system", "user", "assistant") or (m["role"] == "system" and i > 0):
                raise ValueError(f"message {i}: role {m.get('role')!r} (a prompt is [system], user, [assistant, user ...])")
            if not isinstance(m.get("content"), str):
                raise ValueError(f"message {i}: content must be text, got {type(m.get('content')).__name__}")
        if not messages or messages[-1]["role"] != "user":
            raise ValueError("a prompt must end with a user message")
        system = [m["content"] for m in messages if m["role"] == "system"]
        turns = [self._message(m["role"], m["content"]) for m in messages[len(system):]]
        top = (system if self._folds_system else []) + [self._tools_text] * bool(self._tools_text)
        turns[0]["content"] = "\n\n".join([*map(self._clean, top), turns[0]["content"]])
        if system and not self._folds_system:
            turns.insert(0, self._message("system", system[0]))
        return self._ids(turns)

    def turn(self, content: str, calls: list[dict]) -> list[int]:
        """An assistant turn as the model would sample it after the generation prompt, its stop token included."""
        if len(calls) > 1 and self.native_tools and not self._many:
            raise ValueError(f"this chat template shows one tool call per turn, got {len(calls)}")
        if not self.native_tools:
            calls_text = [f"<tool_call>\n{json.dumps(c, ensure_ascii=False)}\n</tool_call>" for c in calls]
            content, calls = "\n".join([content] * bool(content) + calls_text), []
        user = self._message("user", USER)
        prompt, full = self._ids([user]), self._ids([user, self._message("assistant", content, calls)], False)
        shared = len(os.path.commonprefix([prompt, full]))
        rest, turn = self.tokenizer.decode(prompt[shared:]), full[shared:]  # rest: where the two do not meet
        k = next((k for k in range(1, len(turn) + 1) if not rest.startswith(self.tokenizer.decode(turn[:k]))), 1)
        seam = self.tokenizer.decode(turn[:k])
        if rest and seam.startswith(rest):  # "<think>\n" against "<think>" "\n\n": a token across the seam
            turn = self.tokenizer.encode(seam[len(rest):], add_special_tokens=False) + turn[k:]
        elif rest.strip() == "<think>":  # the prompt opens a thought that the template's own turns do not have
            turn = self.tokenizer.encode("</think>\n\n", add_special_tokens=False) + turn
        elif rest.strip():
            raise ValueError(f"the chat template's assistant turns do not begin with its generation prompt ({rest!r})")
        stop = self.call_stop_id if calls else self.answer_stop_id
        return turn[:turn.index(stop) if stop in turn else len(turn)] + [stop]

    def results(self, calls: list[dict], results: list[str], sampled_stop: int | None) -> list[int]:
        """Ids that follow a calling turn: all its results, then the generation prompt. `results` may be longer than
        `calls`: the rest are errors about calls that could not be read. Our own stop token comes first where the
        turn did not end with the one the template writes there (forced, so it is not trained)."""
        if not self.native_tools:
            return self.reply("\n".join(f"<tool_response>\n{r}\n</tool_response>" for r in results), sampled_stop)
        names = [c["name"] if NAME.fullmatch(c["name"]) else "unknown" for c in calls]
        names += ["unknown"] * (len(results) - len(calls))
        dummy = self._called([{"name": n, "arguments": {"x": ARG}} for n in names], results)
        return self._suffix(dummy, self._call_cut, sampled_stop == self.call_stop_id)

    def reply(self, text: str, sampled_stop: int | None) -> list[int]:
        """Ids that follow an answering turn: a user message and the generation prompt."""
        dummy = [self._message("user", USER), self._message("assistant", ANSWER), self._message("user", text)]
        return self._suffix(dummy, self._answer_cut, sampled_stop == self.answer_stop_id)

    def text(self, ids: list[int]) -> str:
        """What the model wrote, its control tokens spelled out, without the stop token."""
        ids = ids[:-1] if ids and ids[-1] in self.stop_ids else ids
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    # -- rendering

    def _clean(self, value):
        """Text that can be encoded. Keys are refused, not cleaned: the tokenizer's sanitising covers values only."""
        if isinstance(value, str):
            return value.encode("utf-8", "replace").decode()
        if isinstance(value, dict):
            for key in value:
                if not isinstance(key, str) or self._control.search(key):
                    raise ValueError(f"name {key!r} contains a control token")
            return {self._clean(k): self._clean(v) for k, v in value.items()}
        return [self._clean(v) for v in value] if isinstance(value, (list, tuple)) else value

    def _message(self, role, content, calls=(), **extra):
        message = {"role": role, "content": self._clean(content), **extra}
        if calls:
            message["tool_calls"] = [  # ids of nine alphanumerics, because Mistral's templates insist on that
                {"id": f"call{i:05d}", "type": "function", "function": self._clean(c)} for i, c in enumerate(calls)]
        return message

    def _called(self, calls, results):
        """A dummy conversation: user, assistant calling, results. A template of one call per turn gets the first."""
        ids = [f"call{i:05d}" for i in range(len(results))]
        shown = calls if getattr(self, "_many", True) else calls[:1]
        return [self._message("user", USER), self._message("assistant", "", shown)] + [
            self._message("tool", r, tool_call_id=i, name=c["name"]) for c, r, i in zip(calls, results, ids, strict=True)]

    def _render(self, messages, generate, tools, **how):
        try:
            return self.tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=generate, return_dict=False, **how)
        except Exception as error:  # Jinja's errors, and whatever Python raises inside a template
            raise ValueError(f"the chat template failed: {type(error).__name__}: {error}") from error

    def _text(self, messages, generate=True):
        return self._render(messages, generate, self._tools, tokenize=False)

    def _ids(self, messages, generate=True):
        return self._render(messages, generate, self._tools, tokenize=True, sanitize_control_tokens=True)

    def _shows(self, words, messages, tools=None):
        try:
            text = self._render(messages, False, tools, tokenize=False)
        except ValueError:
            return False
        places = [text.find(word) for word in words]
        return -1 not in places and places == sorted(places)

    # -- where turns end and begin

    def _end_of_turn(self, dummy, last, syntax):
        """(stop id, cut id, n): what ends dummy[1], and where the next message begins: after the n-th cut id.

        `last` is the last sentinel of the turn, `syntax` the tokens inside calls (</tool_call>), which end nothing.
        """
        def after(text):
            return [m for m in self._control.finditer(text, text.rindex(last)) if m[0] not in syntax]

        long = self._text(dummy)
        alone, followed = [m[0] for m in after(self._text(dummy[:2], False))], after(long)
        both = [a for a, _ in takewhile(lambda p: p[0] == p[1][0], zip(alone, followed))]
        # The last token that the turn has both alone and followed. Else (gpt-oss) alone it ends with another token than
        # in history, or (GLM) with none: the token that opens the next message is then what stops the model.
        stop = (both or alone or [m[0] for m in followed[:1]] or [None])[-1]
        if stop is None:
            raise ValueError("no added token ends a turn of this chat template: add its end-of-turn token to the tokenizer")
        cut = next((m for m in followed[:len(both) or None] if m[0] == stop), followed[0]) if not both else followed[len(both) - 1]
        n = sum(m[0] == cut[0] for m in self._control.finditer(long, 0, cut.end()))
        return *self.tokenizer.convert_tokens_to_ids([stop, cut[0]]), n

    def _suffix(self, dummy, cut, stopped):
        ids, (cut_id, n) = self._ids(dummy), cut
        at = [i for i, t in enumerate(ids) if t == cut_id][n - 1]  # text is sanitised: it cannot add to the count
        return ids[at + stopped:]

    def _turn_starts(self, user, answer, reply):
        """Ids that begin a message, and so never occur in a turn: a policy that samples one plays another role."""
        def tokens(*messages, generate=True):
            return self._control.findall(self._text(list(messages), generate))

        closed, opened = tokens(user, generate=False), tokens(user)
        starts = opened[len(os.path.commonprefix([closed, opened])):][:1]
        long = self._text([user, answer, reply])
        cut, n = self._answer_cut
        starts += [m for m in self._control.findall(long)]
        return frozenset(starts)
