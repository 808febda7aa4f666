"""Linear equations that the agent solves by actions: "Solve for x: 3x + 7 = 16".

An action changes both sides, and the tool answers with the new equation. It is paid if the equation
is then closer to "x = number" than ever before in this episode, so that going in circles pays
nothing. The right answer is paid too. No action is penalized, because otherwise the policy could
learn to do nothing.

    level 1    x + b = c,  ax = c,  x/a = c           level 2    ax + b = c,  x/a + b = c
    level 3    ax + b = cx + d,  a(x + b) = c    (the environment equations_hard)

One side of an equation is a pair (a, b) of fractions. It stands for ax + b.
"""
import re
import zlib
from fractions import Fraction
from typing import Literal

import numpy as np

from core.data import split_of

TERM = re.compile(r"([+-]?)(\d{1,9}(?:/[1-9]\d{0,8})?)?(?:(x)(?:/([1-9]\d{0,8}))?)?", re.ASCII)
# An action that would need larger numbers is refused, so that equations stay short.
MAX_NUMERATOR, MAX_DENOMINATOR = 99, 12
STEP_REWARD, ANSWER_REWARD = 2.0, 5.0
INVERSE = {"add_terms": "subtract_terms", "subtract_terms": "add_terms",
           "multiply_terms": "divide_terms", "divide_terms": "multiply_terms"}


