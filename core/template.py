"""Render a chat template and encode the rendering so that text stays text.

A rendering mixes the control tokens that the template writes (`<|im_start|>`, `<tool_call>`) with
text from users, tools and data files. Text that spells a control token must not become one. So
every spelled control token is put between two characters that no text has before the template sees
it. After rendering, what stands between them is encoded with ordinary tokens only.
"""
import json
import re
from functools import lru_cache

from core.config import first_line, whole

# Around a control token that is meant as text: the last two variation selectors, which no character
# uses. They are printable, so that Python's repr, which LFM2.5's template writes, keeps them.
BEGIN, END = "\U000e01ee", "\U000e01ef"


class Template:
    """The chat template of one tokenizer.

    Attributes:
        tools: the schemas that every rendering shows, already `clean`, or None.
    """

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.name = tokenizer.name_or_path or "this tokenizer"
        self.tools = None
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
        self._control = re.compile(pattern)
        # With the lines after it: templates strip them where they cut a thought out of a text, and
        # spell them in JSON.
        self._spelled = re.compile(f"(?:{pattern})\n{{0,2}}")
        self._marked = re.compile(
            f"{BEGIN}((?:{pattern})(?:\n|\\\\+n){{0,2}}){END}|[{BEGIN}{END}]")
        self._newline = self.encode("\n")
        # The episodes of a group often see the same results.
        self._cached_ids = lru_cache(256)(self._render_ids)

    def clean(self, value):
        """Return a copy of a message's field or a tool's schema that spells no control token.

        Lone surrogates, which no tokenizer encodes, become question marks. Names of fields cannot
        be marked, because templates look them up: ValueError if one spells a control token.
        """
        if isinstance(value, dict):
            for name in value:
                if self.clean(name) != name:
                    raise ValueError(f"names must be text without control tokens, got {name!r:.60}")
            return {name: self.clean(item) for name, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.clean(item) for item in value]
        if not isinstance(value, str):
            return value
        text = whole(value).replace(BEGIN, "").replace(END, "")
        # A normalizer may turn text into a control token: NFKC does it with full-width characters.
        normalized = self._normalized(text)
        if len(self._control.findall(normalized)) > len(self._control.findall(text)):
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
        written = self._control.findall(self._marked.sub(" ", rendering))
        return [self._control_ids[spelling] for spelling in written]

    def since(self, rendering: str, token_id: int, n: int) -> str:
        """Return a rendering from where the template writes a control token for the n-th time."""
        written = self._marked.sub(lambda spelled: " " * len(spelled[0]), rendering)
        places = [control.start() for control in self._control.finditer(written)
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

    def encode(self, text: str) -> list[int]:
        """Encode text in which control tokens count as such."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids, control tokens spelled out."""
        return self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)

    def _encode_inside(self, text, encode):
        """Encode text inside a rendering, without the space that some tokenizers put at a start."""
        ids = encode("\n" + text)
        length = len(self._newline)
        return ids[length:] if ids[:length] == self._newline else encode(text)

    def _encode_spelled(self, text):
        """Encode text that spells control tokens, with other tokens.

        The vocabulary of plain text may hold such a token too: "----" in some, "<s>" in Unigram
        models. Then the halves of the text are encoded instead.
        """
        ids = self._encode_inside(text, self.tokenizer._encode_without_added_tokens)
        controls = set(ids).intersection(self._control_ids.values())
        if not controls:
            return ids
        if len(text) == 1:
            controls.discard(self.tokenizer.unk_token_id)
            return [token_id for token_id in ids if token_id not in controls]
        middle = len(text) // 2
        return self._encode_spelled(text[:middle]) + self._encode_spelled(text[middle:])


def _is_control(token) -> bool:
    """True for an added token that text must not become: not for words, white space and letters."""
    if token.special:
        return bool(token.content)
    # This is SentencePiece's sign for a space.
    text = token.content.replace("\u2581", " ")
    is_text = len(text) < 2 or text.isspace() or text.replace("_", "").isalnum()
    return not is_text
