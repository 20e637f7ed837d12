"""Routing: which version is meant and which engines hold it, read from the database a few times a second at most."""

import asyncio
import re
import time
from copy import copy
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Executable, and_, bindparam, select
from sqlalchemy.engine import Connection

from app.db import Database
from app.errors import AttuneError, NotFound, Unavailable
from app.models import Deployment, Engine, EngineState, Policy, Version, VersionState

KNOWN = 1024  # routes kept; more names than this in 20 ms are somebody's guesses
NUMBER = "v#"  # no alias is called so
NUMBERED = re.compile(r"v(\d{1,9})")


@dataclass(frozen=True)
class Named:
    """What `policy`, `policy@stable`, `policy@previous` or `policy@v12` means just now."""

    policy: str
    policy_id: str
    base_model: str
    version_id: str
    number: int
    adapter_name: str | None
    created_at: float

    @property
    def label(self) -> str:
        """Example: "assistant@v12"."""
        return f"{self.policy}@v{self.number}"


@dataclass(frozen=True)
class Route:
    named: Named
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
            reading = asyncio.create_task(self._db.look(lambda connection: route(connection, project_id, model)))
            self._found[project_id, model] = (time.monotonic(), reading)
        try:
            return await asyncio.shield(reading)  # whoever leaves early must not take it from the others
        except AttuneError as error:
            raise copy(error) from None  # each request adds its own headers to it

    def forget(self) -> None:
        """The pointer was moved by this very process."""
        self._found.clear()


def route(connection: Connection, project_id: str, model: str) -> Route:
    named = resolve(connection, project_id, model)
    engines = connection.execute(READY).all()
    if not engines:
        raise Unavailable("No engine is ready; try again in a moment.")
    holders = tuple((row.name, row.url) for row in engines if named.adapter_name in (None, *row.loaded))
    if not holders:
        raise NotFound(f"{named.label} is not loaded.", code="model_not_found", param="model")
    return Route(named, holders)


def resolve(connection: Connection, project_id: str, model: str) -> Named:
    """Raises NotFound, which says whether it is the policy or the version that is not there."""
    name, _, alias = model.partition("@")
    numbered = NUMBERED.fullmatch(alias)
    asked = {"project": project_id, "name": name, "number": int(numbered[1]) if numbered else -1}
    meant = MEANT.get(NUMBER if numbered else alias or "stable")
    found = connection.execute(meant, asked).one_or_none() if meant is not None else None
    if found is not None:
        named = dict(found._mapping)
        policy_made, version_made = named.pop("policy_made"), named.pop("version_made")
        return Named(**named, created_at=version_made if alias else policy_made)
    known = connection.execute(MINE, asked).one_or_none()
    told = f"Policy '{name}' has no version '{alias}'." if known else f"There is no policy named '{name}'."
    raise NotFound(told, code="model_not_found", param="model")


def _statement(meant: ColumnElement[bool]) -> Executable:
    statement: Executable = (
        select(
            Policy.name.label("policy"),
            Policy.id.label("policy_id"),
            Policy.base_model,
            Policy.created_at.label("policy_made"),
            Version.id.label("version_id"),
            Version.number,
            Version.adapter_name,
            Version.created_at.label("version_made"),
        )
        .join(Deployment, Deployment.policy_id == Policy.id)
        .join(Version, Version.policy_id == Policy.id)
        .where(OWN, meant, Version.state != VersionState.REJECTED)
    )
    return statement


# Built once: making a statement anew costs more than running it.
OWN = and_(Policy.project_id == bindparam("project"), Policy.name == bindparam("name"))
MINE = select(Policy.id).where(OWN)
MEANT = {
    "stable": _statement(Version.id == Deployment.version_id),
    "previous": _statement(Version.id == Deployment.previous_version_id),
    NUMBER: _statement(Version.number == bindparam("number")),
}
READY = select(Engine.name, Engine.url, Engine.loaded).where(Engine.state == EngineState.READY).order_by(Engine.name)
