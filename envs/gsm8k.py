r"""GSM8K: grade-school word problems (Cobbe et al. 2021, arXiv:2110.14168) with a calculator.

`--env_options tools=calculator+python` adds the Python of extras/sandbox.
The model answers with the tool `answer`, or in text by a line `#### 42` or by `\boxed{42}`. Only
what the model wrote is read, never the output of a tool. An answer holds one value: two different
ones are wrong, and so is one that is no plain number. With `num_turns` > 1 the model may try again
after a wrong answer, as in AReaL's MathMultiTurnAgent.
"""
import ast
import hashlib
import math
import operator
import os
import re
import threading
import urllib.request
import warnings
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Literal

import envs
from envs.answers import boxes
from envs.task_files import read_rows
from core.data import shuffled
from core.config import UserError
from core.tool_calls import after_thought

URL = ("https://raw.githubusercontent.com/openai/grade-school-math/"
       "3101c7d5072418e28b9008a6636bde82a006892c/grade_school_math/data")
SHA256 = {  # of 7,473 and 1,319 rows
    "train": "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465",
    "test": "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14",
}
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
             ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
             ast.Pow: operator.pow, ast.UAdd: operator.pos, ast.USub: operator.neg}
FUNCTIONS = {f.__name__: f for f in (abs, math.ceil, math.floor, max, min, round, math.sqrt)}
ERRORS = {ZeroDivisionError: "division by zero", OverflowError: "number too large",
          ValueError: "not a real number"}
HELP = f"use numbers, + - * / // % (remainder) ** ( ) and {', '.join(FUNCTIONS)}"
NUMBER = re.compile(r"[+-]?(\\?\$)?([0-9]{1,3}(,[0-9]{3})+|[0-9]+|(?=\.[0-9]))(\.[0-9]+)?"
                    r"(\\?%)?\.?")
# CPython 3.11 counts how deep the syntax trees of all threads are nested in one number.
PARSING = threading.Lock()
# Python 3.12 warns of unknown escapes in the model's code, between the lines of a run.
warnings.filterwarnings("ignore", module="<unknown>")


def parse(code: str, mode: str = "exec") -> ast.AST:
    """Return the syntax tree of code, or raise SyntaxError or ValueError. Nothing is run."""
    try:
        with PARSING:
            return ast.parse(code, mode=mode)
    except (MemoryError, RecursionError):
        raise ValueError("nested too deeply") from None


def _as_written(value):
    """Return a float as the decimal that a person reads."""
    if type(value) is float:
        return Fraction(f"{value:.15g}")
    return value


def _value(node: ast.expr) -> int | float:
    """Return the value of a syntax node, or raise. No value on the way is larger than a float."""
    match node:
        case ast.Constant(value):
            function, operands = None, []
        case ast.UnaryOp(op, operand):
            function, operands = OPERATORS[type(op)], [operand]
        # "20% + 5" means percent. Python reads the remainder by +5.
        case ast.BinOp(_, ast.Mod(), ast.UnaryOp()):
            raise SyntaxError
        case ast.BinOp(left, op, right):
            function, operands = OPERATORS[type(op)], [left, right]
        case ast.Call(ast.Name(name), operands, []):
            function = FUNCTIONS[name]
        case _:
            raise SyntaxError
    values = list(map(_value, operands))
    # 9**9**9 and round(1, -10**9) would take hours.
    if function in (operator.pow, round) and any(abs(value) > 1000 for value in values[1:]):
        raise OverflowError
    # As a float 0.1 is more than a tenth, and 1 // 0.1 is 9.
    if function in (operator.floordiv, operator.mod, math.ceil, math.floor):
        values = map(_as_written, values)
    if function:
        value = function(*values)
    if type(value) is Fraction:
        value = float(value)
    # (-8)**0.5 is complex.
    if type(value) not in (int, float):
        raise ValueError
    if not math.isfinite(value):
        raise OverflowError
    return value


