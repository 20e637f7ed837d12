"""Votes that a connector has sent and that are about no reply of ours, counted: other models' replies get thumbs, too.

Front ends would send such a vote for ever, or report a failure, if it were refused; so it is taken, and shown here.
"""

from collections import Counter
from collections.abc import Sequence
from enum import StrEnum

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import Database, dialect_insert, now
from app.models import UnmatchedVotes


class Reason(StrEnum):
    """Why a vote is about nothing that is known."""

    UNKNOWN_REPLY = "unknown_reply"
    UNKNOWN_CONVERSATION = "unknown_conversation"
    NO_REPLY_NAMED = "no_reply_named"  # it names neither a reply nor a conversation


async def count_unmatched(db: Database, project_id: str, connector: str, reasons: Sequence[Reason]) -> None:
    """Add votes that came just now to the counts of the project."""
    if not reasons:
        return
    rows = [
        {"project_id": project_id, "connector": connector, "reason": str(reason), "num_votes": number, "last_at": now()}
        for reason, number in sorted(Counter(reasons).items())  # all transactions lock in this order
    ]
    async with db.write() as session:
        insert = dialect_insert(session, UnmatchedVotes).values(rows)
        changed = {
            "num_votes": UnmatchedVotes.num_votes + insert.excluded.num_votes,
            "last_at": insert.excluded.last_at,
        }
        key = ["project_id", "connector", "reason"]
        await session.execute(insert.on_conflict_do_update(index_elements=key, set_=changed))


async def list_unmatched(session: AsyncSession, project_id: str) -> list[UnmatchedVotes]:
    """Return the counts of a project, by connector and reason."""
    rows = select(UnmatchedVotes).where(UnmatchedVotes.project_id == project_id)
    return list(await session.scalars(rows.order_by(UnmatchedVotes.connector, UnmatchedVotes.reason)))
