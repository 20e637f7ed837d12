"""API keys: created once, shown once, stored as a hash."""

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
class ActiveKey:
    """A key that is neither revoked nor expired, with its project's consent to train."""

    key: ApiKey
    project_train: bool
    remaining_seconds: float  # until it expires, on the database's clock; infinite for a key that does not expire


def digest(key: str) -> str:
    """Return the SHA-256 of a key, as hex."""
    return hashlib.sha256(key.encode()).hexdigest()


def is_active() -> ColumnElement[bool]:
    """Return the condition that an ApiKey is neither revoked nor expired, on the database's clock."""
    return ApiKey.revoked_at.is_(None) & or_(ApiKey.expires_at.is_(None), ApiKey.expires_at > now())


async def create(
    session: AsyncSession,
    project_id: str,
    scopes: tuple[str, ...] = SCOPES,
    *,
    expires_in: float | None = None,
    **values: Any,
) -> tuple[ApiKey, str]:
    """Add a key. Returns its row and the key itself, which cannot be read again."""
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


async def find_active(session: AsyncSession, sha256: str) -> ActiveKey | None:
    """Return the active key with this hash. The key itself never reaches the database."""
    query = (
        select(ApiKey, Project.train, (ApiKey.expires_at - now()).label("remaining_seconds"))
        .join(Project, Project.id == ApiKey.project_id)
        .where(ApiKey.sha256 == sha256, is_active())
    )
    row = (await session.execute(query)).one_or_none()
    if row is None:
        return None
    return ActiveKey(row[0], row[1], math.inf if row.remaining_seconds is None else row.remaining_seconds)
