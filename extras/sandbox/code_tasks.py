"""Tasks of writing a function: a generator of them, and rows in the form of HumanEval and of MBPP.

A family is a plain function below. Its argument is drawn by the annotation, a kind of input. Its
keyword-only arguments become constants of the task, and their annotations are the choices. From

    def sum_above(numbers: numbers, *, k: range(-5, 40)) -> int:
        \"""Return the sum of the numbers that are greater than {k}.\"""

comes the task "def sum_above(numbers: list[int]) -> int: Return the sum of the numbers that are
greater than 7.", with its reference solution and with calls whose values the family computed.
A row has the columns of HumanEval, but that its "prompt" is our "question": in TRL and here
"prompt" is a column of messages.
"""
import ast
import inspect
import random
import re
import zlib
from contextlib import suppress
from functools import cache
from io import StringIO
from tokenize import STRING, generate_tokens

from envs.gsm8k import parse
from extras.sandbox.sandbox_child import encode

TESTS = 10  # calls of a generated task


# --------------------------------------------------------------------------------- kinds of input
def numbers(rng) -> list[int]:
    return rng.choices(range(-20, 61), k=rng.randint(0, 9))


def word(rng) -> str:
    return "".join(rng.choices("aabcdeeilnorst", k=rng.randint(1, 8)))


def text(rng) -> str:
    return " ".join(word(rng) for _ in range(rng.randint(0, 7)))


def runs(rng) -> str:
    return "".join(rng.choice("abc") * rng.randint(1, 5) for _ in range(rng.randint(0, 5)))


def brackets(rng) -> str:
    return "".join(rng.choices("()()[]x", k=rng.randint(0, 8)))


def settings(rng) -> str:
    names = dict.fromkeys(word(rng) for _ in range(rng.randint(0, 5)))
    return ";".join(f"{name}={rng.randint(-9, 99)}" for name in names)


def positive(rng) -> int:
    return rng.randint(1, 500)


def small(rng) -> int:
    return rng.randint(0, 15)


# -------------------------------------------------------------------------------- level 1: one idea
def sum_above(numbers: numbers, *, k: range(-5, 40)) -> int:
    """Return the sum of the numbers that are greater than {k}."""
    return sum(number for number in numbers if number > k)


def long_words(text: text, *, k: range(1, 8), end: "aelnrst") -> list[str]:
    """Return the words of more than {k} letters that do not end in "{end}", in order."""
    return [word for word in text.split() if len(word) > k and not word.endswith(end)]


def digit_sum(n: positive, *, base: range(2, 17), factor: range(1, 10)) -> int:
    """Return {factor} times the sum of the digits of n written in base {base}."""
    total = 0
    while n:
        total += n % base
        n //= base
    return factor * total


# ----------------------------------------------------------------------------- level 2: some steps
def shift_letters(text: text, *, k: range(1, 26), skip: "aeiost") -> str:
    """Move each letter {k} places on in a to z, z before a, but leave "{skip}" as it is."""
    def shifted(letter):
        if letter == skip or not letter.isalpha():
            return letter
        return chr((ord(letter) - ord("a") + k) % 26 + ord("a"))

    return "".join(shifted(letter) for letter in text)


def run_lengths(runs: runs, *, k: range(1, 5), mark: "*+#-.:") -> str:
    """Write each run of one letter as letter, "{mark}", length; leave out those below {k}."""
    lengths = []
    for letter in runs:
        if lengths and lengths[-1][0] == letter:
            lengths[-1][1] += 1
        else:
            lengths.append([letter, 1])
    return "".join(f"{letter}{mark}{length}" for letter, length in lengths if length >= k)


def chunk_sums(numbers: numbers, *, k: range(2, 6), weight: range(1, 8)) -> list[int]:
    """Cut the numbers into pieces of {k} (the last is the rest); return {weight} times each sum."""
    return [weight * sum(numbers[i:i + k]) for i in range(0, len(numbers), k)]


def halve_or_grow(n: positive, *, factor: (3, 5, 7), add: (1, 3, 5, 7), steps: range(2, 9)) -> int:
    """Halve n if it is even, else take {factor} n + {add}; return n after {steps} such steps."""
    for _ in range(steps):
        n = n // 2 if n % 2 == 0 else factor * n + add
    return n


