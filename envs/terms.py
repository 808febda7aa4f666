"""Sides of linear equations as text, "3x + 7", and as pairs (a, b) of fractions, ax + b."""
import re
from fractions import Fraction

TERM = re.compile(r"([+-]?)(\d{1,9}(?:/[1-9]\d{0,8})?)?(?:(x)(?:/([1-9]\d{0,8}))?)?", re.ASCII)


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
    terms = [parse_term(term) for term in re.split(r"(?<=.)(?=[+-])", text.replace(" ", ""))]
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
