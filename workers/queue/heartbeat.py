"""Renew leases from a thread while the main thread computes."""

import asyncio
import logging
import threading
from collections.abc import Mapping
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from app.core import leases
from app.core.database import Database
from app.core.settings import Settings

log = logging.getLogger("attune.trainer")


class Heartbeat:
    """Context manager that renews the leases of rows of one table, from a thread and a connection of its own.

    `fences` maps the id of each row to its fencing token.
    """

    def __init__(self, settings: Settings, model: type[Any], fences: Mapping[str, int]) -> None:
        self._settings, self._model, self._fences = settings, model, fences
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        if self._stop.wait(self._settings.lease_seconds / 4):
            return  # most updates end before the first renewal is due
        with asyncio.Runner() as runner:
            # A renewal that hangs must leave time for the next one.
            db = Database(self._settings.database, seconds=max(0.5, self._settings.lease_seconds / 4))
            while True:
                try:
                    runner.run(self._renew(db))
                except (SQLAlchemyError, OSError) as error:
                    log.warning("%s: the lease was not renewed (%s)", self._model.__tablename__, error)
                if self._stop.wait(self._settings.lease_seconds / 4):
                    break
            runner.run(db.close())

    async def _renew(self, db: Database) -> None:
        async with db.write() as session:
            for id, fence in self._fences.items():
                await leases.renew(session, self._model, id, fence=fence, seconds=self._settings.lease_seconds)
