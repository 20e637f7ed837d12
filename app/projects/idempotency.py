"""Idempotency keys of admin requests: a POST that is sent again with its Idempotency-Key has no second effect.

The key is recorded in the request's first write transaction: it is known if, and only if, the request had an effect.
The response is stored afterwards, and answers repetitions for a day. A response with `cache-control: no-store` holds a
secret and is not stored.

Source: the IETF draft draft-ietf-httpapi-idempotency-key-header.
"""

import hashlib
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Header, Request, Response
from fastapi.routing import APIRoute
from sqlalchemy import delete, select, update
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import REQUEST_WORK, Database, dialect_insert, now
from app.core.errors import BadRequest, Conflict, Unprocessable
from app.core.http import read_body, settings_of
from app.models import IdempotentRequest
from app.projects.auth import DatabaseDep, authenticate, count_admin_request
from app.projects.scopes import required_scope

log = logging.getLogger("attune.idempotency")
LIFETIME_SECONDS = 86_400.0
HEADER = "Idempotency-Key"


class Replay(Exception):
    """Ends a request whose response is that of an earlier one."""

    def __init__(self, response: Response) -> None:
        super().__init__()
        self.response = response


@dataclass(frozen=True)
class KeyedRequest:
    """A request with an Idempotency-Key. `request_id` tells it from others with the same key."""

    db: Database
    project_id: str
    key: str
    request_id: str
    fingerprint: str

    async def find_response(self) -> Response | None:
        """Return the response to the earlier request with this key, or None if there was none.

        Raises Unprocessable if that request was another one, Conflict if it had an effect but its response is unknown.
        """
        query = select(IdempotentRequest).where(
            IdempotentRequest.project_id == self.project_id,
            IdempotentRequest.key == self.key,
            IdempotentRequest.created_at > now() - LIFETIME_SECONDS,
        )
        async with self.db.read() as session:
            row = await session.scalar(query)
        if row is None:
            return None
        if row.fingerprint != self.fingerprint:
            message = f"This {HEADER} was used for another request; use a new one for each request."
            raise Unprocessable(message, code="idempotency_key_reused", param=HEADER)
        if row.status is None or row.response is None:
            message = (
                "The request with this key was carried out, at least in part, and its response is not stored. See what "
                "it has done before you send it with a new key."
            )
            raise Conflict(message, code="idempotency_key_used", param=HEADER)
        return Response(row.response, row.status, {"idempotent-replayed": "true"}, media_type="application/json")

    async def record(self, session: AsyncSession) -> None:
        """Record the key in a write transaction of the request; raise Conflict if another request has recorded it."""
        is_expired = IdempotentRequest.created_at <= now() - LIFETIME_SECONDS
        await session.execute(
            delete(IdempotentRequest).where(IdempotentRequest.project_id == self.project_id, is_expired)
        )
        row = {name: getattr(self, name) for name in ("project_id", "key", "request_id", "fingerprint")}
        insert = dialect_insert(session, IdempotentRequest).values(**row, created_at=now())
        await session.execute(insert.on_conflict_do_nothing())
        recorded = await session.scalar(select(IdempotentRequest.request_id).where(*self._is_same()))
        if recorded != self.request_id:
            message = f"Another request with this {HEADER} is being carried out; send it again for its response."
            raise Conflict(message, code="idempotency_key_in_use", param=HEADER)

    async def store(self, response: Response) -> None:
        """Store the response if the request had an effect."""
        values = {"status": response.status_code, "response": bytes(response.body).decode()}
        is_own = IdempotentRequest.request_id == self.request_id
        try:
            async with self.db.write() as session:
                await session.execute(update(IdempotentRequest).where(*self._is_same(), is_own).values(values))
        except SQLAlchemyError as error:  # the request itself has succeeded
            log.warning("the response to a request with an Idempotency-Key was not stored: %s", error)

    def _is_same(self) -> tuple[Any, Any]:
        return (IdempotentRequest.project_id == self.project_id, IdempotentRequest.key == self.key)


async def _recognize(
    request: Request,
    db: DatabaseDep,
    idempotency_key: Annotated[str | None, Header(min_length=1, max_length=255)] = None,
) -> None:
    """Raise Replay if a request with this key was answered before; otherwise its key is recorded with its effect."""
    if idempotency_key is None:
        return
    scope = required_scope(request.scope["route"])
    if scope is None:
        raise AssertionError(f"{request.url.path} takes an {HEADER} and needs no scope")
    caller = await authenticate(request, db, scope)  # before a stored response is shown
    if "\x00" in idempotency_key:
        raise BadRequest(f"An {HEADER} cannot hold a NUL character.", param=HEADER)
    body = await read_body(request, settings_of(request).server.max_body_bytes)
    line = f"{request.method} {request.url.path}?{request.url.query}\n".encode()
    fingerprint = hashlib.sha256(line + body).hexdigest()
    keyed = KeyedRequest(db, caller.project_id, idempotency_key, request.state.request_id, fingerprint)
    if (response := await keyed.find_response()) is not None:
        await count_admin_request(request, caller)
        raise Replay(response)
    request.state.keyed_request = keyed
    REQUEST_WORK.set(keyed.record)


class IdempotentRoute(APIRoute):
    """The `route_class` of routers for admins: their POST routes take an Idempotency-Key."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        dependencies = list(options.get("dependencies") or ())
        is_added = any(each.dependency is _recognize for each in dependencies)
        if "POST" in (options.get("methods") or ()) and not is_added:
            dependencies.append(Depends(_recognize))
        super().__init__(path, endpoint, **options | {"dependencies": dependencies})

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_once(request: Request) -> Response:
            try:
                response = await handle(request)
            except Replay as replay:
                return replay.response
            finally:
                REQUEST_WORK.set(None)
            keyed: KeyedRequest | None = getattr(request.state, "keyed_request", None)
            if keyed is not None and response.headers.get("cache-control") != "no-store":
                await keyed.store(response)
            return response

        return handle_once


async def _forbid_storage(response: Response) -> None:
    response.headers["cache-control"] = "no-store"


SHOWS_SECRET = Depends(_forbid_storage)  # of routes whose response holds a secret
