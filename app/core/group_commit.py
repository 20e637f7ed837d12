"""Group commit: many small writes of many requests share a transaction. Writes that arrive during a commit form the
next group."""

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
WriteGroup = Callable[[Connection, Sequence[T]], Sequence[R | AttuneError]]
MAX_GROUP_SIZE = 200


class GroupCommit(Generic[T, R]):
    """Writes items in groups. `write_group` returns one result for each item of a group, in order.

    - `write_group` should need a fixed number of statements, whatever the size of the group.
    - A single item waits for nobody. Under load a group holds what arrived during the last commit.
    - A result is returned after the commit, never before.
    - An AttuneError as a result fails its item only.
    - If a group fails as a whole (another process won a race), each item is written alone, so that one bad item fails
      no other.
    - A cancelled caller does not withdraw its item: the item is written all the same.
    """

    def __init__(self, db: Database, write_group: WriteGroup[T, R], *, max_group_size: int = MAX_GROUP_SIZE) -> None:
        self._db, self._write_group, self._max_group_size = db, write_group, max_group_size
        self._queue: list[tuple[T, asyncio.Future[R]]] = []
        self._drain_task: asyncio.Task[None] | None = None

    async def submit(self, item: T) -> R:
        """Write an item. Returns its result once it is committed; raises its AttuneError, or the database's error."""
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._queue.append((item, future))
        if self._drain_task is None or self._drain_task.done():
            self._drain_task = asyncio.create_task(self._drain())
        return await future

    async def _drain(self) -> None:
        while self._queue:
            group, self._queue = self._queue[: self._max_group_size], self._queue[self._max_group_size :]
            await self._commit(group)

    async def _commit(self, group: list[tuple[T, asyncio.Future[R]]]) -> None:
        def write(connection: Connection) -> list[R | AttuneError]:
            results = self._write_group(connection, [item for item, _ in group])
            # In the transaction: a mismatch must write nothing.
            return [result for _, result in zip(group, results, strict=True)]

        outcomes: Sequence[R | Exception]
        try:
            outcomes = await self._db.run_write(write)
        except Exception as error:
            if len(group) > 1 and not _is_outage(error):
                for pair in group:
                    await self._commit([pair])
                return
            outcomes = [error] * len(group)
        for (_, future), outcome in zip(group, outcomes, strict=True):
            if future.done():
                continue
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)


def _is_outage(error: Exception) -> bool:
    """Return whether an item alone would fail as its group did.

    A deadlock or a limit (SQLSTATE classes 40 and 54) concerns the group as such. A lock that another process keeps
    would be waited for once per item.
    """
    state = getattr(getattr(error, "orig", None), "sqlstate", None) or ""
    return isinstance(error, (OperationalError, PoolTimeout)) and state[:2] not in ("40", "54")
