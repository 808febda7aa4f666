"""Errors that end a program with one line in place of a traceback."""
import re

# Control characters but newline and tab, marks that reverse writing, and lone surrogates.
UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    r"""Return the text with control characters spelled out, the escape character as \x1b.

    Everything that data or a model wrote is printed through this function, because a terminal obeys
    escape sequences: OSC 52 overwrites the clipboard of the reader. Newlines and tabs stay.
    """
    return UNPRINTABLE.sub(lambda match: repr(match[0])[1:-1], text.replace("\r\n", "\n"))


def first_line(error) -> str:
    """Return the first line of an exception's message, at most 200 characters of it."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def beginning(text: str, limit: int) -> str:
    """Return the beginning of a text as one line of at most `limit` characters.

    It is cut at a space, but not in the first half: Chinese, Thai and paths have none.
    """
    text = " ".join(text.split())
    head = text[:limit - 5]
    return text if len(text) <= limit else head[:head.rfind(" ", limit // 2)] + " [...]"


class Printable(BaseException):
    """An exception whose first argument is its message, shown as `printable` text.

    `code` is the exit status of a program that it ends.
    """

    def __str__(self):
        return printable(str(self.args[0]))


class UserError(Printable, ValueError):
    """What the user can fix. `main` prints the message, which says how, and no traceback."""

    code = 2


class Stop(Printable):
    """Ends a run early with a message that says why and how to continue.

    It is not an Exception, so that code which catches the faults of a tool or row lets it pass.
    `code` is the exit status: 3 for numbers not finite, 4 for a full disk, 128 plus the signal's.
    """

    def __init__(self, message, code):
        super().__init__(message, code)
        self.code = code


class RankLost(Printable, RuntimeError):
    """Another process of a torchrun job has ended before the work was done."""

    code = 5


class EnvironmentFault(Printable, RuntimeError):
    """The code of an environment raised, did not return, or broke the contract.

    No model and no setting is to blame. Inside a rollout it ends one episode, and the run if it
    happens too often.
    """

    code = 6
