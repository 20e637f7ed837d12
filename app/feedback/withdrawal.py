"""Taking feedback back: a row that says so, as nothing is ever erased here."""

import hashlib
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from app.core.jobs import enqueue_after_commit
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
    session.add(_tombstone(row, processed=not matters))
    if matters:
        enqueue_after_commit(session, "curate")
    return view | {"counts": False, "withdrawn": True}


def _tombstone(row: queries.Row, *, processed: bool) -> Feedback:
    same = ("project_id", "turn_id", "conversation_id", "target", "name", "source_kind", "source_id")
    return Feedback(
        id=new_id("fb"),
        kind=WITHDRAWAL,
        request_metadata={"withdraws": row["id"]},
        idempotency_key=new_id("auto"),
        fingerprint=hashlib.sha256(row["id"].encode()).hexdigest(),
        processed=processed,
        **{column: row[column] for column in same},
    )
