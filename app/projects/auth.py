"""Authentication: the caller behind a bearer key, with its project, its scopes and its limits."""

import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Annotated, Protocol, TypeVar

from cachetools import LRUCache
from fastapi import Depends, Request
from fastapi.security import HTTPBearer
from sqlalchemy import ColumnElement, select

from app.core.cache import SingleFlightCache
from app.core.connection_limit import network_of
from app.core.database import Database, now
from app.core.errors import Forbidden, RateLimited, Unauthorized
from app.core.http import services_of, settings_of
from app.core.project_limits import ProjectLimits
from app.core.rate_limits import RateLimiter
from app.models import ApiKey, Episode, Project
from app.projects import episode_keys, service, usage
from app.projects.scopes import CONTENT_SCOPE, checks_scope, has_scope

T = TypeVar("T")


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
    project_limits: ProjectLimits = field(default_factory=ProjectLimits)  # the project's own
    episode_id: str | None = None  # with the key of an episode: the one that it is limited to


class ApiKeyCache(SingleFlightCache[str, tuple[Caller, float]]):
    """The API keys that were read a moment ago, so that a chat need not read its key from the database.

    Unknown keys are not kept. A key's remaining life is computed on the database's clock when the key is read; from
    then on this process's monotonic clock runs. So a wrong wall clock of the host neither shortens nor stretches a key.
    `forget` must be called when this process has changed a key or its project.
    """

    def __init__(self, seconds: float, max_size: int = 10_000) -> None:
        super().__init__(seconds, max_size=max_size, lifetime=lambda cached: cached[1])
        self._seen: LRUCache[str, bool] = LRUCache(max_size)

    async def find(self, db: Database, key: str) -> Caller | None:
        """Return the caller of an API key, or None for a key that is unknown, revoked or expired."""
        digest = service.digest_key(key)
        if key.startswith(episode_keys.PREFIX):
            cached = await self.get(digest, lambda: read_episode_caller(db, digest))
        else:
            cached = await self.get(digest, lambda: read_caller(db, ApiKey.sha256 == digest))
        if cached is None:
            self._seen.pop(digest, None)
            return None
        return cached[0]

    def remember(self, credential: str) -> None:
        """Record that the key or browser token is valid now."""
        self._seen[service.digest_key(credential)] = True

    def has_seen(self, credential: str) -> bool:
        """Whether the key or browser token was valid when this process read it last.

        Then it is looked up, whoever else sends unknown ones.
        """
        return service.digest_key(credential) in self._seen


async def read_caller(db: Database, is_key: ColumnElement[bool]) -> tuple[Caller, float] | None:
    """Return the caller of the active key for which the condition holds, and the seconds until the key expires.

    A key itself never reaches the database, on whose clock the seconds are.
    """
    query = (
        select(ApiKey, Project.train, ApiKey.expires_at - now(), Project.limits)
        .join(Project, Project.id == ApiKey.project_id)
        .where(is_key, service.key_is_active())
    )
    async with db.read() as session:
        found = (await session.execute(query)).one_or_none()
    if found is None:
        return None
    row, project_train, remaining_seconds, limits = found
    caller = Caller(
        project_id=row.project_id,
        key_id=row.id,
        key_prefix=row.prefix,
        scopes=tuple(row.scopes),
        train=project_train if row.train is None else row.train,
        requests_per_minute=row.requests_per_minute,
        max_concurrency=row.max_concurrency,
        project_limits=ProjectLimits.from_row(limits),
    )
    return caller, math.inf if remaining_seconds is None else remaining_seconds


async def read_episode_caller(db: Database, key_sha256: str) -> tuple[Caller, float] | None:
    """Return the caller of the key of an episode: the one that created it, limited to it."""
    query = select(Episode.id, Episode.key_id).where(Episode.key_sha256 == key_sha256, episode_keys.key_is_valid())
    async with db.read() as session:
        episode = (await session.execute(query)).one_or_none()
    creator = None if episode is None else await read_caller(db, ApiKey.id == episode.key_id)
    if episode is None or creator is None:
        return None
    caller, remaining_seconds = creator
    return replace(caller, episode_id=episode.id, scopes=episode_keys.select_scopes(caller.scopes)), remaining_seconds


