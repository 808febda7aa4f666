r"""GSM8K: grade-school word problems (Cobbe et al. 2021, arXiv:2110.14168) with a calculator.

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
import urllib.request
from decimal import Decimal

import numpy as np

from envs.calls import call
from experiment.data import read_rows
from experiment.errors import UserError

URL = ("https://raw.githubusercontent.com/openai/grade-school-math/"
       "3101c7d5072418e28b9008a6636bde82a006892c/grade_school_math/data")
SHA256 = {  # of 7,473 and 1,319 rows
    "train": "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465",
    "test": "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14",
}
MAX_FILE = 10**7  # bytes; the larger file has 4.2 MB
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
             ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
             ast.Pow: operator.pow}
FUNCTIONS = {f.__name__: f for f in (abs, math.ceil, math.floor, max, min, round, math.sqrt)}
ERRORS = {
    ZeroDivisionError: "division by zero",
    OverflowError: "number too large",
    MemoryError: "nested too deep",
    SyntaxError: f"use numbers, + - * / // % (remainder) ** ( ) and {', '.join(FUNCTIONS)}",
}
MAX_BITS = 1024  # of an integer on the way
CHARACTERS = re.compile(r"[0-9A-Za-z.,+\-*/%() \t]*")
# 2x, 0xff, 1j, and `1if`, at which Python's parser warns.
GLUED = re.compile(r"[0-9.](?![eE][+-]?[0-9])[A-Za-z]")
THOUSANDS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9,])")
NUMBER = re.compile(r"([+-]?)(?:\\?\$)?([0-9]{1,3}(?:,[0-9]{3})+|[0-9]+|(?=\.[0-9]))(\.[0-9]+)?"
                    r"(?:\\?%)?\.?")
BOXED = re.compile(r"\\boxed\{([^{}\n]*)\}")


def _value(node: ast.expr) -> int | float:
    """Return the value of a syntax node, or raise.

    Every value on the way is an int of at most MAX_BITS bits or a finite float.
    """
    match node:
        case ast.Constant(value):
            pass
        case ast.UnaryOp(ast.UAdd(), operand):
            value = _value(operand)
        case ast.UnaryOp(ast.USub(), operand):
            value = -_value(operand)
        case ast.BinOp(left, op, right) if type(op) in OPERATORS:
            a, b = _value(left), _value(right)
            if type(op) is ast.Pow and type(a) is type(b) is int and a.bit_length() * b > MAX_BITS:
                raise OverflowError
            value = OPERATORS[type(op)](a, b)
        case ast.Call(ast.Name(name), arguments, []) if name in FUNCTIONS:
            values = [_value(argument) for argument in arguments]
            # round(1, -10**9) would build 10**10**9.
            if name == "round" and not all(type(n) is int and abs(n) <= 15 for n in values[1:]):
                raise ValueError("round: digits must be an integer from -15 to 15")
            value = FUNCTIONS[name](*values)
        case _:
            raise SyntaxError
    # (-8)**0.5 is complex.
    if type(value) not in (int, float):
        raise ValueError("not a real number")
    if type(value) is float and not math.isfinite(value):
        raise OverflowError
    if type(value) is int and value.bit_length() > MAX_BITS:
        raise OverflowError
    return value


def calculator(text: str) -> str:
    """Return the value of an arithmetic expression, or "error: ..." (at most 120 characters).

    It never raises and never takes long. "1,000" is 1000, except where a function is called:
    there commas separate arguments. Floats have 12 significant digits.
    """
    try:
        value = _value(_parsed(text))
    except Exception as error:
        return f"error: {ERRORS.get(type(error), error)}"[:120]
    if type(value) is int:
        return repr(value)
    # 0.1 + 0.2 is 0.3.
    short = value if value.is_integer() else float(f"{value:.12g}")
    if short.is_integer() and abs(short) < 2**53:
        return str(int(short))
    return f"{short:.12g}"


def _parsed(text: str) -> ast.expr:
    """Return the syntax tree of an expression, or raise."""
    text = text.strip() if isinstance(text, str) else ""
    if not 0 < len(text) <= 200:
        raise ValueError("give an expression of 1 to 200 characters")
    if "^" in text:
        raise ValueError("use ** for powers")
    if not CHARACTERS.fullmatch(text) or GLUED.search(text):
        raise SyntaxError
    if not re.search(r"[A-Za-z]\s*\(", text):
        text = THOUSANDS.sub(lambda number: number[0].replace(",", ""), text)
    # max(1,000, 2) would be max(1, 0, 2).
    elif re.search(r",0[0-9]", text):
        raise ValueError("in a function write 1000, not 1,000")
    return ast.parse(text, mode="eval").body


def _number(text: str) -> Decimal | None:
    """Return the exact value of "-$1,234.50", "50%" or "42.", where 42.0 is 42.

    None for all else, such as "nan", "1e9", "1_0" and "４２".
    """
    match = NUMBER.fullmatch(text.strip()) if len(text) <= 100 else None
    if not match:
        return None
    return Decimal(match[1] + match[2].replace(",", "") + (match[3] or ""))


def _marked(text: str) -> set:
    """Return the values that the text marks as its answer; None stands for what is no number.

    They are the rest of each "####" line and the contents of each \\boxed{}.
    """
    values = BOXED.findall(text)
    # Boxes that are nested or not closed hold no number.
    values += [""] * (text.count("\\boxed") - len(values))
    values += [BOXED.sub(r"\1", line) for line in re.findall(r"####([^\n]*)", text)]
    return {_number(value) for value in values}


class GSM8K:
    """A word problem whose answer is one number; the reward is 1 if it is right.

    Attributes:
        num_turns: answers that are allowed, 1 (AReaL: 5). A row may state it too. Calls of
            `answer` in one turn count one by one.
        turn_discount: factor on the reward for every wrong answer before the right one, 1.0.

    AReaL pays -1 or 1 for every turn and continues after success; here the episode ends there, as
    in its MultiTurnWorkflow. Its turn_level_discount is 1.0 too, but discounts returns.
    """

    system_prompt = ("Solve the problem step by step. Compute with the calculator. "
                     "Give the result, one number, with the answer tool, or in text on a last "
                     "line: #### number")
    max_turns = 12  # the longest solution has 9 calculations
    limits = {"max_new_tokens": 512, "max_tokens": 2048}
    num_turns = 1
    turn_discount = 1.0

    def reset(self, question: str, answer: str, num_turns: int | None = None, **_) -> str:
        """Begin with a question and its answer: a solution ending in "#### 72", or the number."""
        row = self._row({"question": question, "answer": answer, "num_turns": num_turns})
        solution = row["answer"]
        self._gold = _number(solution.rpartition("####")[2])
        self._plan = true_calculations(solution)[:self.max_turns - 1]
        self._attempts = num_turns or self.num_turns
        self._computed, self._wrong = 0, 0
        self.reward, self.done, self._solved = 0.0, False, False
        self._reward_parts = {"correct": 0.0}
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
        return self._grade({_number(str(value))}) or ("Correct." if self._solved else "Wrong.")

    def _reply(self, text: str) -> str | None:
        return None if self.done else self._grade(_marked(text))

    def _grade(self, values: set) -> str | None:
        """Count one answer. Return the words that ask for another one, or None at the end."""
        self._solved = values == {self._gold}
        if self._solved:
            self.reward = self._reward_parts["correct"] = float(self.turn_discount ** self._wrong)
        self._wrong += not self._solved
        self.done = self._solved or self._wrong >= self._attempts
        # The words are AReaL's.
        return None if self.done else "Unfortunately your answer is wrong. Let's try again."

    def get_reward(self) -> float:
        return self.reward

    def _check(self) -> bool:
        return self._solved

    def _expert(self) -> list[dict]:
        """Return one calculation of the written solution per turn, then its answer."""
        if self.done:
            return []
        if self._computed < len(self._plan):
            expression = self._plan[self._computed]
            return [{"name": "calculator", "arguments": {"expression": expression}}]
        return [{"name": "answer", "arguments": {"value": f"{self._gold:f}"}}]

    @staticmethod
    def _row(row: dict) -> dict:
        """Return the row with "answer" as text, or raise ValueError. Other columns stay."""
        for name in ("question", "answer"):
            if row.get(name) is None:
                raise ValueError(f'no "{name}" field; has: {", ".join(row)}')
        question, answer, turns = row["question"], row["answer"], row.get("num_turns")
        if not isinstance(question, str) or not question.strip():
            raise ValueError('"question" is empty or not text')
        if type(answer) in (int, float):
            # 1e22 is written in digits.
            answer = f"{Decimal(str(answer)):f}"
        if not isinstance(answer, str) or _number(answer.rpartition("####")[2]) is None:
            raise ValueError('"answer" has no number; give 72, or a solution that ends in '
                             f"#### 72, not {str(answer)[-40:]!r}")
        if turns is not None and (type(turns) is not int or turns < 1):
            raise ValueError(f"num_turns {turns!r}: use an integer >= 1")
        return {**row, "answer": answer}

    @staticmethod
    def _tasks(split: str, n: int | None, seed: int) -> list[dict]:
        """Return at most n rows of the official split, in an order fixed by the seed."""
        rows = read_rows(_cached(split))
        order = np.random.default_rng(seed).permutation(len(rows))[:n]
        return [{name: rows[i][name] for name in ("question", "answer")} for i in order]


def true_calculations(solution: str) -> list[str]:
    """Return the left sides of <<48/2=24>> that are true; in GSM8K all are."""
    marks = re.findall(r"<<([^<>=]+)=([^<>=]+)>>", solution)
    values = [(left, calculator(left), calculator(right)) for left, right in marks]
    return [left for left, value, stated in values if value == stated and "error" not in value]


def written_solution(row: dict) -> list[dict]:
    """Return a written solution as a conversation with tool calls.

    "Half is 48/2 = <<48/2=24>>24." becomes "Half is 48/2 =" and a call, the environment's "24",
    then "24." and the call of the answer.
    """
    env = GSM8K()
    question = env.reset(**row)
    messages = [{"role": "system", "content": env.system_prompt},
                {"role": "user", "content": question}]
    solution = str(row["answer"]).rpartition("####")[0]
    text, *rest = re.split(r"<<([^<>=]+)=[^<>=]+>>", solution)
    for expression, after in zip(rest[::2], rest[1::2]):
        if expression in env._plan:
            asked = {"name": "calculator", "arguments": {"expression": expression}}
            said = {"role": "assistant", "content": text.strip(), "tool_calls": [asked]}
            messages += [said, {"role": "tool", "content": call(env, **asked)[0]}]
            text = ""
        text += after
    last = {"role": "assistant", "content": text.strip(), "tool_calls": env._expert()}
    return [*messages, last]


def _cached(split: str) -> str:
    """Return the path of the official file, which is downloaded once and checked by its hash."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = os.path.join(cache, "agentic-rl", "gsm8k")
    path = os.path.join(folder, f"{split}.jsonl")
    url = f"{URL}/{split}.jsonl"
    remedy = f"give --dataset path/to/{split}.jsonl"
    cached = os.path.exists(path)
    try:
        with open(path, "rb") if cached else urllib.request.urlopen(url, timeout=10) as source:
            data = source.read(MAX_FILE)
    # An OSError, or a reply that is not HTTP.
    except Exception as error:
        why = "unreadable" if cached else "not in the cache and no network"
        reason = getattr(error, "reason", error)
        raise UserError(f"gsm8k: {why} ({reason}); {remedy}") from None
    if hashlib.sha256(data).hexdigest() != SHA256[split]:
        where, remedy = (path, "delete it and it is fetched again") if cached else (url, remedy)
        raise UserError(f"gsm8k: {where}: sha256 differs from the official file's; {remedy}")
    if not cached:
        os.makedirs(folder, exist_ok=True)
        # Whole or not at all, whichever process comes first.
        temporary = f"{path}.{os.getpid()}"
        with open(temporary, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    return path
