"""Queries on pins."""

from sqlalchemy import Select, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.errors import NotFound
from app.models import ApiKey, Pin, Version


async def pin(session: AsyncSession, policy_id: str, pin_id: str) -> tuple[Pin, Version]:
    """Raises NotFound."""
    found = (await session.execute(_pins(policy_id).where(Pin.id == pin_id))).one_or_none()
    if found is None:
        raise NotFound(f"There is no pin '{pin_id}'.", param="pin_id")
    return found[0], found[1]


async def pin_of(session: AsyncSession, policy_id: str, kind: str, subject: str) -> tuple[Pin, Version] | None:
    found = (await session.execute(_pins(policy_id).where(Pin.kind == kind, Pin.subject == subject))).one_or_none()
    return None if found is None else (found[0], found[1])


async def pins(
    session: AsyncSession, policy_id: str, kind: str | None, after: str | None, limit: int
) -> list[tuple[Pin, Version]]:
    """By id: a pin that is moved or removed meanwhile takes no other's place on a page."""
    asked = _pins(policy_id).order_by(Pin.id).limit(limit)
    if kind is not None:
        asked = asked.where(Pin.kind == kind)
    if after is not None:
        asked = asked.where(Pin.id > after)
    return [(row, version) for row, version in await session.execute(asked)]


async def keys(session: AsyncSession, project_id: str, named: str) -> list[ApiKey]:
    """By id or shown prefix, which two keys may have in common. Two at most are told."""
    asked = select(ApiKey).where(ApiKey.project_id == project_id, or_(ApiKey.id == named, ApiKey.prefix == named))
    return list(await session.scalars(asked.limit(2)))


def _pins(policy_id: str) -> Select[Pin, Version]:
    return select(Pin, Version).join(Version, Version.id == Pin.version_id).where(Pin.policy_id == policy_id)
