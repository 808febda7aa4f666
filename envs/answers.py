"""Comparing answers in text: which are accepted, and what counts as the same words."""
import re
import string
import unicodedata

# Punctuation of all languages, and as in SQuAD the symbols of ASCII.
MARKS = re.escape(string.punctuation + "".join(
    c for c in map(chr, range(2**16)) if unicodedata.category(c).startswith("P")))
# Not of a number: its sign, its point or decimal comma (that of 1,000 is), its fraction bar.
PUNCTUATION = re.compile(
    rf"(?!(?<!\w)-[$.]?\d|[./]\d|(?<=\d),(?!(\d\d,)*\d{{3}}(?!\d))\d)[{MARKS}]")
# Full-width forms, the dash and the minus sign, and Arabic's point and thousands mark.
READ_AS = {**dict(zip(range(0xFF01, 0xFF5F), range(0x21, 0x7F))),
           0x2013: "-", 0x2212: "-", 0x66B: ".", 0x66C: ","}
UNSPACED = re.compile("([\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff])")


def alternatives(reference) -> list[str]:
    """Return a reference as text, and if it is a list of answers that are all right, each of them.

    pandas makes 72.0 of 72 where the column has a gap, and parquet fills lists with nulls. An
    object, such as TriviaQA's, is no answer; --fields answer=answer.aliases names those in it.
    """
    answers = [reference, *(reference if isinstance(reference, list) else ())]
    return [f"{answer:.15g}" if type(answer) is float else str(answer)
            for answer in answers if not isinstance(answer, dict | None)]


def spaced(text: str) -> str:
    """Return a text without case, with one form of letters and digits, and with spaces in Chinese.

    Each Chinese or Japanese character becomes a word, as in evaluations of these languages.
    """
    text = unicodedata.normalize("NFC", text).casefold().translate(READ_AS)
    text = re.sub(r"\d", lambda digit: str(int(digit[0])), text)
    return UNSPACED.sub(r" \1 ", text)


def normalized(text: str) -> list[str]:
    """Return the words of a text as SQuAD compares them: no case, punctuation or articles.

    But a number keeps its sign, its point and its fraction bar: -7 is not 7, nor 1.5 15.
    """
    text = PUNCTUATION.sub("", spaced(text))
    words = text.split()
    # An answer may be the letter A.
    return words if len(words) == 1 else re.sub(r"\b(a|an|the)\b", " ", text).split()
