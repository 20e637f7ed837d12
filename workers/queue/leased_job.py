"""The life cycle of a leased job: claim rows, renew their leases, record the result under the fence or back off."""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from enum import StrEnum
from logging import Logger
from typing import Any, ClassVar, Generic, TypeVar

from sqlalchemy.ext.asyncio import AsyncSession

from app.core import leases
from app.core.database import Database, now
from app.core.jobs import TaskName, enqueue_after_commit
from app.core.leases import LeaseLost
from app.core.settings import Settings
from workers.queue.retry import backoff, log_and_continue, sanitize_text, write_with_retries

OPEN = "open"  # the state of rows that wait for work, in every table of leased jobs
RUN_SECONDS = 30.0  # then the task is enqueued again, so that a worker that is to stop can end
WORKER_LOST = "the worker stopped before it recorded a result, {} times"
log = logging.getLogger("attune.lease")


class JobSkipped(Exception):
    """The job has no result and never will."""


class JobFailed(Exception):
    """The job failed, and another attempt would fail too."""


class AttemptFailed(Exception):
    """This attempt failed; another one may succeed."""


class JobPostponed(Exception):
    """The job cannot run yet. The next attempt is due in `seconds`, and this one does not count."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"due in {seconds:g} s")
        self.seconds = seconds


class Outcome(StrEnum):
    """The final states of jobs without a result; JudgementState and RolloutState have the same values."""

    SKIPPED = "skipped"
    FAILED = "failed"


@dataclass(frozen=True)
class Lease:
    """A row that this worker holds until its lease expires. `fence` is the fencing token, `attempt` counts from 1."""

    id: str
    fence: int
    attempt: int


async def claim_row(
    session: AsyncSession, model: type[Any], row: Any, *, owner: str, settings: Settings
) -> Lease | None:
    """Claim an open row. Returns None when another worker holds it."""
    fence = await leases.claim(session, model, row.id, owner=owner, seconds=settings.lease_seconds, states=(OPEN,))
    return None if fence is None else Lease(row.id, fence, row.attempt + 1)


LeaseT = TypeVar("LeaseT", bound=Lease)
ResultT = TypeVar("ResultT")


class LeasedJob(ABC, Generic[LeaseT, ResultT]):
    """One attempt at one job, which holds the leases of one or more rows of `model`.

    Subclasses implement what the job does (`execute`) and how its outcome is written (`record`, `close`). Every write
    checks the fence, so a worker that lost its lease writes nothing.
    """

    model: ClassVar[type[Any]]

    def __init__(self, db: Database, settings: Settings, leases: Sequence[LeaseT]) -> None:
        self.db, self.settings, self.leases = db, settings, tuple(leases)

    @abstractmethod
    async def execute(self) -> ResultT:
        """Do the work, with no transaction open. Raises JobSkipped, JobFailed, AttemptFailed, JobPostponed."""

    @abstractmethod
    async def record(self, session: AsyncSession, lease: LeaseT, result: ResultT) -> None:
        """Write the result of one row. Raises LeaseLost."""

    @abstractmethod
    async def close(self, session: AsyncSession, lease: LeaseT, outcome: Outcome, reason: str) -> None:
        """Write that one row has no result. Raises LeaseLost."""

    def retry_values(self, lease: LeaseT) -> dict[str, Any]:
        """Return columns to write with a failed attempt."""
        return {}

    async def run(self) -> int:
        """Run the attempt while the leases are renewed. Returns the number of rows that reached a final state."""
        async with AsyncExitStack() as stack:
            for lease in self.leases:
                renewal = leases.keep_renewed(
                    self.db, self.model, lease.id, fence=lease.fence, seconds=self.settings.lease_seconds
                )
                await stack.enter_async_context(renewal)
            return await self._run_attempt()

    async def _run_attempt(self) -> int:
        attempt, max_attempts = self.leases[0].attempt, self.settings.max_attempts
        try:
            if attempt > max_attempts:
                raise JobFailed(WORKER_LOST.format(max_attempts))
            result = await self.execute()
        except JobPostponed as postponed:
            seconds = postponed.seconds
            await self._write_each(lambda session, lease: self._postpone(session, lease, seconds))
            return 0
        except JobSkipped as skipped:
            return await self._close_each(Outcome.SKIPPED, str(skipped))
        except JobFailed as failed:
            return await self._close_each(Outcome.FAILED, str(failed))
        except AttemptFailed as failed:
            reason = str(failed)
            if attempt >= max_attempts:
                return await self._close_each(Outcome.FAILED, reason)
            await self._write_each(lambda session, lease: self._back_off(session, lease, reason))
            return 0
        return await self._write_each(lambda session, lease: self.record(session, lease, result))

    async def _close_each(self, outcome: Outcome, reason: str) -> int:
        return await self._write_each(lambda session, lease: self.close(session, lease, outcome, reason))

    async def _write_each(self, write: Callable[[AsyncSession, LeaseT], Awaitable[None]]) -> int:
        """Write each row in a transaction of its own. Returns the number of rows whose lease was valid."""
        written = 0
        for lease in self.leases:
            try:
                await self._write(lease, write)
                written += 1
            except LeaseLost as error:
                log.warning("a result came too late: %s", error)
        return written

    async def _write(self, lease: LeaseT, write: Callable[[AsyncSession, LeaseT], Awaitable[None]]) -> None:
        await write_with_retries(self.db, lambda session: write(session, lease))

    async def _postpone(self, session: AsyncSession, lease: LeaseT, seconds: float) -> None:
        await leases.finish(
            session,
            self.model,
            lease.id,
            fence=lease.fence,
            state=OPEN,
            due_at=now() + seconds,
            attempt=lease.attempt - 1,
        )

    async def _back_off(self, session: AsyncSession, lease: LeaseT, reason: str) -> None:
        log.warning("%s %s: attempt %d failed: %s", self.model.__tablename__, lease.id, lease.attempt, reason)
        await leases.finish(
            session,
            self.model,
            lease.id,
            fence=lease.fence,
            state=OPEN,
            due_at=now() + backoff(lease.attempt),
            reason=sanitize_text(reason),
            **self.retry_values(lease),
        )


JobT = TypeVar("JobT", bound=LeasedJob[Any, Any])


async def run_jobs(
    db: Database,
    task: TaskName,
    claim_jobs: Callable[[Collection[JobT]], Awaitable[Sequence[JobT]]],
    *,
    poll_seconds: float,
    log: Logger,
) -> int:
    """Claim jobs and run them at the same time until none is left. Returns the number of rows in a final state.

    `claim_jobs` gets the jobs that are running and is called again every `poll_seconds`. After RUN_SECONDS no job is
    claimed any more and `task` is enqueued. A job that raises is logged: its lease expires, and it is claimed again.
    """
    deadline = time.monotonic() + RUN_SECONDS
    running: dict[asyncio.Task[int], JobT] = {}
    finished = 0
    try:
        while True:
            is_over = time.monotonic() > deadline
            if not is_over:
                for job in await claim_jobs(running.values()):
                    running[asyncio.create_task(job.run())] = job
            if not running:
                break
            done, _ = await asyncio.wait(running, timeout=poll_seconds, return_when=asyncio.FIRST_COMPLETED)
            for attempt in done:
                del running[attempt]
                finished += await log_and_continue(attempt, log, "a result could not be recorded")
    finally:
        for attempt in running:
            attempt.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    if is_over:
        async with db.write() as session:
            enqueue_after_commit(session, task)
    return finished
