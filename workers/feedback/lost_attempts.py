"""Attempts that say nothing of how the agent did: abandoned ones, and those whose infrastructure failed.

Rewards of automated sources for their turns would be learned from as if somebody had seen how the attempt went.
"""

from collections.abc import Collection, Mapping, Sequence

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import chunked
from app.models import LOST_REASONS, EndReason, Episode
from app.raters.names import is_person
from workers.feedback.signals import FinishedTurn

REASON = "its episode was abandoned and no person judged it, or its infrastructure failed"


def is_lost() -> ColumnElement[bool]:
    """Return the condition that an Episode is such an attempt. A report counts also after a limit has ended it."""
    return func.coalesce(Episode.reported_reason, Episode.end_reason, "").in_(LOST_REASONS)


async def find_turns_of_lost(
    session: AsyncSession, turns: Sequence[FinishedTurn], raters: Mapping[str, Collection[str]]
) -> set[str]:
    """Return those of the turns that are of such attempts, except abandoned ones that people judged.

    `raters` are by turn the names of all whose feedback is a part of its reward.
    """
    ids = {turn.episode_id for turn in turns if turn.episode_id is not None}
    reasons: dict[str | None, str] = {}
    for chunk in chunked(ids):
        reason = func.coalesce(Episode.reported_reason, Episode.end_reason)
        rows = await session.execute(select(Episode.id, reason).where(Episode.id.in_(chunk), is_lost()))
        reasons |= {id: found for id, found in rows}
    return {
        turn.id
        for turn in turns
        if turn.episode_id in reasons
        and (
            reasons[turn.episode_id] == EndReason.INFRASTRUCTURE
            or not any(is_person(rater) for rater in raters[turn.id])
        )
    }
