"""Play planned attempts: so many tasks of an environment, each so many times, so many of them at a time.

Each attempt is an episode of the service. An attempt that is lost, by the environment or by what it runs on, is
repeated once. A run has a name: one of the same name, played again, goes on where the first one was ended.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import cast

from alignment.environments.episode_loop import check_reward
from alignment.environments.errors import AgentFailure, InfrastructureFailure, ServiceRefusal, describe_error
from alignment.environments.protocols import Agent, Environment, Limits, Outcome, Reason, StepReward, Task
from alignment.environments.run_summary import LOST, Result, RunSummary, summarize
from alignment.environments.service_client import CreatedEpisode, EpisodeRecord, NewEpisode, ServiceClient

log = logging.getLogger(__name__)
MAX_TRIES = 2  # of a planned attempt; the service has no more places in a group
LIMIT_REASONS = frozenset({"max_turns", "max_tokens", "deadline"})
HANG_SECONDS = 300.0  # beyond the deadline: an environment that has not ended by then hangs
END_SECONDS = 10.0  # to report what an interrupted run leaves


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
class Place:
    """One planned attempt: the n-th of a task."""

    task: Task
    number: int


class EnvironmentRun:
    """A run. `results` are the attempts so far, also if it is interrupted; `on_result` is called with each."""

    def __init__(
        self,
        environment: Environment,
        service: ServiceClient,
        plan: RunPlan,
        on_result: Callable[[Result], None] | None = None,
    ) -> None:
        self._environment = environment
        self._service = service
        self._plan = plan
        self._on_result = on_result
        self._started = time.monotonic()
        self._num_lost = 0
        self._is_complete = False
        self.results: list[Result] = []

    async def run(self) -> RunSummary:
        """Play all attempts. Raises InfrastructureFailure or ServiceRefusal if the service cannot be used at all.

        Cancelled, it ends its open episodes as abandoned, so that nothing is learned from a part of one.
        """
        self._started = time.monotonic()
        places = self._places()
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._plan.concurrency):
                    group.create_task(self._work(places))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        self._is_complete = True
        return self.summary()

    def summary(self) -> RunSummary:
        seconds = time.monotonic() - self._started
        return summarize(self._plan.name, self.results, self._num_lost, seconds, is_complete=self._is_complete)

    def _places(self) -> Iterator[Place]:
        """Yield the attempts, those of a task one after another, so that a group is ready early."""
        plan = self._plan
        seen: set[str] = set()
        for task in islice(self._environment.tasks(plan.split, plan.seed), plan.num_tasks):
            if task.id in seen:
                raise ValueError(f"the environment has two tasks with the id {task.id!r}")
            seen.add(task.id)
            yield from (Place(task, number) for number in range(plan.group_size))

    async def _work(self, places: Iterator[Place]) -> None:
        for place in places:
            for number in range(MAX_TRIES):
                result = await self._attempt(place, number)
                self.results.append(result)
                if self._on_result is not None:
                    self._on_result(result)
                if not result.is_lost:
                    break
            else:
                self._num_lost += 1

    async def _attempt(self, place: Place, number: int) -> Result:
        created = await self._service.create(self._new_episode(place.task), self._idempotency_key(place, number))
        if not created.is_open:
            return _replayed(place.task, created)
        try:
            if created.is_replay:  # of a run that was killed; its world is gone
                return await self._report(place.task, created, Outcome(None, reason="abandoned"), None)
            outcome, error = await self._play(place.task, created)
            return await self._report(place.task, created, outcome, error)
        except asyncio.CancelledError:
            await self._abandon(created)
            raise

    def _new_episode(self, task: Task) -> NewEpisode:
        plan = self._plan
        group = (f"{plan.name}/{task.id}", plan.group_size) if plan.group_size > 1 else None
        metadata = {**plan.metadata, "run": plan.name, "split": plan.split, "seed": str(plan.seed)}
        return NewEpisode(plan.policy, task.id, plan.limits, plan.version, group, metadata)

    def _idempotency_key(self, place: Place, number: int) -> str:
        name = f"{self._plan.name}\n{place.task.id}\n{place.number}\n{number}"
        return hashlib.sha256(name.encode()).hexdigest()

    async def _play(self, task: Task, created: CreatedEpisode) -> tuple[Outcome, str | None]:
        """Return how the attempt went, and the error that ended it."""
        limits = self._plan.limits
        url = self._service.base_url(created.id)
        agent = Agent(url, created.api_key, self._plan.policy, episode_id=created.id, limits=limits)
        try:
            async with asyncio.timeout(limits.deadline_seconds + HANG_SECONDS):
                outcome = await self._environment.run(task, agent)
            _check(outcome)
        except AgentFailure as error:
            return Outcome(None, reason="failed"), describe_error(error)
        except Exception as error:
            log.info("attempt_failed", extra={"episode": created.id, "task": task.id}, exc_info=True)
            return await self._outcome_after(created), describe_error(error)
        return outcome, None

    async def _outcome_after(self, created: CreatedEpisode) -> Outcome:
        """Return the outcome of an attempt whose environment has raised an error.

        If a limit had ended the episode, its chats were refused, and the error is likely to say so. Such an attempt is
        not left out: those that reach limits are the longest.
        """
        record = await self._service.read(created.id)
        if record.end_reason in LIMIT_REASONS:
            return Outcome(0.0, reason=cast("Reason", record.end_reason))
        return Outcome(None, reason="infrastructure")

    async def _report(self, task: Task, created: CreatedEpisode, outcome: Outcome, error: str | None) -> Result:
        if outcome.reason in LOST:
            outcome = Outcome(None, (), outcome.metrics, outcome.reason)
        if outcome.step_rewards and (refusal := await self._service.reward_steps(outcome.step_rewards)) is not None:
            error, outcome = refusal, Outcome(None, (), outcome.metrics, "infrastructure")
        record = await self._service.end(created.id, outcome)
        return Result(
            task=task.id,
            episode_id=created.id,
            reason=outcome.reason,
            reward=_total(outcome),
            num_turns=record.num_turns,
            num_tokens=record.num_tokens,
            metrics=dict(outcome.metrics),
            error=error,
        )

    async def _abandon(self, created: CreatedEpisode) -> None:
        """End an episode that the run does not finish. If the service does not hear of it, its deadline ends it."""
        with suppress(InfrastructureFailure, ServiceRefusal, TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                await self._service.end(created.id, Outcome(None, reason="abandoned"))


def _replayed(task: Task, record: EpisodeRecord) -> Result:
    reason = cast("Reason", "abandoned" if record.end_reason == "idle_timeout" else record.end_reason)
    reward = None if reason in LOST else record.outcome
    return Result(task.id, record.id, reason, reward, record.num_turns, record.num_tokens, is_replay=True)


def _check(outcome: Outcome) -> None:
    """Raises ValueError for a reward that the service would refuse."""
    rewards: list[StepReward] = list(outcome.step_rewards)
    for reward in (*(step.reward for step in rewards), *(() if outcome.reward is None else (outcome.reward,))):
        check_reward(reward)


def _total(outcome: Outcome) -> float | None:
    """Return the outcome and the rewards of the steps together; None if there is neither."""
    of_steps = [step.reward for step in outcome.step_rewards]
    if outcome.reward is None and not of_steps:
        return None
    return sum(of_steps) + (outcome.reward or 0.0)
