r"""GSM8K: grade-school word problems (Cobbe et al. 2021, arXiv:2110.14168) with a calculator.

The model answers with the tool `answer`, or in text by a line `#### 42` or by `\boxed{42}`. Only what the model wrote
is read, never a tool's output, and one answer holds one value: two different ones, or one that is no plain number, are
wrong. `num_turns` > 1 gives it further goes after "wrong, try again", as AReaL's MathMultiTurnAgent does.
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

from envs import call, read_rows
from experiment.errors import UserError

URL = ("https://raw.githubusercontent.com/openai/grade-school-math/3101c7d5072418e28b9008a6636bde82a006892c"
       "/grade_school_math/data")
SHA256 = {"train": "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465",  # 7,473 rows
          "test": "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14"}  # 1,319 rows
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
             ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow}
FUNCTIONS = {f.__name__: f for f in (abs, math.ceil, math.floor, max, min, round, math.sqrt)}
ERRORS = {ZeroDivisionError: "division by zero", OverflowError: "number too large", MemoryError: "nested too deep",
          SyntaxError: f"use numbers, + - * / // % (remainder) ** ( ) and {', '.join(FUNCTIONS)}"}
CHARACTERS = re.compile(r"[0-9A-Za-z.,+\-*/%() \t]*")
GLUED = re.compile(r"[0-9.](?![eE][+-]?[0-9])[A-Za-z]")  # 2x, 0xff, 1j; also `1if`, at which Python's parser warns
THOUSANDS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9,])")
NUMBER = re.compile(r"([+-]?)(?:\\?\$)?([0-9]{1,3}(?:,[0-9]{3})+|[0-9]+|(?=\.[0-9]))(\.[0-9]+)?(?:\\?%)?\.?")
BOXED = re.compile(r"\\boxed\{([^{}\n]*)\}")


def _value(node: ast.expr) -> int | float:
    """Value of a syntax node; every value on the way is an int of at most 1024 bits or a finite float, or it raises."""
    match node:
        case ast.Constant(value):
            pass
        case ast.UnaryOp(ast.UAdd() | ast.USub() as sign, operand):
            value = _value(operand) * (-1 if isinstance(sign, ast.USub) else 1)
        case ast.BinOp(left, op, right) if type(op) in OPERATORS:
            a, b = _value(left), _value(right)
            if type(op) is ast.Pow and type(a) is type(b) is int and a.bit_length() * b > 1024:
                raise OverflowError
            value = OPERATORS[type(op)](a, b)
        case ast.Call(ast.Name(name), args, []) if name in FUNCTIONS:
            values = [_value(arg) for arg in args]
            if name == "round" and any(type(digits) is not int or abs(digits) > 15 for digits in values[1:]):
                raise ValueError("round: digits must be an integer from -15 to 15")  # round(1, -10**9) builds 10**10**9
            value = FUNCTIONS[name](*values)
        case _:
            raise SyntaxError
    if type(value) not in (int, float):  # (-8)**0.5 is complex
        raise ValueError("not a real number")
    if value.bit_length() > 1024 if type(value) is int else not math.isfinite(value):
        raise OverflowError
    return value


def calculator(text: str) -> str:
    """Value of an arithmetic expression, or "error: ..." (at most 120 characters). Never raises, never takes long.

    "1,000" is 1000, except where a function is called: there commas separate arguments. Floats: 12 significant digits.
    """
    try:
        text = text.strip() if isinstance(text, str) else ""
        if not 0 < len(text) <= 200:
            raise ValueError("give an expression of 1 to 200 characters")
        if "^" in text:
            raise ValueError("use ** for powers")
        if not CHARACTERS.fullmatch(text) or GLUED.search(text):
            raise SyntaxError
        if not re.search(r"[A-Za-z]\s*\(", text):
            text = THOUSANDS.sub(lambda number: number[0].replace(",", ""), text)
        elif re.search(r",0[0-9]", text):  # max(1,000, 2) would be max(1, 0, 2)
            raise ValueError("in a function write 1000, not 1,000")
        value = _value(ast.parse(text, mode="eval").body)
    except Exception as error:
        return f"error: {ERRORS.get(type(error), error)}"[:120]
    if type(value) is int:
        return repr(value)
    short = value if value.is_integer() else float(f"{value:.12g}")  # 0.1 + 0.2 -> 0.3
    return str(int(short)) if short.is_integer() and abs(short) < 2**53 else f"{short:.12g}"


def _number(text: str) -> Decimal | None:
    """"-$1,234.50", "50%", "42." -> exact value (42.0 == 42); None for all else: "nan", "1e9", "1_0", "４２"."""
    found = NUMBER.fullmatch(text.strip()) if len(text) <= 100 else None
    return Decimal(found[1] + found[2].replace(",", "") + (found[3] or "")) if found else None


def _marked(text: str) -> set:
    """The values `text` marks as its answer: the rest of each "####" line, each \\boxed{}; None for a non-number."""
    boxes = BOXED.findall(text) + [""] * (text.count("\\boxed") - len(BOXED.findall(text)))  # "": nested or unclosed
    lines = [BOXED.sub(r"\1", line) for line in re.findall(r"####([^\n]*)", text)]
    return {_number(value) for value in boxes + lines}


class GSM8K:
    """A word problem whose answer is one number; reward 1 if right. A row may set num_turns, a subclass both of these:

    num_turns: answers allowed, 1 (AReaL: 5); calls of `answer` in one turn count one by one. turn_discount: factor on
    the reward for every wrong answer before the right one, 1.0 (AReaL's turn_level_discount is 1.0 too, but discounts
    returns). AReaL pays -1 or 1 for every turn and goes on after success; here the episode ends there, as in its
    MultiTurnWorkflow.
    """
    system_prompt = ("Solve the problem step by step. Compute with the calculator. Give the result, one number, with "
                     "the answer tool, or in text on a last line: #### number")
    max_turns = 12  # the longest solution has 9 calculations
    limits = {"max_new_tokens": 512, "max_tokens": 2048}
    num_turns = 1
    turn_discount = 1.0

    def reset(self, question: str, answer: str, num_turns: int | None = None, **_) -> str:
        """`answer`: a solution that ends in "#### 72", or just the number. ValueError as `_row`."""
        solution = self._row({"question": question, "answer": answer, "num_turns": num_turns})["answer"]
        self._gold = _number(solution.rpartition("####")[2])
        marks = re.findall(r"<<([^<>=]+)=([^<>=]+)>>", solution)  # <<48/2=24>>; all of GSM8K's are true
        true = [left for left, right in marks
                if calculator(left) == calculator(right) and "error" not in calculator(left)]
        self._plan = true[:self.max_turns - 1]
        self._attempts, self._computed, self._wrong = num_turns or self.num_turns, 0, 0
        self.reward, self.done, self._solved, self._reward_parts = 0.0, False, False, {"correct": 0.0}
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
        """Count one answer. The words for another go, or None when the episode is over."""
        self._solved = values == {self._gold}
        if self._solved:
            self.reward = self._reward_parts["correct"] = float(self.turn_discount ** self._wrong)
        self._wrong += not self._solved
        self.done = self._solved or self._wrong >= self._attempts
        return None if self.done else "Unfortunately your answer is wrong. Let's try again."  # AReaL's words

    def get_reward(self) -> float:
        return self.reward

    def _check(self) -> bool:
        return self._solved

    def _expert(self) -> list[dict]:
        """The next turn's calls: one calculation of the written solution a turn, then its answer."""
        if self._computed < len(self._plan) and not self.done:
            return [{"name": "calculator", "arguments": {"expression": self._plan[self._computed]}}]
        return [] if self.done else [{"name": "answer", "arguments": {"value": f"{self._gold:f}"}}]

    @staticmethod
    def _row(row: dict) -> dict:
        """`row` with "answer" as text; other columns stay. ValueError says what it lacks."""
        missing = [name for name in ("question", "answer") if row.get(name) is None]
        if missing:
            raise ValueError(f'no "{missing[0]}" field; has: {", ".join(row)}')
        question, answer, turns = row["question"], row["answer"], row.get("num_turns")
        if not isinstance(question, str) or not question.strip():
            raise ValueError('"question" is empty or not text')
        if type(answer) in (int, float):
            answer = f"{Decimal(str(answer)):f}"  # 1e22 as digits
        if not isinstance(answer, str) or _number(answer.rpartition("####")[2]) is None:
            raise ValueError('"answer" has no number; '
                             f'give 72, or a solution that ends in #### 72, not {str(answer)[-40:]!r}')
        if turns is not None and (type(turns) is not int or turns < 1):
            raise ValueError(f"num_turns {turns!r}: use an integer >= 1")
        return {**row, "answer": answer}

    @staticmethod
    def _tasks(split: str, n: int | None, seed: int) -> list[dict]:
        """At most n rows of the official split ("train" | "test") in an order fixed by `seed`; see `_cached`."""
        rows = [{"question": row["question"], "answer": row["answer"]} for row in read_rows(_cached(split))]
        return [rows[i] for i in np.random.default_rng(seed).permutation(len(rows))[:n]]


