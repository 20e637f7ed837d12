"""API keys: created once, shown once, stored as a hash."""

import hashlib
import secrets
from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import now
from app.core.errors import Conflict, require_row
from app.core.pagination import apply_keyset
from app.models import ApiKey, AuditAction, Project, new_id, record_audit

SCOPES = ("chat", "feedback", "admin")


def digest(key: str) -> str:
    """Return the SHA-256 of a key, as hex."""
    return hashlib.sha256(key.encode()).hexdigest()


def is_active() -> ColumnElement[bool]:
    """Return the condition that an ApiKey is neither revoked nor expired, on the database's clock."""
    return ApiKey.revoked_at.is_(None) & or_(ApiKey.expires_at.is_(None), ApiKey.expires_at > now())


async def create(
    session: AsyncSession,
    project_id: str,
    scopes: Sequence[str] = SCOPES,
    *,
    actor: str | None = None,
    expires_in: float | None = None,
    **values: Any,
) -> tuple[ApiKey, str]:
    """Add a key. Returns its row and the key itself, which cannot be read again.

    Args:
        actor: Who creates the key, for the audit log; without one there is no entry.
        values: Further columns of ApiKey.
    """
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
    if actor is not None:
        record_audit(session, actor, AuditAction.KEY_CREATED, row.id, project_id=project_id, scopes=row.scopes)
    return row, key


async def get_key(session: AsyncSession, project_id: str, key_id: str, *, param: str = "key_id") -> ApiKey:
    """Return a key of a project, revoked or not. Raises NotFound, which names `param`."""
    row = await session.scalar(select(ApiKey).where(ApiKey.project_id == project_id, ApiKey.id == key_id))
    return require_row(row, f"There is no key '{key_id}'.", param=param)


async def list_keys(session: AsyncSession, project_id: str, after: str | None, limit: int) -> Sequence[ApiKey]:
    """Return up to `limit + 1` keys of a project after this id, revoked ones included, the oldest first."""
    last = None if after is None else await get_key(session, project_id, after, param="after")
    query = select(ApiKey).where(ApiKey.project_id == project_id)
    return (await session.scalars(apply_keyset(query, (ApiKey.created_at, ApiKey.id), last, limit))).all()


async def revoke(session: AsyncSession, project_id: str, key_id: str, *, actor: str) -> ApiKey:
    """Revoke a key; a revoked key stays as it is. Raises NotFound, and Conflict for the project's last admin key."""
    await session.get_one(
        Project, project_id, with_for_update=True
    )  # two admins who revoke each other's key take turns
    row = await get_key(session, project_id, key_id)
    if row.revoked_at is not None:
        return row
    others = select(ApiKey.scopes).where(ApiKey.project_id == project_id, ApiKey.id != key_id, is_active())
    if not any("admin" in scopes for scopes in await session.scalars(others)):
        raise Conflict(
            "This is the project's last admin key; make another before you revoke it.", code="last_admin_key"
        )
    row.revoked_at = now()
    await session.flush()
    await session.refresh(row)
    record_audit(session, actor, AuditAction.KEY_REVOKED, row.id, project_id=project_id)
    return row
