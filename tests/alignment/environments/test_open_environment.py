"""Environments by name: classes of the three kinds, instances, functions, schemes, and what is none of these."""

from collections.abc import Iterator

import pytest

from alignment.environments import open_environment as module
from alignment.environments.episode_loop import LoopEnvironment
from alignment.environments.open_environment import NoEnvironment, environment_names, open_environment
from alignment.environments.protocols import Environment, Task
from alignment.environments.tools.base import JsonObject
from alignment.errors import UnknownExtension
from tests.support.environments import Faulty

HERE = "tests.support.environments"


@pytest.mark.parametrize("name", ["Rooms", "Endless", "arithmetic"])
def test_worlds_become_environments_with_our_loop(name: str) -> None:
    path = "examples.arithmetic_tutor:ArithmeticTutor" if name == "arithmetic" else f"{HERE}:{name}"
    environment = open_environment(path)
    assert isinstance(environment, LoopEnvironment)
    tasks = environment.tasks("train", 3)
    assert next(tasks).id != next(tasks).id
    assert next(environment.tasks("train", 3)) == next(environment.tasks("train", 3))


def test_environments_are_made_with_their_arguments() -> None:
    environment = open_environment(f"{HERE}:Faulty", {"faults": ["raise"]})
    assert isinstance(environment, Faulty) and environment.faults == ["raise"]


def test_class_with_the_same_methods_needs_no_base() -> None:
    assert isinstance(open_environment(f"{__name__}:Duck"), Duck)
    assert isinstance(open_environment(f"{__name__}:make_duck"), Duck)
    assert isinstance(open_environment(f"{__name__}:DUCK"), Duck)


def test_scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[tuple[str, JsonObject]] = []

    def open_scheme(rest: str, arguments: JsonObject) -> Environment:
        opened.append((rest, arguments))
        return Faulty([])

    monkeypatch.setitem(module.SCHEMES, "game", open_scheme)
    assert isinstance(open_environment("game:chess:blitz", {"level": 2}), Faulty)
    assert opened == [("chess:blitz", {"level": 2})] and "game:" in environment_names()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (f"{HERE}:Faulty", "missing a required argument: 'faults'"),
        (f"{HERE}:PLAN", "RunPlan, which lacks a method of Environment"),
        (f"{HERE}:ServiceHttp", "lacks methods of Environment: tasks, run; of Steps: tasks, reset, step; of Inter"),
    ],
)
def test_what_is_no_environment(name: str, message: str) -> None:
    with pytest.raises(NoEnvironment, match=message):
        open_environment(name)


@pytest.mark.parametrize("name", ["nowhere", "nowhere:Nothing", f"{HERE}:Nothing"])
def test_what_is_not_found(name: str) -> None:
    with pytest.raises(UnknownExtension):
        open_environment(name)


class Duck:
    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        return iter(())

    async def run(self, task: Task, agent: object) -> object:
        raise NotImplementedError

    async def close(self) -> None: ...


DUCK = Duck()


def make_duck() -> Duck:
    return DUCK
