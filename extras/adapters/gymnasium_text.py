"""Games of the package gymnasium that can be played in text: FrozenLake, Blackjack, Taxi, others.

    --env gymnasium:FrozenLake-v1 --env_options is_slippery=false
    --env gymnasium:my_games:Maze-v0          imports my_games, which registers it

The system prompt is the game's own documentation. A task is a seed. Options are what the game's
constructor takes.
"""
import inspect
import re
from functools import cache

import gymnasium

from core.config import reading
from envs.calls import STARRED
from extras.adapters.numbered import Numbered

# A character that a terminal would show in colour, or in two, is written in brackets.
COLOURED = re.compile(r"(?:\x1b\[[\d;]+m)+(.*?)(?:\x1b\[0m)+")


class Game(Numbered):
    """A game whose actions are numbered. The reward is the sum of the game's own rewards.

    Solved means that it reaches gymnasium's reward_threshold for the game, or without one is above
    0, which CliffWalking's never is.
    """

    def reset(self, number: int, **_) -> str:
        super().reset(number)
        self._game = gymnasium.make(type(self).__name__, **self.options)
        return self._show(self._game.reset(seed=number)[0])

    def act(self, action: int) -> str:
        """Take an action, and see what follows.

        Args:
            action: the number of the action
        """
        if self.done or not self._game.action_space.contains(action):
            raise ValueError(f"an action is one of {self._game.action_space}, until the end")
        observation, reward, terminated, truncated, _ = self._game.step(action)
        self.reward += float(reward)
        goal = self._game.spec.reward_threshold
        # In floating point 0.1 + 0.2 - 0.3 is above 0, and 0.6 + 0.3 + 0.1 below 1.
        self._solved = self.reward >= (1e-9 if goal is None else goal - 1e-9)
        self.done = terminated or truncated
        return f"{self._show(observation)}\nreward: {reward}"

    def _show(self, observation) -> str:
        picture = self._game.render() if self._game.render_mode else ""
        # Taxi packs row, column, passenger and destination into one number.
        decode = getattr(self._game.unwrapped, "decode", str)
        return COLOURED.sub(r"[\1]", f"{picture}\nobservation: {decode(observation)}").strip()


@cache
def make(name: str) -> type:
    """Return the environment of a game that gymnasium has registered."""
    with reading(f"gymnasium:{name}"):
        game = gymnasium.make(name)
        if not isinstance(game.action_space, gymnasium.spaces.Discrete):
            raise ValueError(f"its actions are {game.action_space}, not numbered")
    parameters = inspect.signature(type(game.unwrapped)).parameters.values()
    # FrozenLake8x8-v1 is FrozenLake with another map.
    options = {p.name: game.spec.kwargs.get(p.name, p.default) for p in parameters
               if p.kind not in STARRED}
    options["render_mode"] = "ansi" if "ansi" in game.metadata["render_modes"] else None
    steps = game.spec.max_episode_steps or 100
    return type(name, (Game,), {
        "options": {name: value for name, value in options.items()
                    if value is not None and value is not inspect.Parameter.empty},
        # A class without a text would inherit that of gymnasium.Env.
        "system_prompt": inspect.cleandoc(vars(type(game.unwrapped))["__doc__"] or "").partition(
            "## Starting State")[0],
        "max_turns": steps,
        "limits": {"max_tokens": 4096, "max_tool_calls": steps, "max_tool_tokens": 4096}})
