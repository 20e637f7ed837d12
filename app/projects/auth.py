"""Who is calling: the bearer key, its project, its scopes and its limits."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Request
from fastapi.security import HTTPBearer

from app.core.database import Database
from app.core.errors import Forbidden, Unauthorized
from app.core.rate_limits import RateLimiter
from app.core.services import services_of
from app.projects import keys


@dataclass(frozen=True)
class Caller:
    project_id: str
    key_id: str
    key_prefix: str
    scopes: tuple[str, ...]
    train: bool  # consent: may its turns be learned from?
    requests_per_minute: int | None = None  # its own limits; the deployment's where there are none
    max_concurrency: int | None = None


class ApiKeyCache:
    """Keys found a moment ago, so that a chat need not ask the database for its key. Only found ones, never misses.

    How long a key has still to live is read on the database's clock, together with the key; from then on it is this
    process's monotonic clock that runs. So a host whose wall clock is wrong neither shortens nor stretches a key.
    """

    def __init__(self, seconds: float, most: int = 10_000) -> None:
        self._seconds, self._most = seconds, most
        self._found: dict[str, tuple[Caller, float]] = {}
        self._asking: dict[str, asyncio.Task[Caller | None]] = {}
        self._changes = 0

    async def find(self, db: Database, key: str) -> Caller | None:
        digest = keys.digest(key)
        caller, until = self._found.get(digest, (None, 0.0))
        if time.monotonic() < until:
            return caller
        if digest not in self._asking:  # requests that come together ask together
            asking = asyncio.create_task(self._ask(db, digest))
            asking.add_done_callback(lambda done: self._answered(digest, done))
            self._asking[digest] = asking
        return await asyncio.shield(self._asking[digest])

    async def _ask(self, db: Database, digest: str) -> Caller | None:
        asked_at, changes = time.monotonic(), self._changes
        async with db.read() as session:
            found = await keys.find(session, digest)
        self._found.pop(digest, None)
        if found is None:
            return None
        caller = _caller(found)
        if self._seconds > 0 and changes == self._changes:
            self._keep(digest, caller, asked_at + min(self._seconds, found.lives_for))
        return caller

    def _answered(self, digest: str, asking: "asyncio.Task[Caller | None]") -> None:
        if self._asking.get(digest) is asking:
            del self._asking[digest]

    def _keep(self, digest: str, caller: Caller, until: float) -> None:
        while len(self._found) >= self._most:
            del self._found[next(iter(self._found))]
        self._found[digest] = (caller, until)

    def forget(self) -> None:
        """A key or its project has changed here: nothing that was read before, or is being read, is kept."""
        self._changes += 1
        self._found.clear()
        self._asking.clear()


def _caller(found: keys.Found) -> Caller:
    row = found.key
    return Caller(
        project_id=row.project_id,
        key_id=row.id,
        key_prefix=row.prefix,
        scopes=tuple(row.scopes),
        train=found.project_trains if row.train is None else row.train,
        requests_per_minute=row.requests_per_minute,
        max_concurrency=row.max_concurrency,
    )


async def database(request: Request) -> Database:  # async: FastAPI sends the others to a thread
    return services_of(request).get(Database)


async def database_without_timeout(request: Request) -> Database:
    return services_of(request).get(Database).without_timeout


DatabaseDep = Annotated[Database, Depends(database)]
UnboundedDatabaseDep = Annotated[
    Database, Depends(database_without_timeout)
]  # for exports, imports and erasures, which may take their time
BEARER = Depends(HTTPBearer(auto_error=False, scheme_name="key", description="An API key: sk-attune-…"))
LIMITED = ("chat", "feedback")


def bearer(request: Request) -> str:
    """What the request presents; nothing if it presents nothing, or by another scheme."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


async def identify(request: Request, db: Database, scope: str) -> Caller:
    """The key's caller, if it may do this. Without limits: `admitted` holds a slot beside it."""
    if not (key := bearer(request)):
        raise Unauthorized("Send your API key as 'Authorization: Bearer sk-attune-…'.")
    known = services_of(request).get(ApiKeyCache)
    found = await known.find(db, key)
    if found is None:
        raise Unauthorized("This API key is unknown or revoked.")
    if scope not in found.scopes:
        raise Forbidden(f"This API key lacks the scope '{scope}'.")
    return found


def caller(scope: str) -> Callable[..., Any]:
    """A dependency. Chat and feedback hold a slot of their key until the last byte of the reply, streamed or not."""

    async def authenticated(request: Request, db: DatabaseDep, _: Any = BEARER) -> Caller:
        return await identify(request, db, scope)

    async def admitted(request: Request, db: DatabaseDep, _: Any = BEARER) -> AsyncIterator[Caller]:
        found = await identify(request, db, scope)
        limits = services_of(request).get(RateLimiter)
        async with limits.slot(found.key_id, found.requests_per_minute, found.max_concurrency) as headers:
            request.state.headers = headers
            yield found

    return admitted if scope in LIMITED else authenticated


ChatCaller = Annotated[Caller, Depends(caller("chat"))]
FeedbackCaller = Annotated[Caller, Depends(caller("feedback"))]
AdminCaller = Annotated[Caller, Depends(caller("admin"))]
