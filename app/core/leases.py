"""A lease: work is a row with an owner, a deadline on the database's clock, an attempt count and a fencing token."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from sqlalchemy import ColumnElement, Float, Integer, Select, String, or_, select, update
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Mapped, mapped_column

from app.core.database import Database, now
from app.core.db_timeouts import within

log = logging.getLogger("attune.lease")


class LeaseLost(Exception):
    """Somebody else holds this row now; what was computed for it must not be written."""


class LeaseMixin:
    lease_owner: Mapped[str | None] = mapped_column(String(128))
    lease_until: Mapped[float | None] = mapped_column(Float)
    heartbeat_at: Mapped[float | None] = mapped_column(Float)
    attempt: Mapped[int] = mapped_column(Integer, default=0)
    fence: Mapped[int] = mapped_column(Integer, default=0)


def lease_is_free(model: type[LeaseMixin]) -> ColumnElement[bool]:
    """Nobody's lease on the row runs."""
    return or_(model.lease_until.is_(None), model.lease_until < now())


def select_exhausted(model: type[Any], state: str, most: int) -> Select[Any]:
    """Rows whose every attempt ended without a word: they have taken down whoever held them."""
    wanted = select(model).where(model.state == state, model.attempt >= most, model.lease_until < now())
    return wanted.with_for_update(skip_locked=True)


async def claim(
    session: AsyncSession, model: type[Any], id: str, *, owner: str, seconds: float, states: tuple[str, ...]
) -> int | None:
    """Take the row if it is in one of `states` and nobody's lease on it still runs. Returns the fence, or None."""
    taken = await session.execute(
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
        .execution_options(synchronize_session=False)
    )
    fence: int | None = taken.scalar_one_or_none()
    return fence


async def renew(session: AsyncSession, model: type[Any], id: str, *, fence: int, seconds: float) -> bool:
    """Push the deadline out. False when the row has gone to another owner."""
    done = await session.execute(
        update(model)
        .where(model.id == id, model.fence == fence)
        .values(lease_until=now() + seconds, heartbeat_at=now())
        .execution_options(synchronize_session=False)
    )
    return bool(done.rowcount)  # type: ignore[attr-defined]


@asynccontextmanager
async def keep_renewed(db: Database, model: type[Any], id: str, *, fence: int, seconds: float) -> AsyncIterator[None]:
    """Beat in the background for as long as the work takes."""

    async def beats() -> None:
        while True:
            await asyncio.sleep(seconds / 4)
            try:
                with within(seconds / 4):  # a connection that hangs must leave time for the next beat
                    async with db.write() as session:
                        await renew(session, model, id, fence=fence, seconds=seconds)
            except (SQLAlchemyError, OSError) as error:  # it may be back before the lease runs out
                log.warning("no beat for %s %s: %s", model.__tablename__, id, error)

    task = asyncio.create_task(beats())
    try:
        yield
    finally:
        task.cancel()


async def finish(session: AsyncSession, model: type[Any], id: str, *, fence: int, state: str, **values: Any) -> None:
    """Write the outcome and let go, in one guarded statement. Raises LeaseLost when the fence is old."""
    done = await session.execute(
        update(model)
        .where(model.id == id, model.fence == fence)
        .values(state=state, lease_owner=None, lease_until=None, **values)
        .execution_options(synchronize_session=False)
    )
    if not done.rowcount:  # type: ignore[attr-defined]
        raise LeaseLost(f"{model.__tablename__} {id} was taken by another worker (fence {fence} is old)")
