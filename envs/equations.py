"""Linear equations, solved by actions: "Solve for x: 3x + 7 = 16".

Every action is applied to both sides, and the tool answers with the new equation. An action pays
if the equation is then fewer steps from x alone than any before it in this episode: going in
circles pays nothing. The right answer pays. Nothing costs, or doing nothing would beat trying.

    level 1    x + b = c,  ax = c,  x/a = c            level 2    ax + b = c,  x/a + b = c
    level 3    ax + b = cx + d,  a(x + b) = c          (equations_hard)
"""
import re
import zlib
from fractions import Fraction
from typing import Literal

import numpy as np

TERM = re.compile(r"([+-]?)(\d{1,9}(?:/[1-9]\d{0,8})?)?(x)?(?:/([1-9]\d{0,8}))?", re.ASCII)
# Larger numbers are refused, so that equations stay short.
MAX_NUMERATOR, MAX_DENOMINATOR = 99, 12
INVERSE = {"add_terms": "subtract_terms", "subtract_terms": "add_terms",
           "multiply_terms": "divide_terms", "divide_terms": "multiply_terms"}


def parse_term(text: str) -> tuple[Fraction, Fraction]:
    """Return (coefficient of x, constant) of a term: "7" is (0, 7), "x/4" is (1/4, 0)."""
    match = TERM.fullmatch(text.replace(" ", ""))
    if not match or not (match[2] or match[3]) or (match[4] and not match[3]):
        raise ValueError(f"{text[:40]!r} is not a term like 7 or 3x")
    value = Fraction(f"{match[1]}{match[2] or 1}") / Fraction(match[4] or 1)
    return (value, Fraction(0)) if match[3] else (Fraction(0), value)


def parse_number(text: str) -> Fraction:
    """Return the value of a term without x."""
    coefficient, number = parse_term(text)
    if coefficient:
        raise ValueError(f"{text[:40]!r} is not a number")
    return number


def parse_side(text: str) -> tuple[Fraction, Fraction]:
    """Return (coefficient of x, constant) of a sum of terms."""
    text = text.replace(" ", "")
    pieces = re.findall(r"[+-]?[^+-]+", text)
    # 2x - -5 must not be read as 2x - 5.
    if "".join(pieces) != text:
        raise ValueError(f"{text[:40]!r} is not a sum of terms")
    terms = [parse_term(piece) for piece in pieces]
    return sum((a for a, _ in terms), Fraction(0)), sum((b for _, b in terms), Fraction(0))


def show(a: Fraction, b: Fraction) -> str:
    """Return the side a*x + b as text: "3x + 7", "x/4", "-x", "0"."""
    if not a:
        return str(b)
    x = {1: "x", -1: "-x"}.get(a.numerator, f"{a.numerator}x")
    if a.denominator > 1:
        x += f"/{a.denominator}"
    if not b:
        return x
    return f"{x} + {b}" if b > 0 else f"{x} - {-b}"