def calculator(text: str) -> str:
    """Return the value of an arithmetic expression, or "error: ...".

    It never raises and never takes long. "1,000" is 1000, except where a function is called:
    there commas separate arguments. Floats have 12 significant digits.
    """
    text = str(text).strip()
    if len(text) > 200:
        return "error: give an expression of at most 200 characters"
    if not re.search("[a-z]{3}", text):
        text = re.sub(",(?=[0-9]{3})", "", text)
    try:
        value = _value(parse(text, mode="eval").body)
    except Exception as error:
        return f"error: {ERRORS.get(type(error), HELP)}"
    if type(value) is float and not (value.is_integer() and abs(value) < 2**53):
        # 0.1 + 0.2 is 0.3.
        return f"{value:.12g}"
    return str(int(value))


def _number(text: str) -> Decimal | None:
    """Return the exact value of "-$1,234.50", "50%" or "42.", where 42.0 is 42.

    None for all else, such as "nan", "1e9", "1_0" and "４２".
    """
    digits = text.strip()
    if not NUMBER.fullmatch(digits):
        return None
    # Dollar, percent, commas and a full stop at the end do not change the value.
    return Decimal(re.sub(r"[\\$%,]|\.$", "", digits))


def _marked(text: str) -> set:
    """Return the values that the text marks as its answer; None stands for what is no number.

    They are the rest of each "####" line and the contents of each box.
    """
    marks = [content or "" for _, _, content in boxes(text)]
    for line in re.findall(r"####([^\n]*)", text):
        # The whole line counts, and a box in it as what it holds.
        for start, end, content in reversed(boxes(line)):
            line = line[:start] + (content or "") + line[end:]
        marks.append(line)
    return set(map(_number, marks))


