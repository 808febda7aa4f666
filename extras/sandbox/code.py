"""Writing Python functions that hidden tests decide about.

    python grpo.py --env code --model_path path/to/model
    python grpo.py --env code --dataset HumanEval.jsonl --model_path path/to/model

The tasks are generated (code_tasks.py), or rows in the form of HumanEval or MBPP. A few tests are
shown as examples. The model's code runs in a process that the kernel confines (sandbox.py), and
what it returns for the arguments of the hidden tests is compared here, with values that it never
saw.
"""
import ast
import random
import re
from functools import cache
from itertools import zip_longest
from typing import Literal

from extras.sandbox.code_style import style_findings
from extras.sandbox.code_tasks import generate, read_row, read_tests
from extras.sandbox.sandbox import check_sandbox, run, same
from envs.gsm8k import parse
from core.config import say_once
from core.tool_calls import after_thought

CODE = 8000  # characters of a function
SLACK = 1.5  # times the reference's operations count as efficient
CORRECT, ATTEMPT, EFFICIENCY, STYLE = 0.7, 0.2, 0.2, 0.1  # parts of the reward
FENCE = re.compile(r"```(?:python|py)?\n(.*?)```", re.DOTALL)


class Code:
    """Write one function. The reward is 1 if it is right, efficient and clean.

    A function that fails a hidden test earns at most 0.2, in proportion to those that it passes.
    """

    system_prompt = ("Write the Python function. Use write_function, try it with run_tests and "
                     "debug, and submit it. You have one submission.")
    max_turns = 12
    limits = {"max_new_tokens": 512, "max_tokens": 4096, "max_tool_tokens": 2048,
              "tool_timeout": 30.0}
    # Which levels are generated, and whether code runs without confinement.
    options = {"levels": "1+2+3", "unsafe_code": False}
    option_types = {"levels": Literal["1", "2", "3", "1+2", "1+3", "2+3", "1+2+3"]}

    def reset(self, entry_point: str, test: str, question: str, canonical_solution: str = "",
              setup: str = "", noise: float = 0.0, noise_seed: int = 0, **_) -> str:
        """Begin with a task in HumanEval's form, except that `canonical_solution` is all the code.

        `setup` is run before the model's code. A share `noise` of the functions that the scripted
        expert writes is wrong; the one that it submits never is. `noise_seed` decides which.
        """
        tests = read_tests(test, entry_point)
        number = min(2, len(tests) // 2)
        self._examples, self._hidden = tests[:number], tests[number:]
        # In this order a function cannot tell by the number of its calls which test comes next.
        random.Random(test).shuffle(self._hidden)
        self._name = entry_point
        self._setup = setup
        self._solution = canonical_solution
        self._code = None
        self._examples_pass = None  # until run_tests
        self._reward_parts = {"correctness": 0.0, "efficiency": 0.0, "style": 0.0}
        self._noise = noise
        self._rng = random.Random(f"{noise_seed} {question}")
        self.done = False
        lines = [question.rstrip()]
        if self._examples:
            lines += ["", "Examples:", *map(self._shown, self._examples)]
        return "\n".join(lines)

    # ------------------------------------------------------------------------------- the tools
    def analyze_requirements(self) -> str:
        """Return what the function takes and returns in the examples, and how it is judged."""
        lines = [f"{len(self._hidden)} hidden tests decide; few executed lines and clean style "
                 f"add to it. Write a function {self._name} of at most {CODE} characters."]
        for arguments, wanted in self._examples:
            takes = ", ".join(type(argument).__name__ for argument in arguments)
            lines.append(f"({takes}) -> {type(wanted).__name__}")
        return "\n".join(lines)

    def write_function(self, code: str) -> str:
        """Write the function, or write it anew.

        Args:
            code: Python code that defines the function, with its imports.
        """
        if len(code) > CODE:
            return f"error: at most {CODE} characters"
        try:
            tree = parse(code)
        except (SyntaxError, ValueError) as error:
            return f"error: {type(error).__name__}: {error}"
        names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        if self._name not in names:
            return f"error: the code defines no function {self._name}"
        self._code = code
        self._examples_pass = None
        self._findings = style_findings(tree)
        return "\n".join(["written", *self._findings])

    def run_tests(self) -> str:
        """Run the examples."""
        if self._code is None:
            return "error: nothing is written yet"
        result = self._run(self._code, self._examples)
        passed = verdicts(result, self._examples)
        self._examples_pass = all(passed)
        lines = [f"{sum(passed)} of {len(passed)} pass"]
        if result.status != "ok":
            lines.append(f"{result.status}: {result.error}")
        for example, outcome, right in zip(self._examples, result.outcomes, passed):
            if not right:
                got = outcome.get("error") or outcome.get("text")
                lines.append(f"{self._shown(example)}, not {got!s:.200}")
        return "\n".join([*lines, result.output[-500:]]).rstrip()

    def debug(self, statements: str) -> str:
        """Run the function's code and then some statements, and show what they print.

        Args:
            statements: Python code, for example "print(f([1, 2]))".
        """
        result = self._run(f"{self._code or ''}\n\n{statements[:CODE]}")
        return f"{result.output[-1500:]}{result.error}".strip() or "nothing was printed; use print"

    def submit(self) -> str:
        """Hand the function in. This ends the episode."""
        if self.done:
            return "error: the episode is over"
        self.done = True
        if self._code is None:
            return "nothing was written"
        if not self._hidden:
            return "There are no tests."
        passed = verdicts(self._run(self._code, self._hidden), self._hidden)
        if not all(passed):
            self._reward_parts["correctness"] = ATTEMPT * sum(passed) / len(passed)
            return f"wrong: {sum(passed)} of {len(passed)} hidden tests pass"
        self._reward_parts = {"correctness": CORRECT,
                              "efficiency": EFFICIENCY * self._efficiency(),
                              "style": STYLE * max(0.0, 1 - len(self._findings) / 4)}
        return "right"

    # ------------------------------------------------------------------------------- the reward
    def get_reward(self) -> float:
        return sum(self._reward_parts.values())

    def _check(self) -> bool:
        return self._reward_parts["correctness"] == CORRECT

    def _efficiency(self) -> float:
        """Return 1 for at most SLACK times the reference's operations, less in proportion.

        The counter runs beside the model's code, which can stop it. Code that does so in a way that
        the counter cannot notice gains this part of the reward only.
        """
        spent = self._count(self._code)
        if spent is None:
            return 0.0
        reference = self._count(self._solution)
        if not reference:
            # It is a built-in function, which executes no line.
            return 1.0
        return min(1.0, SLACK * reference / max(spent, 1))

    def _count(self, code: str) -> int | None:
        """Return how many lines code executes in the hidden tests, or None if that is not known.

        Counting slows code about tenfold, so this run does not decide whether the code is right.
        """
        result = self._run(code, self._hidden, count=True)
        counts = [outcome.get("operations") for outcome in result.outcomes]
        if None in counts or not all(verdicts(result, self._hidden)):
            return None
        return sum(counts)

    # ------------------------------------------------------------------------- the rest of it
    def _reply(self, text: str) -> str | None:
        """Take a fenced block of code as the function, and submit it."""
        if blocks := FENCE.findall(after_thought(text)):
            problem = self.write_function(blocks[-1])
            if problem.startswith("error"):
                return problem
            self.submit()
        return None if self.done else "Use write_function, and then submit."

    def _expert(self) -> list[dict]:
        """Write the reference solution, run the examples, and submit what passes them."""
        if self.done:
            return []
        if self._code is None and self._rng.random() < self._noise:
            code = f"def {self._name}(*_):\n    return None\n"
        elif self._code is None or self._examples_pass is False:
            code = self._solution
        elif self._examples_pass:
            return [{"name": "submit", "arguments": {}}]
        else:
            return [{"name": "run_tests", "arguments": {}}]
        return [{"name": "write_function", "arguments": {"code": code}}]

    @staticmethod
    def _from_text(text: str) -> dict:
        """Return a task without tests, of the function after "def", or else of `solve`."""
        name = re.search(r"def (\w+)\(", f"{text}def solve(")[1]
        return {"question": text, "entry_point": name, "test": ""}

    @classmethod
    def _tasks(cls, split: str, n: int | None, seed: int) -> list[dict]:
        """Return n generated rows. No function with the same constants is in both splits."""
        check_sandbox(cls.options["unsafe_code"])
        return generate(cls.options["levels"].split("+"), split, n or 1000, seed)

    @classmethod
    def _row(cls, row: dict) -> dict | None:
        """Return the task in a row, or None if no test can be read or its own solution fails."""
        task = read_row(row)
        return task and cls._if_solved(**task)

    @classmethod
    @cache
    def _if_solved(cls, **task) -> dict | None:
        """Return the task, or None and a note if its own solution, where there is one, fails.

        One that is too slow fails in some processes only, and all must have the same tasks.
        """
        env = cls()
        env.reset(**task)
        # An agent that has written the solution, and is shown all tests.
        env._examples += env._hidden
        env._code = env._solution
        said = env.run_tests()
        if env._examples_pass or not env._code or "\ntimeout: " in said:
            return task
        say_once(f"note: task {task['task_id']} is left out: its own solution fails, {said!r:.200}")
        return None

    def _run(self, code: str, tests=(), count=False):
        calls = [(self._name, arguments) for arguments, _ in tests]
        if self._setup:
            # Error messages still have the lines of the model's code.
            code = f"{self._setup}\nexec(compile({code!r}, 'main.py', 'exec'))"
        return run(code, calls, seconds=5.0, count=count, unsafe=self.options["unsafe_code"])

    def _shown(self, test) -> str:
        arguments, wanted = test
        return f"{self._name}({', '.join(map(repr, arguments))}) == {wanted!r}"


def verdicts(result, tests) -> list[bool]:
    """Return which of the tests passed. One that was not reached did not."""
    return ["value" in outcome and same(outcome["value"], wanted)
            for outcome, (_, wanted) in zip_longest(result.outcomes, tests, fillvalue={})]