async def database(request: Request) -> Database:  # async, because FastAPI runs other dependencies in a thread
    """Return the database of this process."""
    return services_of(request).get(Database)


async def database_with_long_timeout(request: Request) -> AsyncIterator[Database]:
    """Return the database for exports, imports and erasures, which may take long. Raises RateLimited.

    Few connections serve these, so a project may have few such requests at a time. The caller comes before this
    dependency in the signature of a route.
    """
    limiter, limit = services_of(request).get(RateLimiter), settings_of(request).limits.max_long_requests
    message = f"This project may have {limit} exports, imports and erasures under way at a time, and has."
    with limiter.concurrent(f"long:{request.state.project_id}", limit, message, "too_many_requests"):
        yield services_of(request).get(Database).with_long_timeout


DatabaseDep = Annotated[Database, Depends(database)]
LongRunningDatabaseDep = Annotated[Database, Depends(database_with_long_timeout)]
BEARER = Depends(HTTPBearer(auto_error=False, scheme_name="key", description="An API key: sk-attune-…"))
LIMITED_SCOPES = ("chat", "feedback")
UNKNOWN = (Unauthorized.code, "invalid_token")  # codes of credentials that nobody has issued


class LimitedByProject(Protocol):
    """Who sent a request: an API key, or a browser token."""

    @property
    def project_limits(self) -> ProjectLimits: ...


def limits_of(request: Request, caller: LimitedByProject) -> ProjectLimits:
    """Return the limits of the caller's project: its own where they are below the deployment's."""
    return settings_of(request).limits.project.lowered_by(caller.project_limits)


def client_network(request: Request) -> str:
    """Return the client's IPv4 address, or the first 64 bits of its IPv6 address, which one client may own."""
    return network_of(request.client.host) if request.client else ""


def bearer(request: Request) -> str:
    """Return the bearer token of a request; "" when there is none."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def sent_credential(request: Request) -> str:
    """Return the API key or browser token of a request; "" when there is none.

    It is the bearer token, or what `x-api-key` holds, as Anthropic's clients send a key.
    """
    return bearer(request) or request.headers.get("x-api-key", "").strip()


async def authenticate(request: Request, db: Database, scope: str, key: str | None = None) -> Caller:
    """Return the caller if its key has `scope`. Raises Unauthorized or Forbidden. Applies no rate limits.

    `key`: the API key, where a client sends it in a way of its own.
    """
    caller = await identify(request, db, sent_credential(request) if key is None else key)
    if not has_scope(caller.scopes, scope):
        raise Forbidden(f"This API key lacks the scope '{scope}'.")
    return caller


async def identify(request: Request, db: Database, key: str) -> Caller:
    """Return the caller of this API key, whatever its scopes. Raises Unauthorized.

    Raises RateLimited for an unknown key if many came from the client's address, and Forbidden for the key of an
    episode on a route that takes none.
    """
    if not key:
        raise Unauthorized("Send your API key as 'Authorization: Bearer sk-attune-…', or as 'x-api-key'.")
    keys = services_of(request).get(ApiKeyCache)

    async def find() -> Caller:
        caller = await keys.find(db, key)
        if caller is None:
            raise Unauthorized("This API key is unknown or revoked.")
        return caller

    caller = await look_up(request, key, find)
    if caller.episode_id is not None:
        episode_keys.require_episode_route(request)
    return caller


async def look_up(request: Request, credential: str, find: Callable[[], Awaitable[T]]) -> T:
    """Return what `find` returns for a key or a browser token.

    `find` raises Unauthorized for an unknown one; if many of these came from the client's address, it is not called and
    RateLimited is raised, unless this process knows the credential.
    """
    keys, limiter = services_of(request).get(ApiKeyCache), services_of(request).get(RateLimiter)
    address, limit = client_network(request), settings_of(request).limits.unknown_keys_per_minute
    if limiter.is_throttled(address, limit) and not keys.has_seen(credential):
        message = f"More than {limit} requests with unknown API keys or tokens came from your address within a minute."
        raise RateLimited(message, code="too_many_unknown_keys", retry_after=60)
    try:
        found = await find()
    except Unauthorized as error:
        if error.code in UNKNOWN:
            await limiter.count_unknown_key(address, limit)
        raise
    keys.remember(credential)
    return found


def require_scope(scope: str) -> Callable[..., object]:
    """Return a dependency that gives the caller.

    The request takes a slot, and keeps it until the last byte of the reply, streamed or not: chat and feedback requests
    one of their key's limits, all others one of their project's.
    """

    async def limited_as_admin(request: Request, db: DatabaseDep, _: object = BEARER) -> AsyncIterator[Caller]:
        caller = await authenticate(request, db, scope)
        async with admin_slot(request, caller):
            yield caller

    async def rate_limited(request: Request, db: DatabaseDep, _: object = BEARER) -> AsyncIterator[Caller]:
        caller = await authenticate(request, db, scope)
        async with application_slot(request, caller):
            yield caller

    return checks_scope(scope)(rate_limited if scope in LIMITED_SCOPES else limited_as_admin)


@asynccontextmanager
async def application_slot(request: Request, caller: Caller) -> AsyncIterator[None]:
    """Count a chat or feedback request for the caller's key and its project. Raises RateLimited beyond their limits."""
    own_limits = (caller.requests_per_minute, caller.max_concurrency)
    project = caller.project_id, limits_of(request, caller).requests_per_minute
    async with services_of(request).get(RateLimiter).slot(caller.key_id, *own_limits, project) as headers:
        request.state.headers = headers
        yield