def written_solution(row: dict) -> list[dict]:
    """"Half is 48/2 = <<48/2=24>>24." -> "Half is 48/2 =", the call, the world's "24", "24." ..., the answer's call."""
    env = GSM8K()
    question = env.reset(**row)
    messages = [{"role": "system", "content": env.system_prompt}, {"role": "user", "content": question}]
    text, *rest = re.split(r"<<([^<>=]+)=[^<>=]+>>", str(row["answer"]).rpartition("####")[0])
    for expression, after in zip(rest[::2], rest[1::2]):
        if expression in env._plan:  # the true ones
            asked = {"name": "calculator", "arguments": {"expression": expression}}
            messages.append({"role": "assistant", "content": text.strip(), "tool_calls": [asked]})
            messages.append({"role": "tool", "content": call(env, **asked)[0]})
            text = ""
        text += after
    return messages + [{"role": "assistant", "content": text.strip(), "tool_calls": env._expert()}]


def _cached(split: str) -> str:
    """Path of the official file, downloaded once; UserError with the mend if that fails or its sha256 is another."""
    folder = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "agentic-rl", "gsm8k")
    path, url = os.path.join(folder, f"{split}.jsonl"), f"{URL}/{split}.jsonl"
    mend = f"give --dataset path/to/{split}.jsonl"
    cached = os.path.exists(path)
    try:
        with open(path, "rb") if cached else urllib.request.urlopen(url, timeout=10) as source:
            data = source.read(10**7)  # the larger has 4.2 MB
    except Exception as error:  # OSError, or a reply that is not HTTP
        why = "unreadable" if cached else "not in the cache and no network"
        raise UserError(f"gsm8k: {why} ({getattr(error, 'reason', error)}); {mend}") from None
    if hashlib.sha256(data).hexdigest() != SHA256[split]:
        mend = "delete it and it is fetched again" if cached else mend
        raise UserError(f"gsm8k: {path if cached else url}: sha256 differs from the official file's; {mend}")
    if not cached:
        os.makedirs(folder, exist_ok=True)
        with open(f"{path}.{os.getpid()}", "wb") as f:
            f.write(data)
        os.replace(f.name, path)  # whole or not at all, whichever process comes first
    return path
