"""Looks at the database over and over: what is settled, and what waits to be."""

import asyncio
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from sqlalchemy import create_engine, event, text
from sqlalchemy.exc import SQLAlchemyError

QUERY = text(
    """SELECT
    (SELECT count(*) FROM feedback WHERE processed) AS processed,
    (SELECT count(*) FROM feedback WHERE NOT processed) AS unprocessed,
    (SELECT count(*) FROM judgements WHERE state <> 'open') AS answered,
    (SELECT count(*) FROM judgements WHERE state = 'open') AS asked,
    (SELECT count(*) FROM batches WHERE state <> 'open') AS settled,
    (SELECT count(*) FROM batches WHERE state = 'open') AS batches,
    (SELECT count(*) FROM versions WHERE state NOT IN ('trained', 'verified')) AS home,
    (SELECT count(*) FROM versions WHERE state IN ('trained', 'verified')) AS coming,
    (SELECT count(*) FROM samples WHERE state = 'open') AS samples,
    (SELECT count(*) FROM rollouts WHERE state <> 'open') AS sampled,
    (SELECT count(*) FROM rollouts WHERE state = 'open') AS planned,
    (SELECT count(*) FROM turns WHERE state = 'done' AND origin = 'chat') AS chats,
    (SELECT count(*) FROM turns WHERE state = 'open' AND origin = 'chat') AS talking"""
)
# Per process kind: what counts its settled work, and what waits for it. None: there is always some.
PROGRESS: dict[str, tuple[str, str | None]] = {
    "api": ("chats", None),
    "worker": ("processed", "unprocessed"),
    "judge": ("answered", "asked"),
    "rollout": ("sampled", "planned"),
    "publisher": ("home", "coming"),
    "trainer": ("settled", "batches"),
    "beat": ("processed", "unprocessed"),
    "engine": ("chats", None),
}
WAITING = ("unprocessed", "asked", "planned", "batches", "coming", "talking")


@dataclass
class Look:
    at: float
    counts: dict[str, int]


class Watch:
    def __init__(self, url: str, pause: float = 0.04) -> None:
        self._engine = create_engine(url.replace("+aiosqlite", ""))
        self._pause = pause
        if url.startswith("sqlite"):

            @event.listens_for(self._engine, "connect")
            def patient(connection, record) -> None:
                connection.execute("PRAGMA busy_timeout=15000")

        self.latest = Look(0.0, {})

    async def __aenter__(self) -> Self:
        self.latest = await asyncio.to_thread(self._look)
        self._watching = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watching.cancel()
        await asyncio.sleep(0)
        self._engine.dispose()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._pause)
            try:
                self.latest = await asyncio.to_thread(self._look)
            except SQLAlchemyError:
                continue  # it is down on purpose

    def _look(self) -> Look:
        with self._engine.connect() as connection:
            row = connection.execute(QUERY).one()
        return Look(time.monotonic(), dict(row._mapping))

    async def after(self, moment: float) -> Look:
        while self.latest.at <= moment:
            await asyncio.sleep(0.01)
        return self.latest

    async def progress(self, kind: str, since: float, *, patience: float = 90.0, idle: float = 2.0) -> float | None:
        """Seconds from `since` (or from when work was first seen waiting) to the next settled work of this kind.

        None when no work came within `idle` seconds. Raises TimeoutError when there was work and nobody did it.
        """
        done, waiting = PROGRESS[kind]
        first = look = await self.after(since)
        began: float | None = None
        while True:
            if began is None and (waiting is None or look.counts[waiting]):
                began = since if look is first else look.at
            if look.counts[done] > first.counts[done]:
                return look.at - (since if began is None else began)
            if began is None and look.at - since > idle:
                return None
            if began is not None and look.at - began > patience:
                raise TimeoutError(f"{kind}: {patience:.0f} s without settled work: {look.counts}")
            look = await self.after(look.at)

    async def learned(self, patience: float) -> None:
        """Until a version has come of the load, or for so long: a busy machine is slow, and then nothing is shown."""
        ends = time.monotonic() + patience
        while self.latest.counts["home"] < 2 and time.monotonic() < ends:  # the base model is the first
            await asyncio.sleep(0.1)

    async def idle(self, patience: float) -> dict[str, int]:
        """Until nothing waits any more, or nothing has moved for so long. What is left is told."""
        look, moved = self.latest, time.monotonic()
        while look.at - moved < patience:
            before, look = look, await self.after(look.at)
            if not any(look.counts[name] for name in WAITING):
                break
            if look.counts != before.counts:
                moved = look.at
        return look.counts
