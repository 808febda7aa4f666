r"""The reward `exact`: 1 if the final answer of an episode equals the reference, and else 0.

The final answer is what the episode said last (envs.answers.answer_of). In a text it is what the
mark that stands last marks:

    \boxed{7}   \fbox{7}   \boxed {7}   \boxed 7    a box, whose braces are counted
    <answer>7</answer>                              a tag
    Answer: 7   #### 7                              the rest of the line, and where that is empty
                                                    the next line
    7                                               no mark: the whole text

What was cut is no answer: a box or a tag that does not end, and in a turn that a limit ended also a
line or a text that goes up to its end. What follows a mark does not matter.

The reference is the column "answer" or "solution" of the task, or each item of a list in it, read
in the same way. Without one an episode is not scored.

Two answers are equal if their forms are:

    formula   a text with a command of LaTeX, or with an operator and no word, or a tuple: all but
              white space and dollar signs, and Markdown, quotation marks and a full stop around it
    words     any other text: all but case, punctuation and articles, as SQuAD's exact match (arXiv
              1606.05250); a number keeps its sign, and beside an operator all operators stay

So \frac{1}{2} is not -\frac{1}{2}, x > 5 is x>5 but not x<5, (1,2] is not [1,2), n! is not n. But
"The Eiffel Tower!" is "eiffel tower", and "COVID-19" is "Covid19": that hyphen joins a word.
The package math-verify compares values: --rewards math_verify.
"""
import re
import unicodedata

from envs.answers import UNSPACED, alternatives, answer_of, boxes, normalized, one_form

# As in DAPO, with Markdown around it, and in GSM8K.
LINE = re.compile("^[^\\w\n]*answer[*_ ]*[:\uff1a]|####", re.MULTILINE | re.IGNORECASE)
AROUND = "*_` \t\r\n\"\u201c\u201d"  # Markdown, white space, quotation marks
# What a LaTeX text has around and within formulas without a meaning: $, \( \), \[ \] and spaces.
LAYOUT = re.compile(r"(\\\\)|\\?\$|\\[][(),;:! ]")

# + < = > | ~ and those beyond ASCII. Of punctuation, what is an operator where no word is.
SYMBOLS = "^" + "".join(c for c in map(chr, range(2**16)) if unicodedata.category(c) == "Sm")
OPERATORS = f"{SYMBOLS}-*/:_\u00b7"
SPACED = re.compile(rf"\s*([{re.escape(OPERATORS)}])\s*")
# SQuAD's rule removes punctuation. It knows nothing of characters for private use.
KEPT = {ord(sign): 0xE000 + ord(sign) for sign in "^+<=>|~-*/:_\u00b7"}
TOKEN = re.compile(r"\d+|[^\W\d_]+|[^\w\s]|_")
FUNCTIONS = {"sin", "cos", "tan", "log", "ln", "exp", "sqrt", "pi", "max", "min"}


def exact(t) -> float | None:
    """Return 1 if the final answer equals the reference, else 0, or None without a reference."""
    # A reference without a word would pay for silence.
    wanted = list(filter(None, map(form, references_of(t))))
    if wanted:
        return float(form(final_answer(t)) in wanted)


# ------------------------------------------------------------------------------- the final answer
def final_answer(t) -> str:
    """Return the final answer of an episode (agent.Trajectory), "" if it gave none."""
    is_cut = t.truncated and t.messages[-1]["role"] == "assistant"
    return marked(answer_of(t), is_cut)


def references_of(t) -> list[str]:
    """Return what the task's column "answer" or "solution" accepts: it, and each item of a list."""
    task = t.info["task"]
    return list(map(marked, alternatives(task.get("answer", task.get("solution")))))


def marked(text: str, is_cut: bool = False) -> str:
    """Return what the last mark of a text marks, or all of it; "" if that was cut.

    is_cut: a limit ended the text.
    """
    # Of each mark: where it begins, what it marks, and whether that was cut.
    marks = [(-1, text, is_cut)]
    for line in list(LINE.finditer(text))[-1:]:
        marks.append((line.start(), *first_line(text[line.end():], is_cut)))
    before, tag, rest = text.rpartition("<answer>")
    if tag:
        content, end, _ = rest.partition("</answer>")
        marks.append((len(before), content, not end))
    for start, end, content in boxes(text):
        if content is None:
            # What follows is in this box.
            return ""
        marks.append((start, content, is_cut and end == len(text) and text[-1] != "}"))
    _, answer, was_cut = max(marks)
    return "" if was_cut else answer


def first_line(text: str, is_cut: bool) -> tuple[str, bool]:
    """Return the first line with more than Markdown in it, and whether it was cut."""
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        if line.strip(f"{AROUND}$") not in ("", r"\[", r"\("):
            return line.partition("</answer>")[0], is_cut and number == len(lines)
    return "", is_cut


# --------------------------------------------------------------------------------- the comparison
def form(text: str) -> list[str]:
    """Return the formula or the words by which an answer is compared."""
    text = LAYOUT.sub(r"\1", one_form(text))
    text = re.sub(r"\\([%#&_])", r"\1", text).lstrip(AROUND).rstrip(f"{AROUND}.\u3002")
    text = re.sub(r"^-\s+", "-", text)
    # Two letters are a word unless they name a function.
    tokens = ["", *TOKEN.findall(text), ""]
    has_operator = any(map(is_operator, tokens, tokens[1:], tokens[2:]))
    has_words = any(map(is_word, tokens))
    is_tuple = bool(re.match(r"[(\[{]", text)) and text[-1] in ")]}" and "," in text
    if "\\" in text or not has_words and (has_operator or is_tuple):
        return ["".join(text.split())]
    if has_operator:
        text = SPACED.sub(r"\1", text).translate(KEPT)
    return normalized(text)


def is_word(token: str) -> bool:
    """True for two letters or more that are no function, and for a Chinese character."""
    is_long = len(token) > 1 and token[0].isalpha() and token not in FUNCTIONS
    return is_long or bool(UNSPACED.fullmatch(token))


def is_operator(before: str, sign: str, after: str) -> bool:
    """True if a token is an operator between these two, of which "" is none."""
    if before and after and sign in SYMBOLS:
        return True
    # twenty-one, COVID-19, and/or, and 2001: A Space Odyssey
    if is_word(before) or is_word(after) or sign == ":" and not after.isdecimal():
        return False
    if before and after:
        return sign in OPERATORS
    if before:
        return sign in ("!", "+", "-", "|")
    # The sign of a number stays among words, too. +7 is 7, and = 7 as well.
    is_sign = sign == "-" and not after.isdecimal()
    return bool(after) and (is_sign or sign == "!" or sign in SYMBOLS and sign not in "+=")
