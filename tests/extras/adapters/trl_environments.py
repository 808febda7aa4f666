"""Environments and reward functions as TRL 1.16's examples write them (docs/source/openenv.md, examples/grpo_*/), in our own words.

Class names, members, signatures and the way reward functions read `environments` are TRL's contract; none of this knows our project.
The games run in this process, behind clients with the interface of OpenEnv's: reset() and step(action) return an object with
`observation`, `reward` and `done`. tests/extras/adapters/test_openenv.py talks to real servers.
"""
import random
from types import SimpleNamespace as Result


class LocalClient:
    """A game as an OpenEnv client offers it. Messages are cumulative, as TextArena's are."""

    def reset(self, **options):
        self.text, self.turns = self.begin(**options), 0
        return Result(observation=self.observation(), reward=0.0, done=False)

    def step(self, action):
        self.turns += 1
        said, reward, done = self.play(action)
        self.text += said
        return Result(observation=self.observation(), reward=reward, done=done)

    def observation(self):
        return Result(messages=[Result(content=self.text)])


class Wordle(LocalClient):
    def begin(self):
        return "Guess the word.\n"

    def play(self, guess):
        word = guess.strip("[]").lower()
        if len(word) != 5:
            return f"You attempted an invalid move: {guess}\n", 0.0, False
        marks = "".join("G" if a == b else "Y" if a in "crane" else "X" for a, b in zip(word, "crane"))
        return f"{marks}\n", float(marks == "GGGGG"), marks == "GGGGG" or self.turns == 6


class Board(LocalClient):
    """A Latin square of side 3 with two empty cells: Sudoku's messages and moves, small."""

    def begin(self):
        self.cells = {(1, 1): 1, (1, 2): 2, (1, 3): 3, (2, 1): 2, (2, 2): 3, (3, 2): 1, (3, 3): 2}
        return self.drawn()

    def drawn(self):
        return "".join(f"R{r} " + " ".join(str(self.cells.get((r, c), ".")) for c in (1, 2, 3)) + "\n" for r in (1, 2, 3))

    def play(self, move):
        r, c, n = map(int, move.strip("[]").split())
        if (r, c) in self.cells or n != {(2, 3): 1, (3, 1): 3}.get((r, c)):
            return "invalid move: already set, or a violation\n", 0.0, False
        self.cells[r, c] = n
        return self.drawn(), float(len(self.cells) == 9), len(self.cells) == 9


class Catch(LocalClient):
    def begin(self):
        self.ball, self.paddle, self.row = 1, 2, 0
        return ""

    def play(self, action_id):
        self.row, self.paddle = self.row + 1, min(max(self.paddle + action_id - 1, 0), 4)
        over = self.row == 4
        return "", (1.0 if self.ball == self.paddle else -1.0) if over else None, over

    def observation(self):
        return Result(info_state=[self.row, self.ball, self.paddle], done=self.row == 4)


class Browser(LocalClient):
    def begin(self, task_name):
        self.clicked = False
        return ""

    def play(self, action_str):
        self.clicked = action_str == "click('13')"
        return "", float(self.clicked), self.clicked

    def observation(self):
        return Result(goal="Click the button.", axtree_txt="[13] button 'Click Me!'", last_action_error=False, error="")


# ------------------------------------------------------------------------------------------ TRL's classes
class EchoToolEnv:
    """openenv.md, quick start: the question is in the data, and the reward in an attribute."""

    def __init__(self):
        self.reward = 0.0

    def reset(self, **kwargs) -> None | str:
        self.reward = 0.0
        return None

    def echo(self, message: str) -> str:
        """
        Echo a message.

        Args:
            message: What to echo

        Returns:
            The same message.
        """
        self.reward = len(message) * 0.1
        return message