@asynccontextmanager
async def admin_slot(request: Request, caller: Caller) -> AsyncIterator[None]:
    """Count a request other than a chat or feedback for the caller's project. Raises RateLimited beyond its limits."""
    limiter, limit = services_of(request).get(RateLimiter), settings_of(request).limits.max_admin_concurrency
    request.state.project_id = caller.project_id
    message = f"This project may have {limit} requests other than chats and feedback under way at a time, and has."
    with limiter.concurrent(f"admin:{caller.project_id}", limit, message, "too_many_requests"):
        await count_admin_request(request, caller)
        yield


async def count_admin_request(request: Request, caller: Caller) -> None:
    limit = limits_of(request, caller).admin_requests_per_minute
    await services_of(request).get(RateLimiter).count_admin_request(caller.project_id, limit)


async def _require_token_budget(request: Request, db: Database, caller: Caller) -> None:
    """Raise RateLimited if the project has used its output tokens of this day. Replies under way are not counted."""
    limit = limits_of(request, caller).output_tokens_per_day
    if limit is None:
        return
    async with db.read() as session:
        used = await usage.count_output_tokens(session, caller.project_id)
    if used >= limit:
        message = (
            f"This project has used {used} output tokens today, and may use {limit} a day (output_tokens_per_day); "
            "the next day begins at 0:00 UTC."
        )
        raise RateLimited(message, code="project_limit", retry_after=3600)


ChatCaller = Annotated[Caller, Depends(require_scope("chat"))]


async def _with_token_budget(request: Request, db: DatabaseDep, caller: ChatCaller) -> Caller:
    await _require_token_budget(request, db, caller)
    return caller


GeneratingCaller = Annotated[Caller, Depends(_with_token_budget)]  # of requests that the model answers
FeedbackCaller = Annotated[Caller, Depends(require_scope("feedback"))]
ViewingCaller = Annotated[Caller, Depends(require_scope("viewer"))]
ContentCaller = Annotated[Caller, Depends(require_scope(CONTENT_SCOPE))]  # sees what people wrote, and who they are
OperatingCaller = Annotated[Caller, Depends(require_scope("operator"))]
AdminCaller = Annotated[Caller, Depends(require_scope("admin"))]