class Equations:
    """Solve a linear equation for x, one action at a time."""

    system_prompt = "Solve for x with the tools."
    max_turns = 4
    limits = {"max_new_tokens": 64, "max_tokens": 1024}
    levels = (1, 2, 2, 2)  # what `_tasks` draws from

    def reset(self, equation: str, factor: int = 0, noise: float = 0.0, seed: int = 0, **_) -> str:
        """Begin with an equation such as "3x + 7 = 16" or "2(x + 3) = 10".

        A share `noise` of the expert's actions is wrong; `seed` chooses them.
        """
        left, right = equation.split("=")
        bracket = re.fullmatch(r"\s*(-?\d+)\((.*)\)\s*", left)
        # The equation is factor * (left) = right.
        self.factor = Fraction(bracket[1]) if bracket else Fraction(1)
        self.left = parse_side(bracket[2] if bracket else left)
        self.right = parse_side(right)
        a = self.factor * self.left[0] - self.right[0]
        if not a:
            raise ValueError(f"{equation!r} has no single solution")
        self.solution = (self.right[1] - self.factor * self.left[1]) / a
        self.best = self._distance()
        self.reward, self.done, self.solved = 0.0, False, False
        self._reward_parts = {"actions": 0.0, "answer": 0.0}
        self._noise = noise
        self._rng = np.random.default_rng([seed, zlib.crc32(equation.encode())])
        return f"Solve for x: {self._equation()}"

    # ------------------------------------------------------------------------------- the tools
    def add_terms(self, terms: str) -> str:
        """Add a term to both sides.

        Args:
            terms: the term, such as 7 or 3x
        """
        return self._add(1, parse_term(terms))

    def subtract_terms(self, terms: str) -> str:
        """Subtract a term from both sides.

        Args:
            terms: the term, such as 7 or 3x
        """
        return self._add(-1, parse_term(terms))

    def multiply_terms(self, terms: str) -> str:
        """Multiply both sides by a number.

        Args:
            terms: the number, such as 4
        """
        return self._multiply(parse_number(terms))

    def divide_terms(self, terms: str) -> str:
        """Divide both sides by a number.

        Args:
            terms: the number, such as 4
        """
        number = parse_number(terms)
        return self._multiply(number and 1 / number)

    def identify_operation(
            self, operation: Literal["add", "subtract", "multiply", "divide", "answer"]) -> str:
        """Name the operation that should come next; says whether that is so.

        Args:
            operation: the operation's name
        """
        best = self._best_call()["name"].split("_")[0].replace("state", "answer")
        return f"{operation}: {'yes' if operation == best else 'no'}. {self._equation()}"

    def state_answer(self, value: str) -> str:
        """State the value of x. This ends the episode.

        Args:
            value: the value, such as 3 or -2/5
        """
        if self.done:  # TRL does not know `done`
            return "error: the episode is over"
        self.solved = parse_number(value) == self.solution
        self.done = True
        self._pay("answer", 5.0 * self.solved)
        return "right" if self.solved else "wrong"

    def get_reward(self) -> float:
        return self.reward

    # --------------------------------------------------------------------------- the mechanics
    def _add(self, sign: int, term) -> str:
        """Add sign * term to both sides. It stands outside of a bracket, which is opened first."""
        left = self.left[0] * self.factor, self.left[1] * self.factor
        left, right = ((a + sign * term[0], b + sign * term[1]) for a, b in (left, self.right))
        return self._change(Fraction(1), left, right)

    def _multiply(self, number: Fraction) -> str:
        """Multiply both sides; of a(x + b) only the factor a."""
        if not number:
            return f"error: both sides times or over 0 is not equivalent. {self._equation()}"
        right = self.right[0] * number, self.right[1] * number
        if self.factor != 1:
            return self._change(self.factor * number, self.left, right)
        return self._change(Fraction(1), (self.left[0] * number, self.left[1] * number), right)

    def _change(self, factor, left, right) -> str:
        """Take the new equation, and pay for what is simpler than before."""
        for number in (factor, *left, *right):
            if abs(number.numerator) > MAX_NUMERATOR or number.denominator > MAX_DENOMINATOR:
                return f"error: numbers too large. {self._equation()}"
        self.factor, self.left, self.right = factor, left, right
        distance = self._distance()
        if distance < self.best:
            self._pay("actions", 2.0 * (self.best - distance))
            self.best = distance
        return self._equation()

    def _pay(self, part: str, amount: float):
        self.reward += amount
        self._reward_parts[part] += amount

    def _equation(self) -> str:
        left = show(*self.left) if self.factor == 1 else f"{self.factor}({show(*self.left)})"
        return f"{left} = {show(*self.right)}"

    def _sides(self):
        """Return the sides with x on the left: 5 = 2x + 1 is read from the right."""
        if self.left[0] or self.factor != 1:
            return self.left, self.right
        return self.right, self.left

    def _distance(self) -> int:
        """Return the number of actions to "x = number": bracket, x right, constant, factor."""
        (a, b), (c, _) = self._sides()
        if self.factor != 1:
            return 1 + (b != 0) + (a != 1) + (c != 0)
        return (c != 0) + (b != 0) + (a - c != 1)

    def _best_call(self) -> dict:
        """Return the next action on the shortest way."""
        (a, b), (c, d) = self._sides()
        if self.factor != 1:
            name, number = "divide_terms", str(self.factor)
        elif c:
            name = "subtract_terms" if c > 0 else "add_terms"
            number = show(abs(c), Fraction(0))
        elif b:
            name, number = "subtract_terms" if b > 0 else "add_terms", str(abs(b))
        elif a == 1:
            return {"name": "state_answer", "arguments": {"value": str(d)}}
        elif a.numerator == 1:
            name, number = "multiply_terms", str(a.denominator)
        else:
            name, number = "divide_terms", str(a)
        return {"name": name, "arguments": {"terms": number}}

    def _expert(self) -> list[dict]:
        """Return the next demonstrated call. Wrong ones are the inverse, with numbers as copied."""
        if self.done:
            return []
        call = self._best_call()
        if call["name"] in INVERSE and self._rng.random() < self._noise:
            call["name"] = INVERSE[call["name"]]
        return [call]

    def _check(self) -> bool:
        return self.solved

    @classmethod
    def _tasks(cls, split: str, n: int | None, seed: int) -> list[dict]:
        """Return n distinct equations. A tenth of all equations, by hash, is the test split."""
        rng = np.random.default_rng([seed, split == "test"])
        tasks = {}
        misses = 0
        while len(tasks) < (10_000 if n is None else n) and misses < 10_000:
            equation = cls._draw(cls.levels[rng.integers(len(cls.levels))], rng)
            held_out = zlib.crc32(equation.encode()) % 10 == 0
            if equation in tasks or held_out != (split == "test"):
                misses += 1
                continue
            misses = 0
            tasks[equation] = {"equation": equation, "seed": int(rng.integers(2**31))}
        return list(tasks.values())

    @staticmethod
    def _draw(level: int, rng) -> str:
        def signed(high):
            return int(rng.integers(1, high + 1)) * (-1, 1)[rng.integers(2)]
        x, k, a, b = signed(9), signed(6), int(rng.integers(2, 7)), signed(40)
        if level == 3:
            has_bracket = rng.integers(2)
            b = signed(12)
            if has_bracket:
                return f"{a}({show(Fraction(1), Fraction(b))}) = {a * (x + b)}"
            c = int(rng.integers(1, a))
            right = show(Fraction(c), Fraction((a - c) * x + b))
            return f"{show(Fraction(a), Fraction(b))} = {right}"
        choices = [(Fraction(a), b, x), (Fraction(1, a), b, k * a)]
        if level == 1:
            choices = [(Fraction(1), b, x), (Fraction(a), 0, x), (Fraction(1, a), 0, k * a)]
        a, b, x = choices[rng.integers(len(choices))]
        return f"{show(a, Fraction(b))} = {a * x + b}"


class EquationsHard(Equations):
    """x on both sides, and brackets."""

    max_turns = 8
    limits = {"max_new_tokens": 64, "max_tokens": 1536}
    levels = (3,)


if __name__ == "__main__":
    # One noisy demonstration of a few tasks, as a transcript.
    env = Equations()
    for task in Equations._tasks("train", 3, seed=0):
        print(env.reset(**task, noise=0.3))
        while calls := env._expert():
            before = env.reward
            said = getattr(env, calls[0]["name"])(**calls[0]["arguments"])
            print(f'Action: {calls[0]["name"]} -> Reward: {env.reward - before:.1f} -> "{said}"')
