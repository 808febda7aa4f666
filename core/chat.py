"""Turn a conversation into token ids, through the chat template of the model's own tokenizer.

A conversation is never rendered twice. The ids of an episode are prompt + sampled + suffix +
sampled ..., where each suffix (tool results or a user's reply) is cut out of the rendering of a
dummy conversation. That also works for templates that rewrite history.

Only what the template writes or the policy samples can be a control token, such as `<|im_start|>`.
Before the template sees a text, every control token that the text spells is put between two
characters that no text has. After rendering, what stands there is encoded with ordinary tokens.
"""
import json
import os
import re
from functools import lru_cache, partial
from itertools import chain

from core.config import first_line
from core.data import without_surrogates
from core.tool_calls import parse_tool_calls

# Words that no template contains. Where they come out tells what a template does with a text.
USER, REPLY, ANSWER, ARG, RESULT, ABOUT, THOUGHT = (f"zq{letter}zq" for letter in "abcdefg")
TURN_TEXT = re.compile(f"{ANSWER}|{ARG}")  # of an assistant turn
PROBE_TOOL = {"type": "function", "function": {
    "name": ABOUT, "description": "x", "parameters": {
        "type": "object", "required": ["x"],
        "properties": {"x": {"type": "string", "description": "x"}}}}}
TOOLS_AS_TEXT = """You can call these functions. Each line is the JSON schema of one:
{schemas}
To call a function, write its name and arguments as JSON between tags, one pair of tags per call:
<tool_call>
{{"name": "function_name", "arguments": {{"argument_name": "value"}}}}
</tool_call>
Each result comes back between <tool_response> and </tool_response>."""
# Functions that extras/models adds: of a chat and its first prompt's text; and of a template, ids
# of a prompt and the rendered turn that is to continue it, where the turn has not all of the ids.
FIRST_PROMPT, SEAMS = [], []
# Around a control token that is meant as text: the last two variation selectors, which no character
# uses. They are printable, so that Python's repr, which LFM2.5's template writes, keeps them.
BEGIN, END = "\U000e01ee", "\U000e01ef"


