"""Consent as it stands now: a key or a project may have said no since the turn was spoken."""

from sqlalchemy.ext.asyncio import AsyncSession

from app.models import ApiKey, Project, Turn
from app.projects.consent import NO_CONSENT


async def given(session: AsyncSession, turn: Turn) -> bool:
    if turn.exclusion_reason == NO_CONSENT:
        return False
    key = await session.get(ApiKey, turn.key_id) if turn.key_id is not None else None
    if key is not None and key.train is not None:
        return key.train
    return (await session.get_one(Project, turn.project_id)).train
