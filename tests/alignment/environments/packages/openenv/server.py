"""Four environments of openenv-core on one server, for its own interpreter: `python server.py PORT`.

| path | actions |
|---|---|
| /guess | one text: guess the number |
| /grid | two whole numbers, as JSON: find the cell. Two sessions at a time |
| /shop | tools alone: look at the shelf, buy the right thing |
| /notes | one text, and a tool beside it |
"""

import random
import sys
from typing import Any
from uuid import uuid4

import uvicorn
from fastapi import FastAPI
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field

LARGEST = 20


class GuessAction(Action):
    guess: str = Field(description="A number from 1 to 20.")


class GuessObservation(Observation):
    hint: str


class GuessEnvironment(Environment):
    """Pays 4 for the right number, and ends."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()
        self._number = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, number: int | None = None) -> Observation:
        self._number = number or random.Random(seed).randint(1, LARGEST)
        self._state = State(episode_id=episode_id or str(uuid4()), step_count=0)
        return GuessObservation(hint=f"I think of a number from 1 to {LARGEST}.")

    def step(self, action: Action, timeout_s: float | None = None, **_: Any) -> Observation:
        assert isinstance(action, GuessAction)
        self._state.step_count += 1
        guess = int(action.guess)  # what is no number is a failure of this environment
        if guess == self._number:
            return GuessObservation(hint="Yes!", reward=4.0, done=True)
        return GuessObservation(hint="higher" if guess < self._number else "lower", reward=-0.125)

    @property
    def state(self) -> State:
        return self._state


class GridAction(Action):
    row: int = Field(ge=0, le=2)
    column: int = Field(ge=0, le=2)


class GridObservation(Observation):
    distance: int
    tried: list[list[int]]


class GridEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._tried: list[list[int]] = []

    def reset(self, seed: int | None = None, episode_id: str | None = None) -> Observation:
        return GridObservation(distance=4, tried=[])

    def step(self, action: Action, timeout_s: float | None = None, **_: Any) -> Observation:
        assert isinstance(action, GridAction)
        self._tried.append([action.row, action.column])
        distance = (2 - action.row) + (2 - action.column)
        return GridObservation(distance=distance, tried=self._tried, done=distance == 0, reward=distance == 0)

    @property
    def state(self) -> State:
        return State(step_count=len(self._tried))


class ShopEnvironment(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("shop")
        self._wanted = "pear"
        self._bought: str | None = None

        @server.tool
        def look() -> list[str]:
            """Say what is on the shelf."""
            return ["apple", "pear"]

        @server.tool
        def buy(fruit: str, number: int = 1) -> str:
            """Buy a fruit."""
            if fruit not in ("apple", "pear"):
                raise ValueError(f"there is no {fruit}")
            self._bought = fruit
            return f"{number} {fruit}"

        super().__init__(server)

    def reset(self, seed: int | None = None, episode_id: str | None = None) -> Observation:
        return Observation(metadata={"status": "ready"})

    def _step_impl(self, action: Action, timeout_s: float | None = None, **_: Any) -> Observation:
        raise NotImplementedError

    async def step_async(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        observation = await super().step_async(action, timeout_s, **kwargs)
        if isinstance(observation, CallToolObservation) and self._bought is not None:
            observation.done = True
            observation.reward = 1.0 if self._bought == self._wanted else -1.0
        return observation

    @property
    def state(self) -> State:
        return State()


class NoteAction(Action):
    answer: str


class NoteObservation(Observation):
    question: str = ""


class NoteEnvironment(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("notes")

        @server.tool
        def read_note(name: str) -> str:
            """Read a note."""
            return {"city": "Lisbon"}[name]

        super().__init__(server)

    def reset(self, seed: int | None = None, episode_id: str | None = None) -> Observation:
        return NoteObservation(question="Which city does the note 'city' name?")

    def _step_impl(self, action: Action, timeout_s: float | None = None, **_: Any) -> Observation:
        assert isinstance(action, NoteAction)
        return NoteObservation(done=True, reward=1.0 if action.answer == "Lisbon" else 0.0)

    @property
    def state(self) -> State:
        return State()


def build_app() -> FastAPI:
    app = FastAPI()
    app.mount("/guess", create_fastapi_app(GuessEnvironment, GuessAction, GuessObservation, 8))
    app.mount("/grid", create_fastapi_app(GridEnvironment, GridAction, GridObservation, 2))
    app.mount("/shop", create_fastapi_app(ShopEnvironment, CallToolAction, CallToolObservation, 8))
    app.mount("/notes", create_fastapi_app(NoteEnvironment, NoteAction, NoteObservation, 8))
    return app


if __name__ == "__main__":
    uvicorn.run(build_app(), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
