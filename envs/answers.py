"""Answers in text: which are accepted, what is in a box, and what counts as the same words."""
import re
import string
import unicodedata

from core.tool_calls import after_thought

# Punctuation of all languages, and as in SQuAD the symbols of ASCII.
MARKS = re.escape(string.punctuation + "".join(
    c for c in map(chr, range(2**16)) if unicodedata.category(c).startswith("P")))
# Not of a number: its sign, its point or decimal comma (that of 1,000 is), its fraction bar.
PUNCTUATION = re.compile(
    rf"(?!(?<!\w)-[$.]?\d|[./]\d|(?<=\d),(?!(\d\d,)*\d{{3}}(?!\d))\d)[{MARKS}]")
# Full-width forms, hyphens, dashes and the minus sign, and Arabic's point and thousands mark.
READ_AS = {**dict(zip(range(0xFF01, 0xFF5F), range(0x21, 0x7F))),
           **dict.fromkeys([*range(0x2010, 0x2016), 0x2212], "-"), 0x66B: ".", 0x66C: ","}
# What a box holds without braces: a number, one letter, a command, a formula in parentheses.
BARE = r"(?=[\d(+-]|\\[a-z]|[A-Za-z](?![A-Za-z]))(?:[^\s${}]|\{[^{}]*\})+"
# A box, another brace, or one that is escaped and does not count.
BRACE = re.compile(rf"(?P<box>\\(?:boxed|fbox|framebox)(?![A-Za-z])\s*(?:\{{|(?P<bare>{BARE})|\Z))"
                   r"|[{}]|\\[{}]|\\\\(?!boxed|fbox|framebox)")
UNSPACED = re.compile("([\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff])")


def alternatives(reference) -> list[str]:
    """Return a reference as text, and if it is a list of answers that are all right, each of them.

    pandas makes 72.0 of 72 where the column has a gap, and parquet fills lists with nulls. An
    object, such as TriviaQA's, is no answer; --fields answer=answer.aliases names those in it.
    """
    answers = [reference, *(reference if isinstance(reference, list) else ())]
    return [f"{answer:.15g}" if type(answer) is float else str(answer)
            for answer in answers if not isinstance(answer, dict | None)]


def answer_of(t) -> str:
    """Return what an episode (agent.Trajectory) answered, or "" if it gave no answer.

    That is the only argument of the call that ended it, or else the last text without its thought.
    Where a limit ended an episode after a call, such as a search, the call was no answer.
    """
    if not t.rewards:
        return ""
    last = max(i for i, message in enumerate(t.messages) if message["role"] == "assistant")
    turn, *results = t.messages[last:]
    calls = turn.get("tool_calls", [])
    if t.stop_reason != "done" and (calls or any(m["role"] == "tool" for m in results)):
        return ""
    if calls and len(calls[-1]["arguments"]) == 1:
        [value] = calls[-1]["arguments"].values()
        return str(value)
    return after_thought(turn["content"])


def boxes(text: str) -> list[tuple[int, int, str | None]]:
    r"""Return start, end and content of every \boxed{}, \fbox{}, \boxed {} and \boxed 5 in a text.

    Braces are counted. The content is None where the text ends before the box does.
    """
    found = []
    opened = []  # of each open brace the match that opened it
    for match in BRACE.finditer(text):
        if match["bare"]:
            found.append((match.start(), match.end(), match["bare"].rstrip(".,;:")))
        elif match["box"] or match[0] == "{":
            opened.append(match)
        elif match[0] == "}" and opened:
            opener = opened.pop()
            if opener["box"]:
                found.append((opener.start(), match.end(), text[opener.end():match.start()]))
    return found + [(match.start(), len(text), None) for match in opened if match["box"]]


def one_form(text: str) -> str:
    """Return a text with one form of each letter, digit and sign."""
    text = unicodedata.normalize("NFC", text).translate(READ_AS)
    return re.sub(r"\d", lambda digit: str(int(digit[0])), text)


def spaced(text: str) -> str:
    """Return a text without case, in one form, and with spaces in Chinese.

    Each Chinese or Japanese character becomes a word, as in evaluations of these languages.
    """
    return UNSPACED.sub(r" \1 ", one_form(text).casefold())


def normalized(text: str) -> list[str]:
    """Return the words of a text as SQuAD compares them: no case, punctuation or articles.

    But a number keeps its sign, its point and its fraction bar: -7 is not 7, nor 1.5 15.
    """
    text = PUNCTUATION.sub("", spaced(text))
    words = text.split()
    # An answer may be the letter A.
    return words if len(words) == 1 else re.sub(r"\b(a|an|the)\b", " ", text).split()