class Chat:
    """Messages to token ids, for one tokenizer and one list of tools (JSON schemas).

    Attributes:
        tools: the schemas of the functions by their names.
        native_tools: True if the template shows tools, results, and calls that we can read.
            Otherwise tools go into the first user message, calls and results are Hermes text.
        shows_one_call: True if the template has no place for a second call in a turn (Llama 3).
        opening: the generation prompt, and what ends a user message before it.
        opened_thought: the beginning of a thought that the prompt writes for the model, or "".
        stop_ids: the tokens that end a turn; call_stop_id, answer_stop_id: those of the template.
        start_ids: the tokens that open a message. A turn in which one was sampled is malformed.
        end_ids: both, at which sampling ends.
    """

    def __init__(self, tokenizer, tools: list[dict], generation_config=None):
        """Raise ValueError, in one line, for a template or tools that cannot be used."""
        self.tokenizer = tokenizer
        self._template = Template(tokenizer)
        self.encode = self._template.encode  # control tokens in the text count as such
        tools = self._template.clean(tools)
        self.tools = {tool["function"]["name"]: tool["function"] for tool in tools}
        self._probe(tools)
        eos = getattr(generation_config, "eos_token_id", None)
        eos = eos if isinstance(eos, (list, tuple)) else [eos]
        eos = {*eos, tokenizer.eos_token_id} - {None}
        self.stop_ids = frozenset(eos | {self.call_stop_id, self.answer_stop_id})
        self.start_ids = self._turn_starts() - self.stop_ids
        self.end_ids = self.stop_ids | self.start_ids

    def prompt(self, messages: list[dict]) -> list[int]:
        """Return the ids of the first prompt. The last message is the user's."""
        shown = list(map(dict, messages))
        introduction = self._tools_text
        if self._folds_system and shown[0]["role"] == "system":
            introduction = [shown.pop(0)["content"], *introduction]
        first = next(message for message in shown if message["role"] == "user")
        first["content"] = "\n\n".join([*introduction, first["content"]])
        ids = self._template.ids(self._template.clean(shown))
        for check in FIRST_PROMPT:
            check(self, self._template.decode(ids))
        return ids

    def turn(self, content: str, calls: list[dict], **fields: str) -> list[int]:
        """Return an assistant turn as the model would sample it, its stop token included.

        It has a text, calls {"name", "arguments"}, and further fields of the message, such as a
        thought, for templates that show them.
        """
        if not self.native_tools:
            lines = [content] if content else []
            for call in calls:
                call = re.sub(f"[{BEGIN}{END}]", "", json.dumps(call, ensure_ascii=False))
                # DeepSeek's templates cut an assistant's text at this tag.
                call = call.replace("</think>", "<\\/think>")
                lines.append(f"<tool_call>\n{call}\n</tool_call>")
            content, calls = "\n".join(lines), []
        if len(calls) > 1 and self.shows_one_call:
            raise ValueError(f"the chat template shows one tool call per turn, got {len(calls)}")
        messages = [self._message("user", USER)]
        prompt = self._template.ids(messages, since=self._first_user)
        messages.append(self._message("assistant", content, calls, **fields))
        rendered = self._template.ids(messages, generate=False, since=self._first_user)
        shared = len(os.path.commonprefix([prompt, rendered]))
        missing, turn = prompt[shared:], rendered[shared:]
        for join in SEAMS:
            missing, turn = join(self._template, missing, turn)
        if missing:
            raise ValueError("the chat template's assistant turns do not begin with its generation "
                             f"prompt: {self._template.decode(missing)!r}")
        stop = self.call_stop_id if calls else self.answer_stop_id
        if stop in turn:
            turn = turn[: turn.index(stop)]
        return [*turn, stop]

    def results(self, calls: list[dict], results: list[str], sampled_stop: int | None) -> list[int]:
        """Return the ids that follow a calling turn: its results, then the generation prompt.

        Args:
            calls: the calls of the turn that could be read.
            results: a text for each call, then errors about calls that could not be read.
            sampled_stop: the stop token that the turn ended with. If it is not the expected one,
                the ids begin with the one that the template writes there. It is not trained.
        """
        if not self.native_tools:
            texts = [f"<tool_response>\n{result}\n</tool_response>" for result in results]
            return self.reply("\n".join(texts), sampled_stop)
        names = [call["name"] for call in calls] + ["unknown"] * (len(results) - len(calls))
        ids = self._template.ids(self._called(names, results), since=self._call_end)
        return ids[1:] if sampled_stop == self.call_stop_id else ids

    def reply(self, text: str, sampled_stop: int | None) -> list[int]:
        """Return the ids that follow an answer: a user message, then the generation prompt."""
        ids = self._template.ids(self._answered(text), since=self._answer_end)
        return ids[1:] if sampled_stop == self.answer_stop_id else ids

    def text(self, ids: list[int]) -> str:
        """Return what the model wrote, control tokens spelled out, without what ends an answer."""
        if ids and ids[-1] in self.stop_ids:
            ids = ids[:-1]
        return self._template.decode(ids).removesuffix(self._before_stop)

    def _message(self, role, content, calls=(), **fields):
        message = {"role": role, "content": content, **fields}
        if calls:
            # Mistral's templates want nine letters and digits.
            message["tool_calls"] = [{"id": f"call{i:05d}", "type": "function", "function": call}
                                     for i, call in enumerate(calls)]
        return self._template.clean(message)

    def _answered(self, reply, **fields):
        """Return a dummy conversation: user, assistant, user."""
        turn = self._message("assistant", ANSWER, **fields)
        return [self._message("user", USER), turn, self._message("user", reply)]

    def _called(self, names, results):
        """Return a dummy conversation: user, assistant with calls of these names, results."""
        shown = names[:1] if self.shows_one_call else names
        calls = [{"name": name, "arguments": {"x": ARG}} for name in shown]
        messages = [self._message("user", USER), self._message("assistant", "", calls)]
        for i, (name, result) in enumerate(zip(names, results, strict=True)):
            messages.append(self._message("tool", result, tool_call_id=f"call{i:05d}", name=name))
        return messages

    def _probe(self, tools):
        """Find out from renderings of dummy conversations what the template shows."""
        template = self._template
        template.tools = [PROBE_TOOL]
        self.shows_one_call = False
        one_call = self._called(["probe"], [RESULT])
        shown = template.shows([ABOUT, ARG, RESULT], one_call)
        self.native_tools = shown and self._is_read(one_call)
        two_calls = ["probe", "probe"], [RESULT, RESULT]
        shows_two = template.shows([ARG, ARG, RESULT], self._called(*two_calls))
        self.shows_one_call = self.native_tools and not shows_two
        template.tools = tools if tools and self.native_tools else None
        self._tools_text = []
        if tools and not self.native_tools:
            schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
            self._tools_text = [TOOLS_AS_TEXT.format(schemas=schemas)]
        system = [self._message("system", ABOUT), self._message("user", USER)]
        self._folds_system = not template.shows([ABOUT, USER], system)
        answered = self._answered(REPLY)
        if not template.shows([USER, ANSWER, REPLY], answered):
            raise ValueError(f"the chat template of {template.name} does not show user and "
                             "assistant messages given as text")
        before, _, self.opening = template.render(answered[:1]).rpartition(USER)
        self.opened_thought = "<think>\n" if self.opening.rstrip().endswith("<think>") else ""
        # The last control token before a first question: what follows it holds no tools.
        opened = template.controls(before)
        self._first_user = (opened[-1], opened.count(opened[-1])) if opened else None
        called = self._called(*two_calls) if self.native_tools else answered
        self.answer_stop_id, self._answer_end, self._before_stop = self._end_of_turn(answered)
        self.call_stop_id, self._call_end, _ = self._end_of_turn(called)

    def _is_read(self, dummy):
        """True if the parser reads the call of dummy[1] as the template writes it."""
        rendering = self._template.render(dummy[:2], generate=False)
        prompt = os.path.commonprefix([self._template.render(dummy[:1]), rendering])
        # QwQ's prompt opens a thought, and "<think>" begins as "<tool_call>" does.
        prompt = re.sub("<[^<>]*$", "", prompt)
        return len(parse_tool_calls(rendering[len(prompt) :])[1]) == 1

    def _end_of_turn(self, dummy):
        """Return the stop id of the assistant turn dummy[1], where it ends, and the text before it.

        It ends at its last token in history, counted from the beginning of the rendering. The text
        is what the template writes between an answer and its stop.
        """
        template = self._template
        *before, after = TURN_TEXT.split(template.render(dummy))
        *_, after_alone = TURN_TEXT.split(template.render(dummy[:2], generate=False))
        # What stands between two calls, such as </tool_call>, is their syntax and ends nothing.
        syntax = template.controls(" ".join(before[1:]))
        followed = [control for control in template.controls(after) if control not in syntax]
        alone = [control for control in template.controls(after_alone) if control not in syntax]
        if not followed:
            raise ValueError("no added token ends a turn of the chat template of "
                             f"{template.name}: add its end-of-turn token")
        # The turn ends with the last token that it has both alone and in history. Otherwise it ends
        # in another way alone (gpt-oss), or has no stop token (GLM): there the token that opens the
        # next message is what stops the model.
        both = os.path.commonprefix([alone, followed])
        stop = (both or alone or followed[:1])[-1]
        cut = stop if stop in followed else followed[0]
        text = (after_alone + after).partition(template.decode([stop]))[0]
        return stop, (cut, template.controls(" ".join(before)).count(cut) + 1), text

    def _turn_starts(self):
        """Return the control tokens that open an assistant message or the message after it."""
        template = self._template
        answered = self._answered(REPLY)
        closed = template.controls(template.render(answered[:1], generate=False))
        opened = template.controls(template.render(answered[:1]))
        followed = template.controls(template.since(template.render(answered), *self._answer_end))
        opening = opened[len(os.path.commonprefix([closed, opened])) :]
        # gpt-oss writes some of them between a thought and its answer, too.
        thoughtful = self._answered(REPLY, thinking=THOUGHT, reasoning_content=THOUGHT)[:2]
        rendering = template.render(thoughtful, generate=False)
        inside = template.controls(rendering.partition(THOUGHT)[2].partition(ANSWER)[0])
        return frozenset({*opening[:1], *followed[1:2]}.difference(inside))


