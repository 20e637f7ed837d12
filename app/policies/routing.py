"""Routing: which version answers and which engines hold it, read from the database a few times a second at most."""

import asyncio
import time
from copy import copy
from dataclasses import dataclass

from app.db import Database
from app.errors import AttuneError
from app.policies import service

KNOWN = 1024  # routes kept; more names than this in 20 ms are somebody's guesses


@dataclass(frozen=True)
class Route:
    policy_id: str
    base_model: str
    version_id: str
    adapter_name: str | None
    label: str
    engines: tuple[tuple[str, str], ...]  # name and url of each ready engine that holds the version


class Routes:
    """A route is at most `seconds` old when it is used: so long may a moved pointer stay unseen by this process.

    Requests that come together share one reading; a request that comes alone reads for itself.
    """

    def __init__(self, db: Database, seconds: float) -> None:
        self._db, self._seconds = db, seconds
        self._found: dict[tuple[str, str], tuple[float, asyncio.Task[Route]]] = {}

    async def find(self, project_id: str, model: str) -> Route:
        """Raises NotFound for a name that cannot be asked for, Unavailable when no engine is ready."""
        read_at, reading = self._found.get((project_id, model), (0.0, None))
        if reading is None or time.monotonic() - read_at > self._seconds:
            if len(self._found) >= KNOWN:
                self._found.clear()
            reading = asyncio.create_task(self._read(project_id, model))
            self._found[project_id, model] = (time.monotonic(), reading)
        try:
            return await asyncio.shield(reading)  # whoever leaves early must not take it from the others
        except AttuneError as error:
            raise copy(error) from None  # each request adds its own headers to it

    def forget(self) -> None:
        """The pointer was moved by this very process."""
        self._found.clear()

    async def _read(self, project_id: str, model: str) -> Route:
        async with self._db.read() as session:
            policy, version, engines = await service.route(session, project_id, model)
        return Route(
            policy_id=policy.id,
            base_model=policy.base_model,
            version_id=version.id,
            adapter_name=version.adapter_name,
            label=service.label(policy, version),
            engines=tuple((engine.name, engine.url) for engine in engines),
        )
