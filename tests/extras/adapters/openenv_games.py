"""Two OpenEnv environments, their clients, and the classes that TRL would be given: python openenv_games.py echo|catch PORT is a server."""
import os
import sys

import uvicorn
from openenv.core.client_types import StepResult
from openenv.core.env_client import EnvClient
from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class EchoAction(Action):
    message: str


class EchoObservation(Observation):
    echoed_message: str


class EchoServer(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.count = 0

    def reset(self, seed=None, episode_id=None, **_):
        self.count = 0
        return EchoObservation(echoed_message="ready", reward=0.0)

    def step(self, action, timeout_s=None, **_):
        self.count += 1
        return EchoObservation(echoed_message=f"{self.count}: {action.message}", reward=0.1 * len(action.message))

    @property
    def state(self):
        return State(step_count=self.count)


class CatchAction(Action):
    move: int


class CatchObservation(Observation):
    ball: int
    paddle: int


class CatchServer(Environment):
    """The ball falls three rows in column 0; the paddle begins in column 2."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.paddle, self.rows = 2, 3

    def reset(self, seed=None, episode_id=None, **_):
        self.paddle, self.rows = 2, 3
        return CatchObservation(ball=0, paddle=2)

    def step(self, action, timeout_s=None, **_):
        self.paddle, self.rows = self.paddle + action.move, self.rows - 1
        caught = None if self.rows else float(self.paddle == 0)
        return CatchObservation(ball=0, paddle=self.paddle, reward=caught, done=not self.rows)

    @property
    def state(self):
        return State(step_count=3 - self.rows)


class Client(EnvClient):
    observation = None

    def _step_payload(self, action):
        return action.model_dump()

    def _parse_result(self, payload):
        observation = self.observation(**payload["observation"], reward=payload.get("reward"), done=payload.get("done", False))
        return StepResult(observation=observation, reward=payload.get("reward"), done=payload.get("done", False))

    def _parse_state(self, payload):
        return State(**payload)


class EchoClient(Client):
    observation = EchoObservation


class CatchClient(Client):
    observation = CatchObservation


# --------------------------------------------------------------------------------- what --env is given
class EchoToolEnv:
    def __init__(self):
        self.client = EchoClient(base_url=os.environ["ECHO_URL"]).sync()
        self.reward = 0.0

    def reset(self, **kwargs) -> str | None:
        self.client.reset()
        self.reward = 0.0

    def echo(self, message: str) -> str:
        """Echo a message.

        Args:
            message: What to echo
        """
        result = self.client.step(EchoAction(message=message))
        self.reward = result.reward
        return result.observation.echoed_message


class CatchEnv:
    """The client is asynchronous, and so are the tools."""

    def __init__(self):
        self.client = CatchClient(base_url=os.environ["CATCH_URL"])

    async def reset(self, **kwargs) -> str:
        self.done, self.caught = False, 0.0
        observation = (await self.client.reset()).observation
        return f"Ball {observation.ball}, paddle {observation.paddle}."

    async def move(self, direction: int) -> str:
        """Move the paddle.

        Args:
            direction: -1, 0 or 1
        """
        result = await self.client.step(CatchAction(move=direction))
        self.done, self.caught = result.done, result.reward or 0.0
        return f"paddle {result.observation.paddle}"

    async def get_reward(self) -> float:
        return self.caught


def reward_func(environments, **kwargs):
    return [env.reward for env in environments]


if __name__ == "__main__":
    server, action, observation = {"echo": (EchoServer, EchoAction, EchoObservation), "catch": (CatchServer, CatchAction, CatchObservation)}[sys.argv[1]]
    app = create_fastapi_app(server, action, observation, max_concurrent_envs=16)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")