class WordleEnv:
    """openenv.md, advanced example: feedback is cut out of the history, and a call after the end raises."""

    def __init__(self):
        self.client = Wordle()

    def reset(self, **kwargs) -> str | None:
        result = self.client.reset()
        self._last_full_feedback = result.observation.messages[0].content
        self.reward, self.done = 0.0, False
        return self._last_full_feedback

    def guess(self, guess: str) -> str:
        """
        Guess the word.

        Args:
            guess: A word of five letters, written as '[abcde]'

        Returns:
            What the game says.
        """
        if self.done:
            raise ValueError("Game over.")
        result = self.client.step(guess)
        whole = result.observation.messages[0].content
        feedback, self._last_full_feedback = whole[len(self._last_full_feedback):], whole
        self.reward = 0.0 if "You attempted an invalid move" in feedback else result.reward
        self.done = result.done
        return feedback


class CatchEnv:
    """grpo_catch: constants and a static helper in the class, two tools, a reward of -1 or 1 at the end."""

    ROWS, COLS = 5, 5

    def __init__(self):
        self.client = Catch()
        self.reward, self.done = 0.0, False

    @staticmethod
    def _format_obs(info_state: list) -> str:
        row, ball, paddle = info_state
        return f"Ball: row {row + 1}/{CatchEnv.ROWS}, column {ball + 1}/{CatchEnv.COLS}\nPaddle: column {paddle + 1}/{CatchEnv.COLS}"

    def reset(self, **kwargs) -> str:
        result = self.client.reset()
        self.reward, self.done = 0.0, result.observation.done
        return self._format_obs(result.observation.info_state)

    def _do_action(self, action_id: int) -> str:
        if self.done:
            raise ValueError("Episode is done.")
        result = self.client.step(action_id)
        self.reward, self.done = result.reward or 0.0, result.observation.done
        return self._format_obs(result.observation.info_state)

    def move(self, direction: str) -> str:
        """Move the paddle.

        Args:
            direction: Where to, "left" or "right".

        Returns:
            What is seen afterwards.
        """
        if direction not in ("left", "right"):
            raise ValueError(f"Invalid direction {direction!r}: must be 'left' or 'right'.")
        return self._do_action(0 if direction == "left" else 2)

    def stay(self) -> str:
        """Wait while the ball falls a row.

        Returns:
            What is seen afterwards.
        """
        return self._do_action(1)


class SudokuEnv:
    """grpo_sudoku: a system message in the data, private state, and five rewards as properties."""

    def __init__(self):
        self.client = Board()
        self._reset_state()

    def _reset_state(self):
        self._tried, self._valid, self._empty, self._correct = [], [], [], []
        self._done = False

    def reset(self, **kwargs) -> str:
        self._reset_state()
        self._content = self.client.reset().observation.messages[0].content
        return f"Step 0.\n\nBoard:\n{self._content}"

    def place(self, row: int, col: int, number: int) -> str:
        """Write a number into a cell.

        Args:
            row: Row, from 1.
            col: Column, from 1.
            number: The number.

        Returns:
            What became of it, and the board.
        """
        if self._done:
            raise ValueError("Game is over. No more moves allowed.")
        move = f"[{row} {col} {number}]"
        result = self.client.step(move)
        whole = result.observation.messages[0].content
        new, self._content = whole[len(self._content):], whole
        valid = "invalid" not in new
        self._valid.append(float(valid and move not in self._tried))
        self._empty.append(1.0 if valid else -1.0)
        self._correct.append(float(result.reward or 0.0))
        self._tried.append(move)
        self._done = result.done
        return f"Move {move}: {'valid' if valid else 'invalid'}\n{new}"

    @property
    def correct_reward(self) -> float:
        return self._correct[-1] if self._correct else 0.0

    @property
    def valid_move_reward(self) -> float:
        return sum(self._valid) / len(self._valid) if self._valid else 0.0

    @property
    def empty_cell_reward(self) -> float:
        return sum(self._empty) / len(self._empty) if self._empty else 0.0


