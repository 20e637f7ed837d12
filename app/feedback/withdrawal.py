"""Taking feedback back: a row that says so, as nothing is ever erased here."""

import hashlib
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from app.core.jobs import nudge
from app.feedback import queries, repository
from app.feedback.kinds import NUMBERS, ORDERS
from app.feedback.schemas import WITHDRAWAL
from app.models import Feedback, new_id


async def withdraw(session: AsyncSession, project_id: str, feedback_id: str) -> dict[str, Any]:
    """The feedback as it stands afterwards. One that no longer counts is left as it is."""
    await (await session.connection()).run_sync(repository.in_turn, [project_id])
    row = await queries.one(session, project_id, feedback_id)
    [view] = await queries.views(session, project_id, [row])
    if not view["counts"]:
        return view
    matters = row["kind"] in (*NUMBERS, *ORDERS)
    session.add(_tombstone(row, curated=not matters))
    if matters:
        nudge(session, "curate")
    return view | {"counts": False, "withdrawn": True}


def _tombstone(row: queries.Row, *, curated: bool) -> Feedback:
    same = ("project_id", "turn_id", "conversation_id", "target", "name", "source_kind", "source_id")
    return Feedback(
        id=new_id("fb"),
        kind=WITHDRAWAL,
        details={"withdraws": row["id"]},
        idempotency_key=new_id("auto"),
        fingerprint=hashlib.sha256(row["id"].encode()).hexdigest(),
        curated=curated,
        **{column: row[column] for column in same},
    )
