"""What a run of an environment plays: so many tasks, each so many times."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice

from alignment.environments.protocols import Environment, Limits, Task


@dataclass(frozen=True)
class RunPlan:
    """What is played. `name`: of the run, and so of its groups and episodes; attempts at one task are a group.

    `concurrency` is how many attempts this process plays at a time. All else is the same in every process of the run.
    """

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
    """One planned attempt, as this process has claimed it: the n-th of a task.

    Attributes:
        number: Among the attempts at the task, from 0.
        seed: As that of an Agent.
        id: The attempt's id.
        fence: The fencing token of the claim.
    """

    task: Task
    number: int
    seed: int
    id: str
    fence: int


class TaskList:
    """The tasks of a plan, by their number. A thread lists them, as a data set, or a process, may take its time."""

    def __init__(self, environment: Environment, plan: RunPlan) -> None:
        self._source = _list_tasks(environment, plan)
        self._tasks: list[Task] = []
        self._executor = ThreadPoolExecutor(1, "tasks")  # one thread, so that the iterator is not entered twice
        self.length: int | None = None  # once the environment is known to have fewer tasks than the plan

    async def get(self, index: int) -> Task | None:
        """Return a task, or None if the environment has no such task. Raises what the environment raises."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._get, index)

    def _get(self, index: int) -> Task | None:
        missing = index + 1 - len(self._tasks)
        if missing > 0:
            self._tasks += islice(self._source, missing)
        if index < len(self._tasks):
            return self._tasks[index]
        self.length = len(self._tasks)
        return None

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)


def _list_tasks(environment: Environment, plan: RunPlan) -> Iterator[Task]:
    seen: set[str] = set()
    for task in environment.tasks(plan.split, plan.seed):
        if task.id in seen:
            raise ValueError(f"the environment has two tasks with the id {task.id!r}")
        seen.add(task.id)
        yield task
