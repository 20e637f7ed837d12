"""Gymnasium in text: observations as text or JSON, and the last action in the reply. Runs where `gymnasium` is.

| space | in text |
|---|---|
| Text | the text; as an action the whole reply |
| Discrete | a number; as an action the last whole number of the reply |
| others | JSON: arrays and tuples as lists, dictionaries as objects; as an action the last JSON value of the reply |

Environments that can draw themselves as text (`render_mode` "ansi") show the drawing instead of the observation, with
brackets around what it highlights.
"""

from __future__ import annotations

import json
import re

import gymnasium
import numpy
from gymnasium import spaces

HIGHLIGHT = re.compile(r"\x1b\[[1-9][\d;]*m(.*?)\x1b\[0m")  # of drawings, such as where one is
WHOLE_NUMBER = re.compile(r"(?<![\w.])-?\d+(?![\w.]*\d)")
MISTAKES_IN_A_ROW = 3  # replies without an action, until the episode has failed


class NoAction(Exception):
    """The reply has no action of the space."""


class World:
    """An environment in an episode."""

    def __init__(self, environment: gymnasium.Env) -> None:
        self.environment = environment
        self.mistakes = 0
        self.total = 0.0


class Worlds:
    """The environments of one id."""

    def __init__(self, environment_id: str, arguments: dict[str, object]) -> None:
        self._environment_id = environment_id
        self._scale = float(str(arguments.pop("reward_scale", 1.0)))
        prompt = arguments.pop("prompt", None)
        self._arguments = arguments
        probe = gymnasium.make(environment_id, **arguments)
        if "render_mode" not in arguments and "ansi" in probe.metadata.get("render_modes", ()):
            self._arguments["render_mode"] = "ansi"
        self._hint = f"Reply with {describe(probe.action_space)}."
        self._prompt = str(prompt) if prompt else f"{environment_id}. {self._hint}"
        probe.close()
        self._worlds: dict[str, World] = {}

    def reset(self, episode: str, task: dict[str, object]) -> dict[str, object]:
        """Start the environment with the task's seed."""
        world = World(gymnasium.make(self._environment_id, **self._arguments))
        self._worlds[episode] = world
        observation, _ = world.environment.reset(seed=int(str(task["seed"])))
        text = f"{self._prompt}\n\n{self._show(world, observation)}"
        return {"messages": [{"role": "user", "content": text}]}

    def step(self, episode: str, reply: dict[str, object]) -> dict[str, object]:
        """Take the action of the reply. The reward is scaled, and limited to -1 and 1."""
        world = self._worlds[episode]
        try:
            action = read_action(world.environment.action_space, str(reply.get("content") or ""))
        except NoAction:
            world.mistakes += 1
            if world.mistakes == MISTAKES_IN_A_ROW:
                return {"reward": -1.0, "terminated": True, "info": {"return": world.total, "invalid_action": True}}
            return {"messages": [{"role": "user", "content": f"That is no action. {self._hint}"}]}
        world.mistakes = 0
        observation, reward, terminated, truncated, _ = world.environment.step(action)
        world.total += float(reward)
        return {
            "messages": [{"role": "user", "content": self._show(world, observation)}],
            "reward": max(-1.0, min(1.0, float(reward) * self._scale)),
            "terminated": bool(terminated),
            "truncated": bool(truncated),
            "info": {"return": world.total},
        }

    def close(self, episode: str) -> None:
        """Close the environment."""
        if (world := self._worlds.pop(episode, None)) is not None:
            world.environment.close()

    def _show(self, world: World, observation: object) -> str:
        if self._arguments.get("render_mode") == "ansi":
            return HIGHLIGHT.sub(r"[\1]", str(world.environment.render())).strip("\n")
        return observation if isinstance(observation, str) else json.dumps(observation, default=to_json)


def to_json(value: object) -> object:
    """Return what JSON has for a value of numpy."""
    if isinstance(value, numpy.ndarray | numpy.generic):
        return value.tolist()
    raise TypeError(f"an observation holds {type(value).__name__}, which has no form in text")


def describe(space: spaces.Space) -> str:
    """Return what an action looks like. Example: "a whole number from 0 to 3" """
    if isinstance(space, spaces.Discrete):
        return f"a whole number from {space.start} to {space.start + space.n - 1}"
    if isinstance(space, spaces.Text):
        return f"a text of {space.min_length} to {space.max_length} characters"
    space.seed(0)
    return f"JSON, such as {json.dumps(space.sample(), default=to_json)}"


def read_action(space: spaces.Space, text: str) -> object:
    """Return the last action in a text. Raises NoAction."""
    action: object = None
    if isinstance(space, spaces.Text):
        action = text.strip()
    elif isinstance(space, spaces.Discrete):
        numbers = WHOLE_NUMBER.findall(text)
        action = int(numbers[-1]) if numbers else None
    else:
        action = to_space(space, last_json(text))
    if action is None or not space.contains(action):
        raise NoAction
    return action


def last_json(text: str) -> object:
    """Return the last JSON value in a text, the longest that ends there, or None."""
    decoder, found, position = json.JSONDecoder(), None, 0
    while position < len(text):
        try:
            found, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            position += 1
    return found


def to_space(space: spaces.Space, value: object) -> object:
    """Return the value with the types of the space, as far as it fits."""
    if isinstance(space, spaces.Dict) and isinstance(value, dict):
        return {name: to_space(part, value.get(name)) for name, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple) and isinstance(value, list):
        return tuple(to_space(part, each) for part, each in zip(space.spaces, value, strict=False))
    if isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary):
        try:
            return numpy.asarray(value, dtype=space.dtype)
        except (TypeError, ValueError, OverflowError):
            return None
    return value


def open_environment(name: str, arguments: dict[str, object]) -> Worlds:
    """Return the environments with this id, such as FrozenLake-v1."""
    return Worlds(name, arguments)
