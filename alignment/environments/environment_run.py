"""Play planned attempts: so many tasks of an environment, each so many times, so many of them at a time.

The service hands the attempts out, each to one process, and each is an episode. An attempt that is lost, by the
environment or by what it runs on, is repeated once; one that was interrupted, or whose process has died, is played
again by any process of the run.
"""

import asyncio
import logging
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple, cast
from uuid import uuid4

from alignment.environments.agent_chat import LIMIT_BY_CODE
from alignment.environments.attempt_claims import AttemptClaims
from alignment.environments.attempts import Described, UsesService, check_description, derive_seed
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
from alignment.environments.run_client import LEASE_LOST, RunClient, RunRecord, digest_description
from alignment.environments.run_leases import RunLeases
from alignment.environments.run_plan import PlannedAttempt, RunPlan, TaskList
from alignment.environments.run_summary import LOST, Result, RunSummary, summarize
from alignment.environments.service_client import CreatedEpisode, EpisodeRecord, ServiceClient
from alignment.errors import UnavailableEnvironment

log = logging.getLogger(__name__)
ENDED_BY_TIME = frozenset({"deadline", "idle_timeout"})
ENDED_BY_SERVICE = ENDED_BY_TIME | {"max_turns", "max_tokens"}
REFUSAL = re.compile("|".join((r"\b409\b", *filter(None, LIMIT_BY_CODE))))  # in an error of a client of OpenAI's API
HANG_SECONDS = 300.0  # beyond the deadline: an environment that has not ended by then hangs
TAKEN_OVER = "the service has handed the attempt to another process: its lease had run out"


class _Failure(NamedTuple):
    """What ended an attempt, in a line, and with the traceback of the environment's code."""

    error: str
    traceback: str | None = None

    @classmethod
    def of(cls, error: BaseException) -> "_Failure":
        return cls(describe_with_place(error), format_failure(error))


class EnvironmentRun:
    """A run, as far as this process plays it. `results` are its attempts so far, also if it is interrupted;
    `on_result` is called with each."""

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
        self._client = RunClient(service, plan.name)
        self._on_result = on_result
        self._started = time.monotonic()
        self._record: RunRecord | None = None
        self.results: list[Result] = []

    async def run(self) -> RunSummary:
        """Play attempts until none of the run is left, those of other processes included. Raises InfrastructureFailure
        or ServiceRefusal if the service cannot be used at all, and UnavailableEnvironment if the environment cannot be
        opened.

        Cancelled, it gives its open attempts back: nothing is learned from a part of one.
        """
        self._started = time.monotonic()
        if isinstance(self._environment, UsesService):
            self._environment.use_service(self._service.chat_endpoint())
        concurrency = self._plan.concurrency
        if isinstance(self._environment, HasPlaces):
            concurrency = min(concurrency, await self._environment.max_concurrency())
        tasks = TaskList(self._environment, self._plan)
        try:
            joined = await self._client.join(self._plan, await self._digest_description(tasks))
            with RunLeases(self._service, self._plan.name, joined.lease_seconds) as leases:
                claims = AttemptClaims(self._client, leases, tasks, self._plan.seed, joined.lease_seconds)
                owner = uuid4().hex
                async with asyncio.TaskGroup() as group:
                    for number in range(concurrency):
                        group.create_task(self._work(claims, f"{owner}/{number}"))
            self._record = await self._client.read()
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            tasks.close()
        return self.summary()

    def summary(self) -> RunSummary:
        return summarize(self._plan.name, self.results, time.monotonic() - self._started, self._record)

    async def _digest_description(self, tasks: TaskList) -> str | None:
        """Return the digest of what the environment says of its first attempt; None if it cannot say it now."""
        if not isinstance(self._environment, Described) or (task := await tasks.get(0)) is None:
            return None
        try:
            return digest_description(await self._describe(task, derive_seed(self._plan.seed, task.id, 0)))
        except UnavailableEnvironment:
            raise  # so is every attempt
        except Exception:  # it is raised again by the attempt, which reports it
            return None

    async def _work(self, claims: AttemptClaims, owner: str) -> None:
        while (planned := await claims.next(owner)) is not None:
            async with claims.hold(planned):
                self._add(await self._try(planned))

    async def _try(self, planned: PlannedAttempt) -> Result:
        """Play an attempt and report it."""
        try:
            try:
                description = await self._describe(planned.task, planned.seed)
            except UnavailableEnvironment:
                raise  # so is every other attempt
            except Exception as error:
                await self._client.finish(planned, Outcome(None, reason="infrastructure"))
                return _undescribed(planned.task, error)
            created = await self._client.start(planned, description)
            outcome, failure = await self._play(planned, created)
            result = await self._report(planned, created, outcome, failure)
            return replace(result, user=description.get("user"))
        except ServiceRefusal as refusal:
            if refusal.code != LEASE_LOST:
                raise
            return Result(planned.task.id, "", "abandoned", None, 0, 0, error=TAKEN_OVER)

    def _add(self, result: Result) -> None:
        self.results.append(result)
        if self._on_result is not None:
            self._on_result(result)

    async def _describe(self, task: Task, seed: int) -> Mapping[str, str]:
        if not isinstance(self._environment, Described):
            return {}
        return check_description(await self._environment.describe_attempt(task, seed))

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

    async def _report(
        self, planned: PlannedAttempt, created: CreatedEpisode, outcome: Outcome, failure: _Failure | None
    ) -> Result:
        if outcome.reason in LOST:
            outcome = Outcome(None, (), outcome.metrics, outcome.reason)
        if outcome.step_rewards:
            refusal = await self._service.reward_steps(outcome.step_rewards, created.api_key)
            if refusal is not None:
                failure, outcome = _Failure(refusal), Outcome(None, (), outcome.metrics, "infrastructure")
        record = await self._client.finish(planned, outcome) or await self._service.read(created.id)
        has_failed_at_limit = outcome.reason == "failed" and record.end_reason in ENDED_BY_SERVICE
        return Result(
            task=planned.task.id,
            episode_id=created.id,
            reason=_reason_of(record) if has_failed_at_limit else outcome.reason,
            reward=_total(outcome),
            num_turns=record.num_turns,
            num_tokens=record.num_tokens,
            metrics=dict(outcome.metrics),
            error=failure.error if failure is not None else None,
            traceback=failure.traceback if failure is not None else None,
        )


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
