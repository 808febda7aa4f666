"""Chat becomes tokens, and sampled text becomes tool calls.

`Chat` turns messages into ids through the tokenizer's own chat template and never renders a conversation twice: an
episode's ids are prompt + sampled + suffix + sampled ..., each suffix cut out of a rendering of a dummy conversation.
`parse_tool_calls` reads what the model wrote, and never raises.
"""

import ast
import copy
import hashlib
import json
import math
import os
import re
import warnings
from functools import lru_cache
from itertools import takewhile

# ---------------------------------------------------------------------------------------------- chat <-> token ids

# Words no template contains: where they come out tells what a template does with the text around them.
USER, REPLY, ANSWER, ARG, ARG2, RESULT, ABOUT, THOUGHT = (f"zq{c}zq" for c in "abcdefgh")
PROBE = {"type": "function", "function": {"name": ABOUT, "description": "x", "parameters": {
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

    Only what the template writes itself, or the policy samples, can be a control token; all other text is encoded as
    text, whatever it spells. `native_tools`: the template shows tools, calls and results; else they go as Hermes text.
    `stop_ids` end a turn; `start_ids` open a message and never occur inside a turn: one sampled is a malformed turn.
    Raises ValueError, in one line, for a template it cannot use.
    """

    def __init__(self, tokenizer, tools: list[dict], generation_config=None):
        if not tokenizer.chat_template:
            raise ValueError("the tokenizer has no chat template: take the instruct model's, or set one yourself")
        self.template_hash = hashlib.sha256(tokenizer.get_chat_template(tools=tools or None).encode()).hexdigest()
        # All added tokens, not only those the template names; but Gemma's "\n\n" is one too, and ordinary text.
        controls = [t.content for t in tokenizer.added_tokens_decoder.values() if not t.content.isspace()]
        self._control = re.compile("|".join(map(re.escape, sorted(controls, key=len, reverse=True))) or "(?!)")
        self.tokenizer = copy.copy(tokenizer)  # ours alone, or the list would be saved with the model
        self.tokenizer.chat_control_tokens = controls
        self._remembered = lru_cache(4096)(self._render_ids)  # the episodes of a group often see the same results
        tools = self._clean(tools)
        self._names = [t["function"]["name"] for t in tools]
        if bad := [name for name in self._names if not NAME.fullmatch(name)]:
            raise ValueError(f"tool names must be identifiers, got {bad}")

        user, answer, reply = (self._message(*m) for m in (("user", USER), ("assistant", ANSWER), ("user", REPLY)))
        two = [{"name": "probe", "arguments": {"x": arg}} for arg in (ARG, ARG2)]
        self._tools, self._many = [PROBE], True  # while we find out
        self.native_tools = self._shows([ABOUT, ARG, RESULT], self._called(two[:1], [RESULT]))
        self._many = self._shows([ARG, ARG2, RESULT], self._called(two, [RESULT, RESULT]))  # calls in one turn
        self._tools = tools if self.native_tools and tools else None
        self._tools_text = "" if self.native_tools or not tools else TOOLS_AS_TEXT.format(
            schemas="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        self._folds_system = not self._shows([ABOUT, USER], [self._message("system", ABOUT), user])
        if not self._shows([USER, ANSWER, REPLY], [user, answer, reply]):
            raise ValueError("the chat template does not show user and assistant messages given as text")

        self.answer_stop_id, *self._answer_cut = self._end_of_turn([user, answer, reply], ANSWER)
        self.call_stop_id, self._call_cut = self.answer_stop_id, self._answer_cut
        if self.native_tools:
            dummy, args = self._called(two, [RESULT, RESULT]), (ARG, ARG2) if self._many else (ARG, ARG)
            self.call_stop_id, *self._call_cut = self._end_of_turn(dummy, args[1], args[0])
        eos = getattr(generation_config, "eos_token_id", None)
        eos = {tokenizer.eos_token_id, *(eos if isinstance(eos, (list, tuple)) else [eos])} - {None}
        self.stop_ids = frozenset(eos | {self.call_stop_id, self.answer_stop_id})
        self.start_ids = self._turn_starts(user, answer, reply) - self.stop_ids
        self._remembered.cache_clear()  # what was rendered above had the probe for its tool

    def prompt(self, messages: list[dict]) -> list[int]:
        """Ids of the first prompt ([system], user, [assistant, user ...]), generation prompt included."""
        for i, m in enumerate(messages):
            if m.get("role") not in ("system", "user", "assistant") or (m["role"] == "system" and i > 0):
                raise ValueError(f"message {i} has role {m.get('role')!r}: need [system], user, [assistant, user ...]")
            if not isinstance(m.get("content"), str):
                raise ValueError(f"message {i}: content must be text, got {type(m.get('content')).__name__}")
        if not messages or messages[-1]["role"] != "user":
            raise ValueError("a prompt must end with a user message")
        made = [self._message(m["role"], m["content"]) for m in messages]
        top = [made.pop(0)["content"]] if made[0]["role"] == "system" and self._folds_system else []
        first = made[made[0]["role"] == "system"]
        first["content"] = "\n\n".join([*top, *[self._tools_text] * bool(self._tools_text), first["content"]])
        return self._ids(made)

    def turn(self, content: str, calls: list[dict], **extra: str) -> list[int]:
        """An assistant turn as the model would sample it after the generation prompt, its stop token included.

        `extra`: further fields of the message, as far as the template shows them: a thought.
        """
        if not self.native_tools:
            as_text = [f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" for call in calls]
            content, calls = "\n".join([content] * bool(content) + as_text), []
        if len(calls) > 1 and not self._many:
            raise ValueError(f"the chat template shows one tool call per turn, got {len(calls)}")
        dummy = [self._message("user", USER), self._message("assistant", content, calls, **self._clean(extra))]
        prompt, full = self._ids(dummy[:1]), self._ids(dummy, False)
        shared = len(os.path.commonprefix([prompt, full]))
        rest, turn = self._decode(prompt[shared:]), full[shared:]  # rest: what of the prompt the full rendering lacks
        seam = next((k for k in range(1, len(prompt) + 1) if self._decode(turn[:k]).startswith(rest)), 0) if rest else 0
        if seam:  # the prompt ends with "<think>", "\n"; here it is "<think>", "\n\n": one token across the seam
            turn = self._encode(self._decode(turn[:seam])[len(rest):]) + turn[seam:]
        elif rest.strip() == "<think>":  # the prompt opens a thought, which this template's own turns do not have
            turn = self._encode("</think>\n\n") + turn
        elif rest.strip():
            raise ValueError(f"the chat template's assistant turns do not begin with its generation prompt: {rest!r}")
        stop = self.call_stop_id if calls else self.answer_stop_id
        return turn[:turn.index(stop) if stop in turn else len(turn)] + [stop]

    def results(self, calls: list[dict], results: list[str], sampled_stop: int | None) -> list[int]:
        """Ids that follow a calling turn: its results in one rendering, then the generation prompt.

        Results beyond the calls are errors about calls that could not be read. If the turn did not end with the
        expected stop token, the one that the template writes there comes first: ours, so it is not trained.
        """
        if not self.native_tools:
            return self.reply("\n".join(f"<tool_response>\n{r}\n</tool_response>" for r in results), sampled_stop)
        names = [call["name"] for call in calls] + ["unknown"] * (len(results) - len(calls))
        dummy = self._called([{"name": name, "arguments": {"x": ARG}} for name in names], results)
        return self._suffix(dummy, self._call_cut, sampled_stop == self.call_stop_id)

    def reply(self, text: str, sampled_stop: int | None) -> list[int]:
        """Ids that follow an answering turn: a user message and the generation prompt."""
        dummy = [self._message("user", USER), self._message("assistant", ANSWER), self._message("user", text)]
        return self._suffix(dummy, self._answer_cut, sampled_stop == self.answer_stop_id)

    def conversation(self, messages: list[dict]) -> tuple[list[int], list[int]]:
        """Ids and loss mask of a recorded conversation, put together turn by turn as an episode is: the same ids.

        The mask is 1 on an assistant message and its stop token, unless it says "loss": 0, and 0 on all else. Calls are
        `tool_calls` (OpenAI's form or ours) or written in the text; a tool message follows for each. Content is text or
        a list of text parts. What follows the last assistant message is cut. ValueError: one line.
        """
        if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
            raise ValueError("messages must be a list of objects")
        messages = [m if m.get("weight") is None else {"loss": m["weight"], **m} for m in messages]  # OpenAI's
        ids, mask, said, calls, due, need, where = [], [], [], [], [], ("system", "user"), "at the start"
        last = max((i for i, m in enumerate(messages) if m.get("role") == "assistant"), default=-1)
        for i, m in enumerate(messages[:last + 1]):
            role = m.get("role")
            if role not in need:
                raise ValueError(f"message {i}: need {' or '.join(need)} {where}, got {role}")
            try:
                text, made = self._recorded(m)
                if role == "assistant":
                    if unknown := [call["name"] for call in made if self._names and call["name"] not in self._names]:
                        raise ValueError(f"calls {unknown[0]!r}; tools are {', '.join(self._names)}")
                    if not (made or text.strip()) and m.get("loss", 1):
                        raise ValueError("is empty: nothing to train on")
                    turn = self._thoughtful(text, made) if "</think>" in text else self.turn(text, made)
                    before = (self.prompt(said) if not ids else self.reply(said[0]["content"], ids[-1]) if not calls
                              else self.results(calls, [result["content"] for result in said], ids[-1]))
            except ValueError as error:
                raise ValueError(f"message {i}: {error}") from None
            if role == "assistant":
                ids += before + turn
                mask += [0] * len(before) + [m.get("loss", 1)] * len(turn)
                said, calls, due = [], made, [call.get("id") for call in m.get("tool_calls") or []]
                need, where = (("tool",), "after a tool call") if calls else (("user",), "after an answer")
                continue
            answered = {str(name) for name in (*due[len(said):len(said) + 1], m.get("tool_call_id")) if name}
            if role == "tool" and len(answered) > 1:
                raise ValueError(f"message {i}: results must stand in the order of their calls, by their tool_call_id")
            said.append({"role": role, "content": text})
            if role == "system":
                need, where = ("user",), "after the system message"
            elif role == "user" or len(said) == len(calls):
                need, where = ("assistant",), "after the user" if role == "user" else "after the last result"
        if not any(mask):
            raise ValueError('nothing to train: no assistant message' + ' without "loss": 0' * (last >= 0))
        return ids, mask

    def text(self, ids: list[int]) -> str:
        """What the model wrote, its control tokens spelled out, without the stop token."""
        return self._decode(ids[:-1] if ids and ids[-1] in self.stop_ids else ids)

    def _decode(self, ids):
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _encode(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _clean(self, value):
        """Without lone surrogates, which do not encode. Names are refused, not cleaned: sanitising skips dict keys."""
        if isinstance(value, dict):
            if bad := [key for key in value if not isinstance(key, str) or self._control.search(key)]:
                raise ValueError(f"names must be text without control tokens, got {bad}")
            return {self._clean(k): self._clean(v) for k, v in value.items()}
        if isinstance(value, list):
            return [self._clean(v) for v in value]
        return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value

    def _message(self, role, content, calls=(), **extra):
        made = {"role": role, "content": self._clean(content), **extra}
        if calls:  # ids of nine alphanumerics, because Mistral's templates insist on them
            made["tool_calls"] = [{"id": f"call{i:05d}", "type": "function", "function": self._clean(call)}
                                  for i, call in enumerate(calls)]
        return made

    def _recorded(self, m):
        """(text, calls) of a recorded message; calls written in an assistant's text are taken out of it."""
        text, calls, speaks = m.get("content"), m.get("tool_calls") or [], m["role"] == "assistant"
        if isinstance(text, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in text):
            text = "".join(part["text"] for part in text)
        elif text is None and calls:
            text = ""
        if not isinstance(text, str):
            raise ValueError(f"content must be text or text parts, got {type(text).__name__}")
        if type(m.get("loss", 1)) is not int or m.get("loss", 1) not in (0, 1) or m.get("loss") and not speaks:
            raise ValueError(f'"loss": {m["loss"]!r}: need 0 or 1, and 1 only on assistant messages')
        thought = str(m.get("reasoning_content") or m.get("thinking") or "")
        text = f"<think>\n{thought.strip()}\n</think>\n\n{text}" if thought else text
        if not isinstance(calls, list) or calls and not speaks:
            raise ValueError("tool_calls must be a list, in an assistant message")
        if calls or not speaks:
            return text, [_checked(call) for call in calls]
        content, calls, errors = parse_tool_calls(text)
        if errors:
            raise ValueError(errors[0].removeprefix("error: ")
                             + "; a text that opens a tool call must hold a whole one")
        return (content, calls) if calls else (text, [])

    def _thoughtful(self, text, calls):
        """`turn` of a text that begins with a thought, handed over as a thought where the template shows such."""
        thought, _, answer = text.strip().removeprefix("<think>").partition("</think>")
        native, shown, hidden = (self.turn(answer.strip("\n"), calls, reasoning_content=thought, thinking=thought)
                                 for thought in (thought.strip("\n"), THOUGHT, ""))
        if shown != hidden:
            return native
        for turn in hidden, self.turn(text, calls):
            if self.text(turn).lstrip().startswith(text.strip()):
                return turn
        raise ValueError("the chat template does not show a thought where the model would write it")

    def _called(self, calls, results):
        """A dummy conversation: user, assistant calling, results. A template of one call per turn gets the first."""
        return [self._message("user", USER), self._message("assistant", "", calls if self._many else calls[:1])] + [
            self._message("tool", result, tool_call_id=f"call{i:05d}", name=call["name"])
            for i, (call, result) in enumerate(zip(calls, results, strict=True))]

    def _render(self, messages, generate=True, **how):
        try:
            return self.tokenizer.apply_chat_template(
                messages, tools=self._tools, add_generation_prompt=generate, return_dict=False, **how)
        except Exception as error:  # Jinja's errors, and whatever Python raises inside a template
            raise ValueError(f"the chat template failed: {type(error).__name__}: {error}") from error

    def _ids(self, messages, generate=True):
        return list(self._remembered(json.dumps(messages), generate))

    def _render_ids(self, messages, generate):
        return self._render(json.loads(messages), generate, sanitize_control_tokens=True)

    def _controls(self, text):
        return self.tokenizer.convert_tokens_to_ids(self._control.findall(text))

    def _shows(self, words, messages):
        try:
            text = self._render(messages, tokenize=False)
        except ValueError:
            return False
        places = [text.find(word) for word in words]
        return -1 not in places and places == sorted(places)

    def _end_of_turn(self, dummy, last, first=None):
        """(stop id, cut id, n): what ends dummy[1], and where what follows begins: after the n-th cut id.

        `last` is the turn's last sentinel. Control tokens between two calls (</tool_call>) are syntax and end nothing.
        """
        def split(text):
            return self._controls(text[:text.rindex(last)]), [
                t for t in self._controls(text[text.rindex(last):]) if t not in syntax]

        long = self._render(dummy, tokenize=False)
        syntax = set(self._controls(long[long.index(first):long.index(last)])) if first else ()
        (before, followed), (_, alone) = split(long), split(self._render(dummy[:2], False, tokenize=False))
        if not followed:
            raise ValueError("no added token ends a turn of this chat template: add its end-of-turn token")
        # The last token the turn has both alone and in history. Else it ends otherwise alone (gpt-oss), or with none
        # of its own (GLM): the token that opens the next message is then what stops the model.
        both = [a for a, b in takewhile(lambda pair: pair[0] == pair[1], zip(alone, followed))]
        stop = (both or alone or followed[:1])[-1]
        cut = stop if stop in followed else followed[0]
        n = before.count(cut) + (both.count(cut) or 1)
        return stop, cut, n

    def _suffix(self, dummy, cut, stopped):
        ids, (cut_id, n) = self._ids(dummy), cut
        at = [i for i, t in enumerate(ids) if t == cut_id][n - 1]  # sanitised text cannot add to the count
        return ids[at + stopped:]

    def _turn_starts(self, user, answer, reply):
        closed, opened, long = (self._controls(self._render(messages, generate, tokenize=False)) for messages, generate
                                in (([user], False), ([user], True), ([user, answer, reply], True)))
        at = [i for i, t in enumerate(long) if t == self._answer_cut[0]][self._answer_cut[1] - 1]
        starts = {*opened[len(os.path.commonprefix([closed, opened])):][:1], *long[at + 1:at + 2]}
        try:  # gpt-oss begins a second <|start|> after its thoughts
            thinking = {**answer, "thinking": THOUGHT, "reasoning_content": THOUGHT}
            thought = self._render([user, thinking], False, tokenize=False).partition(THOUGHT)[2].partition(ANSWER)[0]
        except ValueError:
            thought = ""
        return frozenset(starts - set(self._controls(thought)))


# ----------------------------------------------------------------------------------------- sampled text -> tool calls

MAX_CALLS, MAX_DEPTH, MAX_PYTHON = 64, 64, 100_000  # calls in a turn, nesting of arguments, characters given to ast
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
_SPACE = re.compile(r"\s*")
_OPENER = re.compile(r'(?:<tool_call>\s*)?<function=|<tool_call>|<atem:invoke name="|<\|python_tag\|>|'
                     r'<\|tool_call_start\|>|<\|tool_call>call:|'
                     r'to=functions\.(?P<name>[\w.-]{1,64})[^\n]{0,64}?<\|message\|>')
_CLOSER = re.compile(r"</tool_call>|</function>|</atem:invoke>|<\|tool_call_end\|>|<tool_call\|>")
_PYTHON = re.compile(r"\[\s*[A-Za-z_][\w.]{0,63}\(")
_MEANT = re.compile(r'\[?\s*\{\s*"(?:name|type|function)"\s*:.*"(?:arguments|parameters)"', re.S)
_TAG_NAME = re.compile(r'([\w.-]{1,64})(?:">|>)?\s*')
_TAG_VALUE = re.compile(r'(?:<parameter=([^>\n]{1,64})>|<atem:parameter name="([^"\n]{1,64})">|<arg_key>([^<\n]{1,64})'
                        r"</arg_key>\s*<arg_value>)(.*?)(?:</parameter>|</atem:parameter>|</arg_value>)\s*", re.S)
_LITERALS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}


def parse_tool_calls(text: str) -> tuple[str, list[dict], list[str]]:
    """What the model wrote -> (content, calls [{"name", "arguments": dict}], errors to show the model). Never raises.

    Read are <tool_call> around JSON, Qwen's <function=> or GLM's <arg_key>; the markup of gpt-oss, Gemma 4, LFM, Llama
    and ATEM; a text that is itself a JSON call, a list of them, or [f(x=1)]. We read decoded text: a tag spelled in
    plain tokens is the same as the added token. A closed thought at the start is content, whatever it mentions. A good
    call counts beside a bad one; prose and other JSON are an answer. A tagged value (<parameter=n>42) that is JSON and
    no string is read as JSON: the caller, who has the signature, may take it back to text.
    """
    calls, errors = [], []
    opener, at, begins = _OPENER.search(text), text.find("</think>") + len("</think>"), text.lstrip()[:7]
    if at < len("</think>") or begins != "<think>" and (begins[:1] in ("{", "[") or opener and opener.start() < at):
        at = 0  # no thought, or a </think> within a call
    content, opener = text[:at], None  # first, the text itself may be a call
    while True:
        start = _SPACE.match(text, opener.end() if opener else at).end()
        try:
            found, end = _read(text, opener, start)
            if opener and not found:
                raise ValueError("a tool call without a function")
            at = end if found else at
        except (ValueError, RecursionError, MemoryError, SyntaxError) as error:
            found = []
            if opener or _MEANT.match(text, start):
                errors.append(f"error: {error if type(error) is ValueError else 'the tool call cannot be read'}"[:300])
                at = min([m.start() for tag in (_CLOSER, _OPENER) if (m := tag.search(text, start))], default=len(text))
        for raw in found[:MAX_CALLS + 1]:
            try:
                calls.append(_checked(raw))
            except ValueError as error:
                errors.append(f"error: {error}"[:300])
        while closer := _CLOSER.match(text, _SPACE.match(text, at).end()) if opener else None:
            at = closer.end()
        opener = _OPENER.search(text, at)
        content += text[at:opener.start() if opener else len(text)]
        if len(calls) + len(errors) > MAX_CALLS:  # also keeps us linear, as each attempt may read to the end
            return content.strip(), calls[:MAX_CALLS], [*errors[:1], f"error: only {MAX_CALLS} calls a turn are read"]
        if not opener:
            return content.strip(), calls, errors


def _read(text, opener, at):
    """The calls at `at` -> (unchecked calls, where they end). Without an opener: none, if the text is an answer."""
    kind = opener[0] if opener else ""
    if opener and opener["name"]:  # gpt-oss
        arguments, at = _json(text, at)
        return [{"name": opener["name"], "arguments": arguments}], at
    if kind == "<|tool_call>call:":  # Gemma 4: name{key:<|"|>text<|"|>,n:1}, which is JSON but for its quotes
        body = text[at:].partition("<tool_call|>")[0]
        parts = body.split('<|"|>')
        parts[0::2] = [re.sub(r"([{,]\s*)([A-Za-z_]\w*)\s*:", r'\1"\2":', part) for part in parts[0::2]]
        parts[1::2] = map(json.dumps, parts[1::2])
        name, brace, rest = "".join(parts).partition("{")
        return [{"name": name, "arguments": _json(brace + rest, 0)[0]}], at + len(body)
    if _PYTHON.match(text, at) and (opener or text.rstrip().endswith(")]")):
        source = _CLOSER.split(text[at:], maxsplit=1)[0]
        return _python(source.strip()), at + len(source)
    if text[at:at + 1] not in ("{", "["):
        return _tagged(text, at) if opener else ([], at)
    found, end = [], at
    while text[end:end + 1] in ("{", "[") and len(found) <= MAX_CALLS:  # Llama writes several as {...}; {...}
        value, end = _json(text, end)
        found += value if isinstance(value, list) else [value]
        end = _SPACE.match(text, end).end()
        end = _SPACE.match(text, end + 1).end() if text[end:end + 1] == ";" else end
    is_call = [isinstance(c, dict) and ("name" in c and ("arguments" in c or "parameters" in c) or
                                        isinstance(c.get("function"), dict)) for c in found]
    if not opener and not any(is_call):
        return [], at
    if kind == "<tool_call>" and end < len(text) and not (_CLOSER.match(text, end) or _OPENER.match(text, end)):
        raise ValueError(f"unexpected {text[end:end + 20]!r} after the JSON of a tool call")
    return found, end


def _tagged(text, at):
    """name>, then <parameter=key>value</parameter> ..., or what GLM and ATEM write for that."""
    if not (name := _TAG_NAME.match(text, at)):
        raise ValueError(f"expected a JSON object or a function name, got {text[at:at + 20]!r}")
    at, pairs = name.end(), []
    if text[at:at + 1] == "{":  # Llama's <function=name>{json}
        arguments, at = _json(text, at)
        return [{"name": name[1], "arguments": arguments}], at
    while tag := _TAG_VALUE.match(text, at):
        key, at, raw = tag[1] or tag[2] or tag[3], tag.end(), tag[4].removeprefix("\n").removesuffix("\n")
        try:
            value, end = (_LITERALS[raw], len(raw)) if raw in _LITERALS else _json(raw, 0)
        except ValueError:
            value, end = raw, 0
        pairs.append((key, raw if isinstance(value, str) or end < len(raw) else value))
    if at < len(text) and not (_CLOSER.match(text, at) or _OPENER.match(text, at)):
        raise ValueError(f"unexpected {text[at:at + 20]!r} in a tool call")
    return [{"name": name[1], "arguments": _unique(pairs)}], at


def _python(source):
    """[f(x=1), g(y="a")], as Llama 4 and LFM write calls. Literals only: nothing is evaluated."""
    if len(source) > MAX_PYTHON:
        raise ValueError(f"a tool call of more than {MAX_PYTHON} characters")
    with warnings.catch_warnings(action="ignore"):  # of an escape like "\\d"
        tree = ast.parse(source, mode="eval").body
    calls = tree.elts if isinstance(tree, ast.List) else []
    if not calls or any(not isinstance(c, ast.Call) or c.args or any(k.arg is None for k in c.keywords) for c in calls):
        raise ValueError("expected [name(key=value, ...)]")
    return [{"name": ast.unparse(c.func), "arguments": _unique([(k.arg, _literal(k.value)) for k in c.keywords])}
            for c in calls]


def _literal(node):
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name) if name in _LITERALS:
            return _LITERALS[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return _unique([(_literal(k), _literal(v)) for k, v in zip(keys, values)])
    raise ValueError("arguments must be literal values")


def _unique(pairs):
    made = {str(key): value for key, value in pairs}
    if len(made) < len(pairs):
        raise ValueError("an argument is given twice")
    return made


_JSON = json.JSONDecoder(object_pairs_hook=_unique)


def _json(text, at):
    try:
        return _JSON.raw_decode(text, at)
    except json.JSONDecodeError as error:
        raise ValueError(f"the tool call is not valid JSON: {error.msg} at character {error.pos - at}") from None
    except RecursionError:
        raise ValueError("the tool call is nested too deep") from None


def _checked(raw):
    """{"name": str, "arguments": dict of finite, encodable JSON}, or ValueError."""
    if isinstance(raw, dict) and isinstance(raw.get("function"), dict):
        raw = raw["function"]
    if not isinstance(raw, dict):
        raise ValueError("a tool call must be an object with a name and arguments")
    name, arguments = raw.get("name"), raw.get("arguments", raw.get("parameters", {}))
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(f"{str(name)[:50]!r} is not a function name")
    if isinstance(arguments, str):  # encoded twice
        arguments = _json(arguments.strip() or "{}", 0)[0]
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of {name} must be an object, got {type(arguments).__name__}")
    level = [arguments]
    for _ in range(MAX_DEPTH):
        for value in level:
            if (not isinstance(value, (str, int, float, list, dict, type(None)))
                    or isinstance(value, float) and not math.isfinite(value)
                    or isinstance(value, str) and re.search("[\ud800-\udfff]", value)):
                raise ValueError(f"the arguments of {name} must be JSON with finite numbers and whole characters")
        level = [child for v in level if isinstance(v, (dict, list))
                 for child in ([*v, *v.values()] if isinstance(v, dict) else v)]
        if not level:
            return {"name": name, "arguments": arguments}
    raise ValueError(f"the arguments of {name} are nested too deep")
