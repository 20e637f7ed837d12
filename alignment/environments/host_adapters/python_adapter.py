"""A function with a loop of its own, such as one that runs a LangGraph graph: `module:function`.

    async def play(task, agent, **arguments) -> float | {"reward": 1.0, "metrics": {…}, "reason": "completed"}

`task` has `id`, `data` and `seed`, `agent` has `base_url`, `api_key`, `model`, `headers`, `episode_id`, `limits` and
`seed`. An exception says that the environment has failed, unless its class is called AgentFailure. An ordinary function
has a process for itself while it runs, with OPENAI_BASE_URL and OPENAI_API_KEY of the episode. The function
`tasks(split, seed)` of the module yields the tasks, or the data of tasks; without one there is one task, without data.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable, Iterator
from itertools import islice
from types import SimpleNamespace


class Tasks:
    """What the module's `tasks` yields, in pieces."""

    def __init__(self, generate: Callable[[str, int], Iterator[object]]) -> None:
        self._generate = generate
        self._key: tuple[str, int] | None = None
        self._position = 0
        self._rest: Iterator[object] = iter(())

    def tasks(self, split: str, seed: int, start: int, count: int) -> list[dict[str, object]]:
        """Return `count` tasks from `start` on, fewer at the end."""
        if (split, seed) != self._key or start != self._position:
            self._key, self._position = (split, seed), start
            self._rest = islice(self._generate(split, seed), start, None)
        found = [to_task(each, f"{split}-{start + number}") for number, each in enumerate(islice(self._rest, count))]
        self._position += len(found)
        return found


class Function(Tasks):
    """An ordinary function."""

    def __init__(self, module: object, name: str, arguments: dict[str, object]) -> None:
        super().__init__(getattr(module, "tasks", lambda split, seed: iter([{}])))
        self._play: Callable[..., object] = getattr(module, name)
        self._arguments = arguments

    def run(self, episode: str, task: dict[str, object], agent: dict[str, object]) -> object:
        """Play one attempt."""
        os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"] = str(agent["base_url"]), str(agent["api_key"])
        return to_outcome(self._play(SimpleNamespace(**task), SimpleNamespace(**agent), **self._arguments))


class CoroutineFunction(Function):
    """A coroutine function, of which many calls run in one process."""

    async def run(self, episode: str, task: dict[str, object], agent: dict[str, object]) -> object:
        """Play one attempt."""
        play: Callable[..., object] = self._play
        result = play(SimpleNamespace(**task), SimpleNamespace(**agent), **self._arguments)
        return to_outcome(await result if inspect.isawaitable(result) else result)


def to_task(value: object, task_id: str) -> dict[str, object]:
    """Return a task on the wire: an object with `id`, `data`, `seed`, such a dictionary, or the data alone."""
    fields: dict[str, object] = value if isinstance(value, dict) else vars(value)
    if not fields or not fields.keys() <= {"id", "data", "seed"}:
        fields = {"data": fields}
    return {"id": str(fields.get("id", task_id)), "data": fields.get("data") or {}, "seed": fields.get("seed", 0)}


def to_outcome(value: object) -> object:
    """Return an outcome on the wire."""
    if isinstance(value, dict):
        return value
    return {"reward": None if value is None else float(value)}  # type: ignore[arg-type]


def open_environment(name: str, arguments: dict[str, object]) -> Function:
    """Return the environment of `module:function`."""
    module_name, _, function_name = name.partition(":")
    module = importlib.import_module(module_name)
    is_coroutine = inspect.iscoroutinefunction(getattr(module, function_name))
    return (CoroutineFunction if is_coroutine else Function)(module, function_name, arguments)