class Equations:
    """Solve a linear equation for x, one action at a time."""

    system_prompt = "Solve for x with the tools."
    max_turns = 4
    limits = {"max_new_tokens": 64, "max_tokens": 1024}
    levels = (1, 2, 2, 2)  # `_tasks` draws one of them for each equation

    def reset(self, equation: str, noise: float = 0.0, noise_seed: int = 0, **_) -> str:
        """Begin an episode with an equation such as "3x + 7 = 16" or "2(x + 3) = 10".

        A share `noise` of the scripted expert's operations is wrong; its answer never is.
        `noise_seed` decides which.
        """
        if not isinstance(equation, str) or equation.count("=") != 1:
            raise ValueError(f"{equation!r:.60} is not an equation like 3x + 7 = 16")
        left, right = equation.split("=")
        bracket = re.fullmatch(r"\s*(-?\d+)\((.*)\)\s*", left)
        # The equation is factor * (left) = right. Without a bracket the factor is 1.
        self.factor = Fraction(bracket[1]) if bracket else Fraction(1)
        self.left = parse_side(bracket[2] if bracket else left)
        self.right = parse_side(right)
        a = self.factor * self.left[0] - self.right[0]
        if not a or not self.factor:
            raise ValueError(f"{equation!r} has no single solution, or a bracket times 0")
        self.solution = (self.right[1] - self.factor * self.left[1]) / a
        self.best = self._distance()
        self.reward = 0.0
        self.done = False
        self.solved = False
        self._noise = noise
        self._rng = np.random.default_rng([noise_seed, zlib.crc32(equation.encode())])
        return f"Solve for x: {self._equation()}"

    def _state(self) -> str:
        """Return the equation as it stands, by which the next action is decided."""
        return self._equation()

    # ------------------------------------------------------------------------------- the tools
    def add_terms(self, terms: str) -> str:
        """Add a term to both sides.

        Args:
            terms: the term, such as 7 or 3x
        """
        return self._add(*parse_term(terms))

    def subtract_terms(self, terms: str) -> str:
        """Subtract a term from both sides.

        Args:
            terms: the term, such as 7 or 3x
        """
        a, b = parse_term(terms)
        return self._add(-a, -b)

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
        return self._multiply(1 / number if number else number)

    def identify_operation(
            self, operation: Literal["add", "subtract", "multiply", "divide", "answer"]) -> str:
        """Name the operation that you think comes next, and learn whether it does.

        Args:
            operation: the operation's name
        """
        verdict = "yes" if operation in self._best_call()["name"] else "no"
        return f"{operation}: {verdict}. {self._equation()}"

    def state_answer(self, value: str) -> str:
        """State the value of x. This ends the episode.

        Args:
            value: the value, such as 3 or -2/5
        """
        # TRL does not know `done` and may call again. The first answer is final.
        if self.done:
            return "error: the episode is over"
        self.solved = parse_number(value) == self.solution
        self.done = True
        self.reward += ANSWER_REWARD * self.solved
        return "right" if self.solved else "wrong"

    def get_reward(self) -> float:
        return self.reward

    @property
    def _reward_parts(self) -> dict:
        answer = ANSWER_REWARD * self.solved
        return {"actions": self.reward - answer, "answer": answer}

    def _check(self) -> bool:
        return self.solved

    # --------------------------------------------------------------------------- the mechanics
    def _add(self, a, b) -> str:
        """Add ax + b to both sides. A bracket on the left is multiplied out first."""
        left = self.factor * self.left[0] + a, self.factor * self.left[1] + b
        right = self.right[0] + a, self.right[1] + b
        return self._change(Fraction(1), left, right)

    def _multiply(self, number: Fraction) -> str:
        """Multiply both sides by a number. Of a bracket only the factor before it changes."""
        if not number:
            return f"error: both sides times or over 0 is not equivalent. {self._equation()}"
        right = number * self.right[0], number * self.right[1]
        if self.factor != 1:
            return self._change(number * self.factor, self.left, right)
        left = number * self.left[0], number * self.left[1]
        return self._change(Fraction(1), left, right)

    def _change(self, factor, left, right) -> str:
        """Make this the equation, pay for getting closer to the solution, and return its text."""
        for number in (factor, *left, *right):
            if abs(number.numerator) > MAX_NUMERATOR or number.denominator > MAX_DENOMINATOR:
                return f"error: numbers too large. {self._equation()}"
        self.factor, self.left, self.right = factor, left, right
        distance = self._distance()
        if distance < self.best:
            self.reward += STEP_REWARD * (self.best - distance)
            self.best = distance
        return self._equation()

    def _equation(self) -> str:
        left = show(*self.left) if self.factor == 1 else f"{self.factor}({show(*self.left)})"
        return f"{left} = {show(*self.right)}"

    def _sides(self):
        """Return the two sides, first the one with x: 5 = 2x + 1 is read from the right."""
        if self.left[0] or self.factor != 1:
            return self.left, self.right
        return self.right, self.left

    def _distance(self) -> int:
        """Count the actions the expert needs: bracket, x on the right, constant, factor of x."""
        (a, b), (c, _) = self._sides()
        # Dividing both sides by the factor leaves (c / factor)x on the right.
        return (self.factor != 1) + (c != 0) + (b != 0) + (a - c / self.factor != 1)

    # ---------------------------------------------------------------------- the scripted expert
    def _best_call(self) -> dict:
        """Return the expert's next call: what `_distance` counts, in its order, then the answer."""
        (a, b), (c, d) = self._sides()
        if self.factor != 1:
            name, terms = "divide_terms", str(self.factor)
        elif c:
            name, terms = "subtract_terms" if c > 0 else "add_terms", show(abs(c), 0)
        elif b:
            name, terms = "subtract_terms" if b > 0 else "add_terms", str(abs(b))
        elif a == 1:
            return {"name": "state_answer", "arguments": {"value": str(d)}}
        elif a.numerator == 1:
            name, terms = "multiply_terms", str(a.denominator)
        else:
            name, terms = "divide_terms", str(a)
        return {"name": name, "arguments": {"terms": terms}}

    def _expert(self) -> list[dict]:
        """Return the next demonstrated call. A wrong one is the inverse, with the same number."""
        if self.done:
            return []
        call = self._best_call()
        if call["name"] in INVERSE and self._rng.random() < self._noise:
            call["name"] = INVERSE[call["name"]]
        return [call]

    # ------------------------------------------------------------------------------- the tasks
    @classmethod
    def _row(cls, row: dict) -> dict:
        """Return a row of a task file, or raise ValueError if no episode can begin with it."""
        cls().reset(**row)
        return row

    @classmethod
    def _from_text(cls, text: str) -> dict:
        """Return the task that a person typed, or raise ValueError if it cannot be solved."""
        env, task = cls(), {"equation": equation_in(text)}
        env.reset(**task)
        for _ in range(env._distance() + 1):
            [call] = env._expert()
            getattr(env, call["name"])(**call["arguments"])
        if not env.solved:
            raise ValueError(f"{task['equation']}: to solve it takes numbers above {MAX_NUMERATOR} "
                             f"or fractions finer than 1/{MAX_DENOMINATOR}")
        return task

    @classmethod
    def _tasks(cls, split: str, n: int | None, seed: int) -> list[dict]:
        """Return n distinct equations. A tenth of all equations, by hash, is the test split."""
        rng = np.random.default_rng([seed, split == "test"])
        tasks = {}
        # Misses in a row end the search, because there may be fewer than n equations.
        misses = 0
        while len(tasks) < (10_000 if n is None else n) and misses < 10_000:
            equation = cls._draw(cls.levels[rng.integers(len(cls.levels))], rng)
            misses += 1
            if equation not in tasks and split_of(equation) == split:
                misses = 0
                tasks[equation] = {"equation": equation, "noise_seed": int(rng.integers(2**31))}
        return list(tasks.values())

    @staticmethod
    def _draw(level: int, rng) -> str:
        """Return a random equation of a level with an integer solution."""
        def signed(high):
            return int(rng.integers(1, high + 1)) * (-1, 1)[rng.integers(2)]

        x, k, a, b = signed(9), signed(6), int(rng.integers(2, 7)), signed(40)
        if level == 3:
            has_bracket = rng.integers(2)
            b = signed(12)
            if has_bracket:
                return f"{a}({show(1, b)}) = {a * (x + b)}"
            c = int(rng.integers(1, a))
            return f"{show(a, b)} = {show(c, (a - c) * x + b)}"
        choices = {1: [(1, b, x), (a, 0, x), (Fraction(1, a), 0, k * a)],
                   2: [(a, b, x), (Fraction(1, a), b, k * a)]}[level]
        slope, constant, solution = choices[rng.integers(len(choices))]
        return f"{show(slope, constant)} = {slope * solution + constant}"


