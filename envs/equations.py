"""Linear equations, solved by actions: "Solve for x: 3x + 7 = 16".

Every action is applied to both sides; the tool answers with the new equation. An action pays only if it leads to an
equivalent *simpler* equation (fewer steps from x alone than any equation of this episode before it, so that going round
in circles pays nothing), the stated answer pays only if it is right, and nothing costs: doing nothing must never beat
trying.
    level 1: x + b = c, ax = c, x/a = c    level 2: ax + b = c, x/a + b = c    level 3: ax + b = cx + d, a(x + b) = c
`equations` draws levels 1 and 2, `equations_hard` level 3.
"""
import re
import zlib
from fractions import Fraction
from typing import Literal

import numpy as np

TERM = re.compile(r"([+-]?)(\d{1,9}(?:/[1-9]\d{0,8})?)?(x)?(?:/([1-9]\d{0,8}))?", re.ASCII)
LIMIT = 99  # larger numbers, and denominators over 12, are refused: equations stay short


def parse_term(text: str) -> tuple[Fraction, Fraction]:
    """One term -> (coefficient of x, constant): "7" -> (0, 7), "-3x" -> (-3, 0), "x/4" -> (1/4, 0); or ValueError."""
    match = TERM.fullmatch(text.replace(" ", ""))
    if not match or not (match[2] or match[3]) or (match[4] and not match[3]):
        raise ValueError(f"{text[:40]!r} is not a term like 7 or 3x")
    value = Fraction(match[2] or 1) / Fraction(match[4] or 1) * (-1 if match[1] == "-" else 1)
    return (value, Fraction(0)) if match[3] else (Fraction(0), value)


def show(a: Fraction, b: Fraction) -> str:
    """The side a*x + b as text: "3x + 7", "x/4", "-x", "0"."""
    if a.numerator in (1, -1):
        x = "-x" if a < 0 else "x"
    else:
        x = f"{a.numerator}x"
    x += f"/{a.denominator}" if a.denominator > 1 else ""
    if not a:
        return str(b)
    return x + (f" + {b}" if b > 0 else f" - {-b}" if b < 0 else "")


