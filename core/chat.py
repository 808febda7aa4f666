"""Turn a conversation into token ids, through the chat template of the model's own tokenizer.

A conversation is never rendered twice. The ids of an episode are prompt + sampled + suffix +
sampled ..., where each suffix (tool results or a user's reply) is cut out of the rendering of a
dummy conversation. That also works for templates that rewrite history.
"""
import json
import os
import re
from typing import NamedTuple

from core.config import say_once
from core.template import Template
from core.tool_calls import parse_tool_calls

# Words that no template contains. Where they come out tells what a template does with a text.
SENTINELS = "zqazq zqbzq zqczq zqdzq zqezq zqfzq zqgzq"
USER, REPLY, ANSWER, ARG, RESULT, ABOUT, THOUGHT = SENTINELS.split()
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


class TurnEnd(NamedTuple):
    """How an assistant turn ends in a rendering.

    Attributes:
        stop_id: the token with which the model ends the turn.
        since: the last token of the turn where the conversation continues, and how many times that
            token occurs up to the end of the dummy turn.
    """

    stop_id: int
    since: tuple[int, int]


class Chat:
    """Messages to token ids, for one tokenizer and one list of tools.

    Only what the template writes itself, or the policy samples, can be a control token. All other
    text is encoded as text, whatever it spells.

    Args:
        tokenizer: a tokenizer of transformers. It is not changed.
        tools: schemas as transformers' get_json_schema makes them.
        generation_config: the model's; its eos_token_id ends a turn too.

    Attributes:
        tools: the schemas of the functions by their names.
        native_tools: True if the template shows tools, results, and calls that we can read.
            Otherwise tools go into the first user message, calls and results are Hermes text.
        opened_thought: the beginning of a thought that the prompt writes for the model, or "".
        stop_ids: the tokens that end a turn.
        start_ids: the tokens that open a message. None occurs inside a turn, so a turn in which the
            model sampled one is malformed.
        end_ids: both, at which sampling ends.

    Raises:
        ValueError: in one line, for a template or tools that cannot be used.
    """

    def __init__(self, tokenizer, tools: list[dict], generation_config=None):
        self.tokenizer = tokenizer
        self._template = Template(tokenizer)
        tools = self._template.clean(tools)
        self.tools = {tool["function"]["name"]: tool["function"] for tool in tools}
        self._probe(tools)
        eos = getattr(generation_config, "eos_token_id", None)
        eos = eos if isinstance(eos, (list, tuple)) else [eos]
        stops = {*eos, tokenizer.eos_token_id, self.call_stop_id, self.answer_stop_id}
        self.stop_ids = frozenset(stops - {None})
        self.start_ids = self._turn_starts() - self.stop_ids
        self.end_ids = self.stop_ids | self.start_ids

    # -------------------------------------------------------------------- an episode, turn by turn

    def prompt(self, messages: list[dict]) -> list[int]:
        """Return the ids of the first prompt, generation prompt included.

        Args:
            messages: a system message or a conversation, if any, and last a user message.
        """
        shown = [dict(message) for message in messages]
        introduction = self._tools_text
        if self._folds_system and shown[0]["role"] == "system":
            introduction = [shown.pop(0)["content"], *introduction]
        first = next(message for message in shown if message["role"] == "user")
        first["content"] = "\n\n".join([*introduction, first["content"]])
        ids = self._template.ids(self._template.clean(shown))
        # SmolLM3's and Nemotron's templates obey /no_think in a message. The prompts of later turns
        # are cut out of a conversation that does not say it.
        if not self._template.decode(ids).endswith(self._opening):
            say_once(f"note: the chat template of {self._template.name} opens the first turn in "
                     f"another way than those after it, {self._opening.strip()!r}; what its "
                     "messages switch, such as /no_think, set for all turns at the top of "
                     "chat_template.jinja: {% set enable_thinking = false %}")
        return ids

    def turn(self, content: str, calls: list[dict], **fields: str) -> list[int]:
        """Return an assistant turn as the model would sample it, its stop token included.

        Args:
            content: the text of the turn.
            calls: tool calls as {"name", "arguments"}.
            fields: further fields of the message, such as a thought, for templates that show them.
        """
        if not self.native_tools:
            lines = [content] if content else []
            for call in calls:
                # DeepSeek's templates cut an assistant's text at this tag.
                call = json.dumps(call, ensure_ascii=False).replace("</think>", "<\\/think>")
                lines.append(f"<tool_call>\n{call}\n</tool_call>")
            content, calls = "\n".join(lines), []
        if len(calls) > 1 and not self._many_calls:
            raise ValueError(f"the chat template shows one tool call per turn, got {len(calls)}")
        messages = [self._message("user", USER)]
        prompt = self._template.ids(messages, since=self._first_user)
        messages.append(self._message("assistant", content, calls, **fields))
        whole = self._template.ids(messages, generate=False, since=self._first_user)
        shared = len(os.path.commonprefix([prompt, whole]))
        turn = self._continue_prompt(prompt[shared:], whole[shared:])
        stop = self.call_stop_id if calls else self.answer_stop_id
        if stop in turn:
            turn = turn[: turn.index(stop)]
        return [*turn, stop]

    def results(self, calls: list[dict], results: list[str], sampled_stop: int | None,
                text: str = "") -> list[int]:
        """Return the ids that follow a calling turn: its results, then the generation prompt.

        Args:
            calls: the calls of the turn that could be read.
            results: a text for each call, then errors about calls that could not be read.
            sampled_stop: the stop token that the turn ended with. If it is not the expected one,
                the ids begin with the one that the template writes there. It is not trained.
            text: what the user says after the results, if anything.
        """
        if not self.native_tools:
            texts = [f"<tool_response>\n{result}\n</tool_response>" for result in results]
            return self.reply("\n".join(texts + [text] * bool(text)), sampled_stop)
        names = [call["name"] for call in calls] + ["unknown"] * (len(results) - len(calls))
        dummy = self._called(names, results)
        dummy += [self._message("user", text)] if text else []
        return self._after(self._call_end, dummy, sampled_stop)

    def reply(self, text: str, sampled_stop: int | None) -> list[int]:
        """Return the ids that follow an answer: a user message, then the generation prompt."""
        return self._after(self._answer_end, self._answered(text), sampled_stop)

    def _after(self, end: TurnEnd, dummy, sampled_stop) -> list[int]:
        """Return the ids that follow what was sampled of a dummy turn, without all tools before."""
        ids = self._template.ids(dummy, since=end.since)
        return ids[1:] if sampled_stop == end.stop_id else ids

    @property
    def shows_one_call(self) -> bool:
        """True if the template has no place for a second call in a turn (Llama 3, gpt-oss)."""
        return self.native_tools and not self._many_calls

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text in which control tokens count as such."""
        return self._template.encode(text)

    def text(self, ids: list[int]) -> str:
        """Return what the model wrote, control tokens spelled out, without the stop token."""
        if ids and ids[-1] in self.stop_ids:
            ids = ids[:-1]
        return self._template.decode(ids)

    def _continue_prompt(self, prompt_ids, turn_ids):
        """Return a turn as it continues the generation prompt.

        Args:
            prompt_ids: the last ids of the prompt, which the rendering of the whole turn lacks.
            turn_ids: what stands there instead, up to the end of the rendering.
        """
        missing = self._template.decode(prompt_ids)
        # The prompt may end with "<think>\n" where the turn has "<think>\n\n": "\n\n" is one token.
        for end in range(len(missing.encode()) + 2):
            text = self._template.decode(turn_ids[:end])
            if text.startswith(missing):
                return self._template.encode(text[len(missing) :]) + turn_ids[end:]
        # The template's own turns do not have a thought.
        if missing.strip() == "<think>":
            return self._template.encode("</think>\n\n") + turn_ids
        if missing.strip():
            raise ValueError("the chat template's assistant turns do not begin with its generation "
                             f"prompt: {missing!r}; where that closes a thought, put "
                             "{% set enable_thinking = true %} at its top")
        return turn_ids

    # -------------------------------------------------------------- what the template does to text

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
        calls = [{"name": name, "arguments": {"x": ARG}} for name in names]
        shown = calls if self._many_calls else calls[:1]
        messages = [self._message("user", USER), self._message("assistant", "", shown)]
        for i, (name, result) in enumerate(zip(names, results, strict=True)):
            messages.append(self._message("tool", result, tool_call_id=f"call{i:05d}", name=name))
        return messages

    def _probe(self, tools):
        """Find out from renderings of dummy conversations what the template shows."""
        template = self._template
        template.tools = [PROBE_TOOL]
        self._many_calls = True
        one_call = self._called(["probe"], [RESULT])
        shown = template.shows([ABOUT, ARG, RESULT], one_call)
        self.native_tools = shown and self._is_read(one_call)
        two_calls = ["probe", "probe"], [RESULT, RESULT]
        self._many_calls = template.shows([ARG, ARG, RESULT], self._called(*two_calls))
        template.tools = None
        self._tools_text = []
        if tools and self.native_tools:
            template.tools = tools
        elif tools:
            schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
            self._tools_text = [TOOLS_AS_TEXT.format(schemas=schemas)]
        system = [self._message("system", ABOUT), self._message("user", USER)]
        self._folds_system = not template.shows([ABOUT, USER], system)
        answered = self._answered(REPLY)
        if not template.shows([USER, ANSWER, REPLY], answered):
            raise ValueError(f"the chat template of {template.name} does not show user and "
                             "assistant messages given as text")
        before, _, self._opening = template.render(answered[:1]).rpartition(USER)
        self.opened_thought = "<think>\n" if self._opening.rstrip().endswith("<think>") else ""
        # The last control token before a first question: what follows it holds no tools.
        opened = template.controls(before)
        self._first_user = (opened[-1], opened.count(opened[-1])) if opened else None
        self._answer_end = self._call_end = self._end_of_turn(answered)
        if self.native_tools:
            self._call_end = self._end_of_turn(self._called(*two_calls))
        self.answer_stop_id = self._answer_end.stop_id
        self.call_stop_id = self._call_end.stop_id

    def _is_read(self, dummy):
        """True if the parser reads the call of dummy[1] as the template writes it."""
        whole = self._template.render(dummy[:2], generate=False)
        prompt = os.path.commonprefix([self._template.render(dummy[:1]), whole])
        # QwQ's prompt opens a thought, and "<think>" begins as "<tool_call>" does.
        prompt = re.sub("<[^<>]*$", "", prompt)
        return len(parse_tool_calls(whole[len(prompt) :])[1]) == 1

    def _end_of_turn(self, dummy) -> TurnEnd:
        """Find how the assistant turn dummy[1] of a conversation ends."""
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
        count = template.controls(" ".join(before)).count(cut)
        return TurnEnd(stop, (cut, count + 1))

    def _turn_starts(self):
        """Return the control tokens that open an assistant message or the message after it."""
        template = self._template
        answered = self._answered(REPLY)
        closed = template.controls(template.render(answered[:1], generate=False))
        opened = template.controls(template.render(answered[:1]))
        text = template.since(template.render(answered), *self._answer_end.since)
        followed = template.controls(text)
        opening = opened[len(os.path.commonprefix([closed, opened])) :]
        # gpt-oss writes some of them between a thought and its answer, too.
        thoughtful = self._answered(REPLY, thinking=THOUGHT, reasoning_content=THOUGHT)[:2]
        rendering = template.render(thoughtful, generate=False)
        inside = template.controls(rendering.partition(THOUGHT)[2].partition(ANSWER)[0])
        return frozenset({*opening[:1], *followed[1:2]}.difference(inside))