class Template:
    """The chat template of one tokenizer: rendering, and encoding so that text stays text."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.name = tokenizer.name_or_path or "this tokenizer"
        self.tools = None  # the schemas that every rendering shows, already `clean`
        # Text to ids, in which control tokens count as such, and back, in which they are spelled.
        self.encode = partial(tokenizer.encode, add_special_tokens=False)
        self.decode = partial(tokenizer.decode, clean_up_tokenization_spaces=False)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        normalizer = getattr(backend, "normalizer", None)
        self._normalized = normalizer.normalize_str if normalizer else str
        self._control_ids = {}  # spelling -> id
        for token_id, token in tokenizer.added_tokens_decoder.items():
            if _is_control(token):
                self._control_ids[token.content] = token_id
                # The tokenizer looks for such a token in normalized text.
                if token.normalized:
                    self._control_ids[self._normalized(token.content) or token.content] = token_id
        longest_first = sorted(self._control_ids, key=len, reverse=True)
        pattern = "|".join(map(re.escape, longest_first)) or "(?!)"
        self.control_token = re.compile(pattern)
        # With the lines after it: templates strip them where they cut a thought out of a text, and
        # spell them in JSON.
        self._spelled = re.compile(f"(?:{pattern})\n{{0,2}}")
        self._marked = re.compile(
            f"{BEGIN}((?:{pattern})(?:\n|\\\\+n){{0,2}}){END}|[{BEGIN}{END}]")
        self._newline = self.encode("\n")
        # The episodes of a group often see the same results.
        self._cached_ids = lru_cache(4096)(self._render_ids)
        self._cached_text = lru_cache(4096)(self._clean_text)

    def clean(self, value):
        """Return a copy of a message's field, or of a tool, with control tokens marked as text.

        Lone surrogates, which no tokenizer encodes, become question marks. Names of fields cannot
        be marked, because templates look them up: ValueError if one spells a control token.
        """
        if isinstance(value, dict):
            for name in value:
                if self.clean(name) != name:
                    raise ValueError(f"names must be text without control tokens, got {name!r:.60}")
            return {name: self.clean(item) for name, item in value.items()}
        if isinstance(value, (list, tuple)):
            return list(map(self.clean, value))
        return self._cached_text(value) if isinstance(value, str) else value

    def _clean_text(self, text: str) -> str:
        text = without_surrogates(text).replace(BEGIN, "").replace(END, "")
        # A normalizer may turn text into a control token: NFKC does it with full-width characters.
        normalized = self._normalized(text)
        if len(self.control_token.findall(normalized)) > len(self.control_token.findall(text)):
            text = normalized
        return self._spelled.sub(f"{BEGIN}\\g<0>{END}", text)

    def render(self, messages: list[dict], generate: bool = True) -> str:
        """Return the template's text for messages, or raise ValueError in one line."""
        try:
            return self.tokenizer.apply_chat_template(
                messages, tools=self.tools, add_generation_prompt=generate, tokenize=False)
        # It may be one of Jinja's, or whatever Python raises inside a template.
        except Exception as error:
            problem = f"the chat template of {self.name} failed: {first_line(error)}"
            raise ValueError(problem) from error

    def shows(self, words: list[str], messages: list[dict]) -> bool:
        """True if a rendering of messages contains all words, in their order."""
        try:
            return bool(re.search(".*".join(words), self.render(messages), re.DOTALL))
        except ValueError:
            return False

    def controls(self, rendering: str) -> list[int]:
        """Return the ids of the control tokens that the template wrote into a rendering."""
        written = self.control_token.findall(self._marked.sub(" ", rendering))
        return [self._control_ids[spelling] for spelling in written]

    def since(self, rendering: str, token_id: int, n: int) -> str:
        """Return a rendering from where the template writes a control token for the n-th time."""
        written = self._marked.sub(lambda spelled: " " * len(spelled[0]), rendering)
        places = [control.start() for control in self.control_token.finditer(written)
                  if self._control_ids[control[0]] == token_id]
        return rendering[places[n - 1]:]

    def ids(self, messages: list[dict], generate: bool = True, since=None) -> list[int]:
        """Return the ids of a rendering, or with (control token, n) those from its n-th on."""
        return list(self._cached_ids(json.dumps(messages), generate, since))

    def _render_ids(self, messages, generate, since):
        rendering = self.render(json.loads(messages), generate)
        if since:
            rendering = self.since(rendering, *since)
        # Splitting gives [text, spelled control token or None, text, ..., text].
        pieces = self._marked.split(rendering)
        ids = self.encode(pieces[0])
        for spelled, text in zip(pieces[1::2], pieces[2::2]):
            if spelled:
                ids += self._encode_spelled(spelled)
            ids += self._encode_inside(text, self.encode)
        return ids

    def _encode_inside(self, text, encode):
        """Encode text inside a rendering, without the space that some tokenizers put at a start."""
        ids = encode("\n" + text)
        length = len(self._newline)
        return ids[length:] if ids[:length] == self._newline else encode(text)

    def _encode_spelled(self, text):
        """Encode text that spells control tokens, with other tokens.

        The vocabulary of plain text may hold such a token too: "----" in some, "<s>" in Unigram
        models. Then each character is encoded alone. Unknown ones stay unknown.
        """
        ids = self._encode_inside(text, self.tokenizer._encode_without_added_tokens)
        controls = set(ids).intersection(self._control_ids.values())
        if controls and len(text) > 1:
            return list(chain.from_iterable(map(self._encode_spelled, text)))
        controls.discard(self.tokenizer.unk_token_id)
        return [token_id for token_id in ids if token_id not in controls]


def _is_control(token) -> bool:
    """True for an added token that text must not become: not for words, white space and letters."""
    if token.special:
        return bool(token.content)
    # This is SentencePiece's sign for a space.
    text = token.content.replace("\u2581", " ")
    return not (len(text) < 2 or text.isspace() or text.replace("_", "").isalnum())
