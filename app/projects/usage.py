"""What a project has used today: output tokens of its requests, which are added up off the hot path."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import database_time, dialect_insert
from app.models import REQUESTED, ProjectUsage, Turn

DAY_SECONDS = 86_400


async def add_output_tokens(session: AsyncSession, turns: Sequence[Any]) -> None:
    """Add the tokens of finished turns, once for each: the caller marks them as processed in the same transaction.

    Replies that the service samples for itself cost the project nothing.
    """
    added: Counter[tuple[str, int]] = Counter()
    for turn in turns:
        if turn.origin in REQUESTED and turn.num_output_tokens and turn.finished_at is not None:
            added[turn.project_id, int(turn.finished_at // DAY_SECONDS)] += turn.num_output_tokens
    if not added:
        return
    rows = [
        {"project_id": project, "day": day, "output_tokens": count} for (project, day), count in sorted(added.items())
    ]
    statement = dialect_insert(session, ProjectUsage).values(rows)
    total = ProjectUsage.output_tokens + statement.excluded.output_tokens
    upsert = statement.on_conflict_do_update(index_elements=["project_id", "day"], set_={"output_tokens": total})
    await session.execute(upsert)


async def count_output_tokens(session: AsyncSession, project_id: str) -> int:
    """Return the output tokens of requests that finished today, in UTC: those added up, and those that wait for it."""
    day = int(await database_time(session)) // DAY_SECONDS
    # In this order: tokens that are added up between the two are counted twice rather than not at all.
    waiting = await session.scalar(
        select(func.sum(Turn.num_output_tokens)).where(
            Turn.project_id == project_id,
            Turn.finished_at >= day * DAY_SECONDS,
            ~Turn.processed,
            Turn.origin.in_(REQUESTED),
        )
    )
    stored = await session.scalar(
        select(ProjectUsage.output_tokens).where(ProjectUsage.project_id == project_id, ProjectUsage.day == day)
    )
    return int(stored or 0) + int(waiting or 0)
