"""Authentication: the caller behind a bearer key, with its project, its scopes and its limits."""

import math
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Request
from fastapi.security import HTTPBearer
from sqlalchemy import select

from app.core.cache import SingleFlightCache
from app.core.database import Database, now
from app.core.errors import Forbidden, Unauthorized
from app.core.http import services_of
from app.core.rate_limits import RateLimiter
from app.models import ApiKey, Project
from app.projects import service


@dataclass(frozen=True)
class Caller:
    """The API key that sent a request. A limit that is None is the deployment's."""

    project_id: str
    key_id: str
    key_prefix: str
    scopes: tuple[str, ...]
    train: bool  # consent: may its turns be learned from?
    requests_per_minute: int | None = None
    max_concurrency: int | None = None


class ApiKeyCache(SingleFlightCache[str, tuple[Caller, float]]):
    """The API keys that were read a moment ago, so that a chat need not read its key from the database.

    Unknown keys are not kept. A key's remaining life is computed on the database's clock when the key is read; from
    then on this process's monotonic clock runs. So a wrong wall clock of the host neither shortens nor stretches a key.
    `forget` must be called when this process has changed a key or its project.
    """

    def __init__(self, seconds: float, max_size: int = 10_000) -> None:
        super().__init__(seconds, max_size=max_size, lifetime=lambda cached: cached[1])

    async def find(self, db: Database, key: str) -> Caller | None:
        """Return the caller of an API key, or None for a key that is unknown, revoked or expired."""
        digest = service.digest_key(key)
        cached = await self.get(digest, lambda: _read_key(db, digest))
        return None if cached is None else cached[0]


async def _read_key(db: Database, sha256: str) -> tuple[Caller, float] | None:
    """Return the caller of the active key with this hash, and the seconds until the key expires.

    The key itself never reaches the database, on whose clock the seconds are.
    """
    query = (
        select(ApiKey, Project.train, ApiKey.expires_at - now())
        .join(Project, Project.id == ApiKey.project_id)
        .where(ApiKey.sha256 == sha256, service.key_is_active())
    )
    async with db.read() as session:
        found = (await session.execute(query)).one_or_none()
    if found is None:
        return None
    row, project_train, remaining_seconds = found
    caller = Caller(
        project_id=row.project_id,
        key_id=row.id,
        key_prefix=row.prefix,
        scopes=tuple(row.scopes),
        train=project_train if row.train is None else row.train,
        requests_per_minute=row.requests_per_minute,
        max_concurrency=row.max_concurrency,
    )
    return caller, math.inf if remaining_seconds is None else remaining_seconds


async def database(request: Request) -> Database:  # async, because FastAPI runs other dependencies in a thread
    """Return the database of this process."""
    return services_of(request).get(Database)


async def database_without_timeout(request: Request) -> Database:
    """Return the database for exports, imports and erasures, which may take long."""
    return services_of(request).get(Database).without_timeout


DatabaseDep = Annotated[Database, Depends(database)]
UnboundedDatabaseDep = Annotated[Database, Depends(database_without_timeout)]
BEARER = Depends(HTTPBearer(auto_error=False, scheme_name="key", description="An API key: sk-attune-…"))
LIMITED_SCOPES = ("chat", "feedback")


def bearer(request: Request) -> str:
    """Return the bearer token of a request; "" when there is none."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


async def authenticate(request: Request, db: Database, scope: str) -> Caller:
    """Return the caller if its key has `scope`. Raises Unauthorized or Forbidden. Applies no rate limits."""
    if not (key := bearer(request)):
        raise Unauthorized("Send your API key as 'Authorization: Bearer sk-attune-…'.")
    caller = await services_of(request).get(ApiKeyCache).find(db, key)
    if caller is None:
        raise Unauthorized("This API key is unknown or revoked.")
    if scope not in caller.scopes:
        raise Forbidden(f"This API key lacks the scope '{scope}'.")
    return caller


def require_scope(scope: str) -> Callable[..., Any]:
    """Return a dependency that gives the caller.

    Chat and feedback requests also take a slot of their key's limits, and keep it until the last byte of the reply,
    streamed or not.
    """

    async def authenticated(request: Request, db: DatabaseDep, _: Any = BEARER) -> Caller:
        return await authenticate(request, db, scope)

    async def rate_limited(request: Request, db: DatabaseDep, _: Any = BEARER) -> AsyncIterator[Caller]:
        caller = await authenticate(request, db, scope)
        limiter = services_of(request).get(RateLimiter)
        async with limiter.slot(caller.key_id, caller.requests_per_minute, caller.max_concurrency) as headers:
            request.state.headers = headers
            yield caller

    return rate_limited if scope in LIMITED_SCOPES else authenticated


ChatCaller = Annotated[Caller, Depends(require_scope("chat"))]
FeedbackCaller = Annotated[Caller, Depends(require_scope("feedback"))]
AdminCaller = Annotated[Caller, Depends(require_scope("admin"))]