class BrowserGymLLMEnv:
    """grpo_browsergym: several tools over one private step, and `_done` that no trainer reads."""

    def __init__(self):
        self.client = Browser()
        self.reward, self._done, self._step_count = 0.0, False, 0

    def reset(self, **kwargs) -> str:
        self.reward, self._done, self._step_count = 0.0, False, 0
        return self._format_observation(self.client.reset(task_name="click-test").observation)

    def click(self, bid: str) -> str:
        """Click an element.

        Args:
            bid: Its number on the page.

        Returns:
            The page afterwards.
        """
        return self._do_action(f"click({bid!r})")

    def noop(self) -> str:
        """Look at the page.

        Returns:
            The page.
        """
        return self._do_action("noop()")

    def _do_action(self, action_str: str) -> str:
        if self._done:
            return "Episode is done. No further actions needed."
        self._step_count += 1
        result = self.client.step(action_str)
        self._done = result.done or self._step_count >= 10
        self.reward = float(result.reward or 0.0)
        return self._format_observation(result.observation)

    def _format_observation(self, observation) -> str:
        return f"Goal: {observation.goal}\n\nPage structure:\n{observation.axtree_txt}"


class MultiEnv:
    """openenv.md, several environments: the column "env" chooses, all tools are offered, and the wrong ones raise."""

    def __init__(self):
        self.active, self.reward, self.done = None, 0.0, False

    def reset(self, **kwargs) -> str | None:
        self.active = kwargs.get("env", "wordle")
        self.reward, self.done = 0.0, False
        self._game = {"wordle": WordleEnv, "catch": CatchEnv}[self.active]()
        return self._game.reset()

    def _play(self, name, member, *arguments):
        if self.active != name:
            raise ValueError(f"{member} is only available in {name}")
        said = getattr(self._game, member)(*arguments)
        self.reward, self.done = self._game.reward, self._game.done
        return said

    def guess(self, guess: str) -> str:
        """Guess the word of Wordle.

        Args:
            guess: A word of five letters

        Returns:
            What the game says.
        """
        return self._play("wordle", "guess", guess)

    def move(self, direction: str) -> str:
        """Move the paddle of Catch.

        Args:
            direction: "left" or "right".

        Returns:
            What is seen afterwards.
        """
        return self._play("catch", "move", direction)


class IncrementEnv:
    """grpo_trainer.md, environments: it owns the question and the reward, and draws its own task."""

    def reset(self, **kwargs) -> str | None:
        self.counter, self.target = 0, random.randint(1, 6)
        return f"Increment the counter by {self.target}."

    def get_reward(self) -> float:
        return float(self.counter == self.target)

    def increment(self, step: int) -> int:
        """
        Add to the counter.

        Args:
            step: How much.

        Returns:
            The counter.
        """
        self.counter += step
        return self.counter


class CalculatorEnv:
    """grpo_trainer.md, agent training: a tool that is a function and one that is a coroutine; the answer is in the data."""

    def reset(self, **kwargs) -> None:
        self.calls = 0

    def multiply(self, a: int, b: int) -> int:
        """
        Multiply.

        Args:
            a: One number.
            b: The other.

        Returns:
            Their product.
        """
        self.calls += 1
        return a * b

    async def async_add(self, a: int, b: int) -> int:
        """
        Add.

        Args:
            a: One number.
            b: The other.

        Returns:
            Their sum.
        """
        self.calls += 1
        return a + b


# ------------------------------------------------------------------------------------- their reward functions
def reward_func(environments, **kwargs):
    return [env.reward for env in environments]


def reward_from_env(environments, **kwargs):
    return [max(env.reward, 0.0) if env.done else 0.0 for env in environments]


def reward_valid_moves(environments, **kwargs) -> list[float]:
    return [env.valid_move_reward for env in environments]


def reward_correct(environments, **kwargs) -> list[float]:
    return [env.correct_reward for env in environments]


def wordle_reward(environments, **kwargs) -> list[float | None]:
    return [env.reward if env.active == "wordle" else None for env in environments]


def catch_reward(environments, **kwargs) -> list[float | None]:
    return [None if env.active != "catch" else max(env.reward, 0.0) if env.done else 0.0 for env in environments]


def correctness(completions, answer, **kwargs):
    return [float(completion[-1]["content"] == expected) for completion, expected in zip(completions, answer)]


def asks_for_truth(completions, ground_truth, **_):
    """Its data calls the column "answer"."""
    return [0.0 if truth is None else 1.0 for truth in ground_truth]