class Equations:
    """Solve a linear equation for x, one action at a time."""

    system_prompt = "Solve for x with the tools."
    max_turns = 4
    limits = {"max_new_tokens": 64, "max_tokens": 1024}
    levels = (1, 2, 2, 2)  # what `_tasks` draws from: of these, one-step equations only now and then

    def reset(self, equation: str, factor: int = 0, noise: float = 0.0, seed: int = 0, **_) -> str:
        """`equation` such as "3x + 7 = 16" or "2(x + 3) = 10"; `noise`: share of wrong actions of the expert."""
        left, right = equation.split("=")
        bracket = re.fullmatch(r"\s*(-?\d+)\((.*)\)\s*", left)
        self.factor = Fraction(bracket[1]) if bracket else Fraction(1)  # factor * (left) = right
        self.left, self.right = self._side(bracket[2] if bracket else left), self._side(right)
        a, b = self.factor * (self.left[0]) - self.right[0], self.right[1] - self.factor * self.left[1]
        if not a:
            raise ValueError(f"{equation!r} has no single solution")
        self.solution = b / a
        self.best = self._distance()
        self.reward, self.done, self.solved, self.named = 0.0, False, False, False
        self._reward_parts = {"actions": 0.0, "answer": 0.0}
        self._noise, self._rng = noise, np.random.default_rng([seed, zlib.crc32(equation.encode())])
        return f"Solve for x: {self._equation()}"

    # ------------------------------------------------------------------------------------------------------- the tools
    def add_terms(self, terms: str) -> str:
        """Add a term to both sides.

        Args:
            terms: the term, such as 7 or 3x
        """
        return self._apply(lambda side, t: (side[0] + t[0], side[1] + t[1]), parse_term(terms))

    def subtract_terms(self, terms: str) -> str:
        """Subtract a term from both sides.

        Args:
            terms: the term, such as 7 or 3x
        """
        return self._apply(lambda side, t: (side[0] - t[0], side[1] - t[1]), parse_term(terms))

    def multiply_terms(self, terms: str) -> str:
        """Multiply both sides by a number.

        Args:
            terms: the number, such as 4
        """
        return self._apply(lambda side, t: (side[0] * t, side[1] * t), self._number(terms))

    def divide_terms(self, terms: str) -> str:
        """Divide both sides by a number.

        Args:
            terms: the number, such as 4
        """
        return self._apply(lambda side, t: (side[0] / t, side[1] / t), self._number(terms))

    def identify_operation(self, operation: Literal["add", "subtract", "multiply", "divide", "answer"]) -> str:
        """Name the operation that should come next; says whether that is so.

        Args:
            operation: the operation's name
        """
        right = operation == self._best_call()["name"].split("_")[0].replace("state", "answer")
        return f"{operation}: {'yes' if right else 'no'}. {self._equation()}"

    def state_answer(self, value: str) -> str:
        """State the value of x. This ends the episode.

        Args:
            value: the value, such as 3 or -2/5
        """
        if self.done:  # stated once: TRL does not know `done`
            return "error: the episode is over"
        self.solved = self._number(value) == self.solution
        self.done = True
        self._pay("answer", 5.0 * self.solved)
        return "right" if self.solved else "wrong"

    def get_reward(self) -> float:
        return self.reward

    # ---------------------------------------------------------------------------------------------------- the mechanics
    @staticmethod
    def _side(text: str) -> tuple[Fraction, Fraction]:
        pieces = re.findall(r"[+-]?[^+-]+", text.replace(" ", ""))
        if "".join(pieces) != text.replace(" ", ""):
            raise ValueError(f"{text[:40]!r} is not a sum of terms")  # 2x - -5 must not be read as 2x - 5
        terms = [parse_term(t) for t in pieces]
        return sum((t[0] for t in terms), Fraction(0)), sum((t[1] for t in terms), Fraction(0))

    @staticmethod
    def _number(text: str) -> Fraction:
        a, b = parse_term(text)
        if a:
            raise ValueError(f"{text[:40]!r} is not a number")
        return b

    def _apply(self, operation, term) -> str:
        if isinstance(term, Fraction) and not term:
            return f"error: both sides times or over 0 is not equivalent. {self._equation()}"
        if self.factor != 1 and isinstance(term, Fraction):  # a(x + b) = c: times or over, of the factor alone
            sides = self.left, operation(self.right, term)
            factor = operation((self.factor, self.factor), term)[0]
        elif self.factor != 1:  # a term is added outside the bracket, so the bracket is opened first
            opened = self.left[0] * self.factor, self.left[1] * self.factor
            sides = operation(opened, term), operation(self.right, term)
            factor = Fraction(1)
        else:
            sides, factor = (operation(self.left, term), operation(self.right, term)), Fraction(1)
        numbers = [factor, *sides[0], *sides[1]]
        if any(abs(n.numerator) > LIMIT or n.denominator > 12 for n in numbers):
            return f"error: numbers too large. {self._equation()}"
        (self.left, self.right), self.factor = sides, factor
        distance = self._distance()
        if distance < self.best:
            self._pay("actions", 2.0 * (self.best - distance))
            self.best = distance
        return self._equation()

    def _pay(self, part: str, amount: float):
        self.reward += amount
        self._reward_parts[part] += amount

    def _equation(self) -> str:
        left = show(*self.left)
        return f"{f'{self.factor}({left})' if self.factor != 1 else left} = {show(*self.right)}"

    def _distance(self) -> int:
        """Actions from here to "x = number", the shortest way of these: bracket, x right, constant left, factor."""
        (a, b), (c, d) = self.left, self.right
        if self.factor != 1:
            return 1 + (b != 0) + (a != 1) + (c != 0)
        if not a:  # 5 = 2x + 1: read from the right
            (a, b), (c, d) = (c, d), (a, b)
        return (c != 0) + (b != 0) + (a - c != 1)

    def _best_call(self) -> dict:
        """The next action on the shortest way."""
        def move(name, value):
            return {"name": name, "arguments": {"value" if name == "state_answer" else "terms": value}}
        (a, b), (c, d) = self.left, self.right
        if self.factor != 1:
            return move("divide_terms", str(self.factor))
        if not a:
            (a, b), (c, d) = (c, d), (a, b)
        if c:
            return move("subtract_terms" if c > 0 else "add_terms", show(abs(c), Fraction(0)))
        if b:
            return move("subtract_terms" if b > 0 else "add_terms", str(abs(b)))
        if a.denominator > 1 and a.numerator == 1:
            return move("multiply_terms", str(a.denominator))
        return move("state_answer", str(d)) if a == 1 else move("divide_terms", str(a))

    def _expert(self) -> list[dict]:
        """The next demonstrated call. A share `noise` of the actions is the inverse one, on rightly copied numbers."""
        if self.done:
            return []
        call = self._best_call()
        if call["name"] != "state_answer" and self._rng.random() < self._noise:
            call["name"] = {"add_terms": "subtract_terms", "subtract_terms": "add_terms",
                            "multiply_terms": "divide_terms", "divide_terms": "multiply_terms"}[call["name"]]
        return [call]

    def _check(self) -> bool:
        return self.solved

    @classmethod
    def _tasks(cls, split: str, n: int | None, seed: int) -> list[dict]:
        """n distinct equations; a tenth of all equations, chosen by hash, is the test split and never trained on."""
        rng, seen, out = np.random.default_rng([seed, split == "test"]), set(), []
        n = 10_000 if n is None else n
        misses = 0
        while len(out) < n and misses < 10_000:
            equation = cls._draw(cls.levels[rng.integers(len(cls.levels))], rng)
            if equation in seen or (zlib.crc32(equation.encode()) % 10 == 0) != (split == "test"):
                misses += 1
                continue
            seen.add(equation)
            misses = 0
            out.append({"equation": equation, "seed": int(rng.integers(2**31))})
        return out

    @staticmethod
    def _draw(level: int, rng) -> str:
        def signed(high):
            return int(rng.integers(1, high + 1)) * (-1, 1)[rng.integers(2)]
        x, k, a, b = signed(9), signed(6), int(rng.integers(2, 7)), signed(40)
        if level == 1:
            a, b, x = [(Fraction(1), b, x), (Fraction(a), 0, x), (Fraction(1, a), 0, k * a)][rng.integers(3)]
        elif level == 2:
            a, x = [(Fraction(a), x), (Fraction(1, a), k * a)][rng.integers(2)]
        elif rng.integers(2):
            b = signed(12)
            return f"{a}({show(Fraction(1), Fraction(b))}) = {a * (x + b)}"
        else:
            b, c = signed(12), int(rng.integers(1, a))
            return f"{show(Fraction(a), Fraction(b))} = {show(Fraction(c), Fraction((a - c) * x + b))}"
        return f"{show(a, Fraction(b))} = {a * x + b}"


class EquationsHard(Equations):
    """x on both sides, and brackets."""

    max_turns = 8
    limits = {"max_new_tokens": 64, "max_tokens": 1536}
    levels = (3,)


if __name__ == "__main__":  # one noisy demonstration, as a transcript
    env = Equations()
    for task in Equations._tasks("train", 3, seed=0):
        print(env.reset(**task, noise=0.3))
        while calls := env._expert():
            before = env.reward
            observation = getattr(env, calls[0]["name"])(**calls[0]["arguments"])
            print(f'Action: {calls[0]["name"]} -> Reward: {env.reward - before:.1f} -> "{observation}"')
