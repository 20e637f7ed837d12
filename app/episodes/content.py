"""Erases the content of episodes. Their times, their versions and their ends stay.

A person's erasure, and retention, erase what the caller has written about an episode (its task, its metadata, its group
and its trace) with its chats; the deletion of an episode erases all of its chats, too.
"""

from sqlalchemy import ColumnElement, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from app.chat import repository as chats
from app.core.database import Database, chunked, now
from app.core.errors import NotFound
from app.core.jobs import enqueue_after_commit
from app.models import REQUESTED, AuditAction, EndReason, Episode, EpisodeState, Turn, record_audit

STEP = 200  # episodes in one transaction
CHUNK = 64  # turns in one transaction
SECONDS_PER_DAY = 86_400.0
ERASED: dict[str, object] = {
    **dict.fromkeys(("task", "group_id", "trace_id", "idempotency_key")),
    "request_metadata": {},
}


async def erase(session: AsyncSession, project_id: str, *conditions: ColumnElement[bool], with_outcome: bool) -> None:
    """Erase the content of these episodes of a project, and with `with_outcome` how they went.

    Without its name an episode is no longer an attempt of its group: curation computes the samples of the others again.
    """
    of_project = (Episode.project_id == project_id, *conditions)
    groups = set(await session.scalars(select(Episode.group_id).where(*of_project, Episode.group_id.is_not(None))))
    values = {**ERASED, "erased_at": now()} | ({"outcome": None} if with_outcome else {})
    await session.execute(update(Episode).where(*of_project).values(values))
    for chunk in chunked({name for name in groups if name is not None}):
        others = (Episode.project_id == project_id, Episode.group_id.in_(chunk), Episode.state == EpisodeState.ENDED)
        await session.execute(update(Episode).where(*others).values(processed=False))
    if groups:
        enqueue_after_commit(session, "curate")


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


async def delete(db: Database, project_id: str, episode_id: str, actor: str) -> None:
    """Erase an episode with all its chats, and drop their samples. Raises NotFound.

    It ends first, as abandoned, so that it gets no further chat. What an interruption leaves, a repetition deletes.
    """
    of_episode = (Episode.id == episode_id, Episode.project_id == project_id)
    abandoned = {"state": EpisodeState.ENDED, "end_reason": EndReason.ABANDONED, "ended_at": now()}
    async with db.write() as session:
        found = await session.scalar(select(Episode.state).where(*of_episode).with_for_update())
        if found is None:
            raise NotFound(f"There is no episode '{episode_id}'.", param="episode_id")
        if found == EpisodeState.OPEN:
            await session.execute(update(Episode).where(*of_episode).values(abandoned))

    async def erase_chats(session: AsyncSession) -> int:
        has_content = (Turn.episode_id == episode_id, Turn.deleted_at.is_(None), Turn.origin.in_(REQUESTED))
        query = select(Turn).where(Turn.project_id == project_id, *has_content)
        turns = list(await session.scalars(query.order_by(Turn.created_at, Turn.id).limit(CHUNK)))
        if turns:
            await chats.erase(session, turns)
        return len(turns)

    while await db.retry_on_deadlock(erase_chats):
        await db.let_others_write()
    async with db.write() as session:
        await erase(session, project_id, Episode.id == episode_id, with_outcome=True)
        record_audit(session, actor, AuditAction.EPISODE_DELETED, episode_id, project_id=project_id)
