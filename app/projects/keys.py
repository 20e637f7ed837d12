"""API keys: made once, shown once, kept as a hash."""

import hashlib
import math
import secrets
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import now
from app.models import ApiKey, Project, new_id

SCOPES = ("chat", "feedback", "admin")


@dataclass(frozen=True)
class Found:
    key: ApiKey
    project_trains: bool
    lives_for: float  # seconds, on the database's clock


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def alive() -> ColumnElement[bool]:
    """Neither revoked nor expired, on the database's clock."""
    return ApiKey.revoked_at.is_(None) & or_(ApiKey.expires_at.is_(None), ApiKey.expires_at > now())


async def create(
    session: AsyncSession,
    project_id: str,
    scopes: tuple[str, ...] = SCOPES,
    *,
    expires_in: float | None = None,
    **values: Any,
) -> tuple[ApiKey, str]:
    """The row and, this one time, the key itself."""
    key = f"sk-attune-{secrets.token_urlsafe(32)}"
    row = ApiKey(
        id=new_id("key"),
        project_id=project_id,
        prefix=key[:16],
        sha256=digest(key),
        scopes=list(scopes),
        expires_at=None if expires_in is None else now() + expires_in,
        **values,
    )
    session.add(row)
    await session.flush()
    await session.refresh(row)
    return row, key


async def find(session: AsyncSession, sha256: str) -> Found | None:
    """By hash alone: the key itself never reaches the database."""
    asked = (
        select(ApiKey, Project.train, (ApiKey.expires_at - now()).label("lives_for"))
        .join(Project, Project.id == ApiKey.project_id)
        .where(ApiKey.sha256 == sha256, alive())
    )
    row = (await session.execute(asked)).one_or_none()
    if row is None:
        return None
    return Found(row[0], row[1], math.inf if row.lives_for is None else row.lives_for)
