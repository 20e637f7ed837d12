"""Play planned attempts: so many tasks of an environment, each so many times, so many of them at a time.

Each attempt is an episode of the service. An attempt that is lost, by the environment or by what it runs on, is
repeated once; one that was interrupted is repeated, too. A run has a name: one of the same name, played again, goes on
where the first one was ended.
"""

import asyncio
import hashlib
import logging
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import NamedTuple, cast

from alignment.environments.agent_chat import LIMIT_BY_CODE
from alignment.environments.attempts import Described, UsesService, check_description
from alignment.environments.episode_loop import check_reward
from alignment.environments.errors import (
    AgentFailure,
    EnvironmentFailure,
    InfrastructureFailure,
    ServiceRefusal,
    describe_with_place,
    format_failure,
    with_causes,
)
from alignment.environments.protocols import Agent, Environment, HasPlaces, Outcome, Reason, StepReward, Task
from alignment.environments.run_plan import PlannedAttempt, PlannedAttempts, RunPlan
from alignment.environments.run_summary import LOST, Result, RunSummary, summarize
from alignment.environments.service_client import CreatedEpisode, EpisodeRecord, NewEpisode, ServiceClient
from alignment.errors import UnavailableEnvironment

log = logging.getLogger(__name__)
MAX_TRIES = 2  # of a planned attempt, beside those that were interrupted
GROUP_IS_FULL = "episode_group_full"  # it has twice its size, interrupted attempts included
ENDED_BY_TIME = frozenset({"deadline", "idle_timeout"})
ENDED_BY_SERVICE = ENDED_BY_TIME | {"max_turns", "max_tokens"}
REFUSAL = re.compile("|".join((r"\b409\b", *filter(None, LIMIT_BY_CODE))))  # in an error of a client of OpenAI's API
HANG_SECONDS = 300.0  # beyond the deadline: an environment that has not ended by then hangs
OTHER_BODY = "idempotency_key_reused"  # the same attempt was begun with another request
END_SECONDS = 10.0  # to report what an interrupted run leaves