class EquationsHard(Equations):
    """Solve equations with x on both sides or with a bracket."""

    max_turns = 8
    limits = {"max_new_tokens": 64, "max_tokens": 1536}
    levels = (3,)


# ------------------------------------------------------------------------- sides and terms as text
def parse_term(text: str) -> tuple[Fraction, Fraction]:
    """Return (a, b) of a single term: "7" is (0, 7), "x/4" is (1/4, 0). Else raise ValueError."""
    match = TERM.fullmatch(text.replace(" ", ""))
    if not match or not (match[2] or match[3]):
        raise ValueError(f"{text[:40]!r} is not a term like 7 or 3x")
    value = Fraction(f"{match[1]}{match[2] or 1}") / Fraction(match[4] or 1)
    return (value, Fraction(0)) if match[3] else (Fraction(0), value)


def parse_number(text: str) -> Fraction:
    """Return the value of a term without x, or raise ValueError."""
    a, b = parse_term(text)
    if a:
        raise ValueError(f"{text[:40]!r} is not a number")
    return b


def parse_side(text: str) -> tuple[Fraction, Fraction]:
    """Return (a, b) of a sum of terms such as "3x + 7", or raise ValueError."""
    terms = list(map(parse_term, re.split(r"(?<=.)(?=[+-])", text.replace(" ", ""))))
    coefficients, constants = zip(*terms)
    return sum(coefficients), sum(constants)


def equation_in(text: str) -> str:
    """Return the equation in what a person typed, such as "Solve 2*X + 3 = 7, please"."""
    text = re.sub(r"\s*\*\s*(?=[x(])", "", text.lower().replace("\u2212", "-"))
    # Between punctuation and words; x^2, 2y and 1.5x stay whole, for the parser to refuse.
    clauses = re.split(r"[:;,?!]|\.(?!\d)|\b[a-z]{2,}\b", text)
    return next((clause.strip() for clause in clauses if "=" in clause), text)


def show(a, b) -> str:
    """Return the side ax + b as text: "3x + 7", "x/4", "-x", "0"."""
    if not a:
        return str(b)
    x = {1: "x", -1: "-x"}.get(a.numerator, f"{a.numerator}x")
    if a.denominator > 1:
        x += f"/{a.denominator}"
    if not b:
        return x
    return f"{x} + {b}" if b > 0 else f"{x} - {-b}"