def read_settings(settings: settings, *, low: range(-9, 40), add: range(0, 9)) -> dict[str, int]:
    """Read "name=number;..." into a dict; drop numbers below {low}, and add {add} to the others."""
    values = {}
    for item in settings.split(";"):
        name, equals, value = item.partition("=")
        if equals and int(value) >= low:
            values[name] = int(value) + add
    return values


def nesting(brackets: brackets, *, opening: "([", limit: range(1, 5), bad: range(-9, 0)) -> int:
    """Only "{opening}" counts: return how deep it nests, at most {limit}; {bad} if unbalanced."""
    closing = {"(": ")", "[": "]"}[opening]
    depth = deepest = 0
    for letter in brackets:
        depth += (letter == opening) - (letter == closing)
        deepest = max(deepest, depth)
        if depth < 0:
            return bad
    return bad if depth else min(deepest, limit)


# -------------------------------------------------------------------- level 3: dynamic programming
def count_ways(n: small, *, steps: ((1, 2), (1, 3), (2, 3), (1, 2, 3), (2, 5), (1, 4), (1, 2, 5)),
               modulus: range(50, 100)) -> int:
    """Return how many sequences of steps out of {steps} sum to n, modulo {modulus}."""
    ways = [1] + [0] * n
    for total in range(1, n + 1):
        ways[total] = sum(ways[total - step] for step in steps if step <= total) % modulus
    return ways[n]


def best_apart(numbers: numbers, *, gap: range(1, 5), fee: range(0, 12)) -> int:
    """Choose numbers (or none) over {gap} places apart, each for a fee of {fee}: the best sum."""
    best = [0]
    for i, number in enumerate(numbers):
        before = best[max(0, i - gap)]
        best.append(max(best[i], before + number - fee))
    return best[-1]


def longest_rise(numbers: numbers, *, step: range(0, 9), start: range(-20, 20, 2)) -> int:
    """Length of the longest subsequence of numbers from {start} that rises by more than {step}."""
    lengths = []
    for i, number in enumerate(numbers):
        earlier = [lengths[j] for j in range(i) if number - numbers[j] > step]
        lengths.append(0 if number < start else 1 + max(earlier, default=0))
    return max(lengths, default=0)


LEVELS = {
    "1": (sum_above, long_words, digit_sum),
    "2": (shift_letters, run_lengths, chunk_sums, halve_or_grow, read_settings, nesting),
    "3": (count_ways, best_apart, longest_rise),
}


# -------------------------------------------------------------------------------------- generation
def generate(levels: list[str], split: str, n: int, seed: int) -> list[dict]:
    """Return n rows. A fifth of a family's constants, by hash, is the test split."""
    families = [family for level in levels for family in LEVELS[level]]
    rng = random.Random(f"{seed} {split}")
    rows = []
    while len(rows) < n:
        family = families[len(rows) % len(families)]
        _, *choices, _ = family.__annotations__.items()
        constants = {name: rng.choice(values) for name, values in choices}
        is_test = zlib.crc32(f"{family.__name__} {constants}".encode()) % 5 == 0
        if is_test == (split == "test"):
            rows.append(_task(family, constants, rng))
    return rows


def _task(family, constants: dict, rng) -> dict:
    """Return the row of one family with these constants."""
    name = family.__name__
    [(argument, kind), *_] = family.__annotations__.items()
    question = (f"def {name}({argument}: {_type_name(kind)}) -> {_type_name(family)}:\n"
                f'    """{family.__doc__.format(**constants)}"""\n')
    assigned = "".join(f"    {key} = {value!r}\n" for key, value in constants.items())
    # Last one call for each value: a function that always returns the same fails a hidden test.
    values, one_each = {}, {}
    for _ in range(3 * TESTS):
        drawn = kind(rng)
        call, value = repr(drawn), repr(family(drawn, **constants))
        values[call] = value
        one_each.setdefault(value, call)
        if len(one_each) == TESTS:
            break
    tests = list(dict.fromkeys([*one_each.values(), *values]))[:TESTS]
    asserts = [f"    assert candidate({call}) == {values[call]}\n" for call in reversed(tests)]
    return {"task_id": f"{name} {constants}", "question": question, "entry_point": name,
            "canonical_solution": question + assigned + _body(family),
            "test": "def check(candidate):\n" + "".join(asserts)}


