"""Who is calling: the bearer key, its project and its scopes."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from app.db import Database
from app.errors import Forbidden, Unauthorized
from app.projects import keys


@dataclass(frozen=True)
class Caller:
    project_id: str
    key_id: str
    key_prefix: str
    scopes: tuple[str, ...]
    train: bool  # consent: may its turns be learned from?


def database(request: Request) -> Database:
    db: Database = request.app.state.db
    return db


DatabaseDep = Annotated[Database, Depends(database)]


def caller(scope: str) -> Callable[[Request, Database], Awaitable[Caller]]:
    async def authenticate(request: Request, db: DatabaseDep) -> Caller:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise Unauthorized("Send your API key as 'Authorization: Bearer sk-attune-…'.")
        async with db.read() as session:
            row = await keys.find(session, key.strip())
        if row is None:
            raise Unauthorized("This API key is unknown or revoked.")
        if scope not in row.scopes:
            raise Forbidden(f"This API key lacks the scope '{scope}'.")
        return Caller(row.project_id, row.id, row.prefix, tuple(row.scopes), row.train is not False)

    return authenticate


ChatCaller = Annotated[Caller, Depends(caller("chat"))]
FeedbackCaller = Annotated[Caller, Depends(caller("feedback"))]
AdminCaller = Annotated[Caller, Depends(caller("admin"))]
