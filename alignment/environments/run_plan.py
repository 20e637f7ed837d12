"""What a run of an environment plays: so many tasks, each so many times."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice

from alignment.environments.attempts import derive_seed
from alignment.environments.protocols import Environment, Limits, Task


@dataclass(frozen=True)
class RunPlan:
    """What is played. `name`: of the run, and so of its groups and episodes; attempts at one task are a group."""

    name: str
    policy: str
    num_tasks: int
    group_size: int = 1
    concurrency: int = 8
    split: str = "train"
    seed: int = 0
    version: str = "follow"
    limits: Limits = field(default_factory=Limits)
    metadata: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PlannedAttempt:
    """One planned attempt: the n-th of a task. `seed`: as that of an Agent."""

    task: Task
    number: int
    seed: int


class PlannedAttempts:
    """The attempts of a plan. A thread lists their tasks, as a data set, or a process, may take its time."""

    def __init__(self, environment: Environment, plan: RunPlan) -> None:
        self._attempts = _list_attempts(environment, plan)
        self._executor = ThreadPoolExecutor(1, "tasks")  # one thread, so that the iterator is not entered twice

    async def next(self) -> PlannedAttempt | None:
        """Return the next one, or None at the end. Raises what the environment raises."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, next, self._attempts, None)

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)


def _list_attempts(environment: Environment, plan: RunPlan) -> Iterator[PlannedAttempt]:
    """Yield the attempts, those of a task one after another, so that a group is ready early."""
    seen: set[str] = set()
    for task in islice(environment.tasks(plan.split, plan.seed), plan.num_tasks):
        if task.id in seen:
            raise ValueError(f"the environment has two tasks with the id {task.id!r}")
        seen.add(task.id)
        for number in range(plan.group_size):
            yield PlannedAttempt(task, number, derive_seed(plan.seed, task.id, number))
