"""Monitor the database: how much work of each kind is finished, and how much is open."""

import asyncio
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from sqlalchemy import create_engine, event, text
from sqlalchemy.exc import SQLAlchemyError

QUERY = text(
    """SELECT
    (SELECT count(*) FROM feedback WHERE processed) AS processed_feedback,
    (SELECT count(*) FROM feedback WHERE NOT processed) AS open_feedback,
    (SELECT count(*) FROM judgements WHERE state <> 'open') AS finished_judgements,
    (SELECT count(*) FROM judgements WHERE state = 'open') AS open_judgements,
    (SELECT count(*) FROM batches WHERE state <> 'open') AS finished_batches,
    (SELECT count(*) FROM batches WHERE state = 'open') AS open_batches,
    (SELECT count(*) FROM versions WHERE state NOT IN ('trained', 'verified')) AS released_versions,
    (SELECT count(*) FROM versions WHERE state IN ('trained', 'verified')) AS unreleased_versions,
    (SELECT count(*) FROM samples WHERE state = 'open') AS open_samples,
    (SELECT count(*) FROM rollouts WHERE state <> 'open') AS finished_rollouts,
    (SELECT count(*) FROM rollouts WHERE state = 'open') AS open_rollouts,
    (SELECT count(*) FROM turns WHERE state = 'done' AND origin = 'chat') AS finished_chats,
    (SELECT count(*) FROM turns WHERE state = 'open' AND origin = 'chat') AS open_chats"""
)
# By process kind: the count of its finished work, and the count of its open work. None: there is always open work.
PROGRESS: dict[str, tuple[str, str | None]] = {
    "api": ("finished_chats", None),
    "worker": ("processed_feedback", "open_feedback"),
    "judge": ("finished_judgements", "open_judgements"),
    "rollout": ("finished_rollouts", "open_rollouts"),
    "publisher": ("released_versions", "unreleased_versions"),
    "trainer": ("finished_batches", "open_batches"),
    "beat": ("processed_feedback", "open_feedback"),
    "engine": ("finished_chats", None),
}
# Samples may stay open: the last ones are too few for a batch.
BACKGROUND_WORK = ("open_feedback", "open_judgements", "open_rollouts", "open_batches", "unreleased_versions")


@dataclass
class Snapshot:
    """The counts at a monotonic time."""

    at: float
    counts: dict[str, int]


class ProgressMonitor:
    """Reads the counts in a loop while its block runs."""

    def __init__(self, url: str, interval: float = 0.04) -> None:
        self._engine = create_engine(url.replace("+aiosqlite", ""))
        self._interval = interval
        if url.startswith("sqlite"):

            @event.listens_for(self._engine, "connect")
            def set_busy_timeout(connection: Any, record: Any) -> None:
                connection.execute("PRAGMA busy_timeout=15000")

        self.latest = Snapshot(0.0, {})

    async def __aenter__(self) -> Self:
        self.latest = await asyncio.to_thread(self._read)
        self._reading = asyncio.create_task(self._read_forever())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reading.cancel()
        await asyncio.sleep(0)
        self._engine.dispose()

    async def _read_forever(self) -> None:
        while True:
            await asyncio.sleep(self._interval)
            try:
                self.latest = await asyncio.to_thread(self._read)
            except SQLAlchemyError:
                continue  # the database is down as part of the test

    def _read(self) -> Snapshot:
        with self._engine.connect() as connection:
            row = connection.execute(QUERY).one()
        return Snapshot(time.monotonic(), dict(row._mapping))

    async def snapshot_after(self, at: float) -> Snapshot:
        """Wait for a snapshot that was read after this monotonic time."""
        while self.latest.at <= at:
            await asyncio.sleep(0.01)
        return self.latest

    async def wait_for_progress(
        self, kind: str, since: float, *, timeout: float = 90.0, idle: float = 2.0
    ) -> float | None:
        """Wait until a process of this kind finishes work. Return the seconds since `since`, or since there was work.

        Returns None if there was no open work within `idle` seconds. Raises TimeoutError if there was open work and
        none was finished.
        """
        finished, open_work = PROGRESS[kind]
        first = snapshot = await self.snapshot_after(since)
        began: float | None = None
        while True:
            if began is None and (open_work is None or snapshot.counts[open_work]):
                began = since if snapshot is first else snapshot.at
            if snapshot.counts[finished] > first.counts[finished]:
                return snapshot.at - (since if began is None else began)
            if began is None and snapshot.at - since > idle:
                return None
            if began is not None and snapshot.at - began > timeout:
                raise TimeoutError(f"{kind}: {timeout:.0f} s without finished work: {snapshot.counts}")
            snapshot = await self.snapshot_after(snapshot.at)

    async def wait_for_version(self, timeout: float) -> None:
        """Wait until a trained version was released, or for `timeout` seconds; the caller checks the result."""
        ends = time.monotonic() + timeout
        while self.latest.counts["released_versions"] < 2 and time.monotonic() < ends:  # the base model is the first
            await asyncio.sleep(0.1)

    async def wait_until_idle(self, timeout: float) -> dict[str, int]:
        """Wait until no work is open, or no count has changed for `timeout` seconds. Return the last counts."""
        snapshot, changed_at = self.latest, time.monotonic()
        while snapshot.at - changed_at < timeout:
            before, snapshot = snapshot, await self.snapshot_after(snapshot.at)
            if not any(snapshot.counts[name] for name in (*BACKGROUND_WORK, "open_chats")):
                break
            if snapshot.counts != before.counts:
                changed_at = snapshot.at
        return snapshot.counts
