"""Erases what a caller has written about an episode: its task and its metadata. Its times and its end stay."""

from typing import Any

from sqlalchemy import ColumnElement, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import Database, now
from app.models import Episode, EpisodeState, Turn

STEP = 200  # episodes in one transaction
SECONDS_PER_DAY = 86_400.0
ERASED: dict[str, Any] = {"task": None, "request_metadata": {}, "idempotency_key": None}


async def erase(session: AsyncSession, project_id: str, *conditions: ColumnElement[bool], with_outcome: bool) -> None:
    """Erase the content of these episodes of a project, and with `with_outcome` how they went."""
    values = {**ERASED, "erased_at": now()} | ({"outcome": None} if with_outcome else {})
    await session.execute(update(Episode).where(Episode.project_id == project_id, *conditions).values(values))


async def erase_expired(db: Database, project_id: str, days: float) -> int:
    """Erase the content of up to STEP ended episodes that are older, and whose turns have expired. Returns how many."""
    has_content = select(Turn.id).where(Turn.episode_id == Episode.id, Turn.deleted_at.is_(None)).exists()
    query = select(Episode.id).where(
        Episode.project_id == project_id,
        Episode.state == EpisodeState.ENDED,
        Episode.erased_at.is_(None),
        Episode.created_at < now() - days * SECONDS_PER_DAY,
        ~has_content,
    )
    async with db.read() as session:
        ids = list(await session.scalars(query.order_by(Episode.created_at, Episode.id).limit(STEP)))
    if ids:
        async with db.write() as session:
            await erase(session, project_id, Episode.id.in_(ids), with_outcome=False)
    return len(ids)
