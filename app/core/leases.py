"""Leases: a unit of work is a row with an owner, a deadline, an attempt count and a fencing token.

The life cycle of a leased row:

1. `claim` takes the row, counts the attempt and returns a new fencing token.
2. `keep_renewed` extends the deadline in the background while the work runs, and ends the work when the lease is lost.
3. `finish` writes the result and releases the row, unless another worker has claimed it since.

A worker that dies or hangs loses its lease at the deadline, and another one claims the row. Deadlines are on the
database's clock.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

from sqlalchemy import ColumnElement, Float, Select, String, or_, select, update
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Mapped, mapped_column

from app.core.database import Database, now
from app.core.db_timeouts import time_limit

log = logging.getLogger("attune.lease")


class LeaseLost(Exception):
    """Another worker has claimed the row: the result must not be written."""


class LeaseMixin:
    """The columns of a leased row. `fence` is the fencing token: it grows with every claim."""

    lease_owner: Mapped[str | None] = mapped_column(String(128))
    lease_until: Mapped[float | None] = mapped_column(Float)
    heartbeat_at: Mapped[float | None] = mapped_column(Float)
    attempt: Mapped[int] = mapped_column(default=0)
    fence: Mapped[int] = mapped_column(default=0)

    if TYPE_CHECKING:  # what a leased table has beside these columns
        __tablename__: str
        id: Mapped[str]
        state: Mapped[str]


LeasedT = TypeVar("LeasedT", bound=LeaseMixin)


def lease_is_free(model: type[LeaseMixin]) -> ColumnElement[bool]:
    """Return the condition that no lease on the row is in force."""
    return or_(model.lease_until.is_(None), model.lease_until < now())


def select_exhausted(model: type[LeasedT], state: str, max_attempts: int) -> Select[LeasedT]:
    """Return a query that locks the rows whose last attempt has ended without a result: they crash their workers."""
    query = select(model).where(model.state == state, model.attempt >= max_attempts, model.lease_until < now())
    return query.with_for_update(skip_locked=True)


async def claim(
    session: AsyncSession, model: type[LeaseMixin], id: str, *, owner: str, seconds: float, states: tuple[str, ...]
) -> int | None:
    """Claim a row that is in one of `states` and has no lease in force. Returns the fencing token, or None."""
    result = await session.execute(
        update(model)
        .where(model.id == id, model.state.in_(states), lease_is_free(model))
        .values(
            lease_owner=owner,
            lease_until=now() + seconds,
            heartbeat_at=now(),
            attempt=model.attempt + 1,
            fence=model.fence + 1,
        )
        .returning(model.fence)
    )
    fence: int | None = result.scalar_one_or_none()
    return fence


async def renew(session: AsyncSession, model: type[LeaseMixin], id: str, *, fence: int, seconds: float) -> bool:
    """Extend the deadline. Returns False when another worker has claimed the row."""
    return await _update(session, model, id, fence, lease_until=now() + seconds, heartbeat_at=now())


async def _update(session: AsyncSession, model: type[LeaseMixin], id: str, fence: int, **values: object) -> bool:
    """Update the row, unless another worker has claimed it since. Returns whether it was updated."""
    result = await session.execute(update(model).where(model.id == id, model.fence == fence).values(**values))
    return bool(result.rowcount)  # type: ignore[attr-defined]


@asynccontextmanager
async def keep_renewed(
    db: Database, model: type[LeaseMixin], id: str, *, fence: int, seconds: float
) -> AsyncIterator[None]:
    """Renew the lease in the background while the block runs.

    As soon as another worker has claimed the row, what the block awaits is cancelled and LeaseLost is raised: a result
    would be refused, so nothing more is paid for it.
    """
    work = asyncio.current_task()
    assert work is not None
    num_cancelled, is_lost = work.cancelling(), False

    async def renew_until_lost() -> None:
        nonlocal is_lost
        while not is_lost:
            await asyncio.sleep(seconds / 4)
            try:
                with time_limit(seconds / 4):  # a connection that hangs must leave time for the next renewal
                    async with db.write() as session:
                        is_lost = not await renew(session, model, id, fence=fence, seconds=seconds)
            except (SQLAlchemyError, OSError) as error:  # the database may be back before the lease expires
                log.warning("could not renew the lease of %s %s: %s", model.__tablename__, id, error)
        work.cancel()

    renewal = asyncio.create_task(renew_until_lost())
    try:
        yield
    except asyncio.CancelledError as error:
        if is_lost and work.uncancel() <= num_cancelled:
            raise _lease_lost(model, id, fence) from error
        raise
    finally:
        renewal.cancel()


async def finish(
    session: AsyncSession, model: type[LeaseMixin], id: str, *, fence: int, state: str, **values: object
) -> None:
    """Write the result and release the row in one statement. Raises LeaseLost when the fencing token is old."""
    if not await _update(session, model, id, fence, state=state, lease_owner=None, lease_until=None, **values):
        raise _lease_lost(model, id, fence)


def _lease_lost(model: type[LeaseMixin], id: str, fence: int) -> LeaseLost:
    return LeaseLost(f"{model.__tablename__} {id} was claimed by another worker (fence {fence} is old)")
