"""API keys: made once, shown once, kept as a hash."""

import hashlib
import secrets

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app.models import ApiKey, new_id

SCOPES = ("chat", "feedback", "admin")


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


async def create(session: AsyncSession, project_id: str, scopes: tuple[str, ...] = SCOPES) -> tuple[ApiKey, str]:
    """The row and, this one time, the key itself."""
    key = f"sk-attune-{secrets.token_urlsafe(32)}"
    row = ApiKey(id=new_id("key"), project_id=project_id, prefix=key[:16], sha256=digest(key), scopes=list(scopes))
    session.add(row)
    await session.flush()
    return row, key


async def find(session: AsyncSession, key: str) -> ApiKey | None:
    return await session.scalar(select(ApiKey).where(ApiKey.sha256 == digest(key), ApiKey.revoked_at.is_(None)))
