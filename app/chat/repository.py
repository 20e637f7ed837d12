"""Queries on turns."""

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app.models import Policy, Turn, Version


async def turn(session: AsyncSession, project_id: str, turn_id: str) -> tuple[Turn, Policy, Version] | None:
    found = await session.execute(
        select(Turn, Policy, Version)
        .join(Policy, Policy.id == Turn.policy_id)
        .join(Version, Version.id == Turn.version_id)
        .where(Turn.id == turn_id, Turn.project_id == project_id)
    )
    row = found.one_or_none()
    return None if row is None else (row[0], row[1], row[2])
