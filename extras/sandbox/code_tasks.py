"""Tasks of writing a function: a generator of them, and rows in the form of HumanEval and of MBPP.

The families of the generator are in code_tasks.json, level -> name -> family. An argument is drawn
by "input", a kind of input below, and the constants are drawn from the choices that stand there. So
"Return the sum of the numbers that are greater than {k}." becomes a task with 7 in place of {k},
with its reference solution and with calls whose values the solution computed.
A row has the columns of HumanEval, but that its "prompt" is our "question": in TRL and here
"prompt" is a column of messages.
"""
import ast
import json
import random
import re
import zlib
from contextlib import suppress
from io import StringIO
from pathlib import Path
from tokenize import STRING, generate_tokens

from envs.gsm8k import parse
from extras.sandbox.sandbox_child import encode

LEVELS = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
TESTS = 10  # calls of a generated task


# --------------------------------------------------------------------------------- kinds of input
def numbers(rng):
    return rng.choices(range(-20, 61), k=rng.randint(0, 9))


def word(rng):
    return "".join(rng.choices("aabcdeeilnorst", k=rng.randint(1, 8)))


def text(rng):
    return " ".join(word(rng) for _ in range(rng.randint(0, 7)))


def runs(rng):
    letters = ""
    for _ in range(rng.randint(0, 5)):
        letters += rng.choice("abc") * rng.randint(1, 5)
    return letters


def brackets(rng):
    return "".join(rng.choices("()()[]x", k=rng.randint(0, 8)))


def settings(rng):
    names = dict.fromkeys(word(rng) for _ in range(rng.randint(0, 5)))
    return ";".join(f"{name}={rng.randint(-9, 99)}" for name in names)


def positive(rng):
    return rng.randint(1, 500)


def small(rng):
    return rng.randint(0, 15)


INPUTS = {"numbers": numbers, "text": text, "runs": runs, "brackets": brackets,
          "settings": settings, "positive": positive, "small": small}


# -------------------------------------------------------------------------------------- generation
def generate(levels: list[str], split: str, n: int, seed: int) -> list[dict]:
    """Return n rows. A fifth of a family's constants, by hash, is the test split."""
    families = []
    for level in levels:
        families += LEVELS[level].items()
    rng = random.Random(f"{seed} {split}")
    rows = []
    while len(rows) < n:
        name, family = families[len(rows) % len(families)]
        constants = {}
        for key, choices in family["constants"].items():
            constants[key] = _draw(choices, rng)
        is_test = zlib.crc32(f"{name} {constants}".encode()) % 5 == 0
        if is_test == (split == "test"):
            rows.append(_task(name, family, constants, rng))
    return rows


def _draw(choices, rng):
    """Return one of the choices, which are a list, letters, or {"range": its arguments}."""
    if isinstance(choices, dict):
        choices = range(*choices["range"])
    value = rng.choice(choices)
    return tuple(value) if isinstance(value, list) else value


def _task(name: str, family: dict, constants: dict, rng) -> dict:
    """Return the row of one family with these constants."""
    question = f'{family["head"]}\n    """{family["asks"].format(**constants)}"""\n'
    solution = question
    for key, value in constants.items():
        solution += f"    {key} = {value!r}\n"
    solution += "\n".join(family["body"]) + "\n"
    defined = {}
    exec(solution, defined)
    # Last one call for each value: a function that always returns the same fails a hidden test.
    values, one_each = {}, {}
    for _ in range(3 * TESTS):
        drawn = INPUTS[family["input"]](rng)
        call, value = repr(drawn), repr(defined[name](drawn))
        values[call] = value
        one_each.setdefault(value, call)
        if len(one_each) == TESTS:
            break
    tests = list(dict.fromkeys([*one_each.values(), *values]))[:TESTS]
    check = "def check(candidate):\n"
    for call in reversed(tests):
        check += f"    assert candidate({call}) == {values[call]}\n"
    return {"task_id": f"{name} {constants}", "question": question, "entry_point": name,
            "canonical_solution": solution, "test": check}


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
            return list(map(ast.literal_eval, arguments)), wanted
    raise ValueError("no call of the function")
