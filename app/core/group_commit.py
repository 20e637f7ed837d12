"""Group commit: many small writes of many requests, one transaction. What comes during a commit goes into the next."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from sqlalchemy.engine import Connection
from sqlalchemy.exc import OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from app.core.database import Database
from app.core.errors import AttuneError

T = TypeVar("T")
R = TypeVar("R")
Handle = Callable[[Connection, Sequence[T]], Sequence[R | AttuneError]]


class GroupCommit(Generic[T, R]):
    """`handle` writes a whole group with a fixed number of statements and gives one outcome for each item, in order.

    An item alone waits for nobody; under load a group is as large as what came while the last one was committed.
    An outcome is handed out after the commit, never before. An AttuneError as outcome fails that item only. If the
    group as a whole breaks (a race that another process won), each item is tried again alone, so that none suffers
    for another. A caller that is cancelled leaves its item in: it is written all the same.
    """

    def __init__(self, db: Database, handle: Handle[T, R], *, most: int = 200) -> None:
        self._db, self._handle, self._most = db, handle, most
        self._waiting: list[tuple[T, asyncio.Future[R]]] = []
        self._drain: asyncio.Task[None] | None = None

    async def submit(self, item: T) -> R:
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if self._drain is None or self._drain.done():
            self._drain = asyncio.create_task(self._run())
        return await future

    async def _run(self) -> None:
        while self._waiting:
            group, self._waiting = self._waiting[: self._most], self._waiting[self._most :]
            try:
                await self._commit(group)
            except Exception as error:
                if len(group) == 1 or _down(error):
                    _fail(group, error)
                else:
                    await self._one_by_one(group)

    async def _commit(self, group: list[tuple[T, asyncio.Future[R]]]) -> None:
        def write(connection: Connection) -> list[tuple[tuple[T, asyncio.Future[R]], R | AttuneError]]:
            outcomes = self._handle(connection, [item for item, _ in group])
            return list(zip(group, outcomes, strict=True))  # in here, so that a mismatch writes nothing

        pairs = await self._db.run_write(write)
        for (_, future), outcome in pairs:
            if future.done():
                continue
            if isinstance(outcome, AttuneError):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

    async def _one_by_one(self, group: list[tuple[T, asyncio.Future[R]]]) -> None:
        for pair in group:
            try:
                await self._commit([pair])
            except Exception as error:
                _fail([pair], error)


def _down(error: Exception) -> bool:
    """Alone it would be no better. A deadlock or a limit (classes 40 and 54) is about this very group; a lock that
    somebody keeps would be waited for as often as there are items."""
    state = getattr(getattr(error, "orig", None), "sqlstate", None) or ""
    return isinstance(error, (OperationalError, PoolTimeout)) and state[:2] not in ("40", "54")


def _fail(group: list[tuple[T, asyncio.Future[R]]], error: Exception) -> None:
    for _, future in group:
        if not future.done():
            future.set_exception(error)
