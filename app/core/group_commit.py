"""Group commit: many small writes of many requests share a transaction. Writes that arrive during a commit form the
next group."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from sqlalchemy import text
from sqlalchemy.engine import Connection
from sqlalchemy.exc import OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from app.core.database import Database
from app.core.database_errors import LOCK_NOT_AVAILABLE, sqlstate
from app.core.errors import AttuneError, database_unavailable, is_database_outage

T = TypeVar("T")
R = TypeVar("R")
WriteGroup = Callable[[Connection, Sequence[T]], Sequence[R | AttuneError]]
MAX_GROUP_SIZE = 200
LOCK_MILLISECONDS = 250  # that a group waits for a row which another transaction has locked
LOCK_WAIT_SECONDS = 4.0  # that an item waits for such a row, in attempts of their own
LOCK_PAUSE_SECONDS = 0.1
LIMIT_LOCKS = text(f"SET LOCAL lock_timeout = {LOCK_MILLISECONDS}")


class ItemKey(NamedTuple):
    """What an item may wait for. Items with different values of `group` share no transaction.

    `row` is the row that another transaction may have locked.
    """

    group: Hashable
    row: Hashable


@dataclass(slots=True)
class _Entry(Generic[T, R]):
    item: T
    key: ItemKey
    future: asyncio.Future[R]
    arrived_at: float = field(default_factory=time.monotonic)


class GroupCommit(Generic[T, R]):
    """Writes items in groups. `write_group` returns one result for each item of a group, in order.

    - `write_group` should need a fixed number of statements, whatever the size of the group.
    - A single item waits for nobody. Under load a group holds what arrived during the last commit.
    - A result is returned after the commit, never before.
    - An AttuneError as a result fails its item only.
    - If a group fails as a whole (another process won a race), each item is written alone, so that one bad item fails
      no other.
    - If a group meets a locked row, the items leave it by their rows, and those of the locked row wait for it alone.
    - A cancelled caller does not withdraw its item: the item is written all the same.

    Args:
        key: Returns the key of an item. By default all items form one group, and each has a row of its own.
    """

    def __init__(
        self,
        db: Database,
        write_group: WriteGroup[T, R],
        *,
        key: Callable[[T], ItemKey] = lambda item: ItemKey(None, id(item)),
        max_group_size: int = MAX_GROUP_SIZE,
    ) -> None:
        self._db, self._write_group, self._max_group_size = db, write_group, max_group_size
        self._key = key
        self._queues: defaultdict[Hashable, list[_Entry[T, R]]] = defaultdict(list)
        self._waiting: dict[ItemKey, list[_Entry[T, R]]] = {}  # for a locked row
        self._tasks: dict[Hashable, asyncio.Task[None]] = {}
        self._lock_attempts = asyncio.Semaphore(1)  # the database's threads are few, and a locked row holds one up

    async def submit(self, item: T) -> R:
        """Write an item. Returns its result once it is committed; raises its AttuneError, or the database's error."""
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        entry = _Entry(item, self._key(item), future)
        if entry.key in self._waiting:
            self._waiting[entry.key].append(entry)
        else:
            self._queues[entry.key.group].append(entry)
            if entry.key.group not in self._tasks:
                self._tasks[entry.key.group] = asyncio.create_task(self._drain(entry.key.group))
        return await future

    async def submit_together(self, items: Sequence[T]) -> list[R | AttuneError]:
        """Write the items in one transaction, and return one result or error for each, in order.

        If that meets a locked row, the items are submitted one by one: those that need the row wait for it, and have
        the error of a database that does not answer if it stays locked. Raises the errors that concern all items.
        """

        def write(connection: Connection) -> list[R | AttuneError]:
            _limit_locks(connection)
            return list(self._write_group(connection, items))

        try:
            return await self._db.run_write(write)
        except OperationalError as error:
            if sqlstate(error) != LOCK_NOT_AVAILABLE:
                raise
        outcomes: list[R | AttuneError] = []
        for outcome in await asyncio.gather(*map(self.submit, items), return_exceptions=True):
            if not isinstance(outcome, BaseException) or isinstance(outcome, AttuneError):
                outcomes.append(outcome)
            elif is_database_outage(outcome):
                outcomes.append(database_unavailable())
            else:
                raise outcome
        return outcomes

    async def _drain(self, name: Hashable) -> None:
        try:
            while queue := self._queues[name]:
                entries, self._queues[name] = queue[: self._max_group_size], queue[self._max_group_size :]
                await self._commit(entries)
        finally:
            del self._tasks[name], self._queues[name]

    async def _commit(self, entries: list[_Entry[T, R]]) -> None:
        """Write the entries; those that wait for a locked row are left to a task of their own."""
        error = await self._write(entries)
        if error is None:
            return
        if sqlstate(error) == LOCK_NOT_AVAILABLE:
            by_key: defaultdict[ItemKey, list[_Entry[T, R]]] = defaultdict(list)
            for entry in entries:
                by_key[entry.key].append(entry)
            for key, of_row in by_key.items():
                if len(by_key) > 1:
                    await self._commit(of_row)
                else:
                    self._wait_for_row(key, of_row)
        elif len(entries) > 1 and not _is_outage(error):
            for entry in entries:
                await self._commit([entry])
        else:
            _fail(entries, error)

    def _wait_for_row(self, key: ItemKey, entries: list[_Entry[T, R]]) -> None:
        if key in self._waiting:
            self._waiting[key] += entries
            return
        self._waiting[key] = entries
        self._tasks[key] = asyncio.create_task(self._retry(key))

    async def _retry(self, key: ItemKey) -> None:
        """Write the entries of a locked row when it is free, or fail those that have waited too long."""
        error: Exception | None = None
        try:
            while waiting := self._waiting[key]:
                start = time.monotonic() - LOCK_WAIT_SECONDS
                late = [entry for entry in waiting if entry.arrived_at < start]
                if error is not None:
                    _fail(late, error)
                    waiting = [entry for entry in waiting if entry.arrived_at >= start]
                entries, self._waiting[key] = waiting[: self._max_group_size], waiting[self._max_group_size :]
                if not entries:
                    continue
                await asyncio.sleep(LOCK_PAUSE_SECONDS)
                async with self._lock_attempts:
                    error = await self._write(entries)
                if error is None:
                    continue
                if sqlstate(error) == LOCK_NOT_AVAILABLE:
                    self._waiting[key] = entries + self._waiting[key]
                elif len(entries) > 1 and not _is_outage(error):
                    for entry in entries:
                        await self._commit([entry])
                else:
                    _fail(entries, error)
        finally:
            del self._tasks[key], self._waiting[key]

    async def _write(self, entries: list[_Entry[T, R]]) -> Exception | None:
        """Write the entries in a transaction and resolve them. Returns the error that failed the transaction."""

        def write(connection: Connection) -> list[R | AttuneError]:
            _limit_locks(connection)
            results = self._write_group(connection, [entry.item for entry in entries])
            # In the transaction: a mismatch must write nothing.
            return [result for _, result in zip(entries, results, strict=True)]

        try:
            outcomes = await self._db.run_write(write)
        except Exception as error:
            return error
        for entry, outcome in zip(entries, outcomes, strict=True):
            if entry.future.done():
                continue
            if isinstance(outcome, Exception):
                entry.future.set_exception(outcome)
            else:
                entry.future.set_result(outcome)
        return None


def _limit_locks(connection: Connection) -> None:
    if connection.dialect.name == "postgresql":
        connection.execute(LIMIT_LOCKS)


def _fail(entries: Sequence[_Entry[T, R]], error: Exception) -> None:
    for entry in entries:
        if not entry.future.done():
            entry.future.set_exception(error)


def _is_outage(error: Exception) -> bool:
    """Return whether an item alone would fail as its group did.

    A deadlock or a limit (SQLSTATE classes 40 and 54) concerns the group as such.
    """
    return isinstance(error, (OperationalError, PoolTimeout)) and sqlstate(error)[:2] not in ("40", "54")