class GSM8K:
    """A word problem whose answer is one number; the reward is 1 if it is right.

    AReaL pays -1 or 1 for every turn and continues after success. Here the episode ends there, as
    in its MultiTurnWorkflow.
    """

    system_prompt = ("Solve the problem step by step. Compute with the calculator. "
                     "Give the result, one number, with the answer tool, or in text on a last "
                     "line: #### number")
    # Which tools there are, and whether Python runs without confinement.
    options = {"tools": "calculator", "unsafe_code": False}
    option_types = {"tools": Literal["calculator", "calculator+python"]}
    max_turns = 12  # the longest solution has 9 calculations
    limits = {"max_new_tokens": 512, "max_tokens": 2048}

    def __init_subclass__(cls):
        """Give the class the python tool if its options say so."""
        if cls.options["tools"] == "calculator+python":
            if "python" not in envs.TOOLS:
                raise UserError("tools=calculator+python needs extras/sandbox")
            cls.python = envs.TOOLS["python"](cls)
            cls.system_prompt = cls.system_prompt.replace("calculator", "calculator or python")

    def reset(self, question: str, answer: str | None, num_turns: int | None = None, **_) -> str:
        """Begin with a question and its answer: a solution ending in "#### 72", or the number.

        `num_turns` answers are allowed, 1 by default (AReaL: 5). Each call of `answer` counts. The
        answer None is unknown: then one is allowed, and no reward is paid.
        """
        solution = ""
        if answer is not None:
            solution = self._row({"question": question, "answer": answer})["answer"]
        self._gold = _number(solution.rpartition("####")[2])
        self._plan = true_calculations(solution)[:self.max_turns - 1]
        self._attempts_left = int(num_turns or 1)
        if self._gold is None:
            self._attempts_left = 1
        self._computed = 0
        self.reward = 0.0
        self.done = False
        return question

    def calculator(self, expression: str) -> str:
        """Evaluate an arithmetic expression.

        Args:
            expression: For example "(48 + 2) / 4" or "round(7 / 3, 2)".
        """
        self._computed += 1
        return calculator(expression)

    def answer(self, value: str) -> str:
        """Give the final answer.

        Args:
            value: One number, for example "72".
        """
        if self.done:
            return "error: the episode is over"
        again = self._grade({_number(str(value))})
        if self._gold is None:
            return "The right answer is not known."
        return again or ("Correct." if self._check() else "Wrong.")

    def _reply(self, text: str) -> str | None:
        return None if self.done else self._grade(_marked(after_thought(text)))

    def _grade(self, values: set) -> str | None:
        """Count one answer. Return the words that ask for another one, or None at the end."""
        self._attempts_left -= 1
        # Among the values, too, None stands for what is no number.
        self.reward = float(values == {self._gold} and self._gold is not None)
        self.done = self._check() or self._attempts_left <= 0
        # The words are AReaL's.
        return None if self.done else "Unfortunately your answer is wrong. Let's try again."

    def get_reward(self) -> float:
        return self.reward

    def _check(self) -> bool:
        return self.reward == 1.0

    def _expert(self) -> list[dict]:
        """Return one calculation of the written solution per turn, then its answer."""
        if self.done:
            return []
        if self._computed < len(self._plan):
            expression = self._plan[self._computed]
            return [{"name": "calculator", "arguments": {"expression": expression}}]
        return [{"name": "answer", "arguments": {"value": f"{self._gold:f}"}}]

    @staticmethod
    def _from_text(text: str) -> dict:
        """Return the task that a person typed: a question, and behind #### perhaps its answer."""
        question, _, answer = text.partition("####")
        return {"question": question.strip(), "answer": answer.strip() or None}

    @staticmethod
    def _row(row: dict) -> dict:
        """Return the row with "answer" as text, or raise ValueError. Other columns stay."""
        question, answer = row["question"], str(row["answer"])
        if not isinstance(question, str) or not question.strip():
            raise ValueError('"question" is empty or not text')
        if _number(answer.rpartition("####")[2]) is None:
            raise ValueError('"answer" has no number; give 72, or a solution that ends in '
                             f"#### 72, not {answer[-40:]!r}")
        return {**row, "answer": answer}

    @staticmethod
    def _conversation(row: dict) -> list[dict]:
        """Return the written solution in a row as a conversation with tool calls.

        "Half is 48/2 = <<48/2=24>>24." becomes "Half is 48/2 =" and a call, the environment's "24",
        then "24." and the call of the answer.
        """
        env = GSM8K()
        question = env.reset(row["question"], row["answer"])
        messages = [{"role": "system", "content": env.system_prompt},
                    {"role": "user", "content": question}]
        solution = str(row["answer"]).rpartition("####")[0]
        text, *rest = re.split(r"<<([^<>=]+)=[^<>=]+>>", solution)
        for expression, after in zip(rest[::2], rest[1::2]):
            if expression in env._plan:
                asked = {"name": "calculator", "arguments": {"expression": expression}}
                said = {"role": "assistant", "content": text.strip(), "tool_calls": [asked]}
                messages += [said, {"role": "tool", "content": env.calculator(expression)}]
                text = ""
            text += after
        last = {"role": "assistant", "content": text.strip(), "tool_calls": env._expert()}
        return [*messages, last]

    @staticmethod
    def _tasks(split: str, n: int | None, seed: int) -> list[dict]:
        """Return at most n rows of the official split, in an order fixed by the seed."""
        rows = [row for _, row in read_rows(str(_cached(split)))]
        return shuffled(rows, seed)[:n]


def true_calculations(solution: str) -> list[str]:
    """Return the left sides of <<48/2=24>> that are true; in GSM8K all are."""
    lefts = []
    for left, right in re.findall(r"<<([^<>=]+)=([^<>=]+)>>", solution):
        value = calculator(left)
        if value == calculator(right) and "error" not in value:
            lefts.append(left)
    return lefts


def _cached(split: str) -> Path:
    """Return the path of the official file, which is downloaded once and checked by its hash."""
    url = f"{URL}/{split}.jsonl"
    try:
        path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache",
                    f"agentic-rl/gsm8k/{split}.jsonl")
        if path.exists():
            return path
        data = urllib.request.urlopen(url, timeout=10).read()
        if hashlib.sha256(data).hexdigest() != SHA256[split]:
            raise ValueError("sha256 differs from the official file's")
        os.makedirs(path.parent, exist_ok=True)
        # Several processes may begin with a download. Each has a file of its own to rename.
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        temporary.write_bytes(data)
        temporary.replace(path)
        return path
    # No network, a reply that is not HTTP, or no home, or one that cannot be read or written.
    except Exception as error:
        raise UserError(f"gsm8k: {url}: {getattr(error, 'reason', error)}; "
                        f"give --tasks path/to/{split}.jsonl") from None
