"""Leased jobs: claim rows, renew their leases, write the result under the fence, or back off and try again.

A leased row is its own claim: after `claim_row` it holds the fencing token and the number of the attempt.
"""

import asyncio
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from logging import Logger
from typing import Any, Concatenate, Generic, ParamSpec, TypeAlias, TypeVar

from sqlalchemy import ColumnElement, and_, update
from sqlalchemy.exc import IntegrityError, OperationalError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm.attributes import set_committed_value

from app.core import leases
from app.core.database import Database, now
from app.core.jobs import TaskName, enqueue_after_commit
from app.core.leases import LeaseLost, LeaseMixin, lease_is_free
from app.core.request_log import add_log_fields
from app.core.settings import Settings
from app.models import Judgement, Rollout, WebhookDelivery

OPEN = "open"  # the state of rows that wait for work, in every table of leased jobs
RUN_SECONDS = 30.0  # then the task is enqueued again, so that other tasks of this worker get their turn
STOP_SECONDS = 2.0  # that jobs have to end when the worker is told to stop; then other workers continue with them
WORKER_LOST = "the worker stopped before it recorded a result, {} times"
FIRST_DELAY_SECONDS = 5.0
DELAY_GROWTH = 4.0
MAX_DELAY_SECONDS = 600.0
MAX_REASON_LENGTH = 1000
TRANSACTION_ATTEMPTS = 3
is_stopping = threading.Event()  # this process was told to stop: its jobs are handed over
log = logging.getLogger("attune.lease")
trainer_log = logging.getLogger("attune.trainer")  # the trainer alone uses Heartbeat
LeasedRow: TypeAlias = Judgement | Rollout | WebhookDelivery
RowT = TypeVar("RowT", bound=LeasedRow)
ResultT = TypeVar("ResultT")
P = ParamSpec("P")


class JobEnded(Exception):
    """The job has no result and never will. `state` is the row's final state."""

    state: str


class JobSkipped(JobEnded):
    """There is nothing to do."""

    state = "skipped"


class JobFailed(JobEnded):
    """The job failed, and another attempt would fail too."""

    state = "failed"


class AttemptFailed(Exception):
    """This attempt failed; another one may succeed."""