@cache
def _body(function) -> str:
    return inspect.getsource(function).split('"""')[2].lstrip("\n")


def _type_name(function) -> str:
    return inspect.formatannotation(function.__annotations__["return"])


# --------------------------------------------------------------------------------- rows of a file
def read_row(row: dict) -> dict | None:
    """Return a row in HumanEval's or MBPP's form as what `Code.reset` takes, or raise ValueError.

    None if none of its tests can be read (`read_tests`). Otherwise "dropped_tests" is how many.
    """
    solution, setup = str(row.get("canonical_solution") or ""), ""
    if "test_list" in row:
        solution = str(row["code"])
        setup = str(row.get("test_setup_code") or "")
        # In a CSV file the lists are texts. NumPy writes them without commas.
        lists = f"{row['test_list']} {row.get('challenge_test_list')}"
        tokens = generate_tokens(StringIO(lists).readline)
        test = "\n".join(ast.literal_eval(token.string) for token in tokens
                         if token.type == STRING)
        # The function that the tests call. Others that the solution defines are its helpers.
        counts = {node.name: len(read_tests(test, node.name)) for node in parse(solution).body
                  if isinstance(node, ast.FunctionDef)}
        name = max(counts, key=counts.get, default="")
        question = f"{row.get('text') or row['prompt']}\nName the function {name}.\n"
    else:
        name, test = row["entry_point"], row["test"]
        question = row.get("question") or row["prompt"]
        if f"def {name}(" not in solution:
            # HumanEval's solutions continue the prompt, which may import and define helpers. The
            # head of the function alone is no code where it has no docstring.
            head = re.search(rf"(?m)^(@.*\n)*def {name}\(", question)
            setup = question[:head.start()] if head else ""
            solution = solution and question + solution
    tests = read_tests(test, name)
    if not tests:
        return None
    # HumanEval's tests hold 48 times "assert True", which tests nothing.
    asserts = len(re.findall(r"(?m)^\s*assert\b(?! True)", test))
    return {"task_id": str(row.get("task_id", "")), "question": question, "entry_point": name,
            "canonical_solution": solution, "test": test, "setup": setup,
            "dropped_tests": max(asserts - len(tests), 0)}


def read_tests(test: str, name: str) -> list[tuple[list, object]]:
    """Return (arguments, wanted value) of every assert that calls the function with literals.

    The forms are f(x) == y, f(x), not f(x), and abs(f(x) - y) < 1e-6 or less. Of the lists `inputs`
    and `results`, which HumanEval+ has instead, the first 100 items are taken. The text is never
    run, and asserts of other forms are left out, as are those of values that no result can be.
    """
    tests = []
    lists = {"inputs": [], "results": []}
    for node in ast.walk(parse(test)):
        # What is no literal, such as a variable or a function's value.
        with suppress(ValueError, TypeError):
            match node:
                case ast.Assert(assertion):
                    tests.append(_read_assert(assertion, {name, "candidate"}))
                case ast.Assign([ast.Name("inputs" | "results" as column)], values):
                    lists[column] = ast.literal_eval(values)
    return tests + list(zip(*lists.values()))[:100]


def _read_assert(node: ast.expr, names: set[str]) -> tuple[list, object]:
    match node:
        case ast.Compare(ast.Call(ast.Name("abs"), [ast.BinOp(call, ast.Sub(), right)]),
                         [ast.Lt()], [ast.Constant(float(tolerance))]) if tolerance <= 1e-6:
            wanted = float(ast.literal_eval(right))
        case ast.Compare(call, [ast.Eq() | ast.Is()], [right]):
            wanted = ast.literal_eval(right)
        case ast.UnaryOp(ast.Not(), call):
            wanted = False
        case call:
            wanted = True
    match call:
        case ast.Call(ast.Name(name), arguments, []) if name in names:
            encode(wanted)
            return [ast.literal_eval(argument) for argument in arguments], wanted
    raise ValueError("no call of the function")