class _Failure(NamedTuple):
    """What ended an attempt, in a line, and with the traceback of the environment's code."""

    error: str
    traceback: str | None = None

    @classmethod
    def of(cls, error: BaseException) -> "_Failure":
        return cls(describe_with_place(error), format_failure(error))


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
        """Play all attempts. Raises InfrastructureFailure or ServiceRefusal if the service cannot be used at all, and
        UnavailableEnvironment if the environment cannot be opened.

        Cancelled, it ends its open episodes as abandoned, so that nothing is learned from a part of one.
        """
        self._started = time.monotonic()
        if isinstance(self._environment, UsesService):
            self._environment.use_service(self._service.chat_endpoint())
        concurrency = self._plan.concurrency
        if isinstance(self._environment, HasPlaces):
            concurrency = min(concurrency, await self._environment.max_concurrency())
        planned_attempts = PlannedAttempts(self._environment, self._plan)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(concurrency):
                    group.create_task(self._work(planned_attempts))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            planned_attempts.close()
        self._is_complete = True
        return self.summary()

    def summary(self) -> RunSummary:
        seconds = time.monotonic() - self._started
        return summarize(self._plan.name, self.results, self._num_lost, seconds, is_complete=self._is_complete)

    async def _work(self, planned_attempts: PlannedAttempts) -> None:
        while (planned := await planned_attempts.next()) is not None:
            if not await self._try(planned):
                self._num_lost += 1

    async def _try(self, planned: PlannedAttempt) -> bool:
        """Play until there is a result. Return whether there is one.

        An interruption costs no try, since it says nothing about the environment.
        """
        num_failed = 0
        try:
            description = await self._describe(planned)
        except UnavailableEnvironment:
            raise  # so is every other attempt
        except Exception as error:
            self._add(_undescribed(planned.task, error))
            return False
        for number in count():
            try:
                result = await self._attempt(planned, number, description)
            except ServiceRefusal as refusal:
                if refusal.code != GROUP_IS_FULL:
                    raise
                return False  # interruptions have taken its places
            self._add(replace(result, user=description.get("user")))
            if not result.is_lost:
                return True
            num_failed += result.reason == "infrastructure" or not result.is_replay
            if num_failed == MAX_TRIES:
                return False
        raise AssertionError("unreachable")

    def _add(self, result: Result) -> None:
        self.results.append(result)
        if self._on_result is not None:
            self._on_result(result)

    async def _describe(self, planned: PlannedAttempt) -> Mapping[str, str]:
        if not isinstance(self._environment, Described):
            return {}
        return check_description(await self._environment.describe_attempt(planned.task, planned.seed))

    async def _attempt(self, planned: PlannedAttempt, number: int, description: Mapping[str, str]) -> Result:
        created = await self._create(planned, number, description)
        if not created.is_open:
            return _replayed(planned.task, created, await self._find_loss(created))
        try:
            if created.is_replay:  # of a run that was killed; its world is gone
                return await self._report(planned.task, created, Outcome(None, reason="abandoned"), None)
            outcome, failure = await self._play(planned, created)
            return await self._report(planned.task, created, outcome, failure)
        except (asyncio.CancelledError, UnavailableEnvironment):
            await self._abandon(created)
            raise

    async def _create(self, planned: PlannedAttempt, number: int, description: Mapping[str, str]) -> CreatedEpisode:
        episode = self._new_episode(planned.task, description)
        try:
            return await self._service.create(episode, self._idempotency_key(planned, number))
        except ServiceRefusal as refusal:
            if refusal.code != OTHER_BODY:
                raise
            message = (
                "a run of this name was begun with another environment, arguments, user, seed, group or limit; "
                "give this one another name"
            )
            raise ServiceRefusal(refusal.status, refusal.code, message) from refusal

    async def _find_loss(self, created: CreatedEpisode) -> Reason | None:
        """Return why an attempt of an earlier run is lost, or None if it is not.

        The service ends what a killed run has left at its deadline. Nobody has reported that end, and so it is lost: it
        is reported now.
        """
        if created.reported_reason is None and created.end_reason in ENDED_BY_SERVICE:
            await self._abandon(created)
            return "abandoned"
        reason = created.reported_reason or created.end_reason
        return cast("Reason", reason) if reason in LOST else None

    def _new_episode(self, task: Task, description: Mapping[str, str]) -> NewEpisode:
        plan = self._plan
        group = (f"{plan.name}/{task.id}", plan.group_size) if plan.group_size > 1 else None
        metadata = {**description, **plan.metadata, "run": plan.name, "split": plan.split, "seed": str(plan.seed)}
        return NewEpisode(plan.policy, task.id, plan.limits, plan.version, group, metadata)

    def _idempotency_key(self, planned: PlannedAttempt, number: int) -> str:
        name = f"{self._plan.name}\n{planned.task.id}\n{planned.number}\n{number}"
        return hashlib.sha256(name.encode()).hexdigest()

    async def _play(self, planned: PlannedAttempt, created: CreatedEpisode) -> tuple[Outcome, _Failure | None]:
        """Return how the attempt went, and the error that ended it."""
        task, plan, url = planned.task, self._plan, self._service.base_url(created.id)
        agent = Agent(url, created.api_key, plan.policy, {}, created.id, plan.limits, planned.seed)
        try:
            outcome = await _run_in_time(self._environment, task, agent)
            _check(outcome)
        except UnavailableEnvironment:
            raise  # so is every other attempt
        except AgentFailure as error:
            return Outcome(None, reason="failed"), _Failure.of(error)
        except Exception as error:
            log.info("attempt_failed", extra={"episode": created.id, "task": task.id}, exc_info=True)
            return await self._outcome_after(created, error), _Failure.of(error)
        return outcome, None

    async def _outcome_after(self, created: CreatedEpisode, error: Exception) -> Outcome:
        """Return the outcome of an attempt whose environment has raised an error.

        If a limit had ended the episode and its chat was refused for that, the attempt has failed and is not left out:
        those that reach limits are the longest. What it is worth is the service's `rewards.episode_failure`.
        """
        if not isinstance(error, InfrastructureFailure) or isinstance(error, EnvironmentFailure):
            record = await self._service.read(created.id)
            # Only a chat reaches a limit of turns or tokens, but the service itself notices a deadline.
            if record.end_reason in ("max_turns", "max_tokens") or (
                record.end_reason in ENDED_BY_TIME and _states_refusal(error)
            ):
                return Outcome(None, reason="failed")
        return Outcome(None, reason="infrastructure")

    async def _report(self, task: Task, created: CreatedEpisode, outcome: Outcome, failure: _Failure | None) -> Result:
        if outcome.reason in LOST:
            outcome = Outcome(None, (), outcome.metrics, outcome.reason)
        if outcome.step_rewards:
            refusal = await self._service.reward_steps(outcome.step_rewards, created.api_key)
            if refusal is not None:
                failure, outcome = _Failure(refusal), Outcome(None, (), outcome.metrics, "infrastructure")
        record = await self._service.end(created.id, outcome)
        has_failed_at_limit = outcome.reason == "failed" and record.end_reason in ENDED_BY_SERVICE
        return Result(
            task=task.id,
            episode_id=created.id,
            reason=_reason_of(record) if has_failed_at_limit else outcome.reason,
            reward=_total(outcome),
            num_turns=record.num_turns,
            num_tokens=record.num_tokens,
            metrics=dict(outcome.metrics),
            is_replay=created.is_replay,
            error=failure.error if failure is not None else None,
            traceback=failure.traceback if failure is not None else None,
        )

    async def _abandon(self, created: CreatedEpisode) -> None:
        """End an episode that the run does not finish. If the service does not hear of it, its deadline ends it."""
        with suppress(InfrastructureFailure, ServiceRefusal, TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                await self._service.end(created.id, Outcome(None, reason="abandoned"))


async def _run_in_time(environment: Environment, task: Task, agent: Agent) -> Outcome:
    """Return the outcome of an attempt. Raises InfrastructureFailure for an environment that hangs."""
    try:
        async with asyncio.timeout(agent.limits.deadline_seconds + HANG_SECONDS) as limit:
            return await environment.run(task, agent)
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise InfrastructureFailure("the environment hangs: it has not ended long after the deadline") from error


def _states_refusal(error: Exception) -> bool:
    """Return whether the error, or one that it came from, says that the service has refused a chat of an episode."""
    return any(REFUSAL.search(str(one)) for one in with_causes(error))


def _reason_of(record: EpisodeRecord) -> Reason:
    """Return why an episode has ended, in the words of a run."""
    return cast("Reason", "deadline" if record.end_reason == "idle_timeout" else record.end_reason)


def _replayed(task: Task, record: EpisodeRecord, loss: Reason | None) -> Result:
    reason = loss or _reason_of(record)
    reward = None if reason in LOST else record.outcome
    return Result(task.id, record.id, reason, reward, record.num_turns, record.num_tokens, is_replay=True)


def _undescribed(task: Task, error: Exception) -> Result:
    """Return the result of an attempt that has no episode: none can be created without its metadata."""
    log.info("attempt_not_described", extra={"task": task.id}, exc_info=True)
    failure = _Failure.of(error)
    return Result(task.id, "", "infrastructure", None, 0, 0, error=failure.error, traceback=failure.traceback)


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