class JobPostponed(Exception):
    """The job cannot run yet. The next attempt is due in `seconds`, and this one does not count."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"due in {seconds:g} s")
        self.seconds = seconds


def is_due(model: type[LeasedRow]) -> ColumnElement[bool]:
    """Return the condition that a row waits for work, is due, and is held by no worker."""
    return and_(model.state == OPEN, model.due_at <= now(), lease_is_free(model))


async def claim_row(session: AsyncSession, row: LeasedRow, owner: str, settings: Settings) -> bool:
    """Claim an open row, and set its fencing token and attempt. Returns False when another worker holds it."""
    fence = await leases.claim(
        session, type(row), row.id, owner=owner, seconds=settings.workers.lease_seconds, states=(OPEN,)
    )
    if fence is not None:
        set_committed_value(row, "fence", fence)
        set_committed_value(row, "attempt", row.attempt + 1)
    return fence is not None


async def finish_row(
    session: AsyncSession, row: LeasedRow, state: str, reason: str | None = None, **values: object
) -> None:
    """Write the final state of a row under its fence. Raises LeaseLost."""
    reason = None if reason is None else sanitize_text(reason)
    await leases.finish(
        session, type(row), row.id, fence=row.fence, state=state, reason=reason, settled_at=now(), **values
    )


async def _release_row(session: AsyncSession, row: LeasedRow, delay: float, **values: object) -> None:
    """Leave a row to the next attempt, which is due in `delay` seconds. Raises LeaseLost."""
    due_at = now() + delay
    await leases.finish(session, type(row), row.id, fence=row.fence, state=OPEN, due_at=due_at, **values)


class LeasedJob(ABC, Generic[RowT, ResultT]):
    """One attempt at one job, which holds the leases of one or more rows.

    Subclasses implement what the job does (`execute`) and how its outcome is written (`record`, `close`). Every write
    checks the fence, so a worker that lost its lease writes nothing.
    """

    def __init__(self, db: Database, settings: Settings, rows: Sequence[RowT]) -> None:
        self.db, self.settings, self.rows = db, settings, tuple(rows)

    @abstractmethod
    async def execute(self) -> ResultT:
        """Do the work, with no transaction open. Raises JobSkipped, JobFailed, AttemptFailed, JobPostponed."""

    @abstractmethod
    async def record(self, session: AsyncSession, row: RowT, result: ResultT) -> None:
        """Write the result of one row. Raises LeaseLost."""

    @abstractmethod
    async def close(self, session: AsyncSession, row: RowT, state: str, reason: str) -> None:
        """Write that one row has no result, with its final state. Raises LeaseLost."""

    def retry_values(self, row: RowT) -> dict[str, object]:
        """Return columns to write with a failed attempt."""
        return {}

    @property
    def max_attempts(self) -> int:
        return self.settings.workers.max_attempts

    def retry_delay(self, attempt: int) -> float:
        """Return the seconds to wait after `attempt` failed attempts."""
        return backoff(attempt)

    async def run(self) -> int:
        """Run the attempt while the leases are renewed. Returns the number of rows that reached a final state.

        If one lease is lost, the attempt ends, and the other rows are handed over.
        """
        first = self.rows[0]
        add_log_fields(job=first.id, **({"turn": first.turn_id} if isinstance(first, Judgement) else {}))
        try:
            async with AsyncExitStack() as stack:
                for row in self.rows:
                    renewal = leases.keep_renewed(
                        self.db, type(row), row.id, fence=row.fence, seconds=self.settings.workers.lease_seconds
                    )
                    await stack.enter_async_context(renewal)
                return await self._run_attempt()
        except LeaseLost as error:
            log.warning("the work was ended: %s", error)
            await self.hand_over()
            return 0

    async def hand_over(self) -> int:
        """Release the rows that have no result yet, and return how many those are.

        They are due at once, and this attempt does not count.
        """
        num_released = 0
        async with self.db.write() as session:
            for row in self.rows:
                model = type(row)
                is_own = (model.id == row.id, model.fence == row.fence, model.state == OPEN)
                values = {"lease_owner": None, "lease_until": None, "due_at": now(), "attempt": row.attempt - 1}
                result = await session.execute(update(model).where(*is_own).values(values))
                num_released += result.rowcount  # type: ignore[attr-defined]
        return num_released

    async def _run_attempt(self) -> int:
        attempt, max_attempts = self.rows[0].attempt, self.max_attempts
        try:
            if attempt > max_attempts:
                raise JobFailed(WORKER_LOST.format(max_attempts))
            result = await self.execute()
        except JobPostponed as postponed:
            await self._write_each(self._postpone, postponed.seconds)
            return 0
        except AttemptFailed as error:
            if attempt < max_attempts:
                await self._write_each(self._back_off, str(error))
                return 0
            return await self._write_each(self.close, JobFailed.state, str(error))
        except JobEnded as end:
            return await self._write_each(self.close, end.state, str(end))
        return await self._write_each(self.record, result)

    async def _write_each(
        self, write: Callable[Concatenate[AsyncSession, RowT, P], Awaitable[None]], *args: P.args, **options: P.kwargs
    ) -> int:
        """Call `write(session, row, *args)` for each row, in a transaction of its own that is retried on a conflict.

        Returns the number of rows whose lease was valid.
        """
        written = 0
        for row in self.rows:
            try:
                await self._write(row, write, *args, **options)
                written += 1
            except LeaseLost as error:
                log.warning("a result came too late: %s", error)
        return written

    async def _write(
        self,
        row: RowT,
        write: Callable[Concatenate[AsyncSession, RowT, P], Awaitable[None]],
        *args: P.args,
        **options: P.kwargs,
    ) -> None:
        for attempts_left in reversed(range(TRANSACTION_ATTEMPTS)):
            try:
                async with self.db.write() as session:
                    await write(session, row, *args, **options)
                return
            except (IntegrityError, OperationalError):
                if not attempts_left:
                    raise

    async def _postpone(self, session: AsyncSession, row: RowT, seconds: float) -> None:
        await _release_row(session, row, seconds, attempt=row.attempt - 1)

    async def _back_off(self, session: AsyncSession, row: RowT, reason: str) -> None:
        log.warning("%s %s: attempt %d failed: %s", row.__tablename__, row.id, row.attempt, reason)
        values = {"reason": sanitize_text(reason), **self.retry_values(row)}
        await _release_row(session, row, self.retry_delay(row.attempt), **values)


JobT = TypeVar("JobT", bound=LeasedJob[Any, Any])


async def run_jobs(
    db: Database,
    task: TaskName,
    claim_jobs: Callable[[Collection[JobT]], Awaitable[Sequence[JobT]]],
    *,
    poll_seconds: float,
) -> int:
    """Claim jobs and run them at the same time until none is left. Returns the number of rows in a final state.

    `claim_jobs` gets the jobs that are running and is called again every `poll_seconds`. After RUN_SECONDS no job is
    claimed any more and `task` is enqueued. A job that raises is logged: its lease expires, and it is claimed again.
    When the process is told to stop (`is_stopping`), jobs that do not end within STOP_SECONDS are handed over.
    """
    task_log = logging.getLogger(f"attune.{task}")
    deadline = time.monotonic() + RUN_SECONDS
    running: dict[asyncio.Task[int], JobT] = {}
    finished = 0
    try:
        while True:
            if is_stopping.is_set():
                deadline = min(deadline, time.monotonic())
            is_over = time.monotonic() >= deadline
            if is_stopping.is_set() and time.monotonic() - deadline > STOP_SECONDS:
                break
            if not is_over:
                for job in await claim_jobs(running.values()):
                    running[asyncio.create_task(job.run())] = job
            if not running:
                break
            done, _ = await asyncio.wait(running, timeout=poll_seconds, return_when=asyncio.FIRST_COMPLETED)
            for attempt in done:
                del running[attempt]
                finished += await log_and_continue(attempt, task_log, "a result could not be recorded")
    finally:
        for attempt in running:
            attempt.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for job in running.values():
            await log_and_continue(job.hand_over(), task_log, "a job could not be handed over; its lease expires")
    if is_over:
        async with db.write() as session:
            enqueue_after_commit(session, task)
    return finished


class Heartbeat:
    """Context manager that renews the leases of rows of one table, from a thread and a connection of its own.

    It is for work that blocks the event loop. `fences` maps the id of each row to its fencing token.
    """

    def __init__(self, settings: Settings, model: type[LeaseMixin], fences: Mapping[str, int]) -> None:
        self._settings, self._model, self._fences = settings, model, fences
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        interval, db = self._settings.workers.lease_seconds / 4, None
        with asyncio.Runner() as runner:
            while not self._stop.wait(interval):  # most updates end before the first renewal is due
                # A renewal that hangs must leave time for the next one.
                db = db or Database(self._settings.database_url, seconds=max(0.5, interval))
                try:
                    runner.run(self._renew(db))
                except (SQLAlchemyError, OSError) as error:
                    trainer_log.warning("%s: the lease was not renewed (%s)", self._model.__tablename__, error)
            if db is not None:
                runner.run(db.close())

    async def _renew(self, db: Database) -> None:
        async with db.write() as session:
            for id, fence in self._fences.items():
                await leases.renew(session, self._model, id, fence=fence, seconds=self._settings.workers.lease_seconds)


def backoff(attempt: int) -> float:
    """Return the seconds to wait after `attempt` failed attempts. Example: 5, 20, 80, 320, 600, 600 …"""
    return min(FIRST_DELAY_SECONDS * DELAY_GROWTH ** (attempt - 1), MAX_DELAY_SECONDS)


async def log_and_continue(work: Awaitable[int], log: Logger, message: str, *args: str) -> int:
    """Return the result of `work`, or log `message` with the traceback and return 0 when it raises an exception."""
    try:
        return await work
    except Exception:
        log.exception(message, *args)
        return 0


def sanitize_text(text: str) -> str:
    """Return the text without characters that a database refuses, cut to MAX_REASON_LENGTH characters."""
    return text.replace("\x00", "\ufffd").encode("utf-8", "replace").decode()[:MAX_REASON_LENGTH]
